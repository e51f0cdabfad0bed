"""Strategies of a model on a cluster, and the layouts of each as arrays."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.hardware import Cluster, TieredFabric
from phaze_fast.memory import SCHEDULES, TWO_CHUNKS, places
from phaze_fast.models import Model, TransformerModel
from phaze_fast.opgraph import CONTEXT_KINDS, Strategy, reasons
from phaze_fast.planning.hybrid import shard_choices, shard_words, shards_tried
from phaze_fast.planning.training import RANK_ORDERS, Training, expert_fields, recompute_modes

__all__ = ["Shape", "layouts_of", "node_devices", "nothing_to_try", "space_text", "strategies"]

Array = np.ndarray[Any, Any]

_MOST_STAGES = 256
_TOKENS_OF_A_DEVICE = 8192  # fewer leave attention too little to do behind its exchange


@dataclass(frozen=True)
class Shape:
    """What decides the layouts of a strategy, besides what the user asks for."""

    devices: int
    inner: int
    """Devices that hold one stage of one replica."""
    blocks: int
    layers: int
    """Blocks, embedding and head."""
    ep: int
    micro_batch: int
    cp: int
    node: int
    """Devices of a node."""


def node_devices(cluster: Cluster) -> int:
    """Devices of a node; 8 where a fabric has none."""
    fabric = cluster.fabric
    if isinstance(fabric, TieredFabric) and fabric.tiers[0].size is not None:
        return fabric.tiers[0].size
    return 8


def _widths(model: Model, cluster: Cluster, training: Training) -> list[int]:
    if training.tp is not None:
        return sorted(training.tp)
    widths, most = [1], min(node_devices(cluster), cluster.devices)
    while 2 * widths[-1] <= min(most, model.widest_split):
        widths.append(2 * widths[-1])
    return widths


def _context_widths(model: Model, training: Training) -> list[int]:
    if training.cp is not None:
        return sorted(training.cp)
    tokens = training.seq or model.seq
    if not isinstance(model, TransformerModel):
        return [1]
    return [1] + [cp for cp in (2, 4, 8, 16, 32) if tokens >= cp * _TOKENS_OF_A_DEVICE]


def _context_kinds(training: Training) -> tuple[Any, ...]:
    """Ways to attend to a shared sequence, those that were asked for alone."""
    tried = training.cp_kind
    return CONTEXT_KINDS if "auto" in tried else tuple(k for k in CONTEXT_KINDS if k in tried)


def _contexts(model: Model, training: Training) -> list[tuple[int, Any]]:
    """Context-parallel widths with the ways to attend; one device has no need of any."""
    several = [cp for cp in _context_widths(model, training) if cp > 1]
    alone = [(1, "all-gather")] if 1 in _context_widths(model, training) else []
    return alone + [(cp, kind) for cp in several for kind in _context_kinds(training)]


def _expert_widths(model: Model, cluster: Cluster, training: Training) -> list[int]:
    if training.ep is not None:
        return sorted(training.ep)
    moe = model.moe if isinstance(model, TransformerModel) else None
    experts = moe.experts if moe is not None else 1
    most = min(experts, cluster.devices, training.global_batch)
    return [1] + [ep for ep in (2, 4, 8, 16, 32, 64) if ep <= most and experts % ep == 0]


def strategies(
    model: Model, cluster: Cluster, training: Training, rejected: Counter[str]
) -> Iterator[Strategy]:
    """Give what the model, the cluster and the batch allow; count the rest by reason."""
    choices = itertools.product(
        _widths(model, cluster, training),
        _contexts(model, training),
        _expert_widths(model, cluster, training),
        sorted(training.etp) if training.etp else [None],
        sorted(training.micro_batch),
    )
    for t, (cp, kind), ep, own, micro_batch in choices:
        apart = {} if ep == 1 else expert_fields(training)
        strategy = Strategy(
            tp=t,
            sequence_parallel=training.sequence_parallel and t > 1,
            cp=cp,
            cp_kind=kind,
            ep=ep,
            etp=None if own == t else own,
            **apart,
            micro_batch=micro_batch,
            seq=training.seq,
        )
        broken = reasons(model, strategy)
        if broken and broken[0].startswith("cp_kind") and "auto" in training.cp_kind:
            continue  # not asked for
        spread = strategy.expert_replicas
        if t * cp * spread > cluster.devices:
            used = f"{t} x {cp}" + (f" x {spread}" if ep > 1 else "")
            broken.append(
                f"tensor x context{' x expert' if ep > 1 else ''} parallelism: {used} devices are "
                f"more than {cluster.devices}"
            )
        if training.global_batch % micro_batch:
            broken.append(
                f"micro_batch: {micro_batch} does not divide the batch of {training.global_batch}"
            )
        if broken:
            rejected[broken[0]] += 1
        else:
            yield strategy


def _replica_counts(shape: Shape, training: Training) -> Array:
    """List counts of replicas that divide the batch and fit the cluster."""
    rounds = training.global_batch // shape.micro_batch
    most = min(shape.devices // shape.inner, rounds)
    if training.dp is None:
        low = np.arange(1, math.isqrt(rounds) + 1)
        low = low[rounds % low == 0]
        wanted = np.unique(np.concatenate([low, rounds // low]))
    else:
        wanted = np.array(sorted(training.dp))
    good = (wanted <= most) & (rounds % wanted == 0) & (wanted % shape.ep == 0)
    found: Array = wanted[good]
    return found


def _grid(shape: Shape, training: Training) -> tuple[Array, Array, Array]:
    """Replicas, stages and micro-batches of every pair that fits the cluster."""
    replicas = _replica_counts(shape, training)
    most = np.minimum(shape.devices // (shape.inner * replicas), min(shape.blocks, _MOST_STAGES))
    if training.pp is None:
        wanted = np.arange(1, int(most.max(initial=0)) + 1)
    else:
        wanted = np.array(sorted(training.pp))
    d, p = (grid.reshape(-1) for grid in np.meshgrid(replicas, wanted, indexing="ij"))
    inside = p <= np.repeat(most, len(wanted))
    d, p = d[inside], p[inside]
    return d, p, training.global_batch // (shape.micro_batch * d)


def _schedules(
    shape: Shape, training: Training, p: Array, m: Array, rejected: Counter[str]
) -> Iterator[tuple[int, int, Array]]:
    """Schedules and chunks a stage, and which pairs each is possible for."""
    piped = p > 1
    for schedule in sorted({SCHEDULES.index(name) for name in training.schedule}):
        name = SCHEDULES[schedule]
        several = sorted(training.vpp) if name == "interleaved" else [1 + (name in TWO_CHUNKS)]
        for v in several:
            enough = places(name, 1, v) * p <= shape.layers
            chunks = f" with {v} chunks a stage" if v > 1 else ""
            why = f"schedule: {name}{chunks} has more chunks than the model's {shape.layers} layers"
            rejected[why] += int((piped & ~enough).sum())
            if name == "dualpipe":
                even = (p % 2 == 0) & (m % 2 == 0)
                why = f"schedule: {name} needs an even number of stages and of micro-batches"
                rejected[why] += int((piped & enough & ~even).sum())
                enough = enough & even
            if name in ("dualpipe", "dualpipe-v"):
                full = m >= 2 * p
                why = f"schedule: {name} needs twice as many micro-batches as stages, or more"
                rejected[why] += int((piped & enough & ~full).sum())
                enough = enough & full
            yield schedule, v, piped & enough


def _orders(
    shape: Shape, training: Training, d: Array, p: Array
) -> Iterator[tuple[int, Array | bool]]:
    """Rank orders to try, and which pairs each is tried for."""
    if training.rank_order != "auto":
        yield RANK_ORDERS.index(training.rank_order), True
        return
    yield 0, True
    yield 1, (d > 1) & (p * shape.inner <= shape.node)


def layouts_of(shape: Shape, training: Training, rejected: Counter[str]) -> Array:
    """List every layout that the cluster and the batch allow, dtype ``_core.LAYOUT_DTYPE``.

    The order of a list that a user gives does not matter, and nothing is listed that was not asked
    for. Layouts that differ in the number of stages alone stand next to each other.
    """
    d, p, m = _grid(shape, training)
    # One stage has no pipeline: every schedule and rank order is the same for it.
    alone = 3 if training.schedule == ("zb-h1",) else 0
    first = 0 if training.rank_order == "auto" else RANK_ORDERS.index(training.rank_order)
    choices = [(first, alone, 1, p == 1)]
    counted: Counter[str] = Counter()
    for schedule, v, possible in _schedules(shape, training, p, m, counted):
        choices += [
            (order, schedule, v, possible & tried)
            for order, tried in _orders(shape, training, d, p)
        ]
    parts: list[Array] = []
    shards: dict[tuple[int, int], list[Array]] = {
        (order, zero): _shards(shape, training, zero, order, d, p, counted)
        for order, *_ in choices
        for zero in set(training.zero) - {0}
    }
    for zero, told_apart in _zeros(shape, training, d):
        for order, schedule, v, possible in choices:
            for shard in shards.get((order, zero), [np.zeros(len(d), dtype=np.int64)]):
                at = np.flatnonzero(possible & told_apart & (shard >= 0))
                rows: Array = np.zeros(len(at), dtype=_core.LAYOUT_DTYPE)
                rows["pp"], rows["dp"], rows["micro_batches"] = p[at], d[at], m[at]
                rows["schedule"], rows["vpp"] = schedule, v
                rows["zero"], rows["rank_order"], rows["shard"] = zero, order, shard[at]
                parts.append(rows)
    rejected.update({why: count for why, count in counted.items() if count})
    return np.concatenate(parts)


def _zeros(shape: Shape, training: Training, d: Array) -> Iterator[tuple[int, Array | bool]]:
    """ZeRO stages, and the layouts each is told apart for.

    One shard is the same under every ZeRO stage.
    """
    for number, zero in enumerate(sorted(set(training.zero))):
        yield zero, True if number == 0 else d * shape.cp > 1


def _shards(
    shape: Shape,
    training: Training,
    zero: int,
    order: int,
    d: Array,
    p: Array,
    rejected: Counter[str],
) -> list[Array]:
    """How many replicas share state, one array per choice; -1: not this choice."""
    apart = shape.inner * (p if RANK_ORDERS[order] == "stages-inside" else np.ones_like(p))
    widths = (shape.ep, shape.cp)
    wanted = shards_tried(training.shard, zero)
    return list(shard_choices(wanted, d, shape.node // apart, *widths, rejected))


def space_text(model: Model, cluster: Cluster, training: Training) -> str:
    """Say which plans are looked at: what a plan is the best of.

    Examples
    --------
    >>> from phaze_fast import Cluster, models
    >>> cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> text = space_text(models.load("llama2-7b"), cluster, Training(global_batch=64, zero=1))
    >>> text.split("; ")[:3]
    ['tensor parallel 1, 2, 4, 8', 'context parallel 1', 'expert parallel 1']
    """

    def listed(values: Iterable[object]) -> str:
        return ", ".join(map(str, values))

    d, p = training.dp, training.pp
    chunks = f" with {listed(sorted(training.vpp))} chunks a stage"
    names = [name + chunks * (name == "interleaved") for name in training.schedule]
    some = ", for all blocks of a stage or the first of each chunk" * training.recompute_some
    dealt = any(name not in ("1f1b", "zb-h1") for name in training.schedule)
    texts = [
        f"tensor parallel {listed(_widths(model, cluster, training))}",
        f"context parallel {listed(_context_widths(model, training))}"
        + f" ({listed(_context_kinds(training))})" * (max(_context_widths(model, training)) > 1),
        f"expert parallel {listed(_expert_widths(model, cluster, training))}"
        + f" with experts over {listed(sorted(training.etp or ()))} devices each"
        * bool(training.etp),
        f"micro-batch {listed(sorted(training.micro_batch))}",
        f"replicas {listed(sorted(d)) if d else 'that divide the batch'}",
        f"stages {listed(sorted(p)) if p else f'up to {_MOST_STAGES}'}",
        f"ZeRO {listed(shard_words(training.shard, zero) for zero in sorted(training.zero))}",
        f"schedules {listed(names)}",
        f"recomputation by stage of {listed(recompute_modes(training))}{some}",
        f"rank order {training.rank_order}",
        "every partition into contiguous stages (1f1b, zb-h1)",
    ]
    if dealt:
        texts.append(
            "every deal of layers to chunks that differ by one layer at most (other schedules; "
            f"where there are more than {_core.MAX_ASSIGNMENTS}, two of them, and with at most "
            f"{_core.MAX_RUN_CHUNKS} chunks those whose longer chunks stand one after another)"
        )
    return "; ".join(texts)


def nothing_to_try(shape: Shape, training: Training) -> str:
    """Say why there is no layout; empty where it is for a schedule, which is counted already."""
    most, ep = shape.devices // shape.inner, shape.ep
    replicas = _replica_counts(shape, training)
    if not len(replicas):
        wanted = sorted(training.dp) if training.dp else "any"
        experts = f" or is no multiple of ep {ep}," if ep > 1 else ""
        return (
            f"dp: {wanted} does not divide a batch of {training.global_batch} evenly,"
            f"{experts} or is more than {most}"
        )
    fewest = int(replicas.min())
    stages = sorted(training.pp) if training.pp else [1]
    if stages[0] <= min(most // fewest, shape.blocks):
        return ""
    times = f" for each of {fewest} replicas" if fewest > 1 else ""
    return (
        f"pp: {stages} stages{times} are more than {most} groups of devices or the model's "
        f"{shape.blocks} blocks"
    )
