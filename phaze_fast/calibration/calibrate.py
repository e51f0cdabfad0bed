"""Constants of chips and fabrics fitted to files of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.calibration.collectives import CollectiveRows, read_collectives
from phaze_fast.calibration.fit import Calibrated, Constant, calibrated
from phaze_fast.cost.machines import machines
from phaze_fast.cost.validation import Measurements, read_measurements
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, AnyFabric, TieredFabric
from phaze_fast.hardware.fabric import CollectiveTuning

Array = np.ndarray[Any, Any]


def benchmark_script() -> str:
    """Return the text of a Python script that measures a GPU and needs PyTorch alone.

    It measures products, attention, vector operators and, started by torchrun, collectives, and
    writes files that `phaze_fast.validate` and `phaze-fast calibrate` read.

    Examples
    --------
    >>> "torch.distributed" in benchmark_script()
    True
    """
    return (resources.files(__package__) / "data" / "gpu_benchmark.txt").read_text("utf-8")


# ---- chips ----

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
    """All measured values of all files, and their operators."""

    ops: Array
    owner: Array
    """Number of the value that each operator belongs to."""
    measured_s: Array
    other_s: Array
    """Seconds of each value that its operators do not account for."""
    kinds: Array

    @classmethod
    def of(cls, tables: Sequence[Measurements]) -> _Rows:
        ops, owner, measured, other, kinds = [], [], [], [], []
        count = 0
        for table in tables:
            for column in table.ops:
                values = table.measured[column]
                of_column, owner_of = table.queries(column)
                ops.append(of_column)
                owner.append(owner_of + count)
                measured.append(np.array(values) * table.unit_s)
                other.append(np.array(table.other_s or [0.0] * len(values)))
                kind = f"{table.kind} {column}" if "attention" in table.kind else table.kind
                kinds += [kind] * len(values)
                count += len(values)
        a, b, c, d = (np.concatenate(parts) for parts in (ops, owner, measured, other))
        return cls(a, b, c, d, np.array(kinds))


def _format_slots(dtype: str, rate: float) -> list[_Slot]:
    """Return the constants of products in a format that is not the chip's own."""
    return [
        _Slot(field, f"formats.{dtype}.{name}", rate * unit if unit > 1.0 else unit, least, most)
        for field, name, unit, least, most in _PRODUCTS
        if name in ("efficiency", "sustained_flops", "unit_overhead_s")
    ]


def _slots(
    tables: Sequence[Measurements], rows: _Rows, dtype: str, rate: float, base: Array
) -> list[_Slot]:
    """Return the constants that the measured times depend on."""
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
    return [_Slot(*slot) for slot in wanted]


def _one_format(tables: Sequence[Measurements]) -> str:
    formats = {table.dtype for table in tables if table.kind in ("gemm", "format", "grouped")}
    if len(formats) > 1:
        raise InvalidInputError(
            f"files: products in {', '.join(sorted(formats))} are not accepted together; "
            "expected one calibration for each format"
        )
    return formats.pop() if formats else "bf16"


def _described(
    chip: Accelerator, slots: Sequence[_Slot], values: Array, rows: _Rows, source: str
) -> dict[str, Any]:
    """Return the chip as plain data with the fitted constants."""
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
    product = rows.ops[rows.ops["function"] == 0]
    if not own and len(product):
        sizes = {name: [int(product[name].min()), int(product[name].max())] for name in "mkn"}
        tuning["fitted_range"] = sizes
    return plain


def calibrate_chip(files: Sequence[Path | str], chip: Accelerator, name: str = "") -> Calibrated:
    """Fit the constants of a chip that files of measured operators depend on.

    Parameters
    ----------
    files
        CSV files as `phaze_fast.validate` reads them, all of one chip.
    chip
        Where the fit begins. Cores, clock, memory and other constants stay as they are.
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
        chip = chip.with_attention(kernel)
    rows = _Rows.of(tables)
    machine = machines(chip, dtype=dtype)  # type: ignore[arg-type]
    base = machine.tunings.copy()
    if base["sustained_macs_per_s"][0] == 0.0:  # no limit so far: the peak is one
        base["sustained_macs_per_s"] = chip.peak_flops() / 2.0
    slots = _slots(tables, rows, dtype, float(machine.precision[3]), base)
    if not slots:
        raise InvalidInputError(
            "files: none of them measures anything that a chip's constants depend on"
        )

    def log_errors(values: Array) -> Array:
        record = base.copy()
        for slot, value in zip(slots, values, strict=True):
            slot.write(record, value)
        times = _core.op_times(
            rows.ops, machine.records, machine.tuning_of, record, machine.precision, False, 1
        )
        predicted = np.bincount(rows.owner, weights=np.ravel(times)) + rows.other_s
        errors: Array = np.log(predicted / rows.measured_s)
        return errors

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


# ---- fabrics ----

_RANGES = {  # of a protocol's constants: seconds, seconds, a share, a ratio
    "startup_s": (5e-7, 5e-4),
    "step_s": (1e-8, 1e-4),
    "two_rank_share": (1e-3, 0.995),
    "many_over_two": (1.0, 1.95),
}
_HIGHEST = 0.995


def _one_system(files: Sequence[Path | str]) -> CollectiveRows:
    rows = CollectiveRows()
    for file in files:
        rows.extend(read_collectives(file))
    systems = {name for name in rows.system if name}
    if len(systems) > 1:
        raise InvalidInputError(
            f"files: systems {', '.join(sorted(systems))} are not accepted together; expected one"
        )
    return rows


def _constants(tuning: CollectiveTuning, rows: CollectiveRows) -> list[Constant]:
    """Return the constants that the rows depend on, from the tuning's own values."""
    constants: list[Constant] = []

    def add(name: str, kind: str, value: float) -> None:
        low, high = _RANGES[kind]
        constants.append(Constant(f"{name}.{kind}", float(np.clip(value, low, high)), low, high))

    operations = set(rows.op)
    lists = {
        "ring": operations & {"all-reduce", "reduce-scatter", "all-gather", "broadcast"},
        "exchange": operations & {"all-to-all", "point-to-point"},
    }
    for field, present in lists.items():
        if not present:
            continue
        for protocol in getattr(tuning, field):
            name = f"{field}.{protocol.name}"
            for kind in ("startup_s", "step_s", "two_rank_share"):
                add(name, kind, getattr(protocol, kind))
            last = protocol is getattr(tuning, field)[-1]
            if last:
                add(name, "many_over_two", protocol.many_rank_share / protocol.two_rank_share)
            for op in ("reduce-scatter", "all-gather"):
                if last and field == "ring" and op in present:
                    two, many = protocol.shares(op)
                    add(f"{name}.{op}", "two_rank_share", two)
                    add(f"{name}.{op}", "many_over_two", many / two)
    large = any(r > 2 and op == "all-reduce" for r, op in zip(rows.ranks, rows.op, strict=True))
    if tuning.in_switch is not None and large:
        add("in_switch", "startup_s", tuning.in_switch.startup_s)
        add("in_switch", "two_rank_share", tuning.in_switch.share)
    return constants


