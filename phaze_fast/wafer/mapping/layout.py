"""Ways to cut a wafer into rectangles or lines of dies, one for each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.hardware import Wafer
from phaze_fast.wafer.mapping.mesh import Links, Run, link_loads
from phaze_fast.wafer.mapping.packing import is_bent, longest_line, place_fault, room, stage_dies

__all__ = [
    "SCHEDULES",
    "Layout",
    "accepts_micro_batch",
    "balanced_split",
    "boundaries",
    "even_split",
    "layout_fault",
    "layouts",
    "links_of",
    "micro_batch_fault",
    "placed_boundaries",
    "refuse_micro_batch",
    "replicas_fault",
    "schedule_fault",
    "schedules",
    "slots_of",
    "stages_on",
    "weighed_split",
    "whole_runs",
]

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


@lru_cache(maxsize=4096)
def even_split(blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, alike but for one; the ends, which have more to do, get fewer."""
    base, more = divmod(blocks, stages)
    order = [*range(1, stages - 1), *([0] if stages > 1 else []), stages - 1]
    extra = set(order[:more])
    return tuple(base + (k in extra) for k in range(stages))


@lru_cache(maxsize=4096)
def weighed_split(blocks: int, stages: int, ends: tuple[float, float]) -> tuple[int, ...]:
    """Blocks of each stage so that the most that one has to do is least.

    `ends` is what the first and the last one have to do besides, in blocks; each has one block.

    Examples
    --------
    >>> weighed_split(24, 4, (0.1, 2.6))
    (6, 7, 7, 4)
    """
    if stages == 1 or blocks < stages:
        return even_split(blocks, stages)
    return balanced_split(blocks, (1.0,) * stages, ends)


@lru_cache(maxsize=65536)
def balanced_split(
    blocks: int, units: tuple[float, ...], ends: tuple[float, float]
) -> tuple[int, ...]:
    """Blocks of each stage so that the most that one has to do is least; each has one at least.

    Examples
    --------
    A stage that takes half as long for a block has twice as many:

    >>> balanced_split(12, (1.0, 1.0, 0.5), (0.0, 0.0))
    (3, 3, 6)
    """
    counts, loads = [1] * len(units), list(units)
    loads[0] += ends[0]
    loads[-1] += ends[1]
    for _ in range(blocks - len(units)):
        least = min(range(len(units)), key=lambda k: (loads[k] + units[k], k))
        counts[least] += 1
        loads[least] += units[least]
    return tuple(counts)


Array = np.ndarray[Any, Any]


@dataclass(frozen=True, order=True)
class Layout:
    """Which dies hold which blocks, and how many sequences pass through at once."""

    width: int
    """Dies of a stage along a row."""
    height: int
    """Dies of a stage along a column."""
    stages: int
    """Rectangles in use, one pipeline stage each; of joined wafers, those of one pipeline."""
    micro_batch: int
    """Sequences a stage works on at once."""
    schedule: str = "1f1b"
    """A name of `SCHEDULES`."""
    chunks: int = 1
    """Runs of blocks that a stage has; more than one where they are interleaved."""
    replicas: int = 1
    """Pipelines that share the batch out, each on as many of the joined wafers."""
    blocks: tuple[int, ...] = ()
    """Of each stage; empty where they are shared out evenly."""

    @property
    def dies(self) -> int:
        """Dies of one stage."""
        return self.width * self.height

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        found: dict[str, Any] = {
            "rectangle": [self.width, self.height],
            "stages": self.stages,
            "micro_batch": self.micro_batch,
        }
        found |= {"schedule": self.schedule} if self.schedule != "1f1b" else {}
        found |= {"chunks": self.chunks} if self.chunks > 1 else {}
        found |= {"replicas": self.replicas} if self.replicas > 1 else {}
        return found | ({"blocks": list(self.blocks)} if self.blocks else {})


def stages_on(wafer: Wafer, layout: Layout) -> int:
    """Stages that stand on each wafer: all, or those of one of several joined ones.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tiles = load_wafer("dojo-tile-like").replace(wafer_count=4)
    >>> stages_on(tiles, Layout(5, 1, 8, 1, replicas=2))
    4
    """
    return layout.stages * layout.replicas // wafer.wafer_count


