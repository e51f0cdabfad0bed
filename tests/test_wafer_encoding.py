"""Encodings of mappings: JSON and arrays round trip, each rule alone, and what they say they send."""

import copy
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phaze_fast import _core, models
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets
from phaze_fast.opgraph import layer_graph
from phaze_fast.wafer import Layout, Problem, WaferTraining, evaluate, megatron
from phaze_fast.wafer.encoding import RULES, Encoding
from phaze_fast.wafer.layout import links_of
from phaze_fast.wafer.mesh import MESH_ALGORITHMS, mesh_collective
from phaze_fast.wafer.operators import ROLES, workload
from phaze_fast.wafer.problem import OUTPUTS
from phaze_fast.wafer.traffic import describe, transfers

DRAM = presets.wafer("dram-wafer")
STREAM = presets.wafer("dram-stream-wafer")


def problem_of(name="bertlarge", wafer=DRAM):
    return Problem(models.load(name), wafer, WaferTraining(64))


BERT = problem_of()
STREAMED = problem_of(wafer=STREAM)
LAYOUT = Layout(4, 2, 3, 8)
PLAN = megatron(BERT, LAYOUT, tensor_parallel=4)

_MAPPINGS = {}


def compiled(problem, layout):
    """A compiled mapping and every operator's choices, made once."""
    key = (problem, layout)
    if key not in _MAPPINGS:
        mapping = problem.mapping(layout)
        count = len(problem.work.operators)
        _MAPPINGS[key] = mapping, [mapping.choices(i) for i in range(count)]
    return _MAPPINGS[key]


def random_genes(problem, layout, rng):
    """Legal genes, and legal outputs for every stage."""
    _, choices = compiled(problem, layout)
    genes = np.array([some[rng.randrange(len(some))] for some in choices])
    outputs = np.zeros((layout.stages, len(genes)), dtype=np.uint8)
    last = problem.work.chain[-1]
    for i, op in enumerate(problem.work.operators):
        if op.parameters:  # elsewhere there is nothing to keep
            genes[i]["mode"] = rng.randrange(len(problem.modes))
        genes[i]["algorithm"] = rng.randrange(len(MESH_ALGORITHMS))
        bits = problem._outputs(op, i == last)
        accepted = [code for code in range(len(OUTPUTS)) if bits >> code & 1]
        if op.part == "block":
            outputs[:, i] = [rng.choice(accepted) for _ in range(layout.stages)]
    return genes, outputs.reshape(-1)


layouts_of = st.sampled_from([Layout(1, 1, 3, 8), Layout(4, 2, 3, 8), Layout(2, 3, 2, 16)])
seeds = st.integers(0, 2**32)


# ---- round trips ----


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([BERT, STREAMED]), layouts_of, seeds)
def test_arrays_and_json_round_trip(problem, layout, seed):
    genes, outputs = random_genes(problem, layout, random.Random(seed))
    made = Encoding.from_arrays(problem, layout, genes, outputs)
    assert made.faults(problem) == []
    back = made.arrays(problem)
    assert np.array_equal(back[0], genes)
    assert np.array_equal(back[1], outputs)
    read = Encoding.from_list(json.loads(made.to_json()))
    assert read == made
    assert read.to_list() == made.to_list()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([BERT, STREAMED]), layouts_of, seeds)
def test_what_is_read_back_takes_the_same_time(problem, layout, seed):
    genes, outputs = random_genes(problem, layout, random.Random(seed))
    mapping, _ = compiled(problem, layout)
    mapping.assign(genes)
    score = mapping.score(outputs)[0]
    made = Encoding.from_arrays(problem, layout, genes, outputs)
    found = evaluate(problem, Encoding.from_list(json.loads(made.to_json())))
    assert found.time_s == score["time_s"]
    assert found.memory_bytes == score["memory_bytes"]
    assert found.stream_bytes == score["stream_bytes"]


def test_one_output_for_all_stages_is_written_once():
    genes, _ = PLAN.arrays(BERT)
    outputs = np.zeros((LAYOUT.stages, len(genes)), dtype=np.uint8)
    at = [op.name for op in BERT.work.operators].index("activation")
    outputs[:, at] = 1
    made = Encoding.from_arrays(BERT, LAYOUT, genes, outputs.reshape(-1))
    assert made.genes[at].output == ("recompute",)
    assert made.to_list()[at]["output"] == "recompute"
    outputs[1, at] = 0
    made = Encoding.from_arrays(BERT, LAYOUT, genes, outputs.reshape(-1))
    assert made.genes[at].output == ("recompute", "stash", "recompute")
    assert made.to_list()[at]["output"] == ["recompute", "stash", "recompute"]


