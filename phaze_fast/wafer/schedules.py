"""Pipeline schedules on a wafer: 1F1B, interleaved runs of blocks, and ZB-H1.

Stages of one pipeline are alike but for the ends, so that a step has a closed form: with m
micro-batches, t the slowest stage and t_k, w_k what a stage and its weight gradients take,

    1F1B          m t + sum of the other t_k
    interleaved   m t + sum of the other t_k / v, sends v times as often (Narayanan et al. 2021)
    ZB-H1         m t + sum of the other max(0, t_k - 2 w_k) (Qi et al. 2024)
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["SCHEDULES", "schedule_fault", "schedules"]

SCHEDULES = ("1f1b", "zb-h1", "interleaved")
"""By name, as docs/pipelines.md describes them."""

_MOST_CHUNKS = 4


def schedule_fault(schedule: str, chunks: int, stages: int, blocks: int, batches: int) -> str:
    """Say why a pipeline cannot run so; empty where it can.

    Examples
    --------
    >>> schedule_fault("interleaved", 2, 4, 24, 8)
    ''
    >>> schedule_fault("interleaved", 2, 4, 20, 8)
    'chunks: 2 is not accepted; expected 4 stages x 2 runs to divide 20 blocks'
    """
    if schedule not in SCHEDULES:
        return f"schedule: {schedule!r} is not accepted; expected {', '.join(SCHEDULES)}"
    if schedule != "interleaved":
        return "" if chunks == 1 else f"chunks: {chunks} is not accepted; expected 1 ({schedule})"
    if not 2 <= chunks <= _MOST_CHUNKS:
        return f"chunks: {chunks} is not accepted; expected 2 to {_MOST_CHUNKS} (interleaved)"
    if blocks % (stages * chunks):
        return (
            f"chunks: {chunks} is not accepted; expected {stages} stages x {chunks} runs to "
            f"divide {blocks} blocks"
        )
    if batches % stages:
        return (
            f"schedule: interleaved is not accepted; expected {batches} micro-batches to be a "
            f"multiple of {stages} stages"
        )
    return ""


def schedules(stages: int, blocks: int, batches: int) -> Iterator[tuple[str, int]]:
    """Give every schedule of a pipeline with its runs of blocks per stage.

    Examples
    --------
    >>> list(schedules(4, 24, 8))
    [('1f1b', 1), ('zb-h1', 1), ('interleaved', 2), ('interleaved', 3)]
    >>> list(schedules(1, 24, 8))
    [('1f1b', 1)]
    """
    yield "1f1b", 1
    if stages == 1:
        return
    yield "zb-h1", 1
    if blocks % stages == 0 and batches % stages == 0:
        for chunks in range(2, _MOST_CHUNKS + 1):
            if blocks // stages % chunks == 0:
                yield "interleaved", chunks
