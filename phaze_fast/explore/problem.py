"""A search problem: one model on a cluster, and the strategies to evaluate on many chips.

A `SearchProblem` is small and is sent to other processes; each process prepares its plan evaluators
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.cost.engine import LayersToBound, roofline_work_j, roofline_works_s
from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.bounds import PricedChips
from phaze_fast.explore.chip_groups import ChipGroups, Variant, scaled_cluster, tier_names
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.memory import optimizer
from phaze_fast.models import Model
from phaze_fast.opgraph import OFFLOAD, Strategy
from phaze_fast.planning import Placed, PlanEvaluator, Training
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.times import MAX_NODES, KindTimes
from phaze_fast.software import BF16, check_precision, chip_as_run
from phaze_fast.tables import Array

Chips = Array | PricedChips
"""Records of chips, or chips with their operators priced."""
_WHOLE_PASSES = frozenset(("1f1b", "gpipe", "interleaved"))
"""Pipeline schedules with whole backward passes: a shorter pass never makes their step longer."""


class BestPlans(NamedTuple):
    """The best plan on each chip with each HBM capacity, one row each: chip after chip."""

    placed: Array
    """Plans as the kernel returns them, without a layout where there is none."""
    borders: Array
    """Cuts and recomputation of all plans."""
    times: KindTimes
    """Times of the layers of each plan."""
    joules: Array
    """Joules of a step."""


@dataclass(frozen=True)
class SearchProblem:
    """A model to be trained on chips of one or several variants.

    The strategies of all variants are listed one after another; a strategy runs only on chips of
    its own variant.
    """

    model: Model
    cluster: Cluster
    """Devices and fabric as given, without a chip."""
    training: Training
    """The step as given."""
    like: Accelerator
    """The chip whose tuning, launch latency and formats all chips share."""
    capacities: tuple[int, ...]
    """HBM capacities that occur, in bytes, rising."""
    variants: tuple[Variant, ...] = ()
    """Links and formats of the chips; empty where they are those of the cluster and the step."""

    @cached_property
    def digest(self) -> str:
        """Hash of the content."""
        digests = []
        for variant in self._each_variant:
            records = (
                self.model,
                variant.cluster(self.cluster),
                variant.training(self.training),
                variant.like(self.like),
            )
            digests.append(digest([*(record.digest() for record in records), self.capacities]))
        return digest(digests) if self.variants else digests[0]

    @property
    def _each_variant(self) -> tuple[Variant, ...]:
        return self.variants or (Variant(),)

    @cached_property
    def evaluators(self) -> tuple[PlanEvaluator, ...]:
        """The plan evaluator of each variant; prepared once in a process."""
        return _evaluators(
            self.model, self.cluster, self.training, self.capacities, self._each_variant
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the evaluators, which every process prepares for itself."""
        return {name: value for name, value in self.__dict__.items() if name != "evaluators"}

    # ---- strategies of all variants ----

    @cached_property
    def strategies(self) -> tuple[tuple[int, int], ...]:
        """The variant of each strategy, and its number among the strategies of the variant."""
        counts = [len(evaluator) for evaluator in self.evaluators]
        return tuple((v, k) for v, count in enumerate(counts) for k in range(count))

    def __len__(self) -> int:
        """Count the strategies of all variants."""
        return len(self.strategies)

    def of(self, s: int) -> tuple[PlanEvaluator, int]:
        """Return the evaluator of strategy `s`, and the number of the strategy in it."""
        variant, k = self.strategies[s]
        return self.evaluators[variant], k

    def plan_order(self, s: int, placed: Placed) -> tuple[float, ...]:
        """Return the key by which `phaze_fast.plan` lists plans: time, then memory, then widths."""
        evaluator, k = self.of(s)
        layout = evaluator.layouts[placed.layout]
        pp, dp, zero = (int(layout[name]) for name in ("pp", "dp", "zero"))
        sizes = evaluator.sizes[k]
        widths = (sizes.inner * pp * dp, sizes.strategy.tp, pp, dp, zero, s)
        return (placed.time_s, placed.memory_bytes, *widths, placed.layout)

    def runs(self, s: int, groups: ChipGroups) -> Array:
        """Mark the chip groups that strategy `s` runs on, shape (groups,)."""
        if not self.variants:
            return np.ones(len(groups), dtype=bool)
        marked: Array = groups.variant == self.strategies[s][0]
        return marked

    @property
    def strategy_fits(self) -> Array:
        """Which strategies have a layout that fits, shape (strategies, capacities)."""
        return np.concatenate([evaluator.strategy_fits for evaluator in self.evaluators])

    @property
    def layout_counts(self) -> Array:
        """How many layouts each strategy has, shape (strategies,)."""
        return np.concatenate([evaluator.layout_counts for evaluator in self.evaluators])

    def rejected_points(self, groups: ChipGroups) -> int:
        """Count the chips times the strategies of their variant that break a rule."""
        points = 0
        for v, evaluator in enumerate(self.evaluators):
            chips = groups.chip[groups.variant == v] if self.variants else groups.chip
            points += evaluator.strategies_rejected * int((chips >= 0).sum())
        return points

    # ---- evaluations on many chips, here or in another process ----

    def work_s(self, s: int, records: Array, threads: int = 1) -> Array:
        """Bound the work of a micro-batch of strategy `s` on chips by rooflines."""
        bounds_s: Array = self.works_s([s], records, threads=threads)[0]
        return bounds_s

    def works_s(
        self, strategies: Sequence[int], records: Array, tight: bool = False, threads: int = 1
    ) -> Array:
        """Bound the work of a micro-batch of strategies of one variant, shape (strategies, chips).

        Strategies that differ in the form of fusion alone share one bound. Bounds are rooflines, or
        `tight` ones (`roofline_works_s`).
        """
        evaluator, own = self.of(strategies[0])[0], self.strategies[strategies[0]][0]
        variant = self._each_variant[own]
        forms: dict[Strategy, list[StrategySizes]] = {}
        for sizes in evaluator.sizes:
            forms.setdefault(sizes.strategy, []).append(sizes)
        wanted = [evaluator.sizes[self.strategies[s][1]].strategy for s in strategies]
        distinct = list(dict.fromkeys(wanted))
        works = []
        for strategy in distinct:
            first, *others = forms[strategy]
            works.append(LayersToBound(first.graph, first.most_hidden, [x.graph for x in others]))
        like = chip_as_run(variant.like(self.like), evaluator.sizes[0].software)
        check_precision(evaluator.sizes[0].precision, like)
        cluster = variant.cluster(self.cluster)
        bounds_s = roofline_works_s(works, records, cluster, like, threads, tight)
        return bounds_s[[distinct.index(strategy) for strategy in wanted]]

    def work_j(self, s: int, records: Array, threads: int = 1) -> Array:
        """Bound the joules of a micro-batch by rooflines, with static watts; shape (2, chips)."""
        evaluator, k = self.of(s)
        variant, sizes = self._each_variant[self.strategies[s][0]], evaluator.sizes[k]
        like = chip_as_run(variant.like(self.like), sizes.software)
        return np.stack(roofline_work_j(sizes.graph, records, like, threads))

    def price(self, s: int, chips: Chips, threads: int = 1) -> PricedChips:
        """Price the operators of strategy `s` on chips, unless that is done already."""
        if isinstance(chips, PricedChips):
            return chips
        variant, k = self.strategies[s]
        return self._price(variant, [k], chips, threads)[0]

    def _price(
        self, variant: int, numbers: Sequence[int], records: Array, threads: int
    ) -> list[PricedChips]:
        """Price the operators of strategies of a variant on chips of that variant."""
        own, evaluator = self._each_variant[variant], self.evaluators[variant]
        return PricedChips.of(
            [evaluator.sizes[k] for k in numbers],
            records,
            like=own.like(self.like),
            cluster=own.cluster(self.cluster),
            optimizer=optimizer(self.training.optimizer_name),
            threads=threads,
        )

    def bound(self, s: int, chips: Chips, step: str, threads: int = 1) -> KindTimes:
        """Bound the layers of strategy `s` on chips: ``mapped`` or ``schedule_bound``."""
        return self.price(s, chips, threads).bound(step, threads)

    def rule_out(
        self,
        s: int,
        chips: Chips,
        capacity: Array,
        limits_s: Array,
        planned: bool,
        threads: int = 1,
    ) -> tuple[KindTimes, Array]:
        """Bound layers and steps of strategy `s`, to prove that the steps exceed their limits.

        Parameters
        ----------
        s
            The strategy.
        chips
            The chips.
        capacity
            Position of the HBM capacity of each chip.
        limits_s
            Seconds of a step for each chip.
        planned
            Whether to bound steps by their best plans too, where bounds of steps do not suffice.
        threads
            At most this many; the answer does not depend on it.
        """
        priced, planned = self.price(s, chips, threads), planned and self._whole_passes
        return priced.rule_out(*self.of(s), capacity, limits_s, planned, threads)

    def schedule(
        self, s: int, chips: Chips, threads: int = 1, nodes: int = MAX_NODES
    ) -> tuple[KindTimes, KindTimes]:
        """Schedule the layers of strategy `s` on chips: their times, and proven lower bounds."""
        return self.price(s, chips, threads).schedule(threads, nodes)

    def place(
        self, s: int, times: KindTimes, least: KindTimes, below_s: Array, threads: int = 1
    ) -> list[list[Placed]]:
        """Find the best plan of strategy `s` on each chip with each HBM capacity.

        Parameters
        ----------
        s
            The strategy.
        times, least
            Times of the layers on the chips, and lower bounds of them.
        below_s
            Longest step of interest, shape (chips, capacities); minus infinity: none is.
        threads
            At most this many; the answer does not depend on it.
        """
        evaluator, k = self.of(s)
        return evaluator.best(k, times, least, below_s, threads)

    @property
    def _whole_passes(self) -> bool:
        """Whether a shorter pass never makes a step longer under any of the schedules."""
        return _WHOLE_PASSES.issuperset(self.training.schedule)

    def best_plans(
        self, variant: int, records: Array, capacity: Array, below_s: Array, threads: int = 1
    ) -> BestPlans:
        """Find the best plan of all strategies on each chip with each HBM capacity.

        Parameters
        ----------
        variant
            That of the chips, by position.
        records
            The chips.
        capacity
            Position of the largest HBM capacity of each chip.
        below_s
            Longest step of interest, shape (chips, capacities); minus infinity: none is.
        threads
            At most this many; the answer does not depend on it.
        """
        evaluator = self.evaluators[variant]
        priced = self._price(variant, range(len(evaluator)), records, threads)
        placed, borders, times, joules = evaluator.space.best_on_chips(
            [own.layers for own in priced],
            capacity,
            np.ascontiguousarray(below_s).ravel(),
            self._whole_passes,
            MAX_NODES,
            threads,
        )
        return BestPlans(placed, borders, KindTimes(**times), joules)

    def least_energy_j(self, s: int, least: KindTimes) -> tuple[Array, Array]:
        """Bound the joules of a step from below: with static power, and of operators alone."""
        evaluator, k = self.of(s)
        layers = evaluator.sizes[k].graph.layers
        counts = np.array([layer.count for layer in layers], dtype=float)
        joules = (least.forward_j + least.backward_j.min(axis=1)) @ counts
        work_s = (least.forward_s + least.plain_s) @ counts
        return self.step_energy_j(s, joules, least.static_w, work_s)

    def step_energy_j(
        self, s: int, joules: Array, static_w: Array, work_s: Array
    ) -> tuple[Array, Array]:
        """Bound a step's joules, with static power and without, from a device's micro-batch."""
        evaluator, k = self.of(s)
        sizes = evaluator.sizes[k]
        passes = sizes.inner * self.training.global_batch / sizes.strategy.micro_batch
        dynamic: Array = passes * joules * (1.0 - 1e-9)
        total: Array = passes * (joules + static_w * work_s) * (1.0 - 1e-9)
        return total, dynamic


