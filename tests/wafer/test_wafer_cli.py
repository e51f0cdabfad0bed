"""The command wafer: answers, files, refusals, executors, resumption and the cache."""

import csv
import json

import pytest
from golden_files import refused_calls
from wafer_cli_cases import DRAM, EFFORT, QUICK, SMALL, document, refused

from phaze_fast import models
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.runs import store
from phaze_fast.wafer import (
    Effort,
    Evaluation,
    Layout,
    MappingResult,
    Problem,
    WaferSpace,
    WaferTraining,
    compare_mappings,
    load_wafer,
    megatron,
    search_mapping,
    search_mappings,
    search_wafers,
)
from phaze_fast.wafer.search import search as searches
from phaze_fast.wafer.search.session import Session, Task
from phaze_fast.wafer.studies.comparison import ABLATIONS

# ---- the contract ----

OURS = {"time_s", "memory_bytes_per_die", "encoding"}
SAID = {"ours", "baselines", "ablations", "bound", "evaluations"}


def test_without_compare_there_are_no_baselines(run, small):
    found = document(run("bertlarge", "--wafer", small, *QUICK, "--json"))
    assert found.keys() >= {"ours", "bound", "bound_space", "evaluations", "evaluations_per_s"}
    assert "micro-batches that divide 64" in found["bound_space"]
    _, out, _ = run("bertlarge", "--wafer", small, *QUICK)
    assert "bound holds over" in out
    assert "micro-batches that divide 64" in out
    assert "baselines" not in found
    assert (found["model"], found["wafer"]) == ("bertlarge", "dram-wafer")


def test_compare_keeps_its_contract_with_any_number_of_threads(run, two, tmp_path):
    """The same seed gives the same document, printed or in a file."""
    file = tmp_path / "out.json"
    words = ["bertlarge", "--wafer", two, "--compare", *EFFORT, "--seed", 3, "--json"]
    shown = document(run(*words))
    code, out, err = run(*words, "--threads", 1, "-o", file)
    assert (code, out) == (0, "")
    assert f"wrote {file}" in err
    written = json.loads(file.read_text())
    for key in ("seconds", "evaluations_per_s"):
        assert shown.pop(key) > 0
        del written[key]
    assert written == shown
    assert shown.keys() >= SAID
    assert shown["ours"].keys() >= OURS
    assert set(shown["baselines"]) >= {"megatron", "zero3", "accpar"}
    for each in shown["baselines"].values():
        assert each.keys() >= {"default", "tuned"}
        for way in each.values():
            assert way.keys() >= OURS
            assert way["status"] in ("ok", "oom")
            assert (way["time_s"] is None) == (way["status"] == "oom")
    assert set(shown["ablations"]) == set(ABLATIONS)
    ours = shown["ours"]
    assert ours["status"] == "ok"
    assert 0 < shown["bound"] <= ours["time_s"]
    assert shown["evaluations"] > 0
    how = "operator partition x y output weights collective rectangle stages micro_batch"
    assert ours["encoding"][0].keys() == set(how.split())


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


def test_stages_are_numbered_on_the_map(run, tmp_path, small):
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
    state = "weights, gradients and optimiser state take 195.5 GiB; all 2 dies have 59.6 GiB"
    assert line == f"phaze-fast: infeasible: gpt3-13b on two: {state}"
    assert "OOM: " in out
    code, out, _ = run(*words, "--json")
    found = json.loads(out)
    assert code == 1
    ours = found["ours"]
    assert ours["status"] == "oom"
    assert ours["time_s"] is None
    assert ours["over_bytes"] > 1e9
    assert " over 29.8 GiB of dram per die" in ours["reason"]
    assert found["status"] == "infeasible"
    assert found["bound"] is None
    assert found["reason"] in line


def test_one_case_without_room_does_not_hide_the_others(run, folder):
    words = ["bertlarge", "gpt3-13b", "--wafer", folder / "two.yaml", *QUICK]
    found = document(run(*words, "--json"))
    assert [case["ours"]["status"] for case in found["cases"]] == ["ok", "oom"]


# ---- wafers, spaces and models ----


