"""The mapping found on a wafer, compared with other systems' plans and with ablations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.tables import Array, Table, joined_columns
from phaze_fast.wafer.mapping.evaluate import Evaluation, evaluation_of
from phaze_fast.wafer.mapping.layout import Layout
from phaze_fast.wafer.mapping.problem import Problem
from phaze_fast.wafer.search.baselines import (
    VARIANTS,
    Baseline,
    System,
    Tuner,
    baselines,
    baselines_on,
    candidates_of,
)
from phaze_fast.wafer.search.result import Effort, MappingResult
from phaze_fast.wafer.search.search import result_of, search_task
from phaze_fast.wafer.search.session import Data, Progress, Session, Task, session_of

ABLATIONS = {
    "no_recompute": "every output is kept",
    "megatron_partitions": "products split only as Megatron-LM does, all else as ours",
    "volume_objective": "fewest bytes sent instead of least time, in our layouts",
    "no_placement": "dies numbered row by row and given out in that order",
    "no_architecture": "the wafer as given, not searched",
}
"""Description of each ablation."""

PUBLISHED = {"accpar": 3.1, "zero3": 2.9, "megatron": 1.6}
"""TMAC's own speed-up over each system, as published in 2024."""

PUBLISHED_MEMORY = {"accpar": 3.6, "zero3": 3.1}
"""TMAC's own savings of memory over AccPar and DeepSpeed, as published in 2024."""

_HALVINGS = 6
_LESS = 3  # promising layouts of an ablation, which starts from our best mapping


@dataclass(frozen=True)
class Comparison(Table):
    """Our mapping, the baselines and the ablations."""

    ours: MappingResult
    baselines: dict[str, Baseline]
    ablations: dict[str, Evaluation]
    memory_at_equal_speed: dict[str, Evaluation]
    """Per baseline, the mapping of least memory found that is no slower than its best plan."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            **self.ours.to_dict(),
            "baselines": {name: baseline.to_dict() for name, baseline in self.baselines.items()},
            "ablations": {name: best.to_dict() for name, best in self.ablations.items()},
            "memory_at_equal_speed": {
                name: {"time_s": e.time_s, "memory_bytes_per_die": e.memory_bytes}
                for name, e in self.memory_at_equal_speed.items()
            },
            "published": {"speedup": PUBLISHED, "memory": PUBLISHED_MEMORY},
        }

    def to_columns(self) -> dict[str, Any]:
        """Return ours, every plan of the baselines and every ablation as a table."""
        plans = [("ours", "", self.ours.best)]
        for name, baseline in self.baselines.items():
            plans += [(name, variant, getattr(baseline, variant)) for variant in VARIANTS]
        plans += [("ours", name, best) for name, best in self.ablations.items()]
        return joined_columns([{"plan": n, "variant": v, **e.to_row()} for n, v, e in plans])


# ---- tasks ----


def baseline_data(task: Task, *_means: object) -> Data:
    """Tune one system's plans."""
    name = task.given["name"]
    baseline = baselines(task.problem, [name])[name]
    return {"plans": baseline.to_dict(), "evaluations": baseline.evaluations}


def megatron_partitions_data(task: Task, *_means: object) -> Data:
    """Evaluate Megatron-LM's splits in any tiling, with our weight modes and outputs."""
    problem = task.problem
    candidates = candidates_of(problem, System("pairs", problem.modes, outputs=()))
    evaluation = Tuner(problem).best(problem.layouts(), candidates)
    if evaluation is None:
        raise InvalidInputError(
            f"wafer: no Megatron-LM plan of {problem.model.name} suits {problem.wafer.name}"
        )
    return evaluation.to_dict()


def volume_objective_data(task: Task, *_means: object) -> Data:
    """Minimise bytes sent in each promising layout; evaluate the time of the best mapping."""
    problem, given = task.problem, task.given
    counting = problem.variant(volume=True)
    best: tuple[float, Evaluation] | None = None
    for layout, op_mappings in _given_starts(problem, given):
        mapping = counting.mapping(layout)
        mapping.assign(op_mappings)
        mapping.anneal(given["seed"], given["steps"], 0.05)
        op_mappings, score, _ = mapping.descend(2)
        timed = problem.mapping(layout)
        timed.assign(op_mappings)
        scored = evaluation_of(problem, layout, timed)
        volume = float(score["time_s"][0])
        if best is None or (scored.fits, -volume) > (best[1].fits, -best[0]):
            best = (volume, scored)
    assert best is not None
    return best[1].to_dict()


