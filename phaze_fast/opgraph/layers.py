"""The layers of a model under a strategy: each kind once, with a count, parameters and graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np

from phaze_fast.caching import LruCache, as_one
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.models import GraphLayer, GraphModel, Model, TransformerModel, recognised
from phaze_fast.opgraph.block import block_kinds, embedding_builder, head_builder, written_block
from phaze_fast.opgraph.builder import (
    ELEMENT_BYTES,
    LayerBuilder,
    OperatorSpec,
    Tensor,
    vector_spec,
)
from phaze_fast.opgraph.family import apart, split_where_unlike
from phaze_fast.opgraph.gradients import backward_work_bytes, gradients
from phaze_fast.opgraph.graph import MemberGraph, OpGraph, lay_out
from phaze_fast.opgraph.rewrites import (
    ANY_FORM,
    Fusion,
    forms,
    fuse,
    quantised,
    quantised_tensors,
    recomputed_in_groups,
)
from phaze_fast.opgraph.strategy import Family, Strategy, reasons, shapes
from phaze_fast.opgraph.traced import (
    DevicePeak,
    device_matrices,
    device_parameters,
    traced_passes,
    traced_peaks,
)
from phaze_fast.records import changed
from phaze_fast.software import Precision
from phaze_fast.tables import Brief


@dataclass(frozen=True)
class Share:
    """Parameters of one layer."""

    parameters: int
    """Over all devices."""
    device_parameters: int
    """Parameters on one device; norms and row-wise biases are replicated on every device."""
    expert_parameters: int = 0
    """The part of `device_parameters` in routed experts, each on one expert-parallel device."""
    frozen_parameters: int = 0
    """The part of `device_parameters` that is not trained: no gradients, no optimiser state."""
    frozen_experts: int = 0
    """The part of `frozen_parameters` in routed experts."""
    packed_parameters: int = 0
    """The part of `frozen_parameters` that is stored in a smaller format."""
    packed_bytes: float = 0.0
    """Bytes of `packed_parameters`."""
    matrices: tuple[tuple[int, int, int], ...] = ()
    """Trained matrices on one device: (count, rows, columns) for each size."""

    def of_products(self, specs: Sequence[OperatorSpec], adapted: bool, whole: int) -> Share:
        """Add the matrices of products; where `adapted`, those of adapters to frozen parameters.

        `whole` are the adapters' parameters over all devices.
        """
        products = [spec for spec in specs if spec.kind == "gemm"]
        trained = [spec for spec in products if not spec.frozen]
        own = replace(self, matrices=tuple((spec.b, spec.k, spec.n) for spec in trained))
        if not adapted:
            return own
        sizes = {spec.name: spec.b * spec.k * spec.n for spec in trained}
        in_experts = sum(size for name, size in sizes.items() if name.startswith("expert-"))
        return replace(
            own,
            parameters=self.parameters + whole,
            device_parameters=self.device_parameters + sum(sizes.values()),
            expert_parameters=self.expert_parameters + in_experts,
            frozen_parameters=self.device_parameters,
            frozen_experts=self.expert_parameters,
            packed_parameters=sum(s.b * s.k * s.n for s in products if s.packed_bytes),
            packed_bytes=sum(spec.packed_bytes for spec in products),
        )


def _attention(model: TransformerModel, strategy: Strategy) -> int:
    """Attention parameters of one device, its norm not counted."""
    s, t = shapes(model, strategy), strategy.tp
    latent = model.latent
    if latent is not None:  # split by heads; the rest is replicated on every device
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
        return Share(whole + model.ffn_parameters(model.ffn), device + model.ffn_parameters(s.ffn))
    local = moe.experts // strategy.ep
    experts = local * model.ffn_parameters(moe.expert_ffn // strategy.expert_width)
    device += (model.hidden + moe.router_bias) * moe.experts + experts
    if moe.shared_width:
        device += model.ffn_parameters(moe.shared_width // t) + moe.shared_gate * model.hidden
    return Share(whole + model.moe_parameters, device, experts)


def embedding_share(model: TransformerModel, strategy: Strategy) -> Share:
    """Parameters of the embedding; devices split the vocabulary."""
    whole = model.parameters_by_part()["embedding"]
    vocab = shapes(model, strategy).vocab
    return Share(whole, whole + (vocab - model.vocab) * model.hidden)


def head_share(model: TransformerModel, strategy: Strategy) -> Share:
    """Parameters of the head, including the norms between the blocks and the head."""
    s, t = shapes(model, strategy), strategy.tp
    stacks = 2 if model.encoder_layers else 1
    norms = stacks * model.final_norm * model.norm_parameters
    relative = (model.relative_buckets or 0) * model.heads
    head = model.parameters_by_part().get("head", 0)
    further = Share(0, 0)
    if model.mtp_layers:
        more = model.mtp_layers * model.mtp_parameters(0)  # norms and projections
        block = block_share(model, strategy, block_kinds(model, model.seq)[-1])
        whole, device, experts = block.parameters, block.device_parameters, block.expert_parameters
        shares = [model.mtp_layers * count for count in (whole, device, experts)]
        further = Share(shares[0] + more, shares[1] + more, shares[2])
    device = head
    columns = s.vocab - model.vocab  # columns of this device minus all; at most zero
    if model.head == "mlm" or (model.head == "lm" and model.head_bias):
        device += columns  # the bias is split as the logits are
    if not model.tied_embeddings and model.head in ("lm", "mlm"):
        device += columns * model.hidden
    return Share(
        norms + stacks * relative + head + further.parameters,
        norms + stacks * (relative // t) + device + further.device_parameters,
        further.expert_parameters,
    )


_BOUNDARY_LAYERS = ("embedding", "head")


@dataclass(frozen=True, kw_only=True)
class Layer(Share):
    """One kind of layer: its parameters and graphs, and how often the model has it."""

    kind: str
    count: int
    forward: OpGraph
    backward: OpGraph
    copy_bytes: float = 0.0
    """Bytes of a copy of its weights in a smaller format, on one device."""
    cast_bytes: float = 0.0
    """Bytes that one device reads and writes once a step to make the copy of `copy_bytes`."""
    peaks: tuple[DevicePeak, ...] = ()
    """Memory peaks of a traced layer; if empty, the peak is estimated from the operators."""

    @property
    def family(self) -> tuple[Layer, int]:
        """The layer with the sizes of all members of its family, and its own place among these."""
        family: tuple[Layer, int] = vars(self).get("_family", (self, 0))
        return family

    @cached_property
    def work_bytes(self) -> float:
        """Peak memory of its backward pass in bytes, beyond the tensors its forward pass stored."""
        if self.peaks:
            return self.peak(resident_gradients=True).bytes - self.forward.stashed_bytes()
        return float(backward_work_bytes(self.forward, self.backward))

    def peak(self, resident_gradients: bool) -> DevicePeak:
        """Return the largest peak; resident gradients of the layer's parameters are not counted."""
        if resident_gradients:
            without = [replace(x, bytes=x.bytes - x.gradient_bytes) for x in self.peaks]
            return max(without, key=lambda one: one.bytes)
        return max(self.peaks, key=lambda one: one.bytes)

    def live_bytes(self, recompute: str, resident_gradients: bool) -> float:
        """Peak memory of the layer in bytes beyond what it stores under a mode of recomputation.

        With offload, the tensors that arrive from the host for the next layer are counted too.
        """
        stored = self.forward.stashed_bytes(recompute)
        arriving = self.forward.offloaded_bytes(recompute)
        if not self.peaks:
            return self.forward.stashed_bytes() - stored + self.work_bytes + arriving
        again = self.forward.recomputed(recompute)
        unsaved = sum(x.bytes for x in self.forward.tensors if x.instead_of in again)
        return max(self.peak(resident_gradients).bytes - (stored - unsaved), 0.0) + arriving


