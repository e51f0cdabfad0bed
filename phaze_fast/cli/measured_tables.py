"""Tables and data that `validate` prints of measured operators and collectives."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from phaze_fast.calibration import CollectiveValidation
from phaze_fast.cli.output import table
from phaze_fast.cost import Validation
from phaze_fast.hardware import Calibration

__all__ = ["collective_parts", "validation_data", "validation_parts"]

_WORST = 8


def validation_data(found: Validation, calibration: Calibration) -> dict[str, Any]:
    """Give errors of operators as plain data."""
    return {
        "chip": found.chip,
        "kind": found.kind,
        "columns": {name: vars(error) for name, error in found.columns.items()},
        "unsupported": found.unsupported,
        "calibration": calibration.to_dict(),
    }


def validation_parts(found: Validation) -> list[RenderableType]:
    """Lay errors of operators out as tables."""
    rows = [
        [
            name,
            str(error.rows),
            f"{error.mean_abs_err:.1%}",
            f"{error.median_abs_err:.1%}",
            f"{error.max_abs_err:.1%}",
            f"{error.bias:+.1%}",
            f"{error.scaled_mean_abs_err:.1%} (x {error.scale:.3f})",
        ]
        for name, error in found.columns.items()
    ]
    headings = ["column", "rows>", "mean>", "median>", "max>", "bias>", "after one scale>"]
    title = f"{found.chip} against measured {found.kind} rows: relative errors without sign"
    worst = [
        [label, column, f"{measured:,.4g}", f"{predicted:,.4g}", f"{error:+.1%}"]
        for label, column, measured, predicted, error in found.worst(_WORST)
    ]
    columns = ["row", "column", "measured>", "predicted>", "error>"]
    return [table(title, headings, rows), table("worst rows", columns, worst)]


def collective_parts(found: CollectiveValidation) -> list[RenderableType]:
    """Lay errors of collectives out as a table."""
    headings = ["rows of", "rows>", "mean>", "median>", "max>", "bias>"]
    listed = {**found.columns, **found.groups}
    rows = [
        [
            name,
            str(error.rows),
            f"{error.mean_abs_err:.1%}",
            f"{error.median_abs_err:.1%}",
            f"{error.max_abs_err:.1%}",
            f"{error.bias:+.1%}",
        ]
        for name, error in listed.items()
    ]
    return [table("collectives against measured ones: relative errors", headings, rows)]
