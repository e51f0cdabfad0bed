"""Takes models, a space of chips, a cluster and a training step, gives the best chips, proven."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from phaze_fast.documents import digest
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.explore.dies import Dies
from phaze_fast.explore.goals import checked_objectives
from phaze_fast.explore.memory import Memory
from phaze_fast.explore.outcome import Outcome
from phaze_fast.explore.searcher import Budget, Moment, Searcher
from phaze_fast.explore.workload import VERSION, Question
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import TransformerModel
from phaze_fast.placement import Training
from phaze_fast.runs.executors import Workers
from phaze_fast.runs.journal import Journal, decode_line, encode_line, manifest

__all__ = ["find_chips", "questions_of", "search_digest"]


def questions_of(
    models: Sequence[TransformerModel], dies: Dies, cluster: Cluster, training: Training
) -> list[Question]:
    """Put a question for each model.

    Raises
    ------
    InfeasibleError
        Where no chip has HBM to hold anything.
    """
    capacities = tuple(int(c) for c in dies.capacities)
    if max(capacities) <= training.reserved_bytes:
        raise InfeasibleError(
            f"no chip has more HBM than reserved_bytes, {training.reserved_bytes}; the largest has "
            f"{max(capacities)}"
        )
    bare = cluster.replace(chip=None)
    return [Question(model, bare, training, dies.like, capacities) for model in models]


def search_digest(
    questions: Sequence[Question],
    space: ArchitectureSpace,
    weights: Sequence[float],
    top: int,
    objectives: Sequence[str],
) -> str:
    """Hash all that decides the answer."""
    asked = [q.digest for q in questions]
    return digest([VERSION, asked, space.digest, list(weights), top, list(objectives)])


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


class _Store:
    """Outcomes of complete searches, one file each, by the content of the question."""

    def __init__(self, folder: Path | str | None, name: str) -> None:
        self._file = None if folder is None else Path(folder) / f"search-{name}.json"

    def get(self) -> Outcome | None:
        """Look an outcome up; what is damaged counts as unknown."""
        if self._file is None:
            return None
        try:
            row = decode_line(self._file.read_bytes().rstrip(b"\n"))
            return None if row is None else Outcome.from_dict(row["outcome"])
        except (OSError, KeyError, TypeError, ValueError):
            return None

    def put(self, outcome: Outcome) -> None:
        """Keep an outcome; where that fails, it is found again next time."""
        if self._file is None:
            return
        row = {"key": self._file.stem, "status": outcome.status, "outcome": outcome.to_dict()}
        part = self._file.with_suffix(".part")
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(encode_line(json.loads(json.dumps(row))))
            part.replace(self._file)


def _journal(folder: Path | str, name: str) -> Journal:
    """Open the directory that a search goes on from."""
    try:
        return Journal(folder, manifest([], f"search {name}"))
    except InvalidInputError as error:
        said = str(error).replace("out: ", "resume: ", 1).replace("this sweep", "this search")
        raise InvalidInputError(said.replace("another sweep", "another search")) from None


def find_chips(
    models: Sequence[TransformerModel],
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
    progress: Callable[[Moment], None] | None = None,
) -> Outcome:
    """Search a space of chips; see `phaze_fast.search` for the parameters."""
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise InvalidInputError(f"top: {top!r} is not accepted; expected a whole number, 1 or more")
    names = [model.name for model in models]
    if len(set(names)) < len(names):
        raise InvalidInputError(f"model: {', '.join(names)} has a name twice; expected each once")
    objectives = checked_objectives(pareto)
    shares = checked_weights(weights, len(models))
    if len(models) > 1 and "energy" in objectives:
        raise InvalidInputError(
            "pareto: energy is not accepted for several models; expected time, area, hbm or cost"
        )
    dies = Dies.of(space)
    questions = questions_of(models, dies, cluster, training)
    name = search_digest(questions, space, shares, top, objectives)
    store = _Store(cache, name)
    known = store.get()
    if known is not None:
        return replace(known, recalled=True)
    with contextlib.ExitStack() as stack:
        journal = None
        if resume is not None:
            journal = stack.enter_context(_journal(resume, name))
        workers = None
        if executor is not None:
            workers = stack.enter_context(Workers(executor, threads))
        search = Searcher(
            questions,
            dies,
            weights=shares,
            top=top,
            objectives=objectives,
            threads=threads,
            workers=workers,
            memory=Memory(journal),
            progress=progress,
        )
        outcome = Outcome.of(search, search.run(budget))
        if journal is not None:
            outcome = replace(outcome, notes=tuple(journal.notes))
    if outcome.complete:
        store.put(outcome)
    return outcome
