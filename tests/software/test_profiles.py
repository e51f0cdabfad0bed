"""Profiles of training software: all load, say where they come from, and obey laws of time."""

import json

import pytest
from golden_files import golden_rows
from refusals import refusal

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets
from phaze_fast.models import load
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.planning import Training, predict
from phaze_fast.software import (
    DEFAULT,
    Software,
    chip_as_run,
    load_software,
    model_as_run,
    software_names,
)

EXPECTED = {
    *("megatron-lm-2020", "megatron-lm-2021", "megatron-lm-2022", "megatron-core", "deepspeed"),
    *("fsdp-torchtitan", "fsdp-torchtitan-async", "fsdp-llm-foundry", "huggingface-eager"),
    "maxtext",
}
CLUSTER = pf.Cluster(devices=8, fabric="dgx-a100", chip="a100-80")
PLAN = {"tp": 2, "dp": 4, "global_batch": 32, "micro_batch": 2, "recompute": "full"}


def seconds(software, model="gpt2-small", **changed):
    profile = load_software(software).replace(**changed) if changed else load_software(software)
    return predict(model, CLUSTER, {**PLAN, "software": profile}).time_s


@pytest.mark.parametrize("name", software_names())
def test_every_profile_loads_and_has_sources(name):
    profile = load_software(name)
    assert profile.name == name
    assert profile.sources
    known = set(Software.model_fields)
    assert set(profile.fitted) <= known


def test_the_named_profiles_are_there():
    assert set(software_names()) >= EXPECTED
    assert DEFAULT == "megatron-core"
    assert pf.Training(global_batch=8).software.name == DEFAULT
    said = refusal(pf.Training, global_batch=8, software="deepspeeed", error=InvalidInputError)
    assert said.startswith("software: 'deepspeeed' is neither a preset")


def test_a_profile_is_read_from_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nhost_s: 100 us\n")
    plan = predict("gpt2-small", CLUSTER, {**PLAN, "software": str(path)})
    again = predict("gpt2-small", CLUSTER, json.loads(json.dumps(plan.to_dict())))
    assert again == plan  # the file is not needed to read the plan back
    assert pf.Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert plan.time_s > predict("gpt2-small", CLUSTER, PLAN).time_s


def test_a_slower_host_never_makes_a_step_faster():
    times = [seconds("megatron-core", host_s=h) for h in (0.0, 1e-6, 1e-5, 1e-4)]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_a_host_bound_step_is_as_long_as_its_launches():
    slow = load_software("megatron-core").replace(host_s=1e-3)
    plan = predict("gpt2-small", CLUSTER, {**PLAN, "software": slow})
    graph = pf.layer_graph(
        load("gpt2-small"), pf.Strategy(tp=2, sequence_parallel=True, micro_batch=2)
    )
    launches = 0
    for layer in graph.layers:
        again = len(layer.forward) if layer.kind == "block" else 0
        launches += layer.count * (len(layer.forward) + len(layer.backward) + again)
    assert plan.time_s == pytest.approx(4 * launches * 1e-3, rel=0.02)
    assert plan.parts_s["host"] > 0.8 * plan.time_s


def test_slower_kernels_and_networks_take_longer():
    least = seconds("megatron-core")
    assert seconds("megatron-core", attention="eager") > least
    assert seconds("megatron-core", attention_speed={"a100-80": 0.5}) > least
    assert seconds("megatron-core", product_speed={"a100-80": 0.5}) > least
    assert seconds("megatron-core", loss_passes=20) > least
    assert seconds("megatron-core", overlap_gradients=False) > least


def test_the_vocabulary_is_padded_for_the_tensor_group():
    model, old = load("gpt2-xl"), load_software("megatron-lm-2022")
    assert model_as_run(model, old, 1).vocab == 50304
    assert model_as_run(model, old, 8).vocab == 51200
    assert model_as_run(model, load_software(DEFAULT), 8) is model


