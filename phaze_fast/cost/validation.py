"""Errors of a chip's predictions on a CSV file of measured operators.

The kind of file is recognised by its header. Lines that begin with ``#`` are comments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from phaze_fast import _core
from phaze_fast.cost.machines import machines
from phaze_fast.cost.operators import VECTOR_FUNCTIONS, attention_ops, product_ops, vector_ops
from phaze_fast.documents import CsvRow, csv_rows
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.hardware import Accelerator
from phaze_fast.hardware.chip import Dtype
from phaze_fast.models import TransformerModel, load
from phaze_fast.models import names as model_names
from phaze_fast.opgraph import Layer, Strategy, layer_graph
from phaze_fast.tables import Array, Brief


@dataclass
class Measurements:
    """Rows of a file: measured values, and the operators of each measured time.

    A value is predicted by the sum of the times of its operators; an operator belongs to one row. A
    column that does not depend on the chip is computed when the file is read.
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
    other_s: list[float] = field(default_factory=list)
    """Seconds to add to each row's operators, where the source is known to include overhead."""
    unsupported: dict[str, int] = field(default_factory=dict)
    """Reasons for skipped rows, and how many each."""

    def add(self, column: str, value: float, ops: Array | None, known: float = math.nan) -> None:
        """Add one measured value of the row that was labelled last."""
        self.measured.setdefault(column, []).append(value)
        if ops is None:
            self.known.setdefault(column, []).append(known)
            return
        self.ops.setdefault(column, []).append(ops)
        self.owner.setdefault(column, []).extend([len(self.labels) - 1] * len(ops))

    def queries(self, column: str) -> tuple[Array, Array]:
        """Return the operators of a column, and the row that each belongs to."""
        return np.concatenate(self.ops[column]), np.array(self.owner[column], dtype=np.intp)


# ---- one row of each kind of file ----

_VECTOR_NAMES = {
    "mul": "multiply",
    "cross_entropy": "cross-entropy",
    "adamw_fused_bf16": "adamw",
}


def _gemm_row(row: CsvRow, into: Measurements) -> None:
    b, m, k, n = (row.whole(name) for name in "bmkn")
    into.labels.append(f"{b}x{m}x{k}x{n}" if b > 1 else f"{m}x{k}x{n}")
    into.add("us_median", row.positive("us_median"), product_ops([(b, m, k, n)]))


def _vector_row(row: CsvRow, into: Measurements) -> None:
    op, size = row.text("op"), ([row.whole("rows")], [row.whole("cols")])
    base = op.removesuffix("_fwd_bwd").removesuffix("_fwd")
    name = _VECTOR_NAMES.get(base, base)
    both = op.endswith("_fwd_bwd")
    wanted = [name, f"{name}-backward"] if both else [name]
    for function in wanted:
        if function not in VECTOR_FUNCTIONS:
            raise row.fault("op", f"a known operator; {nearest(function, VECTOR_FUNCTIONS)}")
    into.labels.append(f"{op} {size[0][0]}x{size[1][0]}")
    ops = np.concatenate([vector_ops(function, *size) for function in wanted])
    into.add("us_median", row.positive("us_median"), ops)


def _attention_row(row: CsvRow, into: Measurements) -> None:
    b, heads, seq, dim = (row.whole(name) for name in ("b", "heads", "seq", "head_dim"))
    if b * heads > 2**40:
        raise row.fault("heads", "at most 2^40 pairs of batch and head")
    causal = row.flag("causal")
    into.labels.append(f"{b}x{heads} heads, {seq}x{dim}{', causal' if causal else ''}")
    for column, backward in (("fwd_us", False), ("bwd_us", True)):
        ops = attention_ops([b * heads], [seq], [dim], [causal], backward)
        into.add(column, row.positive(column), ops)


def _preset_named(name: str) -> TransformerModel:
    """Return the preset of a name; upper case and dashes do not matter."""
    plain = name.lower().replace("-", "")
    for preset in sorted(model_names(), key=lambda preset: preset != name.lower()):
        if preset.replace("-", "") == plain:
            model = load(preset)
            assert isinstance(model, TransformerModel)
            return model
    raise InvalidInputError(
        f"model: {name!r} is unknown; expected the columns hidden, heads and ffn, or a preset; "
        f"{nearest(name, model_names())}"
    )