@dataclass(frozen=True)
class LayerGraph(Brief):
    """The layers of a model under one strategy.

    `order` lists positions in `layers` as the data passes them; `edges` are pairs of positions in
    that order, a chain, except that an encoder's output enters every decoder block.
    """

    model: Model
    strategy: Strategy
    layers: tuple[Layer, ...]
    order: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    message_bytes: float
    """Bytes that a device sends to the next stage for one micro-batch, in one direction: the most
    between any two layers."""
    copied_parameters: int = 0
    """Parameters per device of the embedding copy on the last stage, if logits are tied to it."""
    copied_frozen: int = 0
    """The part of `copied_parameters` that is not trained."""

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


class _Chain(NamedTuple):
    """The layers of a transformer in the order of execution."""

    counts: dict[str, int]
    """Layers of each kind."""
    order: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def _chain(model: TransformerModel, seq: int) -> _Chain:
    """Return the kinds of a transformer's layers, their order and the edges between them."""
    blocks = block_kinds(model, seq)
    if model.encoder_layers:
        blocks = ("encoder-block",) * model.encoder_layers + ("decoder-block",) * model.layers
    kinds = ("embedding", *blocks, "head")
    counts = Counter(kinds)
    place = {kind: at for at, kind in enumerate(counts)}
    edges = [(i, i + 1) for i in range(len(kinds) - 1)]
    if model.encoder_layers:
        last = model.encoder_layers  # position of the last encoder block, after the embedding
        edges += [(last, last + j) for j in range(2, model.layers + 1)]
    return _Chain(dict(counts), tuple(place[kind] for kind in kinds), tuple(sorted(edges)))


