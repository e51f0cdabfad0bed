"""Takes layers with their times and bytes, gives stages, devices and replicas on a cluster."""

from phaze_fast.placement.problems import (
    SCHEDULES,
    PipelineProblem,
    Placement,
    PublishedProblem,
    place,
    place_batch,
)
from phaze_fast.placement.published import problem_from_dict, read_problems, solve_published
from phaze_fast.placement.table import LayerTable

__all__ = [
    "SCHEDULES",
    "LayerTable",
    "PipelineProblem",
    "Placement",
    "PublishedProblem",
    "place",
    "place_batch",
    "problem_from_dict",
    "read_problems",
    "solve_published",
]
