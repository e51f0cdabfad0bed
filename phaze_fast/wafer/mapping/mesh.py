"""Times of collectives among groups of dies on a mesh, and the load of its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, check_one_of, not_accepted
from phaze_fast.tables import Array

Die = tuple[int, int]
"""A die, as its column and row."""

Link = frozenset[Die]
"""A link, as the two neighbouring dies that it joins."""

Flow = tuple[int, int, float]
"""Sending die, receiving die (both counted row by row) and bytes of a message."""

MESH_ALGORITHMS: tuple[str, ...] = _core.MESH_ALGORITHMS
"""Collective algorithms on a mesh; ``auto`` selects the fastest."""

_MESH_OPS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")


class Run(NamedTuple):
    """Members of a group along one axis of the mesh."""

    axis: int
    """Axis of the run: 0 along a row, 1 along a column."""
    size: int
    """Number of members, at least 2."""
    stride: int = 1
    """Distance from one member to the next, in dies; interleaved groups share the links."""


FABRICS = ("mesh", "switch", "summing-switch")
"""Interconnects of the dies: links to neighbours, switches, or switches that reduce."""


class Links(NamedTuple):
    """Links of a mesh, or of dies to switches."""

    x_bytes_per_s: float
    """Bandwidth of one link along a row, per direction."""
    y_bytes_per_s: float
    """Bandwidth of one link along a column, per direction."""
    hop_s: float = 0.0
    """Latency of one hop."""
    fabric: int = 0
    """Position in `FABRICS`; with switches, each die has one link of `x_bytes_per_s`."""


class MeshTime(NamedTuple):
    """Time of a collective in seconds, and its algorithm."""

    time_s: float
    algorithm: str


@dataclass(frozen=True)
class MeshGroup:
    """One collective, run at once by every group of a rectangle of dies."""

    op: str
    """Collective: all-reduce, reduce-scatter, all-gather or all-to-all."""
    bytes: float
    """Bytes of each die's vector, as in `mesh_collective`."""
    runs: tuple[Run, ...]
    """Runs whose product is a group: a run along x and one along y form a tile of dies."""
    rectangle: tuple[int, ...]
    """The rectangle: column and row of its first die, width and height."""
    algorithm: str = "auto"
    """One of `MESH_ALGORITHMS`."""


def _check_runs(runs: Sequence[Run]) -> None:
    for axis, size, stride in runs:
        good = all(isinstance(value, int | np.integer) for value in (axis, size, stride))
        if not good or axis not in (0, 1) or not (2 <= size <= 4096 and 1 <= stride <= 4096):
            raise InvalidInputError(
                f"runs: {(axis, size, stride)} is not accepted; expected an axis of 0 or 1, a size "
                "from 2 to 4096 and a stride from 1 to 4096"
            )


def mesh_collective(
    op: str, payload_bytes: float, runs: Sequence[Run], links: Links, algorithm: str = "auto"
) -> MeshTime:
    """Time a collective over groups of dies of one shape, all groups at once.

    Parameters
    ----------
    op
        all-reduce, reduce-scatter, all-gather or all-to-all.
    payload_bytes
        Bytes of each die's vector: the input of an all-reduce, a reduce-scatter or an
        all-to-all, the output of an all-gather.
    runs
        A group is the product of its runs; an empty sequence is a group of one die.
    links
        Bandwidth and latency of the mesh.
    algorithm
        One of `MESH_ALGORITHMS`; if it cannot run, ``ordered`` is used instead.

    Raises
    ------
    InvalidInputError
        If an argument is out of range.

    Examples
    --------
    Eight dies as a 2 x 4 tile, and as a line:

    >>> links = Links(1e12, 1e12)
    >>> mesh_collective("all-gather", 8e9, [Run(0, 4), Run(1, 2)], links)
    MeshTime(time_s=0.0035, algorithm='ring')
    >>> mesh_collective("all-gather", 8e9, [Run(0, 8)], links)
    MeshTime(time_s=0.007, algorithm='ordered')
    """
    _check_runs(runs)
    operation, how, size, _, plain = _item(MeshGroup(op, payload_bytes, tuple(runs), (), algorithm))
    time_s, chosen = _core.mesh_collective(operation, how, size, plain, links)
    return MeshTime(time_s, MESH_ALGORITHMS[chosen])


