"""PyTorch's operators on the tensors of a tape, each with its gradient.

Every function records what the PyTorch function of its name runs below autograd: derivatives and
what they save are those of PyTorch's ``derivatives.yaml``, in the order of its generated code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from phaze_fast.models import recording
from phaze_fast.models.tape import (
    ITEM_BYTES,
    Gradients,
    Node,
    Shape,
    Tensor,
    broadcast,
    contiguous_strides,
    elementwise_strides,
    viewed_strides,
)

Formula = Callable[[], Tensor]
"""Computes the gradient of an input; called only if that gradient is wanted."""
_Needs = Sequence[tuple[int, Tensor]]
"""Tensors to save, each with the position of the input whose gradient needs it."""


def _joined(node: Node | None, outs: Sequence[Tensor], backward: Callable[..., Any]) -> None:
    if node is not None:
        node.backward = backward
        for slot, out in enumerate(outs):
            out.node, out.slot = node, slot


def _run(
    name: str,
    inputs: Sequence[Tensor | None],
    out: Tensor,
    backward: Callable[[Tensor], Sequence[Tensor | None] | Mapping[int, Tensor | Formula]],
    *,
    reads: Sequence[Tensor] | None = None,
    others: Sequence[Tensor] = (),
    needs: _Needs = (),
    keeps: Sequence[Tensor] = (),
    **options: Any,
) -> Tensor:
    """Record a differentiable operator.

    Parameters
    ----------
    inputs, out, others
        Differentiable inputs of the operator, its first result and its further results.
    backward
        Returns the gradients of the inputs, given that of the first result: a list, or a mapping by
        position, in which formulas of wanted gradients run in order.
    reads
        Tensors that the operator reads, if they are not the inputs.
    needs, keeps
        Tensors that are saved before the operator runs, and results that are saved after it.
    """
    tape = out.tape
    node = tape.node(inputs, 1 + len(others))
    if node is not None:
        tape.save(node, *(x for at, x in needs if node.wants(at)))
    read = [x for x in inputs if x is not None] if reads is None else reads
    tape.add(name, read, [out, *others], **options)
    if node is not None:
        tape.save(node, *keeps)
        _joined(node, [out], lambda g: _computed(backward(g[0]), node))
    return out


def _computed(
    results: Sequence[Tensor | None] | Mapping[int, Tensor | Formula], node: Node
) -> Sequence[Tensor | None]:
    """Run the formulas of gradients that are wanted."""
    if not isinstance(results, Mapping):
        return results
    gradients: list[Tensor | None] = [None] * len(node.edges)
    for at, one in results.items():
        if isinstance(one, Tensor):
            gradients[at] = one
        elif node.wants(at):
            gradients[at] = one()
    return gradients


def _without(x: Tensor, at: int) -> tuple[Shape, Shape]:
    """Shape and strides of a tensor without a dimension."""
    shape, strides = ((*sizes[:at], *sizes[at + 1 :]) for sizes in (x.shape, x.strides))
    return shape, strides


# ---- views ----


def _as(
    x: Tensor, shape: Shape, strides: Shape, backward: Callable[[Tensor], Tensor], dtype: str = ""
) -> Tensor:
    out = Tensor(x.tape, shape, dtype or x.dtype, strides, x.storage)
    _joined(x.tape.node([x]), [out], lambda gradients: [backward(gradients[0])])
    return out


def _sized(x: Tensor, shape: Shape) -> Shape:
    if -1 not in shape:
        return shape
    rest = -math.prod(shape)
    return tuple(math.prod(x.shape) // rest if size == -1 else size for size in shape)


def view(x: Tensor, *shape: int) -> Tensor:
    """View of another shape."""
    sizes = _sized(x, shape)
    strides = viewed_strides(x.shape, x.strides, sizes)
    assert strides is not None
    return _as(x, sizes, strides, lambda g: reshape(g, *x.shape))


def reshape(x: Tensor, *shape: int) -> Tensor:
    """View of another shape, or a copy where no strides give such a view."""
    sizes = _sized(x, shape)
    if viewed_strides(x.shape, x.strides, sizes) is None:
        x = clone(x, contiguous_strides(x.shape))
    return view(x, *sizes)


def contiguous(x: Tensor) -> Tensor:
    """Return the tensor itself, or a contiguous copy."""
    return x if x.is_contiguous else clone(x, contiguous_strides(x.shape))


def permute(x: Tensor, *order: int) -> Tensor:
    """View with dimensions in another order."""
    back = tuple(order.index(at) for at in range(len(order)))
    shape, strides = (tuple(sizes[at] for at in order) for sizes in (x.shape, x.strides))
    return _as(x, shape, strides, lambda g: permute(g, *back))


def transpose(x: Tensor, one: int, other: int) -> Tensor:
    """View with two dimensions swapped."""
    order = list(range(len(x.shape)))
    order[one], order[other] = order[other], order[one]
    return permute(x, *order)


def t(x: Tensor) -> Tensor:
    """Transpose of a matrix."""
    return transpose(x, 0, 1)


def unsqueeze(x: Tensor, dim: int) -> Tensor:
    """View with a dimension of one."""
    at = dim % (len(x.shape) + 1)
    shape = (*x.shape[:at], 1, *x.shape[at:])
    step = x.shape[at] * x.strides[at] if at < len(x.shape) else 1
    return _as(x, shape, (*x.strides[:at], step, *x.strides[at:]), lambda g: squeeze(g, at))


def squeeze(x: Tensor, dim: int) -> Tensor:
    """View without a dimension of one."""
    at = dim % len(x.shape)
    return _as(x, *_without(x, at), lambda g: unsqueeze(g, at))


def expand(x: Tensor, *shape: int) -> Tensor:
    """View that repeats dimensions of one; its gradient is summed over them."""
    padding = len(shape) - len(x.shape)
    sizes = tuple(x.shape[at - padding] if n == -1 else n for at, n in enumerate(shape))
    return _as(x, sizes, x.spread(sizes), lambda g: g)


def alias(x: Tensor) -> Tensor:
    """View of the same shape, as of an index that selects everything."""
    return _as(x, x.shape, x.strides, lambda g: g)


def _cut(x: Tensor, shape: Shape, strides: Shape, name: str = "slice_backward") -> Tensor:
    """View of a part, whose gradient is written into zeros."""

    def backward(g: Tensor) -> Tensor:
        whole = g.new(*x.shape)
        g.tape.add(name, [g], [whole])
        return whole

    return _as(x, shape, strides, backward)


def part(x: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """View of a range of one dimension."""
    at, full = dim % len(x.shape), x.shape
    if (start, stop) == (0, full[at]):
        return alias(x)
    return _cut(x, (*full[:at], stop - start, *full[at + 1 :]), x.strides)


def every_other(x: Tensor) -> Tensor:
    """View of every second element of rows."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    return _cut(x, half, (*x.strides[:-1], 2 * x.strides[-1]))


