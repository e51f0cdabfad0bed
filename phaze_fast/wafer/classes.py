"""Two classes of stages in one pipeline, each with a shape and operator mappings of its own.

The stages of the first class come first. Each class is evaluated by the kernel that evaluates
stages of one shape, which knows how many stages come before and behind, and what those take: the
step is put together by one formula. What passes from one class to the other is sent by every die of
the one to every die of the other alike, and then exchanged among the dies that receive it, so that
it lies there as their operators want it; the gradient goes back in the same way.
What the stages of one class stream past the links of the other is charged both ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.class_places import ClassPlaces, class_places
from phaze_fast.wafer.compiled import compiled_mapping
from phaze_fast.wafer.layout import (
    Layout,
    accepts_microbatch,
    microbatch_fault,
    placed_boundaries,
    slots_of,
)
from phaze_fast.wafer.mesh import Links, mesh_collective
from phaze_fast.wafer.problem import Problem
from phaze_fast.wafer.streams import foreign_link_s, stream_link_s_of, stream_shares

__all__ = ["Classes", "Pair", "accepts_classes", "classes_fault", "places_of", "shares_blocks"]

Array = np.ndarray[Any, Any]
Pair = tuple[Layout, Layout]


def places_of(problem: Problem, layouts: Pair) -> tuple[ClassPlaces, ...] | None:
    """Where the stages of both classes stand; None where they have no place."""
    first, second = ((each.width, each.height, each.stages) for each in layouts)
    return class_places(problem.wafer, (first, second))


def accepts_classes(problem: Problem) -> bool:
    """Whether pipelines of a problem may have two classes of stages."""
    wafer, work = problem.wafer, problem.work
    alone = wafer.joined == 1 and wafer.switch is None
    return alone and not (work.encodes or problem.linear or problem.volume) and work.blocks > 1


def classes_fault(problem: Problem, layouts: Pair) -> str:
    """Say why a pipeline cannot have two such classes of stages; empty where it can.

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
            "class: two are not accepted on joined wafers, behind switches, in rank order, for one "
            "block or for an encoder-decoder; expected one"
        )
    shared = shares_blocks(layouts)
    for each in layouts:
        if fault := _group_fault(work.blocks, each) if shared else _stages_fault(each):
            return fault
        if not accepts_microbatch(problem.training.global_batch, each):
            return microbatch_fault(problem.training.global_batch, each)
    if first.microbatch != second.microbatch:
        return f"microbatch: {second.microbatch} is not accepted; expected {first.microbatch}"
    given = sum(first.blocks) + sum(second.blocks)
    if not shared and given != work.blocks:
        return f"blocks: {given} in all are not accepted; expected {work.blocks}"
    if places_of(problem, layouts) is None:
        shapes = " and ".join(f"{each.stages} of {each.width} x {each.height}" for each in layouts)
        return f"rectangle: {shapes} dies have no place together on {wafer.name}"
    return ""


def shares_blocks(layouts: Pair) -> bool:
    """Whether two groups of dies share every block: what the interleaved schedule says of two."""
    return any(each.schedule == "interleaved" for each in layouts)


def _stages_fault(layout: Layout) -> str:
    """Say why a class cannot have such stages."""
    if layout.schedule != "1f1b" or layout.chunks != 1 or layout.replicas != 1:
        return (
            "schedule: with two classes of stages only 1f1b is accepted, or interleaved where two "
            "groups of dies share every block; without replicas"
        )
    if len(layout.blocks) != layout.stages or min(layout.blocks, default=0) < 1:
        return (
            f"blocks: {list(layout.blocks)} is not accepted; expected at least 1 for each of "
            f"{layout.stages} stages of the class"
        )
    return ""


def _group_fault(blocks: int, layout: Layout) -> str:
    """Say why a group cannot have its operators of every block."""
    expected: dict[str, Any] = {
        "stages": 1,
        "schedule": "interleaved",
        "chunks": blocks,
        "replicas": 1,
        "blocks": (blocks,),
    }
    for name, value in expected.items():
        given = getattr(layout, name)
        if given != value:
            said, wanted = (list(v) if name == "blocks" else v for v in (given, value))
            return (
                f"{name}: {said!r} is not accepted where two groups of dies share every block; "
                f"expected {wanted!r}"
            )
    return ""


@dataclass(frozen=True)
class ClassTimes:
    """What the stages of one class take, without what they wait for others' streams."""

    sum_s: float
    slowest_s: float
    tail_s: float
    streams: Array
    """Seconds of each stage, and bytes that each of its dies takes and gives; shape (stages, 3)."""


