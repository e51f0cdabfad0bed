"""The published early stop and random search, by the same exact evaluator as ours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.exact import ExactEvaluator
from phaze_fast.explore.problem import problems_of
from phaze_fast.explore.result import Winner
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.papers.fixed_plans import Baseline
from phaze_fast.planning import Training
from phaze_fast.threads import thread_count

__all__ = ["Course", "check_limits", "early_stop", "exact_evaluator", "random_search", "walk_down"]

Array = np.ndarray[Any, Any]

BUCKET_MM2 = 0.01
"""Chips whose areas differ by less are looked at together: 10,000 square micrometres."""
PATIENCE = 5
"""Buckets in a row without a rise after which the walk stops."""
_ORDER = ("tensor_cores", "vector_cores", "tensor_width", "tensor_depth", "buffer_bytes")
_RANDOM_AT_ONCE = 32


def exact_evaluator(
    models: Model | Sequence[Model],
    space: ArchitectureSpace,
    cluster: Cluster,
    training: Training,
    weights: Sequence[float] = (),
    threads: int | None = None,
) -> ExactEvaluator:
    """Give the exact evaluator of a space's chips for one model or several, all trained alike."""
    groups = ChipGroups.of(space)
    several = [models] if isinstance(models, Model) else list(models)
    return ExactEvaluator(
        problems_of(several, groups, cluster, training), groups, weights, thread_count(threads)
    )


def _buckets(area_mm2: Array, order: Array) -> list[Array]:
    """Chips by bucket of area, largest first; in a bucket they keep the given order."""
    bucket = np.floor(area_mm2 / BUCKET_MM2).astype(np.int64)[order]
    by_bucket = np.argsort(-bucket, kind="stable")
    borders = np.flatnonzero(np.diff(bucket[by_bucket])) + 1
    return np.split(order[by_bucket], borders)


def _sure(bests: Sequence[float]) -> int:
    """Count the buckets that the walk cannot stop before, by what is known of the first few."""
    rises = [k for k in range(1, len(bests)) if bests[k] > bests[k - 1]]
    return PATIENCE + (rises[-1] if rises else 0)


