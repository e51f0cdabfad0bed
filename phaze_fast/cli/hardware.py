"""The commands that show hardware: chips, fabrics, wafers, spaces, checked files and schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import AsJson, ToFile, emit, fields, table
from phaze_fast.documents import read_document, to_yaml
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.hardware import (
    FULL_AREA,
    Accelerator,
    ArchitectureSpace,
    area,
    power_batch,
    presets,
)
from phaze_fast.schemas import KINDS, parse_as, schema
from phaze_fast.units import format_area, format_bandwidth, format_bytes, format_count, format_flops
from phaze_fast.wafer import (
    WAFER_SPACES,
    WAFERS,
    Wafer,
    WaferSpace,
    load_wafer,
    load_wafer_space,
    wafer_totals,
)

__all__ = ["add_commands"]


def _chip_row(chip: Accelerator) -> list[str]:
    hbm = chip.hbm
    return [
        chip.name,
        f"{chip.tensor_core.count:,} x {chip.tensor_core.width}x{chip.tensor_core.depth}",
        f"{chip.vector_core.count:,} x {chip.vector_core.lanes}",
        format_bytes(chip.buffer.capacity_bytes) if chip.buffer.capacity_bytes else "-",
        format_bytes(hbm.capacity_bytes) if hbm else "-",
        format_bandwidth(hbm.bandwidth_bytes_per_s) if hbm else "-",
        f"{chip.clock_hz / 1e9:g} GHz",
        format_flops(chip.peak_flops()),
        chip.calibration.state,
    ]


_CHIP_COLUMNS = ["chip", "tensor>", "vector>", "buffer>", "HBM>", "bandwidth>", "clock>", "bf16>"]
_CHIP_COLUMNS += ["times"]


def _chip_data(chip: Accelerator) -> dict[str, Any]:
    estimate = area(chip, FULL_AREA)
    return {
        **chip.model_dump(mode="json"),
        "peak_flops": {kind: chip.peak_flops(kind) for kind in chip.tensor_core.rates},
        "template_area_mm2": {
            name: value for name, value in vars(estimate).items() if name != "extrapolated"
        },
        "template_area_extrapolated": estimate.extrapolated,
        "template_peak_power_w": float(power_batch([chip], terms=FULL_AREA)[0]),
        "calibration": chip.calibration.to_dict(),
    }


def _show_chip(chip: Accelerator) -> list[RenderableType]:
    estimate = area(chip, FULL_AREA)
    rates = ", ".join(
        f"{kind} {format_flops(chip.peak_flops(kind))}" for kind in chip.tensor_core.rates
    )
    published = estimate.tensor_mm2 + estimate.vector_mm2 + estimate.buffer_mm2
    pairs = [
        (
            "tensor cores",
            f"{chip.tensor_core.count:,} of {chip.tensor_core.width}x{chip.tensor_core.depth}",
        ),
        ("vector cores", f"{chip.vector_core.count:,} of {chip.vector_core.lanes} lanes"),
        ("clock", f"{chip.clock_hz / 1e9:g} GHz"),
        ("peak", rates),
        ("buffer", format_bytes(chip.buffer.capacity_bytes)),
        ("buffer bandwidth", f"{chip.buffer.bytes_per_cycle:g} B/cycle"),
    ]
    if chip.hbm:
        rate = format_bandwidth(chip.hbm.bandwidth_bytes_per_s)
        pairs.append(
            ("HBM", f"{format_bytes(chip.hbm.capacity_bytes)} at {rate}, {chip.hbm.stacks} stacks")
        )
    pairs += [
        (
            "template area",
            f"{format_area(published)} (tensor {estimate.tensor_mm2:.2f}, vector "
            f"{estimate.vector_mm2:.2f}, buffer {estimate.buffer_mm2:.2f})",
        ),
        (
            "with network and HBM PHYs",
            f"{format_area(estimate.total_mm2)} (+ network "
            f"{estimate.network_mm2:.2f}, HBM {estimate.hbm_mm2:.2f})",
        ),
        ("template peak power", f"{power_batch([chip], terms=FULL_AREA)[0]:.0f} W"),
    ]
    if chip.die_area_mm2:
        pairs.append(("published die area", format_area(chip.die_area_mm2)))
    if chip.power_w:
        pairs.append(("published power", f"{chip.power_w:g} W"))
    if chip.usual_fabric:
        pairs.append(("usual fabric", chip.usual_fabric))
    pairs.append(("times", chip.calibration.note or "fitted to measurements of this chip"))
    pairs += [("source", source) for source in (*chip.sources, *chip.tuning.sources)]
    if chip.notes:
        pairs.append(("note", chip.notes))
    return [fields(chip.name, pairs)]


def chips(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, or a .yaml or .json file; without it all presets are listed."
        ),
    ] = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """List the chips that come with the package, or show one in full with its sources."""
    if name is not None:
        chip = presets.chip(name)
        emit(lambda: _chip_data(chip), lambda: _show_chip(chip), as_json, to_file)
        return
    found = [presets.chip(n) for n in presets.chip_names()]
    rows = [_chip_row(chip) for chip in found]
    emit(
        lambda: [_chip_data(c) for c in found],
        lambda: [table("Chips", _CHIP_COLUMNS, rows)],
        as_json,
        to_file,
    )


def fabrics(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, or a .yaml or .json file; without it all presets are listed."
        ),
    ] = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """List the fabrics that come with the package, or show one in full with its sources."""
    if name is not None:
        fabric = presets.fabric(name)
        pairs = [("wiring", str(fabric).partition(": ")[2])]
        pairs += [("source", source) for source in fabric.sources]
        pairs += [("note", fabric.notes)] if fabric.notes else []
        plain = fabric.model_dump(mode="json")
        emit(lambda: plain, lambda: [fields(fabric.name, pairs)], as_json, to_file)
        return
    found = [presets.fabric(n) for n in presets.fabric_names()]
    rows = [[f.name, f.kind, str(f).partition(": ")[2]] for f in found]
    emit(
        lambda: [f.model_dump(mode="json") for f in found],
        lambda: [table("Fabrics", ["fabric", "kind", "wiring"], rows)],
        as_json,
        to_file,
    )


def _wafer_data(wafer: Wafer) -> dict[str, Any]:
    return {
        **wafer.model_dump(mode="json"),
        "grid": wafer.grid,
        "live_dies": wafer.dies,
        "link_bytes_per_s": wafer.link_bytes_per_s,
        "tiers": [vars(tier) for tier in wafer.tiers()],
        "memory_bytes": wafer.memory_bytes,
        "peak_flops": {kind: wafer.peak_flops(kind) for kind in wafer.chip.tensor_core.rates},
        "area_mm2": wafer.area_mm2,
        "die_yield": wafer.die_yield,
        "expected_dead": wafer.expected_dead,
        **wafer_totals(wafer).to_dict(),
    }


def _power(wafer: Wafer) -> str:
    totals = wafer_totals(wafer)
    said = f"{totals.die_peak_w:,.0f} W a die, {totals.peak_w / 1e3:,.1f} kW in all"
    if wafer.power_cap_w is None:
        return said
    return f"{said}; {wafer.power_cap_w / 1e3:,.1f} kW can be supplied"


def _sums(wafer: Wafer) -> str:
    return "; they sum" if wafer.switch is not None and wafer.switch.sums else ""


def _show_wafer(wafer: Wafer) -> list[RenderableType]:
    x, y = (format_bandwidth(rate) for rate in wafer.link_bytes_per_s)
    rates = ", ".join(
        f"{kind} {format_flops(wafer.peak_flops(kind))}" for kind in wafer.chip.tensor_core.rates
    )
    pairs = [
        ("wafer", str(wafer).partition(": ")[2]),
        ("die", str(wafer.chip)),
        ("links", f"{x} along rows, {y} along columns, per direction")
        if wafer.switch is None
        else ("switches", f"{x} from each die, per direction{_sums(wafer)}"),
        ("peak", rates),
    ]
    pairs += [
        (
            f"{tier.name} of a die",
            f"{format_bytes(tier.capacity_bytes)} at "
            f"{format_bandwidth(tier.bandwidth_bytes_per_s)}",
        )
        for tier in wafer.tiers()
    ]
    pairs += [
        ("area used", format_area(wafer.area_mm2)),
        ("yield of a die", f"{wafer.die_yield:.1%}; {wafer.expected_dead:.1f} dead expected"),
        ("peak power", _power(wafer)),
        (
            "cost",
            f"about {wafer_totals(wafer).cost_usd:,.0f} dollars of silicon, memory and assembly",
        ),
        *(("source", source) for source in wafer.sources),
    ]
    if wafer.notes:
        pairs.append(("note", wafer.notes))
    return [fields(wafer.name, pairs), wafer.die_map()]


def _wafer_space(name: str) -> WaferSpace | None:
    """Look a space of wafers up, by preset or file; None where it is something else."""
    if name in WAFER_SPACES.names:
        return load_wafer_space(name)
    if name in WAFERS.names or not name.endswith((".yaml", ".yml", ".json")):
        return None
    data = read_document(name)
    is_space = isinstance(data, dict) and "axes" in data
    return WaferSpace.from_dict(data, source=name) if is_space else None


def _show_wafer_space(found: WaferSpace, as_json: bool, to_file: Path | None) -> None:
    feasible, broken = found.wafers()
    counts = {"points": found.grid_size, "feasible": len(feasible), "broken": broken}
    pairs = [
        ("points", f"{found.grid_size:,}, of which {len(feasible):,} meet all rules"),
        ("broken rules", ", ".join(f"{rule} {n:,}" for rule, n in broken.items()) or "none"),
        ("base", str(found.base)),
        *((field, ", ".join(map(str, values))) for field, values in found.axes.items()),
    ]
    emit(
        lambda: {**found.to_dict(), **counts},
        lambda: [fields(found.name, pairs)],
        as_json,
        to_file,
    )


def wafers(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, or a .yaml or .json file; without it all presets are listed."
        ),
    ] = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """List the wafers that come with the package, or show one, or a space of them."""
    if name is not None:
        listed = _wafer_space(name)
        if listed is not None:
            _show_wafer_space(listed, as_json, to_file)
            return
        wafer = load_wafer(name)
        emit(lambda: _wafer_data(wafer), lambda: _show_wafer(wafer), as_json, to_file)
        return
    found = [load_wafer(n) for n in WAFERS.names]
    rows = [[wafer.name, str(wafer.dies), str(wafer).partition(": ")[2]] for wafer in found]
    emit(
        lambda: [_wafer_data(wafer) for wafer in found],
        lambda: [
            table("Wafers", ["wafer", "dies>", "what it is"], rows),
            f"Spaces of wafers: {', '.join(WAFER_SPACES.names)}",
        ],
        as_json,
        to_file,
    )


def space(
    name: Annotated[
        str, typer.Argument(help="published, full-area, tpuv4-area, or a .yaml or .json file.")
    ] = "tpuv4-area",
    limit: Annotated[int, typer.Option(min=0, help="How many chips to list, largest first.")] = 10,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Enumerate a space of chips: how many pass its limits, and the largest of them."""
    found = ArchitectureSpace.load(name)
    sizes = found.area_mm2
    top = sorted(range(len(found)), key=lambda i: (-float(sizes[i]), i))[:limit]
    span = {"min": float(sizes.min()), "max": float(sizes.max())} if len(found) else None

    def data() -> dict[str, Any]:
        return {
            "name": found.spec.name,
            "digest": found.digest,
            "grid_points": found.grid_size,
            "points": len(found),
            "area_mm2": span,
            "chips": [
                {"index": int(found.index[i]), "area_mm2": float(sizes[i]), **found[i].to_dict()}
                for i in top
            ],
        }

    def human() -> list[RenderableType]:
        covers = f"{span['min']:.2f} to {span['max']:.2f} mm2" if span else "none"
        summary = (
            f"{found.spec.name}: {format_count(len(found))} chips of a grid of "
            f"{format_count(found.grid_size)}; area {covers}"
        )
        rows = [[*_chip_row(found[i]), f"{sizes[i]:.2f}"] for i in top]
        return [summary, table(f"The {len(top)} largest", [*_CHIP_COLUMNS, "mm2>"], rows)]

    emit(data, human, as_json, to_file)


