"""The layers of a traced model as one device runs them, with tensor-parallel collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from phaze_fast.models import WIDE, GraphLayer, GraphOperator, held_bytes
from phaze_fast.opgraph.builder import ELEMENT_BYTES, OperatorSpec, Tensor
from phaze_fast.opgraph.graph import AGAIN
from phaze_fast.opgraph.strategy import Strategy

_GRADIENTS = ("gemm-input-gradient", "gemm-weight-gradient")


def rows_shared(layer: GraphLayer) -> bool:
    """Whether rows can be split outside of tensor-parallel regions: all operators are row-wise."""
    outside = {op.kind for op in layer.forward if op.split == "no"}
    return not outside & {"attention", "batched-gemm"}


def _cut(spec: OperatorSpec, dim: str, width: int) -> OperatorSpec:
    """Divide one dimension of an operator by `width`."""
    size: Any = {dim: max(getattr(spec, dim) // width, 1)}
    return replace(spec, **size)


def _less(spec: OperatorSpec, dim: str, width: int) -> OperatorSpec:
    """Divide one dimension of a product, and recompute its bytes."""
    cut = _cut(spec, dim, width)
    return replace(
        cut,
        flops=spec.flops / width,
        read_bytes=ELEMENT_BYTES * cut.b * (cut.m * cut.k + cut.k * cut.n),
        write_bytes=ELEMENT_BYTES * cut.b * cut.m * cut.n,
    )


def _part(spec: OperatorSpec, width: int) -> OperatorSpec:
    """Divide the elements of an operator by `width`, along any dimension that allows it."""
    dim = "b" if spec.b % width == 0 else "n" if spec.n % width == 0 else "m"
    cut = _cut(spec, dim, width)
    return replace(
        cut,
        flops=spec.flops / width,
        read_bytes=spec.read_bytes / width,
        write_bytes=spec.write_bytes / width,
    )


def _rows(op: GraphOperator, spec: OperatorSpec, width: int) -> OperatorSpec:
    """Divide the rows of an operator by `width`, where possible."""
    if op.scales not in ("m", "k") or getattr(spec, op.scales) % width:
        return spec
    if spec.flops:
        return _less(spec, op.scales, width)
    return replace(
        spec,
        m=spec.m // width if op.scales == "m" else spec.m,
        read_bytes=spec.read_bytes / width,
        write_bytes=spec.write_bytes / width,
    )


def _shared(
    op: GraphOperator, spec: OperatorSpec, role: str, of: GraphOperator, width: int, rows: bool
) -> OperatorSpec:
    """Return the share of a forward or backward operator that one of `width` devices runs."""
    if role == "no":
        return _rows(op, spec, width) if rows else spec
    if role == "inside":
        return _part(spec, width)
    if op.kind == "embedding":
        return spec
    if op.kind == "gemm":
        return _less(spec, "k" if role == "rows" else "n", width)
    if op.kind not in _GRADIENTS:
        return spec if role == "rows" else _part(spec, width)
    if op.kind == "gemm-input-gradient":
        return _less(spec, "n" if role == "rows" else "k", width)
    wanted = of.k if role == "rows" else of.n
    return _less(spec, "m" if op.m == wanted else "n", width)


def _collective(name: str, kind: str, inputs: tuple[int, ...], payload: float) -> OperatorSpec:
    return OperatorSpec(
        name,
        "collective",
        "NET",
        inputs,
        payload_bytes=payload,
        collective=kind,
        group="tensor",
    )


def _moved(inputs: tuple[int, ...], place: dict[int, int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(place.get(source, -1) for source in inputs))


def forward_specs(
    layer: GraphLayer, whole: list[OperatorSpec], width: int, rows: bool
) -> list[OperatorSpec]:
    """Operators of the forward pass on one of `width` devices."""
    specs: list[OperatorSpec] = []
    place: dict[int, int] = {}
    gathered: dict[tuple[int, ...], int] = {}
    for at, (op, spec) in enumerate(zip(layer.forward, whole, strict=True)):
        inputs = _moved(op.inputs, place)
        if rows and (op.split == "columns" or (op.split == "vocabulary" and op.kind == "gemm")):
            if op.inputs not in gathered:
                size = float(ELEMENT_BYTES * spec.b * spec.m * spec.k)
                specs.append(_collective(f"{op.name}-gather", "all-gather", inputs, size))
                gathered[op.inputs] = len(specs) - 1
            inputs = (gathered[op.inputs],)
        specs.append(replace(_shared(op, spec, op.split, op, width, rows), inputs=inputs))
        place[at] = len(specs) - 1
        summed = op.split == "rows" or (op.split == "vocabulary" and op.kind == "embedding")
        if summed:
            kind = "reduce-scatter" if rows else "all-reduce"
            specs.append(_collective(f"{op.name}-sum", kind, (place[at],), spec.write_bytes))
            place[at] = len(specs) - 1
        elif op.kind == "softmax" and op.split == "inside" and _is_loss(layer):
            sums = 3.0 * 4.0 * spec.m  # maximum, target and sum of each row
            specs.append(_collective(f"{op.name}-reduce", "all-reduce", (place[at],), sums))
            place[at] = len(specs) - 1
    return specs


def _is_loss(layer: GraphLayer) -> bool:
    return any(op.split == "vocabulary" and op.kind == "gemm" for op in layer.forward)


def _enters(op: GraphOperator, of: GraphOperator) -> bool:
    """Whether an operator is the gradient of an input of a tensor-parallel region."""
    split = of.split == "columns" or (of.split == "vocabulary" and of.kind == "gemm")
    return op.kind == "gemm-input-gradient" and split


def backward_specs(
    layer: GraphLayer, whole: list[OperatorSpec], width: int, rows: bool, samples: int
) -> list[OperatorSpec]:
    """Operators of the backward pass on one of `width` devices."""
    specs: list[OperatorSpec] = []
    place: dict[int, int] = {}
    fed: set[int] = set()
    left: dict[tuple[int, ...], list[int]] = {}
    for at, op in enumerate(layer.backward):
        of = layer.forward[op.forward]
        if op.forward >= 0 and _enters(op, of):
            left.setdefault(of.inputs, []).append(at)
    for at, (op, spec) in enumerate(zip(layer.backward, whole, strict=True)):
        of = layer.forward[op.forward]
        role = of.split if op.forward >= 0 else "no"
        inputs = _moved(op.inputs, place)
        summed = role == "rows" or (role == "vocabulary" and of.kind == "embedding")
        if rows and summed and op.forward not in fed:  # the gradient of a reduce-scatter
            fed.add(op.forward)
            size = float(samples * ELEMENT_BYTES * of.b * of.m * of.n)
            specs.append(_collective(f"{op.name}-gather", "all-gather", inputs, size))
            inputs = (len(specs) - 1,)
        specs.append(replace(_shared(op, spec, role, of, width, rows), inputs=inputs))
        place[at] = len(specs) - 1
        if op.forward >= 0 and _enters(op, of) and left[of.inputs][-1] == at:
            sources = tuple(place[one] for one in left[of.inputs])
            size = float(ELEMENT_BYTES * spec.b * spec.m * spec.n)
            if rows:  # weight gradients need the gathered input once more
                specs.append(_collective(f"{op.name}{AGAIN}", "all-gather", (-1,), size))
            kind = "reduce-scatter" if rows else "all-reduce"
            specs.append(_collective(f"{op.name}-sum", kind, sources, size))
            place |= dict.fromkeys(left[of.inputs], len(specs) - 1)
    return specs


def device_parameters(layer: GraphLayer, width: int) -> tuple[int, int]:
    """Parameters of a layer that one of `width` devices holds, and the frozen ones of them."""
    total, frozen = layer.parameters, layer.frozen_parameters
    for op in layer.forward:
        shared = op.weights
        if op.split == "rows":
            shared = min(op.weights, op.b * op.k * op.n)  # the bias is not split
        if op.split in ("columns", "rows", "vocabulary"):
            total -= shared - -(-shared // width)
            unused = min(shared, op.frozen)
            frozen -= unused - -(-unused // width)
    return total, frozen


def device_matrices(layer: GraphLayer, width: int) -> tuple[tuple[int, int, int], ...]:
    """Trained matrices that one of `width` devices holds: how many, rows and columns."""
    matrices = []
    for op in layer.forward:
        rows, columns = op.k, op.n
        if op.kind == "embedding" and op.n:
            rows = op.weights // op.n
        if op.frozen or op.weights < op.b * rows * columns or not rows * columns:
            continue
        if op.kind not in ("gemm", "embedding"):
            continue
        if op.split == "rows" or (op.split == "vocabulary" and op.kind == "embedding"):
            rows = -(-rows // width)
        elif op.split in ("columns", "vocabulary"):
            columns = -(-columns // width)
        matrices.append((op.b, rows, columns))
    return tuple(matrices)


def operator_spec(op: GraphOperator, samples: int) -> OperatorSpec:
    """Return one operator for a number of samples."""
    grown = {name: samples if name == op.scales else 1 for name in "bmnk"}
    product = "gemm" in op.kind
    b, m, n, k = (getattr(op, name) * grown[name] for name in "bmnk")
    if op.function == WIDE:  # a vector operator with a row for each element of the result
        product, m, n, k = False, m * n, k, 0
    unit = "TC" if product else "TC+VC" if op.kind.startswith("attention") else "VC"
    return OperatorSpec(
        op.name,
        op.kind,
        "TC+VC" if product and (op.bias or op.function) else unit,
        op.inputs,
        b=b,
        m=m,
        n=n,
        k=k,
        flops=op.flops * samples,
        read_bytes=op.fixed_read_bytes + op.read_bytes * samples,
        write_bytes=op.fixed_write_bytes + op.write_bytes * samples,
        causal=op.causal,
        epilogue=int(product and op.bias),
        function=op.function,
    )


def _operand(layer: GraphLayer, producer: int) -> Literal["", "only", "also"]:
    """Return which operators read an output, as `Tensor.operand` has it."""
    products = [op.kind == "gemm" for op in layer.forward if producer in op.inputs]
    if not any(products) or producer < 0:
        return ""
    return "only" if all(products) else "also"


@dataclass(frozen=True)
class DevicePeak:
    """An instant at which a traced layer has the most memory allocated on one device."""

    operator: str
    """Name of the operator that runs at the peak."""
    backward: bool
    """Whether the operator belongs to the backward pass."""
    bytes: float
    """Bytes allocated by the layer: tensors kept for the backward pass, temporaries, gradients."""
    gradient_bytes: float
    """The part of `bytes` in gradients of the layer's parameters."""
    tensors: tuple[tuple[str, float], ...]
    """The allocated tensors, largest first: the operator that wrote each, and its bytes."""


