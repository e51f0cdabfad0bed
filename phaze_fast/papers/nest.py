"""Pipelines on tiered networks: the problem of the public NEST program, solved exactly.

A problem is one JSON object with ``nodes`` and ``edges`` by tensor-parallel width and a network of
levels (``devices_per_level``, ``bws``, ``latency_per_level``), innermost first. docs/nest.md lists
every field and the formulas.
"""
# ruff: noqa: N815

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, brief, check_one_of
from phaze_fast.papers.placement import LayerTable
from phaze_fast.papers.problem_files import Flag, Node, ProblemFile, Rate, Size, Whole
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes

PRICED_REPLICAS = ("first", "all")
"""Replicas whose messages between stages take time: NEST prices the first replica alone."""


# ---- the problem and its file form ----

TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Units of the layers' latencies, in seconds."""

_NETWORK = ("devices_per_level", "bws", "latency_per_level")
_STATES = {"SGD": 2.0, "Adam": 8.0}  # weights, gradients and moments, as multiples of the weights


@dataclass(frozen=True, eq=False)
class NestProblem:
    """A placement problem in NEST's formulation; docs/nest.md has the formulas."""

    name: str
    memory_bytes: float
    """Memory of one device."""
    micro_batches: int
    """Micro-batches of one batch, over all replicas."""
    level_sizes: tuple[int, ...]
    """Members of each level, innermost first; their product is the number of devices."""
    level_bytes_per_s: tuple[float, ...]
    level_latency_s: tuple[float, ...]
    other_degrees: int
    """Expert-parallel times context-parallel width: a stage's devices over its tensor width."""
    states: float
    """Bytes of weights, gradients and moments per byte of weights."""
    recompute: bool
    tables: Mapping[int, LayerTable]
    """Layers by tensor-parallel width, narrowest first; `resident_bytes` holds weights alone."""

    @property
    def devices(self) -> int:
        """Devices of all levels together."""
        return math.prod(self.level_sizes)

    def stage_devices(self, width: int) -> int:
        """Devices of one stage at a width."""
        return width * self.other_degrees


class _NestNode(Node):
    energy: Size = 0.0
    """Ignored, as are `bandwidth`, `frequency`, `sp_enabled` and `baselines` of a problem."""


_Levels = Field(min_length=1, max_length=_core.MAX_NEST_LEVELS)


class _NestFile(ProblemFile):
    maxDevices: Annotated[Whole, Field(le=_core.MAX_NEST_DEVICES)]
    mbsInBatch: Annotated[float, Field(strict=True, ge=1, le=_core.MAX_NEST_DEVICES)]
    devices_per_level: Annotated[tuple[Whole, ...], _Levels]
    bws: Annotated[tuple[Rate, ...], _Levels]
    latency_per_level: Annotated[tuple[Size, ...], _Levels]
    nodes: Mapping[
        str, Annotated[tuple[_NestNode, ...], Field(min_length=1, max_length=_core.MAX_NEST_LAYERS)]
    ]
    ep_degree: Whole = 1
    cp_degree: Whole = 1
    bandwidth: Size | None = None
    frequency: Size | None = None
    sp_enabled: Flag = False
    baselines: Any = None

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        levels, devices = len(self.devices_per_level), math.prod(self.devices_per_level)
        for field in _NETWORK[1:]:
            if len(getattr(self, field)) != levels:
                raise ValueError(
                    f"{field}: {len(getattr(self, field))} levels are not accepted; expected "
                    f"{levels} as in devices_per_level"
                )
        if devices != self.maxDevices:
            raise ValueError(
                f"devices_per_level: {brief(list(self.devices_per_level))} is not accepted; its "
                f"product is {devices}, expected maxDevices {self.maxDevices}"
            )
        return self

    def table(self, width: int, unit_s: float) -> LayerTable:
        """Return the layers of one width; each sends to the next one, and perhaps to others."""
        nodes, edges = self.layers(width)
        ids = [node.id for node in nodes]
        edges.sort(key=lambda edge: edge[:2])
        ends = [edge[:2] for edge in edges]
        for pair in pairwise(ends):
            if pair[0] == pair[1]:
                a, b = (ids[at] for at in pair[0])
                raise InvalidInputError(f"edges.{width}: the edge from {a} to {b} is there twice")
        for at in range(len(ids) - 1):
            if (at, at + 1) not in ends:
                raise InvalidInputError(
                    f"edges.{width}: no edge from {ids[at]} to {ids[at + 1]}; expected one from "
                    "every layer to the next, and further edges"
                )
        return LayerTable(
            names=ids,
            forward_s=np.array([node.optimalLatencyFw for node in nodes]) * unit_s,
            backward_s=np.array([node.optimalLatencyBw for node in nodes]) * unit_s,
            resident_bytes=[node.parameterSize for node in nodes],
            stash_bytes=[node.activationSize for node in nodes],
            edges=ends,
            edge_bytes=[size for _, _, size in edges],
        )


