"""The layers of a model under a strategy: each kind once, with a count, parameters and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from phaze_fast.models import GraphModel, Model, TransformerModel, recognised
from phaze_fast.opgraph.block import block_builder, block_kinds, embedding_builder, head_builder
from phaze_fast.opgraph.builder import ELEMENT_BYTES, LayerBuilder, OperatorSpec
from phaze_fast.opgraph.gradients import backward_work_bytes, gradients
from phaze_fast.opgraph.graph import OpGraph, lay_out
from phaze_fast.opgraph.rewrites import fuse, quantised, quantised_tensors
from phaze_fast.opgraph.strategy import Strategy, shapes
from phaze_fast.opgraph.traced import traced_layers
from phaze_fast.software import Precision
from phaze_fast.tables import Brief

__all__ = [
    "Layer",
    "LayerGraph",
    "Share",
    "block_share",
    "build_op_graphs",
    "embedding_share",
    "head_share",
    "layer_graph",
]


@dataclass(frozen=True)
class Share:
    """Parameters of one layer."""

    whole: int
    """Over all devices."""
    device: int
    """That one device holds; norms and row-wise biases are on every one."""
    experts: int = 0
    """Of those, the routed experts', which expert-parallel devices share out."""


def _attention(model: TransformerModel, strategy: Strategy) -> int:
    """Attention parameters of one device, its norm not counted."""
    s, t = shapes(model, strategy), strategy.tp
    latent = model.latent
    if latent is not None:  # what is split by heads; the rest is whole on every device
        rank = latent.query_rank or model.hidden
        split = model.heads * (
            rank * latent.query_width
            + latent.kv_rank * (latent.plain_width + latent.value_width)
            + latent.value_width * model.hidden
            + model.sinks
        )
        return model.attention_parameters - split + split // t
    extra = model.out_bias * model.hidden + model.sinks * s.heads
    columns = s.query_width + 2 * s.kv_width
    norms = model.qk_norm_parameters
    if model.qk_norm == "width":
        norms = s.query_width + s.kv_width
    out = s.query_width * model.hidden
    return columns * model.hidden + model.qkv_bias * columns + out + norms + extra


def _ffn(model: TransformerModel, width: int) -> int:
    """Feed-forward parameters of one device that holds `width` columns."""
    inward = 2 if model.gated else 1
    biases = model.ffn_bias * (inward * width + model.hidden)
    return (inward + 1) * model.hidden * width + biases


