"""Collectives and messages: by hand, against oracles and explicit links, laws, batches, refusals."""

import math
from itertools import product

import numpy as np
import pytest
from case_counts import some_or_many
from golden_files import refused_calls
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import links
from reference.collectives import price_message, price_ranks
from strategies import fabrics, grid_fabrics, groups_on, latencies, payloads, tiered_fabrics

from phaze_fast import _core
from phaze_fast.cost import collective, collective_batch, message_batch
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import (
    Cluster,
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


KNOWN = ("dgx-a100-peak", "dgx-h100-peak", "tpuv4-pod", "wafer-mesh", "phaze-flat")


PRESETS = st.sampled_from([presets.fabric(name) for name in KNOWN])


FABRICS = st.one_of(fabrics, PRESETS)


ROOM = 512  # ranks of an unbounded fabric that groups are drawn from


BAD_RANKS, TOO_LARGE, BAD_FABRIC = 3, 5, 7


def room(fabric):
    return min(fabric.capacity or ROOM, ROOM)


@st.composite
def runs_on(draw, fabric):
    """(ranks, stride, outer_ranks, outer_stride) that fits: nested as in plans, or anyhow."""
    held = room(fabric)
    stride = draw(st.sampled_from([1, 1, 2, 3, 4, 8, 16]))
    ranks = draw(st.integers(1, 12))
    assume((ranks - 1) * stride < held)
    if draw(st.booleans()):
        apart = ranks * stride * draw(st.integers(1, 6))
    else:
        inner = (ranks - 1) * stride
        apart = draw(st.integers(inner + 1, max(inner + 1, min(held, 4 * inner + 20))))
    most = (held - 1 - (ranks - 1) * stride) // apart + 1
    return ranks, stride, draw(st.integers(1, max(1, min(most, 16)))), apart


def listed(shape, base=0):
    ranks, stride, outer_ranks, outer_stride = shape
    return [base + i * stride + j * outer_stride for i in range(ranks) for j in range(outer_ranks)]


def described(record):
    """Kind, and columns of the levels, as the oracle takes them."""
    row = record[0]
    n = int(row["levels"])
    columns = [row[name][:n].tolist() for name in ("size", "bytes_per_s", "latency_s", "wrap")]
    return "grid" if row["kind"] else "switched", *columns


def every_algorithm(record, op, payload, shape):
    ranks, stride, *outer = shape
    asked = (record, _core.COLLECTIVE_OPS.index(op), payload, ranks, stride)
    found = {}
    for algorithm, name in enumerate(_core.ALGORITHMS):
        time_s, ran, bad = _core.collective_with(*asked, algorithm, *outer)
        if ran == algorithm and algorithm and not bad:
            found[name] = time_s
    return found


def time_s(fabric, op, payload, shape):
    ranks, stride, outer_ranks, outer_stride = shape
    return collective(fabric, op, payload, ranks, stride, outer_ranks, outer_stride).time_s


# ---- by hand ----

DGX = presets.fabric("dgx-a100-peak")  # nodes of 8 at 300 GB/s, 25 GB/s between them


@st.composite
def uneven_grids(draw):
    """Dimensions with bandwidths, latencies and wraps of their own, as no preset has them."""
    dims = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8]), min_size=1, max_size=4))
    n = len(dims)
    record = np.zeros(1, dtype=_core.FABRIC_DTYPE)
    record["kind"], record["levels"] = 1, n
    columns = {
        "size": dims,
        "bytes_per_s": draw(st.lists(st.floats(1e8, 1e12), min_size=n, max_size=n)),
        "latency_s": draw(st.lists(latencies, min_size=n, max_size=n)),
        "wrap": draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)),
    }
    for name, values in columns.items():
        record[name][0, :n] = values
    return record


def by(fabric, op, payload, ranks, algorithm, stride=1):
    return collective(fabric, op, payload, ranks, stride).alternatives[algorithm]


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


