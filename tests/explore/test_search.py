"""The search: proven answers, budgets, journal, cache, front, several models."""

import contextlib
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from case_counts import slow_or_thorough

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.find import find_chips
from phaze_fast.explore.goals import front_of
from phaze_fast.explore.problem import problems_of
from phaze_fast.explore.result import Budget
from phaze_fast.runs import store
from phaze_fast.runs.store import STORE

SPACE = pf.ArchitectureSpace.published()
POD = pf.Cluster(devices=16, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=64, micro_batch=(1, 2), tp=(1, 2), schedule="1f1b")


def some(seed, count=60):
    picked = np.random.default_rng(seed).choice(len(SPACE), count, replace=False)
    return SPACE[np.sort(picked)]


def model(name="bert-large"):
    return pf.models.load(name)


def exhaustive(space, name="bert-large", cluster=POD, step=STEP):
    """Every chip of a space by `plan` itself: (time, area, chip), best first, each chip once
    whatever its HBM."""
    best = {}
    for i in range(len(space)):
        plans = pf.plan(model(name), cluster.replace(chip=space[i]), step, top=1).plans
        if plans:
            record = space.chips[i].copy()
            record["hbm_bytes"] = 1
            row = (plans[0].time_s, float(space.area_mm2[i]), i)
            best[record.tobytes()] = min(best.get(record.tobytes(), row), row)
    return sorted(best.values())


def test_the_best_ten_are_those_of_trying_every_chip():
    space = some(1, 24)
    found = pf.search(model(), space, POD, STEP, top=10)
    wanted = exhaustive(space)[:10]
    assert found.status == "optimal"
    assert found.gap == 0.0
    assert [(d.time_s, d.area_mm2) for d in found.top] == [row[:2] for row in wanted]
    assert found.bound == wanted[0][0]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_small_memory_and_every_schedule(schedule):
    spec = SPACE.spec.replace(
        axes={**SPACE.spec.axes, "hbm.capacity_bytes": (3.0 * 2**30, 6.0 * 2**30)}
    )
    whole = pf.ArchitectureSpace(spec)
    space = whole[np.sort(np.random.default_rng(5).choice(len(whole), 10, replace=False))]
    step = pf.Training(global_batch=32, micro_batch=4, schedule=schedule, zero=(0, 3))
    found = pf.search(model("gpt2-small"), space, POD, step, top=4)
    wanted = exhaustive(space, "gpt2-small", POD, step)[:4]
    assert [(d.time_s, d.area_mm2) for d in found.top] == [row[:2] for row in wanted]


def everything(space, cluster=POD, step=STEP, name="bert-large"):
    """Time, area, energy and HBM of every chip and strategy, by placing all of them."""
    groups = ChipGroups.of(space)
    (problem,) = problems_of([model(name)], groups, cluster, step)
    rows = []
    for s in range(len(problem.evaluator)):
        times, least = problem.schedule(s, groups.records)
        limits = np.where(groups.chip >= 0, np.inf, -np.inf)
        for group, placed in enumerate(problem.evaluator.best(s, times, least, limits)):
            for c, plan in enumerate(placed):
                if plan.layout >= 0:
                    (joules,) = problem.evaluator.energies_j([plan], times, [group])
                    hbm = float(groups.capacities[c])
                    rows.append((plan.time_s, float(groups.area_mm2[group]), float(joules), hbm))
    return np.array(rows)


@pytest.mark.parametrize(
    "names", [("time", "area"), ("time", "energy"), ("time", "area", "energy", "hbm")]
)
def test_the_front_is_that_of_all_points(names):
    space = some(2, 40)
    found = pf.search(model(), space, POD, STEP, top=3, pareto=names)
    columns = {"time": 0, "area": 1, "energy": 2, "hbm": 3}
    values = everything(space)[:, [columns[name] for name in names]]
    wanted = {tuple(row) for row in values[front_of(values)].tolist()}
    keys = {"time": "time_s", "area": "area_mm2", "energy": "energy_j", "hbm": "hbm_bytes"}
    got = {tuple(float(row[keys[name]]) for name in names) for row in found.pareto().rows}
    assert got == wanted
    fewer = found.pareto("time", names[1])
    assert 0 < len(fewer) <= len(found.pareto())


