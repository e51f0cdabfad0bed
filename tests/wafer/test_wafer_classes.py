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
from reference.mesh_simulator import Traffic
from wafer.test_wafer_tiny import tiny_problem

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import Effort, Encoding, Layout, evaluate, search_mapping
from phaze_fast.wafer.mapping.classes import Classes
from phaze_fast.wafer.mapping.evaluate import evaluation_of_classes
from phaze_fast.wafer.mapping.layout import slots_of
from phaze_fast.wafer.mapping.operators import OUTPUTS, PARTS, ROLES
from phaze_fast.wafer.mapping.packing import class_places
from phaze_fast.wafer.mapping.prices import combination, combinations
from phaze_fast.wafer.mapping.streams import cross_stage_link_s
from phaze_fast.wafer.search.bounds import any_placement_bound
from phaze_fast.wafer.search.class_search import improved_classes

TABLES = ("forward", "backward", "stash", "live", "parameters", "weight_grad")
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
    each = np.ascontiguousarray(mapping.stages()[0]["streams"])
    tail_s = float(mapping.score()["tail_s"][0])
    return float(each[:, 0].sum()), float(each[:, 0].max()), tail_s, each.reshape(-1)


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


# ---- whole mappings: a plain evaluator of its own ----


def sends_s(wafer, placed, border):
    """Seconds per byte of each stage: every message by its XY route, the busiest link counts."""
    columns, rows = wafer.grid
    traffic = Traffic(columns, rows, wafer.link_bytes_per_s)
    messages = []
    for k, (here, there) in enumerate(itertools.pairwise(placed)):
        pairs = list(
            itertools.product(here, there) if k == border else zip(here, there, strict=True)
        )
        for ways, sender in ((pairs, k), ([(b, a) for a, b in pairs], k + 1)):
            routes = [traffic.route(y * columns + x, v * columns + u) for (x, y), (u, v) in ways]
            messages.append((sender, routes))
    busy = np.zeros(4 * columns * rows)
    for _, routes in messages:
        for link in itertools.chain(*routes):
            busy[link] += traffic.seconds_per_byte[link] / len(routes)
    found = [[0.0, 0] for _ in placed]
    for sender, routes in messages:
        found[sender][0] += max(busy[link] for route in routes for link in route)
        found[sender][1] += max(map(len, routes))
    return [(rate, hops * wafer.hop_latency_s) for rate, hops in found]


def case_of(problem, classes, which, sent=None):
    """One class as the oracle takes it, among all stages of the pipeline; `sent` as `sends_s`."""
    layout = classes.layouts[which]
    dies, mb = layout.dies, layout.micro_batch
    rules = classes._rules(which)[0]
    names = _core.MAP_RULES_DTYPE.names
    table = problem.price_table(dies, mb)
    cuts = [tuple(map(int, cut)) for cut in combinations(dies)[2]]
    letters = dict(zip(ROLES, oracle.ROLES, strict=True))
    ops = [
        oracle.Op(
            PARTS.index(op.part),
            "".join(letters[role] for role in op.roles),
            tuple(map(OUTPUTS.index, problem.accepted_outputs(i))),
            op.product,
            tuple(op.limit(role, mb) for role in ROLES[:4]),
            op.output_kept,
            op.expert,
            op.stat_bytes * mb,
            op.gather_bytes * mb,
            op.overlaps,
        )
        for i, op in enumerate(problem.work.operators)
    ]
    kinds = ("inside", "entry", "wrap", "exit")
    case = oracle.Case(
        slots=tuple(tuple(run) for run in slots_of(layout.width, layout.height)),
        ops=ops,
        edges=[
            oracle.Edge(e.source, e.target, kinds.index(e.kind), e.bytes * mb, e.again)
            for e in problem.work.edges
        ],
        rules={name: rules[name].item() for name in names},
        tables={
            name: {
                (i, cut): float(table[t][i, combination(dies, cut)])
                for i in range(len(ops))
                for cut in cuts
            }
            for t, name in enumerate(TABLES)
        },
        blocks=classes.layouts[0].blocks + classes.layouts[1].blocks,
        boundary_s=(),
        chain=problem.work.chain,
    )
    size, border = problem.work.boundary_bytes * mb, classes.layouts[0].stages - 1
    boundary = []
    for k, (rate, fixed) in enumerate(sent or sends_s(problem.wafer, classes.dies, border)):
        exchange = 0.0
        if k == border + which:  # the stage of this class beside the other one
            exchange = oracle.seconds(case, "all-to-all", range(len(case.slots)), size / dies)
        boundary.append(rate + (fixed + exchange) / size)
    case.boundary_s = tuple(boundary)
    return case


