"""Times of a strategy's layers on many chips: lower bounds first, then schedules.

There are four steps, each costlier and tighter than the one before: rooflines of the operators,
operators mapped onto the chip, the root of the layer's branch-and-bound tree, and the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from phaze_fast.cost import Costs
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.memory import Optimizer
from phaze_fast.opgraph import OpGraph
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.times import (
    MAX_NODES,
    FixedParts,
    KindTimes,
    operator_costs,
    optimizer_bytes_per_s,
    optimizer_products_s,
    step_matrices,
)
from phaze_fast.schedule import layer_makespans
from phaze_fast.software import check_precision
from phaze_fast.tables import Array

STEPS = ("roofline", "mapped", "schedule_bound", "scheduled", "placed")
"""Steps of evaluating a candidate, each with a tighter bound than the one before."""

_UNITS_OF_TYPE = ((0, 2), (1, 2))
"""Codes of the operator units that use tensor cores, and vector cores: one type alone, or both."""
_ROUNDED_DOWN = 1.0 - 1e-12
_BEYOND_LIMIT = 1.03
"""How far beyond a limit lower bounds of layers are raised, so that rounding does not matter."""


@dataclass(frozen=True, eq=False)
class _Roots:
    """Roots of the layers' branch-and-bound trees, filled in as chips are evaluated.

    All arrays but the first have shape (graphs, chips).
    """

    known: Array
    """Chips whose roots are filled in, shape (chips,)."""
    makespan_s: Array
    """Makespans of list schedules."""
    bound_s: Array
    proven: Array
    """Where the makespan of the list schedule equals `bound_s`, up to rounding."""

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
    """The part of the layers' times that does not depend on the schedule."""
    _roots: _Roots = field(repr=False)
    """Shared by all selections of the chips that were priced together."""
    _rows: Array = field(repr=False)
    """Positions of these chips among all that were priced together."""

    @classmethod
    def of(
        cls,
        sizes: StrategySizes,
        records: Array,
        *,
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
            The chip whose tuning and formats all of them share.
        cluster
            The devices, and the fabric on which collectives are priced.
        optimizer
            The optimiser, for the bytes of its state.
        threads
            At most this many; the answer does not depend on it.
        """
        check_precision(sizes.precision, like)
        costs = operator_costs([sizes], records, cluster, threads, like)
        rate = optimizer_bytes_per_s(records, like, optimizer)
        roots = _Roots.none(len(costs.graphs), costs.chips)
        parts = FixedParts.of(sizes, costs, rate)
        if optimizer.newton_schulz_steps is not None:
            products_s, launching_s = optimizer_products_s(
                step_matrices(sizes), records, sizes.software, optimizer, threads, like
            )
            parts = replace(parts, step_s=products_s, launching_s=launching_s)
        return cls(costs, parts, roots, np.arange(costs.chips))

    def __len__(self) -> int:
        return self.costs.chips

    def at(self, chips: Array) -> PricedChips:
        """Select chips by position."""
        rows = self._rows[chips]
        return PricedChips(self.costs.at(chips), self.parts.at(chips), self._roots, rows)

    def _root(self, threads: int) -> tuple[Array, Array, Array]:
        """Return makespans of list schedules, their lower bounds, and whether the two are equal."""
        roots, rows = self._roots, self._rows
        new = np.flatnonzero(~roots.known[rows])
        if len(new):
            wanted = np.ones((len(self.costs.graphs), len(new)), dtype=bool)
            makespan_s, bound_s, proven = layer_makespans(self.costs.at(new), wanted, 1, threads)
            roots.makespan_s[:, rows[new]] = makespan_s
            roots.bound_s[:, rows[new]] = bound_s
            roots.proven[:, rows[new]] = proven
            roots.known[rows[new]] = True
        return roots.makespan_s[:, rows], roots.bound_s[:, rows], roots.proven[:, rows]

    def _times(self, makespan_s: Array, proven: Array | None = None) -> KindTimes:
        """Seconds and joules of every kind of layer from makespans, shape (graphs, chips)."""
        sure = np.ones(makespan_s.shape, dtype=bool) if proven is None else proven
        return self.parts.times(makespan_s, sure)

    def bound(self, step: str, threads: int = 1) -> KindTimes:
        """Bound times of layers from below by a step of `STEPS`: mapped or schedule_bound."""
        if step == "schedule_bound":
            _, bound_s, proven = self._root(threads)
            return self._times(bound_s, proven)
        least_s = [_least_makespan(g, self.costs, at) for at, g in enumerate(self.costs.graphs)]
        return self._times(np.array(least_s))

    def rule_out(
        self,
        limits_s: Array,
        steps_s: Callable[[KindTimes, Array], Array],
        plans_s: Callable[[KindTimes, KindTimes, Array], Array],
        threads: int = 1,
    ) -> tuple[KindTimes, Array]:
        """Bound the layers and the step from below, to prove that the step exceeds its limit.

        The best plan of layers as short as their lower bounds takes no longer than that of the
        layers themselves, if backward passes that hide gradient exchanges, and the optimiser's
        step, have the times of the list schedules.

        Branch and bound that has only to exclude schedules shorter than a given length visits few
        nodes. The length for each layer is interpolated between its root bound and its list
        schedule, by the fraction with which the plan exceeds its limit if it grows as the bound.

        Parameters
        ----------
        limits_s
            Seconds of a step for each chip.
        steps_s
            Computes lower bounds of steps from lower bounds of layers, on chips by position.
        plans_s
            Computes lower bounds of plans, or of steps, from times and bounds of layers, likewise.
        threads
            At most this many; the answer does not depend on it.
        """
        list_s, root_s, proven = self._root(threads)
        root, longest = self._times(root_s), self._times(list_s)

        def raise_by_plans(least: KindTimes) -> None:
            at = np.flatnonzero((least_s <= limits_s) & ~proven.all(axis=0))
            if len(at):
                own, most = least.at(at), longest.at(at)
                short = replace(own, plain_s=most.plain_s, step_s=most.step_s)
                least_s[at] = np.maximum(least_s[at], plans_s(short, own, at))

        at_root_s = steps_s(root, np.arange(len(self)))
        least_s = at_root_s.copy()
        raise_by_plans(root)
        below = np.flatnonzero(least_s <= limits_s)
        most_s = np.full(len(self), -np.inf)
        if len(below):
            most_s[below] = steps_s(longest.at(below), below)
        rise = np.divide(at_root_s, least_s, out=np.ones(len(self)), where=least_s > at_root_s)
        fraction = _fractions(at_root_s, most_s, limits_s * rise)
        enough_s = root_s + fraction * (list_s - root_s)
        wanted = (fraction > 0.0) & ~proven
        if not wanted.any():
            return root, least_s
        _, bound_s, _ = layer_makespans(self.costs, wanted, MAX_NODES, threads, enough_s, True)
        least = self._times(np.fmax(root_s, bound_s))
        raise_by_plans(least)
        return least, least_s

    def schedule(self, threads: int = 1, nodes: int = MAX_NODES) -> tuple[KindTimes, KindTimes]:
        """Schedule the layers: their times, and proven lower bounds of them."""
        list_s, root_s, sure = self._root(threads)
        made_s, bound_s, proven = layer_makespans(self.costs, ~sure, nodes, threads)
        proven |= sure
        times = self._times(np.where(sure, list_s, made_s), proven)
        if times.proven.all():
            return times, times
        return times, self._times(np.where(sure, root_s, bound_s), proven)


def _fractions(low_s: Array, high_s: Array, limits_s: Array) -> Array:
    """Return the fraction of the way from `low_s` to `high_s` at which steps exceed their limits.

    It is zero where `high_s`, the step with list schedules, is within the limit, so that the step
    cannot be ruled out, and negative where `low_s` exceeds the limit.
    """
    fractions = np.zeros(len(limits_s))
    over = (limits_s < high_s) & np.isfinite(high_s)
    needed = (limits_s[over] - low_s[over]) / (high_s[over] - low_s[over]) * _BEYOND_LIMIT
    fractions[over] = np.minimum(needed, 1.0)
    return fractions


def _longest_path(graph: OpGraph, seconds: Array) -> Array:
    """Length of the longest path of operators, for each chip."""
    finish = np.zeros((len(graph), len(seconds)))
    for i, own in enumerate(seconds.T):
        finish[i] += own
        for j in graph.indices[graph.indptr[i] : graph.indptr[i + 1]]:
            np.maximum(finish[j], finish[i], out=finish[j])
    longest: Array = finish.max(axis=0, initial=0.0)
    return longest


@lru_cache(maxsize=1024)
def _most_at_once(indptr: bytes, indices: bytes) -> Array:
    """Most operators that can run at once where each operator does, itself included (Dilworth)."""
    begins, ends = np.frombuffer(indptr, np.int32), np.frombuffer(indices, np.int32).tolist()
    after: list[set[int]] = [set() for _ in begins[1:]]
    for i in reversed(range(len(after))):
        for j in ends[begins[i] : begins[i + 1]]:
            after[i] |= {j} | after[j]
    most = []
    for i in range(len(after)):
        others = {j for j in range(len(after)) if j not in after[i] and i not in after[j]}
        before: dict[int, int] = {}  # by operator, the one before it in its chain
        chained = sum(_chain(j, after, others, before, set()) for j in others)
        most.append(len(others) - chained)
    return np.array(most, dtype=float)


def _chain(
    i: int, after: list[set[int]], others: set[int], before: dict[int, int], tried: set[int]
) -> bool:
    """Put an operator before a later one in a chain, moving others if needed; whether it worked."""
    for j in after[i] & others - tried:
        tried.add(j)
        if j not in before or _chain(before[j], after, others, before, tried):
            before[j] = i
            return True
    return False


def _least_makespan(graph: OpGraph, costs: Costs, at: int) -> Array:
    """Lower bounds of a layer's makespan: its longest path; its work in all, and by core type.

    An operator on all cores runs alone and counts in full; on one core, where at most k operators
    run at once, it counts a k-th of its time (the rates of docs/schedule.md).
    """
    one_s, all_s = costs.one_core_s(at), costs.time_s(at)
    least = _longest_path(graph, np.minimum(one_s, all_s))
    share_s = one_s / _most_at_once(graph.indptr.tobytes(), graph.indices.tobytes())
    np.maximum(least, np.minimum(all_s, share_s).sum(axis=1) * _ROUNDED_DOWN, out=least)
    units = graph.ops["unit"]
    for type_, (own, both) in enumerate(_UNITS_OF_TYPE):
        on_type = (units == own) | (units == both)
        cores = costs.cores[:, type_ : type_ + 1]
        work = np.minimum(all_s[:, on_type], one_s[:, on_type] / cores).sum(axis=1)
        np.maximum(least, work, out=least)
    return least
