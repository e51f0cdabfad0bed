"""Two classes of stages in one pipeline, each with a shape and operator mappings of its own.

The stages of the first class come first. The kernel for stages of one shape evaluates each class,
given the number of stages before and after and the time they take; one formula gives the step. At
the border between the classes every die of one sends an equal share to every die of the other, and
the receiving dies redistribute it into the split that their operators require; the gradient
returns in the same manner. Streams of one class over the links of the other are charged to
both.

On several wafers, a pipeline's stages follow one another from wafer to wafer, over the wafers' I/O.
With switches, classes differ only in the number of dies per stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.mapping.layout import (
    Layout,
    accepts_micro_batch,
    links_of,
    micro_batch_fault,
    placed_boundaries,
    replicas_fault,
    whole_runs,
)
from phaze_fast.wafer.mapping.mesh import Links, mesh_collective
from phaze_fast.wafer.mapping.packing import ClassPlaces, class_places
from phaze_fast.wafer.mapping.problem import Problem
from phaze_fast.wafer.mapping.streams import cross_stage_link_s, stream_link_s_of, stream_shares

Array = np.ndarray[Any, Any]
Pair = tuple[Layout, Layout]


def places_of(problem: Problem, layouts: Pair) -> tuple[ClassPlaces, ...] | None:
    """Dies of the stages of both classes; None where they do not fit."""
    first, second = ((layout.width, layout.height, layout.stages) for layout in layouts)
    wafers = problem.wafer.wafer_count // layouts[0].replicas
    return class_places(problem.wafer, (first, second), wafers)


def accepts_classes(problem: Problem) -> bool:
    """Whether a pipeline of the problem may have two classes of stages."""
    work = problem.work
    return not (work.encodes or problem.linear or problem.volume) and work.blocks > 1


def classes_fault(problem: Problem, layouts: Pair) -> str:
    """Return why a pipeline cannot have two such classes of stages; empty where it can.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dojo-tile-like")
    >>> pair = Layout(5, 3, 1, 16, blocks=(14,)), Layout(5, 3, 1, 16, blocks=(10,))
    >>> classes_fault(problem, pair)
    'rectangle: 1 of 5 x 3 and 1 of 5 x 3 dies have no place together on dojo-tile-like'
    """
    first, second = layouts
    wafer, work = problem.wafer, problem.work
    if not accepts_classes(problem):
        return (
            "class: two are not accepted in rank order, for one block or for an encoder-decoder; "
            "expected one"
        )
    for layout in layouts:
        if fault := _stages_fault(layout):
            return fault
        if fault := replicas_fault(wafer, problem.training.global_batch, layout.replicas):
            return fault
        if not accepts_micro_batch(problem.training.global_batch, layout):
            return micro_batch_fault(problem.training.global_batch, layout)
    for name in ("micro_batch", "replicas"):
        wanted, other = getattr(first, name), getattr(second, name)
        if wanted != other:
            return f"{name}: {other} is not accepted; expected {wanted}, as of the first class"
    block_count = sum(first.blocks) + sum(second.blocks)
    if block_count != work.blocks:
        return f"blocks: {block_count} in all are not accepted; expected {work.blocks}"
    if places_of(problem, layouts) is None:
        shapes = " and ".join(
            f"{layout.stages} of {layout.width} x {layout.height}" for layout in layouts
        )
        wafers = wafer.wafer_count // first.replicas
        where = wafer.name if wafers == 1 else f"{wafers} {wafer.name}, each with a stage"
        return f"rectangle: {shapes} dies have no place together on {where}"
    return ""


def _stages_fault(layout: Layout) -> str:
    """Return why a class cannot have such stages; empty where it can."""
    if layout.schedule != "1f1b" or layout.chunks != 1:
        return "schedule: with two classes of stages only 1f1b is accepted"
    if len(layout.blocks) != layout.stages or min(layout.blocks, default=0) < 1:
        return (
            f"blocks: {list(layout.blocks)} is not accepted; expected at least 1 for each of "
            f"{layout.stages} stages of the class"
        )
    return ""


@dataclass(frozen=True)
class ClassTimes:
    """Times of the stages of one class, without delays by streams of the other class."""

    sum_s: float
    slowest_s: float
    tail_s: float
    streams: Array
    """Seconds of each stage, and bytes that each of its dies receives and sends: records of
    `MAP_STREAMS_DTYPE`."""


class Classes:
    """Two classes of stages of a problem, compiled.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        The first and the second class: `stages` and `blocks` count those of the class.

    Raises
    ------
    InvalidInputError
        If they do not fit on the wafer, or an operator cannot be split over that many dies.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dojo-tile-like")
    >>> pair = Layout(5, 3, 1, 16, blocks=(15,)), Layout(5, 2, 1, 16, blocks=(9,))
    >>> score = Classes(problem, pair).score()
    >>> 0.0 < score["time_s"] < 10.0
    True
    """

    def __init__(self, problem: Problem, layouts: Pair) -> None:
        if fault := classes_fault(problem, layouts):
            raise InvalidInputError(fault)
        self.problem, self.layouts = problem, layouts
        placed = places_of(problem, layouts)
        assert placed is not None  # classes_fault found no fault
        self.places = placed
        self.mappings = (self._compiled(0), self._compiled(1))

    # ---- links, boundaries and rules ----

    @cached_property
    def dies(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Dies of every stage, first class first."""
        return tuple(dies for place in self.places for dies in place.stages)

    @cached_property
    def wafers(self) -> tuple[int, ...]:
        """Index of the wafer of each stage."""
        return tuple(number for place in self.places for number in place.wafers)

    @cached_property
    def by_wafer(self) -> tuple[slice, ...]:
        """Stages on each wafer of a pipeline."""
        starts = [self.wafers.index(number) for number in dict.fromkeys(self.wafers)]
        return tuple(map(slice, starts, [*starts[1:], len(self.wafers)]))

    def links(self, which: int) -> Links:
        """Links between neighbouring dies of a stage of one class."""
        wafer, hops = self.problem.wafer, self.places[which].hops
        if wafer.switch is not None:
            return links_of(wafer, self.layouts[which])
        x, y = wafer.link_bytes_per_s
        if not hops:
            return Links(x, y, wafer.hop_latency_s)
        return Links(min(x, y), min(x, y), wafer.hop_latency_s * hops)

    @cached_property
    def boundary_s(self) -> tuple[float, ...]:
        """Seconds per byte that each stage takes to send tensors and gradients.

        A stage at the border of its class also exchanges what it receives from the other class.
        """
        size = self.problem.work.boundary_bytes * self.layouts[0].micro_batch
        border = self.layouts[0].stages - 1
        seconds = []
        for k, (rate, fixed) in enumerate(self.sends()):
            exchange_s = self._exchange_s(k - border) if k in (border, border + 1) else 0.0
            seconds.append(rate + (fixed + exchange_s) / size)
        return tuple(seconds)

    def sends(self) -> list[tuple[float, float]]:
        """Seconds per byte, and fixed seconds, that each stage takes to send to its neighbours.

        The first and the last stage on a wafer also send over its I/O to the next wafer.
        """
        wafer, border = self.problem.wafer, self.layouts[0].stages - 1
        sends: list[tuple[float, float]] = []
        for stages in self.by_wafer:
            sends += placed_boundaries(wafer, self.dies[stages], border - stages.start)
        for k in range(len(self.dies) - 1):
            if self.wafers[k] != self.wafers[k + 1]:
                assert wafer.io is not None  # several wafers require io
                for end in (k, k + 1):
                    rate_s, fixed_s = sends[end]
                    rate_s += 1.0 / wafer.io.bandwidth_bytes_per_s
                    sends[end] = (rate_s, fixed_s + wafer.io.latency_s)
        return sends

    def _exchange_s(self, which: int) -> float:
        """Seconds that the dies of a stage take to redistribute the tensor that enters it."""
        layout = self.layouts[which]
        size = self.problem.work.boundary_bytes * layout.micro_batch / layout.dies
        runs = whole_runs(layout.width, layout.height)
        return mesh_collective("all-to-all", size, runs, self.links(which)).time_s

    def _rules(self, which: int) -> Array:
        problem, (first, second) = self.problem, self.layouts
        blocks = first.blocks + second.blocks
        depth = len(self.by_wafer)  # one stage on each wafer
        rules = problem.rules(replace(self.layouts[which], stages=depth, blocks=()))
        counts = [sum(blocks[stages]) for stages in self.by_wafer]
        self.outer_tail_s = problem.replica_sums_s(first.replicas, counts)
        rules["outer_tail_s"] = self.outer_tail_s
        links = self.links(which)
        rules["x_bytes_per_s"], rules["y_bytes_per_s"] = links.x_bytes_per_s, links.y_bytes_per_s
        rules["hop_s"] = links.hop_s
        rules["first_stage"] = first.stages if which else 0
        rules["pipeline_stages"] = first.stages + second.stages
        if problem.stream is None:
            return rules
        used = [tuple(die for dies in self.dies[some] for die in dies) for some in self.by_wafer]
        link_s = zip(*(stream_link_s_of(problem.wafer, dies) for dies in used), strict=True)
        into_s, both_s = map(max, link_s)
        # The wafer of the class with most dies in use decides.
        most = max(len(used[number]) for number in self.places[which].wafers)
        shares = stream_shares(problem.wafer, problem.stream, most, (into_s, both_s))
        for name, value in shares.items():
            rules[name] = value
        return rules

    def _compiled(self, which: int) -> _core.Mapping:
        layout, border = self.layouts[which], self.layouts[0].stages
        boundary = self.boundary_s[border:] if which else self.boundary_s[:border]
        boundary_s = np.array(boundary)
        return self.problem.compiled(layout, self._rules(which), boundary_s, self.cross_stage_s)

    @cached_property
    def cross_stage_s(self) -> Array | None:
        """Return `cross_stage_link_s` of all stages; zero between stages on different wafers."""
        problem, stages = self.problem, len(self.dies)
        if problem.stream is None or problem.wafer.switch is not None:
            return None
        seconds = np.zeros((stages, stages, 2))
        for here in self.by_wafer:
            placed = self.dies[here]
            own = cross_stage_link_s(problem.wafer, placed, len(placed))
            if own is None:
                return None
            seconds[here, here] = own
        return seconds

    # ---- scores ----

    def isolated(self, which: int) -> _core.Mapping:
        """Return the mapping of one class as if the other took no time."""
        self.mappings[which].set_others(0.0, 0.0, 0.0)
        return self.mappings[which]

    def times(self, which: int, outputs: Array | None = None) -> ClassTimes:
        """Return the times of the stages of one class by themselves."""
        mapping = self.isolated(which)
        tail_s = float(mapping.score(outputs)["tail_s"][0]) - self.outer_tail_s
        streams = np.ascontiguousarray(mapping.stages(outputs)[0]["streams"])
        loads = [float(load) for load in streams["isolated_s"]]
        total = 0.0
        for load in loads:
            total += load
        return ClassTimes(total, max(loads), tail_s, streams)

    def given_other(self, which: int, outputs: Array | None = None) -> _core.Mapping:
        """Return the mapping of one class, given the times of the other at its current mapping."""
        other = self.times(1 - which, outputs)
        self.mappings[which].set_others(other.sum_s, other.slowest_s, other.tail_s, other.streams)
        return self.mappings[which]

    def score(self, outputs: tuple[Array | None, Array | None] = (None, None)) -> dict[str, float]:
        """Time and memory of the whole pipeline."""
        first = self.isolated(0).score(outputs[0])[0]
        second = self.given_other(1, outputs[0]).score(outputs[1])[0]
        names = ("memory_bytes", "over_bytes", "stream_bytes", "stream_over_bytes")
        worst = {name: max(float(first[name]), float(second[name])) for name in names}
        return {"time_s": float(second["time_s"]), "tail_s": float(second["tail_s"]), **worst}
