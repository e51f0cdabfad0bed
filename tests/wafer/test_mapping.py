"""The compiled evaluation of mappings: the oracle, bad input, threads, searches and bounds."""

import itertools
import math
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from case_counts import some_or_many
from mapping_cases import (
    TABLES,
    agree,
    arguments,
    compiled,
    fits,
    legal_axis_assignments,
    objective,
    packed,
    random_case,
    random_op_mappings,
    small,
    tight_case,
    tighten,
)
from reference import mapping_oracle as oracle
from reference.certificates import mapped_wafer
from reference.mapping_oracle import EXIT, OFFLOAD, RECOMPUTE, STASH, Edge, Op, OperatorMapping

from phaze_fast import _core, models
from phaze_fast.errors import InUseError, InvalidInputError, PhazeError
from phaze_fast.wafer import load_wafer
from phaze_fast.wafer.mapping.layout import Layout, slots_of
from phaze_fast.wafer.mapping.problem import Problem, WaferTraining
from phaze_fast.wafer.search.bounds import roofline

# ---- the whole evaluation ----


@some_or_many(50, 400)
def test_all_terms_agree_with_the_oracle(cases):
    rng = random.Random(1)
    bound = 0
    for _ in range(cases):
        case = random_case(rng)
        op_mappings = random_op_mappings(rng, case)
        agree(case, op_mappings)
        tighten(rng, case, op_mappings)
        _, stages = agree(case, op_mappings)
        bound += any(any(s.outputs.values()) for s in stages)
    assert bound > cases // 4, bound


def test_given_outputs_agree_with_the_oracle():
    """Also where only one of two consumers needs its input in the backward pass."""
    rng = random.Random(2)
    for _ in range(40):
        case = random_case(rng)
        case.edges = [e._replace(again=rng.random() < 0.5) for e in case.edges]
        op_mappings = random_op_mappings(rng, case)
        have = case.rules["stream_capacity_bytes"] > 0
        ways = [[o for o in op.outputs if o != OFFLOAD or have] for op in case.ops]
        agree(case, op_mappings, [[rng.choice(way) for way in ways] for _ in case.blocks])


@pytest.mark.parametrize(
    "seed",
    [
        647270771,  # links to the rim take longer than the slowest stage
        167717388,  # outputs that tie and stream more or less
        98968608,
        266365308,
    ],
)
def test_certificates_of_stages_that_stream_past_one_another(seed):
    """Random searches once found these: the slowest stage, and outputs that tie."""
    found = 0
    for sides in itertools.product((2, 3), (1, 2)):
        case, op_mappings = tight_case(random.Random(seed), sides=sides, most=(1, 3, 1), stages=3)
        mapping = compiled(case, op_mappings)
        outputs = mapping.stages()[1]
        found += bool(case.cross_stage_s)
        assert mapped_wafer(case, op_mappings, mapping.score()[0], outputs, []) == []
    assert found


def streaming_pair(link_s):
    """Two stages of one operator that stream their weights; others pass no link of theirs."""
    case = small(1, slots=(), modes=1 << 4, micro_batches=5, weight_bytes=2.0, gradient_bytes=2.0)
    case.rules |= {"stream_capacity_bytes": 1e9, "stream_bytes_per_s": 1e9, "stream_shared": False}
    case.rules |= {"stream_link_s": link_s, "stream_both_s": link_s, "state_bytes": 4.0}
    case.blocks, case.boundary_s = (1, 1), (0.0, 0.0)
    case.cross_stage_s = (((0.0, 0.0), (0.0, 0.0)),) * 2
    return case


def test_links_to_the_rim_set_the_pace_and_are_no_stage():
    """Two stages of 2 s each, whose streams keep a link to the rim busy for longer or less."""
    for link_s, pace_s in ((0.25, 2.0), (1.0, 4.0), (2.5, 10.0)):  # 4 bytes in, 2 of them out
        case = streaming_pair(link_s)
        score, _ = agree(case, [OperatorMapping((), 4)])
        assert score["slowest_stage_s"] == 2.0
        assert score["time_s"] - score["tail_s"] == pytest.approx(4 * pace_s + 2.0 + 2.0)


