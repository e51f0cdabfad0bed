"""Placement problems and answers in the form of the public PHAZE program.

A problem is one JSON object with ``nodes`` and ``edges`` by tensor-parallel width, sizes in bytes,
latencies in any unit and ``bandwidth`` in bytes per that unit.
"""
# ruff: noqa: N815

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from phaze_fast.papers.placement import LayerTable, Placement, PublishedProblem, place, place_batch
from phaze_fast.papers.problem_files import ProblemFile, Rate, Whole
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes

_STATES = {"SGD": 2.0, "Adam": 3.0}  # weights, gradients and moments, as multiples of the weights


class _PublishedFile(ProblemFile):
    bandwidth: Rate
    """Bytes per unit of the latencies."""
    mbsInBatch: Whole
    fixedPP: Any = None
    """This and the next three describe the program's own baseline; they are ignored."""
    fixedTMPC: Any = None
    fixedDP: Any = None
    numTransformerLayers: Any = None

    def table(self, width: int) -> LayerTable:
        """Return the layers of one width, in an order in which edges go forward."""
        nodes, edges = self.layers(width)
        sizes = np.array([size for _, _, size in edges])
        weights = np.array([node.parameterSize for node in nodes])
        activations = [node.activationSize for node in nodes]
        return LayerTable(
            names=tuple(node.id for node in nodes),
            forward_s=[node.optimalLatencyFw for node in nodes],
            backward_s=[node.optimalLatencyBw for node in nodes],
            stash_bytes=activations,
            resident_bytes=_STATES[self.optimizerAlgorithm] * weights,
            once_bytes=activations,
            sync_s=4.0 * weights / self.bandwidth,
            wide=[node.isTensorParallelized for node in nodes],
            edges=[(source, target) for source, target, _ in edges],
            edge_s=sizes / self.bandwidth,
            edge_bytes=sizes,
        )


def problem_from_dict(data: Any, name: str = "problem") -> PublishedProblem:
    """Read a problem in the public program's input form.

    Parameters
    ----------
    data
        The problem, or an object that has it under ``input``, with a ``name``.
    name
        The name where the problem itself has none.

    Raises
    ------
    InvalidInputError
        Where a field is missing, unknown or out of range; the message names it.

    Examples
    --------
    >>> node = {"parameterSize": 1, "activationSize": 1, "isTensorParallelized": False}
    >>> node |= {"optimalLatencyFw": 1.0, "optimalLatencyBw": 2.0}
    >>> problem = problem_from_dict(
    ...     {
    ...         "maxMemoryPerDevice": 100, "maxDevices": 4, "bandwidth": 1, "mbsInBatch": 8,
    ...         "nodes": {"1": [{"id": 0, **node}, {"id": 1, **node}]},
    ...         "edges": {"1": [{"sourceId": 0, "destId": 1, "communicationCost": 1}]},
    ...         "activationRecomputation": False, "optimizerAlgorithm": "SGD",
    ...     }
    ... )
    >>> len(problem.tables[1])
    2
    """
    name, file = _PublishedFile.read(data, name)
    return PublishedProblem(
        tables={int(width): file.table(int(width)) for width in file.nodes},
        devices=file.maxDevices,
        memory_bytes=file.maxMemoryPerDevice,
        micro_batches=file.mbsInBatch,
        recompute=file.activationRecomputation,
        name=name,
    )


def _least_memory(problem: PublishedProblem) -> Placement | None:
    """Find a placement of the least peak memory; None where the devices do not suffice."""
    placement = place(replace(problem, memory_bytes=1e300))
    if placement.table is None:
        return None
    low = problem.memory_bytes
    for _ in range(100):
        high = placement.memory_bytes
        middle = 0.5 * (low + high)
        if high - low <= 1.0 or not low < middle < high:
            break
        smaller = place(replace(problem, memory_bytes=middle))
        if smaller.table is None:
            low = middle
        else:
            placement = smaller
    return placement


