"""ATen operators: the kind and the work of each, from its name and the arrays it reads.

A name covers all overloads and the in-place form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from phaze_fast.documents import package_data
from phaze_fast.models.graph_model import WIDE

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_grouped_mm": (0, 1)}
_FP32 = 4  # bytes of an element
_ALIGNED = 8  # elements between rows that start at 16-byte bounds, in bf16
_SOLVED = "linalg_solve_triangular"
_CONVOLUTIONS = ("convolution", "convolution_input", "convolution_weight")
_OTHERS = ("attention", "attention_backward", *_CONVOLUTIONS, _SOLVED)


@cache
def _kinds() -> dict[str, tuple[str, str]]:
    """Return kind and function of operators that are no products, from ``data/aten.yaml``."""
    return {
        name: (kind, function)
        for kind, functions in package_data(__package__, "aten.yaml").items()
        for function, names in functions.items()
        for name in names.split()
    }


def is_known(call: Any) -> bool:
    """Whether the work of an operator is known; PyTorch itself tags element-wise ones."""
    tagged = bool(call.options.get("element_wise")) or call.name.startswith("fused")
    return tagged or call.name in _kinds() or call.name in (*_PRODUCTS, *_OTHERS)


@dataclass(frozen=True)
class Figures:
    """Work of one operator for all samples of the trace."""

    kind: str
    function: str
    sizes: tuple[int, int, int, int]
    """(b, m, n, k), as in `GraphOperator`."""
    flops: float
    read_bytes: float
    write_bytes: float
    causal: bool = False
    window: int = 0
    bias: bool = False


def _bytes(arrays: Sequence[Any]) -> float:
    return float(sum(array.bytes for array in arrays))


def _product(call: Any, wide: bool) -> Figures:
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
        if left.strides and left.strides[-2] == 1 and m % _ALIGNED:
            flipped = True  # left's columns start m elements apart, as right's rows start n apart
        sizes = (count, n, m, k) if flipped else (count, m, n, k)
    weighted = left.parameter or right.parameter
    if call.backward:
        kind = "gemm-input-gradient" if weighted else "gemm-weight-gradient"
    else:
        kind = "gemm" if weighted else "batched-gemm"
    return Figures(
        kind,
        WIDE if wide and left.item_bytes == right.item_bytes == _FP32 else "",
        sizes,
        2.0 * math.prod(sizes) if flops is None else flops,
        _bytes(call.reads),
        _bytes(call.writes),
        bias=call.name in ("addmm", "baddbmm") and weighted,
    )


def _triangular(call: Any) -> Figures:
    """Model a triangular solve as a product with half of its FLOPs."""
    side, out = call.reads[0].shape[-1], call.writes[0].shape
    sizes = (max(math.prod(out[:-2]), 1), out[-2], out[-1], side)
    kind = "batched-gemm-gradient" if call.backward else "batched-gemm"
    flops = float(math.prod(sizes))
    return Figures(kind, "", sizes, flops, _bytes(call.reads), _bytes(call.writes))


def _grouped(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Sizes of a grouped product; tokens are assumed to spread evenly over the groups."""
    if len(b) == 3:
        return b[0], -(-a[-2] // b[0]), b[-1], a[-1]
    return 1, a[-2], b[-1], a[-1]  # groups split the inner dimension


def _attention(call: Any) -> Figures:
    q, k, v = (array.shape for array in call.reads[:3])
    pairs, keys, width = math.prod(q[:-2]), k[-2], q[-1] + v[-1]
    window = int(call.options.get("window", 0))  # given by a mask: every score is computed
    flops = (5.0 if call.backward else 2.0) * pairs * q[-2] * keys * width
    kind = "attention-backward" if call.backward else "attention"
    return Figures(
        kind,
        "",
        (pairs, q[-2], keys, max(width // 2, 1)),
        flops,
        _bytes(call.reads),
        _bytes(call.writes),
        causal=bool(call.options.get("causal")) and not window,
        window=window,
    )


# ---- convolutions ----

_TURNED = {
    "convolution": "gemm",
    "convolution_input": "gemm-input-gradient",
    "convolution_weight": "gemm-weight-gradient",
}


@dataclass(frozen=True)
class _Convolution:
    """Sizes of a convolution, forward or one of its gradients."""

    x: Sequence[int]
    weights: Sequence[int]
    out: Sequence[int]
    groups: int
    strides: tuple[int, ...]
    channels_last: bool

    @classmethod
    def of(cls, call: Any) -> _Convolution:
        shapes, first = call.options, call.reads[0]
        x = shapes.get("x", first.shape)
        weights = shapes.get("weights", call.reads[-1 if "out" in shapes else 1].shape)
        out = shapes.get("out", call.writes[0].shape)
        if shapes["transposed"]:
            x, out = out, x
        strides = tuple(shapes.get("strides", (1,) * (len(out) - 2)))
        last = shapes.get("channels_last", first.channels_last)
        return cls(x, weights, out, shapes["groups"], strides, last)

    @property
    def taps(self) -> int:
        """Spatial positions of the filter."""
        return math.prod(self.weights[2:])

    @property
    def pixels(self) -> int:
        """Positions of the output, of all samples."""
        return self.x[0] * math.prod(self.out[2:])

    @property
    def depthwise(self) -> bool:
        """Whether every channel has a filter of its own."""
        return self.weights[1] == 1 and self.weights[0] == self.groups

    def sizes(self, name: str) -> tuple[int, int, int, int]:
        """(b, m, n, k) of the product: patches times weights, as implicit GEMMs compute it.

        A gradient of the input gathers patches of the output's gradient. With strides it is one
        product for each residue of an input position modulo the strides; each of these products
        reads its own share of the filter.
        """
        k, n = self.weights[1], max(self.weights[0] // self.groups, 1)
        if name == "convolution":
            return self.groups, self.pixels, n, k * self.taps
        if name == "convolution_weight":
            return self.groups, k * self.taps, n, self.pixels
        phases = math.prod(map(min, self.strides, self.weights[2:]))
        depth = max(round(n * self.taps / phases), 1)
        return self.groups, self.pixels * phases, k, depth

    @property
    def seen(self) -> float:
        """Share of the input's pixels that a filter touches: strides may skip some."""
        pairs = zip(self.weights[2:], self.strides, strict=True)
        return math.prod(min(1.0, size / stride) for size, stride in pairs)

    def function(self) -> str:
        """Class of kernels, by what cuDNN's kernels ask of channels and layout (docs/cost.md).

        Tensor cores take channels in groups of 8, padded if there are fewer, and at full speed
        groups of 64; they want channels last. A filter of one position is a plain product in
        either layout, if the pixels of a channel are aligned.
        """
        channels = (self.weights[1], self.weights[0] // self.groups)
        layout = "" if self.channels_last else "-nchw"
        if any(count % 8 for count in channels):
            return f"convolution-padded{layout}"
        area = math.prod(self.x[2:])
        if self.taps == 1 and layout and self.seen == 1.0 and area % 2 == 0:
            return "convolution" if area % 8 == 0 else "convolution-pointwise"
        narrow = self.taps > 1 and any(count % 64 for count in channels)
        return f"convolution{'-narrow' if narrow else ''}{layout}"


def _convolution(call: Any) -> Figures:
    """Model a convolution as the product of its patches with its weights."""
    shape = _Convolution.of(call)
    b, m, n, k = shape.sizes(call.name)
    read, write = _bytes(call.reads), _bytes(call.writes)
    flops = 2.0 * shape.pixels * shape.taps * shape.weights[0] * shape.weights[1]
    if shape.depthwise:  # a depthwise one is no matrix product
        turned = call.name == "convolution_input"
        elements = shape.weights[0] * (
            shape.x[0] * math.prod(shape.x[2:]) if turned else shape.pixels
        )
        function = "depthwise" + ("" if shape.channels_last else "-nchw")
        function += call.name.removeprefix("convolution").replace("_", "-")
        return Figures("multiply", function, (1, elements, shape.taps, 0), flops, read, write)
    if call.name != "convolution_input":  # the input is the first read, or the last of a gradient
        x = call.reads[-1 if call.name == "convolution_weight" else 0]
        read -= x.bytes * (1.0 - shape.seen)
    bias = len(call.reads) == 3 and call.name == "convolution"
    kind = _TURNED[call.name]
    return Figures(kind, shape.function(), (b, m, n, k), flops, read, write, bias=bias)


# ---- vector operators ----

_ELEMENT_WISE = ("add", "multiply", "copy")
_NORMS = {"native_batch_norm": "batchnorm", "native_group_norm": "groupnorm"}


def _order(array: Any) -> tuple[int, ...]:
    """Dimensions of more than one element, those of the largest stride first."""
    dims = [at for at, size in enumerate(array.shape) if size > 1]
    if not array.strides:
        return tuple(dims)
    return tuple(sorted(dims, key=lambda at: -array.strides[at]))


def _is_dense(array: Any) -> bool:
    """Whether an array fills a stretch of memory, in any order of its dimensions."""
    step = 1
    for at in reversed(_order(array)):
        if array.strides and array.strides[at] != step:
            return False
        step *= array.shape[at]
    return True


def _element_wise(call: Any, function: str) -> str:
    """Return the function of an element-wise operator by the layout of its arrays.

    It is `function` where a kernel runs through memory in one stretch. It is ``strided`` where an
    array is broadcast, is a slice or orders its dimensions unlike the result, as each element's
    address is then computed; and ``transpose`` where two arrays of the result's size differ in
    their innermost dimension, so that neighbours in one are far apart in the other.
    """
    if call.name.endswith(("_backward", "_scatter")) or call.name in ("index", "index_select"):
        return function  # fill an array and copy into a part; index copies rows
    if not call.writes:  # the compiler removed the operator
        return function
    out = max(call.writes, key=lambda array: array.elements)
    arrays = [x for x in (*call.reads, *call.writes) if x.elements > 1]
    cut = call.name in ("cat", "stack")
    inner = {_order(x)[-1:] for x in arrays if x.elements == out.elements and len(_order(x)) > 1}
    if not cut and len({len(x.shape) for x in arrays}) == 1 and len(inner) > 1:
        return "transpose"
    if cut:
        return "strided" if any(x.strides for x in arrays) else function
    same = all(_is_dense(x) and _order(x) == _order(out) for x in arrays)
    whole = all(x.elements == out.elements for x in arrays)
    return function if same and whole else "strided"


def _reduced(call: Any) -> tuple[str, tuple[int, int, int, int]]:
    """Return ``reduce`` (of the innermost dimension) or ``reduce-columns``, and the sizes."""
    array, out = max(call.reads, key=lambda x: x.elements), call.writes[0]
    kept, last = max(out.elements, 1), len(array.shape) - 1
    if out.shape[-1:] == array.shape[-1:] and _order(array)[-1:] == (last,):
        return "reduce-columns", (1, max(array.elements // kept, 1), kept, 0)
    return "reduce", (1, kept, max(array.elements // kept, 1), 0)


def _norm(call: Any, function: str) -> tuple[str, tuple[int, int, int, int] | None]:
    """Return the function of a norm by its layout, and the sizes of a batch norm (else None)."""
    name = call.name.removesuffix("_backward")
    if name == "native_layer_norm" and call.backward and len(call.writes) == 1:
        return "layernorm-plain", None  # no gradients of weights, which sum over all rows
    if name not in _NORMS:
        return function, None
    x = max(call.reads, key=lambda array: array.elements)
    if name == "native_group_norm":
        return "groupnorm", None
    layout = "" if x.channels_last or len(x.shape) == 2 else "-nchw"
    return f"batchnorm{layout}", (1, x.shape[1], x.elements // x.shape[1], 0)


def _vector(call: Any) -> Figures:
    kind, function = _kinds().get(call.name, ("multiply", "multiply"))
    largest = max((*call.reads, *call.writes), key=lambda array: array.elements)
    read, write = _bytes(call.reads), _bytes(call.writes)
    if kind == "embedding":  # reads only the rows that are looked up
        largest, read = call.writes[0], _bytes(call.writes[:1]) + _bytes(call.reads[1:])
    elif kind == "embedding-backward":
        largest = call.reads[0]
    elif call.name.startswith("nll_loss"):  # reads one element a row; the gradient is 0 elsewhere
        ids = call.reads[2 if call.backward else 1]
        largest = call.writes[0] if call.backward else ids
        read = float(ids.bytes) if call.backward else 2.0 * ids.bytes
    elif call.name in ("slice_backward", "select_backward"):  # write zeros, and copy into a part
        write += read
    shape = largest.shape or (1,)
    sizes = (1, max(math.prod(shape[:-1]), 1), max(shape[-1], 1), 0)
    if kind == "multiply" and function == "reduce":
        function, sizes = _reduced(call)
    elif kind == "multiply" and function in _ELEMENT_WISE and "nll_loss" not in call.name:
        function = _element_wise(call, function)
    elif kind.startswith("norm"):
        function, own = _norm(call, function)
        sizes = own or sizes
    masks = bool(call.options.get("causal")), int(call.options.get("window", 0))
    return Figures(kind, function, sizes, 0.0, read, write, *masks)


def _generated(call: Any) -> Figures:
    """Model a generated kernel as one function of what it reads and writes."""
    shape = call.options["shape"] or (1,)
    sizes = (1, max(math.prod(shape[:-1]), 1), max(shape[-1], 1), 0)
    read, write = _bytes(call.reads), _bytes(call.writes)
    return Figures(call.options["kind"], call.options["function"], sizes, 0.0, read, write)


def figures(call: Any, wide: bool = False) -> Figures:
    """Work of one operator of a trace (`phaze_fast.models.torch_recorder.Call`).

    With `wide`, products in fp32 are computed in fp32, as in a model whose weights are 16-bit;
    otherwise all of the model is taken as 16-bit.
    """
    if call.name in _PRODUCTS:
        return _product(call, wide)
    if call.name == _SOLVED:
        return _triangular(call)
    if call.name.startswith("attention"):
        return _attention(call)
    if call.name.startswith("convolution"):
        return _convolution(call)
    if call.name.startswith("fused"):
        return _generated(call)
    return _vector(call)
