"""Ctrl-C: the best found so far with its bound is printed and written, and the code is 130."""

import contextlib
import json
from pathlib import Path

import pytest

import phaze_fast as pf

PLAN = ["bert-large", "--chip", "h100", "--devices", "16", "--global-batch", "64"]
PLAN += ["--micro-batch", "1,2"]
WAFER = ["bertlarge", "--wafer", "dojo-tile-like", "--global-batch", "64", "--no-cache"]
SEARCH = ["bert-large", "--devices", "8", "--global-batch", "64", "--no-cache", "--hbm", "32"]
SPACE = Path(__file__).parents[2] / "examples" / "small_space.yaml"


@pytest.fixture
def stopped(monkeypatch):
    """Ctrl-C was pressed at the very start."""

    @contextlib.contextmanager
    def pressed():
        yield lambda: True

    for command in ("plan", "wafer", "search"):
        monkeypatch.setattr(f"phaze_fast.cli.{command}.stop_on_interrupt", pressed)


def test_a_plan_that_is_stopped_has_its_bound(run, stopped, tmp_path):
    code, out, err = run("plan", *PLAN, "-o", tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert code == 130
    assert "interrupted" in err
    assert "Stopped early: no plan takes less" in " ".join(out.split())
    assert 0 < found["bound_s"] <= found["plans"][0]["time_s"]
    cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    step = pf.Training(global_batch=64, micro_batch=(1, 2))
    whole = pf.plan("bert-large", cluster, step, top=1)
    assert (whole.status, whole.gap, whole.complete) == ("optimal", 0.0, True)
    assert found["bound_s"] <= whole.best.time_s <= found["plans"][0]["time_s"]


def test_a_wafer_search_that_is_stopped_has_its_bound(run, stopped, tmp_path):
    code, _, err = run("wafer", *WAFER, "--quiet", "-o", tmp_path / "wafer.json")
    found = json.loads((tmp_path / "wafer.json").read_text())
    assert code == 130
    assert "layouts were examined" in err
    assert 0 < found["bound"] <= found["ours"]["time_s"]
    assert found["layouts"]["unseen"] > 0


def test_a_search_that_is_stopped_has_its_bound(run, stopped, tmp_path):
    words = ["--micro-batch", "1", "--tp", "1", "--schedule", "1f1b", "-o", tmp_path / "found.json"]
    code, _, _ = run("search", *SEARCH, "--space", SPACE, "--quiet", *words)
    found = json.loads((tmp_path / "found.json").read_text())
    assert code == 130
    assert found["bound"] <= found["best"]["time_s"]
    assert found["baselines"] == {}  # nothing more is done
