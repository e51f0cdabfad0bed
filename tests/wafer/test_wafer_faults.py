"""Fault maps: files, refusals, wafers that faults split, and throughput over many maps."""

import json
import random
from itertools import pairwise

import pytest
from wafer_cli_cases import DRAM, EFFORT, document, refused

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import (
    Effort,
    FaultMap,
    Layout,
    Problem,
    WaferTraining,
    fault_study,
    load_faults,
    load_wafer,
    sample_faults,
    search_mapping,
    step_loads,
)
from phaze_fast.wafer.mapping.layout import layouts
from phaze_fast.wafer.mapping.packing import stage_dies

DOJO = load_wafer("dojo-tile-like")
QUICK = Effort(seeds=1, steps=150, promising=1)
MAP = {"dead_dies": [[0, 2]], "dead_links": [[[1, 0], [1, 1]]]}


@pytest.fixture
def written(tmp_path):
    def write(data, name="map.yaml"):
        file = tmp_path / name
        file.write_text(data if isinstance(data, str) else json.dumps(data))
        return file

    return write


# ---- files ----


@pytest.mark.parametrize("name", ["map.yaml", "map.json"])
def test_a_map_breaks_dies_and_links(run, small, written, name):
    file = written(MAP, name)
    found = document(run("bertlarge", "--wafer", small, "--faults", file, *EFFORT, "--json"))
    assert found["faults"] == MAP
    assert found["dies"]["stage"][0][2] == -2
    assert found["dies"]["dead_links"] == MAP["dead_links"]
    assert found["bound"] <= found["ours"]["time_s"]
    assert 0 < found["mfu"] < 1
    assert found["energy_j"] > 0
    assert "one connected part" in found["bound_space"]
    whole = document(run("bertlarge", "--wafer", small, *EFFORT, "--json"))
    assert "faults" not in whole
    assert whole["ours"]["time_s"] <= found["ours"]["time_s"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"dead_dies": [[9, 0]]}, "dead_dies.0: row 9, column 0 is not accepted by dram-wafer; expected rows below 2 and columns below 3"),
        ({"dead_dies": [[0, -1]]}, "dead_dies.0.1: -1 is not accepted"),
        ({"dead_dies": [[0, 0, 0]]}, "dead_dies.0"),
        ({"dead_dies": "all"}, "dead_dies"),
        ({"dead_dies": [[0, 0], [0, 0]]}, "dead_dies: an entry is given twice"),
        ({"dead_dies": [[r, c] for r in range(2) for c in range(3)]}, "all 6 dies of dram-wafer are dead"),
        ({"dead_links": [[[0, 0], [1, 1]]]}, "row 0, column 0 to row 1, column 1 is not accepted; expected two neighbouring dies"),
        ({"dead_links": [[[0, 2], [0, 3]]]}, "dead_links.0: row 0, column 3 is not accepted"),
        ({"dead_links": [[[0, 0], [0, 1]], [[0, 1], [0, 0]]]}, "dead_links: an entry is given twice"),
        ({"dies": []}, "unknown key 'dies'"),
        ("- 1\n", "expected"),
        ("{", "map.yaml"),
    ],
)  # fmt: skip
def test_wrong_maps_are_one_line(run, small, written, data, words):
    text = refused(run("bertlarge", "--wafer", small, "--faults", written(data), *EFFORT))
    assert words in text
    assert text.count("\n") == 1


def test_a_map_that_is_not_there_or_of_a_space(run, written, tmp_path):
    missing = refused(run("bertlarge", "--wafer", "dram-wafer", "--faults", tmp_path / "no.yaml"))
    assert missing.count("\n") == 1
    said = refused(run("bertlarge", "--wafer", "wafer-space", "--faults", written(MAP)))
    assert "--faults: wafer-space is not accepted with it; expected wafers, not a space" in said


def test_packages_and_dies_that_cannot_be(run, written):
    """One line each: a rule that is broken, a chip that is not known."""
    data = DRAM.to_dict()
    cases = [
        ({**data, "rows": 9}, "window: "),
        ({**data, "die": {**data["die"], "chip": "d2"}}, "'d2' is neither a preset nor"),
        ({**data, "gap_mm": 15.0, "columns": 2, "rows": 2}, "reach: "),
    ]
    for plain, words in cases:
        text = refused(run("bertlarge", "--wafer", written(plain, "w.json"), *EFFORT))
        assert words in text
        assert text.count("\n") == 1


def test_a_map_adds_to_what_a_wafer_has(written):
    faults = load_faults(written(MAP))
    wafer = DOJO.replace(dead=((4, 4),), dead_links=(((0, 1), (1, 1)),))
    found = faults.on(wafer)
    assert found.dead == ((2, 0), (4, 4))
    assert found.dead_links == (((0, 1), (1, 1)),)
    assert faults.to_plain() == MAP


# ---- no stage and no message meets a fault ----


def test_no_message_passes_a_dead_die_or_link():
    rng = random.Random(4)
    for faults in sample_faults(DOJO, 5, seed=7, die_fault=0.1, link_fault=0.1):
        wafer = faults.on(DOJO)
        problem = Problem("bertlarge", wafer, WaferTraining(64))
        every = [each for each in layouts(wafer, 24, 64) if each.micro_batch == 8]
        layout = rng.choice(every)
        try:
            mapping = problem.mapping(layout)
        except InvalidInputError:
            continue  # some operator cannot be split so far
        found = search_mapping(problem, Effort(1, 20, 1), wanted=[layout])
        assert mapping is not None
        loads = step_loads(problem, found.best.encoding)
        for x, y in wafer.dead:
            assert not loads[y, x].any()
        for (x, y), (u, v) in wafer.dead_links:
            way = 0 if y == v else 2
            assert loads[y, x, way] == loads[v, u, way + 1] == 0.0
        placed = stage_dies(wafer, layout.width, layout.height, layout.stages)
        assert all(wafer.alive(*die) for stage in placed for die in stage)


