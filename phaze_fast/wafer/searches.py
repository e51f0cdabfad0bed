"""The search for a mapping as a task of a session, and mappings of several problems at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.baseline_rules import is_linear
from phaze_fast.wafer.encoding import Encoding
from phaze_fast.wafer.evaluate import Evaluation
from phaze_fast.wafer.layout import Layout
from phaze_fast.wafer.outcome import Effort, MappingResult, no_layout
from phaze_fast.wafer.problem import Problem
from phaze_fast.wafer.search import Progress, search_below
from phaze_fast.wafer.session import Data, Means, Session, Task

__all__ = ["mappings_in", "result_in", "search_data", "search_mappings", "search_task"]


def search_data(problem: Problem, given: Data, means: Means) -> Data:
    """Search one wafer and give plain data: `result_in` reads it."""
    effort = Effort(**given["effort"], budget_s=means.budget_s, stop=means.stop)
    below_s = float("inf") if given["below_s"] is None else given["below_s"]
    starts = []
    for data in given["starts"]:
        encoding = Encoding.from_list(data)
        if encoding.then is None:
            starts.append((encoding.layout, encoding.arrays(problem)[0]))
    result, bound_s = search_below(
        problem,
        below_s,
        effort,
        given["seed"],
        means.threads,
        starts,
        means.progress,
        _wanted(problem, given["wanted"]),
    )
    return {
        "bound_s": bound_s if math.isfinite(bound_s) else None,
        "result": None if result is None else result.to_record(),
        # What a budget or a hand may have cut short is the answer of this run alone.
        "cut": (means.stop is not None and means.stop())
        or (means.budget_s is not None and (result is None or result.seconds >= means.budget_s)),
    }


def _wanted(problem: Problem, name: str | dict[str, Any]) -> list[Layout] | None:
    if isinstance(name, dict):
        return [Layout(**{**name, "blocks": tuple(name["blocks"])})]
    if name == "all":
        return None
    every = problem.layouts()
    return [layout for layout in every if is_linear(problem, layout)]


def search_task(
    problem: Problem,
    effort: Effort,
    seed: int,
    starts: Sequence[Evaluation] = (),
    below_s: float = float("inf"),
    wanted: str | Layout = "all",
) -> Task:
    """Describe a search on one wafer.

    Parameters
    ----------
    problem, effort, seed
        As for `search_mapping`.
    starts
        Mappings to start from.
    below_s
        Times of no interest.
    wanted
        Layouts: ``all``, ``linear`` (runs of ranks), or one.
    """
    asked = asdict(replace(effort, budget_s=None, stop=None))
    del asked["budget_s"], asked["stop"]
    given = {
        "effort": asked,
        "seed": seed,
        "below_s": below_s if math.isfinite(below_s) else None,
        "starts": [found.encoding.to_list() for found in starts],
        "wanted": asdict(wanted) if isinstance(wanted, Layout) else wanted,
    }
    return Task(search_data, problem, given, effort.budget_s, effort.stop)


def result_in(problem: Problem, data: Data) -> tuple[MappingResult | None, float]:
    """Read what `search_data` gives: the result, none where bounds leave nothing; the bound."""
    bound_s = float("inf") if data["bound_s"] is None else float(data["bound_s"])
    kept = data["result"]
    return None if kept is None else MappingResult.from_record(problem, kept), bound_s


def mappings_in(
    session: Session,
    problems: Sequence[Problem],
    effort: Effort,
    seed: int = 0,
    progress: Progress | None = None,
    done: Callable[[int], None] | None = None,
) -> list[MappingResult]:
    """Search a mapping for each problem in an open session."""
    tasks = [search_task(problem, effort, seed) for problem in problems]
    results = []
    for problem, data in zip(problems, session.run(tasks, progress, done), strict=True):
        result, _ = result_in(problem, data)
        if result is None:
            raise InvalidInputError(no_layout(problem))
        results.append(result)
    return results


def search_mappings(
    problems: Sequence[Problem],
    effort: Effort | None = None,
    seed: int = 0,
    threads: int | None = None,
    executor: Executor | str | None = None,
    resume: Path | str | None = None,
    cache: Path | str | None = None,
    progress: Progress | None = None,
) -> list[MappingResult]:
    """Find the fastest mapping for each of several problems: models, wafers, batches.

    Parameters
    ----------
    problems
        A model, a wafer and a step each.
    effort, seed, threads, progress
        As for `search_mapping`.
    executor
        Where they are searched: an executor, or one of the names of
        `phaze_fast.runs.executors.KINDS`; by default one after another, each on all threads.
    resume
        Directory of a journal; the same call goes on from it.
    cache
        Folder in which results are kept, by their content and that of all code that prices them.

    Examples
    --------
    >>> problems = [Problem("bertlarge", name) for name in ("dram-wafer", "dojo-tile-like")]
    >>> quick = Effort(seeds=1, steps=200, promising=1, budget_s=1.0)
    >>> [found.best.fits for found in search_mappings(problems, quick)]
    [True, True]
    """
    with Session(executor, threads, resume, cache) as session:
        return mappings_in(session, problems, effort or Effort(), seed, progress)
