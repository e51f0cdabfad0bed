"""Parallel plans as frozen data: widths, stages, seconds, bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.memory import TERMS
from phaze_fast.records import FrozenDict
from phaze_fast.units import format_bytes, format_time

__all__ = ["PARTS", "Plan", "Stage"]

PARTS = (
    "compute",
    "tensor_comm",
    "context_comm",
    "expert_comm",
    "pipeline_comm",
    "data_comm",
    "bubble",
    "imbalance",
    "recompute",
    "optimizer",
    "host",
)
"""What the seconds of a step are spent on: operators; collectives of tensor-, context- and
expert-parallel groups, messages between stages, gradients and weights, as far as nothing hides
them; filling and draining the pipeline; the slowest stage against the mean; operators that run
again; the optimiser's step; waiting for the host. How they are told apart: docs/placement.md."""


_ONCE = {"cp_kind": "all-gather", "etp": None, "expert_imbalance": 1.0, "expert_overlap": 0.0}
"""Fields of plans that were always so in 0.1.0, whose files do not have them."""


@dataclass(frozen=True)
class Stage:
    """One stage of a plan, as one of its devices sees it."""

    layers: tuple[int, ...]
    """Positions in the model's layers."""
    chunks: tuple[int, ...]
    """How many of them each of its chunks holds."""
    kinds: Mapping[str, int]
    """How many layers of each kind."""
    recompute: str
    """What is computed again in the backward pass."""
    load_s: float
    """Seconds per micro-batch, messages included."""
    memory: Mapping[str, float]
    """Bytes by term, as it holds most."""
    instant: str
    """When that is; one of `phaze_fast.memory.INSTANTS`."""

    @property
    def memory_bytes(self) -> float:
        """All terms together."""
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "layers": list(self.layers),
            "chunks": list(self.chunks),
            "kinds": dict(self.kinds),
            "recompute": self.recompute,
            "load_s": self.load_s,
            "memory_bytes": self.memory_bytes,
            "memory": dict(self.memory),
            "instant": self.instant,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Stage:
        """Read what `to_dict` gave."""
        return cls(
            layers=tuple(int(i) for i in data["layers"]),
            chunks=tuple(int(n) for n in data["chunks"]),
            kinds=FrozenDict({str(k): int(v) for k, v in data["kinds"].items()}),
            recompute=str(data["recompute"]),
            load_s=float(data["load_s"]),
            memory=FrozenDict({term: float(data["memory"][term]) for term in TERMS}),
            instant=str(data["instant"]),
        )


