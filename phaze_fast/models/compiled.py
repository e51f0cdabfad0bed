"""A recorded step as torch.compile runs it: fewer, larger kernels, and fewer stored tensors.

Operators are taken apart (`decompose`), the joint graph is cut into what the forward pass stores
and what the backward pass computes again (`partition`), and each pass is fused into kernels
(`fusion`). The result is a recording again. Decisions are made once, for the larger of two
recordings, so that both have the same kernels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phaze_fast.models.compiled_code import Code as Code
from phaze_fast.models.compiled_code import code_of_class as code_of_class
from phaze_fast.models.compiled_code import transformers_branches
from phaze_fast.models.decompose import NOT_AGAIN, Parts, is_reduction
from phaze_fast.models.fusion import Flow, Fusion, Kernel, is_generated
from phaze_fast.models.partition import JointGraph
from phaze_fast.models.recording import Array, Call, Saved

FUSED = "fused"
"""Start of the names of generated kernels."""
_GELU = frozenset({"gelu", "gelu_backward", "tanh", "tanh_backward", "erf"})
_FLOAT_BYTES = (2, 4)
_NAMED = 4  # the most operators that the name of a kernel lists
_GATHERS = frozenset({"embedding", "index", "gather", "index_select", "_unsafe_index"})


@dataclass(frozen=True)
class CompiledRecording:
    """A recorded step rewritten into kernels; its fields are those of a `Recording`."""

    calls: list[Call]
    saved: list[Saved]
    parameters: dict[int, int]
    copies: dict[int, int]
    frozen: set[int]
    constants: Any


def compiled(
    small: Any, large: Any, *, code: Code = "own"
) -> tuple[CompiledRecording, CompiledRecording]:
    """Rewrite two recordings of one step, of 2 and of 4 samples, as torch.compile does.

    Parameters
    ----------
    small, large
        Recordings with the same operators, such as `phaze_fast.models.torch_recorder` makes.
    code
        Whose code the module is: code of transformers takes other branches when it is compiled.
    """
    parts = [Parts(), Parts()]
    recorded = [
        step.calls if code == "own" else transformers_branches(step.calls, own, code)
        for own, step in zip(parts, (small, large), strict=True)
    ]
    whole = [
        [part for call, twin in zip(*pair, strict=True) for part in own.of(call, twin)]
        for own, pair in zip(parts, (recorded, recorded[::-1]), strict=True)
    ]
    flow = Flow(whole[1])
    again = _computed_again(flow, joint_graph(flow).stored())
    steps = [_with(again, calls, own) for calls, own in zip(whole, parts, strict=True)]
    outputs = {
        array.storage
        for array, readers in zip(flow.arrays, flow.readers, strict=True)
        if not readers and array.storage >= 0
    }
    flow = Flow(steps[1])
    kernels = _kernels(flow, outputs)
    one, two = (
        _Writer(flow, kernels, calls, step).recording()
        for calls, step in zip(steps, (small, large), strict=True)
    )
    return one, two


# ---- what is stored, what is computed again ----


def joint_graph(flow: Flow) -> JointGraph:
    """Return the tensors of both passes, as the partitioner sees them."""
    tensors = range(len(flow.arrays))
    generated = [is_generated(call) for call in flow.calls]
    producers = [flow.calls[at] if at >= 0 else None for at in flow.producer]
    return JointGraph(
        bytes=[float(array.elements * array.item_bytes) for array in flow.arrays],
        inputs=[flow.reads[at] if at >= 0 else () for at in flow.producer],
        readers=[
            tuple(written for at in flow.readers[tensor] for written in flow.writes[at])
            for tensor in tensors
        ],
        backward=[call is not None and call.backward for call in producers],
        fusible=[at >= 0 and generated[at] for at in flow.producer],
        recomputable=[
            call is not None and generated[at] and call.name not in NOT_AGAIN
            for call, at in zip(producers, flow.producer, strict=True)
        ],
        free=[array.parameter for array in flow.arrays],
    )


def _computed_again(flow: Flow, stored: set[int]) -> dict[int, list[int]]:
    """Return the forward operators to run again before each backward operator."""
    again: dict[int, list[int]] = {}
    done: set[int] = set()
    for at, call in enumerate(flow.calls):
        if not call.backward:
            continue
        found: list[int] = []
        waiting = list(flow.reads[at])
        while waiting:
            tensor = waiting.pop()
            producer = flow.producer[tensor]
            if producer < 0 or tensor in stored or producer in done:
                continue
            if not flow.calls[producer].backward:
                done.add(producer)
                found.append(producer)
                waiting += flow.reads[producer]
        if found:
            again[at] = sorted(found)
    return again


def _with(again: dict[int, list[int]], calls: list[Call], parts: Parts) -> list[Call]:
    """Return both passes with the operators that the backward pass runs again."""
    storages: dict[int, int] = {}
    step: list[Call] = []
    for at, call in enumerate(calls):
        step += [parts.copy(calls[one], call.sequence, storages) for one in again.get(at, ())]
        if call.backward and storages:
            reads = tuple(
                replace(array, storage=storages.get(array.storage, array.storage))
                for array in call.reads
            )
            call = replace(call, reads=reads)
        step.append(call)
    return step


# ---- kernels ----


def _kernels(flow: Flow, outputs: set[int]) -> list[Kernel]:
    """Return the kernels of both passes in the order in which they run."""
    kernels: list[Kernel] = []
    for backward in (False, True):
        kept = {
            tensor
            for tensor, readers in enumerate(flow.readers)
            if (not readers and flow.arrays[tensor].storage in outputs)
            or (not backward and any(flow.calls[reader].backward for reader in readers))
        }
        own = [at for at, call in enumerate(flow.calls) if call.backward == backward]
        kernels += Fusion(flow, _needed(flow, own, kept), kept).kernels()
    return kernels


def _needed(flow: Flow, calls: Sequence[int], kept: set[int]) -> list[int]:
    """Return the operators of a pass whose results are used."""
    used = set(kept)
    needed = []
    for at in reversed(calls):
        if used.intersection(flow.writes[at]) or not is_generated(flow.calls[at]):
            needed.append(at)
            used.update(flow.reads[at])
    return needed[::-1]


def _kind(members: list[Call]) -> str:
    """Return the kind of a kernel; tensor-parallel splits distinguish forward kinds alone."""
    names = {call.name for call in members}
    if members[0].backward:
        return "multiply"
    if "embedding" in names:
        return "embedding"
    if "softmax_statistics" in names:
        return "softmax"
    return "norm" if any(map(is_reduction, members)) else "multiply"


class _Writer:
    """Writes kernels as the operators of a recording."""

    def __init__(self, flow: Flow, kernels: list[Kernel], calls: list[Call], step: Any) -> None:
        self._flow, self._kernels, self._calls, self._step = flow, kernels, calls, step
        self._home = {
            flow.writes[call][slot]: at
            for at, kernel in enumerate(kernels)
            for call, slot in kernel.writes
        }
        self._inputs = {one.array.storage: one.source for one in step.saved if one.source < 0}

    def recording(self) -> CompiledRecording:
        """Return the recording of the kernels."""
        calls = [self._call(kernel) for kernel in self._kernels]
        step = self._step
        saved = list(self._saved(calls))
        return CompiledRecording(
            calls, saved, step.parameters, step.copies, step.frozen, step.constants
        )

    def _read(self, call: int, slot: int) -> Array:
        """Return an input of an operator; of a table, the rows that are looked up."""
        own = self._calls[call]
        array = own.reads[min(slot, len(own.reads) - 1)]  # fewer samples may join fewer parts
        if slot == 0 and own.name in _GATHERS:
            return replace(array, shape=own.writes[0].shape)
        return array

    def _sources(self, kernel: Kernel) -> tuple[int, ...]:
        sources = []
        for tensor, slots in kernel.reads.items():
            if tensor in self._home:
                sources.append(self._home[tensor])
            elif not self._flow.arrays[tensor].parameter:
                sources += [-1 for call, _ in slots if -1 in self._calls[call].sources]
        return tuple(dict.fromkeys(sources))

    def _call(self, kernel: Kernel) -> Call:
        members = [self._calls[at] for at in sorted(kernel.calls)]
        first = self._calls[kernel.place]
        if not kernel.generated:
            own, sources = self._calls[kernel.stored[0]], self._sources(kernel)
            return replace(own, sources=sources, path=first.path, sequence=first.sequence)
        reads = []
        for slots in kernel.reads.values():
            arrays = [self._read(*slot) for slot in slots]
            widest = max(arrays, key=lambda array: array.bytes)
            size = min(sum(array.bytes for array in arrays), widest.held_bytes)
            if size > widest.bytes:  # several parts of one tensor
                widest = replace(widest, shape=(size // widest.item_bytes,))
            reads.append(widest)
        names = dict.fromkeys(call.name.strip("_") for call in members if call.name != "_to_copy")
        largest = self._calls[kernel.stored[kernel.largest]]
        iterated = largest.reads if is_reduction(largest) else largest.writes
        return Call(
            name="_".join([FUSED, *list(names)[:_NAMED]]),
            reads=tuple(reads),
            writes=tuple(self._calls[call].writes[slot] for call, slot in kernel.writes),
            sources=self._sources(kernel),
            backward=first.backward,
            path=first.path,
            sequence=first.sequence,
            options={
                "kind": _kind(members),
                "function": self._function(kernel, members),
                "shape": max(iterated, key=lambda array: array.elements).shape,
            },
            line=first.line,
        )

    def _function(self, kernel: Kernel, members: list[Call]) -> str:
        """Return the costliest function of a kernel; most are copies, limited by memory.

        Constants, such as cosines of positions, are computed in every kernel that uses them.
        """
        flow, names = self._flow, {call.name for call in members}
        if "softmax_statistics" in names:
            return "softmax"
        tables = any(
            flow.producer[tensor] < 0
            and not flow.arrays[tensor].parameter
            and self._inputs.get(flow.arrays[tensor].storage, -2) == -2
            and flow.arrays[tensor].elements > 1
            and flow.arrays[tensor].item_bytes in _FLOAT_BYTES
            for tensor in kernel.reads
        )
        if tables:
            return "rotary"
        if names & _GELU:
            return "gelu-backward" if members[0].backward else "gelu"
        return "copy"

    def _saved(self, calls: list[Call]) -> Any:
        """Yield the tensors that the backward pass reads, for each operator that needs them."""
        forward = [(c.sequence, at) for at, c in enumerate(self._calls) if not c.backward]
        forward.sort()
        sequences = [sequence for sequence, _ in forward]
        kernel_of: dict[int, int] = {}
        for at, kernel in enumerate(self._kernels):
            for call in (*kernel.stored, *kernel.calls):
                kernel_of.setdefault(call, at)
        for at, kernel in enumerate(self._kernels):
            for tensor, slots in kernel.reads.items() if calls[at].backward else ():
                producer = self._flow.producer[tensor]
                home = self._home.get(tensor, -1)
                if self._flow.arrays[tensor].parameter or (home >= 0 and calls[home].backward):
                    continue
                array = self._read(*slots[0])
                if producer < 0 and array.storage not in self._inputs:
                    continue
                source = home if producer >= 0 else self._inputs[array.storage]
                number = max(bisect_right(sequences, self._calls[slots[0][0]].sequence) - 1, 0)
                origin = kernel_of.get(forward[number][1], max(source, 0))
                yield Saved(array, origin, calls[origin].path, source)
