"""Takes a model's layers on a chip and a fabric, gives tables of its layers for placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast.cost import Costs, estimate_costs
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, Cluster, Hbm
from phaze_fast.memory import Optimizer
from phaze_fast.opgraph import Layer, LayerGraph
from phaze_fast.placement.sizes import Groups, LayerSizes
from phaze_fast.placement.table import LayerTable
from phaze_fast.schedule import ScheduleCache, schedule_layers

__all__ = ["MAX_NODES", "KindTimes", "TimedLayers", "hbm_rate", "memory_of", "timed_layers"]

Array = np.ndarray[Any, Any]

MAX_NODES = 20_000
"""Of the search for one layer's schedule."""


def memory_of(chip: Accelerator | None) -> Hbm:
    """HBM of a chip that layers are placed on.

    Raises
    ------
    InvalidInputError
        Where there is no chip, or it has none.
    """
    if chip is None:
        raise InvalidInputError("cluster.chip: missing; expected the chip that is placed on")
    if chip.hbm is None or chip.hbm.capacity_bytes <= 0:
        raise InvalidInputError(f"cluster.chip: {chip.name} has no HBM to place layers in")
    return chip.hbm


def hbm_rate(chip: Accelerator) -> float:
    """Bytes per second that HBM gives to what streams through it."""
    share = chip.tuning.hbm_share if chip.tuning is not None else 1.0
    return memory_of(chip).bandwidth_bytes_per_s * share


def _summed(columns: Array, wanted: Sequence[bool]) -> Array:
    """Sum of some columns, one after another, so that a row's sum depends on that row alone."""
    total = np.zeros(len(columns))
    for column, counts in zip(columns.T, wanted, strict=True):
        if counts:
            total += column
    return total


def _again(layer: Layer, mode: str) -> list[bool]:
    """Which operators of a layer's forward pass run again in its backward pass."""
    named = layer.forward.recomputed(mode)
    skipped = layer.kind in ("embedding", "head")
    return [not skipped and name in named for name in layer.forward.names]


@dataclass(frozen=True, eq=False)
class KindTimes:
    """Seconds and joules of each kind of layer on several chips, per micro-batch and device.

    Arrays have shape (chips, kinds), by variant (chips, variants, kinds).
    """

    forward_s: Array
    plain_s: Array
    """Of the backward pass without recomputation."""
    backward_s: Array
    """By variant, what is recomputed included."""
    weight_grad_s: Array
    """Part of the backward pass that can wait: as large as the weight gradients' share."""
    forward_j: Array
    backward_j: Array
    """By variant, as above. Both without what flows while nothing runs."""
    proven: Array
    """Whether all schedules on a chip are proven, shape (chips,)."""

    def at(self, chips: Any) -> KindTimes:
        """Those of some chips."""
        return KindTimes(*(getattr(self, name)[chips] for name in KindTimes.__annotations__))

    @classmethod
    def joined(cls, parts: Sequence[KindTimes]) -> KindTimes:
        """Several, one after another."""
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in cls.__annotations__))

    @classmethod
    def of(
        cls, sizes: LayerSizes, costs: Costs, makespan_s: Array, proven: Array, first: int = 0
    ) -> KindTimes:
        """Read them off makespans of graphs x chips, from graph `first` on."""
        layers = sizes.graph.layers
        shape = (costs.chips, len(layers))
        by_variant = (shape[0], len(sizes.variants), shape[1])
        forward, plain, late, joules = (np.zeros(shape) for _ in range(4))
        backward, backward_j = np.zeros(by_variant), np.zeros(by_variant)
        for k, layer in enumerate(layers):
            at = first + 2 * k
            forward[:, k], plain[:, k] = makespan_s[at], makespan_s[at + 1]
            seconds, spent = costs.time_s(at), costs.dynamic_j(at)
            joules[:, k] = _summed(spent, [True] * len(layer.forward))
            own_j = _summed(costs.dynamic_j(at + 1), [True] * len(layer.backward))
            for v, mode in enumerate(sizes.variants):
                again = _again(layer, mode)
                extra = forward[:, k] if all(again) else _summed(seconds, again)
                backward[:, v, k] = plain[:, k] + extra
                backward_j[:, v, k] = own_j + _summed(spent, again)
            each = costs.time_s(at + 1)
            own = _summed(each, [name.endswith("-w") for name in layer.backward.names])
            total = _summed(each, [True] * len(layer.backward))
            share = np.divide(own, total, where=total > 0, out=np.zeros(len(own)))
            late[:, k] = plain[:, k] * share
        sure: Array = np.all(proven[first : first + 2 * len(layers)], axis=0)
        return cls(forward, plain, backward, late, joules, backward_j, sure)


