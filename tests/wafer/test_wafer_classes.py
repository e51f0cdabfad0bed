"""Two classes of stages in one pipeline, against plain evaluators, brute force and packets."""

from __future__ import annotations

import itertools
import json
import math
import random

import numpy as np
import pytest
from mapping_cases import CLOSE, arguments, packed, random_case, random_op_mappings, tighten
from reference import mapping_oracle as oracle
from wafer_class_cases import (
    KINDS,
    compiled_at_random,
    drawn,
    elsewhere,
    every_pair,
    fastest,
    plain_step,
)
from wafer_tiny_cases import tiny_problem

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import Effort, Encoding, evaluate, search_mapping
from phaze_fast.wafer.mapping.details import causes
from phaze_fast.wafer.mapping.evaluate import evaluation_of_classes
from phaze_fast.wafer.mapping.layout import slots_of
from phaze_fast.wafer.search.bounds import any_placement_bound
from phaze_fast.wafer.search.class_search import improved_classes

PLAIN = {"chunks": 1, "zero_bubble": 0}


# ---- the kernel: stages as a part of a longer pipeline ----


def part_of(case, op_mappings, first, count, others=(0.0, 0.0, 0.0, None)):
    """Compile `count` stages of a pipeline from `first` on."""
    given = arguments(case)
    rules = given["rules"].copy()
    rules["first_stage"], rules["pipeline_stages"] = first, len(case.blocks)
    given["rules"] = rules
    given["blocks"] = given["blocks"][first : first + count].copy()
    given["boundary_s"] = given["boundary_s"][first : first + count].copy()
    mapping = _core.Mapping(**given)
    mapping.assign(packed(op_mappings))
    mapping.set_others(*others)
    return mapping


def others_of(mapping):
    """What the stages of a class take and stream, as the other class is told."""
    streams = np.ascontiguousarray(mapping.stages()[0]["streams"])
    tail_s = float(mapping.score()["tail_s"][0])
    return streams["isolated_s"].sum(), streams["isolated_s"].max(), tail_s, streams


def test_stages_of_a_class_are_those_of_the_whole_pipeline():
    """A pipeline cut in two anywhere has the stages, and the step, that it has as one."""
    rng = random.Random(4)
    cut = 0
    while cut < 60:
        case = random_case(rng)
        case.rules |= PLAIN | {"outer_tail_s": 0.0}
        if len(case.blocks) < 2:
            continue
        cut += 1
        op_mappings = random_op_mappings(rng, case)
        tighten(rng, case, op_mappings)
        time_s, stages = oracle.evaluate(case, op_mappings)
        border = rng.randrange(1, len(stages))
        first = part_of(case, op_mappings, 0, border)
        second = part_of(case, op_mappings, border, len(stages) - border)
        if case.cross_stage_s:  # streams are priced for the stages of each by themselves
            own = [case.cross_stage_s[k][k] for k in range(len(stages))]
            case.cross_stage_s = tuple(
                tuple(own[0] if j == k else cost for j, cost in enumerate(row))
                for k, row in enumerate(case.cross_stage_s)
            )
            first = part_of(case, op_mappings, 0, border)
            second = part_of(case, op_mappings, border, len(stages) - border)
            # Ways that tie for one stage may stream more or less past the others.
            ways = [*first.stages()[1].tolist(), *second.stages()[1].tolist()]
            given = [dict(enumerate(row)) for row in ways]
            time_s, stages = oracle.evaluate(case, op_mappings, given)
        one, other = others_of(first), others_of(second)
        second.set_others(*one)
        first.set_others(*other)
        found = [*first.stages()[0]["load_s"], *second.stages()[0]["load_s"]]
        assert found == pytest.approx([s.load_s for s in stages], rel=CLOSE)
        memory = [*first.stages()[0]["over_bytes"], *second.stages()[0]["over_bytes"]]
        slack = 1e-11 * max(s.memory_bytes for s in stages)
        assert memory == pytest.approx([s.over_bytes for s in stages], abs=slack)
        score = second.score()[0]
        assert score["time_s"] == pytest.approx(time_s, rel=CLOSE)
        assert first.score()["time_s"][0] == pytest.approx(time_s, rel=CLOSE)
        # A bound of one class that knows the other is one of the whole.
        fits = sum(s.over_bytes for s in stages) == 0.0
        streams = max(s.stream_bytes for s in stages) > case.rules["stream_capacity_bytes"]
        if fits and not streams:
            assert second.relaxation().bound(1.0, 0.0)[0] <= time_s * (1 + 1e-12)
            assert second.relaxation().bound(0.5, 0.1)[0] <= time_s * (1 + 1e-12)


