"""Pages about plans: the fastest with timeline and memory, a prediction, two side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phaze_fast.documents import write_whole
from phaze_fast.hardware import Cluster
from phaze_fast.models import Model
from phaze_fast.planning import NOMINAL, Plan, Timeline, timeline
from phaze_fast.report.explain import Explanation, difference, explain_plan
from phaze_fast.report.frame import Section, framed
from phaze_fast.report.markup import Html, details, join, table, tag, tiles
from phaze_fast.report.timelines import memory_drawing, timeline_drawing
from phaze_fast.report.words import count, percent, seconds, size

__all__ = ["compare_page", "plan_page", "write_page"]

_COLOURS = 8
_SHOWN_TERMS = ("weights", "gradients", "optimizer", "activations")
_RUNNERS = 12
_ZOOMED = 2.5
"""A second timeline shows the start where a step has so many times more micro-batches."""


def _said(name: str) -> str:
    return name.replace("_comm", " communication").replace("_", " ")


def _short(plan: Plan) -> str:
    widths = {"tp": plan.tp, "pp": plan.pp, "dp": plan.dp}
    widths |= {name: width for name, width in (("cp", plan.cp), ("ep", plan.ep)) if width > 1}
    parts = [f"{name} {width}" for name, width in widths.items()]
    how = plan.schedule if plan.vpp == 1 else f"{plan.schedule} x{plan.vpp}"
    return ", ".join([*parts, f"ZeRO {plan.zero}", f"micro-batch {plan.micro_batch}", how])


def _colour(k: int) -> str:
    return f"c{k}" if k < _COLOURS else f"c{k % _COLOURS} pale"


def _between(plan: Plan) -> str:
    return f"{seconds(plan.interval_s[0])} to {seconds(plan.interval_s[1])}"


_INSTANTS = {
    "loss": "at the loss",
    "backward": "in a backward pass",
    "first layer backward": "in the first layer's backward pass",
    "step": "in the optimiser's step",
}


def _peak(plan: Plan) -> str:
    """Say where and when the fullest device holds most, and of what."""
    term = plan.peak["term"]
    said = f"on stage {_when(plan)}; the largest part that comes and goes is {term}"
    return f"{said}, {size(plan.memory[term])}"


def _when(plan: Plan) -> str:
    instant = plan.peak["instant"]
    return f"{plan.stages.index(plan.fullest)}, {_INSTANTS.get(instant, instant)}"


def _summary(plan: Plan, verdict: str, footnote: str) -> Html:
    left = plan.limit_bytes - plan.memory_bytes
    room = f"{size(left)} free" if left >= 0 else f"{size(-left)} too much"
    numbers = [
        ("Step", seconds(plan.time_s)),
        ("Tokens / s", count(round(plan.tokens_per_s))),
        ("MFU", percent(plan.mfu)),
        ("Memory of the fullest device", size(plan.memory_bytes)),
        ("Against the limit", room),
        ("Devices", count(plan.devices)),
        ("Micro-batches", count(plan.micro_batches)),
        ("Recomputed", plan.recompute),
        ("Rank order", plan.rank_order),
        (f"{NOMINAL:.0%} of such runs lie in", _between(plan)),
        ("Memory is fullest", f"stage {_when(plan)}"),
    ]
    mood = "good" if left >= 0 else "bad"
    return join(
        [
            tag("p", tag("span", verdict, class_=f"badge {mood}"), class_="verdict"),
            tag("p", _short(plan)),
            tiles(numbers),
            tag("p", footnote, class_="soft small"),
        ]
    )


def _parts(plan: Plan) -> Html:
    shares = [
        (k, name, value)
        for k, (name, value) in enumerate(plan.parts_s.items())
        if value > 1e-6 * plan.time_s
    ]
    bars = [
        tag(
            "span",
            class_=_colour(k),
            style=f"flex:{value / plan.time_s:.6f}",
            title=f"{_said(name)}: {seconds(value)}",
        )
        for k, name, value in shares
    ]
    items = [
        tag(
            "li",
            tag("span", class_=f"key {_colour(k)}"),
            _said(name),
            " ",
            tag("span", f"{seconds(value)}, {value / plan.time_s:.1%}", class_="soft"),
        )
        for k, name, value in shares
    ]
    return join([tag("div", *bars, class_="parts"), tag("ul", *items, class_="legend")])


def _timeline(played: Timeline) -> Html:
    plan = played.plan
    drawn = [timeline_drawing(played)]
    if plan.micro_batches > _ZOOMED * plan.pp * plan.vpp and plan.pp > 1:
        until = min(plan.time_s, plan.time_s * _ZOOMED * plan.pp * plan.vpp / plan.micro_batches)
        near = timeline_drawing(played, until)
        drawn.append(details("The start of the step, larger", near, is_open=True))
    busy = sum(played.busy_s(k) for k in range(plan.pp)) / plan.pp
    words = f"On average a stage works {busy / plan.time_s:.1%} of the step."
    return join([tag("p", words), *drawn])


def _memory(played: Timeline) -> Html:
    """Draw memory over the step, and say which instant and which term make its peak."""
    words = f"The fullest device: {size(played.plan.memory_bytes)}, {_peak(played.plan)}."
    return join([tag("p", words), memory_drawing(played)])


def _stages(plan: Plan) -> Html:
    rows = [
        [
            str(k),
            ", ".join(f"{n} {kind}" for kind, n in stage.kinds.items()),
            stage.recompute,
            seconds(stage.load_s),
            *(size(stage.memory[term]) for term in _SHOWN_TERMS[:3]),
            size(stage.memory["activations"]),
            size(sum(stage.memory[term] for term in stage.memory if term not in _SHOWN_TERMS)),
            size(stage.memory_bytes),
            _INSTANTS.get(stage.instant, stage.instant),
        ]
        for k, stage in enumerate(plan.stages)
    ]
    columns = ["Stage", "Layers", "Recomputed", "Micro-batch>", "Weights>", "Gradients>"]
    columns += ["Optimiser>", "Activations>", "Other>", "Most at once>", "When"]
    return table("A device of each stage, at the instant when it holds most", columns, rows)


def _lost(best: Plan, other: Plan) -> str:
    """Say in which part a plan loses most against the best."""
    names = dict.fromkeys([*best.parts_s, *other.parts_s])
    worse = {n: other.parts_s.get(n, 0.0) - best.parts_s.get(n, 0.0) for n in names}
    most = max(worse, key=lambda n: worse[n])
    if worse[most] <= 0:
        return "as fast"
    return f"{_said(most)} +{seconds(worse[most])}"


def _runners(plans: Sequence[Plan]) -> Html:
    best = plans[0]
    rows = [
        [
            tag("span", _short(each), class_="design"),
            seconds(each.time_s),
            f"{each.time_s / best.time_s - 1:+.2%}",
            size(each.memory_bytes),
            percent(each.mfu),
            "the fastest" if each is best else _lost(best, each),
        ]
        for each in plans[:_RUNNERS]
    ]
    columns = ["Plan", "Step>", "Slower by>", "Memory>", "MFU>", "Where it loses most"]
    return table("The fastest plans of each kind of layout", columns, rows)


def _worth(found: Explanation) -> Html:
    rows = [
        [each.what, f"{each.elasticity:+.3f} %", f"{each.doubled - 1:+.1%}"] for each in found.worth
    ]
    binds = tag("ul", *[tag("li", line) for line in found.binds])
    columns = ["Rate", "Step for +1%>", "Twice as good>"]
    caption = "Change of the step, the plan as it is; a latency that is twice as good is halved"
    return join([binds, table(caption, columns, rows)])


def _again(command: str, document: Mapping[str, Any]) -> Html:
    found = []
    if command:
        found.append(tag("pre", tag("code", command), class_="command"))
    cluster = document.get("cluster") or {}
    chip = cluster.get("chip") or {}
    fabric = cluster.get("fabric") or {}
    words = f"{count(cluster.get('devices'))} x {chip.get('name', 'chip')} on {fabric.get('name')}"
    return join([tag("p", words), *found])


def plan_page(
    model: Model,
    cluster: Cluster,
    plans: Sequence[Plan],
    command: str = "",
    proven: bool = True,
) -> str:
    """Lay plans out as one page of HTML that works offline.

    Parameters
    ----------
    model, cluster
        What is trained, and on what.
    plans
        Fastest first; the first in full, the others in a table. One alone is a prediction.
    command
        That made them.
    proven
        Whether no plan of those asked for is faster than the first.

    Returns
    -------
    str
        The page; a few hundred kilobytes, without a request and without a script of others.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> model = pf.models.load("llama2-7b")
    >>> given = {"pp": 2, "dp": 4, "global_batch": 32, "recompute": "full"}
    >>> page = plan_page(model, cluster, [pf.predict(model, cluster, given)])
    >>> "<h2>Timeline</h2>" in page
    True
    """
    best = plans[0]
    played, why = timeline(model, cluster, best), explain_plan(model, cluster, best)
    chip = cluster.chip.name if cluster.chip is not None else "chips"
    footnote = "Times are those of the cost model, not measurements."
    if cluster.chip is not None and cluster.chip.calibration.note:
        footnote += f" {cluster.chip.calibration.note}."
    several = len(plans) > 1
    verdict = (
        ("The fastest plan, proven" if proven else "The fastest plan found") if several else ""
    )
    verdict = verdict or ("Predicted" if best.over_bytes == 0 else "Predicted; it does not fit")
    sections: list[Section] = [
        ("certificate", "Answer", _summary(best, verdict, footnote)),
        ("timeline", "Timeline", _timeline(played)),
        ("parts", "Where the time goes", _parts(best)),
        ("memory", "Memory over the step", _memory(played)),
        ("stages", "Stages", _stages(best)),
        ("why", "What binds, and what each rate is worth", _worth(why)),
    ]
    if several:
        sections.append(("runners", "Why the others lost", _runners(plans)))
    problem = {"cluster": cluster.to_dict()}
    problem["cluster"]["chip"] = {"name": chip}
    problem["cluster"]["fabric"] = {"name": cluster.fabric.name}
    sections.append(("again", "To get it again", _again(command, problem)))
    title = f"{model.name} on {cluster.devices} x {chip}"
    return framed(title, "plan" if several else "prediction", sections)


def _side(name: str, played: Timeline) -> Html:
    return tag("div", tag("h3", f"{name}: {_short(played.plan)}"), timeline_drawing(played))


def compare_page(one: Timeline, other: Timeline, names: Sequence[str], command: str = "") -> str:
    """Lay two plans out side by side.

    Parameters
    ----------
    one, other
        Steps of the plans.
    names
        What to call them.
    command
        That asked for it.
    """
    found = difference(one.plan, other.plan)
    speed = found["speedup"]
    verdict = f"{names[1]} is {speed:.3f} times as fast as {names[0]}"
    head = join(
        [
            tag("p", tag("span", verdict, class_="badge good"), class_="verdict"),
            tiles(
                [
                    (f"{name}: step", seconds(played.plan.time_s))
                    for name, played in zip(names, (one, other), strict=True)
                ]
                + [
                    (f"{name}: memory", size(played.plan.memory_bytes))
                    for name, played in zip(names, (one, other), strict=True)
                ]
            ),
        ]
    )

    def rows(part: str, how: Any) -> list[list[str]]:
        return [
            [_said(n), how(a), how(b), ("\N{MINUS SIGN}" if d < 0 else "+") + how(abs(d))]
            for n, (a, b, d) in found[part].items()
        ]

    columns = ["", f"{names[0]}>", f"{names[1]}>", "Difference>"]
    fields = [[n, str(a), str(b)] for n, (a, b) in found["fields"].items() if n != "stages"]
    sections: list[Section] = [
        ("certificate", "Answer", head),
        ("timeline", "Timelines", join([_side(names[0], one), _side(names[1], other)])),
        (
            "parts",
            "Where the time goes",
            join(
                [
                    tag("h3", names[0]),
                    _parts(one.plan),
                    tag("h3", names[1]),
                    _parts(other.plan),
                    table("Seconds of a step", columns, rows("parts_s", seconds)),
                ]
            ),
        ),
        ("memory", "Memory", table("The fullest device", columns, rows("memory", size))),
        ("fields", "What differs", table("Fields", ["Field", *names], fields)),
    ]
    if command:
        sections.append(("again", "To get it again", tag("pre", tag("code", command))))
    return framed(f"{names[0]} and {names[1]}", "comparison", sections)


def write_page(text: str, path: str | Path) -> None:
    """Write a page to a file, whole or not at all.

    Raises
    ------
    InvalidInputError
        Where it cannot be written.
    """
    write_whole(path, text)
