"""Seconds and joules of every kind of layer under strategies on chips.

A pass takes the maximum of its operators' schedule and the host's launches; an optimiser step takes
the time to stream its state through the chip.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.caching import LruCache
from phaze_fast.cost import Costs, estimate_costs
from phaze_fast.cost.engine import CostTable
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import (
    Accelerator,
    Cluster,
    EnergyTable,
    Hbm,
    Host,
    chip_records,
    memory_of_records,
)
from phaze_fast.memory import OTHER_KERNELS, Optimizer
from phaze_fast.opgraph import EXCHANGES, GROUPS, Layer, LayerGraph
from phaze_fast.opgraph.builder import LayerBuilder
from phaze_fast.opgraph.graph import lay_out
from phaze_fast.planning.sizes import BOUNDARY_KINDS, StrategySizes
from phaze_fast.records import changed
from phaze_fast.schedule import ScheduleCache, schedule_layers
from phaze_fast.schedule.layers import graph_arrays
from phaze_fast.software import Software, check_precision, chip_as_run
from phaze_fast.tables import Array

_BIAS_LAUNCHES = 8 / 22
"""Kernel launches for an expert's bias over those for its products. The bias takes a product and a
sum forward; a cast, two products, two sums and the cast of the gradient backward. The products take
22, as counted in profiles."""
MAX_NODES = 20_000
"""Most nodes of the branch-and-bound search for one layer's schedule."""

FREE_LEVELS = (
    EXCHANGES,
    ("context", "context-heads", "context-ring"),
    ("expert-tensor", "tensor"),
)
"""Groups whose collectives cost nothing from each level on; levels split a step into parts."""


def memory_of(chip: Accelerator | None) -> Hbm:
    """Return the memory of the chip of a cluster: HBM, or SRAM where it has none.

    Raises
    ------
    InvalidInputError
        Where there is no chip, or the chip has no memory.
    """
    if chip is None:
        raise InvalidInputError("cluster.chip: missing; expected the chip of the devices")
    if chip.memory.capacity_bytes <= 0:
        raise InvalidInputError(f"cluster.chip: {chip.name} has no memory to place layers in")
    return chip.memory


def _again(layer: Layer, mode: str) -> Array:
    """Mark the operators of a layer's forward pass that its backward pass recomputes."""
    named = layer.forward.recomputed(mode) if layer.kind not in BOUNDARY_KINDS else frozenset()
    return np.array([name in named for name in layer.forward.names], dtype=bool)


# ---- the host and the optimiser ----


def optimizer_bytes_per_s(records: Array, like: Accelerator, optimizer: Optimizer) -> Array:
    """Return the rate at which an optimiser's state streams through chips.

    That is the rate of the memory, or of the vector units where the chip's tuning gives the cost of
    the optimiser's kernel.

    Parameters
    ----------
    records
        The chips.
    like
        A chip with the tuning that all of them share.
    optimizer
        The optimiser, with its bytes per parameter.
    """
    tuning = like.tuning
    rate: Array = memory_of_records(records)[1] * tuning.hbm_share
    cost = tuning.functions.get("adamw")
    if cost is None or cost.ops_per_element is None:
        return rate
    lanes = records["vector_cores"] * records["vector_lanes"] * records["vector_alus_per_lane"]
    ops_per_s = lanes * records["clock_hz"] * tuning.clock_factor
    moved = 2.0 * optimizer.state_bytes + optimizer.gradient_bytes + optimizer.weight_bytes
    streamed: Array = np.minimum(rate, moved * ops_per_s / cost.ops_per_element)
    return streamed


