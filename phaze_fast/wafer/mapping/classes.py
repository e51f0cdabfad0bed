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

from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.mapping.layout import (
    Layout,
    accepts_micro_batch,
    micro_batch_fault,
    replicas_fault,
)
from phaze_fast.wafer.mapping.placement import Placement, places_of
from phaze_fast.wafer.mapping.problem import Problem

Array = np.ndarray[Any, Any]
Pair = tuple[Layout, Layout]


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
    if places_of(wafer, layouts) is None:
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
        self.placement = Placement(problem.wafer, layouts)
        self.mappings = tuple(problem.compiled(self.placement, which) for which in (0, 1))

    # ---- scores ----

    def isolated(self, which: int) -> _core.Mapping:
        """Return the mapping of one class as if the other took no time."""
        self.mappings[which].set_others(0.0, 0.0, 0.0)
        return self.mappings[which]

    def times(self, which: int, outputs: Array | None = None) -> ClassTimes:
        """Return the times of the stages of one class by themselves."""
        mapping = self.isolated(which)
        tail_s = float(mapping.score(outputs)["tail_s"][0]) - self.problem.placed_tail_s(
            self.placement
        )
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
