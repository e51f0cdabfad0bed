"""Collectives against hand-computed values, explicit links and laws."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import collectives as oracle
from reference import links
from strategies import (
    fabrics,
    grid_fabrics,
    groups_on,
    latencies,
    payloads,
    regular_groups_on,
    tiered_fabrics,
)

from phaze_fast import _core
from phaze_fast.cost import collective
from phaze_fast.hardware import (
    FlatFabric,
    MeshFabric,
    Tier,
    TieredFabric,
    TorusFabric,
    fabric_record,
    presets,
)

GROUP_OPS = [op for op in _core.COLLECTIVE_OPS if op != "point-to-point"]
OPS = st.sampled_from(GROUP_OPS)


def one(fabric, op, payload, ranks, stride=1):
    return collective(fabric, op, payload, ranks, stride)


def by(fabric, op, payload, ranks, algorithm, stride=1):
    return one(fabric, op, payload, ranks, stride).alternatives[algorithm]


# ---- hand-computed values ----


FLAT = FlatFabric(name="f", bandwidth_bytes_per_s=100.0, latency_s=0.5)


@pytest.mark.parametrize(
    ("op", "algorithm", "expected"),
    [
        # 4 ranks, 800 bytes, 100 B/s, 0.5 s a step
        ("all-reduce", "ring", 2 * 3 / 4 * 800 / 100 + 2 * 3 * 0.5),  # 15.0
        ("all-reduce", "tree", 2 * 800 / 100 + 2 * 2 * 0.5),  # 18.0
        ("reduce-scatter", "ring", 7.5),
        ("all-gather", "ring", 7.5),
        ("all-to-all", "pairwise", 3 / 4 * 8 + 3 * 0.5),  # 7.5
        ("broadcast", "tree", 8 + 2 * 0.5),  # 9.0
    ],
)
def test_flat_by_hand(op, algorithm, expected):
    assert by(FLAT, op, 800.0, 4, algorithm) == expected


def test_tree_wins_small_messages_and_ring_large_ones():
    assert one(FLAT, "all-reduce", 10.0, 64).algorithm == "tree"
    assert one(FLAT, "all-reduce", 1e6, 64).algorithm == "ring"


def test_point_to_point_by_hand():
    assert one(FLAT, "point-to-point", 800.0, 2).time_s == 8.5
    tiers = presets.fabric("dgx-a100-peak")
    assert one(tiers, "point-to-point", 3e9, 2, stride=1).time_s == pytest.approx(0.01 + 3e-6)
    assert one(tiers, "point-to-point", 3e9, 2, stride=8).time_s == pytest.approx(0.12 + 5e-6)


TIERS = TieredFabric(
    name="t",
    tiers=(
        Tier(name="node", size=4, bandwidth_bytes_per_s=400.0, latency_s=0.1),
        Tier(name="cluster", bandwidth_bytes_per_s=100.0, latency_s=1.0),
    ),
)


@pytest.mark.parametrize(
    ("op", "algorithm", "expected"),
    [
        # 8 ranks: 2 nodes of 4; 800 bytes
        # one ring at the slow tier: 2 * 7/8 * 800/100 + 14 * 1
        ("all-reduce", "ring", 14.0 + 14.0),
        # inside: 2 (3/4 800/400 + 3 * 0.1); outside on 200 bytes: 2 (1/2 200/100 + 1)
        ("all-reduce", "hierarchical", 2 * (1.5 + 0.3) + 2 * (1.0 + 1.0)),
        # four rings side by side: 7/8 800 / min(400, 4 * 100), twice, and 14 slow steps
        ("all-reduce", "rail-ring", 2 * 7 / 8 * 800 / 400 + 14.0),
        # 2 * 800/100 + 2 (2 * 0.1 + 1 * 1)
        ("all-reduce", "tree", 16.0 + 2.4),
        ("all-gather", "hierarchical", 1.5 + 0.3 + 1.0 + 1.0),
        # 3 partners inside: 3/8 800/400 + 0.3; 4 outside: 4/8 800/100 + 4
        ("all-to-all", "pairwise", 0.75 + 0.3 + 4.0 + 4.0),
        # exchange inside, 3/4 800/400 + 0.3; then between nodes, 1/2 800/100 + 1
        ("all-to-all", "hierarchical", 1.5 + 0.3 + 4.0 + 1.0),
        # scatter and gather inside, 2 (1.5 + 0.3); broadcast 200 bytes outside: 2 + 1
        ("broadcast", "hierarchical", 3.6 + 3.0),
    ],
)
def test_tiers_by_hand(op, algorithm, expected):
    assert by(TIERS, op, 800.0, 8, algorithm) == pytest.approx(expected, rel=1e-14)


def test_a_strided_group_stays_on_the_outer_tier():
    # ranks 0, 4, 8, 12: one device of each node, a flat group at the slow tier
    assert by(TIERS, "all-reduce", 800.0, 4, "ring", stride=4) == 2 * 3 / 4 * 8 + 6 * 1.0
    assert "hierarchical" not in one(TIERS, "all-reduce", 800.0, 4, stride=4).alternatives


def grid(kind, *dims):
    return kind(name="g", dims=dims, link_bandwidth_bytes_per_s=100.0, hop_latency_s=0.01)


@pytest.mark.parametrize(
    ("fabric", "op", "ranks", "stride", "algorithm", "expected"),
    [
        # a closed ring of 8 sends both ways: 7/8 800 / 200 + 7 hops
        (grid(TorusFabric, 8), "all-gather", 8, 1, "ring", 3.5 + 0.07),
        # a line of 8, folded: 7/8 800 / 100 + 7 steps of two hops
        (grid(MeshFabric, 8), "all-gather", 8, 1, "ring", 7.0 + 0.14),
        # half a ring is a line
        (grid(TorusFabric, 8), "all-gather", 4, 1, "ring", 6.0 + 0.06),
        # every second device of a ring of 8: links shared by two groups, steps of two hops
        (grid(TorusFabric, 8), "all-gather", 4, 2, "ring", 3 / 4 * 800 / 100 + 3 * 0.02),
        # 4x4 torus, all: both ways round one cycle of 16
        (grid(TorusFabric, 4, 4), "all-gather", 16, 1, "snake-ring", 15 / 16 * 4 + 0.15),
        # 4x4 torus: 3/4 800/200 + 3 hops, then the same on 200 bytes
        (grid(TorusFabric, 4, 4), "all-gather", 16, 1, "dimension-ordered", 3.75 + 0.06),
        # both dimensions at once, half the vector each
        (grid(TorusFabric, 4, 4), "all-gather", 16, 1, "multi-ring", 1.875 + 0.06),
        # a ring of 8: 800 * 8/8 / 100; 7 messages
        (grid(TorusFabric, 8), "all-to-all", 8, 1, "pairwise", 8.0 + 0.07),
        # a line of 8: 4 * 4/8 of 800 across the middle
        (grid(MeshFabric, 8), "all-to-all", 8, 1, "pairwise", 16.0 + 0.07),
    ],
)
def test_grids_by_hand(fabric, op, ranks, stride, algorithm, expected):
    assert by(fabric, op, 800.0, ranks, algorithm, stride) == pytest.approx(expected, rel=1e-14)


def test_published_rule_for_a_tile_and_a_line():
    """An even contiguous tile reaches 2B, a line of the same size only B."""
    tile = by(grid(MeshFabric, 2, 4), "all-gather", 800.0, 8, "snake-ring")
    line = by(grid(MeshFabric, 8), "all-gather", 800.0, 8, "ring")
    assert tile == pytest.approx(7 / 8 * 800 / 200 + 0.07)
    assert line == pytest.approx(7 / 8 * 800 / 100 + 0.14)


# ---- a plain oracle ----


def described(fabric):
    """Kind, and columns of the levels, as the oracle takes them; each level differs."""
    record = fabric_record(fabric)[0]
    n = int(record["levels"])
    columns = [record[name][:n].tolist() for name in ("size", "bytes_per_s", "latency_s", "wrap")]
    return "grid" if record["kind"] else "switched", *columns


@settings(max_examples=600)
@given(data=st.data(), fabric=fabrics, op=OPS, payload=payloads)
def test_every_algorithm_is_what_the_documentation_says(data, fabric, op, payload):
    ranks, stride = data.draw(groups_on(fabric, most=256))
    found = one(fabric, op, payload, ranks, stride)
    expected = oracle.alternatives(*described(fabric), op, payload, ranks, stride)
    assert found.alternatives == pytest.approx(expected, rel=1e-10)
    if expected:
        assert found.time_s == pytest.approx(min(expected.values()), rel=1e-10)


@settings(max_examples=400)
@given(data=st.data(), op=OPS, payload=payloads)
def test_every_algorithm_on_uneven_grids(data, op, payload):
    """Dimensions with bandwidths, latencies and wraps of their own, as no preset has them."""
    dims = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=1, max_size=4))
    total = math.prod(dims)
    n = len(dims)
    rates = data.draw(st.lists(st.floats(1e8, 1e12), min_size=n, max_size=n))
    waits = data.draw(st.lists(latencies, min_size=n, max_size=n))
    wraps = data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
    ranks = data.draw(st.integers(1, min(total, 128)))
    stride = data.draw(st.integers(1, max(1, (total - 1) // max(ranks - 1, 1))))
    record = np.zeros(1, dtype=_core.FABRIC_DTYPE)
    record["kind"], record["levels"] = 1, n
    columns = {"size": dims, "bytes_per_s": rates, "latency_s": waits, "wrap": wraps}
    for name, values in columns.items():
        record[name][0, :n] = values
    expected = oracle.alternatives("grid", dims, rates, waits, wraps, op, payload, ranks, stride)
    code = _core.COLLECTIVE_OPS.index(op)
    found = {}
    for algorithm, name in enumerate(_core.ALGORITHMS):
        time_s, ran, bad = _core.collective_with(record, code, payload, ranks, stride, algorithm)
        if ran == algorithm and algorithm and not bad:
            found[name] = time_s
    assert found == pytest.approx(expected, rel=1e-10)


def test_ties_go_to_the_algorithm_listed_first():
    fabric = FlatFabric(name="f", bandwidth_bytes_per_s=1.0, latency_s=0.0)
    cost = one(grid(MeshFabric, 2, 2).replace(hop_latency_s=0.0), "all-gather", 800.0, 4)
    best = [name for name, t in cost.alternatives.items() if t == cost.time_s]
    assert len(best) > 1
    assert cost.algorithm == min(best, key=_core.ALGORITHMS.index)
    assert one(fabric, "all-reduce", 1.0, 2).algorithm == "ring"


# ---- explicit links ----


@settings(max_examples=60)
@given(data=st.data(), kind=st.sampled_from([TorusFabric, MeshFabric]))
def test_all_to_all_in_one_dimension_loads_links_as_routed(data, kind):
    size = data.draw(st.integers(2, 12))
    ranks, stride = data.draw(regular_groups_on((size,)))
    assume(ranks > 1)
    fabric = kind(name="g", dims=(size,), link_bandwidth_bytes_per_s=1.0)
    expected = float(links.all_to_all_load((size,), kind is TorusFabric, ranks, stride, 840))
    found = by(fabric, "all-to-all", 840.0, ranks, "pairwise", stride)
    if kind is TorusFabric and ranks * stride != size:
        assert found >= expected * (1 - 1e-12)  # a part of a ring is charged as a line
    else:
        assert found == pytest.approx(expected, rel=1e-12)


@settings(max_examples=40)
@given(data=st.data(), kind=st.sampled_from([TorusFabric, MeshFabric]))
def test_point_to_point_loads_links_as_routed(data, kind):
    dims = data.draw(st.lists(st.integers(2, 5), min_size=1, max_size=3).map(tuple))
    distance = data.draw(st.integers(1, math.prod(dims) - 1))
    fabric = kind(name="g", dims=dims, link_bandwidth_bytes_per_s=1.0)
    expected = float(links.shift_load(dims, kind is TorusFabric, distance, 60))
    found = one(fabric, "point-to-point", 60.0, 2, stride=distance).time_s
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dims", [(2, 4), (4, 4), (3, 4), (6, 3)])
def test_snake_ring_is_a_cycle_of_neighbours(dims):
    """The cycle the kernel counts on exists: each directed link carries half the payload's pass."""
    across, along = dims if dims[1] % 2 == 0 else dims[::-1]
    cycle = [(0, y) for y in range(along)]
    for y in reversed(range(along)):
        columns = range(1, across) if (along - 1 - y) % 2 == 0 else reversed(range(1, across))
        cycle += [(x, y) for x in columns]
    load = links.ring_pass_load(cycle, (across, along), False, 960, both_ways=True)
    fabric = MeshFabric(name="g", dims=(across, along), link_bandwidth_bytes_per_s=1.0)
    assert by(fabric, "all-gather", 960.0, len(cycle), "snake-ring") == pytest.approx(float(load))


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_a_ring_folded_onto_a_line_loads_each_link_once(size):
    order = [*range(0, size, 2), *reversed(range(1, size, 2))]
    cycle = [(x,) for x in order]
    load = links.ring_pass_load(cycle, (size,), False, 840, both_ways=False)
    fabric = MeshFabric(name="g", dims=(size,), link_bandwidth_bytes_per_s=1.0)
    assert by(fabric, "all-gather", 840.0, size, "ring") == pytest.approx(float(load))


