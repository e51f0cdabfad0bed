"""The search as a command: its document, what it refuses, interrupts and progress."""

import json
from importlib.util import find_spec

import pytest

import phaze_fast as pf
from phaze_fast.cli.main import main

SPACE = pf.ArchitectureSpace.published()
COMMAND = ["search", "bert-large", "--devices", "8", "--global-batch", "32", "--micro-batch", "1"]
COMMAND += ["--tp", "1", "--hbm", "32", "--baselines", "none", "--quiet", "--top", "2"]


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A space of few chips in a file, and a cache of its own."""
    monkeypatch.setenv("PHAZE_FAST_CACHE", str(tmp_path / "cache"))
    axes = {"tensor_core.count": (4.0, 8.0), "buffer.capacity_bytes": (2.0**23, 2.0**27)}
    spec = SPACE.spec.replace(name="few", axes=axes, ties={}, area=None)
    file = tmp_path / "few.yaml"
    file.write_text(spec.to_yaml())
    return file


def test_the_command_gives_the_document(few, tmp_path, capsys):
    out = tmp_path / "found.json"
    assert main([*COMMAND, "--space", str(few), "--json", "-o", str(out)]) == 0
    document = json.loads(out.read_text())
    wanted = {"status", "points", "evaluated", "pruned", "bound", "gap", "best", "baselines"}
    assert wanted | {"manifest"} <= set(document)
    best = {"chip", "plan", "time_s", "samples_per_s", "area_mm2", "energy_j"}
    assert best <= set(document["best"])
    assert document["status"] == "optimal"
    assert document["gap"] == 0.0
    assert document["open"] == 0
    assert document["top_status"] == "optimal"
    assert document["manifest"]["inputs"]["top"] == 2
    total = document["evaluated"] + sum(document["pruned"].values())
    assert total == document["points"] == 4
    assert document["best"]["time_s"] == document["bound"]
    assert document["manifest"]["inputs"]["cluster"]["devices"] == 8
    capsys.readouterr()
    assert main([*COMMAND, "--space", str(few)]) == 0
    shown = capsys.readouterr().out
    assert "proven optimal" in shown
    assert "The best chips" in shown


def test_the_command_says_what_is_wrong(few, tmp_path, capsys):
    said_of_pages = "cannot be written" if find_spec("plotly") else "--report needs Plotly"
    for words, said in (
        (["--pareto", "time,aera"], "area"),
        (["--space", "published2"], "published"),
        (["--weights", "a"], "weights"),
        (["--baselines", "some"], "baselines"),
        (["--report", str(tmp_path / "none" / "x.html")], said_of_pages),
        (["--hbm", "32,x"], "hbm"),
    ):
        assert main([*COMMAND, "--space", str(few), *words]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
    gpt3 = ["gpt3-175b" if word == "bert-large" else word for word in COMMAND]
    assert main([*gpt3, "--space", str(few)]) == 1
    assert "infeasible" in capsys.readouterr().err


def test_an_interrupt_says_where_to_go_on(few, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("phaze_fast.cli.search.search", interrupted)
    assert main([*COMMAND, "--space", str(few), "--resume", str(tmp_path / "r")]) == 130
    said = capsys.readouterr().err
    assert "goes on from there" in said
    assert "phaze-fast: interrupted" in said


def test_progress_is_json_where_nobody_watches(few, capsys):
    watched = [word for word in COMMAND if word != "--quiet"]
    assert main([*watched, "--space", str(few), "--no-cache"]) == 0
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("{")]
    last = json.loads(lines[-1])["progress"]
    assert last["open"] == 0
    assert last["bound"] == last["incumbent"]
