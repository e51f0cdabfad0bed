"""Times of collectives over groups of ranks on an interconnect, and of the collectives of a graph.

The formulas are in docs/collectives.md and in ``cpp/include/phaze/collective.hpp``. Ranks count
tensor-parallel devices first, then those of a context group, then replicas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError, check_type, nearest
from phaze_fast.hardware import (
    AnyFabric,
    Cluster,
    TieredFabric,
    cluster_record,
    fabric_record,
    presets,
)
from phaze_fast.models import MixtureOfExperts
from phaze_fast.opgraph import GROUPS, LayerGraph, OpGraph, Strategy
from phaze_fast.records import FrozenDict
from phaze_fast.tables import Array, Brief
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes, format_time

_BAD_STRIDE = 4  # phaze::Status

_OPS = {name: code for code, name in enumerate(_core.COLLECTIVE_OPS)}


@dataclass(frozen=True)
class CollectiveCost:
    """Time of one collective by its fastest algorithm, and by all that can run."""

    op: str
    payload_bytes: float
    ranks: int
    stride: int
    time_s: float
    """Seconds of the fastest algorithm."""
    algorithm: str
    """Name of the fastest algorithm; ``none`` where there is nothing to send."""
    bound_s: float
    """Lower bound over all algorithms, seconds: bytes a rank must send over its total bandwidth."""
    alternatives: dict[str, float]
    """Seconds of every algorithm that can run here, fastest first."""
    outer_ranks: int = 1
    """Number of runs of `ranks` ranks that make up the group."""
    outer_stride: int = 0
    """Ranks between the first ranks of neighbouring runs."""

    def __str__(self) -> str:
        more = f", {self.outer_ranks} such runs at stride {self.outer_stride}"
        runs = more if self.outer_ranks > 1 else ""
        return (
            f"{self.op} of {format_bytes(self.payload_bytes)} over {self.ranks} ranks "
            f"(stride {self.stride}{runs}): {format_time(self.time_s)} by {self.algorithm}"
        )


@dataclass(frozen=True, eq=False)
class CollectiveTimes(Brief):
    """Times of a batch of collectives, one row per query; arrays are read-only."""

    time_s: Array
    """Seconds; NaN where `status` is not 0."""
    algorithm: Array
    """Codes into `algorithm_names`."""
    status: Array
    """0 where the row is good, else a code into `reasons`."""

    algorithm_names = _core.ALGORITHMS
    reasons = _core.STATUS_SENTENCES

    def __len__(self) -> int:
        return len(self.time_s)


def _record(fabric: AnyFabric | Cluster | str) -> Array:
    if isinstance(fabric, str):
        fabric = presets.fabric(fabric)
    if isinstance(fabric, Cluster):
        return cluster_record(fabric.fabric, fabric.devices)
    check_type("fabric", fabric, get_args(AnyFabric), "a fabric, its name, or a cluster")
    return fabric_record(fabric)


def _op_code(op: str) -> int:
    if not isinstance(op, str) or op not in _OPS:
        raise InvalidInputError(f"op: {op!r} is not accepted; {nearest(str(op), _OPS)}")
    return _OPS[op]


def collective(
    fabric: AnyFabric | Cluster | str,
    op: str,
    payload_bytes: float,
    ranks: int,
    stride: int = 1,
    outer_ranks: int = 1,
    outer_stride: int = 0,
) -> CollectiveCost:
    """Time one collective over `ranks` devices that lie `stride` ranks apart, or several such runs.

    Parameters
    ----------
    fabric
        The interconnect between the devices.
    op
        ``all-reduce``, ``reduce-scatter``, ``all-gather``, ``all-to-all``, ``broadcast`` or
        ``point-to-point`` (over 2 ranks, `stride` apart).
    payload_bytes
        The vector each rank holds, in bytes: all-reduce; the input of reduce-scatter; the output of
        all-gather; the send buffer of all-to-all; the message of the others.
    ranks
        Devices in the group.
    stride
        Distance between neighbours in the group, in ranks. All groups of this shape are assumed to
        run at the same time.
    outer_ranks
        Runs of `ranks` devices in the group; with 1 the group is one run.
    outer_stride
        Distance between the first devices of neighbouring runs, in ranks. The two strides may be
        given in either order; the runs must not overlap.

    Returns
    -------
    CollectiveCost
        The cost, with the times of every algorithm that could have run.

    Raises
    ------
    InvalidInputError
        Where the group does not fit the interconnect, or an argument is out of range.

    Examples
    --------
    >>> cost = collective("dgx-a100", "all-reduce", 2**30, ranks=16)
    >>> cost.algorithm
    'rail-ring'

    Gradients of two devices that share a sequence, over four replicas of three stages:

    >>> dgx = presets.fabric("dgx-a100-peak")
    >>> cost = collective(dgx, "all-reduce", 2**30, 2, stride=2, outer_ranks=4, outer_stride=12)
    >>> print(cost)  # doctest: +NORMALIZE_WHITESPACE
    all-reduce of 1 GiB over 2 ranks (stride 2, 4 such runs at stride 12):
    35.83 ms by hierarchical
    """
    record, code = _record(fabric), _op_code(op)
    times = collective_batch(
        fabric,
        op,
        [payload_bytes],
        [ranks],
        [stride],
        outer_ranks=[outer_ranks],
        outer_stride=[outer_stride],
    )
    status = int(times.status[0])
    if status != 0:
        group = f"ranks {ranks!r}, stride {stride!r}"
        reason = _core.STATUS_SENTENCES[status]
        if outer_ranks != 1:
            group += f", outer_ranks {outer_ranks!r}, outer_stride {outer_stride!r}"
            if status == _BAD_STRIDE and stride > 0 < outer_stride:
                reason = "the runs overlap; expected the larger stride to reach beyond a run"
        raise InvalidInputError(f"payload_bytes {payload_bytes!r}, {group}: {reason}")
    query = (record, code, payload_bytes, ranks, stride)
    times_s = {}
    for algorithm, name in enumerate(_core.ALGORITHMS):
        time_s, ran, bad = _core.collective_with(*query, algorithm, outer_ranks, outer_stride)
        if ran == algorithm and algorithm != 0 and not bad:
            times_s[name] = time_s
    return CollectiveCost(
        op=op,
        payload_bytes=float(payload_bytes),
        ranks=int(ranks),
        stride=int(stride),
        time_s=float(times.time_s[0]),
        algorithm=_core.ALGORITHMS[int(times.algorithm[0])],
        bound_s=_core.collective_bound(*query, outer_ranks, outer_stride),
        alternatives=FrozenDict(sorted(times_s.items(), key=lambda item: item[1])),
        outer_ranks=int(outer_ranks),
        outer_stride=int(outer_stride),
    )


def collective_batch(
    fabrics: AnyFabric | Cluster | str | Sequence[AnyFabric | Cluster],
    op: str | Sequence[str] | Array,
    payload_bytes: Any,
    ranks: Any,
    stride: Any = 1,
    fabric: Any = 0,
    threads: int | None = None,
    outer_ranks: Any = 1,
    outer_stride: Any = 0,
) -> CollectiveTimes:
    """Time many collectives in one call; the GIL is released while it runs.

    Parameters
    ----------
    fabrics
        One interconnect, or several to choose from by `fabric`.
    op
        One operation, a sequence of names, or an array of uint8 codes into
        ``CollectiveTimes`` order (``_core.COLLECTIVE_OPS``).
    payload_bytes, ranks, stride, fabric
        Numbers or one-dimensional arrays, broadcast against each other: bytes (float), ranks,
        stride (integers), and the position of the interconnect in `fabrics`.
    threads
        At most this many threads, by default all cores; the result does not depend on it.
    outer_ranks, outer_stride
        Integers, broadcast as the others: runs of `ranks` devices in a group, and the ranks between
        the first devices of neighbouring runs. See `collective`.

    Returns
    -------
    CollectiveTimes
        One row per query. A bad row carries its reason as a status; nothing is raised for it.

    Raises
    ------
    InvalidInputError
        Where an argument as a whole is malformed: dtype, shape, unknown operation.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> flat = presets.fabric("phaze-flat")
    >>> collective_batch(flat, "all-reduce", [0, 2**32], ranks=[8, 2]).time_s.tolist()
    [0.0, 1.0]
    """
    several = isinstance(fabrics, Sequence) and not isinstance(fabrics, str)
    listed: list[Any] = list(fabrics) if several else [fabrics]
    if not listed:
        raise InvalidInputError("fabrics: an empty list is not accepted; expected at least one")
    records = np.concatenate([_record(f) for f in listed]) if several else _record(listed[0])
    if isinstance(op, str):
        codes: Array = np.array(_op_code(op), dtype=np.uint8)
    elif isinstance(op, np.ndarray) and op.dtype.kind in "ui":
        codes = _column("op", op, np.uint8)
    else:
        codes = np.array([_op_code(name) for name in op], dtype=np.uint8)
    columns = [
        codes,
        _column("payload_bytes", payload_bytes, np.float64),
        _column("ranks", ranks, np.int64),
        _column("stride", stride, np.int64),
        _column("fabric", fabric, np.int32),
        _column("outer_ranks", outer_ranks, np.int64),
        _column("outer_stride", outer_stride, np.int64),
    ]
    code, payload, run, apart, which, runs, runs_apart = _rows(columns)
    return CollectiveTimes(
        *_core.collective_batch(
            records, which, code, payload, run, apart, thread_count(threads), runs, runs_apart
        )
    )


def message_batch(
    fabric: AnyFabric | Cluster, payload_bytes: Any, source: Any, target: Any
) -> CollectiveTimes:
    """Time many messages, each from one rank to another; the GIL is released while it runs.

    All pairs at the same distance are assumed to send at the same time, as neighbouring stages of
    all replicas do. Unlike a point-to-point over a stride, the nodes of both ranks are known.

    Parameters
    ----------
    fabric
        The interconnect between the devices.
    payload_bytes
        Bytes of each message: a number or a one-dimensional array.
    source, target
        Ranks it goes from and to: integers, broadcast against each other and the bytes.

    Returns
    -------
    CollectiveTimes
        One row per message; a message from a rank to itself takes no time. A bad row carries its
        reason as a status; nothing is raised for it.

    Raises
    ------
    InvalidInputError
        Where an argument as a whole is malformed: dtype or shape.

    Examples
    --------
    Ranks 6 and 7 share a node of eight, ranks 7 and 8 do not:

    >>> from phaze_fast.hardware import presets
    >>> dgx = presets.fabric("dgx-a100-peak")
    >>> message_batch(dgx, 3e9, source=[6, 7], target=[7, 8]).time_s.round(6).tolist()
    [0.010003, 0.120005]
    """
    columns = [
        _column("payload_bytes", payload_bytes, np.float64),
        _column("source", source, np.int64),
        _column("target", target, np.int64),
    ]
    return CollectiveTimes(*_core.message_batch(_record(fabric), *_rows(columns)))


def _rows(columns: Sequence[Array]) -> list[Array]:
    """Return the columns with one length, scalars repeated."""
    lengths = [column.size for column in columns if column.ndim]
    length = 0 if 0 in lengths else max(lengths, default=1)
    return [_stretched(column, length) for column in columns]


def _column(name: str, values: Any, dtype: type[np.generic]) -> Array:
    """Return an array of `dtype` with exactly these numbers, of zero or one dimension."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise InvalidInputError(f"{name}: rows of different lengths are not accepted") from None
    wanted = np.dtype(dtype)
    accepted = "iu" if wanted.kind in "iu" else "iuf"
    if array.dtype.kind not in accepted:
        kind = "integers" if wanted.kind in "iu" else "numbers"
        raise InvalidTypeError(f"{name}: dtype {array.dtype} is not accepted; expected {kind}")
    if array.ndim > 1:
        raise InvalidInputError(
            f"{name}: {array.ndim} dimensions are not accepted; expected at most 1"
        )
    if array.dtype == wanted:
        return array
    converted = array.astype(wanted)
    if wanted.kind in "iu" and not np.array_equal(converted, array):
        raise InvalidInputError(f"{name}: a value is out of range of {wanted}")
    return converted


