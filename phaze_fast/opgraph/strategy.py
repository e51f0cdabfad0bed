"""Parallel widths of a layer, the resulting shapes on one device, and rules of divisibility."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from phaze_fast.errors import InfeasibleError, not_accepted
from phaze_fast.models import GraphLayer, GraphModel, Model, TransformerModel, recognised
from phaze_fast.opgraph.family import together
from phaze_fast.records import Count, Record

CONTEXT_KINDS = ("all-gather", "ring", "ulysses")
"""How devices that share a sequence attend to all of it: keys and values gathered, sent round a
ring while attention is at work, or rows exchanged for heads. ``ulysses:N/ring`` mixes the last two:
N neighbours exchange rows for heads, and a ring links the groups of N (Megatron-Core's hierarchical
context parallelism, a2a+p2p; Fang and Zhao 2024, arXiv:2405.07719)."""
DISPATCHERS = ("all-to-all", "all-gather")
"""Collectives by which rows reach the experts of other devices."""
_MIXED = re.compile(r"ulysses:([2-9]|[1-9][0-9]{1,4})/ring")


def check_context_kind(kind: str) -> str:
    """Return a kind of context parallelism if there is such a kind.

    Raises
    ------
    ValueError
        Where it is neither one of `CONTEXT_KINDS` nor ``ulysses:N/ring``.
    """
    if kind not in CONTEXT_KINDS and _MIXED.fullmatch(kind) is None:
        raise not_accepted("cp_kind", kind, f"{', '.join(CONTEXT_KINDS)} or ulysses:N/ring")
    return kind


def context_widths(kind: str, cp: int) -> tuple[int, int]:
    """Return how many neighbours exchange rows for heads, and how many such groups there are.

    Examples
    --------
    >>> [context_widths(kind, 8) for kind in ("ring", "ulysses", "ulysses:2/ring")]
    [(1, 8), (8, 1), (2, 4)]
    """
    mixed = _MIXED.fullmatch(kind)
    inside = int(mixed[1]) if mixed else cp if kind == "ulysses" else 1
    return inside, cp // inside


def context_code(kind: str) -> int:
    """Return the integer code of a kind of context parallelism."""
    mixed = _MIXED.fullmatch(kind)
    return len(CONTEXT_KINDS) + int(mixed[1]) if mixed else CONTEXT_KINDS.index(kind)


def context_kind(code: int) -> str:
    """Return the kind of context parallelism that has a code of `context_code`.

    Examples
    --------
    >>> context_kind(context_code("ulysses:4/ring"))
    'ulysses:4/ring'
    """
    known = len(CONTEXT_KINDS)
    return CONTEXT_KINDS[code] if code < known else f"ulysses:{code - known}/ring"


ContextKind = Annotated[
    str,
    AfterValidator(check_context_kind),
    WithJsonSchema(
        {"type": "string", "pattern": f"^({'|'.join(CONTEXT_KINDS)}|{_MIXED.pattern})$"}
    ),
]
"""A kind of context parallelism, as text."""


class Strategy(Record):
    """How one layer is split over devices.

    Examples
    --------
    >>> from phaze_fast import models
    >>> reasons(models.load("gpt2"), Strategy(tp=4))
    ['tp: 4 does not divide 25 heads']
    """

    what: ClassVar[str] = "strategy"
    tp: Count = 1
    """Devices that share each matrix, as Megatron-LM splits them."""
    sequence_parallel: bool = False
    """Whether those devices also share the rows of norms, residuals and dropouts."""
    cp: Count = 1
    """Devices that share the rows of a sequence everywhere."""
    cp_kind: ContextKind = "all-gather"
    """How those devices attend to the whole sequence; see `CONTEXT_KINDS`."""
    ep: Count = 1
    """Devices that share the experts of a mixture."""
    etp: Count | None = None
    """Devices that share the matrices of each expert; by default `tp`. Of the devices of a stage,
    counted by tensor, then context, then replica index, every `etp` neighbours share an expert and
    every ``etp * ep`` neighbours have one copy of all experts (Megatron-Core's folding)."""
    dispatcher: Literal["all-to-all", "all-gather"] = "all-to-all"
    """How rows reach experts: each is sent to the devices of its experts, or all devices that have
    one copy of the experts gather all rows."""
    expert_imbalance: Annotated[float, Field(ge=1, le=1024, allow_inf_nan=False)] | None = 1.0
    """Tokens of the busiest device of an expert group over the mean of its devices; None: the value
    of published runs with such a router (`MixtureOfExperts.busiest_load`)."""
    expert_overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Share of the time of collectives that send rows to experts and back that other work hides."""
    overlap_experts: bool = False
    """Whether these collectives run during passes of another micro-batch, which hide them up to the
    time that the passes take."""
    offload_optimizer: bool = False
    """Whether the host has the optimiser's state and updates it."""
    micro_batch: Count = 1
    """Sequences a device works on at once."""
    seq: Count | None = None
    """Sequence length; by default the model's."""

    @property
    def expert_width(self) -> int:
        """Devices that share the matrices of each expert."""
        return self.etp or self.tp

    def with_load(self, model: Model) -> Strategy:
        """Return the strategy, with the imbalance of the model's router if it gives none itself."""
        if self.expert_imbalance is not None:
            return self
        moe = model.moe if isinstance(model, TransformerModel) else None
        load = 1.0 if moe is None else moe.busiest_load(self.ep)
        return self.changed(expert_imbalance=load)

    @property
    def expert_devices(self) -> int:
        """Neighbouring devices of a stage that together have one copy of all experts."""
        return self.expert_width * self.ep

    @property
    def groups(self) -> dict[str, tuple[int, int]]:
        """Devices of each group that communicates, and the distance of neighbours in ranks.

        Ranks count tensor-parallel devices first, then those of a context group, then replicas.
        """
        inside, outside = context_widths(self.cp_kind, self.cp)
        return {
            "tensor": (self.tp, 1),
            "context": (self.cp, self.tp),
            "context-heads": (inside, self.tp),
            "context-ring": (outside, inside * self.tp),
            "expert": (self.ep, self.expert_width),
            "expert-tensor": (self.expert_width, 1),
            "expert-mesh": (self.expert_devices, 1),
        }

    @property
    def expert_replicas(self) -> int:
        """Fewest replicas of a stage whose devices together hold whole copies of all experts."""
        return self.expert_devices // math.gcd(self.expert_devices, self.tp * self.cp)

    @property
    def expert_spread(self) -> float:
        """Devices with one copy of all experts over tensor-parallel devices.

        Less than 1 if the devices of one tensor-parallel group hold several copies of the experts.
        """
        return self.expert_devices / self.tp

    @property
    def stage_widths(self) -> tuple[int, int, bool, int, int, bool]:
        """The widths and options that determine which layouts a strategy has."""
        experts = (self.ep > 1, self.expert_devices)
        return (self.tp, self.cp, *experts, self.micro_batch, self.overlap_experts)

    @property
    def own_rows(self) -> bool:
        """Whether each device of a tensor group sends its own share of the rows to experts.

        Otherwise every device of the group has all of its rows: without sequence parallelism, and
        where experts are split as everything else and not sent to other devices.
        """
        if self.tp > 1 and not self.sequence_parallel:
            return False
        return self.expert_width != self.tp or (self.tp > 1 and self.ep > 1)


class Family(Strategy):
    """Strategies as one, see `opgraph.family`: fields in which the members differ are `Each`."""

    members: tuple[Strategy, ...]

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, members: tuple[Strategy, ...]) -> Strategy:
        """Join strategies that differ in numbers alone; a single strategy is returned as it is."""
        first, *others = members
        if not others:
            return first
        names = ("tp", "cp", "ep", "micro_batch", "expert_imbalance")
        numbers = {name: together([getattr(own, name) for own in members]) for name in names}
        numbers["etp"] = together([own.expert_width for own in members])
        return cls.model_construct(**{**vars(first), **numbers}, members=members)