@pytest.mark.parametrize(
    ("words", "text"),
    [*refused_calls("wafer command"), (["bertlarge", "--resume", __file__], "resume: ")],
)  # fmt: skip
def test_bad_words_are_named(run, small, words, text):
    if words and "--wafer" not in words:
        words = [*words[:1], "--wafer", str(small), *QUICK, *words[1:]]
    assert text.lower() in refused(run(*words)).lower()


def test_a_space_says_which_wafer_it_found(run, folder, tmp_path):
    """The wafer itself is in the document, so that it can be used again."""
    found = document(run("bertlarge", "--wafer", folder / "space.json", *EFFORT, "--json"))
    assert isinstance(found["wafer"], dict)
    file = tmp_path / "found.json"
    file.write_text(json.dumps(found["wafer"]))
    again = document(run("bertlarge", "--wafer", file, *EFFORT, "--json"))
    assert again["ours"]["time_s"] == pytest.approx(found["ours"]["time_s"], rel=0.05)


# ---- a saved answer ----


@pytest.fixture(scope="module")
def saved(folder):
    file = folder / "saved.json"
    words = ["wafer", "bertlarge", "--wafer", folder / "small.yaml", *QUICK, "-o", file]
    assert main([str(word) for word in (*words, "--no-cache", "--json")]) == 0
    return file


def test_a_saved_answer_takes_the_same_time(run, small, saved, tmp_path):
    ours = json.loads(saved.read_text())["ours"]
    for data in ({"ours": ours}, ours, ours["encoding"]):
        file = tmp_path / "mine.json"
        file.write_text(json.dumps(data))
        words = ["--global-batch", 64, "--encoding", file, "--json"]
        found = document(run("bertlarge", "--wafer", small, *words))["ours"]
        assert found == ours
    code, out, _ = run("bertlarge", "--wafer", small, *words[:-1], "--describe")
    assert code == 0
    assert "sequence(s) at once" in out


@pytest.mark.parametrize("text", ["{", "[1, 2]", "null", '{"ours": 5}', '{"cases": []}', ""])
def test_a_file_that_is_no_encoding_is_named(run, small, tmp_path, text):
    file = tmp_path / "mine.json"
    file.write_text(text)
    words = ["--global-batch", 64, "--encoding", file]
    assert str(file) in refused(run("bertlarge", "--wafer", small, *words))


def test_an_encoding_without_room_is_exit_code_1(run, folder, tmp_path):
    wafer = load_wafer(folder / "two.yaml")
    problem = Problem(models.load("gpt3-13b"), wafer, WaferTraining(64))
    file = tmp_path / "plan.json"
    file.write_text(megatron(problem, Layout(2, 1, 1, 1), 2).to_json())
    words = ["gpt3-13b", "--wafer", folder / "two.yaml", "--global-batch", 64, "--encoding", file]
    code, out, err = run(*words, "--json")
    assert code == 1
    assert json.loads(out)["ours"]["status"] == "oom"
    assert "infeasible: OOM: " in err


# ---- as a program ----


@pytest.mark.slow
def test_the_default_wafer_and_the_default_effort(run):
    found = document(run("bertlarge", "--global-batch", 64, "--json"))
    assert found["wafer"] == "dram-wafer"
    assert found["ours"]["status"] == "ok"


# ---- runs ----


BERT = models.load("bertlarge")
STEP = WaferTraining(16)
BRIEF = Effort(seeds=1, steps=200, promising=1)
FOUR = DRAM.replace(columns=2, rows=2)
SPACE = WaferSpace(
    name="few",
    base=FOUR,
    axes={"die.hbm_stacks": [1, 2], "die.chip.tensor_core.count": [16, 20, 24]},
)


def plain(result):
    """What does not depend on the clock."""
    data = result.to_dict()
    return {k: v for k, v in data.items() if k not in ("seconds", "evaluations_per_s")}


def in_session(call, *given, executor=None, threads=None, resume=None, cache=None, **options):
    with Session(executor, threads, resume, cache) as session:
        return call(*given, session=session, **options)


def search(**options):
    return in_session(search_wafers, BERT, SPACE, STEP, BRIEF, **options)


@pytest.fixture(scope="module")
def fresh():
    return search()


@pytest.fixture
def calls(monkeypatch):
    """Names of the wafers that are really searched."""
    names = []
    really = searches.MappingSearch

    def counted(problem, *rest):
        names.append(problem.wafer.name)
        return really(problem, *rest)

    monkeypatch.setattr(searches, "MappingSearch", counted)
    return names


