"""What mappings choose from, memory as a limit, and bounds that are never too high."""

import itertools
import math
import random

import numpy as np
import pytest
from mapping_cases import (
    agree,
    compiled,
    fits,
    legal_axis_assignments,
    packed,
    random_case,
    random_op_mappings,
    small,
    tight_case,
    tighten,
)
from reference import mapping_oracle as oracle
from reference.mapping_oracle import OFFLOAD, RECOMPUTE, STASH, OperatorMapping

from phaze_fast.errors import InvalidInputError
from phaze_fast.models import load
from phaze_fast.wafer import load_wafer
from phaze_fast.wafer.mapping.layout import Layout, slots_of
from phaze_fast.wafer.mapping.problem import Problem, WaferTraining
from phaze_fast.wafer.search.bounds import roofline

THETAS = PHIS = (0.0, 0.5, 1.0)


# ---- rules of the encoding ----


def test_choices_are_all_axis_assignments_that_keep_the_rules():
    rng = random.Random(6)
    for _ in range(60):
        case = random_case(rng, sides=(8, 4))
        mapping = compiled(case)
        for i in range(len(case.ops)):
            expected = {
                packed([OperatorMapping(roles)])["slots"].tobytes()
                for roles in legal_axis_assignments(case, i)
            }
            found = [row["slots"].tobytes() for row in mapping.choices(i)]
            assert len(found) == len(set(found))
            assert set(found) == expected
            for roles in itertools.product(oracle.ROLES, repeat=len(case.slots)):
                if rng.random() < 0.1:
                    op_mapping = packed(
                        [OperatorMapping(roles, rng.randrange(7), rng.randrange(5))]
                    )
                    allowed = (
                        op_mapping["mode"][0] < 6
                        and case.rules["modes"] >> op_mapping["mode"][0] & 1
                    )
                    allowed = allowed and op_mapping["algorithm"][0] < 4
                    assert mapping.legal(i, op_mapping) == (
                        bool(allowed) and op_mapping["slots"].tobytes() in expected
                    )


def test_at_most_so_many_runs_of_roles_along_an_axis():
    for sides, roles in (((16, 2), "BMR"), ((2, 32), "NR")):
        case = small(1, slots=tuple(tuple(run) for run in slots_of(*sides)))
        case.ops[0].roles = roles
        mapping, axis_assignments = compiled(case), legal_axis_assignments(case, 0)
        found = {row["slots"].tobytes() for row in mapping.choices(0)}
        assert len(axis_assignments) < len(roles) ** len(case.slots)
        assert found == {
            packed([OperatorMapping(axis_assignment)])["slots"].tobytes()
            for axis_assignment in axis_assignments
        }
        for axis_assignment in itertools.product(roles, repeat=len(case.slots)):
            assert mapping.legal(0, packed([OperatorMapping(axis_assignment)])) == (
                axis_assignment in axis_assignments
            )


# ---- memory ----


def test_memory_is_a_hard_constraint():
    rng = random.Random(7)
    seen = set()
    for _ in range(150):
        case = random_case(rng)
        op_mappings = random_op_mappings(rng, case)
        case.rules["stream_capacity_bytes"] *= 1e6  # enough room off the wafer
        tighten(rng, case, op_mappings)
        score, stages = agree(case, op_mappings)
        tight = any(s.least_bytes > case.rules["capacity_bytes"] for s in stages)
        assert (score["over_bytes"] > 0) == tight
        if not tight:
            assert score["memory_bytes"] <= case.rules["capacity_bytes"] * (1 + 1e-12)
        seen.add(tight)
    assert seen == {True, False}


def test_outputs_are_chosen_exactly_where_recomputation_and_the_stream_are_balanced():
    rng = random.Random(8)
    mixed = 0
    for _ in range(80):
        count = rng.randint(3, 6)
        case = small(count, slots=(), stream_capacity_bytes=1e6)
        case.blocks = (rng.choice([2, 3, 7]),)
        for name, low, high in (("forward", 0.2, 3.0), ("backward", 0.2, 1.0), ("stash", 0.5, 3.0)):
            case.tables[name] = {at: rng.uniform(low, high) for at in case.tables[name]}
        for op in case.ops:
            op.outputs = rng.choice([(0, 1, 2), (0, 1, 2), (0, 2), (0, 1)])
        case.edges = [e._replace(again=rng.random() < 0.5) for e in case.edges]
        work = sum(case.tables["forward"].values()) + sum(case.tables["backward"].values())
        saved = sum(case.tables["stash"].values())
        case.rules["stream_bytes_per_s"] = rng.uniform(0.6, 2.2) * saved / work
        link_s = rng.choice([0.0, 0.3, 1.2]) / case.rules["stream_bytes_per_s"]
        case.rules |= {"modes": 16, "state_bytes": 0.0, "stream_link_s": link_s}
        case.rules["stream_both_s"] = 1.5 * link_s
        weights = rng.choice([0.0, work * case.rules["stream_bytes_per_s"]])  # stream too
        case.tables["parameters"] = dict.fromkeys(case.tables["stash"], weights / 8 / count)
        op_mappings = [OperatorMapping((), 4)] * count
        tighten(rng, case, op_mappings)
        _, stages = agree(case, op_mappings)
        mixed += {RECOMPUTE, OFFLOAD} <= set(stages[0].outputs.values())
    assert mixed > 15


