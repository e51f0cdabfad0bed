"""The published placement: the public program's own answers, its form, and what is not accepted."""

import json
from pathlib import Path

import pytest
from reference.placement import faults

from phaze_fast.cli.main import main
from phaze_fast.papers import place, problem_from_dict, read_records, solve_published

GOLDEN = Path(__file__).parents[1] / "golden" / "dp_golden.jsonl"


def golden():
    with GOLDEN.open() as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("record", golden(), ids=lambda r: r["name"])
def test_golden_placements_have_their_optimum(record):
    problem = problem_from_dict(record)
    (found,) = solve_published([problem])
    expected = record["output"]
    assert (found["status"] == "optimal") == expected["feasible"]
    if not expected["feasible"]:
        assert "over the" in found["reason"]
        assert "would fit with" in found["reason"]
        return
    assert found["finalTimePerBatch"] == pytest.approx(expected["finalTimePerBatch"], rel=1e-9)
    assert found["bound"] == found["finalTimePerBatch"]
    assert faults(problem, place(problem)) == []
    assert max(found["memory"]["stage_bytes"]) <= record["input"]["maxMemoryPerDevice"]
    parts = found["breakdown"]
    assert parts["compute"] + parts["gradient_sync"] == pytest.approx(found["finalTimePerBatch"])


def test_what_the_reason_says_would_fit_fits():
    for record in golden():
        if record["output"]["feasible"]:
            continue
        data = record["input"]
        (found,) = solve_published([problem_from_dict(data)])
        words = found["reason"].rsplit("would fit with ", 1)[1].rstrip(".")
        for change in words.split(" or "):
            field, value = change.split(" ")
            changed = {**data, field: json.loads(value)}
            assert place(problem_from_dict(changed)).status == "optimal"
            if field != "activationRecomputation":  # and it is the least that does
                less = {**data, field: json.loads(value) - (1 if field == "maxDevices" else 2)}
                assert place(problem_from_dict(less)).status == "infeasible"


def small():
    node = {"parameterSize": 1, "activationSize": 1, "isTensorParallelized": False}
    node |= {"optimalLatencyFw": 1.0, "optimalLatencyBw": 2.0}
    return {
        "maxMemoryPerDevice": 100,
        "maxDevices": 4,
        "bandwidth": 1,
        "mbsInBatch": 8,
        "nodes": {"1": [{"id": 0, **node}, {"id": 1, **node}]},
        "edges": {"1": [{"sourceId": 0, "destId": 1, "communicationCost": 1}]},
        "activationRecomputation": False,
        "optimizerAlgorithm": "SGD",
    }


def test_files_come_back_in_the_form_they_came(tmp_path, capsys):
    one, many, out = tmp_path / "in.json", tmp_path / "in.jsonl", tmp_path / "out.json"
    one.write_text(json.dumps(small()))
    assert main(["place", str(one), "-o", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["finalTimePerBatch"] == 18.0
    assert found["stages"] == [{"devicesForStage": 1, "nodes": [0, 1]}]
    tight = {**small(), "maxMemoryPerDevice": 2}
    many.write_text(json.dumps({"name": "a", "input": small()}) + "\n" + json.dumps(tight) + "\n")
    assert main(["place", str(many), "-o", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["status"] for row in rows] == ["optimal", "infeasible"]
    assert rows[0]["name"] == "a"
    one.write_text(json.dumps(tight))
    assert main(["place", str(one), "-o", str(out)]) == 1
    assert json.loads(out.read_text())["status"] == "infeasible"
    capsys.readouterr()
    assert main(["place", str(tmp_path / "none.json")]) == 2


def test_the_table_shows_stages(tmp_path, capsys):
    file = tmp_path / "in.json"
    file.write_text(json.dumps(golden()[0]))
    assert main(["place", str(file)]) == 0
    shown = capsys.readouterr().out
    for word in ("optimal", "weights", "stash", "free", "-1 to"):
        assert word in shown
    assert main(["place", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "optimal"


def test_reading_names_the_line(tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps(small()) + "\n\n{]\n")
    good, bad = read_records(file)
    assert (good.where, good.error, good.data) == (f"{file}:1", "", small())
    assert (bad.where, bad.data) == (f"{file}:3", None)
    assert "not JSON" in bad.error
