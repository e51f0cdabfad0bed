"""Sections of the page about mappings on wafers: the answer, its parts, wafers, other plans."""

from __future__ import annotations

from typing import Any

from phaze_fast.report.markup import Html, details, join, table, tag, tiles
from phaze_fast.report.wafer_figures import die_map_svg
from phaze_fast.report.words import TIMES, count, is_number, percent, ratio, seconds, size

__all__ = ["is_wafer", "wafer_names", "wafer_sections"]

Data = dict[str, Any]
Section = tuple[str, str, Html]

_SHOWN = 40
"""Wafers of a table that stand unfolded."""


def is_wafer(document: Data) -> bool:
    """Whether a document is one of ``phaze-fast wafer``."""
    return isinstance(document.get("ours"), dict) or isinstance(document.get("cases"), list)


def _cases(document: Data) -> list[Data]:
    return list(document.get("cases") or [document])


def _wafer(case: Data) -> str:
    wafer = case.get("wafer")
    return str(wafer.get("name") if isinstance(wafer, dict) else wafer)


def _name(case: Data) -> str:
    return f"{case.get('model')} on {_wafer(case)}"


def wafer_names(document: Data) -> str:
    """Name the models and wafers of a document.

    Examples
    --------
    >>> wafer_names({"model": "bertlarge", "wafer": "dram-wafer", "ours": {}})
    'bertlarge on dram-wafer'
    """
    names = list(dict.fromkeys(_name(case) for case in _cases(document)))
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _shape(layout: Data) -> str:
    sides = f" {TIMES} ".join(map(str, layout.get("rectangle") or []))
    return f"{layout.get('stages')} of {sides} dies" if sides else ""


def _answer(case: Data) -> Html:
    ours = case.get("ours") or {}
    layout = ours.get("layout") or {}
    fits = ours.get("status") == "ok"
    verdict, mood = ("Best found", "good") if fits else ("Nothing fits", "bad")
    shape = _shape(layout)
    if shape and layout.get("second_class"):
        shape = f"{shape} and {_shape(layout['second_class'])}"
    numbers = [
        ("Step", seconds(ours.get("time_s"))),
        ("Lower bound", seconds(case.get("bound"))),
        ("Gap", percent(case.get("gap"))),
        ("Memory of a die", size(ours.get("memory_bytes_per_die"))),
        ("Stages", shape),
        ("Micro-batch", count(layout.get("micro_batch"))),
        ("Model FLOPs utilisation", percent(case.get("mfu"))),
        ("Energy of a step", _joules(case.get("energy_j"))),
        ("Evaluations", count(case.get("evaluations"))),
        ("Search took", seconds(case.get("seconds"))),
    ]
    space = case.get("bound_space")
    said = [tag("p", f"The bound holds over: {space}.")] if space else []
    reason = [tag("p", str(ours.get("reason")))] if ours.get("reason") else []
    return join(
        [
            tag("p", tag("span", verdict, class_=f"badge {mood}"), class_="verdict"),
            *reason,
            tiles(numbers),
            *said,
            tag("p", "Times are those of the cost model, not measurements.", class_="soft small"),
        ]
    )


def _parts(case: Data) -> Html:
    ours = case.get("ours") or {}
    block = ours.get("block") or {}
    named = [
        ("Work of one block", block.get("compute_s")),
        ("Collectives it waits for", block.get("blocking_s")),
        ("Collectives beside its work", block.get("hidden_s")),
        ("After the last micro-batch", ours.get("tail_s")),
    ]
    rows = [
        [
            str(k),
            count(stage.get("blocks")),
            seconds(stage.get("load_s")),
            size(stage.get("memory_bytes")),
            size(stage.get("state_bytes")),
            size(stage.get("activation_bytes")),
        ]
        for k, stage in enumerate(ours.get("stages") or [])
    ]
    columns = ["Stage", "Blocks>", "Micro-batch>", "Memory>", "State>", "Activations>"]
    stages = table("Stages, per die", columns, rows) if rows else Html("")
    return join([tiles([(name, seconds(value)) for name, value in named]), stages])


def _joules(value: Any) -> str:
    if not is_number(value):
        return ""
    return f"{value / 1e3:,.2f} kJ" if value >= 1e3 else f"{value:,.1f} J"


_CAUSES = {
    "work_s": "Work of the slowest stage",
    "collectives_s": "Its collectives",
    "other_s": "Recomputation, ends of the model, sends and streams",
    "bubble_s": "Pipeline bubble",
    "tail_s": "Gradient sums and optimiser",
}


_SPENT = {
    "operators_j": "Operators",
    "optimizer_j": "Optimiser",
    "links_j": "Links between dies",
    "stream_j": "Streams from off the wafer",
    "static_j": "What flows while nothing switches",
}


def _causes(case: Data) -> Html:
    """Say where the time of a step goes, by cause and by operator, and its energy."""
    breakdown = case.get("breakdown") or {}
    times = breakdown.get("causes") or {}
    if not times:
        return Html("")
    whole = sum(times.values())
    rows = [
        [name, seconds(times.get(key)), f"{times[key] / whole:.1%}" if whole else ""]
        for key, name in _CAUSES.items()
        if key in times
    ]
    operators = [
        [
            str(row.get("operator")),
            str(row.get("part")),
            seconds(row.get("forward_s")),
            seconds(row.get("backward_s")),
            percent(row.get("of_peak")),
        ]
        for row in breakdown.get("operators") or []
    ]
    energy = case.get("energy") or {}
    spent = [[_SPENT.get(key, key), _joules(value)] for key, value in energy.items()]
    columns = ["Operator", "Part", "Forward>", "Backward>", "Of peak>"]
    return join(
        [
            table("Time of a step", ["Cause", "Time>", "Share>"], rows),
            table("Energy of a step", ["Spent on", "Energy>"], spent),
            details(
                "Operators of one micro-batch, on one die",
                table("Operators", columns, operators),
            ),
        ]
    )


