"""The search as a whole: problems posed, caches and journals opened, the outcome kept."""

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
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.goals import checked_objectives
from phaze_fast.explore.objective import checked_objective, objective_of
from phaze_fast.explore.plan_cache import PlanCache
from phaze_fast.explore.problem import Problem, problems_of
from phaze_fast.explore.result import Budget, Outcome, Progress
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training
from phaze_fast.runs.executors import Workers
from phaze_fast.runs.journal import Journal, manifest
from phaze_fast.runs.store import STORE, ResultStore

__all__ = ["checked_weights", "find_chips", "search_digest"]


def search_digest(
    problems: Sequence[Problem],
    space: ArchitectureSpace,
    weights: Sequence[float],
    top: int,
    objectives: Sequence[str],
    objective: str = "time",
) -> str:
    """Hash all that decides the answer."""
    posed = [problem.digest for problem in problems]
    asked = [posed, space.digest, list(weights), top, list(objectives)]
    return digest(asked if objective == "time" else [*asked, objective])


def checked_weights(weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    """Refuse weights that are not one positive number for each model."""
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


class _Outcomes:
    """Outcomes of complete searches in a folder, by the content of the problem.

    A folder that cannot be used is none; `notes` says why.
    """

    def __init__(self, folder: Path | str | None, name: str) -> None:
        self._key = name.encode()
        self._store: ResultStore | None = None
        self._notes: list[str] = []
        if folder is not None:
            try:
                self._store = ResultStore(Path(folder) / STORE, "search outcomes")
            except InvalidInputError as error:
                self._notes.append(str(error))

    @property
    def notes(self) -> tuple[str, ...]:
        """What happened to the store that a reader should know."""
        return (*self._notes, *(self._store.notes if self._store else ()))

    def get(self) -> Outcome | None:
        """Look an outcome up; what is damaged counts as unknown."""
        if self._store is None:
            return None
        value = self._store.get_many([self._key]).get(self._key)
        try:
            return None if value is None else Outcome.from_dict(json.loads(value))
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, outcome: Outcome) -> None:
        """Keep an outcome; where that fails, it is found again next time."""
        if self._store is not None:
            self._store.put_many({self._key: json.dumps(outcome.to_dict()).encode()})

    def close(self) -> None:
        """Let go of the store."""
        if self._store is not None:
            self._store.close()


def _journal(folder: Path | str, name: str) -> Journal:
    """Open the directory that a search goes on from."""
    return Journal(folder, manifest([], f"search {name}"), option="resume", run="search")


def _checked_options(
    models: Sequence[Model],
    top: int,
    pareto: Sequence[str],
    weights: Sequence[float] | None,
    objective: str,
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Refuse what is not accepted; give the objectives and the weights of the models."""
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
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(contextlib.closing(_Outcomes(cache, name)))
        known = kept.get()
        if known is not None:
            return replace(known, recalled=True)
        journal = None
        if resume is not None:
            journal = stack.enter_context(_journal(resume, name))
        workers = None
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
            objective=objective_of(objective, problems, groups),
        )
        outcome = search.outcome(search.run(budget))
        if journal is not None:
            outcome = replace(outcome, notes=tuple(journal.notes))
        if outcome.complete:
            kept.put(outcome)
        return replace(outcome, notes=(*outcome.notes, *kept.notes))
