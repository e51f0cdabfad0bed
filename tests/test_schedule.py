"""Layers on one chip: golden optima, exhaustive enumeration, HiGHS, a checker, limits, bad input."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.layer import best_makespan, best_makespan_by_moments, faults

from phaze_fast import _core, models
from phaze_fast.cost import estimate_costs
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import ArchitectureSpace, presets
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.schedule import (
    ScheduleCache,
    instance_from_dict,
    read_instances,
    schedule_instances,
    schedule_layers,
)
from phaze_fast.schedule.highs import solve_with_highs
from phaze_fast.schedule.solve import pack

GOLDEN = Path(__file__).parent / "golden" / "layer_golden.jsonl"


def golden():
    with GOLDEN.open() as lines:
        return [json.loads(line) for line in lines]


def check(found):
    assert faults(found.instance, found.starts, found.mode, found.makespan, found.overlap) == []
    assert found.bound <= found.makespan * (1 + 1e-12)
    assert (found.status == "optimal") == (found.proved_by != "nothing")


@pytest.mark.parametrize("record", golden(), ids=lambda r: r["name"])
def test_golden_layers_are_solved_to_their_optimum(record):
    (found,) = schedule_instances([instance_from_dict(record)], highs=False)
    check(found)
    assert found.status == "optimal"
    assert found.makespan == (record["optimum"] or record["best_known"])


def test_bounds_keep_the_trees_small():
    # Weaker bounds or dominance give the same answers later: this is where that shows.
    found = schedule_instances(list(read_instances(GOLDEN)), highs=False)
    assert sum(made.nodes for made in found) <= 5500
    assert sum(made.proved_by == "list-schedule" for made in found) >= 6


def random_layer(rng, most_ops, most_modes=2):
    """A random layer; latencies on all cores between perfect scaling and none."""
    count = rng.randint(1, most_ops)
    cores = {"num_tc": rng.randint(1, 4), "num_vc": rng.randint(1, 3)}
    ops = []
    for i in range(count):
        kind = rng.choice(["TC", "TC", "VC", "TCandVC", "NET"])
        single = rng.choice([rng.randint(1, 30), rng.uniform(0.1, 30.0)])
        have = cores["num_vc"] if kind == "VC" else cores["num_tc"]
        every = single / rng.uniform(1.0, have) if kind != "NET" else single
        op = {"id": 10 * i, "type": kind, "lat_single": single, "lat_all": every}
        if most_modes > 2 and rng.random() < 0.3:
            op["lat_cores"] = {"2": (single + every) / 2}
        ops.append(op)
    chance = rng.choice([0.1, 0.3, 0.5])
    edges = [
        [10 * a, 10 * b] for b in range(count) for a in range(b) if rng.random() < chance / (b - a)
    ]
    return {"name": "random", "ops": ops, "edges": edges, **cores}


def against_enumeration(rng, most_ops, rule, most_modes=2):
    layer = instance_from_dict(random_layer(rng, most_ops, most_modes))
    (found,) = schedule_instances([layer], rule, highs=False)
    check(found)
    assert found.status == "optimal"
    assert found.makespan == pytest.approx(best_makespan(layer, rule == "overlap"), rel=1e-9)


@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_small_layers_are_those_of_enumeration(rule):
    rng = random.Random(11)
    for _ in range(150):
        against_enumeration(rng, 5, rule)
    for _ in range(40):
        against_enumeration(rng, 4, rule, most_modes=3)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_more_layers_are_those_of_enumeration(rule):
    rng = random.Random(12)
    for _ in range(1000):
        against_enumeration(rng, 6, rule)


def backward_like(rng, count):
    """A chain with operators beside it that nothing waits for, and few different latencies."""
    cores = {"num_tc": rng.choice([1, 2, 3, 8]), "num_vc": rng.choice([1, 2])}
    sizes = [rng.randint(1, 5), rng.randint(4, 12)]
    ops, edges, chain = [], [], []
    for i in range(count):
        kind = rng.choice(["TC", "TC", "TC", "VC", "NET", "TCandVC"])
        every = rng.choice(sizes) if rng.random() < 0.8 else rng.randint(1, 9)
        have = cores["num_vc"] if kind == "VC" else cores["num_tc"]
        single = every if kind == "NET" else every * have - rng.choice([0, 0, have - 1])
        ops.append({"id": i, "type": kind, "lat_single": max(single, 1), "lat_all": every})
        if chain and rng.random() < 0.9:
            edges.append([rng.choice(chain[-2:]), i])
        if rng.random() < 0.55:
            chain.append(i)
    return {"name": "backward", "ops": ops, "edges": edges, **cores}


def against_moments(rng, count, rule):
    layer = instance_from_dict(backward_like(rng, count))
    (found,) = schedule_instances([layer], rule, highs=False)
    check(found)
    assert found.status == "optimal"
    assert found.makespan == best_makespan_by_moments(layer, rule == "overlap")


@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_layers_with_twins_and_leaves_are_those_of_enumeration(rule):
    rng = random.Random(17)
    for _ in range(150):
        against_moments(rng, rng.randint(4, 6), rule)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_layers_of_ten_operators_are_those_of_enumeration(rule):
    rng = random.Random(18)
    for _ in range(150):
        against_moments(rng, rng.randint(7, 8), rule)
    for _ in range(12):
        against_moments(rng, 10, rule)


def against_highs(rng, most_ops, rule):
    layer = instance_from_dict(random_layer(rng, most_ops))
    (found,) = schedule_instances([layer], rule, highs=False)
    (rough,) = schedule_instances([layer], rule, max_nodes=0, highs=False)
    check(rough)
    proven = solve_with_highs(rough, 60.0)
    check(proven)
    assert proven.status == "optimal"
    assert proven.makespan == pytest.approx(found.makespan, rel=1e-6)


@pytest.mark.parametrize("rule", ["exclusive", "overlap"])
def test_highs_agrees(rule):
    rng = random.Random(13)
    for _ in range(25):
        against_highs(rng, 8, rule)


@pytest.mark.slow
def test_highs_agrees_on_two_thousand_layers():
    rng = random.Random(14)
    for i in range(2000):
        against_highs(rng, 7, "overlap" if i % 4 == 0 else "exclusive")


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
    hard = next(i for i in read_instances(GOLDEN) if i.name == "gptbwd_4x1_w64")
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
    hard = next(i for i in read_instances(GOLDEN) if i.name == "gptbwd_4x1_w64")
    with pytest.raises(InvalidInputError, match="highspy is not installed"):
        schedule_instances([hard], max_nodes=10, time_limit_s=1.0)


def test_batches_equal_single_calls_for_any_thread_count():
    rng = random.Random(15)
    layers = [instance_from_dict(random_layer(rng, 9)) for _ in range(200)]
    packed = pack(layers)
    one, two = (
        _core.schedule_layers(packed, False, 10**6, float("inf"), threads) for threads in (1, 2)
    )
    for a, b in zip(one, two, strict=True):
        assert a.tobytes() == b.tobytes()
    alone = schedule_instances(layers, highs=False, max_nodes=10**6)
    assert one[0].tolist() == [found.makespan for found in alone]


def test_bad_rows_of_a_batch_are_marked():
    good = instance_from_dict(random_layer(random.Random(1), 5))
    packed = tuple(array.copy() for array in pack([good, good, good]))
    packed[4][0] = np.nan
    packed[8][3] = -1
    found = _core.schedule_layers(packed, False, 1000, 1.0, 1)
    assert found[4].tolist()[2] == 0
    assert (found[4][:2] != 0).all()
    assert np.isnan(found[0][:2]).all()
    with pytest.raises(InvalidInputError, match="op_ptr: pointers"):
        _core.schedule_layers((packed[0][::-1].copy(), *packed[1:]), False, 1000, 1.0, 1)
    with pytest.raises(InvalidInputError, match="max_seconds"):
        _core.schedule_layers(packed, False, 1000, float("nan"), 1)


# ---- graphs ----


def test_layers_of_a_model_on_chips():
    space = ArchitectureSpace.tpuv4_area().chips
    chips = space[:: len(space) // 40]
    fabric = presets.fabric("tpuv4-pod")
    strategy = Strategy(tensor_parallel=2, sequence_parallel=True)
    costs = estimate_costs(layer_graph(models.load("bertlarge"), strategy), chips, fabric)
    times = schedule_layers(costs)
    assert times.makespan_s.shape == (len(costs.graphs), len(chips))
    assert times.proven.all()
    assert (times.gap <= 1e-9).all()
    for g in range(len(costs.graphs)):
        for c in (0, 7, len(chips) - 1):
            check(times.schedule(g, c))
        assert (times.makespan_s[g] <= costs.time_s(g).sum(axis=1) * (1 + 1e-12)).all()
    again = schedule_layers(costs, threads=2)
    assert times.makespan_s.tobytes() == again.makespan_s.tobytes()
    beside = schedule_layers(costs, rule="overlap", max_nodes=2000)
    assert (beside.bound_s <= times.makespan_s * (1 + 1e-12)).all()


def same(a, b):
    return (
        a.makespan_s.tobytes() == b.makespan_s.tobytes()
        and a.proved_by.tobytes() == b.proved_by.tobytes()
        and all(x.tobytes() == y.tobytes() for x, y in zip(a._starts, b._starts, strict=True))
        and all(x.tobytes() == y.tobytes() for x, y in zip(a._modes, b._modes, strict=True))
    )


def test_a_cache_gives_the_same_bits_and_counts(tmp_path):
    chips = ArchitectureSpace.tpuv4_area().chips[:60]
    costs = estimate_costs(layer_graph(models.load("bertlarge")), chips)
    plain = schedule_layers(costs)
    first = ScheduleCache(tmp_path / "layers.sqlite")
    assert same(schedule_layers(costs, cache=first), plain)
    asked = first.info().misses
    assert asked > 0
    assert same(schedule_layers(costs, cache=first), plain)
    assert first.info()[:4] == (asked, 0, asked, 0)
    first.close()
    second = ScheduleCache(tmp_path / "layers.sqlite")  # another process, as it were
    assert same(schedule_layers(costs, cache=second), plain)
    assert second.info()[:4] == (0, asked, 0, 0)
    other = schedule_layers(costs, rule="overlap", cache=second, max_nodes=2000)
    assert second.info().misses > 0
    assert same(other, schedule_layers(costs, rule="overlap", max_nodes=2000))
    second.close()


def test_a_damaged_cache_is_not_trusted(tmp_path):
    import sqlite3

    path = tmp_path / "layers.sqlite"
    chips = ArchitectureSpace.tpuv4_area().chips[:5]
    costs = estimate_costs(layer_graph(models.load("bertlarge")), chips)
    plain = schedule_layers(costs, cache=(first := ScheduleCache(path)))
    first.close()
    file = sqlite3.connect(path)
    file.execute("UPDATE layers SET value = substr(value, 1, 20)")
    file.commit()
    file.close()
    second = ScheduleCache(path)
    assert same(schedule_layers(costs, cache=second), plain)
    assert second.info().rejected == second.info().misses > 0
    second.close()
    bad = tmp_path / "not-a-cache"
    bad.write_text("hello " * 1000)
    with pytest.raises(InvalidInputError, match="cannot be used"):
        ScheduleCache(bad)


def renumbered(rng, record):
    """The same layer, its operators in another order."""
    ids = [op["id"] for op in record["ops"]]
    names = dict(zip(ids, rng.sample(range(1000), len(ids)), strict=True))
    ops = [{**op, "id": names[op["id"]]} for op in record["ops"]]
    edges = [[names[a], names[b]] for a, b in record["edges"]]
    rng.shuffle(ops)
    rng.shuffle(edges)
    return {**record, "ops": ops, "edges": edges}


def scaled(record, factor):
    ops = [
        {**op, "lat_single": op["lat_single"] * factor, "lat_all": op["lat_all"] * factor}
        for op in record["ops"]
    ]
    return {**record, "ops": ops}


@given(st.integers(0, 2**32))
def test_isomorphic_and_scaled_layers_have_one_canonical_form(seed):
    rng = random.Random(seed)
    record = random_layer(rng, 9)
    factor = rng.choice([3.0, 0.1, 1e-9, 7e5])
    other = scaled(renumbered(rng, record), factor)
    layers = [instance_from_dict(record), instance_from_dict(other)]
    one, two = _core.canonical_layers(pack(layers), False)
    assert one == two
    found, again = schedule_instances(layers, highs=False)
    check(again)
    assert again.nodes == found.nodes
    assert again.proved_by == found.proved_by
    assert again.makespan == pytest.approx(found.makespan * factor, rel=1e-12)


def test_the_canonical_form_of_a_form_is_itself():
    rng = random.Random(20)
    for _ in range(50):
        layer = instance_from_dict(random_layer(rng, 9))
        packed = pack([layer])
        plain = _core.schedule_layers(packed, False, 10**6, float("inf"), 1)
        formal = _core.schedule_layers(packed, False, 10**6, float("inf"), 1, canonical=True)
        most = max(seconds for modes in layer.modes for _, seconds in modes)
        assert plain[0][0] == pytest.approx(formal[0][0] * most, rel=1e-12)
        back = _core.replay_layers(packed, False, formal[5], formal[6])
        assert [x.tobytes() for x in back] == [plain[k].tobytes() for k in (0, 4, 5, 6)]


def test_replay_refuses_what_is_no_solution():
    packed = pack([instance_from_dict(random_layer(random.Random(3), 5))])
    ops = len(packed[1])
    bad = np.full(ops, 7, dtype=np.int32)
    makespan, status, _, _ = _core.replay_layers(packed, False, np.zeros(ops), bad)
    assert status[0] != 0
    assert np.isnan(makespan[0])


def test_schedules_explain_themselves():
    first = next(read_instances(GOLDEN))
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
    ("change", "words"),
    [
        ({"ops": []}, "ops: 0 is not accepted"),
        ({"ops": "no"}, "ops: 'str'"),
        ({"ops": [3]}, r"ops\[0\]: 'int'"),
        ({"ops": [OP, OP]}, "id: 0 is not accepted"),
        ({"ops": [{**OP, "type": "GPU"}]}, "type: 'GPU'"),
        ({"ops": [{**OP, "lat_single": -1}]}, "lat_single: -1"),
        ({"ops": [{**OP, "lat_all": float("nan")}]}, "lat_all: nan"),
        ({"ops": [{**OP, "lat_all": "1"}]}, "lat_all: '1'"),
        ({"ops": [{"id": 0, "type": "TC"}]}, "expected lat_single"),
        ({"ops": [{**OP, "lat_cores": {"0": 1}}]}, "lat_cores: '0'"),
        ({"ops": [OP] * 65}, "1 to 64"),
        ({"num_tc": -1}, "num_tc: -1"),
        ({"num_tc": 0}, "num_tc: 0 .* needs it"),
        ({"num_vc": 1.5}, "num_vc: 1.5"),
        ({"edges": [[0, 1]]}, r"edges: \[0, 1\]"),
        ({"edges": [[0, 0]]}, "two different"),
        ({"edges": [0]}, "edges: 0"),
        ({"ops": [OP, {**OP, "id": 1}], "edges": [[0, 1], [1, 0]]}, "cycle"),
    ],
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
    with pytest.raises(InvalidInputError, match="cannot be read"):
        list(read_instances(tmp_path / "none.jsonl"))


def test_options_that_are_not_right():
    layer = instance_from_dict(BASE)
    with pytest.raises(InvalidInputError, match="rule: 'both'"):
        schedule_instances([layer], "both")
    with pytest.raises(InvalidInputError, match="time_limit_s: -1"):
        schedule_instances([layer], time_limit_s=-1)
