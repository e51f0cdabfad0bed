"""Two groups of dies that share every block: plain evaluators, a play, brute force, one-line faults."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import pytest
from reference import mapping_oracle as oracle
from reference import pipeline_events
from split_block_cases import (
    compiled,
    every_split,
    fastest,
    messages,
    plain_step,
    splits_at_random,
    two_products,
)
from wafer.test_wafer_classes import case_of, drawn
from wafer.test_wafer_tiny import tiny_problem

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets
from phaze_fast.opgraph.strategy import Strategy
from phaze_fast.wafer import (
    Effort,
    Encoding,
    Layout,
    Problem,
    WaferTraining,
    describe,
    die_map,
    evaluate,
    search_mapping,
)
from phaze_fast.wafer.bounds import any_placement_bound
from phaze_fast.wafer.class_search import improved
from phaze_fast.wafer.classes import Classes
from phaze_fast.wafer.details import details
from phaze_fast.wafer.evaluate import evaluation_of_classes
from phaze_fast.wafer.layout import slots_of
from phaze_fast.wafer.operators import workload
from phaze_fast.wafer.outcome import MappingResult
from phaze_fast.wafer.split_block import (
    SplitBlock,
    cut_behind,
    cut_points,
    group_layout,
    halves,
)
from phaze_fast.wafer.split_search import split_pairs
from phaze_fast.wafer.stacks import mesh_block

TILE = presets.wafer("dojo-tile-like")

# ---- where blocks are cut ----


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        ("llama2-7b", ["attention-residual"]),
        ("gpt3-13b", ["attention-residual"]),
        ("mixtral-8x7b", ["attention-residual"]),
        ("bertlarge", ["attention-residual", "attention-norm", "ffn-residual"]),
    ],
)
def test_halves_have_all_of_a_block_once(name, cuts):
    model = models.load(name)
    work = workload(model)
    assert [work.operators[at].name for at in cut_points(work)] == cuts
    # What either half receives is kept there, and is as large as what the other one receives.
    kept = mesh_block(model, Strategy(seq=None)).kept
    sizes = {
        name: sum(
            t.bytes
            for t in kept
            if t.producer == name and not (t.statistic or t.name.endswith("-mask"))
        )
        for name in ("input", *cuts)
    }
    assert set(sizes.values()) == {work.boundary_bytes}
    for cut in cut_points(work):
        first, second = halves(work, cut)
        assert first.operators + second.operators == work.operators
        assert first.parameters + second.parameters == work.parameters
        assert first.entering == {cut}
        assert {e.source for e in second.edges if e.kind == "wrap"} == {second.chain[-1]}
        assert len(first.edges) + len(second.edges) == len(work.edges)
        assert first.chain + tuple(at + cut + 1 for at in second.chain) == work.chain
        assert cut_behind(work, [op.name for op in first.operators]) == cut


def test_a_tensor_beside_the_cut_or_an_output_that_is_not_kept_prevents_it():
    rng = random.Random(2)
    seen = set()
    for _ in range(300):
        work = tiny_problem(rng).work
        for at, op in enumerate(work.operators[:-1]):
            passed = {
                e.source for e in work.edges if e.source <= at < e.target and e.kind == "inside"
            }
            inside = op.part == work.operators[at + 1].part == "block"
            assert (at in cut_points(work)) == (inside and passed == {at} and op.output_kept)
            seen.add((inside, len(passed), op.output_kept))
    assert len(seen) > 4


# ---- whole mappings: a plain evaluator of its own ----


def test_whole_mappings_agree_with_a_plain_evaluator_and_a_play():
    rng = random.Random(6)
    streamed = 0
    for problem, split in splits_at_random(rng, 40):
        plain = [
            drawn(rng, mapping, len(slots_of(each.width, each.height)), len(problem.modes))
            for mapping, each in zip(split.mappings, split.layouts, strict=True)
        ]
        time_s, stages, timeline = plain_step(problem, split, plain)
        found = evaluation_of_classes(split)
        assert found.time_s == pytest.approx(time_s, rel=1e-9)
        assert [s.load_s for s in found.stages] == pytest.approx(
            [s.load_s for s in stages], rel=1e-9
        )
        assert found.memory_bytes == pytest.approx(max(s.memory_bytes for s in stages), rel=1e-9)
        streamed += max(s.taken_bytes for s in stages) > 0
        # Activations in flight are those of the play.
        blocks = problem.work.blocks
        held = pipeline_events.peaks(timeline, [[1.0] * blocks] * 2)
        for which in (0, 1):
            rules = oracle.in_flight(case_of(split.part(which), split, which).rules, 2, which)
            assert held[which] / blocks <= rules * (1 + 1e-12)
        again = Encoding.from_list(json.loads(found.encoding.to_json()))
        assert again == found.encoding
        assert evaluate(problem, again).time_s == found.time_s
        assert again.faults(problem) == []
    assert streamed > 3


def test_a_step_is_never_shorter_than_the_slower_group():
    rng = random.Random(8)
    for problem, split in splits_at_random(rng, 20):
        score = split.score()
        loads = split.passes().sum(axis=(0, 2))
        batches = problem.batches(split.layouts[0])
        assert score["time_s"] - score["tail_s"] >= batches * loads.max() * (1 - 1e-12)


def test_slower_messages_never_help():
    rng = random.Random(9)
    for problem, split in splits_at_random(rng, 20):
        slow = problem.wafer.replace(hop_latency_s=2.0 * problem.wafer.hop_latency_s + 1e-6)
        room = problem.capacity_bytes
        other = Problem(
            problem.model, slow, problem.training, work=problem.work, capacity_bytes=room
        )
        again = SplitBlock(other, split.layouts, split.cut)
        for mine, its in zip(split.mappings, again.mappings, strict=True):
            its.assign(mine.op_mappings())
        assert again.score()["time_s"] >= split.score()["time_s"] * (1 - 1e-12)


def test_a_crossing_costs_what_a_border_between_two_classes_costs():
    """Which is held against packets in test_wafer_class_search."""
    model = models.load("bertlarge").replace(layers=4)
    problem = Problem(model, TILE.replace(columns=4, rows=4), WaferTraining(8))
    for one, other in (((4, 2), (2, 2)), ((2, 4), (2, 3)), ((4, 1), (4, 2))):
        pair = group_layout(problem, *one, 8), group_layout(problem, *other, 8)
        split = SplitBlock(problem, pair, cut_points(problem.work)[0])
        plain = Layout(*one, 1, 8, blocks=(2,)), Layout(*other, 1, 8, blocks=(2,))
        border = Classes(problem, plain).boundary_s
        sent = messages(4)
        assert split.crossings == sent[0] == sent[1] == 7
        assert split.boundary_s == pytest.approx([7 * each for each in border], rel=1e-12)


# ---- brute force ----


@pytest.mark.parametrize("cases", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_brute_force_over_every_cut_and_pair_of_groups(cases):
    """A search of one pair comes within 1% of its best; no bound is above the best of all."""
    rng = random.Random(cases)
    done = near = tried = 0
    while done < cases:
        problem = tiny_problem(rng)
        if problem.work.blocks not in (2, 3) or len(problem.work.operators) > 3:
            continue
        best = math.inf
        for cut, pair in itertools.islice(every_split(problem), 12):
            split = compiled(problem, cut, pair)
            time_s = math.inf if split is None else fastest(split, problem)
            if time_s is None or time_s == math.inf:
                continue
            best = min(best, time_s)
            found, _ = improved(SplitBlock(problem, pair, cut), [], 300, 0)
            tried += 1
            if found.fits:
                assert found.time_s >= time_s * (1 - 1e-9)
                near += found.time_s <= 1.01 * time_s
        if best == math.inf:
            continue
        done += 1
        assert any_placement_bound(problem) <= best * (1 + 1e-12)
        result = search_mapping(problem, Effort(seeds=1, steps=200, promising=2))
        assert result.bound_s <= result.best.time_s * (1 + 1e-12)
        if result.best.encoding.then is not None:
            assert result.bound_s <= best * (1 + 1e-12)
    assert near >= 0.95 * tried > 0


def test_pairs_are_left_out_by_a_bound_only():
    """No pair that is left out takes less than the time it was held against."""
    rng = random.Random(12)
    seen = 0
    while seen < 6:
        problem = tiny_problem(rng)
        every = list(every_split(problem)) if problem.work.blocks > 1 else []
        if not every:
            continue
        found = []
        for cut, pair in every[:20]:
            split = compiled(problem, cut, pair)
            if split is not None:
                found.append((improved(split, [], 50, 0)[0].time_s, cut, pair))
        if not found:
            continue
        seen += 1
        below = sorted(found)[len(found) // 2][0]
        shapes = [replace(each, schedule="1f1b") for _, _, pair in found for each in pair]
        batches = sorted({pair[0].micro_batch for _, _, pair in found})
        listed = set()
        for cut, pair in split_pairs(problem, shapes, batches, below):
            listed.add((cut, *(each.dies for each in pair), pair[0].micro_batch))
        for time_s, cut, pair in found:
            sizes = (cut, *(each.dies for each in pair), pair[0].micro_batch)
            assert time_s >= below or sizes in listed


# ---- what people see ----


def bert_split(micro_batch=16):
    problem = Problem("bertlarge", TILE, WaferTraining(64))
    pair = group_layout(problem, 5, 2, micro_batch), group_layout(problem, 5, 3, micro_batch)
    return problem, SplitBlock(problem, pair, cut_points(problem.work)[-1])


def test_what_a_split_block_shows():
    problem, split = bert_split()
    found, _ = improved(split, [], 500, 0)
    names = [op.name for op in problem.work.operators]
    listed = found.encoding.to_list()
    assert [entry["operator"] for entry in listed] == names
    assert {(e["class"], e["schedule"], e["chunks"]) for e in listed} == {
        (0, "interleaved", 24),
        (1, "interleaved", 24),
    }
    assert found.encoding.stages_text == "groups of 5 x 2 and 5 x 3 dies that share every block"
    shown = die_map(problem.wafer, *(each.layout for each in found.encoding.classes))
    assert (shown.count("0"), shown.count("1")) == (10, 15)
    text = describe(problem, found.encoding)
    assert text.count("stage(s) of") == 2
    assert text.splitlines()[0] == found.encoding.stages_text
    assert all(f"\n{name}" in text for name in names)
    free = replace(found, over_bytes=0.0, stream_over_bytes=0.0)
    drawn_up = details(problem, free)
    assert sum(drawn_up["breakdown"]["causes"].values()) == pytest.approx(found.time_s)
    assert [row["operator"] for row in drawn_up["breakdown"]["operators"]] == names
    assert len(drawn_up["dies"]["busy"]) == 2
    assert max(drawn_up["dies"]["busy"]) < 1.0
    # Crossings are on the links: more bytes than two classes send once a micro-batch.
    crossing = split.crossings * problem.work.boundary_bytes * problem.training.global_batch
    assert drawn_up["links"]["bytes"] > 2 * crossing


def test_a_search_keeps_two_groups_where_they_take_less():
    """Three blocks on two dies: two groups have as much state each, two stages have not."""
    wafer = presets.wafer("dram-wafer").replace(columns=2, rows=1)
    slow = wafer.rules.replace(d2d_module_bytes_per_s=1e11)
    wafer = wafer.replace(rules=slow, die=wafer.die.replace(d2d_modules_x=1, d2d_modules_y=1))
    problem = Problem("bertlarge", wafer, WaferTraining(4), work=two_products(3))
    effort = Effort(seeds=1, steps=200, promising=2)
    found = search_mapping(problem, effort)
    assert found.best.encoding.shares_blocks
    alone = min(each.time_s for each in found.runners_up if each.fits)
    assert found.best.time_s < 0.95 * alone
    assert found.bound_s <= found.best.time_s
    assert "operators of a block on one or on several groups of dies" in found.bound_space
    assert evaluate(problem, found.best.encoding).time_s == found.best.time_s
    best = min(fastest(compiled(problem, cut, pair), problem) for cut, pair in every_split(problem))
    assert found.best.time_s == pytest.approx(best)
    assert found.bound_s <= best
    same = search_mapping(problem, effort, threads=1)
    assert same.best == found.best
    again = MappingResult.from_record(problem, json.loads(json.dumps(found.to_record())))
    assert again.best == found.best
    assert found.to_dict()["ours"]["layout"]["then"]["schedule"] == "interleaved"


def test_bounds_say_whether_they_hold_for_split_blocks():
    problem = Problem("bertlarge", TILE, WaferTraining(64))
    found = search_mapping(problem, Effort(seeds=1, steps=200, promising=1))
    shared = "operators of a block on one or on several groups" in found.bound_space
    assert shared or "nor blocks whose operators two groups of dies share" in found.bound_space


@pytest.mark.parametrize(
    ("which", "changed", "said"),
    [
        (
            1,
            {"chunks": 12},
            "chunks: 12 is not accepted where two groups of dies share every block; expected 24",
        ),
        (0, {"stages": 2}, "stages: 2 is not accepted"),
        (1, {"blocks": [23]}, "blocks: [23] is not accepted"),
        (0, {"schedule": "1f1b"}, "schedule: '1f1b' is not accepted where two groups"),
        (1, {"micro_batch": 8}, "micro_batch: 8 is not accepted; expected 16"),
        (1, {"rectangle": [5, 4]}, "have no place together"),
        (0, {"replicas": 2}, "replicas: 2 is not accepted"),
    ],
)
def test_groups_that_are_none_are_refused(which, changed, said):
    problem, split = bert_split()
    data = evaluation_of_classes(split).encoding.to_list()
    assert Encoding.from_list(data).faults(problem) == []
    wrong = [{**e, **changed} if e["class"] == which else e for e in data]
    faults = Encoding.from_list(wrong).faults(problem)
    assert len(faults) == 1
    assert said in faults[0]
    with pytest.raises(InvalidInputError):
        evaluate(problem, Encoding.from_list(wrong))


def test_operators_in_a_group_of_their_own_must_be_those_of_a_half():
    problem = Problem("bertlarge", TILE, WaferTraining(64))
    pair = (group_layout(problem, 5, 2, 16),) * 2
    split = SplitBlock(problem, pair, cut_points(problem.work)[0])
    data = evaluation_of_classes(split).encoding.to_list()
    cut = [e["operator"] for e in data].index("attention-norm")
    early = [{**e, "class": int(i >= cut - 2)} for i, e in enumerate(data)]
    (fault,) = Encoding.from_list(early).faults(problem)
    assert "expected all from look-up to attention-residual or all from" in fault
    (fault,) = Encoding.from_list(data[1:]).faults(problem)
    assert "operators:" in fault
    (fault,) = Encoding.from_list(data[:-1]).faults(problem)
    assert "missing" in fault
    with pytest.raises(InvalidInputError, match="expected 1f1b"):
        Classes(problem, pair)
    stages = Layout(5, 3, 1, 16, blocks=(15,)), Layout(5, 2, 1, 16, blocks=(9,))
    with pytest.raises(InvalidInputError, match="expected interleaved"):
        SplitBlock(problem, stages, cut_points(problem.work)[0])
    with pytest.raises(InvalidInputError, match="cut: 0 is not accepted; expected one of"):
        SplitBlock(problem, pair, 0)
    joined = Problem("bertlarge", TILE.replace(joined=2), WaferTraining(64))
    (fault,) = Encoding.from_list(data).faults(joined)
    assert "not accepted for two classes on joined wafers" in fault
