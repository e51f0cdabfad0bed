"""The command `validate`: how far predictions are from measured operators, steps and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.calibration import (
    RunGroup,
    RunValidation,
    StepValidation,
    is_collective_table,
    validate_collectives,
    validate_runs,
    validate_steps,
)
from phaze_fast.calibration.published import is_run_table
from phaze_fast.calibration.validation import is_step_table
from phaze_fast.cli.measured_tables import collective_parts, validation_data, validation_parts
from phaze_fast.cli.output import AsJson, ToFile, ToPage, emit, note, table, typed
from phaze_fast.cost import validate
from phaze_fast.documents import csv_rows
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets

__all__ = ["add_commands"]

_WORST = 8


def _kind_of_table(file: Path) -> str:
    """Tell ``runs`` and ``steps`` from other files of measurements by the header."""
    header, _ = csv_rows(file)
    if is_run_table(header):
        return "runs"
    return "steps" if is_step_table(frozenset(header)) else "operators"


def _share(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _group_row(group: RunGroup) -> list[str]:
    left_out = sum(group.unsupported.values())
    regret = group.regret
    time = group.time
    if time is None:
        return [group.name, "0", str(left_out), *["-"] * 8]
    return [
        group.name,
        str(time.rows),
        str(left_out),
        _share(time.mean_abs_err),
        _share(time.median_abs_err),
        _share(time.p90_abs_err),
        _share(time.max_abs_err),
        _share(time.bias, signed=True),
        "-" if time.rank_correlation is None else f"{time.rank_correlation:.3f}",
        "-" if regret is None else _share(float(regret["mean"])),
        _share(group.coverage),
    ]


def _run_parts(found: RunValidation) -> list[RenderableType]:
    """Lay out errors of published runs as tables."""
    headings = [found.by, "rows>", "left out>", "mean>", "median>", "p90>", "max>", "bias>"]
    headings += ["rank corr.>", "pick-regret>", "in interval>"]
    groups = [*found.groups, found.all_rows]
    title = "Seconds of a step, predicted against measured: relative errors without sign"
    parts: list[RenderableType] = [table(title, headings, [_group_row(g) for g in groups])]
    memory = [(g.name, g.memory) for g in groups if g.memory is not None]
    if memory:
        rows = [
            [name, str(m.rows), _share(m.mean_abs_err), _share(m.max_abs_err), _share(m.bias, True)]
            for name, m in memory
        ]
        columns = [found.by, "rows>", "mean>", "max>", "bias>"]
        parts.append(table("Bytes of a device", columns, rows))
    reasons = [
        [group.name, reason, str(count)]
        for group in found.groups
        for reason, count in sorted(group.unsupported.items())
    ]
    if reasons:
        parts.append(table("Rows that are not supported", [found.by, "why", "rows>"], reasons))
    worst = [
        [
            str(r.run.line),
            r.run.label,
            f"{r.run.time_s:.4g} s",
            f"{r.time_s:.4g} s",
            _share(r.error, signed=True),
        ]
        for r in found.worst(_WORST)
    ]
    columns = ["row>", "run", "measured>", "predicted>", "error>"]
    return [*parts, table("Worst rows", columns, worst)]


def _step_parts(found: StepValidation) -> list[RenderableType]:
    """Lay out errors of measured steps as tables."""
    rows = [
        [name, str(e.rows)]
        + [_share(v) for v in (e.mean_abs_err, e.median_abs_err, e.p90_abs_err, e.max_abs_err)]
        + [_share(e.bias, signed=True)]
        for name, e in found.columns.items()
    ]
    headings = ["column", "rows>", "mean>", "median>", "p90>", "max>", "bias>"]
    worst = [
        [label, column, f"{measured:,.4g}", f"{predicted:,.4g}", _share(error, signed=True)]
        for label, column, measured, predicted, error in found.worst(_WORST)
    ]
    columns = ["row", "column", "measured>", "predicted>", "error>"]
    title = f"{found.chip} against measured {found.kind}: relative errors without sign"
    return [table(title, headings, rows), table("Worst rows", columns, worst)]


def _to_page(found: Any, file: Path, report: Path | None) -> None:
    """Write the page, where one is asked for."""
    if report is not None:
        from phaze_fast.report.plan_page import write_page
        from phaze_fast.report.validation_page import validation_page

        write_page(validation_page(found, f"Predictions against {file.name}", typed()), report)
        note(f"wrote {report}")


# ---- the command ----


def show_validation(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV of measurements, told by its header (operators, training steps, "
            "training runs, collectives), or the output of nccl-tests."
        ),
    ],
    chip: Annotated[
        str | None,
        typer.Option(
            help="The chip that was measured: a preset or a file; tables of training runs "
            "name their own."
        ),
    ] = None,
    fabric: Annotated[
        str,
        typer.Option(
            help="For collectives: the fabric that was measured, a preset or a file; by "
            "default that of each system in the table."
        ),
    ] = "",
    by: Annotated[
        str,
        typer.Option(help="For training runs: group errors by source, chip, software or model."),
    ] = "source",
    configs: Annotated[
        Path | None,
        typer.Option(
            help="For measured HuggingFace steps: JSON file of the models' configurations."
        ),
    ] = None,
    report: ToPage = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Predict every row of a file of measurements and say how far off the predictions are."""
    if is_collective_table(file):
        wired = presets.fabric(fabric) if fabric else None
        measured = validate_collectives(file, wired)
        _to_page(measured, file, report)
        emit(measured.to_dict, lambda: collective_parts(measured), as_json, to_file)
        return
    kind = _kind_of_table(file)
    if kind == "runs":
        runs = validate_runs(file, by)
        _to_page(runs, file, report)
        for line in runs.refused:
            note(f"{file}: {line}")
        emit(runs.to_dict, lambda: _run_parts(runs), as_json, to_file)
        return
    if kind == "steps":
        steps = validate_steps(file, presets.chip(chip or "h200"), configs)
        _to_page(steps, file, report)
        for line in steps.refused:
            note(f"{file}: {line}")
        emit(steps.to_dict, lambda: _step_parts(steps), as_json, to_file)
        return
    if chip is None:
        raise InvalidInputError("--chip: missing; expected the chip that the operators ran on")
    asked = presets.chip(chip)
    found = validate(file, asked)
    _to_page(found, file, report)
    calibration = asked.calibration
    if calibration.note:
        note(calibration.note)
    emit(
        lambda: validation_data(found, calibration),
        lambda: validation_parts(found),
        as_json,
        to_file,
    )


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("validate")(show_validation)