def check(
    file: Annotated[Path, typer.Argument(help="A .yaml or .json file.")],
    kind: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(KINDS)}; by default guessed.")
    ] = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Validate a file and print what was understood, with every default filled in."""
    data = read_document(file)
    kind = _guessed(data) if kind is None else kind
    record = parse_as(kind, data, str(file))
    plain = record.model_dump(mode="json")
    understood = {"kind": kind, "record": plain}
    emit(
        lambda: understood,
        lambda: [f"{file}: a valid {kind}", to_yaml(plain).rstrip()],
        as_json,
        to_file,
    )


def _guessed(data: object) -> str:
    keys = set(data) if isinstance(data, dict) else set()
    if "layers" in keys:
        return "model"
    if "die" in keys:
        return "wafer"
    axes = data.get("axes") if isinstance(data, dict) else None
    if isinstance(axes, dict) and any(str(field).startswith("die.") for field in axes):
        return "wafer-space"
    if keys & {"axes", "base"}:
        return "space"
    if keys & {"devices", "fabric"}:
        return "cluster"
    if keys & {"kind", "tiers", "dims", "bandwidth_bytes_per_s", "link_bandwidth_bytes_per_s"}:
        return "fabric"
    return "software" if keys & {"host_s", "attention"} else "chip"


def show_schema(
    kind: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(KINDS)}; none gives all.")
    ] = None,
    as_json: AsJson = False,  # noqa: ARG001 - every command takes it; this one has no other form
    to_file: ToFile = None,
) -> None:
    """Print the JSON Schema of the files this program reads."""
    if kind is not None and kind not in KINDS:
        raise InvalidInputError(f"kind: {kind!r} is not accepted; {nearest(kind, KINDS)}")
    data = schema(kind) if kind else {name: schema(name) for name in KINDS}
    emit(lambda: data, list, as_json=True, to_file=to_file)


def add_commands(app: typer.Typer) -> None:
    """Register this file's commands."""
    app.command()(chips)
    app.command()(fabrics)
    app.command()(wafers)
    app.command()(space)
    app.command()(check)
    app.command("schema")(show_schema)
