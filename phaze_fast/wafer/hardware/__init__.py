"""Wafers as validated records: dies, rules of manufacture, fault maps, totals and spaces."""

from phaze_fast.wafer.hardware.faults import FaultMap, load_faults, sample_faults
from phaze_fast.wafer.hardware.space import WAFER_SPACES, WaferSpace, load_wafer_space
from phaze_fast.wafer.hardware.totals import WaferTotals, wafer_totals
from phaze_fast.wafer.hardware.wafer import (
    WAFERS,
    Die,
    MemoryTier,
    OffWafer,
    Wafer,
    WaferIo,
    WaferRules,
    WaferSwitch,
    broken_rules,
    load_wafer,
)

__all__ = [
    "WAFERS",
    "WAFER_SPACES",
    "Die",
    "FaultMap",
    "MemoryTier",
    "OffWafer",
    "Wafer",
    "WaferIo",
    "WaferRules",
    "WaferSpace",
    "WaferSwitch",
    "WaferTotals",
    "broken_rules",
    "load_faults",
    "load_wafer",
    "load_wafer_space",
    "sample_faults",
    "wafer_totals",
]
