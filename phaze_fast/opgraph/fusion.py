"""Element-wise operators of a layer, fused onto its matrix products.

An element-wise operator is fused where the product it follows has no other consumer: it then works
on the product's tile before that is written. A collective in between prevents it.
"""

from __future__ import annotations

from dataclasses import replace

from phaze_fast.opgraph.sheet import Line, Tensor

__all__ = ["fuse"]

_PRODUCTS = frozenset({"gemm", "gemm-input-gradient", "batched-gemm"})
_EPILOGUES = frozenset(
    {
        "activation",
        "dropout",
        "multiply",
        "residual",
        "rotary",
        "activation-backward",
        "dropout-backward",
        "multiply-backward",
        "rotary-backward",
    }
)


def fuse(lines: list[Line], tensors: tuple[Tensor, ...]) -> tuple[list[Line], tuple[Tensor, ...]]:
    """Fuse what can be fused; kept tensors follow the operator that now makes them."""
    consumers: dict[int, int] = {}
    for line in lines:
        for source in set(line.inputs):
            consumers[source] = consumers.get(source, 0) + 1
    made = list(lines)
    stands_for: dict[int, int] = {}  # a fused line -> the product it became part of
    renamed: dict[str, str] = {}
    for i, line in enumerate(lines):
        inputs = tuple(stands_for.get(source, source) for source in line.inputs)
        made[i] = replace(line, inputs=inputs)
        host = inputs[0]
        original = line.inputs[0]
        if host < 0 or line.virtual or line.kind not in _EPILOGUES:
            continue
        if made[host].kind not in _PRODUCTS or consumers[original] != 1:
            continue
        others = tuple(source for source in inputs[1:] if source != host)
        if any(source > host for source in others):
            continue  # its other operand is not there yet when the product runs
        made[host] = _with_epilogue(made[host], line, others)
        made[i] = replace(made[i], virtual=True, inputs=(host,))
        stands_for[i] = host
        renamed[line.name] = made[host].name
    kept = tuple(replace(t, producer=renamed.get(t.producer, t.producer)) for t in tensors)
    return made, kept


def _with_epilogue(product: Line, epilogue: Line, others: tuple[int, ...]) -> Line:
    """Join an element-wise operator to a product: its result is not read back from memory."""
    extra = max(epilogue.read_bytes - product.write_bytes, 0.0)
    return replace(
        product,
        unit="TC+VC",
        epilogue=product.epilogue + 1,
        inputs=(*product.inputs, *others),
        read_bytes=product.read_bytes + extra,
        write_bytes=epilogue.write_bytes,
    )
