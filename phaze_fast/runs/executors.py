"""Executors by name, made anew when their workers die."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

from phaze_fast.errors import InvalidInputError, PhazeError, nearest
from phaze_fast.tables import needed

__all__ = ["KINDS", "Workers", "executor_for", "needed"]

KINDS = ("threads", "processes", "dask://host:port", "ray", "ray://host:port", "mpi")


def _leave_with(parent: int) -> None:
    """Let a worker end with the process that made it, however that ends, and leave Ctrl-C to it."""
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

    Dask's own executor never ends a future whose task is done but whose result cannot be fetched.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def width(self) -> int:
        return max(8, int(sum(self._client.ncores().values())))  # clusters may still grow

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        # A pure task is remembered by its arguments, and so is that it failed.
        task = self._client.submit(fn, *args, pure=False, **kwargs)
        task.add_done_callback(lambda done: self._hand_over(done, future))
        return future

    @staticmethod
    def _hand_over(task: Any, future: Future[Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(task.result())
            except BaseException as error:  # whatever it is, someone waits for it
                future.set_exception(error)


class _RayExecutor(Executor):
    """Runs tasks as Ray tasks; whether one is tried again is for the caller to say."""

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
        raise InvalidInputError(
            f"executor: {text!r} is not accepted; expected the address of a Dask scheduler that "
            f"answers ({error})"
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
        raise InvalidInputError(
            f"executor: {text!r} is not accepted; expected the address of a Ray cluster that "
            f"answers ({error})"
        ) from None
    try:
        yield _RayExecutor(ray)
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _mpi(text: str) -> Iterator[Executor]:
    with needed("mpi4py.futures", "mpi", f"executor: {text!r}").MPIPoolExecutor() as executor:
        yield executor


@contextlib.contextmanager
def executor_for(text: str = "threads", threads: int = 1) -> Iterator[Executor]:
    """Give an executor by its name, and close it in the end.

    Parameters
    ----------
    text
        ``threads``; ``processes`` (new interpreters, so a script needs the usual
        ``if __name__ == "__main__"``); ``dask://host:port`` of a scheduler; ``ray`` (the cluster
        that is there, else a local one) or ``ray://host:port``; ``mpi`` (under
        ``mpiexec python -m mpi4py.futures``).
    threads
        Threads or processes of a local executor.

    Raises
    ------
    InvalidInputError
        Where the name is none of these, or nothing answers at the address.
    MissingExtraError
        Where a package is absent; the message names the extra.

    Examples
    --------
    >>> with executor_for("threads", 2) as executor:
    ...     executor.submit(max, 1, 2).result()
    2
    """
    if not isinstance(threads, int) or threads < 1:
        raise InvalidInputError(f"threads: {threads!r} is not accepted; expected 1 or more")
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
                initializer=_leave_with,
                initargs=(os.getpid(),),
            )
        elif text.startswith("dask://"):
            executor = stack.enter_context(_dask(text))
        elif text == "ray" or text.startswith("ray://"):
            executor = stack.enter_context(_ray(text, threads))
        elif text == "mpi":
            executor = stack.enter_context(_mpi(text))
        else:
            raise InvalidInputError(
                f"executor: {text!r} is not accepted; {nearest(str(text), KINDS)}"
            )
        if isinstance(executor, ThreadPoolExecutor | ProcessPoolExecutor):
            stack.callback(executor.shutdown, wait=True, cancel_futures=True)
        yield executor


class Workers:
    """An executor that is made anew when it breaks, where it was asked for by name.

    Parameters
    ----------
    executor
        An executor, which stays its owner's; a name of `executor_for`; None for none at all, or
        for threads where there are several.
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
            raise InvalidInputError(
                f"executor: {executor!r} is not accepted; expected a "
                f"concurrent.futures.Executor, or one of {', '.join(KINDS)}"
            )
        if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
            raise InvalidInputError(f"threads: {threads!r} is not accepted; expected 1 or more")
        self._asked = "threads" if executor is None and threads > 1 else executor
        self._threads = threads
        self._stack = contextlib.ExitStack()
        self._executor = self._made()

    def _made(self) -> Executor:
        if self._asked is None:
            return _Inline()
        if isinstance(self._asked, Executor):
            return self._asked
        return self._stack.enter_context(executor_for(self._asked, self._threads))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def separate(self) -> bool:
        """Whether tasks travel to other processes by the standard library's pickle."""
        return isinstance(self._executor, ProcessPoolExecutor) or self._asked == "mpi"

    @property
    def flying(self) -> int:
        """Tasks to keep submitted: enough that no worker waits, few enough to lose."""
        if isinstance(self._executor, _Inline):
            return 1
        names = ("width", "_max_workers")
        widths = [getattr(self._executor, name, None) for name in names]
        return 2 * next((w for w in widths if isinstance(w, int)), os.cpu_count() or 1)

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Hand over a task."""
        return self._executor.submit(call, *args)

    def renew(self) -> None:
        """Make a broken executor anew, or raise a PhazeError where it is somebody else's."""
        if isinstance(self._asked, Executor):
            raise PhazeError(
                "executor: a worker died and the executor that was given is broken; what was "
                "finished before is kept where results are written to. An executor asked for by "
                "name, such as 'processes', is made anew"
            )
        self._stack.close()
        self._executor = self._made()
