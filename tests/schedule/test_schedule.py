"""Layers on one chip: golden optima, exhaustive enumeration, HiGHS, a checker, limits, bad input."""

import json
import random
from itertools import pairwise

import pytest
from case_counts import slow_or_thorough, some_or_many
from golden_files import GOLDEN, golden_lines, refused_calls
from hypothesis import given
from hypothesis import strategies as st
from reference.layer import best_makespan
from reference.layers_at_random import any_way, backward_like, check, random_layer

from phaze_fast.errors import InvalidInputError
from phaze_fast.schedule import instance_from_dict, read_instances, schedule_instances

LAYERS = GOLDEN / "layer_golden.jsonl"


@pytest.mark.parametrize("record", golden_lines("layer_golden.jsonl"), ids=lambda r: r["name"])
def test_golden_layers_are_solved_to_their_optimum(record):
    (found,) = schedule_instances([instance_from_dict(record)], highs=False)
    check(found)
    assert found.status == "optimal"
    assert found.makespan == (record["optimum"] or record["best_known"])


def test_bounds_keep_the_trees_small():
    # Weaker bounds or dominance give the same answers later: this is where that shows.
    found = schedule_instances(list(read_instances(LAYERS)), highs=False)
    assert sum(made.nodes for made in found) <= 900
    assert sum(made.proved_by == "list-schedule" for made in found) >= 6


def against_enumeration(rng, most_ops, rule, most_modes=2):
    layer = instance_from_dict(random_layer(rng, most_ops, most_modes))
    (found,) = schedule_instances([layer], rule, highs=False)
    check(found)
    assert found.status == "optimal"
    assert found.makespan == pytest.approx(best_makespan(layer, rule == "overlap"), rel=1e-9)


def with_tail(data, count, seconds=3.0):
    """The layer followed by operators on all cores, one after another, that wait for all of it."""
    ids = [op["id"] for op in data["ops"]]
    tail = [max(ids) + 1 + k for k in range(count)]
    on_all = {"type": "TCandVC", "lat_single": seconds, "lat_all": seconds}
    edges = [[before, tail[0]] for before in ids] + [list(pair) for pair in pairwise(tail)]
    more = [{"id": at, **on_all} for at in tail]
    return {**data, "ops": data["ops"] + more, "edges": data["edges"] + edges}


@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
@pytest.mark.parametrize(("count", "tail"), [(6, 57), (6, 58), (6, 59), (9, 60), (59, 4), (62, 3)])
def test_a_tail_adds_its_length_also_where_sets_of_operators_get_wider(rule, count, tail):
    """Layers of up to 64 operators have sets of one word, larger ones of two."""
    rng = random.Random(1000 * count + tail)
    proven = 0
    for _ in range(4):
        data = backward_like(rng, count)
        layers = [instance_from_dict(each) for each in (data, with_tail(data, tail))]
        alone, longer = schedule_instances(layers, rule, max_nodes=500, highs=False)
        check(alone)
        check(longer)
        assert alone.bound + 3.0 * tail <= longer.makespan * (1 + 1e-12)
        assert longer.bound <= (alone.makespan + 3.0 * tail) * (1 + 1e-12)
        proven += alone.status == longer.status == "optimal"
    assert proven > 0 or count > 60


@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_small_layers_are_those_of_enumeration(rule):
    rng = random.Random(11)
    for _ in range(50):
        against_enumeration(rng, 5, rule)
    for _ in range(15):
        against_enumeration(rng, 4, rule, most_modes=3)


@slow_or_thorough(60, 300)
@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_more_layers_are_those_of_enumeration(rule, cases):
    rng = random.Random(12)
    for _ in range(cases):
        against_enumeration(rng, 6, rule)


def against_moments(rng, count, rule):
    layer = instance_from_dict(backward_like(rng, count))
    (found,) = schedule_instances([layer], rule, highs=False)
    check(found)
    assert found.status == "optimal"
    assert found.makespan == best_makespan(layer, rule == "overlap")


@some_or_many(60, 150)
@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_layers_with_twins_and_leaves_are_those_of_enumeration(rule, cases):
    rng = random.Random(17)
    for _ in range(cases):
        against_moments(rng, rng.randint(4, 6), rule)


