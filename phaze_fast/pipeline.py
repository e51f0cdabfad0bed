"""Takes a space, a cluster and a workload's totals, gives what the stages can say so far.

The stages are called in order, one line each. Until the search is complete this is a survey: the
whole space with its areas, the compute bound of every chip, and what the fabric charges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.cost import CollectiveCost, collective
from phaze_fast.errors import InfeasibleError
from phaze_fast.explore import ADAM_STATE_BYTES, compute_bound_s, training_flops
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.units import format_bytes

__all__ = ["Survey", "survey"]


@dataclass(frozen=True, eq=False)
class Survey:
    """Every chip of a space with its lower bound on step time; best first."""

    space: ArchitectureSpace
    cluster: Cluster
    flops: float
    """Matrix FLOPs of one step, all devices together."""
    bound_s: np.ndarray[Any, Any]
    """Lower bound on the step time of each chip, seconds, in the order of the space; infinite where
    the training state does not fit its HBM."""
    order: np.ndarray[Any, Any]
    """Positions in the space by (bound, area, index)."""
    gradient_sync: CollectiveCost
    """All-reduce of bf16 gradients over all devices, if the plan were data-parallel only."""

    @property
    def ties(self) -> int:
        """Chips whose bound equals the best one's."""
        return int(np.count_nonzero(self.bound_s == self.bound_s[self.order[0]]))


def survey(space: ArchitectureSpace, cluster: Cluster, parameters: float, tokens: float) -> Survey:
    """Bound the step time of every chip of a space from below.

    Parameters
    ----------
    space
        The chips to look at.
    cluster
        How many of them there are, and how they are wired.
    parameters
        Parameters of the model.
    tokens
        Tokens of one training step (global batch x sequence length).

    Raises
    ------
    InfeasibleError
        Where the space is empty, or even the largest HBM cannot hold the training state.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> cluster = Cluster(devices=1024, fabric=presets.fabric("tpuv4-pod"))
    >>> found = survey(ArchitectureSpace.tpuv4_area(), cluster, 175e9, 4096 * 2048)
    >>> len(found.order)
    29360
    """
    flops = training_flops(parameters, tokens)
    if len(space) == 0:
        raise InfeasibleError(
            f"{space.spec.name}: no chip of the grid passes the area and power limits"
        )
    rate = space.spec.base.tensor_core.rates.get("bf16")
    if rate is None:
        raise InfeasibleError(f"{space.spec.name}: its chips do not multiply bf16")
    state = ADAM_STATE_BYTES * parameters
    _require_room_for_state(space, cluster, state)
    bound_s = compute_bound_s(space.chips, flops, cluster.devices, rate)
    bound_s[space.chips["hbm_bytes"] * float(cluster.devices) < state] = np.inf
    order = np.lexsort((space.index, space.area_mm2, bound_s))
    for array in (bound_s, order):
        array.setflags(write=False)
    sync = collective(cluster, "all-reduce", 2.0 * parameters, cluster.devices)
    return Survey(space, cluster, flops, bound_s, order, sync)


def _require_room_for_state(space: ArchitectureSpace, cluster: Cluster, state_bytes: float) -> None:
    """Raise `InfeasibleError` where no chip's HBM, all devices together, holds the state."""
    one = float(space.chips["hbm_bytes"].max())
    if one == 0.0:
        raise InfeasibleError(f"{space.spec.name}: no chip has HBM to hold the training state")
    held = one * cluster.devices
    if state_bytes > held:
        raise InfeasibleError(
            f"training state of {format_bytes(state_bytes)} exceeds the HBM of {cluster.devices} "
            f"devices, {format_bytes(held)}, by {format_bytes(state_bytes - held)}; "
            f"{math.ceil(state_bytes / one)} devices would hold it"
        )
