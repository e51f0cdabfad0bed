"""The best parallel plans of a model on given hardware, and why others are slower or impossible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from phaze_fast.caching import nothing_collected
from phaze_fast.errors import InfeasibleError, InvalidInputError, InvalidTypeError, UndecidedError
from phaze_fast.hardware import Cluster
from phaze_fast.models import Model
from phaze_fast.planning.evaluator import PlanEvaluator, TopPlans, checked_model
from phaze_fast.planning.frameworks import expressible, framework_training, free_training
from phaze_fast.planning.layouts import space_text
from phaze_fast.planning.plans import PARTS, Plan
from phaze_fast.planning.times import LazyTimes, memory_of
from phaze_fast.planning.training import Training
from phaze_fast.records import FrozenDict
from phaze_fast.schedule import ScheduleCache
from phaze_fast.tables import Array, Table, flat_row, joined_columns
from phaze_fast.threads import thread_count
from phaze_fast.units import format_bytes, format_time, parse_quantity

Progress = Callable[[int, int], None]
_SLOWEST = 2.0
"""Most time of a plan on the front of time and memory, as a multiple of the fastest plan's."""
_ASKABLE = (
    *("tp", "pp", "dp", "cp", "cp_kind", "ep", "etp", "dispatcher", "zero", "shard"),
    *("micro_batch", "schedule", "vpp", "recompute", "rank_order"),
)
"""Fields of a plan that `why_not` can fix."""


