"""Other methods of search: each follows its rule, keeps to its budget and repeats itself exactly."""

import itertools
import math
import random
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import phaze_fast as pf
from phaze_fast import tables
from phaze_fast.errors import InvalidInputError, InvalidTypeError, MissingExtraError
from phaze_fast.explore import Explorer
from phaze_fast.hardware import AreaLimit, SpaceSpec
from phaze_fast.papers import searches
from phaze_fast.papers.searches import (
    bayesian,
    early_stop,
    exact_evaluator,
    random_search,
    walk_down,
)
from phaze_fast.tables import non_dominated

GIB = 2**30
POD = pf.Cluster(devices=8, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=32, micro_batch=1, tp=(1, 2), schedule="1f1b")


def small(**changes):
    """14 chips with two capacities each, of 48 grid points."""
    given = {
        "name": "small",
        "base": pf.presets.chip("phaze-tpuv4"),
        "axes": {
            "tensor_core.count": (8, 16, 32),
            "tensor_core.width": (32, 64, 128, 256),
            "buffer.capacity_bytes": (32 * 2**20, 64 * 2**20),
            "hbm.capacity_bytes": (8 * GIB, 4 * GIB),
        },
        "ties": {"vector_core.lanes": "tensor_core.width"},
        "area": AreaLimit(max_mm2=280.0, min_fraction=0.27),
    }
    return pf.ArchitectureSpace(SpaceSpec(**given | changes))


@pytest.fixture(scope="module")
def space():
    return small()


@pytest.fixture(scope="module")
def exact(space):
    return exact_evaluator(pf.models.load("bertlarge"), space, POD, STEP)


@pytest.fixture(scope="module")
def scores(exact):
    return exact.scores(range(len(exact.groups)))


# ---- the early stop ----


def plain_walk(areas, times, order):
    """The published rule, one chip at a time."""
    buckets = {}
    for chip in order:
        buckets.setdefault(int(areas[chip] / 0.01), []).append(chip)
    seen, bests = [], []
    for bucket in sorted(buckets, reverse=True):
        best = -1.0
        for chip in buckets[bucket]:
            seen.append(chip)
            if times[chip] < math.inf:
                best = max(best, 1.0 / times[chip])
        bests.append(best)
        last = bests[-5:]
        if len(last) == 5 and all(a >= b for a, b in itertools.pairwise(last)):
            break
    return seen


def test_the_walk_follows_the_published_rule():
    for seed in range(200):
        dice = random.Random(seed)
        count = dice.randint(1, 60)
        areas = np.array(
            [1 + dice.choice((0.003, 0.01, 0.1)) * dice.randint(0, 60) for _ in range(count)]
        )
        times = np.array(
            [dice.choice((1.0, 2.0, 3.0, dice.random() + 0.5, math.inf)) for _ in range(count)]
        )
        order = np.array(dice.sample(range(count), count))
        asked = []

        def scores(chips, asked=asked, times=times):
            asked.extend(chips.tolist())
            return times[chips]

        seen = walk_down(areas, scores, order)
        assert seen.tolist() == plain_walk(areas, times, order.tolist())
        assert asked == seen.tolist()  # nothing is asked for that the rule does not look at


def test_early_stop_takes_the_best_of_what_it_looks_at(exact, scores):
    found = early_stop(exact)
    areas, records = exact.groups.area_mm2, exact.groups.records
    order = sorted(
        range(len(areas)),
        key=lambda d: tuple(
            -int(records[name][d]) for name in ("tensor_cores", "tensor_width", "buffer_bytes")
        ),
    )
    seen = plain_walk(areas, scores, order)
    assert found.evaluations == len(seen)
    assert found.group == min(seen, key=lambda d: scores[d])
    assert found.score == scores[seen].min() == found.winner.score
    assert f"{len(seen)} of {len(areas)} chips" in found.note


# ---- random and Bayesian ----


def same(a, b):
    assert [(n, s) for n, _, s in a.history] == [(n, s) for n, _, s in b.history]
    assert (a.group, a.score, a.evaluations, a.note) == (b.group, b.score, b.evaluations, b.note)


def test_random_search_repeats_itself_and_keeps_to_its_budgets(exact, scores):
    found = random_search(exact, 6, seed=3)
    same(found, random_search(exact, 6, seed=3))
    assert found.evaluations == 6
    assert found.score == scores[found.group] >= scores.min()
    everything = random_search(exact, 1000, seed=1)
    assert everything.evaluations == len(exact.groups)
    assert everything.score == scores.min()