def traced_peaks(layer: GraphLayer, strategy: Strategy) -> tuple[DevicePeak, ...]:
    """Return the peaks of a traced layer on one device."""
    samples, width = strategy.micro_batch, strategy.tp
    rows = width > 1 and strategy.sequence_parallel and rows_shared(layer)
    peaks = []
    for peak in layer.peaks:
        absent = frozenset(peak.absent)
        kept = [tensor for at, tensor in enumerate(layer.saved) if at not in absent]
        sizes = [(x.name.rpartition("#")[0], held_bytes(x, samples, width, rows)) for x in kept]
        temporary = [held_bytes(x, samples, width, rows) for x in peak.tensors]
        own = list(zip(peak.tensors, temporary, strict=True))
        sizes += [(x.name, size) for x, size in own]
        gradients = sum(size for x, size in own if x.gradient)
        whole = sum(size for _, size in sizes)
        largest = tuple(sorted(sizes, key=lambda pair: -pair[1]))
        peaks.append(DevicePeak(peak.operator, peak.backward, whole, gradients, largest))
    return tuple(peaks)


def _stored_input(layer: GraphLayer, tensors: tuple[Tensor, ...], samples: float) -> list[Tensor]:
    """Return a layer's input, stored if its reader is recomputed: at most the others' bytes."""
    reader = next((op.name for op in layer.forward if -1 in op.inputs), "")
    most = sum(tensor.bytes for tensor in tensors if tensor.producer != "input")
    size = min(int(layer.input_bytes * samples), most)
    return [Tensor("input", size, "input", instead_of=reader)] if size and reader else []


def traced_passes(
    layer: GraphLayer, strategy: Strategy
) -> tuple[list[OperatorSpec], list[OperatorSpec], tuple[Tensor, ...]]:
    """Return the operators of both passes of a traced layer on one device, and stored tensors."""
    samples, width = strategy.micro_batch, strategy.tp
    rows = width > 1 and strategy.sequence_parallel and rows_shared(layer)
    forward = [operator_spec(op, samples) for op in layer.forward]
    backward = [operator_spec(op, samples) for op in layer.backward]
    if width > 1:
        forward = forward_specs(layer, forward, width, rows)
        backward = backward_specs(layer, backward, width, rows, samples)
    saved_tensors = tuple(
        Tensor(
            tensor.name,
            int(held_bytes(tensor, samples, width, rows)),
            "input" if tensor.producer < 0 else layer.forward[tensor.producer].name,
            operand=_operand(layer, tensor.producer),
        )
        for tensor in layer.saved
    )
    shared = samples if not rows else samples / width
    return forward, backward, (*saved_tensors, *_stored_input(layer, saved_tensors, shared))
