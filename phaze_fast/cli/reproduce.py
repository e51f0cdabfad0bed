"""The command `reproduce`: a paper's published figures beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import AsJson, ToFile, emit, note, table, target, write_text
from phaze_fast.papers.reproduce import PAPERS, Reproduced, reproduce

__all__ = ["add_commands"]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _human(found: Reproduced) -> list[RenderableType]:
    rows = [
        [row.case, _cell(row.published), _cell(row.ours), _cell(row.honest), row.why]
        for row in found.rows
    ]
    columns = ["case", "published>", "ours, its assumptions>", "ours, honest>", "why they differ"]
    return [table(found.measure, columns, rows, found.source)]


def reproduce_paper(
    paper: Annotated[str, typer.Argument(help="Which paper: phaze, nest or tmac.")],
    models: Annotated[
        str, typer.Option(help="Which of its models, divided by commas; by default all.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(help="At most so many threads; by default all cores.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the rows as CSV.", callback=target)
    ] = None,
    latex: Annotated[
        Path | None, typer.Option(help="Write the rows as a LaTeX table.", callback=target)
    ] = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Set a paper's published figures beside ours, and say why they differ.

    A figure that the paper's public text does not give is shown as missing, never made up.

    Example: phaze-fast reproduce nest --csv nest.csv
    """
    names = [name for name in models.split(",") if name]
    found = reproduce(paper.lower(), names, threads, note)
    if csv is not None:
        found.to_csv(csv)
        note(f"wrote {csv}")
    if latex is not None:
        write_text(latex, found.to_latex())
        note(f"wrote {latex}")
    emit(found.to_dict, lambda: _human(found), as_json, to_file)


def add_commands(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("reproduce", epilog=f"Papers: {', '.join(PAPERS)}.")(reproduce_paper)
