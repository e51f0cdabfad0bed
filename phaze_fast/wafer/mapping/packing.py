"""Placement of the stages of a pipeline around the dead dies and links of a wafer.

Rectangles are packed in bands of rows: a band starts where most rectangles fit and is filled from
the left, so that a dead die or link removes the rectangles that contain it and shifts the others.
Bands of columns are tried as well. A stage that is one die high may also be a bent line: a piece of
a long path from die to neighbouring die. Collectives along it use only the links of the path, so
that they cost the same as on a straight line. If faults split a wafer, all stages lie in one
connected part. With switches any set of dies can be a stage, which counts as a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from phaze_fast.wafer.hardware.wafer import Wafer
from phaze_fast.wafer.mapping.mesh import Die, Link, Mesh

_NODES = 4_000  # node limit of one path search
_STARTS = 10  # dies from which path searches start
_JUMPS = 2  # number of steps of a path that may pass through a die


@dataclass(frozen=True)
class Line:
    """A path over working dies of a wafer."""

    dies: tuple[Die, ...]
    """Dies in path order; consecutive dies are neighbours, or have one die between them whose links
    are not used elsewhere on the path."""
    hops: int
    """Largest number of hops between consecutive dies."""


@lru_cache(maxsize=4096)
def mesh_of(wafer: Wafer) -> Mesh:
    """Return the mesh of a wafer's dies, with its dead dies and links."""
    return Mesh(*wafer.grid, frozenset(wafer.dead), frozenset(map(frozenset, wafer.dead_links)))


def _free_in_band(mesh: Mesh, width: int, height: int, start: int) -> list[int]:
    """Fill a band of rows with rectangles from the left; return their first columns."""
    band = range(start, start + height)
    # First and last columns of dead dies and links: no rectangle may contain both.
    blocked = {(x, x) for x, y in mesh.dead if y in band}
    for link in mesh.cut:
        (x, y), (u, v) = sorted(link)
        if y in band and v in band:
            blocked.add((x, u))
    first_columns, x = [], 0
    while x + width <= mesh.columns:
        hit = max((a for a, b in blocked if x <= a and b < x + width), default=None)
        if hit is None:
            first_columns.append(x)
            x += width
        else:
            x = hit + 1
    return first_columns


def _bands(mesh: Mesh, width: int, height: int) -> tuple[Die, ...]:
    """First dies of the rectangles that fit in bands of rows, in boustrophedon order."""
    rows = mesh.rows
    filled = [_free_in_band(mesh, width, height, y) for y in range(max(rows - height + 1, 0))]
    most = [0] * (rows + 1)
    for y in reversed(range(rows)):
        taken = len(filled[y]) + most[y + height] if y < len(filled) else 0
        most[y] = max(most[y + 1], taken)
    corners: list[Die] = []
    y = bands = 0
    while y < len(filled):
        if filled[y] and len(filled[y]) + most[y + height] >= most[y]:
            line = [(x, y) for x in filled[y]]
            corners += line if bands % 2 == 0 else line[::-1]
            y, bands = y + height, bands + 1
        else:
            y += 1
    return tuple(corners)


@lru_cache(maxsize=65536)
def _tiles(mesh: Mesh, width: int, height: int) -> tuple[Die, ...]:
    """First dies of rectangles in bands of rows or columns, in the region that holds the most."""
    by_region: list[tuple[Die, ...]] = []
    for part in mesh.regions:
        by_region.append(_bands(part, width, height))
        by_region.append(tuple((x, y) for y, x in _bands(part.turned, height, width)))
    return max(by_region, key=len, default=())


