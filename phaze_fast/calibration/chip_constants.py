"""Constants of a chip fitted to files of measured operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from phaze_fast import _core
from phaze_fast.calibration.fit import Constant
from phaze_fast.calibration.fitted import Calibrated, calibrated
from phaze_fast.cost.machines import machines
from phaze_fast.cost.validation import Measurements, read_measurements
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator
from phaze_fast.hardware.tuning import AttentionKernel

__all__ = ["calibrate_chip"]

Array = np.ndarray[Any, Any]

# Field of the kernels' record, name and unit in a chip's file, least, most.
_PRODUCTS = (
    ("launch_s", "launch_latency_s", 1.0, 2e-7, 3e-5),
    ("unit_overhead_s", "unit_overhead_s", 1.0, 1e-8, 1e-5),
    ("efficiency", "efficiency", 1.0, 0.2, 1.0),
    ("sustained_macs_per_s", "sustained_flops", 2.0, 1e12, 1e17),
    ("product_hbm_share", "product_hbm_share", 1.0, 0.3, 1.0),
    ("port_share", "port_share", 1.0, 0.2, 1.0),
)
_UNALIGNED = (
    ("port_even_bytes_per_cycle", "port_even_bytes_per_cycle", 1.0, 2.0, 128.0),
    ("port_odd_bytes_per_cycle", "port_odd_bytes_per_cycle", 1.0, 2.0, 128.0),
)
_UNALIGNED_KERNELS = (  # where a chip has blocks of their own for them
    ("unaligned_unit_overhead_s", "unaligned_unit_overhead_s", 1.0, 1e-8, 1e-5),
    ("unaligned_reduction_s", "unaligned_reduction_s", 1.0, 1e-8, 3e-5),
)
_VECTOR = (
    ("vector_launch_share", "vector_launch_share", 1.0, 0.1, 1.0),
    ("hbm_share", "hbm_share", 1.0, 0.5, 0.97),
    ("hbm_write_share", "hbm_write_share", 1.0, 0.5, 1.0),
)
_FORWARD = (
    ("attention_efficiency", "attention.efficiency", 1.0, 0.1, 1.0),
    ("attention_ops", "attention.ops_per_score", 1.0, 0.5, 100.0),
    ("attention_unit_s", "attention.unit_overhead_s", 1.0, 1e-8, 2e-5),
)
_BACKWARD = (
    ("attention_backward_efficiency", "attention.backward_efficiency", 1.0, 0.1, 1.0),
    ("attention_backward_ops", "attention.backward_ops_per_score", 1.0, 0.5, 200.0),
)
_COSTLY = 15.0  # microseconds from which a vector function's own cost shows


@dataclass(frozen=True)
class _Slot:
    """Where a constant lies in the kernels' record."""

    field: str
    name: str
    unit: float
    least: float
    most: float

    def read(self, record: Array) -> float:
        if self.field in (record.dtype.names or ()):
            return float(record[self.field][0])
        return float(record["functions"]["ops_per_element"][0, _core.FUNCTIONS.index(self.field)])

    def write(self, record: Array, value: float) -> None:
        if self.field in (record.dtype.names or ()):
            record[self.field] = value
        else:
            at = _core.FUNCTIONS.index(self.field)
            record["functions"]["ops_per_element"][0, at] = value


@dataclass
class _Rows:
    """All values of all files: operators, whose row each is, and what was measured."""

    ops: Array
    owner: Array
    measured_s: Array
    beside_s: Array
    kinds: Array


def _gathered(tables: Sequence[Measurements]) -> _Rows:
    ops, owner, measured, beside, kinds = [], [], [], [], []
    count = 0
    for table in tables:
        for column, values in table.measured.items():
            if column in table.known:
                continue
            asked, belongs = table.queries(column)
            ops.append(asked)
            owner.append(belongs + count)
            measured.append(np.array(values) * table.unit_s)
            beside.append(np.array(table.beside_s) if table.beside_s else np.zeros(len(values)))
            kinds += [f"{table.kind} {column}" if "attention" in table.kind else table.kind] * len(
                values
            )
            count += len(values)
    return _Rows(
        np.concatenate(ops),
        np.concatenate(owner),
        np.concatenate(measured),
        np.concatenate(beside),
        np.array(kinds),
    )


def _format_slots(dtype: str, rate: float) -> list[_Slot]:
    """Constants of products in a format that is not the chip's own."""
    return [
        _Slot(field, f"formats.{dtype}.{name}", rate * unit if unit > 1.0 else unit, least, most)
        for field, name, unit, least, most in _PRODUCTS
        if name in ("efficiency", "sustained_flops", "unit_overhead_s")
    ]


