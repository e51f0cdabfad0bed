"""A page about predictions and measurements: scatter by source, errors, the worst rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from phaze_fast.calibration import (
    CollectiveValidation,
    ErrorSummary,
    RunValidation,
    StepValidation,
    summarise,
)
from phaze_fast.cost import Validation
from phaze_fast.errors import InvalidInputError
from phaze_fast.planning import NOMINAL
from phaze_fast.report.figures import Point, points_figure
from phaze_fast.report.render import render
from phaze_fast.report.text import MISSING, count, is_number, percent, seconds, size
from phaze_fast.units import GIB

AnyValidation = RunValidation | StepValidation | Validation | CollectiveValidation

_MAX_WORST = 20
_MIN_POINTS = 3
"""Fewest rows for which a chart is drawn."""


class _Row(NamedTuple):
    """One row of measurements."""

    group: str
    label: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The relative error, positive where the prediction is too high."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True)
class _Quantity:
    """One quantity, measured and predicted, in seconds or bytes."""

    title: str
    """Title of the chart, such as ``Seconds of a step``."""
    by: str
    """What the rows are grouped by, such as ``source``."""
    is_bytes: bool
    rows: list[_Row]

    def format(self, value: float) -> str:
        """Format a value with its unit."""
        return size(value) if self.is_bytes else seconds(value)

    def errors(self, group: str | None = None) -> ErrorSummary:
        """Summarise the errors of a group, or of all rows."""
        rows = [row for row in self.rows if group in (None, row.group)]
        return summarise([row.measured for row in rows], [row.predicted for row in rows])

    def figure(self) -> dict[str, Any] | None:
        """Draw predicted against measured values, with a mark for each group."""
        scale = GIB if self.is_bytes else 1.0
        points = []
        for row in self.rows:
            if is_number(row.measured) and is_number(row.predicted):
                measured, predicted = map(self.format, (row.measured, row.predicted))
                text = f"{row.label}: measured {measured}, predicted {predicted}, {row.error:+.1%}"
                place = (row.measured / scale, row.predicted / scale)
                points.append(Point(row.group, *place, text))
        if len(points) < _MIN_POINTS:
            return None
        return points_figure(
            points, "Measured", "Predicted", "GiB" if self.is_bytes else "s", diagonal=True
        )

    def error_rows(self) -> list[list[str]]:
        """Summarise the errors of each group, and of all rows where there are several groups."""
        groups = {row.group: self.errors(row.group) for row in self.rows}
        if len(groups) > 1:
            groups["all"] = self.errors()
        return [_error_row(name, errors) for name, errors in groups.items()]

    def worst_rows(self) -> list[list[str]]:
        """List the rows with the largest errors, largest first."""
        worst = sorted(self.rows, key=lambda row: -abs(row.error))[:_MAX_WORST]
        rows = []
        for row in worst:
            values = [self.format(value) for value in (row.measured, row.predicted)]
            rows.append([row.label, row.group, *values, percent(row.error, signed=True)])
        return rows


def _error_row(name: str, errors: ErrorSummary) -> list[str]:
    rank = errors.rank_correlation
    sizes = (errors.mean_abs_err, errors.median_abs_err, errors.p90_abs_err, errors.max_abs_err)
    return [
        name,
        count(errors.rows),
        *map(percent, sizes),
        percent(errors.bias, signed=True),
        MISSING if rank is None else f"{rank:.3f}",
    ]


# ---- quantities of each kind of validation ----


def _of_runs(validation: RunValidation) -> list[_Quantity]:
    times, sizes = [], []
    for group in validation.groups:
        for row in group.rows:
            label = f"row {row.run.line}, {row.run.label}"
            times.append(_Row(group.name, label, row.run.time_s, row.plan.time_s))
            if row.run.memory_bytes > 0:
                sizes.append(_Row(group.name, label, row.run.memory_bytes, row.reported_bytes))
    both = [
        _Quantity("Seconds of a step", validation.by, False, times),
        _Quantity("Bytes of a device", validation.by, True, sizes),
    ]
    return [quantity for quantity in both if quantity.rows]


def _of_columns(validation: StepValidation | Validation) -> list[_Quantity]:
    """Return the columns of a file: bytes, or times in the unit that the column's name ends in."""
    quantities, steps = [], isinstance(validation, StepValidation)
    for column, measured in validation.measured.items():
        is_bytes = column.endswith("bytes")
        unit = 1.0 if is_bytes else 1e-3 if column.endswith("ms") else 1e-6
        values = zip(validation.labels, measured, validation.predicted[column], strict=True)
        rows = []
        for label, *pair in values:
            group = label.split()[0] if steps else validation.kind
            rows.append(_Row(group, label, *(unit * float(value) for value in pair)))
        quantities.append(_Quantity(column, "model" if steps else "kind", is_bytes, rows))
    return quantities