class Classes:
    """Two classes of stages of a problem, compiled.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Of the first and of the second class: `stages` and `blocks` are those of the class.

    Raises
    ------
    InvalidInputError
        Where they have no place, or some operator cannot be split over so many dies.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dojo-tile-like")
    >>> pair = Layout(5, 3, 1, 16, blocks=(15,)), Layout(5, 2, 1, 16, blocks=(9,))
    >>> score = Classes(problem, pair).score()
    >>> 0.0 < score["time_s"] < 10.0
    True
    """

    shares_blocks = False
    """Whether each has a part of every block, and not all of some."""

    def __init__(self, problem: Problem, layouts: Pair) -> None:
        if shares_blocks(layouts) != self.shares_blocks:
            expected = "interleaved" if self.shares_blocks else "1f1b"
            raise InvalidInputError(
                f"schedule: {layouts[0].schedule!r} and {layouts[1].schedule!r} are not accepted "
                f"for two such classes; expected {expected}"
            )
        if fault := classes_fault(problem, layouts):
            raise InvalidInputError(fault)
        self.problem, self.layouts = problem, layouts
        placed = places_of(problem, layouts)
        assert placed is not None  # no fault
        self.places = placed
        self.mappings = (self._compiled(0), self._compiled(1))

    def part(self, which: int) -> Problem:
        """Return the problem of one class: it has the operators of that class."""
        del which
        return self.problem

    @property
    def crossings(self) -> int:
        """Tensors that a class sends the other one for one micro-batch."""
        return 1

    def own_mappings(self, which: int, op_mappings: Array) -> Array:
        """Take the operators of one class out of mappings for all."""
        del which
        return op_mappings

    # ---- what a class is priced with ----

    @cached_property
    def dies(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Dies of every stage, those of the first class first."""
        return tuple(dies for place in self.places for dies in place.stages)

    def links(self, which: int) -> Links:
        """Links between neighbouring dies of a stage of one class."""
        wafer, hops = self.problem.wafer, self.places[which].hops
        x, y = wafer.link_bytes_per_s
        if not hops:
            return Links(x, y, wafer.hop_latency_s)
        return Links(min(x, y), min(x, y), wafer.hop_latency_s * hops)

    @cached_property
    def boundary_s(self) -> tuple[float, ...]:
        """Seconds per byte that each stage takes to pass tensors on, both ways.

        A stage at the border of its class also exchanges what it receives from the other class.
        """
        size = self.problem.work.boundary_bytes * self.layouts[0].microbatch
        border = self.layouts[0].stages - 1
        found = []
        for k, (rate, fixed) in enumerate(placed_boundaries(self.problem.wafer, self.dies, border)):
            again = self.exchange_s(k - border) if k in (border, border + 1) else 0.0
            found.append(rate + (fixed + again) / size)
        return tuple(found)

    def exchange_s(self, which: int) -> float:
        """Seconds in which the dies of a stage exchange the tensor between two stages."""
        layout = self.layouts[which]
        size = self.problem.work.boundary_bytes * layout.microbatch / layout.dies
        runs = slots_of(layout.width, layout.height)
        return mesh_collective("all-to-all", size, runs, self.links(which)).time_s

    def _rules(self, which: int) -> Array:
        problem, (first, second) = self.problem, self.layouts
        rules = self.part(which)._rules(replace(self.layouts[which], stages=1, blocks=()))
        links = self.links(which)
        rules["x_bytes_per_s"], rules["y_bytes_per_s"] = links.x_bytes_per_s, links.y_bytes_per_s
        rules["hop_s"] = links.hop_s
        rules["first_stage"] = first.stages if which else 0
        rules["pipeline_stages"] = first.stages + second.stages
        if problem.stream is None:
            return rules
        used = tuple(die for dies in self.dies for die in dies)
        link_s = stream_link_s_of(problem.wafer, used)
        shares = stream_shares(problem.wafer, problem.stream, len(used), link_s)
        for name, value in shares.items():
            rules[name] = value
        return rules

    def _compiled(self, which: int) -> _core.Mapping:
        layout, border = self.layouts[which], self.layouts[0].stages
        boundary = self.boundary_s[border:] if which else self.boundary_s[:border]
        foreign = None
        if self.problem.stream is not None:
            foreign = foreign_link_s(self.problem.wafer, self.dies, len(self.dies))
        rules = self._rules(which)
        return compiled_mapping(self.part(which), layout, rules, np.array(boundary), foreign)

    # ---- scores ----

    def times(self, which: int, outputs: Array | None = None) -> ClassTimes:
        """Of the stages of one class, by themselves."""
        mapping = self.mappings[which]
        mapping.set_others(0.0, 0.0, 0.0)
        tail_s = float(mapping.score(outputs)["tail_s"][0])
        streams = np.ascontiguousarray(mapping.stages(outputs)[0][:, 5:8])
        loads = [float(load) for load in streams[:, 0]]
        total = 0.0
        for load in loads:
            total += load
        return ClassTimes(total, max(loads), tail_s, streams)

    def beside(self, which: int, outputs: Array | None = None) -> _core.Mapping:
        """Return the mapping of one class, which knows what the other one takes now."""
        other = self.times(1 - which, outputs)
        streams = other.streams.reshape(-1)
        self.mappings[which].set_others(other.sum_s, other.slowest_s, other.tail_s, streams)
        return self.mappings[which]

    def at_start(self, which: int) -> _core.Mapping:
        """Return the mapping of one class as a search compares its starts."""
        return self.beside(which)

    def score(self, outputs: tuple[Array | None, Array | None] = (None, None)) -> dict[str, float]:
        """Time and memory of the whole: stages are added up from the first to the last."""
        self.times(0)
        first = self.mappings[0].score(outputs[0])[0]
        second = self.beside(1, outputs[0]).score(outputs[1])[0]
        names = ("memory_bytes", "over_bytes", "stream_bytes", "stream_over_bytes")
        found = {name: max(float(first[name]), float(second[name])) for name in names}
        return {"time_s": float(second["time_s"]), "tail_s": float(second["tail_s"]), **found}
