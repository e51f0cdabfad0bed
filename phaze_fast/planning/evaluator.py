"""The plan evaluator: bounds, times and plans of a model on a cluster.

`PlanEvaluator` is the only caller of the plan kernel: planning, prediction, search, sweeps and
baselines all ask it, so that the same plan has the same figures wherever it is printed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.hardware import Cluster, cluster_record
from phaze_fast.memory import layouts_fit, optimizer
from phaze_fast.models import Model
from phaze_fast.opgraph import Strategy
from phaze_fast.planning.intervals import plan_interval_s
from phaze_fast.planning.layouts import (
    Shape,
    layouts_of,
    node_devices,
    nothing_to_try,
    strategies,
)
from phaze_fast.planning.placed import Placed, placed_plans
from phaze_fast.planning.plans import Plan
from phaze_fast.planning.reading import read_plan, read_stages
from phaze_fast.planning.recompute import recompute_code
from phaze_fast.planning.sizes import StrategySizes, strategy_sizes, training_record
from phaze_fast.planning.times import KindTimes, free_times_on_chip, times_on_chip
from phaze_fast.planning.training import Training, recompute_modes
from phaze_fast.schedule import ScheduleCache
from phaze_fast.software import fabric_as_run

__all__ = ["Placed", "PlanEvaluator"]

Array = np.ndarray[Any, Any]

_APART = "tied, uncut: no partition that fits keeps these layers together"
_NO_DEAL = "memory: no deal of the layers to the chunks of the schedule fits"


class PlanEvaluator:
    """The strategies and layouts of a model on a cluster, and the kernel over them.

    Parameters
    ----------
    model, cluster, training
        The problem; the cluster's chip is of no account.
    capacities
        Bytes of HBM of a device that will be asked for, rising.
    given
        Strategies and layouts in place of all that `training` allows.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        training: Training,
        capacities: Sequence[float],
        given: tuple[Sequence[StrategySizes], Array] | None = None,
    ) -> None:
        self.model, self.cluster, self.training = model, cluster, training
        self.rejected: Counter[str] = Counter()
        """Why strategies and layouts were left out, and how many."""
        self.strategies_rejected, self.open_s = 0, float("inf")
        self.rooms = np.array(capacities, dtype=np.float64) - float(training.reserved_bytes)
        self.sizes, self.layouts = given if given is not None else self._enumerated()
        self.optimizer = optimizer(training.optimizer)
        self._record = training_record(self.optimizer, training.software, training.precision)

    def for_one_call(self) -> PlanEvaluator:
        """Give an evaluator with counts of its own that shares all that has been worked out."""
        own = copy.copy(self)
        own.rejected = self.rejected.copy()
        return own

    # ---- what there is to try ----

    def _enumerated(self) -> tuple[list[StrategySizes], Array]:
        training, devices = self.training, self.cluster.devices
        modes, node = recompute_modes(training), node_devices(self.cluster)
        sizes: list[StrategySizes] = []
        parts: list[Array] = []
        allowed = list(strategies(self.model, self.cluster, training, self.rejected))
        self.strategies_rejected = sum(self.rejected.values())
        for strategy in allowed:
            first = self._sized(strategy, modes, 0)
            shape = Shape(
                devices=devices,
                inner=first.inner,
                blocks=first.blocks,
                layers=len(first.graph.order),
                ep=strategy.expert_replicas,
                micro_batch=strategy.micro_batch,
                cp=strategy.cp,
                node=node,
            )
            rows = layouts_of(shape, training, self.rejected)
            if not len(rows) and (why := nothing_to_try(shape, training)):
                self.rejected[why] += 1
            for stride, own in _by_expert_stride(first, rows):
                own["strategy"] = len(sizes)
                sizes.append(self._sized(strategy, modes, stride))
                parts.append(own)
        layouts = np.concatenate(parts) if parts else np.zeros(0, dtype=_core.LAYOUT_DTYPE)
        return sizes, layouts

    def _sized(self, strategy: Strategy, modes: tuple[str, ...], stride: int) -> StrategySizes:
        runs = (self.training.software, self.training.precision)
        return strategy_sizes(self.model, strategy, modes, stride, *runs)

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def fits(self) -> Array:
        """Which layouts have some partition that fits, shape (layouts, capacities)."""
        fits = np.zeros((len(self.layouts), len(self.rooms)), dtype=np.uint8)
        if fits.size:
            layouts_fit(
                self.layouts, self._strategies, self._kinds, self._order, self._record[0],
                np.maximum(self.rooms, 0.0), fits,
            )  # fmt: skip
        return fits

    @cached_property
    def layout_counts(self) -> Array:
        """How many layouts each strategy has, shape (strategies,)."""
        counts: Array = np.bincount(self.layouts["strategy"], minlength=len(self))
        return counts

    @cached_property
    def strategy_fits(self) -> Array:
        """Which strategies have a layout that fits, shape (strategies, capacities)."""
        fits: Array = np.zeros((len(self), len(self.rooms)), dtype=bool)
        np.logical_or.at(fits, self.layouts["strategy"], self.fits != 0)
        return fits

    @cached_property
    def _strategies(self) -> Array:
        return np.concatenate([s.record for s in self.sizes])

    @cached_property
    def _kinds(self) -> Array:
        """Sizes of each kind, and of the head with a copy of a tied embedding."""
        kinds: Array = np.stack([np.append(s.kinds, s.kinds[self._order[-1]]) for s in self.sizes])
        kinds["parameters"][:, -1] += self._strategies["copied_parameters"]
        return kinds

    @cached_property
    def _order(self) -> Array:
        return np.array(self.sizes[0].graph.order, dtype=np.int32)

    @cached_property
    def space(self) -> _core.PlanSpace:
        """The kernel's view of all layouts."""
        graph = self.sizes[0].graph
        pairs = [*self.training.tied, *((at - 1, at) for at in self.training.uncut)]
        wired = fabric_as_run(self.cluster.fabric, self.training.software)
        return _core.PlanSpace(
            fabric=cluster_record(wired, self.cluster.devices),
            devices=self.cluster.devices,
            training=self._record,
            kinds=len(graph.layers),
            order=self._order,
            edges=np.array(graph.edges, dtype=np.int32).reshape(-1),
            tied=np.array(pairs, dtype=np.int32).reshape(-1),
            strategies=self._strategies,
            sizes=np.concatenate([s.kinds for s in self.sizes]),
            layouts=self.layouts,
            memory_limits=np.maximum(self.rooms, 0.0),
            fits=self.fits.reshape(-1),
            some_blocks=self.training.recompute_some,
        )

    # ---- plans ----

    def times(
        self, cluster: Cluster, cache: ScheduleCache | None = None, threads: int = 1
    ) -> KindTimes:
        """Cost and schedule all strategies on a cluster's chip, one row each."""
        return times_on_chip(self.sizes, cluster, self.optimizer, cache, threads)

    def top(
        self, times: KindTimes, top: int, room: int = 0, threads: int = 1, stop: Any = None
    ) -> list[Placed]:
        """Give the fastest plans, distinct but for rank order; where `stop` ends it, of some."""
        records, pool, _, empty, self.open_s = self.space.top_plans(times, room, top, threads, stop)
        if empty:
            self.rejected[_APART if self.training.tied or self.training.uncut else _NO_DEAL] = empty
        return placed_plans(records, pool)

    def front(
        self, times: KindTimes, most_s: float = float("inf"), room: int = 0, threads: int = 1
    ) -> list[Placed]:
        """Give layouts' fastest plans that none beats in time and memory, up to `most_s`."""
        return placed_plans(*self.space.front(times, room, most_s, threads)[:2])

    def best(
        self, s: int, times: KindTimes, least: KindTimes, below_s: Array, threads: int = 1
    ) -> list[list[Placed]]:
        """Give the best plan of strategy `s` on each chip with each capacity.

        Parameters
        ----------
        s
            Which strategy.
        times
            Of its layers, one row per chip.
        least
            What is proven of those times.
        below_s
            What a plan may take at most, shape (chips, capacities); minus infinity: not asked.
        threads
            At most this many; the answer does not depend on it.
        """
        limits = np.ascontiguousarray(below_s, dtype=np.float64).reshape(-1)
        placed = placed_plans(*self.space.best(s, times, least, limits, threads))
        count = len(self.rooms)
        return [placed[k : k + count] for k in range(0, len(placed), count)]

    def energies_j(self, placed: Sequence[Placed], times: KindTimes, rows: Sequence[int]) -> Array:
        """Joules of one step by each plan, each on the chip of a row of `times`."""
        pool: list[int] = []
        records: Array = np.zeros(len(placed), dtype=_core.PLACED_DTYPE)
        for record, plan in zip(records, placed, strict=True):
            record["layout"] = plan.layout
            record["cuts_at"], record["cuts"] = len(pool), len(plan.cuts)
            pool += plan.cuts
            record["variants_at"], record["variants"] = len(pool), len(plan.variants)
            pool += plan.variants
        at, borders = np.array(rows, dtype=np.int64), np.array(pool, dtype=np.int32)
        found: Array = self.space.energies(times, at, records, borders)
        return found

    def bounds(self, s: int, least: KindTimes, room: Array, threads: int = 1) -> Array:
        """Lower bounds of strategy `s` on each chip, each with its capacity number `room`."""
        found: Array = self.space.bounds(s, least, room, threads)
        return found

    def work_bounds(self, s: int, work_s: Array, room: Array) -> Array:
        """Lower bounds from the work of one micro-batch alone: quicker, and lower."""
        found: Array = self.space.work_bounds(s, np.ascontiguousarray(work_s), room)
        return found

    def estimate_even(
        self,
        times: KindTimes,
        recompute: Sequence[str],
        modes: Array,
        room_bytes: float,
        free: Sequence[KindTimes] = (),
        threads: int = 1,
    ) -> Array:
        """Estimate the even partition of every layout, dtype ``_core.ESTIMATE_DTYPE``.

        Parameters
        ----------
        times
            One row per strategy.
        recompute
            What layouts may recompute, as `phaze_fast.planning.recompute` writes it.
        modes
            What each layout recomputes, a position in `recompute`; -1: the fastest that fits.
        room_bytes
            Of a device for the model.
        free
            Times by level of what is free, one row per strategy; without them there are no parts.
        threads
            At most this many; the answer does not depend on it.
        """
        table = np.array(
            [[*(recompute_code(m, s.variant_of) for m in recompute), -1] for s in self.sizes]
        )
        variants = table[self.layouts["strategy"], modes].astype(np.int32)
        at = np.arange(len(self.layouts), dtype=np.int64)
        found: Array = self.space.estimate_even(times, at, variants, room_bytes, free, threads)
        return found

    def best_even(self, times: KindTimes, room: int = 0) -> list[Placed]:
        """Give the fastest plan with even stages that fits, if there is one: Megatron-LM's kind.

        With several ways to recompute, each stage has the least that fits.
        """
        room_bytes = float(max(self.rooms[room], 0.0))
        at = np.arange(len(self.layouts), dtype=np.int64)
        free = np.full(len(at), -1, dtype=np.int32)
        found = self.space.estimate_even(times, at, free, room_bytes, (), 1)
        # Megatron-LM interleaves equal chunks, and micro-batches in groups of as many as stages.
        chunks = self.layouts["pp"] * self.layouts["vpp"]
        uneven = (self.sizes[0].blocks % chunks != 0) if len(at) else np.zeros(0, dtype=bool)
        uneven |= self.layouts["micro_batches"] % self.layouts["pp"] != 0
        uneven &= self.layouts["vpp"] > 1
        seconds = np.where((found["status"] == 0) & ~uneven, found["time_s"], np.inf)
        if not len(seconds) or not np.isfinite(seconds.min()):
            return []
        best = int(np.argmin(seconds))
        _, cuts, variants = self.space.even_partition(times, best, -1, room_bytes)
        memory = float(found["memory_bytes"][best])
        borders = (tuple(cuts.tolist()), tuple(variants.tolist()))
        return [Placed(float(seconds[best]), memory, best, *borders)]

    # ---- words and numbers ----

    def plan(
        self,
        placed: Placed,
        times: KindTimes,
        row: int | None = None,
        room: int = 0,
        peak_flops: float = 0.0,
        free: Sequence[KindTimes] | None = None,
    ) -> Plan:
        """Give a plan in full.

        Parameters
        ----------
        placed
            What the kernel found.
        times
            One row per strategy, or, where `row` is given, that row's of the plan's strategy.
        row
            Which row of `times`.
        room
            Which capacity it was placed in.
        peak_flops
            FLOP/s of one device, for MFU; by default of the evaluator's own chip.
        free
            Times by level of what is free, one row each (`free_times`); by default on the
            evaluator's own chip.
        """
        layout = self.layouts[placed.layout]
        s = int(layout["strategy"])
        at = s if row is None else row
        own = times.at(slice(at, at + 1))
        if free is None and self.cluster.chip is not None:
            free = free_times_on_chip([self.sizes[s]], self.cluster, self.optimizer)
        cuts = np.array(placed.cuts, dtype=np.int32)
        variants = np.array(placed.variants, dtype=np.int32)
        room_bytes = float(max(self.rooms[room], 0.0))
        estimate, stages = self.space.estimate(
            own, placed.layout, cuts, variants, room_bytes, free or ()
        )
        listed = read_stages(self.sizes[s], layout, placed.cuts, placed.variants, stages)
        plan = read_plan(
            self.sizes[s],
            layout,
            (estimate[0], listed),
            proven=bool(own.proven[0]),
            limit_bytes=float(self.rooms[room]),
            training=self.training,
            devices=self.cluster.devices,
            peak_flops=peak_flops or self._peak,
        )
        return replace(plan, interval_s=plan_interval_s(plan, self.cluster))

    @cached_property
    def _peak(self) -> float:
        chip = self.cluster.chip
        return 0.0 if chip is None else chip.peak_flops(self.training.precision.format)


def _by_expert_stride(sizes: StrategySizes, rows: Array) -> list[tuple[int, Array]]:
    """Layouts by how far apart the replicas of an expert-parallel group lie."""
    if sizes.strategy.ep == 1:
        return [(0, rows)]
    near = sizes.inner
    strides = np.where(rows["rank_order"] == 1, near * rows["pp"], near)
    return [(int(stride), rows[strides == stride]) for stride in np.unique(strides)]
