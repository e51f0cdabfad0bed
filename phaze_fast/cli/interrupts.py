"""Ctrl-C: a search ends with its best result so far and its bound, and with exit code 130."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from phaze_fast.cli.output import note
from phaze_fast.errors import InfeasibleError, UndecidedError


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end a search with its best result and bound; a second Ctrl-C ends it at once."""
    interrupts: list[bool] = []

    def interrupt(*_: object) -> None:
        if interrupts:
            raise KeyboardInterrupt
        interrupts.append(True)
        note("stopping with the best found so far and its bound; Ctrl-C again leaves at once")

    try:
        before = signal.signal(signal.SIGINT, interrupt)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def say_where_to_resume(folder: Path | None) -> Iterator[None]:
    """Print the folder from which an interrupted search can be resumed."""
    try:
        yield
    except KeyboardInterrupt:
        if folder is not None:
            note(f"results so far are in {folder}; the same command resumes from there")
        raise


@contextlib.contextmanager
def ends_interrupted(stopped: bool) -> Iterator[None]:
    """Deliver a result; where Ctrl-C ended the search, the command still ends as interrupted.

    An interrupted search without a result does not prove infeasibility, so its error becomes a
    note.
    """
    try:
        yield
    except (InfeasibleError, UndecidedError) as error:
        if not stopped:
            raise
        note(str(error))
    if stopped:
        raise KeyboardInterrupt