_PADDING = 0.1  # of the batch, at most


def accepts_micro_batch(global_batch: int, layout: Layout) -> bool:
    """Whether a step can be cut into a layout's micro-batches.

    They divide the batch. Where the dies of a stage do not, they may also be a multiple of the
    dies, so that every die can have as many sequences: the least one for the number of
    micro-batches, with at most a tenth of the batch as padding.

    Examples
    --------
    >>> [b for b in (32, 33, 40, 80, 520, 560) if accepts_micro_batch(512, Layout(8, 5, 1, b))]
    [32, 40, 80, 520]
    """
    b = layout.micro_batch
    if b < 1 or global_batch % layout.replicas:
        return False
    global_batch //= layout.replicas
    if global_batch % b == 0:
        return True
    padded = -(-global_batch // b) * b
    if b % layout.dies or global_batch % layout.dies == 0:
        return False
    smaller = (b - layout.dies) * (padded // b)  # as many micro-batches of fewer sequences
    return smaller < global_batch and padded <= (1.0 + _PADDING) * global_batch


def micro_batch_fault(global_batch: int, layout: Layout) -> str:
    """Say what is wrong with a micro-batch."""
    share = "" if layout.replicas == 1 else f" over {layout.replicas} replicas"
    return (
        f"micro_batch: {layout.micro_batch} is not accepted; expected a divisor of the global "
        f"batch of {global_batch}{share}, or the least multiple of a stage's {layout.dies} dies "
        f"for so many micro-batches, with at most {_PADDING:.0%} of padding"
    )


def replicas_fault(wafer: Wafer, global_batch: int, replicas: int) -> str:
    """Say why there cannot be so many pipelines; empty where there can."""
    if wafer.wafer_count % replicas == 0 and global_batch % replicas == 0:
        return ""
    return (
        f"replicas: {replicas} is not accepted; expected a divisor of {wafer.wafer_count} wafers "
        f"and of the global batch of {global_batch}"
    )


def layout_fault(wafer: Wafer, blocks: int, global_batch: int, layout: Layout) -> str:
    """Say why pipelines cannot run as a layout says; empty where they can."""
    replicas = layout.replicas
    if fault := replicas_fault(wafer, global_batch, replicas):
        return fault
    if layout.stages * replicas % wafer.wafer_count:
        return (
            f"stages: {layout.stages} is not accepted; expected a multiple of the "
            f"{wafer.wafer_count // replicas} wafers of a pipeline"
        )
    sides, wafers = (layout.width, layout.height), wafer.wafer_count // replicas
    if fault := place_fault(wafer, sides, layout.stages, wafers, blocks):
        return fault
    given = layout.blocks
    bad = len(given) != layout.stages or sum(given) != blocks or min(given, default=1) < 1
    if given and (bad or layout.schedule == "interleaved"):
        return (
            f"blocks: {list(given)} is not accepted; expected at least 1 for each of "
            f"{layout.stages} stages, {blocks} in all, and no interleaved runs"
        )
    batches = -(-global_batch // replicas // layout.micro_batch)
    return schedule_fault(layout.schedule, layout.chunks, layout.stages, blocks, batches)


def refuse_micro_batch(global_batch: int, layout: Layout) -> None:
    """Refuse a micro-batch that a step cannot be cut into."""
    if not accepts_micro_batch(global_batch, layout):
        raise InvalidInputError(micro_batch_fault(global_batch, layout))


@lru_cache(maxsize=4096)
def _micro_batches(global_batch: int, dies: int) -> tuple[int, ...]:
    divisors = {b for b in range(1, global_batch + 1) if global_batch % b == 0}
    most = int(global_batch * (1.0 + _PADDING))
    multiples = range(dies, most + 1, dies)
    padded = {b for b in multiples if accepts_micro_batch(global_batch, Layout(dies, 1, 1, b))}
    return tuple(sorted(divisors | padded))


def _primes(number: int) -> list[int]:
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def slots_of(width: int, height: int) -> tuple[Run, ...]:
    """Prime factors of a rectangle's sides, from the inside out, along x and then along y.

    Examples
    --------
    >>> slots_of(4, 3)
    (Run(axis=0, size=2, stride=1), Run(axis=0, size=2, stride=2), Run(axis=1, size=3, stride=1))
    """
    found = []
    for axis, side in enumerate((width, height)):
        stride = 1
        for size in _primes(side):
            found.append(Run(axis, size, stride))
            stride *= size
    return tuple(found)


def whole_runs(width: int, height: int) -> tuple[Run, ...]:
    """All dies of a rectangle as one group.

    Examples
    --------
    >>> whole_runs(4, 3)
    (Run(axis=0, size=4, stride=1), Run(axis=1, size=3, stride=1))
    """
    return tuple(Run(axis, side, 1) for axis, side in enumerate((width, height)) if side > 1)


def links_of(wafer: Wafer, layout: Layout) -> Links:
    """Links between neighbouring dies of a stage; those of a line that bends are of both kinds.

    Where switches join the dies, the links of each to them.
    """
    x, y = wafer.link_bytes_per_s
    if wafer.switch is not None:
        return Links(x, y, wafer.hop_latency_s, 2 if wafer.switch.sums else 1)
    if not is_bent(wafer, layout.width, layout.height, stages_on(wafer, layout)):
        return Links(x, y, wafer.hop_latency_s)
    slower = min(x, y)
    return Links(slower, slower, wafer.hop_latency_s * longest_line(wafer).hops)


@lru_cache(maxsize=65536)
def _boundaries(
    grid: tuple[int, int],
    dead: tuple[tuple[int, int], ...],
    cut: tuple[tuple[tuple[int, int], tuple[int, int]], ...],
    links: Links,
    placed: tuple[tuple[tuple[int, int], ...], ...],
    chunks: int,
    border: int = -1,
) -> tuple[tuple[float, float], ...]:
    """Price what stages send; behind stage `border` they have another shape."""
    columns, rows = grid
    stages = len(placed)
    flows = []
    pairs = [(k, k + 1, chunks) for k in range(stages - 1)]
    if chunks > 1 and stages > 1:  # from the last stage's run of blocks to the first one's next
        pairs.append((stages - 1, 0, chunks - 1))
    for first, second, _ in pairs:
        pair = placed[first], placed[second]
        ways = product(*pair) if first == border else zip(*pair, strict=True)
        ends = [(v * columns + u, t * columns + s) for (u, v), (s, t) in ways]
        share = 1.0 / len(ends)
        flows.append([(a, b, share) for a, b in ends])
        flows.append([(b, a, share) for a, b in ends])
    if not flows:
        return ((0.0, 0.0),) * stages
    rate = np.array([links.x_bytes_per_s] * 2 + [links.y_bytes_per_s] * 2)

    def loads(some: list[tuple[int, int, float]]) -> Array:
        return link_loads(columns, rows, some, dead, cut)

    total = loads([f for some in flows for f in some]) / rate
    sends, hops = [0.0] * stages, [0] * stages
    for k, (first, second, times) in enumerate(pairs):
        for way, sender in ((0, first), (1, second)):
            some = flows[2 * k + way]
            sends[sender] += times * float(total[loads(some) > 0].max())
            apart = some if first == border else some[:1]  # all others are as far apart
            hops[sender] += times * max(int((loads([flow]) > 0).sum()) for flow in apart)
    return tuple((rate_s, links.hop_s * count) for rate_s, count in zip(sends, hops, strict=True))


def boundaries(wafer: Wafer, layout: Layout) -> tuple[tuple[float, float], ...]:
    """Seconds per byte, and seconds besides, that each stage takes to pass tensors on, both ways.

    All stages send at once; what counts is the most loaded link on the way, and its hops.
    """
    x, y = wafer.link_bytes_per_s
    here = stages_on(wafer, layout)
    placed = stage_dies(wafer, layout.width, layout.height, here)
    dead = tuple(sorted(wafer.dead))
    links = Links(x, y, wafer.hop_latency_s)
    alone = here == layout.stages
    chunks = layout.chunks if alone else 1
    if wafer.switch is not None:
        one = _switch_boundaries(links, [layout.dies] * here, chunks)
    else:
        one = _boundaries(wafer.grid, dead, wafer.dead_links, links, placed, chunks)
    return one if alone else _joined_boundaries(wafer, layout, one)


def _switch_boundaries(
    links: Links, sizes: Sequence[int], chunks: int
) -> tuple[tuple[float, float], ...]:
    """Over switches each die's link carries what its stage sends, on and back, and nothing else.

    Of two stages that have unequally many dies, the links of the smaller one count.
    """
    found, stages = [], len(sizes)
    for k in range(stages):
        on = chunks - (k == stages - 1) if stages > 1 else 0
        back = chunks - (k == 0) if stages > 1 else 0
        ways = ((on, sizes[(k + 1) % stages]), (back, sizes[k - 1]))
        rate_s = sum(times / (min(sizes[k], dies) * links.x_bytes_per_s) for times, dies in ways)
        found.append((rate_s, 2.0 * links.hop_s * (on + back)))
    return tuple(found)


def _joined_boundaries(
    wafer: Wafer, layout: Layout, one: tuple[tuple[float, float], ...]
) -> tuple[tuple[float, float], ...]:
    """Stages of several wafers: on each as on one, and its ends send to the next wafer.

    Runs of blocks that are interleaved pass every wafer again, from the last one to the first.
    """
    assert wafer.io is not None  # a rule of joined wafers
    here, chunks = len(one), layout.chunks
    byte_s, message_s = 1.0 / wafer.io.bandwidth_bytes_per_s, wafer.io.latency_s
    found = []
    for k in range(layout.stages):
        rate_s, fixed_s = (chunks * value for value in one[k % here])
        for end, last in ((k % here == here - 1, k == layout.stages - 1), (k % here == 0, k == 0)):
            times = (chunks - 1 if last else chunks) if end else 0
            rate_s, fixed_s = rate_s + times * byte_s, fixed_s + times * message_s
        found.append((rate_s, fixed_s))
    return tuple(found)


def placed_boundaries(
    wafer: Wafer, placed: tuple[tuple[tuple[int, int], ...], ...], border: int
) -> tuple[tuple[float, float], ...]:
    """Give what `boundaries` gives for stages that stand so, of two shapes: up to `border`, behind.

    Every die of the one sends each die of the other as much.
    """
    links = Links(*wafer.link_bytes_per_s, wafer.hop_latency_s)
    if wafer.switch is not None:
        return _switch_boundaries(links, [len(dies) for dies in placed], 1)
    dead = tuple(sorted(wafer.dead))
    return _boundaries(wafer.grid, dead, wafer.dead_links, links, placed, 1, border)


def layouts(
    wafer: Wafer, blocks: int, global_batch: int, ends: tuple[float, float] = (0.0, 0.0)
) -> Iterator[Layout]:
    """List every layout: rectangle, count of stages, micro-batch, schedule, blocks of each stage.

    Blocks are shared out evenly, and so that no stage has more to do than it must, where that is
    something else; `ends` says what stands before and behind the blocks, in blocks.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like")
    >>> every = [each for each in layouts(tile, 24, 375) if each.dies == 25]
    >>> sorted({each.micro_batch for each in every})
    [1, 3, 5, 15, 25, 75, 125, 375]
    """
    columns, rows = wafer.grid
    x, y = wafer.link_bytes_per_s
    columns, rows = columns if x > 0 else 1, rows if y > 0 else 1  # no links, no groups
    rows = 1 if wafer.switch is not None else rows  # whichever dies, they count as a line
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
    """List the layouts of one rectangle in which so many pipelines share the batch."""
    depth, share = wafer.wafer_count // replicas, global_batch // replicas
    x, y = wafer.link_bytes_per_s
    places = room(wafer, *sides) if x > 0 and y > 0 else min(room(wafer, *sides), 1)
    most = min(places * depth, blocks, _core.MAX_MAP_STAGES)
    for stages in range(depth, most + 1, depth):
        uneven = weighed_split(blocks, stages, ends)
        uneven = () if uneven == even_split(blocks, stages) else uneven
        for micro_batch in _micro_batches(share, sides[0] * sides[1]):
            for schedule, chunks in schedules(stages, blocks, -(-share // micro_batch)):
                yield Layout(*sides, stages, micro_batch, schedule, chunks, replicas)
                if uneven and schedule != "interleaved":
                    yield Layout(*sides, stages, micro_batch, schedule, chunks, replicas, uneven)
