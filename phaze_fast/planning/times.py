"""Seconds and joules of every kind of layer under strategies on chips.

A pass takes the maximum of its operators' schedule and the host's launches; an optimiser step takes
the time to stream its state through the chip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.caching import LruCache, as_one
from phaze_fast.cost import Costs, estimate_costs
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


def _sums(columns: Array, sets: Array) -> Array:
    """Sum sets of columns, shape (rows, sets), in a fixed order: no sum depends on other rows."""
    rows, count = columns.shape
    if not count:
        return np.zeros((rows, len(sets)))
    flat = _core.sums_of_sets(columns.reshape(-1), sets.reshape(-1).view(np.uint8), rows)
    sums: Array = flat.reshape(rows, len(sets)).copy()  # the flat array is read-only
    return sums


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


def _step_s(products_s: Array, launching_s: Array, ahead_s: Array) -> Array:
    """Return the seconds of an optimiser's products after the backward pass.

    The host starts to launch the products `ahead_s` before the device ends the backward pass.
    """
    after: Array = np.maximum(products_s, launching_s - ahead_s)
    return after


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


class LayerParts(NamedTuple):
    """The part of layers' times that does not depend on their schedules, shape (layers, chips)."""

    again_s: Array
    """Seconds of recomputed operators, shape (layers, chips, variants); NaN: the whole forward
    pass."""
    weight_grad_share: Array
    forward_j: Array
    backward_j: Array
    """Shape (layers, chips, variants)."""
    host_s: Array
    """Seconds the host needs to launch forward and backward pass, shape (layers, 2)."""
    host_again_s: Array
    """Seconds the host needs to launch the backward pass, shape (layers, variants)."""

    @classmethod
    def of(
        cls,
        layer: Layer,
        costs: Costs,
        at: Array,
        variants: Sequence[str],
        software: Software | None,
    ) -> LayerParts:
        """Build the parts of alike layers, whose graphs `at` are forward and `at + 1` backward."""
        passes = LayerPasses.of(layer, tuple(variants), software)
        count = len(variants)
        again_s = _sums(costs.time_s(at), passes.again)[:, :count]
        again_s[:, passes.whole] = np.nan
        spent = _sums(costs.dynamic_j(at), passes.again)
        late, total = _sums(costs.time_s(at + 1), passes.late).T
        backward_j = _sums(costs.dynamic_j(at + 1), passes.late)[:, 1:] + spent[:, :count]
        share = np.divide(late, total, where=total > 0, out=np.zeros(len(total)))
        by_chip = (again_s, share, spent[:, count], backward_j)
        by_layer = (np.array(values) for values in (passes.host_s, passes.host_again_s))
        return cls(
            *(values.reshape(len(at), costs.chips, *values.shape[1:]) for values in by_chip),
            *(np.tile(values, (len(at), 1)) for values in by_layer),
        )


class LayerPasses(NamedTuple):
    """The part of a layer's times that is the same on every chip."""

    again: Array
    """Operators of the forward pass that the backward pass recomputes, by variant; last: all."""
    whole: Array
    """Variants that recompute the whole forward pass."""
    late: Array
    """Operators of the backward pass that compute gradients of weights; and all."""
    host_s: tuple[float, float]
    host_again_s: list[float]
    """Seconds the host needs to launch the backward pass, by variant."""

    @classmethod
    def of(cls, layer: Layer, variants: tuple[str, ...], software: Software | None) -> LayerPasses:
        """Find the operators and the host's seconds of a layer by recompute variant."""
        layer = layer.family[0]  # members differ in sizes alone
        key = id(layer), variants, id(software)
        known = _PASSES.get(key)
        if known is None:  # the entry refers to the layer, so that its id is not reused
            called, own = layer.forward.products, layer.backward.products
            again = np.stack([*(_again(layer, mode) for mode in variants), called | True])
            late = np.array([name.endswith("-w") for name in layer.backward.names], dtype=bool)
            host = host_s(software, called), host_s(software, called[:0], own)
            host_again = [host_s(software, called[some], own) for some in again[:-1]]
            whole = np.logical_and.reduce(again[:-1], axis=1)
            sums = np.stack([late, late | True])
            known = layer, software, cls(again, whole, sums, host, host_again)
            _PASSES.put(key, known)
        return known[2]


