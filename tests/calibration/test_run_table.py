"""Tables of runs as others write them: names of columns, words, failed runs, unknown software."""

import csv
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_files import refused_calls

from phaze_fast import models
from phaze_fast.calibration import UnsupportedError, validate_runs
from phaze_fast.calibration.published import read_run
from phaze_fast.calibration.run_table import is_run_table, network_of, standard_cells
from phaze_fast.cli.main import main
from phaze_fast.planning import predict

ROOT = Path(__file__).parents[2]
TRUTH = Path(os.environ.get("PHAZE_SHARED", ROOT.parent / "shared")) / "truth"

# A row in other words: Llama 8B on two nodes, by software that has no profile.
ROW = {
    "model": "mine-8B", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "ffn": "14336", "vocab": "128256 (padded)", "seq": "4096", "chip": "H100", "devices": "16",
    "interconnect": "8-GPU NVLink nodes, 3.2 Tb/s EFA per node", "tp": "4", "pp": "1", "dp": "",
    "zero": "1", "micro_batch": "2", "global_batch": "64", "recompute": "none", "precision": "",
    "software": "handmade 0.1", "status": "ok", "step_s": "3.0",
    "mem_max_allocated_bytes": "40000000000",
}  # fmt: skip


def write(path, *rows):
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(ROW))
        table.writeheader()
        table.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("words", "node", "bytes_per_s"),
    [
        ("8-GPU NVLink nodes, 3.2 Tb/s EFA per node", 8, 50e9),
        ("8-GPU NVLink nodes, 4 x 100 Gb/s Omni-Path per node", 8, 6.25e9),
        ("32 NeuronCores an instance, 1.6 Tb/s EFA per instance", 32, 6.25e9),
        ("RoCE, 400 Gb/s per GPU", None, 50e9),
        ("4 GPUs a node, 100 GB/s each node", 4, 25e9),
        ("8-GPU nodes", 8, None),
        ("GB200 NVL72", 72, None),
        ("", None, None),
    ],
)
def test_networks_in_words(words, node, bytes_per_s):
    found = network_of(words, node_devices=8)
    assert found.node_devices == node
    assert found.beyond_node_bytes_per_s == pytest.approx(bytes_per_s)


def test_columns_under_other_names_and_numbers_with_remarks():
    assert is_run_table(list(ROW))
    assert not is_run_table(["model", "seq", "mbs", "step_ms"])
    cells = standard_cells({**ROW, "dp": "4;4", "other": "{'max_mem': 7}"})
    assert (cells["n_gpus"], cells["vocab"], cells["dp"]) == ("16", "128256", "4")
    assert standard_cells({"dp": "4;2"})["dp"] == "4;2"
    assert standard_cells({"vpp": "-"})["vp"] == ""
    assert standard_cells({"other": "{'max_mem': 7}"})["memory_bytes"] == "7"


STRANGE = {
    "NVIDIA H100 80GB HBM3": {"chip": "NVIDIA H100 80GB HBM3"},
    "1,024 devices": {"devices": "1,024", "global_batch": "1,024"},
    "other words": {"zero": "ZeRO-1", "recompute": "No", "precision": "bfloat16", "cp": "N/A"},
}
REFUSED = {
    "ints": ({"tp": "two"}, r"tp: 'two' is not accepted; expected a whole number"),
    "widths": ({"tp": "3"}, r"n_gpus: 16 is not accepted"),
    "sharding": ({"zero": "some"}, r"zero_or_dist_opt: 'some' is not accepted; expected 0 to 3"),
    "nothing": ({"micro_batch": "NaN"}, r"micro_batch: is missing"),
    "endless": ({"seq": "1e400"}, r"seq: '1e400' is not accepted"),
    "no seconds": ({"step_s": "soon"}, r"iter_time_s: 'soon' is not accepted"),
    "endless seconds": ({"step_s": "1e400"}, r"iter_time_s: '1e400' is not accepted"),
}


@pytest.mark.parametrize("changed", STRANGE.values(), ids=STRANGE)
def test_rows_in_other_words_are_read(changed):
    run = read_run(2, {**ROW, **changed})
    assert (run.chip, run.plan.zero, run.plan.recompute) == ("h100", 1, "none")


@pytest.mark.parametrize(("changed", "said"), REFUSED.values(), ids=REFUSED)
def test_a_row_that_is_not_accepted_is_listed_and_the_others_are_predicted(tmp_path, changed, said):
    found = validate_runs(write(tmp_path / "runs.csv", {**ROW, **changed}, ROW))
    assert len(found.all_rows.rows) == len(found.refused) == 1
    assert re.search("^row 2: " + said, found.refused[0])


def test_networks_that_are_nonsense_do_not_stop_a_table(tmp_path):
    words = (
        "0 x 0 Gb/s per node",
        "0-GPU nodes",
        "1..2 Gb/s per node",
        "9e99 Gb/s per GPU",
        "9" * 30 + "-GPU",
    )
    rows = [{**ROW, "interconnect": text} for text in words]
    found = validate_runs(write(tmp_path / "runs.csv", *rows))
    assert len(found.all_rows.rows) + len(found.refused) == len(words)


