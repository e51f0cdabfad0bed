"""The C++ example prints what Python answers: one core behind both."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import phaze_fast as pf
from phaze_fast.planning import pipelines

FOLDER = Path(__file__).parents[2] / "examples" / "cpp"
EXPECTED = FOLDER / "expected.txt"


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


@pytest.mark.checkout
def test_the_fastest_plan_takes_what_its_schedule_takes_in_python():
    """The example's step is that of its passes, but for what follows the last pass."""
    lines = (FOLDER / "expected_plan.txt").read_text().splitlines()
    pp, dp, vpp, _, schedule, step_s, memory_gb = lines[1].split()[:7]
    cuts = [int(word) for word in lines[-1].split("layer ")[1].split()]
    assert (len(cuts) - 1, int(vpp), int(dp) * int(pp)) == (int(pp), 1, 16)
    assert float(memory_gb) <= 72.0
    layer_s = np.full((98, 2), (0.0075, 0.0150))
    layer_s[0], layer_s[-1] = (0.0002, 0.0004), (0.0045, 0.0090)
    passes_s = np.array([layer_s[a:b].sum(axis=0) for a, b in pairwise(cuts)])
    message_s = 6.3e6 / 25e9 + 5e-6
    passes_s[1:, 0] += message_s
    passes_s[:-1, 1] += message_s
    played = pipelines.play(schedule, passes_s[:, 0], passes_s[:, 1], micro_batches=256 // int(dp))
    assert played.step_s <= float(step_s) <= 1.02 * played.step_s
    assert [float(line.split()[5]) for line in lines[1:-1]] == sorted(
        float(line.split()[5]) for line in lines[1:-1]
    )
