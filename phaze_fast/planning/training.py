"""A training step as a user describes it: batch, widths, and which choices are fixed or free.

The recomputation of a stage is written as text: ``full`` recomputes every block, ``full:3`` the
first three blocks of each of its chunks and nothing of the others, ``full:3/norms`` the norms
of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from phaze_fast import _core
from phaze_fast.errors import not_accepted
from phaze_fast.memory import OPTIMIZERS, SCHEDULES, ScheduleName, optimizer
from phaze_fast.opgraph import (
    DISPATCHERS,
    ContextKind,
    Fusion,
    Strategy,
    canonical_recompute,
    context_code,
    recompute_order,
)
from phaze_fast.records import Bytes, Count, Record, Several
from phaze_fast.software import (
    BF16,
    DEFAULT,
    PrecisionOrName,
    SoftwareOrName,
    load_precision,
    load_software,
)

OVERLAPPING = ("dualpipe", "dualpipe-v")
"""Schedules that run forward and backward passes of two micro-batches together, so that exchanges
of experts in one overlap with the computation of the other (DeepSeek-V3, section 3.2.1)."""

RANK_ORDERS = ("replicas-inside", "stages-inside")
"""What ranks count first after tensor and context groups: replicas, or stages."""

# ---- what a stage recomputes ----

RECOMPUTE = (
    "none",
    "selective",
    "activations+gated-product",
    "norms+activations+gated-product",
    "norms+activations+gated-product+up-projection",
    "norms+activations+gated-product+attention",
    "norms+activations+gated-product+up-projection+attention",
    "full",
)
"""Modes of recomputation that ``auto`` chooses from, least recomputation first."""
OFFLOADING = (
    "offload",
    "norms+activations+gated-product+offload",
    "norms+activations+gated-product+up-projection+offload",
)
"""Modes that ``auto`` also chooses from where activations may be kept in the host's memory."""


def split_recompute(text: str) -> tuple[str, str, int]:
    """Split ``more:count/rest`` into (rest, more, count); for a single mode, the count is 0."""
    first, _, rest = text.partition("/")
    more, colon, count = first.partition(":")
    if not colon:
        if rest:
            raise not_accepted("recompute", text, "MODE or MODE:N/MODE")
        return more, more, 0
    if not count.isdecimal() or len(count) > 6 or int(count) < 1:
        raise ValueError(
            f"recompute: {count!r} in {text!r} is not accepted; expected how many blocks, 1 or more"
        )
    return rest or "none", more, int(count)


def check_stage_recompute(text: str) -> None:
    """Check the recomputation of one stage.

    Raises
    ------
    ValueError
        Where the text is malformed or names an unknown mode.
    """
    rest, more, _ = split_recompute(text)
    for mode in (rest, more):
        canonical_recompute(mode)


def check_recompute_count(modes: Sequence[str]) -> None:
    """Check that there are no more modes of recomputation than the plan kernel allows.

    Raises
    ------
    ValueError
        Where there are more.
    """
    if len(modes) > _core.MAX_VARIANTS:
        raise ValueError(
            f"recompute: {len(modes)} modes are not accepted; expected "
            f"{_core.MAX_VARIANTS} or fewer"
        )


def modes_in(texts: Sequence[str]) -> tuple[str, ...]:
    """List the distinct modes in some texts, least recomputation first.

    Examples
    --------
    >>> modes_in(["full:3/norms", "none"])
    ('none', 'norms', 'full')
    """
    named = {mode for text in texts for mode in split_recompute(text)[:2]}
    return tuple(sorted(named, key=recompute_order))


def recompute_code(text: str, variant_of: Mapping[str, int]) -> int:
    """Encode the recomputation of a stage as the plan kernel reads it."""
    rest, more, count = split_recompute(text)
    if count == 0 or variant_of[more] == variant_of[rest]:
        return variant_of[rest]
    return variant_of[rest] + _core.MAX_VARIANTS * (variant_of[more] + _core.MAX_VARIANTS * count)


def stage_modes(code: int, variants: Sequence[str]) -> tuple[str, str, int]:
    """Decode the mode of the first blocks of each chunk of a stage, of the rest, and how many."""
    code, rest = divmod(code, _core.MAX_VARIANTS)
    count, more = divmod(code, _core.MAX_VARIANTS)
    return variants[more], variants[rest], count


def block_mode(code: int, number: int, variants: Sequence[str]) -> str:
    """Decode the mode of block `number`, counted from 1, of each chunk of a stage."""
    more, rest, count = stage_modes(code, variants)
    return more if number <= count else rest


def recompute_text(code: int, variants: Sequence[str]) -> str:
    """Decode the kernel's number for the recomputation of a stage into text."""
    more, rest, count = stage_modes(code, variants)
    if count == 0:
        return rest
    return f"{more}:{count}{'' if rest == 'none' else f'/{rest}'}"