def test_a_search_stops_when_its_time_is_up(exact, monkeypatch):
    monkeypatch.setattr(searches, "_RANDOM_AT_ONCE", 1)
    ticks = itertools.count()
    monkeypatch.setattr(searches, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    found = random_search(exact, 14, time_limit_s=5.5)  # two looks at the clock for each chip
    assert [(n, spent) for n, spent, _ in found.history] == [(1, 1.0), (2, 3.0), (3, 5.0)]
    assert found.best_by(seconds=math.inf) == found.score
    assert found.best_by(evaluations=0) == math.inf
    assert random_search(exact, 14, time_limit_s=1e-9).evaluations == 1


@pytest.mark.parametrize(
    ("given", "named"), [({"count": 0}, "count"), ({"count": 1, "time_limit_s": 0}, "time_limit_s")]
)
def test_budgets_are_checked(exact, space, given, named):
    with pytest.raises(InvalidInputError, match=named):
        random_search(exact, **given)
    with pytest.raises(InvalidInputError, match=named):
        bayesian(exact, space, **given)


def test_nothing_that_fits_is_a_result(space):
    tight = small(axes={**space.spec.axes, "hbm.capacity_bytes": (2 * GIB,)})
    found = random_search(exact_evaluator(pf.models.load("llama2-7b"), tight, POD, STEP), 3)
    assert (found.group, found.winner, found.score) == (None, None, math.inf)
    assert "none of the 3 chips it looked at fits" in found.note


@pytest.mark.extras
def test_bayesian_search_repeats_itself_and_counts_new_chips_alone(exact, space, scores):
    pytest.importorskip("optuna")
    found = bayesian(exact, space, 7, seed=5)
    same(found, bayesian(exact, space, 7, seed=5))
    assert found.evaluations == 7
    assert found.score == scores[found.group]


@pytest.mark.extras
def test_bayesian_search_ends_when_nothing_new_comes(exact, space, monkeypatch):
    optuna = pytest.importorskip("optuna")
    monkeypatch.setattr(searches, "_STALE", 40)
    before = optuna.logging.get_verbosity()
    found = bayesian(exact, space, 1000, seed=0)
    assert found.evaluations == len(exact.groups) or "brought none" in found.note
    assert optuna.logging.get_verbosity() == before


def test_what_is_no_chip_is_worse_the_further_it_is_off(exact, space):
    axes = searches._Axes(space, exact.groups)
    assert list(axes.axes) == ["tensor_core.count", "tensor_core.width", "buffer.capacity_bytes"]
    members = {axes.chip((a, b, c)) for a in range(3) for b in range(4) for c in range(2)}
    assert members - {None} == set(range(len(exact.groups)))
    assert axes.chip((2, 3, 1)) is axes.chip((1, 3, 1)) is None
    assert axes.off((2, 3, 1)) > axes.off((1, 3, 1)) > 0
    small_chip, chip = (0, 0, 0), (0, 2, 1)
    assert axes.off(small_chip) > 0  # below the least area
    assert axes.chip(chip) is not None
    assert axes.off(chip) == 0
    hot = searches._Axes(space, exact.groups)
    hot.spec = small(max_power_w=20.0).spec
    assert hot.off((1, 3, 1)) > axes.off((1, 3, 1))


@pytest.mark.extras
def test_bayesian_search_wants_the_space_of_the_chips(exact):
    pytest.importorskip("optuna")
    one = small(axes={"hbm.capacity_bytes": (8 * GIB, 4 * GIB)})
    with pytest.raises(InvalidInputError, match="space: its axes tell"):
        bayesian(exact, one, 3)


def test_without_optuna_the_extra_is_named(exact, space, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(tables, "import_module", missing)
    with pytest.raises(MissingExtraError, match=r"pip install 'phaze-fast\[opt\]'"):
        bayesian(exact, space, 3)


# ---- ask and tell ----


@pytest.fixture
def explorer(space):
    return Explorer(pf.models.load("bertlarge"), space, POD, STEP)


def test_bounds_hold_and_the_loop_finds_the_best(explorer, exact, scores):
    told = explorer.evaluate(range(len(explorer.space)))
    for each in told:
        assert each.point.bound_s <= each.score
        assert each.winner is None or each.winner.chip == each.point.index
    for group, chips in enumerate(exact.groups.chip):
        assert min(told[c].score for c in chips) == scores[group]
    values = np.array([[t.score, t.area_mm2] for t in told])
    fitting = np.flatnonzero(np.isfinite(values[:, 0]))
    front = fitting[non_dominated(values[fitting])]
    assert sorted(t.point.index for t in explorer.front) == front.tolist()
    assert explorer.ask(3) == []
    assert explorer.done


def test_asking_gives_what_is_most_promising_and_was_not_told(explorer, scores):
    first = explorer.ask(4)
    assert first == explorer.ask(4)
    assert [p.bound_s for p in first] == sorted(p.bound_s for p in first)
    assert first[0].bound_s == explorer.bounds_s.min()
    assert set(first[0].values) == set(explorer.space.spec.axes)
    assert explorer.find(first[0].values) == first[0]
    certain = Explorer(pf.models.load("bertlarge"), explorer.space, POD, STEP)
    assert not certain.done
    certain.tell([(first[3], explorer.bounds_s.min())])  # no other point can be faster
    assert certain.done
    explorer.tell([(first[0], 9.0), (first[1].index, math.inf)])
    assert explorer.ask(2) == first[2:]
    assert explorer.best.point == first[0]
    while not explorer.done:
        explorer.evaluate(explorer.ask(2))
    assert explorer.best.score <= np.sort(scores)[1]


def test_points_that_fit_nothing_are_not_the_best(explorer):
    explorer.tell([(point, math.inf) for point in explorer.ask(2)])
    assert explorer.best is None
    assert explorer.front == []


def test_several_models_are_bounded_by_their_mean(space):
    models = [pf.models.load(name) for name in ("bertlarge", "gpt2-small")]
    explorer = Explorer(models, space, POD, STEP, weights=(3, 1))
    alone = [Explorer(model, space, POD, STEP).bounds_s for model in models]
    assert explorer.bounds_s == pytest.approx(alone[0] ** 0.75 * alone[1] ** 0.25)
    (told,) = explorer.evaluate(explorer.ask(1))
    assert told.point.bound_s <= told.score
    assert len(told.winner.plans) == 2
    with pytest.raises(InvalidInputError, match="models, weights: 2 and 1"):
        Explorer(models, space, POD, STEP, weights=(1,))


def test_what_is_told_is_checked(explorer):
    point, other = explorer.ask(2)
    for batch, error, words in (
        ([(999, 1.0)], InvalidInputError, "point: 999 is unknown"),
        ([("a", 1.0)], InvalidTypeError, "point: 'a'"),
        ([(point, math.nan)], InvalidInputError, f"time_s of point {point.index}: nan"),
        ([(point, 0.0)], InvalidInputError, "more than 0 seconds"),
        ([(point, "1")], InvalidTypeError, "expected seconds"),
        ([(other, 1.0), (other, 2.0)], InvalidInputError, "given twice"),
        (
            [(type(point)(point.index, other.values, 0.1), 1.0)],
            InvalidInputError,
            "is unknown; in this",
        ),
        ([(other, 1.0), (point, -1.0)], InvalidInputError, "time_s of point"),
    ):
        with pytest.raises(error, match=words):
            explorer.tell(batch)
    assert explorer.told == []  # a batch is taken whole or not at all
    assert explorer.best is None
    explorer.tell([(point, 1.0)])
    for again in (lambda: explorer.tell([(point, 1.0)]), lambda: explorer.evaluate([point])):
        with pytest.raises(InvalidInputError, match=f"point: {point.index} was told before"):
            again()
    for n, error in ((0, InvalidInputError), (1.5, InvalidTypeError)):
        with pytest.raises(error, match="n: "):
            explorer.ask(n)


def test_values_of_axes_are_checked(explorer):
    values = dict(explorer.ask(1)[0].values)
    for changes, words in (
        ({"tensor_core.widht": 3}, "did you mean 'tensor_core.width'"),
        ({"tensor_core.width": 33}, "expected one of 32, 64, 128, 256"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            explorer.find({**values, **changes})
    del values["tensor_core.count"]
    with pytest.raises(InvalidInputError, match="'tensor_core.count' is missing"):
        explorer.find(values)
    biggest = {field: max(axis) for field, axis in explorer.space.spec.axes.items()}
    assert explorer.find(biggest) is None


EXAMPLE = Path(__file__).parents[2] / "examples" / "optuna_search.py"


@pytest.mark.extras
@pytest.mark.checkout
def test_the_example_runs(capsys):
    pytest.importorskip("optuna")
    done = subprocess.run(
        [sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60, check=True
    )
    assert "proven" in done.stdout


@pytest.mark.checkout
def test_the_example_skips_politely_without_optuna(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLE))
    assert stopped.value.code == 0
    assert "phaze-fast[opt]" in capsys.readouterr().out
