"""Tiers whose units are linked pair by pair, against explicit messages over explicit links."""

import itertools

import numpy as np
import pytest

import phaze_fast as pf
from phaze_fast.cost import message_batch
from phaze_fast.hardware import Tier, TieredFabric, presets


def fabric(size, rate, latency=0.0, outer=None, links="full-mesh"):
    tiers = [Tier(name="n", size=size, bandwidth_bytes_per_s=rate, latency_s=latency, links=links)]
    if outer is not None:
        tiers.append(Tier(name="c", bandwidth_bytes_per_s=outer, latency_s=latency))
    return TieredFabric(name="f", tiers=tuple(tiers))


def busiest_link_s(members, size, rate, sent):
    """Seconds of the busiest of the links between pairs of devices; sent[a][b] bytes go direct."""
    link = rate / (size - 1)
    return max(sent[a][b] / link for a, b in itertools.permutations(members, 2))


@pytest.mark.parametrize("size", [2, 3, 4, 8, 16])
def test_collectives_take_what_their_busiest_link_takes(size):
    rate, v = 7e9, 3e9
    mesh = fabric(size, rate)
    for ranks in range(2, size + 1):
        for stride in range(1, (size - 1) // (ranks - 1) + 1):
            members = [i * stride for i in range(ranks)]
            shard = {a: dict.fromkeys(members, v / ranks) for a in members}
            exchange = busiest_link_s(members, size, rate, shard)
            for op, times in (
                ("all-to-all", 1),
                ("reduce-scatter", 1),
                ("all-gather", 1),
                ("all-reduce", 2),
            ):
                found = pf.collective(mesh, op, v, ranks=ranks, stride=stride)
                assert found.time_s == pytest.approx(times * exchange, rel=1e-12)
                assert found.bound_s <= found.time_s


def test_a_whole_mesh_is_as_fast_as_a_switch_and_a_part_of_it_is_not():
    mesh, switch = fabric(8, 448e9, 3e-6, 50e9), fabric(8, 448e9, 3e-6, 50e9, "switch")
    for op in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"):
        whole = [pf.collective(f, op, 1e9, ranks=8).time_s for f in (mesh, switch)]
        assert whole[0] == whole[1]
        for ranks in (2, 4):
            parts = [pf.collective(f, op, 1e9, ranks=ranks).time_s for f in (mesh, switch)]
            assert parts[0] > parts[1]
        across = [pf.collective(f, op, 1e9, ranks=64).time_s for f in (mesh, switch)]
        assert across[0] == across[1]


def test_a_message_has_one_link():
    mesh = presets.fabric("mi300x-platform")
    times = message_batch(mesh, 64e9, source=[0, 3, 0, 0], target=[1, 7, 8, 0]).time_s
    assert times.tolist() == pytest.approx([1 + 3e-6, 1 + 3e-6, 64 / 50 + 5e-6, 0])
    one = pf.collective(mesh, "point-to-point", 64e9, ranks=2, stride=5).time_s
    assert one == pytest.approx(1 + 3e-6)


def test_laws_on_random_meshes():
    rng = np.random.default_rng(5)
    ops = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast")
    for _ in range(300):
        size, inner, outer = (
            int(rng.integers(2, 17)),
            rng.uniform(1e9, 1e12),
            rng.uniform(1e9, 1e12),
        )
        mesh = fabric(size, inner, 1e-6, outer)
        switch = fabric(size, inner, 1e-6, outer, "switch")
        ranks, stride = int(rng.integers(2, 65)), int(rng.integers(1, 9))
        op, v = ops[int(rng.integers(len(ops)))], float(rng.uniform(1e3, 1e10))
        found = pf.collective(mesh, op, v, ranks=ranks, stride=stride)
        assert found.bound_s <= found.time_s
        assert found.time_s >= pf.collective(switch, op, v, ranks=ranks, stride=stride).time_s
        faster = fabric(size, 2 * inner, 1e-6, 2 * outer)
        assert pf.collective(faster, op, v, ranks=ranks, stride=stride).time_s <= found.time_s
        twice = pf.collective(mesh, op, 2 * v, ranks=ranks, stride=stride).time_s
        assert found.time_s <= twice <= 2 * found.time_s * (1 + 1e-12)


def test_a_taper_does_not_slow_rings_that_cross_it_with_few_flows():
    """Of many members to a pod one flow crosses; a pair of members in two pods has its port's share."""

    def cluster(factor):
        tiers = (
            Tier(name="pod", size=64, bandwidth_bytes_per_s=50e9),
            Tier(name="c", size=8, bandwidth_bytes_per_s=50e9, oversubscription=factor),
        )
        return TieredFabric(name="f", tiers=tiers)

    wide = [pf.collective(cluster(f), "all-reduce", 1e9, ranks=128).time_s for f in (1.0, 7.0)]
    assert wide[1] == pytest.approx(wide[0])
    pair = [
        pf.collective(cluster(f), "all-reduce", 1e9, ranks=2, stride=64).time_s for f in (1.0, 7.0)
    ]
    assert pair[1] == pytest.approx(7 * pair[0])
    exchange = [pf.collective(cluster(f), "all-to-all", 1e9, ranks=512).time_s for f in (1.0, 7.0)]
    assert 6 < exchange[1] / exchange[0] < 7
