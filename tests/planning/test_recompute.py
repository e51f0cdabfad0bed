"""What stages recompute: its texts, the fastest of all that fits, and no more of it than needed."""

import itertools
import random

import pytest
from case_counts import some_or_many
from golden_files import refused_calls
from oracle_cases import random_fabric, small_model
from plan_cases import with_memory
from reference.plan import recompute_texts

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster
from phaze_fast.opgraph import RECOMPUTE_SETS, layer_graph
from phaze_fast.planning import PlanSpec, Training, plan, predict, predict_batch
from phaze_fast.planning.training import (
    RECOMPUTE,
    block_mode,
    check_stage_recompute,
    modes_in,
    recompute_code,
    recompute_text,
)

CLOSE = 1e-12
MIB, GIB = 2**20, 2**30

# ---- texts ----


def test_texts_and_codes_round_trip():
    variant_of = {mode: k for k, mode in enumerate(RECOMPUTE)}
    texts = list(recompute_texts(5, RECOMPUTE))
    codes = [recompute_code(text, variant_of) for text in texts]
    assert len(set(codes)) == len(texts) == 8 + 8 * 7 * 4
    for text, code in zip(texts, codes, strict=True):
        check_stage_recompute(text)
        again = recompute_text(code, RECOMPUTE)
        assert again == text.removesuffix("/none")
        assert recompute_code(again, variant_of) == code
        first, _, rest = text.partition("/")
        more, _, count = first.partition(":")
        for number in range(1, 7):
            expected = more if number <= int(count or 6) else rest
            assert block_mode(code, number, RECOMPUTE) == expected, (text, number)
        assert set(modes_in([text])) == {more, rest or more}


def test_one_mode_twice_is_that_mode():
    variant_of = {mode: k for k, mode in enumerate(RECOMPUTE)}
    check_stage_recompute("full:999999/none")
    assert recompute_code("full:3/full", variant_of) == variant_of["full"]
    # Two names of one variant, where attention is fused and selective recomputes nothing.
    assert recompute_code("selective:3/none", {"none": 0, "selective": 0}) == 0