def test_single_operators_do_not_see_the_rate_of_a_job():
    chip = presets.chip("a100-80")
    run = chip_as_run(chip, load_software(DEFAULT))
    reached = min(run.peak_flops() * run.tuning.efficiency, run.tuning.sustained_flops)
    assert chip.tuning.step_flops["bf16"] == pytest.approx(reached, rel=1e-9)
    assert run.tuning.efficiency < chip.tuning.efficiency
    share = run.tuning.efficiency / chip.tuning.efficiency
    for name in ("port_even_bytes_per_cycle", "port_odd_bytes_per_cycle"):
        assert getattr(run.tuning, name) == pytest.approx(getattr(chip.tuning, name) * share)
    assert chip_as_run(presets.chip("tpuv4"), load_software(DEFAULT)) == presets.chip("tpuv4")


def test_a_profile_is_referred_to_by_name_only_if_it_is_the_preset():
    preset = load_software("deepspeed")
    assert preset.reference == "deepspeed"
    slower = preset.replace(host_s=1.0)
    assert slower.reference["host_s"] == 1.0


def test_a_plan_remembers_its_software():
    given = {**PLAN, "software": "megatron-lm-2021"}
    first = predict("gpt2-small", CLUSTER, given)
    again = predict("gpt2-small", CLUSTER, first)
    assert again == first
    assert pf.Plan.from_dict(first.to_dict()) == first


def test_what_an_allocator_reserves_is_as_measured():
    rows = golden_rows("h200_reserved.csv")
    assert len(rows) == 36
    ratios = [float(row["reserved_gib"]) / float(row["active_gib"]) for row in rows]
    for name in ("fsdp-torchtitan", "fsdp-torchtitan-2024", "fsdp-torchtitan-eager"):
        share = load_software(name).reserved_share
        assert share == pytest.approx(sum(ratios) / len(ratios) - 1.0, abs=0.005)
    assert load_software("huggingface-eager").reserved_share == 0.0  # reports what is in use


def test_a_pass_waits_for_each_expert_that_is_launched_on_its_own():
    profile = load_software("nemo").replace(expert_launch_s=0.0)
    plan = {"dp": 8, "ep": 4, "global_batch": 64, "recompute": "none", "zero": 1}
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h200")
    model = load("mixtral-8x7b").replace(layers=4)

    def step(launch_s):
        used = profile.replace(expert_launch_s=launch_s)
        return predict(model, cluster, {**plan, "software": used})

    free, waiting = step(0.0), step(1e-4)
    # 8 micro-batches, 4 layers, 2 of 8 experts on a device, once forward and twice backward
    longer = 8 * 4 * 2 * 3e-4
    assert waiting.time_s - free.time_s == pytest.approx(longer, rel=0.02)
    assert waiting.parts_s["host"] - free.parts_s["host"] == pytest.approx(longer, rel=0.02)
    assert seconds("nemo", expert_launch_s=1.0) == seconds("nemo", expert_launch_s=0.0)


def test_kernels_of_their_own_add_the_biases_of_experts():
    """Each element is read and written 14 bytes' worth, and each expert takes 8 launches of 22."""
    profile = load_software("nemo")
    plan = {"dp": 8, "ep": 4, "global_batch": 64, "recompute": "none", "zero": 1}
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h200")
    biased = load("gpt-oss-20b").replace(layers=4)

    def step(model, apart):
        used = profile.replace(expert_bias_unfused=apart)
        return predict(model, cluster, {**plan, "software": used})

    added, apart = step(biased, False), step(biased, True)
    waits = (
        8 * 4 * 8 * 3e-4 * 8 / 22
    )  # micro-batches, layers, experts of a device, passes, launches
    assert apart.parts_s["host"] - added.parts_s["host"] == pytest.approx(waits, rel=0.02)
    rows = 4096 * 4  # of a device: four experts each
    moved_s = 8 * 4 * 2 * 28 * rows * biased.hidden / 4e12
    longer = apart.parts_s["compute"] - added.parts_s["compute"]
    assert longer == pytest.approx(moved_s, rel=0.25)  # a row more or less for each expert
    assert step(load("mixtral-8x7b"), True).time_s == step(load("mixtral-8x7b"), False).time_s


def test_a_profile_says_how_rows_reach_experts():
    mixture = load("mixtral-8x7b")
    nemo = model_as_run(mixture, load_software("nemo"))
    assert (nemo.moe.moves, nemo.moe.sent_once) == (2, False)
    bridge = model_as_run(mixture, load_software("megatron-bridge"))
    assert (bridge.moe.moves, bridge.moe.sent_once) == (0, True)
    assert model_as_run(mixture, load_software(DEFAULT)).moe == mixture.moe


