"""Single operators: their records from their shapes, and their costs on one chip with a breakdown.

Graphs contain their operators; these functions are for a single operator. Bytes are counted as in
graphs: every array once, in bf16 unless another format is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.cost.machines import Machines, in_format, machines, on_tensor_cores
from phaze_fast.errors import InvalidInputError, check_one_of
from phaze_fast.hardware import Accelerator, EnergyTable, presets
from phaze_fast.hardware.chip import Dtype
from phaze_fast.opgraph.graph import KINDS, UNITS
from phaze_fast.tables import Array
from phaze_fast.units import format_bytes, format_time

_ELEMENT_BYTES = 2.0
VECTOR_FUNCTIONS = _core.FUNCTIONS[4 : _core.FIRST_CONVOLUTION]
_CODES = {name: code for code, name in enumerate(_core.FUNCTIONS)}
_ARRAYS_READ = {"add": 2, "multiply": 2}
_ADAM_BYTES = 14.0  # parameter and two moments read and written, gradient read
_ID_BYTES = 8.0


def _is_whole(array: Array) -> bool:
    if not array.size or array.dtype.kind == "i":
        return True
    return array.dtype.kind == "u" and int(array.max()) < 2**63


def _whole(name: str, values: Any) -> Array:
    """Whole numbers as int64, or an error that names the argument."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.zeros(1)
    if not _is_whole(array):
        raise InvalidInputError(
            f"{name}: dtype {array.dtype} is not accepted; expected whole numbers below 2^63"
        )
    return array.astype(np.int64)


def _columns(**lists: Any) -> list[Array]:
    """Columns of whole numbers of one length."""
    columns = [_whole(name, values) for name, values in lists.items()]
    if any(column.ndim != 1 or len(column) != len(columns[0]) for column in columns):
        raise InvalidInputError(f"{', '.join(lists)}: expected lists of one length")
    return columns


def product_ops(shapes: Sequence[tuple[int, int, int, int]] | Array) -> Array:
    """Matrix products as operator records.

    Parameters
    ----------
    shapes
        (b, m, k, n) of each: b products of m x k by k x n.

    Examples
    --------
    >>> int(product_ops([(1, 512, 1024, 2048)])["n"][0])
    2048
    """
    try:
        table = np.asarray(shapes)
    except (ValueError, OverflowError):
        table = np.zeros(1)
    if table.size and (table.ndim != 2 or table.shape[1] != 4):
        raise InvalidInputError("shapes: expected rows of four whole numbers (b, m, k, n)")
    table = _whole("shapes", table).reshape(-1, 4)
    ops = np.zeros(len(table), dtype=_core.OPERATOR_DTYPE)
    ops["kind"], ops["unit"] = KINDS.index("gemm"), UNITS.index("TC")
    for column, name in enumerate("bmkn"):
        ops[name] = table[:, column]
    b, m, k, n = (ops[name].astype(np.float64) for name in "bmkn")
    ops["flops"] = 2.0 * b * m * k * n
    ops["collective"] = -1
    return ops


def vector_ops(function: str, rows: Sequence[int], cols: Sequence[int]) -> Array:
    """Vector operators of one function as operator records.

    Parameters
    ----------
    function
        One of `VECTOR_FUNCTIONS`, such as ``gelu`` or ``layernorm-backward``; for ``adamw`` rows
        are parameters and there is one column.
    rows, cols
        Rows and columns of each operator.

    Examples
    --------
    >>> float(vector_ops("add", [4], [8])["read_bytes"][0])
    128.0
    """
    check_one_of("function", function, VECTOR_FUNCTIONS)
    heights, widths = _columns(rows=rows, cols=cols)
    ops = np.zeros(len(heights), dtype=_core.OPERATOR_DTYPE)
    ops["unit"], ops["function"] = UNITS.index("VC"), _CODES[function]
    ops["b"], ops["m"], ops["n"] = 1, heights, widths
    ops["collective"] = -1
    elements = ops["m"].astype(np.float64) * ops["n"]
    base = function.removesuffix("-backward")
    arrays = float(_ARRAYS_READ.get(base, 1))
    read, write = arrays * _ELEMENT_BYTES * elements, _ELEMENT_BYTES * elements
    if base == "embedding":
        read = read + _ID_BYTES * ops["m"]
    if base == "adamw":
        read, write = (_ADAM_BYTES - 6.0) * elements, 6.0 * elements
    elif base != function:  # gradients read inputs and output gradient
        read, write = read + write, read
    ops["read_bytes"], ops["write_bytes"] = read, write
    return ops


