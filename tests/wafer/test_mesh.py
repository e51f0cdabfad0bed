"""Collectives on meshes: by hand, simulated packet by packet, and laws."""

import heapq
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import mesh_simulator as sim
from reference.mesh_simulator import Collective, Traffic, block, build, random_work, simulate_alone

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.mapping.mesh import (
    MESH_ALGORITHMS,
    Links,
    MeshGroup,
    Run,
    collective_loads,
    link_loads,
    mesh_collective,
)

# ---- mesh ----


OPS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
V = 1e6
EQUAL = Links(1e9, 1e9)
UNEQUAL = (Links(1e9, 3e9), Links(2.5e9, 1e9))
TOLERANCE = 0.02


def agree(op, runs, links, algorithm="ordered", **how):
    found = mesh_collective(op, V, runs, links, algorithm)
    assert found.algorithm == algorithm
    simulated = simulate_alone(op, runs, links, algorithm, **how)
    assert found.time_s == pytest.approx(simulated, rel=TOLERANCE), (op, runs, links)


def groups(works):
    return [
        MeshGroup(w.op, w.bytes, tuple(Run(*r) for r in w.runs), w.rectangle, w.algorithm)
        for w in works
    ]


# ---- the simulator itself ----


def test_simulator_moves_what_an_all_gather_needs():
    for runs in ([(0, 4, 1)], [(0, 2, 2), (1, 3, 1)], [(0, 2, 1), (0, 2, 2), (1, 2, 1)]):
        (width, height), members = block(runs), math.prod(size for _, size, _ in runs)
        for algorithm in ("ordered", "ring", "split") if len(runs) == 2 else ("ordered",):
            work = Collective("all-gather", algorithm, V, (0, 0, width, height), tuple(runs))
            received = sim.build(width, height, EQUAL, [work], packets=3).received
            assert received == pytest.approx([V * (members - 1) / members] * (width * height))


def test_simulator_by_hand():
    one, late = Links(1.0, 1.0), Links(1.0, 1.0, 10.0)
    # Three dies: an end waits for its neighbour's part, then for the other end's, two hops away.
    for packets in (1, 2):
        assert simulate_alone("all-gather", [(0, 3, 1)], one, volume=3.0, packets=packets) == 2.0
    assert simulate_alone("all-gather", [(0, 3, 1)], late, volume=3.0, packets=1) == 22.0
    # Two pairs, two hops each; both cross the middle link, one second and one byte each.
    assert simulate_alone("all-to-all", [(0, 2, 2)], one, volume=2.0, packets=1) == 2.0


# ---- closed forms against the simulation ----


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_lines(op, axis, size):
    for links in (EQUAL, *UNEQUAL):
        agree(op, [Run(axis, size)], links)


@pytest.mark.parametrize("op", OPS)
def test_several_runs_along_one_axis(op):
    for runs in (
        [Run(0, 2, 2), Run(0, 2)],
        [Run(0, 4), Run(0, 2, 4)],
        [Run(0, 2), Run(1, 2), Run(0, 3, 2)],
        [Run(1, 2, 2), Run(0, 2, 2), Run(1, 2), Run(0, 2)],
    ):
        agree(op, runs, UNEQUAL[0])


SHAPES = (  # the ordered ones first: an all-to-all has no other way
    ([Run(0, 6)], "ordered"),
    ([Run(1, 3, 2)], "ordered"),
    ([Run(0, 4), Run(1, 3)], "ordered"),
    ([Run(0, 4), Run(1, 3)], "ring"),
    ([Run(0, 2, 2), Run(1, 4)], "ring"),
    ([Run(0, 4), Run(1, 3)], "split"),
)


def shapes(op):
    return SHAPES[:3] if op == "all-to-all" else SHAPES


@pytest.mark.parametrize("op", OPS)
def test_a_small_latency_does_not_matter(op):
    for runs, algorithm in shapes(op):
        agree(op, runs, Links(1e9, 2e9, 5e-7), algorithm)


@pytest.mark.parametrize("op", OPS)
def test_a_large_latency_is_all_there_is(op):
    """Dies in step, and nothing to send: the hops of the farthest member, run after run."""
    for runs, algorithm in shapes(op):
        found = mesh_collective(op, 1.0, runs, Links(1e9, 1e9, 1e-3), algorithm).time_s
        simulated = simulate_alone(op, runs, Links(1e9, 1e9, 1e-3), algorithm, 1.0, packets=1)
        assert found == pytest.approx(simulated, rel=1e-4)


@pytest.mark.parametrize("op", OPS)
def test_where_latency_and_bandwidth_meet_the_closed_form_is_safe(op):
    """It adds what overlaps: never below the simulation, never above twice."""
    for (runs, algorithm), hop_s in itertools.product(shapes(op), (1e-5, 1e-4, 4e-4)):
        links = Links(1e9, 1e9, hop_s)
        found = mesh_collective(op, V, runs, links, algorithm).time_s
        simulated = simulate_alone(op, runs, links, algorithm, packets=16)
        assert simulated <= found * (1 + TOLERANCE)
        assert found <= 2 * simulated


@pytest.mark.parametrize("op", OPS)
def test_dies_need_not_wait_for_one_another(op):
    """Without a barrier between runs it takes as long; a reduction may overlap what follows."""
    for runs, algorithm in shapes(op)[:-1]:  # the halves of a split would hinder each other
        found = mesh_collective(op, V, runs, EQUAL, algorithm).time_s
        simulated = simulate_alone(op, runs, EQUAL, algorithm, in_step=False)
        assert simulated <= found * (1 + TOLERANCE)
        if op != "all-reduce":
            assert simulated >= found * (1 - TOLERANCE)


