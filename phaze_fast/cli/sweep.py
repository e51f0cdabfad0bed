"""The command `sweep`: the best plan of every combination of models, chips, devices and batches."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from phaze_fast.cli.model_argument import MODEL_HELP, load_model
from phaze_fast.cli.output import (
    AsJson,
    ToFile,
    ToPage,
    emit,
    is_watched,
    note,
    table,
    target,
    typed,
)
from phaze_fast.cli.plan_options import Hardware, PrecisionName, SoftwareName, several
from phaze_fast.planning import Training
from phaze_fast.runs.sweep import Point, SweepTable, sweep
from phaze_fast.software import BF16, DEFAULT
from phaze_fast.units import format_bytes, format_time

__all__ = ["add_commands"]

_SHOWN = 40


def _rows(found: SweepTable) -> list[list[str]]:
    rows = []
    for row in found.rows[:_SHOWN]:
        point = [row["model"], row["chip"], f"{row['devices']:,}", f"{row['global_batch']:,}"]
        if row["status"] == "optimal":
            widths = " ".join(f"{n}{row[n]}" for n in ("tp", "pp", "dp", "cp", "ep") if row[n] > 1)
            plan = widths or "one device"
            values = [format_time(row["time_s"]), format_bytes(row["memory_bytes"])]
            rows.append([*point, *values, f"{row['mfu']:.1%}", plan])
        else:
            rows.append([*point, "-", "-", "-", row["status"]])
    return rows


def _progress() -> Callable[[int, int], None] | None:
    """Count points on a terminal."""
    if not is_watched(sys.stderr):
        return None

    def show(done: int, whole: int) -> None:
        sys.stderr.write(f"\r{done:,} of {whole:,} points" + ("\n" if done == whole else ""))
        sys.stderr.flush()

    return show


def sweep_points(
    model: Annotated[list[str], typer.Argument(help=f"One or several. {MODEL_HELP}")],
    chip: Annotated[
        str,
        typer.Option(
            help="Chips to try, divided by commas: presets (see `phaze-fast chips`), files."
        ),
    ],
    devices: Annotated[str, typer.Option(help="Counts of devices to try, divided by commas.")],
    fabric: Annotated[
        str | None,
        typer.Option(help="How the devices are wired: a preset or a file; by default as usual."),
    ] = None,
    global_batch: Annotated[
        str, typer.Option(help="Sequences of one training step to try, divided by commas.")
    ] = "512",
    seq: Annotated[
        str | None,
        typer.Option(help="Tokens of a sequence to try, divided by commas (default: the model's)."),
    ] = None,
    micro_batch: Annotated[
        str, typer.Option(help="Sequences a device works on at once; each plan has the best.")
    ] = "1,2,4,8",
    precision: PrecisionName = None,
    software: SoftwareName = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps finished points; the same command goes on there."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write all columns as CSV to this file.", callback=target)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="At most so many threads; by default all cores.")
    ] = None,
    report: ToPage = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Find the best plan of every combination of models, chips, devices and batches.

    Example: phaze-fast sweep llama2-7b --chip h100,a100-80 --devices 8,16,32 --report sweep.html
    """
    step = {
        "micro_batch": several(micro_batch, "micro_batch"),
        "precision": precision or BF16,
        "software": software or DEFAULT,
    }
    lengths: tuple[int | None, ...] = several(seq, "seq") or (None,)
    models = [load_model(name, lengths[0]) for name in model]
    clusters = [
        Hardware(chip=name.strip(), devices=n, fabric=fabric).cluster()
        for name in chip.split(",")
        for n in several(devices, "devices") or ()
    ]
    batches = several(global_batch, "global_batch") or ()
    points = [
        Point(each, cluster, Training.from_dict({**step, "global_batch": batch, "seq": length}))
        for each, cluster, batch, length in itertools.product(models, clusters, batches, lengths)
    ]
    found = sweep(points, out=resume, threads=threads, progress=_progress())
    for line in found.notes:
        note(line)
    if report is not None:
        from phaze_fast.report.plan_page import write_page
        from phaze_fast.report.sweep_page import sweep_page

        title = ", ".join(dict.fromkeys(each.name for each in models))
        write_page(sweep_page(found, title, typed()), report)
        note(f"wrote {report}")
    if csv is not None:
        found.to_csv(csv)
        note(f"wrote {csv}")
    columns = ["model", "chip", "devices>", "batch>", "step>", "memory>", "MFU>", "plan"]
    left = len(found.rows) - _SHOWN
    caption = f"and {left:,} more; --csv, --json and --report have all" if left > 0 else ""
    emit(
        lambda: {"rows": found.rows, "resumed": found.resumed, "repeated": found.repeated},
        lambda: [table("The best plan of every point", columns, _rows(found), caption)],
        as_json,
        to_file,
    )


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("sweep")(sweep_points)
