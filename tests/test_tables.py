"""Rows of arrays that are equal."""

import numpy as np
import pytest

from phaze_fast import tables
from phaze_fast.tables import distinct_rows, words_of


@pytest.mark.parametrize("odd", [tables._ODD, np.uint64(0)])
def test_equal_rows_have_one_number_even_where_hashes_collide(monkeypatch, odd):
    monkeypatch.setattr(tables, "_ODD", odd)  # with zero every row has the same hash
    rng = np.random.default_rng(3)
    rows = np.zeros(400, dtype=[("a", "f8"), ("b", "i8"), ("c", "i4"), ("d", "i4")])
    for name in "abd":
        rows[name] = rng.integers(0, 4, len(rows))
    first, number = distinct_rows(words_of(rows))
    assert rows[first[number]].tolist() == rows.tolist()
    assert len(first) == len(set(rows.tolist())) == number.max() + 1 > 40
    assert (first == [rows.tolist().index(row) for row in rows[first].tolist()]).all()


def test_no_rows_and_equal_rows():
    none, one = np.zeros(0, dtype=np.uint64), np.full(5, 7, dtype=np.uint64)
    assert [x.tolist() for x in distinct_rows([none, none])] == [[], []]
    assert [x.tolist() for x in distinct_rows([one, one])] == [[0], [0] * 5]
