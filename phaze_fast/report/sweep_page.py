"""A page about a sweep: every point, over the axes that varied."""

from __future__ import annotations

from collections import Counter
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.report.frame import Section, framed
from phaze_fast.report.markup import Html, details, join, table, tag, tiles
from phaze_fast.report.points import Axis, Point, points_drawing, row_filter
from phaze_fast.report.words import (
    NOTHING,
    area,
    count,
    is_number,
    percent,
    plan_text,
    seconds,
    size,
)
from phaze_fast.runs.sweep import SweepTable

__all__ = ["sweep_page"]

Row = dict[str, Any]

_AXES: dict[str, tuple[str, Any]] = {
    "devices": ("Devices", count),
    "global_batch": ("Sequences of a step", count),
    "seq": ("Tokens of a sequence", count),
    "area_mm2": ("Die area", area),
}
"""Numbers that points may differ in, and how each is said."""
_NAMES = {"model": "Model", "chip": "Chip", "fabric": "Fabric"}
_MOST_ROWS = 1000


def _varied(rows: list[Row]) -> list[str]:
    """Name what the points differ in; not what follows from a name before it, as a chip's area."""
    found: list[str] = []
    for name in (*_NAMES, *_AXES):
        if len({row.get(name) for row in rows}) < 2:
            continue
        pairs = ({(row.get(before), row.get(name)) for row in rows} for before in found)
        values = ({row.get(before) for row in rows} for before in found)
        if not any(len(p) == len(v) for p, v in zip(pairs, values, strict=True)):
            found.append(name)
    return found


def _group(row: Row, varied: list[str]) -> str:
    return ", ".join(str(row.get(n)) for n in _NAMES if n in varied) or str(row.get("model"))


def _plan(row: Row) -> str:
    return plan_text({name: value for name, value in row.items() if value is not None})


def _text(row: Row) -> str:
    given = [f"{count(row.get(n))} {_AXES[n][0].lower()}" for n in ("devices", "global_batch")]
    return (
        f"{', '.join(given)}: {seconds(row.get('time_s'))}, "
        f"{count(row.get('tokens_per_s'))} tokens/s, {_plan(row)}"
    )


def _drawings(done: list[Row], varied: list[str]) -> Html:
    numbers = [n for n in _AXES if n in varied] or ["devices"]
    parts = []
    for name in numbers:
        title, said = _AXES[name]
        points = [
            Point(_group(row, varied), float(row[name]), float(row["tokens_per_s"]), _text(row))
            for row in done
            if is_number(row.get(name)) and is_number(row.get("tokens_per_s"))
        ]
        if points:
            axes = (Axis(title, said), Axis("Tokens per second", count))
            parts.append(points_drawing(name.replace("_", "-"), points, *axes, legend=True))
    return join(parts)


def _summary(rows: list[Row], done: list[Row], varied: list[str]) -> Html:
    states = Counter(str(row.get("status")) for row in rows)
    said = ", ".join((_NAMES | {n: t for n, (t, _) in _AXES.items()})[n].lower() for n in varied)
    numbers = [
        ("Points", count(len(rows))),
        ("With a plan", count(states["optimal"])),
        ("Nothing fits", count(states["infeasible"])),
        ("Failed", count(states["error"])),
    ]
    parts = [tiles(numbers), tag("p", f"The points differ in: {said or 'nothing that is listed'}.")]
    if done:
        best = max(done, key=lambda row: row["tokens_per_s"] / row["devices"])
        fast = max(done, key=lambda row: row["tokens_per_s"])
        parts.append(tag("p", f"Most tokens a second: {_group(fast, varied)}, {_text(fast)}."))
        if best is not fast:
            words = f"Most of them per device: {_group(best, varied)}, {_text(best)}."
            parts.append(tag("p", words))
    return join(parts)


def _table(done: list[Row], varied: list[str]) -> Html:
    kept = sorted(done, key=lambda row: -row["tokens_per_s"])[:_MOST_ROWS]
    columns = [_NAMES[n] for n in _NAMES if n in varied]
    columns += [f"{_AXES[n][0]}>" for n in _AXES if n in varied]
    columns += ["Step>", "Tokens / s>", "MFU>", "Memory>", "Plan"]
    rows = [
        [str(row.get(n)) for n in _NAMES if n in varied]
        + [_AXES[n][1](row.get(n)) for n in _AXES if n in varied]
        + [
            seconds(row["time_s"]),
            count(row["tokens_per_s"]),
            percent(row.get("mfu")) if is_number(row.get("mfu")) else NOTHING,
            size(row.get("memory_bytes")),
            tag("span", _plan(row), class_="design"),
        ]
        for row in kept
    ]
    caption = "Points with a plan, most tokens a second first"
    if len(done) > len(kept):
        caption += f"; the first {count(len(kept))} of {count(len(done))}"
    laid = tag("div", table(caption, columns, rows), id="points-table")
    return join([row_filter("points-table", "Rows that hold ..."), laid])


def _without(rows: list[Row]) -> Html:
    reasons = Counter(
        (str(row.get("status")), str(row.get("reason") or ""))
        for row in rows
        if row.get("status") != "optimal"
    )
    if not reasons:
        return Html("")
    listed = [[state, why, count(n)] for (state, why), n in reasons.most_common(_MOST_ROWS)]
    laid = table("Why", ["Status", "Reason", "Points>"], listed)
    return details(f"{count(sum(reasons.values()))} points", laid, len(listed) <= 20)


def sweep_page(found: SweepTable, title: str = "Sweep", command: str = "") -> str:
    """Lay the rows of a sweep out as one page of HTML that works offline.

    Parameters
    ----------
    found
        What `phaze_fast.sweep` gave.
    title
        Of the page.
    command
        That made it.

    Raises
    ------
    InvalidInputError
        Where the sweep has no row.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=4, fabric="dgx-h100", chip="h100")
    >>> steps = [pf.Training(global_batch=16, micro_batch=m, tp=1) for m in (1, 2)]
    >>> points = [pf.Point(pf.models.load("bertlarge"), cluster, step) for step in steps]
    >>> "Tokens per second" in sweep_page(pf.sweep(points))
    True
    """
    rows = found.rows
    if not rows:
        raise InvalidInputError("sweep: no row is not accepted; expected a point at least")
    done = [row for row in rows if is_number(row.get("tokens_per_s"))]
    varied = _varied(rows)
    sections: list[Section] = [
        ("answer", "Answer", _summary(rows, done, varied)),
        ("drawings", "Tokens per second over what varied", _drawings(done, varied)),
        ("table", "Points", _table(done, varied) if done else Html("")),
        ("without", "Points without a plan", _without(rows)),
    ]
    if command:
        code = tag("pre", tag("code", command), class_="command")
        sections.append(("again", "To get it again", code))
    return framed(title, "sweep", [each for each in sections if each[2]], points=True)
