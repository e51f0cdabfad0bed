"""Random problems whose results are checked by `tests/reference/certificates.py`, shuffled lists,
changed documents, exported files read back, and random commands (`fuzz.py`).

    python3 dev.py attack --minutes 10 --seed 1
    python3 dev.py attack --minutes 5 --seed 7 --only nest
    python3 dev.py fuzz --minutes 10 --seed 1    # the same as attack --only commands

Each kind of problem gets the same time. Prints one line for each finding, with the case that
repeats it; then cases, cases per second and findings of each kind.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "cases"))

import numpy as np
from export_cases import SUFFIX, random_plan
from mapping_cases import compiled, tight_case
from nest_cases import nest_problem
from oracle_cases import random_cases, random_recompute
from placement_cases import branching, chain, random_published
from plan_cases import evaluator_of, kind_of_layout, random_problem
from reference import certificates
from reference.layers_at_random import any_way, backward_like, random_layer, wide_range
from robustness.fuzz import changed, commands
from search_cases import random_case, tpuv4_space

import phaze_fast as pf
from phaze_fast import export
from phaze_fast.cli.main import main as command_line
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.explore import SearchProblem
from phaze_fast.hardware import chip_records, presets
from phaze_fast.memory import SCHEDULES, TWO_CHUNKS
from phaze_fast.papers import nest_from_dict, place_batch, solve_nest
from phaze_fast.planning import RECOMPUTE, planner, predict, predict_batch
from phaze_fast.planning.times import least_work_s
from phaze_fast.schedule import instance_from_dict, schedule_instances
from phaze_fast.software import software_names

BATCH = 64


def size(rng, usual, most):
    """Mostly tiny, so that many are tried; sometimes as large as can be enumerated."""
    return rng.randint(usual, most) if rng.random() < 0.05 else rng.randint(1, usual)


def shape(rng):
    if rng.random() < 0.7:
        return partial(chain, most=size(rng, 3, 7))
    return partial(branching, most=4 if rng.random() < 0.9 else 6)


def layers(rng):
    """Small layers, against every schedule there is."""
    rule = rng.choice(["exclusive", "overlap"])
    drawn = []
    for _ in range(BATCH):
        way, count = rng.randrange(4), size(rng, 3, 5)
        if way == 0:
            drawn.append(any_way(rng, count))
        elif way == 1:
            drawn.append(backward_like(rng, count + 1))
        elif way == 2:
            drawn.append(wide_range(rng, min(count, 4), rng.choice([2, 6])))
        else:
            drawn.append(random_layer(rng, min(count, 4), rng.choice([2, 3])))
    found = schedule_instances([instance_from_dict(data) for data in drawn], rule, highs=False)
    for data, made in zip(drawn, found, strict=True):
        yield certificates.layer(made), (rule, data)


def published(rng):
    problems = [random_published(rng, shape(rng)) for _ in range(BATCH)]
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
    """Plans priced stage by stage; every schedule, ZeRO stage, rank order and recomputation."""
    seed = rng.randrange(10**9)
    own = random.Random(seed)
    model, cluster, specs = random_cases(own, 40)
    others = [spec.replace(recompute=random_recompute(own, spec.pp)) for spec in specs]
    for spec in specs + others:
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
    picked = np.sort(case.rng.choice(len(tpuv4_space()), 3, replace=False))
    problem, records = case.problem, tpuv4_space().chips[picked].copy()
    if rng.random() < 0.5:  # some of them with tensor cores of another shape
        for column, sizes in (("cores", [0, 1, 16, 256]), ("width", [8, 48]), ("depth", [16, 96])):
            records[f"other_{column}"] = [rng.choice(sizes) for _ in records]
    if len(problem):
        yield from _bounds_of_chips(case.rng, problem, records, seed)
        yield _search_of(case, picked), seed
    like = presets.chip(rng.choice(["a100-80", "h100", "h200", "mi300x", "tpuv4", "tpuv5p"]))
    software = rng.choice(software_names())
    records = np.concatenate([chip_records([like])] * 3)
    for name in ("clock_hz", "hbm_bytes_per_s", "tensor_cores", "buffer_bytes", "vector_cores"):
        scaled = records[name] * np.exp2(case.rng.integers(-2, 2, len(records)))
        records[name] = np.maximum(scaled, 1)
    step = case.training.replace(software=software)
    problem = SearchProblem(case.model, case.cluster, step, like, case.capacities)
    with contextlib.suppress(InvalidInputError):  # formats that the chip has not
        yield from _bounds_of_chips(case.rng, problem, records, (seed, like.name, software))


def _bounds_of_chips(own, problem, records, seed):
    for s in own.permutation(len(problem))[:2].tolist():
        evaluator, _ = problem.of(s)
        timed, least = problem.schedule(s, records)
        steps = {name: problem.bound(s, records, name) for name in ("mapped", "schedule_bound")}
        steps["scheduled"] = least
        yield _rooflines(problem, s, records, (timed, least)), (seed, s)
        rows = np.flatnonzero(evaluator.layouts["strategy"] == s).tolist()
        for chip in range(len(records)):
            yield from _bounds_of_chip(evaluator, timed, steps, rows, chip, (seed, s, chip))


def _rooflines(problem, s, records, scheduled):
    """Bounds by rooflines of a micro-batch, and of the seconds and joules of a strategy's plans."""
    evaluator, k = problem.of(s)
    timed, least = scheduled
    counts = np.array([layer.count for layer in evaluator.sizes[k].graph.layers], dtype=float)
    limits = np.full((len(records), len(evaluator.limits_bytes)), 1e300)
    work_s, (work_j, static_w) = problem.work_s(s, records), problem.work_j(s, records)
    roofline_j = problem.step_energy_j(s, work_j, static_w, work_s)[0]
    least_j = np.maximum(roofline_j, problem.least_energy_j(s, least)[0])
    bound, exact = {}, {}
    for chip, row in enumerate(evaluator.best(k, timed, least, limits)):
        bound["work", chip] = work_s[chip] * (1 - 1e-12)
        exact["work", chip] = float((timed.forward_s + timed.plain_s)[chip] @ counts)
        for c, placed in enumerate(row):
            if placed.layout >= 0:
                at = np.full(len(records), c, dtype=np.int64)
                bound["seconds", chip, c] = evaluator.work_bounds(k, work_s, at)[chip]
                exact["seconds", chip, c] = placed.time_s
                bound["joules", chip, c] = least_j[chip]
                exact["joules", chip, c] = evaluator.energies_j([placed], timed, [chip])[0]
    return certificates.sampled_bounds({"roofline": bound}, exact)


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


