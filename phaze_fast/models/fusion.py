"""Kernels that PyTorch's inductor generates for one pass: which operators each of them computes.

An element-wise operator is computed inside every kernel that reads it, unless its result has to be
in memory. Reductions and stored results are fused into one kernel where they run over the same
elements and share a tensor, unless that kernel would then depend on itself
(torch/_inductor/scheduler.py, ``can_fuse``, and the thresholds of torch/_inductor/config.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phaze_fast.models.decompose import LIBRARY, PARTIAL, PICKED, is_reduction
from phaze_fast.models.recording import Array, Call

_MOST_READS = 8  # realize_acc_reads_threshold: an expression of more tensors is stored
_MOST_READS_SHARED = 4  # realize_reads_threshold: the limit if several operators use it
_STORED = (PICKED, "embedding")  # results that are never computed twice
_MOST_FUSED = 64  # max_fusion_size, in operators

Slot = tuple[int, int]
"""An operator, and the position of one of its inputs or outputs."""


class Flow:
    """The tensors of a list of operators: which operator computes each, and which read it."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.arrays: list[Array] = []
        """Arrays of all tensors; each write to a storage is a new tensor."""
        self.producer: list[int] = []
        """Operator that computes each tensor; -1: an input."""
        self.readers: list[list[int]] = []
        self.reads: list[tuple[int, ...]] = []
        """Tensors that each operator reads."""
        self.writes: list[tuple[int, ...]] = []
        current: dict[int, int] = {}
        for at, call in enumerate(calls):
            read = []
            for array in call.reads:
                if array.storage not in current:
                    current[array.storage] = self._add(array, -1)
                read.append(current[array.storage])
            for tensor in dict.fromkeys(read):
                self.readers[tensor].append(at)
            self.reads.append(tuple(read))
            written = []
            for array in call.writes:
                current[array.storage] = self._add(array, at)
                written.append(current[array.storage])
            self.writes.append(tuple(written))

    def _add(self, array: Array, producer: int) -> int:
        self.arrays.append(array)
        self.producer.append(producer)
        self.readers.append([])
        return len(self.arrays) - 1


def is_generated(call: Call) -> bool:
    """Whether an operator is part of a generated kernel; others are kernels of libraries.

    Writes to a part of a storage, and casts of parameters, are left as they are.
    """
    storages = {array.storage for array in call.reads}
    partly = any(a.storage in storages and a.bytes < a.held_bytes for a in call.writes)
    cast = bool(call.reads) and all(array.parameter for array in call.reads)
    return not (call.name in LIBRARY or partly or cast)


@dataclass
class Kernel:
    """One kernel: operators, the tensors it reads from memory, and those it writes."""

    calls: list[int]
    reads: dict[int, list[Slot]]
    """Tensors that the kernel reads from memory, each with the operator inputs that read it."""
    writes: list[Slot]
    generated: bool
    stored: list[int]
    """Operators that were fused into this kernel, without those inlined into them."""
    largest: int = 0
    """Position in `stored` of the operator with most elements."""
    place: int = 0
    """Operator in whose place the kernel runs: its first, or that of a kernel it reads from."""
    elements: int = 0
    rows: int = 0
    """Number of rows if the kernel reduces rows, else 0."""
    partial: bool = False
    """Whether the kernel computes nothing but partial sums over rows."""

    def fits(self, other: Kernel) -> bool:
        """Whether both kernels run over the same elements, or one over the other's reduced rows."""
        if len(self.stored) + len(other.stored) > _MOST_FUSED:
            return False
        if self.partial or other.partial:  # fused only with reductions
            fused = bool(self.rows or other.rows) or (self.partial and other.partial)
            return fused and self.elements == other.elements
        if self.rows and other.rows:
            return self.rows == other.rows and self.elements == other.elements
        if self.elements == other.elements:
            return True
        return other.elements == self.rows or self.elements == other.rows


