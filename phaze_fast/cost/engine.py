"""Time and energy of every operator of operator graphs on every chip of a batch.

Operators of equal shape are priced once, and so are chips that are equal in all properties that the
cost of an operator depends on. Results are cached by the content of the query.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, repeat
from types import MappingProxyType
from typing import NamedTuple, cast

import numpy as np

from phaze_fast import _core
from phaze_fast.caching import LruCache
from phaze_fast.cost.collectives import collectives_s, rank_groups
from phaze_fast.cost.machines import Machines, in_format, machines, on_tensor_cores
from phaze_fast.cost.residency import layer_traffic
from phaze_fast.errors import InvalidInputError, InvalidTypeError, not_accepted
from phaze_fast.hardware import Accelerator, AnyFabric, Cluster, EnergyTable, Tuning, presets
from phaze_fast.hardware.chip import Dtype
from phaze_fast.opgraph import BESIDE_RING, FORMATS, GROUPS, KINDS, RING, LayerGraph, OpGraph
from phaze_fast.tables import Array, Brief, distinct_rows, words_of
from phaze_fast.threads import thread_count

EXCHANGE_CORES = 20 / 132
"""Share of a chip's cores that run an exchange while the others compute: DeepSeek-AI, DeepSeek-V3
technical report, 2024 (arXiv:2412.19437), section 3.2.2, 20 of the 132 of an H800."""


@lru_cache(maxsize=256)
def _rings(names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the positions of ring-attention collectives."""
    return tuple(k for k, name in enumerate(names) if name.endswith(RING))


class CostTable(NamedTuple):
    """Costs of distinct operators, a column each, on distinct chips, a row each."""

    time_s: Array
    one_core_s: Array
    bound_s: Array
    dynamic_j: Array
    chip_of: Array
    """Row of each chip."""
    column_of: Array
    """Column of each operator; -1 where it is in another table."""


def _column(graphs: Sequence[OpGraph], name: str) -> Array:
    """Return a field of all operators of graphs."""
    return np.concatenate([graph.ops[name] for graph in graphs] or [np.zeros(0)])


