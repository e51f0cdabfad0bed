"""HTML in which every text is escaped: elements and tables.

Text from outside is a `str` and is escaped where it enters; only `Html`, which this package makes
itself, passes as it is.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from phaze_fast.report.words import NOTHING

__all__ = [
    "Html",
    "bar",
    "details",
    "escape",
    "facts",
    "join",
    "script_json",
    "table",
    "tag",
    "tiles",
]


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(value: object) -> Html:
    """Make text safe to stand in HTML, between tags and in quoted attributes.

    Examples
    --------
    >>> escape("<b>")
    '&lt;b&gt;'
    """
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def join(parts: Iterable[object], between: str = "") -> Html:
    """Put parts one after another, escaping those that are not HTML."""
    return Html(between.join(escape(part) for part in parts))


def tag(name: str, *inside: object, **attributes: object) -> Html:
    """Wrap parts in an element; ``class_`` is the class, ``data_x`` is ``data-x``.

    Examples
    --------
    >>> tag("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>{join(inside)}</{name}>")


def table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]], class_: str = ""
) -> Html:
    """Lay rows out under headings, in a box that scrolls sideways where the page is narrow.

    Headings that end in ``>`` are of numbers and stand right; columns without any value are left
    out; the first column names its row.
    """
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", NOTHING) for row in rows)]
    right = {i: "number" if columns[i].endswith(">") else None for i in kept}
    head = [tag("th", columns[i].rstrip(">"), scope="col", class_=right[i]) for i in kept]
    body = []
    for row in rows:
        cells = [
            tag("td", row[i], class_=right[i])
            if i != kept[0]
            else tag("th", row[i], scope="row", class_=right[i])
            for i in kept
        ]
        body.append(tag("tr", *cells))
    laid = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
        class_=class_ or None,
    )
    return tag("div", laid, class_="scroll", tabindex="0", role="region", aria_label=caption)


def facts(caption: str, pairs: Sequence[tuple[str, object]]) -> Html:
    """Lay named values out, one a line; those without a value are left out."""
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", value))
        for name, value in pairs
        if value not in ("", NOTHING)
    ]
    return tag("table", tag("caption", caption), tag("tbody", *rows), class_="facts")


def tiles(pairs: Sequence[tuple[str, object]], kind: str = "") -> Html:
    """Set named values side by side; those without a value are left out."""
    found = [
        tag("div", tag("dt", name), tag("dd", value))
        for name, value in pairs
        if value not in ("", NOTHING)
    ]
    return tag("dl", *found, class_=f"tiles {kind}".strip())


def details(summary: str, inside: object, is_open: bool = False) -> Html:
    """Fold something away under a line that says what it is."""
    opened = {"open": ""} if is_open else {}
    return tag("details", tag("summary", summary), inside, **opened)


def bar(share: float, kind: str = "") -> Html:
    """Draw a bar of a share of its track, 0 to 1."""
    wide = f"width:{100 * min(max(share, 0.0), 1.0):.3f}%"
    return tag("span", tag("span", class_=f"fill {kind}".strip(), style=wide), class_="track")


def _plain(value: Any) -> Any:
    """Leave out what JSON cannot say: numbers that are none, and infinite ones."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def script_json(value: object) -> Html:
    r"""Write data as JSON that may stand inside a script element, whatever its texts say.

    Examples
    --------
    >>> script_json({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False, default=str)
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return Html(text)