def attention_ops(
    pairs: Sequence[int],
    seq: Sequence[int],
    width: Sequence[int],
    causal: Sequence[bool],
    backward: bool = False,
) -> Array:
    """Fused attention of `pairs` heads of `seq` tokens as operator records.

    Examples
    --------
    >>> float(attention_ops([16], [512], [64], [False])["flops"][0])
    1073741824.0
    """
    heads, lengths, sizes = _columns(pairs=pairs, seq=seq, width=width)
    ops = np.zeros(len(heads), dtype=_core.OPERATOR_DTYPE)
    name = "attention-backward" if backward else "attention"
    ops["kind"], ops["unit"] = KINDS.index(name), UNITS.index("TC+VC")
    ops["function"] = _CODES[name]
    ops["b"], ops["m"], ops["n"], ops["k"] = heads, lengths, lengths, sizes
    ops["causal"], ops["collective"] = causal, -1
    one = _ELEMENT_BYTES * ops["b"].astype(np.float64) * ops["m"] * ops["k"]
    ops["flops"] = (5.0 if backward else 2.0) * one * ops["n"]
    ops["read_bytes"], ops["write_bytes"] = (4.0 * one, 3.0 * one) if backward else (3.0 * one, one)
    return ops


# ---- costs on one chip ----


@dataclass(frozen=True)
class OperatorCost:
    """One operator on one chip, on all its cores."""

    time_s: float
    """Seconds of the best mapping."""
    one_core_s: float
    """Seconds of the best mapping on one core."""
    bound_s: float
    """Lower bound of the seconds of all mappings."""
    limit: str
    """The bottleneck: compute, port, buffer, hbm, power, vector or launch."""
    compute_s: float
    """Seconds that the systolic arrays alone take; likewise for each resource below."""
    port_s: float
    buffer_s: float
    hbm_s: float
    power_s: float
    vector_s: float
    fill_s: float
    overhead_s: float
    """Start and end of units of work, on top of compute or port."""
    fixed_s: float
    """Launches and the reduction of a split."""
    dispatch_s: float
    """Host overhead of an operator that is timed alone; part of `time_s`."""
    compute_cycles: float
    """Cycles of one core's array."""
    macs: float
    """Multiply-accumulates of the operator."""
    port_bytes: float
    """Bytes through the ports of all cores."""
    buffer_bytes: float
    """Bytes through the shared buffer; multicast data is counted once."""
    hbm_bytes: float
    """Bytes to and from HBM."""
    utilization: float
    """Share of the chip's rated peak (of its vector units, for a vector operator)."""
    energy_j: float
    """Joules."""
    dataflow: str
    """os, ws or is; empty for vector operators."""
    block: tuple[int, int]
    """Outputs (m, n) a core works on at a time."""
    split: int
    """Parts the inner dimension is cut into."""
    stays: str
    """Which tiles stay in the buffer: outputs, inputs, weights or none."""
    tiles: tuple[int, int]
    """Number of parts along each side of the matrix whose tiles stay in the buffer."""
    extrapolated: bool
    """Whether shape or format lie outside what the chip's constants were fitted on."""

    def __str__(self) -> str:
        return (
            f"{format_time(self.time_s)} ({self.limit}-bound, {self.utilization:.0%} of peak; "
            f"bound {format_time(self.bound_s)}), HBM {format_bytes(self.hbm_bytes)}"
        )


def _outside(chip: Accelerator, op: Any, dtype: Dtype) -> bool:
    fitted = chip.tuning.fitted_range
    if fitted is None:
        return False
    if dtype not in ("bf16", "fp16"):
        return True
    if 0 < op["function"] < _core.FIRST_CONVOLUTION:
        return False
    return any(
        not low <= op[name] <= high
        for name, (low, high) in (("m", fitted.m), ("k", fitted.k), ("n", fitted.n))
    )


def _of_record(
    chip: Accelerator, dtype: Dtype, static_w: float, op: Any, row: Any, one_core_s: float
) -> OperatorCost:
    dispatch_s = chip.tuning.dispatch_s
    seconds, macs = float(row["time_s"]) + dispatch_s, float(row["macs"])
    # Relative to the rated peak, whose clock may differ from that of running operators.
    used = 2.0 * macs / (seconds * chip.peak_flops(dtype)) if macs else float(row["utilization"])
    flow, order = int(row["dataflow"]), int(row["order"])
    same = {name: float(row[name]) for name in _SAME}
    return OperatorCost(
        **same,
        time_s=seconds,
        one_core_s=float(one_core_s) + dispatch_s,
        bound_s=float(row["bound_s"]) + dispatch_s,
        limit=_core.LIMITS[int(row["limit"])],
        dispatch_s=dispatch_s,
        macs=macs,
        utilization=used,
        energy_j=float(row["energy_j"]) + static_w * dispatch_s,
        dataflow=_core.DATAFLOWS[flow] if flow >= 0 else "",
        block=(int(row["block_m"]), int(row["block_n"])),
        split=int(row["split"]),
        stays=_core.ORDERS[order] if order >= 0 else "",
        tiles=(int(row["tiles_i"]), int(row["tiles_j"])),
        extrapolated=_outside(chip, op, dtype),
    )


_RESOURCES = ("compute", "port", "buffer", "hbm", "power", "vector", "fill", "overhead", "fixed")
_SAME = (
    *(f"{name}_s" for name in _RESOURCES),
    *("compute_cycles", "port_bytes", "buffer_bytes", "hbm_bytes"),
)
"""Fields that `OperatorCost` takes from the kernel's record as they are."""


