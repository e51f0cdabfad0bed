"""NEST's placement on tiers: published optima, full enumeration, and laws of the problem."""

import copy
import math
from pathlib import Path

import pytest
from case_counts import slow_ones
from golden_files import golden_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from nest_cases import nest_problem
from reference import nest as reference

from phaze_fast.errors import InvalidInputError
from phaze_fast.papers import nest_from_dict, solve_nest

GOLDEN = golden_lines("nest_instances.jsonl")
seeds = st.integers(min_value=0, max_value=10**9)
few = settings(max_examples=60, deadline=None)


def solved(data, **options):
    return solve_nest([nest_from_dict(data)], threads=1, **options)[0]


def time_of(data, **options):
    time = solved(data, **options)["finalTimePerBatch"]
    return math.inf if time is None else time


def repriced(data, plan, all_replicas=False):
    stages = [stage["nodes"] for stage in plan["stages"]]
    return reference.time_of(data, str(plan["t"]), stages, plan["d"], all_replicas)


@pytest.mark.parametrize("record", GOLDEN, ids=lambda r: r["name"])
def test_published_problems_have_their_optimum(record):
    plan = solved(record)
    expected = record["optimum"]
    assert plan["status"] == "optimal"
    assert plan["finalTimePerBatch"] == pytest.approx(expected["finalTimePerBatch"], rel=1e-9)
    assert [plan[key] for key in "ptd"] == [expected[key] for key in "ptd"]
    assert plan["p"] == len(plan["stages"])
    assert repriced(record["input"], plan) == pytest.approx(plan["finalTimePerBatch"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(30))
def test_random_problems_against_full_enumeration(chunk):
    feasible = piped = 0
    for seed in range(100 * chunk, 100 * chunk + 100):
        data = nest_problem(seed)
        plan = solved(data)
        expected = reference.best(data)
        if expected == math.inf:
            assert plan["status"] == "infeasible", seed
            continue
        feasible += 1
        piped += plan["p"] > 1
        assert plan["status"] == "optimal", seed
        assert plan["finalTimePerBatch"] == pytest.approx(expected, rel=1e-11), seed
        assert repriced(data, plan) == pytest.approx(expected, rel=1e-11), seed
    assert feasible >= 50
    assert piped >= 20


@pytest.mark.parametrize("chunk", slow_ones(range(4), 2, 3))
def test_all_replicas_against_full_enumeration(chunk):
    differ = 0
    for seed in range(10_000 + 100 * chunk, 10_100 + 100 * chunk):
        data = nest_problem(seed)
        plan = solved(data, replicas="all")
        expected = reference.best(data, all_replicas=True)
        if expected == math.inf:
            assert plan["status"] == "infeasible"
            continue
        assert plan["finalTimePerBatch"] == pytest.approx(expected, rel=1e-11), seed
        assert repriced(data, plan, True) == pytest.approx(expected, rel=1e-11), seed
        assert plan["allReplicasTimePerBatch"] == pytest.approx(expected, rel=1e-11), seed
        first = solved(data)
        assert first["finalTimePerBatch"] <= expected * (1 + 1e-12)
        every = repriced(data, first, True)
        assert first["allReplicasTimePerBatch"] == pytest.approx(every, rel=1e-11)
        differ += first["finalTimePerBatch"] < expected * (1 - 1e-9)
    assert differ >= 2


@pytest.mark.parametrize("record", GOLDEN[::6], ids=lambda r: r["name"])
def test_published_stages_are_described_as_the_oracle_sees_them(record):
    plan = solved(record)
    layers = reference.Layers(record["input"], str(plan["t"]))
    stages = [stage["nodes"] for stage in plan["stages"]]
    for q, stage in enumerate(plan["stages"]):
        s = len(stages) - q
        assert stage["devicesForStage"] == layers.per_stage
        assert stage["firstDevice"] == (s - 1) * layers.per_stage
        assert stage["load"] == pytest.approx(layers.load(stages, s, 0), rel=1e-12)
        assert stage["memoryBytes"] == layers.memory(stage["nodes"], s)
        assert stage["memoryBytes"] <= record["input"]["maxMemoryPerDevice"]
    parts = plan["breakdown"]
    assert parts["largest_load"] == pytest.approx(max(s["load"] for s in plan["stages"]))
    assert parts["compute"] + parts["gradient_sync"] == pytest.approx(plan["finalTimePerBatch"])


def test_threads_and_batches_change_nothing():
    problems = [nest_from_dict(record) for record in GOLDEN[::4]]
    problems += [nest_from_dict(nest_problem(seed)) for seed in range(200)]
    keep = [{**solve_nest([p], threads=1)[0], "solve_s": 0} for p in problems]
    for threads in (1, 2, 5):
        assert [{**a, "solve_s": 0} for a in solve_nest(problems, threads)] == keep


@few
@given(seeds)
def test_order_of_lists_and_names_of_layers_are_irrelevant(seed):
    data = nest_problem(seed, most_layers=9)
    other = copy.deepcopy(data)
    for width in other["nodes"]:
        other["nodes"][width].reverse()
        other["edges"][width].reverse()
        for node in other["nodes"][width]:
            node["id"] = 100 - node["id"]
        for edge in other["edges"][width]:
            edge["sourceId"], edge["destId"] = 100 - edge["sourceId"], 100 - edge["destId"]
    other["nodes"] = dict(reversed(other["nodes"].items()))
    plan, same = solved(data), solved(other)
    for key in ("status", "finalTimePerBatch", "p", "t", "d"):
        assert plan[key] == same[key]
    named = [[100 - i for i in stage["nodes"]] for stage in same["stages"]]
    assert named == [stage["nodes"] for stage in plan["stages"]]


@few
@given(seeds, st.sampled_from([0.25, 2.0, 1024.0]))
def test_times_scale(seed, factor):
    data = nest_problem(seed, most_layers=9)
    other = copy.deepcopy(data)
    other["bws"] = [rate / factor for rate in data["bws"]]
    other["latency_per_level"] = [latency * factor for latency in data["latency_per_level"]]
    for nodes in other["nodes"].values():
        for node in nodes:
            node["optimalLatencyFw"] *= factor
            node["optimalLatencyBw"] *= factor
    plan, scaled = solved(data), solved(other)
    assert time_of(other) == time_of(data) * factor  # powers of two: to the bit
    assert [plan[key] for key in "ptd"] == [scaled[key] for key in "ptd"]


@few
@given(seeds, st.sampled_from(["devices", "memory", "rate", "latency", "batch", "width"]))
def test_more_never_worsens(seed, what):
    data = nest_problem(seed, most_layers=9)
    better = copy.deepcopy(data)
    level = seed % len(data["bws"])
    if what == "devices":  # more groups of the outermost level
        better["devices_per_level"][-1] *= 2
        better["maxDevices"] *= 2
    elif what == "memory":
        better["maxMemoryPerDevice"] *= 1.5
    elif what == "rate":
        better["bws"][level] *= 3
    elif what == "latency":
        better["latency_per_level"][level] *= 0.5
    elif what == "batch":
        better["mbsInBatch"] = max(1.0, data["mbsInBatch"] / 2)
    else:
        width = next(iter(data["nodes"]))
        better["nodes"]["7"], better["edges"]["7"] = data["nodes"][width], data["edges"][width]
    assert time_of(better) <= time_of(data) * (1 + 1e-12)
    if what not in ("devices", "batch"):  # more replicas may lie on other tiers
        assert time_of(better, replicas="all") <= time_of(data, replicas="all") * (1 + 1e-12)


def test_latencies_in_milliseconds_are_converted():
    record = next(r for r in GOLDEN if r["name"] == "tpu-llama3-128")
    seconds = copy.deepcopy(record["input"])
    for node in seconds["nodes"]["1"]:
        node["optimalLatencyFw"] *= 1e-3
        node["optimalLatencyBw"] *= 1e-3
    given_ms = solve_nest([nest_from_dict(record, time_unit="ms")], 1)[0]
    assert given_ms["finalTimePerBatch"] == solved(seconds)["finalTimePerBatch"]
    assert given_ms["finalTimePerBatch"] == pytest.approx(
        record["optimum"]["finalTimePerBatch"] * 1e-3, rel=1e-3
    )
    with pytest.raises(InvalidInputError, match="time_unit: 'min' is not accepted"):
        nest_from_dict(record, time_unit="min")


def test_the_reason_says_what_would_fit():
    for seed in range(40):
        data = {**nest_problem(seed), "maxMemoryPerDevice": 1}
        plan = solved(data)
        if plan["status"] == "optimal":  # layers of no size
            continue
        assert plan["finalTimePerBatch"] is plan["p"] is plan["t"] is plan["d"] is None
        assert plan["stages"] == []
        if "would fit with maxMemoryPerDevice" not in plan["reason"]:
            assert "and maxDevices is" in plan["reason"]
            continue
        least = int(plan["reason"].split("would fit with maxMemoryPerDevice ")[1].split(".")[0])
        assert solved({**data, "maxMemoryPerDevice": least})["status"] == "optimal"
        assert solved({**data, "maxMemoryPerDevice": least - 1})["status"] == "infeasible"


def test_zero_is_named_where_the_published_program_would_turn_to_it():
    data = {**GOLDEN[0]["input"], "maxMemoryPerDevice": 10**9}
    assert "here NEST turns to ZeRO" in solved(data)["reason"]


def test_many_layers_and_devices_are_solved_in_bounded_time():
    data = nest_problem(1)
    count = 400
    node = {"parameterSize": 3, "activationSize": 2}
    data |= {
        "maxDevices": 2**29,
        "devices_per_level": [8, 64, 2**20],
        "bws": [9e11, 1e10, 5e10],
        "latency_per_level": [1e-4, 2e-4, 3e-4],
        "maxMemoryPerDevice": 10**6,
        "mbsInBatch": 2**29,
        "ep_degree": 1,
        "cp_degree": 1,
        "nodes": {
            "1": [
                {"id": i, "optimalLatencyFw": 1e-3, "optimalLatencyBw": 2e-3, **node}
                for i in range(count)
            ]
        },
        "edges": {
            "1": [
                {"sourceId": i, "destId": i + 1, "communicationCost": 10**7}
                for i in range(count - 1)
            ]
        },
    }
    plan = solved(data)
    assert plan["status"] == "optimal"
    assert plan["solve_s"] < 5
    with pytest.raises(InvalidInputError, match="expected at most 65536"):
        solved(data, replicas="all")


@pytest.mark.checkout
def test_the_table_in_the_documentation_holds():
    page = Path(__file__).parents[2] / "docs" / "nest.md"
    records = {record["name"]: record for record in GOLDEN}
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.read_text("utf-8").splitlines()
        if line.startswith(("| h100-", "| tpu-"))
    ]
    assert sorted(row[0] for row in rows) == sorted(records)
    shown = {"rel": 1e-5}

    def degrees(plan):
        return f"{plan['p']}, {plan['t']}, {plan['d']}"

    for name, time, best, every, best_all, own, consistent, plan_s, all_s in rows:
        data = records[name]["input"]
        plan = solved(data)
        assert float(time) == pytest.approx(plan["finalTimePerBatch"], **shown)
        assert best == degrees(plan)
        assert float(every) == pytest.approx(plan["allReplicasTimePerBatch"], **shown)
        checks = [(best_all, data)]
        if own != "-":
            seconds = copy.deepcopy(data)
            unit = 1.0 if name.startswith("h100-llama3") else 1e-3
            for node in (node for nodes in seconds["nodes"].values() for node in nodes):
                node["optimalLatencyFw"] *= unit
                node["optimalLatencyBw"] *= unit
            assert float(own) == pytest.approx(repriced(seconds, plan), **shown)
            in_seconds = solved(seconds)
            assert float(consistent) == pytest.approx(in_seconds["finalTimePerBatch"], **shown)
            assert plan_s == degrees(in_seconds)
            checks.append((all_s, seconds))
        for cell, given_data in checks:
            with_all = solved(given_data, replicas="all")
            number, _, rest = cell.partition(" ")
            assert float(number) == pytest.approx(with_all["finalTimePerBatch"], **shown)
            assert rest == f"({degrees(with_all)})"