@lru_cache(maxsize=16)  # the key omits `like`: evaluators do not depend on it
def _evaluators(
    model: Model,
    cluster: Cluster,
    training: Training,
    capacities: tuple[int, ...],
    variants: tuple[Variant, ...],
) -> tuple[PlanEvaluator, ...]:
    return tuple(
        PlanEvaluator(model, variant.cluster(cluster), variant.training(training), capacities)
        for variant in variants
    )


def problems_of(
    models: Sequence[Model], groups: ChipGroups, cluster: Cluster, training: Training
) -> list[SearchProblem]:
    """Return the search problem of each model.

    Raises
    ------
    InvalidInputError
        Where both the step and the chips set a number format, or plans offload.
    """
    if training.offload or any(OFFLOAD in mode.split("+") for mode in training.recompute):
        raise InvalidInputError(
            "offload: is not accepted where chips are searched, which have no host; expected none"
        )
    capacities = tuple(int(c) for c in groups.capacities)
    precision = training.precision.name
    if any(variant.fp8 for variant in groups.variants) and precision != BF16:
        raise InvalidInputError(
            f"precision: {precision} is not accepted where the space has the axis format; expected "
            f"{BF16}"
        )
    bare = cluster.replace(chip=None)
    if groups.network_share < 1.0:
        bare = scaled_cluster(bare, [groups.network_share] * len(tier_names(bare)))
    return [
        SearchProblem(model, bare, training, groups.like, capacities, groups.variants)
        for model in models
    ]
