"""Blocks whose operators stand on two groups of dies: attention on one, feed-forward on the other.

A block is cut behind an operator whose output alone goes on, such as the residual behind attention.
The first group has the operators of every block up to there and what stands before the blocks, the
second one all others: weights, their state and what is kept lie with their operator. Micro-batches
go back and forth between the groups once per block, as in a pipeline of two stages with as many
interleaved runs of blocks as there are blocks. Each crossing costs what a border between two
classes of stages costs, and the step is that schedule, played pass by pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.planning import pipelines
from phaze_fast.wafer.classes import Classes, Pair, shares_blocks
from phaze_fast.wafer.layout import Layout, placed_boundaries
from phaze_fast.wafer.operators import Edge, Workload
from phaze_fast.wafer.problem import Problem

__all__ = [
    "SplitBlock",
    "compiled_classes",
    "crossings",
    "cut_behind",
    "cut_points",
    "group_layout",
    "half_problems",
    "halves",
]

Array = np.ndarray[Any, Any]


def cut_points(work: Workload) -> tuple[int, ...]:
    """Operators behind which a block can be cut: nothing but their output goes on.

    It is kept, as the block's input is, and as large: the group that receives it keeps it.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.wafer.operators import workload
    >>> work = workload(models.load("llama2-7b"))
    >>> [work.operators[at].name for at in cut_points(work)]
    ['attention-residual']
    """
    block = [i for i, op in enumerate(work.operators) if op.part == "block"]
    found = []
    for at in block[:-1]:
        into = [edge for edge in work.edges if edge.source <= at < edge.target]
        into = [edge for edge in into if edge.kind == "inside"]
        alone = all(edge.source == at and edge.bytes == work.boundary_bytes for edge in into)
        wraps = any(edge.kind == "wrap" and edge.target > at for edge in work.edges)
        op = work.operators[at]
        if alone and into and not wraps and op.output_kept and not op.expert:
            found.append(at)
    return tuple(found)


def cut_behind(work: Workload, names: Sequence[str]) -> int:
    """Give the operator behind which blocks are cut where the first group has these operators.

    Raises
    ------
    InvalidInputError
        Where they are not all operators up to one of `cut_points`.
    """
    known = [op.name for op in work.operators]
    cuts = cut_points(work)
    for at in cuts:
        if list(names) == known[: at + 1]:
            return at
    if not cuts:
        raise InvalidInputError(
            f"class: two groups of dies are not accepted for the blocks of {work.model.name}; "
            "behind no operator its output alone goes on"
        )
    last = names[-1] if names else ""
    expected = " or ".join(f"all from {known[0]} to {known[at]}" for at in cuts)
    raise InvalidInputError(
        f"operators: {len(names)} of class 0, {last!r} the last, are not accepted where two groups "
        f"of dies share every block; expected {expected}"
    )


def halves(work: Workload, cut: int) -> tuple[Workload, Workload]:
    """Take each block apart behind one operator; each half is a block of its own.

    What a half receives from the other one enters it as if it came from its own last operator: it
    lies there as that one's output does, and is kept alike.
    """
    last = work.chain[-1]
    first: list[Edge] = []
    second: list[Edge] = []
    for edge in work.edges:
        if edge.kind == "wrap":
            first.append(replace(edge, source=cut))
        elif edge.target <= cut:
            first.append(edge)
        elif edge.source == cut:
            second.append(replace(edge, source=last, kind="wrap"))
        else:
            second.append(edge)
    behind = cut + 1
    moved = (replace(e, source=e.source - behind, target=e.target - behind) for e in second)
    chain = work.chain
    return (
        replace(
            work,
            operators=work.operators[:behind],
            edges=tuple(first),
            chain=tuple(at for at in chain if at <= cut),
        ),
        replace(
            work,
            operators=work.operators[behind:],
            edges=tuple(moved),
            chain=tuple(at - behind for at in chain if at > cut),
        ),
    )


def crossings(work: Workload) -> int:
    """Tensors that a group sends for one micro-batch, and that it receives, both passes.

    The first group sends every block's and gets all but the first one's, the second one vice versa;
    gradients go the other way.
    """
    return 2 * work.blocks - 1


def half_problems(problem: Problem, cut: int) -> tuple[Problem, Problem]:
    """Give the problems of both groups; operators that are priced already are shared."""
    if cut not in problem.halves:
        made = []
        for work, start in zip(halves(problem.work, cut), (0, cut + 1), strict=True):
            half = Problem(
                problem.model,
                problem.wafer,
                problem.training,
                problem.recompute,
                problem.volume,
                problem.linear,
                problem.capacity_bytes,
                work,
                problem.overlap,
            )
            half.share_prices(problem, start)
            made.append(half)
        problem.halves[cut] = (made[0], made[1])
    return problem.halves[cut]


def group_layout(problem: Problem, width: int, height: int, micro_batch: int) -> Layout:
    """Give the layout of a group of dies that has its operators of every block."""
    blocks = problem.work.blocks
    return Layout(width, height, 1, micro_batch, "interleaved", blocks, blocks=(blocks,))


class SplitBlock(Classes):
    """Two groups of dies that share the operators of every block, compiled.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layouts
        Of the first and of the second group, see `group_layout`.
    cut
        One of `cut_points`: the last operator of a block on the first group.

    Raises
    ------
    InvalidInputError
        Where they have no place, or some operator cannot be split over so many dies.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dojo-tile-like")
    >>> pair = group_layout(problem, 5, 2, 16), group_layout(problem, 5, 3, 16)
    >>> score = SplitBlock(problem, pair, cut_points(problem.work)[-1]).score()
    >>> 0.0 < score["time_s"] < 10.0
    True
    """

    shares_blocks = True

    def __init__(self, problem: Problem, layouts: Pair, cut: int) -> None:
        if cut not in cut_points(problem.work):
            raise InvalidInputError(
                f"cut: {cut} is not accepted; expected one of {list(cut_points(problem.work))}"
            )
        self.parts = half_problems(problem, cut)
        self.cut = cut
        super().__init__(problem, layouts)

    def part(self, which: int) -> Problem:
        """Return the problem of one group: its operators alone."""
        return self.parts[which]

    def own_mappings(self, which: int, op_mappings: Array) -> Array:
        """Take the operators of one group out of mappings for all."""
        behind = self.cut + 1
        return op_mappings[behind:] if which else op_mappings[:behind]

    @property
    def crossings(self) -> int:
        """Tensors that a group sends for one micro-batch, and that it receives, both passes."""
        return crossings(self.problem.work)

    @cached_property
    def boundary_s(self) -> tuple[float, ...]:
        """Seconds per byte that each group takes for all crossings of a micro-batch."""
        size = self.problem.work.boundary_bytes * self.layouts[0].micro_batch
        ways = placed_boundaries(self.problem.wafer, self.dies, 0)
        return tuple(
            self.crossings * (rate + (fixed + self.exchange_s(which)) / size)
            for which, (rate, fixed) in enumerate(ways)
        )

    def passes(self, outputs: tuple[Array | None, Array | None] = (None, None)) -> Array:
        """Seconds of every pass: forward and backward, by group and block, shape (2, 2, blocks).

        What is sent, and waited for where the other group streams, is spread over all passes.
        """
        blocks = self.problem.work.blocks
        found = np.zeros((2, 2, blocks))
        for which in (0, 1):
            rows = self.beside(which, outputs[1 - which]).stages(outputs[which])[0][0]
            load_s, (block_s, forward_s, ends_s, ends_forward_s) = rows[0], rows[8:12]
            share_s = max(0.0, load_s - blocks * block_s - ends_s) / (2 * blocks)
            found[0, which], found[1, which] = forward_s + share_s, block_s - forward_s + share_s
            end = blocks - 1 if which else 0
            found[:, which, end] += ends_forward_s, ends_s - ends_forward_s
        return found

    def score(self, outputs: tuple[Array | None, Array | None] = (None, None)) -> dict[str, float]:
        """Time and memory of the whole: the schedule is played.

        Where streams of all dies take longer than the slower group, that is added.
        """
        found = super().score(outputs)
        forward, backward = passes = self.passes(outputs)
        batches = self.problem.batches(self.layouts[0])
        loads = passes.sum(axis=(0, 2))
        form_s = batches * loads.max() + loads.min() / self.problem.work.blocks
        more_s = max(0.0, found["time_s"] - found["tail_s"] - float(form_s))
        played = pipelines.play("interleaved", forward, backward, batches)
        return {**found, "time_s": played.step_s + more_s + found["tail_s"]}


def compiled_classes(problem: Problem, layouts: Pair, first: Sequence[str]) -> Classes:
    """Compile two classes of stages, or two groups that share every block.

    Parameters
    ----------
    problem, layouts
        As for `Classes`.
    first
        Operators of the first one, by name.
    """
    if not shares_blocks(layouts):
        return Classes(problem, layouts)
    return SplitBlock(problem, layouts, cut_behind(problem.work, first))
