"""Pictures of a robust search: chips by constants, and a tornado of what moves the winner."""

from __future__ import annotations

from typing import Any

from phaze_fast.report.markup import Html, escape, join, tag

__all__ = ["chips_by_constants", "tornado"]

Data = dict[str, Any]

_ROW, _LABEL, _WIDE = 24, 150, 860
_HIGH = 1.2
"""A regret of this much has the fullest colour."""


def short(chip_text: str) -> str:
    """Give a chip's arrays, vector cores and buffer, without its name and HBM."""
    said = chip_text.split(": ", 1)[-1].split(", HBM")[0]
    for word in (" tensor", " lanes", "buffer "):
        said = said.replace(word, "")
    return said


def _text(x: float, y: float, said: object, anchor: str = "start", soft: bool = False) -> Html:
    kind = "soft" if soft else "ink"
    return Html(
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(said)}</text>'
    )


def _drawn(high: float, parts: list[Html], label: str, caption: str) -> Html:
    head = f'<svg viewBox="0 0 {_WIDE} {high:.0f}" role="img" aria-label="{escape(label)}">'
    return tag(
        "figure", Html(f"{head}{join(parts)}</svg>"), tag("figcaption", caption), class_="picture"
    )


def tornado(found: Data) -> Html:
    """Draw how far each constant alone moves the nominal winner's step, the widest on top."""
    rows = [row for row in found.get("constants") or [] if len(row.get("step") or []) == 2]
    rows = sorted(rows, key=lambda row: -(max(*row["step"], 1.0) - min(*row["step"], 1.0)))
    if not rows:
        return Html("")
    ends = [1.0, *(step for row in rows for step in row["step"])]
    low, high = min(ends), max(ends)
    room = max(high - low, 1e-9)
    left, wide = _LABEL + 60.0, _WIDE - _LABEL - 130.0

    def at(step: float) -> float:
        return float(left + (step - low) / room * wide)

    parts = []
    for k, row in enumerate(rows):
        y = 6.0 + k * _ROW
        parts.append(_text(_LABEL - 8, y + 15, row["constant"], "end"))
        for step, kind, name in zip(row["step"], ("f2", "f0"), ("low", "high"), strict=True):
            begin, end = sorted((at(1.0), at(step)))
            said = f"{row['constant']} at its {name} end: step {step - 1.0:+.2%}"
            parts.append(
                Html(
                    f'<rect x="{begin:.1f}" y="{y + 3:.1f}" width="{max(end - begin, 0.6):.1f}" '
                    f'height="{_ROW - 8}" class="{kind}"><title>{escape(said)}</title></rect>'
                )
            )
        furthest = max(row["step"], key=lambda step: abs(step - 1.0))
        side = "start" if furthest >= 1.0 else "end"
        x = at(furthest) + (5 if furthest >= 1.0 else -5)
        parts.append(_text(x, y + 15, f"{furthest - 1.0:+.1%}", side, soft=True))
    bottom = 6.0 + len(rows) * _ROW
    middle = at(1.0)
    parts.append(
        Html(f'<line x1="{middle:.1f}" x2="{middle:.1f}" y1="4" y2="{bottom:.1f}" class="axis"/>')
    )
    parts.append(_text(middle, bottom + 15, "nominal step", "middle", soft=True))
    caption = (
        "Step of the nominal winner with one constant at its low (green) or high (blue) end, all "
        "others nominal; where an area no longer fits, slower by the part that is too much."
    )
    return _drawn(bottom + 22, parts, "tornado of sensitivities", caption)


def chips_by_constants(found: Data) -> Html:
    """Draw the regret of each chip that is best somewhere, constant by constant."""
    chips, rows = found.get("chips") or [], found.get("constants") or []
    if not chips or not rows:
        return Html("")
    label, top = 300.0, 118.0
    cell = (_WIDE - label - 70.0) / len(rows)
    parts = []
    for k, row in enumerate(rows):
        x = label + (k + 0.5) * cell
        name = escape(row["constant"])
        parts.append(
            Html(
                f'<text transform="translate({x:.1f} {top - 6:.1f}) rotate(-50)" '
                f'class="ink">{name}</text>'
            )
        )
    names = {0: "nominal: ", 1: "robust: " if found.get("robust") else ""}
    for i, chip in enumerate(chips):
        y = top + i * _ROW
        parts.append(_text(label - 8, y + 16, names.get(i, "") + short(chip), "end"))
        for k, row in enumerate(rows):
            regret = row["regret"][i]
            share = min(max((regret - 1.0) / (_HIGH - 1.0), 0.0), 1.0)
            said = f"{short(chip)}, {row['constant']}: regret {regret:.3f}"
            x = label + k * cell
            parts.append(
                Html(
                    f'<rect x="{x + 1:.1f}" y="{y + 1:.1f}" width="{cell - 2:.1f}" '
                    f'height="{_ROW - 2}" class="cell" fill-opacity="{0.06 + 0.84 * share:.3f}">'
                    f"<title>{escape(said)}</title></rect>"
                )
            )
            dark = "light" if share > 0.55 else "ink"
            parts.append(
                Html(
                    f'<text x="{x + cell / 2:.1f}" y="{y + 16:.1f}" text-anchor="middle" '
                    f'class="{dark} small">{regret:.2f}</text>'
                )
            )
    caption = (
        "Regret of chips that are best somewhere (rows) at the worse end of each constant "
        "(columns), all others nominal: 1.00 is the best chip there. Chips as arrays, vector cores "
        "and buffer."
    )
    return _drawn(top + len(chips) * _ROW + 6, parts, "regret of chips by constant", caption)
