"""Ctrl-C: a search ends with the best it has found and its bound, and with exit code 130."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from phaze_fast.cli.output import note
from phaze_fast.errors import InfeasibleError

__all__ = ["ends_interrupted", "stopped_by_hand", "told_where"]


@contextlib.contextmanager
def stopped_by_hand() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C end a search with what it has found so far, and its bound; twice, at once."""
    asked: list[bool] = []

    def ask(*_: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        note("stopping with the best found so far and its bound; Ctrl-C again leaves at once")

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def told_where(resume: Path | None) -> Iterator[None]:
    """Say, when a search is interrupted, where it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        if resume is not None:
            note(f"what was found is in {resume}; the same command goes on from there")
        raise


@contextlib.contextmanager
def ends_interrupted(stopped: bool) -> Iterator[None]:
    """Deliver a result; where Ctrl-C ended the search, the command still ends as interrupted.

    Where it ended before anything was found, that is no proof that nothing fits.
    """
    try:
        yield
    except InfeasibleError as error:
        if not stopped:
            raise
        note(str(error))
    if stopped:
        raise KeyboardInterrupt
