"""Pipeline placement of a table of layers within limits, proven optimal, one or many at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest
from phaze_fast.papers.describe import PlacedStage, placed_stages, text
from phaze_fast.papers.table import LayerTable
from phaze_fast.threads import thread_count

__all__ = [
    "SCHEDULES",
    "PipelineProblem",
    "Placement",
    "PublishedProblem",
    "place",
    "place_batch",
    "place_counts",
    "place_front",
]

Array = np.ndarray[Any, Any]

SCHEDULES = ("1f1b", "zero-bubble")
"""Orders of forward and backward passes whose stages may differ; interleaved ones are even."""


@dataclass(frozen=True)
class PublishedProblem:
    """A placement as PHAZE poses it: time = load x (ceil(micro_batches / d) + stages - 1) + sync.

    With tables made by `phaze_fast.planning.read_problem`, or by hand: ``resident_bytes`` and
    ``once_bytes`` count once, ``stash_bytes`` for every stage that follows, ``sync_s`` is what the
    first stage's gradients take between very many replicas.
    """

    tables: Mapping[int, LayerTable]
    """By tensor-parallel width."""
    devices: int
    """At most so many in all."""
    memory_bytes: float
    """Of one device."""
    micro_batches: int
    """Of one step, over all replicas."""
    recompute: bool = False
    """Whether stages keep only what enters them."""
    stages: int = 0
    """So many stages; 0 = any."""
    replicas: int = 0
    """So many replicas; 0 = any."""
    name: str = ""
    """What to call it."""


@dataclass(frozen=True)
class PipelineProblem:
    """A pipeline of equal groups of devices: time = (m - 1) x largest load + fill and drain + tail.

    The fastest variant that fits is chosen for each stage.
    """

    table: LayerTable
    memory_bytes: float
    """Of one device."""
    micro_batches: int
    """Of one replica in one step (m)."""
    stages: tuple[int, int] = (1, 1)
    """Fewest and most stages to look at."""
    schedule: str = "1f1b"
    """A name of `SCHEDULES`."""
    piped_bytes: float = 0.0
    """Of messages on every device, where there is more than one stage."""
    bucket_s: float = 0.0
    """Of the gradients that are synchronised last, when no backward pass hides them."""
    name: str = ""
    """What to call it."""


@dataclass(frozen=True)
class Placement:
    """A plan: which layers form a stage, in which variant, and what that takes."""

    status: str
    """``optimal``, or ``infeasible`` where nothing fits."""
    time_s: float
    """Seconds of one step; infinite where nothing fits."""
    max_load_s: float
    """Of the slowest stage, per micro-batch."""
    width: int
    """Tensor-parallel width; 0 where nothing fits."""
    replicas: int
    devices: int
    """Of one replica."""
    stages: tuple[tuple[int, ...], ...]
    """Positions of the layers of each stage, first to last."""
    variants: tuple[str, ...]
    """Of each stage."""
    table: LayerTable | None = field(default=None, repr=False, compare=False)
    problem: PublishedProblem | PipelineProblem | None = field(
        default=None, repr=False, compare=False
    )
    tail_s: float = field(default=0.0, compare=False)
    """Part of the time that comes after the last backward pass: gradients and optimiser."""
    solve_s: float = field(default=0.0, compare=False)
    """Wall time of the kernel; in a batch, an even share."""

    @property
    def bound_s(self) -> float:
        """No plan takes less: the time itself, since it is proven."""
        return self.time_s

    @property
    def details(self) -> list[PlacedStage]:
        """Every stage in full: seconds, bytes by term, what is free."""
        return placed_stages(self.problem, self) if self.problem is not None else []

    @property
    def memory_bytes(self) -> float:
        """Of the fullest device."""
        return max((stage.memory_bytes for stage in self.details), default=0.0)

    def __str__(self) -> str:
        return text(self)


_NOTHING = Placement("infeasible", float("inf"), 0.0, 0, 0, 0, (), ())


def _placement(
    plan: _core.TablePlan, problem: Any, table: LayerTable | None, width: int, share_s: float
) -> Placement:
    count, stage_of = plan.stages, plan.stage_of
    if table is None or count == 0:
        return replace(_NOTHING, solve_s=share_s)
    order = np.argsort(stage_of, kind="stable")
    borders = np.searchsorted(stage_of[order], np.arange(count + 1))
    stages = tuple(tuple(order[a:b].tolist()) for a, b in pairwise(borders))
    variants = tuple(table.variants[v] for v in plan.variant_of.tolist())
    return Placement(
        status="optimal",
        time_s=plan.time_s,
        max_load_s=plan.max_load_s,
        width=width,
        replicas=plan.replicas,
        devices=plan.devices,
        stages=stages,
        variants=variants,
        table=table,
        problem=problem,
        tail_s=plan.tail_s,
        solve_s=share_s,
    )


def _raise_if(status: int, name: str) -> None:
    if status:
        raise InvalidInputError(f"{name or 'problem'}: {_core.STATUS_SENTENCES[status]}")


def _published(problems: Sequence[PublishedProblem], threads: int) -> list[Placement]:
    tables, ptr, rows = [], [0], []
    for p in problems:
        _check_published(p)
        for width, table in p.tables.items():
            tables.append(table.columns)
            limits = (p.memory_bytes, p.devices, p.micro_batches)
            rows.append((*limits, width, p.recompute, p.stages, p.replicas))
        ptr.append(len(tables))
    columns = list(zip(*rows, strict=True)) if rows else [()] * 7
    dtypes = ("f8", "i8", "i8", "i4", "u1", "i4", "i8")
    arrays = [np.array(c, dtype=d) for c, d in zip(columns, dtypes, strict=True)]
    begin = time.perf_counter()
    memory, devices, batches, widths, again, stages, replicas = arrays
    found = _core.place_published(
        tables,
        np.array(ptr, dtype=np.int64),
        memory,
        devices,
        batches,
        widths,
        again,
        stages,
        replicas,
        threads,
    )
    share_s = (time.perf_counter() - begin) / max(len(problems), 1)
    answers = []
    for p, answer in zip(problems, found, strict=True):
        _raise_if(answer.status, p.name)
        width = list(p.tables)[answer.table] if answer.table >= 0 else 0
        answers.append(_placement(answer.plan, p, p.tables.get(width), width, share_s))
    return answers


_WHOLE = ("devices", "micro_batches", "stages", "replicas")
_MOST = 2**29


def _check(problem: Any, name: str, least: float) -> None:
    value = getattr(problem, name)
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidTypeError(f"{name}: {value!r} is not accepted; expected a number")
    if not value >= least or value != value:
        raise InvalidInputError(f"{name}: {value!r} is not accepted; expected at least {least:g}")
    if name in _WHOLE and (value != int(value) or value > _MOST):
        raise InvalidInputError(
            f"{name}: {value!r} is not accepted; expected a whole number up to {_MOST}"
        )


def _check_published(p: PublishedProblem) -> None:
    for name, least in (("devices", 1), ("micro_batches", 1), ("memory_bytes", 0)):
        _check(p, name, least)
    for name in ("stages", "replicas"):
        _check(p, name, 0)
    if not p.tables:
        raise InvalidInputError("tables: none is not accepted; expected at least one width")
    for width in p.tables:
        if width < 1:
            raise InvalidInputError(f"tables: width {width} is not accepted; expected at least 1")


def _check_pipeline(p: PipelineProblem) -> None:
    if p.schedule not in SCHEDULES:
        raise InvalidInputError(
            f"schedule: {p.schedule!r} is not accepted; {nearest(str(p.schedule), SCHEDULES)}"
        )
    if not isinstance(p.stages, tuple) or len(p.stages) != 2:
        raise InvalidTypeError(
            f"stages: {p.stages!r} is not accepted; expected a pair, fewest and most"
        )
    if not 1 <= p.stages[0] <= p.stages[1]:
        raise InvalidInputError(
            f"stages: {p.stages} is not accepted; expected fewest and most, from 1 up"
        )
    _check(p, "micro_batches", 1)
    for name in ("memory_bytes", "piped_bytes", "bucket_s"):
        _check(p, name, 0)


def place_counts(
    problems: Sequence[PipelineProblem], threads: int = 1, best_only: bool = False
) -> list[list[Placement]]:
    """Give the best plan with each count of stages that fits, or the best of all, for each."""
    for p in problems:
        _check_pipeline(p)
    begin = time.perf_counter()
    found = _core.place_pipeline(
        [p.table.columns for p in problems],
        np.array([p.memory_bytes for p in problems], dtype=np.float64),
        np.array([p.piped_bytes for p in problems], dtype=np.float64),
        np.array([p.bucket_s for p in problems], dtype=np.float64),
        np.array([p.micro_batches for p in problems], dtype=np.int64),
        np.array([min(p.stages[0], len(p.table) + 1) for p in problems], dtype=np.int32),
        np.array([min(p.stages[1], len(p.table) + 1) for p in problems], dtype=np.int32),
        np.array([SCHEDULES.index(p.schedule) for p in problems], dtype=np.int32),
        best_only,
        threads,
    )
    share_s = (time.perf_counter() - begin) / max(len(problems), 1)
    answers = []
    for p, answer in zip(problems, found, strict=True):
        _raise_if(answer.status, p.name)
        answers.append([_placement(plan, p, p.table, 1, share_s) for plan in answer.plans])
    return answers


def place_batch(
    problems: Sequence[PublishedProblem | PipelineProblem], threads: int | None = None
) -> list[Placement]:
    """Place many problems in one call; the GIL is released.

    Parameters
    ----------
    problems
        Of either kind.
    threads
        At most this many threads, by default all cores; the answers do not depend on it.

    Returns
    -------
    list of Placement
        One each; status ``infeasible`` where nothing fits.

    Raises
    ------
    InvalidInputError
        Where a problem is malformed.

    Examples
    --------
    >>> table = LayerTable(names=range(4), forward_s=[1.0] * 4, backward_s=[2.0] * 4)
    >>> problems = [PipelineProblem(table, 1e9, m, stages=(2, 2)) for m in (1, 8)]
    >>> [found.time_s for found in place_batch(problems)]
    [12.0, 54.0]
    """
    listed, workers = list(problems), thread_count(threads)
    answers: list[Placement] = [_NOTHING] * len(listed)
    ours = [k for k, p in enumerate(listed) if isinstance(p, PipelineProblem)]
    theirs = [k for k, p in enumerate(listed) if isinstance(p, PublishedProblem)]
    if len(ours) + len(theirs) != len(listed):
        raise InvalidInputError("problems: expected PublishedProblem or PipelineProblem")
    if theirs:
        placed = _published([listed[k] for k in theirs], workers)  # type: ignore[misc]
        for k, answer in zip(theirs, placed, strict=True):
            answers[k] = answer
    if ours:
        counted = place_counts([listed[k] for k in ours], workers, True)  # type: ignore[misc]
        for k, plans in zip(ours, counted, strict=True):
            answers[k] = min(plans, key=lambda plan: plan.time_s, default=_NOTHING)
    return answers


def place(problem: PublishedProblem | PipelineProblem) -> Placement:
    """Place one problem.

    Examples
    --------
    >>> table = LayerTable(names=range(4), forward_s=[1.0] * 4, backward_s=[2.0] * 4)
    >>> found = place(PipelineProblem(table, memory_bytes=1e9, micro_batches=8, stages=(1, 4)))
    >>> found.stages, found.time_s
    (((0,), (1,), (2,), (3,)), 33.0)
    """
    return place_batch([problem])[0]


def place_front(problem: PublishedProblem | PipelineProblem, most: int = 1000) -> list[Placement]:
    """Give the front of time and memory: plans of which none is both faster and smaller.

    The fastest plan; then the fastest of those that need less memory than that; and so on until
    nothing fits. Every plan is the optimum for the memory it needs.

    Parameters
    ----------
    problem
        Of either kind; its ``memory_bytes`` is where the front begins.
    most
        At most so many plans.

    Examples
    --------
    >>> table = LayerTable(
    ...     names=range(4), variants=("none", "full"), stash_bytes=[[4.0] * 4, [1.0] * 4],
    ...     forward_s=[[1.0] * 4] * 2, backward_s=[[2.0] * 4, [3.0] * 4],
    ... )
    >>> front = place_front(PipelineProblem(table, 100.0, micro_batches=8, stages=(2, 2)))
    >>> [(plan.time_s, plan.memory_bytes) for plan in front]
    [(54.0, 16.0), (68.0, 8.0), (72.0, 4.0), (100.0, 3.0)]
    """
    front: list[Placement] = []
    limit = problem.memory_bytes
    while len(front) < most:
        found = place(replace(problem, memory_bytes=limit))
        if found.status != "optimal":
            break
        used = found.memory_bytes
        if front and found.time_s <= front[-1].time_s:
            front.pop()  # as fast, and smaller
        front.append(found)
        limit = used * (1 - 4e-12)  # below what still counts as fitting
        if not limit > 0:
            break
    return front
