"""Placement of a table of layers on a pipeline of devices, proven optimal, one or many at a time.

Two objectives: `PublishedProblem` is that of the PHAZE paper, `PipelineProblem` that of a pipeline
of equal groups of devices. docs/papers.md has the formulas.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest
from phaze_fast.memory import SCHEDULE_CODES
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes, format_time

Array = np.ndarray[Any, Any]

SCHEDULES = ("1f1b", "zb-h1")
"""Schedules whose stages may differ in size, in the order of the kernel's codes."""
_KERNEL_CODES = {SCHEDULE_CODES[name]: code for code, name in enumerate(SCHEDULES)}

# ---- the table of layers ----

_BY_VARIANT = ("forward_s", "backward_s", "stash_bytes", "live_bytes")
_BY_LAYER = (
    *("resident_bytes", "once_bytes", "gather_bytes"),
    *("sync_s", "step_s", "weight_grad_s"),
)


def _numbers(name: str, value: Any) -> Array:
    """Convert numbers to an array; None stands for zero."""
    try:
        return np.asarray(0.0 if value is None else value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{name}: {value!r} is not accepted; expected numbers") from None


def _column(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    """Broadcast numbers to a shape; all have to be finite and at least zero."""
    numbers = _numbers(name, value)
    try:
        column = np.ascontiguousarray(np.broadcast_to(numbers, shape), dtype=np.float64)
    except ValueError:
        raise InvalidInputError(
            f"{name}: shape {numbers.shape} is not accepted; expected {shape}"
        ) from None
    bad = ~np.isfinite(column) | (column < 0)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise InvalidInputError(
            f"{name}[{', '.join(map(str, at))}]: {column[at]} is not accepted; "
            "expected a finite number, zero or more"
        )
    return column


def _positions(name: str, pairs: Any, count: int, forward: bool) -> tuple[tuple[int, int], ...]:
    """Convert pairs to positions of layers below `count`, the first before the second."""
    try:
        positions = tuple((int(a), int(b)) for a, b in pairs)
    except (TypeError, ValueError):
        raise InvalidTypeError(
            f"{name}: {pairs!r} is not accepted; expected pairs of positions"
        ) from None
    for a, b in positions:
        if not (0 <= a < count and 0 <= b < count and (a < b or not forward)):
            order = " that go forward" if forward else ""
            raise InvalidInputError(
                f"{name}: ({a}, {b}) is not accepted; expected positions 0 to {count - 1}{order}"
            )
    return positions


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Layers of a model under one strategy, in an order in which edges go forward.

    A recompute variant applies to all layers of a stage; columns that depend on it have shape
    (variants, layers). Missing columns are zeros.

    Examples
    --------
    >>> table = LayerTable(names=("a", "b"), forward_s=[1.0, 1.0], backward_s=[2.0, 2.0])
    >>> table.forward_s.shape
    (1, 2)
    """

    names: Sequence[str | int]
    """One per layer."""
    forward_s: Any
    """Seconds per micro-batch, shape (variants, layers) or (layers,)."""
    backward_s: Any
    """Seconds per micro-batch, with what is recomputed."""
    stash_bytes: Any = None
    """Bytes of activations for every micro-batch in flight."""
    live_bytes: Any = None
    """Bytes of one layer at a time; the largest of a stage counts."""
    resident_bytes: Any = None
    """Weights, gradients, optimiser state."""
    once_bytes: Any = None
    """Bytes that do not depend on the number of micro-batches in flight."""
    gather_bytes: Any = None
    """Bytes of one layer at a time, on top of `live_bytes`; the largest of a stage counts."""
    sync_s: Any = None
    """Seconds to synchronise its gradients."""
    step_s: Any = None
    """Seconds of the optimiser."""
    weight_grad_s: Any = None
    """Part of `backward_s` that can be delayed, for zero-bubble schedules."""
    wide: Any = None
    """Whether a stage with this layer takes as many devices as the width; by default yes."""
    edges: Sequence[tuple[int, int]] | None = None
    """Pairs of positions; by default a chain."""
    edge_s: Any = None
    """Seconds to send the data of an edge from stage to stage, in one direction."""
    edge_bytes: Any = None
    """Bytes that an edge carries."""
    tied: Sequence[tuple[int, int]] = ()
    """Pairs of positions that have to be in one stage."""
    variants: Sequence[str] = ()
    """Names of the variants."""

    def __post_init__(self) -> None:
        count = len(self.names)
        if not 1 <= count <= _core.MAX_PLACED_LAYERS:
            raise InvalidInputError(
                f"names: {count} layers are not accepted; expected 1 to {_core.MAX_PLACED_LAYERS}"
            )
        by_variant = {n: np.atleast_2d(_numbers(n, getattr(self, n))) for n in _BY_VARIANT}
        most = max(len(column) for column in by_variant.values())
        if most > _core.MAX_VARIANTS:
            raise InvalidInputError(
                f"variants: {most} are not accepted; expected at most {_core.MAX_VARIANTS}"
            )
        checked: dict[str, Any] = {}
        for name, column in by_variant.items():
            checked[name] = _column(name, column, (most, count))
        for name in _BY_LAYER:
            checked[name] = _column(name, getattr(self, name), (count,))
        wide = _column("wide", 1.0 if self.wide is None else self.wide, (count,))
        checked["wide"] = (wide != 0).astype(np.uint8)
        edges = pairwise(range(count)) if self.edges is None else self.edges
        checked["edges"] = _positions("edges", list(edges), count, forward=True)
        for name in ("edge_s", "edge_bytes"):
            checked[name] = _column(name, getattr(self, name), (len(checked["edges"]),))
        checked["tied"] = _positions("tied", self.tied, count, forward=False)
        checked["variants"] = self.variants or tuple(str(v) for v in range(most))
        if len(checked["variants"]) != most:
            raise InvalidInputError(
                f"variants: {len(self.variants)} names are not accepted; expected {most}"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def columns(self) -> dict[str, Array]:
        """The arrays by the names that the kernel reads."""
        ends = np.array(self.edges or (), dtype=np.int32).reshape(-1, 2)
        tied = np.array(self.tied or (), dtype=np.int32).reshape(-1, 2)
        return {
            **{name: getattr(self, name).reshape(-1) for name in _BY_VARIANT},
            **{name: getattr(self, name) for name in _BY_LAYER},
            "wide": self.wide,
            "edge_from": ends[:, 0].copy(),
            "edge_to": ends[:, 1].copy(),
            "edge_s": self.edge_s,
            "edge_bytes": self.edge_bytes,
            "tied_from": tied[:, 0].copy(),
            "tied_to": tied[:, 1].copy(),
        }

    def traffic(self, stage: set[int], each_edge: bool) -> tuple[float, float, float]:
        """Seconds in and out, and bytes in, of a stage.

        Of several edges from one layer all count where `each_edge`, else the largest.
        """
        enters: dict[int, list[tuple[float, float]]] = {}
        leaves: dict[int, list[float]] = {}
        rows = zip(self.edges or (), self.edge_s, self.edge_bytes, strict=True)
        for (a, b), seconds, size in rows:
            if (a in stage) == (b in stage):
                continue
            if b in stage:
                enters.setdefault(a, []).append((float(seconds), float(size)))
            else:
                leaves.setdefault(a, []).append(float(seconds))
        pick = sum if each_edge else max
        return (
            sum(pick(s for s, _ in edges) for edges in enters.values()),
            sum(pick(seconds) for seconds in leaves.values()),
            sum(pick(b for _, b in edges) for edges in enters.values()),
        )


# ---- problems and placements ----


@dataclass(frozen=True)
class PlacedStage:
    """One stage of a placement."""

    layers: tuple[int, ...]
    devices: int
    variant: str
    load_s: float
    """Seconds per micro-batch, with what the stage sends and receives."""
    memory: dict[str, float]
    """Bytes of one device by term."""
    free_bytes: float

    @property
    def memory_bytes(self) -> float:
        """Bytes of one device, all terms together."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class PublishedProblem:
    """A placement as PHAZE poses it: time = load x (ceil(micro_batches / d) + stages - 1) + sync.

    Tables come from `problem_from_dict` or from the caller: ``resident_bytes`` and ``once_bytes``
    count once, ``stash_bytes`` for every stage that follows, and ``sync_s`` is the time to
    synchronise a layer's gradients between very many replicas; only the first stage's counts.
    """

    tables: Mapping[int, LayerTable]
    """By tensor-parallel width."""
    devices: int
    """At most so many in all."""
    memory_bytes: float
    """Memory of one device."""
    micro_batches: int
    """Micro-batches of one step, over all replicas."""
    recompute: bool = False
    """Whether stages recompute: only their inputs are stored."""
    stages: int = 0
    """Exactly so many stages; 0 = any."""
    replicas: int = 0
    """Exactly so many replicas; 0 = any."""
    name: str = ""
    """For messages."""

    def check(self) -> None:
        """Raise InvalidInputError where a field is out of range."""
        _check_number("devices", self.devices, 1, whole=True)
        _check_number("micro_batches", self.micro_batches, 1, whole=True)
        _check_number("memory_bytes", self.memory_bytes, 0)
        _check_number("stages", self.stages, 0, whole=True)
        _check_number("replicas", self.replicas, 0, whole=True)
        if not self.tables:
            raise InvalidInputError("tables: none is not accepted; expected at least one width")
        for width in self.tables:
            if width < 1:
                raise InvalidInputError(
                    f"tables: width {width} is not accepted; expected at least 1"
                )

    def stage(self, placement: Placement, k: int) -> PlacedStage:
        """Describe stage `k` of a placement."""
        table = self.tables[placement.width]
        at, later = list(placement.stages[k]), len(placement.stages) - k - 1
        in_s, out_s, in_bytes = table.traffic(set(at), each_edge=True)
        forward = float(table.forward_s[0, at].sum())
        backward = float(table.backward_s[0, at].sum())
        if self.recompute and later > 0:
            out_s = max(forward, out_s)
        stash = in_bytes if self.recompute else float(table.stash_bytes[0, at].sum())
        memory = {
            "weights": float(table.resident_bytes[at].sum()),
            "activations": float(table.once_bytes[at].sum()),
            "stash": later * stash,
        }
        return PlacedStage(
            layers=placement.stages[k],
            devices=placement.width if table.wide[at].any() else 1,
            variant=placement.variants[k],
            load_s=in_s + forward + out_s + backward,
            memory=memory,
            free_bytes=self.memory_bytes - sum(memory.values()),
        )


@dataclass(frozen=True)
class PipelineProblem:
    """A pipeline of equal groups of devices: time = (m - 1) x largest load + fill and drain + tail.

    Each stage has the fastest variant that fits.
    """

    table: LayerTable
    memory_bytes: float
    """Memory of one device."""
    micro_batches: int
    """Micro-batches of one replica in one step (m)."""
    stages: tuple[int, int] = (1, 1)
    """Fewest and most stages."""
    schedule: str = "1f1b"
    """A name of `SCHEDULES`; ``zero-bubble`` stands for ``zb-h1``."""
    piped_bytes: float = 0.0
    """Bytes of messages on every device, where there is more than one stage."""
    bucket_s: float = 0.0
    """Seconds of the gradients that are synchronised last, which no backward pass overlaps."""
    name: str = ""
    """For messages."""

    @property
    def code(self) -> int:
        """The kernel's code of the schedule; -1 where it has none."""
        return _KERNEL_CODES.get(SCHEDULE_CODES.get(self.schedule, -1), -1)

    def check(self) -> None:
        """Raise InvalidInputError where a field is out of range."""
        if self.code < 0:
            raise InvalidInputError(
                f"schedule: {self.schedule!r} is not accepted; "
                f"{nearest(str(self.schedule), SCHEDULES)}"
            )
        if not isinstance(self.stages, tuple) or len(self.stages) != 2:
            raise InvalidTypeError(
                f"stages: {self.stages!r} is not accepted; expected a pair, fewest and most"
            )
        if not 1 <= self.stages[0] <= self.stages[1]:
            raise InvalidInputError(
                f"stages: {self.stages} is not accepted; expected fewest and most, from 1 up"
            )
        _check_number("micro_batches", self.micro_batches, 1, whole=True)
        _check_number("memory_bytes", self.memory_bytes, 0)
        _check_number("piped_bytes", self.piped_bytes, 0)
        _check_number("bucket_s", self.bucket_s, 0)

    def stage(self, placement: Placement, k: int) -> PlacedStage:
        """Describe stage `k` of a placement."""
        table, count = self.table, len(placement.stages)
        at, v = list(placement.stages[k]), list(table.variants).index(placement.variants[k])
        in_s, out_s, _ = table.traffic(set(at), each_edge=False)
        in_flight = count if SCHEDULES[self.code] == "zb-h1" else count - k
        memory = {
            "resident": float(table.resident_bytes[at].sum()),
            "once": float(table.once_bytes[at].sum()),
            "stash": min(self.micro_batches, in_flight) * float(table.stash_bytes[v, at].sum()),
            "live": float(table.live_bytes[v, at].max()),
            "gathered": float(table.gather_bytes[at].max()),
            "messages": self.piped_bytes * (count > 1),
        }
        passes = float((table.forward_s[v, at] + table.backward_s[v, at]).sum())
        return PlacedStage(
            layers=placement.stages[k],
            devices=1,
            variant=placement.variants[k],
            load_s=in_s + passes + out_s,
            memory=memory,
            free_bytes=self.memory_bytes - sum(memory.values()),
        )


@dataclass(frozen=True)
class Placement:
    """The layers and the variant of each stage, and the time and memory that follow."""

    status: str
    """``optimal``, or ``infeasible`` where nothing fits."""
    time_s: float
    """Seconds of one step; infinite where nothing fits."""
    max_load_s: float
    """Load of the slowest stage, seconds per micro-batch."""
    width: int
    """Tensor-parallel width; 0 where nothing fits."""
    replicas: int
    devices: int
    """Devices of one replica."""
    stages: tuple[tuple[int, ...], ...]
    """Positions of the layers of each stage, first to last."""
    variants: tuple[str, ...]
    """Recompute variant of each stage."""
    table: LayerTable | None = field(default=None, repr=False, compare=False)
    problem: PublishedProblem | PipelineProblem | None = field(
        default=None, repr=False, compare=False
    )
    tail_s: float = field(default=0.0, compare=False)
    """Part of the time after the last backward pass: gradients and optimiser."""
    solve_s: float = field(default=0.0, compare=False)
    """Wall time of the kernel; in a batch, an even share."""

    @property
    def bound_s(self) -> float:
        """Lower bound of the time of all placements: the time itself, since it is proven."""
        return self.time_s

    @property
    def details(self) -> list[PlacedStage]:
        """Every stage with its seconds, its bytes by term and its free memory."""
        if self.problem is None:
            return []
        return [self.problem.stage(self, k) for k in range(len(self.stages))]

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest device."""
        return max((stage.memory_bytes for stage in self.details), default=0.0)

    def __str__(self) -> str:
        if self.table is None:
            return f"{self.status}: no plan fits"
        stages, names = self.details, self.table.names
        slowest = max(range(len(stages)), key=lambda k: stages[k].load_s)
        fullest = min(range(len(stages)), key=lambda k: stages[k].free_bytes)
        lines = [
            f"{self.status}: {format_time(self.time_s)}, {len(stages)} stages x {self.replicas} "
            f"replicas of {self.devices} devices; stage {slowest} is the slowest, stage {fullest} "
            "the fullest"
        ]
        for k, stage in enumerate(stages):
            first, last = names[stage.layers[0]], names[stage.layers[-1]]
            terms = ", ".join(f"{t} {format_bytes(b)}" for t, b in stage.memory.items() if b)
            slack = stages[slowest].load_s - stage.load_s
            lines.append(
                f"  {k}: {len(stage.layers)} layers ({first} to {last}), {stage.devices} devices, "
                f"{stage.variant}: {format_time(stage.load_s)} (slack {format_time(slack)}); "
                f"{terms}; free {format_bytes(stage.free_bytes)}"
            )
        return "\n".join(lines)


_INFEASIBLE = Placement("infeasible", float("inf"), 0.0, 0, 0, 0, (), ())
_MOST = 2**29


def _check_number(name: str, value: Any, least: float, whole: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidTypeError(f"{name}: {value!r} is not accepted; expected a number")
    if not value >= least or value != value:
        raise InvalidInputError(f"{name}: {value!r} is not accepted; expected at least {least:g}")
    if whole and (value != int(value) or value > _MOST):
        raise InvalidInputError(
            f"{name}: {value!r} is not accepted; expected a whole number up to {_MOST}"
        )


# ---- the kernels ----


def _placement(
    problem: PublishedProblem | PipelineProblem,
    table: LayerTable | None,
    width: int,
    plan: _core.TablePlan,
    solve_s: float,
) -> Placement:
    """Turn a plan of the kernel into a placement."""
    if table is None or plan.stages == 0:
        return replace(_INFEASIBLE, solve_s=solve_s)
    order = np.argsort(plan.stage_of, kind="stable")
    borders = np.searchsorted(plan.stage_of[order], np.arange(plan.stages + 1))
    return Placement(
        status="optimal",
        time_s=plan.time_s,
        max_load_s=plan.max_load_s,
        width=width,
        replicas=plan.replicas,
        devices=plan.devices,
        stages=tuple(tuple(order[a:b].tolist()) for a, b in pairwise(borders)),
        variants=tuple(table.variants[v] for v in plan.variant_of.tolist()),
        table=table,
        problem=problem,
        tail_s=plan.tail_s,
        solve_s=solve_s,
    )


def _raise_if(status: int, name: str) -> None:
    if status:
        raise InvalidInputError(f"{name or 'problem'}: {_core.STATUS_SENTENCES[status]}")


def _place_published(problems: Sequence[PublishedProblem], threads: int) -> list[Placement]:
    each_width = [(p, width, table) for p in problems for width, table in p.tables.items()]
    counts = [len(p.tables) for p in problems]
    begin = time.perf_counter()
    answers = _core.place_published(
        [table.columns for _, _, table in each_width],
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        np.array([p.memory_bytes for p, _, _ in each_width], dtype=np.float64),
        np.array([p.devices for p, _, _ in each_width], dtype=np.int64),
        np.array([p.micro_batches for p, _, _ in each_width], dtype=np.int64),
        np.array([width for _, width, _ in each_width], dtype=np.int32),
        np.array([p.recompute for p, _, _ in each_width], dtype=np.uint8),
        np.array([p.stages for p, _, _ in each_width], dtype=np.int32),
        np.array([p.replicas for p, _, _ in each_width], dtype=np.int64),
        threads,
    )
    solve_s = (time.perf_counter() - begin) / len(problems)
    placements = []
    for p, answer in zip(problems, answers, strict=True):
        _raise_if(answer.status, p.name)
        width = list(p.tables)[answer.table] if answer.table >= 0 else 0
        placements.append(_placement(p, p.tables.get(width), width, answer.plan, solve_s))
    return placements


def _place_pipelines(problems: Sequence[PipelineProblem], threads: int) -> list[Placement]:
    begin = time.perf_counter()
    answers = _core.place_pipeline(
        [p.table.columns for p in problems],
        np.array([p.memory_bytes for p in problems], dtype=np.float64),
        np.array([p.piped_bytes for p in problems], dtype=np.float64),
        np.array([p.bucket_s for p in problems], dtype=np.float64),
        np.array([p.micro_batches for p in problems], dtype=np.int64),
        np.array([min(p.stages[0], len(p.table) + 1) for p in problems], dtype=np.int32),
        np.array([min(p.stages[1], len(p.table) + 1) for p in problems], dtype=np.int32),
        np.array([p.code for p in problems], dtype=np.int32),
        True,
        threads,
    )
    solve_s = (time.perf_counter() - begin) / len(problems)
    placements = []
    for p, answer in zip(problems, answers, strict=True):
        _raise_if(answer.status, p.name)
        plans = [_placement(p, p.table, 1, plan, solve_s) for plan in answer.plans]
        placements.append(min(plans, key=lambda plan: plan.time_s, default=_INFEASIBLE))
    return placements


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
        One for each problem; status ``infeasible`` where nothing fits.

    Raises
    ------
    InvalidInputError
        Where a problem is malformed.

    Examples
    --------
    >>> table = LayerTable(names=range(4), forward_s=[1.0] * 4, backward_s=[2.0] * 4)
    >>> problems = [PipelineProblem(table, 1e9, m, stages=(2, 2)) for m in (1, 8)]
    >>> [placement.time_s for placement in place_batch(problems)]
    [12.0, 54.0]
    """
    workers = thread_count(threads)
    pipelines: dict[int, PipelineProblem] = {}
    published: dict[int, PublishedProblem] = {}
    for k, problem in enumerate(problems):
        if isinstance(problem, PipelineProblem):
            pipelines[k] = problem
        elif isinstance(problem, PublishedProblem):
            published[k] = problem
        else:
            raise InvalidInputError("problems: expected PublishedProblem or PipelineProblem")
        problem.check()
    placements: dict[int, Placement] = {}
    if published:
        of_published = _place_published(list(published.values()), workers)
        placements.update(zip(published, of_published, strict=True))
    if pipelines:
        of_pipelines = _place_pipelines(list(pipelines.values()), workers)
        placements.update(zip(pipelines, of_pipelines, strict=True))
    return [placements[k] for k in range(len(placements))]


def place(problem: PublishedProblem | PipelineProblem) -> Placement:
    """Place one problem.

    Examples
    --------
    >>> table = LayerTable(names=range(4), forward_s=[1.0] * 4, backward_s=[2.0] * 4)
    >>> placement = place(PipelineProblem(table, memory_bytes=1e9, micro_batches=8, stages=(1, 4)))
    >>> placement.stages, placement.time_s
    (((0,), (1,), (2,), (3,)), 33.0)
    """
    return place_batch([problem])[0]


def place_front(problem: PublishedProblem | PipelineProblem, most: int = 1000) -> list[Placement]:
    """List the placements that are non-dominated in time and memory, fastest first.

    Each is the fastest of those that need less memory than the one before, until nothing fits.

    Parameters
    ----------
    problem
        Of either kind; its ``memory_bytes`` is the largest memory of the front.
    most
        At most so many placements.

    Examples
    --------
    >>> table = LayerTable(
    ...     names=range(4), variants=("none", "full"), stash_bytes=[[4.0] * 4, [1.0] * 4],
    ...     forward_s=[[1.0] * 4] * 2, backward_s=[[2.0] * 4, [3.0] * 4],
    ... )
    >>> front = place_front(PipelineProblem(table, 100.0, micro_batches=8, stages=(2, 2)))
    >>> [(placement.time_s, placement.memory_bytes) for placement in front]
    [(54.0, 16.0), (68.0, 8.0), (72.0, 4.0), (100.0, 3.0)]
    """
    front: list[Placement] = []
    limit = problem.memory_bytes
    while len(front) < most:
        placement = place(replace(problem, memory_bytes=limit))
        if placement.status != "optimal":
            break
        if front and placement.time_s <= front[-1].time_s:
            front.pop()  # as fast, and smaller
        front.append(placement)
        limit = placement.memory_bytes * (1 - 4e-12)  # below what still counts as fitting
        if not limit > 0:
            break
    return front
