"""Chips of one space that run over different links, or compute in different formats.

Such chips differ in their problem and not in rates alone: in the fabric that links make, and in the
operators of a step. A variant is what they share. The strategies of all variants are listed one
after another; a candidate of a strategy and a chip group of another variant does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, Cluster, FlatFabric, TieredFabric
from phaze_fast.hardware.space_spec import FP8_RATE
from phaze_fast.models import Model
from phaze_fast.planning import PlanEvaluator, Training
from phaze_fast.software import BF16, load_precision

if TYPE_CHECKING:
    from phaze_fast.explore.problem import SearchProblem

__all__ = ["JoinedEvaluator", "Variant", "VariedProblem", "variants_of"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, order=True)
class Variant:
    """What chips that share a problem have in common."""

    link_share: float
    """Bandwidth of all links of a chip over those of the space's base."""
    fp8: bool
    """Whether the step computes in FP8."""

    def cluster(self, cluster: Cluster) -> Cluster:
        """Give the cluster with the links of these chips: the innermost tier where there are."""
        fabric: Any = cluster.fabric
        if self.link_share == 1.0:
            return cluster
        if isinstance(fabric, TieredFabric):
            first = fabric.tiers[0]
            rate = first.bandwidth_bytes_per_s * self.link_share
            tiers = (first.replace(bandwidth_bytes_per_s=rate), *fabric.tiers[1:])
            return cluster.replace(fabric=fabric.replace(tiers=tiers))
        name = "link_bandwidth_bytes_per_s"
        if isinstance(fabric, FlatFabric):
            name = "bandwidth_bytes_per_s"
        scaled = {name: getattr(fabric, name) * self.link_share}
        return cluster.replace(fabric=fabric.replace(**scaled))

    def training(self, training: Training) -> Training:
        """Give the step in the format of these chips."""
        return training.replace(precision=load_precision("fp8")) if self.fp8 else training

    def like(self, like: Accelerator) -> Accelerator:
        """Give the chip that they are like, with their format."""
        if not self.fp8:
            return like
        rates = {**like.tensor_core.rates, "fp8": FP8_RATE}
        return like.replace(tensor_core=like.tensor_core.replace(rates=rates))


def variants_of(
    chips: Array, base: Accelerator, formats: bool
) -> tuple[tuple[Variant, ...], Array]:
    """List the variants of chips, and say which each chip is.

    Parameters
    ----------
    chips
        Records.
    base
        Whose links the cluster's fabric has.
    formats
        Whether chips with FP8 compute in it.
    """
    share = np.ones(len(chips))
    if base.links is not None:
        whole = base.links.count * base.links.bandwidth_bytes_per_s
        share = chips["links"] * chips["link_bytes_per_s"] / whole
    fp8 = (chips["fp8"] > 0) & formats
    keys, which = np.unique(np.stack([share, fp8], axis=1), axis=0, return_inverse=True)
    return tuple(Variant(float(a), bool(b)) for a, b in keys), which.reshape(-1)


class JoinedEvaluator:
    """Strategies of several evaluators one after another."""

    def __init__(self, parts: Sequence[PlanEvaluator]) -> None:
        self.parts = list(parts)
        self.at = [(v, k) for v, part in enumerate(parts) for k in range(len(part))]
        self.sizes = [size for part in parts for size in part.sizes]
        self.strategies_rejected = 0
        self.training = parts[0].training

    def __len__(self) -> int:
        return len(self.at)

    def of(self, s: int) -> tuple[PlanEvaluator, int]:
        """Give the evaluator of a strategy, and the strategy's number there."""
        v, k = self.at[s]
        return self.parts[v], k

    @cached_property
    def fits(self) -> Array:
        """Which layouts have some partition that fits, shape (layouts, capacities)."""
        return np.concatenate([part.fits for part in self.parts])

    @cached_property
    def strategy_fits(self) -> Array:
        """Which strategies have a layout that fits, shape (strategies, capacities)."""
        return np.concatenate([part.strategy_fits for part in self.parts])

    @cached_property
    def layout_counts(self) -> Array:
        """How many layouts each strategy has, shape (strategies,)."""
        return np.concatenate([part.layout_counts for part in self.parts])

    def bounds(self, s: int, least: Any, room: Array, threads: int = 1) -> Array:
        """Lower bounds of strategy `s` on each chip."""
        part, k = self.of(s)
        return part.bounds(k, least, room, threads)

    def work_bounds(self, s: int, work_s: Array, room: Array) -> Array:
        """Lower bounds from the work of one micro-batch alone."""
        part, k = self.of(s)
        return part.work_bounds(k, work_s, room)


