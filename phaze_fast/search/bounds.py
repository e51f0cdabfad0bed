"""Times of a strategy's layers on many chips: lower bounds first, then schedules.

Four steps, each costlier and closer than the one before: rooflines of operators, operators mapped
onto the chip, the root of the layer's search tree, and the schedule itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.cost import Costs, estimate_costs
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.memory import Optimizer
from phaze_fast.opgraph import OpGraph
from phaze_fast.placement.rates import optimizer_bytes_per_s
from phaze_fast.placement.sizes import StrategySizes
from phaze_fast.placement.times import MAX_NODES, FixedParts, KindTimes
from phaze_fast.schedule import schedule_layers
from phaze_fast.software import check_precision, chip_as_run

__all__ = [
    "STEPS",
    "PricedChips",
    "bound_times",
    "expert_stride",
    "rule_out",
    "schedule_times",
]

Array = np.ndarray[Any, Any]

STEPS = ("roofline", "mapped", "schedule_bound", "scheduled", "placed")
"""What is known of a candidate, from little to all."""

_UNITS_OF_TYPE = ((0, 2), (1, 2))  # of tensor cores and of vector cores: alone, or with the other


def expert_stride(sizes: StrategySizes) -> int | None:
    """Ranks between neighbours of an expert group, where there is one."""
    return sizes.expert_stride if sizes.strategy.expert_parallel > 1 else None


@dataclass(frozen=True, eq=False)
class PricedChips:
    """The operators of a strategy's layers, priced on chips."""

    costs: Costs
    parts: FixedParts
    """What no schedule changes of the layers' times."""

    @classmethod
    def of(
        cls,
        sizes: StrategySizes,
        records: Array,
        like: Accelerator,
        cluster: Cluster,
        optimizer: Optimizer,
        threads: int = 1,
    ) -> PricedChips:
        """Price the operators.

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
        optimizer
            Whose state they stream.
        threads
            At most this many; the answer does not depend on it.
        """
        check_precision(sizes.precision, like)
        costs = estimate_costs(
            sizes.graph,
            records,
            cluster,
            threads=threads,
            like=chip_as_run(like, sizes.software),
            expert_stride=expert_stride(sizes),
        )
        costs = costs.with_contention(sizes.software.contention)
        for group, share in sizes.hidden.items():
            costs = costs.without((group,), share)
        rate = optimizer_bytes_per_s(records, like, optimizer)
        return cls(costs, FixedParts.of(sizes, costs, rate))

    def __len__(self) -> int:
        return self.costs.chips

    def at(self, chips: Array) -> PricedChips:
        """Those of some chips, by position."""
        return PricedChips(self.costs.at(chips), self.parts.at(chips))

    def times(self, makespan_s: Array, proven: Array | None = None) -> KindTimes:
        """Seconds and joules of every kind of layer from makespans, shape (graphs, chips)."""
        sure = np.ones(makespan_s.shape, dtype=bool) if proven is None else proven
        return self.parts.times(makespan_s, sure)


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


def bound_times(chips: PricedChips, step: str, threads: int = 1) -> KindTimes:
    """Bound the layers of a strategy from below: ``mapped`` or ``schedule_bound``."""
    if step == "schedule_bound":
        root = schedule_layers(chips.costs, max_nodes=1, threads=threads)
        return chips.times(root.bound_s, root.proven)
    graphs = enumerate(chips.costs.graphs)
    return chips.times(np.array([_least_makespan(graph, chips.costs, g) for g, graph in graphs]))


def rule_out(
    chips: PricedChips, limits_s: Array, steps_s: Callable[[KindTimes], Array], threads: int = 1
) -> KindTimes:
    """Bound the layers from below, as far as it takes to rule out that a step is within a limit.

    A search tree in which only schedules below a given length are looked for is much smaller than
    that of the optimum. Lengths are the same way from each layer's root bound to its list schedule,
    as far as the bound of the step needs to rise above its limit.

    Parameters
    ----------
    chips
        Priced.
    limits_s
        Seconds of a step for each chip.
    steps_s
        Lower bounds of a step from those of the layers.
    threads
        At most this many; the answer does not depend on it.
    """
    root = schedule_layers(chips.costs, max_nodes=1, threads=threads)
    room_s = root.makespan_s - root.bound_s
    at_root_s = steps_s(chips.times(root.bound_s))
    most_s = steps_s(chips.times(root.makespan_s))
    # Nothing has to be proven of what is above its limit or fits nowhere, nor can it of what stays
    # below with the list schedules.
    within = (at_root_s <= limits_s) & (limits_s < most_s) & np.isfinite(most_s)
    way = np.zeros(len(chips))
    rise_s = most_s[within] - at_root_s[within]
    way[within] = np.minimum((limits_s[within] - at_root_s[within]) / rise_s * _FURTHER, 1.0)
    enough_s = root.bound_s + way * room_s
    bound_s = root.bound_s.copy()
    at = np.flatnonzero(within)
    if len(at):
        some = chips.costs.at(at)
        made = schedule_layers(some, max_nodes=MAX_NODES, threads=threads, enough_s=enough_s[:, at])
        bound_s[:, at] = np.maximum(bound_s[:, at], made.bound_s)
    return chips.times(bound_s)


_FURTHER = 1.03


def schedule_times(
    chips: PricedChips, threads: int = 1, nodes: int = MAX_NODES
) -> tuple[KindTimes, KindTimes]:
    """Schedule the layers of a strategy on chips: their times, and what is proven of them."""
    made = schedule_layers(chips.costs, max_nodes=nodes, threads=threads)
    times = chips.times(made.makespan_s, made.proven)
    return times, times if times.proven.all() else chips.times(made.bound_s, made.proven)
