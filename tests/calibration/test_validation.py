"""Validation: sizes of errors, tables of training runs, and steps measured on one device."""

import csv
import itertools
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from golden_files import refused_calls
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from phaze_fast.calibration import (
    RowRefusedError,
    UnsupportedError,
    pick_regret,
    summarise,
    validate_runs,
    validate_steps,
)
from phaze_fast.calibration.published import read_run
from phaze_fast.calibration.validation import (
    RunGroup,
    is_step_table,
    measured_steps,
    rank_correlation,
)
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets
from phaze_fast.planning import predict

# ---- sizes of errors ----


def test_a_summary_by_hand():
    found = summarise([1.0, 2.0, 4.0, 10.0], [1.1, 1.8, 4.0, 15.0])
    assert found.rows == 4
    assert found.mean_abs_err == pytest.approx((0.1 + 0.1 + 0.0 + 0.5) / 4)
    assert found.median_abs_err == pytest.approx(0.1)
    assert found.max_abs_err == pytest.approx(0.5)
    assert found.bias == pytest.approx((0.1 - 0.1 + 0.0 + 0.5) / 4)
    assert found.rank_correlation == 1.0


def by_pairs(x, y):
    """Spearman's correlation from ranks that are counted pair by pair."""
    ranks = [
        [sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values]
        for values in (x, y)
    ]
    means = [sum(r) / len(r) for r in ranks]
    centred = [[v - m for v in r] for r, m in zip(ranks, means, strict=True)]
    product = sum(a * b for a, b in zip(*centred, strict=True))
    size = (sum(a * a for a in centred[0]) * sum(b * b for b in centred[1])) ** 0.5
    return product / size if size else None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=12))
def test_rank_correlation_is_that_of_counted_ranks(pairs):
    x, y = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    expected = by_pairs(x, y)
    found = rank_correlation(x, y)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found == pytest.approx(expected, abs=1e-9)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.5, 2), st.floats(0.5, 2)), min_size=1)
)
def test_regret_is_what_the_pick_loses(rows):
    lost = []
    for _, some in itertools.groupby(sorted(rows), key=lambda row: row[0]):
        options = list(some)
        if len(options) > 1:
            pick = min(options, key=lambda row: (row[2], row[1]))
            lost.append(pick[1] / min(row[1] for row in options) - 1.0)
    found = pick_regret(rows)
    if not lost:
        assert found is None
    else:
        assert found["groups"] == len(lost)
        assert found["mean"] == pytest.approx(sum(lost) / len(lost), abs=1e-12)
        assert found["max"] == pytest.approx(max(lost), abs=1e-12)


# ---- tables of training runs ----

# Korthikanti et al. 2022, table 5: 22B, full recomputation, and with sequence parallelism.
TABLE = (
    "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,precision,gpu,n_gpus,tp,pp,vp,dp,sp,cp,ep,"
    "fsdp,micro_batch,global_batch,recompute,zero_or_dist_opt,framework,iter_time_s,memory_gib,notes",
    "Korthikanti2022,megatron-22B,48,6144,64,64,24576,51200,2048,fp16,A100-80GB-SXM,8,8,1,1,1,0,1,1,"
    "0,4,4,full,none,Megatron-LM,1.42,,",
)
ROW = next(csv.DictReader(TABLE))
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
    for words in ("", "unstated (see the recipe)"):
        assumed = read_run(2, {**row, "recompute": words}).assumed
        assert "the fastest recomputation that fits" in assumed
    assert run.software == "nemo"


@pytest.mark.parametrize(
    ("layers", "vp", "stages"), [(6, 2, (1,) * 8), (16, 2, None), (22, 2, (3,) * 8), (22, 1, None)]
)
def test_the_ends_count_as_layers_where_interleaved_blocks_do_not_divide(layers, vp, stages):
    row = {**ROW, "layers": str(layers), "vp": str(vp), "tp": "2", "pp": "4"}
    assert read_run(2, row).plan.stages == stages


@pytest.mark.parametrize(("change", "said"), refused_calls("rows of runs"))
def test_rows_that_contradict_themselves_or_are_not_modelled_say_why(change, said):
    error = RowRefusedError if said.startswith("row") else UnsupportedError
    with pytest.raises(error, match=said):
        read_run(7, {**ROW, **change})


