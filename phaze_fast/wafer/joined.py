"""What several wafers that train one model together add to a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phaze_fast.hardware import Wafer
from phaze_fast.wafer.layout import placed_boundaries
from phaze_fast.wafer.operators import PARTS

if TYPE_CHECKING:
    from phaze_fast.wafer.problem import Problem

__all__ = ["class_boundaries", "replica_sums_s"]

Dies = tuple[tuple[int, int], ...]


def replica_sums_s(problem: Problem, replicas: int, blocks: Sequence[int]) -> float:
    """Seconds in which replicas sum their gradients, in a ring over the wafers' I/O.

    Each wafer has summed those of its own dies before; the one with most parameters counts.
    `blocks` are those of each wafer of a pipeline.
    """
    wafer, work = problem.wafer, problem.work
    if wafer.io is None:
        return 0.0
    each = {part: sum(op.parameters for op in work.operators if op.part == part) for part in PARTS}
    held = [each["block"] * count for count in blocks]
    held[0] += each["before"]
    held[-1] += each["behind"]
    share_s = max(held) * problem.gradient_bytes / replicas / wafer.io.bandwidth_bytes_per_s
    return 2.0 * (replicas - 1) * (share_s + wafer.io.latency_s)


def class_boundaries(
    wafer: Wafer, placed: tuple[Dies, ...], numbers: Sequence[int], border: int
) -> list[tuple[float, float]]:
    """Seconds per byte, and seconds besides, that stages of two classes take to pass tensors on.

    Parameters
    ----------
    wafer
        One of those of a pipeline.
    placed
        Dies of each stage.
    numbers
        Of the wafer that each stage stands on; the ends of a wafer send over its I/O.
    border
        The last stage of the first class.
    """
    found: list[tuple[float, float]] = []
    for number in dict.fromkeys(numbers):
        first = numbers.index(number)
        here = placed[first : first + list(numbers).count(number)]
        found += placed_boundaries(wafer, here, border - first)
    for k in range(len(placed) - 1):
        if numbers[k] != numbers[k + 1]:
            assert wafer.io is not None  # a rule of joined wafers
            for end in (k, k + 1):
                rate_s, fixed_s = found[end]
                rate_s += 1.0 / wafer.io.bandwidth_bytes_per_s
                found[end] = (rate_s, fixed_s + wafer.io.latency_s)
    return found