def plain_step(problem, classes, op_mappings):
    """Seconds of a step and its stages, each class by the oracle, the step by its own formula."""
    border, stages = classes.layouts[0].stages, []
    for which in (0, 1):
        case = case_of(problem, classes, which)
        own = range(border) if which == 0 else range(border, len(case.blocks))
        if problem.stream is not None:
            case.cross_stage_s = cross_stage_link_s(
                problem.wafer, classes.dies, len(case.blocks)
            ).tolist()
            case.own_stages = own
        parts, items = oracle.parts_of(case, op_mappings[which])
        chosen = classes.mappings[which].stages()[1].tolist()
        for k, row in zip(own, chosen, strict=True):
            best, found = (
                oracle.stage_of(case, op_mappings[which], parts, items, k, given)
                for given in (None, dict(enumerate(row)))
            )
            assert found.isolated_s == pytest.approx(best.isolated_s, rel=1e-9)
            stages.append(found)  # ways that tie may stream more or less past the others
    links_s = 0.0
    if case.cross_stage_s:
        links_s = oracle.charge(case.rules, case.cross_stage_s, stages)
    loads = [stage.load_s for stage in stages]
    batches = -(-problem.training.global_batch // classes.layouts[0].micro_batch)
    tail_s = max(s.tail_s for s in stages)
    return (batches - 1) * max(*loads, links_s) + sum(loads) + tail_s, stages


def drawn(rng, mapping, slots, modes):
    """Operator mappings at random, as the kernel and as the oracle take them."""
    rows, plain = [], []
    for i in range(len(mapping.op_mappings())):
        row = mapping.choices(i)[rng.randrange(len(mapping.choices(i)))].copy()
        row["mode"], row["algorithm"] = rng.randrange(modes), rng.randrange(4)
        masks = [int(mask) for mask in row["slots"]]
        roles = [next(oracle.ROLES[r] for r in range(5) if masks[r] >> k & 1) for k in range(slots)]
        plain.append(oracle.OperatorMapping(tuple(roles), int(row["mode"]), int(row["algorithm"])))
        rows.append(row)
    mapping.assign(np.array(rows, dtype=mapping.op_mappings().dtype))
    return plain


def shaped(problem, shapes, micro_batch):
    """Every share of a model's blocks over two classes of so many stages."""
    (a, b, n), (c, d, k) = shapes
    for blocks in itertools.product(range(1, problem.work.blocks + 1), repeat=n + k):
        if sum(blocks) == problem.work.blocks:
            yield (
                Layout(a, b, n, micro_batch, blocks=blocks[:n]),
                Layout(c, d, k, micro_batch, blocks=blocks[n:]),
            )


def every_pair(problem):
    """Every two shapes, numbers of stages, shares of the blocks and micro-batches with a place."""
    columns, rows = problem.wafer.grid
    sides = [(w, h) for w in range(1, columns + 1) for h in range(1, rows + 1)]
    counts = range(1, problem.work.blocks)
    batch = problem.training.global_batch
    for one, other in itertools.permutations(sides, 2):
        for n, k in itertools.product(counts, counts):
            shapes = (*one, n), (*other, k)
            if n + k <= problem.work.blocks and class_places(problem.wafer, shapes):
                for micro_batch in (b for b in range(1, batch + 1) if batch % b == 0):
                    yield from shaped(problem, shapes, micro_batch)


def test_whole_mappings_agree_with_a_plain_evaluator():
    rng = random.Random(6)
    checked = 0
    while checked < 25:
        problem = tiny_problem(rng)
        pairs = list(itertools.islice(every_pair(problem), 200))
        if not pairs:
            continue
        pair = rng.choice(pairs)
        try:
            classes = Classes(problem, pair)
        except InvalidInputError:
            continue
        checked += 1
        plain = [
            drawn(rng, mapping, len(slots_of(each.width, each.height)), len(problem.modes))
            for mapping, each in zip(classes.mappings, pair, strict=True)
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


def beside(classes, one, other):
    """Seconds of a step where the second class has mappings beside what the first one takes."""
    times = one[1]
    classes.mappings[1].assign(other[0])
    streams = times.streams.reshape(-1)
    classes.mappings[1].set_others(times.sum_s, times.slowest_s, times.tail_s, streams)
    return float(classes.mappings[1].score()["time_s"][0])


def fastest(problem, pair):
    """The best of all operator mappings of two classes; None where there are too many."""
    try:
        classes = Classes(problem, pair)
    except InvalidInputError:
        return math.inf
    if max(mapping.mapping_count() for mapping in classes.mappings) > 500:
        return None
    sides = []
    for which, mapping in enumerate(classes.mappings):
        rows = []
        choices = [
            [
                (row, mode)
                for row in mapping.choices(i)
                for mode in (range(len(problem.modes)) if op.parameters else (0,))
            ]
            for i, op in enumerate(problem.work.operators)
        ]
        for some in itertools.product(*choices):
            op_mappings = np.array([row for row, _ in some], dtype=mapping.op_mappings().dtype)
            op_mappings["mode"] = [mode for _, mode in some]
            mapping.assign(op_mappings)
            score = mapping.score()[0]
            if score["over_bytes"] + score["stream_over_bytes"] <= 0:
                times = classes.times(which)
                rows.append((op_mappings, times))
        sides.append(rows)
    return min((beside(classes, *both) for both in itertools.product(*sides)), default=math.inf)


@pytest.mark.parametrize("cases", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_brute_force_over_every_pair_of_shapes_and_share_of_blocks(cases):
    """A search of one pair comes within 1% of its best; no bound is above the best of all."""
    rng = random.Random(cases)
    done, near, tried = 0, 0, 0
    while done < cases:
        problem = tiny_problem(rng)
        if problem.work.blocks not in (2, 3) or len(problem.work.operators) > 3:
            continue
        best = math.inf
        for pair in itertools.islice(every_pair(problem), 12):
            time_s = fastest(problem, pair)
            if time_s is None or time_s == math.inf:
                continue
            best = min(best, time_s)
            found, _ = improved_classes(problem, pair, [], 300, 0)
            if not found.fits:
                tried += 1
                continue
            assert found.time_s >= time_s * (1 - 1e-9)
            tried, near = tried + 1, near + (found.time_s <= 1.01 * time_s)
        if best == math.inf:
            continue
        done += 1
        assert any_placement_bound(problem) <= best * (1 + 1e-12)
        result = search_mapping(problem, Effort(seeds=1, steps=200, promising=2))
        assert result.bound_s <= result.best.time_s * (1 + 1e-12)
        if result.best.encoding.second_class is not None:
            assert result.best.time_s >= best * (1 - 1e-9) or "any shapes" in result.bound_space
            assert result.bound_s <= best * (1 + 1e-12)
    assert near >= 0.95 * tried > 0
