"""Which arrays of a layer stay on chip, and the share of each operator's HBM bytes that this saves.

In a layer's graph, products feed one another: up and down projection, projections before and after
attention, and the same in the backward pass. Such a chain is three segments: products, what lies
between them, products. The cuts between segments are chosen for each size of the buffer; arrays
that the backward pass or an operator outside the group reads are written once. Products that are
not fused take the best of all tile sizes. The bytes of a group are divided among its operators in
proportion to those they would move alone, so no operator is slower than without fusion.

What the backward pass repeats (`phaze_fast.opgraph.rewrites`) is part of its groups: products that
make an array again are in the first segment, element-wise operators lie before the gradient of
weights that reads them. Weights of all layers of a device may stay on chip too
(`OpGraph.weight_bytes`): the optimiser's step, or the gather after it, leaves them there, and tiles
get the rest of the buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.caching import LruCache
from phaze_fast.cost.fusion import BufferRules, FusedGroup, best_cuts, group_traffic
from phaze_fast.cost.machines import Streams
from phaze_fast.opgraph import KINDS, OpGraph
from phaze_fast.opgraph.builder import ELEMENT_BYTES
from phaze_fast.opgraph.graph import AGAIN, FUNCTIONS
from phaze_fast.tables import Array

_PRODUCTS = frozenset(KINDS.index(name) for name in ("gemm", "gemm-input-gradient"))
_FORWARD, _BACKWARD = (KINDS.index(name) for name in ("attention", "attention-backward"))
_BETWEEN = frozenset(
    KINDS.index(name)
    for name in ("activation-backward", "multiply-backward", "rotary", "rotary-backward")
) | {_FORWARD, _BACKWARD}
"""Kinds of operators that work on a tile between two products."""
_WEIGHT_GRADIENT = KINDS.index("gemm-weight-gradient")
_MULTIPLY = FUNCTIONS.index("multiply")
_SEGMENTS = 3
_ROUNDING = 1e-12
_ON_CHIP = 2.0**-60
"""Share of weights' bytes that is moved if they stay on chip: 0, but kernels want it positive."""


class _Chain(NamedTuple):
    """Operators that pass tiles on: products, what lies between, and products that read it."""

    first: tuple[int, ...]
    """Products that compute the array between; empty where this array is read."""
    middle: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Ranges of segments that can be fused: the first, and one past the last."""
        pairs = [(0, _SEGMENTS)] if self.first else []
        if self.middle:
            pairs += [(0, 2), (1, _SEGMENTS)] if self.first else [(1, _SEGMENTS)]
        return pairs


class _Graph:
    """A graph, with the properties of its operators that determine its chains."""

    weight_share = 1.0
    """Share of weights' bytes that a group reads and holds: `_ON_CHIP` if weights stay on chip."""

    def __init__(self, graph: OpGraph, precision: Streams) -> None:
        self.precision = precision
        self.rules = BufferRules(
            sum_bytes=precision.sum_bytes,
            strip_depth=precision.strip_depth,
            strip_copies=precision.copies,
            sum_transfers=precision.spills,
        )
        self.ops, self.edges = graph.ops, graph.edges()
        self.again = [name.endswith(AGAIN) for name in graph.names]
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
        """Whether the result of product `v` is multiplied, element by element, by that of `u`."""
        both = self.product[u] and self.product[v]
        alike = all(self.ops[f][u] == self.ops[f][v] for f in ("m", "n", "k"))
        by_gate = _MULTIPLY in self.ops["epilogue_functions"][v]
        same = self.ops["kind"][u] == self.ops["kind"][v]
        return both and alike and (self.again[u] or (same and by_gate))

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
        return chains + self._repeated()

    def _repeated(self) -> list[_Chain]:
        """Return chains of element-wise operators that run again and the weight gradient after."""
        sources = {v: [u for u, w in self.edges if w == v] for _, v in self.edges}
        chains = []
        for v in np.flatnonzero(self.ops["kind"] == _WEIGHT_GRADIENT):
            middle: list[int] = []
            wanted = list(sources.get(int(v), []))
            while wanted:
                u = wanted.pop()
                if self.again[u] and int(self.ops["k"][u]) == 0 and self.ops["collective"][u] < 0:
                    middle.append(u)
                    wanted += sources.get(u, [])
            if middle:
                chains.append(_Chain((), tuple(sorted(middle)), (int(v),)))
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
        ops, other = self.ops, chain.last[0]
        members = {i for segment in chain[begin:end] for i in segment}
        moved = max(sum(self._moved(i, chain, members) for i in members), 0.0)
        if not chain.first:
            rows, hidden, outer = (int(ops[f][other]) for f in ("m", "k", "n"))
            return FusedGroup(rows, 0, hidden, outer, moved_bytes=moved)
        one = chain.first[0]
        rows, hidden = int(ops["m"][one]), int(ops["n"][one])
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
            first=columns / hidden * self.weight_share,
            second=depth / hidden / len(chain.last) * self.weight_share,
            held=held,
            inputs=1.0 if len({self.again[i] for i in chain.first}) == 1 else 2.0,
            moved_bytes=moved,
        )

    def _moved(self, i: int, chain: _Chain, members: set[int]) -> float:
        """Bytes that an operator of a group moves once: no tiled operands, no arrays inside it."""
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
        if kind == _BACKWARD:
            return read - self.size(i, "b", "m", "k") + moved
        return read - len(sources) * self.size(i, "m", "n") + moved

    def with_weights_on_chip(self, capacities: Array) -> Array:
        """Bytes of operators alone if weights stay on chip and leave `capacities` for tiles."""
        shape = (len(capacities), len(self.ops))
        alone: Array = _core.op_hbm_bytes(self.ops, capacities, self.precision, True).copy()
        alone = alone.reshape(shape)
        for i in np.flatnonzero(self.product).tolist():
            m, k, n = (int(self.ops[name][i]) for name in "mkn")
            own = self.size(i, "m", "k") + self.size(i, "k", "n")
            moved = float(self.ops["read_bytes"][i] + self.ops["write_bytes"][i]) - own
            group = FusedGroup(m, k, n, 0, first=_ON_CHIP, moved_bytes=max(moved, 0.0))
            least = group_traffic(group, capacities, self.rules).hbm_bytes
            alone[:, i] = np.minimum(alone[:, i], least)
        return alone

    def fused_bytes(self, capacities: Array, alone: Array) -> Array:
        """Bytes of operators with the best groups of each chain, from those of operators alone."""
        moved = alone.copy()
        for chain in self.chains():
            segments = [alone[:, list(segment)].sum(axis=1) for segment in chain]
            fused = {}
            for begin, end in chain.groups:
                group = self.group(chain, begin, end)
                apart = np.sum(segments[begin:end], axis=0)
                least = group_traffic(group, capacities, self.rules).hbm_bytes
                fused[begin, end] = np.minimum(least, apart)
            for c in range(len(capacities)):
                costs = {(i, i + 1): float(segments[i][c]) for i in range(_SEGMENTS)}
                costs |= {pair: float(least[c]) for pair, least in fused.items()}
                for begin, end in best_cuts(_SEGMENTS, partial(_listed, costs)).groups:
                    members = [i for segment in chain[begin:end] for i in segment]
                    total = float(alone[c, members].sum())
                    if end - begin > 1 and total > 0.0:
                        moved[c, members] = alone[c, members] * (costs[begin, end] / total)
        return moved


