"""Software profiles: what a training library runs, and what the host adds to it."""

from phaze_fast.software.as_run import chip_as_run, fabric_as_run, model_as_run
from phaze_fast.software.profile import (
    DEFAULT,
    Software,
    SoftwareOrName,
    load_software,
    software_names,
)

__all__ = [
    "DEFAULT",
    "Software",
    "SoftwareOrName",
    "chip_as_run",
    "fabric_as_run",
    "load_software",
    "model_as_run",
    "software_names",
]