@pytest.mark.parametrize(("text", "said"), refused_calls("what is recomputed"))
def test_what_is_no_text_is_refused_in_one_line(text, said):
    with pytest.raises(ValueError, match=r"^recompute: .*") as refused:
        check_stage_recompute(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(InvalidInputError, match="recompute") as refused:
        PlanSpec(global_batch=8, recompute=text)
    assert "\n" not in str(refused.value)
    on = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    with pytest.raises((InvalidInputError, ValueError), match="recompute"):
        predict_batch("gpt2-small", on, Training(global_batch=8), dp=8, recompute=text)
    with pytest.raises(InvalidInputError, match="recompute"):
        Training(global_batch=8, recompute=text)


def test_a_step_names_modes_and_plans_name_counts():
    with pytest.raises(InvalidInputError, match="recompute"):
        Training(global_batch=8, recompute="full:3")
    with pytest.raises(InvalidInputError, match="recompute"):
        Training(global_batch=8, recompute=("auto", "none"))
    names = sorted(RECOMPUTE_SETS)
    many = [*names, *("+".join(pair) for pair in itertools.combinations(names, 2))]
    assert len(many) > _core.MAX_VARIANTS
    with pytest.raises(InvalidInputError, match=f"expected {_core.MAX_VARIANTS} or fewer"):
        Training(global_batch=8, recompute=many)
    with pytest.raises(InvalidInputError, match=f"expected {_core.MAX_VARIANTS} or fewer"):
        PlanSpec(global_batch=len(many), pp=len(many), recompute=tuple(many))
    assert Training(global_batch=8, recompute=["none", "full", "none"]).recompute == (
        "none",
        "full",
    )


@pytest.mark.parametrize("mode", ["activations", "gated-product", "needed"])
def test_what_other_stages_recompute_changes_nothing_of_a_stage(mode):
    """Regression: a mode took the seconds of another that was named and kept as many bytes."""
    on = Cluster(devices=2, fabric="dgx-h100", chip="h100")
    spec = PlanSpec(global_batch=8, pp=2, recompute=mode)
    for software in ("megatron-core", "fsdp-torchtitan"):
        same = spec.replace(software=software)
        own = predict("llama2-7b", on, same).stages[1]
        for other in ("none", "activations", "norms", "full", "full:2/norms"):
            stages = predict("llama2-7b", on, same.replace(recompute=(other, mode))).stages
            assert (stages[1].load_s, stages[1].memory) == (own.load_s, own.memory), other


# ---- the fastest of all that fits ----


def random_case(rng):
    """A model, a cluster with too little memory for all of it, and a step of one layout."""
    schedule = rng.choice(["1f1b", "1f1b", "1f1b", "zb-h1", "gpipe", "interleaved", "zb-v"])
    p = rng.randint(1, 3) if schedule == "1f1b" else rng.randint(2, 3)
    model = small_model(rng)
    if model.layers + model.encoder_layers < 2 * p:
        model = model.replace(layers=2 * p, encoder_layers=0, moe=None)
    modes = tuple(rng.sample(RECOMPUTE, rng.randint(2, 3)))
    common = {"global_batch": rng.randint(1, 6), "optimizer": "sgd-bf16", "reserved_bytes": 0}
    step = Training(
        **common, micro_batch=1, tp=1, pp=p, dp=1, vpp=2, zero=0,
        schedule=schedule, recompute=modes, rank_order="replicas-inside",
    )  # fmt: skip
    cluster = Cluster(devices=p, fabric=random_fabric(rng, p), chip="h100")
    vpp = 2 if schedule in ("interleaved", "zb-v") else 1
    spec = PlanSpec(**common, pp=p, schedule=schedule, vpp=vpp)
    low, high = (
        predict(model, cluster, spec.replace(recompute=mode)).memory_bytes
        for mode in ("full", "none")
    )
    return model, with_memory(cluster, low + (high - low) * rng.uniform(0.1, 1.0)), step


def hold_fastest(model, cluster, found, modes):
    """Hold that every stage of a plan has the fastest of all texts that fit; how many are mixed."""
    spec = PlanSpec.of(found)
    room = found.limit_bytes * (1 + CLOSE)
    blocks = max(
        sum(n for kind, n in stage.kinds.items() if kind not in ("embedding", "head"))
        for stage in found.stages
    )
    least = [float("inf")] * found.pp
    for text in recompute_texts(blocks, modes):
        other = predict(model, cluster, spec.replace(recompute=text))
        for k, stage in enumerate(other.stages):
            if stage.memory_bytes <= room:
                least[k] = min(least[k], stage.load_s)
    for k, stage in enumerate(found.stages):
        assert stage.memory_bytes <= room
        assert stage.load_s == pytest.approx(least[k], rel=1e-9), (k, stage.recompute)
    return sum(":" in stage.recompute for stage in found.stages)


@some_or_many(6, 150, thorough=True)
def test_every_stage_recomputes_what_makes_it_fastest(cases):
    held = mixed = seed = 0
    while held < cases:
        seed += 1
        model, cluster, step = random_case(random.Random(seed))
        plans = plan(model, cluster, step, threads=1)
        if plans.plans:
            mixed += hold_fastest(model, cluster, plans.best, step.recompute)
            held += 1
    assert seed < 2 * cases
    assert mixed > cases // 15


@pytest.mark.slow
def test_auto_tries_every_mode_and_every_mix():
    held = mixed = seed = 0
    while held < 2 or not mixed:
        seed += 1
        model, cluster, step = random_case(random.Random(10_005 + seed))
        if model.layers + model.encoder_layers > 4:
            continue
        plans = plan(model, cluster, step.replace(recompute="auto"), threads=1)
        if plans.plans:
            mixed += hold_fastest(model, cluster, plans.best, RECOMPUTE)
            # A given plan chooses the same for the same stages.
            spec = PlanSpec.of(plans.best).replace(recompute="auto")
            assert predict(model, cluster, spec) == plans.best
            held += 1
    assert seed < 100


def test_whole_stages_are_alike_where_blocks_may_not_differ():
    for seed in range(25):
        model, cluster, step = random_case(random.Random(seed))
        whole = plan(model, cluster, step.replace(recompute_some=False), threads=1)
        mixed = plan(model, cluster, step, threads=1)
        assert len(whole) == len(mixed)  # a mix fits only where one of its modes does
        if whole.plans:
            assert all(stage.recompute in step.recompute for stage in whole.best.stages)
            assert mixed.best.time_s <= whole.best.time_s * (1 + CLOSE)


# ---- no more than needed ----


def fewer(text):
    """The text with one block less, or nothing of it."""
    first, _, rest = text.partition("/")
    more, _, count = first.partition(":")
    if int(count) == 1:
        return rest or "none"
    return f"{more}:{int(count) - 1}" + (f"/{rest}" if rest else "")


@pytest.mark.slow
def test_a_stage_that_recomputes_some_is_within_a_block_of_its_limit():
    held = 0
    for seed in range(200):
        model, cluster, step = random_case(random.Random(seed))
        if step.schedule[0] in ("interleaved", "zb-v") or model.moe or model.encoder_layers:
            continue  # below, all blocks are alike, and each stage has one run of them
        plans = plan(model, cluster, step, threads=1)
        if not plans.plans:
            continue
        best, graph = plans.best, layer_graph(model)
        whole = max(
            layer.forward.stashed_bytes() for layer in graph.layers if layer.kind == "block"
        )
        most = best.micro_batches if best.schedule == "gpipe" else min(best.micro_batches, best.pp)
        for k, stage in enumerate(best.stages):
            if ":" not in stage.recompute:
                continue
            texts = [each.recompute for each in best.stages]
            texts[k] = fewer(stage.recompute)
            spec = PlanSpec.of(best).replace(recompute=tuple(texts))
            over = predict(model, cluster, spec).stages[k].memory_bytes
            assert over > best.limit_bytes, (seed, k)
            free = best.limit_bytes - stage.memory_bytes
            assert 0 <= free * (1 + CLOSE) < over - stage.memory_bytes <= 1.03 * most * whole
            held += 1
    assert held > 20


@pytest.mark.parametrize("lacking", [1, 200, 822, 3000])
def test_a_little_too_much_costs_a_little(lacking):
    """All of the first stage recomputed costs a tenth of the speed and leaves 68 GiB of it free."""
    on = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    given = {"global_batch": 64, "pp": 4, "dp": 2, "micro_batch": 4, "zero": 1, "reserved_bytes": 0}
    plain = predict("llama2-7b", on, {**given, "recompute": "none"})
    short = with_memory(on, plain.memory_bytes - lacking * MIB)
    assert predict("llama2-7b", short, {**given, "recompute": "none"}).over_bytes > 0
    all_of_it = predict("llama2-7b", short, {**given, "recompute": ("full", *["none"] * 3)})
    found = predict("llama2-7b", short, given)
    assert all_of_it.over_bytes == 0
    assert all_of_it.time_s > 1.1 * plain.time_s
    assert all_of_it.limit_bytes - all_of_it.stages[0].memory_bytes > 55 * GIB
    assert found.over_bytes == 0
    assert found.time_s < 1.001 * plain.time_s
    first = found.stages[0]
    assert first.recompute != "none"
    assert found.limit_bytes - first.memory_bytes < 3 * GIB