_END_FIELDS = ("tp", "sequence_parallel", "cp", "micro_batch", "seq")
_DENSE_FIELDS = (*_END_FIELDS, "cp_kind")
_ROUTED_FIELDS = (*_DENSE_FIELDS, "ep", "etp", "dispatcher", "expert_imbalance")


def _fields_read(model: TransformerModel, kind: str) -> tuple[str, ...]:
    """Return the fields of a strategy on which the operators of a kind of layer depend."""
    if kind.endswith("moe-block") or (kind == "head" and model.mtp_layers > 0):
        return _ROUTED_FIELDS
    return _END_FIELDS if kind in _BOUNDARY_LAYERS else _DENSE_FIELDS


def _builder(model: TransformerModel, strategy: Strategy, kind: str) -> tuple[Share, LayerBuilder]:
    """Return the parameters and the builder of a kind of layer."""
    adapted = model.lora is not None
    if kind == "embedding":
        share = embedding_share(model, strategy)
        tables = () if adapted else _tables(model, strategy)
        frozen = share.device_parameters * adapted
        share = replace(share, frozen_parameters=frozen, matrices=tables)
        return share, embedding_builder(model, strategy)
    if kind == "head":
        builder = head_builder(model, strategy)
        own = [
            s
            for s in builder.specs
            if not s.name.endswith("logits") or (s.name == "logits" and not model.tied_embeddings)
        ]
        return head_share(model, strategy).of_products(own, adapted, 0), builder
    builder = written_block(model, strategy, kind)
    share = block_share(model, strategy, kind)
    return share.of_products(builder.specs, adapted, _adapters(model, kind)), builder


_LAYERS: LruCache[tuple[Any, ...], Layer] = LruCache(2**13)
"""The latest layers of transformers, by query (model, kind, options) and strategy."""


def _is_exact(model: TransformerModel, strategy: Strategy) -> bool:
    """Whether the bytes of a layer's arrays are exact in the machine numbers of a family."""
    seq, moe = strategy.seq or model.seq, model.moe
    wide = [seq * model.heads, model.vocab, model.ffn, model.query_width]
    if moe is not None:
        wide.append(moe.experts * max(moe.top_k * model.hidden, moe.expert_ffn))
    return (strategy.micro_batch * seq + model.hidden) * max(wide) <= 2**54


