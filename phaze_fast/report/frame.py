"""The frame of every page: one file of HTML that makes no request.

Scripts are inside, Plotly's where a page has figures for it, and a content security policy lets
only the page's own scripts run, known by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.report.markup import Html, escape, join, script_json, tag

__all__ = ["Section", "framed"]

Section = tuple[str, str, Html]
"""Anchor, heading, body."""


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import, unused-ignore]
    except ImportError:
        raise InvalidInputError(
            "a report with figures needs Plotly: pip install 'phaze-fast[plot]'"
        ) from None
    return str(get_plotlyjs())


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text("utf-8")


def _script(text: str) -> tuple[Html, str]:
    """Give a script element, and the hash by which the page's policy knows it."""
    # As a browser reads it: its ends of lines, and no end of the element before its own.
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")
    known = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Html(f"<script>{text}</script>"), f"'sha256-{known}'"


def framed(
    title: str, kind: str, sections: Sequence[Section], figures: Mapping[str, Any] | None = None
) -> str:
    """Put sections into a page.

    Parameters
    ----------
    title
        Of the page.
    kind
        What it is about, such as ``search``.
    sections
        Anchor, heading and body of each; the first has no link.
    figures
        What Plotly draws, by name of the place.

    Raises
    ------
    InvalidInputError
        Where there are figures and Plotly is not installed.

    Examples
    --------
    >>> "<h2>One</h2>" in framed("a", "plan", [("one", "One", Html("<p>b</p>"))])
    True
    """
    scripts, known = [], []
    if figures:
        for text in (_plotly(), _asset("page.js")):
            element, key = _script(text)
            scripts.append(element)
            known.append(key)
    watcher, key = _script(_asset("watch.js"))
    bodies = [
        tag("section", tag("h2", heading), body, id=anchor, class_="card")
        for anchor, heading, body in sections
    ]
    links = [tag("a", heading, href=f"#{anchor}") for anchor, heading, _ in sections[1:]]
    return Template(_asset("page.html")).substitute(
        policy=" ".join([key, *known]),
        title=escape(title),
        kind=escape(kind),
        watcher=watcher,
        style=_asset("page.css"),
        links=join(links),
        sections=join(bodies, "\n"),
        figures=script_json(figures or {}),
        scripts=join(scripts, "\n"),
    )