# ---- the bound against everything there is ----


def tiny_case(rng):
    """Two to four operators that accept few roles, on two to four dies."""
    while True:
        case = random_case(rng, sides=rng.choice([(2, 1), (3, 1), (4, 1), (2, 2)]), most=(1, 3, 1))
        for op in case.ops:
            keep = rng.sample(op.roles, min(rng.choice([1, 1, 2, 3]), len(op.roles)))
            op.roles, op.limit = "".join(keep), (64, 64, 64, 64)
        modes = [w for w in range(6) if case.rules["modes"] >> w & 1]
        case.rules["modes"] = sum(1 << w for w in rng.sample(modes, min(2, len(modes))))
        if modes[-1] == 5 and rng.random() < 0.5:  # now and then the stream is all that counts
            case.rules["modes"] = 16
            case.rules["stream_bytes_per_s"] = rng.uniform(0.1, 1.0)
        if 2 <= len(case.ops) <= 4:
            return case


def every_score(case, mapping):
    """Scores of all operator mappings; outputs are chosen exactly in each (test_mapping)."""
    modes = [w for w in range(6) if case.rules["modes"] >> w & 1]
    op_mappings = []
    for i in range(len(case.ops)):
        choices = np.repeat(mapping.choices(i), len(modes))
        choices["mode"] = np.tile(modes, len(mapping.choices(i)))
        op_mappings.append(choices)
    mapping.assign(np.concatenate([g[:1] for g in op_mappings]))
    for ways in itertools.product(*(range(len(g)) for g in op_mappings)):
        for i, at in enumerate(ways):
            mapping.change(i, op_mappings[i][at : at + 1])
        yield mapping.score()[0].copy()


def prices(case, time_s):
    unit = time_s / case.rules["capacity_bytes"] / case.rules["micro_batches"]
    return [0.0, *(unit * f for f in (0.01, 0.1, 0.5, 1.0, 3.0, 30.0))]


def test_the_bound_is_below_every_mapping_of_tiny_problems():
    rng = random.Random(1)
    cases = costlier = 0
    for _ in range(300):
        case = tiny_case(rng)
        mapping = compiled(case)
        if math.prod(2 * len(mapping.choices(i)) for i in range(len(case.ops))) > 3000:
            continue
        case.rules["capacity_bytes"] = 1e-6  # then everything is recomputed that may be
        least = min(s["memory_bytes"] for s in every_score(case, compiled(case)))
        case.rules["capacity_bytes"] = least * (1.0 + 0.5 * rng.random() ** 3) + 1e-3
        mapping = compiled(case)
        times = [s["time_s"] for s in every_score(case, mapping) if s["over_bytes"] == 0.0]
        cases += bool(times)
        for best in [min(times)] if times else []:
            free = max(mapping.relaxation().bound(theta, 0.0)[0] for theta in THETAS)
            for given in itertools.product(THETAS, prices(case, best), PHIS):
                bound, op_mappings = mapping.relaxation().bound(*given)
                assert 0.0 <= bound <= best
                mapping.assign(op_mappings)  # a start for a search: legal
                costlier += bound > free
    assert cases > 250
    assert costlier > 10


def test_the_bound_is_below_every_way_of_outputs_too():
    """The oracle tries outputs that no choice would make: all of them that fit are above."""
    rng = random.Random(2)
    for _ in range(25):
        case = tiny_case(rng)
        op_mappings = random_op_mappings(rng, case)
        tighten(rng, case, op_mappings)
        mapping = compiled(case)
        have = case.rules["stream_capacity_bytes"] > 0
        ways = [[o for o in op.outputs if o != OFFLOAD or have] for op in case.ops]
        for row in itertools.product(*ways):
            given = [dict(enumerate(row)) for _ in case.blocks]
            time_s, stages = oracle.evaluate(case, op_mappings, given)
            if max(s.memory_bytes for s in stages) > case.rules["capacity_bytes"]:
                continue
            for given_to in itertools.product(THETAS, prices(case, time_s), PHIS):
                assert mapping.relaxation().bound(*given_to)[0] <= time_s


