"""Progress of a search: a line alive on a terminal, and JSON lines elsewhere."""

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

from phaze_fast.cli.output import is_watched
from phaze_fast.explore import Progress
from phaze_fast.units import format_time

__all__ = ["shown_progress"]

_EVERY_S = 1.0


def _gap(progress: Progress) -> str:
    if not math.isfinite(progress.incumbent) or progress.bound <= 0:
        return "-"
    return f"{max(0.0, progress.incumbent / progress.bound - 1.0):.2%}"


def _left(first: Progress | None, progress: Progress) -> str:
    """How long it may go on, from how fast what is open became less."""
    if first is None or progress.open >= first.open or progress.open == 0:
        return "-"
    rate = (first.open - progress.open) / max(progress.seconds - first.seconds, 1e-9)
    return format_time(progress.open / rate)


def _line(first: Progress | None, progress: Progress) -> Table:
    grid = Table.grid(padding=(0, 2))
    best = format_time(progress.incumbent) if math.isfinite(progress.incumbent) else "-"
    cells = {
        "bounded": f"{progress.bounded:,}",
        "scheduled": f"{progress.scheduled:,}",
        "placed": f"{progress.placed:,}",
        "open": f"{progress.open:,}",
        "best": best,
        "gap": _gap(progress),
        "elapsed": format_time(progress.seconds),
        "left": _left(first, progress),
    }
    grid.add_row(*(Text(name, style="dim") for name in cells))
    grid.add_row(*cells.values())
    return grid


def _plain(progress: Progress) -> dict[str, Any]:
    names = ("seconds", "bounded", "scheduled", "placed", "open", "incumbent", "bound")
    values = {name: getattr(progress, name) for name in names}
    return {k: v if math.isfinite(v) else None for k, v in values.items()}


@contextlib.contextmanager
def shown_progress(quiet: bool = False) -> Iterator[Callable[[Progress], None] | None]:
    """Give what a search is to call; it writes to standard error.

    Parameters
    ----------
    quiet
        Show nothing.
    """
    if quiet:
        yield None
        return
    first: list[Progress] = []
    if sys.stderr is None:  # it was closed
        yield None
        return
    if is_watched(sys.stderr):
        with Live(console=Console(stderr=True), transient=True, refresh_per_second=8) as live:

            def show(progress: Progress) -> None:
                if not first and progress.placed:
                    first.append(progress)
                live.update(_line(first[0] if first else None, progress))

            yield show
        return
    last = [-math.inf]

    def write(progress: Progress) -> None:
        now = time.monotonic()
        if now - last[0] >= _EVERY_S or progress.open == 0:
            last[0] = now
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(json.dumps({"progress": _plain(progress)}) + "\n")
                sys.stderr.flush()

    yield write
