"""Other search methods with the same exact evaluator: early stop, random, Bayesian search."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, not_accepted
from phaze_fast.explore import ChipGroups, ExactEvaluator, Winner, problems_of
from phaze_fast.hardware import (
    PUBLISHED_AREA,
    ArchitectureSpace,
    AreaLimit,
    Cluster,
    area_batch,
    power_batch,
)
from phaze_fast.hardware.space import COLUMNS, with_fields
from phaze_fast.models import Model
from phaze_fast.papers.fixed_plans import Baseline
from phaze_fast.planning import Training
from phaze_fast.tables import Array, needed
from phaze_fast.threads import thread_count

_BUCKET_MM2 = 0.01
"""Chips whose areas differ by less are evaluated together: 10,000 square micrometres."""
_PATIENCE = 5
"""Buckets in a row without a rise in throughput after which the walk stops."""
_ORDER = ("tensor_cores", "vector_cores", "tensor_width", "tensor_depth", "buffer_bytes")
_RANDOM_AT_ONCE = 32
_SUGGESTED_AT_ONCE = 8
_STALE = 1000
"""Suggestions in a row without a new chip after which the Bayesian search stops."""
_NO_CHIP = 1000.0
"""Value of a suggestion that is no chip or on which nothing fits: above any time's logarithm."""
_CAPACITY = "hbm.capacity_bytes"


def exact_evaluator(
    model: Model, space: ArchitectureSpace, cluster: Cluster, training: Training
) -> ExactEvaluator:
    """Create the exact evaluator of a space's chips for one model, on all cores."""
    groups = ChipGroups.of(space)
    problems = problems_of([model], groups, cluster, training)
    return ExactEvaluator(problems, groups, (), thread_count(None))


def _buckets(area_mm2: Array, order: Array) -> list[Array]:
    """Group chips into buckets of area, largest first; within a bucket in the given order."""
    bucket = np.floor(area_mm2 / _BUCKET_MM2).astype(np.int64)[order]
    by_bucket = np.argsort(-bucket, kind="stable")
    borders = np.flatnonzero(np.diff(bucket[by_bucket])) + 1
    return np.split(order[by_bucket], borders)


def _least_buckets(bests: Sequence[float]) -> int:
    """Count the buckets that the rule evaluates at least, given the best throughputs so far."""
    rises = [k for k in range(1, len(bests)) if bests[k] > bests[k - 1]]
    return _PATIENCE + (rises[-1] if rises else 0)


