"""The search for mappings against brute force, its bound, and what it promises."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from itertools import starmap

import numpy as np
import pytest
from case_counts import slow_or_thorough

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets
from phaze_fast.opgraph.builder import ELEMENT_BYTES, OperatorSpec
from phaze_fast.wafer import Layout, Problem, WaferTraining, evaluate, megatron
from phaze_fast.wafer.bounds import quick_bound, roofline, tight_bound
from phaze_fast.wafer.layout import layouts
from phaze_fast.wafer.mapping_rules import layout_faults
from phaze_fast.wafer.operators import Edge, MeshOperator, Workload
from phaze_fast.wafer.outcome import Effort
from phaze_fast.wafer.packing import tiles
from phaze_fast.wafer.search import search_below, search_mapping
from phaze_fast.wafer.wafers import contained, search_wafers

BERT = models.load("bertlarge")


def tiny_workload(rng: random.Random) -> Workload:
    """Up to six operators: an end, a block of products and others, another end."""
    seq, width = rng.choice([8, 64, 512]), rng.choice([64, 256, 1024])
    count = rng.randint(2, 4)
    kinds = [rng.choice(["gemm", "gemm", "activation", "residual", "norm"]) for _ in range(count)]
    kinds[rng.randrange(count)] = "gemm"
    kinds[-1] = rng.choice(["residual", "norm"])
    before, behind = rng.random() < 0.3, rng.random() < 0.4
    parts = ["before"] * before + ["block"] * count + ["behind"] * behind
    kinds = ["gemm"] * before + kinds + ["gemm"] * behind
    ops = []
    for i, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        product = kind == "gemm"
        size = ELEMENT_BYTES * seq * width
        spec = OperatorSpec(
            f"op{i}",
            kind,
            "TC" if product else "VC",
            (-1,),
            m=seq,
            n=width,
            k=width if product else 0,
            flops=2.0 * seq * width * width if product else 0.0,
            read_bytes=size + (ELEMENT_BYTES * width * width if product else 0),
            write_bytes=size,
            function="layernorm" if kind == "norm" else "",
        )
        last = part == "block" and i + 1 == before + count
        kept = last or (part == "block" and rng.random() < 0.6)
        ops.append(
            MeshOperator(
                name=spec.name,
                part=part,
                spec=spec,
                seq_rows=seq,
                units=width,
                inner_units=width if product else 0,
                kept_bytes=float(size) if kept else 0.0,
                output_kept=kept,
                parameters=width * width if product else 0,
                stat_bytes=8.0 * seq if kind == "norm" else 0.0,
                gather_bytes=0.0,
            )
        )
    size = float(ELEMENT_BYTES * seq * width)
    start, end = int(before), before + count - 1
    edges = [Edge(i, i + 1, "inside", size, ops[i].output_kept) for i in range(start, end)]
    edges.append(Edge(end, start, "wrap", size, True))
    if count > 2 and rng.random() < 0.5:
        edges.append(Edge(start, end, "inside", size, False))
    if before:
        edges.append(Edge(0, start, "entry", size, False))
    if behind:
        edges.append(Edge(end, end + 1, "exit", size, True))
    chain = tuple(range(start, end + 1))
    return Workload(BERT, seq, tuple(ops), tuple(edges), chain, size, blocks=rng.randint(1, 6))


def tiny_problem(rng: random.Random) -> Problem:
    """On at most four dies, with so much memory that keeping everything now and then fits."""
    name = rng.choice(["dram-wafer", "dram-wafer", "dram-stream-wafer"])
    columns, rows = rng.choice([(2, 1), (1, 2), (3, 1), (2, 2), (4, 1)])
    wafer = presets.wafer(name).replace(columns=columns, rows=rows)
    work = tiny_workload(rng)
    training = WaferTraining(rng.choice([2, 3, 4, 6, 8, 9, 12]))
    free = Problem(BERT, wafer, training, work=work)
    state = 16.0 * work.parameters
    kept = sum(op.kept_bytes for op in work.operators) * training.global_batch * work.blocks
    room = (state * rng.uniform(0.3, 1.5) + kept * rng.uniform(0.1, 1.0)) / wafer.dies
    return replace_capacity(free, room)


def replace_capacity(problem: Problem, room: float) -> Problem:
    return problem.variant(capacity_bytes=room)


def every_layout(problem: Problem) -> list[Layout]:
    """Whatever the rules accept, found by trying: every rectangle, count and micro-batch."""
    columns, rows = problem.wafer.grid
    sides = [range(1, rows * columns + 1), range(1, rows + 1), range(1, problem.work.blocks + 1)]
    tried = itertools.product(*sides, range(1, 2 * problem.training.global_batch + 1))
    plain = [layout for layout in starmap(Layout, tried) if not layout_faults(problem, layout)]
    piped = [
        replace(layout, schedule=schedule, chunks=chunks)
        for layout in plain
        if layout.stages > 1
        for schedule, chunks in (("zb-h1", 1), *(("interleaved", v) for v in range(1, 7)))
    ]
    return plain + [layout for layout in piped if not layout_faults(problem, layout)]


def brute_force(problem: Problem, most: float) -> tuple[float, float] | None:
    """(bytes over, time) of the best of all mappings; None where there are too many to try."""
    mappings = []
    for layout in every_layout(problem):
        try:
            mappings.append(problem.mapping(layout))
        except InvalidInputError:
            continue
    if sum(mapping.ways() for mapping in mappings) > most:
        return None
    scores = [mapping.exhaust()[1][0] for mapping in mappings]
    return min(
        (float(s["over_bytes"] + s["stream_over_bytes"]), float(s["time_s"])) for s in scores
    )


def tiny_gaps(cases: int, most: float, seed: int) -> list[float]:
    """Time of the search relative to the best there is, case by case; infeasible ones agree."""
    rng = random.Random(seed)
    effort = Effort(seeds=3, steps=3000, promising=6)
    gaps: list[float] = []
    while len(gaps) < cases:
        problem = tiny_problem(rng)
        best = brute_force(problem, most)
        if best is None:
            continue
        found = search_mapping(problem, effort, seed=len(gaps))
        assert found.best.fits == (best[0] <= 0.0)
        if not found.best.fits:
            continue
        assert found.bound_s <= best[1] * (1 + 1e-12)
        assert found.best.time_s >= best[1] * (1 - 1e-12)
        gaps.append(found.best.time_s / best[1] - 1.0)
    return gaps


def test_tiny_instances_are_solved_as_brute_force_solves_them():
    gaps = tiny_gaps(8, 3e4, seed=5)
    assert sum(gap <= 1e-9 for gap in gaps) >= 7
    assert max(gaps) <= 0.01


@slow_or_thorough(60, 300)
def test_three_hundred_tiny_instances(cases):
    """At least 98% are optimal, the others within 1%, over every micro-batch that is accepted."""
    gaps = tiny_gaps(cases, 5e4, seed=1)
    assert sum(gap <= 1e-9 for gap in gaps) >= 0.98 * cases
    assert max(gaps) <= 0.01


@pytest.mark.parametrize("batch", [6, 12, pytest.param(45, marks=pytest.mark.slow)])
def test_the_layouts_are_those_that_the_rules_accept(batch):
    wafer = presets.wafer("dojo-tile-like").replace(dead=((2, 1),))
    problem = Problem(BERT, wafer, WaferTraining(batch))
    listed = list(layouts(wafer, problem.work.blocks, batch))
    assert sorted(listed) == sorted(every_layout(problem))
    assert len(set(listed)) == len(listed)


def test_a_batch_of_375_sequences():
    """Micro-batch 75 beats all powers of two that divide the batch: only 1 does."""
    problem = Problem(BERT, presets.wafer("dojo-tile-like"), WaferTraining(375))
    found = search_mapping(problem, Effort(seeds=1, steps=1000, promising=2))
    known = evaluate(problem, megatron(problem, Layout(5, 5, 1, 75), 1, weights="zero1"), True)
    assert found.bound_s <= found.best.time_s <= 0.066
    assert not known.fits or found.bound_s <= known.time_s
    assert "micro-batches that divide 375" in found.bound_space
    assert found.bound_space in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [500])
def test_no_micro_batch_beats_the_bound(batch):
    """One search for each divisor of the batch, held against the bound over all."""
    problem = Problem(BERT, presets.wafer("dojo-tile-like"), WaferTraining(batch))
    quick = Effort(seeds=1, steps=500, promising=1)
    found = search_mapping(problem, quick)
    listed = list(layouts(problem.wafer, problem.work.blocks, batch))
    for microbatch in (b for b in range(1, batch + 1) if batch % b == 0):
        wanted = [each for each in listed if each.microbatch == microbatch]
        one = search_mapping(problem, quick, wanted=wanted)
        assert not one.best.fits or found.bound_s <= one.best.time_s
        assert "given layouts" in one.bound_space


def test_bounds_hold_for_every_op_mapping_of_tiny_layouts():
    rng = random.Random(11)
    checked = 0
    while checked < 30:
        problem = tiny_problem(rng)
        over = roofline(problem)
        for layout in every_layout(problem):
            mapping = problem.mapping(layout)
            if mapping.ways() > 3e3:
                continue
            score = mapping.exhaust()[1][0]
            if score["over_bytes"] + score["stream_over_bytes"] > 0:
                continue
            least = float(score["time_s"]) * (1 + 1e-12)
            assert over.bound_s(problem, layout) <= least
            relaxation = mapping.relaxation()
            free = relaxation.bound(1.0, 0.0)[0]
            assert free <= quick_bound(problem, layout, relaxation, free) <= least
            tight = tight_bound(problem, layout, relaxation)
            assert free <= tight <= least
            # One that is enough stops there, and is a bound as well.
            enough = free + rng.random() * (tight - free)
            assert enough <= tight_bound(problem, layout, relaxation, 0.0, enough) <= least
            checked += 1


QUICK = Effort(seeds=1, steps=500, promising=2)


@pytest.fixture(scope="module")
def dojo() -> Problem:
    return Problem(BERT, presets.wafer("dojo-tile-like"), WaferTraining(64))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_answer_on_any_number_of_threads(dojo):
    first = search_mapping(dojo, QUICK, seed=3, threads=1)
    second = search_mapping(dojo, QUICK, seed=3, threads=2)
    assert first.best.encoding == second.best.encoding
    assert first.best.time_s == second.best.time_s
    assert first.bound_s == second.bound_s
    assert first.evaluations == second.evaluations


@pytest.fixture(scope="module")
def quick_search(dojo):
    return search_mapping(dojo, QUICK)


def test_the_answer_is_what_its_encoding_evaluates_to(dojo, quick_search):
    found = quick_search.best
    again = evaluate(dojo, found.encoding)
    assert again.time_s == found.time_s
    assert again.memory_bytes == found.memory_bytes
    chosen = evaluate(dojo, found.encoding, choose_outputs=True)
    assert chosen.time_s == found.time_s


def test_the_bound_and_the_counts_add_up(quick_search):
    found = quick_search
    assert 0 < found.bound_s <= found.best.time_s
    assert 0 <= found.gap < 1
    assert found.layouts >= found.pruned > 0
    assert found.unseen == 0


def test_a_start_is_never_made_worse(dojo):
    plan = megatron(dojo, Layout(4, 1, 5, 2), tensor_parallel=4, weights="zero1")
    score = evaluate(dojo, plan)
    found = search_mapping(
        dojo, QUICK, starts=[(plan.layout, plan.arrays(dojo)[0])], wanted=[plan.layout]
    )
    assert found.best.time_s <= score.time_s


@pytest.mark.slow
def test_nothing_below_the_best_is_left_to_find(dojo):
    found = search_mapping(dojo, QUICK)
    none, bound = search_below(dojo, found.bound_s * 0.99, QUICK)
    assert none is None
    assert bound >= found.bound_s * 0.99


def test_a_model_without_room_says_how_much_is_missing():
    problem = Problem(models.load("gpt3-175b"), presets.wafer("dram-wafer"), WaferTraining(64))
    found = search_mapping(problem, QUICK)
    assert not found.best.fits
    assert found.best.over_bytes > 10e9
    assert found.best.reason.startswith("OOM: ")
    assert "dram per die" in found.best.reason


def test_an_sram_wafer_holds_the_state_of_few_parameters():
    """MODEL.md: 44 GB hold at most about 2.7 billion parameters' state at 16 bytes each."""
    wafer = presets.wafer("wse3-like").replace(off_wafer=None)
    room = wafer.memory_bytes * wafer.dies / 16
    assert 2.5e9 < room < 2.8e9
    small = Problem(models.load("opt-1.3b"), wafer, WaferTraining(64))
    large = Problem(models.load("llama2-7b"), wafer, WaferTraining(64))
    assert roofline(small).bound_s(small, Layout(12, 7, 1, 64)) < float("inf")
    assert roofline(large).bound_s(large, Layout(12, 7, 1, 64)) == float("inf")


