"""Laws of plans: what fits fits, more never worsens, and every figure can be told from the parts."""

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import PLAIN, h100
from reference.pipeline_events import makespan, simulate

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster
from phaze_fast.memory import Pipeline, footprint
from phaze_fast.opgraph import Strategy
from phaze_fast.planning import (
    PARTS,
    PlanEvaluator,
    PlanSpec,
    Training,
    plan,
    planner,
    predict,
)


def cluster(devices, memory_gib=80):
    return h100(devices, memory_gib)


def found(model="gpt2-small", devices=8, memory_gib=80, **step):
    training = Training(**{"global_batch": 32, "micro_batch": (1, 2), **step})
    return plan(pf.models.load(model), cluster(devices, memory_gib), training)


@pytest.mark.parametrize("model", ["gpt2-small", "llama2-7b", "t5-base", "mixtral-8x7b"])
def test_plans_keep_to_their_limits_and_add_up(model):
    plans = found(model, 16, zero=(0, 1, 3), schedule=("1f1b", "interleaved", "zero-bubble"))
    layers = len(pf.layer_graph(plans.model).order)
    assert list(plans.plans) == sorted(plans.plans, key=lambda p: p.time_s)
    assert plans.front[0] == plans.best
    for each in [*plans.plans, *plans.front]:
        assert each.devices <= 16
        assert each.micro_batch * each.micro_batches * each.dp == 32
        assert each.memory_bytes <= 80 * 2**30
        stages = each.stages
        assert sorted(i for stage in stages for i in stage.layers) == list(range(layers))
        assert max(stage.memory_bytes for stage in stages) == pytest.approx(each.memory_bytes)
        assert tuple(each.parts_s) == PARTS
        assert sum(each.parts_s.values()) == pytest.approx(each.time_s, rel=1e-9)
        assert all(seconds >= 0 for seconds in each.parts_s.values())
        assert 0 < each.mfu < 1
    for faster, smaller in zip(plans.front, plans.front[1:], strict=False):
        assert faster.time_s <= smaller.time_s
        assert faster.memory_bytes > smaller.memory_bytes


MODES = ("none", "selective", "full", "norms+activations+gated-product")


@pytest.mark.parametrize(
    ("schedule", "models"),
    [
        ("1f1b", ("gpt2-small", "llama2-7b", "t5-base", "mixtral-8x7b")),
        # `footprint` deals whole stages, not chunks, so that blocks must be alike.
        ("interleaved", ("gpt2-small", "llama2-7b", "mixtral-8x7b")),
        ("zero-bubble", ("gpt2-small", "llama2-7b", "t5-base", "mixtral-8x7b")),
        ("zb-h2", ("llama2-7b", "t5-base")),
        ("gpipe", ("llama2-7b", "t5-base")),
    ],
)
def test_plans_and_the_memory_model_agree_term_by_term(schedule, models):
    vpp = 2 if schedule == "interleaved" else 1
    for model, zero, recompute in product(models, range(4), MODES):
        strategy = Strategy(tp=2, sequence_parallel=True)
        graph = pf.layer_graph(pf.models.load(model), strategy)
        common = {"schedule": schedule, "vpp": vpp, "zero": zero}
        pipeline = Pipeline(pp=2, micro_batches=8, dp=4, **common)
        given = {"recompute": recompute, "software": PLAIN, **common}
        spec = PlanSpec(global_batch=32, tp=2, pp=2, dp=4, **given)
        for k, stage in enumerate(predict(model, cluster(16), spec).stages):
            terms = footprint(graph, pipeline, k, recompute).terms
            if len(set(stage.chunks)) > 1:  # chunks that differ, which footprint does not tell
                for term in ("activations", "fragmentation"):
                    assert stage.memory[term] >= terms[term] * (1 - 1e-12)
                    terms = {**terms, term: stage.memory[term]}
            assert dict(stage.memory) == pytest.approx(terms, rel=1e-12)


def variants_of(sizes, stage):
    """The variant of each layer of a stage of one chunk; the ends have but one."""
    more, _, rest = stage.recompute.partition("/")
    more, _, count = more.partition(":")
    left = int(count) if count else len(stage.layers)
    found = []
    for i in stage.layers:
        block = sizes.graph.layers[sizes.graph.order[i]].kind not in ("embedding", "head")
        found.append(sizes.variant_of[more if left > 0 else rest or "none"])
        left -= block
    return found


