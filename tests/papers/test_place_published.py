"""The published placement: the public program's own answers, its form, and what is not accepted."""

import json

import pytest
from golden_files import golden_lines
from reference.placement import faults

from phaze_fast.papers import place, problem_from_dict, solve_published

GOLDEN = golden_lines("dp_golden.jsonl")


@pytest.mark.parametrize("record", GOLDEN, ids=lambda r: r["name"])
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
    for record in GOLDEN:
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
