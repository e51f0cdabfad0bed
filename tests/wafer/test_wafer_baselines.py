"""Other systems' plans on a wafer: their rules, AccPar's choice by brute force."""

import functools
import itertools
import random
from itertools import pairwise

import pytest
from case_counts import slow_ones
from reference.mapping_layouts import primes
from wafer_baseline_cases import CASES, DOJO, DRAM, in_rank_order, problem_of

from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import energy_table
from phaze_fast.wafer import Encoding, Layout, evaluate, load_wafer, megatron, step_energy
from phaze_fast.wafer.mapping.layout import layouts
from phaze_fast.wafer.mapping.packing import stage_capacity, stage_dies
from phaze_fast.wafer.search.baselines import (
    BASELINES,
    OFF_WAFER,
    TYPES,
    LayerSize,
    accpar,
    axis_assignments,
    baselines,
    baselines_on,
    hypar,
    inter_layer,
    intra_layer,
    is_linear,
    linear_axis_assignment,
    types_of,
    zero3,
)

STREAM = load_wafer("dram-stream-wafer")


FEW = slow_ones(CASES, "tight")


@functools.cache
def plans(case):
    """Plans of the systems that use the wafer's own memory."""
    return baselines(CASES[case], ["megatron", "zero3", "accpar", "hypar"])


# ---- what every baseline promises ----


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_every_plan_promises(case):
    """Tuning and tiling make no plan worse; plans are legal and take the time they state."""
    problem = CASES[case]
    wanted = set(BASELINES) if problem.stream is not None else set(BASELINES) - set(OFF_WAFER)
    every = baselines(problem)
    assert set(every) == set(baselines_on(problem)) == wanted
    for name, found in every.items():
        assert found.best.rank == found.tiled.rank <= found.tuned.rank <= found.default.rank
        assert found.evaluations > 0
        for plan in (found.default, found.tuned, found.tiled):
            assert plan.encoding.faults(problem) == []
            again = evaluate(problem, plan.encoding)
            assert (again.time_s, again.memory_bytes) == (plan.time_s, plan.memory_bytes)
            assert again.over_bytes == plan.over_bytes
            layout = plan.encoding.layout
            assert layout.stages <= stage_capacity(problem.wafer, layout.width, layout.height)
        for plan in (found.default, found.tuned) if name in ("megatron", "zero3") else ():
            assert is_linear(problem, plan.encoding.layout)
            assert name == "zero3" or all(map(in_rank_order, plan.encoding.operator_mappings))


def modes(found):
    """Weight modes of a plan's operators that have weights."""
    return {row.weights for row in found.encoding.operator_mappings} - {"replicated"}


def test_offload_makes_room():
    """Where Megatron-LM and ZeRO-3 do not fit, their versions with memory off the wafer may."""
    tight = DRAM.replace(columns=4, rows=2, off_wafer=STREAM.off_wafer, reserved_bytes="31.3 GB")
    problem = problem_of(tight)
    found = baselines(problem, ["megatron", "zero3", *OFF_WAFER])
    assert not found["zero3"].best.fits or not found["megatron"].best.fits
    assert found["zero_infinity"].best.fits
    assert modes(found["zero_infinity"].best) == {"stream"}
    assert modes(found["weight_streaming"].best) == {"stream"}
    assert found["weight_streaming"].best.encoding.layout.stages == 1
    assert modes(found["zero_offload"].best) == {"offload"}
    assert modes(found["megatron_offload"].best) <= {"zero1", "offload"}
    for name in OFF_WAFER:
        best = found[name].best
        assert best.encoding.faults(problem) == []
    assert found["megatron_offload"].best.rank <= found["megatron"].best.rank


def test_offload_moves_gradients_every_micro_batch_and_weights_once():
    """ZeRO-Offload (Ren et al., 2021, section 4.1): 2 bytes of a gradient out, 2 of a weight in."""
    problem = problem_of(STREAM)
    plan = zero3(problem, Layout(8, 4, 1, 32))
    kept = Encoding.from_list([{**row, "weights": "zero2"} for row in plan.to_list()])
    away = Encoding.from_list([{**row, "weights": "offload"} for row in plan.to_list()])
    here, there = evaluate(problem, kept), evaluate(problem, away)
    parameters, dies = problem.work.parameters, 32
    assert there.stream_bytes == pytest.approx(14 * parameters / dies)
    assert here.memory_bytes - there.memory_bytes == pytest.approx(14 * parameters / dies)
    moved = step_energy(problem, there).stream_j / energy_table().network_byte_j
    assert moved == pytest.approx(parameters * (2 * 2 + 2))


def test_zero3_uses_every_die_and_pads_the_last_micro_batch():
    """512 sequences on 40 dies: 13 micro-batches of 40. A count that divides left 8 dies idle."""
    found = baselines(problem_of(STREAM, "bertlarge", 512), ["zero3"])["zero3"]
    assert found.default.encoding.layout.dies == 40
    assert found.default.encoding.layout.micro_batch == 40
    assert found.best.encoding.layout.dies == 40


