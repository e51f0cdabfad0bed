"""Which arrays of a layer stay on chip, and the share of each operator's HBM bytes that this saves.

In a layer's graph, products feed one another: up and down projection, projections before and after
attention, and the same in the backward pass. Such a chain is three segments: products, what lies
between them, products. The cuts between segments are chosen for each size of the buffer; what the
backward pass or an operator outside the group reads is written once. The bytes of a group are
shared among its operators in proportion to those they would move alone, so no operator is slower
than without fusion.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.cost.fusion import BufferRules, FusedGroup, best_cuts, group_traffic
from phaze_fast.opgraph import KINDS, OpGraph
from phaze_fast.opgraph.builder import ELEMENT_BYTES
from phaze_fast.opgraph.graph import FUNCTIONS
from phaze_fast.tables import Array

_PRODUCTS = frozenset(KINDS.index(name) for name in ("gemm", "gemm-input-gradient"))
_FORWARD, _BACKWARD = (KINDS.index(name) for name in ("attention", "attention-backward"))
_BETWEEN = frozenset(
    KINDS.index(name)
    for name in ("activation-backward", "multiply-backward", "rotary", "rotary-backward")
) | {_FORWARD, _BACKWARD}
"""Kinds of operators that work on a tile between two products."""
_MULTIPLY = FUNCTIONS.index("multiply")
_SEGMENTS = 3


class _Chain(NamedTuple):
    """Operators that pass tiles on: products, what lies between, and products that read it."""

    first: tuple[int, ...]
    middle: tuple[int, ...]
    last: tuple[int, ...]


class _Graph:
    """A graph with the sets and sizes that its chains are found by."""

    def __init__(self, graph: OpGraph) -> None:
        self.ops, self.edges = graph.ops, graph.edges()
        self.stashed = np.zeros(len(graph))
        for tensor in graph.tensors:
            if tensor.producer in graph.names and not tensor.instead_of:
                self.stashed[graph.names.index(tensor.producer)] += tensor.bytes
        kinds = [int(kind) for kind in self.ops["kind"]]
        bf16 = (self.ops["format"] == 0) & (self.ops["b"] == 1)
        self.product = [
            kind in _PRODUCTS and bool(one) for kind, one in zip(kinds, bf16, strict=True)
        ]
        self.between = [kind in _BETWEEN for kind in kinds]

    def size(self, i: int, *names: str) -> float:
        """Bytes of an array with some of an operator's dimensions."""
        return ELEMENT_BYTES * float(np.prod([float(self.ops[name][i]) for name in names]))

    def gated(self, u: int, v: int) -> bool:
        """Whether two products of equal shape are multiplied element by element."""
        both = self.product[u] and self.product[v]
        alike = all(self.ops[f][u] == self.ops[f][v] for f in ("m", "n", "k", "kind"))
        return both and alike and _MULTIPLY in self.ops["epilogue_functions"][v]

    def passed_on(self) -> list[tuple[int, int]]:
        """Return the edges along which a tile may be passed on."""
        ops, edges = self.ops, []
        for u, v in self.edges:
            if not all(self.product[i] or self.between[i] for i in (u, v)):
                continue
            apart = ops["m"][u] != ops["m"][v] or ops["n"][u] != ops["k"][v]
            # A product's operand is the latest of its sources; a residual, which its epilogue
            # reads, comes earlier.
            apart |= u != max(source for source, reader in self.edges if reader == v)
            if self.product[u] and self.product[v] and apart and not self.gated(u, v):
                continue
            edges.append((u, v))
        return edges

    def chains(self) -> list[_Chain]:
        """Return the chains of the graph, without those of more than two products in a row."""
        edges = self.passed_on()
        part = np.arange(len(self.ops))
        for u, v in edges:
            part[part == part[v]] = part[u]
        fed = {v for u, v in edges if not self.gated(u, v)}
        chains = []
        for name in sorted({int(part[u]) for u, _ in edges}):
            members = [int(i) for i in np.flatnonzero(part == name)]
            middle = tuple(i for i in members if self.between[i])
            first = tuple(i for i in members if self.product[i] and i not in fed)
            last = tuple(i for i in members if self.product[i] and i in fed)
            inside = [(u, v) for u, v in edges if part[u] == name]
            chain = _Chain(first, middle, last)
            if self._is_chain(chain, inside):
                chains.append(chain)
        return chains

    def _is_chain(self, chain: _Chain, edges: list[tuple[int, int]]) -> bool:
        ops, attention = self.ops, self.attention(chain)
        if not chain.first or not chain.last or any(u in chain.last for u, _ in edges):
            return False
        rows = {int(ops["m"][i]) for i in (*chain.first, *chain.last)}
        inner, outer = (
            {int(ops[f][i]) for i in s} for f, s in (("k", chain.first), ("n", chain.last))
        )
        if not len(rows) == len(inner) == len(outer) == 1 or len(attention) > 1:
            return False
        return not attention or rows.pop() % int(ops["m"][attention[0]]) == 0

    def attention(self, chain: _Chain) -> list[int]:
        """Return the attention of a chain, if it has one."""
        return [i for i in chain.middle if int(self.ops["kind"][i]) in (_FORWARD, _BACKWARD)]

    def group(self, chain: _Chain, begin: int, end: int) -> FusedGroup:
        """Return the segments `begin` to `end` - 1 of a chain as one group."""
        ops, one, other = self.ops, chain.first[0], chain.last[0]
        members = {i for segment in chain[begin:end] for i in segment}
        rows, hidden, held = int(ops["m"][one]), int(ops["n"][one]), 1.0
        held = float(max(len(chain.first), len(chain.last)))
        steps = (1, 1)
        for i in self.attention(chain):
            head, pairs, seq = (int(ops[f][i]) for f in ("k", "b", "m"))
            hidden = pairs * seq * head // rows
            backward = int(ops["kind"][i]) == _BACKWARD
            # Queries, keys and values relative to queries; with their gradients, and the context's.
            arrays = float(ops["read_bytes"][i]) / (ELEMENT_BYTES * rows * hidden) - backward
            held = (1.0 + backward) * (1.0 + arrays)
            steps = (seq, head * max(1, round(2.0 / max(arrays - 1.0, 1e-9))))
        columns = sum(int(ops["n"][i]) for i in chain.first)
        depth = sum(int(ops["k"][i]) for i in chain.last)
        return FusedGroup(
            rows=rows,
            inner=int(ops["k"][one]) if begin == 0 else 0,
            hidden=hidden,
            outer=int(ops["n"][other]) * len(chain.last) if end == _SEGMENTS else 0,
            row_step=steps[0],
            hidden_step=min(steps[1], hidden),
            first=columns / hidden,
            second=depth / hidden / len(chain.last),
            held=held,
            moved_bytes=max(sum(self._moved(i, chain, members) for i in members), 0.0),
        )

    def _moved(self, i: int, chain: _Chain, members: set[int]) -> float:
        """Bytes that an operator of a group moves once: no tiled operands, no arrays inside."""
        read, written = (float(self.ops[f][i]) for f in ("read_bytes", "write_bytes"))
        sources = [u for u, v in self.edges if v == i and u in members]
        readers = [v for u, v in self.edges if u == i]
        if i in chain.last:
            own = self.size(i, "m", "k") + self.size(i, "k", "n")
            return read - own + written - self.size(i, "m", "n")
        if not readers or not members.issuperset(readers):
            moved = written
        else:
            moved = min(written, float(self.stashed[i]))
        if i in chain.first:
            own = self.size(i, "m", "k") + self.size(i, "k", "n")
            gates = sum(self.gated(u, i) for u in sources)
            return read - own - gates * self.size(i, "m", "n") + moved
        if not sources:
            return read + moved
        kind = int(self.ops["kind"][i])
        if kind == _FORWARD:
            return moved
        inside = self.size(i, "b", "m", "k") if kind == _BACKWARD else self.size(i, "m", "n")
        return read - inside + moved


