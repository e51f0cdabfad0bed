"""Places for the stages of a pipeline between the dead dies of a wafer.

Rectangles are packed in bands: each band of rows starts where it pays and is filled from its left,
so that a dead die costs the rectangles it lies in and shifts the others. Bands of columns are tried
as well. A stage that is one die high may also be a line that bends: a piece of one long walk from
die to neighbouring die. Collectives along it use the links of the walk and no others, so that they
cost what they cost on a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from phaze_fast.hardware import Wafer

__all__ = ["Line", "is_bent", "longest_line", "room", "stage_dies", "tiles"]

Die = tuple[int, int]
Link = frozenset[Die]

_NODES = 4_000  # steps of one walk's search
_STARTS = 10  # dies that a walk is tried from
_JUMPS = 2  # times that a walk may pass through a die


@dataclass(frozen=True)
class Line:
    """A walk over the dies of a wafer that work."""

    dies: tuple[Die, ...]
    """In order; neighbours, or with one die in between whose links to both nobody else uses."""
    hops: int
    """At most so many between two of them."""


def _free_in_band(
    length: int, width: int, height: int, start: int, dead: frozenset[Die]
) -> list[int]:
    """Fill a band of rows from its left, as many as there can be."""
    blocked = {x for x, y in dead if start <= y < start + height}
    found, x = [], 0
    while x + width <= length:
        hit = max((b for b in blocked if x <= b < x + width), default=None)
        if hit is None:
            found.append(x)
            x += width
        else:
            x = hit + 1
    return found


def _bands(
    columns: int, rows: int, dead: frozenset[Die], width: int, height: int
) -> tuple[Die, ...]:
    """Choose where bands of rows start, so that most rectangles have a place; in a snake."""
    filled = [
        _free_in_band(columns, width, height, y, dead) for y in range(max(rows - height + 1, 0))
    ]
    most = [0] * (rows + 1)
    for y in reversed(range(rows)):
        taken = len(filled[y]) + most[y + height] if y < len(filled) else 0
        most[y] = max(most[y + 1], taken)
    found: list[Die] = []
    y = bands = 0
    while y < len(filled):
        if filled[y] and len(filled[y]) + most[y + height] >= most[y]:
            line = [(x, y) for x in filled[y]]
            found += line if bands % 2 == 0 else line[::-1]
            y, bands = y + height, bands + 1
        else:
            y += 1
    return tuple(found)


@lru_cache(maxsize=4096)
def _tiles(grid: Die, dead: frozenset[Die], width: int, height: int) -> tuple[Die, ...]:
    columns, rows = grid
    across = _bands(columns, rows, dead, width, height)
    turned = frozenset((y, x) for x, y in dead)
    down = tuple((x, y) for y, x in _bands(rows, columns, turned, height, width))
    return down if len(down) > len(across) else across


def tiles(wafer: Wafer, width: int, height: int) -> tuple[Die, ...]:
    """First dies of rectangles that have room between the dead dies, in a snake.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> tile = presets.wafer("dojo-tile-like")
    >>> tiles(tile, 2, 2)
    ((0, 0), (2, 0), (2, 2), (0, 2))
    >>> tiles(tile.replace(dead=((2, 2),)), 5, 2)
    ((0, 0), (0, 3))
    """
    return _tiles(wafer.grid, frozenset(wafer.dead), width, height)


def _near(die: Die) -> tuple[Die, ...]:
    x, y = die
    return ((x + 1, y), (x, y + 1), (x - 1, y), (x, y - 1))


class _Walk:
    """A search for a long walk from one die, depth first, scarce neighbours first."""

    def __init__(self, alive: frozenset[Die], start: Die, jumps: int) -> None:
        self.alive, self.jumps = alive, jumps
        self.path, self.seen = [start], {start}
        self.steps: list[list[Link]] = [[]]
        """Links that each step uses."""
        self.used: set[Link] = set()

    def _onward(self, die: Die) -> int:
        return sum(near in self.alive and near not in self.seen for near in _near(die))

    def options(self) -> list[tuple[Die, list[Link]]]:
        """Next dies and the links to them, the best last."""
        here = self.path[-1]
        next_to = [d for d in _near(here) if d in self.alive]
        steps = [
            (self._onward(d), d, [frozenset((here, d))]) for d in next_to if d not in self.seen
        ]
        found = sorted(steps, key=lambda step: (step[0], step[1]), reverse=True)
        far = []
        if sum(len(links) > 1 for links in self.steps) < self.jumps:
            for relay in next_to:
                for d in _near(relay):
                    if d in self.alive and d not in self.seen:
                        links = [frozenset((here, relay)), frozenset((relay, d))]
                        far.append((self._onward(d), d, links))
            far.sort(key=lambda step: (step[0], step[1]), reverse=True)
        return [(d, links) for _, d, links in (*far, *found) if not self.used & set(links)]

    def take(self, die: Die, links: list[Link]) -> None:
        """Go on to a die."""
        self.path.append(die)
        self.seen.add(die)
        self.steps.append(links)
        self.used.update(links)

    def back(self) -> None:
        """Take the last step back."""
        self.seen.discard(self.path.pop())
        self.used.difference_update(self.steps.pop())

    def longest(self, goal: int) -> Line:
        """Search until a walk has so many dies, or long enough."""
        best, hops = tuple(self.path), 1
        open_ones = [self.options()]
        for _ in range(_NODES):
            if not open_ones:
                break
            if open_ones[-1]:
                self.take(*open_ones[-1].pop())
                if len(self.path) > len(best):
                    best, hops = tuple(self.path), max(map(len, self.steps))
                if len(best) >= goal:
                    break
                open_ones.append(self.options())
            else:
                open_ones.pop()
                if open_ones:
                    self.back()
        return Line(best, hops)


@lru_cache(maxsize=256)
def _longest_line(grid: Die, dead: frozenset[Die]) -> Line:
    columns, rows = grid
    snake = [(x if y % 2 == 0 else columns - 1 - x, y) for y in range(rows) for x in range(columns)]
    if not dead:
        return Line(tuple(snake), 1)
    alive = frozenset(snake) - dead
    starts = sorted(alive, key=lambda d: (sum(n in alive for n in _near(d)), d))[:_STARTS]
    even = sum((x + y) % 2 == 0 for x, y in alive)
    most = min(len(alive), 2 * min(even, len(alive) - even) + 1)  # dies alternate on a mesh
    best = Line((), 1)
    for jumps, goal in ((0, most), (_JUMPS, len(alive))):
        for start in starts:
            if len(best.dies) < goal:
                found = _Walk(alive, start, jumps).longest(goal)
                best = found if len(found.dies) > len(best.dies) else best
    return best


def longest_line(wafer: Wafer) -> Line:
    """Find a walk over as many dies as it can; a snake where none is dead.

    Dies of a walk are black and white in turn, as on a chequerboard. Where one colour has more, a
    step may lead two dies on: its messages pass through the die between, over links that nothing
    else on the walk uses.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> tile = presets.wafer("dojo-tile-like")
    >>> [len(longest_line(tile.replace(dead=(die,))).dies) for die in ((0, 0), (2, 2), (1, 0))]
    [24, 24, 24]
    """
    return _longest_line(wafer.grid, frozenset(wafer.dead))


def _bends(wafer: Wafer) -> bool:
    return all(rate > 0 for rate in wafer.link_bytes_per_s)


def room(wafer: Wafer, width: int, height: int) -> int:
    """Count the stages of one shape that a wafer has room for.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> room(presets.wafer("dojo-tile-like"), 3, 1), room(presets.wafer("dojo-tile-like"), 24, 1)
    (8, 1)
    """
    straight = len(tiles(wafer, width, height))
    if height > 1 or width == 1 or not _bends(wafer):
        return straight
    return max(straight, len(longest_line(wafer).dies) // width)


def is_bent(wafer: Wafer, width: int, height: int, stages: int) -> bool:
    """Whether so many stages have room only as lines that bend."""
    return height == 1 and stages > len(tiles(wafer, width, height))


def stage_dies(wafer: Wafer, width: int, height: int, stages: int) -> tuple[tuple[Die, ...], ...]:
    """Dies of each stage, row by row of its rectangle.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> stage_dies(presets.wafer("dojo-tile-like"), 7, 1, 1)
    (((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (3, 1)),)
    """
    if is_bent(wafer, width, height, stages):
        walk = longest_line(wafer).dies
        return tuple(walk[k * width : (k + 1) * width] for k in range(stages))
    return tuple(
        tuple((x + i, y + j) for j in range(height) for i in range(width))
        for x, y in tiles(wafer, width, height)[:stages]
    )