FOUND = [  # by search: each once had a wrong proof, or has one if a part of a bound or rule is left out
    ("overlap", [5], {"num_tc": 1, "num_vc": 2}, "V3,1 B3,- B3,2", "0-2"),
    ("exclusive", [11], {"num_tc": 7, "num_vc": 2}, "T14,1,8 V5,- V11,-,7", ""),
    ("overlap", [2], {"num_tc": 1, "num_vc": 1, "num_net": 3}, "N-,0 N3,-,2 N2,-,1", "0-1"),
    ("exclusive", [30], {"num_tc": 2, "num_vc": 1}, "T19,- T24,6 T24,6", "0-1"),
    ("exclusive", [6], {"num_tc": 3, "num_vc": 1}, "N-,0 T6,5 N5,- T3,-", "0-2"),
    ("exclusive", [1], {"num_tc": 1, "num_vc": 1}, "T1,0 T1,- V0,3 V1,-", "0-3"),
    ("overlap", [1], {"num_tc": 1, "num_vc": 1}, "V-,0 V-,0 T-,1 T-,0 N-,1", "0-3 1-3 3-4"),
    ("exclusive", [9], {"num_tc": 3, "num_vc": 1}, "T9,-,3 T9,-,3 T9,-,3 T9,-,3", "1-3 2-3"),
    ("exclusive", [6], {"num_tc": 2, "num_vc": 2}, "T3,3 T1,- T1,- T3,3 T3,3", "1-3 2-4"),
    ("exclusive", [4], {"num_tc": 4, "num_vc": 2}, "V2,- N1,- V3,- B2,-", "1-2"),
    ("exclusive", [8], {"num_tc": 1, "num_vc": 2}, "V4,1 V1,1 V2,1 V4,- T-,3", ""),
    ("overlap", [10], {"num_tc": 1, "num_vc": 2}, "V9,7 T8,8 T2,- V5,-", "2-3"),
    ("exclusive", [9], {"num_tc": 3, "num_vc": 1}, "T3,- T8,2 T-,0 V5,2 T4,-", "0-1 0-2 1-2 0-4"),
    ("exclusive", [4], {"num_tc": 4, "num_vc": 2}, "T6,0 T4,- T5,2,2 T5,2,2", "0-3"),
    ("exclusive", [10], {"num_tc": 3, "num_vc": 2}, "N4,- N4,- N2,- T2,- T2,1", "1-4 2-4"),
    ("exclusive", [7], {"num_tc": 4, "num_vc": 1}, "T4,4 T8,3 B3,2", ""),
    (
        "exclusive",
        [18],
        {"num_tc": 2, "num_vc": 1},
        "T4,- T4,- T5,- T5,- T2,- T5,- T5,5 T5,-",
        "0-3 1-3 3-4 1-5 0-6 1-6 0-7 2-7 3-7",
    ),
    (
        "exclusive",
        [19],
        {"num_tc": 2, "num_vc": 1},
        "T2,2 T8,8 V4,- B7,- T8,6 V6,5 V1,1",
        "0-3 0-4 2-5 4-5 1-6 2-6 3-6 5-6",
    ),
    (
        "exclusive",
        [31],
        {"num_tc": 64, "num_vc": 1},
        "V6,- V6,- V8,- B1,- N8,- V2,- N4,-",
        "0-2 0-3 1-3 2-3 0-4 1-4 3-4 0-5 5-6",
    ),
]


def short_form(cores, ops, edges):
    """A layer from a line: type, then latency on one core, on all, on two; - where there is none."""
    names = {"T": "TC", "V": "VC", "B": "TCandVC", "N": "NET"}
    made = []
    for i, text in enumerate(ops.split()):
        values = [None if v == "-" else int(v) for v in text[1:].split(",")]
        op = {"id": i, "type": names[text[0]], "lat_single": values[0], "lat_all": values[1]}
        if len(values) > 2:
            op["lat_cores"] = {"2": values[2]}
        made.append({k: v for k, v in op.items() if v is not None})
    pairs = [[int(end) for end in edge.split("-")] for edge in edges.split()]
    return {"name": "found", "ops": made, "edges": pairs, **cores}


@pytest.mark.parametrize(("rule", "optimum", "cores", "ops", "edges"), FOUND)
def test_layers_that_were_once_wrong(rule, optimum, cores, ops, edges):
    layer = instance_from_dict(short_form(cores, ops, edges))
    assert [best_makespan(layer, rule == "overlap")] == optimum
    for nodes in (0, 1, 3, 5, 1000):
        (found,) = schedule_instances([layer], rule, max_nodes=nodes, highs=False)
        check(found)
        assert found.bound <= optimum[0] <= found.makespan
    assert found.makespan == optimum[0]


def whatever_way(rng, count, rule):
    layer = instance_from_dict(any_way(rng, count))
    best = best_makespan(layer, rule == "overlap")
    for nodes in (0, 2, 7, 10**6):
        (found,) = schedule_instances([layer], rule, max_nodes=nodes, highs=False)
        check(found)
        assert found.bound <= best * (1 + 1e-12)
        assert found.makespan >= best
    assert found.makespan == best


@some_or_many(300, 3000)
@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_layers_with_every_way_to_run_are_those_of_enumeration(rule, cases):
    rng = random.Random(22)
    for _ in range(cases):
        whatever_way(rng, rng.randint(2, 5 if cases < 1000 else 6), rule)


