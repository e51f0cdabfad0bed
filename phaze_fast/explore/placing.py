"""Takes timed layers and layouts, gives the best plan of each chip and HBM capacity, exactly.

The same questions go to the same kernel as in `placement.plan`, so that both give the same answer
to the last bit; only those are asked that may beat a given time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.steps import Rows
from phaze_fast.explore.timing import Totals
from phaze_fast.placement.interleaved import interleaved
from phaze_fast.placement.layers import KindTimes
from phaze_fast.placement.layouts import Layout
from phaze_fast.placement.problems import SCHEDULES, PipelineProblem
from phaze_fast.placement.sizes import LayerSizes
from phaze_fast.placement.table import LayerTable

__all__ = ["Found", "Frames", "place_chips"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Found:
    """The best plan of one chip under one strategy."""

    time_s: float
    """Infinite where nothing fits, or nothing may beat what was asked for."""
    layout: int
    """Position in the list of layouts; -1 where there is none."""
    stage_of: tuple[int, ...] = ()
    """Stage of each layer."""
    variant_of: tuple[int, ...] = ()
    """Variant of each stage."""


NOTHING = Found(float("inf"), -1)


class Frames:
    """The layouts of a strategy as the kernel reads them, but for times."""

    def __init__(self, sizes: LayerSizes, layouts: list[Layout], ties: Any) -> None:
        self.sizes, self.layouts = sizes, layouts
        edges = np.array(sizes.graph.edges, dtype=np.int32).reshape(-1, 2)
        tied = np.array(ties, dtype=np.int32).reshape(-1, 2)
        self._ends = (edges[:, 0].copy(), edges[:, 1].copy())
        self._tied = (tied[:, 0].copy(), tied[:, 1].copy())
        self._ties = ties
        self._wide = np.ones(len(sizes.order), dtype=np.uint8)
        self._edge_bytes = np.full(len(edges), float(sizes.message_bytes))

    def columns(self, number: int, kinds: KindTimes, chip: int, rate: float) -> tuple[Array, ...]:
        """One layout on one chip."""
        layout, order = self.layouts[number], self.sizes.order
        frame = self.sizes.frame(layout.groups, layout.zero, layout.stages[1] > 1)
        forward = kinds.forward_s[chip][order]
        backward = kinds.backward_s[chip][:, order]
        forward = np.broadcast_to(forward, backward.shape)
        return (
            np.ascontiguousarray(frame.forward_s(forward)).reshape(-1),
            np.ascontiguousarray(frame.backward_s(backward)).reshape(-1),
            frame.stash_bytes.reshape(-1),
            frame.live_bytes.reshape(-1),
            frame.resident_bytes,
            frame.once_bytes,
            frame.gather_bytes,
            frame.sync_s,
            frame.step_s(rate),
            kinds.weight_grad_s[chip][order],
            self._wide,
            *self._ends,
            np.full(len(self._edge_bytes), frame.edge_s),
            self._edge_bytes,
            *self._tied,
        )

    def table(self, columns: tuple[Array, ...]) -> LayerTable:
        """Give the same as a checked table, for what is not in the kernel."""
        sizes = self.sizes
        shape = (len(sizes.variants), len(sizes.order))
        names = ("forward_s", "backward_s", "stash_bytes", "live_bytes")
        by_variant = {n: c.reshape(shape) for n, c in zip(names, columns[:4], strict=True)}
        return LayerTable(
            names=[sizes.graph.layers[k].kind for k in sizes.order],
            variants=sizes.variants,
            **by_variant,
            resident_bytes=columns[4],
            once_bytes=columns[5],
            gather_bytes=columns[6],
            sync_s=columns[7],
            step_s=columns[8],
            weight_grad_s=columns[9],
            edges=sizes.graph.edges,
            edge_s=columns[13],
            edge_bytes=columns[14],
            tied=self._ties,
        )


@dataclass(frozen=True)
class _Asked:
    chip: int
    capacity: int
    layout: int
    memory_bytes: float
    bound_s: float


def _worth(
    rows: list[Rows], totals: Totals, rate: Array, room: Array, below_s: Array
) -> tuple[list[_Asked], list[_Asked]]:
    """Which layouts may be as fast as `below_s`, shape (chips, capacities): the first, the rest."""
    first: list[_Asked] = []
    rest: list[_Asked] = []
    for c, own in enumerate(rows):
        wanted = np.flatnonzero(below_s[:, c] > -np.inf) if len(own) else ()
        for chip in wanted:
            one = slice(chip, chip + 1)
            bounds = own.each(totals.at(one), rate[one])
            near = np.flatnonzero(bounds <= below_s[chip, c])
            least: dict[int, float] = {}
            for number, bound in zip(own.layout[near].tolist(), bounds[near].tolist(), strict=True):
                least[number] = min(bound, least.get(number, np.inf))
            best = min(least, key=lambda number: least[number], default=-1)
            for number, bound in least.items():
                asked = _Asked(int(chip), c, number, float(room[c]), bound)
                (first if number == best else rest).append(asked)
    return first, rest


def place_chips(
    frames: Frames,
    rows: list[Rows],
    times: tuple[KindTimes, Totals],
    rate: Array,
    room: Array,
    below_s: Array,
    threads: int = 1,
) -> list[list[Found]]:
    """Place the layers of a strategy on chips.

    Parameters
    ----------
    frames
        The layouts.
    rows
        Their bounds, for each capacity.
    times
        Of the layers on each chip, and what they add up to at least.
    rate
        Bytes per second of each chip's HBM.
    room
        Bytes for the model with each capacity.
    below_s
        What a plan may take at most to be of interest, shape (chips, capacities); minus infinity:
        none is.
    threads
        At most this many; the answer does not depend on it.

    Returns
    -------
    list of list of Found
        For each chip and capacity the fastest plan, ties to the first layout, where it takes at
        most `below_s`; else either nothing or a plan that takes longer.
    """
    kinds, totals = times
    found = [[NOTHING] * len(room) for _ in range(len(rate))]
    first, rest = _worth(rows, totals, rate, room, below_s)
    _ask(frames, kinds, rate, first, threads, found)
    # What is found first leaves little of the rest to ask.
    rest = [q for q in rest if q.bound_s <= found[q.chip][q.capacity].time_s]
    _ask(frames, kinds, rate, rest, threads, found)
    return found


def _ask(
    frames: Frames,
    kinds: KindTimes,
    rate: Array,
    asked: list[_Asked],
    threads: int,
    found: list[list[Found]],
) -> None:
    """Put questions to the kernel, and note answers that are better."""
    for q, answer in zip(asked, _solve(frames, kinds, rate, asked, threads), strict=True):
        old = found[q.chip][q.capacity]
        if (answer.time_s, answer.layout) < (old.time_s, old.layout) and answer.layout >= 0:
            found[q.chip][q.capacity] = answer


def _solve(
    frames: Frames, kinds: KindTimes, rate: Array, asked: list[_Asked], threads: int
) -> list[Found]:
    sizes = frames.sizes
    answers = [NOTHING] * len(asked)
    kernel: list[tuple[int, tuple[Array, ...]]] = []
    made: dict[tuple[int, int], tuple[Array, ...]] = {}
    for k, q in enumerate(asked):
        key = (q.chip, q.layout)
        if key not in made:
            made[key] = frames.columns(q.layout, kinds, q.chip, float(rate[q.chip]))
        if frames.layouts[q.layout].schedule == "interleaved":
            answers[k] = _even(frames, q, made[key])
        else:
            kernel.append((k, made[key]))
    if not kernel:
        return answers
    layouts = [frames.layouts[asked[k].layout] for k, _ in kernel]
    plans = _core.place_pipeline(
        [columns for _, columns in kernel],
        np.array([asked[k].memory_bytes - sizes.gathered_bytes for k, _ in kernel]),
        np.full(len(kernel), sizes.piped_bytes),
        np.array([sizes.bucket_s(x.groups) for x in layouts]),
        np.array([x.microbatches for x in layouts], dtype=np.int64),
        np.array([x.stages[0] for x in layouts], dtype=np.int32),
        np.array([min(x.stages[1], len(sizes.order) + 1) for x in layouts], dtype=np.int32),
        np.array([SCHEDULES.index(x.schedule) for x in layouts], dtype=np.int32),
        True,
        threads,
    )
    for (k, _), (status, made_plans) in zip(kernel, plans, strict=True):
        if status:
            raise InvalidInputError(f"layers: {_core.STATUS_SENTENCES[status]}")
        for plan in made_plans:
            if plan[0] < answers[k].time_s:
                stages, variants = tuple(plan[6].tolist()), tuple(plan[7].tolist())
                answers[k] = Found(plan[0], asked[k].layout, stages, variants)
    return answers


def _even(frames: Frames, q: _Asked, columns: tuple[Array, ...]) -> Found:
    """Evaluate the interleaved plan, of which there is one."""
    sizes, layout = frames.sizes, frames.layouts[q.layout]
    problem = PipelineProblem(
        table=frames.table(columns),
        memory_bytes=q.memory_bytes - sizes.gathered_bytes,
        microbatches=layout.microbatches,
        stages=layout.stages,
        piped_bytes=sizes.piped_bytes,
        bucket_s=sizes.bucket_s(layout.groups),
    )
    made = interleaved(problem, layout.groups.stages, layout.virtual)
    if made is None:
        return NOTHING
    stage_of = [0] * len(sizes.order)
    for stage, layers in enumerate(made.stages):
        for layer in layers:
            stage_of[layer] = stage
    variants = tuple(sizes.variants.index(name) for name in made.variants)
    return Found(made.time_s, q.layout, tuple(stage_of), variants)
