"""Layouts that a search has looked at, and how it ranks mappings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.layout import Layout

__all__ = ["Rank", "Tried", "assigned", "rank_of", "ranked"]

Array = np.ndarray[Any, Any]
Rank = tuple[bool, float]
"""Whether it does not fit; then the bytes it is over by, or its time. Smaller is better."""


@dataclass
class Tried:
    """One layout that was looked at."""

    layout: Layout
    bound_s: float
    rank: Rank
    operator_mappings: Any
    mapping: Any
    """The compiled layout and its mappings; None where a bound left it out or time ran out."""
    evaluations: int = 0
    kernel_s: float = 0.0
    kernel_evaluations: int = 0


def ranked(time_s: float, over_bytes: float) -> Rank:
    """Rank a step that takes so long and lacks so many bytes."""
    return (over_bytes > 0, over_bytes if over_bytes > 0 else time_s)


def rank_of(mapping: _core.Mapping) -> Rank:
    """Rank what a compiled mapping holds now."""
    score = mapping.score()[0]
    return ranked(float(score["time_s"]), float(score["over_bytes"] + score["stream_over_bytes"]))


def assigned(mapping: _core.Mapping, op_mappings: Array) -> bool:
    """Take operator mappings over where they are legal."""
    try:
        mapping.assign(op_mappings)
    except InvalidInputError:
        return False
    return True