SPLIT = DRAM.replace(columns=5, rows=4, dead=tuple((x, 2) for x in range(5)))


@pytest.mark.parametrize("model", ["gpt-3.6b", "gpt-7.5b"])
def test_where_faults_split_a_wafer_what_is_missing_is_said(model):
    """Both said that no rectangle suits, or the right bytes, by chance."""
    tight = SPLIT.replace(reserved_bytes="30 GB")
    found = search_mapping(Problem(model, tight, WaferTraining(64)), QUICK)
    assert not found.best.fits
    assert found.best.reason.startswith("OOM: ")
    roomy = search_mapping(Problem(model, SPLIT, WaferTraining(64)), QUICK)
    assert roomy.best.fits
    layout = roomy.best.encoding.layout
    rows = {y for stage in stage_dies(SPLIT, layout.width, layout.height, layout.stages) for _, y in stage}  # fmt: skip
    assert rows <= {0, 1} or rows <= {3}


@pytest.mark.parametrize("model", ["gpt-3.6b", "bertlarge"])
def test_a_tiny_budget_still_looks_at_one_layout(model):
    for wafer in (SPLIT, DRAM.replace(columns=5, rows=1, reserved_bytes="31 GB")):
        found = search_mapping(Problem(model, wafer, WaferTraining(64)), Effort(1, 10, 1, 1e-9))
        assert found.best.fits or found.best.reason.startswith("OOM: ")


def test_exit_codes_of_a_split_wafer(run, written):
    file = written(SPLIT.replace(reserved_bytes="30 GB").to_dict(), "split.json")
    for words in ([], ["--budget", "1e-9"]):
        code, _, err = run("gpt-3.6b", "--wafer", file, *EFFORT, *words)
        assert code == 1, err
        assert "OOM: " in err


# ---- many maps ----


def test_maps_are_drawn_with_their_probabilities():
    maps = sample_faults(DOJO, 4000, seed=3, die_fault=0.05, link_fault=0.02)
    assert maps == sample_faults(DOJO, 4000, seed=3, die_fault=0.05, link_fault=0.02)
    dies = sum(len(each.dead_dies) for each in maps) / 4000
    links = sum(len(each.dead_links) for each in maps) / 4000
    assert dies == pytest.approx(25 * 0.05, rel=0.05)
    assert links == pytest.approx(40 * 0.02, rel=0.05)
    by_yield = sample_faults(DRAM.replace(known_good_dies=False), 2000)
    dead = sum(len(each.dead_dies) for each in by_yield) / 2000
    assert dead == pytest.approx(40 * (1 - DRAM.die_yield), rel=0.05)
    for wrong in ({"die_fault": 1.0}, {"link_fault": -0.1}, {"count": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            sample_faults(DOJO, **{"count": 1, **wrong})


def test_expected_and_worst_throughput():
    """As good as a search of each map by itself, and whole where nothing is dead."""
    wafer = DOJO.replace(columns=3, rows=2)
    problem = Problem("bertlarge", wafer, WaferTraining(16))
    maps = [FaultMap(), *sample_faults(wafer, 6, seed=2, die_fault=0.25, link_fault=0.1)]
    study = fault_study(problem, maps)
    assert study.times_s[0] == study.whole_s
    for faults, time_s in zip(maps, study.times_s, strict=True):
        alone = search_mapping(Problem("bertlarge", faults.on(wafer), WaferTraining(16)), QUICK)
        expected = alone.best.time_s if alone.best.fits else float("inf")
        assert time_s == pytest.approx(expected, rel=0.02)
        assert time_s >= alone.bound_s
    data = study.to_dict()
    assert data["worst_per_s"] == min(study.rates) <= data["expected_per_s"] <= data["whole_per_s"]
    rows = data["by_spares"]
    assert rows[-1]["share"] == 1.0
    assert all(a["share"] <= b["share"] and a["least_per_s"] >= b["least_per_s"] for a, b in pairwise(rows))  # fmt: skip


def test_fault_maps_of_the_command(run, two):
    words = ["--fault-maps", "5", "--die-fault", "0.2", "--link-fault", "0.1"]
    found = document(run("bertlarge", "--wafer", two, *EFFORT, *words, "--json"))
    assert found["fault_study"]["maps"] == 5
    assert found["fault_study"]["worst_per_s"] <= found["fault_study"]["expected_per_s"]
    _, out, _ = run("bertlarge", "--wafer", two, *EFFORT, *words)
    assert "over 5 fault maps" in out
    said = refused(run("bertlarge", "--wafer", two, *EFFORT, "--fault-maps", 5, "--die-fault", 2))
    assert "--die-fault: 2.0 is not accepted" in said


def test_a_dead_link_of_a_line_is_gone_around():
    wafer = DOJO.replace(columns=2, rows=2, dead_links=(((0, 0), (1, 0)),))
    problem = Problem("bertlarge", wafer, WaferTraining(16))
    found = search_mapping(problem, QUICK, wanted=[Layout(4, 1, 1, 4)])
    assert found.best.fits
    loads = step_loads(problem, found.best.encoding)
    assert loads[0, 0, 0] == loads[0, 1, 1] == 0.0
    assert loads[0, 0, 2] > 0
