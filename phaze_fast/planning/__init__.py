"""Parallel plans of a model on given hardware: found, predicted, explained."""

from phaze_fast.planning.against_fastest import WhyNot, read_asked, why_not
from phaze_fast.planning.evaluator import Placed, PlanEvaluator
from phaze_fast.planning.layer_schedules import ScheduledLayer, layer_schedules
from phaze_fast.planning.plan_spec import PlanSpec
from phaze_fast.planning.planner import Plans, infeasible, plan
from phaze_fast.planning.plans import PARTS, Plan, Stage
from phaze_fast.planning.prediction import Predictions, predict, predict_batch
from phaze_fast.planning.throughput import (
    Throughput,
    hfu,
    mfu,
    mfu_causal,
    step_throughput,
    tflops_per_device,
    tokens_per_s_per_device,
)
from phaze_fast.planning.timeline import Timeline, timeline
from phaze_fast.planning.token_budget import (
    Goodput,
    TrainingRun,
    goodput,
    optimal_interval_s,
    training_run,
)
from phaze_fast.planning.training import Training

__all__ = [
    "PARTS",
    "Goodput",
    "Placed",
    "Plan",
    "PlanEvaluator",
    "PlanSpec",
    "Plans",
    "Predictions",
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
    "layer_schedules",
    "mfu",
    "mfu_causal",
    "optimal_interval_s",
    "plan",
    "predict",
    "predict_batch",
    "read_asked",
    "step_throughput",
    "tflops_per_device",
    "timeline",
    "tokens_per_s_per_device",
    "training_run",
    "why_not",
]