@dataclass(frozen=True, eq=False)
class Costs(Brief):
    """Time and energy of the operators of several graphs on several chips.

    Each distinct shape is stored once per distinct chip; `time_s` and the other methods expand it
    to one row per chip and one column per operator of a graph.
    """

    graphs: tuple[OpGraph, ...]
    chips: int
    cores: Array
    """Tensor cores, vector cores and networks (1) of each chip, shape (chips, 3)."""
    evaluations: int
    """Number of pairs of distinct operator and distinct chip that were priced."""
    _tables: tuple[CostTable, ...]
    _static_w: Array
    _limit_w: Array
    _ends: tuple[int, ...]
    _network_s: Array
    """Seconds of collectives, of all operators of all graphs; zero of others."""
    _places: dict[tuple[int, ...], Array] = field(default_factory=dict)
    """Positions of the operators of `alike` graphs among all operators, (graphs, operators)."""
    _on_chip: dict[str, Array] = field(default_factory=dict)
    """With one chip: values of all operators of all graphs, by name of a table's field."""
    _exposed: dict[tuple[int, ...], Array] = field(default_factory=dict, init=False)
    """With one chip: seconds of collectives that nothing hides, by graphs."""

    _contention: float = 0.0
    _overlapped: tuple[str, ...] = ()
    """Groups whose collectives run while other passes of the same layer compute."""
    _shared_experts: bool = False

    @cached_property
    def alike(self) -> list[Array]:
        """Positions of the graphs, in arrays of graphs that differ in the sizes of operators alone.

        With several chips, each graph has an array of its own.
        """
        if self.chips != 1:
            return [np.array([at]) for at in range(len(self.graphs))]
        found: dict[tuple[object, ...], list[int]] = {}
        for at, graph in enumerate(self.graphs):
            edges = (id(graph.indptr), id(graph.indices), id(graph.names))
            key = (*edges, graph.in_order, graph.ops["unit"].tobytes())
            found.setdefault(key, []).append(at)
        return [np.array(some) for some in found.values()]

    def _places_of(self, graphs: tuple[int, ...]) -> Array:
        known = self._places.get(graphs)
        if known is None:
            first = np.array([self._ends[graph] for graph in graphs])
            known = first[:, None] + np.arange(len(self.graphs[graphs[0]]))
            self._places[graphs] = known
        return known

    def _checked(self, graph: int | Array, chip: int | None) -> tuple[int, ...]:
        graphs = tuple(np.atleast_1d(graph).tolist())
        if min(graphs) < 0 or max(graphs) >= len(self.graphs):
            last = len(self.graphs) - 1
            raise not_accepted("graph", graph, f"0 to {last}")
        if chip is not None and not 0 <= chip < self.chips:
            raise not_accepted("chip", chip, f"0 to {self.chips - 1}")
        return graphs

    def _look_up(self, name: str, graphs: tuple[int, ...], chip: int | None) -> Array:
        ops = self._places_of(graphs)
        if self.chips == 1:
            found: Array = self._of_chip(name)[ops]
            return found
        rows = slice(None) if chip is None else slice(chip, chip + 1)
        costs = np.empty((len(range(*rows.indices(self.chips))), ops.shape[1]))
        for table in self._tables:
            columns = table.column_of[ops[0]]
            mine = np.flatnonzero(columns >= 0)
            if len(mine):
                values: Array = getattr(table, name).take(columns[mine], axis=1)
                costs[:, mine] = values.take(table.chip_of[rows], axis=0)
        return costs

    def _of_chip(self, name: str) -> Array:
        """Return a field of the tables for all operators of all graphs on the only chip."""
        known = self._on_chip.get(name)
        if known is None:
            known = np.empty(self._ends[-1])
            for table in self._tables:
                mine = np.flatnonzero(table.column_of >= 0)
                values: Array = getattr(table, name)[table.chip_of[0]]
                known[mine] = values[table.column_of[mine]]
            self._on_chip[name] = known
        return known

    def _network_of(self, graphs: tuple[int, ...]) -> Array:
        """Seconds of collectives, shape (graphs, operators)."""
        seconds: Array = self._network_s[self._places_of(graphs)]
        return seconds

    def only(self, graphs: Sequence[int]) -> Costs:
        """Return the costs of some of the graphs, by position."""
        kept = tuple(self.graphs[at] for at in graphs)
        ops = np.concatenate([np.arange(self._ends[at], self._ends[at + 1]) for at in graphs])
        return replace(
            self,
            graphs=kept,
            _tables=tuple(t._replace(column_of=t.column_of[ops]) for t in self._tables),
            _ends=(0, *accumulate(map(len, kept))),
            _network_s=self._network_s[ops],
            _places={},
            _on_chip={},
        )

    def without(self, groups: Sequence[str], share: float = 1.0) -> Costs:
        """Return the costs with collectives of some groups (`phaze_fast.opgraph.GROUPS`) free.

        A `share` below 1 removes only that part of the collectives' seconds.
        """
        codes = [GROUPS.index(name) for name in groups]
        free = np.isin(_column(self.graphs, "group"), codes)
        network_s = np.where(free, (1.0 - share) * self._network_s, self._network_s)
        return replace(self, _network_s=network_s)

    def with_contention(self, contention: float) -> Costs:
        """Return the costs if collectives delay the work they overlap by a share of their time."""
        return replace(self, _contention=contention)

    def with_overlapped(self, groups: Sequence[str]) -> Costs:
        """Return the costs if collectives of some groups run while another micro-batch computes.

        A forward pass runs at the same time as a backward pass of the same layer. The computation
        of both hides the collectives of both while it lasts, except for the share of cores that
        run the collectives. Graphs must alternate: forward, backward.
        """
        return replace(self, _overlapped=tuple(groups))

    def with_shared_experts(self) -> Costs:
        """Return the costs if shared experts run while rows are sent to routed ones and back.

        The first products and the activation run while rows are sent, the last product while they
        return; in a backward pass likewise (Megatron-Core, shared_experts.py).
        """
        return replace(self, _shared_experts=True)

    def _beside_shared_s(self, graphs: tuple[int, ...], chip: int | None) -> Array:
        """Seconds of collectives, less the part that shared experts hide."""
        network, names = self._network_of(graphs), self.graphs[graphs[0]].names
        shared = [k for k, name in enumerate(names) if name.removeprefix("d-").startswith("shared")]
        exchanges = {name.removeprefix("d-"): k for k, name in enumerate(names)}
        if not shared or "dispatch" not in exchanges:
            return network
        compute_s = self._look_up("time_s", graphs, chip)
        seconds = np.array(np.broadcast_to(network, (len(compute_s), network.shape[-1])))
        last = [k for k in shared if "shared-down" in names[k]]
        first = [k for k in shared if k not in last and names[k] != "shared-sum"]
        for name, beside in (("dispatch", first), ("combine", last)):
            at, hiding_s = exchanges[name], compute_s[:, beside]
            if len(graphs) > 1:  # sums as for one graph alone, to the last bit
                hiding_s = np.ascontiguousarray(hiding_s)
            own_s = seconds[:, at]
            left_s = own_s - hiding_s.sum(axis=1)
            seconds[:, at] = np.maximum(self._contention * own_s, left_s)
        return seconds

    def _overlap_exposed_s(self, graphs: tuple[int, ...], chip: int | None) -> Array:
        """Seconds of collectives, less the part that passes of another micro-batch hide."""
        network, codes = self._network_of(graphs), [GROUPS.index(name) for name in self._overlapped]
        exchange_s, compute_s = np.zeros(len(graphs)), np.zeros(1)
        for passes in (tuple(at & ~1 for at in graphs), tuple(at | 1 for at in graphs)):
            own = np.isin(self.graphs[passes[0]].ops["group"], codes)
            exchange_s += np.ascontiguousarray(self._network_of(passes)[:, own]).sum(axis=1)
            compute_s = compute_s + self._look_up("time_s", passes, chip).sum(axis=1)
        if not exchange_s.any():
            return network
        hidden = np.minimum(1.0, compute_s / exchange_s)
        hidden *= 1.0 - max(self._contention, EXCHANGE_CORES)
        mine = np.isin(self.graphs[graphs[0]].ops["group"], codes)
        return np.where(mine, network * (1.0 - hidden[:, None]), network)

    def _exposed_s(self, graphs: tuple[int, ...], chip: int | None) -> Array:
        """Seconds of collectives; of ring attention, only the part that attention does not hide."""
        if self.chips != 1:
            return self._not_hidden_s(graphs, chip)
        known = self._exposed.get(graphs)
        if known is None:
            self._exposed[graphs] = known = self._not_hidden_s(graphs, chip)
        return known

    def _not_hidden_s(self, graphs: tuple[int, ...], chip: int | None) -> Array:
        names = self.graphs[graphs[0]].names
        if self._overlapped:
            network = self._overlap_exposed_s(graphs, chip)
        elif self._shared_experts:
            network = self._beside_shared_s(graphs, chip)
        else:
            network = self._network_of(graphs)
        rings = _rings(names)
        if not rings:
            return network
        hides = [names.index(names[k].removesuffix(RING) + BESIDE_RING) for k in rings]
        overlapped_s = self._look_up("time_s", graphs, chip)[:, hides]
        seconds = np.array(np.broadcast_to(network, (len(overlapped_s), network.shape[-1])))
        ring_s = seconds[:, list(rings)]
        seconds[:, list(rings)] = np.maximum(self._contention * ring_s, ring_s - overlapped_s)
        return seconds

    def exposed_network_s(self) -> Array:
        """Seconds of collectives that nothing hides, of all operators of all graphs.

        Zero of other operators; shape (chips, operators), or (1, operators) where chips have the
        same.
        """
        names = {id(graph.names): graph.names for graph in self.graphs}.values()
        if not (self._overlapped or self._shared_experts or any(map(_rings, names))):
            return self._network_s[None]
        if self.chips == 1:
            seconds = np.empty((1, self._ends[-1]))
            for at in self.alike:
                graphs = tuple(at.tolist())
                seconds[0, self._places_of(graphs)] = self._exposed_s(graphs, None)
            return seconds
        parts = [self._exposed_s((at,), None) for at in range(len(self.graphs))]
        rows = max(len(part) for part in parts)
        return np.concatenate([np.broadcast_to(p, (rows, p.shape[1])) for p in parts], axis=1)

    @property
    def tables(self) -> tuple[CostTable, ...]:
        """Costs of the distinct operators on the distinct chips."""
        return self._tables

    def _with_network(self, name: str, graph: int | Array, chip: int | None) -> Array:
        graphs = self._checked(graph, chip)
        seconds: Array = self._look_up(name, graphs, chip) + self._exposed_s(graphs, chip)
        return seconds

    def time_s(self, graph: int | Array = 0, chip: int | None = None) -> Array:
        """Seconds on all cores, shape (chips, operators); collectives over the interconnect.

        Of several graphs that are `alike` on one chip, shape (graphs, operators).
        """
        return self._with_network("time_s", graph, chip)

    def one_core_s(self, graph: int | Array = 0, chip: int | None = None) -> Array:
        """Seconds on one core of each type, shape as of `time_s`."""
        return self._with_network("one_core_s", graph, chip)

    def bound_s(self, graph: int | Array = 0, chip: int | None = None) -> Array:
        """Lower bounds of `time_s`, of the same shape."""
        return self._with_network("bound_s", graph, chip)

    @property
    def static_w(self) -> Array:
        """Static power of each chip, watts, shape (chips,)."""
        return self._static_w

    @property
    def limit_w(self) -> Array:
        """Rated power of each chip, watts; infinite where none is given."""
        return self._limit_w

    def dynamic_j(self, graph: int | Array = 0, chip: int | None = None) -> Array:
        """Dynamic energy on the chip, joules, shape as of `time_s`."""
        return self._look_up("dynamic_j", self._checked(graph, chip), chip)

    def energy_j(self, graph: int = 0, chip: int | None = None) -> Array:
        """Energy on the chip, joules, shape (chips, operators); collectives take none."""
        watts = self._static_w if chip is None else self._static_w[chip : chip + 1]
        joules = self.dynamic_j(graph, chip)
        joules += watts[:, None] * self._look_up("time_s", (graph,), chip)
        return joules

    def total_s(self) -> Array:
        """Seconds of each graph if its operators follow one another, shape (graphs, chips)."""
        return np.array([self.time_s(i).sum(axis=1) for i in range(len(self.graphs))])