def _listed(costs: Mapping[tuple[int, int], float], begin: int, end: int) -> float:
    return costs.get((begin, end), np.inf)


class LayerTraffic(NamedTuple):
    """HBM bytes of the operators of a pass by size of the buffer, shape (capacities, operators)."""

    priced: Array
    """Bytes as the cost of single operators counts them; zero for operators without bytes."""
    moved: Array
    """Bytes if arrays may stay on chip, and products that are not fused take any tile size."""
    compulsory: Array
    """`priced` with a buffer that holds everything, shape (operators,)."""

    @property
    def kept_shares(self) -> Array:
        """Share of the priced bytes that is not moved; negative where weights fill the buffer."""
        shares: Array = 1.0 - self.moved / np.where(self.priced > 0.0, self.priced, 1.0)
        return np.where((self.priced > 0.0) & (np.abs(shares) > _ROUNDING), shares, 0.0)

    @property
    def spared_shares(self) -> Array:
        """Share of the compulsory bytes that is not moved, for lower bounds."""
        whole = np.where(self.compulsory > 0.0, self.compulsory, np.inf)
        shares: Array = np.clip(1.0 - self.moved / whole, 0.0, 1.0)
        return np.where(self.compulsory > 0.0, shares, 0.0)


def layer_traffic(graph: OpGraph, capacities: Array, precision: Streams) -> LayerTraffic:
    """Return the HBM bytes of a pass whose arrays between operators may stay on chip.

    Parameters
    ----------
    graph
        Operators of one pass of a layer, with element-wise ones fused onto products.
    capacities
        Sizes of the buffer in bytes, shape (capacities,).
    precision
        Bytes of an input, an output and a sum, and how they stream through the buffer.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.opgraph import layer_graph
    >>> block = layer_graph(models.load("bertlarge"), fusion="full").layers[1].forward
    >>> bf16 = Streams(in_bytes=2.0, out_bytes=2.0, sum_bytes=4.0, rate=1.0)
    >>> moved = layer_traffic(block, np.array([2.0**20, 2.0**26]), bf16).moved
    >>> bool(moved[1].sum() < moved[0].sum())
    True
    """
    arrays = (graph.ops, graph.indptr, graph.indices, capacities)
    content = tuple(array.tobytes() for array in arrays)
    key = (content, graph.names, graph.tensors, graph.resident, graph.weight_bytes, precision)
    return _known.get(key) or _known.put(key, _traffic(graph, capacities, precision))


_known: LruCache[tuple[object, ...], LayerTraffic] = LruCache(1024)


def _traffic(graph: OpGraph, capacities: Array, precision: Streams) -> LayerTraffic:
    shape = (len(capacities), len(graph))
    priced: Array = _core.op_hbm_bytes(graph.ops, capacities, precision, False).reshape(shape)
    compulsory = _core.op_hbm_bytes(graph.ops, np.array([np.inf]), precision, False)
    if not graph.resident or precision[:2] != (ELEMENT_BYTES, ELEMENT_BYTES):
        return LayerTraffic(priced, priced, compulsory)
    alone: Array = _core.op_hbm_bytes(graph.ops, capacities, precision, True).reshape(shape)
    alone = np.where(graph.ops["format"] == 0, alone, priced)
    known = _Graph(graph, precision)
    moved = known.fused_bytes(capacities, alone)
    stays = (graph.weight_bytes > 0.0) & (2.0 * graph.weight_bytes <= capacities)
    if stays.any():
        left = capacities[stays] - graph.weight_bytes
        known.weight_share = _ON_CHIP
        moved[stays] = known.fused_bytes(left, known.with_weights_on_chip(left))
    return LayerTraffic(priced, moved, compulsory)
