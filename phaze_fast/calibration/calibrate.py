"""Constants of chips and fabrics fitted to files of measurements, with intervals.

Errors are logarithms of predicted over measured seconds. Large errors count by their size rather
than their square (Huber's loss), so that no single row decides a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.calibration.collectives import CollectiveRows, read_collectives
from phaze_fast.cost.machines import machines
from phaze_fast.cost.validation import Measurements, read_measurements
from phaze_fast.documents import package_data
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, AnyFabric, TieredFabric
from phaze_fast.hardware.fabric import CollectiveTuning
from phaze_fast.tables import Array

# ---- least-squares fits of a few positive constants ----

LogErrors = Callable[[Array], Array]
"""Function of the constants' values that returns ln(predicted / measured seconds) of every row."""

_STEP = 2e-3  # step of a constant's logarithm in finite differences
_SMALL = 0.08  # larger errors count by their size, smaller ones by their square
_ROUNDS = 40
_COLLINEAR = 0.98  # correlation from which two constants cannot be distinguished
_ROWS_PER_CONSTANT = 2.0


@dataclass(frozen=True)
class Constant:
    """One constant to be fitted, more than zero."""

    name: str
    start: float
    """Value at which the fit begins, in the constant's unit."""
    least: float
    most: float


@dataclass(frozen=True)
class FitResult:
    """Fitted constants and how well the rows determine them."""

    names: tuple[str, ...]
    values: Array
    """Fitted values, each in its own unit."""
    low: Array
    """Lower ends of 90% intervals; equal to `least` where no row depends on a constant."""
    high: Array
    """Upper ends of 90% intervals."""
    at_bound: tuple[str, ...]
    """Constants that ended at a bound of their range."""
    undetermined: tuple[str, ...]
    """Constants that no row depends on: they keep their start values."""
    collinear: tuple[tuple[str, str], ...]
    """Pairs of constants that the rows cannot distinguish."""
    errors: Array
    """ln(predicted / measured) of every row at `values`."""


def _weights(errors: Array) -> Array:
    return np.minimum(1.0, _SMALL / np.maximum(np.abs(errors), 1e-12))


def _loss(errors: Array) -> float:
    size = np.abs(errors)
    return float(np.where(size < _SMALL, 0.5 * size**2, _SMALL * (size - 0.5 * _SMALL)).sum())


def _derivatives(log_errors: LogErrors, point: Array, low: Array, high: Array) -> Array:
    columns = []
    for i in range(len(point)):
        up, down = point.copy(), point.copy()
        up[i] = min(point[i] + _STEP, high[i])
        down[i] = max(point[i] - _STEP, low[i])
        apart = up[i] - down[i]
        change = log_errors(np.exp(up)) - log_errors(np.exp(down))
        columns.append(change / apart if apart > 0 else np.zeros_like(change))
    return np.stack(columns, axis=1)


def _descend(
    log_errors: LogErrors, point: Array, low: Array, high: Array
) -> tuple[Array, Array, Array]:
    """Minimise over the logarithms of the constants, within bounds (Levenberg-Marquardt)."""
    errors = log_errors(np.exp(point))
    loss, damping = _loss(errors), 1e-2
    slopes = _derivatives(log_errors, point, low, high)
    for _ in range(_ROUNDS):
        scale = _weights(errors)
        normal = slopes.T @ (slopes * scale[:, None])
        gradient = slopes.T @ (errors * scale)
        better = False
        for _ in range(8):
            ridge = damping * (np.diag(normal) + 1e-9 * max(float(np.trace(normal)), 1e-12))
            step = np.linalg.solve(normal + np.diag(ridge), -gradient)
            next_point = np.clip(point + np.clip(step, -0.5, 0.5), low, high)
            next_errors = log_errors(np.exp(next_point))
            next_loss = _loss(next_errors)
            if np.isfinite(next_errors).all() and next_loss < loss * (1.0 - 1e-6):
                better = True
                break
            damping = min(damping * 4.0, 1e8)
        if not better:
            break
        gained = loss - next_loss
        point, errors, loss = next_point, next_errors, next_loss
        damping = max(damping / 5.0, 1e-6)
        if gained < 1e-5 * loss:
            break
        slopes = _derivatives(log_errors, point, low, high)
    return point, errors, slopes


