"""Plans for training frameworks: written as the files that they run, and read back."""

from phaze_fast.export.files import export_plan, is_framework_file, read_plan
from phaze_fast.export.request import (
    FORMATS,
    Exported,
    FlagNames,
    ReadPlan,
    Unexpressed,
    flag_names,
)

__all__ = [
    "FORMATS",
    "Exported",
    "FlagNames",
    "ReadPlan",
    "Unexpressed",
    "export_plan",
    "flag_names",
    "is_framework_file",
    "read_plan",
]
