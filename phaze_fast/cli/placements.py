"""The command `place`: placement problems from a file, and the best plan of each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import emit, note, table, write_text
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.placement import read_problems, solve_published
from phaze_fast.units import format_bytes

__all__ = ["add_commands"]


def _row(found: dict[str, Any]) -> list[str]:
    if found["status"] != "optimal":
        return [found["name"], "infeasible", *("-" * 5), f"{1e3 * found['solve_s']:.2f}"]
    return [
        found["name"],
        found["status"],
        f"{found['finalTimePerBatch']:.8g}",
        str(len(found["stages"])),
        str(found["tensorParallelDegree"]),
        str(found["dataParallelDegree"]),
        format_bytes(max(found["memory"]["stage_bytes"])),
        f"{1e3 * found['solve_s']:.2f}",
    ]


def _stage_rows(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    terms = found["memory"]["stage_terms"]
    for k, (stage, bytes_by_term) in enumerate(zip(found["stages"], terms, strict=True)):
        nodes, total = stage["nodes"], sum(bytes_by_term.values())
        rows.append(
            [
                str(k),
                f"{nodes[0]} to {nodes[-1]}" if len(nodes) > 1 else str(nodes[0]),
                str(len(nodes)),
                str(stage["devicesForStage"]),
                *(format_bytes(bytes_by_term[t]) for t in ("weights", "activations", "stash")),
                format_bytes(found["memory"]["limit_bytes"] - total),
            ]
        )
    return rows


def place_file(
    file: Annotated[
        Path,
        typer.Argument(help="A problem in the public PHAZE program's form, or .jsonl with many."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where answers go, in the same form."),
    ] = None,
    objective: Annotated[str, typer.Option(help="phaze: the published objective.")] = "phaze",
    threads: Annotated[
        int | None, typer.Option(help="At most so many threads; by default all cores.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answers as JSON instead of a table.")
    ] = False,
) -> None:
    """Place layers on devices: stages, widths and replicas, proven optimal."""
    if objective != "phaze":
        raise InvalidInputError(
            f"objective: {objective!r} is not accepted; this input form has only phaze "
            "(for the others: phaze-fast plan)"
        )
    lines = file.suffix == ".jsonl"
    problems = list(read_problems(file))
    found = solve_published(problems, threads)
    if lines:
        text = "".join(json.dumps(each, allow_nan=False) + "\n" for each in found)
    else:
        text = json.dumps(found[0], indent=2, allow_nan=False) + "\n"
    if output is not None:
        write_text(output, text)
        note(f"wrote {output}")
    if as_json:
        document = found if lines else found[0]
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")

    def human() -> list[RenderableType]:
        headings = ["problem", "status", "time>", "stages>", "t>", "d>", "fullest>", "ms>"]
        parts: list[RenderableType] = [table("", headings, [_row(each) for each in found])]
        if len(found) == 1 and found[0]["status"] == "optimal":
            columns = ["stage>", "layers", "count>", "devices>", "weights>", "activations>"]
            parts.append(table("", [*columns, "stash>", "free>"], _stage_rows(found[0])))
        if lines:
            parts += [f"{each['name']}: {each['reason']}" for each in found if "reason" in each]
        return parts

    if output is None and not as_json:
        emit(lambda: found, human, False, None)
    if not lines and found[0]["status"] != "optimal":
        raise InfeasibleError(found[0]["reason"])


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("place")(place_file)
