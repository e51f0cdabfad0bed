"""The layers of a model: each kind once, with a count and its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.block import block_builder
from phaze_fast.opgraph.builder import LayerBuilder
from phaze_fast.opgraph.ends import embedding_builder, head_builder
from phaze_fast.opgraph.fusion import fuse
from phaze_fast.opgraph.gradients import gradients
from phaze_fast.opgraph.graph import OpGraph, lay_out
from phaze_fast.opgraph.strategy import Strategy, shapes

__all__ = ["Layer", "LayerGraph", "build_op_graphs", "layer_graph"]


@dataclass(frozen=True)
class Layer:
    """One kind of layer: its graphs, and how often it stands in the model."""

    kind: str
    count: int
    forward: OpGraph
    backward: OpGraph
    parameters: int
    """Of one such layer, over all devices."""
    device_parameters: int
    """Of one such layer that one device holds; norms and row-wise biases are on every one."""
    expert_parameters: int = 0
    """Of those, the experts', which expert-parallel devices share out: each is on one of them."""


@dataclass(frozen=True)
class LayerGraph:
    """The layers of a model under one strategy.

    `order` lists positions in `layers` as the data passes them; `edges` are pairs of positions in
    that order, a chain but for an encoder whose output enters every decoder block.
    """

    model: TransformerModel
    strategy: Strategy
    layers: tuple[Layer, ...]
    order: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def flops(self) -> float:
        """FLOPs of one micro-batch, forward and backward, on one device."""
        return sum(
            layer.count * (layer.forward.flops + layer.backward.flops) for layer in self.layers
        )

    @property
    def is_chain(self) -> bool:
        """Whether every layer feeds only the next."""
        return all(b == a + 1 for a, b in self.edges)


def _attention_share(model: TransformerModel, strategy: Strategy) -> int:
    """Attention parameters of one device, its norm not counted."""
    s = shapes(model, strategy)
    columns = s.query_width + 2 * s.kv_width
    out = s.query_width * model.hidden + model.out_bias * model.hidden
    return columns * model.hidden + model.qkv_bias * columns + out


def _ffn_share(model: TransformerModel, width: int) -> int:
    """Feed-forward parameters of one device that holds `width` columns."""
    inward = 2 if model.gated else 1
    biases = model.ffn_bias * (inward * width + model.hidden)
    return (inward + 1) * model.hidden * width + biases