def step_matrices(sizes: StrategySizes) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Return the trained matrices of one layer of each kind; none of embedding and head."""
    return tuple(
        () if layer.kind in BOUNDARY_KINDS else layer.matrices for layer in sizes.graph.layers
    )


def optimizer_products_s(
    matrices: tuple[tuple[tuple[int, int, int], ...], ...],
    chips: Accelerator | Array,
    software: Software,
    optimizer: Optimizer,
    threads: int = 1,
    like: Accelerator | None = None,
) -> tuple[Array, Array]:
    """Return the seconds of an optimiser's products on one layer of each kind, by chip.

    Products run one after another. The second result has the seconds in which the host launches
    them, if it may start while the device is busy with the backward pass (`optimizer_host_s`);
    otherwise products take at least as long as the host.

    Parameters
    ----------
    matrices
        Trained matrices of each kind of layer: how many, rows and columns.
    chips
        A chip, or records of chips.
    software
        The profile of the software that runs them.
    optimizer
        The optimiser.
    threads
        Most threads to use; the answer does not depend on it.
    like
        For records: the chip whose tuning, launch latency and formats they share.
    """
    products = [optimizer.products(some) for some in matrices]
    count = len(chips) if isinstance(chips, np.ndarray) else 1
    seconds, launching = np.zeros((2, count, len(matrices)))
    kinds = [k for k, some in enumerate(products) if some]
    if not kinds:
        return seconds, launching
    graphs = []
    for k in kinds:
        builder = LayerBuilder(f"step-{k}")
        for number, (b, m, inner, n) in enumerate(products[k]):
            builder.linear(f"product-{number}", number - 1, m, inner, n, count=b)
        graphs.append(lay_out(builder.name, builder.specs, (), in_order=True))
    chip = chips if isinstance(chips, np.ndarray) else chip_as_run(chips, software)
    as_run = None if like is None else chip_as_run(like, software)
    costs = estimate_costs(graphs, chip, threads=threads, like=as_run)
    makespan_s = schedule_layers(costs, max_nodes=MAX_NODES, threads=threads).makespan_s
    for row, k in enumerate(kinds):
        launched = len(products[k]) + OTHER_KERNELS * len(matrices[k])
        seconds[:, k] = makespan_s[row]
        if software.optimizer_host_s is None:
            seconds[:, k] = np.maximum(makespan_s[row], launched * software.host_s)
        else:
            launching[:, k] = launched * software.optimizer_host_s
    return seconds, launching


@lru_cache(maxsize=512)
def _products_on_chip(
    matrices: tuple[tuple[tuple[int, int, int], ...], ...],
    chip: Accelerator,
    software: Software,
    optimizer: Optimizer,
) -> tuple[Array, Array]:
    return optimizer_products_s(matrices, chip, software, optimizer)


def host_s(software: Software | None, forward: Array, backward: Array | None = None) -> float:
    """Return the seconds that the host needs to launch a pass, a lower bound of its time.

    Parameters
    ----------
    software
        The profile with the seconds per operator; None: passes never wait for the host.
    forward
        Operators of the forward pass, or those that a backward pass recomputes: for each, whether
        it is a product, a convolution or attention.
    backward
        For each operator of the backward pass, whether it is one of these; None: a forward pass.
    """
    if software is None:
        return 0.0
    seconds = len(forward) * software.host_s
    if backward is not None:
        seconds = (len(backward) + len(forward)) * software.host_s
        seconds += int(backward.sum()) * software.gradient_host_s
        seconds += software.recompute_host_s if len(forward) else 0.0
    return seconds + int(forward.sum()) * software.product_host_s


def expert_wait_s(graph: LayerGraph, kind: str, software: Software | None) -> tuple[float, float]:
    """Return the seconds that forward and backward pass of a layer wait while experts are launched.

    Parameters
    ----------
    graph
        The layers; their strategy determines the experts per device.
    kind
        The kind of layer.
    software
        The profile with the seconds to launch one expert; the backward pass has twice as many
        products and waits twice as long. None: passes never wait for the host.
    """
    moe = getattr(graph.model, "moe", None)
    if software is None or moe is None or not kind.endswith("moe-block"):
        return 0.0, 0.0
    once = software.expert_launch_s * (moe.experts // graph.strategy.ep)
    if moe.bias_unfused:
        once *= 1.0 + _BIAS_LAUNCHES
    return once, 2.0 * once


# ---- times of layers ----


@dataclass(frozen=True, eq=False)
class KindTimes:
    """Seconds and joules of each kind of layer, per micro-batch and device.

    A row is a chip under one strategy, or a strategy on one chip. Arrays have shape (rows, kinds),
    by variant (rows, variants, kinds).
    """

    forward_s: Array
    plain_s: Array
    """Backward pass without recomputation."""
    backward_s: Array
    """Backward pass by recompute variant, recomputation included."""
    weight_grad_s: Array
    """Part of the backward pass that can be postponed: the share of the weight gradients."""
    forward_j: Array
    backward_j: Array
    """By recompute variant. Like `forward_j`, without static energy."""
    hbm_bytes_per_s: Array
    """Rate at which the optimiser's state streams, shape (rows,)."""
    static_w: Array
    """Power while nothing is computed: leakage, clock, HBM background, shape (rows,)."""
    limit_w: Array
    """Rated power, shape (rows,); infinite where none is given."""
    proven: Array
    """Whether all schedules of a row are proven, shape (rows,)."""
    step_s: Array
    """Seconds of an optimiser's matrix products for one layer, if replicas do not share them."""
    ahead_s: Array
    """Seconds by which the host is ahead of the device after the backward pass of one layer."""

    def at(self, rows: Any) -> KindTimes:
        """Select some rows."""
        return KindTimes(*[np.ascontiguousarray(own[rows]) for own in vars(self).values()])

    @classmethod
    def concatenated(cls, parts: Sequence[KindTimes]) -> KindTimes:
        """Concatenate the rows of several; missing variants are zeros."""
        if len(parts) == 1:
            return parts[0]
        most = max(part.backward_s.shape[1] for part in parts)
        columns = []
        for field in fields(cls):
            arrays = [getattr(part, field.name) for part in parts]
            if arrays[0].ndim == 3:
                arrays = [
                    a if a.shape[1] == most else np.pad(a, ((0, 0), (0, most - a.shape[1]), (0, 0)))
                    for a in arrays
                ]
            columns.append(np.concatenate(arrays))
        return cls(*columns)

    def same_times(self) -> list[bytes]:
        """Return a key per row; rows with equal keys have the same times for every plan."""
        columns = [self.forward_s, self.backward_s, self.weight_grad_s, self.hbm_bytes_per_s]
        columns.append(self.step_s)
        flat = np.concatenate([c.reshape(len(c), -1) for c in columns], axis=1)
        return [row.tobytes() for row in np.ascontiguousarray(flat)]


