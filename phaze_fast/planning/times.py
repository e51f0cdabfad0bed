"""Seconds and joules of every kind of layer under strategies on chips."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

from phaze_fast.cost import Costs, estimate_costs
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, Cluster, Hbm, chip_records
from phaze_fast.memory import Optimizer
from phaze_fast.opgraph import GROUPS, Layer
from phaze_fast.planning.rates import expert_wait_s, host_s, optimizer_bytes_per_s
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.schedule import ScheduleCache, schedule_layers
from phaze_fast.software import Software, check_precision, chip_as_run

__all__ = [
    "FREE_LEVELS",
    "MAX_NODES",
    "FixedParts",
    "KindTimes",
    "free_times",
    "free_times_on_chip",
    "memory_of",
    "priced",
    "times_on_chip",
]

Array = np.ndarray[Any, Any]
T = TypeVar("T")

MAX_NODES = 20_000
"""Of the search for one layer's schedule."""

FREE_LEVELS = (
    ("expert",),
    ("expert", "context"),
    ("expert", "context", "expert-tensor", "tensor"),
)
"""Groups of devices whose collectives are free, level by level, where a step is taken apart."""


def memory_of(chip: Accelerator | None) -> Hbm:
    """HBM of a chip that layers are placed on.

    Raises
    ------
    InvalidInputError
        Where there is no chip, or it has none.
    """
    if chip is None:
        raise InvalidInputError("cluster.chip: missing; expected the chip of the devices")
    if chip.hbm is None or chip.hbm.capacity_bytes <= 0:
        raise InvalidInputError(f"cluster.chip: {chip.name} has no HBM to place layers in")
    return chip.hbm


def _summed(columns: Array, wanted: Sequence[bool]) -> Array:
    """Sum of some columns, one after another, so that a row's sum depends on that row alone."""
    some = columns[:, np.array(wanted, dtype=bool)]
    if not some.shape[1]:
        return np.zeros(len(columns))
    total: Array = np.add.accumulate(some, axis=1)[:, -1]
    return total


def _again(layer: Layer, mode: str) -> list[bool]:
    """Which operators of a layer's forward pass run again in its backward pass."""
    if layer.kind in ("embedding", "head"):
        return [False] * len(layer.forward)
    named = layer.forward.recomputed(mode)
    return [name in named for name in layer.forward.names]


