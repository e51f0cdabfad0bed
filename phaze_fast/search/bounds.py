"""Times of a strategy's layers on many chips: lower bounds first, then schedules.

Four steps, each costlier and closer than the one before: rooflines of operators, operators mapped
onto the chip, the root of the layer's search tree, and the schedule itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from phaze_fast.cost import Costs, estimate_costs
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.opgraph import OpGraph
from phaze_fast.placement.sizes import StrategySizes
from phaze_fast.placement.times import MAX_NODES, KindTimes, hbm_share
from phaze_fast.schedule import schedule_layers

__all__ = ["STEPS", "bound_times", "bound_work_s", "schedule_times"]

Array = np.ndarray[Any, Any]

STEPS = ("roofline", "mapped", "schedule_bound", "scheduled", "placed")
"""What is known of a candidate, from little to all."""

_CHIPS_AT_ONCE = 2**15
_UNITS_OF_TYPE = ((0, 2), (1, 2))  # of tensor cores and of vector cores: alone, or with the other


def _longest_path(graph: OpGraph, seconds: Array) -> Array:
    """Of operators that follow one another."""
    finish = np.zeros((len(graph), len(seconds)))
    for i, own in enumerate(seconds.T):
        finish[i] += own
        for j in graph.indices[graph.indptr[i] : graph.indptr[i + 1]]:
            np.maximum(finish[j], finish[i], out=finish[j])
    found: Array = finish.max(axis=0, initial=0.0)
    return found


def _least_makespan(graph: OpGraph, costs: Costs, at: int) -> Array:
    """Lower bounds of a layer's makespan: its longest path, and the work of each type of core."""
    one_s, all_s = costs.one_core_s(at), costs.time_s(at)
    longest = _longest_path(graph, np.minimum(one_s, all_s))
    for type_, units in enumerate(_UNITS_OF_TYPE):
        mine = np.isin(graph.ops["unit"], units)
        cores = costs.cores[:, type_ : type_ + 1]
        work = np.minimum(all_s[:, mine], one_s[:, mine] / cores).sum(axis=1)
        np.maximum(longest, work, out=longest)
    return longest


def _costs(
    sizes: StrategySizes, records: Array, like: Accelerator, cluster: Cluster, threads: int,
    rough: bool = False,
) -> Costs:  # fmt: skip
    stride = sizes.expert_stride if sizes.strategy.expert_parallel > 1 else None
    return estimate_costs(
        sizes.graph,
        records,
        cluster,
        threads=threads,
        like=like,
        bounds_only=rough,
        expert_stride=stride,
    )


def bound_work_s(
    sizes: StrategySizes, records: Array, like: Accelerator, cluster: Cluster, threads: int = 1
) -> Array:
    """Bound the work of one micro-batch on chips by longest paths of rooflines, seconds.

    A roofline holds on one core as well as on all. Chips go in pieces, so that memory stays small.
    """
    work = np.zeros(len(records))
    for begin in range(0, len(records), _CHIPS_AT_ONCE):
        some = slice(begin, begin + _CHIPS_AT_ONCE)
        costs = _costs(sizes, records[some], like, cluster, threads, rough=True)
        for g, graph in enumerate(costs.graphs):
            work[some] += sizes.graph.layers[g // 2].count * _longest_path(graph, costs.time_s(g))
    return work


def bound_times(
    sizes: StrategySizes,
    records: Array,
    like: Accelerator,
    cluster: Cluster,
    step: str,
    threads: int = 1,
) -> KindTimes:
    """Bound the layers of a strategy on chips from below, one row per chip.

    Parameters
    ----------
    sizes
        The layers.
    records
        The chips.
    like
        Whose tuning and formats they share.
    cluster
        What collectives run over.
    step
        ``mapped`` or ``schedule_bound``.
    threads
        At most this many; the answer does not depend on it.
    """
    costs = _costs(sizes, records, like, cluster, threads)
    rate = records["hbm_bytes_per_s"] * hbm_share(like)
    if step == "schedule_bound":
        times = schedule_layers(costs, max_nodes=1, threads=threads)
        return KindTimes.of(sizes, costs, times.bound_s, times.proven, rate)
    least = np.array([_least_makespan(graph, costs, g) for g, graph in enumerate(costs.graphs)])
    return KindTimes.of(sizes, costs, least, np.ones(least.shape, dtype=bool), rate)


def schedule_times(
    sizes: StrategySizes,
    records: Array,
    like: Accelerator,
    cluster: Cluster,
    threads: int = 1,
    nodes: int = MAX_NODES,
) -> tuple[KindTimes, KindTimes]:
    """Schedule the layers of a strategy on chips: their times, and what is proven of them."""
    costs = _costs(sizes, records, like, cluster, threads)
    rate = records["hbm_bytes_per_s"] * hbm_share(like)
    made = schedule_layers(costs, max_nodes=nodes, threads=threads)
    times = KindTimes.of(sizes, costs, made.makespan_s, made.proven, rate)
    if times.proven.all():
        return times, times
    return times, KindTimes.of(sizes, costs, made.bound_s, made.proven, rate)