# ---- laws ----


@given(data=st.data(), fabric=fabrics, op=OPS, payload=payloads)
def test_never_faster_than_the_bytes_over_the_ports(data, fabric, op, payload):
    ranks, stride = data.draw(groups_on(fabric))
    cost = one(fabric, op, payload, ranks, stride)
    assert cost.time_s >= cost.bound_s
    for time_s in cost.alternatives.values():
        assert time_s >= cost.time_s


@given(data=st.data(), fabric=fabrics, op=OPS, payload=payloads, factor=st.floats(1.0, 1e3))
def test_monotone_in_bytes(data, fabric, op, payload, factor):
    ranks, stride = data.draw(groups_on(fabric))
    less = one(fabric, op, payload, ranks, stride).time_s
    assert one(fabric, op, payload * factor, ranks, stride).time_s >= less


@given(fabric=fabrics, op=st.sampled_from(_core.COLLECTIVE_OPS), payload=payloads)
def test_one_rank_costs_nothing(fabric, op, payload):
    cost = one(fabric, op, payload, 1)
    assert (cost.time_s, cost.algorithm, cost.alternatives) == (0.0, "none", {})


@given(data=st.data(), fabric=fabrics, op=OPS)
def test_no_bytes_cost_nothing(data, fabric, op):
    ranks, stride = data.draw(groups_on(fabric))
    assert one(fabric, op, 0.0, ranks, stride).time_s == 0.0


