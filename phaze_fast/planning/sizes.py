"""Bytes, parameters and messages of a model's layers under a strategy, the same on every chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, cast

import numpy as np

from phaze_fast import _core
from phaze_fast.caching import LruCache, as_one
from phaze_fast.hardware import energy_table_of
from phaze_fast.memory import (
    Optimizer,
    copied_state_bytes,
    exchange_bytes,
    layer_state_bytes,
)
from phaze_fast.models import Model, TransformerModel
from phaze_fast.opgraph import (
    DISPATCHERS,
    EXCHANGES,
    GROUPS,
    KINDS,
    OFFLOAD,
    Fusion,
    Layer,
    LayerGraph,
    OpGraph,
    Strategy,
    context_code,
    forms,
    layer_graphs,
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
from phaze_fast.units import format_bytes

_UNHIDDEN_BYTES = 1e15
"""Size of a bucket for all gradients: none are synchronised before the backward pass ends."""

BOUNDARY_KINDS = ("embedding", "head")
"""Kinds of layers that are no blocks."""
_ALL_REDUCE = _core.COLLECTIVE_OPS.index("all-reduce")
_POINT_TO_POINT = _core.COLLECTIVE_OPS.index("point-to-point")


def training_record(optimizer: Optimizer, software: Software, precision: Precision) -> Array:
    """Build the plan kernel's record of bytes per parameter and energy per byte."""
    prices = energy_table_of()
    record: Array = np.zeros(1, dtype=_core.TRAINING_DTYPE)
    record["weight_bytes"] = optimizer.weight_bytes
    record["gradient_bytes"] = optimizer.gradient_bytes
    record["state_bytes"] = optimizer.state_bytes
    record["gather_bytes"] = min(optimizer.gathered_bytes, precision.gathered_weight_bytes)
    record["fragmentation"] = software.fragmentation
    hides = software.overlap_gradients
    record["bucket_bytes"] = software.bucket_bytes if hides else _UNHIDDEN_BYTES
    record["contention"] = software.contention
    record["hbm_byte_j"] = prices.hbm_byte_j
    record["network_byte_j"] = prices.network_byte_j
    record["workspace_bytes"] = software.workspace_bytes
    record["late_gradients"] = not software.resident_gradients
    record["whole_layers"] = software.whole_layers
    return record


