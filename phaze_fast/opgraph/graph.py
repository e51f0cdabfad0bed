"""Takes operators as they are listed, gives graphs as arrays: operators, CSR edges, kept tensors.

A `Sheet` is written like a program: each line adds an operator and names its inputs. The gradient
operators are derived from it; `lay_out` writes either as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest

__all__ = ["GROUPS", "KINDS", "UNITS", "Line", "OpGraph", "Sheet", "Tensor", "lay_out"]

Array = np.ndarray[Any, Any]

KINDS = (
    "gemm",
    "batched-gemm",
    "attention",
    "norm",
    "softmax",
    "activation",
    "multiply",
    "residual",
    "dropout",
    "rotary",
    "embedding",
    "cross-entropy",
    "collective",
    "gemm-input-gradient",
    "gemm-weight-gradient",
    "batched-gemm-gradient",
    "attention-backward",
    "norm-backward",
    "softmax-backward",
    "activation-backward",
    "multiply-backward",
    "dropout-backward",
    "rotary-backward",
    "embedding-backward",
    "cross-entropy-backward",
)
UNITS = ("TC", "VC", "TC+VC", "NET")
GROUPS = ("none", "tensor", "context", "expert")
ELEMENT_BYTES = 2  # bf16 activations and weights

_COLLECTIVE = {name: code for code, name in enumerate(_core.COLLECTIVE_OPS)}


@dataclass(frozen=True)
class Tensor:
    """Something the forward pass keeps for the backward pass."""

    name: str
    bytes: int
    producer: str
    """Operator that makes it, or ``input`` for what enters the layer."""
    statistic: bool = False
    """Whether closed forms leave it out: row statistics, random states, a shared mask."""


@dataclass(frozen=True)
class OpGraph:
    """Operators of one layer on one device, in topological order.

    Attributes
    ----------
    ops
        One record per operator, dtype ``_core.OPERATOR_DTYPE``.
    names
        One name per operator.
    indptr, indices
        Edges in CSR form: successors of i are ``indices[indptr[i]:indptr[i + 1]]``.
    tensors
        What the forward pass keeps; empty in a backward graph.
    """

    name: str
    ops: Array
    names: tuple[str, ...]
    indptr: Array
    indices: Array
    tensors: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def flops(self) -> float:
        """FLOPs of all operators."""
        return float(self.ops["flops"].sum())

    def edges(self) -> list[tuple[int, int]]:
        """Edges as pairs."""
        ends = np.repeat(np.arange(len(self)), np.diff(self.indptr))
        return list(zip(ends.tolist(), self.indices.tolist(), strict=True))

    def gemms(self) -> list[tuple[int, int, int, int]]:
        """(b, m, k, n) of every matrix product, in order."""
        wanted = np.isin(self.ops["kind"], [KINDS.index("gemm"), KINDS.index("batched-gemm")])
        return [tuple(int(op[d]) for d in "bmkn") for op in self.ops[wanted]]  # type: ignore[misc]

    def stashed_bytes(
        self, recompute: str | Iterable[str] = "none", statistics: bool = True
    ) -> int:
        """Bytes kept for the backward pass of one micro-batch.

        Parameters
        ----------
        recompute
            ``none``, ``selective`` (the attention scores), ``full`` (all but the input), or names
            of operators whose outputs are computed again instead of kept.
        statistics
            Whether to count row statistics, random states and masks shared by all heads.
        """
        again = self.recomputed(recompute)
        return sum(
            tensor.bytes
            for tensor in self.tensors
            if tensor.producer not in again and (statistics or not tensor.statistic)
        )

    def recomputed(self, recompute: str | Iterable[str]) -> frozenset[str]:
        """Names of the operators that a mode, or a list of names, computes again."""
        if recompute == "none":
            return frozenset()
        if recompute == "full":
            return frozenset(self.names)
        if recompute == "selective":
            return frozenset(self.names) & SELECTIVE
        if isinstance(recompute, str):
            modes = ["none", "selective", "full"]
            raise InvalidInputError(
                f"recompute: {recompute!r} is not accepted; {nearest(recompute, modes)}, or a list "
                "of operators"
            )
        chosen = frozenset(recompute)
        for name in sorted(chosen - frozenset(self.names)):
            raise InvalidInputError(f"recompute: {name!r} is unknown; {nearest(name, self.names)}")
        return chosen


SELECTIVE = frozenset({"scores", "softmax", "score-dropout"})
"""Operators of explicit attention that selective recomputation runs again (Korthikanti 2022)."""


@dataclass(frozen=True)
class Line:
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
    regather: bool = False
    """Whether weight gradients gather their input again before they can start."""


@dataclass
class Sheet:
    """A layer written operator by operator; -1 is the layer's input."""

    name: str
    lines: list[Line] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def _add(self, line: Line) -> int:
        self.lines.append(line)
        return len(self.lines) - 1

    def keep(self, name: str, size: float, producer: int, statistic: bool = False) -> None:
        """Note that the output of an operator (or -1, the input) is needed again."""
        while producer >= 0 and self.lines[producer].virtual:  # it is spliced out of the graph
            producer = self.lines[producer].inputs[0]
        if size:
            maker = "input" if producer < 0 else self.lines[producer].name
            self.kept.append(Tensor(name, int(size), maker, statistic))

    def linear(self, name: str, x: int, rows: int, inner: int, cols: int, bias: bool) -> int:
        """Add rows x inner times inner x cols."""
        return self._add(
            Line(
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
            )
        )

    def grouped_linear(
        self, name: str, x: int, count: int, rows: int, inner: int, cols: int
    ) -> int:
        """Add `count` products side by side, each with weights of its own."""
        line = self.lines[self.linear(name, x, rows, inner, cols, bias=False)]
        self.lines[-1] = replace(
            line,
            b=count,
            flops=count * line.flops,
            read_bytes=count * line.read_bytes,
            write_bytes=count * line.write_bytes,
        )
        return len(self.lines) - 1

    def product(
        self, name: str, left: int, right: int, b: int, m: int, k: int, n: int, shared: int = 1
    ) -> int:
        """Add b products of two activations; `shared` of them read one right-hand side."""
        return self._add(
            Line(
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
        self, name: str, kind: str, inputs: tuple[int, ...], rows: int, cols: int, reads: int = 1
    ) -> int:
        """Add an operator on rows x cols elements that reads `reads` such arrays."""
        size = ELEMENT_BYTES * rows * cols
        return self._add(
            Line(
                name,
                kind,
                "VC",
                inputs,
                m=rows,
                n=cols,
                read_bytes=reads * size,
                write_bytes=size,
            )
        )

    def custom(self, line: Line) -> int:
        """Add an operator spelled out in full."""
        return self._add(line)

    def network(
        self,
        name: str,
        x: int,
        forward: tuple[str, float, str] | None,
        backward: tuple[str, float, str] | None,
        regather: bool = False,
    ) -> int:
        """Add an end of a parallel region: its collective forward, and that of its gradient."""
        op, payload, group = forward or ("", 0.0, "none")
        return self._add(
            Line(
                name,
                "collective",
                "NET",
                (x,),
                payload_bytes=payload,
                collective=op,
                group=group,
                virtual=forward is None,
                gradient=backward,
                regather=regather,
            )
        )

    def backward_lines(self) -> list[Line]:
        """Derive the gradient operators, last line first."""
        return _gradients(self.lines)


def _gradients(lines: list[Line]) -> list[Line]:
    """Gradient operators of every line; those of weights have no successors."""
    made: list[Line] = []
    arriving: dict[int, list[int]] = {}  # line -> gradients of its output, one per consumer
    gathered: dict[int, int] = {}  # line -> its output gathered again, once for all who need it
    for i in reversed(range(len(lines))):
        line, upstream = lines[i], tuple(dict.fromkeys(arriving.get(i, [])))
        source = line.inputs[0]
        shared = line.kind == "gemm" and source >= 0 and lines[source].regather
        if shared and source not in gathered:
            again = replace(lines[source], name=f"{lines[source].name}-again", inputs=(-1,))
            made.append(again)
            gathered[source] = len(made) - 1
        for slot, gradient in _gradients_of(line, upstream, gathered.get(source), made):
            source = line.inputs[slot]
            if source >= 0:
                arriving.setdefault(source, []).append(gradient)
    return made


def _gradients_of(
    line: Line, upstream: tuple[int, ...], gathered: int | None, made: list[Line]
) -> list[tuple[int, int]]:
    """Append a line's gradient operators to `made`; give (input slot, gradient of that input).

    `gathered` is where a product's input, kept in shares, is made whole again.
    """

    def add(new: Line) -> int:
        made.append(replace(new, inputs=new.inputs or (-1,)))
        return len(made) - 1

    name = f"d-{line.name}"
    if line.kind == "gemm":
        return _linear_gradients(line, upstream, gathered, add)
    if line.kind == "batched-gemm":
        left = replace(line, name=f"{name}-left", n=line.k, k=line.n)
        right = replace(line, name=f"{name}-right", m=line.k, k=line.m)
        swapped = [replace(g, kind="batched-gemm-gradient", inputs=upstream) for g in (left, right)]
        return [(slot, add(g)) for slot, g in enumerate(swapped)]
    if line.kind == "collective":
        op, payload, group = line.gradient or ("", 0.0, "none")
        ended = replace(
            line,
            name=name,
            inputs=upstream,
            collective=op,
            payload_bytes=payload,
            group=group,
            virtual=line.gradient is None,
        )
        return [(0, add(ended))]
    if line.kind == "residual":
        passed = add(replace(line, name=name, inputs=upstream, virtual=True))
        return [(slot, passed) for slot in range(len(line.inputs))]
    # Gradients read what the operator read and the arriving gradient, and write one per input.
    flops = 2.5 * line.flops if line.kind == "attention" else 2.0 * line.flops
    own = replace(
        line,
        name=name,
        kind=f"{line.kind}-backward",
        inputs=upstream,
        flops=flops,
        read_bytes=line.read_bytes + line.write_bytes,
        write_bytes=line.read_bytes,
    )
    gradient = add(own)
    return [(slot, gradient) for slot in range(len(line.inputs))]


def _linear_gradients(
    line: Line, upstream: tuple[int, ...], gathered: int | None, add: Callable[[Line], int]
) -> list[tuple[int, int]]:
    x, w = line.m * line.k * line.b, line.k * line.n * line.b
    y = line.m * line.n * line.b
    to_input = add(
        replace(
            line,
            name=f"d-{line.name}-x",
            kind="gemm-input-gradient",
            unit="TC",
            epilogue=0,
            inputs=upstream,
            n=line.k,
            k=line.n,
            read_bytes=ELEMENT_BYTES * (y + w),
            write_bytes=ELEMENT_BYTES * x,
        )
    )
    needs = upstream if gathered is None else (*upstream, gathered)
    add(
        replace(
            line,
            name=f"d-{line.name}-w",
            kind="gemm-weight-gradient",
            unit="TC",
            epilogue=0,
            inputs=needs,
            m=line.k,
            k=line.m,
            read_bytes=ELEMENT_BYTES * (x + y),
            write_bytes=ELEMENT_BYTES * w,
        )
    )
    return [(0, to_input)]


def lay_out(name: str, lines: list[Line], tensors: tuple[Tensor, ...]) -> OpGraph:
    """Splice virtual lines out and write the rest as arrays."""
    real = [i for i, line in enumerate(lines) if not line.virtual]
    place = {i: position for position, i in enumerate(real)}

    def sources(i: int) -> set[int]:
        found: set[int] = set()
        for source in lines[i].inputs:
            if source >= 0:
                found |= sources(source) if lines[source].virtual else {source}
        return found

    successors: list[list[int]] = [[] for _ in real]
    for i in real:
        for source in sorted(sources(i)):
            successors[place[source]].append(place[i])
    ops = np.zeros(len(real), dtype=_core.OPERATOR_DTYPE)
    for position, i in enumerate(real):
        line = lines[i]
        ops[position] = (
            KINDS.index(line.kind),
            UNITS.index(line.unit),
            line.b,
            line.m,
            line.n,
            line.k,
            line.flops,
            line.read_bytes,
            line.write_bytes,
            line.payload_bytes,
            _COLLECTIVE.get(line.collective, -1),
            GROUPS.index(line.group),
            line.causal,
            line.epilogue,
        )
    indptr = np.cumsum([0, *(len(s) for s in successors)]).astype(np.int32)
    indices = np.array([j for s in successors for j in s], dtype=np.int32)
    for array in (ops, indptr, indices):
        array.setflags(write=False)
    return OpGraph(name, ops, tuple(lines[i].name for i in real), indptr, indices, tensors)