@dataclass(frozen=True)
class Plan:
    """How a model is laid out on a cluster, and what a step takes."""

    tp: int
    """Tensor-parallel width."""
    pp: int
    """Pipeline stages."""
    dp: int
    """Replicas."""
    cp: int
    """Context-parallel width."""
    cp_kind: str
    """How its devices attend to the whole sequence: all-gather, ring or ulysses."""
    ep: int
    """Expert-parallel width; a part of the replicas."""
    etp: int | None
    """Devices that share the matrices of each expert; None: `tp` of them."""
    expert_imbalance: float
    """Tokens of the busiest device of an expert group over their mean."""
    expert_overlap: float
    """Share of the seconds of expert-parallel exchanges that other work hides."""
    zero: int
    """ZeRO stage: replicas share optimiser state (1), gradients (2), weights (3)."""
    shard: int
    """Neighbouring replicas that share it; fewer than all in hybrid sharding."""
    micro_batch: int
    """Sequences a device works on at once."""
    micro_batches: int
    """Of one replica in one step."""
    schedule: str
    """Order of forward and backward passes."""
    vpp: int
    """Chunks per stage; 1 unless interleaved or folded."""
    rank_order: str
    """Which lie next to each other after tensor and context groups: replicas or stages."""
    sequence_parallel: bool
    """Whether tensor-parallel devices share the rows of norms and residuals."""
    seq: int
    """Tokens of a sequence."""
    optimizer: str
    """A name of `phaze_fast.memory.OPTIMIZERS`."""
    precision: str
    """Number format of the blocks' products, by name."""
    software: str
    """Profile of what runs the step, by name."""
    reserved_bytes: float
    """Of each device's memory that is not for the model."""
    layers_proven: bool
    """Whether the times of all layers are of schedules proven optimal."""
    time_s: float
    """Seconds of one step."""
    interval_s: tuple[float, float]
    """Seconds between which a measured step lies in four of five cases, by the errors of runs of
    this kind."""
    parts_s: Mapping[str, float]
    """Seconds by what they are spent on (`PARTS`); they add up to the step."""
    memory_bytes: float
    """Of the fullest device."""
    limit_bytes: float
    """Of a device for the model."""
    energy_j: float
    """Joules of one step on the devices in use."""
    samples_per_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float
    """Model FLOP/s of one device by the common formula, in 10^12; idle devices count."""
    mfu: float
    """Model FLOPs utilisation by the common formula: attention in full, over the peak of all
    devices of the cluster."""
    mfu_causal: float
    """The same with masked attention counted by half."""
    hfu: float
    """Hardware FLOPs utilisation: as `mfu`, with what is computed again counted again."""
    stages: tuple[Stage, ...]
    """First to last."""

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def hybrid(self) -> bool:
        """Whether groups of replicas share state and hold copies of it."""
        return self.zero > 0 and self.shard < self.dp

    @property
    def recompute(self) -> str:
        """What stages recompute, in one word; ``mixed`` where they differ."""
        kinds = {stage.recompute for stage in self.stages}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def bottleneck(self) -> str:
        """What most of the step is spent on."""
        return max(self.parts_s, key=lambda name: self.parts_s[name])

    @property
    def fullest(self) -> Stage:
        """The stage whose devices hold most."""
        return max(self.stages, key=lambda stage: stage.memory_bytes)

    @property
    def memory(self) -> Mapping[str, float]:
        """Bytes of the fullest device by term, as it holds most."""
        return self.fullest.memory

    @property
    def peak(self) -> Mapping[str, str]:
        """When the fullest device holds most, and the largest term then.

        Weights and optimiser state, which are always there, do not count.
        """
        stage = self.fullest
        moving = {t: b for t, b in stage.memory.items() if t not in ("weights", "optimizer")}
        return {"instant": stage.instant, "term": max(moving, key=lambda term: moving[term])}

    @property
    def allocated_bytes(self) -> float:
        """Of the fullest device without what its allocator loses: what frameworks report."""
        return self.memory_bytes - self.memory["fragmentation"]

    @property
    def over_bytes(self) -> float:
        """Bytes that the fullest device lacks; 0 where the plan fits."""
        return max(0.0, self.memory_bytes - self.limit_bytes)

    def to_dict(self, stages: bool = True) -> dict[str, Any]:
        """Give it as plain data, with its stages or without.

        Examples
        --------
        >>> import phaze_fast as pf
        >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
        >>> plan = pf.predict("llama2-7b", cluster, {"tp": 4, "dp": 2, "global_batch": 64})
        >>> pf.Plan.from_dict(plan.to_dict()) == plan
        True
        """
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "stages":
                found[field.name] = dict(value) if isinstance(value, Mapping) else value
        found["interval_s"] = list(self.interval_s)
        found["devices"], found["recompute"] = self.devices, self.recompute
        found["memory"], found["over_bytes"] = dict(self.memory), self.over_bytes
        found["peak"] = dict(self.peak)
        found["bottleneck"] = self.bottleneck
        if stages:
            found["stages"] = [stage.to_dict() for stage in self.stages]
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` gave, stages included.

        Raises
        ------
        InvalidInputError
            Where a field is missing or malformed.
        """
        try:
            data = {**_ONCE, "shard": data["dp"], **data}
            values = {f.name: data[f.name] for f in fields(cls) if f.name not in ("stages",)}
            values["interval_s"] = tuple(float(s) for s in values["interval_s"])
            values["parts_s"] = FrozenDict({n: float(values["parts_s"][n]) for n in PARTS})
            values["stages"] = tuple(Stage.from_dict(stage) for stage in data["stages"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInputError(f"plan: not what `to_dict` writes: {error!r}") from None
        return cls(**values)

    @property
    def _kind(self) -> str:
        return f" ({self.cp_kind})" if self.cp > 1 else ""

    def __str__(self) -> str:
        return (
            f"tp {self.tp} pp {self.pp} dp {self.dp} cp {self.cp}{self._kind} ep {self.ep} "
            f"zero {self.zero}{f' of {self.shard}' if self.hybrid else ''} "
            f"micro-batch {self.micro_batch} {self.schedule}: {format_time(self.time_s)}, "
            f"{format_bytes(self.memory_bytes)}, {self.tokens_per_s:,.0f} tokens/s"
        )
