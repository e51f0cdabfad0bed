"""The command `show wafer`: wafers and spaces of wafers."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType

from phaze_fast.cli.output import Output, PresetName, fields, table
from phaze_fast.tables import picked
from phaze_fast.units import format_area, format_bandwidth, format_bytes, format_flops
from phaze_fast.wafer import WAFER_SPACES, WAFERS, Wafer, WaferSpace, load_wafer, wafer_totals
from phaze_fast.wafer.hardware.space import load_wafer_or_space


def _wafer_data(wafer: Wafer) -> dict[str, Any]:
    return {
        **wafer.model_dump(mode="json"),
        "grid": wafer.grid,
        "live_dies": wafer.dies,
        **picked(wafer, "all_dies", "link_bytes_per_s"),
        "tiers": [vars(tier) for tier in wafer.tiers()],
        "memory_bytes": wafer.memory_bytes,
        "peak_flops": {kind: wafer.peak_flops(kind) for kind in wafer.chip.tensor_core.rates},
        **picked(wafer, "area_mm2", "die_yield", "expected_dead"),
        **vars(wafer_totals(wafer)),
    }


def _wafer_fields(wafer: Wafer) -> list[RenderableType]:
    x, y = (format_bandwidth(rate) for rate in wafer.link_bytes_per_s)
    totals, cap_w = wafer_totals(wafer), wafer.power_cap_w
    each = " for each wafer" if wafer.wafer_count > 1 else ""
    watts = f"{totals.die_peak_w:,.0f} W a die, {totals.peak_w / 1e3:,.1f} kW in all{each}"
    watts += "" if cap_w is None else f"; {cap_w / 1e3:,.1f} kW can be supplied"
    sums = "; they sum" if wafer.switch is not None and wafer.switch.sums else ""
    rates = ", ".join(
        f"{kind} {format_flops(wafer.peak_flops(kind))}" for kind in wafer.chip.tensor_core.rates
    )
    pairs = [
        ("wafer", str(wafer).partition(": ")[2]),
        ("die", str(wafer.chip)),
        ("links", f"{x} along rows, {y} along columns, per direction")
        if wafer.switch is None
        else ("switches", f"{x} from each die, per direction{sums}"),
        ("peak", f"{rates}{each}"),
    ]
    for tier in wafer.tiers():
        rate = format_bandwidth(tier.bandwidth_bytes_per_s)
        pairs.append((f"{tier.name} of a die", f"{format_bytes(tier.capacity_bytes)} at {rate}"))
    pairs += [
        ("area used", f"{format_area(wafer.area_mm2)}{each}"),
        ("yield of a die", f"{wafer.die_yield:.1%}; {wafer.expected_dead:.1f} dead expected"),
        ("peak power", watts),
        ("cost", f"about {totals.cost_usd:,.0f} dollars of silicon, memory and assembly{each}"),
        *(("source", source) for source in wafer.sources),
        ("note", wafer.notes),
    ]
    return [fields(wafer.name, pairs), wafer.die_map()]


def _emit_wafer_space(space: WaferSpace, output: Output) -> None:
    feasible, broken = space.wafers()
    counts = {"points": space.grid_size, "feasible": len(feasible), "broken": broken}
    pairs = [
        ("points", f"{space.grid_size:,}, of which {len(feasible):,} meet all rules"),
        ("broken rules", ", ".join(f"{rule} {n:,}" for rule, n in broken.items()) or "none"),
        ("base", str(space.base)),
        *((field, ", ".join(map(str, values))) for field, values in space.axes.items()),
    ]
    output.emit(lambda: {**space.to_dict(), **counts}, lambda: [fields(space.name, pairs)])


def show_wafer(name: PresetName = None, *, output: Output) -> None:
    """List wafers, or show one, or a space of them.

    Example: phaze-fast show wafer dojo-tile-like
    """
    if name is None:
        wafers = [load_wafer(name) for name in WAFERS.names]
        rows = [[wafer.name, str(wafer.dies), str(wafer).partition(": ")[2]] for wafer in wafers]
        spaces = f"Spaces of wafers: {', '.join(WAFER_SPACES.names)}"
        output.emit(
            lambda: [_wafer_data(wafer) for wafer in wafers],
            lambda: [table("Wafers", ["wafer", "dies>", "what it is"], rows), spaces],
        )
        return
    wafer = load_wafer_or_space(name)
    if isinstance(wafer, WaferSpace):
        _emit_wafer_space(wafer, output)
        return
    output.emit(lambda: _wafer_data(wafer), lambda: _wafer_fields(wafer))
