"""Utilisation and rates of a step, by hand and by law."""

import pytest

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.models import model_flops
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.planning import (
    hfu,
    mfu,
    mfu_causal,
    step_throughput,
    tflops_per_device,
    tokens_per_s_per_device,
)


def test_published_megatron_runs():
    """Korthikanti et al. 2022, table 5: iteration times with MFU and HFU (full attention, A100).

    GPT 22B, 175B, 530B and 1T on 8, 64, 280 and 512 GPUs. Their appendix A counts selective
    recomputation as all of attention once more, s/3h in place of s/6h.
    """
    runs = {
        "gpt-22b": (4, 8, 1.10, 0.415, 0.437),
        "gpt3-175b": (64, 64, 13.75, 0.514, 0.528),
        "gpt-530b": (280, 280, 37.83, 0.560, 0.570),
        "gpt-1t": (512, 512, 71.49, 0.563, 0.570),
    }
    for name, (batch, gpus, seconds, model_share, hardware_share) in runs.items():
        model = models.load(name)
        step = model_flops(model, 2048, batch)
        found = mfu(step, seconds, gpus, 312e12)
        assert found == pytest.approx(model_share, rel=0.012), name
        executed = hfu(step.total + step.attention, seconds, gpus, 312e12)
        assert executed == pytest.approx(hardware_share, rel=0.012), name


def test_llama_3_at_400_teraflops():
    """Grattafiori et al. 2024, table 4: 400 TFLOP/s per GPU is 41% of an H100."""
    model = models.load("llama3-405b")
    step = model_flops(model, 8192, 2048)
    seconds = step.total / (400e12 * 16384)
    found = step_throughput(model, 2048, seconds, 16384, 989.4e12, seq=8192)
    assert found.tflops_per_device == pytest.approx(400)
    assert found.mfu == pytest.approx(0.404, abs=0.001)
    assert found.tokens_per_s == pytest.approx(2048 * 8192 / seconds)


def test_laws():
    model = models.load("llama3-8b")
    base = step_throughput(model, 64, 2.0, 16, 1e15)
    assert base.mfu_causal < base.mfu
    assert base.hfu == base.mfu
    assert base.mfu == pytest.approx(base.tflops_per_device * 1e12 / 1e15)
    assert base.mfu_causal == pytest.approx(base.tflops_per_device_causal * 1e12 / 1e15)
    slower = step_throughput(model, 64, 4.0, 16, 1e15)
    for name, value in base.to_dict().items():
        assert slower.to_dict()[name] == pytest.approx(value / 2)
    again = step_throughput(model, 64, 2.0, 16, 1e15, recomputed_flops=3e15)
    assert again.hfu - base.hfu == pytest.approx(3e15 / (2.0 * 16 * 1e15))
    assert again.mfu == base.mfu
    bert = step_throughput(models.load("bert-large"), 64, 2.0, 16, 1e15)
    assert bert.mfu == bert.mfu_causal


def test_utilisation_is_labelled_by_what_it_counts(capsys):
    """Masked scores or not, and which peak: one convention for all number formats."""
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    given = {"tp": 2, "cp": 4, "global_batch": 8, "seq": 131072}
    for precision, peak in (("bf16", "bf16 peak of 989.4 TFLOP/s"), ("fp8", "fp8 peak of 1.979 P")):
        plan = pf.predict("llama3-8b", cluster, {**given, "precision": precision})
        said = plan.mfu_convention
        assert said.startswith("attention in full, over the dense ")
        assert peak in said
        assert f"{plan.mfu_causal:.1%} with the causal mask" in said
        assert plan.to_dict()["mfu_convention"] == said
        assert plan.mfu_causal < 0.6 * plan.mfu
    unmasked = pf.predict("bert-large", cluster, {"dp": 8, "global_batch": 8})
    assert "causal" not in unmasked.mfu_convention
    common = ["llama3-8b", "--chip", "h100", "--devices", "8", "--global-batch", "8"]
    for command in (["plan", *common, "--tp", "1", "--pp", "1"], ["predict", *common, "--dp", "8"]):
        assert main(command) == 0
        assert "attention in full" in " ".join(capsys.readouterr().out.split())


def test_a_plan_says_the_same_of_itself():
    """Its rates are these functions' rates of its own seconds."""
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    plan = pf.predict("llama2-7b", cluster, {"tp": 4, "dp": 2, "global_batch": 64})
    peak = pf.presets.chip("h100").peak_flops()
    found = step_throughput(models.load("llama2-7b"), 64, plan.time_s, 8, peak, seq=plan.seq)
    assert found.tokens_per_s == pytest.approx(plan.tokens_per_s)
    assert 0 < found.mfu_causal < found.mfu < 1
    for widths in (
        {"tp": 2, "cp": 2, "dp": 2},
        {"tp": 2, "pp": 4, "schedule": "1f1b"},
        {"tp": 2, "pp": 4, "schedule": "dualpipe", "vpp": 2},  # two copies, half the batch each
    ):
        given = {**widths, "global_batch": 16, "recompute": "full"}
        plan = pf.predict("llama2-7b", cluster, given)
        strategy = Strategy(tp=2, cp=plan.cp, sequence_parallel=True)
        block = layer_graph(models.load("llama2-7b"), strategy).layers[1]
        repeated = block.count * block.forward.flops * 2 * plan.cp * 16
        assert (plan.hfu - plan.mfu) * plan.time_s * 8 * peak == pytest.approx(repeated, rel=1e-9)


@pytest.mark.parametrize("field", ["time_s", "devices", "peak_flops"])
@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf")])
def test_bad_numbers(field, bad):
    step = model_flops(models.load("gpt2"))
    args = {"time_s": 1.0, "devices": 8, "peak_flops": 1e15, field: bad}
    for function in (mfu, mfu_causal):
        with pytest.raises(InvalidInputError, match=f"{field}: .* is not accepted"):
            function(step, **args)
    with pytest.raises(InvalidInputError, match=f"{field}: .* is not accepted"):
        hfu(1e15, **args)
    if field != "peak_flops":
        args.pop("peak_flops")
        with pytest.raises(InvalidInputError, match=field):
            tflops_per_device(1.0, **args)
        with pytest.raises(InvalidInputError, match=field):
            tokens_per_s_per_device(1.0, **args)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_bad_hardware_flops(bad):
    with pytest.raises(InvalidInputError, match="hardware_flops"):
        hfu(bad, 1.0, 1, 1e12)
