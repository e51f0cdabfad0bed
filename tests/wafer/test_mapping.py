"""Mappings on a mesh of dies: the compiled evaluation against the oracle, and laws."""

import itertools
import random

import pytest
from case_counts import some_or_many
from mapping_cases import (
    agree,
    arguments,
    compiled,
    packed,
    random_case,
    random_op_mappings,
    small,
    tight_case,
    tighten,
)
from reference.certificates import mapped_wafer
from reference.mapping_oracle import OFFLOAD, OperatorMapping

from phaze_fast import _core

# ---- the whole evaluation ----


@some_or_many(100, 400)
def test_all_terms_agree_with_the_oracle(cases):
    rng = random.Random(1)
    bound = 0
    for _ in range(cases):
        case = random_case(rng)
        op_mappings = random_op_mappings(rng, case)
        agree(case, op_mappings)
        tighten(rng, case, op_mappings)
        _, stages = agree(case, op_mappings)
        bound += any(any(s.outputs.values()) for s in stages)
    assert bound > cases // 4, bound


def test_given_outputs_agree_with_the_oracle():
    rng = random.Random(2)
    for _ in range(40):
        case = random_case(rng)
        op_mappings = random_op_mappings(rng, case)
        have = case.rules["stream_capacity_bytes"] > 0
        ways = [[o for o in op.outputs if o != OFFLOAD or have] for op in case.ops]
        agree(case, op_mappings, [[rng.choice(way) for way in ways] for _ in case.blocks])


@pytest.mark.parametrize(
    "seed",
    [
        647270771,  # links to the rim take longer than the slowest stage
        167717388,  # outputs that tie and stream more or less
        98968608,
        266365308,
    ],
)
def test_certificates_of_stages_that_stream_past_one_another(seed):
    """Random searches once found these: the slowest stage, and outputs that tie."""
    found = 0
    for sides in itertools.product((2, 3), (1, 2)):
        case, op_mappings = tight_case(random.Random(seed), sides=sides, most=(1, 3, 1), stages=3)
        mapping = compiled(case, op_mappings)
        outputs = mapping.stages()[1]
        found += bool(case.cross_stage_s)
        assert mapped_wafer(case, op_mappings, mapping.score()[0], outputs, []) == []
    assert found


def streaming_pair(link_s):
    """Two stages of one operator that stream their weights; others pass no link of theirs."""
    case = small(1, slots=(), modes=1 << 4, micro_batches=5, weight_bytes=2.0, gradient_bytes=2.0)
    case.rules |= {"stream_capacity_bytes": 1e9, "stream_bytes_per_s": 1e9, "stream_shared": False}
    case.rules |= {"stream_link_s": link_s, "stream_both_s": link_s, "state_bytes": 4.0}
    case.blocks, case.boundary_s = (1, 1), (0.0, 0.0)
    case.cross_stage_s = (((0.0, 0.0), (0.0, 0.0)),) * 2
    return case


def test_links_to_the_rim_set_the_pace_and_are_no_stage():
    """Two stages of 2 s each, whose streams keep a link to the rim busy for longer or less."""
    for link_s, pace_s in ((0.25, 2.0), (1.0, 4.0), (2.5, 10.0)):  # 4 bytes in, 2 of them out
        case = streaming_pair(link_s)
        score, _ = agree(case, [OperatorMapping((), 4)])
        assert score["slowest_stage_s"] == 2.0
        assert score["time_s"] - score["tail_s"] == pytest.approx(4 * pace_s + 2.0 + 2.0)


def test_a_conversion_runs_again_only_for_consumers_that_need_it():
    """Of two consumers with layouts of their own only one needs its input in the backward pass."""
    rng = random.Random(3)
    for _ in range(40):
        case = random_case(rng)
        case.edges = [e._replace(again=rng.random() < 0.5) for e in case.edges]
        agree(case, random_op_mappings(rng, case))


def walk(rng, changes, **sizes):
    """Change operators one by one; after each the score has the bytes of a fresh mapping."""
    case = random_case(rng, **sizes)
    op_mappings = random_op_mappings(rng, case)
    tighten(rng, case, op_mappings)
    given, mapping = arguments(case), compiled(case, op_mappings)
    fresh = _core.Mapping(**given)
    modes = [w for w in range(6) if case.rules["modes"] >> w & 1]
    choices = [mapping.choices(i) for i in range(len(op_mappings))]
    now = packed(op_mappings)
    for step in range(changes):
        op = rng.randrange(len(op_mappings))
        now[op] = choices[op][rng.randrange(len(choices[op]))]
        now[op]["mode"], now[op]["algorithm"] = rng.choice(modes), rng.randrange(4)
        mapping.change(op, now[op : op + 1].copy())
        if step % 50 == 0:
            fresh = _core.Mapping(**given)
        fresh.assign(now)
        assert mapping.score().tobytes() == fresh.score().tobytes()
        if step % 20 == 0:
            for found, expected in zip(mapping.stages(), fresh.stages(), strict=True):
                assert found.tobytes() == expected.tobytes()
            assert mapping.op_mappings().tobytes() == now.tobytes()


def test_changes_and_fresh_starts_give_the_same_bits():
    rng = random.Random(4)
    for _ in range(20):
        walk(rng, 200)


@pytest.mark.slow
def test_changes_and_fresh_starts_give_the_same_bits_on_large_problems():
    rng = random.Random(5)
    for _ in range(40):
        walk(rng, 500, sides=(8, 6), most=(3, 12, 3), stages=8)
