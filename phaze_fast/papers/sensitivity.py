"""A space that was searched, with one rate or one area halved or doubled.

Every winner has to be explained: one that stays when each term of the model is off by a factor of
two does not depend on that term.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.hardware import (
    Accelerator,
    ArchitectureSpace,
    Cluster,
    FlatFabric,
    MeshFabric,
    TieredFabric,
    TorusFabric,
    area_batch,
    chip_records,
)

__all__ = ["Variation", "variations"]

Array = np.ndarray[Any, Any]

FACTORS = (0.5, 2.0)
_AREAS = ("tensor_mm2", "vector_mm2", "buffer_mm2", "network_mm2", "hbm_mm2")


@dataclass(frozen=True)
class Variation:
    """A space and a cluster that differ from those searched in one thing."""

    what: str
    factor: float
    space: ArchitectureSpace
    cluster: Cluster


def _chip_with(base: Accelerator, what: str, factor: float) -> Accelerator | None:
    """Scale a rate of a chip; none where it has no such rate."""
    buffer, hbm = base.buffer, base.hbm
    if what == "buffer bandwidth":
        scaled = buffer.replace(bytes_per_cycle=buffer.bytes_per_cycle * factor)
        return base.replace(buffer=scaled)
    if what == "core port bandwidth":
        if not buffer.port_bytes_per_cycle:
            return None
        ports = buffer.replace(port_bytes_per_cycle=buffer.port_bytes_per_cycle * factor)
        return base.replace(buffer=ports)
    if hbm is None:
        return None
    faster = hbm.replace(bandwidth_bytes_per_s=hbm.bandwidth_bytes_per_s * factor)
    return base.replace(hbm=faster)


_FIELD = {
    "buffer bandwidth": "buffer.bytes_per_cycle",
    "core port bandwidth": "buffer.port_bytes_per_cycle",
    "HBM bandwidth": "hbm.bandwidth_bytes_per_s",
}


def _rates(space: ArchitectureSpace, what: str, factor: float) -> ArchitectureSpace | None:
    """Scale a rate of all chips of a space."""
    spec, field = space.spec, _FIELD[what]
    if field in spec.axes:
        scaled = {**spec.axes, field: tuple(float(v) * factor for v in spec.axes[field])}
        return ArchitectureSpace(spec.replace(axes=scaled), space.selection)
    base = _chip_with(spec.base, what, factor)
    return None if base is None else ArchitectureSpace(spec.replace(base=base), space.selection)


def _fabric(cluster: Cluster, factor: float) -> Cluster:
    """Scale the bandwidth of every link."""
    fabric = cluster.fabric
    if isinstance(fabric, TieredFabric):
        tiers = tuple(
            tier.replace(bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s * factor)
            for tier in fabric.tiers
        )
        return cluster.replace(fabric=fabric.replace(tiers=tiers))
    if isinstance(fabric, TorusFabric | MeshFabric):
        rate = fabric.link_bandwidth_bytes_per_s * factor
        return cluster.replace(fabric=fabric.replace(link_bandwidth_bytes_per_s=rate))
    assert isinstance(fabric, FlatFabric)
    rate = fabric.bandwidth_bytes_per_s * factor
    return cluster.replace(fabric=fabric.replace(bandwidth_bytes_per_s=rate))


def _areas(space: ArchitectureSpace, term: str, factor: float) -> ArchitectureSpace | None:
    """Scale one term of the area; the limit stays, or is what the space's base then takes.

    None where the term is nothing, or the space has no limit. No chip may be left.
    """
    spec, limit = space.spec, space.spec.area
    if limit is None:
        return None
    by_term = area_batch(chip_records([spec.base]), limit.terms)
    if by_term[term][0] <= 0.0:
        return None

    def scaled(chips: Array) -> tuple[Array, Array]:
        """Give areas with the term scaled, and as they are."""
        found = area_batch(chips, limit.terms)
        total: Array = found["total_mm2"]
        return total + (factor - 1.0) * found[term], total

    most = limit.max_mm2
    if limit.follows_base:
        most *= float(scaled(chip_records([spec.base]))[0][0]) / float(by_term["total_mm2"][0])
    whole = ArchitectureSpace(spec.replace(area=None))
    kept = []
    for chunk in whole.chunks():
        size, was = scaled(chunk.chips)
        # Under a limit that stays, a chip that was large enough is not too small for being smaller.
        least = size if limit.follows_base else np.maximum(size, was)
        small = least >= limit.min_fraction * most
        if limit.keep_small_single_core:
            small |= (chunk.chips["tensor_cores"] == 1) | (chunk.chips["vector_cores"] == 1)
        kept.append(chunk.index[(size <= most) & small])
    chosen = np.concatenate(kept)
    if space.selection is not None:
        chosen = np.intersect1d(chosen, space.selection)
    return ArchitectureSpace(spec.replace(area=None), chosen)


def variations(space: ArchitectureSpace, cluster: Cluster) -> Iterator[Variation]:
    """Halve and double each rate and each area term, one at a time.

    Examples
    --------
    >>> small = ArchitectureSpace.published()
    >>> cluster = Cluster(devices=8, fabric="tpuv4-pod")
    >>> [v.what for v in variations(small, cluster) if v.factor == 2][:3]
    ['buffer bandwidth', 'HBM bandwidth', 'fabric bandwidth']
    """
    for what in _FIELD:
        for factor in FACTORS:
            other = _rates(space, what, factor)
            if other is not None:
                yield Variation(what, factor, other, cluster)
    for factor in FACTORS:
        yield Variation("fabric bandwidth", factor, space, _fabric(cluster, factor))
    for term in _AREAS:
        for factor in FACTORS:
            other = _areas(space, term, factor)
            if other is not None:
                yield Variation(f"{term.removesuffix('_mm2')} area", factor, other, cluster)
