"""Takes a model and a wafer of dies, gives the operator-level mapping that trains it fastest."""

from phaze_fast.wafer.accpar import accpar, hypar
from phaze_fast.wafer.encoding import RULES, Encoding, Gene
from phaze_fast.wafer.evaluate import Evaluation, evaluate
from phaze_fast.wafer.layout import Layout
from phaze_fast.wafer.mesh import (
    Links,
    MeshGroup,
    MeshTime,
    Run,
    concurrent_s,
    link_loads,
    mesh_collective,
)
from phaze_fast.wafer.plans import megatron, zero3
from phaze_fast.wafer.problem import Problem, WaferTraining

__all__ = [
    "RULES",
    "Encoding",
    "Evaluation",
    "Gene",
    "Layout",
    "Links",
    "MeshGroup",
    "MeshTime",
    "Problem",
    "Run",
    "WaferTraining",
    "accpar",
    "concurrent_s",
    "evaluate",
    "hypar",
    "link_loads",
    "megatron",
    "mesh_collective",
    "zero3",
]
