"""The command `estimate`: times of matrix products on a chip, or of a collective on a cluster."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, cast

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import Output, table
from phaze_fast.cost import OperatorCost, array_cycles, collective, operator_costs, product_ops
from phaze_fast.errors import InvalidInputError, check_one_of, not_accepted
from phaze_fast.hardware import Accelerator, Cluster, Fabric, presets
from phaze_fast.hardware.chip import Dtype
from phaze_fast.tables import picked
from phaze_fast.units import (
    format_bandwidth,
    format_bytes,
    format_flops,
    format_scaled,
    format_time,
    parse_quantity,
)

_SHAPE = re.compile(r"[0-9]{1,13}(?:x[0-9]{1,13}){2,3}")
_DATAFLOWS = ("os", "ws", "is")
_DTYPES = ("bf16", "fp16", "fp8", "fp32", "tf32")

_ELEMENT_MM2 = 760.041386e-6  # one multiplier of the PHAZE template (Wang et al., ICML 2024)

Shape = tuple[int, int, int, int]


def _shape(text: str) -> Shape:
    """Read [Bx]MxKxN as (b, m, k, n)."""
    cleaned = text.strip().lower().replace("*", "x")
    if not _SHAPE.fullmatch(cleaned):
        raise not_accepted("--gemm", text, "[Bx]MxKxN, for example 2048x12288x49152")
    sizes = [int(part) for part in cleaned.split("x")]
    if len(sizes) == 3:
        sizes = [1, *sizes]
    if not all(1 <= size <= 2**40 for size in sizes):
        raise InvalidInputError(f"--gemm: {text!r}: a dimension must be from 1 to 2^40")
    return sizes[0], sizes[1], sizes[2], sizes[3]


def _array(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,7})x([0-9]{1,7})", text.strip().lower())
    sides = tuple(int(part) for part in match.groups()) if match else ()
    if len(sides) != 2 or not all(1 <= side <= 2**20 for side in sides):
        raise not_accepted("--array", text, "rows x columns, for example 128x128")
    return sides[0], sides[1]


def _lone_array(rows: int, cols: int) -> Accelerator:
    """Return a chip of one array at 1 GHz whose memories are unlimited: only compute takes time."""
    area_mm2 = rows * cols * _ELEMENT_MM2
    return Accelerator.from_dict(
        {
            "name": f"array-{rows}x{cols}",
            "clock_hz": 1e9,
            "die_area_mm2": area_mm2,
            "tensor_core": {
                "count": 1,
                "width": cols,
                "depth": rows,
                "local_buffer_bytes": 2**50,
                "rates": dict.fromkeys(_DTYPES, 1.0),
            },
            "vector_core": {"count": 1, "lanes": 2**20},
            "buffer": {
                "capacity_bytes": 2**50,
                "bytes_per_cycle": 1e18,
                "port_bytes_per_cycle": 1e18,
            },
        }
    )


def _restricted(chip: Accelerator, dataflow: str) -> Accelerator:
    if not dataflow:
        return chip
    if chip.tuning.blocks and dataflow != "os":
        raise InvalidInputError(
            f"--dataflow: {dataflow!r} is not accepted for {chip.name}; its blocks run "
            "output-stationary (os)"
        )
    return chip.replace(tuning=chip.tuning.replace(dataflows=(dataflow,)))


def _compute_only(chip: Accelerator, shape: Shape, dataflow: str) -> tuple[str, int]:
    """Return the best dataflow and the cycles that a systolic simulator reports for one core."""
    b, m, k, n = shape
    core = chip.tensor_core
    choices = (dataflow,) if dataflow else _DATAFLOWS
    counted = {flow: b * array_cycles(m, k, n, core.depth, core.width, flow) for flow in choices}
    best = min(counted, key=lambda flow: counted[flow])
    return best, counted[best] - 1  # simulators number cycles from zero


def _row(shape: Shape, compute_cycles: float, **values: Any) -> dict[str, Any]:
    """Return a row of the JSON output; other programs rely on its first fields, so they stay."""
    cycles = int(compute_cycles) if float(compute_cycles).is_integer() else compute_cycles
    names = ("time_s", "compute_cycles", "buffer_bytes", "hbm_bytes", "bound", "dataflow")
    row = dict(zip("bmkn", shape, strict=True)) | dict.fromkeys([*names, "utilization", "energy_j"])
    return row | {"compute_cycles": cycles} | values


def _compute_row(chip: Accelerator, shape: Shape, dataflow: str) -> dict[str, Any]:
    flow, cycles = _compute_only(chip, shape, dataflow)
    core = chip.tensor_core
    return _row(
        shape,
        cycles,
        time_s=(cycles + 1) / chip.clock_hz,
        bound="compute",
        dataflow=flow,
        utilization=math.prod(shape) / ((cycles + 1) * core.depth * core.width),
    )


def _cost_row(chip: Accelerator, shape: Shape, cost: OperatorCost) -> dict[str, Any]:
    values = picked(cost, *_COST_FIELDS) | {"block": list(cost.block)}
    values |= picked(cost, "split", "stays") | {"tiles": list(cost.tiles)}
    values |= {"extrapolated": cost.extrapolated, "calibration": chip.calibration.to_dict()}
    return _row(shape, cost.compute_cycles, bound=cost.limit, **values)


_COST_FIELDS = (
    *("time_s", "buffer_bytes", "hbm_bytes", "dataflow", "utilization", "energy_j", "one_core_s"),
    *("bound_s", "compute_s", "port_s", "buffer_s", "hbm_s", "power_s", "fill_s", "overhead_s"),
    *("fixed_s", "dispatch_s", "port_bytes"),
)


_JOULES = [(1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"), (1e-9, "nJ")]
_TERMS = {name: name for name in ("compute", "port", "buffer", "hbm", "power")}
_TERMS |= {"units": "overhead", "fill": "fill", "launch": "fixed", "dispatch": "dispatch"}
"""Terms of a product's time; the fields of `OperatorCost` with their seconds, less ``_s``."""

