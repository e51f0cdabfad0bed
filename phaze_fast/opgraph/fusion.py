"""Element-wise operators of a layer, fused onto its matrix products.

An element-wise operator is fused where the product it follows has no other consumer: it then works
on the product's tile before that is written. A collective in between prevents it.
"""

from __future__ import annotations

from dataclasses import replace

from phaze_fast.opgraph.builder import OperatorSpec, Tensor

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


def fuse(
    specs: list[OperatorSpec], tensors: tuple[Tensor, ...]
) -> tuple[list[OperatorSpec], tuple[Tensor, ...]]:
    """Fuse what can be fused; kept tensors follow the operator that now makes them."""
    consumers: dict[int, int] = {}
    for spec in specs:
        for source in set(spec.inputs):
            consumers[source] = consumers.get(source, 0) + 1
    made = list(specs)
    stands_for: dict[int, int] = {}  # a fused operator -> the product it became part of
    renamed: dict[str, str] = {}
    for i, spec in enumerate(specs):
        inputs = tuple(stands_for.get(source, source) for source in spec.inputs)
        made[i] = replace(spec, inputs=inputs)
        host = inputs[0]
        original = spec.inputs[0]
        if host < 0 or spec.virtual or spec.kind not in _EPILOGUES:
            continue
        if made[host].kind not in _PRODUCTS or consumers[original] != 1:
            continue
        others = tuple(source for source in inputs[1:] if source != host)
        if any(source > host for source in others):
            continue  # its other operand is not there yet when the product runs
        made[host] = _with_epilogue(made[host], spec, others)
        made[i] = replace(made[i], virtual=True, inputs=(host,))
        stands_for[i] = host
        renamed[spec.name] = made[host].name
    kept = tuple(replace(t, producer=renamed.get(t.producer, t.producer)) for t in tensors)
    return made, kept


def _with_epilogue(
    product: OperatorSpec, epilogue: OperatorSpec, others: tuple[int, ...]
) -> OperatorSpec:
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