def test_point_to_point_by_hand():
    assert collective(FLAT, "point-to-point", 800.0, 2).time_s == 8.5
    tiers = presets.fabric("dgx-a100-peak")
    assert collective(tiers, "point-to-point", 3e9, 2, stride=1).time_s == pytest.approx(
        0.01 + 3e-6
    )
    assert collective(tiers, "point-to-point", 3e9, 2, stride=8).time_s == pytest.approx(
        0.12 + 5e-6
    )


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
    assert "hierarchical" not in collective(TIERS, "all-reduce", 800.0, 4, stride=4).alternatives


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
        # an even tile of 2x4: both ways round one cycle of 8, twice as fast as a line
        (grid(MeshFabric, 2, 4), "all-gather", 8, 1, "snake-ring", 3.5 + 0.07),
        # a ring of 8: 800 * 8/8 / 100; 7 messages
        (grid(TorusFabric, 8), "all-to-all", 8, 1, "pairwise", 8.0 + 0.07),
        # a line of 8: 4 * 4/8 of 800 across the middle
        (grid(MeshFabric, 8), "all-to-all", 8, 1, "pairwise", 16.0 + 0.07),
    ],
)
def test_grids_by_hand(fabric, op, ranks, stride, algorithm, expected):
    assert by(fabric, op, 800.0, ranks, algorithm, stride) == pytest.approx(expected, rel=1e-14)


def test_ties_go_to_the_algorithm_listed_first():
    fabric = FlatFabric(name="f", bandwidth_bytes_per_s=1.0, latency_s=0.0)
    cost = collective(grid(MeshFabric, 2, 2).replace(hop_latency_s=0.0), "all-gather", 800.0, 4)
    best = [name for name, t in cost.alternatives.items() if t == cost.time_s]
    assert len(best) > 1
    assert cost.algorithm == min(best, key=_core.ALGORITHMS.index)
    assert collective(fabric, "all-reduce", 1.0, 2).algorithm == "ring"


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


@given(data=st.data(), fabric=fabrics, op=OPS, payload=payloads, factor=st.floats(1.0, 1e3))
def test_monotone_in_bytes(data, fabric, op, payload, factor):
    ranks, stride = data.draw(groups_on(fabric))
    less = collective(fabric, op, payload, ranks, stride).time_s
    assert collective(fabric, op, payload * factor, ranks, stride).time_s >= less


@given(fabric=fabrics, op=st.sampled_from(_core.COLLECTIVE_OPS), payload=payloads)
def test_one_rank_costs_nothing(fabric, op, payload):
    cost = collective(fabric, op, payload, 1)
    assert (cost.time_s, cost.algorithm, cost.alternatives) == (0.0, "none", {})


@given(data=st.data(), fabric=fabrics, op=OPS)
def test_no_bytes_cost_nothing(data, fabric, op):
    ranks, stride = data.draw(groups_on(fabric))
    assert collective(fabric, op, 0.0, ranks, stride).time_s == 0.0


@given(data=st.data(), fabric=tiered_fabrics(min_tiers=2), payload=payloads)
def test_hierarchical_is_never_worse_than_a_flat_ring_on_tiers(data, fabric, payload):
    ranks, stride = data.draw(groups_on(fabric, min_ranks=2))
    for op in ("all-reduce", "reduce-scatter", "all-gather"):
        found = collective(fabric, op, payload, ranks, stride).alternatives
        if "hierarchical" in found:
            assert found["hierarchical"] <= found["ring"] * (1 + 1e-12)


@given(data=st.data(), fabric=fabrics, payload=payloads)
def test_all_reduce_is_at_most_its_two_halves_and_at_least_each(data, fabric, payload):
    ranks, stride = data.draw(groups_on(fabric))
    times = {op: collective(fabric, op, payload, ranks, stride).time_s for op in GROUP_OPS}
    both = times["reduce-scatter"] + times["all-gather"]
    assert times["all-reduce"] <= both * (1 + 1e-12)
    assert times["all-reduce"] >= times["reduce-scatter"] == times["all-gather"]