@dataclass(frozen=True)
class Plans(Table):
    """The best plans of a model on a cluster, and why others are not possible."""

    model: Model
    cluster: Cluster
    training: Training
    top: int
    plans: tuple[Plan, ...]
    """Fastest first; the best of each kind of layout."""
    tried: int
    """Number of layouts with a partition that fits; each is pruned by a bound or solved exactly."""
    rejected: dict[str, int]
    """How many strategies and layouts are impossible, by reason."""
    shortfall: str = ""
    """Where nothing fits: which stage of the smallest layout exceeds memory, and by how much."""
    nearest: str = ""
    """Where nothing fits: a small change with which a plan would fit."""
    open_s: float = float("inf")
    """Where `plan` was stopped: the least bound of the layouts that were not examined."""
    framework: str | None = None
    """The training framework whose files can express the plans; none = any plan."""
    free: Plan | None = None
    """With a framework: the fastest of all plans, also of those that its files cannot express."""
    excluded: tuple[int, int] = (0, 0)
    """Number of strategies, and of layouts of the other strategies, whose work alone takes longer
    than all of these plans; they are counted neither as tried nor as rejected."""

    shown: ClassVar[tuple[str, ...]] = (
        *("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "schedule", "vpp", "recompute"),
        *("time_s", "memory_bytes", "mfu"),
    )

    def __len__(self) -> int:
        return len(self.plans)

    def headline(self) -> str:
        """Describe the plans and what is proven about them."""
        chip = "" if self.cluster.chip is None else f" x {self.cluster.chip.name}"
        problem = f"{self.model.name} on {self.cluster.devices}{chip}"
        if not self.plans:
            return f"{problem}: {self.status}; {self.shortfall or 'no plan fits'}"
        least = format_time(self.bound_s)
        return f"{problem}: {self.status}, no plan takes less than {least} (gap {self.gap:.2%})"

    @property
    def best(self) -> Plan:
        """The fastest plan.

        Raises
        ------
        InfeasibleError
            Where nothing fits.
        UndecidedError
            Where the search was stopped before it found a plan.
        """
        if not self.plans:
            raise self.infeasible
        return self.plans[0]

    @property
    def status(self) -> str:
        """``optimal``; ``feasible`` if stopped before the proof; ``infeasible``; ``unknown``."""
        if not self.plans:
            return "infeasible" if self.complete else "unknown"
        return "optimal" if self.open_s >= self.best.time_s else "feasible"

    @property
    def complete(self) -> bool:
        """Whether all plans of the list are proven, not only the first."""
        return self.open_s == float("inf")

    @property
    def bound_s(self) -> float:
        """Lower bound of the step time of all plans of `space`."""
        return min(self.best.time_s, self.open_s)

    @property
    def gap(self) -> float:
        """How much faster some plan may be, as a fraction of the bound; 0 where proven."""
        return self.best.time_s / self.bound_s - 1.0

    @cached_property
    def front(self) -> tuple[Plan, ...]:
        """Pareto front of time and memory over the fastest plan of every layout, fastest first.

        None takes more than twice as long as the fastest. It is computed when first read.
        """
        if not self.plans:
            return ()
        workers, slowest_s = thread_count(None), _SLOWEST * self.best.time_s
        plans = []
        for evaluator in _evaluators(self.model, self.cluster, self.training, self.framework):
            if evaluator.has_all_layouts:
                work_s = evaluator.least_work_s(self.cluster, workers)
                evaluator = evaluator.within(work_s, slowest_s)
            times = evaluator.lazy_times(self.cluster, None, workers)
            bounds_s = (evaluator.bound(s, times.rows) for s in range(len(evaluator)))
            times.schedule([s for s, bound_s in enumerate(bounds_s) if bound_s <= slowest_s])
            front = evaluator.front(times.rows, slowest_s, threads=workers)
            plans += evaluator.plans(front, times.rows)
        if self.framework is None:
            return tuple(plans)
        plans.sort(key=lambda plan: (plan.time_s, plan.memory_bytes))
        least = [float("inf"), *accumulate((plan.memory_bytes for plan in plans), min)]
        return tuple(p for p, before in zip(plans, least, strict=False) if p.memory_bytes < before)

    @property
    def infeasible(self) -> InfeasibleError | UndecidedError:
        """The error with the reason why there is no plan, and the nearest change that fits."""
        if not self.complete:
            return UndecidedError(
                f"{self.model.name} on {self.cluster.devices} devices: stopped before a plan was "
                "found, which does not prove that there is none"
            )
        common = "; ".join(f"{why} ({count} times)" for why, count in self.rejected.items())
        would = f" It would fit with {self.nearest}." if self.nearest else ""
        usable = format_bytes(usable_bytes(self.cluster, self.training))
        return InfeasibleError(
            f"{self.model.name} on {self.cluster.devices} devices with {usable} each: "
            f"{self.shortfall or common or 'nothing to try'}.{would}"
        )

    @property
    def space(self) -> str:
        """Description of the plans that were compared."""
        text = space_text(self.model, self.cluster, self.training)
        if self.framework is None:
            return text
        return f"plans that {self.framework} can run, all stages recompute the same: {text}"

    @property
    def lost_to_framework(self) -> float | None:
        """How much longer the fastest plan takes than `free` does, as a fraction; None without."""
        return None if self.free is None else self.best.time_s / self.free.time_s - 1.0

    def to_columns(self) -> dict[str, Any]:
        """Convert to columns: widths, seconds by part, bytes by term."""
        return joined_columns([flat_row(plan.to_dict(stages=False)) for plan in self.plans])

    def to_dict(self, stages: bool = True) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "model": self.model.name,
            "status": self.status,
            "devices": self.cluster.devices,
            "space": self.space,
            "framework": self.framework,
            "free": None if self.free is None else self.free.to_dict(stages),
            "plans": [plan.to_dict(stages) for plan in self.plans],
            "front": [plan.to_dict(stages) for plan in self.front],
            "tried": self.tried,
            "excluded": list(self.excluded),
            "rejected": self.rejected,
            "shortfall": self.shortfall,
            "nearest": self.nearest,
        }


def usable_bytes(cluster: Cluster, training: Training) -> float:
    """Return the memory of a device that is available to the model."""
    left = float(memory_of(cluster.chip).capacity_bytes) - float(training.reserved_bytes)
    if left <= 0:
        raise InvalidInputError(
            f"reserved_bytes: {training.reserved_bytes} (1.5 GiB and headroom by default) is not "
            f"accepted; expected less than the memory of a device, "
            f"{format_bytes(left + training.reserved_bytes)}"
        )
    return left


