"""Builders of layers: each call adds an operator, names its inputs and returns its position.

`LayerBuilder` is for any layer, `BlockBuilder` for a transformer block on one device, with its
shapes, norms and the boundaries of parallel regions. Each pair of projections is a
tensor-parallel region with an all-reduce at its end (backward: at its start). With sequence
parallelism a region begins with an all-gather and ends with a reduce-scatter; norms, residuals and
dropouts run on a share of the rows (Korthikanti et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from phaze_fast.models import PACKED_BYTES, Lora, TransformerModel
from phaze_fast.opgraph.strategy import Shapes, Strategy, shapes
from phaze_fast.records import changed

ELEMENT_BYTES = 2  # bf16 activations and weights


@dataclass(frozen=True)
class Tensor:
    """A tensor that the forward pass stores for the backward pass."""

    name: str
    bytes: int
    producer: str
    """Operator that produces it, or ``input`` for the input of the layer."""
    statistic: bool = False
    """Whether published formulas of memory omit it, as row statistics, random states, masks."""
    operand: Literal["", "only", "also"] = ""
    """``only``: products with weights alone read it; ``also``: others too; empty: none of them."""
    instead_of: str = ""
    """Operator whose output it replaces: it is stored only if that operator is recomputed."""


@dataclass(frozen=True)
class OperatorSpec:
    """One operator of a layer. A virtual one costs nothing and is removed from the graph."""

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
    epilogue_functions: tuple[tuple[str, str], ...] = ()
    """Kind and function of the operators that are fused onto a product."""
    virtual: bool = False
    gradient: tuple[str, float, str] | None = None
    """Collective, payload and group of the backward pass, for the ends of a parallel region."""
    function: str = ""
    """Function that is computed, if `kind` does not determine it; see `graph.FUNCTIONS`."""
    regather: bool = False
    """Whether a gather's output is not stored: it is gathered again for gradients that read it."""
    sources: int = 1
    """For a collective: number of its inputs, from the first, that receive gradients."""
    format: str = ""
    """Number format of a product's operands; empty: that of activations."""
    of_data: bool = False
    """Whether it reads training data, which have no gradient."""
    frozen: bool = False
    """Whether the weights that it reads are not trained."""
    packed_bytes: float = 0.0
    """Bytes of its weights where they are stored in a smaller format than they are used in."""


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


def restored_weights(name: str, rows: int, cols: int) -> OperatorSpec:
    """Return the kernel that restores weights of a smaller format before a product reads them."""
    elements = rows * cols
    moved = (PACKED_BYTES * elements, ELEMENT_BYTES * elements)
    spec = vector_spec(name, "multiply", (-1,), rows, cols, *moved, function="copy")
    return changed(spec, frozen=True)


