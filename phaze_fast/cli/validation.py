"""What `validate` prints for training runs and measured steps."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from phaze_fast.calibration import RunGroup, RunValidation, StepValidation
from phaze_fast.calibration.published import is_run_table
from phaze_fast.calibration.steps import is_step_table
from phaze_fast.calibration.validation import csv_rows
from phaze_fast.cli.output import table

__all__ = ["kind_of_table", "run_parts", "step_parts"]

_WORST = 8


def kind_of_table(file: Path) -> str:
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


def run_parts(found: RunValidation) -> list[RenderableType]:
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
            f"{r.plan.time_s:.4g} s",
            _share(r.error, signed=True),
        ]
        for r in found.worst(_WORST)
    ]
    columns = ["row>", "run", "measured>", "predicted>", "error>"]
    return [*parts, table("Worst rows", columns, worst)]


def step_parts(found: StepValidation) -> list[RenderableType]:
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