class LayerPasses(NamedTuple):
    """Both passes of a layer, the same on every chip; the last axes are those of `LayerGraphs`."""

    ops: Array
    """Operators of the forward and of the backward pass."""
    types: Array
    edges: Array
    """Edges of both passes."""
    edge_from: Array
    edge_to: Array
    in_order: Array
    again: Array
    """Operators that the backward pass recomputes, shape (variants, operators)."""
    late: Array
    """Operators of the backward pass that compute gradients of weights."""
    host_s: Array
    """Seconds the host needs to launch forward and backward pass, shape (2, 1)."""
    host_again_s: Array
    """Seconds the host needs to launch the backward pass, shape (variants, 1)."""

    @classmethod
    def of(cls, layer: Layer, variants: tuple[str, ...], software: Software | None) -> LayerPasses:
        """Find the operators and the host's seconds of a layer by recompute variant."""
        layer = layer.family[0]  # members differ in sizes alone
        key = id(layer), variants, id(software)
        known = _PASSES.get(key)
        if known is not None:
            return known[2]
        graphs = layer.forward, layer.backward
        called, own = (graph.products for graph in graphs)
        types, starts, ends = zip(*map(graph_arrays, graphs), strict=True)
        again = np.zeros((len(variants), len(called) + len(own)), dtype=bool)
        for row, mode in zip(again, variants, strict=True):
            row[: len(called)] = _again(layer, mode)
        late = [name.endswith("-w") for name in layer.backward.names]
        host = host_s(software, called), host_s(software, called[:0], own)
        host_again = [host_s(software, called[some[: len(called)]], own) for some in again]
        passes = cls(
            ops=np.array([len(graph) for graph in graphs], dtype=np.int64),
            types=np.concatenate([np.atleast_2d(own)[0] for own in types]),
            edges=np.array([len(ends_of) for ends_of in ends], dtype=np.int64),
            edge_from=np.concatenate(starts),
            edge_to=np.concatenate(ends),
            in_order=np.array([graph.in_order for graph in graphs], dtype=np.uint8),
            again=again.view(np.uint8),
            late=np.array([0] * len(called) + late, dtype=np.uint8),
            host_s=np.array(host)[:, None],
            host_again_s=np.array(host_again)[:, None],
        )
        return _PASSES.put(key, (layer, software, passes))[2]


_PASSES: LruCache[tuple[object, ...], tuple[Layer, Software | None, LayerPasses]] = LruCache(4096)
"""Latest `LayerPasses` by identity of the family of layers, which the entry refers to."""


