"""The page about a search: certificate, chip and plan, evidence, and how to run it again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from phaze_fast.documents import write_whole
from phaze_fast.errors import InvalidInputError, check_one_of
from phaze_fast.report.drawings import CHIP_COLOURS, chip_boxes
from phaze_fast.report.figures import (
    history_figure,
    memory_figure,
    pareto_figure,
    regret_figure,
    tornado_figure,
)
from phaze_fast.report.render import render
from phaze_fast.report.text import MISSING, chip_parts, is_number, objective, percent, seconds
from phaze_fast.report.wafer_page import is_wafer, wafer_page

Data = dict[str, Any]

_STATUSES = ("optimal", "feasible", "infeasible", "unknown")
_STEPS = {
    "rules": "widths that heads, layers or the batch do not allow",
    "memory": "the model does not fit into its devices",
    "roofline": "too slow even with every unit at its peak",
    "work": "too slow by the work of all its operators and the bytes that they move",
    "mapped": "too slow with operators mapped onto its arrays, all in parallel",
    "schedule_bound": "too slow by the bound of its layers' schedules",
    "scheduled": "too slow with its layers scheduled exactly",
    "placed": "placed in full, and not faster",
}
"""Why each step of the search rules candidates out."""


def _checked(document: object) -> Data:
    if not isinstance(document, dict):
        raise InvalidInputError(
            f"document: a {type(document).__name__} is not accepted; expected a search's document"
        )
    if is_wafer(document):
        return document
    status = document.get("status")
    check_one_of("document: status", status, _STATUSES)
    best = document.get("best")
    if status not in ("infeasible", "unknown") and not isinstance(best, dict):
        raise InvalidInputError(f"document: best: missing, though its status is {status}")
    return document


def _model_names(document: Data) -> str:
    names = [str(name) for name in document.get("models") or []] or ["the model"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _plans(design: Data) -> dict[str, Data]:
    """Collect the plan of each model of a design by the model's name."""
    plan = design.get("plan")
    return dict(design.get("plans") or ({"": plan} if plan else {}))


