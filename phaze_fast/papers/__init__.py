"""Other systems restated: placements of layer tables, NEST, hand plans, early stop, back-test."""

from phaze_fast.papers.nest import (
    PRICED_REPLICAS,
    TIME_UNITS,
    NestProblem,
    is_nest,
    nest_from_dict,
    solve_nest,
)
from phaze_fast.papers.placement import (
    LayerTable,
    PlacedStage,
    Placement,
    PublishedProblem,
    place,
    place_batch,
    place_front,
)
from phaze_fast.papers.problem_files import ProblemRecord, read_records
from phaze_fast.papers.published import problem_from_dict, solve_published

__all__ = [
    "PRICED_REPLICAS",
    "TIME_UNITS",
    "LayerTable",
    "NestProblem",
    "PlacedStage",
    "Placement",
    "ProblemRecord",
    "PublishedProblem",
    "is_nest",
    "nest_from_dict",
    "place",
    "place_batch",
    "place_front",
    "problem_from_dict",
    "read_records",
    "solve_nest",
    "solve_published",
]
