"""One HTML page about a search that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phaze_fast.documents import write_whole
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.report.answer import (
    best_section,
    certificate_section,
    names_of,
    plans_of,
    stages_section,
)
from phaze_fast.report.evidence import (
    baselines_section,
    history_section,
    inputs_section,
    pareto_section,
    pruning_section,
    sensitivity_section,
    top_section,
)
from phaze_fast.report.figures import history_figure, memory_figure, pareto_figure
from phaze_fast.report.frame import framed
from phaze_fast.report.layers import layer_section, operators_section
from phaze_fast.report.markup import Html, tag
from phaze_fast.report.robust import robust_section
from phaze_fast.report.wafers import is_wafer, wafer_names, wafer_sections

__all__ = ["report_page", "write_report"]

Data = dict[str, Any]

_STATUSES = ("optimal", "feasible", "infeasible")


def _check(document: object) -> Data:
    if not isinstance(document, dict):
        raise InvalidInputError(
            f"document: a {type(document).__name__} is not accepted; expected a search's document"
        )
    if is_wafer(document):
        return document
    status = document.get("status")
    if status not in _STATUSES:
        raise InvalidInputError(
            f"document: status: {status!r} is not accepted; {nearest(str(status), _STATUSES)}"
        )
    best = document.get("best")
    if status != "infeasible" and not isinstance(best, dict):
        raise InvalidInputError(f"document: best: missing, though its status is {status}")
    return document


def _placeholder(name: str, height: int, label: str) -> Html:
    return tag(
        "div",
        class_="plot",
        id=f"plot-{name}",
        role="img",
        aria_label=label,
        style=f"min-height:{height}px",
    )


class _Figures:
    """The figures of a page, each with the place where it will be drawn."""

    def __init__(self) -> None:
        self.specs: dict[str, Data] = {}

    def add(self, name: str, spec: Data | None, label: str) -> Html:
        if spec is None:
            return Html("")
        self.specs[name] = spec
        return _placeholder(name, spec["height"], label)


def _sections(document: Data, figures: _Figures) -> list[tuple[str, str, Html]]:
    """Build every section: its anchor, its heading, its body; empty ones are left out."""
    if is_wafer(document):
        return wafer_sections(document)
    best = document.get("best") or {}
    memory = {
        name: figures.add(f"memory-{k}", memory_figure(plan), "memory of every stage by term")
        for k, (name, plan) in enumerate(plans_of(best).items())
    }
    front = figures.add("pareto", pareto_figure(document.get("pareto") or {}, best), "the front")
    history = figures.add(
        "history", history_figure(document.get("history") or []), "best found and bound over time"
    )
    found = [
        ("certificate", "Certificate", certificate_section(document)),
        ("best", "The best chip and plan", best_section(document)),
        ("stages", "Stages and memory", stages_section(document, memory)),
        ("layers", "Layer schedules", layer_section(document)),
        ("operators", "Best against runner-up, operator by operator", operators_section(document)),
        ("pareto", "Pareto front", pareto_section(document, front)),
        ("pruning", "How the space was narrowed", pruning_section(document)),
        ("progress", "Bound and best over time", history_section(document, history)),
        ("baselines", "Against baselines", baselines_section(document)),
        ("sensitivity", "Sensitivity", sensitivity_section(document)),
        ("robust", "Chips that stay best", robust_section(document)),
        ("top", "The best chips", top_section(document)),
        ("inputs", "To get it again", inputs_section(document)),
    ]
    return [each for each in found if each[2]]


def report_page(document: Data) -> str:
    """Lay a search's document out as one page of HTML that works offline.

    Parameters
    ----------
    document
        What a search gives as JSON. Parts that are missing or empty have no section.

    Returns
    -------
    str
        The page; about 2 MB where it has figures, for Plotly's script is inside, compressed.

    Raises
    ------
    InvalidInputError
        Where the document is none of a search, or Plotly is needed and not installed.

    Examples
    --------
    >>> page = report_page({"status": "infeasible", "reason": "no chip has 2 TiB", "models": ["m"]})
    >>> "no chip has 2 TiB" in page
    True
    """
    document = _check(document)
    figures = _Figures()
    sections = _sections(document, figures)
    title = wafer_names(document) if is_wafer(document) else names_of(document)
    kind = "wafer" if is_wafer(document) else "search"
    return framed(title, kind, sections, figures.specs)


def write_report(document: Data, path: str | Path) -> None:
    """Write a search's page to a file, whole or not at all.

    Parameters
    ----------
    document
        What a search gives as JSON.
    path
        Where to; a file there is replaced.

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
