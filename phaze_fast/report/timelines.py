"""Drawings of a step: passes of every stage over time, and the memory that each holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from phaze_fast.planning import Timeline
from phaze_fast.report.markup import Html, join, tag
from phaze_fast.report.words import seconds, size

__all__ = ["memory_drawing", "timeline_drawing"]

_MOST_PASSES = 20_000
_MOST_POINTS = 400
_WIDE = 1000.0
_COLOURS = {"F": 0, "B": 3, "I": 3, "W": 2, "F&B": 5}
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "F&B": "forward and backward together",
}


def _box(start: float, wide: float, colour: int, words: str) -> Html:
    path = f"M{start:.2f} 0h{wide:.2f}v10H{start:.2f}z"
    return Html(f'<path d="{path}" class="f{colour}"><title>{words}</title></path>')


def _lane(name: str, inside: Iterable[Html]) -> Html:
    svg = (
        f'<svg viewBox="0 0 {_WIDE:g} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{name}">{join(inside)}</svg>'
    )
    return join([tag("span", name, class_="name"), Html(svg)])


def timeline_drawing(played: Timeline, until_s: float | None = None) -> Html:
    """Draw the passes of every stage from the start to a time; hovering names each.

    Parameters
    ----------
    played
        The step.
    until_s
        Where the drawing ends; by default with the step.
    """
    plan, end = played.plan, until_s or played.plan.time_s
    shown = played.passes[played.passes["start_s"] < end]
    if len(shown) > _MOST_PASSES:
        words = f"The step has {len(shown):,} passes, too many to draw."
        return tag("p", words, class_="soft")
    lanes = []
    for stage in range(plan.pp):
        boxes = []
        for row in shown[shown["device"] == stage].tolist():
            _, code, chunk, _, micro_batch, _, start, stop = row
            letter = played.kinds[code]
            words = (
                f"{_WORDS[letter]} of micro-batch {micro_batch}"
                f"{f', chunk {chunk}' if plan.vpp > 1 else ''}: {seconds(stop - start)}, "
                f"from {seconds(start)}"
            )
            wide = _WIDE * (min(stop, end) - start) / end
            boxes.append(_box(_WIDE * start / end, wide, _COLOURS[letter], words))
        if plan.time_s > played.passes_s and played.passes_s < end:
            rest = plan.time_s - played.passes_s
            words = f"gradients and weights that nothing hides, optimiser: {seconds(rest)}"
            first = _WIDE * played.passes_s / end
            boxes.append(_box(first, _WIDE * rest / end, 7, words))
        lanes.append(_lane(f"Stage {stage}", boxes))
    scale = tag("div", tag("span", "0"), tag("span", seconds(end)), class_="scale")
    return join([tag("div", *lanes, scale, class_="lanes"), _legend(played)])


def _legend(played: Timeline) -> Html:
    letters = {played.kinds[int(code)] for code in np.unique(played.passes["kind"])}
    entries = [(_WORDS[word], _COLOURS[word]) for word in _WORDS if word in letters]
    entries.append(("gradients, weights, optimiser", 7))
    items = [tag("li", tag("span", class_=f"key c{k}"), word) for word, k in entries]
    items.append(tag("li", "empty: the stage waits", class_="soft"))
    return tag("ul", *items, class_="legend")


def memory_drawing(played: Timeline) -> Html:
    """Draw the memory of a device of every stage over the step, against what a device has."""
    plan, lanes = played.plan, []
    top = 1.05 * max(plan.limit_bytes, plan.memory_bytes)
    for stage in range(plan.pp):
        times, held = played.memory(stage)
        edges = np.linspace(0.0, plan.time_s, min(_MOST_POINTS, max(2, len(times))) + 1)
        points = []
        for begin, end in pairwise(edges.tolist()):
            inside = held[(times >= begin) & (times < end)]
            at = held[max(0, int(np.searchsorted(times, begin, side="right")) - 1)]
            most = max(float(inside.max(initial=0.0)), float(at))
            x, y = _WIDE * begin / plan.time_s, 10.0 - 10.0 * most / top
            points.append(f"{x:.1f},{y:.3f} {_WIDE * end / plan.time_s:.1f},{y:.3f}")
        limit = 10.0 - 10.0 * plan.limit_bytes / top
        line = f'<line x1="0" x2="{_WIDE:g}" y1="{limit:.3f}" y2="{limit:.3f}"/>'
        shape = f'<polyline points="0,10 {" ".join(points)} {_WIDE:g},10"/>'
        own = plan.stages[stage].memory_bytes
        lanes.append(_lane(f"Stage {stage}: {size(own)}", [Html(shape), Html(line)]))
    scale = tag("div", tag("span", "0"), tag("span", seconds(plan.time_s)), class_="scale")
    note = f"The dashed line is what a device has for the model, {size(plan.limit_bytes)}."
    drawn = tag("div", *lanes, scale, class_="lanes memory")
    return join([drawn, tag("p", note, class_="soft small")])
