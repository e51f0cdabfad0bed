"""Items worked on in chunks by workers that may die on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Future,
    wait,
)
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from phaze_fast.errors import PhazeError
from phaze_fast.runs.executors import Workers

__all__ = ["Lost", "run_chunks"]

Item = TypeVar("Item")
Result = TypeVar("Result")

_TOGETHER = 2
"""Failures after which a task is run with nothing beside it, so that it alone can be to blame."""
_ALONE = 2
"""Failures on its own after which an item is given up."""
_TRIED = {"KilledWorker": 2}
"""Failures that an error counts for, where more than one: Dask has tried several workers before."""
_IDLE = 20
"""Failures in a row, and four times what is in flight, after which no worker is worth waiting for.
"""


@dataclass(frozen=True)
class Lost:
    """A task whose worker died each time, or could not be reached."""

    reason: str


@dataclass
class _Task(Generic[Item]):
    items: list[Item]
    failures: int = 0
    alone: bool = False


@dataclass
class _Queue(Generic[Item]):
    """Tasks not yet submitted: those that may fly together first, suspects last."""

    waiting: deque[_Task[Item]]
    suspects: deque[_Task[Item]] = field(default_factory=deque)
    fruitless: int = 0
    """Failures since a task last ended well."""

    def next(self, flying: int, limit: int) -> _Task[Item] | None:
        if self.waiting:
            return self.waiting.popleft() if flying < limit else None
        return self.suspects.popleft() if self.suspects and not flying else None

    def failed(self, task: _Task[Item], error: BaseException, limit: int) -> Lost | None:
        """Put a task back, or give it up."""
        task.failures += _TRIED.get(type(error).__name__, 1)
        self.fruitless += 1
        words = f"{type(error).__name__}: {str(error)[:200]}"
        if self.fruitless > _IDLE + 4 * limit:
            raise PhazeError(
                f"executor: the workers no longer finish any task ({words})"
            ) from error
        if task.alone and task.failures >= _TOGETHER + _ALONE:
            return Lost(f"its worker was lost again and again ({words})")
        if task.alone:
            self.suspects.appendleft(task)
        elif task.failures < _TOGETHER:
            self.waiting.appendleft(task)
        else:
            self.suspects.extend(_Task([item], task.failures, True) for item in task.items)
        return None


def _submit(
    call: Callable[[list[Item]], list[Result]],
    queue: _Queue[Item],
    flying: dict[Future[Any], _Task[Item]],
    workers: Workers,
    limit: int,
) -> bool:
    """Submit what may fly now; whether the executor turned out to be broken."""
    while (task := queue.next(len(flying), limit)) is not None:
        try:
            flying[workers.submit(call, task.items)] = task
        except BrokenExecutor as error:
            task.failures -= 1  # it never ran
            queue.failed(task, error, limit)
            return True
    return False


def _outcome(future: Future[Any]) -> tuple[Any, BaseException | None]:
    try:
        error = future.exception()
    except CancelledError as cancelled:
        return None, cancelled
    if error is not None and not isinstance(error, Exception):
        raise error  # someone wants everything to stop
    return (None, error) if error is not None else (future.result(), None)


def run_chunks(
    call: Callable[[list[Item]], list[Result]],
    items: Sequence[Item],
    chunk: int,
    workers: Workers,
) -> Iterator[tuple[list[Item], list[Result] | Lost]]:
    """Call a function on items, `chunk` at a time, and give results as they come.

    A call fails only with its worker: it is submitted again, at last with one item and nothing
    beside it, so that an item that kills its worker takes no other with it.

    `call` takes a list of items, gives as many results, and raises nothing itself.

    Examples
    --------
    >>> with Workers(None, 1) as workers:
    ...     list(run_chunks(sorted, [3, 1, 2], 2, workers))
    [([3, 1], [1, 3]), ([2], [2])]
    """
    starts = range(0, len(items), chunk)
    queue = _Queue(deque(_Task(list(items[at : at + chunk])) for at in starts))
    limit, broken = workers.flying, False
    flying: dict[Future[Any], _Task[Item]] = {}
    try:
        while flying or queue.waiting or queue.suspects:
            if broken and not flying:
                workers.renew()
                broken = False
            broken = broken or _submit(call, queue, flying, workers, limit)
            # Where the executor broke, all that is in flight is about to fail with it.
            when = ALL_COMPLETED if broken else FIRST_COMPLETED
            for future in wait(flying, return_when=when).done:
                task = flying.pop(future)
                result, error = _outcome(future)
                broken = broken or isinstance(error, BrokenExecutor)
                lost = queue.failed(task, error, limit) if error is not None else None
                if error is None:
                    queue.fruitless = 0
                    yield task.items, result
                elif lost is not None:
                    yield task.items, lost
    finally:
        for future in flying:
            future.cancel()