_PASSES: LruCache[tuple[object, ...], tuple[Layer, Software | None, LayerPasses]] = LruCache(4096)
"""Latest `LayerPasses` by identity of the family of layers."""


@dataclass(frozen=True, eq=False)
class FixedParts:
    """The part of `KindTimes` that does not depend on layer schedules, for the same rows."""

    again_s: Array
    """Seconds of recomputed operators by variant, shape (rows, variants, kinds); NaN: the whole
    forward pass."""
    weight_grad_share: Array
    """Share of the backward pass that is weight gradients."""
    forward_j: Array
    backward_j: Array
    host_s: Array
    """Seconds the host needs to launch forward and backward pass, shape (rows, 2, kinds)."""
    host_again_s: Array
    """Seconds the host needs to launch the backward pass, shape (rows, variants, kinds)."""
    wait_s: Array
    """Seconds that passes wait for the host in addition, shape (rows, 2, kinds)."""
    hbm_bytes_per_s: Array
    static_w: Array
    limit_w: Array
    step_s: Array
    launching_s: Array
    """Seconds of the optimiser's products (`step_s`), and in which the host launches these."""

    @classmethod
    def of(cls, sizes: StrategySizes, costs: Costs, hbm_bytes_per_s: Array) -> FixedParts:
        """Build the parts of a strategy from the costs of its layers, one row per chip."""
        return cls.of_alike([sizes], costs, hbm_bytes_per_s, layer_places((sizes,)))

    @classmethod
    def of_alike(
        cls,
        sizes: Sequence[StrategySizes],
        costs: Costs,
        hbm_bytes_per_s: Array,
        places: Mapping[int, int],
        hosted: bool = True,
    ) -> FixedParts:
        """Build the parts of strategies with the same variants: rows by strategy, then by chip.

        `places` is from `layer_places`. Unless `hosted`, no pass waits for the host.
        """
        software = sizes[0].software if hosted else None
        variants = sizes[0].variants
        layers = {places[id(layer)]: layer for s in sizes for layer in s.graph.layers}
        alike = [at[[n in layers for n in at.tolist()]] for at in costs.alike]
        alike = [at for at in alike if len(at)]
        row_of = {n: row for row, n in enumerate(np.concatenate(alike).tolist())}
        parts = [LayerParts.of(layers[int(at[0])], costs, at, variants, software) for at in alike]
        every = LayerParts(*map(np.concatenate, zip(*parts, strict=True)))
        own = np.array([[row_of[places[id(k)]] for k in s.graph.layers] for s in sizes])
        waits = [[expert_wait_s(s.graph, k.kind, software) for k in s.graph.layers] for s in sizes]

        def by_chip(values: Array) -> Array:  # (layers, chips, ...) to (rows, ..., kinds)
            moved = np.ascontiguousarray(np.moveaxis(values[own], 1, -1))
            return moved.reshape(-1, *moved.shape[2:])

        def by_pass(values: Array) -> Array:  # (strategies, kinds, ...), the same on every chip
            return np.repeat(np.moveaxis(values, 1, -1), costs.chips, axis=0)

        host = (every.host_s[own], every.host_again_s[own], np.array(waits))
        powers = (hbm_bytes_per_s, costs.static_w, costs.limit_w)
        return cls(
            *map(by_chip, every[:4]),
            *map(by_pass, host),
            *(np.tile(power, len(sizes)) for power in powers),
            *np.zeros((2, len(sizes) * costs.chips, own.shape[1])),
        )

    def times(self, makespan_s: Array, proven: Array) -> KindTimes:
        """Combine with makespans of shape (graphs, rows); forward and backward graphs alternate."""
        forward, plain = (np.ascontiguousarray(makespan_s[start::2].T) for start in (0, 1))
        again = np.where(np.isnan(self.again_s), forward[:, None, :], self.again_s)
        backward = plain[:, None, :] + again
        ahead = np.maximum(plain - self.host_s[:, 1], 0.0)
        plain = np.maximum(plain, self.host_s[:, 1]) + self.wait_s[:, 1]
        return KindTimes(
            forward_s=np.maximum(forward, self.host_s[:, 0]) + self.wait_s[:, 0],
            plain_s=plain,
            backward_s=np.maximum(backward, self.host_again_s) + self.wait_s[:, 1, None],
            weight_grad_s=plain * self.weight_grad_share,
            forward_j=self.forward_j,
            backward_j=self.backward_j,
            hbm_bytes_per_s=self.hbm_bytes_per_s,
            static_w=self.static_w,
            limit_w=self.limit_w,
            proven=np.all(proven, axis=0),
            step_s=_step_s(self.step_s, self.launching_s, ahead),
            ahead_s=ahead,
        )


