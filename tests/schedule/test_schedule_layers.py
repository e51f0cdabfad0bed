"""Laws of layers on chips: whole models, the cache, and the canonical form that layers share."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.layers_at_random import check, random_layer

from phaze_fast import _core, models
from phaze_fast.cost import estimate_costs
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import ArchitectureSpace, presets
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.schedule import (
    ScheduleCache,
    instance_from_dict,
    schedule_instances,
    schedule_layers,
)
from phaze_fast.schedule.layers import graph_arrays, pack


def test_what_the_root_proves_is_what_a_whole_search_gives():
    chips = ArchitectureSpace.tpuv4_area().chips[::900]
    graph = layer_graph(models.load("llama2-7b"), Strategy(tp=4))
    costs = estimate_costs(graph, chips, presets.fabric("tpuv4-pod"))
    root, best = schedule_layers(costs, max_nodes=1), schedule_layers(costs)
    assert 0 < root.proven.sum() < root.proven.size
    assert (root.makespan_s[root.proven] == best.makespan_s[root.proven]).all()


def test_a_bound_that_is_enough_ends_a_search_and_stays_a_bound():
    chips = ArchitectureSpace.tpuv4_area().chips[::400]
    graph = layer_graph(models.load("llama2-7b"), Strategy(tp=4))
    costs = estimate_costs(graph, chips, presets.fabric("tpuv4-pod"))
    best = schedule_layers(costs)
    for share in (0.9, 0.999, 1.0, 1.01):
        enough = best.makespan_s * share
        cut = schedule_layers(costs, enough_s=enough)
        assert (cut.bound_s <= best.makespan_s * (1 + 1e-11)).all()
        assert (cut.makespan_s >= best.makespan_s * (1 - 1e-11)).all()
        assert (cut.bound_s >= np.minimum(enough, best.bound_s) * (1 - 1e-11)).all()
        if share < 1.0:
            assert cut.nodes.sum() < best.nodes.sum()


def test_a_search_that_only_decides_says_whether_a_length_can_be_beaten():
    chips = ArchitectureSpace.tpuv4_area().chips[::400]
    graph = layer_graph(models.load("llama2-7b"), Strategy(tp=4))
    costs = estimate_costs(graph, chips, presets.fabric("tpuv4-pod"))
    best = schedule_layers(costs)
    for g, share in itertools.product(range(len(costs.graphs)), (0.99, 0.9999, 1.0, 1.0001, 1.01)):
        exact_s, seconds = best.makespan_s[g], (costs.one_core_s(g), costs.time_s(g))
        made_s, bound_s, *_ = _core.schedule_on_chips(
            graph_arrays(costs.graphs[g]), *(own.ravel() for own in seconds), costs.cores.ravel(),
            False, 100_000, np.inf, 2, exact_s * share, True,
        )  # fmt: skip
        assert (bound_s <= exact_s * (1 + 1e-11)).all()
        assert (made_s >= exact_s * (1 - 1e-11)).all()
        assert ((bound_s >= exact_s * share * (1 - 1e-11)) | (made_s < exact_s * share)).all()


def test_layers_of_a_model_on_chips():
    space = ArchitectureSpace.tpuv4_area().chips
    chips = space[:: len(space) // 40]
    fabric = presets.fabric("tpuv4-pod")
    strategy = Strategy(tp=2, sequence_parallel=True)
    costs = estimate_costs(layer_graph(models.load("bertlarge"), strategy), chips, fabric)
    times = schedule_layers(costs)
    assert times.makespan_s.shape == (len(costs.graphs), len(chips))
    assert times.proven.all()
    assert (times.gap <= 1e-9).all()
    for g in range(len(costs.graphs)):
        for c in (0, 7, len(chips) - 1):
            check(times.schedule(g, c))
        assert (times.makespan_s[g] <= costs.time_s(g).sum(axis=1) * (1 + 1e-12)).all()
    again = schedule_layers(costs, threads=2)
    assert times.makespan_s.tobytes() == again.makespan_s.tobytes()
    joules = times.energy_j
    assert joules[0, 7] == pytest.approx(times.schedule(0, 7).energy_j, rel=1e-12)
    at_once = [costs.energy_j(g).sum(axis=1) for g in range(len(costs.graphs))]
    assert (joules <= np.array(at_once) + costs.static_w * times.makespan_s).all()
    assert (joules >= costs.static_w * times.makespan_s).all()
    beside = schedule_layers(costs, rule="overlap", max_nodes=2000)
    assert (beside.bound_s <= times.makespan_s * (1 + 1e-12)).all()


def same(a, b):
    return (
        a.makespan_s.tobytes() == b.makespan_s.tobytes()
        and a.proved_by.tobytes() == b.proved_by.tobytes()
        and all(
            (one.starts, one.mode) == (other.starts, other.mode)
            for g in range(len(a.graphs))
            for k in range(a.makespan_s.shape[1])
            for one, other in [(a.schedule(g, k), b.schedule(g, k))]
        )
    )


def test_a_cache_in_memory_gives_the_same_bits_and_counts():
    chips = ArchitectureSpace.tpuv4_area().chips[:60]
    costs = estimate_costs(layer_graph(models.load("bertlarge")), chips)
    plain = schedule_layers(costs)
    cache = ScheduleCache()
    assert same(schedule_layers(costs, cache=cache), plain)
    asked = cache.info().misses
    assert asked > 0
    assert same(schedule_layers(costs, cache=cache), plain)
    assert cache.info()[:4] == (asked, 0, asked, 0)


class Shelf:
    """A store as plain as can be: any object with these four will do."""

    def __init__(self):
        self.rejected, self.values, self.closed = 0, {}, False

    def get_many(self, keys):
        return {key: self.values[key] for key in keys if key in self.values}

    def put_many(self, results):
        self.values |= results

    def close(self):
        self.closed = True


def test_a_cache_takes_any_store():
    chips = ArchitectureSpace.tpuv4_area().chips[:10]
    costs = estimate_costs(layer_graph(models.load("bertlarge")), chips)
    plain, shelf = schedule_layers(costs), Shelf()
    first = ScheduleCache(shelf)
    assert same(schedule_layers(costs, cache=first), plain)
    asked = first.info().misses
    assert len(shelf.values) == asked
    second = ScheduleCache(shelf)
    assert same(schedule_layers(costs, cache=second), plain)
    assert second.info()[:4] == (0, asked, 0, 0)
    shelf.values = dict.fromkeys(shelf.values, b"no schedule")
    third = ScheduleCache(shelf)
    assert same(schedule_layers(costs, cache=third), plain)
    assert third.info()[:4] == (0, 0, asked, asked)
    third.close()
    assert shelf.closed
    with pytest.raises(InvalidInputError, match="phaze_fast.ScheduleCache makes of a path"):
        ScheduleCache("layers.sqlite")


def renumbered(rng, record):
    """The same layer, its operators in another order."""
    ids = [op["id"] for op in record["ops"]]
    names = dict(zip(ids, rng.sample(range(1000), len(ids)), strict=True))
    ops = [{**op, "id": names[op["id"]]} for op in record["ops"]]
    edges = [[names[a], names[b]] for a, b in record["edges"]]
    rng.shuffle(ops)
    rng.shuffle(edges)
    return {**record, "ops": ops, "edges": edges}


def scaled(record, factor):
    ops = [
        {**op, "lat_single": op["lat_single"] * factor, "lat_all": op["lat_all"] * factor}
        for op in record["ops"]
    ]
    return {**record, "ops": ops}


@given(st.integers(0, 2**32))
def test_isomorphic_and_scaled_layers_have_one_canonical_form(seed):
    rng = random.Random(seed)
    record = random_layer(rng, 9)
    factor = rng.choice([3.0, 0.1, 1e-9, 7e5])
    other = scaled(renumbered(rng, record), factor)
    layers = [instance_from_dict(record), instance_from_dict(other)]
    one, two = _core.canonical_layers(pack(layers), False)
    assert one == two
    found, again = schedule_instances(layers, highs=False)
    check(again)
    assert again.nodes == found.nodes
    assert again.proved_by == found.proved_by
    assert again.makespan == pytest.approx(found.makespan * factor, rel=1e-12)


def test_the_canonical_form_of_a_form_is_itself():
    rng = random.Random(20)
    for _ in range(50):
        layer = instance_from_dict(random_layer(rng, 9))
        packed = pack([layer])
        plain = _core.schedule_layers(packed, False, 10**6, float("inf"), 1)
        formal = _core.schedule_layers(packed, False, 10**6, float("inf"), 1, canonical=True)
        most = max(seconds for modes in layer.modes for _, seconds in modes)
        assert plain[0][0] == pytest.approx(formal[0][0] * most, rel=1e-12)
        back = _core.replay_layers(packed, False, formal[5], formal[6])
        assert [x.tobytes() for x in back] == [plain[k].tobytes() for k in (0, 4, 5, 6)]
