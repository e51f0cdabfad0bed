"""Random problems whose results are checked by `tests/reference/certificates.py`, and random
commands (`fuzz.py`).

    python3 dev.py attack --minutes 10 --seed 1
    python3 dev.py attack --minutes 5 --seed 7 --only nest
    python3 dev.py fuzz --minutes 10 --seed 1    # the same as attack --only commands

Each kind of problem gets the same time. Prints one line for each finding, with the case that
repeats it; then cases, cases per second and findings of each kind.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "cases"))

import numpy as np
from mapping_cases import compiled, tight_case
from nest_cases import nest_problem
from oracle_cases import random_cases
from placement_cases import branching, chain, random_published
from reference import certificates
from reference.layers_at_random import any_way, backward_like, random_layer, wide_range
from robustness.fuzz import commands
from search_cases import random_case, tpuv4_space

import phaze_fast as pf
from phaze_fast.papers import nest_from_dict, place_batch, solve_nest
from phaze_fast.planning import predict
from phaze_fast.schedule import instance_from_dict, schedule_instances

BATCH = 64


def size(rng, usual, most):
    """Mostly tiny, so that many are tried; sometimes as large as can be enumerated."""
    return rng.randint(usual, most) if rng.random() < 0.05 else rng.randint(1, usual)


def shape(rng):
    if rng.random() < 0.7:
        return partial(chain, most=size(rng, 3, 7))
    return partial(branching, most=4 if rng.random() < 0.9 else 6)


def layers(rng):
    """Small layers; those with whole latencies are checked by states, others by orders."""
    rule = rng.choice(["exclusive", "overlap"])
    drawn = []
    for _ in range(BATCH):
        way, count = rng.randrange(4), size(rng, 3, 5)
        if way == 0:
            drawn.append((any_way(rng, count), True))
        elif way == 1:
            drawn.append((backward_like(rng, count + 1), True))
        elif way == 2:
            drawn.append((wide_range(rng, min(count, 4), rng.choice([2, 6])), False))
        else:
            drawn.append((random_layer(rng, min(count, 4), rng.choice([2, 3])), False))
    found = schedule_instances([instance_from_dict(data) for data, _ in drawn], rule, highs=False)
    for (data, whole), made in zip(drawn, found, strict=True):
        yield certificates.layer(made, whole), (rule, data)


def published(rng):
    problems = [random_published(rng, shape(rng), 0.2) for _ in range(BATCH)]
    for problem, found in zip(problems, place_batch(problems), strict=True):
        yield certificates.placement(problem, found), problem


def nest(rng):
    everywhere = rng.random() < 0.3
    seeds = [rng.randrange(10**9) for _ in range(BATCH)]
    drawn = [nest_problem(seed, 2 + seed % 3, 16) for seed in seeds]
    problems = [nest_from_dict(data) for data in drawn]
    plans = solve_nest(problems, threads=1, replicas="all" if everywhere else "first")
    for seed, data, plan in zip(seeds, drawn, plans, strict=True):
        yield certificates.nest_plan(data, plan, everywhere), (seed, everywhere)


def plans(rng):
    """Plans priced stage by stage; every schedule, ZeRO stage and rank order."""
    seed = rng.randrange(10**9)
    model, cluster, specs = random_cases(random.Random(seed), 40)
    for spec in specs:
        yield certificates.priced_plan(model, cluster, spec, predict(model, cluster, spec)), seed


def wafers(rng):
    """Random and annealed mappings, with bounds of several weights."""
    sides = {"sides": (rng.choice([2, 3]), rng.choice([1, 2])), "most": (1, 3, 1), "stages": 3}
    seed = rng.randrange(10**9)
    case, op_mappings = tight_case(random.Random(seed), **sides)
    what = (seed, sides)
    mapping = compiled(case, op_mappings)
    relaxed, weights = mapping.relaxation(), (0.0, 0.5, 1.0)
    prices = (0.0, relaxed.bound(1.0, 0.0)[0] / case.rules["capacity_bytes"])
    bounds = [relaxed.bound(*w)[0] for w in itertools.product(weights, prices, (0.0, 0.5))]
    outputs = mapping.stages()[1]
    yield certificates.mapped_wafer(case, op_mappings, mapping.score()[0], outputs, bounds), what
    found, score, _ = mapping.anneal(1, 60, 0.3)
    fresh = compiled(case)
    fresh.assign(found)
    same = fresh.score().tobytes() == score.tobytes()
    yield [] if same else ["a search's score is not that of its mapping"], what
    if score["over_bytes"][0] == 0.0 and score["stream_over_bytes"][0] == 0.0:
        best = float(score["time_s"][0])
        yield [f"bound {b} is above {best}" for b in bounds if b > best * (1 + 1e-9)], what


def chips(rng):
    """Bounds of every step of the search against exact times, layout by layout; then the search
    against the best plan of every chip."""
    seed = rng.randrange(10**6)
    case = random_case(seed, (), 8, 6)
    problem, evaluator = case.problem, case.problem.evaluators[0]
    if not len(evaluator):
        return
    picked = np.sort(case.rng.choice(len(tpuv4_space()), 3, replace=False))
    records = tpuv4_space().chips[picked].copy()
    for s in case.rng.permutation(len(evaluator))[:2].tolist():
        timed, least = problem.schedule(s, records)
        steps = {name: problem.bound(s, records, name) for name in ("mapped", "schedule_bound")}
        steps["scheduled"] = least
        rows = np.flatnonzero(evaluator.layouts["strategy"] == s).tolist()
        for chip in range(len(records)):
            yield from _bounds_of_chip(evaluator, timed, steps, rows, chip, (seed, s, chip))
    yield _search_of(case, picked), seed


def _bounds_of_chip(evaluator, timed, steps, rows, chip, what):
    def at(times):
        return times.at(np.full(len(evaluator), chip))

    solve = evaluator.space.solve
    for limit in range(len(evaluator.limits_bytes)):
        for layout in rows:
            _, (record,), _ = solve(at(timed), layout, limit, 1e300)
            if record["layout"] >= 0:
                bounds = {
                    name: {layout: solve(at(times), layout, limit, -np.inf)[0]}
                    for name, times in steps.items()
                }
                exact = {layout: float(record["time_s"])}
                yield certificates.sampled_bounds(bounds, exact), (*what, limit, layout)


def _search_of(case, picked):
    space = tpuv4_space()[picked]
    found = pf.search(case.model, space, case.cluster, case.training, top=len(picked))
    best = {}
    for i in range(len(space)):
        cluster = case.cluster.replace(chip=space[i])
        own = pf.plan(case.model, cluster, case.training, top=1).plans
        if own:
            record = space.chips[i].copy()
            record["hbm_bytes"] = 1
            row = (own[0].time_s, float(space.area_mm2[i]))
            best[record.tobytes()] = min(best.get(record.tobytes(), row), row)
    return certificates.ranked_chips(found, list(best.values()))


KINDS = {kind.__name__: kind for kind in (layers, published, nest, plans, wafers, chips)}


def attack(name, rng, seconds, most, keep=None):
    """Cases and findings of one kind; `keep` is a file that findings are appended to."""
    begin, cases, wrong = time.monotonic(), 0, 0
    while time.monotonic() - begin < seconds and cases < most:
        for said, what in (KINDS | {"commands": commands})[name](rng):
            cases += 1
            if said:
                wrong += 1
                sys.stdout.write(f"{name}: {'; '.join(said)[:600]}\n    {str(what)[:3000]}\n")
                sys.stdout.flush()
                if keep:
                    with keep.open("a") as file:
                        file.write(f"{what}\n")
    return cases, wrong, time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="In all.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*KINDS, "commands"], action="append")
    parser.add_argument("--cases", type=int, default=10**9, help="At most, of each kind.")
    parser.add_argument("--keep", type=Path, help="Append what is found to this file.")
    asked = parser.parse_args()
    chosen = asked.only or list(KINDS)
    all_cases, findings = 0, 0
    for name in chosen:
        rng = random.Random(f"{asked.seed} {name}")
        seconds = 60 * asked.minutes / len(chosen)
        cases, wrong, seconds = attack(name, rng, seconds, asked.cases, asked.keep)
        all_cases, findings = all_cases + cases, findings + wrong
        rate = cases / max(seconds, 1e-9)
        sys.stdout.write(f"{name:10} {cases:8} cases, {rate:8.1f} a second, {wrong} findings\n")
        sys.stdout.flush()
    sys.stdout.write(f"{all_cases} cases, seed {asked.seed}, {findings} findings\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
