"""Problems with two classes of stages, and a plain evaluator of them that takes no table of the code."""

import itertools
import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
from reference import mapping_oracle as oracle
from reference.mesh_simulator import Traffic

from phaze_fast.errors import InvalidInputError
from phaze_fast.memory import optimizer
from phaze_fast.wafer import Layout, Problem, load_wafer
from phaze_fast.wafer.mapping.evaluate import Classes
from phaze_fast.wafer.mapping.layout import slots_of
from phaze_fast.wafer.mapping.operators import OUTPUTS, PARTS, PIECES, ROLES, passes
from phaze_fast.wafer.mapping.packing import class_places
from phaze_fast.wafer.mapping.placement import cross_stage_link_s, stream_link_s
from phaze_fast.wafer.mapping.problem import network_chip, operator_costs

KINDS = ("mesh", "wafers", "switch", "both")


def elsewhere(problem, rng, kind):
    """The same problem on one mesh, several wafers, behind switches, or several with switches."""
    wafer = problem.wafer
    if kind in ("switch", "both"):
        rate = rng.choice([1e10, 1e11, 1e12])
        switch = load_wafer("switch-wafer").switch
        switch = switch.replace(bandwidth_bytes_per_s=rate, sums=rng.random() < 0.5)
        wafer = wafer.replace(switch=switch)
    if kind in ("wafers", "both"):
        io = load_wafer("dojo-tile-like").io
        wafer = wafer.replace(wafer_count=rng.choice([2, 2, 3, 4]), io=io)
    rules = problem.recompute, problem.volume, problem.linear, problem.capacity_bytes
    return Problem(problem.model, wafer, problem.training, *rules, problem.work, problem.overlap)


def shaped(problem, shapes, micro_batch):
    """Every split of a model's blocks over two classes of so many stages."""
    (a, b, n), (c, d, k) = shapes
    for blocks in itertools.product(range(1, problem.work.blocks + 1), repeat=n + k):
        if sum(blocks) == problem.work.blocks:
            yield (
                Layout(a, b, n, micro_batch, blocks=blocks[:n]),
                Layout(c, d, k, micro_batch, blocks=blocks[n:]),
            )


