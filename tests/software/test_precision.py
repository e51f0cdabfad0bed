"""Number formats of a step: what is cast, what it costs, who may run it, and one answer for all."""

import numpy as np
import pytest
from golden_files import golden_rows
from refusals import refusal

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.cli.main import main
from phaze_fast.cost import estimate_costs
from phaze_fast.export import export_plan, read_plan
from phaze_fast.hardware import presets
from phaze_fast.memory import TERMS, Pipeline, footprint_batch, stage_rows
from phaze_fast.opgraph import FORMATS, GROUPS, Strategy, layer_graph
from phaze_fast.opgraph.builder import OperatorSpec
from phaze_fast.opgraph.graph import lay_out
from phaze_fast.planning import PlanSpec, predict, predict_batch
from phaze_fast.software import (
    DEFAULT,
    check_precision,
    chip_as_run,
    load_precision,
    load_software,
    precision_names,
)

H100 = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
B200 = pf.Cluster(devices=16, fabric="dgx-b200", chip="b200")
GIVEN = {"tp": 2, "pp": 2, "dp": 4, "global_batch": 64, "zero": 1, "recompute": "none"}


def step(precision, cluster=H100, model="llama3-8b", **more):
    return predict(model, cluster, {**GIVEN, **more, "precision": precision})


def low_block(name, **strategy):
    """Llama's block of 1,024 tokens with products in a precision."""
    model = models.load("llama3-8b").replace(seq=1024)
    return layer_graph(model, Strategy(**strategy), precision=load_precision(name)).layers[1]


@pytest.mark.parametrize("name", precision_names())
def test_every_precision_is_read_and_cites_its_source(name):
    found = load_precision(name)
    assert found.name == name
    assert found.sources
    assert found.low == (name not in ("bf16", "fp16"))
    assert name != "int8" or "weight-gradient" in found.products


def test_fewer_bits_take_less_time_and_less_of_their_own_peak():
    assert predict("llama3-8b", H100, GIVEN) == step("bf16")
    assert step("fp16").time_s == step("bf16").time_s
    assert step("fp8").time_s < step("fp8-current").time_s  # whose casts read more
    by_name = {name: step(name, B200) for name in ("bf16", "fp8", "nvfp4")}
    seconds = [plan.time_s for plan in by_name.values()]
    assert seconds == sorted(seconds, reverse=True)
    used = [plan.mfu for plan in by_name.values()]
    assert used == sorted(used, reverse=True)
    rate = [plan.tflops_per_device / plan.mfu for plan in by_name.values()]
    assert rate == pytest.approx([2250, 4500, 9000], rel=0.01)  # dense peak of each format


@pytest.mark.parametrize(
    ("name", "element", "reads"), [("fp8-current", 1.0, 4.0), ("mxfp8", 1.03125, 2.0)]
)
def test_each_operand_is_cast_once(name, element, reads):
    """Llama's block by hand: four inputs forward, seven arriving gradients backward."""
    model = models.load("llama3-8b").replace(seq=1024)
    low = layer_graph(model, Strategy(), precision=load_precision(name))
    whole = layer_graph(model, Strategy())
    rows, h, f, kv = 1024, 4096, 14336, 1024
    ways = zip(
        (low.layers[1].forward, low.layers[1].backward),
        (whole.layers[1].forward, whole.layers[1].backward),
        ([h, h, h, f], [h, kv, kv, h, f, f, h]),
        strict=True,
    )
    for cast, plain, widths in ways:
        added = [op for op, n in zip(cast.ops, cast.names, strict=True) if n.endswith("-cast")]
        assert sorted(int(op["m"]) for op in added) == sorted(rows * width for width in widths)
        assert sum(op["read_bytes"] for op in added) == reads * rows * sum(widths)
        assert sum(op["write_bytes"] for op in added) == 2 * element * rows * sum(widths)
        assert cast.flops == plain.flops
        assert len(cast) == len(plain) + len(added)
        code = FORMATS.index("fp8")
        products = [n for op, n in zip(cast.ops, cast.names, strict=True) if op["format"] == code]
        assert len(products) == 7 * (1 + ("backward" in cast.name))
    for layer in (low.layers[0], low.layers[2]):  # the ends stay as they are
        assert not layer.forward.ops["format"].any()
        assert not layer.backward.ops["format"].any()


