"""The command `backtest`: real generations of chips under their own limits."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import AsJson, ToFile, ToPage, emit, note, table
from phaze_fast.units import format_time

__all__ = ["add_commands"]


def _shape(features: dict[str, float]) -> str:
    return (
        f"{features['arrays']:g} x {features['array']:g}, {features['vector_cores']:g} vector, "
        f"{features['buffer_mib']:g} MiB, {1e3 * features['hbm_bytes_per_flop']:.2f} B/kFLOP, "
        f"links {features['link_bytes_per_s'] / 1e9:g} GB/s, {features['clock_ghz']:.2f} GHz"
    )


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def _tables(found: dict[str, Any]) -> list[RenderableType]:
    rows = [
        [
            row["name"],
            str(row["year"]),
            row["model"],
            f"{row['rank']} of {row['chips']}",
            f"{row['regret']:.3f}",
            format_time(row["time_s"]),
            _shape(row["real"]),
            _shape(row["best"]),
        ]
        for row in found["generations"]
    ]
    columns = ["chip", "year>", "model", "rank>", "regret>", "step>", "built", "best around it"]
    parts: list[RenderableType] = []
    title = "Real chips among those around them, within their own area and power"
    parts += [table(title, columns, rows)]
    moves = [
        [f"{row['from']} to {row['to']}", *("yes" if v else "no" for v in row["agree"].values())]
        for row in found["directions"]
    ]
    if moves:
        names = ["array", "arrays", "multipliers", "vector cores", "buffer", "HBM/FLOP", "links"]
        parts.append(
            table("Does the best chip change as the real one did?", ["step", *names], moves)
        )
    runs = [
        [
            row["name"],
            row["chip"],
            str(row["devices"]),
            _percent(row["mfu"]),
            _percent(row["published_mfu"]),
            "-" if row["points"] is None else f"{row['points']:+.1f}",
            row["note"],
        ]
        for row in found.get("runs", [])
    ]
    if runs:
        names = ["run", "chip", "devices>", "MFU>", "published>", "points>", "note"]
        parts.append(table("Published runs", names, runs))
        order = found["order"]
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
    threads: Annotated[
        int | None, typer.Option(help="At most so many threads; by default all cores.")
    ] = None,
    report: ToPage = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Search under the limits of real generations of chips, and see where those chips lie.

    Example: phaze-fast backtest "TPU v4"
    """
    from phaze_fast.papers.backtest import backtest

    found = backtest(generation or (), threads)
    if report is not None:
        from phaze_fast.report.backtest_page import write_backtest

        write_backtest(found, report)
        note(f"wrote {report}")
    emit(lambda: found, lambda: _tables(found), as_json, to_file)


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("backtest")(back_test)
