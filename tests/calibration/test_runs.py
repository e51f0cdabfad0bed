"""Tables of training runs: rows as queries, refused and unsupported rows, the contract's JSON."""

import json

import pytest

from phaze_fast.calibration import RowRefusedError, UnsupportedError, validate_runs
from phaze_fast.calibration.published import RUN_COLUMNS, read_run
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.planning import predict

# Korthikanti et al. 2022, table 5: 22B, full recomputation, and with sequence parallelism.
ROW = {
    "source": "Korthikanti2022",
    "model": "megatron-22B",
    "layers": "48",
    "hidden": "6144",
    "heads": "64",
    "kv_heads": "64",
    "ffn": "24576",
    "vocab": "51200",
    "seq": "2048",
    "precision": "fp16",
    "gpu": "A100-80GB-SXM",
    "n_gpus": "8",
    "tp": "8",
    "pp": "1",
    "vp": "1",
    "dp": "1",
    "sp": "0",
    "cp": "1",
    "ep": "1",
    "fsdp": "0",
    "micro_batch": "4",
    "global_batch": "4",
    "recompute": "full",
    "zero_or_dist_opt": "none",
    "framework": "Megatron-LM",
    "iter_time_s": "1.42",
    "memory_gib": "",
    "notes": "",
}
SELECTIVE = {**ROW, "sp": "1", "recompute": "selective", "iter_time_s": "1.10"}


def table(tmp_path, *rows):
    path = tmp_path / "runs.csv"
    lines = [",".join(ROW), *(",".join(f'"{row[c]}"' for c in ROW) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_row_becomes_a_query():
    run = read_run(2, ROW)
    assert (run.plan.tp, run.plan.zero, run.plan.recompute) == (8, 0, "full")
    assert not run.plan.sequence_parallel
    assert run.software == run.plan.software.name == "megatron-lm-2022"
    assert run.chip == "a100-80"
    assert run.model.qkv_bias
    assert run.model.positions == "learned"


def test_interleaved_rows_that_count_the_ends_as_layers():
    row = {
        **ROW, "model": "Llama-3.1-405B", "layers": "126", "hidden": "16384", "heads": "128",
        "kv_heads": "8", "ffn": "53248", "vocab": "128256", "seq": "8192", "gpu": "H100",
        "precision": "bf16", "n_gpus": "512", "pp": "8", "vp": "8", "dp": "4", "cp": "2",
        "sp": "1", "micro_batch": "1", "global_batch": "256", "recompute": "", "framework": "NeMo",
        "zero_or_dist_opt": "",
    }  # fmt: skip
    run = read_run(2, row)
    assert run.plan.stages == (2,) * 64
    assert run.plan.zero == 1
    assert run.plan.recompute == "auto"
    assert run.software == "nemo"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_gpus": "16"}, r"row 7: n_gpus: 16 .* is 8"),
        ({"micro_batch": ""}, r"row 7: micro_batch: is missing"),
        ({"micro_batch": "three"}, r"row 7: micro_batch: 'three' is not accepted"),
        ({"global_batch": "6"}, r"row 7: .*global_batch: 6 is not a multiple"),
        ({"iter_time_s": "-1"}, r"row 7: iter_time_s"),
        ({"iter_time_s": ""}, r"row 7: iter_time_s: is missing"),
        ({"heads": "63"}, r"row 7: .*heads"),
        ({"precision": "?"}, r"row 7: precision"),
        ({"recompute": "somehow"}, r"row 7: recompute"),
    ],
)
def test_rows_that_contradict_themselves_are_refused_by_number(change, said):
    with pytest.raises(RowRefusedError, match=said):
        read_run(7, {**ROW, **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "Nemotron_3_Nano"}, "Mamba"),
        ({"gpu": "Abacus"}, "Abacus"),
        ({"framework": "Pen and paper"}, "Pen and paper"),
    ],
)
def test_rows_beyond_the_model_say_why(change, said):
    with pytest.raises(UnsupportedError, match=said):
        read_run(7, {**ROW, **change})


