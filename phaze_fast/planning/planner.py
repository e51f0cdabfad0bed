"""The best parallel plans of a model on given hardware, and why others were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from phaze_fast.errors import InfeasibleError, InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Cluster
from phaze_fast.models import Model, load
from phaze_fast.planning.evaluator import Placed, PlanEvaluator
from phaze_fast.planning.layouts import space_text
from phaze_fast.planning.plans import Plan
from phaze_fast.planning.times import memory_of, times_on_chip
from phaze_fast.planning.training import Training
from phaze_fast.schedule import ScheduleCache
from phaze_fast.software import planned_model
from phaze_fast.tables import Table, flat_row, joined_columns
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes, format_time

__all__ = ["Plans", "infeasible", "plan", "room"]

Progress = Callable[[int, int], None]
_PARTS = 32
"""In which strategies are scheduled where somebody wants to know how far it is."""

_MORE_SHARED = (2, 3)
"""ZeRO stages that are tried where nothing fits with those tried by default."""

_SLOWEST = 2.0
"""Times of the fastest plan that one on the front of time and memory may take."""


@dataclass(frozen=True)
class Plans(Table):
    """The best plans of a model on a cluster, and what became of the rest."""

    model: Model
    cluster: Cluster
    training: Training
    top: int
    plans: tuple[Plan, ...]
    """Fastest first; the best of each kind of layout."""
    tried: int
    """Layouts that fit some partition: all are settled, by their bound or exactly."""
    rejected: dict[str, int]
    """Why layouts were left out, and how many."""
    shortfall: str = ""
    """Where nothing fits: which stage of the leanest layout is over, by how much, with what."""
    nearest: str = ""
    """Where nothing fits: what would."""
    open_s: float = float("inf")
    """Where `plan` was stopped: the least that layouts not looked at may take."""

    shown: ClassVar[tuple[str, ...]] = (
        *("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "schedule", "vpp", "recompute"),
        *("time_s", "memory_bytes", "mfu"),
    )

    def __len__(self) -> int:
        return len(self.plans)

    def headline(self) -> str:
        """Say which plans these are, and what is proven of them."""
        chip = "" if self.cluster.chip is None else f" x {self.cluster.chip.name}"
        problem = f"{self.model.name} on {self.cluster.devices}{chip}"
        if not self.plans:
            return f"{problem}: infeasible; {self.shortfall or 'no plan fits'}"
        least = format_time(self.bound_s)
        return f"{problem}: {self.status}, no plan takes less than {least} (gap {self.gap:.2%})"

    @property
    def best(self) -> Plan:
        """The fastest.

        Raises
        ------
        InfeasibleError
            Where nothing fits.
        """
        if not self.plans:
            raise InfeasibleError(f"{self.model.name}: {self.shortfall or 'no plan fits'}")
        return self.plans[0]

    @property
    def status(self) -> str:
        """``optimal``; ``feasible`` where it was stopped first; ``infeasible``."""
        if not self.plans:
            return "infeasible"
        return "optimal" if self.open_s >= self.best.time_s else "feasible"

    @property
    def complete(self) -> bool:
        """Whether all of the fastest plans are proven, and not the first alone."""
        return self.open_s == float("inf")

    @property
    def bound_s(self) -> float:
        """No plan of `space` takes less, seconds."""
        return min(self.best.time_s, self.open_s)

    @property
    def gap(self) -> float:
        """How much faster some plan may be, as a fraction of the bound; 0 where proven."""
        return self.best.time_s / self.bound_s - 1.0

    @cached_property
    def front(self) -> tuple[Plan, ...]:
        """Plans of which none is both faster and smaller than another, fastest first.

        None takes more than twice as long as the fastest. Found when they are first asked for: of
        every layout its fastest plan counts.
        """
        if not self.plans:
            return ()
        evaluator = _evaluator(self.model, self.cluster, self.training)
        workers = thread_count(None)
        times = evaluator.times(self.cluster, None, workers)
        placed = evaluator.front(times, _SLOWEST * self.best.time_s, threads=workers)
        return tuple(evaluator.plan(each, times) for each in placed)

    def mfu(self, plan: Plan) -> float:
        """Share of the cluster's peak that goes into the model."""
        return plan.mfu

    @property
    def space(self) -> str:
        """The plans that were looked at, in words: what the fastest is the fastest of."""
        return space_text(self.model, self.cluster, self.training)

    def to_columns(self) -> dict[str, Any]:
        """Give the plans as a table: widths, seconds by part, bytes by term."""
        return joined_columns([flat_row(plan.to_dict(stages=False)) for plan in self.plans])

    def to_dict(self, stages: bool = True) -> dict[str, Any]:
        """Give them as plain data."""
        return {
            "model": self.model.name,
            "status": self.status,
            "devices": self.cluster.devices,
            "space": self.space,
            "plans": [plan.to_dict(stages) for plan in self.plans],
            "front": [plan.to_dict(stages) for plan in self.front],
            "tried": self.tried,
            "rejected": self.rejected,
            "shortfall": self.shortfall,
            "nearest": self.nearest,
        }


