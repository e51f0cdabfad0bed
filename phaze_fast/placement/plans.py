"""Takes placements and what was asked, gives plans: times, memory by term, what binds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast.errors import InfeasibleError
from phaze_fast.hardware import Cluster
from phaze_fast.memory import FRAGMENTATION, SCHEDULES, STAGE_DTYPE, TERMS, footprint_batch
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.placement.layers import TimedLayers
from phaze_fast.placement.problems import PipelineProblem, Placement
from phaze_fast.placement.sizes import Groups
from phaze_fast.placement.training import Training
from phaze_fast.units import format_bytes, format_time

__all__ = ["Plan", "Plans", "Stage", "read_plan"]


@dataclass(frozen=True)
class Stage:
    """One stage of a plan, as one of its devices sees it."""

    layers: tuple[int, ...]
    """Positions in the model's layers."""
    kinds: dict[str, int]
    """How many layers of each kind."""
    recompute: str
    load_s: float
    """Seconds per micro-batch, messages included."""
    memory: dict[str, float]
    """Bytes by term."""

    @property
    def memory_bytes(self) -> float:
        """All terms together."""
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "layers": list(self.layers),
            "kinds": self.kinds,
            "recompute": self.recompute,
            "load_s": self.load_s,
            "memory_bytes": self.memory_bytes,
            "memory": self.memory,
        }


_FIELDS = (
    *("tp", "pp", "dp", "cp", "ep", "zero", "microbatch", "microbatches", "schedule", "virtual"),
    *("rank_order", "recompute", "layers_proven", "devices", "time_s", "parts_s"),
    *("memory_bytes", "tokens_per_s"),
)


@dataclass(frozen=True)
class Plan:
    """How a model is laid out on a cluster, and what a step takes."""

    tp: int
    """Tensor-parallel width."""
    pp: int
    """Stages."""
    dp: int
    """Replicas."""
    cp: int
    """Context-parallel width."""
    ep: int
    """Expert-parallel width."""
    zero: int
    microbatch: int
    microbatches: int
    """Of one replica in one step."""
    schedule: str
    virtual: int
    rank_order: str
    time_s: float
    """Seconds of one step."""
    memory_bytes: float
    """Of the fullest device."""
    tokens_per_s: float
    _layers: TimedLayers = field(repr=False, compare=False)
    _problem: PipelineProblem = field(repr=False, compare=False)
    _placement: Placement = field(repr=False, compare=False)

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def recompute(self) -> str:
        """What stages recompute, in one word; ``mixed`` where they differ."""
        kinds = set(self._placement.variants)
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @cached_property
    def parts_s(self) -> dict[str, float]:
        """Seconds of the step by what they are spent on."""
        return _parts(self)

    @property
    def stages(self) -> list[Stage]:
        """Every stage, first to last."""
        return _stages(self)

    @property
    def layers_proven(self) -> bool:
        """Whether the times of all layers are of schedules proven optimal."""
        return self._layers.proven

    @property
    def binds(self) -> str:
        """What the step waits for most."""
        return max(self.parts_s, key=lambda name: self.parts_s[name])

    def to_dict(self, stages: bool = True) -> dict[str, Any]:
        """Give it as plain data, with its stages or without."""
        found = {name: getattr(self, name) for name in _FIELDS}
        if stages:
            found["stages"] = [stage.to_dict() for stage in self.stages]
        return found

    def __str__(self) -> str:
        return (
            f"tp {self.tp} pp {self.pp} dp {self.dp} cp {self.cp} ep {self.ep} zero {self.zero} "
            f"micro-batch {self.microbatch} {self.schedule}: {format_time(self.time_s)}, "
            f"{format_bytes(self.memory_bytes)}, {self.tokens_per_s:,.0f} tokens/s"
        )


