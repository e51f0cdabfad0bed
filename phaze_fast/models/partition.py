"""What the forward pass of a compiled step stores, and what the backward pass computes again.

PyTorch's AOTAutograd traces both passes as one graph and cuts it where the fewest bytes cross
(torch/_functorch/partitioners.py, ``min_cut_rematerialization_partition``): element-wise operators
are computed again where that stores less. Never computed again are products, reductions, random
numbers, tensors that a kernel of the backward pass reads from memory anyway, readers of a tensor
that are separated from its other readers by a product, and the ends of very long chains.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

_LONGEST_CHAIN = 100  # fusible operators after which a chain is cut
_SMALLER = 4  # least factor by which a reduction's inputs exceed its output
_BIAS = 1.1  # factor on a tensor's cost for each operator between it and the backward pass


@dataclass(frozen=True)
class JointGraph:
    """The tensors of a forward and a backward pass.

    Tensors are numbered in the order in which they are written.
    """

    bytes: Sequence[float]
    """Bytes of every tensor."""
    inputs: Sequence[tuple[int, ...]]
    """Tensors that each tensor is computed from; none: it is an input of the step."""
    readers: Sequence[tuple[int, ...]]
    """Tensors that are computed from each tensor."""
    backward: Sequence[bool]
    """Whether the backward pass computes each tensor."""
    fusible: Sequence[bool]
    """Whether each tensor is computed in a generated kernel: element by element or reduced."""
    recomputable: Sequence[bool]
    """Whether the operator that computes each tensor may run again."""
    free: Sequence[bool]
    """Whether each tensor is in memory all the time, as parameters are."""

    def _fused(self, tensor: int, reader: int) -> bool:
        return self.fusible[tensor] and self.fusible[reader]

    def _stored_anyway(self, tensor: int) -> bool:
        """Whether a kernel of the backward pass that is not generated reads a tensor."""
        return any(
            self.backward[reader] and not self._fused(tensor, reader)
            for reader in self.readers[tensor]
        )

    def _reduces(self, tensor: int) -> bool:
        read = sum(self.bytes[source] for source in self.inputs[tensor])
        return self.bytes[tensor] * _SMALLER < read

    def _forward_readers(self, tensor: int) -> list[int]:
        return [reader for reader in self.readers[tensor] if not self.backward[reader]]

    def _first_barrier(self, starts: Iterable[int], last: int) -> int:
        """Return the first reader downstream of `starts` that cannot be fused, up to `last`."""
        waiting = [(start, True) for start in starts]
        heapq.heapify(waiting)
        queued = set(waiting)
        while waiting:
            tensor, fused = heapq.heappop(waiting)
            if not fused:
                return tensor
            for reader in self._forward_readers(tensor):
                entry = (reader, self._fused(tensor, reader))
                if reader <= last and entry not in queued:
                    queued.add(entry)
                    heapq.heappush(waiting, entry)
        return last

    def never_recomputed(self) -> set[int]:
        """Return the tensors of the forward pass that are never computed again."""
        forward = [at for at in range(len(self.bytes)) if not self.backward[at]]
        fixed = {
            at
            for at in forward
            if not self.inputs[at]
            or not self.recomputable[at]
            or self._stored_anyway(at)
            or self._reduces(at)
        }
        for at in forward:
            near = self._forward_readers(at)
            if near:
                barrier = self._first_barrier(near, max(near))
                fixed |= {r for r in near if r > barrier and self._fused(at, r)}
        return fixed | self._chain_ends(forward, fixed)

    def _chain_ends(self, forward: list[int], fixed: set[int]) -> set[int]:
        """Return the tensors at which chains of more than 100 fusible operators are cut."""
        ends: set[int] = set()
        visited: set[int] = set()
        for start in forward:
            waiting = [start]
            while waiting:
                tensor = heapq.heappop(waiting)
                if tensor in visited:
                    continue
                visited.add(tensor)
                if tensor > start + _LONGEST_CHAIN and not waiting:
                    ends.add(tensor)
                    break
                for reader in self._forward_readers(tensor):
                    if self._fused(tensor, reader) and not (reader in fixed or reader in ends):
                        heapq.heappush(waiting, reader)
        return ends

    def _distances(self) -> list[int]:
        """Return the fewest operators between each tensor and the backward pass."""
        distance = [0 if one else 1000 for one in self.backward]
        for at in reversed(range(len(distance))):
            if not self.backward[at]:
                near = min((distance[r] for r in self.readers[at]), default=1000)
                distance[at] = min(near + 1, 1000)
        return distance

    def storage_costs(self) -> list[float]:
        """Cost of storing each tensor: its biased bytes, doubled if it were else never written."""
        costs = []
        for at, distance in enumerate(self._distances()):
            written = not self.inputs[at] or not all(self._fused(at, r) for r in self.readers[at])
            bias = _BIAS ** max(min(distance, 100), 1)
            costs.append(0.0 if self.free[at] else self.bytes[at] * bias * (1 if written else 2))
        return costs

    def stored(self) -> set[int]:
        """Return the tensors of the forward pass that the backward pass reads from memory."""
        return cheapest_stores(self, self.never_recomputed(), self.storage_costs())


def cheapest_stores(
    graph: JointGraph, never_recomputed: Collection[int], costs: Sequence[float]
) -> set[int]:
    """Return the tensors to store at the least total cost, so that the rest can be recomputed.

    Every tensor that the backward pass reads is either stored or computed again from stored
    ones. The stored tensors are a minimum cut between those that cannot be computed again and those
    that the backward pass reads.

    Examples
    --------
    >>> chain = JointGraph(
    ...     bytes=(2.0, 8.0, 8.0, 1.0),
    ...     inputs=((), (0,), (1,), (2,)),
    ...     readers=((1,), (2,), (3,), ()),
    ...     backward=(False, False, False, True),
    ...     fusible=(True,) * 4,
    ...     recomputable=(True,) * 4,
    ...     free=(False,) * 4,
    ... )
    >>> sorted(cheapest_stores(chain, {0}, chain.bytes))
    [0]
    """
    flow = _Flow(2 * len(graph.bytes) + 2)
    source, sink = flow.nodes - 2, flow.nodes - 1
    for at, cost in enumerate(costs):
        if graph.backward[at]:
            continue
        flow.edge(2 * at, 2 * at + 1, cost)
        if at in never_recomputed:
            flow.edge(source, 2 * at, math.inf)
        if any(graph.backward[reader] for reader in graph.readers[at]):
            flow.edge(2 * at + 1, sink, math.inf)
        for reader in graph.readers[at]:
            if not graph.backward[reader] and reader not in never_recomputed:
                flow.edge(2 * at + 1, 2 * reader, math.inf)
    reached = flow.cut(source, sink)
    return {at for at in range(len(costs)) if reached[2 * at] and not reached[2 * at + 1]}


class _Flow:
    """A network and its maximum flow by Dinic's algorithm (Soviet Math. Doklady 11, 1970)."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._edges: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._left: list[float] = []  # capacity left by edge; edge e ^ 1 is e reversed

    def edge(self, start: int, end: int, capacity: float) -> None:
        """Add an edge."""
        for a, b, left in ((start, end, capacity), (end, start, 0.0)):
            self._edges[a].append(len(self._to))
            self._to.append(b)
            self._left.append(left)

    def _levels(self, source: int) -> list[int]:
        levels = [-1] * self.nodes
        levels[source] = 0
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                if self._left[edge] > 0.0 and levels[self._to[edge]] < 0:
                    levels[self._to[edge]] = levels[node] + 1
                    waiting.append(self._to[edge])
        return levels

    def _augment(self, source: int, sink: int, levels: list[int], tried: list[int]) -> bool:
        """Send flow along one shortest path; return whether there was one."""
        path: list[int] = []
        node = source
        while node != sink:
            edges = self._edges[node]
            while tried[node] < len(edges):
                edge = edges[tried[node]]
                if self._left[edge] > 0.0 and levels[self._to[edge]] == levels[node] + 1:
                    break
                tried[node] += 1
            if tried[node] < len(edges):
                path.append(edges[tried[node]])
                node = self._to[path[-1]]
            elif path:
                node = self._to[path.pop() ^ 1]
                tried[node] += 1
            else:
                return False
        sent = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= sent
            self._left[edge ^ 1] += sent
        return True

    def cut(self, source: int, sink: int) -> list[bool]:
        """Return which nodes are on the source's side of a minimum cut."""
        while (levels := self._levels(source))[sink] >= 0:
            tried = [0] * self.nodes
            while self._augment(source, sink, levels, tried):
                pass
        return [level >= 0 for level in levels]
