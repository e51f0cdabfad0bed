"""Searches over spaces of wafers: the fastest wafer with its mapping, and Pareto fronts.

A search for the fastest wafer prunes a wafer that another contains - the same die, no fewer of
them along either axis, no slower links, no less memory: every mapping of the smaller one runs on
the larger, except that the pipeline may turn at other dies, whose sends are a small part of a step.
All other wafers are searched briefly in the order of a quick bound, in waves of a fixed size and
only below the best time so far; the best few are then searched at length. Wafers of a wave are
tasks of one session, so that the answer is the same for every executor, and a stopped run can be
resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import ge, le
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, check_one_of
from phaze_fast.hardware import energy_table
from phaze_fast.models import TransformerModel
from phaze_fast.tables import Table, joined_columns, non_dominated, picked
from phaze_fast.wafer.hardware.space import WaferSpace
from phaze_fast.wafer.hardware.wafer import Wafer, wafer_totals
from phaze_fast.wafer.mapping.details import StepEnergy, details, step_energy
from phaze_fast.wafer.mapping.evaluate import Evaluation
from phaze_fast.wafer.mapping.problem import Problem, WaferTraining
from phaze_fast.wafer.search.bounds import quickest_s, state_shortfall
from phaze_fast.wafer.search.result import Effort, MappingResult, status_of
from phaze_fast.wafer.search.search import read_result, search_task
from phaze_fast.wafer.search.session import Progress, Session, session_of

_BRIEF = 2  # promising layouts of a brief search
_BRIEF_STEPS = 5_000
_WAVE = 4  # wafers between two updates of the incumbent or the front
_LONG = 3  # wafers searched with full effort
_NEVER = float("inf")


_COUNTS = ("rejected", "contained", "bounded", "searched", "unseen", "undecided")
"""Counts of wafers in the document of a search."""


@dataclass(frozen=True)
class WaferResult(Table):
    """The fastest wafer of a space, its mapping, and a table of the others."""

    best: MappingResult
    base: MappingResult | None
    """Result on the base wafer of the space, if it is feasible."""
    bound_s: float
    """A lower bound on the time of every mapping of `bound_space`."""
    wafers: int
    """Number of wafers that meet all rules."""
    rejected: dict[str, int]
    """Number of points that break each rule."""
    contained: int
    """Wafers pruned because another wafer contains them."""
    bounded: int
    """Wafers pruned by a bound."""
    searched: int
    unseen: int
    """Wafers not visited because the budget ran out."""
    evaluations: int
    seconds: float
    rows: tuple[dict[str, Any], ...] = ()
    """The base and every wafer that no other contains: status, bound, mapping; fastest first."""
    undecided: int = 0
    """If no mapping that fits was found: wafers without a proof that there is none, unseen ones
    included."""

    @property
    def bound_space(self) -> str:
        """Description of the wafers and mappings for which the bound holds."""
        count = self.wafers - self.contained
        wafers = f"all {count:,} wafers that meet the rules and lie inside no other"
        return f"{wafers}; {self.best.bound_space}"

    @property
    def gap(self) -> float:
        """Relative gap between the best time and the bound; 1 if no mapping that fits is known."""
        return replace(self.best, bound_s=self.bound_s).gap

    @property
    def status(self) -> str:
        """``optimal``, ``feasible``, ``infeasible`` or ``unknown``, over all wafers."""
        return status_of(self.best.best.fits, self.gap, not self.undecided)

    @property
    def reason(self) -> str:
        """Why there is no mapping; empty if there is. The wafer that comes closest is named."""
        if self.best.best.fits:
            return ""
        unproven = f"{self.undecided:,} of them without a proof that none fits"
        proof = unproven if self.undecided else "proven on each"
        known = self.best.shortfall or self.best.best.reason
        return (
            f"{self.best.problem.model.name}: no mapping on any of {self.wafers:,} wafers, "
            f"{proof}; {self.best.problem.wafer.name} comes closest: {known}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        best, proof = self.best, replace(self.best, bound_s=self.bound_s).proof()
        return {
            "model": best.problem.model.name,
            "wafer": best.problem.wafer.to_dict(),
            "ours": best.best.to_dict(),
            "base": None if self.base is None else self.base.best.to_dict(),
            **(proof | picked(self, "status", "reason", "bound_space")),
            **details(best.problem, best.best),
            **best.faults(),
            "wafers": {"feasible": self.wafers, **picked(self, *_COUNTS)},
            "table": list(self.rows),
            "evaluations": self.evaluations,
            "evaluations_per_s": best.evaluations_per_s,
            "seconds": self.seconds,
        }

    def to_columns(self) -> dict[str, Any]:
        """Return the wafers as a table: dies, links, bound and the best mapping found."""
        return joined_columns(self.rows)


def _alike(wafer: Wafer) -> tuple[Any, ...]:
    """Return what two wafers must share for one to contain the other: not sizes and rates.

    These are the die as far as operator times depend on it, without memory and links; the switches;
    the number of wafers, on each of which a pipeline has a stage; how off-wafer memory is attached.
    """
    off = wafer.off_wafer
    die = (wafer.chip.replace(name="die", hbm=None).digest(), wafer.die.network_bytes_per_s)
    attached = None if off is None else (off.duplex, off.edges)
    return (*die, wafer.switch, wafer.wafer_count, attached)


def _stream(wafer: Wafer) -> tuple[float, float]:
    tiers = (tier for tier in wafer.tiers() if tier.name == "stream")
    sizes = ((t.capacity_bytes * wafer.dies, t.bandwidth_bytes_per_s * wafer.dies) for t in tiers)
    return next(sizes, (0.0, 0.0))


def contained(wafers: Sequence[Wafer]) -> list[bool]:
    """Return whether each wafer is contained in another; of equal wafers, the first is not.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> whole = load_wafer("dram-wafer")
    >>> contained([whole, whole.replace(columns=4)])
    [False, True]
    """
    kinds = [_alike(wafer) for wafer in wafers]
    sizes = [_sizes(wafer) for wafer in wafers]

    def contains(j: int, i: int) -> bool:
        whole = not (wafers[j].dead or wafers[j].dead_links)
        same = j != i and kinds[j] == kinds[i]
        larger = all(map(ge, sizes[j], sizes[i])) and (sizes[j] != sizes[i] or j < i)
        return same and whole and larger

    every = range(len(wafers))
    return [any(contains(j, i) for j in every) for i in every]


def _sizes(wafer: Wafer) -> tuple[float, ...]:
    """Return the figures that are no smaller in a wafer that contains this one."""
    hbm = wafer.chip.hbm
    rate = hbm.bandwidth_bytes_per_s if hbm else float("inf")
    memory = (float(wafer.memory_bytes), rate, *_stream(wafer))
    io = (wafer.io.bandwidth_bytes_per_s, -wafer.io.latency_s) if wafer.io else (0.0, 0.0)
    between = io if wafer.wafer_count > 1 else ()
    return (*wafer.grid, *wafer.link_bytes_per_s, -wafer.hop_latency_s, *memory, *between)


def search_wafers(
    model: TransformerModel,
    space: WaferSpace,
    training: WaferTraining | None = None,
    effort: Effort | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
    session: Session | None = None,
) -> WaferResult:
    """Search wafers and mappings together.

    Parameters
    ----------
    model
        The model to train.
    space
        The space of wafers.
    training
        Batch, sequence length and optimiser.
    effort
        Effort of the search on each wafer; its time budget is for all wafers together.
    seed, threads
        As for `search_mapping`.
    progress
        Called with wafers done, total wafers, and the best time so far.
    session
        An open session to run in, with an executor, a journal or a store of results.

    Raises
    ------
    InvalidInputError
        If no wafer of the space meets all rules.

    Examples
    --------
    >>> from phaze_fast import models
    >>> space = WaferSpace(
    ...     name="few", base="dram-wafer", axes={"columns": [2, 3], "rows": [2]}
    ... )
    >>> quick = Effort(seeds=1, steps=200, promising=1)
    >>> result = search_wafers(models.load("bertlarge"), space, WaferTraining(16), quick)
    >>> result.best.problem.wafer.grid, result.contained
    ((3, 2), 1)
    >>> result.to_columns()["status"]
    ['searched']
    """
    began = time.perf_counter()
    training, effort = training or WaferTraining(), effort or Effort()
    wafers, rejected = space.wafers()
    if not wafers:
        raise InvalidInputError(
            f"space: no wafer of {space.name} meets all rules; broken: "
            + ", ".join(f"{rule} {count}" for rule, count in rejected.items())
        )
    inside = contained(wafers)
    base = space.base_index
    remaining = [i for i in range(len(wafers)) if not inside[i] or i == base]
    problems = {i: Problem(model, wafers[i], training) for i in remaining}
    with session_of(session, threads) as opened:
        search = _WaferSearch(opened, problems, effort, seed, progress)
        search.briefly(base)
        search.at_length(base)
    chosen = search.best
    return WaferResult(
        best=chosen,
        base=search.found.get(base) if base is not None else None,
        bound_s=min([*search.bounds.values(), *([chosen.best.time_s] if chosen.best.fits else [])]),
        wafers=len(wafers),
        rejected={str(rule): count for rule, count in rejected.items()},
        contained=len(wafers) - len(remaining),
        bounded=search.bounded,
        searched=len(search.found),
        unseen=search.unseen,
        evaluations=search.evaluations,
        seconds=time.perf_counter() - began,
        rows=tuple(search.rows()),
        undecided=0 if chosen.best.fits else search.undecided,
    )


class _WaferSearch:
    """A branch-and-bound search over wafers; see `search_wafers`."""

    def __init__(
        self,
        session: Session,
        problems: dict[int, Problem],
        effort: Effort,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self.session, self.problems, self.effort = session, problems, effort
        self.seed, self.progress = seed, progress
        self.began = time.perf_counter()
        self.bounds = {i: quickest_s(problem) for i, problem in problems.items()}
        self.found: dict[int, MappingResult] = {}
        self.late_ones: set[int] = set()
        self.evaluations = 0

    @property
    def unseen(self) -> int:
        """Wafers not visited because the budget ran out."""
        return len(self.late_ones - set(self.found))

    @property
    def bounded(self) -> int:
        """Wafers pruned by a bound."""
        return len(self.problems) - len(self.found) - self.unseen

    @property
    def undecided(self) -> int:
        """Wafers without a mapping that fits and without a proof that there is none."""
        searched = sum(result.status == "unknown" for result in self.found.values())
        others = (self.problems[i] for i in set(self.problems) - set(self.found))
        return searched + sum(not state_shortfall(problem) for problem in others)

    @property
    def best(self) -> MappingResult:
        """The fastest mapping so far, or the one that exceeds memory least."""
        return min(self.found.values(), key=lambda result: result.best.rank)

    @property
    def limit_s(self) -> float:
        """Time of the best mapping so far, which a wafer must beat; infinite if none fits."""
        return self.best.best.time_s if self.found and self.best.best.fits else float("inf")

    @property
    def late(self) -> bool:
        """Whether the budget is spent."""
        return self.effort.spent(self.began)

    def search(self, limits: dict[int, float], effort: Effort) -> None:
        """Search wafers, each below its time limit; bounds may prune a whole wafer."""
        if effort.budget_s is not None:
            left = self.began + effort.budget_s - time.perf_counter()
            effort = replace(effort, budget_s=max(left, 1e-3))
        known = {i: [self.found[i].best] if i in self.found else [] for i in limits}
        tasks = [
            search_task(self.problems[i], effort, self.seed, known[i], below_s)
            for i, below_s in limits.items()
        ]
        for i, data in zip(limits, self.session.run(tasks), strict=True):
            result, bound = read_result(self.problems[i], data)
            self.bounds[i] = max(self.bounds[i], bound)
            if result is None:
                continue
            self.evaluations += result.evaluations
            if i not in self.found or result.best.rank < self.found[i].best.rank:
                self.found[i] = result

    def briefly(self, base: int | None) -> None:
        """Search every wafer briefly: the base first, then the most promising, in waves."""
        brief = replace(
            self.effort, seeds=1, steps=min(self.effort.steps, _BRIEF_STEPS), promising=_BRIEF
        )
        order = sorted(self.problems, key=lambda i: (i != base, self.bounds[i], i))
        # The first wave has one wafer, whose time limits the others.
        starts = [0, *range(1, len(order), _WAVE)]
        for at, end in zip(starts, [*starts[1:], len(order)], strict=True):
            wave, limit = order[at:end], self.limit_s
            if self.found and self.late:
                self.late_ones.update(wave)
            else:
                wanted = [i for i in wave if self.bounds[i] < limit or not self.found]
                self.search(dict.fromkeys(wanted, limit), brief)
            if self.progress is not None:
                self.progress(end, len(order), self.limit_s)
        if not self.best.best.fits:  # the wafer with most memory shows how much is missing
            largest = max(self.problems, key=lambda i: (_memory_bytes(self.problems[i].wafer), -i))
            if largest not in self.found:
                self.search({largest: _NEVER}, brief)

    def at_length(self, base: int | None) -> None:
        """Search the best few wafers and the base with full effort."""
        if self.late:
            return
        ranked = sorted(self.found, key=lambda i: (self.found[i].best.rank, i))
        limits = {}
        for i in dict.fromkeys([*ranked[:_LONG], *(i for i in ranked if i == base)]):
            best = self.found[i].best
            limits[i] = best.time_s * (1.0 + 1e-9) if best.fits else _NEVER
        self.search(limits, self.effort)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every wafer: searched ones by rank, then the others by bound."""
        searched = sorted(self.found, key=lambda i: (self.found[i].best.rank, i))
        others = sorted(set(self.problems) - set(searched), key=lambda i: (self.bounds[i], i))
        rows = []
        for i in (*searched, *others):
            wafer, bound_s = self.problems[i].wafer, self.bounds[i]
            status = "unseen" if i in self.late_ones else "bounded"
            mapping = self.found[i].best.to_row() if i in self.found else {}
            row = {"wafer": wafer.name, "columns": wafer.grid[0], "rows": wafer.grid[1]}
            row |= {"dies": wafer.all_dies, "status": "searched" if i in self.found else status}
            row |= {"bound_s": bound_s if bound_s < float("inf") else None}
            rows.append(row | {f"mapping.{name}": value for name, value in mapping.items()})
        return rows


