"""What bounds passes and steps besides operators: the host, and the optimiser's kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from phaze_fast.hardware import Accelerator
from phaze_fast.memory import Optimizer
from phaze_fast.opgraph import LayerGraph
from phaze_fast.software import Software

__all__ = ["expert_wait_s", "host_s", "optimizer_bytes_per_s"]

Array = np.ndarray[Any, Any]


def optimizer_bytes_per_s(records: Array, like: Accelerator, optimizer: Optimizer) -> Array:
    """Rate at which an optimiser's state streams through chips.

    It is that of the memory, or of the vector units where the chip says what its optimiser's kernel
    costs them.

    Parameters
    ----------
    records
        The chips.
    like
        Whose tuning they share.
    optimizer
        Bytes of a parameter.
    """
    tuning = like.tuning
    rate: Array = records["hbm_bytes_per_s"] * tuning.hbm_share
    cost = tuning.functions.get("adamw")
    if cost is None or cost.ops_per_element is None:
        return rate
    lanes = records["vector_cores"] * records["vector_lanes"] * records["vector_alus_per_lane"]
    ops_per_s = lanes * records["clock_hz"] * tuning.clock_factor
    moved = 2.0 * optimizer.state_bytes + optimizer.gradient_bytes + optimizer.weight_bytes
    found: Array = np.minimum(rate, moved * ops_per_s / cost.ops_per_element)
    return found


def host_s(operators: int, software: Software | None, again: int = 0) -> float:
    """Seconds that the host takes at least for a pass, which is no shorter on any device.

    Parameters
    ----------
    operators
        That the pass launches, those included that are computed again.
    software
        What the host takes for one; none: a host that is never waited for.
    again
        How many of them are computed again.
    """
    if software is None:
        return 0.0
    return operators * software.host_s + (software.recompute_host_s if again else 0.0)


def expert_wait_s(graph: LayerGraph, kind: str, software: Software | None) -> tuple[float, float]:
    """Seconds that forward and backward pass of a kind of layer wait while experts are launched.

    Parameters
    ----------
    graph
        Whose strategy says how many experts a device holds.
    kind
        Of the layer.
    software
        What the host takes for the kernels of one expert; the gradients are two products for each
        that a forward pass has, and take twice as long. None: a host that is never waited for.
    """
    moe = getattr(graph.model, "moe", None)
    if software is None or moe is None or not kind.endswith("moe-block"):
        return 0.0, 0.0
    once = software.expert_launch_s * (moe.experts // graph.strategy.ep)
    return once, 2.0 * once
