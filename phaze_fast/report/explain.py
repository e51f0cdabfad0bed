"""Why a plan takes what it takes: what binds, the critical path, and what each rate is worth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import (
    Accelerator,
    Cluster,
    FlatFabric,
    MeshFabric,
    TieredFabric,
    TorusFabric,
)
from phaze_fast.models import Model
from phaze_fast.planning import Plan, PlanSpec, predict
from phaze_fast.planning.timeline import Timeline, timeline
from phaze_fast.units import format_bytes, format_time

__all__ = ["Explanation", "Worth", "difference", "explain_plan"]

_STEP = 0.01
"""A rate is changed by this share, up and down, to see what the step gains."""


@dataclass(frozen=True)
class Worth:
    """What a rate is worth."""

    what: str
    elasticity: float
    """Change of the step in percent where the rate rises by a percent; negative is faster."""
    doubled: float
    """The step with the rate doubled (a latency halved), over the step as it is."""

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {"what": self.what, "elasticity": self.elasticity, "doubled": self.doubled}


@dataclass(frozen=True)
class Explanation:
    """Why a plan takes what it takes."""

    plan: Plan
    binds: tuple[str, ...]
    """What binds, most first, a sentence each."""
    path: tuple[tuple[str, float], ...]
    """The critical path: what, and its seconds, largest first; they add up to the step."""
    worth: tuple[Worth, ...]
    """What each rate is worth, most first."""

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "time_s": self.plan.time_s,
            "binds": list(self.binds),
            "critical_path": [{"what": what, "seconds": s} for what, s in self.path],
            "worth": [each.to_dict() for each in self.worth],
        }


# ---- rates of a cluster ----


def _chip(cluster: Cluster) -> Accelerator:
    if cluster.chip is None:
        raise InvalidInputError("cluster.chip: missing; expected the chip of the devices")
    return cluster.chip


def _tensor_rate(cluster: Cluster, factor: float) -> Cluster:
    """Scale the peak, and what power leaves of it, alike: the clock stays what it is."""
    chip = _chip(cluster)
    core, tuning = chip.tensor_core, chip.tuning
    rates = {name: rate * factor for name, rate in core.rates.items()}
    steps = {name: rate * factor for name, rate in tuning.step_flops.items()}
    formats = {
        name: own.replace(sustained_flops=own.sustained_flops * factor)
        if own.sustained_flops is not None
        else own
        for name, own in tuning.formats.items()
    }
    # The limit of bf16 is scaled by the core's rates already.
    tuning = tuning.replace(step_flops=steps, formats=formats)
    return cluster.replace(chip=chip.replace(tensor_core=core.replace(rates=rates), tuning=tuning))


def _clock(cluster: Cluster, factor: float) -> Cluster:
    chip = _chip(cluster)
    return cluster.replace(chip=chip.replace(clock_hz=chip.clock_hz * factor))


def _hbm(cluster: Cluster, factor: float) -> Cluster:
    chip = _chip(cluster)
    assert chip.hbm is not None, "the plan was placed in it"
    rate = chip.hbm.bandwidth_bytes_per_s * factor
    return cluster.replace(chip=chip.replace(hbm=chip.hbm.replace(bandwidth_bytes_per_s=rate)))


def _buffer(cluster: Cluster, factor: float) -> Cluster:
    chip = _chip(cluster)
    rate = chip.buffer.bytes_per_cycle * factor
    return cluster.replace(chip=chip.replace(buffer=chip.buffer.replace(bytes_per_cycle=rate)))


def _tier(k: int, field: str) -> Callable[[Cluster, float], Cluster]:
    def scaled(cluster: Cluster, factor: float) -> Cluster:
        fabric = cluster.fabric
        assert isinstance(fabric, TieredFabric), "asked of tiers only"
        tiers = list(fabric.tiers)
        tiers[k] = tiers[k].replace(**{field: getattr(tiers[k], field) * factor})
        return cluster.replace(fabric=fabric.replace(tiers=tuple(tiers)))

    return scaled


def _link(field: str) -> Callable[[Cluster, float], Cluster]:
    def scaled(cluster: Cluster, factor: float) -> Cluster:
        fabric = cluster.fabric
        value = getattr(fabric, field) * factor
        return cluster.replace(fabric=fabric.replace(**{field: value}))

    return scaled


def _knobs(cluster: Cluster) -> dict[str, tuple[Callable[[Cluster, float], Cluster], float]]:
    """Rates of a cluster, how each is scaled, and by what it becomes twice as good."""
    found: dict[str, tuple[Callable[[Cluster, float], Cluster], float]] = {
        "tensor core rate": (_tensor_rate, 2.0),
        "clock of all cores": (_clock, 2.0),
        "HBM bandwidth": (_hbm, 2.0),
        "buffer bandwidth": (_buffer, 2.0),
    }
    fabric = cluster.fabric
    if isinstance(fabric, TieredFabric):
        for k, tier in enumerate(fabric.tiers):
            found[f"{tier.name} bandwidth"] = (_tier(k, "bandwidth_bytes_per_s"), 2.0)
            if tier.latency_s > 0:
                found[f"{tier.name} latency"] = (_tier(k, "latency_s"), 0.5)
        return found
    grid = isinstance(fabric, TorusFabric | MeshFabric)
    assert grid or isinstance(fabric, FlatFabric), "there is no other fabric"
    rate = "link_bandwidth_bytes_per_s" if grid else "bandwidth_bytes_per_s"
    latency = "hop_latency_s" if grid else "latency_s"
    found["link bandwidth"] = (_link(rate), 2.0)
    if getattr(fabric, latency) > 0:
        found["link latency"] = (_link(latency), 0.5)
    return found


def _worth(model: Model | str, cluster: Cluster, plan: Plan) -> list[Worth]:
    found = []
    for what, (scaled, better) in _knobs(cluster).items():
        low, high, twice = (
            predict(model, scaled(cluster, factor), plan).time_s
            for factor in (1.0 - _STEP, 1.0 + _STEP, better)
        )
        slope = (high - low) / (2.0 * _STEP * plan.time_s)
        found.append(Worth(what, slope, twice / plan.time_s))
    found.append(_more_memory(model, cluster, plan))
    return sorted(found, key=lambda each: each.doubled)


def _more_memory(model: Model | str, cluster: Cluster, plan: Plan) -> Worth:
    """Value HBM capacity: with more of it a stage may recompute less."""
    chip = _chip(cluster)
    assert chip.hbm is not None, "the plan was placed in it"
    free = PlanSpec.of(plan).replace(recompute="auto")

    def with_capacity(factor: float) -> float:
        larger = chip.hbm.replace(capacity_bytes=chip.hbm.capacity_bytes * factor)  # type: ignore[union-attr]
        wider = cluster.replace(chip=chip.replace(hbm=larger))
        return predict(model, wider, free).time_s

    now = with_capacity(1.0)
    slope = (with_capacity(1.0 + 10 * _STEP) - now) / (10 * _STEP * now)
    return Worth("HBM capacity (recomputing less)", slope, with_capacity(2.0) / now)


# ---- the critical path ----


def _walk(played: Timeline) -> dict[str, float]:
    """Seconds of the passes that follow one another to the end of the last, by stage and kind."""
    passes = played.passes
    slack = 1e-9 * max(played.passes_s, 1e-300)
    by_end = np.argsort(passes["end_s"], kind="stable")
    ends = passes["end_s"][by_end]
    at = int(by_end[-1])
    found: dict[str, float] = {}
    while True:
        row = passes[at]
        kind = played.kinds[int(row["kind"])]
        key = f"stage {int(row['device'])}, {_WORDS[kind]}"
        found[key] = found.get(key, 0.0) + float(row["end_s"] - row["start_s"])
        start = float(row["start_s"])
        if start <= slack:
            return found
        first = int(np.searchsorted(ends, start - slack))
        last = int(np.searchsorted(ends, start + slack, side="right"))
        before = [int(by_end[k]) for k in range(first, last) if int(by_end[k]) != at]
        before = [k for k in before if passes["start_s"][k] < start - slack / 2]
        if not before:
            return found
        own = [k for k in before if passes["device"][k] == row["device"]]
        at = own[0] if own else before[0]


_WORDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_WORDS["F&B"] = "forward and backward"


def _path(played: Timeline) -> list[tuple[str, float]]:
    found = _walk(played)
    rest = played.plan.time_s - played.passes_s
    if rest > 0:
        found["gradients and weights not hidden, optimiser"] = rest
    return sorted(found.items(), key=lambda item: -item[1])


# ---- in sentences ----


def _binds(plan: Plan) -> list[str]:
    parts = sorted(plan.parts_s.items(), key=lambda item: -item[1])
    said = [
        f"{name.replace('_comm', ' communication')}: {format_time(seconds)}, "
        f"{seconds / plan.time_s:.1%} of the step"
        for name, seconds in parts
        if seconds > 0.01 * plan.time_s
    ]
    loads = [stage.load_s for stage in plan.stages]
    slowest = max(range(plan.pp), key=loads.__getitem__)
    if plan.pp > 1:
        mean = sum(loads) / plan.pp
        said.append(
            f"stage {slowest} is the slowest: {format_time(loads[slowest])} a micro-batch, "
            f"{loads[slowest] / mean - 1:+.1%} against the mean"
        )
    fullest = max(range(plan.pp), key=lambda k: plan.stages[k].memory_bytes)
    memory = plan.stages[fullest].memory
    term = max(memory, key=lambda name: memory[name])
    left = plan.limit_bytes - plan.memory_bytes
    room = f"{format_bytes(left)} free" if left >= 0 else f"{format_bytes(-left)} too much"
    said.append(
        f"memory: stage {fullest} holds {format_bytes(plan.memory_bytes)}, {room}; most of it is "
        f"{term} ({format_bytes(memory[term])}), at the instant: {plan.stages[fullest].instant}"
    )
    return said


def explain_plan(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
) -> Explanation:
    """Say what binds a plan, its critical path, and what each rate of the hardware is worth.

    Parameters
    ----------
    model, cluster, plan
        As for `phaze_fast.predict`.

    Returns
    -------
    Explanation
        Elasticities are central differences of a percent, on the plan as it is.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    >>> given = {"tp": 2, "pp": 2, "dp": 4, "global_batch": 64, "recompute": "full"}
    >>> found = explain_plan("llama2-7b", cluster, given)
    >>> abs(sum(seconds for _, seconds in found.path) / found.plan.time_s - 1) < 1e-6
    True
    """
    played = timeline(model, cluster, plan)
    return Explanation(
        plan=played.plan,
        binds=tuple(_binds(played.plan)),
        path=tuple(_path(played)),
        worth=tuple(_worth(model, cluster, played.plan)),
    )


# ---- two plans ----


def difference(one: Plan, other: Plan) -> dict[str, Any]:
    """Set two plans side by side: fields that differ, and seconds and bytes by part.

    Returns
    -------
    dict
        ``fields`` with both values of what differs, ``parts_s`` and ``memory`` with both values
        and the difference, and ``speedup``, the first's step over the second's.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> a, b = (
    ...     pf.predict("llama2-7b", cluster, {"tp": t, "dp": 8 // t, "global_batch": 64})
    ...     for t in (2, 4)
    ... )
    >>> sorted(difference(a, b)["fields"])[:2]
    ['dp', 'micro_batches']
    """
    # What a plan is asked to be; seconds, bytes and rates follow below.
    asked = [f.name for f in fields(Plan) if f.name in PlanSpec.model_fields and f.name != "stages"]
    differ = {n: [getattr(one, n), getattr(other, n)] for n in [*asked, "micro_batches", "devices"]}
    differ |= {"recompute": [one.recompute, other.recompute]}
    sizes = [[list(stage.chunks) for stage in plan.stages] for plan in (one, other)]
    differ |= {"stages": sizes}
    parts = {
        name: [one.parts_s.get(name, 0.0), other.parts_s.get(name, 0.0)]
        for name in dict.fromkeys([*one.parts_s, *other.parts_s])
    }
    memory = {name: [one.memory[name], other.memory[name]] for name in one.memory}
    measures = ("time_s", "memory_bytes", "energy_j", "tokens_per_s", "mfu", "hfu")
    return {
        "fields": {n: pair for n, pair in differ.items() if pair[0] != pair[1]},
        "measures": {n: [getattr(one, n), getattr(other, n)] for n in measures},
        "parts_s": {n: [*pair, pair[1] - pair[0]] for n, pair in parts.items() if any(pair)},
        "memory": {n: [*pair, pair[1] - pair[0]] for n, pair in memory.items() if any(pair)},
        "speedup": one.time_s / other.time_s,
    }