_SEEN = (
    "unit",
    "b",
    "m",
    "n",
    "k",
    "read_bytes",
    "write_bytes",
    "causal",
    "epilogue",
    "function",
    *("epilogue_functions", "kept_share"),
)
_UNSEEN_OF_CHIP = ("hbm_bytes", "hbm_stacks", "vector_local_bytes")  # no cost depends on them
# The cost of a product without fused operators depends on the tensor cores alone.
_UNSEEN_BY_PRODUCTS = ("vector_cores", "vector_lanes", "vector_alus_per_lane")
_WEIGHT_PRODUCT = KINDS.index("gemm")  # forward product of an input with weights


def _flat(graphs: OpGraph | LayerGraph | Sequence[OpGraph | LayerGraph]) -> tuple[OpGraph, ...]:
    listed = [graphs] if isinstance(graphs, OpGraph | LayerGraph) else list(graphs)
    flat: list[OpGraph] = []
    for graph in listed:
        if isinstance(graph, LayerGraph):
            for layer in graph.layers:
                flat += [layer.forward, layer.backward]
        elif isinstance(graph, OpGraph):
            flat.append(graph)
        else:
            raise InvalidTypeError(
                f"graphs: {type(graph).__name__} is not accepted; expected OpGraph or LayerGraph"
            )
    return tuple(flat)


