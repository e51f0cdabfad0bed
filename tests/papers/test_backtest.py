"""The back-test on real generations."""

import json
import re

import pytest

import phaze_fast as pf
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import EVERY_AREA
from phaze_fast.papers.backtest import (
    _chip,
    _data,
    _run,
    backtest,
    generation_names,
    generation_space,
)


def test_the_real_chip_is_in_the_space_around_it_and_nothing_is_larger():
    rates = {"TPU v4": (6, 50e9), "H100": (18, 25e9)}
    for item in (item for item in _data()["generations"] if item["name"] in rates):
        chip = _chip(item)
        assert (chip.links.count, chip.links.bandwidth_bytes_per_s) == rates[item["name"]]
        space = generation_space(chip)
        assert space.area_mm2.max() <= pf.area(chip, EVERY_AREA).total_mm2 * (1 + 1e-6)
        watts = pf.hardware.power_batch([chip], terms=EVERY_AREA)[0]
        drawn = pf.hardware.power_batch(space.chips, terms=EVERY_AREA)
        slowed = space.chips["clock_hz"] < chip.clock_hz * (1 - 1e-9)
        assert (drawn[~slowed] <= watts * (1 + 1e-6)).all()
        assert 0 < slowed.sum() < len(space)
        row = chip.to_row()
        own = [k for k in range(len(space)) if _same(space.chips[k], row)]
        assert len(own) == 1
        assert space[own[0]].hbm == chip.hbm


def _same(record, row):
    return all(record[name] == pytest.approx(value, rel=1e-9) for name, value in row.items())


@pytest.mark.slow
def test_generations_are_searched_and_compared(tmp_path):
    out, page = tmp_path / "found.json", tmp_path / "found.html"
    command = ["study", "backtest", "A100", "H100", "--report", str(page), "--json", "-o", str(out)]
    assert main(command) == 0
    found = json.loads(out.read_text())
    text = page.read_text()
    assert "Timeline: GPUs" in text
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S)[1])
    (timeline,) = figures.values()
    assert len(timeline["data"]) == 10  # five features, built and best
    rows = found["generations"]
    assert [row["name"] for row in rows] == ["A100", "H100"]
    for row in rows:
        assert row["regret"] >= 1.0
        assert 1 <= row["rank"] <= row["chips"]
        assert row["sources"]
        assert (row["rank"] == 1) == (row["regret"] < 1 + 1e-8)
    assert found["directions"][0]["to"] == "H100"
    assert {"hbm_bytes_per_flop", "link_bytes_per_s"} <= set(found["directions"][0]["agree"])


def test_every_generation_and_run_has_a_source():
    assert {"TPU v2", "Ironwood", "A100", "B200"} <= set(generation_names())
    assert all(item["sources"] for item in _data()["generations"])
    assert all(item["source"] and item["note"] for item in _data()["runs"])


def test_published_runs_come_out_within_fifteen_points():
    quick = [item for item in _data()["runs"] if item["chip"] != "h100"]
    rows = [_run(item) for item in quick]
    assert len(rows) == 10
    assert all(row["within_15"] for row in rows)
    assert {row["chip"] for row in rows} >= {"tpuv5p", "tpuv6e", "ironwood", "a100-80", "gb200"}


def test_an_unknown_generation_is_refused():
    with pytest.raises(InvalidInputError, match="TPU v9"):
        backtest(["TPU v9"])
