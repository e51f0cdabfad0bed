"""Laws of collectives on a mesh, of random groups, volumes and links."""

import heapq
import itertools
import math
import random

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from reference.mesh_simulator import Traffic, block, build, random_work

from phaze_fast.wafer.mapping.mesh import (
    MESH_ALGORITHMS,
    Links,
    MeshGroup,
    Run,
    concurrent_s,
    mesh_collective,
)

OPS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
REDUCING = OPS[:3]

rates = st.floats(1e9, 1e13)
volumes = st.floats(0.0, 1e12)
ops = st.sampled_from(OPS)


@st.composite
def run_lists(draw):
    """Nested runs along each axis, in any order."""
    runs = []
    for axis in (0, 1):
        stride = 1
        for _ in range(draw(st.integers(0, 2))):
            stride *= draw(st.integers(1, 3))
            size = draw(st.integers(2, 5))
            runs.append(Run(axis, size, stride))
            stride *= size
    return draw(st.permutations(runs))


@given(ops, volumes, run_lists(), rates, rates, st.floats(0.0, 1e-3))
def test_auto_is_the_fastest_of_all(op, volume, runs, x, y, hop_s):
    links = Links(x, y, hop_s)
    best = mesh_collective(op, volume, runs, links)
    named = [mesh_collective(op, volume, runs, links, a) for a in MESH_ALGORITHMS[1:]]
    assert best.time_s == min(n.time_s for n in named)
    assert mesh_collective(op, volume, runs, links, best.algorithm) == best


@given(ops, volumes, run_lists(), rates, rates, st.sampled_from(MESH_ALGORITHMS))
def test_without_latency_time_is_linear_in_bytes(op, volume, runs, x, y, algorithm):
    one = mesh_collective(op, volume, runs, Links(x, y), algorithm).time_s
    three = mesh_collective(op, 3 * volume, runs, Links(x, y), algorithm).time_s
    assert three == pytest.approx(3 * one, rel=1e-12)
    assert mesh_collective(op, 0.0, runs, Links(x, y), algorithm).time_s == 0.0