def _memory_bytes(wafer: Wafer) -> float:
    """Bytes of all tiers of all dies."""
    return wafer.all_dies * sum(float(tier.capacity_bytes) for tier in wafer.tiers())


# ---- Pareto fronts in time, area, power, cost and expected throughput ----

OBJECTIVES = ("time_s", "area_mm2", "power_w", "cost_usd", "expected_per_s")
"""Objectives of a wafer and its mapping; all but the last are minimised."""

_FRONT_EFFORT = Effort(seeds=1, steps=1_000, promising=2)


@dataclass(frozen=True)
class WaferPoint:
    """One wafer with its best mapping and its objectives."""

    result: MappingResult
    time_s: float
    """Seconds of a step at the clock that the wafer's power limit allows."""
    area_mm2: float
    """Area in use, stacks and gaps included, of all wafers."""
    power_w: float
    """Mean power over a step."""
    cost_usd: float
    """Cost of the wafers in dollars, yield included; see `wafer_totals`."""
    expected_per_s: float
    """Sequences per second times the share of wafers that are good without spares."""

    def figures(self, objectives: Sequence[str] = OBJECTIVES) -> tuple[float, ...]:
        """Return the objectives, each such that smaller is better."""
        return tuple(_signed(name, getattr(self, name)) for name in objectives)

    def to_row(self) -> dict[str, Any]:
        """Return one row of a table."""
        wafer = self.result.problem.wafer
        row = {"wafer": wafer.name, "dies": wafer.all_dies, **picked(self, *OBJECTIVES)}
        return {**row, "bound_s": self.result.bound_s, **self.result.best.encoding.layout.to_dict()}


