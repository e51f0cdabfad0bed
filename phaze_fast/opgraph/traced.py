"""Forward operator graphs of each kind of a traced model's layers."""

from __future__ import annotations

from dataclasses import replace

from phaze_fast.models import TracedModel
from phaze_fast.models.traced import TracedLayer, TracedOp
from phaze_fast.opgraph.builder import ELEMENT_BYTES, LayerBuilder, OperatorSpec
from phaze_fast.opgraph.graph import OpGraph, lay_out

__all__ = ["from_traced"]


def _attention(op: TracedOp) -> OperatorSpec:
    queries, keys = op.b * op.m * op.k, op.b * op.n * op.k
    values = op.b * op.n * (op.elements // (op.b * op.m))
    return OperatorSpec(
        op.name,
        "attention",
        "TC+VC",
        op.inputs,
        b=op.b,
        m=op.m,
        n=op.n,
        k=op.k,
        flops=op.flops,
        read_bytes=ELEMENT_BYTES * (queries + keys + values),
        write_bytes=ELEMENT_BYTES * op.elements,
    )


def _write(builder: LayerBuilder, op: TracedOp) -> None:
    """Add one operator."""
    first, last = op.inputs[0], op.inputs[-1]
    if op.kind == "gemm":
        bias = op.weight_elements > op.b * op.k * op.n
        if op.b == 1:
            builder.linear(op.name, first, op.m, op.k, op.n, bias)
        else:
            builder.grouped_linear(op.name, first, op.b, op.m, op.k, op.n)
        builder.specs[-1] = replace(builder.specs[-1], inputs=op.inputs)
    elif op.kind == "batched-gemm":
        builder.product(op.name, first, last, op.b, op.m, op.k, op.n)
        if len(op.inputs) > 2:  # a third array is added to the product
            builder.specs[-1] = replace(builder.specs[-1], inputs=op.inputs)
    elif op.kind == "attention":
        builder.custom(_attention(op))
    else:
        kind = "multiply" if op.kind == "elementwise" else op.kind
        builder.vector(op.name, kind, op.inputs, op.m, op.n, reads=len(op.inputs))


def _builder(model: str, layer: TracedLayer) -> LayerBuilder:
    builder = LayerBuilder(f"{model}/{layer.name}")
    for op in layer.ops:
        _write(builder, op)
    return builder


def from_traced(traced: TracedModel) -> tuple[OpGraph, ...]:
    """Lay out the operators of a traced model, in bf16, on one device.

    Parameters
    ----------
    traced
        From `models.from_torch`.

    Returns
    -------
    tuple of OpGraph
        Forward graphs, one per entry of ``traced.layers``. An elementwise operator is of the kind
        ``multiply``; a product that adds a bias works on both units.

    Examples
    --------
    >>> from phaze_fast.models.traced import TracedLayer, TracedModel, TracedOp
    >>> fc = TracedOp("fc", "gemm", (-1,), 1, 4, 8, 8, 32, 512.0, 64)
    >>> act = TracedOp("act", "activation", (0,), 1, 4, 0, 8, 32, 0.0, 0)
    >>> model = TracedModel("mlp", (TracedLayer("0", 1, (fc, act)),), (0,), (), 64)
    >>> (graph,) = from_traced(model)
    >>> graph.names, graph.edges(), graph.flops
    (('fc', 'act'), [(0, 1)], 512.0)
    """
    builders = [_builder(traced.name, layer) for layer in traced.layers]
    return tuple(lay_out(f"{builder.name}/forward", builder.specs, ()) for builder in builders)