@dataclass
class LayerBuilder:
    """A layer written operator by operator; -1 is the layer's input."""

    name: str
    specs: list[OperatorSpec] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)
    lora: Lora | None = None
    """Adapters of a model whose other parameters are frozen."""

    def add(self, spec: OperatorSpec) -> int:
        """Add an operator and return its position."""
        self.specs.append(spec)
        return len(self.specs) - 1

    def follow(self, other: LayerBuilder, x: int, prefix: str) -> int:
        """Append the operators of `other`, which reads operator `x`; return the last position."""
        first, maker = len(self.specs), "input" if x < 0 else self.specs[x].name
        for spec in other.specs:
            inputs = tuple(x if source < 0 else first + source for source in spec.inputs)
            self.add(changed(spec, name=prefix + spec.name, inputs=inputs))
        for tensor in other.kept:
            producer = maker if tensor.producer == "input" else prefix + tensor.producer
            again = prefix + tensor.instead_of if tensor.instead_of else ""
            names = {"name": prefix + tensor.name, "producer": producer, "instead_of": again}
            self.kept.append(changed(tensor, **names))
        return len(self.specs) - 1

    def keep(
        self,
        name: str,
        size: float,
        producer: int,
        statistic: bool = False,
        operand: Literal["", "only", "also"] = "",
        by: Collection[str] | None = None,
    ) -> None:
        """Record that the output of an operator, or the input (-1), is stored for the gradient.

        `by` names the projections whose weight gradients alone need the tensor: where these
        projections are frozen and have no adapter, it is not stored.
        """
        if self.lora is not None and by is not None:
            if self.lora.dropout or not set(by) & set(self.lora.targets):
                return  # with dropout, adapters store what they read
            operand = ""
        while producer >= 0 and self.specs[producer].virtual:  # not part of the graph
            producer = self.specs[producer].inputs[0]
        if size:
            maker = "input" if producer < 0 else self.specs[producer].name
            self.kept.append(Tensor(name, math.trunc(size), maker, statistic, operand))

    def linear(
        self,
        name: str,
        x: int,
        rows: int,
        inner: int,
        cols: int,
        bias: bool = False,
        of_data: bool = False,
        targets: Mapping[str, int] | None = None,
        count: int = 1,
        more: int = 0,
    ) -> int:
        """Add a product of rows x inner by inner x cols, and adapters if its weights are frozen.

        `targets` maps each name by which `Lora.targets` may choose the projection, or a part of it,
        to its columns. There are `count` such products, each with its own weights and `more` rows
        computed as padding.
        """
        lora, packed = self.lora, 0.0
        inputs: tuple[int, ...] = (x,)
        if lora is not None and lora.bits == 4 and targets:
            packed = PACKED_BYTES * count * inner * cols
            inputs = (x, self.add(restored_weights(f"{name}+dequantise", count * inner, cols)))
        out = self._with_weights(name, inputs, (count, rows, inner, cols), more, bias)
        own = {"of_data": of_data, "frozen": lora is not None, "packed_bytes": packed}
        self.specs[out] = changed(self.specs[out], **own)
        parts = {part: n for part, n in (targets or {}).items() if lora and part in lora.targets}
        adapted = [
            self._adapter(
                f"{name}+lora" if len(parts) == 1 else f"{name}+lora-{part}",
                x,
                (count, rows, inner, width),
                more,
            )
            for part, width in parts.items()
        ]
        if not adapted:
            return out
        summed = count * (rows + more)
        return self.vector(
            f"{name}+lora-sum", "residual", (out, *adapted), summed, cols, reads=1 + len(adapted)
        )

    def _with_weights(
        self,
        name: str,
        inputs: tuple[int, ...],
        sizes: tuple[int, int, int, int],
        more: int,
        bias: bool = False,
    ) -> int:
        """Add products with weights; `sizes` are their count, rows, inner dimension and columns."""
        count, rows, inner, cols = sizes
        return self.add(
            OperatorSpec(
                name,
                "gemm",
                "TC+VC" if bias else "TC",
                inputs,
                b=count,
                m=rows + more,
                n=cols,
                k=inner,
                flops=count * (2.0 * rows * inner * cols),
                read_bytes=count * (ELEMENT_BYTES * (rows * inner + inner * cols)),
                write_bytes=count * (ELEMENT_BYTES * rows * cols),
                epilogue=int(bias),
            )
        )

    def _adapter(self, name: str, x: int, sizes: tuple[int, int, int, int], more: int) -> int:
        """Add the two products of an adapter; the input of the second is stored."""
        assert self.lora is not None
        (count, rows, inner, cols), rank = sizes, self.lora.rank
        if self.lora.dropout:
            x = self.vector(f"{name}-dropout", "dropout", (x,), count * rows, inner)
            self.keep(f"{name}-dropout-mask", count * rows * inner, x)
            self.keep(f"{name}-input", ELEMENT_BYTES * count * rows * inner, x)
        narrow = self._with_weights(f"{name}-a", (x,), (count, rows, inner, rank), more)
        self.keep(f"{name}-rank", ELEMENT_BYTES * count * rows * rank, narrow)
        return self._with_weights(f"{name}-b", (narrow,), (count, rows, rank, cols), more)

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

        `read_bytes` and `write_bytes` replace the bytes of these arrays.
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

        The collective also depends on the operators in `after`, to which it sends no gradient.
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

    def gather(
        self,
        name: str,
        x: int | tuple[int, ...],
        size: float,
        group: str,
        regather: bool = True,
    ) -> int:
        """Add an all-gather, whose gradient is a reduce-scatter; see `OperatorSpec.regather`."""
        to, back = ("all-gather", size, group), ("reduce-scatter", size, group)
        return self.network(f"{name}-gather", x, to, back, regather)

    def scatter(self, name: str, x: int, size: float, group: str) -> int:
        """Add a reduce-scatter; its gradient is an all-gather."""
        to, back = ("reduce-scatter", size, group), ("all-gather", size, group)
        return self.network(f"{name}-scatter", x, to, back)


