"""Executors by name, and tasks that are retried when their worker process dies.

An executor that was requested by name is created again when it breaks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from phaze_fast.errors import InvalidInputError, PhazeError, nearest, not_accepted
from phaze_fast.tables import needed

Item = TypeVar("Item")
Result = TypeVar("Result")

KINDS = ("threads", "processes", "dask://host:port", "ray", "ray://host:port", "mpi")


def _end_with(parent: int) -> None:
    """End a worker process when its parent ends; the parent alone handles Ctrl-C."""
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Inline(Executor):
    """Runs a task when it is submitted, in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class _DaskExecutor(Executor):
    """Runs tasks on a Dask cluster.

    Dask's own executor is not used: it never completes a future whose result cannot be fetched.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def width(self) -> int:
        return max(8, int(sum(self._client.ncores().values())))  # the cluster may still grow

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        # Dask would cache the result of a pure task, failures included.
        task = self._client.submit(fn, *args, pure=False, **kwargs)

        def complete(done: Any) -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(done.result())
                except (
                    BaseException
                ) as error:  # any exception has to reach the caller, which waits for the result
                    future.set_exception(error)

        task.add_done_callback(complete)
        return future


class _RayExecutor(Executor):
    """Runs tasks as Ray tasks, without retries: the caller retries."""

    def __init__(self, ray: Any) -> None:
        self._remote = ray.remote(_apply).options(max_retries=0)
        self.width = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._remote.remote(fn, args, kwargs).future()
        return future


def _apply(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


@contextlib.contextmanager
def _dask(text: str) -> Iterator[Executor]:
    distributed = needed("distributed", "dask", f"executor: {text!r}")
    address = text.replace("dask://", "tcp://", 1)
    try:
        client = distributed.Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        raise not_accepted(
            "executor", text, f"the address of a Dask scheduler that answers ({error})"
        ) from None
    with client:
        yield _DaskExecutor(client)


@contextlib.contextmanager
def _ray(text: str, threads: int) -> Iterator[Executor]:
    ray = needed("ray", "ray", f"executor: {text!r}")
    if ray.is_initialized():
        yield _RayExecutor(ray)
        return
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        try:
            ray.init(address=text if text != "ray" else "auto", **quiet)
        except ConnectionError:
            if text != "ray":
                raise
            ray.init(address="local", num_cpus=threads, include_dashboard=False, **quiet)
    except (ConnectionError, ValueError) as error:
        raise not_accepted(
            "executor", text, f"the address of a Ray cluster that answers ({error})"
        ) from None
    try:
        yield _RayExecutor(ray)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def executor_for(text: str = "threads", threads: int = 1) -> Iterator[Executor]:
    """Create an executor by its name; a context manager that closes the executor on exit.

    Parameters
    ----------
    text
        ``threads``; ``processes`` (new interpreters, so a script needs the usual
        ``if __name__ == "__main__"``); ``dask://host:port`` of a scheduler; ``ray`` (a running
        cluster, else a local one) or ``ray://host:port``; ``mpi`` (under
        ``mpiexec python -m mpi4py.futures``).
    threads
        Threads or processes of a local executor.

    Raises
    ------
    InvalidInputError
        Where the name is none of these, or nothing answers at the address.
    MissingExtraError
        Where a package that the executor needs is absent; the message names the extra.

    Examples
    --------
    >>> with executor_for("threads", 2) as executor:
    ...     executor.submit(max, 1, 2).result()
    2
    """
    if not isinstance(threads, int) or threads < 1:
        raise not_accepted("threads", threads, "1 or more")
    with contextlib.ExitStack() as stack:
        executor: Executor
        if text == "threads":
            executor = ThreadPoolExecutor(threads)
        elif text == "processes":
            from multiprocessing import get_context

            # A fork of a process with threads can hang; a new interpreter cannot.
            executor = ProcessPoolExecutor(
                threads,
                mp_context=get_context("spawn"),
                initializer=_end_with,
                initargs=(os.getpid(),),
            )
        elif text.startswith("dask://"):
            executor = stack.enter_context(_dask(text))
        elif text == "ray" or text.startswith("ray://"):
            executor = stack.enter_context(_ray(text, threads))
        elif text == "mpi":
            mpi = needed("mpi4py.futures", "mpi", f"executor: {text!r}")
            executor = stack.enter_context(mpi.MPIPoolExecutor())
        else:
            raise InvalidInputError(
                f"executor: {text!r} is not accepted; {nearest(str(text), KINDS)}"
            )
        if isinstance(executor, ThreadPoolExecutor | ProcessPoolExecutor):
            stack.callback(executor.shutdown, wait=True, cancel_futures=True)
        yield executor


class Workers:
    """An executor that is created again when it breaks, unless the caller supplied it.

    Parameters
    ----------
    executor
        An executor, which the caller closes; a name that `executor_for` accepts; or None: a thread
        pool where `threads` is above 1, else the calling thread.
    threads
        Threads or processes of a local executor.

    Examples
    --------
    >>> with Workers(None, 1) as workers:
    ...     workers.submit(max, 1, 2).result()
    2
    """

    def __init__(self, executor: Executor | str | None, threads: int) -> None:
        if not (executor is None or isinstance(executor, Executor | str)):
            raise not_accepted(
                "executor", executor, f"a concurrent.futures.Executor, or one of {', '.join(KINDS)}"
            )
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise not_accepted("threads", threads, "1 or more")
        self._requested = "threads" if executor is None and threads > 1 else executor
        self._threads = threads
        self._stack = contextlib.ExitStack()
        self._executor = self._create()

    def _create(self) -> Executor:
        if self._requested is None:
            return _Inline()
        if isinstance(self._requested, Executor):
            return self._requested
        return self._stack.enter_context(executor_for(self._requested, self._threads))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def separate(self) -> bool:
        """Whether tasks travel to other processes by the standard library's pickle."""
        return isinstance(self._executor, ProcessPoolExecutor) or self._requested == "mpi"

    @property
    def width(self) -> int:
        """How many tasks run at once."""
        if isinstance(self._executor, _Inline):
            return 1
        names = ("width", "_max_workers")
        widths = [getattr(self._executor, name, None) for name in names]
        return next((w for w in widths if isinstance(w, int)), os.cpu_count() or 1)

    @property
    def flying(self) -> int:
        """Tasks to keep in flight: enough to occupy all workers, few to repeat on failure."""
        return self.width if isinstance(self._executor, _Inline) else 2 * self.width

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Submit a task."""
        return self._executor.submit(call, *args)

    def renew(self) -> None:
        """Create a broken executor again, or raise a PhazeError where the caller supplied it."""
        if isinstance(self._requested, Executor):
            raise PhazeError(
                "executor: a worker died and the executor that was given is broken; finished "
                "results are still where they were written to. An executor requested by name, "
                "such as 'processes', is created again"
            )
        self._stack.close()
        self._executor = self._create()


# ---- tasks on workers that may die ----

_TOGETHER = 2
"""Failures after which a task runs alone, so that no other task can cause its next failure."""
_ALONE = 2
"""Failures with no other task running after which an item is reported as `Lost`."""
_TRIED = {"KilledWorker": 2}
"""Errors that count as several failures, by name: Dask has tried several workers before it."""
_MOST_IN_A_ROW = 20
"""Consecutive failures after which a run stops; four more are allowed per task in flight."""


@dataclass(frozen=True)
class Lost:
    """The result of a task whose worker died or was unreachable at each attempt."""

    reason: str


@dataclass
class _Task(Generic[Item]):
    items: list[Item]
    failures: int = 0
    alone: bool = False


@dataclass
class _Queue(Generic[Item]):
    """Tasks not yet submitted; suspects, which may have killed a worker, run last, one by one."""

    waiting: deque[_Task[Item]]
    suspects: deque[_Task[Item]] = field(default_factory=deque)
    failures_in_a_row: int = 0

    def next(self, flying: int, limit: int) -> _Task[Item] | None:
        if self.waiting:
            return self.waiting.popleft() if flying < limit else None
        return self.suspects.popleft() if self.suspects and not flying else None

    def failed(self, task: _Task[Item], error: BaseException, limit: int) -> Lost | None:
        """Queue a failed task again, or return `Lost` after too many failures."""
        task.failures += _TRIED.get(type(error).__name__, 1)
        self.failures_in_a_row += 1
        words = f"{type(error).__name__}: {str(error)[:200]}"
        if self.failures_in_a_row > _MOST_IN_A_ROW + 4 * limit:
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
    """Submit the tasks that may run now; return whether the executor turned out to be broken."""
    while (task := queue.next(len(flying), limit)) is not None:
        try:
            flying[workers.submit(call, task.items)] = task
        except BrokenExecutor as error:
            task.failures -= 1  # the task never ran
            queue.failed(task, error, limit)
            return True
    return False


def _outcome(future: Future[Any]) -> tuple[Any, BaseException | None]:
    try:
        error = future.exception()
    except CancelledError as cancelled:
        return None, cancelled
    if error is not None and not isinstance(error, Exception):
        raise error  # not a failure of the worker: such as KeyboardInterrupt
    return (None, error) if error is not None else (future.result(), None)


def run_chunks(
    call: Callable[[list[Item]], list[Result]],
    items: Sequence[Item],
    chunk: int,
    workers: Workers,
    shared: Callable[[Item], Hashable] = lambda _: None,
) -> Iterator[tuple[list[Item], list[Result] | Lost]]:
    """Call a function on items, `chunk` at a time, and yield results as they complete.

    Items of one call have an equal `shared`.

    `call` takes a list of items, returns as many results, and raises nothing itself. A call fails
    only if its worker dies. A failed call is submitted again, finally with one item and no other
    task, so that an item that kills its worker does not affect others.

    Examples
    --------
    >>> with Workers(None, 1) as workers:
    ...     list(run_chunks(sorted, [3, 1, 2], 2, workers))
    [([3, 1], [1, 3]), ([2], [2])]
    """
    alike: dict[Hashable, list[Item]] = {}
    for item in items:
        alike.setdefault(shared(item), []).append(item)
    tasks = [own[at : at + chunk] for own in alike.values() for at in range(0, len(own), chunk)]
    queue = _Queue(deque(map(_Task, tasks)))
    limit, broken = workers.flying, False
    flying: dict[Future[Any], _Task[Item]] = {}
    try:
        while flying or queue.waiting or queue.suspects:
            if broken and not flying:
                workers.renew()
                broken = False
            broken = broken or _submit(call, queue, flying, workers, limit)
            # A broken executor fails all tasks in flight as well.
            when = ALL_COMPLETED if broken else FIRST_COMPLETED
            for future in wait(flying, return_when=when).done:
                task = flying.pop(future)
                result, error = _outcome(future)
                broken = broken or isinstance(error, BrokenExecutor)
                lost = queue.failed(task, error, limit) if error is not None else None
                if error is None:
                    queue.failures_in_a_row = 0
                    yield task.items, result
                elif lost is not None:
                    yield task.items, lost
    finally:
        for future in flying:
            future.cancel()
