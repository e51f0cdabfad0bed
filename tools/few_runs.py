"""Score calibration by a handful of runs on tables of published runs.

``python tools/few_runs.py TABLE.csv COLUMN=PATTERN... --rows 3 --draws 20 --by notes:5`` takes the
rows that match as runs of software without a profile, draws some at random, calibrates on these and
predicts others; medians over draws are printed. With ``--by``, rows are drawn from and tested on
one group at a time: those whose column begins with the same characters.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from phaze_fast.calibration.calibrate_runs import OneCluster, calibrated_cluster
from phaze_fast.calibration.published import PublishedRun, read_run
from phaze_fast.calibration.validation import pick_regret
from phaze_fast.documents import csv_rows
from phaze_fast.errors import PhazeError
from phaze_fast.planning import step_s
from phaze_fast.software import UNKNOWN, load_software


def matching(path: Path, patterns: Iterable[str], by: str) -> dict[str, list[PublishedRun]]:
    """Read the rows that ran and match, by group."""
    wanted = [pattern.partition("=")[::2] for pattern in patterns]
    column, _, length = by.partition(":")
    found: dict[str, list[PublishedRun]] = {}
    for line, cells in csv_rows(path)[1]:
        if not all(re.search(pattern, cells.get(name) or "") for name, pattern in wanted):
            continue
        try:
            run = read_run(line, cells, load_software(UNKNOWN))
            step_s(run.model, run.cluster, run.plan)
        except PhazeError:
            continue
        if run.status == "ok" and run.time_s > 0:
            found.setdefault((cells.get(column) or "")[: int(length or 40)], []).append(run)
    return found


def score(
    test: Sequence[PublishedRun], predicted: Sequence[float], ratios: tuple[float, float]
) -> list[float]:
    """Mean and median error, share inside the interval, and mean pick-regret."""
    measured = np.array([run.time_s for run in test])
    ratio = measured / np.array(predicted)
    inside = ((ratio >= ratios[0]) & (ratio <= ratios[1])).mean()
    regret = pick_regret(zip([r.query for r in test], measured.tolist(), predicted, strict=True))
    errors = np.abs(1.0 / ratio - 1.0)
    lost = np.nan if regret is None else regret["mean"]
    return [errors.mean(), float(np.median(errors)), inside, lost]


def draw(
    rng: np.random.Generator, runs: Sequence[PublishedRun], rows: int, most: int
) -> list[float]:
    """Calibrate on some runs and score at most `most` others."""
    order = rng.permutation(len(runs))
    train = OneCluster(tuple(runs[i] for i in order[:rows]), load_software(UNKNOWN))
    test = [runs[i] for i in order[rows : rows + most]]
    found = calibrated_cluster(train, advise=False)
    predicted = []
    for run in test:
        cluster = run.cluster.replace(fabric=found.fabric)
        predicted.append(step_s(run.model, cluster, run.plan.replace(software=found.software)))
    assert found.software.step_ratios is not None
    return score(test, predicted, found.software.step_ratios)


def main() -> None:
    """Print the medians over draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--most", type=int, default=60)
    parser.add_argument("--by", default="")
    given = parser.parse_args()
    groups = matching(given.table, given.patterns, given.by)
    groups = {name: runs for name, runs in groups.items() if len(runs) > given.rows + 2}
    rng, titles = np.random.default_rng(0), sorted(groups)
    scores = []
    for k in range(given.draws):
        scores.append(draw(rng, groups[titles[k % len(titles)]], given.rows, given.most))
        sys.stderr.write(" ".join(f"{value:.3f}" for value in scores[-1]) + "\n")
    names = ("mean error", "median error", "in interval", "pick-regret")
    told = zip(names, np.nanmedian(scores, axis=0), strict=True)
    text = ", ".join(f"{name} {value:.1%}" for name, value in told)
    sys.stdout.write(f"{given.rows} rows, {given.draws} draws: {text}\n")


if __name__ == "__main__":
    main()