# ---- executors ----


@pytest.mark.parametrize(
    ("executor", "threads"), [("threads", 3), pytest.param("processes", 2, marks=pytest.mark.slow)]
)
def test_every_executor_gives_the_same_answer(fresh, executor, threads):
    assert plain(search(executor=executor, threads=threads)) == plain(fresh)


@pytest.mark.slow
def test_a_comparison_is_the_same_in_other_processes():
    problem = Problem(BERT, FOUR, STEP)
    found = in_session(compare_mappings, problem, BRIEF, executor="processes", threads=2)
    assert plain(found) == plain(compare_mappings(problem, BRIEF))


def test_several_problems_at_once():
    problems = [Problem(BERT, FOUR.replace(columns=n), STEP) for n in (1, 2)]
    found = in_session(search_mappings, problems, BRIEF, executor="threads", threads=2)
    assert [plain(each) for each in found] == [plain(search_mapping(p, BRIEF)) for p in problems]


@pytest.mark.parametrize("executor", [None, "threads"])
def test_an_error_of_a_task_is_the_callers(executor):
    problem = Problem(BERT, FOUR, STEP)
    with pytest.raises(InvalidInputError, match="baselines: 'zero4' is not accepted"):
        in_session(compare_mappings, problem, BRIEF, names=["zero4"], executor=executor)


# ---- journals ----


class StoppedError(Exception):
    pass


def test_a_stopped_search_goes_on_where_it_was(fresh, calls, tmp_path):
    def stop(done, total, best):
        if done < total:
            raise StoppedError

    with pytest.raises(StoppedError):
        search(resume=tmp_path / "run", progress=stop)
    before = list(calls)
    assert len(before) > 0
    rows = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    assert len(rows) == len(before)
    assert plain(search(resume=tmp_path / "run")) == plain(fresh)
    whole = len(calls)
    assert len(set(calls)) > len(set(before))
    calls.clear()
    search()
    assert whole == len(calls)  # nothing was searched twice
    calls.clear()
    assert plain(search(resume=tmp_path / "run")) == plain(fresh)
    assert calls == []


def test_a_stopped_comparison_leaves_what_it_had(calls, tmp_path):
    problem = Problem(BERT, FOUR.replace(rows=1), STEP)

    def stop(part):
        if part == "ablations":
            raise StoppedError

    with pytest.raises(StoppedError):
        in_session(compare_mappings, problem, BRIEF, resume=tmp_path, report=stop)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 5  # four systems and ours
    assert len(calls) == 1
    found = in_session(compare_mappings, problem, BRIEF, resume=tmp_path)
    again = len(calls)
    assert plain(found) == plain(compare_mappings(problem, BRIEF))
    assert len(calls) - again == again  # our own search was not repeated


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "phaze-fast sweep 1", "evaluate": "x"}')
    with pytest.raises(InvalidInputError, match=r"^resume: .*manifest.json has phaze_fast"):
        search(resume=tmp_path)


def test_what_a_budget_cut_short_is_not_kept(calls, tmp_path):
    problem = Problem(BERT, FOUR, STEP)
    hurry = Effort(seeds=1, steps=200, promising=1, budget_s=1e-6)
    for _ in range(2):
        in_session(search_mappings, [problem], hurry, resume=tmp_path)
    assert len(calls) == 2
    in_session(search_mappings, [problem], Effort(1, 200, 1, budget_s=1e6), resume=tmp_path)
    in_session(search_mappings, [problem], BRIEF, resume=tmp_path)
    assert len(calls) == 3  # a budget that was not spent changes nothing


# ---- the store ----


def test_results_are_kept_by_content(fresh, calls, tmp_path, monkeypatch):
    assert plain(search(cache=tmp_path)) == plain(fresh)
    first = len(calls)
    assert plain(search(cache=tmp_path)) == plain(fresh)
    assert len(calls) == first
    search(cache=tmp_path, seed=1)
    second = len(calls)
    assert second > first
    other = SPACE.replace(base=FOUR.replace(rows=1))
    in_session(search_wafers, BERT, other, STEP, BRIEF, cache=tmp_path)
    assert len(calls) > second
    third = len(calls)
    monkeypatch.setattr(store, "pricing_fingerprint", lambda: b"other prices")
    search(cache=tmp_path)
    assert len(calls) == third + first


