"""The part of a search's page about constants that are intervals."""

from __future__ import annotations

from typing import Any

from phaze_fast.report.markup import Html, facts, join, table, tag
from phaze_fast.report.robust_figures import chips_by_constants, tornado
from phaze_fast.report.words import NOTHING, count, is_number, percent, seconds

__all__ = ["robust_section"]

Data = dict[str, Any]


def _number(value: object, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if is_number(value) else NOTHING


def robust_section(document: Data) -> Html:
    """Show the chip of least largest regret, and the intervals that it is proven for."""
    robust = document.get("robust") or {}
    if not robust:
        return Html("")
    proof = "proven" if robust.get("proven") else "not proven"
    tolerance = percent(robust.get("tolerance"))
    pairs = [
        ("Chip", str(robust.get("chip_text") or NOTHING)),
        ("Largest regret, at most", f"{_number(robust.get('max_regret'))} ({proof}, {tolerance})"),
        ("Attained", _number(robust.get("attained_regret"))),
        ("No chip's is below", _number(robust.get("bound"))),
        ("Step at today's constants", seconds(robust.get("time_s"))),
        ("Against the nominal winner", percent(robust.get("cost"), signed=True)),
        ("Nominal winner's largest regret", _number(document.get("nominal_max_regret"))),
        ("Chips that may be best", count(document.get("possible_winners"))),
    ]
    parts = [facts("The chip that stays best", pairs)]
    worst = robust.get("worst_at") or {}
    left = (document.get("information") or {}).get("left_if_known") or {}
    rows = []
    for name, constant in (document.get("constants") or {}).items():
        ends = f"{constant.get('low', 0):g} to {constant.get('high', 0):g}"
        rows.append(
            [
                name,
                ends,
                f"{worst[name]:g}" if name in worst else NOTHING,
                count(left.get(name)),
                str(constant.get("source") or NOTHING),
            ]
        )
    columns = ["Constant", "Interval>", "Where it does worst>", "Left if known>", "Source"]
    parts.append(table("Constants as intervals", columns, rows))
    apart = (document.get("information") or {}).get("one_at_a_time") or {}
    parts += [part for part in (chips_by_constants(apart), tornado(apart)) if part]
    odds = (document.get("information") or {}).get("probability") or []
    if odds:
        wins = [[percent(row["share"]), tag("span", row["chip_text"])] for row in odds[:12]]
        parts.append(table("How often each chip is the best", ["Share>", "Chip"], wins))
    return join(parts)
