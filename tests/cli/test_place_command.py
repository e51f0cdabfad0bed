"""`phaze-fast place`: both forms, what is refused, and that no line's answer is lost."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nest_cases import nest_problem

from phaze_fast.cli.main import main
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
    return data


def run(capsys, *words):
    code = main(["place", *map(str, words)])
    return code, capsys.readouterr()


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_published_file_is_taken_as_it_is(tmp_path, capsys):
    given_file, out = GOLDEN / "nest_instances.jsonl", tmp_path / "out.jsonl"
    for words in ([], ["--objective", "nest"], ["--objective", "nest", "--threads", "2"]):
        code, said = run(capsys, given_file, *words, "-o", out)
        assert code == 0
        assert said.err.startswith("wrote")
        records = [json.loads(line) for line in given_file.read_text().splitlines()]
        for record, answer in zip(records, written(out), strict=True):
            assert answer["name"] == record["name"]
            assert all(field in answer for field in FIELDS)
            expected = record["optimum"]
            assert answer["finalTimePerBatch"] == pytest.approx(
                expected["finalTimePerBatch"], rel=1e-9
            )
            assert [answer[key] for key in "ptd"] == [expected[key] for key in "ptd"]


def test_bare_objects_and_infeasible_ones_are_results(tmp_path, capsys):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    tight = {**NEST, "maxMemoryPerDevice": 1}
    file.write_text(f"{json.dumps(NEST)}\n\n{json.dumps({'name': 'b', 'input': tight})}\n")
    code, said = run(capsys, file, "--objective", "nest", "-o", out)
    assert (code, said.out) == (0, "")
    first, second = written(out)
    assert (first["status"], first["name"]) == ("optimal", "in:1")
    assert (second["status"], second["name"]) == ("infeasible", "b")
    assert "would fit with maxMemoryPerDevice 4" in second["reason"]
    assert all(field in second for field in FIELDS)
    code, said = run(capsys, file)
    assert code == 0
    assert "infeasible" in said.out
    assert "would fit with" in said.out


def test_a_single_problem_shows_its_stages(tmp_path, capsys):
    file, out = tmp_path / "in.json", tmp_path / "out.json"
    file.write_text(json.dumps({**NEST, "maxMemoryPerDevice": 4}))
    code, said = run(capsys, file)
    assert code == 0
    for word in ("optimal", "tier in", "load", "memory"):
        assert word in said.out
    assert run(capsys, file, "-o", out, "--json")[0] == 0
    assert json.loads(out.read_text())["p"] == 2
    file.write_text(json.dumps({**NEST, "maxMemoryPerDevice": 1}))
    code, said = run(capsys, file)
    assert code == 1
    assert said.err.startswith("phaze-fast: infeasible: at best, with width 1 and 2 stages")


def test_units_and_replicas_are_options_of_nest(tmp_path, capsys):
    file, out = tmp_path / "in.json", tmp_path / "out.json"
    file.write_text(json.dumps(NEST))
    times = {}
    for unit in ("s", "ms"):
        assert run(capsys, file, "--time-unit", unit, "-o", out)[0] == 0
        times[unit] = json.loads(out.read_text())["finalTimePerBatch"]
    assert times["ms"] < times["s"]
    assert run(capsys, file, "--replicas", "all", "-o", out)[0] == 0
    for words, message in (
        (["--time-unit", "min"], "--time-unit: 'min' is not accepted; accepted: s, ms, us"),
        (["--replicas", "some"], "--replicas: 'some' is not accepted; accepted: first, all"),
        (["--objective", "nets"], "--objective: 'nets' is not accepted; did you mean 'nest'"),
        (["--objective", "phaze"], "unknown; "),
        (["--threads", "0"], "threads: 0 is not accepted"),
        (["-o", tmp_path / "no" / "out"], "cannot be written"),
    ):
        code, said = run(capsys, file, *words)
        assert code == 2
        assert said.err.count("\n") == 1
        assert message in said.err
    file.write_text(json.dumps(COMMON))
    for words in (["--time-unit", "ms"], ["--replicas", "all"]):
        code, said = run(capsys, file, *words)
        assert code == 2
        assert "is not accepted with the objective phaze" in said.err


@pytest.mark.parametrize("form", FORMS)
def test_bad_lines_are_named_and_the_others_answered(form, tmp_path, capsys):
    data, _ = FORMS[form]
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = {**data, "maxDevices": -3}
    lines = [data, bad, data, {**data, "mbsInBatch": "many"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{]\n")
    code, said = run(capsys, file, "--objective", form, "-o", out)
    assert code == 2
    assert said.out == ""
    wrote, message = said.err.splitlines()
    assert wrote == f"wrote {out}"
    assert message.startswith(f"phaze-fast: {file}:2: maxDevices: -3 is not accepted; expected")
    assert message.endswith("(3 of 5 lines are refused)")
    answers = written(out)
    assert [a["status"] for a in answers] == ["optimal", "invalid", "optimal", "invalid", "invalid"]
    assert answers[1]["reason"].startswith("maxDevices: -3 is not accepted")
    assert answers[3]["reason"].startswith("mbsInBatch: 'many' is not accepted")
    assert answers[4]["reason"].startswith("not JSON")
    for answer in answers:
        assert answers[0].keys() - answer.keys() <= {"breakdown", "allReplicasTimePerBatch"}


def test_three_hundred_bad_lines_print_one(tmp_path, capsys):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text((json.dumps({**COMMON, "maxDevices": "x\n" * 300}) + "\n") * 300)
    code, said = run(capsys, file, "-o", out)
    assert code == 2
    assert len(said.err.splitlines()) == 2
    assert said.err.splitlines()[1].endswith("(300 of 300 lines are refused)")
    assert len(written(out)) == 300


def test_a_problem_the_kernel_refuses_does_not_lose_the_others(tmp_path, capsys):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    wide = {
        **COMMON,  # 2^30 ways to cut layers that nothing joins
        "nodes": {"1": [{"id": i, **NODE} for i in range(30)]},
        "edges": {"1": []},
    }
    file.write_text(f"{json.dumps(COMMON)}\n{json.dumps(wide)}\n")
    code, said = run(capsys, file, "-o", out)
    assert code == 2
    assert "can be cut in more than 20000 ways" in said.err
    assert [a["status"] for a in written(out)] == ["optimal", "invalid"]


HUGE = 10**400
HOSTILE = [
    (("edges", "1", 0, "sourceId"), [], r"edges.1\[0\].sourceId: \[\] is not accepted"),
    (("edges", "1", 0, "destId"), {"a": 1}, r"edges.1\[0\].destId: \{'a': 1\} is not accepted"),
    (("edges", "1", 0), [[0], 0], r"edges.1\[0\]: \[\[0\], 0\] is not accepted"),
    (("edges", "1", 0, "sourceId"), 0.0, r"edges.1\[0\].sourceId: 0.0 is not accepted"),
    (("edges", "1", 0, "sourceId"), True, r"edges.1\[0\].sourceId: True is not accepted"),
    (("edges", "1", 0, "destId"), 9, r"edges.1\[0\].destId: 9 is not accepted"),
    (("edges", "1", 0, "communicationCost"), -1, "communicationCost: -1 is not accepted"),
    (("edges", "1", 0, "communicationCost"), HUGE, r"communicationCost: 1000+\.\.\. is not"),
    (("nodes", "1", 0, "id"), [0], r"nodes.1\[0\].id: \[0\] is not accepted"),
    (("nodes", "1", 0, "id"), HUGE, r"nodes.1\[0\].id: 1000+\.\.\. is not accepted"),
    (("nodes", "1", 0, "id"), 1, r"nodes.1\[1\].id: 1 is there twice"),
    (("nodes", "1", 0, "optimalLatencyFw"), 1e308, r"optimalLatencyFw: 1e\+308 is not accepted"),
    (("nodes", "1", 0, "optimalLatencyFw"), float("nan"), "optimalLatencyFw: nan is not accepted"),
    (("nodes", "1", 0, "parameterSize"), float("inf"), "parameterSize: inf is not accepted"),
    (("nodes", "1", 0, "activationSize"), "5", "activationSize: '5' is not accepted"),
    (("nodes", "1", 0), 5, r"nodes.1\[0\]: 5 is not accepted; expected an object"),
    (("nodes", "1"), "ab", "nodes.1: 'ab' is not accepted; expected a list"),
    (("nodes",), [], r"nodes: \[\] is not accepted; expected an object"),
    (("edges",), None, "edges: None is not accepted; expected lists for the widths"),
    (("optimizerAlgorithm",), [], r"optimizerAlgorithm: \[\] is not accepted"),
    (("optimizerAlgorithm",), HUGE, r"optimizerAlgorithm: 1000+\.\.\. is not accepted"),
    (("activationRecomputation",), 1, "activationRecomputation: 1 is not accepted"),
    (("maxDevices",), HUGE, r"maxDevices: 1000+\.\.\. is not accepted"),
    (("maxDevices",), 2.5, r"maxDevices: 2.5 is not accepted"),
    (("maxMemoryPerDevice",), -HUGE, r"maxMemoryPerDevice: -1000+\.\.\. is not accepted"),
    (("mbsInBatch",), 0.5, r"mbsInBatch: 0.5 is not accepted"),
    (("bandwidth",), float("nan"), "bandwidth: nan is not accepted"),
    (("a\nb" * 300,), 1, "unknown; accepted: maxMemoryPerDevice|unknown; accepted: maxDevices"),
]
HOSTILE_NEST = [
    (("devices_per_level",), [4], "bws: 2 levels are not accepted; expected 1"),
    (("devices_per_level",), [2, 3], r"devices_per_level: \[2, 3\] is not accepted; its product"),
    (("devices_per_level",), [2, HUGE], r"devices_per_level\[1\]: 1000+\.\.\. is not accepted"),
    (("devices_per_level",), [], r"devices_per_level: \[\] is not accepted; expected a list"),
    (("devices_per_level",), {"a": 1}, r"devices_per_level: \{'a': 1\} is not accepted"),
    (("devices_per_level",), [1] * 300, "devices_per_level: .* is not accepted; expected a list"),
    (("bws",), [1.0, 0], r"bws\[1\]: 0 is not accepted; expected a number from 1e-100"),
    (("bws",), [1.0, float("nan")], r"bws\[1\]: nan is not accepted"),
    (("bws",), 5, "bws: 5 is not accepted; expected a list"),
    (("latency_per_level",), [-1, 0], r"latency_per_level\[0\]: -1 is not accepted"),
    (("latency_per_level",), [1], "latency_per_level: 1 levels are not accepted; expected 2"),
    (("ep_degree",), 0, "ep_degree: 0 is not accepted; expected a whole number from 1"),
    (("cp_degree",), [], r"cp_degree: \[\] is not accepted"),
    (("sp_enabled",), 3, "sp_enabled: 3 is not accepted; expected true or false"),
    (("nodes", "1", 0, "energy"), HUGE, "energy: 1000"),
    (("edges", "1"), [], "edges.1: no edge from 0 to 1; expected one from every layer"),
    (
        ("edges", "1"),
        [{"sourceId": 0, "destId": 1, "communicationCost": 1}] * 2,
        r"edges.1\[1\]: the edge from 0 to 1 is there twice",
    ),
]


def check_refused(data, words, read, tmp_path, capsys, form):
    with pytest.raises(InvalidInputError, match=words):
        read(data)
    file = tmp_path / "in.json"
    file.write_text(json.dumps(data))
    code, said = run(capsys, file, "--objective", form)
    assert code == 2
    assert said.err.count("\n") == 1
    assert len(said.err) < 700


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("path", "value", "words"), HOSTILE)
def test_hostile_values_are_refused_by_one_line(form, path, value, words, tmp_path, capsys):
    data, read = FORMS[form]
    check_refused(changed(data, path, value), words, read, tmp_path, capsys, form)


@pytest.mark.parametrize(("path", "value", "words"), HOSTILE_NEST)
def test_hostile_networks_are_refused_by_one_line(path, value, words, tmp_path, capsys):
    check_refused(changed(NEST, path, value), words, nest_from_dict, tmp_path, capsys, "nest")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "width", ["01", "0", "-1", "1.0", "²", "999999999999999999999", "a\n" * 99]
)
def test_widths_are_plain_numbers(form, width, tmp_path, capsys):
    data, read = FORMS[form]
    made = copy.deepcopy(data)
    for table in ("nodes", "edges"):
        made[table][width] = made[table]["1"]
    words = "nodes: width .* is not accepted; expected a whole number from 1"
    check_refused(made, words, read, tmp_path, capsys, form)


@pytest.mark.parametrize("form", FORMS)
def test_texts_that_are_no_problem(form, tmp_path, capsys):
    data, _ = FORMS[form]
    file = tmp_path / "in.json"
    text = json.dumps(data)
    for hostile, words in (
        (text.replace('"maxDevices": 4', '"maxDevices": 4, "maxDevices": 5'), "is given twice"),
        (text.replace('"maxDevices": 4', '"maxDevices": ' + "9" * 5000), "of 5000 digits is not"),
        (text.replace('"id": 1', '"id": -' + "9" * 5000), "integer of 5000 digits is not accepted"),
        (text.replace('"maxDevices": 4', '"maxDevices": NaN'), "maxDevices: nan is not accepted"),
        (text.replace('"maxDevices": 4', '"maxDevices": 1e999'), "maxDevices: inf is not"),
        ("[" * 100_000, "nested too deeply"),
        (text[:-5], "not JSON: "),
        ("", "it is empty"),
        ("\x00", "not JSON"),
        ("[]", "expected an object, not a list"),
        ('{"input": 5}', "input: unknown"),
    ):
        file.write_text(hostile)
        code, said = run(capsys, file, "--objective", form)
        assert code == 2, hostile[:80]
        assert words in said.err
        assert said.err.count("\n") == 1
    file.write_bytes(b"\xff\xfe")
    code, said = run(capsys, file)
    assert (code, "UTF-8" in said.err) == (2, True)


def test_endless_input_is_refused(capsys):
    code, said = run(capsys, "/dev/zero")
    assert code == 2
    assert "too long; expected at most 256 MiB" in said.err


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5) | st.just(HUGE),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def paths(data, at=()):
    yield at
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from paths(value, (*at, key))
        else:
            yield (*at, key)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 50), data=st.data())
def test_any_value_anywhere_is_read_or_refused(seed, data):
    problem = nest_problem(seed) if seed else NEST
    path = data.draw(st.sampled_from([p for p in paths(problem) if p]))
    value = data.draw(anything)
    for read in (nest_from_dict, problem_from_dict):
        said = ""
        try:
            read(changed(problem, path, value))
        except InvalidInputError as error:
            said = str(error)
        assert "\n" not in said
        assert len(said) < 600