def _transformer_layers(
    model: TransformerModel,
    strategies: Sequence[Strategy],
    kind: str,
    count: int,
    fusion: Fusion,
    precision: Precision | None,
) -> list[Layer]:
    """Build a kind of layer for each strategy; those with the same operators are one family."""
    query, moe = as_one(model, kind, count, fusion, precision), model.moe
    found = [_LAYERS.get((query, s)) for s in strategies]
    alike: dict[tuple[Any, ...], list[tuple[int, Strategy]]] = {}
    for number, s in enumerate(strategies):
        if found[number] is not None:
            continue
        shape = (s.cp_kind, s.dispatcher, s.sequence_parallel, s.seq, s.cp > 1, s.expert_width > 1)
        shared = (s.ep > 1, moe is not None and moe.experts > s.ep)
        key = (*shape, *shared) if _is_exact(model, s) else (s,)
        alike.setdefault(key, []).append((number, s))

    def built(members: Sequence[tuple[int, Strategy]]) -> list[Layer]:
        family = Family.of(tuple(s for _, s in members))
        share, passes = _unfused(model, family, kind)
        layer = _layer(model, kind, count, share, passes, family.tp, precision, fusion)
        return _members(layer, len(members))

    for some in alike.values():
        for (number, s), layer in split_where_unlike(built, some):
            found[number] = _LAYERS.put((query, s), layer)
    return cast(list[Layer], found)


def _members(layer: Layer, count: int) -> list[Layer]:
    """Split the layer of a family into the layers of its `count` members."""
    if count == 1:
        return [layer]
    vars(layer)["work_bytes"] = backward_work_bytes(layer.forward, layer.backward)
    passes = {n: MemberGraph.split(getattr(layer, n), count) for n in ("forward", "backward")}
    sizes = np.broadcast_to(layer.work_bytes, count).tolist()
    made = apart(layer, count, work_bytes=sizes, **passes)
    for at, one in enumerate(made):
        vars(one)["_family"] = layer, at
    return made


@lru_cache(maxsize=64)
def _unfused(
    model: TransformerModel, strategy: Strategy, kind: str
) -> tuple[Share, tuple[list[OperatorSpec], list[OperatorSpec], tuple[Tensor, ...]]]:
    """Build the parameters and operators of a kind of layer; the forms of fusion share them."""
    share, builder = _builder(model, strategy, kind)
    return share, _passes(builder, model, share)


def _of_operators(
    strategies: Iterable[Strategy], fields: tuple[str, ...]
) -> tuple[list[Strategy], list[int]]:
    """Merge strategies that have the same `fields`, so that they share a kind of layer.

    The overlap of expert exchanges, the offload of the optimiser and, without routed experts,
    everything about experts are reset.

    Returns
    -------
    tuple
        The distinct strategies, and which of them each strategy becomes.
    """
    read = itemgetter(*fields)
    distinct: list[Strategy] = []
    known: dict[tuple[Any, ...], int] = {}
    numbers = []
    for strategy in strategies:
        number = known.setdefault(read(vars(strategy)), len(distinct))
        numbers.append(number)
        if number < len(distinct):
            continue
        changes: dict[str, Any] = {"expert_overlap": 0.0, "overlap_experts": False}
        changes["offload_optimizer"] = False
        if fields is not _ROUTED_FIELDS:
            own_width = strategy.expert_width != strategy.tp  # `tp` need not divide experts
            changes |= {"ep": 1, "etp": 1 if own_width else None, "expert_imbalance": 1.0}
            changes["dispatcher"] = "all-to-all"
        distinct.append(strategy.changed(**changes))
    return distinct, numbers


def _tables(model: TransformerModel, strategy: Strategy) -> tuple[tuple[int, int, int], ...]:
    """Matrices of the embedding on one device."""
    rows = (shapes(model, strategy).vocab, model.max_positions or 0, model.token_types)
    patches = model.patches
    pixels = 0 if patches is None else patches.size**2 * patches.channels
    return tuple((1, count, model.hidden) for count in (*rows, pixels) if count)


def _adapters(model: TransformerModel, kind: str) -> int:
    """Parameters of the adapters of a block of a kind, over all devices."""
    attends = 2 if kind == "decoder-block" else 1
    total = attends * model.adapter_parameters(model.attention_shapes)
    moe = model.moe
    if moe is None or not kind.endswith("moe-block"):
        return total + model.adapter_parameters(model.ffn_shapes(model.ffn))
    if moe.shared_width:
        total += model.adapter_parameters(model.ffn_shapes(moe.shared_width))
    return total + moe.experts * model.expert_adapters(moe.expert_ffn)


