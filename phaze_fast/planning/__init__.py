"""Parallel plans of a model on given hardware: search, prediction, explanation."""

from phaze_fast.planning.evaluator import Placed, PlanEvaluator, checked_model
from phaze_fast.planning.layouts import node_devices
from phaze_fast.planning.plan_spec import PlanSpec
from phaze_fast.planning.planner import Plans, WhyNot, plan, read_asked, usable_bytes, why_not
from phaze_fast.planning.plans import NOMINAL, PARTS, Plan, Stage
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
from phaze_fast.planning.timeline import ScheduledLayer, Timeline, layer_schedules, timeline
from phaze_fast.planning.token_budget import (
    Goodput,
    TrainingRun,
    goodput,
    optimal_interval_s,
    training_run,
)
from phaze_fast.planning.training import RECOMPUTE, Training

__all__ = [
    "NOMINAL",
    "PARTS",
    "RECOMPUTE",
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
    "checked_model",
    "goodput",
    "hfu",
    "layer_schedules",
    "mfu",
    "mfu_causal",
    "node_devices",
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
    "usable_bytes",
    "why_not",
]
