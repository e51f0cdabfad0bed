"""Takes proven schedules, gives them back: in memory, and in a file that several processes share.

A key is a hash of a layer's canonical form, which holds everything that decides the answer, and of
the version of the method: layers that differ in the numbering of their operators or by one factor
in all latencies share an entry. Values carry a hash of their own; what does
not match, or is of another length, is counted as rejected and solved again. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.errors import InvalidInputError

__all__ = ["ScheduleCache", "ScheduleCacheInfo", "layer_key"]

Array = np.ndarray[Any, Any]

VERSION = b"layer-schedule-2"
"""Changes whenever the meaning of an answer does."""

_DIGEST = 16


class ScheduleCacheInfo(NamedTuple):
    """Counters of a cache of schedules."""

    memory_hits: int
    file_hits: int
    misses: int
    rejected: int
    """Entries of the file that were damaged or of another version."""
    entries: int
    """Held in memory."""


class StoredLayer(NamedTuple):
    """A proven schedule in the terms of the canonical form."""

    proved_by: int
    starts: Array
    modes: Array


def layer_key(form: bytes) -> bytes:
    """Key of a canonical form."""
    return hashlib.blake2b(VERSION + form, digest_size=_DIGEST).digest()


def _checksum(key: bytes, value: bytes) -> bytes:
    return hashlib.blake2b(key + value, digest_size=_DIGEST).digest()


def _encode(layer: StoredLayer) -> bytes:
    head = layer.proved_by.to_bytes(4, "little")
    return b"".join(
        (head, layer.starts.astype("<f8").tobytes(), layer.modes.astype("<i4").tobytes())
    )


def _decode(value: bytes) -> StoredLayer | None:
    count, left = divmod(len(value) - 4, 12)
    if count < 1 or left:
        return None
    return StoredLayer(
        int.from_bytes(value[:4], "little"),
        np.frombuffer(value, "<f8", count, 4),
        np.frombuffer(value, "<i4", count, 4 + 8 * count),
    )


class ScheduleCache:
    """Proven schedules by the content of the question.

    Parameters
    ----------
    path
        File to keep them in (SQLite, shared by processes); by default memory alone.
    limit
        Entries held in memory; the least recently used go first.

    Examples
    --------
    >>> ScheduleCache().info().entries
    0
    """

    def __init__(self, path: Path | str | None = None, limit: int = 100_000) -> None:
        self._memory: OrderedDict[bytes, StoredLayer] = OrderedDict()
        self._limit, self._lock = limit, threading.Lock()
        self._counts = dict.fromkeys(("memory", "file", "misses", "rejected"), 0)
        self._file: sqlite3.Connection | None = None
        if path is not None:
            try:
                self._file = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
                self._file.execute("PRAGMA journal_mode=WAL")
                self._file.execute(
                    "CREATE TABLE IF NOT EXISTS layers (key BLOB PRIMARY KEY, value BLOB, sum BLOB)"
                )
                self._file.commit()
            except sqlite3.Error as error:
                raise InvalidInputError(
                    f"cache: {path} cannot be used: {error}; expected a new file or one that a "
                    "cache of schedules has written"
                ) from None

    def get(self, keys: Iterable[bytes]) -> dict[bytes, StoredLayer]:
        """Look up what is known; each key is counted once."""
        found: dict[bytes, StoredLayer] = {}
        with self._lock:
            for key in dict.fromkeys(keys):
                layer = self._memory.get(key)
                if layer is not None:
                    self._memory.move_to_end(key)
                    self._counts["memory"] += 1
                else:
                    layer = self._from_file(key)
                    self._counts["file" if layer is not None else "misses"] += 1
                    if layer is not None:
                        self._remember(key, layer)
                if layer is not None:
                    found[key] = layer
        return found

    def put(self, layers: Mapping[bytes, StoredLayer]) -> None:
        """Keep proven schedules."""
        with self._lock:
            for key, layer in layers.items():
                self._remember(key, layer)
            if self._file is not None and layers:
                rows = []
                for key, layer in layers.items():
                    value = _encode(layer)
                    rows.append((key, value, _checksum(key, value)))
                self._file.executemany("INSERT OR REPLACE INTO layers VALUES (?, ?, ?)", rows)
                self._file.commit()

    def info(self) -> ScheduleCacheInfo:
        """Counters since the cache was made."""
        with self._lock:
            c = self._counts
            return ScheduleCacheInfo(
                c["memory"], c["file"], c["misses"], c["rejected"], len(self._memory)
            )

    def close(self) -> None:
        """Close the file; memory stays usable."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _remember(self, key: bytes, layer: StoredLayer) -> None:
        self._memory[key] = layer
        while len(self._memory) > self._limit:
            self._memory.popitem(last=False)

    def _from_file(self, key: bytes) -> StoredLayer | None:
        if self._file is None:
            return None
        row = self._file.execute("SELECT value, sum FROM layers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        value, checksum = row
        good = isinstance(value, bytes) and checksum == _checksum(key, value)
        layer = _decode(value) if good else None
        if layer is None:
            self._counts["rejected"] += 1
        return layer
