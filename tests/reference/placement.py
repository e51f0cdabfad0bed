"""Placements by trying every cut, with every sum written out: the oracle of the placement kernel.

A plan is a tuple of stages, first to last; a stage is a tuple of layers in increasing order.
"""

import math
from functools import cache, lru_cache, partial
from itertools import product


def closed_sets(layers, edges):
    """Every set of layers with which come all that they wait for."""
    found = []
    for member in product((False, True), repeat=layers):
        if all(member[a] or not member[b] for a, b in edges):
            found.append(frozenset(i for i in range(layers) if member[i]))
    return found


@lru_cache(maxsize=4096)
def _all_plans(layers, edges):
    cuts = closed_sets(layers, edges)
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
    return _all_plans(len(table.names), tuple((int(a), int(b)) for a, b in table.edges))


class Rows:
    """A table in plain lists, with what is asked of one stage."""

    def __init__(self, table):
        for name in ("forward_s", "backward_s", "sync_s"):
            setattr(self, name, [float(v) for v in getattr(table, name)])
        for name in ("stash_bytes", "resident_bytes", "once_bytes"):
            setattr(self, name, [float(v) for v in getattr(table, name)])
        self.wide = [bool(v) for v in table.wide]
        self.edges = [(int(a), int(b)) for a, b in table.edges]
        self.edge_s = [float(v) for v in table.edge_s]
        self.edge_bytes = [float(v) for v in table.edge_bytes]
        self.published_stage = cache(partial(published_stage, self))

    def entering(self, stage):
        """Edges into a stage from outside."""
        return [e for e, (a, b) in enumerate(self.edges) if a not in stage and b in stage]

    def leaving(self, stage):
        """Edges out of a stage."""
        return [e for e, (a, b) in enumerate(self.edges) if a in stage and b not in stage]


def total(values, stage):
    """Sum over the layers of a stage."""
    return sum(values[i] for i in stage)


# ---- the published objective ----


def published_stage(rows, stage, after, recompute):
    """Load and bytes of a stage with so many stages after it."""
    entering, leaving = rows.entering(stage), rows.leaving(stage)
    forward, backward = total(rows.forward_s, stage), total(rows.backward_s, stage)
    c_in = sum(rows.edge_s[e] for e in entering)
    c_out = sum(rows.edge_s[e] for e in leaving)
    stash = total(rows.stash_bytes, stage)
    load = c_in + forward + c_out + backward
    if recompute:
        stash = sum(rows.edge_bytes[e] for e in entering)
        if after > 0:
            load = c_in + forward + max(forward, c_out) + backward
    return load, total(rows.resident_bytes, stage) + total(rows.once_bytes, stage) + after * stash


def devices_of(rows, plan, width):
    """Devices of one replica."""
    return sum(width if any(rows.wide[i] for i in stage) else 1 for stage in plan)


def published_time(problem, rows, width, plan):
    loads = []
    for at, stage in enumerate(plan):
        load, size = rows.published_stage(stage, len(plan) - 1 - at, problem.recompute)
        if size > problem.memory_bytes:
            return None
        loads.append(load)
    sync = total(rows.sync_s, plan[0])
    best = None
    for d in range(1, problem.devices // devices_of(rows, plan, width) + 1):
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
            scored = published_time(problem, rows, width, plan)
            if scored is not None and (best is None or scored[0] < best[0]):
                best = (scored[0], width, plan, scored[1])
    return best


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
    wrong += _differ("largest load", placement.max_load_s, max(loads))
    rounds = math.ceil(problem.micro_batches / d) + len(plan) - 1
    time = max(loads) * rounds + (d - 1) / d * total(rows.sync_s, plan[0])
    return wrong + _differ("time", placement.time_s, time)


def faults(problem, placement):
    """What is wrong with a placement that is said to be optimal; nothing where all is well."""
    found = _published_faults(problem, placement)
    if placement.status != "optimal":
        found.append(f"status is {placement.status}")
    return found + _differ("bound", placement.bound_s, placement.time_s)
