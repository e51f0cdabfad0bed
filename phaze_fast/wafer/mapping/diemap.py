"""Maps of a wafer in text: the stage of each die, the load of each link."""

from __future__ import annotations

from typing import Any

import numpy as np

from phaze_fast.wafer.hardware import Wafer
from phaze_fast.wafer.mapping.layout import Layout, stages_on
from phaze_fast.wafer.mapping.packing import class_places, stage_dies

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _placed(
    wafer: Wafer, layout: Layout, second_class: Layout | None, number: int
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Dies of each stage on one wafer, first class first."""
    if second_class is None:
        placed = stage_dies(wafer, layout.width, layout.height, stages_on(wafer, layout))
        return dict(enumerate(placed))
    first, second = (
        (class_layout.width, class_layout.height, class_layout.stages)
        for class_layout in (layout, second_class)
    )
    places = class_places(wafer, (first, second), wafer.wafer_count // layout.replicas) or ()
    every = [pair for place in places for pair in zip(place.stages, place.wafers, strict=True)]
    return {k: dies for k, (dies, on) in enumerate(every) if on == number}


def stage_grid(
    wafer: Wafer, layout: Layout, second_class: Layout | None = None, number: int = 0
) -> list[list[int]]:
    """Stage of each die, row by row; -1 where it is idle, -2 where it is dead.

    `second_class` is the layout of the second class of stages, if there is one, and `number` the
    index of the wafer in a pipeline; with one class of stages all wafers have the same map.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> stage_grid(load_wafer("dojo-tile-like"), Layout(2, 5, 2, 8))[0]
    [0, 0, 1, 1, -1]
    """
    columns, rows = wafer.grid
    grid = [[-1 if wafer.alive(x, y) else -2 for x in range(columns)] for y in range(rows)]
    for stage, dies in _placed(wafer, layout, second_class, number).items():
        for x, y in dies:
            grid[y][x] = stage
    return grid


def die_map(wafer: Wafer, layout: Layout, second_class: Layout | None = None) -> str:
    """Draw the wafer, one die a cell: its stage, `.` idle, `X` dead.

    With a second class of stages, every wafer of a pipeline is drawn.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> print(die_map(load_wafer("dojo-tile-like"), Layout(2, 2, 4, 8)))
    0 0 1 1 .
    0 0 1 1 .
    3 3 2 2 .
    3 3 2 2 .
    . . . . .
    """
    wide = layout.stages > len(_DIGITS)

    def cell(stage: int) -> str:
        if stage < 0:
            text = "." if stage == -1 else "X"
        else:
            text = str(stage) if wide else _DIGITS[stage]
        return text.rjust(3) if wide else text

    wafers = 1 if second_class is None else wafer.wafer_count // layout.replicas
    grids = [stage_grid(wafer, layout, second_class, number) for number in range(wafers)]
    return "\n\n".join("\n".join(" ".join(map(cell, row)) for row in grid) for grid in grids)


def link_map(wafer: Wafer, loads: np.ndarray[Any, Any]) -> str:
    """Draw the links between dies: 1 to 9 by busy time relative to the busiest link.

    The busier direction counts; `.` carries nothing, `x` is dead, `o` is a die and `X` a dead one.
    With switches: each die's link to them.

    Parameters
    ----------
    wafer
        The dies.
    loads
        Bytes of each link, as `step_loads` gives them.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like").replace(columns=3, rows=1)
    >>> loads = np.zeros((1, 3, 4))
    >>> loads[0, 0, 0], loads[0, 1, 0] = 9.0, 1.0
    >>> print(link_map(tile, loads))
    o9o1o
    """
    if wafer.switch is not None:
        return _switch_map(wafer, loads)
    columns, rows = wafer.grid
    x, y = (rate or 1.0 for rate in wafer.link_bytes_per_s)
    seconds = loads / np.array([x, x, y, y])
    most = float(seconds.max()) or 1.0
    cut = {frozenset(link) for link in wafer.dead_links}

    def mark(here: tuple[int, int], there: tuple[int, int], direction: int) -> str:
        if frozenset((here, there)) in cut:
            return "x"
        (u, v), (s, t) = here, there
        busy = max(seconds[v, u, direction], seconds[t, s, direction + 1]) / most
        return "." if busy <= 0 else str(max(1, min(9, round(9 * busy))))

    lines = []
    for row in range(rows):
        line = ""
        for column in range(columns):
            line += "o" if wafer.alive(column, row) else "X"
            if column + 1 < columns:
                line += mark((column, row), (column + 1, row), 0)
        lines.append(line)
        if row + 1 < rows:
            below = (mark((c, row), (c, row + 1), 2) for c in range(columns))
            lines.append(" ".join(below))
    return "\n".join(lines)


def _switch_map(wafer: Wafer, loads: np.ndarray[Any, Any]) -> str:
    columns, rows = wafer.grid
    most = float(loads.max()) or 1.0

    def cell(x: int, y: int) -> str:
        if not wafer.alive(x, y):
            return "X"
        busy = float(loads[y, x].max()) / most
        return "." if busy <= 0 else str(max(1, min(9, round(9 * busy))))

    return "\n".join(" ".join(cell(x, y) for x in range(columns)) for y in range(rows))
