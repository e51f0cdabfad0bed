"""`phaze-fast wafer` as a user meets it: the contract, the pictures, one line for every fault."""

import json

import pytest
from wafer_cli_cases import EFFORT, QUICK, SMALL, document, refused

from phaze_fast.wafer.studies.comparison import ABLATIONS

# ---- the contract ----

OURS = {"time_s", "memory_bytes_per_die", "encoding"}
SAID = {"ours", "baselines", "ablations", "bound", "evaluations", "evaluations_per_s"}


def test_compare_keeps_its_contract(run, small):
    found = document(run("bertlarge", "--wafer", small, "--compare", *QUICK, "--json"))
    assert found.keys() >= SAID
    assert found["ours"].keys() >= OURS
    assert set(found["baselines"]) >= {"megatron", "zero3", "accpar"}
    for each in found["baselines"].values():
        assert each.keys() >= {"default", "tuned"}
        for way in each.values():
            assert way.keys() >= OURS
            assert way["status"] in ("ok", "oom")
            assert (way["time_s"] is None) == (way["status"] == "oom")
    assert set(found["ablations"]) == set(ABLATIONS)
    ours = found["ours"]
    assert ours["status"] == "ok"
    assert 0 < found["bound"] <= ours["time_s"]
    assert found["evaluations"] > 0
    assert found["evaluations_per_s"] > 0
    op_mapping = ours["encoding"][0]
    assert op_mapping.keys() == {
        "operator",
        "partition",
        "x",
        "y",
        "output",
        "weights",
        "collective",
        "rectangle",
        "stages",
        "micro_batch",
    }
    for each in found["baselines"].values():
        assert each["tuned"]["time_s"] is None or ours["time_s"] <= each["tuned"]["time_s"]
    for each in found["ablations"].values():
        assert each["time_s"] is None or ours["time_s"] <= each["time_s"]


def test_without_compare_there_are_no_baselines(run, small):
    found = document(run("bertlarge", "--wafer", small, *QUICK, "--json"))
    assert found.keys() >= {"ours", "bound", "bound_space", "evaluations", "evaluations_per_s"}
    assert "micro-batches that divide 64" in found["bound_space"]
    _, out, _ = run("bertlarge", "--wafer", small, *QUICK)
    assert "bound holds over" in out
    assert "micro-batches that divide 64" in out
    assert "baselines" not in found
    assert (found["model"], found["wafer"]) == ("bertlarge", "dram-wafer")


def test_the_same_seed_gives_the_same_document(run, two):
    def plain(*words):
        found = document(run("bertlarge", "--wafer", two, "--compare", *EFFORT, *words, "--json"))
        for key in ("seconds", "evaluations_per_s"):
            del found[key]
        return found

    assert plain("--seed", 3) == plain("--seed", 3, "--threads", 1)


def test_o_writes_the_same_document(run, two, tmp_path):
    file = tmp_path / "out.json"
    shown = document(run("bertlarge", "--wafer", two, *EFFORT, "--json"))
    code, out, err = run("bertlarge", "--wafer", two, *EFFORT, "--json", "-o", file)
    assert (code, out) == (0, "")
    assert f"wrote {file}" in err
    written = json.loads(file.read_text())
    for key in ("seconds", "evaluations_per_s"):
        del shown[key], written[key]
    assert written == shown


def test_several_models_and_wafers_are_cases(run, folder):
    words = ["bertlarge", "gpt2-small", "--wafer", folder / "two.yaml", "--wafer", folder / "dead.yaml"]  # fmt: skip
    found = document(run(*words, *QUICK, "--json"))
    assert set(found) == {"cases"}
    assert [(case["model"], case["wafer"]) for case in found["cases"]] == [
        ("bertlarge", "two"),
        ("gpt2-small", "two"),
        ("bertlarge", "dram-wafer"),
        ("gpt2-small", "dram-wafer"),
    ]
    assert all(case["ours"]["status"] == "ok" for case in found["cases"])


def test_several_cases_share_one_table(run, two):
    code, out, _ = run("bertlarge", "gpt2-small", "--wafer", two, *QUICK, "--compare")
    assert code == 0
    assert out.count("Ours and others") == 1
    assert out.count("Megatron-LM, default") == 2


# ---- what a person sees ----