def _slots(
    tables: Sequence[Measurements], rows: _Rows, dtype: str, rate: float, base: Array
) -> list[_Slot]:
    """Constants that the files can say something about."""
    if dtype not in ("bf16", "fp16"):
        return _format_slots(dtype, rate)
    kinds = {table.kind for table in tables}
    wanted: list[tuple[str, str, float, float, float]] = []
    if kinds & {"gemm", "format", "grouped"}:
        wanted += _PRODUCTS
        product = rows.ops[rows.ops["function"] == 0]
        if np.any((product["k"] | product["n"]) % 8):
            wanted += _UNALIGNED
            if base["even_tiles"][0] or base["odd_tiles"][0]:
                wanted += _UNALIGNED_KERNELS
    if "vector" in kinds:
        wanted += _VECTOR
        long = rows.measured_s[rows.owner] > 1e-6 * _COSTLY
        for code in np.unique(rows.ops["function"][long]):
            name = _core.FUNCTIONS[int(code)]
            if int(code) >= 4 and name not in ("add", "multiply", "copy", "relu", "embedding"):
                wanted.append((name, f"functions.{name}.ops_per_element", 1.0, 1.0, 2000.0))
    if kinds & {"attention", "serving attention"}:
        wanted += _FORWARD
    if "attention" in kinds:
        wanted += _BACKWARD
    return [_Slot(*each) for each in wanted]


def _one_format(tables: Sequence[Measurements]) -> str:
    formats = {table.dtype for table in tables if table.kind in ("gemm", "format", "grouped")}
    if len(formats) > 1:
        raise InvalidInputError(
            f"files: products in {', '.join(sorted(formats))} are not accepted together; "
            "expected one calibration for each format"
        )
    return formats.pop() if formats else "bf16"


def _fitted_range(rows: _Rows) -> dict[str, list[int]] | None:
    product = rows.ops[rows.ops["function"] == 0]
    if not len(product):
        return None
    return {name: [int(product[name].min()), int(product[name].max())] for name in "mkn"}


def _described(
    chip: Accelerator, slots: Sequence[_Slot], values: Array, rows: _Rows, source: str
) -> dict[str, Any]:
    """Give the chip's file with the fitted constants."""
    plain = chip.to_dict()
    tuning = plain.setdefault("tuning", {})
    for slot, value in zip(slots, values, strict=True):
        number = float(f"{value * slot.unit:.5g}")
        if slot.name == "launch_latency_s":
            plain[slot.name] = number
            continue
        at = tuning
        *path, last = slot.name.split(".")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = number
    own = [n for n in chip.tuning.fitted if slots[0].name.startswith("formats.")]
    tuning["fitted"] = [*own, *(slot.name for slot in slots)]
    tuning["sources"] = [source]
    tuning.pop("carried_from", None)
    if chip.tuning.fitted or chip.tuning.carried_from:
        tuning["carried_from"] = chip.tuning.carried_from or chip.name
    if not own and (ends := _fitted_range(rows)) is not None:
        tuning["fitted_range"] = ends
    return plain


def calibrate_chip(files: Sequence[Path | str], chip: Accelerator, name: str = "") -> Calibrated:
    """Fit what files of measured operators say about a chip; the rest stays as it is.

    Parameters
    ----------
    files
        CSV files as `phaze_fast.validate` reads them; all of one chip.
    chip
        Where the fit begins: cores, clock and memory are taken as they are.
    name
        What to call the result; by default the chip's name.

    Raises
    ------
    InvalidInputError
        Where a file is not accepted, or there are too few rows for the constants.
    """
    tables = [read_measurements(file) for file in files]
    dtype = _one_format(tables)
    kernels = {table.kernel for table in tables if table.kernel}
    for kernel in kernels & set(chip.tuning.attention_kernels):
        chip = chip.with_attention(cast(AttentionKernel, kernel))
    rows = _gathered(tables)
    asked = machines(chip, dtype=dtype)  # type: ignore[arg-type]
    base = asked.tunings.copy()
    if base["sustained_macs_per_s"][0] == 0.0:  # no limit so far: the peak is one
        base["sustained_macs_per_s"] = chip.peak_flops() / 2.0
    slots = _slots(tables, rows, dtype, float(asked.precision[3]), base)
    if not slots:
        raise InvalidInputError(
            "files: none of them measures anything that a chip's constants depend on"
        )

    def log_errors(values: Array) -> Array:
        record = base.copy()
        for slot, value in zip(slots, values, strict=True):
            slot.write(record, value)
        times = _core.op_times(
            rows.ops, asked.records, asked.tuning_of, record, asked.precision, False, 1
        )
        predicted = np.bincount(rows.owner, weights=np.ravel(times)) + rows.beside_s
        found: Array = np.log(predicted / rows.measured_s)
        return found

    constants = [
        Constant(s.name, float(np.clip(s.read(base), s.least, s.most)), s.least, s.most)
        for s in slots
    ]
    units = np.array([slot.unit for slot in slots])

    def described(values: Array) -> dict[str, Any]:
        source = f"phaze-fast calibrate, {len(rows.measured_s)} values of " + ", ".join(
            Path(file).name for file in files
        )
        return {**_described(chip, slots, values, rows, source), "name": name or chip.name}

    return calibrated("chip", log_errors, constants, units, rows.kinds, described)
