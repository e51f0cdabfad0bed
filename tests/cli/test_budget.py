"""Token budgets on the command line: what `plan` and `predict` add, and what they refuse."""

import json

import pytest

from phaze_fast.cli.main import main
from phaze_fast.planning import goodput, training_run

PREDICT = ["predict", "llama2-7b", "--chip", "h100", "--devices", "16", "--tp", "4", "--dp", "4"]
PREDICT += ["--global-batch", "64"]
BUDGET = ["--tokens", "2T", "--usd-per-device-hour", "2.5", "--usd-per-kwh", "0.1"]
BUDGET += ["--pue", "1.2", "--failures-per-device-day", "5e-4", "--checkpoint-s", "30 s"]
BUDGET += ["--restart-s", "600 s"]


def test_a_budget_is_what_the_functions_say(capsys):
    assert main([*PREDICT, *BUDGET, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    parts = goodput(16, 5e-4, 30.0, 600.0)
    run = training_run(
        2e12,
        64 * document["plan"]["seq"],
        document["time_s"],
        16,
        goodput=parts.fraction,
        power_w=700.0,
        pue=1.2,
        usd_per_device_hour=2.5,
        usd_per_kwh=0.1,
    )
    assert document["budget"] == {**run.to_dict(), "goodput_parts": parts.to_dict()}
    assert document["calibration"]["state"] == "carried over"


def test_plan_has_the_budget_of_its_best(capsys):
    words = ["plan", "gpt2-small", "--chip", "tpuv4", "--devices", "8", "--global-batch", "32"]
    assert main([*words, "--tokens", "300B", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    best, budget = document["plans"][0], document["budget"]
    assert budget["steps"] == -(-300 * 10**9 // (32 * best["seq"]))
    assert budget["goodput"] == 1.0
    assert budget["days"] == pytest.approx(budget["steps"] * best["time_s"] / 86400)
    assert budget["goodput_parts"]["mtbf_s"] is None
    assert main([*words, "--json"]) == 0
    assert "budget" not in json.loads(capsys.readouterr().out)


def test_energy_by_the_table_where_no_power_is_published(capsys):
    words = ["predict", "gpt2-small", "--chip", "tpuv5e", "--devices", "8", "--dp", "8"]
    assert main([*words, "--global-batch", "8", "--tokens", "1B", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["budget"]["energy_from"] == "model"
    steps = document["budget"]["steps"]
    assert document["budget"]["energy_j"] == pytest.approx(steps * document["energy_j"])


def test_what_people_see(capsys):
    assert main([*PREDICT, *BUDGET]) == 0
    shown = capsys.readouterr().out
    for word in ("For 2,000,000,000,000 tokens", "device-hours", "goodput", "MWh", "dollars"):
        assert word in shown
    assert main([*PREDICT, "--tokens", "1.5e9"]) == 0
    shown = capsys.readouterr().out
    assert "For 1,500,000,000 tokens" in shown
    assert "goodput" not in shown
    assert "dollars" not in shown
    assert main(PREDICT) == 0
    assert "device-hours" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "many"], "--tokens: 'many' is not accepted; expected a number of tokens"),
        (["--tokens", "0"], "--tokens: '0' is not accepted"),
        (["--tokens", "1.2.3B"], "--tokens: '1.2.3B' is not accepted"),
        (["--tokens", "1T", "--pue", "0.5"], "--pue: 0.5 is not accepted"),
        (["--tokens", "1T", "--usd-per-device-hour", "-1"], "--usd-per-device-hour: -1.0"),
        (["--tokens", "1T", "--usd-per-kwh", "nan"], "--usd-per-kwh: nan"),
        (["--tokens", "1T", "--failures-per-device-day", "-1"], "--failures-per-device-day: -1.0"),
        (["--tokens", "1T", "--checkpoint-s", "soon"], "--checkpoint-s: 'soon'"),
        (["--tokens", "1T", "--restart-s", "-1"], "--restart-s: '-1' is not accepted"),
        (
            ["--tokens", "1T", "--checkpoint-s", "9 s", "--interval-s", "0"],
            "--interval-s: 0.0 is not accepted",
        ),
        (
            ["--tokens", "1T", "--failures-per-device-day", "1e6", "--restart-s", "600 s"],
            "nothing is ever finished",
        ),
        (["--usd-per-kwh", "0.1"], "--usd-per-kwh: means nothing without --tokens"),
    ],
)
def test_bad_budgets_are_one_line(capsys, words, said):
    assert main([*PREDICT, *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1
