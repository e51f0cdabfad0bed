"""Takes one strategy of a model and chips, gives times of its layers: bounds first, then schedules.

Four steps, each dearer and closer than the one before: rooflines of operators, operators mapped
onto the chip, the root of the layer's search tree, and the schedule itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.cost import Costs, estimate_costs
from phaze_fast.hardware import Accelerator
from phaze_fast.opgraph import OpGraph
from phaze_fast.placement.layers import MAX_NODES, KindTimes
from phaze_fast.placement.sizes import LayerSizes
from phaze_fast.schedule import schedule_layers

__all__ = ["STEPS", "Totals", "bound_layers", "time_layers"]

Array = np.ndarray[Any, Any]

STEPS = ("roofline", "mapped", "listed", "scheduled", "placed")
"""What is known of a point, from little to all."""

_UNITS_OF_TYPE = ((0, 2), (1, 2))  # of tensor cores and of vector cores: alone, or with the other


@dataclass(frozen=True, eq=False)
class Totals:
    """What bounds on a step are made of, for several chips; one micro-batch on one device."""

    work_s: Array
    """Both passes of all layers, nothing recomputed."""
    backward_s: Array
    """The backward passes alone."""
    block_s: Array
    """Both passes of the shortest block."""
    again_s: Array
    """The least that recomputing a block adds; zero where there is no way to."""
    first_s: Array
    """Both passes of what stands before all blocks."""
    last_s: Array
    """Both passes of what stands after them."""
    dynamic_j: Array
    """Joules of both passes of all layers."""

    def at(self, chips: Any) -> Totals:
        """Those of some chips."""
        return Totals(*(getattr(self, name)[chips] for name in Totals.__annotations__))

    @classmethod
    def joined(cls, parts: Sequence[Totals]) -> Totals:
        """Several, one after another."""
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in cls.__annotations__))

    @classmethod
    def of(cls, sizes: LayerSizes, kinds: KindTimes) -> Totals:
        """Add up the kinds of layers."""
        both = kinds.forward_s + kinds.plain_s
        ends = [layer.kind in ("embedding", "head") for layer in sizes.graph.layers]
        blocks = [k for k, end in enumerate(ends) if not end]
        extra = (kinds.backward_s - kinds.plain_s[:, None, :])[:, 1:, blocks]
        again = extra.min(axis=(1, 2)) if extra.size else np.zeros(len(both))
        first, last = sizes.inner_span
        before, after = sizes.order[:first], sizes.order[last:]
        counts = np.bincount(sizes.order, minlength=len(ends))
        joules = kinds.forward_j + kinds.backward_j[:, 0, :]
        return cls(
            work_s=_counted(both, counts),
            backward_s=_counted(kinds.plain_s, counts),
            block_s=both[:, blocks].min(axis=1),
            again_s=again,
            first_s=_counted(both, np.bincount(before, minlength=len(ends))),
            last_s=_counted(both, np.bincount(after, minlength=len(ends))),
            dynamic_j=_counted(joules, counts),
        )


def _counted(values: Array, counts: Array) -> Array:
    """Sum over kinds, each as often as it stands in the model."""
    total = np.zeros(len(values))
    for column, count in zip(values.T, counts, strict=True):
        total += count * column
    return total


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


def _priced(
    sizes: LayerSizes, records: Array, like: Accelerator, threads: int, rough: bool
) -> Costs:
    graph, cluster = sizes.graph, sizes.cluster
    return estimate_costs(graph, records, cluster, threads=threads, like=like, bounds_only=rough)


def _rough(sizes: LayerSizes, costs: Costs) -> Totals:
    """Bound the work alone, by longest paths: a roofline holds on one core as well as on all."""
    counts = np.bincount(sizes.order, minlength=len(sizes.graph.layers))
    work, nothing = np.zeros(costs.chips), np.zeros(costs.chips)
    for g, graph in enumerate(costs.graphs):
        work += counts[g // 2] * _longest_path(graph, costs.time_s(g))
    return Totals(work, *[nothing] * 6)


def bound_layers(
    sizes: LayerSizes, records: Array, like: Accelerator, step: str, threads: int = 1
) -> Totals:
    """Bound the layers of a strategy on chips from below.

    Parameters
    ----------
    sizes
        The layers.
    records
        The chips.
    like
        Whose tuning and formats they share.
    step
        ``roofline``, ``mapped`` or ``listed``.
    threads
        At most this many; the answer does not depend on it.
    """
    costs = _priced(sizes, records, like, threads, step == "roofline")
    if step == "roofline":
        return _rough(sizes, costs)
    if step == "listed":
        times = schedule_layers(costs, max_nodes=1, threads=threads)
        return Totals.of(sizes, KindTimes.of(sizes, costs, times.bound_s, times.proven))
    least = np.array([_least_makespan(graph, costs, g) for g, graph in enumerate(costs.graphs)])
    return Totals.of(sizes, KindTimes.of(sizes, costs, least, np.ones(least.shape, dtype=bool)))


def time_layers(
    sizes: LayerSizes,
    records: Array,
    like: Accelerator,
    threads: int = 1,
    nodes: int = MAX_NODES,
    bounds: bool = False,
) -> tuple[KindTimes, Totals, Array]:
    """Schedule the layers of a strategy on chips: times, their lower bounds, static watts.

    With `bounds`, what is proven of the times stands in their place.
    """
    costs = _priced(sizes, records, like, threads, False)
    times = schedule_layers(costs, max_nodes=nodes, threads=threads)
    kinds = KindTimes.of(sizes, costs, times.makespan_s, times.proven)
    least = kinds if kinds.proven.all() else KindTimes.of(sizes, costs, times.bound_s, times.proven)
    return (least if bounds else kinds), Totals.of(sizes, least), costs.static_w
