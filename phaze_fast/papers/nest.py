"""Pipelines on tiered networks, NEST's problem, solved exactly: many in one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.papers.nest_problem import NestProblem, NestWidth
from phaze_fast.papers.nest_stages import NestStages
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes

__all__ = ["PRICED_REPLICAS", "solve_nest", "unplanned"]

PRICED_REPLICAS = ("first", "all")
"""Of which replicas messages between stages count: NEST looks at the first alone."""


def _pointer(lengths: Sequence[int]) -> Any:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _joined(parts: Sequence[Any], dtype: str) -> Any:
    arrays = [np.asarray(part, dtype=dtype) for part in parts]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _kernel(
    problems: Sequence[NestProblem], all_replicas: bool, threads: int
) -> list[_core.NestAnswer]:
    listed = [(problem, width) for problem in problems for width in problem.widths]
    layers = [width for _, width in listed]
    return _core.place_nest(
        networks={
            "level_ptr": _pointer([len(p.level_sizes) for p in problems]),
            "level_size": _joined([p.level_sizes for p in problems], "i8"),
            "level_bytes_per_s": _joined([p.level_bytes_per_s for p in problems], "f8"),
            "level_latency_s": _joined([p.level_latency_s for p in problems], "f8"),
        },
        layers={
            "layer_ptr": _pointer([len(w.ids) for w in layers]),
            "forward_s": _joined([w.forward_s for w in layers], "f8"),
            "backward_s": _joined([w.backward_s for w in layers], "f8"),
            "weight_bytes": _joined([w.weight_bytes for w in layers], "f8"),
            "kept_bytes": _joined([w.kept_bytes for w in layers], "f8"),
        },
        edges={
            "edge_ptr": _pointer([len(w.edge_from) for w in layers]),
            "edge_from": _joined([w.edge_from for w in layers], "i4"),
            "edge_to": _joined([w.edge_to for w in layers], "i4"),
            "edge_bytes": _joined([w.edge_bytes for w in layers], "f8"),
        },
        stage_devices=np.array(
            [min(p.stage_devices(w), _core.MAX_NEST_DEVICES + 1) for p, w in listed], dtype="i8"
        ),
        width_ptr=_pointer([len(p.widths) for p in problems]),
        memory_bytes=np.array([p.memory_bytes for p in problems], dtype="f8"),
        states=np.array([p.states for p in problems], dtype="f8"),
        micro_batches=np.array([p.micro_batches for p in problems], dtype="i8"),
        recompute=np.array([p.recompute for p in problems], dtype="u1"),
        all_replicas=all_replicas,
        threads=threads,
    )


def _reason(problem: NestProblem, bytes_needed: float, stages: int, at: int) -> str:
    """Say why nothing fits, and what would."""
    if at < 0:
        width = problem.widths[0]
        took = problem.stage_devices(width)
        return (
            f"a stage of width {width.width} takes {took} devices (width x ep_degree x cp_degree), "
            f"and maxDevices is {problem.devices}"
        )
    over = bytes_needed - problem.memory_bytes
    plural = "s" if stages > 1 else ""
    text = (
        f"at best, with width {problem.widths[at].width} and {stages} stage{plural}, the fullest "
        f"device needs {format_bytes(bytes_needed)}, {format_bytes(over)} ({math.ceil(over)} "
        "bytes) over maxMemoryPerDevice; it would fit with maxMemoryPerDevice "
        f"{math.ceil(bytes_needed)}"
    )
    if all(_last_layer(problem, width) > problem.memory_bytes for width in problem.widths):
        text += (
            ". The last layer alone does not fit: here NEST turns to ZeRO, whose time comes from "
            "its simulator and is not part of this problem"
        )
    return text


def _last_layer(problem: NestProblem, width: NestWidth) -> float:
    return float(problem.states * width.weight_bytes[-1] + width.kept_bytes[-1])


def unplanned(name: str, status: str, reason: str, solve_s: float = 0.0) -> dict[str, Any]:
    """Give the answer to a problem that has no plan, and why."""
    return {
        "name": name,
        "status": status,
        "reason": reason,
        "finalTimePerBatch": None,
        "bound": None,
        "p": None,
        "t": None,
        "d": None,
        "stages": [],
        "solve_s": solve_s,
    }


def _answer(problem: NestProblem, found: _core.NestAnswer) -> dict[str, Any]:
    if found.status:
        raise InvalidInputError(f"{problem.name}: {_core.STATUS_SENTENCES[found.status]}")
    if found.width < 0:
        reason = _reason(problem, found.needed_bytes, found.needed_stages, found.needed_width)
        return unplanned(problem.name, "infeasible", reason, found.seconds)
    time_s, load_s, replicas, begins = found.time_s, found.load_s, found.replicas, found.begins
    width = problem.widths[found.width]
    cuts = [*begins.tolist(), len(width.ids)]
    count = len(begins)
    rounds = -(-problem.micro_batches // replicas) + count - 1
    priced = NestStages(problem, width, list(pairwise(cuts)))
    sync_s = time_s - load_s * rounds
    all_load_s = priced.largest_load(replicas)
    all_time_s = None if all_load_s is None else max(all_load_s, load_s) * rounds + sync_s
    return {
        "name": problem.name,
        "status": "optimal",
        "finalTimePerBatch": time_s,
        "bound": time_s,
        "p": count,
        "t": width.width,
        "d": replicas,
        "stages": priced.records(),
        "solve_s": found.seconds,
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
        Any number.
    threads
        At most this many threads, by default all cores; the answers do not depend on it.
    replicas
        ``first`` prices messages between stages in the first replica, as NEST does; ``all`` in
        every replica, whose slowest counts (at most 65,536 devices).

    Returns
    -------
    list of dict
        One each: ``status`` (optimal or infeasible, with a ``reason``), ``finalTimePerBatch``,
        ``p`` stages, ``t`` tensor width, ``d`` replicas, ``stages`` first to last, ``solve_s``;
        ``allReplicasTimePerBatch`` is the time of that plan with every replica priced (None
        where replicas are too many to look at one by one).

    Raises
    ------
    InvalidInputError
        Where an argument is not accepted.

    Examples
    --------
    >>> from phaze_fast.papers import nest_from_dict
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
    if replicas not in PRICED_REPLICAS:
        raise InvalidInputError(
            f"replicas: {replicas!r} is not accepted; {nearest(str(replicas), PRICED_REPLICAS)}"
        )
    for problem in problems:
        if replicas == "all" and problem.devices > _core.MAX_NEST_REPLICATED:
            raise InvalidInputError(
                f"{problem.name}: replicas: all is not accepted with {problem.devices} devices; "
                f"expected at most {_core.MAX_NEST_REPLICATED}"
            )
    found = _kernel(problems, replicas == "all", thread_count(threads))
    return [_answer(problem, each) for problem, each in zip(problems, found, strict=True)]
