"""The command line as a user meets it: exit codes, one clear line, JSON on standard output."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from golden_files import refused_calls

import phaze_fast as pf
from phaze_fast.cli import app
from phaze_fast.hardware import presets
from phaze_fast.planning import PlanSpec, Training


def found(group, name):
    for word in name.split():
        group = group.commands[word]
    return group


CHIP = """
name: mine
clock_hz: 1.05 GHz
tensor_core: {count: 8, width: 128, depth: 128}
vector_core: {count: 2, lanes: 128}
buffer: {capacity_bytes: 128 MiB, bytes_per_cycle: 4096.0}
"""

REDUCE = "estimate --collective all-reduce --fabric dgx-a100"
EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = [
    "show model",
    "show model mixtral-8x7b",
    "show model --operators llama3-8b --tp 2 --sequence-parallel --pp 2",
    "show model --operators t5-small --fusion epilogues --recompute full",
    "show model --operators gpt2-small --pp 2 --schedule interleaved --vpp 3",
    "show chip",
    "show chip h100",
    "show interconnect",
    "show interconnect dgx-a100",
    "show space",
    "check --schema all",
    "check --schema chip",
    "estimate --collective all-reduce --bytes '1 GiB' --ranks 8 --fabric dgx-a100",
    "plan gpt2-small --chip h100 --devices 2 --global-batch 4",
    "predict gpt2-small --chip h100 --devices 2 --pp 2 --global-batch 4",
]


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_prints_for_people_and_takes_json_and_o(run, document, tmp_path, line):
    code, out, _ = run(line)
    assert code == 0
    assert len(out.splitlines()) >= 5
    assert max(map(len, out.splitlines())) <= 140 or line.startswith("check")
    file = tmp_path / "out.json"
    code, out, err = run(line, "--json", "-o", file)
    assert (code, out) == (0, "")
    assert f"wrote {file}" in err
    assert json.loads(file.read_text()) == document(line)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("line", "said"), refused_calls("command line"))
def test_bad_words_are_one_line_and_exit_code_2(refused, line, said):
    assert said in refused(line)


def test_an_impossible_width_is_infeasible(run):
    code, out, err = run("show model --operators gpt2 --tp 4")
    assert (code, out) == (1, "")
    assert "gpt2: tp: 4 does not divide 25 heads" in err
    code, out, _ = run("show model --operators llama2-7b --cp 3 --json")
    assert code == 1
    assert "cp: 3 does not divide" in json.loads(out)["reason"]


def test_show_says_what_it_found(document):
    line = "show model gpt3-175b --operators --tp 8 --sequence-parallel"
    found = document(f"{line} --pp 12 --micro-batches 64")
    assert [layer["kind"] for layer in found["layers"]] == ["embedding", "block", "head"]
    assert len(found["memory"]) == 12
    assert found["memory"][0]["activations"] > found["memory"][11]["activations"]
    ops = found["layers"][1]["forward"]
    assert {op["unit"] for op in ops} == {"VC", "NET", "TC+VC"}
    assert sum(op["flops"] for op in ops) == found["layers"][1]["flops"]["forward"]


def test_collective_says_what_it_found(document):
    found = document(f"{REDUCE} --bytes '1 GiB' --ranks 64 --fabric tpuv4-pod --devices 64")
    assert found["algorithm"] == "multi-ring"
    assert found["payload_bytes"] == 2**30
    assert found["alternatives"]["multi-ring"] == found["time_s"]


def test_check_guesses_the_kind(run, document, tmp_path):
    for kind, text in {
        "chip": CHIP,
        "fabric": "{kind: mesh, name: m, dims: [2, 2], link_bandwidth_bytes_per_s: 1 GB/s}",
        "cluster": "{devices: 64, fabric: tpuv4-pod, chip: h100}",
        "space": "{name: s, base: tpuv4, axes: {clock_hz: [1.0e9]}}",
        "plan": "{tp: 2, dp: 4, global_batch: 8}",
    }.items():
        file = tmp_path / f"{kind}.yaml"
        file.write_text(text)
        assert document("check", file)["kind"] == kind
    code, _, err = run("check", tmp_path / "chip.yaml", "--kind", "fabric")
    assert code == 2
    assert "'kind' is missing" in err


def test_check_reads_the_answer_of_plan_and_refuses_an_edited_one(run, document, tmp_path):
    file = tmp_path / "plan.json"
    line = "plan gpt2 --chip h100 --devices 8 --global-batch 32 --zero 1 --micro-batch 4 --tp 1"
    assert run(f"{line} --json -o", file)[0] == 0
    found = document("check", file)
    assert (found["kind"], found["record"]["zero"]) == ("plan", 1)
    file.write_text(file.read_text().replace('"1f1b"', '"1f1bb"'))
    code, _, err = run("check", file)
    assert code == 2
    assert "schedule: '1f1bb' is not accepted" in err


def test_what_check_prints_reads_back(document, tmp_path):
    file = tmp_path / "chip.yaml"
    file.write_text(CHIP)
    record = document("check", file)["record"]
    again = tmp_path / "again.json"
    again.write_text(json.dumps(record))
    assert presets.chip(again) == presets.chip(file)


def test_o_replaces_a_file_whole_and_keeps_it_on_failure(run, tmp_path):
    file = tmp_path / "x.json"
    file.write_text("old")
    assert run("show", "chip", "--json", "-o", file)[0] == 0
    assert json.loads(file.read_text())
    link = tmp_path / "link.json"
    link.symlink_to(file)
    assert run("show", "interconnect", "--json", "-o", link)[0] == 0
    assert link.is_symlink()
    assert json.loads(file.read_text())[0]["kind"]
    assert run("show", "chip", "-o", tmp_path)[0] == 2
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert run("show", "chip", "-o", loop)[0] == 2
    assert run("show", "chip", "--json", "-o", "-")[1].startswith("[")


@pytest.mark.parametrize("name", app.COMMANDS)
def test_help_fits_eighty_columns_cuts_no_name_and_has_an_example(run, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for line in ("-h", f"{name} -h"):
        code, out, _ = run(line)
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        assert "…" not in out
        assert not [row for row in out.splitlines()[1:] if row.endswith("...")]
    command = found(app.program(*name.split()), name)
    assert re.search(rf"Examples?: phaze-fast {name}\b", command.help)
    for param in command.params:
        if param.name != "help":
            assert getattr(param, "help", None), param.name


def test_commands_share_the_options_of_a_record():
    options = {
        name: {p.name: p for p in found(app.program(name), name).params}
        for name in ("plan", "search", "sweep", "predict")
    }
    fields = set(Training.model_fields) - {"tied", "uncut"}
    assert all(fields <= set(options[name]) for name in ("plan", "search", "sweep"))
    assert set(PlanSpec.model_fields) <= set(options["predict"])
    for field in fields - {"global_batch", "tp", "cp", "ep"}:  # whose defaults differ
        assert options["plan"][field].help == options["search"][field].help


def test_bare_words_print_what_they_could_be_followed_by(run):
    for line in ("", "show", "study"):
        code, out, err = run(line)
        assert code == 2
        assert "Usage" in out + err


def test_the_version_needs_no_command():
    code = "import sys; from phaze_fast.cli.main import main; main(['--version']); "
    code += "print(sorted({'typer', 'rich', 'pydantic', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"phaze-fast {pf.__version__}", "[]"]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_pipe_is_as_wide_as_columns_says(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    line = "plan gpt2-small --chip h100 --devices 4 --global-batch 8 --top 3"
    shown = run(line)[1].splitlines()
    assert columns - 40 < max(map(len, shown)) <= columns
    assert all(column in shown[2] for column in ("step", "memory", "MFU"))
    assert "…" not in "\n".join(shown).split("Where the fastest")[0]


@pytest.mark.parametrize("line", ["show chip", "show model", "show model gpt3-175b --operators"])
def test_narrow_tables_cut_neither_names_nor_numbers(run, monkeypatch, line):
    monkeypatch.setenv("COLUMNS", "80")
    narrow = run(line)[1]
    assert "…" not in narrow
    assert "\x1b" not in narrow
    assert "a wider terminal also has: " in narrow
    monkeypatch.setenv("COLUMNS", "200")
    wide = run(line)[1]
    assert "a wider terminal" not in wide

    def names(text):
        return [row.split("│")[1].strip() for row in text.splitlines() if row.startswith("│")]

    assert [name for name in names(narrow) if name] == names(wide)


def test_a_sweep_and_a_plan_answer_one_question_alike(document):
    same = "--chip h100 --devices 16 --global-batch 64 --schedule 1f1b"
    (row,) = document(f"sweep llama3-8b {same}")["rows"]
    best = document(f"plan llama3-8b {same}")["plans"][0]
    assert (row["time_s"], row["memory_bytes"]) == (best["time_s"], best["memory_bytes"])
    (row,) = document(f"sweep llama3-8b {same} --headroom 0")["rows"]
    assert row["time_s"] <= best["time_s"]


@pytest.mark.parametrize("command", ["search", "wafer"])
def test_a_page_that_cannot_be_made_is_refused_before_the_work(
    refused, command, tmp_path, monkeypatch
):
    monkeypatch.setattr("phaze_fast.cli.output.find_spec", lambda name: None)
    said = refused(command, "bertlarge", "--report", tmp_path / "page.html")
    assert said == "phaze-fast: --report needs Plotly: pip install 'phaze-fast[plot]'\n"


def test_a_command_is_loaded_alone_and_is_the_same_as_in_the_whole(run):
    whole, listing = app.program(), app.program("--help")
    assert whole is app.program("no-such-command")
    assert set(whole.commands) == set(listing.commands) == {n.split()[0] for n in app.COMMANDS}
    for name in app.COMMANDS:
        alone = found(app.program(*name.split()), name)
        same = found(whole, name)
        assert alone.help == same.help == found(listing, name).help
        assert [p.opts for p in alone.params] == [p.opts for p in same.params]
    code, _, err = run("plam")
    assert code == 2
    assert "plan" in err


def test_a_bug_shows_no_traceback(run, monkeypatch):
    def broken():
        raise RuntimeError("boom")

    monkeypatch.setattr(presets, "chip_names", broken)
    code, _, err = run("show", "chip")
    assert code == 70
    said = "internal error: RuntimeError: boom (set PHAZE_FAST_DEBUG=1 for the trace)"
    assert err == f"phaze-fast: {said}\n"


def program(words, after="", **options):
    """Run the program in a shell, with its streams redirected by what comes after."""
    line = f"set -o pipefail; {sys.executable} -m phaze_fast {words} {after}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, **options
    )


def test_the_program_itself():
    line = "estimate --collective all-reduce --bytes 8 --ranks 2 --fabric phaze-flat --json"
    done = program(line)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["time_s"] == pytest.approx(8 / 2**32)


def test_a_reader_that_goes_away_is_no_error():
    done = program("check --schema all", "| head -n 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_an_answer_that_cannot_be_written_is_an_error(tmp_path):
    lost = program("show chip h100", ">&-")
    assert lost.returncode == 2
    assert lost.stderr == "phaze-fast: standard output: cannot be written: it is closed\n"
    saved = program(f"show chip h100 --output {tmp_path / 'h100.json'}", ">&-")
    assert saved.returncode == 0
    assert json.loads((tmp_path / "h100.json").read_text())["name"] == "h100"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_refused_and_does_not_block(refused, tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "a named pipe is not accepted" in refused("check", tmp_path / "pipe.yaml")


SILENT = [
    ("predict bert-large --chip h100 --devices 4 --dp 4 --global-batch 8", "time_s"),
    ("plan bert-large --chip h100 --devices 4 --global-batch 8", "plans"),
    ("show space tpuv4-area", "points"),
    (f"search bertlarge --space {EXAMPLES / 'small_space.yaml'}", "best"),
    ("sweep bert-large --chip h100 --devices 4 --global-batch 8", "rows"),
    ("wafer bertlarge --wafer dojo-tile-like --global-batch 64 --steps 100 --seeds 1", "ours"),
]


@pytest.mark.parametrize(
    ("words", "field"),
    [SILENT[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in SILENT[1:])],
)
def test_silence_on_standard_error_costs_no_answer(words, field):
    done = program(words, "--json 2>&-")
    assert done.returncode == 0, done.stdout
    assert field in json.loads(done.stdout)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_said_plainly():
    done = program("show chip h100", "--json > /dev/full")
    said = "standard output: cannot be written: No space left on device"
    assert (done.returncode, done.stderr) == (2, f"phaze-fast: {said}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("predict llama3-8b --devices abc", ("--devices", "'abc'", "integer")),
        ("wafer llama3-70b --budget soon", ("--budget", "'soon'", "number")),
        ("show chips", ("'chips'", "accepted: model, chip, interconnect, wafer, space")),
        ("plans", ("'plans'", "accepted: search, plan, predict")),
    ],
)
def test_the_option_parser_names_the_value_and_what_is_accepted(refused, words, said):
    message = refused(*words.split())
    assert [part for part in said if part not in message] == [], message