@dataclass(frozen=True)
class Mesh:
    """A grid of dies, with dead dies and links.

    Examples
    --------
    >>> Mesh(2, 2, frozenset({(1, 0)})).near((0, 0))
    [(0, 1)]
    """

    columns: int
    rows: int
    dead: frozenset[Die] = frozenset()
    cut: frozenset[Link] = frozenset()
    """Links that do not work."""

    @property
    def turned(self) -> Mesh:
        """The transposed grid."""
        dead = frozenset((y, x) for x, y in self.dead)
        cut = frozenset(frozenset((y, x) for x, y in link) for link in self.cut)
        return Mesh(self.rows, self.columns, dead, cut)

    def near(self, die: Die) -> list[Die]:
        """Working neighbours over working links."""
        x, y = die
        neighbours = ((x + 1, y), (x, y + 1), (x - 1, y), (x, y - 1))
        return [
            (u, v)
            for u, v in neighbours
            if 0 <= u < self.columns
            and 0 <= v < self.rows
            and (u, v) not in self.dead
            and frozenset((die, (u, v))) not in self.cut
        ]

    @cached_property
    def regions(self) -> tuple[Mesh, ...]:
        """The connected parts of the mesh, each with all other dies dead; the largest first."""
        every = {(x, y) for y in range(self.rows) for x in range(self.columns)}
        left, parts = every - self.dead, []
        while left:
            open_ones = [min(left, key=lambda d: (d[1], d[0]))]
            part = set(open_ones)
            while open_ones:
                for die in self.near(open_ones.pop()):
                    if die not in part:
                        part.add(die)
                        open_ones.append(die)
            left -= part
            parts.append(Mesh(self.columns, self.rows, frozenset(every - part), self.cut))
        return tuple(sorted(parts, key=lambda mesh: len(mesh.dead)))

    @cached_property
    def _masks(self) -> tuple[Array, Array]:
        """Masks of dead dies, and of dead links by die and direction, as the kernel takes them."""
        dies = np.zeros((self.rows, self.columns) if self.dead else (0, 0), dtype=np.uint8)
        for x, y in self.dead:
            dies[y, x] = 1
        links = np.zeros((self.rows, self.columns, 4) if self.cut else (0, 0, 4), dtype=np.uint8)
        for (x, y), (u, v) in map(sorted, self.cut):
            axis = 2 * (y != v)
            links[y, x, axis] = links[v, u, axis + 1] = 1
        return dies.reshape(-1), links.reshape(-1)

    def loads(self, flows: Sequence[Flow] | Array) -> Array:
        """Add up the bytes on each link when all flows run at once, as `link_loads` does."""
        (dead, cut), columns = self._masks, np.asarray(flows, dtype=np.float64).reshape(-1, 3).T
        source, target = (columns[k].astype(np.int32) for k in (0, 1))
        size = np.ascontiguousarray(columns[2])
        loads = _core.mesh_loads(self.columns, self.rows, dead, cut, source, target, size)
        return loads.reshape(self.rows, self.columns, 4)


def link_loads(
    columns: int,
    rows: int,
    flows: Sequence[Flow] | Array,
    dead: Sequence[Die] = (),
    dead_links: Sequence[tuple[Die, Die]] = (),
) -> Array:
    """Add up the bytes on each link when all flows run at once.

    Parameters
    ----------
    columns, rows
        Size of the mesh in dies.
    flows
        (from, to, bytes) each, or an array of such rows; dies are counted row by row.
    dead
        (column, row) of dies that routes must avoid.
    dead_links
        Pairs of neighbours, each a (column, row), whose link routes must avoid.

    Returns
    -------
    numpy.ndarray
        Bytes, shape (rows, columns, 4): links towards +x, -x, +y and -y.

    Examples
    --------
    >>> link_loads(3, 1, [(0, 2, 10.0), (1, 2, 5.0)])[0, :, 0]
    array([10., 15.,  0.])
    """
    places = f"inside {columns} x {rows} dies"
    for x, y in dead:
        if not (0 <= x < columns and 0 <= y < rows):
            raise not_accepted("dead", (x, y), f"a (column, row) {places}")
    for link in dead_links:
        (x, y), (u, v) = link
        inside = all(0 <= a < columns and 0 <= b < rows for a, b in link)
        if not inside or abs(u - x) + abs(v - y) != 1:
            raise not_accepted("dead_links", link, f"two neighbours, each a (column, row) {places}")
    return Mesh(columns, rows, frozenset(dead), frozenset(map(frozenset, dead_links))).loads(flows)


def collective_loads(columns: int, rows: int, groups: Sequence[MeshGroup], links: Links) -> Array:
    """Add up the bytes that collectives put on each link, over all their phases.

    Returns
    -------
    numpy.ndarray
        Bytes, shape (rows, columns, 4), as `link_loads` gives them.

    Examples
    --------
    >>> line = MeshGroup("all-gather", 3.0, (Run(0, 3),), (0, 0, 3, 1))
    >>> collective_loads(3, 1, [line], Links(1e12, 1e12))[0, :, 0]
    array([1., 2., 0.])
    """
    loads = _core.mesh_collective_loads(columns, rows, links, [_item(group) for group in groups])
    return loads.reshape(rows, columns, 4)


def _item(group: MeshGroup) -> tuple[Any, ...]:
    """Convert a collective to the tuple that the kernel takes."""
    check_one_of("op", group.op, _MESH_OPS)
    check_one_of("algorithm", group.algorithm, MESH_ALGORITHMS)
    codes = _core.COLLECTIVE_OPS.index(group.op), MESH_ALGORITHMS.index(group.algorithm)
    return (*codes, float(group.bytes), group.rectangle, [tuple(run) for run in group.runs])
