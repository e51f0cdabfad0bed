"""Groups of two runs and messages between ranks, against explicit ranks and laws."""

import math

import numpy as np
import pytest
from case_counts import some_or_many
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference.rank_groups import price_message, price_ranks
from strategies import fabrics, grid_fabrics, latencies, payloads, tiered_fabrics

from phaze_fast import _core
from phaze_fast.cost import collective, collective_batch, message_batch
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster, fabric_record, presets

GROUP_OPS = [op for op in _core.COLLECTIVE_OPS if op != "point-to-point"]
OPS = st.sampled_from(GROUP_OPS)
KNOWN = ("dgx-a100-peak", "dgx-h100-peak", "tpuv4-pod", "wafer-mesh", "phaze-flat")
PRESETS = st.sampled_from([presets.fabric(name) for name in KNOWN])
FABRICS = st.one_of(fabrics, PRESETS)
ROOM = 512  # ranks of an unbounded fabric that groups are drawn from
BAD_RANKS, BAD_STRIDE, TOO_LARGE, BAD_FABRIC = 3, 4, 5, 7


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


def test_replicas_of_three_stages_by_hand():
    """Ranks 0, 2, 12, 14: two in each of two nodes, of which each sends half over its own port."""
    found = collective(DGX, "all-reduce", 3e9, 2, 2, 2, 12)
    inside, between = 1 / 2 * 3e9 / 300e9 + 3e-6, 1 / 2 * 1.5e9 / 25e9 + 5e-6
    assert found.alternatives["hierarchical"] == pytest.approx(2 * (inside + between), rel=1e-14)
    assert found.alternatives["ring"] == pytest.approx(2 * (3 / 4 * 3e9 / 25e9 + 3 * 5e-6))


def test_runs_that_a_node_cuts_are_one_ring_by_hand():
    """Ranks 0 to 2 and 7 to 9: three, one and two members in three units of four."""
    tiers = tuple(
        tier.replace(size=size, bandwidth_bytes_per_s=rate, latency_s=late)
        for tier, size, rate, late in zip(
            DGX.tiers, (4, None), (100.0, 10.0), (0.1, 1.0), strict=True
        )
    )
    found = collective(DGX.replace(tiers=tiers), "all-gather", 60.0, 3, 1, 2, 7)
    assert found.alternatives == pytest.approx(
        {"ring": 5 / 6 * 60 / 10 + 5, "tree": 2 * 60 / 10 + 2 * 3}
    )


def test_runs_in_two_dimensions_by_hand():
    """On 4x4x4, ranks 0 to 3 in each of four planes: a torus of two dimensions."""
    torus = presets.fabric("tpuv4-pod").replace(dims=(4, 4, 4))
    plane = torus.replace(dims=(4, 4))
    for op in GROUP_OPS:
        across = collective(torus, op, 1e9, 4, 1, 4, 16).alternatives
        assert across == collective(plane, op, 1e9, 16).alternatives


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


@some_or_many(400, 2500, thorough=True)
def test_two_runs_are_priced_as_their_ranks(cases):
    law = given(data=st.data(), fabric=FABRICS, op=OPS, payload=payloads)(priced_as_its_ranks)
    settings(max_examples=cases)(law)()


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


@settings(max_examples=200)
@given(data=st.data(), record=uneven_grids(), op=OPS, payload=payloads)
def test_two_runs_on_uneven_grids(data, record, op, payload):
    total = math.prod(described(record)[1])
    sized = presets.fabric("wafer-mesh").replace(dims=(total,))
    shape = data.draw(runs_on(sized))
    expected = price_ranks(described(record), op, payload, listed(shape))
    assert every_algorithm(record, op, payload, shape) == pytest.approx(expected, rel=1e-10)


@settings(max_examples=250)
@given(data=st.data(), fabric=FABRICS, payload=payloads)
def test_messages_are_priced_as_their_ranks(data, fabric, payload):
    ends = st.integers(0, room(fabric) - 1)
    pairs = data.draw(st.lists(st.tuples(ends, ends), min_size=1, max_size=8))
    source, target = (np.array(column) for column in zip(*pairs, strict=True))
    found = message_batch(fabric, payload, source, target)
    fabric = described(fabric_record(fabric))
    expected = [price_message(fabric, payload, a, b) for a, b in pairs]
    assert found.time_s == pytest.approx(expected, rel=1e-12)
    assert not found.status.any()


@settings(max_examples=100)
@given(data=st.data(), record=uneven_grids(), payload=payloads)
def test_messages_on_uneven_grids(data, record, payload):
    ends = st.integers(0, math.prod(described(record)[1]) - 1)
    a, b = data.draw(ends), data.draw(ends)
    found, _, _ = _core.message_batch(record, *(np.array([x]) for x in (payload, a, b)))
    assert found[0] == pytest.approx(price_message(described(record), payload, a, b), rel=1e-12)


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


@given(data=st.data(), fabric=FABRICS, op=OPS, payload=payloads)
def test_never_faster_than_the_bound(data, fabric, op, payload):
    cost = collective(fabric, op, payload, *data.draw(runs_on(fabric)))
    assert cost.time_s >= cost.bound_s


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


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((2, 1, 0, 4), "ranks must be at least 1"),
        ((2, 1, 2, 0), "stride must be at least 1"),
        ((2, 0, 2, 4), "stride must be at least 1"),
        ((4, 2, 2, 6), "the runs overlap"),
        ((4, 2, 2, 2), "the runs overlap"),
        ((3, 2, 2, 3), "the runs overlap"),
        ((2, 1, 33, 2), "does not fit the fabric"),
        ((2, 1, 2, 63), "does not fit the fabric"),
        ((2**40, 1, 2**40, 2**41), "does not fit the fabric"),
    ],
)
def test_bad_groups_say_why(shape, reason):
    with pytest.raises(InvalidInputError, match=reason):
        collective(presets.fabric("wafer-mesh"), "all-reduce", 1.0, *shape)


def test_point_to_point_is_between_two():
    assert collective(DGX, "point-to-point", 3e9, 1, 1, 2, 8).time_s == pytest.approx(0.120005)
    with pytest.raises(InvalidInputError, match="exactly 1 or 2"):
        collective(DGX, "point-to-point", 3e9, 2, 1, 2, 8)


def test_a_batch_of_groups_is_a_loop_of_singles():
    rng = np.random.default_rng(5)
    n = 4000
    asked = {
        "ranks": rng.integers(0, 6, n),
        "stride": rng.integers(0, 9, n),
        "outer_ranks": rng.integers(0, 5, n),
        "outer_stride": rng.integers(0, 40, n),
    }
    codes = rng.integers(0, len(_core.COLLECTIVE_OPS), n).astype(np.uint8)
    first = collective_batch(DGX, codes, 1e6, **asked, threads=1)
    again = collective_batch(DGX, codes, 1e6, **asked, threads=3)
    assert first.time_s.tobytes() == again.time_s.tobytes()
    assert {0, BAD_RANKS, BAD_STRIDE} <= set(first.status.tolist())
    for i in range(0, n, 16):
        shape = [int(column[i]) for column in asked.values()]
        op = _core.COLLECTIVE_OPS[codes[i]]
        if first.status[i]:
            with pytest.raises(InvalidInputError):
                collective(DGX, op, 1e6, *shape)
        else:
            assert time_s(DGX, op, 1e6, shape) == first.time_s[i]


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


def test_costs_of_two_runs_say_so():
    text = str(collective(DGX, "all-reduce", 2**30, 2, 2, 4, 12))
    assert "2 ranks (stride 2, 4 such runs at stride 12)" in text
