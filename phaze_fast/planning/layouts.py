"""Strategies of a model on a cluster, the layouts of each as arrays, and which of them are legal.

A strategy splits the layers over devices; a layout adds replicas, stages, ZeRO stage, pipeline
schedule and rank order. The rules of widths that do not depend on the model are in the compiled
core (``_core.check_widths``, ``_core.check_pipeline``); those of the model in `phaze_fast.opgraph`.

ZeRO and FSDP shard state over all replicas by default. With hybrid sharding, state is sharded over
a group of neighbouring replicas and copied between groups: gathers stay inside a node, at the price
of more memory (PyTorch's HSDP, MiCS, Megatron-LM's several instances of the distributed optimiser).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.hardware import Cluster, TieredFabric
from phaze_fast.memory import SCHEDULES, TWO_CHUNKS
from phaze_fast.models import Model, TransformerModel
from phaze_fast.opgraph import CONTEXT_KINDS, DISPATCHERS, Strategy
from phaze_fast.planning.sizes import strategy_faults
from phaze_fast.planning.training import OVERLAPPING, RANK_ORDERS, Training
from phaze_fast.tables import Array

_MOST_STAGES = 256
_MIN_TOKENS = 8192
"""Tokens of a sequence that context parallelism leaves a device by default: with fewer, attention
is too short to hide its exchange."""
_MIN_TOKENS_MOE = 1024
"""Tokens so left in mixtures of experts: experts are spread over context-parallel devices as over
replicas, so that these can replace tensor-parallel devices, which exchange more."""


def divisors(number: int) -> list[int]:
    """List the divisors of a whole number, rising."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def node_devices(cluster: Cluster) -> int:
    """Count the devices of a node; 8 where the interconnect has no nodes."""
    fabric = cluster.fabric
    if isinstance(fabric, TieredFabric) and fabric.tiers[0].size is not None:
        return fabric.tiers[0].size
    return 8


# ---- strategies ----


