"""The plan evaluator: bounds, times and plans of a model on a cluster.

`PlanEvaluator` is the only caller of the plan kernel: planning, prediction, search, sweeps and
baselines all use it, so that they all report the same figures of a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidTypeError, not_accepted
from phaze_fast.hardware import Cluster, cluster_record
from phaze_fast.memory import INSTANTS, SCHEDULES, TERMS, optimizer
from phaze_fast.models import Model, load
from phaze_fast.opgraph.graph import AGAIN, UNITS
from phaze_fast.planning.layouts import LayoutRules, Layouts, node_devices, strategies
from phaze_fast.planning.plans import PARTS, Plan, Stage, plan_interval_s
from phaze_fast.planning.sizes import (
    BOUNDARY_KINDS,
    StrategySizes,
    fused_sizes,
    strategy_arrays,
    training_record,
)
from phaze_fast.planning.throughput import step_throughput
from phaze_fast.planning.times import (
    KindTimes,
    LazyTimes,
    free_times_on_chip,
    least_work_s,
    times_on_chip,
)
from phaze_fast.planning.training import (
    RANK_ORDERS,
    Training,
    recompute_text,
    stage_modes,
)
from phaze_fast.records import FrozenDict
from phaze_fast.schedule import ScheduleCache
from phaze_fast.software import Software, fabric_as_run, planned_model
from phaze_fast.tables import Array

_BROKEN_TIE = "tied, uncut: no partition that fits keeps these layers together"
_NO_ASSIGNMENT = "memory: no assignment of the layers to the chunks of the schedule fits"
ESTIMATE_PARTS: tuple[str, ...] = _core.ESTIMATE_DTYPE["parts"].names or ()
ESTIMATE_TERMS: tuple[str, ...] = _core.ESTIMATE_DTYPE["memory"].names or ()
ESTIMATE_COLUMNS = tuple(
    column
    for name in _core.ESTIMATE_DTYPE.names or ()
    for column in _core.ESTIMATE_DTYPE[name].names or (name,)
    if name != "unused"
)  # in the order in which the kernel writes them
ANY_LIMIT_BYTES = 0.0
"""Memory limit for estimates whose status is not read: only the status depends on the limit."""
# Factors that keep bounds valid although sums in another order differ in their last digits.
_ROUNDED_DOWN, _ROUNDED_UP = 1.0 - 1e-9, 1.0 + 1e-9
_EVEN_AT_ONCE = 64  # layouts whose even partitions are estimated before bounds are compared
_OF_STRATEGY = (
    *("tp", "cp", "cp_kind", "ep", "etp", "dispatcher", "expert_overlap", "overlap_experts"),
    *("micro_batch", "offload_optimizer"),
)  # fields that a plan copies from its strategy
_ON_TENSOR_CORES = np.array(["TC" in unit for unit in UNITS])


def checked_model(model: Model | str, software: Software, seq: int | None = None) -> Model:
    """Return a model, given as a record or by name, in the form that a software profile runs.

    Sequences have `seq` tokens; by default as many as the model says.

    Raises
    ------
    InvalidTypeError
        Where `model` is neither a model nor a name.
    """
    known = load(model) if isinstance(model, str) else model
    if not isinstance(known, Model):
        raise InvalidTypeError(
            f"model: {type(model).__name__} is not accepted; expected a TransformerModel or a name"
        )
    return planned_model(known, software, seq)


@dataclass(frozen=True)
class Placed:
    """A plan as the kernel returns it: layout, first layer of each stage, recompute modes."""

    time_s: float
    """Seconds of a step; infinite where no plan fits, or none is as fast as required."""
    memory_bytes: float
    layout: int
    """Position among the layouts; -1 where there is no plan."""
    cuts: tuple[int, ...] = ()
    """Positions at which chunks begin, and the end."""
    variants: tuple[int, ...] = ()
    """Recomputation of each stage, as `recompute_code` writes it."""
    open_s: float = float("inf")
    """Lower bound, seconds, of plans that the search's limit of work left open; infinite: none."""

    @property
    def arrays(self) -> tuple[Array, Array]:
        """Cuts and variants as the kernel takes them."""
        return np.array(self.cuts, dtype=np.int32), np.array(self.variants, dtype=np.int32)

    @classmethod
    def from_records(cls, records: Array, pool: Array) -> list[Placed]:
        """Read the kernel's records; their cuts and variants are slices of `pool`."""
        plans = []
        for time_s, memory, layout, cuts_at, cuts, at, variants, open_s in records.tolist():
            borders = tuple(pool[cuts_at : cuts_at + cuts].tolist())
            modes = tuple(pool[at : at + variants].tolist())
            plans.append(cls(time_s, memory, layout, borders, modes, open_s))
        return plans


