"""Layouts: which dies of a wafer form the stages of a pipeline, and how the pipeline runs.

All stages of a pipeline except the first and the last are equal, so that a step has a closed form:
with m micro-batches, v chunks per stage, t the time of the slowest stage, and t_k and w_k the times
of stage k and of its weight gradients,

    1F1B          m t + sum of the other t_k
    interleaved   m t + sum of the other t_k / v, sends v times as often (Narayanan et al. 2021)
    ZB-H1         m t + sum of the other max(0, t_k - 2 w_k) (Qi et al. 2024)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from phaze_fast import _core
from phaze_fast.memory import ScheduleName
from phaze_fast.planning.layouts import divisors
from phaze_fast.tables import picked
from phaze_fast.wafer.hardware.wafer import Wafer
from phaze_fast.wafer.mapping.mesh import Run
from phaze_fast.wafer.mapping.packing import bends, place_fault, stage_capacity

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zb-h1", "interleaved")
"""Pipeline schedules that wafers accept, as docs/pipelines.md describes them."""

_MAX_CHUNKS = 4
_MAX_PADDING = 0.1  # fraction of the batch


@dataclass(frozen=True, order=True)
class Layout:
    """Shape and number of the stages of a pipeline, its schedule and micro-batch."""

    width: int
    """Number of dies of a stage along a row."""
    height: int
    """Number of dies of a stage along a column."""
    stages: int
    """Number of stages of one pipeline; a stage is a rectangle or a line of dies."""
    micro_batch: int
    """Sequences of one micro-batch."""
    schedule: str = "1f1b"
    """Pipeline schedule, one of `SCHEDULES`."""
    chunks: int = 1
    """Model chunks per stage; more than one only if the schedule is interleaved."""
    replicas: int = 1
    """Number of data-parallel pipelines, each on an equal share of the wafers."""
    blocks: tuple[int, ...] = ()
    """Blocks of each stage; empty for an even split."""

    @property
    def dies(self) -> int:
        """Dies of one stage."""
        return self.width * self.height

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the fields that hold their default."""
        others = picked(self, "schedule", "chunks", "replicas") | {"blocks": list(self.blocks)}
        return {
            "rectangle": [self.width, self.height],
            **picked(self, "stages", "micro_batch"),
            **{name: value for name, value in others.items() if value not in ("1f1b", 1, [])},
        }


def schedule_fault(schedule: str, chunks: int, stages: int, blocks: int, batches: int) -> str:
    """Return why a pipeline cannot run a schedule; empty if it can.

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
    if not 2 <= chunks <= _MAX_CHUNKS:
        return f"chunks: {chunks} is not accepted; expected 2 to {_MAX_CHUNKS} (interleaved)"
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


@lru_cache(maxsize=65536)
def schedules(stages: int, blocks: int, batches: int) -> tuple[tuple[str, int], ...]:
    """Return every schedule of a pipeline with its chunks per stage.

    Examples
    --------
    >>> schedules(4, 24, 8)
    (('1f1b', 1), ('zb-h1', 1), ('interleaved', 2), ('interleaved', 3))
    >>> schedules(1, 24, 8)
    (('1f1b', 1),)
    """
    chunked = (("interleaved", chunks) for chunks in range(2, _MAX_CHUNKS + 1))
    every = (("1f1b", 1), ("zb-h1", 1), *chunked) if stages > 1 else (("1f1b", 1),)
    shape = (stages, blocks, batches)
    return tuple(pair for pair in every if not schedule_fault(*pair, *shape))


@lru_cache(maxsize=4096)
def even_split(blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, equal up to one; the first and last stages get the smaller number."""
    base, more = divmod(blocks, stages)
    order = [*range(1, stages - 1), *([0] if stages > 1 else []), stages - 1]
    extra = set(order[:more])
    return tuple(base + (k in extra) for k in range(stages))


