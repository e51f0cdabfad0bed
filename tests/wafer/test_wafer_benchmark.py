"""The open benchmark: our answers score what they claim, and what breaks a rule is one line."""

import json
import sys
from pathlib import Path

import pytest
from golden_files import refused_calls

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import wafer_score  # noqa: E402

NAMES = sorted(file.stem for file in (BENCH / "wafer_instances").glob("*.json"))


def read(kind, name):
    return json.loads((BENCH / f"wafer_{kind}" / f"{name}.json").read_text())


def test_every_instance_has_an_answer():
    assert len(NAMES) >= 6
    assert sorted(file.stem for file in (BENCH / "wafer_answers").glob("*.json")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_answers_score_what_they_claim(name):
    answer = read("answers", name)
    scored = wafer_score.score(read("instances", name), answer)
    assert scored["fits"]
    assert scored["time_s"] == pytest.approx(answer["time_s"], rel=1e-9)
    assert 0.9 * answer["time_s"] <= answer["bound_s"] <= answer["time_s"]


def broken(**change):
    answer = read("answers", "dense-mesh")
    first, *others = answer["operators"]
    of_first = {k: change.pop(k) for k in ("roles", "weights", "collective") if k in change}
    return {**answer, "operators": [{**first, **of_first}, *others], **change}


@pytest.mark.parametrize(("change", "text"), refused_calls("answers to wafer instances"))
def test_what_breaks_a_rule_is_one_line(change, text, tmp_path, capsys):
    file = tmp_path / "answer.json"
    file.write_text(json.dumps(broken(**change)))
    instance = BENCH / "wafer_instances" / "dense-mesh.json"
    assert wafer_score.main([str(instance), str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert text in err


def test_a_mapping_without_room_is_said_to_have_none():
    instance, answer = read("instances", "dense-mesh"), read("answers", "dense-mesh")
    for layout in instance["layouts"]:
        layout["rules"]["capacity_bytes"] /= 1e3
    scored = wafer_score.score(instance, answer)
    assert not scored["fits"]
    assert scored["over_bytes"] > 0
