"""Problems of the compiled evaluation of mappings: at random, small, packed as it takes them."""

import itertools
import math
import random

import numpy as np
import pytest
from reference import mapping_oracle as oracle
from reference.mapping_oracle import OFFLOAD, RECOMPUTE, STASH, Case, Edge, Op, OperatorMapping

from phaze_fast import _core
from phaze_fast.wafer.mapping.layout import slots_of

TABLES = {
    "forward": "forward_s",
    "backward": "backward_s",
    "stash": "stash_bytes",
    "live": "live_bytes",
    "parameters": "parameters",
    "weight_grad": "weight_grad_s",
}
CLOSE = 1e-12


# ---- problems at random ----


def combinations(dies):
    """Divisors, column of each (B, M, N, K), and the combinations in their order."""
    divisors = [d for d in range(1, dies + 1) if dies % d == 0]
    every = list(itertools.product(divisors, repeat=4))
    have = [cut for cut in every if dies % math.prod(cut) == 0]
    column = [have.index(cut) if cut in have else -1 for cut in every]
    return np.array(divisors, np.int32), np.array(column, np.int32), have


_PLAIN = {"chunks": 1, "zero_bubble": 0}


def random_tables(rng, ops, cuts):
    """Values that fall with the split, though not always; nothing kept by some operators."""
    tables = {name: {} for name in TABLES}
    for i in range(len(ops)):
        kept = rng.random() < 0.75
        weights = rng.choice([0.0, rng.uniform(0.1, 4.0)])
        share = rng.choice([0.0, rng.uniform(0.1, 0.9)])
        for cut in cuts:
            b, m, n, k = cut
            work = rng.uniform(0.2, 3.0) / math.prod(cut)
            tables["forward"][i, cut] = work
            tables["backward"][i, cut] = work * rng.uniform(1.0, 2.5)
            tables["weight_grad"][i, cut] = work * share
            tables["stash"][i, cut] = rng.uniform(0.5, 2.0) / (b * m * n) if kept else 0.0
            tables["live"][i, cut] = rng.uniform(0.0, 1.0)
            tables["parameters"][i, cut] = weights / (n * k)
    return tables


def random_op(rng, part):
    roles = {rng.choice("BR"), *rng.sample("BMNKR", rng.randint(1, 4))}
    outputs = [STASH]
    if part == 1:
        outputs += [o for o in (RECOMPUTE, OFFLOAD) if rng.random() < 0.7]
    return Op(
        part=part,
        roles="".join(sorted(roles)),
        outputs=tuple(outputs),
        product=rng.random() < 0.5,
        kept=rng.random() < 0.7,
        limit=(64, *(rng.choice([1, 2, 3, 4, 64]) for _ in range(3))),
        stat_bytes=rng.choice([0.0, rng.uniform(0.1, 1.0)]),
        gather_bytes=rng.choice([0.0, 0.0, rng.uniform(0.1, 2.0)]),
        expert=rng.random() < 0.25,
        overlaps=rng.choice(["", "input", "output"]),
    )


def random_edges(rng, parts):
    """Inside each part a graph without cycles, and the ways between the parts."""
    size = [rng.uniform(0.2, 4.0) for _ in parts]
    again = {}
    edges = []

    def add(source, target, kind):
        flag = again.setdefault((source, kind), rng.random() < 0.6)
        edges.append(Edge(source, target, kind, size[source], flag and kind != oracle.ENTRY))

    before, block, behind = ([i for i, p in enumerate(parts) if p == q] for q in range(3))
    for own in (before, block, behind):
        for at in range(1, len(own)):
            sources = {own[at - 1] if rng.random() < 0.7 else rng.choice(own[:at])}
            sources |= {s for s in own[:at] if rng.random() < 0.25}
            for source in sources:
                add(source, own[at], oracle.INSIDE)
    for target in {block[0], *(t for t in block if rng.random() < 0.25)}:
        add(block[-1], target, oracle.WRAP)
    for target in behind[:1]:
        add(block[-1], target, oracle.EXIT)
    for source in before[-1:]:
        add(source, block[0], oracle.ENTRY)
    chain = [block[-1]]
    while chain[0] != block[0]:
        feeds = [e.source for e in edges if e.target == chain[0] and e.kind == oracle.INSIDE]
        if not feeds:
            break
        chain.insert(0, rng.choice(feeds))
    rng.shuffle(edges)
    return edges, tuple(chain)