def test_threads_and_executors_change_nothing():
    space = some(3)
    ask = {"top": 5, "pareto": ("time", "area")}
    alone = find_chips([model()], space, POD, STEP, **ask)
    threaded = find_chips([model()], space, POD, STEP, threads=2, **ask)
    with ThreadPoolExecutor(2) as pool:
        pooled = find_chips([model()], space, POD, STEP, executor=pool, **ask)
    for other in (threaded, pooled):
        assert other.winners == alone.winners
        assert other.front == alone.front
        assert other.counts == alone.counts


def test_huge_weights_are_only_weights():
    space, both = some(15, 10), [model(), model("gpt2-small")]
    plain = find_chips(both, space, POD, STEP, weights=(1, 1))
    huge = pf.search(both, space, POD, STEP, weights=(1e308, 1e308))
    assert huge.outcome.winners == plain.winners
    assert huge.best.samples_per_s == pytest.approx(64 / huge.best.time_s, rel=1e-12)


def test_why_nothing_fits_is_said_as_plan_says_it():
    for free, said in (({"tp": 3}, "does not divide"), ({"pp": 24}, "stages")):
        step = pf.Training(global_batch=64, micro_batch=1, **free)
        found = pf.search(model(), some(16, 5), POD, step)
        assert found.status == "infeasible"
        assert found.outcome.counts["memory"] == 0
        assert said in found.reason


def test_several_models_share_one_chip():
    space, names = some(4, 30), ("bert-large", "gpt2-small")
    found = pf.search([model(n) for n in names], space, POD, STEP, top=3, weights=(2, 1))
    each = [pf.evaluate_batch(model(n), space, POD, STEP).time_s for n in names]
    score = np.exp((2 * np.log(each[0]) + np.log(each[1])) / 3)
    assert found.status == "optimal"
    assert found.best.time_s == pytest.approx(score.min(), rel=1e-12)
    assert set(found.best.plans) == set(names)
    assert [found.best.plans[n].time_s for n in names] == [e[found.best.index] for e in each]


def test_threads_share_chips_out_and_change_nothing():
    space = some(8, 48)
    one, two = (pf.evaluate_batch(model(), space, POD, STEP, threads=n) for n in (1, 3))
    for name, values in one.to_dict().items():
        assert (values == getattr(two, name)).all(), name
    assert one.feasible.any()


def test_a_batch_is_what_plan_says_of_each_chip():
    space = some(6, 12)
    found = pf.evaluate_batch(model(), space, POD, STEP)
    for i in range(len(space)):
        best = pf.plan(model(), POD.replace(chip=space[i]), STEP, top=1).best
        assert found.time_s[i] == best.time_s
        assert (found.tp[i], found.pp[i], found.dp[i]) == (best.tp, best.pp, best.dp)
        assert found.recompute[i] == best.recompute
    again = pf.evaluate_batch(model(), [space[i] for i in range(12)], POD, STEP)
    assert again.time_s.tolist() == found.time_s.tolist()
    records = pf.evaluate_batch(model(), space.chips, POD, STEP)
    assert records.energy_j.tolist() == found.energy_j.tolist()


def test_what_does_not_fit_is_a_result():
    found = pf.search(model("gpt3-175b"), some(7, 8), POD, STEP)
    assert found.status == "infeasible"
    assert "no chip" in found.reason
    assert found.to_dict()["reason"] == found.reason
    assert not pf.evaluate_batch(model("gpt3-175b"), some(7, 8), POD, STEP).feasible.any()


@pytest.mark.parametrize("budget", [Budget(max_points=1), Budget(time_limit_s=0.0)])
def test_a_budget_gives_an_honest_gap(budget):
    space = some(8)
    stopped = find_chips([model()], space, POD, STEP, budget=budget, top=20)
    true = find_chips([model()], space, POD, STEP, top=20).winners[0].score
    assert stopped.status in ("feasible", "unknown")
    assert stopped.bound <= true
    settled = {k: v for k, v in stopped.counts.items() if k != "open"}
    assert stopped.counts["open"] > 0
    assert sum(settled.values()) + stopped.counts["open"] == stopped.points
    if stopped.winners:
        assert stopped.winners[0].score >= true
        assert stopped.gap >= stopped.winners[0].score / true - 1.0


