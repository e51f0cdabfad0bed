"""Parallel plans as frozen data: widths, stages, seconds, bytes, and the interval of a prediction.

Intervals come from a table of errors of published runs (`phaze_fast.calibration` learns it). A run
is looked up by chip, software, reach (one node or several) and kind of plan, and by fewer of
these keys where too few runs match.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from phaze_fast.documents import package_data
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, Cluster
from phaze_fast.memory import TERMS
from phaze_fast.planning.layouts import node_devices
from phaze_fast.records import FrozenDict
from phaze_fast.software import Precision, Software, load_precision, load_software
from phaze_fast.units import format_bytes, format_flops, format_time

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
expert-parallel groups, messages between stages, gradients and weights, each without the part that
overlaps with other work; filling and draining the pipeline; the slowest stage against the mean;
recomputed operators; the optimiser's step; waiting for the host. docs/planning.md describes how
they are separated."""


_FIELDS_SINCE_0_1_0 = {
    "cp_kind": "all-gather",
    "etp": None,
    "dispatcher": "all-to-all",
    "offload_optimizer": False,
    "expert_imbalance": 1.0,
    "expert_overlap": 0.0,
    "fusion": "none",
    "overlap_experts": False,
}
"""Values of fields that files of version 0.1.0 do not have."""


