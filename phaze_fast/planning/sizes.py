"""Bytes, parameters and messages of a model's layers under a strategy, the same on every chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phaze_fast import _core
from phaze_fast.hardware import energy_table
from phaze_fast.memory import FRAGMENTATION, Optimizer, context_bytes
from phaze_fast.models import Model, TransformerModel
from phaze_fast.opgraph import (
    CONTEXT_KINDS,
    GROUPS,
    KINDS,
    Layer,
    LayerGraph,
    OpGraph,
    Strategy,
    layer_graph,
    reasons,
)
from phaze_fast.records import FrozenDict
from phaze_fast.software import (
    BF16,
    DEFAULT,
    Precision,
    Software,
    load_precision,
    load_software,
    model_as_run,
)
from phaze_fast.tables import Array

_UNHIDDEN_BYTES = 1e15
"""A bucket that holds all gradients: none are synchronised before the backward pass ends."""

BOUNDARY_KINDS = ("embedding", "head")
"""Kinds of layers that are no blocks."""
_ALL_REDUCE = _core.COLLECTIVE_OPS.index("all-reduce")
_POINT_TO_POINT = _core.COLLECTIVE_OPS.index("point-to-point")


def training_record(optimizer: Optimizer, software: Software, precision: Precision) -> Array:
    """Build the plan kernel's record of bytes per parameter and energy per byte."""
    prices = energy_table()
    record: Array = np.zeros(1, dtype=_core.TRAINING_DTYPE)
    record["weight_bytes"] = optimizer.weight_bytes
    record["gradient_bytes"] = optimizer.gradient_bytes
    record["state_bytes"] = optimizer.state_bytes
    record["gather_bytes"] = min(optimizer.gathered_bytes, precision.gathered_weight_bytes)
    record["fragmentation"] = FRAGMENTATION
    hides = software.overlap_gradients
    record["bucket_bytes"] = software.bucket_bytes if hides else _UNHIDDEN_BYTES
    record["contention"] = software.contention
    record["hbm_byte_j"] = prices.hbm_byte_j
    record["network_byte_j"] = prices.network_byte_j
    record["workspace_bytes"] = software.workspace_bytes
    record["late_gradients"] = not software.resident_gradients
    return record


@dataclass(frozen=True, eq=False)
class StrategySizes:
    """The layers of a model under one strategy: bytes, parameters, messages."""

    graph: LayerGraph
    software: Software
    """Profile of the software that runs them."""
    precision: Precision
    """Number format of their products."""
    variants: tuple[str, ...]
    """Recompute variants, least first; each keeps other bytes than those before it."""
    variant_of: Mapping[str, int]
    """Position in `variants` of each mode of recomputation."""
    expert_stride: int
    """Ranks between neighbours of an expert-parallel group."""
    kinds: Array
    """One record per kind of layer, dtype ``_core.LAYER_KIND_DTYPE``."""
    record: Array
    """One record, dtype ``_core.STRATEGY_DTYPE``."""

    @property
    def strategy(self) -> Strategy:
        """Widths of the strategy."""
        return self.graph.strategy

    @property
    def inner(self) -> int:
        """Devices that hold one stage of one replica."""
        return self.strategy.tp * self.strategy.cp

    @property
    def rank_stride(self) -> int | None:
        """Ranks between neighbours of an expert-parallel group; none without expert parallelism."""
        return self.expert_stride if self.strategy.ep > 1 else None

    @property
    def hidden(self) -> Mapping[str, float]:
        """Overlapped share of the seconds of collectives, by group of devices."""
        shares = {"tensor": self.software.hidden_tensor, "expert": self.strategy.expert_overlap}
        return FrozenDict({group: share for group, share in shares.items() if share})

    @property
    def blocks(self) -> int:
        """Layers that are neither the embedding nor the head."""
        return sum(layer.count for layer in self.graph.layers if layer.kind not in BOUNDARY_KINDS)


