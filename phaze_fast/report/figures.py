"""Figures of a search's page as plain data that Plotly draws.

Colours are names of the page's CSS variables, such as ``--c0``, so that one figure serves light,
dark and print; the page's script puts their values in. Texts are escaped, for Plotly reads tags in
them.
"""

from __future__ import annotations

import html
import math
from typing import Any

from phaze_fast.report.words import (
    chip_text,
    count,
    is_number,
    objective,
    plan_of,
    seconds,
    size,
)
from phaze_fast.units import GIB

__all__ = ["COLOURS", "history_figure", "memory_figure", "pareto_figure"]

Data = dict[str, Any]

COLOURS = 8
"""Colours of the palette, ``--c0`` to ``--c7``."""

_LYING = 6
"""Up to so many stages the bars lie, and more stand."""
_POINTS = 2000
"""Most points of a curve over time."""
_SPREAD = 40.0
"""Largest over smallest from which on an axis is logarithmic."""


def _safe(value: object) -> str:
    """Escape text for Plotly's labels, and break none of its lines."""
    return html.escape(str(value), quote=False).replace("\n", " ")


def memory_figure(plan: Data) -> Data | None:
    """Stack the memory of every stage by term, against what a device has."""
    stages = plan.get("stages") or []
    named = dict.fromkeys(term for stage in stages for term in stage.get("memory") or {})
    # By place among all terms, so that a term has one colour in the figures of all models.
    terms = [(k, t) for k, t in enumerate(named) if any(s["memory"].get(t) for s in stages)]
    if not terms:
        return None
    lying = len(stages) <= _LYING
    at = list(range(len(stages)))
    data = []
    for k, term in terms:
        sizes = [float(stage["memory"].get(term) or 0.0) for stage in stages]
        held = [value / GIB for value in sizes]
        data.append(
            {
                "type": "bar",
                "orientation": "h" if lying else "v",
                "name": _safe(term),
                "x": held if lying else at,
                "y": at if lying else held,
                "hovertext": [
                    f"stage {i}: {_safe(term)} {size(value)}<br>"
                    f"of {size(stages[i].get('memory_bytes', sum(stages[i]['memory'].values())))}"
                    for i, value in enumerate(sizes)
                ],
                "hoverinfo": "text",
                "marker": {
                    "color": f"--c{k % COLOURS}",
                    "line": {"color": "--surface", "width": 0.6},
                },
            }
        )
    layout = _memory_axes(lying, len(stages))
    limit = plan.get("limit_bytes")
    if is_number(limit):
        _draw_limit(layout, float(limit), lying)
    tall = 175 + 44 * len(stages) if lying else 380
    return {"data": data, "layout": layout, "height": tall}


def _memory_axes(lying: bool, stages: int) -> Data:
    amount = {"title": {"text": "GiB of a device"}, "rangemode": "tozero", "fixedrange": True}
    place: Data = {
        "title": {"text": "Stage"},
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
    }
    if stages <= 2 * _LYING:
        place |= {"tickmode": "linear", "dtick": 1}
    if lying:
        place |= {"autorange": "reversed"}
    return {
        "barmode": "stack",
        "bargap": 0.35 if lying else 0.18,
        "hovermode": "closest",
        "xaxis": amount if lying else place,
        "yaxis": place if lying else amount,
        "legend": {"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom"},
    }


