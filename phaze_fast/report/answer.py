"""The first half of a search's page: certificate and answer."""

from __future__ import annotations

from typing import Any

from phaze_fast.report.drawing import COLOUR_OF, chip_drawing
from phaze_fast.report.figures import COLOURS
from phaze_fast.report.markup import Html, details, escape, join, table, tag, tiles
from phaze_fast.report.words import (
    NOTHING,
    TIMES,
    area,
    chip_facts,
    chip_text,
    cost,
    count,
    energy,
    is_number,
    percent,
    plan_text,
    rate,
    seconds,
    size,
)

__all__ = ["best_section", "certificate_section", "names_of", "plans_of", "stages_section"]

Data = dict[str, Any]

_VERDICTS = {
    "optimal": ("Proven optimal", "good"),
    "feasible": ("Best found, not proven", "warn"),
    "infeasible": ("No design fits", "bad"),
}
_OPEN_STAGES = 16
"""Up to so many stages their table is shown unfolded."""


def names_of(document: Data) -> str:
    """Name the models of a document, as a sentence would."""
    names = [str(name) for name in document.get("models") or []] or ["the model"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def plans_of(design: Data) -> dict[str, Data]:
    """Give the plan of each model of a design."""
    plans = design.get("plans") or {}
    plan = design.get("plan")
    return dict(plans) if plans else ({"": plan} if plan else {})


def _asked(document: Data) -> Html:
    manifest = document.get("manifest") or {}
    devices = ((manifest.get("inputs") or {}).get("cluster") or {}).get("devices")
    where = f" on {count(devices)} devices" if is_number(devices) else ""
    chips, points = document.get("designs"), document.get("points")
    among = f", among {count(chips)} chips" if is_number(chips) else ""
    each = f", {count(points)} points in all" if is_number(points) else ""
    return join(
        [
            "Which chip, and which parallel plan on it, trains ",
            tag("b", names_of(document)),
            f" fastest{where}{among}{each}?",
        ]
    )


def _proof(document: Data) -> str:
    status = document["status"]
    if status == "infeasible":
        return str(document.get("reason") or "no design holds the models in its memory")
    bound, gap = seconds(document.get("bound")), percent(document.get("gap"))
    looked = count(document.get("evaluated"))
    if status == "optimal":
        return (
            f"Evaluated in full: {looked}. Every other point is ruled out: a lower bound on its "
            f"time is no better than this answer. None takes less than {bound} (gap {gap})."
        )
    return (
        f"The search ended early. Evaluated in full: {looked}; points remain that might be "
        f"faster. None takes less than {bound}, which leaves a gap of {gap}."
    )


def certificate_section(document: Data) -> Html:
    """Say what was asked, what was found, and what proves it."""
    status = document["status"]
    verdict, mood = _VERDICTS[status]
    best, manifest = document.get("best") or {}, document.get("manifest") or {}
    numbers = [
        ("Step", seconds(best.get("time_s"))),
        ("Samples / s", rate(best.get("samples_per_s"))),
        ("Lower bound", seconds(document.get("bound")) if best else NOTHING),
        ("Gap", percent(document.get("gap")) if best else NOTHING),
        ("Chips", count(document.get("designs"))),
        ("Points", count(document.get("points"))),
        ("Evaluated in full", count(document.get("evaluated"))),
        ("Search took", seconds(manifest.get("seconds"))),
    ]
    answer = [tag("dt", "Answer"), tag("dd", _answer(best))] if best else []
    why = "Why none" if status == "infeasible" else "Proof" if status == "optimal" else "How sure"
    text = tag(
        "dl",
        tag("dt", "Asked"),
        tag("dd", _asked(document)),
        *answer,
        tag("dt", why),
        tag("dd", _proof(document)),
        class_="sentences",
    )
    version = manifest.get("version")
    model = f"phaze_fast {version}" if version else "phaze_fast"
    footnote = f"Times are those of the cost model of {model}, not measurements."
    said = (document.get("calibration") or {}).get("note")
    footnote = f"{footnote} {said}." if said else footnote
    return join(
        [
            tag("p", tag("span", verdict, class_=f"badge {mood}"), class_="verdict"),
            text,
            tiles(numbers),
            tag("p", footnote, class_="soft small"),
        ]
    )


def _answer(best: Data) -> Html:
    chip = best.get("chip") or {}
    plans = plans_of(best)
    said = plan_text(next(iter(plans.values()))) if len(plans) == 1 else "a plan for each model"
    name = chip.get("name") if isinstance(chip, dict) else None
    first = [tag("b", name), ": "] if name else []
    return join([*first, chip_text(chip), Html("<br>"), said])


def _equation(plan: Data) -> Html:
    """Show widths as factors of the devices they use."""
    widths = [("tp", "tensor"), ("cp", "context"), ("pp", "stages"), ("dp", "replicas")]
    shown = [(k, word) for k, word in widths if k != "cp" or plan.get("cp", 1) != 1]
    terms = []
    for key, word in shown:
        number = tag("span", count(plan.get(key)), class_="big")
        terms.append(tag("span", number, tag("span", word, class_="soft"), class_="factor"))
    total = tag("span", count(plan.get("devices")), class_="big")
    devices = tag("span", total, tag("span", "devices", class_="soft"), class_="factor total")
    sign = tag("span", TIMES, class_="sign")
    equals = tag("span", "=", class_="sign")
    return tag("p", join(terms, sign), equals, devices, class_="equation")


def _plan_tiles(plan: Data) -> Html:
    chunks, expert = plan.get("vpp", 1), plan.get("ep", 1)
    schedule = str(plan.get("schedule", NOTHING))
    return tiles(
        [
            ("Step", seconds(plan.get("time_s"))),
            ("Tokens / s", rate(plan.get("tokens_per_s"))),
            ("Schedule", f"{schedule}, {chunks} chunks a stage" if chunks != 1 else schedule),
            ("Micro-batches", _micro(plan)),
            ("ZeRO", str(plan.get("zero", NOTHING))),
            ("Expert-parallel", str(expert) if expert != 1 else NOTHING),
            ("Recompute", str(plan.get("recompute", NOTHING))),
            ("Rank order", str(plan.get("rank_order", NOTHING))),
            ("Fullest device", _of_limit(plan)),
        ],
        "minor",
    )


def _micro(plan: Data) -> str:
    each = plan.get("micro_batch")
    if not is_number(each):
        return NOTHING
    word = "sequence" if each == 1 else "sequences"
    return f"{count(plan.get('micro_batches'))} of {count(each)} {word}"


def _of_limit(plan: Data) -> str:
    used, limit = plan.get("memory_bytes"), plan.get("limit_bytes")
    if not is_number(used) or not is_number(limit) or not limit:
        return size(used)
    said = [amount.replace(" ", "\N{NO-BREAK SPACE}") for amount in (size(used), size(limit))]
    return f"{said[0]} of {said[1]} ({percent(used / limit)})"


def _parts(plan: Data) -> Html:
    """Draw where the step's time goes as one bar with its legend."""
    named = enumerate((plan.get("parts_s") or {}).items())
    parts = [(k, name, spent) for k, (name, spent) in named if is_number(spent) and spent > 0]
    total = sum(spent for _, _, spent in parts)
    if not total:
        return Html("")
    segments, legend = [], []
    for k, name, spent in parts:
        said = f"{name}: {seconds(spent)}, {percent(spent / total)}"
        colour = f"c{k % COLOURS}"
        style = f"width:{100 * spent / total:.3f}%"
        segments.append(tag("span", class_=colour, style=style, title=said))
        key = tag("span", class_=f"key {colour}")
        numbers = tag("span", f"{seconds(spent)} · {percent(spent / total)}", class_="soft")
        legend.append(tag("li", key, f"{name} ", numbers))
    heading = tag("h4", "Where the step's time goes")
    bars = tag("div", *segments, class_="parts", role="img", aria_label="parts of the step")
    return join([heading, bars, tag("ul", *legend, class_="legend")])


def _chip(best: Data) -> Html:
    """Draw the chip, list its parts, and say what it costs."""
    chip = best.get("chip") or {}
    clock = chip.get("clock_hz")
    rows = []
    for part, number, *rest in chip_facts(chip):
        key = tag("span", class_=f"key c{COLOUR_OF[part]}")
        rows.append([tag("span", key, f"{number} {part}", class_="part"), *rest])
    columns = ["Part", "Each", "Together"]
    laid = table("Chip, part by part", columns, rows)
    whole = tiles(
        [
            ("Clock", f"{clock / 1e9:.4g} GHz" if is_number(clock) else NOTHING),
            ("Die area", area(best.get("area_mm2"))),
            ("Energy of a step, all devices", energy(best.get("energy_j"))),
            ("Dies and HBM of all devices", cost(best.get("cost_usd"))),
            ("Price per sample / s", _per_rate(best)),
            ("Bottleneck", str(best.get("bottleneck") or NOTHING)),
        ],
        "minor",
    )
    heading = tag("h3", "Chip", f": {chip['name']}" if chip.get("name") else "")
    return join([heading, tag("div", chip_drawing(chip), laid, class_="schematic"), whole])


def _per_rate(best: Data) -> str:
    """Say what one sequence a second costs in chips."""
    price, speed = best.get("cost_usd"), best.get("samples_per_s")
    if not is_number(price) or not is_number(speed) or speed <= 0:
        return NOTHING
    return cost(float(f"{price / speed:.3g}"))


def best_section(document: Data) -> Html:
    """Show the best chip, and the plan of each model on it."""
    best = document.get("best") or {}
    if not best:
        return Html("")
    parts = [_chip(best)]
    plans = plans_of(best)
    for name, plan in plans.items():
        heading = tag("h3", "Plan", f" of {name}" if len(plans) > 1 else "")
        parts += [heading, _equation(plan), _plan_tiles(plan), _parts(plan)]
    return join(parts)


def _kinds(stage: Data) -> str:
    kinds = stage.get("kinds") or {}
    return ", ".join(f"{n} {TIMES} {kind}" for kind, n in kinds.items()) or count(
        len(stage.get("layers") or [])
    )


def _stage_table(plan: Data) -> Html:
    limit = plan.get("limit_bytes")
    rows = []
    for k, stage in enumerate(plan.get("stages") or []):
        used = stage.get("memory_bytes")
        known = is_number(used) and is_number(limit)
        rows.append(
            [
                str(k),
                _kinds(stage),
                str(stage.get("recompute", NOTHING)),
                seconds(stage.get("load_s")),
                size(used),
                size(limit - used) if known else NOTHING,
            ]
        )
    columns = ["Stage", "Layers", "Recompute", "Per micro-batch>", "Memory>", "Free>"]
    laid = table("Stages, as one of their devices sees them", columns, rows)
    heading = "The stage as a table" if len(rows) == 1 else f"The {len(rows)} stages as a table"
    return details(heading, laid, len(rows) <= _OPEN_STAGES)


def stages_section(document: Data, figures: dict[str, Html]) -> Html:
    """Show stages and their memory, for each model."""
    plans = plans_of(document.get("best") or {})
    parts: list[Html] = []
    for name, plan in plans.items():
        if not plan.get("stages"):
            continue
        if len(plans) > 1:
            parts.append(tag("h3", name))
        parts += [figures.get(name, Html("")), _stage_table(plan)]
    return join(escape(part) for part in parts)