def attention_kernels(software, tp, micro_batch):
    """Names of what runs between the scores and the mix of one block, forward."""
    gpt = load("gpt2-small").replace(heads=16, hidden=1024)
    model = model_as_run(gpt, load_software(software), tp)
    strategy = Strategy(tp=tp, micro_batch=micro_batch)
    names = layer_graph(model, strategy).layers[1].forward.names
    return names[names.index("scores") + 1 : names.index("mix")]


def test_softmax_is_fused_where_its_kernel_takes_the_heads_of_a_device():
    fused = ("softmax", "score-dropout")
    by_steps = (
        *("scores-to-fp32", "score-scale", "score-mask", "softmax", "weights-from-fp32"),
        "score-dropout",
    )
    for name in ("megatron-lm-2021", "megatron-lm-2022"):
        assert tuple(attention_kernels(name, 8, 2)) == fused  # two heads of two sequences
        assert tuple(attention_kernels(name, 4, 1)) == fused
        assert tuple(attention_kernels(name, 8, 1)) == by_steps
    assert tuple(attention_kernels("megatron-lm-2020", 8, 1)) == fused


def test_a_softmax_by_steps_is_as_many_kernels_backward_and_keeps_fp32_weights():
    gpt = load("gpt2-small").replace(heads=2, hidden=128, attention="eager")
    fused, by_steps = (
        layer_graph(gpt.replace(softmax_multiple=k), Strategy()).layers[1] for k in (1, 4)
    )
    assert len(by_steps.forward) - len(fused.forward) == 4
    assert len(by_steps.backward) - len(fused.backward) == 4
    scores = 2 * gpt.seq**2
    kept = [layer.forward.stashed_bytes() for layer in (by_steps, fused)]
    assert kept[0] - kept[1] == 4 * scores
    again = [layer.forward.stashed_bytes("selective") for layer in (by_steps, fused)]
    assert again[0] == again[1]
    moved = [
        sum(float(op["read_bytes"] + op["write_bytes"]) for op in layer.forward.ops)
        for layer in (by_steps, fused)
    ]
    assert moved[0] - moved[1] == (6 + 8 + 8 + 8 + 6 - 4) * scores


