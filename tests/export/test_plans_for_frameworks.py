"""Plans for a framework: its file expresses all of them, and none that it can run is faster."""

import random

import pytest
from case_counts import some_or_many
from export_cases import SUFFIX
from plan_cases import random_problem

import phaze_fast as pf
from phaze_fast import export
from phaze_fast.errors import InvalidInputError
from phaze_fast.export.request import flag_names
from phaze_fast.planning.frameworks import (
    FRAMEWORKS,
    framework_precisions,
    framework_table,
    framework_training,
    recompute_modes,
)

SOME = (3, 9)  # seed and number of problems of every run
MORE = (5, 40)  # of the full one, for each framework


def problems(seed, count):
    """Random problems whose optimiser all frameworks have."""
    rng, own = random.Random(seed), random.Random(seed)
    for _ in range(count):
        model, cluster, training = random_problem(rng)
        offload = own.choice([(), (), ("optimizer",), ("activations", "optimizer")])
        yield model, cluster, training.replace(optimizer="adam", offload=offload)


def solved(format_, seed, count, **fixed):
    """Problems of which a framework can run some plan, with its plans."""
    for model, cluster, random_step in problems(seed, count):
        training = random_step.replace(**fixed)
        if format_ != "maxtext":  # it alone offloads activations of all blocks
            training = training.replace(offload=tuple({*training.offload} - {"activations"}))
        try:
            plans = pf.plan(model, cluster, training, framework=format_)
        except InvalidInputError:  # it can express none of the values to try
            continue
        if plans.plans:
            yield model, cluster, training, plans


@pytest.mark.parametrize("format_", FRAMEWORKS)
@pytest.mark.parametrize("sample", [SOME, pytest.param(MORE, marks=pytest.mark.slow)])
def test_the_file_expresses_the_plan_and_reads_back_the_same(format_, sample, tmp_path):
    path = tmp_path / f"run{SUFFIX.get(format_, '.sh')}"
    found = slower = 0
    for model, cluster, _, plans in solved(format_, *sample):
        found += 1
        assert plans.free.time_s <= plans.best.time_s * (1 + 1e-12)
        slower += plans.free.time_s < plans.best.time_s
        for plan in plans.plans[:3]:
            written = export.export_plan(plan, model, format_)
            assert written.plan_complete, written.unexpressed
            path.write_text(written.text)
            again = pf.predict(model, cluster, export.read_plan(path, model, cluster.devices).spec)
            assert again.time_s == pytest.approx(plan.time_s, rel=1e-12)
            assert again.memory_bytes == pytest.approx(plan.memory_bytes, rel=1e-12)
    assert found >= 3
    assert slower


@some_or_many(4, 6)
@pytest.mark.parametrize("format_", FRAMEWORKS)
def test_no_plan_that_the_file_expresses_is_faster(format_, cases):
    """All layouts with each mode, and of these the plans that the exporter expresses."""
    compared, order = 0, "replicas-inside"  # lists of plans have one rank order of each layout
    for model, cluster, training, plans in solved(format_, 11, cases, rank_order=order):
        limited, times = framework_training(format_, model, training), []
        for mode in limited.recompute:
            every = pf.plan(model, cluster, limited.replace(recompute=(mode,)), top=100_000)
            for plan in every.plans:
                if export.export_plan(plan, model, format_).plan_complete:
                    times.append(plan.time_s)
        compared += 1
        assert plans.best.time_s == pytest.approx(min(times), rel=1e-12)
        assert plans.status == "optimal"
        assert plans.space.startswith(f"plans that {format_} can run")
    assert compared >= 2


def test_the_table_lists_what_the_names_of_options_express():
    megatron = flag_names("megatron").tables
    for name in ("megatron", "bridge"):
        table = framework_table(name)
        assert set(table["optimizers"]) == set(megatron["optimizers"])
        assert set(table["precisions"]) == set(megatron["precisions"])
        assert set(table["cp_kinds"]) == set(megatron["cp_kinds"])
    for name, ours, theirs in (
        ("torchtitan", "schedules", "schedules"), ("torchtitan", "cp_kinds", "cp_kinds"),
        ("torchtitan", "optimizers", "param_formats"), ("maxtext", "recompute", "recompute"),
        ("deepspeed", "optimizers", "gradient_formats"),
    ):  # fmt: skip
        own = framework_table(name)[ours]
        listed = own["always"] if ours == "recompute" else own
        assert set(listed) == set(flag_names(name).tables[theirs]), (name, ours)


@pytest.mark.parametrize(
    ("framework", "given"),
    [
        ("deepspeed", {"seq": 1024}),
        ("megatron", {"schedule": "interleaved", "pp": 2, "zero": 1}),
        ("megatron", {"rank_order": "stages-inside", "pp": 1, "zero": 2}),
    ],
)
def test_what_a_framework_can_run_is_found(framework, given):
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    step = pf.Training(global_batch=32, micro_batch=1, **given)
    best = pf.plan("gpt2-small", cluster, step, threads=1, framework=framework).best
    assert all(getattr(best, name) == value for name, value in given.items())


def test_what_a_framework_cannot_run_is_refused_by_name():
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    for framework, given, said in (
        (
            "deepspeed",
            {"precision": "fp8"},
            "precision: 'fp8' is not accepted; expected one of bf16",
        ),
        (
            "torchtitan",
            {"optimizer": "sgd"},
            "optimizer: 'sgd' is not accepted; expected one of adam",
        ),
        ("maxtext", {"recompute": "none"}, "recompute: maxtext can express none of the values"),
        ("deepspeed", {"seq": 512}, "seq: 512 is not accepted"),
        ("torchtitan", {"zero": 1}, "zero: torchtitan can express none of the values"),
        (
            "megatron",
            {"software": "pytorch-eager"},
            "software: .* files of megatron do not give it",
        ),
        ("megatrn", {}, "framework: 'megatrn' is not accepted; did you mean 'megatron'"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            pf.plan("llama2-7b", cluster, pf.Training(global_batch=8, **given), framework=framework)


def test_number_formats_of_dense_models_are_not_those_of_experts():
    dense, experts = (
        framework_precisions("torchtitan", pf.models.load(name))
        for name in ("llama2-7b", "mixtral-8x7b")
    )
    assert set(dense) - set(experts) == {"fp8-tensorwise"}


def test_mixed_recomputation_is_what_megatron_lacks():
    """Memory in which each stage recomputes another share: one mode for all stages is slower."""
    cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    step = pf.Training(global_batch=32, micro_batch=2, tp=4, pp=4, dp=1, zero=0, schedule="1f1b")
    plans = pf.plan("llama2-70b", cluster, step.replace(reserved_bytes=0), framework="megatron")
    assert len({stage.recompute for stage in plans.best.stages}) == 1
    assert plans.best.time_s == pytest.approx(plans.free.time_s * (1 + plans.lost_to_framework))
    assert plans.lost_to_framework > 0
    assert recompute_modes("bridge", plans.model) == recompute_modes("megatron", plans.model)


def test_only_models_of_gated_experts_in_every_layer_recompute_their_activations():
    """Megatron-Core's moe_act recomputes what experts compute, and nothing of dense layers."""
    mixture = pf.models.load("mixtral-8x7b")
    first_dense = mixture.replace(moe=mixture.moe.replace(dense_layers=1))
    plain = mixture.replace(activation="gelu", gated=False)
    assert "activations+gated-product" in recompute_modes("megatron", mixture)
    for model in (first_dense, plain, pf.models.load("llama2-7b")):
        assert "activations+gated-product" not in recompute_modes("megatron", model)