def block_share(model: TransformerModel, strategy: Strategy, kind: str) -> Share:
    """Parameters of one block of a kind."""
    s, t = shapes(model, strategy), strategy.tp
    whole = model.block_norms * model.norm_parameters + model.attention_parameters
    device = model.block_norms * model.norm_parameters + _attention(model, strategy)
    if kind == "decoder-block":  # cross-attention and its norm
        whole += model.attention_parameters + model.norm_parameters
        device += _attention(model, strategy) + model.norm_parameters
    moe = model.moe
    if moe is None or not kind.endswith("moe-block"):
        return Share(whole + model.ffn_parameters(model.ffn), device + _ffn(model, s.ffn))
    local = moe.experts // strategy.ep
    experts = local * _ffn(model, moe.expert_ffn // strategy.expert_width)
    device += (model.hidden + moe.router_bias) * moe.experts + experts
    if moe.shared_width:
        device += _ffn(model, moe.shared_width // t) + moe.shared_gate * model.hidden
    return Share(whole + model.moe_parameters, device, experts)


def embedding_share(model: TransformerModel, strategy: Strategy) -> Share:
    """Parameters of the embedding, whose vocabulary devices share."""
    whole = model.parameters_by_part()["embedding"]
    vocab = shapes(model, strategy).vocab
    return Share(whole, whole + (vocab - model.vocab) * model.hidden)


def head_share(model: TransformerModel, strategy: Strategy) -> Share:
    """Parameters of the head, and with it of what belongs to a stack rather than to a block."""
    s, t = shapes(model, strategy), strategy.tp
    stacks = 2 if model.encoder_layers else 1
    norms = stacks * model.final_norm * model.norm_parameters
    relative = (model.relative_buckets or 0) * model.heads
    head = model.parameters_by_part().get("head", 0)
    device = head
    columns = s.vocab - model.vocab  # fewer than all of them
    if model.head == "mlm" or (model.head == "lm" and model.head_bias):
        device += columns  # the bias of the logits is split with them
    if not model.tied_embeddings and model.head in ("lm", "mlm"):
        device += columns * model.hidden
    return Share(norms + stacks * relative + head, norms + stacks * (relative // t) + device)


_ENDS = ("embedding", "head")


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
    copy_bytes: float = 0.0
    """Of its weights on one device in a smaller format, kept beside them."""
    cast_bytes: float = 0.0
    """That one device moves once a step to make those."""

    @cached_property
    def work_bytes(self) -> float:
        """Held at most in its backward pass beyond what its forward pass kept."""
        return backward_work_bytes(self.forward, self.backward)


@dataclass(frozen=True)
class LayerGraph(Brief):
    """The layers of a model under one strategy.

    `order` lists positions in `layers` as the data passes them; `edges` are pairs of positions in
    that order, a chain but for an encoder whose output enters every decoder block.
    """

    model: Model
    strategy: Strategy
    layers: tuple[Layer, ...]
    order: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    message_bytes: float
    """Between two stages for one micro-batch, one way, per device; the most of any border."""
    copied_parameters: int = 0
    """Of the embedding that the last stage copies, where logits are tied to it; of one device."""

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


def _builders(
    model: TransformerModel, strategy: Strategy
) -> tuple[list[tuple[str, Share, LayerBuilder]], list[str]]:
    """Each kind of layer with its parameters and builder, and the kinds in the order of data."""
    order = block_kinds(model, strategy.seq or model.seq)
    if model.encoder_layers:
        order = ["encoder-block"] * model.encoder_layers + ["decoder-block"] * model.layers
    embedding = embedding_builder(model, strategy)
    found = [("embedding", embedding_share(model, strategy), embedding)]
    for kind in dict.fromkeys(order):
        share = block_share(model, strategy, kind)
        found.append((kind, share, block_builder(model, strategy, kind)))
    found.append(("head", head_share(model, strategy), head_builder(model, strategy)))
    return found, ["embedding", *order, "head"]


def _added(backward: list[OperatorSpec], parameters: int, moved: int) -> list[OperatorSpec]:
    """Give what adds gradients of weights to those of earlier micro-batches; a third is written."""
    if not moved or not parameters:
        return []
    made = [i for i, spec in enumerate(backward) if spec.kind == "gemm-weight-gradient"]
    size = float(moved * parameters)
    return [
        OperatorSpec(
            "gradient-sums-w",  # in place, and it may wait as gradients of weights may
            "residual",
            "VC",
            tuple(made) or (len(backward) - 1,),
            m=parameters,
            n=1,
            read_bytes=size * 2.0 / 3.0,
            write_bytes=size / 3.0,
        )
    ]


def _copied(specs: list[OperatorSpec], parameters: int, moved: float) -> list[OperatorSpec]:
    """Give what lays out gathered weights, or gradients to be scattered, after all else."""
    if not moved or not parameters or not specs:
        return []
    read = tuple({source for spec in specs for source in spec.inputs})
    last = tuple(i for i in range(len(specs)) if i not in read)
    size = moved * parameters
    return [
        OperatorSpec(
            "shares-copy-w",
            "multiply",
            "VC",
            last,
            m=parameters,
            n=1,
            read_bytes=size / 2.0,
            write_bytes=size / 2.0,
            function="copy",
        )
    ]


def _graphs(
    builder: LayerBuilder,
    fused: bool,
    precision: Precision | None,
    strategy: Strategy,
    model: TransformerModel,
    parameters: int,
) -> tuple[OpGraph, OpGraph]:
    """Forward and backward graph of a layer with so many parameters on a device."""
    forward, kept, width = list(builder.specs), tuple(builder.kept), strategy.tp
    backward = gradients(builder.specs, model.gradient_sums)
    backward += _added(backward, parameters, model.added_gradient_bytes)
    backward += _copied(backward, parameters, model.copied_bytes[1])
    forward += _copied(forward, parameters, model.copied_bytes[0])
    if precision is not None:
        backward = quantised(backward, precision, width, forward)
        forward = quantised(forward, precision, width)
        kept = quantised_tensors(kept, precision)
    if fused:
        forward, kept = fuse(forward, kept)
        backward, _ = fuse(backward, ())
    return (
        lay_out(f"{builder.name}/forward", forward, kept),
        lay_out(f"{builder.name}/backward", backward, ()),
    )


def _copies(parameters: int, precision: Precision | None) -> tuple[float, float]:
    """Bytes of a layer's weights in a smaller format, and those moved to make them."""
    if precision is None:
        return 0.0, 0.0
    return parameters * precision.weight_copies, parameters * precision.weight_casts


def _traced_graph(model: GraphModel, strategy: Strategy, precision: Precision | None) -> LayerGraph:
    """Write the layers of a model that is given by its graph."""
    layers = tuple(
        Layer(
            own.layer.name,
            own.layer.count,
            own.forward,
            own.backward,
            own.layer.parameters,
            own.device_parameters,
            0,
            *_copies(own.device_parameters, None if own.layer.name in _ENDS else precision),
        )
        for own in traced_layers(model, strategy, precision)
    )
    sent = max(layer.output_bytes for layer in model.layers) * strategy.micro_batch
    share = strategy.tp if strategy.sequence_parallel else 1
    return LayerGraph(model, strategy, layers, model.order, model.edges, message_bytes=sent / share)


def layer_graph(
    model: Model,
    strategy: Strategy | None = None,
    fused: bool = False,
    precision: Precision | None = None,
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
    precision
        Number format of the blocks' products; by default bf16.

    Raises
    ------
    InfeasibleError
        Where the strategy breaks a rule of divisibility.

    Examples
    --------
    >>> from phaze_fast import models
    >>> graph = layer_graph(models.load("gpt3-175b"), Strategy(tp=8))
    >>> [(layer.kind, layer.count) for layer in graph.layers]
    [('embedding', 1), ('block', 96), ('head', 1)]
    """
    strategy = Strategy() if strategy is None else strategy
    low = precision if precision is not None and precision.low else None
    if isinstance(model, GraphModel):
        model = recognised(model) or model
    if isinstance(model, GraphModel):
        return _traced_graph(model, strategy, low)
    builders, kinds = _builders(model, strategy)
    layers = tuple(
        Layer(
            kind,
            kinds.count(kind),
            *_graphs(
                builder,
                fused,
                None if kind in _ENDS else low,
                strategy,
                model,
                share.device,
            ),
            share.whole,
            share.device,
            share.experts,
            *_copies(share.device, None if kind in _ENDS else low),
        )
        for kind, share, builder in builders
    )
    place = {layer.kind: at for at, layer in enumerate(layers)}
    order = tuple(place[kind] for kind in kinds)
    edges = [(i, i + 1) for i in range(len(order) - 1)]
    if model.encoder_layers:
        last = model.encoder_layers  # position of the last encoder block, after the embedding
        edges += [(last, last + j) for j in range(2, model.layers + 1)]
    s = shapes(model, strategy)
    tied = model.tied_embeddings and model.head in ("lm", "mlm")
    return LayerGraph(
        model,
        strategy,
        layers,
        order,
        tuple(sorted(edges)),
        message_bytes=float(ELEMENT_BYTES * s.split_rows * model.hidden),
        copied_parameters=s.vocab * model.hidden if tied else 0,
    )


def build_op_graphs(
    model: Model, strategies: Sequence[Strategy], fused: bool = False
) -> list[LayerGraph]:
    """Build the layers of a model under several strategies.

    Examples
    --------
    >>> from phaze_fast import models
    >>> widths = [Strategy(tp=t) for t in (1, 2, 4, 8)]
    >>> len(build_op_graphs(models.load("llama2-7b"), widths))
    4
    """
    return [layer_graph(model, strategy, fused) for strategy in strategies]
