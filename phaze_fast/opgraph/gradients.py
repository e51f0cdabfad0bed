"""The backward pass of a layer, derived from its forward pass, and the memory it needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from phaze_fast.opgraph.builder import (
    ELEMENT_BYTES,
    OperatorSpec,
    restored_weights,
    vector_spec,
)
from phaze_fast.opgraph.graph import AGAIN, KINDS, OpGraph
from phaze_fast.records import changed

SUM = "-gradients"
"""Suffix of the names of operators that add up gradients of one tensor."""


def gradients(specs: list[OperatorSpec], sums: str = "free") -> list[OperatorSpec]:
    """Return the gradient operators of all operators; none of them reads a gradient of weights.

    Parameters
    ----------
    specs
        Operators of the forward pass in topological order.
    sums
        How gradients of a tensor with several readers are added: at no cost (``free``), by separate
        ``kernels``, or ``fused`` into the kernel that reads the sum.
    """
    operators: list[OperatorSpec] = []
    arriving: dict[int, list[int]] = {}  # operator -> gradients of its output, one per consumer
    gathered: dict[int, int] = {}  # operator -> its repeated all-gather, shared by all readers
    for i in reversed(range(len(specs))):
        spec = specs[i]
        if spec.frozen and spec.kind != "gemm":
            continue  # restores frozen weights: no gradient
        upstream = _summed(operators, spec.name, arriving.get(i, []), _output_bytes(spec), sums)
        needed = _gathered_again(specs, spec)
        if needed is not None and needed not in gathered:
            name = f"{specs[needed].name}{AGAIN}"
            operators.append(changed(specs[needed], name=name, inputs=(-1,)))
            gathered[needed] = len(operators) - 1
        again = () if needed is None else (gathered[needed],)
        for slot, gradient in _gradients_of(spec, upstream, again, operators):
            source = spec.inputs[slot]
            if source >= 0 or spec.kind in _OF_ROWS:
                arriving.setdefault(source, []).append(gradient)
    _summed(operators, "input", arriving.get(-1, []), _input_bytes(specs), sums)
    return operators


_OF_ROWS = ("norm", "residual", "dropout")
"""Kinds of operators that read the residual stream, whose rows are the input of a block."""


def _output_bytes(spec: OperatorSpec) -> float:
    """Bytes of an operator's output; 0 if gradients of parts of it are concatenated, not added."""
    if spec.kind == "gemm":
        return 0.0  # parts: for example queries, keys and values of one product
    if spec.kind == "collective":
        return spec.payload_bytes or (spec.gradient or ("", 0.0, ""))[1]
    return spec.write_bytes


def _input_bytes(specs: list[OperatorSpec]) -> float:
    """Bytes of the rows that enter a layer."""
    sizes = [s.write_bytes for s in specs if s.kind in _OF_ROWS and -1 in s.inputs]
    return min(sizes, default=0.0)


def _summed(
    operators: list[OperatorSpec], name: str, arrived: list[int], size: float, sums: str
) -> tuple[int, ...]:
    """Return the operators whose results add up to the gradient of a tensor of `size` bytes."""
    parts = tuple(dict.fromkeys(arrived))
    more = len(parts) - 1
    if sums == "free" or more < 1 or not size:
        return parts
    kernels = sums == "kernels"
    read, written = (2.0, 1.0) if kernels else (1.0, 0.0)
    rows, moved = math.trunc(size) // ELEMENT_BYTES, more * size
    operators.append(
        vector_spec(name + SUM, "residual", parts, rows, more, read * moved, written * moved)
    )
    return (len(operators) - 1,)


def _gathered_again(specs: list[OperatorSpec], spec: OperatorSpec) -> int | None:
    """Return the input that is stored sharded and must be gathered for the gradients, if any."""
    for source in dict.fromkeys(spec.inputs):
        if source < 0 or not specs[source].regather or spec.frozen:
            continue
        if spec.kind == "gemm" or specs[source].group == "context":
            return source
    return None


def _gradients_of(
    spec: OperatorSpec,
    upstream: tuple[int, ...],
    gathered: tuple[int, ...],
    operators: list[OperatorSpec],
) -> list[tuple[int, int]]:
    """Append the gradient operators of an operator; return pairs (input slot, its gradient).

    `gathered` is the operator that gathers a sharded input again, if any.
    """

    def add(new: OperatorSpec) -> int:
        operators.append(new if new.inputs else changed(new, inputs=(-1,)))
        return len(operators) - 1

    name = f"d-{spec.name}"
    if spec.kind == "gemm":
        return _product_gradients(spec, upstream, gathered, add)
    upstream = (*upstream, *gathered)
    if spec.kind == "batched-gemm":
        return _product_gradients(spec, upstream, (), add)
    if spec.kind == "collective":
        op, payload, group = spec.gradient or ("", 0.0, "none")
        ended = changed(
            spec,
            name=name,
            inputs=upstream,
            collective=op,
            payload_bytes=payload,
            group=group,
            virtual=spec.gradient is None,
        )
        ending = add(ended)
        return [(slot, ending) for slot in range(spec.sources)]
    if spec.kind == "residual":
        passed = add(changed(spec, name=name, inputs=upstream, virtual=True))
        return [(slot, passed) for slot in range(len(spec.inputs))]
    if spec.function == "copy":  # the gradient of a reordering restores the order
        back = changed(spec, read_bytes=spec.write_bytes, write_bytes=spec.read_bytes)
        return [(0, add(changed(back, name=name, inputs=upstream)))]
    # A gradient reads the inputs and the output gradient, and writes the input gradients.
    flops = 2.5 * spec.flops if spec.kind == "attention" else 2.0 * spec.flops
    own = changed(
        spec,
        name=name,
        kind=f"{spec.kind}-backward",
        inputs=upstream,
        flops=flops,
        read_bytes=spec.read_bytes + spec.write_bytes,
        write_bytes=spec.read_bytes,
    )
    gradient = add(own)
    return [(slot, gradient) for slot in range(len(spec.inputs))]


