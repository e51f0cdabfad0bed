"""`phaze-fast place`: both forms, what is refused, and that no line's answer is lost."""

import copy
import json
import random
from pathlib import Path

import pytest
from golden_files import refused_calls
from nest_cases import nest_problem
from robustness.fuzz import changed as replaced

from phaze_fast.errors import InvalidInputError
from phaze_fast.papers import nest_from_dict, problem_from_dict

GOLDEN = Path(__file__).parents[1] / "golden"
NODE = {"parameterSize": 1, "activationSize": 1, "optimalLatencyFw": 1.0, "optimalLatencyBw": 2.0}
COMMON = {
    "maxMemoryPerDevice": 100,
    "maxDevices": 4,
    "mbsInBatch": 8,
    "bandwidth": 1,
    "nodes": {"1": [{"id": 0, **NODE}, {"id": 1, **NODE}]},
    "edges": {"1": [{"sourceId": 0, "destId": 1, "communicationCost": 1}]},
    "activationRecomputation": False,
    "optimizerAlgorithm": "SGD",
}
NETWORK = {"devices_per_level": [2, 2], "bws": [10.0, 1.0], "latency_per_level": [0.5, 0.5]}
NEST = {**COMMON, **NETWORK}
FORMS = {"phaze": (COMMON, problem_from_dict), "nest": (NEST, nest_from_dict)}
FIELDS = ("status", "finalTimePerBatch", "p", "t", "d", "stages", "solve_s")


def changed(data, path, value):
    data = copy.deepcopy(data)
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    if value is KeyError:
        del at[path[-1]]
    return data


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def place(run, tmp_path):
    """Write problems, a line each, or one text, and place them: code, output, errors, answers."""
    out = tmp_path / "out.json"

    def call(problems, *words):
        many = isinstance(problems, list)
        file = tmp_path / ("in.jsonl" if many else "in.json")
        lines = problems if many else [problems]
        texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
        file.write_text("".join(f"{text}\n" for text in texts) if many else texts[0])
        code, shown, said = run("place", file, *words)
        answered = "-o" in words and out.exists()
        read = written if many else lambda path: json.loads(path.read_text())
        return code, shown, said, read(out) if answered else None

    return call


def test_the_published_file_is_taken_as_it_is(run, tmp_path):
    given_file, out = GOLDEN / "nest_instances.jsonl", tmp_path / "out.jsonl"
    records = written(given_file)
    for words in ("", "--objective nest", "--objective nest --threads 2"):
        code, _, said = run(f"place {given_file} {words} -o {out}")
        assert (code, said) == (0, f"wrote {out}\n")
        for record, answer in zip(records, written(out), strict=True):
            assert answer["name"] == record["name"]
            assert all(field in answer for field in FIELDS)
            expected = record["optimum"]
            time_s = pytest.approx(expected["finalTimePerBatch"], rel=1e-9)
            assert answer["finalTimePerBatch"] == time_s
            assert [answer[key] for key in "ptd"] == [expected[key] for key in "ptd"]


def test_bare_objects_and_infeasible_ones_are_results(place, tmp_path):
    problems = [NEST, "", {"name": "b", "input": {**NEST, "maxMemoryPerDevice": 1}}]
    words = ("--objective", "nest", "-o", tmp_path / "out.json")
    code, shown, _, (first, second) = place(problems, *words)
    assert (code, shown) == (0, "")
    assert (first["status"], first["name"]) == ("optimal", "in:1")
    assert (second["status"], second["name"]) == ("infeasible", "b")
    assert "would fit with maxMemoryPerDevice 4" in second["reason"]
    assert all(field in second for field in FIELDS)
    code, shown, _, _ = place(problems)
    assert code == 0
    assert "infeasible" in shown
    assert "would fit with" in shown


def test_a_single_problem_shows_its_stages(place, tmp_path):
    fits = {**NEST, "maxMemoryPerDevice": 4}
    words = {"phaze": ("weights", "stash", "free"), "nest": ("tier in", "load", "memory")}
    for form, problem in (("phaze", COMMON), ("nest", fits)):
        code, shown, _, _ = place(problem)
        assert code == 0
        assert all(word in shown for word in ("optimal", *words[form]))
    assert place(fits, "-o", tmp_path / "out.json", "--json")[3]["p"] == 2
    code, _, said, _ = place({**NEST, "maxMemoryPerDevice": 1})
    assert code == 1
    assert said.startswith("phaze-fast: infeasible: at best, with width 1 and 2 stages")


def test_units_and_replicas_are_options_of_nest(place, tmp_path):
    to = ("-o", tmp_path / "out.json")
    in_s, in_ms = (place(NEST, "--time-unit", unit, *to)[3] for unit in ("s", "ms"))
    assert in_ms["finalTimePerBatch"] < in_s["finalTimePerBatch"]
    assert place(NEST, "--replicas", "all", *to)[0] == 0
    of_nest = "is not accepted with the objective phaze"
    for problem, words, message in (
        (NEST, "--time-unit min", "--time-unit: 'min' is not accepted; accepted: s, ms, us"),
        (NEST, "--replicas some", "--replicas: 'some' is not accepted; accepted: first, all"),
        (NEST, "--objective nets", "--objective: 'nets' is not accepted; did you mean 'nest'"),
        (NEST, "--objective phaze", "unknown key "),
        (NEST, "--threads 0", "threads: 0 is not accepted"),
        (NEST, f"-o {tmp_path}/no/out", "cannot be written"),
        (COMMON, "--time-unit ms", of_nest),
        (COMMON, "--replicas all", of_nest),
    ):
        code, _, said, _ = place(problem, *words.split())
        assert code == 2
        assert said.count("\n") == 1
        assert message in said