def _distinct_variants(
    graph: LayerGraph, recompute: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Drop modes of recomputation that change nothing; map each mode to its variant."""
    by_bytes: dict[tuple[int, ...], str] = {}
    same: dict[str, str] = {}
    for mode in recompute:
        stash_bytes = tuple(layer.forward.stashed_bytes(mode) for layer in graph.layers)
        same[mode] = by_bytes.setdefault(stash_bytes, mode)
    variants = tuple(by_bytes.values())
    return variants, {mode: variants.index(name) for mode, name in same.items()}


def _sent_bytes(graph: OpGraph, ranks: dict[int, int]) -> float:
    """Sum the bytes that one device sends in the collectives of a layer by ring algorithms."""
    total = 0.0
    for op in graph.ops[graph.ops["collective"] >= 0]:
        n = ranks.get(int(op["group"]), 1)
        share = 1.0 if op["collective"] == _POINT_TO_POINT else (n - 1) / n
        twice = 2.0 if op["collective"] == _ALL_REDUCE else 1.0
        total += twice * share * float(op["payload_bytes"])
    return total


def _stand_ins(layer: Layer, graph: LayerGraph) -> float:
    """Sum one bf16 gradient for each shape of weights in a layer; all experts have one shape."""
    moe = graph.model.moe if isinstance(graph.model, TransformerModel) else None
    here = 1 if moe is None else max(1, moe.experts // graph.strategy.ep)
    whole = layer.device_parameters - layer.expert_parameters
    return 2.0 * (whole + layer.expert_parameters / here)


def _table_bytes(graph: LayerGraph) -> float:
    """Return the bytes of the bf16 gradient of the weights that produce logits."""
    head = graph.layers[graph.order[-1]].backward
    products = head.ops[head.ops["kind"] == KINDS.index("gemm-weight-gradient")]
    return float(products["write_bytes"].max(initial=0.0))


def _kind_records(graph: LayerGraph, variants: Sequence[str], software: Software) -> Array:
    kinds: Array = np.zeros(len(graph.layers), dtype=_core.LAYER_KIND_DTYPE)
    for record, layer in zip(kinds, graph.layers, strict=True):
        end, head = layer.kind in BOUNDARY_KINDS, layer.kind == "head"
        whole = layer.forward.stashed_bytes()
        record["parameters"] = layer.device_parameters
        record["expert_parameters"] = layer.expert_parameters
        record["boundary"] = end
        record["once_bytes"] = whole if head else 0.0
        if head and software.gradient_stand_ins:
            record["once_bytes"] += _table_bytes(graph)
        record["copy_bytes"], record["cast_bytes"] = layer.copy_bytes, layer.cast_bytes
        if software.gradient_stand_ins and not end:
            record["shape_bytes"] = _stand_ins(layer, graph)
        for v, mode in enumerate(variants):
            stash_bytes = whole if end else layer.forward.stashed_bytes(mode)
            record["stash_bytes"][v] = 0.0 if head else stash_bytes
            record["live_bytes"][v] = 0.0 if end else whole - stash_bytes + layer.work_bytes
    return kinds


_layer_graph = lru_cache(maxsize=512)(layer_graph)
"""Graphs of strategies; those that differ in what they recompute alone share one."""


def strategy_faults(model: Model, strategy: Strategy, software: Software) -> list[str]:
    """Return the rules that a strategy breaks for a model as the software runs it, in words.

    Examples
    --------
    >>> from phaze_fast import models
    >>> ring = Strategy(cp=2, cp_kind="ring")
    >>> [
    ...     len(strategy_faults(models.load("gpt2"), ring, load_software(name)))
    ...     for name in ("megatron-core", "deepspeed")
    ... ]
    [0, 1]
    """
    return reasons(model_as_run(model, software, strategy.tp), strategy)


@lru_cache(maxsize=512)
def strategy_sizes(
    model: Model,
    strategy: Strategy,
    recompute: tuple[str, ...],
    expert_stride: int = 0,
    software: Software | None = None,
    precision: Precision | None = None,
) -> StrategySizes:
    """Size a model's layers under a strategy; the latest results are cached.

    Parameters
    ----------
    model, strategy
        What is trained, and how a layer is split.
    recompute
        Modes of recomputation that a stage may choose from, least first.
    expert_stride
        Ranks between neighbours of an expert-parallel group; 0 = the replicas are neighbours.
    software
        Profile of the software, by default the default one.
    precision
        Number format of their products, by default bf16.
    """
    used = load_software(DEFAULT) if software is None else software
    model = model_as_run(model, used, strategy.tp)
    formats = load_precision(BF16) if precision is None else precision
    graph = _layer_graph(model, strategy, precision=formats)
    variants, variant_of = _distinct_variants(graph, recompute)
    s = strategy
    widths = {"tensor": s.tp, "context": s.cp}
    widths |= {"expert": s.ep, "expert-tensor": s.expert_width}
    ranks = {GROUPS.index(name): width for name, width in widths.items()}
    message = graph.message_bytes
    if used.scattered_messages and not s.sequence_parallel:
        message /= s.tp
    record: Array = np.zeros(1, dtype=_core.STRATEGY_DTYPE)
    record["tp"], record["cp"] = s.tp, s.cp
    record["ep"], record["micro_batch"] = s.expert_replicas, s.micro_batch
    record["message_bytes"] = message
    split = s.sequence_parallel and s.tp > 1
    record["gathered_bytes"] = message * s.tp * split + context_bytes(graph)
    attends = CONTEXT_KINDS.index(s.cp_kind) if s.cp > 1 else 0
    record["group_kind"] = attends + len(CONTEXT_KINDS) * (s.expert_parts - 1)
    record["copied_parameters"] = graph.copied_parameters
    record["sent_bytes"] = sum(
        layer.count * (_sent_bytes(layer.forward, ranks) + _sent_bytes(layer.backward, ranks))
        for layer in graph.layers
    )
    record["variants"] = len(variants)
    return StrategySizes(
        graph=graph,
        software=used,
        precision=formats,
        variants=variants,
        variant_of=FrozenDict(variant_of),
        expert_stride=expert_stride or s.tp * s.cp,
        kinds=_kind_records(graph, variants, used),
        record=record,
    )
