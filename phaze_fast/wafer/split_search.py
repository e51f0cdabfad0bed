"""Blocks whose operators two groups of dies share, tried behind the search over classes of stages.

Sizes of both groups, micro-batches and places to cut a block are ranked by the least work of the
slower group, which no schedule hides; those that cannot take less than the best mapping so far are
left out. The most promising are improved as two classes of stages are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.bounds import roofline
from phaze_fast.wafer.class_search import ClassResult, improved
from phaze_fast.wafer.classes import Pair, accepts_groups, classes_fault
from phaze_fast.wafer.evaluate import Evaluation
from phaze_fast.wafer.layout import Layout, accepts_micro_batch, whole_runs
from phaze_fast.wafer.mesh import Links, mesh_collective
from phaze_fast.wafer.outcome import Effort
from phaze_fast.wafer.packing import bends
from phaze_fast.wafer.prices import LeastWork
from phaze_fast.wafer.problem import Problem
from phaze_fast.wafer.split_block import (
    SplitBlock,
    crossings,
    cut_points,
    group_layout,
    half_problems,
)

__all__ = ["search_split", "split_pairs"]

Array = np.ndarray[Any, Any]
Known = tuple[Layout, Array]
Sizes = tuple[int, int, int, int]
"""Operator behind which blocks are cut, dies of both groups, micro-batch."""
Loads = tuple[float, float]
"""Seconds of both groups for one micro-batch."""

_BEST = 3  # layouts of one shape whose micro-batches are tried
_WAVES = (4, 8)  # that are improved briefly, the second where the first is near
_SHAPES = 2  # of groups of the same sizes
_FIRST_STEPS = 300
_WALKED = 60  # dies of the wafer, for each pair of a rectangle and a line around it: both take long
_LONGER = 3  # that are improved at length
_NEAR = 1.05  # times the best so far: worth that
_HOPEFUL = 1.1  # times the best so far: worth a second wave


def _micro_batches(problem: Problem, known: Sequence[Known]) -> list[int]:
    """Take those of the best layouts, and the largest of at most half: two are under way."""
    batch, found = problem.training.global_batch, []
    for layout, _ in known[:_BEST]:
        most = layout.micro_batch
        smaller = (b for b in range(most // 2, 0, -1) if batch % b == 0)
        found += [most, next(smaller, most)]
    return list(dict.fromkeys(found))


def _loads(blocks: int, work: Sequence[LeastWork], shares: Sequence[float]) -> Loads:
    """Seconds of both groups for a micro-batch that is work alone; `shares` of it on one die."""
    first, second = work
    return (
        (first.before_s + blocks * first.block_s) * shares[0],
        (second.behind_s + blocks * second.block_s) * shares[1],
    )


def _least_s(problem: Problem, layout: Layout, loads: Iterable[float]) -> float:
    """Seconds of a step at least: every micro-batch passes the slower group.

    One alone passes both in turn.
    """
    batches, each = problem.batches(layout), tuple(loads)
    least_s = sum(each) if batches == 1 else batches * max(each)
    return least_s * (1.0 - 1e-9)  # rounding


def _exchanges_s(problem: Problem, layout: Layout) -> float:
    """Seconds in which a group exchanges what it receives for a micro-batch, at least.

    Where it is a line that bends, its links are no faster than those of a straight one.
    """
    wafer = problem.wafer
    links = Links(*wafer.link_bytes_per_s, wafer.hop_latency_s)
    size = problem.work.boundary_bytes * layout.micro_batch / layout.dies
    runs = whole_runs(layout.width, layout.height)
    once_s = mesh_collective("all-to-all", size, runs, links).time_s
    return crossings(problem.work) * once_s


def _sizes(
    problem: Problem, dies: Sequence[int], micro_batches: Iterable[int], below_s: float
) -> list[tuple[float, Sizes, Loads]]:
    """Sizes of groups that may take less, the least work first; first by the dies' peak rates."""
    blocks, batch = problem.work.blocks, problem.training.global_batch
    found = []
    for cut in cut_points(problem.work):
        parts = half_problems(problem, cut)
        peaks = [roofline(part).work for part in parts]
        for first, second, micro_batch in product(dies, dies, micro_batches):
            sizes = (first, second)
            if sum(sizes) > problem.wafer.dies:
                continue
            layouts = [Layout(each, 1, 1, micro_batch) for each in sizes]
            if not all(accepts_micro_batch(batch, each) for each in layouts):
                continue
            shares = [micro_batch / each for each in sizes]
            if _least_s(problem, layouts[0], _loads(blocks, peaks, shares)) >= below_s:
                continue
            work = [part.least_work(each) for part, each in zip(parts, layouts, strict=True)]
            loads = _loads(blocks, work, (1.0, 1.0))
            least_s = _least_s(problem, layouts[0], loads)
            if least_s < below_s:
                found.append((least_s, (cut, *sizes, micro_batch), loads))
    return sorted(found)


