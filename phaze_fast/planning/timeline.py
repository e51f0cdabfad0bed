"""A step of a plan as it is played: every pass of every stage, and the memory it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.hardware import Cluster
from phaze_fast.models import Model
from phaze_fast.planning.plan_spec import PlanSpec
from phaze_fast.planning.plans import Plan
from phaze_fast.planning.prediction import evaluated
from phaze_fast.schedule import ScheduleCache

__all__ = ["Timeline", "timeline"]

Array = np.ndarray[Any, Any]

_FORWARD, _BACKWARD, _WEIGHT_GRAD, _PAIR = 0, 1, 3, 4


@dataclass(frozen=True, eq=False)
class Timeline:
    """A step of a plan, pass by pass."""

    plan: Plan
    passes: Array
    """Records of ``device`` (stage), ``kind``, ``chunk``, ``micro_batch``, ``start_s`` and
    ``end_s``, stages one after another."""
    passes_s: float
    """When the last pass ends; what follows to ``plan.time_s`` are gradients and weights that
    nothing hides, and the optimiser."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of passes, as ``passes`` numbers them."""
        return _core.PASS_KINDS

    def of_stage(self, stage: int) -> Array:
        """Give the passes of one stage, in their order."""
        found: Array = self.passes[self.passes["device"] == stage]
        return found

    def busy_s(self, stage: int) -> float:
        """Seconds that a stage works."""
        own = self.of_stage(stage)
        return float((own["end_s"] - own["start_s"]).sum())

    def memory(self, stage: int) -> tuple[Array, Array]:
        """Bytes that a device of a stage holds over time.

        Returns
        -------
        times_s, held_bytes
            From each time on so many bytes are held, until the next. Activations come with a
            forward pass and go when its weight gradients are done; everything else is there all
            the time. The most is what the plan says.
        """
        own, terms = self.of_stage(stage), self.plan.stages[stage].memory
        starts = np.isin(own["kind"], (_FORWARD, _PAIR))
        ends = np.isin(own["kind"], (_BACKWARD, _WEIGHT_GRAD, _PAIR))
        times = np.concatenate([own["start_s"][starts], own["end_s"][ends]])
        change = np.concatenate([np.ones(int(starts.sum())), -np.ones(int(ends.sum()))])
        order = np.lexsort((change, times))  # what goes leaves before what comes
        chunks = np.cumsum(change[order])
        most = max(float(chunks.max(initial=0.0)), 1.0)
        steady = sum(terms.values()) - terms["activations"]
        held = steady + terms["activations"] * np.concatenate([[0.0], chunks]) / most
        return np.concatenate([[0.0], times[order]]), held


def timeline(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
    cache: ScheduleCache | None = None,
) -> Timeline:
    """Play a step of a plan, pass by pass; the parameters are those of `predict`.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> given = {"tp": 2, "pp": 2, "dp": 2, "global_batch": 32, "recompute": "full"}
    >>> played = timeline("llama2-7b", cluster, given)
    >>> len(played.passes), bool(played.passes_s < played.plan.time_s)
    (64, True)
    """
    evaluator, times, placed = evaluated(model, cluster, plan, cache)
    found = evaluator.plan(placed, times)
    layout = evaluator.layouts[placed.layout]
    cuts = np.array(placed.cuts, dtype=np.int32)
    variants = np.array(placed.variants, dtype=np.int32)
    forward, backward, weight_grad, step_s = evaluator.space.passes(
        times, placed.layout, cuts, variants
    )
    passes = _core.pipeline_events(
        int(layout["schedule"]),
        found.pp,
        found.vpp,
        found.micro_batches,
        forward,
        backward,
        weight_grad,
        1.0,
    )
    return Timeline(found, passes, step_s)
