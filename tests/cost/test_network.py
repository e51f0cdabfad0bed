"""Collectives inside layers: each group priced where its ranks lie."""

from itertools import product

import numpy as np
import pytest

from phaze_fast import _core, models
from phaze_fast.cost import collective, estimate_costs
from phaze_fast.cost.collectives import _units_met
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Cluster, presets
from phaze_fast.opgraph import GROUPS, Strategy, layer_graph

DGX = presets.fabric("dgx-h100")
CHIP = presets.chip("h200")


def graph(model="mixtral-8x7b", **strategy):
    return layer_graph(models.load(model), Strategy(**strategy))


def cluster(devices, slower=1.0):
    """Nodes of eight, the network between them slowed down."""
    node, between = DGX.tiers
    rate = between.bandwidth_bytes_per_s / slower
    tiers = (node, between.replace(bandwidth_bytes_per_s=rate))
    return Cluster(devices=devices, fabric=DGX.replace(tiers=tiers))


def total_s(asked, on, **options):
    return float(estimate_costs(asked, CHIP, on, **options).total_s().sum())


@pytest.mark.parametrize("etp", [None, 1, 4])
def test_every_collective_is_that_of_its_group(etp):
    """Experts lie on the devices of tensor, context and data groups, in this order."""
    asked = graph(ep=4, tp=2, cp=2, etp=etp, sequence_parallel=True)
    strides = {"tensor": (2, 1), "context": (2, 2), "expert": (4, etp or 2)}
    if etp != 1:
        strides["expert-tensor"] = (etp or 2, 1)
    costs = estimate_costs(asked, CHIP, cluster(64))
    met = set()
    for i, part in enumerate(costs.graphs):
        for op, time_s in zip(part.ops, costs.time_s(i)[0], strict=True):
            if op["collective"] >= 0:
                name = GROUPS[op["group"]]
                met.add(name)
                kind = _core.COLLECTIVE_OPS[op["collective"]]
                expected = collective(cluster(64), kind, op["payload_bytes"], *strides[name])
                assert time_s == expected.time_s
    assert met == set(strides)


def test_too_few_devices_are_named():
    asked = graph(ep=4, tp=8)
    words = "tp 8, cp 1, ep 4: .* 32 devices, .* has 31"
    with pytest.raises(InvalidInputError, match=words):
        total_s(asked, cluster(31))
    assert total_s(asked, cluster(32)) > 0


def test_a_fabric_may_be_named():
    named = estimate_costs(graph(tp=2), CHIP, "dgx-h100")
    given = estimate_costs(graph(tp=2), CHIP, presets.fabric("dgx-h100"))
    assert (named.time_s(2) == given.time_s(2)).all()


def test_a_fabric_of_another_type_is_refused():
    with pytest.raises(InvalidTypeError, match="fabric: int"):
        estimate_costs(graph(tp=2), CHIP, 8)


def test_layers_without_collectives_need_no_room():
    """A width that no operator uses sends nothing; bytes that are nothing take no time."""
    costs = estimate_costs(graph("llama2-7b"), CHIP, cluster(1))
    assert all(np.isfinite(costs.time_s(i)).all() for i in range(len(costs.graphs)))


def met_on_average(units, visits):
    """Units among which all ways to visit `visits` of them, one after another, find some."""
    return np.mean([len(set(way)) for way in product(range(units), repeat=visits)])


def nodes_met(rng, experts, nodes, visits, groups, chosen, tokens=20_000):
    """Nodes with experts of a token, token by token: groups are chosen first, then experts."""
    own = rng.random((tokens, groups)).argsort(axis=1)[:, :chosen]
    group = np.take_along_axis(own, rng.integers(chosen, size=(tokens, visits)), axis=1)
    expert = group * (experts // groups) + rng.integers(experts // groups, size=group.shape)
    return np.mean([len(set(row)) for row in (expert * nodes // experts).tolist()])


@pytest.mark.parametrize(
    ("nodes", "groups", "chosen"),
    [(8, 8, 4), (4, 8, 4), (16, 8, 4), (2, 8, 3), (12, 8, 4), (8, 12, 5), (3, 2, 1), (1, 8, 4)],
)
def test_experts_of_few_groups_are_on_few_nodes(nodes, groups, chosen):
    """DeepSeek-V3 has 8 groups, of which a token's experts are from 4: 3.6 nodes of 8, not 5.3."""
    sampled = nodes_met(np.random.default_rng(38), 192, nodes, 8, groups, chosen)
    assert _units_met(nodes, 8, groups, chosen) == pytest.approx(sampled, rel=0.01)
    assert _units_met(nodes, 8, groups, groups) == pytest.approx(nodes * (1 - (1 - 1 / nodes) ** 8))


def test_routing_limited_to_groups_sends_less_between_nodes():
    """Where a token is sent once to each node; copies for single experts are as many."""
    model = models.load("deepseek-v3")
    where = cluster(64)
    for once in (True, False):
        moe = model.moe.replace(sent_once=once)
        free = moe.replace(groups=None, top_groups=None)
        seconds = [
            estimate_costs(asked, CHIP, where).total_s().sum()
            for asked in (
                layer_graph(model.replace(moe=own), Strategy(ep=64)) for own in (moe, free)
            )
        ]
        assert (seconds[0] < seconds[1]) == once


@pytest.mark.parametrize(
    ("strategy", "visits", "units"),
    [
        ({"ep": 8}, 2, 8),  # one node: once to each device
        ({"ep": 8, "tp": 2}, 2, 2),  # two nodes: once to each
        ({"ep": 8, "tp": 8}, 3, 8),  # a device of each of eight nodes
        ({"ep": 4}, 5, 4),
    ],
)
def test_a_token_is_sent_once_to_where_its_experts_are(strategy, visits, units):
    model = models.load("mixtral-8x7b")
    moe = model.moe.replace(top_k=visits)
    each = layer_graph(model.replace(moe=moe), Strategy(**strategy))
    once = layer_graph(model.replace(moe=moe.replace(sent_once=True)), Strategy(**strategy))
    where = cluster(64)
    times = [estimate_costs(asked, CHIP, where) for asked in (each, once)]
    share = met_on_average(units, visits) / visits
    stride = strategy.get("tp", 1)
    found = 0
    for i, part in enumerate(times[0].graphs):
        for k, name in enumerate(part.names):
            if part.ops[k]["group"] != GROUPS.index("expert"):
                assert times[1].time_s(i)[0, k] == times[0].time_s(i)[0, k]
                continue
            found += 1
            payload = share * part.ops[k]["payload_bytes"]
            ranks = strategy["ep"]
            expected = collective(where, "all-to-all", payload, ranks, stride).time_s
            assert times[1].time_s(i)[0, k] == pytest.approx(expected, rel=1e-9), name
    assert found == 4
