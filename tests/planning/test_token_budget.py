"""Token budgets by hand; goodput against a simulated run that fails at random."""

import math

import numpy as np
import pytest
from golden_files import refused_calls

from phaze_fast.errors import InvalidInputError
from phaze_fast.planning import goodput, optimal_interval_s, training_run
from tests.reference.goodput import simulate

DAY = 86400.0


# ---- goodput ----


@pytest.mark.parametrize(
    ("hours", "minutes"), [(24.0, 117.0), (6.0, 57.0), (0.25, 9.1)], ids=["fig3", "fig4", "fig5"]
)
def test_the_best_interval_is_dalys(hours, minutes):
    """Daly 2006, figures 3 to 5: dumps of 5 minutes."""
    assert optimal_interval_s(300.0, hours * 3600) / 60 == pytest.approx(minutes, rel=0.01)


def test_the_best_interval_is_youngs_where_checkpoints_are_short():
    for checkpoint in (1e-6, 1e-3, 1.0):
        mtbf = 1e7
        young = math.sqrt(2 * checkpoint * mtbf)
        assert optimal_interval_s(checkpoint, mtbf) == pytest.approx(young, rel=1e-3)
    assert optimal_interval_s(1e-9, 1e9) == pytest.approx(math.sqrt(2.0), rel=1e-8)
    assert optimal_interval_s(0.0, 1e6) == 0.0
    assert optimal_interval_s(10.0, math.inf) == math.inf


def test_no_other_interval_is_better():
    rng = np.random.default_rng(3)
    for _ in range(300):
        devices = int(rng.integers(1, 30_000))
        rate = float(10 ** rng.uniform(-5, -1))
        checkpoint, restart = float(10 ** rng.uniform(-1, 3)), float(10 ** rng.uniform(0, 3.5))
        best = goodput(devices, rate, checkpoint, restart)
        for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
            other = goodput(devices, rate, checkpoint, restart, best.interval_s * factor)
            assert other.fraction <= best.fraction * (1 + 1e-12)


def test_by_hand():
    # One failure a day; 1,000 s of work and 100 s of checkpoint, 200 s of restart.
    found = goodput(10, 0.1, checkpoint_s=100.0, restart_s=200.0, interval_s=1000.0)
    segment = DAY * math.exp(200 / DAY) * (math.exp(1100 / DAY) - 1)
    assert found.fraction == pytest.approx(1000 / segment, rel=1e-12)
    assert found.checkpoint == pytest.approx(100 / segment, rel=1e-12)
    assert found.fraction + found.checkpoint + found.lost == pytest.approx(1.0, abs=1e-15)
    assert found.mtbf_s == DAY
    # To first order a failure costs a restart and half a segment.
    assert found.lost == pytest.approx((200 + 550) / DAY, rel=0.02)


@pytest.mark.parametrize(
    ("work", "checkpoint", "restart", "mtbf"),
    [
        (1000.0, 50.0, 200.0, 10_000.0),
        (300.0, 30.0, 600.0, 1500.0),
        (5000.0, 10.0, 0.0, 5000.0),
        (100.0, 0.0, 1000.0, 2000.0),
        (50.0, 100.0, 20.0, 400.0),
    ],
)
def test_a_simulated_run_keeps_as_much(work, checkpoint, restart, mtbf):
    simulated = simulate(work, checkpoint, restart, mtbf, segments=60_000, seed=11)
    found = goodput(1, DAY / mtbf, checkpoint, restart, work)
    assert found.fraction == pytest.approx(simulated, rel=0.02)


def test_limits():
    assert goodput(1024, 0.0).fraction == 1.0
    assert goodput(1024, 0.0, checkpoint_s=60.0).fraction == 1.0  # never written
    assert goodput(1024, 0.0, 60.0, interval_s=540.0).fraction == pytest.approx(0.9)
    assert goodput(1, 1.0, 0.0, 86.4).fraction == pytest.approx(math.exp(-1e-3))
    assert goodput(10**6, 1.0, 60.0, 3600.0).fraction == 0.0  # nothing ever passes
    assert goodput(1, 864.0, 1e5, interval_s=100.0).fraction == 0.0  # nor a long checkpoint
    assert goodput(1024, 0.0).to_dict()["mtbf_s"] is None


def test_laws_of_goodput():
    base = goodput(4096, 5e-4, 30.0, 300.0)
    assert goodput(8192, 2.5e-4, 30.0, 300.0) == base
    assert goodput(8192, 5e-4, 30.0, 300.0).fraction < base.fraction
    assert goodput(4096, 5e-4, 60.0, 300.0).fraction < base.fraction
    assert goodput(4096, 5e-4, 30.0, 600.0).fraction < base.fraction
    slower = goodput(2048, 5e-4, 60.0, 600.0)  # all times doubled
    assert slower.fraction == pytest.approx(base.fraction, rel=1e-12)
    assert slower.interval_s == pytest.approx(2 * base.interval_s, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"devices": 0}, "devices: 0 "),
        ({"failures_per_device_day": -1.0}, "failures_per_device_day: -1.0"),
        ({"checkpoint_s": float("nan")}, "checkpoint_s: nan"),
        ({"restart_s": float("inf")}, "restart_s: inf"),
        ({"interval_s": -5.0}, "interval_s: -5.0"),
        ({"interval_s": 0.0}, "interval_s: 0.0"),
    ],
)
def test_bad_numbers_of_goodput(change, said):
    good = {"devices": 8, "failures_per_device_day": 0.1, "checkpoint_s": 10.0, "restart_s": 10.0}
    with pytest.raises(InvalidInputError, match=said):
        goodput(**{**good, **change})


def test_bad_numbers_of_an_interval():
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidInputError, match="mtbf_s"):
            optimal_interval_s(1.0, bad)
    with pytest.raises(InvalidInputError, match="checkpoint_s"):
        optimal_interval_s(-1.0, 1.0)


# ---- budgets ----


def test_a_budget_by_hand():
    run = training_run(
        1_000_001,
        1000,
        step_s=36.0,
        devices=10,
        goodput=0.5,
        step_j=7.0e5,
        pue=1.2,
        usd_per_device_hour=2.0,
        usd_per_kwh=0.1,
    )
    assert run.steps == 1001
    seconds = 1001 * 36.0 / 0.5
    assert run.days == pytest.approx(seconds / DAY)
    assert run.device_hours == pytest.approx(10 * seconds / 3600)
    assert run.energy_j == pytest.approx(1001 * 7.0e5 / 0.5 * 1.2)
    assert run.energy_kwh == pytest.approx(run.energy_j / 3.6e6)
    assert run.usd == pytest.approx(run.device_hours * 2.0 + run.energy_kwh * 0.1)
    free = training_run(1_000_001, 1000, 36.0, 10, step_j=7.0)
    assert (free.energy_j, free.usd) == (7007.0, 0.0)


def test_llama_3_took_31_million_hours():
    """Model card: 30.84 M GPU-hours for 15 T tokens; at 400 TFLOP/s steps take 6.72 s."""
    run = training_run(15.6e12, 2048 * 8192, 6.72, 16_384, goodput=0.9)
    assert run.device_hours == pytest.approx(30.84e6, rel=0.04)


@pytest.mark.parametrize(("change", "said"), refused_calls("numbers of a token budget"))
def test_bad_numbers_of_a_budget(change, said):
    good = {"tokens": 1e9, "tokens_per_step": 1000, "step_s": 1.0, "devices": 8}
    with pytest.raises(InvalidInputError, match=said):
        training_run(**{**good, **change})
