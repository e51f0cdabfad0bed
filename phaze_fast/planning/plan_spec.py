"""A parallel plan as a user gives it: widths, schedule, stages, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.memory import SCHEDULES, ScheduleName, check_chunks, places
from phaze_fast.opgraph import Strategy
from phaze_fast.planning.hybrid import check_shard, nearest_counts
from phaze_fast.planning.pipelines import refusal
from phaze_fast.planning.plans import Plan
from phaze_fast.planning.recompute import RECOMPUTE, check_stage_recompute, modes_in
from phaze_fast.planning.training import expert_fields
from phaze_fast.records import Bytes, Count, Record
from phaze_fast.software import (
    BF16,
    DEFAULT,
    PrecisionOrName,
    SoftwareOrName,
    load_precision,
    load_software,
)

__all__ = ["PlanSpec"]


class PlanSpec(Record):
    """A parallel plan as a user gives it.

    Examples
    --------
    >>> PlanSpec(tp=8, pp=4, dp=2, global_batch=64).devices
    64
    """

    what: ClassVar[str] = "plan"
    global_batch: Count
    """Sequences of one step, over all replicas."""
    tp: Count = 1
    """Tensor-parallel width."""
    pp: Count = 1
    """Pipeline stages."""
    dp: Count = 1
    """Replicas."""
    cp: Count = 1
    """Context-parallel width."""
    cp_kind: Literal["all-gather", "ring", "ulysses"] = "all-gather"
    """How its devices attend to the whole sequence: keys and values gathered, sent round a ring, or
    rows exchanged for heads."""
    ep: Count = 1
    """Expert-parallel width; a part of the replicas."""
    etp: Count | None = None
    """Devices that share the matrices of each expert, a divisor of `tp`; by default as many."""
    expert_imbalance: Annotated[float, Field(ge=1, le=1024, allow_inf_nan=False)] = 1.0
    """Tokens of the busiest device of an expert group over their mean."""
    expert_overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Share of the seconds of expert-parallel exchanges that other work hides."""
    zero: Literal[0, 1, 2, 3] = 0
    """What replicas share: optimiser state (1), gradients (2), weights (3)."""
    shard: Count | None = None
    """How many neighbouring replicas share it, while such groups hold copies of it (hybrid
    sharding); by default all."""
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
    stages: tuple[Count, ...] | None = None
    """Layers of each stage (of each chunk where interleaved), embedding and head counted; by
    default blocks are dealt out evenly."""
    rank_order: Literal["replicas-inside", "stages-inside"] = "replicas-inside"
    """Which lie closer together after tensor and context groups."""
    sequence_parallel: bool = True
    """Whether tensor-parallel devices share the rows of norms and residuals."""
    seq: Count | None = None
    """Tokens of a sequence; by default the model's."""
    optimizer: str = "adam"
    """The optimiser, whose state takes memory: adam, adam-bf16-grad, adam-fp32, sgd and others of
    `phaze_fast.memory.OPTIMIZERS`."""
    precision: PrecisionOrName = Field(default_factory=lambda: load_precision(BF16))
    """Number format of the blocks' products, by name: bf16, fp16, fp8, fp8-current, fp8-block,
    mxfp8, nvfp4, int8."""
    software: SoftwareOrName = Field(default_factory=lambda: load_software(DEFAULT))
    """What runs the step: a profile, by name or as a file."""
    reserved_bytes: Bytes = 3 * 2**29
    """Of each device's memory that is not for the model."""
    idle: bool = False
    """Whether devices of the cluster may be left idle."""

    @property
    def devices(self) -> int:
        """Devices that it takes."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to recompute that it needs told apart."""
        words = self.recompute if isinstance(self.recompute, tuple) else (self.recompute,)
        return RECOMPUTE if words == ("auto",) else modes_in(words)

    @property
    def strategy(self) -> Strategy:
        """How a layer is split over devices."""
        return Strategy(
            tp=self.tp,
            sequence_parallel=self.sequence_parallel and self.tp > 1,
            cp=self.cp,
            cp_kind=self.cp_kind if self.cp > 1 else "all-gather",
            ep=self.ep,
            etp=None if self.etp == self.tp else self.etp,
            **({} if self.ep == 1 else expert_fields(self)),
            micro_batch=self.micro_batch,
            seq=self.seq,
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.global_batch % (self.dp * self.micro_batch):
            raise ValueError(
                f"global_batch: {self.global_batch} is not a multiple of dp x micro_batch = "
                f"{self.dp} x {self.micro_batch} = {self.dp * self.micro_batch}"
            )
        check_chunks(self.schedule, self.vpp)
        spread = self.strategy.expert_replicas
        if self.dp % spread:
            parts = "" if spread == self.ep else f" / (tp / etp) = {spread}"
            near = nearest_counts(spread, (n for n in range(1, self.dp + 1) if self.dp % n == 0))
            raise ValueError(
                f"ep: {self.ep}{parts} does not divide dp = {self.dp}; nearest: {near}"
            )
        if self.shard is not None and not (self.shard == self.dp and self.zero == 0):
            check_shard(self.shard, self.dp, spread, self.zero)
        rounds = self.global_batch // (self.dp * self.micro_batch)
        if self.pp > 1 and (why := refusal(self.schedule, self.pp, rounds, self.vpp)):
            raise ValueError(
                f"schedule: {self.schedule} with pp = {self.pp}, vpp = {self.vpp} and "
                f"{self.global_batch} / ({self.dp} x {self.micro_batch}) = {rounds} micro-batches "
                f"is not accepted; {why}"
            )
        chunks = places(self.schedule, self.pp, self.vpp)
        if self.stages is not None and len(self.stages) != chunks:
            each = "pp" if self.schedule == "dualpipe" else f"pp x vpp = {self.pp} x {self.vpp}"
            raise ValueError(
                f"stages: {len(self.stages)} entries are not accepted; expected {each} = {chunks}"
            )
        words = self.recompute if isinstance(self.recompute, tuple) else (self.recompute,)
        for word in words:
            if word != "auto" or isinstance(self.recompute, tuple):
                check_stage_recompute(word)
        if len(self.modes) > _core.MAX_VARIANTS:
            raise ValueError(
                f"recompute: {len(self.modes)} modes are not accepted; expected "
                f"{_core.MAX_VARIANTS} or fewer"
            )
        if isinstance(self.recompute, tuple) and len(self.recompute) != self.pp:
            raise ValueError(
                f"recompute: {len(self.recompute)} entries are not accepted; expected one word, or "
                f"one for each of pp = {self.pp} stages"
            )
        return self

    @classmethod
    def of(cls, plan: Plan | PlanSpec | Mapping[str, Any]) -> PlanSpec:
        """Read a plan: one that was found, one as plain data, or a document that holds some."""
        if isinstance(plan, PlanSpec):
            return plan
        if isinstance(plan, Plan):
            return cls._of_found(plan.to_dict())
        if not isinstance(plan, Mapping):
            raise InvalidTypeError(
                f"plan: {type(plan).__name__} is not accepted; expected a Plan, a PlanSpec or a "
                "mapping of its fields"
            )
        inside, several = plan.get("plan"), plan.get("plans")
        if isinstance(several, list) and several:  # what `plan --json` writes: its best
            inside = several[0]
        data: Mapping[str, Any] = inside if isinstance(inside, Mapping) else plan
        if "micro_batches" in data and "parts_s" in data:
            return cls._of_found(data)
        return cls.from_dict(dict(data))

    @classmethod
    def _of_found(cls, data: Mapping[str, Any]) -> PlanSpec:
        names = ("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "schedule", "vpp")
        given = {name: data[name] for name in (*names, "rank_order")}
        given["idle"] = True
        given["global_batch"] = data["dp"] * data["micro_batch"] * data["micro_batches"]
        later = ("shard", "cp_kind", "etp", "expert_imbalance", "expert_overlap", "precision")
        for name in (*later, "seq", "optimizer", "reserved_bytes", "sequence_parallel", "software"):
            if data.get(name) is not None:
                given[name] = data[name]
        if "stages" in data:
            given["recompute"] = tuple(stage["recompute"] for stage in data["stages"])
            code = SCHEDULES.index(str(data["schedule"]))
            given["stages"] = _chunk_sizes(data["stages"], code, int(data["vpp"]))
        else:
            given["recompute"] = data["recompute"] if data["recompute"] != "mixed" else "auto"
        return cls(**given)


def _chunk_sizes(stages: Sequence[Mapping[str, Any]], schedule: int, vpp: int) -> tuple[int, ...]:
    """Layers of each chunk, in the order of the model."""
    chain = _core.pipeline_chain(schedule, len(stages), vpp).tolist()
    chunks = [int(n) for stage in stages for n in stage["chunks"]]
    if len(chunks) != len(chain):
        raise InvalidInputError(
            f"stages: {len(chunks)} chunks are not accepted; expected {len(stages)} stages x {vpp}"
        )
    return tuple(chunks[chain.index(place)] for place in range(max(chain) + 1))
