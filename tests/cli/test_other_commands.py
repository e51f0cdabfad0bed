"""`estimate`, `schedule`, `show`, `trace` and `study`: what other programs rely on, and messages."""

import json
from pathlib import Path

import pytest
from case_counts import slow_ones
from golden_files import refused_calls

from phaze_fast.documents import package_data
from phaze_fast.errors import InvalidInputError
from phaze_fast.papers.reproduce import Reproduced, Row, reproduce
from phaze_fast.report import report_page

GOLDEN = Path(__file__).parents[1] / "golden"
GRAPH = GOLDEN / "traced_llama.json"
CONTRACT = {"b", "m", "k", "n", "time_s", "compute_cycles", "buffer_bytes", "hbm_bytes"}
CONTRACT |= {"bound", "dataflow", "utilization", "energy_j"}
CARRIED = "constants are carried over from h200"


# ---- estimate, validate, schedule ----


def test_estimate_keeps_its_contract(document):
    rows = document("estimate --chip h200 --gemm 2048x12288x49152 --gemm 4x64x32x16")
    assert [[row[d] for d in "bmkn"] for row in rows] == [[1, 2048, 12288, 49152], [4, 64, 32, 16]]
    for row in rows:
        assert row.keys() >= CONTRACT
        assert 0 < row["bound_s"] <= row["time_s"]
        assert 0 < row["utilization"] <= 1


def test_estimate_of_an_array_is_what_a_simulator_reports(document):
    line = "estimate --compute-only --gemm 512x1024x1024 --array"
    for flow, cycles in (("os", 40895), ("ws", 57215), ("is", 44991)):
        (row,) = document(f"{line} 128x128 --dataflow {flow}")
        assert (row["compute_cycles"], row["dataflow"]) == (cycles, flow)
        assert row.keys() == CONTRACT
    assert document(f"{line} 128x128")[0]["compute_cycles"] == 40895
    (row,) = document(f"{line} 64x128 --dataflow os")
    assert row["compute_cycles"] == 8 * 8 * (1024 + 64 + 128 - 2) - 1  # rows cut m, columns n


def test_estimate_for_people(run):
    code, out, _ = run("estimate --chip h200 --gemm 2048x12288x49152")
    assert code == 0
    for words in ("power-bound", "<- binds", "mapping: ", "ridge at 206.1", " o "):
        assert words in out
    code, out, _ = run("estimate --array 8x8 --gemm 8x8x8 --compute-only")
    assert code == 0
    assert " 21 " in out  # 8 + 8 + 8 - 2, counted from zero


@pytest.mark.parametrize(("words", "message"), refused_calls("estimate command"))
def test_estimate_refuses(refused, words, message):
    assert message in refused(f"estimate {words}")


def test_validate_keeps_its_contract(run, document, refused, tmp_path):
    found = document(f"study validate {GOLDEN / 'h200_layer.csv'} --chip h200")
    assert set(found["columns"]) == {"fwd_us", "bwd_us", "fwd_bwd_us", "stashed_bytes"}
    for error in found["columns"].values():
        wanted = {"rows", "mean_abs_err", "median_abs_err", "p90_abs_err", "max_abs_err", "bias"}
        assert set(error) == wanted | {"scale", "scaled_mean_abs_err"}
        assert error["rows"] == 10
    line = f"study validate {GOLDEN / 'h200_gemm.csv'} --chip"
    code, out, _ = run(f"{line} h200")
    assert code == 0
    assert "Worst rows" in out
    assert "512x12288x4608" in out
    code, _, err = run(f"{line} tpuv4")
    assert (code, "not fitted" in err) == (0, True)
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    assert "of no known kind" in refused(f"study validate {path} --chip h200")


def test_schedule_keeps_its_contract(run, document, refused, tmp_path):
    path = tmp_path / "layers.jsonl"
    lines = (GOLDEN / "layer_golden.jsonl").read_text().splitlines()[:3]
    record = json.loads(lines[0])
    record["ops"].reverse()  # any order of operators will do
    path.write_text("\n".join([json.dumps(record), *lines[1:]]))
    rows = document("schedule", path)
    wanted = {"name", "status", "makespan", "bound", "gap", "proved_by", "starts", "solve_s"}
    assert all(row.keys() >= wanted for row in rows)
    assert [row["status"] for row in rows] == ["optimal"] * 3
    assert [row["makespan"] for row in rows] == [173984, 2772902, 17933682]
    assert rows[0]["starts"][-1] == 0.0  # ln1, which the file now names last
    code, out, _ = run("schedule", path, "--rule", "overlap")
    assert code == 0
    assert "ln1" in out
    assert "rule" in refused("schedule", path, "--rule", "none")


# ---- what a chip's times rest on ----

