"""The command `study validate`: how far predictions are from measured operators, steps and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.calibration import (
    CollectiveValidation,
    RunGroup,
    RunValidation,
    StepValidation,
    is_collective_table,
    validate_collectives,
    validate_runs,
    validate_steps,
)
from phaze_fast.calibration.run_table import is_run_table
from phaze_fast.calibration.validation import compare_predictions, is_step_table
from phaze_fast.cli.output import ChartsOutput, note, table, typed
from phaze_fast.cost import Validation, validate
from phaze_fast.documents import csv_rows
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Calibration, presets
from phaze_fast.report.validation_page import validation_page

_WORST = 8


def _share(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


_ERRORS = ["rows>", "mean>", "median>", "p90>", "max>", "bias>"]


def _errors(error: Any) -> list[str]:
    """Format relative errors; only the bias has a sign."""
    sizes = (error.mean_abs_err, error.median_abs_err, error.p90_abs_err, error.max_abs_err)
    return [str(error.rows), *map(_share, sizes), _share(error.bias, signed=True)]


def _worst_table(validation: Validation | StepValidation) -> RenderableType:
    rows = [
        [label, column, f"{measured:,.4g}", f"{predicted:,.4g}", _share(error, signed=True)]
        for label, column, measured, predicted, error in validation.worst(_WORST)
    ]
    columns = ["row", "column", "measured>", "predicted>", "error>"]
    return table("Worst rows", columns, rows)


def _group_row(group: RunGroup) -> list[str]:
    unsupported = str(sum(group.unsupported.values()))
    if group.time is None:
        return [group.name, unsupported, "0", *["-"] * 8]
    correlation, regret = group.time.rank_correlation, group.regret
    return [
        group.name,
        unsupported,
        *_errors(group.time),
        "-" if correlation is None else f"{correlation:.3f}",
        "-" if regret is None else _share(float(regret["mean"])),
        _share(group.coverage),
    ]


def _run_tables(validation: RunValidation) -> list[RenderableType]:
    """Lay out errors of published runs as tables."""
    headings = [validation.by, "unsupported>", *_ERRORS]
    headings += ["rank corr.>", "pick-regret>", "in interval>"]
    groups = [*validation.groups, validation.all_rows]
    title = "Seconds of a step, predicted against measured: relative errors without sign"
    parts: list[RenderableType] = [table(title, headings, [_group_row(g) for g in groups])]
    memory = [[g.name, *_errors(g.memory)] for g in groups if g.memory is not None]
    if memory:
        parts.append(table("Bytes of a device", [validation.by, *_ERRORS], memory))
    reasons = [
        [group.name, reason, str(count)]
        for group in validation.groups
        for reason, count in sorted(group.unsupported.items())
    ]
    if reasons:
        parts.append(table("Rows that are not supported", [validation.by, "why", "rows>"], reasons))
    assumed = sorted(validation.all_rows.assumed.items(), key=lambda item: -item[1])
    if assumed:
        rows = [[words, str(count)] for words, count in assumed]
        parts.append(table("Taken for granted", ["what rows do not say", "rows>"], rows))
    fits = validation.all_rows.fits
    if set(fits) != {"ok"}:
        rows = [[status, str(n), _share(fit / n)] for status, (n, fit) in fits.items()]
        parts.append(table("Memory, by how runs ended", ["status", "rows>", "said to fit>"], rows))
    worst = [
        [
            *(str(row.run.line), row.run.label, f"{row.run.time_s:.4g} s", f"{row.time_s:.4g} s"),
            _share(row.error, signed=True),
        ]
        for row in validation.worst(_WORST)
    ]
    columns = ["row>", "run", "measured>", "predicted>", "error>"]
    return [*parts, table("Worst rows", columns, worst)]


def _compared(both: Sequence[RunGroup]) -> RenderableType:
    """Lay out the scores of two models on the same rows."""
    statuses = list(dict.fromkeys(status for group in both for status in group.fits))
    columns = ["model", *_ERRORS, "pick-regret>", "bytes, mean>"]
    columns += [f"{status}: said to fit>" for status in statuses]
    rows = []
    for group in both:
        pairs = [group.fits.get(status, (0, 0)) for status in statuses]
        fits = [_share(fit / n if n else None) for n, fit in pairs]
        errors = ["0", *["-"] * 5] if group.time is None else _errors(group.time)
        regret = None if group.regret is None else float(group.regret["mean"])
        memory = None if group.memory is None else group.memory.mean_abs_err
        rows.append([group.name, *errors, _share(regret), _share(memory), *fits])
    return table("Two models on the same rows", columns, rows)


def _column_tables(validation: Validation | StepValidation) -> list[RenderableType]:
    """Lay out errors as tables; for operators also those left after one scale per column."""
    columns, kind = ["column", *_ERRORS], validation.kind
    rows = [[name, *_errors(error)] for name, error in validation.columns.items()]
    if isinstance(validation, Validation):
        columns, kind = [*columns, "after one scale>"], f"{kind} rows"
        for row, error in zip(rows, validation.columns.values(), strict=True):
            row.append(f"{error.scaled_mean_abs_err:.1%} (x {error.scale:.3f})")
    title = f"{validation.chip} against measured {kind}: relative errors without sign"
    return [table(title, columns, rows), _worst_table(validation)]


def _operator_data(validation: Validation, calibration: Calibration) -> dict[str, Any]:
    """Return errors of operators as plain data."""
    return {
        "chip": validation.chip,
        "kind": validation.kind,
        "columns": {name: vars(error) for name, error in validation.columns.items()},
        "unsupported": validation.unsupported,
        "calibration": calibration.to_dict(),
    }


def _collective_tables(validation: CollectiveValidation) -> list[RenderableType]:
    """Lay out errors of collectives as a table."""
    errors = {**validation.columns, **validation.groups}
    rows = [[name, *_errors(error)] for name, error in errors.items()]
    title = "Collectives against measured ones: relative errors without sign"
    return [table(title, ["rows of", *_ERRORS], rows)]


# ---- the command ----


@dataclass(frozen=True)
class Measured:
    """What was measured."""

    chip: str | None = None
    """The chip: a preset or a file; tables of training runs name their own."""
    fabric: str = ""
    """For collectives and training runs: the interconnect, a preset or a file; by default that of
    each system in the table."""
    by: str = "source"
    """For training runs: group errors by source, chip, software or model."""
    software: str = ""
    """For training runs: take all of them as runs of this profile, a name or a file; by default as
    each row says, and as generic where its software has no profile."""
    against: Path | None = None
    """For training runs: predictions of another model, a CSV with row (the line of a run in its
    table), step_s, memory_bytes and fits (yes or no), which are scored beside ours."""
    configs: Path | None = None
    """For measured HuggingFace steps: JSON file of the models' configurations."""


