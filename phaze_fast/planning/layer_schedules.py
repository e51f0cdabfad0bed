"""Schedules of a plan's layers: which operator starts when, on how many cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phaze_fast.hardware import Cluster
from phaze_fast.models import Model
from phaze_fast.planning.plan_spec import PlanSpec
from phaze_fast.planning.plans import Plan
from phaze_fast.planning.prediction import evaluated
from phaze_fast.planning.times import MAX_NODES, priced
from phaze_fast.schedule import LayerSchedule, schedule_layers

__all__ = ["ScheduledLayer", "layer_schedules"]

_CORES = ("tensor", "vector", "network")


@dataclass(frozen=True)
class ScheduledLayer:
    """One kind of layer of a plan, one pass of it over one micro-batch on one device."""

    kind: str
    """Such as ``block``."""
    way: str
    """``forward`` or ``backward``; the backward pass without what is computed again."""
    count: int
    """Layers of this kind in the model."""
    schedule: LayerSchedule
    """Times are seconds."""

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data: seconds, cores held by kind, operators in their order of start."""
        made = self.schedule
        cores = zip(_CORES, made.instance.cores, strict=True)
        rows = zip(made.instance.names, made.starts, made.durations, made.held, strict=True)
        return {
            "kind": self.kind,
            "way": self.way,
            "count": self.count,
            "time_s": made.makespan,
            "status": made.status,
            "cores": dict(cores),
            "operators": [
                {
                    "name": name,
                    "start_s": start_s,
                    "time_s": time_s,
                    "cores": {core: n for core, n in zip(_CORES, held, strict=True) if n},
                }
                for name, start_s, time_s, held in sorted(rows, key=lambda row: row[1])
            ],
        }


def layer_schedules(
    model: Model | str, cluster: Cluster, plan: Plan | PlanSpec | Mapping[str, Any]
) -> tuple[ScheduledLayer, ...]:
    """Schedule the operators of every kind of layer as `predict` does.

    The parameters are those of `predict`. A pass of a plan takes as long as its layer's schedule,
    or as the host needs for its operators, where that is longer.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> layers = layer_schedules("bert-large", cluster, {"dp": 8, "global_batch": 64})
    >>> [(layer.kind, layer.way) for layer in layers[2:4]]
    [('block', 'forward'), ('block', 'backward')]
    """
    evaluator, _, _ = evaluated(model, cluster, plan)
    sizes = evaluator.sizes[0]
    ((_, costs, _),) = priced([sizes], cluster, {}, threads=1)
    made = schedule_layers(costs, max_nodes=MAX_NODES, threads=1)
    return tuple(
        ScheduledLayer(layer.kind, way, layer.count, made.schedule(2 * k + back, 0))
        for k, layer in enumerate(sizes.graph.layers)
        for back, way in enumerate(("forward", "backward"))
        if len(layer.backward if back else layer.forward)
    )