def select(x: Tensor, dim: int) -> Tensor:
    """View of one position of a dimension."""
    return _cut(x, *_without(x, dim % len(x.shape)), "select_backward")


def split(x: Tensor, sizes: Sequence[int], dim: int = -1) -> list[Tensor]:
    """Split into views of ranges of one dimension."""
    at = dim % len(x.shape)
    shapes = [(*x.shape[:at], size, *x.shape[at + 1 :]) for size in sizes]
    return _pieces(x, shapes, x.strides, lambda parts: cat(parts, at))


def _pieces(
    x: Tensor, shapes: Sequence[Shape], strides: Shape, join: Callable[[list[Tensor]], Tensor]
) -> list[Tensor]:
    """Return views of parts of a tensor, whose gradients are joined."""
    outs = [Tensor(x.tape, shape, x.dtype, strides, x.storage) for shape in shapes]

    def backward(gradients: Gradients) -> list[Tensor]:
        pairs = zip(gradients, outs, strict=True)
        return [join([_zeros(out) if g is None else g for g, out in pairs])]

    _joined(x.tape.node([x], len(outs)), outs, backward)
    return outs


def unbind(x: Tensor, dim: int) -> list[Tensor]:
    """Split into views of each position of a dimension."""
    at = dim % len(x.shape)
    shape, strides = _without(x, at)

    def join(parts: list[Tensor]) -> Tensor:
        whole = x.new(*x.shape)
        x.tape.add("stack", parts, [whole])
        return whole

    return _pieces(x, [shape] * x.shape[at], strides, join)


