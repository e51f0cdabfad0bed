"""Encodings: rules and files; what a mapping sends; details of a step."""

import copy
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from golden_files import refused_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import energy_table
from phaze_fast.opgraph import layer_graph
from phaze_fast.wafer import (
    Effort,
    Layout,
    Problem,
    WaferTraining,
    evaluate,
    load_wafer,
    megatron,
    search_mapping,
    step_energy,
    step_loads,
    step_mfu,
    transfers,
    zero3,
)
from phaze_fast.wafer.mapping.details import causes, details, link_map, operator_times
from phaze_fast.wafer.mapping.encoding import RULES, Encoding
from phaze_fast.wafer.mapping.mesh import MESH_ALGORITHMS, mesh_collective
from phaze_fast.wafer.mapping.operators import OUTPUTS, workload
from phaze_fast.wafer.mapping.placement import Placement
from phaze_fast.wafer.mapping.traffic import describe

# ---- plans, and legal operator mappings at random ----

DRAM = load_wafer("dram-wafer")
STREAM = load_wafer("dram-stream-wafer")


def problem_of(name="bertlarge", wafer=DRAM):
    return Problem(models.load(name), wafer, WaferTraining(64))


BERT = problem_of()
STREAMED = problem_of(wafer=STREAM)
LAYOUT = Layout(4, 2, 3, 8)
PLAN = megatron(BERT, LAYOUT, tp=4)

_MAPPINGS = {}


def compiled(problem, layout):
    """A compiled mapping and every operator's choices, made once."""
    key = (problem, layout)
    if key not in _MAPPINGS:
        mapping = problem.mapping(layout)
        count = len(problem.work.operators)
        _MAPPINGS[key] = mapping, [mapping.choices(i) for i in range(count)]
    return _MAPPINGS[key]


def random_op_mappings(problem, layout, rng):
    """Legal operator mappings, and legal outputs for every stage."""
    _, choices = compiled(problem, layout)
    op_mappings = np.array([some[rng.randrange(len(some))] for some in choices])
    outputs = np.zeros((layout.stages, len(op_mappings)), dtype=np.uint8)
    for i, op in enumerate(problem.work.operators):
        if op.parameters:  # elsewhere there is nothing to keep
            op_mappings[i]["mode"] = rng.randrange(len(problem.modes))
        op_mappings[i]["algorithm"] = rng.randrange(len(MESH_ALGORITHMS))
        accepted = [OUTPUTS.index(name) for name in problem.accepted_outputs(i)]
        if op.part == "block":
            outputs[:, i] = [rng.choice(accepted) for _ in range(layout.stages)]
    return op_mappings, outputs.reshape(-1)


layouts_of = st.sampled_from([Layout(1, 1, 3, 8), Layout(4, 2, 3, 8), Layout(2, 3, 2, 16)])
seeds = st.integers(0, 2**32)


def changed(operator, encoding=PLAN, **changes):
    """The plan with one operator's mapping changed."""
    op_mappings = tuple(
        replace(op_mapping, **changes) if op_mapping.operator == operator else op_mapping
        for op_mapping in encoding.operator_mappings
    )
    return Encoding(encoding.layout, op_mappings)


# ---- round trips ----


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([BERT, STREAMED]), layouts_of, seeds)
def test_arrays_and_json_round_trip(problem, layout, seed):
    op_mappings, outputs = random_op_mappings(problem, layout, random.Random(seed))
    made = Encoding.from_arrays(problem, layout, op_mappings, outputs)
    assert made.faults(problem) == []
    back = made.arrays(problem)
    assert np.array_equal(back[0], op_mappings)
    assert np.array_equal(back[1], outputs)
    read = Encoding.from_list(json.loads(made.to_json()))
    assert read == made
    assert read.to_list() == made.to_list()
    mapping, _ = compiled(problem, layout)
    mapping.assign(op_mappings)
    score, again = mapping.score(outputs)[0], evaluate(problem, read)
    for name in ("time_s", "memory_bytes", "stream_bytes"):
        assert getattr(again, name) == score[name]