# ---- the roofline in text ----

_WIDTH, _HEIGHT = 58, 10


def _roofline(chip: Accelerator, shape: Shape, cost: OperatorCost, dtype: Dtype) -> str:
    """Draw a product under the chip's roofline, with logarithmic axes."""
    if chip.hbm is None:
        return ""
    peak, bandwidth = chip.peak_flops(dtype), chip.hbm.bandwidth_bytes_per_s
    flops = 2.0 * math.prod(shape)
    intensity, reached = flops / max(cost.hbm_bytes, 1.0), flops / cost.time_s
    ridge = peak / bandwidth
    left = math.log10(min(intensity, ridge)) - 1.0
    right = math.log10(max(intensity, ridge)) + 1.0
    top = math.log10(peak) + 0.25
    bottom = min(math.log10(reached), math.log10(10**left * bandwidth)) - 0.25

    def column(value: float) -> int:
        return round((math.log10(value) - left) / (right - left) * (_WIDTH - 1))

    def line(value: float) -> int:
        return round((top - math.log10(value)) / (top - bottom) * (_HEIGHT - 1))

    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for x in range(_WIDTH):
        at = 10 ** (left + (right - left) * x / (_WIDTH - 1))
        grid[line(min(peak, at * bandwidth))][x] = "-" if at >= ridge else "/"
    grid[line(reached)][column(intensity)] = "o"
    rows = ["".join(row).rstrip() for row in grid]
    above = (
        f"  {format_flops(peak)} {dtype} peak, {format_bandwidth(bandwidth)}; FLOP/s over FLOP/B"
    )
    below = f"  o {format_flops(reached)} at {intensity:.4g} FLOP/B (ridge at {ridge:.4g})"
    return "\n".join([above, *("  |" + row for row in rows), "  +" + "-" * _WIDTH, below])


