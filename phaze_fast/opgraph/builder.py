"""How a layer is written operator by operator, with the tensors that it keeps.

A `LayerBuilder` is used like a program: each call adds an operator, names its inputs, and returns
its position for the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

__all__ = ["ELEMENT_BYTES", "LayerBuilder", "OperatorSpec", "Tensor"]

ELEMENT_BYTES = 2  # bf16 activations and weights


@dataclass(frozen=True)
class Tensor:
    """Something the forward pass keeps for the backward pass."""

    name: str
    bytes: int
    producer: str
    """Operator that makes it, or ``input`` for what enters the layer."""
    statistic: bool = False
    """Whether closed forms leave it out: row statistics, random states, a shared mask."""
    operand: Literal["", "only", "also"] = ""
    """Whether a product with weights reads it, and nothing else, or others too."""
    instead_of: str = ""
    """Operator in whose place it is kept: where that is computed again, and not otherwise."""


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
    """What it computes, where its kind leaves that open; see `opgraph.functions`."""
    regather: bool = False
    """Whether gradients that read its output gather it again before they can start."""
    sources: int = 1
    """Of a collective: how many of its inputs, from the first, get gradients."""
    format: str = ""
    """Number format of a product's operands; empty: that of activations."""
    of_data: bool = False
    """Whether it reads training data, which have no gradient."""


@dataclass
class LayerBuilder:
    """A layer written operator by operator; -1 is the layer's input."""

    name: str
    specs: list[OperatorSpec] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def _add(self, spec: OperatorSpec) -> int:
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
        """Note that the output of an operator (or -1, the input) is needed again.

        Where it is kept `instead_of` what another operator made, it is needed only to compute that
        again.
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
        return self._add(
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
        """Add `count` products side by side, each with weights of its own.

        `more` rows of each are computed in vain.
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
        return self._add(
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
    ) -> int:
        """Add an operator on rows x cols elements that reads `reads` such arrays."""
        size = ELEMENT_BYTES * rows * cols
        return self._add(
            OperatorSpec(
                name,
                kind,
                "VC",
                inputs,
                m=rows,
                n=cols,
                read_bytes=reads * size,
                write_bytes=size,
                function=function,
            )
        )

    def custom(self, spec: OperatorSpec) -> int:
        """Add an operator spelled out in full."""
        return self._add(spec)

    def network(
        self,
        name: str,
        x: int | tuple[int, ...],
        forward: tuple[str, float, str] | None,
        backward: tuple[str, float, str] | None,
        regather: bool = False,
        after: tuple[int, ...] = (),
    ) -> int:
        """Add an end of a parallel region: its collective forward, and that of its gradient.

        It waits for the operators in `after` as well, to which no gradient flows back.
        """
        sent = (x,) if isinstance(x, int) else tuple(dict.fromkeys(x))
        op, payload, group = forward or ("", 0.0, "none")
        return self._add(
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
