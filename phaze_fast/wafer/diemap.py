"""A map of a wafer's dies in text: which stage each works for."""

from __future__ import annotations

from phaze_fast.hardware import Wafer
from phaze_fast.wafer.layout import Layout
from phaze_fast.wafer.packing import stage_dies

__all__ = ["die_map", "stage_grid"]

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def stage_grid(wafer: Wafer, layout: Layout) -> list[list[int]]:
    """Stage of each die, row by row; -1 where it is idle, -2 where it is dead.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> stage_grid(presets.wafer("dojo-tile-like"), Layout(2, 5, 2, 8))[0]
    [0, 0, 1, 1, -1]
    """
    columns, rows = wafer.grid
    grid = [[-1 if wafer.alive(x, y) else -2 for x in range(columns)] for y in range(rows)]
    for stage, dies in enumerate(stage_dies(wafer, layout.width, layout.height, layout.stages)):
        for x, y in dies:
            grid[y][x] = stage
    return grid


def die_map(wafer: Wafer, layout: Layout) -> str:
    """Draw the wafer, one die a cell: its stage, `.` idle, `X` dead.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> print(die_map(presets.wafer("dojo-tile-like"), Layout(2, 2, 4, 8)))
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

    return "\n".join(" ".join(map(cell, row)) for row in stage_grid(wafer, layout))
