"""Numbers, chips and plans as text with suitable units.

Every formatter accepts any value and returns `MISSING` where it is not a finite number, since the
documents behind the pages may lack fields.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeGuard

from phaze_fast.tables import flat_row
from phaze_fast.units import (
    format_area,
    format_bandwidth,
    format_bytes,
    format_count,
    format_flops,
    format_scaled,
    format_time,
)

Data = dict[str, Any]
Formatter = Callable[[Any], str]

MISSING = "\N{EN DASH}"
"""Stands for a missing value."""
TIMES = "\N{MULTIPLICATION SIGN}"

# ---- numbers ----


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _formatter(finite: Formatter) -> Formatter:
    """Make a formatter of any value from one of finite numbers."""
    return lambda value: finite(value) if is_number(value) else MISSING


def _long_time(number: float) -> str:
    if number >= 7200:
        return f"{number / 3600:.3g} h"
    return f"{number / 60:.3g} min" if number >= 300 else format_time(number)


_JOULES = [(1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J")]

seconds = _formatter(_long_time)
"""Format a time; from five minutes on in minutes, from two hours on in hours."""
size = _formatter(format_bytes)
"""Format a number of bytes."""
bandwidth = _formatter(format_bandwidth)
"""Format bytes per second."""
frequency = _formatter(lambda hz: f"{hz / 1e9:.4g} GHz")
"""Format a clock rate."""
area = _formatter(lambda mm2: format_area(mm2).replace("mm2", "mm²"))
"""Format an area in square millimetres."""
count = _formatter(lambda number: format_count(round(number)))
"""Format a whole number."""
rate = _formatter(lambda number: f"{number:,.0f}" if number >= 1000 else f"{number:.4g}")
"""Format a number of items per second."""
energy = _formatter(lambda joules: format_scaled(joules, _JOULES))
"""Format an energy in joules."""
cost = _formatter(lambda usd: f"{usd:,.0f} USD" if usd >= 100 else f"{usd:g} USD")
"""Format a price."""
ratio = _formatter(lambda r: f"{r:,.0f}{TIMES}" if r >= 100 else f"{r:.3g}{TIMES}")
"""Format a factor, such as 1.41 times."""


def percent(value: Any, signed: bool = False) -> str:
    """Format a fraction as a percentage; a small one is never rounded to zero.

    Examples
    --------
    >>> percent(0.0123), percent(0.0), percent(2e-7), percent(0.05, signed=True)
    ('1.23%', '0%', '2e-05%', '+5%')
    """
    return f"{100 * value:{'+' if signed and value else ''}.3g}%" if is_number(value) else MISSING


_OBJECTIVES: dict[str, tuple[str, str, Formatter]] = {
    "time": ("time_s", "Step", seconds),
    "area": ("area_mm2", "Die area", area),
    "energy": ("energy_j", "Energy of a step", energy),
    "hbm": ("hbm_bytes", "HBM", size),
    "memory": ("hbm_bytes", "HBM", size),
    "cost": ("cost_usd", "Price of all chips", cost),
}


def objective(name: str) -> tuple[str, str, Formatter]:
    """Look up an objective's field in a design, its heading, and the formatter of its values."""
    for short, known in _OBJECTIVES.items():
        if name in (short, known[0]):
            return known
    return (name, name, _formatter(lambda number: f"{number:.4g}"))


# ---- chips and plans ----


def _joined(parts: list[str]) -> str:
    """Join parts with dots, so that lines break only between parts."""
    no_break = "\N{NO-BREAK SPACE}"
    return f"{no_break}· ".join(part.replace(" ", no_break) for part in parts)