def is_nest(data: Any) -> bool:
    """Whether an object is in NEST's form rather than in PHAZE's: it has a tiered network."""
    inside = data.get("input", data) if isinstance(data, dict) else data
    return isinstance(inside, dict) and any(field in inside for field in _NETWORK)


def nest_from_dict(data: Any, name: str = "problem", time_unit: str = "s") -> NestProblem:
    """Read a problem in NEST's input form.

    Parameters
    ----------
    data
        The problem, or an object that has it under ``input``, with a ``name``.
    name
        The name where the problem itself has none.
    time_unit
        Unit of the layers' latencies, a key of `TIME_UNITS`. NEST adds them to times of messages
        in seconds, which is the unit ``s``.

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
    >>> problem.devices, problem.tables[1].names
    (4, [0, 1])
    """
    check_one_of("time_unit", time_unit, TIME_UNITS)
    name, file = _NestFile.read(data, name)
    unit_s = TIME_UNITS[time_unit]
    return NestProblem(
        name=name,
        memory_bytes=file.maxMemoryPerDevice,
        micro_batches=int(file.mbsInBatch),
        level_sizes=file.devices_per_level,
        level_bytes_per_s=file.bws,
        level_latency_s=file.latency_per_level,
        other_degrees=file.ep_degree * file.cp_degree,
        states=_STATES[file.optimizerAlgorithm],
        recompute=file.activationRecomputation,
        tables={w: file.table(w, unit_s) for w in sorted(map(int, file.nodes))},
    )


# ---- the stages of a plan ----

_MOST_STAGES = 2**20