def test_bad_questions_say_why():
    space = some(9, 5)
    for arguments, words in (
        ({"top": 0}, "top: 0"),
        ({"pareto": ("time", "aera")}, "area"),
        ({"pareto": ("area",)}, "leaves out time"),
        ({"weights": (1.0, 2.0)}, "one for each of 1 models"),
        ({"weights": (-1.0,)}, "expected a number > 0"),
        ({"executor": "desk"}, "dask"),
        ({"top": 2.5}, "top: 2.5"),
        ({"pareto": ("time",)}, "another as well"),
        ({"time_limit_s": float("nan")}, "time_limit_s: nan"),
        ({"max_points": -3}, "points: -3"),
        ({"cluster": "tpuv4-pod"}, "cluster: str"),
        ({"training": {}}, "training: dict"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            pf.search(model(), **{"space": space, "cluster": POD, "training": STEP, **arguments})
    with pytest.raises(InvalidInputError, match="energy"):
        pf.search([model(), model("gpt2-small")], space, POD, STEP, pareto=("time", "energy"))
    with pytest.raises(InvalidInputError, match="a name twice"):
        pf.search([model(), model()], space, POD, STEP)
    with pytest.raises(InvalidInputError, match="model: int"):
        pf.search(3, space, POD, STEP)
    with pytest.raises(InvalidInputError, match="found: int"):
        pf.compare(3)
    with pytest.raises(InvalidInputError, match="was asked for none"):
        pf.search(model(), space, POD, STEP).pareto("time")


def test_an_outcome_is_kept_and_a_damaged_one_is_not_trusted(tmp_path):
    ask = {"cache": tmp_path, "pareto": ("time", "area")}
    space = some(10, 20)
    first = find_chips([model()], space, POD, STEP, **ask)
    again = find_chips([model()], space, POD, STEP, **ask)
    assert again.recalled
    assert again == replace(first, recalled=True)  # seconds and history as well
    with contextlib.closing(sqlite3.connect(tmp_path / STORE)) as file, file:
        file.execute("UPDATE results SET value = replace(value, 'time_s', 'time_z')")
    anew = find_chips([model()], space, POD, STEP, **ask)
    assert not anew.recalled
    assert anew.winners == first.winners
    assert find_chips([model()], space, POD, STEP, **ask).recalled


def test_an_outcome_of_another_cost_model_is_not_found(tmp_path, monkeypatch):
    space = some(10, 5)
    assert not find_chips([model()], space, POD, STEP, cache=tmp_path).recalled
    assert find_chips([model()], space, POD, STEP, cache=tmp_path).recalled
    with monkeypatch.context() as patch:
        patch.setattr(store, "pricing_fingerprint", lambda: b"a changed cost model")
        assert not find_chips([model()], space, POD, STEP, cache=tmp_path).recalled
        assert find_chips([model()], space, POD, STEP, cache=tmp_path).recalled
    assert find_chips([model()], space, POD, STEP, cache=tmp_path).recalled


def test_a_cache_that_cannot_be_used_is_a_note(tmp_path):
    space = some(10, 5)
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / STORE).write_bytes(b"\xff\xfe not ours " * 500)
    (tmp_path / "folder" / STORE).mkdir(parents=True)
    for folder, said in (
        ("file", "is not a directory"),
        ("other", "the file of something else"),
        ("folder", "Is a directory"),
    ):
        found = find_chips([model()], space, POD, STEP, cache=tmp_path / folder)
        assert found.status == "optimal"
        assert any(said in note for note in found.notes), found.notes
    assert (tmp_path / "other" / STORE).read_bytes().startswith(b"\xff\xfe not ours")


KILLED = """
import os, sys
import phaze_fast as pf
from phaze_fast.explore import plan_cache
from phaze_fast.explore.find import find_chips
import numpy as np

put, left = plan_cache.PlanCache.put, [int(sys.argv[2])]
def counted(self, answers):
    put(self, answers)
    with open(sys.argv[1] + ".asked", "a") as file:
        file.write("x")
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), 9)
plan_cache.PlanCache.put = counted
space = pf.ArchitectureSpace.published()
space = space[np.sort(np.random.default_rng(11).choice(len(space), 30, replace=False))]
pod = pf.Cluster(devices=16, fabric="tpuv4-pod")
step = pf.Training(global_batch=64, micro_batch=(1, 2), tp=(1, 2), schedule="1f1b")
found = find_chips([pf.models.load("bert-large")], space, pod, step, resume=sys.argv[1])
print(repr([(w.score, w.chip, w.energy_j) for w in found.winners]))
"""


@pytest.mark.slow
def test_a_search_that_is_killed_twice_goes_on(tmp_path):
    def run(folder, until):
        words = [sys.executable, "-c", KILLED, str(folder), str(until)]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    whole = run(tmp_path / "whole", 0)
    assert whole.returncode == 0, whole.stderr
    asked = len((tmp_path / "whole.asked").read_text())
    assert asked >= 4
    out = tmp_path / "cut"
    for until in (1, 2):
        assert run(out, until).returncode == -signal.SIGKILL
    last = run(out, 0)
    assert last.stdout == whole.stdout
    assert len(Path(f"{out}.asked").read_text()) == asked  # nothing was placed again
    results = out / "results.jsonl"
    lines = results.read_bytes().splitlines(keepends=True)
    results.write_bytes(b"".join(lines[:-1]) + lines[-1][:-20])  # torn, and mended
    assert run(out, 0).stdout == whole.stdout


def test_a_directory_of_something_else_is_refused(tmp_path):
    space = some(12, 5)
    find_chips([model()], space, POD, STEP, resume=tmp_path / "a")
    with pytest.raises(InvalidInputError, match=r"manifest\.json"):
        find_chips([model()], some(13, 5), POD, STEP, resume=tmp_path / "a")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match="cannot be used"):
        find_chips([model()], space, POD, STEP, resume=tmp_path / "file")


