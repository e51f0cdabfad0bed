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
from phaze_fast.planning.sizes import BOUNDARY_KINDS, strategy_sizes, training_record
from phaze_fast.planning.times import (
    MAX_NODES,
    KindTimes,
    _latest_layers,
    expert_wait_s,
    host_s,
    layers_of,
    optimizer_bytes_per_s,
    priced,
)
from phaze_fast.schedule import schedule_layers
from phaze_fast.software import load_precision, load_software


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


def layer_times(own, layer, operators, makespan_s):
    """Figures of a layer from those of its operators, seconds and joules of both passes."""
    software, (again, late) = own.software, (layer.forward, layer.backward)
    waits = expert_wait_s(own.graph, layer.kind, software)
    forward_s, plain_s = makespan_s
    host = host_s(software, again.products[:0], late.products)
    ready_s = max(plain_s, host) + waits[1]
    (_, forward_j), (seconds, joules) = operators
    weights_s = sum(s for s, n in zip(seconds, late.names, strict=True) if n.endswith("-w"))
    total_s = sum(seconds)
    found = {
        "forward_s": max(forward_s, host_s(software, again.products)) + waits[0],
        "plain_s": ready_s,
        "weight_grad_s": ready_s * (weights_s / total_s if total_s else 0.0),
        "ahead_s": max(plain_s - host, 0.0),
        "forward_j": sum(forward_j),
    }
    backward_s, backward_j = [], []
    for mode in own.variants:
        names = again.recomputed(mode) if layer.kind not in BOUNDARY_KINDS else ()
        mine = np.array([name in names for name in again.names])
        more_s, more_j = (sum(np.array(each)[mine].tolist()) for each in operators[0])
        launch_s = host_s(software, again.products[mine], late.products)
        backward_s.append(max(plain_s + (forward_s if mine.all() else more_s), launch_s) + waits[1])
        backward_j.append(sum(joules) + more_j)
    return found | {"backward_s": backward_s, "backward_j": backward_j}


@pytest.mark.parametrize("software", ["megatron-core", "fsdp-torchtitan"])
def test_times_of_layers_follow_from_those_of_their_operators(software):
    """To the last bit, for all strategies in one call: the order of sums is part of the rule."""
    profile = load_software(software).replace(expert_launch_s=1e-4, recompute_host_s=3e-5)
    model, modes = load("mixtral-8x7b").replace(layers=2), ("none", "selective", "norms", "full")
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    widths = [Strategy(tp=tp, ep=ep, cp=cp) for tp in (1, 2) for ep in (1, 4) for cp in (1, 2)]
    every = [strategy_sizes(model, strategy, modes, profile) for strategy in widths]
    ((some, layers),) = priced(every, cluster)
    assert some == every
    rows, costs = layers.scheduled(None, 1), layers.costs
    makespan_s = schedule_layers(costs, max_nodes=MAX_NODES).makespan_s[:, 0].tolist()
    place = {key: 2 * number for number, key in enumerate(layers_of(every))}
    for s, own in enumerate(every):
        for k, layer in enumerate(own.graph.layers):
            graphs = range(place[id(layer)], place[id(layer)] + 2)
            operators = [
                (costs.time_s(g)[0].tolist(), costs.dynamic_j(g)[0].tolist()) for g in graphs
            ]
            expected = layer_times(own, layer, operators, [makespan_s[g] for g in graphs])
            for name, value in expected.items():
                assert getattr(rows, name)[s, ..., k].tolist() == value, (name, layer.kind)


def test_bounds_of_layers_are_the_roots_of_their_trees_for_any_number_of_threads():
    model, cluster = load("mixtral-8x7b").replace(layers=2), Cluster(devices=8, fabric="dgx-h100")
    widths = [Strategy(tp=tp, ep=ep) for tp in (1, 2, 4) for ep in (1, 2)]
    every = [strategy_sizes(model, strategy, ("none", "full")) for strategy in widths]
    found = []
    for threads in (1, 3):
        _latest_layers.cache_clear()
        ((_, layers),) = priced(every, cluster.replace(chip="h100"))
        found.append(layers.bounds(every, threads))
        few = layers.bounds(every[3:5], threads)
        assert few.backward_s.tolist() == found[-1].backward_s[3:5].tolist()
    roots = schedule_layers(layers.costs, max_nodes=1)
    found.append(layers.timed(roots.bound_s, roots.proven))
    for name in ("forward_s", "plain_s", "backward_s", "proven"):
        values = [getattr(rows, name).tolist() for rows in found]
        assert values[0] == values[1] == values[2]


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