@pytest.mark.slow
def test_dead_dies_are_left_alone():
    wafer = presets.wafer("dojo-tile-like").replace(dead=((2, 2),))
    for width, height in ((1, 1), (2, 2), (5, 2), (2, 5)):
        for x, y in tiles(wafer, width, height):
            assert not (x <= 2 < x + width and y <= 2 < y + height)
    assert len(tiles(wafer, 1, 1)) == 24
    assert tiles(wafer, 5, 5) == ()
    found = search_mapping(Problem(BERT, wafer, WaferTraining(64)), QUICK)
    whole = search_mapping(Problem(BERT, presets.wafer("dojo-tile-like"), WaferTraining(64)), QUICK)
    assert found.best.time_s > whole.best.time_s


def test_a_wafer_inside_another_is_left_out():
    whole = presets.wafer("dram-wafer")
    narrow, slow = whole.replace(columns=4), whole.replace(hop_latency_s=1e-6)
    other = presets.wafer("sram-wafer")
    assert contained([narrow, whole, slow, other, whole]) == [True, False, True, False, True]


def test_wafers_are_searched_together_with_mappings(tmp_path):
    space = presets.wafer_space("wafer-space").replace(
        base=presets.wafer("dram-wafer").replace(columns=4, rows=3),
        axes={"die.hbm_stacks": [0, 1, 2], "die.d2d_modules_x": [4, 14]},
        ties={},
    )
    found = search_wafers(BERT, space, WaferTraining(64), QUICK)
    wafers, rejected = space.wafers()
    assert found.wafers == len(wafers)
    assert found.rejected == rejected
    best = [search_mapping(Problem(BERT, w, WaferTraining(64)), QUICK).best for w in wafers]
    assert found.best.best.time_s == min(each.time_s for each in best if each.fits)
    assert found.bound_s <= found.best.best.time_s
    shares = found.contained + found.bounded + found.searched + found.unseen
    assert shares == found.wafers


