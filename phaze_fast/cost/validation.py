"""Errors of a chip's predictions on a CSV file of measured operators.

The kind of file is recognised by its header. Lines that begin with ``#`` are comments.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from phaze_fast import _core
from phaze_fast.cost.machines import machines
from phaze_fast.cost.operators import attention_ops, product_ops, vector_ops
from phaze_fast.documents import read_text
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.hardware import Accelerator
from phaze_fast.hardware.chip import Dtype
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import Layer, Strategy, layer_graph
from phaze_fast.tables import Brief

__all__ = [
    "ColumnError",
    "ErrorSizes",
    "Measurements",
    "Validation",
    "column_error",
    "measured_model",
    "read_measurements",
    "validate",
]

Array = np.ndarray[Any, Any]


@dataclass
class Measurements:
    """Rows of a file: what was measured, and the operators that should take that long.

    A column is predicted by the sum over its operators, of which each belongs to one row, or, if it
    does not depend on the chip, is known beforehand.
    """

    kind: str
    labels: list[str] = field(default_factory=list)
    measured: dict[str, list[float]] = field(default_factory=dict)
    ops: dict[str, list[Array]] = field(default_factory=dict)
    owner: dict[str, list[int]] = field(default_factory=dict)
    known: dict[str, list[float]] = field(default_factory=dict)
    dtype: Dtype = "bf16"
    """Number format of the products."""
    kernel: str = ""
    """Fused attention kernel that ran; empty = the chip's own."""
    unit_s: float = 1e-6
    """Seconds of one unit of the columns that are times."""
    beside_s: list[float] = field(default_factory=list)
    """What each row took beside its operators, where a source is known to."""
    unsupported: dict[str, int] = field(default_factory=dict)
    """Why rows were left out, and how many."""

    def add(self, column: str, value: float, ops: Array | None, known: float = math.nan) -> None:
        """Note one measured value of the row that was labelled last."""
        self.measured.setdefault(column, []).append(value)
        if ops is None:
            self.known.setdefault(column, []).append(known)
            return
        self.ops.setdefault(column, []).append(ops)
        self.owner.setdefault(column, []).extend([len(self.labels) - 1] * len(ops))

    def queries(self, column: str) -> tuple[Array, Array]:
        """Operators of a column and the row each belongs to."""
        return np.concatenate(self.ops[column]), np.array(self.owner[column], dtype=np.intp)


# ---- one row of each kind of file ----

_VECTOR_NAMES = {
    "mul": "multiply",
    "cross_entropy": "cross-entropy",
    "adamw_fused_bf16": "adamw",
}
_BLOCKS = {  # hidden, heads, key-value heads, feed-forward, Llama's kind of block
    "bertlarge": (1024, 16, 16, 4096, False),
    "gpt2xl": (1600, 25, 25, 6400, False),
    "opt1.3b": (2048, 32, 32, 8192, False),
    "gpt2-8.3b": (3072, 24, 24, 12288, False),
    "llama2-7b": (4096, 32, 32, 11008, True),
    "llama3-8b": (4096, 32, 8, 14336, True),
    "gpt3-175b": (12288, 96, 96, 49152, False),
}


class _Row:
    """One line of the file, whose faults name the line and the column."""

    def __init__(self, path: Path, line: int, cells: dict[str, str]) -> None:
        self.where, self.cells = f"{path}, line {line}", cells

    def fault(self, column: str, wanted: str) -> InvalidInputError:
        value = self.cells.get(column)
        return InvalidInputError(
            f"{self.where}: {column}: {value!r} is not accepted; expected {wanted}"
        )

    def text(self, column: str) -> str:
        return (self.cells.get(column) or "").strip()

    def whole(self, column: str) -> int:
        try:
            value = int(self.text(column))
        except ValueError:
            value = 0
        if not 1 <= value <= 2**40:
            raise self.fault(column, "a whole number from 1 to 2^40")
        return value

    def positive(self, column: str) -> float:
        try:
            value = float(self.text(column))
        except ValueError:
            value = math.nan
        if not 1e-9 <= value <= 1e18:
            raise self.fault(column, "a number from 1e-9 to 1e18")
        return value

    def flag(self, column: str) -> bool:
        if self.text(column) not in ("True", "False"):
            raise self.fault(column, "True or False")
        return self.text(column) == "True"


