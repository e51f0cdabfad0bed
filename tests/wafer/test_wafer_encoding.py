"""Encodings of mappings: JSON and arrays round trip, and each rule alone."""

import copy
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wafer_mappings import (
    BERT,
    DRAM,
    LAYOUT,
    PLAN,
    STREAMED,
    changed,
    compiled,
    layouts_of,
    problem_of,
    random_op_mappings,
    seeds,
)

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import Layout, Problem, WaferTraining, evaluate, megatron
from phaze_fast.wafer.mapping.encoding import RULES, Encoding
from phaze_fast.wafer.mapping.operators import ROLES

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


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([BERT, STREAMED]), layouts_of, seeds)
def test_what_is_read_back_takes_the_same_time(problem, layout, seed):
    op_mappings, outputs = random_op_mappings(problem, layout, random.Random(seed))
    mapping, _ = compiled(problem, layout)
    mapping.assign(op_mappings)
    score = mapping.score(outputs)[0]
    made = Encoding.from_arrays(problem, layout, op_mappings, outputs)
    found = evaluate(problem, Encoding.from_list(json.loads(made.to_json())))
    assert found.time_s == score["time_s"]
    assert found.memory_bytes == score["memory_bytes"]
    assert found.stream_bytes == score["stream_bytes"]


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


def test_the_partition_is_the_product_of_both_axes():
    for op_mapping in PLAN.operator_mappings:
        for role in ROLES:
            along = [factor for name, factor in (*op_mapping.x, *op_mapping.y) if name == role]
            assert op_mapping.partition[role] == np.prod(along, dtype=int)


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
    assert set(BROKEN) == {rule.name for rule in RULES}
    assert all(rule.text for rule in RULES)


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
    ("operator", "changes", "text"),
    [
        ("attention", {"x": (("columns", 4),), "y": (("inner", 2),)}, "inner: x2 is not accepted"),
        ("look-up", {"output": ("recompute",)}, "'recompute' is not accepted; accepted: stash"),
        ("ffn-norm", {"output": ("recompute",)}, "'recompute' is not accepted; accepted: stash"),
        ("up", {"output": ("stash", "stash")}, "2 values; expected 1, or one for each of 3 stages"),
        ("up", {"output": ()}, "0 values; expected 1, or one for each of 3 stages"),
        ("up", {"output": ("stash", "stush", "stash")}, "'stush' is not accepted"),
        ("up", {"weights": "zero4"}, "'zero4' is not accepted; did you mean 'zero"),
        ("up", {"y": (("rows", 4),)}, "y: factors multiply to 4; expected 2"),
    ],
)
def test_other_ways_to_break_a_rule(operator, changes, text):
    (fault,) = changed(operator, **changes).faults(BERT)
    assert fault.startswith(f"{operator}.")
    assert text in fault


def test_more_parts_than_heads_are_refused():
    plan = megatron(BERT, Layout(8, 4, 1, 8), 8)
    made = changed("attention", plan, x=(("columns", 8),), y=(("columns", 4),))
    assert made.faults(BERT) == [
        "attention.columns: 32 parts of 16; expected at most 16 (rule: limits)"
    ]


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


def test_dead_dies_leave_room_for_fewer_stages():
    made = megatron(BERT, Layout(8, 1, 5, 8), 8)
    assert made.faults(BERT) == []
    hurt = problem_of(wafer=DRAM.replace(dead=((3, 2),)))
    assert "expected 1 to 4" in made.faults(hurt)[0]


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


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("weights", "zero4", "[2]: weights: 'zero4' is not accepted; did you mean"),
        ("weights", None, "[2]: weights: None is not accepted"),
        ("weights", [], "[2]: weights"),
        ("weights", ["zero1", "zero3"], "[2]: weights"),
        ("collective", "rink", "[2]: collective: 'rink' is not accepted; did you mean 'ring'?"),
        ("collective", [], "[2]: collective"),
        ("output", "stush", "[2]: output.0: 'stush' is not accepted; did you mean 'stash'?"),
        ("output", {"stash": 1}, "[2]: output"),
        ("output", ["stash", 3], "[2]: output.1: 3 is not accepted"),
        ("x", None, "[2]: x: None is not accepted; expected a list"),
        ("x", "batch", "[2]: x: 'batch' is not accepted"),
        ("x", [["batch"]], "[2]: x.0.1: is missing and has no default"),
        ("x", [["bach", 4]], "[2]: x.0.0: 'bach' is not accepted; did you mean 'batch'?"),
        ("x", [[["batch"], 4]], "[2]: x.0.0: ['batch'] is not accepted"),
        ("x", [["batch", 4.0]], "[2]: x.0.1: 4.0 is not accepted; expected a whole number"),
        ("x", [["batch", True]], "[2]: x.0.1: True is not accepted"),
        ("x", [["batch", 0]], "[2]: x.0.1: 0 is not accepted; expected a number >= 1"),
        ("y", [5], "[2]: y.0: 5 is not accepted"),
        ("rectangle", [4], "[2]: rectangle.1: is missing and has no default"),
        ("rectangle", ["4", 2], "[2]: rectangle.0: '4' is not accepted"),
        ("stages", 0, "[2]: stages: 0 is not accepted; expected a number >= 1"),
        ("stages", 1.5, "[2]: stages: 1.5 is not accepted"),
        ("micro_batch", None, "[2]: micro_batch: None is not accepted"),
        ("stages", 4, "operators disagree in rectangle, stages or micro_batch"),
        ("partition", {"batch": 99}, "[2]: partition: {'batch': 99} is not what x and y say"),
        ("colective", "auto", "[2]: operator mapping: unknown key 'colective'; did you mean 'collective'?"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (
            Layout(41, 1, 1, 8),
            "rectangle: 41 x 1 dies have no place on dram-wafer, a grid of 8 x 5",
        ),
        (
            Layout(8, 2, 3, 8),
            "stages: 3 rectangles of 8 x 2 dies are not accepted; expected 1 to 2",
        ),
        (Layout(8, 2, 0, 8), "stages: 0 rectangles of 8 x 2 dies"),
    ],
)
def test_a_layout_without_a_place_says_so(layout, reason):
    with pytest.raises(InvalidInputError, match=f"^{reason}"):
        Problem("bertlarge", "dram-wafer", WaferTraining(8)).mapping(layout)