def test_one_output_for_all_stages_is_written_once():
    op_mappings, _ = PLAN.arrays(BERT)
    outputs = np.zeros((LAYOUT.stages, len(op_mappings)), dtype=np.uint8)
    at = [op.name for op in BERT.work.operators].index("activation")
    outputs[:, at] = 1
    made = Encoding.from_arrays(BERT, LAYOUT, op_mappings, outputs.reshape(-1))
    assert made.operator_mappings[at].output == ("recompute",)
    assert made.to_list()[at]["output"] == "recompute"
    outputs[1, at] = 0
    made = Encoding.from_arrays(BERT, LAYOUT, op_mappings, outputs.reshape(-1))
    assert made.operator_mappings[at].output == ("recompute", "stash", "recompute")
    assert made.to_list()[at]["output"] == ["recompute", "stash", "recompute"]


# ---- legality ----


SIX = Layout(6, 1, 1, 8)
LONG = Layout(8, 2, 1, 64)

BROKEN = {
    "sides": (PLAN, "up", {"x": (("columns", 2),)}, "x: factors multiply to 2; expected 4"),
    "slots": (
        megatron(BERT, SIX, 1, axis_assignment=("data", "data")),
        "up",
        {"x": (("rows", 3), ("columns", 2))},
        "x: 3 does not follow the side's prime factors",
    ),
    "runs": (
        megatron(BERT, LONG, 1, axis_assignment=("data",) * 4),
        "up",
        {"x": (("rows", 1), ("columns", 2), ("rows", 2), ("inner", 2))},
        "x: 4 roles; expected at most 3",
    ),
    "roles": (PLAN, "up", {"x": (("copies", 4),)}, "copies: x4 is not accepted; accepted: batch"),
    "limits": (
        megatron(BERT, Layout(4, 4, 1, 8), 4),
        "up",
        {"x": (("batch", 4),), "y": (("batch", 4),)},
        "batch: 16 parts of 8; expected at most 8",
    ),
    "weights": (PLAN, "up", {"weights": "stream"}, "weights: 'stream' is not accepted"),
    "collective": (PLAN, "up", {"collective": "rink"}, "collective: 'rink' is not accepted"),
    "output": (PLAN, "up", {"output": ("offload",)}, "output: 'offload' is not accepted"),
}


def test_there_is_a_case_for_every_rule():
    assert set(BROKEN) == set(RULES)


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_alone_names_operator_field_and_rule(rule):
    plan, operator, changes, text = BROKEN[rule]
    made = changed(operator, plan, **changes)
    (fault,) = made.faults(BERT)
    assert fault.startswith(f"{operator}.{text}")
    assert fault.endswith(f"(rule: {rule})")
    with pytest.raises(InvalidInputError) as caught:
        evaluate(BERT, made)
    assert str(caught.value) == fault


@pytest.mark.parametrize(
    ("operator", "changes", "text"), refused_calls("rules of a wafer encoding")
)
def test_other_ways_to_break_a_rule(operator, changes, text):
    (fault,) = changed(operator, **changes).faults(BERT)
    assert fault.startswith(f"{operator}.")
    assert text in fault


def test_every_operator_that_breaks_a_rule_has_its_line():
    made = changed("down", changed("up", weights="stream"), collective="rink")
    assert [fault.partition(".")[0] for fault in made.faults(BERT)] == ["up", "down"]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(4, 2, 6, 8), "stages: 6 rectangles of 4 x 2 dies are not accepted; expected 1 to 4"),
        (Layout(41, 1, 1, 8), "rectangle: 41 x 1 dies have no place on dram-wafer"),
        (Layout(1, 1, 25, 8), "expected 1 to 24"),
        (Layout(4, 2, 3, 3), "micro_batch: 3 is not accepted; expected a divisor of the global batch of 64"),
        (Layout(4, 2, 3, 128), "micro_batch: 128 is not accepted"),
        (Layout(4, 2, 0, 8), "stages: 0 rectangles"),
        (Layout(4, 2, 3, 0), "micro_batch: 0 is not accepted"),
    ],
)  # fmt: skip
def test_layout_faults(layout, text):
    (fault,) = Encoding(layout, PLAN.operator_mappings).faults(BERT)
    assert text in fault
    assert text in refusal(lambda: BERT.mapping(layout))


@pytest.mark.parametrize(
    "pick", [lambda g: g[:-1], lambda g: (*g, g[0]), lambda g: (g[1], g[0], *g[2:])]
)
def test_missing_extra_or_misplaced_operators_are_refused(pick):
    (fault,) = Encoding(LAYOUT, pick(PLAN.operator_mappings)).faults(BERT)
    assert fault.startswith("operators: ")


