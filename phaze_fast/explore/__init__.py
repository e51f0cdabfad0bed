"""Which chip: a best-first search over chips and strategies that proves its answer."""

from phaze_fast.explore.ask_tell import Explorer, Point, Told
from phaze_fast.explore.best_first import BestFirstSearch, LeastProductSearch, LimitedSearch
from phaze_fast.explore.chip_groups import ChipGroups, Variant, scaled_cluster, tier_names
from phaze_fast.explore.find import checked_weights, find_chips, paper_setup, search_digest
from phaze_fast.explore.objectives import OBJECTIVES, UNITS, checked_objectives, objective_of
from phaze_fast.explore.per_chip import Evaluations, ExactEvaluator, evaluate_batch
from phaze_fast.explore.portfolio import Portfolio, best_pair
from phaze_fast.explore.problem import SearchProblem, problems_of
from phaze_fast.explore.result import (
    Budget,
    Design,
    Outcome,
    Progress,
    Winner,
    fullest_text,
    geometric_mean,
    share_text,
)

__all__ = [
    "OBJECTIVES",
    "UNITS",
    "BestFirstSearch",
    "Budget",
    "ChipGroups",
    "Design",
    "Evaluations",
    "ExactEvaluator",
    "Explorer",
    "LeastProductSearch",
    "LimitedSearch",
    "Outcome",
    "Point",
    "Portfolio",
    "Progress",
    "SearchProblem",
    "Told",
    "Variant",
    "Winner",
    "best_pair",
    "checked_objectives",
    "checked_weights",
    "evaluate_batch",
    "find_chips",
    "fullest_text",
    "geometric_mean",
    "objective_of",
    "paper_setup",
    "problems_of",
    "scaled_cluster",
    "search_digest",
    "share_text",
    "tier_names",
]
