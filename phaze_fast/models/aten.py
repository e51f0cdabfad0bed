"""ATen operators: the kind and the sizes of work of each, from its name and the arrays it reads.

A name covers all overloads and the in-place form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from phaze_fast.documents import parse_text

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_grouped_mm": (0, 1)}
_SOLVED = "linalg_solve_triangular"
_CONVOLUTIONS = ("convolution", "convolution_input", "convolution_weight")
_OTHERS = ("attention", "attention_backward", *_CONVOLUTIONS, _SOLVED)


@cache
def _kinds() -> dict[str, tuple[str, str]]:
    """Return kind and function of operators that are no products, from ``data/aten.yaml``."""
    file = resources.files(__package__) / "data" / "aten.yaml"
    table = parse_text(file.read_text("utf-8"), "aten.yaml")
    return {
        name: (kind, function)
        for kind, functions in table.items()
        for function, names in functions.items()
        for name in names.split()
    }


def is_known(name: str) -> bool:
    """Whether the work of an operator is known."""
    return name in _kinds() or name in (*_PRODUCTS, *_OTHERS)


@dataclass(frozen=True)
class Figures:
    """Work of one operator, for the samples it was traced with."""

    kind: str
    function: str
    sizes: tuple[int, int, int, int]
    """(b, m, n, k)."""
    flops: float
    read_bytes: float
    write_bytes: float
    causal: bool = False
    window: int = 0
    bias: bool = False


def _bytes(arrays: Sequence[Any]) -> float:
    return float(sum(array.bytes for array in arrays))


def _product(call: Any) -> Figures:
    left, right = (call.reads[at] for at in _PRODUCTS[call.name])
    a, b = left.shape, right.shape
    flipped = left.parameter and not right.parameter
    flops = None
    if call.name == "_grouped_mm":
        sizes = _grouped(a, b)
        flops = 2.0 * a[-2] * a[-1] * b[-1]  # the last group may have fewer rows
    else:
        count = a[0] if len(a) == 3 else 1
        m, k, n = a[-2], a[-1], b[-1]
        sizes = (count, n, m, k) if flipped else (count, m, n, k)
    weighted = left.parameter or right.parameter
    if call.backward:
        kind = "gemm-input-gradient" if weighted else "gemm-weight-gradient"
    else:
        kind = "gemm" if weighted else "batched-gemm"
    return Figures(
        kind,
        "",
        sizes,
        2.0 * math.prod(sizes) if flops is None else flops,
        _bytes(call.reads),
        _bytes(call.writes),
        bias=call.name in ("addmm", "baddbmm") and weighted,
    )


def _triangular(call: Any) -> Figures:
    """Read the solution of triangular equations as a product with half of its FLOPs."""
    side, out = call.reads[0].shape[-1], call.writes[0].shape
    sizes = (max(math.prod(out[:-2]), 1), out[-2], out[-1], side)
    kind = "batched-gemm-gradient" if call.backward else "batched-gemm"
    flops = float(math.prod(sizes))
    return Figures(kind, "", sizes, flops, _bytes(call.reads), _bytes(call.writes))


def _grouped(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Sizes of a grouped product; tokens are assumed to spread evenly over the groups."""
    if len(b) == 3:
        return b[0], -(-a[-2] // b[0]), b[-1], a[-1]
    return 1, a[-2], b[-1], a[-1]  # each group has its own part of the inner dimension


def _attention(call: Any) -> Figures:
    q, k, v = (array.shape for array in call.reads[:3])
    pairs, keys, width = math.prod(q[:-2]), float(k[-2]), q[-1] + v[-1]
    window = int(call.options.get("window", 0))
    if window:  # each query attends to the mean number of visible keys
        keys = window - window * (window - 1) / (2.0 * q[-2])
    flops = (5.0 if call.backward else 2.0) * pairs * q[-2] * keys * width
    kind = "attention-backward" if call.backward else "attention"
    return Figures(
        kind,
        "",
        (pairs, q[-2], math.ceil(keys), max(width // 2, 1)),
        flops,
        _bytes(call.reads),
        _bytes(call.writes),
        causal=bool(call.options.get("causal")) and not window,
        window=window,
    )


def _convolution(call: Any) -> Figures:
    """Read a convolution as the product of its patches with its weights."""
    shapes = call.options
    x = shapes.get("x", call.reads[0].shape)
    weights = shapes.get("weights", call.reads[-1 if "out" in shapes else 1].shape)
    out = shapes.get("out", call.writes[0].shape)
    groups = call.options["groups"]
    if call.options["transposed"]:
        x, out = out, x
    m, k = x[0] * math.prod(out[2:]), math.prod(weights[1:])
    n = max(weights[0] // groups, 1)
    turned = {
        "convolution": ("gemm", (groups, m, n, k)),
        "convolution_input": ("gemm-input-gradient", (groups, m, k, n)),
        "convolution_weight": ("gemm-weight-gradient", (groups, k, n, m)),
    }
    kind, sizes = turned[call.name]
    flops, bias = 2.0 * math.prod(sizes), len(call.reads) == 3
    read, write = _bytes(call.reads), _bytes(call.writes)
    if weights[1] == 1 and n == 1:  # one filter per channel: not computed as a matrix product
        columns = out[-1]
        rows = max(math.prod(sizes) // columns, 1)
        return Figures("multiply", "multiply", (1, rows, columns, 0), flops, read, write)
    return Figures(kind, "", sizes, flops, read, write, bias=bias and call.name == "convolution")


def _vector(call: Any) -> Figures:
    kind, function = _kinds()[call.name]
    largest = max((*call.reads, *call.writes), key=lambda array: array.elements)
    read, write = _bytes(call.reads), _bytes(call.writes)
    if kind == "embedding":  # only the rows of the table that are looked up
        largest, read = call.writes[0], _bytes(call.writes[:1]) + _bytes(call.reads[1:])
    elif kind == "embedding-backward":
        largest = call.reads[0]
    shape = largest.shape or (1,)
    sizes = (1, max(math.prod(shape[:-1]), 1), max(shape[-1], 1), 0)
    masks = bool(call.options.get("causal")), int(call.options.get("window", 0))
    return Figures(kind, function, sizes, 0.0, read, write, *masks)


def figures(call: Any) -> Figures:
    """Work of one operator of a trace (`phaze_fast.models.torch_recorder.Call`)."""
    if call.name in _PRODUCTS:
        return _product(call)
    if call.name == _SOLVED:
        return _triangular(call)
    if call.name.startswith("attention"):
        return _attention(call)
    if call.name.startswith("convolution"):
        return _convolution(call)
    return _vector(call)
