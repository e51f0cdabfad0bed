"""Takes a model, a cluster and what is free, gives strategies and the layouts of each, as arrays."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.hardware import Cluster, TieredFabric
from phaze_fast.memory import SCHEDULES
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import Strategy, reasons
from phaze_fast.placement.training import RANK_ORDERS, Training

__all__ = ["Shape", "layouts_of", "node_devices", "strategies"]

Array = np.ndarray[Any, Any]

_MOST_STAGES = 256
_INTERLEAVED = SCHEDULES.index("interleaved")
_ZERO_BUBBLE = SCHEDULES.index("zero-bubble")


@dataclass(frozen=True)
class Shape:
    """What decides the layouts of a strategy, besides what the user asks for."""

    devices: int
    inner: int
    """Devices that hold one stage of one replica."""
    blocks: int
    expert_parallel: int
    microbatch: int
    context_parallel: int
    node: int
    """Devices of a node."""


def node_devices(cluster: Cluster) -> int:
    """Devices of a node; 8 where a fabric has none."""
    fabric = cluster.fabric
    if isinstance(fabric, TieredFabric) and fabric.tiers[0].size is not None:
        return fabric.tiers[0].size
    return 8


def _widths(model: TransformerModel, cluster: Cluster, training: Training) -> list[int]:
    if training.tensor_parallel is not None:
        return sorted(training.tensor_parallel)
    widths = [1]
    while 2 * widths[-1] <= min(node_devices(cluster), cluster.devices, model.heads):
        widths.append(2 * widths[-1])
    return widths


def strategies(
    model: TransformerModel, cluster: Cluster, training: Training, rejected: Counter[str]
) -> Iterator[Strategy]:
    """Give what the model, the cluster and the batch allow; count the rest by reason."""
    choices = itertools.product(
        _widths(model, cluster, training),
        sorted(training.context_parallel),
        sorted(training.expert_parallel),
        sorted(training.microbatch),
    )
    for t, cp, ep, microbatch in choices:
        strategy = Strategy(
            tensor_parallel=t,
            sequence_parallel=training.sequence_parallel and t > 1,
            context_parallel=cp,
            expert_parallel=ep,
            microbatch=microbatch,
            seq=training.seq,
        )
        broken = reasons(model, strategy)
        if t * cp * ep > cluster.devices:
            used = f"{t} x {cp}" + (f" x {ep}" if ep > 1 else "")
            broken.append(
                f"tensor x context{' x expert' if ep > 1 else ''} parallelism: {used} devices are "
                f"more than {cluster.devices}"
            )
        if training.global_batch % microbatch:
            broken.append(
                f"microbatch: {microbatch} does not divide the batch of {training.global_batch}"
            )
        if broken:
            rejected[broken[0]] += 1
        else:
            yield strategy


def _replica_counts(shape: Shape, training: Training) -> Array:
    """Counts of replicas that divide the batch and fit the cluster."""
    rounds = training.global_batch // shape.microbatch
    most = min(shape.devices // shape.inner, rounds)
    wanted = np.arange(1, most + 1)
    if training.data_parallel is not None:
        wanted = np.array(sorted(training.data_parallel))
    good = (wanted <= most) & (rounds % wanted == 0) & (wanted % shape.expert_parallel == 0)
    found: Array = wanted[good]
    return found


def _zeros(training: Training, shards: int) -> list[int]:
    """ZeRO stages to try: one shard is the same under all of them."""
    wanted = sorted(set(training.zero))
    return wanted if shards > 1 else wanted[:1]


def _rows(shape: Shape, d: int, stages: Array, **fields: int) -> Array:
    rows: Array = np.zeros(len(stages), dtype=_core.LAYOUT_DTYPE)
    rows["stages"], rows["data_parallel"], rows["virtual_stages"] = stages, d, 1
    rows["microbatches"] = fields.pop("rounds")
    for name, value in fields.items():
        rows[name] = value
    return rows


def _orders(shape: Shape, training: Training, d: int, piped: Array) -> Iterator[tuple[int, Array]]:
    """Rank orders to try, each with its counts of stages."""
    if training.rank_order != "auto":
        yield RANK_ORDERS.index(training.rank_order), piped
        return
    yield 0, piped
    inside = piped[piped * shape.inner <= shape.node]
    if d > 1 and len(inside):
        yield 1, inside


def _piped(
    shape: Shape, training: Training, piped: Array, rejected: Counter[str], what: dict[str, int]
) -> Iterator[Array]:
    """Layouts of several stages by every schedule."""
    rounds = what["rounds"]
    for schedule in sorted({SCHEDULES.index(name) for name in training.schedule}):
        if schedule == _INTERLEAVED:
            for v in sorted(training.virtual):
                even = (shape.blocks % (piped * v) == 0) & (rounds % piped == 0)
                if not even.all():
                    rejected[_uneven(shape, v)] += int((~even).sum())
                yield _rows(shape, stages=piped[even], schedule=schedule, virtual_stages=v, **what)
            continue
        counts = piped
        if schedule == _ZERO_BUBBLE:
            counts = piped[piped <= rounds]
            if len(counts) < len(piped):
                why = "schedule: zero-bubble needs as many micro-batches as stages, or more"
                rejected[why] += len(piped) - len(counts)
        yield _rows(shape, stages=counts, schedule=schedule, **what)


def _uneven(shape: Shape, v: int) -> str:
    return (
        f"schedule: interleaved with {v} chunks a stage needs {shape.blocks} blocks to be a multiple "
        f"of stages x {v}, and micro-batches of stages"
    )


def layouts_of(shape: Shape, training: Training, rejected: Counter[str]) -> Array:
    """List every layout that the cluster and the batch allow, dtype ``_core.LAYOUT_DTYPE``.

    The order of a list that a user gives does not matter, and nothing is listed that was not asked
    for. Layouts that differ in the number of stages alone stand next to each other.
    """
    parts: list[Array] = []
    wanted = None if training.pipeline is None else np.array(sorted(training.pipeline))
    alone = 0 if "1f1b" in training.schedule or "zero-bubble" not in training.schedule else 3
    for d in _replica_counts(shape, training).tolist():
        most = min(shape.devices // (shape.inner * d), shape.blocks, _MOST_STAGES)
        counts = np.arange(1, most + 1) if wanted is None else wanted[wanted <= most]
        rounds = training.global_batch // (shape.microbatch * d)
        for zero in _zeros(training, d * shape.context_parallel):
            what = {"d": d, "zero": zero, "rounds": rounds}
            if len(counts) and counts[0] == 1:
                order = 0 if training.rank_order == "auto" else RANK_ORDERS.index(training.rank_order)
                one = counts[:1]
                parts.append(_rows(shape, stages=one, schedule=alone, rank_order=order, **what))
            piped = counts[counts > 1]
            for order, own in _orders(shape, training, d, piped) if len(piped) else ():
                parts += _piped(shape, training, own, rejected, {**what, "rank_order": order})
    return np.concatenate(parts) if parts else np.zeros(0, dtype=_core.LAYOUT_DTYPE)
