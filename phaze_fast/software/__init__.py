"""Software profiles: what a training library runs, and what the host adds to it."""

from phaze_fast.software.precision import (
    BF16,
    Precision,
    PrecisionOrName,
    check_precision,
    load_precision,
    precision_names,
)
from phaze_fast.software.profile import (
    DEFAULT,
    Software,
    SoftwareOrName,
    chip_as_run,
    fabric_as_run,
    load_software,
    model_as_run,
    planned_model,
    software_names,
)

__all__ = [
    "BF16",
    "DEFAULT",
    "Precision",
    "PrecisionOrName",
    "Software",
    "SoftwareOrName",
    "check_precision",
    "chip_as_run",
    "fabric_as_run",
    "load_precision",
    "load_software",
    "model_as_run",
    "planned_model",
    "precision_names",
    "software_names",
]