def test_a_plan_takes_as_long_as_its_schedule_simulated():
    widths = {"pp": (4,), "tp": (1, 2)}
    plans = found("llama2-7b", 16, schedule="1f1b", software=PLAIN, **widths)
    evaluator = PlanEvaluator(plans.model, plans.cluster, plans.training, [80 * 2**30])
    times, order = evaluator.times(plans.cluster), evaluator.sizes[0].graph.order
    widths = [(x.strategy.tp, x.strategy.micro_batch) for x in evaluator.sizes]
    off, mixed = [], 0
    for each in plans.plans:
        mixed += any(":" in stage.recompute for stage in each.stages)
        s = widths.index((each.tp, each.micro_batch))
        forward, backward, before_s = [], [], 0.0
        for stage in each.stages:
            kinds = [order[i] for i in stage.layers]
            again = variants_of(evaluator.sizes[s], stage)
            own = times.forward_s[s, kinds].sum(), times.backward_s[s, again, kinds].sum()
            after_s = stage.load_s - sum(own) - before_s  # what is not received before is after
            forward.append(own[0] + before_s)
            backward.append(own[1] + after_s)
            before_s = after_s
        assert after_s == pytest.approx(0, abs=1e-9 * each.time_s)
        columns = [[[seconds] for seconds in stages] for stages in (forward, backward, backward)]
        simulated = makespan(simulate("1f1b", *columns, each.micro_batches))
        step_s = each.time_s - each.parts_s["data_comm"] - each.parts_s["optimizer"]
        off.append(step_s / simulated - 1)
    assert len(off) >= 5
    assert mixed >= 1
    assert max(map(abs, off)) <= 1e-9


@settings(max_examples=6)
@given(st.sampled_from([4, 8, 16]), st.sampled_from([24, 32, 48]))
def test_more_devices_or_memory_is_never_slower(devices, memory_gib):
    plain = found("gpt2-xl", devices, memory_gib)
    for more in (found("gpt2-xl", 2 * devices, memory_gib), found("gpt2-xl", devices, 80)):
        if len(plain):
            assert more.best.time_s <= plain.best.time_s * (1 + 1e-9)


def test_early_stages_recompute_where_late_ones_need_not():
    plans = found(
        "llama2-7b", 8, memory_gib=40, micro_batch=4, tp=1, pp=8,
        dp=1, schedule="1f1b", zero=0, global_batch=128,
    )  # fmt: skip
    best = plans.best
    assert best.recompute == "mixed"
    assert best.stages[0].recompute != "none"
    assert best.stages[-1].recompute == "none"
    # Stages 1 to 6 have four blocks each: what a stage adds to its load it recomputes.
    middle = best.stages[1:7]
    assert {len(stage.layers) for stage in middle} == {4}
    loads = [stage.load_s for stage in middle]
    assert loads == sorted(loads, reverse=True)
    assert loads[0] > loads[-1]
    assert middle[-1].recompute == "none"


def test_whole_stages_recompute_early_where_blocks_may_not_differ():
    plans = found(
        "llama2-7b", 8, memory_gib=40, micro_batch=4, tp=1, pp=8,
        dp=1, schedule="1f1b", zero=0, global_batch=128,
        recompute=("none", "selective", "full"), recompute_some=False,
    )  # fmt: skip
    kinds = [stage.recompute for stage in plans.best.stages]
    assert plans.best.recompute == "mixed"
    assert kinds == sorted(kinds)  # full before none