class TopPlans(NamedTuple):
    """The fastest plans of an evaluator."""

    plans: list[Placed]
    rejected: Counter[str]
    """Layouts that turned out to have no plan, by reason."""
    open_s: float
    """Least lower bound, seconds, of layouts not examined to the end; infinite where all were."""


class PlanEvaluator:
    """The strategies and layouts of a model on a cluster, evaluated by the plan kernel.

    Parameters
    ----------
    model, cluster, training
        The problem; the chip of the cluster is not used.
    capacities
        HBM capacities of a device to be considered, bytes, rising.
    given
        Strategies and layouts to use in place of all that `training` allows; with None for the
        layouts, all layouts of these strategies.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        training: Training,
        capacities: Sequence[float],
        given: tuple[Sequence[StrategySizes], Array | None] | None = None,
    ) -> None:
        self.model, self.cluster, self.training = model, cluster, training
        self._illegal: Counter[str] = Counter()  # strategies, by reason
        self._grids: dict[tuple[Any, ...], Layouts] = {}
        self.limits_bytes = np.array(capacities, dtype=np.float64) - float(training.reserved_bytes)
        """Usable memory of a device for each capacity."""
        self.sizes = list(given[0]) if given is not None else self._strategies_allowed()
        self._given = None if given is None else given[1]
        self.optimizer = optimizer(training.optimizer_name)
        self.layouts_left_out = 0
        """How many layouts of this evaluator's strategies `within` left out."""
        self.last_answer: tuple[Any, Any] | None = None
        """The query that `plan` answered last with this evaluator, and its answer."""
        self._record = training_record(self.optimizer, training.software, training.precision)

    def with_prices(self, **joules: float) -> PlanEvaluator:
        """Return a copy of the evaluator with other joules per byte: hbm_byte_j, network_byte_j."""
        other = copy(self)
        other.__dict__.pop("space", None)
        other._record = self._record.copy()
        for name, value in joules.items():
            other._record[name] = value
        return other

    def within(self, work_s: Array, most_s: float) -> PlanEvaluator:
        """Return the evaluator of the layouts whose work alone does not take longer than `most_s`.

        `work_s` has the seconds of `least_work_s` for each strategy.
        """
        kept = np.flatnonzero(self.work_bounds_s(work_s) <= most_s)
        some = self if len(kept) == len(self) else self._with([self.sizes[s] for s in kept], None)
        layouts = some._listed(work_s[kept], most_s)
        left_out = some.layouts_possible - len(layouts)
        if not left_out:
            return some
        limited = self._with(some.sizes, layouts)
        limited.rejected = Counter(some.rejected)
        limited.layouts_left_out = left_out
        return limited

    @property
    def fitting(self) -> PlanEvaluator:
        """The evaluator of the layouts that fit under some memory limit."""
        kept = self.fits.any(axis=1)
        if kept.all():
            return self
        other = self._with(self.sizes, self.layouts[kept])
        vars(other).update(fits=self.fits[kept], _arrays=self._arrays)
        return other

    def _with(self, sizes: Sequence[StrategySizes], layouts: Array | None) -> PlanEvaluator:
        """Return an evaluator of the same problem with other strategies and layouts."""
        given = (sizes, layouts)
        other = PlanEvaluator(self.model, self.cluster, self.training, (), given)
        other.limits_bytes, other._illegal = self.limits_bytes, self._illegal
        other._grids = self._grids
        return other

    # ---- strategies and layouts ----

    def _strategies_allowed(self) -> list[StrategySizes]:
        training, modes = self.training, self.training.recompute_modes
        runs = (training.software, training.precision, training.fusion)
        allowed = list(strategies(self.model, self.cluster, training, self._illegal))
        return fused_sizes(self.model, allowed, modes, *runs)

    @property
    def has_all_layouts(self) -> bool:
        """Whether no layouts were given."""
        return self._given is None

    @property
    def strategies_rejected(self) -> int:
        """How many strategies are impossible."""
        return sum(self._illegal.values())

    def _grid(self, sizes: StrategySizes) -> Layouts:
        """Return the layouts of a strategy, which several strategies share."""
        widths = sizes.strategy.stage_widths
        known = self._grids.get(widths)
        if known is None:
            rules = LayoutRules(
                self.training,
                sizes.strategy,
                devices=self.cluster.devices,
                node=node_devices(self.cluster),
                blocks=sizes.blocks,
                layers=len(sizes.graph.order),
            )
            self._grids[widths] = known = rules.layouts()
        return known

    @cached_property
    def _grids_of(self) -> list[Layouts]:
        """The layouts of each strategy."""
        return [self._grid(own) for own in self.sizes]

    def _listed(self, work_s: Array, most_s: float) -> Array:
        """List the layouts of all strategies whose work takes at most `most_s`, by strategy."""
        grids = [own.grid for own in self._grids_of]
        return _core.list_layouts(grids, work_s, _ROUNDED_DOWN, most_s)

    @property
    def layouts_possible(self) -> int:
        """How many layouts all strategies have."""
        return sum(map(len, self._grids_of))

    @cached_property
    def layouts(self) -> Array:
        """The layouts of all strategies, in their order."""
        if self._given is not None:
            return self._given
        return self._listed(np.zeros(len(self)), np.inf)

    @cached_property
    def rejected(self) -> Counter[str]:
        """How many strategies and layouts are impossible, by reason."""
        rejected = Counter(self._illegal)
        if self._given is None:
            for grid, count in Counter(self._grids_of).items():
                rejected.update({why: count * number for why, number in grid.rejected.items()})
        return rejected

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def fits(self) -> Array:
        """Whether some partition of each layout fits, shape (layouts, capacities)."""
        shape = len(self.layouts), len(self.limits_bytes)
        if not all(shape):
            return np.zeros(shape, dtype=np.uint8)
        return _core.layouts_fit(
            self.layouts, self._strategies, np.ascontiguousarray(self._kinds).reshape(-1),
            self._order, self._record, np.maximum(self.limits_bytes, 0.0),
        ).reshape(shape)  # fmt: skip

    @cached_property
    def layout_counts(self) -> Array:
        """Number of layouts of each strategy, shape (strategies,)."""
        counts: Array = np.bincount(self.layouts["strategy"], minlength=len(self))
        return counts

    @cached_property
    def strategy_fits(self) -> Array:
        """Whether some layout of each strategy fits, shape (strategies, capacities)."""
        fits: Array = np.zeros((len(self), len(self.limits_bytes)), dtype=bool)
        layouts, limits = np.nonzero(self.fits)
        fits[self.layouts["strategy"][layouts], limits] = True
        return fits

    @cached_property
    def _arrays(self) -> tuple[Array, Array, Array]:
        return strategy_arrays(tuple(self.sizes), self.optimizer)

    @property
    def _strategies(self) -> Array:
        return self._arrays[0]

    @property
    def _kinds(self) -> Array:
        return self._arrays[1]

    @property
    def _order(self) -> Array:
        return self._arrays[2]

    def _tied_pairs(self) -> list[tuple[int, int]]:
        """List the pairs of layers that one stage must hold."""
        layers, asked = len(self._order), self.training
        expected = f"positions of the {layers} layers of {self.model.name}, counted from 0"
        for first, second in asked.tied:
            if not 0 <= first < second < layers:
                raise not_accepted("tied", (first, second), f"two rising {expected}")
        for at in asked.uncut:
            if at >= layers:
                raise not_accepted("uncut", at, expected)
        return [*asked.tied, *((at - 1, at) for at in asked.uncut)]

    @cached_property
    def space(self) -> _core.PlanSpace:
        """The problem as the plan kernel takes it, with the costs of every layout."""
        graph = self.sizes[0].graph
        wired = fabric_as_run(self.cluster.fabric, self.training.software)
        return _core.PlanSpace(
            fabric=cluster_record(wired, self.cluster.devices),
            devices=self.cluster.devices,
            training=self._record,
            kinds=len(graph.layers),
            order=self._order,
            edges=np.array(graph.edges, dtype=np.int32).reshape(-1),
            tied=np.array(self._tied_pairs(), dtype=np.int32).reshape(-1),
            strategies=self._strategies,
            sizes=np.ascontiguousarray(self._kinds[:, :-1]).reshape(-1),
            layouts=self.layouts,
            memory_limits=np.maximum(self.limits_bytes, 0.0),
            fits=self.fits.reshape(-1),
            some_blocks=self.training.recompute_some,
        )

    # ---- plans ----

    def times(
        self, cluster: Cluster, cache: ScheduleCache | None = None, threads: int = 1
    ) -> KindTimes:
        """Cost and schedule all strategies on a cluster's chip, one row each."""
        return times_on_chip(self.sizes, cluster, self.optimizer, cache, threads)

    def least_work_s(self, cluster: Cluster, threads: int = 1) -> Array:
        """Bound the seconds of a micro-batch through all layers by strategy, see `least_work_s`."""
        return least_work_s(tuple(self.sizes), cluster, self.optimizer, threads)

    def lazy_times(
        self, cluster: Cluster, cache: ScheduleCache | None = None, threads: int = 1
    ) -> LazyTimes:
        """Bound the layers of all strategies that fit some memory limit from below on a chip."""
        fit = np.flatnonzero(self.strategy_fits.any(axis=1)).tolist()
        return LazyTimes(self.sizes, fit, cluster, self.optimizer, cache, threads)

    def plans(self, placed: Sequence[Placed], times: KindTimes) -> list[Plan]:
        """Describe plans in full, of `times` with one row per strategy."""
        if not placed:
            return []
        every = [int(self.layouts[one.layout]["strategy"]) for one in placed]
        own = sorted(set(every))
        some = [self.sizes[s] for s in own]
        levels = free_times_on_chip(some, self.cluster, self.optimizer)
        rows = {id(k): [k.at(slice(n, n + 1)) for n in range(len(own))] for k in levels}
        free = {s: [rows[id(level)][n] for level in levels] for n, s in enumerate(own)}
        return [self.plan(one, times, free=free[s]) for one, s in zip(placed, every, strict=True)]

    def slowest_s(self, placed: Sequence[Placed], times: KindTimes) -> float:
        """Return the seconds of the slowest plan if layers take `times`, one row per strategy."""
        rows = [int(self.layouts[plan.layout]["strategy"]) for plan in placed]
        return float(self._figures(placed, times, rows)[0].max())

    def strategies_of(self, placed: Iterable[Placed]) -> set[int]:
        """Return the positions of the strategies of some plans."""
        return {int(self.layouts[plan.layout]["strategy"]) for plan in placed}

    def top(
        self,
        times: KindTimes,
        top: int,
        threads: int = 1,
        stop: Any = None,
        below_s: float = np.inf,
    ) -> TopPlans:
        """Find the fastest plans that take at most `below_s`, up to rounding.

        Plans that differ only in rank order count once. `stop` is called after every wave of
        layouts; where it returns true, the search ends with the plans so far.
        """
        found = self.space.top_plans(times, 0, top, threads, stop, below_s * _ROUNDED_UP)
        records, pool, _, empty, open_s = found
        tied = self.training.tied or self.training.uncut
        rejected = Counter({_BROKEN_TIE if tied else _NO_ASSIGNMENT: empty}) if empty else Counter()
        return TopPlans(Placed.from_records(records, pool), rejected, open_s)

    def front(self, times: KindTimes, most_s: float, threads: int = 1) -> list[Placed]:
        """Find the Pareto front of time and memory over the layouts' best plans, up to `most_s`."""
        return Placed.from_records(*self.space.front(times, 0, most_s, threads)[:2])

    def best(
        self, s: int, times: KindTimes, least: KindTimes, below_s: Array, threads: int = 1
    ) -> list[list[Placed]]:
        """Find the best plan of strategy `s` on each chip under each memory limit.

        Parameters
        ----------
        s
            Which strategy.
        times
            Times of its layers, one row per chip.
        least
            Proven lower bounds of those times.
        below_s
            Most seconds of a plan, shape (chips, capacities); minus infinity: no plan wanted.
        threads
            Most threads to use; the answer does not depend on it.
        """
        limits = np.ascontiguousarray(below_s, dtype=np.float64).reshape(-1)
        placed = Placed.from_records(*self.space.best(s, times, least, limits, threads))
        count = len(self.limits_bytes)
        return [placed[k : k + count] for k in range(0, len(placed), count)]

    def best_s(
        self, s: int, times: KindTimes, least: KindTimes, below_s: Array, threads: int = 1
    ) -> Array:
        """Bound the plans of strategy `s` on each chip from below, those left open included."""
        limits = np.ascontiguousarray(below_s, dtype=np.float64).reshape(-1)
        records = self.space.best(s, times, least, limits, threads)[0]
        seconds = np.minimum(records["time_s"], records["open_s"])
        shortest: Array = seconds.reshape(below_s.shape).min(axis=1) * _ROUNDED_DOWN
        return shortest

    def energies_j(self, placed: Sequence[Placed], times: KindTimes, rows: Sequence[int]) -> Array:
        """Compute the joules of one step of each plan on the chip of its row of `times`."""
        joules: Array = self._figures(placed, times, rows)[1]
        return joules

    def _figures(self, placed: Sequence[Placed], times: KindTimes, rows: Sequence[int]) -> Array:
        """Compute seconds and joules of one step of each plan with the times of its row."""
        pool: list[int] = []
        records: Array = np.zeros(len(placed), dtype=_core.PLACED_DTYPE)
        for record, plan in zip(records, placed, strict=True):
            record["layout"] = plan.layout
            record["cuts_at"], record["cuts"] = len(pool), len(plan.cuts)
            pool += plan.cuts
            record["variants_at"], record["variants"] = len(pool), len(plan.variants)
            pool += plan.variants
        at, borders = np.array(rows, dtype=np.int64), np.array(pool, dtype=np.int32)
        return self.space.figures(times, at, records, borders)

    def bounds(self, s: int, least: KindTimes, limits: Array, threads: int = 1) -> Array:
        """Bound strategy `s` from below on each chip, under the memory limits numbered `limits`."""
        bounds: Array = self.space.bounds(s, least, limits, threads)
        return bounds

    def work_bounds_s(self, work_s: Array) -> Array:
        """Bound the plans of each strategy from below by the work of a step, whatever the layout.

        Some device computes at least an equal share of all passes (docs/search.md).
        """
        share = np.array([own.inner / own.strategy.micro_batch for own in self.sizes])
        rounds = self.training.global_batch / self.cluster.devices
        bounds_s: Array = rounds * share * work_s * _ROUNDED_DOWN
        return bounds_s

    def layout_work_bounds_s(self, work_s: Array, strategies: Array | None = None) -> Array:
        """Bound the plans of each layout from below by an equal share of the work for each stage.

        The layouts are those of `strategies` (positions), by default of all.
        """
        some = range(len(self)) if strategies is None else strategies.tolist()
        bounds_s = [self._grid(self.sizes[s]).shares * work_s[s] * _ROUNDED_DOWN for s in some]
        return np.concatenate([np.zeros(0), *bounds_s])

    def bound(self, s: int, times: KindTimes) -> float:
        """Bound the fastest plan of strategy `s` from below by lower bounds of its times."""
        return float(self.bounds(s, times.at(slice(s, s + 1)), np.zeros(1, dtype=np.int64))[0])

    def work_bounds(self, s: int, work_s: Array, limits: Array) -> Array:
        """Bound strategy `s` from below by one micro-batch's work: faster, weaker than `bounds`."""
        bounds: Array = self.space.work_bounds(s, np.ascontiguousarray(work_s), limits)
        return bounds

    def estimate_even(
        self,
        times: KindTimes,
        layouts: Array,
        variants: Array,
        limit_bytes: float,
        free: Sequence[KindTimes] = (),
        status: Array | None = None,
        threads: int = 1,
    ) -> dict[str, Array]:
        """Estimate even partitions of layouts: columns by field of a plan's estimate.

        Parameters
        ----------
        times
            One row per strategy.
        layouts
            Position of each plan's layout (-1: no plan); layouts of one shape that follow each
            other are estimated together.
        variants
            What each plan recomputes, as `recompute_code` writes it; -1: the fastest that fits.
        limit_bytes
            Usable memory of a device.
        free
            Times by level of `free_times`, one row per strategy; without them, the time of a step
            is not split into parts.
        status
            Status of all rows, which those without a plan keep; by default 0.
        threads
            Most threads to use; the answer does not depend on it.
        """
        if status is None:
            status = np.zeros(len(layouts), dtype=np.int32)
        columns = self.space.estimate_even(
            times, layouts, variants, limit_bytes, free, status, threads
        )
        return dict(
            zip(ESTIMATE_COLUMNS, (column for part in columns for column in part), strict=True)
        )

    def best_even(self, times: KindTimes, limit: int = 0, threads: int = 1) -> list[Placed]:
        """Find the fastest plan that fits with even stages as in Megatron-LM; empty if none fits.

        With several recompute variants, each stage uses the cheapest that fits.
        """
        if not len(self.layouts):
            return []
        limit_bytes = float(max(self.limits_bytes[limit], 0.0))
        # Megatron-LM interleaves equal chunks, and micro-batches in groups of as many as stages.
        chunks = self.layouts["pp"] * self.layouts["vpp"]
        uneven = self.sizes[0].blocks % chunks != 0
        uneven |= self.layouts["micro_batches"] % self.layouts["pp"] != 0
        uneven &= self.layouts["vpp"] > 1
        bounds = np.where(uneven, np.inf, self.space.layout_bounds(times, limit))
        order = np.argsort(bounds, kind="stable")
        found = np.full((2, len(order)), np.inf)  # seconds and bytes
        for begin in range(0, len(order), _EVEN_AT_ONCE):
            wave = order[begin : begin + _EVEN_AT_ONCE]
            if np.isinf(bounds[wave[0]]) or bounds[wave[0]] > found[0].min():
                break
            wave.sort()
            variants = np.full(len(wave), -1, dtype=np.int32)
            estimates = self.estimate_even(times, wave, variants, limit_bytes, threads=threads)
            fits = (estimates["status"] == 0) & np.isfinite(bounds[wave])
            found[0, wave[fits]] = estimates["time_s"][fits]
            found[1, wave[fits]] = estimates["memory_bytes"][fits]
        best = int(np.argmin(found[0]))
        if np.isinf(found[0, best]):
            return []
        _, cuts, variants = self.space.even_partition(times, best, -1, limit_bytes)
        borders = (tuple(cuts.tolist()), tuple(variants.tolist()))
        time_s, memory = found[:, best].tolist()
        return [Placed(time_s, memory, best, *borders)]

    # ---- plans in full ----

    def plan(
        self,
        placed: Placed,
        times: KindTimes,
        row: int | None = None,
        limit: int = 0,
        peak_flops: float = 0.0,
        free: Sequence[KindTimes] | None = None,
    ) -> Plan:
        """Describe a plan in full.

        Parameters
        ----------
        placed
            The plan as the kernel gave it.
        times
            One row per strategy; where `row` is given, one row per chip for the plan's strategy.
        row
            Which row of `times`.
        limit
            Position of the memory limit that the plan was placed under.
        peak_flops
            FLOP/s of one device, for MFU; by default that of the evaluator's own chip.
        free
            Times by level of `free_times`; by default those on the evaluator's own chip.
        """
        sizes = self.sizes[int(self.layouts[placed.layout]["strategy"])]
        at = int(self.layouts[placed.layout]["strategy"]) if row is None else row
        own = times if row is None else times.at(slice(at, at + 1))
        if free is None and self.cluster.chip is not None:
            free = free_times_on_chip([sizes], self.cluster, self.optimizer)
        limit_bytes = float(self.limits_bytes[limit])
        estimate, stages = self.space.estimate(
            own, placed.layout, *placed.arrays, ANY_LIMIT_BYTES, free or ()
        )
        plan = self._described(
            placed,
            estimate[0],
            self._stages(placed, stages),
            proven=bool(times.proven[at]),
            limit_bytes=limit_bytes,
            peak_flops=peak_flops or self._peak,
        )
        return replace(plan, interval_s=plan_interval_s(plan, self.cluster))

    def _stages(self, placed: Placed, estimates: Array) -> tuple[Stage, ...]:
        """Describe the stages of a plan, first to last, from the kernel's estimates of them."""
        layout = self.layouts[placed.layout]
        sizes, count = self.sizes[int(layout["strategy"])], int(layout["pp"])
        graph, vpp = sizes.graph, int(layout["vpp"])
        loads, memory = estimates["load_s"].tolist(), estimates["memory"].tolist()
        instants = estimates["instant"].tolist()
        chain = _core.pipeline_chain(int(layout["schedule"]), count, vpp).tolist()
        stages = []
        for k in range(count):
            chunks = chain[k * vpp : (k + 1) * vpp]
            runs = [range(placed.cuts[c], placed.cuts[c + 1]) for c in chunks]
            layers = [i for run in runs for i in run]
            kinds = Counter(graph.layers[graph.order[i]].kind for i in layers)
            terms = FrozenDict(zip(TERMS, memory[k], strict=True))
            stages.append(
                Stage(
                    layers=tuple(layers),
                    chunks=tuple(len(run) for run in runs),
                    kinds=FrozenDict(dict(kinds)),
                    recompute=recompute_text(placed.variants[k], sizes.variants),
                    load_s=loads[k],
                    memory=terms,
                    instant=INSTANTS[instants[k]],
                    holders=sizes.holders(layers, terms),
                )
            )
        return tuple(stages)

    def _described(
        self,
        placed: Placed,
        estimate: Any,
        stages: tuple[Stage, ...],
        proven: bool,
        limit_bytes: float,
        peak_flops: float,
    ) -> Plan:
        """Build a `Plan` from the kernel's estimate of a plan and its stages."""
        layout, training = self.layouts[placed.layout], self.training
        sizes = self.sizes[int(layout["strategy"])]
        strategy, model = sizes.strategy, sizes.graph.model
        rounds, replicas = int(layout["micro_batches"]), int(layout["dp"])
        schedule = SCHEDULES[int(layout["schedule"])]
        twice = schedule == "dualpipe"  # half of the micro-batches in each direction
        order = sizes.graph.order
        recomputed = sum(
            _recomputed_by_kinds(sizes, code, own.chunks, tuple(order[i] for i in own.layers))
            for code, own in zip(placed.variants, stages, strict=True)
        ) / (1 + twice)
        time_s = float(estimate["time_s"])
        sequences = replicas * rounds * strategy.micro_batch
        speed = step_throughput(
            model,
            sequences,
            time_s,
            self.cluster.devices,
            peak_flops,
            training.seq,
            recomputed_flops=recomputed * sizes.inner * replicas * rounds,
        )
        return Plan(
            **{name: getattr(strategy, name) for name in _OF_STRATEGY},
            pp=int(layout["pp"]),
            dp=replicas,
            expert_imbalance=strategy.with_load(model).expert_imbalance or 1.0,
            zero=int(layout["zero"]),
            shard=int(layout["shard"]) or replicas,
            micro_batches=rounds,
            schedule=schedule,
            vpp=int(layout["vpp"]),
            rank_order=RANK_ORDERS[int(layout["rank_order"])],
            sequence_parallel=training.sequence_parallel,
            seq=training.seq or model.seq,
            optimizer=training.optimizer_name,
            precision=training.precision.reference,
            software=training.software.reference,
            fusion=sizes.fusion,
            reserved_bytes=float(training.reserved_bytes),
            layers_proven=proven,
            time_s=time_s,
            interval_s=(time_s, time_s),
            parts_s=FrozenDict({name: float(estimate["parts"][f"{name}_s"]) for name in PARTS}),
            memory_bytes=float(estimate["memory_bytes"]),
            limit_bytes=limit_bytes,
            energy_j=float(estimate["energy_j"]),
            samples_per_s=sequences / time_s,
            tokens_per_s=speed.tokens_per_s,
            tokens_per_s_per_device=speed.tokens_per_s_per_device,
            tflops_per_device=speed.tflops_per_device,
            mfu=speed.mfu,
            mfu_causal=speed.mfu_causal,
            hfu=speed.hfu,
            stages=stages,
        )

    @cached_property
    def _peak(self) -> float:
        chip = self.cluster.chip
        return 0.0 if chip is None else chip.peak_flops(self.training.precision.format)


