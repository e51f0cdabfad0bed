"""The commands `show chip`, `show interconnect` and `show space`."""

from __future__ import annotations

from typing import Annotated, Any

from rich.console import RenderableType

from phaze_fast.cli.output import Output, PresetName, at_least, fields, table
from phaze_fast.hardware import (
    FULL_AREA,
    Accelerator,
    ArchitectureSpace,
    area,
    power_batch,
    presets,
)
from phaze_fast.units import (
    format_area,
    format_bandwidth,
    format_bytes,
    format_count,
    format_flops,
)

# ---- chips and interconnects ----


def _chip_row(chip: Accelerator) -> list[str]:
    hbm, tensor, buffer = chip.hbm, chip.tensor_core, chip.buffer.capacity_bytes
    memory = ["-", "-"]
    if hbm:
        memory = [format_bytes(hbm.capacity_bytes), format_bandwidth(hbm.bandwidth_bytes_per_s)]
    cores = [f"{tensor.count:,} x {tensor.width}x{tensor.depth}"]
    cores.append(f"{chip.vector_core.count:,} x {chip.vector_core.lanes}")
    first = [chip.name, format_flops(chip.peak_flops()), *memory, chip.calibration.state]
    return [*first, *cores, format_bytes(buffer) if buffer else "-", f"{chip.clock_hz / 1e9:g} GHz"]


_CHIP_COLUMNS = ["chip", "bf16>", "HBM>", "bandwidth>", "times"]
_CHIP_COLUMNS += ["tensor>", "vector>", "buffer>", "clock>"]


def _chip_data(chip: Accelerator) -> dict[str, Any]:
    terms = dict(vars(area(chip, FULL_AREA)))
    extrapolated = terms.pop("extrapolated")
    return {
        **chip.model_dump(mode="json"),
        "peak_flops": {kind: chip.peak_flops(kind) for kind in chip.tensor_core.rates},
        "template_area_mm2": terms,
        "template_area_extrapolated": extrapolated,
        "template_peak_power_w": float(power_batch([chip], terms=FULL_AREA)[0]),
        "calibration": chip.calibration.to_dict(),
    }


def _chip_fields(chip: Accelerator) -> list[RenderableType]:
    estimate = area(chip, FULL_AREA)
    rates = ", ".join(
        f"{kind} {format_flops(chip.peak_flops(kind))}" for kind in chip.tensor_core.rates
    )
    published = estimate.tensor_mm2 + estimate.vector_mm2 + estimate.buffer_mm2
    parts = ", ".join(
        f"{name} {getattr(estimate, f'{name}_mm2'):.2f}" for name in ("tensor", "vector", "buffer")
    )
    others = f"network {estimate.network_mm2:.2f}, HBM {estimate.hbm_mm2:.2f}"
    tensor, vector, hbm = chip.tensor_core, chip.vector_core, chip.hbm
    memory = ""
    if hbm:
        rate = format_bandwidth(hbm.bandwidth_bytes_per_s)
        memory = f"{format_bytes(hbm.capacity_bytes)} at {rate}, {hbm.stacks} stacks"
    pairs = [
        ("tensor cores", f"{tensor.count:,} of {tensor.width}x{tensor.depth}"),
        ("vector cores", f"{vector.count:,} of {vector.lanes} lanes"),
        ("clock", f"{chip.clock_hz / 1e9:g} GHz"),
        ("peak", rates),
        ("buffer", format_bytes(chip.buffer.capacity_bytes)),
        ("buffer bandwidth", f"{chip.buffer.bytes_per_cycle:g} B/cycle"),
        ("HBM", memory),
        ("template area", f"{format_area(published)} ({parts})"),
        ("with network and HBM PHYs", f"{format_area(estimate.total_mm2)} (+ {others})"),
        ("template peak power", f"{power_batch([chip], terms=FULL_AREA)[0]:.0f} W"),
        ("published die area", format_area(chip.die_area_mm2) if chip.die_area_mm2 else ""),
        ("published power", f"{chip.power_w:g} W" if chip.power_w else ""),
        ("usual fabric", chip.usual_fabric or ""),
        ("times", chip.calibration.note or "fitted to measurements of this chip"),
        *(("source", source) for source in (*chip.sources, *chip.tuning.sources)),
        ("note", chip.notes),
    ]
    return [fields(chip.name, pairs)]