# ---- strategies on the chip of a cluster ----


@lru_cache(maxsize=32)
def _known_times(_cluster: Cluster) -> dict[StrategySizes, KindTimes]:
    """Return the cache of `times_on_chip` for a cluster."""
    return {}


@lru_cache(maxsize=32)
def _known_bounds(_cluster: Cluster) -> dict[StrategySizes, KindTimes]:
    """Return the cache of the lower bounds in `LazyTimes` for a cluster."""
    return {}


@lru_cache(maxsize=32)
def _known_free_times(_cluster: Cluster) -> dict[StrategySizes, tuple[KindTimes, ...]]:
    """Return the cache of `free_times_on_chip` for a cluster."""
    return {}


@lru_cache(maxsize=16)
def layer_places(sizes: tuple[StrategySizes, ...]) -> Mapping[int, int]:
    """Map the layers of strategies, by identity, to forward graphs' numbers in `operator_costs`.

    The backward graph of a layer has the next number.
    """
    places: dict[int, int] = {}
    for s in sizes:
        for layer in s.graph.layers:
            places.setdefault(id(layer), 2 * len(places))
    return places


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
        several of them share is priced once, at the place of `layer_places`.
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
    known: Mapping[StrategySizes, Any],
    threads: int,
) -> Iterator[tuple[list[StrategySizes], Costs, Array]]:
    """Estimate operator costs of the strategies that are not known yet.

    Strategies that `operator_costs` can price together are priced in one call. The rate at which
    the optimiser's state streams is 1 here; `_streaming` sets it.
    """
    chip = cluster.chip
    memory_of(chip)
    if chip is None:
        return
    for precision in {id(s.precision): s.precision for s in sizes}.values():
        check_precision(precision, chip)
    alike: dict[tuple[Software, float, bool], list[StrategySizes]] = {}
    for s in dict.fromkeys(sizes):
        if s not in known:
            hidden = (s.strategy.expert_overlap, s.strategy.overlap_experts)
            alike.setdefault((s.software, *hidden), []).append(s)
    for query, some in alike.items():
        places, latest = layer_places(tuple(some)), _latest_costs(cluster, *query)
        if not latest or not places.keys() <= latest[0][0].keys():
            costs = operator_costs(some, chip, cluster, threads)
            latest[:] = [(places, tuple(some), costs)]
        else:
            first = [latest[0][0][layer] for layer in places]
            costs = latest[0][2].only([at + later for at in first for later in (0, 1)])
        yield some, costs, np.ones(1)


@lru_cache(maxsize=8)
def _latest_costs(
    _cluster: Cluster, _software: Software, _expert_overlap: float, _overlap_experts: bool
) -> list[tuple[Mapping[int, int], tuple[StrategySizes, ...], Costs]]:
    """Return the latest costs of such strategies with the `layer_places` of these, or nothing."""
    return []


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
    """Set the rate at which an optimiser's state streams, its products, and copies to the host."""
    chip = cluster.chip
    if chip is None:
        return times
    times = _offloaded(sizes, times, chip, bounds, priced)
    rates = np.repeat(optimizer_bytes_per_s(chip_records([chip]), chip, optimizer), len(sizes))
    at_host = [s.strategy.offload_optimizer for s in sizes]
    if any(at_host):
        rates[at_host] = _host_bytes_per_s(_host(chip), optimizer)
    streamed = replace(times, hbm_bytes_per_s=rates)
    if optimizer.newton_schulz_steps is None:
        return streamed
    rows = [_products_on_chip(step_matrices(s), chip, s.software, optimizer) for s in sizes]
    products_s, launching_s = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return replace(streamed, step_s=_step_s(products_s, launching_s, times.ahead_s))


