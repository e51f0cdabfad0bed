"""Our mapping of a model on a wafer against other systems' plans and our own ablations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.baselines import (
    BASELINES,
    Baseline,
    Candidate,
    baselines,
    best_candidate,
    is_linear,
    megatron_shapes,
)
from phaze_fast.wafer.evaluate import Evaluation, evaluation_of
from phaze_fast.wafer.layout import Layout, layouts
from phaze_fast.wafer.outcome import Effort, MappingResult
from phaze_fast.wafer.plans import megatron_op_mappings
from phaze_fast.wafer.problem import Problem
from phaze_fast.wafer.search import Progress, search_mapping

__all__ = ["ABLATIONS", "PUBLISHED", "PUBLISHED_MEMORY", "Comparison", "compare_mappings"]

Array = np.ndarray[Any, Any]

ABLATIONS = {
    "no_recompute": "every output is kept",
    "megatron_partitions": "products split only as Megatron-LM does, all else as ours",
    "volume_objective": "fewest bytes sent instead of least time, in our layouts",
    "no_placement": "dies numbered row by row and given out in that order",
    "no_architecture": "the wafer as given, not searched",
}
"""What each ablation takes away."""

PUBLISHED = {"accpar": 3.1, "zero3": 2.9, "megatron": 1.6}
"""TMAC's own speed-up over each system, as published (2024)."""

PUBLISHED_MEMORY = (3.6, 3.1)
"""Savings of memory that TMAC publishes as well; over which two is not known to us."""

_HALVINGS = 6
_LESS = 3  # an ablation has its start from our best, and less to search


@dataclass(frozen=True)
class Comparison:
    """Ours, the others, and what each idea is worth."""

    ours: MappingResult
    baselines: dict[str, Baseline]
    ablations: dict[str, Evaluation]
    memory_at_equal_speed: dict[str, Evaluation]
    """By baseline: our mapping that needs least memory and takes no longer than its best plan."""

    @property
    def best_baseline(self) -> tuple[str, Evaluation] | None:
        """Name and plan of the fastest tuned baseline that fits; None where none does."""
        fitting = [(b.best.time_s, n) for n, b in self.baselines.items() if b.best.fits]
        if not fitting:
            return None
        name = min(fitting)[1]
        return name, self.baselines[name].best

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        ours = self.ours
        return {
            "model": ours.problem.model.name,
            "wafer": ours.problem.wafer.name,
            "ours": ours.best.to_dict(),
            "baselines": {name: each.to_dict() for name, each in self.baselines.items()},
            "ablations": {name: each.to_dict() for name, each in self.ablations.items()},
            "lean": {
                name: {"time_s": e.time_s, "memory_bytes_per_die": e.memory_bytes}
                for name, e in self.memory_at_equal_speed.items()
            },
            **ours.proof(),
            "evaluations": ours.evaluations,
            "evaluations_per_s": ours.evaluations_per_s,
            "seconds": ours.seconds,
            "seed": ours.seed,
            "layouts": {"all": ours.layouts, "pruned": ours.pruned, "unseen": ours.unseen},
            "published": {"speedup": PUBLISHED, "memory": list(PUBLISHED_MEMORY)},
        }


def _start(problem: Problem, found: Evaluation) -> tuple[Layout, Array]:
    return found.encoding.layout, found.encoding.arrays(problem)[0]


def _megatron_partitions(problem: Problem) -> Evaluation:
    """Megatron-LM's splits in any tiling, weights and outputs as ours."""

    def candidates(layout: Layout) -> Iterator[Candidate]:
        for t, axis_assignment in megatron_shapes(problem, layout, linear=False):
            for shared in (False, True) if t > 1 else (False,):
                for weights in problem.modes:
                    yield megatron_op_mappings(problem, axis_assignment, shared, weights), None

    every = layouts(problem.wafer, problem.work.blocks, problem.training.global_batch)
    found = best_candidate(problem, every, candidates)
    if found is None:
        raise InvalidInputError(
            f"wafer: no Megatron-LM plan of {problem.model.name} suits {problem.wafer.name}"
        )
    return found


def _volume_objective(
    problem: Problem, ours: MappingResult, effort: Effort, seed: int
) -> Evaluation:
    """Fewest bytes in each of our promising layouts; of those the fewest, scored by time."""
    counting = problem.variant(volume=True)
    best: tuple[float, Evaluation] | None = None
    for found in (ours.best, *ours.runners_up):
        layout, op_mappings = _start(problem, found)
        mapping = counting.mapping(layout)
        mapping.assign(op_mappings)
        mapping.anneal(seed, effort.steps, 0.05)
        op_mappings, score, _ = mapping.descend(2)
        timed = problem.mapping(layout)
        timed.assign(op_mappings)
        scored = evaluation_of(problem, layout, timed)
        volume = float(score["time_s"][0])
        if best is None or (scored.fits, -volume) > (best[1].fits, -best[0]):
            best = (volume, scored)
    assert best is not None
    return best[1]