@lru_cache(maxsize=512)
def _recomputed_flops(sizes: StrategySizes, mode: str) -> list[float]:
    """Count the FLOPs that one layer of each kind recomputes for a micro-batch on a device.

    Only matrix operators count, and boundary layers do not; attention counts without its mask.
    """
    flops = []
    for layer in sizes.graph.layers:
        graph, names = layer.forward, layer.forward.recomputed(mode)
        counted = _ON_TENSOR_CORES[graph.ops["unit"]]
        counted &= np.array([name in names for name in graph.names], dtype=bool)
        again = np.array([name.endswith(AGAIN) for name in layer.backward.names], dtype=bool)
        block = layer.kind not in BOUNDARY_KINDS
        own = float(graph.ops["flops"][counted].sum())
        flops.append(own + float(layer.backward.ops["flops"][again].sum()) if block else 0.0)
    return flops


@lru_cache(maxsize=1024)  # most stages of a plan are alike
def _recomputed_by_kinds(
    sizes: StrategySizes, code: int, chunks: tuple[int, ...], kinds: tuple[int, ...]
) -> float:
    """Count the FLOPs that a stage with layers of these kinds, in chunks, recomputes."""
    first, rest, count = stage_modes(code, sizes.variants)
    by_mode = [_recomputed_flops(sizes, mode) for mode in (first, rest)]
    blocks = [layer.kind not in BOUNDARY_KINDS for layer in sizes.graph.layers]
    flops, positions = 0.0, iter(kinds)
    for length in chunks:
        number = 0
        for at in islice(positions, length):
            number += blocks[at]
            flops += by_mode[number > count][at]
    return flops
