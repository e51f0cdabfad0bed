"""The search for pipelines with two classes of stages.

Pairs of classes are listed by shape, number and micro-batch, with blocks split such that the
slowest stage has least work. The most promising by a bound on their work are improved: each class
briefly in isolation, then in turn given the times of the other class. Pairs use at least as many
dies as the layout of one shape that uses most.

A study of fault maps searches many wafers that differ only in dead dies: `KnownClasses` evaluates a
pair found on one of them on the next if it fits, and improves only a few new pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.tables import Array
from phaze_fast.wafer.mapping.encoding import Pair, accepts_classes, classes_fault
from phaze_fast.wafer.mapping.evaluate import Classes, Evaluation, evaluation_of_classes
from phaze_fast.wafer.mapping.layout import Layout, balanced_split, micro_batch_fault
from phaze_fast.wafer.mapping.problem import LeastWork, Problem
from phaze_fast.wafer.search.baselines import plan_starts
from phaze_fast.wafer.search.bounds import priced_mappings, roofline
from phaze_fast.wafer.search.result import Effort

Known = tuple[Layout, Array]
Rank = tuple[bool, float]
"""Whether a mapping exceeds memory, and the excess in bytes or else its time. Smaller is better."""
Batches = tuple[int, int]
"""Sequences of a micro-batch, and number of replicas."""

_MOST_STAGES = 6  # limit for both classes together
_MICROBATCHES = 3  # taken from the best layouts of one shape
_IMPROVED = 24  # pairs that are improved briefly
_FIRST_STEPS = 300
_LOSSES = (0.1, 0.03)  # initial relative loss that annealing accepts, per round
_ISOLATED = 4  # a class in isolation is annealed for a quarter of the steps
_SCORED = 4  # known pairs evaluated on each wafer
_NEW = 2  # new pairs per micro-batch improved on each wafer
_LONGER = 5  # factor on the steps for the best pair
_PLACED = 16  # pairs for which placement is attempted
_NEAR = 1.02  # factor on the time to beat below which a pair is evaluated


def ranked(time_s: float, over_bytes: float) -> Rank:
    """Rank a step by its time, or by the bytes by which it exceeds memory."""
    return (over_bytes > 0, over_bytes if over_bytes > 0 else time_s)


def rank_of(mapping: _core.Mapping) -> Rank:
    """Rank the current operator mappings of a compiled mapping."""
    score = mapping.score()[0]
    return ranked(float(score["time_s"]), float(score["over_bytes"] + score["stream_over_bytes"]))


def assigned(mapping: _core.Mapping, op_mappings: Array) -> bool:
    """Assign operator mappings; return false if they are not legal."""
    try:
        mapping.assign(op_mappings)
    except InvalidInputError:
        return False
    return True


def _shared(problem: Problem, pair: Pair, work: Sequence[LeastWork]) -> tuple[float, Pair]:
    """Split blocks by the work of each class; return a bound on the step and the pair."""
    units = tuple(
        w.block_s for w, layout in zip(work, pair, strict=True) for _ in range(layout.stages)
    )
    ends = (work[0].before_s, work[1].behind_s)
    blocks = balanced_split(problem.work.blocks, units, ends)
    loads = [unit * count for unit, count in zip(units, blocks, strict=True)]
    loads[0] += ends[0]
    loads[-1] += ends[1]
    step_s = (problem.batches(pair[0]) - 1) * max(loads) + sum(loads)
    return step_s * (1.0 - 1e-9), _with_blocks(pair, blocks)  # rounding


def placed_pairs(problem: Problem, pairs: Iterable[Pair], most: int = _IMPROVED) -> list[Pair]:
    """Return the first pairs that fit on the wafer; at most two that differ only in their sides."""
    placed: list[Pair] = []
    seen: list[tuple[Any, ...]] = []
    for pair in pairs:
        sizes = tuple((layout.dies, layout.blocks, layout.micro_batch) for layout in pair)
        if seen.count(sizes) < 2 and not classes_fault(problem, pair):
            seen.append(sizes)
            placed.append(pair)
        if len(placed) == most:
            break
    return placed


def _with_blocks(pair: Pair, blocks: Sequence[int]) -> Pair:
    first, second = pair
    all_blocks = tuple(blocks)
    return (
        replace(first, blocks=all_blocks[: first.stages]),
        replace(second, blocks=all_blocks[first.stages :]),
    )


def class_pairs(
    problem: Problem, layouts: Iterable[Layout], micro_batches: Iterable[int], replicas: int = 1
) -> Iterator[Pair]:
    """List pairs of classes that fit the number of dies; blocks are not assigned yet.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Layouts of one shape; their shapes are combined to pairs.
    micro_batches
        Micro-batches to try.
    replicas
        Data-parallel pipelines, each on an equal share of the wafers.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dojo-tile-like")
    >>> shapes = [Layout(5, 4, 1, 1), Layout(5, 1, 1, 1)]
    >>> [(a.height, b.height) for a, b in class_pairs(problem, shapes, [16])]
    [(1, 4), (4, 1)]
    """
    every = [layout for layout in layouts if layout.replicas == replicas]
    sides = sorted({(layout.width, layout.height) for layout in every})
    wafers = problem.wafer.wafer_count // replicas
    alive = problem.wafer.dies * wafers
    least = min(alive, max((layout.dies * layout.stages for layout in every), default=0))
    most = min(max(_MOST_STAGES, 2 * wafers), problem.work.blocks, _core.MAX_MAP_STAGES)
    for one, other in permutations(sides, 2):
        a, b = one[0] * one[1], other[0] * other[1]
        for first in range(1, most):
            for second in range(1, most - first + 1):
                if not least <= first * a + second * b <= alive or first + second < wafers:
                    continue
                for micro_batch in micro_batches:
                    pair = (
                        Layout(*one, first, micro_batch, replicas=replicas),
                        Layout(*other, second, micro_batch, replicas=replicas),
                    )
                    batch = problem.training.global_batch
                    if not any(micro_batch_fault(batch, layout) for layout in pair):
                        yield pair


def _rank(found: Evaluation) -> Rank:
    return ranked(found.time_s, found.over_bytes + found.stream_over_bytes)


def _batches_of(known: Sequence[Known]) -> list[Batches]:
    """List micro-batches of the best known layouts, for each number of replicas."""
    micro_batches: dict[int, dict[int, None]] = {}
    for layout, _ in known:
        micro_batches.setdefault(layout.replicas, {})[layout.micro_batch] = None
    return [
        (b, replicas)
        for replicas, some in micro_batches.items()
        for b in list(some)[:_MICROBATCHES]
    ]


def ranked_pairs(
    problem: Problem, layouts: Iterable[Layout], batches: Iterable[Batches], below_s: float
) -> list[Pair]:
    """List the pairs whose bound is below a time, least work first.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Layouts of one shape; their shapes are combined to pairs.
    batches
        Micro-batches and numbers of replicas to try.
    below_s
        Pairs must take less than this time.
    """
    every = list(layouts)
    pairs = [pair for b, r in batches for pair in class_pairs(problem, every, [b], r)]
    peak = roofline(problem).work
    bounded_pairs = []
    for pair in pairs:
        shares = [layout.micro_batch / layout.dies for layout in pair]
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
        least_s, shared = _shared(problem, pair, [problem.least_work(layout) for layout in pair])
        if least_s < below_s:
            bounded_pairs.append((least_s, shared))
    return [pair for _, pair in sorted(bounded_pairs)]


@dataclass(frozen=True)
class ClassResult:
    """Result of a search over two classes of stages."""

    best: Evaluation | None
    """Best mapping; None if none is fast enough."""
    evaluations: int


def _improved_isolated(
    classes: Classes, which: int, known: Sequence[Known], steps: int, seed: int
) -> tuple[list[Array], int]:
    """Improve one class in isolation; return its start, the result and the evaluations.

    Given the other class, an improvement may have no effect: a step ends with the longer tail and
    is limited by the slowest stage of both, so that a change that pays only if made in both
    classes would be missed.
    """
    mapping, layout = classes.isolated(which), classes.layouts[which]
    problem = classes.problem
    relaxation = mapping.relaxation()
    free, relaxed = relaxation.bound(1.0, 0.0)
    same_shape = [
        m
        for known_layout, m in known
        if (known_layout.width, known_layout.height) == (layout.width, layout.height)
    ]
    whole = replace(layout, blocks=())
    starts = [relaxed, *same_shape, *priced_mappings(problem, whole, relaxation, free)]
    best, chosen, count = (True, float("inf")), relaxed, 0
    for op_mappings in (*starts, *plan_starts(problem, whole)):
        if not assigned(mapping, op_mappings):
            continue
        count += 1
        rank = rank_of(mapping)
        if rank < best:
            best, chosen = rank, op_mappings
    mapping.assign(chosen)
    count += mapping.anneal(seed, steps, _LOSSES[0])[2] + mapping.descend(2)[2]
    return [chosen, mapping.op_mappings()], count


def _best_together(classes: Classes, some: Sequence[Sequence[Array]]) -> int:
    """Assign the best combination of the classes' operator mappings; return how many there are."""
    best: tuple[Rank, tuple[Array, ...]] | None = None
    pairs = list(product(*some))
    for pair in pairs:
        for mapping, op_mappings in zip(classes.mappings, pair, strict=True):
            mapping.assign(op_mappings)
        score = classes.score()
        rank = ranked(score["time_s"], score["over_bytes"] + score["stream_over_bytes"])
        if best is None or rank < best[0]:
            best = rank, pair
    assert best is not None  # each class has at least one
    for mapping, op_mappings in zip(classes.mappings, best[1], strict=True):
        mapping.assign(op_mappings)
    return len(pairs)