def _scheduled(
    sizes: Sequence[StrategySizes],
    costs: Costs,
    rate: Array,
    cache: ScheduleCache | None,
    threads: int,
    hosted: bool = True,
) -> list[KindTimes]:
    """Schedule the layers of strategies whose operator costs are known."""
    layers = schedule_layers(costs, max_nodes=MAX_NODES, threads=threads, cache=cache)
    return _of_layers(sizes, costs, rate, layers.makespan_s, layers.proven, hosted)


def _of_layers(
    sizes: Sequence[StrategySizes],
    costs: Costs,
    rate: Array,
    seconds: Array,
    proven: Array,
    hosted: bool = True,
) -> list[KindTimes]:
    """Build the times of strategies from the seconds of their layers' graphs, (graphs, chips)."""
    places, found = layer_places(tuple(sizes)), dict[int, KindTimes]()
    alike: dict[tuple[str, ...], list[int]] = {}
    for number, s in enumerate(sizes):
        alike.setdefault(s.variants, []).append(number)
    for numbers in alike.values():
        some = [sizes[number] for number in numbers]
        parts = FixedParts.of_alike(some, costs, rate, places, hosted)
        graphs = np.array([[places[id(layer)] for layer in s.graph.layers] for s in some])
        passes = np.stack([graphs, graphs + 1], axis=2)  # (strategies, kinds, passes)
        by_row = [
            np.moveaxis(values[passes], 0, 2).reshape(2 * graphs.shape[1], -1)
            for values in (seconds, proven)
        ]
        times = parts.times(*by_row)
        for k, number in enumerate(numbers):
            found[number] = times.at(slice(k * costs.chips, (k + 1) * costs.chips))
    return [found[number] for number in range(len(sizes))]


def _no_longer(times: KindTimes, before: KindTimes) -> KindTimes:
    """Return the elementwise minimum, as faster operators may get longer unproven schedules."""
    names = ("forward_s", "plain_s", "backward_s")
    least = {n: np.minimum(getattr(times, n), getattr(before, n)) for n in names}
    return replace(times, **least, weight_grad_s=np.minimum(times.weight_grad_s, least["plain_s"]))


def free_times(
    sizes: Sequence[StrategySizes],
    costs: Costs,
    rate: Array,
    base: Sequence[KindTimes],
    threads: int = 1,
) -> list[tuple[KindTimes, ...]]:
    """Return times with more and more communication, and finally the host, at no cost, by level.

    A level that changes nothing is the same object as the level before it.

    Parameters
    ----------
    sizes
        The strategies.
    costs
        Costs of their graphs, one strategy after another.
    rate
        Bytes per second of the chips' memory.
    base
        Times of the strategies at full cost.
    threads
        Most threads to use; the answer does not depend on it.
    """
    groups = {int(g) for graph in costs.graphs for g in np.unique(graph.ops["group"])}
    levels: list[list[KindTimes]] = [list(base)]

    def add(hosted: bool) -> None:
        times = _scheduled(sizes, costs.without(free), rate, None, threads, hosted)
        levels.append([_no_longer(*pair) for pair in zip(times, levels[-1], strict=True)])

    free: list[str] = []
    for more in FREE_LEVELS:
        free += more
        if any(GROUPS.index(name) in groups for name in more):
            add(hosted=True)
        else:
            levels.append(levels[-1])
    if any(s.software.waited_for for s in sizes):
        add(hosted=False)
    else:
        levels.append(levels[-1])
    return [tuple(level[k] for level in levels[1:]) for k in range(len(sizes))]


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
    known = _known_times(cluster)
    for some, costs, rate in priced(sizes, cluster, known, threads):
        known.update(zip(some, _scheduled(some, costs, rate, cache, threads), strict=True))
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


_ROOTS: LruCache[tuple[object, ...], tuple[Layer, list[float], list[bool]]] = LruCache(2**13)
"""Lower bounds of both passes of the latest layers, by identity; whether each is attained."""