def _added(backward: list[OperatorSpec], parameters: int, moved: int) -> list[OperatorSpec]:
    """Return the kernel that adds weight gradients to those of earlier micro-batches, if any."""
    if not moved or not parameters:
        return []
    weight_gradients = [i for i, spec in enumerate(backward) if spec.kind == "gemm-weight-gradient"]
    size = moved * parameters
    inputs = tuple(weight_gradients) or (len(backward) - 1,)
    name = "gradient-sums-w"  # in place; may be deferred, as a weight gradient may
    return [vector_spec(name, "residual", inputs, parameters, 1, size * 2.0 / 3.0, size / 3.0)]


def _copied(specs: list[OperatorSpec], parameters: int, moved: float) -> list[OperatorSpec]:
    """Return the kernel that copies gathered weights, or gradients before they are scattered."""
    if not moved or not parameters or not specs:
        return []
    read = tuple({source for spec in specs for source in spec.inputs})
    last = tuple(i for i in range(len(specs)) if i not in read)
    size = moved * parameters
    half = size / 2.0
    return [vector_spec("shares-copy-w", "multiply", last, parameters, 1, half, half, "copy")]


def _passes(
    builder: LayerBuilder, model: TransformerModel, share: Share
) -> tuple[list[OperatorSpec], list[OperatorSpec], tuple[Tensor, ...]]:
    """Return the operators of a layer, forward and backward, and the tensors it stores."""
    forward = list(builder.specs)
    if builder.name.endswith("/embedding") and model.lora is not None:
        backward = []  # with adapters, nothing in the embedding is trained
    else:
        backward = gradients(builder.specs, model.gradient_sums)
    device, frozen = share.device_parameters, share.frozen_parameters
    backward += _added(backward, device - frozen, model.added_gradient_bytes)
    gathered, moved = model.copied_bytes  # only gradients of trained parameters are copied
    moved -= (moved - gathered) * frozen / max(device, 1)
    backward += _copied(backward, device, moved)
    forward += _copied(forward, device, model.copied_bytes[0])
    return forward, backward, tuple(builder.kept)


def _layer(
    model: Model,
    kind: str,
    count: int,
    share: Share,
    passes: tuple[list[OperatorSpec], list[OperatorSpec], tuple[Tensor, ...]],
    width: int,
    precision: Precision | None,
    fusion: Fusion = "none",
) -> Layer:
    """Return a kind of layer; products of boundary layers stay in bf16."""
    forward, backward, tensors = passes
    copies = (0.0, 0.0)
    if precision is not None and kind not in _BOUNDARY_LAYERS:
        backward = quantised(backward, precision, width, forward)
        forward = quantised(forward, precision, width)
        tensors = quantised_tensors(tensors, precision)
        device = share.device_parameters
        copies = device * precision.weight_copies, device * precision.weight_casts
    elif fusion.startswith("full+"):
        again = recomputed_in_groups(forward, backward, tensors, fusion == "full+projections")
        backward, tensors = again or (backward, tensors)
    if fusion != "none":
        forward, tensors = fuse(forward, tensors)
        backward, _ = fuse(backward, ())
    resident = fusion.startswith("full")
    name, in_order = f"{model.name}/{kind}", isinstance(model, GraphModel)
    return Layer(
        kind=kind,
        count=count,
        forward=lay_out(f"{name}/forward", forward, tensors, in_order, resident),
        backward=lay_out(f"{name}/backward", backward, (), in_order, resident),
        copy_bytes=copies[0],
        cast_bytes=copies[1],
        **vars(share),
    )


def traced_share(layer: GraphLayer, width: int) -> Share:
    """Parameters of a traced layer, of which tensor-parallel devices hold shares."""
    device, frozen = device_parameters(layer, width)
    return Share(
        layer.parameters, device, frozen_parameters=frozen, matrices=device_matrices(layer, width)
    )


