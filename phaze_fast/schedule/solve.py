"""Schedules with proof or gap: bounds, lists, branch and bound, then HiGHS."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.schedule.instance import LayerInstance
from phaze_fast.schedule.result import LayerSchedule

__all__ = ["RULES", "Packed", "pack", "schedule_instances"]

Array = np.ndarray[Any, Any]

RULES = ("exclusive", "overlap")
"""Whether an operator on all cores keeps everything else from running, or only its own types."""

_MOST_NODES = 2**62


Packed = tuple[Array, Array, Array, Array, Array, Array, Array, Array, Array]
"""Layers as the kernel takes them."""


def pack(instances: Sequence[LayerInstance]) -> Packed:
    """Lay layers out as the arrays the kernel takes."""
    ops = [len(layer) for layer in instances]
    modes = [len(m) for layer in instances for m in layer.modes]
    edges = [len(layer.edges) for layer in instances]
    flat_modes = [mode for layer in instances for m in layer.modes for mode in m]
    flat_edges = [edge for layer in instances for edge in layer.edges]
    return (
        np.array([0, *accumulate(ops)], dtype=np.int64),
        np.array([t for layer in instances for t in layer.types], dtype=np.uint8),
        np.array([0, *accumulate(modes)], dtype=np.int64),
        np.array([cores for cores, _ in flat_modes], dtype=np.int32),
        np.array([seconds for _, seconds in flat_modes], dtype=np.float64),
        np.array([0, *accumulate(edges)], dtype=np.int64),
        np.array([a for a, _ in flat_edges], dtype=np.int32),
        np.array([b for _, b in flat_edges], dtype=np.int32),
        np.array([c for layer in instances for c in layer.cores], dtype=np.int32),
    )


def _one(
    instance: LayerInstance, overlap: bool, max_nodes: int, time_limit_s: float
) -> LayerSchedule:
    begin = time.perf_counter()
    makespan, bound, proved, nodes, status, starts, mode = _core.schedule_layers(
        pack([instance]), overlap, max_nodes, time_limit_s, 1
    )
    if status[0] != 0:
        raise InvalidInputError(f"{instance.name}: {_core.STATUS_SENTENCES[int(status[0])]}")
    by = _core.PROVED_BY[int(proved[0])]
    return LayerSchedule(
        instance=instance,
        status="optimal" if proved[0] else "feasible",
        makespan=float(makespan[0]),
        bound=float(bound[0]),
        proved_by=by,
        starts=tuple(starts.tolist()),
        mode=tuple(mode.tolist()),
        nodes=int(nodes[0]),
        solve_s=time.perf_counter() - begin,
        overlap=overlap,
    )


def schedule_instances(
    instances: Sequence[LayerInstance],
    rule: str = "exclusive",
    time_limit_s: float = 60.0,
    max_nodes: int | None = None,
    highs: bool = True,
) -> list[LayerSchedule]:
    """Schedule layers one by one, each until it is proven or its time is up.

    Parameters
    ----------
    instances
        From `read_instances` or `instance_from_dict`.
    rule
        ``exclusive``: nothing runs beside an operator on all cores (PHAZE's rule); ``overlap``:
        other types may.
    time_limit_s
        For each layer: for branch and bound, and again for HiGHS.
    max_nodes
        Of the search tree; by default no limit.
    highs
        Whether to go on with HiGHS where branch and bound did not finish. It needs the package
        ``highspy``.

    Returns
    -------
    list of LayerSchedule
        ``optimal`` only where proven.

    Raises
    ------
    InvalidInputError
        Where an option or a layer is not accepted.

    Examples
    --------
    >>> from phaze_fast.schedule import instance_from_dict
    >>> ops = [{"id": i, "type": "TC", "lat_single": 8, "lat_all": 3} for i in range(4)]
    >>> layer = {"name": "four", "ops": ops, "edges": [], "num_tc": 4, "num_vc": 1}
    >>> (found,) = schedule_instances([instance_from_dict(layer)])
    >>> found.makespan, found.status
    (8.0, 'optimal')
    """
    if rule not in RULES:
        raise InvalidInputError(f"rule: {rule!r} is not accepted; {nearest(str(rule), RULES)}")
    if not time_limit_s >= 0:
        raise InvalidInputError(
            f"time_limit_s: {time_limit_s!r} is not accepted; expected seconds, zero or more"
        )
    nodes = _MOST_NODES if max_nodes is None else max_nodes
    found = []
    for instance in instances:
        made = _one(instance, rule == "overlap", nodes, time_limit_s)
        wanted = highs and time_limit_s > 0 and instance.one_or_all
        if made.status != "optimal" and wanted:
            made = _with_highs(made, time_limit_s)
        found.append(made)
    return found


def _with_highs(made: LayerSchedule, time_limit_s: float) -> LayerSchedule:
    from phaze_fast.schedule.highs import solve_with_highs

    begin = time.perf_counter()
    better = solve_with_highs(made, time_limit_s)
    return replace(better, solve_s=made.solve_s + time.perf_counter() - begin)