@given(data=st.data(), mesh=grid_fabrics(kinds=(MeshFabric,)), op=OPS, payload=payloads)
def test_closing_a_mesh_into_a_torus_never_hurts(data, mesh, op, payload):
    ranks, stride = data.draw(groups_on(mesh))
    torus = TorusFabric.from_dict({**mesh.to_dict(), "kind": "torus"})
    opened = collective(mesh, op, payload, ranks, stride).time_s
    assert collective(torus, op, payload, ranks, stride).time_s <= opened * (1 + 1e-12)


@given(data=st.data(), fabric=fabrics, op=OPS, payload=payloads)
def test_doubling_bytes_and_latency_doubles_the_time(data, fabric, op, payload):
    ranks, stride = data.draw(groups_on(fabric))
    record = fabric_record(fabric).copy()
    record["latency_s"] *= 2.0
    code = _core.COLLECTIVE_OPS.index(op)
    once = collective(fabric, op, payload, ranks, stride).time_s
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
        assert (
            collective(flat, op, payload, ranks).time_s
            == collective(tiered, op, payload, ranks).time_s
        )


@given(tiers=tiered_fabrics(min_tiers=2), payload=payloads, ranks=st.integers(1, 300))
def test_tiers_are_never_slower_than_flat_at_their_slowest(tiers, payload, ranks):
    assume(tiers.capacity is None or ranks <= tiers.capacity)
    flat = FlatFabric(
        name="f",
        bandwidth_bytes_per_s=min(t.bandwidth_bytes_per_s for t in tiers.tiers),
        latency_s=max(t.latency_s for t in tiers.tiers),
    )
    for op in GROUP_OPS:
        assert collective(tiers, op, payload, ranks).time_s <= collective(
            flat, op, payload, ranks
        ).time_s * (1 + 1e-12)


# ---- every small grid ----


GRIDS = [
    *((n,) for n in range(2, 17)),
    *product(range(2, 7), repeat=2),
    *product((2, 3, 4), repeat=3),
]
SOME_OR_ALL = [
    pytest.param([*GRIDS[:11], (2, 3), (4, 4), (2, 3, 2)], 30, id="some"),
    pytest.param(GRIDS, 200, id="all", marks=pytest.mark.slow),
]


