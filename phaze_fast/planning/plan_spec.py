"""A parallel plan as a user gives it: widths, schedule and stages, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest
from phaze_fast.memory import SCHEDULES, TWO_CHUNKS, ScheduleName, check_chunks, places
from phaze_fast.opgraph import ContextKind, Strategy
from phaze_fast.planning.layouts import divisors, sharing_counts
from phaze_fast.planning.pipelines import refusal
from phaze_fast.planning.plans import Plan
from phaze_fast.planning.training import (
    OVERLAPPING,
    RANK_ORDERS,
    RECOMPUTE,
    TrainingStep,
    check_recompute_count,
    check_stage_recompute,
    modes_in,
)
from phaze_fast.records import Count, Record
from phaze_fast.tables import Array


def _nearest_counts(value: int, accepted: Sequence[int]) -> str:
    """Name the accepted counts next to a value, below and above."""
    below = [n for n in accepted if n <= value][-1:]
    above = [n for n in accepted if n > value][:1]
    return " or ".join(map(str, [*below, *above]))


class PlanSpec(TrainingStep):
    """A parallel plan as a user gives it.

    Examples
    --------
    >>> PlanSpec(tp=8, pp=4, dp=2, global_batch=64).devices
    64
    """

    what: ClassVar[str] = "plan"
    tp: Count = 1
    """Tensor-parallel width."""
    pp: Count = 1
    """Pipeline stages."""
    dp: Count = 1
    """Replicas."""
    cp: Count = 1
    """Context-parallel width."""
    cp_kind: ContextKind = "all-gather"
    """How context-parallel devices attend to the whole sequence: keys and values gathered
    (all-gather), sent round a ring, rows exchanged for heads (ulysses), or the last in groups of N
    neighbours and a ring between the groups (ulysses:N/ring)."""
    ep: Count = 1
    """Expert-parallel width."""
    etp: Count | None = None
    """Devices that share the matrices of each expert, by default as many as `tp`; ``etp * ep`` is a
    divisor of ``tp * cp * dp``."""
    dispatcher: Literal["all-to-all", "all-gather"] = "all-to-all"
    """How rows reach experts: sent to the devices of their experts, or gathered by all devices that
    together have one copy of the experts."""
    zero: Literal[0, 1, 2, 3] = 0
    """What replicas share: optimiser state (1), gradients (2), weights (3)."""
    shard: Count | None = None
    """How many neighbouring replicas share what `zero` says; with fewer than all, every such group
    has a copy (hybrid sharding). By default all."""
    micro_batch: Count = 1
    """Sequences a device works on at once."""
    schedule: ScheduleName = "1f1b"
    """Order of forward and backward passes: 1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v,
    dualpipe, dualpipe-v."""
    vpp: Count = 1
    """Chunks per stage: 2 or more where interleaved, 2 by zb-v, dualpipe and dualpipe-v, else 1."""
    recompute: str | tuple[str, ...] = "auto"
    """What is computed again in the backward pass, for all stages or for each: ``none``,
    ``selective``, ``full``, sets of operators joined by ``+``, any of them with ``:N`` for the
    first N blocks of each chunk (``full:3``, ``full:3/norms``); auto: the fastest that fits."""
    offload_optimizer: bool = False
    """Whether the host has the optimiser's state and updates it (activations: ``offload`` among the
    sets of `recompute`)."""
    stages: tuple[Count, ...] | None = None
    """Layers of each stage (of each chunk where interleaved), embedding and head counted; by
    default blocks are divided evenly."""
    rank_order: Literal["replicas-inside", "stages-inside"] = "replicas-inside"
    """What ranks count first after tensor and context groups: replicas, or stages."""
    idle: bool = False
    """Whether devices of the cluster may stay idle."""

    @property
    def devices(self) -> int:
        """Devices of the plan."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes of recomputation that the plan names; those of ``auto`` where it names none."""
        return RECOMPUTE if self.recompute == "auto" else modes_in(self._recompute_texts)

    @property
    def _recompute_texts(self) -> tuple[str, ...]:
        return self.recompute if isinstance(self.recompute, tuple) else (self.recompute,)

    @property
    def strategy(self) -> Strategy:
        """How a layer is split over devices."""
        widths = (self.tp, self.cp, self.cp_kind, self.ep, self.etp, self.micro_batch)
        overlapping = self.pp > 1 and self.schedule in OVERLAPPING
        return self.strategy_of(*widths, overlapping, self.dispatcher, self.offload_optimizer)

    @property
    def asked_overlap(self) -> bool | None:
        """Whether expert exchanges overlap, if this is not the schedule's default; else None."""
        by_schedule = self.model_copy(update={"overlap_experts": None}).strategy.overlap_experts
        own = self.strategy.overlap_experts
        return None if own == by_schedule else own

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one replica in one step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def layout(self) -> Array:
        """The plan as one layout of its strategy, dtype ``_core.LAYOUT_DTYPE``."""
        row: Array = np.zeros(1, dtype=_core.LAYOUT_DTYPE)
        row["schedule"] = SCHEDULES.index(self.schedule)
        row["pp"], row["vpp"], row["zero"] = self.pp, self.vpp, self.zero
        row["rank_order"] = RANK_ORDERS.index(self.rank_order)
        row["dp"], row["micro_batches"] = self.dp, self.micro_batches
        row["shard"] = 0 if self.shard == self.dp else self.shard or 0
        return row

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_widths()
        chunks = places(self.schedule, self.pp, self.vpp)
        if self.stages is not None and len(self.stages) != chunks:
            rule = "pp" if self.schedule == "dualpipe" else f"pp x vpp = {self.pp} x {self.vpp}"
            raise ValueError(
                f"stages: {len(self.stages)} entries are not accepted; expected {rule} = {chunks}"
            )
        if self.recompute != "auto":
            for text in self._recompute_texts:
                check_stage_recompute(text)
        check_recompute_count(self.modes)
        if self.offload_optimizer:
            self.check_offload()
        if isinstance(self.recompute, tuple) and len(self.recompute) != self.pp:
            raise ValueError(
                f"recompute: {len(self.recompute)} entries are not accepted; expected one word, or "
                f"one for each of pp = {self.pp} stages"
            )
        return self

    def _check_widths(self) -> None:
        """Raise a ValueError for the first rule that the widths break."""
        own = {
            "etp": self.etp or 0,
            "shard": self.shard or 0,
            "schedule": SCHEDULES.index(self.schedule),
            "rank_order": RANK_ORDERS.index(self.rank_order),
        }
        widths = [np.array([own.get(n, getattr(self, n))], np.int64) for n in _core.WIDTHS]
        # The number of devices is checked later, with the cluster.
        status = int(_core.check_widths(widths, self.devices, self.global_batch)[0])
        if status == _core.PlanStatus.BAD_BATCH:
            raise ValueError(
                f"global_batch: {self.global_batch} is not a multiple of dp x micro_batch = "
                f"{self.dp} x {self.micro_batch} = {self.dp * self.micro_batch}"
            )
        if status == _core.PlanStatus.BAD_SCHEDULE:
            check_chunks(self.schedule, self.vpp)
        if status == _core.PlanStatus.BAD_EXPERTS:
            raise ValueError(self._expert_fault())
        if status == _core.PlanStatus.BAD_SHARD:
            raise ValueError(self._shard_fault(self.strategy.expert_replicas))
        rounds = self.micro_batches
        if self.pp > 1 and (why := refusal(self.schedule, self.pp, rounds, self.vpp)):
            raise ValueError(
                f"schedule: {self.schedule} with pp = {self.pp}, vpp = {self.vpp} and "
                f"{self.global_batch} / ({self.dp} x {self.micro_batch}) = {rounds} micro-batches "
                f"is not accepted; {why}"
            )

    def _expert_fault(self) -> str:
        """Return why the devices of a stage cannot be divided into groups of experts."""
        width, inner = self.strategy.expert_width, self.tp * self.cp
        devices, groups = inner * self.dp, f"{width} x {self.ep} = {width * self.ep}"
        if devices % (width * self.ep):
            fitting = [] if devices % width else divisors(devices // width)
            near = f"; nearest: {_nearest_counts(self.ep, fitting)}" if fitting else ""
            return (
                f"ep: etp x ep = {groups} does not divide tp x cp x dp = {self.tp} x {self.cp} x "
                f"{self.dp} = {devices}{near}"
            )
        return (
            f"ep: etp x ep = {groups} does not divide tp x cp = {inner}; with rank_order "
            "stages-inside experts are inside a replica, expected replicas-inside"
        )

    def _shard_fault(self, ep: int) -> str:
        """Return why state cannot be sharded over `shard` of `dp` replicas.

        `ep` is the fewest replicas that together have whole copies of all experts.
        """
        if self.zero == 0:
            return (
                f"shard: {self.shard} is not accepted with zero = 0, with which replicas share "
                "nothing; expected zero 1, 2 or 3"
            )
        near = _nearest_counts(int(self.shard or 0), sharing_counts(self.dp, ep))
        if self.dp % int(self.shard or 1):
            return f"shard: {self.shard} does not divide dp = {self.dp}; nearest: {near}"
        return (
            f"shard: {self.shard} is no multiple of {ep}, the replicas that experts span, so that "
            f"a group would not hold every expert equally often; nearest: {near}"
        )

    @classmethod
    def of(cls, plan: Plan | PlanSpec | Mapping[str, Any], source: str = "") -> PlanSpec:
        """Read a plan: a `Plan`, its plain data, fields of a `PlanSpec`, or a document of plans.

        `source` is put in front of every message: the file that the data came from.
        """
        if isinstance(plan, PlanSpec):
            return plan
        if isinstance(plan, Plan):
            return cls._of_plan(plan.to_dict())
        if not isinstance(plan, Mapping):
            raise InvalidTypeError(
                f"plan: {type(plan).__name__} is not accepted; expected a Plan, a PlanSpec or a "
                "mapping of its fields"
            )
        inside, several = plan.get("plan"), plan.get("plans")
        if isinstance(several, list) and several:  # the output of `plan --json`: take the best plan
            inside = several[0]
        data: Mapping[str, Any] = inside if isinstance(inside, Mapping) else plan
        if data is not plan:
            _check_fields(plan, _AROUND, "document of plans", source)
        if "micro_batches" in data and "parts_s" in data:
            return cls._of_plan(data, source)
        return cls.from_dict(dict(data), source)

    def overridden(self, changes: Mapping[str, Any]) -> tuple[PlanSpec, list[str]]:
        """Change some fields, and reset others that only suited the old values of these.

        Layers and recomputation of each stage belong to the number of chunks, `shard` to the
        number of replicas that share state. Also returns a message for each field that was reset.

        Examples
        --------
        >>> given = PlanSpec(pp=2, dp=2, global_batch=8, stages=(2, 4))
        >>> given.overridden({"pp": 4})[1]
        ['stages: 2, 4 layers are for pp = 2 and vpp = 1: blocks are divided evenly']
        """
        kept, notes = dict(changes), []
        schedule = changes.get("schedule", self.schedule)
        if schedule not in (self.schedule, "interleaved") and "vpp" not in changes:
            kept["vpp"] = 2 if schedule in TWO_CHUNKS else 1
        asked = {name: changes.get(name, getattr(self, name)) for name in ("pp", "vpp", "schedule")}
        if any(value != getattr(self, name) for name, value in asked.items()):
            whose = f"are for pp = {self.pp} and vpp = {self.vpp}"
            if self.stages is not None and "stages" not in changes:
                kept["stages"] = None
                layers = ", ".join(map(str, self.stages))
                notes.append(f"stages: {layers} layers {whose}: blocks are divided evenly")
            if isinstance(self.recompute, tuple) and "recompute" not in changes:
                modes = set(self.recompute)
                kept["recompute"] = modes.pop() if len(modes) == 1 else "auto"
                if kept["recompute"] == "auto":
                    notes.append(f"recompute: the modes of each stage {whose}: auto")
        shared = {"dp", "zero", "ep", "etp"} & set(changes)
        if self.shard is not None and shared and "shard" not in changes:
            kept["shard"] = None
            notes.append(f"shard: {self.shard} is for dp = {self.dp}: all replicas share state")
        return self.replace(**kept), notes

    @classmethod
    def _of_plan(cls, data: Mapping[str, Any], source: str = "") -> PlanSpec:
        """Read a complete `Plan`: decisions are checked, computed figures are ignored."""
        inside = f"{source}: " if source else ""
        missing = [name for name in _DECIDED if name not in data]
        if missing:
            raise InvalidInputError(f"{inside}{missing[0]}: is missing and has no default")
        _check_fields(data, _WRITTEN, "plan", source)
        decided = {name: data[name] for name in _StoredPlan.model_fields if name in data}
        stored = _StoredPlan.from_dict(decided, source)
        names = [name for name in cls.model_fields if name not in ("global_batch", "stages")]
        fields = {name: data[name] for name in names if data.get(name) is not None}
        fields |= {name: data[name] for name in _DECIDED if name in cls.model_fields}
        fields["idle"] = True
        fields["global_batch"] = stored.dp * stored.micro_batch * stored.micro_batches
        if fields.get("shard") == stored.dp:
            fields["shard"] = None
        if stored.stages:
            fields["recompute"] = tuple(stage.recompute for stage in stored.stages)
            fields["stages"] = stored.chunk_sizes()
        elif fields.get("recompute") == "mixed":
            fields["recompute"] = "auto"
        return cls.from_dict(fields, source)


_DECIDED = (
    *("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "micro_batches", "schedule", "vpp"),
    *("rank_order", "recompute"),
)
"""Fields that every plan in full has, as `Plan.to_dict` writes them."""


_WRITTEN = frozenset(
    {field.name for field in dataclass_fields(Plan)}
    | {name for name, value in vars(Plan).items() if isinstance(value, property)}
)
"""Fields and computed figures of a plan in full."""

_AROUND = _WRITTEN.union(
    ("plan", "plans", "model", "cluster", "calibration", "budget"),
    ("status", "bound_s", "gap", "space", "devices", "tried", "excluded", "rejected", "shortfall"),
    ("nearest", "framework", "free", "front", "why_not"),
    ("asked", "slower_by", "reason", "unlimited", "text"),
    ("chip", "chip_text", "index", "grid_index", "value", "area_mm2", "hbm_bytes", "cost_usd"),
)
"""Fields of documents that contain plans: of `predict` and `plan`, of `WhyNot` and of `Design`."""


def _check_fields(
    data: Mapping[str, Any], accepted: frozenset[str], what: str, source: str
) -> None:
    """Raise an `InvalidInputError` for the first field that is not accepted."""
    for name in data:
        if name not in accepted:
            inside = f"{source}: " if source else ""
            known = nearest(str(name), sorted(accepted))
            raise InvalidInputError(f"{inside}{name}: is no field of a {what}; {known}")


class _StoredStage(Record):
    """Decisions of one stage of a complete plan; its figures are ignored."""

    what: ClassVar[str] = "stage"
    chunks: tuple[Count, ...]
    recompute: str

    @model_validator(mode="before")
    @classmethod
    def _drop_figures(cls, data: Any) -> Any:
        kept = ("chunks", "recompute")
        return {k: data[k] for k in kept if k in data} if isinstance(data, Mapping) else data


class _StoredPlan(Record):
    """Fields of a complete plan that determine the batch and the sizes of stages."""

    what: ClassVar[str] = "plan"
    dp: Count
    micro_batch: Count
    micro_batches: Count
    pp: Count
    vpp: Count
    schedule: ScheduleName
    global_batch: Count | None = None
    stages: tuple[_StoredStage, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_chunks(self.schedule, self.vpp)
        each = self.dp * self.micro_batch
        if self.global_batch not in (None, each * self.micro_batches):
            raise ValueError(
                f"micro_batches: {self.micro_batches} is not accepted; expected global_batch / "
                f"(dp x micro_batch) = {self.global_batch} / ({self.dp} x {self.micro_batch})"
            )
        return self

    def chunk_sizes(self) -> tuple[int, ...]:
        """Return the layers of each chunk, in the order of the model."""
        if len(self.stages) != self.pp:
            raise InvalidInputError(
                f"stages: {len(self.stages)} entries are not accepted; expected pp = {self.pp}"
            )
        chain = _core.pipeline_chain(SCHEDULES.index(self.schedule), self.pp, self.vpp).tolist()
        chunks = [size for stage in self.stages for size in stage.chunks]
        if len(chunks) != len(chain):
            raise InvalidInputError(
                f"stages: {len(chunks)} chunks are not accepted; expected {self.pp} stages x "
                f"{self.vpp}"
            )
        return tuple(chunks[chain.index(place)] for place in range(max(chain) + 1))