@dataclass(frozen=True)
class VariedProblem:
    """One model on chips of several variants; asked as a `SearchProblem` is."""

    variants: tuple[SearchProblem, ...]

    @property
    def model(self) -> Model:
        """What is trained."""
        return self.variants[0].model

    @property
    def cluster(self) -> Cluster:
        """With the links of the first variant."""
        return self.variants[0].cluster

    @property
    def training(self) -> Training:
        """In the format of the first variant."""
        return self.variants[0].training

    @property
    def like(self) -> Accelerator:
        """The chip that those of the first variant are like."""
        return self.variants[0].like

    @property
    def capacities(self) -> tuple[int, ...]:
        """Bytes of HBM that occur, rising."""
        return self.variants[0].capacities

    @cached_property
    def digest(self) -> str:
        """Hash of the content."""
        return digest([problem.digest for problem in self.variants])

    @cached_property
    def evaluator(self) -> JoinedEvaluator:
        """Strategies of all variants."""
        return JoinedEvaluator([problem.evaluator for problem in self.variants])

    def of(self, s: int) -> tuple[SearchProblem, int]:
        """Give the problem of a strategy, and the strategy's number there."""
        v, k = self.evaluator.at[s]
        return self.variants[v], k

    def has(self, s: int, variant: Array) -> Array:
        """Whether chips of variants run a strategy."""
        found: Array = variant == self.evaluator.at[s][0]
        return found

    def work_s(self, s: int, records: Array, threads: int = 1) -> Array:
        """Bound the work of a micro-batch of strategy `s` on chips by rooflines."""
        problem, k = self.of(s)
        return problem.work_s(k, records, threads)

    def price(self, s: int, chips: Any, threads: int = 1) -> Any:
        """Price the operators of strategy `s` on chips, if that is not done."""
        problem, k = self.of(s)
        return problem.price(k, chips, threads)

    def bound(self, s: int, chips: Any, step: str, threads: int = 1) -> Any:
        """Bound the layers of strategy `s` on chips."""
        problem, k = self.of(s)
        return problem.bound(k, chips, step, threads)

    def rule_out(self, s: int, chips: Any, rooms: Array, limits_s: Array, threads: int = 1) -> Any:
        """Bound the layers of strategy `s` so far that steps are above limits, where they are."""
        problem, k = self.of(s)
        return problem.rule_out(k, chips, rooms, limits_s, threads)

    def schedule(self, s: int, chips: Any, threads: int = 1, nodes: int | None = None) -> Any:
        """Schedule the layers of strategy `s` on chips: times, and what is proven of them."""
        problem, k = self.of(s)
        more = () if nodes is None else (nodes,)
        return problem.schedule(k, chips, threads, *more)

    def place(self, s: int, times: Any, least: Any, below_s: Array, threads: int = 1) -> Any:
        """Place strategy `s` on chips with each capacity, where it may take at most `below_s`."""
        problem, k = self.of(s)
        return problem.place(k, times, least, below_s, threads)

    def least_energy_j(self, s: int, least: Any) -> tuple[Array, Array]:
        """Joules of a step at least: all of them, and those of operators alone."""
        problem, k = self.of(s)
        return problem.least_energy_j(k, least)


def check_formats(variants: Sequence[Variant], training: Training) -> None:
    """Refuse a precision of the step where chips give theirs.

    Raises
    ------
    InvalidInputError
        Where both do.
    """
    named = training.precision.name
    if any(variant.fp8 for variant in variants) and named != BF16:
        raise InvalidInputError(
            f"precision: {named} is not accepted where the space has the axis format; expected "
            f"{BF16}"
        )