def excluded(rng):
    """Bounds of layouts by their work against their best plans, and the list of a plan against the
    best of all layouts, however few are compared first. Every schedule, profile and fusion."""
    seed = rng.randrange(10**9)
    own = random.Random(seed)
    model, cluster, step = random_problem(own, 6, 16)
    software, fusion = own.choice(software_names()), own.choice(["none", "epilogues", "full"])
    count, few = rng.randint(1, 8), (rng.randint(1, 4), rng.randint(1, 40))
    what = (seed, software, fusion, count, few)
    cluster = cluster.replace(chip=cluster.chip if own.random() < 0.6 else own.choice(_PRESETS))
    try:
        step = step.replace(software=software, fusion=fusion)
        evaluator, times = evaluator_of(model, cluster, step)
    except InvalidInputError as error:
        yield [] if "accepted" in str(error) else [str(error)], what
        return
    if not len(evaluator.layouts):
        return
    bounds_s = evaluator.layout_work_bounds_s(least_work_s(tuple(evaluator.sizes), cluster))
    solve, best = evaluator.space.solve, {}
    exact = {}
    for at in range(len(evaluator.layouts)):
        _, (record,), _ = solve(times, at, 0, 1e300)
        if record["layout"] >= 0:
            exact[at] = float(record["time_s"])
            kind = kind_of_layout(evaluator, at)
            best[kind] = min(best.get(kind, np.inf), exact[at])
    said = certificates.sampled_bounds({"work": dict(enumerate(bounds_s.tolist()))}, exact)
    usual = planner._FEW_STRATEGIES, planner._FEW_LAYOUTS
    try:
        planner._evaluator.cache_clear()
        planner._FEW_STRATEGIES, planner._FEW_LAYOUTS = few
        found = pf.plan(model, cluster, step, top=count, threads=1)
    finally:
        planner._FEW_STRATEGIES, planner._FEW_LAYOUTS = usual
        planner._evaluator.cache_clear()
    yield said + certificates.listed_plans(found, list(best.values())), what


_PRESETS = ("a100-80", "h200", "mi300x", "tpuv4", "gaudi3", "b200")


def lists(rng):
    """Random steps whose lists are shuffled: the same plans, and none that is predicted is faster.
    Every schedule and every software profile."""
    case = random_case(rng.randrange(10**6), devices=8)
    free = case.training.to_dict()
    free["software"] = rng.choice(software_names())
    free["schedule"] = rng.sample(SCHEDULES, 3)
    free["recompute"] = rng.sample([*RECOMPUTE, "norms", "norms+attention", "needed"], 3)
    cluster = case.cluster.replace(chip=rng.choice(["h100", "tpuv4", "a100-80"]))
    answers = []
    for _ in range(2):
        step = {k: rng.sample(v, len(v)) if isinstance(v, list) else v for k, v in free.items()}
        try:
            answers.append(pf.plan(case.model, cluster, pf.Training(**step), top=3))
        except (InfeasibleError, InvalidInputError) as error:
            answers.append(error)
    what = (case.model.to_dict(), cluster.to_dict(), free)
    if not all(isinstance(answer, pf.Plans) for answer in answers):
        yield [] if str(answers[0]) == str(answers[1]) else [f"{answers[0]} or {answers[1]}"], what
        return
    first, second = ([plan.to_dict() for plan in answer.plans] for answer in answers)
    said = [] if first == second else ["the order of a list changes the plans"]
    if answers[0].plans and answers[0].status == "optimal":
        said += _faster_plans(rng, case.model, cluster, answers[0])
    yield said, what