def walk(rng, changes, **sizes):
    """Change operators one by one; after each the score has the bytes of a fresh mapping."""
    case = random_case(rng, **sizes)
    op_mappings = random_op_mappings(rng, case)
    tighten(rng, case, op_mappings)
    given, mapping = arguments(case), compiled(case, op_mappings)
    fresh = _core.Mapping(**given)
    modes = [w for w in range(6) if case.rules["modes"] >> w & 1]
    choices = [mapping.choices(i) for i in range(len(op_mappings))]
    now = packed(op_mappings)
    for step in range(changes):
        op = rng.randrange(len(op_mappings))
        now[op] = choices[op][rng.randrange(len(choices[op]))]
        now[op]["mode"], now[op]["algorithm"] = rng.choice(modes), rng.randrange(4)
        mapping.change(op, now[op : op + 1].copy())
        if step % 50 == 0:
            fresh = _core.Mapping(**given)
        fresh.assign(now)
        assert mapping.score().tobytes() == fresh.score().tobytes()
        if step % 20 == 0:
            for found, expected in zip(mapping.stages(), fresh.stages(), strict=True):
                assert found.tobytes() == expected.tobytes()
            assert mapping.op_mappings().tobytes() == now.tobytes()


def test_changes_and_fresh_starts_give_the_same_bits():
    rng = random.Random(4)
    for _ in range(20):
        walk(rng, 200)


@pytest.mark.slow
def test_changes_and_fresh_starts_give_the_same_bits_on_large_problems():
    rng = random.Random(5)
    for _ in range(40):
        walk(rng, 500, sides=(8, 6), most=(3, 12, 3), stages=8)


# ---- bad input ----


def with_field(array, name, value):
    changed = array.copy()
    changed[name] = value
    return changed


BROKEN = {
    "slots: not an array": lambda a: {"slots": [(0, 2, 1)]},
    "slots: wrong type": lambda a: {"slots": np.zeros(1, np.int32)},
    "slots: too many": lambda a: {"slots": np.repeat(a["slots"], 11)},
    "edges: backwards": lambda a: {"edges": with_field(a["edges"], "from", 1)},
    "rules: two": lambda a: {"rules": np.repeat(a["rules"], 2)},
    "rules: links": lambda a: {"rules": with_field(a["rules"], "x_bytes_per_s", math.nan)},
    "column: none": lambda a: {"column": np.full_like(a["column"], -1)},
    "tables: one is short": lambda a: {"live_bytes": a["live_bytes"][:-1]},
    "tables: sizes": lambda a: {name: a[name][:-1] for name in TABLES.values()},
    **{
        f"{name}: {value}": lambda a, name=name, v=value: {name: np.full_like(a[name], v)}
        for name in TABLES.values()
        for value in (math.nan, -1.0)
    },
    "chain: twice": lambda a: {"chain": np.array([0, 0, 1], np.int32)},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_problems_are_refused(name):
    """What the kernel itself refuses is in cpp/tests/wafer/test_mapping.cpp."""
    given = arguments(small())
    with pytest.raises(InvalidInputError, match=r"^\w+: .*"):
        _core.Mapping(**(given | BROKEN[name](given)))


def test_op_mappings_and_outputs_that_are_not_accepted_are_refused():
    case = small()
    case.ops[0].roles, case.ops[0].outputs = "BN", (STASH, RECOMPUTE)
    mapping, good = compiled(case), packed([OperatorMapping(("B",)), OperatorMapping(("K",))])
    for name in ("score", "stages", "op_mappings"):
        with pytest.raises(InvalidInputError, match="op_mappings: none yet"):
            getattr(mapping, name)()
    for bad in (
        OperatorMapping(("M",)),
        OperatorMapping(("-",)),
        OperatorMapping(("B",), 1),
        OperatorMapping(("B",), 9),
        OperatorMapping(("B",), 0, 4),
    ):
        with pytest.raises(InvalidInputError, match="op_mappings: operator 0 breaks"):
            mapping.assign(packed([bad, OperatorMapping(("K",))]))
    for bad in (good[:1], good.tolist(), good["slots"], np.repeat(good, 2)):
        with pytest.raises(InvalidInputError, match="op_mappings: "):
            mapping.assign(bad)
    mapping.assign(good)
    for op in (-1, 2):
        with pytest.raises(InvalidInputError, match="op: "):
            mapping.change(op, good[:1])
        with pytest.raises(InvalidInputError, match="op: "):
            mapping.choices(op)
    overlapping = with_field(good[:1], "slots", [1, 0, 1, 0, 0])
    with pytest.raises(InvalidInputError, match="op_mappings: operator 0 breaks"):
        mapping.change(0, overlapping)
    for bad in ([0], [0, 1], [OFFLOAD, 0], [3, 0]):
        with pytest.raises(InvalidInputError, match="outputs: "):
            mapping.score(np.array(bad, np.uint8))
    with pytest.raises(InvalidInputError, match="outputs: "):
        mapping.score(np.zeros(2))
    assert mapping.score(np.array([RECOMPUTE, 0], np.uint8)).shape == (1,)
    assert mapping.op_mappings().tobytes() == good.tobytes()


# ---- mapping threads ----


IN_USE = "is in use by another thread; give each thread its own"
STEPS = 1_500_000  # of an annealing: half a second or more
PATIENCE_S = 60.0


def until(happened):
    """Wait for what another thread brings about."""
    begun = time.monotonic()
    while not happened():
        assert time.monotonic() - begun < PATIENCE_S
        time.sleep(0.0005)


def refused(call):
    try:
        call()
    except InUseError:
        return True
    return False


def test_a_mapping_that_anneals_refuses_a_second_thread():
    rng = random.Random(8)
    case = random_case(rng, most=(1, 6, 1))
    op_mappings = random_op_mappings(rng, case)
    mapping, twin = compiled(case, op_mappings), compiled(case, op_mappings)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(mapping.anneal(3, STEPS, 0.1)))
    thread.start()
    until(lambda: refused(mapping.score) or answers)
    calls = {
        "assign": lambda: mapping.assign(packed(op_mappings)),
        "change": lambda: mapping.change(0, packed(op_mappings[:1])),
        "op_mappings": mapping.op_mappings,
        "score": mapping.score,
        "stages": mapping.stages,
        "anneal": lambda: mapping.anneal(4, 1, 0.1),
        "descend": lambda: mapping.descend(1),
    }
    for name, call in calls.items():
        with pytest.raises(InUseError, match=f"Mapping {IN_USE}") as caught:
            call()
        assert isinstance(caught.value, RuntimeError), name
        assert isinstance(caught.value, PhazeError), name
    # What never changes can be read all the while.
    assert mapping.choices(0).tobytes() == twin.choices(0).tobytes()
    assert mapping.legal(0, packed(op_mappings[:1]))
    assert mapping.mapping_count() == twin.mapping_count()
    bound = mapping.relaxation().bound(0.5, 0.0)
    assert thread.is_alive()
    thread.join()
    found, expected = answers[0], twin.anneal(3, STEPS, 0.1)
    assert [a.tobytes() for a in found[:2]] == [a.tobytes() for a in expected[:2]]
    assert mapping.score().tobytes() == twin.score().tobytes()  # free again
    assert bound[0] == twin.relaxation().bound(0.5, 0.0)[0]


