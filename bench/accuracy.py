"""Write the page and the intervals that rest on published runs.

``python bench/accuracy.py FOLDER`` reads the tables of training runs and the measured steps in
FOLDER (published_training_runs.csv, public_runs.csv, h200_step.csv, h200_hf.csv), learns the
intervals of predictions (phaze_fast/placement/data/intervals.yaml) and writes docs/accuracy.md and
docs/accuracy.svg.
"""

import sys
from pathlib import Path

from phaze_fast.calibration import validate_runs, validate_steps
from phaze_fast.calibration.accuracy_page import page, scatter
from phaze_fast.calibration.intervals import learn_ratios
from phaze_fast.documents import to_yaml
from phaze_fast.hardware import presets
from phaze_fast.placement import intervals

ROOT = Path(__file__).parents[1]
TABLES = ("published_training_runs.csv", "public_runs.csv")


def main(folder: Path) -> None:
    """Learn, validate again with what was learnt, and write."""
    first = [row for name in TABLES for row in validate_runs(folder / name).all_rows.rows]
    table = ROOT / "phaze_fast/placement/data/intervals.yaml"
    note = (
        "# Measured over predicted seconds of a step: between these in four of five cases.\n"
        "# Learnt from published runs by bench/accuracy.py; phaze_fast/placement/intervals.py\n"
        "# says how a plan's group is found.\n"
    )
    table.write_text(note + to_yaml({"ratios": dict(learn_ratios(first))}), "utf-8")
    intervals._table.cache_clear()
    runs = [validate_runs(folder / name) for name in TABLES]
    chip = presets.chip("h200")
    steps = [validate_steps(folder / f"{name}.csv", chip) for name in ("h200_step", "h200_hf")]
    (ROOT / "docs/accuracy.md").write_text(page(runs, steps), "utf-8")
    (ROOT / "docs/accuracy.svg").write_text(scatter(runs), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