@given(data=st.data(), fabric=tiered_fabrics(min_tiers=2), payload=payloads)
def test_hierarchical_is_never_worse_than_a_flat_ring_on_tiers(data, fabric, payload):
    ranks, stride = data.draw(groups_on(fabric, min_ranks=2))
    for op in ("all-reduce", "reduce-scatter", "all-gather"):
        found = one(fabric, op, payload, ranks, stride).alternatives
        if "hierarchical" in found:
            assert found["hierarchical"] <= found["ring"] * (1 + 1e-12)


@given(data=st.data(), fabric=fabrics, payload=payloads)
def test_all_reduce_is_at_most_its_two_halves_and_at_least_each(data, fabric, payload):
    ranks, stride = data.draw(groups_on(fabric))
    times = {op: one(fabric, op, payload, ranks, stride).time_s for op in GROUP_OPS}
    both = times["reduce-scatter"] + times["all-gather"]
    assert times["all-reduce"] <= both * (1 + 1e-12)
    assert times["all-reduce"] >= times["reduce-scatter"] == times["all-gather"]


@given(data=st.data(), fabric=fabrics, op=OPS, payload=payloads, factor=st.floats(1.0, 1e3))
def test_more_bandwidth_never_hurts(data, fabric, op, payload, factor):
    ranks, stride = data.draw(groups_on(fabric))
    slow = one(fabric, op, payload, ranks, stride).time_s
    assert one(faster(fabric, factor), op, payload, ranks, stride).time_s <= slow * (1 + 1e-12)