def _tensor_reasons(model: TransformerModel, s: Strategy) -> Iterator[str]:
    """Return the heads and feed-forward widths that tp does not divide, as messages."""
    t, kv = s.tp, model.kv_heads
    if model.heads % t:
        yield f"tp: {t} does not divide {model.heads} heads"
    if kv is not None and kv % t and t % kv:  # with t > kv, several devices share a head
        yield (
            f"tp: {t} neither divides {kv} key/value heads nor is a multiple of them, "
            "with which each head would be replicated"
        )
    widths = [model.ffn] if model.moe is None or model.moe_layers < model.layers else []
    if model.moe is not None:
        widths += [model.moe.shared_width] + [model.moe.expert_ffn] * (s.expert_width == t)
    wrong = [width for width in widths if width % t]
    if wrong:
        yield f"tp: {t} does not divide the feed-forward width {wrong[0]}"


def _context_reasons(model: TransformerModel, s: Strategy) -> Iterator[str]:
    """Return why context parallelism cannot split the rows or the attention, as messages."""
    seq, cp, t = s.seq or model.seq, s.cp, s.tp
    if seq % cp:
        yield f"cp: {cp} does not divide the sequence of {seq}"
    elif s.sequence_parallel and (s.micro_batch * seq // cp) % t:
        yield f"sequence_parallel: {t} devices do not divide {s.micro_batch * seq // cp} rows"
    if cp == 1 or s.cp_kind == "all-gather":
        return
    inside, groups = context_widths(s.cp_kind, cp)
    if s.cp_kind.endswith("ring") and model.attention != "flash":
        yield (
            f"cp_kind: {s.cp_kind} is not accepted for {model.name}, which computes all scores of "
            "a row at once; expected all-gather or ulysses, or fused attention"
        )
        return
    if inside * groups != cp or (groups == 1 and s.cp_kind != "ulysses"):
        yield (
            f"cp_kind: {s.cp_kind} with cp {cp} is not accepted; expected groups of a divisor of "
            f"{cp} that is less than {cp}"
        )
        return
    names = {"heads": model.heads // t, "key/value heads": (model.kv_heads or model.heads) // t}
    for noun, count in names.items():
        if count % inside:
            yield (
                f"cp_kind: ulysses over {inside} devices does not share out the {count} {noun} of "
                f"a device at tp {t}; expected a divisor of {max(1, count)}, or ring "
                "or all-gather"
            )
            return


def _expert_reasons(model: TransformerModel, s: Strategy) -> Iterator[str]:
    """Return why devices cannot split the experts, as messages."""
    own, t, ep, moe = s.etp, s.tp, s.ep, model.moe
    if ep > 1 and moe is None:
        yield f"ep: {ep} is not accepted; {model.name} has no experts"
    elif moe is not None and moe.experts % ep:
        yield f"ep: {ep} does not divide {moe.experts} experts"
    if s.dispatcher == "all-gather" and t > 1 and not s.sequence_parallel:
        yield (
            "dispatcher: all-gather is not accepted without sequence parallelism, by which "
            "tensor-parallel devices have rows of their own"
        )
    if own is None or own == t:
        return
    rejected = f"etp: {own} with tp {t} is not accepted"
    if moe is None:
        yield f"{rejected}; {model.name} has no experts"
    elif t > 1 and not s.sequence_parallel:
        yield f"{rejected} without sequence parallelism, by which devices have rows of their own"
    elif model.parallel != "no":
        yield f"{rejected}; experts of {model.name} are in one region with attention"
    elif moe.expert_ffn % own:
        yield f"{rejected}: it does not divide the experts' width {moe.expert_ffn}"


def _uneven(layer: GraphLayer, width: int) -> str:
    """Return the dimension of a layer that `width` does not divide; empty where there is none."""
    heads = max((op.k for op in layer.forward if op.kind == "attention"), default=0)
    for at, op in enumerate(layer.forward):
        size = {"columns": op.n, "rows": op.k}.get(op.split, 0)
        if op.split == "inside" and op.kind in ("attention", "batched-gemm"):
            size = op.b
        if size % width:
            return f"{width} does not divide {size} of {layer.name}.{op.name}"
        attended = any(
            reader.kind == "attention" and at in reader.inputs for reader in layer.forward
        )
        if op.split == "columns" and attended and heads and size // heads % width:
            return f"{width} does not divide {size // heads} heads of {layer.name}.{op.name}"
    return ""


def _traced_reasons(model: GraphModel, s: Strategy) -> list[str]:
    """Return the reasons why a graph cannot be split by a strategy."""
    broken = []
    if s.seq is not None and s.seq != model.seq:
        broken.append(f"seq: {s.seq} is not accepted; {model.name} was traced with {model.seq}")
    if s.cp > 1:
        broken.append(f"cp: {s.cp}: a graph of operators has no rule for it")
    if s.ep > 1:
        broken.append(f"ep: {s.ep}: a graph of operators has no rule for it")
    t = s.tp
    if t > 1:
        whole = [layer for layer in model.layers if layer.unsplit]
        if len(whole) == len(model.layers):
            broken.append(f"tp: {t}: {whole[0].unsplit}")
        uneven = (_uneven(layer, t) for layer in model.layers)
        broken += [f"tp: {why}" for why in uneven if why][:1]
    return broken


def reasons(model: Model, strategy: Strategy) -> list[str]:
    """Return the rules that a strategy violates for a model, as messages; empty if none."""
    if isinstance(model, GraphModel):
        known = recognised(model)
        if known is None:
            return _traced_reasons(model, strategy)
        model = known
    broken = [
        *_tensor_reasons(model, strategy),
        *_context_reasons(model, strategy),
        *_expert_reasons(model, strategy),
    ]
    seq, positions = strategy.seq or model.seq, model.max_positions
    if positions is not None and seq > positions:
        broken.append(f"seq: {seq} is more than the {positions} positions of {model.name}")
    return broken


@dataclass(frozen=True)
class Shapes:
    """Sizes of a transformer's layers on one device; counts, not bytes."""

    batch: int
    seq: int
    """Whole sequence length."""
    rows: int
    """Tokens of the micro-batch on this device: batch x seq / cp."""
    split_rows: int
    """The part of `rows` on this device with sequence parallelism; all of `rows` without."""
    hidden: int
    heads: int
    """Query heads on this device."""
    kv_heads: int
    """Key/value heads on this device, at least one."""
    head_width: int
    ffn: int
    vocab: int
    """Rows of the embedding on this device: the vocabulary over `tp`, rounded up."""

    @property
    def query_width(self) -> int:
        """Columns of Q on this device."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Columns of K (or V) on this device."""
        return self.kv_heads * self.head_width


@lru_cache(maxsize=4096)
def shapes(model: TransformerModel, strategy: Strategy) -> Shapes:
    """Return the sizes on one device; for a `Family`, with an `Each` where members differ.

    Raises
    ------
    InfeasibleError
        Where the strategy breaks a rule; the message gives the first reason.
    """
    if isinstance(strategy, Family):
        sizes = (vars(shapes(model, own)).values() for own in strategy.members)
        columns = zip(*sizes, strict=True)
        return Shapes(*map(together, columns))
    broken = reasons(model, strategy)
    if broken:
        raise InfeasibleError(f"{model.name}: {broken[0]}")
    t, seq = strategy.tp, strategy.seq or model.seq
    rows = strategy.micro_batch * seq // strategy.cp
    return Shapes(
        batch=strategy.micro_batch,
        seq=seq,
        rows=rows,
        split_rows=rows // t if strategy.sequence_parallel else rows,
        hidden=model.hidden,
        heads=model.heads // t,
        kv_heads=max(1, (model.kv_heads or model.heads) // t),
        head_width=model.head_width,
        ffn=model.ffn // t,
        vocab=-(-model.vocab // t),
    )
