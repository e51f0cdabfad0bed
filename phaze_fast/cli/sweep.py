"""The command `sweep`: the best plan of every combination of models, chips, devices and batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Annotated, Any

from phaze_fast.cli.option_groups import RecordOptions
from phaze_fast.cli.options import Folder, Hardware, ModelNames, Trained, load_model, numbers
from phaze_fast.cli.output import ChartsOutput, ToPath, note, progress_bar, table, typed
from phaze_fast.hardware import Cluster
from phaze_fast.planning import Training
from phaze_fast.planning.planner import with_headroom
from phaze_fast.planning.throughput import MFU_CONVENTION
from phaze_fast.report.sweep_page import sweep_page
from phaze_fast.runs.sweep import Point, SweepTable, sweep
from phaze_fast.units import format_bytes, format_time

_SHOWN = 40


def _rows(sweep_table: SweepTable) -> list[list[str]]:
    rows = []
    for row in sweep_table.rows[:_SHOWN]:
        point = [row["model"], row["chip"], f"{row['devices']:,}", f"{row['global_batch']:,}"]
        if row["status"] == "optimal":
            widths = " ".join(f"{n}{row[n]}" for n in ("tp", "pp", "dp", "cp", "ep") if row[n] > 1)
            plan = widths or "one device"
            values = [format_time(row["time_s"]), format_bytes(row["memory_bytes"])]
            rows.append([*point, *values, f"{row['mfu']:.1%}", plan])
        else:
            rows.append([*point, "-", "-", "-", row["status"]])
    return rows


@dataclass(frozen=True)
class Clusters:
    """The clusters."""

    chip: str
    """Chips to try, separated by commas: presets (`phaze-fast show chip` lists them) or files."""
    devices: str
    """Counts of devices to try, separated by commas."""
    fabric: str | None = None
    """The interconnect: a preset or a file; by default each chip's usual one."""

    def clusters(self) -> list[Cluster]:
        """Combine every chip with every count of devices."""
        counts = numbers(self.devices, "--devices", int)
        return [
            Hardware(chip=name.strip(), devices=count, fabric=self.fabric).cluster()
            for name in self.chip.split(",")
            for count in counts
        ]


@dataclass(frozen=True)
class SweepOutput(ChartsOutput):
    """Output."""

    csv: ToPath = None
    """Write all columns as CSV to this file."""
    resume: Folder = None
    """Folder that keeps finished points; the same command goes on there."""
    headroom: str = "3%"
    """Memory of each device that stays free, as for plan."""
    threads: int | None = None
    """At most so many threads; by default all cores."""


def sweep_points(
    model: ModelNames,
    where: Clusters,
    trained: Trained,
    step: Annotated[
        dict[str, Any],
        RecordOptions(
            Training,
            skip=("tied", "uncut"),
            several=("global_batch", "seq"),
            global_batch=(512,),
        ),
    ],
    output: SweepOutput,
) -> None:
    """Plan every combination of models, chips and batches.

    Each value of --global-batch and --seq is a separate point; of several values of another
    option, each plan uses the best.

    Example: phaze-fast sweep llama2-7b --chip h100,a100-80 --devices 8,16,32 --report sweep.html
    """
    batches, lengths = step.pop("global_batch"), step.pop("seq", (None,))
    models = [load_model(name, lengths[0], trained.lora) for name in model]
    points = [
        Point(loaded, cluster, Training.from_dict({**step, "global_batch": batch, "seq": length}))
        for loaded, cluster, batch, length in itertools.product(
            models, where.clusters(), batches, lengths
        )
    ]
    points = [
        replace(p, training=with_headroom(p.training, p.cluster, output.headroom)) for p in points
    ]
    with progress_bar("points") as update:
        sweep_table = sweep(
            points,
            out=output.resume,
            threads=output.threads,
            progress=lambda done, total: update(completed=done, total=total),
        )
    for line in sweep_table.notes:
        note(line)
    title = ", ".join(dict.fromkeys(loaded.name for loaded in models))
    output.write_page(lambda: sweep_page(sweep_table, title, typed()))
    if output.csv is not None:
        sweep_table.to_csv(output.csv)
        note(f"wrote {output.csv}")
    columns = ["model", "chip", "devices>", "batch>", "step>", "memory>", "MFU>", "plan"]
    left = len(sweep_table.rows) - _SHOWN
    caption = f"and {left:,} more; --csv, --json and --report have all\n" if left > 0 else ""
    caption += MFU_CONVENTION
    output.emit(
        lambda: {
            "rows": sweep_table.rows,
            "resumed": sweep_table.resumed,
            "repeated": sweep_table.repeated,
        },
        lambda: [table("The best plan of every point", columns, _rows(sweep_table), caption)],
    )
