"""Loads that streams to and from off-wafer memory put on the links between dies.

Off-wafer memory is attached evenly to the dies at some edges of the wafer, and every die in use
reads the same amount from each of them. A byte enters at a right angle to its edge, goes straight
to the column or row of its die and then along it; at a corner shared by two edges, half of the
bytes take each direction. Writes use the opposite links of the same routes. Routes avoid dead dies
and links, as do the routes of all messages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer.hardware import Wafer
from phaze_fast.wafer.hardware.wafer import MemoryTier
from phaze_fast.wafer.mapping.layout import Layout, stages_on
from phaze_fast.wafer.mapping.mesh import link_loads
from phaze_fast.wafer.mapping.packing import stage_dies

Array = np.ndarray[Any, Any]
Die = tuple[int, int]
Dies = tuple[Die, ...]
Cut = tuple[tuple[Die, Die], ...]
_RULES = ("stream_capacity_bytes", "stream_bytes_per_s", "stream_link_s", "stream_both_s")
_TURNED = [2, 3, 0, 1]  # links towards +x, -x, +y, -y of the transposed grid


def _ports(grid: Die, edges: tuple[str, ...], dead: Dies) -> dict[Die, set[int]]:
    """Dies that carry I/O, each with the axes (0 rows, 1 columns) along which bytes enter."""
    columns, rows = grid
    at = {"left": (0, 0), "right": (0, columns - 1), "top": (1, 0), "bottom": (1, rows - 1)}
    ports: dict[Die, set[int]] = {}
    for die in ((x, y) for y in range(rows) for x in range(columns)):
        for axis, place in (at[edge] for edge in edges):
            if die[axis] == place and die not in dead:
                ports.setdefault(die, set()).add(axis)
    return ports


def _flows(columns: int, shares: dict[Die, float], used: Dies) -> Array:
    """(from, to, bytes) for every die that carries I/O and every die in use."""
    ports = np.array([y * columns + x for x, y in shares], dtype=np.float64)
    dies = np.array([y * columns + x for x, y in used], dtype=np.float64)
    flow_bytes = np.repeat(np.array(list(shares.values()), dtype=np.float64), len(dies))
    pairs = np.repeat(ports, len(dies)), np.tile(dies, len(ports))
    return np.stack([*pairs, flow_bytes], axis=1)


def _reached(grid: Die, dead: Dies, cut: Cut, die: Die, port: Die) -> bool:
    columns, rows = grid
    try:
        link_loads(columns, rows, _flows(columns, {port: 1.0}, (die,)), dead, cut)
    except InvalidInputError:
        return False
    return True


@lru_cache(maxsize=65536)
def _unit_loads(
    grid: Die, edges: tuple[str, ...], dead: Dies, cut: Cut, used: Dies
) -> Array | None:
    """Bytes per link if every die in use receives one byte; None if it can reach no I/O die."""
    columns, rows = grid
    ports = _ports(grid, edges, dead)
    if dead or cut:
        ports = {
            die: axes for die, axes in ports.items() if _reached(grid, dead, cut, used[0], die)
        }
    if not ports:
        return None
    by_axis = [
        {die: 1.0 / len(ports) / len(axes) for die, axes in ports.items() if axis in axes}
        for axis in (0, 1)
    ]
    total: Array = link_loads(columns, rows, _flows(columns, by_axis[0], used), dead, cut)

    def turned(dies: Dies) -> Dies:
        return tuple((y, x) for x, y in dies)

    shares = {(y, x): share for (x, y), share in by_axis[1].items()}
    other = tuple((turned((a,))[0], turned((b,))[0]) for a, b in cut)
    down = link_loads(rows, columns, _flows(rows, shares, turned(used)), turned(dead), other)
    total = total + down.transpose(1, 0, 2)[:, :, _TURNED]
    total.setflags(write=False)
    return total


def stream_loads(wafer: Wafer, used: Dies) -> Array | None:
    """Bytes on each link when every listed die receives one byte from off-wafer memory.

    Returns
    -------
    numpy.ndarray or None
        Shape (rows, columns, 4): links towards +x, -x, +y and -y of each die. None if no die with
        I/O can be reached.

    Examples
    --------
    One edge feeds each column; the bytes for four dies pass the link below the first:

    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like")
    >>> stream_loads(tile, stage_dies(tile, 5, 5, 1)[0])[:, 2, 2]
    array([4., 3., 2., 1., 0.])
    """
    columns, rows = wafer.grid
    if wafer.off_wafer is None or wafer.switch is not None:
        return np.zeros((rows, columns, 4))
    return _unit_loads(
        wafer.grid, wafer.off_wafer.edges, tuple(sorted(wafer.dead)), wafer.dead_links, used
    )


def opposite(loads: Array) -> Array:
    """Return the link loads of the same bytes sent back along their routes.

    Examples
    --------
    >>> there = np.zeros((1, 2, 4))
    >>> there[0, 0, 0] = 5.0  # from the left die to the right one
    >>> float(opposite(there)[0, 1, 1])
    5.0
    """
    reversed_loads = np.zeros_like(loads)
    reversed_loads[:, 1:, 1], reversed_loads[:, :-1, 0] = loads[:, :-1, 0], loads[:, 1:, 1]
    reversed_loads[1:, :, 3], reversed_loads[:-1, :, 2] = loads[:-1, :, 2], loads[1:, :, 3]
    return reversed_loads


def stream_link_s(wafer: Wafer, layout: Layout) -> tuple[float, float]:
    """Seconds of the busiest link when every die in use receives one byte from off-wafer memory.

    Sending one byte takes the same time; the second number is for receiving and sending one byte
    at once. Both are infinite if off-wafer memory cannot be reached.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like")
    >>> rate = tile.link_bytes_per_s[1]
    >>> [round(rate * seconds, 9) for seconds in stream_link_s(tile, Layout(5, 5, 1, 1))]
    [4.0, 4.0]
    """
    placed = stage_dies(wafer, layout.width, layout.height, stages_on(wafer, layout))
    return stream_link_s_of(wafer, tuple(die for dies in placed for die in dies))


def stream_link_s_of(wafer: Wafer, used: Dies) -> tuple[float, float]:
    """Return the result of `stream_link_s` for a list of dies."""
    loads = stream_loads(wafer, used)
    if loads is None:
        return float("inf"), float("inf")
    x, y = wafer.link_bytes_per_s
    rates = np.array([x, x, y, y])
    if (loads[:, :, rates <= 0.0] > 0.0).any():
        return float("inf"), float("inf")
    seconds = loads / np.where(rates > 0.0, rates, 1.0)
    return float(seconds.max()), float((seconds + opposite(seconds)).max())


def stream_shares(
    wafer: Wafer, stream: MemoryTier | None, used: int, link_s: tuple[float, float]
) -> dict[str, float]:
    """Capacity and bandwidth of off-wafer memory per die in use, as fields of the kernel's rules.

    Dies in use also get the share of idle dies; `link_s` is the result of `stream_link_s`.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like")
    >>> tier = tile.tiers()[-1]
    >>> shares = stream_shares(tile, tier, 20, (1e-12, 2e-12))
    >>> shares["stream_bytes_per_s"] / tier.bandwidth_bytes_per_s  # of 25
    1.25
    """
    if stream is None:
        return dict.fromkeys(_RULES, 0.0)
    share = wafer.dies / used
    reached = max(link_s) < float("inf")
    capacity = stream.capacity_bytes * share if reached else 0.0
    seconds = link_s if reached else (0.0, 0.0)
    values = (capacity, stream.bandwidth_bytes_per_s * share, *seconds)
    return dict(zip(_RULES, values, strict=True))


def layout_cross_stage_s(wafer: Wafer, layout: Layout) -> Array | None:
    """Return `cross_stage_link_s` of a layout; None with one stage per wafer or with switches."""
    here = stages_on(wafer, layout)
    if wafer.switch is not None or here == 1:
        return None
    placed = stage_dies(wafer, layout.width, layout.height, here)
    return cross_stage_link_s(wafer, placed, layout.stages)


def cross_stage_link_s(wafer: Wafer, placed: tuple[Dies, ...], stages: int) -> Array | None:
    """Seconds that the streams of each stage occupy the links of each stage.

    Parameters
    ----------
    wafer
        The dies.
    placed
        Dies of each stage on one wafer.
    stages
        Stages of the whole pipeline; several wafers have equally many each, and streams of
        different wafers do not interfere.

    Returns
    -------
    numpy.ndarray or None
        Shape (stages, stages, 2): seconds if each die of the second stage receives or sends one
        byte, and if it does both. The busiest link inside the first stage counts or, if both are
        the same stage, the busiest link anywhere. None if off-wafer memory cannot be reached.

    Examples
    --------
    The streams of the lower row pass down the columns, over links of the upper stage:

    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like").replace(columns=2, rows=3)
    >>> seconds = cross_stage_link_s(tile, (((0, 0), (0, 1)), ((0, 2), (1, 2))), 2)
    >>> bool(seconds[0, 1, 0] > 0), float(seconds[1, 0, 0])
    (True, 0.0)
    """
    if wafer.off_wafer is None:
        return None
    x, y = wafer.link_bytes_per_s
    dead = tuple(sorted(wafer.dead))
    mesh = (wafer.grid, wafer.off_wafer.edges, dead, wafer.dead_links)
    one = _cross_stage(*mesh, (x, y), placed)
    if one is None:
        return None
    here = len(placed)
    seconds = np.zeros((stages, stages, 2))
    for first in range(0, stages, here):
        seconds[first : first + here, first : first + here] = one
    return seconds


@lru_cache(maxsize=4096)
def _cross_stage(
    grid: Die,
    edges: tuple[str, ...],
    dead: Dies,
    cut: Cut,
    rates: tuple[float, float],
    placed: tuple[Dies, ...],
) -> Array | None:
    """Return `cross_stage_link_s` of the stages on one wafer."""
    (x, y), every = rates, []
    for dies in placed:
        loads = _unit_loads(grid, edges, dead, cut, dies)
        if loads is None or (loads[:, :, np.array([x, x, y, y]) <= 0.0] > 0.0).any():
            return None
        every.append(loads / np.where(np.array([x, x, y, y]) > 0.0, [x, x, y, y], 1.0))
    into = np.stack(every)
    out = np.stack([opposite(stage_loads) for stage_loads in every])
    seconds = np.zeros((len(placed), len(placed), 2))
    for k, dies in enumerate(placed):
        inside = _inside(into[k].shape, dies)
        if inside.any():
            inwards, outwards = into[:, inside], out[:, inside]
            seconds[k, :, 0] = np.maximum(inwards, outwards).max(axis=1)
            seconds[k, :, 1] = (inwards + outwards).max(axis=1)
        seconds[k, k] = into[k].max(), (into[k] + out[k]).max()
    seconds.setflags(write=False)
    return seconds


def _inside(shape: tuple[int, ...], dies: Dies) -> Array:
    """Mask of the links between two dies of a stage."""
    inside = np.zeros(shape, dtype=bool)
    own = set(dies)
    for x, y in dies:
        for direction, (dx, dy) in enumerate(((1, 0), (-1, 0), (0, 1), (0, -1))):
            inside[y, x, direction] = (x + dx, y + dy) in own
    return inside
