"""Fused groups: exhaustive enumeration, an exact mapper's figures, laws, cuts."""

import csv
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from case_counts import some_or_many
from hypothesis import given
from hypothesis import strategies as st
from reference import fusion as oracle

from phaze_fast.cost import BufferRules, FusedGroup, best_cuts, group_traffic, product_bytes
from phaze_fast.errors import InvalidInputError

GOLDEN = Path(__file__).parents[1] / "golden" / "fusion_reference.csv"
EXACT = BufferRules(sum_bytes=2, strip_depth=1, strip_copies=1)
"""The assumptions of the reference: sums as narrow as results, no double buffers, any tile."""
MLP = {"bert_mlp": (1024, 4096, 1024), "gpt3_mlp": (12288, 49152, 12288)}


def one(group, size, rules=EXACT):
    return float(group_traffic(group, size, rules).hbm_bytes[0])


def alone(m, k, n, size, rules=EXACT):
    return float(product_bytes(m, k, n, size, rules)[0])


# ---- figures of an exact mapper ----


def of_mlp(rows, inner, hidden, outer, size):
    """Bytes of each group of up, down."""
    singles = [alone(rows, inner, hidden, size), alone(rows, hidden, outer, size)]
    both = one(FusedGroup(rows, inner, hidden, outer), size)
    return lambda i, j: both if j - i == 2 else singles[i]


def of_gated(rows, size):
    """Bytes of each group of up, gate, their product, down; results have tiles of their own."""
    inner, hidden, outer = 4096, 11008, 4096
    h = 2.0 * rows * hidden
    up, down = alone(rows, inner, hidden, size), alone(rows, hidden, outer, size)
    chain = FusedGroup(rows, inner, hidden, outer, moved_bytes=h, held=2)
    both = replace(chain, outer=0, first=2, inputs=2)
    groups = {
        (0, 1): up,
        (1, 2): up,
        (2, 3): 3 * h,
        (3, 4): down,
        (0, 2): 2 * up,
        (1, 3): up + h,
        (2, 4): one(replace(chain, inner=0, moved_bytes=2 * h, held=1), size),
        (0, 3): one(both, size),
        (1, 4): one(chain, size),
        (0, 4): one(replace(both, outer=outer, held=3, moved_bytes=0.0), size),
    }
    return lambda i, j: groups[i, j]


def of_attention(size):
    """Bytes of each group of scores, softmax, weighted values, for 16 heads."""
    scores, mix = (16 * alone(512, k, n, size) for k, n in ((64, 512), (512, 64)))
    whole = one(FusedGroup(512, 64, 512, 64, count=16), size)
    softmax = 16 * 2.0 * 2 * 512 * 512
    groups = {(0, 1): scores, (1, 2): softmax, (2, 3): mix, (0, 3): whole}
    return lambda i, j: groups.get((i, j), np.inf)


def reference_rows():
    with GOLDEN.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@pytest.mark.parametrize("row", reference_rows(), ids=lambda r: r["workload"] + r["buffer_bytes"])
def test_every_row_of_the_exact_mapper_to_the_byte(row):
    rows, size = int(row["M"]), float(row["buffer_bytes"])
    if row["workload"] in MLP:
        count, bytes_of = 2, of_mlp(rows, *MLP[row["workload"]], size)
    elif row["workload"] == "llama_gated":
        count, bytes_of = 4, of_gated(rows, size)
    else:
        count, bytes_of = 3, of_attention(size)
    assert sum(bytes_of(i, i + 1) for i in range(count)) == float(row["dram_bytes_unfused"])
    assert best_cuts(count, bytes_of).hbm_bytes == float(row["dram_bytes_fused"])


# ---- exhaustive enumeration ----


