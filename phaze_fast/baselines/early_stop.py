"""Takes a judge of dies, gives what other methods of search find with the same cost model.

The published early stop, random search, and Bayesian optimisation; `fixed_plans` has the plans that
people write by hand, on the chip that is given.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.dies import Dies
from phaze_fast.explore.fixed_plans import (
    HAND_PLANS,
    Baseline,
    hand_plan,
    megatron_plan,
    our_plan,
)
from phaze_fast.explore.judge import Judge
from phaze_fast.explore.search import questions_of
from phaze_fast.explore.searcher import Winner
from phaze_fast.hardware import PUBLISHED_AREA, ArchitectureSpace, AreaLimit, Cluster
from phaze_fast.hardware.silicon import area_batch, power_batch
from phaze_fast.hardware.space_spec import COLUMNS, with_fields
from phaze_fast.models import TransformerModel
from phaze_fast.placement import Training
from phaze_fast.runs.executors import needed

__all__ = [
    "HAND_PLANS",
    "Baseline",
    "bayesian",
    "early_stop",
    "hand_plan",
    "judge_of",
    "megatron_plan",
    "our_plan",
    "random_search",
    "walk_down",
]

Array = np.ndarray[Any, Any]

BUCKET_MM2 = 0.01
"""Chips whose areas differ by less are looked at together: 10,000 square micrometres."""
PATIENCE = 5
"""Buckets in a row without a rise after which the walk stops."""
_ORDER = ("tensor_cores", "vector_cores", "tensor_width", "tensor_depth", "buffer_bytes")
_CAPACITY = "hbm.capacity_bytes"
_RANDOM_AT_ONCE = 32
_SUGGESTED_AT_ONCE = 8
_STALE = 1000
"""Suggestions in a row that are no new die, after which nothing new is expected."""
_NO_CHIP = 1000.0
"""Above the logarithm of any time: what a suggestion costs that is no chip, or fits nothing."""


def judge_of(
    models: TransformerModel | Sequence[TransformerModel],
    space: ArchitectureSpace,
    cluster: Cluster,
    training: Training,
    weights: Sequence[float] = (),
    threads: int = 1,
) -> Judge:
    """Give the judge of a space's dies for one model or several, all trained alike."""
    dies = Dies.of(space)
    several = [models] if isinstance(models, TransformerModel) else list(models)
    return Judge(questions_of(several, dies, cluster, training), dies, weights, threads)


def _buckets(area_mm2: Array, order: Array) -> list[Array]:
    """Dies by bucket of area, largest first; in a bucket they keep the given order."""
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


class _Course:
    """One method at work: a judge of its own, so that its seconds are its own, and the best."""

    def __init__(self, judge: Judge) -> None:
        self.judge = Judge(judge.questions, judge.dies, judge.weights, judge.threads)
        self.began = time.monotonic()
        self.best: Winner | None = None
        self.history: list[tuple[int, float, float]] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def scores(self, dies: Array) -> Array:
        """Score dies, and note the best; of equal ones the first."""
        winners = self.judge.winners(dies)
        for winner in winners:
            if winner is not None and (self.best is None or winner.score < self.best.score):
                self.best = winner
        score = math.inf if self.best is None else self.best.score
        self.history.append((self.judge.evaluations, self.seconds, score))
        return np.array([math.inf if w is None else w.score for w in winners])

    def baseline(self, key: str, title: str, note: str) -> Baseline:
        best, many = self.best, self.judge.evaluations
        if best is None:
            note = f"none of the {many} dies it looked at fits; {note}"
        return Baseline(
            key=key,
            title=title,
            die=None if best is None else best.die,
            winner=best,
            score=math.inf if best is None else best.score,
            evaluations=many,
            seconds=self.seconds,
            history=tuple(self.history),
            note=note,
        )


def early_stop(judge: Judge, areas: Array | None = None) -> Baseline:
    """Search as the public PHAZE program does: from the largest area down, with its early stop.

    Chips of one bucket go from many cores to few, then from wide to narrow, deep to shallow and
    large buffers to small. The public program walks once for each HBM capacity, micro-batch and
    recompute flag and takes the best; here every chip is judged by the fastest of all of those, and
    by a plan that is optimal under this package's model, which is kinder to it.

    Parameters
    ----------
    judge
        Of the dies; a fresh one like it does the work, so that seconds are those of this method.
    areas
        Of each die in mm2, shape (dies,); by default those of the judge.

    References
    ----------
    Wang et al., Integrated Hardware Architecture and Device Placement Search, ICML 2024; public
    code, ``Solver/solver.py``.

    Examples
    --------
    >>> from phaze_fast import models
    >>> few = ArchitectureSpace.tpuv4_area()[:28000:4000]
    >>> pod, step = Cluster(devices=4, fabric="tpuv4-pod"), Training(global_batch=4, microbatch=1)
    >>> found = early_stop(judge_of(models.load("bertlarge"), few, pod, step))
    >>> found.evaluations, found.die
    (7, 4)
    """
    dies = judge.dies
    area = dies.area_mm2 if areas is None else np.asarray(areas, dtype=float)
    if area.shape != (len(dies),):
        raise InvalidInputError(
            f"areas: shape {area.shape} is not accepted; expected one for each of {len(dies)} dies"
        )
    course = _Course(judge)
    keys = [-dies.records[name].astype(float) for name in reversed(_ORDER)]
    seen = walk_down(area, course.scores, np.lexsort((-np.arange(len(dies)), *keys)))
    return course.baseline(
        "early_stop",
        "published early stop",
        f"looked at {len(seen)} of {len(dies)} dies, from {area[seen].max():.2f} down to "
        f"{area[seen].min():.2f} mm2",
    )


