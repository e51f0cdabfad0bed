"""Placement problems on tiered networks in the form of the public NEST program.

The form: one JSON object with ``nodes`` and ``edges`` by tensor-parallel width and a network of
levels (``devices_per_level``, ``bws``, ``latency_per_level``), innermost first. docs/nest.md lists
every field and what it is used for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.papers.fields import (
    flag,
    key_of,
    known,
    named,
    number,
    ordered,
    shown,
    whole,
    widths,
)

__all__ = ["TIME_UNITS", "NestProblem", "NestWidth", "is_nest", "nest_from_dict"]

Array = np.ndarray[Any, Any]

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Seconds of a unit that latencies of layers can be given in."""

_NETWORK = ("devices_per_level", "bws", "latency_per_level")
_REQUIRED = (
    "maxDevices",
    "maxMemoryPerDevice",
    "mbsInBatch",
    *_NETWORK,
    "nodes",
    "edges",
    "activationRecomputation",
    "optimizerAlgorithm",
)
_OPTIONAL = ("ep_degree", "cp_degree")
_UNUSED = ("bandwidth", "frequency", "sp_enabled", "baselines")
_NODE = ("optimalLatencyFw", "optimalLatencyBw", "parameterSize", "activationSize")
_UNUSED_NODE = ("isTensorParallelized", "energy")
_EDGE = ("sourceId", "destId", "communicationCost")
_STATES = {"SGD": 2.0, "Adam": 8.0}  # weights, gradients and moments, as multiples of the weights


@dataclass(frozen=True, eq=False)
class NestWidth:
    """The layers of a model at one tensor-parallel width, in order."""

    width: int
    ids: tuple[int, ...]
    forward_s: Array
    backward_s: Array
    weight_bytes: Array
    kept_bytes: Array
    """Activations."""
    edge_from: Array
    """Positions of layers, not ids."""
    edge_to: Array
    edge_bytes: Array


@dataclass(frozen=True, eq=False)
class NestProblem:
    """A placement as NEST poses it; docs/nest.md has the formulas."""

    name: str
    memory_bytes: float
    """Of one device."""
    micro_batches: int
    """Of one batch, over all replicas."""
    level_sizes: tuple[int, ...]
    """Members of each level, innermost first; their product is the number of devices."""
    level_bytes_per_s: tuple[float, ...]
    level_latency_s: tuple[float, ...]
    other_degrees: int
    """Expert-parallel times context-parallel width: devices of a stage per tensor width."""
    states: float
    """Bytes of weights, gradients and moments per byte of weights."""
    recompute: bool
    widths: tuple[NestWidth, ...]
    """Narrowest first."""

    @property
    def devices(self) -> int:
        """All of them."""
        return math.prod(self.level_sizes)

    def stage_devices(self, width: NestWidth) -> int:
        """Devices of one stage at a width."""
        return width.width * self.other_degrees


def is_nest(data: Any) -> bool:
    """Say whether an object is in NEST's form rather than in PHAZE's: it has a tiered network."""
    _, data = named(data, "")
    return isinstance(data, dict) and any(field in data for field in _NETWORK)


def _levels(record: dict[str, Any], devices: int) -> list[list[Any]]:
    columns: list[list[Any]] = []
    for field in _NETWORK:
        values = record[field]
        if not isinstance(values, list) or not 1 <= len(values) <= _core.MAX_NEST_LEVELS:
            raise InvalidInputError(
                f"{field}: {shown(values)} is not accepted; expected a list of 1 to "
                f"{_core.MAX_NEST_LEVELS} levels"
            )
        if len(values) != len(record["devices_per_level"]):
            raise InvalidInputError(
                f"{field}: {len(values)} levels are not accepted; expected "
                f"{len(record['devices_per_level'])} as in devices_per_level"
            )
        named = {f"[{level}]": value for level, value in enumerate(values)}
        if field == "devices_per_level":
            columns.append([whole(named, at, field, least=1) for at in named])
        else:
            least = 1e-100 if field == "bws" else 0.0
            columns.append([number(named, at, field, least=least) for at in named])
    if math.prod(columns[0]) != devices:
        raise InvalidInputError(
            f"devices_per_level: {shown(record['devices_per_level'])} is not accepted; its product "
            f"is {math.prod(columns[0])}, expected maxDevices {devices}"
        )
    return columns


def _nodes(records: Any, where: str) -> dict[int, list[float]]:
    if not isinstance(records, list) or not 1 <= len(records) <= _core.MAX_NEST_LAYERS:
        raise InvalidInputError(
            f"{where}: {shown(records)} is not accepted; expected a list of 1 to "
            f"{_core.MAX_NEST_LAYERS} nodes"
        )
    nodes: dict[int, list[float]] = {}
    for k, record in enumerate(records):
        at = f"{where}[{k}]"
        node = known(record, ("id", *_NODE, *_UNUSED_NODE), at)
        key = key_of(node, "id", f"{at}.", None)
        if key in nodes:
            raise InvalidInputError(f"{at}.id: {key} is there twice; expected every id once")
        nodes[key] = [number(node, name, f"{at}.") for name in _NODE]
        if "energy" in node:
            number(node, "energy", f"{at}.")
        if "isTensorParallelized" in node:
            flag(node, "isTensorParallelized", f"{at}.")
    return nodes


