"""Layer schedules of a search's page: the winner's as a chart, and beside the runner-up's."""

from __future__ import annotations

from typing import Any

from phaze_fast.report.markup import Html, details, escape, join, table, tag
from phaze_fast.report.varied import varied
from phaze_fast.report.words import NOTHING, is_number, percent, seconds

__all__ = ["layer_section", "operators_section"]

Data = dict[str, Any]

_WIDE = 1000.0
_COLOUR = {"tensor": 0, "vector": 2, "network": 5}
_BOTH = 3
"""Colour of operators that hold tensor and vector cores at once."""


def _kind(operator: Data) -> tuple[str, int]:
    """Name the cores that an operator holds, and give their colour."""
    held = list(operator.get("cores") or {})
    colour = _COLOUR.get(held[0], 7) if len(held) == 1 else _BOTH
    return " and ".join(held) or "no", colour


def _said(operator: Data) -> str:
    cores = ", ".join(f"{n} {kind}" for kind, n in (operator.get("cores") or {}).items())
    return f"{operator['name']}: {seconds(operator['time_s'])}, holds {cores or 'no'} cores"


def _lanes(layer: Data) -> Html:
    """Draw a layer, a line for each operator from its start to its end."""
    whole, rows = layer["time_s"], []
    for each in layer["operators"]:
        start, wide = (_WIDE * each[name] / whole for name in ("start_s", "time_s"))
        words = escape(_said(each))
        path = f"M{start:.2f} 0h{max(wide, 1.0):.2f}v10H{start:.2f}z"
        shape = f'<path d="{path}" class="f{_kind(each)[1]}"><title>{words}</title></path>'
        svg = (
            f'<svg viewBox="0 0 {_WIDE:g} 10" preserveAspectRatio="none" role="img" '
            f'aria-label="{words}">{shape}</svg>'
        )
        rows.append(join([tag("span", each["name"], class_="name"), Html(svg)]))
    scale = tag("div", tag("span", "0"), tag("span", seconds(whole)), class_="scale")
    return tag("div", *rows, scale, class_="lanes thin")


def _legend(layers: list[Data]) -> Html:
    kinds = dict.fromkeys(_kind(op) for layer in layers for op in layer["operators"])
    items = [tag("li", tag("span", class_=f"key c{k}"), f"{name} cores") for name, k in kinds]
    return tag("ul", *items, class_="legend")


def _title(layer: Data) -> str:
    times = f", {layer['count']} times in the model" if layer.get("count", 1) > 1 else ""
    proof = "proven shortest" if layer.get("status") == "optimal" else "not proven shortest"
    return f"{layer['kind']}, {layer['way']}{times}: {seconds(layer['time_s'])}, {proof}"


def _drawable(layers: Any) -> list[Data]:
    return [each for each in layers or [] if is_number(each.get("time_s")) and each["time_s"] > 0]


def layer_section(document: Data) -> Html:
    """Draw the schedule of every kind of layer on the best chip; blocks unfolded."""
    found = document.get("layers") or []
    models = found[0].get("models") or {} if found else {}
    parts: list[Html] = []
    for name, given in models.items():
        layers = _drawable(given)
        if not layers:
            continue
        if len(models) > 1:
            parts.append(tag("h3", name))
        most = max(layers, key=lambda each: each["time_s"] * each.get("count", 1))["kind"]
        parts += [details(_title(each), _lanes(each), each["kind"] == most) for each in layers]
        parts.append(_legend(layers))
    if not parts:
        return Html("")
    words = (
        "One micro-batch on one device of the best chip. A line is an operator, from its start to "
        "its end; its colour says which cores it holds."
    )
    return join([tag("p", words), *parts])


def _cores(operator: Data | None) -> str:
    if operator is None:
        return NOTHING
    return ", ".join(f"{n} {kind}" for kind, n in (operator.get("cores") or {}).items()) or NOTHING


def _beside(best: Data, other: Data) -> Html:
    """Set the operators of one layer on two chips side by side."""
    mine = {each["name"]: each for each in best["operators"]}
    theirs = {each["name"]: each for each in other["operators"]}
    rows = []
    for name in dict.fromkeys([*mine, *theirs]):
        a, b = mine.get(name), theirs.get(name)
        change = b["time_s"] / a["time_s"] - 1 if a and b and a["time_s"] else None
        rows.append(
            [
                name,
                _cores(a),
                seconds(a["time_s"]) if a else NOTHING,
                _cores(b),
                seconds(b["time_s"]) if b else NOTHING,
                percent(change, signed=True),
            ]
        )
    change = other["time_s"] / best["time_s"] - 1
    whole = ["All, as scheduled", "", seconds(best["time_s"]), "", seconds(other["time_s"])]
    rows.append([*whole, percent(change, signed=True)])
    columns = ["Operator", "Best: cores", "Best: time>", "Other: cores", "Other: time>", "Change>"]
    return table(f"{best['kind']}, {best['way']}", columns, rows)


def operators_section(document: Data) -> Html:
    """Compare the best chip with the next slower one operator by operator."""
    found = document.get("layers") or []
    if len(found) < 2:
        return Html("")
    parts: list[Html] = []
    mine, theirs = (each.get("models") or {} for each in found[:2])
    for name, given in mine.items():
        pairs = [
            (best, other)
            for best in _drawable(given)
            for other in _drawable(theirs.get(name))
            if (best["kind"], best["way"]) == (other["kind"], other["way"])
        ]
        if not pairs:
            continue
        most = max(pairs, key=lambda pair: pair[0]["time_s"] * pair[0].get("count", 1))[0]["kind"]
        for best, other in pairs:
            change = percent(other["time_s"] / best["time_s"] - 1, signed=True)
            heading = f"{name}: " if len(mine) > 1 else ""
            heading += f"{best['kind']}, {best['way']}: {change} on the other chip"
            parts.append(details(heading, _beside(best, other), best["kind"] == most))
    return join([tag("p", _pair_words(document)), *parts]) if parts else Html("")


def _pair_words(document: Data) -> str:
    """Say which two chips are compared, and over what."""
    top, rank = document.get("top") or [], document["layers"][1].get("rank", 2)
    start = "Seconds of one micro-batch on one device, on the best chip and on "
    if len(top) < rank:
        return f"{start}the next slower one."
    best, other = top[0], top[rank - 1]
    sizes = [(design.get("plan") or {}).get("micro_batch") for design in (best, other)]
    found = f"{start}number {rank} of the best chips, which differs in: {varied(other, best)}."
    if sizes[0] != sizes[1]:
        found += f" A micro-batch has {sizes[0]} sequences on the one, {sizes[1]} on the other."
    return found