def walk_down(
    area_mm2: Array, scores: Callable[[Array], Array], order: Array | None = None
) -> Array:
    """Walk chips from the largest area down until five buckets in a row bring nothing better.

    The published rule: chips are put into buckets of 0.01 mm2, and buckets are evaluated whole.
    After each, once there were five, the walk ends if among the last five no bucket's best
    throughput is above that of the bucket before it. A bucket in which nothing fits has throughput
    -1, so that five such buckets end the walk too.

    Parameters
    ----------
    area_mm2
        Area of each chip.
    scores
        Returns the scores of chips in seconds, infinite where nothing fits. It is called with
        several buckets at once where the rule evaluates all of them in any case.
    order
        Positions of all chips in the order to take within a bucket; by default 0, 1, 2 and so on.

    Returns
    -------
    numpy.ndarray
        Positions of the evaluated chips, in order.

    Examples
    --------
    >>> areas = np.array([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0])
    >>> times = np.array([2.0, 1.0, 1.0, 3.0, 4.0, 5.0, 0.1])
    >>> walk_down(areas, lambda chips: times[chips]).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    buckets = _buckets(area_mm2, np.arange(len(area_mm2)) if order is None else order)
    bests: list[float] = []
    while len(bests) < min(_least_buckets(bests), len(buckets)):
        some = buckets[len(bests) : _least_buckets(bests)]
        times = scores(np.concatenate(some))
        for part in np.split(times, np.cumsum([len(b) for b in some])[:-1]):
            least = float(part.min())
            bests.append(1.0 / least if least < math.inf else -1.0)
    return np.concatenate(buckets[: len(bests)]) if bests else np.zeros(0, dtype=np.int64)


class _Course:
    """One run of a method with a separate evaluator, so that its time is measured separately."""

    def __init__(self, exact: ExactEvaluator) -> None:
        self.exact = ExactEvaluator(exact.problems, exact.groups, exact.weights, exact.threads)
        self.began = time.monotonic()
        self.best: Winner | None = None
        self.history: list[tuple[int, float, float]] = []

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def scores(self, chips: Array) -> Array:
        """Score chips, and note the best one; of equal scores the first."""
        winners = self.exact.winners(chips)
        for winner in winners:
            if winner is not None and (self.best is None or winner.score < self.best.score):
                self.best = winner
        score = math.inf if self.best is None else self.best.score
        self.history.append((self.exact.evaluations, self.seconds, score))
        return np.array([math.inf if w is None else w.score for w in winners])

    def baseline(self, key: str, title: str, note: str) -> Baseline:
        """Describe the best chip of the run."""
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


def early_stop(exact: ExactEvaluator) -> Baseline:
    """Search as the public PHAZE program does: from the largest area down, with its early stop.

    Chips of one bucket go from many cores to few, then from wide to narrow, deep to shallow and
    large buffers to small. The public program walks once for each HBM capacity, micro-batch and
    recompute flag and takes the best; here every chip is scored by the fastest of all of those, and
    by a plan that is optimal under this package's model, which favours the published program.

    Parameters
    ----------
    exact
        Evaluator of the chips; the method uses a fresh copy, so that its time is its own.

    References
    ----------
    Wang et al., Integrated Hardware Architecture and Device Placement Search, ICML 2024; public
    code, ``Solver/solver.py``.

    Examples
    --------
    >>> from phaze_fast import models
    >>> few = ArchitectureSpace.tpuv4_area()[:28000:4000]
    >>> pod, step = Cluster(devices=4, fabric="tpuv4-pod"), Training(global_batch=4, micro_batch=1)
    >>> best = early_stop(exact_evaluator(models.load("bertlarge"), few, pod, step))
    >>> best.evaluations, best.group
    (7, 4)
    """
    chips, area, course = exact.groups, exact.groups.area_mm2, _Course(exact)
    keys = [-chips.records[name].astype(float) for name in reversed(_ORDER)]
    seen = walk_down(area, course.scores, np.lexsort((-np.arange(len(chips)), *keys)))
    return course.baseline(
        "early_stop",
        "published early stop",
        f"looked at {len(seen)} of {len(chips)} chips, from {area[seen].max():.2f} down to "
        f"{area[seen].min():.2f} mm2",
    )


def _check_limits(count: int, time_limit_s: float) -> None:
    """Raise InvalidInputError where the limits allow no evaluation."""
    if count < 1:
        raise not_accepted("count", count, "at least 1")
    if not time_limit_s > 0:
        raise not_accepted("time_limit_s", time_limit_s, "more than 0")


def random_search(
    exact: ExactEvaluator, count: int, seed: int = 0, time_limit_s: float = math.inf
) -> Baseline:
    """Evaluate chips drawn at random, none twice.

    Parameters
    ----------
    exact
        Evaluator of the chips; the method uses a fresh copy, so that its time is its own.
    count
        Largest number of chips.
    seed
        The same seed draws the same chips.
    time_limit_s
        Stop after so many seconds, at the end of a batch.

    Examples
    --------
    >>> from phaze_fast import models
    >>> few = ArchitectureSpace.tpuv4_area()[:28000:4000]
    >>> pod, step = Cluster(devices=4, fabric="tpuv4-pod"), Training(global_batch=4, micro_batch=1)
    >>> exact = exact_evaluator(models.load("bertlarge"), few, pod, step)
    >>> random_search(exact, count=3).evaluations
    3
    """
    _check_limits(count, time_limit_s)
    course, total = _Course(exact), len(exact.groups)
    drawn = np.random.default_rng(seed).permutation(total)[:count]
    for begin in range(0, len(drawn), _RANDOM_AT_ONCE):
        if course.history and course.seconds >= time_limit_s:
            break
        course.scores(drawn[begin : begin + _RANDOM_AT_ONCE])
    return course.baseline("random", "random search", f"seed {seed}")


# ---- Bayesian search ----


class _Axes:
    """The axes of a space for an optimiser: each a range of steps along its rising values."""

    def __init__(self, space: ArchitectureSpace, chips: ChipGroups) -> None:
        self.spec = space.spec
        self.axes = {
            field: tuple(sorted(values))
            for field, values in space.spec.axes.items()
            if field != _CAPACITY and len(values) > 1
        }
        columns = [chips.records[COLUMNS[field]] for field in self.axes]
        points = zip(*(c.astype(float).tolist() for c in columns), strict=True)
        self._group = {point: chip for chip, point in enumerate(points)}
        if not self.axes or len(self._group) != len(chips):
            raise InvalidInputError(
                f"space: its axes tell {len(self._group)} of {len(chips)} chips apart; "
                "expected the space that the evaluator's chips are of, with an axis of two values"
            )

    def chip(self, steps: Sequence[int]) -> int | None:
        values = zip(self.axes.values(), steps, strict=True)
        return self._group.get(tuple(float(axis[step]) for axis, step in values))

    def off(self, steps: Sequence[int]) -> float:
        """How far a grid point is outside the limits of area and power, as a fraction of them."""
        limits = zip(self.axes.items(), steps, strict=True)
        varied = {field: values[step] for (field, values), step in limits}
        whole = {f: int(v) if float(v).is_integer() else v for f, v in varied.items()}
        tied = {f: whole[source] for f, source in self.spec.ties.items() if source in whole}
        chip = with_fields(self.spec.like, {**whole, **tied}, self.spec.name)
        limit = self.spec.area or AreaLimit(max_mm2=1e300, terms=PUBLISHED_AREA)
        area = float(area_batch([chip], limit.terms)["total_mm2"][0])
        below = limit.min_fraction * limit.max_mm2
        off = max(0.0, area - limit.max_mm2, below - area) / limit.max_mm2
        if self.spec.max_power_w is not None:
            power = float(power_batch([chip], terms=limit.terms)[0])
            off += max(0.0, power / self.spec.max_power_w - 1.0)
        return off


@contextlib.contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Silence the log of Optuna, and restore its level afterwards."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def bayesian(
    exact: ExactEvaluator,
    space: ArchitectureSpace,
    count: int,
    seed: int = 0,
    time_limit_s: float = math.inf,
) -> Baseline:
    """Search by Bayesian optimisation: Optuna's tree-structured Parzen estimators over the axes.

    This stands for Spotlight's method, which searches chips and schedules by Bayesian optimisation
    with domain-aware features; here schedules and plans are exact, and only chips are suggested.
    Each axis is a range of steps along its rising values, so that powers of two are evenly spaced.
    A suggestion that is no chip of the space gets a value above that of any chip, which rises with
    the distance of its area (and power, where limited) from the limits; it does not count as an
    evaluation, nor does a chip that was evaluated before. HBM capacity is no axis: a chip is scored
    with its best.

    Parameters
    ----------
    exact
        Evaluator of the chips; the method uses a fresh copy, so that its time is its own.
    space
        The space of the chips.
    count
        Largest number of chips.
    seed
        The same seed makes the same suggestions.
    time_limit_s
        Stop after so many seconds, at the end of a batch.

    Raises
    ------
    MissingExtraError
        Where Optuna is not installed.

    References
    ----------
    Sakhuja et al., Spotlight: Leveraging Domain-Aware Features for Bayesian Co-Search, HPCA 2023;
    Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011.
    """
    _check_limits(count, time_limit_s)
    optuna = needed("optuna", "opt", "Bayesian search")
    axes, course = _Axes(space, exact.groups), _Course(exact)
    suggestions, stale, count = 0, 0, min(count, len(exact.groups))
    with _quiet(optuna):
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        )
        while (before := course.exact.evaluations) < count:
            if before and course.seconds >= time_limit_s:
                break
            at_once = min(_SUGGESTED_AT_ONCE, count - before)
            suggestions += _suggested(study, axes, course, at_once)
            stale = 0 if course.exact.evaluations > before else stale + at_once
            if stale >= _STALE:
                break
    note = (
        f"seed {seed}, {suggestions} suggestions of which {course.exact.evaluations} were new chips"
    )
    if stale >= _STALE:
        note += f"; stopped as the last {stale} brought none"
    return course.baseline("bayesian", "Bayesian search (Optuna TPE)", note)


def _suggested(study: Any, axes: _Axes, course: _Course, at_once: int) -> int:
    """Score a batch of suggestions and tell them to the study; return their number."""
    trials = [study.ask() for _ in range(at_once)]
    steps = [
        [t.suggest_int(field, 0, len(values) - 1) for field, values in axes.axes.items()]
        for t in trials
    ]
    chips = [axes.chip(s) for s in steps]
    existing = np.array([chip for chip in chips if chip is not None], dtype=np.int64)
    scores = iter(course.scores(existing).tolist() if len(existing) else [])
    for trial, chip, step in zip(trials, chips, steps, strict=True):
        score = math.inf if chip is None else next(scores)
        value = math.log(score) if score < math.inf else _NO_CHIP
        study.tell(trial, value + axes.off(step) if chip is None else value)
    return len(trials)
