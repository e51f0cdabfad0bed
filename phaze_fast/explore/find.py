"""One search from start to end: options checked, caches and journals opened, the outcome stored."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.best_first import BestFirstSearch
from phaze_fast.explore.candidates import PlanCache
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.objectives import checked_objective, checked_objectives
from phaze_fast.explore.problem import SearchProblem, problems_of
from phaze_fast.explore.result import Budget, Outcome, Progress
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training
from phaze_fast.runs.executors import Workers
from phaze_fast.runs.journal import Journal, manifest
from phaze_fast.runs.store import STORE, ResultStore


def paper_setup() -> tuple[Cluster, Training]:
    """Return the cluster and the training step of the PHAZE paper, the defaults of a search.

    Examples
    --------
    >>> cluster, training = paper_setup()
    >>> cluster.devices, training.global_batch
    (1024, 4096)
    """
    cluster = Cluster(devices=1024, fabric="tpuv4-pod")
    return cluster, Training(global_batch=4096, tp=(1, 2, 4, 8))


def search_digest(
    problems: Sequence[SearchProblem],
    space: ArchitectureSpace,
    weights: Sequence[float],
    top: int,
    objectives: Sequence[str],
    objective: str = "time",
) -> str:
    """Hash all inputs that the outcome depends on."""
    digests = [problem.digest for problem in problems]
    inputs = [digests, space.digest, list(weights), top, list(objectives)]
    return digest(inputs if objective == "time" else [*inputs, objective])


def checked_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Scale weights to at most 1; raise InvalidInputError unless each model has a positive one."""
    if weights is None:
        return (1.0,) * count
    if len(weights) != count:
        raise InvalidInputError(
            f"weights: {len(weights)} are not accepted; expected one for each of {count} models"
        )
    for weight in weights:
        if not (isinstance(weight, int | float) and math.isfinite(weight) and weight > 0):
            raise InvalidInputError(f"weights: {weight!r} is not accepted; expected a number > 0")
    return tuple(float(w) / max(weights) for w in weights)  # their sum stays a number


def _stored(store: ResultStore, key: bytes) -> Outcome | None:
    """Look an outcome up; a damaged one counts as missing."""
    value = store.get_many([key]).get(key)
    try:
        return None if value is None else Outcome.from_dict(json.loads(value))
    except (KeyError, TypeError, ValueError):
        return None


def _journal(folder: Path | str, name: str) -> Journal:
    """Open the journal of plans that an interrupted search resumes from."""
    return Journal(folder, manifest([], f"search {name}"), option="resume", run="search")


def _checked_options(
    models: Sequence[Model],
    top: int,
    pareto: Sequence[str],
    weights: Sequence[float] | None,
    objective: str,
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Check the options; return the objectives of the front and the weights of the models."""
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise InvalidInputError(f"top: {top!r} is not accepted; expected a whole number, 1 or more")
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"model: {', '.join(names)} has a name twice; expected each once")
    objectives = checked_objectives(pareto)
    if checked_objective(objective) != "time" and objectives:
        raise InvalidInputError(
            f"objective: {objective} is not accepted with pareto; expected time, which fronts have"
        )
    shares = checked_weights(weights, len(models))
    if len(models) > 1 and "energy" in objectives:
        raise InvalidInputError(
            "pareto: energy is not accepted for several models; expected time, area, hbm or cost"
        )
    return objectives, shares


def find_chips(
    models: Sequence[Model],
    space: ArchitectureSpace,
    cluster: Cluster,
    training: Training,
    *,
    weights: Sequence[float] | None = None,
    top: int = 10,
    pareto: Sequence[str] = (),
    budget: Budget | None = None,
    threads: int = 1,
    executor: Executor | str | None = None,
    resume: Path | str | None = None,
    cache: Path | str | None = None,
    progress: Callable[[Progress], None] | None = None,
    objective: str = "time",
) -> Outcome:
    """Search a space of chips; see `phaze_fast.search` for the parameters."""
    objectives, shares = _checked_options(models, top, pareto, weights, objective)
    groups = ChipGroups.of(space)
    problems = problems_of(models, groups, cluster, training)
    name = search_digest(problems, space, shares, top, objectives, objective)
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        store = journal = workers = None
        if cache is not None:
            try:
                store = ResultStore(Path(cache) / STORE, "search outcomes")
                stack.enter_context(contextlib.closing(store))
            except InvalidInputError as error:  # the search goes on without a cache
                notes.append(str(error))
        stored = _stored(store, name.encode()) if store is not None else None
        if stored is not None:
            return replace(stored, recalled=True)
        if resume is not None:
            journal = stack.enter_context(_journal(resume, name))
        if executor is not None:
            workers = stack.enter_context(Workers(executor, threads))
        search = BestFirstSearch(
            problems,
            groups,
            weights=shares,
            top=top,
            objectives=objectives,
            threads=threads,
            workers=workers,
            cache=PlanCache(journal),
            progress=progress,
            objective=objective,
        )
        outcome = search.outcome(search.run(budget))
        if journal is not None:
            outcome = replace(outcome, notes=tuple(journal.notes))
        if store is not None:
            if outcome.complete:
                store.put_many({name.encode(): json.dumps(outcome.to_dict()).encode()})
            notes += store.notes
        return replace(outcome, notes=(*outcome.notes, *notes))