def distinct_operators(ops: Array) -> tuple[Array, Array]:
    """Return the operators that differ in cost, and the index of each operator among them."""
    if not len(ops):
        return ops, np.zeros(0, dtype=np.intp)
    fields = (ops[name] for name in _SEEN)
    columns = [one for own in fields for one in (own.T if own.ndim > 1 else [own])]
    words = [
        np.ascontiguousarray(one).view(np.uint64) if one.dtype == np.float64 else one.astype("u8")
        for one in columns
    ]
    first, inverse = distinct_rows(words)
    chosen: Array = np.zeros(len(first), dtype=ops.dtype)
    for name in _SEEN:
        chosen[name] = ops[name][first]
    chosen["collective"] = -1
    return chosen, inverse


def _distinct_chips(batch: Machines, unseen: tuple[str, ...]) -> tuple[Machines, Array]:
    """Return the chips that differ in cost, and the index of each chip among them."""
    records = batch.records.copy()
    for name in unseen:
        records[name] = 1
    words = [*words_of(records), *words_of(batch.energy), batch.tuning_of.astype(np.uint64)]
    first, inverse = distinct_rows(words)
    # Static energy is added when costs are expanded to one row per chip.
    alike = replace(batch, records=records, idle_w={"": np.zeros(len(records))})
    return alike.take(first), inverse


def _bounded(ops: Array, batch: Machines, threads: int) -> tuple[Array, ...]:
    """Return lower bounds in place of times, and no energy; not cached, as they are quick."""
    bounds: Array = _core.op_bounds(ops, *batch.arguments, False, threads)
    bounds = bounds.reshape(len(batch), len(ops))
    return bounds, bounds, bounds, np.zeros_like(bounds)


def _quickest(
    ops: Array, batch: Machines, price: Callable[[Machines], tuple[Array, ...]]
) -> tuple[Array, ...]:
    """Price operators, products and attention on the kind of tensor cores that is quickest.

    Times on one core are those of the first kind, whose cores a layer's schedule counts.
    """
    first, other = price(batch), batch.other
    if other is None:
        return first
    (time_s, one_core_s, bound_s, joules), second = first, price(other)
    free = on_tensor_cores(ops)
    better = free & (second[0] < time_s)
    return (
        np.where(better, second[0], time_s),
        one_core_s,
        np.where(free, np.minimum(second[2], bound_s), bound_s),
        np.where(better, second[3], joules),
    )


class CacheInfo(NamedTuple):
    """Counters of the cache of operator costs."""

    hits: int
    misses: int
    entries: int
    bytes: int


_answers: LruCache[bytes, tuple[Array, ...]] = LruCache(
    64 * 2**20, lambda arrays: sum(array.nbytes for array in arrays)
)


def cost_cache_info() -> CacheInfo:
    """Return the hits and misses of the cache of operator costs, and its size.

    Examples
    --------
    >>> cost_cache_info().hits >= 0
    True
    """
    return CacheInfo(_answers.hits, _answers.misses, len(_answers), _answers.size)


def cost_cache_clear() -> None:
    """Drop all operator costs and set the counters to zero.

    Examples
    --------
    >>> cost_cache_clear()
    >>> cost_cache_info().entries
    0
    """
    _answers.clear()


def _priced(ops: Array, batch: Machines, chip_of: Array, threads: int) -> tuple[Array, ...]:
    """Return time on all cores and on one, bound and dynamic energy, cached if possible."""
    parts = (ops, *batch.arguments[:3], np.array(batch.precision), batch.prices)
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.tobytes())
        digest.update(len(part).to_bytes(8, "little"))
    answer = _answers.get(digest.digest())
    if answer is None:
        figures = _core.op_figures(ops, *batch.arguments, batch.prices, threads)
        answer = tuple(column.reshape(len(batch), len(ops)) for column in figures)
        _refuse_bad(ops, batch, chip_of, answer[0])
        _answers.put(digest.digest(), answer)
    return answer


def _refuse_bad(ops: Array, batch: Machines, chip_of: Array, time_s: Array) -> None:
    bad = np.argwhere(np.isnan(time_s))
    if not len(bad):
        return
    row, column = bad[0]
    op, chip = ops[column], int(np.flatnonzero(chip_of == row)[0])
    some = batch.take(slice(row, row + 1))
    (cost,) = _core.op_costs(
        ops[column : column + 1], *some.arguments, False, some.prices, some.static_w, 1
    )
    sizes = ", ".join(f"{name} {int(op[name])}" for name in "bmkn")
    reason = _core.STATUS_SENTENCES[int(cost["status"])]
    raise InvalidInputError(f"chips[{chip}], operator {sizes}: {reason}")