# ---- the step ----


def _counts_in_words(value: Any) -> Any:
    """Accept counts written as text where words are allowed too."""
    words = value if isinstance(value, list | tuple) else (value,)
    return tuple(int(w) if isinstance(w, str) and w.isdecimal() else w for w in words)


def _shard_order(value: int | str) -> tuple[bool, int | str]:
    return isinstance(value, str), value


Counts = Annotated[tuple[Count, ...], Several()]


class TrainingStep(Record):
    """One training step: the fields that all of its plans share."""

    global_batch: Count
    """Sequences of one step, over all replicas."""
    seq: Count | None = None
    """Tokens of a sequence; by default the model's."""
    sequence_parallel: bool = True
    """Whether tensor-parallel devices share the rows of norms and residuals."""
    expert_imbalance: Annotated[float, Field(ge=1, le=1024, allow_inf_nan=False)] | None = None
    """Tokens of the busiest device of an expert group over their mean; by default that of
    published runs with such a router, 1 where experts have a capacity."""
    expert_overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Share of the seconds of expert-parallel exchanges that other work hides."""
    overlap_experts: bool | None = None
    """Whether these exchanges run during passes of another micro-batch, which hide them for as long
    as the passes last; by default only under dualpipe and dualpipe-v."""
    optimizer: str | None = None
    """The optimiser, whose state takes memory: adam, adam-bf16-grad, adam-fp32, sgd and others of
    `phaze_fast.memory.OPTIMIZERS`; by default that of the software."""
    precision: PrecisionOrName = Field(default_factory=lambda: load_precision(BF16))
    """Number format of the blocks' products, by name: bf16, fp16, fp8, fp8-current, fp8-block,
    mxfp8, nvfp4, int8."""
    software: SoftwareOrName = Field(default_factory=lambda: load_software(DEFAULT))
    """What runs the step: a profile, by name or as a file."""
    fusion: Fusion = "none"
    """What is fused: none; epilogues, element-wise operators onto the product before them; full,
    also products with one another, whose arrays stay on chip as far as its buffer allows."""
    reserved_bytes: Bytes = 3 * 2**29
    """Memory of each device that the model cannot use: driver, libraries, their buffers."""

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.optimizer_name not in OPTIMIZERS:
            raise not_accepted("optimizer", self.optimizer_name, f"one of {', '.join(OPTIMIZERS)}")
        return self

    @property
    def optimizer_name(self) -> str:
        """Name of the optimiser: the one that is set, else that of the software.

        Examples
        --------
        >>> Training(global_batch=8, software="huggingface-eager").optimizer_name
        'adam-bf16'
        """
        return self.optimizer or self.software.optimizer

    def strategy_of(
        self,
        tp: int,
        cp: int,
        cp_kind: Any,
        ep: int,
        etp: int | None,
        micro_batch: int,
        overlapping: bool = False,
        dispatcher: Any = "all-to-all",
        offload_optimizer: bool = False,
    ) -> Strategy:
        """Build the strategy of these widths, with every field that has no effect at its default.

        Parameters
        ----------
        tp, cp, cp_kind, ep, etp, micro_batch, dispatcher
            The widths; see `phaze_fast.opgraph.Strategy`.
        overlapping
            Whether the schedule is one of `OVERLAPPING`, and there are several stages.
        offload_optimizer
            Whether the host has the optimiser's state and updates it.
        """
        overlap = overlapping if self.overlap_experts is None else self.overlap_experts
        return Strategy(
            tp=tp,
            sequence_parallel=self.sequence_parallel and tp > 1,
            cp=cp,
            cp_kind=cp_kind if cp > 1 else "all-gather",
            ep=ep,
            etp=None if etp == tp else etp,
            dispatcher=dispatcher if ep > 1 else "all-to-all",
            expert_imbalance=self.expert_imbalance if ep > 1 else 1.0,
            expert_overlap=self.expert_overlap if ep > 1 else 0.0,
            overlap_experts=overlap and ep > 1,
            offload_optimizer=offload_optimizer,
            micro_batch=micro_batch,
            seq=self.seq,
        )

    def check_offload(self) -> None:
        """Check that the host can update the optimiser's state.

        Raises
        ------
        ValueError
            Where the optimiser has state of whole matrices.
        """
        own = optimizer(self.optimizer_name)
        if own.newton_schulz_steps or own.factor_bytes or own.vector_state_bytes:
            raise ValueError(
                f"offload: the state of {self.optimizer_name} is not kept by the host; expected an "
                "optimiser with the same state for every parameter, such as adam"
            )


class Training(TrainingStep):
    """One training step, and the plans that are allowed for it.

    Where a field has several values, all are tried; neither their order nor repetition matters.

    Examples
    --------
    >>> Training(global_batch=512, micro_batch=2).micro_batch
    (2,)
    """

    what: ClassVar[str] = "training"
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
    leave a device 8,192 tokens or more (1,024 in mixtures of experts)."""
    cp_kind: Annotated[
        tuple[Literal["auto"] | ContextKind, ...],
        Several(lambda kind: -1 if kind == "auto" else context_code(kind)),
    ] = ("auto",)
    """Kinds of context parallelism to try: keys and values gathered (``all-gather``), passed round
    a ``ring``, rows exchanged for heads (``ulysses``), or the last between N neighbours and a ring
    between the groups of N (``ulysses:N/ring``); auto: all that the model allows, mixed ones where
    a context group spans nodes and N of its devices do not."""
    ep: Counts | None = None
    """Expert-parallel widths to try; by default 1, and for mixtures of experts every divisor of
    the number of experts."""
    etp: Counts | None = None
    """Counts of devices that share each expert's matrices to try, where ``etp * ep`` divides
    ``tp * cp * dp``; by default powers of two up to the tensor-parallel width and that width, and
    where `ep` is fixed to 1 that width alone."""
    dispatcher: Annotated[
        tuple[Literal["auto", "all-to-all", "all-gather"], ...],
        Several(("auto", *DISPATCHERS).index),
    ] = ("auto",)
    """How rows reach experts: each is sent to the devices of its experts (``all-to-all``), or the
    devices with one copy of all experts gather all rows (``all-gather``); auto: both, the second
    where `ep` is at most the number of experts per row."""
    zero: Annotated[tuple[Literal[0, 1, 2, 3], ...], Several()] = (0, 1, 2, 3)
    """What replicas share: optimiser state (1), gradients (2), weights (3)."""
    shard: Annotated[
        tuple[Count | Literal["auto", "all", "node"], ...],
        Several(_shard_order),
        BeforeValidator(_counts_in_words),
    ] = ("auto",)
    """How many neighbouring replicas share what `zero` says; if fewer than all, each such group has
    a copy (hybrid sharding): a count, ``all``, or ``node`` for as many as a node holds; auto: all,
    and with ZeRO 2 and 3 those of a node too."""
    recompute: Annotated[tuple[str, ...], Several()] = ("auto",)
    """What a stage may compute again in the backward pass: ``none``, ``selective`` (attention
    scores), ``needed``, ``full``, or sets of operators joined by ``+`` (norms, activations,
    gated-product, up-projection, output-projection, alternate-products, attention). Of
    several each stage has the fastest that fits; auto: of the eight that `Plans.space` lists."""
    offload: Annotated[tuple[Literal["activations", "optimizer"], ...], Several(least=0)] = ()
    """What plans may keep in the host's memory, over a link of the chip's field `host`: activations
    of blocks, which then are a choice besides recomputation where `recompute` is auto; the
    optimiser's state, which the host then updates."""
    recompute_some: bool = True
    """Whether a stage may recompute its first blocks by one mode and the others by another, with as
    few blocks in the costlier mode as fit."""
    schedule: Annotated[tuple[ScheduleName, ...], Several(SCHEDULES.index)] = (
        "1f1b",
        "interleaved",
    )
    """Orders of forward and backward passes to try: 1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v,
    dualpipe, dualpipe-v."""
    vpp: Counts = (2, 4)
    """Chunks per stage to try where interleaved."""
    rank_order: Literal["auto", "replicas-inside", "stages-inside"] = "auto"
    """Whose ranks are adjacent: replicas of a stage or stages of a replica; auto: replicas, and
    stages too where all stages of a replica fit into a node, whichever is faster."""
    tied: Annotated[tuple[tuple[int, int], ...], Several(least=0)] = ()
    """Pairs of positions in the model's layers that one stage must hold."""
    uncut: Annotated[tuple[int, ...], Several(least=0)] = ()
    """Positions in the model's layers before which there may be no cut."""

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """Modes of recomputation that a stage may choose from, least first."""
        if self.recompute != ("auto",):
            return self.recompute
        return RECOMPUTE + OFFLOADING * ("activations" in self.offload)

    @field_validator("recompute")
    @classmethod
    def _sort_modes(cls, modes: tuple[str, ...]) -> tuple[str, ...]:
        if modes == ("auto",):
            return modes
        return tuple(sorted({canonical_recompute(mode) for mode in modes}, key=recompute_order))

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_recompute_count(self.recompute_modes)
        if any(at < 1 for at in self.uncut):
            raise ValueError(
                f"uncut: {min(self.uncut)} is not accepted; expected positions from 1 up"
            )
        if "optimizer" in self.offload:
            self.check_offload()
        if 1 in self.vpp:
            raise ValueError("vpp: 1 is not accepted; expected 2 or more chunks per stage")
        return self
