"""Pareto fronts of wafers in time, area, power, cost and expected throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.hardware import energy_table
from phaze_fast.models import TransformerModel
from phaze_fast.tables import Table, joined_columns, non_dominated
from phaze_fast.wafer.hardware import Wafer, WaferSpace
from phaze_fast.wafer.hardware.totals import wafer_totals
from phaze_fast.wafer.mapping.details import StepEnergy, step_energy
from phaze_fast.wafer.mapping.evaluate import Evaluation
from phaze_fast.wafer.mapping.problem import Problem, WaferTraining
from phaze_fast.wafer.search.bounds import quickest_s
from phaze_fast.wafer.search.result import Effort, MappingResult
from phaze_fast.wafer.search.search import read_result, search_task
from phaze_fast.wafer.search.session import Progress, Session, session_of

OBJECTIVES = ("time_s", "area_mm2", "power_w", "cost_usd", "expected_per_s")
"""Objectives of a wafer and its mapping; all but the last are minimised."""

_WAVE = 4  # wafers between two updates of the front
_BRIEF = Effort(seeds=1, steps=1_000, promising=2)


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
        row = {"wafer": wafer.name, "dies": wafer.wafer_count * wafer.dies}
        row |= {name: getattr(self, name) for name in OBJECTIVES}
        return {**row, "bound_s": self.result.bound_s, **self.result.best.encoding.layouts_dict()}


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
    """Number of wafers on which the model does not fit."""
    unseen: int = 0
    """Number of wafers not visited because the search was stopped."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "objectives": list(self.objectives),
            "points": [point.to_row() for point in self.points],
            "wafers": {
                "searched": self.searched,
                "bounded": self.bounded,
                "misfits": self.misfits,
                "unseen": self.unseen,
            },
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
    spare_w = wafer.wafer_count * wafer.power_cap_w - _leakage_w(wafer)
    if spare_w <= 0:
        return float("inf")
    return max(found.time_s, (energy.total_j - energy.static_j) / spare_w)


def _leakage_w(wafer: Wafer) -> float:
    dies = wafer.dies * wafer.wafer_count
    return energy_table().static_w_per_mm2 * wafer.die.outline_mm2 * dies


def _point(result: MappingResult) -> WaferPoint:
    problem, evaluation = result.problem, result.best
    wafer, energy = problem.wafer, step_energy(problem, evaluation)
    time_s = capped_s(problem, evaluation, energy)
    totals = wafer_totals(wafer)
    moving_j = energy.total_j - energy.static_j
    return WaferPoint(
        result=result,
        time_s=time_s,
        area_mm2=wafer.wafer_count * wafer.area_mm2,
        power_w=moving_j / time_s + _leakage_w(wafer),
        cost_usd=wafer.wafer_count * totals.cost_usd,
        expected_per_s=problem.training.global_batch / time_s * totals.assembly_yield,
    )


def _at_best(problem: Problem, bound_s: float) -> dict[str, float]:
    """Bounds on the objectives of a wafer."""
    wafer, totals = problem.wafer, wafer_totals(problem.wafer)
    return {
        "time_s": bound_s,
        "area_mm2": wafer.wafer_count * wafer.area_mm2,
        "power_w": _leakage_w(wafer),
        "cost_usd": wafer.wafer_count * totals.cost_usd,
        "expected_per_s": problem.training.global_batch / bound_s * totals.assembly_yield,
    }


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether one point is no worse in any objective and better in at least one."""
    pairs = list(zip(one, other, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def pareto_front(
    points: Sequence[WaferPoint], objectives: Sequence[str] = OBJECTIVES
) -> tuple[WaferPoint, ...]:
    """Return the non-dominated points, the fastest first.

    Raises
    ------
    InvalidInputError
        If an objective is not one of `OBJECTIVES`.
    """
    _check(objectives)
    values = np.array([point.figures(objectives) for point in points]).reshape(-1, len(objectives))
    front = {tuple(row) for row in values[non_dominated(values)].tolist()}
    equal = [point for point in points if point.figures(objectives) in front]
    return tuple(sorted(equal, key=lambda point: (point.time_s, point.cost_usd)))


def _check(objectives: Sequence[str]) -> None:
    if not objectives:
        raise InvalidInputError(f"objectives: none given; expected some of {', '.join(OBJECTIVES)}")
    for name in objectives:
        if name not in OBJECTIVES:
            raise InvalidInputError(
                f"objectives: {name!r} is not accepted; {nearest(str(name), list(OBJECTIVES))}"
            )


def search_front(
    model: TransformerModel,
    space: WaferSpace,
    training: WaferTraining | None = None,
    effort: Effort | None = None,
    seed: int = 0,
    threads: int | None = None,
    objectives: Sequence[str] = OBJECTIVES,
    executor: Executor | str | None = None,
    resume: Path | str | None = None,
    cache: Path | str | None = None,
    progress: Progress | None = None,
    so_far: Callable[[WaferFront], None] | None = None,
    session: Session | None = None,
) -> WaferFront:
    """Search for the non-dominated wafers of a space.

    Wafers are searched in the order of a quick bound. A wafer is pruned where a point dominates its
    bounds: the bound on its time, its area and cost, the static power of its dies.

    Parameters
    ----------
    model, space, training, seed, threads, executor, resume, cache, progress, session
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
    _check(objectives)
    training, effort = training or WaferTraining(), effort or _BRIEF
    with session_of(session, executor, threads, resume, cache) as opened:
        queue = sorted(
            ((quickest_s(problem), i, problem))
            for i, problem in enumerate(
                Problem(model, wafer, training) for wafer in space.wafers()[0]
            )
        )
        points: list[WaferPoint] = []
        front = WaferFront(tuple(objectives), (), 0, 0, 0, len(queue))
        for at in range(0, len(queue), _WAVE):
            if effort.stop is not None and effort.stop():
                break
            wave = [
                problem
                for bound_s, _, problem in queue[at : at + _WAVE]
                if not _dominated(_at_best(problem, bound_s), points, objectives)
            ]
            answers = opened.run([search_task(problem, effort, seed) for problem in wave])
            results = [read_result(*pair)[0] for pair in zip(wave, answers, strict=True)]
            fitting = [result for result in results if result is not None and result.best.fits]
            points += map(_point, fitting)
            looked = min(_WAVE, len(queue) - at)
            front = WaferFront(
                tuple(objectives),
                pareto_front(points, objectives),
                front.searched + len(wave),
                front.bounded + looked - len(wave),
                front.misfits + len(wave) - len(fitting),
                front.unseen - looked,
            )
            if progress is not None:
                best = front.points[0].time_s if front.points else float("inf")
                progress(at + looked, len(queue), best)
            if so_far is not None and wave:
                so_far(front)
        return front


def _dominated(best: dict[str, float], points: Sequence[WaferPoint], names: Sequence[str]) -> bool:
    mine = [_signed(name, best[name]) for name in names]
    return any(_dominates(point.figures(names), mine) for point in points)