class _Kept(NamedTuple):
    """Shares of HBM bytes that stay on chip, for operators and levels of memory."""

    levels: Array
    """Rows of buffer bytes and HBM bandwidth over that of stacked DRAM (0 without it); rising."""
    shares: Array
    """Distinct rows of `_SHARES`, shape (rows, kinds, levels)."""
    row_of: Array
    """Row of `shares` of each operator."""

    @classmethod
    def of(cls, graphs: Sequence[OpGraph], batch: Machines) -> _Kept:
        """Find what stays on chip in graphs on chips."""
        levels = _distinct_levels(batch)
        tables = [_shares(graph, levels, batch) for graph in graphs]
        both = np.concatenate(tables, axis=2).transpose(2, 0, 1)
        shares, row_of = np.unique(both, axis=0, return_inverse=True)
        return cls(levels, shares, row_of.reshape(-1))

    def most(self, kind: str) -> Array:
        """Return the largest share of each operator over all levels."""
        largest: Array = self.shares[:, _SHARES.index(kind)].max(axis=1)[self.row_of]
        return largest


_SHARES = ("priced", "compulsory", "hbm", "stacked_bytes", "less_hbm_bytes")
"""Kinds of shares. The shares of an operator's priced bytes, and of its compulsory bytes, that are
not charged; of its priced bytes, that are not moved from HBM; its bytes of stacked DRAM; and the
bytes charged to HBM only for the time in stacked DRAM. Without such DRAM the last two are zero."""


def _shares(graph: OpGraph, levels: Array, batch: Machines) -> Array:
    """Return the shares of operators at levels of memory, shape (kinds, levels, operators)."""
    sizes = np.ascontiguousarray(levels[:, 0])
    traffic = layer_traffic(graph, sizes, batch.precision)
    moved = from_hbm = traffic.moved
    stacked_bytes = np.zeros_like(moved)
    if batch.stacked is not None:
        size = np.array([float(batch.stacked.capacity_bytes)])
        low = graph.ops["format"] != 0  # priced in another format: as without
        from_stack = layer_traffic(graph, size, batch.precision).moved
        from_hbm = np.where(low, moved, np.minimum(from_stack, moved))
        stacked_bytes = np.where(low, 0.0, moved)
        moved = np.where(low, moved, np.maximum(from_hbm, moved * levels[:, 1:]))
    charged = traffic._replace(moved=moved)
    kept, spared = charged.kept_shares, charged.spared_shares
    # Bounds by compulsory bytes take each byte at the rate of reads, so where writes are slower no
    # bytes are spared.
    slow_writes = bool((batch.tunings["hbm_write_share"] < 1.0).any())
    hbm = traffic._replace(moved=from_hbm).kept_shares
    return np.stack([kept, kept if slow_writes else spared, hbm, stacked_bytes, moved - from_hbm])


def _levels(batch: Machines) -> Array:
    """Return the bytes available to tiles on each chip, and its HBM's speed (`_Kept.levels`)."""
    ratio = np.zeros(len(batch))
    if batch.stacked is not None:
        ratio = batch.records["hbm_bytes_per_s"] / batch.stacked.bandwidth_bytes_per_s
    levels: Array = np.stack([_tile_bytes(batch.records), ratio], axis=1)
    return levels


def _distinct_levels(batch: Machines) -> Array:
    """Return the distinct levels, rising; without stacked DRAM sizes suffice, ten times as fast."""
    levels = _levels(batch)
    if batch.stacked is not None:
        return np.unique(levels, axis=0)
    sizes = np.unique(levels[:, 0])
    return np.stack([sizes, np.zeros_like(sizes)], axis=1)


def _most_spared(forms: Sequence[Sequence[OpGraph]], batch: Machines) -> Array:
    """Return the largest share of compulsory bytes that any form of each operator spares.

    The operators are those of the first form; the other forms have these operators and others.
    """
    levels = _distinct_levels(batch)
    spared = []
    for parts in zip(*forms, strict=True):
        first = parts[0]
        whole = _core.op_hbm_bytes(first.ops, np.array([np.inf]), batch.precision, False)
        most = dict.fromkeys(first.names, 0.0)
        for part in parts:
            own = _core.op_hbm_bytes(part.ops, np.array([np.inf]), batch.precision, False)
            shares = _shares(part, levels, batch)[_SHARES.index("compulsory")].max(axis=0)
            by_name = dict(zip(part.names, zip(own, shares, strict=True), strict=True))
            for name, size in zip(first.names, whole, strict=True):
                bytes_of_form, share = by_name[name]
                if size > 0.0:
                    least = 1.0 - min(1.0, bytes_of_form / size) * (1.0 - share)
                    most[name] = max(most[name], float(least))
        spared.append(np.array(list(most.values())))
    return np.concatenate(spared)


def _tile_bytes(records: Array) -> Array:
    """Return the bytes available to tiles on each chip."""
    local = records["tensor_cores"] * records["tensor_local_bytes"]
    tiles: Array = np.where(records["buffer_bytes"] > 0, records["buffer_bytes"], local)
    return tiles.astype(np.float64)


def _prices(
    ops: Array, batch: Machines, chip_of: Array, threads: int, rough: bool
) -> tuple[Array, ...]:
    """Return the costs of operators, or their bounds."""
    if rough:
        return _quickest(ops, batch, lambda kind: _bounded(ops, kind, threads))
    return _quickest(ops, batch, lambda kind: _priced(ops, kind, chip_of, threads))


