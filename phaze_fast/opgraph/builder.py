"""Builders of layers: each call adds an operator, names its inputs and returns its position.

`LayerBuilder` is for any layer, `BlockBuilder` for a transformer block on one device, with its
shapes, norms and the boundaries of parallel regions. Around each pair of projections lies a
tensor-parallel region: an all-reduce leaves it (and one enters it backward). With sequence
parallelism an all-gather enters it and a reduce-scatter leaves it, and norms, residuals and
dropouts work on a share of the rows (Korthikanti et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.strategy import Shapes, Strategy, shapes

ELEMENT_BYTES = 2  # bf16 activations and weights


@dataclass(frozen=True)
class Tensor:
    """A tensor that the forward pass stores for the backward pass."""

    name: str
    bytes: int
    producer: str
    """Operator that produces it, or ``input`` for the input of the layer."""
    statistic: bool = False
    """Whether closed forms leave it out: row statistics, random states, a shared mask."""
    operand: Literal["", "only", "also"] = ""
    """Whether a product with weights reads it, and nothing else, or others too."""
    instead_of: str = ""
    """Operator whose output it replaces: it is stored only if that operator is recomputed."""


@dataclass(frozen=True)
class OperatorSpec:
    """One operator before it is laid out. A virtual one costs nothing and is spliced out."""

    name: str
    kind: str
    unit: str
    inputs: tuple[int, ...]
    b: int = 1
    m: int = 0
    n: int = 0
    k: int = 0
    flops: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    payload_bytes: float = 0.0
    collective: str = ""
    group: str = "none"
    causal: bool = False
    epilogue: int = 0
    virtual: bool = False
    gradient: tuple[str, float, str] | None = None
    """Collective, payload and group of the backward pass, for the ends of a parallel region."""
    function: str = ""
    """Function that it computes, if its kind does not determine it; see `graph.FUNCTIONS`."""
    regather: bool = False
    """Whether gradients that read its output gather it again before they can start."""
    sources: int = 1
    """For a collective: number of its inputs, from the first, that receive gradients."""
    format: str = ""
    """Number format of a product's operands; empty: that of activations."""
    of_data: bool = False
    """Whether it reads training data, which have no gradient."""


def vector_spec(
    name: str,
    kind: str,
    inputs: tuple[int, ...],
    rows: int,
    cols: int,
    read_bytes: float,
    write_bytes: float,
    function: str = "",
) -> OperatorSpec:
    """Return an operator of the vector units on rows x cols elements."""
    return OperatorSpec(
        name,
        kind,
        "VC",
        inputs,
        m=rows,
        n=cols,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        function=function,
    )