def _shares(model: TransformerModel, strategy: Strategy) -> dict[str, int]:
    """Parameters that one device holds of one layer of each kind."""
    s, t = shapes(model, strategy), strategy.tensor_parallel
    norm, attention = model.norm_parameters, _attention_share(model, strategy)
    dense = 2 * norm + attention + _ffn_share(model, s.ffn)
    parts = model.parameters_by_part()
    tables = parts["embedding"] - model.vocab * model.hidden  # positions, types, norm, patches
    stacks = 2 if model.encoder_layers else 1
    ends = stacks * (model.final_norm * norm + (model.relative_buckets or 0) * model.heads // t)
    head = parts.get("head", 0)
    split = 0 if model.tied_embeddings or model.head in ("none", "classifier") else model.vocab
    if model.head == "mlm":
        head += s.vocab - model.vocab  # the bias of the logits is split with them
    head += (s.vocab - model.vocab) * model.hidden if split else 0
    shares = {
        "embedding": tables + s.vocab * model.hidden,
        "block": dense,
        "encoder-block": dense,
        "decoder-block": dense + attention + norm,
        "head": ends + head,
    }
    if model.moe is not None:
        moe = model.moe
        local = moe.experts // strategy.expert_parallel + moe.shared_experts
        experts = local * _ffn_share(model, moe.expert_ffn // t)
        shares["moe-block"] = 2 * norm + attention + model.hidden * moe.experts + experts
    return shares


def _experts(model: TransformerModel, strategy: Strategy, kind: str) -> int:
    """Parameters of routed experts that one device holds of one layer of a kind."""
    if kind != "moe-block" or model.moe is None:
        return 0
    local = model.moe.experts // strategy.expert_parallel
    return local * _ffn_share(model, model.moe.expert_ffn // strategy.tensor_parallel)


def _builders(
    model: TransformerModel, strategy: Strategy
) -> list[tuple[str, int, int, LayerBuilder]]:
    """(kind, count, parameters of one, builder) of each kind, in the order data passes them."""
    parts = model.parameters_by_part()
    norms, attention = 2 * model.norm_parameters, model.attention_parameters
    relative = (model.relative_buckets or 0) * model.heads
    final = model.norm_parameters if model.final_norm else 0
    found = [("embedding", 1, parts["embedding"], embedding_builder(model, strategy))]
    if model.encoder_layers:
        dense = norms + attention + model.ffn_parameters(model.ffn)
        cross = dense + attention + model.norm_parameters
        found += [
            (
                "encoder-block",
                model.encoder_layers,
                dense,
                block_builder(model, strategy, "encoder-block"),
            ),
            ("decoder-block", model.layers, cross, block_builder(model, strategy, "decoder-block")),
        ]
    else:
        dense_layers = model.layers - model.moe_layers
        if dense_layers:
            size = norms + attention + model.ffn_parameters(model.ffn)
            found.append(("block", dense_layers, size, block_builder(model, strategy, "block")))
        if model.moe_layers:
            size = norms + attention + model.moe_parameters
            found.append(
                ("moe-block", model.moe_layers, size, block_builder(model, strategy, "moe-block"))
            )
    # What belongs to a stack rather than to a block is counted with the head.
    stacks = 2 if model.encoder_layers else 1
    ends = parts.get("head", 0) + stacks * (final + relative)
    found.append(("head", 1, ends, head_builder(model, strategy)))
    return found


def _graphs(builder: LayerBuilder, fused: bool) -> tuple[OpGraph, OpGraph]:
    """Forward and backward graph of a layer."""
    forward, kept = builder.specs, tuple(builder.kept)
    backward = gradients(builder.specs)
    if fused:
        forward, kept = fuse(forward, kept)
        backward, _ = fuse(backward, ())
    return (
        lay_out(f"{builder.name}/forward", forward, kept),
        lay_out(f"{builder.name}/backward", backward, ()),
    )


def layer_graph(
    model: TransformerModel, strategy: Strategy | None = None, fused: bool = False
) -> LayerGraph:
    """Build the layers of a model as one device runs them.

    Parameters
    ----------
    model
        What is trained.
    strategy
        How a layer is split over devices; by default not at all.
    fused
        Whether element-wise operators are fused onto the matrix products they follow.

    Raises
    ------
    InfeasibleError
        Where the strategy breaks a rule of divisibility.

    Examples
    --------
    >>> from phaze_fast import models
    >>> graph = layer_graph(models.load("gpt3-175b"), Strategy(tensor_parallel=8))
    >>> [(layer.kind, layer.count) for layer in graph.layers]
    [('embedding', 1), ('block', 96), ('head', 1)]
    """
    strategy = Strategy() if strategy is None else strategy
    builders, shares = _builders(model, strategy), _shares(model, strategy)
    layers = tuple(
        Layer(
            kind,
            count,
            *_graphs(builder, fused),
            size,
            shares[kind],
            _experts(model, strategy, kind),
        )
        for kind, count, size, builder in builders
    )
    order = tuple(i for i, layer in enumerate(layers) for _ in range(layer.count))
    edges = [(i, i + 1) for i in range(len(order) - 1)]
    if model.encoder_layers:
        last = model.encoder_layers  # position of the last encoder block, after the embedding
        edges += [(last, last + j) for j in range(2, model.layers + 1)]
    return LayerGraph(model, strategy, layers, order, tuple(sorted(edges)))


def build_op_graphs(
    model: TransformerModel, strategies: Sequence[Strategy], fused: bool = False
) -> list[LayerGraph]:
    """Build the layers of a model under several strategies.

    Examples
    --------
    >>> from phaze_fast import models
    >>> widths = [Strategy(tensor_parallel=t) for t in (1, 2, 4, 8)]
    >>> len(build_op_graphs(models.load("llama2-7b"), widths))
    4
    """
    return [layer_graph(model, strategy, fused) for strategy in strategies]