def test_legality_is_the_kernels():
    """Random assignments of roles to slots: legal by the rules exactly where the kernel takes them."""
    rng = random.Random(3)
    layout = Layout(8, 2, 1, 8)
    mapping, _ = compiled(BERT, layout)
    slots = 4
    agreed = {True: 0, False: 0}
    base = mapping.op_mappings().copy()
    for _ in range(600):
        op_mappings = base.copy()
        i = rng.randrange(len(op_mappings))
        op_mappings[i]["slots"] = 0
        for k in range(slots):
            op_mappings[i]["slots"][rng.choice([0, 1, 2, 2, 3, 4])] |= 1 << k
        outputs = np.zeros(len(op_mappings), dtype=np.uint8)
        legal = Encoding.from_arrays(BERT, layout, op_mappings, outputs).faults(BERT) == []
        try:
            mapping.assign(op_mappings)
        except InvalidInputError:
            assert not legal
        else:
            assert legal
        agreed[legal] += 1
    assert min(agreed.values()) > 50


# ---- malformed data ----


@pytest.mark.parametrize(("key", "value", "text"), refused_calls("entries of a wafer encoding"))
def test_a_malformed_entry_is_named(key, value, text):
    data = PLAN.to_list()
    data[2][key] = value
    with pytest.raises(InvalidInputError) as caught:
        Encoding.from_list(data, "mine.json")
    assert str(caught.value).startswith("mine.json")
    assert text in str(caught.value)


@pytest.mark.parametrize("key", ["x", "y", "rectangle", "stages", "micro_batch"])
def test_a_missing_key_is_named(key):
    data = PLAN.to_list()
    del data[1][key]
    with pytest.raises(
        InvalidInputError, match=rf"^encoding\[1\]: {key}: is missing and has no default"
    ):
        Encoding.from_list(data)


def test_keys_with_a_default_may_be_left_out():
    data = copy.deepcopy(PLAN.to_list())
    for entry in data:
        for key in ("partition", "output", "weights", "collective"):
            del entry[key]
    assert Encoding.from_list(data) == PLAN


@pytest.mark.parametrize("data", [None, {}, [], "text", 5])
def test_what_is_no_list_is_refused(data):
    with pytest.raises(InvalidInputError, match="^mine: expected a list of one mapping"):
        Encoding.from_list(data, "mine")


def test_an_entry_that_is_no_mapping_is_refused():
    with pytest.raises(InvalidInputError, match=r"^encoding\[1\]: 7 is not accepted"):
        Encoding.from_list([PLAN.to_list()[0], 7])


# ---- traffic ----


def test_describe_says_which_tensor_is_split_where():
    plan = megatron(BERT, LAYOUT, 4, sequence_parallel=True, weights="zero1")
    text = describe(BERT, changed("up", plan, output=("stash", "recompute", "recompute")))
    lines = text.splitlines()
    assert lines[0] == "3 stage(s) of 4 x 2 dies, 8 sequence(s) at once"
    at = {line.split()[0]: i for i, line in enumerate(lines) if not line.startswith((" ", "3"))}
    assert list(at) == [op.name for op in BERT.work.operators]
    up = lines[at["up"]]
    assert "x: columns 4; y: batch 2 | weights zero1" in up
    assert "output stash in 1 stages, recompute in 2 stages" in up
    assert "x: inner 4; y: batch 2" in lines[at["down"]]
    assert "x: rows 4; y: batch 2" in lines[at["ffn-dropout"]]
    down = lines[at["down"] : at["ffn-dropout"]]
    assert any("forward: reduce-scatter to ffn-dropout over 4 along x" in each for each in down)
    assert any("step: reduce-scatter over 2 along y" in each for each in down)
    assert any("step: all-gather over 2 along y" in each for each in down)


def test_strided_groups_are_said():
    text = describe(BERT, megatron(BERT, Layout(4, 1, 1, 8), 2, axis_assignment=("data", "tensor")))
    assert "all-reduce to attention-dropout over 2 along x by 2" in text


def test_one_die_sends_nothing():
    assert transfers(BERT, megatron(BERT, Layout(1, 1, 4, 8), 1)) == []


