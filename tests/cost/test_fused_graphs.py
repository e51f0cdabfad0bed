"""Which operators of a layer to fuse: random small graphs against exhaustive enumeration."""

import random
from dataclasses import replace

import numpy as np
import pytest
from case_counts import some_or_many
from reference import fusion as oracle

from phaze_fast import models
from phaze_fast.cost import BufferRules, FusedGroup
from phaze_fast.cost.machines import Streams
from phaze_fast.cost.residency import layer_traffic
from phaze_fast.opgraph import Strategy, forms, layer_graph

BF16 = Streams(2.0, 2.0, 4.0, 1.0)
RULES = BufferRules()
FORWARD = {"plain": (("up",), (), ("down",)), "gated": (("up", "gate"), (), ("down",))}
BACKWARD = {
    "plain": (("d-down-x",), (), ("d-up-x",)),
    "gated": (("d-down-x",), ("d-activation",), ("d-gate-x", "d-up-x")),
}
REPEATED = {"plain": ("activation-again",), "gated": ("activation-again", "multiply-again")}
"""Feed-forward operators of a layer, forward and backward: products, what lies between, products.
The branches are up and gate, their gradients, and the weight gradients that read what is inside;
with recomputation, what these repeat."""


def chains(kind, fusion):
    """Chains of the forward and of the backward pass."""
    first, middle, last = BACKWARD[kind]
    if fusion == "full+projections":
        first += tuple(f"{name}-again" for name in FORWARD[kind][0])
    repeated = [] if fusion in ("full", "full+weights") else [((), REPEATED[kind], ("d-down-w",))]
    return [FORWARD[kind]], [(first, middle, last), *repeated]


NOTHING = 1e-30  # share of weights that are on chip: the oracle takes factors above 0


class Layer:
    """One pass of a layer, with the bytes of its operators by definition."""

    def __init__(self, graph, capacity):
        self.stays = 0 < 2 * graph.weight_bytes <= capacity
        self.weights = NOTHING if self.stays else 1.0
        self.capacity = capacity - graph.weight_bytes * self.stays
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

    def exact(self, name):
        """Least bytes of one operator: a product's tiles, and what is read and written once."""
        read, write = float(self.op(name)["read_bytes"]), float(self.op(name)["write_bytes"])
        if int(self.op(name)["k"]) == 0:
            return read + write
        operands, result = self.sizes(name)
        m, k, n = (int(self.op(name)[f]) for f in "mkn")
        unbuffered = 2.0 * (2.0 * m * k * n + m * n)  # operands are read for every element
        tiled = min(oracle.product_bytes(m, k, n, self.capacity, RULES), unbuffered)
        if self.stays and not name.endswith("-w"):
            beside = FusedGroup(m, k, n, 0, first=NOTHING, moved_bytes=2.0 * m * n)
            tiled = min(tiled, oracle.group_bytes(beside, self.capacity, RULES))
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
            return read - len(inside) * result + written
        operands, result = self.sizes(name)
        if name in {"down", "d-up-x", "d-gate-x", "d-down-w"}:  # the result is tiled
            return read - operands + write - result
        return read - operands - len(inside) * result + written  # gate reads up's

    def fused(self, chain, begin, end):
        """Least bytes of segments `begin` to `end` - 1 of a chain as one group, over all tiles."""
        first, last = chain[0], chain[2]
        group = [name for segment in chain[begin:end] for name in segment]
        other = self.op(last[0])
        if first:
            one = self.op(first[0])
            shape = FusedGroup(
                rows=int(one["m"]),
                inner=int(one["k"]) if begin == 0 else 0,
                hidden=int(one["n"]),
                outer=int(other["n"]) * len(last) if end == 3 else 0,
                first=float(len(first)) * self.weights,
                second=self.weights,
                held=float(max(len(first), len(last))),
                inputs=1.0 + (first[0] == "d-down-x" and len(first) > 1),
            )
        else:  # the left operand of a gradient of weights is made from what is read
            shape = FusedGroup(*(int(other[f]) for f in "m"), 0, *(int(other[f]) for f in "kn"))
        moved = max(sum(self.once(name, group) for name in group), 0.0)
        return oracle.group_bytes(replace(shape, moved_bytes=moved), self.capacity, RULES)

    def least(self, chain, alone):
        """Least bytes of a chain over all ways to divide it into groups."""
        apart = [sum(alone[name] for name in segment) for segment in chain]
        ways = [sum(apart)]
        if chain[0]:
            ways += [self.fused(chain, 0, 3)]
        if chain[1] and chain[0]:
            ways += [self.fused(chain, 0, 2) + apart[2]]
        if chain[1]:
            ways += [apart[0] + self.fused(chain, 1, 3)]
        return min(ways), sum(apart)


