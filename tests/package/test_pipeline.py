"""The whole pipeline in one call: names or records in, a proven design out."""

import numpy as np
import pytest
from refusals import refusal

import phaze_fast as pf

POD = pf.Cluster(devices=8, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=32, micro_batch=1, tp=1, schedule="1f1b")


@pytest.fixture(scope="module")
def space():
    whole = pf.ArchitectureSpace.published()
    return whole[np.sort(np.random.default_rng(1).choice(len(whole), 20, replace=False))]


def test_a_name_and_its_model_are_the_same(space):
    by_name = pf.search("bert-large", space, POD, STEP, top=3)
    found = pf.search(pf.models.load("bert-large"), space, POD, STEP, top=3)
    assert by_name.digest == found.digest
    assert by_name.outcome.winners == found.outcome.winners


def test_threads_change_nothing(space):
    one, two = (pf.search("bert-large", space, POD, STEP, threads=n) for n in (1, 2))
    assert one.outcome.winners == two.outcome.winners
    assert one.outcome.counts == two.outcome.counts


def test_a_design_says_the_same_as_plan_and_predict(space):
    """Search, plan and predict print the same figures of the same plan."""
    best = pf.search("bert-large", space, POD, STEP).best
    cluster = POD.replace(chip=best.chip)
    planned = pf.plan("bert-large", cluster, STEP, top=1).best
    predicted = pf.predict("bert-large", cluster, best.plan)
    for other in (planned, predicted):
        assert other == best.plan
    assert best.time_s == best.plan.time_s
    assert best.energy_j == best.plan.energy_j
    assert best.samples_per_s == best.plan.samples_per_s
    assert best.bottleneck == best.plan.bottleneck
    # It survives plain data.
    assert pf.Plan.from_dict(best.plan.to_dict()) == best.plan
    assert pf.Accelerator.from_dict(best.chip.to_dict()) == best.chip
    assert "plan: not what" in refusal(pf.Plan.from_dict, best.plan.to_dict(stages=False))
