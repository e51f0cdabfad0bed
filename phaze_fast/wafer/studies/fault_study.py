"""Throughput of a model over many fault maps of one wafer: expected, worst, and with spare dies.

A mapping found for one map is evaluated on the next if its layout fits; new layouts are
searched only below the best of those times. The results are feasible mappings without a lower
bound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.tables import Array, Table
from phaze_fast.wafer.hardware.wafer import FaultMap, Wafer, sample_faults
from phaze_fast.wafer.mapping.evaluate import Evaluation, score_op_mappings
from phaze_fast.wafer.mapping.layout import Layout, stages_on
from phaze_fast.wafer.mapping.packing import stage_capacity
from phaze_fast.wafer.mapping.problem import Problem
from phaze_fast.wafer.search.result import Effort
from phaze_fast.wafer.search.search import MappingSearch
from phaze_fast.wafer.search.session import Data, Progress, Session, Task, session_of

_SCORED = 4  # known layouts evaluated on each map
_GAIN = 0.995  # fraction of the best known time that a new layout must beat
_QUICK = Effort(seeds=1, steps=300, promising=1)


@dataclass(frozen=True)
class FaultStudy(Table):
    """Throughput of a wafer under each of several fault maps."""

    problem: Problem
    maps: tuple[FaultMap, ...]
    times_s: tuple[float, ...]
    """Seconds of a step under each map; infinite if no mapping fits."""
    whole_s: float
    """Seconds of a step without any fault map."""
    seconds: float

    @property
    def rates(self) -> list[float]:
        """Sequences per second under each map; 0 if no mapping fits."""
        return [self.problem.training.global_batch / time_s for time_s in self.times_s]

    @property
    def expected_per_s(self) -> float:
        """Mean of the rates."""
        return sum(self.rates) / len(self.rates)

    def by_spares(self) -> list[dict[str, Any]]:
        """Per number of spares: share of maps with no more dead dies, their mean and least rate."""
        rates, dead = self.rates, [len(fault_map.dead_dies) for fault_map in self.maps]
        rows = []
        for spares in range(min(dead), max(dead) + 1):
            good = [rate for rate, count in zip(rates, dead, strict=True) if count <= spares]
            row = {"spares": spares, "share": len(good) / len(dead)}
            rows.append({**row, "mean_per_s": sum(good) / len(good), "least_per_s": min(good)})
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; rates are sequences per second."""
        whole = self.problem.training.global_batch / self.whole_s
        return {
            "maps": len(self.maps),
            "distinct": len(set(self.maps)),
            "whole_per_s": whole,
            "expected_per_s": self.expected_per_s,
            "worst_per_s": min(self.rates),
            "expected_share": self.expected_per_s / whole if whole else None,
            "without_mapping": sum(rate == 0.0 for rate in self.rates),
            "by_spares": self.by_spares(),
            "seconds": self.seconds,
        }

    def to_columns(self) -> dict[str, Any]:
        """Return the maps as a table: dead dies and links, and rates."""
        return {
            "dead_dies": [len(fault_map.dead_dies) for fault_map in self.maps],
            "dead_links": [len(fault_map.dead_links) for fault_map in self.maps],
            "per_s": self.rates,
        }


