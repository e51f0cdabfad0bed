"""What a step uses: peak rate, energy, links and causes, against counts by hand."""

import numpy as np
import pytest

from phaze_fast import models
from phaze_fast.hardware import energy_table
from phaze_fast.wafer import (
    Effort,
    Layout,
    Problem,
    WaferTraining,
    evaluate,
    load_wafer,
    megatron,
    search_mapping,
    step_energy,
    step_loads,
    step_mfu,
    transfers,
    zero3,
)
from phaze_fast.wafer.mapping.details import causes, details, link_map, operator_times

DRAM = load_wafer("dram-wafer")
BERT = Problem("bertlarge", DRAM, WaferTraining(64))
PLAN = megatron(BERT, Layout(4, 2, 4, 16), tp=4, weights="zero1")


def test_mfu_counts_the_models_flops_over_all_dies():
    found = evaluate(BERT, PLAN)
    flops = models.model_flops(models.load("bertlarge"), None, 64).total
    assert step_mfu(BERT, found) == pytest.approx(flops / found.time_s / DRAM.peak_flops())


def test_energy_is_at_least_that_of_the_arithmetic():
    found, table = evaluate(BERT, PLAN), energy_table()
    energy = step_energy(BERT, found)
    macs = models.model_flops(models.load("bertlarge"), None, 64).total / 2
    assert energy.operators_j > macs * table.mac_j
    assert energy.static_j == pytest.approx(0.15 * 625 * 40 * found.time_s)
    assert energy.stream_j == 0.0
    assert energy.total_j == pytest.approx(sum(energy.to_dict().values()))


def test_recomputation_and_larger_batches_cost_energy():
    full = megatron(BERT, Layout(4, 2, 4, 16), 4, recompute="full", weights="zero1")
    more = step_energy(BERT, evaluate(BERT, full)).operators_j
    less = step_energy(BERT, evaluate(BERT, PLAN)).operators_j
    assert 1.2 < more / less < 1.4  # a third of the work once more, but for the ends
    twice = Problem("bertlarge", DRAM, WaferTraining(128))
    assert step_energy(twice, evaluate(twice, PLAN)).operators_j == pytest.approx(2 * less)


def test_what_passes_off_the_wafer_is_charged():
    problem = Problem("bertlarge", "dram-stream-wafer", WaferTraining(64))
    plan = zero3(problem, Layout(8, 4, 1, 32))
    stay = evaluate(problem, plan)
    streamed = [{**row, "weights": "stream"} for row in plan.to_list()]
    moved = evaluate(problem, type(plan).from_list(streamed))
    joules = step_energy(problem, moved).stream_j
    parameters = problem.work.parameters
    assert joules == pytest.approx(2 * parameters * (2 * 2 + 2) * energy_table().network_byte_j)
    assert step_energy(problem, stay).stream_j == 0.0


def test_loads_of_one_stage_are_those_of_its_collectives():
    """A line of four: each all-reduce puts 2 (p - 1)/p V on the links of each die at most."""
    plan = megatron(BERT, Layout(4, 1, 1, 8), tp=4)
    loads = step_loads(BERT, plan)
    assert not loads[1:].any()
    assert not loads[0, 4:].any()
    sent = 0.0
    for move in transfers(BERT, plan):
        times = 24 if move.operator not in ("embedding", "logits", "loss") else 1
        if move.op == "all-reduce" and move.operator == "proj":
            sent += move.payload_bytes * 2 * 0.75 * 8 * times
    assert loads[0, 1, 0] > 0.5 * sent > 0
    assert loads[0, :4, 0] == pytest.approx(loads[0, 3::-1, 1])  # its mirror image


def test_stages_send_both_ways():
    loads = step_loads(BERT, megatron(BERT, Layout(1, 1, 3, 1), 1))
    size = BERT.work.boundary_bytes * 64
    assert loads[0, :3, 0] == pytest.approx([size, size, 0.0])
    assert loads[0, :3, 1] == pytest.approx([0.0, size, size])


def test_causes_add_up_and_operators_are_those_of_a_block():
    found = search_mapping(BERT, Effort(seeds=1, steps=200, promising=1)).best
    assert sum(causes(BERT, found).values()) == pytest.approx(found.time_s)
    rows = [row for row in operator_times(BERT, found) if row["part"] == "block"]
    work_s = sum(row["forward_s"] + row["backward_s"] for row in rows)
    assert work_s == pytest.approx(found.compute_s)
    assert all(0 <= row["of_peak"] <= 1 for row in rows)


def test_nothing_is_said_of_what_does_not_fit():
    problem = Problem("gpt3-175b", DRAM, WaferTraining(64))
    found = search_mapping(problem, Effort(seeds=1, steps=10, promising=1))
    assert set(details(problem, found.best).values()) == {None}
    assert found.to_dict()["mfu"] is None


def test_links_in_text():
    tile = load_wafer("dojo-tile-like").replace(columns=2, rows=2, dead_links=(((0, 0), (1, 0)),))
    loads = np.zeros((2, 2, 4))
    loads[0, 0, 2], loads[1, 1, 1] = 9.0, 3.0
    assert link_map(tile, loads).splitlines() == ["oxo", "9 .", "o3o"]