@lru_cache(maxsize=4096)
def weighed_split(blocks: int, stages: int, ends: tuple[float, float]) -> tuple[int, ...]:
    """Return the blocks per stage, at least one each, that minimise the slowest stage's work.

    `ends` is the additional work of the first and the last stage, in blocks.

    Examples
    --------
    >>> weighed_split(24, 4, (0.1, 2.6))
    (6, 7, 7, 4)
    """
    if stages == 1 or blocks < stages:
        return even_split(blocks, stages)
    counts, loads = [1] * stages, [1.0] * stages
    loads[0] += ends[0]
    loads[-1] += ends[1]
    for _ in range(blocks - stages):
        least = min(range(stages), key=lambda k: (loads[k] + 1.0, k))
        counts[least] += 1
        loads[least] += 1.0
    return tuple(counts)


def stages_on(wafer: Wafer, layout: Layout) -> int:
    """Return the number of stages on each wafer.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tiles = load_wafer("dojo-tile-like").replace(wafer_count=4)
    >>> stages_on(tiles, Layout(5, 1, 8, 1, replicas=2))
    4
    """
    return layout.stages * layout.replicas // wafer.wafer_count


def micro_batch_fault(global_batch: int, layout: Layout) -> str:
    """Return why a step cannot be split into a layout's micro-batches; empty if it can.

    A micro-batch must divide the batch. If the number of dies of a stage does not divide the batch,
    it may also be a multiple of that number, so that all dies get equally many sequences: the
    smallest multiple for its number of micro-batches, with at most 10% of the batch as padding.

    Examples
    --------
    >>> [b for b in (32, 33, 40, 80, 520, 560) if not micro_batch_fault(512, Layout(8, 5, 1, b))]
    [32, 40, 80, 520]
    """
    b, share = layout.micro_batch, global_batch // layout.replicas
    if b > 0 and global_batch % layout.replicas == 0:
        padded = -(-share // b) * b
        smaller = (b - layout.dies) * (padded // b)  # as many micro-batches, each smaller
        few = smaller < share and padded <= (1.0 + _MAX_PADDING) * share
        if padded == share or (b % layout.dies == 0 < share % layout.dies and few):
            return ""
    replicas = "" if layout.replicas == 1 else f" over {layout.replicas} replicas"
    return (
        f"micro_batch: {b} is not accepted; expected a divisor of the global "
        f"batch of {global_batch}{replicas}, or the least multiple of a stage's {layout.dies} dies "
        f"for so many micro-batches, with at most {_MAX_PADDING:.0%} of padding"
    )


def replicas_fault(wafer: Wafer, global_batch: int, replicas: int) -> str:
    """Return why a number of replicas is not accepted; empty if it is."""
    if wafer.wafer_count % replicas == 0 and global_batch % replicas == 0:
        return ""
    return (
        f"replicas: {replicas} is not accepted; expected a divisor of {wafer.wafer_count} wafers "
        f"and of the global batch of {global_batch}"
    )


def layout_fault(wafer: Wafer, blocks: int, global_batch: int, layout: Layout) -> str:
    """Return why a wafer does not accept a layout; empty if it does."""
    replicas, sides = layout.replicas, (layout.width, layout.height)
    wafers = max(1, wafer.wafer_count // replicas)
    fault = (
        place_fault(wafer, sides, layout.stages, wafers, blocks)
        or micro_batch_fault(global_batch, layout)
        or replicas_fault(wafer, global_batch, replicas)
    )
    if fault:
        return fault
    if layout.stages * replicas % wafer.wafer_count:
        return (
            f"stages: {layout.stages} is not accepted; expected a multiple of the {wafers} wafers "
            "of a pipeline"
        )
    stage_blocks = layout.blocks
    bad = (
        len(stage_blocks) != layout.stages
        or sum(stage_blocks) != blocks
        or min(stage_blocks, default=1) < 1
    )
    if stage_blocks and (bad or layout.schedule == "interleaved"):
        return (
            f"blocks: {list(stage_blocks)} is not accepted; expected at least 1 for each of "
            f"{layout.stages} stages, {blocks} in all, and no interleaved runs"
        )
    batches = -(-global_batch // replicas // layout.micro_batch)
    return schedule_fault(layout.schedule, layout.chunks, layout.stages, blocks, batches)


@lru_cache(maxsize=4096)
def _micro_batches(global_batch: int, dies: int) -> tuple[int, ...]:
    multiples = range(dies, int(global_batch * (1.0 + _MAX_PADDING)) + 1, dies)
    padded = [b for b in multiples if not micro_batch_fault(global_batch, Layout(dies, 1, 1, b))]
    return tuple(sorted({*divisors(global_batch), *padded}))


def _primes(number: int) -> list[int]:
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


def slots_of(width: int, height: int) -> tuple[Run, ...]:
    """Prime factors of a rectangle's sides, from the inside out, along x and then along y.

    Examples
    --------
    >>> slots_of(4, 3)
    (Run(axis=0, size=2, stride=1), Run(axis=0, size=2, stride=2), Run(axis=1, size=3, stride=1))
    """
    slots = []
    for axis, side in enumerate((width, height)):
        stride = 1
        for size in _primes(side):
            slots.append(Run(axis, size, stride))
            stride *= size
    return tuple(slots)


def layouts(
    wafer: Wafer, blocks: int, global_batch: int, ends: tuple[float, float] = (0.0, 0.0)
) -> Iterator[Layout]:
    """List every layout: rectangle, number of stages, micro-batch, schedule, blocks of each stage.

    Blocks are split evenly and, if that differs, such that the slowest stage has least work;
    `ends` is the work of the layers before and after the blocks, in blocks.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like")
    >>> every = [layout for layout in layouts(tile, 24, 375) if layout.dies == 25]
    >>> sorted({layout.micro_batch for layout in every})
    [1, 3, 5, 15, 25, 75, 125, 375]
    """
    columns, rows = wafer.grid
    x, y = wafer.link_bytes_per_s
    columns, rows = columns if x > 0 else 1, rows if y > 0 else 1  # no links, no groups
    rows = 1 if wafer.switch is not None else rows  # any set of dies counts as a line
    for height in range(1, rows + 1):
        longest = columns if height > 1 or not (x > 0 and y > 0) else max(columns, wafer.dies)
        for width in range(1, longest + 1):
            if len(slots_of(width, height)) > _core.MAX_SLOTS:
                continue
            for replicas in range(1, wafer.wafer_count + 1):
                if wafer.wafer_count % replicas == 0 and global_batch % replicas == 0:
                    yield from _pipelines(
                        wafer, blocks, global_batch, (width, height), replicas, ends
                    )


def _pipelines(
    wafer: Wafer,
    blocks: int,
    global_batch: int,
    sides: tuple[int, int],
    replicas: int,
    ends: tuple[float, float],
) -> Iterator[Layout]:
    """List the layouts of one rectangle for one number of data-parallel pipelines."""
    depth, share = wafer.wafer_count // replicas, global_batch // replicas
    places = stage_capacity(wafer, *sides)
    places = places if bends(wafer) else min(places, 1)
    most = min(places * depth, blocks, _core.MAX_MAP_STAGES)
    for stages in range(depth, most + 1, depth):
        uneven = weighed_split(blocks, stages, ends)
        uneven = () if uneven == even_split(blocks, stages) else uneven
        for micro_batch in _micro_batches(share, sides[0] * sides[1]):
            for schedule, chunks in schedules(stages, blocks, -(-share // micro_batch)):
                yield Layout(*sides, stages, micro_batch, schedule, chunks, replicas)
                if uneven and schedule != "interleaved":
                    yield Layout(*sides, stages, micro_batch, schedule, chunks, replicas, uneven)