def test_headings_of_papers_units_and_failures_in_place_of_seconds():
    others = {"devices": "GPUs", "step_s": "Step time (ms)", "micro_batch": "Micro-batch size"}
    row = {others.get(name, name): cell for name, cell in ROW.items()}
    assert is_run_table(list(row))
    assert read_run(2, {**row, "Step time (ms)": "3000"}).time_s == pytest.approx(3.0)
    failed = read_run(2, {**row, "Step time (ms)": "OOM"})
    assert (failed.status, np.isnan(failed.time_s)) == ("oom", True)
    whole = {**ROW, "step_s": "", "Tokens/s": "65536", "Memory (GB)": "30"}
    assert read_run(2, whole).time_s == pytest.approx(64 * 4096 / 65536)
    assert read_run(2, {**ROW, "step_s": "", "samples/s": "16"}).time_s == pytest.approx(4.0)


def test_software_without_a_profile_is_generic_and_the_answer_says_so():
    run = read_run(2, ROW)
    assert (run.software, run.plan.software.name, run.plan.dp) == ("generic", "generic", 4)
    assert run.plan.zero == 1
    assert run.memory_bytes == 40e9
    assert run.cluster.fabric.tiers[-1].bandwidth_bytes_per_s == 50e9
    assert "software handmade 0.1: profile generic" in run.assumed
    assert "products in bf16" in run.assumed
    assert any("gated" in words for words in run.assumed)
    known = read_run(2, {**ROW, "model": "llama-8B", "precision": "bf16", "software": "NeMo"})
    assert known.assumed == ()


def test_seconds_from_tokens_or_operations():
    none = {**ROW, "step_s": ""}
    tokens = read_run(2, {**none, "tokens_per_s_per_gpu": "4096"})
    assert tokens.time_s == pytest.approx(64 / 16)
    flops = read_run(2, {**none, "tflops_per_device": "400"})
    assert 64 * 4096 * 6 * 7e9 < flops.time_s * 16 * 400e12 < 64 * 4096 * 6 * 10e9


def test_evaluation_counts_as_a_share_of_the_training_sequences():
    """Of 5,662 sequences, in whole batches of 64, after every 24,576 of training."""
    row = {**ROW, "framework": "MaxText 2024-06", "verified": "time contains the evaluation pass"}
    assert read_run(2, row).evaluated == 89 * 64 / 24_576
    assert read_run(2, {**row, "verified": ""}).evaluated == 0.0


