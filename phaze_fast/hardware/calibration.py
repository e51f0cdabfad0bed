"""What a chip's times rest on: measurements of it, of another chip, or its data sheet alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from phaze_fast.hardware.tuning import Tuning

__all__ = ["Calibration", "CalibrationState", "calibration_of"]

CalibrationState = Literal["fitted", "partly fitted", "carried over", "not fitted"]
"""How far the constants of a chip's `tuning` come from measurements of that chip."""


@dataclass(frozen=True)
class Calibration:
    """How far a chip's times rest on measurements.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> presets.chip("h200").calibration.state, presets.chip("tpuv6e").calibration.state
    ('fitted', 'not fitted')
    """

    chip: str
    """Whose times these are."""
    state: CalibrationState
    """``fitted``: all fitted constants come from this chip; ``partly fitted``: some do, the rest
    from another; ``carried over``: all from another; ``not fitted``: from none."""
    carried_from: str
    """The other chip; empty where there is none."""
    note: str
    """One sentence for whoever reads the times; empty where they are fitted."""

    @property
    def fitted(self) -> bool:
        """Whether all of it was fitted to measurements of this very chip."""
        return self.state == "fitted"

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data, `fitted` included."""
        return {**asdict(self), "fitted": self.fitted}


def _unfitted(name: str) -> str:
    return (
        f"{name}: not fitted to measurements; times assume data-sheet rates and ideal kernels, "
        "and are likely too short"
    )


def _carried(name: str, source: str) -> str:
    return (
        f"{name}: not fitted to measurements of this chip; constants are carried over from "
        f"{source}, an extrapolation"
    )


def calibration_of(name: str, tuning: Tuning) -> Calibration:
    """Tell what the times of a chip of that name and tuning rest on.

    Examples
    --------
    >>> calibration_of("mine", Tuning(carried_from="h200")).note.partition("; ")[2]
    'constants are carried over from h200, an extrapolation'
    """
    source = tuning.carried_from
    if not tuning.fitted:
        if source:
            return Calibration(name, "carried over", source, _carried(name, source))
        return Calibration(name, "not fitted", "", _unfitted(name))
    if not source:
        return Calibration(name, "fitted", "", "")
    fitted = ", ".join(tuning.fitted)
    note = (
        f"{name}: only {fitted} are fitted to measurements of this chip; the other constants are "
        f"carried over from {source}"
    )
    return Calibration(name, "partly fitted", source, note)