def room(cluster: Cluster, training: Training) -> float:
    """Bytes of a device that are for the model."""
    left = float(memory_of(cluster.chip).capacity_bytes) - float(training.reserved_bytes)
    if left <= 0:
        raise InvalidInputError(
            f"reserved_bytes: {training.reserved_bytes} is not accepted; expected less than the "
            "memory of a device"
        )
    return left


def plan(
    model: Model | str,
    cluster: Cluster,
    training: Training,
    top: int = 10,
    threads: int | None = None,
    cache: ScheduleCache | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Plans:
    """Find the best parallel plans of a model on given hardware, exactly.

    Every combination of widths, micro-batch, replicas, stages, ZeRO stage, schedule and rank order
    is settled: by a lower bound, or by its best partition. What cannot be is counted by reason.
    Where nothing fits and `training` does not say what replicas share, they share gradients and
    weights too (ZeRO 2 and 3); `Plans.space` says so.

    Parameters
    ----------
    model
        What is trained, or its name.
    cluster
        Devices with their chip and fabric.
    training
        The step, and what is fixed or free.
    top
        Plans to keep besides the front of time and memory.
    threads
        At most this many threads, by default all cores; the answer does not depend on it.
    cache
        Where layer schedules are looked up and kept.
    progress
        Called with strategies whose layers are scheduled and with all of them; placing them comes
        last and takes little.
    stop
        Asked after every wave of layouts: whether to end with what is found so far, and its bound.

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
    >>> step = Training(global_batch=64, micro_batch=(1, 2))
    >>> plan("llama2-7b", cluster, step).best.devices
    8
    """
    model = load(model) if isinstance(model, str) else model
    if not isinstance(model, Model) or not isinstance(training, Training):
        raise InvalidTypeError(
            f"model, training: {type(model).__name__} and {type(training).__name__} are not "
            "accepted; expected a TransformerModel (models.load) and a Training"
        )
    if top < 1:
        raise InvalidInputError(f"top: {top!r} is not accepted; expected at least 1")
    model = planned_model(model, training.software)
    workers = thread_count(threads)
    evaluator = _evaluator(model, cluster, training)
    if not evaluator.fits.any() and "zero" not in training.model_fields_set:
        training = training.replace(zero=_MORE_SHARED)
        evaluator = _evaluator(model, cluster, training)
    placed: list[Placed] = []
    if evaluator.fits.any():
        if progress is not None:
            _schedule_in_parts(evaluator, cluster, cache, workers, progress)
        times = evaluator.times(cluster, cache, workers)
        placed = evaluator.top(times, top, threads=workers, stop=stop)
    common = (model, cluster, training, top)
    rejected = evaluator.rejected + _too_large(evaluator)
    tried, why = int(evaluator.fits.sum()), dict(rejected.most_common())
    if not placed:
        return Plans(*common, (), tried, why, _shortfall(evaluator), _nearest(*common[:3]))
    plans = tuple(evaluator.plan(each, times) for each in placed)
    return Plans(*common, plans, tried, why, open_s=evaluator.open_s)


def _schedule_in_parts(
    evaluator: PlanEvaluator,
    cluster: Cluster,
    cache: ScheduleCache | None,
    workers: int,
    progress: Progress,
) -> None:
    """Schedule the layers of some strategies after others, and say how far it is.

    What is worked out so is looked up when all are asked for.
    """
    count = len(evaluator.sizes)
    step = max(1, count // _PARTS)
    for done in range(0, count, step):
        progress(done, count)
        some = evaluator.sizes[done : done + step]
        times_on_chip(some, cluster, evaluator.optimizer, cache, workers)
    progress(count, count)


@lru_cache(maxsize=4)
def _prepared(model: Model, cluster: Cluster, training: Training) -> PlanEvaluator:
    """Prepare the evaluator of a problem; kept for the next question about it."""
    capacity = room(cluster, training) + float(training.reserved_bytes)
    evaluator = PlanEvaluator(model, cluster, training, [capacity])
    if evaluator.fits.any():
        evaluator.space  # noqa: B018 (worked out here, once)
    return evaluator


def _evaluator(model: Model, cluster: Cluster, training: Training) -> PlanEvaluator:
    return _prepared(model, cluster, training).for_one_call()


def _too_large(evaluator: PlanEvaluator) -> Counter[str]:
    """Count the layouts that do not fit, by what they have in common."""
    counts: Counter[str] = Counter()
    rows = evaluator.layouts[evaluator.fits[:, 0] == 0]
    number = np.bincount(rows["strategy"] * 4 + rows["zero"], minlength=4 * len(evaluator))
    for key in np.flatnonzero(number).tolist():
        strategy = evaluator.sizes[key // 4].strategy
        counts[
            f"memory: tp {strategy.tp}, micro_batch {strategy.micro_batch}, zero {key % 4} does "
            "not fit with so many replicas or so few stages"
        ] += int(number[key])
    return counts


def _shortfall(evaluator: PlanEvaluator) -> str:
    """Say which stage of the leanest layout is over by how much, and with what."""
    # Of layers that are dealt to chunks it is not known beforehand whether they fit.
    searched = (evaluator.layouts["schedule"] == 0) | (evaluator.layouts["stages"] == 1)
    layouts = evaluator.layouts[searched] if searched.any() else evaluator.layouts
    if not len(layouts):
        return ""
    capacity = float(evaluator.rooms[0])
    reserved = float(evaluator.training.reserved_bytes)

    def fitting(room_bytes: float) -> PlanEvaluator:
        given = (evaluator.sizes, layouts)
        return PlanEvaluator(
            evaluator.model, evaluator.cluster, evaluator.training, [room_bytes + reserved], given
        )

    low, high = capacity, max(capacity, 1.0)
    while not fitting(high).fits.any():
        high *= 4.0
        if high > 1e24:
            return ""
    for _ in range(60):
        middle = 0.5 * (low + high)
        if high - low < 1024.0 or not low < middle < high:
            break
        low, high = (low, middle) if fitting(middle).fits.any() else (middle, high)
    lean = fitting(high)
    times = lean.times(evaluator.cluster)
    placed = lean.top(times, 1)
    if not placed:
        return ""
    best = lean.plan(placed[0], times)
    worst = max(range(best.pp), key=lambda k: best.stages[k].memory_bytes)
    memory, total = best.stages[worst].memory, best.stages[worst].memory_bytes
    term = max(memory, key=lambda name: memory[name])
    return (
        f"at best (tp {best.tp}, pp {best.pp}, dp {best.dp}, zero {best.zero}, micro-batch "
        f"{best.micro_batch}, recompute {best.recompute}) stage {worst} needs "
        f"{format_bytes(total)}, {format_bytes(total - capacity)} too much; most of it is {term} "
        f"({format_bytes(memory[term])})"
    )


def _nearest(model: Model, cluster: Cluster, training: Training) -> str:
    """Say what small change would fit: recompute more, share more, smaller pieces, more devices."""
    if "1f1b" in training.schedule:  # of other schedules it is not known beforehand
        training = training.model_copy(update={"schedule": ("1f1b",)})
    changes: list[tuple[str, Training, Cluster]] = [
        ("recompute: auto", training.model_copy(update={"recompute": ("auto",)}), cluster),
        ("micro_batch: 1", training.model_copy(update={"micro_batch": (1,)}), cluster),
        ("zero: 3", training.model_copy(update={"zero": (3,)}), cluster),
    ]
    together = training.model_copy(
        update={"recompute": ("auto",), "micro_batch": (1,), "zero": (3,)}
    )
    changes.append(("recompute auto, micro_batch 1 and zero 3 together", together, cluster))
    for factor in (2, 4, 8, 16, 32, 64):
        try:
            more = cluster.model_copy(update={"devices": cluster.devices * factor})
            Cluster.model_validate(more.model_dump())
        except (InvalidInputError, ValueError):
            break
        changes.append((f"{more.devices} devices", training, more))
        changes.append((f"{more.devices} devices, with zero 3 and recompute auto", together, more))
    capacity = float(memory_of(cluster.chip).capacity_bytes)
    for words, step, wider in changes:
        if (step, wider) == (training, cluster):
            continue
        if PlanEvaluator(model, wider, step, [capacity]).fits.any():
            return words
    return ""


def infeasible(plans: Plans) -> InfeasibleError:
    """Say why there is no plan."""
    common = "; ".join(f"{why} ({count} times)" for why, count in plans.rejected.items())
    would = f" It would fit with {plans.nearest}." if plans.nearest else ""
    left = format_bytes(room(plans.cluster, plans.training))
    return InfeasibleError(
        f"{plans.model.name} on {plans.cluster.devices} devices with {left} each: "
        f"{plans.shortfall or common or 'nothing to try'}.{would}"
    )
