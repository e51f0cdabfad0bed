"""How a command's result is written: a table or JSON, to the terminal or to a file.

Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from phaze_fast.documents import write_whole
from phaze_fast.errors import InfeasibleError, InvalidInputError

__all__ = [
    "AsJson",
    "ToFigures",
    "ToFile",
    "ToPage",
    "emit",
    "emit_infeasible",
    "fields",
    "folder",
    "is_narrow",
    "is_watched",
    "note",
    "table",
    "target",
    "typed",
    "write_text",
]


def target(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a place that cannot be written before any work is done."""
    if path is None or str(path) == "-" or str(path).startswith("/dev/"):
        return path
    try:
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # a link to itself, which Python 3.13 resolves
        place = path.resolve()
        reason = "it is a folder" if place.is_dir() else ""
        if not place.parent.is_dir():
            reason = "its folder does not exist"
        elif not os.access(place if place.exists() else place.parent, os.W_OK):
            reason = "no permission"
    except (OSError, RuntimeError) as error:
        reason = str(error)
    if reason:
        raise InvalidInputError(f"{param.opts[0]} {path}: cannot be written: {reason}")
    return path


def folder(text: str) -> Path:
    """Read a directory's name; an empty one, as a script's unset variable gives, names none."""
    if not text.strip():
        raise typer.BadParameter("'' is not accepted; expected the name of a directory")
    return Path(text)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
ToFile = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="Write the JSON to a file.", callback=target
    ),
]


def _figures(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a page with figures that cannot be made before any work is done."""
    if path is not None and find_spec("plotly") is None:
        raise InvalidInputError("--report needs Plotly: pip install 'phaze-fast[plot]'")
    return target(param, path)


ToFigures = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write a page (HTML) that opens offline.",
        callback=_figures,
    ),
]

ToPage = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="FILE", help="Write a page (HTML) that opens offline.", callback=target
    ),
]

_WIDTH_OF_A_PIPE = 140
_WIDE = 112


def is_watched(stream: TextIO | None) -> bool:
    """Whether somebody reads a stream on a terminal; none does where it was closed."""
    return stream is not None and stream.isatty()


def _console() -> Console:
    width = None if is_watched(sys.stdout) else _WIDTH_OF_A_PIPE
    return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)


def is_narrow() -> bool:
    """Whether the terminal is too narrow for tables of many columns."""
    return _console().width < _WIDE


def note(message: str) -> None:
    """Say something to the person at the terminal, on standard error, if anyone listens."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{message}\n")


def table(title: str, columns: list[str], rows: list[list[str]], caption: str = "") -> Group:
    """Lay rows out under column headings; headings ending in '>' are right-aligned."""
    laid_out = Table()
    for heading in columns:
        right = heading.endswith(">")
        laid_out.add_column(
            heading.rstrip(">"), justify="right" if right else "left", no_wrap=right
        )
    for row in rows:
        laid_out.add_row(*(Text(cell) for cell in row))
    above = [Text(title, style="bold")] if title else []
    below = [Text(caption, style="dim")] if caption else []
    return Group(*above, laid_out, *below)


def fields(title: str, pairs: list[tuple[str, str]], caption: str = "") -> Group:
    """Lay named values out, one a line."""
    return table(title, ["field", "value"], [[name, value] for name, value in pairs], caption)


def emit(
    data: Callable[[], Any],
    human: Callable[[], list[RenderableType]],
    as_json: bool,
    to_file: Path | None,
) -> None:
    """Deliver a result.

    Parameters
    ----------
    data
        Builds the plain data for ``--json`` and ``-o``; called only where it is wanted.
    human
        Builds what a person should see; called only where it is shown.
    as_json
        Whether ``--json`` was given.
    to_file
        Where ``-o`` points; the JSON goes there instead of to standard output.
    """
    if as_json or to_file is not None:
        text = json.dumps(data(), indent=2, allow_nan=False) + "\n"
        if to_file is None or str(to_file) == "-":
            sys.stdout.write(text)
            return
        else:
            write_text(to_file, text)
            note(f"wrote {to_file}")
    if as_json:
        return
    console = _console()
    for part in human():
        console.print(part, markup=False)


def emit_infeasible(error: InfeasibleError, as_json: bool, to_file: Path | None) -> None:
    """Deliver "there is no answer, because": a result like any other, but exit code 1 follows."""
    if as_json or to_file is not None:
        emit(lambda: {"status": "infeasible", "reason": str(error)}, list, True, to_file)
    raise error


def typed() -> str:
    """Give the command that was typed."""
    return " ".join(["phaze-fast", *sys.argv[1:]])


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, so that a full disk never leaves half a result."""
    write_whole(path, text, f"-o {path}")
