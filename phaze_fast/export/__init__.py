"""Plans for training frameworks: written as the files that they run, and read back."""

from phaze_fast.export.files import export_plan as export_plan
from phaze_fast.export.files import is_framework_file as is_framework_file
from phaze_fast.export.files import read_plan as read_plan
from phaze_fast.export.request import FORMATS as FORMATS
from phaze_fast.export.request import Exported as Exported
from phaze_fast.export.request import FlagNames as FlagNames
from phaze_fast.export.request import ReadPlan as ReadPlan
from phaze_fast.export.request import Unexpressed as Unexpressed
from phaze_fast.export.request import flag_names as flag_names
