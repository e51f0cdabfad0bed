"""Placements by trying every cut, with every sum written out: the oracle of the placement kernel.

A plan is a tuple of stages, first to last; a stage is a tuple of layers in increasing order.
"""

import math
from functools import cache, lru_cache, partial
from itertools import product

from reference.pipeline_simulation import built_up_1f1b, built_up_zero_bubble


def closed_sets(layers, edges, tied):
    """Every set of layers with which come all that they wait for, and all they are tied to."""
    found = []
    for member in product((False, True), repeat=layers):
        waits = all(member[a] or not member[b] for a, b in edges)
        together = all(member[a] == member[b] for a, b in tied)
        if waits and together:
            found.append(frozenset(i for i in range(layers) if member[i]))
    return found


@lru_cache(maxsize=4096)
def _all_plans(layers, edges, tied):
    cuts = closed_sets(layers, edges, tied)
    everything = frozenset(range(layers))

    def continued(done):
        if done == everything:
            return [()]
        made = []
        for cut in cuts:
            if done < cut:
                stage = tuple(sorted(cut - done))
                made += [(stage, *rest) for rest in continued(cut)]
        return made

    return tuple(continued(frozenset()))


def plans(table):
    """Every way to cut a table's layers into stages that are not empty."""
    tied = tuple((int(a), int(b)) for a, b in table.tied)
    return _all_plans(len(table.names), tuple((int(a), int(b)) for a, b in table.edges), tied)


class Rows:
    """A table in plain lists, with what is asked of one stage."""

    def __init__(self, table):
        for name in ("forward_s", "backward_s", "stash_bytes", "live_bytes"):
            setattr(self, name, [[float(v) for v in row] for row in getattr(table, name)])
        for name in ("resident_bytes", "once_bytes", "gather_bytes", "sync_s", "step_s"):
            setattr(self, name, [float(v) for v in getattr(table, name)])
        self.weight_grad_s = [float(v) for v in table.weight_grad_s]
        self.wide = [bool(v) for v in table.wide]
        self.edges = [(int(a), int(b)) for a, b in table.edges]
        self.edge_s = [float(v) for v in table.edge_s]
        self.edge_bytes = [float(v) for v in table.edge_bytes]
        self.variants = list(table.variants)
        self.published_stage = cache(partial(published_stage, self))
        self.pipeline_stage = cache(partial(pipeline_stage, self))
        self.tail_of = cache(partial(tail_of, self))

    def entering(self, stage):
        """Edges into a stage from outside."""
        return [e for e, (a, b) in enumerate(self.edges) if a not in stage and b in stage]

    def leaving(self, stage):
        """Edges out of a stage."""
        return [e for e, (a, b) in enumerate(self.edges) if a in stage and b not in stage]

    def longest_each(self, edges):
        """Seconds of edges, of those from one layer only the longest."""
        sources = {self.edges[e][0] for e in edges}
        return sum(max(self.edge_s[e] for e in edges if self.edges[e][0] == u) for u in sources)


def total(values, stage):
    """Sum over the layers of a stage."""
    return sum(values[i] for i in stage)


# ---- the published objective ----


def published_stage(rows, stage, after, recompute):
    """Load and bytes of a stage with so many stages after it."""
    entering, leaving = rows.entering(stage), rows.leaving(stage)
    forward, backward = total(rows.forward_s[0], stage), total(rows.backward_s[0], stage)
    c_in = sum(rows.edge_s[e] for e in entering)
    c_out = sum(rows.edge_s[e] for e in leaving)
    stash = total(rows.stash_bytes[0], stage)
    load = c_in + forward + c_out + backward
    if recompute:
        stash = sum(rows.edge_bytes[e] for e in entering)
        if after > 0:
            load = c_in + forward + max(forward, c_out) + backward
    return load, total(rows.resident_bytes, stage) + total(rows.once_bytes, stage) + after * stash


def devices_of(rows, plan, width):
    """Devices of one replica."""
    return sum(width if any(rows.wide[i] for i in stage) else 1 for stage in plan)


def published_time(problem, width, plan, replicas=None):
    """Best time of a plan and the replicas that give it; None where it does not fit."""
    rows = Rows(problem.tables[width])
    return _published_time(problem, rows, width, plan, replicas)


