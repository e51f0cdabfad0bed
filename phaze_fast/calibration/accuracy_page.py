"""The page "How far off is it?", written from validated runs: tables, worst rows, a scatter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from phaze_fast.calibration.held_out import HeldOut
from phaze_fast.calibration.intervals import held_out_coverage
from phaze_fast.calibration.statistics import ErrorSummary
from phaze_fast.calibration.steps import StepValidation
from phaze_fast.calibration.validation import PredictedRun, RunGroup, RunValidation

__all__ = ["headline", "page", "scatter"]

_WORST = 12

_OTHERS = """\
## Other models on such rows

Figures of others are as published or as measured on the same rows with their own programs; ours
are those of the table above.

| model | rows | mean absolute error |
|---|---|---|
| Calculon | 8 of Korthikanti et al. 2022 | 3.65% (8.9% at most) |
| Calculon | Narayanan et al. 2021, table 2 | 10.3% |
| Calculon | vTrain's runs | 15 to 39% |
| vTrain, with profiled kernels | its single-node runs | 8.4% |
| vTrain, with profiled kernels | its cluster runs | 14.7% |
| SimuMax, with measured efficiencies | its B200 runs | 5.6% (memory 0.5%) |
| llm-analysis | several of these | 7.9 to 60% |
| LLMCompass | operators | 10.4% |
"""

_METHOD = """\
## What is fitted, and on what

- Operators and collectives: measured alone, chip by chip ([cost](cost.md)).
- One rate per chip and number format for products in a job that runs for hours
  (`tuning.step_flops`): under power they are slower than a lone product.
- One host time per operator for each software (and one for recomputation), the speed of attention
  kernels and product libraries of a software's year relative to today's, how often an unfused loss
  moves its logits (`loss_passes`), what DeepSpeed's gathers reach of the network
  (`network_share`), what of tensor-parallel collectives user buffers hide (`hidden_tensor`), what
  launching experts one by one takes (`expert_launch_s`), and what layers lose while weights and
  gradients move on TPUs and in DeepSpeed (`overlap_slowdown`).
  These were chosen with all runs in view; the last table says which of them were also checked on
  runs that the fit did not see.
- Everything else about software (what overlaps, what is fused, bytes of gradients, padding) is read
  from its code and kept in `phaze_fast/software/data` with its sources.

