"""A training step as a user wants it: batch, widths, what is fixed and what is free."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from phaze_fast import _core
from phaze_fast.memory import OPTIMIZERS, ScheduleName
from phaze_fast.opgraph import check_recompute
from phaze_fast.planning.recompute import RECOMPUTE
from phaze_fast.records import Bytes, Count, Record
from phaze_fast.software import (
    BF16,
    DEFAULT,
    PrecisionOrName,
    SoftwareOrName,
    load_precision,
    load_software,
)

__all__ = ["RANK_ORDERS", "Training", "expert_fields", "recompute_modes"]

RANK_ORDERS = ("replicas-inside", "stages-inside")
"""Which of the two lies closer together in rank order, after the tensor-parallel groups."""


def _several(value: Any) -> Any:
    """Take one value where several are accepted, and none twice."""
    return tuple(dict.fromkeys(value)) if isinstance(value, list | tuple) else (value,)


def _sharing(value: Any) -> Any:
    """Take counts, also as text, and the words for them."""
    words = _several(value)
    return tuple(int(w) if isinstance(w, str) and w.isdecimal() else w for w in words)


Counts = Annotated[tuple[Count, ...], BeforeValidator(_several), Field(min_length=1)]


class Training(Record):
    """One training step, and what a plan for it may look like.

    Where several values are given, all are tried.

    Examples
    --------
    >>> Training(global_batch=512, micro_batch=2).micro_batch
    (2,)
    """

    what: ClassVar[str] = "training"
    global_batch: Count
    """Sequences of one step, over all replicas."""
    seq: Count | None = None
    """Tokens of a sequence; by default the model's."""
    micro_batch: Counts = (1, 2, 4, 8)
    """Sequences a device works on at once."""
    tp: Counts | None = None
    """Tensor-parallel widths to try; by default powers of two up to a node (to 8 where there are no
    nodes)."""
    pp: Counts | None = None
    """Counts of pipeline stages to try; by default all."""
    dp: Counts | None = None
    """Counts of data-parallel replicas to try; by default all that divide the batch."""
    cp: Counts | None = None
    """Context-parallel widths to try; by default 1, and for long sequences powers of two that
    leave a device 8,192 tokens or more."""
    cp_kind: Annotated[
        tuple[Literal["auto", "all-gather", "ring", "ulysses"], ...],
        BeforeValidator(_several),
        Field(min_length=1),
    ] = ("auto",)
    """How devices that share a sequence attend to all of it, to be tried: keys and values gathered
    (``all-gather``), sent round a ``ring``, or rows exchanged for heads (``ulysses``); auto: all
    that the model allows."""
    ep: Counts | None = None
    """Expert-parallel widths to try, a part of the replicas; by default 1, and for mixtures of
    experts powers of two that divide them, up to 64."""
    etp: Counts | None = None
    """Widths over the matrices of each expert to try, divisors of the tensor-parallel width; by
    default that width."""
    expert_imbalance: Annotated[float, Field(ge=1, le=1024, allow_inf_nan=False)] = 1.0
    """Tokens of the busiest device of an expert group over their mean."""
    expert_overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Share of the seconds of expert-parallel exchanges that other work hides."""
    sequence_parallel: bool = True
    """Whether tensor-parallel devices share the rows of norms and residuals."""
    zero: Annotated[
        tuple[Literal[0, 1, 2, 3], ...], BeforeValidator(_several), Field(min_length=1)
    ] = (0, 1)
    """What replicas share: optimiser state (1), gradients (2), weights (3)."""
    shard: Annotated[
        tuple[Count | Literal["auto", "all", "node"], ...],
        BeforeValidator(_sharing),
        Field(min_length=1),
    ] = ("auto",)
    """How many neighbouring replicas share what ZeRO shares, while such groups hold copies of it
    (hybrid sharding): a count, ``all``, or ``node`` for as many as a node holds; auto: all, and
    with ZeRO 2 and 3 those of a node too."""
    recompute: Annotated[tuple[str, ...], BeforeValidator(_several), Field(min_length=1)] = (
        "auto",
    )
    """What a stage may compute again in the backward pass: ``none``, ``selective`` (attention
    scores), ``needed``, ``full``, or sets of operators joined by ``+`` (norms, activations,
    gated-product, up-projection, output-projection, alternate-products, attention). Of
    several each stage has the fastest that fits; auto: of all."""
    recompute_some: bool = True
    """Whether a stage may recompute its first blocks in one way and the others in another, no more
    of them than it must."""
    schedule: Annotated[
        tuple[ScheduleName, ...],
        BeforeValidator(_several),
        Field(min_length=1),
    ] = ("1f1b", "interleaved")
    """Orders of forward and backward passes to try: 1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v,
    dualpipe, dualpipe-v."""
    vpp: Counts = (2, 4)
    """Chunks per stage to try where interleaved."""
    optimizer: str = "adam"
    """The optimiser, whose state takes memory: adam, adam-bf16-grad, adam-fp32, sgd and others of
    `phaze_fast.memory.OPTIMIZERS`."""
    rank_order: Literal["auto", "replicas-inside", "stages-inside"] = "auto"
    """Which dimension lies closer together; auto: replicas, and stages too where those of a replica
    fit into a node, whichever is faster."""
    precision: PrecisionOrName = Field(default_factory=lambda: load_precision(BF16))
    """Number format of the blocks' products, by name: bf16, fp16, fp8, fp8-current, fp8-block,
    mxfp8, nvfp4, int8."""
    software: SoftwareOrName = Field(default_factory=lambda: load_software(DEFAULT))
    """What runs the step: a profile, by name or as a file."""
    reserved_bytes: Bytes = 3 * 2**29
    """Of each device's memory that is not for the model: driver, libraries, their buffers."""
    tied: tuple[tuple[int, int], ...] = ()
    """Pairs of positions in the model's layers that one stage must hold."""
    uncut: tuple[int, ...] = ()
    """Positions in the model's layers before which there may be no cut."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for mode in recompute_modes(self):
            check_recompute(mode)
        if len(recompute_modes(self)) > _core.MAX_VARIANTS:
            raise ValueError(
                f"recompute: {len(self.recompute)} modes are not accepted; expected "
                f"{_core.MAX_VARIANTS} or fewer"
            )
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer: {self.optimizer!r} is not accepted; expected one of "
                f"{', '.join(OPTIMIZERS)}"
            )
        if any(at < 1 for at in self.uncut):
            raise ValueError(
                f"uncut: {min(self.uncut)} is not accepted; expected positions from 1 up"
            )
        if 1 in self.vpp:
            raise ValueError("vpp: 1 is not accepted; expected 2 or more chunks per stage")
        return self


def recompute_modes(training: Training) -> tuple[str, ...]:
    """Ways to recompute that a stage may choose from, least first."""
    return RECOMPUTE if training.recompute == ("auto",) else training.recompute


def expert_fields(asked: Any) -> dict[str, float]:
    """Facts about expert parallelism that a `Training` or a `PlanSpec` gives, by field."""
    return {name: getattr(asked, name) for name in ("expert_imbalance", "expert_overlap")}
