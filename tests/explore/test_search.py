"""The search: proven answers, budgets, executors, journal, cache, front, several models."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from golden_files import refused_calls
from search_cases import published_space, some_chips, some_with_every_hbm

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import Budget, ChipGroups, find_chips, fullest_text, problems_of
from phaze_fast.explore.find import _checked_options, checked_weights, search_digest
from phaze_fast.explore.objectives import UNITS
from phaze_fast.runs import store
from phaze_fast.runs.store import STORE
from phaze_fast.tables import non_dominated

POD = pf.Cluster(devices=16, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=64, micro_batch=(1, 2), tp=(1, 2), schedule="1f1b")
TEN = {"top": 10, "pareto": ("time", "area")}


def model(name="bert-large"):
    return pf.models.load(name)


def outcome(space, **options):
    """Search for the usual model, cluster and step."""
    return find_chips([model()], space, POD, STEP, **options)


def test_chips_without_hbm_are_searched_with_their_sram_as_memory():
    base = {
        "name": "sram", "clock_hz": 1e9, "tensor_core": {"count": 4, "width": 128, "depth": 128},
        "vector_core": {"count": 8, "lanes": 64},
        "buffer": {"capacity_bytes": 2**28, "bytes_per_cycle": 32768.0},
    }  # fmt: skip
    axes = {"tensor_core.count": (2, 4), "buffer.capacity_bytes": (2**27, 2**28, 2**29)}
    space = pf.ArchitectureSpace(
        pf.hardware.SpaceSpec(name="few", base=pf.Accelerator.from_dict(base), axes=axes)
    )
    cluster = pf.Cluster(devices=64, fabric="dgx-h100")
    step = pf.Training(global_batch=64, reserved_bytes=0, zero=(0, 1))
    found = find_chips([model("gpt2-small")], space, cluster, step, top=6)
    assert found.status == "optimal"
    alone = [pf.plan("gpt2-small", cluster.replace(chip=chip), step, top=1) for chip in space]
    best = [plans.best.time_s if plans.plans else np.inf for plans in alone]
    times = {winner.chip: winner.time_s for winner in found.winners}
    assert times == {at: time_s for at, time_s in enumerate(best) if time_s < np.inf}
    assert len(times) < len(space)  # the smallest buffers hold no plan


def same(one, other):
    assert (one.winners, one.front, one.counts) == (other.winners, other.front, other.counts)


# ---- answers ----


def exhaustive(space, name, step):
    """Time and area of every chip by `plan` itself, best first; each chip with its best HBM."""
    best = {}
    for i in range(len(space)):
        plans = pf.plan(model(name), POD.replace(chip=space[i]), step, top=1).plans
        if plans:
            record = space.chips[i].copy()
            record["hbm_bytes"] = 1
            row = (plans[0].time_s, float(space.area_mm2[i]))
            best[record.tobytes()] = min(best.get(record.tobytes(), row), row)
    return sorted(best.values())


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_the_best_chips_are_those_of_trying_every_chip(schedule):
    spec = published_space().spec
    sizes = {**spec.axes, "hbm.capacity_bytes": (3.0 * 2**30, 6.0 * 2**30)}
    whole = pf.ArchitectureSpace(spec.replace(axes=sizes))
    space = whole[np.sort(np.random.default_rng(5).choice(len(whole), 12, replace=False))]
    step = pf.Training(global_batch=32, micro_batch=4, schedule=schedule, zero=(0, 3))
    found = pf.search(model("gpt2-small"), space, POD, step, top=6)
    wanted = exhaustive(space, "gpt2-small", step)[:6]
    assert [(d.time_s, d.area_mm2) for d in found.top] == wanted
    assert (found.status, found.gap, found.bound) == ("optimal", 0.0, wanted[0][0])


def test_a_front_of_fewer_objectives_is_a_part_of_the_front():
    found = pf.search(model(), some_chips(2, 40), POD, STEP, pareto=("time", "area", "energy"))
    rows = found.pareto().rows
    values = np.array([(row["time_s"], row["area_mm2"]) for row in rows])
    fewer = [(row["time_s"], row["area_mm2"]) for row in found.pareto("time", "area").rows]
    assert sorted(fewer) == sorted(map(tuple, values[non_dominated(values)].tolist()))
    assert 0 < len(fewer) < len(rows)


@pytest.mark.slow
def test_the_published_space_is_proven():
    began = time.monotonic()
    found = pf.search("bert-large", threads=os.cpu_count() or 1, top=10)
    assert found.status == "optimal"
    assert found.outcome.points == 29_360 * 3 * 16
    assert found.best.time_s == pytest.approx(0.017642, rel=1e-4)
    assert time.monotonic() - began < 600


def test_huge_weights_are_only_weights():
    space, both = some_chips(15, 10), [model(), model("gpt2-small")]
    assert checked_weights((1e308, 1.0), 2) == (1.0, 1e-308)
    plain = find_chips(both, space, POD, STEP, weights=(1, 1))
    huge = pf.search(both, space, POD, STEP, weights=(1e308, 1e308))
    assert huge.outcome.winners == plain.winners
    assert huge.best.samples_per_s == pytest.approx(64 / huge.best.time_s, rel=1e-12)
    assert 0.0 <= huge.outcome.history[0].seconds <= huge.outcome.seconds < 3600.0
    for name in ("bert-large", "gpt2-small"):
        assert f"\n{name}: {huge.best.plans[name]}" in str(huge.best)


def test_a_batch_is_what_plan_says_of_each_chip():
    space = some_chips(6, 12)
    batch = pf.evaluate_batch(model(), space, POD, STEP)
    for i in range(len(space)):
        best = pf.plan(model(), POD.replace(chip=space[i]), STEP, top=1).best
        assert batch.time_s[i] == best.time_s
        assert (batch.tp[i], batch.pp[i], batch.dp[i]) == (best.tp, best.pp, best.dp)
        assert batch.recompute[i] == best.recompute
        assert batch.devices[i] == best.devices
        share = f"{best.memory_bytes / best.limit_bytes:.0%}"
        assert fullest_text(best, int(best.limit_bytes)).endswith(f"({share})")
    again = pf.evaluate_batch(model(), [space[i] for i in range(12)], POD, STEP)
    assert again.time_s.tolist() == batch.time_s.tolist()
    records = pf.evaluate_batch(model(), space.chips, POD, STEP, threads=3)
    assert records.energy_j.tolist() == batch.energy_j.tolist()


# ---- no answer, or not the whole of it ----


def test_what_does_not_fit_is_a_result():
    found = pf.search(model("gpt3-175b"), some_chips(7, 8), POD, STEP)
    assert found.status == "infeasible"
    assert "no chip" in found.reason
    assert found.to_dict()["reason"] == found.reason
    assert not pf.evaluate_batch(model("gpt3-175b"), some_chips(7, 8), POD, STEP).feasible.any()
    reserved = STEP.replace(reserved_bytes="80 GiB")
    found = pf.search(model(), some_chips(7, 8), POD, reserved)
    assert (found.status, found.outcome.counts["memory"]) == ("infeasible", found.outcome.points)
    assert "reserved_bytes: 85899345920" in found.reason
    assert not pf.evaluate_batch(model(), some_chips(7, 8), POD, reserved).feasible.any()
    for free, said in (({"tp": 3}, "does not divide"), ({"pp": 24}, "stages")):
        step = pf.Training(global_batch=64, micro_batch=1, **free)
        found = pf.search(model(), some_chips(16, 5), POD, step)
        assert found.status == "infeasible"
        assert found.outcome.counts["memory"] == 0
        assert said in found.reason


@pytest.mark.parametrize("budget", [Budget(max_points=1), Budget(time_limit_s=0.0)])
def test_a_budget_gives_an_honest_gap(budget):
    space = some_chips(8)
    stopped = outcome(space, budget=budget, top=20)
    best = outcome(space, top=20).winners[0].score
    assert stopped.status in ("feasible", "unknown")
    assert stopped.bound <= best
    assert stopped.counts["open"] > 0
    assert sum(stopped.counts.values()) == stopped.points
    if stopped.winners:
        assert stopped.winners[0].score >= best
        assert stopped.gap == stopped.winners[0].score / stopped.bound - 1.0
    placed = stopped.history[-1].placed
    again = outcome(space, budget=Budget(max_points=placed), top=20)
    assert again.history[-1].placed == placed


@pytest.mark.parametrize(("options", "words"), refused_calls("search"))
def test_bad_options_are_named(options, words):
    usual = {"model": model(), "space": some_chips(9, 5), "cluster": POD, "training": STEP}
    with pytest.raises(InvalidInputError, match=words):
        pf.search(**{**usual, **options})


@pytest.mark.parametrize(
    ("names", "options", "wanted"),
    [
        (["bert-large"], {}, ((), (1.0,))),
        (["bert-large"], {"pareto": ("time", "energy")}, (("time", "energy"), (1.0,))),
        (["bert-large"], {"objective": "cost"}, ((), (1.0,))),
        (["bert-large", "gpt2-small"], {}, ((), (1.0, 1.0))),
        (["bert-large", "gpt2-small"], {"pareto": "time,cost"}, (("time", "cost"), (1.0, 1.0))),
        (["bert-large", "gpt2-small"], {"weights": (1, 4.0)}, ((), (0.25, 1.0))),
        (["bert-large"], {"top": 0}, "top: 0 is not accepted"),
        (["bert-large"], {"top": True}, "top: True is not accepted"),
        (["bert-large"], {"top": 2.0}, "top: 2.0 is not accepted"),
        (["bert-large"], {"weights": (1, 1)}, "weights: 2 are not accepted; expected one for each"),
        (["bert-large"], {"weights": (0,)}, "weights: 0 is not accepted; expected a number > 0"),
        (["bert-large"], {"weights": (-1.0,)}, "weights: -1.0 is not accepted"),
        (["bert-large"], {"weights": (np.inf,)}, "weights: inf is not accepted"),
        (["bert-large"], {"weights": (np.nan,)}, "weights: nan is not accepted"),
        (["bert-large"], {"weights": ("1",)}, "weights: '1' is not accepted"),
        (["bert-large"] * 2, {}, "model: bert-large, bert-large has a name twice"),
        (["bert-large", "gpt2-small"], {"pareto": ("time", "energy")}, "pareto: energy is not acc"),
        (
            ["bert-large"],
            {"objective": "cost", "pareto": "time,area"},
            "objective: cost is not acc",
        ),
    ],
)
def test_options_are_checked_before_a_search(names, options, wanted):
    usual = {"top": 1, "pareto": (), "weights": None, "objective": "time"}
    given = {"models": [model(name) for name in names], **usual, **options}
    if isinstance(wanted, tuple):
        assert _checked_options(**given) == wanted
        return
    with pytest.raises(InvalidInputError, match=wanted):
        _checked_options(**given)


@pytest.mark.parametrize(
    "step",
    [{"offload": ("optimizer",)}, {"recompute": ("none", "offload")}, {"recompute": ("offload",)}],
)
def test_chips_without_a_host_offload_nothing(step):
    with pytest.raises(InvalidInputError, match="offload: is not accepted where chips are search"):
        problems_of([model()], ChipGroups.of(some_chips(1, 1)), POD, STEP.replace(**step))


def test_every_chip_counts_for_what_breaks_a_rule():
    groups = ChipGroups.of(some_with_every_hbm(1, 3))
    (problem,) = problems_of([model()], groups, POD, STEP.replace(tp=(1, 3, 5)))
    assert problem.evaluators[0].strategies_rejected == 4
    assert problem.rejected_points(groups) == 4 * 9
    assert problem.rejected_points(groups.take(np.array([0]))) == 4 * 3


def test_what_was_not_searched_for_is_refused():
    with pytest.raises(InvalidInputError, match="found: int"):
        pf.compare(3)
    with pytest.raises(InvalidInputError, match="this search has none"):
        pf.search(model(), some_chips(9, 5), POD, STEP).pareto("time")


# ---- threads, executors ----


def test_threads_and_executors_change_nothing():
    space = some_chips(3)
    alone = outcome(space, **TEN)
    same(outcome(space, threads=2, **TEN), alone)
    with ThreadPoolExecutor(2) as pool:
        same(outcome(space, executor=pool, **TEN), alone)
    one, two = (pf.evaluate_batch(model(), space, POD, STEP, threads=n) for n in (1, 3))
    for name, values in one.to_dict().items():
        assert (values == getattr(two, name)).all(), name


@pytest.mark.slow
def test_a_search_in_other_processes_finds_the_same():
    space = some_chips(1, 80)
    same(outcome(space, executor="processes", threads=2, **TEN), outcome(space, **TEN))


@pytest.mark.extras
@pytest.mark.slow
def test_a_search_through_dask_finds_the_same_though_a_worker_dies():
    distributed = pytest.importorskip("distributed")
    import dask

    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 3}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as cluster,
    ):
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        for seed in range(3):
            space = some_chips(seed, 80)
            same(outcome(space, executor=address, **TEN), outcome(space, **TEN))
        pids = list(distributed.Client(cluster).run(os.getpid).values())
        killer = threading.Timer(0.5, os.kill, (pids[0], signal.SIGKILL))
        killer.start()
        space = some_chips(9, 300)
        there = outcome(space, top=10, executor=address)
        killer.join()
        same(there, outcome(space, top=10))


# ---- cache and journal ----


def test_an_outcome_is_kept_and_a_damaged_one_is_not_trusted(tmp_path):
    options = {"cache": tmp_path, "pareto": ("time", "area")}
    space = some_chips(10, 20)
    first = outcome(space, **options)
    again = outcome(space, **options)
    assert again.recalled
    assert again == replace(first, recalled=True)  # seconds and history as well
    with contextlib.closing(sqlite3.connect(tmp_path / STORE)) as file, file:
        file.execute("UPDATE results SET value = replace(value, 'time_s', 'time_z')")
    anew = outcome(space, **options)
    assert not anew.recalled
    assert anew.winners == first.winners
    assert outcome(space, **options).recalled


def test_an_outcome_that_a_budget_cut_is_not_kept(tmp_path):
    asked = {"cache": tmp_path, "budget": Budget(stop=lambda: True)}
    cut = [outcome(some_chips(10, 20), **asked) for _ in range(2)]
    assert [(found.complete, found.recalled) for found in cut] == [(False, False)] * 2


def test_outcomes_of_other_objectives_have_other_names():
    space = some_chips(10, 3)
    problems = problems_of([model()], ChipGroups.of(space), POD, STEP)
    names = {search_digest(problems, space, (1.0,), 5, (), name) for name in UNITS}
    assert len(names) == len(UNITS) > 3


def test_an_outcome_of_another_cost_model_is_not_found(tmp_path, monkeypatch):
    def recalled():
        return [outcome(some_chips(10, 5), cache=tmp_path).recalled for _ in range(2)]

    assert recalled() == [False, True]
    with monkeypatch.context() as patch:
        patch.setattr(store, "pricing_fingerprint", lambda: b"a changed cost model")
        assert recalled() == [False, True]
    assert recalled() == [True, True]


def test_a_cache_that_cannot_be_used_is_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / STORE).write_bytes(b"\xff\xfe not ours " * 500)
    (tmp_path / "folder" / STORE).mkdir(parents=True)
    for folder, said in (
        ("file", "is not a directory"),
        ("other", "another program's file"),
        ("folder", "Is a directory"),
    ):
        found = outcome(some_chips(10, 5), cache=tmp_path / folder)
        assert found.status == "optimal"
        assert any(said in note for note in found.notes), found.notes
    assert (tmp_path / "other" / STORE).read_bytes().startswith(b"\xff\xfe not ours")


def test_a_directory_of_something_else_is_refused(tmp_path):
    outcome(some_chips(12, 5), resume=tmp_path / "a")
    with pytest.raises(InvalidInputError, match=r"manifest\.json"):
        outcome(some_chips(13, 5), resume=tmp_path / "a")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match="cannot be used"):
        outcome(some_chips(12, 5), resume=tmp_path / "file")


KILLED = """
import os, sys
import phaze_fast as pf
from phaze_fast.explore import candidates
from phaze_fast.explore import find_chips
import numpy as np

put, left = candidates.PlanCache.put, [int(sys.argv[2])]
def counted(self, answers):
    put(self, answers)
    with open(sys.argv[1] + ".asked", "a") as file:
        file.write("x")
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), 9)
candidates.PlanCache.put = counted
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
