"""Every command that prints a chip's times says what they rest on."""

import json

import pytest

from phaze_fast.cli.main import main
from phaze_fast.report.answer import certificate_section

CARRIED = "constants are carried over from h200"


@pytest.fixture
def run(capsys):
    def call(*words):
        assert main([str(word) for word in words]) == 0
        return capsys.readouterr()

    return call


def test_estimate(run):
    words = ("estimate", "--gemm", "512x512x512")
    assert CARRIED in run(*words, "--chip", "b200").out
    assert "tpuv5p: not fitted" in run(*words, "--chip", "tpuv5p").out
    assert "only launch_latency_s, efficiency" in run(*words, "--chip", "a100-80").out
    for fitted in (("--chip", "h200"), ("--array", "64x64")):
        assert "fitted" not in run(*words, *fitted).out
    (row,) = json.loads(run(*words, "--chip", "gaudi2", "--json").out)
    assert row["calibration"]["state"] == "not fitted"


def test_predict(run):
    words = ("predict", "gpt2-small", "--devices", "8", "--dp", "8", "--global-batch", "8")
    assert CARRIED in run(*words, "--chip", "h100").out
    assert "fitted" not in run(*words, "--chip", "h200").out
    assert json.loads(run(*words, "--chip", "h200", "--json").out)["calibration"]["fitted"] is True


def test_chips(run):
    listed = json.loads(run("show", "chip", "--json").out)
    states = {chip["name"]: chip["calibration"]["state"] for chip in listed}
    assert states["h200"] == "fitted"
    assert states["ironwood"] == "not fitted"
    shown = run("show", "chip", "h20").out
    assert "carried over from" in shown
    assert "dgx-h100" in shown
    assert "fitted to measurements of this chip" in run("show", "chip", "h200").out


@pytest.mark.parametrize(
    ("base", "state", "said"),
    [("tpuv4", "not fitted", "not fitted to measurements"), ("h200", "carried over", CARRIED)],
)
def test_search(run, tmp_path, base, state, said):
    space, kept = tmp_path / "s.yaml", tmp_path / "kept"
    space.write_text(f"{{name: s, base: {base}, axes: {{tensor_core.count: [4, 8]}}}}")
    words = ["search", "gpt2-small", "--space", space, "--devices", "8", "--global-batch", "16"]
    words += ["--baselines", "none", "--quiet", "--cache", kept, "--pp", "1", "--tp", "1"]
    assert said in run(*words).out
    found = json.loads(run(*words, "--json").out)
    assert found["calibration"]["state"] == state
    assert found["calibration"]["chip"] == found["best"]["chip"]["name"]
    assert said in str(certificate_section(found))
