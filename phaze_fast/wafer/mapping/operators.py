"""The operators of a model and how a mesh of dies can split them: sizes, limits, edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.block import block_builder, embedding_builder, head_builder
from phaze_fast.opgraph.builder import ELEMENT_BYTES, LayerBuilder, OperatorSpec
from phaze_fast.opgraph.gradients import gradients
from phaze_fast.opgraph.strategy import Strategy
from phaze_fast.tables import Array, picked

PARTS = ("before", "block", "behind")
"""Part of the model to which an operator belongs: before the blocks, in each block, after them."""

ROLES: tuple[str, ...] = _core.ROLES
"""Roles of a slot (see `slots_of`) for an operator, in the order of `_core.OP_MAPPING_DTYPE`."""

WEIGHTS: tuple[str, ...] = _core.WEIGHT_MODES
"""Storage modes of weights, gradients and optimiser state, in the order of their codes."""

OUTPUTS: tuple[str, ...] = _core.OUTPUTS
"""Treatments of an operator's output until the backward pass, in the order of their codes."""

EDGE_KINDS: tuple[str, ...] = _core.EDGE_KINDS
"""Kinds of edges between operators, in the order of their codes; see `Edge`."""

OVERLAPS = ("", "input", "output")
"""The tensor whose collective may overlap with a product, in the order of their codes."""

PIECES = 4
"""Number of pieces of an activation collective that overlaps with a product."""

ROW_WISE = ("proj", "down", "expert-down", "shared-down")
"""Products whose inner dimension Megatron-LM splits, so that they output partial sums."""

ENCODER = "encoder-"
"""Prefix of the names of an encoder's operators in an encoder-decoder."""

_NEEDS_INPUT = ("gemm", "attention", "batched-gemm", "activation", "norm", "multiply", "softmax")
_ROLES_OF = {
    "gemm": ("batch", "rows", "columns", "inner"),
    "embedding": ("batch", "rows", "columns", "inner"),
    "attention": ("batch", "rows", "columns"),
    "batched-gemm": ("batch", "rows", "columns"),
    "softmax": ("batch", "rows", "columns"),
    "cross-entropy": ("batch", "rows", "columns"),
}
_ANY_VECTOR = ("batch", "rows", "columns", "copies")


def plain_name(name: str) -> str:
    """Remove the prefix of an encoder's or cross-attention's operator.

    Examples
    --------
    >>> [plain_name(name) for name in ("encoder-q", "cross-proj", "down", "cross-entropy")]
    ['q', 'proj', 'down', 'cross-entropy']
    """
    return name if name == "cross-entropy" else name.removeprefix(ENCODER).removeprefix("cross-")


