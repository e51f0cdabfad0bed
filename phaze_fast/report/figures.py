"""Charts of the pages as plain data that Plotly draws.

Colours are names of the page's CSS variables, such as ``--c0``, so that one chart serves light,
dark and print; the page's script inserts the values of the variables. Texts are escaped, because
Plotly interprets tags in texts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phaze_fast.report.text import (
    chip_text,
    count,
    design_text,
    is_number,
    objective,
    seconds,
    size,
)
from phaze_fast.units import GIB

Data = dict[str, Any]

_COLOURS = 8
"""Colours of the palette, ``--c0`` to ``--c7``."""
_LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal"}


def _safe(value: object) -> str:
    """Escape text for Plotly's labels, which are single lines."""
    return html.escape(str(value), quote=False).replace("\n", " ")


def _axis_type(values: Sequence[float], spread: float) -> str:
    """Return ``log`` where values are positive and differ by a factor above `spread`."""
    return "log" if values and min(values) > 0 and max(values) / min(values) > spread else "linear"


def _title(text: str, **more: Any) -> Data:
    return {"title": {"text": text, "standoff": 10}, **more}


def _trace(kind: str, points: Iterable[Sequence[Any]], hover: Sequence[Any], **more: Any) -> Data:
    """Describe one trace of a chart: its points along both axes, and texts shown on hovering."""
    x, y = points
    return {"type": kind, "x": x, "y": y, "hovertext": hover, "hoverinfo": "text", **more}


def _marker(colour: str, **more: Any) -> Data:
    """Describe a mark with a thin edge, so that marks that overlap can be told apart."""
    return {"color": colour, "line": {"color": "--surface", "width": 1}, **more}


def _figure(data: list[Data], height: int, xaxis: Data, yaxis: Data, **layout: Any) -> Data:
    axes = {"hovermode": "closest", "xaxis": xaxis, "yaxis": yaxis, "legend": _LEGEND}
    return {"data": data, "layout": axes | layout, "height": height}


# ---- memory of stages ----

_MAX_HORIZONTAL = 6
"""Up to this many stages the bars are horizontal."""


def memory_figure(plan: Data) -> Data | None:
    """Stack the memory of every stage by term, with the limit of a device as a line."""
    stages = plan.get("stages") or []
    names = dict.fromkeys(term for stage in stages for term in stage.get("memory") or {})
    # A term has the same colour in every chart: that of its position among all terms.
    terms = [(k, t) for k, t in enumerate(names) if any(s["memory"].get(t) for s in stages)]
    if not terms:
        return None
    horizontal, positions = len(stages) <= _MAX_HORIZONTAL, list(range(len(stages)))
    data = []
    for k, term in terms:
        sizes = [float(stage["memory"].get(term) or 0.0) for stage in stages]
        totals = [s.get("memory_bytes", sum(s["memory"].values())) for s in stages]
        amounts = [value / GIB for value in sizes]
        hover = [
            f"stage {i}: {_safe(term)} {size(value)}<br>of {size(total)}"
            for i, (value, total) in enumerate(zip(sizes, totals, strict=True))
        ]
        along = (amounts, positions) if horizontal else (positions, amounts)
        marker = _marker(f"--c{k % _COLOURS}", line={"color": "--surface", "width": 0.6})
        style = {"orientation": "h" if horizontal else "v", "name": _safe(term)}
        data.append(_trace("bar", along, hover, **style, marker=marker))
    amount = _title("GiB of a device", rangemode="tozero", fixedrange=True)
    place = _title("Stage", fixedrange=True, showgrid=False, zeroline=False)
    if len(stages) <= 2 * _MAX_HORIZONTAL:
        place |= {"tickmode": "linear", "dtick": 1}
    if horizontal:
        place |= {"autorange": "reversed"}
        height, gap, axes = 175 + 44 * len(stages), 0.35, (amount, place)
    else:
        height, gap, axes = 380, 0.18, (place, amount)
    figure = _figure(data, height, *axes, barmode="stack", bargap=gap)
    limit = plan.get("limit_bytes")
    if is_number(limit):
        _add_limit(figure["layout"], float(limit), horizontal)
    return figure


def _add_limit(layout: Data, limit: float, horizontal: bool) -> None:
    at = limit / GIB
    along, across = ("x", "y") if horizontal else ("y", "x")
    line: Data = {"type": "line", "line": {"color": "--bad", "width": 2, "dash": "dash"}}
    line |= {f"{along}0": at, f"{along}1": at}
    line |= {f"{across}0": 0, f"{across}1": 1, f"{across}ref": "paper"}
    note: Data = {"text": f"limit {size(limit)}", "showarrow": False, "font": {"color": "--bad"}}
    note |= {"xanchor": "right", "yanchor": "bottom"}
    if horizontal:
        note |= {"x": at, "y": 0, "yref": "paper", "xshift": -6}
    else:
        note |= {"x": 1, "y": at, "xref": "paper"}
    layout |= {"shapes": [line], "annotations": [note]}
    layout[f"{along}axis"]["range"] = [0, 1.1 * at]


