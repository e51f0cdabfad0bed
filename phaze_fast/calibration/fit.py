"""Least-squares fits of a few positive constants, with cross-validation and intervals.

Errors are logarithms of predicted over measured seconds. Large errors count by their size rather
than their square (Huber's loss), so that no single row decides a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError

Array = np.ndarray[Any, Any]
LogErrors = Callable[[Array], Array]
"""Function of the constants' values that returns ln(predicted / measured) of every row."""

_STEP = 2e-3  # of a logarithm, for derivatives
_SMALL = 0.08  # larger errors count by their size
_ROUNDS = 40
_COLLINEAR = 0.98  # correlation from which two constants cannot be distinguished
_ROWS_PER_CONSTANT = 2.0


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
    """Lower ends of 90% intervals; equal to `least` where no row depends on a constant."""
    high: Array
    """Upper ends of 90% intervals."""
    at_bound: tuple[str, ...]
    """Constants that ended at a bound of their range."""
    undetermined: tuple[str, ...]
    """Constants that no row depends on: they stay where they began."""
    collinear: tuple[tuple[str, str], ...]
    """Pairs of constants that the rows cannot distinguish."""
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
    log_errors: LogErrors, point: Array, low: Array, high: Array
) -> tuple[Array, Array, Array]:
    """Levenberg and Marquardt's method on logarithms of the constants, inside a box."""
    errors = log_errors(np.exp(point))
    loss, damping = _loss(errors), 1e-2
    slopes = _derivatives(log_errors, point, low, high)
    for _ in range(_ROUNDS):
        scale = _weights(errors)
        normal = slopes.T @ (slopes * scale[:, None])
        gradient = slopes.T @ (errors * scale)
        better = False
        for _ in range(8):
            ridge = damping * (np.diag(normal) + 1e-9 * max(float(np.trace(normal)), 1e-12))
            step = np.linalg.solve(normal + np.diag(ridge), -gradient)
            next_point = np.clip(point + np.clip(step, -0.5, 0.5), low, high)
            next_errors = log_errors(np.exp(next_point))
            next_loss = _loss(next_errors)
            if np.isfinite(next_errors).all() and next_loss < loss * (1.0 - 1e-6):
                better = True
                break
            damping = min(damping * 4.0, 1e8)
        if not better:
            break
        gained = loss - next_loss
        point, errors, loss = next_point, next_errors, next_loss
        damping = max(damping / 5.0, 1e-6)
        if gained < 1e-5 * loss:
            break
        slopes = _derivatives(log_errors, point, low, high)
    return point, errors, slopes


def fit_constants(log_errors: LogErrors, constants: Sequence[Constant]) -> FitResult:
    """Fit constants to rows.

    Parameters
    ----------
    log_errors
        Returns ln(predicted / measured) of every row for values of the constants.
    constants
        What to fit, from where and within which range.

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
    point, errors, slopes = _descend(log_errors, point, low, high)
    names, rows = tuple(c.name for c in constants), len(errors)
    scale = _weights(errors)
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


def cross_validated_errors(
    log_errors: LogErrors, constants: Sequence[Constant], folds: int = 5
) -> Array:
    """Return ln(predicted / measured) of every row by a fit to the rows of the other folds.

    Rows are assigned to the folds in turn, in a fixed random order.
    """
    first = log_errors(np.array([c.start for c in constants]))
    fold = np.random.default_rng(0).permutation(len(first)) % folds
    unseen = np.empty(len(first))

    def seen_errors(values: Array) -> Array:
        errors: Array = log_errors(values)[seen]
        return errors

    for out in range(folds):
        seen = fold != out
        unseen[~seen] = log_errors(fit_constants(seen_errors, constants).values)[~seen]
    return unseen


@dataclass(frozen=True)
class FittedConstant:
    """One constant, with how well the rows determine it."""

    name: str
    before: float
    value: float
    low: float
    """Ends of its 90% interval."""
    high: float
    note: str
    """Empty, or why it should not be trusted on its own."""


@dataclass(frozen=True)
class Calibrated:
    """A fitted chip or fabric."""

    what: str
    """``chip`` or ``fabric``."""
    constants: tuple[FittedConstant, ...]
    errors: dict[str, dict[str, float]]
    """By kind of row: rows, and mean absolute errors before, after, and on rows outside the fit."""
    collinear: tuple[tuple[str, str], ...]
    """Pairs of constants that the rows cannot distinguish: only their combination is known."""
    document: dict[str, Any]
    """The chip or fabric as plain data."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "what": self.what,
            "constants": {c.name: {**vars(c)} for c in self.constants},
            "errors": self.errors,
            "collinear": [list(pair) for pair in self.collinear],
            self.what: self.document,
        }


def _by_kind(kinds: Array, parts: dict[str, Array]) -> dict[str, dict[str, float]]:
    """Return the number of rows and the mean absolute errors by kind of row."""
    sizes = {}
    for kind in dict.fromkeys(kinds.tolist()):
        at = kinds == kind
        means = {name: float(np.abs(np.expm1(e[at])).mean()) for name, e in parts.items()}
        sizes[kind] = {"rows": float(at.sum()), **means}
    return sizes


def calibrated(
    what: str,
    log_errors: LogErrors,
    constants: Sequence[Constant],
    units: Array,
    kinds: Array,
    described: Callable[[Array], dict[str, Any]],
) -> Calibrated:
    """Fit constants, cross-validate them and describe the result.

    Parameters
    ----------
    what
        ``chip`` or ``fabric``.
    log_errors, constants
        As for `fit_constants`.
    units
        Factors from the fitted values to those that are reported.
    kinds
        Kind of each row, by which errors are summed up.
    described
        Returns the chip or fabric as plain data for values of the constants.

    Raises
    ------
    InvalidInputError
        Where there are fewer than two rows for each constant.
    """
    start = np.array([c.start for c in constants])
    before = log_errors(start)
    if len(before) < _ROWS_PER_CONSTANT * len(constants):
        raise InvalidInputError(
            f"files: {len(before)} values for {len(constants)} constants are not accepted; "
            f"expected at least {int(_ROWS_PER_CONSTANT * len(constants))}"
        )
    fit = fit_constants(log_errors, constants)
    again = [
        Constant(c.name, float(v), c.least, c.most)
        for c, v in zip(constants, fit.values, strict=True)
    ]
    unseen = cross_validated_errors(log_errors, again)
    notes = dict.fromkeys(fit.at_bound, "at the edge of its range")
    notes |= dict.fromkeys(fit.undetermined, "no row depends on it: left as it was")
    errors = _by_kind(kinds, {"before": before, "fitted": fit.errors, "unseen": unseen})
    return Calibrated(
        what=what,
        constants=tuple(
            FittedConstant(n, b * u, v * u, low * u, high * u, notes.get(n, ""))
            for n, b, v, low, high, u in zip(
                fit.names, start, fit.values, fit.low, fit.high, units, strict=True
            )
        ),
        errors=errors,
        collinear=fit.collinear,
        document=described(fit.values),
    )