def _breakdown(
    chip: Accelerator, shape: Shape, cost: OperatorCost, dtype: Dtype, calibration: str
) -> list[RenderableType]:
    """Lay out one product: its time, its bottleneck, and how the chip was calibrated."""
    b, m, k, n = shape
    name = f"{m}x{k}x{n}" if b == 1 else f"{b} x {m}x{k}x{n}"
    seconds_of = {name: getattr(cost, f"{field}_s") for name, field in _TERMS.items()}
    rows = [
        [term, format_time(seconds), "<- binds" if term == cost.limit else ""]
        for term, seconds in seconds_of.items()
        if seconds > 1e-9 * cost.time_s
    ]
    block = f"{cost.block[0]}x{cost.block[1]} blocks, {cost.dataflow}"
    split = f", k in {cost.split} parts" if cost.split > 1 else ""
    tiles = f"{cost.stays} stay in the buffer, cut {cost.tiles[0]} x {cost.tiles[1]}"
    if cost.stays == "nothing":
        tiles = "nothing fits the buffer"
    moved = f"buffer {format_bytes(cost.buffer_bytes)}, ports {format_bytes(cost.port_bytes)}"
    if not chip.hbm:
        tiles = "nothing to tile: the chip has no HBM"
    lines = [
        f"{name} on {chip.name}: {cost}",
        f"{moved}; {format_scaled(cost.energy_j, _JOULES)}; on one core "
        f"{format_time(cost.one_core_s)}",
        f"mapping: {block}{split}; {tiles}",
    ]
    if cost.extrapolated:
        lines.append("an extrapolation: not what the chip's constants were fitted on")
    if calibration:
        lines.append(calibration)
    parts: list[RenderableType] = ["\n".join(lines), table("", ["term", "time>", ""], rows)]
    chart = _roofline(chip, shape, cost, dtype)
    return [*parts, chart, ""] if chart else [*parts, ""]


def _compute_table(chip: Accelerator, rows: list[dict[str, Any]]) -> RenderableType:
    core = chip.tensor_core
    laid_out = []
    for row in rows:
        shape = "x".join(str(row[name]) for name in "bmkn")
        used = f"{row['utilization']:.1%}"
        laid_out.append([shape, row["dataflow"], f"{row['compute_cycles']:,}", used])
    title = (
        f"one array of {core.depth} rows and {core.width} columns, compute alone, folds in a row, "
        "cycles numbered from zero"
    )
    return table(title, ["b x m x k x n", "dataflow", "cycles>", "utilization>"], laid_out)


# ---- the command ----


@dataclass(frozen=True)
class Products:
    """Matrix products."""

    gemms: Annotated[list[str] | None, typer.Option("--gemm", metavar="[Bx]MxKxN")] = None
    """A matrix product of MxK by KxN, such as 2048x12288x49152; B of them with BxMxKxN. May be
    given several times."""
    chip: str | None = None
    """The chip: a preset (`phaze-fast show chip` lists them) or a file."""
    array: Annotated[str | None, typer.Option(metavar="RxC")] = None
    """One systolic array of R rows and C columns, in place of a chip."""
    dataflow: str = ""
    """What stays in the array: os (outputs), ws (weights) or is (inputs); by default the best."""
    compute_only: bool = False
    """Count the array's cycles alone, as systolic simulators do, without memory."""
    dtype: str = "bf16"
    """Number format: bf16, fp16, fp8, fp32 or tf32."""

    def check(self) -> None:
        """Refuse options that do not go together, and unknown names."""
        if (self.chip is None) == (self.array is None):
            both = "none was" if self.chip is None else "both were"
            raise InvalidInputError(f"--chip, --array: expected one of them; {both} given")
        check_one_of("--dataflow", self.dataflow or _DATAFLOWS[0], _DATAFLOWS)
        check_one_of("--dtype", self.dtype, _DTYPES)


