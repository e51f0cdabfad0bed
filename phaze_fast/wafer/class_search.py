"""Pipelines with two classes of stages, tried behind the search over stages of one shape.

Classes are listed by shape, number and micro-batch, blocks are shared out so that no stage has more
work than it must, and the most promising by a bound on their work are improved: one class after the
other, each beside what the other takes. They keep at least as many dies busy as stages of one shape
do at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.block_split import balanced_split
from phaze_fast.wafer.bounds import priced_mappings, roofline
from phaze_fast.wafer.classes import Classes, Pair, accepts_classes, classes_fault
from phaze_fast.wafer.evaluate import Evaluation, evaluation_of_classes
from phaze_fast.wafer.layout import Layout, accepts_microbatch
from phaze_fast.wafer.outcome import Effort
from phaze_fast.wafer.plans import plan_starts
from phaze_fast.wafer.prices import LeastWork
from phaze_fast.wafer.problem import Problem
from phaze_fast.wafer.tried import assigned, rank_of

__all__ = ["ClassResult", "class_pairs", "improved", "improved_classes", "search_classes"]

Array = np.ndarray[Any, Any]
Known = tuple[Layout, Array]

_MOST_STAGES = 6  # of both classes
_MICROBATCHES = 3  # of the best layouts of one shape
_LOOKED_AT = 24  # pairs that are improved briefly
_FIRST_STEPS = 300
_ROUNDS = 2  # over both classes
_LOSSES = (0.1, 0.03)  # accepted at first by an annealing, relative


def _shared(problem: Problem, pair: Pair, work: Sequence[LeastWork]) -> tuple[float, Pair]:
    """Share blocks out by the work of each class; give also what a step then takes at least."""
    units = tuple(w.block_s for w, each in zip(work, pair, strict=True) for _ in range(each.stages))
    ends = (work[0].before_s, work[1].behind_s)
    blocks = balanced_split(problem.work.blocks, units, ends)
    loads = [unit * count for unit, count in zip(units, blocks, strict=True)]
    loads[0] += ends[0]
    loads[-1] += ends[1]
    step_s = (problem.batches(pair[0]) - 1) * max(loads) + sum(loads)
    return step_s * (1.0 - 1e-9), _with_blocks(pair, blocks)  # rounding


def _ranked(problem: Problem, pairs: Iterable[Pair], below_s: float) -> list[Pair]:
    """Those that may take less, the least work first; first by the dies' peak rates alone."""
    peak = roofline(problem).work
    found = []
    for pair in pairs:
        shares = [each.microbatch / each.dies for each in pair]
        rates = [
            peak._replace(
                before_s=peak.before_s * share,
                block_s=peak.block_s * share,
                behind_s=peak.behind_s * share,
            )
            for share in shares
        ]
        if _shared(problem, pair, rates)[0] >= below_s:
            continue
        least_s, shared = _shared(problem, pair, [problem.least_work(each) for each in pair])
        if least_s < below_s:
            found.append((least_s, shared))
    return [pair for _, pair in sorted(found)]


def _placed(problem: Problem, pairs: Iterable[Pair]) -> list[Pair]:
    """Take the first that have a place; of those that differ in their sides alone, two."""
    found: list[Pair] = []
    seen: list[tuple[Any, ...]] = []
    for pair in pairs:
        sizes = tuple((each.dies, each.blocks, each.microbatch) for each in pair)
        if seen.count(sizes) < 2 and not classes_fault(problem, pair):
            seen.append(sizes)
            found.append(pair)
        if len(found) == _LOOKED_AT:
            break
    return found


def _with_blocks(pair: Pair, blocks: Sequence[int]) -> Pair:
    first, second = pair
    given = tuple(blocks)
    return (
        replace(first, blocks=given[: first.stages]),
        replace(second, blocks=given[first.stages :]),
    )


def class_pairs(
    problem: Problem, layouts: Iterable[Layout], microbatches: Iterable[int]
) -> Iterator[Pair]:
    """List pairs of classes that may have a place, without blocks; places are not looked for.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Of stages of one shape: their shapes are paired.
    microbatches
        To be tried.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dojo-tile-like")
    >>> shapes = [Layout(5, 4, 1, 1), Layout(5, 1, 1, 1)]
    >>> [(a.height, b.height) for a, b in class_pairs(problem, shapes, [16])]
    [(1, 4), (4, 1)]
    """
    every = list(layouts)
    sides = sorted({(each.width, each.height) for each in every})
    alive = problem.wafer.dies
    least = min(alive, max((each.dies * each.stages for each in every), default=0))
    most = min(_MOST_STAGES, problem.work.blocks)
    for one, other in permutations(sides, 2):
        a, b = one[0] * one[1], other[0] * other[1]
        for first in range(1, most):
            for second in range(1, most - first + 1):
                if not least <= first * a + second * b <= alive:
                    continue
                for microbatch in microbatches:
                    pair = Layout(*one, first, microbatch), Layout(*other, second, microbatch)
                    batch = problem.training.global_batch
                    if all(accepts_microbatch(batch, each) for each in pair):
                        yield pair