@given(ops, volumes, run_lists(), rates, rates, st.floats(1.0, 8.0), st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(op, volume, runs, x, y, more_x, more_y):
    for algorithm in MESH_ALGORITHMS:
        before = mesh_collective(op, volume, runs, Links(x, y, 1e-9), algorithm).time_s
        after = mesh_collective(op, volume, runs, Links(x * more_x, y * more_y, 1e-9), algorithm)
        assert after.time_s <= before * (1 + 1e-12)


@given(ops, volumes, run_lists(), rates, rates)
def test_no_die_receives_faster_than_its_links(op, volume, runs, x, y):
    """The dies at a corner that belong to different groups: what must reach or leave them."""
    assume(runs)
    members = math.prod(run.size for run in runs)
    rate = 0.0
    for axis, bytes_per_s in enumerate((x, y)):
        steps = [run.stride for run in runs if run.axis == axis]
        rate += bytes_per_s / min(steps) if steps else 0.0
    needed = volume if op == "all-reduce" else volume * (members - 1) / members
    assert mesh_collective(op, volume, runs, Links(x, y)).time_s >= needed / rate * (1 - 1e-12)


@given(ops, volumes, st.integers(0, 1), st.integers(2, 9), st.integers(1, 5), rates, rates)
def test_twice_the_stride_is_twice_the_time_of_a_line(op, volume, axis, size, stride, x, y):
    near = mesh_collective(op, volume, [Run(axis, size, stride)], Links(x, y)).time_s
    far = mesh_collective(op, volume, [Run(axis, size, 2 * stride)], Links(x, y)).time_s
    assert far == pytest.approx(2 * near, rel=1e-12)


@given(st.floats(1.0, 1e12), run_lists(), rates, rates, st.sampled_from(MESH_ALGORITHMS))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(volume, runs, x, y, algorithm):
    links = Links(x, y, 1e-7)
    reduce, scatter, gather = (
        mesh_collective(op, volume, runs, links, algorithm)
        for op in ("all-reduce", "reduce-scatter", "all-gather")
    )
    assert scatter == gather
    assert reduce.time_s == pytest.approx(scatter.time_s + gather.time_s, rel=1e-12)


@example("all-gather", 301.0, [Run(0, 2), Run(1, 3)], 1e9, 1e9, "auto")
@given(ops, st.floats(1.0, 1e12), run_lists(), rates, rates, st.sampled_from(MESH_ALGORITHMS))
def test_alone_a_concurrent_set_takes_the_closed_form(op, volume, runs, x, y, algorithm):
    width, height = block(runs)
    assume(width * height <= 200)
    links = Links(x, y, 1e-7)
    group = MeshGroup(op, volume, tuple(runs), (1, 2, width, height), algorithm)
    alone = mesh_collective(op, volume, runs, links, algorithm).time_s
    assert concurrent_s(width + 1, height + 2, [group], links) == pytest.approx(alone, rel=1e-9)


# ---- links of the simulation ----


def played_first_come_first_served(traffic):
    """When each packet has arrived over links that take them in the order of their coming."""
    free, waits, ends = [0.0] * len(traffic.seconds_per_byte), list(traffic.waits), {}
    order = itertools.count()
    events = [(0.0, next(order), node, 0) for node, left in enumerate(waits) if not left]
    while events:
        now, _, node, at = heapq.heappop(events)
        route, released = traffic.routes[node], ()
        if at < 0:
            released = (traffic.followers[node],)
        elif at < len(route):
            free[route[at]] = max(now, free[route[at]])
            free[route[at]] += traffic.sizes[node] * traffic.seconds_per_byte[route[at]]
            end = free[route[at]]
            heapq.heappush(events, (end + traffic.hop_s, next(order), node, at + 1))
            if at == 0 and node in traffic.followers:
                heapq.heappush(events, (end, next(order), node, -1))
        else:
            ends[node], released = now, traffic.then[node]
        for other in released:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(events, (now, next(order), other, 0))
    return ends


def test_packets_of_one_channel_find_one_queue():
    """Links with two virtual channels give collectives alone what links with one do, bit by bit."""
    rng = random.Random(5)
    for _ in range(60):
        works = [random_work(rng, 6, 4, OPS) for _ in range(rng.choice([1, 2, 3]))]
        links = rng.choice([1e9, 1.37e9]), rng.choice([1e9, 3e9]), rng.choice([0.0, 1e-7])
        how = {"in_step": rng.random() < 0.5, "paced": rng.random() < 0.5}
        traffic = build(6, 4, links, works, packets=4, **how)
        expected = played_first_come_first_served(traffic)
        assert traffic.play() == max(expected.values())
        assert traffic.ends == expected


def test_two_channels_share_a_link_byte_for_byte():
    """Large packets and small ones that come at once: either kind gets half, then the rest."""
    traffic = Traffic(2, 1, (1.0, 1.0))
    large = [traffic.send_along((0,), 10.0, []) for _ in range(4)]
    small = [traffic.send_along((0,), 1.0, [], channel=1) for _ in range(20)]
    assert traffic.play() == 60.0
    assert traffic.ends[large[1]] == pytest.approx(40.0, abs=10.0)  # 20 bytes of each
    assert traffic.ends[small[-1]] == pytest.approx(40.0, abs=10.0)
    assert traffic.ends[large[-1]] == 60.0  # alone for the rest
    late = Traffic(2, 1, (1.0, 1.0))  # nothing is owed to one that was not there
    for _ in range(5):
        late.send_along((0,), 10.0, [])
    begun = late.pause(30.0, [])
    last = [late.send_along((0,), 1.0, [begun], channel=1) for _ in range(10)][-1]
    late.play()
    assert 45.0 <= late.ends[last] <= 60.0