@dataclass(frozen=True)
class WaferFront(Table):
    """The non-dominated wafers of a space."""

    objectives: tuple[str, ...]
    points: tuple[WaferPoint, ...]
    """Non-dominated wafers, fastest first."""
    searched: int
    bounded: int
    """Number of wafers pruned because a point of the front dominates their bounds."""
    misfits: int
    """Number of wafers on which it is proven that no mapping fits."""
    unseen: int = 0
    """Number of wafers not visited because the search was stopped."""
    undecided: int = 0
    """Number of wafers searched with neither a mapping that fits nor a proof that none does."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "objectives": list(self.objectives),
            "points": [point.to_row() for point in self.points],
            "wafers": picked(self, "searched", "bounded", "misfits", "unseen", "undecided"),
        }

    def to_columns(self) -> dict[str, Any]:
        """Return the points as a table."""
        return joined_columns([point.to_row() for point in self.points])


def _signed(name: str, value: float) -> float:
    return -value if name == "expected_per_s" else value


def capped_s(problem: Problem, found: Evaluation, energy: StepEnergy | None = None) -> float:
    """Seconds of a step under the wafer's power limit.

    Clocks are lowered until the mean power of a step equals the limit; dynamic energy stays the
    same (no lower voltage is assumed), static energy grows with the time. Infinite if static power
    alone is above the limit.

    Examples
    --------
    >>> from phaze_fast.wafer import Layout, evaluate, megatron
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> scored = evaluate(problem, megatron(problem, Layout(4, 2, 4, 16), 4))
    >>> capped_s(problem, scored) == scored.time_s
    True
    >>> tight = Problem("bertlarge", problem.wafer.replace(power_cap_w=2500.0))
    >>> energy = step_energy(tight, scored)
    >>> slow_s = capped_s(tight, scored)
    >>> slow_s > scored.time_s
    True
    """
    wafer = problem.wafer
    if wafer.power_cap_w is None:
        return found.time_s
    energy = energy or step_energy(problem, found)
    spare_w = wafer.all_power_cap_w - _leakage_w(wafer)
    if spare_w <= 0:
        return float("inf")
    return max(found.time_s, (energy.total_j - energy.static_j) / spare_w)


def _leakage_w(wafer: Wafer) -> float:
    """Return the static power of all working dies of all wafers."""
    return energy_table().static_w_per_mm2 * wafer.die.outline_mm2 * wafer.all_dies


def _objectives(problem: Problem, time_s: float, dynamic_j: float = 0.0) -> dict[str, float]:
    """Return the objectives of a wafer from the seconds and the dynamic energy of a step.

    A lower bound of the time, without energy, gives bounds of all objectives.
    """
    wafer, totals = problem.wafer, wafer_totals(problem.wafer)
    return {
        "time_s": time_s,
        "area_mm2": wafer.wafer_count * wafer.area_mm2,
        "power_w": dynamic_j / time_s + _leakage_w(wafer),
        "cost_usd": wafer.wafer_count * totals.cost_usd,
        "expected_per_s": problem.training.global_batch / time_s * totals.assembly_yield,
    }


def wafer_point(result: MappingResult) -> WaferPoint:
    """Return the objectives of a wafer with its best mapping."""
    energy = step_energy(result.problem, result.best)
    time_s = capped_s(result.problem, result.best, energy)
    dynamic_j = energy.total_j - energy.static_j
    return WaferPoint(result, **_objectives(result.problem, time_s, dynamic_j))


def pareto_front(
    points: Sequence[WaferPoint], objectives: Sequence[str] = OBJECTIVES
) -> tuple[WaferPoint, ...]:
    """Return the non-dominated points, the fastest first.

    Raises
    ------
    InvalidInputError
        If an objective is not one of `OBJECTIVES`.
    """
    check_objectives(objectives)
    values = np.array([point.figures(objectives) for point in points]).reshape(-1, len(objectives))
    front = {tuple(row) for row in values[non_dominated(values)].tolist()}
    equal = [point for point in points if point.figures(objectives) in front]
    return tuple(sorted(equal, key=lambda point: (point.time_s, point.cost_usd)))


def check_objectives(objectives: Sequence[str], field: str = "objectives") -> None:
    """Raise an error if an objective is not one of `OBJECTIVES`, or none is given."""
    if not objectives:
        raise InvalidInputError(f"{field}: none given; expected some of {', '.join(OBJECTIVES)}")
    for name in objectives:
        check_one_of(field, name, OBJECTIVES)


def search_front(
    model: TransformerModel,
    space: WaferSpace,
    training: WaferTraining | None = None,
    effort: Effort | None = None,
    seed: int = 0,
    threads: int | None = None,
    objectives: Sequence[str] = OBJECTIVES,
    progress: Progress | None = None,
    so_far: Callable[[WaferFront], None] | None = None,
    session: Session | None = None,
) -> WaferFront:
    """Search for the non-dominated wafers of a space.

    Wafers are searched in the order of a quick bound. A wafer is pruned where a point dominates its
    bounds: the bound on its time, its area and cost, the static power of its dies.

    Parameters
    ----------
    model, space, training, seed, threads, progress, session
        As for `search_wafers`.
    effort
        Effort of the search on each wafer; by default a small one.
    objectives
        Some of `OBJECTIVES`; with fewer of them, more wafers are pruned.
    so_far
        Called with the front after each wave of wafers.

    Examples
    --------
    >>> from phaze_fast import models
    >>> few = WaferSpace(name="few", base="dram-wafer", axes={"columns": [1, 2, 4], "rows": [2]})
    >>> quick = Effort(seeds=1, steps=200, promising=1)
    >>> front = search_front(models.load("bertlarge"), few, WaferTraining(16), quick, threads=1)
    >>> [point.result.problem.wafer.grid for point in front.points]
    [(4, 2), (2, 2), (1, 2)]
    """
    check_objectives(objectives)
    training, effort = training or WaferTraining(), effort or _FRONT_EFFORT
    with session_of(session, threads) as opened:
        problems = [Problem(model, wafer, training) for wafer in space.wafers()[0]]
        queue = sorted((quickest_s(problem), i, problem) for i, problem in enumerate(problems))
        points: list[WaferPoint] = []
        front = WaferFront(tuple(objectives), (), 0, 0, 0, len(queue))
        for at in range(0, len(queue), _WAVE):
            if effort.stop is not None and effort.stop():
                break
            wave = [
                problem
                for bound_s, _, problem in queue[at : at + _WAVE]
                if not _dominated(_objectives(problem, bound_s), points, objectives)
            ]
            answers = opened.run([search_task(problem, effort, seed) for problem in wave])
            results = [read_result(*pair)[0] for pair in zip(wave, answers, strict=True)]
            fitting = [result for result in results if result is not None and result.best.fits]
            undecided = sum(result is not None and result.status == "unknown" for result in results)
            points += map(wafer_point, fitting)
            looked = min(_WAVE, len(queue) - at)
            front = WaferFront(
                tuple(objectives),
                pareto_front(points, objectives),
                front.searched + len(wave),
                front.bounded + looked - len(wave),
                front.misfits + len(wave) - len(fitting) - undecided,
                front.unseen - looked,
                front.undecided + undecided,
            )
            if progress is not None:
                best = front.points[0].time_s if front.points else float("inf")
                progress(at + looked, len(queue), best)
            if so_far is not None and wave:
                so_far(front)
        return front


def _dominated(best: dict[str, float], points: Sequence[WaferPoint], names: Sequence[str]) -> bool:
    """Whether a point is no worse than `best` in any objective and better in at least one."""
    mine = tuple(_signed(name, best[name]) for name in names)
    others = (point.figures(names) for point in points)
    return any(o != mine and all(map(le, o, mine)) for o in others)