@pytest.mark.parametrize(
    "rules",
    [
        {"first_stage": -1, "pipeline_stages": 3},
        {"first_stage": 1, "pipeline_stages": 1},
        {"first_stage": 1, "pipeline_stages": 0},
        {"first_stage": 0, "pipeline_stages": 2, "zero_bubble": 1},
        {"first_stage": 0, "pipeline_stages": 2, "other_sum_s": -1.0},
        {"first_stage": 0, "pipeline_stages": 0, "other_tail_s": 1.0},
    ],
)
def test_a_place_that_is_none_is_refused(rules):
    rng = random.Random(5)
    case = random_case(rng, stages=1)
    case.rules |= PLAIN | rules
    with pytest.raises(InvalidInputError):
        _core.Mapping(**arguments(case))
    case.rules |= dict.fromkeys(rules, 0)
    with pytest.raises(InvalidInputError, match="others"):
        _core.Mapping(**arguments(case)).set_others(1.0, 1.0, 1.0)


# ---- whole mappings: a plain evaluator, and brute force ----


@pytest.mark.parametrize("kind", KINDS)
def test_whole_mappings_agree_with_a_plain_evaluator(kind):
    rng = random.Random(kind)
    checked, spread, shared = 0, 0, 0
    while checked < 20:
        problem = elsewhere(tiny_problem(rng), rng, kind)
        classes = compiled_at_random(rng, problem, 300)
        if classes is None:
            continue
        checked += 1
        spread += len(classes.placement.by_wafer) > 1
        shared += classes.layouts[0].replicas > 1
        plain = [
            drawn(rng, mapping, len(slots_of(each.width, each.height)), len(problem.modes))
            for mapping, each in zip(classes.mappings, classes.layouts, strict=True)
        ]
        time_s, stages = plain_step(problem, classes, plain)
        found = evaluation_of_classes(classes)
        assert found.time_s == pytest.approx(time_s, rel=1e-9)
        assert [s.load_s for s in found.stages] == pytest.approx(
            [s.load_s for s in stages], rel=1e-9
        )
        assert found.memory_bytes == pytest.approx(max(s.memory_bytes for s in stages), rel=1e-9)
        again = Encoding.from_list(json.loads(found.encoding.to_json()))
        assert again == found.encoding
        assert evaluate(problem, again).time_s == found.time_s
        if found.fits:
            assert sum(causes(problem, found).values()) == pytest.approx(found.time_s)
    assert kind in ("mesh", "switch") or (spread and shared)


PAIRS_OF_SHAPES = [
    ("mesh", 4, 0.95),
    pytest.param("mesh", 20, 0.95, marks=pytest.mark.slow),
    *((kind, 3, 0.9) for kind in KINDS if kind != "mesh"),
    *(pytest.param(kind, 15, 0.85, marks=pytest.mark.slow) for kind in KINDS if kind != "mesh"),
]
"""Kind of wafer, number of problems, and the share of pairs whose search must come within 1%."""


@pytest.mark.parametrize(("kind", "cases", "share"), PAIRS_OF_SHAPES)
def test_brute_force_over_every_pair_of_shapes_and_split_of_blocks(kind, cases, share):
    """A search of one pair comes near its best; no bound is above the best of all."""
    rng = random.Random(f"{kind}{cases}")
    done, near, tried = 0, 0, 0
    while done < cases:
        problem = elsewhere(tiny_problem(rng), rng, kind)
        if problem.work.blocks not in (2, 3) or len(problem.work.operators) > 3:
            continue
        best = math.inf
        for pair in itertools.islice(every_pair(problem), 12):
            time_s = fastest(problem, pair)
            if time_s is None or time_s == math.inf:
                continue
            best = min(best, time_s)
            found, _ = improved_classes(problem, pair, [], 300, 0)
            assert not found.fits or found.time_s >= time_s * (1 - 1e-9)
            tried, near = tried + 1, near + (found.fits and found.time_s <= 1.01 * time_s)
        if best == math.inf:
            continue
        done += 1
        assert any_placement_bound(problem) <= best * (1 + 1e-12)
        result = search_mapping(problem, Effort(seeds=1, steps=200, promising=2))
        assert result.bound_s <= result.best.time_s * (1 + 1e-12)
        if result.best.encoding.second_class is not None:
            assert "any shapes" in result.bound_space
            assert result.bound_s <= best * (1 + 1e-12)
    assert near >= share * tried > 0