def random_group(draw):
    inner, outer = draw.choice([(1, 1), (1, 1), (0, 1), (1, 0)])
    return FusedGroup(
        rows=draw.randint(1, 24),
        inner=inner * draw.randint(1, 20),
        hidden=draw.randint(1, 24),
        outer=outer * draw.randint(1, 20),
        count=draw.randint(1, 3),
        row_step=draw.choice([1, 1, 3]),
        hidden_step=draw.choice([1, 1, 4]),
        first=float(draw.randint(1, 3)),
        second=float(draw.randint(1, 2)),
        held=float(draw.randint(1, 3)),
        inputs=float(draw.randint(1, 2)),
        moved_bytes=float(draw.choice([0, 10, 500])),
    )


def random_rules(draw):
    widths = draw.choice([(2.0, 2.0), (2.0, 4.0), (1.0, 4.0)])
    rest = (draw.randint(1, 3), draw.randint(1, 2), draw.randint(1, 2))
    return BufferRules(*widths, *(float(x) for x in rest))


def compare(seeds):
    finite = 0
    for seed in seeds:
        draw = random.Random(seed)
        group, rules = random_group(draw), random_rules(draw)
        size = float(draw.choice([20, 60, 150, 400, 1000, 4000]))
        expected = oracle.group_bytes(group, size, rules)
        found = one(group, size, rules)
        assert found == expected or found == pytest.approx(expected, rel=1e-12), (seed, group)
        m, k, n = (draw.randint(1, 14) for _ in range(3))
        assert alone(m, k, n, size, rules) == oracle.product_bytes(m, k, n, size, rules), seed
        finite += np.isfinite(found)
    return finite


@some_or_many(60, 1000)
def test_random_groups_against_enumeration(cases):
    assert compare(range(cases)) > cases / 3


def test_random_cuts_against_enumeration():
    for seed in range(50):
        draw = random.Random(seed)
        count = draw.randint(1, 7)
        table = {
            (i, j): draw.choice([draw.randint(0, 50), np.inf]) if j - i > 1 else draw.randint(0, 20)
            for i in range(count)
            for j in range(i + 1, count + 1)
        }
        best = best_cuts(count, lambda i, j, table=table: float(table[i, j]))
        assert best.hbm_bytes == oracle.cuts(count, lambda i, j, table=table: float(table[i, j]))
        assert best.hbm_bytes == sum(table[pair] for pair in best.groups)
        assert [end for _, end in best.groups][-1] == count
        assert best.gap == 0.0


# ---- laws ----

SIZES = st.integers(1, 300)


@given(SIZES, SIZES, SIZES, SIZES, st.integers(10, 20000), st.integers(0, 20000))
def test_more_buffer_never_moves_more(rows, inner, hidden, outer, size, more):
    group = FusedGroup(rows, inner, hidden, outer)
    assert one(group, size + more) <= one(group, size)
    assert alone(rows, inner, hidden, size + more) <= alone(rows, inner, hidden, size)


@given(SIZES, SIZES, SIZES, SIZES, st.integers(100, 10**6))
def test_bytes_are_at_least_compulsory_and_narrow_sums_never_move_more(m, d, c, j, size):
    group = FusedGroup(m, d, c, j)
    compulsory = 2.0 * (m * d + d * c + c * j + m * j)
    assert one(group, size) >= compulsory
    assert one(group, 1e12) == compulsory
    assert one(group, size) <= one(group, size, replace(EXACT, sum_bytes=4))
    assert one(group, size, replace(EXACT, sum_bytes=4)) <= one(group, size, BufferRules())


@given(SIZES, SIZES, SIZES, SIZES, st.integers(100, 10**6))
def test_the_best_cuts_never_move_more_than_no_fusion(m, d, c, j, size):
    bytes_of = of_mlp(m, d, c, j, size)
    assert best_cuts(2, bytes_of).hbm_bytes <= bytes_of(0, 1) + bytes_of(1, 2)


def test_bad_groups_are_refused():
    with pytest.raises(InvalidInputError, match="sizes, steps and factors must be positive"):
        group_traffic(FusedGroup(0, 1, 1, 1), 100)
    with pytest.raises(InvalidInputError, match="m, k, n: 0, 1, 1"):
        product_bytes(0, 1, 1, 100)
    with pytest.raises(InvalidInputError, match="capacity_bytes"):
        product_bytes(1, 1, 1, -1.0)