@slow_or_thorough(100, 600)
@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_layers_of_ten_operators_are_those_of_enumeration(rule, cases):
    rng = random.Random(18)
    for _ in range(cases):
        against_moments(rng, rng.randint(6, 8), rule)
    for _ in range(cases // 100):
        against_moments(rng, 10, rule)


@given(st.integers(0, 2**32))
def test_scale_changes_nothing_but_the_scale(seed):
    record = random_layer(random.Random(seed), 8)
    factor = 2.0 ** random.Random(seed).randint(-40, 40)
    (before,) = schedule_instances([instance_from_dict(record)], highs=False)
    for op in record["ops"]:
        op["lat_single"] *= factor
        op["lat_all"] *= factor
    (after,) = schedule_instances([instance_from_dict(record)], highs=False)
    assert after.makespan == before.makespan * factor
    assert after.mode == before.mode


@given(st.integers(0, 2**32))
def test_more_cores_or_less_work_is_never_slower(seed):
    rng = random.Random(seed)
    record = random_layer(rng, 8)
    (before,) = schedule_instances([instance_from_dict(record)], highs=False)
    easier = json.loads(json.dumps(record))
    change = rng.randrange(3)
    if change == 0:
        easier["num_tc"] += 1
    elif change == 1 and easier["edges"]:
        easier["edges"].pop(rng.randrange(len(easier["edges"])))
    else:
        op = rng.choice(easier["ops"])
        op["lat_single"], op["lat_all"] = op["lat_single"] / 2, op["lat_all"] / 2
    (after,) = schedule_instances([instance_from_dict(easier)], highs=False)
    assert after.makespan <= before.makespan * (1 + 1e-9)
    (overlapped,) = schedule_instances([instance_from_dict(record)], "overlap", highs=False)
    assert overlapped.makespan <= before.makespan * (1 + 1e-9)


def test_limits_leave_a_feasible_schedule_with_its_gap():
    hard = next(i for i in read_instances(LAYERS) if i.name == "gptbwd_4x1_w64")
    (rough,) = schedule_instances([hard], max_nodes=50, highs=False)
    check(rough)
    assert rough.status == "feasible"
    assert 0 < rough.gap < 1
    assert rough.bound <= 10475302 <= rough.makespan
    (none,) = schedule_instances([hard], time_limit_s=0.0)
    check(none)
    (short,) = schedule_instances([hard], time_limit_s=0.001, highs=False)
    check(short)


def test_without_highs_the_error_is_clear(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "highspy", None)
    hard = next(i for i in read_instances(LAYERS) if i.name == "gptbwd_4x1_w64")
    with pytest.raises(InvalidInputError, match="highspy is not installed"):
        schedule_instances([hard], max_nodes=10, time_limit_s=1.0)


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
from phaze_fast import _core
from phaze_fast.schedule import instance_from_dict
from phaze_fast.schedule.layers import pack
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
rng = np.random.default_rng(0)
ops = [
    {"id": i, "type": "TC", "lat_single": int(s), "lat_all": int(s) // 3}
    for i, s in enumerate(rng.integers(1000, 9000, 40))
]
layer = {"name": "hard", "ops": ops, "edges": [], "num_tc": 7, "num_vc": 1}
packed = pack([instance_from_dict(layer)] * 64)
for threads in (1, 2):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    try:
        _core.schedule_layers(packed, False, 2**60, float("inf"), threads)
    except KeyboardInterrupt:
        print("interrupted", time.monotonic() - begun < 30)
"""


def test_an_interrupt_ends_a_search_without_end():
    import subprocess
    import sys

    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout.split() == ["interrupted", "True"] * 2, ran.stderr


def test_schedules_explain_themselves():
    first = next(read_instances(LAYERS))
    (found,) = schedule_instances([first])
    text = str(found)
    assert "optimal" in text
    assert len(text.splitlines()) == 1 + len(first)
    assert found.critical_path[-1] == "res2"
    assert 0 < found.utilization["TC"] <= 1
    assert 0 < found.utilization["VC"] <= 1
    assert "NET" not in found.utilization


# ---- bad input ----

OP = {"id": 0, "type": "TC", "lat_single": 2, "lat_all": 1}
BASE = {"name": "x", "ops": [OP], "edges": [], "num_tc": 2, "num_vc": 1}


@pytest.mark.parametrize(
    ("change", "words"), [*refused_calls("layer"), ({"ops": [OP] * 129}, "1 to 128")]
)
def test_layers_that_are_not_right(change, words):
    with pytest.raises(InvalidInputError, match=words):
        instance_from_dict({**BASE, **change})


def test_files_that_are_not_right(tmp_path):
    path = tmp_path / "x.jsonl"
    for text, words in (("{", "line 1: not JSON"), ("\n", "no instances"), ("[]", "line 1")):
        path.write_text(text)
        with pytest.raises(InvalidInputError, match=words):
            list(read_instances(path))
    with pytest.raises(InvalidInputError, match="no such file"):
        list(read_instances(tmp_path / "none.jsonl"))


def test_options_that_are_not_right():
    layer = instance_from_dict(BASE)
    with pytest.raises(InvalidInputError, match="rule: 'both'"):
        schedule_instances([layer], "both")
    with pytest.raises(InvalidInputError, match="time_limit_s: -1"):
        schedule_instances([layer], time_limit_s=-1)