def _priced_by_size(
    shapes: Array, batch: Machines, chip_of: Array, threads: int, rough: bool, kept: _Kept
) -> tuple[Array, ...]:
    """Price operators whose share of bytes depends on the buffer; `kept_share` holds their row."""
    tables = tuple(np.empty((len(batch), len(shapes))) for _ in range(4))
    levels, rows = _levels(batch), shapes["kept_share"].astype(np.intp)
    for c, level in enumerate(kept.levels):
        mine = np.flatnonzero((levels == level).all(axis=1))
        if not len(mine):
            continue
        sized = in_format(shapes, batch.precision).copy()
        sized["kept_share"] = kept.shares[rows, int(rough), c]
        position = np.full(len(batch), -1)
        position[mine] = np.arange(len(mine))
        some = batch.take(mine)
        values = _prices(sized, some, position[chip_of], threads, rough)
        for table, value in zip(tables, values, strict=True):
            table[mine] = value
        if batch.stacked is not None and not rough:
            stacked, less = kept.shares[rows, 3, c], kept.shares[rows, 4, c]
            tables[3][mine] += stacked * batch.stacked_byte_j
            tables[3][mine] -= less * some.energy["hbm_byte_j"][:, None]
    return tables


def _tabled(
    ops: Array,
    which: Array,
    batch: Machines,
    unseen: tuple[str, ...],
    threads: int,
    rough: bool,
    kept: _Kept | None = None,
) -> CostTable:
    """Price some operators, each distinct one once, on each distinct chip."""
    mine = ops[which]
    if kept is not None:
        mine["kept_share"] = kept.row_of[which]
    shapes, column = distinct_operators(mine)
    chips, chip_of = _distinct_chips(batch, unseen)
    if kept is not None:
        values = _priced_by_size(shapes, chips, chip_of, threads, rough, kept)
    else:
        sized = in_format(shapes, batch.precision)
        values = _prices(sized, chips, chip_of, threads, rough)
    column_of = np.full(len(ops), -1, dtype=np.intp)
    column_of[which] = column
    time_s, one_core_s, bound_s, dynamic_j = values
    return CostTable(time_s, one_core_s, bound_s, dynamic_j, chip_of, column_of)


def _cores(records: Array) -> Array:
    columns = (records["tensor_cores"], records["vector_cores"], np.ones(len(records)))
    cores: Array = np.minimum(np.stack(columns, axis=1), 2**30).astype(np.int32)
    return cores


def estimate_costs(
    graphs: OpGraph | LayerGraph | Sequence[OpGraph | LayerGraph],
    chips: Accelerator | str | Sequence[Accelerator | str] | Array,
    fabric: AnyFabric | Cluster | str | None = None,
    dtype: Dtype = "bf16",
    tuning: Tuning | None = None,
    energy: EnergyTable | None = None,
    threads: int | None = None,
    like: Accelerator | None = None,
    bounds_only: bool = False,
) -> Costs:
    """Price every operator of every graph on every chip, in one call; the GIL is released.

    Parameters
    ----------
    graphs
        Operator graphs, or layer graphs; each layer of these is two graphs, forward and backward.
    chips
        Accelerators or names of them, or an array of records such as `ArchitectureSpace.chips`.
    fabric
        Interconnect of the collectives, if a graph has any. A tensor group is neighbours, a
        context group lies `tp` ranks apart; expert groups take devices of a stage in this order.
    dtype
        Number format of the operands, except for operators with a format of their own.
    tuning
        Overrides the chips' own; for an array of records it is the only one.
    energy
        What events cost on all chips; by default the table of each chip's node.
    threads
        At most this many threads, by default all cores; the result does not depend on it.
    like
        For an array of records: the chip whose tuning, launch latency and formats they share.
    bounds_only
        Return lower bounds in place of all times, and no energy: twenty times as fast.

    Returns
    -------
    Costs
        Arrays over (chips, operators) for each graph.

    Raises
    ------
    InvalidInputError
        Where a chip or operator is malformed, or collectives have no interconnect or do not fit it.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.hardware import presets
    >>> from phaze_fast.opgraph import layer_graph
    >>> chips = [presets.chip("tpuv4"), presets.chip("h200")]
    >>> costs = estimate_costs(layer_graph(models.load("llama2-7b")), chips)
    >>> costs.time_s(2).shape == (2, len(costs.graphs[2]))
    True
    """
    workers = thread_count(threads)
    wired = presets.fabric(fabric) if isinstance(fabric, str) else fabric
    listed = [graphs] if isinstance(graphs, OpGraph | LayerGraph) else list(graphs)
    flat = _flat(listed)
    batch = machines(chips, dtype, tuning, energy, like)
    if not len(batch):
        raise InvalidInputError("chips: an empty list is not accepted; expected at least one")
    owned = [zip(_flat([one]), repeat(rank_groups(one)), strict=False) for one in listed]
    network = collectives_s(list(chain.from_iterable(owned)), wired)
    ops = np.frombuffer(b"".join(graph.ops.tobytes() for graph in flat), _core.OPERATOR_DTYPE)
    unfused = (ops["function"] == 0) & (ops["epilogue"] == 0)
    tiered = batch.stacked is not None or any(graph.resident for graph in flat)
    kept = _Kept.of(flat, batch) if tiered else None
    tables = []
    pruned = (ops["kind"] == _WEIGHT_PRODUCT) & (batch.products_done < 1.0)
    for code, skips in (
        divmod(n, 2) for n in np.unique(2 * ops["format"] + pruned).tolist() or [0]
    ):
        low = cast(Dtype, FORMATS[code])
        own = batch if code == 0 else machines(chips, low, tuning, energy, like)
        own = own.sparse if skips else own
        mine = (ops["format"] == code) & (pruned == bool(skips))
        for which, unseen in (
            (unfused & mine, _UNSEEN_OF_CHIP + _UNSEEN_BY_PRODUCTS),
            (~unfused & mine, _UNSEEN_OF_CHIP),
        ):
            positions = np.flatnonzero(which)
            if (code, skips) == (0, 0) or len(positions):
                tables.append(_tabled(ops, positions, own, unseen, workers, bounds_only, kept))
    return Costs(
        graphs=flat,
        chips=len(batch),
        cores=_cores(batch.records),
        evaluations=sum(table.time_s.size for table in tables),
        _tables=tuple(tables),
        _static_w=batch.static_w,
        _limit_w=batch.limit_w,
        _ends=(0, *accumulate(len(graph) for graph in flat)),
        _network_s=network,
    )


