"""Wafer searches on executors, from journals and from the store: the same answer each way."""

import csv
import json

import pytest
from wafer_cli_cases import DRAM, EFFORT, document, refused

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.runs import store
from phaze_fast.wafer import (
    Effort,
    Evaluation,
    MappingResult,
    Problem,
    WaferSpace,
    WaferTraining,
    compare_mappings,
    search_mapping,
    search_mappings,
    search_wafers,
)
from phaze_fast.wafer.search import search as searches
from phaze_fast.wafer.search.session import Session, Task

BERT = models.load("bertlarge")
STEP = WaferTraining(16)
QUICK = Effort(seeds=1, steps=200, promising=1)
SMALL = DRAM.replace(columns=2, rows=2)
SPACE = WaferSpace(
    name="few",
    base=SMALL,
    axes={"die.hbm_stacks": [1, 2], "die.chip.tensor_core.count": [16, 20, 24]},
)


def plain(result):
    """What does not depend on the clock."""
    data = result.to_dict()
    return {k: v for k, v in data.items() if k not in ("seconds", "evaluations_per_s")}


def search(**options):
    return search_wafers(BERT, SPACE, STEP, QUICK, **options)


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
    ("executor", "threads"),
    [("threads", 3), pytest.param("processes", 2, marks=pytest.mark.slow)],
)
def test_every_executor_gives_the_same_answer(fresh, executor, threads):
    assert plain(search(executor=executor, threads=threads)) == plain(fresh)


@pytest.mark.slow
def test_a_comparison_is_the_same_in_other_processes():
    problem = Problem(BERT, SMALL, STEP)
    found = compare_mappings(problem, QUICK, executor="processes", threads=2)
    assert plain(found) == plain(compare_mappings(problem, QUICK))


def test_several_problems_at_once():
    problems = [Problem(BERT, SMALL.replace(columns=n), STEP) for n in (1, 2)]
    found = search_mappings(problems, QUICK, executor="threads", threads=2)
    assert [plain(each) for each in found] == [plain(search_mapping(p, QUICK)) for p in problems]


@pytest.mark.parametrize("executor", [None, "threads"])
def test_an_error_of_a_task_is_the_callers(executor):
    problem = Problem(BERT, SMALL, STEP)
    with pytest.raises(InvalidInputError, match="baselines: 'zero4' is not accepted"):
        compare_mappings(problem, QUICK, names=["zero4"], executor=executor)


def test_an_unknown_executor_is_named():
    with pytest.raises(InvalidInputError, match="executor: 'thread' is not accepted; did you mean"):
        search(executor="thread")


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
    problem = Problem(BERT, SMALL, STEP)

    def stop(part):
        if part == "ablations":
            raise StoppedError

    with pytest.raises(StoppedError):
        compare_mappings(problem, QUICK, resume=tmp_path, report=stop)
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 5  # four systems and ours
    assert len(calls) == 1
    found = compare_mappings(problem, QUICK, resume=tmp_path)
    again = len(calls)
    assert plain(found) == plain(compare_mappings(problem, QUICK))
    assert len(calls) - again == again  # our own search was not repeated


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text('{"format": "phaze-fast sweep 1", "evaluate": "x"}')
    with pytest.raises(InvalidInputError, match=r"^resume: .*manifest.json has phaze_fast"):
        search(resume=tmp_path)


def test_what_a_budget_cut_short_is_not_kept(calls, tmp_path):
    problem = Problem(BERT, SMALL, STEP)
    hurry = Effort(seeds=1, steps=200, promising=1, budget_s=1e-6)
    for _ in range(2):
        search_mappings([problem], hurry, resume=tmp_path)
    assert len(calls) == 2
    search_mappings([problem], Effort(1, 200, 1, budget_s=1e6), resume=tmp_path)
    search_mappings([problem], QUICK, resume=tmp_path)
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
    other = SPACE.replace(base=SMALL.replace(rows=1))
    search_wafers(BERT, other, STEP, QUICK, cache=tmp_path)
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
    problem = Problem(BERT, SMALL, STEP)
    own = Problem(BERT, SMALL, STEP, work=problem.work)
    task = Task(searches.search_data, own, {})
    assert (own.digest, task.key) == ("", "")
    assert problem.digest != problem.variant(linear=True).digest
    assert problem.digest == Problem(BERT, SMALL, STEP).digest


def test_a_result_reads_back_to_the_last_bit():
    problem = Problem(BERT, SMALL, STEP)
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


def test_the_command_keeps_what_it_finds(run, folder, tmp_path, calls):
    words = ["bertlarge", "--wafer", folder / "space.json", "--compare", *EFFORT]
    words += ["--resume", tmp_path / "run", "--no-cache"]
    first = document(run(*words, "--json"))
    count = len(calls)
    page = tmp_path / "page.html"
    code, out, err = run(*words, "--report", page, "--executor", "threads")
    assert (code, len(calls)) == (0, count)
    assert f"wrote {page}" in err
    assert "Results kept from earlier runs" in out
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


def test_bad_words_of_the_command(run, two, tmp_path):
    words = ["bertlarge", "--wafer", two, *EFFORT]
    assert "executor: 'proceses' is not accepted" in refused(run(*words, "--executor", "proceses"))
    (tmp_path / "file").write_text("")
    assert "resume: " in refused(run(*words, "--resume", tmp_path / "file"))
