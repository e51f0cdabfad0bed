"""Sizes of errors, by hand and by an obvious second way."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phaze_fast.calibration import pick_regret, summarise
from phaze_fast.calibration.validation import rank_correlation


def test_a_summary_by_hand():
    found = summarise([1.0, 2.0, 4.0, 10.0], [1.1, 1.8, 4.0, 15.0])
    assert found.rows == 4
    assert found.mean_abs_err == pytest.approx((0.1 + 0.1 + 0.0 + 0.5) / 4)
    assert found.median_abs_err == pytest.approx(0.1)
    assert found.max_abs_err == pytest.approx(0.5)
    assert found.bias == pytest.approx((0.1 - 0.1 + 0.0 + 0.5) / 4)
    assert found.rank_correlation == 1.0


def by_pairs(x, y):
    """Spearman's correlation from ranks that are counted pair by pair."""
    ranks = [
        [sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values]
        for values in (x, y)
    ]
    means = [sum(r) / len(r) for r in ranks]
    centred = [[v - m for v in r] for r, m in zip(ranks, means, strict=True)]
    product = sum(a * b for a, b in zip(*centred, strict=True))
    size = (sum(a * a for a in centred[0]) * sum(b * b for b in centred[1])) ** 0.5
    return product / size if size else None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=12))
def test_rank_correlation_is_that_of_counted_ranks(pairs):
    x, y = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    expected = by_pairs(x, y)
    found = rank_correlation(x, y)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert found == pytest.approx(expected, abs=1e-9)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.5, 2), st.floats(0.5, 2)), min_size=1)
)
def test_regret_is_what_the_pick_loses(rows):
    lost = []
    for _, some in itertools.groupby(sorted(rows), key=lambda row: row[0]):
        options = list(some)
        if len(options) > 1:
            pick = min(options, key=lambda row: (row[2], row[1]))
            lost.append(pick[1] / min(row[1] for row in options) - 1.0)
    found = pick_regret(rows)
    if not lost:
        assert found is None
    else:
        assert found["groups"] == len(lost)
        assert found["mean"] == pytest.approx(sum(lost) / len(lost), abs=1e-12)