def fit_constants(log_errors: LogErrors, constants: Sequence[Constant]) -> FitResult:
    """Fit constants to rows.

    Parameters
    ----------
    log_errors
        Returns ln(predicted / measured) of every row for values of the constants.
    constants
        The constants to fit, with start values and ranges.

    Examples
    --------
    >>> import numpy as np
    >>> size = np.array([1.0, 2.0, 4.0, 8.0])
    >>> measured = 3.0 + 2.0 * size
    >>> wanted = [Constant("start", 1.0, 0.1, 10.0), Constant("rate", 1.0, 0.1, 10.0)]
    >>> fit = fit_constants(lambda x: np.log((x[0] + x[1] * size) / measured), wanted)
    >>> fit.values.round(3).tolist()
    [3.0, 2.0]
    """
    low, high = (np.log([getattr(c, end) for c in constants]) for end in ("least", "most"))
    point = np.clip(np.log([c.start for c in constants]), low, high)
    point, errors, slopes = _descend(log_errors, point, low, high)
    names, rows = tuple(c.name for c in constants), len(errors)
    scale = _weights(errors)
    normal = slopes.T @ (slopes * scale[:, None])
    known = np.diag(normal) > 1e-9 * rows
    spread = np.full(len(names), np.inf)
    pairs: list[tuple[str, str]] = []
    if known.any():
        covariance = np.linalg.pinv(normal[np.ix_(known, known)])
        freedom = max(rows - int(known.sum()), 1)
        noise = float((scale * errors**2).sum()) / freedom
        deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
        spread[known] = 1.645 * np.sqrt(noise) * deviation
        alike = np.abs(covariance / np.outer(deviation, deviation))
        at = np.flatnonzero(known)
        pairs = [
            (names[at[i]], names[at[j]])
            for i in range(len(at))
            for j in range(i)
            if alike[i, j] > _COLLINEAR
        ]
    edge = (point - low < 1e-6) | (high - point < 1e-6)
    return FitResult(
        names=names,
        values=np.exp(point),
        low=np.exp(np.maximum(point - spread, low)),
        high=np.exp(np.minimum(point + spread, high)),
        at_bound=tuple(n for n, e, k in zip(names, edge, known, strict=True) if e and k),
        undetermined=tuple(n for n, k in zip(names, known, strict=True) if not k),
        collinear=tuple(pairs),
        errors=errors,
    )


def cross_validated_errors(
    log_errors: LogErrors, constants: Sequence[Constant], folds: int = 5
) -> Array:
    """Return ln(predicted / measured) of every row, predicted by a fit to the other folds.

    Rows are assigned to the folds in turn, in a fixed random order.
    """
    first = log_errors(np.array([c.start for c in constants]))
    fold = np.random.default_rng(0).permutation(len(first)) % folds
    unseen = np.empty(len(first))

    def seen_errors(values: Array) -> Array:
        errors: Array = log_errors(values)[seen]
        return errors

    for out in range(folds):
        seen = fold != out
        unseen[~seen] = log_errors(fit_constants(seen_errors, constants).values)[~seen]
    return unseen


@dataclass(frozen=True)
class FittedConstant:
    """One fitted constant with its confidence interval."""

    name: str
    before: float
    value: float
    low: float
    """Lower end of the constant's 90% interval; `high` is the upper end."""
    high: float
    note: str
    """Empty, or why the value should not be trusted on its own."""
    unit: str = ""


@dataclass(frozen=True)
class Calibrated:
    """A fitted chip or fabric."""

    what: str
    """``chip`` or ``fabric``."""
    constants: tuple[FittedConstant, ...]
    errors: dict[str, dict[str, float]]
    """By kind of row: their number, mean absolute errors before and after, and on left-out rows."""
    collinear: tuple[tuple[str, str], ...]
    """Pairs of constants that the rows cannot distinguish: only a combination of both is known."""
    document: dict[str, Any]
    """The chip or fabric as plain data."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "what": self.what,
            "constants": {c.name: {**vars(c)} for c in self.constants},
            "errors": self.errors,
            "collinear": [list(pair) for pair in self.collinear],
            self.what: self.document,
        }


def _by_kind(kinds: Array, parts: dict[str, Array]) -> dict[str, dict[str, float]]:
    """Return the number of rows and the mean absolute errors by kind of row."""
    sizes = {}
    for kind in dict.fromkeys(kinds.tolist()):
        at = kinds == kind
        means = {name: float(np.abs(np.expm1(e[at])).mean()) for name, e in parts.items()}
        sizes[kind] = {"rows": float(at.sum()), **means}
    return sizes


def calibrated(
    what: str,
    log_errors: LogErrors,
    constants: Sequence[Constant],
    units: Array,
    kinds: Array,
    described: Callable[[Array], dict[str, Any]],
) -> Calibrated:
    """Fit constants, cross-validate them and describe the result.

    Parameters
    ----------
    what
        ``chip`` or ``fabric``.
    log_errors, constants
        As for `fit_constants`.
    units
        Factor of each constant from its fitted value to the reported one.
    kinds
        Kind of each row; errors are summarised by kind.
    described
        Returns the chip or fabric as plain data for values of the constants.

    Raises
    ------
    InvalidInputError
        Where there are fewer than two rows for each constant.
    """
    start = np.array([c.start for c in constants])
    before = log_errors(start)
    if len(before) < _ROWS_PER_CONSTANT * len(constants):
        raise InvalidInputError(
            f"files: {len(before)} values for {len(constants)} constants are not accepted; "
            f"expected at least {int(_ROWS_PER_CONSTANT * len(constants))}"
        )
    fit = fit_constants(log_errors, constants)
    again = [
        Constant(c.name, float(v), c.least, c.most)
        for c, v in zip(constants, fit.values, strict=True)
    ]
    unseen = cross_validated_errors(log_errors, again)
    notes = dict.fromkeys(fit.at_bound, "at the edge of its range")
    notes |= dict.fromkeys(fit.undetermined, "no row depends on it: left as it was")
    errors = _by_kind(kinds, {"before": before, "fitted": fit.errors, "unseen": unseen})
    return Calibrated(
        what=what,
        constants=tuple(
            FittedConstant(n, b * u, v * u, low * u, high * u, notes.get(n, ""))
            for n, b, v, low, high, u in zip(
                fit.names, start, fit.values, fit.low, fit.high, units, strict=True
            )
        ),
        errors=errors,
        collinear=fit.collinear,
        document=described(fit.values),
    )


# ---- chips ----


def benchmark_script() -> str:
    """Return the text of a Python script that measures a GPU and needs PyTorch alone.

    It measures products, attention, vector operators and, started by torchrun, collectives, and
    writes files that `phaze_fast.validate` and `phaze-fast calibrate` read.

    Examples
    --------
    >>> "torch.distributed" in benchmark_script()
    True
    """
    return str(package_data(__package__, "gpu_benchmark.txt"))


_COSTLY = 15.0  # microseconds above which the cost of a vector function exceeds the launch


@dataclass(frozen=True)
class _Slot:
    """A constant to be fitted, as a field of the kernels' record."""

    field: str
    name: str
    """The constant's name in a chip's file."""
    least: float
    most: float
    unit: float = 1.0
    """Factor from the record's value to the file's."""

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
    """All measured times of all files, and the operators that were timed."""

    ops: Array
    owner: Array
    """Position of the measured time that each operator belongs to."""
    measured_s: Array
    other_s: Array
    """Seconds of each measured time that are not those of its operators."""
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


