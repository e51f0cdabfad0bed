"""Times of a strategy's layers on many chips: lower bounds first, then schedules.

Four steps, each costlier and closer than the one before: rooflines of operators, operators mapped
onto the chip, the root of the layer's search tree, and the schedule itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phaze_fast.cost import Costs, estimate_costs
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.memory import Optimizer
from phaze_fast.opgraph import OpGraph
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.times import (
    MAX_NODES,
    FixedParts,
    KindTimes,
    optimizer_bytes_per_s,
)
from phaze_fast.schedule import layer_makespans
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
    return sizes.expert_stride if sizes.strategy.ep > 1 else None


@dataclass(frozen=True, eq=False)
class _Roots:
    """Roots of the layers' search trees: makespans of list schedules and bounds, where known."""

    known: Array
    """Of which chips, shape (chips,)."""
    makespan_s: Array
    bound_s: Array
    proven: Array
    """Where nothing is left to search; shape (graphs, chips), as the two before it."""

    @classmethod
    def none(cls, graphs: int, chips: int) -> _Roots:
        shape = (graphs, chips)
        known, proven = np.zeros(chips, dtype=bool), np.zeros(shape, dtype=bool)
        return cls(known, np.zeros(shape), np.zeros(shape), proven)


@dataclass(frozen=True, eq=False)
class PricedChips:
    """The operators of a strategy's layers, priced on chips."""

    costs: Costs
    parts: FixedParts
    """What no schedule changes of the layers' times."""
    _roots: _Roots = field(repr=False)
    """Of all chips that were priced together: what is asked of some is known of them later."""
    _rows: Array = field(repr=False)
    """Which of those these are."""

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
        roots = _Roots.none(len(costs.graphs), costs.chips)
        return cls(costs, FixedParts.of(sizes, costs, rate), roots, np.arange(costs.chips))

    def __len__(self) -> int:
        return self.costs.chips

    def at(self, chips: Array) -> PricedChips:
        """Those of some chips, by position."""
        rows = self._rows[chips]
        return PricedChips(self.costs.at(chips), self.parts.at(chips), self._roots, rows)

    def roots(self, threads: int = 1) -> tuple[Array, Array, Array]:
        """Makespans of list schedules, bounds, and whether those meet; shape (graphs, chips)."""
        roots = self._roots
        new = np.flatnonzero(~roots.known[self._rows])
        if len(new):
            wanted = np.ones((len(self.costs.graphs), len(new)), dtype=bool)
            some = self.costs if len(new) == len(self) else self.costs.at(new)
            found, rows = layer_makespans(some, wanted, 1, threads), self._rows[new]
            tables = (roots.makespan_s, roots.bound_s, roots.proven)
            for table, values in zip(tables, found, strict=True):
                table[:, rows] = values
            roots.known[rows] = True
        at = self._rows
        return roots.makespan_s[:, at], roots.bound_s[:, at], roots.proven[:, at]

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
        _, bound_s, proven = chips.roots(threads)
        return chips.times(bound_s, proven)
    graphs = enumerate(chips.costs.graphs)
    return chips.times(np.array([_least_makespan(graph, chips.costs, g) for g, graph in graphs]))


def rule_out(
    chips: PricedChips,
    limits_s: Array,
    steps_s: Callable[[KindTimes, Array], Array],
    threads: int = 1,
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
        Lower bounds of a step from those of the layers, on the chips of some positions.
    threads
        At most this many; the answer does not depend on it.
    """
    list_s, root_s, proven = chips.roots(threads)
    everything = np.arange(len(chips))
    at_root_s = steps_s(chips.times(root_s), everything)
    # Nothing has to be proven of what is above its limit or fits nowhere, nor can it of what stays
    # below with the list schedules.
    below = np.flatnonzero(at_root_s <= limits_s)
    most_s = np.full(len(chips), np.inf)
    if len(below):
        most_s[below] = steps_s(chips.at(below).times(list_s[:, below]), below)
    within = (at_root_s <= limits_s) & (limits_s < most_s) & np.isfinite(most_s)
    way = np.zeros(len(chips))
    rise_s = most_s[within] - at_root_s[within]
    way[within] = np.minimum((limits_s[within] - at_root_s[within]) / rise_s * _FURTHER, 1.0)
    enough_s = root_s + way * (list_s - root_s)
    wanted = within & ~proven
    _, bound_s, _ = layer_makespans(chips.costs, wanted, MAX_NODES, threads, enough_s, True)
    return chips.times(np.fmax(root_s, bound_s))


_FURTHER = 1.03


def schedule_times(
    chips: PricedChips, threads: int = 1, nodes: int = MAX_NODES
) -> tuple[KindTimes, KindTimes]:
    """Schedule the layers of a strategy on chips: their times, and what is proven of them."""
    list_s, root_s, sure = chips.roots(threads)
    made_s, bound_s, proven = layer_makespans(chips.costs, ~sure, nodes, threads)
    proven |= sure
    times = chips.times(np.where(sure, list_s, made_s), proven)
    if times.proven.all():
        return times, times
    return times, chips.times(np.where(sure, root_s, bound_s), proven)
