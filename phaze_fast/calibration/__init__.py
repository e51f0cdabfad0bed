"""Constants fitted to measurements, predictions held against them, intervals learnt from that."""

from phaze_fast.calibration.published import PublishedRun, RowRefusedError, UnsupportedError
from phaze_fast.calibration.statistics import ErrorSummary, pick_regret, summarise
from phaze_fast.calibration.steps import StepValidation, validate_steps
from phaze_fast.calibration.validation import (
    GROUPINGS,
    PredictedRun,
    RunGroup,
    RunValidation,
    validate_runs,
)

__all__ = [
    "GROUPINGS",
    "ErrorSummary",
    "PredictedRun",
    "PublishedRun",
    "RowRefusedError",
    "RunGroup",
    "RunValidation",
    "StepValidation",
    "UnsupportedError",
    "pick_regret",
    "summarise",
    "validate_runs",
    "validate_steps",
]
