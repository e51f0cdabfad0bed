"""Numbers and records of a search in words and units for people."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

from phaze_fast.units import (
    format_area,
    format_bandwidth,
    format_bytes,
    format_count,
    format_flops,
    format_time,
)

__all__ = [
    "NOTHING",
    "TIMES",
    "area",
    "bandwidth",
    "chip_facts",
    "chip_text",
    "cost",
    "count",
    "energy",
    "is_number",
    "objective",
    "percent",
    "plan_of",
    "plan_text",
    "rate",
    "ratio",
    "seconds",
    "size",
]

NOTHING = "\N{EN DASH}"
"""Stands where a value is missing."""
TIMES = "\N{MULTIPLICATION SIGN}"

Data = dict[str, Any]


def is_number(value: object) -> TypeGuard[float]:
    """Whether something is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _said(value: Any, how: Callable[[Any], str]) -> str:
    return how(value) if is_number(value) else NOTHING


def seconds(value: Any) -> str:
    """Say a time; long ones in minutes and hours too."""

    def how(number: float) -> str:
        if number >= 7200:
            return f"{number / 3600:.3g} h"
        return f"{number / 60:.3g} min" if number >= 300 else format_time(number)

    return _said(value, how)


def size(value: Any) -> str:
    """Say a number of bytes."""
    return _said(value, format_bytes)


def bandwidth(value: Any) -> str:
    """Say bytes per second."""
    return _said(value, format_bandwidth)


def area(value: Any) -> str:
    """Say an area."""
    return _said(value, lambda number: format_area(number).replace("mm2", "mm²"))


def count(value: Any) -> str:
    """Say how many."""
    return _said(value, lambda number: format_count(round(number)))


def rate(value: Any) -> str:
    """Say how many a second."""
    return _said(value, lambda number: f"{number:,.0f}" if number >= 1000 else f"{number:.4g}")


def energy(value: Any) -> str:
    """Say an energy."""

    def how(number: float) -> str:
        for scale, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J")):
            if abs(number) >= scale:
                return f"{number / scale:.4g} {unit}"
        return f"{number:.4g} J"

    return _said(value, how)


def cost(value: Any) -> str:
    """Say a price."""
    return _said(value, lambda number: f"{number:,.0f} USD" if number >= 100 else f"{number:g} USD")


def ratio(value: Any) -> str:
    """Say how many times.

    Examples
    --------
    >>> ratio(1.4142) == f"1.41{TIMES}"
    True
    """
    return _said(
        value, lambda number: f"{number:,.0f}{TIMES}" if number >= 100 else f"{number:.3g}{TIMES}"
    )


def percent(value: Any, signed: bool = False) -> str:
    """Say a share of one; a small one never as nothing.

    Examples
    --------
    >>> percent(0.0123), percent(0.0), percent(2e-7), percent(0.05, signed=True)
    ('1.23%', '0%', '2e-05%', '+5%')
    """
    return _said(value, lambda number: f"{100 * number:{'+' if signed and number else ''}.3g}%")


def objective(name: str) -> tuple[str, str, Callable[[Any], str]]:
    """Give an objective's field in a design, its heading, and how its values are said."""
    known: dict[str, tuple[str, str, Callable[[Any], str]]] = {
        "time": ("time_s", "Step", seconds),
        "area": ("area_mm2", "Die area", area),
        "energy": ("energy_j", "Energy of a step", energy),
        "hbm": ("hbm_bytes", "HBM", size),
        "memory": ("hbm_bytes", "HBM", size),
        "cost": ("cost_usd", "Price of all chips", cost),
    }
    for short, found in known.items():
        if name in (short, found[0]):
            return found
    return (name, name, lambda value: _said(value, lambda number: f"{number:.4g}"))


def chip_text(chip: Any) -> str:
    """Say a chip in one line: arrays, lanes, buffer, memory."""
    if not isinstance(chip, dict):
        return NOTHING if chip is None else str(chip)
    tensor, vector = chip.get("tensor_core") or {}, chip.get("vector_core") or {}
    buffer, hbm = chip.get("buffer") or {}, chip.get("hbm") or {}
    parts = []
    if tensor:
        side = f"{tensor.get('width')}{TIMES}{tensor.get('depth')}"
        parts.append(f"{tensor.get('count')} {TIMES} {side} tensor")
    if vector:
        parts.append(f"{vector.get('count')} {TIMES} {_lanes(vector)} vector")
    if buffer:
        parts.append(f"{size(buffer.get('capacity_bytes'))} buffer")
    if hbm:
        parts.append(f"{size(hbm.get('capacity_bytes'))} HBM")
    return _spaced(parts) or str(chip.get("name", NOTHING))