@dataclass(frozen=True)
class ClassResult:
    """What a search over two classes of stages found."""

    best: Evaluation | None
    """None where none is faster than asked for."""
    evaluations: int


def _rank(found: Evaluation) -> tuple[bool, float]:
    over = found.over_bytes + found.stream_over_bytes
    return (over > 0, over if over > 0 else found.time_s)


def improved_classes(
    problem: Problem, pair: Pair, known: Sequence[Known], steps: int, seed: int
) -> tuple[Evaluation, int]:
    """Improve the mappings of two classes in turn, each beside what the other takes.

    Parameters
    ----------
    problem, pair
        What is mapped; layouts with their blocks.
    known
        Operator mappings of stages of one shape, where classes start from.
    steps
        Evaluations of each annealing.
    seed
        Of all random choices.

    Returns
    -------
    tuple
        The best mapping, and how many evaluations it took.
    """
    return improved(Classes(problem, pair), known, steps, seed)


def improved(
    classes: Classes, known: Sequence[Known], steps: int, seed: int
) -> tuple[Evaluation, int]:
    """Give what `improved_classes` gives, of two classes or groups that are compiled."""
    count = 0
    for which, layout in enumerate(classes.layouts):
        problem, mapping = classes.part(which), classes.at_start(which)
        relaxation = mapping.relaxation()
        free, relaxed = relaxation.bound(1.0, 0.0)
        alike = [
            classes.own_mappings(which, m)
            for each, m in known
            if (each.width, each.height) == (layout.width, layout.height)
        ]
        alone = replace(layout, blocks=())
        starts = [relaxed, *alike, *priced_mappings(problem, alone, relaxation, free)]
        best, chosen = (True, float("inf")), relaxed
        for op_mappings in (*starts, *plan_starts(problem, alone)):
            if not assigned(mapping, op_mappings):
                continue
            count += 1
            rank = rank_of(mapping)
            if rank < best:
                best, chosen = rank, op_mappings
        mapping.assign(chosen)
    for turn in range(_ROUNDS):
        for which in (0, 1):
            mapping = classes.beside(which)
            count += mapping.anneal(seed + turn, steps, _LOSSES[turn % len(_LOSSES)])[2]
            count += mapping.descend(2)[2]
    return evaluation_of_classes(classes), count


def _rebalanced(problem: Problem, found: Evaluation) -> Pair:
    """Share blocks out by what stages were found to take."""
    first, second = (each.layout for each in found.encoding.classes)
    border = first.stages
    inner = [stage.load_s / stage.blocks for stage in found.stages]
    ends = [problem.least_work(first).before_s, problem.least_work(second).behind_s]
    inner[0] = (found.stages[0].load_s - ends[0]) / found.stages[0].blocks
    inner[-1] = (found.stages[-1].load_s - ends[1]) / found.stages[-1].blocks
    units = [max(inner[:border])] * border + [max(inner[border:])] * second.stages
    blocks = balanced_split(problem.work.blocks, tuple(units), (ends[0], ends[1]))
    return _with_blocks((first, second), blocks)


def search_classes(
    problem: Problem,
    layouts: Iterable[Layout],
    known: Sequence[Known],
    below_s: float,
    effort: Effort,
    seed: int,
    pool: ThreadPoolExecutor,
    late: Callable[[], bool],
) -> ClassResult:
    """Look for a pipeline of two classes of stages that takes less than a given time.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Of one shape; their shapes are paired.
    known
        The best of them with their operator mappings, the best first.
    below_s
        Seconds of a step that are of no interest.
    effort, seed
        As for `search_mapping`.
    pool
        Threads; the answer does not depend on their number.
    late
        Whether to stop.
    """
    if not known or not accepts_classes(problem) or late():
        return ClassResult(None, 0)
    microbatches = list(dict.fromkeys(layout.microbatch for layout, _ in known))[:_MICROBATCHES]
    pairs = class_pairs(problem, layouts, microbatches)
    count = 0

    def tried(pair: Pair, steps: int) -> tuple[Evaluation, int] | None:
        try:
            return improved_classes(problem, pair, known, steps, seed)
        except InvalidInputError:  # some operator cannot be split so
            return None

    looked_at = []
    chosen = _placed(problem, _ranked(problem, pairs, below_s))
    for found in pool.map(lambda pair: tried(pair, _FIRST_STEPS), chosen):
        if found is not None:
            looked_at.append(found[0])
            count += found[1]
    looked_at.sort(key=_rank)
    again = [_rebalanced(problem, found) for found in looked_at[: effort.promising]]
    for found in pool.map(lambda pair: tried(pair, effort.steps), again):
        if found is not None:
            looked_at.append(found[0])
            count += found[1]
    fitting = [found for found in looked_at if found.fits and found.time_s < below_s]
    return ClassResult(min(fitting, key=_rank, default=None), count)
