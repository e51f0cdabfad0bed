"""Plans that were placed, by the content of the problem; kept in a journal if there is one.

With a journal every answer is on disk before the search goes on, so that a search which was killed
finds all it had when it is run again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from phaze_fast.planning import Placed
from phaze_fast.runs.journal import Journal

__all__ = ["PlanCache", "placed_from", "placed_row"]

Array = np.ndarray[Any, Any]

Known = tuple[Array, list[Placed]]
"""For each capacity, up to what time plans were looked for, and the best."""


def _number(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


def placed_row(placed: Placed) -> list[Any]:
    """Write a plan as plain data."""
    borders = [list(placed.cuts), list(placed.variants)]
    return [_number(placed.time_s), placed.memory_bytes, placed.layout, *borders]


def placed_from(row: Any) -> Placed:
    """Read what `placed_row` wrote."""
    time_s, memory_bytes, layout, cuts, variants = row
    return Placed(float(time_s), float(memory_bytes), int(layout), tuple(cuts), tuple(variants))


def _known(row: dict[str, Any]) -> Known:
    limits = np.array([float(x) for x in row["limits"]])
    return limits, [placed_from(item) for item in row["placed"]]


class PlanCache:
    """Plans by the content of the problem.

    Parameters
    ----------
    journal
        Where they are kept, and where those of an earlier run are; by default nowhere.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        rows = journal.rows if journal is not None else {}
        self._known: dict[str, Known] = {key: _known(row) for key, row in rows.items()}
        self.recalled = len(self._known)
        """Answers of an earlier run."""

    @staticmethod
    def key(problem: str, strategy: int, times: bytes) -> str:
        """Hash what decides an answer."""
        text = f"{problem} {strategy} ".encode()
        return hashlib.blake2b(text + times, digest_size=16).hexdigest()

    def get(self, key: str) -> Known | None:
        """Look up an answer."""
        return self._known.get(key)

    def __getitem__(self, key: str) -> Known:
        return self._known[key]

    def put(self, answers: Iterable[tuple[str, Array, list[Placed]]]) -> None:
        """Keep answers."""
        listed = list(answers)
        if self._journal is not None:
            self._journal.append(
                [
                    {
                        "key": key,
                        "status": "placed",
                        "limits": [_number(float(x)) for x in limits],
                        "placed": [placed_row(placed) for placed in found],
                    }
                    for key, limits, found in listed
                ]
            )
        for key, limits, found in listed:
            self._known[key] = (limits, found)
