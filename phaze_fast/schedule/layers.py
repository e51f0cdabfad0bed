"""Schedules of layers with proof or gap: list schedules, branch and bound, then HiGHS.

`schedule_layers` schedules operator graphs on every chip of a batch, `schedule_instances` single
layers as they are read from files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.cost import Costs
from phaze_fast.errors import InvalidInputError, nearest, not_accepted
from phaze_fast.opgraph import OpGraph
from phaze_fast.schedule.cache import ScheduleCache, StoredLayer, layer_key
from phaze_fast.schedule.instance import LayerInstance, LayerSchedule
from phaze_fast.tables import Array, Brief
from phaze_fast.threads import thread_count

RULES = ("exclusive", "overlap")
"""Whether an operator on all cores blocks all other operators, or only those of its types."""

_TYPE_OF_UNIT = np.array([1, 2, 3, 4], dtype=np.uint8)  # TC, VC, TC+VC, NET
_MOST_NODES = 2**62

Packed = tuple[Array, Array, Array, Array, Array, Array, Array, Array, Array]
"""Layers as the kernel takes them."""


def _is_overlap(rule: str) -> bool:
    if rule not in RULES:
        raise InvalidInputError(f"rule: {rule!r} is not accepted; {nearest(str(rule), RULES)}")
    return rule == "overlap"


def _raise_for(name: str, status: Array) -> None:
    """Raise the first error among the statuses of layers."""
    if status.any():
        sentence = _core.STATUS_SENTENCES[int(status[np.flatnonzero(status)[0]])]
        raise InvalidInputError(f"{name}: {sentence}")


# ---- graphs on chips ----


@dataclass(frozen=True, eq=False)
class LayerTimes(Brief):
    """Makespans of graphs on chips; arrays have shape (graphs, chips)."""

    graphs: tuple[OpGraph, ...]
    makespan_s: Array
    bound_s: Array
    proved_by: Array
    """Codes into ``_core.PROVED_BY``; 0 where not proven."""
    nodes: Array
    _solved: Mapping[int, tuple[_Problem, _Solved, int]]
    """Of each graph: the problem it was solved in with others, and its first row there."""
    _costs: Costs
    _overlap: bool

    @property
    def proven(self) -> Array:
        """Whether each makespan is proven optimal."""
        proven: Array = self.proved_by > 0
        return proven

    @property
    def gap(self) -> Array:
        """Most that each makespan exceeds the optimum by, as a fraction of its bound."""
        with np.errstate(divide="ignore", invalid="ignore"):
            gap: Array = np.where(self.bound_s > 0, self.makespan_s / self.bound_s - 1.0, 0.0)
        return gap

    @property
    def energy_j(self) -> Array:
        """Joules of each graph on each chip: dynamic, and static over the makespan."""
        dynamic = [self._costs.dynamic_j(g).sum(axis=1) for g in range(len(self.graphs))]
        joules: Array = np.array(dynamic) + self._costs.static_w * self.makespan_s
        return joules

    def schedule(self, graph: int, chip: int) -> LayerSchedule:
        """Return one schedule in full."""
        layer = self.graphs[graph]
        problem, solved, first = self._solved[graph]
        one, every = problem.one[first + chip], problem.every[first + chip]
        cores = self._costs.cores[chip]
        instance = LayerInstance(
            name=layer.name,
            names=layer.names,
            types=tuple(_TYPE_OF_UNIT[layer.ops["unit"]].tolist()),
            modes=tuple(((1, float(a)), (0, float(b))) for a, b in zip(one, every, strict=True)),
            edges=tuple(layer.edges()),
            cores=(int(cores[0]), int(cores[1]), int(cores[2])),
            positions=tuple(range(len(layer))),
        )
        proved = int(self.proved_by[graph, chip])
        return LayerSchedule(
            instance=instance,
            status="optimal" if proved else "feasible",
            makespan=float(self.makespan_s[graph, chip]),
            bound=float(self.bound_s[graph, chip]),
            proved_by=_core.PROVED_BY[proved],
            starts=tuple(solved.starts[first + chip].tolist()),
            mode=tuple(solved.modes[first + chip].tolist()),
            nodes=int(self.nodes[graph, chip]),
            solve_s=0.0,
            overlap=self._overlap,
            energy_j=float(
                self._costs.dynamic_j(graph, chip).sum()
                + self._costs.static_w[chip] * self.makespan_s[graph, chip]
            ),
        )


class _Problem(NamedTuple):
    """A graph, its latencies on one core and on all, and the cores of each chip."""

    layer: OpGraph
    one: Array
    every: Array
    cores: Array


class _Limits(NamedTuple):
    """Options of the kernel, in the order of its arguments."""

    overlap: bool
    max_nodes: int
    time_limit_s: float
    threads: int


class _Solved(NamedTuple):
    """Results by chip; starts and modes have shape (chips, operators)."""

    makespan: Array
    bound: Array
    proved: Array
    nodes: Array
    starts: Array
    modes: Array


def graph_arrays(layer: OpGraph) -> tuple[Array, Array, Array]:
    """Types of operators, and where edges begin and end, as the kernel takes them."""
    return _TYPE_OF_UNIT[layer.ops["unit"]], *layer.edge_ends


def _batch(problem: _Problem) -> Packed:
    """Pack one graph on many chips as a batch of layers."""
    chips, ops = problem.one.shape
    types, froms, intos = graph_arrays(problem.layer)
    steps = np.arange(chips + 1, dtype=np.int64)
    return (
        steps * ops,
        np.tile(types, chips),
        np.arange(chips * ops + 1, dtype=np.int64) * 2,
        np.tile(np.array([1, 0], dtype=np.int32), chips * ops),
        np.stack([problem.one, problem.every], axis=-1).reshape(-1),
        steps * len(intos),
        np.tile(froms, chips),
        np.tile(intos, chips),
        np.ascontiguousarray(problem.cores.reshape(-1)),
    )


def _scheduled(
    problem: _Problem,
    limits: _Limits,
    cache: ScheduleCache | None = None,
    enough_s: Array | None = None,
) -> _Solved:
    """Schedule one graph on every chip: sequentially, from the cache, or by branch and bound."""
    layer, one, every, cores = problem
    chips, ops = every.shape
    if layer.in_order or not ops:  # operators run one after another, each on all cores
        ends = np.cumsum(every, axis=1)
        makespan = ends[:, -1] if ops else np.zeros(chips)
        proved = np.full(chips, _core.PROVED_BY.index("list-schedule"), dtype=np.int32)
        modes = np.ones(every.shape, dtype=np.int32)  # mode 1: all cores
        nodes = np.zeros(chips, dtype=np.int64)
        return _Solved(makespan, makespan, proved, nodes, ends - every, modes)
    if cache is not None and enough_s is None:
        return _looked_up(problem, limits, cache)
    enough = None if enough_s is None else np.ascontiguousarray(enough_s)
    makespan, bound, proved, nodes, status, start, mode = _core.schedule_on_chips(
        graph_arrays(layer),
        one.reshape(-1),
        every.reshape(-1),
        cores.reshape(-1),
        *limits,
        enough,
    )
    _raise_for(layer.name, status)
    shape = (chips, ops)
    return _Solved(makespan, bound, proved, nodes, start.reshape(shape), mode.reshape(shape))


def _looked_up(
    problem: _Problem,
    limits: _Limits,
    cache: ScheduleCache,
) -> _Solved:
    """Look up schedules in a cache, in canonical form; solve and add the missing ones."""
    layer, one, every, cores = problem
    chips, ops = one.shape
    packed = _batch(problem)
    keys = [layer_key(form) for form in _core.canonical_layers(packed, limits[0])]
    known = {k: v for k, v in cache.get(keys).items() if len(v.starts) == ops}
    bound, proved = np.zeros(chips), np.zeros(chips, dtype=np.int32)
    nodes = np.zeros(chips, dtype=np.int64)
    starts, modes = np.zeros((chips, ops)), np.zeros((chips, ops), dtype=np.int32)
    missing = {key: c for c, key in enumerate(keys) if key not in known}
    if missing:
        at = np.array(sorted(missing.values()))
        unknown = _batch(_Problem(layer, one[at], every[at], cores[at]))
        _, bound[at], proved[at], nodes[at], status, start, mode = _core.schedule_layers(
            unknown, *limits, canonical=True
        )
        _raise_for(layer.name, status)
        starts[at], modes[at] = start.reshape(-1, ops), mode.reshape(-1, ops)
    for c, key in enumerate(keys):
        stored = known.get(key)
        if stored is not None:
            proved[c], starts[c], modes[c] = stored
        elif missing[key] != c:
            same = missing[key]
            proved[c], starts[c], modes[c] = proved[same], starts[same], modes[same]
            bound[c], nodes[c] = bound[same], nodes[same]
    cache.put(
        {
            key: StoredLayer(int(proved[c]), starts[c].copy(), modes[c].copy())
            for key, c in missing.items()
            if proved[c]
        }
    )
    makespan, status, start, mode = _core.replay_layers(
        packed, limits[0], starts.reshape(-1), modes.reshape(-1)
    )
    _raise_for(layer.name, status)
    longest = np.maximum(one.max(axis=1), every.max(axis=1))
    bound = np.where(proved > 0, makespan, np.minimum(makespan, bound * longest * (1 - 1e-13)))
    shape = (chips, ops)
    return _Solved(makespan, bound, proved, nodes, start.reshape(shape), mode.reshape(shape))


def schedule_layers(
    costs: Costs,
    rule: str = "exclusive",
    max_nodes: int = 100_000,
    time_limit_s: float = float("inf"),
    threads: int | None = None,
    cache: ScheduleCache | None = None,
    enough_s: Array | None = None,
) -> LayerTimes:
    """Schedule every graph of `costs` on every chip; the GIL is released.

    A graph is scheduled once for chips with equal latencies and equal cores.

    Parameters
    ----------
    costs
        From `estimate_costs`; an operator runs on one core of each of its types, or on all.
    rule
        ``exclusive``: nothing runs at the same time as an operator on all cores (PHAZE's rule);
        ``overlap``: operators of other types may.
    max_nodes
        Nodes of each search tree. Where it is reached, the makespan is that of the best known
        schedule and ``bound_s`` a lower bound.
    time_limit_s
        Seconds for each layer; two runs may differ where the limit is reached.
    threads
        Most threads to use, by default all cores; without a time limit the result does not depend
        on it.
    cache
        Cache of proven schedules; by default none.
    enough_s
        Bounds that suffice, shape (graphs, chips): a search ends once it is proven that no schedule
        is shorter. Not with a cache.

    Examples
    --------
    >>> from phaze_fast import estimate_costs, layer_graph, models
    >>> from phaze_fast.hardware import presets
    >>> costs = estimate_costs(layer_graph(models.load("bertlarge")), presets.chip("tpuv4"))
    >>> times = schedule_layers(costs)
    >>> bool(times.proven.all()), times.makespan_s.shape
    (True, (6, 1))
    """
    limits = _Limits(_is_overlap(rule), max_nodes, time_limit_s, thread_count(threads))
    cores = np.ascontiguousarray(costs.cores)
    shape = (len(costs.graphs), costs.chips)
    makespan_s, bound_s = np.empty(shape), np.empty(shape)
    proved_by, nodes = np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.int64)
    columns: tuple[Array, ...] = (makespan_s, bound_s, proved_by, nodes)
    every_solved: dict[int, tuple[_Problem, _Solved, int]] = {}
    for at in costs.alike:
        one, every = costs.one_core_s(at), costs.time_s(at)
        enough = None if enough_s is None else enough_s[at].reshape(-1)
        problem = _Problem(costs.graphs[at[0]], one, every, np.tile(cores, (len(at), 1)))
        solved = _scheduled(problem, limits, cache, enough)
        for column, values in zip(columns, solved, strict=False):
            column[at] = values.reshape(len(at), -1)
        for k, graph in enumerate(at.tolist()):
            every_solved[graph] = problem, solved, k * costs.chips
    return LayerTimes(
        graphs=costs.graphs,
        makespan_s=makespan_s,
        bound_s=bound_s,
        proved_by=proved_by,
        nodes=nodes,
        _solved=every_solved,
        _costs=costs,
        _overlap=limits.overlap,
    )


# ---- single layers ----


def pack(instances: Sequence[LayerInstance]) -> Packed:
    """Pack layers into the arrays that the kernel takes."""
    ops = [len(layer) for layer in instances]
    modes = [len(m) for layer in instances for m in layer.modes]
    edges = [len(layer.edges) for layer in instances]
    flat_modes = [mode for layer in instances for m in layer.modes for mode in m]
    flat_edges = [edge for layer in instances for edge in layer.edges]
    return (
        np.array([0, *accumulate(ops)], dtype=np.int64),
        np.array([t for layer in instances for t in layer.types], dtype=np.uint8),
        np.array([0, *accumulate(modes)], dtype=np.int64),
        np.array([cores for cores, _ in flat_modes], dtype=np.int32),
        np.array([seconds for _, seconds in flat_modes], dtype=np.float64),
        np.array([0, *accumulate(edges)], dtype=np.int64),
        np.array([a for a, _ in flat_edges], dtype=np.int32),
        np.array([b for _, b in flat_edges], dtype=np.int32),
        np.array([c for layer in instances for c in layer.cores], dtype=np.int32),
    )


def _branch_and_bound(
    instance: LayerInstance, overlap: bool, max_nodes: int, time_limit_s: float
) -> LayerSchedule:
    begin = time.perf_counter()
    makespan, bound, proved, nodes, status, starts, mode = _core.schedule_layers(
        pack([instance]), overlap, max_nodes, time_limit_s, 1
    )
    _raise_for(instance.name, status)
    return LayerSchedule(
        instance=instance,
        status="optimal" if proved[0] else "feasible",
        makespan=float(makespan[0]),
        bound=float(bound[0]),
        proved_by=_core.PROVED_BY[int(proved[0])],
        starts=tuple(starts.tolist()),
        mode=tuple(mode.tolist()),
        nodes=int(nodes[0]),
        solve_s=time.perf_counter() - begin,
        overlap=overlap,
    )


def _improved_by_highs(schedule: LayerSchedule, time_limit_s: float) -> LayerSchedule:
    from phaze_fast.schedule.highs import solve_with_highs

    begin = time.perf_counter()
    better = solve_with_highs(schedule, time_limit_s)
    return replace(better, solve_s=schedule.solve_s + time.perf_counter() - begin)


def schedule_instances(
    instances: Sequence[LayerInstance],
    rule: str = "exclusive",
    time_limit_s: float = 60.0,
    max_nodes: int | None = None,
    highs: bool = True,
) -> list[LayerSchedule]:
    """Schedule layers one by one, each until a proof or its time limit.

    Parameters
    ----------
    instances
        From `read_instances` or `instance_from_dict`.
    rule
        ``exclusive``: nothing runs at the same time as an operator on all cores (PHAZE's rule);
        ``overlap``: operators of other types may.
    time_limit_s
        Seconds for each layer: for branch and bound, and again for HiGHS.
    max_nodes
        Nodes of the search tree; by default no limit.
    highs
        Whether HiGHS continues where branch and bound did not finish. It needs the package
        ``highspy``.

    Returns
    -------
    list of LayerSchedule
        ``optimal`` only where proven.

    Raises
    ------
    InvalidInputError
        Where an option or a layer is not accepted.

    Examples
    --------
    >>> from phaze_fast.schedule import instance_from_dict
    >>> ops = [{"id": i, "type": "TC", "lat_single": 8, "lat_all": 3} for i in range(4)]
    >>> layer = {"name": "four", "ops": ops, "edges": [], "num_tc": 4, "num_vc": 1}
    >>> (schedule,) = schedule_instances([instance_from_dict(layer)])
    >>> schedule.makespan, schedule.status
    (8.0, 'optimal')
    """
    overlap = _is_overlap(rule)
    if not time_limit_s >= 0:
        raise not_accepted("time_limit_s", time_limit_s, "seconds, zero or more")
    nodes = _MOST_NODES if max_nodes is None else max_nodes
    schedules = []
    for instance in instances:
        schedule = _branch_and_bound(instance, overlap, nodes, time_limit_s)
        if schedule.status != "optimal" and highs and time_limit_s > 0 and instance.one_or_all:
            schedule = _improved_by_highs(schedule, time_limit_s)
        schedules.append(schedule)
    return schedules