# ---- each one's own rules ----


def width(found):
    """Tensor-parallel width of a Megatron-LM plan."""
    return next(m for m in found.encoding.operator_mappings if m.operator == "up").partition[
        "columns"
    ]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        *(("small", 8), ("wide", 8), ("batch", 4), ("odd", 2), ("heads", 1), ("one", 1)),
        pytest.param("tight", 4, marks=pytest.mark.slow),
    ],
)
def test_megatron_by_default_is_as_wide_as_a_node(case, expected):
    found = plans(case)["megatron"].default
    assert width(found) == expected
    layout = found.encoding.layout
    assert layout.micro_batch == layout.dies // expected
    assert {op_mapping.weights for op_mapping in found.encoding.operator_mappings} == {"replicated"}


def test_megatron_by_default_computes_all_of_a_block_again():
    found = plans("small")["megatron"].default.encoding.operator_mappings
    for op, op_mapping in zip(CASES["small"].work.operators, found, strict=True):
        inside = op.part == "block" and op.kept_bytes and op.name != "ffn-norm"
        assert op_mapping.output == (("recompute",) if inside else ("stash",))


@pytest.mark.parametrize("case", FEW)
def test_megatron_splits_pairs_of_products(case):
    """Shoeybi et al. 2019: columns of the first, rows of the second; batch over the rest."""
    for way in ("default", "tuned", "tiled"):
        found = getattr(plans(case)["megatron"], way)
        op_mappings = {m.operator: m.partition for m in found.encoding.operator_mappings}
        t = width(found)
        dies = found.encoding.layout.dies
        for name, role in (("up", "columns"), ("down", "inner"), ("proj", "inner")):
            assert op_mappings[name][role] == t
            assert op_mappings[name]["batch"] == dies // t
        assert op_mappings["attention"]["columns"] == t


@pytest.mark.parametrize("case", FEW)
def test_zero3_has_replicas_only(case):
    problem = CASES[case]
    for found in (plans(case)["zero3"].default, plans(case)["zero3"].tuned):
        layout = found.encoding.layout
        assert layout.stages == 1
        assert layout.micro_batch % layout.dies == 0
        mapped = found.encoding.operator_mappings
        for op, op_mapping in zip(problem.work.operators, mapped, strict=True):
            assert op_mapping.partition["batch"] == layout.dies
            assert op_mapping.weights == ("zero3" if op.parameters else "replicated")


@pytest.mark.parametrize("case", FEW)
def test_accpar_and_hypar_keep_everything_and_replicate(case):
    for name in ("accpar", "hypar"):
        found = plans(case)[name]
        for way in (found.default, found.tuned, found.tiled):
            assert way.encoding.layout.stages == 1
            for op_mapping in way.encoding.operator_mappings:
                assert op_mapping.output == ("stash",)
                assert op_mapping.weights == "replicated"


def test_accpar_takes_the_largest_rectangle_and_the_whole_batch():
    for case in ("small", "wide"):
        problem = CASES[case]
        layout = plans(case)["accpar"].default.encoding.layout
        assert layout.micro_batch == problem.training.global_batch
        assert layout.dies == problem.wafer.dies


# ---- AccPar's and HyPar's choice ----


def chain_cost(layers, kinds, parts):
    """Elements that a choice of types moves, by AccPar's own count."""
    inside = sum(intra_layer(kind, layer) for kind, layer in zip(kinds, layers, strict=True))
    between = sum(
        inter_layer(before, after, layer.outputs, parts)
        for (before, after), layer in zip(pairwise(kinds), layers[:-1], strict=True)
    )
    return inside + between


@pytest.mark.parametrize("allowed", [TYPES, TYPES[:2], TYPES[1:]], ids=str)
def test_the_dynamic_program_is_as_good_as_brute_force(allowed):
    rng = random.Random(7)
    for _ in range(60):
        count, parts = rng.randint(1, 6), rng.choice([2, 3, 5])
        sizes = [[10 ** rng.uniform(0, 4) for _ in range(3)] for _ in range(count)]
        layers = [LayerSize("", *each) for each in sizes]
        chosen, every = types_of(layers, parts, allowed), itertools.product(allowed, repeat=count)
        best = min(chain_cost(layers, kinds, parts) for kinds in every)
        assert set(chosen) <= set(allowed)
        assert chain_cost(layers, chosen, parts) == pytest.approx(best, rel=1e-12)


def test_a_cut_leaves_what_its_type_says():
    layer = LayerSize("a", 60.0, 120.0, 240.0)
    assert layer.cut("batch", 2) == LayerSize("a", 30.0, 60.0, 240.0)
    assert layer.cut("inner", 3) == LayerSize("a", 20.0, 120.0, 80.0)
    assert layer.cut("columns", 4) == LayerSize("a", 60.0, 30.0, 60.0)