def _stretched(column: Array, length: int) -> Array:
    if column.ndim == 0 or column.size == 1 != length:
        return np.full(length, column if column.ndim == 0 else column[0])
    return np.ascontiguousarray(column)


# ---- collectives of a graph ----


class RankGroups(NamedTuple):
    """How the groups of ranks of a strategy are placed."""

    ranks: tuple[int, ...]
    """Ranks of each group of `GROUPS`."""
    stride: tuple[int, ...]
    """Ranks between neighbours of each group."""
    visits: tuple[int, ...]
    """How many ranks of each group a row of tokens visits, where a row is sent once to each node; 0
    where it is sent as often as its payload says."""
    limited: tuple[int, int] = (1, 1)
    """Groups of experts, and from how many of them a row's experts are (node-limited routing)."""

    @property
    def devices(self) -> int:
        """Devices from the first rank of the groups to the last."""
        rows = zip(GROUPS, self.ranks, self.stride, strict=True)
        reach = {name: (n - 1) * s for name, n, s in rows}
        dense = reach["tensor"] + reach["context"]
        return 1 + max(dense, reach["expert-tensor"] + reach["expert"])

    @property
    def widths(self) -> str:
        """Widths of parallelism as text, for messages."""
        named = zip(GROUPS, self.ranks, strict=True)
        shown = {"tensor": "tp", "context": "cp", "expert": "ep"}
        return ", ".join(f"{shown[name]} {n}" for name, n in named if name in shown)


