"""Fronts of wafers: nothing on them is beaten, what is left out is; power limits are kept to."""

import itertools
import json
from dataclasses import replace

import pytest
from wafer_cases import refusal

from phaze_fast import models
from phaze_fast.wafer import (
    Effort,
    Problem,
    WaferSpace,
    WaferTraining,
    capped_s,
    load_wafer,
    pareto_front,
    search_front,
    search_mapping,
    step_energy,
)
from phaze_fast.wafer.studies.spaces import OBJECTIVES, wafer_point

BERT, BATCH = models.load("bertlarge"), WaferTraining(16)
QUICK = Effort(seeds=1, steps=200, promising=1)
SPACE = WaferSpace(
    name="few", base="dram-wafer", axes={"columns": [1, 2], "die.hbm_stacks": [1, 2], "rows": [1]}
)


@pytest.fixture(scope="module")
def every():
    """All wafers of the space, searched one by one."""
    return [
        wafer_point(search_mapping(Problem(BERT, wafer, BATCH), QUICK, threads=1))
        for wafer in SPACE.wafers()[0]
    ]


@pytest.mark.parametrize("names", [OBJECTIVES, ("time_s", "cost_usd"), ("power_w",)])
def test_a_front_is_what_none_beats(every, names):
    front = pareto_front(every, names)
    for mine, other in itertools.product(front, every):
        a, b = mine.figures(names), other.figures(names)
        assert not (all(y <= x for x, y in zip(a, b, strict=True)) and a != b)
    for point in every:
        if point not in front:
            assert any(
                all(x <= y for x, y in zip(best.figures(names), point.figures(names), strict=True))
                for best in front
            )


def test_a_search_finds_the_front_of_all(every):
    names = ("time_s", "cost_usd")
    found = search_front(BERT, SPACE, BATCH, QUICK, threads=1, objectives=names)
    wanted = [point.figures(names) for point in pareto_front(every, names)]
    assert [point.figures(names) for point in found.points] == wanted
    assert found.searched + found.bounded == len(every)
    assert found.to_columns()["wafer"] == [p.result.problem.wafer.name for p in found.points]


def test_bad_objectives_are_one_line():
    text = refusal(lambda: search_front(BERT, SPACE, BATCH, QUICK, objectives=("time",)))
    assert text.startswith("objectives: 'time' is not accepted; did you mean 'time_s'?")
    assert "none given" in refusal(lambda: pareto_front([], ()))


def test_a_power_limit_stretches_the_step(every):
    point = every[-1]
    found, problem = point.result.best, point.result.problem
    energy = step_energy(problem, found)
    half_w = 0.5 * (energy.total_j + energy.static_j) / found.time_s
    capped = Problem(BERT, problem.wafer.replace(power_cap_w=half_w), BATCH)
    time_s = capped_s(capped, found)
    leakage_j = energy.static_j * time_s / found.time_s
    assert (energy.total_j - energy.static_j + leakage_j) / time_s == pytest.approx(half_w)
    slow = wafer_point(replace(point.result, problem=capped))
    assert slow.time_s == time_s
    assert slow.power_w == pytest.approx(half_w)
    dark = Problem(BERT, problem.wafer.replace(power_cap_w=1e-3), BATCH)
    assert capped_s(dark, found) == float("inf")
    assert capped_s(Problem(BERT, load_wafer("dram-wafer"), BATCH), found) == found.time_s


def test_a_front_on_the_command_line_is_in_file_and_page(run, folder, tmp_path):
    file, page = tmp_path / "front.json", tmp_path / "front.html"
    words = ("--global-batch", 8, "--seeds", 1, "--steps", 50, "--promising", 1, "--threads", 1)
    where = ("--wafer", folder / "space.json", "--front", "time_s,cost_usd", "--quiet")
    code, out, _ = run("bertlarge", *where, *words, "-o", file, "--report", page)
    assert code == 0
    assert "Pareto front" in out
    assert "Pareto front" in page.read_text()
    front = json.loads(file.read_text())["front"]
    assert front["objectives"] == ["time_s", "cost_usd"]
    assert front["points"]
    counts = front["wafers"]
    assert counts["searched"] + counts["bounded"] == 4
    assert counts["unseen"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--wafer", "dram-wafer", "--front", "all"), "--front: expected spaces of wafers"),
        (("--wafer", "wafer-space", "--front", "time"), "--front: 'time' is not accepted"),
    ],
)
def test_fronts_that_cannot_be_are_one_line(run, words, said):
    code, _, err = run("bertlarge", *words)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1
