"""The command `estimate`: times of operators."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, cast

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import AsJson, ToFile, emit, table
from phaze_fast.cost import (
    OperatorCost,
    array_cycles,
    operator_costs,
    product_ops,
)
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.hardware import Accelerator, presets
from phaze_fast.hardware.chip import Dtype
from phaze_fast.units import format_bandwidth, format_bytes, format_flops, format_time

__all__ = ["add_commands"]

_SHAPE = re.compile(r"[0-9]{1,13}(?:x[0-9]{1,13}){2,3}")
_DATAFLOWS = ("os", "ws", "is")
_DTYPES = ("bf16", "fp16", "fp8", "fp32", "tf32")

_ELEMENT_MM2 = 760.041386e-6  # one multiplier of the PHAZE template (Wang et al., ICML 2024)

Shape = tuple[int, int, int, int]


def _shape(text: str) -> Shape:
    """Read [Bx]MxKxN as (b, m, k, n)."""
    cleaned = text.strip().lower().replace("*", "x")
    if not _SHAPE.fullmatch(cleaned):
        raise InvalidInputError(
            f"--gemm: {text!r} is not accepted; expected [Bx]MxKxN, for example 2048x12288x49152"
        )
    sizes = [int(part) for part in cleaned.split("x")]
    if len(sizes) == 3:
        sizes = [1, *sizes]
    if not all(1 <= size <= 2**40 for size in sizes):
        raise InvalidInputError(f"--gemm: {text!r}: a dimension must be from 1 to 2^40")
    return sizes[0], sizes[1], sizes[2], sizes[3]


def _array(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,7})x([0-9]{1,7})", text.strip().lower())
    sides = tuple(int(part) for part in found.groups()) if found else ()
    if len(sides) != 2 or not all(1 <= side <= 2**20 for side in sides):
        raise InvalidInputError(
            f"--array: {text!r} is not accepted; expected rows x columns, for example 128x128"
        )
    return sides[0], sides[1]


def _lone_array(rows: int, cols: int) -> Accelerator:
    """One array that nothing starves: the compute model and no more, at 1 GHz."""
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
                "rates": {"bf16": 1.0, "fp16": 1.0, "fp8": 1.0, "fp32": 1.0, "tf32": 1.0},
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
    """Dataflow and cycles that a systolic simulator reports for one core, batches in a row."""
    b, m, k, n = shape
    core = chip.tensor_core
    choices = (dataflow,) if dataflow else _DATAFLOWS
    counted = {flow: b * array_cycles(m, k, n, core.depth, core.width, flow) for flow in choices}
    best = min(counted, key=lambda flow: counted[flow])
    return best, counted[best] - 1  # simulators number cycles from zero


def _compute_row(chip: Accelerator, shape: Shape, dataflow: str) -> dict[str, Any]:
    b, m, k, n = shape
    flow, cycles = _compute_only(chip, shape, dataflow)
    core = chip.tensor_core
    return {
        "b": b,
        "m": m,
        "k": k,
        "n": n,
        "time_s": (cycles + 1) / chip.clock_hz,
        "compute_cycles": cycles,
        "buffer_bytes": None,
        "hbm_bytes": None,
        "bound": "compute",
        "dataflow": flow,
        "utilization": b * m * k * n / ((cycles + 1) * core.depth * core.width),
        "energy_j": None,
    }


def _cost_row(chip: Accelerator, shape: Shape, cost: OperatorCost) -> dict[str, Any]:
    cycles = cost.compute_cycles
    named = dict(zip("bmkn", shape, strict=True))
    return {
        **named,
        "time_s": cost.time_s,
        "compute_cycles": int(cycles) if cycles.is_integer() else cycles,
        "buffer_bytes": cost.buffer_bytes,
        "hbm_bytes": cost.hbm_bytes,
        "bound": cost.limit,
        "dataflow": cost.dataflow,
        "utilization": cost.utilization,
        "energy_j": cost.energy_j,
        "one_core_s": cost.one_core_s,
        "bound_s": cost.bound_s,
        "compute_s": cost.compute_s,
        "port_s": cost.port_s,
        "buffer_s": cost.buffer_s,
        "hbm_s": cost.hbm_s,
        "power_s": cost.power_s,
        "fill_s": cost.fill_s,
        "overhead_s": cost.overhead_s,
        "fixed_s": cost.fixed_s,
        "dispatch_s": cost.dispatch_s,
        "port_bytes": cost.port_bytes,
        "block": list(cost.block),
        "split": cost.split,
        "stays": cost.stays,
        "tiles": list(cost.tiles),
        "extrapolated": cost.extrapolated,
        "calibration": chip.calibration.to_dict(),
    }


def _joules(joules: float) -> str:
    for scale, unit in ((1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ")):
        if joules >= scale:
            return f"{joules / scale:.4g} {unit}"
    return f"{joules / 1e-9:.4g} nJ"


# ---- the roofline in text ----

_WIDTH, _HEIGHT = 58, 10


def _roofline(chip: Accelerator, shape: Shape, cost: OperatorCost, dtype: Dtype) -> str:
    """Where a product lies under the chip's roofline, both axes logarithmic."""
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
    chip: Accelerator, shape: Shape, cost: OperatorCost, dtype: Dtype, said: str
) -> list[RenderableType]:
    """Lay one product out: what it takes, why, and what is said of the chip's times."""
    b, m, k, n = shape
    name = f"{m}x{k}x{n}" if b == 1 else f"{b} x {m}x{k}x{n}"
    terms = [
        ("compute", cost.compute_s),
        ("port", cost.port_s),
        ("buffer", cost.buffer_s),
        ("hbm", cost.hbm_s),
        ("power", cost.power_s),
    ]
    terms += [
        ("units", cost.overhead_s),
        ("fill", cost.fill_s),
        ("launch", cost.fixed_s),
        ("dispatch", cost.dispatch_s),
    ]
    rows = [
        [term, format_time(seconds), "<- binds" if term == cost.limit else ""]
        for term, seconds in terms
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
        f"{moved}; {_joules(cost.energy_j)}; on one core {format_time(cost.one_core_s)}",
        f"mapping: {block}{split}; {tiles}",
    ]
    if cost.extrapolated:
        lines.append("an extrapolation: not what the chip's constants were fitted on")
    if said:
        lines.append(said)
    parts: list[RenderableType] = ["\n".join(lines), table("", ["term", "time>", ""], rows)]
    chart = _roofline(chip, shape, cost, dtype)
    return [*parts, chart, ""] if chart else [*parts, ""]


