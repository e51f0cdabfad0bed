"""Neither the order of a list in a training step nor repetition in it changes an answer."""

import itertools
import random

import pytest
from plan_cases import h100

from phaze_fast import _core
from phaze_fast.planning import Training, plan, predict_batch

LISTS = {
    "micro_batch": (1, 2),
    "tp": (1, 2),
    "pp": (1, 2, 4),
    "zero": (0, 1, 3),
    "vpp": (2, 3),
    "shard": ("all", "node", 2),
    "recompute": ("none", "norms+attention", "selective", "full"),
    "schedule": ("1f1b", "interleaved", "zb-v", "dualpipe-v"),
    "cp_kind": ("all-gather", "ring"),
}


def answer(**step):
    plans = plan("bert-large", h100(4), Training(global_batch=32, **step))
    return [best.to_dict() for best in plans.plans]


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe-v"])
def test_the_order_of_recomputation_does_not_change_the_optimum(schedule):
    step = {"schedule": schedule, "tp": 1, "pp": (2, 4), "micro_batch": (1, 2), "zero": (1, 3)}
    full_first = answer(recompute=("full", "none"), **step)
    assert full_first == answer(recompute=("none", "full"), **step)
    assert full_first[0]["recompute"] == "none"


def test_shuffled_lists_are_the_same_step():
    rng = random.Random(1)
    sets = {name: list(values) for name, values in LISTS.items()}
    usual = Training(global_batch=32, **sets)
    for _ in range(20):
        shuffled = {name: rng.sample(v * 2, 2 * len(v)) for name, v in sets.items()}
        assert Training(global_batch=32, **shuffled) == usual


def test_a_set_of_operators_has_one_spelling():
    for names in itertools.permutations(["norms", "attention", "up-projection"]):
        step = Training(global_batch=1, recompute=["full", "+".join(names)])
        assert step.recompute == ("norms+up-projection+attention", "full")


def test_rules_are_those_of_the_model_as_the_software_runs_it():
    """DeepSpeed computes attention scores explicitly, which no ring can."""
    step = {"global_batch": 8, "seq": 16384, "software": "deepspeed"}
    plans = plan("llama3-8b", h100(8), Training(**step))
    assert plans.plans
    assert {best.cp_kind for best in plans.plans if best.cp > 1} <= {"all-gather", "ulysses"}
    rows = {"tp": [8, 4], "cp": [1, 2], "cp_kind": ["all-gather", "ring"]}
    rows = predict_batch("llama3-8b", h100(8), Training(**step), **rows)
    assert rows.status.tolist() == [0, _core.PlanStatus.BAD_STRATEGY]