def walk_down(
    area_mm2: Array, scores: Callable[[Array], Array], order: Array | None = None
) -> Array:
    """Walk chips from the largest area down until five buckets in a row bring nothing better.

    The published rule: chips are put into buckets of 0.01 mm2, and each bucket is looked at whole.
    After each, once there were five, the walk ends if among the last five no bucket's best
    throughput is above that of the bucket before it. A bucket in which nothing fits counts as -1,
    so that five of those end it too.

    Parameters
    ----------
    area_mm2
        Area of each chip.
    scores
        Gives the scores of chips, seconds, infinite where nothing fits. It is asked for several
        buckets at once where the rule looks at all of them whatever they hold.
    order
        Chips in the order in which those of one bucket are looked at; by default as they are.

    Returns
    -------
    numpy.ndarray
        Positions of the chips looked at, in order.

    Examples
    --------
    >>> areas = np.array([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0])
    >>> times = np.array([2.0, 1.0, 1.0, 3.0, 4.0, 5.0, 0.1])
    >>> walk_down(areas, lambda chips: times[chips]).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    buckets = _buckets(area_mm2, np.arange(len(area_mm2)) if order is None else order)
    bests: list[float] = []
    while len(bests) < min(_sure(bests), len(buckets)):
        some = buckets[len(bests) : _sure(bests)]
        found = scores(np.concatenate(some))
        for part in np.split(found, np.cumsum([len(b) for b in some])[:-1]):
            least = float(part.min())
            bests.append(1.0 / least if least < math.inf else -1.0)
    return np.concatenate(buckets[: len(bests)]) if bests else np.zeros(0, dtype=np.int64)


class Course:
    """One method at work: an evaluator of its own, so that its seconds are its own."""

    def __init__(self, exact: ExactEvaluator) -> None:
        self.exact = ExactEvaluator(exact.problems, exact.groups, exact.weights, exact.threads)
        self.began = time.monotonic()
        self.best: Winner | None = None
        self.history: list[tuple[int, float, float]] = []

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    def scores(self, chips: Array) -> Array:
        """Score chips, and note the best; of equal ones the first."""
        winners = self.exact.winners(chips)
        for winner in winners:
            if winner is not None and (self.best is None or winner.score < self.best.score):
                self.best = winner
        score = math.inf if self.best is None else self.best.score
        self.history.append((self.exact.evaluations, self.seconds, score))
        return np.array([math.inf if w is None else w.score for w in winners])

    def baseline(self, key: str, title: str, note: str) -> Baseline:
        """Give the best that it found."""
        best, many = self.best, self.exact.evaluations
        if best is None:
            note = f"none of the {many} chips it looked at fits; {note}"
        return Baseline(
            key=key,
            title=title,
            group=None if best is None else best.group,
            winner=best,
            score=math.inf if best is None else best.score,
            evaluations=many,
            seconds=self.seconds,
            history=tuple(self.history),
            note=note,
        )


def early_stop(exact: ExactEvaluator, areas: Array | None = None) -> Baseline:
    """Search as the public PHAZE program does: from the largest area down, with its early stop.

    Chips of one bucket go from many cores to few, then from wide to narrow, deep to shallow and
    large buffers to small. The public program walks once for each HBM capacity, micro-batch and
    recompute flag and takes the best; here every chip is scored by the fastest of all of those, and
    by a plan that is optimal under this package's model, which favours it.

    Parameters
    ----------
    exact
        Of the chips; a fresh one like it does the work, so that seconds are those of this method.
    areas
        Of each chip in mm2, shape (chips,); by default those of the evaluator.

    References
    ----------
    Wang et al., Integrated Hardware Architecture and Device Placement Search, ICML 2024; public
    code, ``Solver/solver.py``.

    Examples
    --------
    >>> from phaze_fast import models
    >>> few = ArchitectureSpace.tpuv4_area()[:28000:4000]
    >>> pod, step = Cluster(devices=4, fabric="tpuv4-pod"), Training(global_batch=4, micro_batch=1)
    >>> found = early_stop(exact_evaluator(models.load("bertlarge"), few, pod, step))
    >>> found.evaluations, found.group
    (7, 4)
    """
    chips = exact.groups
    area = chips.area_mm2 if areas is None else np.asarray(areas, dtype=float)
    if area.shape != (len(chips),):
        raise InvalidInputError(
            f"areas: shape {area.shape} is not accepted; expected one for each of "
            f"{len(chips)} chips"
        )
    course = Course(exact)
    keys = [-chips.records[name].astype(float) for name in reversed(_ORDER)]
    seen = walk_down(area, course.scores, np.lexsort((-np.arange(len(chips)), *keys)))
    return course.baseline(
        "early_stop",
        "published early stop",
        f"looked at {len(seen)} of {len(chips)} chips, from {area[seen].max():.2f} down to "
        f"{area[seen].min():.2f} mm2",
    )


def check_limits(count: int, time_limit_s: float) -> None:
    """Refuse limits with which nothing can be looked at."""
    if count < 1:
        raise InvalidInputError(f"count: {count!r} is not accepted; expected at least 1")
    if not time_limit_s > 0:
        raise InvalidInputError(
            f"time_limit_s: {time_limit_s!r} is not accepted; expected more than 0"
        )


def random_search(
    exact: ExactEvaluator, count: int, seed: int = 0, time_limit_s: float = math.inf
) -> Baseline:
    """Look at chips drawn at random, none twice.

    Parameters
    ----------
    exact
        Of the chips; a fresh one like it does the work, so that seconds are those of this method.
    count
        At most so many chips.
    seed
        The same seed draws the same chips.
    time_limit_s
        Stop after so many seconds; what is under way is finished.

    Examples
    --------
    >>> from phaze_fast import models
    >>> few = ArchitectureSpace.tpuv4_area()[:28000:4000]
    >>> pod, step = Cluster(devices=4, fabric="tpuv4-pod"), Training(global_batch=4, micro_batch=1)
    >>> exact = exact_evaluator(models.load("bertlarge"), few, pod, step)
    >>> random_search(exact, count=3).evaluations
    3
    """
    check_limits(count, time_limit_s)
    course, total = Course(exact), len(exact.groups)
    drawn = np.random.default_rng(seed).permutation(total)[:count]
    for begin in range(0, len(drawn), _RANDOM_AT_ONCE):
        if course.history and course.seconds >= time_limit_s:
            break
        course.scores(drawn[begin : begin + _RANDOM_AT_ONCE])
    return course.baseline("random", "random search", f"seed {seed}")