def test_the_bound_is_below_what_searches_find():
    rng = random.Random(3)
    found = 0
    for at in range(30):
        case, op_mappings = tight_case(rng, sides=(4, 4), most=(2, 8, 2), stages=6)
        mapping = compiled(case, op_mappings)
        score = mapping.anneal(at, 600, 0.3)[1][0]
        if score["over_bytes"]:
            continue
        found += 1
        for given in itertools.product(THETAS, prices(case, score["time_s"]), PHIS):
            assert mapping.relaxation().bound(*given)[0] <= score["time_s"]
    assert found > 15


def test_the_bound_does_not_depend_on_what_was_asked_before():
    """Earlier answers say which mappings need no look: the bound and its mappings must not notice."""
    rng = random.Random(4)
    problem = Problem(load("bertlarge"), load_wafer("sram-wafer"), WaferTraining(64))
    mappings = [compiled(random_case(rng, sides=(4, 4), most=(2, 8, 2))) for _ in range(30)]
    mappings.append(problem.mapping(Layout(4, 2, 1, 2)))
    for mapping in mappings:
        used = mapping.relaxation()
        unit = used.bound(1.0, 0.0)[0] / 1e3
        asked = list(itertools.product(THETAS, (0.0, 1e-9 * unit, 1e-6 * unit, unit), PHIS))
        fresh = {given: mapping.relaxation().bound(*given) for given in asked}
        for given in rng.sample(asked, len(asked)):
            bound, enough = fresh[given][0], fresh[given][0] * rng.random()
            assert enough <= used.bound(*given, enough=enough)[0] <= bound * (1 + 1e-12)
            found, op_mappings = used.bound(*given)
            assert found == bound
            mapping.assign(op_mappings)
            assert enough <= used.bound(*given, enough=enough)[0] <= bound * (1 + 1e-12)


@pytest.mark.parametrize("volume", [False, True])
def test_the_bound_is_below_what_searches_find_for_a_model(volume):
    problem = Problem(load("bertlarge"), load_wafer("dram-wafer"), WaferTraining(64), volume=volume)
    mapping = problem.mapping(Layout(4, 2, 2, 8))
    bounds = [mapping.relaxation().bound(theta, 0.0) for theta in THETAS]
    mapping.assign(max(bounds, key=lambda b: b[0])[1])
    score = mapping.anneal(1, 1500, 0.05)[1][0]
    assert fits(score)
    for bound, _ in bounds:
        assert bound <= score["time_s"]
    if not volume:
        assert max(b for b, _ in bounds) > 0.5 * score["time_s"]


def test_the_bound_is_exact_for_work_alone_and_for_a_forced_conversion():
    case = small(2, state_bytes=0.0, step_bytes=0.0, micro_batches=5, volume=1)
    case.ops[0].roles, case.ops[1].roles = "N", "B"
    case.tables["parameters"] = dict.fromkeys(case.tables["parameters"], 0.0)
    case.blocks, case.boundary_s = (2, 3), (0.25, 0.5)
    mapping = compiled(case, [OperatorMapping(("N",)), OperatorMapping(("B",))])
    assert mapping.relaxation().bound(1.0, 0.0)[0] == pytest.approx(
        mapping.score()["time_s"][0], rel=2e-9
    )
    # Two all-to-alls of half the tensor: a quarter of it each.
    exchange, sent = 0.5, case.rules["boundary_bytes"]
    loads = [2 * (4 + exchange) + 0.25 * sent, 3 * (4 + exchange) + 0.5 * sent]
    assert mapping.relaxation().bound(1.0, 0.0)[0] == pytest.approx(
        4 * max(loads) + sum(loads), rel=2e-9
    )