def test_a_relaxation_refuses_a_second_thread():
    case = small(slots=tuple(tuple(run) for run in slots_of(16, 16)))
    for op in case.ops:
        op.limit = (2**20,) * 4
    mapping = compiled(case)
    alone = mapping.relaxation()
    shared = mapping.relaxation()
    thetas = [k / 64 for k in range(1, 64)]
    expected = {theta: alone.bound(theta, 1e-3, 0.25)[0] for theta in thetas}
    messages, wrong = [], []

    def ask():
        begun = time.monotonic()
        while not messages and time.monotonic() - begun < PATIENCE_S:
            for theta in thetas:
                try:
                    found = shared.bound(theta, 1e-3, 0.25)[0]
                except InUseError as error:
                    messages.append(str(error))
                    break
                if found != pytest.approx(expected[theta], rel=1e-9):
                    wrong.append((theta, found))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert messages
    assert messages[0] == f"Relaxation {IN_USE}"
    assert wrong == []
    assert shared.bound(0.5, 1e-3, 0.25)[0] == pytest.approx(expected[0.5], rel=1e-9)


# ---- searches ----


def test_searches_repeat_themselves_and_never_get_worse():
    rng = random.Random(4)
    improved = 0
    for at in range(40):
        case, op_mappings = tight_case(rng)
        for search in (lambda m, at=at: m.anneal(at, 300, 0.3), lambda m: m.descend(2)):
            mapping = compiled(case, op_mappings)
            start = mapping.score()[0].copy()
            found, score, evaluations = search(mapping)
            again = search(compiled(case, op_mappings))
            assert found.tobytes() == again[0].tobytes()
            assert score.tobytes() == again[1].tobytes()
            assert evaluations == again[2] > 0
            assert objective(case, score[0]) <= objective(case, start)
            # The mapping is left at what was found, and the score is its own.
            assert mapping.op_mappings().tobytes() == found.tobytes()
            fresh = compiled(case)
            fresh.assign(found)
            assert mapping.score().tobytes() == score.tobytes() == fresh.score().tobytes()
            improved += score["time_s"][0] < start["time_s"]
    assert improved > 40


