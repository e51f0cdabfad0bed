"""Searches for mappings and wafers: bounds, brute force, fronts, comparisons."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from itertools import starmap

import numpy as np
import pytest
from case_counts import slow_ones, slow_or_thorough, some_or_many
from refusals import refusal
from wafer_baseline_cases import CASES, DRAM, in_rank_order, problem_of
from wafer_baseline_cases import QUICK as SHORT
from wafer_cli_cases import refused
from wafer_tiny_cases import BERT, FAST, tiny_problem

from phaze_fast import models
from phaze_fast.cost import attention_ops, operator_costs, product_ops, vector_ops
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import (
    Effort,
    Layout,
    Problem,
    WaferSpace,
    WaferTraining,
    capped_s,
    evaluate,
    load_wafer,
    load_wafer_space,
    megatron,
    pareto_front,
    search_front,
    search_mapping,
    step_energy,
)
from phaze_fast.wafer.mapping.layout import layouts, weighed_split
from phaze_fast.wafer.mapping.problem import combination, network_chip
from phaze_fast.wafer.mapping.problem import operator_costs as wafer_costs
from phaze_fast.wafer.search.baselines import is_linear
from phaze_fast.wafer.search.bounds import quick_bound, roofline, tight_bound, work_bound
from phaze_fast.wafer.studies.comparison import ABLATIONS, compare_mappings
from phaze_fast.wafer.studies.spaces import OBJECTIVES, contained, search_wafers, wafer_point

# ---- search ----


QUICK = Effort(seeds=1, steps=500, promising=2)


@pytest.fixture(scope="module")
def dojo() -> Problem:
    return Problem(BERT, load_wafer("dojo-tile-like"), WaferTraining(8))


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
    plan = megatron(dojo, Layout(4, 1, 5, 2), tp=4, weights="zero1")
    score = evaluate(dojo, plan)
    starts = [(plan.layout, plan.arrays(dojo)[0])]
    found = search_mapping(dojo, QUICK, starts=starts, wanted=[plan.layout])
    assert found.best.time_s <= score.time_s


def test_an_sram_wafer_holds_the_state_of_few_parameters():
    """MODEL.md: 44 GB hold at most about 2.7 billion parameters' state at 16 bytes each."""
    wafer = load_wafer("wse3-like").replace(off_wafer=None)
    room = wafer.memory_bytes * wafer.dies / 16
    assert 2.5e9 < room < 2.8e9
    small = Problem(models.load("opt-1.3b"), wafer, WaferTraining(64))
    large = Problem(models.load("llama2-7b"), wafer, WaferTraining(64))
    assert roofline(small).bound_s(small, Layout(12, 7, 1, 64)) < float("inf")
    assert roofline(large).bound_s(large, Layout(12, 7, 1, 64)) == float("inf")


def test_a_wafer_inside_another_is_left_out():
    whole = load_wafer("dram-wafer")
    narrow, slow = whole.replace(columns=4), whole.replace(hop_latency_s=1e-6)
    other = load_wafer("sram-wafer")
    assert contained([narrow, whole, slow, other, whole]) == [True, False, True, False, True]
    tile = load_wafer("dojo-tile-like")
    several = tile.replace(wafer_count=4)
    network = tile.replace(die=tile.die.replace(network_bytes_per_s=1e12))
    attached = tile.replace(off_wafer=tile.off_wafer.replace(edges=("left",)))
    assert contained([tile, several, network, attached]) == [False] * 4
    slow_io = several.replace(io=tile.io.replace(bandwidth_bytes_per_s=1e9))
    assert contained([several, slow_io]) == [False, True]