def every_pair(problem):
    """Every two shapes, numbers of stages and replicas, splits of blocks and micro-batches."""
    wafer, batch = problem.wafer, problem.training.global_batch
    columns, rows = wafer.grid
    sides = [(w, h) for w in range(1, columns + 1) for h in range(1, rows + 1)]
    if wafer.switch is not None:
        sides = [(w, 1) for w in range(1, wafer.dies)]
    counts, wafers = range(1, problem.work.blocks), wafer.wafer_count
    replicas = [r for r in range(1, wafers + 1) if wafers % r == batch % r == 0]
    for one, other in itertools.permutations(sides, 2):
        for n, k, r in itertools.product(counts, counts, replicas):
            shapes = (*one, n), (*other, k)
            fits = n + k <= problem.work.blocks and class_places(wafer, shapes, wafers // r)
            for micro_batch in range(1, batch // r + 1) if fits else ():
                if batch // r % micro_batch == 0:
                    for pair in shaped(problem, shapes, micro_batch):
                        yield tuple(replace(each, replicas=r) for each in pair)


def compiled_at_random(rng, problem, most):
    """Two classes of one of the first pairs; None where there is none."""
    pairs = list(itertools.islice(every_pair(problem), most))
    try:
        return Classes(problem, rng.choice(pairs)) if pairs else None
    except InvalidInputError:
        return None


def drawn(rng, mapping, slots, modes):
    """Operator mappings at random, as the kernel and as the oracle take them."""
    rows, plain = [], []
    for i in range(len(mapping.op_mappings())):
        row = mapping.choices(i)[rng.randrange(len(mapping.choices(i)))].copy()
        row["mode"], row["algorithm"] = rng.randrange(modes), rng.randrange(4)
        masks = [int(mask) for mask in row["slots"]]
        roles = [next(oracle.ROLES[r] for r in range(5) if masks[r] >> k & 1) for k in range(slots)]
        plain.append(oracle.OperatorMapping(tuple(roles), int(row["mode"]), int(row["algorithm"])))
        rows.append(row)
    mapping.assign(np.array(rows, dtype=mapping.op_mappings().dtype))
    return plain


def fastest(problem, pair):
    """The best of all operator mappings of two classes; None where there are too many."""
    try:
        classes = Classes(problem, pair)
    except InvalidInputError:
        return math.inf
    if max(mapping.mapping_count() for mapping in classes.mappings) > 500:
        return None
    sides = []
    for which, mapping in enumerate(classes.mappings):
        rows = []
        choices = [
            [
                (row, mode)
                for row in mapping.choices(i)
                for mode in (range(len(problem.modes)) if op.parameters else (0,))
            ]
            for i, op in enumerate(problem.work.operators)
        ]
        for some in itertools.product(*choices):
            op_mappings = np.array([row for row, _ in some], dtype=mapping.op_mappings().dtype)
            op_mappings["mode"] = [mode for _, mode in some]
            mapping.assign(op_mappings)
            score = mapping.score()[0]
            if score["over_bytes"] + score["stream_over_bytes"] <= 0:
                rows.append((op_mappings, classes.times(which)))
        sides.append(rows)

    def step_s(one, other):
        times = one[1]
        classes.mappings[1].assign(other[0])
        classes.mappings[1].set_others(times.sum_s, times.slowest_s, times.tail_s, times.streams)
        return float(classes.mappings[1].score()["time_s"][0])

    return min((step_s(*both) for both in itertools.product(*sides)), default=math.inf)


# ---- the plain evaluator ----


def mesh_sends(wafer, placed, border):
    """Seconds per byte of each stage: every message by its XY route, the busiest link counts."""
    columns, rows = wafer.grid
    traffic = Traffic(columns, rows, wafer.link_bytes_per_s)
    messages = []
    for k, (here, there) in enumerate(itertools.pairwise(placed)):
        both = itertools.product(here, there) if k == border else zip(here, there, strict=True)
        both = list(both)
        for sender, pairs in ((k, both), (k + 1, [(b, a) for a, b in both])):
            routes = [traffic.route(y * columns + x, v * columns + u) for (x, y), (u, v) in pairs]
            messages.append((sender, routes))
    busy = np.zeros(4 * columns * rows)
    for _, routes in messages:
        for link in itertools.chain(*routes):
            busy[link] += traffic.seconds_per_byte[link] / len(routes)
    seconds = [[0.0, 0] for _ in placed]
    for sender, routes in messages:
        seconds[sender][0] += max(busy[link] for route in routes for link in route)
        seconds[sender][1] += max(map(len, routes))
    return [[rate, hops * wafer.hop_latency_s] for rate, hops in seconds]


def plain_sends(wafer, dies, numbers, border):
    """Seconds per byte and seconds of each stage: mesh or switches on each wafer, I/O between."""
    seconds = [[0.0, 0.0] for _ in dies]
    for number in sorted(set(numbers)):
        here = [k for k, on in enumerate(numbers) if on == number]
        if wafer.switch is None:
            inner = mesh_sends(wafer, [dies[k] for k in here], border - here[0])
            for k, own in zip(here, inner, strict=True):
                seconds[k] = own
            continue
        for k, other in itertools.permutations(here, 2):
            if abs(k - other) == 1:
                fewer = min(len(dies[k]), len(dies[other]))
                seconds[k][0] += 1 / fewer / wafer.switch.bandwidth_bytes_per_s
                seconds[k][1] += 2 * wafer.hop_latency_s
    for k, (one, other) in enumerate(itertools.pairwise(numbers)):
        for end in (k, k + 1) if one != other else ():
            seconds[end][0] += 1 / wafer.io.bandwidth_bytes_per_s
            seconds[end][1] += wafer.io.latency_s
    return seconds


def plain_cross_stage(problem, classes):
    """Streams of stages over one another's links, on each wafer by itself."""
    stages = len(classes.placement.dies)
    seconds = np.zeros((stages, stages, 2))
    for number in set(classes.placement.wafers):
        here = [k for k in range(stages) if classes.placement.wafers[k] == number]
        placed = tuple(classes.placement.dies[k] for k in here)
        seconds[np.ix_(here, here)] = cross_stage_link_s(problem.wafer, placed)
    return seconds.tolist()


def plain_sums_s(problem, classes):
    """Replicas' sums over I/O: the wafer with most parameters, in a ring."""
    io, replicas = problem.wafer.io, classes.layouts[0].replicas
    if replicas == 1:
        return 0.0
    blocks = classes.layouts[0].blocks + classes.layouts[1].blocks
    counts = dict.fromkeys(classes.placement.wafers, 0.0)
    for k, number in enumerate(classes.placement.wafers):
        parts = {"block": blocks[k], "before": k == 0, "behind": k == len(blocks) - 1}
        counts[number] += sum(op.parameters * parts[op.part] for op in problem.work.operators)
    volume = max(counts.values()) * problem.gradient_bytes
    return 2 * (replicas - 1) * (volume / replicas / io.bandwidth_bytes_per_s + io.latency_s)


def plain_rules(problem, classes, which):
    """What the hardware, the optimiser and the step say about one class, by hand."""
    wafer, spec = problem.wafer, optimizer(problem.training.optimizer)
    layout, hops = classes.layouts[which], classes.placement.classes[which].hops
    x, y = wafer.link_bytes_per_s
    bent = bool(hops) and wafer.switch is None
    share = problem.training.global_batch // layout.replicas
    rules = {
        "x_bytes_per_s": min(x, y) if bent else x,
        "y_bytes_per_s": min(x, y) if bent else y,
        "hop_s": wafer.hop_latency_s * (hops if bent else 1),
        "fabric": 0 if wafer.switch is None else 1 + wafer.switch.sums,
        "capacity_bytes": problem.capacity_bytes,
        "memory_bytes_per_s": (wafer.chip.hbm or wafer.tiers()[0]).bandwidth_bytes_per_s,
        "weight_bytes": spec.weight_bytes,
        "gradient_bytes": spec.gradient_bytes,
        "state_bytes": spec.state_bytes,
        "step_bytes": 2 * spec.weight_bytes + 2 * spec.state_bytes + spec.gradient_bytes,
        "boundary_bytes": problem.work.boundary_bytes * layout.micro_batch,
        "micro_batches": -(-share // layout.micro_batch),
        "volume": 0,
        "chunks": 1,
        "zero_bubble": 0,
        "pieces": PIECES if problem.overlap else 1,
        "outer_tail_s": plain_sums_s(problem, classes),
        "stream_shared": wafer.off_wafer is not None and not wafer.off_wafer.duplex,
    }
    names = ("stream_capacity_bytes", "stream_bytes_per_s", "stream_link_s", "stream_both_s")
    if problem.stream is None:
        return rules | dict.fromkeys(names, 0.0)
    used = {number: [] for number in classes.placement.wafers}
    for dies, number in zip(classes.placement.dies, classes.placement.wafers, strict=True):
        used[number] += dies
    busiest = [
        max(s) for s in zip(*(stream_link_s(wafer, tuple(d)) for d in used.values()), strict=True)
    ]
    reached = max(busiest) < math.inf
    more = wafer.dies / max(len(used[number]) for number in classes.placement.classes[which].wafers)
    values = (
        problem.stream.capacity_bytes * more if reached else 0.0,
        problem.stream.bandwidth_bytes_per_s * more,
        *(busiest if reached else (0.0, 0.0)),
    )
    return rules | dict(zip(names, values, strict=True))


@lru_cache(maxsize=64)
def plain_tables(problem, dies, micro_batch):
    """Seconds, bytes and parameters of every legal split, each part priced as an operator."""
    names = ("forward", "backward", "stash", "live", "parameters", "weight_grad")
    tables = {name: {} for name in names}
    divisors = [d for d in range(1, dies + 1) if dies % d == 0]
    cuts = [c for c in itertools.product(divisors, repeat=4) if dies % math.prod(c) == 0]
    priced, specs = [], []
    for i, op in enumerate(problem.work.operators):
        limits = [op.limit(role, micro_batch) for role in ROLES[:4]]
        for cut in cuts:
            roles = zip(cut, limits, ROLES[:4], strict=True)
            if all(f == 1 or (role in op.roles and f <= most) for f, most, role in roles):
                local = [-(-max(most, 1) // f) for f, most in zip(cut, limits, strict=True)]
                spec = op.parts(op.shapes(np.array([local])))
                priced.append((i, op, cut, local, spec, passes(spec)))
                specs += [(each, 1) for each in priced[-1][-1]]
    chip = problem.wafer.chip
    seconds = iter(operator_costs(chip, network_chip(problem.wafer), specs)[0])
    for i, op, cut, (b, m, n, k), spec, every in priced:
        forward, *backward = ((each.kind, float(next(seconds))) for each in every)
        weights = 2 * spec.k * spec.n * spec.b if spec.kind == "gemm" else 0.0
        inner = k / op.inner_units if op.inner_units else 1.0
        experts = m / op.seq_rows if op.expert else 1.0
        row = {
            "forward": forward[1],
            "backward": sum(s for _, s in backward),
            "stash": op.kept_bytes * b * (m / op.seq_rows) * (n / op.units),
            "live": float(np.sum(spec.read_bytes + spec.write_bytes - weights)),
            "parameters": op.parameters * (n / op.units) * inner * experts,
            "weight_grad": sum(s for kind, s in backward if kind == "gemm-weight-gradient"),
        }
        for name, value in row.items():
            tables[name][i, cut] = value
    return tables


def case_of(problem, classes, which):
    """One class as the oracle takes it, among all stages of the pipeline."""
    layout = classes.layouts[which]
    dies, mb = layout.dies, layout.micro_batch
    letters = dict(zip(ROLES, oracle.ROLES, strict=True))
    kinds = ("inside", "entry", "wrap", "exit")
    case = oracle.Case(
        slots=tuple(tuple(run) for run in slots_of(layout.width, layout.height)),
        ops=[
            oracle.Op(
                PARTS.index(op.part),
                "".join(letters[role] for role in op.roles),
                tuple(map(OUTPUTS.index, problem.accepted_outputs(i))),
                op.product,
                tuple(op.limit(role, mb) for role in ROLES[:4]),
                op.output_kept,
                op.expert,
                op.stat_bytes * mb,
                op.gather_bytes * mb,
                op.overlaps,
            )
            for i, op in enumerate(problem.work.operators)
        ],
        edges=[
            oracle.Edge(e.source, e.target, kinds.index(e.kind), e.bytes * mb, e.again)
            for e in problem.work.edges
        ],
        rules=plain_rules(problem, classes, which),
        tables=plain_tables(problem, dies, mb),
        blocks=classes.layouts[0].blocks + classes.layouts[1].blocks,
        boundary_s=(),
        chain=problem.work.chain,
    )
    size, border = problem.work.boundary_bytes * mb, classes.layouts[0].stages - 1
    boundary = []
    sends = plain_sends(problem.wafer, classes.placement.dies, classes.placement.wafers, border)
    for k, (rate, fixed) in enumerate(sends):
        exchange = 0.0
        if k == border + which:  # the stage of this class next to the other one
            exchange = oracle.seconds(case, "all-to-all", range(len(case.slots)), size / dies)
        boundary.append(rate + (fixed + exchange) / size)
    case.boundary_s = tuple(boundary)
    return case


def plain_step(problem, classes, op_mappings):
    """Seconds of a step and its stages, each class by the oracle, the step by its own formula.

    Outputs are those that the kernel chose: of choices that tie for one stage, some stream more
    than others past the other stages.
    """
    first, stages = classes.layouts[0], []
    border = first.stages
    for which in (0, 1):
        case = case_of(problem, classes, which)
        own = range(border) if which == 0 else range(border, len(case.blocks))
        if problem.stream is not None and problem.wafer.switch is None:
            case.cross_stage_s, case.own_stages = plain_cross_stage(problem, classes), own
        parts, items = oracle.parts_of(case, op_mappings[which])
        chosen = classes.mappings[which].stages()[1].tolist()
        for k, row in zip(own, chosen, strict=True):
            best, stage = (
                oracle.stage_of(case, op_mappings[which], parts, items, k, given)
                for given in (None, dict(enumerate(row)))
            )
            assert math.isclose(stage.isolated_s, best.isolated_s, rel_tol=1e-9)
            stages.append(stage)
    links_s = oracle.charge(case.rules, case.cross_stage_s, stages) if case.cross_stage_s else 0.0
    loads = [stage.load_s for stage in stages]
    tail_s = max(s.tail_s for s in stages) + case.rules["outer_tail_s"]
    batches = case.rules["micro_batches"]
    return (batches - 1) * max(*loads, links_s) + sum(loads) + tail_s, stages