def test_where_no_wafer_has_room_the_roomiest_says_how_much_is_missing():
    space = presets.wafer_space("wafer-space").replace(
        axes={"die.hbm_stacks": [0, 2, 4], "die.chip.tensor_core.count": [8]}, ties={}
    )
    found = search_wafers(models.load("gpt3-175b"), space, WaferTraining(64), QUICK)
    best = found.best.best
    assert not best.fits
    assert found.best.problem.wafer.chip.hbm.stacks == 4
    state = 16 * 175e9 / found.best.problem.wafer.dies
    least = state - found.best.problem.wafer.memory_bytes
    assert 0.97 * least < best.over_bytes < 1.2 * least
    assert found.to_dict()["bound"] is None
    shares = found.contained + found.bounded + found.searched + found.unseen
    assert shares == found.wafers


@pytest.mark.slow
def test_a_budget_leaves_wafers_and_layouts_out_but_no_bound(dojo):
    full = search_mapping(dojo, QUICK)
    for budget_s in (1e-6, 0.05):
        short = search_mapping(dojo, Effort(1, 200, 1, budget_s))
        assert short.unseen > 0
        assert short.bound_s <= full.best.time_s
    # Starts come first: a batch of layouts on few dies is all that is looked at.
    every = list(layouts(dojo.wafer, dojo.work.blocks, dojo.training.global_batch))
    few = sorted(every, key=lambda each: (each.dies * each.stages, each))[:16]
    starts = [(each, dojo.mapping(each).op_mappings()) for each in few]
    short = search_mapping(dojo, Effort(1, 200, 1, 1e-6), starts=starts)
    assert short.unseen >= len(every) - len(few)
    assert short.best.rank > full.best.rank
    assert short.bound_s <= full.best.time_s
    space = presets.wafer_space("wafer-space").replace(
        base=presets.wafer("dram-wafer").replace(columns=4, rows=2),
        axes={"die.hbm_stacks": [0, 2, 4], "die.chip.tensor_core.count": [8]},
        ties={},
    )
    for name in ("gpt3-175b", "bertlarge"):
        short = search_wafers(models.load(name), space, WaferTraining(64), Effort(1, 200, 1, 1e-3))
        assert short.bounded >= 0
        assert short.contained + short.bounded + short.searched + short.unseen == short.wafers
        if short.best.best.fits:
            assert short.unseen > 0
            whole = search_wafers(models.load(name), space, WaferTraining(64), QUICK)
            assert short.bound_s <= whole.best.best.time_s


