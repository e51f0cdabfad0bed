"""Ways to cut a wafer into rectangles of dies, one for each pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.hardware import Wafer
from phaze_fast.wafer.mesh import Links, Run, link_loads

__all__ = ["Layout", "boundaries", "layouts", "links_of", "slots_of", "tiles"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, order=True)
class Layout:
    """Which dies hold which blocks, and how many sequences pass through at once."""

    width: int
    """Dies of a stage along a row."""
    height: int
    """Dies of a stage along a column."""
    stages: int
    """Rectangles in use, one pipeline stage each."""
    microbatch: int
    """Sequences a stage works on at once."""

    @property
    def dies(self) -> int:
        """Dies of one stage."""
        return self.width * self.height

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "rectangle": [self.width, self.height],
            "stages": self.stages,
            "microbatch": self.microbatch,
        }


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


def links_of(wafer: Wafer) -> Links:
    """Links between neighbouring dies."""
    x, y = wafer.link_bytes_per_s
    return Links(x, y, wafer.hop_latency_s)


@lru_cache(maxsize=4096)
def _tiles(
    columns: int, rows: int, dead: tuple[tuple[int, int], ...], width: int, height: int
) -> tuple[tuple[int, int], ...]:
    best: tuple[tuple[int, int], ...] = ()
    for dy in range(rows % height + 1 if height <= rows else 0):
        for dx in range(columns % width + 1 if width <= columns else 0):
            found: list[tuple[int, int]] = []
            for j in range((rows - dy) // height):
                line = [(dx + i * width, dy + j * height) for i in range((columns - dx) // width)]
                found += line if j % 2 == 0 else line[::-1]
            alive = tuple(
                (x, y)
                for x, y in found
                if not any(x <= a < x + width and y <= b < y + height for a, b in dead)
            )
            if len(alive) > len(best):
                best = alive
    return best


def tiles(wafer: Wafer, width: int, height: int) -> tuple[tuple[int, int], ...]:
    """First dies of as many rectangles as fit between the dead dies, in a snake.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> tiles(presets.wafer("dojo-tile-like"), 2, 2)
    ((0, 0), (2, 0), (2, 2), (0, 2))
    """
    columns, rows = wafer.grid
    return _tiles(columns, rows, tuple(sorted(wafer.dead)), width, height)


@lru_cache(maxsize=65536)
def _boundaries(
    grid: tuple[int, int],
    dead: tuple[tuple[int, int], ...],
    links: Links,
    shape: tuple[int, int],
    stages: int,
) -> tuple[tuple[float, float], ...]:
    columns, rows = grid
    width, height = shape
    origins = _tiles(columns, rows, dead, width, height)[:stages]
    share = 1.0 / (width * height)
    offsets = [y * columns + x for y in range(height) for x in range(width)]
    flows = []
    for (x, y), (u, v) in pairwise(origins):
        here, there = y * columns + x, v * columns + u
        flows.append([(here + o, there + o, share) for o in offsets])
        flows.append([(there + o, here + o, share) for o in offsets])
    if not flows:
        return ((0.0, 0.0),) * stages
    rate = np.array([links.x_bytes_per_s] * 2 + [links.y_bytes_per_s] * 2)
    total = link_loads(columns, rows, [f for some in flows for f in some], dead) / rate
    sends, hops = [0.0] * stages, [0] * stages
    for k in range(stages - 1):
        for way, sender in ((0, k), (1, k + 1)):
            used = link_loads(columns, rows, flows[2 * k + way], dead) > 0
            sends[sender] += float(total[used].max())
            hops[sender] += int((link_loads(columns, rows, flows[2 * k + way][:1], dead) > 0).sum())
    return tuple((rate_s, links.hop_s * count) for rate_s, count in zip(sends, hops, strict=True))


def boundaries(wafer: Wafer, layout: Layout) -> tuple[tuple[float, float], ...]:
    """Seconds per byte, and seconds besides, that each stage takes to pass tensors on, both ways.

    All stages send at once; what counts is the most loaded link on the way, and its hops.
    """
    return _boundaries(
        wafer.grid,
        tuple(sorted(wafer.dead)),
        links_of(wafer),
        (layout.width, layout.height),
        layout.stages,
    )


def layouts(wafer: Wafer, blocks: int, global_batch: int) -> Iterator[Layout]:
    """List every layout that is legal: rectangle, count of stages and micro-batch.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> tile = presets.wafer("dojo-tile-like")
    >>> sorted({layout.microbatch for layout in layouts(tile, 24, 375)})
    [1, 3, 5, 15, 25, 75, 125, 375]
    """
    columns, rows = wafer.grid
    x, y = wafer.link_bytes_per_s
    columns, rows = columns if x > 0 else 1, rows if y > 0 else 1  # no links, no groups
    microbatches = [b for b in range(1, global_batch + 1) if global_batch % b == 0]
    for height in range(1, rows + 1):
        for width in range(1, columns + 1):
            if len(slots_of(width, height)) > _core.MAX_SLOTS:
                continue
            most = min(len(tiles(wafer, width, height)), blocks, _core.MAX_MAP_STAGES)
            most = most if x > 0 and y > 0 else min(most, 1)
            for stages in range(1, most + 1):
                for microbatch in microbatches:
                    yield Layout(width, height, stages, microbatch)
