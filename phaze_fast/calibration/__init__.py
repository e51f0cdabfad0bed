"""Constants fitted to measurements, and predictions compared with measurements."""

from phaze_fast.calibration.calibrate import benchmark_script, calibrate_chip, calibrate_fabric
from phaze_fast.calibration.collectives import (
    CollectiveValidation,
    is_collective_table,
    validate_collectives,
)
from phaze_fast.calibration.fit import Calibrated
from phaze_fast.calibration.published import PublishedRun, RowRefusedError, UnsupportedError
from phaze_fast.calibration.validation import (
    GROUPINGS,
    ErrorSummary,
    PredictedRun,
    RunGroup,
    RunValidation,
    StepValidation,
    pick_regret,
    summarise,
    validate_runs,
    validate_steps,
)

__all__ = [
    "GROUPINGS",
    "Calibrated",
    "CollectiveValidation",
    "ErrorSummary",
    "PredictedRun",
    "PublishedRun",
    "RowRefusedError",
    "RunGroup",
    "RunValidation",
    "StepValidation",
    "UnsupportedError",
    "benchmark_script",
    "calibrate_chip",
    "calibrate_fabric",
    "is_collective_table",
    "pick_regret",
    "summarise",
    "validate_collectives",
    "validate_runs",
    "validate_steps",
]
