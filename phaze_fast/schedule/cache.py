"""A cache of proven schedules, in memory and in a store if there is one.

A key is a hash of a layer's canonical form, which contains everything that determines the schedule,
and of the version of the method: layers that differ in the numbering of their operators or by one
factor in all latencies share an entry. Damaged entries of a store are counted as rejected, and the
layers are solved again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from phaze_fast.caching import LruCache
from phaze_fast.errors import InvalidTypeError
from phaze_fast.tables import Array

VERSION = b"layer-schedule-3"
"""Version of the method; it changes whenever a stored entry would mean or be something else."""

_DIGEST = 16


class LayerStore(Protocol):
    """A store of schedules between runs, as bytes."""

    @property
    def rejected(self) -> int:
        """Count of damaged entries, which are not returned."""

    def get_many(self, keys: Iterable[bytes]) -> Mapping[bytes, bytes]:
        """Return the entries of those keys that have one."""

    def put_many(self, results: Mapping[bytes, bytes]) -> None:
        """Add entries."""

    def close(self) -> None:
        """Close the store."""


class ScheduleCacheInfo(NamedTuple):
    """Counters of a cache of schedules."""

    memory_hits: int
    file_hits: int
    misses: int
    rejected: int
    """Damaged entries of the store."""
    entries: int
    """Entries in memory."""


class StoredLayer(NamedTuple):
    """A proven schedule, in the operator order and time unit of the canonical form."""

    proved_by: int
    starts: Array
    modes: Array


def layer_key(form: bytes) -> bytes:
    """Hash a canonical form."""
    return hashlib.blake2b(VERSION + form, digest_size=_DIGEST).digest()


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
    """Proven schedules by the content of the layer.

    Parameters
    ----------
    store
        Store of schedules between runs; by default none. `phaze_fast.ScheduleCache` creates one
        from a path.
    limit
        Most entries in memory; the least recently used are dropped first.

    Examples
    --------
    >>> ScheduleCache().info().entries
    0
    """

    def __init__(self, store: LayerStore | None = None, limit: int = 100_000) -> None:
        if store is not None and not hasattr(store, "get_many"):
            raise InvalidTypeError(
                f"store: {type(store).__name__} is not accepted; expected an object with get_many "
                "and put_many, such as phaze_fast.ScheduleCache makes of a path"
            )
        self._memory: LruCache[bytes, StoredLayer] = LruCache(limit)
        self._lock = threading.Lock()
        self._file_hits = self._misses = self._rejected = 0
        self._store = store

    def get(self, keys: Iterable[bytes]) -> dict[bytes, StoredLayer]:
        """Look up keys; each distinct key counts as one hit or miss."""
        layers = {key: self._memory.get(key) for key in dict.fromkeys(keys)}
        known = {key: layer for key, layer in layers.items() if layer is not None}
        missing = [key for key in layers if key not in known]
        with self._lock:
            stored = self._from_store(missing)
            self._file_hits += len(stored)
            self._misses += len(missing) - len(stored)
        for key, layer in stored.items():
            self._memory.put(key, layer)
        return known | stored

    def put(self, layers: Mapping[bytes, StoredLayer]) -> None:
        """Add proven schedules."""
        for key, layer in layers.items():
            self._memory.put(key, layer)
        with self._lock:
            if self._store is not None and layers:
                self._store.put_many({key: _encode(layer) for key, layer in layers.items()})

    def info(self) -> ScheduleCacheInfo:
        """Counters since the cache was created."""
        with self._lock:
            rejected = self._rejected + (self._store.rejected if self._store else 0)
            counts = (self._memory.hits, self._file_hits, self._misses, rejected)
            return ScheduleCacheInfo(*counts, len(self._memory))

    def close(self) -> None:
        """Close the store; the cache in memory stays usable."""
        with self._lock:
            if self._store is not None:
                self._rejected += self._store.rejected
                self._store.close()
                self._store = None

    def _from_store(self, keys: list[bytes]) -> dict[bytes, StoredLayer]:
        if self._store is None or not keys:
            return {}
        layers = {key: _decode(value) for key, value in self._store.get_many(keys).items()}
        self._rejected += sum(layer is None for layer in layers.values())
        return {key: layer for key, layer in layers.items() if layer is not None}
