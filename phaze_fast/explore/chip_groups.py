"""Chips of a search, grouped by all properties except HBM capacity.

Times do not depend on how much HBM there is, so chips which differ in nothing else form one group,
which is timed once and planned for each capacity. Groups that share the links and the number format
of their chips form a variant: chips of different variants run over different links or execute
different operators, so that each variant has strategies of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from phaze_fast.errors import InfeasibleError
from phaze_fast.hardware import (
    Accelerator,
    ArchitectureSpace,
    Cluster,
    FlatFabric,
    TieredFabric,
    memory_of_records,
)
from phaze_fast.hardware.package import PackageModel, Prices
from phaze_fast.hardware.space import FP8_RATE
from phaze_fast.planning import Training
from phaze_fast.software import load_precision
from phaze_fast.tables import Array, distinct_rows, words_of


def tier_names(cluster: Cluster) -> list[str]:
    """Names of the tiers of a fabric, innermost first; one empty name where it has no tiers."""
    fabric = cluster.fabric
    return [tier.name for tier in fabric.tiers] if isinstance(fabric, TieredFabric) else [""]


def scaled_cluster(
    cluster: Cluster, bandwidth: Sequence[float], latency: Sequence[float] | None = None
) -> Cluster:
    """Scale the links of a cluster.

    Parameters
    ----------
    cluster
        Devices and fabric.
    bandwidth, latency
        A factor for each of `tier_names`; latencies are unchanged by default.

    Examples
    --------
    >>> pod = Cluster(devices=8, fabric="tpuv4-pod")
    >>> slow = scaled_cluster(pod, [0.5]).fabric
    >>> slow.link_bandwidth_bytes_per_s / pod.fabric.link_bandwidth_bytes_per_s
    0.5
    """
    fabric: Any = cluster.fabric
    latency = [1.0] * len(bandwidth) if latency is None else latency
    if isinstance(fabric, TieredFabric):
        tiers = tuple(
            tier.replace(
                bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s * rate,
                latency_s=tier.latency_s * delay,
            )
            for tier, rate, delay in zip(fabric.tiers, bandwidth, latency, strict=True)
        )
        scaled: Any = fabric.replace(tiers=tiers)
    elif isinstance(fabric, FlatFabric):
        scaled = fabric.replace(
            bandwidth_bytes_per_s=fabric.bandwidth_bytes_per_s * bandwidth[0],
            latency_s=fabric.latency_s * latency[0],
        )
    else:
        scaled = fabric.replace(
            link_bandwidth_bytes_per_s=fabric.link_bandwidth_bytes_per_s * bandwidth[0],
            hop_latency_s=fabric.hop_latency_s * latency[0],
        )
    return cluster if scaled == fabric else cluster.replace(fabric=scaled)


@dataclass(frozen=True, order=True)
class Variant:
    """The links and the number format that the chips of some groups have in common."""

    link_share: float = 1.0
    """Bandwidth of all links of a chip, divided by that of the space's base chip."""
    fp8: bool = False
    """Whether the step computes in FP8."""

    def cluster(self, cluster: Cluster) -> Cluster:
        """Scale the links of a cluster; of a tiered fabric, those of the innermost tier."""
        outer = len(tier_names(cluster)) - 1
        return scaled_cluster(cluster, [self.link_share] + [1.0] * outer)

    def training(self, training: Training) -> Training:
        """Return a training step in the format of these chips."""
        return training.replace(precision=load_precision("fp8")) if self.fp8 else training

    def like(self, like: Accelerator) -> Accelerator:
        """Return `like` with the matrix rates of these chips."""
        if not self.fp8:
            return like
        rates = {**like.tensor_core.rates, "fp8": FP8_RATE}
        return like.replace(tensor_core=like.tensor_core.replace(rates=rates))


def _variants(chips: Array, base: Accelerator, formats: bool) -> tuple[tuple[Variant, ...], Array]:
    """List the variants of chip records, and the variant of each chip.

    With `formats`, chips that support FP8 compute in FP8.
    """
    share = np.ones(len(chips))
    if base.links is not None:
        base_rate = base.links.count * base.links.bandwidth_bytes_per_s
        share = chips["links"] * chips["link_bytes_per_s"] / base_rate
    fp8 = (chips["fp8"] > 0) & formats
    keys, which = np.unique(np.stack([share, fp8], axis=1), axis=0, return_inverse=True)
    return tuple(Variant(float(a), bool(b)) for a, b in keys), which.reshape(-1)


