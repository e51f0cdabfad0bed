"""A cache of layer schedules that is kept in a file between runs."""

from __future__ import annotations

from pathlib import Path

from phaze_fast import schedule
from phaze_fast.runs.store import ResultStore

__all__ = ["ScheduleCache"]


class ScheduleCache(schedule.ScheduleCache):
    """Proven schedules by the content of the layer, in memory and in a file.

    Parameters
    ----------
    path
        File to keep them in (SQLite, shared by processes); by default memory alone. Schedules that
        other code or data has computed are not found.
    limit
        Entries held in memory; the least recently used go first.

    Raises
    ------
    InvalidInputError
        Where there is something else at the path, or nothing can be read or made there.

    Examples
    --------
    >>> ScheduleCache().info().entries
    0
    """

    def __init__(self, path: Path | str | None = None, limit: int = 100_000) -> None:
        store = None if path is None else ResultStore(path, "layer schedules")
        super().__init__(store, limit)