@dataclass(frozen=True)
class Stage:
    """One stage of a plan, as one of its devices sees it."""

    layers: tuple[int, ...]
    """Positions in the model's layers."""
    chunks: tuple[int, ...]
    """Number of layers of each of its chunks."""
    kinds: Mapping[str, int]
    """Number of layers of each kind."""
    recompute: str
    """What is recomputed in the backward pass."""
    load_s: float
    """Seconds per micro-batch, messages included."""
    memory: Mapping[str, float]
    """Peak memory by term, bytes."""
    instant: str
    """When memory peaks; one of `phaze_fast.memory.INSTANTS`."""
    holders: str = ""
    """Operator and layer that run at the peak of a traced model, and the largest tensors then."""

    @property
    def memory_bytes(self) -> float:
        """Sum of all terms."""
        return sum(self.memory.values())

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "layers": list(self.layers),
            "chunks": list(self.chunks),
            "kinds": dict(self.kinds),
            "recompute": self.recompute,
            "load_s": self.load_s,
            "memory_bytes": self.memory_bytes,
            "memory": dict(self.memory),
            "instant": self.instant,
            **({"holders": self.holders} if self.holders else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Stage:
        """Read what `to_dict` wrote."""
        return cls(
            layers=tuple(int(i) for i in data["layers"]),
            chunks=tuple(int(n) for n in data["chunks"]),
            kinds=FrozenDict({str(k): int(v) for k, v in data["kinds"].items()}),
            recompute=str(data["recompute"]),
            load_s=float(data["load_s"]),
            memory=FrozenDict({term: float(data["memory"][term]) for term in TERMS}),
            instant=str(data["instant"]),
            holders=str(data.get("holders", "")),
        )


@dataclass(frozen=True)
class Plan:
    """How a model is laid out on a cluster, with the time and memory of a step."""

    tp: int
    """Tensor-parallel width."""
    pp: int
    """Pipeline stages."""
    dp: int
    """Replicas."""
    cp: int
    """Context-parallel width."""
    cp_kind: str
    """How context-parallel devices attend: all-gather, ring, ulysses or ulysses:N/ring."""
    ep: int
    """Expert-parallel width: devices over which the experts of a layer are distributed."""
    etp: int | None
    """Devices that share the matrices of each expert; None: `tp` of them."""
    dispatcher: str
    """How rows reach experts: all-to-all or all-gather."""
    expert_imbalance: float
    """Tokens of the busiest device of an expert group over their mean."""
    expert_overlap: float
    """Share of the seconds of expert-parallel exchanges that other work hides."""
    overlap_experts: bool
    """Whether these exchanges run while passes of another micro-batch compute."""
    offload_optimizer: bool
    """Whether the host has the optimiser's state and updates it."""
    zero: int
    """ZeRO stage: replicas share optimiser state (1), gradients (2), weights (3)."""
    shard: int
    """Neighbouring replicas that share the state of `zero`; fewer than all in hybrid sharding."""
    micro_batch: int
    """Sequences a device works on at once."""
    micro_batches: int
    """Micro-batches of one replica in one step."""
    schedule: str
    """Order of forward and backward passes."""
    vpp: int
    """Chunks per stage; 1 unless the schedule has several."""
    rank_order: str
    """What ranks count first after tensor and context groups: replicas, or stages."""
    sequence_parallel: bool
    """Whether tensor-parallel devices share the rows of norms and residuals."""
    seq: int
    """Tokens of a sequence."""
    optimizer: str
    """A name of `phaze_fast.memory.OPTIMIZERS`."""
    precision: str | Mapping[str, Any]
    """Number format of the blocks' products: a preset's name, or all fields of another."""
    software: str | Mapping[str, Any]
    """Profile of what runs the step: a preset's name, or all fields of another."""
    fusion: str
    """What is fused: none, epilogues or full."""
    reserved_bytes: float
    """Memory of each device that is not available to the model."""
    layers_proven: bool
    """Whether the times of all layers are of schedules proven optimal."""
    time_s: float
    """Seconds of one step."""
    interval_s: tuple[float, float]
    """Interval that holds a measured step with probability `NOMINAL`, by the errors of runs of this
    kind, seconds."""
    parts_s: Mapping[str, float]
    """Seconds by what they are spent on (`PARTS`); they add up to the step."""
    memory_bytes: float
    """Peak memory of the fullest device."""
    limit_bytes: float
    """Usable memory of a device: its capacity less `reserved_bytes`."""
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
    """Model FLOPs utilisation with masked attention counted by half."""
    hfu: float
    """Hardware FLOPs utilisation: as `mfu`, with recomputed operations counted."""
    stages: tuple[Stage, ...]
    """First to last."""

    @property
    def devices(self) -> int:
        """Devices in use."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self.dp * self.micro_batch * self.micro_batches

    @property
    def device_w(self) -> float:
        """Mean power of a device in use over the step, watts."""
        return self.energy_j / self.time_s / self.devices

    @property
    def hybrid(self) -> bool:
        """Whether state is sharded inside groups of replicas and copied between groups."""
        return self.zero > 0 and self.shard < self.dp

    @property
    def recompute(self) -> str:
        """What stages recompute; ``mixed`` where they differ."""
        kinds = {stage.recompute for stage in self.stages}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def bottleneck(self) -> str:
        """The part that takes most of the step."""
        return max(self.parts_s, key=lambda name: self.parts_s[name])

    @property
    def fullest(self) -> Stage:
        """The stage with the highest peak memory."""
        return max(self.stages, key=lambda stage: stage.memory_bytes)

    @property
    def memory(self) -> Mapping[str, float]:
        """Peak memory of the fullest device by term, bytes."""
        return self.fullest.memory

    @property
    def peak(self) -> Mapping[str, str]:
        """When the memory of the fullest device peaks, and the largest term then.

        Weights and optimiser state, which are always resident, are not considered.
        """
        stage = self.fullest
        moving = {t: b for t, b in stage.memory.items() if t not in ("weights", "optimizer")}
        return {"instant": stage.instant, "term": max(moving, key=lambda term: moving[term])}

    @property
    def allocated_bytes(self) -> float:
        """Peak memory without fragmentation, bytes: what frameworks report."""
        return self.memory_bytes - self.memory["fragmentation"]

    @property
    def device_memory(self) -> Mapping[str, float]:
        """Memory of the fullest device as tools report it, bytes; each includes the one before.

        ``allocated`` is what tensors and buffers take (`torch.cuda.max_memory_allocated`),
        ``reserved`` what the allocator holds for them, fragmentation included
        (`max_memory_reserved`), and ``device`` what the driver shows: also the context, the
        buffers of NCCL and other libraries, and headroom (`reserved_bytes`).
        """
        parts = (self.allocated_bytes, self.memory["fragmentation"], self.reserved_bytes)
        return dict(zip(("allocated", "reserved", "device"), accumulate(parts), strict=True))

    @property
    def memory_as_reported(self) -> str:
        """`device_memory` in words."""
        said = {name: format_bytes(count) for name, count in self.device_memory.items()}
        said["device"] += " on the device with context, libraries and headroom"
        return f"{said['allocated']} allocated, {said['reserved']} reserved, {said['device']}"

    @property
    def number_format(self) -> Precision:
        """Number format of the blocks' products, in full."""
        if isinstance(self.precision, str):
            return load_precision(self.precision)
        return Precision.from_dict(self.precision)

    @property
    def mfu_convention(self) -> str:
        """What `mfu` counts, over which peak, and its value without masked scores."""
        if not self.mfu:
            return ""
        peak = format_flops(self.tflops_per_device * 1e12 / self.mfu)
        text = f"attention in full, over the dense {self.number_format.format} peak of {peak}"
        causal = f"; {self.mfu_causal:.1%} with the causal mask"
        return text + causal * (self.mfu_causal < self.mfu)

    @property
    def over_bytes(self) -> float:
        """Bytes by which the fullest device exceeds its limit; 0 where the plan fits."""
        return max(0.0, self.memory_bytes - self.limit_bytes)

    def to_dict(self, stages: bool = True) -> dict[str, Any]:
        """Convert to plain data, with or without stages.

        Examples
        --------
        >>> import phaze_fast as pf
        >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
        >>> plan = pf.predict("llama2-7b", cluster, {"tp": 4, "dp": 2, "global_batch": 64})
        >>> pf.Plan.from_dict(plan.to_dict()) == plan
        True
        """
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "stages":
                data[field.name] = dict(value) if isinstance(value, Mapping) else value
        data["interval_s"] = list(self.interval_s)
        data["global_batch"] = self.global_batch
        data["devices"], data["recompute"] = self.devices, self.recompute
        data["memory"], data["over_bytes"] = dict(self.memory), self.over_bytes
        data["peak"], data["device_memory"] = dict(self.peak), dict(self.device_memory)
        data["bottleneck"], data["mfu_convention"] = self.bottleneck, self.mfu_convention
        if stages:
            data["stages"] = [stage.to_dict() for stage in self.stages]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote, stages included.

        Raises
        ------
        InvalidInputError
            Where a field is missing or malformed.
        """
        try:
            data = {**_FIELDS_SINCE_0_1_0, "shard": data["dp"], **data}
            values = {f.name: data[f.name] for f in fields(cls) if f.name != "stages"}
            values["interval_s"] = tuple(float(s) for s in values["interval_s"])
            values["parts_s"] = FrozenDict({n: float(values["parts_s"][n]) for n in PARTS})
            values["stages"] = tuple(Stage.from_dict(stage) for stage in data["stages"])
            for name, kind in (("software", Software), ("precision", Precision)):
                if isinstance(values[name], Mapping):
                    values[name] = kind.from_dict(values[name]).reference
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInputError(f"plan: not what `to_dict` writes: {error!r}") from None
        return cls(**values)

    @property
    def _kind(self) -> str:
        return f" ({self.cp_kind})" if self.cp > 1 else ""

    def __str__(self) -> str:
        return self.described()

    def described(self, sample: str = "sequence") -> str:
        """Return the plan in one line, its speed in images if a sample is one, else in tokens."""
        speed = f"{self.tokens_per_s:,.0f} tokens/s"
        if sample == "image":
            speed = f"{self.samples_per_s:,.0f} images/s"
        return (
            f"tp {self.tp} pp {self.pp} dp {self.dp} cp {self.cp}{self._kind} ep {self.ep} "
            f"zero {self.zero}{f' of {self.shard}' if self.hybrid else ''} "
            f"micro-batch {self.micro_batch} {self.schedule}: {format_time(self.time_s)}, "
            f"{format_bytes(self.memory_bytes)}, {speed}"
        )


# ---- intervals of predictions ----

NOMINAL = 0.8
"""Share of measured steps that `Plan.interval_s` is meant to cover."""
FEWER_BITS = "fewer than 16 bits"
"""Group of all runs whose products are neither bf16 nor fp16."""
EXPERTS = "with experts"
"""Group of all runs with expert parallelism: exchanges of tokens shape their errors most."""


def plan_kind(tp: int, pp: int, cp: int, zero: int, devices: int) -> str:
    """Name the feature of a plan that its prediction error depends on most.

    Examples
    --------
    >>> plan_kind(tp=8, pp=4, cp=1, zero=1, devices=64), plan_kind(1, 1, 1, 3, 8)
    ('pipeline', 'sharded')
    """
    if pp > 1:
        return "pipeline"
    if tp > 1 or cp > 1:
        return "tensor"
    if devices == 1:
        return "one device"
    return "sharded" if zero == 3 else "replicas"


def groups_of(chip: str, software: str, beyond_node: bool, kind: str) -> Iterator[str]:
    """Yield the groups that a run belongs to, the most similar first.

    Examples
    --------
    >>> list(groups_of("h100", "megatron-core", True, "pipeline"))[-2:]
    ['megatron-core', 'all']
    """
    reach = "cluster" if beyond_node else "node"
    yield f"{chip}, {software}, {reach}, {kind}"
    yield f"{chip}, {software}, {reach}"
    yield f"{chip}, {software}"
    yield software
    yield "all"


def chip_constants(chip: Accelerator | None) -> str:
    """Say whose constants price a chip, where they are not its own: empty for a measured one.

    A rate of bf16 products in running jobs (`step_flops`) is a constant of the chip's own.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> [chip_constants(presets.chip(name)) for name in ("h100", "gb300", "trainium1-core")]
    ['', 'chip carried over', 'chip not fitted']
    """
    if chip is None or "bf16" in chip.tuning.step_flops:
        return ""
    state = chip.calibration.state
    return f"chip {state}" if state in ("carried over", "not fitted") else ""


def plan_groups(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Yield the groups that a plan on a cluster belongs to, the most similar first."""
    kind = plan_kind(plan.tp, plan.pp, plan.cp, plan.zero, plan.devices)
    chip = "" if cluster.chip is None else cluster.chip.name
    precision = plan.number_format
    software = plan.software if isinstance(plan.software, str) else plan.software["name"]
    if precision.low:  # low precision has groups of its own
        software = f"{software} in {precision.format}"
    if plan.ep > 1:
        software = f"{software}, {EXPERTS}"
    known = chip_constants(cluster.chip)
    for group in groups_of(chip, software, plan.devices > node_devices(cluster), kind):
        if group == software and known:  # errors are larger than on measured chips
            yield f"{software}, {known}"
            yield known
        if group == "all" and plan.ep > 1:
            yield EXPERTS
        elif group == "all" and precision.low:
            yield FEWER_BITS
        yield group


def plan_interval_s(plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """Return the interval in which a measured step lies with probability `NOMINAL`, seconds."""
    written = plan.software
    profile = load_software(written) if isinstance(written, str) else Software.from_dict(written)
    own = profile.step_ratios
    if own is not None:
        return (plan.time_s * own[0], plan.time_s * own[1])
    ratios = package_data(__package__, "intervals.yaml")["ratios"]
    low, high = next(ratios[name] for name in plan_groups(plan, cluster) if name in ratios)
    return (plan.time_s * low, plan.time_s * high)