def _published_time(problem, rows, width, plan, replicas=None):
    loads = []
    for at, stage in enumerate(plan):
        load, size = rows.published_stage(stage, len(plan) - 1 - at, problem.recompute)
        if size > problem.memory_bytes:
            return None
        loads.append(load)
    sync = total(rows.sync_s, plan[0])
    best = None
    for d in range(1, problem.devices // devices_of(rows, plan, width) + 1):
        if (problem.replicas and d != problem.replicas) or (replicas and d != replicas):
            continue
        rounds = math.ceil(problem.micro_batches / d) + len(plan) - 1
        time = max(loads) * rounds + (d - 1) / d * sync
        if best is None or time < best[0]:
            best = (time, d)
    return best


def best_published(problem):
    """Least time over widths, plans and replicas, as (time, width, plan, replicas), or None."""
    best = None
    for width, table in problem.tables.items():
        rows = Rows(table)
        for plan in plans(table):
            if problem.stages and len(plan) != problem.stages:
                continue
            scored = _published_time(problem, rows, width, plan)
            if scored is not None and (best is None or scored[0] < best[0]):
                best = (scored[0], width, plan, scored[1])
    return best


# ---- the pipeline objective ----


def pipeline_stage(rows, stage, variant, flying, piped_bytes):
    """Load and bytes of a stage in a variant, with so many micro-batches in flight."""
    load = rows.longest_each(rows.entering(stage)) + total(rows.forward_s[variant], stage)
    load += total(rows.backward_s[variant], stage) + rows.longest_each(rows.leaving(stage))
    size = total(rows.resident_bytes, stage) + total(rows.once_bytes, stage)
    size += flying * total(rows.stash_bytes[variant], stage)
    size += max(rows.live_bytes[variant][i] for i in stage)
    return load, size + max(rows.gather_bytes[i] for i in stage) + piped_bytes


def stage_of_plan(rows, problem, plan, at, variant):
    """Load and bytes of a stage of a plan in a variant."""
    m, p = problem.micro_batches, len(plan)
    flying = min(m, p) if problem.schedule == "zero-bubble" else min(m, p - at)
    piped_bytes = problem.piped_bytes if p > 1 else 0.0
    return rows.pipeline_stage(plan[at], variant, flying, piped_bytes)


def tail_of(rows, stage, before, bucket_s):
    """Seconds after the last backward pass until a stage's weights are new."""
    backward = total(rows.backward_s[0], stage)
    sync = total(rows.sync_s, stage)
    exposed = min(sync, max(sync - backward, bucket_s))
    return max(0.0, exposed + total(rows.step_s, stage) - total(rows.backward_s[0], before))


def pipeline_time(problem, plan, variants=None):
    """Time of a plan and its variants, the fastest that fit unless given; None where none fit."""
    return _pipeline_time(problem, Rows(problem.table), plan, variants)


def _pipeline_time(problem, rows, plan, variants=None):
    if problem.schedule == "zero-bubble" and problem.micro_batches < len(plan):
        return None
    choices = []
    for at in range(len(plan)):
        fits = []
        for variant in range(len(rows.variants)):
            if variants is None or rows.variants[variant] == variants[at]:
                _, size = stage_of_plan(rows, problem, plan, at, variant)
                if size <= problem.memory_bytes:
                    fits.append(variant)
        if not fits:
            return None
        choices.append(fits)
    before, tail = (), 0.0
    for stage in plan:
        tail = max(tail, rows.tail_of(stage, before, problem.bucket_s))
        before = tuple(sorted(before + stage))
    best = None
    for chosen in product(*choices):
        step = schedule_time(problem, rows, plan, chosen) + tail
        if best is None or step < best[0]:
            loads = [
                stage_of_plan(rows, problem, plan, at, variant)[0]
                for at, variant in enumerate(chosen)
            ]
            best = (step, tuple(rows.variants[v] for v in chosen), max(loads))
    return best


def schedule_time(problem, rows, plan, chosen):
    """Time of a schedule, built up as the description says, with given variants."""
    forward, backward, late = [], [], []
    for stage, variant in zip(plan, chosen, strict=True):
        entering = rows.longest_each(rows.entering(stage))
        leaving = rows.longest_each(rows.leaving(stage))
        forward.append(entering + total(rows.forward_s[variant], stage))
        backward.append(leaving + total(rows.backward_s[variant], stage))
        late.append(min(backward[-1], total(rows.weight_grad_s, stage)))
    if problem.schedule == "1f1b":
        return built_up_1f1b(forward, backward, problem.micro_batches)
    early = [b - w for b, w in zip(backward, late, strict=True)]
    return built_up_zero_bubble(forward, early, late, problem.micro_batches)


def best_by_count(problem):
    """Least time for each count of stages that can be met, as {count: (time, plan, variants)}."""
    rows = Rows(problem.table)
    best = {}
    for plan in plans(problem.table):
        count = len(plan)
        if problem.stages[0] <= count <= problem.stages[1]:
            scored = _pipeline_time(problem, rows, plan)
            if scored is not None and (count not in best or scored[0] < best[count][0]):
                best[count] = (scored[0], plan, scored[1])
    return best


def best_pipeline(problem):
    """Least time over all counts of stages, as (time, plan, variants), or None."""
    return min(best_by_count(problem).values(), default=None)


# ---- the checker ----


def _cut_faults(table, plan):
    wrong = []
    if not all(plan):
        wrong.append("a stage is empty")
    if sorted(i for stage in plan for i in stage) != list(range(len(table.names))):
        wrong.append("layers are not covered once each")
        return wrong
    place = {i: at for at, stage in enumerate(plan) for i in stage}
    for a, b in table.edges:
        if place[a] > place[b]:
            wrong.append(f"layer {b} is placed before layer {a}, for which it waits")
    for a, b in table.tied:
        if place[a] != place[b]:
            wrong.append(f"tied layers {a} and {b} are in two stages")
    return wrong


def _differ(name, said, is_):
    return [] if math.isclose(said, is_, rel_tol=1e-9) else [f"{name}: {said} is said, {is_} it is"]


def _published_faults(problem, placement):
    if placement.width not in problem.tables:
        return [f"width {placement.width} was not offered"]
    plan, d = placement.stages, placement.replicas
    wrong = _cut_faults(problem.tables[placement.width], plan)
    if wrong:
        return wrong
    rows = Rows(problem.tables[placement.width])
    loads = []
    for at, stage in enumerate(plan):
        load, size = rows.published_stage(stage, len(plan) - 1 - at, problem.recompute)
        loads.append(load)
        if size > problem.memory_bytes:
            wrong.append(f"stage {at} takes {size} bytes")
    devices = devices_of(rows, plan, placement.width)
    if placement.devices != devices:
        wrong.append(f"a replica has {devices} devices, not {placement.devices}")
    if d < 1 or d * devices > problem.devices:
        wrong.append(f"{d} replicas of {devices} devices are too many")
    if problem.replicas and d != problem.replicas:
        wrong.append(f"{d} replicas were not asked for")
    if problem.stages and len(plan) != problem.stages:
        wrong.append(f"{len(plan)} stages were not asked for")
    if len(placement.variants) != len(plan):
        wrong.append("there is not one variant for each stage")
    wrong += _differ("largest load", placement.max_load_s, max(loads))
    rounds = math.ceil(problem.micro_batches / d) + len(plan) - 1
    time = max(loads) * rounds + (d - 1) / d * total(rows.sync_s, plan[0])
    return wrong + _differ("time", placement.time_s, time)


def _pipeline_faults(problem, placement):
    table, plan = problem.table, placement.stages
    wrong = _cut_faults(table, plan)
    if wrong:
        return wrong
    if not problem.stages[0] <= len(plan) <= problem.stages[1]:
        wrong.append(f"{len(plan)} stages were not asked for")
    if (placement.devices, placement.replicas) != (len(plan), 1):
        wrong.append("devices are not one for each stage of one replica")
    if len(placement.variants) != len(plan):
        return [*wrong, "there is not one variant for each stage"]
    rows = Rows(table)
    for at, name in enumerate(placement.variants):
        if name not in table.variants:
            return [*wrong, f"there is no variant {name}"]
        _, size = stage_of_plan(rows, problem, plan, at, rows.variants.index(name))
        if size > problem.memory_bytes:
            wrong.append(f"stage {at} takes {size} bytes")
    if wrong:
        return wrong
    time, _, load = _pipeline_time(problem, rows, plan, placement.variants)
    wrong += _differ("largest load", placement.max_load_s, load)
    return wrong + _differ("time", placement.time_s, time)


def faults(problem, placement):
    """What is wrong with a placement that is said to be optimal; nothing where all is well."""
    published = hasattr(problem, "tables")
    found = (_published_faults if published else _pipeline_faults)(problem, placement)
    if placement.status != "optimal":
        found.append(f"status is {placement.status}")
    return found + _differ("bound", placement.bound_s, placement.time_s)