def _figures(document: Data) -> dict[str, Data]:
    best = document.get("best") or {}
    one_at_a_time = (document.get("information") or {}).get("one_at_a_time") or {}
    figures = {f"memory-{k}": memory_figure(plan) for k, plan in enumerate(_plans(best).values())}
    figures |= {
        "pareto": pareto_figure(document.get("pareto") or {}, best),
        "history": history_figure(document.get("history") or []),
        "regret": regret_figure(one_at_a_time),
        "tornado": tornado_figure(one_at_a_time),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _pruning(document: Data) -> Data:
    """Count the candidates that each step of the search pruned, and those that remained.

    The unit is points or chips, whichever total of the document equals the sum of the counts.
    """
    pruned = {str(k): int(v) for k, v in (document.get("pruned") or {}).items() if is_number(v)}
    ruled_out, evaluated = sum(pruned.values()), document.get("evaluated") or 0
    totals = {"points": document.get("points"), "chips": document.get("designs")}
    unit, total = next(
        (
            (unit, int(total))
            for unit, total in totals.items()
            if is_number(total) and ruled_out <= total <= ruled_out + evaluated
        ),
        ("points", None),
    )
    decades = max(1, math.ceil(math.log10(max(*pruned.values(), total or 1, 10, 10))))
    left, rows = total, []
    for step, number in pruned.items():
        left = None if left is None else left - number
        row: Data = {"step": step.replace("_", " "), "meaning": _STEPS.get(step, "")}
        row |= {"number": number, "share": number / total if total else None, "left": left}
        rows.append(row | {"length": math.log10(number) / decades if number > 0 else None})
    return {"unit": unit, "total": total, "decades": decades, "rows": rows}


# ---- layer schedules ----

_CORE_COLOURS = {"tensor": 0, "vector": 2, "network": 5}
_SEVERAL_CORES = 3
"""Colour of operators that use tensor and vector cores at once."""


def _core_kind(operator: Data) -> tuple[str, int]:
    """Name the kinds of cores that an operator uses, and choose their colour."""
    kinds = list(operator.get("cores") or {})
    colour = _CORE_COLOURS.get(kinds[0], 7) if len(kinds) == 1 else _SEVERAL_CORES
    return " and ".join(kinds) or "no", colour


def _cores_text(operator: Data | None) -> str:
    cores = (operator or {}).get("cores") or {}
    return ", ".join(f"{number} {kind}" for kind, number in cores.items()) or MISSING


def _timed_layers(design: Data, model: str) -> list[Data]:
    layers = (design.get("models") or {}).get(model) or []
    return [layer for layer in layers if is_number(layer.get("time_s")) and layer["time_s"] > 0]


def _longest(layers: list[Data]) -> str:
    """Name the kind of layer that takes most of the model's time."""
    return str(max(layers, key=lambda layer: layer["time_s"] * layer.get("count", 1))["kind"])


def _drawn(layer: Data) -> Data:
    """Add to each operator of a layer its colour and the text of its cores."""
    operators = [
        {**operator, "colour": _core_kind(operator)[1], "cores_text": _cores_text(operator)}
        for operator in layer["operators"]
    ]
    return {**layer, "operators": operators}


def _layers(document: Data) -> list[Data]:
    """Prepare the schedules of the best chip's layers, model by model."""
    designs = document.get("layers") or []
    models = []
    for name in (designs[0].get("models") or {}) if designs else {}:
        layers = _timed_layers(designs[0], name)
        if layers:
            kinds = dict.fromkeys(_core_kind(op) for layer in layers for op in layer["operators"])
            legend = [(f"c{colour}", f"{kind} cores") for kind, colour in kinds]
            model = {"name": name, "layers": [_drawn(layer) for layer in layers]}
            models.append(model | {"longest": _longest(layers), "legend": legend})
    return models


def _compared_operators(best: Data, other: Data) -> list[list[str]]:
    """Compare the operators of one layer on two chips, side by side."""
    own, others = ({op["name"]: op for op in layer["operators"]} for layer in (best, other))
    rows = []
    for name in dict.fromkeys([*own, *others]):
        a, b = own.get(name), others.get(name)
        change = b["time_s"] / a["time_s"] - 1 if a and b and a["time_s"] else None
        times = [seconds(op["time_s"]) if op else MISSING for op in (a, b)]
        row = [name, _cores_text(a), times[0], _cores_text(b), times[1]]
        rows.append([*row, percent(change, signed=True)])
    total = ["All, as scheduled", "", seconds(best["time_s"]), "", seconds(other["time_s"])]
    return [*rows, [*total, percent(other["time_s"] / best["time_s"] - 1, signed=True)]]


def _comparisons(document: Data) -> list[Data]:
    """Compare the layers of the best chip with those of the next slower one."""
    designs = document.get("layers") or []
    comparisons = []
    for model in (designs[0].get("models") or {}) if len(designs) > 1 else {}:
        pairs = [
            (best, other)
            for best in _timed_layers(designs[0], model)
            for other in _timed_layers(designs[1], model)
            if (best["kind"], best["direction"]) == (other["kind"], other["direction"])
        ]
        longest = _longest([best for best, _ in pairs]) if pairs else ""
        for best, other in pairs:
            title = f"{best['kind']}, {best['direction']}"
            if len(designs[0]["models"]) > 1:
                title = f"{model}: {title}"
            change, rows = other["time_s"] / best["time_s"] - 1, _compared_operators(best, other)
            comparison = {"title": title, "change": change, "rows": rows}
            comparisons.append(comparison | {"open": best["kind"] == longest})
    return comparisons


# ---- the page ----


def report_page(document: Data) -> str:
    """Render the document of a search, of chips or of wafers, as one page that works offline.

    Parameters
    ----------
    document
        The JSON document of a search. Parts that are missing or empty have no section.

    Returns
    -------
    str
        The page; about 2 MB where it has charts, for Plotly's script is inside, compressed.

    Raises
    ------
    InvalidInputError
        Where this is not the document of a search.

    Examples
    --------
    >>> page = report_page({"status": "infeasible", "reason": "no chip has 2 TiB", "models": ["m"]})
    >>> "no chip has 2 TiB" in page
    True
    """
    document = _checked(document)
    if is_wafer(document):
        return wafer_page(document)
    best = document.get("best") or {}
    chip = best.get("chip") or {}
    chip = chip if isinstance(chip, dict) else {"name": chip}
    designs, top = document.get("layers") or [], document.get("top") or []
    rank = designs[1].get("rank", 2) if len(designs) > 1 else 2
    inputs = (document.get("manifest") or {}).get("inputs")
    return render(
        "search",
        _model_names(document),
        "search",
        _figures(document),
        complete=False,
        document=document,
        names=_model_names(document),
        plans=_plans(best),
        chip=chip,
        chip_boxes=chip_boxes(chip),
        parts=chip_parts(chip),
        part_colours=CHIP_COLOURS,
        layers=_layers(document),
        runner_up=top[rank - 1] if len(top) >= rank else None,
        runner_up_rank=rank,
        comparisons=_comparisons(document),
        objectives=[
            (name, *objective(name))
            for name in (document.get("pareto") or {}).get("objectives") or []
        ],
        pruning=_pruning(document),
        inputs=json.dumps(inputs, indent=2, default=str, ensure_ascii=False) if inputs else "",
    )


def write_report(document: Data, path: str | Path) -> None:
    """Write the page of a search to a file, whole or not at all.

    Parameters
    ----------
    document
        The JSON document of a search.
    path
        The file; one that exists is replaced.

    Raises
    ------
    InvalidInputError
        As `report_page`, and where the file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "report.html"
    >>> write_report({"status": "infeasible", "reason": "too large", "models": ["m"]}, target)
    >>> target.exists()
    True
    """
    write_whole(path, report_page(document))
