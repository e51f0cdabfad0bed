"""A page about the back-test: real chips against those that the search would have built."""

from __future__ import annotations

from typing import Any

from phaze_fast.papers.backtest import FEATURES
from phaze_fast.report.figures import generations_figure
from phaze_fast.report.render import render

Data = dict[str, Any]

_FEATURES = {
    "multipliers": "multipliers",
    "array": "multipliers of one array",
    "buffer_mib": "buffer, MiB",
    "hbm_bytes_per_flop": "HBM bytes per FLOP",
    "link_bytes_per_s": "links, bytes/s",
}
"""Features of chips that are drawn over the generations of a family, and their titles."""


def backtest_page(document: Data) -> str:
    """Render the document of `phaze_fast.papers.backtest.backtest` as one page of HTML.

    Examples
    --------
    >>> from phaze_fast.papers.backtest import backtest
    >>> "TPU v2" in backtest_page(backtest(["TPU v2"], threads=1))
    True
    """
    chips = document["generations"]
    families = dict.fromkeys(chip["family"] for chip in chips)
    figures = {
        family: generations_figure([c for c in chips if c["family"] == family], _FEATURES)
        for family in families
    }
    return render(
        "backtest",
        "Back-test",
        "back-test",
        figures,
        generations=chips,
        directions=document["directions"],
        direction_names={key: name[0].upper() + name[1:] for key, name in FEATURES.items()},
        runs=document.get("runs") or [],
    )