def with_headroom(training: Training, cluster: Cluster, headroom: float | str) -> Training:
    """Return a step that leaves memory of each device free, as part of its reserved bytes.

    Parameters
    ----------
    training
        The step.
    cluster
        Whose devices have the memory.
    headroom
        A share of a device's memory below 1, or bytes; text such as ``3%`` or ``2 GiB`` too.

    Raises
    ------
    InvalidInputError
        Where `headroom` is neither, or is more than a device has.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> step = Training(global_batch=64, reserved_bytes=0)
    >>> with_headroom(step, cluster, "10%").reserved_bytes / 2**30
    8.0
    """
    capacity = float(memory_of(cluster.chip).capacity_bytes)
    expected = "a share of a device's memory, such as 3%, or bytes, such as 2 GiB"
    try:
        if isinstance(headroom, str) and headroom.endswith("%"):
            kept = float(headroom[:-1]) / 100.0 * capacity
        else:
            kept = parse_quantity(headroom, "bytes")
            kept *= capacity if kept < 1.0 else 1.0
            if 1.0 <= kept < 1024.0:  # a share in per cent without its sign
                raise ValueError
    except ValueError:
        raise InvalidInputError(
            f"headroom: {headroom!r} is not accepted; expected {expected}"
        ) from None
    if not 0.0 <= kept < capacity:
        raise InvalidInputError(f"headroom: {headroom!r} is not accepted; expected {expected}")
    return training.replace(reserved_bytes=training.reserved_bytes + round(kept))


@nothing_collected()
def plan(
    model: Model | str,
    cluster: Cluster,
    training: Training,
    top: int = 10,
    threads: int | None = None,
    cache: ScheduleCache | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
    framework: str | None = None,
    headroom: float | str = 0.0,
) -> Plans:
    """Find the best parallel plans of a model on given hardware, exactly.

    Every combination of widths, micro-batch, replicas, stages, ZeRO stage, schedule and rank order
    is settled: by a lower bound, or by its best partition. Impossible ones are counted by reason.

    Parameters
    ----------
    model
        What is trained, or its name.
    cluster
        Devices with their chip and fabric.
    training
        The step, and what is fixed or free.
    top
        Number of plans to return.
    threads
        Most threads to use, by default all cores; the answer does not depend on it.
    cache
        Cache of layer schedules.
    progress
        Called before every pass over the layouts with the number of strategies whose layers are
        scheduled, and of all strategies.
    stop
        Called after every wave of layouts; where it returns true, `plan` ends with the plans so
        far and their bound.
    framework
        A training framework (megatron, bridge, deepspeed, torchtitan, maxtext): only plans that its
        files can express are searched, and `Plans.free` is the fastest plan without these limits.
    headroom
        Memory of each device that stays free, see `with_headroom`; `reserved_bytes` of the plans
        include it.

    Returns
    -------
    Plans
        Fastest first. Empty where nothing fits: `rejected` says why, `nearest` what would fit.

    Raises
    ------
    InvalidInputError
        Where the cluster has no chip, or the chip has no HBM.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> step = Training(global_batch=64, micro_batch=(1, 2))
    >>> plan("llama2-7b", cluster, step).best.devices
    8
    """
    if not isinstance(training, Training):
        raise InvalidTypeError(
            f"training: {type(training).__name__} is not accepted; expected a Training"
        )
    if top < 1:
        raise InvalidInputError(f"top: {top!r} is not accepted; expected at least 1")
    model = checked_model(model, training.software, training.seq)
    training = with_headroom(training, cluster, headroom)
    workers, free = thread_count(threads), None
    if framework is not None:
        limited = framework_training(framework, model, training)
        wider = free_training(training, limited)
        free = plan(model, cluster, wider, 1, threads, cache, progress, stop)
        training = limited
    evaluators = _evaluators(model, cluster, training, framework)
    plans: list[Plan] = []
    rejected, open_s, tried, excluded = Counter[str](), float("inf"), 0, np.zeros(2, dtype=int)
    for whole in evaluators:
        query, plain = (cluster, top), cache is None and stop is None
        if plain and whole.last_answer is not None and whole.last_answer[0] == query:
            found = whole.last_answer[1]
        else:
            found = _searched(whole, cluster, top, cache, workers, progress, stop)
            whole.last_answer = (query, found) if plain else None
        plans += found.plans
        rejected += found.rejected
        open_s, tried = min(open_s, found.open_s), tried + found.tried
        excluded = excluded + found.excluded
    if open_s < float("inf"):  # stopped: some plans were ranked by lower bounds
        plans.sort(key=lambda plan: plan.time_s)
    answer = Plans(
        model,
        cluster,
        training,
        top,
        tuple(plans) if framework is None else tuple(_best_of_layouts(plans)[:top]),
        tried,
        dict(rejected.most_common()),
        open_s=open_s,
        framework=framework,
        free=None if free is None or not free.plans else free.best,
        excluded=(int(excluded[0]), int(excluded[1])),
    )
    if plans:
        return answer
    nearest = _nearest(model, cluster, training)
    return replace(answer, shortfall=_shortfall(evaluators[-1]), nearest=nearest)


