"""What a communication library makes of a fabric: laws, a plain oracle, and files that are wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaze_fast.cost import collective, collective_batch, message_batch
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import TieredFabric, fabric_record, presets

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
