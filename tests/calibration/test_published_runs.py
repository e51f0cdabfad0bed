"""Errors on published runs, by source: they may shrink, they must not grow."""

import os
import statistics
from pathlib import Path

import pytest

from phaze_fast.calibration import validate_runs

ROOT = Path(__file__).parents[2]
TRUTH = Path(os.environ.get("PHAZE_SHARED", ROOT.parent / "shared")) / "truth"

LIMITS = {
    "Korthikanti2022": 0.06,
    "Narayanan2021": 0.10,
    "Megatron-LM README 2020": 0.07,
    "vTrain ground truth multi": 0.12,
    "vTrain ground truth single": 0.10,
    "MosaicML": 0.09,
    "SimuMax": 0.05,
    "NVIDIA dgxc-benchmarking": 0.045,
}
"""Mean absolute errors of a step's seconds that each source's rows in 16 bits stay below."""
ANY_BITS = {
    "NVIDIA dgxc-benchmarking": 0.055,
    "torchtitan": 0.11,
    "MLPerf Training v4.0": 0.06,
    "MLPerf Training v4.1": 0.07,
    "MLPerf Training v5.0": 0.04,
    "TPU recipes": 0.12,
    "NVIDIA Megatron-Bridge": 0.105,
}
"""The same of all rows, whatever their number format."""


SIXTEEN_BITS = ("bf16", "fp16")


def mean_error(rows):
    return statistics.fmean(abs(row.error) for row in rows)


@pytest.fixture(scope="module")
def groups():
    names = ("published_training_runs.csv", "public_runs.csv")
    return [group for name in names for group in validate_runs(TRUTH / name).groups]


pytestmark = [
    pytest.mark.shared,
    pytest.mark.slow,
    pytest.mark.skipif(not TRUTH.exists(), reason="other people's tables of runs are not here"),
]


@pytest.mark.parametrize("source", LIMITS)
def test_sources_stay_within_their_limits(groups, source):
    group = next(g for g in groups if g.name.startswith(source))
    assert (
        mean_error(row for row in group.rows if row.run.precision in SIXTEEN_BITS)
        <= (LIMITS[source])
    )


@pytest.mark.parametrize("source", ANY_BITS)
def test_rows_of_all_formats_stay_within_their_limits(groups, source):
    group = next(g for g in groups if g.name.startswith(source))
    assert mean_error(group.rows) <= ANY_BITS[source]


def test_intervals_cover_what_they_promise(groups):
    for group in groups:
        if len(group.rows) >= 20:
            assert 0.7 <= group.coverage <= 0.93, (group.name, group.coverage)
