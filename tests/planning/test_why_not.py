"""What a user's own plan gives beside the fastest, the space in words, widths tried by default."""

import json
import re

import pytest

from phaze_fast import Cluster, InvalidInputError, Training, models, plan, predict, why_not
from phaze_fast.cli.main import main
from phaze_fast.planning import PARTS, read_asked
from phaze_fast.planning.plans import plan_groups


@pytest.fixture(scope="module")
def found():
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    step = Training(global_batch=64, micro_batch=(1, 2), schedule="1f1b")
    return plan("llama2-7b", cluster, step, threads=1)


def test_the_best_of_what_is_asked_about_is_held_against_the_fastest(found):
    answer = why_not(found, {"tp": 8}, threads=1)
    assert answer.plan.tp == 8
    assert answer.fastest == found.best
    assert answer.plan == predict(found.model, found.cluster, answer.plan)
    assert answer.slower_by == pytest.approx(answer.plan.time_s / found.best.time_s - 1)
    assert sum(answer.parts_s.values()) == pytest.approx(answer.plan.time_s - found.best.time_s)
    assert tuple(answer.parts_s) == PARTS
    assert "tensor_comm +" in str(answer)


@pytest.mark.parametrize("asked", [{"tp": 8}, {"pp": 2}])
def test_the_four_parts_that_differ_most_are_named_from_a_hundredth_on(found, asked):
    answer = why_not(found, asked, threads=1)
    excess_s = answer.plan.time_s - found.best.time_s
    largest = sorted(answer.parts_s, key=lambda name: abs(answer.parts_s[name]), reverse=True)[:4]
    named = [name for name in largest if abs(answer.parts_s[name]) > 0.01 * excess_s]
    listed = re.findall(r"(\w+) ([+-])\d", str(answer).partition("against the fastest: ")[2])
    assert listed == [(name, "+-"[answer.parts_s[name] < 0]) for name in named]
    assert f"takes {answer.slower_by:.1%} longer than the fastest" in str(answer)


def test_the_fastest_itself_is_said_to_be_so(found):
    best = found.best
    answer = why_not(found, {"tp": best.tp, "pp": best.pp, "dp": best.dp}, threads=1)
    assert answer.slower_by == 0
    assert "that is the fastest" in str(answer)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tp": 3}, "3"),
        ({"pp": 16}, "16"),
        ({"dp": 5}, "5"),
        ({"dp": 8, "zero": 0, "recompute": "none", "micro_batch": 2}, "GiB"),
    ],
)
def test_what_cannot_be_has_its_rule_and_numbers(found, asked, said):
    answer = why_not(found, asked, threads=1)
    assert answer.plan is None
    assert answer.slower_by is None
    assert not answer.parts_s
    assert said in answer.reason
    assert "there is no such plan" in str(answer)
    json.dumps(answer.to_dict())


@pytest.mark.parametrize("text", ["", "tp", "tp=", "width=4", "tp=8,,pp=4"])
def test_malformed_fields_are_refused_by_name(text):
    with pytest.raises(InvalidInputError, match="why-not"):
        read_asked(text)


def test_unknown_fields_are_refused(found):
    for asked, named in (({"width": 2}, "'width'"), ({}, "{}")):
        with pytest.raises(InvalidInputError, match=f"asked: {named} is not accepted"):
            why_not(found, asked)


def test_expert_and_context_widths_are_tried_where_practice_does():
    cluster = Cluster(devices=64, fabric="dgx-h100", chip="h100")
    step = Training(global_batch=64, micro_batch=1, tp=1, schedule="1f1b", zero=1)
    moe = plan("mixtral-8x7b", cluster, step.replace(expert_imbalance=1.0), threads=1)
    assert "expert parallel 1, 2, 4, 8 with experts over 1 devices each, " in moe.space
    assert any(each.ep > 1 for each in moe.plans)
    dense = plan("llama2-7b", cluster, step, threads=1)
    assert "expert parallel 1;" in dense.space
    assert "context parallel 1;" in dense.space
    long = plan("llama2-7b", cluster, step.model_copy(update={"seq": 32768}), threads=1)
    assert "context parallel 1, 2, 4 (all-gather, ring, ulysses);" in long.space
    assert models.load("llama2-7b").moe is None


def test_short_sequences_of_mixtures_are_split_too():
    """Experts lie over context-parallel devices, which then replace tensor-parallel ones."""
    cluster = Cluster(devices=32, fabric="dgx-h100", chip="h100")
    step = Training(global_batch=64, micro_batch=1, zero=1, schedule="1f1b", pp=4, ep=8)
    model = models.load("deepseek-v3").replace(layers=8)
    free = plan(model, cluster, step.replace(seq=4096), threads=1)
    assert "context parallel 1, 2, 4 (all-gather, ring, ulysses, ulysses:N/ring);" in free.space
    alone = plan(model, cluster, step.replace(seq=4096, cp=1), threads=1)
    assert free.best.cp > 1
    assert free.best.time_s < alone.best.time_s


