"""Pages about predictions and measurements: a scatter by source, errors, the worst rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.calibration import RunValidation, StepValidation
from phaze_fast.calibration.collective_tables import CollectiveValidation
from phaze_fast.calibration.statistics import summarise
from phaze_fast.cost import Validation
from phaze_fast.errors import InvalidInputError
from phaze_fast.planning import NOMINAL
from phaze_fast.report.frame import Section, framed
from phaze_fast.report.markup import Html, join, table, tag, tiles
from phaze_fast.report.points import Axis, Point, key_of, points_drawing, row_filter
from phaze_fast.report.words import NOTHING, count, percent, seconds, size

__all__ = ["MeasuredRows", "measured_rows", "validation_page"]

Found = RunValidation | StepValidation | Validation | CollectiveValidation

_WORST = 20
_FEWEST = 3
"""Fewer rows are not drawn."""
_MICRO = 1e-6


@dataclass(frozen=True)
class MeasuredRows:
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

    def said(self, value: float) -> str:
        """Say a value with its unit."""
        return size(value) if self.is_bytes else seconds(value)

    @property
    def errors(self) -> list[float]:
        """Relative errors, positive where predicted too high."""
        return [p / m - 1.0 for p, m in zip(self.predicted, self.measured, strict=True)]


def _runs(found: RunValidation) -> list[MeasuredRows]:
    rows = [(group.name, row) for group in found.groups for row in group.rows]
    known = [(name, row) for name, row in rows if row.run.memory_bytes > 0]

    def made(title: str, some: list[Any], is_bytes: bool) -> MeasuredRows:
        return MeasuredRows(
            title,
            found.by,
            is_bytes,
            tuple(name for name, _ in some),
            tuple(f"row {row.run.line}, {row.run.label}" for _, row in some),
            tuple(row.run.memory_bytes if is_bytes else row.run.time_s for _, row in some),
            tuple(row.reported_bytes if is_bytes else row.plan.time_s for _, row in some),
        )

    made_rows = [made("Seconds of a step", rows, False), made("Bytes of a device", known, True)]
    return [each for each in made_rows if each.labels]


def _columns(found: StepValidation | Validation) -> list[MeasuredRows]:
    """Columns of a file as they are named there: bytes, or times in the unit of the name."""
    parts, steps = [], isinstance(found, StepValidation)
    for column, measured in found.measured.items():
        is_bytes = column.endswith("bytes")
        unit = 1.0 if is_bytes else 1e-3 if column.endswith("ms") else _MICRO
        parts.append(
            MeasuredRows(
                column,
                "model" if steps else "rows",
                is_bytes,
                tuple(label.split()[0] if steps else found.kind for label in found.labels),
                tuple(found.labels),
                tuple(unit * float(v) for v in measured),
                tuple(unit * float(v) for v in found.predicted[column]),
            )
        )
    return parts


def measured_rows(found: Found) -> list[MeasuredRows]:
    """Give what `validate` found as rows of measured and predicted values, by quantity."""
    if isinstance(found, RunValidation):
        return _runs(found)
    if isinstance(found, CollectiveValidation):
        rows = found.rows
        labels = tuple(
            f"{op} of {size(payload)} on {ranks} devices"
            for op, payload, ranks in zip(rows.op, rows.payload_bytes, rows.ranks, strict=True)
        )
        groups = tuple(f"{s}, {op}" for s, op in zip(rows.system, rows.op, strict=True))
        times = (tuple(rows.time_s), tuple(float(t) for t in found.predicted_s))
        title = "Seconds of a collective"
        return [MeasuredRows(title, "system and collective", False, groups, labels, *times)]
    return _columns(found)


def _error_row(name: object, measured: Sequence[float], predicted: Sequence[float]) -> list[object]:
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
        NOTHING if rank is None else f"{rank:.3f}",
    ]


_HEADINGS = ["Rows>", "Mean>", "Median>", "9 of 10 below>", "Largest>", "Bias>", "Rank corr.>"]


def _group_table(rows: MeasuredRows) -> Html:
    names = list(dict.fromkeys(rows.groups))
    found = []
    for k, name in enumerate(names):
        own = [i for i, group in enumerate(rows.groups) if group == name]
        said = tag("span", key_of(k), name)
        values = ([data[i] for i in own] for data in (rows.measured, rows.predicted))
        found.append(_error_row(said, *values))
    if len(names) > 1:
        found.append(_error_row("all", rows.measured, rows.predicted))
    caption = "Relative errors without sign; the bias has one, positive where predicted too high"
    return table(caption, [rows.by.capitalize(), *_HEADINGS], found)


def _worst_table(rows: MeasuredRows, k: int) -> Html:
    errors = np.array(rows.errors)
    order = np.argsort(-np.abs(errors), kind="stable")[:_WORST]
    listed = [
        [
            rows.labels[i],
            rows.groups[i],
            rows.said(rows.measured[i]),
            rows.said(rows.predicted[i]),
            percent(float(errors[i]), signed=True),
        ]
        for i in order
    ]
    columns = ["Row", rows.by.capitalize(), "Measured>", "Predicted>", "Error>"]
    laid = table("Rows with the largest errors, largest first", columns, listed)
    return join([row_filter(f"worst-{k}", "Rows that hold ..."), tag("div", laid, id=f"worst-{k}")])


def _scatter(rows: MeasuredRows, k: int) -> Html:
    points = [
        Point(
            group,
            measured,
            predicted,
            f"{label}: measured {rows.said(measured)}, predicted {rows.said(predicted)}, "
            f"{predicted / measured - 1:+.1%}",
        )
        for group, label, measured, predicted in zip(
            rows.groups, rows.labels, rows.measured, rows.predicted, strict=True
        )
    ]
    axes = (Axis("Measured", rows.said), Axis("Predicted", rows.said))
    if len(points) < _FEWEST:
        return _group_table(rows)
    words = "On the dashed line predicted and measured are equal."
    drawn = points_drawing(f"rows-{k}", points, *axes, diagonal=True)
    return join([tag("p", words), drawn, _group_table(rows)])


def _summary(found: Found, quantities: Sequence[MeasuredRows]) -> Html:
    numbers: list[tuple[str, object]] = []
    for rows in quantities:
        errors = summarise(list(rows.measured), list(rows.predicted))
        numbers += [
            (f"{rows.title}: rows", count(errors.rows)),
            ("Mean error", percent(errors.mean_abs_err)),
            ("Median error", percent(errors.median_abs_err)),
            ("Bias", percent(errors.bias, signed=True)),
        ]
    if isinstance(found, RunValidation) and found.all_rows.coverage is not None:
        covered = percent(round(found.all_rows.coverage, 3))
        numbers.append((f"Inside the {NOMINAL:.0%} interval", covered))
    return tiles(numbers)


def _left_out(found: Found) -> Html:
    reasons: dict[str, int] = {}
    if isinstance(found, RunValidation):
        reasons = dict(found.all_rows.unsupported)
    elif isinstance(found, Validation):
        reasons = dict(found.unsupported)
    rows = [[why, count(n)] for why, n in sorted(reasons.items(), key=lambda each: -each[1])]
    parts = [table("Rows without a prediction", ["Why", "Rows>"], rows)] if rows else []
    refused = getattr(found, "refused", ())
    if refused:
        lines = [tag("li", line) for line in refused]
        parts += [tag("p", "Rows that contradict themselves or lack a field:"), tag("ul", *lines)]
    return join(parts)


def validation_page(found: Found, title: str, command: str = "") -> str:
    """Lay predictions and measurements out as one page of HTML that works offline.

    Parameters
    ----------
    found
        What `phaze_fast.calibration.validate_runs`, `validate_steps`, `validate_collectives` or
        `phaze_fast.cost.validate` gave.
    title
        Of the page, such as the name of the file.
    command
        That made it.

    Returns
    -------
    str
        The page; about 200 bytes for each row.

    Raises
    ------
    InvalidInputError
        Where no row has a prediction.

    Examples
    --------
    >>> from phaze_fast.cost.validation import Validation, column_error
    >>> import numpy as np
    >>> took, said = np.array([1.0, 2.0, 4.0]), np.array([1.1, 1.9, 4.2])
    >>> errors = {"us_median": column_error(took, said)}
    >>> rows = {"us_median": took}, {"us_median": said}
    >>> found = Validation("h200", "gemm", ("mm a", "mm b", "mm c"), *rows, errors)
    >>> validation_page(found, "mine").count("<i ")
    3
    """
    quantities = measured_rows(found)
    if not quantities:
        raise InvalidInputError("--report: no row has a prediction; there is nothing to draw")
    sections: list[Section] = [
        ("answer", "How far off predictions are", _summary(found, quantities))
    ]
    sections += [(f"rows-{k}", rows.title, _scatter(rows, k)) for k, rows in enumerate(quantities)]
    sections += [
        (f"largest-{k}", f"{rows.title}: largest errors", _worst_table(rows, k))
        for k, rows in enumerate(quantities)
    ]
    sections.append(("left", "Left out", _left_out(found)))
    if command:
        code = tag("pre", tag("code", command), class_="command")
        sections.append(("again", "To get it again", code))
    return framed(title, "validation", [each for each in sections if each[2]], points=True)