def _gemm_row(row: _Row, into: Measurements) -> None:
    b, m, k, n = (row.whole(name) for name in "bmkn")
    into.labels.append(f"{b}x{m}x{k}x{n}" if b > 1 else f"{m}x{k}x{n}")
    into.add("us_median", row.positive("us_median"), product_ops([(b, m, k, n)]))


def _vector_row(row: _Row, into: Measurements) -> None:
    op, size = row.text("op"), ([row.whole("rows")], [row.whole("cols")])
    base = op.removesuffix("_fwd_bwd").removesuffix("_fwd")
    name = _VECTOR_NAMES.get(base, base)
    both = op.endswith("_fwd_bwd")
    wanted = [name, f"{name}-backward"] if both else [name]
    for function in wanted:
        if function not in _core.FUNCTIONS[4:]:
            raise row.fault("op", f"a known operator; {nearest(function, _core.FUNCTIONS[4:])}")
    into.labels.append(f"{op} {size[0][0]}x{size[1][0]}")
    ops = np.concatenate([vector_ops(function, *size) for function in wanted])
    into.add("us_median", row.positive("us_median"), ops)


def _attention_row(row: _Row, into: Measurements) -> None:
    b, heads, seq, dim = (row.whole(name) for name in ("b", "heads", "seq", "head_dim"))
    if b * heads > 2**40:
        raise row.fault("heads", "at most 2^40 pairs of batch and head")
    causal = row.flag("causal")
    into.labels.append(f"{b}x{heads} heads, {seq}x{dim}{', causal' if causal else ''}")
    for column, backward in (("fwd_us", False), ("bwd_us", True)):
        ops = attention_ops([b * heads], [seq], [dim], [causal], backward)
        into.add(column, row.positive(column), ops)


def measured_model(
    name: str, seq: int, layers: int = 1, vocab: int = 1000, attention: str = "flash"
) -> TransformerModel:
    """Give the model that measured blocks and steps were made of, without positions.

    Raises
    ------
    InvalidInputError
        Where no such block was measured.

    Examples
    --------
    >>> measured_model("llama2-7b", 4096).kv_heads
    32
    """
    if name not in _BLOCKS:
        raise InvalidInputError(f"model: {name!r} is unknown; {nearest(name, _BLOCKS)}")
    hidden, heads, kv_heads, ffn, llama = _BLOCKS[name]
    return TransformerModel(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        seq=seq,
        positions="none",
        causal=name != "bertlarge",
        norm="rmsnorm" if llama else "layernorm",
        activation="silu" if llama else "gelu",
        gated=llama,
        qkv_bias=not llama,
        out_bias=not llama,
        ffn_bias=not llama,
        attention="flash" if attention == "flash" else "eager",
        fused_qkv=True,
        kv_expanded=kv_heads < heads,
        tied_embeddings=False,
    )


def _measured_block(row: _Row) -> Layer:
    name = row.text("model")
    if name not in _BLOCKS:
        raise row.fault("model", f"a known block; {nearest(name, _BLOCKS)}")
    if row.text("attention") not in ("flash", "eager"):
        raise row.fault("attention", "flash or eager")
    model = measured_model(name, row.whole("seq"), attention=row.text("attention"))
    layers = layer_graph(model, Strategy(micro_batch=row.whole("mbs"))).layers
    return next(layer for layer in layers if layer.kind == "block")


def _layer_row(row: _Row, into: Measurements) -> None:
    block = _measured_block(row)
    forward, backward = block.forward, block.backward
    into.labels.append(f"{row.text('model')} {row.text('seq')}x{row.text('mbs')}")
    columns = {
        "fwd_us": forward.ops,
        "bwd_us": backward.ops,
        "fwd_bwd_us": np.concatenate([forward.ops, backward.ops]),
    }
    for column, ops in columns.items():
        into.add(column, row.positive(column), ops)
    into.add("stashed_bytes", row.positive("stashed_bytes"), None, forward.stashed_bytes())


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


def _format_row(row: _Row, into: Measurements) -> None:
    m, k, n = (row.whole(name) for name in "mkn")
    dtype = _FORMATS.get(row.text("format"))
    if dtype is None:
        raise row.fault("format", f"one of {', '.join(_FORMATS)}")
    if into.labels and dtype != into.dtype:
        raise row.fault("format", f"the format of the rows above, {into.dtype}: one file for each")
    into.dtype = cast(Dtype, dtype)
    into.labels.append(f"{m}x{k}x{n} {row.text('format')}")
    into.add("us_median", row.positive("us_median"), product_ops([(1, m, k, n)]))


