"""Software profiles: the operators that a training library runs, and its host overheads."""

from phaze_fast.software.precision import BF16 as BF16
from phaze_fast.software.precision import Precision as Precision
from phaze_fast.software.precision import PrecisionOrName as PrecisionOrName
from phaze_fast.software.precision import check_precision as check_precision
from phaze_fast.software.precision import load_precision as load_precision
from phaze_fast.software.precision import precision_names as precision_names
from phaze_fast.software.profile import DEFAULT as DEFAULT
from phaze_fast.software.profile import FRAGMENTATION as FRAGMENTATION
from phaze_fast.software.profile import UNKNOWN as UNKNOWN
from phaze_fast.software.profile import Software as Software
from phaze_fast.software.profile import SoftwareOrName as SoftwareOrName
from phaze_fast.software.profile import chip_as_run as chip_as_run
from phaze_fast.software.profile import fabric_as_run as fabric_as_run
from phaze_fast.software.profile import load_software as load_software
from phaze_fast.software.profile import model_as_run as model_as_run
from phaze_fast.software.profile import planned_model as planned_model
from phaze_fast.software.profile import software_names as software_names