# ---- rooflines of whole layers ----


def _before(graphs: list[OpGraph]) -> tuple[Array, Array]:
    """Return the predecessors of each operator, numbered through all graphs, in CSR form."""
    waits: list[list[int]] = []
    for graph in graphs:
        first = len(waits)
        waits += [[] for _ in range(len(graph))]
        for earlier, later in graph.edges():
            waits[first + later].append(first + earlier)
    pointers = np.array([0, *accumulate(len(w) for w in waits)], dtype=np.int64)
    return pointers, np.array([b for w in waits for b in w], dtype=np.int32)


class _IdealWork(NamedTuple):
    """The distinct operators of layers with the least traffic that any of the chips needs."""

    parts: list[OpGraph]
    """Forward and backward pass of each layer."""
    batch: Machines
    formats: list[tuple[Array, Machines]]
    """The operators of each number format, and the chips that bound them from below."""
    which: Array
    """Position of each operator of the parts in all of these, one after another."""
    loads_again: bool
    """Whether products load bytes again that do not fit on the chip: no operator keeps any."""

    @classmethod
    def of(
        cls,
        graphs: Sequence[tuple[LayerGraph, Sequence[LayerGraph] | None]],
        records: Array,
        like: Accelerator,
    ) -> _IdealWork:
        """Take the operators of graphs, each with the least HBM bytes of any of its fused forms.

        Without forms, each operator keeps its largest share on chip over all sizes of the buffer.
        """
        every: list[OpGraph] = []
        batch = machines(records, like=like).sparse  # at least as fast in every operator
        listed, keeps = [], False
        for graph, forms in graphs:
            parts = _flat([graph])
            ops = np.concatenate([part.ops for part in parts])
            if batch.stacked is not None or any(part.resident for part in parts):
                keeps = True
                if forms is None:
                    ops["kept_share"] = _Kept.of(parts, batch).most("hbm")
                else:
                    ops["kept_share"] = _most_spared([parts, *(_flat([x]) for x in forms)], batch)
            every += parts
            listed.append(ops)
        ops = np.concatenate(listed)
        formats: list[tuple[Array, Machines]] = []
        which, known = np.zeros(len(ops), dtype=np.int32), 0
        for code in np.unique(ops["format"]).tolist() or [0]:
            own = machines(records, cast(Dtype, FORMATS[code]), like=like).sparse if code else batch
            mine = np.flatnonzero(ops["format"] == code)
            shapes, at = distinct_operators(ops[mine])
            which[mine] = known + at
            known += len(shapes)
            formats.append((in_format(shapes, own.precision), own))
        return cls(every, batch, formats, which, not keeps)


class LayersToBound(NamedTuple):
    """Layers under a strategy, for `roofline_works_s`; fields as of `roofline_work_s`."""

    graph: LayerGraph
    hidden: Mapping[str, float] = MappingProxyType({})
    forms: Sequence[LayerGraph] = ()


