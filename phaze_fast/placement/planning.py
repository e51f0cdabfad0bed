"""Takes a model, a cluster with its chip and a training step, gives the best parallel plans.

Every combination of widths, micro-batch, replicas, ZeRO stage, schedule and rank order is placed
exactly; what remains is sorted. Combinations that cannot be are counted with their reasons.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phaze_fast.errors import InfeasibleError, InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Cluster
from phaze_fast.memory import optimizer
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import layer_graph
from phaze_fast.placement.interleaved import interleaved
from phaze_fast.placement.layers import TimedLayers, memory_of, timed_layers
from phaze_fast.placement.layouts import Layout, layouts, replica_counts, strategies
from phaze_fast.placement.plans import Plan, Plans, read_plan
from phaze_fast.placement.problems import PipelineProblem, Placement, place_counts
from phaze_fast.placement.training import RECOMPUTE, Training
from phaze_fast.schedule import ScheduleCache
from phaze_fast.units import format_bytes

__all__ = ["Question", "infeasible", "plan", "room", "ties"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Question:
    """Layers, and a way to lay them out."""

    layers: TimedLayers
    layout: Layout

    def problem(self, ties: Any, memory_bytes: float) -> PipelineProblem:
        """Put it to the placement kernel, with so many bytes of a device for the model."""
        layout, sizes = self.layout, self.layers.sizes
        return PipelineProblem(
            table=self.layers.table(layout.groups, layout.zero, layout.stages[1] > 1, ties),
            memory_bytes=max(0.0, memory_bytes - sizes.gathered_bytes),
            microbatches=layout.microbatches,
            stages=layout.stages,
            schedule=layout.schedule if layout.schedule != "interleaved" else "1f1b",
            piped_bytes=sizes.piped_bytes,
            bucket_s=sizes.bucket_s(layout.groups),
        )

    def read(self, problem: PipelineProblem, placement: Placement, training: Training) -> Plan:
        """Put an answer of the kernel into words and numbers."""
        strategy, layout = self.layers.graph.strategy, self.layout
        return read_plan(
            self.layers,
            problem,
            placement,
            groups=replace(layout.groups, stages=len(placement.stages)),
            zero=layout.zero,
            schedule=layout.schedule if len(placement.stages) > 1 else "1f1b",
            virtual=layout.virtual,
            tokens=training.global_batch * (training.seq or self.layers.graph.model.seq),
            strategy=strategy,
        )


def room(cluster: Cluster, training: Training) -> float:
    """Bytes of a device that are for the model."""
    left = float(memory_of(cluster.chip).capacity_bytes) - float(training.reserved_bytes)
    if left <= 0:
        raise InvalidInputError(
            f"reserved_bytes: {training.reserved_bytes} is not accepted; expected less than the "
            "memory of a device"
        )
    return left


def ties(training: Training) -> list[tuple[int, int]]:
    """Pairs of layers that one stage must hold."""
    return [*training.tied, *((at - 1, at) for at in training.uncut)]


def _placed(
    questions: Sequence[Question], ties: Any, memory_bytes: float, threads: int
) -> Iterator[tuple[Question, PipelineProblem, list[Placement]]]:
    problems = [q.problem(ties, memory_bytes) for q in questions]
    searched = [k for k, q in enumerate(questions) if q.layout.schedule != "interleaved"]
    found = place_counts([problems[k] for k in searched], threads)
    placed = dict(zip(searched, found, strict=True))
    for k, question in enumerate(questions):
        if k in placed:
            yield question, problems[k], placed[k]
        else:
            even = interleaved(problems[k], question.layout.groups.stages, question.layout.virtual)
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
    capacity = room(cluster, training)
    rejected: Counter[str] = Counter()
    modes = RECOMPUTE if training.recompute == "auto" else (training.recompute,)
    graphs = [layer_graph(model, s) for s in strategies(model, cluster, training, rejected)]
    spec = optimizer(training.optimizer)
    timed = timed_layers(graphs, cluster, modes, spec, cache, threads)
    plans: list[Plan] = []
    tried = 0
    asked: list[tuple[Question, PipelineProblem]] = []
    for done, layers in enumerate(timed):
        questions = [
            Question(layers, layout) for layout in layouts(layers.sizes, training, cluster.devices)
        ]
        if not questions:
            rejected[_nothing_to_try(layers, training, cluster)] += 1
        for question, problem, found in _placed(questions, ties(training), capacity, threads):
            tried += 1
            if not found:
                rejected[_too_large(question)] += 1
                asked.append((question, problem))
            for placement in found:
                plans.append(question.read(problem, placement, training))
        if progress is not None:
            progress(done + 1, len(timed))
    question_of = (model, cluster, training, top)
    if plans:
        return Plans.of(question_of, plans, tried, rejected)
    why = (_shortfall(asked, training, capacity), _nearest(model, cluster, training))
    return Plans.of(question_of, plans, tried, rejected, why)


def _shortfall(
    asked: list[tuple[Question, PipelineProblem]], training: Training, capacity: float
) -> str:
    """Say which stage of the leanest layout is over by how much, and with what."""
    best: tuple[Plan, Question, PipelineProblem] | None = None
    searched = [(q, p) for q, p in asked if q.layout.schedule != "interleaved"]
    roomy = [replace(p, memory_bytes=1e300, table=p.table.only(-1)) for _, p in searched]
    for (question, problem), found in zip(searched, place_counts(roomy), strict=True):
        for placement in found:
            lean = question.read(problem, placement, training)
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
            lean, high = question.read(problem, found[0], training), middle
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


def _nothing_to_try(layers: TimedLayers, training: Training, cluster: Cluster) -> str:
    most = cluster.devices // layers.sizes.inner
    if not replica_counts(layers.sizes, training, cluster.devices):
        wanted = training.data_parallel or "any"
        return (
            f"data_parallel: {wanted} does not divide a batch of {training.global_batch} evenly, "
            f"or is more than {most}"
        )
    return (
        f"pipeline: {training.pipeline} stages are more than {most} groups of devices or the "
        "model's blocks"
    )


def _too_large(question: Question) -> str:
    strategy, zero = question.layers.graph.strategy, question.layout.zero
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
    capacity = room(cluster, training)
    modes = RECOMPUTE if training.recompute == "auto" else (training.recompute,)
    graphs = [layer_graph(model, s) for s in strategies(model, cluster, training, Counter())]
    for layers in timed_layers(graphs, cluster, modes, optimizer(training.optimizer)):
        questions = [
            Question(layers, layout) for layout in layouts(layers.sizes, training, cluster.devices)
        ]
        for _, _, found in _placed(questions, ties(training), capacity, 1):
            if found:
                return True
    return False


def infeasible(plans: Plans) -> InfeasibleError:
    """Say why there is no plan."""
    common = "; ".join(f"{why} ({count} times)" for why, count in plans.rejected.items())
    would = f" It would fit with {plans.nearest}." if plans.nearest else ""
    left = format_bytes(room(plans.cluster, plans.training))
    return InfeasibleError(
        f"{plans.model.name} on {plans.cluster.devices} devices with {left} each: "
        f"{plans.shortfall or common or 'nothing to try'}.{would}"
    )
