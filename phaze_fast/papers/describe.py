"""Stages of a placement in full: seconds, bytes by term, what is free, what limits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phaze_fast.units import format_bytes, format_time

if TYPE_CHECKING:
    from phaze_fast.papers.problems import PipelineProblem, Placement, PublishedProblem
    from phaze_fast.papers.table import LayerTable

__all__ = ["PlacedStage", "placed_stages", "text"]


@dataclass(frozen=True)
class PlacedStage:
    """One stage of a placement."""

    layers: tuple[int, ...]
    devices: int
    variant: str
    load_s: float
    """Seconds per micro-batch, what it sends and receives included."""
    memory: dict[str, float]
    """Bytes of one device by term."""
    free_bytes: float

    @property
    def memory_bytes(self) -> float:
        """All terms together."""
        return sum(self.memory.values())


def _traffic(table: LayerTable, own: set[int], per_edge: bool) -> tuple[float, float, float]:
    """Seconds in and out, and bytes in, of a stage."""
    enters: dict[int, list[tuple[float, float]]] = {}
    leaves: dict[int, list[float]] = {}
    rows = zip(table.edges or (), table.edge_s, table.edge_bytes, strict=True)
    for (a, b), seconds, size in rows:
        if (a in own) == (b in own):
            continue
        if b in own:
            enters.setdefault(a, []).append((float(seconds), float(size)))
        else:
            leaves.setdefault(a, []).append(float(seconds))
    pick = sum if per_edge else max
    return (
        sum(pick(s for s, _ in each) for each in enters.values()),
        sum(pick(each) for each in leaves.values()),
        sum(pick(b for _, b in each) for each in enters.values()),
    )


def _published(problem: PublishedProblem, found: Placement, k: int) -> PlacedStage:
    table = problem.tables[found.width]
    at, later = list(found.stages[k]), len(found.stages) - k - 1
    in_s, out_s, in_bytes = _traffic(table, set(at), True)
    forward, backward = float(table.forward_s[0, at].sum()), float(table.backward_s[0, at].sum())
    if problem.recompute and later > 0:
        out_s = max(forward, out_s)
    kept = in_bytes if problem.recompute else float(table.stash_bytes[0, at].sum())
    memory = {
        "weights": float(table.resident_bytes[at].sum()),
        "activations": float(table.once_bytes[at].sum()),
        "stash": later * kept,
    }
    return PlacedStage(
        layers=found.stages[k],
        devices=found.width if table.wide[at].any() else 1,
        variant=found.variants[k],
        load_s=in_s + forward + out_s + backward,
        memory=memory,
        free_bytes=problem.memory_bytes - sum(memory.values()),
    )


def _pipeline(problem: PipelineProblem, found: Placement, k: int) -> PlacedStage:
    table, count = problem.table, len(found.stages)
    at, v = list(found.stages[k]), list(table.variants).index(found.variants[k])
    in_s, out_s, _ = _traffic(table, set(at), False)
    flying = count if problem.schedule == "zero-bubble" else count - k
    memory = {
        "resident": float(table.resident_bytes[at].sum()),
        "once": float(table.once_bytes[at].sum()),
        "stash": min(problem.micro_batches, flying) * float(table.stash_bytes[v, at].sum()),
        "live": float(table.live_bytes[v, at].max()),
        "gathered": float(table.gather_bytes[at].max()),
        "messages": problem.piped_bytes * (count > 1),
    }
    passes = float((table.forward_s[v, at] + table.backward_s[v, at]).sum())
    return PlacedStage(
        layers=found.stages[k],
        devices=1,
        variant=found.variants[k],
        load_s=in_s + passes + out_s,
        memory=memory,
        free_bytes=problem.memory_bytes - sum(memory.values()),
    )


def placed_stages(problem: Any, found: Placement) -> list[PlacedStage]:
    """Every stage of a placement of a problem, first to last."""
    one = _published if hasattr(problem, "tables") else _pipeline
    return [one(problem, found, k) for k in range(len(found.stages))]


def text(found: Placement) -> str:
    """Lay a placement out, a line per stage."""
    if found.problem is None or found.table is None:
        return f"{found.status}: no plan fits"
    stages = placed_stages(found.problem, found)
    names = found.table.names
    slowest = max(range(len(stages)), key=lambda k: stages[k].load_s)
    fullest = min(range(len(stages)), key=lambda k: stages[k].free_bytes)
    lines = [
        f"{found.status}: {format_time(found.time_s)}, {len(stages)} stages x {found.replicas} "
        f"replicas of {found.devices} devices; stage {slowest} is the slowest, stage {fullest} the "
        "fullest"
    ]
    for k, stage in enumerate(stages):
        first, last = names[stage.layers[0]], names[stage.layers[-1]]
        terms = ", ".join(f"{t} {format_bytes(b)}" for t, b in stage.memory.items() if b)
        slack = stages[slowest].load_s - stage.load_s
        lines.append(
            f"  {k}: {len(stage.layers)} layers ({first} to {last}), {stage.devices} devices, "
            f"{stage.variant}: {format_time(stage.load_s)} (slack {format_time(slack)}); {terms}; "
            f"free {format_bytes(stage.free_bytes)}"
        )
    return "\n".join(lines)