@dataclass(frozen=True)
class MeshOperator:
    """One operator of a model, for one sequence.

    Columns are split in whole units: heads if the operator works on heads, else single columns.
    """

    name: str
    part: str
    spec: OperatorSpec
    seq_rows: int
    """Rows of one sequence."""
    units: int
    """Number of units into which the operator's columns can be split."""
    inner_units: int
    """Number of units into which a product's inner dimension can be split; 0 if there is none."""
    kept_bytes: float
    """Bytes of its output that the backward pass needs, for one sequence."""
    output_kept: bool
    """Whether `kept_bytes` are the output itself, not only a mask or statistics."""
    parameters: int
    stat_bytes: float
    """Bytes of statistics summed over split columns, forward and backward, for one sequence."""
    gather_bytes: float
    """Bytes of keys and values that must be gathered if rows are split, for one sequence."""
    expert: bool = False
    """Whether the operator's rows are experts, each with weights and tokens of its own."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that the operator accepts."""
        return _ROLES_OF.get(self.spec.kind, _ANY_VECTOR)

    @property
    def product(self) -> bool:
        """Whether the operator is a product of its input with weights."""
        return self.spec.kind == "gemm"

    @property
    def overlaps(self) -> str:
        """The tensor whose collective may overlap with the product, in pieces: see `OVERLAPS`."""
        if not self.product:
            return ""
        return "output" if plain_name(self.name) in ROW_WISE else "input"

    @property
    def per_head(self) -> bool:
        """Whether the operator is an attention product, computed once per head."""
        return self.spec.kind in ("attention", "batched-gemm")

    def limit(self, role: str, micro_batch: int) -> int:
        """Largest number of parts into which a dimension can be split."""
        sizes = {"batch": micro_batch, "rows": self.seq_rows, "columns": self.units}
        return sizes.get(role, self.inner_units)

    def shapes(self, local: Array) -> Array:
        """Map rows of local (sequences, rows, units, inner) to the sizes that set the cost."""
        sequences, rows, units, inner = local.T
        if self.expert:
            return np.stack([sequences, rows, units, inner], axis=1)
        if self.per_head:
            heads = units * (self.spec.b // self.units)
            return np.stack([sequences * heads, rows], axis=1)
        if _on_scores(self.spec):
            heads = units * (self.spec.m // (self.seq_rows * self.units))
            return np.stack([sequences * rows * heads], axis=1)
        return np.stack([sequences * rows, units, inner], axis=1)

    def parts(self, shapes: Array) -> OperatorSpec:
        """Return the operators of all rows of `shapes` as one spec whose sizes are arrays."""
        sizes: Any = shapes.astype(np.float64).T
        spec, experts = self.spec, 1
        if self.per_head:
            return self._heads(spec, *sizes)
        if _on_scores(self.spec):
            m, units, inner = sizes[0], self.units, 0
        elif self.expert:
            sequences, experts, units, inner = sizes
            m = sequences * (spec.m if self.product else spec.m // self.seq_rows)
        else:
            m, units, inner = sizes
        n = units * (spec.n // self.units)
        if self.product:
            k = inner * (spec.k // self.inner_units)
            reads, size = m * k + k * n, ELEMENT_BYTES * experts * m * n
            moved = {"read_bytes": ELEMENT_BYTES * experts * reads, "write_bytes": size}
            flops = 2.0 * experts * m * n * k
            return replace(spec, b=experts, m=m, n=n, k=k, flops=flops, **moved)
        size = ELEMENT_BYTES * experts * m * n
        reads = spec.read_bytes / spec.write_bytes
        return replace(spec, m=experts * m, n=n, read_bytes=reads * size, write_bytes=size)

    def _heads(self, spec: OperatorSpec, pairs: Any, rows: Any) -> OperatorSpec:
        part, cut = pairs / spec.b, rows / spec.m
        rest = spec.read_bytes - self._query_bytes
        return replace(
            spec,
            b=pairs,
            m=rows,
            flops=spec.flops * part * cut,
            read_bytes=(self._query_bytes * cut + rest) * part,
            write_bytes=spec.write_bytes * part * cut,
        )

    @cached_property
    def _query_bytes(self) -> float:
        """Bytes of queries, the part of an attention product's inputs that scales with its rows."""
        return float(ELEMENT_BYTES * self.spec.b * self.spec.m * self.spec.k)


@dataclass(frozen=True)
class Edge:
    """A tensor between two operators, for one sequence."""

    source: int
    target: int
    kind: str
    """Kind: inside, entry (into the first block), wrap (to the next), exit (out of the last)."""
    bytes: float
    again: bool
    """Whether the backward pass needs the tensor again, split as the consumer takes it."""


@dataclass(frozen=True)
class Workload:
    """Operators and edges of one model."""

    model: TransformerModel
    seq: int
    operators: tuple[MeshOperator, ...]
    edges: tuple[Edge, ...]
    chain: tuple[int, ...]
    """Positions of a block's operators on the path from its first to its last operator."""
    boundary_bytes: float
    """Bytes of the tensor between two blocks, for one sequence."""
    blocks: int
    """Number of blocks of the model."""

    @property
    def encodes(self) -> bool:
        """Whether a block joins an encoder and a decoder block; one stage then has all blocks."""
        return bool(self.model.encoder_layers)

    @cached_property
    def entering(self) -> frozenset[int]:
        """Operators whose outputs enter the next block and are stored."""
        return frozenset(edge.source for edge in self.edges if edge.kind == "wrap")

    @property
    def ends(self) -> tuple[float, float]:
        """FLOPs of the operators before and after the blocks, relative to one block."""
        flops = dict.fromkeys(PARTS, 0.0)
        for op in self.operators:
            flops[op.part] += op.spec.flops
        block = flops["block"] or 1.0
        return flops["before"] / block, flops["behind"] / block

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(
            op.parameters * (self.blocks if op.part == "block" else 1) for op in self.operators
        )


def passes(spec: OperatorSpec) -> list[OperatorSpec]:
    """Return an operator without inputs, followed by its gradients."""
    isolated = replace(spec, name="", inputs=(-1,) * len(spec.inputs))
    return [isolated, *(gradient for gradient in gradients([isolated]) if not gradient.virtual)]


def _on_scores(spec: OperatorSpec) -> bool:
    """Whether an operator works on the scores of explicit attention."""
    return spec.kind == "softmax" or plain_name(spec.name) == "score-dropout"


def _units(model: TransformerModel, spec: OperatorSpec) -> tuple[int, int]:
    """Units of an operator's columns and of its inner dimension."""
    kv, name = model.kv_heads or model.heads, plain_name(spec.name)
    if spec.kind in ("attention", "batched-gemm") or _on_scores(spec):
        return kv, 0
    if name in ("q", "rotate-q", "qkv", "k", "v", "rotate-k"):
        return kv, spec.k if spec.kind == "gemm" else 0
    if name == "proj":
        return spec.n, kv
    return spec.n, spec.k if spec.kind == "gemm" else 0


def _parameters(model: TransformerModel, spec: OperatorSpec) -> int:
    if spec.kind == "gemm":
        return spec.b * spec.k * spec.n + spec.epilogue * spec.n
    if spec.kind == "norm":
        return model.norm_parameters
    if spec.kind == "embedding":
        norm = model.norm_parameters if model.embedding_norm else 0
        return model.parameters_by_part()["embedding"] - norm
    return 0


def _operators(
    model: TransformerModel, part: str, builder: LayerBuilder, input_bytes: float
) -> list[MeshOperator]:
    """Operators of one part; a block's last one also stores the next block's `input_bytes`."""
    kept_bytes: dict[str, float] = {}
    for tensor in builder.kept:
        kept_bytes[tensor.producer] = kept_bytes.get(tensor.producer, 0.0) + tensor.bytes
    whole = {t.producer for t in builder.kept if not (t.statistic or t.name.endswith("-mask"))}
    operators = []
    for position, spec in enumerate(builder.specs):
        units, inner = _units(model, spec)
        rows = spec.m // model.heads if _on_scores(spec) else spec.m
        expert = model.moe is not None and spec.name.startswith("expert-")
        if expert and model.moe is not None:
            rows = model.moe.experts
        if spec.kind == "embedding":
            inner = model.vocab
        statistics = {"norm": 8.0, "cross-entropy": 12.0}.get(spec.kind, 0.0)
        gathered = 0.0
        if spec.kind in ("attention", "batched-gemm"):
            gathered = spec.read_bytes - ELEMENT_BYTES * spec.b * spec.m * spec.k
        own, output_kept = kept_bytes.get(spec.name, 0.0), spec.name in whole
        if part == "block" and position == len(builder.specs) - 1:
            own, output_kept = own + input_bytes, True
        if part == "behind" and position == 0:
            own += kept_bytes.get("input", 0.0)
        operators.append(
            MeshOperator(
                name=spec.name,
                part=part,
                spec=spec,
                seq_rows=rows,
                units=units,
                inner_units=inner,
                kept_bytes=own,
                output_kept=output_kept,
                parameters=_parameters(model, spec),
                stat_bytes=statistics * spec.m,
                gather_bytes=gathered,
                expert=expert,
            )
        )
    return operators


# ---- blocks ----


def _routed(builder: LayerBuilder) -> LayerBuilder:
    """Rewrite the dispatch and combine of a block's experts.

    A separate operator `dispatch` copies tokens for their experts; its output is the payload of
    the all-to-all. Tokens that experts return are weighted on arrival, so `combine` is dropped.
    """
    names = [spec.name for spec in builder.specs]
    if "dispatch" not in names:
        return builder
    sent, gone = names.index("dispatch"), names.index("combine")
    weigh = builder.specs[names.index("weigh")]
    rewritten = LayerBuilder(builder.name)
    for at, spec in enumerate(builder.specs):
        if at == gone:
            continue
        inputs = tuple(builder.specs[gone].inputs[0] if i == gone else i for i in spec.inputs)
        inputs = tuple(i - (i > gone) for i in inputs)
        if at == sent:
            sizes = picked(weigh, "m", "n", "write_bytes") | {"read_bytes": weigh.write_bytes}
            rewritten.specs.append(OperatorSpec("dispatch", "dropout", "VC", inputs[:1], **sizes))
        else:
            rewritten.specs.append(replace(spec, inputs=inputs))
    rewritten.kept = [
        replace(t, producer="dispatch") if t.name == "dispatched" else t for t in builder.kept
    ]
    return rewritten


def _check_blocks(model: TransformerModel) -> None:
    """Raise an error if blocks are of several kinds, or of a kind that a mesh cannot split.

    Raises
    ------
    InvalidInputError
        The message names the accepted models.
    """
    parts = (model.window, model.latent, model.parallel, model.qk_norm)
    unusual = parts != (None, None, "no", "no") or model.norm_position not in ("pre", "post")
    mixed = model.moe is not None and (model.moe.dense_layers or model.encoder_layers)
    if mixed or unusual or model.patches is not None:
        raise InvalidInputError(
            f"model: {model.name} is not accepted; expected one kind of block without image "
            "patches, windows, latent attention, parallel blocks or further norms (a BERT, GPT, "
            "OPT, Llama, Mixtral or T5)"
        )
    if model.encoder_layers not in (0, model.layers):
        raise InvalidInputError(
            f"model: {model.name} with {model.encoder_layers} encoder blocks is not accepted; "
            f"expected as many as decoder blocks, {model.layers}"
        )


def _mesh_block(model: TransformerModel, strategy: Strategy) -> LayerBuilder:
    """Build a block: dense, with experts, or an encoder's and a decoder's together."""
    if not model.encoder_layers:
        return _routed(block_builder(model, strategy, "moe-block" if model.moe else "block"))
    kinds = ("encoder-block", "decoder-block")
    return _paired(*(block_builder(model, strategy, kind) for kind in kinds))


def _paired(encoder: LayerBuilder, decoder: LayerBuilder) -> LayerBuilder:
    """Merge an encoder block and a decoder block into one.

    All encoder blocks run before all decoder blocks; if one stage has both, the order does not
    affect its time or memory. The decoder's cross-attention reads the output of the encoder block
    of the same depth instead of the last one: the shapes agree. That tensor is stored once, as the
    input of the encoder's next block, and not again for the decoder.
    """
    block = LayerBuilder(decoder.name)
    count = len(encoder.specs)
    last = ENCODER + encoder.specs[-1].name
    block.specs = [replace(spec, name=ENCODER + spec.name) for spec in encoder.specs]
    for spec in decoder.specs:
        outside = count - 1 if spec.name in ("cross-k", "cross-v") else -1
        inputs = tuple(i + count if i >= 0 else outside for i in spec.inputs)
        block.specs.append(replace(spec, inputs=inputs))
    for tensor in encoder.kept:
        entered = tensor.producer == "input"
        producer = last if entered else ENCODER + tensor.producer
        block.kept.append(replace(tensor, name=ENCODER + tensor.name, producer=producer))
    block.kept += [tensor for tensor in decoder.kept if tensor.name != "memory"]
    return block


# ---- the workload ----


def workload(model: TransformerModel, seq: int | None = None) -> Workload:
    """List the operators of a model with the limits of their splits, and the edges between them.

    Parameters
    ----------
    model
        Blocks of one kind, dense or all with experts; or an encoder's and a decoder's.
    seq
        Sequence length in tokens; by default the model's.

    Raises
    ------
    InvalidInputError
        If the model has experts in only some blocks, or features such as image patches or windows.

    Examples
    --------
    >>> from phaze_fast import models
    >>> work = workload(models.load("gpt3-13b"))
    >>> [work.operators[i].name for i in work.chain][:4]
    ['attention-norm', 'qkv', 'attention', 'proj']
    """
    _check_blocks(model)
    strategy = Strategy(seq=seq)
    builders = (
        embedding_builder(model, strategy),
        _mesh_block(model, strategy),
        head_builder(model, strategy),
    )
    into_block = sum(t.bytes for t in builders[1].kept if t.producer == "input")
    operators: list[MeshOperator] = []
    edges: list[Edge] = []
    starts = []
    for part, builder in zip(PARTS, builders, strict=True):
        starts.append(len(operators))
        operators += _operators(model, part, builder, float(into_block))
    last = starts[2] - 1
    boundary = operators[last].spec.write_bytes
    encoded = max((i for i, op in enumerate(operators) if op.name.startswith(ENCODER)), default=-1)
    for part, builder, start in zip(PARTS, builders, starts, strict=True):
        for position, spec in enumerate(builder.specs):
            for source in dict.fromkeys(spec.inputs):
                again = spec.kind in _NEEDS_INPUT
                to = start + position
                if source >= 0:
                    producer = operators[start + source]
                    size = boundary if producer.name == "weigh" else producer.spec.write_bytes
                    again = again and producer.output_kept
                    edges.append(Edge(start + source, to, "inside", size, again))
                elif part == "block":
                    home = encoded if to <= encoded else last
                    edges.append(Edge(home, to, "wrap", boundary, again))
                elif part == "behind":
                    edges.append(Edge(last, to, "exit", boundary, again))
    if starts[1] > 0:
        edges.append(Edge(starts[1] - 1, starts[1], "entry", boundary, False))
    return Workload(
        model=model,
        seq=strategy.seq or model.seq,
        operators=tuple(operators),
        edges=tuple(edges),
        chain=_chain(builders[1].specs, starts[1]),
        boundary_bytes=float(boundary),
        blocks=model.layers,
    )


def _chain(specs: list[OperatorSpec], start: int) -> tuple[int, ...]:
    """Follow first inputs from the last operator back to a block's input."""
    path = [len(specs) - 1]
    while (inputs := specs[path[-1]].inputs)[0] >= 0:
        # Cross-attention: follow its keys, which lead back through the encoder block.
        path.append(inputs[specs[path[-1]].name == "cross-attention"])
    return tuple(start + at for at in reversed(path))
