"""`phaze-fast plan`: what it shows, writes and refuses."""

import json

import pytest

from phaze_fast.cli.main import main


def test_the_command_line(capsys, tmp_path):
    words = ["plan", "gpt2-small", "--chip", "h100", "--devices", "8", "--global-batch", "32"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for word in ("tokens/s", "MFU", "stage by stage", "activations", "Where the fastest"):
        assert word in shown
    out = tmp_path / "plan.json"
    assert main([*words, "--json", "-o", str(out)]) == 0
    data = json.loads(out.read_text())
    keys = {"tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "recompute", "time_s"}
    keys |= {"memory_bytes", "tokens_per_s", "mfu", "stages"}
    assert keys <= set(data["plans"][0])
    assert isinstance(data["rejected"], dict)
    capsys.readouterr()
    for bad, said in (
        (["--tp", "x"], "tp: 'x' is not accepted"),
        (["--schedule", "best"], "schedule"),
        (["--recompute", "some"], "recompute"),
        (["--optimizer", "lion"], "optimizer"),
        (["--zero", "4"], "zero"),
        (["--devices", "0"], "devices"),
        (["--fabric", "none"], "fabric"),
    ):
        assert main([*words, *bad]) == 2
        assert said in capsys.readouterr().err
    large = ["plan", "gpt3-175b", "--chip", "h100", "--devices", "8", "--micro-batch", "1"]
    assert main([*large, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "infeasible"
    assert answer["plans"] == []
    assert answer["rejected"]


def test_a_chip_that_was_not_fitted_says_so(capsys):
    words = ["plan", "gpt2-small", "--devices", "8", "--global-batch", "32", "--top", "1"]
    assert main([*words, "--chip", "mi300x"]) == 0
    assert "mi300x: not fitted to measurements" in capsys.readouterr().out
    assert main([*words, "--chip", "h200"]) == 0
    assert "fitted" not in capsys.readouterr().out
    assert main([*words, "--chip", "b300", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calibration"]["state"] == "carried over"
    assert data["calibration"]["carried_from"] == "b200"
    assert data["calibration"]["fitted"] is False


@pytest.mark.slow
def test_every_chip_with_a_usual_fabric_has_plans(capsys):
    """At 256 devices, which every fabric holds."""
    from phaze_fast.hardware import presets

    named = [name for name in presets.chip_names() if presets.chip(name).usual_fabric]
    assert len(named) >= 19
    for name in named:
        words = ["plan", "gpt2-small", "--chip", name, "--devices", "256", "--tp", "2"]
        words += ["--pp", "1", "--global-batch", "256", "--micro-batch", "1", "--top", "1"]
        assert main([*words, "--json"]) == 0, name
        data = json.loads(capsys.readouterr().out)
        assert 0 < data["plans"][0]["mfu"] < 1
        assert data["calibration"]["chip"] == name
    assert main(["plan", "gpt2-small", "--chip", "wse-3", "--devices", "8"]) == 2
    assert "fabric: missing, and wse-3 has no default fabric" in capsys.readouterr().err


def test_schedules_and_ways_to_recompute_are_lists(capsys):
    words = ["plan", "gpt2-small", "--chip", "h100", "--devices", "8", "--tp", "1", "--dp", "1"]
    words += ["--pp", "4", "--global-batch", "32", "--micro-batch", "1", "--json"]
    words += ["--schedule", "gpipe,zb-h1,zb-h2,zb-v,dualpipe-v"]
    assert main([*words, "--recompute", "norms+activations,full"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert {each["schedule"] for each in plans} == {"gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"}
    texts = {stage["recompute"] for each in plans for stage in each["stages"]}
    assert texts == {"norms+activations"}
    assert main([*words, "--recompute", "norms+activation"]) == 2
    assert "did you mean 'activations'" in capsys.readouterr().err