def _traced_graph(model: GraphModel, strategy: Strategy, precision: Precision | None) -> LayerGraph:
    """Return the layers of a model that is given by its graph."""
    broken = reasons(model, strategy)
    if broken:
        raise InfeasibleError(f"{model.name}: {broken[0]}")
    width = strategy.tp
    layers = []
    for own in model.layers:
        share = traced_share(own, width)
        passes = traced_passes(own, strategy)
        layer = _layer(model, own.name, own.count, share, passes, width, precision)
        layers.append(replace(layer, peaks=traced_peaks(own, strategy)))
    sent = max(layer.output_bytes for layer in model.layers) * strategy.micro_batch
    message_bytes = sent / (width if strategy.sequence_parallel else 1)
    return LayerGraph(model, strategy, tuple(layers), model.order, model.edges, message_bytes)


_MOST_WEIGHT_BYTES = 2.0**29
"""Most bytes of weights to try on chip, which must hold them twice: no chip with HBM has more."""


def _with_weights_on_chip(layers: list[Layer]) -> list[Layer]:
    """Return the layers of a device with its weights, in bf16, on chip."""
    size = float(ELEMENT_BYTES * sum(layer.count * layer.device_parameters for layer in layers))
    if size > _MOST_WEIGHT_BYTES:
        return layers
    return [
        replace(
            layer,
            forward=changed(layer.forward, weight_bytes=size),
            backward=changed(layer.backward, weight_bytes=size),
        )
        for layer in layers
    ]


def layer_graph(
    model: Model,
    strategy: Strategy | None = None,
    fusion: Fusion = "none",
    precision: Precision | None = None,
) -> LayerGraph:
    """Build the layers of a model as one device runs them.

    Parameters
    ----------
    model
        The model to train.
    strategy
        How a layer is split over devices; by default not at all.
    fusion
        What is fused: ``none``, ``epilogues`` (element-wise operators onto the products they
        follow) or ``full`` (also products with one another, whose arrays then stay on chip);
        ``full+activations`` and ``full+projections`` repeat operators inside backward groups.
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
    return layer_graphs(model, [Strategy() if strategy is None else strategy], fusion, precision)[0]


def layer_graphs(
    model: Model,
    strategies: Sequence[Strategy],
    fusion: Fusion,
    precision: Precision | None,
) -> list[LayerGraph]:
    """Build the `layer_graph` of each strategy; all must have one sequence length."""
    low = precision if precision is not None and precision.low else None
    if isinstance(model, GraphModel):
        model = recognised(model) or model
    if isinstance(model, GraphModel):
        if fusion != "none":
            raise InvalidInputError(
                f"fusion: {fusion} is not accepted for a traced model; expected none"
            )
        return [_traced_graph(model, strategy, low) for strategy in strategies]
    if low is not None and model.lora is not None and model.lora.bits == 4:
        raise InvalidInputError(f"precision: {low.name} is not accepted with weights of 4 bits")
    if fusion == ANY_FORM:
        raise InvalidInputError(
            f"fusion: {fusion} is not accepted for one plan; expected one of "
            f"{', '.join(forms(fusion))}"
        )
    loaded = [strategy.with_load(model) for strategy in strategies]
    chain = _chain(model, loaded[0].seq or model.seq)
    built: Fusion = "full" if fusion == "full+weights" else fusion
    read = {kind: _fields_read(model, kind) for kind in chain.counts}
    own = {fields: _of_operators(loaded, fields) for fields in set(read.values())}
    columns = []
    for kind, count in chain.counts.items():
        distinct, numbers = own[read[kind]]
        found = _transformer_layers(model, distinct, kind, count, built, low)
        columns.append([found[number] for number in numbers])
    tied = (model.tied_embeddings and model.head in ("lm", "mlm")) or model.mtp_layers > 0
    graphs = []
    for strategy, *layers in zip(loaded, *columns, strict=True):
        s = shapes(model, strategy)
        copied = s.vocab * model.hidden if tied else 0
        graphs.append(
            LayerGraph(
                model,
                strategy,
                tuple(_with_weights_on_chip(layers) if fusion == "full+weights" else layers),
                chain.order,
                chain.edges,
                message_bytes=float(ELEMENT_BYTES * s.split_rows * model.hidden),
                copied_parameters=copied,
                copied_frozen=copied if model.lora is not None else 0,
            )
        )
    return graphs
