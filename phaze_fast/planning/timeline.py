"""The timeline of a step: passes of every stage, memory over time, operators of each layer."""

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
from phaze_fast.planning.times import MAX_NODES, priced
from phaze_fast.schedule import LayerSchedule, ScheduleCache, schedule_layers
from phaze_fast.tables import Array

_FORWARD, _BACKWARD, _WEIGHT_GRAD, _PAIR = map(_core.PASS_KINDS.index, ("F", "B", "W", "F&B"))
_CORES = ("tensor", "vector", "network")


@dataclass(frozen=True, eq=False)
class Timeline:
    """A step of a plan, pass by pass."""

    plan: Plan
    passes: Array
    """Records of ``device`` (stage), ``kind``, ``chunk``, ``micro_batch``, ``start_s`` and
    ``end_s``, stages one after another."""
    passes_s: float
    """When the last pass ends; exposed gradient and weight communication and the optimiser follow
    until ``plan.time_s``."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of passes, as ``passes`` numbers them."""
        return _core.PASS_KINDS

    def of_stage(self, stage: int) -> Array:
        """Select the passes of one stage, in their order."""
        own: Array = self.passes[self.passes["device"] == stage]
        return own

    def busy_s(self, stage: int) -> float:
        """Sum the seconds that a stage is busy."""
        own = self.of_stage(stage)
        return float((own["end_s"] - own["start_s"]).sum())

    def memory(self, stage: int) -> tuple[Array, Array]:
        """Return the memory of a device of a stage over time.

        Returns
        -------
        times_s, allocated_bytes
            Allocated bytes from each time until the next. A forward pass allocates activations,
            which are freed when its weight gradients are done; all else is resident throughout.
            The maximum is the peak memory of the plan.
        """
        own, terms = self.of_stage(stage), self.plan.stages[stage].memory
        starts = np.isin(own["kind"], (_FORWARD, _PAIR))
        ends = np.isin(own["kind"], (_BACKWARD, _WEIGHT_GRAD, _PAIR))
        times = np.concatenate([own["start_s"][starts], own["end_s"][ends]])
        change = np.concatenate([np.ones(int(starts.sum())), -np.ones(int(ends.sum()))])
        order = np.lexsort((change, times))  # at equal times, bytes are freed first
        chunks = np.cumsum(change[order])
        most = max(float(chunks.max(initial=0.0)), 1.0)
        steady = sum(terms.values()) - terms["activations"]
        memory_bytes = steady + terms["activations"] * np.concatenate([[0.0], chunks]) / most
        return np.concatenate([[0.0], times[order]]), memory_bytes


def timeline(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
    cache: ScheduleCache | None = None,
) -> Timeline:
    """Simulate a step of a plan, pass by pass; the parameters are those of `predict`.

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
    predicted = evaluator.plan(placed, times)
    layout = evaluator.layouts[placed.layout]
    forward, backward, weight_grad, step_s = evaluator.space.passes(
        times, placed.layout, *placed.arrays
    )
    passes = _core.pipeline_events(
        int(layout["schedule"]),
        predicted.pp,
        predicted.vpp,
        predicted.micro_batches,
        forward,
        backward,
        weight_grad,
        1.0,
    )
    return Timeline(predicted, passes, step_s)


# ---- operators in each layer ----


@dataclass(frozen=True)
class ScheduledLayer:
    """The schedule of one pass of one kind of layer, for one micro-batch on one device."""

    kind: str
    """Kind of layer, such as ``block``."""
    direction: str
    """``forward`` or ``backward``; the backward pass without recomputation."""
    count: int
    """Layers of this kind in the model."""
    schedule: LayerSchedule
    """Operators with their start times and cores, seconds."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data: seconds, cores by kind, operators in order of start."""
        schedule, layer = self.schedule, self.schedule.instance
        cores = zip(_CORES, layer.cores, strict=True)
        rows = zip(
            layer.names, schedule.starts, schedule.durations, schedule.cores_used, strict=True
        )
        return {
            "kind": self.kind,
            "direction": self.direction,
            "count": self.count,
            "time_s": schedule.makespan,
            "status": schedule.status,
            "cores": dict(cores),
            "operators": [
                {
                    "name": name,
                    "start_s": start_s,
                    "time_s": time_s,
                    "cores": {core: n for core, n in zip(_CORES, cores_used, strict=True) if n},
                }
                for name, start_s, time_s, cores_used in sorted(rows, key=lambda row: row[1])
            ],
        }


def layer_schedules(
    model: Model | str, cluster: Cluster, plan: Plan | PlanSpec | Mapping[str, Any]
) -> tuple[ScheduledLayer, ...]:
    """Schedule the operators of every kind of layer of a plan.

    The parameters are those of `predict`. A pass takes as long as its layer's schedule, or as the
    host needs to launch its operators if that is longer.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> layers = layer_schedules("bert-large", cluster, {"dp": 8, "global_batch": 64})
    >>> [(layer.kind, layer.direction) for layer in layers[2:4]]
    [('block', 'forward'), ('block', 'backward')]
    """
    evaluator, _, _ = evaluated(model, cluster, plan)
    sizes = evaluator.sizes[0]
    ((_, layers),) = priced([sizes], cluster)
    costs = layers.only([sizes]).costs
    times = schedule_layers(costs, max_nodes=MAX_NODES, threads=1)
    return tuple(
        ScheduledLayer(layer.kind, direction, layer.count, times.schedule(2 * k + back, 0))
        for k, layer in enumerate(sizes.graph.layers)
        for back, direction in enumerate(("forward", "backward"))
        if len(layer.backward if back else layer.forward)
    )
