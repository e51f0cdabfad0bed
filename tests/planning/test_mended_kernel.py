"""Wrong answers that tests of the plan kernel found, mended: none may come back."""

import subprocess
import sys

import numpy as np
import pytest
from plan_cases import evaluator_of, kind_of, kind_of_layout

import phaze_fast as pf
from phaze_fast.hardware import Cluster, Tier, TieredFabric
from phaze_fast.planning import PlanSpec, Training, plan, predict


def nodes(rate, slow_rate, size=8):
    tiers = (
        Tier(name="node", size=size, bandwidth_bytes_per_s=rate, latency_s=0.0),
        Tier(name="rest", size=None, bandwidth_bytes_per_s=slow_rate, latency_s=0.0),
    )
    return TieredFabric(name="nodes", tiers=tiers)


NO_CUT = """
from phaze_fast.hardware import Cluster
from phaze_fast.planning import Training, plan
step = Training(global_batch=8, micro_batch=1, tp=1, pp=4, schedule="1f1b",
                uncut=tuple(range(1, 14)))
plans = plan("gpt2-small", Cluster(devices=4, fabric="dgx-h100", chip="h100"), step)
assert len(plans) == 0
assert plans.rejected, "no reason is given"
"""


def test_ties_that_leave_no_partition_are_refused_with_a_reason():
    done = subprocess.run([sys.executable, "-c", NO_CUT], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_experts_in_both_rank_orders_fill_the_list():
    model = pf.TransformerModel(
        name="experts", layers=4, hidden=128, heads=4, ffn=256, vocab=512, seq=64,
        positions="rotary", moe={"experts": 4, "top_k": 1, "expert_ffn": 256},
    )  # fmt: skip
    cluster = Cluster(devices=8, fabric=nodes(1e11, 1e9, size=8), chip="h100")
    step = Training(global_batch=16, micro_batch=1, ep=2, tp=1)
    evaluator, times = evaluator_of(model, cluster, step)
    best = {}
    for at in range(len(evaluator.layouts)):
        time_s = evaluator.space.solve(times, at, 0, 1e300)[1]["time_s"][0]
        kind = kind_of_layout(evaluator, at)
        best[kind] = min(best.get(kind, np.inf), time_s)
    plans = plan(model, cluster, step, top=8)
    assert len({kind_of(each) for each in plans.plans}) == len(plans)
    wanted = sorted(best.values())[:8]
    assert [each.time_s for each in plans.plans] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("dp", "pp"), [(6, 2), (5, 3)])
def test_a_message_that_any_rank_sends_over_a_node_border_is_priced_there(dp, pp):
    cluster = Cluster(devices=dp * pp, fabric=nodes(450e9, 1e6), chip="h100")
    timed = predict("gpt2-small", cluster, PlanSpec(global_batch=8 * dp, dp=dp, pp=pp))
    message_s = 2 * 1024 * 768 / 1e6
    # The first stage waits for a gradient, the last for an activation.
    assert all(stage.load_s > message_s for stage in timed.stages)


def test_a_plan_found_with_recomputation_round_trips():
    cluster = Cluster(devices=4, fabric=nodes(1e9, 1e9), chip="h100")
    step = Training(
        global_batch=8, micro_batch=1, recompute="full", pp=2, tp=1,
        dp=2, schedule="1f1b", zero=0,
    )  # fmt: skip
    best = plan("gpt2-small", cluster, step).best
    assert best.recompute == "full"
    assert predict("gpt2-small", cluster, best).time_s == best.time_s
