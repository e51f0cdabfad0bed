"""Takes a model split by a strategy on a chip, gives tables of its layers for placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast.cost import Costs, collective_batch, estimate_costs
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, Cluster, Hbm
from phaze_fast.memory import FRAGMENTATION, Optimizer
from phaze_fast.opgraph import LayerGraph
from phaze_fast.placement.table import LayerTable
from phaze_fast.schedule import LayerTimes, ScheduleCache, schedule_layers

__all__ = ["Groups", "TimedLayers", "memory_of", "timed_layers"]

Array = np.ndarray[Any, Any]

BUCKET_BYTES = 100e6
"""Gradients that are synchronised in one go; the last such bucket is not hidden. An assumption of
the order of the buckets that training libraries use."""

_MAX_NODES = 20_000


@dataclass(frozen=True)
class Groups:
    """How many devices of a cluster do what, and which of them lie next to each other."""

    replicas: int
    stages: int
    order: str
    """``replicas-inside``: the replicas of a stage are neighbours; ``stages-inside``: the stages of
    a replica are."""

    def strides(self, inner: int) -> tuple[int, int]:
        """Distance of neighbours among replicas and among stages, in ranks.

        `inner` devices hold one stage of one replica.
        """
        if self.order == "replicas-inside":
            return inner, inner * self.replicas
        return inner * self.stages, inner


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


class TimedLayers:
    """The layers of a model under one strategy, with their times on a chip.

    What depends on the strategy alone is worked out once; `table` adds what replicas change.
    """

    def __init__(
        self,
        graph: LayerGraph,
        times: LayerTimes,
        costs: Costs,
        first: int,
        cluster: Cluster,
        chip: Accelerator,
        recompute: Sequence[str],
        optimizer: Optimizer,
    ) -> None:
        self.graph, self.cluster, self.optimizer = graph, cluster, optimizer
        self.chip = chip
        self._times, self._costs, self._first = times, costs, first
        self.order = np.array(graph.order)
        self.variants = self._variants(recompute)
        self._asked: dict[tuple[str, float, int, int], float] = {}

    @property
    def inner(self) -> int:
        """Devices that hold one stage of one replica."""
        strategy = self.graph.strategy
        return strategy.tensor_parallel * strategy.context_parallel

    @property
    def proven(self) -> bool:
        """Whether every layer's schedule is proven."""
        rows = slice(self._first, self._first + 2 * len(self.graph.layers))
        return bool(self._times.proven[rows].all())

    def _variants(self, recompute: Sequence[str]) -> tuple[str, ...]:
        """Leave out the ways to recompute that change nothing."""
        found: dict[tuple[int, ...], str] = {}
        for mode in recompute:
            kept = tuple(layer.forward.stashed_bytes(mode) for layer in self.graph.layers)
            found.setdefault(kept, mode)
        return tuple(found.values())

    def _of_kinds(self, pass_: int) -> Array:
        """Seconds of the forward (0) or backward (1) pass of each kind of layer."""
        rows = self._first + 2 * np.arange(len(self.graph.layers)) + pass_
        found: Array = self._times.makespan_s[rows, 0]
        return found

    @cached_property
    def forward_s(self) -> Array:
        """Seconds of each layer's forward pass."""
        found: Array = self._of_kinds(0)[self.order]
        return found

    @cached_property
    def backward_s(self) -> Array:
        """Seconds of each layer's backward pass by variant, what is recomputed included."""
        again = []
        for mode in self.variants:
            extra = []
            for k, layer in enumerate(self.graph.layers):
                named = layer.forward.recomputed(mode)
                if layer.kind in ("embedding", "head") or not named:
                    extra.append(0.0)
                elif len(named) == len(layer.forward):
                    extra.append(float(self._of_kinds(0)[k]))
                else:
                    seconds = self._costs.time_s(self._first + 2 * k)[0]
                    pairs = zip(layer.forward.names, seconds, strict=True)
                    extra.append(float(sum(s for name, s in pairs if name in named)))
            again.append(np.array(extra))
        found: Array = (self._of_kinds(1)[None, :] + np.array(again))[:, self.order]
        return found

    @cached_property
    def weight_grad_s(self) -> Array:
        """Seconds of each layer's weight gradients, as a share of its backward pass."""
        shares = []
        for k, layer in enumerate(self.graph.layers):
            seconds = self._costs.time_s(self._first + 2 * k + 1)[0]
            own = sum(
                s for n, s in zip(layer.backward.names, seconds, strict=True) if n.endswith("-w")
            )
            total = float(seconds.sum())
            shares.append(own / total if total > 0 else 0.0)
        found: Array = (self._of_kinds(1) * np.array(shares))[self.order]
        return found

    @cached_property
    def parameters(self) -> Array:
        """Parameters of each layer that a device holds."""
        held = np.array([float(layer.device_parameters) for layer in self.graph.layers])
        found: Array = held[self.order]
        return found

    @cached_property
    def experts(self) -> Array:
        """Parameters of experts of each layer that a device holds."""
        held = np.array([float(layer.expert_parameters) for layer in self.graph.layers])
        found: Array = held[self.order]
        return found

    @cached_property
    def ends(self) -> Array:
        """Whether each layer is the embedding or the head."""
        kinds = np.array([x.kind in ("embedding", "head") for x in self.graph.layers])
        found: Array = kinds[self.order]
        return found

    @cached_property
    def plain_backward_s(self) -> Array:
        """Seconds of each layer's backward pass without recomputation."""
        found: Array = self._of_kinds(1)[self.order]
        return found

    @cached_property
    def message_bytes(self) -> float:
        """Bytes between two stages for one micro-batch, one way, per device."""
        model, strategy = self.graph.model, self.graph.strategy
        rows = strategy.microbatch * (strategy.seq or model.seq) // strategy.context_parallel
        whole = 2.0 * rows * model.hidden
        return whole / strategy.tensor_parallel if strategy.sequence_parallel else whole

    @cached_property
    def piped_bytes(self) -> float:
        """Bytes of a message in and one out."""
        return 2.0 * self.message_bytes * (1 + FRAGMENTATION)

    @cached_property
    def gathered_bytes(self) -> float:
        """Bytes of the gathered rows of sequence parallelism."""
        strategy = self.graph.strategy
        split = strategy.sequence_parallel and strategy.tensor_parallel > 1
        whole = self.message_bytes * strategy.tensor_parallel
        return whole * split * (1 + FRAGMENTATION)

    def collective_s(self, op: str, payload: float, ranks: int, stride: int) -> float:
        """Seconds of one collective of a group of this cluster; infinite where it has no room."""
        if ranks <= 1 or payload <= 0:
            return 0.0
        if (ranks - 1) * stride >= self.cluster.devices:
            return math.inf
        asked = (op, payload, ranks, stride)
        if asked not in self._asked:
            times = collective_batch(self.cluster, op, [payload], [ranks], [stride])
            self._asked[asked] = float(times.time_s[0])
        return self._asked[asked]

    def _per_layer_s(self, op: str, bytes_per_parameter: float, groups: Groups) -> Array:
        """Seconds of a collective over replicas on each layer's parameters."""
        strategy, layers = self.graph.strategy, self.graph.layers
        ranks = groups.replicas * strategy.context_parallel
        stride = groups.strides(self.inner)[0]
        if strategy.context_parallel > 1:
            stride = strategy.tensor_parallel
        ep = strategy.expert_parallel
        seconds = [
            self.collective_s(
                op,
                bytes_per_parameter * (layer.device_parameters - layer.expert_parameters),
                ranks,
                stride,
            )
            + self.collective_s(
                op, bytes_per_parameter * layer.expert_parameters, ranks // ep, stride * ep
            )
            for layer in layers
        ]
        found: Array = np.array(seconds)[self.order]
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
        spec, count = self.optimizer, len(self.order)
        shards = groups.replicas * self.graph.strategy.context_parallel
        parameters = self.parameters.copy()
        if tied_copy:
            parameters[-1] += self.copied_parameters
        copies = max(1.0, shards / self.graph.strategy.expert_parallel)
        spread = (parameters - self.experts) / shards + self.experts / copies
        resident = (
            spec.weight_bytes * (spread if zero >= 3 else parameters)
            + spec.gradient_bytes * (spread if zero >= 2 else parameters)
            + spec.state_bytes * (spread if zero >= 1 else parameters)
        )
        loose = 1 + FRAGMENTATION
        layers = self.graph.layers
        kept = np.array(
            [[x.forward.stashed_bytes(v) for x in layers] for v in self.variants], float
        )
        whole = np.array([x.forward.stashed_bytes() for x in layers], float)
        ends = np.array([x.kind in ("embedding", "head") for x in layers])
        heads = np.array([x.kind == "head" for x in layers])
        stash = np.where(heads, 0.0, np.where(ends, whole, kept))
        live = np.where(ends, 0.0, whole - kept)
        gather = np.array(
            [
                0.0 if end else float(x.device_parameters)
                for end, x in zip(ends, layers, strict=True)
            ]
        )
        sync = self._per_layer_s(
            "all-reduce" if zero == 0 else "reduce-scatter", spec.gradient_bytes, groups
        )
        forward = np.broadcast_to(self.forward_s, (len(self.variants), count))
        backward = self.backward_s
        fetch = np.zeros(count)
        if zero >= 3:  # weights come layer by layer, fetched while the one before is at work
            fetch = self._per_layer_s("all-gather", spec.weight_bytes, groups)
            forward = np.maximum(forward, fetch)
        if zero >= 2:  # gradients that are not kept whole go with every micro-batch
            backward = np.maximum(backward, fetch + sync)
        step = self._step_s(spread if zero >= 1 else parameters)
        if zero in (1, 2):
            step = step + self._per_layer_s("all-gather", spec.weight_bytes, groups)
        message = (
            self.collective_s(
                "point-to-point", self.message_bytes, 2, groups.strides(self.inner)[1]
            )
            if groups.stages > 1
            else 0.0
        )
        return LayerTable(
            names=[layers[k].kind for k in self.order],
            variants=self.variants,
            forward_s=forward,
            backward_s=backward,
            stash_bytes=loose * stash[:, self.order],
            live_bytes=loose * live[:, self.order],
            resident_bytes=resident,
            once_bytes=loose * np.where(heads, whole, 0.0)[self.order],
            gather_bytes=(zero >= 3)
            * loose
            * 2.0
            * (gather * spec.weight_bytes * (1 - 1 / shards))[self.order],
            sync_s=sync,
            step_s=step,
            weight_grad_s=self.weight_grad_s,
            edges=self.graph.edges,
            edge_s=message,
            edge_bytes=self.message_bytes,
            tied=ties,
        )

    @cached_property
    def copied_parameters(self) -> float:
        """Parameters of the embedding that the last stage copies, where it ties to it."""
        model = self.graph.model
        if not model.tied_embeddings or model.head not in ("lm", "mlm"):
            return 0.0
        return float(-(-model.vocab // self.graph.strategy.tensor_parallel) * model.hidden)

    def _step_s(self, parameters: Array) -> Array:
        """Seconds of the optimiser: state is read and written, gradients read, weights written."""
        spec = self.optimizer
        moved = 2.0 * spec.state_bytes + spec.gradient_bytes + spec.weight_bytes
        share = self.chip.tuning.hbm_share if self.chip.tuning is not None else 1.0
        rate = memory_of(self.chip).bandwidth_bytes_per_s * share
        found: Array = parameters * moved / rate
        return found

    def bucket_s(self, groups: Groups) -> float:
        """Seconds of the bucket of gradients that is synchronised last."""
        ranks = groups.replicas * self.graph.strategy.context_parallel
        stride = groups.strides(self.inner)[0]
        return self.collective_s("all-reduce", BUCKET_BYTES, ranks, stride)


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
    times = schedule_layers(costs, max_nodes=_MAX_NODES, threads=threads, cache=cache)
    found, first = [], 0
    for graph in graphs:
        found.append(TimedLayers(graph, times, costs, first, cluster, chip, recompute, optimizer))
        first += 2 * len(graph.layers)
    return found
