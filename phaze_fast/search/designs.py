"""Takes what a search found, gives designs in full: the chip, and for each model its plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.explore.placing import Found
from phaze_fast.explore.workload import Workload
from phaze_fast.hardware import Accelerator, chip_records
from phaze_fast.placement import Plan
from phaze_fast.placement.interleaved import interleaved
from phaze_fast.placement.layers import TimedLayers, memory_of
from phaze_fast.placement.planning import Question as PlanQuestion
from phaze_fast.placement.planning import ties
from phaze_fast.placement.problems import place_counts
from phaze_fast.units import format_bytes, format_time

__all__ = ["Design", "full_plan", "plan_text"]


def plan_text(work: Workload, s: int, found: Found) -> str:
    """Say a plan in one line."""
    strategy, layout = work.strategies[s].sizes.graph.strategy, work.strategies[s].layouts
    chosen = layout[found.layout]
    names = {work.strategies[s].sizes.variants[v] for v in found.variant_of}
    again = names.pop() if len(names) == 1 else "mixed"
    return (
        f"tp {strategy.tensor_parallel} pp {max(found.stage_of) + 1} dp {chosen.groups.replicas} "
        f"zero {chosen.zero} micro-batch {strategy.microbatch} {chosen.schedule}, recompute {again}"
    )


def full_plan(work: Workload, s: int, chip: Accelerator, found: Found) -> Plan:
    """Build a plan that was found again, with its stages, memory and parts.

    Parameters
    ----------
    work
        The model's strategies.
    s
        Which of them.
    chip
        The chip, with its HBM.
    found
        What the search kept of the plan.
    """
    mine, training = work.strategies[s], work.question.training
    timed = work.time(s, chip_records([chip]))
    layers = TimedLayers(mine.sizes, timed.kinds, chip)
    layout = mine.layouts[found.layout]
    question = PlanQuestion(layers, layout)
    room = float(memory_of(chip).capacity_bytes) - float(training.reserved_bytes)
    problem = question.problem(ties(training), room)
    if layout.schedule == "interleaved":
        placement = interleaved(problem, layout.groups.stages, layout.virtual)
    else:
        placed = place_counts([problem], best_only=True)[0]
        placement = min(placed, key=lambda plan: plan.time_s, default=None)
    if placement is None:  # what was found once is there
        raise RuntimeError(f"{work.question.model.name}: a plan that was found is not there")
    return question.read(problem, placement, training)


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
    def binds(self) -> str:
        """What the first model's step waits for most."""
        return self.plan.binds

    def to_dict(self, stages: bool = True) -> dict[str, Any]:
        """Give it as plain data, with the plans' stages or without."""
        limit = {"limit_bytes": self.hbm_bytes}
        plans = {name: {**plan.to_dict(stages), **limit} for name, plan in self.plans.items()}
        return {
            "chip": self.chip.to_dict(),
            "chip_text": str(self.chip),
            "index": self.index,
            "grid_index": self.grid_index,
            "plan": next(iter(plans.values())),
            "plans": plans,
            "time_s": self.time_s,
            "samples_per_s": self.samples_per_s,
            "area_mm2": self.area_mm2,
            "energy_j": self.energy_j,
            "hbm_bytes": self.hbm_bytes,
            "cost_usd": self.cost_usd,
            "binds": self.binds,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.chip}",
            f"{self.area_mm2:.2f} mm2, a step in {format_time(self.time_s)}, "
            f"{self.samples_per_s:,.2f} samples/s, {self.energy_j:,.0f} J",
        ]
        lines += [f"{name}: {plan}" for name, plan in self.plans.items()]
        return "\n".join(lines)


def binding_text(plan: Plan) -> str:
    """Say in words what a step waits for, largest share first."""
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
