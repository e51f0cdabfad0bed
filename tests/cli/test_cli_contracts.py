"""What other programs rely on in the output of estimate, validate and schedule."""

import json
from pathlib import Path

import pytest


def document(result):
    code, out, _ = result
    assert code == 0
    return json.loads(out)


GOLDEN = Path(__file__).parents[1] / "golden"
CONTRACT = {"b", "m", "k", "n", "time_s", "compute_cycles", "buffer_bytes", "hbm_bytes"}
CONTRACT |= {"bound", "dataflow", "utilization", "energy_j"}


def test_estimate_keeps_its_contract(run):
    words = ("--gemm", "2048x12288x49152", "--gemm", "4x64x32x16", "--json")
    rows = document(run("estimate", "--chip", "h200", *words))
    assert [[row[d] for d in "bmkn"] for row in rows] == [[1, 2048, 12288, 49152], [4, 64, 32, 16]]
    for row in rows:
        assert row.keys() >= CONTRACT
        assert 0 < row["bound_s"] <= row["time_s"]
        assert 0 < row["utilization"] <= 1


def test_estimate_of_an_array_is_what_a_simulator_reports(run):
    words = ("--array", "128x128", "--compute-only", "--gemm", "512x1024x1024", "--json")
    for flow, cycles in (("os", 40895), ("ws", 57215), ("is", 44991)):
        (row,) = document(run("estimate", *words, "--dataflow", flow))
        assert (row["compute_cycles"], row["dataflow"]) == (cycles, flow)
        assert row.keys() == CONTRACT
    (row,) = document(run("estimate", *words))
    assert row["compute_cycles"] == 40895
    (row,) = document(run("estimate", "--array", "64x128", *words[2:], "--dataflow", "os"))
    assert row["compute_cycles"] == 8 * 8 * (1024 + 64 + 128 - 2) - 1  # rows cut m, columns n


def test_estimate_for_people(run):
    code, out, _ = run("estimate", "--chip", "h200", "--gemm", "2048x12288x49152")
    assert code == 0
    for words in ("power-bound", "<- binds", "mapping: ", "ridge at 206.1", " o "):
        assert words in out
    code, out, _ = run("estimate", "--array", "8x8", "--gemm", "8x8x8", "--compute-only")
    assert code == 0
    assert " 21 " in out  # 8 + 8 + 8 - 2, counted from zero


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chip", "h200", "--gemm", "12x12"], "--gemm: '12x12' is not accepted"),
        (["--chip", "h200", "--gemm", "0x1x1"], "from 1 to 2^40"),
        (["--chip", "h200", "--gemm", "1099511627776x1099511627776x1"], "too large"),
        (["--chip", "h2000", "--gemm", "1x1x1"], "did you mean 'h200'"),
        (["--gemm", "1x1x1"], "--chip, --array: expected one of them"),
        (["--chip", "h200", "--array", "8x8", "--gemm", "1x1x1"], "expected one of them"),
        (["--array", "8", "--gemm", "1x1x1"], "--array: '8' is not accepted"),
        (["--array", "8x8", "--dataflow", "no", "--gemm", "1x1x1"], "--dataflow: 'no'"),
        (
            ["--chip", "h200", "--dataflow", "ws", "--gemm", "1x1x1"],
            "its blocks run output-stationary (os)",
        ),
        (["--chip", "h200", "--dtype", "int8", "--gemm", "1x1x1"], "--dtype: 'int8'"),
        (
            ["--chip", "tpuv4", "--dtype", "fp8", "--gemm", "1x1x1"],
            "'fp8' is not accepted by tpuv4",
        ),
    ],
)
def test_estimate_refuses(run, words, message):
    code, out, err = run("estimate", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_validate_keeps_its_contract(run):
    found = document(
        run("study", "validate", GOLDEN / "h200_layer.csv", "--chip", "h200", "--json")
    )
    assert set(found["columns"]) == {"fwd_us", "bwd_us", "fwd_bwd_us", "stashed_bytes"}
    for error in found["columns"].values():
        wanted = {"rows", "mean_abs_err", "median_abs_err", "p90_abs_err", "max_abs_err", "bias"}
        assert set(error) == wanted | {"scale", "scaled_mean_abs_err"}
        assert error["rows"] == 10
    code, out, _ = run("study", "validate", GOLDEN / "h200_gemm.csv", "--chip", "h200")
    assert code == 0
    assert "Worst rows" in out
    assert "512x12288x4608" in out
    code, _, err = run("study", "validate", GOLDEN / "h200_gemm.csv", "--chip", "tpuv4")
    assert code == 0
    assert "not fitted" in err


def test_schedule_keeps_its_contract(run, tmp_path):
    path = tmp_path / "layers.jsonl"
    lines = (GOLDEN / "layer_golden.jsonl").read_text().splitlines()[:3]
    record = json.loads(lines[0])
    record["ops"].reverse()  # any order of operators will do
    path.write_text("\n".join([json.dumps(record), *lines[1:]]))
    rows = document(run("schedule", path, "--json"))
    wanted = {"name", "status", "makespan", "bound", "gap", "proved_by", "starts", "solve_s"}
    assert all(row.keys() >= wanted for row in rows)
    assert [row["status"] for row in rows] == ["optimal"] * 3
    assert [row["makespan"] for row in rows] == [173984, 2772902, 17933682]
    assert rows[0]["starts"][-1] == 0.0  # ln1, which the file now names last
    code, out, _ = run("schedule", path, "--rule", "overlap")
    assert code == 0
    assert "ln1" in out
    code, _, err = run("schedule", path, "--rule", "none")
    assert (code, len(err.splitlines())) == (2, 1)


def test_validate_refuses(run, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    code, out, err = run("study", "validate", path, "--chip", "h200")
    assert (code, out) == (2, "")
    assert "of no known kind" in err
