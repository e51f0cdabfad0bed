"""The page about mappings on wafers: the answer, its parts, faults, wafers, other plans."""

from __future__ import annotations

from typing import Any

from phaze_fast.report.render import render

Data = dict[str, Any]


def is_wafer(document: Data) -> bool:
    """Whether a document is one of ``phaze-fast wafer``."""
    return isinstance(document.get("ours"), dict) or isinstance(document.get("cases"), list)


def _title(case: Data) -> str:
    wafer = case.get("wafer")
    return f"{case.get('model')} on {wafer.get('name') if isinstance(wafer, dict) else wafer}"


def _other_plans(case: Data) -> list[tuple[str, Data]]:
    """Collect the plans of other systems and the ablations, each with its name."""
    plans = [
        (f"{system}, {variant}", plan)
        for system, variants in (case.get("baselines") or {}).items()
        for variant, plan in variants.items()
        if isinstance(plan, dict)
    ]
    ablations = (case.get("ablations") or {}).items()
    return plans + [(f"ours, {name.replace('_', ' ')}", plan) for name, plan in ablations]


def wafer_page(document: Data) -> str:
    """Render the document of ``phaze-fast wafer`` as one page of HTML that works offline.

    Parameters
    ----------
    document
        The JSON document, of one case or of several; parts that are missing have no section.

    Examples
    --------
    >>> page = wafer_page({"model": "bertlarge", "wafer": "dram-wafer", "ours": {"status": "ok"}})
    >>> "<h1>bertlarge on dram-wafer</h1>" in page
    True
    """
    cases = list(document.get("cases") or [document])
    titles = list(dict.fromkeys(map(_title, cases)))
    title = titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"
    shown = [case | {"title": _title(case), "other_plans": _other_plans(case)} for case in cases]
    return render("wafer", title, "wafer", complete=False, cases=shown)