@dataclass(frozen=True, eq=False)
class KindTimes:
    """Seconds and joules of each kind of layer, per micro-batch and device.

    A row is a chip under one strategy, or a strategy on one chip. Arrays have shape (rows, kinds),
    by variant (rows, variants, kinds).
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
    hbm_bytes_per_s: Array
    """That the optimiser's state streams at, shape (rows,)."""
    static_w: Array
    """Watts that flow whatever runs, shape (rows,)."""
    proven: Array
    """Whether all schedules of a row are proven, shape (rows,)."""

    def at(self, rows: Any) -> KindTimes:
        """Those of some rows."""
        return KindTimes(*(np.ascontiguousarray(getattr(self, f.name)[rows]) for f in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[KindTimes]) -> KindTimes:
        """Several, one after another; missing variants are zeros."""
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
        """Give all that placement sees of each row: equal where it cannot tell them apart."""
        columns = (self.forward_s, self.backward_s, self.weight_grad_s, self.hbm_bytes_per_s)
        flat = np.concatenate([c.reshape(len(c), -1) for c in columns], axis=1)
        return [row.tobytes() for row in np.ascontiguousarray(flat)]

    @classmethod
    def of(
        cls,
        sizes: StrategySizes,
        costs: Costs,
        makespan_s: Array,
        proven: Array,
        hbm_bytes_per_s: Array,
        first: int = 0,
        hosted: bool = True,
    ) -> KindTimes:
        """Read them off makespans of graphs x chips, from graph `first` on.

        Where they are not `hosted`, no pass waits for the host.
        """
        own = slice(first, first + 2 * len(sizes.graph.layers))
        parts = FixedParts.of(sizes, costs, hbm_bytes_per_s, first, hosted)
        return parts.times(makespan_s[own], proven[own])


@dataclass(frozen=True, eq=False)
class FixedParts:
    """What no schedule changes of `KindTimes`, for the same rows."""

    again_s: Array
    """Seconds computed again by each variant, shape (rows, variants, kinds); NaN: as many as the
    forward pass takes."""
    weight_grad_share: Array
    """Share of the backward pass that is weight gradients."""
    forward_j: Array
    backward_j: Array
    host_s: Array
    """That the host takes at least for forward and backward pass, shape (rows, 2, kinds)."""
    host_again_s: Array
    """The same for the backward pass of each variant, shape (rows, variants, kinds)."""
    wait_s: Array
    """That passes wait for the host on top, shape (rows, 2, kinds)."""
    hbm_bytes_per_s: Array
    static_w: Array

    def at(self, rows: Any) -> FixedParts:
        """Those of some rows."""
        return FixedParts(*(getattr(self, f.name)[rows] for f in fields(self)))

    @classmethod
    def of(
        cls,
        sizes: StrategySizes,
        costs: Costs,
        hbm_bytes_per_s: Array,
        first: int = 0,
        hosted: bool = True,
    ) -> FixedParts:
        """Read them off the costs of graphs, from graph `first` on."""
        layers, software = sizes.graph.layers, sizes.software if hosted else None
        shape = (costs.chips, len(layers))
        by_variant = (shape[0], len(sizes.variants), shape[1])
        share, joules = np.zeros(shape), np.zeros(shape)
        again_s, backward_j = np.zeros(by_variant), np.zeros(by_variant)
        host, host_again = np.zeros((shape[0], 2, shape[1])), np.zeros(by_variant)
        wait = np.zeros_like(host)
        for k, layer in enumerate(layers):
            at = first + 2 * k
            ops = (len(layer.forward), len(layer.backward))
            host[:, :, k] = [host_s(count, software) for count in ops]
            wait[:, :, k] = expert_wait_s(sizes.graph, layer.kind, software)
            seconds, spent = costs.time_s(at), costs.dynamic_j(at)
            joules[:, k] = _summed(spent, [True] * len(layer.forward))
            own_j = _summed(costs.dynamic_j(at + 1), [True] * len(layer.backward))
            for v, mode in enumerate(sizes.variants):
                again = _again(layer, mode)
                again_s[:, v, k] = np.nan if all(again) else _summed(seconds, again)
                host_again[:, v, k] = host_s(ops[1] + sum(again), software, sum(again))
                backward_j[:, v, k] = own_j + _summed(spent, again)
            each = costs.time_s(at + 1)
            late = _summed(each, [name.endswith("-w") for name in layer.backward.names])
            total = _summed(each, [True] * len(layer.backward))
            np.divide(late, total, where=total > 0, out=share[:, k])
        rates = (hbm_bytes_per_s, costs.static_w)
        return cls(again_s, share, joules, backward_j, host, host_again, wait, *rates)

    def times(self, makespan_s: Array, proven: Array) -> KindTimes:
        """Give the times with makespans, shape (graphs, rows); forward and backward alternate."""
        forward, plain = (np.ascontiguousarray(makespan_s[way::2].T) for way in (0, 1))
        again = np.where(np.isnan(self.again_s), forward[:, None, :], self.again_s)
        backward = plain[:, None, :] + again
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
            proven=np.all(proven, axis=0),
        )


class _Kept(Generic[T]):
    """What was worked out of strategies on clusters before, for the latest few clusters."""

    def __init__(self, clusters: int) -> None:
        self._most, self._lock = clusters, Lock()
        self._known: OrderedDict[Cluster, dict[StrategySizes, T]] = OrderedDict()

    def on(self, cluster: Cluster) -> dict[StrategySizes, T]:
        """Those of one cluster; what is added is kept."""
        with self._lock:
            times = self._known.setdefault(cluster, {})
            self._known.move_to_end(cluster)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
            return times


_kept: _Kept[KindTimes] = _Kept(32)
_kept_free: _Kept[tuple[KindTimes, ...]] = _Kept(32)


def priced(
    sizes: Sequence[StrategySizes],
    cluster: Cluster,
    known: Mapping[StrategySizes, Any],
    threads: int,
) -> Iterator[tuple[list[StrategySizes], Costs, Array]]:
    """Price the strategies that are not known, those whose expert groups lie alike in one call.

    The rate of the optimiser's state is left at 1: `_streaming` sets it.
    """
    chip = cluster.chip
    memory_of(chip)
    if chip is None:
        return
    for precision in dict.fromkeys(s.precision for s in sizes):
        check_precision(precision, chip)
    alike: dict[tuple[int | None, Software, float], list[StrategySizes]] = {}
    for s in dict.fromkeys(sizes):
        if s not in known:
            stride = s.expert_stride if s.strategy.ep > 1 else None
            alike.setdefault((stride, s.software, s.strategy.expert_overlap), []).append(s)
    for (stride, software, _), some in alike.items():
        graphs, run = [s.graph for s in some], chip_as_run(chip, software)
        costs = estimate_costs(graphs, run, cluster, threads=threads, expert_stride=stride)
        costs = costs.with_contention(software.contention)
        for group, share in some[0].hidden.items():
            costs = costs.without((group,), share)
        yield some, costs, np.ones(1)


