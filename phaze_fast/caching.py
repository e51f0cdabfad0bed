"""A thread-safe cache of limited size, keys hashed once, and a pause of garbage collection."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Generic, TypeVar


@lru_cache(maxsize=4096)
def as_one(*parts: Hashable) -> object:  # noqa: ARG001 -- they are the key
    """Return an object that stands for some parts of a key, so that they are hashed once.

    Examples
    --------
    >>> as_one("a", 1) is as_one("a", 1), as_one("a", 1) is as_one("a", 2)
    (True, False)
    """
    return object()


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Collect no cyclic garbage meanwhile: of many objects that stay, there is none to find."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Values by key; beyond a limit the least recently used are dropped.

    Parameters
    ----------
    limit
        Largest sum of sizes; by default every value has size 1, so that it is a number of entries.
    size_of
        Size of a value, for example its bytes.

    Notes
    -----
    Every method may be called from several threads at once.

    Examples
    --------
    >>> cache: LruCache[str, int] = LruCache(limit=2)
    >>> [cache.put(name, ord(name)) for name in "abc"]
    [97, 98, 99]
    >>> cache.get("a"), cache.get("c"), cache.hits, cache.misses
    (None, 99, 1, 1)
    """

    def __init__(self, limit: int, size_of: Callable[[V], int] = lambda _: 1) -> None:
        self._limit, self._size_of, self._lock = limit, size_of, threading.Lock()
        self._entries: OrderedDict[K, V] = OrderedDict()
        self.hits = self.misses = self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None where it is not in the cache."""
        with self._lock:
            value = self._entries.get(key)
            if value is None:
                self.misses += 1
            else:
                self.hits += 1
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> V:
        """Add a value unless the key has one or it exceeds the limit; return the current value."""
        with self._lock:
            size = self._size_of(value)
            if key in self._entries or size > self._limit:
                return self._entries.get(key, value)
            self._entries[key] = value
            self.size += size
            while self.size > self._limit:
                _, dropped = self._entries.popitem(last=False)
                self.size -= self._size_of(dropped)
            return value

    def clear(self) -> None:
        """Drop all entries and set the counters to zero."""
        with self._lock:
            self._entries.clear()
            self.hits = self.misses = self.size = 0
