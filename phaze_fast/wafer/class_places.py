"""Places for the stages of two classes, each of a shape of its own, on one wafer."""

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
)

__all__ = ["ClassPlaces", "Shape", "class_places"]

Shape = tuple[int, int, int]
"""Width and height of the stages of a class, and how many they are."""


@dataclass(frozen=True)
class ClassPlaces:
    """Where the stages of one class stand."""

    stages: tuple[tuple[Die, ...], ...]
    """Dies of each, row by row of its rectangle, or along its line."""
    hops: int
    """Of a line that bends: at most so many between two of its dies; 0 for rectangles."""


def _class_in(mesh: FaultyMesh, shape: Shape) -> ClassPlaces | None:
    """Rectangles in bands, else pieces of a walk."""
    width, height, count = shape
    corners = bands_in(mesh, width, height)[:count]
    if len(corners) == count:
        return ClassPlaces(tuple(rectangle_dies(at, width, height) for at in corners), 0)
    if height > 1 or width == 1:
        return None
    walk = longest_line_in(mesh)
    return _pieces(walk, 0, shape) if len(walk.dies) >= width * count else None


def _pieces(walk: Line, start: int, shape: Shape) -> ClassPlaces:
    width, _, count = shape
    ends = range(start, start + width * count, width)
    return ClassPlaces(tuple(walk.dies[at : at + width] for at in ends), walk.hops)


@lru_cache(maxsize=65536)
def _class_places(mesh: FaultyMesh, shapes: tuple[Shape, Shape]) -> tuple[ClassPlaces, ...] | None:
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


def class_places(wafer: Wafer, shapes: tuple[Shape, Shape]) -> tuple[ClassPlaces, ...] | None:
    """Find places for stages of two shapes; None where there are none.

    One class is packed as if it were alone and the other one into what is left, as rectangles or as
    pieces of a walk; or both are pieces of one walk.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> tile = presets.wafer("dojo-tile-like")
    >>> [len(each.stages) for each in class_places(tile, ((5, 2, 2), (5, 1, 1)))]
    [2, 1]
    >>> class_places(tile, ((5, 2, 2), (5, 2, 1))) is None
    True
    """
    if wafer.switch is not None or not bends(wafer):
        return None
    return _class_places(mesh_of(wafer), shapes)