class LayerGraphs(NamedTuple):
    """What no chip changes about layers, as ``_core.LayersOnChips`` takes it."""

    kinds: int
    variants: int
    op_ptr: Array
    """Where the operators of each graph begin; forward and backward graphs alternate."""
    types: Array
    most_at_once: Array
    edge_ptr: Array
    edge_from: Array
    edge_to: Array
    in_order: Array
    again: Array
    late: Array
    host_s: Array
    host_again_s: Array
    wait_s: Array

    @classmethod
    def of(
        cls,
        layers: Collection[tuple[Layer, LayerGraph]],
        variants: tuple[str, ...],
        software: Software | None,
    ) -> LayerGraphs:
        """Describe layers, each with a strategy's layers that it is one of.

        Without software, no pass waits for the host.
        """
        passes = [LayerPasses.of(layer, variants, software) for layer, _ in layers]
        waits = [expert_wait_s(graph, layer.kind, software) for layer, graph in layers]
        own = LayerPasses(*(np.concatenate(c, axis=-1) for c in zip(*passes, strict=True)))
        return cls(
            kinds=len(passes),
            variants=len(variants),
            op_ptr=np.concatenate([[0], np.cumsum(own.ops)]),
            types=own.types,
            most_at_once=np.full(len(own.types), np.inf),
            edge_ptr=np.concatenate([[0], np.cumsum(own.edges)]),
            edge_from=own.edge_from,
            edge_to=own.edge_to,
            in_order=own.in_order,
            again=own.again.reshape(-1),
            late=own.late,
            host_s=own.host_s.reshape(-1),
            host_again_s=own.host_again_s.reshape(-1),
            wait_s=np.array(waits).T.reshape(-1),
        )


class LayerCosts(NamedTuple):
    """What the operators of these layers cost on chips, as ``_core.LayersOnChips`` takes it."""

    tables: tuple[CostTable, ...]
    table: Array
    column: Array
    network_s: Array
    cores: Array
    hbm_bytes_per_s: Array
    static_w: Array
    limit_w: Array
    step_s: Array
    launching_s: Array

    @classmethod
    def of(
        cls, costs: Costs, hbm_bytes_per_s: Array, products_s: Array, launching_s: Array
    ) -> LayerCosts:
        """Take the costs of the layers' graphs, and the seconds of `optimizer_products_s`."""
        tables, network_s = costs.tables, costs.exposed_network_s()
        table, column = np.zeros((2, network_s.shape[1]), dtype=np.int64)
        for number, own in enumerate(tables):
            here = own.column_of >= 0
            table[here], column[here] = number, own.column_of[here]
        return cls(
            tables=tables,
            table=table.astype(np.int32),
            column=column,
            network_s=network_s.ravel(),
            cores=np.ascontiguousarray(costs.cores).ravel(),
            hbm_bytes_per_s=hbm_bytes_per_s,
            static_w=np.ascontiguousarray(costs.static_w),
            limit_w=np.ascontiguousarray(costs.limit_w),
            step_s=products_s.ravel(),
            launching_s=launching_s.ravel(),
        )


class LayerSet:
    """The distinct layers of strategies, priced on chips.

    Parameters
    ----------
    sizes
        The strategies, with one software profile and the same recompute variants.
    costs
        From `operator_costs`.
    hbm_bytes_per_s
        Rate at which the optimiser's state streams through each chip.
    products_s
        Seconds of the optimiser's products and of their launches on each layer (`layers_of`),
        shape (2, chips, layers); by default none.
    hosted
        Whether passes wait for the host.
    """

    def __init__(
        self,
        sizes: Sequence[StrategySizes],
        costs: Costs,
        hbm_bytes_per_s: Array,
        products_s: Array | None = None,
        hosted: bool = True,
    ) -> None:
        first, layers = sizes[0], layers_of(sizes)
        self.sizes, self.costs = tuple(sizes), costs
        """The strategies, and the costs of a forward and a backward graph for each layer."""
        self._rate, self._products_s = hbm_bytes_per_s, products_s
        self._place = {key: place for place, key in enumerate(layers)}
        graphs = LayerGraphs.of(layers.values(), first.variants, first.software if hosted else None)
        if products_s is None:
            products_s = np.zeros((2, costs.chips, len(layers)))
        own_costs = LayerCosts.of(costs, hbm_bytes_per_s, *products_s)
        self._core = _core.LayersOnChips(graphs, own_costs)
        self._bounds: tuple[dict[str, Array], Array] | None = None

    def has(self, sizes: Iterable[StrategySizes]) -> bool:
        """Whether the layers of strategies are among these."""
        return layers_of(sizes).keys() <= self._place.keys()

    def only(self, sizes: Sequence[StrategySizes]) -> LayerSet:
        """Return the layers of some of the strategies."""
        at = [self._place[key] for key in layers_of(sizes)]
        if at == list(range(len(self._place))):
            same = copy(self)
            same.sizes = tuple(sizes)
            return same
        products_s = None if self._products_s is None else self._products_s[:, :, at]
        costs = self.costs.only([2 * place + back for place in at for back in (0, 1)])
        return LayerSet(sizes, costs, self._rate, products_s)

    def without(self, groups: Sequence[str], hosted: bool) -> LayerSet:
        """Return the layers with collectives of some groups free."""
        free = self.costs.without(groups)
        return LayerSet(self.sizes, free, self._rate, self._products_s, hosted)

    def bounds(self, sizes: Sequence[StrategySizes], threads: int) -> KindTimes:
        """Bound the layers of strategies from below by the roots of their branch-and-bound trees.

        There is one chip, and one row per strategy.
        """
        if self._bounds is None:
            bounds_s, proven = self._core.roots(0, threads)
            self._bounds = self._core.time(np.zeros(1, dtype=np.int64), bounds_s), proven != 0
        times, proven = self._bounds
        return self._of_strategies(sizes, times, proven[None])

    def scheduled(self, cache: ScheduleCache | None, threads: int) -> KindTimes:
        """Schedule all layers: a row per strategy and chip, by strategy."""
        solved = schedule_layers(self.costs, max_nodes=MAX_NODES, threads=threads, cache=cache)
        return self.timed(solved.makespan_s, solved.proven)

    def timed(self, makespan_s: Array, proven: Array) -> KindTimes:
        """Return the times of all strategies if graphs take `makespan_s`, shape (graphs, chips)."""
        times = self._core.time(np.arange(self.costs.chips), makespan_s.T.ravel())
        return self._of_strategies(self.sizes, times, proven.T)

    def _of_strategies(
        self, sizes: Sequence[StrategySizes], times: Mapping[str, Array], proven: Array
    ) -> KindTimes:
        """Turn times of layers, a row per chip, into rows per strategy and chip.

        `proven` has shape (chips, graphs).
        """
        own = np.array([[self._place[id(layer)] for layer in s.graph.layers] for s in sizes])
        columns = {}
        for name, values in times.items():
            if values.ndim == 1:
                columns[name] = np.tile(values, len(sizes))
                continue
            by_row = np.moveaxis(values[..., own], -2, 0)
            columns[name] = np.ascontiguousarray(by_row.reshape(-1, *by_row.shape[2:]))
        both = proven[:, 0::2] & proven[:, 1::2]
        columns["proven"] = both[:, own].all(axis=2).T.ravel()
        return KindTimes(**columns)