def _why_not(problem: PublishedProblem) -> str:
    """Describe the fullest stage of the placement of least memory, and what would fit."""
    smallest = _least_memory(problem)
    if smallest is None or smallest.table is None:
        least = min(problem.tables)
        return (
            f"a stage of width {least} takes {least} devices, and there are {problem.devices}. It "
            f"would fit with maxDevices {least}."
        )
    terms = [stage.memory for stage in smallest.details]
    worst = max(range(len(terms)), key=lambda k: sum(terms[k].values()))
    total, term = sum(terms[worst].values()), max(terms[worst], key=lambda t: terms[worst][t])
    over = total - problem.memory_bytes
    first, last = (smallest.table.names[smallest.stages[worst][end]] for end in (0, -1))
    return (
        f"at best, with width {smallest.width} and {len(terms)} stages, stage {worst} (layers "
        f"{first} to {last}) needs {format_bytes(total)}, {format_bytes(over)} ({over:.0f} bytes) "
        f"over the {format_bytes(problem.memory_bytes)} of a device; most of it is {term} "
        f"({format_bytes(terms[worst][term])}). {_what_would(problem, smallest.memory_bytes)}"
    )


def _what_would(problem: PublishedProblem, least_bytes: float) -> str:
    """Name the changes of single fields with which a placement fits."""

    def fits(**changes: Any) -> bool:
        return place(replace(problem, **changes)).status == "optimal"

    changes = []
    if not problem.recompute and fits(recompute=True):
        changes.append("activationRecomputation true")
    if not changes and fits(devices=problem.devices * 1024):
        low, high = problem.devices, problem.devices * 1024
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(devices=middle) else (middle, high)
        changes.append(f"maxDevices {high}")
    changes.append(f"maxMemoryPerDevice {math.ceil(least_bytes)}")
    return f"It would fit with {' or '.join(changes)}."


def unplanned(name: str, status: str, reason: str, solve_s: float = 0.0) -> dict[str, Any]:
    """Return the answer to a problem without a placement, with the reason."""
    plan = ("dataParallelDegree", "tensorParallelDegree", "finalTimePerBatch", "bound", "memory")
    answer = {"name": name, "feasible": False, "status": status, "reason": reason, "stages": []}
    return {**answer, **dict.fromkeys(plan), "solve_s": solve_s}


def answer(problem: PublishedProblem, placement: Placement) -> dict[str, Any]:
    """Write a placement in the public program's output fields, with further ones."""
    if placement.status != "optimal" or placement.table is None:
        return unplanned(problem.name, "infeasible", _why_not(problem), placement.solve_s)
    table = placement.table
    stages = placement.details
    rounds = -(-problem.micro_batches // placement.replicas) + len(placement.stages) - 1
    compute = placement.max_load_s * rounds
    return {
        "name": problem.name,
        "feasible": True,
        "status": "optimal",
        "stages": [
            {"devicesForStage": stage.devices, "nodes": [table.names[i] for i in stage.layers]}
            for stage in stages
        ],
        "dataParallelDegree": placement.replicas,
        "tensorParallelDegree": placement.width,
        "finalTimePerBatch": placement.time_s,
        "bound": placement.bound_s,
        "solve_s": placement.solve_s,
        "memory": {
            "limit_bytes": problem.memory_bytes,
            "stage_bytes": [stage.memory_bytes for stage in stages],
            "stage_terms": [stage.memory for stage in stages],
        },
        "breakdown": {
            "largest_load": placement.max_load_s,
            "rounds": rounds,
            "compute": compute,
            "gradient_sync": placement.time_s - compute,
        },
    }


def solve_published(
    problems: list[PublishedProblem], threads: int | None = None
) -> list[dict[str, Any]]:
    """Solve problems; with one thread one by one, so that each is timed."""
    workers = thread_count(threads)
    if workers > 1:
        placements = place_batch(problems, workers)
    else:
        placements = [place(problem) for problem in problems]
    return [answer(*pair) for pair in zip(problems, placements, strict=True)]