def show_estimate(
    gemms: Annotated[
        list[str],
        typer.Option(
            "--gemm",
            metavar="[Bx]MxKxN",
            help="A matrix product of MxK by KxN, such as 2048x12288x49152; B of them with "
            "BxMxKxN. May be given several times.",
        ),
    ],
    chip: Annotated[
        str | None,
        typer.Option(help="The chip: a preset (`phaze-fast chips` lists them) or a file."),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="RxC", help="One systolic array of R rows and C columns, in place of a chip."
        ),
    ] = None,
    dataflow: Annotated[
        str,
        typer.Option(
            help="What stays in the array: os (outputs), ws (weights) or is (inputs); by "
            "default the best."
        ),
    ] = "",
    compute_only: Annotated[
        bool,
        typer.Option(
            "--compute-only",
            help="Count the array's cycles alone, as systolic simulators do, without memory.",
        ),
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="Number format: bf16, fp16, fp8, fp32 or tf32.")
    ] = "bf16",
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Time matrix products on a chip by the best mapping, with the breakdown behind it."""
    if (chip is None) == (array is None):
        given = "none was" if chip is None else "both were"
        raise InvalidInputError(f"--chip, --array: expected one of them; {given} given")
    if dataflow and dataflow not in _DATAFLOWS:
        raise InvalidInputError(
            f"--dataflow: {dataflow!r} is not accepted; {nearest(dataflow, _DATAFLOWS)}"
        )
    if dtype not in _DTYPES:
        raise InvalidInputError(f"--dtype: {dtype!r} is not accepted; {nearest(dtype, _DTYPES)}")
    shapes = [_shape(text) for text in gemms]
    asked = _lone_array(*_array(array)) if array is not None else presets.chip(chip or "")
    if compute_only:
        rows = [_compute_row(asked, shape, dataflow) for shape in shapes]
        emit(lambda: rows, lambda: [_compute_table(asked, rows)], as_json, to_file)
        return
    asked = _restricted(asked, dataflow)
    number_format = cast("Dtype", dtype)
    costs = operator_costs(asked, product_ops(shapes), number_format)

    pairs = list(zip(shapes, costs, strict=True))
    said = asked.calibration.note if array is None else ""  # a lone array is ideal by intent

    def human() -> list[RenderableType]:
        parts = (_breakdown(asked, shape, cost, number_format, said) for shape, cost in pairs)
        return [part for lines in parts for part in lines]

    emit(lambda: [_cost_row(asked, *pair) for pair in pairs], human, as_json, to_file)


def _compute_table(chip: Accelerator, rows: list[dict[str, Any]]) -> RenderableType:
    core = chip.tensor_core
    laid_out = [
        [
            "x".join(str(row[name]) for name in "bmkn"),
            row["dataflow"],
            f"{row['compute_cycles']:,}",
            f"{row['utilization']:.1%}",
        ]
        for row in rows
    ]
    title = (
        f"one array of {core.depth} rows and {core.width} columns, compute alone, folds in a row, "
        "cycles numbered from zero"
    )
    return table(title, ["b x m x k x n", "dataflow", "cycles>", "utilization>"], laid_out)


def add_commands(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("estimate")(show_estimate)
