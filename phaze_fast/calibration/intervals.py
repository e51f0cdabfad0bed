"""Intervals of predictions, learnt from the errors of validated runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from phaze_fast.calibration.validation import PredictedRun
from phaze_fast.placement.intervals import NOMINAL, plan_groups

__all__ = ["LEAST_RUNS", "learn_ratios"]

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
            by_group.setdefault(name, []).append(row.run.time_s / row.plan.time_s)
    return {
        name: _ratios(values)
        for name, values in sorted(by_group.items())
        if len(values) >= LEAST_RUNS or name == "all"
    }