# ---- strategies on the chip of a cluster ----


def layers_of(sizes: Iterable[StrategySizes]) -> dict[int, tuple[Layer, LayerGraph]]:
    """Return the distinct layers of strategies by identity, each with layers it is one of.

    In this order `operator_costs` prices them: two graphs each, forward and backward.
    """
    return {id(layer): (layer, s.graph) for s in sizes for layer in s.graph.layers}


# ---- strategies on the chip of a cluster ----


_Rows = dict[StrategySizes, KindTimes]


@lru_cache(maxsize=32)
def _known_times(_cluster: Cluster, _optimizer: Optimizer) -> _Rows:
    """Return the cache of `times_on_chip` for a cluster and an optimiser."""
    return {}


@lru_cache(maxsize=32)
def _known_free_times(
    _cluster: Cluster, _optimizer: Optimizer
) -> dict[StrategySizes, tuple[KindTimes, ...]]:
    """Return the cache of `free_times_on_chip` for a cluster and an optimiser."""
    return {}


def operator_costs(
    sizes: Sequence[StrategySizes],
    chips: Accelerator | Array,
    cluster: Cluster,
    threads: int,
    like: Accelerator | None = None,
    energy: EnergyTable | None = None,
) -> Costs:
    """Price the operators of strategies on chips, as their software runs them.

    Parameters
    ----------
    sizes
        Strategies with one software profile and one overlap of expert exchanges; a layer that
        several of them share is priced once, at its place in `layers_of`.
    chips
        A chip, or records of chips.
    cluster
        The fabric of collectives.
    threads
        Most threads to use; the answer does not depend on it.
    like
        For records: the chip whose tuning, launch latency and formats they share.
    energy
        Joules of events on the chip; by default the table of the chip's process node.
    """
    first, graphs, places = sizes[0], list[LayerGraph](), set[int]()
    for s in sizes:
        layers = tuple(layer for layer in s.graph.layers if id(layer) not in places)
        places.update(map(id, layers))
        if layers:
            graphs.append(changed(s.graph, layers=layers))
    chip = chips if isinstance(chips, np.ndarray) else chip_as_run(chips, first.software)
    as_run = None if like is None else chip_as_run(like, first.software)
    costs = estimate_costs(graphs, chip, cluster, threads=threads, like=as_run, energy=energy)
    costs = costs.with_contention(first.software.contention)
    for group, share in first.hidden.items():
        costs = costs.without((group,), share)
    if first.strategy.overlap_experts:
        return costs.with_overlapped(EXCHANGES)
    return costs.with_shared_experts() if first.software.expert_beside_shared else costs