@dataclass
class LayerBuilder:
    """A layer written operator by operator; -1 is the layer's input."""

    name: str
    specs: list[OperatorSpec] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def add(self, spec: OperatorSpec) -> int:
        """Add an operator and return its position."""
        self.specs.append(spec)
        return len(self.specs) - 1

    def keep(
        self,
        name: str,
        size: float,
        producer: int,
        statistic: bool = False,
        operand: Literal["", "only", "also"] = "",
        instead_of: int = -1,
    ) -> None:
        """Record that the output of an operator (or -1, the input) is stored for the backward pass.

        If it is stored `instead_of` the output of another operator, it is needed only to recompute
        that output.
        """
        while producer >= 0 and self.specs[producer].virtual:  # it is spliced out of the graph
            producer = self.specs[producer].inputs[0]
        if size:
            maker = "input" if producer < 0 else self.specs[producer].name
            other = self.specs[instead_of].name if instead_of >= 0 else ""
            self.kept.append(Tensor(name, int(size), maker, statistic, operand, other))

    def linear(
        self,
        name: str,
        x: int,
        rows: int,
        inner: int,
        cols: int,
        bias: bool,
        of_data: bool = False,
    ) -> int:
        """Add rows x inner times inner x cols."""
        return self.add(
            OperatorSpec(
                name,
                "gemm",
                "TC+VC" if bias else "TC",
                (x,),
                m=rows,
                n=cols,
                k=inner,
                flops=2.0 * rows * inner * cols,
                read_bytes=ELEMENT_BYTES * (rows * inner + inner * cols),
                write_bytes=ELEMENT_BYTES * rows * cols,
                epilogue=int(bias),
                of_data=of_data,
            )
        )

    def grouped_linear(
        self, name: str, x: int, count: int, rows: int, inner: int, cols: int, more: int = 0
    ) -> int:
        """Add `count` independent products, each with weights of its own.

        `more` rows of each are computed as padding.
        """
        spec = self.specs[self.linear(name, x, rows, inner, cols, bias=False)]
        self.specs[-1] = replace(
            spec,
            b=count,
            m=rows + more,
            flops=count * spec.flops,
            read_bytes=count * spec.read_bytes,
            write_bytes=count * spec.write_bytes,
        )
        return len(self.specs) - 1

    def product(
        self, name: str, left: int, right: int, b: int, m: int, k: int, n: int, shared: int = 1
    ) -> int:
        """Add b products of two activations; `shared` of them read one right-hand side."""
        return self.add(
            OperatorSpec(
                name,
                "batched-gemm",
                "TC",
                (left, right),
                b=b,
                m=m,
                n=n,
                k=k,
                flops=2.0 * b * m * k * n,
                read_bytes=ELEMENT_BYTES * (b * m * k + b // shared * k * n),
                write_bytes=ELEMENT_BYTES * b * m * n,
            )
        )

    def vector(
        self,
        name: str,
        kind: str,
        inputs: tuple[int, ...],
        rows: int,
        cols: int,
        reads: int = 1,
        function: str = "",
        read_bytes: float | None = None,
        write_bytes: float | None = None,
    ) -> int:
        """Add an operator on rows x cols elements that reads `reads` such arrays and writes one.

        `read_bytes` and `write_bytes` are given where it moves more or less than that.
        """
        size = ELEMENT_BYTES * rows * cols
        read = reads * size if read_bytes is None else read_bytes
        written = size if write_bytes is None else write_bytes
        return self.add(vector_spec(name, kind, inputs, rows, cols, read, written, function))

    def network(
        self,
        name: str,
        x: int | tuple[int, ...],
        forward: tuple[str, float, str] | None,
        backward: tuple[str, float, str] | None,
        regather: bool = False,
        after: tuple[int, ...] = (),
    ) -> int:
        """Add a boundary of a parallel region: its collective forward, and that of its gradient.

        It waits for the operators in `after` as well, to which no gradient flows back.
        """
        sent = (x,) if isinstance(x, int) else tuple(dict.fromkeys(x))
        op, payload, group = forward or ("", 0.0, "none")
        return self.add(
            OperatorSpec(
                name,
                "collective",
                "NET",
                (*sent, *after),
                payload_bytes=payload,
                collective=op,
                group=group,
                virtual=forward is None,
                gradient=backward,
                regather=regather,
                sources=len(sent),
            )
        )

    def gather(self, name: str, x: int | tuple[int, ...], size: float, group: str) -> int:
        """Add an all-gather; gradients are reduced and scattered, and may need it once more."""
        to, back = ("all-gather", float(size), group), ("reduce-scatter", float(size), group)
        return self.network(f"{name}-gather", x, to, back, regather=True)

    def scatter(self, name: str, x: int, size: float, group: str) -> int:
        """Add a reduce-scatter; gradients are gathered."""
        to, back = ("reduce-scatter", float(size), group), ("all-gather", float(size), group)
        return self.network(f"{name}-scatter", x, to, back)


FLOAT_BYTES = 4  # statistics are stored in fp32


def keep_norm_input(
    builder: LayerBuilder, name: str, model: TransformerModel, elements: int, x: int, norm: int
) -> None:
    """Store the tensors that a norm's gradient reads: its input `x`, or copies of it."""
    if model.norm_by_steps:
        builder.keep(f"{name}-input-fp32", FLOAT_BYTES * elements, norm)
        builder.keep(f"{name}-scaled", ELEMENT_BYTES * elements, norm)
        builder.keep(f"{name}-input", ELEMENT_BYTES * elements, x, instead_of=norm)
    else:
        builder.keep(f"{name}-input", ELEMENT_BYTES * elements, x)


class BlockBuilder(LayerBuilder):
    """A transformer block on one device, and the pieces that its sub-layers are built with."""

    def __init__(self, model: TransformerModel, strategy: Strategy, kind: str) -> None:
        super().__init__(f"{model.name}/{kind}")
        self.model, self.strategy, self.kind = model, strategy, kind
        self.shapes: Shapes = shapes(model, strategy)
        self.split = strategy.sequence_parallel and strategy.tp > 1
        self.row_bytes = ELEMENT_BYTES * self.shapes.rows * model.hidden
        self.causal = model.causal and kind != "encoder-block"
        self.windowed = kind.startswith("window-")
        """Whether tokens see `model.window` others at most."""

    # ---- ends of the tensor-parallel region ----

    def enter(self, name: str, x: int) -> int:
        """Begin a region in which devices hold different columns."""
        if self.strategy.tp == 1:
            return x
        if self.split:
            return self.gather(name, self._ordered(name, x), self.row_bytes, "tensor")
        reduce = ("all-reduce", self.row_bytes, "tensor")
        return self.network(f"{name}-enter", x, None, reduce)

    def leave(self, name: str, x: int) -> int:
        """End it: sum the devices' parts."""
        if self.strategy.tp == 1:
            return x
        if self.split:
            return self.scatter(name, self._ordered(name, x), self.row_bytes, "tensor")
        return self.network(f"{name}-reduce", x, ("all-reduce", self.row_bytes, "tensor"), None)

    def _ordered(self, name: str, x: int) -> int:
        """Reorder the rows of several devices along sequences, or back, where the software does.

        Before a gather it represents the copy after it, which has the same bytes.
        """
        if not self.model.gathers_copied:
            return x
        rows, hidden = self.shapes.rows, self.model.hidden
        return self.vector(f"{name}-order", "multiply", (x,), rows, hidden, function="copy")

    # ---- norms and residuals ----

    def norm(self, name: str, x: int) -> int:
        """Normalise the residual stream, or a share of its rows."""
        return self.norm_of(name, x, self.shapes.split_rows, self.model.hidden)

    def norm_of(self, name: str, x: int, rows: int, width: int) -> int:
        """Normalise rows of a width."""
        norm = self.vector(name, "norm", (x,), rows, width, function=self.model.norm)
        keep_norm_input(self, name, self.model, rows * width, x, norm)
        values = 2 if self.model.norm == "layernorm" else 1  # mean and spread, or spread alone
        self.keep(f"{name}-statistics", values * FLOAT_BYTES * rows, norm, statistic=True)
        return norm

    def add_residual(self, name: str, x: int, skip: int) -> int:
        """Add a sub-layer's output to the residual stream, dropout before."""
        rows, hidden = self.shapes.split_rows, self.model.hidden
        if self.model.dropout:
            x = self.vector(f"{name}-dropout", "dropout", (x,), rows, hidden)
            self.keep(f"{name}-dropout-mask", rows * hidden, x)
        return self.vector(f"{name}-residual", "residual", (x, skip), rows, hidden, reads=2)

    def keep_input(self, name: str, x: int, routed: bool = False) -> None:
        """Store the input of a sub-layer's first projections, and of a router if `routed`."""
        self.keep(
            f"{name}-input",
            ELEMENT_BYTES * self.shapes.split_rows * self.model.hidden,
            x,
            operand="" if routed else "only",
        )