def test_validation_takes_the_one_answer_path(tmp_path):
    found = validate_runs(table(tmp_path, ROW, SELECTIVE))
    rows = found.groups[0].rows
    run = rows[0].run
    assert rows[0].plan == predict(run.model, run.cluster, run.plan)
    assert found.groups[0].time.rows == 2
    assert found.groups[0].regret["groups"] == 1
    assert found.groups[0].time.max_abs_err < 0.2  # Calculon: 8.9% on these rows


def test_the_document_of_the_contract(tmp_path, capsys):
    wrong = {**ROW, "n_gpus": "9"}
    odd = {**ROW, "source": "Elsewhere", "model": "Nemotron_3_Nano"}
    path = table(tmp_path, ROW, wrong, odd, SELECTIVE)
    assert main(["study", "validate", str(path), "--by", "source", "--json"]) == 0
    answer = capsys.readouterr()
    assert "row 3: n_gpus" in answer.err
    data = json.loads(answer.out)
    assert set(data["groups"]) == {"Korthikanti2022", "Elsewhere"}
    group = data["groups"]["Korthikanti2022"]
    needed = {"rows", "mean_abs_err", "median_abs_err", "p90_abs_err", "bias"}
    assert needed <= set(group["iter_time_s"])
    assert group["iter_time_s"]["rows"] == 2
    assert group["memory_gib"]["rows"] == 0
    assert data["groups"]["Elsewhere"]["unsupported"] == {"Mamba layers": 1}
    assert data["columns"]["iter_time_s"]["rows"] == 2
    assert len(data["refused"]) == 1


def test_tables_for_people_and_other_groupings(tmp_path, capsys):
    path = table(tmp_path, ROW, {**SELECTIVE, "memory_gib": "60"})
    for by in ("source", "chip", "software", "model"):
        assert main(["study", "validate", str(path), "--by", by]) == 0
        assert "pick-regret" in capsys.readouterr().out
    assert main(["study", "validate", str(path), "--by", "moon"]) == 2
    assert "by: 'moon'" in capsys.readouterr().err


def test_other_files_are_told_apart(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInputError, match="not a table of training runs"):
        validate_runs(path)
    assert "iter_time_s" in RUN_COLUMNS


LLAMA = {
    **ROW,
    "source": "mine",
    "model": "Llama-3.1-8B",
    "layers": "32",
    "hidden": "4096",
    "heads": "32",
    "kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "seq": "8192",
    "gpu": "GB200",
    "n_gpus": "128",
    "tp": "2",
    "dp": "64",
    "micro_batch": "1",
    "global_batch": "64",
    "framework": "NeMo",
    "table": "",
    "source_url": "",
}


def test_jobs_of_powers_of_two_take_64_of_a_rack():
    assert read_run(2, LLAMA).cluster.fabric.tiers[0].size == 64
    whole = {**LLAMA, "n_gpus": "144", "dp": "72", "global_batch": "72"}
    assert read_run(2, whole).cluster.fabric.tiers[0].size == 72


def test_a_shard_group_smaller_than_the_replicas_is_read_where_devices_are_in_nodes():
    sharded = {**LLAMA, "gpu": "H100", "fsdp": "16", "zero_or_dist_opt": "FSDP"}
    assert (read_run(2, sharded).plan.zero, read_run(2, sharded).plan.shard) == (3, 16)
    pod = {**sharded, "gpu": "TPU v5p", "framework": "MaxText"}
    assert (read_run(2, pod).plan.zero, read_run(2, pod).plan.shard) == (3, None)


def test_columns_beside_the_name_choose_profile_format_and_remat():
    titan = {**LLAMA, "gpu": "H100", "framework": "torchtitan", "source": "torchtitan benchmarks"}
    eager = {**titan, "notes": "eager; seq from memory", "recompute": "selective"}
    assert read_run(2, eager).software == "fsdp-torchtitan-eager"
    assert "alternate-products" in read_run(2, eager).plan.recompute
    asynchronous = {**titan, "notes": "async TP; seq from memory"}
    assert read_run(2, asynchronous).software == "fsdp-torchtitan-async"
    old = {**titan, "source_url": "benchmarks/llama3_h100_202412.md"}
    assert read_run(2, old).software == "fsdp-torchtitan-2024"
    assert (read_run(2, titan).software, read_run(2, titan).plan.recompute) == (
        "fsdp-torchtitan",
        "needed",
    )
    assert read_run(2, {**titan, "precision": "fp8 rowwise"}).precision == "fp8-rowwise"
    assert read_run(2, {**titan, "precision": "fp8"}).precision == "fp8-tensorwise"
    assert read_run(2, {**LLAMA, "precision": "fp8"}).precision == "fp8-params"