# ---- copies ----


def clone(x: Tensor, strides: Shape | None = None) -> Tensor:
    """Copy of a tensor."""
    out = x.new(*x.shape, strides=strides) if strides else x.alike()
    return _run("clone", [x], out, lambda g: [g])


def to(x: Tensor, dtype: str) -> Tensor:
    """Cast to a number format; return the tensor itself if it has that format."""
    if x.dtype == dtype:
        return x
    return _run("_to_copy", [x], x.alike(dtype), lambda g: [g])  # the gradient is cast back


def cat(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join tensors along a dimension."""
    first = parts[0]
    at, sizes = dim % len(first.shape), [x.shape[dim] for x in parts]
    out = first.new(*first.shape[:at], sum(sizes), *first.shape[at + 1 :])
    return _run("cat", parts, out, lambda g: split(g, sizes, at))


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors along a new last dimension."""
    out = parts[0].new(*parts[0].shape, len(parts))
    return _run("stack", parts, out, lambda g: unbind(g, -1))


def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table, looked up by id."""

    def backward(g: Tensor) -> list[Tensor]:
        gradient = table.new(*table.shape)
        table.tape.add("embedding_dense_backward", [g, ids], [gradient])
        return [gradient]

    out = table.new(*ids.shape, table.shape[1])
    return _run("embedding", [table], out, backward, reads=[table, ids], needs=[(0, ids)])


# ---- element by element ----


Operand = Tensor | float


def _tensors(*operands: Operand) -> list[Tensor]:
    return [x for x in operands if isinstance(x, Tensor)]


def _result(*operands: Operand, dtype: str = "") -> Tensor:
    tensors = _tensors(*operands)
    shape = broadcast(*(x.shape for x in tensors))
    kinds = [x.dtype for x in tensors if x.shape or len(tensors) == 1]
    kind = dtype or max(kinds or [tensors[0].dtype], key=tuple(ITEM_BYTES).index)
    return Tensor(tensors[0].tape, shape, kind, elementwise_strides(shape, tensors))


def _times(one: Tensor, *others: Tensor, name: str = "mul") -> Tensor:
    """Record an element-wise operator of the backward pass."""
    return one.tape.elementwise(name, one, *others)


def mul(a: Operand, b: Operand) -> Tensor:
    """Element-wise product."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return _pointwise("mul", "mul", "", *_tensors(a, b))
    return _run(
        "mul", [a, b], _result(a, b),
        lambda g: {1: lambda: _times(g, a), 0: lambda: _times(g, b)}, needs=[(0, b), (1, a)],
    )  # fmt: skip


def add(a: Operand, b: Operand, *, name: str = "add", inplace: bool = False) -> Tensor:
    """Element-wise sum."""
    tensors = _tensors(a, b)
    out = tensors[0].overwritten() if inplace else _result(*tensors)
    return _run(name, tensors, out, lambda g: [g] * len(tensors))


def sub(a: Operand, b: Tensor) -> Tensor:
    """Difference; a number minus a tensor is PyTorch's ``rsub``."""
    if not isinstance(a, Tensor):
        return _pointwise("rsub", "neg", "", b)
    return _run("sub", [a, b], _result(a, b), lambda g: [g, _times(g, name="neg")])


def _of_divisor(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Gradient of the divisor of a quotient."""
    quotient = _times(_times(a, b, name="div"), b, name="div")
    return _times(_times(g, name="neg"), quotient)


def div(a: Tensor, b: Operand) -> Tensor:
    """Element-wise quotient."""
    if not isinstance(b, Tensor):
        return _pointwise("div", "div", "", a)
    return _run(
        "div", [a, b], _result(a, b),
        lambda g: {1: lambda: _of_divisor(g, a, b), 0: lambda: _times(g, b, name="div")},
        needs=[(0, b), (1, a), (1, b)],
    )  # fmt: skip


def power(x: Tensor) -> Tensor:
    """Power with a number as exponent."""
    return _run(
        "pow", [x], _result(x), lambda g: [_times(g, _times(_times(x, name="pow")))],
        needs=[(0, x)],
    )  # fmt: skip


def rsqrt(x: Tensor) -> Tensor:
    """Reciprocal of the square root."""
    out = _result(x)

    def backward(g: Tensor) -> list[Tensor]:
        cube = _times(out, name="pow")
        return [_times(_times(g), cube)]

    return _run("rsqrt", [x], out, backward, keeps=[out])


def _pointwise(name: str, backward_name: str, kept: str, x: Tensor) -> Tensor:
    """Element-wise function whose gradient reads what `kept` names: its result, input or none."""
    out = _result(x)
    read = {"result": [out], "input": [x]}.get(kept, [])
    needs = [(0, x)] if kept == "input" else []
    return _run(
        name, [x], out, lambda g: [_times(g, *read, name=backward_name)],
        needs=needs, keeps=[] if needs else read,
    )  # fmt: skip


neg = partial(_pointwise, "neg", "neg", "")
tanh = partial(_pointwise, "tanh", "tanh_backward", "result")
sigmoid = partial(_pointwise, "sigmoid", "sigmoid_backward", "result")
silu = partial(_pointwise, "silu", "silu_backward", "input")
gelu = partial(_pointwise, "gelu", "gelu_backward", "input")  # one operator, as in PyTorch
relu = partial(_pointwise, "relu", "threshold_backward", "result")


def clamp(x: Tensor, both: bool = False) -> Tensor:
    """Limit values from above, or from both sides."""
    return _run("clamp", [x], _result(x), lambda g: [_inside(x, g, both)], needs=[(0, x)])


def _inside(x: Tensor, g: Tensor, both: bool) -> Tensor:
    """Gradient of clamped values: `g` where `x` is within the limits, else zero."""
    tape = x.tape
    above = tape.elementwise("ge", x, dtype="bool") if both else None
    inside = tape.elementwise("le", x, dtype="bool")
    if above is not None:
        inside = tape.elementwise("logical_and", above, inside)
    return tape.elementwise("where", inside, g, tape.created(g.new()), dtype=g.dtype)


def clamped(x: Tensor) -> Tensor:
    """Limit values from both sides, in place; the gradient needs a copy of the values."""
    node = x.tape.node([x])
    before = clone(x)
    x.tape.save(node, before)
    out = x.overwritten()
    x.tape.add("clamp", [x], [out])
    _joined(node, [out], lambda gradients: [_inside(before, gradients[0], True)])
    return out


def dropout(x: Tensor, on: bool) -> Tensor:
    """Dropout as one kernel, which stores its mask."""
    if not on:
        return x
    out = _result(x)
    mask = x.new(*x.shape, dtype="bool", strides=out.strides)
    return _run(
        "native_dropout", [x], out,
        lambda g: [_times(g, mask, name="native_dropout_backward")], others=[mask], keeps=[mask],
    )  # fmt: skip


# ---- reductions ----


def mean(x: Tensor) -> Tensor:
    """Mean over the last dimension, which stays with size one."""
    out = x.new(*x.shape[:-1], 1)
    return _run("mean", [x], out, lambda g: [_times(expand(g, *x.shape), name="div")])


def total(x: Tensor, dim: int = -1, keepdim: bool = True) -> Tensor:
    """Sum over a dimension."""
    at = dim % len(x.shape)
    out = x.new(*x.shape[:at], *(1,) * keepdim, *x.shape[at + 1 :])
    return _run("sum", [x], out, lambda g: [expand(g if keepdim else unsqueeze(g, at), *x.shape)])


def softmax(x: Tensor, dtype: str = "", name: str = "_softmax") -> Tensor:
    """Softmax over the last dimension; with another number format, cast first."""
    x = to(x, dtype or x.dtype)
    out, back = x.alike(), f"{name}_backward_data"
    return _run(name, [x], out, lambda g: [_times(g, out, name=back)], keeps=[out])


def safe_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, zero in rows where everything is masked."""
    tape, out, formats = x.tape, x.new(*x.shape), {1: "bool", 4: "float32"}
    node = tape.node([x])
    for name, reads, writes in recording.safe_softmax(
        x, out, lambda shape, item_bytes: x.new(*shape, dtype=formats[item_bytes])
    ):
        tape.add(name, reads, writes)
    tape.save(node, out)
    _joined(node, [out], lambda g: [_times(g[0], out, name="_softmax_backward_data")])
    return out


def layer_norm(x: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """Layer norm over the last dimension, one kernel with statistics in fp32."""
    statistics = [x.new(*x.shape[:-1], 1, dtype="float32") for _ in range(2)]
    weights = [w for w in (gain, shift) if w is not None]

    def backward(g: Tensor) -> list[Tensor | None]:
        results = [one.new(*one.shape) for one in (x, *weights)]
        x.tape.add("native_layer_norm_backward", [g, x, *statistics, *weights], results)
        pair = iter(results[1:])
        return [results[0], *(None if w is None else next(pair) for w in (gain, shift))]

    return _run(
        "native_layer_norm", [x, gain, shift], x.new(*x.shape), backward,
        others=statistics, needs=[(0, one) for one in (x, *weights)], keeps=statistics,
    )  # fmt: skip


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss of rows of logits."""
    scores = softmax(logits, name="_log_softmax")
    loss, weight = scores.new(), scores.new()

    def backward(g: Tensor) -> list[Tensor]:
        gradient = scores.new(*scores.shape)
        scores.tape.add("nll_loss_backward", [g, scores, labels, weight], [gradient])
        return [gradient]

    return _run(
        "nll_loss_forward", [scores], loss, backward,
        reads=[scores, labels], others=[weight], needs=[(0, scores), (0, labels)], keeps=[weight],
    )  # fmt: skip


# ---- products ----


def _column_major(x: Tensor) -> bool:
    return x.strides[-2] == 1 and x.strides[-1] == x.shape[-2]


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Product of two matrices."""
    return _run(
        "mm", [a, b], a.new(a.shape[0], b.shape[1]),
        lambda g: {1: lambda: _mm_right(g, a, b), 0: lambda: _mm_left(g, a, b)},
        needs=[(0, b), (1, a)],
    )  # fmt: skip


def _mm_left(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return t(mm(b, t(g))) if _column_major(a) else mm(g, t(b))


def _mm_right(g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return t(mm(t(g), a)) if _column_major(b) else mm(t(a), g)


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Product of two matrices plus a bias that is added to each row."""
    return _run(
        "addmm", [bias, a, b], a.new(a.shape[0], b.shape[1]),
        lambda g: {0: g, 1: lambda: _mm_left(g, a, b), 2: lambda: _mm_right(g, a, b)},
        needs=[(1, b), (2, a)],
    )  # fmt: skip


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Product of pairs of matrices."""
    return _run(
        "bmm", [a, b], a.new(a.shape[0], a.shape[1], b.shape[2]),
        lambda g: {1: lambda: bmm(transpose(a, 1, 2), g), 0: lambda: bmm(g, transpose(b, 1, 2))},
        needs=[(0, b), (1, a)],
    )  # fmt: skip


def baddbmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Scaled product of pairs of matrices plus a bias without gradient."""

    def backward(g: Tensor) -> list[Tensor | None]:
        first = _times(bmm(g, transpose(b, 1, 2)))
        return [None, first, _times(bmm(transpose(a, 1, 2), g))]

    out = a.new(a.shape[0], a.shape[1], b.shape[2])
    return _run("baddbmm", [bias, a, b], out, backward, needs=[(2, a), (1, b)])


def bloom_gelu(x: Tensor) -> Tensor:
    """GELU's tanh form by an autograd function that saves its input alone."""
    tape, one = x.tape, _times

    def inner() -> Tensor:
        scaled, cube = one(x), one(one(x), x)
        return one(one(scaled, one(cube, name="add")), name="tanh")

    def backward(g: Tensor) -> list[Tensor]:
        shares = inner()
        half, slope = one(x), one(one(shares, shares), name="rsub")
        slope = one(half, one(slope, one(one(one(x), x), name="add")))
        return [one(one(slope, one(one(shares, name="add")), name="add"), g)]

    node, first = tape.node([x]), len(tape.calls)
    tape.save(node, x)
    out = one(one(x), one(inner(), name="add"))
    if node is not None:  # all operators belong to one autograd node
        own = int(node.sequence)
        tape.calls[first:] = [replace(call, sequence=own) for call in tape.calls[first:]]
    _joined(node, [out], lambda gradients: backward(gradients[0]))
    return out


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix products over the last two dimensions; earlier dimensions are broadcast."""
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    count = math.prod(batch)
    rows = [reshape(expand(x, *batch, *x.shape[-2:]), count, *x.shape[-2:]) for x in (a, b)]
    return view(bmm(*rows), *batch, a.shape[-2], b.shape[-1])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows times a matrix that is stored with one row for each output."""
    width, outs = weight.shape[1], weight.shape[0]
    if bias is not None and (len(x.shape) == 2 or x.is_contiguous):
        rows = x if len(x.shape) == 2 else view(x, -1, width)
        out = addmm(bias, rows, t(weight))
        return out if len(x.shape) == 2 else view(out, *x.shape[:-1], outs)
    columns = t(weight)
    if len(x.shape) == 2:
        return mm(x, columns)
    product = view(mm(reshape(x, -1, width), columns), *x.shape[:-1], outs)
    return product if bias is None else add(product, bias, inplace=True)


def patches(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolution of images, which need no gradient, with filters that do not overlap."""
    tape, (outs, _, *sides) = x.tape, weight.shape
    places = (size // side for size, side in zip(x.shape[2:], sides, strict=True))
    out = x.new(x.shape[0], outs, *places)
    options = {"strides": tuple(sides), "groups": 1, "transposed": False, "channels_last": False}

    def backward(gradients: Gradients) -> list[Tensor | None]:
        (g,) = gradients
        assert g is not None
        shapes = {"x": x.shape, "weights": weight.shape, "out": g.shape}
        g, of_weight, of_bias = contiguous(g), weight.new(*weight.shape), bias.new(*bias.shape)
        tape.add("convolution_weight", [g, x], [of_weight], **options, **shapes)
        tape.add("sum", [g], [of_bias])
        return [None, of_weight, of_bias]

    node = tape.node([x, weight, bias])
    tape.save(node, x)
    tape.add("convolution", [x, weight], [out], **options)
    tape.add("add", [out, bias], [out])
    tape.calls[-1] = replace(tape.calls[-1], sequence=-1)  # the convolution has its node
    _joined(node, [out], backward)
    return out


def attention_in_parts(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, drops: bool) -> Tensor:
    """Attention where no fused kernel applies: in fp32, operator by operator."""
    wide_q, wide_k, wide_v = (to(x, "float32") for x in (q, k, v))
    scores = matmul(mul(wide_q, 1.0), mul(transpose(wide_k, 2, 3), 1.0))
    shares = dropout(safe_softmax(add(scores, bias, inplace=True)), drops)
    to(shares, q.dtype)  # PyTorch's second result, which nothing reads
    return to(matmul(shares, wide_v), q.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, **seen: Any) -> Tensor:
    """Fused attention as one operator, which also writes the logarithms of the softmax's sums.

    The dimensions of its output lie in memory as those of the queries do. A window is a boolean
    mask, which is converted to numbers that autograd saves.
    """
    tape, shape = q.tape, (*q.shape[:-1], v.shape[-1])
    order = sorted(range(len(shape)), key=lambda dim: (-q.strides[dim], dim))
    dense = contiguous_strides([shape[dim] for dim in order])
    strides = tuple(dense[order.index(dim)] for dim in range(len(shape)))
    out = q.new(*shape, strides=strides)
    sums = q.new(*q.shape[:-1], dtype="float32")
    masks = [tape.constant(q.shape[0], 1, q.shape[-2], k.shape[-2])] if seen.get("window") else []

    def backward(gradients: Gradients) -> list[Tensor]:
        (g,), like = gradients, [x.alike() for x in (q, k, v)]
        assert g is not None
        for mask in masks:
            tape.load_mask(mask, (q.shape[0], 2 * q.shape[1]))
        tape.add("attention_backward", [q, k, v, out, sums, g], like, **seen)
        return like

    node = tape.node([q, k, v])
    for mask in masks:
        tape.load_mask(mask, q.shape[:2], recording.CONVERTED)
    tape.add("attention", [q, k, v], [out, sums], **seen)
    tape.save(node, q, k, v, out, sums, *masks)
    _joined(node, [out], backward)
    return out


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Add a causal mask to scores."""
    out = _result(scores, mask)
    return _run("add", [scores, mask], out, lambda g: [g, None])


def where(mask: Tensor, x: Tensor, **options: Any) -> Tensor:
    """Replace values that a causal mask hides by a number."""
    number = x.new()

    def backward(g: Tensor) -> list[Tensor]:
        return [x.tape.elementwise("where", mask, g, x.tape.created(x.new()), **options)]

    return _run(
        "where", [x], _result(x, mask, dtype=x.dtype), backward,
        reads=[mask, x, number], needs=[(0, mask)], **options,
    )  # fmt: skip


# ---- choices and rows ----


def plain(name: str, reads: Sequence[Tensor], shapes: Sequence[Shape], dtype: str) -> list[Tensor]:
    """Record an operator without gradient, such as a sort."""
    outs = [reads[0].new(*shape, dtype=dtype) for shape in shapes]
    reads[0].tape.add(name, reads, outs)
    return outs


def _zeros(like: Tensor) -> Tensor:
    return like.tape.created(like.new(*like.shape))


def _put(name: str, like: Tensor, places: Tensor, g: Tensor) -> Tensor:
    """Write a gradient into zeros, in place."""
    zeros = _zeros(like)
    like.tape.add(name, [zeros, places, g], [zeros])
    return zeros


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest values of rows, and their places."""
    return _chosen("topk", x, (*x.shape[:-1], count), True)


def largest(x: Tensor, keepdim: bool = True) -> tuple[Tensor, Tensor]:
    """Largest value of rows, and its place."""
    return _chosen("max", x, (*x.shape[:-1], 1) if keepdim else x.shape[:-1], keepdim)


def _chosen(name: str, x: Tensor, shape: Shape, keepdim: bool) -> tuple[Tensor, Tensor]:
    places = x.new(*shape, dtype="int64")

    def backward(g: Tensor) -> list[Tensor]:
        own, at = (g, places) if keepdim else (unsqueeze(g, -1), unsqueeze(places, -1))
        return [_put("scatter", x, at, own)]

    out = x.new(*shape)
    return _run(name, [x], out, backward, others=[places], keeps=[places]), places


def gather(x: Tensor, places: Tensor) -> Tensor:
    """Values of rows at some places."""
    return _run(
        "gather", [x], x.new(*places.shape), lambda g: [_put("scatter_add", x, places, g)],
        reads=[x, places], needs=[(0, places), (0, x)],
    )  # fmt: skip


def index(x: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """Rows of a tensor by number, along a dimension."""
    out = x.new(*x.shape[:dim], *rows.shape, *x.shape[dim + 1 :])
    return _run(
        "index", [x], out, lambda g: [_put("index_put", x, rows, g)],
        reads=[x, rows], needs=[(0, rows)],
    )  # fmt: skip


def pick(x: Tensor, dim: int) -> Tensor:
    """Copy one position of a dimension, which stays with size one."""
    return index(x, x.tape.constant(1, dtype="int64"), dim)


def masked_fill(x: Tensor, mask: Tensor, *, inplace: bool = False) -> Tensor:
    """Replace masked values by a number."""
    return _run(
        "masked_fill", [x], x.overwritten() if inplace else _result(x),
        lambda g: [_times(g, mask, name="masked_fill")], reads=[x, mask], needs=[(0, mask)],
    )  # fmt: skip


def divided(a: Tensor, b: Tensor) -> Tensor:
    """Quotient written in place, whose gradient needs a copy of the dividend."""
    node = a.tape.node([a, b])
    a.tape.save(node, b)
    before = clone(a)
    a.tape.save(node, before)
    out = a.overwritten()
    a.tape.add("div", [a, b], [out])

    def backward(gradients: Gradients) -> list[Tensor | None]:
        (g,) = gradients
        assert g is not None
        second = _of_divisor(g, before, b)
        return [_times(g, b, name="div"), second]

    _joined(node, [out], backward)
    return out


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Products of groups of rows, which end where `ends` says, each with a matrix of its own."""
    groups, width, outs = b.shape

    def product(x: Tensor, y: Tensor, shape: Shape) -> Tensor:
        result = x.new(*shape)
        x.tape.add("_grouped_mm", [x, y, ends], [result])
        return result

    def backward(g: Tensor) -> Mapping[int, Tensor | Formula]:
        if b.strides[1] == 1:
            second = transpose(product(t(g), a, (groups, outs, width)), 1, 2)
        else:
            second = product(t(a), g, (groups, width, outs))
        return {0: lambda: product(g, transpose(b, 1, 2), a.shape), 1: second}

    out = a.new(a.shape[0], outs)
    return _run("_grouped_mm", [a, b], out, backward, reads=[a, b, ends], needs=[(0, ends), (1, a)])


# ---- parts of a tensor, and complex numbers ----


def filled(first: Tensor, second: Tensor) -> Tensor:
    """Copy two tensors into the columns of a new one, in place."""
    tape = first.tape
    whole = first.new(*first.shape[:-1], first.shape[-1] + second.shape[-1])
    base: Tensor | None = None
    for x, skipped in ((first, 0), (second, 2)):
        for _ in range(skipped + 1):
            tape.node([x])  # nodes of the copy itself, and of views of the base
        place = Tensor(tape, x.shape, x.dtype, whole.strides, whole.storage)
        tape.add("copy", [place, x], [place])
        base = _written(whole, base, x)
    assert base is not None
    tape.node([base])  # the base is viewed again
    return base


def _written(whole: Tensor, base: Tensor | None, x: Tensor) -> Tensor:
    """Return `whole` after `x` was written into a part of it; backward copies and cuts `g`."""
    tape, out = whole.tape, whole.overwritten()

    def backward(gradients: Gradients) -> list[Tensor | None]:
        (g,), copied = gradients, _zeros(whole)
        assert g is not None
        tape.add("copy", [copied, g], [copied])
        place = Tensor(tape, x.shape, x.dtype, copied.strides, copied.storage)
        own = clone(place, contiguous_strides(x.shape))
        if base is not None:
            tape.add("copy", [place, _zeros(x)], [place])
        return [copied if base is not None else None, own]

    _joined(tape.node([base, x]), [out], backward)
    return out


def complex_view(x: Tensor) -> Tensor:
    """Pairs of numbers as complex ones."""
    strides = tuple(step // 2 for step in x.strides[:-1])
    return _as(x, x.shape[:-1], strides, real_view, "complex64")


def real_view(x: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    strides = (*(2 * step for step in x.strides), 1)
    return _as(x, (*x.shape, 2), strides, complex_view, "float32")


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Product of complex numbers and constants; the gradient uses their conjugates."""
    return _run(
        "mul", [x], _result(x, turns), lambda g: [_times(g, _zeros(turns))],
        reads=[x, turns], needs=[(0, turns)],
    )  # fmt: skip