def test_the_partition_is_the_product_of_both_axes():
    for gene in PLAN.genes:
        for role in ROLES:
            along = [factor for name, factor in (*gene.x, *gene.y) if name == role]
            assert gene.partition[role] == np.prod(along, dtype=int)


# ---- legality ----


def changed(operator, encoding=PLAN, **changes):
    """The plan with one operator's gene changed."""
    genes = tuple(
        replace(gene, **changes) if gene.operator == operator else gene for gene in encoding.genes
    )
    return Encoding(encoding.layout, genes)


SIX = Layout(6, 1, 1, 8)
LONG = Layout(8, 2, 1, 64)

BROKEN = {
    "sides": (PLAN, "up", {"x": (("columns", 2),)}, "x: factors multiply to 2; expected 4"),
    "slots": (
        megatron(BERT, SIX, 1, deal=("data", "data")),
        "up",
        {"x": (("rows", 3), ("columns", 2))},
        "x: 3 does not follow the side's prime factors",
    ),
    "runs": (
        megatron(BERT, LONG, 1, deal=("data",) * 4),
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
        (Layout(9, 1, 1, 8), "rectangle: 9 x 1 dies have no place on dram-wafer"),
        (Layout(1, 1, 25, 8), "expected 1 to 24"),
        (Layout(4, 2, 3, 3), "microbatch: 3 is not accepted; expected a divisor of the global batch of 64"),
        (Layout(4, 2, 3, 128), "microbatch: 128 is not accepted"),
        (Layout(4, 2, 0, 8), "stages: 0 rectangles"),
        (Layout(4, 2, 3, 0), "microbatch: 0 is not accepted"),
    ],
)  # fmt: skip
def test_layout_faults(layout, text):
    (fault,) = Encoding(layout, PLAN.genes).faults(BERT)
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
    (fault,) = Encoding(LAYOUT, pick(PLAN.genes)).faults(BERT)
    assert fault.startswith("operators: ")


def test_legality_is_the_kernels():
    """Random deals of roles to slots: legal by the rules exactly where the kernel takes them."""
    rng = random.Random(3)
    layout = Layout(8, 2, 1, 8)
    mapping, _ = compiled(BERT, layout)
    slots = 4
    agreed = {True: 0, False: 0}
    base = mapping.genes().copy()
    for _ in range(600):
        genes = base.copy()
        i = rng.randrange(len(genes))
        genes[i]["slots"] = 0
        for k in range(slots):
            genes[i]["slots"][rng.choice([0, 1, 2, 2, 3, 4])] |= 1 << k
        outputs = np.zeros(len(genes), dtype=np.uint8)
        legal = Encoding.from_arrays(BERT, layout, genes, outputs).faults(BERT) == []
        try:
            mapping.assign(genes)
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
        ("weights", "zero4", "[2].weights: 'zero4' is not accepted; did you mean"),
        ("weights", None, "[2].weights: None is not accepted"),
        ("weights", [], "[2].weights"),
        ("weights", ["zero1", "zero3"], "[2].weights"),
        ("collective", "rink", "[2].collective: 'rink' is not accepted; did you mean 'ring'?"),
        ("collective", [], "[2].collective"),
        ("output", "stush", "[2].output: 'stush' is not accepted; did you mean 'stash'?"),
        ("output", {"stash": 1}, "[2].output"),
        ("output", ["stash", 3], "[2].output: 3 is not accepted"),
        ("x", None, "[2].x: None is not accepted; expected pairs of role and factor"),
        ("x", "batch", "[2].x: 'batch' is not accepted"),
        ("x", [["batch"]], "[2].x: ['batch'] is not accepted; expected [role, factor]"),
        ("x", [["bach", 4]], "[2].x: ['bach', 4] is not accepted"),
        ("x", [[["batch"], 4]], "[2].x"),
        ("x", [["batch", 4.0]], "[2].x: 4.0 is not accepted; expected a whole number"),
        ("x", [["batch", True]], "[2].x: True is not accepted"),
        ("x", [["batch", 0]], "[2].x: 0 is not accepted"),
        ("y", [5], "[2].y: 5 is not accepted"),
        ("rectangle", [4], "[2].rectangle: [4] is not accepted; expected two sides"),
        ("rectangle", ["4", 2], "[2].rectangle: '4' is not accepted"),
        ("stages", 0, "[2].stages: 0 is not accepted; expected a whole number from 1"),
        ("stages", 1.5, "[2].stages: 1.5 is not accepted"),
        ("microbatch", None, "[2].microbatch: None is not accepted"),
        ("stages", 4, "operators disagree in rectangle, stages or microbatch"),
        ("partition", {"batch": 99}, "[2].partition: {'batch': 99} is not what x and y say"),
        ("colective", "auto", "[2]: unknown key 'colective'; did you mean 'collective'?"),
    ],
)  # fmt: skip
def test_a_malformed_entry_is_named(key, value, text):
    data = PLAN.to_list()
    data[2][key] = value
    with pytest.raises(InvalidInputError) as caught:
        Encoding.from_list(data, "mine.json")
    assert str(caught.value).startswith("mine.json")
    assert text in str(caught.value)