class TimedLayers:
    """The layers of a model under one strategy, with their times on a chip."""

    def __init__(
        self, sizes: LayerSizes, kinds: KindTimes, chip: Accelerator, column: int = 0
    ) -> None:
        """Of `kinds`, those on chip number `column`."""
        self.sizes, self.kinds, self.chip, self.column = sizes, kinds, chip, column

    @property
    def graph(self) -> LayerGraph:
        """The layers themselves."""
        return self.sizes.graph

    @property
    def proven(self) -> bool:
        """Whether every layer's schedule is proven."""
        return bool(self.kinds.proven[self.column])

    @cached_property
    def forward_s(self) -> Array:
        """Seconds of each layer's forward pass."""
        found: Array = self.kinds.forward_s[self.column][self.sizes.order]
        return found

    @cached_property
    def backward_s(self) -> Array:
        """Seconds of each layer's backward pass by variant, what is recomputed included."""
        found: Array = self.kinds.backward_s[self.column][:, self.sizes.order]
        return found

    @cached_property
    def plain_backward_s(self) -> Array:
        """Seconds of each layer's backward pass without recomputation."""
        found: Array = self.kinds.plain_s[self.column][self.sizes.order]
        return found

    @cached_property
    def weight_grad_s(self) -> Array:
        """Seconds of each layer's weight gradients, as a share of its backward pass."""
        found: Array = self.kinds.weight_grad_s[self.column][self.sizes.order]
        return found

    def table(self, groups: Groups, zero: int, tied_copy: bool, ties: Any = ()) -> LayerTable:
        """Layers as placement reads them.

        Parameters
        ----------
        groups
            Replicas and stages, and which lie next to each other.
        zero
            What replicas share.
        tied_copy
            Whether the last stage holds a copy of the embedding that the first one ties to it.
        ties
            Pairs of layers that one stage must hold.
        """
        sizes = self.sizes
        frame, count = sizes.frame(groups, zero, tied_copy), len(sizes.order)
        forward = np.broadcast_to(self.forward_s, (len(sizes.variants), count))
        return LayerTable(
            names=[self.graph.layers[k].kind for k in sizes.order],
            variants=sizes.variants,
            forward_s=frame.forward_s(forward),
            backward_s=frame.backward_s(self.backward_s),
            stash_bytes=frame.stash_bytes,
            live_bytes=frame.live_bytes,
            resident_bytes=frame.resident_bytes,
            once_bytes=frame.once_bytes,
            gather_bytes=frame.gather_bytes,
            sync_s=frame.sync_s,
            step_s=frame.step_s(hbm_rate(self.chip)),
            weight_grad_s=self.weight_grad_s,
            edges=self.graph.edges,
            edge_s=frame.edge_s,
            edge_bytes=sizes.message_bytes,
            tied=ties,
        )


def timed_layers(
    graphs: Sequence[LayerGraph],
    cluster: Cluster,
    recompute: Sequence[str],
    optimizer: Optimizer,
    cache: ScheduleCache | None = None,
    threads: int = 1,
) -> list[TimedLayers]:
    """Cost and schedule the layers of several strategies on a cluster's chip."""
    if not graphs:
        return []
    chip = cluster.chip
    if chip is None:
        raise InvalidInputError("cluster.chip: missing; expected the chip that is placed on")
    costs = estimate_costs(list(graphs), chip, cluster)
    times = schedule_layers(costs, max_nodes=MAX_NODES, threads=threads, cache=cache)
    found, first = [], 0
    for graph in graphs:
        sizes = LayerSizes(graph, cluster, recompute, optimizer)
        kinds = KindTimes.of(sizes, costs, times.makespan_s, times.proven, first)
        found.append(TimedLayers(sizes, kinds, chip))
        first += 2 * len(graph.layers)
    return found
