"""`phaze-fast wafer` and files: a saved answer scored again, and the program in a shell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from wafer_cli_cases import EFFORT, QUICK, document, refused

from phaze_fast.cli.main import main
from phaze_fast.wafer import load_wafer

# ---- a saved answer ----


@pytest.fixture(scope="module")
def saved(folder):
    file = folder / "saved.json"
    words = [
        "wafer",
        "bertlarge",
        "--wafer",
        folder / "small.yaml",
        *QUICK,
        "-o",
        file,
        "--no-cache",
    ]
    assert main([str(word) for word in (*words, "--json")]) == 0
    return file


def test_a_saved_answer_takes_the_same_time(run, small, saved, tmp_path):
    ours = json.loads(saved.read_text())["ours"]
    for data in ({"ours": ours}, ours, ours["encoding"]):
        file = tmp_path / "mine.json"
        file.write_text(json.dumps(data))
        words = ["--global-batch", 64, "--encoding", file, "--json"]
        found = document(run("bertlarge", "--wafer", small, *words))["ours"]
        assert found == ours
    code, out, _ = run("bertlarge", "--wafer", small, *words[:-1], "--describe")
    assert code == 0
    assert "sequence(s) at once" in out


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda d: d[2].update(weights="zero4"), "mine.json[2]: weights: 'zero4' is not accepted"),
        (lambda d: d[2].update(weights=[]), "mine.json[2]: weights"),
        (lambda d: d[3].pop("x"), "mine.json[3]: x: is missing and has no default"),
        (lambda d: d[3].update(stages=99), "operators disagree"),
        (lambda d: d.pop(), "operators: missing ['cross-entropy']"),
        (lambda d: [e.update(stages=99) for e in d], "stages: 99 rectangles of"),
        (lambda d: [e.update(micro_batch=3) for e in d], "micro_batch: 3 is not accepted"),
        (lambda d: d[0].update(output="recompute"), "look-up.output: 'recompute' is not accepted"),
        (lambda d: d.clear(), "expected a list of one mapping per operator"),
    ],
)
def test_a_bad_encoding_names_the_entry(run, small, saved, tmp_path, change, text):
    data = json.loads(saved.read_text())["ours"]["encoding"]
    change(data)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data))
    words = ["--global-batch", 64, "--encoding", file]
    assert text in refused(run("bertlarge", "--wafer", small, *words))


@pytest.mark.parametrize("text", ["{", "[1, 2]", "null", '{"ours": 5}', '{"cases": []}', ""])
def test_a_file_that_is_no_encoding_is_named(run, small, tmp_path, text):
    file = tmp_path / "mine.json"
    file.write_text(text)
    words = ["--global-batch", 64, "--encoding", file]
    assert str(file) in refused(run("bertlarge", "--wafer", small, *words))


def test_an_encoding_of_another_model_is_refused(run, small, saved):
    err = refused(run("gpt2-small", "--wafer", small, "--global-batch", 64, "--encoding", saved))
    assert "operators: missing" in err


def test_an_encoding_without_room_is_exit_code_1(run, folder, tmp_path):
    from phaze_fast import models
    from phaze_fast.wafer import Layout, Problem, WaferTraining, megatron

    wafer = load_wafer(folder / "two.yaml")
    problem = Problem(models.load("gpt3-13b"), wafer, WaferTraining(64))
    file = tmp_path / "plan.json"
    file.write_text(megatron(problem, Layout(2, 1, 1, 1), 2).to_json())
    words = ["gpt3-13b", "--wafer", folder / "two.yaml", "--global-batch", 64, "--encoding", file]
    code, out, err = run(*words, "--json")
    assert code == 1
    assert json.loads(out)["ours"]["status"] == "oom"
    assert "infeasible: OOM: " in err


# ---- as a program ----


def shell(command):
    command = command.replace("PROGRAM", f"{sys.executable} -m phaze_fast wafer bertlarge")
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(folder):
    words = " ".join(EFFORT)
    done = shell(f"set -o pipefail; PROGRAM --wafer {folder}/two.yaml {words} | head -n 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "bertlarge on two\n", "")


@pytest.mark.slow
def test_silence_on_standard_error_costs_no_answer(folder):
    done = shell(f"PROGRAM --wafer {folder}/two.yaml {' '.join(EFFORT)} --json 2>&-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["ours"]["status"] == "ok"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_said_plainly(folder):
    done = shell(f"PROGRAM --wafer {folder}/two.yaml {' '.join(EFFORT)} --json > /dev/full")
    assert done.returncode == 2
    assert (
        done.stderr == "phaze-fast: standard output: cannot be written: No space left on device\n"
    )


@pytest.mark.slow
def test_the_default_wafer_and_the_default_effort(run):
    found = document(run("bertlarge", "--global-batch", 64, "--json"))
    assert found["wafer"] == "dram-wafer"
    assert found["ours"]["status"] == "ok"
