"""The commands that take a plan away: export, explain, diff, trace-compare; help and messages."""

import json
import re

import pytest

from phaze_fast.cli.app import program
from phaze_fast.cli.main import main
from phaze_fast.cli.output import is_narrow

STEP = ["--chip", "H100", "--devices", "16", "--global-batch", "32"]
GROUPS = {
    name: group.commands for name, group in program().commands.items() if name in ("show", "study")
}
COMMANDS = {name: command for name, command in program().commands.items() if name not in GROUPS}
COMMANDS |= {
    f"{group} {name}": command
    for group, inside in GROUPS.items()
    for name, command in inside.items()
}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    words = ["predict", "Llama2-7B", *STEP, "--tp", "2", "--pp", "4", "--dp", "2", "--zero", "1"]
    assert main([*words, "--recompute", "full", "-o", str(path)]) == 0
    return path


def test_a_plan_file_holds_its_problem(plan):
    data = json.loads(plan.read_text())
    assert data["model"]["name"] == "llama2-7b"
    assert data["cluster"]["devices"] == 16
    assert data["plan"]["tp"] == 2


@pytest.mark.parametrize("to", ["megatron", "Bridge", "deepspeed", "torchtitan", "maxtext"])
def test_export_writes_a_file(plan, to, tmp_path, capsys):
    suffix = {"torchtitan": "toml", "deepspeed": "json"}.get(to, "sh")
    path = tmp_path / f"run.{suffix}"
    assert main(["export", str(plan), "--to", to, "-o", str(path)]) == 0
    said = capsys.readouterr().err
    assert f"wrote {path}" in said
    again = ["predict", "llama2-7b", "--chip", "h100", "--devices", "16", "--plan", str(path)]
    assert main([*again, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = json.loads(plan.read_text())
    if "not expressed" not in said:
        assert found["time_s"] == pytest.approx(first["time_s"], rel=1e-12)
    assert ("not expressed" not in said) == (to in ("megatron", "Bridge"))


def test_export_to_traces(plan, tmp_path, capsys):
    assert main(["export", str(plan), "--to", "perfetto"]) == 0
    trace = json.loads(capsys.readouterr().out)
    assert trace["traceEvents"]
    pytest.importorskip("google.protobuf")
    folder = tmp_path / "et"
    assert main(["export", str(plan), "--to", "chakra", "-o", str(folder), "--ranks", "0-2,9"]) == 0
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["comm_group.json", *(f"plan.{k}.et" for k in (0, 1, 2, 9))]
    assert main(["export", str(plan), "--to", "chakra"]) == 2
    assert main(["export", str(plan), "--to", "chakra", "-o", str(folder), "--ranks", "a"]) == 2
    assert "--ranks: 'a' is not accepted" in capsys.readouterr().err


def test_explain_and_diff(plan, tmp_path, capsys):
    assert main(["explain", str(plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["binds"]
    assert {"what", "elasticity", "doubled"} <= set(found["worth"][0])
    other = tmp_path / "b.json"
    words = ["predict", "llama2-7b", *STEP, "--tp", "4", "--pp", "2", "--dp", "2"]
    assert main([*words, "--recompute", "full", "-o", str(other)]) == 0
    capsys.readouterr()
    page = tmp_path / "diff.html"
    assert (
        main(["explain", str(plan), "--against", str(other), "--json", "--report", str(page)]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["fields"]["tp"] == [2, 4]
    assert page.read_text().startswith("<!doctype html>")


def test_a_profile_on_the_command_line(plan, tmp_path, capsys):
    profile = tmp_path / "profile.json"
    events = [{"ph": "X", "cat": "kernel", "name": "sm90_gemm", "ts": 0.0, "dur": 1000.0}]
    profile.write_text(json.dumps({"traceEvents": events}))
    assert main(["explain", str(plan), "--trace", str(profile), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured_step_s"] == pytest.approx(1e-3)
    assert main(["explain", str(plan), "--trace", str(profile), "--stage", "9"]) == 2
    assert "--stage: 9 is not accepted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "llama2-7b", *STEP, "--zero", "7"], "--zero: 7 is not accepted"),
        (["plan", "llama2-7b", *STEP, "--tp", "x"], "--tp: 'x' is not accepted"),
        (["predict", "llama2-7b", *STEP, "--zero", "4"], "--zero: 4 is not accepted"),
        (["predict", "llama2-7b", *STEP, "--reserved-bytes", "3 parsecs"], "--reserved-bytes: "),
        (["plan", "llama2-7bb", *STEP], "did you mean 'llama2-7b', 'llama2-70b' or "),
        (["export", "no.json", "--to", "megatron"], "no.json: no such file"),
        (["export", "no.json", "--to", "megatro"], "--to: 'megatro' is not accepted; did you mean"),
    ],
)
def test_messages_name_what_was_typed(words, said, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_and_explains_its_options(name):
    command = COMMANDS[name]
    assert re.search(rf"Examples?: phaze-fast {name}\b", command.help)
    for param in command.params:
        if param.name != "help":
            assert getattr(param, "help", None), param.name


def test_short_help(capsys):
    assert main(["-h"]) == 0
    assert main(["plan", "-h"]) == 0
    assert "--global-batch" in capsys.readouterr().out


def test_the_main_table_fits_eighty_columns(plan, capsys, monkeypatch):
    monkeypatch.setattr("phaze_fast.cli.output._WIDTH_OF_A_PIPE", 80)
    assert is_narrow()
    words = ["plan", "llama2-7b", *STEP, "--pp", "4", "--top", "3"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    head = shown.splitlines()[2]
    for column in ("step", "memory", "MFU"):
        assert column in head
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "…" not in shown.split("Where the fastest")[0]


def test_a_folder_is_a_model(tmp_path, capsys):
    from phaze_fast import models

    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config |= {"vocab_size": 1000, "max_position_embeddings": 128, "hidden_act": "silu"}
    config |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.load(str(tmp_path)).layers == 2


@pytest.mark.parametrize("command", ["search", "wafer"])
def test_a_page_that_cannot_be_made_is_refused_before_the_work(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("phaze_fast.cli.output.find_spec", lambda name: None)
    assert main([command, "bertlarge", "--report", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert said == "phaze-fast: --report needs Plotly: pip install 'phaze-fast[plot]'\n"