def test_the_bound_of_a_chain_is_the_least_over_all_op_mappings():
    """Work and conversions alone, dear conversions: the cheapest operators do not fit together."""
    rng = random.Random(9)
    for _ in range(40):
        case = small(3, slots=((0, 2, 1), (1, 3, 1)), x_bytes_per_s=1.0, y_bytes_per_s=0.5)
        case.tables["parameters"] = dict.fromkeys(case.tables["parameters"], 0.0)
        for name in ("forward", "backward"):
            case.tables[name] = {at: rng.uniform(0.1, 4.0) for at in case.tables[name]}
        for op in case.ops:
            op.roles, op.product = "".join(rng.sample("BMNKR", 3)), rng.random() < 0.5
        case.edges = [e._replace(bytes=rng.choice([0.5, 4.0])) for e in case.edges]
        mapping = compiled(case)
        least = min(score["time_s"] for score in every_score(case, mapping))
        assert mapping.relaxation().bound(1.0, 0.0)[0] == pytest.approx(least, rel=2e-9)


@pytest.mark.parametrize("parameters", [0.0, 1.0])
def test_a_price_of_memory_is_exact_where_recomputation_must_pay_for_it(parameters):
    """One operator, three blocks: with less room its output is computed again, 1 s per block.

    The state of each block takes what room there is beside it.
    """
    case = small(1, slots=(), modes=1, micro_batches=4)
    case.rules |= {
        "weight_bytes": 1.0,
        "gradient_bytes": 1.0,
        "state_bytes": 2.0,
        "step_bytes": 0.0,
    }
    case.ops[0].outputs = (STASH, RECOMPUTE)
    case.tables["parameters"] = dict.fromkeys(case.tables["parameters"], parameters)
    case.tables["live"] = dict.fromkeys(case.tables["live"], 0.0)
    case.blocks = (3,)
    # Beside the state one of the three that would be kept; one is alive at least.
    case.rules["capacity_bytes"] = 1.0 + 3 * 4 * parameters
    mapping = compiled(case, [OperatorMapping(())])
    assert mapping.score()["time_s"][0] == 36.0
    assert mapping.relaxation().bound(1.0, 0.0)[0] == pytest.approx(24.0, rel=2e-9)
    assert mapping.relaxation().bound(1.0, 0.25)[0] == pytest.approx(30.0, rel=2e-9)
    assert mapping.relaxation().bound(1.0, 0.5)[0] == pytest.approx(36.0, rel=2e-9)


@pytest.mark.parametrize(
    ("theta", "price"),
    [(-0.5, 0.0), (1.5, 0.0), (math.nan, 0.0), (0.5, -1.0), (0.5, math.nan)],
)
def test_a_bound_that_would_not_hold_is_refused(theta, price):
    with pytest.raises(InvalidInputError, match="theta.*price"):
        compiled(small()).relaxation().bound(theta, price)
    with pytest.raises(InvalidInputError, match="phi"):
        compiled(small()).relaxation().bound(0.5, 0.0, 1.5)


@pytest.mark.parametrize("shared", [False, True])
def test_the_bound_of_a_stream_is_exact_where_it_alone_counts(shared):
    """Weights live off the wafer: two reads of them and one write of gradients, per die, over one
    link or over one for each direction. The conversion between the two operators runs beside the
    stream and adds nothing."""
    case = small(2, modes=16, micro_batches=3, step_bytes=0.0, gradient_bytes=4.0)
    case.rules |= {"stream_capacity_bytes": 1e9, "stream_bytes_per_s": 1e-3, "x_bytes_per_s": 4e-3}
    case.rules["stream_shared"] = shared
    case.ops[0].roles, case.ops[1].roles = "M", "B"
    mapping = compiled(case, [OperatorMapping(("M",), 4), OperatorMapping(("B",), 4)])
    time_s = mapping.score()["time_s"][0]
    moved = 2 * 2 + 4 if shared else max(2 * 2, 4)
    assert time_s == pytest.approx(2 * 3 * moved / 2 / 1e-3, rel=1e-12)
    for theta, phi in itertools.product(THETAS, PHIS):
        assert mapping.relaxation().bound(theta, 0.0, phi)[0] <= time_s
    assert mapping.relaxation().bound(1.0, 0.0, 1.0)[0] == pytest.approx(time_s, rel=2e-9)


@pytest.mark.parametrize("duplex", [False, True])
def test_the_roofline_of_state_by_hand(duplex):
    """2 bytes of weights, 2 of gradients, 12 of state; weights may stay, gradients come and go."""
    wafer = load_wafer("dram-stream-wafer")
    off = wafer.off_wafer.replace(duplex=duplex)
    problem = Problem("bertlarge", wafer.replace(off_wafer=off))
    over = roofline(problem)
    assert over.state_bytes == 16 * problem.work.parameters
    assert over.streamed_share == pytest.approx(2 / 14, rel=1e-8)