def _best_of_layouts(plans: list[Plan]) -> list[Plan]:
    """Sort plans by time, and keep the fastest of those that differ in recomputation alone."""
    fastest: dict[tuple[Any, ...], Plan] = {}
    for candidate in sorted(plans, key=lambda plan: plan.time_s):
        fields = [name for name in _ASKABLE if name not in ("recompute", "rank_order")]
        fields.append("offload_optimizer")
        fastest.setdefault(tuple(getattr(candidate, name) for name in fields), candidate)
    return list(fastest.values())


@dataclass(frozen=True)
class _Searched:
    """The fastest plans of an evaluator, and what was compared; fields as in `Plans`."""

    plans: list[Plan]
    rejected: Counter[str]
    tried: int
    open_s: float
    excluded: Array


_FEW_STRATEGIES, _FEW_LAYOUTS = 64, 4096
"""Most strategies and layouts to compare at once; of more, those with the least work are first."""


def _least(bounds_s: Array, count: int) -> float:
    """Return what about `count` of the bounds do not exceed; infinite for that many or fewer."""
    return float(np.partition(bounds_s, count)[count]) if len(bounds_s) > count else float("inf")


def _searched(
    evaluator: PlanEvaluator,
    cluster: Cluster,
    top: int,
    cache: ScheduleCache | None,
    workers: int,
    progress: Progress | None,
    stop: Callable[[], bool] | None,
) -> _Searched:
    """Find the fastest plans; layouts whose work takes longer than these are not examined."""
    some, work_s = evaluator, np.zeros(0)
    reach_s = limit_s = float("inf")  # most work compared, slowest plan wanted
    if evaluator.has_all_layouts and (
        len(evaluator) > _FEW_STRATEGIES or evaluator.layouts_possible > _FEW_LAYOUTS
    ):
        work_s = evaluator.least_work_s(cluster, workers)
        bounds_s = evaluator.work_bounds_s(work_s)
        reach_s = _least(bounds_s, _FEW_STRATEGIES)
        few = np.flatnonzero(bounds_s <= reach_s)
        layouts_s = evaluator.layout_work_bounds_s(work_s, few)
        reach_s = min(reach_s, _least(layouts_s[layouts_s <= reach_s], _FEW_LAYOUTS))
        some = evaluator.within(work_s, reach_s)
    while True:
        fastest, fitting = TopPlans([], Counter(), float("inf")), some.fitting
        if len(fitting.layouts):
            times = fitting.lazy_times(cluster, cache, workers)
            fastest = _fastest(fitting, times, top, workers, progress, stop, limit_s)
        if len(fastest.plans) == top:
            limit_s = fastest.plans[-1].time_s
        stopped = stop is not None and fastest.open_s < float("inf")
        if stopped or limit_s <= reach_s or some is evaluator:
            break
        reach_s = min(limit_s, 8.0 * reach_s) if reach_s > 0.0 else limit_s
        some = evaluator.within(work_s, reach_s)
    return _Searched(
        fitting.plans(fastest.plans, times.rows) if fastest.plans else [],
        some.rejected + fastest.rejected + _too_large(some),
        int(some.fits.sum()),
        min(fastest.open_s, reach_s) if stopped else fastest.open_s,
        np.array([len(evaluator) - len(some), some.layouts_left_out]),
    )