def test_seeds_differ_and_no_steps_change_nothing():
    case, op_mappings = tight_case(random.Random(6), sides=(4, 4), most=(0, 6, 0))
    runs = [compiled(case, op_mappings).anneal(seed, 60, 0.5)[0].tobytes() for seed in range(8)]
    assert len(set(runs)) > 1
    for steps in (0, -3):
        found, score, evaluations = compiled(case, op_mappings).anneal(1, steps, 0.5)
        assert found.tobytes() == packed(op_mappings).tobytes()
        assert evaluations == 1
        assert score.tobytes() == compiled(case, op_mappings).score().tobytes()


def test_a_round_of_descent_leaves_no_better_single_change():
    rng = random.Random(6)
    for _ in range(10):
        case, op_mappings = tight_case(rng, sides=(2, 2), most=(1, 3, 1))
        mapping = compiled(case, op_mappings)
        found, score, _ = mapping.descend(100)
        best = objective(case, score[0])
        for i in range(len(op_mappings)):
            for choice in mapping.choices(i):
                for mode in range(6):
                    op_mapping = np.array([choice], dtype=_core.OP_MAPPING_DTYPE)
                    op_mapping["mode"], op_mapping["algorithm"] = mode, found[i]["algorithm"]
                    if mapping.legal(i, op_mapping):
                        mapping.change(i, op_mapping)
                        assert objective(case, mapping.score()[0]) >= best
            mapping.change(i, found[i : i + 1].copy())


def every_mapping(case, mapping, modes_of_all=False):
    """Every assignment of roles and, where there are weights (or of all operators), every mode."""
    modes = [w for w in range(6) if case.rules["modes"] >> w & 1]
    weights = case.tables["parameters"]
    options = []
    for i in range(len(case.ops)):
        weighted = modes_of_all or any(weights[at] for at in weights if at[0] == i)
        choices = np.repeat(mapping.choices(i), len(modes) if weighted else 1)
        if weighted:
            choices["mode"] = np.tile(modes, len(mapping.choices(i)))
        options.append(choices.tolist())
    for some in itertools.product(*options):
        yield np.array(list(some), dtype=_core.OP_MAPPING_DTYPE)


def every_score(case, mapping):
    """Scores of all operator mappings; outputs are chosen exactly in each (test_mapping)."""
    for each in every_mapping(case, mapping, modes_of_all=True):
        mapping.assign(each)
        yield mapping.score()[0].copy()


def test_mappings_that_are_left_out_early_are_not_the_best():
    """An exhaustive search stops scoring what a bound shows to be slower; here nothing is left out.

    Also where stages wait for one another's streams, and under zero bubble, where the stage that
    proves slowest is not idle for as long as the one that was thought to be.
    """
    rng, kinds = random.Random(11), set()
    for _ in range(150):
        case, op_mappings = tight_case(rng, sides=(2, 2), most=(1, 3, 1))
        mapping = compiled(case, op_mappings)
        if mapping.mapping_count() > 300:
            continue
        best = float("inf")
        for each in every_mapping(case, mapping):
            mapping.assign(each)
            best = min(best, objective(case, mapping.score()[0]))
        found = objective(case, compiled(case, op_mappings).exhaust()[1][0])
        assert found == pytest.approx(best, rel=1e-9)
        kinds.add((bool(case.cross_stage_s), case.rules["zero_bubble"], case.rules["chunks"]))
    assert len(kinds) == 6


