"""Full meshes and communication libraries: by hand, explicit links, laws, files that are wrong."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaze_fast.cost import collective, collective_batch, message_batch
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Tier, TieredFabric, fabric_record, presets

# ---- tiers whose units are linked pair by pair ----


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
                found = collective(mesh, op, v, ranks=ranks, stride=stride)
                assert found.time_s == pytest.approx(times * exchange, rel=1e-12)
                assert found.bound_s <= found.time_s


def test_a_whole_mesh_is_as_fast_as_a_switch_and_a_part_of_it_is_not():
    mesh, switch = fabric(8, 448e9, 3e-6, 50e9), fabric(8, 448e9, 3e-6, 50e9, "switch")
    for op in ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"):
        whole = [collective(f, op, 1e9, ranks=8).time_s for f in (mesh, switch)]
        assert whole[0] == whole[1]
        for ranks in (2, 4):
            parts = [collective(f, op, 1e9, ranks=ranks).time_s for f in (mesh, switch)]
            assert parts[0] > parts[1]
        across = [collective(f, op, 1e9, ranks=64).time_s for f in (mesh, switch)]
        assert across[0] == across[1]


def test_a_message_has_one_link():
    mesh = presets.fabric("mi300x-platform")
    times = message_batch(mesh, 64e9, source=[0, 3, 0, 0], target=[1, 7, 8, 0]).time_s
    assert times.tolist() == pytest.approx([1 + 3e-6, 1 + 3e-6, 64 / 50 + 5e-6, 0])
    one = collective(mesh, "point-to-point", 64e9, ranks=2, stride=5).time_s
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
        found = collective(mesh, op, v, ranks=ranks, stride=stride)
        assert found.bound_s <= found.time_s
        assert found.time_s >= collective(switch, op, v, ranks=ranks, stride=stride).time_s
        faster = fabric(size, 2 * inner, 1e-6, 2 * outer)
        assert collective(faster, op, v, ranks=ranks, stride=stride).time_s <= found.time_s
        twice = collective(mesh, op, 2 * v, ranks=ranks, stride=stride).time_s
        assert found.time_s <= twice <= 2 * found.time_s * (1 + 1e-12)


def test_a_taper_does_not_slow_rings_that_cross_it_with_few_flows():
    """Of many members to a pod one flow crosses; a pair of members in two pods has its port's share."""

    def cluster(factor):
        tiers = (
            Tier(name="pod", size=64, bandwidth_bytes_per_s=50e9),
            Tier(name="c", size=8, bandwidth_bytes_per_s=50e9, oversubscription=factor),
        )
        return TieredFabric(name="f", tiers=tiers)

    wide = [collective(cluster(f), "all-reduce", 1e9, ranks=128).time_s for f in (1.0, 7.0)]
    assert wide[1] == pytest.approx(wide[0])
    pair = [
        collective(cluster(f), "all-reduce", 1e9, ranks=2, stride=64).time_s for f in (1.0, 7.0)
    ]
    assert pair[1] == pytest.approx(7 * pair[0])
    exchange = [collective(cluster(f), "all-to-all", 1e9, ranks=512).time_s for f in (1.0, 7.0)]
    assert 6 < exchange[1] / exchange[0] < 7


# ---- libraries ----


OPERATIONS = ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"]


LIBRARIES = ["dgx-a100", "dgx-h100", "dgx-b200", "nvl72-gb200", "superpod-h100", "dgx-2"]


H100 = presets.fabric("dgx-h100")


def by_hand(fabric, op, payload, ranks):
    """Seconds inside one node, from the fields of the file."""
    tier = fabric.tiers[0]
    rate, tuning = tier.bandwidth_bytes_per_s, tier.library
    passes = 2 if op == "all-reduce" else 1
    share = (ranks - 1) / ranks
    found = []
    for protocol in tuning.exchange if op == "all-to-all" else tuning.ring:
        limit = protocol.most_bytes_per_rank
        if limit and payload > limit * ranks:
            continue
        two, many = protocol.shares(op)
        # a line through what two and what very many ranks reach
        at_half, at_one = 0.5 / two, 1.0 / many
        per_byte = at_half + (share - 0.5) / 0.5 * (at_one - at_half)
        steps = passes * (ranks - 1)
        moved = passes * payload * per_byte / rate
        found.append(protocol.startup_s + steps * protocol.step_s + moved)
    if op == "all-reduce" and ranks > 2 and tuning.in_switch is not None:
        ring_bytes = 2 * share * payload
        switch = tuning.in_switch
        found.append(switch.startup_s + ring_bytes / (rate * switch.share))
    return min(found)


