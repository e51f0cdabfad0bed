"""The search as a command: documents, pages, tables, what it refuses, interrupts and progress."""

import json
from importlib.util import find_spec

import pytest
from search_cases import few_chips_file

from phaze_fast.cli.main import main

COMMAND = [
    "search",
    "bert-large",
    "--devices",
    "8",
    "--global-batch",
    "32",
    "--micro-batch",
    "1",
    "--tp",
    "1",
    "--quiet",
]
PLAIN = [*COMMAND, "--hbm", "32", "--baselines", "none", "--top", "2"]


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A space of few chips in a file, and a cache of its own."""
    monkeypatch.setenv("PHAZE_FAST_CACHE", str(tmp_path / "cache"))
    return str(few_chips_file(tmp_path))


def test_the_command_gives_the_document(few, tmp_path, capsys):
    out = tmp_path / "found.json"
    assert main([*PLAIN, "--space", few, "--json", "-o", str(out)]) == 0
    document = json.loads(out.read_text())
    wanted = {"status", "points", "evaluated", "pruned", "bound", "gap", "best", "baselines"}
    assert wanted | {"manifest"} <= set(document)
    best = {"chip", "plan", "time_s", "samples_per_s", "area_mm2", "energy_j"}
    assert best <= set(document["best"])
    assert document["status"] == document["top_status"] == "optimal"
    assert document["gap"] == document["open"] == 0
    total = document["evaluated"] + sum(document["pruned"].values())
    assert total == document["points"] == 4
    assert document["best"]["time_s"] == document["bound"]
    inputs = document["manifest"]["inputs"]
    assert (inputs["top"], inputs["cluster"]["devices"]) == (2, 8)
    capsys.readouterr()
    assert main([*PLAIN, "--space", few]) == 0
    shown = capsys.readouterr().out
    assert "proven optimal" in shown
    assert "The best chips" in shown


@pytest.mark.extras
def test_the_command_writes_a_page_and_a_table(few, tmp_path):
    pytest.importorskip("plotly")
    parquet = pytest.importorskip("pyarrow.parquet")
    page, rows, out = (tmp_path / name for name in ("page.html", "front.parquet", "a.json"))
    words = ["--hbm", "32,64", "--space", few, "--pareto", "time,area,hbm", "--report", str(page)]
    words += ["--parquet", str(rows), "--json", "-o", str(out)]
    assert main([*COMMAND, *words]) == 0
    assert "Proven optimal" in page.read_text()
    document = json.loads(out.read_text())
    front = document["pareto"]["designs"]
    table = parquet.read_table(rows).to_pylist()
    assert [row["time_s"] for row in table] == [row["time_s"] for row in front]
    assert set(document["baselines"]) == {"built", "hand_plan", "megatron_plan", "our_plan"}


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
        assert main([*PLAIN, "--space", few, *words]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
    gpt3 = ["gpt3-175b" if word == "bert-large" else word for word in PLAIN]
    assert main([*gpt3, "--space", few]) == 1
    assert "infeasible" in capsys.readouterr().err


def test_an_interrupt_says_where_to_go_on(few, tmp_path, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("phaze_fast.cli.search.search", interrupted)
    assert main([*PLAIN, "--space", few, "--resume", str(tmp_path / "r")]) == 130
    said = capsys.readouterr().err
    assert "resumes from there" in said
    assert "phaze-fast: interrupted" in said


def test_progress_is_json_where_nobody_watches(few, capsys):
    watched = [word for word in PLAIN if word != "--quiet"]
    assert main([*watched, "--space", few, "--no-cache"]) == 0
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("{")]
    last = json.loads(lines[-1])["progress"]
    assert last["open"] == 0
    assert last["bound"] == last["incumbent"]
