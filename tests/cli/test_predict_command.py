"""The command `predict`, as a user types it."""

import json

import pytest

HERE = ["llama2-7b", "--chip", "h100", "--devices", "16"]
WIDTHS = ["--tp", "4", "--pp", "2", "--dp", "2", "--global-batch", "64"]


def test_the_document_has_what_programs_rely_on(run):
    code, out, err = run("predict", *HERE, *WIDTHS, "--json")
    assert code == 0, err
    document = json.loads(out)
    for name in ("time_s", "samples_per_s", "tokens_per_s", "mfu", "hfu", "memory_bytes"):
        assert document[name] > 0
    assert sum(document["parts_s"].values()) == pytest.approx(document["time_s"], rel=1e-12)
    assert sum(document["memory"].values()) == pytest.approx(document["memory_bytes"], rel=1e-12)
    assert document["over_bytes"] == 0
    assert len(document["stages"]) == document["plan"]["pp"] == 2


def test_a_plan_that_was_found_is_read_from_its_file(run, tmp_path):
    file = tmp_path / "plans.json"
    code, _, err = run("plan", *HERE, "--global-batch", "64", "--top", "2", "-o", str(file))
    assert code == 0, err
    best = json.loads(file.read_text())["plans"][0]
    code, again, err = run("predict", *HERE, "--plan", str(file), "--json")
    assert code == 0, err
    assert json.loads(again)["plan"] == best


def test_what_each_stage_recomputes_is_given_in_words(run):
    words = ["--recompute", "full:3/norms,none", "--schedule", "zb-h2"]
    code, out, err = run("predict", *HERE, *WIDTHS, *words, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["plan"]["schedule"] == "zb-h2"
    assert [stage["recompute"] for stage in document["stages"]] == ["full:3/norms", "none"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tp", "4", "--pp", "2", "--dp", "4", "--global-batch", "64"], "4 x 2 x 4 x 1 = 32"),
        (["--tp", "4", "--dp", "4", "--global-batch", "66"], "dp x micro_batch = 4 x 1 = 4"),
        ([*WIDTHS, "--schedule", "gpipes"], "schedule: 'gpipes'"),
        ([*WIDTHS, "--recompute", "ful"], "recompute: 'ful' is not accepted"),
        ([*WIDTHS, "--recompute", "full:3/,none,none"], "recompute: 3 entries are not accepted"),
        ([*WIDTHS, "--recompute", "full:0"], "recompute: '0' in 'full:0' is not accepted"),
        ([*WIDTHS, "--stages", "17,18"], "17 + 18 = 35 layers; expected the 34"),
        ([*WIDTHS, "--plan", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_plans_are_one_line_with_the_arithmetic(run, words, said):
    code, _, err = run("predict", *HERE, *words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_a_plan_that_does_not_fit_is_timed_and_says_by_how_much(run):
    words = ["gpt3-175b", "--chip", "h100", "--devices", "8", "--tp", "8", "--global-batch", "8"]
    code, out, err = run("predict", *words, "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["over_bytes"] > 1e11
    assert document["time_s"] > 0