class _NestStages:
    """Stages of a pipeline, first to last, each with the layers ``begin`` up to ``end``.

    With a devices per stage, the last stage has devices 0 to a - 1, the stage before it the next a,
    and so on; then the next replica follows.
    """

    def __init__(self, problem: NestProblem, width: int, ranges: list[tuple[int, int]]) -> None:
        self._problem, self._ranges = problem, ranges
        self._table, self._columns = problem.tables[width], problem.tables[width].columns
        self._devices = problem.stage_devices(width)

    def _crossing(self, begin: int, end: int, out: bool = False) -> Any:
        """Mark the edges that enter the layers ``begin`` up to ``end``, or leave them."""
        first, last = self._columns["edge_from"], self._columns["edge_to"]
        if out:
            return (first >= begin) & (first < end) & (last >= end)
        return (first < begin) & (last >= begin) & (last < end)

    def _tiers(self, begins: Any) -> Any:
        """Lowest network level that contains each device and its counterpart in the next stage."""
        tiers = np.full(len(begins), len(self._problem.level_sizes) - 1)
        inside = self._problem.devices
        for level in range(len(self._problem.level_sizes) - 1, -1, -1):
            tiers[begins // inside == (begins + self._devices) // inside] = level
            inside //= self._problem.level_sizes[level]
        return tiers

    def _messages(self, sizes: Any, tier: int) -> float:
        """Seconds of the longest of messages of some sizes that cross a tier."""
        if not len(sizes):
            return 0.0
        rate = min(self._problem.level_bytes_per_s[: tier + 1])
        once = float(sizes.max()) / rate + self._problem.level_latency_s[tier]
        return once if tier == 0 else 2.0 * once

    def load(self, stage: int, tier_in: int, tier_out: int) -> float:
        """Seconds of one micro-batch in a stage whose messages cross these tiers."""
        (begin, end), table, columns = self._ranges[stage], self._table, self._columns
        sizes, into, out = table.edge_bytes, *(self._crossing(begin, end, o) for o in (False, True))
        done = 0.0
        for k in range(begin, end):
            arrived = self._messages(sizes[into & (columns["edge_to"] == k)], tier_in)
            done = float(table.forward_s[k]) + max(done, arrived)
        back = math.fsum(table.backward_s[begin:end])
        returned = back if self._problem.recompute and stage + 1 < len(self._ranges) else 0.0
        for k in range(end - 1, begin - 1, -1):
            arrived = self._messages(sizes[out & (columns["edge_from"] == k)], tier_out)
            returned = float(table.backward_s[k]) + max(returned, arrived)
        return done + returned

    def memory_bytes(self, stage: int) -> float:
        """Bytes of one device of a stage."""
        (begin, end), table = self._ranges[stage], self._table
        activation_bytes = stash = math.fsum(table.stash_bytes[begin:end])
        if self._problem.recompute:
            stash = math.fsum(table.edge_bytes[self._crossing(begin, end)])
        state_bytes = self._problem.states * math.fsum(table.resident_bytes[begin:end])
        return state_bytes + activation_bytes + (len(self._ranges) - 1 - stage) * stash

    def _boundaries(self, replicas: int) -> Any:
        """Tiers of stage boundaries: a row per replica, from the last boundary to the first."""
        count = len(self._ranges)
        begins = np.arange(replicas * count, dtype=np.int64) * self._devices
        return self._tiers(begins).reshape(replicas, count)[:, : count - 1]

    def largest_load(self, replicas: int) -> float | None:
        """Largest load of all stages of all replicas; None where there are too many stages."""
        count = len(self._ranges)
        inside = math.prod(self._problem.level_sizes[:-1])
        period = inside // math.gcd(inside, count * self._devices)  # tiers repeat with this period
        replicas = min(replicas, period)
        if replicas * count > _MOST_STAGES:
            return None
        tiers = self._boundaries(replicas)
        largest = 0.0
        for stage in range(count):
            after = count - 1 - stage
            into = tiers[:, after] if stage > 0 else np.zeros(replicas, dtype=np.int64)
            out = tiers[:, after - 1] if after > 0 else np.zeros(replicas, dtype=np.int64)
            for pair in set(zip(into.tolist(), out.tolist(), strict=True)):
                largest = max(largest, self.load(stage, *pair))
        return largest

    def records(self) -> list[dict[str, Any]]:
        """Every stage as plain data, first to last; tiers and devices of the first replica."""
        tiers = self._boundaries(1)[0].tolist()
        count = len(self._ranges)
        stages = []
        for stage, (begin, end) in enumerate(self._ranges):
            after = count - 1 - stage
            tier_in = tiers[after] if stage > 0 else None
            tier_out = tiers[after - 1] if after > 0 else None
            stages.append(
                {
                    "devicesForStage": self._devices,
                    "nodes": list(self._table.names[begin:end]),
                    "firstDevice": after * self._devices,
                    "tierIn": tier_in,
                    "tierOut": tier_out,
                    "load": self.load(stage, tier_in or 0, tier_out or 0),
                    "memoryBytes": self.memory_bytes(stage),
                }
            )
        return stages


# ---- the solver ----


def _pointer(lengths: Sequence[int]) -> Any:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


_BY_LAYER = ("forward_s", "backward_s", "weight_bytes", "kept_bytes")
_IN_TABLE = ("forward_s", "backward_s", "resident_bytes", "stash_bytes")
"""Columns of a table of layers, by their names in the kernel and in `LayerTable`."""


def _joined(parts: Iterable[Any], dtype: str = "f8") -> Any:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in parts)])