def operator_costs(
    chip: Accelerator | str,
    ops: Array,
    dtype: Dtype = "bf16",
    energy: EnergyTable | None = None,
) -> list[OperatorCost]:
    """Return the costs of single operators on one chip, with their breakdown.

    Times include the host overhead of an isolated operator, where the chip's constants have one.

    Parameters
    ----------
    chip
        The chip.
    ops
        Records such as `operators.product_ops` makes, or those of a graph.
    dtype
        Number format of the operands.
    energy
        Joules of events; by default the table of the chip's node.

    Raises
    ------
    InvalidInputError
        Where an operator is malformed or too large, or the chip does not multiply the format.

    Examples
    --------
    >>> from phaze_fast.cost.operators import vector_ops
    >>> from phaze_fast.hardware import presets
    >>> operator_costs(presets.chip("h200"), vector_ops("add", [65536], [2048]))[0].limit
    'hbm'
    """
    chip = presets.chip(chip) if isinstance(chip, str) else chip
    machine: Machines = machines(chip, dtype, energy=energy)
    if machine.stacked is not None:
        raise InvalidInputError(
            f"chip: {chip.name} has stacked DRAM, with which whole layers are priced, not single "
            "operators"
        )
    prices = machine.prices
    ops = in_format(ops, machine.precision)
    rows = _core.op_costs(ops, *machine.arguments, False, prices, machine.static_w, 1)
    if (other := machine.other) is not None:
        again = _core.op_costs(ops, *other.arguments, False, other.prices, machine.static_w, 1)
        free, first = on_tensor_cores(ops), rows
        quicker = free & (again["time_s"] < first["time_s"])
        rows = np.where(quicker, again, first)
        least = np.minimum(first["bound_s"], again["bound_s"])
        rows["bound_s"] = np.where(free, least, first["bound_s"])
    for op, row in zip(ops, rows, strict=True):
        if row["status"] != 0:
            shape = ", ".join(f"{name} {int(op[name])}" for name in "bmkn")
            raise InvalidInputError(f"{shape}: {_core.STATUS_SENTENCES[int(row['status'])]}")
    one_core_s = _core.op_times(ops, *machine.arguments, True, 1)
    return [
        _of_record(chip, dtype, float(machine.static_w[0]), *pair)
        for pair in zip(ops, rows, one_core_s, strict=True)
    ]


def _check_whole(**sizes: object) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise InvalidInputError(f"{name}: {size!r} is not accepted; expected a whole number")


def gemm(
    chip: Accelerator | str,
    m: int,
    k: int,
    n: int,
    b: int = 1,
    dtype: Dtype = "bf16",
) -> OperatorCost:
    """Cost of b products of m x k by k x n on a chip, by the best mapping.

    Parameters
    ----------
    chip
        The chip, or its name.
    m, k, n
        Rows, inner dimension and columns.
    b
        Number of independent products.
    dtype
        Number format of the operands.

    Raises
    ------
    InvalidInputError
        Where a dimension is below 1 or the product is too large.

    Examples
    --------
    >>> cost = gemm("tpuv4", 4096, 4096, 4096)
    >>> cost.limit, cost.utilization > 0.9, cost.bound_s <= cost.time_s
    ('compute', True, True)
    """
    _check_whole(b=b, m=m, k=k, n=n)
    return operator_costs(chip, product_ops([(b, m, k, n)]), dtype)[0]


def array_cycles(
    m: int, k: int, n: int, rows: int, cols: int, dataflow: str = "os", overlapped: bool = False
) -> int:
    """Cycles of one product of m x k by k x n on one array.

    Parameters
    ----------
    m, k, n
        Rows, inner dimension and columns of the product.
    rows, cols
        Rows and columns of the array.
    dataflow
        ``os``, ``ws`` or ``is``: outputs, weights or inputs stay in the array.
    overlapped
        Whether a fold loads while the previous one drains. If not, the result is one more than
        SCALE-Sim v3 reports, which numbers cycles from 0.

    Raises
    ------
    InvalidInputError
        Where a size is below 1 or above 2^40, or the count exceeds 2^63 - 1.

    Examples
    --------
    >>> array_cycles(512, 1024, 1024, 128, 128)
    40896
    >>> array_cycles(512, 1024, 1024, 128, 128, overlapped=True)
    33022
    """
    check_one_of("dataflow", dataflow, _core.DATAFLOWS)
    _check_whole(m=m, k=k, n=n, rows=rows, cols=cols)
    try:
        sizes = np.array([[m], [k], [n], [rows], [cols]], dtype=np.int64)
    except OverflowError:
        raise InvalidInputError("a size is too large; expected at most 2^40") from None
    flow = np.array([_core.DATAFLOWS.index(dataflow)], dtype=np.int32)
    counts, states = _core.array_cycles(
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], flow, overlapped, 1
    )
    if states[0] != 0:
        product = f"{m}x{k}x{n} on {rows}x{cols}"
        raise InvalidInputError(f"{product}: {_core.STATUS_SENTENCES[int(states[0])]}")
    return int(counts[0])
