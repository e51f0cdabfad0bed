"""A layer to be scheduled, as read from JSON lines, and its schedule."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phaze_fast import _core
from phaze_fast.documents import parse_json, read_text
from phaze_fast.errors import InvalidInputError, brief, nearest

TYPES = {"TC": 1, "VC": 2, "TCandVC": 3, "TC+VC": 3, "NET": 4}
"""Resources an operator needs, as bits: tensor cores 1, vector cores 2, network 4."""
_RESOURCES = ("TC", "VC", "NET")

_MOST_CORES = 2**30
_LONGEST = 1e300
"""Longest latency accepted, so that sums do not overflow."""
_CHART_WIDTH = 60


@dataclass(frozen=True)
class LayerInstance:
    """One layer on one chip, operators in topological order.

    `modes` lists the modes of each operator as (cores, latency); 0 cores means all of them. All
    latencies are in the same unit, which may be any.
    """

    name: str
    names: tuple[str, ...]
    types: tuple[int, ...]
    modes: tuple[tuple[tuple[int, float], ...], ...]
    edges: tuple[tuple[int, int], ...]
    cores: tuple[int, int, int]
    positions: tuple[int, ...]
    """Position of each operator in the source, which need not be in topological order."""

    def as_given(self, values: Sequence[Any]) -> list[Any]:
        """Return one value per operator in the operator order of the source file."""
        pairs = sorted(zip(self.positions, values, strict=True), key=lambda pair: pair[0])
        return [value for _, value in pairs]

    @property
    def one_or_all(self) -> bool:
        """Whether all modes have one core or all cores, as the program for HiGHS requires."""
        return all(cores in (0, 1) for modes in self.modes for cores, _ in modes)

    def blocked_cores(self, mode: Sequence[int], overlap: bool) -> list[tuple[int, ...]]:
        """List the cores of each type that each operator blocks while it runs in its mode.

        Unless operators of other types may `overlap`, an operator on all cores blocks those of
        every type.
        """
        blocked = []
        for types, modes, choice in zip(self.types, self.modes, mode, strict=True):
            cores = modes[choice][0]
            whole_chip = cores == 0 and not overlap
            blocked.append(
                tuple(
                    (have if cores == 0 else min(cores, have))
                    if whole_chip or types >> r & 1
                    else 0
                    for r, have in enumerate(self.cores)
                )
            )
        return blocked

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class LayerSchedule:
    """The start and the cores of each operator of a layer, with bound and proof."""

    instance: LayerInstance
    status: str
    """``optimal`` where proven, else ``feasible``."""
    makespan: float
    """End of the last operator, in the unit of the latencies."""
    bound: float
    """Lower bound of the makespan of every schedule, in the unit of the latencies."""
    proved_by: str
    """``list-schedule``, ``branch-and-bound``, ``highs`` or ``nothing``."""
    starts: tuple[float, ...]
    mode: tuple[int, ...]
    """Position of each operator's mode among its modes."""
    nodes: int
    """Nodes of the search tree."""
    solve_s: float
    """Wall time of the solvers, seconds."""
    overlap: bool = False
    """Whether operators of other types may run at the same time as one on all cores."""
    energy_j: float | None = None
    """Joules on the chip where costs are known; None for a file of latencies."""

    @property
    def gap(self) -> float:
        """Most that the makespan exceeds the optimum by, as a fraction of the bound."""
        return self.makespan / self.bound - 1.0 if self.bound > 0 else 0.0

    @property
    def durations(self) -> tuple[float, ...]:
        """Duration of each operator."""
        pairs = zip(self.instance.modes, self.mode, strict=True)
        return tuple(modes[choice][1] for modes, choice in pairs)

    @cached_property
    def cores_used(self) -> list[tuple[int, ...]]:
        """Cores of each type (tensor, vector, network) that each operator uses."""
        return self.instance.blocked_cores(self.mode, overlap=True)

    @property
    def utilization(self) -> dict[str, float]:
        """Utilisation of the cores of each type."""
        shares = {}
        for r, name in enumerate(_RESOURCES):
            have = self.instance.cores[r]
            if have == 0 or not any(t >> r & 1 for t in self.instance.types):
                continue
            busy = sum(
                used[r] * seconds
                for used, seconds in zip(self.cores_used, self.durations, strict=True)
            )
            shares[name] = busy / (have * self.makespan) if self.makespan > 0 else 0.0
        return shares

    @property
    def critical_path(self) -> tuple[str, ...]:
        """A chain of operators without gaps that ends at the makespan."""
        ends = [s + d for s, d in zip(self.starts, self.durations, strict=True)]
        path: list[int] = []
        at = self.makespan
        slack = 1e-9 * max(self.makespan, 1e-300)
        while True:
            last = [i for i, end in enumerate(ends) if abs(end - at) <= slack and i not in path]
            if not last:
                break
            op = max(last, key=lambda i: self.durations[i])
            path.append(op)
            at = self.starts[op]
            if at <= slack:
                break
        return tuple(self.instance.names[i] for i in reversed(path))

    def chart(self, width: int = _CHART_WIDTH) -> str:
        """Draw the schedule as text, a line per operator in order of start."""
        order = sorted(range(len(self.instance)), key=lambda i: (self.starts[i], i))
        label = max(len(name) for name in self.instance.names)
        scale = width / self.makespan if self.makespan > 0 else 0.0
        lines = []
        for i in order:
            first = min(int(self.starts[i] * scale), width - 1)
            last = max(first + 1, round((self.starts[i] + self.durations[i]) * scale))
            cores = self.instance.modes[i][self.mode[i]][0]
            mark = "#" if cores == 0 else "="
            bar = " " * first + mark * (last - first)
            kind = "+".join(
                name for r, name in enumerate(_RESOURCES) if self.instance.types[i] >> r & 1
            )
            core_text = "all" if cores == 0 else str(cores)
            lines.append(
                f"{self.instance.names[i]:{label}} {kind:5} {core_text:>3} |{bar:{width}}|"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        used = ", ".join(f"{name} {share:.0%}" for name, share in self.utilization.items())
        proof = f"proven by {self.proved_by}" if self.status == "optimal" else f"gap {self.gap:.2%}"
        energy = "" if self.energy_j is None else f"; {self.energy_j:.4g} J"
        head = f"{self.instance.name}: {self.makespan:.6g} ({self.status}, {proof}); {used}{energy}"
        return f"{head}\n{self.chart()}"


# ---- reading ----


def _fault(where: str, field: str, value: Any, wanted: str) -> InvalidInputError:
    return InvalidInputError(f"{where}: {field}: {brief(value)} is not accepted; expected {wanted}")


def _whole(where: str, record: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = record.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_CORES:
        raise _fault(where, field, value, "a whole number, zero or more")
    return value


def _latency(where: str, field: str, value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= _LONGEST:  # also false for NaN
        raise _fault(where, field, value, f"a finite number, zero or more, at most {_LONGEST:g}")
    return float(value)


def _modes(where: str, op: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    modes = []
    if "lat_single" in op:
        modes.append((1, _latency(where, "lat_single", op["lat_single"])))
    if "lat_all" in op:
        modes.append((0, _latency(where, "lat_all", op["lat_all"])))
    between = op.get("lat_cores", {})
    if not isinstance(between, Mapping):
        raise _fault(where, "lat_cores", between, "an object of core count to latency")
    for text, value in between.items():
        plain = str(text).isascii() and str(text).isdigit() and len(str(text)) <= 10
        if not plain or str(int(text)) != str(text) or not 1 <= int(text) <= _MOST_CORES:
            raise _fault(where, "lat_cores", text, "a core count such as 2")
        modes.append((int(text), _latency(where, f"lat_cores.{text}", value)))
    if not modes:
        raise InvalidInputError(f"{where}: expected lat_single, lat_all or lat_cores")
    if len(modes) > _core.MAX_LAYER_MODES:
        raise _fault(where, "lat_cores", len(modes), f"at most {_core.MAX_LAYER_MODES} latencies")
    return tuple(modes)


def topological_order(ids: Iterable[int], edges: Iterable[tuple[int, int]]) -> list[int]:
    """Order ids so that edges go forward, smaller ids first where there is a choice.

    Ids on a cycle, and their successors, are omitted.

    Examples
    --------
    >>> topological_order([0, 1, 2], [(2, 0)])
    [1, 2, 0]
    """
    waiting = dict.fromkeys(ids, 0)
    after: dict[int, list[int]] = {i: [] for i in waiting}
    for a, b in edges:
        waiting[b] += 1
        after[a].append(b)
    ready = [i for i, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for b in after[i]:
            waiting[b] -= 1
            if waiting[b] == 0:
                heapq.heappush(ready, b)
    return order


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _edges(where: str, pairs: Any, place: Mapping[int, int]) -> set[tuple[int, int]]:
    if not isinstance(pairs, list):
        raise _fault(where, "edges", pairs, "a list of pairs of ids")
    edges = set()
    for pair in pairs:
        good = isinstance(pair, list) and len(pair) == 2
        if not good or any(not _is_id(i) or i not in place for i in pair):
            raise _fault(where, "edges", pair, "a pair of ids of operators")
        if pair[0] == pair[1]:
            raise _fault(where, "edges", pair, "two different operators")
        edges.add((place[pair[0]], place[pair[1]]))
    return edges


def instance_from_dict(record: Any, where: str = "instance") -> LayerInstance:
    """Read one layer from plain data.

    Parameters
    ----------
    record
        ``name``, ``ops`` (each with ``id``, ``type`` of TC, VC, TCandVC or NET, ``lat_single`` on
        one core, ``lat_all`` on all; ``lat_cores`` for core counts between), ``edges`` (pairs of
        ids), ``num_tc``, ``num_vc`` and, if not 1, ``num_net``. Other keys are ignored.
    where
        Name of the source in errors.

    Examples
    --------
    >>> op = {"id": 0, "type": "TC", "lat_single": 8.0, "lat_all": 2.0}
    >>> layer = {"name": "x", "ops": [op], "edges": [], "num_tc": 4, "num_vc": 1}
    >>> instance_from_dict(layer).modes
    (((1, 8.0), (0, 2.0)),)
    """
    if not isinstance(record, Mapping):
        raise _fault(where, "instance", type(record).__name__, "an object")
    ops = record.get("ops")
    if not isinstance(ops, list) or not 1 <= len(ops) <= _core.MAX_LAYER_OPS:
        size = len(ops) if isinstance(ops, list) else type(ops).__name__
        raise _fault(where, "ops", size, f"a list of 1 to {_core.MAX_LAYER_OPS} operators")
    place: dict[int, int] = {}
    types, modes, names = [], [], []
    for position, op in enumerate(ops):
        at = f"{where}: ops[{position}]"
        if not isinstance(op, Mapping):
            raise _fault(where, f"ops[{position}]", type(op).__name__, "an object")
        key = op.get("id", position)
        if not _is_id(key):
            raise _fault(at, "id", key, "a whole number")
        if key in place:
            raise _fault(at, "id", key, "an id that no other operator has")
        place[key] = position
        kind = op.get("type")
        if not isinstance(kind, str) or kind not in TYPES:
            raise _fault(at, "type", kind, f"a known type; {nearest(str(kind), TYPES)}")
        types.append(TYPES[kind])
        modes.append(_modes(at, op))
        names.append(str(op.get("name", key)))
    cores = (
        _whole(where, record, "num_tc"),
        _whole(where, record, "num_vc"),
        _whole(where, record, "num_net", 1),
    )
    for needed, have, field in zip((1, 2, 4), cores, ("num_tc", "num_vc", "num_net"), strict=True):
        if have == 0 and any(kind & needed for kind in types):
            raise _fault(where, field, 0, "at least 1: an operator needs it")
    edges = _edges(where, record.get("edges", []), place)
    order = topological_order(range(len(ops)), edges)
    if len(order) < len(ops):
        raise InvalidInputError(f"{where}: edges: they form a cycle; expected none")
    new = {old: position for position, old in enumerate(order)}
    return LayerInstance(
        name=str(record.get("name", where)),
        names=tuple(names[i] for i in order),
        types=tuple(types[i] for i in order),
        modes=tuple(modes[i] for i in order),
        edges=tuple(sorted((new[a], new[b]) for a, b in edges)),
        cores=cores,
        positions=tuple(order),
    )


def read_instances(path: Path | str) -> Iterator[LayerInstance]:
    """Read layers from a file of JSON lines, one by one.

    Raises
    ------
    InvalidInputError
        Where the file cannot be read or a line is not accepted; names the line.
    """
    any_line = False
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = parse_json(line)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from None
        any_line = True
        yield instance_from_dict(record, where)
    if not any_line:
        raise InvalidInputError(f"{path}: there are no instances in it")