def test_gathers_carry_the_smaller_format():
    whole, low = (low_block(p, tp=2, sequence_parallel=True) for p in ("bf16", "fp8"))
    for way in ("forward", "backward"):
        sent = [getattr(layer, way) for layer in (whole, low)]
        by_name = [dict(zip(g.names, g.ops["payload_bytes"], strict=True)) for g in sent]
        for name, payload in by_name[0].items():
            forward, end = name.partition("d-")[0] != "", name.rpartition("-")[2]
            gather = end in ("gather", "again") if forward else end == "scatter"
            assert by_name[1][name] == payload / (2 if gather and payload else 1), name


def test_delayed_scaling_casts_where_no_norm_wrote_fp8_and_routers_stay_in_bf16():
    block, fp8 = low_block("fp8").forward, load_precision("fp8")
    casts = [name for name in block.names if name.endswith("-cast")]
    assert casts == ["attention-cast", "multiply-cast"]
    graph = layer_graph(models.load("mixtral-8x7b"), Strategy(), precision=fp8)
    block = next(layer for layer in graph.layers if layer.kind == "moe-block").forward
    formats = dict(zip(block.names, block.ops["format"].tolist(), strict=True))
    assert formats["router"] == 0
    assert formats["expert-up"] == FORMATS.index("fp8")


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_weights_have_copies_and_operands_are_kept_small(name):
    precision = load_precision(name)
    low, whole = step(name, B200), step("bf16", B200)
    assert low.memory["activations"] < whole.memory["activations"]
    copies = low.stages[1].memory["weights"] - whole.stages[1].memory["weights"]
    model = models.load("llama3-8b")
    block = layer_graph(model, Strategy(tp=2)).layers[1]
    assert copies == pytest.approx(16 * block.device_parameters * precision.weight_copies)


def test_the_kernel_and_the_numba_rule_count_the_same_bytes():
    for zero in (0, 1, 3):
        plain = load_software(DEFAULT).replace(fused_activation=False, gradient_stand_ins=False)
        spec = PlanSpec(**{**GIVEN, "precision": "mxfp8", "zero": zero, "software": plain})
        plan = predict("llama3-8b", B200, spec)
        graph = layer_graph(models.load("llama3-8b"), spec.strategy, precision=spec.precision)
        pipeline = Pipeline(pp=2, micro_batches=plan.micro_batches, dp=spec.dp, zero=zero)
        for stage, terms in zip(
            plan.stages, footprint_batch(stage_rows(graph, pipeline)), strict=True
        ):
            expected = {term: float(terms[term]) for term in TERMS}
            assert stage.memory == pytest.approx(expected, rel=1e-9)


def test_plan_predict_and_batch_give_one_answer():
    training = pf.Training(global_batch=64, precision="fp8", micro_batch=1, recompute="none")
    best = pf.plan("llama3-8b", H100, training, top=1).best
    assert best.precision == "fp8"
    assert predict("llama3-8b", H100, best).time_s == pytest.approx(best.time_s, rel=1e-12)
    batch = predict_batch(
        "llama3-8b", H100, training, tp=2, pp=2, dp=4, zero=1,
        recompute="none",
    )  # fmt: skip
    alone = step("fp8")
    assert batch.time_s[0] == alone.time_s
    assert batch.memory_bytes[0] == alone.memory_bytes
    assert sum(alone.parts_s.values()) == pytest.approx(alone.time_s, rel=1e-12)
    assert pf.Plan.from_dict(alone.to_dict()) == alone
    assert PlanSpec.of(alone.to_dict()).precision.name == "fp8"


def test_a_chip_without_the_format_says_what_it_has():
    said = refusal(step, "nvfp4", error=pf.InvalidInputError)
    assert "nvfp4 is not accepted on h100, which does not multiply fp4; it" in said
    assert "fp8-block" in said
    said = refusal(check_precision, load_precision("fp8"), presets.chip("a100-80"))
    assert "fp8 is not accepted on a100-80" in said
    space, cluster = pf.ArchitectureSpace.published()[:4], pf.Cluster(devices=8, fabric="tpuv4-pod")
    training = pf.Training(global_batch=64, precision="fp8")
    said = refusal(pf.search, "bertlarge", space, cluster, training, error=pf.InvalidInputError)
    assert "precision: fp8 is not accepted" in said


