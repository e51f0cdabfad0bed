"""A page about predictions and measurements: scatter by source, errors, the worst rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phaze_fast.calibration import (
    CollectiveValidation,
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
"""Fewer rows have no chart."""


@dataclass(frozen=True)
class _Quantity:
    """One quantity, measured and predicted, in seconds or bytes."""

    title: str
    """Such as ``Seconds of a step``."""
    by: str
    """What the groups are, such as ``source``."""
    is_bytes: bool
    groups: tuple[str, ...]
    """The group of each row."""
    labels: tuple[str, ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...]

    def format(self, value: float) -> str:
        """Format a value with its unit."""
        return size(value) if self.is_bytes else seconds(value)

    @property
    def errors(self) -> list[float]:
        """Relative errors, positive where predicted too high."""
        return [p / m - 1.0 for p, m in zip(self.predicted, self.measured, strict=True)]

    def figure(self) -> dict[str, Any] | None:
        """Draw predicted over measured values, a mark for each group."""
        scale = GIB if self.is_bytes else 1.0
        points = [
            Point(
                group,
                measured / scale,
                predicted / scale,
                f"{label}: measured {self.format(measured)}, predicted {self.format(predicted)}, "
                f"{predicted / measured - 1:+.1%}",
            )
            for group, label, measured, predicted in zip(
                self.groups, self.labels, self.measured, self.predicted, strict=True
            )
            if is_number(measured) and is_number(predicted)
        ]
        if len(points) < _MIN_POINTS:
            return None
        return points_figure(
            points, "Measured", "Predicted", "GiB" if self.is_bytes else "s", diagonal=True
        )

    def error_rows(self) -> list[list[str]]:
        """Summarise the errors of each group, and of all rows where there are several groups."""
        groups = {
            name: [k for k, group in enumerate(self.groups) if group == name]
            for name in dict.fromkeys(self.groups)
        }
        if len(groups) > 1:
            groups["all"] = list(range(len(self.groups)))
        return [
            _error_row(name, [self.measured[k] for k in rows], [self.predicted[k] for k in rows])
            for name, rows in groups.items()
        ]

    def worst_rows(self) -> list[list[str]]:
        """List the rows with the largest errors, largest first."""
        errors = self.errors
        worst = sorted(range(len(errors)), key=lambda k: -abs(errors[k]))[:_MAX_WORST]
        return [
            [
                self.labels[k],
                self.groups[k],
                self.format(self.measured[k]),
                self.format(self.predicted[k]),
                percent(errors[k], signed=True),
            ]
            for k in worst
        ]


def _error_row(name: str, measured: Sequence[float], predicted: Sequence[float]) -> list[str]:
    errors = summarise(list(measured), list(predicted))
    rank = errors.rank_correlation
    return [
        name,
        count(errors.rows),
        percent(errors.mean_abs_err),
        percent(errors.median_abs_err),
        percent(errors.p90_abs_err),
        percent(errors.max_abs_err),
        percent(errors.bias, signed=True),
        MISSING if rank is None else f"{rank:.3f}",
    ]


# ---- quantities of each kind of validation ----


def _of_runs(validation: RunValidation) -> list[_Quantity]:
    rows = [(group.name, row) for group in validation.groups for row in group.rows]
    with_memory = [(name, row) for name, row in rows if row.run.memory_bytes > 0]

    def quantity(title: str, rows: list[Any], is_bytes: bool) -> _Quantity:
        return _Quantity(
            title,
            validation.by,
            is_bytes,
            tuple(name for name, _ in rows),
            tuple(f"row {row.run.line}, {row.run.label}" for _, row in rows),
            tuple(row.run.memory_bytes if is_bytes else row.run.time_s for _, row in rows),
            tuple(row.reported_bytes if is_bytes else row.plan.time_s for _, row in rows),
        )

    both = [
        quantity("Seconds of a step", rows, False),
        quantity("Bytes of a device", with_memory, True),
    ]
    return [one for one in both if one.labels]


def _of_columns(validation: StepValidation | Validation) -> list[_Quantity]:
    """Return the columns of a file: bytes, or times in the unit that the column's name ends in."""
    quantities, steps = [], isinstance(validation, StepValidation)
    for column, measured in validation.measured.items():
        is_bytes = column.endswith("bytes")
        unit = 1.0 if is_bytes else 1e-3 if column.endswith("ms") else 1e-6
        quantities.append(
            _Quantity(
                column,
                "model" if steps else "kind",
                is_bytes,
                tuple(
                    label.split()[0] if steps else validation.kind for label in validation.labels
                ),
                tuple(validation.labels),
                tuple(unit * float(value) for value in measured),
                tuple(unit * float(value) for value in validation.predicted[column]),
            )
        )
    return quantities


def _of_collectives(validation: CollectiveValidation) -> list[_Quantity]:
    rows = validation.rows
    labels = tuple(
        f"{op} of {size(payload)} on {ranks} devices"
        for op, payload, ranks in zip(rows.op, rows.payload_bytes, rows.ranks, strict=True)
    )
    groups = tuple(f"{s}, {op}" for s, op in zip(rows.system, rows.op, strict=True))
    times = (tuple(rows.time_s), tuple(float(t) for t in validation.predicted_s))
    title = "Seconds of a collective"
    return [_Quantity(title, "system and collective", False, groups, labels, *times)]


def _quantities(validation: AnyValidation) -> list[_Quantity]:
    if isinstance(validation, RunValidation):
        return _of_runs(validation)
    if isinstance(validation, CollectiveValidation):
        return _of_collectives(validation)
    return _of_columns(validation)


# ---- the page ----


def _tiles(validation: AnyValidation, quantities: Sequence[_Quantity]) -> list[tuple[str, str]]:
    tiles = []
    for quantity in quantities:
        errors = summarise(list(quantity.measured), list(quantity.predicted))
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
        What `phaze_fast.calibration.validate_runs`, `validate_steps`, `validate_collectives` or
        `phaze_fast.cost.validate` returned.
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
    quantities = _quantities(validation)
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