def tiles(wafer: Wafer, width: int, height: int) -> tuple[Die, ...]:
    """First dies of the rectangles that fit between dead dies and links, in boustrophedon order.

    No rectangle contains a dead die or link. All lie in one connected part of the wafer: if faults
    split it, in the part that holds most rectangles.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like")
    >>> tiles(tile, 2, 2)
    ((0, 0), (2, 0), (2, 2), (0, 2))
    >>> tiles(tile.replace(dead=((2, 2),)), 5, 2)
    ((0, 0), (0, 3))
    >>> tiles(tile.replace(dead_links=(((0, 0), (1, 0)),)), 4, 2)
    ((1, 0), (0, 2))
    """
    return _tiles(mesh_of(wafer), width, height)


Step = tuple[Die, tuple[Link, ...]]
"""The next die of a path, and the links that lead to it."""


@lru_cache(maxsize=1024)
def _steps_of(mesh: Mesh) -> dict[Die, tuple[list[Die], list[Step], list[Step]]]:
    """For each working die: its neighbours, steps to them, and steps over a neighbour."""
    every = ((x, y) for y in range(mesh.rows) for x in range(mesh.columns))
    near = {die: mesh.near(die) for die in every if die not in mesh.dead}
    steps_by_die = {}
    for here, next_to in near.items():
        steps: list[Step] = [(d, (frozenset((here, d)),)) for d in next_to]
        far: list[Step] = [
            (d, (frozenset((here, relay)), frozenset((relay, d))))
            for relay in next_to
            for d in near[relay]
        ]
        steps_by_die[here] = (next_to, steps, far)
    return steps_by_die


class _PathSearch:
    """Depth-first search for a long path from a die; dies with few free neighbours come first."""

    def __init__(self, mesh: Mesh, start: Die, jumps: int) -> None:
        self.near, self.jumps = _steps_of(mesh), jumps
        self.path, self.seen = [start], {start}
        self.steps: list[tuple[Link, ...]] = [()]
        """Links used by each step."""
        self.used: set[Link] = set()

    def options(self) -> list[Step]:
        """Next dies and the links to them, the most promising last."""
        _, steps, far = self.near[self.path[-1]]
        near_steps = self._sorted(steps)
        return self._sorted(far) + near_steps if self.jumps > 0 else near_steps

    def _sorted(self, steps: list[Step]) -> list[Step]:
        seen, near = self.seen, self.near
        free = [
            (sum(die not in seen for die in near[step[0]][0]), step)
            for step in steps
            if step[0] not in seen and self.used.isdisjoint(step[1])
        ]
        free.sort(key=lambda option: (option[0], option[1][0]), reverse=True)
        return [step for _, step in free]

    def take(self, die: Die, links: tuple[Link, ...]) -> None:
        """Extend the path by a die."""
        self.path.append(die)
        self.seen.add(die)
        self.steps.append(links)
        self.used.update(links)
        self.jumps -= len(links) > 1

    def back(self) -> None:
        """Undo the last step."""
        self.seen.discard(self.path.pop())
        links = self.steps.pop()
        self.used.difference_update(links)
        self.jumps += len(links) > 1

    def longest(self, goal: int) -> Line:
        """Search until a path has `goal` dies, or the node limit is reached."""
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


@lru_cache(maxsize=4096)
def longest_line_in(mesh: Mesh) -> Line:
    """Return the longest line of neighbouring live dies in any region of a mesh."""
    best = Line((), 1)
    for part in mesh.regions:
        if part.columns * part.rows - len(part.dead) > len(best.dies):
            best = max(best, _line_in(part), key=lambda line: len(line.dies))
    return best


def _line_in(mesh: Mesh) -> Line:
    columns, rows = mesh.columns, mesh.rows
    snake = [(x if y % 2 == 0 else columns - 1 - x, y) for y in range(rows) for x in range(columns)]
    steps = map(frozenset, pairwise(snake))
    if not mesh.dead and not any(step in mesh.cut for step in steps):
        return Line(tuple(snake), 1)
    alive = frozenset(snake) - mesh.dead
    starts = sorted(alive, key=lambda d: (len(mesh.near(d)), d))[:_STARTS]
    even = sum((x + y) % 2 == 0 for x, y in alive)
    most = min(len(alive), 2 * min(even, len(alive) - even) + 1)  # colours alternate along a path
    best = Line((), 1)
    for jumps, goal in ((0, most), (_JUMPS, len(alive))):
        for start in starts:
            if len(best.dies) < goal:
                path = _PathSearch(mesh, start, jumps).longest(goal)
                best = path if len(path.dies) > len(best.dies) else best
    return best


