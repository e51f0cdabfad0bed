"""Recorded fits: values, intervals and calls of small problems, and what files and rows can tell.

`PYTHONPATH=tests/cases python tests/calibration/test_recorded_fits.py` writes the record anew; a commit
that changes it says why.
"""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import assert_as_recorded, plain, recorded_rows, write_record

from phaze_fast.calibration.calibrate import (
    Constant,
    _constants,
    _described,
    _one_format,
    _Rows,
    _slots,
    _with,
    calibrated,
    cross_validated_errors,
    fit_constants,
)
from phaze_fast.calibration.collectives import read_collectives, validate_collectives
from phaze_fast.calibration.validation import compare_predictions, validate_runs, validate_steps
from phaze_fast.cost.machines import machines
from phaze_fast.cost.validation import read_measurements
from phaze_fast.hardware import presets
from phaze_fast.software import load_software

runs_module = importlib.import_module("phaze_fast.calibration.calibrate_runs")
GOLDEN = Path(__file__).parents[1] / "golden"
FILE = GOLDEN / "recorded_fits.json"
SIZES = np.geomspace(1.0, 100.0, 9)
NOISE = np.random.default_rng(1).normal(0.0, 0.05, 9)
WIDE = (1e-3, 1e3)


def two(x: Any) -> Any:
    return x[0] + x[1] * SIZES


def far(x: Any) -> Any:
    return np.maximum(x[0] * 50.0, x[1] * SIZES**1.5) / (1.0 + x[2] / SIZES)


FITS: tuple[tuple[Callable[[Any], Any], tuple[float, ...], tuple[float, ...], Any], ...] = (
    (two, (3.0, 2.0), (1.0, 1.0), (WIDE, WIDE)),
    (two, (3.0, 2.0), (900.0, 0.002), (WIDE, WIDE)),
    (two, (3.0, 2.0), (1.0, 1.0), ((1e-3, 2.0), WIDE)),
    (two, (3.0, 2.0), (1.0, 1.0), (WIDE, (2.5, 1e3))),
    (far, (0.2, 0.5, 4.0), (5.0, 5.0, 0.1), (WIDE, WIDE, WIDE)),
    (lambda x: x[0] * x[1] * SIZES, (2.0, 3.0), (1.0, 1.0), (WIDE, WIDE)),
    (lambda x: 0.0 * x[0] + x[1] * SIZES, (1.0, 3.0), (7.0, 1.0), (WIDE, WIDE)),
)


def fits() -> list[Any]:
    """Fits of a few constants to noisy rows, one of them far off."""
    rows = []
    for function, true, start, ranges in FITS:
        measured = function(true) * np.exp(NOISE)
        measured[4] *= 2.0
        calls = [0]

        def log_errors(x: Any, f: Any = function, y: Any = measured, n: Any = calls) -> Any:
            n[0] += 1
            return np.log(f(x) / y)

        constants = [
            Constant(str(k), s, *r) for k, (s, r) in enumerate(zip(start, ranges, strict=True))
        ]
        fit = fit_constants(log_errors, constants)
        unseen = cross_validated_errors(log_errors, constants, 3)
        units, kinds = 2.0 + np.arange(len(constants)), np.array(["a", "b", "b"] * 3)
        whole = calibrated(
            "chip", log_errors, constants, units, kinds, lambda values: {"v": values}
        )
        rows.append({**vars(fit), "calls": calls[0], "unseen": unseen, "whole": whole.to_dict()})
    return rows


def posteriors() -> list[Any]:
    """Constants of clusters from the seconds of runs, some of which are far off."""
    constants = [
        runs_module.RunConstant("speed", "", 1.0, 0.3, 0.1, 1.9),
        runs_module.RunConstant("host", "", 0.1, 0.7, 1e-3, 10.0),
        runs_module.RunConstant("share", "", 1.0, 0.5, 0.02, 2.0),
    ]
    work, sent = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([0.1, 1.0, 0.2, 2.0, 0.5])
    rows = []
    for speed, host, share, late in (
        (0.8, 0.1, 0.6, 1.0),
        (0.15, 2.0, 1.0, 1.0),
        (1.2, 0.02, 0.1, 9.0),
    ):
        calls = [0]

        def log_seconds(v: Any, n: Any = calls) -> Any:
            n[0] += 1
            return np.log(np.maximum(work / v["speed"], 12 * v["host"]) + sent / v["share"])

        true = np.exp(log_seconds({"speed": speed, "host": host, "share": share}) + NOISE[:5])
        true[1] *= late
        found = runs_module.fit_runs(log_seconds, true.tolist(), constants)
        fitted = [vars(constant) for constant in runs_module._fitted_constants(found)]
        rows.append({**vars(found), "constants": fitted, "calls": calls[0]})
    return rows


def told() -> list[Any]:
    """The constants that files of measurements can tell, where they start, and what is written."""
    rows: list[Any] = []
    for files, chip in (
        (["h200_gemm.csv"], "h200"), (["h200_unaligned_gemm.csv"], "h200"),
        (["h200_unaligned_gemm.csv"], "a100-80"),
        (["h200_vector.csv"], "h200"), (["h200_attention.csv"], "h200"),
        (["h200_gemm.csv", "h200_vector.csv", "h200_attention.csv"], "h100"),
        (["h200_kernels_grouped.csv"], "h200"), (["h200_kernels_fp8.csv"], "h200"),
    ):  # fmt: skip
        tables = [read_measurements(GOLDEN / file) for file in files]
        dtype, measured = _one_format(tables), _Rows.of(tables)
        own = presets.chip(chip)
        machine = machines(own, dtype=dtype)  # type: ignore[arg-type]
        slots = _slots(tables, measured, dtype, machine.precision.rate, machine.tunings)
        values = np.array([slot.read(machine.tunings) for slot in slots])
        names = [[slot.name, slot.unit, value] for slot, value in zip(slots, values, strict=True)]
        written = _described(own, slots, values * 1.25, measured, "here")["tuning"]
        sums = [measured.measured_s.sum(), measured.other_s.sum(), int(measured.owner.sum())]
        said = {k: written.get(k) for k in ("fitted", "carried_from", "fitted_range", "efficiency")}
        rows.append(
            {"slots": names, "written": said, "rows": sums, "kinds": sorted(set(measured.kinds))}
        )
    return rows


