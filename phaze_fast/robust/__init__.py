"""Chips that stay good where constants are uncertain: intervals, regret, value of information."""

from phaze_fast.robust.area_range import AreaRange, terms_mm2, widened_space
from phaze_fast.robust.constants import (
    AREA_TERMS,
    Constant,
    Uncertainty,
    default_uncertainty,
)
from phaze_fast.robust.information import Information, information
from phaze_fast.robust.regret import TOLERANCE, LargestRegret, RobustResult, robust_chip
from phaze_fast.robust.scenarios import UncertainSearch

__all__ = [
    "AREA_TERMS",
    "TOLERANCE",
    "AreaRange",
    "Constant",
    "Information",
    "LargestRegret",
    "RobustResult",
    "UncertainSearch",
    "Uncertainty",
    "default_uncertainty",
    "information",
    "robust_chip",
    "terms_mm2",
    "widened_space",
]
