"""Takes a model, a cluster and what is free, gives the ways to lay layers out, without a chip."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phaze_fast.hardware import Cluster, TieredFabric
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import Strategy, reasons
from phaze_fast.placement.sizes import Groups, LayerSizes
from phaze_fast.placement.training import RANK_ORDERS, Training

__all__ = ["Layout", "layouts", "replica_counts", "strategies"]

_MOST_STAGES = 256


@dataclass(frozen=True)
class Layout:
    """Replicas and stages of a kind: one question to the placement kernel."""

    groups: Groups
    zero: int
    microbatches: int
    schedule: str
    stages: tuple[int, int]
    virtual: int = 1


def _node(cluster: Cluster) -> int:
    """Devices of a node; 8 where a fabric has none."""
    fabric = cluster.fabric
    if isinstance(fabric, TieredFabric) and fabric.tiers[0].size is not None:
        return fabric.tiers[0].size
    return 8


def _widths(model: TransformerModel, cluster: Cluster, training: Training) -> list[int]:
    if training.tensor_parallel is not None:
        return list(training.tensor_parallel)
    widths = [1]
    while 2 * widths[-1] <= min(_node(cluster), cluster.devices, model.heads):
        widths.append(2 * widths[-1])
    return widths


def strategies(
    model: TransformerModel, cluster: Cluster, training: Training, rejected: Counter[str]
) -> Iterator[Strategy]:
    """Give what the model, the cluster and the batch allow; count the rest."""
    choices = itertools.product(
        _widths(model, cluster, training),
        training.context_parallel,
        training.expert_parallel,
        training.microbatch,
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
        if t * cp > cluster.devices:
            broken.append(f"{t} x {cp} devices for a stage are more than {cluster.devices}")
        if training.global_batch % microbatch:
            broken.append(
                f"microbatch: {microbatch} does not divide the batch of {training.global_batch}"
            )
        if broken:
            rejected[broken[0]] += 1
        else:
            yield strategy


def replica_counts(layers: LayerSizes, training: Training, devices: int) -> list[int]:
    """List counts of replicas that divide the batch and fit the cluster."""
    strategy = layers.graph.strategy
    rounds = training.global_batch // strategy.microbatch
    most = devices // layers.inner
    wanted = training.data_parallel or range(1, most + 1)
    return [
        d for d in wanted if d <= most and rounds % d == 0 and d % strategy.expert_parallel == 0
    ]


def layouts(layers: LayerSizes, training: Training, devices: int) -> Iterator[Layout]:
    """Every way that the cluster and the batch allow."""
    strategy = layers.graph.strategy
    for d in replica_counts(layers, training, devices):
        most = min(devices // (layers.inner * d), layers.blocks, _MOST_STAGES)
        counts = [p for p in training.pipeline or range(1, most + 1) if 1 <= p <= most]
        rounds = training.global_batch // (strategy.microbatch * d)
        zeros = [z for z in training.zero if z == 0 or d > 1] or [0]
        for zero in dict.fromkeys(zeros):
            yield from _of_replicas(layers, training, counts, (d, zero, rounds))


def _of_replicas(
    layers: LayerSizes,
    training: Training,
    counts: Sequence[int],
    what: tuple[int, int, int],
) -> Iterator[Layout]:
    d, zero, rounds = what
    if 1 in counts:
        yield Layout(Groups(d, 1, RANK_ORDERS[0]), zero, rounds, "1f1b", (1, 1))
    piped = [p for p in counts if p > 1]
    if not piped:
        return
    auto = training.rank_order == "auto"
    orders = RANK_ORDERS if auto else (training.rank_order,)
    for order in orders if d > 1 else orders[:1]:
        counts = piped
        if auto and order == RANK_ORDERS[1]:
            counts = [p for p in piped if p * layers.inner <= _node(layers.cluster)]
        if not counts:
            continue
        # With replicas inside, neither group's place depends on the number of stages.
        alike = order == RANK_ORDERS[0] and len(counts) == counts[-1] - counts[0] + 1
        runs = [(counts[0], counts[-1])] if alike else [(p, p) for p in counts]
        for schedule in training.schedule:
            if schedule == "interleaved":
                yield from _interleaved(layers, training, counts, (d, zero, rounds, order))
                continue
            for first, last in runs:
                groups = Groups(d, last, order)
                yield Layout(groups, zero, rounds, schedule, (first, last))


def _interleaved(
    layers: LayerSizes,
    training: Training,
    piped: Sequence[int],
    what: tuple[int, int, int, str],
) -> Iterator[Layout]:
    d, zero, rounds, order = what
    for p, v in itertools.product(piped, training.virtual):
        if layers.blocks % (p * v) == 0 and rounds % p == 0:
            groups = Groups(d, p, order)
            yield Layout(groups, zero, rounds, "interleaved", (p, p), v)
