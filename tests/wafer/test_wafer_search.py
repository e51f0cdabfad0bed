"""The search for mappings: what it promises of its answers, its bound and its counts."""

from __future__ import annotations

import numpy as np
import pytest

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import (
    Layout,
    Problem,
    WaferTraining,
    evaluate,
    load_wafer,
    load_wafer_space,
    megatron,
)
from phaze_fast.wafer.mapping.layout import layouts
from phaze_fast.wafer.mapping.packing import tiles
from phaze_fast.wafer.search.bounds import roofline
from phaze_fast.wafer.search.result import Effort
from phaze_fast.wafer.search.search import MappingSearch, search_mapping
from phaze_fast.wafer.studies.spaces import contained, search_wafers

BERT = models.load("bertlarge")


QUICK = Effort(seeds=1, steps=500, promising=2)


@pytest.fixture(scope="module")
def dojo() -> Problem:
    return Problem(BERT, load_wafer("dojo-tile-like"), WaferTraining(64))


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
    plan = megatron(dojo, Layout(4, 1, 5, 2), tp=4, weights="zero1")
    score = evaluate(dojo, plan)
    found = search_mapping(
        dojo, QUICK, starts=[(plan.layout, plan.arrays(dojo)[0])], wanted=[plan.layout]
    )
    assert found.best.time_s <= score.time_s


@pytest.mark.slow
def test_nothing_below_the_best_is_left_to_find(dojo):
    found = search_mapping(dojo, QUICK)
    search = MappingSearch(dojo, QUICK, below_s=found.bound_s * 0.99)
    assert search.run() is None
    assert search.bound_s >= found.bound_s * 0.99


def test_a_model_without_room_says_how_much_is_missing():
    problem = Problem(models.load("gpt3-175b"), load_wafer("dram-wafer"), WaferTraining(64))
    found = search_mapping(problem, QUICK)
    assert not found.best.fits
    assert found.best.over_bytes > 10e9
    assert found.best.reason.startswith("OOM: ")
    assert "dram per die" in found.best.reason


def test_an_sram_wafer_holds_the_state_of_few_parameters():
    """MODEL.md: 44 GB hold at most about 2.7 billion parameters' state at 16 bytes each."""
    wafer = load_wafer("wse3-like").replace(off_wafer=None)
    room = wafer.memory_bytes * wafer.dies / 16
    assert 2.5e9 < room < 2.8e9
    small = Problem(models.load("opt-1.3b"), wafer, WaferTraining(64))
    large = Problem(models.load("llama2-7b"), wafer, WaferTraining(64))
    assert roofline(small).bound_s(small, Layout(12, 7, 1, 64)) < float("inf")
    assert roofline(large).bound_s(large, Layout(12, 7, 1, 64)) == float("inf")


@pytest.mark.slow
def test_dead_dies_are_left_alone():
    wafer = load_wafer("dojo-tile-like").replace(dead=((2, 2),))
    for width, height in ((1, 1), (2, 2), (5, 2), (2, 5)):
        for x, y in tiles(wafer, width, height):
            assert not (x <= 2 < x + width and y <= 2 < y + height)
    assert len(tiles(wafer, 1, 1)) == 24
    assert tiles(wafer, 5, 5) == ()
    found = search_mapping(Problem(BERT, wafer, WaferTraining(64)), QUICK)
    whole = search_mapping(Problem(BERT, load_wafer("dojo-tile-like"), WaferTraining(64)), QUICK)
    assert found.best.time_s >= whole.best.time_s  # 24 dies suit this model as well as 25


def test_a_wafer_inside_another_is_left_out():
    whole = load_wafer("dram-wafer")
    narrow, slow = whole.replace(columns=4), whole.replace(hop_latency_s=1e-6)
    other = load_wafer("sram-wafer")
    assert contained([narrow, whole, slow, other, whole]) == [True, False, True, False, True]


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


def test_bad_effort_is_refused():
    with pytest.raises(InvalidInputError, match="seeds: 0 is not accepted"):
        Effort(seeds=0)
    with pytest.raises(InvalidInputError, match="budget_s: -1 is not accepted"):
        Effort(budget_s=-1)
    with pytest.raises(InvalidInputError, match="global_batch: 0 is not accepted"):
        WaferTraining(global_batch=0)
    with pytest.raises(InvalidInputError, match="model: vit-b16"):
        Problem(models.load("vit-b16"), load_wafer("dram-wafer"))


def test_exhaustive_search_refuses_what_it_cannot_finish(dojo):
    mapping = dojo.mapping(Layout(4, 4, 1, 16))
    with pytest.raises(InvalidInputError, match="too many mappings"):
        mapping.exhaust()
    assert np.isfinite(mapping.mapping_count())


SLOW_HOPS = Problem(
    BERT, load_wafer("dojo-tile-like").replace(hop_latency_s=1.0), WaferTraining(64)
)


def test_stages_pay_for_their_hops():
    """One hop a second: no pipeline is faster than the way through it, there and back."""
    plan = megatron(SLOW_HOPS, Layout(1, 1, 5, 2), tp=1)
    assert evaluate(SLOW_HOPS, plan).time_s > 32 * 1.0


@pytest.mark.slow
@pytest.mark.thorough
def test_no_stages_where_hops_are_slow():
    assert search_mapping(SLOW_HOPS, QUICK).best.encoding.layout.stages == 1


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
    times = [
        search_mapping(
            Problem(BERT, wafer, WaferTraining(64)), QUICK, wanted=[Layout(1, 1, 1, 1)]
        ).best.time_s
        for wafer in (dojo, alone)
    ]
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