@pytest.mark.parametrize("key", ["x", "y", "rectangle", "stages", "microbatch"])
def test_a_missing_key_is_named(key):
    data = PLAN.to_list()
    del data[1][key]
    with pytest.raises(InvalidInputError, match=rf"^encoding\[1\]\.{key}: None is not accepted"):
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


# ---- what it says ----


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
    text = describe(BERT, megatron(BERT, Layout(4, 1, 1, 8), 2, deal=("data", "tensor")))
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
    run = {gene.operator: gene.collective for gene in encoding.genes}
    links = links_of(problem.wafer)
    blocking, hidden = 0.0, 0.0
    for each in transfers(problem, encoding):
        inside = part[each.operator] == "block" and part.get(each.target, "block") == "block"
        if not inside or each.when == "step":
            continue
        seconds = mesh_collective(
            each.op, each.payload_bytes, each.runs, links, run[each.operator]
        ).time_s
        if each.hidden:
            hidden += seconds
        else:
            blocking += seconds
    return blocking, hidden


def random_sums(name, layout, count):
    """Sums of the transfers and of the kernel, for random legal genes."""
    problem = _PROBLEMS.setdefault(name, problem_of(name))
    rng = random.Random(f"{name}{layout}")
    mapping, _ = compiled(problem, layout)
    for _ in range(count):
        genes, _ = random_genes(problem, layout, rng)
        mapping.assign(genes)
        score = mapping.score()[0]
        none = np.zeros(layout.stages * len(genes), dtype=np.uint8)
        encoding = Encoding.from_arrays(problem, layout, genes, none)
        yield sums(problem, encoding), (float(score["blocking_s"]), float(score["hidden_s"]))


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_transfers_are_what_a_block_waits_for(name, layout):
    for mine, kernel in random_sums(name, layout, 25):
        assert mine[0] == pytest.approx(kernel[0], rel=1e-9, abs=1e-18)


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_transfers_beside_the_work_are_the_kernels(name, layout):
    for mine, kernel in random_sums(name, layout, 25):
        assert mine[1] == pytest.approx(kernel[1], rel=1e-9, abs=1e-18)


def test_transfers_of_plans_are_the_kernels():
    for name in ("bertlarge", "llama2-7b", "gpt3-13b"):
        problem = _PROBLEMS.setdefault(name, problem_of(name))
        for shared in (False, True):
            for weights in ("replicated", "zero1", "zero2", "zero3"):
                plan = megatron(problem, Layout(4, 2, 2, 8), 4, shared, weights=weights)
                found = evaluate(problem, plan)
                mine = sums(problem, plan)
                assert mine[0] == pytest.approx(found.blocking_s, rel=1e-9)
                assert mine[1] == pytest.approx(found.hidden_s, rel=1e-9)


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
    blocks = problem.blocks(2)
    assert stages[0][3] == pytest.approx(2 * (blocks[0] * keep + ends["before"]), rel=1e-12)
    assert stages[1][3] == pytest.approx(blocks[1] * keep + ends["behind"], rel=1e-12)


def test_the_core_has_as_many_runs_as_the_rule_says():
    assert _core.RUNS_PER_AXIS == 3
