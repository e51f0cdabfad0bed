"""Placement problems and answers in the form of the public PHAZE program.

The form: one JSON object with ``nodes`` and ``edges`` by tensor-parallel width, sizes in bytes,
latencies in any unit, ``bandwidth`` in bytes per that unit. Fields are checked one by one, so that
what is wrong is named.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.placement.problems import Placement, PublishedProblem, place_batch
from phaze_fast.placement.table import LayerTable
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes

__all__ = ["answer", "problem_from_dict", "read_problems", "solve_published"]

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


def _number(record: dict[str, Any], key: str, where: str, whole: bool = False) -> float:
    if key not in record:
        raise InvalidInputError(f"{where}{key}: missing; expected a number")
    value = record[key]
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < 0 or (whole and value != int(value)):
        kind = "a whole number" if whole else "a finite number"
        raise InvalidInputError(
            f"{where}{key}: {value!r} is not accepted; expected {kind}, zero or more"
        )
    return float(value)


def _known(record: Any, accepted: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise InvalidInputError(
            f"{where}: {type(record).__name__} is not accepted; expected an object"
        )
    for key in record:
        if key not in accepted:
            raise InvalidInputError(
                f"{where}{'.' * bool(where)}{key}: unknown; {nearest(key, accepted)}"
            )
    return record


def _ordered(ids: list[int], edges: list[tuple[int, int, float]], where: str) -> list[int]:
    """Order ids so that edges go forward; smaller ids first where there is a choice."""
    waiting = dict.fromkeys(ids, 0)
    after: dict[int, list[int]] = {i: [] for i in ids}
    for a, b, _ in edges:
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
    if len(order) != len(ids):
        left = sorted(set(ids) - set(order))
        raise InvalidInputError(f"{where}: a cycle through {left[:5]} is not accepted")
    return order


def _nodes(records: Any, where: str) -> dict[int, dict[str, Any]]:
    if not isinstance(records, list) or not records:
        raise InvalidInputError(f"{where}: expected a list of at least one node")
    nodes: dict[int, dict[str, Any]] = {}
    for k, record in enumerate(records):
        at = f"{where}[{k}]"
        node = _known(record, (*_NODE, "isTensorParallelized"), at)
        key = node.get("id")
        if not isinstance(key, int) or isinstance(key, bool):
            raise InvalidInputError(f"{at}.id: {key!r} is not accepted; expected a whole number")
        if key in nodes:
            raise InvalidInputError(f"{at}.id: {key} is there twice; expected every id once")
        wide = node.get("isTensorParallelized", False)
        if not isinstance(wide, bool):
            raise InvalidInputError(
                f"{at}.isTensorParallelized: {wide!r} is not accepted; expected true or false"
            )
        values = {name: _number(node, name, f"{at}.") for name in _NODE[1:]}
        nodes[key] = {**values, "wide": wide}
    return nodes


def _edges(records: Any, ids: dict[int, Any], where: str) -> list[tuple[int, int, float]]:
    if not isinstance(records, list):
        raise InvalidInputError(f"{where}: expected a list of edges")
    edges = []
    for k, record in enumerate(records):
        at = f"{where}[{k}]"
        edge = _known(record, _EDGE, at)
        for end in ("sourceId", "destId"):
            if edge.get(end) not in ids or isinstance(edge.get(end), bool):
                raise InvalidInputError(f"{at}.{end}: {edge.get(end)!r} is no id of a node")
        if edge["sourceId"] == edge["destId"]:
            raise InvalidInputError(f"{at}: an edge from {edge['sourceId']} to itself")
        cost = _number(edge, "communicationCost", f"{at}.")
        edges.append((edge["sourceId"], edge["destId"], cost))
    return edges


def _table(nodes: Any, edges: Any, width: str, bandwidth: float, state: float) -> LayerTable:
    found = _nodes(nodes, f"nodes.{width}")
    listed = _edges(edges, found, f"edges.{width}")
    order = _ordered(list(found), listed, f"edges.{width}")
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
    if isinstance(data, dict) and isinstance(data.get("input"), dict):
        name, data = str(data.get("name", name)), data["input"]
    record = _known(data, (*_REQUIRED, *_IGNORED), "")
    for key in _REQUIRED:
        if key not in record:
            raise InvalidInputError(f"{key}: missing; expected it beside {', '.join(_REQUIRED)}")
    for key in _COUNTS:
        if not 1 <= _number(record, key, "", whole=True) <= 2**29:
            raise InvalidInputError(
                f"{key}: {record[key]!r} is not accepted; expected from 1 to 2^29"
            )
    bandwidth = _number(record, "bandwidth", "")
    if bandwidth == 0:
        raise InvalidInputError("bandwidth: 0 is not accepted; expected bytes per unit of time")
    again, algorithm = record["activationRecomputation"], record["optimizerAlgorithm"]
    if not isinstance(again, bool):
        raise InvalidInputError(
            f"activationRecomputation: {again!r} is not accepted; expected true or false"
        )
    if algorithm not in _STATE:
        raise InvalidInputError(
            f"optimizerAlgorithm: {algorithm!r} is not accepted; {nearest(str(algorithm), _STATE)}"
        )
    nodes, edges = record["nodes"], record["edges"]
    if not isinstance(nodes, dict) or not nodes:
        raise InvalidInputError("nodes: expected an object with a list of nodes for each width")
    if not isinstance(edges, dict) or set(edges) != set(nodes):
        raise InvalidInputError(f"edges: expected lists for the widths of nodes, {list(nodes)}")
    tables = {}
    for width in nodes:
        if not (width.isascii() and width.isdigit() and int(width) >= 1):
            raise InvalidInputError(f"nodes.{width}: expected a width, a whole number from 1 up")
        tables[int(width)] = _table(nodes[width], edges[width], width, bandwidth, _STATE[algorithm])
    return PublishedProblem(
        tables=tables,
        devices=int(record["maxDevices"]),
        memory_bytes=_number(record, "maxMemoryPerDevice", ""),
        microbatches=int(record["mbsInBatch"]),
        recompute=again,
        name=name,
    )


def read_problems(path: Path | str) -> Iterator[PublishedProblem]:
    """Read a problem from a .json file, or many from a .jsonl file, one a line."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidInputError(f"{file}: cannot be read: {reason}") from None
    lines = text.splitlines() if file.suffix == ".jsonl" else [text]
    if not any(line.strip() for line in lines):
        raise InvalidInputError(f"{file}: it is empty; expected at least one problem")
    for number, line in enumerate(lines, 1):
        if file.suffix == ".jsonl" and not line.strip():
            continue
        where = f"{file}:{number}" if file.suffix == ".jsonl" else str(file)
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInputError(
                f"{where}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
            ) from None
        except RecursionError:
            raise InvalidInputError(f"{where}: nested too deeply") from None
        try:
            yield problem_from_dict(data, f"{file.stem}:{number}" if len(lines) > 1 else file.stem)
        except InvalidInputError as error:
            raise InvalidInputError(f"{where}: {error}") from None


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


def answer(problem: PublishedProblem, found: Placement) -> dict[str, Any]:
    """Give an answer in the public program's output fields, and ours beside them."""
    if found.status != "optimal" or found.table is None:
        return {
            "name": problem.name,
            "feasible": False,
            "status": "infeasible",
            "reason": _why_not(problem),
            "stages": [],
            "dataParallelDegree": None,
            "tensorParallelDegree": None,
            "finalTimePerBatch": None,
            "bound": None,
            "solve_s": found.solve_s,
            "memory": None,
        }
    table = found.table
    stages = found.details
    rounds = -(-problem.microbatches // found.replicas) + len(found.stages) - 1
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