def _of_collectives(validation: CollectiveValidation) -> list[_Quantity]:
    rows = validation.rows
    columns = (rows.system, rows.op, rows.payload_bytes, rows.ranks, rows.time_s)
    values = zip(*columns, validation.predicted_s, strict=True)
    timed = [
        _Row(f"{system}, {op}", f"{op} of {size(payload)} on {ranks} devices", time_s, float(pred))
        for system, op, payload, ranks, time_s, pred in values
    ]
    return [_Quantity("Seconds of a collective", "system and collective", False, timed)]


# ---- the page ----


def _tiles(validation: AnyValidation, quantities: Sequence[_Quantity]) -> list[tuple[str, str]]:
    tiles = []
    for quantity in quantities:
        errors = quantity.errors()
        tiles += [
            (f"{quantity.title}: rows", count(errors.rows)),
            ("Mean error", percent(errors.mean_abs_err)),
            ("Median error", percent(errors.median_abs_err)),
            ("Bias", percent(errors.bias, signed=True)),
        ]
    if isinstance(validation, RunValidation) and validation.all_rows.coverage is not None:
        covered = percent(round(validation.all_rows.coverage, 3))
        tiles.append((f"Inside the {NOMINAL:.0%} interval", covered))
    return tiles


def _unsupported(validation: AnyValidation) -> dict[str, int]:
    """Count the rows that have no prediction, by reason."""
    if isinstance(validation, RunValidation):
        return dict(validation.all_rows.unsupported)
    return dict(validation.unsupported) if isinstance(validation, Validation) else {}


def validation_page(validation: AnyValidation, title: str, command: str = "") -> str:
    """Render predictions and measurements as one page of HTML that works offline.

    Parameters
    ----------
    validation
        Result of `phaze_fast.calibration.validate_runs`, `validate_steps` or
        `validate_collectives`, or of `phaze_fast.cost.validate`.
    title
        Title of the page, such as the name of the file.
    command
        The command that validated it.

    Returns
    -------
    str
        The page; about 2 MB, for Plotly's script is inside, compressed.

    Raises
    ------
    InvalidInputError
        Where no row has a prediction.

    Examples
    --------
    >>> from phaze_fast.cost.validation import Validation, column_error
    >>> import numpy as np
    >>> measured, predicted = np.array([1.0, 2.0, 4.0]), np.array([1.1, 1.9, 4.2])
    >>> errors = {"us_median": column_error(measured, predicted)}
    >>> columns = {"us_median": measured}, {"us_median": predicted}
    >>> validation = Validation("h200", "gemm", ("mm a", "mm b", "mm c"), *columns, errors)
    >>> "<td>gemm</td>" in validation_page(validation, "mine")
    True
    """
    if isinstance(validation, RunValidation):
        quantities = _of_runs(validation)
    elif isinstance(validation, CollectiveValidation):
        quantities = _of_collectives(validation)
    else:
        quantities = _of_columns(validation)
    if not quantities:
        raise InvalidInputError("--report: no row has a prediction; there is nothing to draw")
    figures = {f"rows-{k}": quantity.figure() for k, quantity in enumerate(quantities)}
    reasons = sorted(_unsupported(validation).items(), key=lambda reason: -reason[1])
    refused = validation.refused if isinstance(validation, RunValidation | StepValidation) else ()
    return render(
        "validation",
        title,
        "validation",
        {name: figure for name, figure in figures.items() if figure is not None},
        tiles=_tiles(validation, quantities),
        quantities=quantities,
        unsupported=[[reason, count(rows)] for reason, rows in reasons],
        refused=refused,
        command=command,
    )
