"""Which candidates of a search go next, and who takes them further."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

__all__ = ["at_once", "first_of", "first_of_parts", "later_of_group"]

Array = np.ndarray[Any, Any]


def first_of(key: Array, count: int) -> Array:
    """Positions of the smallest keys, at most so many, in a fixed order.

    Examples
    --------
    >>> first_of(np.array([3.0, 1.0, 2.0, 1.0]), 3).tolist()
    [1, 3, 2]
    """
    some = np.arange(len(key))
    if len(key) > count:
        some = np.flatnonzero(key <= np.partition(key, count - 1)[count - 1])
    return some[np.argsort(key[some], kind="stable")][:count]


def first_of_parts(parts: Iterable[Array], count: int) -> tuple[Array, Array]:
    """Give what `first_of` gives of all parts one after another, which it never holds at once.

    Returns
    -------
    tuple
        Of each of the smallest keys: the number of its part, and its position there.

    Examples
    --------
    >>> parts, at = first_of_parts([np.array([3.0, 1.0]), np.array([2.0, 1.0])], 3)
    >>> parts.tolist(), at.tolist()
    ([0, 1, 1], [1, 1, 0])
    """
    keys, owners, at = np.zeros(0), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
    for number, part in enumerate(parts):
        # Of equal keys those of earlier parts go first.
        full = len(keys) >= count > 0
        own = np.flatnonzero(part < keys.max()) if full else np.arange(len(part))
        keys, at = np.concatenate([keys, part[own]]), np.concatenate([at, own])
        owners = np.concatenate([owners, np.full(len(own), number, dtype=np.int32)])
        if len(keys) > count:
            kept = np.sort(first_of(keys, count))
            keys, owners, at = keys[kept], owners[kept], at[kept]
    order = np.argsort(keys, kind="stable")
    return owners[order], at[order]


def later_of_group(candidates: Array, waiting: Array) -> Array:
    """Which of the candidates that wait for a schedule are not the first of their group.

    Schedules are costly, and what the first one reaches often rules the others out.

    Parameters
    ----------
    candidates
        Rows of model, strategy and chip group, most promising first.
    waiting
        Which of them wait.

    Examples
    --------
    >>> candidates = np.array([[0, 0, 0], [4, 5, 6], [7, 8, 7]])
    >>> later_of_group(candidates, np.array([True, True, True])).tolist()
    [False, False, True]
    """
    at = np.flatnonzero(waiting)
    owners = candidates[0, at].astype(np.int64) << 32 | candidates[2, at].astype(np.int64)
    later: Array = waiting.copy()
    later[at[np.unique(owners, return_index=True)[1]]] = False
    return later


def at_once(tasks: Sequence[Callable[..., None]], threads: int) -> None:
    """Do tasks that do not depend on each other; each is told how many threads it may use.

    Examples
    --------
    >>> at_once([lambda threads: print(threads)], threads=4)
    4
    """
    if len(tasks) < 2 or threads < 2:
        for task in tasks:
            task(threads=threads)
        return
    inside = max(1, threads // len(tasks))
    with ThreadPoolExecutor(min(threads, len(tasks))) as pool:
        for _ in pool.map(lambda task: task(threads=inside), tasks):
            pass