def _listed(costs: Mapping[tuple[int, int], float], begin: int, end: int) -> float:
    return costs[begin, end]


def kept_shares(
    graph: OpGraph, capacities: Array, precision: tuple[float, float, float, float]
) -> Array:
    """Return the share of each operator's HBM bytes that stays on chip, by size of the buffer.

    Parameters
    ----------
    graph
        Operators of one pass of a layer, with element-wise ones fused onto products.
    capacities
        Sizes of the buffer in bytes, shape (capacities,).
    precision
        Bytes of an input, an output and a sum, and the relative speed.

    Returns
    -------
    Array
        Shape (capacities, operators).

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.opgraph import layer_graph
    >>> block = layer_graph(models.load("bertlarge"), fusion="full").layers[1].forward
    >>> shares = kept_shares(block, np.array([2.0**20, 2.0**26]), (2.0, 2.0, 4.0, 1.0))
    >>> bool((shares[1] >= shares[0]).all())
    True
    """
    shares = np.zeros((len(capacities), len(graph)))
    if precision[:2] != (float(ELEMENT_BYTES), float(ELEMENT_BYTES)):
        return shares
    known, rules = _Graph(graph), BufferRules(sum_bytes=precision[2])
    alone: Array = _core.op_hbm_bytes(graph.ops, capacities, precision)
    alone = alone.reshape(shares.shape)
    for chain in known.chains():
        segments = [alone[:, list(segment)].sum(axis=1) for segment in chain]
        fused = {}
        for begin, end in ((0, 2), (1, 3), (0, 3)):
            apart = np.sum(segments[begin:end], axis=0)
            least = apart
            if chain.middle or (begin, end) == (0, _SEGMENTS):
                group = known.group(chain, begin, end)
                least = np.minimum(group_traffic(group, capacities, rules).hbm_bytes, apart)
            fused[begin, end] = least
        for c in range(len(capacities)):
            costs = {(i, i + 1): float(segments[i][c]) for i in range(_SEGMENTS)}
            costs |= {pair: float(least[c]) for pair, least in fused.items()}
            for begin, end in best_cuts(_SEGMENTS, partial(_listed, costs)).groups:
                members = [i for segment in chain[begin:end] for i in segment]
                total = float(alone[c, members].sum())
                if end - begin > 1 and total > 0.0:
                    shares[c, members] = 1.0 - costs[begin, end] / total
    return shares