def _many(two: float, ratio: float) -> float:
    return float(min(two * ratio, _HIGHEST))


def _with(tuning: CollectiveTuning, values: dict[str, float]) -> CollectiveTuning:
    """Return the tuning with other values of its constants."""
    changed: dict[str, Any] = {}
    for field in ("ring", "exchange"):
        protocols = []
        for protocol in getattr(tuning, field):
            name = f"{field}.{protocol.name}"
            two = values.get(f"{name}.two_rank_share", protocol.two_rank_share)
            old = protocol.many_rank_share / protocol.two_rank_share
            pairs = {}
            for op in ("reduce-scatter", "all-gather"):
                own = values.get(f"{name}.{op}.two_rank_share")
                if own is not None:
                    pairs[op] = (own, _many(own, values[f"{name}.{op}.many_over_two"]))
            protocols.append(
                protocol.replace(
                    startup_s=values.get(f"{name}.startup_s", protocol.startup_s),
                    step_s=values.get(f"{name}.step_s", protocol.step_s),
                    two_rank_share=two,
                    many_rank_share=_many(two, values.get(f"{name}.many_over_two", old)),
                    operations={**protocol.operations, **pairs},
                )
            )
        changed[field] = protocols
    if tuning.in_switch is not None and "in_switch.startup_s" in values:
        changed["in_switch"] = tuning.in_switch.replace(
            startup_s=values["in_switch.startup_s"], share=values["in_switch.two_rank_share"]
        )
    return tuning.replace(**changed)


def calibrate_fabric(
    files: Sequence[Path | str],
    fabric: AnyFabric,
    name: str = "",
) -> Calibrated:
    """Fit the constants of a fabric's innermost tier that measured collectives depend on.

    Parameters
    ----------
    files
        Tables of collectives or nccl-tests output, all of one machine.
    fabric
        Where the fit begins. Bandwidths, sizes and protocols stay as they are.
    name
        What to call the result; by default the fabric's name.

    Raises
    ------
    InvalidInputError
        Where a file is not accepted, the fabric has no protocols to fit, a group reaches beyond the
        innermost tier, or there are too few rows.
    """
    if not isinstance(fabric, TieredFabric) or fabric.tiers[0].library is None:
        raise InvalidInputError(
            f"fabric: {fabric.name} has no protocols to fit; expected a tiered fabric whose tiers "
            "have a library, such as dgx-h100"
        )
    rows = _one_system(files)
    inner = fabric.tiers[0]
    if inner.size is not None and max(rows.ranks) > inner.size:
        raise InvalidInputError(
            f"files: a group of {max(rows.ranks)} ranks reaches beyond a {inner.name} of "
            f"{inner.size}; expected collectives inside one"
        )
    assert inner.library is not None
    tuning = inner.library
    constants = _constants(tuning, rows)
    measured = np.array(rows.time_s)

    def rebuilt(values: Array) -> TieredFabric:
        named = {c.name: float(v) for c, v in zip(constants, values, strict=True)}
        tier = inner.replace(library=_with(tuning, named))
        return fabric.replace(tiers=[tier, *fabric.tiers[1:]])

    def log_errors(values: Array) -> Array:
        errors: Array = np.log(rows.predicted_s(rebuilt(values)) / measured)
        return errors

    def described(values: Array) -> dict[str, Any]:
        plain = rebuilt(values).to_dict()
        library = plain["tiers"][0]["library"]
        library["fitted"] = [c.name for c in constants]
        names = ", ".join(Path(file).name for file in files)
        library["sources"] = [f"phaze-fast calibrate, {len(measured)} collectives of {names}"]
        return {**plain, "name": name or fabric.name}

    sizes = np.where(np.array(rows.payload_bytes) >= 2**20, ">= 1 MiB", "< 1 MiB")
    units = np.ones(len(constants))
    return calibrated("fabric", log_errors, constants, units, sizes, described)