CASES = [
    ("bertlarge", Layout(2, 1, 1, 8)),
    ("bertlarge", Layout(4, 2, 2, 8)),
    ("bertlarge", Layout(3, 2, 2, 2)),
    ("bertlarge", Layout(8, 5, 1, 2)),
    ("llama2-7b", Layout(4, 4, 1, 16)),
    ("llama2-7b", Layout(6, 4, 1, 2)),
    ("gpt3-13b", Layout(4, 2, 1, 1)),
    ("gpt3-13b", Layout(8, 3, 1, 4)),
]
_PROBLEMS = {}


def sums(problem, encoding):
    """Seconds of a block's collectives: those it waits for, and those beside the work."""
    part = {op.name: op.part for op in problem.work.operators}
    run = {op_mapping.operator: op_mapping.collective for op_mapping in encoding.operator_mappings}
    links = Placement(problem.wafer, encoding.layout).links()
    blocking, hidden = 0.0, 0.0
    for each in transfers(problem, encoding):
        inside = part[each.operator] == "block" and part.get(each.target, "block") == "block"
        if inside and each.when != "step":
            how = (each.payload_bytes, each.runs, links, run[each.operator])
            seconds = mesh_collective(each.op, *how).time_s
            hidden += seconds * each.hidden
            blocking += seconds * (not each.hidden)
    return blocking, hidden


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_transfers_take_what_the_kernel_says(name, layout):
    """For random legal operator mappings."""
    problem = _PROBLEMS.setdefault(name, problem_of(name).variant(overlap=False))
    rng = random.Random(f"{name}{layout}")
    mapping, _ = compiled(problem, layout)
    for _ in range(25):
        op_mappings, _ = random_op_mappings(problem, layout, rng)
        mapping.assign(op_mappings)
        score = mapping.score()[0]
        none = np.zeros(layout.stages * len(op_mappings), dtype=np.uint8)
        encoding = Encoding.from_arrays(problem, layout, op_mappings, none)
        kernel = (float(score["blocking_s"]), float(score["hidden_s"]))
        assert sums(problem, encoding) == pytest.approx(kernel, rel=1e-9, abs=1e-18)


def test_a_die_sends_less_than_its_payload_or_twice_that():
    for each in transfers(BERT, PLAN):
        share = each.payload_bytes * (1 - 1 / each.ranks)
        assert each.sent_bytes == pytest.approx(share * (2 if each.op == "all-reduce" else 1))


# ---- sizes ----

PRESETS = [
    "bertlarge",
    "megatronbert",
    "gpt2-small",
    "opt-1.3b",
    "gpt3-13b",
    "llama2-7b",
    "llama3-8b",
    "qwen2-0.5b",
    "qwen2-7b",
]


@pytest.mark.parametrize("name", PRESETS)
def test_operators_have_all_parameters(name):
    model = models.load(name)
    copies = model.vocab * model.hidden if model.tied_embeddings else 0
    assert workload(model).parameters == sum(model.parameters_by_part().values()) + copies


@pytest.mark.parametrize("name", PRESETS)
def test_a_block_keeps_what_the_operator_graph_keeps(name):
    model = models.load(name)
    kept = sum(op.kept_bytes for op in workload(model).operators if op.part == "block")
    assert kept == layer_graph(model).layers[1].forward.stashed_bytes()


def test_kept_bytes_reach_the_kernel():
    """One die, one sequence, one block more: its state, and what it keeps."""
    model = models.load("bertlarge")
    keep = layer_graph(model).layers[1].forward.stashed_bytes()
    problem = problem_of()
    mapping = problem.mapping(Layout(1, 1, 2, 1))
    outputs = np.zeros(2 * len(problem.work.operators), dtype=np.uint8)
    stages = mapping.stages(outputs)[0]
    ends = {
        part: sum(op.kept_bytes for op in problem.work.operators if op.part == part)
        for part in ("before", "behind")
    }
    blocks = problem.blocks(Layout(1, 1, 2, 1))
    assert stages["activation_bytes"][0] == pytest.approx(
        2 * (blocks[0] * keep + ends["before"]), rel=1e-12
    )
    assert stages["activation_bytes"][1] == pytest.approx(
        blocks[1] * keep + ends["behind"], rel=1e-12
    )


# ---- what a step uses: peak rate, energy, links and causes, against counts by hand ----


USED = megatron(BERT, Layout(4, 2, 4, 16), tp=4, weights="zero1")


