"""The layers of a model that is given by its graph, as one device runs them."""

from __future__ import annotations

from typing import Literal

from phaze_fast.errors import InfeasibleError
from phaze_fast.models import GraphLayer, GraphModel, GraphOperator
from phaze_fast.opgraph.builder import OperatorSpec, Tensor
from phaze_fast.opgraph.graph import OpGraph, lay_out
from phaze_fast.opgraph.quantise import quantised, quantised_tensors
from phaze_fast.opgraph.strategy import Strategy, reasons
from phaze_fast.opgraph.traced_split import (
    backward_specs,
    device_parameters,
    forward_specs,
    rows_shared,
)
from phaze_fast.software import Precision

__all__ = ["TracedLayer", "traced_layers"]

_VECTOR = "VC"
_ENDS = ("embedding", "head")


def operator_spec(op: GraphOperator, samples: int) -> OperatorSpec:
    """Write one operator for so many samples."""
    sizes = {"b": op.b, "m": op.m, "n": op.n, "k": op.k}
    if op.scales != "none":
        sizes[op.scales] *= samples
    product = "gemm" in op.kind
    unit = "TC" if product else "TC+VC" if op.kind.startswith("attention") else _VECTOR
    return OperatorSpec(
        op.name,
        op.kind,
        "TC+VC" if product and op.bias else unit,
        op.inputs,
        b=sizes["b"],
        m=sizes["m"],
        n=sizes["n"],
        k=sizes["k"],
        flops=op.flops * samples,
        read_bytes=op.fixed_read_bytes + op.read_bytes * samples,
        write_bytes=op.fixed_write_bytes + op.write_bytes * samples,
        causal=op.causal,
        epilogue=int(product and op.bias),
        function=op.function,
    )


def _operand(layer: GraphLayer, producer: int) -> Literal["", "only", "also"]:
    """Whether products with weights read what an operator makes, and nothing else, or others."""
    products = [op.kind == "gemm" for op in layer.forward if producer in op.inputs]
    if not any(products) or producer < 0:
        return ""
    return "only" if all(products) else "also"


class TracedLayer:
    """One kind of layer of a graph under a strategy."""

    def __init__(
        self,
        model: GraphModel,
        layer: GraphLayer,
        strategy: Strategy,
        precision: Precision | None = None,
    ) -> None:
        self.layer, self.strategy = layer, strategy
        samples, width = strategy.micro_batch, strategy.tp
        rows = width > 1 and strategy.sequence_parallel and rows_shared(layer)
        forward = [operator_spec(op, samples) for op in layer.forward]
        backward = [operator_spec(op, samples) for op in layer.backward]
        if width > 1:
            forward = forward_specs(layer, forward, width, rows)
            backward = backward_specs(layer, backward, width, rows, samples)
        kept = tuple(
            Tensor(
                tensor.name,
                int(tensor.fixed_bytes + tensor.bytes * samples)
                // (width if tensor.split or rows else 1),
                "input" if tensor.producer < 0 else layer.forward[tensor.producer].name,
                operand=_operand(layer, tensor.producer),
            )
            for tensor in layer.saved
        )
        if precision is not None:
            backward = quantised(backward, precision, width, forward)
            forward = quantised(forward, precision, width)
            kept = quantised_tensors(kept, precision)
        title = f"{model.name}/{layer.name}"
        self.forward: OpGraph = lay_out(f"{title}/forward", forward, kept, in_order=True)
        self.backward: OpGraph = lay_out(f"{title}/backward", backward, (), in_order=True)
        self.device_parameters = device_parameters(layer, width)


def traced_layers(
    model: GraphModel, strategy: Strategy, precision: Precision | None = None
) -> list[TracedLayer]:
    """Write every kind of layer of a graph; products of the ends stay in bf16.

    Raises
    ------
    InfeasibleError
        Where the graph has no rule for the strategy.
    """
    broken = reasons(model, strategy)
    if broken:
        raise InfeasibleError(f"{model.name}: {broken[0]}")
    return [
        TracedLayer(model, layer, strategy, None if layer.name in _ENDS else precision)
        for layer in model.layers
    ]
