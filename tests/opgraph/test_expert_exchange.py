"""Experts folded over tensor, context and data parallelism, against ranks and messages one by one."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from case_counts import slow_ones, some_or_many
from reference.expert_mesh import Dispatch, meshes

from phaze_fast import models
from phaze_fast.cost.collectives import rank_groups
from phaze_fast.export.ranks import Ranks
from phaze_fast.models import MixtureOfExperts
from phaze_fast.opgraph import GROUPS, Strategy, layer_graph

EXPERTS, TOP_K, HIDDEN = 16, 4, 64
MODEL = models.load("mixtral-8x7b").replace(
    layers=1, hidden=HIDDEN, heads=8, kv_heads=8, head_dim=8, ffn=64, vocab=128, seq=256,
    moe=MixtureOfExperts(experts=EXPERTS, top_k=TOP_K, expert_ffn=64),
)  # fmt: skip

WIDE = MODEL.replace(heads=64, kv_heads=64, head_dim=1)
"""A model whose heads any context group may exchange."""


def random_mesh(rng):
    """Widths of attention, and of experts over the same devices; all are powers of two."""
    while True:
        names = ("tp", "cp", "dp", "etp", "ep")
        widths = {name: 2 ** rng.randrange(4) for name in names}
        devices = widths["tp"] * widths["cp"] * widths["dp"]
        if devices <= 64 and devices % (widths["etp"] * widths["ep"]) == 0:
            return widths


def block_of(strategy):
    graph = layer_graph(MODEL, strategy)
    layer = next(layer for layer in graph.layers if layer.kind == "moe-block")
    return graph, layer.forward


def copies_by_tier(graph, forward, name, devices, node):
    """Rows of a collective by the links they cross, from its payload and the ranks of its group."""
    at = forward.names.index(name)
    op, ranks = forward.ops[at], rank_groups(graph)
    count, stride = (column[int(op["group"])] for column in (ranks.ranks, ranks.stride))
    each = float(op["payload_bytes"]) / (2 * HIDDEN) / count  # of a message to one rank
    first = np.arange(count) * stride
    nodes = first // node
    inside = int((nodes[:, None] == nodes[None, :]).sum()) - count
    groups = devices // count
    outside = count * count - count - inside
    return [groups * each * n for n in (count, inside, outside)]


@pytest.mark.parametrize("block", slow_ones(range(5), 2, 3, 4))
def test_bytes_of_messages_by_tier_are_those_of_every_token(block):
    rng, gathered = random.Random(block), 0
    for _ in range(100):
        widths = random_mesh(rng)
        node, devices = 2 ** rng.randrange(1, 4), widths["tp"] * widths["cp"] * widths["dp"]
        split = widths["tp"] == 1 or widths["etp"] != widths["tp"] or rng.random() < 0.7
        strategy = Strategy(
            tp=widths["tp"], cp=widths["cp"], ep=widths["ep"], etp=widths["etp"],
            sequence_parallel=split and widths["tp"] > 1,
        )  # fmt: skip
        graph, forward = block_of(strategy)
        whole = Dispatch(widths, MODEL.seq // widths["cp"], EXPERTS, TOP_K, strategy.own_rows)
        if widths["ep"] > 1:
            found = copies_by_tier(graph, forward, "dispatch", devices, node)
            assert found == Dispatch.by_tier(whole.sent, node), widths
        if whole.gathered:
            gathered += 1
            _, inside, outside = copies_by_tier(graph, forward, "experts-gather", devices, node)
            assert [0, inside, outside] == Dispatch.by_tier(whole.gathered, node), widths
        up = forward.ops[forward.names.index("expert-up")]
        local = EXPERTS // widths["ep"]
        flops = 2.0 * whole.computed[0] * HIDDEN * 64 / widths["etp"]
        assert float(up["flops"]) == pytest.approx(flops, rel=1e-12), (widths, local)
        assert set(whole.computed.values()) == {whole.computed[0]}
    assert gathered >= 20


@pytest.mark.parametrize("block", slow_ones(range(5), 2, 3, 4))
def test_rows_that_are_gathered_by_tier_are_those_of_every_device(block):
    rng, tried = random.Random(block), 0
    while tried < 100:
        widths = random_mesh(rng)
        if widths["ep"] == 1:
            continue
        tried += 1
        node, devices = 2 ** rng.randrange(1, 4), widths["tp"] * widths["cp"] * widths["dp"]
        names = ("tp", "cp", "ep", "etp")
        strategy = Strategy(
            **{name: widths[name] for name in names}, dispatcher="all-gather",
            sequence_parallel=widths["tp"] > 1,
        )  # fmt: skip
        graph, forward = block_of(strategy)
        rows = MODEL.seq // widths["cp"]
        expected = Dispatch.by_tier(Dispatch.to_all(widths, rows), node)
        for name, more in (("dispatch", 3 * EXPERTS), ("combine", 0)):
            found = copies_by_tier(graph, forward, name, devices, node)
            of_row = 1 + more / (2 * HIDDEN)  # with its experts and their weights
            assert found == pytest.approx([n * of_row for n in expected], rel=1e-12), widths
        up = forward.ops[forward.names.index("expert-up")]
        other = block_of(strategy.model_copy(update={"dispatcher": "all-to-all"}))[1]
        assert up == other.ops[other.names.index("expert-up")]  # products are the same


def random_plan(rng):
    widths = {**random_mesh(rng), "pp": rng.choice([1, 2, 3])}
    inside = [n for n in range(2, widths["cp"]) if widths["cp"] % n == 0]
    widths["heads"] = rng.choice([1, widths["cp"], *inside])
    inner, copy = widths["tp"] * widths["cp"], widths["etp"] * widths["ep"]
    inside = rng.random() < 0.5 and (inner == copy or widths["pp"] == 1)
    order = "stages-inside" if inside else "replicas-inside"
    devices = inner * widths["dp"] * widths["pp"]
    heads = widths["heads"]
    kind = "ring" if heads == 1 else "ulysses"
    if 1 < heads < widths["cp"]:
        kind = f"ulysses:{heads}/ring"
    plan = SimpleNamespace(
        **widths, rank_order=order, shard=widths["dp"], devices=devices, cp_kind=kind
    )
    return widths, inside, plan


@some_or_many(50, 500)
def test_groups_are_those_of_megatron_core(cases):
    """By Megatron-Core's two rank generators, and in both orders of ranks."""
    rng, orders = random.Random(7), set()
    for _ in range(cases):
        widths, inside, plan = random_plan(rng)
        ranks, expected = Ranks(plan), meshes(widths, inside)
        orders.add((inside, widths["cp"] > 1, widths["ep"] * widths["etp"] > widths["tp"]))
        for kind, groups in expected.items():
            found = {tuple(sorted(ranks.group(ranks.place(r), kind))) for r in range(len(ranks))}
            assert sorted(found) == groups, (kind, widths, inside)
        strategy = Strategy(
            tp=widths["tp"], cp=widths["cp"], ep=widths["ep"], etp=widths["etp"],
            sequence_parallel=widths["tp"] > 1, cp_kind=plan.cp_kind,
        )  # fmt: skip
        laid_out = rank_groups(layer_graph(WIDE, strategy))
        for kind in (name for name in GROUPS if name != "none"):
            at = GROUPS.index(kind)
            first = tuple(k * laid_out.stride[at] for k in range(laid_out.ranks[at]))
            assert first == expected[kind][0], (kind, widths)
    assert len(orders) >= 6
