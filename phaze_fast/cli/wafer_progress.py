"""How far the command `wafer` is, on standard error."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phaze_fast.cli.output import is_watched
from phaze_fast.units import format_time

__all__ = ["shown"]


@contextlib.contextmanager
def shown(quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[..., None]]]:
    """Give (say what runs, show how far it is), both on standard error."""
    watched = is_watched(sys.stderr) and not quiet
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
        transient=True,
        disable=not watched,
        console=Console(stderr=True, quiet=not watched),
    ) as bar:
        task = bar.add_task("", total=None, best="")

        def say(name: str) -> None:
            bar.update(task, description=name, completed=0, total=None)

        def show(done: int, total: int, best: float) -> None:
            text = f"best {format_time(best)}" if math.isfinite(best) else ""
            bar.update(task, completed=done, total=total, best=text)

        yield say, show
