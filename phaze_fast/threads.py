"""How many threads to use: all cores unless a caller says otherwise."""

from __future__ import annotations

import os

from phaze_fast.errors import not_accepted

_MOST = 1024


def thread_count(threads: int | None = None) -> int:
    """Return the number of threads to use; None means all cores this process may run on.

    Raises
    ------
    InvalidInputError
        Where it is not a whole number from 1 to 1024.

    Examples
    --------
    >>> thread_count(3)
    3
    """
    if threads is None:
        try:
            cores = len(os.sched_getaffinity(0))
        except AttributeError:  # not on this system
            cores = os.cpu_count() or 1
        return max(1, min(cores, _MOST))
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST:
        raise not_accepted("threads", threads, f"a whole number from 1 to {_MOST}")
    return threads