@dataclass(frozen=True, eq=False)
class ChipGroups:
    """Chip groups, in the order in which their first chips appear."""

    records: Array
    """One row per group, dtype ``_core.CHIP_DTYPE``, with the HBM of its first chip."""
    area_mm2: Array
    capacities: Array
    """HBM capacities that occur, in bytes, rising."""
    chip: Array
    """Position of the chip of each group and capacity, shape (groups, capacities); -1: none."""
    of_chip: Array
    """Group and capacity of each chip that was given, shape (chips, 2)."""
    like: Accelerator
    """The chip whose tuning, launch latency and formats all chips share."""
    variants: tuple[Variant, ...] = ()
    """Links and formats that occur, where those are axes; empty where all chips share theirs."""
    variant: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Position in `variants` of each group."""
    network_share: float = 1.0
    """Share of the interconnect's nominal bandwidth that collectives reach."""
    prices: Prices = field(default_factory=Prices)
    """Prices of wafers and HBM."""
    package: PackageModel | None = None
    """Interposer and assembly, where dies are packaged together."""

    def device_usd(self) -> Array:
        """Dollars of a device of each group with each capacity, shape (groups, capacities)."""
        has_hbm = self.records["hbm_bytes_per_s"][:, None] > 0
        area_mm2, sizes = self.area_mm2[:, None], self.capacities[None, :] * has_hbm.astype(float)
        if self.package is None:
            return self.prices.device_usd(area_mm2, sizes)
        dies, stacks = self.records["dies"][:, None], self.records["hbm_stacks"][:, None]
        return self.package.device_usd(area_mm2, dies, stacks, sizes, self.prices)

    def __len__(self) -> int:
        return len(self.records)

    def peak_flops(self, record: Any) -> float:
        """FLOP/s of one chip in bf16 at its rated clock, in FP8 where the step computes in it."""
        macs = sum(
            float(record[f"{kind}_cores"] * record[f"{kind}_width"])
            * float(record[f"{kind}_depth"])
            for kind in ("tensor", "other")
        )
        rate = self.like.tensor_core.rates.get("bf16", 0.0)
        if any(variant.fp8 for variant in self.variants) and record["fp8"]:
            rate = FP8_RATE
        return 2.0 * rate * macs * float(record["clock_hz"])

    def take(self, groups: Array) -> ChipGroups:
        """Select groups by position; the capacities are unchanged."""
        return replace(
            self,
            records=np.ascontiguousarray(self.records[groups]),
            area_mm2=self.area_mm2[groups],
            chip=self.chip[groups],
            of_chip=np.zeros((0, 2), dtype=np.int64),
            variant=self.variant[groups] if self.variants else self.variant,
        )

    def single(self, groups: Array, capacities: Array) -> ChipGroups:
        """Select chips by group and capacity, each as a group of its own with that capacity."""
        selected = self.take(groups)
        chip = np.full(selected.chip.shape, -1, dtype=np.int64)
        chip[np.arange(len(groups)), capacities] = self.chip[groups, capacities]
        return replace(selected, chip=chip)

    @classmethod
    def of(cls, space: ArchitectureSpace) -> ChipGroups:
        """Group the chips of a space.

        Raises
        ------
        InfeasibleError
            Where no chip passes the limits of the space.
        """
        if not len(space):
            raise InfeasibleError(space.why_empty())
        spec = space.spec
        several_dies = spec.package is None and ("dies" in spec.axes or spec.base.dies > 1)
        groups = replace(
            cls.of_records(space.chips, space.area_mm2, spec.like),
            network_share=1.0 if spec.sustained is None else spec.sustained.network,
            prices=Prices.at_node(spec.area_terms.process_nm),
            package=PackageModel() if several_dies else spec.package,
        )
        if not spec.varies_step:
            return groups
        variants, which = _variants(groups.records, spec.base, "format" in spec.axes)
        return replace(groups, variants=variants, variant=which)

    @classmethod
    def of_records(cls, chips: Array, area_mm2: Array, like: Accelerator) -> ChipGroups:
        """Group chip records; equal chips are represented by the first."""
        capacities, which = np.unique(memory_of_records(chips)[0], return_inverse=True)
        words, fields = words_of(chips), chips.dtype.fields or {}
        del words[fields["hbm_bytes"][1] // 8]  # chips of a group differ in it alone
        first, group = distinct_rows(words)
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        first, group = first[order], rank[group]
        chip = np.full((len(first), len(capacities)), -1, dtype=np.int64)
        backwards = np.arange(len(chips))[::-1]
        of_chip = np.stack([group, which.reshape(-1)], axis=1)
        chip[of_chip[backwards, 0], of_chip[backwards, 1]] = backwards
        records = chips if len(first) == len(chips) else chips[first]
        return cls(records, area_mm2[first], capacities, chip, of_chip, like)