def collectives() -> list[Any]:
    """Errors of measured collectives, the constants that they tell, and a library changed by them."""
    text = "system,op,num_gpus,bytes,latency_ms\n" + "".join(
        f"h100,{op},{ranks},{size},{0.02 * k + size / 2e8}\n"
        for k, (op, ranks, size) in enumerate(
            (op, ranks, size)
            for op in ("all_reduce", "reduce_scatter", "alltoall", "all_gather")
            for ranks in (2, 8)
            for size in (4096, 2**20, 2**28)
        )
    )
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        lines = text.splitlines(keepends=True)
        for number, kept in enumerate(
            (lines, lines[:7], [lines[0], *lines[1:4]], lines[:1] + lines[13:19])
        ):
            file = Path(folder) / f"{number}.csv"
            file.write_text("".join(kept))
            library = presets.fabric("dgx-h100").tiers[0].library  # type: ignore[union-attr]
            assert library is not None
            constants = _constants(library, read_collectives(file))
            changed = _with(library, {c.name: 0.9 * c.start for c in constants})
            rows.append([validate_collectives(file).to_dict(), [vars(c) for c in constants]])
            rows[-1].append(changed.to_dict())
    return rows


def predictions() -> list[Any]:
    """Errors of published runs and of another model's predictions of them."""
    columns = (
        "source,model,layers,hidden,heads,ffn,vocab,seq,gpu,n_gpus,tp,pp,dp,micro_batch,global_batch,"
        "recompute,framework,status,iter_time_s,memory_gib"
    )
    shape, ends = "2,512,8,2048,1000,256", "none,megatron-core"
    runs = [
        f"a,gpt-a,{shape},H100,2,1,1,2,1,4,{ends},ok,0.004,2", f"a,gpt-a,{shape},H100,2,2,1,1,1,4,{ends},ok,0.003,",
        f"a,gpt-a,{shape},H100,2,1,2,1,2,4,{ends},ok,0.02,90", f"b,gpt-b,{shape},A100,1,1,1,1,4,4,{ends},oom,,",
        f"b,gpt-b,{shape},A100,1,1,1,1,4,4,{ends},ok,0.01,5", f"b,gpt-b,{shape},X9,1,1,1,1,4,4,{ends},ok,1,5",
        f"b,gpt-b,{shape},H100,1,1,1,1,3,4,{ends},ok,1,5", f"c,t5-x,{shape},H100,1,1,1,1,1,4,full,nanotron,ok,1,5",
    ]  # fmt: skip
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        file, other = Path(folder) / "runs.csv", Path(folder) / "other.csv"
        file.write_text("\n".join([columns, *runs]) + "\n")
        other.write_text(
            "row,step_s,memory_gib,fits\n2,0.005,3,yes\n3,,1,no\n4,0.01,,\n99,1,1,no\n"
        )
        for by in ("source", "chip", "software", "model"):
            validation = validate_runs(file, by)
            rows.append(validation.to_dict())
        rows.append([group.to_dict() for group in compare_predictions(validation, other)])
        rows.append([[run.run.line, run.error, run.interval_s] for run in validation.worst(3)])
        steps = Path(folder) / "steps.csv"
        steps.write_text(
            "model,layers,seq,mbs,accum,recompute,step_ms,peak_bytes\n"
            "gpt2-small,2,128,1,1,none,9,1e9\ngpt2-small,2,256,2,2,full,5,2e9\n"
        )
        told = validate_steps(steps, presets.chip("h100"))
        rows.append([told.to_dict(), told.worst(3)])
    return rows


def beliefs() -> list[Any]:
    """What is known of software before any run, and how habits share what runs say."""
    rows: list[Any] = []
    for name, chip in (
        ("generic", None),
        ("generic", "h100"),
        ("megatron-core", "h100"),
        ("nanotron", "a100-80"),
    ):
        own = load_software(name)
        constants = runs_module.constants_of(own, None if chip is None else presets.chip(chip))
        rows.append([dataclasses.astuple(constant) for constant in constants])
    return rows


PARTS = (fits, posteriors, told, collectives, predictions, beliefs)


@pytest.mark.parametrize("number", range(len(PARTS)), ids=[part.__name__ for part in PARTS])
def test_fits_are_what_was_recorded(number: int) -> None:
    recorded = recorded_rows(FILE)[number]
    assert_as_recorded(plain(listed(PARTS[number]())), recorded, same=1e-6)


def listed(value: Any) -> Any:
    """Arrays as lists, of numbers as floats."""
    if isinstance(value, dict):
        return {name: listed(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [listed(part) for part in value]
    if isinstance(value, np.ndarray):
        return listed(value.tolist())
    return value.item() if isinstance(value, np.generic) else value


if __name__ == "__main__":
    write_record(FILE, [plain(listed(part())) for part in PARTS])
