"""ATen operators: the kind and the sizes of work of each, from its name and shapes.

A name stands for all overloads: ``add`` for ``aten.add.Tensor``, ``aten.add.Scalar`` and
``aten.add_.Tensor``, which writes in place.
"""

from __future__ import annotations

import math

__all__ = [
    "ATTENTION",
    "COPIES",
    "CREATORS",
    "FREE",
    "PRODUCT_OPERANDS",
    "REDUCTIONS",
    "VECTORS",
    "Sizes",
    "attention_sizes",
    "product_sizes",
    "vector_sizes",
]

Sizes = tuple[int, int, int, int]
"""(b, m, k, n)."""
Shape = tuple[int, ...]

PRODUCT_OPERANDS = {
    "linear": (0, 1),
    "mm": (0, 1),
    "bmm": (0, 1),
    "matmul": (0, 1),
    "mv": (0, 1),
    "dot": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
}
"""Positions of the left and right operand among the arguments."""
ATTENTION = "scaled_dot_product_attention"

_VIEWS = """
    alias chunk clone contiguous detach diagonal dropout expand expand_as flatten getitem lift_fresh
    lift_fresh_copy movedim narrow numpy_T permute reshape select slice split split_with_sizes
    squeeze swapaxes t tensor_split to _to_copy transpose type_as unbind unflatten _unsafe_view
    unsqueeze view view_as
    """
_ASSERTIONS = "_assert_async _assert_scalar _assert_tensor_metadata sym_size sym_numel"
CREATORS = frozenset(
    f"{maker}{name}" for name in ("empty", "full", "ones", "zeros") for maker in ("", "new_")
) | {"empty_like", "full_like", "ones_like", "zeros_like"}
"""What takes the shape of an array, at most."""
FREE = frozenset((_VIEWS + _ASSERTIONS).split())
"""What moves no data or none that counts: views, casts, and dropout outside training."""

COPIES = frozenset({"clone", "lift_fresh_copy", "_to_copy"})
"""Those of them that are never a view of what they read."""

_REDUCTIONS = "amax amin cumsum linalg_vector_norm logsumexp mean sum var var_mean"
REDUCTIONS = frozenset(_REDUCTIONS.split())
"""Vector operators whose work is what they read."""

_ELEMENTWISE = """
    abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or cat clamp clamp_max clamp_min
    constant_pad_nd copy cos div eq exp fill flip floor gather ge gt index index_put
    index_select le log logical_and logical_not logical_or lt masked_fill maximum minimum mul ne
    neg pad pow reciprocal repeat repeat_interleave roll round rsqrt rsub scatter sign sin sqrt
    square stack sub tril triu where zero
    """
_ACTIVATIONS = """
    celu elu erf gelu glu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish prelu relu
    relu6 selu sigmoid silu softplus tanh
    """
_NORMS = "batch_norm _fused_rms_norm group_norm layer_norm native_layer_norm rms_norm"
_SOFTMAX = "log_softmax _log_softmax _safe_softmax softmax _softmax"
VECTORS: dict[str, str] = {
    name: kind
    for kind, names in [
        ("elementwise", _ELEMENTWISE + _REDUCTIONS),
        ("activation", _ACTIVATIONS),
        ("norm", _NORMS),
        ("softmax", _SOFTMAX),
        ("embedding", "embedding"),
    ]
    for name in names.split()
}
"""Kind of each operator that is no product."""


def _broadcast(left: Shape, right: Shape) -> int:
    """Elements of two shapes broadcast against each other."""
    longest = max(len(left), len(right))
    padded = [(1,) * (longest - len(shape)) + shape for shape in (left, right)]
    return math.prod(a if b == 1 else b for a, b in zip(*padded, strict=True))


def product_sizes(left: Shape, right: Shape, weights_left: bool = False) -> Sizes:
    """Sizes of left [..., m, k] times right [..., k, n].

    Where the right operand is one matrix, all leading dimensions of the left one are rows. Where
    the weights stand on the left, the product is read as its transpose, weights on the right.

    Examples
    --------
    >>> product_sizes((2, 16, 64), (64, 256))
    (1, 32, 64, 256)
    >>> product_sizes((2, 4, 16, 8), (2, 4, 8, 16))
    (8, 16, 8, 16)
    >>> product_sizes((256, 64), (2, 64, 16), weights_left=True)
    (1, 32, 64, 256)
    """
    left = (1, *left) if len(left) == 1 else left
    right = (*right, 1) if len(right) == 1 else right
    k = left[-1]
    if weights_left:
        if len(left) == 2:
            return 1, math.prod(right[:-2]) * right[-1], k, left[0]
        return _broadcast(left[:-2], right[:-2]), right[-1], k, left[-2]
    if len(right) == 2:
        return 1, math.prod(left[:-1]), k, right[-1]
    return _broadcast(left[:-2], right[:-2]), left[-2], k, right[-1]


def attention_sizes(query: Shape, key: Shape, value: Shape) -> tuple[Sizes, float]:
    """Sizes of softmax(QK^T)V and its FLOPs, 4 b m n k where values are as wide as keys.

    Examples
    --------
    >>> attention_sizes((2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8))
    ((8, 16, 8, 16), 65536.0)
    """
    b, m, k, n = math.prod(query[:-2]), query[-2], query[-1], key[-2]
    return (b, m, k, n), 2.0 * b * m * n * (k + value[-1])


def vector_sizes(shape: Shape) -> Sizes:
    """Rows and columns of an array.

    Examples
    --------
    >>> vector_sizes((2, 16, 64))
    (1, 32, 0, 64)
    """
    columns = shape[-1] if shape else 1
    return 1, math.prod(shape[:-1]), 0, columns
