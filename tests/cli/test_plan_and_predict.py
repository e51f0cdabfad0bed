"""`plan` and `predict`: what they show, write and refuse, and what a token budget adds."""

import json

import pytest
from golden_files import refused_calls

from phaze_fast.hardware import presets
from phaze_fast.planning import goodput, training_run

SMALL = "plan gpt2-small --chip h100 --devices 8 --global-batch 32"
HERE = "llama2-7b --chip h100 --devices 16"
GIVEN = f"predict {HERE} --tp 4 --pp 2 --dp 2 --global-batch 64"
LARGE = "gpt3-175b --chip h100 --devices 8 --global-batch 8"


# ---- plan ----


def test_plans_for_people_and_for_programs(run, document):
    code, shown, _ = run(SMALL)
    assert code == 0
    for word in ("tokens/s", "MFU", "stage by stage", "activations", "Where the fastest"):
        assert word in shown
    data = document(SMALL)
    keys = {"tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "recompute", "time_s"}
    assert keys | {"memory_bytes", "tokens_per_s", "mfu", "stages"} <= set(data["plans"][0])
    assert isinstance(data["rejected"], dict)


@pytest.mark.slow
def test_every_chip_with_a_usual_fabric_has_plans(document, refused):
    """At 256 devices, which every fabric holds."""
    named = [name for name in presets.chip_names() if presets.chip(name).usual_fabric]
    assert len(named) >= 19
    for name in named:
        line = f"plan gpt2-small --chip {name} --devices 256 --tp 2 --pp 1 --global-batch 256"
        data = document(f"{line} --micro-batch 1 --top 1")
        assert 0 < data["plans"][0]["mfu"] < 1
        assert data["calibration"]["chip"] == name
    said = refused("plan gpt2-small --chip wse-3 --devices 8")
    assert "--fabric: missing, and wse-3 has no usual interconnect" in said


def test_several_chips_are_compared_by_the_plans_that_each_has_alone(run, document):
    step = "--global-batch 32 --tp 1 --micro-batch 1 --tokens 1B"
    together = f"plan gpt2-small --chip h100,a100-80 --devices 8,4 {step}"
    rows = document(f"{together} --usd-per-device-hour 3,2")["clusters"]
    for row, (chip, devices, price) in zip(rows, [("h100", 8, 3), ("a100-80", 4, 2)], strict=True):
        line = f"plan gpt2-small --chip {chip} --devices {devices} {step}"
        assert row == document(f"{line} --usd-per-device-hour {price}")
        budget = row["budget"]
        assert budget["device_usd"] == pytest.approx(price * budget["device_hours"], rel=1e-12)
    shown = run(together)[1]
    assert shown.index("h100") < shown.index("a100-80")
    assert "Each optimal among" in shown


def test_a_chip_without_a_plan_is_a_line_of_the_comparison(run, document, refused, tmp_path):
    line = "plan llama2-7b --devices 2 --global-batch 8 --micro-batch 1 --tp 1,2"
    one, other = document(f"{line} --chip a100-40,gb200")["clusters"]
    assert (one["status"], one["plans"]) == ("infeasible", [])
    assert other["plans"]
    assert "infeasible: llama2-7b on 2 devices with 37.3 GiB" in " ".join(
        run(f"{line} --chip a100-40,gb200")[1].replace("│", " ").split()
    )
    code, out, err = run(f"{line} --chip a100-40,v100-32")
    assert (code, out) == (1, "")
    assert "a100-40: llama2-7b on 2 devices" in err
    assert "v100-32: llama2-7b on 2 devices" in err
    said = refused("plan gpt2-small --chip h100,h200 --devices 8,8,8")
    assert "--devices: '8,8,8' is not accepted; expected one value, or 2" in said
    page = tmp_path / "page.html"
    assert "--report: works with one chip" in refused(f"{line} --chip h100,h200 --report {page}")
    assert not page.exists()


def test_schedules_and_recomputation_are_lists(document, refused):
    line = f"{SMALL} --tp 1 --dp 1 --pp 4 --micro-batch 1"
    line += " --schedule gpipe,zb-h1,zb-h2,zb-v,dualpipe-v --recompute"
    plans = document(f"{line} norms+activations,full")["plans"]
    assert {each["schedule"] for each in plans} == {"gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"}
    texts = {stage["recompute"] for each in plans for stage in each["stages"]}
    assert texts == {"norms+activations"}
    assert "did you mean 'activations'" in refused(f"{line} norms+activation")


def test_infeasible_is_a_result_with_exit_code_1(run, tmp_path):
    line = f"plan {LARGE} --micro-batch 1"
    code, out, err = run(line)
    assert (code, out) == (1, "")
    assert "infeasible: gpt3-175b on 8 devices with 76.1 GiB each" in err
    assert "It would fit with 64 devices" in err
    file = tmp_path / "r.json"
    assert run(line, "--json", "-o", file)[:2] == (1, "")
    code, out, _ = run(line, "--json")
    answer = json.loads(out)
    assert (code, answer) == (1, json.loads(file.read_text()))
    assert (answer["status"], answer["plans"]) == ("infeasible", [])
    assert answer["rejected"]
    assert "64 devices" in answer["reason"]
    assert run(f"{line} --devices 64")[0] == 0


# ---- predict ----


def test_a_prediction_has_what_programs_rely_on(document):
    data = document(GIVEN)
    for name in ("time_s", "samples_per_s", "tokens_per_s", "mfu", "hfu", "memory_bytes"):
        assert data[name] > 0
    assert sum(data["parts_s"].values()) == pytest.approx(data["time_s"], rel=1e-12)
    assert sum(data["memory"].values()) == pytest.approx(data["memory_bytes"], rel=1e-12)
    assert data["over_bytes"] == 0
    assert len(data["stages"]) == data["plan"]["pp"] == 2


def test_predict_takes_what_plan_writes(run, document, tmp_path):
    file, alone = tmp_path / "plans.json", tmp_path / "best.json"
    assert run(f"plan {HERE} --global-batch 64 --top 2 -o {file}")[0] == 0
    best = json.loads(file.read_text())["plans"][0]
    alone.write_text(json.dumps(best))
    for path in (file, alone):
        assert document(f"predict {HERE} --plan {path}")["plan"] == best
    assert document(f"predict {HERE} --plan {file} --zero 3")["plan"]["zero"] == 3


def test_what_each_stage_recomputes_is_given_in_words(document):
    data = document(f"{GIVEN} --recompute full:3/norms,none --schedule zb-h2")
    assert data["plan"]["schedule"] == "zb-h2"
    assert [stage["recompute"] for stage in data["stages"]] == ["full:3/norms", "none"]


def test_predict_never_refuses_for_memory(run, document):
    data = document(f"predict {LARGE} --tp 8")
    assert data["over_bytes"] == data["memory_bytes"] - data["limit_bytes"] > 1e11
    assert data["time_s"] > 0
    code, out, _ = run(f"predict {LARGE} --tp 8")
    assert code == 0
    assert "OVER" in out


@pytest.mark.parametrize(("line", "said"), refused_calls("plan and predict commands"))
def test_bad_plans_are_one_line_with_the_option_and_the_arithmetic(refused, line, said):
    assert said in refused(line)


# ---- token budgets ----


PREDICT = f"predict {HERE} --tp 4 --dp 4 --global-batch 64"
BUDGET = (
    "--tokens 2T --usd-per-device-hour 2.5 --usd-per-kwh 0.1 --pue 1.2 "
    "--failures-per-device-day 5e-4 --checkpoint-s '30 s' --restart-s '600 s'"
)


def test_a_budget_is_what_the_functions_say(document):
    data = document(f"{PREDICT} {BUDGET}")
    parts = goodput(16, 5e-4, 30.0, 600.0)
    prices = {"pue": 1.2, "usd_per_device_hour": 2.5, "usd_per_kwh": 0.1}
    prices["step_j"] = data["energy_j"]
    tokens = 64 * data["plan"]["seq"]
    run = training_run(2e12, tokens, data["time_s"], 16, goodput=parts.fraction, **prices)
    assert data["budget"] == {**run.to_dict(), "goodput_parts": parts.to_dict()}
    assert data["calibration"]["state"] == "partly fitted"


def test_plan_has_the_budget_of_its_best(document):
    line = "plan gpt2-small --chip tpuv4 --devices 8 --global-batch 32"
    data = document(f"{line} --tokens 300B")
    best, budget = data["plans"][0], data["budget"]
    assert budget["steps"] == -(-300 * 10**9 // (32 * best["seq"]))
    assert budget["goodput"] == 1.0
    assert budget["days"] == pytest.approx(budget["steps"] * best["time_s"] / 86400)
    assert budget["goodput_parts"]["mtbf_s"] is None
    assert "budget" not in document(line)


@pytest.mark.parametrize("chip", ["tpuv5e", "tpuv4", "h100"])  # without and with a rated power
def test_the_energy_of_a_budget_is_that_of_its_steps(document, chip):
    line = f"predict gpt2-small --chip {chip} --devices 8 --dp 8 --global-batch 8 --tokens 1B"
    data = document(line)
    assert data["budget"]["energy_j"] == pytest.approx(data["budget"]["steps"] * data["energy_j"])


def test_what_people_see_of_a_budget(run):
    shown = run(f"{PREDICT} {BUDGET}")[1]
    for word in ("For 2,000,000,000,000 tokens", "device-hours", "goodput", "MWh", "dollars"):
        assert word in shown
    shown = run(f"{PREDICT} --tokens 1.5e9")[1]
    assert "For 1,500,000,000 tokens" in shown
    assert "goodput" not in shown
    assert "dollars" not in shown
    assert "device-hours" not in run(PREDICT)[1]


@pytest.mark.parametrize(("words", "said"), refused_calls("token budgets"))
def test_bad_budgets_are_one_line(refused, words, said):
    assert said in refused(f"{PREDICT} {words}")


def test_options_override_a_plan_file_and_idle_devices_are_said(run, tmp_path, document):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document(f"{GIVEN} --zero 1")))
    shown = run(f"predict {HERE} --plan {path} --pp 4 --dp 1")
    assert "stages:" in shown[2]
    assert "idle" not in shown[2]
    assert "8 of 16 devices stay idle" in run(f"predict {HERE} --plan {path} --pp 1")[2]


def test_a_fault_in_a_plan_file_names_the_file(refused, tmp_path, document):
    path = tmp_path / "plan.json"
    plans = document(f"plan {HERE} --global-batch 64")
    plans["plans"][0]["micro_batch"] = None
    path.write_text(json.dumps(plans))
    for call in (f"predict {HERE} --plan {path}", f"explain {path}"):
        said = f"{path}: micro_batch: None is not accepted; expected a whole number"
        assert said in refused(call)


def test_replicas_fill_the_devices_unless_they_are_given(document):
    widths = f"predict {HERE} --tp 2 --pp 2 --global-batch 64"
    assert document(widths) == document(f"{widths} --dp 4")


def test_a_table_of_runs_is_no_calibration(refused, tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("model,tp\nllama2-7b,1\n")
    assert "--calibration: " in refused(f"{GIVEN} --calibration {path}")
