"""What a calibration gives: constants with intervals, errors seen and unseen, and a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.calibration.fit import (
    Constant,
    LogErrors,
    cross_validated_errors,
    fit_constants,
)
from phaze_fast.errors import InvalidInputError

__all__ = ["Calibrated", "FittedConstant", "calibrated"]

Array = np.ndarray[Any, Any]

_ROWS_PER_CONSTANT = 2.0


@dataclass(frozen=True)
class FittedConstant:
    """One constant and how far the rows determine it."""

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
    """By kind of row: rows, and mean absolute errors before, after, and of rows a fit has not
    seen."""
    collinear: tuple[tuple[str, str], ...]
    """Pairs that these rows cannot tell apart: only both together are known."""
    document: dict[str, Any]
    """The chip or fabric as a file holds it."""

    def to_dict(self) -> dict[str, Any]:
        """Give all of it as plain data."""
        return {
            "what": self.what,
            "constants": {c.name: {**vars(c)} for c in self.constants},
            "errors": self.errors,
            "collinear": [list(pair) for pair in self.collinear],
            self.what: self.document,
        }


def _by_kind(kinds: Array, parts: dict[str, Array]) -> dict[str, dict[str, float]]:
    found = {}
    for kind in dict.fromkeys(kinds.tolist()):
        at = kinds == kind
        means = {name: float(np.abs(np.expm1(e[at])).mean()) for name, e in parts.items()}
        found[kind] = {"rows": float(at.sum()), **means}
    return found


def calibrated(
    what: str,
    log_errors: LogErrors,
    constants: Sequence[Constant],
    units: Array,
    kinds: Array,
    described: Callable[[Array], dict[str, Any]],
) -> Calibrated:
    """Fit, cross-validate and describe.

    Raises
    ------
    InvalidInputError
        Where there are fewer than two rows for each constant: a fit would follow the rows, not the
        machine.
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
