"""Times of a strategy's layers on many chips: lower bounds first, then schedules.

There are five steps, each costlier and tighter than the one before: rooflines of the operators, the
work of all of them, operators mapped onto the chip, the root of the layer's branch-and-bound tree,
and the schedule. The last three are steps of ``_core.LayersOnChips``, which this module builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.cost import Costs
from phaze_fast.cost.engine import CostTable
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.memory import Optimizer
from phaze_fast.planning import PlanEvaluator
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.times import (
    MAX_NODES,
    KindTimes,
    LayerPasses,
    expert_wait_s,
    layer_places,
    operator_costs,
    optimizer_bytes_per_s,
    optimizer_products_s,
    step_matrices,
)
from phaze_fast.schedule.layers import graph_arrays
from phaze_fast.software import check_precision
from phaze_fast.tables import Array

STEPS = ("roofline", "work", "mapped", "schedule_bound", "scheduled", "placed")
"""Steps of evaluating a candidate, each with a tighter bound than the one before."""


class _LayerGraphs(NamedTuple):
    """What no chip changes about the layers of a strategy, as ``_core.LayersOnChips`` takes it."""

    kinds: int
    variants: int
    op_ptr: Array
    """Where the operators of each graph begin; forward and backward graphs alternate."""
    types: Array
    most_at_once: Array
    edge_ptr: Array
    edge_from: Array
    edge_to: Array
    in_order: Array
    again: Array
    late: Array
    host_s: Array
    host_again_s: Array
    wait_s: Array


@lru_cache(maxsize=4096)
def _layer_graphs(sizes: StrategySizes) -> _LayerGraphs:
    layers, software = sizes.graph.layers, sizes.software
    graphs = [graph for layer in layers for graph in (layer.forward, layer.backward)]
    passes = [LayerPasses.of(layer, sizes.variants, software) for layer in layers]
    arrays = [graph_arrays(graph) for graph in graphs]
    again = [
        np.concatenate([part for own in passes for part in (own.again[v], own.late[0] & False)])
        for v in range(len(sizes.variants))
    ]
    late = [part for own in passes for part in (own.again[0] & False, own.late[0])]
    waits = [expert_wait_s(sizes.graph, layer.kind, software) for layer in layers]
    return _LayerGraphs(
        kinds=len(layers),
        variants=len(sizes.variants),
        op_ptr=np.array([0, *accumulate(map(len, graphs))], dtype=np.int64),
        types=np.concatenate([types for types, _, _ in arrays]),
        most_at_once=np.concatenate([graph.most_at_once for graph in graphs]),
        edge_ptr=np.array([0, *accumulate(len(into) for _, _, into in arrays)], dtype=np.int64),
        edge_from=np.concatenate([start for _, start, _ in arrays]),
        edge_to=np.concatenate([into for _, _, into in arrays]),
        in_order=np.array([graph.in_order for graph in graphs], dtype=np.uint8),
        again=np.concatenate(again).astype(np.uint8),
        late=np.concatenate(late).astype(np.uint8),
        host_s=np.array([own.host_s for own in passes]).T.ravel(),
        host_again_s=np.array([own.host_again_s for own in passes]).T.ravel(),
        wait_s=np.array(waits).T.ravel(),
    )


class _LayerCosts(NamedTuple):
    """What the operators of these layers cost on chips, as ``_core.LayersOnChips`` takes it."""

    tables: tuple[CostTable, ...]
    table: Array
    column: Array
    network_s: Array
    cores: Array
    hbm_bytes_per_s: Array
    static_w: Array
    limit_w: Array
    step_s: Array
    launching_s: Array

    @classmethod
    def of(
        cls, costs: Costs, hbm_bytes_per_s: Array, products_s: Array, launching_s: Array
    ) -> _LayerCosts:
        tables, network_s = costs.tables, costs.exposed_network_s()
        table, column = np.zeros((2, network_s.shape[1]), dtype=np.int64)
        for number, own in enumerate(tables):
            here = own.column_of >= 0
            table[here], column[here] = number, own.column_of[here]
        return cls(
            tables=tables,
            table=table.astype(np.int32),
            column=column,
            network_s=network_s.ravel(),
            cores=np.ascontiguousarray(costs.cores).ravel(),
            hbm_bytes_per_s=hbm_bytes_per_s,
            static_w=np.ascontiguousarray(costs.static_w),
            limit_w=np.ascontiguousarray(costs.limit_w),
            step_s=products_s.ravel(),
            launching_s=launching_s.ravel(),
        )


@dataclass(frozen=True, eq=False)
class PricedChips:
    """The operators of a strategy's layers, priced on chips."""

    costs: Costs
    """Of all chips that were priced together."""
    hbm_bytes_per_s: Array
    """Rate at which the optimiser's state streams through each of these."""
    layers: _core.LayersOnChips
    """The layers on all of these, with the roots that were found."""
    rows: Array = field(repr=False)
    """Positions of the selected chips among these."""

    @classmethod
    def of(
        cls,
        strategies: Sequence[StrategySizes],
        records: Array,
        *,
        like: Accelerator,
        cluster: Cluster,
        optimizer: Optimizer,
        threads: int = 1,
    ) -> list[PricedChips]:
        """Price the operators of strategies, which have one number format and software profile.

        Parameters
        ----------
        strategies
            The layers of each.
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
        check_precision(strategies[0].precision, like)
        rate = np.ascontiguousarray(optimizer_bytes_per_s(records, like, optimizer))
        alike: dict[tuple[float, bool], list[int]] = {}
        for number, own in enumerate(strategies):
            overlap = own.strategy.expert_overlap, own.strategy.overlap_experts
            alike.setdefault(overlap, []).append(number)
        found: dict[int, PricedChips] = {}
        for numbers in alike.values():
            some = tuple(strategies[number] for number in numbers)
            costs, places = (
                operator_costs(some, records, cluster, threads, like),
                layer_places(some),
            )
            for number, own in zip(numbers, some, strict=True):
                first = [places[id(layer)] for layer in own.graph.layers]
                mine = costs.only([at + later for at in first for later in (0, 1)])
                products = np.zeros((2, costs.chips, len(first)))
                if optimizer.newton_schulz_steps is not None:
                    products = np.stack(
                        optimizer_products_s(
                            step_matrices(own), records, own.software, optimizer, threads, like
                        )
                    )
                priced = _LayerCosts.of(mine, rate, *products)
                layers = _core.LayersOnChips(_layer_graphs(own), priced)
                found[number] = cls(mine, rate, layers, np.arange(costs.chips))
        return [found[number] for number in range(len(strategies))]

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, chips: Array) -> PricedChips:
        """Select chips by position."""
        return PricedChips(self.costs, self.hbm_bytes_per_s, self.layers, self.rows[chips])

    def bound(self, step: str, threads: int = 1) -> KindTimes:
        """Bound times of layers from below by a step of `STEPS`: mapped or schedule_bound."""
        bounded = self.layers.map if step == "mapped" else self.layers.bound
        return KindTimes(**bounded(self.rows, threads))

    def rule_out(
        self,
        evaluator: PlanEvaluator,
        strategy: int,
        memory_limits: Array,
        limits_s: Array,
        planned: bool,
        threads: int = 1,
    ) -> tuple[KindTimes, Array]:
        """Bound the layers and the step from below, to prove that the step exceeds its limit.

        Parameters
        ----------
        evaluator, strategy
            Evaluates the steps of these layers: those of that strategy.
        memory_limits
            Position of the memory limit of each chip.
        limits_s
            Seconds of a step for each chip.
        planned
            Whether to bound steps by their best plans too, where bounds of steps do not suffice;
            for schedules in which a shorter pass never makes a step longer.
        threads
            At most this many; the answer does not depend on it.
        """
        least, least_s = evaluator.space.rule_out(
            strategy, self.layers, self.rows, memory_limits, limits_s, planned, MAX_NODES, threads
        )
        return KindTimes(**least), least_s

    def schedule(self, threads: int = 1, nodes: int = MAX_NODES) -> tuple[KindTimes, KindTimes]:
        """Schedule the layers: their times, and proven lower bounds of them."""
        times, least = self.layers.schedule(self.rows, nodes, threads)
        return KindTimes(**times), KindTimes(**least)
