"""Takes a model's layers on a chip and a fabric, gives tables of its layers for placement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast.cost import Costs, estimate_costs
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, Cluster, Hbm
from phaze_fast.memory import Optimizer
from phaze_fast.opgraph import LayerGraph
from phaze_fast.placement.sizes import Groups, LayerSizes
from phaze_fast.placement.table import LayerTable
from phaze_fast.schedule import LayerTimes, ScheduleCache, schedule_layers

__all__ = ["MAX_NODES", "TimedLayers", "hbm_rate", "memory_of", "timed_layers"]

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


class TimedLayers:
    """The layers of a model under one strategy, with their times on a chip."""

    def __init__(
        self,
        sizes: LayerSizes,
        times: LayerTimes,
        costs: Costs,
        first: int,
        chip: Accelerator,
        column: int = 0,
    ) -> None:
        """Of `times` and `costs`, graphs from `first` on and chip number `column`."""
        self.sizes, self.chip = sizes, chip
        self._times, self._costs, self._first, self._column = times, costs, first, column

    @property
    def graph(self) -> LayerGraph:
        """The layers themselves."""
        return self.sizes.graph

    @property
    def proven(self) -> bool:
        """Whether every layer's schedule is proven."""
        rows = slice(self._first, self._first + 2 * len(self.graph.layers))
        return bool(self._times.proven[rows, self._column].all())

    def _of_kinds(self, pass_: int) -> Array:
        """Seconds of the forward (0) or backward (1) pass of each kind of layer."""
        rows = self._first + 2 * np.arange(len(self.graph.layers)) + pass_
        found: Array = self._times.makespan_s[rows, self._column]
        return found

    @cached_property
    def forward_s(self) -> Array:
        """Seconds of each layer's forward pass."""
        found: Array = self._of_kinds(0)[self.sizes.order]
        return found

    @cached_property
    def backward_s(self) -> Array:
        """Seconds of each layer's backward pass by variant, what is recomputed included."""
        again = []
        for mode in self.sizes.variants:
            extra = []
            for k, layer in enumerate(self.graph.layers):
                named = layer.forward.recomputed(mode)
                if layer.kind in ("embedding", "head") or not named:
                    extra.append(0.0)
                elif len(named) == len(layer.forward):
                    extra.append(float(self._of_kinds(0)[k]))
                else:
                    seconds = self._costs.time_s(self._first + 2 * k, self._column)[0]
                    pairs = zip(layer.forward.names, seconds, strict=True)
                    extra.append(float(sum(s for name, s in pairs if name in named)))
            again.append(np.array(extra))
        found: Array = (self._of_kinds(1)[None, :] + np.array(again))[:, self.sizes.order]
        return found

    @cached_property
    def weight_grad_s(self) -> Array:
        """Seconds of each layer's weight gradients, as a share of its backward pass."""
        shares = []
        for k, layer in enumerate(self.graph.layers):
            seconds = self._costs.time_s(self._first + 2 * k + 1, self._column)[0]
            own = sum(
                s for n, s in zip(layer.backward.names, seconds, strict=True) if n.endswith("-w")
            )
            total = float(seconds.sum())
            shares.append(own / total if total > 0 else 0.0)
        found: Array = (self._of_kinds(1) * np.array(shares))[self.sizes.order]
        return found

    @cached_property
    def plain_backward_s(self) -> Array:
        """Seconds of each layer's backward pass without recomputation."""
        found: Array = self._of_kinds(1)[self.sizes.order]
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
        found.append(TimedLayers(sizes, times, costs, first, chip))
        first += 2 * len(graph.layers)
    return found
