"""How a command's result is written: a table or JSON, to the terminal or to a file.

Results go to standard output, everything else to standard error.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from phaze_fast.documents import write_whole
from phaze_fast.errors import (
    InfeasibleError,
    InvalidInputError,
    UndecidedError,
    not_accepted,
    printable,
)

# ---- options that name files ----


def target(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before any work is done."""
    if path is None or str(path) == "-" or str(path).startswith("/dev/"):
        return path
    try:
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # fails for a link to itself, which Python 3.13 would resolve
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
    """Read the name of a directory; refuse empty text, such as an unset variable of a script."""
    if not text.strip():
        raise typer.BadParameter("'' is not accepted; expected the name of a directory")
    return Path(text)


def at_least(least: int, **settings: Any) -> Any:
    """Declare an option that accepts whole numbers from `least` on."""

    def checked(param: typer.CallbackParam, value: int) -> int:
        if value < least:
            raise not_accepted(param.opts[0], value, f"a number >= {least}")
        return value

    return typer.Option(callback=checked, **settings)


def _json(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse JSON output to a file whose name is that of a table or page."""
    if path is not None and path.suffix in (".csv", ".html", ".parquet"):
        raise InvalidInputError(f"{param.opts[0]} {path}: is JSON; expected a name with .json")
    return target(param, path)


def _charts(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse a page with charts where Plotly is missing, before any work is done."""
    if path is not None and find_spec("plotly") is None:
        raise InvalidInputError("--report needs Plotly: pip install 'phaze-fast[plot]'")
    return target(param, path)


PresetName = Annotated[
    str | None,
    typer.Argument(help="A preset, or a .yaml or .json file; without it all presets are listed."),
]
ToPath = Annotated[Path | None, typer.Option(callback=target)]
"""An output file; one that cannot be written is refused before any work is done."""


JsonPath = Annotated[Path | None, typer.Option("-o", "--output", callback=_json)]


# ---- delivering a result ----


@dataclass(frozen=True)
class Output:
    """Output."""

    as_json: Annotated[bool, typer.Option("--json")] = False
    """Print one JSON document instead of a table."""
    to_file: JsonPath = None
    """Write the JSON to a file."""

    @property
    def wants_document(self) -> bool:
        """Whether the result is wanted as JSON, printed or in a file."""
        return self.as_json or self.to_file is not None

    @property
    def path(self) -> Path | None:
        """The file that the document goes to; None where it goes to standard output or nowhere."""
        return None if self.to_file is None or str(self.to_file) == "-" else self.to_file

    def write(self, document: Any) -> None:
        """Write the document to the file, or to standard output where there is none."""
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        if self.path is None:
            sys.stdout.write(text)
        else:
            write_text(self.path, text)
            note(f"wrote {self.path}")

    def emit(self, document: Callable[[], Any], tables: Callable[[], list[RenderableType]]) -> None:
        """Deliver a result.

        Parameters
        ----------
        document
            Builds the plain data for ``--json`` and ``-o``; called only where it is wanted.
        tables
            Builds the tables for a terminal; called only where they are shown.
        """
        if self.wants_document:
            self.write(document())
        unheard = self.path is not None and not sys.stdout.writable()
        if not self.as_json and str(self.to_file) != "-" and not unheard:
            show(tables())

    def infeasible(self, error: InfeasibleError | UndecidedError, **more: Any) -> None:
        """Write the reason of infeasibility as a result, then raise the error (exit code 1).

        Raises
        ------
        InfeasibleError
            The error itself.
        """
        if self.wants_document:
            self.write(unanswered(error, **more))
        raise error


@dataclass(frozen=True)
class PageOutput(Output):
    """Output."""

    report: ToPath = None
    """Write a page (HTML) that opens offline."""

    def write_page(self, page: Callable[[], str]) -> None:
        """Write the page of ``--report``; it is built only where it is wanted."""
        if self.report is not None:
            write_whole(self.report, page())
            note(f"wrote {self.report}")


@dataclass(frozen=True)
class ChartsOutput(PageOutput):
    """Output."""

    report: Annotated[Path | None, typer.Option(callback=_charts)] = None
    """Write a page (HTML) with charts, which opens offline."""


@dataclass(frozen=True)
class TableOutput(ChartsOutput):
    """Output."""

    parquet: ToPath = None
    """Write the rows of the result as Parquet."""


def unanswered(error: InfeasibleError | UndecidedError, **more: Any) -> dict[str, Any]:
    """Return the reason why there is no answer as plain data."""
    status = "infeasible" if isinstance(error, InfeasibleError) else "unknown"
    return {"status": status, "reason": str(error), **more}


def typed() -> str:
    """Return the command as it was typed."""
    return " ".join(["phaze-fast", *sys.argv[1:]])


def write_text(path: Path, text: str) -> None:
    """Write a file atomically, so that a full disk never leaves half a result."""
    write_whole(path, text, f"-o {path}")


def note(message: str) -> None:
    """Print a line on standard error, unless it was closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{message}\n")


# ---- tables ----

_WIDTH_OF_A_PIPE = 140
_WIDE = 112


def is_watched(stream: TextIO | None) -> bool:
    """Whether a stream is open and a terminal."""
    return stream is not None and stream.isatty()


def _console() -> Console:
    """Create a console as wide as the terminal; for a pipe, of COLUMNS or 140 columns."""
    columns = os.environ.get("COLUMNS", "")
    piped = int(columns) if columns.isdecimal() and int(columns) > 0 else _WIDTH_OF_A_PIPE
    width = None if is_watched(sys.stdout) else piped
    return Console(file=sys.stdout, width=width, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def progress_bar(description: str, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error if that is a terminal; yield its update function.

    The function takes ``completed``, ``total`` and ``text``, which is shown right of the bar.
    """
    from rich import progress as bars  # imported here because it is slow to import

    watched = shown and is_watched(sys.stderr)
    with bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("{task.fields[text]}"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
        transient=True,
        disable=not watched,
        console=Console(stderr=True, quiet=not watched),
    ) as bar:
        yield functools.partial(bar.update, bar.add_task(description, total=None, text=""))


def is_narrow() -> bool:
    """Whether the output is too narrow for tables of many columns."""
    return _console().width < _WIDE


def show(parts: list[RenderableType]) -> None:
    """Print tables and texts one below the other."""
    console = _console()
    for part in parts:
        console.print(part, markup=False)


def _lines(text: str) -> str:
    """Remove control characters except line breaks."""
    return "\n".join(printable(line) for line in text.split("\n"))


_NAME = 32
"""Longest text of a first column that is not wrapped."""


def table(title: str, columns: list[str], rows: list[list[str]], caption: str = "") -> Group:
    """Lay out rows under column headings; headings ending in '>' are right-aligned.

    Numbers and short names in front are never cut. Where they do not fit side by side, the last
    columns are left out, and a line says so.
    """
    laid_out, numbers = Table(), [heading.endswith(">") for heading in columns]
    least, widest = [], []
    for at, cells in enumerate(zip(columns, *rows, strict=True)):
        widest.append(max(map(len, cells)))
        words = max(len(word) for cell in cells for word in [*cell.split(), ""])
        whole = numbers[at] or (at == 0 and widest[0] <= _NAME)
        least.append(widest[at] if whole else min(words, _NAME))
    shown = len(columns)
    while shown > 2 and sum(least[:shown]) + 3 * shown + 1 > _console().width:
        shown -= 1
    for at, heading in enumerate(columns[:shown]):
        laid_out.add_column(
            heading.rstrip(">"),
            justify="right" if numbers[at] else "left",
            no_wrap=numbers[at] or (at == 0 and least[0] == widest[0]),
        )
    for row in rows:
        laid_out.add_row(*(Text(_lines(cell)) for cell in row[:shown]))
    left = ", ".join(heading.rstrip(">") for heading in columns[shown:])
    lines = [caption] * bool(caption) + [f"a wider terminal also has: {left}"] * bool(left)
    above = [Text(_lines(title), style="bold")] if title else []
    return Group(*above, laid_out, *(Text(_lines(line), style="dim") for line in lines))


def fields(title: str, pairs: list[tuple[str, str]], caption: str = "") -> Group:
    """Lay out named values, one per line; empty ones are omitted."""
    rows = [[name, value] for name, value in pairs if value]
    return table(title, ["field", "value"], rows, caption)
