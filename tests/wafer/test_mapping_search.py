"""Searches of mappings repeat themselves, never get worse and survive odd problems."""

import itertools
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mapping_cases import agree, compiled, fits, objective, packed, small, tight_case
from reference.mapping_oracle import EXIT, Edge, Op, OperatorMapping

from phaze_fast import _core

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


def every_mapping(case, mapping):
    """Every assignment of roles and, where there are weights, every mode."""
    modes = [w for w in range(6) if case.rules["modes"] >> w & 1]
    options = []
    for i in range(len(case.ops)):
        weighted = any(
            case.tables["parameters"][at] for at in case.tables["parameters"] if at[0] == i
        )
        rows = []
        for choice in mapping.choices(i):
            for mode in modes if weighted else [int(choice["mode"])]:
                row = choice.copy()
                row["mode"] = mode
                rows.append(tuple(row))
        options.append(rows)
    for some in itertools.product(*options):
        yield np.array(list(some), dtype=_core.OP_MAPPING_DTYPE)


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


@pytest.mark.parametrize("name", CRASHES)
def test_searches_survive_problems_with_nothing_to_search(name):
    tests = Path(__file__).parents[1]
    code = (
        f"import sys; sys.path[:0] = {[str(tests / 'cases'), str(tests)]!r}\n"
        "from mapping_cases import OperatorMapping, compiled, small\n"
        "from phaze_fast.errors import InvalidInputError\n"
        f"c = small()\ntry:\n    {CRASHES[name]}\nexcept InvalidInputError: pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-500:]
