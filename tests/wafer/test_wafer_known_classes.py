"""Two classes of stages in studies of fault maps: carried from map to map, never slower."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from phaze_fast.cli.wafer import study_rows
from phaze_fast.wafer import (
    Effort,
    FaultMap,
    Problem,
    WaferTraining,
    fault_study,
    load_wafer,
    sample_faults,
    search_mapping,
)
from phaze_fast.wafer.mapping.evaluate import Classes, evaluation_of_classes
from phaze_fast.wafer.search.class_search import KnownClasses
from phaze_fast.wafer.search.session import Session
from phaze_fast.wafer.studies.fault_study import _Known

TILE = load_wafer("dojo-tile-like")
QUICK = Effort(seeds=1, steps=300, promising=1)
PRIME = FaultMap(dead_dies=((0, 0), (2, 2)))
"""23 dies are left."""


class OneShape(_Known):
    """A study that knows stages of one shape only."""

    def best(self, problem):
        return self.best_of_one_shape(problem), False


@pytest.fixture(scope="module")
def prime():
    problem = Problem("llama2-7b", TILE, WaferTraining(512))
    return problem, fault_study(problem, [PRIME, FaultMap(dead_dies=((0, 0), (2, 1)))], threads=1)


@pytest.mark.slow
def test_a_study_finds_what_two_classes_gain(prime):
    problem, study = prime
    assert study.classes[0]
    known = OneShape(QUICK, 0, 1)
    known.best(problem)
    alone = known.best(problem.on(PRIME.on(TILE)))[0]
    assert study.times_s[0] < 0.99 * alone
    searched = search_mapping(problem.on(PRIME.on(TILE)), Effort(seeds=1, steps=500, promising=3))
    assert study.times_s[0] == pytest.approx(searched.best.time_s, rel=0.02)
    assert study.times_s[0] >= searched.bound_s
    data = study.to_dict()
    assert data["with_two_classes"] == sum(study.classes) >= 1
    assert study.to_columns()["two_classes"] == list(study.classes)
    assert ("two classes of stages", f"under {sum(study.classes)} of the maps") in study_rows(study)


def test_threads_change_nothing(prime):
    problem, study = prime
    again = fault_study(problem, study.maps, threads=2)
    assert (again.times_s, again.classes) == (study.times_s, study.classes)


def test_no_map_is_slower_than_with_one_shape():
    """Stages of one shape are searched as before: two classes only ever replace them."""
    wafer = TILE.replace(columns=3, rows=3)
    problem = Problem("bertlarge", wafer, WaferTraining(16))
    maps = sample_faults(wafer, 12, seed=5, die_fault=0.2, link_fault=0.05)
    study = fault_study(problem, maps, threads=1)
    known = OneShape(QUICK, 0, 1)
    known.best(problem)
    for faults, time_s, two in zip(maps, study.times_s, study.classes, strict=True):
        alone = known.best(problem.on(faults.on(wafer)))[0]
        assert time_s < alone if two else time_s == alone


def test_a_known_pair_is_scored_where_it_has_a_place(prime):
    problem, _ = prime
    known = _Known(QUICK, 0, 1)
    known.best(problem)
    first = problem.on(PRIME.on(TILE))
    best_s, two = known.best(first)
    assert two
    pairs = known.classes.mappings
    scores = {}
    for pair, (_, arrays) in pairs.items():
        classes = Classes(first, pair)
        for mapping, op_mappings in zip(classes.mappings, arrays, strict=True):
            mapping.assign(op_mappings)
        scores[pair] = evaluation_of_classes(classes)
    assert best_s == min(each.time_s for each in scores.values() if each.fits)
    with ThreadPoolExecutor(1) as pool:
        layouts = list(first.layouts())
        start = [(layout, arrays) for layout, (_, arrays) in known.mappings.items()]
        assert known.classes.best(first, layouts, start, best_s * 1.001, pool) == best_s
        assert KnownClasses(300, 0).best(first, layouts, [], best_s, pool) == float("inf")


def test_a_study_goes_on_from_its_journal(tmp_path):
    problem = Problem("bertlarge", TILE.replace(columns=3, rows=2), WaferTraining(16))
    found = []
    for _ in range(2):
        with Session(None, 1, tmp_path / "run") as session:
            found.append(fault_study(problem, 4, 0.2, session=session))
            recalled = session.recalled
    assert recalled == 1
    assert (found[0].times_s, found[0].classes) == (found[1].times_s, found[1].classes)
    assert json.loads(json.dumps(found[0].to_dict()))["with_two_classes"] == sum(found[0].classes)