def _roots(
    sizes: Sequence[StrategySizes], costs: Costs, cluster: Cluster, threads: int
) -> tuple[Array, Array]:
    """Bound the layers of strategies from below by the roots of their branch-and-bound trees.

    Returns
    -------
    tuple
        Lower bounds in seconds, and whether a schedule attains them, shape (graphs, 1).
    """
    first, places = sizes[0], layer_places(tuple(sizes))
    layers = {id(layer): layer for s in sizes for layer in s.graph.layers}
    hidden = (first.strategy.expert_overlap, first.strategy.overlap_experts)
    query = as_one(cluster, first.software, *hidden)
    known = {key: _ROOTS.get((query, key)) for key in places}
    if not all(known.values()):
        roots = schedule_layers(costs, max_nodes=1, threads=threads)
        bounds_s, proven = roots.bound_s[:, 0].tolist(), roots.proven[:, 0].tolist()
        for key, at in places.items():
            # The entry refers to the layer, so that its id is not reused.
            entry = layers[key], bounds_s[at : at + 2], proven[at : at + 2]
            known[key] = _ROOTS.put((query, key), entry)
    entries = [entry for entry in known.values() if entry is not None]
    bounds = [bound_s for _, both_s, _ in entries for bound_s in both_s]
    return np.array(bounds)[:, None], np.array([one for *_, both in entries for one in both])[
        :, None
    ]


@lru_cache(maxsize=16)
def least_work_s(sizes: tuple[StrategySizes, ...], cluster: Cluster, threads: int = 1) -> Array:
    """Bound the seconds of a micro-batch through all layers, both passes, from below by strategy.

    The bounds are those of `LazyTimes`, but computed without the figures that only plans need. The
    latest are cached.
    """
    found: dict[StrategySizes, float] = {}
    for some, costs, _ in priced(sizes, cluster, found, threads):
        bounds_s = _roots(some, costs, cluster, threads)[0][:, 0]
        software, places = some[0].software, layer_places(tuple(some))
        graphs = [[places[id(layer)] for layer in s.graph.layers] for s in some]
        passes = np.array(graphs)[:, :, None] + np.arange(2)  # (strategies, kinds, passes)
        least_s = bounds_s[passes]
        if software.waited_for:
            least_s = np.maximum(least_s, [_launches_s(s) for s in some])
            least_s += [
                [expert_wait_s(s.graph, k.kind, software) for k in s.graph.layers] for s in some
            ]
        counts = np.array([[layer.count for layer in s.graph.layers] for s in some])
        totals = np.add.accumulate(counts * (least_s[:, :, 0] + least_s[:, :, 1]), axis=1)[:, -1]
        found.update(zip(some, totals.tolist(), strict=True))
    return np.array([found[s] for s in sizes])


def _launches_s(sizes: StrategySizes) -> list[tuple[float, float]]:
    """Return the seconds in which the host launches both passes of each kind of layer."""
    own = [(layer.forward.products, layer.backward.products) for layer in sizes.graph.layers]
    software = sizes.software
    return [(host_s(software, f), host_s(software, f[:0], b)) for f, b in own]


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
        known = _known_bounds(cluster)
        for some, costs, rate in priced([sizes[s] for s in used], cluster, known, threads):
            rows = _of_layers(some, costs, rate, *_roots(some, costs, cluster, threads))
            known.update(zip(some, rows, strict=True))
        bounds = KindTimes.concatenated([known[sizes[s]] for s in used])
        bounds = _streaming([sizes[s] for s in used], bounds, cluster, optimizer, bounds=True)
        self.rows = KindTimes(
            *(_spread(getattr(bounds, f.name), used, len(sizes)) for f in fields(bounds))
        )
        """One row per strategy; where not `exact`, no time is longer than that of the schedule."""
        self.exact = self.rows.proven.copy()
        timed = _known_times(cluster)
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
    known, timed = _known_free_times(cluster), _known_times(cluster)
    for some, costs, rate in priced(sizes, cluster, known, threads):
        base = [timed[s] for s in some]
        known.update(zip(some, free_times(some, costs, rate, base, threads), strict=True))
    rows, full = [known[s] for s in sizes], tuple(timed[s] for s in sizes)
    levels: list[KindTimes] = []
    for n in range(len(FREE_LEVELS) + 1):
        same = n > 0 and all(row[n] is row[n - 1] for row in rows)
        own = tuple(row[n] for row in rows)
        levels.append(levels[-1] if same else _joined(own, tuple(sizes), cluster, optimizer, full))
    return tuple(levels)
