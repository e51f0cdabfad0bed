"""Objectives, fronts and pairs of chips: plain loops, brute force over chips, refusals."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from case_counts import slow_ones, some_or_many
from search_cases import few_groups, published_space, some_with_every_hbm

import phaze_fast as pf
from phaze_fast.cli.main import main
from phaze_fast.cost.machines import machines
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import (
    OBJECTIVES,
    UNITS,
    BestFirstSearch,
    ChipGroups,
    best_pair,
    find_chips,
    objectives,
    portfolio,
    problems_of,
)
from phaze_fast.explore.best_first import LimitedSearch, first_of, first_of_parts
from phaze_fast.explore.objectives import BestGroups, Front, Objective, ScoreTable
from phaze_fast.explore.portfolio import _PairSearch
from phaze_fast.hardware.package import Prices, RunningCosts
from phaze_fast.tables import non_dominated

CLUSTER = pf.Cluster(devices=8, fabric="tpuv4-pod")
MODEL = pf.models.load("gpt2-small")
STEP = {"global_batch": 32, "seq": 256}
MICROBATCHES, WIDTHS = (1, 4), (1, 2)


# ---- fronts and waves ----


def random_points(rng, count, width):
    """Points of which some tie in some objectives or in all, and some are infinite."""
    points = rng.integers(0, 2 + int(rng.integers(1, 40)), (count, width)).astype(float)
    if rng.random() < 0.5:
        points += rng.random(points.shape).round(int(rng.integers(0, 3)))
    points[rng.random(points.shape) < 0.03] = np.inf
    return points


def at_most(one, other):
    return all(a <= b for a, b in zip(one, other, strict=True))


def plain_front(points):
    """Positions of the non-dominated points, of equal ones the first, by comparing all pairs."""
    rows = list(enumerate(points.tolist()))
    return [
        k
        for k, own in rows
        if not any(at_most(row, own) and (row != own or other < k) for other, row in rows)
    ]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_non_dominated_rows_are_those_of_a_plain_loop(width):
    rng = np.random.default_rng(width)
    for count, _ in itertools.product((0, 1, 2, 7, 30, 60), range(5)):
        points = random_points(rng, count, width)
        assert non_dominated(points).tolist() == plain_front(points)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_below_s_is_the_least_time_of_points_at_most_another(width):
    rng = np.random.default_rng(100 + width)
    bounded = unbounded = 0
    for count, asked in itertools.product((0, 1, 5, 9, 40, 150), (0, 1, 50)):
        front = Front.empty(OBJECTIVES[:width])
        points = random_points(rng, count, width)
        for k, values in enumerate(points):
            front.add((k,), values)
        assert sorted(p for (p,) in front.points) == plain_front(points)
        others = random_points(rng, asked, width - 1)
        wanted = [
            min((row[0] for row in points.tolist() if at_most(row[1:], other)), default=np.inf)
            for other in others.tolist()
        ]
        assert front.below_s(others).tolist() == wanted
        bounded += int(np.isfinite(wanted).sum())
        unbounded += int(np.isinf(wanted).sum())
    assert bounded > 50
    assert unbounded > 20


def test_below_s_does_not_depend_on_the_size_of_its_blocks(monkeypatch):
    rng = np.random.default_rng(7)
    points, others = rng.random((500, 3)), rng.random((200, 2))
    front = Front.empty(("time", "area", "energy"))
    for k, values in enumerate(points):
        front.add((k,), values)
    whole = front.below_s(others)
    for first, comparisons in ((1, 1), (3, 700), (10_000, 10_000)):
        monkeypatch.setattr(objectives, "_FIRST_BLOCK", first)
        monkeypatch.setattr(objectives, "_COMPARISONS", comparisons)
        assert front.below_s(others).tolist() == whole.tolist()


def test_the_first_of_parts_are_those_of_all_in_the_same_order():
    rng = np.random.default_rng(11)
    for _ in range(300):
        sizes = rng.integers(0, 30, int(rng.integers(0, 6)))
        parts = [rng.integers(0, 12, size).astype(float) for size in sizes]
        listed = [(key, number, at) for number, p in enumerate(parts) for at, key in enumerate(p)]
        count = int(rng.integers(0, 40))
        wanted = sorted(listed)[:count]
        owners, at = first_of_parts(iter(parts), count)
        assert owners.tolist() == [number for _, number, _ in wanted]
        assert at.tolist() == [place for _, _, place in wanted]
        if count:
            together = np.concatenate([np.zeros(0), *parts])
            offsets = np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(int)
            assert first_of(together, count).tolist() == [offsets[n] + a for _, n, a in wanted]


# ---- objectives of the best chips ----


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


@pytest.mark.parametrize("weights", [(1.0, 2.0), (3.0, 1.0, 0.5)])
def test_a_value_at_its_limit_takes_the_score_to_the_limit(weights):
    rng, table = np.random.default_rng(4), ScoreTable(weights, (1, 1))
    least = [np.exp(rng.uniform(-5, 5, 40)) for _ in weights]
    limit = np.exp(rng.uniform(-3, 3, 40))
    for model in range(len(weights)):
        values = [*least]
        values[model] = table.limits(model, least, limit)
        assert np.allclose(table.combined(values), limit, rtol=1e-6)


def brute_force(space):
    """Seconds and joules of the fastest plan of each chip under each strategy."""
    found = []
    for micro_batch, width in itertools.product(MICROBATCHES, WIDTHS):
        step = pf.Training(**STEP, micro_batch=micro_batch, tp=width)
        rows = pf.evaluate_batch(MODEL, space, CLUSTER, step, threads=1)
        found.append((rows.time_s, rows.energy_j))
    return found


@pytest.mark.parametrize("seed", slow_ones(range(3), 1, 2))
def test_the_best_chip_of_every_objective_is_that_of_brute_force(seed):
    space = some_with_every_hbm(seed, 12)
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
    groups = ChipGroups.of(some_with_every_hbm(7, 20))
    step = pf.Training(**STEP, micro_batch=MICROBATCHES, tp=WIDTHS)
    problems = problems_of([MODEL], groups, CLUSTER, step)
    search = BestFirstSearch(problems, groups, objective=name)
    objective = search.objective
    (table,), everything = search.tables, np.arange(len(groups))
    least = []
    for level in (1, 2, 3):
        for s in range(len(table.problem)):
            table.bound(s, everything, level)
        least.append(objective.least(0, table, everything))
        assert np.array_equal(np.isinf(least[-1]), np.isinf(table.least[:, everything]))
        assert (least[-1] >= least[max(level - 2, 0)]).all()
    tightest = 0.0
    for s in range(len(table.problem)):
        table.schedule(s, everything)
        below = np.where(search.exists, np.inf, -np.inf)
        for answer in table.place(s, everything, below):
            where = (answer.group, answer.capacity)
            value = objective.value(0, *where, answer.placed.time_s, answer.energy_j)
            for bounds in least:
                assert bounds[s, answer.group] <= value
            tightest = max(tightest, least[-1][s, answer.group] / value)
            # A plan within the seconds that its own value allows is never pruned.
            most = np.full((1, search.exists.shape[1]), value)
            seconds = objective.seconds(0, s, table, np.array([answer.group]), most)
            assert answer.placed.time_s <= seconds[0, answer.capacity]
    assert tightest > 0.7


def test_a_score_at_its_limit_is_within_it():
    groups = ChipGroups.of(some_with_every_hbm(8, 6))
    step = pf.Training(**STEP, micro_batch=MICROBATCHES, tp=WIDTHS)

    def limited(limits):
        problems = problems_of([MODEL], groups, CLUSTER, step)
        return LimitedSearch(problems, groups, limits).exact()

    exact, bounds = limited(np.full(len(groups), np.inf))
    assert np.isfinite(exact).any()
    assert np.array_equal(exact, bounds)
    assert np.array_equal(limited(exact)[0], exact)
    just_below, above = limited(exact * (1.0 - 1e-9))
    assert np.isinf(just_below).all()
    assert (above <= exact).all()


def test_a_mix_of_models_is_the_geometric_mean_of_their_values():
    models = [MODEL, pf.models.load("bert-large").replace(seq=256)]
    space = some_with_every_hbm(3, 6)
    step = pf.Training(**STEP, micro_batch=1, tp=1)
    for name in ("area", "tokens"):
        found = pf.search(models, space, CLUSTER, step, objective=name, weights=[2, 1], threads=1)
        logs = []
        for model in models:
            rows = pf.evaluate_batch(model, space, CLUSTER, step, threads=1)
            logs.append(np.log(by_hand(name, space, rows.time_s, rows.energy_j)))
        mean = np.exp((2 * logs[0] + logs[1]) / 3)
        assert found.best.index == int(np.argmin(mean))
        assert math.isclose(found.best.value, mean.min(), rel_tol=1e-12)


def test_values_and_limits_of_an_objective_by_hand():
    """Two capacities for the first group, one for the second; 3 devices at least, of 2 and 1 W."""
    groups = few_groups(2, (8, 16)).single(np.array([0, 1]), np.array([0, 1]))
    step = pf.Training(**STEP, micro_batch=1, tp=1, pp=2, dp=2)
    problems = problems_of([MODEL], groups, CLUSTER, step)
    found = objectives.objective_of("cost", problems, few_groups(2, (8, 16)))
    assert found.least_rates[0].tolist() == found.rates[0].min(axis=1).tolist()
    assert found.least_rates[0].tolist() == found.rates[0][:, 0].tolist()
    joules = objectives.objective_of("energy", problems, groups)
    static_w = machines(groups.records, like=groups.like).static_w
    assert joules.devices[0].tolist() == [4.0]  # though the cluster has 8
    assert (joules.static_w < static_w).all()
    assert joules.static_w == pytest.approx(static_w, rel=1e-8, abs=0.0)
    given = Objective(
        "tokens", (np.array([[10.0, 20.0], [30.0, 40.0]]),), (5.0,), (np.array([10.0, 40.0]),),
        np.array([2.0, 1.0]), (np.array([3.0]),),
    )  # fmt: skip
    table = SimpleNamespace(
        least=np.array([[4.0, np.inf]]), dynamic=np.array([[6.0, 0.0]]), energy=np.array([[7.0, 0]])
    )
    assert given.value(0, 1, 0, 2.0, 3.0) == 30.0 * 2.0 + 5.0 * 3.0
    ((least, none),) = given.least(0, table, np.array([0, 1]))
    exact = 10.0 * 4.0 + 5.0 * (6.0 + 3.0 * 2.0 * 4.0)
    assert none == np.inf
    assert least < exact
    assert least == pytest.approx(exact, rel=1e-8)
    ((seconds, more),) = given.seconds(0, 0, table, np.array([0]), np.array([[exact, 230.0]]))
    assert seconds > 4.0
    assert [seconds, more] == pytest.approx([4.0, (230.0 - 30.0) / 50.0], rel=1e-8)
    table.energy[0, 0] = 40.0  # with the static power that layers take for certain
    assert given.least(0, table, np.array([0]))[0, 0] == pytest.approx(10.0 * 4.0 + 5.0 * 40.0)


def test_the_limit_is_the_last_of_the_best_scores():
    best = BestGroups(2)
    for group, score, limit, least in (
        (7, 5.0, np.inf, 5.0), (7, 6.0, np.inf, 5.0), (7, 4.0, np.inf, 4.0), (3, 9.0, 9.0, 4.0),
        (2, 10.0, 9.0, 4.0), (2, 9.0, 9.0, 4.0), (2, 3.0, 4.0, 3.0), (3, 3.5, 3.5, 3.0),
    ):  # fmt: skip
        best.note(group, score)
        assert (best.limit, best.best) == (limit, least), (group, score)
    assert best.scores == {7: 4.0, 3: 3.5, 2: 3.0}


def test_limits_of_models_leave_room_for_rounding():
    rng, table = np.random.default_rng(3), ScoreTable((1.0, 1.0), (1, 1))
    values = [np.exp(rng.uniform(-5, 5, 40)) for _ in range(2)]
    for model in range(2):
        limits = table.limits(model, values, table.combined(values))
        assert (limits > values[model] * (1.0 + 1.5e-12)).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": "watts"}, "objective: 'watts' is not accepted"),
        ({"objective": "energy", "pareto": ("time", "area")}, "not accepted with pareto"),
        ({"weights": [0.0]}, "weights: 0.0 is not accepted; expected a number > 0"),
        ({"objective": "cost", "uncertainty": "default"}, "not accepted with uncertainty"),
    ],
)
def test_other_objectives_are_refused_in_one_line(options, said):
    step = pf.Training(**STEP, micro_batch=1)
    with pytest.raises(InvalidInputError, match=said) as error:
        pf.search(MODEL, published_space()[:3], CLUSTER, step, **options)
    assert "\n" not in str(error.value)


def test_objectives_of_a_front_may_be_one_text():
    assert objectives.checked_objectives(" area, time,,time") == ("area", "time")


# ---- the best two chips ----

PAIR_STEP = pf.Training(**STEP, micro_batch=4, tp=1)
MODELS = ["gpt2-small", "bert-large", "opt-1.3b"]


@pytest.mark.parametrize(("seed", "objective"), [(0, "time"), (1, "cost"), (2, "area")])
def test_the_pair_is_that_of_brute_force(seed, objective):
    space, weights = some_with_every_hbm(seed, 8), [1.0, 2.0, 1.5]
    asked = {"weights": weights, "objective": objective, "threads": 1}
    found = pf.search(MODELS, space, CLUSTER, PAIR_STEP, portfolio=True, **asked)
    rows = [pf.evaluate_batch(model, space, CLUSTER, PAIR_STEP, threads=1) for model in MODELS]
    usd = Prices().device_usd(space.area_mm2, space.chips["hbm_bytes"].astype(float)) * 8
    per_s = {"time": 1.0, "area": space.area_mm2 * 8, "cost": usd}[objective]
    logs = np.log([row.time_s * per_s for row in rows])
    shares = np.array(weights) / sum(weights)
    best = min(
        float(shares @ np.minimum(logs[:, a], logs[:, b]))
        for a, b in itertools.combinations_with_replacement(range(len(space)), 2)
    )
    pair = found.portfolio
    assert pair.proven
    assert math.isclose(pair.value, math.exp(best), rel_tol=1e-9)
    assert math.isclose(pair.bound, pair.value, rel_tol=1e-9)
    assert math.isclose(pair.single_value, math.exp((shares @ logs).min()), rel_tol=1e-9)
    assert pair.gain >= 1.0 - 1e-12
    assert 0.0 < pair.seconds < 3600.0
    assert sorted(name for names in pair.models for name in names) == sorted(MODELS)
    # The chips named have the values said, each for its models.
    places = [next(k for k, c in enumerate(space) if c == chip) for chip in pair.chips]
    of_chip = {n: k for k, names in zip(places, pair.models, strict=True) for n in names}
    own = sum(w * logs[i, of_chip[m]] for i, (m, w) in enumerate(zip(MODELS, shares, strict=True)))
    assert math.isclose(math.exp(own), pair.value, rel_tol=1e-9)


def test_values_beyond_their_limits_are_in_no_better_division():
    """By plain loops over divisions: with its limit as value, a model is in one that is as good."""
    rng = np.random.default_rng(5)
    for models, groups in itertools.product((2, 3), (1, 2, 4)):
        search = object.__new__(_PairSearch)
        search.least = rng.random((models, groups)) + 0.5
        search.weights = np.array([0.5, 0.3, 0.2])[:models]
        numbers = np.arange(2**models)
        search.members = (numbers[:, None] >> np.arange(models)) & 1 == 1
        search.rest = 2**models - 1 - numbers
        logs, weights, everyone = np.log(search.least), search.weights, set(range(models))

        def least(own, group, logs=logs, weights=weights):
            return sum(weights[k] * logs[k, group] for k in own)

        every = [
            min(least(beside, group) for group in range(groups))
            + min(least(everyone - set(beside), group) for group in range(groups))
            for size in range(1, models)
            for beside in itertools.combinations(everyone, size)
        ]
        alone = min(least(everyone, group) for group in range(groups))
        assert search.bound() == pytest.approx(min(*every, alone), rel=1e-12)
        best = float(rng.normal(0.0, 0.3))
        for i, group in itertools.product(range(models), range(groups)):
            others = everyone - {i}
            divisions = [
                least(beside, group)
                + min(least(others - set(beside), other) for other in range(groups))
                for size in range(models)
                for beside in itertools.combinations(sorted(others), size)
            ]
            limit = float(search.limits(i, best)[group])
            reached = min(divisions) + weights[i] * math.log(limit)
            assert math.isclose(reached, best, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("name", ["time", "area"])
def test_a_model_is_evaluated_up_to_its_limits(name):
    groups = ChipGroups.of(some_with_every_hbm(8, 8))
    problems = problems_of([MODEL] * 2, groups, CLUSTER, PAIR_STEP)
    exact = LimitedSearch(problems[:1], groups, np.full(8, np.inf), objective=name).exact()[0]
    search = _PairSearch(problems, groups, (1.0, 1.0), name, 1)
    rooflines, at = search.seconds[0].copy(), np.array([1, 2, 4, 7])
    limits = exact[at] * (1.0, 0.5, 1.0 - 1e-10, 2.0)
    search.evaluate(0, at, limits)
    assert search.evaluations == 2
    assert np.flatnonzero(search.known[0]).tolist() == [1, 7]
    assert (
        search.exact[0, [1, 7]].tolist()
        == search.least[0, [1, 7]].tolist()
        == exact[[1, 7]].tolist()
    )
    assert (limits[1:3] <= search.least[0, [2, 4]]).all()
    assert (search.least[0, [2, 4]] <= exact[[2, 4]]).all()
    if name == "time":
        assert (search.seconds[0][:, at].min(axis=0) <= exact[at]).all()
    assert (search.seconds[0] > rooflines)[0, at].tolist() == [True, False, True, True]
    assert not search.known[0, [0, 3]].any()


def test_chips_on_which_no_pair_is_better_are_not_looked_at():
    problems = problems_of([MODEL] * 2, few_groups(2, (16,)), CLUSTER, PAIR_STEP)
    search, asked = _PairSearch(problems, few_groups(2, (16,)), (1.0, 1.0), "time", 1), []
    search.evaluate = lambda i, at, _: asked.append((i, at.tolist()))
    search.known = np.array([[True, False], [True, False]])
    search.exact = np.array([[1.0, np.inf], [1.0, np.inf]])
    search.least = np.ones((2, 2))
    assert not search.wave(64)
    search.least[1, 1] = 0.9
    assert search.wave(64)
    assert asked == [(0, [1]), (1, [1])]  # the first as well: both may run on the second chip


def test_the_first_chip_of_a_space_may_be_the_best_for_all():
    space, asked = some_with_every_hbm(1, 6), {"objective": "cost", "threads": 1}
    models = [pf.models.load(name) for name in MODELS[:2]]
    best = find_chips(models, space, CLUSTER, PAIR_STEP, **asked).winners[0]
    fewer = space[best.chip :]
    first = find_chips(models, fewer, CLUSTER, PAIR_STEP, **asked).winners[0]
    pair = best_pair(models, fewer, CLUSTER, PAIR_STEP, single=first, **asked)
    assert (first.chip, first.score) == (0, best.score)
    assert pair.chips == (space[best.chip],)
    assert pair.value == pytest.approx(best.score, rel=1e-12)


@pytest.mark.parametrize(
    ("limit_s", "say", "lines", "proven"),
    [(0.0, True, 0, False), (1.0, True, 1, True), (1.0, False, 0, True)],
)
def test_a_pair_is_searched_for_while_time_is_left(monkeypatch, limit_s, say, lines, proven):
    monkeypatch.setattr(portfolio, "time", SimpleNamespace(monotonic=lambda: 100.0))
    models, space = [pf.models.load(name) for name in MODELS[:2]], some_with_every_hbm(1, 4)
    best = find_chips(models, space, CLUSTER, PAIR_STEP).winners[0]
    said = []
    pair = best_pair(
        models, space, CLUSTER, PAIR_STEP, single=best, time_limit_s=limit_s,
        say=said.append if say else None,
    )  # fmt: skip
    assert (pair.proven, pair.seconds) == (proven, 0.0)
    assert len(said) >= lines
    assert bool(said) == bool(lines)


@some_or_many(1, 3)
def test_a_pair_without_time_has_a_bound_at_most_the_best(cases):
    models, below = [pf.models.load(name) for name in MODELS[:2]], 0
    for seed, objective in itertools.product(range(cases), ("time", "area")):
        space, asked = some_with_every_hbm(seed, 30), {"objective": objective, "threads": 1}
        best = find_chips(models, space, CLUSTER, PAIR_STEP, **asked).winners[0]
        given = (models, space, CLUSTER, PAIR_STEP)
        proven = best_pair(*given, single=best, **asked)
        cut = best_pair(*given, single=best, time_limit_s=0.0, **asked)
        assert (proven.proven, cut.proven) == (True, False)
        assert cut.bound <= proven.value * (1 + 1e-9)
        assert proven.value <= cut.value * (1 + 1e-9)
        assert cut.gain >= 1.0 - 1e-12  # the best single chip is looked at first
        below += cut.bound < cut.value
    assert below


@pytest.mark.slow
def test_one_model_has_no_pair_and_the_command_writes_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PHAZE_FAST_CACHE", str(tmp_path))
    with pytest.raises(InvalidInputError, match="portfolio: 1 models are not accepted") as error:
        pf.search("gpt2-small", published_space()[:3], CLUSTER, PAIR_STEP, portfolio=True)
    assert "\n" not in str(error.value)
    out = tmp_path / "found.json"
    options = "--devices 8 --global-batch 32 --seq 256 --micro-batch 4 --tp 1 --hbm 32 --quiet"
    options += " --space examples/small_space.yaml --objective area --portfolio --json -o"
    assert main(["search", *MODELS[:2], *options.split(), str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["objective"] == {"name": "area", "unit": "mm2 s a step"}
    assert document["portfolio"]["proven"] is True
    assert document["portfolio"]["gain"] >= 1.0