def rank_groups(graph: OpGraph | LayerGraph) -> RankGroups | None:
    """Lay out the groups of a graph's strategy; None for an operator graph, which has none.

    Neighbouring ranks differ in their tensor index, then in their context index, then in their
    replica. Counted in this order, every `etp` devices share an expert, and an expert group has
    every `etp`-th device.
    """
    if isinstance(graph, OpGraph):
        return None
    s = graph.strategy
    widths = (s.tp, s.cp, s.cp_kind, s.ep, s.etp)
    return _laid_out(getattr(graph.model, "moe", None), *widths)


@lru_cache(maxsize=4096)
def _laid_out(
    moe: MixtureOfExperts | None, tp: int, cp: int, cp_kind: str, ep: int, etp: int | None
) -> RankGroups:
    """Lay out the groups of a strategy with these widths."""
    visits = moe.top_k if moe is not None and moe.sent_once else 0
    strategy = Strategy(tp=tp, cp=cp, cp_kind=cp_kind, ep=ep, etp=etp)
    laid_out = {"none": (1, 1), **strategy.groups}
    limited = (1, 1)
    if moe is not None and moe.groups is not None and moe.top_groups is not None:
        limited = (moe.groups, moe.top_groups)
    ranks, stride = zip(*(laid_out[name] for name in GROUPS), strict=True)
    visited = tuple(visits * (name == "expert") for name in GROUPS)
    return RankGroups(ranks, stride, visited, limited)