@dataclass(frozen=True, eq=False)
class StrategySizes:
    """The layers of a model under one strategy: bytes, parameters, messages."""

    graph: LayerGraph
    software: Software
    """Profile of the software that runs the layers."""
    precision: Precision
    """Number format of the blocks' products."""
    fusion: Fusion
    """Which operators are fused, and which are recomputed inside fused groups."""
    variants: tuple[str, ...]
    """Recompute variants, least recomputation first; no two recompute the same operators."""
    variant_of: Mapping[str, int]
    """Position in `variants` of each mode of recomputation."""
    stored: LayerGraph
    """The layers whose stored bytes count: `graph`, unless stored tensors are split otherwise."""

    @cached_property
    def kinds(self) -> Array:
        """One record per kind of layer, dtype ``_core.LAYER_KIND_DTYPE``."""
        kinds: Array = _kind_records([self])[0]
        return kinds

    @cached_property
    def record(self) -> Array:
        """One record, dtype ``_core.STRATEGY_DTYPE``."""
        return _strategy_records([self])

    @cached_property
    def offloaded_bytes(self) -> Array:
        """Bytes of a micro-batch copied to the host by variant and kind of layer."""
        bytes_ = np.zeros((len(self.variants), len(self.graph.layers)))
        for k, layer in enumerate(self.stored.layers):
            if layer.kind not in BOUNDARY_KINDS:
                bytes_[:, k] = [layer.forward.offloaded_bytes(mode) for mode in self.variants]
        return bytes_

    @property
    def strategy(self) -> Strategy:
        """Widths of the strategy."""
        return self.graph.strategy

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Devices of each group that communicates."""
        return {name: width for name, (width, _) in self.strategy.groups.items()}

    @property
    def inner(self) -> int:
        """Devices that hold one stage of one replica."""
        return self.strategy.tp * self.strategy.cp

    @property
    def hidden(self) -> Mapping[str, float]:
        """Overlapped share of the seconds of collectives, by group of devices."""
        shares = dict.fromkeys(EXCHANGES, self.strategy.expert_overlap)
        shares["tensor"] = self.software.hidden_tensor
        return FrozenDict({group: share for group, share in shares.items() if share})

    @property
    def most_hidden(self) -> Mapping[str, float]:
        """Upper bounds of `hidden`: exchanges of experts that overlap may be hidden altogether."""
        overlap = self.strategy.overlap_experts or self.software.expert_beside_shared
        return FrozenDict({**self.hidden, **(dict.fromkeys(EXCHANGES, 1.0) if overlap else {})})

    def holders(self, layers: Sequence[int], memory: Mapping[str, float]) -> str:
        """Describe what holds the peak of a stage of a traced model; empty for other models.

        Parameters
        ----------
        layers
            Positions of the stage's layers.
        memory
            Bytes at its peak by term: logits are those of the head, recompute those of another
            layer.
        """
        if not any(layer.peaks for layer in self.graph.layers):
            return ""
        live = memory["recompute"]
        for at in reversed([self.graph.order[i] for i in layers]):
            layer = self.graph.layers[at]
            loss = layer.kind == "head" and memory["logits"] > 0.0
            if layer.peaks and (loss or (live > 0.0 and live in self.kinds[at]["live_bytes"])):
                peak = layer.peak(self.software.resident_gradients)
                tensors = ", ".join(f"{n} {format_bytes(b)}" for n, b in peak.tensors[:4] if b)
                return f"{peak.operator} of {layer.kind} runs; it holds {tensors}"
        return ""

    @property
    def blocks(self) -> int:
        """Layers that are neither the embedding nor the head."""
        return sum(layer.count for layer in self.graph.layers if layer.kind not in BOUNDARY_KINDS)


_Variants = tuple[tuple[str, ...], Mapping[str, int]]
_VARIANTS: LruCache[tuple[Any, ...], tuple[list[OpGraph], _Variants]] = LruCache(256)
"""Latest results of `_distinct_variants` by identity of the graphs, which strategies share."""


def _distinct_variants(graph: LayerGraph, recompute: tuple[str, ...]) -> _Variants:
    """Merge modes that recompute the same operators into variants; map each mode to its variant."""
    blocks = [layer.forward.family for layer in graph.layers if layer.kind not in BOUNDARY_KINDS]
    key = (recompute, *map(id, blocks))
    known = _VARIANTS.get(key)
    if known is not None:
        return known[1]
    first: dict[tuple[bool, tuple[frozenset[str], ...]], str] = {}
    same = {
        mode: first.setdefault(
            (OFFLOAD in mode.split("+"), tuple(block.recomputed(mode) for block in blocks)), mode
        )
        for mode in recompute
    }
    variants = tuple(first.values())
    variant_of = FrozenDict({mode: variants.index(name) for mode, name in same.items()})
    # The entry refers to the graphs, so that their ids are not reused.
    return _VARIANTS.put(key, (blocks, (variants, variant_of)))[1]


def _sent_bytes(graphs: Sequence[OpGraph], ranks: Mapping[str, Array]) -> Array:
    """Sum the bytes that one device sends in the collectives of layers by ring algorithms.

    `ranks` has the devices of each group, one number per graph.
    """
    sent = np.zeros(len(graphs))
    alike: dict[int, tuple[OpGraph, list[int]]] = {}
    for at, graph in enumerate(graphs):
        alike.setdefault(id(graph.family), (graph.family, []))[1].append(at)
    for family, some in alike.values():
        ops = np.atleast_2d(family.ops)
        columns = np.flatnonzero(ops[0]["collective"] >= 0)
        if not len(columns):
            continue
        own = [graphs[at].place for at in some] if len(ops) > 1 else [0] * len(some)
        payloads = ops["payload_bytes"][own][:, columns].T
        codes = (ops[0][name][columns].tolist() for name in ("collective", "group"))
        for collective, group, payload in zip(*codes, payloads, strict=True):
            n = ranks[GROUPS[group]][some]
            share = 1.0 if collective == _POINT_TO_POINT else (n - 1) / n
            twice = 2.0 if collective == _ALL_REDUCE else 1.0
            sent[some] += twice * share * payload
    return sent


def _stand_ins(layer: Layer, graph: LayerGraph) -> float:
    """Bytes of one bf16 gradient per distinct weight shape of a layer; all experts share one."""
    moe = graph.model.moe if isinstance(graph.model, TransformerModel) else None
    here = 1 if moe is None else max(1, moe.experts // graph.strategy.ep)
    experts = layer.expert_parameters - layer.frozen_experts
    whole = layer.device_parameters - layer.frozen_parameters - experts
    return 2.0 * (whole + experts / here)


def _table_bytes(graph: LayerGraph) -> float:
    """Return the bytes of the bf16 gradient of the weights that produce logits."""
    head = graph.layers[graph.order[-1]].backward
    products = head.ops[head.ops["kind"] == KINDS.index("gemm-weight-gradient")]
    return float(products["write_bytes"].max(initial=0.0))


_STORED: LruCache[tuple[Any, ...], tuple[Layer, Array]] = LruCache(4096)
"""Latest stored bytes by identity of the family of layers, a row for each member."""


def _stored_bytes(family: Layer, variants: tuple[str, ...], resident: bool) -> Array:
    """Return stored bytes of a family's layers: of all tensors, by variant; and live bytes."""
    key = id(family), variants, resident
    known = _STORED.get(key)
    if known is None:  # the entry refers to the family, so that its id is not reused
        modes = ("none",) * len(variants) if family.kind in BOUNDARY_KINDS else variants
        stored = [family.forward.stashed_bytes(), *map(family.forward.stashed_bytes, modes)]
        live = [family.live_bytes(mode, resident) for mode in modes]
        columns = np.broadcast_arrays(*stored, *live, np.zeros(1))[:-1]
        rows = np.stack(columns, axis=1).astype(np.float64)
        known = _STORED.put(key, (family, rows))
    return known[1]