def _grouped_row(row: _Row, into: Measurements) -> None:
    experts, tokens, k, n = (row.whole(name) for name in ("experts", "tokens", "k", "n"))
    if tokens < experts:
        raise row.fault("tokens", "at least one for each expert")
    into.labels.append(f"{experts} experts, {tokens} tokens, {k}x{n}")
    each = -(-tokens // experts)
    into.add("us_median", row.positive("us_median"), product_ops([(experts, each, k, n)]))


def _left_out(into: Measurements, why: str) -> None:
    into.unsupported[why] = into.unsupported.get(why, 0) + 1


def _serving_row(row: _Row, into: Measurements) -> None:
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


_KINDS: dict[str, tuple[frozenset[str], Callable[[_Row, Measurements], None]]] = {
    "gemm": (frozenset({"op", "b", "m", "k", "n", "us_median"}), _gemm_row),
    "vector": (frozenset({"op", "rows", "cols", "us_median"}), _vector_row),
    "attention": (
        frozenset({"b", "heads", "seq", "head_dim", "causal", "fwd_us", "bwd_us"}),
        _attention_row,
    ),
    "layer": (
        frozenset(
            {"model", "seq", "mbs", "attention", "fwd_us", "bwd_us", "fwd_bwd_us", "stashed_bytes"}
        ),
        _layer_row,
    ),
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


def _kind_of(path: Path, header: Iterable[str]) -> str:
    columns = frozenset(header)
    for kind, (needed, _) in _KINDS.items():
        if needed <= columns:
            return kind
    for name in columns:
        if ";" in name or "\t" in name:
            raise InvalidInputError(f"{path}: columns must be separated by commas")
    accepted = "; ".join(f"{kind}: {','.join(sorted(c))}" for kind, (c, _) in _KINDS.items())
    raise InvalidInputError(
        f"{path}: the columns {','.join(sorted(columns)) or '(none)'} are of no known kind; "
        f"expected at least {accepted}"
    )


def read_measurements(path: Path | str) -> Measurements:
    """Read a file of measured operators.

    Raises
    ------
    InvalidInputError
        Where the file cannot be read, its header is of no known kind, or a cell is not accepted.
    """
    path = Path(path)
    text = read_text(path).removeprefix("\ufeff")  # spreadsheets begin with a byte-order mark
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.startswith("#")
    ]
    reader = csv.DictReader((line for _, line in lines), strict=True)
    try:
        kind = _kind_of(path, [name.strip() for name in reader.fieldnames or ()])
        reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        found = Measurements(kind)
        for (number, _), cells in zip(lines[1:], reader, strict=False):
            _KINDS[kind][1](_Row(path, number, cells), found)
    except csv.Error as error:
        raise InvalidInputError(f"{path}: not a CSV file: {error}") from None
    left_out = sum(found.unsupported.values())
    if len(found.labels) + left_out not in (0, len(lines) - 1):
        raise InvalidInputError(f"{path}: a quoted cell spans lines; expected one row a line")
    if not found.labels:
        why = "; ".join(found.unsupported) or "there are no rows below the header"
        raise InvalidInputError(f"{path}: {why}")
    return found


# ---- errors of predictions ----


@dataclass(frozen=True)
class ErrorSizes:
    """Relative errors of one column, as fractions."""

    rows: int
    mean_abs_err: float
    median_abs_err: float
    p90_abs_err: float
    """Nine of ten rows are off by less."""
    max_abs_err: float
    bias: float
    """Mean of the signed errors; positive where predictions are too high."""

    @staticmethod
    def sizes(measured: Array, predicted: Array) -> dict[str, Any]:
        """Work out the fields of this record, both arrays in one unit."""
        errors = predicted / measured - 1.0
        size = np.abs(errors)
        return {
            "rows": len(errors),
            "mean_abs_err": float(size.mean()),
            "median_abs_err": float(np.median(size)),
            "p90_abs_err": float(np.quantile(size, 0.9)),
            "max_abs_err": float(size.max()),
            "bias": float(errors.mean()),
        }


@dataclass(frozen=True)
class ColumnError(ErrorSizes):
    """Errors of predictions of operators, as they are and up to one factor."""

    scale: float
    """Median of measured over predicted: the one factor by which a source may differ."""
    scaled_mean_abs_err: float
    """Mean error once all predictions are multiplied by `scale`."""


@dataclass(frozen=True)
class Validation(Brief):
    """Predictions against a file of measurements."""

    chip: str
    kind: str
    labels: tuple[str, ...]
    measured: dict[str, Array]
    predicted: dict[str, Array]
    columns: dict[str, ColumnError]
    unsupported: dict[str, int] = field(default_factory=dict)
    """Why rows were left out, and how many."""

    def worst(self, count: int = 5) -> list[tuple[str, str, float, float, float]]:
        """(row, column, measured, predicted, error) of the largest errors, largest first."""
        found = [
            (label, column, float(y), float(x), float(x / y - 1.0))
            for column in self.columns
            for label, y, x in zip(
                self.labels, self.measured[column], self.predicted[column], strict=True
            )
        ]
        return sorted(found, key=lambda row: -abs(row[4]))[:count]


def column_error(measured: Array, predicted: Array) -> ColumnError:
    """Sum up the errors of predictions, both in one unit."""
    scale = float(np.median(measured / predicted))
    return ColumnError(
        **ErrorSizes.sizes(measured, predicted),
        scale=scale,
        scaled_mean_abs_err=float(np.abs(predicted * scale / measured - 1.0).mean()),
    )


def validate(path: Path | str, chip: Accelerator) -> Validation:
    r"""Predict every row of a file of measurements on a chip and say how far off it is.

    Parameters
    ----------
    path
        CSV with the columns of matrix products (op, b, m, k, n, us_median), vector operators (op,
        rows, cols, us_median), attention (b, heads, seq, head_dim, causal, fwd_us, bwd_us),
        transformer blocks (model, seq, mbs, attention, fwd_us, bwd_us, fwd_bwd_us, stashed_bytes),
        products in another format (m, k, n, format, us_median), grouped products (experts, tokens,
        k, n, us_median) or attention as serving libraries run it (batch_size, isl, num_heads,
        num_key_value_heads, head_dim, kernel_source, latency_ms).
    chip
        Whose times to predict, in microseconds as measured.

    Raises
    ------
    InvalidInputError
        Where the file is not accepted, or a row is too large for the model.

    Examples
    --------
    >>> import tempfile
    >>> from phaze_fast.hardware import presets
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "mine.csv"
    ...     _ = file.write_text("op,b,m,k,n,us_median\nmm,1,2048,4096,4096,100.0\n")
    ...     found = validate(file, presets.chip("h200"))
    >>> found.columns["us_median"].rows
    1
    """
    found = read_measurements(path)
    if found.kernel in chip.tuning.attention_kernels:
        chip = chip.with_attention(found.kernel)
    predicted = {
        column: np.array(found.known[column])
        if column in found.known
        else _predicted(path, found, column, chip)
        for column in found.measured
    }
    measured = {column: np.array(values) for column, values in found.measured.items()}
    return Validation(
        chip=chip.name,
        kind=found.kind,
        labels=tuple(found.labels),
        measured=measured,
        predicted=predicted,
        columns={c: column_error(measured[c], predicted[c]) for c in measured},
        unsupported=found.unsupported,
    )


def _predicted(path: Path | str, found: Measurements, column: str, chip: Accelerator) -> Array:
    """One column's times, in its unit."""
    asked = machines(chip, dtype=found.dtype)
    ops, owner = found.queries(column)
    times = _core.op_times(ops, *asked.arguments, False, 1)
    if not np.isfinite(times).all():
        bad = int(np.flatnonzero(~np.isfinite(times))[0])
        row = _core.op_costs(
            ops[bad : bad + 1], *asked.arguments, False, asked.prices, asked.static_w, 1
        )
        said = _core.STATUS_SENTENCES[int(row["status"][0])]
        raise InvalidInputError(f"{path}: {found.labels[int(owner[bad])]}: {said}")
    seconds = np.bincount(owner, weights=times, minlength=len(found.labels))
    beside = np.array(found.beside_s) if found.beside_s else 0.0
    total: Array = (seconds + beside + chip.tuning.dispatch_s) / found.unit_s
    return total
