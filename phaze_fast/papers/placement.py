"""Placement of a table of layers on a pipeline of devices, proven optimal, one or many at a time.

The objective is that of the PHAZE paper; docs/papers.md has the formulas.
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
from phaze_fast.errors import InvalidInputError, InvalidTypeError, not_accepted
from phaze_fast.tables import Array, picked
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes, format_time

# ---- the table of layers ----

_BY_LAYER = (
    *("forward_s", "backward_s", "sync_s"),
    *("stash_bytes", "resident_bytes", "once_bytes"),
)


def _numbers(name: str, value: Any) -> Array:
    """Convert numbers to an array; None means zero."""
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


def _positions(name: str, pairs: Any, count: int) -> tuple[tuple[int, int], ...]:
    """Convert pairs to positions of layers below `count`, the first before the second."""
    try:
        positions = tuple((int(a), int(b)) for a, b in pairs)
    except (TypeError, ValueError):
        raise InvalidTypeError(
            f"{name}: {pairs!r} is not accepted; expected pairs of positions"
        ) from None
    for a, b in positions:
        if not 0 <= a < b < count:
            raise InvalidInputError(
                f"{name}: ({a}, {b}) is not accepted; expected positions 0 to {count - 1} that go "
                "forward"
            )
    return positions


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Layers of a model under one strategy, in an order in which edges go forward.

    Missing columns are zeros; a number is a constant column.

    Examples
    --------
    >>> table = LayerTable(names=("a", "b"), forward_s=1.0, backward_s=[2.0, 2.0])
    >>> table.forward_s.tolist()
    [1.0, 1.0]
    """

    names: Sequence[str | int]
    """Name of each layer."""
    forward_s: Any
    """Seconds of the forward pass per micro-batch, shape (layers,)."""
    backward_s: Any
    """Seconds of the backward pass per micro-batch."""
    stash_bytes: Any = None
    """Bytes of activations that a stage stores once for each stage after it."""
    resident_bytes: Any = None
    """Bytes of weights, gradients and optimiser state."""
    once_bytes: Any = None
    """Further bytes, stored once whatever the number of micro-batches in flight."""
    sync_s: Any = None
    """Seconds to synchronise a layer's gradients, in the limit of very many replicas."""
    wide: Any = None
    """Whether a stage with this layer takes as many devices as the width; by default yes."""
    edges: Sequence[tuple[int, int]] | None = None
    """Pairs of positions of layers, sender first; by default a chain."""
    edge_s: Any = None
    """Seconds to send the data of an edge from stage to stage, in one direction."""
    edge_bytes: Any = None
    """Bytes that an edge carries."""

    def __post_init__(self) -> None:
        count = len(self.names)
        if not 1 <= count <= _core.MAX_PLACED_LAYERS:
            raise InvalidInputError(
                f"names: {count} layers are not accepted; expected 1 to {_core.MAX_PLACED_LAYERS}"
            )
        checked: dict[str, Any] = {}
        for name in _BY_LAYER:
            checked[name] = _column(name, getattr(self, name), (count,))
        wide = _column("wide", 1.0 if self.wide is None else self.wide, (count,))
        checked["wide"] = (wide != 0).astype(np.uint8)
        edges = pairwise(range(count)) if self.edges is None else self.edges
        checked["edges"] = _positions("edges", list(edges), count)
        for name in ("edge_s", "edge_bytes"):
            checked[name] = _column(name, getattr(self, name), (len(checked["edges"]),))
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def columns(self) -> dict[str, Array]:
        """The arrays by the names that the kernel reads."""
        ends = np.array(self.edges or (), dtype=np.int32).reshape(-1, 2)
        return {
            **{name: getattr(self, name) for name in (*_BY_LAYER, "wide", "edge_s", "edge_bytes")},
            "edge_from": ends[:, 0].copy(),
            "edge_to": ends[:, 1].copy(),
        }

    def traffic(self, stage: set[int]) -> tuple[float, float, float]:
        """Seconds in and out, and bytes in, of a stage; every edge across a cut counts."""
        in_s = out_s = in_bytes = 0.0
        rows = zip(self.edges or (), self.edge_s, self.edge_bytes, strict=True)
        for (a, b), seconds, size in rows:
            if a not in stage and b in stage:
                in_s += float(seconds)
                in_bytes += float(size)
            elif a in stage and b not in stage:
                out_s += float(seconds)
        return in_s, out_s, in_bytes


# ---- problems and placements ----


