"""The command `schedule`: layers from a file, and an optimal schedule of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import Output, table
from phaze_fast.schedule import LayerSchedule, read_instances, schedule_instances
from phaze_fast.tables import picked

_CHARTS = 3


def _data(schedule: LayerSchedule) -> dict[str, Any]:
    instance = schedule.instance
    chosen = zip(instance.modes, schedule.mode, strict=True)
    cores = [modes[mode][0] or "all" for modes, mode in chosen]
    return {
        "name": instance.name,
        **picked(schedule, "status", "makespan", "bound", "gap", "proved_by"),
        "starts": instance.as_given(schedule.starts),
        "cores": instance.as_given(cores),
        "utilization": schedule.utilization,
        "critical_path": list(schedule.critical_path),
        **picked(schedule, "nodes", "solve_s"),
    }


@dataclass(frozen=True)
class Scheduling:
    """How to schedule."""

    rule: str = "exclusive"
    """exclusive: an operator that holds all cores of its kind runs alone; overlap: other kinds may
    run at the same time."""
    time_limit_s: float = 60.0
    """Seconds for each layer and method."""
    highs: bool = True
    """Go on with HiGHS where branch and bound did not finish."""


def show_schedules(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON lines, one layer each: operators, their seconds on cores, their "
            "dependencies."
        ),
    ],
    how: Scheduling,
    output: Output,
) -> None:
    """Schedule the operators of layers on a chip, proven.

    Example: phaze-fast schedule layers.jsonl
    """
    instances = list(read_instances(file))
    schedules = schedule_instances(instances, how.rule, how.time_limit_s, highs=how.highs)

    def tables() -> list[RenderableType]:
        rows = []
        for s in schedules:
            gap = "-" if s.status == "optimal" else f"{s.gap:.2%}"
            busy = ", ".join(f"{name} {share:.0%}" for name, share in s.utilization.items())
            first = [s.instance.name, str(len(s.instance)), f"{s.makespan:.8g}", s.status, gap]
            rows.append([*first, s.proved_by, busy, f"{1e3 * s.solve_s:.2f}"])
        headings = ["layer", "ops>", "makespan>", "status", "gap>", "proved by", "busy", "ms>"]
        charts = map(str, schedules if len(schedules) <= _CHARTS else ())
        return [table("", headings, rows), *charts]

    output.emit(lambda: [_data(s) for s in schedules], tables)