@pytest.mark.parametrize("form", FORMS)
def test_bad_lines_are_named_and_the_others_answered(form, place, tmp_path):
    data, _ = FORMS[form]
    lines = [data, {**data, "maxDevices": -3}, data, {**data, "mbsInBatch": "many"}, "{]"]
    words = ("--objective", form, "-o", tmp_path / "out.json")
    code, shown, said, answers = place(lines, *words)
    assert (code, shown) == (2, "")
    wrote, message = said.splitlines()
    assert wrote == f"wrote {tmp_path / 'out.json'}"
    where = f"{tmp_path / 'in.jsonl'}:2"
    assert message.startswith(f"phaze-fast: {where}: maxDevices: -3 is not accepted; expected")
    assert message.endswith("(3 of 5 lines are refused)")
    assert [a["status"] for a in answers] == ["optimal", "invalid", "optimal", "invalid", "invalid"]
    begins = ("maxDevices: -3 is not accepted", "mbsInBatch: 'many' is not accepted", "not JSON")
    for answer, begin in zip((answers[1], *answers[3:]), begins, strict=True):
        assert answer["reason"].startswith(begin)
        assert answers[0].keys() - answer.keys() <= {"breakdown", "allReplicasTimePerBatch"}


def test_three_hundred_bad_lines_print_one(place, tmp_path):
    bad = [{**COMMON, "maxDevices": "x\n" * 300}] * 300
    code, _, said, answers = place(bad, "-o", tmp_path / "out.json")
    assert (code, len(said.splitlines()), len(answers)) == (2, 2, 300)
    assert said.splitlines()[1].endswith("(300 of 300 lines are refused)")


def test_a_problem_the_kernel_refuses_does_not_lose_the_others(place, tmp_path):
    wide = {
        **COMMON,  # 2^30 ways to cut layers that nothing joins
        "nodes": {"1": [{"id": i, **NODE} for i in range(30)]},
        "edges": {"1": []},
    }
    code, _, said, answers = place([COMMON, wide], "-o", tmp_path / "out.json")
    assert code == 2
    assert "can be cut in more than 20000 ways" in said
    assert [a["status"] for a in answers] == ["optimal", "invalid"]


HUGE = 10**400
BACK = [{"sourceId": a, "destId": 1 - a, "communicationCost": 1} for a in (0, 1)]
HOSTILE = [
    *refused_calls("fields of a placement problem"),
    (("edges", "1", 0, "communicationCost"), HUGE, r"communicationCost: 1000+\.\.\.0+ is not"),
    (("nodes", "1", 0, "id"), HUGE, r"nodes.1.0.id: 1000+\.\.\.0+ is not accepted"),
    (("optimizerAlgorithm",), HUGE, r"optimizerAlgorithm: 1000+\.\.\.0+ is not accepted"),
    (("maxDevices",), HUGE, r"maxDevices: 1000+\.\.\.0+ is not accepted"),
    (("maxMemoryPerDevice",), -HUGE, r"maxMemoryPerDevice: -1000+\.\.\.0+ is not accepted"),
    (("maxDevices",), KeyError, "maxDevices: is missing"),
    (("edges", "1", 0, "communicationCost"), KeyError, "communicationCost: is missing"),
    (("a\nb" * 300,), 1, "problem: unknown key 'a"),
]
HOSTILE_NEST = [
    *refused_calls("networks of a placement problem"),
    (("devices_per_level",), [2, HUGE], r"devices_per_level.1: 1000+\.\.\.0+ is not accepted"),
    (("devices_per_level",), [1] * 300, "devices_per_level: 300 entries; expected at most"),
    (("nodes", "1", 0, "energy"), HUGE, "energy: 1000"),
]


def check_refused(form, data, words, place):
    with pytest.raises(InvalidInputError, match=words):
        FORMS[form][1](data)
    code, _, said, _ = place(data, "--objective", form)
    assert (code, said.count("\n")) == (2, 1)
    assert len(said) < 700


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("path", "value", "words"), HOSTILE)
def test_hostile_values_are_refused_by_one_line(form, path, value, words, place):
    check_refused(form, changed(FORMS[form][0], path, value), words, place)


@pytest.mark.parametrize(("path", "value", "words"), HOSTILE_NEST)
def test_hostile_networks_are_refused_by_one_line(path, value, words, place):
    check_refused("nest", changed(NEST, path, value), words, place)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "width", ["01", "0", "-1", "1.0", "²", "999999999999999999999", "a\n" * 99]
)
def test_widths_are_plain_numbers(form, width, place):
    made = copy.deepcopy(FORMS[form][0])
    for table in ("nodes", "edges"):
        made[table][width] = made[table]["1"]
    words = "nodes: width .* is not accepted; expected a whole number from 1"
    check_refused(form, made, words, place)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        *refused_calls("texts of a placement problem"),
        ('"maxDevices": 4', '"maxDevices": ' + "9" * 5000, "of 5000 digits is not"),
        ('"id": 1', '"id": -' + "9" * 5000, "integer of 5000 digits is not accepted"),
        ("", "[" * 100_000, "nested too deeply"),
    ],
)
def test_texts_that_are_no_problem(form, before, after, words, place):
    text = json.dumps(FORMS[form][0]).replace(before, after) if before else after
    code, _, said, _ = place(text, "--objective", form)
    assert (code, said.count("\n")) == (2, 1)
    assert words in said


def test_any_change_anywhere_is_read_or_refused_in_one_line():
    for seed in range(60):
        rng = random.Random(seed)
        for _ in range(20):
            problem, _ = replaced(rng, nest_problem(seed) if seed else NEST)
            for read in (nest_from_dict, problem_from_dict):
                said = ""
                try:
                    read(problem)
                except InvalidInputError as error:
                    said = str(error)
                assert "\n" not in said
                assert len(said) < 600
