"""Takes the moments of a search, gives a line alive on a terminal, and JSON lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from phaze_fast.explore.searcher import Moment
from phaze_fast.units import format_time

__all__ = ["shown_progress"]

_EVERY_S = 1.0


def _gap(moment: Moment) -> str:
    if not math.isfinite(moment.incumbent) or moment.bound <= 0:
        return "-"
    return f"{max(0.0, moment.incumbent / moment.bound - 1.0):.2%}"


def _left(first: Moment | None, moment: Moment) -> str:
    """How long it may go on, from how fast what is open became less."""
    if first is None or moment.open >= first.open or moment.open == 0:
        return "-"
    rate = (first.open - moment.open) / max(moment.seconds - first.seconds, 1e-9)
    return format_time(moment.open / rate)


def _line(first: Moment | None, moment: Moment) -> Table:
    grid = Table.grid(padding=(0, 2))
    best = format_time(moment.incumbent) if math.isfinite(moment.incumbent) else "-"
    cells = {
        "bounded": f"{moment.bounded:,}",
        "scheduled": f"{moment.scheduled:,}",
        "placed": f"{moment.placed:,}",
        "open": f"{moment.open:,}",
        "best": best,
        "gap": _gap(moment),
        "elapsed": format_time(moment.seconds),
        "left": _left(first, moment),
    }
    grid.add_row(*(Text(name, style="dim") for name in cells))
    grid.add_row(*cells.values())
    return grid


def _plain(moment: Moment) -> dict[str, Any]:
    names = ("seconds", "bounded", "scheduled", "placed", "open", "incumbent", "bound")
    values = {name: getattr(moment, name) for name in names}
    return {k: v if math.isfinite(v) else None for k, v in values.items()}


@contextlib.contextmanager
def shown_progress(quiet: bool = False) -> Iterator[Callable[[Moment], None] | None]:
    """Give what a search is to call; it writes to standard error.

    Parameters
    ----------
    quiet
        Show nothing.
    """
    if quiet:
        yield None
        return
    first: list[Moment] = []
    if sys.stderr is None:  # it was closed
        yield None
        return
    if sys.stderr.isatty():
        with Live(console=Console(stderr=True), transient=True, refresh_per_second=8) as live:

            def show(moment: Moment) -> None:
                if not first and moment.placed:
                    first.append(moment)
                live.update(_line(first[0] if first else None, moment))

            yield show
        return
    last = [-math.inf]

    def write(moment: Moment) -> None:
        now = time.monotonic()
        if now - last[0] >= _EVERY_S or moment.open == 0:
            last[0] = now
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(json.dumps({"progress": _plain(moment)}) + "\n")
                sys.stderr.flush()

    yield write
