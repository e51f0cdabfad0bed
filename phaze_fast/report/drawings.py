"""Coordinates of drawings for the templates: chips, timelines, memory over time."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np

from phaze_fast.planning import Timeline
from phaze_fast.report.text import is_number, seconds

Data = dict[str, Any]

# ---- a chip, by count ----

CHIP_COLOURS = {"tensor cores": 0, "vector cores": 2, "shared buffer": 3, "HBM stacks": 5}
"""Colour of the palette for each part of a chip, in the drawing and in its table."""
_MAX_CORES = 400
"""Cores of a chip are drawn as one block where there are more than this."""
_GAP = 0.18
"""Space between two cores, as a share of the side of a core."""

Box = tuple[float, float, float, float, int]
"""Left, top, width, height, and colour of the palette."""


def _grid(cells: int, x: float, y: float, width: float, height: float, colour: int) -> list[Box]:
    """Fill a rectangle with cells that are nearly square, with few empty places."""
    if not 1 <= cells <= _MAX_CORES:
        return [(x, y, width, height, colour)] if cells else []

    def distortion(columns: int) -> float:
        rows = math.ceil(cells / columns)
        stretch = abs(math.log((width / columns) / (height / rows)))
        return stretch + (columns * rows - cells) / cells

    columns = min(range(1, cells + 1), key=distortion)
    cell_width, cell_height = width / columns, height / math.ceil(cells / columns)
    gap = _GAP * min(cell_width, cell_height)
    corners = ((x + k % columns * cell_width, y + k // columns * cell_height) for k in range(cells))
    inner = (cell_width - gap, cell_height - gap, colour)
    return [(left + gap / 2, top + gap / 2, *inner) for left, top in corners]


def _number(part: Any, name: str) -> int:
    value = (part or {}).get(name)
    return int(value) if is_number(value) and value > 0 else 0


def chip_boxes(chip: Data) -> list[Box]:
    """Draw a chip in 240 x 160 units: cores of both kinds, the shared buffer, HBM on both sides.

    Examples
    --------
    >>> len(chip_boxes({"tensor_core": {"count": 4}, "hbm": {"stacks": 2}}))
    6
    """
    buffer, hbm = _number(chip.get("buffer"), "capacity_bytes"), chip.get("hbm")
    stacks = (_number(hbm, "stacks") or 1) if hbm else 0
    tensor, vector, shared, memory = CHIP_COLOURS.values()
    cores = _number(chip.get("tensor_core"), "count")
    boxes = _grid(cores, 50, 10, 140, 84 if buffer else 104, tensor)
    if buffer:
        boxes.append((51, 98, 138, 16, shared))
    boxes += _grid(_number(chip.get("vector_core"), "count"), 50, 118, 140, 32, vector)
    for side_stacks, x in ((stacks - stacks // 2, 8.0), (stacks // 2, 204.0)):
        height, drawn = min(36.0, 152 / max(side_stacks, 1)), min(side_stacks, 16)
        boxes += [
            (x, 80 + (k - drawn / 2) * height + 2, 28, height - 4, memory) for k in range(drawn)
        ]
    return boxes


# ---- a step over time ----

_MAX_PASSES = 20_000
_MAX_POINTS = 400
_WIDTH = 1000.0
_PASSES = {
    "F": ("forward", 0),
    "B": ("backward", 3),
    "I": ("input gradient", 3),
    "W": ("weight gradient", 2),
    "F&B": ("forward and backward together", 5),
}
"""Name and colour of the palette for each kind of pass."""


def timeline_lanes(timeline: Timeline, until_s: float | None = None) -> Data:
    """Place the passes of every stage on a lane 1000 units wide.

    Parameters
    ----------
    timeline
        The step.
    until_s
        Time at which the drawing ends; by default the end of the step.

    Returns
    -------
    dict
        ``stages``: start, width, colour and text of each pass, by stage; ``legend``; ``end_s``;
        ``too_many``: the number of passes where they are too many to draw, else 0.
    """
    plan, end_s = timeline.plan, until_s or timeline.plan.time_s
    passes = timeline.passes[timeline.passes["start_s"] < end_s]
    too_many = len(passes) if len(passes) > _MAX_PASSES else 0
    stages = []
    for stage in range(0 if too_many else plan.pp):
        boxes = []
        for row in passes[passes["device"] == stage].tolist():
            _, code, chunk, _, micro_batch, _, start, stop = row
            name, colour = _PASSES[timeline.kinds[code]]
            of_chunk = f", chunk {chunk}" if plan.vpp > 1 else ""
            text = (
                f"{name} of micro-batch {micro_batch}{of_chunk}: {seconds(stop - start)}, "
                f"from {seconds(start)}"
            )
            width = _WIDTH * (min(stop, end_s) - start) / end_s
            boxes.append((_WIDTH * start / end_s, width, colour, text))
        if timeline.passes_s < min(plan.time_s, end_s):
            tail_s = plan.time_s - timeline.passes_s
            text = f"exposed gradients and weights, optimiser: {seconds(tail_s)}"
            boxes.append((_WIDTH * timeline.passes_s / end_s, _WIDTH * tail_s / end_s, 7, text))
        stages.append(boxes)
    letters = {timeline.kinds[int(code)] for code in np.unique(timeline.passes["kind"])}
    legend = [
        (f"c{colour}", name) for letter, (name, colour) in _PASSES.items() if letter in letters
    ]
    legend.append(("c7", "gradients, weights, optimiser"))
    return {"stages": stages, "legend": legend, "end_s": end_s, "too_many": too_many}


def memory_lanes(timeline: Timeline) -> Data:
    """Place the memory of a device of every stage over the step on lanes of 1000 x 10.

    Returns
    -------
    dict
        ``stages``: the corners of each stage's curve, as points of an SVG polyline; ``limit``:
        height of the line of usable memory.
    """
    plan, stages = timeline.plan, []
    top = 1.05 * max(plan.limit_bytes, plan.memory_bytes)
    for stage in range(plan.pp):
        times_s, used_bytes = timeline.memory(stage)
        edges = np.linspace(0.0, plan.time_s, min(_MAX_POINTS, max(2, len(times_s))) + 1)
        corners = ["0,10"]
        for begin, end in pairwise(edges.tolist()):
            inside = used_bytes[(times_s >= begin) & (times_s < end)]
            before = used_bytes[max(0, int(np.searchsorted(times_s, begin, side="right")) - 1)]
            peak = max(float(inside.max(initial=0.0)), float(before))
            y = 10.0 - 10.0 * peak / top
            left, right = (_WIDTH * time_s / plan.time_s for time_s in (begin, end))
            corners.append(f"{left:.1f},{y:.3f} {right:.1f},{y:.3f}")
        stages.append(" ".join([*corners, f"{_WIDTH:g},10"]))
    return {"stages": stages, "limit": 10.0 - 10.0 * plan.limit_bytes / top}