def _edges(records: Any, ids: dict[int, Any], where: str) -> list[tuple[int, int, float]]:
    if not isinstance(records, list):
        raise InvalidInputError(f"{where}: {shown(records)} is not accepted; expected a list")
    edges: dict[tuple[int, int], float] = {}
    for k, record in enumerate(records):
        at = f"{where}[{k}]"
        edge = known(record, _EDGE, at)
        ends = (key_of(edge, "sourceId", f"{at}.", ids), key_of(edge, "destId", f"{at}.", ids))
        if ends in edges:
            raise InvalidInputError(
                f"{at}: the edge from {ends[0]} to {ends[1]} is there twice; expected it once"
            )
        edges[ends] = number(edge, "communicationCost", f"{at}.")
    return [(a, b, size) for (a, b), size in edges.items()]


def _width(record: dict[str, Any], width: int, unit_s: float) -> NestWidth:
    nodes = _nodes(record["nodes"][str(width)], f"nodes.{width}")
    edges = _edges(record["edges"][str(width)], nodes, f"edges.{width}")
    ids = ordered(nodes, edges, f"edges.{width}")
    joined = {(a, b) for a, b, _ in edges}
    for pair in pairwise(ids):
        if pair not in joined:
            raise InvalidInputError(
                f"edges.{width}: no edge from {pair[0]} to {pair[1]}; expected one from every "
                "layer to the next, and others beside them"
            )
    position = {key: k for k, key in enumerate(ids)}
    edges.sort(key=lambda edge: (position[edge[0]], position[edge[1]]))
    columns = np.array([nodes[key] for key in ids], dtype=np.float64).T
    return NestWidth(
        width=width,
        ids=tuple(ids),
        forward_s=columns[0] * unit_s,
        backward_s=columns[1] * unit_s,
        weight_bytes=columns[2].copy(),
        kept_bytes=columns[3].copy(),
        edge_from=np.array([position[a] for a, _, _ in edges], dtype=np.int32),
        edge_to=np.array([position[b] for _, b, _ in edges], dtype=np.int32),
        edge_bytes=np.array([size for _, _, size in edges], dtype=np.float64),
    )


def _check_unused(record: dict[str, Any]) -> None:
    for field in ("bandwidth", "frequency"):
        if field in record:
            number(record, field, "")
    if "sp_enabled" in record:
        flag(record, "sp_enabled", "")


def nest_from_dict(data: Any, name: str = "problem", time_unit: str = "s") -> NestProblem:
    """Read a problem in NEST's input form.

    Parameters
    ----------
    data
        The object; also one that holds it under ``input``, with a ``name`` beside.
    name
        What to call it where it has no name.
    time_unit
        What latencies of layers are in, a key of `TIME_UNITS`. NEST takes them as they are beside
        messages in seconds, which is the unit ``s``.

    Raises
    ------
    InvalidInputError
        Where a field is missing, unknown or out of range; the message names it.

    Examples
    --------
    >>> node = {"optimalLatencyFw": 1.0, "optimalLatencyBw": 2.0}
    >>> node |= {"parameterSize": 10, "activationSize": 5}
    >>> problem = nest_from_dict(
    ...     {
    ...         "maxDevices": 4, "devices_per_level": [2, 2], "bws": [10.0, 1.0],
    ...         "latency_per_level": [0.0, 0.0], "maxMemoryPerDevice": 100, "mbsInBatch": 8,
    ...         "nodes": {"1": [{"id": 0, **node}, {"id": 1, **node}]},
    ...         "edges": {"1": [{"sourceId": 0, "destId": 1, "communicationCost": 1}]},
    ...         "activationRecomputation": False, "optimizerAlgorithm": "SGD",
    ...     }
    ... )
    >>> problem.devices, problem.widths[0].ids
    (4, (0, 1))
    """
    if time_unit not in TIME_UNITS:
        raise InvalidInputError(
            f"time_unit: {shown(time_unit)} is not accepted; {nearest(str(time_unit), TIME_UNITS)}"
        )
    name, data = named(data, name)
    record = known(data, (*_REQUIRED, *_OPTIONAL, *_UNUSED), "")
    for key in _REQUIRED:
        if key not in record:
            raise InvalidInputError(f"{key}: missing; expected it beside {', '.join(_REQUIRED)}")
    devices = whole(record, "maxDevices", "", least=1, most=_core.MAX_NEST_DEVICES)
    sizes, rates, latencies = _levels(record, devices)
    micro_batches = number(record, "mbsInBatch", "", least=1, most=_core.MAX_NEST_DEVICES)
    degrees = [whole(record, key, "", least=1) if key in record else 1 for key in _OPTIONAL]
    algorithm = record["optimizerAlgorithm"]
    if not isinstance(algorithm, str) or algorithm not in _STATES:
        raise InvalidInputError(
            f"optimizerAlgorithm: {shown(algorithm)} is not accepted; "
            f"{nearest(str(algorithm)[:60], _STATES)}"
        )
    _check_unused(record)
    return NestProblem(
        name=name,
        memory_bytes=number(record, "maxMemoryPerDevice", ""),
        micro_batches=int(micro_batches),
        level_sizes=tuple(sizes),
        level_bytes_per_s=tuple(rates),
        level_latency_s=tuple(latencies),
        other_degrees=math.prod(degrees),
        states=_STATES[algorithm],
        recompute=flag(record, "activationRecomputation", ""),
        widths=tuple(_width(record, w, TIME_UNITS[time_unit]) for w in sorted(widths(record))),
    )
