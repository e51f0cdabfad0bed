"""A small drawing of a chip's parts, by count and not to scale."""

from __future__ import annotations

import math
from typing import Any

from phaze_fast.report.markup import Html, join, tag
from phaze_fast.report.words import is_number

__all__ = ["COLOUR_OF", "chip_drawing"]

Data = dict[str, Any]

COLOUR_OF = {"tensor cores": 0, "vector cores": 2, "shared buffer": 3, "HBM stacks": 5}
"""Colour of the palette that each part has, in the drawing and in its table."""

_MOST = 400
"""More cores than this are drawn as one block."""
_GAP = 0.18
"""Space between two cores, as a share of one's side."""


def _box(x: float, y: float, wide: float, high: float, kind: str) -> Html:
    corner = min(2.0, 0.15 * min(wide, high))
    return Html(
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{wide:.2f}" height="{high:.2f}" '
        f'rx="{corner:.2f}" class="{kind}"/>'
    )


def _cells(n: int, x: float, y: float, wide: float, high: float, kind: str) -> list[Html]:
    """Fill a field with so many cells, as square as they can be."""
    if n > _MOST or n < 1:
        return [_box(x, y, wide, high, kind)] if n else []
    columns = min(range(1, n + 1), key=lambda c: _oblong(wide / c, high / math.ceil(n / c), n, c))
    rows = math.ceil(n / columns)
    across, down = wide / columns, high / rows
    gap = _GAP * min(across, down)
    return [
        _box(
            x + (i % columns) * across + gap / 2,
            y + (i // columns) * down + gap / 2,
            across - gap,
            down - gap,
            kind,
        )
        for i in range(n)
    ]


def _oblong(across: float, down: float, n: int, columns: int) -> float:
    """Say how far a grid is from square cells without empty places."""
    empty = columns * math.ceil(n / columns) - n
    return abs(math.log(across / down)) + empty / n


def _number(part: Any, name: str) -> int:
    value = (part or {}).get(name)
    return int(value) if is_number(value) and value > 0 else 0


def chip_drawing(chip: Data) -> Html:
    """Draw a chip: cores of both kinds, the buffer they share, memory beside it."""
    tensor = _number(chip.get("tensor_core"), "count")
    vector = _number(chip.get("vector_core"), "count")
    buffer = _number(chip.get("buffer"), "capacity_bytes")
    hbm = chip.get("hbm")
    stacks = (_number(hbm, "stacks") or 1) if hbm else 0
    kinds = {name: f"f{colour}" for name, colour in COLOUR_OF.items()}
    parts = [Html('<rect x="44" y="4" width="152" height="152" rx="6" class="die"/>')]
    parts += _cells(tensor, 50, 10, 140, 84 if buffer else 104, kinds["tensor cores"])
    if buffer:
        parts.append(_box(51, 98, 138, 16, kinds["shared buffer"]))
    parts += _cells(vector, 50, 118, 140, 32, kinds["vector cores"])
    for k, x in ((stacks - stacks // 2, 8.0), (stacks // 2, 204.0)):
        high = min(36.0, 152 / max(k, 1))
        for i in range(min(k, 16)):
            top = 80 + (i - min(k, 16) / 2) * high + 2
            parts.append(_box(x, top, 28, high - 4, kinds["HBM stacks"]))
    drawn = Html(f'<svg viewBox="0 0 240 160" aria-hidden="true">{join(parts)}</svg>')
    return tag("figure", drawn, tag("figcaption", "by count, not to scale"), class_="drawing")
