"""Places for the stages of two classes, each of a shape of its own, on one or several wafers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from phaze_fast.hardware import Wafer
from phaze_fast.wafer.packing import (
    Die,
    FaultyMesh,
    Line,
    bands_in,
    bends,
    longest_line_in,
    mesh_of,
    rectangle_dies,
    regions_of,
    stage_dies,
)

__all__ = ["ClassPlaces", "Shape", "class_places"]

Shape = tuple[int, int, int]
"""Width and height of the stages of a class, and how many they are."""
Shapes = tuple[Shape, Shape]


@dataclass(frozen=True)
class ClassPlaces:
    """Where the stages of one class stand."""

    stages: tuple[tuple[Die, ...], ...]
    """Dies of each, row by row of its rectangle, or along its line."""
    hops: int
    """Of a line that bends: at most so many between two of its dies; 0 for rectangles."""
    wafers: tuple[int, ...] = ()
    """Number of the wafer that each stands on, of those of a pipeline."""


_NONE = ClassPlaces((), 0)


def _class_in(mesh: FaultyMesh, shape: Shape) -> ClassPlaces | None:
    """Rectangles in bands, else pieces of a walk."""
    width, height, count = shape
    if not count:
        return _NONE
    corners = bands_in(mesh, width, height)[:count]
    if len(corners) == count:
        return ClassPlaces(tuple(rectangle_dies(at, width, height) for at in corners), 0)
    if height > 1 or width == 1:
        return None
    alive = [part.columns * part.rows - len(part.dead) for part in regions_of(mesh)]
    if max(alive, default=0) < width * count:
        return None
    walk = longest_line_in(mesh)
    return _pieces(walk, 0, shape) if len(walk.dies) >= width * count else None


def _pieces(walk: Line, start: int, shape: Shape) -> ClassPlaces:
    width, _, count = shape
    ends = range(start, start + width * count, width)
    return ClassPlaces(tuple(walk.dies[at : at + width] for at in ends), walk.hops)


@lru_cache(maxsize=65536)
def _on_mesh(mesh: FaultyMesh, shapes: Shapes) -> tuple[ClassPlaces, ...] | None:
    for part in regions_of(mesh):
        for order in (1, -1):  # the first class where it suits it and the other around it, or vv.
            one, other = shapes[::order]
            placed = _class_in(part, one)
            if placed is None:
                continue
            taken = part.dead.union(*placed.stages)
            beside = _class_in(FaultyMesh(part.columns, part.rows, taken, part.cut), other)
            if beside is not None:
                return (placed, beside)[::order]
        first, second = shapes
        used = [width * count for width, _, count in shapes]
        if max(first[1], second[1]) == 1 and sum(used) <= len(longest_line_in(part).dies):
            walk = longest_line_in(part)
            return _pieces(walk, 0, first), _pieces(walk, used[0], second)
    return None


def _behind_switches(wafer: Wafer, shapes: Shapes) -> tuple[ClassPlaces, ...] | None:
    """Take whichever dies work, row by row: only sizes count."""
    first, second = (width * count for width, _, count in shapes)
    if max(height for _, height, _ in shapes) > 1 or first + second > wafer.dies:
        return None
    (every,) = stage_dies(wafer, first + second, 1, 1)
    walk = Line(every, 0)
    return _pieces(walk, 0, shapes[0]), _pieces(walk, first, shapes[1])


def _on_one(wafer: Wafer, shapes: Shapes) -> tuple[ClassPlaces, ...] | None:
    """Find places on one wafer; a class may have no stage there."""
    if wafer.switch is not None:
        return _behind_switches(wafer, shapes)
    if sum(width * height * count for width, height, count in shapes) > wafer.dies:
        return None
    return _on_mesh(mesh_of(wafer), shapes) if bends(wafer) else None


def class_places(wafer: Wafer, shapes: Shapes, wafers: int = 1) -> tuple[ClassPlaces, ...] | None:
    """Find places for stages of two shapes; None where there are none, or a wafer has no stage.

    One class is packed as if it were alone and the other one into what is left, as rectangles or as
    pieces of a walk; or both are pieces of one walk. Of several wafers, each takes as many of the
    next stages as have a place on it. Behind switches any dies that work make up a stage.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> tile = presets.wafer("dojo-tile-like")
    >>> [len(each.stages) for each in class_places(tile, ((5, 2, 2), (5, 1, 1)))]
    [2, 1]
    >>> class_places(tile, ((5, 2, 2), (5, 2, 1))) is None
    True
    >>> [each.wafers for each in class_places(tile, ((5, 4, 1), (5, 2, 2)), 2)]
    [(0,), (1, 1)]
    """
    left = [shapes[0][2], shapes[1][2]]
    found: list[list[ClassPlaces]] = [[], []]
    for number in range(wafers):
        here = [0, 0]
        placed = None
        for which in (0, 1):
            while left[which] > here[which] and (which == 0 or left[0] == here[0]):
                more = [here[0] + (which == 0), here[1] + (which == 1)]
                one, other = ((w, h, n) for (w, h, _), n in zip(shapes, more, strict=True))
                if (tried := _on_one(wafer, (one, other))) is None:
                    break
                here, placed = more, tried
        if placed is None:
            return None
        for which in (0, 1):
            left[which] -= here[which]
            each = placed[which]
            found[which].append(ClassPlaces(each.stages, each.hops, (number,) * here[which]))
    return None if any(left) else (_joined(found[0]), _joined(found[1]))


def _joined(parts: list[ClassPlaces]) -> ClassPlaces:
    """Put the stages of a class on all wafers together; where one bends, all count as bent."""
    return ClassPlaces(
        tuple(dies for part in parts for dies in part.stages),
        max(part.hops for part in parts),
        tuple(number for part in parts for number in part.wafers),
    )