def _case(seed, fusion="full"):
    draw = random.Random(seed)
    kind = draw.choice(("plain", "gated"))
    base = models.load("bertlarge" if kind == "plain" else "llama2-7b")
    hidden = 2 * draw.randint(1, 5)
    model = base.replace(
        name="small", layers=1, hidden=hidden, heads=1, kv_heads=1, vocab=8,
        ffn=draw.randint(1, 12), seq=draw.randint(1, 9),
    )  # fmt: skip
    layer = layer_graph(model, Strategy(micro_batch=draw.randint(1, 2)), fusion).layers[1]
    capacity = float(draw.choice((600, 1500, 3000, 6000, 12000, 40000)))
    return kind, layer, capacity


@some_or_many(14, 200)
@pytest.mark.parametrize("fusion", forms("full+any"))
def test_random_layers_against_enumeration(fusion, cases):
    saved = 0
    for seed in range(cases):
        kind, layer, capacity = _case(seed, fusion)
        passes = zip((layer.forward, layer.backward), chains(kind, fusion), strict=True)
        for graph, some in passes:
            one, sizes = Layer(graph, capacity), np.array([capacity])
            traffic = layer_traffic(graph, sizes, BF16)
            inside = {name for chain in some for segment in chain for name in segment}
            alone = {name: one.exact(name) for name in graph.names if name in inside}
            moved = dict(zip(graph.names, traffic.moved[0].tolist(), strict=True))
            for chain in some:
                found = sum(moved[name] for segment in chain for name in segment)
                least, apart = one.least(chain, alone)
                assert found == pytest.approx(least, rel=1e-12), (seed, kind, chain)
                saved += least < apart * (1 - 1e-9)
            for name in graph.names:  # attention and its projections have chains of their own
                if name.endswith("-w") and name not in inside:
                    assert moved[name] == pytest.approx(one.exact(name), rel=1e-12)
    assert saved > cases / 4


SIZES = np.array([300.0, 900.0, 2500.0, 7000.0, 20000.0, 1e6])


@some_or_many(12, 30)
@pytest.mark.parametrize("fusion", forms("full+any"))
def test_more_buffer_never_moves_more_bytes_of_a_layer(fusion, cases):
    for seed in range(cases):
        layers = [_case(seed, form)[1] for form in ("full", fusion)]
        for side in ("forward", "backward"):
            plain, own = (layer_traffic(getattr(x, side), SIZES, BF16) for x in layers)
            moved = own.moved.sum(axis=1)
            if fusion == "full+weights":  # weights that take half of the buffer may cost more
                moved = np.minimum(moved, plain.moved.sum(axis=1))
            else:
                assert (own.moved <= own.priced * (1 + 1e-12)).all()
            assert (np.diff(moved) <= 1e-9 * moved[:-1]).all(), seed


def test_a_search_over_forms_never_moves_more_than_its_least_and_repeats_move_less_somewhere():
    better = 0
    for seed in range(30):
        whole = {}
        for fusion in forms("full+any"):
            _, layer, _ = _case(seed, fusion)
            parts = [
                layer_traffic(g, SIZES, BF16).moved.sum(axis=1)
                for g in (layer.forward, layer.backward)
            ]
            whole[fusion] = sum(parts)
        # An activation that is repeated spares a write, and its reader reads no more than before.
        if "gate" not in layer.forward.names:
            assert (whole["full+activations"] <= whole["full"] * (1 + 1e-12)).all(), seed
        better += (whole["full+projections"] < whole["full"] * (1 - 1e-9)).any()
    assert better > 3