@dataclass(frozen=True)
class Collective:
    """A collective."""

    operation: Annotated[str | None, typer.Option("--collective")] = None
    """all-reduce, reduce-scatter, all-gather, all-to-all, broadcast or point-to-point."""
    size: Annotated[str | None, typer.Option("--bytes")] = None
    """Size of the vector that each device has, or of the message, such as '1 GiB'."""
    ranks: int | None = None
    """Devices in the group."""
    fabric: str | None = None
    """The interconnect: a preset (`phaze-fast show interconnect` lists them) or a file."""
    stride: int = 1
    """Distance in rank order between neighbours of the group."""
    devices: int | None = None
    """Devices of the whole cluster; a torus or mesh is cut to size."""


def estimate(products: Products, exchange: Collective, output: Output) -> None:
    """Time matrix products on a chip, or a collective.

    Matrix products are timed by their best mapping, collectives by every algorithm.

    Examples: phaze-fast estimate --chip h200 --gemm 2048x12288x49152

    phaze-fast estimate --collective all-reduce --bytes '1 GiB' --ranks 64 --fabric dgx-a100
    """
    if (not products.gemms) == (exchange.operation is None):
        raise InvalidInputError("--gemm, --collective: expected one of the two")
    if exchange.operation is not None:
        _estimate_collective(exchange, exchange.operation, output)
        return
    products.check()
    shapes = [_shape(text) for text in products.gemms or ()]
    if products.array is not None:
        chip, calibration = _lone_array(*_array(products.array)), ""  # ideal
    else:
        chip = presets.chip(products.chip or "")
        calibration = chip.calibration.note
    if products.compute_only:
        rows = [_compute_row(chip, shape, products.dataflow) for shape in shapes]
        output.emit(lambda: rows, lambda: [_compute_table(chip, rows)])
        return
    chip = _restricted(chip, products.dataflow)
    _estimate_products(chip, shapes, cast("Dtype", products.dtype), calibration, output)


def _estimate_products(
    chip: Accelerator, shapes: list[Shape], dtype: Dtype, calibration: str, output: Output
) -> None:
    costs = list(zip(shapes, operator_costs(chip, product_ops(shapes), dtype), strict=True))

    def tables() -> list[RenderableType]:
        parts = (_breakdown(chip, shape, cost, dtype, calibration) for shape, cost in costs)
        return [part for product in parts for part in product]

    output.emit(lambda: [_cost_row(chip, shape, cost) for shape, cost in costs], tables)


def _estimate_collective(exchange: Collective, operation: str, output: Output) -> None:
    if exchange.size is None or exchange.ranks is None or exchange.fabric is None:
        needed = {"--bytes": exchange.size, "--ranks": exchange.ranks, "--fabric": exchange.fabric}
        option = next(option for option, value in needed.items() if value is None)
        raise InvalidInputError(f"{option}: missing; --collective needs it")
    try:
        payload = parse_quantity(exchange.size, "bytes")
    except InvalidInputError as error:
        raise InvalidInputError(f"--bytes: {error}") from None
    wired = presets.fabric(exchange.fabric)
    where: Fabric | Cluster = wired
    if exchange.devices is not None:
        where = Cluster(devices=exchange.devices, fabric=wired)
        wired = where.fabric
    cost = collective(where, operation, payload, exchange.ranks, exchange.stride)

    def tables() -> list[RenderableType]:
        rows = [
            [name, format_time(time_s), f"{time_s / cost.bound_s:.2f}x" if cost.bound_s else "-"]
            for name, time_s in cost.alternatives.items()
        ]
        caption = (
            f"bound: {format_time(cost.bound_s)}, the bytes a rank must send over all its ports"
        )
        columns = ["algorithm", "time>", "over bound>"]
        return [str(wired), str(cost), table("", columns, rows, caption)] if rows else [str(cost)]

    output.emit(lambda: {"fabric": wired.name, **vars(cost)}, tables)