@dataclass(frozen=True)
class _Laid:
    """Layers stage by stage: positions one after another, where each stage begins, its variant."""

    at: Any
    starts: Any
    variant: Any

    @classmethod
    def out(cls, plan: Plan) -> _Laid:
        names = list(plan._problem.table.variants)
        placed = plan._placement
        sizes = [len(stage) for stage in placed.stages]
        ways = np.array([names.index(v) for v in placed.variants])
        return cls(
            at=np.concatenate([np.array(stage) for stage in placed.stages]),
            starts=np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.intp),
            variant=np.repeat(ways, sizes),
        )

    def total(self, values: Any) -> Any:
        """Sum of what each layer has, per stage."""
        return np.add.reduceat(values[self.at], self.starts)

    def largest(self, values: Any) -> Any:
        """Largest of what a layer has, per stage."""
        return np.maximum.reduceat(values[self.at], self.starts)

    def chosen(self, values: Any) -> Any:
        """Of an array by variant and layer: the values of the variants chosen, by layer."""
        found = np.zeros(values.shape[1])
        found[self.at] = values[self.variant, self.at]
        return found


def _rows(plan: Plan) -> Any:
    """Describe every stage as the memory model takes it."""
    layers, table, laid = plan._layers.sizes, plan._problem.table, _Laid.out(plan)
    spec, loose = layers.optimizer, 1 + FRAGMENTATION
    rows = np.zeros(plan.pp, dtype=STAGE_DTYPE)
    rows["parameters"] = laid.total(layers.parameters)
    if plan.pp > 1:
        rows["parameters"][-1] += layers.copied_parameters
    rows["expert_parameters"] = laid.total(layers.experts)
    rows["expert_parallel"] = plan.ep
    rows["largest_layer"] = laid.largest(layers.parameters * ~layers.ends)
    rows["stash_bytes"] = laid.total(laid.chosen(table.stash_bytes)) / loose
    rows["live_bytes"] = laid.largest(laid.chosen(table.live_bytes)) / loose
    rows["head_bytes"] = laid.total(table.once_bytes) / loose
    piped = layers.piped_bytes if plan.pp > 1 else 0.0
    rows["buffer_bytes"] = (layers.gathered_bytes + piped) / loose
    rows["weight_bytes"], rows["gradient_bytes"] = spec.weight_bytes, spec.gradient_bytes
    rows["state_bytes"] = spec.state_bytes
    rows["data_parallel"], rows["zero"] = plan.dp * plan.cp, plan.zero
    rows["schedule"] = SCHEDULES.index(plan.schedule)
    rows["stages"], rows["stage"] = plan.pp, np.arange(plan.pp)
    rows["microbatches"], rows["virtual"] = plan.microbatches, plan.virtual
    return rows


def _loads(plan: Plan) -> list[float]:
    table, laid = plan._problem.table, _Laid.out(plan)
    passes = laid.total(laid.chosen(table.forward_s + table.backward_s))
    send_s = float(table.edge_s.max(initial=0.0))
    messages = np.full(plan.pp, 2 * plan.virtual)
    messages[0] -= 1
    messages[-1] -= 1
    loads: list[float] = (passes + (plan.pp > 1) * messages * send_s).tolist()
    return loads


def _stages(plan: Plan) -> list[Stage]:
    terms = footprint_batch(_rows(plan))
    graph, order = plan._layers.graph, plan._layers.sizes.order
    found = []
    for k, (at, load) in enumerate(zip(plan._placement.stages, _loads(plan), strict=True)):
        kinds = Counter(graph.layers[order[i]].kind for i in at)
        found.append(
            Stage(
                layers=at,
                kinds=dict(kinds),
                recompute=plan._placement.variants[k],
                load_s=load,
                memory={term: float(terms[term][k]) for term in TERMS},
            )
        )
    return found


def read_plan(
    layers: TimedLayers,
    problem: PipelineProblem,
    placement: Placement,
    groups: Groups,
    zero: int,
    schedule: str,
    virtual: int,
    tokens: int,
    strategy: Strategy,
) -> Plan:
    """Put a placement and what it answers into words and numbers."""
    m, p = problem.microbatches, len(placement.stages)
    blank = Plan(
        tp=strategy.tensor_parallel,
        pp=p,
        dp=groups.replicas,
        cp=strategy.context_parallel,
        ep=strategy.expert_parallel,
        zero=zero,
        microbatch=strategy.microbatch,
        microbatches=m,
        schedule=schedule,
        virtual=virtual if schedule == "interleaved" else 1,
        rank_order=groups.order,
        time_s=placement.time_s,
        memory_bytes=0.0,
        tokens_per_s=tokens / placement.time_s if placement.time_s > 0 else float("inf"),
        _layers=layers,
        _problem=problem,
        _placement=placement,
    )
    memory = float(footprint_batch(_rows(blank))["total"].max())
    object.__setattr__(blank, "memory_bytes", memory)
    return blank