def test_types_that_follow_one_another_for_free_cost_nothing():
    """Columns then inner dimension, as in a pair of products; the batch all the way."""
    assert inter_layer("columns", "inner", 8.0) == 0.0
    assert inter_layer("batch", "batch", 8.0) == 0.0
    for before, after in itertools.product(TYPES, repeat=2):
        assert 0.0 <= inter_layer(before, after, 8.0, 4) <= 8.0


@pytest.mark.parametrize("layout", [Layout(4, 2, 1, 64), Layout(3, 2, 1, 64), Layout(4, 1, 1, 4)])
def test_accpar_cuts_no_rows_and_hypar_no_columns_of_products(layout):
    for name in ("bertlarge", "llama2-7b"):
        problem = problem_of(DRAM, name)
        plans = accpar(problem, layout), hypar(problem, layout)
        mapped = (plan.operator_mappings for plan in plans)
        for op, one, other in zip(problem.work.operators, *mapped, strict=True):
            assert one.partition["rows"] == 1
            assert not op.product or other.partition["columns"] == other.partition["rows"] == 1


# ---- linear order ----


def ranks_of(layout, wafer):
    """Ranks of the dies of each stage, row by row of the wafer."""
    stages = stage_dies(wafer, layout.width, layout.height, layout.stages)
    return [[y * wafer.grid[0] + x for x, y in dies] for dies in stages]


def test_linear_stages_are_runs_of_ranks():
    problem = problem_of(DOJO)
    seen = set()
    for layout in layouts(DOJO, problem.work.blocks, 64):
        straight = all(
            ranks == list(range(ranks[0], ranks[0] + len(ranks)))
            for ranks in ranks_of(layout, DOJO)
        )
        assert is_linear(problem, layout) == straight
        seen.add(straight)
    assert seen == {True, False}


def tensor_groups(layout, axis_assignment):
    """Dies of each tensor-parallel group, counted row by row in the rectangle."""
    sizes = primes(layout.width) + primes(layout.height)
    groups = {}
    for die in range(layout.dies):
        digits, left = [], die
        for size in sizes:
            digits.append(left % size)
            left //= size
        key = tuple(d for d, use in zip(digits, axis_assignment, strict=True) if use == "data")
        groups.setdefault(key, []).append(die)
    return list(groups.values())


@pytest.mark.parametrize(
    ("layout", "t"),
    [(Layout(4, 2, 1, 8), 2), (Layout(4, 2, 1, 8), 8), (Layout(8, 1, 1, 8), 4), (Layout(6, 2, 1, 12), 2)],
)  # fmt: skip
def test_linear_groups_are_neighbouring_ranks(layout, t):
    for group in tensor_groups(layout, linear_axis_assignment(layout, t)):
        assert group == list(range(group[0], group[0] + t))
    assert linear_axis_assignment(layout, t) in axis_assignments(layout, t)


def test_a_width_that_no_innermost_slots_make_is_refused():
    with pytest.raises(InvalidInputError, match="tp: 3 is not accepted on 6 x 1 dies"):
        linear_axis_assignment(Layout(6, 1, 1, 6), 3)
    with pytest.raises(InvalidInputError, match="tp: 16 is not accepted"):
        linear_axis_assignment(Layout(4, 2, 1, 8), 16)


def test_linear_mappings_have_their_roles_in_rank_order():
    straight = problem_of(DRAM).variant(linear=True)
    mapping = straight.mapping(Layout(8, 2, 1, 16))
    for i in range(len(straight.work.operators)):
        for op_mapping in mapping.choices(i):
            roles = [
                next(r for r in range(5) if int(op_mapping["slots"][r]) >> k & 1) for k in range(4)
            ]
            order = [(2, 1, 0, 0, 1)[r] for r in roles]
            assert order == sorted(order)


# ---- plans by hand ----


def test_zero3_needs_a_sequence_for_every_die():
    problem = problem_of(DRAM)
    assert zero3(problem, Layout(4, 2, 1, 8)).faults(problem) == []
    assert "batch: 8 parts of 4" in zero3(problem, Layout(4, 2, 1, 4)).faults(problem)[0]


def test_modes_of_recomputation_save_more_and_more():
    problem = problem_of(DRAM, "gpt2-small")
    found = [
        evaluate(problem, megatron(problem, Layout(4, 2, 1, 16), 4, recompute=mode))
        for mode in ("none", "selective", "full")
    ]
    assert [f.memory_bytes for f in found] == sorted((f.memory_bytes for f in found), reverse=True)
    assert [f.time_s for f in found] == sorted(f.time_s for f in found)
    with pytest.raises(InvalidInputError, match="recompute: 'ful' is not accepted; did you mean"):
        megatron(problem, Layout(4, 2, 1, 16), 4, recompute="ful")
    with pytest.raises(InvalidInputError, match="weights: 'zero4' is not accepted"):
        megatron(problem, Layout(4, 2, 1, 16), 4, weights="zero4")
