"""What each other system's rules leave open: its layouts, and its candidates in each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.layout import Layout, stages_on
from phaze_fast.wafer.packing import is_bent
from phaze_fast.wafer.plans import (
    OFFLOADED,
    RECOMPUTE,
    AxisAssignment,
    axis_assignments,
    expert_ways,
    linear_axis_assignment,
    megatron_op_mappings,
    outputs_of,
    zero3_op_mappings,
)
from phaze_fast.wafer.problem import Problem

__all__ = [
    "OFF_WAFER",
    "Candidate",
    "Candidates",
    "all_layouts",
    "data_layouts",
    "heads",
    "is_linear",
    "largest",
    "megatron_candidates",
    "megatron_shapes",
    "off_wafer_rules",
    "zero3_candidates",
]

Array = np.ndarray[Any, Any]

Candidate = tuple[Array, Array | None]
"""Operator mappings, and codes of outputs for one stage (None: chosen exactly)."""

Candidates = Callable[[Layout], Iterator[Candidate]]
"""Gives the candidates of a layout."""

OFF_WAFER = {
    "megatron_offload": "Megatron-LM with optimiser state, gradients and activations off the wafer",
    "zero_offload": "ZeRO-Offload: replicas, gradients and optimiser state off the wafer",
    "zero_infinity": "ZeRO-Infinity: replicas, all state and checkpoints off the wafer",
    "weight_streaming": "Cerebras: one stage, all weights streamed, activations on the wafer",
}
"""Systems that use memory off the wafer (Ren et al. 2021; Rajbhandari et al. 2021; Lie 2022)."""


def heads(problem: Problem) -> int:
    """Units that attention can be split into."""
    return min(op.units for op in problem.work.operators if op.per_head)


def megatron_shapes(
    problem: Problem, layout: Layout, linear: bool
) -> Iterator[tuple[int, AxisAssignment]]:
    """Tensor-parallel widths and axis assignments of slots that a layout has room for."""
    for t in (t for t in range(1, layout.dies + 1) if layout.dies % t == 0):
        replicas = layout.dies // t
        if heads(problem) % t or layout.micro_batch % replicas:
            continue
        if linear:
            try:
                yield t, linear_axis_assignment(layout, t)
            except InvalidInputError:
                continue
        else:
            for axis_assignment in axis_assignments(layout, t):
                yield t, axis_assignment


def is_linear(problem: Problem, layout: Layout) -> bool:
    """Whether a stage is a run of ranks: part of a row, or whole rows."""
    here = stages_on(problem.wafer, layout)
    if is_bent(problem.wafer, layout.width, layout.height, here):
        return False
    return layout.height == 1 or layout.width == problem.wafer.grid[0]


def all_layouts(problem: Problem, linear: bool) -> list[Layout]:
    """Every legal layout of 1F1B or interleaved pipelines, or those that are runs of ranks."""
    found = problem.layouts()
    known = (each for each in found if each.schedule != "zb-h1")
    return [each for each in known if not linear or is_linear(problem, each)]


def megatron_candidates(
    problem: Problem,
    linear: bool,
    weights: Iterable[str] = ("replicated", "zero1"),
    outputs: Iterable[str] = RECOMPUTE,
) -> Candidates:
    """Megatron-LM's splits of every width, with each of several weight modes and outputs."""
    codes = [outputs_of(problem, mode) for mode in outputs]
    modes = tuple(weights)

    @cache  # one plan serves many micro-batches, stages and schedules
    def plan(axis_assignment: AxisAssignment, shared: bool, mode: str, spread: bool) -> Array:
        found = megatron_op_mappings(problem, axis_assignment, shared, mode, spread)
        found.setflags(write=False)
        return found

    def candidates(layout: Layout) -> Iterator[Candidate]:
        for t, axis_assignment in megatron_shapes(problem, layout, linear):
            for shared in (False, True) if t > 1 else (False,):
                for mode, spread in product(modes, expert_ways(problem)):
                    op_mappings = plan(axis_assignment, shared, mode, spread)
                    for each in codes:
                        yield op_mappings, each

    return candidates


def zero3_candidates(
    problem: Problem, outputs: Iterable[str], weights: str = "zero3"
) -> Candidates:
    """Replicas on all dies, whose state is kept in one way, with each of several outputs."""
    codes = [outputs_of(problem, mode) for mode in outputs]

    def candidates(layout: Layout) -> Iterator[Candidate]:
        op_mappings = zero3_op_mappings(problem, layout, weights)
        for each in codes:
            yield op_mappings, each

    return candidates


def data_layouts(problem: Problem, linear: bool) -> list[Layout]:
    """One stage, and at least one sequence for every die."""
    return [
        layout
        for layout in all_layouts(problem, linear)
        if layout.stages == 1 and layout.micro_batch % layout.dies == 0
    ]


def largest(found: list[Layout]) -> list[Layout]:
    """Keep those with most dies."""
    most = max((layout.dies for layout in found), default=0)
    return [layout for layout in found if layout.dies == most]


def off_wafer_rules(problem: Problem, name: str, linear: bool) -> tuple[list[Layout], Candidates]:
    """Layouts and candidates of one of `OFF_WAFER`."""
    checkpoints = (*RECOMPUTE, "full-offload")
    if name == "megatron_offload":
        weights = ("replicated", "zero1", "offload")
        outputs = (*RECOMPUTE, *OFFLOADED)
        return all_layouts(problem, linear), megatron_candidates(problem, linear, weights, outputs)
    if name == "zero_offload":
        return data_layouts(problem, linear), zero3_candidates(problem, RECOMPUTE, "offload")
    if name == "zero_infinity":
        return data_layouts(problem, linear), zero3_candidates(problem, checkpoints, "stream")
    one = [layout for layout in all_layouts(problem, linear) if layout.stages == 1]
    return one, megatron_candidates(problem, linear, ("stream",))
