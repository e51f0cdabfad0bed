"""Which operators of a layer to fuse: random small graphs against exhaustive enumeration."""

import random
from dataclasses import replace

import numpy as np
import pytest
from case_counts import some_or_many
from reference import fusion as oracle

from phaze_fast import _core, models
from phaze_fast.cost import BufferRules, FusedGroup
from phaze_fast.cost.residency import kept_shares
from phaze_fast.opgraph import Strategy, layer_graph

BF16 = (2.0, 2.0, 4.0, 1.0)
RULES = BufferRules()
CHAINS = {
    "plain": ((("up",), (), ("down",)), (("d-down-x",), (), ("d-up-x",))),
    "gated": (
        (("up", "gate"), (), ("down",)),
        (("d-down-x",), ("d-activation",), ("d-gate-x", "d-up-x")),
    ),
}
"""Feed-forward operators of a layer, forward and backward: products, what lies between, products.
The branches are up and gate, their gradients, and the weight gradients that read what is inside."""


class Layer:
    """One pass of a layer, with the bytes of its operators by definition."""

    def __init__(self, graph):
        self.graph, self.at = graph, {name: i for i, name in enumerate(graph.names)}
        self.stashed = dict.fromkeys(graph.names, 0.0)
        for tensor in graph.tensors:
            if tensor.producer in self.at and not tensor.instead_of:
                self.stashed[tensor.producer] += tensor.bytes

    def op(self, name):
        return self.graph.ops[self.at[name]]

    def sizes(self, name):
        """Bytes of the operands and of the result of a product."""
        m, k, n = (2.0 * float(v) for v in (self.op(name)[f] for f in "mkn"))
        return (m * k + k * n) / 2.0, m * n / 2.0

    def exact(self, name, capacity):
        """Least bytes of one operator: a product's tiles, and what is read and written once."""
        read, write = float(self.op(name)["read_bytes"]), float(self.op(name)["write_bytes"])
        if int(self.op(name)["k"]) == 0:
            return read + write
        operands, result = self.sizes(name)
        m, k, n = (int(self.op(name)[f]) for f in "mkn")
        tiled = oracle.product_bytes(m, k, n, capacity, RULES)
        return tiled + read - operands + write - result

    def once(self, name, group):
        """Bytes that an operator inside a group moves apart from tiled operands and results."""
        read, write = float(self.op(name)["read_bytes"]), float(self.op(name)["write_bytes"])
        edges = [(self.graph.names[u], self.graph.names[v]) for u, v in self.graph.edges()]
        inside = [u for u, v in edges if v == name and u in group]
        readers = [v for u, v in edges if u == name]
        written = (
            write if set(readers) - set(group) or not readers else min(write, self.stashed[name])
        )
        if int(self.op(name)["k"]) == 0:
            result = 2.0 * float(self.op(name)["m"]) * float(self.op(name)["n"])
            return read - (result if inside else 0.0) + written
        operands, result = self.sizes(name)
        if name in {"down", "d-up-x", "d-gate-x"}:  # the result is tiled
            return read - operands + write - result
        return read - operands - len(inside) * result + written  # gate reads up's

    def fused(self, chain, begin, end, capacity):
        """Least bytes of segments `begin` to `end` - 1 of a chain as one group, over all tiles."""
        first, last = chain[0], chain[2]
        group = [name for segment in chain[begin:end] for name in segment]
        one, other = self.op(first[0]), self.op(last[0])
        shape = FusedGroup(
            rows=int(one["m"]),
            inner=int(one["k"]) if begin == 0 else 0,
            hidden=int(one["n"]),
            outer=int(other["n"]) * len(last) if end == 3 else 0,
            first=float(len(first)),
            held=float(max(len(first), len(last))),
        )
        moved = max(sum(self.once(name, group) for name in group), 0.0)
        return oracle.group_bytes(replace(shape, moved_bytes=moved), capacity, RULES)

    def least(self, chain, capacity, alone):
        """Least bytes of a chain over all ways to divide it into groups."""
        apart = [sum(alone[name] for name in segment) for segment in chain]
        ways = [sum(apart), self.fused(chain, 0, 3, capacity)]
        if chain[1]:
            ways += [self.fused(chain, 0, 2, capacity) + apart[2]]
            ways += [apart[0] + self.fused(chain, 1, 3, capacity)]
        return min(ways), sum(apart)


def _case(seed):
    draw = random.Random(seed)
    kind = draw.choice(("plain", "gated"))
    base = models.load("bertlarge" if kind == "plain" else "llama2-7b")
    hidden = 2 * draw.randint(1, 5)
    model = base.replace(
        name="small", layers=1, hidden=hidden, heads=1, kv_heads=1, vocab=8,
        ffn=draw.randint(1, 12), seq=draw.randint(1, 9),
    )  # fmt: skip
    layer = layer_graph(model, Strategy(micro_batch=draw.randint(1, 2)), "full").layers[1]
    capacity = float(draw.choice((600, 1500, 3000, 6000, 12000, 40000)))
    return kind, layer, capacity


@some_or_many(40, 200)
def test_random_layers_against_enumeration(cases):
    saved = 0
    for seed in range(cases):
        kind, layer, capacity = _case(seed)
        for graph, chain in zip((layer.forward, layer.backward), CHAINS[kind], strict=True):
            one = Layer(graph)
            names = [name for segment in chain for name in segment]
            at = [one.at[name] for name in names]
            sizes = np.array([capacity])
            alone = _core.op_hbm_bytes(graph.ops, sizes, BF16)[at]
            exact = np.array([one.exact(name, capacity) for name in names])
            # Operators alone are tiled in whole blocks, which moves a little more than the least.
            assert (alone >= exact * (1 - 1e-12)).all()
            assert (alone <= exact * 1.07).all(), seed
            found = float((alone * (1.0 - kept_shares(graph, sizes, BF16)[0, at])).sum())
            by_name = dict(zip(names, alone.tolist(), strict=True))
            least, apart = one.least(chain, capacity, by_name)
            assert found == pytest.approx(least, rel=1e-9), (seed, kind, chain)
            saved += least < apart * (1 - 1e-9)
    assert saved > cases / 4


def test_more_buffer_never_moves_more_bytes_of_a_layer():
    for seed in range(30):
        _, layer, _ = _case(seed)
        sizes = np.array([300.0, 900.0, 2500.0, 7000.0, 20000.0, 1e6])
        for graph in (layer.forward, layer.backward):
            alone = _core.op_hbm_bytes(graph.ops, sizes, BF16).reshape(len(sizes), -1)
            moved = np.nansum(alone * (1.0 - kept_shares(graph, sizes, BF16)), axis=1)
            assert (np.diff(moved) <= 1e-9 * moved[:-1]).all(), seed
            assert (moved <= np.nansum(alone, axis=1) * (1 + 1e-12)).all()