@pytest.mark.parametrize("etp", [1, 2])
def test_rows_reach_experts_in_the_low_format(etp):
    """DeepSeek-V3: dispatch forward and its twin backward in fp8, what experts return in bf16."""
    model = models.load("deepseek-v3").replace(seq=1024)
    widths = {"tp": 2, "sequence_parallel": True, "ep": 4, "etp": etp}
    sent = {}
    for name in ("fp8-block", "fp8-block-dispatch"):
        graph = layer_graph(model, Strategy(**widths), precision=load_precision(name))
        block = next(layer for layer in graph.layers if layer.kind == "moe-block")
        sent[name] = [
            (own.names[k], float(own.ops["payload_bytes"][k]))
            for own in (block.forward, block.backward)
            for k in np.flatnonzero(own.ops["group"] == GROUPS.index("expert"))
        ]
    shares = [low / whole for (_, whole), (_, low) in zip(*sent.values(), strict=True)]
    assert shares == pytest.approx([1.03125 / 2, 1.0, 1.03125 / 2, 1.0])
    wide = pf.Cluster(devices=64, fabric="dgx-h100", chip="h100")
    given = {"dp": 64, "ep": 64, "zero": 1, "global_batch": 64}
    moe = models.load("deepseek-v3").replace(layers=8)
    whole, low = (predict(moe, wide, {**given, "precision": name}) for name in sent)
    assert low.parts_s["expert_comm"] < 0.85 * whole.parts_s["expert_comm"]
    assert low.time_s < whole.time_s


def test_factors_of_blocks_need_hardware_for_them():
    """MXFP8 has a factor for 32 elements, which tensor cores apply from Blackwell and CDNA 4 on."""
    said = refusal(step, "mxfp8", error=pf.InvalidInputError)
    assert "mxfp8 is not accepted on h100, which does not multiply fp8 with a factor" in said
    assert "fp8-block" in said
    assert "mxfp8," not in said.partition("for which there are")[2]
    for chip in ("b200", "gb200", "b300", "gb300", "mi355x"):
        check_precision(load_precision("mxfp8"), presets.chip(chip))
    for chip in ("h200", "mi300x", "ironwood", "gaudi3"):
        refusal(check_precision, load_precision("mxfp8"), presets.chip(chip))


def test_the_command_line_takes_a_name_and_refuses_others_in_one_line(capsys):
    said = ["predict", "llama3-8b", "--chip", "h100", "--devices", "8", "--dp", "8", "--zero", "1"]
    assert main([*said, "--global-batch", "64", "--precision", "fp8", "--json"]) == 0
    assert '"precision": "fp8"' in capsys.readouterr().out
    for name, why in (
        ("fp7", "precision: 'fp7' is neither a preset"),
        ("nvfp4", "does not multiply"),
    ):
        assert main([*said, "--precision", name]) == 2
        told = capsys.readouterr().err
        assert why in told
        assert len(told.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["fp8", "fp8-current", "fp8-block", "mxfp8", "nvfp4", "int8"])
def test_frameworks_are_told_or_it_is_said_that_they_are_not(name, tmp_path):
    model = models.load("llama3-8b")
    spec = PlanSpec(**{**GIVEN, "precision": name})
    for kind in ("megatron", "torchtitan"):
        written = export_plan(spec, model, kind)
        unsaid = any(f"--precision {name}" in str(item) for item in written.unexpressed)
        assert unsaid == (kind == "torchtitan" or name == "int8")
        if not unsaid:
            file = tmp_path / "run.sh"
            file.write_text(written.text)
            assert read_plan(file, model, 16).spec.precision.name == name


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("fp8-rowwise", "llama3-8b"),
        ("fp8-tensorwise", "llama3-8b"),
        ("fp8-rowwise", "qwen3-30b-a3b"),
    ],
)
def test_torchtitan_is_told_the_recipe_of_torchao(name, model, tmp_path):
    model = models.load(model)
    widths = {"dp": 16, "zero": 3, "global_batch": 64, "recompute": "full", "precision": name}
    plan = predict(model, H100, widths)
    written = export_plan(plan, model, "torchtitan")
    assert written.plan_complete, written.unexpressed
    assert f'recipe_name = "{name.removeprefix("fp8-")}"' in written.text
    assert ("[quantize.grouped_mm.float8]" in written.text) == (model.moe is not None)
    file = tmp_path / "run.toml"
    file.write_text(written.text)
    again = predict(model, H100, read_plan(file, model, 16).spec)
    assert again.time_s == pytest.approx(plan.time_s, rel=1e-12)
    assert again.memory_bytes == pytest.approx(plan.memory_bytes, rel=1e-12)
    best = pf.plan(model, H100, pf.Training(global_batch=64, precision=name, micro_batch=1, tp=1, pp=1),
                   framework="torchtitan", top=1).best  # fmt: skip
    assert export_plan(best, model, "torchtitan").plan_complete