def test_a_stage_that_proves_slowest_is_not_idle_under_zero_bubble():
    """Beside 1.1 s of weight gradients, 1.0 s of a stage would be idle; streams make it 1.2 s.

    A bound that still counts the stage as idle is above what a search has to beat, 1.4 s.
    """
    case = small(2, modes=1 << 4, zero_bubble=1, x_bytes_per_s=1e12, outer_tail_s=0.0)
    case.ops = [Op(1, "R"), Op(2, "BR")]
    case.edges = [Edge(0, 1, EXIT, 1e-12)]
    case.blocks, case.boundary_s, case.chain = (1, 0), (0.0, 0.0), (0,)
    case.rules |= {"stream_capacity_bytes": 1e9, "stream_bytes_per_s": 1e12, "capacity_bytes": 1e9}
    case.rules |= {"stream_shared": False, "weight_bytes": 1.0, "gradient_bytes": 2.0}
    kept, split = (1, 1, 1, 1), (2, 1, 1, 1)
    values = {
        "forward": (0.5, 0.2, 0.35),
        "backward": (0.5, 0.2, 0.75),
        "weight_grad": (0.0, 0.0, 0.55),
        "parameters": (0.0, 0.0, 2.0),  # a byte comes twice for each of two dies, and one goes
        "stash": (0.0, 0.0, 0.0),
        "live": (0.0, 0.0, 0.0),
    }
    for name, (block, one, other) in values.items():
        case.tables[name] |= {(0, kept): block, (0, split): block}
        case.tables[name] |= {(1, kept): one, (1, split): other}
    case.cross_stage_s = (((0.0, 0.0), (0.11, 0.11)), ((0.0, 0.0), (0.0, 0.0)))
    start = [OperatorMapping(("R",), 4), OperatorMapping(("R",), 4)]
    assert compiled(case, start).score()["time_s"][0] == pytest.approx(1.4)
    better = [start[0], OperatorMapping(("B",), 4)]
    assert agree(case, better)[0]["time_s"] == pytest.approx(1.2)
    assert compiled(case, start).exhaust()[1]["time_s"][0] == pytest.approx(1.2)
    assert compiled(case, start).descend(1)[1]["time_s"][0] == pytest.approx(1.2)


def test_a_search_does_not_trade_a_mapping_that_fits_for_one_that_does_not():
    """Replicated weights are a hundred times faster here, and too large."""
    case = small(2, slots=((0, 2, 1), (0, 2, 2)), modes=0b1001, micro_batches=100)
    case.rules |= {"x_bytes_per_s": 0.01, "gradient_bytes": 2.0, "state_bytes": 12.0}
    for op in case.ops:
        op.roles = "B"
    for name in ("stash", "live"):
        case.tables[name] = dict.fromkeys(case.tables[name], 0.0)
    for i, cut in case.tables["parameters"]:
        case.tables["parameters"][i, cut] = float(i == 0)
    start = [OperatorMapping(("B", "B"), 3)] * 2
    case.rules["capacity_bytes"] = 14.0  # 12 bytes split, 16 bytes replicated
    assert fits(compiled(case, start).score()[0])
    assert fits(compiled(case, start).anneal(1, 300, 0.1)[1][0])
    assert fits(compiled(case, start).descend(3)[1][0])


CRASHES = {
    "bound without legal operator mappings": "c.ops[0].roles = 'K'; c.ops[0].limit = (1,) * 4; compiled(c).relaxation().bound(1, 0)",
    "bound without modes": "c.rules['modes'] = 0; compiled(c).relaxation().bound(1.0, 0.0)",
    "anneal without edges": "c.edges = []; c.chain = (1,); "
    "compiled(c, [OperatorMapping(('B',)), OperatorMapping(('B',))]).anneal(1, 500, 0.1)",
}


def test_searches_survive_problems_with_nothing_to_search():
    tests = Path(__file__).parents[1]
    code = (
        f"import sys; sys.path[:0] = {[str(tests / 'cases'), str(tests)]!r}\n"
        "from mapping_cases import OperatorMapping, compiled, small\n"
        "from phaze_fast.errors import InvalidInputError\n"
    )
    for name, call in CRASHES.items():
        code += f"print({name!r}, flush=True); c = small()\n"
        code += f"try:\n    {call}\nexcept InvalidInputError: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, list(CRASHES)), done.stderr[-500:]


THETAS = PHIS = (0.0, 0.5, 1.0)


# ---- rules of the encoding ----


