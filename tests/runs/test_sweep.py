"""Sweeps, whole and in blocks: no row is lost, none is computed twice, every fault has a message."""

import functools
import itertools
import json
import sys
import time

import numpy as np
import pytest
from sweep_points import counted, counts, fake, many, point, refuses

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError, MissingExtraError
from phaze_fast.hardware import Cluster
from phaze_fast.planning import plan, predict
from phaze_fast.runs.sweep import (
    COLUMNS,
    PlanGrid,
    Point,
    SweepTable,
    evaluate_point,
    plan_row,
    sweep,
)

# ---- points and rows ------------------------------------------------------------------------------


def test_a_point_is_known_by_its_content():
    one = point()
    assert point().key == one.key
    assert Point.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert Point.from_dict(one.to_dict()).key == one.key
    others = [point(32), point(devices=8), point(model="gpt2-small"), point(zero=0)]
    assert len({one.key, *(other.key for other in others)}) == 5


def test_a_point_that_is_not_one_is_refused():
    one, bare = point(), Cluster(devices=8, fabric="dgx-h100")
    data = one.to_dict()
    for read, given, said in (
        (Point, (one.model, one.cluster, {}), "training: dict is not accepted"),
        (Point, (one.model, bare, one.training), r"cluster\.chip: missing"),
        (Point.from_dict, ({**data, "trainin": 1},), "did you mean 'training'"),
        (Point.from_dict, ({"model": data["model"]}, "a.json"), "a.json: cluster: is missing"),
        (Point.from_dict, ({**data, "training": {"global_batch": 0}},), "training: global_batch"),
        (Point.from_dict, ([],), "expected a mapping"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            read(*given)


GRID = {"tp": (1, 2, 3), "pp": (1, 2), "micro_batch": (1, 4), "zero": (0, 2), "recompute": "none"}


def test_a_grid_of_plans_is_each_of_its_plans():
    one = point(devices=4)
    row = sweep([one], evaluate=PlanGrid(**GRID)).rows[0]
    predicted = []
    for tp, pp, micro_batch, zero in itertools.product(*list(GRID.values())[:4]):
        if 4 % (tp * pp):
            continue
        widths = {"tp": tp, "pp": pp, "dp": 4 // (tp * pp), "micro_batch": micro_batch}
        given = {**widths, "zero": zero, "recompute": "none", "global_batch": 16}
        predicted.append(predict(one.model, one.cluster, given))
    fits = [plan for plan in predicted if plan.over_bytes == 0.0]
    assert row["plans"] == len(predicted) == 16
    assert row["plans_fit"] == len(fits) > 0
    assert row["time_s"] == min(plan.time_s for plan in fits)
    assert row["status"] == "optimal"


def test_results_of_another_grid_are_not_taken_for_these(tmp_path):
    sweep([point()], tmp_path, evaluate=PlanGrid(zero=1))
    assert sweep([point()], tmp_path, evaluate=PlanGrid(zero=[1])).resumed == 1
    with pytest.raises(InvalidInputError, match="PlanGrid"):
        sweep([point()], tmp_path, evaluate=PlanGrid(zero=2))


def test_an_axis_that_plans_do_not_have_is_refused():
    with pytest.raises(InvalidInputError, match="axis: 'zeros' is not accepted; did you mean"):
        PlanGrid(zeros=1)


def test_a_grid_without_a_plan_says_so():
    row = sweep([point(devices=4)], evaluate=PlanGrid(tp=3)).rows[0]
    assert (row["status"], row["plans"], row["plans_fit"]) == ("infeasible", 0, 0)


def test_rows_say_what_plans_say():
    points = [point(n, devices) for n in (8, 16) for devices in (2, 4)]
    table = sweep(points)
    assert [row["key"] for row in table.rows] == [p.key for p in points]
    for p, row in zip(points, table.rows, strict=True):
        best = plan(p.model, p.cluster, p.training, top=1).best
        assert row == plan_row(p, best) == evaluate_point(p)
        assert list(row) == list(COLUMNS)
        assert row["status"] == "optimal"
        assert (row["tp"], row["dp"], row["zero"]) == (best.tp, best.dp, best.zero)
        assert row["time_s"] == best.time_s
        assert row["samples_per_s"] == pytest.approx(p.training.global_batch / best.time_s)
        assert row["tokens_per_s"] == pytest.approx(row["samples_per_s"] * p.model.seq)
        assert row["area_mm2"] == pf.area(p.cluster.chip).total_mm2
        assert row["devices_used"] <= row["devices"] == p.cluster.devices


def test_infeasible_and_broken_points_are_rows():
    small, empty = point(), pf.presets.chip("dojo-d1").to_dict()
    empty["tensor_core"]["local_buffer_bytes"] = 0
    nowhere = Cluster(devices=1, fabric="dgx-h100", chip=pf.Accelerator.from_dict(empty))
    without_memory = Point(small.model, nowhere, small.training)
    points = [small, point(model="llama2-70b", devices=2), without_memory]
    good, large, odd = sweep(points).rows
    assert [row["status"] for row in (good, large, odd)] == ["optimal", "infeasible", "error"]
    assert (good["reason"], large["time_s"]) == ("", None)
    assert "too much" in large["reason"]
    assert "no memory" in odd["reason"]
    assert sweep(points[1:2] + points[:1]).rows == [large, good]


def test_whatever_a_point_does_the_sweep_goes_on():
    rows = sweep(many(5), evaluate=refuses, chunk=2).rows
    assert [row["status"] for row in rows] == ["optimal", "error", "error", "error", "optimal"]
    assert rows[1]["reason"] == "SystemExit: no more"
    assert "time_s = 'nan' is not accepted" in rows[2]["reason"]
    assert "list is not accepted" in rows[3]["reason"]


def test_duplicates_are_evaluated_once(tmp_path):
    points = [*many(3), *many(2), point(4)]
    table = sweep(points, evaluate=functools.partial(counted, tmp_path / "n"), chunk=1)
    assert set(counts(tmp_path / "n").values()) == {1}
    assert table.repeated == 3
    assert len(table) == 6
    assert table.rows[0] == table.rows[3] == table.rows[5]


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("threads", [1, 3])
def test_chunks_and_threads_change_nothing(chunk, threads):
    seen = []
    options = {"chunk": chunk, "threads": threads, "progress": lambda *at: seen.append(at)}
    assert sweep(many(7), **options) == sweep(many(7))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert (seen[0], seen[-1]) == ((0, 7), (7, 7))


def test_questions_that_are_not_right(tmp_path):
    assert len(sweep([], out=tmp_path)) == len(sweep([])["time_s"]) == 0
    for words, said in (
        ({"chunk": 0}, "chunk: 0 is not accepted"),
        ({"threads": 0}, "threads: 0 is not accepted"),
        ({"executor": "threds"}, "did you mean 'threads'"),
        ({"executor": "spark"}, "accepted: threads, processes, dask://host:port"),
        ({"executor": 3}, "executor: 3 is not accepted"),
        ({"evaluate": 3}, "evaluate: 3 is not accepted"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            sweep(many(1), **words)
    with pytest.raises(InvalidInputError, match=r"points\[1\]: str is not accepted"):
        sweep([point(), "x"])


# ---- the table ------------------------------------------------------------------------------------


def test_columns_are_arrays_with_one_type_each():
    table = sweep([point(), point(model="llama2-70b", devices=2)])
    assert list(table.columns) == list(COLUMNS)
    for name, kind in COLUMNS.items():
        expected = {str: "U", int: "i", float: "f", bool: "b"}[kind]
        assert table[name].dtype.kind == expected, name
        assert not table[name].flags.writeable
    assert table["tp"].tolist() == [1, -1]
    assert np.isnan(table["time_s"][1])
    assert table["schedule"].tolist() == ["1f1b", ""]
    with pytest.raises(InvalidInputError, match="did you mean 'time_s'"):
        table["times"]
    mixed = SweepTable([{"time_s": 1, "x": 1, "y": True, "z": "a"}, {"x": 0.5, "y": 2, "z": 3}])
    assert [mixed[name].dtype.kind for name in ("time_s", "x", "y", "z")] == list("ffiU")
    assert mixed["z"].tolist() == ["a", "3"]


@pytest.mark.extras
def test_files_hold_every_row(tmp_path, monkeypatch):
    table = sweep([point(), point(model="llama2-70b", devices=2), point()])
    table.to_json(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    assert data == {"rows": table.rows, "notes": [], "repeated": 1, "resumed": 0}
    parquet = pytest.importorskip("pyarrow.parquet")
    table.to_parquet(tmp_path / "t.parquet")
    assert parquet.read_table(tmp_path / "t.parquet").to_pylist() == table.rows
    for write in (table.to_json, table.to_parquet):
        with pytest.raises(InvalidInputError, match="cannot be written"):
            write(tmp_path / "none" / "t")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"phaze-fast\[table\]"):
        table.to_parquet(tmp_path / "t.parquet")


@pytest.mark.parametrize("jump_s", [-86_400.0 * 400, 86_400.0 * 400])
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch, jump_s):
    """Half of the points before the jump, the others after it."""
    began, real = time.time(), time.time
    points = many(8)
    sweep(points[:4], tmp_path, evaluate=fake)
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert abs(time.time() - began - jump_s) < 60.0
    found = sweep(points, tmp_path, evaluate=fake)
    assert found.resumed == 4
    assert found.rows == sweep(points, evaluate=fake).rows