def test_bad_effort_is_refused():
    with pytest.raises(InvalidInputError, match="seeds: 0 is not accepted"):
        Effort(seeds=0)
    with pytest.raises(InvalidInputError, match="budget_s: -1 is not accepted"):
        Effort(budget_s=-1)
    with pytest.raises(InvalidInputError, match="global_batch: 0 is not accepted"):
        WaferTraining(global_batch=0)
    with pytest.raises(InvalidInputError, match="model: t5"):
        Problem(models.load("t5-small"), presets.wafer("dram-wafer"))


def test_exhaustive_search_refuses_what_it_cannot_finish(dojo):
    mapping = dojo.mapping(Layout(4, 4, 1, 16))
    with pytest.raises(InvalidInputError, match="too many mappings"):
        mapping.exhaust()
    assert np.isfinite(mapping.ways())


@pytest.mark.slow
def test_stages_pay_for_their_hops():
    """One hop a second: no pipeline is faster than the way through it, there and back."""
    slow = presets.wafer("dojo-tile-like").replace(hop_latency_s=1.0)
    problem = Problem(BERT, slow, WaferTraining(64))
    plan = megatron(problem, Layout(1, 1, 5, 2), tensor_parallel=1)
    assert evaluate(problem, plan).time_s > 32 * 1.0
    assert search_mapping(problem, QUICK).best.encoding.layout.stages == 1


