"""What a mapping says it sends is what the kernel times, and its sizes are the model's."""

import random

import numpy as np
import pytest
from wafer_mappings import (
    BERT,
    LAYOUT,
    PLAN,
    changed,
    compiled,
    problem_of,
    random_op_mappings,
)

from phaze_fast import _core, models
from phaze_fast.opgraph import layer_graph
from phaze_fast.wafer import Layout, evaluate, megatron
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.mesh import mesh_collective
from phaze_fast.wafer.mapping.operators import workload
from phaze_fast.wafer.mapping.placement import Placement
from phaze_fast.wafer.mapping.traffic import describe, transfers


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
    links = Placement(problem.wafer, (encoding.layout,)).links()
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
    """Sums of the transfers and of the kernel, for random legal operator mappings."""
    problem = _PROBLEMS.setdefault(name, problem_of(name).variant(overlap=False))
    rng = random.Random(f"{name}{layout}")
    mapping, _ = compiled(problem, layout)
    for _ in range(count):
        op_mappings, _ = random_op_mappings(problem, layout, rng)
        mapping.assign(op_mappings)
        score = mapping.score()[0]
        none = np.zeros(layout.stages * len(op_mappings), dtype=np.uint8)
        encoding = Encoding.from_arrays(problem, layout, op_mappings, none)
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
        problem = _PROBLEMS.setdefault(name, problem_of(name).variant(overlap=False))
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
    blocks = problem.blocks(Layout(1, 1, 2, 1))
    assert stages["activation_bytes"][0] == pytest.approx(
        2 * (blocks[0] * keep + ends["before"]), rel=1e-12
    )
    assert stages["activation_bytes"][1] == pytest.approx(
        blocks[1] * keep + ends["behind"], rel=1e-12
    )


def test_the_core_has_as_many_runs_as_the_rule_says():
    assert _core.RUNS_PER_AXIS == 3
