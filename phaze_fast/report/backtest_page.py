"""A page about the back-test: a timeline of real chips beside those the search would have built."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from phaze_fast.documents import write_whole
from phaze_fast.report.frame import framed
from phaze_fast.report.markup import Html, escape, join, table, tag
from phaze_fast.report.words import NOTHING, percent, seconds

__all__ = ["backtest_page", "write_backtest"]

Data = dict[str, Any]

_WIDE, _HIGH, _LEFT, _RIGHT = 860.0, 150.0, 150.0, 90.0
_SHOWN = {
    "multipliers": "multipliers",
    "array": "multipliers of one array",
    "buffer_mib": "buffer, MiB",
    "hbm_bytes_per_flop": "HBM bytes per FLOP",
    "link_bytes_per_s": "links, bytes/s",
}
_STEPS = {
    "array": "Array",
    "arrays": "Arrays",
    "multipliers": "Multipliers",
    "vector_cores": "Vector cores",
    "buffer_mib": "Buffer",
    "hbm_bytes_per_flop": "HBM/FLOP",
    "link_bytes_per_s": "Links",
}


def _said(value: float) -> str:
    """Write a number short."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _strip(rows: list[Data], field: str, title: str, top: float) -> list[Html]:
    """Draw one feature over the generations of a family: built, and the best around it."""
    values = [row[which][field] for row in rows for which in ("real", "best")]
    low, high = math.log(min(values)), math.log(max(values))
    room = max(high - low, 0.2)
    gap = (_WIDE - _LEFT - _RIGHT) / max(len(rows) - 1, 1)

    def place(k: int, value: float) -> tuple[float, float]:
        share = (math.log(value) - low) / room
        return _LEFT + k * gap, top + _HIGH - 42.0 - share * (_HIGH - 72.0)

    parts = [Html(f'<text x="0" y="{top + 20:.1f}" class="ink">{escape(title)}</text>')]
    for which, kind in (("best", "link best"), ("real", "link")):
        points = [place(k, row[which][field]) for k, row in enumerate(rows)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(Html(f'<polyline points="{line}" class="{kind}"/>'))
        for (x, y), row in zip(points, rows, strict=True):
            tip = f"{row['name']}, {which}: {_said(row[which][field])}"
            colour = "f0" if which == "real" else "f1"
            parts.append(
                Html(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{colour}">'
                    f"<title>{escape(tip)}</title></circle>"
                )
            )
    for k, row in enumerate(rows):
        x, y = place(k, row["real"][field])
        parts.append(
            Html(
                f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle" class="soft small">'
                f"{_said(row['real'][field])}</text>"
            )
        )
    return parts


def _timeline(rows: list[Data]) -> Html:
    """Draw all features of a family of chips over its generations."""
    parts: list[Html] = []
    for k, (field, title) in enumerate(_SHOWN.items()):
        parts += _strip(rows, field, title, k * _HIGH)
    bottom = len(_SHOWN) * _HIGH
    gap = (_WIDE - _LEFT - _RIGHT) / max(len(rows) - 1, 1)
    for k, row in enumerate(rows):
        x = _LEFT + k * gap
        for y, said in ((4, row["name"]), (18, f"{row['year']}, regret {row['regret']:.2f}")):
            parts.append(
                Html(
                    f'<text x="{x:.1f}" y="{bottom + y:.1f}" text-anchor="middle" '
                    f'class="ink small">{escape(said)}</text>'
                )
            )
    label = "features of chips over their generations"
    head = f'<svg viewBox="0 -6 {_WIDE:.0f} {bottom + 34:.0f}" role="img" aria-label="{label}">'
    caption = (
        "Built (solid) and the best chip around it within its own area and power (dashed), on a "
        "logarithmic scale of each row's own."
    )
    return tag(
        "figure", Html(f"{head}{join(parts)}</svg>"), tag("figcaption", caption), class_="picture"
    )


def _generations(rows: list[Data]) -> Html:
    columns = ["Chip", "Year>", "Model", "Rank>", "Regret>", "Step>", "Best around it"]
    body = [
        [
            row["name"],
            str(row["year"]),
            row["model"],
            f"{row['rank']} of {row['chips']}",
            f"{row['regret']:.2f}",
            seconds(row["time_s"]),
            row["best_text"].split(": ", 1)[-1],
        ]
        for row in rows
    ]
    return table("Real chips among those around them", columns, body)


def _directions(rows: list[Data]) -> Html:
    body = [
        [
            f"{row['from']} to {row['to']}",
            *("yes" if row["agree"][name] else "no" for name in _STEPS),
        ]
        for row in rows
    ]
    return table("Does the best chip change as the real one did?", ["Step", *_STEPS.values()], body)


def _runs(rows: list[Data]) -> Html:
    body = [
        [
            row["name"],
            row["chip"],
            str(row["devices"]),
            percent(row["mfu"]),
            percent(row["published_mfu"]),
            NOTHING if row["points"] is None else f"{row['points']:+.1f}",
            row["note"],
            row["source"],
        ]
        for row in rows
    ]
    columns = ["Run", "Chip", "Devices>", "MFU>", "Published>", "Points>", "Note", "Source"]
    return table("Published runs, planned on the real chip", columns, body)


def _sources(rows: list[Data]) -> Html:
    items = [tag("li", tag("strong", row["name"]), ": ", "; ".join(row["sources"])) for row in rows]
    return tag("ul", *items)


def backtest_page(found: Data) -> str:
    """Lay what `backtest` gives out as one page of HTML.

    Examples
    --------
    >>> from phaze_fast.papers.backtest import backtest
    >>> "TPU v2" in backtest_page(backtest(["TPU v2"], threads=1))
    True
    """
    rows = found["generations"]
    families = list(dict.fromkeys(row["family"] for row in rows))
    sections = [("chips", "Real chips under their own limits", _generations(rows))]
    for family in families:
        own = [row for row in rows if row["family"] == family]
        sections.append((f"timeline-{family}", f"Timeline: {family}s", _timeline(own)))
    if found["directions"]:
        sections.append(("directions", "Directions of change", _directions(found["directions"])))
    if found.get("runs"):
        sections.append(("runs", "Model FLOPs utilisation", _runs(found["runs"])))
    sections.append(("sources", "Sources of every input", _sources(rows)))
    return framed("Back-test", "back-test", sections)


def write_backtest(found: Data, path: str | Path) -> None:
    """Write the page to a file, whole or not at all."""
    write_whole(path, backtest_page(found))
