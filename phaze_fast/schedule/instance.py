"""Layers to be scheduled, read from JSON lines: operators, modes, edges, cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaze_fast import _core
from phaze_fast.documents import parse_json, read_text
from phaze_fast.errors import InvalidInputError, brief, nearest

__all__ = ["TYPES", "LayerInstance", "instance_from_dict", "read_instances"]

TYPES = {"TC": 1, "VC": 2, "TCandVC": 3, "TC+VC": 3, "NET": 4}
"""Resources an operator needs, as bits: tensor cores 1, vector cores 2, network 4."""

_MOST_CORES = 2**30
_LONGEST = 1e300
"""No latency is longer, so that few sums of them overflow."""


@dataclass(frozen=True)
class LayerInstance:
    """One layer on one chip, operators in topological order.

    `modes` lists for each operator the ways to run it as (cores, seconds); 0 cores stand for all of
    them. Latencies may be in any unit, as long as it is one.
    """

    name: str
    names: tuple[str, ...]
    types: tuple[int, ...]
    modes: tuple[tuple[tuple[int, float], ...], ...]
    edges: tuple[tuple[int, int], ...]
    cores: tuple[int, int, int]
    positions: tuple[int, ...]
    """Where each operator stands in the source, which need not be in topological order."""

    def as_given(self, values: Sequence[Any]) -> list[Any]:
        """One value per operator, in the order of the source."""
        pairs = sorted(zip(self.positions, values, strict=True), key=lambda pair: pair[0])
        return [value for _, value in pairs]

    @property
    def one_or_all(self) -> bool:
        """Whether operators run on one core or on all of them alone, which is what HiGHS takes."""
        return all(cores in (0, 1) for modes in self.modes for cores, _ in modes)

    def __len__(self) -> int:
        return len(self.names)


def _fault(where: str, field: str, value: Any, wanted: str) -> InvalidInputError:
    return InvalidInputError(f"{where}: {field}: {brief(value)} is not accepted; expected {wanted}")


def _whole(where: str, record: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = record.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_CORES:
        raise _fault(where, field, value, "a whole number, zero or more")
    return value


def _latency(where: str, field: str, value: Any) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= _LONGEST:  # which NaN is not
        raise _fault(where, field, value, f"a finite number, zero or more, at most {_LONGEST:g}")
    return float(value)


def _modes(where: str, op: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    found = []
    if "lat_single" in op:
        found.append((1, _latency(where, "lat_single", op["lat_single"])))
    if "lat_all" in op:
        found.append((0, _latency(where, "lat_all", op["lat_all"])))
    between = op.get("lat_cores", {})
    if not isinstance(between, Mapping):
        raise _fault(where, "lat_cores", between, "an object of core count to latency")
    for text, value in between.items():
        plain = str(text).isascii() and str(text).isdigit() and len(str(text)) <= 10
        if not plain or str(int(text)) != str(text) or not 1 <= int(text) <= _MOST_CORES:
            raise _fault(where, "lat_cores", text, "a core count such as 2")
        found.append((int(text), _latency(where, f"lat_cores.{text}", value)))
    if not found:
        raise InvalidInputError(f"{where}: expected lat_single, lat_all or lat_cores")
    if len(found) > _core.MAX_LAYER_MODES:
        raise _fault(where, "lat_cores", len(found), f"at most {_core.MAX_LAYER_MODES} latencies")
    return tuple(found)


def _sorted_ops(name: str, count: int, edges: set[tuple[int, int]]) -> list[int]:
    """Positions in topological order, as given wherever that is possible."""
    waits = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        waits[b] += 1
        after[a].append(b)
    ready = sorted(i for i in range(count) if waits[i] == 0)
    order: list[int] = []
    while ready:
        op = ready.pop(0)
        order.append(op)
        for b in after[op]:
            waits[b] -= 1
            if waits[b] == 0:
                ready.append(b)
        ready.sort()
    if len(order) < count:
        raise InvalidInputError(f"{name}: edges: they form a cycle; expected none")
    return order


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _edges(where: str, pairs: Any, place: Mapping[int, int]) -> set[tuple[int, int]]:
    if not isinstance(pairs, list):
        raise _fault(where, "edges", pairs, "a list of pairs of ids")
    found = set()
    for pair in pairs:
        good = isinstance(pair, list) and len(pair) == 2
        if not good or any(not _is_id(i) or i not in place for i in pair):
            raise _fault(where, "edges", pair, "a pair of ids of operators")
        if pair[0] == pair[1]:
            raise _fault(where, "edges", pair, "two different operators")
        found.add((place[pair[0]], place[pair[1]]))
    return found


def instance_from_dict(record: Any, where: str = "instance") -> LayerInstance:
    """Read one layer from plain data.

    Parameters
    ----------
    record
        ``name``, ``ops`` (each with ``id``, ``type`` of TC, VC, TCandVC or NET, ``lat_single`` on
        one core, ``lat_all`` on all; ``lat_cores`` for core counts between), ``edges`` (pairs of
        ids), ``num_tc``, ``num_vc`` and, if not 1, ``num_net``. Other keys are ignored.
    where
        What to call the source in errors.

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
    order = _sorted_ops(where, len(ops), edges)
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
    found = False
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = parse_json(line)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from None
        found = True
        yield instance_from_dict(record, where)
    if not found:
        raise InvalidInputError(f"{path}: there are no instances in it")