def test_a_folder_that_cannot_be_used_is_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    with Session(cache=tmp_path / "file") as session:
        assert "cache: " in session.notes[0]


def test_operators_of_ones_own_are_never_kept(tmp_path):
    problem = Problem(BERT, FOUR, STEP)
    own = Problem(BERT, FOUR, STEP, work=problem.work)
    task = Task(searches.search_data, own, {})
    assert (own.digest, task.key) == ("", "")
    assert problem.digest != problem.variant(linear=True).digest
    assert problem.digest == Problem(BERT, FOUR, STEP).digest


def test_a_result_reads_back_to_the_last_bit():
    problem = Problem(BERT, FOUR, STEP)
    found = search_mapping(problem, Effort(seeds=1, steps=200, promising=3))
    text = json.dumps(found.to_record(), allow_nan=False)
    assert MappingResult.from_record(problem, json.loads(text)) == found
    assert Evaluation.from_dict(found.best.to_dict()) == found.best


# ---- tables, pages, the command ----


def test_results_are_tables(fresh, tmp_path):
    columns = fresh.to_columns()
    assert len({len(values) for values in columns.values()}) == 1
    assert len(columns["wafer"]) == fresh.searched + fresh.bounded + fresh.unseen
    assert columns["mapping.time_s"][0] == fresh.best.best.time_s
    assert columns["status"].count("searched") == fresh.searched
    fresh.to_csv(tmp_path / "wafers.csv")
    with (tmp_path / "wafers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["wafer"] for row in rows] == columns["wafer"]
    mapping = fresh.best.to_columns()
    assert mapping["block.compute_s"][0] == fresh.best.best.compute_s
    assert (mapping["width"][0], mapping["stages"][0]) == (
        fresh.best.best.encoding.layout.width,
        fresh.best.best.encoding.layout.stages,
    )


def test_a_space_is_searched_and_the_command_keeps_what_it_finds(run, folder, tmp_path, calls):
    words = ["bertlarge", "--wafer", folder / "space.json", "--compare", *EFFORT]
    words += ["--resume", tmp_path / "run", "--no-cache"]
    first = document(run(*words, "--json"))
    assert first.keys() >= {*SAID, "evaluations_per_s"}
    assert first["ours"]["status"] == "ok"
    assert first["ablations"]["no_architecture"]["time_s"] == first["base"]["time_s"]
    for each in first["ablations"].values():
        assert each["time_s"] is None or first["ours"]["time_s"] <= each["time_s"]
    counts = first["wafers"]
    kinds = ("contained", "bounded", "searched", "unseen")
    assert sum(counts[kind] for kind in kinds) == counts["feasible"]
    assert first["base"]["time_s"] >= first["ours"]["time_s"]
    assert "wafers that meet the rules and lie inside no other" in first["bound_space"]
    count = len(calls)
    page = tmp_path / "page.html"
    code, out, err = run(*words, "--report", page, "--executor", "threads")
    assert (code, len(calls)) == (0, count)
    assert f"wrote {page}" in err
    for text in ("Results kept from earlier runs", "bound over all", "the space's own wafer"):
        assert text in out
    text = page.read_text()
    for row in first["table"]:
        assert row["wafer"] in text
    for part in ("Lower bound", "Blocking collectives", "megatron, tiled", "no recompute"):
        assert part in text
    assert "http" not in text.replace("http-equiv", "")


def test_the_command_writes_as_it_goes(run, folder, tmp_path, monkeypatch):
    """A second case that fails leaves the first in the file."""
    really = searches.MappingSearch

    def failing(problem, *rest):
        if problem.model.name == "gpt2-small":
            raise InvalidInputError("model: stopped here")
        return really(problem, *rest)

    monkeypatch.setattr(searches, "MappingSearch", failing)
    file = tmp_path / "out.json"
    words = ["bertlarge", "gpt2-small", "--wafer", folder / "two.yaml", *EFFORT, "-o", file]
    assert "stopped here" in refused(run(*words))
    assert [case["model"] for case in json.loads(file.read_text())["cases"]] == ["bertlarge"]
