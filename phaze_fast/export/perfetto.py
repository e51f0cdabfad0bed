"""Timelines as Chrome trace events, which Perfetto and chrome://tracing open.

The format: Google's Trace Event Format document; times are microseconds. A step has a process for
each stage, with a track of passes, a track of the work after them and a counter of memory; a layer
has a process for each kind of core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phaze_fast.planning.timeline import Timeline
from phaze_fast.schedule import LayerSchedule

Event = dict[str, Any]

_MICRO = 1e6
_GIB = 2.0**30
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_NAMES["F&B"] = "forward and backward"
_RESOURCES = ("tensor cores", "vector cores", "network")


def _named(pid: int, process: str, tracks: Sequence[str]) -> list[Event]:
    """Return the events that name a process and its tracks and fix their order."""
    labels = [
        (0, "process_name", {"name": process}),
        (0, "process_sort_index", {"sort_index": pid}),
    ]
    labels += [(tid, "thread_name", {"name": track}) for tid, track in enumerate(tracks, 1)]
    return [
        {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}
        for tid, name, args in labels
    ]


def _slice(
    pid: int, tid: int, name: str, kind: str, start_s: float, end_s: float, args: Event
) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": kind,
        "ts": _MICRO * start_s,
        "dur": _MICRO * (end_s - start_s),
        "args": args,
    }


def step_trace(timeline: Timeline) -> dict[str, Any]:
    """Write a step as trace events.

    Parameters
    ----------
    timeline
        The step, from `phaze_fast.planning.timeline`.

    Returns
    -------
    dict
        JSON of the trace event format. The last slice ends when the step does.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> from phaze_fast.planning import timeline
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> played = timeline("llama2-7b", cluster, {"pp": 2, "dp": 4, "global_batch": 32, "zero": 1})
    >>> events = step_trace(played)["traceEvents"]
    >>> ends = [e["ts"] + e["dur"] for e in events if e["ph"] == "X"]
    >>> abs(max(ends) / 1e6 / played.plan.time_s - 1) < 1e-9
    True
    """
    plan, events = timeline.plan, []
    for stage in range(plan.pp):
        pid, layers = stage + 1, plan.stages[stage].layers
        kinds = ", ".join(f"{n} {kind}" for kind, n in plan.stages[stage].kinds.items())
        title = f"stage {stage}: {kinds}"
        events += _named(pid, title, ("passes", "gradients, weights, optimiser"))
        for row in timeline.of_stage(stage).tolist():
            _, code, chunk, _, micro_batch, other, start_s, end_s = row
            letter = timeline.kinds[code]
            name = f"{letter} {micro_batch}" if other < 0 else f"F {micro_batch} & B {other}"
            args = {"micro-batch": micro_batch, "chunk": chunk, "layers": len(layers)}
            events.append(_slice(pid, 1, name, _NAMES[letter], start_s, end_s, args))
        parts = {k: v for k, v in plan.parts_s.items() if k in ("data_comm", "optimizer")}
        name = "gradients and weights not hidden, optimiser"
        events.append(_slice(pid, 2, name, "optimiser", timeline.passes_s, plan.time_s, parts))
        counter = {"ph": "C", "pid": pid, "tid": 0, "name": "memory (GiB)"}
        for at_s, bytes_ in zip(*(array.tolist() for array in timeline.memory(stage)), strict=True):
            events.append({**counter, "ts": _MICRO * at_s, "args": {"held": bytes_ / _GIB}})
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"plan": str(plan), "step_s": plan.time_s},
    }


def layer_trace(schedules: Sequence[LayerSchedule], unit_s: float = 1.0) -> dict[str, Any]:
    """Write schedules of layers as trace events, one after another in time.

    Parameters
    ----------
    schedules
        Results of `phaze_fast.schedule`.
    unit_s
        Seconds of one unit of their latencies.

    Examples
    --------
    >>> from phaze_fast.schedule import LayerInstance, schedule_instances
    >>> modes = (((1, 4.0), (0, 2.0)),)
    >>> layer = LayerInstance("l", ("a",), (1,), modes, (), (2, 1, 0), (0,))
    >>> events = layer_trace(schedule_instances([layer]))["traceEvents"]
    >>> [e["dur"] for e in events if e["ph"] == "X"]
    [2000000.0]
    """
    events: list[Event] = []
    begin_s = 0.0
    lanes: dict[int, int] = {}
    for schedule in schedules:
        layer = schedule.instance.name
        for pid, slices in _of_resources(schedule).items():
            ends: list[float] = []
            for start, end, name, cores in slices:
                free = [k for k, until in enumerate(ends) if until <= start + 1e-12 * end]
                lane = free[0] if free else len(ends)
                ends[lane : lane + 1] = [end]
                args = {"cores": cores, "layer": layer}
                first, last = begin_s + unit_s * start, begin_s + unit_s * end
                events.append(_slice(pid, lane + 1, name, layer, first, last, args))
            lanes[pid] = max(lanes.get(pid, 0), len(ends))
        begin_s += unit_s * schedule.makespan
    named = [
        event
        for pid, count in sorted(lanes.items())
        for event in _named(pid, _RESOURCES[pid - 1], [f"lane {k}" for k in range(count)])
    ]
    return {"traceEvents": named + events, "displayTimeUnit": "ms"}


def _of_resources(schedule: LayerSchedule) -> dict[int, list[tuple[float, float, str, int]]]:
    """Return the operators by the kind of core that they occupy, earliest first."""
    names, occupied = schedule.instance.names, schedule.cores_used
    parts: dict[int, list[tuple[float, float, str, int]]] = {}
    rows = zip(schedule.starts, schedule.durations, names, occupied, strict=True)
    for start, duration, name, cores_by_kind in rows:
        for pid, cores in enumerate(cores_by_kind, 1):
            if cores and duration > 0:
                parts.setdefault(pid, []).append((start, start + duration, name, cores))
    return {pid: sorted(slices) for pid, slices in parts.items()}