def faster(fabric, factor):
    if isinstance(fabric, FlatFabric):
        return fabric.replace(bandwidth_bytes_per_s=fabric.bandwidth_bytes_per_s * factor)
    if isinstance(fabric, TieredFabric):
        quick = tuple(
            tier.replace(bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s * factor)
            for tier in fabric.tiers
        )
        return fabric.replace(tiers=quick)
    return fabric.replace(link_bandwidth_bytes_per_s=fabric.link_bandwidth_bytes_per_s * factor)


@given(data=st.data(), mesh=grid_fabrics(kinds=(MeshFabric,)), op=OPS, payload=payloads)
def test_closing_a_mesh_into_a_torus_never_hurts(data, mesh, op, payload):
    ranks, stride = data.draw(groups_on(mesh))
    torus = TorusFabric.from_dict({**mesh.to_dict(), "kind": "torus"})
    opened = one(mesh, op, payload, ranks, stride).time_s
    assert one(torus, op, payload, ranks, stride).time_s <= opened * (1 + 1e-12)


@given(data=st.data(), fabric=fabrics, op=OPS, payload=payloads)
def test_doubling_bytes_and_latency_doubles_the_time(data, fabric, op, payload):
    ranks, stride = data.draw(groups_on(fabric))
    record = fabric_record(fabric).copy()
    record["latency_s"] *= 2.0
    code = _core.COLLECTIVE_OPS.index(op)
    once = one(fabric, op, payload, ranks, stride).time_s
    columns = [np.array([x]) for x in (2.0 * payload, ranks, stride)]
    twice, _, status = _core.collective_batch(
        record, np.zeros(1, np.int32), np.array([code], np.uint8), *columns, 1
    )
    assert status[0] == 0
    assert twice[0] == pytest.approx(2.0 * once, rel=1e-12)


@given(payload=payloads, latency=latencies, ranks=st.integers(1, 512))
def test_one_tier_is_a_flat_fabric(payload, latency, ranks):
    flat = FlatFabric(name="f", bandwidth_bytes_per_s=1e9, latency_s=latency)
    tier = Tier(name="all", bandwidth_bytes_per_s=1e9, latency_s=latency)
    tiered = TieredFabric(name="t", tiers=(tier,))
    for op in GROUP_OPS:
        assert one(flat, op, payload, ranks).time_s == one(tiered, op, payload, ranks).time_s


@given(tiers=tiered_fabrics(min_tiers=2), payload=payloads, ranks=st.integers(1, 300))
def test_tiers_are_never_slower_than_flat_at_their_slowest(tiers, payload, ranks):
    assume(tiers.capacity is None or ranks <= tiers.capacity)
    flat = FlatFabric(
        name="f",
        bandwidth_bytes_per_s=min(t.bandwidth_bytes_per_s for t in tiers.tiers),
        latency_s=max(t.latency_s for t in tiers.tiers),
    )
    for op in GROUP_OPS:
        assert one(tiers, op, payload, ranks).time_s <= one(flat, op, payload, ranks).time_s * (
            1 + 1e-12
        )
