"""Why a step takes its time: bottlenecks, critical path, and the value of each hardware rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from phaze_fast.explore import scaled_cluster, tier_names
from phaze_fast.hardware import Cluster, FlatFabric, TieredFabric
from phaze_fast.models import Model
from phaze_fast.planning import Plan, PlanSpec, predict
from phaze_fast.planning.timeline import Timeline, timeline
from phaze_fast.units import format_bytes, format_time

_STEP = 0.01
"""Relative change of a rate, up and down, in the central difference."""


@dataclass(frozen=True)
class Worth:
    """Effect of one hardware parameter (a rate, a latency, HBM capacity) on the step time."""

    what: str
    """Name of the rate."""
    elasticity: float
    """Change of the step time in percent where the rate rises by a percent; negative is faster."""
    doubled: float
    """The step time with the rate doubled (a latency halved), over that of the plan as it is."""


@dataclass(frozen=True)
class Explanation:
    """Bottlenecks, critical path and value of each hardware rate of a plan."""

    plan: Plan
    binds: tuple[str, ...]
    """The bottlenecks of time and memory, largest first, one sentence for each."""
    path: tuple[tuple[str, float], ...]
    """Parts of the critical path and their seconds, largest first; the sum is the step time."""
    worth: tuple[Worth, ...]
    """The effect of each hardware rate on the step time, the largest first."""

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "time_s": self.plan.time_s,
            "binds": list(self.binds),
            "critical_path": [{"what": part, "seconds": s} for part, s in self.path],
            "worth": [asdict(rate) for rate in self.worth],
        }


# ---- rates of a cluster ----


def _tensor_rate(cluster: Cluster, factor: float) -> Cluster:
    """Scale both the peak rate and the rate sustained under the power limit, at the same clock."""
    chip = cluster.chip
    assert chip is not None, "the plan was timed on it"
    core, tuning = chip.tensor_core, chip.tuning
    rates = {name: rate * factor for name, rate in core.rates.items()}
    steps = {name: rate * factor for name, rate in tuning.step_flops.items()}
    formats = {
        name: own.replace(sustained_flops=own.sustained_flops * factor)
        if own.sustained_flops is not None
        else own
        for name, own in tuning.formats.items()
    }
    # `sustained_flops` of bf16 is multiplied by the core's rate already.
    tuning = tuning.replace(step_flops=steps, formats=formats)
    return cluster.replace(chip=chip.replace(tensor_core=core.replace(rates=rates), tuning=tuning))


def _scaled(record: Any, factor: float, path: str) -> Any:
    """Scale the number at a dotted path of nested records."""
    name, _, rest = path.partition(".")
    value = getattr(record, name)
    return record.replace(**{name: _scaled(value, factor, rest) if rest else value * factor})


def _link(cluster: Cluster, factor: float, tier: int, latency: bool) -> Cluster:
    """Scale bandwidth or latency of the links of one tier of a fabric."""
    factors = [factor if k == tier else 1.0 for k in range(len(tier_names(cluster)))]
    unchanged = [1.0] * len(factors)
    return scaled_cluster(cluster, *((unchanged, factors) if latency else (factors, unchanged)))


Scaling = Callable[[Cluster, float], Cluster]
"""Scales one rate of a cluster by a factor."""


def _rates(cluster: Cluster) -> dict[str, tuple[Scaling, float]]:
    """List the rates of a cluster: how to scale each, and the factor that doubles its speed."""
    paths = {
        "clock of all cores": "chip.clock_hz",
        "HBM bandwidth": "chip.hbm.bandwidth_bytes_per_s",
        "buffer bandwidth": "chip.buffer.bytes_per_cycle",
    }
    rates: dict[str, tuple[Scaling, float]] = {"tensor core rate": (_tensor_rate, 2.0)}
    for name, path in paths.items():
        rates[name] = (partial(_scaled, path=path), 2.0)
    fabric = cluster.fabric
    if isinstance(fabric, TieredFabric):
        latencies_s = [tier.latency_s for tier in fabric.tiers]
    else:
        latencies_s = [fabric.latency_s if isinstance(fabric, FlatFabric) else fabric.hop_latency_s]
    for k, (name, latency_s) in enumerate(zip(tier_names(cluster), latencies_s, strict=True)):
        rates[f"{name or 'link'} bandwidth"] = (partial(_link, tier=k, latency=False), 2.0)
        if latency_s > 0:
            rates[f"{name or 'link'} latency"] = (partial(_link, tier=k, latency=True), 0.5)
    return rates


def _worth(model: Model | str, cluster: Cluster, plan: Plan) -> list[Worth]:
    """Compute the value of every rate, most valuable first."""
    worth = []
    for name, (scaled, better) in _rates(cluster).items():
        low, high, twice = (
            predict(model, scaled(cluster, factor), plan).time_s
            for factor in (1.0 - _STEP, 1.0 + _STEP, better)
        )
        slope = (high - low) / (2.0 * _STEP * plan.time_s)
        worth.append(Worth(name, slope, twice / plan.time_s))
    worth.append(_more_memory(model, cluster, plan))
    return sorted(worth, key=lambda rate: rate.doubled)


def _more_memory(model: Model | str, cluster: Cluster, plan: Plan) -> Worth:
    """Compute the value of HBM capacity: with more of it a stage may recompute less."""
    spec = PlanSpec.of(plan).replace(recompute="auto")

    def time_s(factor: float) -> float:
        return predict(model, _scaled(cluster, factor, "chip.hbm.capacity_bytes"), spec).time_s

    now_s = time_s(1.0)
    slope = (time_s(1.0 + 10 * _STEP) - now_s) / (10 * _STEP * now_s)
    return Worth("HBM capacity (recomputing less)", slope, time_s(2.0) / now_s)


# ---- the critical path ----


_PASSES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "F&B": "forward and backward",
}


def _path_of_passes(step: Timeline) -> dict[str, float]:
    """Add up the seconds of the passes on the critical path, by stage and kind of pass.

    The path is followed backward from the pass that ends last; the predecessor of a pass ends when
    it starts, preferably on the same device.
    """
    passes = step.passes
    tolerance_s = 1e-9 * max(step.passes_s, 1e-300)
    by_end = np.argsort(passes["end_s"], kind="stable")
    ends_s = passes["end_s"][by_end]
    current = int(by_end[-1])
    path: dict[str, float] = {}
    while True:
        row = passes[current]
        name = f"stage {int(row['device'])}, {_PASSES[step.kinds[int(row['kind'])]]}"
        path[name] = path.get(name, 0.0) + float(row["end_s"] - row["start_s"])
        start_s = float(row["start_s"])
        if start_s <= tolerance_s:
            return path
        first = int(np.searchsorted(ends_s, start_s - tolerance_s))
        last = int(np.searchsorted(ends_s, start_s + tolerance_s, side="right"))
        before = [
            int(k)
            for k in by_end[first:last]
            if int(k) != current and passes["start_s"][k] < start_s - tolerance_s / 2
        ]
        if not before:
            return path
        same_device = [k for k in before if passes["device"][k] == row["device"]]
        current = same_device[0] if same_device else before[0]


def _critical_path(step: Timeline) -> list[tuple[str, float]]:
    path = _path_of_passes(step)
    tail_s = step.plan.time_s - step.passes_s
    if tail_s > 0:
        path["exposed gradients and weights, optimiser"] = tail_s
    return sorted(path.items(), key=lambda part: -part[1])


# ---- in sentences ----


def _bottlenecks(plan: Plan) -> list[str]:
    parts = sorted(plan.parts_s.items(), key=lambda part: -part[1])
    sentences = [
        f"{name.replace('_comm', ' communication')}: {format_time(part_s)}, "
        f"{part_s / plan.time_s:.1%} of the step"
        for name, part_s in parts
        if part_s > 0.01 * plan.time_s
    ]
    if plan.pp > 1:
        loads_s = [stage.load_s for stage in plan.stages]
        slowest = max(range(plan.pp), key=loads_s.__getitem__)
        sentences.append(
            f"stage {slowest} is the slowest: {format_time(loads_s[slowest])} a micro-batch, "
            f"{loads_s[slowest] / (sum(loads_s) / plan.pp) - 1:+.1%} against the mean"
        )
    fullest = max(range(plan.pp), key=lambda k: plan.stages[k].memory_bytes)
    memory = plan.stages[fullest].memory
    term = max(memory, key=lambda name: memory[name])
    free = plan.limit_bytes - plan.memory_bytes
    margin = f"{format_bytes(free)} free" if free >= 0 else f"{format_bytes(-free)} too much"
    sentences.append(
        f"memory: stage {fullest} peaks at {format_bytes(plan.memory_bytes)}, {margin}; most of it "
        f"is {term} ({format_bytes(memory[term])}); the peak is at: {plan.stages[fullest].instant}"
    )
    sentences.append(f"memory as tools report it: {plan.memory_as_reported}")
    if plan.stages[fullest].holders:
        sentences.append(f"at the peak of memory {plan.stages[fullest].holders}")
    return sentences


def explain_plan(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
) -> Explanation:
    """Find a plan's bottlenecks, its critical path, and the value of each hardware rate.

    Parameters
    ----------
    model, cluster, plan
        As for `phaze_fast.predict`.

    Returns
    -------
    Explanation
        Elasticities are central differences over one percent, with the plan unchanged.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    >>> spec = {"tp": 2, "pp": 2, "dp": 4, "global_batch": 64, "recompute": "full"}
    >>> explanation = explain_plan("llama2-7b", cluster, spec)
    >>> abs(sum(s for _, s in explanation.path) / explanation.plan.time_s - 1) < 1e-6
    True
    """
    step = timeline(model, cluster, plan)
    return Explanation(
        plan=step.plan,
        binds=tuple(_bottlenecks(step.plan)),
        path=tuple(_critical_path(step)),
        worth=tuple(_worth(model, cluster, step.plan)),
    )


# ---- two plans ----


def difference(
    one: Plan, other: Plan, given: Mapping[str, list[Any]] | None = None
) -> dict[str, Any]:
    """Compare two plans: fields that differ, and seconds and bytes by part.

    Parameters
    ----------
    one, other
        The plans.
    given
        What the plans are for, such as ``model``: a list with the value of either plan.

    Returns
    -------
    dict
        ``fields`` that differ and ``measures``, with both values; ``parts_s`` and ``memory``, with
        both values and the difference; ``speedup``, the first plan's step time over the second's.

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
    # Fields that specify a plan; seconds, bytes and rates follow from them.
    names = [f.name for f in fields(Plan) if f.name in PlanSpec.model_fields and f.name != "stages"]
    names += ["micro_batches", "devices", "recompute"]
    pairs = dict(given or {})
    pairs |= {name: [getattr(one, name), getattr(other, name)] for name in names}
    pairs |= {"stages": [[list(s.chunks) for s in plan.stages] for plan in (one, other)]}
    measures = ("time_s", "memory_bytes", "energy_j", "tokens_per_s", "mfu", "hfu")
    return {
        "fields": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        "measures": {name: [getattr(one, name), getattr(other, name)] for name in measures},
        "parts_s": _part_differences(one.parts_s, other.parts_s),
        "memory": _part_differences(one.memory, other.memory),
        "speedup": one.time_s / other.time_s,
    }


def _part_differences(
    one: Mapping[str, float], other: Mapping[str, float]
) -> dict[str, list[float]]:
    """Compare the parts of two sums: both values and their difference."""
    pairs = {
        name: (one.get(name, 0.0), other.get(name, 0.0)) for name in dict.fromkeys([*one, *other])
    }
    return {name: [a, b, b - a] for name, (a, b) in pairs.items() if a or b}
