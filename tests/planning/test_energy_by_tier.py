"""Energy of a plan: published power under training load, its tiers, and one figure everywhere."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import phaze_fast as pf
from phaze_fast.cost.machines import machines
from phaze_fast.hardware import energy_table, energy_table_of, presets
from phaze_fast.planning.energy import energy_by_tier

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = list(csv.DictReader((GOLDEN / "published_power.csv").read_text("utf-8").splitlines()))
STEP = pf.Training(global_batch=64, micro_batch=8, tp=1, pp=1)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["chip"])
def test_power_under_training_load_is_as_published(row):
    cluster = pf.Cluster(devices=int(row["devices"]), fabric=row["fabric"], chip=row["chip"])
    for chip in (cluster.chip, cluster.chip.replace(power_w=None)):  # without help of the limit too
        free = cluster.replace(chip=chip)
        best = pf.plan(row["model"], free, pf.Training(**json.loads(row["training"]))).best
        assert best.device_w == pytest.approx(float(row["watts"]), rel=0.15)
    assert len(row["source"]) > 40


def test_chips_are_published_and_one_constant_is_fitted_to_one_of_them():
    assert len({row["chip"] for row in ROWS}) >= 6
    assert [row["chip"] for row in ROWS if "fitted" in row["use"]] == ["a100-40"]


@pytest.mark.parametrize(("chip", "fabric"), [("tpuv4", "tpuv4-pod"), ("h100", "dgx-h100")])
def test_tiers_add_up_to_the_step_and_idle_power_to_its_time(chip, fabric):
    cluster = pf.Cluster(devices=8, fabric=fabric, chip=chip)
    bare = cluster.replace(chip=presets.chip(chip).replace(power_w=None))
    best = pf.plan("bert-large", bare, STEP).best
    tiers = energy_by_tier("bert-large", bare, best)
    assert sum(tiers.values()) == pytest.approx(best.energy_j, rel=1e-9)
    assert [tier for tier, joules in tiers.items() if joules <= 0] == ["die_to_die", "stacked"]
    idle = machines(bare.chip).idle_w
    for name, watts in idle.items():
        assert tiers[name] == pytest.approx(float(watts[0]) * best.time_s * 8, rel=1e-9)


def test_a_chip_draws_no_more_than_its_rated_power():
    bare = presets.chip("h100").replace(power_w=None)
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip=bare)
    free = pf.plan("bert-large", cluster, STEP).best
    for limit_w in (0.5 * free.device_w, 2.0 * free.device_w):
        limited = cluster.replace(chip=bare.replace(power_w=limit_w))
        best = pf.plan("bert-large", limited, STEP).best
        assert best.time_s == free.time_s
        assert best.device_w == pytest.approx(min(limit_w, free.device_w), rel=1e-9)
        tiers = energy_by_tier("bert-large", limited, best)
        assert sum(tiers.values()) == pytest.approx(best.energy_j, rel=1e-9)


def test_energy_of_a_product_by_hand():
    chip = presets.chip("a100-40")
    table, (row,) = energy_table_of(7.0), machines(chip).prices
    share = 2.553e14 / (0.888 * chip.peak_flops())  # of the clock, under long products
    volts = (0.55 + (share - 0.5) / 0.5 * 0.2) / 0.75  # of the rated voltage
    assert row["mac_j"] == pytest.approx((0.59e-12 + table.core_cycle_j / 1024) * volts**2)
    idle = machines(chip).idle_w
    assert idle["leakage"][0] == pytest.approx(826 * 0.015 * volts)
    assert idle["clock"][0] == pytest.approx(826 * 0.081 * 1.41 * share * volts**2)
    assert idle["hbm_background"][0] == pytest.approx(5 * 7.5)
    assert machines(chip).limit_w[0] == 400.0


def test_chips_of_several_nodes_are_priced_each_by_its_own():
    both = machines(["tpuv3", "tpuv4"])
    for k, name in enumerate(("tpuv3", "tpuv4")):
        alone = machines(name)
        assert both.energy[k] == alone.energy[0]
        assert both.static_w[k] == alone.static_w[0]
    assert both.energy["mac_j"][0] > both.energy["mac_j"][1]
    circuits = energy_table("7nm")
    assert energy_table_of(5.0).mac_j == circuits.mac_j
    assert np.isfinite(both.limit_w).all()


def test_devices_that_stay_idle_count_in_no_tier():
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    spec = {"tp": 1, "dp": 4, "micro_batch": 4, "global_batch": 64, "idle": True}
    predicted = pf.predict("gpt2-small", cluster, spec)
    tiers = energy_by_tier("gpt2-small", cluster, predicted)
    assert sum(tiers.values()) == pytest.approx(predicted.energy_j, rel=1e-9)
