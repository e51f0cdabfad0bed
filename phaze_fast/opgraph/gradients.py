"""The backward pass of a layer, derived from its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from phaze_fast.opgraph.sheet import ELEMENT_BYTES, Line

__all__ = ["gradients"]


def gradients(lines: list[Line]) -> list[Line]:
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
        return [(slot, add(g)) for slot, g in enumerate(_product_gradients(line, upstream, name))]
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


def _product_gradients(line: Line, upstream: tuple[int, ...], name: str) -> tuple[Line, Line]:
    """Gradients of both factors of Y = AB: dA = dY Bᵀ and dB = Aᵀ dY."""
    left = ELEMENT_BYTES * line.b * line.m * line.k
    right = line.read_bytes - left  # fewer where heads share it
    common = replace(line, kind="batched-gemm-gradient", inputs=upstream)
    return (
        replace(
            common,
            name=f"{name}-left",
            n=line.k,
            k=line.n,
            read_bytes=line.write_bytes + right,
            write_bytes=left,
        ),
        replace(
            common,
            name=f"{name}-right",
            m=line.k,
            k=line.m,
            read_bytes=left + line.write_bytes,
            write_bytes=right,
        ),
    )
