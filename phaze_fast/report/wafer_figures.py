"""A wafer as a drawing: which stage each die works for, what is dead, how busy each link is."""

from __future__ import annotations

from typing import Any

from phaze_fast.report.markup import Html, join, tag

__all__ = ["die_map_svg"]

Data = dict[str, Any]

_CELL, _GAP = 40, 14
_WIDE, _LARGEST = 640, 1.8  # pixels that a drawing may fill, and how much it grows for that
_HUE = 205  # blue, away from the colour of links
_FAINTEST = 0.08
_DEAD, _IDLE = -2, -1


def _at(place: int) -> int:
    return place * (_CELL + _GAP) + _GAP // 2


def _die(column: int, row: int, stage: int) -> list[Html]:
    x, y = _at(column), _at(row)
    box = {"x": x, "y": y, "width": _CELL, "height": _CELL, "rx": 4}
    if stage == _DEAD:
        ends = ((x, y, x + _CELL, y + _CELL), (x, y + _CELL, x + _CELL, y))
        crossed = [
            tag("line", x1=a, y1=b, x2=c, y2=d, stroke="#b3261e", stroke_width=3)
            for a, b, c, d in ends
        ]
        return [tag("rect", **box, fill="none", stroke="#b3261e"), *crossed]
    fill = "#8884" if stage == _IDLE else f"hsl({(_HUE + stage * 137) % 360} 45% 78%)"
    name = "idle" if stage == _IDLE else f"stage {stage}"
    shape = tag("rect", tag("title", f"row {row}, column {column}: {name}"), **box, fill=fill)
    if stage == _IDLE:
        return [shape]
    middle = {"x": x + _CELL / 2, "y": y + _CELL / 2 + 5, "text_anchor": "middle"}
    return [shape, tag("text", stage, **middle, fill="#000", font_size=14)]


def _link(column: int, row: int, way: int, share: float, most: float) -> Html:
    """One direction of a link, drawn beside the other one; the darker the busier."""
    across, back = way < 2, way % 2
    x, y = (_at(column) + _CELL, _at(row)) if across else (_at(column), _at(row) + _CELL)
    place = _CELL // 2 + (4 if back else -10)
    size = {"width": _GAP, "height": 6} if across else {"width": 6, "height": _GAP}
    x, y = (x, y + place) if across else (x + place, y)
    shade = max(_FAINTEST, share / most if most > 0 else 0.0)
    title = tag("title", f"{share:.1%} of a step")
    return tag("rect", title, x=x, y=y, **size, fill="#c2410c", fill_opacity=f"{shade:.3f}")


def _dead_link(link: list[list[int]]) -> Html:
    (a, b), (c, d) = link
    ends = [(_at(x) + _CELL / 2, _at(y) + _CELL / 2) for y, x in ((a, b), (c, d))]
    (x1, y1), (x2, y2) = ends
    return tag(
        "line", x1=x1, y1=y1, x2=x2, y2=y2, stroke="#b3261e", stroke_width=3, stroke_dasharray="4 3"
    )


def die_map_svg(dies: Data, links: Data) -> Html:
    """Draw a wafer from the `dies` and `links` of an answer.

    Examples
    --------
    >>> drawn = die_map_svg({"stage": [[0, -2]], "dead_links": []}, {"busy": [[[0.0] * 4] * 2]})
    >>> drawn.startswith("<svg"), drawn.count("<line")
    (True, 2)
    """
    grid = dies.get("stage") or []
    if not grid:
        return Html("")
    busy = links.get("busy") or []
    columns, rows = len(grid[0]), len(grid)
    most = max((share for row in busy for die in row for share in die), default=0.0)
    parts: list[Html] = []
    for row, line in enumerate(grid):
        for column, stage in enumerate(line):
            parts += _die(column, row, int(stage))
            if not busy:
                continue
            if column + 1 < columns:
                parts.append(_link(column, row, 0, busy[row][column][0], most))
                parts.append(_link(column, row, 1, busy[row][column + 1][1], most))
            if row + 1 < rows:
                parts.append(_link(column, row, 2, busy[row][column][2], most))
                parts.append(_link(column, row, 3, busy[row + 1][column][3], most))
    parts += [_dead_link(link) for link in dies.get("dead_links") or []]
    width, height = _at(columns), _at(rows)
    scale = min(_LARGEST, max(1.0, _WIDE / width))
    shown = {"width": round(scale * width), "height": round(scale * height)}
    box = {"viewBox": f"0 0 {width} {height}", **shown}
    label = f"{columns} by {rows} dies, their stages and the load of their links"
    return tag(
        "svg",
        join(parts),
        role="img",
        aria_label=label,
        style="max-width:100%;height:auto",
        **box,
    )