def _drawn(case: Data) -> Html:
    """Draw the wafer."""
    dies, links = case.get("dies") or {}, case.get("links") or {}
    picture = die_map_svg(dies, links)
    if not picture:
        return picture
    said = (
        "Dies with the number of their stage, grey where idle, crossed out where dead. Bars "
        "between them are the two ways of a link: the darker, the longer it is busy in a step, at "
        "most "
        f"{percent(links.get('busiest'))} of it."
    )
    return join([picture, tag("p", said, class_="soft small")])


def _fault_study(case: Data) -> Html:
    """Show throughput over fault maps."""
    study = case.get("fault_study") or {}
    if not study:
        return Html("")
    numbers = [
        ("Fault maps", count(study.get("maps"))),
        ("Sequences/s, nothing dead", f"{study.get('whole_per_s', 0.0):,.1f}"),
        ("Expected", f"{study.get('expected_per_s', 0.0):,.1f}"),
        ("Worst", f"{study.get('worst_per_s', 0.0):,.1f}"),
        ("Maps with two classes of stages", count(study.get("with_two_classes"))),
    ]
    rows = [
        [
            count(row.get("spares")),
            percent(row.get("share")),
            f"{row.get('mean_per_s', 0.0):,.1f}",
            f"{row.get('least_per_s', 0.0):,.1f}",
        ]
        for row in study.get("by_spares") or []
    ]
    columns = ["Spare dies>", "Wafers that are good>", "Mean>", "Least>"]
    return join([tiles(numbers), table("Sequences per second by spares", columns, rows)])


def _wafer_rows(rows: list[Data]) -> list[list[str]]:
    return [
        [
            str(row.get("wafer")),
            f"{row.get('columns')} {TIMES} {row.get('rows')}",
            str(row.get("status")),
            seconds(row.get("mapping.time_s")),
            seconds(row.get("bound_s")),
            size(row.get("mapping.memory_bytes_per_die")),
            seconds(row.get("mapping.block.compute_s")),
            seconds(row.get("mapping.block.blocking_s")),
        ]
        for row in rows
    ]


def _wafers(case: Data) -> Html:
    rows = case.get("table") or []
    if not rows:
        return Html("")
    columns = ["Wafer", "Dies", "Status", "Step>", "Bound>", "Memory>", "Block work>", "Waits>"]
    first = table("Wafers of the space, fastest first", columns, _wafer_rows(rows[:_SHOWN]))
    if len(rows) <= _SHOWN:
        return first
    rest = table("The other wafers", columns, _wafer_rows(rows[_SHOWN:]))
    return join([first, details(f"{count(len(rows) - _SHOWN)} more", rest)])


def _front(case: Data) -> Html:
    front = case.get("front") or {}
    points = front.get("points") or []
    if not points:
        return Html("")
    rows = [
        [
            str(point.get("wafer")),
            count(point.get("dies")),
            seconds(point.get("time_s")),
            count(round(point.get("area_mm2") or 0)),
            count(round(point.get("power_w") or 0)),
            count(round(point.get("cost_usd") or 0)),
            f"{point.get('expected_per_s') or 0.0:,.4g}",
        ]
        for point in points
    ]
    columns = ["Wafer", "Dies>", "Step>", "mm2>", "W>", "$>", "Expected sequences per second>"]
    names = ", ".join(front.get("objectives") or [])
    return table(f"Wafers that no other beats in {names}, fastest first", columns, rows)


def _others(case: Data) -> Html:
    ours = (case.get("ours") or {}).get("time_s")
    plans = [
        (f"{name}, {way}", plan)
        for name, ways in (case.get("baselines") or {}).items()
        for way, plan in ways.items()
        if isinstance(plan, dict)
    ]
    ablations = (case.get("ablations") or {}).items()
    plans += [(f"ours, {name.replace('_', ' ')}", plan) for name, plan in ablations]
    if not plans:
        return Html("")
    rows = []
    for name, plan in plans:
        time_s = plan.get("time_s")
        rows.append(
            [
                name,
                seconds(time_s),
                ratio(time_s / ours) if is_number(time_s) and is_number(ours) else "",
                size(plan.get("memory_bytes_per_die")),
                str(plan.get("reason") or ""),
            ]
        )
    columns = ["Plan", "Step>", "Of ours>", "Memory of a die>", "Remark"]
    return table("Other systems' plans and ablations", columns, rows)


def wafer_sections(document: Data) -> list[Section]:
    """Build the sections of every case: anchor, heading, body; empty ones are left out."""
    cases = _cases(document)
    first = "certificate" if len(cases) == 1 else "answer-0"
    sections: list[Section] = []
    for k, case in enumerate(cases):
        where = f": {_name(case)}" if len(cases) > 1 else ""
        sections += [
            (f"answer-{k}" if k else first, f"The best mapping{where}", _answer(case)),
            (f"dies-{k}", f"Dies and links{where}", _drawn(case)),
            (f"parts-{k}", f"Parts of a step{where}", _parts(case)),
            (f"causes-{k}", f"Where time and energy go{where}", _causes(case)),
            (f"faults-{k}", f"Faults{where}", _fault_study(case)),
            (f"wafers-{k}", f"Wafers{where}", _wafers(case)),
            (f"front-{k}", f"Pareto front{where}", _front(case)),
            (f"others-{k}", f"Against other plans{where}", _others(case)),
        ]
    return [section for section in sections if section[2]]
