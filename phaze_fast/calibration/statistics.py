"""How far predictions are from measurements: sizes of errors, order, and what a choice costs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from phaze_fast.cost.validation import ErrorSizes

__all__ = ["ErrorSummary", "pick_regret", "rank_correlation", "summarise"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ErrorSummary(ErrorSizes):
    """Errors of predictions of runs, and whether their order is right."""

    rank_correlation: float | None
    """Spearman's, of predicted and measured; none of fewer than three rows or where all agree."""

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return asdict(self)


def _ranks(values: Array) -> Array:
    """Ranks from 1 up; equal values share the mean of theirs."""
    order = np.argsort(values, kind="stable")
    _, inverse, counts = np.unique(values[order], return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    found = np.empty(len(values))
    found[order] = (last - (counts - 1) / 2.0)[inverse]
    return found


def rank_correlation(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Spearman's rank correlation; none where it is not defined.

    Examples
    --------
    >>> rank_correlation([1.0, 2.0, 4.0], [10.0, 20.0, 30.0])
    1.0
    """
    x, y = np.asarray(measured, dtype=float), np.asarray(predicted, dtype=float)
    if len(x) < 3:
        return None
    x, y = _ranks(x), _ranks(y)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return None if size == 0.0 else round(float((x * y).sum()) / size, 12)


def summarise(measured: Sequence[float], predicted: Sequence[float]) -> ErrorSummary:
    """Sum up relative errors.

    Parameters
    ----------
    measured, predicted
        Of one length, at least one; measured values are greater than 0.

    Examples
    --------
    >>> found = summarise([1.0, 2.0], [1.1, 1.8])
    >>> round(found.mean_abs_err, 3), round(found.bias, 3)
    (0.1, 0.0)
    """
    x, y = np.asarray(measured, dtype=float), np.asarray(predicted, dtype=float)
    return ErrorSummary(
        **ErrorSizes.sizes(x, y), rank_correlation=rank_correlation(measured, predicted)
    )


def pick_regret(rows: Iterable[tuple[Hashable, float, float]]) -> Mapping[str, float | int] | None:
    """Tell what it costs to run the plan that is predicted to be fastest.

    Parameters
    ----------
    rows
        (what is asked, measured seconds, predicted seconds); rows that ask the same are
        alternatives.

    Returns
    -------
    mapping or None
        ``groups`` of two or more alternatives, ``mean`` and ``max`` of the seconds lost relative to
        the fastest measured; none where nothing has an alternative.

    Examples
    --------
    >>> pick_regret([("a", 1.0, 3.0), ("a", 1.2, 2.0), ("b", 1.0, 1.0)])["groups"]
    1
    """
    asked: dict[Hashable, list[tuple[float, float]]] = {}
    for key, measured, predicted in rows:
        asked.setdefault(key, []).append((predicted, measured))
    lost = [
        min(options)[1] / min(measured for _, measured in options) - 1.0
        for options in asked.values()
        if len(options) > 1
    ]
    if not lost:
        return None
    return {"groups": len(lost), "mean": float(np.mean(lost)), "max": float(max(lost))}
