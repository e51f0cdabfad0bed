"""When the tensors of a recorded training step are allocated, and what is allocated at its peaks.

PyTorch frees a tensor with its last reference. In the forward pass that is the last operator that
reads it, or the end of a module that it was passed to; autograd holds what it saved, and the
gradients that enter a node, until the node that reads them last has run; gradients of parameters
stay until the optimiser's step. Outputs of the module other than the loss are not held.
Sums of gradients, and gradients written into zeros by index, are in place unless a later operator
reads their first operand, although a recording by a dispatch mode shows a new tensor
(torch/csrc/autograd/input_buffer.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.models.compiled import CompiledRecording
from phaze_fast.models.recording import Array, Call


@dataclass(frozen=True)
class Lifetime:
    """The operators between which a storage is allocated."""

    storage: int
    born: int
    """Operator that allocates the storage; -1: it exists before the step."""
    dies: int
    """Last operator before it is freed; the number of operators: it outlives the step."""
    sizes: tuple[int, int]
    """Bytes in each of the two recordings."""
    gradient: bool = False
    """Whether the storage holds the gradient of a parameter."""


@dataclass(frozen=True)
class Peak:
    """An instant at which the operators of a layer have the most bytes allocated."""

    operator: int
    tensors: tuple[Lifetime, ...]
    """Tensors that are allocated then, without those that earlier layers save and the gradients of
    later layers."""


def _node_ends(calls: Sequence[Call], sums: frozenset[int]) -> list[int]:
    """Last operator of each backward operator's autograd node; a forward operator itself."""
    ends = list(range(len(calls)))
    for at in range(len(calls) - 2, -1, -1):
        after = calls[at + 1]
        same = calls[at].backward and after.sequence == calls[at].sequence
        if same and at not in sums and at + 1 not in sums:
            ends[at] = ends[at + 1]
    return ends


def _gradient_sums(calls: Sequence[Call]) -> tuple[frozenset[int], dict[int, int]]:
    """Find sums of gradients; return them and the storage that each in-place result shares."""
    last_read = {array.storage: at for at, call in enumerate(calls) for array in call.reads}
    computed: set[int] = set()
    sums, shared = set(), dict[int, int]()
    for at, call in enumerate(calls):
        if not call.backward:
            continue
        is_sum = call.name == "add" and len(call.reads) == 2 and len(call.writes) == 1
        if is_sum and all(array.storage in computed for array in call.reads):
            sums.add(at)
        if at in sums or call.name == "index_put":
            first, result = call.reads[0], call.writes[0]
            alone = last_read[first.storage] == at and first.held_bytes == result.held_bytes
            if alone and result.storage != first.storage:
                shared[result.storage] = shared.get(first.storage, first.storage)
        computed.update(array.storage for array in call.writes)
    return frozenset(sums), shared


class _Uses:
    """When storages are allocated (`born`) and freed (`dies`), gathered operator by operator."""

    def __init__(self, recording: Any, larger: Any) -> None:
        self.calls: Sequence[Call] = recording.calls
        self._at_once = isinstance(recording, CompiledRecording)
        sums, self._shared = _gradient_sums(self.calls)
        self._ends = _node_ends(self.calls, sums)
        if self._at_once:  # generated code frees a tensor after the last kernel that reads it
            self._shared, self._ends = {}, list(range(len(self.calls)))
        self._module_ends = {
            number: at
            for at, call in enumerate(self.calls)
            if not call.backward
            for number, _ in call.path
        }
        self.saved = {one.array.storage for one in recording.saved}
        self.parameters = set(recording.parameters)
        self.born: dict[int, int] = {}
        self.dies: dict[int, int] = {}
        self.sizes: dict[int, tuple[int, int]] = {}
        self.written = {a.storage for call in self.calls for a in call.writes}
        self.read = {
            a.storage
            for call in self.calls
            for a in call.reads
            if all(a.storage != out.storage for out in call.writes)  # not in place
        }
        for at, (call, other) in enumerate(zip(self.calls, larger.calls, strict=True)):
            # a recording of more samples may join more parts of one tensor
            for array, more in zip(call.reads, other.reads, strict=False):
                self._use(at, array, more, self._held_until(at, array))
            for array, more in zip(call.writes, other.writes, strict=True):
                self._use(at, array, more, self._ends[at])
        for one, two in zip(recording.saved, larger.saved, strict=True):
            if one.array.storage not in self.born:  # saved, and read by no recorded operator
                self._use(-1, one.array, two.array, len(self.calls))

    def own(self, storage: int) -> int:
        """Return the storage, or for the result of an in-place sum the one it overwrites."""
        return self._shared.get(storage, storage)

    def _use(self, at: int, array: Array, more: Array, until: int) -> None:
        storage = self.own(array.storage)
        new = array.storage in self.written or (at >= 0 and self.calls[at].backward)
        if storage in self.parameters or not (new or storage in self.saved):
            return
        self.born.setdefault(storage, at if new else -1)
        self.dies[storage] = max(until, self.dies.get(storage, -1))
        self.sizes.setdefault(storage, (array.held_bytes, more.held_bytes))

    def _held_until(self, at: int, array: Array) -> int:
        """Last operator that holds an array which the operator `at` reads."""
        call, born = self.calls[at], self.born.get(self.own(array.storage), -1)
        if call.backward or born < 0 or self._at_once:
            return self._ends[at]
        around = {number for number, _ in self.calls[born].path}
        inner = (number for number, path in call.path if path and number not in around)
        passed_to = next(inner, None)
        return at if passed_to is None else self._module_ends[passed_to]