def show_validation(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV of measurements, told by its header (operators, training steps, "
            "training runs, collectives), or the output of nccl-tests."
        ),
    ],
    how: Measured,
    output: ChartsOutput,
) -> None:
    """Compare predictions with a file of measurements.

    Example: phaze-fast study validate measurements.csv --chip h200
    """
    validation, tables, document = _validated(file, how)
    title = f"Predictions against {file.name}"
    output.write_page(lambda: validation_page(validation, title, typed()))
    for reason, lines in _by_reason(getattr(validation, "refused", ())).items():
        note(f"{file}: {lines}: {reason}")
    output.emit(document, lambda: tables(validation))


def _by_reason(refused: Iterable[str]) -> dict[str, str]:
    """Join the numbers of rows that are refused for the same reason, by reason."""
    found: dict[str, list[str]] = {}
    for line in refused:
        row, _, reason = line.partition(": ")
        found.setdefault(reason, []).append(row.removeprefix("row "))
    return {
        why: f"{'rows' if len(rows) > 1 else 'row'} {', '.join(rows)}"
        for why, rows in found.items()
    }


def _validated(
    file: Path, how: Measured
) -> tuple[Any, Callable[[Any], list[RenderableType]], Callable[[], Any]]:
    """Compare with a file of any kind; return the errors, and functions for tables and data."""
    if is_collective_table(file):
        measured = validate_collectives(file, presets.fabric(how.fabric) if how.fabric else None)
        return measured, _collective_tables, measured.to_dict
    header, _ = csv_rows(file)
    if is_run_table(header):
        fabric = presets.fabric(how.fabric) if how.fabric else None
        runs = validate_runs(file, how.by, software=how.software or None, fabric=fabric)
        if how.against is None:
            return runs, _run_tables, runs.to_dict
        both = compare_predictions(runs, how.against)
        shown = ("iter_time_s", "memory_gib", "fits", "pick_regret")
        scores = {g.name: {name: g.to_dict()[name] for name in shown} for g in both}
        return (
            runs,
            lambda validation: [_compared(both), *_run_tables(validation)],
            lambda: {**runs.to_dict(), "against": scores},
        )
    if is_step_table(frozenset(header)):
        steps = validate_steps(file, presets.chip(how.chip or "h200"), how.configs)
        return steps, _column_tables, steps.to_dict
    if how.chip is None:
        raise InvalidInputError("--chip: missing; expected the chip that the operators ran on")
    chip = presets.chip(how.chip)
    operators = validate(file, chip)
    if chip.calibration.note:
        note(chip.calibration.note)
    return operators, _column_tables, lambda: _operator_data(operators, chip.calibration)
