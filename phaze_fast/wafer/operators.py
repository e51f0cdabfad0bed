"""A model's operators as a mesh of dies can split them: sizes, limits, edges."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.block import embedding_builder, head_builder
from phaze_fast.opgraph.builder import ELEMENT_BYTES, LayerBuilder, OperatorSpec
from phaze_fast.opgraph.gradients import gradients
from phaze_fast.opgraph.strategy import Strategy
from phaze_fast.wafer.codes import ROW_WISE
from phaze_fast.wafer.stacks import ENCODER, mesh_block, plain_name, refuse_unlike_blocks

__all__ = ["PARTS", "ROLES", "Edge", "MeshOperator", "Workload", "passes", "workload"]

ROLES = ("batch", "rows", "columns", "inner", "copies")
"""What a slot of the mesh can do for an operator, in the order of `_core.OP_MAPPING_DTYPE`."""

PARTS = ("before", "block", "behind")
"""Where an operator stands: before the blocks, in each of them, or behind them."""

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

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MeshOperator:
    """One operator of a model, for one sequence.

    `columns` are split in whole units: heads where it works on heads, else single columns.
    """

    name: str
    part: str
    spec: OperatorSpec
    seq_rows: int
    """Rows of one sequence."""
    units: int
    """Units its columns can be split into."""
    inner_units: int
    """Units its inner dimension can be split into; 0 where it has none."""
    kept_bytes: float
    """That the backward pass needs of its output, for one sequence."""
    output_kept: bool
    """Whether that is its output, not only a mask or statistics."""
    parameters: int
    stat_bytes: float
    """Summed over split columns, forward and backward, for one sequence."""
    gather_bytes: float
    """Keys and values that split rows must gather, for one sequence."""
    expert: bool = False
    """Whether its rows are experts, each with weights and tokens of its own."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles it accepts."""
        return _ROLES_OF.get(self.spec.kind, _ANY_VECTOR)

    @property
    def product(self) -> bool:
        """Whether it contracts the features of its input with weights."""
        return self.spec.kind == "gemm"

    @property
    def beside(self) -> str:
        """What may be communicated in pieces beside its work: one of `BESIDE`."""
        if not self.product:
            return ""
        return "makes" if plain_name(self.name) in ROW_WISE else "takes"

    @property
    def per_head(self) -> bool:
        """Whether it is a product of attention, of which every head is one."""
        return self.spec.kind in ("attention", "batched-gemm")

    def limit(self, role: str, micro_batch: int) -> int:
        """Into how many parts a dimension can be cut at most."""
        sizes = {"batch": micro_batch, "rows": self.seq_rows, "columns": self.units}
        return sizes.get(role, self.inner_units)

    def shapes(self, local: Array) -> Array:
        """Reduce rows of local (sequences, rows, units, inner) to what tells parts apart."""
        sequences, rows, units, inner = local.T
        if self.expert:
            return np.stack([sequences, rows, units, inner], axis=1)
        if self.per_head:
            heads = units * (self.spec.b // self.units)
            return np.stack([sequences * heads, rows], axis=1)
        if self._on_scores:
            heads = units * (self.spec.m // (self.seq_rows * self.units))
            return np.stack([sequences * rows * heads], axis=1)
        return np.stack([sequences * rows, units, inner], axis=1)

    def parts(self, shapes: Array) -> OperatorSpec:
        """Write rows of `shapes` as operators of their own: one spec whose sizes are arrays."""
        sizes: Any = shapes.astype(np.float64).T
        spec = self.spec
        if self.expert:
            return self._experts(spec, *sizes)
        if self.per_head:
            return self._heads(spec, *sizes)
        if self._on_scores:
            m, n = sizes[0], spec.n
        else:
            m, n = sizes[0], sizes[1] * (spec.n // self.units)
        if spec.kind == "gemm":
            k = sizes[2] * (spec.k // self.inner_units)
            return replace(
                spec,
                m=m,
                n=n,
                k=k,
                flops=2.0 * m * n * k,
                read_bytes=ELEMENT_BYTES * (m * k + k * n),
                write_bytes=ELEMENT_BYTES * m * n,
            )
        size = ELEMENT_BYTES * m * n
        reads = spec.read_bytes / spec.write_bytes
        return replace(spec, m=m, n=n, read_bytes=reads * size, write_bytes=size)

    @property
    def _on_scores(self) -> bool:
        """Whether it works on the scores of explicit attention."""
        return _on_scores(self.spec)

    def _experts(
        self, spec: OperatorSpec, sequences: Any, experts: Any, units: Any, inner: Any
    ) -> OperatorSpec:
        """Write parts of experts' products, or of an operator on their tokens."""
        tokens = sequences * (spec.m if self.product else spec.m // self.seq_rows)
        n = units * (spec.n // self.units)
        if self.product:
            k = inner * (spec.k // self.inner_units)
            return replace(
                spec,
                b=experts,
                m=tokens,
                n=n,
                k=k,
                flops=2.0 * experts * tokens * n * k,
                read_bytes=ELEMENT_BYTES * experts * (tokens * k + k * n),
                write_bytes=ELEMENT_BYTES * experts * tokens * n,
            )
        size = ELEMENT_BYTES * experts * tokens * n
        reads = spec.read_bytes / spec.write_bytes
        return replace(spec, m=experts * tokens, n=n, read_bytes=reads * size, write_bytes=size)

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
        """Of what it reads, the part that follows its rows."""
        return float(ELEMENT_BYTES * self.spec.b * self.spec.m * self.spec.k)


@dataclass(frozen=True)
class Edge:
    """A tensor between two operators, for one sequence."""

    source: int
    target: int
    kind: str
    """inside, entry (into the first block), wrap (to the next block), exit (to what is behind)."""
    bytes: float
    again: bool
    """Whether the backward pass needs it once more as its consumer takes it."""


@dataclass(frozen=True)
class Workload:
    """Operators and edges of one model."""

    model: TransformerModel
    seq: int
    operators: tuple[MeshOperator, ...]
    edges: tuple[Edge, ...]
    chain: tuple[int, ...]
    """Operators of a block from its first to its last, each fed by the one before."""
    boundary_bytes: float
    """Of the tensor between two blocks, for one sequence."""
    blocks: int
    """Blocks of the model."""

    @property
    def encodes(self) -> bool:
        """Whether a block is an encoder's and a decoder's: then one stage has all of them."""
        return bool(self.model.encoder_layers)

    @cached_property
    def entering(self) -> frozenset[int]:
        """Operators whose outputs enter the next block, and are kept."""
        return frozenset(edge.source for edge in self.edges if edge.kind == "wrap")

    @property
    def ends(self) -> tuple[float, float]:
        """FLOPs of what stands before and behind the blocks, in those of a block."""
        flops = dict.fromkeys(PARTS, 0.0)
        for op in self.operators:
            flops[op.part] += op.spec.flops
        block = flops["block"] or 1.0
        return flops["before"] / block, flops["behind"] / block

    @property
    def parameters(self) -> int:
        """Parameters of all operators, the blocks' counted as often as they stand there."""
        return sum(
            op.parameters * (self.blocks if op.part == "block" else 1) for op in self.operators
        )


def passes(spec: OperatorSpec) -> list[OperatorSpec]:
    """Write an operator by itself, and after it its gradients."""
    alone = replace(spec, name="", inputs=(-1,) * len(spec.inputs))
    return [alone, *(gradient for gradient in gradients([alone]) if not gradient.virtual)]


def _on_scores(spec: OperatorSpec) -> bool:
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
    """Operators of one part; `input_bytes` is kept by what makes the part's input."""
    kept: dict[str, float] = {}
    for tensor in builder.kept:
        kept[tensor.producer] = kept.get(tensor.producer, 0.0) + tensor.bytes
    whole = {t.producer for t in builder.kept if not (t.statistic or t.name.endswith("-mask"))}
    found = []
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
        own, output_kept = kept.get(spec.name, 0.0), spec.name in whole
        if part == "block" and position == len(builder.specs) - 1:
            own, output_kept = own + input_bytes, True
        if part == "behind" and position == 0:
            own += kept.get("input", 0.0)
        found.append(
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
    return found


def workload(model: TransformerModel, seq: int | None = None) -> Workload:
    """Take a model apart into operators that a mesh can split.

    Parameters
    ----------
    model
        Blocks of one kind, dense or all with experts; or an encoder's and a decoder's.
    seq
        Tokens of a sequence; by default the model's.

    Raises
    ------
    InvalidInputError
        Where the model has experts in some blocks only, or image patches, windows and the like.

    Examples
    --------
    >>> from phaze_fast import models
    >>> work = workload(models.load("gpt3-13b"))
    >>> [work.operators[i].name for i in work.chain][:4]
    ['attention-norm', 'qkv', 'attention', 'proj']
    """
    refuse_unlike_blocks(model)
    strategy = Strategy(seq=seq)
    builders = (
        embedding_builder(model, strategy),
        mesh_block(model, strategy),
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
                    made = operators[start + source]
                    size = boundary if made.name == "weigh" else made.spec.write_bytes
                    again = again and made.output_kept
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
    while (came := specs[path[-1]].inputs)[0] >= 0:
        # Of cross-attention its keys, which lead back through the encoder's block.
        path.append(came[specs[path[-1]].name == "cross-attention"])
    return tuple(start + at for at in reversed(path))