def _streaming(times: KindTimes, cluster: Cluster, optimizer: Optimizer) -> KindTimes:
    """Set the rate at which an optimiser's state streams."""
    if cluster.chip is None:
        return times
    rate = optimizer_bytes_per_s(chip_records([cluster.chip]), cluster.chip, optimizer)
    return replace(times, hbm_bytes_per_s=np.repeat(rate, len(times.proven)))


def _scheduled(
    sizes: Sequence[StrategySizes],
    costs: Costs,
    rate: Array,
    cache: ScheduleCache | None,
    threads: int,
    hosted: bool = True,
) -> list[KindTimes]:
    """Schedule the layers of strategies whose operators are priced."""
    made = schedule_layers(costs, max_nodes=MAX_NODES, threads=threads, cache=cache)
    found, first = [], 0
    for s in sizes:
        found.append(KindTimes.of(s, costs, made.makespan_s, made.proven, rate, first, hosted))
        first += 2 * len(s.graph.layers)
    return found


def _no_longer(times: KindTimes, before: KindTimes) -> KindTimes:
    """Take the shorter of two: a schedule that is not proven is none for operators made shorter."""
    names = ("forward_s", "plain_s", "backward_s")
    least = {n: np.minimum(getattr(times, n), getattr(before, n)) for n in names}
    return replace(times, **least, weight_grad_s=np.minimum(times.weight_grad_s, least["plain_s"]))


def free_times(
    sizes: Sequence[StrategySizes],
    costs: Costs,
    rate: Array,
    base: Sequence[KindTimes],
    cache: ScheduleCache | None = None,
    threads: int = 1,
) -> list[tuple[KindTimes, ...]]:
    """Give times of strategies as if some of what layers wait for were free, level by level.

    A level that changes nothing is the very record of the level before it.

    Parameters
    ----------
    sizes
        The strategies.
    costs
        Of their graphs, one after another.
    rate
        Bytes per second of the chips' memory.
    base
        Times of the strategies with nothing free.
    cache
        Where layer schedules are looked up and kept.
    threads
        At most this many; the answer does not depend on it.
    """
    groups = {int(g) for graph in costs.graphs for g in np.unique(graph.ops["group"])}
    levels: list[list[KindTimes]] = [list(base)]

    def add(hosted: bool) -> None:
        made = _scheduled(sizes, costs.without(free), rate, cache, threads, hosted)
        levels.append([_no_longer(*pair) for pair in zip(made, levels[-1], strict=True)])

    for free in FREE_LEVELS:
        if GROUPS.index(free[-1]) in groups:
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

    What was worked out before in this process is looked up by content.
    """
    known = _kept.on(cluster)
    for some, costs, rate in priced(sizes, cluster, known, threads):
        known.update(zip(some, _scheduled(some, costs, rate, cache, threads), strict=True))
    return _streaming(KindTimes.joined([known[s] for s in sizes]), cluster, optimizer)


def free_times_on_chip(
    sizes: Sequence[StrategySizes],
    cluster: Cluster,
    optimizer: Optimizer,
    cache: ScheduleCache | None = None,
    threads: int = 1,
) -> tuple[KindTimes, ...]:
    """Give times of strategies on a cluster's chip by level of what is free, one row each."""
    times_on_chip(sizes, cluster, optimizer, cache, threads)
    known, timed = _kept_free.on(cluster), _kept.on(cluster)
    for some, costs, rate in priced(sizes, cluster, known, threads):
        base = [timed[s] for s in some]
        known.update(zip(some, free_times(some, costs, rate, base, cache, threads), strict=True))
    rows = [known[s] for s in sizes]
    found: list[KindTimes] = []
    for n in range(len(FREE_LEVELS) + 1):
        same = n > 0 and all(row[n] is row[n - 1] for row in rows)
        level = found[-1] if same else KindTimes.joined([row[n] for row in rows])
        found.append(level if same else _streaming(level, cluster, optimizer))
    return tuple(found)
