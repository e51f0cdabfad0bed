"""The second half of a search's page: what the answer was weighed against."""

from __future__ import annotations

import json
import math
from typing import Any

from phaze_fast.report.markup import Html, bar, details, facts, join, table, tag
from phaze_fast.report.varied import chip_varied, varied
from phaze_fast.report.words import (
    NOTHING,
    area,
    chip_text,
    cost,
    count,
    energy,
    is_number,
    objective,
    percent,
    plan_of,
    rate,
    ratio,
    seconds,
)

__all__ = [
    "baselines_section",
    "history_section",
    "inputs_section",
    "pareto_section",
    "pruning_section",
    "sensitivity_section",
    "top_section",
]

Data = dict[str, Any]

_STEPS = {
    "rules": "widths that heads, layers or the batch do not allow",
    "memory": "the model does not fit into its devices",
    "roofline": "too slow even with every unit at its peak",
    "mapped": "too slow with operators mapped onto its arrays, all side by side",
    "schedule_bound": "too slow by the bound of its layers' schedules",
    "scheduled": "too slow with its layers scheduled exactly",
    "placed": "placed in full, and not faster",
}


_APART = "Differs from the best in"


def _apart(design: Data, best: Data) -> Html:
    """Say which axes of the space and of the plan set a design apart from the best."""
    return tag("span", varied(design, best), class_="apart")


def _both(design: Data) -> Html:
    """Say a design's chip, and its plan below."""
    plan = tag("span", plan_of(design), class_="soft note")
    return tag("span", chip_text(design.get("chip")), plan, class_="design")


def _selects(names: list[str]) -> Html:
    """Offer the objectives for both axes, where there is a choice."""
    if len(names) < 3:
        return Html("")
    boxes = []
    for axis, word, chosen in (("x", "Across", names[1]), ("y", "Up", names[0])):
        options = [
            tag("option", objective(n)[1], value=n, **({"selected": ""} if n == chosen else {}))
            for n in names
        ]
        box = tag("select", *options, data_figure="pareto", data_axis=axis)
        boxes.append(tag("label", f"{word} ", box))
    return tag("p", *boxes, class_="choices")


def pareto_section(document: Data, figure: Html) -> Html:
    """Show the designs of which none is better in every objective."""
    pareto = document.get("pareto") or {}
    designs, names = pareto.get("designs") or [], list(pareto.get("objectives") or [])
    if not designs or not names:
        return Html("")
    kinds = [objective(name) for name in names]
    best = document.get("best") or designs[0]
    rows = [
        [_both(d), *(how(d.get(field)) for field, _, how in kinds), _apart(d, best)]
        for d in designs
    ]
    headings = [f"{heading}>" for _, heading, _ in kinds]
    words = [heading if heading.isupper() else heading.lower() for _, heading, _ in kinds]
    either = " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    proven = pareto.get("status") == "optimal"
    sure = "The front is complete: proven." if proven else "The front may miss designs: not proven."
    text = f"Among these, {either} improves only where another gives way. {sure}"
    laid = table("The front", ["Chip and plan", *headings, _APART], rows)
    folded = details(f"The front as a table ({count(len(designs))} designs)", laid)
    return join([tag("p", text), _selects(names), figure, folded])


def _total(document: Data, counts: list[int]) -> tuple[str, int | None]:
    """Find what the counts of steps are taken from, where the document's numbers add up."""
    gone, looked = sum(counts), document.get("evaluated") or 0
    for name in ("points", "designs"):
        whole = document.get(name)
        if is_number(whole) and gone <= whole <= gone + looked:
            return "chips" if name == "designs" else name, int(whole)
    return "points", None


def pruning_section(document: Data) -> Html:
    """Show step by step how many points were ruled out, on a logarithmic scale."""
    pruned = {str(k): int(v) for k, v in (document.get("pruned") or {}).items() if is_number(v)}
    if not pruned:
        return Html("")
    what, whole = _total(document, list(pruned.values()))
    decades = max(1, math.ceil(math.log10(max(*pruned.values(), whole or 1, 10))))
    left, rows = whole, []
    for step, gone in pruned.items():
        said = tag(
            "span", step.replace("_", " "), tag("span", _STEPS.get(step, ""), class_="soft note")
        )
        part = percent(gone / whole) if whole else NOTHING
        rest = NOTHING
        if left is not None:
            left -= gone
            rest = count(left)
        share = math.log10(gone) / decades if gone > 0 else 0.0
        drawn = bar(share, "dot") if gone > 0 else tag("span", class_="track")
        rows.append([said, drawn, count(gone), part, rest])
    marks = [f"10{_power(k)}" if k > 3 else count(10**k) for k in range(decades + 1)]
    scale = tag("span", *[tag("span", mark) for mark in marks], class_="ticks")
    start = f"{count(whole)} {what} to begin with. " if whole else ""
    text = f"{start}Each step is costlier than the one before and sees only what that left over."
    columns = ["Ruled out by", "Logarithmic", "Ruled out>", "Share>", "Left>"]
    laid = table(
        f"{what.capitalize()} ruled out, step by step", columns, [*rows, ["", scale, "", "", ""]]
    )
    block = tag("div", laid, class_="lollipop", style=f"--decades:{decades}")
    return join([tag("p", text), block])


