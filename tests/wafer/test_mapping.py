"""Mappings on a mesh of dies: the compiled evaluation against the oracle, and laws."""

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
    tighten,
)
from reference.mapping_oracle import OFFLOAD

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
