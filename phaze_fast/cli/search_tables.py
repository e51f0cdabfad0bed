"""Tables of what a search of chips found, for the terminal."""

from __future__ import annotations

from rich.console import RenderableType

from phaze_fast.cli.output import fields, is_narrow, table
from phaze_fast.cli.robust import information_tables, portfolio_fields, robust_fields
from phaze_fast.explore import Design, fullest_text, share_text
from phaze_fast.report.result import SearchResult
from phaze_fast.units import format_bandwidth, format_bytes, format_time

__all__ = ["search_tables"]

_STEPS = {
    "rules": "broken rules (heads, batch)",
    "memory": "no plan fits",
    "roofline": "roofline of the operators",
    "mapped": "operators mapped on the chip",
    "schedule_bound": "bound of the layer schedules",
    "scheduled": "schedules, bound of the step",
}


def _hbm(design: Design) -> str:
    hbm = design.chip.hbm
    rate = format_bandwidth(hbm.bandwidth_bytes_per_s) if hbm is not None else ""
    return f"{format_bytes(design.hbm_bytes)}, {rate}"


def _chip_cells(design: Design) -> list[str]:
    tensor, vector, chip = design.chip.tensor_core, design.chip.vector_core, design.chip
    return [
        f"{tensor.count} x {tensor.width}x{tensor.depth}",
        f"{vector.count} x {vector.lanes}",
        format_bytes(chip.buffer.capacity_bytes),
        _hbm(design),
        f"{design.area_mm2:.2f}",
    ]


def _top(found: SearchResult) -> RenderableType:
    rows = []
    for k, design in enumerate(found.top):
        plans = [f"tp {p.tp} pp {p.pp} dp {p.dp} mb {p.micro_batch}" for p in design.plans.values()]
        cells = [str(k + 1), *_chip_cells(design), format_time(design.time_s)]
        energy = f"{design.energy_j:,.0f}"
        said = "; ".join(plans[:2]) + (" ..." if len(plans) > 2 else "")
        rows.append([*cells, f"{design.samples_per_s:,.1f}", energy, said, design.bottleneck])
    columns = [">", "tensor cores", "vector", "buffer>", "HBM>", "mm2>", "step>", "samples/s>"]
    columns += ["J/step>", "plan", "bottleneck"]
    if is_narrow():
        shown = [0, 1, 2, 3, 6, 9]
        columns, rows = [columns[k] for k in shown], [[row[k] for k in shown] for row in rows]
    several = "; times and rates are geometric means, joules are sums" if _several(found) else ""
    proven = "" if found.complete else "only the bound below is proven, not that these are the best"
    return table(f"The best chips{several}", columns, rows, proven)


def _several(found: SearchResult) -> bool:
    return len(found.problems) > 1


def _certificate(found: SearchResult) -> RenderableType:
    outcome = found.outcome
    proof = "proven optimal" if found.status == "optimal" else found.status
    pairs = [
        ("status", proof),
        ("points", f"{outcome.points:,} (chip, HBM, micro-batch, tensor-parallel width)"),
    ]
    for step, count in outcome.counts.items():
        if step in _STEPS and count:
            pairs.append((f"settled by {_STEPS[step]}", f"{count:,}"))
    pairs.append(("placed exactly", f"{outcome.counts['placed']:,}"))
    if outcome.counts["open"]:
        pairs.append(("still open", f"{outcome.counts['open']:,}"))
    if outcome.unproven:
        pairs.append(("layer schedules not proven", f"in {outcome.unproven:,} pairs"))
    if outcome.bound < float("inf"):
        pairs.append(("bound and gap", f"{found.amount(outcome.bound)}, {outcome.gap:.3%}"))
    kept = ", kept from an earlier run" if outcome.recalled else ""
    pairs.append(("seconds", f"{outcome.seconds:.1f}{kept}"))
    return fields("The certificate", pairs)


def _best(found: SearchResult) -> RenderableType:
    best = found.best
    pairs = [("chip", str(best.chip)), ("area", f"{best.area_mm2:.2f} mm2")]
    if found.objective != "time":
        pairs.append((f"least {found.objective}", found.amount(best.value)))
    for name, plan in best.plans.items():
        pairs.append((f"{name}", str(plan)))
        pairs.append(("", f"{share_text(plan)}; memory {fullest_text(plan, best.hbm_bytes)}"))
    return fields("The best chip and plan", pairs, best.chip.calibration.note)


def _baselines(found: SearchResult) -> RenderableType:
    rows = []
    for item in found.baselines.values():
        step = format_time(item["time_s"]) if item["time_s"] is not None else "none"
        gain = f"{item['speedup']:.2f}x" if item["speedup"] is not None else "-"
        looked = f"{item['evaluations']:,}" if item["evaluations"] else "-"
        rows.append([item["title"], step, gain, looked, item["plan_text"], item["note"]])
    columns = ["what", "step>", "ours is>", "chips>", "plan", "note"]
    return table("Baselines", columns, rows)


def search_tables(found: SearchResult) -> list[RenderableType]:
    """Give the best chips, the front, the baselines and the proof."""
    parts = [_best(found), _top(found)]
    if found.outcome.objectives:
        parts.append(_front(found))
    if found.baselines:
        parts.append(_baselines(found))
    if found.sensitivity:
        parts.append(_sensitivity(found))
    if found.portfolio is not None:
        parts.append(portfolio_fields(found.portfolio))
    if found.robust is not None:
        parts.append(robust_fields(found.robust))
    if found.information is not None:
        parts += information_tables(found.information)
    return [*parts, _certificate(found)]


def _front(found: SearchResult) -> RenderableType:
    front = found.pareto()
    shown = [
        [
            format_time(row["time_s"]),
            f"{row['area_mm2']:.2f}",
            f"{row['energy_j']:,.0f}",
            format_bytes(row["hbm_bytes"]),
            f"{row['cost_usd']:,.0f}",
            row["chip_text"].split(": ", 1)[-1].split(", HBM")[0],
        ]
        for row in front.rows[:12]
    ]
    sure = "" if front.proven else ", not proven"
    title = f"The front of {', '.join(front.objectives)}: {len(front)} points{sure}"
    caption = "" if len(front) <= 12 else f"{len(front) - 12} more with --json or --parquet"
    columns = ["step>", "mm2>", "J/step>", "HBM>", "dollars>", "chip"]
    return table(title, columns, shown, caption)


def _sensitivity(found: SearchResult) -> RenderableType:
    rows = [
        [
            f"{item['what']} x {item['factor']:g}",
            format_time(item["time_s"]) if item["time_s"] is not None else "none",
            f"{item['change']:+.1%}" if item["change"] is not None else "-",
            "same" if item["same_chip"] else item["chip_text"].split(": ", 1)[-1],
        ]
        for item in found.sensitivity
    ]
    area = found.space.spec.area
    caption = "Where an area is scaled, the limit stays."
    if area is not None and area.follows_base:
        caption = "Where an area is scaled, the limit is what the space's base chip then takes."
    columns = ["what", "step>", "change>", "best chip"]
    return table("If something were different", columns, rows, caption)
