"""Drawings of points in HTML: sharp at any width, with a line that says what is pointed at.

The script ``points.js`` shows the text of a point under the mouse, and hides groups that are not
chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phaze_fast.report.markup import Html, join, tag

__all__ = ["Axis", "Point", "key_of", "points_drawing", "row_filter"]

_COLOURS = 7
_SHAPES = ("round", "square", "diamond")
_SPREAD = 20.0
"""Largest over smallest from which on an axis is logarithmic."""
_TICKS = 5


@dataclass(frozen=True)
class Point:
    """One point of a drawing."""

    group: str
    x: float
    y: float
    text: str
    """What is said of it."""


@dataclass(frozen=True)
class Axis:
    """One axis: its title, and how its values are said."""

    title: str
    said: Callable[[float], str]


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        low, high = min(values), max(values)
        log = low > 0 and high / low > _SPREAD
        if log:
            edge = (high / low) ** 0.04
            return cls(low / edge, high * edge, True)
        edge = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(min(low - edge, 0.0) if low < 0.3 * high else low - edge, high + edge, False)

    def at(self, value: float) -> float:
        """Give the place of a value, 0 to 100."""
        if self.log:
            return 100 * math.log(value / self.low) / math.log(self.high / self.low)
        return 100 * (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values that divide the axis."""
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            whole = [10.0**k for k in range(first, last + 1)]
            if len(whole) >= 3:
                return whole[:: max(1, math.ceil(len(whole) / 6))]
            steps = [m * 10.0**k for k in range(first - 1, last + 1) for m in (1, 2, 5)]
            return [value for value in steps if self.low <= value <= self.high]
        rough = (self.high - self.low) / _TICKS
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
        first = math.ceil(self.low / step)
        return [k * step for k in range(first, math.floor(self.high / step) + 1)]


def key_of(k: int) -> Html:
    """Draw the mark of the group of this number, for a table or a legend."""
    return tag("span", class_=f"mark {_look(k)}", aria_hidden="true")


def _look(k: int) -> str:
    return f"c{k % _COLOURS} {_SHAPES[k // _COLOURS % len(_SHAPES)]}"


def _grid(scale: _Scale, axis: Axis, side: str) -> list[Html]:
    found = []
    for value in scale.ticks():
        label = tag("span", axis.said(value))
        found.append(
            tag("div", label, class_=f"grid {side}", style=f"{side}:{scale.at(value):.2f}%")
        )
    return found


def _choice(name: str, groups: Sequence[str]) -> Html:
    if len(groups) < 2:
        return Html("")
    options = [tag("option", "all", value="")]
    options += [tag("option", group, value=str(k)) for k, group in enumerate(groups)]
    return tag("label", "Show ", tag("select", *options, data_points=name))


def _legend(groups: Sequence[str]) -> Html:
    items = [tag("li", key_of(k), group) for k, group in enumerate(groups)]
    return tag("ul", *items, class_="legend") if len(groups) > 1 else Html("")


def points_drawing(
    name: str,
    points: Sequence[Point],
    across: Axis,
    up: Axis,
    diagonal: bool = False,
    legend: bool = False,
) -> Html:
    """Draw points, a mark for each group, with a choice of the group to show.

    Parameters
    ----------
    name
        Of the drawing, once in a page.
    points
        At least one.
    across, up
        The axes.
    diagonal
        Whether both axes have one scale, and a line where they are equal.
    legend
        Whether the marks of the groups are listed below.

    Examples
    --------
    >>> axis = Axis("Seconds", str)
    >>> drawn = points_drawing("p", [Point("a", 1.0, 2.0, "one")], axis, axis, diagonal=True)
    >>> drawn.count("<i ")
    1
    """
    groups = list(dict.fromkeys(point.group for point in points))
    xs, ys = [point.x for point in points], [point.y for point in points]
    wide = _Scale.of([*xs, *ys] if diagonal else xs)
    high = wide if diagonal else _Scale.of(ys)
    marks = [
        tag(
            "i",
            class_=_look(groups.index(point.group)),
            style=f"left:{wide.at(point.x):.2f}%;bottom:{high.at(point.y):.2f}%",
            data_g=groups.index(point.group),
            data_tip=f"{point.group}: {point.text}" if len(groups) > 1 else point.text,
        )
        for point in points
    ]
    line = (
        Html(
            '<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
            '<line x1="0" y1="100" x2="100" y2="0"/></svg>'
        )
        if diagonal
        else Html("")
    )
    field = tag(
        "div",
        line,
        *_grid(wide, across, "left"),
        *_grid(high, up, "bottom"),
        *marks,
        class_="field",
        role="img",
        aria_label=f"{len(points)} points: {up.title} over {across.title}",
    )
    words = tag("p", "Point at a mark to read it.", class_="tip soft small", aria_live="polite")
    return tag(
        "div",
        tag("p", _choice(name, groups), class_="choices"),
        tag("p", up.title, class_="soft small axis"),
        field,
        tag("p", across.title, class_="soft small axis right"),
        words,
        _legend(groups) if legend else Html(""),
        class_="points",
        id=f"points-{name}",
    )


def row_filter(table_id: str, what: str) -> Html:
    """Offer to show only the rows of a table that hold some text."""
    box = tag("input", type="search", data_rows=table_id, placeholder=what, aria_label=what)
    left = tag("span", class_="soft small", data_left=table_id, aria_live="polite")
    return tag("p", join([box, " ", left]), class_="choices")