def show_chip(name: PresetName = None, *, output: Output) -> None:
    """List chips, or show one in full with its sources.

    Example: phaze-fast show chip h100
    """
    if name is not None:
        chip = presets.chip(name)
        output.emit(lambda: _chip_data(chip), lambda: _chip_fields(chip))
        return
    chips = [presets.chip(name) for name in presets.chip_names()]
    output.emit(
        lambda: [_chip_data(chip) for chip in chips],
        lambda: [table("Chips", _CHIP_COLUMNS, [_chip_row(chip) for chip in chips])],
    )


def show_interconnect(name: PresetName = None, *, output: Output) -> None:
    """List interconnects, or show one in full with its sources.

    Example: phaze-fast show interconnect dgx-h100
    """
    if name is not None:
        fabric = presets.fabric(name)
        pairs = [("wiring", str(fabric).partition(": ")[2])]
        pairs += [("source", source) for source in fabric.sources]
        pairs.append(("note", fabric.notes))
        document = fabric.model_dump(mode="json")
        output.emit(lambda: document, lambda: [fields(fabric.name, pairs)])
        return
    fabrics = [presets.fabric(name) for name in presets.fabric_names()]
    rows = [[fabric.name, fabric.kind, str(fabric).partition(": ")[2]] for fabric in fabrics]
    output.emit(
        lambda: [fabric.model_dump(mode="json") for fabric in fabrics],
        lambda: [table("Interconnects", ["interconnect", "kind", "wiring"], rows)],
    )


# ---- spaces of chips ----

_SPACES = {
    "published": "the PHAZE paper's grid, with 32, 64 or 80 GiB of HBM",
    "full-area": "the same with network and HBM PHYs counted",
    "every-term": "every area counted, a power cap, a package; HBM, links and dies as axes",
    "tpuv4-area": "chips as large as a TPUv4",
}


def show_space(
    name: PresetName = None,
    limit: Annotated[int, at_least(0, help="How many chips to list, largest first.")] = 10,
    *,
    output: Output,
) -> None:
    """List spaces of chips, or count the chips of one.

    Example: phaze-fast show space tpuv4-area --limit 5
    """
    if name is None:
        rows = [[space, text] for space, text in _SPACES.items()]
        output.emit(lambda: list(_SPACES), lambda: [table("Spaces", ["space", "chips"], rows)])
        return
    space = ArchitectureSpace.load(name)
    sizes = space.area_mm2
    largest = sorted(range(len(space)), key=lambda i: (-float(sizes[i]), i))[:limit]
    span = {"min": float(sizes.min()), "max": float(sizes.max())} if len(space) else None

    def document() -> dict[str, Any]:
        return {
            "name": space.spec.name,
            "digest": space.digest,
            "grid_points": space.grid_size,
            "points": len(space),
            "area_mm2": span,
            "chips": [
                {"index": int(space.index[i]), "area_mm2": float(sizes[i]), **space[i].to_dict()}
                for i in largest
            ],
        }

    def tables() -> list[RenderableType]:
        covers = f"{span['min']:.2f} to {span['max']:.2f} mm2" if span else "none"
        summary = (
            f"{space.spec.name}: {format_count(len(space))} chips of a grid of "
            f"{format_count(space.grid_size)}; area {covers}"
        )
        rows = [[*_chip_row(space[i]), f"{sizes[i]:.2f}"] for i in largest]
        return [summary, table(f"The {len(largest)} largest", [*_CHIP_COLUMNS, "mm2>"], rows)]

    output.emit(document, tables)