@cache
def _constants_of(kind: str) -> tuple[_Slot, ...]:
    """Return the constants that rows of a kind depend on, from ``data/chip_constants.yaml``."""
    rows = package_data(__package__, "chip_constants.yaml")[kind]
    return tuple(_Slot(**{"name": row["field"], **row}) for row in rows)


def _format_slots(dtype: str, rate: float) -> list[_Slot]:
    """Return the constants of products in a format that is not the chip's own."""
    return [
        replace(
            slot,
            name=f"formats.{dtype}.{slot.name}",
            unit=rate * slot.unit if slot.unit > 1.0 else slot.unit,
        )
        for slot in _constants_of("products")
        if slot.name in ("efficiency", "sustained_flops", "unit_overhead_s")
    ]


def _slots(
    tables: Sequence[Measurements], rows: _Rows, dtype: str, rate: float, base: Array
) -> list[_Slot]:
    """Return the constants that the measured times depend on."""
    if dtype not in ("bf16", "fp16"):
        return _format_slots(dtype, rate)
    kinds = {table.kind for table in tables}
    wanted: list[_Slot] = []
    if kinds & {"gemm", "format", "grouped"}:
        wanted += _constants_of("products")
        product = rows.ops[rows.ops["function"] == 0]
        if np.any((product["k"] | product["n"]) % 8):
            wanted += _constants_of("unaligned")
            if base["even_tiles"][0] or base["odd_tiles"][0]:
                wanted += _constants_of("unaligned_kernels")
    if "vector" in kinds:
        wanted += _constants_of("vector")
        long = rows.measured_s[rows.owner] > 1e-6 * _COSTLY
        for code in np.unique(rows.ops["function"][long]):
            name = _core.FUNCTIONS[int(code)]
            if int(code) >= 4 and name not in ("add", "multiply", "copy", "relu", "embedding"):
                wanted.append(_Slot(name, f"functions.{name}.ops_per_element", 1.0, 2000.0))
    if kinds & {"attention", "serving attention"}:
        wanted += _constants_of("attention")
    if "attention" in kinds:
        wanted += _constants_of("attention_backward")
    return wanted


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
        The chip to start from. Its cores, clock, memory and other constants are not changed.
    name
        Name of the result; by default the chip's name.

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
    if base["sustained_macs_per_s"][0] == 0.0:  # without a limit, the fit starts at the peak
        base["sustained_macs_per_s"] = chip.peak_flops() / 2.0
    slots = _slots(tables, rows, dtype, machine.precision.rate, base)
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

_RANGES = {  # ranges of the constants of a protocol, in seconds or as fractions
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
    """Return the constants that the rows depend on; they start at the tuning's values."""
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
        The fabric to start from. Its bandwidths, sizes and list of protocols are not changed.
    name
        Name of the result; by default the fabric's name.

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