FLOAT_BYTES = 4  # statistics are stored in fp32


_ATTENTION_INPUTS = frozenset({"q", "k", "v", "qkv", "q-down", "kv-down"})
_FFN_INPUTS = frozenset({"up", "gate", "gate-up"})
"""Projections that read the input of attention, and of a feed-forward layer."""


class BlockBuilder(LayerBuilder):
    """A transformer block on one device: what its sub-layers have in common."""

    def __init__(self, model: TransformerModel, strategy: Strategy, kind: str) -> None:
        super().__init__(f"{model.name}/{kind}", lora=model.lora)
        self.model, self.strategy, self.kind = model, strategy, kind
        self.shapes: Shapes = shapes(model, strategy)
        self.split = strategy.sequence_parallel and strategy.tp > 1
        self.row_bytes = ELEMENT_BYTES * self.shapes.rows * model.hidden
        self.causal = model.causal and kind != "encoder-block"
        self.windowed = kind.startswith("window-")
        """Whether tokens see `model.window` others at most."""

    # ---- boundaries of the tensor-parallel region ----

    def enter(self, name: str, x: int) -> int:
        """Begin a tensor-parallel region, in which devices have different columns."""
        if self.strategy.tp == 1:
            return x
        if self.split:
            return self.gather(name, self._ordered(name, x), self.row_bytes, "tensor")
        reduce = ("all-reduce", self.row_bytes, "tensor")
        return self.network(f"{name}-enter", x, None, reduce)

    def leave(self, name: str, x: int) -> int:
        """End a tensor-parallel region: sum the partial results of the devices."""
        if self.strategy.tp == 1:
            return x
        if self.split:
            return self.scatter(name, self._ordered(name, x), self.row_bytes, "tensor")
        return self.network(f"{name}-reduce", x, ("all-reduce", self.row_bytes, "tensor"), None)

    def _ordered(self, name: str, x: int) -> int:
        """Copy all devices' rows into the order of sequences, or back, if `gathers_copied`.

        In front of a gather, the operator stands for the copy behind it, which moves as many bytes.
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
        self.keep(f"{name}-input", ELEMENT_BYTES * rows * width, x)
        values = 2 if self.model.norm == "layernorm" else 1  # mean and variance, or one of them
        self.keep(f"{name}-statistics", values * FLOAT_BYTES * rows, norm, statistic=True)
        return norm

    def add_residual(self, name: str, x: int, skip: int) -> int:
        """Apply dropout to a sub-layer's output and add it to the residual stream."""
        rows, hidden = self.shapes.split_rows, self.model.hidden
        if self.model.dropout:
            x = self.vector(f"{name}-dropout", "dropout", (x,), rows, hidden)
            self.keep(f"{name}-dropout-mask", rows * hidden, x)
        return self.vector(f"{name}-residual", "residual", (x, skip), rows, hidden, reads=2)

    def keep_input(self, name: str, x: int, routed: bool = False) -> None:
        """Store the input of a sub-layer's first projections, and of a router if `routed`."""
        attends, widens = _ATTENTION_INPUTS, _FFN_INPUTS
        by = widens if name == "ffn" else attends
        if self.model.parallel == "one-norm":
            by = attends | widens
        if routed and (self.model.moe is None or not self.model.moe.shared_width):
            by = frozenset()
        self.keep(
            f"{name}-input",
            ELEMENT_BYTES * self.shapes.split_rows * self.model.hidden,
            x,
            operand="" if routed else "only",
            by=by,
        )
