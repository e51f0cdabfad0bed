"""Bytes of a device by term, for layers and grids of plans."""

from phaze_fast.memory.footprint import (
    FOLDED,
    FRAGMENTATION,
    INSTANTS,
    SCHEDULES,
    STAGE_DTYPE,
    TERMS,
    TERMS_DTYPE,
    Footprint,
    Pipeline,
    ScheduleName,
    check_chunks,
    footprint,
    footprint_batch,
    layouts_fit,
    stage_row,
    stage_rows,
)
from phaze_fast.memory.optimizer import OPTIMIZERS, Optimizer, optimizer

__all__ = [
    "FOLDED",
    "FRAGMENTATION",
    "INSTANTS",
    "OPTIMIZERS",
    "SCHEDULES",
    "STAGE_DTYPE",
    "TERMS",
    "TERMS_DTYPE",
    "Footprint",
    "Optimizer",
    "Pipeline",
    "ScheduleName",
    "check_chunks",
    "footprint",
    "footprint_batch",
    "layouts_fit",
    "optimizer",
    "stage_row",
    "stage_rows",
]