@dataclass(frozen=True)
class PlacedStage:
    """One stage of a placement."""

    layers: tuple[int, ...]
    devices: int
    load_s: float
    """Seconds per micro-batch, sends and receives of the stage included."""
    memory: dict[str, float]
    """Bytes of one device by term."""

    @property
    def memory_bytes(self) -> float:
        """Bytes of one device, all terms together."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class PublishedProblem:
    """A placement problem of PHAZE: time = load x (ceil(micro_batches / d) + stages - 1) + sync.

    Here d is the number of replicas. Tables come from `problem_from_dict` or from the caller. Of
    the ``sync_s`` of the layers, only those of the first stage count.
    """

    tables: Mapping[int, LayerTable]
    """Layers by tensor-parallel width."""
    devices: int
    """Largest number of devices in all."""
    memory_bytes: float
    """Memory of one device."""
    micro_batches: int
    """Micro-batches of one step, over all replicas."""
    recompute: bool = False
    """Whether stages recompute: only their inputs are stored."""
    name: str = ""
    """Name in messages."""

    def check(self) -> None:
        """Raise InvalidInputError where a field is out of range."""
        _check_number("devices", self.devices, 1, whole=True)
        _check_number("micro_batches", self.micro_batches, 1, whole=True)
        _check_number("memory_bytes", self.memory_bytes, 0)
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
        in_s, out_s, in_bytes = table.traffic(set(at))
        forward = float(table.forward_s[at].sum())
        backward = float(table.backward_s[at].sum())
        if self.recompute and later > 0:
            out_s = max(forward, out_s)
        stash = in_bytes if self.recompute else float(table.stash_bytes[at].sum())
        memory = {
            "weights": float(table.resident_bytes[at].sum()),
            "activations": float(table.once_bytes[at].sum()),
            "stash": later * stash,
        }
        return PlacedStage(
            layers=placement.stages[k],
            devices=placement.width if table.wide[at].any() else 1,
            load_s=in_s + forward + out_s + backward,
            memory=memory,
        )


@dataclass(frozen=True)
class Placement:
    """The layers of each stage, and the time and memory of a step with them."""

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
    table: LayerTable | None = field(default=None, repr=False, compare=False)
    problem: PublishedProblem | None = field(default=None, repr=False, compare=False)
    solve_s: float = field(default=0.0, compare=False)
    """Wall time of the kernel; in a batch, an even share."""

    @property
    def bound_s(self) -> float:
        """Lower bound of the time of all placements: `time_s`, which is proven optimal."""
        return self.time_s

    @property
    def details(self) -> list[PlacedStage]:
        """Every stage with its devices, its seconds and its bytes by term."""
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
        stages = self.details
        slowest = max(range(len(stages)), key=lambda k: stages[k].load_s)
        fullest = max(range(len(stages)), key=lambda k: stages[k].memory_bytes)
        return (
            f"{self.status}: {format_time(self.time_s)}, {len(stages)} stages x {self.replicas} "
            f"replicas of {self.devices} devices; stage {slowest} is the slowest, stage {fullest} "
            f"the fullest with {format_bytes(self.memory_bytes)}; stages: .details"
        )


_INFEASIBLE = Placement("infeasible", float("inf"), 0.0, 0, 0, 0, ())
_MOST = 2**29


def _check_number(name: str, value: Any, least: float, whole: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InvalidTypeError(f"{name}: {value!r} is not accepted; expected a number")
    if not value >= least or value != value:
        raise not_accepted(name, value, f"at least {least:g}")
    if whole and (value != int(value) or value > _MOST):
        raise not_accepted(name, value, f"a whole number up to {_MOST}")


# ---- the kernel ----


def _placement(
    problem: PublishedProblem, answer: _core.PublishedAnswer, solve_s: float
) -> Placement:
    """Turn an answer of the kernel into a placement."""
    if answer.status:
        sentence = _core.STATUS_SENTENCES[answer.status]
        raise InvalidInputError(f"{problem.name or 'problem'}: {sentence}")
    plan = answer.plan
    if answer.table < 0 or plan.stages == 0:
        return replace(_INFEASIBLE, solve_s=solve_s)
    width = list(problem.tables)[answer.table]
    order = np.argsort(plan.stage_of, kind="stable")
    borders = np.searchsorted(plan.stage_of[order], np.arange(plan.stages + 1))
    return Placement(
        status="optimal",
        width=width,
        **picked(plan, "time_s", "max_load_s", "replicas", "devices"),
        stages=tuple(tuple(order[a:b].tolist()) for a, b in pairwise(borders)),
        table=problem.tables[width],
        problem=problem,
        solve_s=solve_s,
    )


def place_batch(
    problems: Sequence[PublishedProblem], threads: int | None = None
) -> list[Placement]:
    """Place many problems in one call; the GIL is released.

    Parameters
    ----------
    problems
        Placement problems; may be empty.
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
    >>> table = LayerTable(names=range(4), forward_s=1.0, backward_s=2.0)
    >>> problems = [PublishedProblem({1: table}, 2, 1e9, m) for m in (1, 8)]
    >>> [placement.time_s for placement in place_batch(problems)]
    [12.0, 48.0]
    """
    workers = thread_count(threads)
    for problem in problems:
        if not isinstance(problem, PublishedProblem):
            raise InvalidInputError("problems: expected PublishedProblem")
        problem.check()
    if not problems:
        return []
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
        workers,
    )
    solve_s = (time.perf_counter() - begin) / len(problems)
    return [_placement(p, answer, solve_s) for p, answer in zip(problems, answers, strict=True)]


def place(problem: PublishedProblem) -> Placement:
    """Place one problem.

    Examples
    --------
    >>> table = LayerTable(names=range(4), forward_s=1.0, backward_s=2.0)
    >>> problem = PublishedProblem({1: table}, devices=4, memory_bytes=1e9, micro_batches=8)
    >>> placement = place(problem)
    >>> placement.stages, placement.time_s
    (((0, 1, 2, 3),), 24.0)
    """
    return place_batch([problem])[0]
