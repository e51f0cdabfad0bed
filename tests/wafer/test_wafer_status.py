"""What a wafer search says it has proven, however early it is stopped; figures of several wafers."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from wafer_cli_cases import DRAM
from wafer_tiny_cases import tiny_problem

from phaze_fast import models
from phaze_fast.cli.main import INFEASIBLE, UNDECIDED
from phaze_fast.errors import InvalidInputError
from phaze_fast.report import report_page
from phaze_fast.wafer import (
    Effort,
    Layout,
    Problem,
    Wafer,
    WaferSpace,
    WaferTraining,
    evaluate,
    load_wafer,
    megatron,
    search_front,
    search_mapping,
    search_wafers,
    step_energy,
)

BRIEF = {"seeds": 1, "steps": 200, "promising": 1}


def stopped_after(calls: int) -> Effort:
    """Return the effort of a search that is stopped after so many layouts, at least one."""
    counter = itertools.count()
    return Effort(**BRIEF, stop=lambda: next(counter) >= calls)


def tight(megabytes: int) -> Wafer:
    """Return a small wafer whose dies have so many megabytes left."""
    wafer = DRAM.replace(name="tight", columns=2, rows=2)
    return wafer.replace(reserved_bytes=wafer.local_bytes - megabytes * 10**6)


# ---- the least memory of a layout ----


def test_the_least_memory_is_that_of_all_mappings():
    rng, compared = random.Random(3), 0
    while compared < 12:
        problem = tiny_problem(rng)
        if problem.stream is not None or not problem.recompute:
            continue
        full = problem.variant(capacity_bytes=1.0)  # so that all that can be saved is saved
        for layout in rng.sample(list(full.layouts()), 3):
            try:
                mapping = full.mapping(layout)
            except InvalidInputError:
                continue
            if mapping.mapping_count() > 3e4:
                continue
            needed, limit, op_mappings = mapping.least_memory()
            assert limit == 1.0
            least = float(mapping.exhaust()[1]["memory_bytes"][0])  # of all mappings
            assert needed <= least * (1 + 1e-12)
            if layout.stages == 1:  # several stages may need different mappings
                assert needed == pytest.approx(least, rel=1e-12)
                mapping.assign(op_mappings)
                assert float(mapping.score()["memory_bytes"][0]) == pytest.approx(needed, rel=1e-12)
                compared += 1


def test_the_least_memory_refuses_a_negative_weight():
    mapping = Problem("bertlarge", "dram-wafer").mapping(Layout(2, 1, 1, 2))
    with pytest.raises(InvalidInputError, match="off_wafer: expected 0 to 1e100"):
        mapping.least_memory(-1.0)


# ---- statuses ----


def test_a_search_cut_short_constructs_a_mapping_that_streams_weights():
    problem = Problem("llama3-70b", "wse3-like", WaferTraining(8))
    result = search_mapping(problem, stopped_after(0))
    assert result.status == "feasible"
    assert result.best.fits
    assert result.unseen > 1000
    assert 0 < result.bound_s < result.best.time_s
    assert 0 < result.gap < 1
    assert result.reason == ""
    weights = {op.weights for op in result.best.encoding.operator_mappings}
    assert "stream" in weights
    again = evaluate(problem, result.best.encoding)
    assert (again.time_s, again.fits) == (result.best.time_s, True)


@pytest.mark.parametrize("problems", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_stopped_searches_never_claim_more_than_the_full_search(problems):
    rng, statuses = random.Random(11), set()
    for _ in range(problems):
        problem = tiny_problem(rng)
        full = search_mapping(problem, Effort(**BRIEF), threads=1)
        best_s = full.best.time_s if full.best.fits else float("inf")
        for calls in (0, 1, 2, rng.randrange(3, 30)):
            result = search_mapping(problem, stopped_after(calls), threads=1)
            statuses.add(result.status)
            assert result.status != "infeasible" or full.status == "infeasible"
            assert result.bound_s <= best_s * (1 + 1e-12)
            assert result.bound_s <= full.bound_s * (1 + 1e-12)
            assert result.best.fits == (result.status in ("optimal", "feasible"))
            assert bool(result.reason) != result.best.fits
            assert result.pruned + result.unseen <= result.layouts
        statuses.add(full.status)
        if full.status == "infeasible":
            assert not full.best.fits
            assert full.bound_s == float("inf")
    assert statuses >= {"feasible", "infeasible"}


def test_infeasible_names_the_memory_that_a_die_lacks_in_every_layout(run, tmp_path):
    wafer = tight(2_950).replace(columns=2, rows=1)
    (tmp_path / "tight.yaml").write_text(wafer.to_yaml())
    words = ["bertlarge", "--wafer", tmp_path / "tight.yaml", "--global-batch", 4]
    code, out, err = run(*words, "--steps", 200, "--seeds", 1)
    assert code == INFEASIBLE
    line = err.splitlines()[-1]
    assert line.startswith("phaze-fast: infeasible: bertlarge on tight: in each of ")
    assert "a die needs more memory than it has, under every mapping: at least " in line
    assert "infeasible" in out


def test_unknown_has_an_exit_code_of_its_own(run, tmp_path):
    (tmp_path / "tight.yaml").write_text(tight(1_480).to_yaml())
    words = ["bertlarge", "--wafer", tmp_path / "tight.yaml", "--global-batch", 4]
    words += ["--steps", 200, "--seeds", 1, "--budget", 0.001]
    code, out, err = run(*words, "--json", "--report", tmp_path / "page.html")
    assert code == UNDECIDED
    assert "infeasible" not in err
    line = err.splitlines()[-1]
    assert line.startswith(
        "phaze-fast: unknown: bertlarge on tight: no mapping that fits was found"
    )
    found = json.loads(out)
    assert found["status"] == "unknown"
    assert found["reason"] in line
    assert found["gap"] is None
    assert found["bound"] > 0
    assert "No mapping that fits was found" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("status", "verdict"),
    [
        ("optimal", "Optimal"),
        ("feasible", "Best found, not proven"),
        ("infeasible", "Nothing fits"),
        ("unknown", "No mapping that fits was found"),
    ],
)
def test_the_page_says_the_same(status, verdict):
    document = {"model": "m", "wafer": "w", "status": status, "reason": "so", "ours": {}}
    page = report_page(document)
    assert f">{verdict}</span>" in page
    assert "<p>so</p>" in page


def test_spaces_of_wafers_without_an_answer():
    base, model = tight(1_480), models.load("bertlarge")
    few = WaferSpace(name="few", base=base, axes={"hop_latency_s": [1e-7, 2e-7]})
    training, effort = WaferTraining(4), Effort(**BRIEF, stop=lambda: True)
    result = search_wafers(model, few, training, effort, threads=1)
    assert (result.status, result.undecided) == ("unknown", 1)
    assert "1 of them without a proof" in result.reason
    short = few.replace(base=tight(500))
    result = search_wafers(model, short, training, effort, threads=1)
    assert (result.status, result.undecided) == ("infeasible", 0)
    assert "optimiser state take" in result.reason
    front = search_front(model, few, training, Effort(**BRIEF), threads=1)
    assert (front.misfits, front.undecided, front.points) == (2, 0, ())


# ---- figures of several wafers ----


def test_figures_of_several_wafers_are_of_all_of_them(run, tmp_path):
    wafers = load_wafer("dojo-tile-like").replace(wafer_count=6)
    problem = Problem("bertlarge", wafers, WaferTraining(96))
    plan = megatron(problem, Layout(4, 1, 6, 4), 4, recompute="full", weights="stream")
    assert plan.dies == 24
    evaluation = evaluate(problem, plan)
    assert evaluation.fits, evaluation.reason
    watts = step_energy(problem, evaluation).total_j / evaluation.time_s
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_list()))
    shown = {}
    for name, cap_w in (("above", watts / 6 * 1.01), ("below", watts / 6 * 0.99)):
        path = tmp_path / f"{name}.yaml"
        path.write_text(wafers.replace(name=name, wafer_count=1, power_cap_w=cap_w).to_yaml())
        words = ["bertlarge", "--wafer", path, "--wafer-count", 6, "--global-batch", 96]
        shown[name] = run(*words, "--encoding", tmp_path / "plan.json")[1]
        assert "24 of 150 dies of 6 wafers" in shown[name]
    assert "kW supplied" not in shown["above"]
    assert "kW supplied of 6 wafers" in shown["below"]
