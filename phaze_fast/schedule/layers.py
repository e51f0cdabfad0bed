"""Times of every operator graph on every chip of a batch, by proven schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.cost import Costs
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.opgraph import OpGraph
from phaze_fast.schedule.cache import ScheduleCache, StoredLayer, layer_key
from phaze_fast.schedule.instance import LayerInstance
from phaze_fast.schedule.result import LayerSchedule
from phaze_fast.schedule.solve import RULES, Packed
from phaze_fast.tables import Brief
from phaze_fast.threads import thread_count

__all__ = ["LayerTimes", "layer_makespans", "schedule_layers"]

Array = np.ndarray[Any, Any]

_TYPE_OF_UNIT = np.array([1, 2, 3, 4], dtype=np.uint8)  # TC, VC, TC+VC, NET


@dataclass(frozen=True, eq=False)
class LayerTimes(Brief):
    """Makespans of graphs on chips; arrays have shape (graphs, chips)."""

    graphs: tuple[OpGraph, ...]
    makespan_s: Array
    bound_s: Array
    proved_by: Array
    """Codes into ``_core.PROVED_BY``; 0 where not proven."""
    nodes: Array
    _starts: tuple[Array, ...]
    _modes: tuple[Array, ...]
    _latencies: tuple[tuple[Array, Array], ...]
    _costs: Costs
    _overlap: bool

    @property
    def proven(self) -> Array:
        """Whether each makespan is proven optimal."""
        found: Array = self.proved_by > 0
        return found

    @property
    def gap(self) -> Array:
        """How far each makespan may be above the optimum, as a fraction of its bound."""
        with np.errstate(divide="ignore", invalid="ignore"):
            gap: Array = np.where(self.bound_s > 0, self.makespan_s / self.bound_s - 1.0, 0.0)
        return gap

    @property
    def energy_j(self) -> Array:
        """Joules of each graph on each chip: of its operators, and of leaking until the end."""
        dynamic = [self._costs.dynamic_j(g).sum(axis=1) for g in range(len(self.graphs))]
        joules: Array = np.array(dynamic) + self._costs.static_w * self.makespan_s
        return joules

    def schedule(self, graph: int, chip: int) -> LayerSchedule:
        """One schedule in full."""
        layer = self.graphs[graph]
        one, every = (table[chip] for table in self._latencies[graph])
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
            starts=tuple(self._starts[graph][chip].tolist()),
            mode=tuple(self._modes[graph][chip].tolist()),
            nodes=int(self.nodes[graph, chip]),
            solve_s=0.0,
            overlap=self._overlap,
            energy_j=float(
                self._costs.dynamic_j(graph, chip).sum()
                + self._costs.static_w[chip] * self.makespan_s[graph, chip]
            ),
        )


Graph = tuple[Array, Array, Array]
"""Types of operators, and where edges begin and end, as the kernel takes them."""
_Problem = tuple[OpGraph, Array, Array, Array]
"""A graph, its latencies on one core and on all, and the cores of each chip."""


def _arrays(layer: OpGraph) -> Graph:
    froms = np.repeat(np.arange(len(layer), dtype=np.int32), np.diff(layer.indptr))
    return _TYPE_OF_UNIT[layer.ops["unit"]], froms, layer.indices.astype(np.int32)


def _batch(layer: OpGraph, one: Array, every: Array, cores: Array) -> Packed:
    """One graph on many chips as a batch of layers."""
    chips, ops = one.shape
    types, froms, intos = _arrays(layer)
    steps = np.arange(chips + 1, dtype=np.int64)
    return (
        steps * ops,
        np.tile(types, chips),
        np.arange(chips * ops + 1, dtype=np.int64) * 2,
        np.tile(np.array([1, 0], dtype=np.int32), chips * ops),
        np.stack([one, every], axis=-1).reshape(-1),
        steps * len(intos),
        np.tile(froms, chips),
        np.tile(intos, chips),
        np.ascontiguousarray(cores.reshape(-1)),
    )


def _raise_if_any(layer: OpGraph, status: Array) -> None:
    if status.any():
        said = _core.STATUS_SENTENCES[int(status[np.flatnonzero(status)[0]])]
        raise InvalidInputError(f"{layer.name}: {said}")


def _solve(
    problem: _Problem,
    limits: tuple[bool, int, float, int],
    enough_s: Array | None = None,
    only_decide: bool = False,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Makespan, bound, proof and nodes of each chip; starts and modes of its operators."""
    layer, one, every, cores = problem
    chips = len(cores)
    enough = None if enough_s is None else np.ascontiguousarray(enough_s)
    one_s, every_s, cores = one.reshape(-1), every.reshape(-1), cores.reshape(-1)
    makespan, bound, proved, nodes, status, start, mode = _core.schedule_on_chips(
        _arrays(layer), one_s, every_s, cores, *limits, enough, only_decide
    )
    _raise_if_any(layer, status)
    return makespan, bound, proved, nodes, start.reshape(chips, -1), mode.reshape(chips, -1)