@given(
    name=st.sampled_from(["dgx-a100", "dgx-h100", "dgx-b200"]),
    op=st.sampled_from(OPERATIONS[:4]),
    payload=st.floats(1.0, 1e11),
    ranks=st.integers(2, 8),
)
def test_inside_a_node_as_the_file_says(name, op, payload, ranks):
    fabric = presets.fabric(name)
    found = collective(fabric, op, payload, ranks)
    assert found.time_s == pytest.approx(by_hand(fabric, op, payload, ranks), rel=1e-9)
    assert found.time_s == pytest.approx(min(found.alternatives.values()), rel=1e-12)


@given(
    name=st.sampled_from(LIBRARIES),
    op=st.sampled_from(OPERATIONS),
    payload=st.floats(1.0, 1e11),
    more=st.floats(1.0, 100.0),
    ranks=st.integers(2, 300),
    stride=st.sampled_from([1, 2, 3, 8, 16]),
)
def test_never_below_the_bound_and_never_less_for_more_bytes(
    name, op, payload, more, ranks, stride
):
    fabric = presets.fabric(name)
    found = collective(fabric, op, payload, ranks, stride)
    assert found.bound_s <= found.time_s
    assert found.time_s <= collective(fabric, op, payload * more, ranks, stride).time_s
    assert found.time_s >= collective(fabric.at_peak(), op, payload, ranks, stride).bound_s


@given(payload=st.floats(1.0, 1e10), more=st.floats(1.0, 10.0), ranks=st.integers(2, 64))
def test_more_bandwidth_is_never_slower(payload, more, ranks):
    tiers = [t.replace(bandwidth_bytes_per_s=t.bandwidth_bytes_per_s * more) for t in H100.tiers]
    faster = collective(H100.replace(tiers=tiers), "all-reduce", payload, ranks).time_s
    assert faster <= collective(H100, "all-reduce", payload, ranks).time_s * (1 + 1e-12)


def test_large_messages_across_nodes_are_limited_by_the_adapters():
    payload, ranks = 2.0**33, 64
    found = collective(H100, "all-reduce", payload, ranks)
    adapters = 2 * (ranks - 1) / ranks * payload / (8 * 0.94 * 50e9)
    assert found.algorithm == "rail-ring"
    assert adapters <= found.time_s <= 1.02 * adapters


def test_messages_know_their_tier_and_protocol():
    times = message_batch(H100, [1e3, 1e3, 1e9, 1e9], [0, 0, 0, 0], [1, 8, 1, 8]).time_s
    assert times[0] < times[1] < times[2] < times[3]
    assert times[3] == pytest.approx(1e9 / (0.9 * 50e9) + 37e-6)


def test_the_same_fabric_at_its_peak():
    peak = presets.fabric("dgx-h100-peak")
    assert peak == H100.at_peak() == peak.at_peak()
    assert not np.any(fabric_record(peak)["protocols"])
    assert presets.fabric("tpuv4-pod").at_peak() == presets.fabric("tpuv4-pod")
    both = collective_batch([H100, peak], "all-gather", 2.0**30, [8, 8], fabric=[0, 1]).time_s
    assert both[1] < both[0]
    with pytest.raises(InvalidInputError, match="is neither a preset"):
        presets.fabric("mine-peak")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"many_rank_share": 0.99, "two_rank_share": 0.3}, "less than twice"),
        ({"two_rank_share": 1.5}, "two_rank_share"),
        ({"most_bytes_per_rank": 5}, "any size"),
    ],
)
def test_libraries_that_cannot_be_are_refused(change, message):
    plain = H100.to_dict()
    plain["tiers"][0]["library"]["ring"][-1].update(change)
    with pytest.raises(InvalidInputError, match=message):
        TieredFabric.from_dict(plain)


def test_all_tiers_have_the_same_protocols_or_none():
    plain = H100.to_dict()
    plain["tiers"][1]["library"] = None
    with pytest.raises(InvalidInputError, match="either all have a library or none"):
        TieredFabric.from_dict(plain)
