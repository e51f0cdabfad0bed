"""The commands `study calibrate`, `study backtest` and `study reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import RenderableType

from phaze_fast.calibration import (
    Calibrated,
    benchmark_script,
    calibrate_chip,
    calibrate_fabric,
    calibrate_runs,
    is_collective_table,
)
from phaze_fast.calibration.calibrate_runs import ClusterCalibration
from phaze_fast.calibration.run_table import is_run_table
from phaze_fast.cli.options import Threads
from phaze_fast.cli.output import ChartsOutput, JsonPath, Output, ToPath, note, table, write_text
from phaze_fast.documents import csv_rows
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets
from phaze_fast.papers.backtest import FEATURES, backtest
from phaze_fast.papers.reproduce import PAPERS, Reproduced, reproduce
from phaze_fast.report.backtest_page import backtest_page
from phaze_fast.units import format_time

# ---- calibrate ----


def _calibration_tables(calibrated: Calibrated) -> list[RenderableType]:
    constants = [
        [c.name, f"{c.before:.4g}", f"{c.value:.4g}", f"{c.low:.4g} to {c.high:.4g}", c.note]
        for c in calibrated.constants
    ]
    errors = [
        [kind, f"{e['rows']:.0f}", *(f"{e[name]:.1%}" for name in ("before", "fitted", "unseen"))]
        for kind, e in calibrated.errors.items()
    ]
    headings = ["constant", "before>", "fitted>", "90% interval", "note"]
    title = "mean absolute errors; unseen: of rows left out of the fit, five folds"
    return [
        table(f"constants of the {calibrated.what}", headings, constants),
        table(title, ["rows of", "rows>", "before>", "fitted>", "unseen>"], errors),
    ]


def _cluster_tables(found: ClusterCalibration) -> list[RenderableType]:
    constants = [
        [
            *(c.name, f"{c.before:.3g}", f"{c.value:.3g}", f"{c.low:.3g} to {c.high:.3g}"),
            *(c.unit, c.note),
        ]
        for c in found.constants
    ]
    runs = [
        [str(run.line), run.label, f"{run.time_s:.4g} s", f"{before:+.1%}", f"{after:+.1%}"]
        for run, before, after in zip(found.runs, found.errors_before, found.errors, strict=True)
    ]
    habits = [[words, f"{share:.0%}"] for words, share in found.habits.items()]
    headings = ["constant", "before>", "fitted>", "90% interval", "unit", "note"]
    columns = ["row>", "run", "measured>", "error before>", "fitted>"]
    return [
        table(f"{found.name}: what {len(runs)} runs tell", headings, constants),
        table("what the software seems to do", ["habit", "probability>"], habits),
        table("runs", columns, runs),
    ]


def _calibrate_cluster(file: Path, start: Start, output: CalibrationOutput) -> None:
    """Calibrate chip, interconnect and software by whole runs."""
    found = calibrate_runs(file, start.name, start.profile or None)
    for line in found.notes:
        note(f"{file}: {line}")
    if found.next_run is not None:
        note(f"a further run would tell most with {found.next_run}")
    _deliver(found, _cluster_tables(found), output)


def _deliver(
    found: Calibrated | ClusterCalibration, tables: list[RenderableType], output: CalibrationOutput
) -> None:
    if output.to_file is not None:
        text = yaml.safe_dump(found.document, sort_keys=False, allow_unicode=True)
        write_text(output.to_file, text)
    Output(output.as_json).emit(found.to_dict, lambda: tables)


def _is_runs(file: Path) -> bool:
    return (
        file.suffix == ".csv" and not is_collective_table(file) and is_run_table(csv_rows(file)[0])
    )


def _calibrated(files: list[Path], chip: str, fabric: str, name: str) -> Calibrated:
    for file in files:
        if not file.is_file():
            raise InvalidInputError(f"{file}: cannot be read: there is no such file")
    collective = [is_collective_table(file) for file in files]
    if any(collective) != all(collective):
        raise InvalidInputError(
            "MEASUREMENTS: operators and collectives are not accepted together; "
            "expected one call for the chip and one for the fabric"
        )
    if collective[0]:
        if not fabric:
            raise InvalidInputError("--fabric: is missing; expected the fabric to begin from")
        return calibrate_fabric(files, presets.fabric(fabric), name)
    if not chip:
        raise InvalidInputError("--chip: is missing; expected the chip to begin from")
    return calibrate_chip(files, presets.chip(chip), name)


@dataclass(frozen=True)
class Start:
    """Starting point."""

    chip: str = ""
    """For operators: the chip to begin from, a preset or a file."""
    fabric: str = ""
    """For collectives: the interconnect to begin from, a preset or a file."""
    profile: str = ""
    """For whole runs: the software profile to begin from, a name or a file; by default the one that
    the rows name, or generic."""
    name: str = ""
    """What to call the result."""
    emit_benchmark: ToPath = None
    """Write a script that measures your own GPU, and do nothing else."""


@dataclass(frozen=True)
class CalibrationOutput(Output):
    """Output."""

    to_file: JsonPath = None
    """Write the chip, the interconnect, or the calibration of a cluster here, as YAML."""


def calibrate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="MEASUREMENTS...",
            help="Files of measured operators, or of measured collectives, of one machine; or one "
            "table of whole training runs of one cluster.",
        ),
    ] = None,
    *,
    start: Start,
    output: CalibrationOutput,
) -> None:
    """Fit a chip or interconnect to measurements, or a cluster to a handful of training runs.

    What a table of runs gives is used by other commands as --calibration mine.yaml.

    Example: phaze-fast study calibrate products.csv --chip h200 --name mine -o mine.yaml
    """
    if start.emit_benchmark is not None:
        write_text(start.emit_benchmark, benchmark_script())
        note(f"{start.emit_benchmark}: run it with PyTorch; it writes files for calibrate")
        return
    if not files:
        raise InvalidInputError("MEASUREMENTS: is missing; expected files, or --emit-benchmark")
    if len(files) == 1 and files[0].is_file() and _is_runs(files[0]):
        _calibrate_cluster(files[0], start, output)
        return
    calibrated = _calibrated(files, start.chip, start.fabric, start.name)
    for pair in calibrated.collinear:
        note(
            f"{pair[0]} and {pair[1]}: these measurements cannot separate the two; only their "
            "combination is fitted"
        )
    left = [c.name for c in calibrated.constants if c.note.startswith("no row")]
    if left:
        note(
            f"no row depends on {', '.join(left)}: the starting chip's value is kept, which is an "
            "extrapolation"
        )
    _deliver(calibrated, _calibration_tables(calibrated), output)


# ---- backtest ----


def _shape(features: dict[str, float]) -> str:
    return (
        f"{features['arrays']:g} x {features['array']:g}, {features['vector_cores']:g} vector, "
        f"{features['buffer_mib']:g} MiB, {1e3 * features['hbm_bytes_per_flop']:.2f} B/kFLOP, "
        f"links {features['link_bytes_per_s'] / 1e9:g} GB/s, {features['clock_ghz']:.2f} GHz"
    )


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def _backtest_tables(document: dict[str, Any]) -> list[RenderableType]:
    rows = []
    for row in document["generations"]:
        place = [f"{row['rank']} of {row['chips']}", f"{row['regret']:.3f}"]
        shapes = [_shape(row[which]) for which in ("real", "best")]
        named = [row["name"], str(row["year"]), row["model"]]
        rows.append([*named, *place, format_time(row["time_s"]), *shapes])
    columns = ["chip", "year>", "model", "rank>", "regret>", "step>", "built", "best around it"]
    parts: list[RenderableType] = []
    title = "Real chips among those around them, within their own area and power"
    parts += [table(title, columns, rows)]
    moves = [
        [f"{row['from']} to {row['to']}", *("yes" if v else "no" for v in row["agree"].values())]
        for row in document["directions"]
    ]
    if moves:
        title = "Does the best chip change as the real one did?"
        parts.append(table(title, ["step", *FEATURES.values()], moves))
    runs = []
    for row in document.get("runs", []):
        points = "-" if row["points"] is None else f"{row['points']:+.1f}"
        shares = [_percent(row["mfu"]), _percent(row["published_mfu"]), points]
        runs.append([row["name"], row["chip"], str(row["devices"]), *shares, row["note"]])
    if runs:
        names = ["run", "chip", "devices>", "MFU>", "published>", "points>", "note"]
        parts.append(table("Published runs", names, runs))
        order = document["order"]
        pairs = [
            [f"{p['from']} to {p['to']}", f"{p['predicted']:.2f}", f"{p['published']:.2f}"]
            for p in order["speedups"]
        ]
        parts.append(
            table(f"Speed-up per chip, {order['model']}", ["step", "here>", "published>"], pairs)
        )
    return parts


def back_test(
    generation: Annotated[
        list[str] | None, typer.Argument(help="Generations, such as 'TPU v4'; by default all.")
    ] = None,
    threads: Threads = None,
    *,
    output: ChartsOutput,
) -> None:
    """Rank real chips among those within their own limits.

    Example: phaze-fast study backtest "TPU v4"
    """
    document = backtest(generation or (), threads)
    output.write_page(lambda: backtest_page(document))
    output.emit(lambda: document, lambda: _backtest_tables(document))


# ---- reproduce ----


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _paper_tables(reproduced: Reproduced) -> list[RenderableType]:
    rows = [
        [row.case, _cell(row.published), _cell(row.ours), _cell(row.honest), row.why]
        for row in reproduced.rows
    ]
    columns = ["case", "published>", "ours, its assumptions>", "ours, honest>", "why they differ"]
    return [table(reproduced.measure, columns, rows, reproduced.source)]


@dataclass(frozen=True)
class PaperOutput(Output):
    """Output."""

    models: str = ""
    """Which of the paper's models, separated by commas; by default all."""
    csv: ToPath = None
    """Write the rows as CSV."""
    latex: ToPath = None
    """Write the rows as a LaTeX table."""


def reproduce_paper(
    paper: Annotated[str, typer.Argument(help=f"Which paper: {', '.join(PAPERS)}.")],
    threads: Threads = None,
    *,
    output: PaperOutput,
) -> None:
    """Compare a paper's published figures with ours.

    A figure that the paper's public text does not give is shown as missing, never made up.

    Example: phaze-fast study reproduce nest --csv nest.csv
    """
    names = [name for name in output.models.split(",") if name]
    reproduced = reproduce(paper.lower(), names, threads, note)
    if output.csv is not None:
        reproduced.to_csv(output.csv)
        note(f"wrote {output.csv}")
    if output.latex is not None:
        write_text(output.latex, reproduced.to_latex())
        note(f"wrote {output.latex}")
    output.emit(reproduced.to_dict, lambda: _paper_tables(reproduced))
