"""Wafers of dies: their hardware, operator-level mappings on them, and searches for the best."""

from phaze_fast.wafer.hardware.space import WAFER_SPACES, WaferSpace, load_wafer_space
from phaze_fast.wafer.hardware.wafer import (
    WAFERS,
    Die,
    FaultMap,
    MemoryTier,
    OffWafer,
    Wafer,
    WaferIo,
    WaferRules,
    WaferSwitch,
    WaferTotals,
    broken_rules,
    load_faults,
    load_wafer,
    sample_faults,
    wafer_totals,
)
from phaze_fast.wafer.mapping.details import StepEnergy, die_map, step_energy, step_mfu
from phaze_fast.wafer.mapping.encoding import RULES, Encoding, OperatorMapping
from phaze_fast.wafer.mapping.evaluate import Evaluation, evaluate
from phaze_fast.wafer.mapping.layout import Layout
from phaze_fast.wafer.mapping.mesh import (
    Links,
    MeshGroup,
    MeshTime,
    Run,
    concurrent_s,
    link_loads,
    mesh_collective,
)
from phaze_fast.wafer.mapping.problem import Problem, WaferTraining
from phaze_fast.wafer.mapping.traffic import Transfer, describe, step_loads, transfers
from phaze_fast.wafer.search.baselines import Baseline, accpar, baselines, hypar, megatron, zero3
from phaze_fast.wafer.search.result import Effort, MappingResult
from phaze_fast.wafer.search.search import search_mapping, search_mappings
from phaze_fast.wafer.studies.comparison import Comparison, compare_mappings
from phaze_fast.wafer.studies.fault_study import FaultStudy, fault_study
from phaze_fast.wafer.studies.spaces import (
    WaferFront,
    WaferPoint,
    WaferResult,
    capped_s,
    pareto_front,
    search_front,
    search_wafers,
)

__all__ = [
    "RULES",
    "WAFERS",
    "WAFER_SPACES",
    "Baseline",
    "Comparison",
    "Die",
    "Effort",
    "Encoding",
    "Evaluation",
    "FaultMap",
    "FaultStudy",
    "Layout",
    "Links",
    "MappingResult",
    "MemoryTier",
    "MeshGroup",
    "MeshTime",
    "OffWafer",
    "OperatorMapping",
    "Problem",
    "Run",
    "StepEnergy",
    "Transfer",
    "Wafer",
    "WaferFront",
    "WaferIo",
    "WaferPoint",
    "WaferResult",
    "WaferRules",
    "WaferSpace",
    "WaferSwitch",
    "WaferTotals",
    "WaferTraining",
    "accpar",
    "baselines",
    "broken_rules",
    "capped_s",
    "compare_mappings",
    "concurrent_s",
    "describe",
    "die_map",
    "evaluate",
    "fault_study",
    "hypar",
    "link_loads",
    "load_faults",
    "load_wafer",
    "load_wafer_space",
    "megatron",
    "mesh_collective",
    "pareto_front",
    "sample_faults",
    "search_front",
    "search_mapping",
    "search_mappings",
    "search_wafers",
    "step_energy",
    "step_loads",
    "step_mfu",
    "transfers",
    "wafer_totals",
    "zero3",
]