def priced(
    sizes: Sequence[StrategySizes],
    cluster: Cluster,
    optimizer: Optimizer | None = None,
    threads: int = 1,
) -> Iterator[tuple[list[StrategySizes], LayerSet]]:
    """Price the layers of strategies on a cluster's chip; yield strategies with theirs and others.

    Strategies that `operator_costs` can price together are priced in one call. The rate at which
    the optimiser's state streams is 1 here; `_streaming` sets it.
    """
    chip = cluster.chip
    memory_of(chip)
    if chip is None:
        return
    for precision in {id(s.precision): s.precision for s in sizes}.values():
        check_precision(precision, chip)
    if optimizer is not None and optimizer.newton_schulz_steps is None:
        optimizer = None
    alike: dict[tuple[Software, tuple[str, ...], float, bool], list[StrategySizes]] = {}
    for s in dict.fromkeys(sizes):
        hidden = (s.strategy.expert_overlap, s.strategy.overlap_experts)
        alike.setdefault((s.software, s.variants, *hidden), []).append(s)
    for query, some in alike.items():
        latest = _latest_layers(cluster, optimizer, *query)
        if not latest or not latest[0].has(some):
            costs = operator_costs(some, chip, cluster, threads)
            products_s = None if optimizer is None else _step_products_s(some, chip, optimizer)
            latest[:] = [LayerSet(some, costs, np.ones(1), products_s)]
        yield some, latest[0]


@lru_cache(maxsize=8)
def _latest_layers(
    _cluster: Cluster, _optimizer: Optimizer | None, *_query: object
) -> list[LayerSet]:
    """Return the latest layers of such strategies that were priced, or nothing."""
    return []


def _step_products_s(
    sizes: Sequence[StrategySizes], chip: Accelerator, optimizer: Optimizer
) -> Array:
    """Return `optimizer_products_s` of the `layers_of` strategies, shape (2, 1, layers)."""
    every = [
        () if layer.kind in BOUNDARY_KINDS else layer.matrices
        for layer, _ in layers_of(sizes).values()
    ]
    place = {matrices: number for number, matrices in enumerate(dict.fromkeys(every))}
    found = _products_on_chip(tuple(place), chip, sizes[0].software, optimizer)
    return np.stack(found)[:, :, [place[matrices] for matrices in every]]


@lru_cache(maxsize=64)
def _state_bytes_per_s(chip: Accelerator, optimizer: Optimizer) -> float:
    return float(optimizer_bytes_per_s(chip_records([chip]), chip, optimizer)[0])


def _host(chip: Accelerator) -> Host:
    """Return a chip's share of its host."""
    if chip.host is None:
        raise InvalidInputError(
            f"cluster.chip: {chip.name} has no link to a host; expected the field `host`, or plans "
            "that offload nothing"
        )
    return chip.host


def _host_bytes_per_s(host: Host, optimizer: Optimizer) -> float:
    """Return the rate at which an optimiser's state streams where the host updates it.

    Gradients arrive and weights return over the link while the host reads and writes its memory, as
    ZeRO-Offload does it (Ren et al. 2021, arXiv:2101.06840) and Megatron-Core where it overlaps
    copies with the optimiser. The slowest of the three binds.
    """
    moved = 2.0 * optimizer.state_bytes + optimizer.gradient_bytes + optimizer.weight_bytes
    link_s = max(optimizer.gradient_bytes, optimizer.weight_bytes) / host.link_bytes_per_s
    return moved / max(link_s, moved / host.memory_bytes_per_s)


def backward_with_copies_s(forward_s: Array, backward_s: Array, copy_s: Array) -> Array:
    """Return the seconds of backward passes that wait for copies, and of forward passes that did.

    What a forward pass stores is copied out while it runs, and back while the backward pass runs.
    The first and the last copy of a pass, which nothing hides, are left out.

    Examples
    --------
    Passes of 1 s and 2 s with copies of 3 s last 3 s each:

    >>> float(backward_with_copies_s(np.array(1.0), np.array(2.0), np.array(3.0)))
    5.0
    """
    waited: Array = np.maximum(backward_s, copy_s) + np.maximum(copy_s - forward_s, 0.0)
    return waited