def test_a_preset_needs_no_columns_for_its_shape():
    shape = dict.fromkeys(("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), "")
    run = read_run(2, {**ROW, **shape, "model": "llama3-8b"})
    assert run.model == models.load("llama3-8b").replace(seq=4096)
    assert read_run(2, {**ROW, "model": "llama3-8b", "layers": "8"}).model.layers == 8
    assert read_run(2, {**ROW, **shape, "model": "Kimi K2"}).model.name == "kimi-k2"
    with pytest.raises(UnsupportedError, match="low-rank adaptation"):
        read_run(2, {**ROW, **shape, "model": "Kimi K2", "notes": "Fine-tuning (LoRA)"})


def test_a_chip_s_preset_is_a_device_where_its_usual_interconnect_is_known():
    run = read_run(2, {**ROW, "chip": "H20", "interconnect": ""})
    assert (run.chip, run.cluster.fabric.name) == ("h20", "dgx-h100")
    with pytest.raises(UnsupportedError, match="device dojo-d1: no preset"):
        read_run(2, {**ROW, "chip": "dojo-d1"})


def test_maxtext_works_on_the_whole_batch_of_a_replica_and_shards_inside_a_slice():
    row = {**ROW, "devices": "512", "chip": "TPU v5e", "interconnect": "", "tp": "16"}
    row |= {"micro_batch": "1", "global_batch": "512", "zero": "fsdp -1", "software": "MaxText"}
    plan = read_run(2, row).plan
    assert (plan.dp, plan.micro_batch, plan.shard) == (32, 16, 16)
    assert read_run(2, {**row, "software": "Megatron-LM"}).plan.micro_batch == 1


def test_experts_of_a_token_are_where_the_router_of_a_run_has_them():
    """On four nodes at most by DeepSeek-V3's own, next to each other by AutoModel's benchmarks."""
    row = {**ROW, "model": "DeepSeekV3", "layers": "", "software": "Megatron-Bridge 26.02"}
    groups = {}
    for software in ("Megatron-Bridge 26.02", "NeMo AutoModel TE + DeepEP"):
        moe = read_run(2, {**row, "software": software}).model.moe
        groups[software.split()[0]] = (moe.groups, moe.top_groups)
    assert groups == {"Megatron-Bridge": (8, 4), "NeMo": (32, 1)}
    assert read_run(2, {**ROW, "software": "NeMo AutoModel TE"}).model.moe is None


@pytest.mark.parametrize(("changed", "said"), refused_calls("training runs that are not modelled"))
def test_what_cannot_be_expressed_says_why(changed, said):
    with pytest.raises(UnsupportedError, match=said):
        read_run(2, {**ROW, **changed})


def test_failed_runs_count_for_memory_and_reasons_are_joined(tmp_path, capsys):
    failed = {**ROW, "step_s": "", "status": "oom", "micro_batch": "4", "tp": "1"}
    silent = {**ROW, "micro_batch": ""}
    path = write(tmp_path / "runs.csv", ROW, failed, silent, silent)
    found = validate_runs(path)
    group = found.all_rows
    assert group.time.rows == 1
    assert group.fits == {"ok": (1, 1), "oom": (1, 0)}
    assert len(found.refused) == 2
    assert main(["study", "validate", str(path), "--json"]) == 0
    written = capsys.readouterr()
    assert "rows 4, 5: micro_batch: is missing" in written.err
    document = json.loads(written.out)
    assert document["assumed"]["software handmade 0.1: profile generic"] == 2
    hidden = validate_runs(path, software="megatron-core").all_rows.rows[0]
    assert hidden.plan.software == "megatron-core"


MEGATRON_TABLE = (
    "model,layers,hidden,heads,chip,devices,tp,pp,dp,seq,micro_batch,global_batch,recompute,"
    "precision,deterministic,overlap,attention,software,step_s,mem_max_allocated_bytes",
    "gpt/gpt3_mcore_te_tp1_pp2,12,512,8,A100,8,1,2,4,1024,4,32,none,"
    "bf16,1,no-gradient-accumulation-fusion,,megatron-core dev,1,2e9",
)
MEGATRON_TEST = next(csv.DictReader(MEGATRON_TABLE))


def test_megatrons_tests_allocate_what_their_arguments_say():
    run = read_run(2, MEGATRON_TEST)
    software = run.plan.software
    assert (software.dropout, software.gradient_stand_ins) == (True, False)
    assert software.attention == "flash"
    assert (run.model.vocab, run.reports) == (50257, "last")
    mib = 2**20
    # A batch, two workspaces of cuBLAS, and one of Transformer Engine that is larger on Hopper.
    workspaces = {
        ("A100", "1"): 9 + 64 + 4,
        ("A100", "0"): 9 + 16.25 + 4,
        ("H100", "0"): 9 + 64 + 32,
        ("GB200", "0"): 9 + 16.25 + 32,
    }
    for (chip, deterministic), size in workspaces.items():
        row = {**MEGATRON_TEST, "chip": chip, "deterministic": deterministic}
        assert read_run(2, row).plan.software.workspace_bytes == int(size * mib)
    local = read_run(2, {**MEGATRON_TEST, "model": "gpt/gpt3_mcore_tp1_pp2"}).plan.software
    assert (local.attention, local.workspace_bytes) == ("eager", 73 * mib)
    fused = {**MEGATRON_TEST, "arguments": "cross-entropy-loss-fusion=True"}
    assert (software.logit_bytes, read_run(2, fused).plan.software.logit_bytes) == (6, 10)


def test_megatron_reports_the_memory_of_the_last_stage():
    run = read_run(2, MEGATRON_TEST)
    plan = predict(run.model.replace(vocab=1024), run.cluster, run.plan)
    in_use = [stage.memory_bytes - stage.memory["fragmentation"] for stage in plan.stages]
    assert in_use[0] > run.reported_bytes(plan) == in_use[-1]
    fullest = replace(run, reports="fullest")
    assert fullest.reported_bytes(plan) == pytest.approx(plan.allocated_bytes)


def test_a_device_that_a_row_does_not_name_is_assumed_and_said():
    row = {**MEGATRON_TEST, "source": "Megatron-LM functional tests golden values", "chip": ""}
    run = read_run(2, row)
    assert run.chip == "a100-80"
    assert "device (not stated): a100-80" in run.assumed
    with pytest.raises(UnsupportedError, match=r"device \(none\)"):
        read_run(2, {**row, "source": "mine"})


def shared(test):
    absent = pytest.mark.skipif(not TRUTH.is_dir(), reason="no ../shared here")
    return pytest.mark.shared(pytest.mark.slow(absent(test)))


@shared
@pytest.mark.parametrize(
    ("name", "rows"),
    [("open_runs.csv", 600), ("mcore_golden.csv", 235), ("sailor_validation.csv", 14)],
)
def test_other_peoples_tables_are_read_as_they_are(name, rows):
    found = validate_runs(TRUTH / name)
    assert len(found.all_rows.rows) >= rows
    assert len(found.refused) <= 8


@shared
def test_peak_bytes_of_megatrons_tests():
    found = validate_runs(TRUTH / "mcore_golden.csv").all_rows
    assert found.memory.rows >= 250
    assert found.memory.mean_abs_err < 0.03
    errors = [abs(row.reported_bytes / row.run.memory_bytes - 1.0) for row in found.rows]
    assert np.quantile(errors, 0.95) < 0.1
