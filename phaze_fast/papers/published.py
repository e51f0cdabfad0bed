"""Placement problems and answers in the form of the public PHAZE program.

The form: one JSON object with ``nodes`` and ``edges`` by tensor-parallel width, sizes in bytes,
latencies in any unit, ``bandwidth`` in bytes per that unit. Fields are checked one by one, so that
what is wrong is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

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
from phaze_fast.papers.problem_files import read_records
from phaze_fast.papers.problems import Placement, PublishedProblem, place_batch
from phaze_fast.papers.table import LayerTable
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes

__all__ = ["answer", "problem_from_dict", "read_problems", "solve_published", "unplanned"]

_COUNTS = ("maxDevices", "mbsInBatch")
_REQUIRED = (
    "maxMemoryPerDevice",
    *_COUNTS,
    "bandwidth",
    "nodes",
    "edges",
    "activationRecomputation",
    "optimizerAlgorithm",
)
_IGNORED = ("fixedPP", "fixedTMPC", "fixedDP", "numTransformerLayers")
_NODE = ("id", "parameterSize", "activationSize", "optimalLatencyFw", "optimalLatencyBw")
_EDGE = ("sourceId", "destId", "communicationCost")
_STATE = {"SGD": 2.0, "Adam": 3.0}  # weights, gradients and moments, as multiples of the weights


def _nodes(records: Any, where: str) -> dict[int, dict[str, Any]]:
    if not isinstance(records, list) or not records:
        raise InvalidInputError(
            f"{where}: {shown(records)} is not accepted; expected a list of at least one node"
        )
    nodes: dict[int, dict[str, Any]] = {}
    for k, record in enumerate(records):
        at = f"{where}[{k}]"
        node = known(record, (*_NODE, "isTensorParallelized"), at)
        key = key_of(node, "id", f"{at}.", None)
        if key in nodes:
            raise InvalidInputError(f"{at}.id: {key} is there twice; expected every id once")
        wide = flag({"isTensorParallelized": False, **node}, "isTensorParallelized", f"{at}.")
        values = {name: number(node, name, f"{at}.") for name in _NODE[1:]}
        nodes[key] = {**values, "wide": wide}
    return nodes


def _edges(records: Any, ids: dict[int, Any], where: str) -> list[tuple[int, int, float]]:
    if not isinstance(records, list):
        raise InvalidInputError(f"{where}: {shown(records)} is not accepted; expected a list")
    edges = []
    for k, record in enumerate(records):
        at = f"{where}[{k}]"
        edge = known(record, _EDGE, at)
        source, target = (key_of(edge, end, f"{at}.", ids) for end in ("sourceId", "destId"))
        if source == target:
            raise InvalidInputError(f"{at}: an edge from {source} to itself")
        edges.append((source, target, number(edge, "communicationCost", f"{at}.")))
    return edges


def _table(nodes: Any, edges: Any, width: str, bandwidth: float, state: float) -> LayerTable:
    found = _nodes(nodes, f"nodes.{width}")
    listed = _edges(edges, found, f"edges.{width}")
    order = ordered(found, listed, f"edges.{width}")
    place_of = {key: i for i, key in enumerate(order)}
    column = {name: np.array([found[key][name] for key in order]) for name in _NODE[1:]}
    sizes = np.array([cost for _, _, cost in listed])
    weights, activations = column["parameterSize"], column["activationSize"]
    return LayerTable(
        names=tuple(order),
        forward_s=column["optimalLatencyFw"],
        backward_s=column["optimalLatencyBw"],
        stash_bytes=activations,
        resident_bytes=state * weights,
        once_bytes=activations,
        sync_s=4.0 * weights / bandwidth,
        wide=[found[key]["wide"] for key in order],
        edges=[(place_of[a], place_of[b]) for a, b, _ in listed],
        edge_s=sizes / bandwidth,
        edge_bytes=sizes,
    )


def problem_from_dict(data: Any, name: str = "problem") -> PublishedProblem:
    """Read a problem in the public program's input form.

    Parameters
    ----------
    data
        The object; also one that holds it under ``input``, with a ``name`` beside.
    name
        What to call it where it has no name.

    Raises
    ------
    InvalidInputError
        Where a field is missing, unknown or out of range; the message names it.

    Examples
    --------
    >>> node = {"parameterSize": 1, "activationSize": 1, "isTensorParallelized": False}
    >>> node |= {"optimalLatencyFw": 1.0, "optimalLatencyBw": 2.0}
    >>> found = problem_from_dict(
    ...     {
    ...         "maxMemoryPerDevice": 100, "maxDevices": 4, "bandwidth": 1, "mbsInBatch": 8,
    ...         "nodes": {"1": [{"id": 0, **node}, {"id": 1, **node}]},
    ...         "edges": {"1": [{"sourceId": 0, "destId": 1, "communicationCost": 1}]},
    ...         "activationRecomputation": False, "optimizerAlgorithm": "SGD",
    ...     }
    ... )
    >>> len(found.tables[1])
    2
    """
    name, data = named(data, name)
    record = known(data, (*_REQUIRED, *_IGNORED), "")
    for key in _REQUIRED:
        if key not in record:
            raise InvalidInputError(f"{key}: missing; expected it beside {', '.join(_REQUIRED)}")
    devices, micro_batches = (whole(record, key, "", least=1) for key in _COUNTS)
    bandwidth = number(record, "bandwidth", "", least=1e-100)
    algorithm = record["optimizerAlgorithm"]
    if not isinstance(algorithm, str) or algorithm not in _STATE:
        raise InvalidInputError(
            f"optimizerAlgorithm: {shown(algorithm)} is not accepted; "
            f"{nearest(str(algorithm)[:60], _STATE)}"
        )
    nodes, edges = record["nodes"], record["edges"]
    tables = {
        width: _table(
            nodes[str(width)], edges[str(width)], str(width), bandwidth, _STATE[algorithm]
        )
        for width in widths(record)
    }
    return PublishedProblem(
        tables=tables,
        devices=devices,
        memory_bytes=number(record, "maxMemoryPerDevice", ""),
        micro_batches=micro_batches,
        recompute=flag(record, "activationRecomputation", ""),
        name=name,
    )


def read_problems(path: Path | str) -> Iterator[PublishedProblem]:
    """Read a problem from a .json file, or many from a .jsonl file, one a line."""
    for record in read_records(path):
        try:
            if record.error:
                raise InvalidInputError(record.error)
            yield problem_from_dict(record.data, record.name)
        except InvalidInputError as error:
            raise InvalidInputError(f"{record.where}: {error}") from None


def _leanest(problem: PublishedProblem) -> tuple[PublishedProblem, Placement] | None:
    """Find the least memory that a plan fits into, and that plan."""
    high = replace(problem, memory_bytes=1e300)
    found = place_batch([high])[0]
    if found.table is None:
        return None
    low = problem.memory_bytes
    for _ in range(100):
        most = found.memory_bytes
        high = replace(problem, memory_bytes=most)
        middle = 0.5 * (low + most)
        if most - low <= 1.0 or not low < middle < most:
            break
        better = place_batch([replace(problem, memory_bytes=middle)])[0]
        if better.table is None:
            low = middle
        else:
            found = better
    return high, found


def _why_not(problem: PublishedProblem) -> str:
    """Say which stage is over by how much in the leanest plan, and what would fit."""
    leanest = _leanest(problem)
    if leanest is None:
        least = min(problem.tables)
        return (
            f"a stage of width {least} takes {least} devices, and there are {problem.devices}. It "
            f"would fit with maxDevices {least}."
        )
    lean, found = leanest
    terms = [stage.memory for stage in found.details]
    names = found.table.names if found.table is not None else ()
    worst = max(range(len(terms)), key=lambda k: sum(terms[k].values()))
    total, term = sum(terms[worst].values()), max(terms[worst], key=lambda t: terms[worst][t])
    over = total - problem.memory_bytes
    first, last = (names[found.stages[worst][end]] for end in (0, -1))
    return (
        f"at best, with width {found.width} and {len(terms)} stages, stage {worst} (layers {first} "
        f"to {last}) needs {format_bytes(total)}, {format_bytes(over)} ({over:.0f} bytes) over the "
        f"{format_bytes(problem.memory_bytes)} of a device; most of it is {term} "
        f"({format_bytes(terms[worst][term])}). {_what_would(problem, lean.memory_bytes)}"
    )


def _what_would(problem: PublishedProblem, least: float) -> str:
    fitting = []
    if not problem.recompute:
        again = replace(problem, recompute=True)
        if place_batch([again])[0].status == "optimal":
            fitting.append("activationRecomputation true")
    more = replace(problem, devices=problem.devices * 1024)
    if not fitting and place_batch([more])[0].status == "optimal":
        low, high = problem.devices, problem.devices * 1024
        while high - low > 1:
            middle = (low + high) // 2
            fits = place_batch([replace(problem, devices=middle)])[0].status == "optimal"
            low, high = (low, middle) if fits else (middle, high)
        fitting.append(f"maxDevices {high}")
    fitting.append(f"maxMemoryPerDevice {math.ceil(least)}")
    return f"It would fit with {' or '.join(fitting)}."


def unplanned(name: str, status: str, reason: str, solve_s: float = 0.0) -> dict[str, Any]:
    """Give the answer to a problem that has no plan, and why."""
    return {
        "name": name,
        "feasible": False,
        "status": status,
        "reason": reason,
        "stages": [],
        "dataParallelDegree": None,
        "tensorParallelDegree": None,
        "finalTimePerBatch": None,
        "bound": None,
        "solve_s": solve_s,
        "memory": None,
    }


def answer(problem: PublishedProblem, found: Placement) -> dict[str, Any]:
    """Give an answer in the public program's output fields, and ours beside them."""
    if found.status != "optimal" or found.table is None:
        return unplanned(problem.name, "infeasible", _why_not(problem), found.solve_s)
    table = found.table
    stages = found.details
    rounds = -(-problem.micro_batches // found.replicas) + len(found.stages) - 1
    compute = found.max_load_s * rounds
    return {
        "name": problem.name,
        "feasible": True,
        "status": "optimal",
        "stages": [
            {"devicesForStage": stage.devices, "nodes": [table.names[i] for i in stage.layers]}
            for stage in stages
        ],
        "dataParallelDegree": found.replicas,
        "tensorParallelDegree": found.width,
        "finalTimePerBatch": found.time_s,
        "bound": found.bound_s,
        "solve_s": found.solve_s,
        "memory": {
            "limit_bytes": problem.memory_bytes,
            "stage_bytes": [stage.memory_bytes for stage in stages],
            "stage_terms": [stage.memory for stage in stages],
        },
        "breakdown": {
            "largest_load": found.max_load_s,
            "rounds": rounds,
            "compute": compute,
            "gradient_sync": found.time_s - compute,
        },
    }


def solve_published(
    problems: list[PublishedProblem], threads: int | None = None
) -> list[dict[str, Any]]:
    """Solve problems one after another, each timed; answers as `answer` gives them."""
    workers = thread_count(threads)
    if workers > 1:
        placed = place_batch(problems, workers)
    else:
        placed = [place_batch([problem])[0] for problem in problems]
    return [answer(problem, found) for problem, found in zip(problems, placed, strict=True)]