def improved_classes(
    problem: Problem, pair: Pair, known: Sequence[Known], steps: int, seed: int
) -> tuple[Evaluation, int]:
    """Improve the mappings of two classes: each in isolation, then in turn given the other.

    Parameters
    ----------
    problem, pair
        The problem; layouts of both classes with their blocks.
    known
        Operator mappings of stages of one shape, to start from.
    steps
        Evaluations of each annealing.
    seed
        Seed of all random choices.

    Returns
    -------
    tuple
        The best mapping, and the number of evaluations.
    """
    classes = Classes(problem, pair)
    count, some = 0, []
    for which in (0, 1):
        improved, evaluations = _improved_isolated(classes, which, known, steps // _ISOLATED, seed)
        some.append(improved)
        count += evaluations
    for turn, loss in enumerate(_LOSSES):
        count += _best_together(classes, some)
        for which in (0, 1):
            mapping = classes.given_other(which)
            count += mapping.anneal(seed + turn, steps, loss)[2] + mapping.descend(2)[2]
            some[which].append(mapping.op_mappings())
    return evaluation_of_classes(classes), count


def rebalanced(problem: Problem, found: Evaluation) -> Pair:
    """Split the blocks again by the stage times of a mapping."""
    first, second = (stage_class.layout for stage_class in found.encoding.classes)
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
    """Search for a pipeline of two classes of stages that takes less than a given time.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Layouts of one shape; their shapes are combined to pairs.
    known
        The best layouts with their operator mappings, best first.
    below_s
        Pairs must take less than this time.
    effort, seed
        As for `search_mapping`.
    pool
        Threads; the answer does not depend on their number.
    late
        Returns whether to stop.
    """
    if not known or not accepts_classes(problem) or late():
        return ClassResult(None, 0)
    looked_at: list[Evaluation] = []
    count = 0

    def improve(pairs: list[Pair], steps: int) -> None:
        nonlocal count
        for outcome in _improved_pairs(pool, problem, pairs, known, steps, seed):
            if outcome is not None:
                looked_at.append(outcome[0])
                count += outcome[1]

    ranked = ranked_pairs(problem, layouts, _batches_of(known), below_s)
    improve(placed_pairs(problem, ranked), _FIRST_STEPS)
    looked_at.sort(key=_rank)
    again = [rebalanced(problem, evaluation) for evaluation in looked_at[: effort.promising]]
    improve(again, effort.steps)
    fitting = [
        evaluation for evaluation in looked_at if evaluation.fits and evaluation.time_s < below_s
    ]
    return ClassResult(min(fitting, key=_rank, default=None), count)


def _improved_pairs(
    pool: ThreadPoolExecutor,
    problem: Problem,
    pairs: list[Pair],
    known: Sequence[Known],
    steps: int,
    seed: int,
) -> Iterator[tuple[Evaluation, int] | None]:
    """Yield the result of `improved_classes` for each pair; None if an operator cannot be split."""

    def improved(pair: Pair) -> tuple[Evaluation, int] | None:
        try:
            return improved_classes(problem, pair, known, steps, seed)
        except InvalidInputError:
            return None

    return pool.map(improved, pairs)


def _batches(problem: Problem, layout: Layout) -> list[Batches]:
    """Micro-batch of a layout and the next smaller one, since two stages store more of them."""
    share, b = problem.training.global_batch // layout.replicas, layout.micro_batch
    smaller = [divisor for divisor in range(1, b) if share % divisor == 0][-1:]
    return [(divisor, layout.replicas) for divisor in (b, *smaller)]


class KnownClasses:
    """Pairs of classes found so far, and those known not to fit.

    Parameters
    ----------
    steps
        Evaluations of each annealing of a pair.
    seed
        Seed of all random choices.
    """

    def __init__(self, steps: int, seed: int) -> None:
        self.steps, self.seed = steps, seed
        self.mappings: dict[Pair, tuple[float, tuple[Array, Array]]] = {}
        self.lost: set[Pair] = set()

    def best(
        self,
        problem: Problem,
        layouts: Iterable[Layout],
        known: Sequence[Known],
        below_s: float,
        pool: ThreadPoolExecutor,
    ) -> float:
        """Time of the fastest pair on one wafer; infinite if none is below `below_s`.

        The parameters are those of `search_classes`.
        """
        if not accepts_classes(problem) or not known:
            return float("inf")
        every = list(layouts)
        best_s = min(self._scored(problem, below_s), default=float("inf"))
        below_s = min(below_s, best_s)

        def tried(batches: Batches) -> list[Evaluation]:
            """Improve some new pairs of one micro-batch."""
            ranked = ranked_pairs(problem, every, [batches], below_s)
            new = [pair for pair in ranked if self._is_new(pair)][:_PLACED]
            new = placed_pairs(problem, new, _NEW)
            return self._improved(problem, new, known, pool, self.steps)

        evaluations = [
            evaluation
            for batches in _batches(problem, known[0][0])
            for evaluation in tried(batches)
        ]
        if evaluations:  # improve the best with more steps and its blocks split again
            best = min(evaluations, key=lambda evaluation: evaluation.time_s)
            steps = _LONGER * self.steps
            evaluations += self._improved(problem, [rebalanced(problem, best)], known, pool, steps)
        return min([best_s, *(evaluation.time_s for evaluation in evaluations)])

    def _is_new(self, pair: Pair) -> bool:
        return pair not in self.mappings and pair not in self.lost

    def _scored(self, problem: Problem, below_s: float) -> list[float]:
        """Return the times of the best known pairs that fit on the wafer."""
        near = [pair for pair, (time_s, _) in self.mappings.items() if time_s < _NEAR * below_s]
        near.sort(key=lambda pair: (self.mappings[pair][0], pair))
        times_s = []
        for pair in placed_pairs(problem, near[:_PLACED], _SCORED):
            classes = Classes(problem, pair)
            for mapping, op_mappings in zip(classes.mappings, self.mappings[pair][1], strict=True):
                mapping.assign(op_mappings)
            score = classes.score()
            if score["over_bytes"] + score["stream_over_bytes"] <= 0.0:
                times_s.append(score["time_s"])
        return times_s

    def _improved(
        self,
        problem: Problem,
        pairs: list[Pair],
        known: Sequence[Known],
        pool: ThreadPoolExecutor,
        steps: int,
    ) -> list[Evaluation]:
        """Improve pairs, and store those that fit in memory."""
        fitting = []
        outcomes = _improved_pairs(pool, problem, pairs, known, steps, self.seed)
        for pair, outcome in zip(pairs, outcomes, strict=True):
            if outcome is None or not outcome[0].fits:
                self.lost.add(pair)  # it does not fit on any other fault map either
                continue
            scored = outcome[0]
            first, second = scored.encoding.classes
            arrays = (first.arrays(problem)[0], second.arrays(problem)[0])
            if scored.time_s < self.mappings.get(pair, (float("inf"),))[0]:
                self.mappings[pair] = (scored.time_s, arrays)
            fitting.append(scored)
        return fitting
