"""Takes measured operators of a GPU, gives the constants of its preset and their honest error.

``python bench/calibrate.py h200 [FOLDER]`` reads FOLDER/h200_{gemm,vector,ends,attention}.csv
(tests/golden by default), fits the constants listed in `CONSTANTS` from the preset's own values,
and prints them beside the errors: of the preset as it is, of the new fit, and of five fits that
each left a fifth of every file out. It needs SciPy and changes nothing; ``--full`` searches
globally.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.cost.machines import machines
from phaze_fast.cost.measurements import Measurements, read_measurements
from phaze_fast.hardware import presets

Array = np.ndarray[Any, Any]
FOLDS = 5
SMALL = 0.1  # errors below this count by their square

# Name, unit, least, most. Everything else of a preset is known, counted or carried over; AdamW, of
# which these files have one row, is read off another measurement (h200_again_ends.csv).
CONSTANTS = (
    ("launch_s", 1e-6, 0.5, 6.0),
    ("vector_launch_share", 1.0, 0.3, 1.0),
    ("unit_overhead_s", 1e-6, 0.0, 4.0),
    ("efficiency", 1.0, 0.5, 1.0),
    ("sustained_macs_per_s", 1e12, 250.0, 495.0),
    ("hbm_share", 1.0, 0.7, 1.0),
    ("hbm_write_share", 1.0, 0.5, 1.0),
    ("product_hbm_share", 1.0, 0.7, 1.0),
    ("port_share", 1.0, 0.3, 1.0),
    ("port_even_bytes_per_cycle", 1.0, 3.0, 64.0),
    ("port_odd_bytes_per_cycle", 1.0, 2.0, 64.0),
    ("attention_unit_s", 1e-6, 0.0, 5.0),
    ("attention_backward_efficiency", 1.0, 0.4, 1.0),
    ("gelu", 1.0, 5.0, 100.0),
    ("dropout", 1.0, 5.0, 100.0),
    ("softmax", 1.0, 5.0, 100.0),
    ("norm", 1.0, 1.0, 100.0),
    ("norm-row", 1e3, 0.0, 90.0),
)

# Lane operations of other functions follow from these, in proportion to how often an element is
# read or written (the weight gradients of a norm not counted). The rows of a layer norm reduce
# three numbers, those of an RMS norm one.
FOLLOWERS = {
    "gelu": {"gelu": 1.0, "gelu-backward": 6 / 4},
    "dropout": {"dropout": 1.0},
    "softmax": {"softmax": 1.0, "softmax-backward": 10 / 4, "cross-entropy": 6 / 4},
    "norm": {
        "layernorm": 1.0,
        "layernorm-backward": 5 / 2,
        "rmsnorm": 1.0,
        "rmsnorm-backward": 5 / 2,
    },
    "norm-row": {
        "layernorm": 1.0,
        "layernorm-backward": 5 / 2,
        "rmsnorm": 1 / 3,
        "rmsnorm-backward": 5 / 6,
    },
}
WEIGHTS = {"aligned": 2.0, "ragged": 0.5, "vector": 1.0, "ends": 1.0, "attention": 1.0}


class Data:
    """All columns of all files, as operators and the time they should take."""

    def __init__(self, folder: Path, chip: str) -> None:
        names: list[str] = []
        ops, owner, measured, row = [], [], [], []
        count = 0
        for file in ("gemm", "vector", "ends", "attention"):
            found = read_measurements(folder / f"{chip}_{file}.csv")
            for column, values in found.measured.items():
                asked, belongs = found.queries(column)
                ops.append(asked)
                owner.append(belongs + count)
                measured.extend(values)
                row.extend(range(len(values)))
                names.extend(_classes(file, found))
                count += len(values)
        self.ops, self.owner = np.concatenate(ops), np.concatenate(owner)
        self.measured, self.row = np.array(measured), np.array(row)
        self.classes = np.array(names)
        self.machines = machines(presets.chip(chip))

    def errors(self, tuning: Array) -> Array:
        """Signed relative error of every measured value."""
        asked = self.machines
        times = _core.op_times(
            self.ops, asked.records, asked.tuning_of, tuning, asked.precision, False, 1
        )
        return 1e6 * np.bincount(self.owner, weights=times) / self.measured - 1.0

    def by_class(self, errors: Array, keep: Array) -> dict[str, float]:
        """Mean absolute error of each class over the kept values."""
        return {
            name: float(np.abs(errors[keep & (self.classes == name)]).mean()) for name in WEIGHTS
        }


def _classes(file: str, found: Measurements) -> Iterable[str]:
    if file != "gemm":
        return [file] * len(found.labels)
    table, _ = found.queries("us_median")
    aligned = np.all([table[d] % 8 == 0 for d in "mkn"], axis=0)
    return np.where(aligned, "aligned", "ragged").tolist()


def tuning_with(base: Array, values: Array) -> Array:
    """The preset's record with other constants."""
    record = base.copy()
    row = record[0]
    functions = row["functions"]
    for (name, unit, _, _), value in zip(CONSTANTS, values, strict=True):
        if name in row.dtype.names:
            row[name] = value * unit
        elif name == "norm-row":
            for function, factor in FOLLOWERS[name].items():
                functions["ops_per_row"][_core.FUNCTIONS.index(function)] = value * unit * factor
        else:
            for function, factor in FOLLOWERS[name].items():
                functions["ops_per_element"][_core.FUNCTIONS.index(function)] = value * factor
    return record