def _faster_plans(rng, model, cluster, answer):
    """Predictions of random plans of the same step that take less than the proven optimum."""
    step, best = answer.training, answer.best
    blocks = model.layers + model.encoder_layers
    rows = []
    for _ in range(200):
        row = {name: rng.choice(list(getattr(step, name))) for name in ("micro_batch", "zero")}
        row["schedule"] = rng.choice(step.schedule)
        row["recompute"] = rng.choice(step.recompute_modes)
        row["tp"] = rng.choice(step.tp or (1, 2))
        stages = [pp for pp in step.pp or (1, 2, 4) if pp <= blocks]  # as the space says
        row["pp"], row["dp"] = rng.choice(stages or [1]), rng.choice(step.dp or (1, 2, 4, 8))
        two = row["schedule"] in TWO_CHUNKS
        row["vpp"] = rng.choice(step.vpp) if row["schedule"] == "interleaved" else 1 + two
        if step.rank_order != "auto":
            row["rank_order"] = step.rank_order
        rows.append(row)
    columns = {name: [row.get(name, "replicas-inside") for row in rows] for name in rows[0]}
    if step.shard != ("auto",) or step.tied or step.uncut or 1 not in (step.cp or (1,)):
        return []
    if 1 not in (step.ep or (1,)):
        return []
    times = predict_batch(model, cluster, step, **columns)
    fits = times.status == 0
    least = float(times.time_s[fits].min()) if fits.any() else np.inf
    return [f"{best.time_s} is called optimal, {least} is possible"] * (
        least < best.time_s * (1 - 1e-9)
    )


@cache
def _plan_documents():
    """Documents of plans with their problem, as the command line writes them."""
    written = []
    for model, step in (
        ("bert-large", {"schedule": "interleaved", "pp": 2, "global_batch": 32}),
        ("gpt2-xl", {"schedule": "zb-v", "pp": 4, "global_batch": 16}),
        ("mixtral-8x7b", {"pp": 2, "tp": 2, "ep": 2, "global_batch": 32}),
    ):
        cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
        (plan,) = pf.plan(model, cluster, pf.Training(micro_batch=1, **step), top=1).plans
        problem = {"model": model, "cluster": {"devices": 16, "fabric": "dgx-h100", "chip": "h100"}}
        written.append({"plan": plan.to_dict(), **problem})
    return written


def documents(rng):
    """Plan documents with one place changed: each is read, or refused in one line."""
    document, what = changed(rng, rng.choice(_plan_documents()))
    with tempfile.TemporaryDirectory() as name:
        file, out = Path(name) / "plan.json", Path(name) / "out"
        file.write_text(json.dumps(document))
        format_ = rng.choice([*export.FORMATS, "perfetto"])
        words = rng.choice(
            [
                ["explain", str(file)],
                ["explain", str(file), "--against", str(file)],
                ["export", str(file), "--to", format_, "-o", str(out)],
                ["predict", "bert-large", "--plan", str(file), "--chip", "h100", "--devices", "16"],
            ]
        )
        output, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
            code = command_line(words)
        said = [] if code in (0, 1, 2) else [f"exit {code}: {error.getvalue()[-300:]}"]
        if code == 2 and out.exists():
            said.append("a refused command wrote a file")
        if code == 2 and len(error.getvalue().splitlines()) > 8:
            said.append(f"{len(error.getvalue().splitlines())} lines for bad input")
    yield said, (words[0], what)


def exports(rng):
    """Random plans written for every framework and read back: the same, or said not to be."""
    model, cluster, plan = random_plan(rng)
    for format_ in export.FORMATS:
        written = export.export_plan(plan, model, format_)
        said = []
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / f"run{SUFFIX.get(format_, '.sh')}"
            file.write_text(written.text)
            again = predict(model, cluster, export.read_plan(file, model, cluster.devices).spec)
        for field in ("time_s", "memory_bytes"):
            one, other = getattr(plan, field), getattr(again, field)
            if written.complete and abs(other / one - 1) > 1e-12:
                said.append(f"{format_}: {field} {one} reads back as {other}")
        yield said, (format_, model.name, plan.to_dict())


KINDS = {
    kind.__name__: kind
    for kind in (
        *(layers, published, nest, plans, wafers, chips, excluded, lists, documents, exports),
    )
}


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