def chip_text(chip: Any) -> str:
    """Describe a chip in one line: arrays, vector cores, buffer, HBM."""
    if not isinstance(chip, dict):
        return str(chip) if isinstance(chip, str) else MISSING
    tensor, vector = chip.get("tensor_core") or {}, chip.get("vector_core") or {}
    buffer, hbm = chip.get("buffer") or {}, chip.get("hbm") or {}
    parts = []
    if tensor:
        array = f"{tensor.get('width')}{TIMES}{tensor.get('depth')}"
        parts.append(f"{tensor.get('count')} {TIMES} {array} tensor")
    if other := chip.get("other_tensor_core"):
        array = f"{other.get('width')}{TIMES}{other.get('depth')}"
        parts.append(f"{other.get('count')} {TIMES} {array} other tensor")
    if vector:
        alus = vector.get("alus_per_lane", 1)
        lanes = f"{vector.get('lanes')}" if alus == 1 else f"{vector.get('lanes')}{TIMES}{alus}"
        parts.append(f"{vector.get('count')} {TIMES} {lanes} vector")
    if buffer:
        parts.append(f"{size(buffer.get('capacity_bytes'))} buffer")
    if hbm:
        parts.append(f"{size(hbm.get('capacity_bytes'))} HBM")
    return _joined(parts) or str(chip.get("name", MISSING))


def _peak(operations: Any, clock_hz: Any, number_format: str) -> str:
    return (
        f"{format_flops(operations * clock_hz)} {number_format}" if is_number(clock_hz) else MISSING
    )


def _with_bandwidth(capacity: Any, bytes_per_s: Any) -> str:
    text = size(capacity)
    return f"{text} at {bandwidth(bytes_per_s)}" if is_number(bytes_per_s) else text


def _with_buffer(core: str, buffer_bytes: Any) -> str:
    return f"{core}, {size(buffer_bytes)} buffer" if is_number(buffer_bytes) else core


def chip_parts(chip: Data) -> list[list[str]]:
    """List the parts of a chip: name, count, size of one, total."""
    vector = chip.get("vector_core") or {}
    buffer, hbm = chip.get("buffer") or {}, chip.get("hbm") or {}
    clock_hz, rows = chip.get("clock_hz"), []
    for name, field in (("tensor", "tensor_core"), ("other tensor", "other_tensor_core")):
        tensor = chip.get(field)
        if not tensor:
            continue
        macs = tensor.get("count", 0) * tensor.get("width", 0) * tensor.get("depth", 0)
        array = f"{tensor.get('width')} {TIMES} {tensor.get('depth')} array"
        core = _with_buffer(array, tensor.get("local_buffer_bytes"))
        peak = _peak(2.0 * macs, clock_hz, "bf16")
        rows.append([f"{name} cores", count(tensor.get("count")), core, peak])
    if vector:
        lanes, alus = vector.get("lanes", 0), vector.get("alus_per_lane", 1)
        core = f"{lanes} lanes {TIMES} {alus} ALUs" if alus != 1 else f"{lanes} lanes"
        core = _with_buffer(core, vector.get("local_buffer_bytes"))
        peak = _peak(vector.get("count", 0) * lanes * alus, clock_hz, "fp32")
        rows.append(["vector cores", count(vector.get("count")), core, peak])
    if buffer:
        width = buffer.get("bytes_per_cycle")
        bytes_per_s = width * clock_hz if is_number(width) and is_number(clock_hz) else None
        together = _with_bandwidth(buffer.get("capacity_bytes"), bytes_per_s)
        rows.append(["shared buffer", "1", MISSING, together])
    if hbm:
        capacity, stacks = hbm.get("capacity_bytes"), hbm.get("stacks") or 1
        stack = size(capacity / stacks) if is_number(capacity) else MISSING
        together = _with_bandwidth(capacity, hbm.get("bandwidth_bytes_per_s"))
        rows.append(["HBM stacks", count(stacks), stack, together])
    return rows


def plan_text(plan: Data) -> str:
    """Describe a plan in one line; context and expert widths only where they are not 1."""
    words = [f"{name} {plan[name]}" for name in ("tp", "pp", "dp") if name in plan]
    words += [f"{name} {plan[name]}" for name in ("cp", "ep") if plan.get(name, 1) != 1]
    if plan.get("zero"):
        words.append(f"ZeRO {plan['zero']}")
    if "micro_batch" in plan:
        words.append(f"micro-batch {plan['micro_batch']}")
    if "schedule" in plan:
        vpp = plan.get("vpp", 1)
        words.append(f"{plan['schedule']} {TIMES}{vpp}" if vpp != 1 else str(plan["schedule"]))
    return _joined(words)