def test_experts_have_no_tensorwise_recipe_in_torchtitan(tmp_path):
    moe = models.load("qwen3-30b-a3b")
    spec = PlanSpec(dp=16, zero=3, global_batch=64, precision="fp8-tensorwise", recompute="full")
    written = export_plan(spec, moe, "torchtitan")
    assert "--precision fp8-tensorwise" in str(written.unexpressed[0])
    step = pf.Training(global_batch=64, precision="fp8-tensorwise")
    said = refusal(pf.plan, moe, H100, step, framework="torchtitan")
    assert "expected one of bf16, fp8-rowwise for torchtitan" in said
    file = tmp_path / "run.toml"
    for converters, said in (
        ('["quantize.linear.float8"]', "model.converters"),
        ('["quantize.linear.float8", "quantize.grouped_mm.float8"]', "grouped_mm.float8.fqns"),
    ):
        file.write_text(written.text.replace("[model]", f"[model]\nconverters = {converters}"))
        assert said in refusal(read_plan, file, moe, 16)


def test_seconds_of_a_low_product_are_those_of_the_format_alone():
    chip, graph = presets.chip("h200"), low_block("mxfp8").forward
    mixed = estimate_costs(graph, chip).time_s(0)[0]
    all_low = estimate_costs(graph, chip, dtype="fp8").time_s(0)[0]
    plain = estimate_costs(graph, chip, dtype="bf16").time_s(0)[0]
    low = graph.ops["format"] > 0
    assert np.array_equal(mixed[low], all_low[low])
    assert np.array_equal(mixed[~low], plain[~low])


TORCHAO = pytest.mark.parametrize(
    ("name", "kind"), [("fp8-tensorwise", "tensor"), ("fp8-rowwise", "row")]
)


def measured_casts():
    """Microseconds on an H200, by kind of cast, rows and columns."""
    rows = golden_rows("h200_casts.csv")
    return {(r["kind"], r["rows"], r["cols"]): float(r["us_median"]) for r in rows}


@TORCHAO
def test_weights_are_cast_in_every_pass_as_measured(name, kind):
    """By rows in the forward and by columns in the backward pass; a copy moves 4 bytes."""
    at = measured_casts()
    moved = [
        4.0 * (us + at[(f"{kind}_col", *size)]) / at[("copy", *size)]
        for (cast, *size), us in at.items()
        if cast == f"{kind}_row"
    ]
    assert len(moved) >= 6
    each = load_precision(name).pass_weight_casts
    assert 2.0 * each == pytest.approx(sum(moved) / len(moved), rel=0.01)


@TORCHAO
def test_casts_of_torchao_take_as_long_as_measured(name, kind):
    """Of a tensor alone, after a norm and after a gated activation, in the mean."""
    at = measured_casts()
    means = []
    for cast, without in ((kind, ""), (f"norm_{kind}", "norm_only"), (f"swiglu_{kind}", "swiglu")):
        found = [
            (at[key] - (at[(without, *key[1:])] if without else 0.0)) / at[("copy", *key[1:])]
            for key in at
            if key[0] == f"{cast}_both"
        ]
        assert len(found) >= 6
        means.append(sum(found) / len(found))
    precision = load_precision(name)
    reads = 1.0 + precision.amax_reads + precision.transpose_reads
    moved = 2.0 * reads + precision.copies * precision.element_bytes
    assert moved / 4.0 == pytest.approx(sum(means) / 3.0, rel=0.1)  # a copy moves 4 bytes


def by_name(graph):
    """Bytes that each operator of a graph reads and writes, by its name."""
    moved = graph.ops["read_bytes"] + graph.ops["write_bytes"]
    return dict(zip(graph.names, moved.tolist(), strict=True))


