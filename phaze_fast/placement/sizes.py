"""Takes a model's layers under a strategy and a fabric, gives all that chips do not change.

Bytes, collectives, messages: worked out once, whatever chip the layers are then timed on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast.cost import collective_batch
from phaze_fast.hardware import Cluster
from phaze_fast.memory import FRAGMENTATION, Optimizer
from phaze_fast.opgraph import LayerGraph

__all__ = ["Frame", "Groups", "LayerSizes"]

Array = np.ndarray[Any, Any]

BUCKET_BYTES = 100e6
"""Gradients that are synchronised in one go; the last such bucket is not hidden. An assumption of
the order of the buckets that training libraries use."""


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


@dataclass(frozen=True, eq=False)
class Frame:
    """What placement reads of layers under given replicas, but for the times of a chip.

    Arrays by variant have shape (variants, layers), the others (layers,).
    """

    stash_bytes: Array
    live_bytes: Array
    resident_bytes: Array
    once_bytes: Array
    gather_bytes: Array
    sync_s: Array
    fetch_s: Array
    """Of weights that come layer by layer; zeros where they stay."""
    step_bytes: Array
    """That the optimiser moves to and from HBM."""
    shared_s: Array
    """To gather weights after the step."""
    edge_s: float
    zero: int

    def forward_s(self, own_s: Array) -> Array:
        """Forward passes: weights are fetched while the layer before is at work."""
        return np.maximum(own_s, self.fetch_s) if self.zero >= 3 else own_s

    def backward_s(self, own_s: Array) -> Array:
        """Backward passes: gradients that are not kept whole go with every micro-batch."""
        return np.maximum(own_s, self.fetch_s + self.sync_s) if self.zero >= 2 else own_s

    def step_s(self, bytes_per_s: float) -> Array:
        """Seconds of the optimiser at a rate of HBM."""
        found: Array = self.step_bytes / bytes_per_s + self.shared_s
        return found


class LayerSizes:
    """The layers of a model under one strategy on a fabric, without a chip."""

    def __init__(
        self,
        graph: LayerGraph,
        cluster: Cluster,
        recompute: Sequence[str],
        optimizer: Optimizer,
    ) -> None:
        self.graph, self.cluster, self.optimizer = graph, cluster, optimizer
        self.order = np.array(graph.order)
        self.variants = self._variants(recompute)
        self._asked: dict[tuple[str, float, int, int], float] = {}
        self._frames: dict[tuple[Groups, int, bool], Frame] = {}

    @property
    def inner(self) -> int:
        """Devices that hold one stage of one replica."""
        strategy = self.graph.strategy
        return strategy.tensor_parallel * strategy.context_parallel

    @cached_property
    def blocks(self) -> int:
        """Layers that are neither the embedding nor the head."""
        return int((~self.ends).sum())

    def _variants(self, recompute: Sequence[str]) -> tuple[str, ...]:
        """Leave out the ways to recompute that change nothing."""
        found: dict[tuple[int, ...], str] = {}
        for mode in recompute:
            kept = tuple(layer.forward.stashed_bytes(mode) for layer in self.graph.layers)
            found.setdefault(kept, mode)
        return tuple(found.values())

    @cached_property
    def inner_span(self) -> tuple[int, int]:
        """Positions of the first block and after the last."""
        inner = np.flatnonzero(~self.ends)
        return int(inner[0]), int(inner[-1]) + 1

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

    @cached_property
    def _kept(self) -> tuple[Array, Array, Array]:
        """Bytes of a micro-batch: stashed by variant, live by variant, once; by layer."""
        layers = self.graph.layers
        kept = np.array(
            [[x.forward.stashed_bytes(v) for x in layers] for v in self.variants], float
        )
        whole = np.array([x.forward.stashed_bytes() for x in layers], float)
        ends = np.array([x.kind in ("embedding", "head") for x in layers])
        heads = np.array([x.kind == "head" for x in layers])
        stash = np.where(heads, 0.0, np.where(ends, whole, kept))
        live = np.where(ends, 0.0, whole - kept)
        once = np.where(heads, whole, 0.0)
        loose = 1 + FRAGMENTATION
        return loose * stash[:, self.order], loose * live[:, self.order], loose * once[self.order]

    def frame(self, groups: Groups, zero: int, tied_copy: bool) -> Frame:
        """Bytes and collectives of layers.

        Parameters
        ----------
        groups
            Replicas and stages, and which lie next to each other.
        zero
            What replicas share.
        tied_copy
            Whether the last stage holds a copy of the embedding that the first one ties to it.
        """
        key = (groups, zero, tied_copy)
        if key not in self._frames:
            self._frames[key] = self._framed(groups, zero, tied_copy)
        return self._frames[key]

    def _framed(self, groups: Groups, zero: int, tied_copy: bool) -> Frame:
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
        stash, live, once = self._kept
        whole = np.where(self.ends, 0.0, self.parameters)
        gather = (zero >= 3) * (1 + FRAGMENTATION) * 2.0 * spec.weight_bytes * (1 - 1 / shards)
        sync = self._per_layer_s(
            "all-reduce" if zero == 0 else "reduce-scatter", spec.gradient_bytes, groups
        )
        weights_s = np.zeros(count)
        if zero:
            weights_s = self._per_layer_s("all-gather", spec.weight_bytes, groups)
        moved = 2.0 * spec.state_bytes + spec.gradient_bytes + spec.weight_bytes
        message = (
            self.collective_s(
                "point-to-point", self.message_bytes, 2, groups.strides(self.inner)[1]
            )
            if groups.stages > 1
            else 0.0
        )
        return Frame(
            stash_bytes=stash,
            live_bytes=live,
            resident_bytes=resident,
            once_bytes=once,
            gather_bytes=gather * whole,
            sync_s=sync,
            fetch_s=weights_s if zero >= 3 else np.zeros(count),
            step_bytes=(spread if zero >= 1 else parameters) * moved,
            shared_s=weights_s if zero in (1, 2) else np.zeros(count),
            edge_s=message,
            zero=zero,
        )

    @cached_property
    def copied_parameters(self) -> float:
        """Parameters of the embedding that the last stage copies, where it ties to it."""
        model = self.graph.model
        if not model.tied_embeddings or model.head not in ("lm", "mlm"):
            return 0.0
        return float(-(-model.vocab // self.graph.strategy.tensor_parallel) * model.hidden)

    def bucket_s(self, groups: Groups) -> float:
        """Seconds of the bucket of gradients that is synchronised last."""
        ranks = groups.replicas * self.graph.strategy.context_parallel
        stride = groups.strides(self.inner)[0]
        return self.collective_s("all-reduce", BUCKET_BYTES, ranks, stride)