def _kind_records(sizes: Sequence[StrategySizes]) -> Array:
    """Return a record per strategy and kind of layer; the strategies have one software."""
    graph, software = sizes[0].graph, sizes[0].software
    kinds: Array = np.zeros((len(sizes), len(graph.layers)), dtype=_core.LAYER_KIND_DTYPE)
    by_layer = all(layer.peaks for layer in graph.layers)
    kinds["layer_peaks"] = by_layer
    for k, first in enumerate(graph.layers):
        end, head = first.kind in BOUNDARY_KINDS, first.kind == "head"
        records, layers = kinds[:, k], [own.graph.layers[k] for own in sizes]
        for name in _OF_LAYER:
            records[name] = [getattr(layer, name) for layer in layers]
        records["parameters"] = [layer.device_parameters for layer in layers]
        records["boundary"] = end
        if software.gradient_stand_ins and not end:
            records["shape_bytes"] = [_stand_ins(own.graph.layers[k], own.graph) for own in sizes]
        if software.slice_host_s:
            matrices = [sum(count for count, _, _ in layer.matrices) for layer in layers]
            records["slice_s"] = software.slice_host_s * np.array(matrices)
        if software.stage_division == "work" or (software.stage_division == "blocks" and not end):
            records["stage_work"] = [layer.forward.flops for layer in layers]
        _add_stored_bytes(sizes, k, by_layer, records)
        if head and software.gradient_stand_ins:
            records["once_bytes"] += [_table_bytes(own.graph) for own in sizes]
    return kinds


def _add_stored_bytes(
    sizes: Sequence[StrategySizes], k: int, by_layer: bool, records: Array
) -> None:
    """Write the bytes that the `k`-th kind of layer stores, and that are live in its passes."""
    resident, kind = sizes[0].software.resident_gradients, sizes[0].graph.layers[k].kind
    alike: dict[tuple[int, tuple[str, ...]], tuple[Layer, list[int], list[int]]] = {}
    for s, own in enumerate(sizes):
        family, place = own.stored.layers[k].family
        _, rows, places = alike.setdefault((id(family), own.variants), (family, [], []))
        rows.append(s)
        places.append(place)
    for (_, variants), (family, rows, places) in alike.items():
        table, many = _stored_bytes(family, variants, resident), len(variants)
        # One row where members do not differ.
        bytes_ = table[np.minimum(places, len(table) - 1)]
        if kind == "head":
            peaks = (
                [layer.peak(resident).bytes for layer in (sizes[s].graph.layers[k] for s in rows)]
                if by_layer
                else bytes_[:, 0]
            )
            records["once_bytes"][rows] = peaks
            continue
        records["stash_bytes"][rows, :many] = bytes_[:, 1 : many + 1]
        if kind not in BOUNDARY_KINDS or by_layer:
            records["live_bytes"][rows, :many] = bytes_[:, many + 1 :]