class _Known:
    """Mappings found so far by layout; for other layouts, a time below which none was found."""

    def __init__(self, effort: Effort, seed: int, threads: int | None) -> None:
        self.effort, self.seed, self.threads = effort, seed, threads
        self.mappings: dict[Layout, tuple[float, Array]] = {}
        self.lost: dict[Layout, float] = {}

    def _placed(self, wafer: Wafer) -> list[tuple[float, Layout]]:
        """List the known layouts that fit on a wafer, with their times; fastest first."""
        return [
            (time_s, layout)
            for layout, (time_s, _) in sorted(self.mappings.items(), key=lambda e: e[1][0])
            if stage_capacity(wafer, layout.width, layout.height) >= stages_on(wafer, layout)
        ]

    def best(self, problem: Problem) -> float:
        """Time of the best mapping on a wafer, known or newly found; infinite if none fits."""
        best_s = float("inf")
        for _, layout in sorted(self._placed(problem.wafer))[:_SCORED]:
            scored = score_op_mappings(problem, layout, self.mappings[layout][1])
            best_s = min(best_s, scored.time_s if scored.fits else best_s)
        below = best_s * _GAIN
        wanted = [
            candidate
            for candidate in problem.layouts()
            if candidate not in self.mappings and self.lost.get(candidate, -1.0) < below
        ]
        if not wanted:
            return best_s
        settings = (self.effort, self.seed, self.threads)
        result = MappingSearch(problem, *settings, wanted=wanted, below_s=below).run()
        if result is not None:
            for evaluation in (result.best, *result.runners_up):
                self.add(problem, evaluation)
            best_s = min(best_s, result.best.time_s if result.best.fits else best_s)
        for layout in wanted:
            if layout not in self.mappings:
                self.lost[layout] = max(self.lost.get(layout, 0.0), min(below, best_s))
        return best_s

    def add(self, problem: Problem, found: Evaluation) -> None:
        """Store a mapping that fits."""
        if found.fits:
            layout = found.encoding.layout
            self.mappings[layout] = (found.time_s, found.encoding.arrays(problem)[0])


def fault_times(task: Task, threads: int, progress: Progress | None) -> Data:
    """Search every distinct map, the whole wafer first."""
    problem, given = task.problem, task.given
    known = _Known(Effort(**given["effort"]), given["seed"], threads)
    times: list[float | None] = []
    done: dict[str, float] = {}
    for k, plain in enumerate(({"dead_dies": [], "dead_links": []}, *given["maps"])):
        wafer = FaultMap.from_dict(plain).on(problem.wafer)
        key = wafer.digest()
        if key not in done:
            done[key] = known.best(problem.on(wafer))
        times.append(done[key] if done[key] < float("inf") else None)
        if progress is not None:
            progress(k, len(given["maps"]), done[key])
    return {"times_s": times}


def fault_study(
    problem: Problem,
    maps: Sequence[FaultMap] | int = 200,
    die_fault: float | None = None,
    link_fault: float = 0.0,
    effort: Effort | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
    session: Session | None = None,
) -> FaultStudy:
    """Find the throughput of a model on one wafer under many fault maps.

    Parameters
    ----------
    problem
        The model, the wafer and the step; faults of the wafer itself are in every map.
    maps
        Fault maps, or the number of maps to draw.
    die_fault, link_fault
        As for `sample_faults`, if maps are drawn.
    effort
        Effort of the search in new layouts; by default a small one.
    seed, threads
        As for `search_mapping`; the seed is also that of the maps.
    progress
        Called with maps done, total maps, and the time under the last one.
    session
        An open session to run in, which then determines the threads.

    Examples
    --------
    >>> from phaze_fast.wafer import WaferTraining, load_wafer
    >>> wafer = load_wafer("dram-wafer").replace(columns=2, rows=2)
    >>> study = fault_study(Problem("bertlarge", wafer, WaferTraining(16)), 8, die_fault=0.2)
    >>> study.to_dict()["worst_per_s"] <= study.expected_per_s <= 16 / study.whole_s * 1.01
    True
    """
    began = time.perf_counter()
    if isinstance(maps, int):
        maps = sample_faults(problem.wafer, maps, seed, die_fault, link_fault)
    if not maps:
        raise InvalidInputError("maps: none are given; expected at least one")
    task_data = {
        "maps": [fault_map.to_plain() for fault_map in maps],
        "effort": asdict(replace(effort or _QUICK, budget_s=None, stop=None)),
        "seed": seed,
    }
    with session_of(session, threads=threads) as opened:
        data = opened.run([Task(fault_times, problem, task_data)], progress)[0]
    whole, *times = (float("inf") if t is None else float(t) for t in data["times_s"])
    seconds = time.perf_counter() - began
    return FaultStudy(problem, tuple(maps), tuple(times), whole, seconds)