def _parts(plan: Plan) -> dict[str, float]:
    """Seconds of a step by what they are spent on."""
    placement, m, p = plan._placement, plan.microbatches, plan.pp
    loads = _loads(plan)
    mean = sum(loads) / len(loads)
    again = _again(plan)
    send_s = float(plan._problem.table.edge_s.max(initial=0.0)) * (p > 1)
    messages = m * 2 * plan.virtual * send_s * (p - 1) / p
    parts = {
        "compute": m * (mean - again) - messages,
        "recomputation": m * again,
        "messages between stages": messages,
        "uneven stages": m * (max(loads) - mean),
        "fill and drain": placement.time_s - placement.tail_s - m * max(loads),
        "gradients and optimiser": placement.tail_s,
    }
    return {
        name: 0.0 if abs(seconds) < 1e-12 * placement.time_s else seconds
        for name, seconds in parts.items()
    }


def _again(plan: Plan) -> float:
    """Seconds of recomputation per micro-batch, mean over stages."""
    table, laid = plan._problem.table, _Laid.out(plan)
    least = plan._layers.plain_backward_s
    if plan.zero >= 2:
        least = np.maximum(least, table.backward_s.min(axis=0))
    extra = np.maximum(laid.chosen(table.backward_s) - least, 0.0)
    return float(extra.sum()) / plan.pp


@dataclass(frozen=True)
class Plans:
    """The best plans of a model on a cluster, and what became of the rest."""

    model: TransformerModel
    cluster: Cluster
    training: Training
    top: int
    plans: list[Plan]
    """Fastest first; the best of each kind of layout."""
    front: list[Plan]
    """Plans of which none is both faster and smaller than another, fastest first."""
    tried: int
    """Layouts that were placed, each for all its counts of stages at once."""
    rejected: dict[str, int]
    """Why layouts were left out, and how many."""
    shortfall: str
    """Where nothing fits: which stage of the leanest layout is over, by how much, with what."""
    nearest: str
    """Where nothing fits: what would."""

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def best(self) -> Plan:
        """The fastest.

        Raises
        ------
        InfeasibleError
            Where nothing fits.
        """
        if not self.plans:
            raise InfeasibleError(f"{self.model.name}: {self.shortfall or 'no plan fits'}")
        return self.plans[0]

    @staticmethod
    def _distinct(plans: list[Plan]) -> list[Plan]:
        """Of layouts that differ in rank order alone, keep the first."""
        found: dict[tuple[object, ...], Plan] = {}
        for p in plans:
            widths = (p.tp, p.pp, p.dp, p.cp, p.ep, p.zero, p.microbatch)
            found.setdefault((*widths, p.schedule, p.virtual), p)
        return list(found.values())

    @classmethod
    def of(
        cls,
        asked: tuple[TransformerModel, Cluster, Training, int],
        plans: list[Plan],
        tried: int,
        rejected: Counter[str],
        why: tuple[str, str] = ("", ""),
    ) -> Plans:
        """Sort what was found, and keep the best and the front of time and memory."""
        ordered = cls._distinct(
            sorted(
                plans,
                key=lambda p: (p.time_s, p.memory_bytes, p.devices, p.tp, p.pp, p.dp, p.zero),
            )
        )
        front: list[Plan] = []
        for plan in ordered:
            if not front or plan.memory_bytes < front[-1].memory_bytes:
                front.append(plan)
        top = asked[3]
        return cls(*asked, ordered[:top], front, tried, dict(rejected.most_common()), *why)

    @cached_property
    def flops(self) -> float:
        """FLOPs of one step that the model asks for, recomputation not counted."""
        strategy = Strategy(seq=self.training.seq)
        return layer_graph(self.model, strategy).flops * self.training.global_batch

    def mfu(self, plan: Plan) -> float:
        """Share of the cluster's peak that goes into the model."""
        chip = self.cluster.chip
        if chip is None:
            return 0.0
        return self.flops / (plan.time_s * self.cluster.devices * chip.peak_flops("bf16"))