def _product_gradients(
    spec: OperatorSpec,
    upstream: tuple[int, ...],
    gathered: tuple[int, ...],
    add: Callable[[OperatorSpec], int],
) -> list[tuple[int, int]]:
    """Add the gradients of both factors of Y = AB: dA = dY Bᵀ and dB = Aᵀ dY."""
    left: float = ELEMENT_BYTES * spec.b * spec.m * spec.k
    right: float = ELEMENT_BYTES * spec.b * spec.k * spec.n
    out: float = ELEMENT_BYTES * spec.b * spec.m * spec.n
    kinds, ends = ("gemm-input-gradient", "gemm-weight-gradient"), ("x", "w")
    if spec.kind == "batched-gemm":  # two activations; several heads may share the right one
        kinds, ends = ("batched-gemm-gradient", "batched-gemm-gradient"), ("left", "right")
        right, out = spec.read_bytes - left, spec.write_bytes
    weights: tuple[int, ...] = ()
    if spec.packed_bytes:
        weights = (add(restored_weights(f"d-{spec.name}+dequantise", spec.b * spec.k, spec.n)),)
    of_left = changed(
        spec,
        name=f"d-{spec.name}-{ends[0]}",
        kind=kinds[0],
        unit="TC",
        epilogue=0,
        inputs=(*upstream, *weights),
        n=spec.k,
        k=spec.n,
        read_bytes=out + right,
        write_bytes=left,
    )
    of_right = changed(
        of_left,
        name=f"d-{spec.name}-{ends[1]}",
        kind=kinds[1],
        inputs=(*upstream, *gathered),
        m=spec.k,
        n=spec.n,
        k=spec.m,
        read_bytes=left + out,
        write_bytes=right,
    )
    slots = [(0, add(changed(of_left, virtual=True) if spec.of_data else of_left))]
    if not spec.frozen:
        slots.append((1, add(of_right)))
    return slots if spec.kind == "batched-gemm" else slots[:1]


# ---- memory of the backward pass ----


_OWN_OUTPUT = frozenset({"attention", "softmax", "dropout", "norm"})
"""Kinds whose gradient reads the output of the forward pass."""


def _base(name: str) -> str:
    """Return the name of the forward operator that a backward one belongs to."""
    base = name.removeprefix("d-")
    for end in ("-x", "-w", "-left", "-right"):
        base = base.removesuffix(end)
    return base


def _last_uses(forward: OpGraph, backward: OpGraph) -> dict[str, int]:
    """Position of the last backward operator that reads the output of each forward operator."""
    gradient_of: dict[str, int] = {}
    for i, name in enumerate(backward.names):
        gradient_of[_base(name)] = max(i, gradient_of.get(_base(name), -1))
    fed = [False] * len(forward)
    last_uses: dict[str, int] = {}
    for source, reader in forward.edges():
        fed[reader] = True
        name, use = forward.names[source], gradient_of.get(forward.names[reader], -1)
        last_uses[name] = max(last_uses.get(name, -1), use)
    kinds = np.atleast_2d(forward.ops["kind"])[0].tolist()
    for kind, name in zip(kinds, forward.names, strict=True):
        if KINDS[kind] in _OWN_OUTPUT:
            last_uses[name] = max(last_uses.get(name, -1), gradient_of.get(name, -1))
    return last_uses


def _last_readers(backward: OpGraph) -> dict[int, int]:
    """Position of the last operator that reads the output of each operator.

    Sums of gradients are in place: their inputs live until the sum is read.
    """
    readers: dict[int, int] = {}
    for source, reader in sorted(backward.edges(), key=lambda edge: -edge[0]):
        end = readers.get(reader, reader) if backward.names[reader].endswith(SUM) else reader
        readers[source] = max(end, readers.get(source, -1))
    return readers


def backward_work_bytes(forward: OpGraph, backward: OpGraph) -> Any:
    """Return the peak bytes of a layer's backward pass beyond the tensors its forward pass stored.

    For a family (see `opgraph.family`), an array with one number per member.

    Operators run in graph order. Each writes the gradients of its inputs; these and stored
    tensors are freed after the last operator that reads them. Gradients of weights do not count.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.opgraph import layer_graph
    >>> block = layer_graph(models.load("llama2-7b").replace(seq=1024)).layers[1]
    >>> float(backward_work_bytes(block.forward, block.backward) / (2 * 1024 * 11008))
    2.0
    """
    uses = _last_uses(forward, backward)
    # Bytes of stored tensors that are freed after each operator.
    freed: dict[int, Any] = {}
    for tensor in forward.tensors:
        if tensor.producer != "input":
            end = uses.get(tensor.producer, len(backward) - 1)
            freed[end] = freed.get(end, 0.0) + tensor.bytes
    readers = _last_readers(backward)
    written, sent = backward.ops["write_bytes"], backward.ops["payload_bytes"]
    sizes = np.where(written != 0.0, written, sent).T
    members = np.broadcast_shapes(sizes.shape[1:], *map(np.shape, freed.values()))
    changes = np.zeros((len(backward), 2, *members))  # bytes that each operator adds, then frees
    for i, name in enumerate(backward.names):
        if not name.endswith(("-w", SUM)):
            changes[i, 0] = sizes[i]
            if i in readers:
                changes[readers[i], 1] -= sizes[i]
    for end, size in freed.items():
        if end >= 0:
            changes[end, 1] -= size
    held = np.add.accumulate(changes.reshape(-1, *members))[::2]
    return held.max(axis=0, initial=0.0)
