"""What sets a design apart from the best one: the axes of the space and of the plan that varied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from phaze_fast.report.words import bandwidth, is_number, size

__all__ = ["chip_varied", "varied"]

Data = dict[str, Any]

_MOST = 6
_CHIP: dict[str, str] = {
    "tensor_core.count": "tensor cores",
    "tensor_core.width": "array width",
    "tensor_core.depth": "array depth",
    "vector_core.count": "vector cores",
    "vector_core.lanes": "vector lanes",
    "buffer.capacity_bytes": "buffer",
    "hbm.capacity_bytes": "HBM",
    "hbm.bandwidth_bytes_per_s": "HBM bandwidth",
    "hbm.stacks": "HBM stacks",
    "clock_hz": "clock",
}
_PLAN = ("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "schedule", "vpp", "recompute")
_LABELS = {"zero": "ZeRO", "micro_batch": "micro-batch", "vpp": "chunks a stage"}
_OF_NO_ACCOUNT = ("name", "sources", "calibration", "notes", "tuning")


def _leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        at = f"{path}.{key}" if path else str(key)
        if key in _OF_NO_ACCOUNT:
            continue
        if isinstance(value, dict):
            yield from _leaves(value, at)
        elif not isinstance(value, list | tuple):
            yield at, value


def _value(path: str, value: Any) -> str:
    how: Callable[[Any], str] = str
    if is_number(value):
        if path.endswith("_bytes_per_s"):
            how = bandwidth
        elif path.endswith("_bytes"):
            how = size
        elif path.endswith("_hz"):
            how = lambda hz: f"{hz / 1e9:.4g} GHz"  # noqa: E731
    return how(value)


def chip_varied(chip: Any, best: Any) -> list[str]:
    """Say in which fields a chip differs from the best one, those that spaces vary first.

    Examples
    --------
    >>> one = {"name": "a", "tensor_core": {"count": 8}, "hbm": {"capacity_bytes": 2**36}}
    >>> chip_varied(one, {"name": "b", "tensor_core": {"count": 12}, "hbm": one["hbm"]})
    ['8 tensor cores (not 12)']
    """
    if not isinstance(chip, dict) or not isinstance(best, dict):
        return []
    mine, theirs = dict(_leaves(chip)), dict(_leaves(best))
    known = [path for path in _CHIP if mine.get(path) != theirs.get(path)]
    rest = [
        path for path in mine if path not in _CHIP and path in theirs and mine[path] != theirs[path]
    ]
    found = []
    for path in [*known, *rest]:
        label = _CHIP.get(path, path.replace("_", " ").replace(".", " "))
        value, other = (_value(path, where.get(path)) for where in (mine, theirs))
        counted = path.endswith((".count", ".lanes", ".stacks"))
        said = f"{value} {label}" if counted else f"{label} {value}"
        found.append(f"{said} (not {other})")
    return found


def varied(design: Data, best: Data) -> str:
    """Say what sets a design apart from the best; ``the best`` where nothing does."""
    found = chip_varied(design.get("chip"), best.get("chip"))
    mine, theirs = design.get("plan") or {}, best.get("plan") or {}
    for name in _PLAN:
        if name in mine and name in theirs and mine[name] != theirs[name]:
            label = _LABELS.get(name, name)
            found.append(f"{label} {mine[name]} (not {theirs[name]})")
    if len(found) > _MOST:
        found = [*found[: _MOST - 1], f"and {len(found) - _MOST + 1} more"]
    return ", ".join(found) or "nothing"