@pytest.mark.parametrize("window", [1, 100, 1024, 2048, 2049, 5000, 8192])
def test_windows_are_computed_in_whole_blocks_where_a_kernel_has_them(window):
    seq = 8192
    llama = load("llama2-7b").replace(window=window, seq=seq)
    model = model_as_run(llama, load_software("maxtext"))

    def keys(used):
        graph = layer_graph(used, Strategy()).layers[1].forward
        return int(graph.ops[graph.names.index("attention")]["n"]), graph.flops

    block, met = 2048, 0
    for query in range(0, seq, block):
        for key in range(0, seq, block):  # is there a query of the block that sees a key of it?
            met += key <= query + block - 1 and key + block - 1 > query - window
    plain, blocks = keys(llama), keys(model)
    if window < seq:
        assert blocks[0] == max(plain[0], met * block * block // seq)
    else:
        assert blocks == plain  # no window is left
    assert blocks[1] == plain[1]  # the model's arithmetic is what it was


def test_rows_gathered_along_sequences_are_copied_by_dtensor():
    llama = load("llama2-7b")
    strategy = Strategy(tp=4, sequence_parallel=True, micro_batch=2)

    def passes(software):
        model = model_as_run(llama, load_software(software), 4)
        layer = layer_graph(model, strategy).layers[1]
        return layer.forward, layer.backward

    both = zip(passes("fsdp-torchtitan"), passes("fsdp-torchtitan-async"), strict=True)
    for copied, plain in both:
        added = [copied.ops[i] for i, name in enumerate(copied.names) if name.endswith("-order")]
        assert len(copied) - len(plain) == len(added) == 4  # both ends of both sub-layers
        whole = 2 * 2 * llama.seq * llama.hidden
        assert all(op["read_bytes"] == op["write_bytes"] == whole for op in added)
    alone = load_software("fsdp-torchtitan")
    assert not model_as_run(llama, alone, 1).gathers_copied


def test_gradients_are_added_by_kernels_of_their_own_where_products_do_not():
    """6 bytes a parameter in every backward pass, and no memory beside the gradients'."""
    model, strategy = load("gpt2-small"), Strategy(tp=2)
    used = load_software("megatron-lm-2021")
    without = used.replace(added_gradient_bytes=0)
    graphs = [layer_graph(model_as_run(model, s, 2), strategy) for s in (used, without)]
    for layer, plain in zip(*(g.layers for g in graphs), strict=True):
        assert len(layer.forward) == len(plain.forward)
        assert layer.work_bytes == plain.work_bytes
        (own,) = set(layer.backward.names) - set(plain.backward.names)
        op = layer.backward.ops[layer.backward.names.index(own)]
        assert op["read_bytes"] + op["write_bytes"] == 6 * layer.device_parameters
    more = []
    for batch in (32, 64, 128):
        plan = {**PLAN, "global_batch": batch}
        steps = [
            predict(model, CLUSTER, {**plan, "software": s.replace(host_s=0.0)})
            for s in (used, without)
        ]
        more.append(steps[0].time_s - steps[1].time_s)
        assert steps[0].memory_bytes == steps[1].memory_bytes
    assert more[0] > 0
    assert more[1:] == pytest.approx([2 * more[0], 4 * more[0]], rel=1e-6)
    assert load_software("megatron-core").added_gradient_bytes == 0


def test_the_optimizer_of_the_software_is_the_default():
    training = Training(global_batch=8)
    assert training.optimizer_name == "adam"
    eager = training.replace(software="huggingface-eager")
    assert eager.optimizer_name == load_software("huggingface-eager").optimizer == "adam-bf16"
    assert eager.replace(optimizer="sgd").optimizer_name == "sgd"
    plan = {**PLAN, "software": "huggingface-eager"}
    named = predict(load("gpt2-small"), CLUSTER, {**plan, "optimizer": "adam-bf16"})
    assert predict(load("gpt2-small"), CLUSTER, plan) == named
    assert named.optimizer == "adam-bf16"


def test_a_fused_loss_keeps_logits_in_their_own_format():
    """MosaicML ran MPT-125m, most of whose bytes are logits, with 104 short sequences on 40 GB."""
    cluster, mpt = CLUSTER.replace(chip="a100-40"), load("gpt2-small").replace(vocab=50368)
    plan = {"dp": 8, "zero": 3, "seq": 512, "micro_batch": 104, "global_batch": 2496}
    found = predict(mpt, cluster, {**plan, "software": "fsdp-llm-foundry"})
    assert found.memory["logits"] / (104 * 512 * 50368) == pytest.approx(4.0, rel=0.05)
    assert found.memory_bytes < 0.8 * found.limit_bytes


def test_known_lifetimes_need_no_allowance():
    plans = [
        predict(load("gpt2-small"), CLUSTER, {**PLAN, "software": name})
        for name in ("huggingface-eager", "megatron-core")
    ]
    assert plans[0].memory["fragmentation"] == 0.0
    moving = plans[1].memory_bytes - sum(
        plans[1].memory[term] for term in ("weights", "gradients", "optimizer", "fragmentation")
    )
    assert plans[1].memory["fragmentation"] == pytest.approx(0.03 * moving)


def test_the_host_launches_an_optimizer_while_gradients_are_computed():
    """Muon's kernels wait for the host only as far as the backward pass does not hide them."""
    fast = load_software("huggingface-eager").replace(host_s=0.0, product_host_s=0.0)
    fast = fast.replace(gradient_host_s=0.0)
    plan = {**PLAN, "tp": 1, "pp": 1, "dp": 1, "optimizer": "muon-bf16", "recompute": "none"}
    model, one = load("gpt2-small"), CLUSTER.replace(devices=1)
    steps = [
        predict(model, one, {**plan, "software": fast.replace(optimizer_host_s=each)})
        for each in (0.0, 1e-6, 1e-3)
    ]
    assert steps[0].time_s == steps[1].time_s < steps[2].time_s
    launched = 22 * 4 * model.layers  # kernels of the matrices of all blocks
    assert steps[2].time_s - steps[0].time_s < launched * 1e-3