class Fusion:
    """Generated kernels of the operators `calls` of one pass.

    Parameters
    ----------
    flow
        Tensors of the whole step.
    calls
        Operators of the pass, in order.
    kept
        Tensors that have to be in memory after the pass.
    """

    def __init__(self, flow: Flow, calls: Iterable[int], kept: set[int]) -> None:
        self._flow, self._calls, self._kept = flow, list(calls), kept
        self._own = set(self._calls)
        self._expressions: dict[int, dict[int, list[Slot]]] = {}
        self._inlined: dict[int, list[int]] = {}
        self._nodes: list[Kernel] = []
        self._home: dict[int, int] = {}  # tensor in memory -> node that writes it
        self._of_tensor: dict[int, list[int]] = {}  # tensor -> generated nodes that read it

    def kernels(self) -> list[Kernel]:
        """Return the kernels of the pass in an order in which they can run."""
        flow = self._flow
        for at in self._calls:
            call = flow.calls[at]
            if not is_generated(call):
                reads: dict[int, list[Slot]] = {}
                for slot, tensor in enumerate(flow.reads[at]):
                    reads.setdefault(tensor, []).append((at, slot))
                writes = [(at, slot) for slot in range(len(call.writes))]
                self._place(Kernel([at], reads, writes, False, [at]))
                continue
            inputs, operators = self._expression(at)
            if self._is_stored(at, len(inputs)):
                self._fuse(self._node(at, inputs, operators))
            else:
                for tensor in flow.writes[at]:
                    self._expressions[tensor] = inputs
                    self._inlined[tensor] = operators
        return self._ordered()

    # ---- what is in memory ----

    def _expression(self, at: int) -> tuple[dict[int, list[Slot]], list[int]]:
        """Return the tensors in memory and the operators from which a result is computed."""
        inputs: dict[int, list[Slot]] = {}
        operators = [at]
        for slot, tensor in enumerate(self._flow.reads[at]):
            if tensor not in self._expressions:
                inputs.setdefault(tensor, []).append((at, slot))
                continue
            operators += self._inlined[tensor]
            for source, slots in self._expressions[tensor].items():
                inputs.setdefault(source, []).extend(slots)
        unique = {source: list(dict.fromkeys(slots)) for source, slots in inputs.items()}
        return unique, list(dict.fromkeys(operators))

    def _is_stored(self, at: int, reads: int) -> bool:
        flow = self._flow
        call = flow.calls[at]
        if is_reduction(call) or call.name in _STORED or reads > _MOST_READS:
            return True
        readers = 0
        for tensor in flow.writes[at]:
            inside = [reader for reader in flow.readers[tensor] if reader in self._own]
            readers += len(inside)
            if tensor in self._kept or any(not is_generated(flow.calls[r]) for r in inside):
                return True
        return readers > 1 and reads > _MOST_READS_SHARED

    def _node(self, at: int, inputs: dict[int, list[Slot]], operators: list[int]) -> Kernel:
        call = self._flow.calls[at]
        writes = [(at, slot) for slot in range(len(call.writes))]
        node = Kernel(operators, inputs, writes, True, [at])
        node.elements = max((array.elements for array in call.writes), default=1)
        if is_reduction(call):
            node.elements = max(array.elements for array in call.reads)
            node.partial = call.name == PARTIAL
            node.rows = 0 if node.partial else call.writes[0].elements
        return node

    # ---- fusion ----

    def _place(self, node: Kernel) -> int:
        self._nodes.append(node)
        at = len(self._nodes) - 1
        self._register(node, at)
        return at

    def _register(self, node: Kernel, at: int) -> None:
        for call, slot in node.writes:
            self._home[self._flow.writes[call][slot]] = at
        if node.generated:
            for tensor in node.reads:
                readers = self._of_tensor.setdefault(tensor, [])
                if at not in readers:
                    readers.append(at)

    def _fuse(self, node: Kernel) -> None:
        """Add a node to the kernel with which it shares most bytes, or as a kernel of its own."""
        shared: dict[int, float] = {}
        for tensor in node.reads:
            size = float(self._flow.arrays[tensor].bytes)
            kernels = set(self._of_tensor.get(tensor, ()))
            if tensor in self._home:
                kernels.add(self._home[tensor])
            for kernel in kernels:
                shared[kernel] = shared.get(kernel, 0.0) + size
        for kernel in sorted(shared, key=lambda k: (-shared[k], -k)):
            group = self._nodes[kernel]
            if group.generated and group.fits(node) and not self._waits(node, kernel):
                self._merge(group, node)
                self._register(group, kernel)
                return
        self._place(node)

    def _waits(self, node: Kernel, kernel: int) -> bool:
        """Whether a node needs a kernel's finished result, or that of a kernel starting later."""
        flow, last = self._flow, max(self._nodes[kernel].stored)
        seen: set[int] = set()
        waiting: list[int] = []
        for tensor in node.reads:
            home = self._home.get(tensor, -1)
            if home == kernel and flow.calls[flow.producer[tensor]].name == PARTIAL:
                return True
            if home not in (-1, kernel):
                if min(self._nodes[home].stored) > last:
                    return True
                waiting.append(home)
        while waiting:
            at = waiting.pop()
            if at == kernel:
                return True
            if at in seen:
                continue
            seen.add(at)
            if max(self._nodes[at].stored) > min(self._nodes[kernel].stored):
                waiting += [self._home[t] for t in self._nodes[at].reads if t in self._home]
        return False

    def _merge(self, group: Kernel, node: Kernel) -> None:
        written = {self._flow.writes[call][slot] for call, slot in group.writes}
        for tensor, slots in node.reads.items():
            if tensor not in written:
                known = group.reads.setdefault(tensor, [])
                known += [slot for slot in slots if slot not in known]
        group.calls = list(dict.fromkeys([*group.calls, *node.calls]))
        group.writes += node.writes
        if node.elements > group.elements:
            group.elements, group.largest = node.elements, len(group.stored)
        group.stored += node.stored
        group.rows = group.rows or node.rows
        group.partial = group.partial and node.partial

    # ---- order ----

    def _ordered(self) -> list[Kernel]:
        """Return kernels, each after those it reads from, without writes that no other reads."""
        for at, node in enumerate(self._nodes):
            if node.generated:
                node.writes = [slot for slot in node.writes if self._is_read(slot, at)]
        order: list[int] = []
        done: set[int] = set()
        for start in sorted(range(len(self._nodes)), key=lambda at: min(self._nodes[at].stored)):
            stack = [start]
            while stack:
                at = stack[-1]
                before = self._before(at)
                waiting = sorted(before - done, reverse=True)
                if waiting:
                    stack += waiting
                    continue
                stack.pop()
                if at not in done:
                    done.add(at)
                    order.append(at)
                    node = self._nodes[at]
                    places = [self._nodes[one].place for one in before]
                    node.place = max(min(node.stored), *places, 0)
        kernels = [self._nodes[at] for at in order]
        kernels.sort(key=lambda kernel: kernel.place)  # stable: each stays after those it reads
        return [kernel for kernel in kernels if kernel.writes or not kernel.generated]

    def _before(self, at: int) -> set[int]:
        """Return the kernels that a kernel reads from."""
        return {self._home[t] for t in self._nodes[at].reads if t in self._home} - {at}

    def _is_read(self, slot: Slot, at: int) -> bool:
        tensor = self._flow.writes[slot[0]][slot[1]]
        others = (k for k in self._of_tensor.get(tensor, ()) if k != at)
        return (
            tensor in self._kept
            or any(True for _ in others)
            or any(
                reader in self._own and not is_generated(self._flow.calls[reader])
                for reader in self._flow.readers[tensor]
            )
        )