def _memory_at_equal_speed(
    problem: Problem, ours: MappingResult, other: Evaluation, effort: Effort, seed: int
) -> Evaluation:
    """Halve the room for memory until our mapping takes longer than another's plan."""
    found = min(
        (other, ours.best), key=lambda e: e.memory_bytes if e.time_s <= other.time_s else 1e99
    )
    starts = [_start(problem, each) for each in (other, ours.best, *ours.runners_up[:2])]
    low, high = 0.0, min(found.memory_bytes, other.memory_bytes)
    for _ in range(_HALVINGS):
        room = 0.5 * (low + high)
        tight = problem.variant(capacity_bytes=room)
        fitting = []
        for layout, op_mappings in starts:
            mapping = tight.mapping(layout)
            mapping.assign(op_mappings)
            mapping.anneal(seed, effort.steps // 2, 0.03)
            mapping.descend(1)
            tried = evaluation_of(tight, layout, mapping)
            if tried.fits and tried.time_s <= other.time_s:
                fitting.append(tried)
        if fitting:
            found = min(fitting, key=lambda e: e.memory_bytes)
            high = min(room, found.memory_bytes)
        else:
            low = room
    return found


def _ablations(
    problem: Problem,
    ours: MappingResult,
    effort: Effort,
    seed: int,
    threads: int | None,
    report: Callable[[str], None],
) -> Iterator[tuple[str, Evaluation]]:
    less = Effort(
        seeds=max(1, effort.seeds // 2),
        steps=effort.steps,
        promising=_LESS,
        budget_s=effort.budget_s,
    )
    starts = [_start(problem, found) for found in (ours.best, *ours.runners_up)]
    report("no_recompute")
    kept = search_mapping(problem.variant(recompute=False), less, seed, threads, starts)
    yield "no_recompute", kept.best
    report("megatron_partitions")
    yield "megatron_partitions", _megatron_partitions(problem)
    report("volume_objective")
    yield "volume_objective", _volume_objective(problem, ours, effort, seed)
    report("no_placement")
    straight = problem.variant(linear=True)
    rows = [
        layout
        for layout in layouts(problem.wafer, problem.work.blocks, problem.training.global_batch)
        if is_linear(problem, layout)
    ]
    yield "no_placement", search_mapping(straight, less, seed, threads, wanted=rows).best
    yield "no_architecture", ours.best


def compare_mappings(
    problem: Problem,
    effort: Effort | None = None,
    seed: int = 0,
    threads: int | None = None,
    names: Sequence[str] = BASELINES,
    ablations: bool = True,
    known: Sequence[Evaluation] = (),
    progress: Progress | None = None,
    report: Callable[[str], None] | None = None,
) -> Comparison:
    """Search a mapping and score other systems' plans and our own ablations as baselines.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    effort, seed, threads, progress
        As for `search_mapping`.
    names
        Which of `BASELINES`.
    ablations
        Whether to take each idea away in turn.
    known
        Mappings of ours to start from.
    report
        Called with the name of each part before it starts.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.hardware import presets
    >>> problem = Problem(models.load("bertlarge"), presets.wafer("dojo-tile-like"))
    >>> quick = Effort(seeds=1, steps=200, promising=1, budget_s=1.0)
    >>> found = compare_mappings(problem, quick, names=["megatron"], ablations=False)
    >>> found.ours.best.time_s <= found.baselines["megatron"].best.time_s
    True
    """
    effort = effort or Effort()
    say = report or _quiet
    others = baselines(problem, names, say)
    starts = [
        _start(problem, found)
        for each in others.values()
        for found in (each.tuned, each.tiled)
        if found.encoding.layout.microbatch <= problem.training.global_batch
    ]
    starts += [_start(problem, found) for found in known]
    say("ours")
    ours = search_mapping(problem, effort, seed, threads, starts, progress)
    taken = dict(_ablations(problem, ours, effort, seed, threads, say)) if ablations else {}
    # An ablation searches a part of our space: what it finds there counts for us as well.
    fitting = [found for found in taken.values() if found.fits]
    better = min(fitting, key=lambda found: found.time_s, default=ours.best)
    if better.fits and (not ours.best.fits or better.time_s < ours.best.time_s):
        again = search_mapping(
            problem,
            effort,
            seed + 1,
            threads,
            [_start(problem, better)],
            wanted=[better.encoding.layout],
        )
        ours = _merged(ours, again)
        taken["no_architecture"] = ours.best
    say("memory at equal speed")
    equal_speed = {
        name: _memory_at_equal_speed(problem, ours, each.best, effort, seed)
        for name, each in others.items()
        if each.best.fits and ours.best.fits
    }
    return Comparison(ours, others, taken, equal_speed)


def _quiet(name: str) -> None:
    del name


def _merged(first: MappingResult, second: MappingResult) -> MappingResult:
    """Keep the first search's bound and counts, and the better of the two mappings."""
    best = min((first.best, second.best), key=lambda found: found.rank)
    return replace(
        first,
        best=best,
        bound_s=min(first.bound_s, best.time_s),
        evaluations=first.evaluations + second.evaluations,
        seconds=first.seconds + second.seconds,
    )