def test_a_wafer_without_links_works_die_by_die():
    whole = presets.wafer("dram-wafer")
    without = whole.replace(die=whole.die.replace(d2d_modules_x=0, d2d_modules_y=0))
    found = search_mapping(Problem(BERT, without, WaferTraining(64)), QUICK)
    layout = found.best.encoding.layout
    assert (layout.width, layout.height, layout.stages) == (1, 1, 1)
    columns = whole.replace(die=whole.die.replace(d2d_modules_x=0))
    faster = search_mapping(Problem(BERT, columns, WaferTraining(64)), QUICK)
    assert faster.best.encoding.layout.width == 1 < faster.best.encoding.layout.height
    assert faster.best.time_s < found.best.time_s


def test_idle_dies_take_no_share_of_what_is_off_the_wafer():
    dojo = presets.wafer("dojo-tile-like")
    alone = dojo.replace(columns=1, rows=1)
    times = [
        search_mapping(
            Problem(BERT, wafer, WaferTraining(64)), QUICK, wanted=[Layout(1, 1, 1, 1)]
        ).best.time_s
        for wafer in (dojo, alone)
    ]
    assert times[0] == times[1]


def test_names_and_wrong_types():
    by_name = Problem("bertlarge", "dram-wafer", WaferTraining(64))
    assert by_name.model == BERT
    with pytest.raises(InvalidInputError, match="wafer: dict is not accepted"):
        Problem(BERT, {}, WaferTraining(64))
    with pytest.raises(InvalidInputError, match="training: int is not accepted"):
        Problem(BERT, "dram-wafer", 64)
    with pytest.raises(InvalidInputError, match="optimizer: int is not accepted"):
        WaferTraining(64, None, 3)