def _fastest(
    evaluator: PlanEvaluator,
    times: LazyTimes,
    top: int,
    workers: int,
    progress: Progress | None,
    stop: Callable[[], bool] | None,
    below_s: float,
) -> TopPlans:
    """Find the fastest plans; layers are scheduled where bounds of their times do not suffice.

    At least `top` plans take at most `below_s` (infinite: not known). The search runs with lower
    bounds of layers, schedules the layers of the plans it finds, and repeats until all of these are
    scheduled: then no other plan is faster. If `below_s` is infinite, the first search ends after a
    few waves of layouts, which suffice to find most strategies to schedule.
    """
    if stop is not None:  # the search may end before it finds plans this fast
        below_s = float("inf")
    count, waves = len(evaluator), iter(_FIRST_WAVES if below_s == float("inf") else ())
    while True:
        if progress is not None:
            progress(int(times.exact.sum()), count)
        some = _SomeWaves(next(waves, None), stop)
        fastest = evaluator.top(times.rows, top, threads=workers, stop=some, below_s=below_s)
        new = times.schedule(evaluator.strategies_of(fastest.plans))
        if stop is None and len(fastest.plans) == top:
            below_s = min(below_s, evaluator.slowest_s(fastest.plans, times.rows))
        if some.ended:
            continue
        if not new or fastest.open_s < float("inf"):  # all are scheduled, or stopped
            break
    if progress is not None:
        progress(count, count)
    return fastest


_FIRST_WAVES = (2,)
"""Waves of layouts after which the strategies of the plans so far are scheduled."""


class _SomeWaves:
    """Ends a search after `waves` waves of layouts (None: no limit) or when `stop` is true."""

    def __init__(self, waves: int | None, stop: Callable[[], bool] | None) -> None:
        self._left, self._stop = waves, stop
        self.ended = False
        """Whether the limit of waves ended the search."""

    def __call__(self) -> bool:
        if self._stop is not None and self._stop():
            return True
        if self._left is not None:
            self._left -= 1
            self.ended = self._left < 0
        return self.ended


@lru_cache(maxsize=4)
def _evaluator(model: Model, cluster: Cluster, training: Training) -> PlanEvaluator:
    """Prepare the evaluator of a problem; the latest are cached."""
    capacity = usable_bytes(cluster, training) + float(training.reserved_bytes)
    return PlanEvaluator(model, cluster, training, [capacity])


def _evaluators(
    model: Model, cluster: Cluster, training: Training, framework: str | None
) -> list[PlanEvaluator]:
    """Prepare the evaluators of a problem: of a framework, one for each recompute mode."""
    if framework is None:
        return [_evaluator(model, cluster, training)]
    return [
        _framework_evaluator(model, cluster, training.replace(recompute=(mode,)), framework)
        for mode in training.recompute
    ]


@lru_cache(maxsize=16)
def _framework_evaluator(
    model: Model, cluster: Cluster, training: Training, framework: str
) -> PlanEvaluator:
    """Prepare the evaluator of the layouts that a framework can express."""
    every = _evaluator(model, cluster, training)
    rejected = Counter(every.rejected)
    strategies = [sizes.strategy for sizes in every.sizes]
    allowed = expressible(framework, strategies, every.layouts, rejected)
    capacity = usable_bytes(cluster, training) + float(training.reserved_bytes)
    given = (every.sizes, every.layouts[allowed])
    limited = PlanEvaluator(model, cluster, training, [capacity], given)
    limited.rejected = +rejected
    return limited