def design_text(design: Data) -> str:
    """Describe the plan of a design, or its plans for several models."""
    if design.get("plan_text"):
        return str(design["plan_text"])
    plans = design.get("plans") or {}
    if len(plans) > 1:
        return "; ".join(f"{name}: {plan_text(plan)}" for name, plan in plans.items())
    return plan_text(next(iter(plans.values()), {}) or design.get("plan") or {})


# ---- differences between designs ----

_MAX_DIFFERENCES = 6
_CHIP_AXES = {
    "tensor_core.count": "tensor cores",
    "tensor_core.width": "array width",
    "tensor_core.depth": "array depth",
    "other_tensor_core.count": "other tensor cores",
    "other_tensor_core.width": "other arrays' width",
    "other_tensor_core.depth": "other arrays' depth",
    "vector_core.count": "vector cores",
    "vector_core.lanes": "vector lanes",
    "buffer.capacity_bytes": "buffer",
    "hbm.capacity_bytes": "HBM",
    "hbm.bandwidth_bytes_per_s": "HBM bandwidth",
    "hbm.stacks": "HBM stacks",
    "clock_hz": "clock",
}
"""Fields of a chip that spaces vary, and their names."""
_UNCOMPARED = ("name", "sources", "calibration", "notes", "tuning")
_PLAN_AXES = {name: name for name in ("tp", "pp", "dp", "cp", "ep")}
_PLAN_AXES |= {"zero": "ZeRO", "micro_batch": "micro-batch", "schedule": "schedule"}
_PLAN_AXES |= {"vpp": "chunks a stage", "recompute": "recompute"}


def _fields(data: Data) -> Data:
    """Collect the scalar fields of nested records by their dotted paths."""
    return {
        path: value
        for path, value in flat_row(data).items()
        if not set(_UNCOMPARED) & set(path.split("."))
    }


def _value_text(path: str, value: Any) -> str:
    units = {"_bytes_per_s": bandwidth, "_bytes": size, "_hz": frequency}
    formatter = next((f for suffix, f in units.items() if path.endswith(suffix)), str)
    return formatter(value) if is_number(value) else str(value)


def chip_differences(chip: Any, best: Any) -> list[str]:
    """Describe the fields in which a chip differs from the best one, varied axes first.

    Examples
    --------
    >>> one = {"name": "a", "tensor_core": {"count": 8}, "hbm": {"capacity_bytes": 2**36}}
    >>> chip_differences(one, {"name": "b", "tensor_core": {"count": 12}, "hbm": one["hbm"]})
    ['8 tensor cores (not 12)']
    """
    if not isinstance(chip, dict) or not isinstance(best, dict):
        return []
    own, others = _fields(chip), _fields(best)
    paths = [path for path in _CHIP_AXES if own.get(path) != others.get(path)]
    paths += [p for p in own if p not in _CHIP_AXES and p in others and own[p] != others[p]]
    texts = []
    for path in paths:
        label = _CHIP_AXES.get(path, path.replace("_", " ").replace(".", " "))
        value, other = (_value_text(path, fields.get(path)) for fields in (own, others))
        counted = path.endswith((".count", ".lanes", ".stacks"))
        text = f"{value} {label}" if counted else f"{label} {value}"
        texts.append(f"{text} (not {other})")
    return texts


def differences(design: Data, best: Data) -> str:
    """Describe how chip and plan of a design differ from the best, or return ``nothing``."""
    texts = chip_differences(design.get("chip"), best.get("chip"))
    own, others = design.get("plan") or {}, best.get("plan") or {}
    for name, label in _PLAN_AXES.items():
        if name in own and name in others and own[name] != others[name]:
            texts.append(f"{label} {own[name]} (not {others[name]})")
    if len(texts) > _MAX_DIFFERENCES:
        more = len(texts) - _MAX_DIFFERENCES + 1
        texts = [*texts[: _MAX_DIFFERENCES - 1], f"and {more} more"]
    return ", ".join(texts) or "nothing"
