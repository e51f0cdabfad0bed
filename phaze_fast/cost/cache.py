"""Operator costs that were computed before, kept in memory by content while there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

__all__ = ["CacheInfo", "answers", "cost_cache_clear", "cost_cache_info"]

Array = np.ndarray[Any, Any]


class CacheInfo(NamedTuple):
    """Counters of the cache of operator costs."""

    hits: int
    misses: int
    entries: int
    bytes: int


class _Cache:
    """Answers by the content of the query; the least recently used go first."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit, self.lock = limit_bytes, threading.Lock()
        self.entries: OrderedDict[bytes, tuple[Array, ...]] = OrderedDict()
        self.hits = self.misses = self.size = 0

    def get(self, key: bytes) -> tuple[Array, ...] | None:
        with self.lock:
            found = self.entries.get(key)
            if found is None:
                self.misses += 1
            else:
                self.hits += 1
                self.entries.move_to_end(key)
            return found

    def put(self, key: bytes, arrays: tuple[Array, ...]) -> None:
        size = sum(array.nbytes for array in arrays)
        with self.lock:
            if key in self.entries or size > self.limit:
                return
            self.entries[key] = arrays
            self.size += size
            while self.size > self.limit:
                _, dropped = self.entries.popitem(last=False)
                self.size -= sum(array.nbytes for array in dropped)

    def clear(self) -> None:
        with self.lock:
            self.entries.clear()
            self.hits = self.misses = self.size = 0


answers = _Cache(64 * 2**20)


def cost_cache_info() -> CacheInfo:
    """How often the cache of operator costs could answer.

    Examples
    --------
    >>> cost_cache_info().hits >= 0
    True
    """
    with answers.lock:
        return CacheInfo(answers.hits, answers.misses, len(answers.entries), answers.size)


def cost_cache_clear() -> None:
    """Forget all operator costs and set the counters to zero.

    Examples
    --------
    >>> cost_cache_clear()
    >>> cost_cache_info().entries
    0
    """
    answers.clear()
