"""The operators of a layer whose products with weights run in a format of fewer bits.

Each tensor that such products read is cast once, in one kernel that also writes the transpose where
a product of the backward pass reads it; a gather of it comes after the cast and moves the smaller
format. Outputs, attention and everything element-wise stay in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from phaze_fast.opgraph.builder import ELEMENT_BYTES, OperatorSpec, Tensor
from phaze_fast.software import Precision

__all__ = ["quantised", "quantised_tensors"]

_PRODUCT_OF_KIND = {
    "gemm": "forward",
    "gemm-input-gradient": "input-gradient",
    "gemm-weight-gradient": "weight-gradient",
}
_WHOLE = ("router", "shared-router")  # whose products stay in bf16


def _is_low(spec: OperatorSpec, precision: Precision) -> bool:
    name = spec.name.removeprefix("d-").removesuffix("-x").removesuffix("-w")
    return _PRODUCT_OF_KIND.get(spec.kind) in precision.products and name not in _WHOLE


def _arriving(spec: OperatorSpec) -> tuple[int, float]:
    """Slot of the input that is cast for a product, and its elements; slot -1 where there is none.

    A forward product reads its input, a gradient of an input the arriving gradient. A gradient of
    weights reads both as they were cast before.
    """
    if spec.kind == "gemm-weight-gradient":
        return -1, 0.0
    return 0, float(spec.b * spec.m * spec.k)


def _cast(
    source: OperatorSpec | None, at: int, elements: float, precision: Precision
) -> OperatorSpec:
    name = "input" if source is None else source.name
    return OperatorSpec(
        f"{name}-cast",
        "multiply",
        "VC",
        (at,),
        m=max(1, int(elements)),
        n=1,
        read_bytes=ELEMENT_BYTES * (1.0 + precision.amax_reads) * elements,
        write_bytes=precision.copies * precision.element_bytes * elements,
        function="copy",
    )


def quantised(
    specs: Sequence[OperatorSpec], precision: Precision, widths: int = 1
) -> list[OperatorSpec]:
    """Give the operators of a pass with products in a precision's format and the casts before them.

    Parameters
    ----------
    specs
        Of a forward or a backward pass, in topological order.
    precision
        What runs in which format.
    widths
        Devices over which a gather joins shares of rows.
    """
    low = [_is_low(spec, precision) for spec in specs]
    readers: dict[int, list[int]] = {}
    for i, spec in enumerate(specs):
        for source in spec.inputs:
            readers.setdefault(source, []).append(i)
    small = {  # gathers of nothing but operands of such products
        i
        for i, spec in enumerate(specs)
        if precision.gathers
        and spec.collective == "all-gather"
        and not spec.virtual
        and all(low[reader] for reader in readers.get(i, ()))
        and readers.get(i)
    }
    made: list[OperatorSpec] = []
    place: dict[int, int] = {-1: -1}  # of an operator among those made
    casts: dict[int, int] = {}  # of what an operator makes
    for i, spec in enumerate(specs):
        own = replace(spec, inputs=tuple(place[source] for source in spec.inputs))
        slot, elements = _arriving(spec) if low[i] else (-1, 0.0)
        if i in small:
            slot, elements = 0, spec.payload_bytes / ELEMENT_BYTES / widths
            own = replace(own, payload_bytes=spec.payload_bytes * precision.element_bytes / 2.0)
        source = spec.inputs[slot] if slot >= 0 else -1
        again = spec.name.endswith("-again")  # it was cast in the forward pass
        fused = source >= 0 and specs[source].kind in precision.fused_casts
        if slot >= 0 and source not in small and not fused and not again:
            if source not in casts:
                maker = specs[source] if source >= 0 else None
                made.append(_cast(maker, place[source], elements, precision))
                casts[source] = len(made) - 1
            own = replace(own, inputs=tuple(casts.get(s, place[s]) for s in spec.inputs))
        if low[i]:
            own = replace(own, format=precision.format)
        made.append(own)
        place[i] = len(made) - 1
    return made


def quantised_tensors(tensors: Sequence[Tensor], precision: Precision) -> tuple[Tensor, ...]:
    """Give what the forward pass keeps where gradients of weights read inputs as they were cast."""
    if "weight-gradient" not in precision.products:
        return tuple(tensors)
    share = precision.element_bytes / ELEMENT_BYTES
    kept: list[Tensor] = []
    for tensor in tensors:
        if tensor.operand == "only":
            kept.append(replace(tensor, bytes=int(tensor.bytes * share)))
        else:
            kept.append(tensor)
        if tensor.operand == "also":
            copy = replace(tensor, name=f"{tensor.name}-cast", bytes=int(tensor.bytes * share))
            kept.append(copy)
    return tuple(kept)
