"""Takes plans that were found, gives them back: in a process, and in a directory if there is one.

A key is a hash of all that decides the answer. In a directory every answer is on disk before the
search goes on, so that a search which was killed finds all it had when it is run again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from phaze_fast.explore.placing import Found
from phaze_fast.runs.journal import Journal

__all__ = ["Memory"]

Array = np.ndarray[Any, Any]

Known = tuple[Array, list[Found]]
"""For each capacity, up to what time plans were looked for, and the best."""


def _number(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


def _row(key: str, limits: Array, found: list[Found]) -> dict[str, Any]:
    return {
        "key": key,
        "status": "placed",
        "limits": [_number(float(x)) for x in limits],
        "found": [[_number(f.time_s), f.layout, f.stage_of, f.variant_of] for f in found],
    }


def _known(row: dict[str, Any]) -> Known:
    found = [
        Found(float(time_s), int(layout), tuple(stages), tuple(variants))
        for time_s, layout, stages, variants in row["found"]
    ]
    return np.array([float(x) for x in row["limits"]]), found


class Memory:
    """Plans by the content of the question.

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
    def key(question: str, strategy: int, times: bytes, rate: float) -> str:
        """Hash what decides an answer."""
        text = f"{question} {strategy} {rate!r} ".encode()
        return hashlib.blake2b(text + times, digest_size=16).hexdigest()

    def get(self, key: str) -> Known | None:
        """Look up an answer."""
        return self._known.get(key)

    def __getitem__(self, key: str) -> Known:
        return self._known[key]

    def put(self, answers: Iterable[tuple[str, Array, list[Found]]]) -> None:
        """Keep answers."""
        listed = list(answers)
        if self._journal is not None:
            self._journal.append([_row(*answer) for answer in listed])
        for key, limits, found in listed:
            self._known[key] = (limits, found)