def test_validation_takes_the_one_answer_path(tmp_path):
    progress = []
    found = validate_runs(
        table(tmp_path, ROW, SELECTIVE), progress=lambda *counts: progress.append(counts)
    )
    assert progress == [(1, 2), (2, 2)]
    rows = found.groups[0].rows
    run = rows[0].run
    assert rows[0].plan == predict(run.model, run.cluster, run.plan)
    assert found.groups[0].time.rows == 2
    assert found.groups[0].regret["groups"] == 1
    assert found.groups[0].time.max_abs_err < 0.2  # Calculon: 8.9% on these rows
    # An evaluation of 6 sequences for each 10 is 6/10 of the forward passes, a third of the rest.
    plan, evaluated = rows[0].plan, replace(rows[0], run=replace(run, evaluated=0.6))
    share = 1.0 + 0.2 * (1.0 - plan.parts_s["recompute"] / plan.time_s)
    assert rows[0].time_s == plan.time_s
    assert evaluated.time_s == pytest.approx(share * plan.time_s)
    reserving = run.plan.replace(software="fsdp-torchtitan-2024")
    reported = replace(rows[0], run=replace(run, plan=reserving)).reported_bytes
    assert reported == pytest.approx(1.24 * plan.allocated_bytes)
    assert evaluated.interval_s == pytest.approx([share * bound for bound in plan.interval_s])
    late = replace(rows[0], run=replace(run, time_s=10.0 * plan.time_s))
    assert RunGroup("", (rows[0], rows[0], late), {}).coverage == pytest.approx(2 / 3)
    factors = (1.2, 1.0, 0.7)  # of the prediction to the measured seconds
    ran = (replace(run, time_s=plan.time_s / factor) for factor in factors)
    group = RunGroup("", tuple(replace(rows[0], run=own) for own in ran), {})
    worst = replace(found, groups=(group,)).worst(2)
    assert [row.error for row in worst] == pytest.approx([-0.3, 0.2])


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
    path.write_text("a,b\n1,2\n")
    assert "not a table of training runs" in refusal(validate_runs, path, error=InvalidInputError)