@pytest.mark.slow
def test_many_groups_at_random():
    rng = random.Random(35)
    for _ in range(250):
        work = random_work(rng, 12, 6, OPS)
        links = Links(1e9, rng.choice([0.3, 1.0, 2.0]) * 1e9)
        agree(work.op, [Run(*r) for r in work.runs], links, work.algorithm, packets=32)


# ---- loads of links ----


def test_loads_are_those_of_a_brute_force_router():
    rng = random.Random(36)
    seen = dict.fromkeys(("straight", "detour", "no way"), 0)
    for _ in range(500):
        columns, rows = rng.randint(1, 6), rng.randint(1, 6)
        dies = list(itertools.product(range(columns), range(rows)))
        dead = set(rng.sample(dies, rng.randint(0, len(dies) // 3)))
        source, target = rng.randrange(len(dies)), rng.randrange(len(dies))
        ends = {(die % columns, die // columns) for die in (source, target)}
        far = sim.distances(columns, rows, dead, source)
        if ends & dead or target not in far:
            seen["no way"] += 1
            with pytest.raises(InvalidInputError, match="flows"):
                link_loads(columns, rows, [(source, target, 3.0)], list(dead))
            continue
        loads = link_loads(columns, rows, [(source, target, 3.0)], list(dead))
        path = sim.straight(columns, dead, source, target)
        seen["detour" if path is None else "straight"] += 1
        if path is not None:
            assert sorted(path) == np.flatnonzero(loads).tolist()
        walked = sim.follow(columns, np.flatnonzero(loads), source)
        assert walked[-1] == target
        assert len(walked) - 1 == far[target]
        assert not dead & {(die % columns, die // columns) for die in walked}
        assert loads.sum() == 3.0 * far[target]
    assert min(seen.values()) > 10


def test_loads_add_up():
    rng = random.Random(37)
    alive = [die for die in range(20) if die != 7]
    flows = [(*rng.sample(alive, 2), float(rng.randint(0, 9))) for _ in range(60)]
    each = [link_loads(5, 4, [flow], [(2, 1)]) for flow in flows]
    assert np.array_equal(link_loads(5, 4, flows, [(2, 1)]), sum(each))


# ---- bad input ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": "all-gatherr"}, "op: 'all-gatherr' .*all-gather"),
        ({"op": "broadcast"}, "op: 'broadcast'"),
        ({"algorithm": "rings"}, "algorithm: 'rings' .*ring"),
        ({"payload_bytes": -1.0}, "negative"),
        ({"payload_bytes": math.nan}, "NaN or infinite"),
        ({"runs": [Run(0, 1)]}, "runs: "),
        ({"runs": [Run(2, 4, 0)]}, "runs: "),
        ({"runs": [Run(0, 2)] * 13}, "mesh_collective: "),
        ({"links": Links(0.0, 1.0)}, "bandwidths or latencies"),
        ({"links": Links(1.0, 1.0, -1.0)}, "bandwidths or latencies"),
        ({"links": Links(1.0, math.inf)}, "bandwidths or latencies"),
    ],
)
def test_bad_collectives_are_refused(change, message):
    good = {"op": "all-gather", "payload_bytes": V, "runs": [Run(0, 4)], "links": EQUAL}
    with pytest.raises(InvalidInputError, match=message):
        mesh_collective(**(good | change))


def test_bad_traffic_is_refused():
    for flow in ((0, 6, 1.0), (-1, 0, 1.0), (0, 1, -1.0), (0, 1, math.nan)):
        with pytest.raises(InvalidInputError, match="flows: "):
            link_loads(3, 2, [flow])
    with pytest.raises(InvalidInputError, match="grid: 0 x 2"):
        link_loads(0, 2, [])
    outside = MeshGroup("all-gather", V, (Run(0, 4),), (1, 0, 4, 1))
    with pytest.raises(InvalidInputError, match="collectives: "):
        collective_loads(4, 2, [outside], EQUAL)
    for die in ((3, 0), (0, 2), (-1, 0), (0, -1)):
        with pytest.raises(InvalidInputError, match=r"^dead: .* inside 3 x 2 dies"):
            link_loads(3, 2, [(0, 1, 1.0)], dead=[die])
        with pytest.raises(InvalidInputError, match=r"^dead_links: .* two neighbours"):
            link_loads(3, 2, [(0, 1, 1.0)], dead_links=[((0, 0), die)])


# ---- laws of collectives on a mesh, of random groups, volumes and links ----


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


@pytest.mark.parametrize("op", OPS)
def test_links_carry_what_the_packets_of_the_simulation_weigh(op):
    rng = random.Random(op)
    for _ in range(12):
        work = random_work(rng, 8, 4, [op])
        links = Links(1e9, rng.choice([0.5, 1.0, 2.0]) * 1e9)
        traffic = build(8, 4, links, [work], packets=3)
        carried = np.zeros(8 * 4 * 4)
        for route, size in zip(traffic.routes, traffic.sizes, strict=True):
            np.add.at(carried, list(route), size)
        found = collective_loads(8, 4, groups([work]), links)
        assert found.reshape(-1) == pytest.approx(carried, rel=1e-12, abs=1e-6)


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
