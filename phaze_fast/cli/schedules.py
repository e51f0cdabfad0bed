"""The command `schedule`: layers from a file, and an optimal schedule of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import AsJson, ToFile, emit, table
from phaze_fast.schedule import LayerSchedule, read_instances, schedule_instances

__all__ = ["add_commands"]

_CHARTS = 3


def _data(found: LayerSchedule) -> dict[str, Any]:
    instance = found.instance
    return {
        "name": instance.name,
        "status": found.status,
        "makespan": found.makespan,
        "bound": found.bound,
        "gap": found.gap,
        "proved_by": found.proved_by,
        "starts": instance.as_given(found.starts),
        "cores": instance.as_given(
            [modes[way][0] or "all" for modes, way in zip(instance.modes, found.mode, strict=True)]
        ),
        "utilization": found.utilization,
        "critical_path": list(found.critical_path),
        "nodes": found.nodes,
        "solve_s": found.solve_s,
    }


def show_schedules(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON lines, one layer each: operators, their seconds on cores, what waits "
            "for what."
        ),
    ],
    rule: Annotated[
        str,
        typer.Option(
            help="exclusive: an operator that holds all cores of its kind runs alone; "
            "overlap: other kinds may run beside it."
        ),
    ] = "exclusive",
    time_limit: Annotated[float, typer.Option(help="Seconds for each layer and method.")] = 60.0,
    highs: Annotated[
        bool, typer.Option(help="Go on with HiGHS where branch and bound did not finish.")
    ] = True,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Schedule layers on one chip each, proven optimal or with a stated gap."""
    instances = list(read_instances(file))
    found = schedule_instances(instances, rule, time_limit, highs=highs)

    def human() -> list[RenderableType]:
        rows = [
            [
                s.instance.name,
                str(len(s.instance)),
                f"{s.makespan:.8g}",
                s.status,
                "-" if s.status == "optimal" else f"{s.gap:.2%}",
                s.proved_by,
                ", ".join(f"{name} {share:.0%}" for name, share in s.utilization.items()),
                f"{1e3 * s.solve_s:.2f}",
            ]
            for s in found
        ]
        headings = ["layer", "ops>", "makespan>", "status", "gap>", "proved by", "busy", "ms>"]
        parts: list[RenderableType] = [table("", headings, rows)]
        if len(found) <= _CHARTS:
            parts += [str(s) for s in found]
        return parts

    emit(lambda: [_data(s) for s in found], human, as_json, to_file)


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("schedule")(show_schedules)