def _rim(link_s, rng):
    return {"stream_link_s": link_s, "stream_both_s": link_s * rng.uniform(1.0, 2.0)}


def random_rules(rng, stream):
    modes = {rng.randrange(4), *(w for w in range(4) if rng.random() < 0.5)}
    return {
        "x_bytes_per_s": rng.uniform(0.5, 4.0),
        "y_bytes_per_s": rng.uniform(0.5, 4.0),
        "hop_s": rng.choice([0.0, 0.01]),
        "capacity_bytes": 1e9,
        "stream_capacity_bytes": rng.choice([3.0, 10.0, 1e3]) if stream else 0.0,
        "stream_bytes_per_s": rng.uniform(0.5, 20.0) if stream else 0.0,
        "memory_bytes_per_s": rng.uniform(1.0, 10.0),
        "weight_bytes": 2.0,
        "gradient_bytes": rng.choice([2.0, 4.0]),
        "state_bytes": rng.choice([4.0, 12.0]),
        "step_bytes": rng.choice([0.0, 30.0]),
        "boundary_bytes": rng.uniform(0.1, 2.0),
        "micro_batches": rng.choice([1, 2, 3, 8]),
        "modes": sum(1 << w for w in modes | ({4, 5} if stream else set())),
        "volume": rng.random() < 0.2,
        "linear": rng.random() < 0.2,
        "stream_shared": rng.random() < 0.5,
        **rng.choice([_PLAIN, _PLAIN, _PLAIN | {"chunks": 2}, _PLAIN | {"zero_bubble": 1}]),
        "fabric": rng.choice([0, 0, 0, 1, 2]),
        "pieces": rng.choice([1, 2, 4]),
        "outer_tail_s": rng.choice([0.0, 0.5]),
        **_rim(rng.choice([0.0, rng.uniform(0.05, 1.5)]) if stream else 0.0, rng),
    }


def random_cross_stage(rng, count):
    """Of each stage and each: seconds for a byte either way, and for one of each."""
    one = [[rng.uniform(0.0, 0.5) for _ in range(count)] for _ in range(count)]
    return tuple(tuple((s, s * rng.uniform(1.0, 2.0)) for s in row) for row in one)


def random_case(rng, sides=(4, 3), most=(2, 5, 2), stages=4):
    while True:
        slots = tuple(tuple(run) for run in slots_of(*(rng.randint(1, s) for s in sides)))
        counts = [rng.randint(0, most[0]), rng.randint(1, most[1]), rng.randint(0, most[2])]
        parts = [p for p in range(3) for _ in range(counts[p])]
        ops = [random_op(rng, part) for part in parts]
        edges, chain = random_edges(rng, parts)
        count = rng.randint(1, stages)
        _, _, cuts = combinations(math.prod(size for _, size, _ in slots))
        case = Case(
            slots=slots,
            ops=ops,
            edges=edges,
            rules=random_rules(rng, rng.random() < 0.5),
            tables=random_tables(rng, ops, cuts),
            blocks=tuple(rng.choice([0, 1, 2, 3, 5]) for _ in range(count)),
            boundary_s=tuple(rng.uniform(0.0, 0.5) for _ in range(count)),
            chain=chain,
            cross_stage_s=random_cross_stage(rng, count) if rng.random() < 0.3 else (),
        )
        if all(legal_axis_assignments(case, i) for i in range(len(ops))):
            return case