def _shape(cells: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a model that give the shape of the blocks of a row."""
    name = (cells.get("model") or "").strip()
    if not (cells.get("hidden") or "").strip():
        preset = _preset_named(name)
        fields = ("hidden", "heads", "kv_heads", "ffn", "vocab", "gated", "causal")
        return {field: getattr(preset, field) for field in fields}
    row = CsvRow("", cells)
    return {
        **{column: row.whole(column) for column in ("hidden", "heads", "ffn")},
        "kv_heads": row.whole("kv_heads") if row.text("kv_heads") else None,
        "vocab": row.whole("vocab", 50257),
        "gated": row.flag("gated", False),
        "causal": row.flag("causal", True),
    }


def measured_model(
    cells: Mapping[str, str], seq: int, layers: int = 1, attention: str = "flash"
) -> TransformerModel:
    """Return the model that a row of measurements was taken on, without position embeddings.

    Gated blocks have RMSNorm and SiLU and no biases, as in Llama; others have LayerNorm, GELU and
    biases, as in GPT.

    Parameters
    ----------
    cells
        The row by column: hidden, heads and ffn, perhaps kv_heads (by default heads), vocab (by
        default GPT-2's), gated (False) and causal (True); or model, the name of a preset that has
        this shape.
    seq
        Tokens of a sequence.
    layers
        Number of blocks.
    attention
        ``flash`` or ``eager``.

    Raises
    ------
    InvalidInputError
        Where the row gives neither a shape nor a preset.

    Examples
    --------
    >>> measured_model({"hidden": "512", "heads": "8", "ffn": "2048"}, 4096).head_width
    64
    >>> measured_model({"model": "llama2-7b"}, 4096).kv_heads
    32
    """
    shape = _shape(cells)
    gated, heads = shape["gated"], shape["heads"]
    kv_heads = shape.pop("kv_heads") or heads
    return TransformerModel(
        name=(cells.get("model") or "").strip() or "measured",
        layers=layers,
        seq=seq,
        kv_heads=kv_heads,
        positions="none",
        norm="rmsnorm" if gated else "layernorm",
        activation="silu" if gated else "gelu",
        qkv_bias=not gated,
        out_bias=not gated,
        ffn_bias=not gated,
        attention="flash" if attention == "flash" else "eager",
        fused_qkv=True,
        kv_expanded=kv_heads < heads,
        tied_embeddings=False,
        **shape,
    )


def _measured_block(row: CsvRow) -> Layer:
    if row.text("attention") not in ("flash", "eager"):
        raise row.fault("attention", "flash or eager")
    try:
        model = measured_model(row.cells, row.whole("seq"), attention=row.text("attention"))
    except InvalidInputError as error:
        raise InvalidInputError(f"{row.where}: {error}") from None
    layers = layer_graph(model, Strategy(micro_batch=row.whole("mbs"))).layers
    return next(layer for layer in layers if layer.kind == "block")


def _layer_row(row: CsvRow, into: Measurements) -> None:
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
_KERNELS = {  # by the suffix of `kernel_source`
    "_fa3": "flash3",
    "flash_attn": "flash2",
    "trtllmprefill": "cudnn",
}
_WIDEST_HEAD = 256  # of flash attention 2 and 3
# A serving library has a set-up time per call and copies keys and values into its cache, at the
# rate of its copy kernel; both are the same on every chip (docs/cost.md).
_SERVING_CALL_S = 9e-6
_CACHE_BYTES_PER_S = 2e12


def _format_row(row: CsvRow, into: Measurements) -> None:
    m, k, n = (row.whole(name) for name in "mkn")
    dtype = _FORMATS.get(row.text("format"))
    if dtype is None:
        raise row.fault("format", f"one of {', '.join(_FORMATS)}")
    if into.labels and dtype != into.dtype:
        raise row.fault("format", f"the format of the rows above, {into.dtype}: one file for each")
    into.dtype = cast(Dtype, dtype)
    into.labels.append(f"{m}x{k}x{n} {row.text('format')}")
    into.add("us_median", row.positive("us_median"), product_ops([(1, m, k, n)]))


def _grouped_row(row: CsvRow, into: Measurements) -> None:
    experts, tokens, k, n = (row.whole(name) for name in ("experts", "tokens", "k", "n"))
    if tokens < experts:
        raise row.fault("tokens", "at least one for each expert")
    into.labels.append(f"{experts} experts, {tokens} tokens, {k}x{n}")
    tokens_each = -(-tokens // experts)
    into.add("us_median", row.positive("us_median"), product_ops([(experts, tokens_each, k, n)]))


def _left_out(into: Measurements, why: str) -> None:
    into.unsupported[why] = into.unsupported.get(why, 0) + 1


def _serving_row(row: CsvRow, into: Measurements) -> None:
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
    into.other_s.append(_SERVING_CALL_S + 4.0 * token * kv_heads / _CACHE_BYTES_PER_S)
    into.add("latency_ms", took, ops)
    return None


_KINDS: dict[str, tuple[frozenset[str], Callable[[CsvRow, Measurements], None]]] = {
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
"""By kind of file: the columns by which it is recognised, and the function that reads a row."""


def _kind_of(path: Path | str, header: Iterable[str]) -> str:
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
    header, rows = csv_rows(path)
    kind = _kind_of(path, header)
    measurements = Measurements(kind)
    for line, cells in rows:
        _KINDS[kind][1](CsvRow(f"{path}, line {line}", cells), measurements)
    if not measurements.labels:
        why = "; ".join(measurements.unsupported) or "there are no rows below the header"
        raise InvalidInputError(f"{path}: {why}")
    return measurements


# ---- errors of predictions ----


@dataclass(frozen=True)
class ErrorSizes:
    """Relative errors of one column, as fractions."""

    rows: int
    mean_abs_err: float
    median_abs_err: float
    p90_abs_err: float
    """90th percentile."""
    max_abs_err: float
    bias: float
    """Mean of the signed errors; positive where predictions are too high."""

    @staticmethod
    def sizes(measured: Array, predicted: Array) -> dict[str, Any]:
        """Return the fields of this record, of predictions in the unit of what is measured."""
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
    """Errors of predictions of operators, and the errors after scaling by one common factor."""

    scale: float
    """Median of measured over predicted: one factor common to all rows."""
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
    """Reasons for skipped rows, and how many each."""

    def worst(self, count: int = 5) -> list[tuple[str, str, float, float, float]]:
        """(row, column, measured, predicted, error) of the largest errors, largest first."""
        rows = [
            (label, column, float(y), float(x), float(x / y - 1.0))
            for column in self.columns
            for label, y, x in zip(
                self.labels, self.measured[column], self.predicted[column], strict=True
            )
        ]
        return sorted(rows, key=lambda row: -abs(row[4]))[:count]


def column_error(measured: Array, predicted: Array) -> ColumnError:
    """Return the errors of predictions, both arrays in one unit."""
    scale = float(np.median(measured / predicted))
    return ColumnError(
        **ErrorSizes.sizes(measured, predicted),
        scale=scale,
        scaled_mean_abs_err=float(np.abs(predicted * scale / measured - 1.0).mean()),
    )


def validate(path: Path | str, chip: Accelerator) -> Validation:
    r"""Predict every row of a file of measurements on a chip and return the errors.

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
        The chip whose times are predicted, in microseconds as measured.

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
    measurements = read_measurements(path)
    if measurements.kernel in chip.tuning.attention_kernels:
        chip = chip.with_attention(measurements.kernel)
    predicted = {
        column: np.array(measurements.known[column])
        if column in measurements.known
        else _predicted(path, measurements, column, chip)
        for column in measurements.measured
    }
    measured = {column: np.array(values) for column, values in measurements.measured.items()}
    return Validation(
        chip=chip.name,
        kind=measurements.kind,
        labels=tuple(measurements.labels),
        measured=measured,
        predicted=predicted,
        columns={c: column_error(measured[c], predicted[c]) for c in measured},
        unsupported=measurements.unsupported,
    )


def _predicted(
    path: Path | str, measurements: Measurements, column: str, chip: Accelerator
) -> Array:
    """Return one column's predicted times, in the unit of the column."""
    machine = machines(chip, dtype=measurements.dtype)
    ops, owner = measurements.queries(column)
    times = _core.op_times(ops, *machine.arguments, False, 1)
    if not np.isfinite(times).all():
        bad = int(np.flatnonzero(~np.isfinite(times))[0])
        row = _core.op_costs(
            ops[bad : bad + 1], *machine.arguments, False, machine.prices, machine.static_w, 1
        )
        reason = _core.STATUS_SENTENCES[int(row["status"][0])]
        raise InvalidInputError(f"{path}: {measurements.labels[int(owner[bad])]}: {reason}")
    seconds = np.bincount(owner, weights=times, minlength=len(measurements.labels))
    other_s = np.array(measurements.other_s) if measurements.other_s else 0.0
    total: Array = (seconds + other_s + chip.tuning.dispatch_s) / measurements.unit_s
    return total