def _too_large(evaluator: PlanEvaluator) -> Counter[str]:
    """Count the layouts that do not fit by tp, micro-batch and ZeRO stage."""
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
    """Describe the stage of the smallest layout that exceeds memory: excess and largest term."""
    # For schedules with chunks, only the search decides whether an assignment fits.
    searched = (evaluator.layouts["schedule"] == 0) | (evaluator.layouts["pp"] == 1)
    layouts = evaluator.layouts[searched] if searched.any() else evaluator.layouts
    if not len(layouts):
        return ""
    limit_bytes = float(evaluator.limits_bytes[0])
    reserved = float(evaluator.training.reserved_bytes)

    def under(limit_bytes: float) -> PlanEvaluator:
        sizes_and_layouts = (evaluator.sizes, layouts)
        return PlanEvaluator(
            evaluator.model,
            evaluator.cluster,
            evaluator.training,
            [limit_bytes + reserved],
            sizes_and_layouts,
        )

    low, high = limit_bytes, max(limit_bytes, 1.0)
    while not under(high).fits.any():
        high *= 4.0
        if high > 1e24:
            return ""
    for _ in range(60):
        middle = 0.5 * (low + high)
        if high - low < 1024.0 or not low < middle < high:
            break
        low, high = (low, middle) if under(middle).fits.any() else (middle, high)
    smallest = under(high)
    times = smallest.times(evaluator.cluster)
    fastest = smallest.top(times, 1).plans
    if not fastest:
        return ""
    best = smallest.plan(fastest[0], times)
    worst = max(range(best.pp), key=lambda k: best.stages[k].memory_bytes)
    memory, total = best.stages[worst].memory, best.stages[worst].memory_bytes
    term = max(memory, key=lambda name: memory[name])
    return (
        f"at best (tp {best.tp}, pp {best.pp}, dp {best.dp}, zero {best.zero}, micro-batch "
        f"{best.micro_batch}, recompute {best.recompute}) stage {worst} needs "
        f"{format_bytes(total)}, {format_bytes(total - limit_bytes)} too much; most of it is "
        f"{term} ({format_bytes(memory[term])})"
    )


def _nearest(model: Model, cluster: Cluster, training: Training) -> str:
    """Name a small change that would fit: more recomputation or sharding, more devices."""
    if "1f1b" in training.schedule:  # for other schedules only the search decides whether they fit
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
        changes.append((f"{more.devices} devices (only doublings were tried)", training, more))
        changes.append((f"{more.devices} devices, with zero 3 and recompute auto", together, more))
    capacity = float(memory_of(cluster.chip).capacity_bytes)
    for words, step, wider in changes:
        if (step, wider) == (training, cluster):
            continue
        if PlanEvaluator(model, wider, step, [capacity]).fits.any():
            return words
    return ""


# ---- why not another plan ----