def legal_axis_assignments(case, i):
    """Every assignment of roles to slots that keeps the rules, from all there are."""
    op, found = case.ops[i], []
    for roles in itertools.product(oracle.ROLES, repeat=len(case.slots)):
        op_mapping = OperatorMapping(roles)
        runs = {0: [], 1: []}  # roles along each axis, neighbours that are alike taken together
        for role, (axis, _, _) in zip(roles, case.slots, strict=True):
            runs[axis] += [role] if runs[axis][-1:] != [role] else []
        rank = [("KN".find(r) >= 0 and 1) or ("MR".find(r) >= 0 and 2) or 3 for r in roles]
        if (
            set(roles) <= set(op.roles)
            and all(
                f <= most
                for f, most in zip(oracle.factors(case, op_mapping), op.limit, strict=True)
            )
            and max(map(len, runs.values())) <= _core.RUNS_PER_AXIS
            and (not case.rules["linear"] or rank == sorted(rank))
        ):
            found.append(roles)
    return found


def random_op_mapping(rng, case, i):
    modes = [w for w in range(6) if case.rules["modes"] >> w & 1]
    return OperatorMapping(
        rng.choice(legal_axis_assignments(case, i)), rng.choice(modes), rng.randrange(4)
    )


def random_op_mappings(rng, case):
    return [random_op_mapping(rng, case, i) for i in range(len(case.ops))]


def tighten(rng, case, op_mappings):
    """Give a die less than everything kept needs: now and then less than there must be."""
    stages = oracle.evaluate(case, op_mappings)[1]
    fullest = max(stages, key=lambda stage: stage.memory_bytes)
    low, high = fullest.least_bytes, fullest.memory_bytes
    case.rules["capacity_bytes"] = low * 0.97 + rng.random() * (high * 1.03 - low * 0.97) + 1e-3


# ---- the same problem compiled ----


def arguments(case):
    bit = lambda values: sum(1 << v for v in values)  # noqa: E731
    slots = np.array(list(case.slots), dtype=_core.MESH_RUN_DTYPE)
    ops = np.array(
        [
            (
                op.part,
                bit(oracle.ROLES.index(r) for r in op.roles),
                bit(op.outputs),
                op.product,
                op.kept,
                op.expert,
                ("", "input", "output").index(op.overlaps),
                op.limit,
                op.stat_bytes,
                op.gather_bytes,
            )
            for op in case.ops
        ],
        dtype=_core.MAP_OP_DTYPE,
    )
    edges = np.array(
        [(e.source, e.target, e.kind, e.again, e.bytes) for e in case.edges],
        dtype=_core.MAP_EDGE_DTYPE,
    )
    names = _core.MAP_RULES_DTYPE.names
    given = dict.fromkeys(names, 0) | {"pieces": 1} | case.rules
    rules = np.array([tuple(given[n] for n in names)], dtype=_core.MAP_RULES_DTYPE)
    divisors, column, cuts = combinations(math.prod(case.sizes))
    tables = {
        field: np.array([case.tables[name][i, cut] for i in range(len(case.ops)) for cut in cuts])
        for name, field in TABLES.items()
    }
    return {
        "slots": slots,
        "ops": ops,
        "edges": edges,
        "rules": rules,
        "divisors": divisors,
        "column": column,
        **tables,
        "blocks": np.array(case.blocks, dtype=np.int32),
        "boundary_s": np.array(case.boundary_s, dtype=float),
        "chain": np.array(case.chain, dtype=np.int32),
        "cross_stage_s": np.ravel(case.cross_stage_s) if case.cross_stage_s else None,
    }


def packed(op_mappings):
    found = np.zeros(len(op_mappings), dtype=_core.OP_MAPPING_DTYPE)
    for row, op_mapping in zip(found, op_mappings, strict=True):
        masks = [
            sum(1 << k for k, g in enumerate(op_mapping.roles) if g == r) for r in oracle.ROLES
        ]
        row["slots"], row["mode"], row["algorithm"] = masks, op_mapping.mode, op_mapping.algorithm
    return found


