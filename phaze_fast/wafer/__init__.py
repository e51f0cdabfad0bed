"""Operator-level mappings of a model on a wafer of dies, and the search for the fastest."""

from phaze_fast.wafer.accpar import accpar, hypar
from phaze_fast.wafer.baselines import Baseline, baselines
from phaze_fast.wafer.comparison import Comparison, compare_mappings
from phaze_fast.wafer.details import StepEnergy, step_energy, step_mfu
from phaze_fast.wafer.diemap import die_map
from phaze_fast.wafer.encoding import Encoding
from phaze_fast.wafer.evaluate import Evaluation, evaluate
from phaze_fast.wafer.fault_study import FaultStudy, fault_study
from phaze_fast.wafer.layout import Layout
from phaze_fast.wafer.loads import step_loads
from phaze_fast.wafer.mapping_rules import RULES
from phaze_fast.wafer.mesh import (
    Links,
    MeshGroup,
    MeshTime,
    Run,
    concurrent_s,
    link_loads,
    mesh_collective,
)
from phaze_fast.wafer.operator_mapping import OperatorMapping
from phaze_fast.wafer.outcome import Effort, MappingResult
from phaze_fast.wafer.pareto import WaferFront, WaferPoint, capped_s, pareto_front, search_front
from phaze_fast.wafer.plans import megatron, zero3
from phaze_fast.wafer.problem import Problem
from phaze_fast.wafer.search import search_mapping
from phaze_fast.wafer.searches import search_mappings
from phaze_fast.wafer.traffic import Transfer, describe, transfers
from phaze_fast.wafer.training import WaferTraining
from phaze_fast.wafer.wafers import WaferResult, search_wafers

__all__ = [
    "RULES",
    "Baseline",
    "Comparison",
    "Effort",
    "Encoding",
    "Evaluation",
    "FaultStudy",
    "Layout",
    "Links",
    "MappingResult",
    "MeshGroup",
    "MeshTime",
    "OperatorMapping",
    "Problem",
    "Run",
    "StepEnergy",
    "Transfer",
    "WaferFront",
    "WaferPoint",
    "WaferResult",
    "WaferTraining",
    "accpar",
    "baselines",
    "capped_s",
    "compare_mappings",
    "concurrent_s",
    "describe",
    "die_map",
    "evaluate",
    "fault_study",
    "hypar",
    "link_loads",
    "megatron",
    "mesh_collective",
    "pareto_front",
    "search_front",
    "search_mapping",
    "search_mappings",
    "search_wafers",
    "step_energy",
    "step_loads",
    "step_mfu",
    "transfers",
    "zero3",
]