def test_mfu_counts_the_models_flops_over_all_dies():
    found = evaluate(BERT, USED)
    flops = models.model_flops(models.load("bertlarge"), None, 64).total
    assert step_mfu(BERT, found) == pytest.approx(flops / found.time_s / DRAM.peak_flops())


def test_energy_is_at_least_that_of_the_arithmetic():
    found, table = evaluate(BERT, USED), energy_table()
    energy = step_energy(BERT, found)
    macs = models.model_flops(models.load("bertlarge"), None, 64).total / 2
    assert energy.operators_j > macs * table.mac_j
    assert energy.static_j == pytest.approx(0.15 * 625 * 40 * found.time_s)
    assert energy.stream_j == 0.0
    assert energy.total_j == pytest.approx(sum(vars(energy).values()))


def test_recomputation_and_larger_batches_cost_energy():
    full = megatron(BERT, Layout(4, 2, 4, 16), 4, recompute="full", weights="zero1")
    more = step_energy(BERT, evaluate(BERT, full)).operators_j
    less = step_energy(BERT, evaluate(BERT, USED)).operators_j
    assert 1.2 < more / less < 1.4  # a third of the work once more, but for the ends
    twice = Problem("bertlarge", DRAM, WaferTraining(128))
    assert step_energy(twice, evaluate(twice, USED)).operators_j == pytest.approx(2 * less)


def test_what_passes_off_the_wafer_is_charged():
    problem = Problem("bertlarge", "dram-stream-wafer", WaferTraining(64))
    plan = zero3(problem, Layout(8, 4, 1, 32))
    stay = evaluate(problem, plan)
    streamed = [{**row, "weights": "stream"} for row in plan.to_list()]
    moved = evaluate(problem, type(plan).from_list(streamed))
    joules = step_energy(problem, moved).stream_j
    parameters = problem.work.parameters
    assert joules == pytest.approx(2 * parameters * (2 * 2 + 2) * energy_table().network_byte_j)
    assert step_energy(problem, stay).stream_j == 0.0


def test_loads_of_one_stage_are_those_of_its_collectives():
    """A line of four: each all-reduce puts 2 (p - 1)/p V on the links of each die at most."""
    plan = megatron(BERT, Layout(4, 1, 1, 8), tp=4)
    loads = step_loads(BERT, plan)
    assert not loads[1:].any()
    assert not loads[0, 4:].any()
    sent = 0.0
    for move in transfers(BERT, plan):
        times = 24 if move.operator not in ("embedding", "logits", "loss") else 1
        if move.op == "all-reduce" and move.operator == "proj":
            sent += move.payload_bytes * 2 * 0.75 * 8 * times
    assert loads[0, 1, 0] > 0.5 * sent > 0
    assert loads[0, :4, 0] == pytest.approx(loads[0, 3::-1, 1])  # its mirror image


def test_stages_send_both_ways():
    loads = step_loads(BERT, megatron(BERT, Layout(1, 1, 3, 1), 1))
    size = BERT.work.boundary_bytes * 64
    assert loads[0, :3, 0] == pytest.approx([size, size, 0.0])
    assert loads[0, :3, 1] == pytest.approx([0.0, size, size])


def test_causes_add_up_and_operators_are_those_of_a_block():
    effort = Effort(seeds=1, steps=200, promising=1)
    found = search_mapping(BERT, effort, wanted=[LAYOUT]).best
    assert sum(causes(BERT, found).values()) == pytest.approx(found.time_s)
    rows = [row for row in operator_times(BERT, found) if row["part"] == "block"]
    work_s = sum(row["forward_s"] + row["backward_s"] for row in rows)
    assert work_s == pytest.approx(found.compute_s)
    assert all(0 <= row["of_peak"] <= 1 for row in rows)


def test_nothing_is_said_of_what_does_not_fit():
    problem = Problem("gpt3-175b", DRAM, WaferTraining(64))
    found = search_mapping(problem, Effort(seeds=1, steps=10, promising=1))
    assert set(details(problem, found.best).values()) == {None}
    assert found.to_dict()["mfu"] is None


def test_links_in_text():
    tile = load_wafer("dojo-tile-like").replace(columns=2, rows=2, dead_links=(((0, 0), (1, 0)),))
    loads = np.zeros((2, 2, 4))
    loads[0, 0, 2], loads[1, 1, 1] = 9.0, 3.0
    assert link_map(tile, loads).splitlines() == ["oxo", "9 .", "o3o"]