def _offloaded(
    sizes: Sequence[StrategySizes],
    times: KindTimes,
    chip: Accelerator,
    bounds: bool,
    priced: KindTimes | None,
) -> KindTimes:
    """Add the time of copies to the host and back by variant, one row per strategy.

    The waits of both passes for copies are added to the backward pass. For lower `bounds`, waits of
    the forward pass are left out: it may turn out longer and hide its copy. Times with free
    communication get the waits of the times `priced` in full: the two differ in communication only.
    """
    copied = [s.offloaded_bytes for s in sizes]
    if not any(bytes_.any() for bytes_ in copied):
        return times
    backward_s, proven = times.backward_s.copy(), times.proven.copy()
    for row, bytes_ in enumerate(copied):
        copy_s = bytes_ / _host(chip).link_bytes_per_s
        own = backward_s[row, : len(bytes_)]
        if priced is not None:
            full_s = priced.backward_s[row, : len(bytes_)]
            own += backward_with_copies_s(priced.forward_s[row], full_s, copy_s) - full_s
            continue
        forward_s = np.full(len(copy_s[0]), np.inf) if bounds else times.forward_s[row]
        own[:] = backward_with_copies_s(forward_s, own, copy_s)
        proven[row] &= not (bounds and bytes_.any())
    return replace(times, backward_s=backward_s, proven=proven)


def _streaming(
    sizes: Sequence[StrategySizes],
    times: KindTimes,
    cluster: Cluster,
    optimizer: Optimizer,
    bounds: bool = False,
    priced: KindTimes | None = None,
) -> KindTimes:
    """Set the rate at which an optimiser's state streams, and add copies to the host."""
    chip = cluster.chip
    if chip is None:
        return times
    times = _offloaded(sizes, times, chip, bounds, priced)
    rates = np.full(len(sizes), _state_bytes_per_s(chip, optimizer))
    at_host = [s.strategy.offload_optimizer for s in sizes]
    if any(at_host):
        rates[at_host] = _host_bytes_per_s(_host(chip), optimizer)
    return replace(times, hbm_bytes_per_s=rates)


def _no_longer(times: KindTimes, before: KindTimes) -> KindTimes:
    """Return the elementwise minimum, as faster operators may get longer unproven schedules."""
    names = ("forward_s", "plain_s", "backward_s")
    least = {n: np.minimum(getattr(times, n), getattr(before, n)) for n in names}
    return replace(times, **least, weight_grad_s=np.minimum(times.weight_grad_s, least["plain_s"]))


def free_times(layers: LayerSet, base: KindTimes, threads: int = 1) -> list[KindTimes]:
    """Return times with more and more communication, and finally the host, at no cost, by level.

    A level that changes nothing is the same object as the level before it.

    Parameters
    ----------
    layers
        The layers of strategies, priced on chips.
    base
        Times of the strategies at full cost, a row per strategy and chip.
    threads
        Most threads to use; the answer does not depend on it.
    """
    groups = {int(g) for graph in layers.costs.graphs for g in np.unique(graph.ops["group"])}
    levels, free = [base], list[str]()
    for more in (*FREE_LEVELS, ()):
        free += more
        hosted, last = bool(more), levels[-1]
        changes = (
            any(GROUPS.index(name) in groups for name in more)
            if more
            else any(s.software.waited_for for s in layers.sizes)
        )
        if changes:
            last = _no_longer(layers.without(free, hosted).scheduled(None, threads), last)
        levels.append(last)
    return levels[1:]


def times_on_chip(
    sizes: Sequence[StrategySizes],
    cluster: Cluster,
    optimizer: Optimizer,
    cache: ScheduleCache | None = None,
    threads: int = 1,
) -> KindTimes:
    """Cost and schedule the layers of several strategies on a cluster's chip, one row each.

    Results are cached in this process.
    """
    known = _known_times(cluster, optimizer)
    new = [s for s in sizes if s not in known]
    for some, layers in priced(new, cluster, optimizer, threads):
        rows = layers.only(some).scheduled(cache, threads)
        known.update((s, rows.at(slice(k, k + 1))) for k, s in enumerate(some))
    return _joined(tuple(known[s] for s in sizes), tuple(sizes), cluster, optimizer)


@lru_cache(maxsize=256)
def _joined(
    rows: tuple[KindTimes, ...],
    sizes: tuple[StrategySizes, ...],
    cluster: Cluster,
    optimizer: Optimizer,
    priced: tuple[KindTimes, ...] = (),
) -> KindTimes:
    """Concatenate the times of strategies, with the optimiser's rates; the latest are cached.

    Times with free communication get the waits for copies of those `priced` in full.
    """
    full = KindTimes.concatenated(priced) if priced else None
    return _streaming(sizes, KindTimes.concatenated(rows), cluster, optimizer, priced=full)


def _spread(rows: Array, at: Sequence[int], count: int) -> Array:
    """Return an array of `count` rows: `rows` at the positions `at`, zeros elsewhere."""
    spread: Array = np.zeros((count, *rows.shape[1:]), dtype=rows.dtype)
    spread[at] = rows
    return spread