def test_other_methods_and_what_moves_the_winner():
    space = some(14, 30)
    found = pf.search(model(), space, POD, STEP, top=2)
    told = []
    beside = pf.compare(found, "tpuv4", sensitivity=True, say=told.append)
    assert set(beside.baselines) == {"hand_plan", "megatron_plan", "our_plan"}
    ours = beside.baselines["our_plan"]
    assert ours["speedup"] == ours["time_s"] / found.best.time_s
    moved = {(row["what"], row["factor"]): row for row in beside.sensitivity}
    assert moved["HBM bandwidth", 2.0]["time_s"] <= found.best.time_s
    assert moved["HBM bandwidth", 0.5]["time_s"] >= found.best.time_s
    assert moved["fabric bandwidth", 0.5]["time_s"] >= found.best.time_s
    assert told
    with pytest.raises(InvalidInputError, match="baselines"):
        pf.compare(found, "spotlight")


@slow_or_thorough(15, 50)
def test_fifty_parts_of_the_published_space_against_every_chip(cases):
    """Best, top ten and front, bit for bit, with one and two threads."""
    rng = np.random.default_rng(50)
    names = ["bert-large", "gpt2-small", "vit-b16"]
    for trial in range(cases):
        space = some(1000 + trial, 200)
        cluster = pf.Cluster(devices=int(rng.choice([2, 4])), fabric="tpuv4-pod")
        step = pf.Training(
            global_batch=8,
            micro_batch=(1, 2),
            tp=1,
            schedule=str(rng.choice(["1f1b", "zero-bubble"])),
            zero=int(rng.choice([0, 1, 3])),
        )
        name = names[trial % len(names)]
        given = ([model(name)], space, cluster, step)
        found = find_chips(*given, top=10, pareto=("time", "area"))
        two = find_chips(*given, top=10, pareto=("time", "area"), threads=2)
        assert (two.winners, two.front) == (found.winners, found.front)
        rows = everything(space, cluster, step, name)
        best = {}
        for time_s, area, *_ in rows.tolist():
            best[area] = min(best.get(area, math.inf), time_s)
        # Chips of one area are rare here; where there are some, times alone are compared.
        times = sorted(best.values())[:10]
        got = [w.score for w in found.winners]
        assert got[0] == times[0]
        assert set(times) <= set(got) | set(times[len(set(times)) - 1 :])
        front = {tuple(r) for r in rows[:, :2][front_of(rows[:, :2])].tolist()}
        assert {(p.score, p.area_mm2) for p in found.front} == front


@pytest.mark.slow
def test_the_published_space_is_proven():
    began = time.monotonic()
    found = pf.search("bert-large", threads=os.cpu_count() or 1, top=10)
    assert found.status == "optimal"
    assert found.outcome.points == 29_360 * 3 * 16
    assert found.best.time_s == pytest.approx(0.018123, rel=1e-4)
    assert time.monotonic() - began < 600