def lifetimes(recording: Any, larger: Any) -> list[Lifetime]:
    """Return the lifetimes of the storages of a recorded step, in the order of their allocation.

    Parameters
    ----------
    recording, larger
        Recordings of one step with fewer and with more samples, operator by operator alike.
        Parameters are not listed, nor inputs and constants that autograd does not save.
    """
    uses = _Uses(recording, larger)
    counts = set(recording.parameters.values())
    gradients = {
        uses.own(array.storage)
        for call in uses.calls
        if call.backward
        for array in call.writes
        if array.storage not in uses.read and array.elements in counts
    }
    gradients = {s for s in gradients if uses.sizes[s][0] == uses.sizes[s][1]}
    found = [
        Lifetime(
            storage,
            born,
            len(uses.calls) if storage in gradients else uses.dies[storage],
            uses.sizes[storage],
            storage in gradients,
        )
        for storage, born in uses.born.items()
    ]
    return sorted(found, key=lambda one: (one.born, one.storage))


def largest_at_some_count(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the (slope, constant) pairs that are largest at some number of samples from 1.

    Examples
    --------
    >>> largest_at_some_count([(1.0, 9.0), (2.0, 0.0), (1.0, 3.0), (1.5, 1.0)])
    [(1.0, 9.0), (2.0, 0.0)]
    """
    hull: list[tuple[float, float]] = []
    start = 1.0
    remaining = sorted(set(points), key=lambda p: (p[0] + p[1], p[0]))
    while remaining:
        slope, constant = best = max(remaining, key=lambda p: (p[0] * start + p[1], p[0]))
        hull.append(best)
        remaining = [p for p in remaining if p[0] > slope]
        if remaining:
            start = min((constant - p[1]) / (p[0] - slope) for p in remaining)
    return hull


class _Totals:
    """Bytes allocated now: temporary, saved or gradients of each layer, in both recordings."""

    def __init__(self, layers: int) -> None:
        self.temporary = np.zeros(2)
        self.saved, self.gradients = np.zeros((layers, 2)), np.zeros((layers, 2))

    def change(self, one: Lifetime, layer: int | None, sign: int) -> None:
        size = sign * np.array(one.sizes, dtype=float)
        if layer is None:
            self.temporary += size
        elif one.gradient:
            self.gradients[layer] += size
        else:
            self.saved[layer] += size

    def of(self, layer: int) -> tuple[float, float]:
        """Bytes per sample, and constant bytes, allocated for a layer while its operator runs."""
        two, four = self.temporary + self.saved[layer:].sum(0) + self.gradients[layer]
        slope = (four - two) / 2.0
        return float(slope), float(two - 2.0 * slope)


def peaks_by_layer(
    alive: Sequence[Lifetime],
    owners: Sequence[int],
    homes: dict[int, int],
    layers: int,
    backward: Callable[[int], bool],
) -> list[list[Peak]]:
    """Find each layer's instants of peak memory, in each pass, at some number of samples.

    Parameters
    ----------
    alive
        Lifetimes of the storages, for 2 and 4 samples.
    owners
        Layer of each operator.
    homes
        Layer that saves each storage which autograd saves.
    layers
        Number of layers.
    backward
        Whether an operator belongs to the backward pass.
    """

    def counts_for(one: Lifetime) -> int | None:
        return owners[one.born] if one.gradient else homes.get(one.storage)

    begin: dict[int, list[Lifetime]] = {}
    end: dict[int, list[Lifetime]] = {}
    for one in alive:
        begin.setdefault(max(one.born, 0), []).append(one)
        end.setdefault(one.dies, []).append(one)
    totals = _Totals(layers)
    instants: dict[tuple[int, bool], dict[tuple[float, float], int]] = {}
    for at, owner in enumerate(owners):
        for one in begin.get(at, ()):
            totals.change(one, counts_for(one), 1)
        instants.setdefault((owner, backward(at)), {}).setdefault(totals.of(owner), at)
        for one in end.get(at, ()):
            totals.change(one, counts_for(one), -1)
    peaks: list[list[Peak]] = [[] for _ in range(layers)]
    for (owner, _), points in instants.items():
        for point in largest_at_some_count(points):
            at = points[point]
            held = []
            for one in alive:
                layer = counts_for(one)
                own = layer is None or (layer == owner if one.gradient else layer >= owner)
                if own and one.born <= at <= one.dies:
                    held.append(one)
            peaks[owner].append(Peak(at, tuple(held)))
    return peaks