def values_of(base: Array) -> Array:
    """The constants that a preset's record holds."""
    row, found = base[0], []
    for name, unit, _, _ in CONSTANTS:
        if name in row.dtype.names:
            found.append(row[name] / unit)
        elif name == "norm-row":
            at = _core.FUNCTIONS.index("layernorm")
            found.append(row["functions"]["ops_per_row"][at] / unit)
        else:
            at = _core.FUNCTIONS.index("layernorm" if name == "norm" else name)
            found.append(row["functions"]["ops_per_element"][at])
    return np.array(found)


def fit(data: Data, keep: Array, start: Array, everywhere: bool = False) -> Array:
    """Constants of least weighted error over the kept values."""
    from scipy.optimize import differential_evolution, minimize

    base = data.machines.tunings
    bounds = [(low, high) for _, _, low, high in CONSTANTS]

    def loss(values: Array) -> float:
        errors = data.errors(tuning_with(base, values))
        rounded = np.sqrt(errors**2 + SMALL**2)  # so that no single row decides a constant
        means = data.by_class(rounded, keep)
        return sum(WEIGHTS[name] * mean for name, mean in means.items())

    if everywhere:
        found = differential_evolution(loss, bounds, seed=1, maxiter=300, popsize=6, tol=1e-8)
        start = found.x
    for _ in range(2):
        start = minimize(loss, start, method="Powell", bounds=bounds, options={"xtol": 1e-3}).x
    return start


def cross_validated(data: Data, start: Array) -> dict[str, float]:
    """Errors on rows that a fit has not seen."""
    errors = np.empty(len(data.measured))
    base = data.machines.tunings
    for fold in range(FOLDS):
        out = data.row % FOLDS == fold
        values = fit(data, ~out, start)
        errors[out] = data.errors(tuning_with(base, values))[out]
    return data.by_class(errors, np.ones(len(errors), dtype=bool))


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Print the constants and the errors."""
    names = [a for a in arguments if not a.startswith("-")]
    chip = names[0] if names else "h200"
    golden = Path(__file__).parent.parent / "tests" / "golden"
    data = Data(Path(names[1]) if len(names) > 1 else golden, chip)
    everything = np.ones(len(data.measured), dtype=bool)
    base = data.machines.tunings
    now = values_of(base)
    found = fit(data, everything, now, everywhere="--full" in arguments)
    say(f"{len(CONSTANTS)} constants of {chip}")
    for (name, unit, low, high), before, after in zip(CONSTANTS, now, found, strict=True):
        edge = "  at the edge of its range" if min(after - low, high - after) < 1e-9 else ""
        say(f"  {name:30} {before * unit:12.5g} -> {after * unit:12.5g}{edge}")
    preset = data.by_class(data.errors(base), everything)
    fitted = data.by_class(data.errors(tuning_with(base, found)), everything)
    unseen = cross_validated(data, found)
    say(f"{'mean absolute error':22} {'values':>6} {'preset':>8} {'fitted':>8} {'unseen':>8}")
    for name in WEIGHTS:
        count = int((data.classes == name).sum())
        line = f"{preset[name]:8.1%} {fitted[name]:8.1%} {unseen[name]:8.1%}"
        say(f"  {name:20} {count:6} {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
