"""Takes a model, a cluster with its chip and a training step, gives the best parallel plans.

Every combination of widths, micro-batch, replicas, ZeRO stage, schedule and rank order is placed
exactly; what remains is sorted. Combinations that cannot be are counted with their reasons.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phaze_fast.errors import InfeasibleError, InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Cluster, TieredFabric
from phaze_fast.memory import optimizer
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import Strategy, layer_graph, reasons
from phaze_fast.placement.interleaved import interleaved
from phaze_fast.placement.layers import Groups, TimedLayers, memory_of, timed_layers
from phaze_fast.placement.plans import Plan, Plans, read_plan
from phaze_fast.placement.problems import PipelineProblem, Placement, place_counts
from phaze_fast.placement.training import RANK_ORDERS, RECOMPUTE, Training
from phaze_fast.schedule import ScheduleCache
from phaze_fast.units import format_bytes

__all__ = ["infeasible", "plan"]

Progress = Callable[[int, int], None]

_MOST_STAGES = 256


@dataclass(frozen=True)
class _Question:
    """One kernel call: layers, replicas and stages of a kind."""

    layers: TimedLayers
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


def _strategies(
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


def _replicas(layers: TimedLayers, training: Training, devices: int) -> list[int]:
    """List counts of replicas that divide the batch and fit the cluster."""
    strategy = layers.graph.strategy
    rounds = training.global_batch // strategy.microbatch
    most = devices // layers.inner
    wanted = training.data_parallel or range(1, most + 1)
    return [
        d for d in wanted if d <= most and rounds % d == 0 and d % strategy.expert_parallel == 0
    ]


def _questions(layers: TimedLayers, training: Training, devices: int) -> Iterator[_Question]:
    strategy = layers.graph.strategy
    blocks = sum(
        1 for k in layers.order if layers.graph.layers[k].kind not in ("embedding", "head")
    )
    for d in _replicas(layers, training, devices):
        most = min(devices // (layers.inner * d), blocks, _MOST_STAGES)
        counts = [p for p in training.pipeline or range(1, most + 1) if 1 <= p <= most]
        rounds = training.global_batch // (strategy.microbatch * d)
        zeros = [z for z in training.zero if z == 0 or d > 1] or [0]
        for zero in dict.fromkeys(zeros):
            yield from _of_replicas(layers, training, counts, (d, zero, rounds), blocks)


def _of_replicas(
    layers: TimedLayers,
    training: Training,
    counts: Sequence[int],
    what: tuple[int, int, int],
    blocks: int,
) -> Iterator[_Question]:
    d, zero, rounds = what
    if 1 in counts:
        yield _Question(layers, Groups(d, 1, RANK_ORDERS[0]), zero, rounds, "1f1b", (1, 1))
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
                yield from _interleaved(layers, training, counts, (d, zero, rounds, order), blocks)
                continue
            for first, last in runs:
                groups = Groups(d, last, order)
                yield _Question(layers, groups, zero, rounds, schedule, (first, last))


def _interleaved(
    layers: TimedLayers,
    training: Training,
    piped: Sequence[int],
    what: tuple[int, int, int, str],
    blocks: int,
) -> Iterator[_Question]:
    d, zero, rounds, order = what
    for p, v in itertools.product(piped, training.virtual):
        if blocks % (p * v) == 0 and rounds % p == 0:
            groups = Groups(d, p, order)
            yield _Question(layers, groups, zero, rounds, "interleaved", (p, p), v)


def _room(cluster: Cluster, training: Training) -> float:
    """Bytes of a device that are for the model."""
    room = float(memory_of(cluster.chip).capacity_bytes) - float(training.reserved_bytes)
    if room <= 0:
        raise InvalidInputError(
            f"reserved_bytes: {training.reserved_bytes} is not accepted; expected less than the "
            "memory of a device"
        )
    return room


def _ties(training: Training) -> list[tuple[int, int]]:
    return [*training.tied, *((at - 1, at) for at in training.uncut)]


def _problem(question: _Question, ties: Any, memory_bytes: float) -> PipelineProblem:
    layers, groups = question.layers, question.groups
    table = layers.table(groups, question.zero, question.stages[1] > 1, ties)
    return PipelineProblem(
        table=table,
        memory_bytes=memory_bytes - layers.gathered_bytes,
        microbatches=question.microbatches,
        stages=question.stages,
        schedule=question.schedule if question.schedule != "interleaved" else "1f1b",
        piped_bytes=layers.piped_bytes,
        bucket_s=layers.bucket_s(groups),
    )


def _placed(
    questions: Sequence[_Question], ties: Any, memory_bytes: float, threads: int
) -> Iterator[tuple[_Question, PipelineProblem, list[Placement]]]:
    problems = [_problem(q, ties, memory_bytes) for q in questions]
    searched = [k for k, q in enumerate(questions) if q.schedule != "interleaved"]
    found = place_counts([problems[k] for k in searched], threads)
    placed = dict(zip(searched, found, strict=True))
    for k, question in enumerate(questions):
        if k in placed:
            yield question, problems[k], placed[k]
        else:
            even = interleaved(problems[k], question.groups.stages, question.virtual)
            yield question, problems[k], [] if even is None else [even]


def plan(
    model: TransformerModel,
    cluster: Cluster,
    training: Training,
    top: int = 10,
    threads: int = 1,
    cache: ScheduleCache | None = None,
    progress: Progress | None = None,
) -> Plans:
    """Find the best parallel plans of a model on given hardware.

    Parameters
    ----------
    model
        What is trained.
    cluster
        Devices with their chip and fabric.
    training
        The step, and what is fixed or free.
    top
        Plans to keep besides the front of time and memory.
    threads
        At most this many threads; the answer does not depend on it.
    cache
        Where layer schedules are looked up and kept.
    progress
        Called with strategies done and in all.

    Returns
    -------
    Plans
        Fastest first. Empty where nothing fits; `rejected` then says why, and `nearest` what would.

    Raises
    ------
    InvalidInputError
        Where the cluster has no chip, or its chip no memory to place into.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> step = Training(global_batch=64, microbatch=(1, 2))
    >>> found = plan(pf.models.load("llama2-7b"), cluster, step)
    >>> found.best.devices
    8
    """
    if not isinstance(model, TransformerModel) or not isinstance(training, Training):
        raise InvalidTypeError(
            f"model, training: {type(model).__name__} and {type(training).__name__} are not "
            "accepted; expected a TransformerModel (models.load) and a Training"
        )
    if top < 1:
        raise InvalidInputError(f"top: {top!r} is not accepted; expected at least 1")
    capacity = _room(cluster, training)
    rejected: Counter[str] = Counter()
    strategies = list(_strategies(model, cluster, training, rejected))
    modes = RECOMPUTE if training.recompute == "auto" else (training.recompute,)
    graphs = [layer_graph(model, strategy) for strategy in strategies]
    spec = optimizer(training.optimizer)
    timed = timed_layers(graphs, cluster, modes, spec, cache, threads)
    plans: list[Plan] = []
    tried = 0
    asked: list[tuple[_Question, PipelineProblem]] = []
    for done, layers in enumerate(timed):
        questions = list(_questions(layers, training, cluster.devices))
        if not questions:
            rejected[_nothing_to_try(layers, training, cluster)] += 1
        for question, problem, found in _placed(questions, _ties(training), capacity, threads):
            tried += 1
            if not found:
                rejected[_too_large(question)] += 1
                asked.append((question, problem))
            for placement in found:
                plans.append(_read(question, problem, placement, training))
        if progress is not None:
            progress(done + 1, len(timed))
    question_of = (model, cluster, training, top)
    if plans:
        return Plans.of(question_of, plans, tried, rejected)
    why = (_shortfall(asked, training, capacity), _nearest(model, cluster, training))
    return Plans.of(question_of, plans, tried, rejected, why)


def _shortfall(
    asked: list[tuple[_Question, PipelineProblem]], training: Training, capacity: float
) -> str:
    """Say which stage of the leanest layout is over by how much, and with what."""
    best: tuple[Plan, _Question, PipelineProblem] | None = None
    searched = [(q, p) for q, p in asked if q.schedule != "interleaved"]
    roomy = [replace(p, memory_bytes=1e300, table=p.table.only(-1)) for _, p in searched]
    for (question, problem), found in zip(searched, place_counts(roomy), strict=True):
        for placement in found:
            lean = _read(question, problem, placement, training)
            if best is None or lean.memory_bytes < best[0].memory_bytes:
                best = (lean, question, problem)
    if best is None:
        return ""
    lean, question, problem = best
    low, counts = problem.memory_bytes, (lean.pp, lean.pp)
    apart = lean.memory_bytes - capacity
    high = low + apart
    for _ in range(30):
        middle = 0.5 * (low + high)
        (found,) = place_counts([replace(problem, memory_bytes=middle, stages=counts)])
        if found:
            lean, high = _read(question, problem, found[0], training), middle
        else:
            low = middle
    stages = lean.stages
    worst = max(range(len(stages)), key=lambda k: stages[k].memory_bytes)
    memory = stages[worst].memory
    term = max(memory, key=lambda name: memory[name])
    total = stages[worst].memory_bytes
    return (
        f"at best (tp {lean.tp}, pp {lean.pp}, dp {lean.dp}, zero {lean.zero}, micro-batch "
        f"{lean.microbatch}, recompute {lean.recompute}) stage {worst} needs "
        f"{format_bytes(total)}, {format_bytes(total - capacity)} too much; most of it is {term} "
        f"({format_bytes(memory[term])})"
    )


def _read(
    question: _Question, problem: PipelineProblem, placement: Placement, training: Training
) -> Plan:
    strategy = question.layers.graph.strategy
    return read_plan(
        question.layers,
        problem,
        placement,
        groups=replace(question.groups, stages=len(placement.stages)),
        zero=question.zero,
        schedule=question.schedule if len(placement.stages) > 1 else "1f1b",
        virtual=question.virtual,
        tokens=training.global_batch * (training.seq or question.layers.graph.model.seq),
        strategy=strategy,
    )


def _nothing_to_try(layers: TimedLayers, training: Training, cluster: Cluster) -> str:
    most = cluster.devices // layers.inner
    if not _replicas(layers, training, cluster.devices):
        wanted = training.data_parallel or "any"
        return (
            f"data_parallel: {wanted} does not divide a batch of {training.global_batch} evenly, "
            f"or is more than {most}"
        )
    return (
        f"pipeline: {training.pipeline} stages are more than {most} groups of devices or the "
        "model's blocks"
    )


def _too_large(question: _Question) -> str:
    strategy, zero = question.layers.graph.strategy, question.zero
    return (
        f"memory: tensor_parallel {strategy.tensor_parallel}, microbatch {strategy.microbatch}, "
        f"zero {zero} does not fit with so many replicas or so few stages"
    )


def _nearest(model: TransformerModel, cluster: Cluster, training: Training) -> str:
    """Say what small change would fit: recompute more, share more, smaller pieces, more devices."""
    changes: list[tuple[str, Training, Cluster]] = [
        ("recompute: auto", training.model_copy(update={"recompute": "auto"}), cluster),
        ("microbatch: 1", training.model_copy(update={"microbatch": (1,)}), cluster),
        ("zero: 3", training.model_copy(update={"zero": (3,)}), cluster),
    ]
    together = training.model_copy(update={"recompute": "auto", "microbatch": (1,), "zero": (3,)})
    changes.append(("recompute auto, microbatch 1 and zero 3 together", together, cluster))
    for factor in (2, 4, 8, 16, 32, 64):
        try:
            more = cluster.model_copy(update={"devices": cluster.devices * factor})
            Cluster.model_validate(more.model_dump())
        except (InvalidInputError, ValueError):
            break
        changes.append((f"{more.devices} devices", training, more))
        changes.append((f"{more.devices} devices, with zero 3 and recompute auto", together, more))
    for words, step, wider in changes:
        if (step, wider) != (training, cluster) and _fits(model, wider, step):
            return words
    return ""


def _fits(model: TransformerModel, cluster: Cluster, training: Training) -> bool:
    capacity = _room(cluster, training)
    modes = RECOMPUTE if training.recompute == "auto" else (training.recompute,)
    strategies = list(_strategies(model, cluster, training, Counter()))
    graphs = [layer_graph(model, s) for s in strategies]
    for layers in timed_layers(graphs, cluster, modes, optimizer(training.optimizer)):
        questions = list(_questions(layers, training, cluster.devices))
        for _, _, found in _placed(questions, _ties(training), capacity, 1):
            if found:
                return True
    return False


def infeasible(plans: Plans) -> InfeasibleError:
    """Say why there is no plan."""
    common = "; ".join(f"{why} ({count} times)" for why, count in plans.rejected.items())
    would = f" It would fit with {plans.nearest}." if plans.nearest else ""
    room = format_bytes(_room(plans.cluster, plans.training))
    return InfeasibleError(
        f"{plans.model.name} on {plans.cluster.devices} devices with {room} each: "
        f"{plans.shortfall or common or 'nothing to try'}.{would}"
    )