def _kernel(
    problems: Sequence[NestProblem], all_replicas: bool, threads: int
) -> list[_core.NestAnswer]:
    listed = [(problem, width) for problem in problems for width in problem.tables]
    columns = [problem.tables[width].columns for problem, width in listed]
    names = zip(_BY_LAYER, _IN_TABLE, strict=True)
    return _core.place_nest(
        networks={
            "level_ptr": _pointer([len(p.level_sizes) for p in problems]),
            "level_size": _joined((p.level_sizes for p in problems), "i8"),
            "level_bytes_per_s": _joined(p.level_bytes_per_s for p in problems),
            "level_latency_s": _joined(p.level_latency_s for p in problems),
        },
        layers={
            "layer_ptr": _pointer([len(c["forward_s"]) for c in columns]),
            **{name: _joined(c[own] for c in columns) for name, own in names},
        },
        edges={
            "edge_ptr": _pointer([len(c["edge_from"]) for c in columns]),
            "edge_from": _joined((c["edge_from"] for c in columns), "i4"),
            "edge_to": _joined((c["edge_to"] for c in columns), "i4"),
            "edge_bytes": _joined(c["edge_bytes"] for c in columns),
        },
        stage_devices=np.array(
            [min(p.stage_devices(w), _core.MAX_NEST_DEVICES + 1) for p, w in listed], dtype="i8"
        ),
        width_ptr=_pointer([len(p.tables) for p in problems]),
        memory_bytes=np.array([p.memory_bytes for p in problems], dtype="f8"),
        states=np.array([p.states for p in problems], dtype="f8"),
        micro_batches=np.array([p.micro_batches for p in problems], dtype="i8"),
        recompute=np.array([p.recompute for p in problems], dtype="u1"),
        all_replicas=all_replicas,
        threads=threads,
    )


def _reason(problem: NestProblem, bytes_needed: float, stages: int, at: int) -> str:
    """Describe why nothing fits, and which change would help."""
    if at < 0:
        width = next(iter(problem.tables))
        took = problem.stage_devices(width)
        return (
            f"a stage of width {width} takes {took} devices (width x ep_degree x cp_degree), "
            f"and maxDevices is {problem.devices}"
        )
    over = bytes_needed - problem.memory_bytes
    plural = "s" if stages > 1 else ""
    text = (
        f"at best, with width {list(problem.tables)[at]} and {stages} stage{plural}, the fullest "
        f"device needs {format_bytes(bytes_needed)}, {format_bytes(over)} ({math.ceil(over)} "
        "bytes) over maxMemoryPerDevice; it would fit with maxMemoryPerDevice "
        f"{math.ceil(bytes_needed)}"
    )
    tables = problem.tables.values()
    last = (problem.states * w.resident_bytes[-1] + w.stash_bytes[-1] for w in tables)
    if all(size > problem.memory_bytes for size in last):
        text += (
            ". The last layer alone does not fit: here NEST turns to ZeRO, whose time comes from "
            "its simulator and is not part of this problem"
        )
    return text


def unplanned(name: str, status: str, reason: str, solve_s: float = 0.0) -> dict[str, Any]:
    """Return the answer to a problem without a plan, with the reason."""
    plan = dict.fromkeys(("finalTimePerBatch", "bound", "p", "t", "d"))
    answer = {"name": name, "status": status, "reason": reason, **plan}
    return {**answer, "stages": [], "solve_s": solve_s}