def _refuse_too_few_devices(groups: RankGroups, fabric: AnyFabric | Cluster) -> None:
    check_type("fabric", fabric, (Cluster, *get_args(AnyFabric)), "a fabric or a cluster")
    devices = fabric.devices if isinstance(fabric, Cluster) else fabric.capacity
    if devices is not None and groups.devices > devices:
        raise InvalidInputError(
            f"{groups.widths}: the groups take {groups.devices} devices, and the fabric has "
            f"{devices}"
        )


def _sent_share(groups: RankGroups, group: int, fabric: AnyFabric | Cluster) -> float:
    """Return the share of an expert exchange that is sent if each row goes once to each node.

    A row is sent to nodes, or to devices if the whole group lies in one node.
    """
    k = groups.visits[group]
    wired = fabric.fabric if isinstance(fabric, Cluster) else fabric
    if not k:
        return 1.0
    units = groups.ranks[group]
    size = wired.tiers[0].size if isinstance(wired, TieredFabric) else None
    if size is not None:
        nodes = len(np.unique(np.arange(units) * groups.stride[group] // size))
        units = nodes if nodes > 1 else units
    return _units_met(units, k, *groups.limited) / k


@lru_cache(maxsize=4096)
def _units_met(units: int, visits: int, groups: int, chosen: int) -> float:
    """Return the average number of units (nodes or devices) with experts of a row, `visits` in all.

    Units and groups both divide the experts into equal runs. A row chooses `chosen` of the groups,
    all sets being equally likely, and then each expert uniformly from these groups. Without groups,
    k experts are on n(1 - (1 - 1/n)^k) of n units.
    """
    if chosen >= groups:
        return float(units * (1.0 - (1.0 - 1.0 / units) ** visits))
    met, wide = 0.0, Fraction(groups, units)
    for unit in range(units):
        begin, end = unit * wide, (unit + 1) * wide
        touched = range(math.floor(begin), math.ceil(end))
        parts = [  # of each group in this unit
            min(Fraction(g + 1), end) - max(Fraction(g), begin) for g in touched
        ]
        cut = [part for part in parts if part < 1]  # groups that lie on several units, two at most
        for own in itertools.chain.from_iterable(
            itertools.combinations(cut, count) for count in range(len(cut) + 1)
        ):
            for whole in range(min(chosen - len(own), len(parts) - len(cut)) + 1):
                ways = math.comb(len(parts) - len(cut), whole)
                ways *= math.comb(groups - len(parts), chosen - len(own) - whole)
                share = float(sum(own) + whole) / chosen
                met += ways * (1.0 - (1.0 - share) ** visits)
    return met / math.comb(groups, chosen)


@lru_cache(maxsize=4096)
def _group_columns(groups: RankGroups, fabric: AnyFabric | Cluster) -> tuple[Array, Array, Array]:
    """Return the share of a payload that is sent, ranks and stride, by group of `GROUPS`."""
    _refuse_too_few_devices(groups, fabric)
    share = np.array([_sent_share(groups, g, fabric) for g in range(len(GROUPS))])
    return share, np.array(groups.ranks), np.array(groups.stride)


def collectives_s(
    graphs: Sequence[tuple[OpGraph, RankGroups | None]], fabric: AnyFabric | Cluster | None
) -> Array:
    """Return the seconds of all operators of graphs, zero where they are no collectives.

    Raises
    ------
    InvalidInputError
        Where there are collectives and no interconnect, no groups, or too few devices.
    """
    listed = [graph.ops for graph, _ in graphs]
    collective, group, payload = (
        np.concatenate([ops[name] for ops in listed] or [np.zeros(0)])
        for name in ("collective", "group", "payload_bytes")
    )
    at = np.flatnonzero(collective >= 0)
    seconds = np.zeros(len(collective))
    number = np.repeat(np.arange(len(graphs)), [len(ops) for ops in listed])[at]
    rows: dict[RankGroups, int] = {}
    row_of = np.zeros(len(graphs), dtype=np.intp)
    for n in number[np.flatnonzero(np.diff(number, prepend=-1))].tolist():  # number rises
        graph, groups = graphs[n]
        if groups is None:
            raise InvalidInputError(
                f"graphs: {graph.name} has collectives, and alone it does not say over how many "
                "ranks; expected the LayerGraph it belongs to"
            )
        if fabric is None:
            raise InvalidInputError(
                f"fabric: {graph.name} has collectives; expected a fabric or a cluster to price "
                "them on"
            )
        row_of[n] = rows.setdefault(groups, len(rows))
    if fabric is None or not len(at):
        return seconds
    tables = zip(*(_group_columns(groups, fabric) for groups in rows), strict=True)
    share, ranks, stride = (np.stack(table)[row_of[number], group[at]] for table in tables)
    sent = (payload[at] * share, ranks, stride)
    priced = collective_batch(fabric, collective[at].astype(np.uint8), *sent)
    if priced.status.any():
        bad = int(np.flatnonzero(priced.status)[0])
        reason = _core.STATUS_SENTENCES[int(priced.status[bad])]
        raise InvalidInputError(f"{graphs[int(number[bad])][0].name}: {reason}")
    seconds[at] = priced.time_s
    return seconds