def bounds_on_chip(
    sizes: Sequence[StrategySizes], cluster: Cluster, optimizer: Optimizer | None, threads: int
) -> KindTimes:
    """Bound the layers of strategies on a cluster's chip from below, one row each."""
    place = {s: k for k, s in enumerate(sizes)}
    parts, places = list[KindTimes](), list[int]()
    for some, layers in priced(sizes, cluster, optimizer, threads):
        parts.append(layers.bounds(some, threads))
        places += [place[s] for s in some]
    return KindTimes.concatenated(parts).at(np.argsort(places))


@lru_cache(maxsize=16)
def least_work_s(
    sizes: tuple[StrategySizes, ...],
    cluster: Cluster,
    optimizer: Optimizer | None = None,
    threads: int = 1,
) -> Array:
    """Bound the seconds of a micro-batch through all layers, both passes, from below by strategy.

    The bounds are those of `LazyTimes`. The latest are cached.
    """
    rows = bounds_on_chip(sizes, cluster, optimizer, threads)
    counts = np.array([[layer.count for layer in s.graph.layers] for s in sizes])
    least_s: Array = np.add.accumulate(counts * (rows.forward_s + rows.plain_s), axis=1)[:, -1]
    return least_s


class LazyTimes:
    """Times of strategies on a cluster's chip: lower bounds, and schedules where they matter.

    The bound of a layer is the root of its branch-and-bound tree, which is often its time already.

    Parameters
    ----------
    sizes
        The strategies.
    used
        Positions of the strategies whose times will be read; those of others are zero.
    cluster, optimizer, cache, threads
        As `times_on_chip` takes them.
    """

    def __init__(
        self,
        sizes: Sequence[StrategySizes],
        used: Sequence[int],
        cluster: Cluster,
        optimizer: Optimizer,
        cache: ScheduleCache | None = None,
        threads: int = 1,
    ) -> None:
        self.sizes, self._on = sizes, (cluster, optimizer, cache, threads)
        own = [sizes[s] for s in used]
        bounds = bounds_on_chip(own, cluster, optimizer, threads)
        bounds = _streaming(own, bounds, cluster, optimizer, bounds=True)
        self.rows = KindTimes(
            *(_spread(getattr(bounds, f.name), used, len(sizes)) for f in fields(bounds))
        )
        """One row per strategy; where not `exact`, no time is longer than that of the schedule."""
        self.exact = self.rows.proven.copy()
        timed = _known_times(cluster, optimizer)
        self.schedule(s for s in used if sizes[s] in timed)

    def schedule(self, strategies: Iterable[int]) -> bool:
        """Schedule the layers of some strategies; return whether any was not scheduled before."""
        new = [s for s in sorted(set(strategies)) if not self.exact[s]]
        if not new:
            return False
        times = times_on_chip([self.sizes[s] for s in new], *self._on)
        columns = []
        for field in fields(KindTimes):
            own, found = getattr(self.rows, field.name).copy(), getattr(times, field.name)
            own[np.ix_(new, range(found.shape[1])) if found.ndim == 3 else new] = found
            columns.append(own)
        self.rows, self.exact = KindTimes(*columns), self.exact.copy()
        self.exact[new] = True
        return True


def free_times_on_chip(
    sizes: Sequence[StrategySizes],
    cluster: Cluster,
    optimizer: Optimizer,
    threads: int = 1,
) -> tuple[KindTimes, ...]:
    """Return times of strategies on a cluster's chip by level of `free_times`, one row each."""
    times_on_chip(sizes, cluster, optimizer, threads=threads)
    known, timed = _known_free_times(cluster, optimizer), _known_times(cluster, optimizer)
    new = [s for s in sizes if s not in known]
    for some, layers in priced(new, cluster, optimizer, threads):
        base = KindTimes.concatenated([timed[s] for s in some])
        every = free_times(layers.only(some), base, threads)
        for k, s in enumerate(some):
            row = {id(level): level.at(slice(k, k + 1)) for level in every}
            known[s] = tuple(row[id(level)] for level in every)
    rows, full = [known[s] for s in sizes], tuple(timed[s] for s in sizes)
    levels: list[KindTimes] = []
    for n in range(len(FREE_LEVELS) + 1):
        same = n > 0 and all(row[n] is row[n - 1] for row in rows)
        own = tuple(row[n] for row in rows)
        levels.append(levels[-1] if same else _joined(own, tuple(sizes), cluster, optimizer, full))
    return tuple(levels)