def _one_by_one(problem: _Problem) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Operators in the order in which they stand, each on all cores; nothing is left to choose."""
    _, _, every, _ = problem
    ends = np.cumsum(every, axis=1)
    chips = len(every)
    makespan = ends[:, -1]
    proved = np.full(chips, _core.PROVED_BY.index("list-schedule"), dtype=np.int32)
    modes = np.ones(every.shape, dtype=np.int32)  # the second mode is that of all cores
    return makespan, makespan, proved, np.zeros(chips, dtype=np.int64), ends - every, modes


def _looked_up(
    problem: _Problem,
    limits: tuple[bool, int, float, int],
    cache: ScheduleCache,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Solve what the cache does not know, and tell it; solutions are kept in canonical terms."""
    layer, one, every, cores = problem
    chips, ops = one.shape
    packed = _batch(*problem)
    keys = [layer_key(form) for form in _core.canonical_layers(packed, limits[0])]
    known = {k: v for k, v in cache.get(keys).items() if len(v.starts) == ops}
    bound, proved = np.zeros(chips), np.zeros(chips, dtype=np.int32)
    nodes = np.zeros(chips, dtype=np.int64)
    starts, modes = np.zeros((chips, ops)), np.zeros((chips, ops), dtype=np.int32)
    missing = {key: c for c, key in enumerate(keys) if key not in known}
    if missing:
        at = np.array(sorted(missing.values()))
        asked = _batch(layer, one[at], every[at], cores[at])
        _, bound[at], proved[at], nodes[at], status, start, mode = _core.schedule_layers(
            asked, *limits, canonical=True
        )
        _raise_if_any(layer, status)
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
    _raise_if_any(layer, status)
    longest = np.maximum(one.max(axis=1), every.max(axis=1))
    bound = np.where(proved > 0, makespan, np.minimum(makespan, bound * longest * (1 - 1e-13)))
    return makespan, bound, proved, nodes, start.reshape(chips, -1), mode.reshape(chips, -1)


def layer_makespans(
    costs: Costs,
    wanted: Array,
    max_nodes: int,
    threads: int = 1,
    enough_s: Array | None = None,
    only_decide: bool = False,
) -> tuple[Array, Array, Array]:
    """Give makespans, bounds and whether they are proven, of some layers and nothing more.

    What is asked for is what `schedule_layers` gives without a cache; arrays have shape (graphs,
    chips).

    Parameters
    ----------
    costs
        From `estimate_costs`.
    wanted
        Which layers are asked for; the others are NaN, and not proven.
    max_nodes, threads, enough_s
        As for `schedule_layers`.
    only_decide
        Whether a schedule shorter than `enough_s` ends a search, as the bound does that is enough.
    """
    makespan_s, bound_s = np.full(wanted.shape, np.nan), np.full(wanted.shape, np.nan)
    proven = np.zeros(wanted.shape, dtype=bool)
    limits = (False, max_nodes, float("inf"), threads)
    for i, layer in enumerate(costs.graphs):
        at = np.flatnonzero(wanted[i])
        if not len(at):
            continue
        if not len(layer):
            makespan_s[i, at] = bound_s[i, at] = 0.0
            continue
        some = costs if len(at) == costs.chips else costs.at(at)
        problem = (layer, some.one_core_s(i), some.time_s(i), np.ascontiguousarray(some.cores))
        enough = None if enough_s is None else enough_s[i, at]
        if layer.in_order:
            found = _one_by_one(problem)
        else:
            found = _solve(problem, limits, enough, only_decide)
        makespan_s[i, at], bound_s[i, at], proven[i, at] = found[0], found[1], found[2] > 0
    return makespan_s, bound_s, proven


