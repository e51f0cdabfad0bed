"""What is searched for: a model on a cluster, and what is asked of its strategies on many chips.

A `SearchProblem` is small and travels to other processes, which prepare its evaluator once for
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from phaze_fast.cost.engine import roofline_work_s
from phaze_fast.documents import digest
from phaze_fast.errors import InfeasibleError
from phaze_fast.explore.bounds import (
    PricedChips,
    bound_times,
    expert_stride,
    rule_out,
    schedule_times,
)
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.variants import VariedProblem, check_formats
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.memory import optimizer
from phaze_fast.models import Model
from phaze_fast.planning import Placed, PlanEvaluator, Training
from phaze_fast.planning.times import MAX_NODES, KindTimes

__all__ = ["Problem", "SearchProblem", "problems_of"]

Array = np.ndarray[Any, Any]
Chips = Array | PricedChips
"""Records of chips, or chips with their operators priced."""


@dataclass(frozen=True)
class SearchProblem:
    """A model to be trained, and all that is given for it."""

    model: Model
    cluster: Cluster
    """Without a chip."""
    training: Training
    like: Accelerator
    """The chip whose tuning, launch latency and formats all chips share."""
    capacities: tuple[int, ...]
    """Bytes of HBM that occur, rising."""

    @cached_property
    def digest(self) -> str:
        """Hash of the content."""
        records = (self.model, self.cluster, self.training, self.like)
        return digest([*(record.digest() for record in records), self.capacities])

    @property
    def evaluator(self) -> PlanEvaluator:
        """Strategies and layouts; prepared once in a process."""
        return _evaluator(self.model, self.cluster, self.training, self.capacities)

    # ---- what other processes are asked as well ----

    def work_s(self, s: int, records: Array, threads: int = 1) -> Array:
        """Bound the work of a micro-batch of strategy `s` on chips by rooflines."""
        sizes = self.evaluator.sizes[s]
        stride = expert_stride(sizes)
        return roofline_work_s(
            sizes.graph, records, self.cluster, self.like, threads, stride, sizes.hidden
        )

    def price(self, s: int, chips: Chips, threads: int = 1) -> PricedChips:
        """Price the operators of strategy `s` on chips, if that is not done."""
        if isinstance(chips, PricedChips):
            return chips
        state = optimizer(self.training.optimizer)
        sizes = self.evaluator.sizes[s]
        return PricedChips.of(sizes, chips, self.like, self.cluster, state, threads)

    def bound(self, s: int, chips: Chips, step: str, threads: int = 1) -> KindTimes:
        """Bound the layers of strategy `s` on chips."""
        return bound_times(self.price(s, chips, threads), step, threads)

    def rule_out(
        self, s: int, chips: Chips, rooms: Array, limits_s: Array, threads: int = 1
    ) -> KindTimes:
        """Bound the layers of strategy `s` so far that steps are above limits, where they are."""
        return rule_out(
            self.price(s, chips, threads),
            limits_s,
            lambda least, at: self.evaluator.bounds(s, least, rooms[at], threads),
            threads,
        )

    def schedule(
        self, s: int, chips: Chips, threads: int = 1, nodes: int = MAX_NODES
    ) -> tuple[KindTimes, KindTimes]:
        """Schedule the layers of strategy `s` on chips: times, and what is proven of them."""
        return schedule_times(self.price(s, chips, threads), threads, nodes)

    def place(
        self, s: int, times: KindTimes, least: KindTimes, below_s: Array, threads: int = 1
    ) -> list[list[Placed]]:
        """Place strategy `s` on chips with each capacity, where it may take at most `below_s`."""
        return self.evaluator.best(s, times, least, below_s, threads)

    def of(self, s: int) -> tuple[SearchProblem, int]:
        """Give the problem of a strategy, and the strategy's number there: this one."""
        return self, s

    def least_energy_j(self, s: int, least: KindTimes) -> tuple[Array, Array]:
        """Joules of a step at least: all passes and what leaks while they run; passes alone."""
        sizes = self.evaluator.sizes[s]
        counts = np.array([layer.count for layer in sizes.graph.layers], dtype=float)
        passes = sizes.inner * self.training.global_batch / sizes.strategy.micro_batch
        joules = (least.forward_j + least.backward_j[:, 0, :]) @ counts
        work = (least.forward_s + least.plain_s) @ counts
        spent: Array = passes * joules * (1.0 - 1e-9)
        found: Array = passes * (joules + least.static_w * work) * (1.0 - 1e-9)
        return found, spent


@lru_cache(maxsize=16)  # the chip that others are like has no part in it
def _evaluator(
    model: Model, cluster: Cluster, training: Training, capacities: tuple[int, ...]
) -> PlanEvaluator:
    return PlanEvaluator(model, cluster, training, capacities)


Problem = SearchProblem | VariedProblem


def problems_of(
    models: Sequence[Model], groups: ChipGroups, cluster: Cluster, training: Training
) -> list[Any]:
    """Pose the problem of each model.

    Raises
    ------
    InfeasibleError
        Where no chip has HBM to hold anything.
    """
    capacities = tuple(int(c) for c in groups.capacities)
    if max(capacities) <= training.reserved_bytes:
        raise InfeasibleError(
            f"no chip has more HBM than reserved_bytes, {training.reserved_bytes}; the largest has "
            f"{max(capacities)}"
        )
    bare = cluster.replace(chip=None)
    if groups.variants:
        check_formats(groups.variants, training)
        return [
            VariedProblem(
                tuple(
                    SearchProblem(
                        model,
                        v.cluster(bare),
                        v.training(training),
                        v.like(groups.like),
                        capacities,
                    )
                    for v in groups.variants
                )
            )
            for model in models
        ]
    return [SearchProblem(model, bare, training, groups.like, capacities) for model in models]