def memory_at_equal_speed_data(task: Task, *_means: object) -> Data:
    """Bisect for the least memory limit at which our mapping is no slower than a baseline."""
    problem, given = task.problem, task.given
    other, ours = (Evaluation.from_dict(given["known"][k]) for k in (0, 1))
    fast = [known for known in (other, ours) if known.time_s <= other.time_s]
    smallest = min(fast, key=lambda known: known.memory_bytes)
    low, high = 0.0, min(smallest.memory_bytes, other.memory_bytes)
    for _ in range(_HALVINGS):
        limit_bytes = 0.5 * (low + high)
        tight = problem.variant(capacity_bytes=limit_bytes)
        fitting = []
        for layout, op_mappings in _given_starts(problem, given):
            mapping = tight.mapping(layout)
            mapping.assign(op_mappings)
            mapping.anneal(given["seed"], given["steps"] // 2, 0.03)
            mapping.descend(1)
            tried = evaluation_of(tight, layout, mapping)
            if tried.fits and tried.time_s <= other.time_s:
                fitting.append(tried)
        if fitting:
            smallest = min(fitting, key=lambda e: e.memory_bytes)
            high = min(limit_bytes, smallest.memory_bytes)
        else:
            low = limit_bytes
    return smallest.to_dict()


def _given_starts(problem: Problem, given: Data) -> list[tuple[Layout, Array]]:
    known = (Evaluation.from_dict(data).encoding for data in given["known"])
    return [(encoding.layout, encoding.arrays(problem)[0]) for encoding in known]


def _improve(known: Sequence[Evaluation], effort: Effort, seed: int) -> Data:
    """Input of the tasks that improve known mappings."""
    return {"known": [best.to_dict() for best in known], "seed": seed, "steps": effort.steps}


def _ablation_tasks(
    problem: Problem, ours: MappingResult, effort: Effort, seed: int
) -> dict[str, Task]:
    less = replace(effort, seeds=max(1, effort.seeds // 2), promising=_LESS)
    known = (ours.best, *ours.runners_up)
    straight = problem.variant(linear=True)
    improved = _improve(known, effort, seed)
    return {
        "no_recompute": search_task(problem.variant(recompute=False), less, seed, known),
        "megatron_partitions": Task(megatron_partitions_data, problem, {}),
        "volume_objective": Task(volume_objective_data, problem, improved),
        "no_placement": search_task(straight, less, seed, wanted="linear"),
    }


def _searched(session: Session, task: Task, progress: Progress | None = None) -> MappingResult:
    """Run one search and read its result."""
    return result_of(task.problem, session.run([task], progress)[0])


def _ablations(
    session: Session, problem: Problem, ours: MappingResult, effort: Effort, seed: int
) -> dict[str, Evaluation]:
    tasks = _ablation_tasks(problem, ours, effort, seed)
    evaluations = {}
    for (name, task), data in zip(tasks.items(), session.run([*tasks.values()]), strict=True):
        is_search = "bound_s" in data
        best = result_of(task.problem, data).best if is_search else Evaluation.from_dict(data)
        evaluations[name] = best
    return {**evaluations, "no_architecture": ours.best}


# ---- the comparison ----


def compare_mappings(
    problem: Problem,
    effort: Effort | None = None,
    seed: int = 0,
    threads: int | None = None,
    names: Sequence[str] | None = None,
    ablations: bool = True,
    known: Sequence[Evaluation] = (),
    progress: Progress | None = None,
    report: Callable[[str], None] | None = None,
    equal_speed_memory: bool = True,
    session: Session | None = None,
) -> Comparison:
    """Search for a mapping, and evaluate other systems' plans and ablations of the search.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    effort, seed, threads, progress
        As for `search_mapping`.
    names
        Some of `BASELINES`; by default those that are applicable to the wafer.
    ablations
        Whether to run the ablations, see `ABLATIONS`.
    known
        Known mappings to start our search from.
    report
        Called with the name of each part before it starts.
    equal_speed_memory
        Whether to search for the least memory of our mapping at the speed of each system.
    session
        An open session to run in, with an executor, a journal or a store of results.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dojo-tile-like")
    >>> quick = Effort(seeds=1, steps=200, promising=1, budget_s=1.0)
    >>> comparison = compare_mappings(problem, quick, names=["megatron"], ablations=False)
    >>> comparison.ours.best.time_s <= comparison.baselines["megatron"].best.time_s
    True
    >>> comparison.to_columns()["variant"]
    ['', 'default', 'tuned', 'tiled']
    """
    effort = effort or Effort()
    names = baselines_on(problem) if names is None else names
    say = report or (lambda _: None)
    with session_of(session, threads) as opened:
        say("baselines")
        tuned = opened.run([Task(baseline_data, problem, {"name": name}) for name in names])
        others = {
            name: Baseline.from_dict(name, data["plans"], data["evaluations"])
            for name, data in zip(names, tuned, strict=True)
        }
        starts = [best for other in others.values() for best in (other.tuned, other.tiled)]
        say("ours")
        ours = _searched(opened, search_task(problem, effort, seed, [*starts, *known]), progress)
        if ablations:
            say("ablations")
        taken = _ablations(opened, problem, ours, effort, seed) if ablations else {}
        # An ablation searches a subset of our space: its mappings are candidates of ours too.
        fitting = [evaluation for evaluation in taken.values() if evaluation.fits]
        better = min(fitting, key=lambda evaluation: evaluation.time_s, default=ours.best)
        if better.fits and (not ours.best.fits or better.time_s < ours.best.time_s):
            task = search_task(problem, effort, seed + 1, [better], wanted=better.encoding.layout)
            ours = _merged(ours, _searched(opened, task))
            taken["no_architecture"] = ours.best
        say("memory at equal speed")
        fits = equal_speed_memory and ours.best.fits
        rivals = {n: baseline.best for n, baseline in others.items() if fits and baseline.best.fits}
        mine = (ours.best, *ours.runners_up[:2])
        inputs = [_improve((other, *mine), effort, seed) for other in rivals.values()]
        tasks = [Task(memory_at_equal_speed_data, problem, data) for data in inputs]
        least = [Evaluation.from_dict(data) for data in opened.run(tasks)]
        return Comparison(ours, others, taken, dict(zip(rivals, least, strict=True)))


def _merged(first: MappingResult, second: MappingResult) -> MappingResult:
    """Keep the first search's bound and counts, and the better of the two mappings."""
    best = min((first.best, second.best), key=lambda evaluation: evaluation.rank)
    return replace(
        first,
        best=best,
        bound_s=min(first.bound_s, best.time_s),
        evaluations=first.evaluations + second.evaluations,
        seconds=first.seconds + second.seconds,
    )