def test_the_command_says_space_and_why_not(tmp_path):
    file = tmp_path / "plan.json"
    words = "plan bert-large --chip h100 --devices 8 --global-batch 64 --schedule 1f1b --zero 1"
    asked = ["--why-not", "tp=8", "--json", "-o", str(file)]
    assert main([*words.split(), *asked]) == 0
    document = json.loads(file.read_text())
    assert document["space"].startswith("tensor parallel 1, 2, 4, 8; ")
    assert document["why_not"]["plan"]["tp"] == 8
    first = document["plans"][0]
    assert set(first["parts_s"]) == set(PARTS)
    for name in ("vpp", "schedule", "tflops_per_device", "tokens_per_s_per_device", "hfu"):
        assert name in first
    assert first["tflops_per_device"] == pytest.approx(first["mfu"] * 989.4, rel=0.001)


@pytest.mark.parametrize(
    ("framework", "asked", "rule"),
    [
        ("megatron", {"schedule": "zb-h1"}, "schedule: megatron can .* zb-h1; expected 1f1b, inte"),
        ("torchtitan", {"zero": 1}, "zero: torchtitan can express none of .* 1; expected 0, 2, 3"),
        ("torchtitan", {"rank_order": "stages-inside", "pp": 2, "dp": 4}, "replicas lie inside"),
        ("deepspeed", {"pp": 2}, "deepspeed: the program builds the pipeline"),
        ("maxtext", {"cp": 2, "cp_kind": "ring"}, "maxtext: context parallelism is by all-gather"),
    ],
)
def test_what_a_framework_forbids_has_its_rule_and_what_it_would_take(framework, asked, rule):
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    step = Training(global_batch=32, micro_batch=1)
    plans = plan("gpt2-small", cluster, step, threads=1, framework=framework)
    answer = why_not(plans, asked, threads=1)
    assert answer.plan is None
    assert re.search(rule, answer.reason), answer.reason
    assert len(answer.reason.splitlines()) == 1
    for name, value in asked.items():
        assert getattr(answer.unlimited, name) == value
    assert f"{framework} cannot run such a plan" in str(answer)
    more = answer.unlimited.time_s / answer.fastest.time_s - 1.0
    assert f" {abs(more):.1%} {'longer' if more > 0 else 'less'} than" in str(answer)
    assert json.loads(json.dumps(answer.to_dict()))["unlimited"]["time_s"] > 0


def test_memory_stays_the_reason_where_a_framework_has_such_plans():
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    step = Training(global_batch=8, micro_batch=1)
    plans = plan("llama2-7b", cluster, step, threads=1, framework="megatron")
    answer = why_not(plans, {"tp": 1, "pp": 1, "dp": 8, "zero": 0}, threads=1)
    assert answer.unlimited is None
    assert "there is no such plan" in str(answer)
    assert "GiB" in answer.reason
    nothing = plan("llama2-7b", cluster, step.replace(dp=8, zero=0), threads=1)
    said = f"llama2-7b on 8 x h100: infeasible; {nothing.shortfall}"
    assert (nothing.headline(), "GiB" in nothing.shortfall) == (said, True)
    assert plans.headline().startswith("llama2-7b on 8 x h100: optimal, no plan takes less than ")


@pytest.mark.parametrize("ep", [1, 8])
def test_no_replicas_says_what_they_must_divide(ep):
    cluster = Cluster(devices=32, fabric="dgx-h100", chip="h100")
    step = Training(global_batch=32, dp=5, ep=ep, etp=1, tp=1, pp=1, cp=1)
    (said,) = plan("mixtral-8x7b", cluster, step, threads=1).rejected
    experts = " or is no multiple of the 8 that experts span," if ep > 1 else ""
    assert said == f"dp: [5] does not divide a batch of 32 evenly,{experts} or is more than 32"


def test_schedules_with_too_many_chunks_are_counted_by_name():
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    step = Training(global_batch=32, schedule=("interleaved", "1f1b"), vpp=8, pp=8, tp=1)
    rejected = plan("gpt2-small", cluster, step, threads=1).rejected
    said = "schedule: interleaved with 8 chunks a stage has more chunks than the model's 14 layers"
    assert rejected[said] > 0
    assert not any("1f1b with" in why for why in rejected)


def test_figures_of_a_plan_follow_from_its_seconds(found):
    best = found.best
    assert best.samples_per_s == pytest.approx(64 / best.time_s)
    assert best.parts_s[best.bottleneck] == max(best.parts_s.values())


@pytest.mark.parametrize(
    ("widths", "said"),
    [({"zero": 3}, "sharded"), ({"zero": 1}, "replicas"), ({"zero": 3, "tp": 2}, "tensor")],
)
def test_plans_are_grouped_by_what_runs_across_devices(widths, said):
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    spec = {"global_batch": 64, "dp": 8 // widths.get("tp", 1), **widths}
    assert any(said in name for name in plan_groups(predict("gpt2-small", cluster, spec), cluster))
