"""Rooflines of whole layers on very many chips, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.cost.engine import distinct_operators
from phaze_fast.cost.machines import in_format, machines
from phaze_fast.cost.network import collectives_s, rank_groups
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.opgraph import GROUPS, LayerGraph, OpGraph
from phaze_fast.threads import thread_count

__all__ = ["roofline_work_s"]

Array = np.ndarray[Any, Any]


def _before(graphs: list[OpGraph]) -> tuple[Array, Array]:
    """Nodes that each node waits for, numbered through all graphs: pointers and positions."""
    waits: list[list[int]] = []
    for graph in graphs:
        first = len(waits)
        waits += [[] for _ in range(len(graph))]
        for earlier, later in graph.edges():
            waits[first + later].append(first + earlier)
    pointers = np.array([0, *accumulate(len(w) for w in waits)], dtype=np.int64)
    return pointers, np.array([b for w in waits for b in w], dtype=np.int32)


def roofline_work_s(
    graph: LayerGraph,
    records: Array,
    cluster: Cluster,
    like: Accelerator,
    threads: int | None = None,
    expert_stride: int | None = None,
    hidden: Mapping[str, float] | None = None,
) -> Array:
    """Bound the seconds of all layers, forward and backward, from below on each of many chips.

    Of every layer it is the longest path of operators, each at its peak-compute and
    compulsory-traffic bound, collectives as they are. A roofline holds on one core as well as on
    all. The GIL is released; memory does not grow with the chips but by the answer.

    Parameters
    ----------
    graph
        Layers under a strategy, each as often as it occurs.
    records
        Chips, such as `ArchitectureSpace.chips`.
    cluster
        What collectives run over.
    like
        The chip whose tuning, launch latency and formats the chips share.
    threads
        At most this many, by default all cores; the result does not depend on it.
    expert_stride
        As in `estimate_costs`.
    hidden
        Shares of the seconds of collectives that other work hides, by group of devices.

    Examples
    --------
    >>> from phaze_fast import ArchitectureSpace, layer_graph, models
    >>> space = ArchitectureSpace.tpuv4_area()
    >>> pod = Cluster(devices=8, fabric="tpuv4-pod")
    >>> graph = layer_graph(models.load("bertlarge"))
    >>> roofline_work_s(graph, space.chips, pod, space.spec.base).shape == (len(space),)
    True
    """
    flat = [part for layer in graph.layers for part in (layer.forward, layer.backward)]
    asked = machines(records, like=like)
    groups = rank_groups(graph, expert_stride)
    shapes, which = distinct_operators(np.concatenate([part.ops for part in flat]))
    shares = np.array([1.0 - (hidden or {}).get(name, 0.0) for name in GROUPS])
    network_s = [collectives_s(part, cluster, groups) * shares[part.ops["group"]] for part in flat]
    paths = (
        np.array([0, *accumulate(len(part) for part in flat)], dtype=np.int64),
        which.astype(np.int32),
        np.concatenate(network_s),
        *_before(flat),
        np.repeat(np.array([float(layer.count) for layer in graph.layers]), 2),
    )
    sized = in_format(shapes, asked.precision)
    found: Array = _core.path_bounds(sized, *asked.arguments, paths, thread_count(threads))
    return found
