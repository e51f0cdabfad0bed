"""Constants fitted to measurements, and predictions compared with measurements."""

from phaze_fast.calibration.calibrate import Calibrated as Calibrated
from phaze_fast.calibration.calibrate import benchmark_script as benchmark_script
from phaze_fast.calibration.calibrate import calibrate_chip as calibrate_chip
from phaze_fast.calibration.calibrate import calibrate_fabric as calibrate_fabric
from phaze_fast.calibration.collectives import CollectiveValidation as CollectiveValidation
from phaze_fast.calibration.collectives import is_collective_table as is_collective_table
from phaze_fast.calibration.collectives import validate_collectives as validate_collectives
from phaze_fast.calibration.published import PublishedRun as PublishedRun
from phaze_fast.calibration.published import RowRefusedError as RowRefusedError
from phaze_fast.calibration.published import UnsupportedError as UnsupportedError
from phaze_fast.calibration.validation import GROUPINGS as GROUPINGS
from phaze_fast.calibration.validation import ErrorSummary as ErrorSummary
from phaze_fast.calibration.validation import PredictedRun as PredictedRun
from phaze_fast.calibration.validation import RunGroup as RunGroup
from phaze_fast.calibration.validation import RunValidation as RunValidation
from phaze_fast.calibration.validation import StepValidation as StepValidation
from phaze_fast.calibration.validation import pick_regret as pick_regret
from phaze_fast.calibration.validation import summarise as summarise
from phaze_fast.calibration.validation import validate_runs as validate_runs
from phaze_fast.calibration.validation import validate_steps as validate_steps