# ---- the Pareto front ----

_UNITS: dict[str, list[tuple[float, str]]] = {
    "time_s": [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")],
    "area_mm2": [(1.0, "mm²")],
    "energy_j": [(1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ"), (1.0, "J")],
    "hbm_bytes": [(float(GIB), "GiB")],
    "cost_usd": [(1e6, "million USD"), (1e3, "thousand USD"), (1.0, "USD")],
}


def _objective_axis(name: str, designs: list[Data], best: Data) -> Data:
    """Scale an objective's values to one unit, and choose its axis."""
    field, heading, _ = objective(name)
    values = [float(d[field]) if is_number(d.get(field)) else None for d in designs]
    known = [v for v in values if v is not None]
    units = _UNITS.get(field, [(1.0, "")])
    scale, unit = next((u for u in units if known and max(known) >= u[0]), units[-1])
    best_value = best.get(field)
    return {
        "title": f"{heading} ({unit})" if unit else _safe(heading),
        "type": _axis_type(known, 40.0) if len(known) == len(values) else "linear",
        "values": [None if value is None else value / scale for value in values],
        "best": best_value / scale if is_number(best_value) else None,
    }


def _design_hover(design: Data, objectives: list[str]) -> str:
    lines = [f"<b>{_safe(chip_text(design.get('chip')))}</b>", _safe(design_text(design))]
    for name in objectives:
        field, heading, formatter = objective(name)
        lines.append(f"{_safe(heading)}: {formatter(design.get(field))}")
    return "<br>".join(line.replace("· ", "<br>", 1) if len(line) > 60 else line for line in lines)


def pareto_figure(pareto: Data, best: Data) -> Data | None:
    """Draw the front, one objective over another, with the best design as a star."""
    designs, names = pareto.get("designs") or [], list(pareto.get("objectives") or [])
    if not designs or len(names) < 2:
        return None
    across, up = names[1], names[0]
    field = objective(across)[0]
    designs = sorted(designs, key=lambda d: d[field] if is_number(d.get(field)) else math.inf)
    axes = {name: _objective_axis(name, designs, best) for name in names}
    points = (axes[name]["values"] for name in (across, up))
    front = _trace("scatter", points, [_design_hover(design, names) for design in designs])
    front |= {"name": "front", "mode": "lines+markers" if len(names) == 2 else "markers"}
    front |= {"line": {"shape": "hv", "color": "--c0", "width": 1.5}}
    place = ([axes[name]["best"]] for name in (across, up))
    star = _trace("scatter", place, [f"the best<br>{_design_hover(best, names)}"], name="fastest")
    front["marker"] = _marker("--c0", size=9)
    star |= {"mode": "markers", "marker": _marker("--c4", size=17, symbol="star")}
    x, y = (_title(axes[name]["title"], type=axes[name]["type"]) for name in (across, up))
    return _figure([front, star], 420, x, y) | {"axes": axes}


# ---- a search over time ----

_MAX_CURVE_POINTS = 2000


def _thinned(history: list[Data]) -> list[Data]:
    """Reduce the points to about as many as are visible; the last one is always kept."""
    step = max(1, math.ceil(len(history) / _MAX_CURVE_POINTS))
    points = history[::step]
    return points if not history or points[-1] is history[-1] else [*points, history[-1]]


def _curve(points: list[Data], field: str, name: str, line: Data) -> Data:
    known = [p for p in points if is_number(p.get(field))]
    hover = [
        f"{name}: {seconds(p[field])}<br>after {seconds(p['seconds'])}, "
        f"{count(p.get('placed'))} placed"
        for p in known
    ]
    along = ([p[axis] for p in known] for axis in ("seconds", field))
    style: Data = {"mode": "lines", "name": name, "line": {"shape": "hv", "width": 2.5} | line}
    return _trace("scatter", along, hover, **style)


def history_figure(history: list[Data]) -> Data | None:
    """Draw the best design found and the lower bound over the seconds of the search.

    Returns no chart if the search ended with its first design.
    """
    points = [p for p in _thinned(history) if is_number(p.get("seconds"))]
    with_design = [p for p in points if is_number(p.get("incumbent_s"))]
    if len(with_design) < 2:
        return None
    bound = _curve(
        points, "bound_s", "no point is faster (bound)", {"color": "--c2", "dash": "dot"}
    )
    # An invisible copy of the bound, below which nothing is shaded.
    floor = _curve(with_design, "bound_s", "", {"width": 0, "color": "--c2"})
    floor |= {"showlegend": False, "hoverinfo": "skip"}
    best = _curve(with_design, "incumbent_s", "best found so far", {"color": "--c0"})
    best |= {"fill": "tonexty", "fillcolor": "--shade"}
    x, legend = _title("Seconds of search", rangemode="tozero"), {"traceorder": "reversed"}
    return _figure([bound, floor, best], 340, x, _title("Step (s)"), legend=_LEGEND | legend)


# ---- points in groups ----

_SYMBOLS = ("circle", "square", "diamond")


@dataclass(frozen=True)
class Point:
    """One point of a chart of points."""

    group: str
    x: float
    y: float
    text: str
    """Description shown under the mouse."""


def _points_axis(title: str, values: Sequence[float], unit: str) -> Data:
    axis = _title(title, type=_axis_type(values, 20.0))
    if axis["type"] == "log":  # ticks at 1, 2, 5 over a few decades, else at powers of ten
        axis |= {"dtick": "D2" if max(values) < 1e3 * min(values) else 1}
    if unit == "s":
        return axis | {"exponentformat": "SI", "minexponent": 0, "ticksuffix": "s"}
    return axis | ({"ticksuffix": f" {unit}"} if unit else {"tickformat": ","})


def points_figure(
    points: Sequence[Point], x_title: str, y_title: str, unit: str = "", diagonal: bool = False
) -> Data:
    """Draw points, a colour and mark for each group.

    Parameters
    ----------
    points
        At least one.
    x_title, y_title
        Titles of the axes.
    unit
        Unit of both axes, written at their ticks; seconds get SI prefixes.
    diagonal
        Whether both axes have the same scale, with a line where they are equal.

    Examples
    --------
    >>> figure = points_figure([Point("a", 1.0, 2.0, "one")], "Measured", "Predicted", "s", True)
    >>> len(figure["data"]), len(figure["layout"]["shapes"])
    (1, 1)
    """
    groups = list(dict.fromkeys(point.group for point in points))
    data = []
    for k, group in enumerate(groups):
        own = [point for point in points if point.group == group]
        hover = [
            f"<b>{_safe(group)}</b><br>{_safe(point.text).replace(': ', '<br>', 1)}"
            for point in own
        ]
        symbol = _SYMBOLS[k // _COLOURS % len(_SYMBOLS)]
        marker = _marker(f"--c{k % _COLOURS}", size=9, opacity=0.8, symbol=symbol)
        style = {"mode": "markers", "name": _safe(group), "marker": marker}
        along = ([point.x for point in own], [point.y for point in own])
        data.append(_trace("scatter", along, hover, **style))
    xs, ys = [point.x for point in points], [point.y for point in points]
    x_axis = _points_axis(x_title, [*xs, *ys] if diagonal else xs, unit)
    y_axis = _points_axis(y_title, [*xs, *ys] if diagonal else ys, unit)
    layout: Data = {}
    if len(groups) == 1:
        layout |= {"showlegend": False, "margin": {"l": 60, "r": 12, "t": 12, "b": 48}}
    if diagonal:
        low, high = min(xs + ys), max(xs + ys)
        line = {"color": "--soft", "width": 1, "dash": "dash"}
        ends = {"x0": low, "y0": low, "x1": high, "y1": high}
        layout["shapes"] = [{"type": "line", "layer": "below", "line": line, **ends}]
    return _figure(data, 480, x_axis, y_axis, **layout)


# ---- chips under constants that are intervals ----

_HIGH_REGRET = 1.2
"""Regrets of this and more have the last colour of the heat map's scale."""


def _short_chip(text: str) -> str:
    """Shorten a chip's text to its arrays, vector cores and buffer."""
    text = text.split(": ", 1)[-1].split(", HBM")[0]
    for word in (" tensor", " lanes", "buffer "):
        text = text.replace(word, "")
    return _safe(text)


def tornado_figure(one_at_a_time: Data) -> Data | None:
    """Draw how far each constant alone changes the nominal winner's step time, largest on top."""
    rows = [row for row in one_at_a_time.get("constants") or [] if len(row.get("step") or []) == 2]
    rows.sort(key=lambda row: min(*row["step"], 1.0) - max(*row["step"], 1.0))
    if not rows:
        return None
    data = []
    for end, (name, colour) in enumerate((("low", "--c2"), ("high", "--c0"))):
        changes = [row["step"][end] - 1.0 for row in rows]
        furthest = [max(abs(step - 1.0) for step in row["step"]) for row in rows]
        constants = [_safe(row["constant"]) for row in rows]
        hover = [
            f"{constant} at its {name} end: step {change:+.2%}"
            for constant, change in zip(constants, changes, strict=True)
        ]
        bar = _trace("bar", ([100 * change for change in changes], constants), hover)
        bar["text"] = [
            f"{change:+.1%}" if abs(change) == most else ""
            for change, most in zip(changes, furthest, strict=True)
        ]
        bar |= {"orientation": "h", "name": f"{name} end of the interval", "cliponaxis": False}
        data.append(bar | {"textposition": "outside", "marker": {"color": colour}})
    x = _title("Change of the nominal winner's step", ticksuffix="%", fixedrange=True)
    y = {"autorange": "reversed", "fixedrange": True, "showgrid": False}
    return _figure(data, 130 + 26 * len(rows), x, y, barmode="overlay", bargap=0.35)


def regret_figure(one_at_a_time: Data) -> Data | None:
    """Draw the regret of each chip that is best somewhere, constant by constant, as a heat map."""
    chips, rows = one_at_a_time.get("chips") or [], one_at_a_time.get("constants") or []
    if not chips or not rows:
        return None
    roles = {0: "nominal: ", 1: "robust: " if one_at_a_time.get("robust") else ""}
    labels = [f"{roles.get(i, '')}{_short_chip(chip)}" for i, chip in enumerate(chips)]
    constants = [_safe(row["constant"]) for row in rows]
    regrets = [[row["regret"][i] for row in rows] for i in range(len(chips))]
    hover = [
        [f"{label}<br>{name}: regret {r:.3f}" for name, r in zip(constants, line, strict=True)]
        for label, line in zip(labels, regrets, strict=True)
    ]
    heat_map = _trace("heatmap", (constants, labels), hover, z=regrets, xgap=2, ygap=2)
    heat_map |= {"zmin": 1.0, "zmax": _HIGH_REGRET, "showscale": False}
    heat_map |= {"colorscale": [[0, "--tint"], [1, "--c1"]], "texttemplate": "%{text}"}
    heat_map["text"] = [[f"{regret:.2f}" for regret in line] for line in regrets]
    layout = {
        "xaxis": {"side": "top", "tickangle": -50, "fixedrange": True, "showgrid": False},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "showgrid": False},
        "margin": {"l": 60, "r": 40, "t": 110, "b": 12},
    }
    return {"data": [heat_map], "layout": layout, "height": 130 + 26 * len(chips)}


# ---- generations of chips ----


def _short_number(value: float) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:.3g}"


def generations_figure(rows: Sequence[Data], features: Mapping[str, str]) -> Data:
    """Draw features over the generations of a family: real chips, and the best within their limits.

    Parameters
    ----------
    rows
        One for each generation: ``name``, ``year``, ``regret``, and the features of the ``real``
        chip and of the ``best`` one.
    features
        Title of each feature; each feature has a strip with its own logarithmic scale.
    """
    labels = [f"{_safe(row['name'])}<br>{row['year']}, regret {row['regret']:.2f}" for row in rows]
    lines = {
        "best": {"name": "best within its area and power"}
        | {"line": {"color": "--c1", "dash": "dash"}, "mode": "lines+markers"},
        "real": {"name": "built", "line": {"color": "--c0"}, "mode": "lines+markers+text"},
    }
    data, notes = list[Data](), list[Data]()
    layout: Data = {"hovermode": "closest", "annotations": notes}
    layout["legend"] = _LEGEND | {"traceorder": "reversed"}
    layout["xaxis"] = {"anchor": f"y{len(features)}", "fixedrange": True}
    layout["xaxis"] |= {"showline": False, "showgrid": False}
    for k, (field, title) in enumerate(features.items()):
        top = 1.0 - k / len(features)
        for which, style in lines.items():
            values = [row[which][field] for row in rows]
            texts = [_short_number(value) for value in values]
            hover = [
                f"{_safe(row['name'])}, {style['name']}: {text}"
                for row, text in zip(rows, texts, strict=True)
            ]
            trace = _trace("scatter", (labels, values), hover, yaxis=f"y{k + 1}", text=texts)
            trace |= {"textposition": "top center", "cliponaxis": False, "legendgroup": which}
            data.append(trace | {"showlegend": k == 0, "marker": {"size": 8}, **style})
        powers = [math.log10(row[which][field]) for row in rows for which in lines]
        edge = 0.25 * max(max(powers) - min(powers), 0.1)
        hidden = dict.fromkeys(("showticklabels", "showline", "showgrid"), False)
        layout[f"yaxis{k + 1}"] = {
            "domain": [top - 0.9 / len(features), top - 0.24 / len(features)],
            "range": [min(powers) - edge, max(powers) + edge],
            "type": "log",
            "fixedrange": True,
            **hidden,
        }
        note = {"text": title, "showarrow": False, "x": 0, "y": top, "xref": "paper"}
        notes.append(note | {"yref": "paper", "xanchor": "left", "yanchor": "top"})
    return {"data": data, "layout": layout, "height": 120 + 140 * len(features)}
