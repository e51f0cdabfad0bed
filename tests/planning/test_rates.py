"""Rates of the host and of the optimiser's kernel, worked out by hand."""

import numpy as np
import pytest
from plan_cases import PLAIN

from phaze_fast import _core
from phaze_fast.hardware import Cluster, presets
from phaze_fast.hardware.tuning import FunctionCost
from phaze_fast.memory import optimizer
from phaze_fast.models import load
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.planning import Training, plan
from phaze_fast.planning.sizes import strategy_sizes, training_record
from phaze_fast.planning.times import KindTimes, host_s, optimizer_bytes_per_s
from phaze_fast.software import load_precision


def test_a_pass_waits_for_the_host():
    software = PLAIN.replace(host_s=2e-6, recompute_host_s=5e-6)
    seven, three = np.array([True] * 4 + [False] * 3), np.array([True, False, False])
    assert host_s(software, seven) == pytest.approx(14e-6)
    assert host_s(software, seven[:0], seven) == pytest.approx(14e-6)
    assert host_s(software, three, seven) == pytest.approx(25e-6)
    assert host_s(None, three, seven) == 0.0
    called = software.replace(product_host_s=3e-6, gradient_host_s=7e-6)
    assert host_s(called, seven) == pytest.approx(14e-6 + 12e-6)
    assert host_s(called, three, seven) == pytest.approx(25e-6 + 3e-6 + 28e-6)


@pytest.mark.parametrize(
    ("ops", "expected"),
    [(None, 480.0), (1.0, 480.0), (100.0, 28 * 2 * 4 * 1 * 10.0 * 0.5 / 100.0)],
    ids=["memory", "fast vectors", "slow vectors"],
)
def test_state_streams_through_memory_or_vector_units(ops, expected):
    """Adam reads and writes 12 bytes, and reads a gradient and writes a weight of 2: 28 bytes."""
    tuning = presets.chip("h100").tuning
    functions = {**tuning.functions, "adamw": FunctionCost(ops_per_element=ops)}
    tuning = tuning.replace(hbm_share=0.96, clock_factor=0.5, functions=functions)
    record = np.zeros(1, dtype=_core.CHIP_DTYPE)
    record["hbm_bytes_per_s"], record["clock_hz"] = 500.0, 10.0
    record["vector_cores"], record["vector_lanes"], record["vector_alus_per_lane"] = 2, 4, 1
    like = presets.chip("h100").replace(tuning=tuning)
    found = optimizer_bytes_per_s(record, like, optimizer("adam-bf16-grad"))
    assert found.tolist() == pytest.approx([expected])


@pytest.mark.parametrize(
    ("name", "precision_bytes", "expected"),
    [("adam-bf16-grad", 2.0, 2.0), ("adam-bf16-grad", 1.0, 1.0), ("adam-fp32", 2.0, 2.0)],
)
def test_weights_are_gathered_in_the_narrower_format(name, precision_bytes, expected):
    precision = load_precision("bf16").replace(gathered_weight_bytes=precision_bytes)
    record = training_record(optimizer(name), PLAIN, precision)
    assert record["gather_bytes"].tolist() == [expected]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_step_that_the_host_holds_up_takes_its_operators(recompute):
    """One second for each operator: both ends and 12 blocks, which may run forward again."""
    model, cluster = load("gpt2-small"), Cluster(devices=1, fabric="dgx-h100", chip="h100")
    slow = PLAIN.replace(host_s=1.0)
    step = Training(global_batch=1, micro_batch=1, recompute=recompute, software=slow)
    layers, order = layer_graph(model).layers, layer_graph(model).order
    operators = sum(len(layers[k].forward) + len(layers[k].backward) for k in order)
    if recompute == "full":
        operators += 12 * len(layers[order[1]].forward)
    assert plan(model, cluster, step).best.time_s == pytest.approx(operators, rel=1e-4)


def test_times_with_fewer_ways_to_recompute_are_filled_with_zeros():
    def times(rows, ways):
        flat, deep = np.ones((rows, 3)), np.full((rows, ways, 3), 2.0)
        one = np.ones(rows)
        return KindTimes(flat, flat, deep, flat, flat, deep, one, one, one, one > 0, flat, flat)

    both = KindTimes.concatenated([times(2, 1), times(1, 3)])
    for each in (both.backward_s, both.backward_j):
        assert each[:, :, 0].tolist() == [[2, 0, 0], [2, 0, 0], [2, 2, 2]]
    assert both.forward_s.shape == (3, 3)


@pytest.mark.parametrize(
    ("scattered", "sequence", "share"),
    [(False, False, 1.0), (True, False, 0.5), (False, True, 0.5), (True, True, 0.5)],
)
def test_two_devices_send_a_message_whole_or_a_half_each(scattered, sequence, share):
    model, software = load("gpt2-small"), PLAIN.replace(scattered_messages=scattered)
    split = Strategy(tp=2, sequence_parallel=sequence)
    sizes = strategy_sizes(model, split, ("none",), software=software)
    assert sizes.record["message_bytes"].tolist() == [share * 2 * model.seq * model.hidden]
