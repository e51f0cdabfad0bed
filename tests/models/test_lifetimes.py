"""Peak memory of recorded steps, against a player that allocates and frees every tensor."""

import re

import pytest
from cases.recordings import STEPS, recorded
from hypothesis import given, settings
from reference.allocator import Player

import phaze_fast as pf
from phaze_fast.hardware import FlatFabric
from phaze_fast.models import peak_bytes
from phaze_fast.models.lifetimes import largest_at_some_count, lifetimes
from phaze_fast.models.torch_import import layered
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.software import load_software


def traced(step):
    (small, modules), (large, _) = (recorded(step, samples) for samples in (2, 4))
    return layered("drawn", small, large, modules, 1)


def composed(graph, samples):
    """The largest sum of what earlier layers save, a layer's peak, and later gradients."""
    layers = [graph.layers[at] for at in graph.order]
    saved = [sum(x.fixed_bytes + x.bytes * samples for x in layer.saved) for layer in layers]
    gradients = [2 * layer.parameters for layer in layers]
    return max(
        sum(saved[:at]) + peak_bytes(layer, peak, samples)
        + (sum(gradients[at + 1 :]) if peak.backward else 0)
        for at, layer in enumerate(layers)
        for peak in layer.peaks
    )  # fmt: skip


@settings(max_examples=80)
@given(STEPS)
def test_lifetimes_are_those_of_the_player(step):
    recording, _ = recorded(step, 3)
    profile = [0] * len(recording.calls)
    for one in lifetimes(recording, recording):
        for at in range(max(one.born, 0), min(one.dies + 1, len(profile))):
            profile[at] += one.sizes[0]
    assert profile == Player(recording).run()


@pytest.mark.slow
@settings(max_examples=60)
@given(STEPS)
def test_layers_add_up_to_the_step(step):
    """At any number of samples, also those that were not recorded."""
    graph = traced(step)
    for samples in (1, 2, 5, 50):
        recording, _ = recorded(step, samples)
        assert composed(graph, samples) == max(Player(recording).run())


def predicted(graph, samples, devices=1, **plan):
    fabric = FlatFabric(name="link", bandwidth_bytes_per_s=1e9)
    cluster = pf.Cluster(devices=devices, fabric=fabric, chip="h200")
    spec = {"micro_batch": samples, "global_batch": samples, "software": "pytorch-eager"}
    return pf.predict(graph, cluster, {**spec, "optimizer": "adam-bf16", **plan})


@settings(max_examples=15)
@given(STEPS)
def test_a_predicted_step_allocates_what_the_player_does(step):
    graph = traced(step)
    recording, _ = recorded(step, 400)
    static = 6 * graph.parameters() + load_software("pytorch-eager").workspace_bytes
    plan = predicted(graph, 400)
    assert plan.allocated_bytes == pytest.approx(static + max(Player(recording).run()), rel=1e-12)
    assert plan.fullest.holders


def test_what_holds_the_peak_is_named_with_its_layer():
    """The head where its gradients are widest, else the block before it; the first stage has none."""
    narrow, wide = (
        {"width": width, "residual": False, "weights": True, "saves": "both", "temporaries": 2}
        for width in (8, 64)
    )
    for layers, head, last in (([[narrow]], [wide] * 3, "head"), ([[wide] * 3], [], "layers.1")):
        graph = traced({"layers": layers, "times": 2, "head": head})
        (whole,) = predicted(graph, 400).stages
        first, second = predicted(graph, 400, devices=2, pp=2).stages
        for stage, layer in ((whole, last), (first, "layers.0"), (second, last)):
            found = re.search(r" of (\S+) runs; it holds \S+ [1-9][\d.]* [KM]iB, ", stage.holders)
            assert found[1] == layer


@settings(max_examples=50)
@given(STEPS)
def test_recomputing_layers_stores_no_more(step):
    for layer in layer_graph(traced(step), Strategy(micro_batch=3)).layers:
        stored = layer.forward.stashed_bytes()
        for mode in ("full", "needed"):
            assert layer.forward.stashed_bytes(mode) <= stored
            live = layer.live_bytes(mode, resident_gradients=False)
            assert live + layer.forward.stashed_bytes(mode) >= layer.peak(False).bytes


@settings(max_examples=10)
@given(STEPS)
def test_a_stage_holds_no_more_than_the_whole_model(step):
    graph = traced(step)
    cut = predicted(graph, 400, devices=2, pp=2)
    for stage in cut.stages:
        own = stage.memory_bytes - stage.memory["communication"]
        assert own <= predicted(graph, 400).memory_bytes


def test_the_instants_that_are_largest_at_some_number_of_samples():
    assert largest_at_some_count([(2.0, 0.0), (2.0, 1.0), (0.0, 2.5)]) == [(2.0, 1.0)]
    assert largest_at_some_count([(0.0, 10.0), (1.0, 5.0), (3.0, 0.0)]) == [(0.0, 10.0), (3.0, 0.0)]
    assert largest_at_some_count([(0.0, 10.0), (1.0, 9.0), (3.0, 0.0)]) == [(1.0, 9.0), (3.0, 0.0)]