def _power(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def history_section(document: Data, figure: Html) -> Html:
    """Show how the best found and the bound met."""
    if not figure:
        return Html("")
    met = document["status"] == "optimal"
    text = (
        "The answer is proven where the two lines meet." if met else "The two lines did not meet."
    )
    return join([tag("p", text), figure])


def _race(rows: list[tuple[object, Any, str, str]]) -> Html:
    """Draw times as bars on one scale, each with its name, its time and what follows from it."""
    longest = max((time for _, time, _, _ in rows if is_number(time)), default=0.0)
    cells: list[Html] = []
    for name, time, after, kind in rows:
        known = is_number(time) and longest > 0
        drawn = bar(time / longest, kind) if known else tag("span", "no answer", class_="soft")
        cells += [tag("span", name, class_="name"), drawn]
        cells.append(tag("span", seconds(time) if known else ""))
        cells.append(tag("span", after, class_="soft"))
    return tag("div", *cells, class_="race")


def baselines_section(document: Data) -> Html:
    """Compare the best with what simpler ways of searching find."""
    baselines, best = document.get("baselines") or {}, document.get("best") or {}
    if not baselines:
        return Html("")
    own = tag("b", "This search")
    race: list[tuple[object, Any, str, str]] = [(own, best.get("time_s"), "", "own")]
    took = (document.get("manifest") or {}).get("seconds")
    first = [own, rate(best.get("samples_per_s")), count(document.get("evaluated")), seconds(took)]
    rows: list[list[object]] = [[*first, _both(best)]]
    for key, base in baselines.items():
        title = str(base.get("title") or key)
        faster = base.get("speedup")
        after = f"{ratio(faster)} as long" if is_number(faster) and faster > 1 else ""
        race.append((title, base.get("time_s"), after, "other"))
        rows.append(
            [
                tag("span", title, tag("span", base.get("note") or "", class_="soft note")),
                rate(base.get("samples_per_s")),
                count(base.get("evaluations")),
                seconds(base.get("seconds")),
                _both(base) if is_number(base.get("time_s")) else NOTHING,
            ]
        )
    columns = ["Found by", "Samples / s>", "Evaluations>", "Search took>", "Chip and plan"]
    heading = tag("p", "Seconds of a step; shorter is better.", class_="soft small")
    return join([heading, _race(race), table("What each found, and how", columns, rows)])


def sensitivity_section(document: Data) -> Html:
    """Show how the answer moves where what was assumed is off."""
    changes = document.get("sensitivity") or []
    if not changes:
        return Html("")
    rows = []
    for each in changes:
        stays = each.get("same_chip")
        other = chip_varied(each.get("chip"), (document.get("best") or {}).get("chip"))
        chip = "the same" if stays else ", ".join(other) or str(each.get("chip_text") or "none")
        rows.append(
            [
                str(each.get("what", NOTHING)),
                ratio(each.get("factor")),
                seconds(each.get("time_s")),
                percent(each.get("change"), signed=True),
                tag("span", chip, class_="chip") if stays is not None else NOTHING,
            ]
        )
    kept = sum(bool(each.get("same_chip")) for each in changes)
    text = f"The best chip stays the same in {kept} of {len(changes)} cases."
    columns = ["What is changed", "By>", "Step>", "Change>", "Best chip then, where it differs"]
    return join([tag("p", text), table("What if an assumption is off", columns, rows)])


def top_section(document: Data) -> Html:
    """List the best chips, fastest first."""
    top = document.get("top") or []
    if not top:
        return Html("")
    fastest = (document.get("best") or top[0]).get("time_s")
    rows = []
    for k, design in enumerate(top):
        took = design.get("time_s")
        known = is_number(took) and is_number(fastest) and fastest
        rows.append(
            [
                str(k + 1),
                seconds(took),
                percent(took / fastest - 1, signed=True) if known else NOTHING,
                _both(design),
                _apart(design, document.get("best") or top[0]),
                rate(design.get("samples_per_s")),
                area(design.get("area_mm2")),
                energy(design.get("energy_j")),
                cost(design.get("cost_usd")),
                str(design.get("bottleneck") or NOTHING),
            ]
        )
    columns = ["#", "Step>", "Behind>", "Chip and plan", _APART, "Samples / s>", "Die area>"]
    columns += ["Energy of a step>", "Price of all chips>", "Bottleneck"]
    return table(f"The {len(top)} best chips, each with its best plan", columns, rows)


def inputs_section(document: Data) -> Html:
    """Say how to get the same answer again."""
    manifest = document.get("manifest") or {}
    if not manifest:
        return Html("")
    command = manifest.get("command")
    parts = [tag("pre", tag("code", command), class_="command")] if command else []
    parts.append(
        facts(
            "Run",
            [
                ("Inputs' digest", tag("code", manifest.get("digest") or NOTHING)),
                ("phaze_fast", str(manifest.get("version") or NOTHING)),
                ("Seed", str(manifest.get("seed", NOTHING))),
                ("Threads", count(manifest.get("threads"))),
                ("Took", seconds(manifest.get("seconds"))),
            ],
        )
    )
    inputs = manifest.get("inputs")
    if inputs:
        text = json.dumps(inputs, indent=2, default=str, ensure_ascii=False)
        parts.append(details("All inputs as JSON", tag("pre", tag("code", text))))
    return join(parts)
