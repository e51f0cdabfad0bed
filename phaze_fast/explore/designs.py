"""Designs: a chip with its HBM, and the best plan of each model on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.hardware import Accelerator
from phaze_fast.planning import Plan
from phaze_fast.units import format_bytes, format_time

__all__ = ["Design", "fullest_text", "geometric_mean", "share_text"]


@dataclass(frozen=True)
class Design:
    """A chip with its HBM, and the best plan of each model on it."""

    chip: Accelerator
    index: int
    """Position in the space: ``space[index]`` is the chip."""
    grid_index: int
    """Position in the space's whole grid, the number in the chip's name."""
    plans: dict[str, Plan]
    """By model."""
    time_s: float
    """Seconds of a step; of several models, their weighted geometric mean."""
    value: float
    """What was made least, seconds unless another objective was asked for."""
    samples_per_s: float
    """Sequences per second, likewise."""
    area_mm2: float
    energy_j: float
    """Of one step of every model, over all devices."""
    hbm_bytes: int
    cost_usd: float
    """Dies and HBM of all devices."""

    @property
    def plan(self) -> Plan:
        """The plan of the first model."""
        return next(iter(self.plans.values()))

    @property
    def bottleneck(self) -> str:
        """What most of the first model's step is spent on."""
        return self.plan.bottleneck

    def to_dict(self, stages: bool = True) -> dict[str, Any]:
        """Give it as plain data, with the plans' stages or without."""
        plans = {name: plan.to_dict(stages) for name, plan in self.plans.items()}
        return {
            "chip": self.chip.to_dict(),
            "chip_text": str(self.chip),
            "index": self.index,
            "grid_index": self.grid_index,
            "plan": next(iter(plans.values())),
            "plans": plans,
            "time_s": self.time_s,
            "value": self.value,
            "samples_per_s": self.samples_per_s,
            "area_mm2": self.area_mm2,
            "energy_j": self.energy_j,
            "hbm_bytes": self.hbm_bytes,
            "cost_usd": self.cost_usd,
            "bottleneck": self.bottleneck,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.chip}",
            f"{self.area_mm2:.2f} mm2, a step in {format_time(self.time_s)}, "
            f"{self.samples_per_s:,.2f} samples/s, {self.energy_j:,.0f} J",
        ]
        lines += [f"{name}: {plan}" for name, plan in self.plans.items()]
        return "\n".join(lines)


def share_text(plan: Plan) -> str:
    """Say in words what a step is spent on, largest share first."""
    parts = sorted(plan.parts_s.items(), key=lambda item: -item[1])
    shown = [f"{name} {seconds / plan.time_s:.0%}" for name, seconds in parts[:3] if seconds > 0]
    return ", ".join(shown)


def fullest_text(plan: Plan, hbm_bytes: int) -> str:
    """Say how full the fullest device is."""
    share = plan.memory_bytes / hbm_bytes
    return f"{format_bytes(plan.memory_bytes)} of {format_bytes(hbm_bytes)} ({share:.0%})"


def geometric_mean(values: list[float], weights: tuple[float, ...]) -> float:
    """Weighted geometric mean; one value is itself."""
    if len(values) == 1:
        return values[0]
    total = sum(weights)
    logs = [w / total * np.log(v) for w, v in zip(weights, values, strict=True)]
    return float(np.exp(sum(logs)))
