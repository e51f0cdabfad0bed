"""How far off a chip's predictions are on a file of measured operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.cost.machines import machines
from phaze_fast.cost.measurements import Measurements, read_measurements
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator

__all__ = ["ColumnError", "ErrorSizes", "Validation", "column_error", "validate"]

Array = np.ndarray[Any, Any]


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
class Validation:
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