def roofline_work_s(
    graph: LayerGraph,
    records: Array,
    cluster: Cluster,
    like: Accelerator,
    threads: int | None = None,
    hidden: Mapping[str, float] | None = None,
    forms: Sequence[LayerGraph] = (),
) -> Array:
    """Bound the seconds of all layers, forward and backward, from below on each of many chips.

    The bound of a layer is its longest path of operators, each at its roofline (peak compute and
    compulsory traffic), with collectives at their own time. It holds for any number of cores. The
    GIL is released; memory grows with the chips only by the result.

    Parameters
    ----------
    graph
        Layers under a strategy, each as often as it occurs.
    records
        Chips, such as `ArchitectureSpace.chips`.
    cluster
        Devices and interconnect of the collectives.
    like
        The chip whose tuning, launch latency and formats the chips share.
    threads
        At most this many, by default all cores; the result does not depend on it.
    hidden
        Share of the seconds of collectives that overlap other work, by group of devices.
    forms
        The same layers under other forms of fusion; the bound then holds for all forms.

    Examples
    --------
    >>> from phaze_fast import ArchitectureSpace, layer_graph, models
    >>> space = ArchitectureSpace.tpuv4_area()
    >>> pod = Cluster(devices=8, fabric="tpuv4-pod")
    >>> graph = layer_graph(models.load("bertlarge"))
    >>> roofline_work_s(graph, space.chips, pod, space.spec.base).shape == (len(space),)
    True
    """
    works = [LayersToBound(graph, hidden or {}, forms)]
    bounds_s: Array = roofline_works_s(works, records, cluster, like, threads)[0]
    return bounds_s


def roofline_works_s(
    works: Sequence[LayersToBound],
    records: Array,
    cluster: Cluster,
    like: Accelerator,
    threads: int | None = None,
    tight: bool = False,
) -> Array:
    """Return `roofline_work_s` of several layer graphs, shape (graphs, chips).

    Operators of equal shape are bounded once. Where bounds are `tight`, products count the traffic
    of the buffer and of their blocks, and layers also the work of all operators, which share the
    cores; on chips with tensor cores of one shape. They take many times as long.

    Examples
    --------
    >>> from phaze_fast import ArchitectureSpace, layer_graph, models
    >>> space = ArchitectureSpace.tpuv4_area()
    >>> pod = Cluster(devices=8, fabric="tpuv4-pod")
    >>> works = [LayersToBound(layer_graph(models.load(name))) for name in ("bertlarge", "opt")]
    >>> roofline_works_s(works, space.chips, pod, space.spec.base).shape == (2, len(space))
    True
    """
    listed = [(own.graph, own.forms) for own in works]
    flat, batch, formats, which, loads_again = _IdealWork.of(listed, records, like)
    network = []
    for own in works:
        parts, groups = _flat([own.graph]), rank_groups(own.graph)
        shares = np.array([1.0 - own.hidden.get(name, 0.0) for name in GROUPS])
        seconds = collectives_s([(part, groups) for part in parts], cluster)
        network.append(seconds * shares[_column(parts, "group")])
    layers = [layer for own in works for layer in own.graph.layers]
    passes = [2 * len(own.graph.layers) for own in works]
    paths = (
        np.array([0, *accumulate(len(part) for part in flat)], dtype=np.int64),
        which,
        np.concatenate(network),
        *_before(flat),
        np.repeat(np.array([float(layer.count) for layer in layers]), 2),
        np.repeat(np.arange(len(works), dtype=np.int32), passes),
    )
    ideal = [(ops, own.ideal) for ops, own in formats]
    chips = [(ops, own.tunings, own.precision) for ops, own in ideal]
    shared = None
    if tight and batch.other is None:
        shared = (np.concatenate([part.most_at_once for part in flat]), loads_again)
    bounds_s: Array = _core.path_bounds(
        chips, ideal[0][1].records, batch.tuning_of, paths, shared, thread_count(threads)
    )
    return bounds_s.reshape(len(works), len(batch))


def roofline_work_j(
    graph: LayerGraph, records: Array, like: Accelerator, threads: int | None = None
) -> tuple[Array, Array]:
    """Bound the dynamic joules of all layers, forward and backward, from below on many chips.

    Counted are multiplications, lane operations and the traffic that every mapping has, at the
    prices of each chip. The GIL is released.

    Parameters
    ----------
    graph, records, threads
        As for `roofline_work_s`.
    like
        The chip whose tuning, launch latency and formats the chips share, as its software runs it.

    Returns
    -------
    tuple
        Joules, zero where operators have number formats of their own; and the static power of each
        chip in watts.

    Examples
    --------
    >>> from phaze_fast import ArchitectureSpace, layer_graph, models
    >>> space = ArchitectureSpace.tpuv4_area()
    >>> graph = layer_graph(models.load("bertlarge"))
    >>> joules, static_w = roofline_work_j(graph, space.chips, space.spec.base)
    >>> bool((joules > 0).all()), static_w.shape == (len(space),)
    (True, True)
    """
    parts, batch, formats, which, _ = _IdealWork.of([(graph, None)], records, like)
    (ops, own), *others = formats
    if others or own.precision != batch.precision:
        return np.zeros(len(batch)), batch.static_w
    counts = np.repeat([float(layer.count) for layer in graph.layers], 2)
    often = np.repeat(counts, [len(part) for part in parts])
    count = np.bincount(which, weights=often, minlength=len(ops))
    workers = thread_count(threads)
    other = batch.other
    if other is None:
        joules: Array = _core.energy_bounds(ops, *batch.arguments, batch.prices, count, workers)
        return joules, batch.static_w
    least = np.zeros(len(batch))
    for k in range(len(ops)):  # each operator on the kind of tensor cores that takes least energy
        one = slice(k, k + 1)
        least += np.minimum(
            *(
                _core.energy_bounds(ops[one], *kind.arguments, kind.prices, count[one], workers)
                for kind in (batch, other)
            )
        )
    return least, batch.static_w
