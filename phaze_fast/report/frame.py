"""The frame of every page: one file of HTML that makes no request.

Scripts are inside, Plotly's (compressed) where a page has figures for it, and a content security
policy lets only the page's own scripts run, known by their hashes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
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


def _as_read(text: str) -> str:
    """Give a script as a browser reads it: its ends of lines, and no end before its own."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


def _known_by(text: str) -> str:
    """Give the hash by which the page's policy knows a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _script(text: str) -> tuple[Html, str]:
    """Give a script element and its hash."""
    text = _as_read(text)
    return Html(f"<script>{text}</script>"), _known_by(text)


@lru_cache(maxsize=1)
def _packed(script: str) -> tuple[Html, str]:
    """Give Plotly as compressed data, which `page.js` unpacks, and the hash of the script."""
    text = _as_read(script)
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    element = f'<script type="application/octet-stream" id="plotly">{packed}</script>'
    return Html(element), _known_by(text)


def framed(
    title: str,
    kind: str,
    sections: Sequence[Section],
    figures: Mapping[str, Any] | None = None,
    points: bool = False,
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
    points
        Whether it has drawings of points (`phaze_fast.report.points`).

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
        for element, key in (_packed(_plotly()), _script(_asset("page.js"))):
            scripts.append(element)
            known.append(key)
    if points:
        element, key = _script(_asset("points.js"))
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