def tilings(dims):
    """(ranks, stride) whose groups tile the grid and all lie on it alike."""
    total = math.prod(dims)
    for ranks in range(2, min(total, 48) + 1):
        for stride in range(1, total // ranks + 1):
            if total % (ranks * stride) == 0:
                shapes = {
                    tuple(tuple(x - y for x, y in zip(m, group[0], strict=True)) for m in group)
                    for group in links.groups(dims, ranks, stride)
                }
                if len(shapes) == 1:
                    yield ranks, stride


def covers_whole_rings(dims, ranks, stride):
    """Whether in every dimension the group has one member or goes all the way round."""
    group = links.groups(dims, ranks, stride)[0]
    for d, size in enumerate(dims):
        places = sorted({m[d] for m in group})
        if len(places) > 1 and len(places) * (places[1] - places[0]) != size:
            return False
    return True


@pytest.mark.parametrize("kind", [TorusFabric, MeshFabric])
@pytest.mark.parametrize(("grids", "least"), SOME_OR_ALL)
def test_all_to_all_loads_the_busiest_link_as_routed(kind, grids, least):
    """Routing dimension by dimension loads each as the formula says, all dimensions at once."""
    exact = 0
    for dims in grids:
        fabric = kind(name="g", dims=dims, link_bandwidth_bytes_per_s=1.0)
        for ranks, stride in tilings(dims):
            found = collective(fabric, "all-to-all", 5040.0, ranks, stride).time_s
            routed = float(links.all_to_all_load(dims, kind is TorusFabric, ranks, stride, 5040))
            if kind is MeshFabric or covers_whole_rings(dims, ranks, stride):
                assert found == pytest.approx(routed, rel=1e-12), (dims, ranks, stride)
                exact += 1
            else:  # a part of a ring is charged as a line
                assert found >= routed * (1 - 1e-12), (dims, ranks, stride)
    assert exact > least


@pytest.mark.parametrize("kind", [TorusFabric, MeshFabric])
@pytest.mark.parametrize(("grids", "least"), SOME_OR_ALL)
def test_point_to_point_loads_the_busiest_link_as_routed(kind, grids, least):
    assert len(grids) > least / 10
    for dims in grids:
        fabric = kind(name="g", dims=dims, link_bandwidth_bytes_per_s=1.0)
        for distance in range(1, math.prod(dims)):
            found = collective(fabric, "point-to-point", 60.0, 2, distance).time_s
            routed = float(links.shift_load(dims, kind is TorusFabric, distance, 60))
            assert found == pytest.approx(routed, rel=1e-12), (dims, distance)


# ---- groups of two runs, and messages ----


def test_messages_by_hand():
    found = message_batch(DGX, 3e9, [0, 7, 7, 8, 5], [7, 8, 0, 15, 5]).time_s
    inside, between = 0.01 + 3e-6, 0.12 + 5e-6
    assert found == pytest.approx([inside, between, inside, inside, 0.0])
    torus = presets.fabric("tpuv4-pod").replace(
        dims=(8, 4), link_bandwidth_bytes_per_s=1.0, hop_latency_s=0.5
    )
    # 1 -> 7 is two hops the short way, 7 -> 8 one that way and one up, 0 -> 4 half round both ways
    found = message_batch(torus, 10.0, [1, 7, 0], [7, 8, 4]).time_s
    assert found.tolist() == [20.0 + 1.0, 10.0 + 1.0, 20.0 + 2.0]


# ---- explicit ranks ----


def priced_as_its_ranks(data, fabric, op, payload):
    shape = data.draw(runs_on(fabric))
    record = fabric_record(fabric)
    expected = price_ranks(described(record), op, payload, listed(shape))
    assert every_algorithm(record, op, payload, shape) == pytest.approx(expected, rel=1e-10)
    if expected:
        fastest = min(expected.values())
        assert time_s(fabric, op, payload, shape) == pytest.approx(fastest, rel=1e-10)


@some_or_many(200, 2500, thorough=True)
def test_two_runs_are_priced_as_their_ranks(cases):
    law = given(data=st.data(), fabric=FABRICS, op=OPS, payload=payloads)(priced_as_its_ranks)
    settings(max_examples=cases)(law)()


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data(), record=uneven_grids(), op=OPS, payload=payloads)
def test_two_runs_on_uneven_grids(data, record, op, payload):
    total = math.prod(described(record)[1])
    sized = presets.fabric("wafer-mesh").replace(dims=(total,))
    shape = data.draw(runs_on(sized))
    expected = price_ranks(described(record), op, payload, listed(shape))
    assert every_algorithm(record, op, payload, shape) == pytest.approx(expected, rel=1e-10)


def messages_priced_as_their_ranks(data, fabric, payload):
    ends = st.integers(0, room(fabric) - 1)
    pairs = data.draw(st.lists(st.tuples(ends, ends), min_size=1, max_size=8))
    source, target = (np.array(column) for column in zip(*pairs, strict=True))
    found = message_batch(fabric, payload, source, target)
    fabric = described(fabric_record(fabric))
    expected = [price_message(fabric, payload, a, b) for a, b in pairs]
    assert found.time_s == pytest.approx(expected, rel=1e-12)
    assert not found.status.any()


@some_or_many(100, 250)
def test_messages_are_priced_as_their_ranks(cases):
    law = given(data=st.data(), fabric=FABRICS, payload=payloads)(messages_priced_as_their_ranks)
    settings(max_examples=cases)(law)()


# ---- laws ----


@given(data=st.data(), fabric=FABRICS, op=OPS, payload=payloads)
def test_either_run_first_and_runs_that_join_give_the_same_bits(data, fabric, op, payload):
    ranks, stride, outer_ranks, apart = data.draw(runs_on(fabric))
    shape = (ranks, stride, outer_ranks, apart)
    found = time_s(fabric, op, payload, shape)
    assert time_s(fabric, op, payload, (outer_ranks, apart, ranks, stride)) == found
    if apart == ranks * stride:
        assert time_s(fabric, op, payload, (ranks * outer_ranks, stride, 1, 0)) == found
    if ranks == 1:
        assert time_s(fabric, op, payload, (outer_ranks, apart, 1, 0)) == found
    if outer_ranks == 1:
        assert collective(fabric, op, payload, ranks, stride).time_s == found