@some_or_many(20, 60)
def test_choices_are_all_axis_assignments_that_keep_the_rules(cases):
    """Also the rule of at most so many runs of roles along an axis, on long sides."""
    rng = random.Random(6)
    cases = [random_case(rng, sides=(8, 4)) for _ in range(cases)]
    for sides, roles in (((16, 2), "BMR"), ((2, 32), "NR")):
        long = small(1, slots=tuple(tuple(run) for run in slots_of(*sides)))
        long.ops[0].roles = roles
        assert len(legal_axis_assignments(long, 0)) < len(roles) ** len(long.slots)
        cases.append(long)
    for case in cases:
        mapping = compiled(case)
        for i in range(len(case.ops)):
            expected = {
                packed([OperatorMapping(roles)])["slots"].tobytes()
                for roles in legal_axis_assignments(case, i)
            }
            found = [row["slots"].tobytes() for row in mapping.choices(i)]
            assert len(found) == len(set(found))
            assert set(found) == expected
            for _ in range(len(oracle.ROLES) ** len(case.slots) // 10):
                roles = tuple(rng.choices(oracle.ROLES, k=len(case.slots)))
                op_mapping = packed([OperatorMapping(roles, rng.randrange(7), rng.randrange(5))])
                allowed = (
                    op_mapping["mode"][0] < 6 and case.rules["modes"] >> op_mapping["mode"][0] & 1
                )
                allowed = allowed and op_mapping["algorithm"][0] < 4
                assert mapping.legal(i, op_mapping) == (
                    bool(allowed) and op_mapping["slots"].tobytes() in expected
                )


# ---- memory ----


@some_or_many(40, 80)
def test_outputs_are_chosen_exactly_where_recomputation_and_the_stream_are_balanced(cases):
    rng = random.Random(8)
    mixed = 0
    for _ in range(cases):
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
    assert mixed > cases * 3 // 16


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


def prices(case, time_s):
    unit = time_s / case.rules["capacity_bytes"] / case.rules["micro_batches"]
    return [0.0, *(unit * f for f in (0.01, 0.1, 0.5, 1.0, 3.0, 30.0))]


@some_or_many(100, 300)
def test_the_bound_is_below_every_mapping_of_tiny_problems(cases):
    rng = random.Random(1)
    compared = costlier = 0
    for _ in range(cases):
        case = tiny_case(rng)
        mapping = compiled(case)
        if math.prod(2 * len(mapping.choices(i)) for i in range(len(case.ops))) > 3000:
            continue
        case.rules["capacity_bytes"] = 1e-6  # then everything is recomputed that may be
        least = min(s["memory_bytes"] for s in every_score(case, compiled(case)))
        case.rules["capacity_bytes"] = least * (1.0 + 0.5 * rng.random() ** 3) + 1e-3
        mapping = compiled(case)
        times = [s["time_s"] for s in every_score(case, mapping) if s["over_bytes"] == 0.0]
        compared += bool(times)
        for best in [min(times)] if times else []:
            free = max(mapping.relaxation().bound(theta, 0.0)[0] for theta in THETAS)
            for given in itertools.product(THETAS, prices(case, best), PHIS):
                bound, op_mappings = mapping.relaxation().bound(*given)
                assert 0.0 <= bound <= best
                mapping.assign(op_mappings)  # a start for a search: legal
                costlier += bound > free
    assert compared > cases * 5 // 6
    assert costlier > cases // 30


@some_or_many(10, 25)
def test_the_bound_is_below_every_way_of_outputs_too(cases):
    """The oracle tries outputs that no choice would make: all of them that fit are above."""
    rng = random.Random(2)
    for _ in range(cases):
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


@some_or_many(12, 30)
def test_the_bound_is_below_what_searches_find(cases):
    rng = random.Random(3)
    found = 0
    for at in range(cases):
        case, op_mappings = tight_case(rng, sides=(4, 4), most=(2, 8, 2), stages=6)
        mapping = compiled(case, op_mappings)
        score = mapping.anneal(at, 600, 0.3)[1][0]
        if score["over_bytes"]:
            continue
        found += 1
        for given in itertools.product(THETAS, prices(case, score["time_s"]), PHIS):
            assert mapping.relaxation().bound(*given)[0] <= score["time_s"]
    assert found > cases // 2


@some_or_many(12, 30)
def test_the_bound_does_not_depend_on_what_was_asked_before(cases):
    """Earlier answers say which mappings need no look: the bound and its mappings must not notice."""
    rng = random.Random(4)
    problem = Problem(models.load("bertlarge"), load_wafer("sram-wafer"), WaferTraining(64))
    mappings = [compiled(random_case(rng, sides=(4, 4), most=(2, 8, 2))) for _ in range(cases)]
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
    ("theta", "price"), [(-0.5, 0.0), (1.5, 0.0), (math.nan, 0.0), (0.5, -1.0), (0.5, math.nan)]
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