No constant belongs to a row or a model. Two rest on one source alone, and say so in their profiles:
what gathers reach and cost in DeepSpeed of 2021, and how much slower products were in an H100's
first year.
The noise floor is high: the same plan differs by 6 to 7% between versions of one container, and
mean errors below about 4% are luck.
"""


def _percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def _cells(error: ErrorSummary) -> list[str]:
    sizes = (error.mean_abs_err, error.median_abs_err, error.p90_abs_err, error.max_abs_err)
    return [str(error.rows), *(_percent(size) for size in sizes), _percent(error.bias, signed=True)]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|--:" * (len(headings) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _source_row(group: RunGroup, covered: Mapping[str, float]) -> list[str]:
    left_out = str(sum(group.unsupported.values()))
    if group.time is None:
        return [group.name, "0", *["-"] * 5, left_out, "-", "-"]
    regret = group.regret
    lost = "-" if regret is None else _percent(float(regret["mean"]))
    return [group.name, *_cells(group.time), left_out, lost, _percent(covered.get(group.name))]


def _groups(runs: Sequence[RunValidation]) -> list[RunGroup]:
    return [group for found in runs for group in found.groups]


def _rows(runs: Sequence[RunValidation]) -> list[PredictedRun]:
    return [row for group in _groups(runs) for row in group.rows]


def headline(runs: Sequence[RunValidation]) -> str:
    """Say the result in one sentence."""
    rows = _rows(runs)
    errors = sorted(abs(row.error) for row in rows)
    mean, median = sum(errors) / len(errors), errors[len(errors) // 2]
    covered = held_out_coverage(rows)
    inside = sum(covered[row.run.source] for row in rows)
    return (
        f"On {len(rows):,} published training runs the seconds of a step are {100 * mean:.1f}% off "
        f"in the mean and {100 * median:.1f}% in the median; {100 * inside / len(rows):.0f}% of "
        "them lie in the interval for four of five, learnt from other runs."
    )


def _left_out(runs: Sequence[RunValidation]) -> str:
    counts: dict[str, int] = {}
    for group in _groups(runs):
        for reason, count in group.unsupported.items():
            counts[reason] = counts.get(reason, 0) + count
    rows = [[reason, str(n)] for reason, n in sorted(counts.items(), key=lambda item: -item[1])]
    total = sum(counts.values())
    everything = total + len(_rows(runs)) + sum(len(found.refused) for found in runs)
    said = f"{total} of {everything} rows ask for what is not modelled:\n\n" if rows else ""
    return said + _table(["why", "rows"], rows) if rows else ""


def _explained(row: PredictedRun) -> str:
    """Say what most of a step with a large error is spent on, and what is known of such rows."""
    parts = sorted(row.plan.parts_s.items(), key=lambda item: -item[1])[:2]
    spent = ", ".join(f"{name} {100 * s / row.plan.time_s:.0f}%" for name, s in parts)
    room = row.plan.memory_bytes / max(row.plan.limit_bytes, 1.0)
    full = f"; {100 * room:.0f}% of memory in use" if room > _FULL else ""
    return f"{spent}{full}"


_FULL = 0.85


def _worst(runs: Sequence[RunValidation]) -> str:
    worst = sorted(_rows(runs), key=lambda row: -abs(row.error))[:_WORST]
    cells = [
        [
            row.run.source.split(" (")[0],
            row.run.label,
            f"{row.run.time_s:.4g} s",
            f"{row.time_s:.4g} s",
            _percent(row.error, signed=True),
            _explained(row),
        ]
        for row in worst
    ]
    headings = ["source", "run", "measured", "predicted", "error", "predicted step is mostly"]
    return _table(headings, cells)


def _step_rows(steps: Sequence[StepValidation]) -> str:
    rows = [
        [f"{found.chip}, {found.kind}: {column}", *_cells(error)]
        for found in steps
        for column, error in found.columns.items()
    ]
    return _table(["steps on one device", "rows", "mean", "median", "p90", "max", "bias"], rows)


def _held_out(constants: Sequence[HeldOut]) -> str:
    rows = [
        [
            found.name,
            str(found.runs),
            f"{found.best:.4g}",
            f"{found.lowest:.4g} to {found.highest:.4g}",
            _percent(found.seen),
            _percent(found.unseen),
            found.parts,
        ]
        for found in constants
    ]
    headings = ["constant", "runs", "best", "with a part left out", "error seen", "error unseen"]
    return _table([*headings, "parts"], rows)


def page(
    runs: Sequence[RunValidation],
    steps: Sequence[StepValidation],
    constants: Sequence[HeldOut] = (),
) -> str:
    """Write the page as Markdown.

    Parameters
    ----------
    runs
        Validated tables of published runs.
    steps
        Validated steps on one device.
    constants
        What was fitted on whole runs, with errors of runs that a fit did not see.
    """
    headings = ["source", "rows", "mean", "median", "p90", "max", "bias", "left out"]
    headings += ["pick-regret", "in interval"]
    covered = held_out_coverage(_rows(runs))
    memory = [
        [group.name, *_cells(group.memory)] for group in _groups(runs) if group.memory is not None
    ]
    return "\n".join(
        [
            "# How far off is it?",
            "",
            "<!-- Written by bench/accuracy.py from published runs; do not edit. -->",
            "",
            headline(runs),
            "",
            "Errors are relative, without sign but for the bias (positive: predicted too long).",
            "Pick-regret is what is lost by running the plan that is predicted to be fastest,",
            "where rows share model, devices and batch. Intervals are judged on runs that they",
            "were not learnt from, a fifth at a time. `phaze-fast study validate RUNS.csv`",
            "prints the same for any table with these columns, with the package's intervals. Where",
            "a row's seconds contain its share of evaluations (Google's of MLPerf), the forward",
            "passes of these are added to what is predicted.",
            "",
            "## Seconds of a step, by source",
            "",
            _table(headings, [_source_row(group, covered) for group in _groups(runs)]),
            "![Predicted against measured seconds of a step](accuracy.svg)",
            "",
            "## Bytes of a device",
            "",
            _table(["source", "rows", "mean", "median", "p90", "max", "bias"], memory),
            "## Steps measured on one H200",
            "",
            _step_rows(steps),
            "## The worst rows",
            "",
            _worst(runs),
            "## Rows that are left out",
            "",
            _left_out(runs),
            _OTHERS,
            _METHOD,
            "## Constants fitted on whole runs, and runs that a fit did not see",
            "",
            "Each is the best of a grid, the others as they are; then one part of the runs after",
            "another is left out of the fit and predicted with it.",
            "",
            _held_out(constants),
        ]
    )


# ---- scatter ----

_SIZE, _EDGE = 640, 60
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")


def scatter(runs: Sequence[RunValidation]) -> str:
    """Draw predicted against measured seconds on logarithmic axes, as SVG."""
    groups = [group for group in _groups(runs) if group.rows]
    seconds = [s for g in groups for r in g.rows for s in (r.run.time_s, r.time_s)]
    low, high = math.floor(math.log10(min(seconds))), math.ceil(math.log10(max(seconds)))
    scale = (_SIZE - 2 * _EDGE) / (high - low)

    def across(value: float) -> float:
        return round(_EDGE + scale * (math.log10(value) - low), 1)

    def up(value: float) -> float:
        return round(_SIZE - across(value), 1)

    marks = []
    for power in range(low, high + 1):
        x, y, text = across(10.0**power), up(10.0**power), f"{10.0**power:g} s"
        marks.append(f'<text x="{x}" y="{_SIZE - _EDGE + 18}" text-anchor="middle">{text}</text>')
        marks.append(f'<text x="{_EDGE - 8}" y="{y + 4}" text-anchor="end">{text}</text>')
    ends = (10.0**low, 10.0**high)
    marks.append(
        f'<line x1="{across(ends[0])}" y1="{up(ends[0])}" x2="{across(ends[1])}" '
        f'y2="{up(ends[1])}" stroke="#888"/>'
    )
    for k, group in enumerate(groups):
        colour = _COLOURS[k % len(_COLOURS)]
        dots = "".join(
            f'<circle cx="{across(r.run.time_s)}" cy="{up(r.time_s)}" r="2.5"/>' for r in group.rows
        )
        marks.append(f'<g fill="{colour}" fill-opacity="0.6">{dots}</g>')
        y = _EDGE + 16 * k
        marks.append(f'<circle cx="{_EDGE + 10}" cy="{y - 4}" r="4" fill="{colour}"/>')
        marks.append(f'<text x="{_EDGE + 20}" y="{y}">{escape(group.name)}</text>')
    middle = _SIZE // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE} {_SIZE}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="{_SIZE}" height="{_SIZE}" fill="#fff"/>{"".join(marks)}'
        f'<text x="{middle}" y="{_SIZE - 12}" text-anchor="middle">measured</text>'
        f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" '
        'text-anchor="middle">predicted</text></svg>\n'
    )
