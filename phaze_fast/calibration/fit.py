"""Least-squares fits of a few positive constants, with cross-validation and intervals.

Errors are logarithms of predicted over measured seconds; large ones count by their size rather than
their square, so that no single row decides a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Constant", "FitResult", "cross_validated_errors", "fit_constants"]

Array = np.ndarray[Any, Any]
LogErrors = Callable[[Array], Array]
"""Values of the constants to ln(predicted / measured) of every row."""

_STEP = 2e-3  # of a logarithm, for derivatives
_SMALL = 0.08  # larger errors count by their size
_ROUNDS = 40
_COLLINEAR = 0.98  # correlation from which two constants cannot be told apart


@dataclass(frozen=True)
class Constant:
    """One constant to be fitted, more than zero."""

    name: str
    start: float
    """Where the search begins, in its unit."""
    least: float
    most: float


@dataclass(frozen=True)
class FitResult:
    """Fitted constants and how well the rows determine them."""

    names: tuple[str, ...]
    values: Array
    """Fitted values, each in its own unit."""
    low: Array
    """Lower ends of 90% intervals; equal to `least` where the rows say nothing."""
    high: Array
    """Upper ends of 90% intervals."""
    at_bound: tuple[str, ...]
    """Constants that ended at a bound of their range."""
    undetermined: tuple[str, ...]
    """Constants that no row depends on: they stay where they began."""
    collinear: tuple[tuple[str, str], ...]
    """Pairs that the rows cannot tell apart."""
    errors: Array
    """ln(predicted / measured) of every row at `values`."""


def _weights(errors: Array) -> Array:
    return np.minimum(1.0, _SMALL / np.maximum(np.abs(errors), 1e-12))


def _loss(errors: Array) -> float:
    size = np.abs(errors)
    return float(np.where(size < _SMALL, 0.5 * size**2, _SMALL * (size - 0.5 * _SMALL)).sum())


def _derivatives(log_errors: LogErrors, point: Array, low: Array, high: Array) -> Array:
    columns = []
    for i in range(len(point)):
        up, down = point.copy(), point.copy()
        up[i] = min(point[i] + _STEP, high[i])
        down[i] = max(point[i] - _STEP, low[i])
        apart = up[i] - down[i]
        change = log_errors(np.exp(up)) - log_errors(np.exp(down))
        columns.append(change / apart if apart > 0 else np.zeros_like(change))
    return np.stack(columns, axis=1)


def _descend(
    log_errors: LogErrors, point: Array, low: Array, high: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """Levenberg and Marquardt's method on logarithms, inside a box."""
    errors = log_errors(np.exp(point))
    loss, damping = _loss(errors * weights), 1e-2
    slopes = _derivatives(log_errors, point, low, high)
    for _ in range(_ROUNDS):
        scale = _weights(errors) * weights**2
        normal = slopes.T @ (slopes * scale[:, None])
        gradient = slopes.T @ (errors * scale)
        better = False
        for _ in range(8):
            ridge = damping * (np.diag(normal) + 1e-9 * max(float(np.trace(normal)), 1e-12))
            step = np.linalg.solve(normal + np.diag(ridge), -gradient)
            tried = np.clip(point + np.clip(step, -0.5, 0.5), low, high)
            found = log_errors(np.exp(tried))
            if np.isfinite(found).all() and _loss(found * weights) < loss * (1.0 - 1e-6):
                better = True
                break
            damping = min(damping * 4.0, 1e8)
        if not better:
            break
        gained = loss - _loss(found * weights)
        point, errors, loss = tried, found, _loss(found * weights)
        damping = max(damping / 5.0, 1e-6)
        if gained < 1e-5 * loss:
            break
        slopes = _derivatives(log_errors, point, low, high)
    return point, errors, slopes


def fit_constants(
    log_errors: LogErrors, constants: Sequence[Constant], row_weights: Array | None = None
) -> FitResult:
    """Fit constants to rows.

    Parameters
    ----------
    log_errors
        Gives ln(predicted / measured) of every row for values of the constants.
    constants
        What to fit, from where and within which range.
    row_weights
        How much each row counts; all alike by default.

    Examples
    --------
    >>> import numpy as np
    >>> size = np.array([1.0, 2.0, 4.0, 8.0])
    >>> measured = 3.0 + 2.0 * size
    >>> wanted = [Constant("start", 1.0, 0.1, 10.0), Constant("rate", 1.0, 0.1, 10.0)]
    >>> fit = fit_constants(lambda x: np.log((x[0] + x[1] * size) / measured), wanted)
    >>> fit.values.round(3).tolist()
    [3.0, 2.0]
    """
    low, high = (np.log([getattr(c, end) for c in constants]) for end in ("least", "most"))
    point = np.clip(np.log([c.start for c in constants]), low, high)
    rows = len(log_errors(np.exp(point)))
    weights = np.ones(rows) if row_weights is None else row_weights / row_weights.mean()
    point, errors, slopes = _descend(log_errors, point, low, high, weights)
    names = tuple(c.name for c in constants)
    scale = _weights(errors) * weights
    normal = slopes.T @ (slopes * scale[:, None])
    known = np.diag(normal) > 1e-9 * rows
    spread = np.full(len(names), np.inf)
    pairs: list[tuple[str, str]] = []
    if known.any():
        covariance = np.linalg.pinv(normal[np.ix_(known, known)])
        freedom = max(rows - int(known.sum()), 1)
        noise = float((scale * errors**2).sum()) / freedom
        deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
        spread[known] = 1.645 * np.sqrt(noise) * deviation
        alike = np.abs(covariance / np.outer(deviation, deviation))
        at = np.flatnonzero(known)
        pairs = [
            (names[at[i]], names[at[j]])
            for i in range(len(at))
            for j in range(i)
            if alike[i, j] > _COLLINEAR
        ]
    edge = (point - low < 1e-6) | (high - point < 1e-6)
    return FitResult(
        names=names,
        values=np.exp(point),
        low=np.exp(np.maximum(point - spread, low)),
        high=np.exp(np.minimum(point + spread, high)),
        at_bound=tuple(n for n, e, k in zip(names, edge, known, strict=True) if e and k),
        undetermined=tuple(n for n, k in zip(names, known, strict=True) if not k),
        collinear=tuple(pairs),
        errors=errors,
    )


def _kept(
    log_errors: LogErrors, constants: Sequence[Constant], keep: Array, weights: Array
) -> Array:
    """Constants fitted to some rows."""

    def of_kept(values: Array) -> Array:
        found: Array = log_errors(values)[keep]
        return found

    return fit_constants(of_kept, constants, weights[keep]).values


def cross_validated_errors(
    log_errors: LogErrors,
    constants: Sequence[Constant],
    folds: int = 5,
    row_weights: Array | None = None,
) -> Array:
    """Give ln(predicted / measured) of every row by fits that have not seen it.

    Rows are dealt to the folds in turn, in a fixed random order.
    """
    first = log_errors(np.array([c.start for c in constants]))
    fold = np.random.default_rng(0).permutation(len(first)) % folds
    weights = np.ones(len(first)) if row_weights is None else row_weights
    unseen = np.empty(len(first))
    for out in range(folds):
        keep = fold != out
        unseen[~keep] = log_errors(_kept(log_errors, constants, keep, weights))[~keep]
    return unseen
