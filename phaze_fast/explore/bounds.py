"""Times of a strategy's layers on many chips: lower bounds first, then schedules.

There are five steps, each costlier and tighter than the one before: rooflines of the operators, the
work of all of them, operators mapped onto the chip, the root of the layer's branch-and-bound tree,
and the schedule. The last three are steps of ``_core.LayersOnChips``, which this module builds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from phaze_fast import _core
from phaze_fast.cost import Costs
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.memory import Optimizer
from phaze_fast.planning import PlanEvaluator
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.times import (
    MAX_NODES,
    KindTimes,
    LayerCosts,
    LayerGraphs,
    layers_of,
    operator_costs,
    optimizer_bytes_per_s,
    optimizer_products_s,
    step_matrices,
)
from phaze_fast.software import check_precision
from phaze_fast.tables import Array

STEPS = ("roofline", "work", "mapped", "schedule_bound", "scheduled", "placed")
"""Steps of evaluating a candidate, each with a tighter bound than the one before."""


@lru_cache(maxsize=4096)
def layer_graphs(sizes: StrategySizes) -> LayerGraphs:
    """Describe the layers of a strategy to ``_core.LayersOnChips``."""
    layers = sizes.graph.layers
    graphs = [graph for layer in layers for graph in (layer.forward, layer.backward)]
    most = [graph.most_at_once for graph in graphs]
    own = LayerGraphs.of([(k, sizes.graph) for k in layers], sizes.variants, sizes.software)
    return own._replace(most_at_once=np.concatenate(most))


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
            costs = operator_costs(some, records, cluster, threads, like)
            place = {key: number for number, key in enumerate(layers_of(some))}
            for number, own in zip(numbers, some, strict=True):
                first = [place[id(layer)] for layer in own.graph.layers]
                mine = costs.only([2 * at + later for at in first for later in (0, 1)])
                products = np.zeros((2, costs.chips, len(first)))
                if optimizer.newton_schulz_steps is not None:
                    products = np.stack(
                        optimizer_products_s(
                            step_matrices(own), records, own.software, optimizer, threads, like
                        )
                    )
                priced = LayerCosts.of(mine, rate, *products)
                layers = _core.LayersOnChips(layer_graphs(own), priced)
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
