"""Errors on published runs, by source: they may shrink, they must not grow."""

import os
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
    "SimuMax": 0.09,
    "NVIDIA dgxc-benchmarking": 0.08,
}
"""Mean absolute errors of a step's seconds that each source stays below."""


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
    assert group.time.mean_abs_err <= LIMITS[source]


def test_intervals_cover_what_they_promise(groups):
    for group in groups:
        if len(group.rows) >= 20:
            assert 0.7 <= group.coverage <= 0.93, (group.name, group.coverage)