@dataclass(frozen=True)
class WidthChoices:
    """The widths to try for a model on a cluster."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    cp_kinds: tuple[Any, ...]
    """Kinds of context parallelism for widths above 1."""
    in_node: int
    """Devices of a node, inside which the groups of ``ulysses:N/ring`` lie; 0: this kind is only
    tried if `cp_kinds` has it."""
    ep: tuple[int, ...]
    etp: tuple[int | None, ...]
    micro_batch: tuple[int, ...]
    dispatchers: tuple[str, ...]
    """How rows may reach experts; see `Training.dispatcher`."""
    top_k: int
    """Experts that a row is sent to; 0 without experts."""

    @classmethod
    def of(cls, model: Model, cluster: Cluster, training: Training) -> WidthChoices:
        """Combine the fields that `training` fixes with the defaults of the others."""
        transformer = isinstance(model, TransformerModel)
        widest = min(node_devices(cluster), cluster.devices, model.widest_split)
        tp = training.tp or [2**k for k in range(max(widest, 1).bit_length())]
        tokens = (training.seq or model.seq) if transformer else 0
        moe = model.moe if isinstance(model, TransformerModel) else None
        experts = moe.experts if moe is not None else 1
        least = _MIN_TOKENS if moe is None else _MIN_TOKENS_MOE
        cp = training.cp or [1, *(n for n in (2, 4, 8, 16, 32) if tokens >= n * least)]
        ep = training.ep or [n for n in divisors(experts) if n <= cluster.devices]
        etp: Iterable[int | None] = training.etp or [None]
        if training.etp is None and max(ep) > 1 and training.sequence_parallel:
            etp = {*tp, *(2**k for k in range(max(tp).bit_length()))}
        kinds = training.cp_kind
        return cls(
            tp=tuple(sorted(tp)),
            cp=tuple(sorted(cp)),
            cp_kinds=CONTEXT_KINDS if "auto" in kinds else kinds,
            in_node=node_devices(cluster) if "auto" in kinds else 0,
            ep=tuple(sorted(ep)),
            etp=tuple(sorted(etp, key=lambda n: n or 0)),
            micro_batch=tuple(sorted(training.micro_batch)),
            dispatchers=training.dispatcher,
            top_k=0 if moe is None else moe.top_k,
        )

    @property
    def kinds_tried(self) -> list[str]:
        """Kinds of context parallelism to try; mixed ones count as one, ``ulysses:N/ring``."""
        mixed = any(self._mixed(tp, cp) for tp in self.tp for cp in self.cp)
        return [*self.cp_kinds, *["ulysses:N/ring"] * mixed]

    def combinations(self, training: Training) -> Iterator[Strategy]:
        """Combine the widths; a sequence on one device has one kind of context parallelism."""
        offloads = [False, True][: 1 + ("optimizer" in training.offload)]
        for t in self.tp:
            for (cp, kind), ep, etp, micro_batch in itertools.product(
                self._contexts(t), self.ep, self.etp, self.micro_batch
            ):
                if etp is not None and etp > t and training.etp is None:
                    continue
                choices = (_overlaps(training, ep), self._dispatchers(ep), offloads)
                for more in itertools.product(*choices):
                    yield training.strategy_of(t, cp, kind, ep, etp, micro_batch, *more)

    @property
    def dispatchers_tried(self) -> list[str]:
        """How rows may reach experts for some width."""
        tried = {word for ep in self.ep for word in self._dispatchers(ep)}
        return [word for word in DISPATCHERS if word in tried]

    def _dispatchers(self, ep: int) -> list[str]:
        """List how rows may reach experts on `ep` devices, which makes no difference for one."""
        if ep == 1:
            return list(DISPATCHERS[:1])
        if "auto" in self.dispatchers:
            return list(DISPATCHERS[: 1 + (ep <= self.top_k)])
        return list(self.dispatchers)

    def _contexts(self, tp: int) -> Iterator[tuple[int, str]]:
        """Yield widths and kinds of context parallelism."""
        for cp in self.cp:
            yield from ((cp, kind) for kind in (self.cp_kinds if cp > 1 else CONTEXT_KINDS[:1]))
            yield from ((cp, kind) for kind in self._mixed(tp, cp))

    def _mixed(self, tp: int, cp: int) -> list[str]:
        """List the mixed kinds to try: groups of a node, where a context group spans nodes."""
        inside = self.in_node // tp if tp * cp > self.in_node else 0
        return [f"ulysses:{n}/ring" for n in divisors(cp) if 1 < n < cp and n <= inside]


def _overlaps(training: Training, ep: int) -> list[bool]:
    """List the choices of overlapping expert exchanges: both if a schedule to try overlaps them."""
    if ep == 1 or training.overlap_experts is not None:
        return [False]
    return [False, True] if set(training.schedule) & set(OVERLAPPING) else [False]


def strategies(
    model: Model, cluster: Cluster, training: Training, rejected: Counter[str]
) -> Iterator[Strategy]:
    """Yield the strategies that model, cluster and batch allow; count the others by reason."""
    for strategy in WidthChoices.of(model, cluster, training).combinations(training):
        broken = strategy_faults(model, strategy, training.software)
        if broken and any(
            broken[0].startswith(field) and "auto" in getattr(training, field)
            for field in ("cp_kind", "dispatcher")
        ):
            continue  # auto tries only what the model allows
        tp, cp, ep = strategy.tp, strategy.cp, strategy.expert_replicas
        if tp * cp * ep > cluster.devices:
            used = f"{tp} x {cp}" + (f" x {ep}" if strategy.ep > 1 else "")
            broken.append(
                f"tensor x context{' x expert' if strategy.ep > 1 else ''} parallelism: {used} "
                f"devices are more than {cluster.devices}"
            )
        if training.global_batch % strategy.micro_batch:
            broken.append(
                f"micro_batch: {strategy.micro_batch} does not divide the batch of "
                f"{training.global_batch}"
            )
        if broken:
            rejected[broken[0]] += 1
        else:
            yield strategy


# ---- layouts of one strategy ----


@dataclass(frozen=True, eq=False)
class Layouts:
    """The layouts of strategies with the same widths."""

    rejected: Counter[str]
    """Layouts that are impossible, by reason."""
    grid: _core.LayoutGrid

    def __len__(self) -> int:
        return len(self.grid)

    @cached_property
    def shares(self) -> Array:
        """Micro-batches of a replica divided by the number of stages, for each layout."""
        return self.grid.shares()


@dataclass(frozen=True)
class LayoutRules:
    """What a cluster and a step allow for the layouts of one strategy."""

    training: Training
    strategy: Strategy
    devices: int
    node: int
    """Devices of a node."""
    blocks: int
    layers: int
    """Blocks, embedding and head."""

    def layouts(self) -> Layouts:
        """List every layout; count impossible ones by reason.

        They depend on the strategy's `stage_widths` alone. The order of a list that a user gives
        does not matter. Layouts that differ only in the number of stages are adjacent.
        """
        training, strategy = self.training, self.strategy
        # One stage has no pipeline: every schedule and rank order is the same for it.
        single = SCHEDULES.index("zb-h1") if training.schedule == ("zb-h1",) else 0
        decided = training.overlap_experts is None and strategy.overlap_experts
        auto = training.rank_order == "auto"
        schedules, chunks = _numbers(self._schedules())
        zero, shards = _numbers(
            [(z, s) for z in sorted(set(training.zero)) for s in _shard_codes(training, z)]
        )
        grid = _core.LayoutGrid(
            devices=self.devices,
            node_devices=self.node,
            global_batch=training.global_batch,
            blocks=self.blocks,
            layers=self.layers,
            widths=np.array(
                [
                    self._stage_devices,
                    strategy.cp,
                    strategy.expert_devices,
                    strategy.expert_replicas,
                    strategy.micro_batch,
                ]
            ),
            most_stages=_MOST_STAGES,
            single_schedule=-1 if decided else single,
            rank_order=-1 if auto else RANK_ORDERS.index(training.rank_order),
            dp=np.array(sorted(training.dp or ()), dtype=np.int64),
            pp=np.array(sorted(training.pp or ()), dtype=np.int64),
            schedules=schedules,
            chunks=chunks,
            zero=zero,
            shards=shards,
        )
        rejected: Counter[str] = Counter()
        for fault, schedule, value, count in grid.rejected:
            rejected[self._reason(fault, SCHEDULES[schedule], value)] += count
        if not len(grid) and (why := self._why_empty(grid.replicas)):
            rejected[why] += 1
        return Layouts(rejected, grid)

    @property
    def _stage_devices(self) -> int:
        """Devices that hold one stage of one replica."""
        return self.strategy.tp * self.strategy.cp

    def _schedules(self) -> list[tuple[int, int]]:
        """List the schedules of pipelines to try, with their chunks per stage."""
        free = self.strategy.ep > 1 and self.training.overlap_experts is None
        tried = []
        for schedule in sorted({SCHEDULES.index(name) for name in self.training.schedule}):
            name = SCHEDULES[schedule]
            if free and (name in OVERLAPPING) != self.strategy.overlap_experts:
                continue  # belongs to the strategy with the other choice of overlap
            several = sorted(self.training.vpp) if name == "interleaved" else []
            tried += [(schedule, vpp) for vpp in several or [1 + (name in TWO_CHUNKS)]]
        return tried

    def _reason(self, fault: int, schedule: str, value: int) -> str:
        """Say why layouts are impossible; the codes are those of the core's ``LayoutFault``."""
        if fault == 0:
            chunks = f"{schedule} with {value} chunks a stage"  # one a stage is never too many
            return f"schedule: {chunks} has more chunks than the model's {self.layers} layers"
        if fault == 1:
            return f"schedule: {schedule} is not possible: {_core.PIPELINE_SENTENCES[value]}"
        why = f"shard: {value} replicas do not share out the replicas evenly"
        ep = self.strategy.expert_replicas
        return why if ep == 1 else f"{why}, or are no multiple of the {ep} that experts span"

    def _why_empty(self, replicas: Array) -> str:
        """Return why there is no layout; empty where a schedule is the reason, counted before."""
        training, ep = self.training, self.strategy.expert_replicas
        most = self.devices // self._stage_devices
        if not len(replicas):
            wanted = sorted(training.dp) if training.dp else "any"
            experts = f" or is no multiple of the {ep} that experts span," if ep > 1 else ""
            return (
                f"dp: {wanted} does not divide a batch of {training.global_batch} evenly,"
                f"{experts} or is more than {most}"
            )
        fewest = int(replicas.min())
        stages = sorted(training.pp) if training.pp else [1]
        if stages[0] <= min(most // fewest, self.blocks):
            return ""
        times = f" for each of {fewest} replicas" if fewest > 1 else ""
        return (
            f"pp: {stages} stages{times} are more than {most} groups of devices or the model's "
            f"{self.blocks} blocks"
        )


def _numbers(pairs: Sequence[tuple[int, int]]) -> Array:
    """Return pairs as two arrays."""
    columns: Array = np.ascontiguousarray(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
    return columns


def sharing_counts(dp: int, ep: int) -> list[int]:
    """List over how many of `dp` replicas state may be sharded, where experts span `ep` of them."""
    return [n for n in divisors(dp) if n % ep == 0]


def _shards_tried(wanted: Iterable[int | str], zero: int) -> tuple[int | str, ...]:
    """Replace ``auto`` by the choices it means under a ZeRO stage."""
    auto = ("all", "node") if zero >= 2 else ("all",)
    return tuple(dict.fromkeys(s for w in wanted for s in (auto if w == "auto" else (w,))))


def _shard_codes(training: Training, zero: int) -> list[int]:
    """List the replicas that may share state under a ZeRO stage, as the core takes them."""
    if zero == 0:
        return [0]
    wanted = _shards_tried(training.shard, zero)
    words = [code for word, code in (("all", 0), ("node", -1)) if word in wanted]
    return [*words, *sorted(count for count in wanted if isinstance(count, int))]


# ---- the space in words ----


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _zero_text(training: Training, zero: int) -> str:
    """Name a ZeRO stage, and its sharding groups unless all replicas shard."""
    tried = _shards_tried(training.shard, zero)
    if zero == 0 or tried == ("all",):
        return str(zero)
    words = {"all": "all replicas", "node": "those of a node"}
    *first, last = (words.get(str(s), str(s)) for s in tried)
    return f"{zero} (among {', '.join(first)}{' or ' * bool(first)}{last})"


def space_text(model: Model, cluster: Cluster, training: Training) -> str:
    """Describe the plans that are compared.

    Examples
    --------
    >>> from phaze_fast import Cluster, models
    >>> cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> text = space_text(models.load("llama2-7b"), cluster, Training(global_batch=64, zero=1))
    >>> text.split("; ")[:3]
    ['tensor parallel 1, 2, 4, 8', 'context parallel 1', 'expert parallel 1']
    """
    widths, dp, pp = WidthChoices.of(model, cluster, training), training.dp, training.pp
    chunks = f" with {_listed(sorted(training.vpp))} chunks a stage"
    names = [name + chunks * (name == "interleaved") for name in training.schedule]
    some = ", for all blocks of a stage or the first of each chunk" * training.recompute_some
    texts = [
        f"tensor parallel {_listed(widths.tp)}"
        + " without sequence parallelism" * (not training.sequence_parallel),
        f"context parallel {_listed(widths.cp)}"
        + f" ({_listed(widths.kinds_tried)})" * (max(widths.cp) > 1),
        f"expert parallel {_listed(widths.ep)}"
        + f" with experts over {_listed(widths.etp)} devices each" * (widths.etp != (None,))
        + f", rows to experts by {_listed(widths.dispatchers_tried)}" * (max(widths.ep) > 1),
        f"micro-batch {_listed(widths.micro_batch)}",
        f"replicas {_listed(sorted(dp)) if dp else 'that divide the batch'}",
        f"stages {_listed(sorted(pp)) if pp else f'up to {_MOST_STAGES}'}, no more than blocks",
        f"ZeRO {_listed(_zero_text(training, zero) for zero in sorted(training.zero))}",
        f"schedules {_listed(names)}",
        f"recomputation by stage of {_listed(training.recompute_modes)}{some}",
        f"rank order {training.rank_order}",
        *["optimiser's state in HBM or in the host's memory"] * ("optimizer" in training.offload),
        "every partition into contiguous stages (1f1b, zb-h1)",
    ]
    if any(name not in ("1f1b", "zb-h1") for name in training.schedule):
        texts.append(
            "assignments of layers to chunks that differ by one layer at most (other schedules): "
            "all, or, of more than 16 chunks or 1,024 assignments of unlike blocks, those with the "
            "longer chunks one after another, spread evenly, or by load"
        )
        if training.software.stage_division != "even":
            texts.append(f"layers of one chunk a stage as {training.software.name} divides them")
    return "; ".join(texts)