def test_the_map_and_the_table(run, folder):
    code, out, err = run("bertlarge", "--wafer", folder / "dead.yaml", "--compare", *QUICK)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    at = lines.index("Dies and their stages (. idle, X dead)")
    cells = [line.split() for line in lines[at + 1 : at + 3]]
    assert [len(row) for row in cells] == [3, 3]
    assert cells[1][2] == "X"
    assert "0" in out
    for text in ("Ours and others", "Megatron-LM, tuned", "ZeRO-3, tiled"):
        assert text in out
    for text in ("AccPar, default", "no recompute", "Operators", "cross-entropy"):
        assert text in out
    assert max(map(len, lines)) <= 140
    assert "\x1b" not in out


def test_describe_says_what_communicates(run, two):
    code, out, _ = run("bertlarge", "--wafer", two, "--describe", *QUICK)
    assert code == 0
    assert "stage(s) of " in out
    assert "sequence(s) at once" in out
    assert "| weights " in out


def test_stages_are_numbered_on_the_map(run, tmp_path, small):
    from phaze_fast import models
    from phaze_fast.wafer import Layout, Problem, WaferTraining, megatron

    problem = Problem(models.load("bertlarge"), SMALL, WaferTraining(64))
    file = tmp_path / "plan.json"
    file.write_text(megatron(problem, Layout(1, 1, 6, 1), 1).to_json())
    code, out, _ = run("bertlarge", "--wafer", small, "--global-batch", 64, "--encoding", file)
    assert code == 0
    assert "0 1 2\n5 4 3\n" in out


# ---- no room ----


def test_no_room_is_exit_code_1_and_says_by_how_much(run, folder):
    words = ["gpt3-13b", "--wafer", folder / "two.yaml", *QUICK]
    code, out, err = run(*words)
    assert code == 1
    line = err.splitlines()[-1]
    assert line.startswith("phaze-fast: infeasible: OOM: ")
    assert " over 29.8 GiB of dram per die" in line
    assert "OOM: " in out
    code, out, _ = run(*words, "--json")
    found = json.loads(out)
    assert code == 1
    ours = found["ours"]
    assert ours["status"] == "oom"
    assert ours["time_s"] is None
    assert ours["over_bytes"] > 1e9
    assert ours["reason"] in line


def test_no_room_in_a_comparison(run, folder):
    words = ["gpt3-13b", "--wafer", folder / "two.yaml", "--compare", *QUICK]
    code, out, _ = run(*words, "--json")
    assert code == 1
    found = json.loads(out)
    assert {each["tuned"]["status"] for each in found["baselines"].values()} == {"oom"}
    assert found["memory_at_equal_speed"] == {}
    code, out, err = run(*words)
    assert code == 1
    assert "OOM" in out
    assert "infeasible: OOM: " in err


def test_one_case_without_room_does_not_hide_the_others(run, folder):
    words = ["bertlarge", "gpt3-13b", "--wafer", folder / "two.yaml", *QUICK]
    found = document(run(*words, "--json"))
    assert [case["ours"]["status"] for case in found["cases"]] == ["ok", "oom"]


# ---- wafers, spaces and models ----