_OF_LAYER = (
    *("expert_parameters", "frozen_parameters", "frozen_experts", "packed_parameters"),
    *("packed_bytes", "copy_bytes", "cast_bytes"),
)
"""Fields of a kind's record that are those of the layer."""


_OF_STRATEGY = (
    *("etp", "message_bytes", "gathered_bytes", "group_kind", "copied_parameters"),
    *("copied_frozen", "variants"),
)
"""Fields of a strategy's record that `_strategy_row` computes."""


def _strategy_row(own: StrategySizes) -> tuple[float, ...]:
    graph, stored, s = own.graph, own.stored, own.strategy
    message = graph.message_bytes
    if own.software.scattered_messages and not s.sequence_parallel:
        message /= s.tp
    split = stored.strategy.sequence_parallel and s.tp > 1
    kind = context_code(s.cp_kind) if s.cp > 1 else 0
    dispatched = 2 * DISPATCHERS.index(s.dispatcher)
    return (
        s.expert_width,
        message,
        stored.message_bytes * s.tp * split + exchange_bytes(graph),
        (kind << 2) + dispatched + s.offload_optimizer,
        graph.copied_parameters,
        graph.copied_frozen,
        len(own.variants),
    )


def _strategy_records(sizes: Sequence[StrategySizes]) -> Array:
    """Return a record per strategy; the strategies have one software."""
    records: Array = np.zeros(len(sizes), dtype=_core.STRATEGY_DTYPE)
    for name in ("tp", "cp", "ep", "micro_batch"):
        records[name] = [getattr(own.strategy, name) for own in sizes]
    rows = [_strategy_row(own) for own in sizes]
    for name, values in zip(_OF_STRATEGY, zip(*rows, strict=True), strict=True):
        records[name] = values
    ranks = {name: np.array([own.ranks.get(name, 1) for own in sizes]) for name in GROUPS}
    for k, layer in enumerate(sizes[0].graph.layers):
        layers = [own.graph.layers[k] for own in sizes]
        passes = ([layer.forward for layer in layers], [layer.backward for layer in layers])
        both = [_sent_bytes(graphs, ranks) for graphs in passes]
        records["sent_bytes"] += layer.count * (both[0] + both[1])
    return records


_GRAPHS: LruCache[tuple[Any, ...], LayerGraph] = LruCache(4096)
"""Graphs of strategies; those that differ in what they recompute alone share one."""
_SIZES: LruCache[tuple[Any, ...], StrategySizes] = LruCache(512)
"""The latest sizes of strategies."""


def _layer_graphs(
    model: Model, strategies: Sequence[Strategy], fusion: Fusion, precision: Precision
) -> list[LayerGraph]:
    """Return the graphs of strategies from the cache, or build those that it has not."""
    query = as_one(model, fusion, precision)
    keys = [(query, strategy) for strategy in strategies]
    found = [_GRAPHS.get(key) for key in keys]
    new = [at for at, graph in enumerate(found) if graph is None]
    if new:
        built = layer_graphs(model, [strategies[at] for at in new], fusion, precision)
        for at, graph in zip(new, built, strict=True):
            found[at] = _GRAPHS.put(keys[at], graph)
    return cast(list[LayerGraph], found)


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


def strategy_sizes(
    model: Model,
    strategy: Strategy,
    recompute: tuple[str, ...],
    software: Software | None = None,
    precision: Precision | None = None,
    fusion: Fusion = "none",
) -> StrategySizes:
    """Size a model's layers under a strategy; the latest results are cached.

    Parameters
    ----------
    model, strategy
        What is trained, and how a layer is split.
    recompute
        Modes of recomputation that a stage may choose from, least first.
    software
        Profile of the software, by default the default one.
    precision
        Number format of the blocks' products, by default bf16.
    fusion
        Which operators are fused; see `phaze_fast.opgraph.layer_graph`.
    """
    used = load_software(DEFAULT) if software is None else software
    formats = load_precision(BF16) if precision is None else precision
    return _sizes(model, [strategy], recompute, used, formats, fusion)[0]


