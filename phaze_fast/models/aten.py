"""ATen operators: the kind and the sizes of work of each, from its name and the arrays it reads.

A name covers all overloads and the in-place form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_COPIES = """
    _to_copy clone copy cat stack index index_select gather slice_backward select_backward
    constant_pad_nd flip roll repeat as_strided_scatter slice_scatter select_scatter fill zero
    index_put index_add index_copy scatter scatter_add masked_scatter _index_put_impl
    _unsafe_index _unsafe_index_put index_fill tril triu lift_fresh_copy diagonal_backward
    unfold_backward upsample_nearest2d upsample_bilinear2d upsample_nearest2d_backward
    upsample_bilinear2d_backward reflection_pad1d reflection_pad2d reflection_pad1d_backward
    reflection_pad2d_backward im2col col2im split_with_sizes_copy permute_copy _reshape_copy
    trace_backward value_selecting_reduction_backward bernoulli normal uniform
    """
_ELEMENTWISE = """
    mul div pow neg reciprocal sqrt rsqrt exp exp2 expm1 log log2 log1p sin cos abs sign clamp
    clamp_min clamp_max maximum minimum where masked_fill eq ne lt le gt ge logical_and logical_or
    logical_not bitwise_and bitwise_or bitwise_not bitwise_xor square erf erfinv floor ceil round
    trunc frac remainder fmod addcmul addcdiv lerp atan2 isnan isinf nan_to_num cumsum cumprod
    sum mean amax amin max min argmax argmin var var_mean std std_mean prod any all norm
    linalg_vector_norm logsumexp _logcumsumexp logcumsumexp topk sort nll_loss_forward
    nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward
    smooth_l1_loss smooth_l1_loss_backward binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits max_pool2d_with_indices max_pool2d_with_indices_backward
    avg_pool2d avg_pool2d_backward avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward avg_pool3d avg_pool3d_backward max_pool3d_with_indices
    max_pool3d_with_indices_backward native_dropout_backward bincount histc one_hot searchsorted
    bucketize kl_div xlogy tan sinh cosh asinh acosh atanh asin acos atan cross dist cdist
    _cdist_forward hypot heaviside copysign gather_backward sgn angle digamma lgamma polygamma
    _foreach_mul _foreach_add masked_select_backward view_as_complex complex polar dot vdot outer
    _local_scalar_dense equal isfinite relu_backward floor_divide argsort repeat_interleave
    bitwise_left_shift bitwise_right_shift multinomial true_divide
    """
_KINDS = {
    "add": ("multiply", "add"),
    "sub": ("multiply", "add"),
    "rsub": ("multiply", "add"),
    "embedding": ("embedding", "embedding"),
    "embedding_dense_backward": ("embedding-backward", ""),
    "native_dropout": ("dropout", ""),
    "dropout": ("dropout", ""),
    **dict.fromkeys(_COPIES.split(), ("multiply", "copy")),
    **dict.fromkeys(_ELEMENTWISE.split(), ("multiply", "multiply")),
    **{
        name: ("norm", function)
        for name, function in {
            "native_layer_norm": "layernorm",
            "native_group_norm": "layernorm",
            "native_batch_norm": "layernorm",
            "_native_batch_norm_legit": "layernorm",
            "cudnn_batch_norm": "layernorm",
            "_batch_norm_with_update": "layernorm",
            "_fused_rms_norm": "rmsnorm",
        }.items()
    },
    **{
        name: ("norm-backward", function)
        for name, function in {
            "native_layer_norm_backward": "layernorm",
            "native_group_norm_backward": "layernorm",
            "native_batch_norm_backward": "layernorm",
            "batch_norm_backward": "layernorm",
            "_fused_rms_norm_backward": "rmsnorm",
        }.items()
    },
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), ("softmax", "")),
    "_softmax_backward_data": ("softmax-backward", ""),
    "_log_softmax_backward_data": ("softmax-backward", ""),
}
_CURVES = {"gelu": "gelu", "relu": "relu", "threshold": "relu", "hardtanh": "relu"}
_OTHER_CURVES = """
    silu tanh sigmoid softplus elu celu selu mish hardswish hardsigmoid leaky_relu log_sigmoid
    log_sigmoid_forward prelu _prelu_kernel glu rrelu_with_noise
    """
_CURVES |= dict.fromkeys(_OTHER_CURVES.split(), "silu")
_KINDS |= {name: ("activation", curve) for name, curve in _CURVES.items()}
_KINDS |= {f"{name}_backward": ("activation-backward", c) for name, c in _CURVES.items()}
_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "_grouped_mm": (0, 1)}
_OTHERS = ("attention", "attention_backward", "convolution", "convolution_input")
_SOLVED = "linalg_solve_triangular"
KNOWN = frozenset({*_KINDS, *_PRODUCTS, *_OTHERS, "convolution_weight", _SOLVED})
"""Operators whose work is known."""


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
    kind, function = _KINDS[call.name]
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