def test_predictions_of_another_model_are_scored_beside_ours(tmp_path, capsys):
    path = table(tmp_path, ROW, {**SELECTIVE, "memory_gib": "60"})
    theirs = tmp_path / "theirs.csv"
    theirs.write_text("row,step_s,memory_gib,fits\n2,1.42,,yes\n3,2.2,30,no\n9,1,,\n")
    command = ["study", "validate", str(path), "--against", str(theirs)]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["against"]) == ["phaze-fast", "theirs"]
    scored = data["against"]["theirs"]
    assert scored["iter_time_s"]["mean_abs_err"] == pytest.approx(0.5)  # 0% and 100%
    assert scored["memory_gib"]["mean_abs_err"] == pytest.approx(0.5)
    assert scored["fits"] == {"ok": {"rows": 2, "fit": 1}}
    assert scored["pick_regret"]["mean"] == pytest.approx(1.42 / 1.10 - 1.0)  # picks the slower
    assert data["against"]["phaze-fast"]["iter_time_s"] == data["columns"]["iter_time_s"]
    assert data["against"]["phaze-fast"]["fits"] == {"ok": {"rows": 2, "fit": 2}}
    assert main(command) == 0
    assert "Two models on the same rows" in capsys.readouterr().out
    theirs.write_text(
        "row,step_s,memory_gib,fits\n2,1.42,,yes\n3,,30,\n"
    )  # scored on what both predict
    assert main([*command, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)["against"].values()
    assert [one["iter_time_s"]["rows"] for one in both] == [1, 1]
    assert [one["memory_gib"]["rows"] for one in both] == [1, 1]
    assert [one["fits"]["ok"]["rows"] for one in both] == [1, 1]
    for text, said in (("9,1,,", "no row of the table"), ("2,1,,maybe", "fits: 'maybe'")):
        theirs.write_text(f"row,step_s,memory_gib,fits\n{text}\n")
        assert main(command) == 2
        assert said in capsys.readouterr().err


# NVIDIA Megatron-Bridge performance summary: Qwen3 235B and DeepSeek-V3 on H100s.
EXPERTS = {**ROW, "source": "Elsewhere", "gpu": "H100", "precision": "bf16", "recompute": "none"}
EXPERTS |= {"layers": "", "global_batch": "8192", "micro_batch": "1", "seq": "4096"}


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
    run = read_run(2, {**EXPERTS, "model": model, "framework": framework, **given})
    assert run.plan.etp == etp
    assert run.plan.sequence_parallel == (etp == 1)
    assert run.plan.schedule == "interleaved"
    plan = predict(run.model, run.cluster, run.plan)
    held = sorted(layer for stage in plan.stages for layer in stage.layers)
    assert held == list(range(run.model.layers + 2))  # embedding and head are layers as well


@pytest.mark.parametrize(
    ("model", "widths", "etp"),
    [
        ("Qwen3_235B_a22B", {"tp": 2, "cp": 2, "dp": 2, "ep": 8}, 1),  # experts over all eight
        ("Qwen3_235B_a22B", {"tp": 1, "cp": 1, "dp": 8, "ep": 4, "etp": 2}, 2),
        ("megatron-22B", {"tp": 8, "cp": 1, "dp": 1, "ep": 1, "etp": 2}, None),  # has none
    ],
)
def test_devices_that_share_an_expert_are_those_of_the_row(model, widths, etp):
    given = {name: str(width) for name, width in widths.items()}
    shape = {} if etp is None else {"layers": "", "micro_batch": "1", "global_batch": "8"}
    assert read_run(2, {**ROW, **shape, "model": model, **given}).plan.etp == etp


# ---- errors on published runs: they may shrink, they must not grow ----

ROOT = Path(__file__).parents[2]
TRUTH = Path(os.environ.get("PHAZE_SHARED", ROOT.parent / "shared")) / "truth"

SIXTEEN_BITS = ("bf16", "fp16")
LIMITS = [
    ("Korthikanti2022", SIXTEEN_BITS, 0.06),
    ("Narayanan2021", SIXTEEN_BITS, 0.10),
    ("Megatron-LM README 2020", SIXTEEN_BITS, 0.07),
    ("vTrain ground truth multi", SIXTEEN_BITS, 0.12),
    ("vTrain ground truth single", SIXTEEN_BITS, 0.10),
    ("MosaicML", SIXTEEN_BITS, 0.09),
    ("SimuMax", SIXTEEN_BITS, 0.05),
    ("NVIDIA dgxc-benchmarking", SIXTEEN_BITS, 0.045),
    ("NVIDIA dgxc-benchmarking", None, 0.055),
    ("torchtitan", None, 0.11),
    ("MLPerf Training v4.0", None, 0.06),
    ("MLPerf Training v4.1", None, 0.07),
    ("MLPerf Training v5.0", None, 0.04),
    ("TPU recipes", None, 0.12),
    ("NVIDIA Megatron-Bridge", None, 0.105),
]
"""Mean absolute errors of a step's seconds that a source's rows stay below; None is any format."""


@pytest.fixture(scope="module")
def groups():
    names = ("published_training_runs.csv", "public_runs.csv")
    return [group for name in names for group in validate_runs(TRUTH / name).groups]


def published(test):
    """Mark a test that needs other people's tables of runs."""
    absent = pytest.mark.skipif(not TRUTH.exists(), reason="the tables of runs are not here")
    return pytest.mark.shared(pytest.mark.slow(absent(test)))


@published
def test_published_runs_of_composer_fit(groups):
    group = next(g for g in groups if g.name.startswith("MosaicML"))
    assert group.fits["ok"] == (113, 113)


@published
@pytest.mark.parametrize(("source", "formats", "most"), LIMITS)
def test_sources_stay_within_their_limits(groups, source, formats, most):
    group = next(g for g in groups if g.name.startswith(source))
    rows = [row for row in group.rows if formats is None or row.run.precision in formats]
    assert statistics.fmean(abs(row.error) for row in rows) <= most


@published
def test_intervals_cover_what_they_promise(groups):
    for group in groups:
        if len(group.rows) >= 20:
            assert 0.7 <= group.coverage <= 0.93, (group.name, group.coverage)


# ---- steps on one device ----

H200 = presets.chip("h200")
# Four of this project's measurements on one H200, PyTorch 2.11, 2026.
STEPS = """model,layers,seq,mbs,accum,recompute,step_ms,peak_bytes
opt1.3b,24,2048,4,1,False,137.043,24010001408
opt1.3b,24,2048,4,1,True,167.316,11901545472
llama2-7b,8,4096,1,1,False,87.305,17247788032
nobody,8,4096,1,1,False,87.305,17247788032
"""
HF = """model,seq,mbs,recompute,mode,step_ms,peak_bytes
gpt2-medium,1024,8,none,eager,86.355,19345397248
gpt2-medium,1024,8,full,eager,113.821,8460217856
"""
CONFIGS = {
    "gpt2-medium": {
        "architecture": "GPT2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257,
        "n_positions": 4096, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }
}  # fmt: skip


@pytest.mark.parametrize("text", [STEPS, HF])
def test_columns_of_measured_steps_are_needed_and_others_may_follow(text):
    columns = frozenset(text.splitlines()[0].split(","))
    assert is_step_table(columns)
    assert is_step_table(columns | {"params"})
    assert not any(is_step_table(columns - {name}) for name in columns)


def test_steps_written_by_hand(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([STEPS.splitlines()[0], STEPS.splitlines()[-1]]))
    assert "no row is accepted" in refusal(validate_steps, path, H200, error=InvalidInputError)
    path.write_text(STEPS)
    found = validate_steps(path, H200)
    assert found.columns["step_ms"].rows == 3
    assert found.columns["step_ms"].mean_abs_err < 0.08
    assert len(found.refused) == 1
    assert "row 5: model: 'nobody' is unknown; expected the columns hidden" in found.refused[0]
    columns = {"step_ms": (100.0, 50.0), "peak_bytes": (4.0, 8.0)}
    predicted = {"step_ms": (110.0, 60.0), "peak_bytes": (2.0, 8.0)}
    worst = replace(found, labels=("a", "b"), measured=columns, predicted=predicted).worst(3)
    assert [row[:2] for row in worst] == [("a", "peak_bytes"), ("b", "step_ms"), ("a", "step_ms")]
    assert [row[4] for row in worst] == pytest.approx([-0.5, 0.2, 0.1])
    steps, _, _ = measured_steps(path, H200)
    assert [1e3 * step.time_s for step in steps] == pytest.approx(found.measured["step_ms"])


def test_a_row_says_its_shape(tmp_path):
    """Columns give what the preset of the name gives, whatever the model is called."""
    shapes = {
        "opt1.3b": "2048,32,32,8192,50272,False,",
        "llama2-7b": "4096,32,,11008,32000,True,True",
    }
    lines = STEPS.splitlines()[:4]
    shaped = [lines[0] + ",hidden,heads,kv_heads,ffn,vocab,gated,causal"]
    for line in lines[1:]:
        name, rest = line.split(",", 1)
        shaped.append(f"mine,{rest},{shapes[name]}")
    files = tmp_path / "named.csv", tmp_path / "shaped.csv"
    for file, rows in zip(files, (lines, shaped), strict=True):
        file.write_text("\n".join(rows))
    named, mine = (validate_steps(file, H200) for file in files)
    assert mine.predicted == named.predicted
    assert mine.labels[0].startswith("mine ")
    files[1].write_text("\n".join(shaped).replace(",2048,32,32,", ",2048,x,32,"))
    assert "heads: 'x' is not accepted" in validate_steps(files[1], H200).refused[0]


def test_huggingface_steps_and_their_configurations(tmp_path, capsys):
    path = tmp_path / "hf.csv"
    path.write_text(HF)
    said = refusal(validate_steps, path, H200, error=InvalidInputError)
    assert "hf_configs.json, which is missing; put it next to the file or give --configs" in said
    (tmp_path / "hf_configs.json").write_text(json.dumps(CONFIGS))
    beside = validate_steps(path, H200)
    assert beside.columns["step_ms"].mean_abs_err < 0.12
    elsewhere = tmp_path / "other.json"
    (tmp_path / "hf_configs.json").rename(elsewhere)
    arguments = ["study", "validate", str(path), "--configs", str(elsewhere), "--json"]
    assert main(arguments) == 0
    columns = json.loads(capsys.readouterr().out)["columns"]
    assert set(columns) == {"step_ms", "peak_bytes"}
    assert columns["step_ms"]["rows"] == 2
    assert columns["step_ms"]["mean_abs_err"] == beside.columns["step_ms"].mean_abs_err