def compiled(case, op_mappings=None):
    made = _core.Mapping(**arguments(case))
    if op_mappings is not None:
        made.assign(packed(op_mappings))
    return made


def agree(case, op_mappings, given=None):
    """Compare every figure; where outputs are chosen, by their time, since ways can tie."""
    mapping = compiled(case, op_mappings)
    flat = None if given is None else np.array(given, np.uint8).reshape(-1)
    score = mapping.score(flat)[0]
    values, chosen = mapping.stages(flat)
    ways = given and [dict(enumerate(row)) for row in given]
    _, best = oracle.evaluate(case, op_mappings, ways)
    # Ways that tie for one stage may stream more or less past the others.
    time_s, stages = oracle.evaluate(
        case, op_mappings, [dict(enumerate(row)) for row in chosen.tolist()]
    )
    assert score["time_s"] == pytest.approx(time_s, rel=CLOSE)
    isolated_s = values["isolated_s"]
    assert isolated_s == pytest.approx([s.isolated_s for s in best], rel=CLOSE)
    assert isolated_s == pytest.approx([s.isolated_s for s in stages], rel=CLOSE)
    tail_s = max(s.tail_s for s in stages) + case.rules["outer_tail_s"]
    assert score["tail_s"] == pytest.approx(tail_s, rel=CLOSE)
    slowest = max(s.load_s for s in stages)
    assert score["slowest_stage_s"] == pytest.approx(slowest, rel=CLOSE)
    for name in ("load_s", "memory_bytes", "state_bytes", "activation_bytes"):
        expected = [getattr(s, name) for s in stages]
        assert values[name] == pytest.approx(expected, rel=CLOSE, abs=1e-12), name
    slack = 1e-11 * max(s.memory_bytes for s in stages)
    assert values["over_bytes"] == pytest.approx([s.over_bytes for s in stages], abs=slack)
    for name in ("memory_bytes", "stream_bytes"):
        expected = max(getattr(s, name) for s in stages)
        assert score[name] == pytest.approx(expected, rel=CLOSE), name
    return score, best


def small(count=2, slots=((0, 2, 1),), **rules):
    """Operators in a chain that accept everything and cost one of everything."""
    _, _, cuts = combinations(math.prod(size for _, size, _ in slots))
    return Case(
        slots=slots,
        ops=[Op(1, "BMNKR") for _ in range(count)],
        edges=[Edge(i, i + 1, oracle.INSIDE, 1.0) for i in range(count - 1)],
        rules=random_rules(random.Random(0), False)
        | {"modes": 1, "volume": 0, "linear": 0, "hop_s": 0.0, "micro_batches": 1}
        | _PLAIN
        | {
            "outer_tail_s": 0.0,
            "fabric": 0,
            "pieces": 1,
            "stream_link_s": 0.0,
            "stream_both_s": 0.0,
        }
        | rules,
        tables={name: {(i, cut): 1.0 for i in range(count) for cut in cuts} for name in TABLES},
        blocks=(1,),
        boundary_s=(0.0,),
        chain=tuple(range(count)),
    )


def fits(score):
    return score["over_bytes"] == 0.0 and score["stream_over_bytes"] == 0.0


def objective(case, score):
    """What a search makes small: seconds where it fits, else what is missing, beyond any time."""
    over = score["over_bytes"] + score["stream_over_bytes"]
    return 1e18 * (1 + over / case.rules["capacity_bytes"]) if over else score["time_s"]


def tight_case(rng, **sizes):
    while True:
        case = random_case(rng, **sizes)
        op_mappings = random_op_mappings(rng, case)
        tighten(rng, case, op_mappings)
        if case.edges:
            return case, op_mappings