def _answer(problem: NestProblem, answer: _core.NestAnswer) -> dict[str, Any]:
    if answer.status:
        raise InvalidInputError(f"{problem.name}: {_core.STATUS_SENTENCES[answer.status]}")
    if answer.width < 0:
        reason = _reason(problem, answer.needed_bytes, answer.needed_stages, answer.needed_width)
        return unplanned(problem.name, "infeasible", reason, answer.seconds)
    time_s, load_s, replicas, begins = answer.time_s, answer.load_s, answer.replicas, answer.begins
    width = list(problem.tables)[answer.width]
    cuts = [*begins.tolist(), len(problem.tables[width])]
    count = len(begins)
    rounds = -(-problem.micro_batches // replicas) + count - 1
    priced = _NestStages(problem, width, list(pairwise(cuts)))
    sync_s = time_s - load_s * rounds
    all_load_s = priced.largest_load(replicas)
    all_time_s = None if all_load_s is None else max(all_load_s, load_s) * rounds + sync_s
    return {
        "name": problem.name,
        "status": "optimal",
        "finalTimePerBatch": time_s,
        "bound": time_s,
        "p": count,
        "t": width,
        "d": replicas,
        "stages": priced.records(),
        "solve_s": answer.seconds,
        "breakdown": {
            "largest_load": load_s,
            "rounds": rounds,
            "compute": load_s * rounds,
            "gradient_sync": sync_s,
        },
        "allReplicasTimePerBatch": all_time_s,
    }


def solve_nest(
    problems: Sequence[NestProblem], threads: int | None = None, replicas: str = "first"
) -> list[dict[str, Any]]:
    """Solve problems as `nest_from_dict` reads them; the GIL is released.

    Parameters
    ----------
    problems
        One or many.
    threads
        At most this many threads, by default all cores; the answers do not depend on it.
    replicas
        ``first`` prices messages between stages in the first replica, as NEST does; ``all`` in
        every replica, whose slowest counts (at most 65,536 devices).

    Returns
    -------
    list of dict
        One for each problem: ``status`` (optimal or infeasible, with a ``reason``),
        ``finalTimePerBatch``, ``p`` stages, ``t`` tensor width, ``d`` replicas, ``stages`` first to
        last, ``solve_s``; ``allReplicasTimePerBatch`` is the time of that plan with every replica
        priced (None where there are too many replicas).

    Raises
    ------
    InvalidInputError
        Where an argument is not accepted.

    Examples
    --------
    >>> node = {"optimalLatencyFw": 1.0, "optimalLatencyBw": 2.0}
    >>> node |= {"parameterSize": 10, "activationSize": 5}
    >>> problem = nest_from_dict(
    ...     {
    ...         "maxDevices": 4, "devices_per_level": [2, 2], "bws": [10.0, 1.0],
    ...         "latency_per_level": [0.0, 0.0], "maxMemoryPerDevice": 30, "mbsInBatch": 8,
    ...         "nodes": {"1": [{"id": 0, **node}, {"id": 1, **node}]},
    ...         "edges": {"1": [{"sourceId": 0, "destId": 1, "communicationCost": 1}]},
    ...         "activationRecomputation": False, "optimizerAlgorithm": "SGD",
    ...     }
    ... )
    >>> plan = solve_nest([problem])[0]
    >>> plan["p"], plan["d"], round(plan["finalTimePerBatch"], 6)
    (2, 1, 27.9)
    """
    check_one_of("replicas", replicas, PRICED_REPLICAS)
    for problem in problems:
        if replicas == "all" and problem.devices > _core.MAX_NEST_REPLICATED:
            raise InvalidInputError(
                f"{problem.name}: replicas: all is not accepted with {problem.devices} devices; "
                f"expected at most {_core.MAX_NEST_REPLICATED}"
            )
    records = _kernel(problems, replicas == "all", thread_count(threads))
    return [_answer(*pair) for pair in zip(problems, records, strict=True)]
