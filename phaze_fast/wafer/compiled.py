"""One layout of a problem as the compiled kernel takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.layout import Layout, slots_of
from phaze_fast.wafer.prices import combinations

if TYPE_CHECKING:
    from phaze_fast.wafer.problem import Problem

__all__ = ["compiled_mapping"]

Array = np.ndarray[Any, Any]


def compiled_mapping(
    problem: Problem,
    layout: Layout,
    rules: Array,
    boundary_s: Array,
    foreign_s: Array | None = None,
) -> _core.Mapping:
    """Compile the evaluator of a layout; each operator starts at its first legal mapping.

    Parameters
    ----------
    problem, layout
        What is mapped, and onto which dies.
    rules
        One record of `MAP_RULES_DTYPE`.
    boundary_s
        Seconds per byte that each stage takes to pass tensors on, both ways.
    foreign_s
        What `foreign_link_s` gives; None where no stage streams past another.

    Raises
    ------
    InvalidInputError
        Where some operator cannot be split over that many dies at all.
    """
    divisors, column, _ = combinations(layout.dies)
    runs = [tuple(run) for run in slots_of(layout.width, layout.height)]
    mapping = _core.Mapping(
        np.array(runs, dtype=_core.MESH_RUN_DTYPE),
        *problem._graph(layout.micro_batch),
        rules,
        divisors,
        column,
        tuple(t.reshape(-1) for t in problem._table(layout.dies, layout.micro_batch)),
        np.array(problem.blocks(layout), dtype=np.int32),
        boundary_s,
        np.array(problem.work.chain, dtype=np.int32),
        None if foreign_s is None else np.ascontiguousarray(foreign_s).reshape(-1),
    )
    first = [mapping.choices(i)[:1] for i in range(len(problem.work.operators))]
    for op, choice in zip(problem.work.operators, first, strict=True):
        if not len(choice):
            raise InvalidInputError(
                f"layout: {layout.width} x {layout.height} dies are not accepted with a "
                f"micro-batch of {layout.micro_batch}; {op.name} cannot be split over them"
            )
    mapping.assign(np.array([choice[0] for choice in first], dtype=_core.OP_MAPPING_DTYPE))
    return mapping
