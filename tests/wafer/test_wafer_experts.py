"""Mixtures of experts on a mesh: what they hold and send, and that search and bounds keep up."""

import pytest

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import (
    Effort,
    Layout,
    Problem,
    WaferTraining,
    compare_mappings,
    evaluate,
    load_wafer,
    search_mapping,
    step_energy,
    transfers,
)
from phaze_fast.wafer.mapping.details import local_specs
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.operators import workload
from phaze_fast.wafer.search.baselines import encode, megatron_op_mappings

MIXTRAL = models.load("mixtral-8x7b")
SMALL = MIXTRAL.replace(
    name="small-mixture", layers=4, hidden=512, heads=8, kv_heads=8, ffn=1024, seq=256, vocab=4096
)
WAFER = load_wafer("dram-wafer").replace(columns=4, rows=2)
PROBLEM = Problem(SMALL, WAFER, WaferTraining(32))
LAYOUT = Layout(4, 2, 1, 8)
DATA = ("data",) * 3


def plan(ep):
    """Eight replicas; with or without their experts shared out."""
    op_mappings = megatron_op_mappings(PROBLEM, DATA, False, "zero1", ep)
    return encode(PROBLEM, LAYOUT, op_mappings)


@pytest.mark.parametrize("model", [MIXTRAL, SMALL], ids=lambda model: model.name)
def test_operators_have_the_models_parameters(model):
    work = workload(model)
    assert work.parameters == model.parameters()
    experts = [op for op in work.operators if op.expert]
    assert {op.name for op in experts} >= {"expert-up", "expert-gate", "expert-down"}
    assert {op.seq_rows for op in experts} == {8}
    assert {"dispatch", "weigh"} <= {work.operators[i].name for i in work.chain}


def test_tokens_reach_their_experts_by_an_all_to_all():
    """GShard (Lepikhin et al., 2020): each token goes to k experts and back, both passes."""
    moves = [t for t in transfers(PROBLEM, plan(True)) if t.op == "all-to-all"]
    routed = 8 * SMALL.seq * SMALL.moe.top_k * SMALL.hidden * 2
    ends = {("dispatch", "expert-gate"), ("expert-down", "weigh")}  # the chain's next operator
    for when in ("forward", "backward"):
        found = [t for t in moves if t.when == when]
        assert {(t.operator, t.target) for t in found} == ends
        assert [t.payload_bytes for t in found] == [routed / 8] * 2
        assert all(t.ranks == 8 for t in found)
    assert not [t for t in transfers(PROBLEM, plan(False)) if t.op == "all-to-all"]


def test_a_die_has_the_weights_of_its_experts():
    shared, whole = evaluate(PROBLEM, plan(True)), evaluate(PROBLEM, plan(False))
    experts = 4 * 8 * 3 * SMALL.hidden * SMALL.moe.expert_ffn
    state = shared.stages[0].state_bytes, whole.stages[0].state_bytes
    # Weights, gradients (2 bytes each) of an eighth of the experts instead of all; the optimiser's
    # 12 bytes are shared out either way.
    assert state[1] - state[0] == pytest.approx(4 * experts * 7 / 8)
    sums = [t for t in transfers(PROBLEM, plan(True)) if t.when == "step"]
    assert not [t for t in sums if t.operator.startswith("expert-")]


def test_the_work_is_the_same_however_experts_lie():
    """As many FLOPs; shared out, fewer weights pass a die's HBM, which saves time and energy."""
    shared, whole = evaluate(PROBLEM, plan(True)), evaluate(PROBLEM, plan(False))
    flops = [
        sum(
            float(spec.flops.sum())
            for some in local_specs(PROBLEM, each.encoding)
            for spec in some
            if spec.k
        )
        for each in (shared, whole)
    ]
    assert flops[0] == flops[1]
    joules = [step_energy(PROBLEM, each).operators_j for each in (shared, whole)]
    assert joules[0] < joules[1]
    assert shared.compute_s < whole.compute_s


def test_no_more_parts_than_experts():
    wide = load_wafer("dram-wafer").replace(columns=8, rows=2)
    problem = Problem(SMALL, wide, WaferTraining(32))
    op_mappings = megatron_op_mappings(problem, ("data",) * 4, False, "zero1", True)
    made = encode(problem, Layout(8, 2, 1, 16), op_mappings)
    with pytest.raises(InvalidInputError, match=r"rows: 16 parts of 8; expected at most 8"):
        evaluate(problem, made)


def test_search_bound_and_baselines_of_experts():
    quick = Effort(seeds=1, steps=500, promising=2)
    found = compare_mappings(PROBLEM, quick, ablations=False)
    best = found.ours.best
    assert found.ours.bound_s <= best.time_s
    for each in found.baselines.values():
        assert not each.best.fits or best.time_s <= each.best.time_s
    again = Encoding.from_list(best.encoding.to_list())
    assert evaluate(PROBLEM, again).time_s == best.time_s


def test_bounds_hold_for_every_mapping_of_experts():
    two = Problem(SMALL, WAFER.replace(columns=2, rows=1), WaferTraining(4))
    for layout in (Layout(2, 1, 1, 2), Layout(1, 1, 2, 1)):
        found = search_mapping(two, Effort(seeds=2, steps=2000, promising=1), wanted=[layout])
        mapping = two.mapping(layout)
        bound = mapping.relaxation().bound(1.0, 0.0)[0]
        assert bound <= found.bound_s * (1 + 1e-12) <= found.best.time_s * (1 + 1e-12)


def test_experts_in_some_blocks_only_are_refused():
    mixed = SMALL.replace(moe=SMALL.moe.replace(dense_layers=1))
    with pytest.raises(InvalidInputError, match="expected one kind of block"):
        workload(mixed)
