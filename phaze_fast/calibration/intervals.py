"""Intervals of predictions, learnt from the errors of validated runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from phaze_fast.calibration.validation import PredictedRun
from phaze_fast.planning.plans import NOMINAL, plan_groups

__all__ = ["LEAST_RUNS", "held_out_coverage", "learn_ratios"]

LEAST_RUNS = 18
"""A group of fewer runs is not told apart from the larger one that it belongs to."""


def _ratios(values: list[float]) -> list[float]:
    """Bounds of measured over predicted seconds that cover a new run in `NOMINAL` of cases.

    The order statistics are those of conformal prediction, which allow for the few runs that were
    seen: of n runs the k-th smallest with k = (n + 1) (1 - NOMINAL) / 2, rounded outwards.
    """
    ordered = np.sort(np.array(values))
    rank = (len(ordered) + 1) * (1.0 - NOMINAL) / 2.0
    below = max(math.floor(rank), 1) - 1
    return [float(f"{ordered[below]:.4g}"), float(f"{ordered[-1 - below]:.4g}")]


def learn_ratios(rows: Iterable[PredictedRun]) -> Mapping[str, list[float]]:
    """Learn bounds of measured over predicted seconds, by group.

    Examples
    --------
    >>> learn_ratios([])
    {}
    """
    by_group: dict[str, list[float]] = {}
    for row in rows:
        for name in plan_groups(row.plan, row.run.cluster):
            by_group.setdefault(name, []).append(row.run.time_s / row.time_s)
    return {
        name: _ratios(values)
        for name, values in sorted(by_group.items())
        if len(values) >= LEAST_RUNS or name == "all"
    }


def held_out_coverage(rows: Sequence[PredictedRun], folds: int = 5) -> Mapping[str, float]:
    """Share of the measured steps of each source inside intervals that were learnt without them.

    Every so many-th run is left out in turn, and judged by the intervals of the others.

    Examples
    --------
    >>> held_out_coverage([])
    {}
    """
    inside: dict[str, list[bool]] = {}
    for fold in range(folds):
        known = learn_ratios(row for k, row in enumerate(rows) if k % folds != fold)
        for row in rows[fold::folds]:
            names = plan_groups(row.plan, row.run.cluster)
            low, high = next(known[name] for name in names if name in known)
            ratio = row.run.time_s / row.time_s
            inside.setdefault(row.run.source, []).append(low <= ratio <= high)
    return {source: sum(found) / len(found) for source, found in inside.items()}