def test_adapters_of_frozen_weights_are_not_modelled():
    with pytest.raises(UnsupportedError, match="low-rank"):
        read_run(2, {**LLAMA, "table": "26.06 / LoRA Performance"})


# NVIDIA Megatron-Bridge performance summary: Qwen3 235B and DeepSeek-V3 on H100s.
EXPERTS = {
    **ROW,
    "source": "Elsewhere",
    "framework": "Megatron-Bridge 25.09",
    "gpu": "H100",
    "precision": "bf16",
    "recompute": "none",
    "layers": "",
}


@pytest.mark.parametrize(
    ("model", "widths", "framework", "etp"),
    [
        ("Qwen3_235B_a22B", (256, 2, 8, 4, 16, 32), "Megatron-Bridge 25.09", 1),  # 32 > 16 replicas
        ("Qwen3_235B_a22B", (256, 2, 8, 4, 16, 32), "NeMo/Megatron-Core 25.04", 1),
        ("DeepSeekV3", (1024, 2, 8, 4, 64, 64), "Megatron-Bridge 25.09", 1),  # as its recipes say
        ("DeepSeekV3", (1024, 2, 8, 4, 64, 64), "NeMo/Megatron-Core 25.04", None),
        ("DeepSeekV3", (256, 1, 4, 4, 64, 64), "Megatron-Bridge 25.09", None),  # no tensor groups
    ],
)
def test_experts_on_tensor_groups_and_layers_that_do_not_divide(model, widths, framework, etp):
    names = ("n_gpus", "tp", "pp", "vp", "dp", "ep")
    given = dict(zip(names, map(str, widths), strict=True))
    row = {**EXPERTS, "model": model, "framework": framework, **given, "global_batch": "8192"}
    run = read_run(2, {**row, "micro_batch": "1", "seq": "4096"})
    assert run.plan.etp == etp
    assert run.plan.sequence_parallel == (etp == 1)
    assert run.plan.schedule == "interleaved"
    plan = predict(run.model, run.cluster, run.plan)
    held = sorted(layer for stage in plan.stages for layer in stage.layers)
    assert held == list(range(run.model.layers + 2))  # embedding and head are layers as well


QWEN = {
    **LLAMA,
    "model": "Qwen3_30B_a3B",
    "source": "NVIDIA Megatron-Bridge performance summary",
    "n_gpus": "8",
    "dp": "8",
    "tp": "1",
    "ep": "8",
    "precision": "mxfp8",
} | dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")


@pytest.mark.parametrize(
    ("changed", "software", "overlap"),
    [
        ({}, "megatron-bridge", 0.0),
        ({"framework": "Megatron-Bridge 26.06 NeMo Container"}, "megatron-bridge-graphs", 0.0),
        ({"model": "Qwen3_30B_a3B (tokendrop)"}, "nemo", 0.0),
        ({"model": "Qwen3_235B_a22B"}, "megatron-bridge", 0.0),
        ({"model": "Qwen3_235B_a22B", "gpu": "B200"}, "nemo", 0.0),
        ({"model": "Qwen3_235B_a22B", "gpu": "H100", "precision": "fp8"}, "nemo", 0.5),
    ],
)
def test_recipes_say_how_tokens_reach_experts(changed, software, overlap):
    row = {**QWEN, "gpu": "GB200", "framework": "Megatron-Bridge 26.02 NeMo Container"}
    found = read_run(2, {**row, **changed})
    assert (found.software, found.plan.expert_overlap) == (software, overlap)