@given(data=st.data(), fabric=tiered_fabrics(min_tiers=2), op=OPS, payload=payloads)
def test_moving_a_group_by_whole_units_changes_nothing(data, fabric, op, payload):
    shape = data.draw(runs_on(fabric))
    ranks = listed(shape)
    units = np.cumprod([tier.size or ROOM for tier in fabric.tiers])
    unit = next(int(unit) for unit in units if max(ranks) < unit)
    base = unit * data.draw(st.integers(0, max(0, room(fabric) // unit - 1)))
    moved = price_ranks(described(fabric_record(fabric)), op, payload, listed(shape, base))
    if moved:
        found = time_s(fabric, op, payload, shape)
        assert found == pytest.approx(min(moved.values()), rel=1e-10)


def with_bandwidth(fabric, level, factor):
    tiers = list(fabric.tiers)
    rate = tiers[level].bandwidth_bytes_per_s * factor
    tiers[level] = tiers[level].replace(bandwidth_bytes_per_s=rate)
    return fabric.replace(tiers=tuple(tiers))


@given(data=st.data(), fabric=tiered_fabrics(), op=OPS, payload=payloads)
def test_more_bandwidth_of_a_tier_never_hurts(data, fabric, op, payload):
    shape = data.draw(runs_on(fabric))
    level = data.draw(st.integers(0, len(fabric.tiers) - 1))
    faster = with_bandwidth(fabric, level, data.draw(st.floats(1.0, 1e3)))
    before = time_s(fabric, op, payload, shape)
    assert time_s(faster, op, payload, shape) <= before * (1 + 1e-12)
    ends = st.integers(0, room(fabric) - 1)
    a, b = data.draw(ends), data.draw(ends)
    quick, slow = (message_batch(f, payload, a, b).time_s[0] for f in (faster, fabric))
    assert quick <= slow


@given(data=st.data(), fabric=grid_fabrics(), op=OPS, payload=payloads)
def test_more_bandwidth_of_a_grid_never_hurts(data, fabric, op, payload):
    shape = data.draw(runs_on(fabric))
    rate = fabric.link_bandwidth_bytes_per_s * data.draw(st.floats(1.0, 1e3))
    faster = fabric.replace(link_bandwidth_bytes_per_s=rate)
    before = time_s(fabric, op, payload, shape)
    assert time_s(faster, op, payload, shape) <= before * (1 + 1e-12)


@given(data=st.data(), fabric=tiered_fabrics(min_tiers=2), op=OPS, payload=payloads)
def test_a_group_inside_a_unit_does_not_see_the_tiers_outside(data, fabric, op, payload):
    shape = data.draw(runs_on(fabric))
    units = {
        level: math.prod(tier.size for tier in fabric.tiers[:level])
        for level in range(1, len(fabric.tiers))
    }
    outside = [level for level, unit in units.items() if max(listed(shape)) < unit]
    assume(outside)
    level = data.draw(st.sampled_from(outside))
    unit = units[level]
    slow = with_bandwidth(fabric, level, 1e-6)
    assert time_s(slow, op, payload, shape) == time_s(fabric, op, payload, shape)
    a, b = (data.draw(st.integers(0, unit - 1)) for _ in range(2))
    times = [message_batch(f, payload, a, b).time_s[0] for f in (slow, fabric)]
    assert times[0] == times[1]


@given(data=st.data(), fabric=tiered_fabrics(min_tiers=2), op=OPS, payload=payloads)
def test_what_must_cross_a_tier_takes_its_time(data, fabric, op, payload):
    """Bytes that have to leave the fullest unit, over the ports of its members at once."""
    shape = data.draw(runs_on(fabric))
    ranks = listed(shape)
    level = data.draw(st.integers(1, len(fabric.tiers) - 1))
    unit = math.prod(tier.size for tier in fabric.tiers[:level])
    above = unit * (fabric.tiers[level].size or ROOM)
    held = np.unique(np.array(ranks) // unit, return_counts=True)[1]
    assume(len(held) > 1 and max(ranks) < above)
    ports = int(held.max()) * fabric.tiers[level].bandwidth_bytes_per_s
    units, fullest, p = len(held), int(held.max()), len(ranks)
    leaving = {
        "all-reduce": 2 * (units - 1) / units,
        "reduce-scatter": (units - 1) / units,
        "all-gather": (units - 1) / units,
        "all-to-all": fullest * (p - fullest) / p,
        "broadcast": 1.0,
    }[op]
    assert time_s(fabric, op, payload, shape) >= leaving * payload / ports * (1 - 1e-12)


@given(data=st.data(), fabric=FABRICS, payload=payloads)
def test_messages_from_the_first_rank_are_points_at_a_stride(data, fabric, payload):
    distance = data.draw(st.integers(1, max(1, room(fabric) - 1)))
    assume(distance < room(fabric))
    found = collective_batch(fabric, "point-to-point", payload, 2, distance).time_s
    there = message_batch(fabric, payload, 0, distance).time_s
    back = message_batch(fabric, payload, distance, 0).time_s
    assert found.tobytes() == there.tobytes() == back.tobytes()


# ---- bad questions and batches ----


@pytest.mark.parametrize(("arguments", "reason"), refused_calls("collective"))
def test_bad_collectives_say_why(arguments, reason):
    with pytest.raises(InvalidInputError, match=reason):
        collective(presets.fabric("wafer-mesh"), "all-reduce", *arguments)


def test_point_to_point_is_between_two():
    assert collective(DGX, "point-to-point", 3e9, 1, 1, 2, 8).time_s == pytest.approx(0.120005)
    with pytest.raises(InvalidInputError, match="exactly 1 or 2"):
        collective(DGX, "point-to-point", 3e9, 2, 1, 2, 8)


def test_bad_messages_carry_their_reason():
    cluster = Cluster(devices=16, fabric=DGX)
    found = message_batch(cluster, 1.0, [-1, 0, 16, 3], [0, -1, 0, 3])
    assert found.status.tolist() == [BAD_RANKS, BAD_RANKS, TOO_LARGE, 0]
    assert np.isnan(found.time_s[:3]).all()
    broken = fabric_record(DGX).copy()
    broken["levels"] = 0
    ones = np.ones(1, np.int64)
    assert _core.message_batch(broken, np.ones(1), ones, ones)[2].tolist() == [BAD_FABRIC]
    with pytest.raises(InvalidInputError, match="source: dtype float64"):
        message_batch(cluster, 1.0, [0.5], [1])
    assert len(message_batch(cluster, [], 0, 1)) == 0


@given(data=st.data(), fabric=FABRICS, op=OPS, payload=payloads)
def test_never_faster_than_the_bytes_over_the_ports(data, fabric, op, payload):
    cost = collective(fabric, op, payload, *data.draw(runs_on(fabric)))
    assert cost.bound_s <= cost.time_s <= min(cost.alternatives.values(), default=math.inf)


# ---- batches ----


def question(rng, n, listed):
    """Random rows, a tenth of them bad."""
    return {
        "op": rng.integers(0, 7, n).astype(np.uint8),
        "payload_bytes": np.where(rng.random(n) < 0.05, np.nan, rng.uniform(-1e8, 1e9, n)),
        "ranks": rng.integers(-1, 70, n),
        "stride": rng.integers(0, 20, n),
        "fabric": rng.integers(-1, len(listed) + 1, n).astype(np.int32),
        "outer_ranks": np.where(rng.random(n) < 0.7, 1, rng.integers(0, 5, n)),
        "outer_stride": rng.integers(0, 40, n),
    }


def test_batch_is_a_loop_of_singles_and_any_thread_count_gives_the_same_bits():
    listed = [presets.fabric(name) for name in presets.fabric_names()]
    rng = np.random.default_rng(7)
    asked = question(rng, 40_000, listed)
    first = collective_batch(listed, **asked, threads=1)
    for threads in (2, 3, 8):
        again = collective_batch(listed, **asked, threads=threads)
        assert first.time_s.tobytes() == again.time_s.tobytes()
        assert first.algorithm.tobytes() == again.algorithm.tobytes()
        assert first.status.tobytes() == again.status.tobytes()
    assert {0, 1, 2, 3, 4, 5, 6, 7} <= set(first.status.tolist())
    assert np.isnan(first.time_s[first.status != 0]).all()
    assert np.isfinite(first.time_s[first.status == 0]).all()
    for i in range(2000):
        if first.status[i] in (6, 7):
            continue
        fabric, op = listed[asked["fabric"][i]], _core.COLLECTIVE_OPS[asked["op"][i]]
        names = ("payload_bytes", "ranks", "stride", "outer_ranks", "outer_stride")
        arguments = [asked[name][i].item() for name in names]
        if first.status[i]:
            with pytest.raises(InvalidInputError):
                collective(fabric, op, *arguments)
        else:
            assert collective(fabric, op, *arguments).time_s == first.time_s[i]


def test_batch_broadcasts_numbers_and_results_are_read_only():
    times = collective_batch(presets.fabric("dgx-h100"), "all-gather", [1e6, 2e6], ranks=8)
    assert len(times) == 2
    assert times.time_s[1] > times.time_s[0]
    with pytest.raises(ValueError, match="read-only"):
        times.time_s[0] = 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *refused_calls("collective batch"),
        ({"ranks": [2**70]}, "ranks: dtype object is not accepted"),
    ],
)
def test_malformed_batches_name_the_argument(changes, message):
    asked = {"fabrics": FLAT, "op": "all-reduce", "payload_bytes": [1.0], "ranks": [2], **changes}
    with pytest.raises(InvalidInputError, match=message.replace("(", r"\(")):
        collective_batch(**asked)


def test_wrong_types_are_type_errors():
    with pytest.raises(TypeError):
        collective_batch(FLAT, "all-reduce", [1.0], ranks=[True])
    with pytest.raises(InvalidTypeError):
        collective_batch(FLAT, "all-reduce", [1j], ranks=[2])


def test_huge_values_do_not_overflow():
    fabric = presets.fabric("phaze-flat")
    assert math.isfinite(collective(fabric, "all-reduce", 1e300, 2**40, 2**20).time_s)
    with pytest.raises(InvalidInputError, match="finite"):
        collective(fabric.replace(bandwidth_bytes_per_s=1e-9), "all-reduce", 1e305, 8)


def test_a_cluster_has_only_so_many_devices():
    cluster = Cluster(devices=16, fabric=presets.fabric("dgx-a100"))
    assert collective(cluster, "all-reduce", 1e9, 16).time_s > 0
    with pytest.raises(InvalidInputError, match="does not fit the fabric"):
        collective(cluster, "all-reduce", 1e9, 17)
    times = collective_batch(
        [cluster, presets.fabric("dgx-a100")], "all-gather", 1e6, [17, 17], fabric=[0, 1]
    )
    assert times.status.tolist() == [5, 0]


def test_empty_batches_are_empty():
    assert len(collective_batch(FLAT, "all-reduce", [], 8)) == 0
    assert len(collective_batch(FLAT, "all-reduce", np.zeros(0), np.zeros(0, int))) == 0
    for bad in (None, [None], 3):
        with pytest.raises((InvalidInputError, TypeError)):
            collective_batch(FLAT, bad, [1.0], [2])


def test_a_cluster_cuts_the_torus_to_size():
    cluster = Cluster(devices=64, fabric=presets.fabric("tpuv4-pod"))
    assert cluster.fabric.dims == (4, 4, 4)
    whole = collective(cluster, "all-reduce", 1e9, 64)
    # bandwidth-optimal on three rings each way: 2 (63/64) V / (6 B), plus latency
    assert whole.time_s == pytest.approx(2 * 63 / 64 * 1e9 / (6 * 50e9) + 18e-6, rel=1e-12)
    assert whole.bound_s == pytest.approx(2 * 63 / 64 * 1e9 / (6 * 50e9), rel=1e-12)
