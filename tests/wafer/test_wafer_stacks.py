"""Encoder-decoders on a mesh: one stage has a block of each in turn."""

import random
import sys
from pathlib import Path

import pytest
from mapping_cases import packed
from reference import mapping_oracle as oracle

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
    transfers,
)
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.operators import workload
from phaze_fast.wafer.search.baselines import encode, megatron_op_mappings

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import wafer_benchmark
import wafer_score

T5 = models.load("t5-small")
WAFER = load_wafer("dram-wafer").replace(columns=2, rows=2)
PROBLEM = Problem(T5, WAFER, WaferTraining(8))
PAIR = Problem(T5, WAFER.replace(rows=1), WaferTraining(2))
LAYOUT = Layout(2, 2, 1, 8)


def test_a_block_has_an_encoders_and_a_decoders_operators():
    """All parameters but those of the encoder's last norm and of relative positions."""
    work = workload(T5)
    shared = T5.vocab * T5.hidden  # a tied table, held where it is looked up and where it ends
    positions = T5.parameters_by_part()["relative positions"]
    assert work.parameters == T5.parameters() + shared - T5.norm_parameters - positions
    names = [op.name for op in work.operators]
    assert {"encoder-q", "encoder-down", "cross-k", "cross-attention", "q", "down"} <= set(names)
    into = {names[e.target]: names[e.source] for e in work.edges if e.kind == "wrap"}
    assert into["encoder-attention-norm"] == "encoder-ffn-residual"
    assert into["attention-norm"] == "ffn-residual"
    memory = [names[e.target] for e in work.edges if names[e.source] == "encoder-ffn-residual"]
    assert {"cross-k", "cross-v"} <= set(memory)


def test_work_is_that_of_an_encoder_and_of_a_decoder_with_one_more_attention():
    """In products: 12 h^2 of an encoder's block, 16 h^2 of a decoder's, for feed-forwards of 4 h."""
    model = T5.replace(hidden=512, heads=8, ffn=2048)
    products = [op.spec for op in workload(model).operators if op.product and op.part == "block"]
    hidden = 512
    assert sum(spec.k * spec.n for spec in products) == (12 + 16) * hidden**2


def test_tensor_parallelism_sums_twice_in_an_encoder_and_three_times_in_a_decoder():
    """Shoeybi et al. (2019), for each sublayer: one sum forward, behind its row-wise product."""
    roles = megatron_op_mappings(PROBLEM, ("tensor", "tensor"), False, "replicated")
    plan = encode(PROBLEM, LAYOUT, roles)
    sums = [t for t in transfers(PROBLEM, plan) if t.op == "all-reduce" and t.when == "forward"]
    inside = [t.operator for t in sums if t.operator.split("-")[-1] in ("proj", "down")]
    assert sorted(inside) == ["cross-proj", "down", "encoder-down", "encoder-proj", "proj"]


def test_search_bound_and_baselines_of_an_encoder_decoder():
    quick = Effort(seeds=1, steps=200, promising=1)
    found = compare_mappings(PAIR, quick, ablations=False, equal_speed_memory=False)
    best = found.ours.best
    assert best.fits
    assert found.ours.bound_s <= best.time_s
    assert best.encoding.layout.stages == 1
    assert "one stage" in found.ours.bound_space
    for each in found.baselines.values():
        assert not each.best.fits or best.time_s <= each.best.time_s
    again = Encoding.from_list(best.encoding.to_list())
    assert evaluate(PAIR, again).time_s == best.time_s


def test_the_oracle_agrees_on_every_term():
    """Its tensors between blocks, and into the first, are an encoder's and a decoder's own."""
    rng = random.Random(3)
    case = wafer_score.case_of(wafer_benchmark._layout(PROBLEM, LAYOUT))
    mapping = PROBLEM.mapping(LAYOUT)
    kept = [dict.fromkeys(range(len(case.ops)), oracle.STASH)]
    for _ in range(4):
        op_mappings = []
        for i in range(len(case.ops)):
            masks = rng.choice(mapping.choices(i))["slots"]
            slots = range(len(case.slots))
            roles = [oracle.ROLES[next(r for r in range(5) if masks[r] >> k & 1)] for k in slots]
            op_mappings.append(oracle.OperatorMapping(tuple(roles), rng.randrange(4)))
        mapping.assign(packed(op_mappings))
        score = mapping.score()[0]
        assert score["over_bytes"] == 0.0
        expected = oracle.evaluate(case, op_mappings, kept)[0]
        assert score["time_s"] == pytest.approx(expected, rel=1e-5)  # a case has seven digits


def test_bounds_hold_for_what_annealings_find():
    mapping = PROBLEM.mapping(LAYOUT)
    bounds = [mapping.relaxation().bound(theta, 0.0) for theta in (0.5, 1.0)]
    mapping.assign(bounds[1][1])
    score = mapping.anneal(1, 2000, 0.05)[1][0]
    assert all(bound <= score["time_s"] for bound, _ in bounds)
    assert bounds[1][0] > 0.5 * score["time_s"]


def test_what_encoder_decoders_are_not_accepted():
    with pytest.raises(InvalidInputError, match=r"stages: 2 is not accepted.*expected 1"):
        PROBLEM.mapping(Layout(2, 1, 2, 8))
    with pytest.raises(InvalidInputError, match=r"3 encoder blocks.*as decoder blocks, 6"):
        workload(T5.replace(encoder_layers=3))
