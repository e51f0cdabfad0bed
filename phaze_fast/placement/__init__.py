"""Placement of layers on devices: stages, replicas and the best parallel plans."""

from phaze_fast.placement.against_fastest import WhyNot, read_asked, why_not
from phaze_fast.placement.describe import PlacedStage
from phaze_fast.placement.evaluator import Placed, PlanEvaluator
from phaze_fast.placement.layer_schedules import ScheduledLayer, layer_schedules
from phaze_fast.placement.nest import PRICED_REPLICAS, solve_nest
from phaze_fast.placement.nest_problem import TIME_UNITS, NestProblem, is_nest, nest_from_dict
from phaze_fast.placement.plan_spec import PlanSpec
from phaze_fast.placement.planning import Plans, infeasible, plan
from phaze_fast.placement.plans import PARTS, Plan, Stage
from phaze_fast.placement.prediction import Predictions, predict, predict_batch
from phaze_fast.placement.problem_files import ProblemRecord, read_records
from phaze_fast.placement.problems import (
    SCHEDULES,
    PipelineProblem,
    Placement,
    PublishedProblem,
    place,
    place_batch,
    place_front,
)
from phaze_fast.placement.published import problem_from_dict, read_problems, solve_published
from phaze_fast.placement.table import LayerTable
from phaze_fast.placement.throughput import (
    Throughput,
    hfu,
    mfu,
    mfu_causal,
    step_throughput,
    tflops_per_device,
    tokens_per_s_per_device,
)
from phaze_fast.placement.timeline import Timeline, timeline
from phaze_fast.placement.token_budget import (
    Goodput,
    TrainingRun,
    goodput,
    optimal_interval_s,
    training_run,
)
from phaze_fast.placement.training import Training

__all__ = [
    "PARTS",
    "PRICED_REPLICAS",
    "SCHEDULES",
    "TIME_UNITS",
    "Goodput",
    "LayerTable",
    "NestProblem",
    "PipelineProblem",
    "Placed",
    "PlacedStage",
    "Placement",
    "Plan",
    "PlanEvaluator",
    "PlanSpec",
    "Plans",
    "Predictions",
    "ProblemRecord",
    "PublishedProblem",
    "ScheduledLayer",
    "Stage",
    "Throughput",
    "Timeline",
    "Training",
    "TrainingRun",
    "WhyNot",
    "goodput",
    "hfu",
    "infeasible",
    "is_nest",
    "layer_schedules",
    "mfu",
    "mfu_causal",
    "nest_from_dict",
    "optimal_interval_s",
    "place",
    "place_batch",
    "place_front",
    "plan",
    "predict",
    "predict_batch",
    "problem_from_dict",
    "read_asked",
    "read_problems",
    "read_records",
    "solve_nest",
    "solve_published",
    "step_throughput",
    "tflops_per_device",
    "timeline",
    "tokens_per_s_per_device",
    "training_run",
    "why_not",
]
