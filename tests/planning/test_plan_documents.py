"""Plans read from documents: whatever was edited, they are read or refused in one line."""

import copy
import json
import random

import pytest
from case_counts import some_or_many
from plan_cases import h100
from robustness.fuzz import changed

import phaze_fast as pf
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.planning import PlanSpec

STEP = {"schedule": "interleaved", "vpp": 2, "pp": 2, "tp": 1, "recompute": ("none", "full")}


@pytest.fixture(scope="module")
def document():
    training = pf.Training(global_batch=32, micro_batch=1, **STEP)
    return pf.plan("bert-large", h100(4), training, top=1).plans[0].to_dict()


CHANGES = {
    "schedule": ("1f1bb", "schedule: '1f1bb' is not accepted"),
    "rank_order": (..., "rank_order: is missing"),
    "stages": (None, "stages: None is not accepted; expected a list"),
    "vpp": ("two", "vpp: 'two' is not accepted; expected a whole number"),
    "micro_batch": (None, "micro_batch: None is not accepted; expected a whole number"),
    "pp": (3, "stages: 2 entries are not accepted; expected pp = 3"),
    "micro_batches": (5, r"micro_batches: 5 is not accepted; expected global_batch / "),
    "micro_bach": (2, "micro_bach: is no field of a plan; did you mean 'micro_batch'"),
}


@pytest.mark.parametrize("field", CHANGES)
def test_an_edited_plan_is_refused_by_field_value_and_what_is_accepted(field, document):
    value, message = CHANGES[field]
    edited = copy.deepcopy(document)
    edited.pop(field, None)
    if value is not ...:
        edited[field] = value
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        PlanSpec.of(edited)


def test_fields_around_a_plan_are_those_of_answers(document):
    training = pf.Training(global_batch=32, micro_batch=1, **STEP)
    plans = pf.plan("bert-large", h100(4), training, top=1)
    answers = (plans.to_dict(), pf.why_not(plans, {"zero": 0}).to_dict())
    for answer in (*answers, {"plan": document, "model": "bert-large", "time_s": 1.0}):
        assert PlanSpec.of(answer).pp == 2
        with pytest.raises(InvalidInputError) as caught:
            PlanSpec.of({**answer, "modle": "bert-large"}, "x.json")
        said = "x.json: modle: is no field of a document of plans; did you mean 'model'"
        assert str(caught.value).startswith(said)


def test_a_document_without_plans_is_refused():
    with pytest.raises(InvalidInputError, match="plan.json: plan: unknown key .plans.;"):
        PlanSpec.of({"plans": []}, "plan.json")


@pytest.mark.parametrize(("word", "read"), [("mixed", "auto"), ("full", "full")])
def test_a_plan_without_stages_says_what_all_of_them_recompute(word, read, document):
    brief = {**document, "recompute": word}
    del brief["stages"]
    assert PlanSpec.of(brief).recompute == read


def test_a_plan_reads_back_to_itself(document):
    again = pf.predict("bert-large", h100(4), json.loads(json.dumps(document)))
    assert again.to_dict() == document


@some_or_many(25, 60)
def test_no_edit_of_a_plan_is_a_bug(document, tmp_path, capsys, cases):
    rng, codes = random.Random(2), set()
    path = tmp_path / "plan.json"
    problem = {"model": "bert-large", "cluster": h100(4).to_dict()}
    for _ in range(cases):
        edited, what = changed(rng, document)
        path.write_text(json.dumps({**problem, "plan": edited}))
        words = rng.choice([["explain"], ["export", "--to", "megatron", "-o", str(tmp_path / "o")]])
        codes.add(code := main([words[0], str(path), *words[1:]]))
        said = capsys.readouterr().err
        assert code in (0, 2), (what, said)
        lines = said.splitlines() if code else []
        assert all(line.startswith("phaze-fast: ") for line in lines), (what, said)
        # A list or mapping with several faults has a line for each of them, under its own name.
        several = isinstance(what[1], list | dict) and all(
            "".join(map(str, what[0][:1])) in line for line in lines
        )
        assert len(lines) == (code == 2) or several, (what, said)
    assert codes == {0, 2}


def test_widths_that_replace_those_of_a_plan_drop_what_belonged_to_them(document):
    given = PlanSpec.of({**document, "shard": 1, "zero": 1})
    assert given.stages is not None
    same, dropped = given.overridden({"reserved_bytes": 0})
    assert (same.stages, same.shard, dropped) == (given.stages, given.shard, [])
    wider, dropped = given.overridden({"pp": 4, "dp": 1})
    assert (wider.pp, wider.stages, wider.shard) == (4, None, None)
    assert [line.split(":")[0] for line in dropped] == ["stages", "shard"]
    even = given.replace(stages=None, shard=None)
    assert even.overridden({"pp": 4, "dp": 1})[1] == []
    stages = (*given.stages[:-1], given.stages[-1] - 4, 1, 1, 1, 1)
    divided, dropped = even.overridden({"pp": 4, "vpp": 2, "dp": 1, "stages": stages})
    assert (divided.stages, dropped) == (stages, [])
    assert (given.vpp, given.overridden({"schedule": "1f1b"})[0].vpp) == (2, 1)
    modes = given.replace(recompute=("none", "full"))
    assert modes.overridden({"pp": 4, "dp": 1})[0].recompute == "auto"
    assert modes.overridden({"pp": 4, "dp": 1, "recompute": "none"})[0].recompute == "none"


def test_shards_of_all_replicas_stay_all_with_more_replicas(document):
    assert PlanSpec.of({**document, "zero": 1, "shard": document["dp"]}).shard is None