def schedule_layers(
    costs: Costs,
    rule: str = "exclusive",
    max_nodes: int = 100_000,
    time_limit_s: float = float("inf"),
    threads: int | None = None,
    cache: ScheduleCache | None = None,
    enough_s: Array | None = None,
) -> LayerTimes:
    """Schedule every graph of `costs` on every chip, in one call per graph; the GIL is released.

    Equal latencies on equal cores are scheduled once.

    Parameters
    ----------
    costs
        From `estimate_costs`; an operator runs on one core of each of its types, or on all.
    rule
        ``exclusive``: nothing runs beside an operator on all cores (PHAZE's rule); ``overlap``:
        other types may.
    max_nodes
        Of each search tree. Where it is reached the makespan is that of the best schedule found and
        ``bound_s`` says how good it can be.
    time_limit_s
        For each layer; with a limit, two runs may differ where it is reached.
    threads
        At most this many threads, by default all cores; without a time limit the result does not
        depend on it.
    cache
        Where proven schedules are looked up and kept; by default nowhere.
    enough_s
        Bounds that are enough, shape (graphs, chips): a search ends without the optimum once it is
        proven that no schedule is shorter. Not with a cache.

    Examples
    --------
    >>> from phaze_fast import estimate_costs, layer_graph, models
    >>> from phaze_fast.hardware import presets
    >>> costs = estimate_costs(layer_graph(models.load("bertlarge")), presets.chip("tpuv4"))
    >>> times = schedule_layers(costs)
    >>> bool(times.proven.all()), times.makespan_s.shape
    (True, (6, 1))
    """
    if rule not in RULES:
        raise InvalidInputError(f"rule: {rule!r} is not accepted; {nearest(str(rule), RULES)}")
    rows: dict[str, list[Array]] = {"makespan": [], "bound": [], "proved": [], "nodes": []}
    starts, modes, latencies = [], [], []
    cores = np.ascontiguousarray(costs.cores)
    limits = (rule == "overlap", max_nodes, time_limit_s, thread_count(threads))
    for i, layer in enumerate(costs.graphs):
        one, every = costs.one_core_s(i), costs.time_s(i)
        if not len(layer):
            for column in rows.values():
                column.append(np.zeros(costs.chips))
            starts.append(np.zeros((costs.chips, 0)))
            modes.append(np.zeros((costs.chips, 0), dtype=np.int32))
            latencies.append((one, every))
            continue
        problem = (layer, one, every, cores)
        if layer.in_order:
            found = _one_by_one(problem)
        elif cache is not None and enough_s is None:
            found = _looked_up(problem, limits, cache)
        else:
            found = _solve(problem, limits, None if enough_s is None else enough_s[i])
        for name, values in zip(rows, found[:4], strict=True):
            rows[name].append(values)
        starts.append(found[4])
        modes.append(found[5])
        latencies.append((one, every))
    stacked = {name: np.array(column) for name, column in rows.items()}
    return LayerTimes(
        graphs=costs.graphs,
        makespan_s=stacked["makespan"],
        bound_s=stacked["bound"],
        proved_by=stacked["proved"].astype(np.int32),
        nodes=stacked["nodes"].astype(np.int64),
        _starts=tuple(starts),
        _modes=tuple(modes),
        _latencies=tuple(latencies),
        _costs=costs,
        _overlap=rule == "overlap",
    )