@pytest.mark.slow
def test_wafers_are_searched_together_with_mappings(tmp_path):
    space = load_wafer_space("wafer-space").replace(
        base=load_wafer("dram-wafer").replace(columns=4, rows=3),
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


@pytest.mark.slow
def test_where_no_wafer_has_room_the_roomiest_says_how_much_is_missing():
    space = load_wafer_space("wafer-space").replace(
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
    space = load_wafer_space("wafer-space").replace(
        base=load_wafer("dram-wafer").replace(columns=4, rows=2),
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


def test_exhaustive_search_refuses_what_it_cannot_finish(dojo):
    mapping = dojo.mapping(Layout(4, 4, 1, 8))
    with pytest.raises(InvalidInputError, match="too many mappings"):
        mapping.exhaust()
    assert np.isfinite(mapping.mapping_count())


def test_stages_pay_for_their_hops():
    """One hop a second: no pipeline is faster than the way through it, there and back."""
    wafer = load_wafer("dojo-tile-like").replace(hop_latency_s=1.0)
    problem = Problem(BERT, wafer, WaferTraining(64))
    assert evaluate(problem, megatron(problem, Layout(1, 1, 5, 2), tp=1)).time_s > 32 * 1.0


def test_a_wafer_without_links_works_die_by_die():
    whole = load_wafer("dram-wafer")
    without = whole.replace(die=whole.die.replace(d2d_modules_x=0, d2d_modules_y=0))
    found = search_mapping(Problem(BERT, without, WaferTraining(64)), QUICK)
    layout = found.best.encoding.layout
    assert (layout.width, layout.height, layout.stages) == (1, 1, 1)
    columns = whole.replace(die=whole.die.replace(d2d_modules_x=0))
    faster = search_mapping(Problem(BERT, columns, WaferTraining(64)), QUICK)
    assert faster.best.encoding.layout.width == 1 < faster.best.encoding.layout.height
    assert faster.best.time_s < found.best.time_s


def test_idle_dies_take_no_share_of_what_is_off_the_wafer():
    dojo = load_wafer("dojo-tile-like")
    alone = dojo.replace(columns=1, rows=1)
    problems = (Problem(BERT, wafer, WaferTraining(64)) for wafer in (dojo, alone))
    one = [Layout(1, 1, 1, 1)]
    times = [search_mapping(problem, QUICK, wanted=one).best.time_s for problem in problems]
    # All 25 dies' shares would take 25 times as long; the way from the rim over the mesh adds little.
    assert times[1] < times[0] < 1.01 * times[1]


def test_names_and_wrong_types():
    by_name = Problem("bertlarge", "dram-wafer", WaferTraining(64))
    assert by_name.model == BERT
    with pytest.raises(InvalidInputError, match="wafer: dict is not accepted"):
        Problem(BERT, {}, WaferTraining(64))
    with pytest.raises(InvalidInputError, match="training: int is not accepted"):
        Problem(BERT, "dram-wafer", 64)
    with pytest.raises(InvalidInputError, match="optimizer: int is not accepted"):
        WaferTraining(64, None, 3)


# ---- tiny ----


def every_layout(problem: Problem) -> list[Layout]:
    """Whatever the rules accept, found by trying: every rectangle, count and micro-batch."""
    columns, rows = problem.wafer.grid
    sides = [range(1, rows * columns + 1), range(1, rows + 1), range(1, problem.work.blocks + 1)]
    tried = itertools.product(*sides, range(1, 2 * problem.training.global_batch + 1))
    plain = [layout for layout in starmap(Layout, tried) if not problem.fault(layout)]
    piped = [
        replace(layout, schedule=schedule, chunks=chunks)
        for layout in plain
        if layout.stages > 1
        for schedule, chunks in (("zb-h1", 1), *(("interleaved", v) for v in range(1, 7)))
    ]
    found = plain + [layout for layout in piped if not problem.fault(layout)]
    blocks, ends = problem.work.blocks, problem.work.ends
    for layout in [each for each in found if each.schedule != "interleaved"]:
        uneven = weighed_split(blocks, layout.stages, ends)
        if uneven != problem.blocks(layout):
            found.append(replace(layout, blocks=uneven))
    return found


def brute_force(problem: Problem, most: float) -> tuple[float, float] | None:
    """(bytes over, time) of the best of all mappings; None where there are too many to try."""
    mappings = []
    for layout in every_layout(problem):
        try:
            mappings.append(problem.mapping(layout))
        except InvalidInputError:
            continue
    if sum(mapping.mapping_count() for mapping in mappings) > most:
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


@some_or_many(4, 8)
def test_tiny_instances_are_solved_as_brute_force_solves_them(cases):
    gaps = tiny_gaps(cases, 3e4, seed=5)
    assert sum(gap <= 1e-9 for gap in gaps) >= cases - 1
    assert max(gaps) <= 0.01


@slow_or_thorough(60, 300)
def test_three_hundred_tiny_instances(cases):
    """At least 98% are optimal, the others within 1%, over every micro-batch that is accepted."""
    gaps = tiny_gaps(cases, 5e4, seed=1)
    assert sum(gap <= 1e-9 for gap in gaps) >= 0.98 * cases
    assert max(gaps) <= 0.01


@pytest.mark.parametrize("batch", slow_ones([6, 12, 45], 12, 45))
def test_the_layouts_are_those_that_the_rules_accept(batch):
    wafer = load_wafer("dojo-tile-like").replace(dead=((2, 1),))
    problem = Problem(BERT, wafer, WaferTraining(batch))
    listed = list(problem.layouts())
    assert sorted(listed) == sorted(every_layout(problem))
    assert len(set(listed)) == len(listed)


def test_bounds_hold_for_every_op_mapping_of_tiny_layouts():
    rng = random.Random(11)
    checked = streamed = 0
    while checked < 30:
        problem = tiny_problem(rng)
        over = roofline(problem)
        for layout in every_layout(problem):
            mapping = problem.mapping(layout)
            if mapping.mapping_count() > 3e3:
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
            streamed += layout.dies > 1 and bool((mapping.op_mappings()["mode"] >= 4).any())
            # One that is enough stops there, and is a bound as well.
            enough = free + rng.random() * (tight - free)
            assert enough <= tight_bound(problem, layout, relaxation, 0.0, enough) <= least
            checked += 1
    assert streamed > 3


def short_of_room(rng: random.Random) -> Problem | None:
    """A tiny problem whose state may have no room, on the wafer or off it; None without state."""
    problem = tiny_problem(rng)
    state = roofline(problem).state_bytes
    if not state:
        return None
    wafer = problem.wafer.replace(
        off_wafer={"capacity_bytes": int(state * rng.uniform(0.2, 1.2)) + 8, **FAST}
    )
    room = state * rng.uniform(0.05, 0.5) / wafer.dies
    given = (problem.model, wafer, problem.training)
    return Problem(*given, capacity_bytes=room, work=problem.work)


@pytest.mark.parametrize("seed", slow_ones(range(9), 0, 1, 2, 3, 4, 6, 7, 8))
def test_no_mapping_fits_where_state_has_no_room_on_or_off_the_wafer(seed):
    """Every mapping of layouts that are left out at once: none of them fits.

    Problems are drawn until there were enough layouts of both kinds.
    """
    rng = random.Random(seed)
    left_out = fitting = 0
    for _ in range(400):
        if left_out > 20 and fitting > 8:
            return
        problem = short_of_room(rng)
        if problem is None:
            continue
        over = roofline(problem)
        for layout in every_layout(problem):
            mapping = problem.mapping(layout)
            if mapping.mapping_count() > 300:
                continue
            score = mapping.exhaust()[1][0]
            fits = score["over_bytes"] + score["stream_over_bytes"] <= 0
            bound_s = over.bound_s(problem, layout)
            assert not fits or bound_s <= float(score["time_s"]) * (1 + 1e-12)
            left_out += bound_s == float("inf")
            fitting += bool(fits)
    pytest.fail(f"{left_out} layouts left out and {fitting} that fit in 400 problems")


# ---- pareto ----


BATCH = WaferTraining(16)
QUICK_PARETO = Effort(seeds=1, steps=200, promising=1)
SPACE = WaferSpace(
    name="few", base="dram-wafer", axes={"columns": [1, 2], "die.hbm_stacks": [1, 2], "rows": [1]}
)


@pytest.fixture(scope="module")
def every():
    """All wafers of the space, searched one by one."""
    return [
        wafer_point(search_mapping(Problem(BERT, wafer, BATCH), QUICK_PARETO, threads=1))
        for wafer in SPACE.wafers()[0]
    ]


@pytest.mark.parametrize("names", [OBJECTIVES, ("time_s", "cost_usd"), ("power_w",)])
def test_a_front_is_what_none_beats(every, names):
    front = pareto_front(every, names)
    for mine, other in itertools.product(front, every):
        a, b = mine.figures(names), other.figures(names)
        assert not (all(y <= x for x, y in zip(a, b, strict=True)) and a != b)
    for point in (point for point in every if point not in front):
        pairs = [zip(best.figures(names), point.figures(names), strict=True) for best in front]
        assert any(all(x <= y for x, y in pair) for pair in pairs)


def test_a_search_finds_the_front_of_all(every):
    names = ("time_s", "cost_usd")
    found = search_front(BERT, SPACE, BATCH, QUICK_PARETO, threads=1, objectives=names)
    wanted = [point.figures(names) for point in pareto_front(every, names)]
    assert [point.figures(names) for point in found.points] == wanted
    assert found.searched + found.bounded == len(every)
    assert found.to_columns()["wafer"] == [p.result.problem.wafer.name for p in found.points]


def test_bad_objectives_are_one_line():
    text = refusal(lambda: search_front(BERT, SPACE, BATCH, QUICK_PARETO, objectives=("time",)))
    assert text.startswith("objectives: 'time' is not accepted; did you mean 'time_s'?")
    assert "none given" in refusal(lambda: pareto_front([], ()))


def test_a_power_limit_stretches_the_step(every):
    point = every[-1]
    found, problem = point.result.best, point.result.problem
    energy = step_energy(problem, found)
    half_w = 0.5 * (energy.total_j + energy.static_j) / found.time_s
    capped = Problem(BERT, problem.wafer.replace(power_cap_w=half_w), BATCH)
    time_s = capped_s(capped, found)
    leakage_j = energy.static_j * time_s / found.time_s
    assert (energy.total_j - energy.static_j + leakage_j) / time_s == pytest.approx(half_w)
    slow = wafer_point(replace(point.result, problem=capped))
    assert slow.time_s == time_s
    assert slow.power_w == pytest.approx(half_w)
    dark = Problem(BERT, problem.wafer.replace(power_cap_w=1e-3), BATCH)
    assert capped_s(dark, found) == float("inf")
    assert capped_s(Problem(BERT, load_wafer("dram-wafer"), BATCH), found) == found.time_s


def test_a_front_on_the_command_line_is_in_file_and_page(run, folder, tmp_path):
    file, page = tmp_path / "front.json", tmp_path / "front.html"
    words = ("--global-batch", 8, "--seeds", 1, "--steps", 50, "--promising", 1, "--threads", 1)
    where = ("--wafer", folder / "space.json", "--front", "time_s,cost_usd", "--quiet")
    code, out, _ = run("bertlarge", *where, *words, "-o", file, "--report", page)
    assert code == 0
    assert "Pareto front" in out
    assert "Pareto front" in page.read_text()
    front = json.loads(file.read_text())["front"]
    assert front["objectives"] == ["time_s", "cost_usd"]
    assert front["points"]
    counts = front["wafers"]
    assert counts["searched"] + counts["bounded"] == 4
    assert counts["unseen"] == 0


def test_fronts_are_of_spaces(run):
    said = refused(run("bertlarge", "--wafer", "dram-wafer", "--front", "all"))
    assert "--front: expected spaces of wafers" in said


# ---- ours against other systems' plans and our own ablations: none is better ----


@pytest.fixture(scope="module", params=slow_ones(["odd", "dead", "tight"], "odd", "tight"))
def compared(request):
    return compare_mappings(CASES[request.param], SHORT)


def test_ours_is_no_worse_than_any_other(compared):
    ours = compared.ours.best
    assert ours.fits
    for found in compared.baselines.values():
        for way in (found.default, found.tuned, found.tiled):
            assert not way.fits or ours.time_s <= way.time_s


def test_ours_is_no_worse_than_any_ablation(compared):
    assert set(compared.ablations) == set(ABLATIONS)
    assert len(ABLATIONS) == 5
    for found in compared.ablations.values():
        assert not found.fits or compared.ours.best.time_s <= found.time_s
    assert compared.ours.bound_s <= compared.ours.best.time_s


def test_ablations_take_away_what_they_say(compared):
    problem = compared.ours.problem
    kept = compared.ablations["no_recompute"].encoding
    assert all(set(mapped.output) <= {"stash", "offload"} for mapped in kept.operator_mappings)
    straight = compared.ablations["no_placement"].encoding
    assert is_linear(problem, straight.layout)
    assert all(in_rank_order(op_mapping) for op_mapping in straight.operator_mappings)
    megatrons = compared.ablations["megatron_partitions"]
    assert megatrons.rank <= compared.baselines["megatron"].tiled.rank
    for found in compared.ablations.values():
        assert found.encoding.faults(problem) == []
        assert evaluate(problem, found.encoding).time_s == found.time_s


def test_memory_at_equal_speed_is_less(compared):
    for name, found in compared.memory_at_equal_speed.items():
        best = compared.baselines[name].best
        assert found.memory_bytes <= best.memory_bytes
        assert found.time_s <= best.time_s
        again = evaluate(compared.ours.problem, found.encoding)
        assert again.memory_bytes == found.memory_bytes
        assert again.time_s == found.time_s
    fitting = {name for name, each in compared.baselines.items() if each.best.fits}
    assert set(compared.memory_at_equal_speed) == fitting


def test_nothing_fits_and_all_say_so():
    problem = problem_of(DRAM.replace(columns=2, rows=1), "gpt3-13b")
    found = compare_mappings(problem, SHORT)
    assert not found.ours.best.fits
    assert found.memory_at_equal_speed == {}
    for each in found.baselines.values():
        assert each.best.reason.startswith("OOM: ")
        assert found.ours.best.rank[0] <= each.best.rank[0]


def test_a_short_budget_leaves_ours_no_worse():
    """Plans of others are looked at first: they cannot be what the budget leaves out."""
    problem = CASES["small"]
    hurry = Effort(seeds=1, steps=10, promising=1, budget_s=1e-6)
    found = compare_mappings(problem, hurry, names=["megatron", "zero3"], ablations=False)
    others = [each.best.time_s for each in found.baselines.values() if each.best.fits]
    assert found.ours.best.time_s <= min(others)


# ---- prices ----


QUICK_PRICES = Effort(seeds=1, steps=1500, promising=2)


@pytest.mark.slow
def test_explicit_attention_is_mapped_too():
    """Scores and softmax as operators of their own, heads in groups or not."""
    fused = models.load("bertlarge")
    times = []
    for model in (fused, fused.replace(attention="eager"), fused.replace(kv_heads=4)):
        problem = Problem(model, load_wafer("dram-wafer"), WaferTraining(16))
        times.append(search_mapping(problem, QUICK_PRICES).best.time_s)
        for dies, micro_batch in ((1, 1), (6, 4)):
            least = problem.least_work(Layout(dies, 1, 1, micro_batch))
            assert roofline(problem).work.block_s * micro_batch / dies <= least.block_s
    assert times[1] > times[0] > times[2]


@pytest.mark.parametrize("model", ["bertlarge", "llama2-70b", "gpt2"])
@pytest.mark.parametrize("wafer", ["dram-wafer", "dojo-tile-like", "wse2-like"])
def test_no_part_of_an_operator_takes_less_than_its_share_of_the_roofline(model, wafer):
    die = load_wafer(wafer).die
    slow = die.replace(chip=die.chip.replace(launch_latency_s=1e-4))
    given = load_wafer(wafer).replace(die=slow)
    problem = Problem(models.load(model), given, WaferTraining(64))
    over = roofline(problem)
    for dies, micro_batch in ((1, 1), (4, 2), (12, 16), (35, 64)):
        layout = Layout(dies, 1, 1, micro_batch)
        least = problem.least_work(layout)
        share = micro_batch / dies
        for part in ("before_s", "block_s", "behind_s"):
            assert getattr(over.work, part) * share <= getattr(least, part)
        every = problem.work.blocks * least.block_s + least.before_s + least.behind_s
        assert work_bound(problem, layout) == pytest.approx(64 / micro_batch * every)


def test_parts_of_operators_are_priced_as_the_operators_they_are():
    """A split product, norm and attention cost what the same sizes cost on their own."""
    model, wafer = models.load("llama2-70b"), load_wafer("dram-wafer")
    problem = Problem(model, wafer, WaferTraining(64))
    forward, backward, kept, _, parameters, of_weights = problem.price_table(12, 16)
    at = {op.name: i for i, op in enumerate(problem.work.operators)}
    seq, hidden = problem.work.seq, model.hidden

    def seconds(ops):
        return float(sum(cost.time_s for cost in operator_costs(wafer.chip, ops)))

    # Batch in 2, rows in 3, columns in 2: 8 sequences of 1366 rows, half of the columns.
    split = combination(12, (2, 3, 2, 1))
    rows = 8 * -(-seq // 3)
    up, width = at["up"], model.ffn // 2
    assert forward[up, split] == seconds(product_ops([(1, rows, hidden, width)]))
    both = [(1, rows, width, hidden), (1, hidden, rows, width)]
    assert backward[up, split] == seconds(product_ops(both))
    assert of_weights[up, split] == seconds(product_ops([(1, hidden, rows, width)]))
    assert parameters[up, split] == hidden * width
    # Columns in 4, inner in 3: the rows of all 16 sequences.
    down = at["down"]
    split = combination(12, (1, 1, 4, 3))
    inner = -(-model.ffn // 3)
    assert forward[down, split] == seconds(product_ops([(1, 16 * seq, inner, hidden // 4)]))
    # Rows of a norm; all 12 dies.
    norm = next(i for i, op in enumerate(problem.work.operators) if op.spec.kind == "norm")
    split = combination(12, (4, 3, 1, 1))
    rows = 4 * -(-seq // 3)
    assert forward[norm, split] == seconds(vector_ops("rmsnorm", [rows], [hidden]))
    # Batch in 4, columns in 3: 4 sequences, and 3 of 8 groups of heads of 64.
    attention = at["attention"]
    split = combination(12, (4, 1, 3, 1))
    pairs = 4 * 3 * (model.heads // model.kv_heads)
    heads = attention_ops([pairs], [seq], [hidden // model.heads], [True])
    alone = operator_costs(wafer.chip, heads)[0]
    assert forward[attention, split] == pytest.approx(alone.time_s, rel=0.05)  # keys are shared
    assert kept[attention, split] > 0


def test_products_share_operands_over_the_network_of_a_die():
    wafer = load_wafer("dram-wafer")
    slow = network_chip(wafer.replace(die=wafer.die.replace(network_bytes_per_s=1e9)))
    specs = [(op.spec, 1) for op in Problem("bertlarge", wafer).work.operators]
    seconds, joules = wafer_costs(wafer.chip, slow, specs)
    products = 0
    for at, (spec, count) in enumerate(specs):
        product = "gemm" in spec.kind or spec.kind.startswith("attention")
        own = slow if product else wafer.chip
        isolated_s, alone_j = wafer_costs(own, own, [(spec, count)])
        assert (seconds[at], joules[at]) == (isolated_s[0], alone_j[0])
        products += product and seconds[at] > wafer_costs(wafer.chip, wafer.chip, [(spec, 1)])[0][0]
    assert products > 0
