"""What stays on chip in a layer: bytes by hand, laws of times and bounds, the search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaze_fast import (
    ArchitectureSpace,
    Cluster,
    Plan,
    Training,
    evaluate_batch,
    models,
    plan,
    predict,
)
from phaze_fast.cost import estimate_costs, roofline_work_j, roofline_work_s
from phaze_fast.cost.machines import Streams
from phaze_fast.cost.residency import layer_traffic
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import find_chips
from phaze_fast.hardware import presets
from phaze_fast.opgraph import Strategy, forms, layer_graph

MIB = 2.0**20
BF16 = Streams(2.0, 2.0, 4.0, 1.0)
NAMES = ("bertlarge", "llama2-7b", "llama3-8b", "t5-small", "deepseek-v3", "mixtral-8x7b")
SPACE = ArchitectureSpace.tpuv4_area()


def block(name, fusion="full", **widths):
    return layer_graph(models.load(name), Strategy(**widths), fusion).layers[1]


def of(graph, shares):
    return dict(zip(graph.names, shares, strict=True))


def test_what_a_large_buffer_saves_of_bert_by_hand():
    layer = block("bertlarge")
    forward = of(
        layer.forward, layer_traffic(layer.forward, np.array([2.0**40]), BF16).kept_shares[0]
    )
    x, hidden, weights, mask = 1.0, 4.0, 8.0, 0.5  # MiB of 512 rows
    up, down = x + weights + 2 * hidden, hidden + weights + x + x + mask
    assert forward["up"] == forward["down"] == pytest.approx(hidden / (up + down))
    # q, k, v and the context are stashed: attention and the projection after it do not read them,
    # and x is read once instead of three times.
    q = 1.0
    statistics = sum(t.bytes for t in layer.forward.tensors if t.producer == "attention") / MIB - q
    alone = 3 * (x + 2.0 + q) + 4 * q + (q + 2.0 + x + x + mask)
    fused = x + 6.0 + 3 * q + q + 2.0 + x + x + mask
    assert forward["attention"] == pytest.approx(1.0 - fused / alone, rel=1e-2)
    assert statistics < 0.04
    backward = of(
        layer.backward, layer_traffic(layer.backward, np.array([2.0**40]), BF16).kept_shares[0]
    )
    alone = (x + weights + hidden + hidden) + (hidden + weights + x)
    assert backward["d-up-x"] == backward["d-down-x"] == pytest.approx(hidden / alone)
    assert backward["d-up-w"] == backward["d-ffn-norm"] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_shares_are_shares_and_collectives_cut_chains(name):
    sizes = MIB * np.array([0.25, 1.0, 8.0, 64.0, 2.0**20])
    for width in (1, 2):
        layer = block(name, tp=width)
        for graph in (layer.forward, layer.backward):
            shares = layer_traffic(graph, sizes, BF16).kept_shares
            assert shares.min() >= 0.0
            assert shares.max() < 1.0
            assert not shares[:, graph.ops["collective"] >= 0].any()


def test_low_precision_and_unfused_graphs_keep_nothing():
    layer = block("bertlarge")
    assert not layer_traffic(
        layer.forward, np.array([MIB]), BF16._replace(in_bytes=1.0, rate=2.0)
    ).kept_shares.any()
    plain, fused = (
        estimate_costs(block("bertlarge", fusion).forward, "tpuv4")
        for fusion in ("none", "epilogues")
    )
    assert plain.total_s()[0, 0] > fused.total_s()[0, 0]


@settings(max_examples=12)
@given(st.integers(0, len(SPACE) - 1), st.sampled_from(NAMES), st.sampled_from([1, 4]))
def test_full_fusion_is_never_slower_than_epilogues_alone(chip, name, micro_batch):
    records = SPACE.chips[chip : chip + 1]
    costs = [
        estimate_costs(
            [x for x in layer_graph(models.load(name), Strategy(micro_batch=micro_batch), f).layers[1:2]
             for x in (x.forward, x.backward)],
            records,
            like=SPACE.spec.base,
        )
        for f in ("epilogues", "full")
    ]  # fmt: skip
    for graph in range(2):
        apart, fused = (cost.time_s(graph) for cost in costs)
        assert (fused <= apart).all()
        assert (costs[1].dynamic_j(graph) <= costs[0].dynamic_j(graph) * (1 + 1e-12)).all()
        assert (costs[1].bound_s(graph) <= fused).all()
        assert (costs[1].one_core_s(graph) <= costs[0].one_core_s(graph)).all()


@settings(max_examples=8)
@given(st.integers(0, len(SPACE) - 1), st.sampled_from(NAMES))
def test_operators_with_epilogues_take_no_longer_than_one_after_another(chip, name):
    records, model = SPACE.chips[chip : chip + 1], models.load(name)
    plain_s, fused_s = (
        estimate_costs(layer_graph(model, fusion=f), records, like=SPACE.spec.base).total_s()
        for f in ("none", "epilogues")
    )
    assert (fused_s <= plain_s).all()


def test_rooflines_bound_fused_layers_on_every_chip():
    graph = layer_graph(models.load("bertlarge"), Strategy(micro_batch=4), "full")
    records = SPACE.chips[:: len(SPACE) // 60]
    bounds_s = roofline_work_s(
        graph, records, Cluster(devices=8, fabric="tpuv4-pod"), SPACE.spec.base
    )
    costs = estimate_costs(graph, records, like=SPACE.spec.base)
    counts = np.repeat([layer.count for layer in graph.layers], 2)
    assert (bounds_s <= counts @ costs.total_s()).all()


@pytest.mark.parametrize(("name", "fusion"), [("bertlarge", "full"), ("llama2-7b", "none")])
def test_rooflines_bound_the_joules_of_layers_on_every_chip(name, fusion):
    graph = layer_graph(models.load(name), Strategy(micro_batch=4), fusion)
    records = SPACE.chips[:: len(SPACE) // 60]
    bounds_j, static_w = roofline_work_j(graph, records, SPACE.spec.base)
    costs = estimate_costs(graph, records, like=SPACE.spec.base)
    counts = np.repeat([layer.count for layer in graph.layers], 2)
    spent_j = counts @ [costs.dynamic_j(g).sum(axis=1) for g in range(len(costs.graphs))]
    assert (bounds_j <= spent_j).all()
    assert (bounds_j > 0.5 * spent_j).all()
    assert (static_w == costs.static_w).all()


def test_a_batch_of_chips_equals_single_chips():
    graph = block("llama2-7b").backward
    records = SPACE.chips[:: len(SPACE) // 12]
    together = estimate_costs(graph, records, like=SPACE.spec.base).time_s()
    single = [
        estimate_costs(graph, records[i : i + 1], like=SPACE.spec.base).time_s()[0]
        for i in range(len(records))
    ]
    assert (together == np.array(single)).all()


@pytest.mark.slow
def test_a_search_with_fusion_is_proven_and_no_slower():
    pod, some = Cluster(devices=8, fabric="tpuv4-pod"), SPACE[::2999]
    outcomes = [
        find_chips([models.load("bertlarge")], some, pod, Training(global_batch=64, fusion=fusion))
        for fusion in ("epilogues", "full")
    ]
    assert [outcome.status for outcome in outcomes] == ["optimal", "optimal"]
    assert outcomes[1].winners[0].score <= outcomes[0].winners[0].score
    every = evaluate_batch(
        models.load("bertlarge"), some, pod, Training(global_batch=64, fusion="full")
    )
    assert outcomes[1].winners[0].score == every.time_s.min()


def test_a_plan_says_what_is_fused():
    tpu = Cluster(devices=8, fabric="tpuv4-pod", chip="tpuv4")
    spec = {"dp": 8, "global_batch": 64}
    steps = {f: predict("bertlarge", tpu, {**spec, "fusion": f}) for f in ("epilogues", "full")}
    assert steps["full"].time_s <= steps["epilogues"].time_s
    assert steps["full"].fusion == "full"
    assert Plan.from_dict(steps["full"].to_dict()) == steps["full"]


def starved(buffer_mib, rate):
    """TPU v4 with another buffer and HBM bandwidth."""
    chip = presets.chip("tpuv4")
    return chip.replace(
        buffer=chip.buffer.replace(capacity_bytes=int(buffer_mib * MIB)),
        hbm=chip.hbm.replace(bandwidth_bytes_per_s=rate),
    )


@pytest.mark.parametrize(
    ("name", "form", "chip", "micro_batch"),
    [
        ("bertlarge", "full+activations", starved(128, 5e10), 8),
        ("bertlarge", "full+projections", starved(128, 5e10), 16),
        ("llama2-7b", "full+projections", starved(128, 2e10), 4),
        ("t5-small", "full+weights", starved(512, 1e11), 1),
    ],
)
def test_each_form_is_chosen_where_hbm_is_slow_and_saves_what_it_should(
    name, form, chip, micro_batch
):
    cluster = Cluster(devices=8, fabric="tpuv4-pod", chip=chip)
    step = {"global_batch": 1024, "micro_batch": micro_batch, "tp": 1, "pp": 1}
    best = {
        fusion: plan(name, cluster, Training(**step, fusion=fusion)).best
        for fusion in ("full", "full+activations", "full+projections", "full+weights", "full+any")
    }
    assert best["full+any"].fusion == min(best, key=lambda f: best[f].time_s)
    assert best["full+any"].time_s == min(own.time_s for own in best.values())
    assert best[form].time_s < best["full"].time_s
    repeats = form != "full+weights"
    assert (best[form].memory_bytes < best["full"].memory_bytes) == repeats
    assert (best[form].hfu > best[form].mfu) == (form == "full+projections")


def test_a_search_over_forms_is_proven_and_one_plan_has_one_form():
    pod, some = Cluster(devices=8, fabric="tpuv4-pod"), SPACE[::4999]
    step = Training(global_batch=64, micro_batch=(2, 4), tp=1, fusion="full+any")
    found = find_chips([models.load("bertlarge")], some, pod, step)
    every = evaluate_batch(models.load("bertlarge"), some, pod, step)
    assert found.status == "optimal"
    assert found.winners[0].score == every.time_s.min()
    tpu = pod.replace(chip="tpuv4")
    with pytest.raises(InvalidInputError, match=r"full\+any is not accepted for one plan"):
        predict("bertlarge", tpu, {"dp": 8, "global_batch": 64, "fusion": "full+any"})


def test_the_roofline_of_all_forms_bounds_each():
    graphs = [
        layer_graph(models.load("bertlarge"), Strategy(micro_batch=4), form)
        for form in forms("full+any")
    ]
    records, pod = SPACE.chips[:: len(SPACE) // 40], Cluster(devices=8, fabric="tpuv4-pod")
    bounds_s = roofline_work_s(graphs[0], records, pod, SPACE.spec.base, forms=graphs[1:])
    for graph in graphs:
        costs = estimate_costs(graph, records, like=SPACE.spec.base)
        counts = np.repeat([layer.count for layer in graph.layers], 2)
        assert (bounds_s <= counts @ costs.total_s()).all()