def test_nothing_fits_with_a_reason():
    plans = found("gpt3-175b", 8)
    assert len(plans) == 0
    words = str(plans.infeasible)
    assert "too much; most of it is optimizer" in words
    assert "It would fit with" in words
    assert any(why.startswith("memory: tp") for why in plans.rejected)
    # What is said to be the nearest that fits does fit, and half of it does not.
    devices = int(re.search(r"It would fit with (\d+) devices", words).group(1))
    assert len(found("gpt3-175b", devices)) > 0
    assert len(found("gpt3-175b", devices // 2)) == 0
    odd = found("gpt2-small", 8, global_batch=7, micro_batch=2)
    assert "does not divide the batch of 7" in str(odd.infeasible)


def test_a_cluster_without_chip_or_memory_is_refused():
    step = Training(global_batch=8)
    bare = Cluster(devices=8, fabric="dgx-h100")
    with pytest.raises(InvalidInputError, match=r"cluster\.chip: missing"):
        plan(pf.models.load("gpt2-small"), bare, step)
    wafer = Cluster(devices=1, fabric="dgx-h100", chip="wse-2")
    with pytest.raises(InvalidInputError, match="no HBM"):
        plan(pf.models.load("gpt2-small"), wafer, step)


def test_a_problem_asked_again_has_the_same_answer_whatever_was_asked_before():
    asked = pf.models.load("gpt2-small"), cluster(8, 4), Training(global_batch=32, uncut=(3, 5))
    planner._evaluator.cache_clear()
    first = plan(*asked, top=3)
    assert first.rejected
    assert first.complete
    stopped = plan(*asked, top=3, stop=lambda: True)
    stopped.rejected.clear()  # the caller's own
    with ThreadPoolExecutor(2) as pool:
        others = list(pool.map(lambda _: plan(*asked, top=3, threads=1), range(4)))
    assert planner._evaluator.cache_info().misses == 1
    for again in (plan(*asked, top=3), *others):
        assert again.plans == first.plans
        assert again.rejected == first.rejected
        assert again.complete
        assert again.tried == first.tried
    planner._evaluator.cache_clear()
    assert plan(*asked, top=3).to_dict() == first.to_dict()


def test_an_expert_on_one_replica_has_nobody_to_share_its_state_with():
    fixed = {"tp": 1, "pp": 2, "dp": 8, "micro_batch": 1}
    alone = found("mixtral-8x7b", 16, 640, ep=8, zero=0, **fixed).best
    shared = found("mixtral-8x7b", 16, 640, ep=8, zero=1, **fixed).best
    graph = pf.layer_graph(pf.models.load("mixtral-8x7b"), Strategy(ep=8))
    moe = next(layer for layer in graph.layers if layer.kind == "moe-block")
    for before, after in zip(alone.stages, shared.stages, strict=True):
        held = sum(graph.layers[graph.order[i]].device_parameters for i in after.layers)
        experts = moe.expert_parameters * after.kinds["moe-block"]
        assert before.memory["optimizer"] == pytest.approx(12 * held)
        expected = 12 * (experts + (held - experts) / 8)
        assert after.memory["optimizer"] == pytest.approx(expected)


def test_recomputation_shows_where_it_is_asked_for():
    fixed = {"tp": 1, "pp": 1, "schedule": "1f1b"}
    plain = found("gpt2-small", 8, recompute="none", **fixed).best
    again = found("gpt2-small", 8, recompute="full", **fixed).best
    assert plain.parts_s["recompute"] == 0
    assert again.parts_s["recompute"] > 0.1 * again.parts_s["compute"]


def test_what_is_reserved_stays_free():
    for gib in (1, 8):
        plans = found("llama2-7b", 8, reserved_bytes=gib * 2**30)
        most = (80 - gib) * 2**30
        assert all(p.memory_bytes <= most for p in [*plans.plans, *plans.front])


def test_questions_that_are_not_right():
    model, step = pf.models.load("gpt2-small"), Training(global_batch=8)
    with pytest.raises(InvalidInputError, match="top: 0"):
        plan(model, cluster(8), step, top=0)
    with pytest.raises(InvalidInputError, match="expected a TransformerModel"):
        plan(8, cluster(8), step)
    assert plan("gpt2-small", cluster(8), step).best == plan(model, cluster(8), step).best
    with pytest.raises(InvalidInputError, match="reserved_bytes"):
        plan(model, cluster(8), Training(global_batch=8, reserved_bytes="90 GiB"))
    with pytest.raises(InvalidInputError, match="uncut: 0"):
        Training(global_batch=8, uncut=(0,))
    with pytest.raises(pf.InfeasibleError, match="too much"):
        _ = found("gpt3-175b", 8).best
    assert "33" in str(found("gpt2-small", 8, pp=33).infeasible)
    assert "does not divide" in str(found("gpt2-small", 8, dp=3).infeasible)


def test_where_nothing_fits_replicas_share_gradients_and_weights():
    """Eight billion parameters and 65,536 tokens on eight H100s, as torchtitan ran them."""
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    step = Training(global_batch=4, cp=2, tp=1, pp=1)
    longest = step.replace(seq=65_536)
    found = plan("llama3-8b", cluster, longest, threads=1)
    assert found.best.zero >= 2
    assert found.training.zero == (2, 3)
    assert "ZeRO 2" in found.space
    assert "ZeRO 0" not in found.space
    assert found.best.recompute != "full"
    assert not plan("llama3-8b", cluster, longest.replace(zero=(0, 1)), threads=1).plans
    assert plan("llama3-8b", cluster, step.replace(seq=4096)).training.zero == (0, 1)


def test_replicas_lie_inside_where_a_pipeline_fits_into_a_node():
    step = Training(global_batch=32, micro_batch=1, tp=1, cp=1)
    evaluator = PlanEvaluator(pf.models.load("gpt2-small"), cluster(64), step, [80 * 2**30])
    layouts = evaluator.layouts
    several = layouts[layouts["dp"] > 1]
    both = set(several["pp"][several["rank_order"] == 1].tolist())
    assert both == {p for p in several["pp"].tolist() if 1 < p <= 8}
    assert {8, 9} <= set(several["pp"].tolist())