@dataclass(frozen=True)
class WhyNot:
    """The best plan with some fields fixed, compared with the fastest of all."""

    asked: Mapping[str, Any]
    """The fields that were fixed."""
    fastest: Plan
    plan: Plan | None
    """The fastest with these fields; None where there is none."""
    reason: str
    """Where there is none: the broken rule, or by how much it does not fit."""
    framework: str | None = None
    """The training framework that the plans are for; none = any plan."""
    unlimited: Plan | None = None
    """Where the framework cannot run such a plan: the fastest without the framework's limits."""

    @property
    def slower_by(self) -> float | None:
        """Relative excess of time over the fastest plan; None where there is no such plan."""
        return None if self.plan is None else self.plan.time_s / self.fastest.time_s - 1.0

    @property
    def parts_s(self) -> Mapping[str, float]:
        """Excess of each part of the step over the fastest plan's, seconds."""
        if self.plan is None:
            return FrozenDict({})
        own, best = self.plan.parts_s, self.fastest.parts_s
        return FrozenDict({name: own[name] - best[name] for name in PARTS})

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data."""
        return {
            "asked": dict(self.asked),
            "plan": None if self.plan is None else self.plan.to_dict(),
            "slower_by": self.slower_by,
            "parts_s": dict(self.parts_s),
            "reason": self.reason,
            "unlimited": None if self.unlimited is None else self.unlimited.to_dict(),
            "text": str(self),
        }

    def __str__(self) -> str:
        words = ", ".join(f"{name} {value}" for name, value in self.asked.items())
        if self.unlimited is not None:
            more = self.unlimited.time_s / self.fastest.time_s - 1.0
            return (
                f"{words}: {self.framework} cannot run such a plan. {self.reason}. If it could, "
                f"the best ({self.unlimited}) would take {abs(more):.1%} "
                f"{'longer' if more > 0 else 'less'} than the fastest that it can ({self.fastest})."
            )
        if self.plan is None:
            return f"{words}: there is no such plan. {self.reason}"
        if self.plan.time_s <= self.fastest.time_s:
            return f"{words}: that is the fastest, {format_time(self.plan.time_s)}."
        by_size = sorted(self.parts_s.items(), key=lambda item: -abs(item[1]))
        named = [
            f"{name} {'+' if more > 0 else '-'}{format_time(abs(more))}"
            for name, more in by_size[:4]
            if abs(more) > 0.01 * (self.plan.time_s - self.fastest.time_s)
        ]
        return (
            f"{words}: the best such plan ({self.plan}) takes {self.slower_by:.1%} longer than the "
            f"fastest ({self.fastest}), {format_bytes(self.plan.memory_bytes)} of "
            f"{format_bytes(self.plan.limit_bytes)}; parts of the step against the fastest: "
            f"{', '.join(named)}."
        )


def read_asked(text: str) -> dict[str, Any]:
    """Read fields of a plan, such as ``tp=8,pp=4,schedule=1f1b``.

    Examples
    --------
    >>> read_asked("tp=8,pp=4,schedule=1f1b")
    {'tp': 8, 'pp': 4, 'schedule': '1f1b'}
    """
    fields: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in _ASKABLE or not value:
            raise InvalidInputError(
                f"why-not: {item!r} is not accepted; expected name=value with a name of "
                f"{', '.join(_ASKABLE)}"
            )
        fields[name] = int(value) if value.isdigit() else value
    return fields


def why_not(plans: Plans, asked: Mapping[str, Any], threads: int | None = None) -> WhyNot:
    """Find the best plan with some fields fixed, and compare it with the fastest plan of all.

    Parameters
    ----------
    plans
        The result of `plan`.
    asked
        Fields of a plan and their values: tp, pp, dp, cp, cp_kind, ep, etp, dispatcher, zero,
        shard, micro_batch, schedule, vpp, recompute, rank_order. The other fields are searched as
        before.
    threads
        Most threads to use, by default all cores; the answer does not depend on it.

    For plans of a framework that cannot run one with these fields, `WhyNot.reason` is its rule and
    `WhyNot.unlimited` the plan without that rule.

    Raises
    ------
    InvalidInputError
        Where a field is unknown or its value malformed.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> plans = pf.plan("llama2-7b", cluster, pf.Training(global_batch=64, micro_batch=(1, 2)))
    >>> answer = why_not(plans, {"tp": 8})
    >>> answer.plan.tp, answer.slower_by > 0
    (8, True)
    >>> why_not(plans, {"tp": 3}).plan is None
    True
    """
    unknown = [name for name in asked if name not in _ASKABLE]
    if unknown or not asked:
        raise InvalidInputError(
            f"asked: {unknown[0] if unknown else {}!r} is not accepted; expected fields of "
            f"{', '.join(_ASKABLE)}"
        )
    training = Training.from_dict({**plans.training.to_dict(), **asked})
    name, fields = plans.framework, FrozenDict(dict(asked))
    try:
        fixed = plan(plans.model, plans.cluster, training, 1, threads=threads, framework=name)
    except InvalidInputError as error:
        if name is None:
            raise
        broken = str(error)
    else:
        if fixed.plans:
            return WhyNot(fields, plans.best, fixed.best, "", name)
        rules = [why for why in fixed.rejected if why.startswith(f"{name}: ")]
        broken = "; ".join(rules) or str(fixed.infeasible)
    unlimited = None
    if name is not None:
        free = plan(plans.model, plans.cluster, training, 1, threads=threads)
        unlimited = free.best if free.plans else None
    return WhyNot(fields, plans.best, None, broken, name, unlimited)
