"""The back-test on real generations."""

import json

import pytest

import phaze_fast as pf
from phaze_fast.baselines.backtest import _data, _run, backtest, generation_names, generation_space
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError


def test_the_real_chip_is_in_the_space_around_it_and_nothing_is_larger():
    for name in ("tpuv4", "h100"):
        chip = pf.presets.chip(name)
        space = generation_space(chip)
        assert space.area_mm2.max() <= pf.area(chip, pf.FULL_AREA).total_mm2 * (1 + 1e-6)
        assert any(c.replace(name=name) == _plain(chip) for c in space)


def _plain(chip):
    tuning = chip.tuning
    if tuning.fitted:
        tuning = tuning.replace(fitted=(), carried_from=chip.name)
    return chip.replace(tuning=tuning, die_area_mm2=None, power_w=None, sources=(), notes="")


def test_generations_are_searched_and_compared(tmp_path):
    out = tmp_path / "found.json"
    assert main(["backtest", "A100", "H100", "--json", "-o", str(out)]) == 0
    found = json.loads(out.read_text())
    rows = found["generations"]
    assert [row["name"] for row in rows] == ["A100", "H100"]
    for row in rows:
        assert row["regret"] >= 1.0
        assert 1 <= row["rank"] <= row["chips"]
        assert row["sources"]
        assert (row["rank"] == 1) == (row["regret"] < 1 + 1e-8)
    assert found["directions"][0]["to"] == "H100"


def test_every_generation_and_run_has_a_source():
    assert {"TPU v2", "Ironwood", "A100", "B200"} <= set(generation_names())
    assert all(item["sources"] for item in _data()["generations"])
    assert all(item["source"] and item["note"] for item in _data()["runs"])


def test_published_runs_come_out_within_fifteen_points_but_for_the_one_that_docs_explain():
    quick = [item for item in _data()["runs"] if item["chip"] in ("a100-80", "tpuv6e", "gb200")]
    rows = [_run(item) for item in quick]
    assert len(rows) == 4
    assert all(row["within_15"] for row in rows)


def test_an_unknown_generation_is_refused():
    with pytest.raises(InvalidInputError, match="TPU v9"):
        backtest(["TPU v9"])
