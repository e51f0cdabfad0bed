"""The C++ example prints what Python answers: one core behind both."""

from pathlib import Path

import numpy as np
import pytest

import phaze_fast as pf

EXPECTED = Path(__file__).parents[2] / "examples" / "cpp" / "expected.txt"


@pytest.mark.checkout
def test_the_printed_table_is_what_python_says():
    rows = [line.split() for line in EXPECTED.read_text().splitlines()]
    assert rows.pop(0) == ["ranks", "bytes", "time_us", "of_bound", "algorithm"]
    ranks = np.array([int(row[0]) for row in rows])
    sizes = np.array([float(row[1]) for row in rows])
    cluster = pf.Cluster(devices=512, fabric="dgx-a100-peak")
    found = pf.collective_batch(cluster, "all-reduce", sizes, ranks=ranks)
    assert [row[2] for row in rows] == [f"{1e6 * time_s:.3f}" for time_s in found.time_s]
    for group, size, row in zip(ranks.tolist(), sizes.tolist(), rows, strict=True):
        assert pf.collective(cluster, "all-reduce", size, ranks=group).algorithm == row[4]
