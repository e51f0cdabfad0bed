"""Takes a model, a cluster and a training step, gives bounds, times and plans by the plan kernel.

`PlanEvaluator` is the only caller of that kernel: planning, prediction, search, sweeps and baselines
all ask it, so that the same plan has the same figures wherever it is printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.hardware import Cluster, cluster_record
from phaze_fast.memory import SCHEDULES, TERMS, layouts_fit, optimizer
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import Strategy
from phaze_fast.placement.layouts import (
    Shape,
    layouts_of,
    node_devices,
    nothing_to_try,
    strategies,
)
from phaze_fast.placement.plan import PARTS, Plan, Stage
from phaze_fast.placement.sizes import StrategySizes, strategy_sizes, training_record
from phaze_fast.placement.times import KindTimes, times_on_chip
from phaze_fast.placement.training import RANK_ORDERS, RECOMPUTE, Training, recompute_modes
from phaze_fast.records import FrozenDict
from phaze_fast.schedule import ScheduleCache

__all__ = ["Placed", "PlanEvaluator", "step_flops"]

Array = np.ndarray[Any, Any]

_TENSOR_UNITS = (0, 2)  # operators on tensor cores, alone or with vector cores


@dataclass(frozen=True)
class Placed:
    """The best plan of a chip under one strategy, as the kernel gives it."""

    time_s: float
    """Infinite where nothing fits, or nothing takes at most what was asked for."""
    memory_bytes: float
    energy_j: float
    layout: int
    """Position among the layouts; -1 where there is none."""
    cuts: tuple[int, ...] = ()
    """Positions at which chunks begin, and the end."""
    variants: tuple[int, ...] = ()
    """Variant of each stage."""


def _placed(records: Array, pool: Array) -> list[Placed]:
    found = []
    for r in records.tolist():
        time_s, memory, energy, layout, cuts_at, cuts, variants_at, variants = r
        found.append(
            Placed(
                time_s,
                memory,
                energy,
                layout,
                tuple(pool[cuts_at : cuts_at + cuts].tolist()),
                tuple(pool[variants_at : variants_at + variants].tolist()),
            )
        )
    return found


def step_flops(sizes: StrategySizes, batch: int) -> tuple[float, float]:
    """FLOPs of the matrix operators of a step: of the model, and of one forward pass of its blocks.

    Causal attention counts half, as it is computed; so no plan exceeds the peak of its chips.
    """

    def of(graph: Any) -> float:
        ops = graph.ops[np.isin(graph.ops["unit"], _TENSOR_UNITS)]
        return float((ops["flops"] * np.where(ops["causal"] != 0, 0.5, 1.0)).sum())

    layers = sizes.graph.layers
    whole = sum(x.count * (of(x.forward) + of(x.backward)) for x in layers)
    again = sum(x.count * of(x.forward) for x in layers if x.kind not in ("embedding", "head"))
    s = sizes.strategy
    factor = s.tensor_parallel * s.context_parallel * batch / s.microbatch
    return whole * factor, again * factor


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
        model: TransformerModel,
        cluster: Cluster,
        training: Training,
        capacities: Sequence[float],
        given: tuple[Sequence[StrategySizes], Array] | None = None,
    ) -> None:
        self.model, self.cluster, self.training = model, cluster, training
        self.rejected: Counter[str] = Counter()
        self.rooms = np.array(capacities, dtype=np.float64) - float(training.reserved_bytes)
        self.sizes, self.layouts = given if given is not None else self._enumerated()
        self._record = training_record(optimizer(training.optimizer))
        self._graph = self.sizes[0].graph if self.sizes else None

    # ---- what there is to try ----

    def _enumerated(self) -> tuple[list[StrategySizes], Array]:
        training, devices = self.training, self.cluster.devices
        modes, node = recompute_modes(training), node_devices(self.cluster)
        sizes: list[StrategySizes] = []
        parts: list[Array] = []
        for strategy in strategies(self.model, self.cluster, training, self.rejected):
            first = strategy_sizes(self.model, strategy, modes)
            shape = Shape(
                devices=devices,
                inner=first.inner,
                blocks=first.blocks,
                expert_parallel=strategy.expert_parallel,
                microbatch=strategy.microbatch,
                context_parallel=strategy.context_parallel,
                node=node,
            )
            rows = layouts_of(shape, training, self.rejected)
            if not len(rows) and (why := nothing_to_try(shape, training)):
                self.rejected[why] += 1
            for stride, own in _by_expert_stride(first, rows):
                own["strategy"] = len(sizes)
                sizes.append(strategy_sizes(self.model, strategy, modes, stride))
                parts.append(own)
        layouts = np.concatenate(parts) if parts else np.zeros(0, dtype=_core.LAYOUT_DTYPE)
        return sizes, layouts

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def fits(self) -> Array:
        """Which layouts have some partition that fits, shape (layouts, capacities)."""
        fits = np.zeros((len(self.layouts), len(self.rooms)), dtype=np.uint8)
        if len(self.layouts):
            layouts_fit(
                self.layouts, self._strategies, self._kinds, self._order, self._record[0],
                np.maximum(self.rooms, 0.0), fits,
            )  # fmt: skip
        return fits

    @cached_property
    def _strategies(self) -> Array:
        return np.concatenate([s.record for s in self.sizes])

    @cached_property
    def _kinds(self) -> Array:
        """Sizes of each kind, and of the head with a copy of a tied embedding."""
        kinds: Array = np.stack([np.append(s.kinds, s.kinds[s.graph.order[-1]]) for s in self.sizes])
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
        return _core.PlanSpace(
            fabric=cluster_record(self.cluster.fabric, self.cluster.devices),
            devices=self.cluster.devices,
            training=self._record,
            kinds=len(graph.layers),
            order=self._order,
            edges=np.array(graph.edges, dtype=np.int32).reshape(-1),
            tied=np.array(pairs, dtype=np.int32).reshape(-1),
            strategies=self._strategies,
            sizes=np.concatenate([s.kinds for s in self.sizes]),
            layouts=self.layouts,
            rooms=np.maximum(self.rooms, 0.0),
            fits=self.fits.reshape(-1),
        )

    # ---- plans ----

    def times(
        self, cluster: Cluster, cache: ScheduleCache | None = None, threads: int = 1
    ) -> KindTimes:
        """Times of all strategies on a cluster's chip, one row each."""
        return times_on_chip(self.sizes, cluster, cache, threads)

    def top(self, times: KindTimes, top: int, room: int = 0, threads: int = 1) -> list[Placed]:
        """Give the fastest plans, distinct but for rank order, and the front; fastest first."""
        records, pool, _ = self.space.top_plans(times, room, top, threads)
        return _placed(records, pool)

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
        placed = _placed(*self.space.best(s, times, least, limits, threads))
        count = len(self.rooms)
        return [placed[k : k + count] for k in range(0, len(placed), count)]

    def bounds(self, s: int, least: KindTimes, room: Array, threads: int = 1) -> Array:
        """Lower bounds of strategy `s` on each chip, each with its capacity number `room`."""
        found: Array = self.space.bounds(s, least, room, threads)
        return found

    def work_bounds(self, s: int, work_s: Array, room: Array) -> Array:
        """Lower bounds from the work of one micro-batch alone: quicker, and lower."""
        found: Array = self.space.work_bounds(s, np.ascontiguousarray(work_s), room)
        return found

    def estimate_even(
        self, times: KindTimes, modes: Array, room_bytes: float, threads: int = 1
    ) -> Array:
        """Estimate the even partition of every layout, dtype ``_core.ESTIMATE_DTYPE``.

        Parameters
        ----------
        times
            One row per strategy.
        modes
            What each layout recomputes, a position in `RECOMPUTE`; -1: as little as fits.
        room_bytes
            Of a device for the model.
        threads
            At most this many; the answer does not depend on it.
        """
        table = np.array([[-1, *(s.variant_of[m] for m in RECOMPUTE)] for s in self.sizes])
        variants = table[self.layouts["strategy"], modes + 1].astype(np.int32)
        at = np.arange(len(self.layouts), dtype=np.int64)
        found: Array = self.space.estimate_even(times, at, variants, room_bytes, threads)
        return found

    # ---- words and numbers ----

    def plan(
        self, placed: Placed, times: KindTimes, row: int | None = None, room: int = 0,
        cluster: Cluster | None = None,
    ) -> Plan:  # fmt: skip
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
        cluster
            With the chip, for its peak; by default the evaluator's own.
        """
        layout = self.layouts[placed.layout]
        s = int(layout["strategy"])
        if row is not None:
            times = _one_of(times, row, s, len(self.sizes))
        cuts = np.array(placed.cuts, dtype=np.int32)
        variants = np.array(placed.variants, dtype=np.int32)
        estimate, stages = self.space.estimate(
            times, placed.layout, cuts, variants, float(max(self.rooms[room], 0.0))
        )
        proven = bool(times.proven[s])
        return self._read(layout, placed, (estimate[0], stages), proven, room, cluster)

    def _read(
        self, layout: Any, placed: Placed, what: tuple[Any, Array], proven: bool, room: int,
        cluster: Cluster | None,
    ) -> Plan:  # fmt: skip
        estimate, stages = what
        sizes = self.sizes[int(layout["strategy"])]
        strategy, batch = sizes.strategy, self.training.global_batch
        time_s = float(estimate["time_s"])
        flops, again = self._flops
        listed = self._stages(layout, placed, stages, sizes)
        blocks = sizes.blocks
        share = sum(
            sum(n for kind, n in x.kinds.items() if kind not in ("embedding", "head"))
            for x in listed
            if x.recompute == "full"
        )
        peak = self._peak(cluster) * time_s
        samples = batch / time_s if time_s > 0 else float("inf")
        return Plan(
            tp=strategy.tensor_parallel,
            pp=int(layout["stages"]),
            dp=int(layout["data_parallel"]),
            cp=strategy.context_parallel,
            ep=strategy.expert_parallel,
            zero=int(layout["zero"]),
            microbatch=strategy.microbatch,
            microbatches=int(layout["microbatches"]),
            schedule=SCHEDULES[int(layout["schedule"])],
            virtual=int(layout["virtual_stages"]),
            rank_order=RANK_ORDERS[int(layout["rank_order"])],
            sequence_parallel=self.training.sequence_parallel,
            seq=self.training.seq or self.model.seq,
            optimizer=self.training.optimizer,
            reserved_bytes=float(self.training.reserved_bytes),
            layers_proven=proven,
            time_s=time_s,
            parts_s=FrozenDict({n: float(estimate["parts"][f"{n}_s"]) for n in PARTS}),
            memory_bytes=float(estimate["memory_bytes"]),
            limit_bytes=float(self.rooms[room]),
            energy_j=float(estimate["energy_j"]),
            samples_per_s=samples,
            tokens_per_s=samples * (self.training.seq or self.model.seq),
            mfu=flops / peak if peak > 0 else 0.0,
            hfu=(flops + again * share / max(blocks, 1)) / peak if peak > 0 else 0.0,
            stages=listed,
        )

    @cached_property
    def _flops(self) -> tuple[float, float]:
        whole = Strategy(seq=self.training.seq)
        return step_flops(strategy_sizes(self.model, whole, ("none",)), self.training.global_batch)

    def _peak(self, cluster: Cluster | None) -> float:
        cluster = cluster or self.cluster
        chip = cluster.chip
        return 0.0 if chip is None else cluster.devices * chip.peak_flops("bf16")

    def _stages(
        self, layout: Any, placed: Placed, stages: Array, sizes: StrategySizes
    ) -> tuple[Stage, ...]:
        count, graph = int(layout["stages"]), sizes.graph
        loads, memory = stages["load_s"].tolist(), stages["memory"].tolist()
        listed = []
        for k in range(count):
            at: list[int] = []
            for c in range(k, len(placed.cuts) - 1, count):
                at.extend(range(placed.cuts[c], placed.cuts[c + 1]))
            kinds: dict[str, int] = {}
            for i in at:
                name = graph.layers[graph.order[i]].kind
                kinds[name] = kinds.get(name, 0) + 1
            listed.append(
                Stage(
                    layers=tuple(at),
                    kinds=FrozenDict(kinds),
                    recompute=sizes.variants[placed.variants[k]],
                    load_s=loads[k],
                    memory=FrozenDict(zip(TERMS, memory[k], strict=True)),
                )
            )
        return tuple(listed)


def _one_of(times: KindTimes, row: int, s: int, count: int) -> KindTimes:
    """Times of strategy `s` alone, as one row among those of all strategies."""
    own = times.at(slice(row, row + 1))
    rows = np.zeros(count, dtype=np.int64)
    return own.at(rows) if count > 1 else own


def _by_expert_stride(sizes: StrategySizes, rows: Array) -> list[tuple[int, Array]]:
    """Layouts by how far apart the replicas of an expert-parallel group lie."""
    if sizes.strategy.expert_parallel == 1:
        return [(0, rows)]
    near = sizes.inner
    strides = np.where(rows["rank_order"] == 1, near * rows["stages"], near)
    return [(int(stride), rows[strides == stride]) for stride in np.unique(strides)]