def _check_limits(count: int, time_limit_s: float) -> None:
    if count < 1:
        raise InvalidInputError(f"count: {count!r} is not accepted; expected at least 1")
    if not time_limit_s > 0:
        raise InvalidInputError(
            f"time_limit_s: {time_limit_s!r} is not accepted; expected more than 0"
        )


def random_search(
    judge: Judge, count: int, seed: int = 0, time_limit_s: float = math.inf
) -> Baseline:
    """Look at dies drawn at random, none twice.

    Parameters
    ----------
    judge
        Of the dies; a fresh one like it does the work, so that seconds are those of this method.
    count
        At most so many dies.
    seed
        The same seed draws the same dies.
    time_limit_s
        Stop after so many seconds; what is under way is finished.

    Examples
    --------
    >>> from phaze_fast import models
    >>> few = ArchitectureSpace.tpuv4_area()[:28000:4000]
    >>> pod, step = Cluster(devices=4, fabric="tpuv4-pod"), Training(global_batch=4, microbatch=1)
    >>> random_search(judge_of(models.load("bertlarge"), few, pod, step), count=3).evaluations
    3
    """
    _check_limits(count, time_limit_s)
    course, total = _Course(judge), len(judge.dies)
    drawn = np.random.default_rng(seed).permutation(total)[:count]
    for begin in range(0, len(drawn), _RANDOM_AT_ONCE):
        if course.history and course.seconds >= time_limit_s:
            break
        course.scores(drawn[begin : begin + _RANDOM_AT_ONCE])
    return course.baseline("random", "random search", f"seed {seed}")


class _Axes:
    """The axes of a space as an optimiser sees them: steps along rising values."""

    def __init__(self, space: ArchitectureSpace, dies: Dies) -> None:
        self.spec = space.spec
        self.axes = {
            field: tuple(sorted(values))
            for field, values in space.spec.axes.items()
            if field != _CAPACITY and len(values) > 1
        }
        columns = [dies.records[COLUMNS[field]] for field in self.axes]
        points = zip(*(c.astype(float).tolist() for c in columns), strict=True)
        self._die = {point: die for die, point in enumerate(points)}
        if not self.axes or len(self._die) != len(dies):
            raise InvalidInputError(
                f"space: its axes tell {len(self._die)} dies apart, and the judge has {len(dies)}; "
                "expected the space that the judge's dies are of, with an axis of two values"
            )

    def die(self, steps: Sequence[int]) -> int | None:
        values = zip(self.axes.values(), steps, strict=True)
        return self._die.get(tuple(float(axis[step]) for axis, step in values))

    def off(self, steps: Sequence[int]) -> float:
        """How far a point of the grid is outside the limits, as a share of them."""
        limits = zip(self.axes.items(), steps, strict=True)
        varied = {field: values[step] for (field, values), step in limits}
        whole = {f: int(v) if float(v).is_integer() else v for f, v in varied.items()}
        tied = {f: whole[source] for f, source in self.spec.ties.items() if source in whole}
        chip = with_fields(self.spec.base, {**whole, **tied}, self.spec.name)
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
    """Let the library say nothing, and what it said before again afterwards."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def bayesian(
    judge: Judge,
    space: ArchitectureSpace,
    count: int,
    seed: int = 0,
    time_limit_s: float = math.inf,
) -> Baseline:
    """Search by Bayesian optimisation: Optuna's tree-structured Parzen estimators over the axes.

    Stands for Spotlight's method, which searches chips and schedules by Bayesian optimisation with
    features that know the domain; here schedules and plans are exact already, and chips are what
    is left. Each axis is given as steps along its rising values, so that powers of two are evenly
    spaced. A suggestion that is no chip of the space is told as worse than any chip, in proportion
    to how far its area (and power, where limited) is off, and does not count as an evaluation; nor
    does a die that was seen before. HBM capacity is no axis: a die is judged by its best.

    Parameters
    ----------
    judge
        Of the dies; a fresh one like it does the work, so that seconds are those of this method.
    space
        That the dies are of.
    count
        At most so many dies.
    seed
        The same seed makes the same suggestions.
    time_limit_s
        Stop after so many seconds; what is under way is finished.

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
    axes, course = _Axes(space, judge.dies), _Course(judge)
    told, stale, count = 0, 0, min(count, len(judge.dies))
    with _quiet(optuna):
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        )
        while (before := course.judge.evaluations) < count:
            if before and course.seconds >= time_limit_s:
                break
            at_once = min(_SUGGESTED_AT_ONCE, count - before)
            told += _suggested(study, axes, course, at_once)
            stale = 0 if course.judge.evaluations > before else stale + at_once
            if stale >= _STALE:
                break
    note = f"seed {seed}, {told} suggestions of which {course.judge.evaluations} were new dies"
    if stale >= _STALE:
        note += f"; stopped as the last {stale} brought none"
    return course.baseline("bayesian", "Bayesian search (Optuna TPE)", note)


def _suggested(study: Any, axes: _Axes, course: _Course, at_once: int) -> int:
    """Ask for a few suggestions, score those that are dies, and tell all; how many there were."""
    trials = [study.ask() for _ in range(at_once)]
    steps = [
        [t.suggest_int(field, 0, len(values) - 1) for field, values in axes.axes.items()]
        for t in trials
    ]
    dies = [axes.die(s) for s in steps]
    asked = np.array([d for d in dies if d is not None], dtype=np.int64)
    scores = iter(course.scores(asked).tolist() if len(asked) else [])
    for trial, die, step in zip(trials, dies, steps, strict=True):
        score = math.inf if die is None else next(scores)
        value = math.log(score) if score < math.inf else _NO_CHIP
        study.tell(trial, value + axes.off(step) if die is None else value)
    return len(trials)