GEMM = "estimate --gemm 512x512x512"
PREDICT = "predict gpt2-small --devices 8 --dp 8 --global-batch 8"
PLAN = "plan gpt2-small --devices 8 --global-batch 32 --top 1"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{GEMM} --chip b200", CARRIED),
        (f"{GEMM} --array 64x64", ""),
        (f"{PREDICT} --chip h200", ""),
        (f"{PLAN} --chip mi300x", "of this chip: sustained_flops, hbm_share;"),
        ("show chip h20", "dgx-h100"),
        ("show chip h200", "fitted to measurements of this chip"),
    ],
)
def test_what_times_rest_on_is_said(run, line, said):
    shown = run(line)[1]
    assert said in shown if said else "fitted" not in shown


def test_what_times_rest_on_is_data(document):
    (row,) = document(f"{GEMM} --chip gaudi2")
    assert row["calibration"]["state"] == "not fitted"
    assert document(f"{PREDICT} --chip h200")["calibration"]["fitted"] is True
    carried = document(f"{PLAN} --chip b300")["calibration"]
    assert (carried["state"], carried["carried_from"]) == ("carried over", "b200")
    assert carried["fitted"] is False
    states = {chip["name"]: chip["calibration"]["state"] for chip in document("show chip")}
    assert (states["h200"], states["ironwood"]) == ("fitted", "not fitted")


@pytest.mark.parametrize(
    ("base", "state", "said"),
    [("tpuv4", "not fitted", "not fitted to measurements"), ("h200", "carried over", CARRIED)],
)
def test_search_says_what_times_rest_on(run, document, tmp_path, base, state, said):
    space, kept = tmp_path / "s.yaml", tmp_path / "kept"
    space.write_text(f"{{name: s, base: {base}, axes: {{tensor_core.count: [4, 8]}}}}")
    line = f"search gpt2-small --space {space} --devices 8 --global-batch 16 --pp 1 --tp 1"
    line += f" --baselines none --quiet --cache {kept}"
    assert said in run(line)[1]
    found = document(line)
    assert found["calibration"]["state"] == state
    assert found["calibration"]["chip"] == found["best"]["chip"]["name"]
    assert said in report_page(found)


# ---- models and traces ----


@pytest.fixture
def folder(tmp_path):
    """A folder with a HuggingFace configuration."""
    place = tmp_path / "my-llama"
    place.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    (place / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    return place


def test_a_default_sequence_length_is_said(run, folder):
    code, out, err = run(f"show model {folder} --operators --json")
    assert code == 0
    assert "my-llama: seq 4096: the smaller of the context window of 131072" in err
    assert json.loads(out)["model"] == "my-llama"
    code, _, err = run(f"show model {folder} --operators --seq 512 --json")
    assert (code, "context window" in err) == (0, False)


def test_a_graph_is_shown_and_refused_where_there_is_no_rule(run, document, refused, tmp_path):
    shown = run(f"show model {GRAPH}")[1]
    assert "model.layers.0" in shown
    assert "a transformer of 4 blocks of 512, 8 heads" in shown
    line = f"show model {GRAPH} --operators --tp 2 --sequence-parallel"
    assert document(line)["parameters"] > 0
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps({**json.loads(GRAPH.read_text()), "as_traced": True}))
    assert "llama is a traced graph" in refused("wafer", raw)


@pytest.mark.parametrize(("target", "line"), refused_calls("targets of trace"))
def test_bad_targets_of_trace(refused, target, line):
    assert line in refused("trace", target)


# ---- reproduce ----


def test_a_table_in_latex_and_csv(tmp_path):
    rows = (Row("a, 50%", None, 2.0, None, "why"), Row("b", 1.5, 1.25, 1.0, "why"))
    found = Reproduced("tmac", "source", "measure", rows)
    text = found.to_latex()
    assert r"a, 50\% & -- & 2.00 & -- \\" in text
    assert text.startswith(r"\begin{tabular}")
    found.to_csv(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().splitlines()[0] == "case,published,ours,honest,why"


def test_unknown_papers_and_models():
    with pytest.raises(InvalidInputError, match="did you mean 'phaze'"):
        reproduce("phase")
    with pytest.raises(InvalidInputError, match="models: 'gpt2' is not accepted"):
        reproduce("nest", models=["gpt2"])


@pytest.mark.parametrize("devices", slow_ones([128, 1024], 1024))
def test_a_case_of_nest(document, monkeypatch, devices):
    case = package_data("phaze_fast.papers", "published.yaml")["nest"]["cases"][0]
    monkeypatch.setitem(case, "devices", devices)
    found = document("study reproduce nest --models llama3-70b")
    assert found["rows"][0]["published"] == pytest.approx(20.51 / 9.92)
    assert found["rows"][0]["ours"] is None
    assert found["rows"][0]["honest"] >= 1.0
    assert "not in this package" in found["rows"][0]["why"]
