"""What several wafers that train one model together add to a step."""

from __future__ import annotations

from collections.abc import Sequence

from phaze_fast.hardware import Wafer
from phaze_fast.wafer.layout import Layout, stages_on
from phaze_fast.wafer.operators import PARTS, Workload

__all__ = ["replica_sums_s"]


def replica_sums_s(
    wafer: Wafer, work: Workload, layout: Layout, blocks: Sequence[int], gradient_bytes: float
) -> float:
    """Seconds in which replicas sum their gradients, in a ring over the wafers' I/O.

    Each wafer has summed those of its own dies before; the one with most parameters counts.
    """
    if wafer.io is None:
        return 0.0
    here, replicas = stages_on(wafer, layout), layout.replicas
    each = {part: sum(op.parameters for op in work.operators if op.part == part) for part in PARTS}
    held = [each["block"] * sum(blocks[k : k + here]) for k in range(0, layout.stages, here)]
    held[0] += each["before"]
    held[-1] += each["behind"]
    share_s = max(held) * gradient_bytes / replicas / wafer.io.bandwidth_bytes_per_s
    return 2.0 * (replicas - 1) * (share_s + wafer.io.latency_s)
