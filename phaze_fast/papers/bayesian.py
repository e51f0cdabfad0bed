"""Bayesian search over chips by Optuna, standing for Spotlight's method."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.exact import ExactEvaluator
from phaze_fast.hardware import PUBLISHED_AREA, ArchitectureSpace, AreaLimit
from phaze_fast.hardware.silicon import area_batch, power_batch
from phaze_fast.hardware.space_spec import COLUMNS, with_fields
from phaze_fast.papers.early_stop import Course, check_limits
from phaze_fast.papers.fixed_plans import Baseline
from phaze_fast.tables import needed

__all__ = ["bayesian"]

_CAPACITY = "hbm.capacity_bytes"
_SUGGESTED_AT_ONCE = 8
_STALE = 1000
"""Suggestions in a row that are no new chip, after which nothing new is expected."""
_NO_CHIP = 1000.0
"""Above the logarithm of any time: what a suggestion costs that is no chip, or fits nothing."""


class _Axes:
    """The axes of a space as an optimiser sees them: steps along rising values."""

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
    exact: ExactEvaluator,
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
    does a chip that was seen before. HBM capacity is no axis: a chip is scored by its best.

    Parameters
    ----------
    exact
        Of the chips; a fresh one like it does the work, so that seconds are those of this method.
    space
        That the chips are of.
    count
        At most so many chips.
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
    check_limits(count, time_limit_s)
    optuna = needed("optuna", "opt", "Bayesian search")
    axes, course = _Axes(space, exact.groups), Course(exact)
    told, stale, count = 0, 0, min(count, len(exact.groups))
    with _quiet(optuna):
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        )
        while (before := course.exact.evaluations) < count:
            if before and course.seconds >= time_limit_s:
                break
            at_once = min(_SUGGESTED_AT_ONCE, count - before)
            told += _suggested(study, axes, course, at_once)
            stale = 0 if course.exact.evaluations > before else stale + at_once
            if stale >= _STALE:
                break
    note = f"seed {seed}, {told} suggestions of which {course.exact.evaluations} were new chips"
    if stale >= _STALE:
        note += f"; stopped as the last {stale} brought none"
    return course.baseline("bayesian", "Bayesian search (Optuna TPE)", note)


def _suggested(study: Any, axes: _Axes, course: Course, at_once: int) -> int:
    """Ask for a few suggestions, score those that are chips, and tell all; how many there were."""
    trials = [study.ask() for _ in range(at_once)]
    steps = [
        [t.suggest_int(field, 0, len(values) - 1) for field, values in axes.axes.items()]
        for t in trials
    ]
    chips = [axes.chip(s) for s in steps]
    asked = np.array([d for d in chips if d is not None], dtype=np.int64)
    scores = iter(course.scores(asked).tolist() if len(asked) else [])
    for trial, chip, step in zip(trials, chips, steps, strict=True):
        score = math.inf if chip is None else next(scores)
        value = math.log(score) if score < math.inf else _NO_CHIP
        study.tell(trial, value + axes.off(step) if chip is None else value)
    return len(trials)