@pytest.mark.parametrize(
    ("old", "new", "texts"),
    [
        (
            "width_mm: 25.0",
            "width_mm: 27.0\n  height_mm: 28.0",
            ["reticle: a die of 27 x 28 mm is not accepted; expected at most 26 x 33 mm"],
        ),
        (
            "d2d_modules_x: 14",
            "d2d_modules_x: 60",
            ["shoreline: 60 D2D modules need 33 mm", "expected at most height_mm, 25 mm"],
        ),
        ("columns: 3", "columns: 9", ["window: 9 columns", "need 229 mm; expected at most 215 mm"]),
        ("columns: 3", "colums: 3", ["unknown key 'colums'; did you mean 'columns'?"]),
        ("columns: 3", "columns: -3", ["columns: -3 is not accepted"]),
    ],
)
def test_a_bad_wafer_says_which_rule_with_both_figures(run, tmp_path, old, new, texts):
    text = SMALL.to_yaml()
    assert old in text
    if "height_mm" in new:
        text = "\n".join(line for line in text.splitlines() if "height_mm: " not in line) + "\n"
    file = tmp_path / "bad.yaml"
    file.write_text(text.replace(old, new))
    err = refused(run("bertlarge", "--wafer", file, *QUICK))
    assert str(file) in err
    for each in texts:
        assert each in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["bertlarge", "--wafer", "dram-wafr"], "did you mean 'dram-wafer'?"),
        (["bertlarge", "--wafer", "wafer-spac"], "did you mean 'wafer-space'?"),
        (["bertlarge", "--wafer", "none.yaml"], "none.yaml: no such file"),
        (["bertlarg"], "did you mean 'bertlarge'"),
        (["vit-b16"], "model: vit-b16 is not accepted"),
        (["bertlarge", "--global-batch", "0"], "--global-batch: 0 is not accepted"),
        (["bertlarge", "--global-batch", "-64"], "--global-batch: -64 is not accepted"),
        (["bertlarge", "--global-batch", "many"], "--global-batch"),
        (["bertlarge", "--seq", "0"], "seq: 0 is not accepted"),
        (["bertlarge", "--seeds", "0"], "seeds: 0 is not accepted; expected a whole number from 1"),
        (["bertlarge", "--steps", "0"], "steps: 0 is not accepted"),
        (["bertlarge", "--steps", "99999999999999999999"], "steps: 99999999999999999999"),
        (["bertlarge", "--promising", "0"], "promising: 0 is not accepted"),
        (["bertlarge", "--budget", "-1"], "budget_s: -1.0 is not accepted; expected seconds > 0"),
        (["bertlarge", "--budget", "nan"], "budget_s: nan is not accepted"),
        (["bertlarge", "--threads", "0"], "threads: 0 is not accepted"),
        (["bertlarge", "--threads", "-1"], "threads: -1 is not accepted"),
        (["bertlarge", "--seed", "-1"], "seed: -1 is not accepted"),
        (["bertlarge", "--seed", "18446744073709551616"], "seed: 18446744073709551616"),
        (["bertlarge", "--optimizer", "adma"], "did you mean 'adam'?"),
        (["bertlarge", "-o", "no/such/folder/x.json"], "-o no/such/folder/x.json: cannot be written"),
        (["bertlarge", "--encoding", "none.json"], "none.json: no such file"),
        (["bertlarge", "--bogus"], "--bogus"),
        ([], "Missing argument 'model"),
    ],
)  # fmt: skip
def test_bad_words_are_named(run, small, words, text):
    if words and "--wafer" not in words:
        words = [*words[:1], "--wafer", str(small), *QUICK, *words[1:]]
    assert text.lower() in refused(run(*words)).lower()


def test_a_budget_too_short_for_anything_is_no_fault_of_the_wafer(run, small):
    """It may answer from what it has, but not say that no rectangle suits the model."""
    code, _, err = run("bertlarge", "--wafer", small, *EFFORT, "--budget", 1e-6, "--json")
    assert "no rectangle" not in err
    assert code in (0, 2)


def test_a_space_is_searched(run, folder):
    found = document(run("bertlarge", "--wafer", folder / "space.json", *EFFORT, "--json"))
    assert found["ours"]["status"] == "ok"
    counts = found["wafers"]
    kinds = ("contained", "bounded", "searched", "unseen")
    assert sum(counts[kind] for kind in kinds) == counts["feasible"]
    assert found["base"]["time_s"] >= found["ours"]["time_s"]
    assert "wafers that meet the rules and lie inside no other" in found["bound_space"]
    code, out, _ = run("bertlarge", "--wafer", folder / "space.json", *EFFORT)
    assert code == 0
    assert "bound over all" in out
    assert "the space's own wafer" in out


def test_a_space_says_which_wafer_it_found(run, folder, tmp_path):
    """The wafer itself is in the document, so that it can be used again."""
    found = document(run("bertlarge", "--wafer", folder / "space.json", *EFFORT, "--json"))
    assert isinstance(found["wafer"], dict)
    file = tmp_path / "found.json"
    file.write_text(json.dumps(found["wafer"]))
    again = document(run("bertlarge", "--wafer", file, *EFFORT, "--json"))
    assert again["ours"]["time_s"] == pytest.approx(found["ours"]["time_s"], rel=0.05)


def test_a_space_keeps_the_contract_in_a_comparison(run, folder):
    found = document(
        run("bertlarge", "--wafer", folder / "space.json", "--compare", *EFFORT, "--json")
    )
    assert found.keys() >= SAID
    ablation = found["ablations"]["no_architecture"]
    assert ablation["time_s"] == found["base"]["time_s"]
    for each in found["ablations"].values():
        assert each["time_s"] is None or found["ours"]["time_s"] <= each["time_s"]


def test_a_space_without_room_is_infeasible(run, folder):
    code, out, err = run("gpt3-175b", "--wafer", folder / "space.json", *QUICK, "--json")
    assert "internal error" not in err
    assert code == 1
    assert json.loads(out)["ours"]["status"] == "oom"


@pytest.mark.slow
def test_a_space_and_a_budget_too_short_for_anything(run):
    code, _, err = run("bertlarge", "--wafer", "wafer-space", *EFFORT, "--budget", 1e-6)
    assert "internal error" not in err
    assert code in (0, 2)