def longest_line(wafer: Wafer) -> Line:
    """Find a path over as many dies as possible; boustrophedon if no die or link is dead.

    The dies of a path alternate in colour, as on a chequerboard. If one colour has more dies, a
    step may pass through a die, over links that are not used elsewhere on the path.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like")
    >>> [len(longest_line(tile.replace(dead=(die,))).dies) for die in ((0, 0), (2, 2), (1, 0))]
    [24, 24, 24]
    """
    return longest_line_in(mesh_of(wafer))


def bends(wafer: Wafer) -> bool:
    """Whether a line of dies can bend, that is, links exist along both axes."""
    return all(rate > 0 for rate in wafer.link_bytes_per_s)


def stage_capacity(wafer: Wafer, width: int, height: int) -> int:
    """Count the stages of one shape that fit on a wafer.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> [stage_capacity(load_wafer("dojo-tile-like"), width, 1) for width in (3, 24)]
    [8, 1]
    """
    if wafer.switch is not None:
        return wafer.dies // width if height == 1 else 0
    straight = len(tiles(wafer, width, height))
    if height > 1 or width == 1 or not bends(wafer):
        return straight
    return max(straight, len(longest_line(wafer).dies) // width)


def place_fault(wafer: Wafer, sides: tuple[int, int], stages: int, wafers: int, blocks: int) -> str:
    """Return why stages of one shape do not fit on a number of wafers; empty if they do.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> place_fault(load_wafer("dojo-tile-like"), (2, 2), 5, 1, 24)
    'stages: 5 rectangles of 2 x 2 dies are not accepted; expected 1 to 4'
    """
    width, height = sides
    most = min(stage_capacity(wafer, width, height) * wafers, blocks) if min(sides) > 0 else 0
    if not most:
        grid = " x ".join(map(str, wafer.grid))
        dead = f", {len(wafer.dead)} of them dead" if wafer.dead else ""
        return (
            f"rectangle: {width} x {height} dies have no place on {wafer.name}, "
            f"a grid of {grid}{dead}"
        )
    if 1 <= stages <= most:
        return ""
    return (
        f"stages: {stages} rectangles of {width} x {height} dies are not accepted; "
        f"expected 1 to {most}"
    )


def is_bent(wafer: Wafer, width: int, height: int, stages: int) -> bool:
    """Whether so many stages of one shape fit on a wafer only as bent lines."""
    if wafer.switch is not None:
        return False
    return height == 1 and stages > len(tiles(wafer, width, height))


def stage_dies(wafer: Wafer, width: int, height: int, stages: int) -> tuple[tuple[Die, ...], ...]:
    """Dies of each stage, row by row of its rectangle.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> stage_dies(load_wafer("dojo-tile-like"), 7, 1, 1)
    (((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (3, 1)),)
    """
    if wafer.switch is not None:  # working dies, row by row
        columns, rows = wafer.grid
        every = [(x, y) for y in range(rows) for x in range(columns) if wafer.alive(x, y)]
        return tuple(tuple(every[k * width : (k + 1) * width]) for k in range(stages))
    if is_bent(wafer, width, height, stages):
        path = longest_line(wafer).dies
        return tuple(path[k * width : (k + 1) * width] for k in range(stages))
    inside = [(i, j) for j in range(height) for i in range(width)]
    corners = tiles(wafer, width, height)[:stages]
    return tuple(tuple((x + i, y + j) for i, j in inside) for x, y in corners)