@TORCHAO
def test_torchao_casts_weights_and_transposes_in_each_pass(name, kind):
    """Llama's block by hand: seven weights a pass, four operands, seven gradients."""
    precision, block = load_precision(name), low_block(name)
    rows, h, f, kv = 1024, 4096, 14336, 1024
    weights = 2 * h * h + 2 * h * kv + 3 * h * f
    late = 2 * precision.transpose_reads + 1
    for graph in (block.forward, block.backward):
        moved = by_name(graph)
        cast = [n for n in moved if n.endswith("-weights-pass-cast")]
        assert len(cast) == 7
        assert sum(moved[n] for n in cast) == pytest.approx(weights * precision.pass_weight_casts)
    forward, backward = by_name(block.forward), by_name(block.backward)
    operands = [n for n in forward if n.endswith("-pass-cast") and "weights" not in n]
    assert sum(forward[n] for n in operands) == 5 * rows * (3 * h + f)
    turned = [n for n in backward if n.endswith("-transpose")]
    assert sum(backward[n] for n in turned) == late * rows * (3 * h + f)
    gradients = [n for n in backward if n.endswith("-cast") and "weights" not in n]
    assert sum(backward[n] for n in gradients) == (5 + late) * rows * (3 * h + 2 * kv + 2 * f)
    assert (block.copy_bytes, block.cast_bytes) == (0.0, 0.0)


def test_what_is_cast_runs_again_with_what_it_is_cast_from_or_for():
    passing, kept = (low_block(name).forward for name in ("fp8-tensorwise", "fp8-current"))
    assert "ffn-norm-cast" in kept.recomputed("norms")
    assert kept.recomputed("up-projection") == {"gate", "up"}  # its operand is kept as cast
    again = passing.recomputed("up-projection")
    assert again == {
        "gate", "up", "gate-weights-pass-cast", "up-weights-pass-cast", "ffn-norm-pass-cast",
    }  # fmt: skip
    assert passing.recomputed("none") == frozenset()
    assert passing.recomputed("full") == frozenset(passing.names)


def test_fp8_gathers_are_turned_round_whole_where_transposes_come_late():
    block = low_block("fp8-tensorwise", tp=8, sequence_parallel=True)
    forward, backward = by_name(block.forward), by_name(block.backward)
    elements = 1024 * 4096
    assert forward["ffn-norm-pass-cast"] == 5 * elements / 8  # of the rows that a device holds
    turned = [backward[n] for n in backward if n.endswith("-transpose")]
    assert turned.count(2 * elements) == 4  # two gathered inputs and two gathered gradients


def test_micro_batches_cast_weights_anew():
    """ZeRO-3 or not, twice the micro-batches take twice the casts of weights."""
    steps = {}
    for casts in (0.0, 6.45):
        precision = load_precision("fp8-tensorwise").replace(pass_weight_casts=casts)
        for batch in (64, 128):
            for zero in (1, 3):
                widths = {"tp": 1, "pp": 1, "dp": 16, "zero": zero, "global_batch": batch}
                plan = step(precision, **widths, micro_batch=1, software="megatron-core")
                steps[casts, batch, zero] = plan.parts_s["compute"]
    for zero in (1, 3):
        few, many = (steps[6.45, b, zero] - steps[0.0, b, zero] for b in (64, 128))
        assert few > 0
        assert many == pytest.approx(2.0 * few, rel=1e-6)


def test_fp8_products_of_a_step_take_as_long_as_measured():
    """In a step and without fast accumulation, as torchao's gradients: 42 products on an H200."""
    specs, measured = [], []
    for row in golden_rows("float8_products_h200.csv"):
        rows, inner, outer = (int(row[c]) for c in ("rows", "inputs", "outputs"))
        sizes = {"f": (rows, inner, outer), "x": (rows, outer, inner), "w": (outer, rows, inner)}
        m, k, n = sizes[row["product"]]
        size = {"m": m, "k": k, "n": n, "flops": 2.0 * m * k * n}
        moved = {"read_bytes": 2.0 * (m * k + k * n), "write_bytes": 2.0 * m * n}
        specs.append(OperatorSpec("product", "gemm", "TC", (-1,), **size, **moved, format="fp8"))
        measured.append(float(row["us_slow"]) * 1e-6)
    chip = chip_as_run(presets.chip("h200"), load_software("fsdp-torchtitan"))
    seconds = estimate_costs(lay_out("products", specs, ()), chip).time_s(0)[0]
    errors = seconds / np.array(measured) - 1.0
    assert len(errors) == 42
    assert abs(errors).mean() < 0.08
    assert abs(errors.mean()) < 0.03
