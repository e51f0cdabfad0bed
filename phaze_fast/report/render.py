"""Renders Jinja2 templates into pages: one HTML file that needs no network.

Templates escape every value. Style and scripts are inside the file, Plotly's (compressed) where
the page has charts, and a content security policy admits only these scripts, by their hashes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from phaze_fast.report import text
from phaze_fast.tables import needed

if TYPE_CHECKING:
    from jinja2 import Environment

_FORMATTERS = (
    *("area", "bandwidth", "cost", "count", "energy", "frequency", "percent", "rate", "ratio"),
    *("seconds", "size", "chip_differences", "chip_parts", "chip_text", "design_text"),
    *("differences", "plan_text"),
)
"""Names of the functions of `phaze_fast.report.text` that templates use as filters."""


def _is_filled(cell: object) -> bool:
    return cell is not None and str(cell) not in ("", text.MISSING)


def _filled_columns(rows: Sequence[Sequence[object]]) -> list[int]:
    """Positions of the columns in which some row has a value."""
    return [
        k for k in range(len(rows[0]) if rows else 0) if any(_is_filled(row[k]) for row in rows)
    ]


@cache
def _environment(complete: bool) -> Environment:
    from jinja2 import ChainableUndefined, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("phaze_fast.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: "" if value is None else value,
        undefined=StrictUndefined if complete else ChainableUndefined,
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {name: getattr(text, name) for name in _FORMATTERS}
    environment.filters["filled_columns"] = _filled_columns
    environment.tests |= {"finite": text.is_number, "filled": _is_filled}
    environment.globals |= {"MISSING": text.MISSING, "TIMES": text.TIMES}
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _script(source: str) -> tuple[Markup, str]:
    """Normalise a script as browsers do, and compute the hash by which the policy admits it."""
    source = source.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return Markup(source), f"'sha256-{digest}'"


def _asset(name: str) -> str:
    loader = _environment(True).loader
    assert loader is not None, "given above"
    return loader.get_source(_environment(True), name)[0]


@cache
def _plotly() -> tuple[str, str]:
    """Compress Plotly's script and write it in base 64; and compute the hash of the script."""
    offline = needed("plotly.offline", "plot", "a page with charts")
    source, digest = _script(offline.get_plotlyjs())
    return base64.b64encode(gzip.compress(source.encode(), 9, mtime=0)).decode(), digest


def render(
    template: str,
    title: str,
    kind: str,
    figures: Mapping[str, Mapping[str, Any]] | None = None,
    complete: bool = True,
    **data: Any,
) -> str:
    """Render a page.

    Parameters
    ----------
    template
        The page's template, such as ``plan``.
    title
        Title of the page.
    kind
        Kind of report, such as ``search``.
    figures
        Plotly's charts by name: ``data``, ``layout`` and ``height`` in pixels.
    complete
        Whether `data` has every field that the template reads; a missing one is an error then, and
        is left out otherwise.
    data
        Values that the template shows.

    Examples
    --------
    >>> page = render("sweep", "a < b", "sweep", points=1, states={}, complete=False)
    >>> "<h1>a &lt; b</h1>" in page
    True
    """
    environment, contents = _environment(complete), list[tuple[str, str]]()
    figures = figures or {}
    sections = environment.get_template(f"{template}.html.j2").render(
        data, contents=contents, figures=figures
    )
    script, script_hash = _script(_asset("page.js"))
    packed, packed_hash = _plotly() if figures else ("", "")
    return environment.get_template("page.html.j2").render(
        title=title,
        kind=kind,
        contents=contents,
        sections=Markup(sections),
        figures=figures,
        script=script,
        packed_plotly=packed,
        script_hashes=Markup(f"{script_hash} {packed_hash}".strip()),
        style=Markup(_asset("page.css")),
    )
