"""Laws of sweeps: nothing is lost, nothing is done twice, and every fault has its words."""

import functools
import json
import sys

import numpy as np
import pytest
from sweep_points import counted, counts, many, point, refuses

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError, MissingExtraError
from phaze_fast.hardware import Cluster
from phaze_fast.planning import plan
from phaze_fast.runs.sweep import (
    COLUMNS,
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
    one = point()
    with pytest.raises(InvalidInputError, match="training: dict is not accepted"):
        Point(one.model, one.cluster, {})
    with pytest.raises(InvalidInputError, match=r"cluster\.chip: missing"):
        Point(one.model, Cluster(devices=8, fabric="dgx-h100"), one.training)
    data = one.to_dict()
    with pytest.raises(InvalidInputError, match="did you mean 'training'"):
        Point.from_dict({**data, "trainin": 1})
    with pytest.raises(InvalidInputError, match="a.json: cluster: is missing"):
        Point.from_dict({"model": data["model"]}, "a.json")
    with pytest.raises(InvalidInputError, match="training: global_batch"):
        Point.from_dict({**data, "training": {"global_batch": 0}})
    with pytest.raises(InvalidInputError, match="expected a mapping"):
        Point.from_dict([])


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
    wafer = Cluster(devices=1, fabric="dgx-h100", chip="wse-2")
    small = point()
    points = [
        small,
        point(model="llama2-70b", devices=2),
        Point(small.model, wafer, small.training),
    ]
    good, large, odd = sweep(points).rows
    assert good["status"] == "optimal"
    assert good["reason"] == ""
    assert large["status"] == "infeasible"
    assert "too much" in large["reason"]
    assert large["time_s"] is None
    assert odd["status"] == "error"
    assert "no HBM" in odd["reason"]
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
    points = many(7)
    seen = []
    table = sweep(
        points,
        chunk=chunk,
        threads=threads,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert table == sweep(points)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert (seen[0], seen[-1]) == ((0, 7), (7, 7))


def test_no_points_are_an_empty_table(tmp_path):
    table = sweep([], out=tmp_path / "out")
    assert (len(table), table.notes) == (0, ())
    assert table["time_s"].shape == (0,)


def test_questions_that_are_not_right(tmp_path):
    for words, said in (
        ({"chunk": 0}, "chunk: 0 is not accepted"),
        ({"threads": 0}, "threads: 0 is not accepted"),
        ({"executor": "threds"}, "did you mean 'threads'"),
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


def test_json_holds_every_row(tmp_path):
    table = sweep([point(), point()])
    table.to_json(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    assert data == {"rows": table.rows, "notes": [], "repeated": 1, "resumed": 0}
    with pytest.raises(InvalidInputError, match="cannot be written"):
        table.to_json(tmp_path / "none" / "t.json")


def test_parquet_holds_every_row(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = sweep([point(), point(model="llama2-70b", devices=2)])
    table.to_parquet(tmp_path / "t.parquet")
    assert parquet.read_table(tmp_path / "t.parquet").to_pylist() == table.rows
    with pytest.raises(InvalidInputError, match="cannot be written"):
        table.to_parquet(tmp_path / "none" / "t.parquet")


def test_parquet_without_its_package_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"phaze-fast\[table\]"):
        SweepTable([]).to_parquet(tmp_path / "t.parquet")
