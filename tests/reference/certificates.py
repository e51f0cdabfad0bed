"""Certificates under an independent check: what is wrong with an answer, and with its proof.

Each function takes a problem and the answer that phaze_fast gives, replays the answer with formulas
of this folder, and tries everything that the problem allows to see whether the bound holds. It
gives sentences; none where all is well. Problems must be small.
"""

import itertools
import math

from reference import mapping_oracle, nest
from reference.layer import best_makespan
from reference.layer import faults as schedule_faults
from reference.placement import best_published
from reference.placement import faults as placement_faults
from reference.plan import evaluate

CLOSE = 1e-9


def close(a, b, rel=CLOSE):
    return math.isclose(a, b, rel_tol=rel, abs_tol=1e-300)


def layer(found):
    """A layer's schedule: legal, as long as it says, its bound below every schedule there is."""
    wrong = schedule_faults(found.instance, found.starts, found.mode, found.makespan, found.overlap)
    least = best_makespan(found.instance, found.overlap)
    if found.bound > least * (1 + CLOSE):
        wrong.append(f"bound {found.bound} is above a schedule of {least}")
    if found.makespan < least * (1 - CLOSE):
        wrong.append(f"makespan {found.makespan} is below the least, {least}")
    if (found.status == "optimal") != (found.proved_by != "nothing"):
        wrong.append(f"status {found.status}, proved by {found.proved_by}")
    if found.status == "optimal" and not close(found.makespan, least):
        wrong.append(f"makespan {found.makespan} is called optimal, and {least} is there")
    return wrong


def placement(problem, found):
    """A placement in PHAZE's objective."""
    best = best_published(problem)
    if best is None:
        return [] if found.status == "infeasible" else [f"{found.status}, and nothing fits"]
    if found.status == "infeasible":
        return [f"infeasible is said, and {best[0]} is there"]
    wrong = placement_faults(problem, found)
    if not close(found.time_s, best[0]):
        wrong.append(f"{found.time_s} is said, and {best[0]} is there")
    return wrong


def nest_plan(data, plan, all_replicas):
    """A plan in NEST's objective."""
    least = nest.best(data, all_replicas)
    if least == math.inf or plan["status"] == "infeasible":
        agree = least == math.inf and plan["status"] == "infeasible"
        return [] if agree else [f"{plan['status']}, and the least is {least}"]
    stages = [stage["nodes"] for stage in plan["stages"]]
    own = nest.time_of(data, str(plan["t"]), stages, plan["d"], all_replicas)
    wrong = []
    if own is None:
        wrong.append("the plan does not fit")
    elif not close(own, plan["finalTimePerBatch"]):
        wrong.append(f"the plan takes {own}, not {plan['finalTimePerBatch']}")
    if not close(plan["finalTimePerBatch"], least):
        wrong.append(f"{plan['finalTimePerBatch']} is called optimal, and {least} is there")
    return wrong


def priced_plan(model, cluster, spec, found):
    """Seconds and bytes of one plan, stage by stage."""
    own = evaluate(model, cluster, spec)
    wrong = [
        f"{name}: {said} is said, {own[name]} it is"
        for name, said in (("time_s", found.time_s), ("memory_bytes", found.memory_bytes))
        if not close(said, own[name])
    ]
    parts = sum(found.parts_s.values())
    if not close(parts, found.time_s):
        wrong.append(f"parts add up to {parts}, not {found.time_s}")
    for k, (stage, wanted) in enumerate(zip(found.stages, own["stages"], strict=True)):
        if not close(stage.load_s, wanted["load_s"]):
            wrong.append(f"stage {k}: load {stage.load_s}, not {wanted['load_s']}")
        if not close(sum(stage.memory.values()), sum(wanted["memory"].values())):
            wrong.append(f"stage {k}: memory {stage.memory}, not {wanted['memory']}")
    return wrong


def mapped_wafer(case, op_mappings, score, outputs, bounds):
    """A mapping of operators on dies: its time, its outputs, and bounds that hold where it fits.

    `outputs` has what was chosen, a way per operator for each stage: no other way is faster.
    """
    ways = [dict(enumerate(row)) for row in outputs.tolist()]
    time_s, stages = mapping_oracle.evaluate(case, op_mappings, ways)
    wrong = []
    if not close(float(score["time_s"]), time_s):
        wrong.append(f"time_s: {score['time_s']} is said, {time_s} it is")
    load_s = max(stage.load_s for stage in stages)
    if not close(float(score["slowest_stage_s"]), load_s):
        wrong.append(f"slowest stage: {score['slowest_stage_s']} is said, {load_s} it is")
    fastest = mapping_oracle.evaluate(case, op_mappings)[1]
    for k, (stage, least) in enumerate(zip(stages, fastest, strict=True)):
        if not close(stage.isolated_s, least.isolated_s):
            wrong.append(f"stage {k}: outputs take {stage.isolated_s}, {least.isolated_s} at best")
    fits = score["over_bytes"] == 0.0 and score["stream_over_bytes"] == 0.0
    if fits:
        wrong += [f"bound {b} is above {time_s}" for b in bounds if b > time_s * (1 + CLOSE)]
    return wrong


def ranked_chips(found, times_and_areas):
    """The list of a search against every chip's own best plan: order, ties, bound and gap.

    `times_and_areas` has (seconds, mm2) of the best plan of each chip that differs in more than
    HBM; `found` is a search result that asked for that many.
    """
    wanted = sorted(times_and_areas)[: len(found.top)]
    said = [(d.time_s, d.area_mm2) for d in found.top]
    wrong = []
    # Times of equal plans may differ in their last bit, and then in their order.
    same = len(said) == len(wanted) and all(
        close(a[0], b[0], 1e-12) for a, b in zip(said, wanted, strict=True)
    )
    if not same or sorted(area for _, area in said) != sorted(area for _, area in wanted):
        wrong.append(f"{said} is said, {wanted} it is")
    if wanted and not found.bound <= wanted[0][0] * (1 + 1e-12):
        wrong.append(f"bound {found.bound} is above {wanted[0][0]}")
    if found.status == "optimal" and found.gap != 0.0:
        wrong.append(f"optimal with a gap of {found.gap}")
    return wrong


def sampled_bounds(bounds, exact):
    """Bounds by name and layout against exact seconds by layout."""
    return [
        f"{name} bound {own[layout]} of layout {layout} is above {seconds}"
        for (name, own), (layout, seconds) in itertools.product(bounds.items(), exact.items())
        if own[layout] > seconds
    ]


def listed_plans(found, seconds):
    """The list of a plan against the seconds of the best plan of every kind of layout."""
    wanted = sorted(seconds)[: found.top]
    said = [plan.time_s for plan in found.plans]
    wrong = []
    if len(said) != len(wanted) or not all(close(*pair) for pair in zip(said, wanted, strict=True)):
        wrong.append(f"the list is {said}, and {wanted} is there")
    if bool(wanted) == (found.status == "infeasible"):
        wrong.append(f"{found.status} is said, and {len(wanted)} plans are there")
    if wanted and found.bound_s > wanted[0] * (1 + CLOSE):
        wrong.append(f"bound {found.bound_s} is above {wanted[0]}")
    return wrong
