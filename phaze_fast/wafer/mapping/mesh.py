"""Times of collectives among groups of dies on a mesh, and the load of its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.tables import Array

MESH_ALGORITHMS: tuple[str, ...] = _core.MESH_ALGORITHMS
"""Collective algorithms on a mesh; ``auto`` selects the fastest."""

_OPS = {name: code for code, name in enumerate(_core.COLLECTIVE_OPS)}
_ALGORITHMS = {name: code for code, name in enumerate(MESH_ALGORITHMS)}
_MESH_OPS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")


class Run(NamedTuple):
    """Members of a group along one axis of the mesh."""

    axis: int
    """0 along a row, 1 along a column."""
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
    """One collective over every group of a rectangle of dies."""

    op: str
    """all-reduce, reduce-scatter, all-gather or all-to-all."""
    bytes: float
    """Bytes of each die's vector, as in `mesh_collective`."""
    runs: tuple[Run, ...]
    """Runs whose product is a group."""
    rectangle: tuple[int, int, int, int]
    """The rectangle: column and row of its first die, width and height."""
    algorithm: str = "auto"
    """One of `MESH_ALGORITHMS`."""


def _code(table: dict[str, int], name: str, field: str, accepted: Sequence[str]) -> int:
    if name not in accepted:
        raise InvalidInputError(f"{field}: {name!r} is not accepted; {nearest(name, accepted)}")
    return table[name]


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
    columns = np.array(list(runs), dtype=np.int32).reshape(-1, 3)
    time_s, chosen, status = _core.mesh_collectives(
        np.array([_code(_OPS, op, "op", _MESH_OPS)], dtype=np.uint8),
        np.array([_code(_ALGORITHMS, algorithm, "algorithm", MESH_ALGORITHMS)], dtype=np.uint8),
        np.array([float(payload_bytes)]),
        np.array([0, len(columns)], dtype=np.int64),
        np.ascontiguousarray(columns[:, 0]),
        np.ascontiguousarray(columns[:, 1]),
        np.ascontiguousarray(columns[:, 2]),
        links,
    )
    if status[0]:
        raise InvalidInputError(f"mesh_collective: {_core.STATUS_SENTENCES[int(status[0])]}")
    return MeshTime(float(time_s[0]), MESH_ALGORITHMS[int(chosen[0])])


def _dead_mask(columns: int, rows: int, dead: Sequence[tuple[int, int]]) -> Array:
    mask = np.zeros(columns * rows if dead else 0, dtype=np.uint8)
    for x, y in dead:
        if not (0 <= x < columns and 0 <= y < rows):
            raise InvalidInputError(
                f"dead: ({x}, {y}) is not accepted; expected a (column, row) inside "
                f"{columns} x {rows} dies"
            )
        mask[y * columns + x] = 1
    return mask


def _dead_links_mask(
    columns: int, rows: int, dead_links: Sequence[tuple[tuple[int, int], tuple[int, int]]]
) -> Array:
    mask = np.zeros((rows, columns, 4) if dead_links else (0, 0, 4), dtype=np.uint8)
    directions = {(1, 0): 0, (-1, 0): 1, (0, 1): 2, (0, -1): 3}
    for (x, y), (u, v) in dead_links:
        inside = all(0 <= a < columns and 0 <= b < rows for a, b in ((x, y), (u, v)))
        if not inside or (u - x, v - y) not in directions:
            raise InvalidInputError(
                f"dead_links: (({x}, {y}), ({u}, {v})) is not accepted; expected two neighbours, "
                f"each a (column, row) inside {columns} x {rows} dies"
            )
        mask[y, x, directions[u - x, v - y]] = mask[v, u, directions[x - u, y - v]] = 1
    return mask.reshape(-1)


def link_loads(
    columns: int,
    rows: int,
    flows: Sequence[tuple[int, int, float]] | Array,
    dead: Sequence[tuple[int, int]] = (),
    dead_links: Sequence[tuple[tuple[int, int], tuple[int, int]]] = (),
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
    flow_rows = np.asarray(flows, dtype=np.float64).reshape(-1, 3)
    loads = _core.mesh_loads(
        columns,
        rows,
        _dead_mask(columns, rows, dead),
        _dead_links_mask(columns, rows, dead_links),
        flow_rows[:, 0].astype(np.int32),
        flow_rows[:, 1].astype(np.int32),
        np.ascontiguousarray(flow_rows[:, 2]),
    )
    return loads.reshape(rows, columns, 4)


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
    loads = _core.mesh_collective_loads(columns, rows, links, _items(groups))
    return loads.reshape(rows, columns, 4)


def _items(groups: Sequence[MeshGroup]) -> list[Any]:
    """Convert collectives to the tuples that the kernels take."""
    return [
        (
            _code(_OPS, g.op, "op", _MESH_OPS),
            _code(_ALGORITHMS, g.algorithm, "algorithm", MESH_ALGORITHMS),
            float(g.bytes),
            tuple(g.rectangle),
            [tuple(run) for run in g.runs],
        )
        for g in groups
    ]