def _sizes(
    model: Model,
    strategies: Sequence[Strategy],
    recompute: tuple[str, ...],
    software: Software,
    precision: Precision,
    fusion: Fusion,
) -> list[StrategySizes]:
    """Size a model's layers under strategies that have one sequence length."""
    query = as_one(model, recompute, software, precision, fusion)
    keys = [(query, strategy) for strategy in strategies]
    found = [_SIZES.get(key) for key in keys]
    by_model: dict[Model, list[int]] = {}
    as_run = {tp: model_as_run(model, software, tp) for tp in {s.tp for s in strategies}}
    for at, known in enumerate(found):
        if known is None:
            by_model.setdefault(as_run[strategies[at].tp], []).append(at)
    for run, new in by_model.items():
        graphs = _layer_graphs(run, [strategies[at] for at in new], fusion, precision)
        shares = [_with_storage_split(run, strategies[at], software) for at in new]
        split = [own for own in shares if own is not None]
        stored = iter(_layer_graphs(run, split, fusion, precision))
        for at, graph, own in zip(new, graphs, shares, strict=True):
            found[at] = _SIZES.put(
                keys[at],
                StrategySizes(
                    graph,
                    software,
                    precision,
                    fusion,
                    *_distinct_variants(graph, recompute),
                    graph if own is None else next(stored),
                ),
            )
    return cast(list[StrategySizes], found)


def _with_storage_split(model: Model, strategy: Strategy, software: Software) -> Strategy | None:
    """Return the strategy whose stored bytes count, if the software splits them otherwise."""
    if not software.split_storage or strategy.tp == 1 or strategy.sequence_parallel:
        return None
    split = strategy.replace(sequence_parallel=True)
    return None if reasons(model, split) else split  # rows that tp does not divide count as whole


def fused_sizes(
    model: Model,
    strategies: Sequence[Strategy],
    recompute: tuple[str, ...],
    software: Software,
    precision: Precision,
    fusion: Fusion,
) -> list[StrategySizes]:
    """Size a model's layers under strategies with each form of fusion that a search chooses from.

    Forms under which the layers have the same operators count once. Parameters are those of
    `strategy_sizes`.
    """
    runs = (recompute, software, precision)
    columns = [_sizes(model, strategies, *runs, form) for form in forms(fusion)]
    if len(columns) == 1:
        return columns[0]
    found: list[StrategySizes] = []
    for every in zip(*columns, strict=True):
        distinct: dict[tuple[float, ...], StrategySizes] = {}
        for own in every:
            passes = [layer.backward for layer in own.graph.layers]
            key = (*(len(one) for one in passes), *(one.weight_bytes for one in passes))
            distinct.setdefault(key, own)
        found += distinct.values()
    return found


@lru_cache(maxsize=64)
def strategy_arrays(
    sizes: tuple[StrategySizes, ...], optimizer: Optimizer
) -> tuple[Array, Array, Array]:
    """Return the plan kernel's arrays of strategies; the latest are cached.

    Returns
    -------
    strategies, kinds, order
        A record per strategy; a record per strategy and kind of layer, where the last kind is the
        head with a copy of a tied embedding; and the kind of each layer.
    """
    order = np.array(sizes[0].graph.order, dtype=np.int32)
    strategies, records = _strategy_records(sizes), _kind_records(sizes)
    strategies["copied_state_bytes"] = [copied_state_bytes(own.graph, optimizer) for own in sizes]
    hosted = np.array([own.strategy.offload_optimizer for own in sizes])
    records["host_state"][hosted] = 1.0
    records["cast_bytes"][hosted] = 0.0  # weights are cast as they arrive from the host
    for k, layer in enumerate(sizes[0].graph.layers):
        layers, column = [own.graph.layers[k] for own in sizes], records[:, k]
        column["more_state_bytes"] = [layer_state_bytes(own, optimizer) for own in layers]
        if optimizer.newton_schulz_steps is not None and layer.kind not in BOUNDARY_KINDS:
            elements = [sum(c * rows * cols for c, rows, cols in own.matrices) for own in layers]
            column["step_gather_bytes"] = 2.0 * np.array(elements)  # momentum in bf16
    kinds: Array = np.concatenate([records, records[:, order[-1:]]], axis=1)
    kinds["parameters"][:, -1] += strategies["copied_parameters"]
    kinds["frozen_parameters"][:, -1] += strategies["copied_frozen"]
    kinds["more_state_bytes"][:, -1] += strategies["copied_state_bytes"]
    for array in (order, strategies, kinds):
        array.setflags(write=False)
    return strategies, kinds, order