def _around(problem: Problem, pair: Pair) -> bool:
    """Whether one group is a rectangle and the other one a line that bends around it."""
    bends = [each.height == 1 and each.width > problem.wafer.grid[0] for each in pair]
    return bends[0] != bends[1]


def split_pairs(
    problem: Problem, layouts: Iterable[Layout], micro_batches: Iterable[int], below_s: float
) -> Iterator[tuple[int, Pair]]:
    """List where blocks may be cut and two groups of dies, the least work first.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Of stages of one shape: groups have their shapes.
    micro_batches
        To be tried.
    below_s
        Seconds of a step that are of no interest.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dojo-tile-like")
    >>> shapes = [Layout(5, 2, 1, 1), Layout(5, 3, 1, 1)]
    >>> {(a.height, b.height) for _, (a, b) in split_pairs(problem, shapes, [16], float("inf"))}
    {(2, 3), (3, 2), (2, 2)}
    """
    sides = sorted({(each.width, each.height) for each in layouts})
    dies = sorted({width * height for width, height in sides})
    sizes = _sizes(problem, dies, micro_batches, below_s)
    walked = 0
    for _, (cut, first, second, micro_batch), loads in sizes:
        taken = 0
        for one, other in product(sides, sides):
            if (one[0] * one[1], other[0] * other[1]) != (first, second) or taken == _SHAPES:
                continue
            pair = (
                group_layout(problem, *one, micro_batch),
                group_layout(problem, *other, micro_batch),
            )
            waits = (_exchanges_s(problem, each) for each in pair)
            if _least_s(problem, pair[0], map(sum, zip(loads, waits, strict=True))) >= below_s:
                continue
            if _around(problem, pair):
                walked += problem.wafer.dies
                if walked > _WALKED:
                    continue
            if not classes_fault(problem, pair):
                taken += 1
                yield cut, pair


def search_split(
    problem: Problem,
    layouts: Iterable[Layout],
    known: Sequence[Known],
    below_s: float,
    effort: Effort,
    seed: int,
    pool: ThreadPoolExecutor,
    late: Callable[[], bool],
) -> ClassResult:
    """Look for two groups of dies that share every block and take less than a given time.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Of stages of one shape: groups have their shapes.
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
    placed = accepts_groups(problem) and bends(problem.wafer)  # links both ways
    if not known or not placed or late():
        return ClassResult(None, 0)
    count = 0

    def tried(given: tuple[int, Pair, int]) -> tuple[Evaluation, int] | None:
        cut, pair, steps = given
        try:
            return improved(SplitBlock(problem, pair, cut), known, steps, seed)
        except InvalidInputError:  # some operator cannot be split so
            return None

    pairs = split_pairs(problem, layouts, _micro_batches(problem, known), below_s)
    seen: list[tuple[Evaluation, tuple[int, Pair, int]]] = []
    for wave in _WAVES:
        if seen and seen[0][0].time_s >= _HOPEFUL * below_s:
            break
        chosen = [(*each, _FIRST_STEPS) for each in islice(pairs, wave)]
        for given, found in zip(chosen, pool.map(tried, chosen), strict=True):
            if found is not None:
                seen.append((found[0], given))
                count += found[1]
        seen.sort(key=lambda each: each[0].rank)
    near = [given for found, given in seen[:_LONGER] if found.time_s < _NEAR * below_s]
    longer = [(cut, pair, effort.steps) for cut, pair, _ in near]
    best = [found for found, _ in seen]
    for found in pool.map(tried, longer):
        if found is not None:
            best.append(found[0])
            count += found[1]
    fitting = [found for found in best if found.fits and found.time_s < below_s]
    return ClassResult(min(fitting, key=lambda found: found.rank, default=None), count)