def _draw_limit(layout: Data, limit: float, lying: bool) -> None:
    at = limit / GIB
    along, across = ("x", "y") if lying else ("y", "x")
    line = {"color": "--bad", "width": 2, "dash": "dash"}
    layout["shapes"] = [
        {
            "type": "line",
            f"{along}0": at,
            f"{along}1": at,
            f"{across}0": 0,
            f"{across}1": 1,
            f"{across}ref": "paper",
            "line": line,
        }
    ]
    note = {"text": f"limit {size(limit)}", "showarrow": False, "font": {"color": "--bad"}}
    if lying:
        note |= {"x": at, "y": 0, "yref": "paper", "xanchor": "right", "yanchor": "bottom"}
        note |= {"xshift": -6}
    else:
        note |= {"x": 1, "y": at, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
    layout["annotations"] = [note]
    layout[f"{along}axis"]["range"] = [0, 1.1 * at]


_UNITS: dict[str, list[tuple[float, str]]] = {
    "time_s": [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")],
    "area_mm2": [(1.0, "mm²")],
    "energy_j": [(1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J")],
    "hbm_bytes": [(float(GIB), "GiB")],
    "cost_usd": [(1e6, "million USD"), (1e3, "thousand USD"), (1.0, "USD")],
}


def _axis(name: str, designs: list[Data], best: Data) -> Data:
    """Scale an objective's values to one unit, and choose its axis."""
    field, heading, _ = objective(name)
    values = [float(d[field]) if is_number(d.get(field)) else math.nan for d in designs]
    known = [v for v in values if v > 0]
    units = _UNITS.get(field, [(1.0, "")])
    scale, unit = next((u for u in units if known and max(known) >= u[0]), units[-1])
    wide = len(known) == len(values) and known and max(known) / min(known) > _SPREAD
    own = best.get(field)
    return {
        "title": f"{heading} ({unit})" if unit else _safe(heading),
        "type": "log" if wide else "linear",
        "values": [value / scale for value in values],
        "best": own / scale if is_number(own) else None,
    }


def _hover(design: Data, objectives: list[str]) -> str:
    lines = [f"<b>{_safe(chip_text(design.get('chip')))}</b>", _safe(plan_of(design))]
    for name in objectives:
        field, heading, how = objective(name)
        lines.append(f"{_safe(heading)}: {how(design.get(field))}")
    return "<br>".join(line.replace("· ", "<br>", 1) if len(line) > 60 else line for line in lines)


def pareto_figure(pareto: Data, best: Data) -> Data | None:
    """Draw the front, one objective against another, with the best design marked."""
    designs, names = pareto.get("designs") or [], list(pareto.get("objectives") or [])
    if not designs or len(names) < 2:
        return None
    axes = {name: _axis(name, designs, best) for name in names}
    across, up = names[1], names[0]
    order = sorted(range(len(designs)), key=lambda i: axes[across]["values"][i])
    designs = [designs[i] for i in order]
    for axis in axes.values():
        axis["values"] = [axis["values"][i] for i in order]
    front = {
        "type": "scatter",
        "mode": "lines+markers" if len(names) == 2 else "markers",
        "name": "front",
        "line": {"shape": "hv", "color": "--c0", "width": 1.5},
        "marker": {"size": 9, "color": "--c0", "line": {"color": "--surface", "width": 1}},
        "x": axes[across]["values"],
        "y": axes[up]["values"],
        "hovertext": [_hover(design, names) for design in designs],
        "hoverinfo": "text",
    }
    star = {
        "type": "scatter",
        "mode": "markers",
        "name": "fastest",
        "marker": {
            "size": 17,
            "symbol": "star",
            "color": "--c4",
            "line": {"color": "--surface", "width": 1},
        },
        "x": [axes[across]["best"]],
        "y": [axes[up]["best"]],
        "hovertext": [f"the best<br>{_hover(best, names)}"],
        "hoverinfo": "text",
    }
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": axes[across]["title"]}, "type": axes[across]["type"]},
        "yaxis": {"title": {"text": axes[up]["title"]}, "type": axes[up]["type"]},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    return {"data": [front, star], "layout": layout, "height": 420, "axes": axes}


def _thinned(history: list[Data]) -> list[Data]:
    """At most so many points, the last among them."""
    step = max(1, math.ceil(len(history) / _POINTS))
    kept = history[::step]
    return kept if not history or kept[-1] is history[-1] else [*kept, history[-1]]


def _curve(points: list[Data], field: str, name: str, line: Data) -> Data:
    kept = [p for p in points if is_number(p.get(field))]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [p["seconds"] for p in kept],
        "y": [p[field] for p in kept],
        "line": {"shape": "hv", "width": 2.5} | line,
        "hovertext": [
            f"{name}: {seconds(p[field])}<br>after {seconds(p['seconds'])}, "
            f"{count(p.get('placed'))} placed"
            for p in kept
        ],
        "hoverinfo": "text",
    }


def history_figure(history: list[Data]) -> Data | None:
    """Draw the best found and the bound below all others, over the seconds of the search.

    A search that ends as soon as it has found something has nothing to draw.
    """
    points = [p for p in _thinned(history) if is_number(p.get("seconds"))]
    found = [p for p in points if is_number(p.get("incumbent_s"))]
    if len(found) < 2:
        return None
    bound = _curve(
        points, "bound_s", "no point is faster (bound)", {"color": "--c2", "dash": "dot"}
    )
    below = _curve(found, "bound_s", "", {"width": 0, "color": "--c2"})
    below |= {"showlegend": False, "hoverinfo": "skip"}
    best = _curve(found, "incumbent_s", "best found so far", {"color": "--c0"})
    best |= {"fill": "tonexty", "fillcolor": "--shade"}
    layout = {
        "hovermode": "closest",
        "xaxis": {"title": {"text": "Seconds of search"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "Step (s)"}},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "reversed"},
    }
    return {"data": [bound, below, best], "layout": layout, "height": 340}
