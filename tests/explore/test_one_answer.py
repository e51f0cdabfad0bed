"""`search`, `evaluate_batch` and `plan` give one answer, and a search of few chips proves it."""

import random

import pytest
from search_cases import random_case, some_chips

import phaze_fast as pf

WIDTHS = ("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "schedule", "recompute")


@pytest.mark.parametrize("seed", [69, 96])  # equal times to the last bit; ties of ZeRO stages
def test_a_batch_of_chips_has_the_plans_of_each_chip(seed):
    case, chips = random_case(seed), some_chips(seed, 6)
    batch = pf.evaluate_batch(case.model, chips, case.cluster, case.training)
    for i in range(len(chips)):
        cluster = case.cluster.replace(chip=chips[i])
        best = pf.plan(case.model, cluster, case.training, top=1).best
        assert batch.time_s[i] == best.time_s
        assert [str(getattr(batch, name)[i]) for name in WIDTHS] == [
            str(getattr(best, name)) for name in WIDTHS
        ]


@pytest.mark.parametrize("seed", [170, 174, 224])
def test_a_search_of_few_chips_is_proven(seed):
    """Some layers' schedules take more nodes to prove than the search first allows."""
    case, rng = random_case(seed), random.Random(seed)
    names = ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "gpipe", "zb-h2"]
    step = case.training
    if rng.random() < 0.6:
        step = step.replace(schedule=rng.sample(names, 2))
    outcome = pf.search(case.model, some_chips(seed, 18), case.cluster, step).outcome
    assert outcome.unproven > 0
    assert (outcome.status, outcome.gap) == ("optimal", 0.0)
