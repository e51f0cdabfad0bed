"""Objectives other than time: brute force, bounds, several models, refusals."""

import itertools
import math

import numpy as np
import pytest

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import UNITS, ChipGroups, objective_of, problems_of
from phaze_fast.explore.best_first import BestFirstSearch
from phaze_fast.hardware.price import Prices, RunningCosts

SPACE = pf.ArchitectureSpace.published()
CLUSTER = pf.Cluster(devices=8, fabric="tpuv4-pod")
MODEL = pf.models.load("gpt2-small")
STEP = {"global_batch": 32, "seq": 256}
MICROBATCHES, WIDTHS = (1, 4), (1, 2)


def part(seed, count=12):
    """Chips of the published space, whatever their size, with every HBM."""
    rng = np.random.default_rng(seed)
    first = 3 * rng.choice(len(SPACE) // 3, count, replace=False)
    return SPACE[np.sort((first[:, None] + np.arange(3)).reshape(-1))]


def by_hand(name, space, times, joules):
    """Value of every chip by the formulas of the docs."""
    usd = Prices().device_usd(space.area_mm2, space.chips["hbm_bytes"].astype(float)) * 8
    tokens, costs = 1e12 / (32 * 256), RunningCosts()
    paid = 4 * 365.25 * 86400 * 0.9
    return {
        "time": times,
        "energy": joules,
        "area": times * space.area_mm2 * 8,
        "cost": times * usd,
        "tokens": tokens * (times * usd / paid + joules * 0.08 / 3.6e6 * costs.overhead),
    }[name]


def brute_force(space):
    """Seconds and joules of the fastest plan of each chip under each strategy."""
    found = []
    for micro_batch, width in itertools.product(MICROBATCHES, WIDTHS):
        step = pf.Training(**STEP, micro_batch=micro_batch, tp=width)
        rows = pf.evaluate_batch(MODEL, space, CLUSTER, step, threads=1)
        found.append((rows.time_s, rows.energy_j))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_best_chip_of_every_objective_is_that_of_brute_force(seed):
    space = part(seed)
    points = brute_force(space)
    winners = set()
    step = pf.Training(**STEP, micro_batch=MICROBATCHES, tp=WIDTHS)
    for name in UNITS:
        found = pf.search(MODEL, space, CLUSTER, step, objective=name, top=1, threads=1)
        values = [by_hand(name, space, *point) for point in points]
        assert found.status == "optimal"
        assert math.isclose(found.best.value, min(v.min() for v in values), rel_tol=1e-12)
        own = min(v[found.best.index] for v in values)
        assert math.isclose(own, found.best.value, rel_tol=1e-12)
        assert found.bound <= found.best.value
        winners.add(found.best.index)
        assert found.to_dict()["objective"] == {"name": name, "unit": UNITS[name]}
    assert len(winners) > 1  # objectives disagree, or the test says little


@pytest.mark.parametrize("name", ["area", "cost", "energy", "tokens"])
def test_every_bound_is_below_the_value_it_bounds(name):
    groups = ChipGroups.of(part(7, 20))
    step = pf.Training(**STEP, micro_batch=MICROBATCHES, tp=WIDTHS)
    problems = problems_of([MODEL], groups, CLUSTER, step)
    objective = objective_of(name, problems, groups)
    search = BestFirstSearch(problems, groups, objective=objective)
    (table,), everything = search.tables, np.arange(len(groups))
    least = []
    for level in (1, 2, 3):
        for s in range(len(table.problem)):
            table.bound(s, everything, level)
        least.append(objective.least(0, table, everything))
        assert (least[-1] >= least[max(level - 2, 0)]).all()
    telling = 0.0
    for s in range(len(table.problem)):
        table.schedule(s, everything)
        below = np.where(search.exists, np.inf, -np.inf)
        for answer in table.place(s, everything, below):
            where = (answer.group, answer.capacity)
            value = objective.value(0, *where, answer.placed.time_s, answer.energy_j)
            for bounds in least:
                assert bounds[s, answer.group] <= value
            telling = max(telling, least[-1][s, answer.group] / value)
            # A plan within the seconds that its own value allows is never left out.
            most = np.full((1, search.exists.shape[1]), value)
            seconds = objective.seconds(0, s, table, np.array([answer.group]), most)
            assert answer.placed.time_s <= seconds[0, answer.capacity]
    assert telling > 0.7


def test_a_mix_of_models_is_the_geometric_mean_of_their_values():
    models = [MODEL, pf.models.load("bert-large").replace(seq=256)]
    space = part(3, 6)
    step = pf.Training(**STEP, micro_batch=1, tp=1)
    for name in ("area", "tokens"):
        found = pf.search(models, space, CLUSTER, step, objective=name, weights=[2, 1], threads=1)
        each = []
        for model in models:
            rows = pf.evaluate_batch(model, space, CLUSTER, step, threads=1)
            each.append(by_hand(name, space, rows.time_s, rows.energy_j))
        mean = np.exp((2 * np.log(each[0]) + np.log(each[1])) / 3)
        assert found.best.index == int(np.argmin(mean))
        assert math.isclose(found.best.value, mean.min(), rel_tol=1e-12)


def test_objectives_that_are_none_are_refused_in_one_line():
    step = pf.Training(**STEP, micro_batch=1)
    for options, said in (
        ({"objective": "watts"}, "objective: 'watts' is not accepted"),
        ({"objective": "energy", "pareto": ("time", "area")}, "not accepted with pareto"),
        ({"objective": "cost", "uncertainty": "default"}, "not accepted with uncertainty"),
    ):
        with pytest.raises(InvalidInputError, match=said) as error:
            pf.search(MODEL, SPACE[:3], CLUSTER, step, **options)
        assert "\n" not in str(error.value)
