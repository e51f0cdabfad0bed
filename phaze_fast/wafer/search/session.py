"""Wafer searches as tasks: run by any executor, resumed from a journal, cached in a store.

A task is a module-level function, a problem and plain data. Its result is plain data and depends on
nothing else, so that a result in the journal of a stopped run, or in the store of earlier runs,
replaces running the task.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError, PhazeError
from phaze_fast.runs.executors import Lost, Workers, run_chunks
from phaze_fast.runs.journal import Journal, manifest
from phaze_fast.runs.store import STORE, ResultStore
from phaze_fast.threads import thread_count
from phaze_fast.wafer.mapping.problem import Problem

Data = dict[str, Any]
Progress = Callable[[int, int, float], None]
"""Called with parts done, total parts, and the best time so far (infinite at first)."""
Call = Callable[["Task", int, Progress | None], Data]
"""Runs a task on a number of threads, on which its result depends only if the budget runs out."""


@dataclass(frozen=True)
class Task:
    """One part of a search."""

    call: Call
    """A module-level function, so that worker processes can import it."""
    problem: Problem
    given: Data
    """Plain data that the call reads besides the problem."""
    budget_s: float | None = None
    """Seconds after which the call may stop early; its result then has a true `cut` and is not
    cached."""
    stop: Callable[[], bool] | None = None
    """Called periodically; once it returns true, the task stops. Only for sequential tasks."""

    @cached_property
    def key(self) -> str:
        """Hash of all inputs of the result; empty if operators were given in place of a model's."""
        posed = self.problem.digest
        name = f"{self.call.__module__}.{self.call.__qualname__}"
        return digest([name, posed, self.given]) if posed else ""


def _answered(
    threads: int, progress: Progress | None, tasks: list[tuple[int, Task]]
) -> list[tuple[Data | None, Exception | None]]:
    """Run tasks; an error is returned as a result."""
    answers: list[tuple[Data | None, Exception | None]] = []
    for _, task in tasks:
        try:
            answers.append((task.call(task, threads, progress), None))
        except Exception as error:
            answers.append((None, error))
    return answers


class Session:
    """Runs the tasks of wafer searches, and caches their results.

    Parameters
    ----------
    executor
        An executor, or one of the names of `phaze_fast.runs.executors.KINDS`; None to run tasks
        sequentially in this process, each with all threads.
    threads
        Threads on this machine; by default all cores.
    resume
        Directory of a journal, from which a stopped run resumes.
    cache
        Folder of the store of results, which are keyed by content and by the version of the cost
        models; None to disable it.

    Examples
    --------
    >>> with Session(threads=1) as session:
    ...     task = Task(lambda task, threads, progress: {"sum": sum(task.given["of"])},
    ...                 Problem("bertlarge", "dram-wafer"), {"of": [1, 2]})
    ...     session.run([task])
    [{'sum': 3}]
    """

    def __init__(
        self,
        executor: Executor | str | None = None,
        threads: int | None = None,
        resume: Path | str | None = None,
        cache: Path | str | None = None,
    ) -> None:
        self.threads = thread_count(threads)
        self.recalled = 0
        """Tasks whose result came from the journal or the store."""
        self._notes: list[str] = []
        self._journal: Journal | None = None
        self._store: ResultStore | None = None
        self._found: dict[str, Data] = {}
        self.sequential = executor is None
        """Whether tasks run one after another in this process."""
        with contextlib.ExitStack() as stack:
            if resume is not None:
                described = manifest([], "wafer mappings")
                journal = Journal(resume, described, option="resume", run="search")
                self._journal = stack.enter_context(journal)
            if cache is not None:
                try:
                    store = ResultStore(Path(cache) / STORE, "wafer mappings")
                    self._store = stack.enter_context(store)
                except InvalidInputError as error:
                    self._notes.append(str(error))
            workers = Workers(executor, 1 if self.sequential else self.threads)
            self._workers = stack.enter_context(workers)
            self._stack = stack.pop_all()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about the journal and the store."""
        note_groups = [place.notes for place in (self._journal, self._store) if place is not None]
        return (*self._notes, *(note for some in note_groups for note in some))

    def run(self, tasks: Sequence[Task], progress: Progress | None = None) -> list[Data]:
        """Run tasks, or look up their results.

        Parameters
        ----------
        tasks
            Independent tasks.
        progress
            Passed to tasks that run sequentially in this process.

        Returns
        -------
        list
            Results of the tasks, in their order.

        Raises
        ------
        PhazeError
            The first error of a task, or a worker that failed repeatedly.
        """
        results = {at: self._found[t.key] for at, t in enumerate(tasks) if t.key in self._found}
        looked_up = self._kept({at: t for at, t in enumerate(tasks) if at not in results and t.key})
        results |= looked_up
        self.recalled += len(looked_up)
        self._found |= {tasks[at].key: data for at, data in looked_up.items()}
        runnable = tasks if self.sequential else [replace(task, stop=None) for task in tasks]
        left = [(at, task) for at, task in enumerate(runnable) if at not in results]
        share = 1 if self.sequential else min(max(len(left), 1), self.threads)
        call = functools.partial(
            _answered, self.threads // share, progress if self.sequential else None
        )
        for items, answers in run_chunks(call, left, 1, self._workers):
            if isinstance(answers, Lost):
                raise PhazeError(f"executor: {answers.reason}")
            for (at, task), (data, error) in zip(items, answers, strict=True):
                if error is not None or data is None:
                    raise error or PhazeError("a task of a wafer search gave nothing")
                self._keep(task, data)
                results[at] = data
        return [results[at] for at in range(len(tasks))]

    def _kept(self, tasks: dict[int, Task]) -> dict[int, Data]:
        """Look results up in the journal, then in the store."""
        rows = self._journal.rows if self._journal is not None else {}
        results = {at: rows[task.key]["result"] for at, task in tasks.items() if task.key in rows}
        positions = {task.key.encode(): at for at, task in tasks.items() if at not in results}
        stored = self._store.get_many(positions) if self._store is not None else {}
        for key, value in stored.items():
            with contextlib.suppress(ValueError):
                results[positions[key]] = json.loads(value)
        return results

    def _keep(self, task: Task, data: Data) -> None:
        if not task.key or data.get("cut"):
            return
        self._found[task.key] = data
        if self._journal is not None:
            self._journal.append([{"key": task.key, "status": "done", "result": data}])
        if self._store is not None:
            text = json.dumps(data, separators=(",", ":"), allow_nan=False)
            self._store.put_many({task.key.encode(): text.encode()})


def session_of(
    session: Session | None, threads: int | None = None
) -> contextlib.AbstractContextManager[Session]:
    """Use a session that is open, or open one and close it afterwards."""
    return contextlib.nullcontext(session) if session is not None else Session(threads=threads)