def _spaced(parts: list[str]) -> str:
    """Put parts after one another so that lines break between them only."""
    tied = "\N{NO-BREAK SPACE}"
    return f"{tied}· ".join(part.replace(" ", tied) for part in parts)


def _lanes(vector: Data) -> str:
    alus = vector.get("alus_per_lane", 1)
    return f"{vector.get('lanes')}" if alus == 1 else f"{vector.get('lanes')}{TIMES}{alus}"


def _peak(operations: Any, clock: Any, kind: str) -> str:
    return f"{format_flops(operations * clock)} {kind}" if is_number(clock) else NOTHING


def _at(capacity: Any, speed: Any) -> str:
    return f"{size(capacity)} at {bandwidth(speed)}" if is_number(speed) else size(capacity)


def _with_local(each: str, local: Any) -> str:
    return f"{each}, {size(local)} buffer" if is_number(local) else each


def chip_facts(chip: Data) -> list[list[str]]:
    """Say a chip part by part: what, how many, each of them, all together."""
    tensor, vector = chip.get("tensor_core") or {}, chip.get("vector_core") or {}
    buffer, hbm = chip.get("buffer") or {}, chip.get("hbm") or {}
    clock, rows = chip.get("clock_hz"), []
    if tensor:
        macs = tensor.get("count", 0) * tensor.get("width", 0) * tensor.get("depth", 0)
        each = f"{tensor.get('width')} {TIMES} {tensor.get('depth')} array"
        each = _with_local(each, tensor.get("local_buffer_bytes"))
        peak = _peak(2.0 * macs, clock, "bf16")
        rows.append(["tensor cores", count(tensor.get("count")), each, peak])
    if vector:
        lanes, alus = vector.get("lanes", 0), vector.get("alus_per_lane", 1)
        each = f"{lanes} lanes {TIMES} {alus} ALUs" if alus != 1 else f"{lanes} lanes"
        each = _with_local(each, vector.get("local_buffer_bytes"))
        peak = _peak(vector.get("count", 0) * lanes * alus, clock, "fp32")
        rows.append(["vector cores", count(vector.get("count")), each, peak])
    if buffer:
        wide, capacity = buffer.get("bytes_per_cycle"), buffer.get("capacity_bytes")
        speed = wide * clock if is_number(wide) and is_number(clock) else None
        rows.append(["shared buffer", "1", NOTHING, _at(capacity, speed)])
    if hbm:
        capacity, stacks = hbm.get("capacity_bytes"), hbm.get("stacks") or 1
        each = size(capacity / stacks) if is_number(capacity) else NOTHING
        speed = hbm.get("bandwidth_bytes_per_s")
        rows.append(["HBM stacks", count(stacks), each, _at(capacity, speed)])
    return rows


def plan_text(plan: Data) -> str:
    """Say a plan in one line; widths of one that are rare are left out."""
    words = [f"{name} {plan[name]}" for name in ("tp", "pp", "dp") if name in plan]
    words += [f"{name} {plan[name]}" for name in ("cp", "ep") if plan.get(name, 1) != 1]
    if plan.get("zero"):
        words.append(f"ZeRO {plan['zero']}")
    if "micro_batch" in plan:
        words.append(f"micro-batch {plan['micro_batch']}")
    if "schedule" in plan:
        chunks = plan.get("vpp", 1)
        words.append(
            f"{plan['schedule']} {TIMES}{chunks}" if chunks != 1 else str(plan["schedule"])
        )
    return _spaced(words)


def plan_of(design: Data) -> str:
    """Say the plan, or the plans of several models, of a design."""
    if design.get("plan_text"):
        return str(design["plan_text"])
    plans = design.get("plans") or {}
    if len(plans) > 1:
        return "; ".join(f"{name}: {plan_text(plan)}" for name, plan in plans.items())
    plan = next(iter(plans.values()), None) or design.get("plan") or {}
    return plan_text(plan)
