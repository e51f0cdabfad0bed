"""Rows of measured kernels beyond plain products: other formats, experts, attention in serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np

from phaze_fast.cost.operators import attention_ops, product_ops
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware.chip import Dtype

__all__ = ["KERNEL_KINDS"]

Array = np.ndarray[Any, Any]

_FORMATS = {"e4m3": "fp8", "e5m2": "fp8", "fp8": "fp8", "bf16": "bf16", "fp16": "fp16"}
_KERNELS = {  # by the ends of a source's names
    "_fa3": "flash3",
    "flash_attn": "flash2",
    "trtllmprefill": "cudnn",
}
_WIDEST_HEAD = 256  # of flash attention 2 and 3
# A serving library prepares each call, and writes keys and values into its cache: read and written
# once, at what its kernel reaches on every chip alike (docs/cost.md).
_SERVING_CALL_S = 9e-6
_CACHE_BYTES_PER_S = 2e12


class _Row(Protocol):
    def fault(self, column: str, wanted: str) -> InvalidInputError: ...
    def text(self, column: str) -> str: ...
    def whole(self, column: str) -> int: ...
    def positive(self, column: str) -> float: ...


class _Table(Protocol):
    labels: list[str]
    dtype: Dtype
    kernel: str
    unit_s: float
    beside_s: list[float]
    unsupported: dict[str, int]

    def add(self, column: str, value: float, ops: Array | None) -> None: ...


def _format_row(row: _Row, into: _Table) -> None:
    m, k, n = (row.whole(name) for name in "mkn")
    dtype = _FORMATS.get(row.text("format"))
    if dtype is None:
        raise row.fault("format", f"one of {', '.join(_FORMATS)}")
    if into.labels and dtype != into.dtype:
        raise row.fault("format", f"the format of the rows above, {into.dtype}: one file for each")
    into.dtype = cast(Dtype, dtype)
    into.labels.append(f"{m}x{k}x{n} {row.text('format')}")
    into.add("us_median", row.positive("us_median"), product_ops([(1, m, k, n)]))


def _grouped_row(row: _Row, into: _Table) -> None:
    experts, tokens, k, n = (row.whole(name) for name in ("experts", "tokens", "k", "n"))
    if tokens < experts:
        raise row.fault("tokens", "at least one for each expert")
    into.labels.append(f"{experts} experts, {tokens} tokens, {k}x{n}")
    each = -(-tokens // experts)
    into.add("us_median", row.positive("us_median"), product_ops([(experts, each, k, n)]))


def _left_out(into: _Table, why: str) -> None:
    into.unsupported[why] = into.unsupported.get(why, 0) + 1


def _serving_row(row: _Row, into: _Table) -> None:
    batch, seq, heads, kv_heads, width = (
        row.whole(name)
        for name in ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
    )
    source, took = row.text("kernel_source"), row.positive("latency_ms")
    kernel = next((name for end, name in _KERNELS.items() if source.endswith(end)), "")
    if not kernel:
        return _left_out(into, f"kernel_source {source}: no such kernel is known")
    if width > _WIDEST_HEAD:
        return _left_out(into, f"head_dim above {_WIDEST_HEAD}: {kernel} has no such kernel")
    if into.kernel and into.kernel != kernel:
        return _left_out(into, f"kernel_source {source}: the rows above ran {into.kernel}")
    into.kernel, into.unit_s = kernel, 1e-3
    into.labels.append(f"{batch}x{heads} heads ({kv_heads} of keys), {seq}x{width}, causal")
    ops = attention_ops([batch * heads], [seq], [width], [True])
    token = 2.0 * batch * seq * width  # bytes of one head
    ops["read_bytes"], ops["write_bytes"] = token * (heads + 2 * kv_heads), token * heads
    into.beside_s.append(_SERVING_CALL_S + 4.0 * token * kv_heads / _CACHE_BYTES_PER_S)
    into.add("latency_ms", took, ops)
    return None


KERNEL_KINDS: dict[str, tuple[frozenset[str], Callable[[Any, Any], None]]] = {
    "format": (frozenset({"m", "k", "n", "format", "us_median"}), _format_row),
    "grouped": (frozenset({"experts", "tokens", "k", "n", "us_median"}), _grouped_row),
    "serving attention": (
        frozenset(
            {
                "batch_size",
                "isl",
                "num_heads",
                "num_key_value_heads",
                "head_dim",
                "kernel_source",
                "latency_ms",
            }
        ),
        _serving_row,
    ),
}
"""Columns that name each kind of file, and how a row of it is read."""
