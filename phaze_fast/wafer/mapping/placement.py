"""Where the stages of a pipeline lie on a wafer, and what their links cost.

On several wafers, the stages of a pipeline follow one another from wafer to wafer, over the wafers'
I/O.

Off-wafer memory is attached evenly to the dies at some edges of the wafer, and every die in use
reads the same amount from each of them. A byte enters at a right angle to its edge, goes straight
to the column or row of its die and then along it; at a corner shared by two edges, half of the
bytes take each direction. Writes use the opposite links of the same routes. Routes avoid dead dies
and links, as do the routes of all messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.tables import Array
from phaze_fast.wafer.hardware.wafer import MemoryTier, Wafer
from phaze_fast.wafer.mapping.layout import Layout, stages_on
from phaze_fast.wafer.mapping.mesh import Die, Links, Mesh
from phaze_fast.wafer.mapping.packing import is_bent, longest_line, mesh_of, stage_dies

Dies = tuple[Die, ...]
Seconds = tuple[float, float]
"""Seconds per byte, and fixed seconds."""

_RULES = ("stream_capacity_bytes", "stream_bytes_per_s", "stream_link_s", "stream_both_s")
_TURNED = [2, 3, 0, 1]  # directions +x, -x, +y, -y as numbered in the transposed grid
_FAR = (float("inf"), float("inf"))


@dataclass(frozen=True)
class Placement:
    """The stages of one pipeline, placed on a wafer.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tiles = load_wafer("dojo-tile-like").replace(wafer_count=2)
    >>> Placement(tiles, Layout(5, 5, 2, 1)).wafers
    (0, 1)
    """

    wafer: Wafer
    layout: Layout

    @property
    def here(self) -> int:
        """Number of stages on each wafer."""
        return stages_on(self.wafer, self.layout)

    @cached_property
    def dies(self) -> tuple[Dies, ...]:
        """Dies of every stage."""
        layout = self.layout
        placed = stage_dies(self.wafer, layout.width, layout.height, self.here)
        return placed * (layout.stages // self.here)

    @cached_property
    def wafers(self) -> tuple[int, ...]:
        """Index of the wafer of each stage."""
        return tuple(k // self.here for k in range(self.layout.stages))

    @cached_property
    def by_wafer(self) -> tuple[slice, ...]:
        """Slices of the stages that lie on each wafer of a pipeline."""
        starts = range(0, self.layout.stages, self.here)
        return tuple(slice(start, start + self.here) for start in starts)

    def links(self) -> Links:
        """Links between neighbouring dies of a stage.

        A bent line has the rate of the slower axis. With switches, the links are those from each
        die to the switches.
        """
        wafer, layout = self.wafer, self.layout
        x, y = wafer.link_bytes_per_s
        if wafer.switch is not None:
            return Links(x, y, wafer.hop_latency_s, 2 if wafer.switch.sums else 1)
        if not is_bent(wafer, layout.width, layout.height, self.here):
            return Links(x, y, wafer.hop_latency_s)
        return Links(min(x, y), min(x, y), wafer.hop_latency_s * longest_line(wafer).hops)

    # ---- sends between stages ----

    def pairs(self) -> list[tuple[int, int, int]]:
        """List the stages on one wafer that send to each other: first, second, how often.

        Interleaved chunks also pass from the last stage back to the first one.
        """
        last, chunks = self.layout.stages - 1, self.layout.chunks
        neighbours = [k for k in range(last) if self.wafers[k] == self.wafers[k + 1]]
        pairs = [(k, k + 1, chunks) for k in neighbours]
        returns = chunks > 1 and len(self.by_wafer) == 1
        return [*pairs, (last, 0, chunks - 1)] if returns else pairs

    def sends(self) -> list[Seconds]:
        """Seconds per byte, and fixed seconds, that each stage takes to send tensors and gradients.

        All stages send at once; the time is set by the most loaded link of a route and its hops.
        The end stages on a wafer also send over its I/O; interleaved chunks visit all wafers
        repeatedly, returning from the last wafer to the first.
        """
        wafer, chunks = self.wafer, self.layout.chunks
        links = Links(*wafer.link_bytes_per_s, wafer.hop_latency_s)
        alone = len(self.by_wafer) == 1
        sends: list[Seconds] = []
        for stages in self.by_wafer:
            placed, times = self.dies[stages], chunks if alone else 1
            if wafer.switch is not None:
                sends += _switch_sends(links, self.layout.dies, len(placed), times)
                continue
            sends += _mesh_sends(mesh_of(wafer), links, placed, times)
        if alone:
            return sends
        assert wafer.io is not None  # several wafers require io
        byte_s, message_s = 1.0 / wafer.io.bandwidth_bytes_per_s, wafer.io.latency_s
        last = len(sends) - 1
        for k, own in enumerate(sends):
            rate_s, fixed_s = (chunks * value for value in own)
            for end, there in ((k == last, k + 1), (k == 0, k - 1)):
                crosses = end or self.wafers[k] != self.wafers[there]
                times = (chunks - 1 if end else chunks) if crosses else 0
                rate_s, fixed_s = rate_s + times * byte_s, fixed_s + times * message_s
            sends[k] = (rate_s, fixed_s)
        return sends

    # ---- streams to and from off-wafer memory ----

    @cached_property
    def used(self) -> Dies:
        """Dies in use on each wafer."""
        return tuple(die for dies in self.dies[: self.here] for die in dies)

    def stream_shares(self, stream: MemoryTier | None, links: bool = True) -> dict[str, float]:
        """Capacity and bandwidth of off-wafer memory per die in use, as fields of kernel rules.

        Dies in use also get the share of idle dies. If `links` is false, bytes take no time on the
        links between dies.
        """
        if stream is None:
            return dict.fromkeys(_RULES, 0.0)
        into_s, both_s = stream_link_s(self.wafer, self.used) if links else (0.0, 0.0)
        share = self.wafer.dies / len(self.used)
        reached = max(into_s, both_s) < float("inf")
        capacity = stream.capacity_bytes * share if reached else 0.0
        seconds = (into_s, both_s) if reached else (0.0, 0.0)
        values = (capacity, stream.bandwidth_bytes_per_s * share, *seconds)
        return dict(zip(_RULES, values, strict=True))

    @cached_property
    def cross_stage_s(self) -> Array | None:
        """Return `cross_stage_link_s` of all stages; zero between stages on different wafers.

        The result is None with switches, if every stage has a wafer of its own, or if off-wafer
        memory cannot be reached.
        """
        if self.wafer.switch is not None or self.here == 1:
            return None
        own = cross_stage_link_s(self.wafer, self.dies[: self.here])
        if own is None:
            return None
        stages = self.layout.stages
        seconds = np.zeros((stages, stages, 2))
        for here in self.by_wafer:
            seconds[here, here] = own
        return seconds


# ---- sends ----


@lru_cache(maxsize=65536)
def _mesh_sends(
    mesh: Mesh, links: Links, placed: tuple[Dies, ...], chunks: int
) -> tuple[Seconds, ...]:
    """Price the sends between stages, each die to the same die of the next stage."""
    columns, stages = mesh.columns, len(placed)
    flows = []
    pairs = [(k, k + 1, chunks) for k in range(stages - 1)]
    if chunks > 1 and stages > 1:  # from the last stage back to the first stage's next chunk
        pairs.append((stages - 1, 0, chunks - 1))
    for first, second, _ in pairs:
        routes = zip(placed[first], placed[second], strict=True)
        ends = [(v * columns + u, t * columns + s) for (u, v), (s, t) in routes]
        share = 1.0 / len(ends)
        flows.append([(a, b, share) for a, b in ends])
        flows.append([(b, a, share) for a, b in ends])
    if not flows:
        return ((0.0, 0.0),) * stages
    rate = np.array([links.x_bytes_per_s] * 2 + [links.y_bytes_per_s] * 2)
    total = mesh.loads([f for some in flows for f in some]) / rate
    sends, hops = [0.0] * stages, [0] * stages
    for k, (first, second, times) in enumerate(pairs):
        for direction, sender in ((0, first), (1, second)):
            some = flows[2 * k + direction]
            sends[sender] += times * float(total[mesh.loads(some) > 0].max())
            # All other dies have the same number of hops.
            hops[sender] += times * int((mesh.loads(some[:1]) > 0).sum())
    return tuple((rate_s, links.hop_s * count) for rate_s, count in zip(sends, hops, strict=True))


def _switch_sends(links: Links, dies: int, stages: int, chunks: int) -> tuple[Seconds, ...]:
    """Price sends over switches: each of a stage's dies sends its share of the stage's tensors."""
    stage_sends = []
    for k in range(stages):
        on = chunks - (k == stages - 1) if stages > 1 else 0
        back = chunks - (k == 0) if stages > 1 else 0
        rate_s = sum(times / (dies * links.x_bytes_per_s) for times in (on, back))
        stage_sends.append((rate_s, 2.0 * links.hop_s * (on + back)))
    return tuple(stage_sends)


# ---- streams ----


def _ports(mesh: Mesh, edges: tuple[str, ...]) -> dict[Die, set[int]]:
    """Dies at I/O edges, each with the axes (0 rows, 1 columns) along which bytes enter."""
    columns, rows = mesh.columns, mesh.rows
    at = {"left": (0, 0), "right": (0, columns - 1), "top": (1, 0), "bottom": (1, rows - 1)}
    ports: dict[Die, set[int]] = {}
    for die in ((x, y) for y in range(rows) for x in range(columns)):
        for axis, place in (at[edge] for edge in edges):
            if die[axis] == place and die not in mesh.dead:
                ports.setdefault(die, set()).add(axis)
    return ports


def _flows(columns: int, shares: dict[Die, float], used: Dies) -> Array:
    """(from, to, bytes) from each die in `shares` with its share to each die in use."""
    ports = np.array([y * columns + x for x, y in shares], dtype=np.float64)
    dies = np.array([y * columns + x for x, y in used], dtype=np.float64)
    flow_bytes = np.repeat(np.array(list(shares.values()), dtype=np.float64), len(dies))
    pairs = np.repeat(ports, len(dies)), np.tile(dies, len(ports))
    return np.stack([*pairs, flow_bytes], axis=1)


def _reached(mesh: Mesh, die: Die, port: Die) -> bool:
    try:
        mesh.loads(_flows(mesh.columns, {port: 1.0}, (die,)))
    except InvalidInputError:
        return False
    return True


@lru_cache(maxsize=65536)
def _unit_loads(mesh: Mesh, edges: tuple[str, ...], used: Dies) -> Array | None:
    """Bytes per link if every die in use receives one byte; None if no I/O die is reachable."""
    ports = _ports(mesh, edges)
    if mesh.dead or mesh.cut:
        ports = {die: axes for die, axes in ports.items() if _reached(mesh, used[0], die)}
    if not ports:
        return None
    by_axis = [
        {die: 1.0 / len(ports) / len(axes) for die, axes in ports.items() if axis in axes}
        for axis in (0, 1)
    ]
    total = mesh.loads(_flows(mesh.columns, by_axis[0], used))
    turned = mesh.turned
    shares = {(y, x): share for (x, y), share in by_axis[1].items()}
    down = turned.loads(_flows(turned.columns, shares, tuple((y, x) for x, y in used)))
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
    return _unit_loads(mesh_of(wafer), wafer.off_wafer.edges, used)


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


def stream_link_s(wafer: Wafer, used: Dies) -> Seconds:
    """Seconds of the busiest link when every listed die receives one byte from off-wafer memory.

    Sending one byte takes the same time; the second number is for receiving and sending one byte
    at once. Both are infinite if off-wafer memory cannot be reached.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like")
    >>> used = stage_dies(tile, 5, 5, 1)[0]
    >>> [round(tile.link_bytes_per_s[1] * seconds, 9) for seconds in stream_link_s(tile, used)]
    [4.0, 4.0]
    """
    loads = stream_loads(wafer, used)
    seconds = None if loads is None else _link_seconds(loads, wafer.link_bytes_per_s)
    if seconds is None:
        return _FAR
    return float(seconds.max()), float((seconds + opposite(seconds)).max())


def _link_seconds(loads: Array, rates: tuple[float, float]) -> Array | None:
    """Seconds that loads take on each link; None if a link in use does not exist."""
    x, y = rates
    by_direction = np.array([x, x, y, y])
    if (loads[:, :, by_direction <= 0.0] > 0.0).any():
        return None
    return loads / np.where(by_direction > 0.0, by_direction, 1.0)


def cross_stage_link_s(wafer: Wafer, placed: tuple[Dies, ...]) -> Array | None:
    """Seconds for which the streams of one stage occupy the links of another, on one wafer.

    Parameters
    ----------
    wafer
        The dies.
    placed
        Dies of each stage on one wafer.

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
    >>> seconds = cross_stage_link_s(tile, (((0, 0), (0, 1)), ((0, 2), (1, 2))))
    >>> bool(seconds[0, 1, 0] > 0), float(seconds[1, 0, 0])
    (True, 0.0)
    """
    if wafer.off_wafer is None:
        return None
    return _cross_stage(mesh_of(wafer), wafer.off_wafer.edges, wafer.link_bytes_per_s, placed)


@lru_cache(maxsize=4096)
def _cross_stage(
    mesh: Mesh, edges: tuple[str, ...], rates: tuple[float, float], placed: tuple[Dies, ...]
) -> Array | None:
    """Return `cross_stage_link_s`, cached."""
    every = []
    for dies in placed:
        loads = _unit_loads(mesh, edges, dies)
        seconds_of_links = None if loads is None else _link_seconds(loads, rates)
        if seconds_of_links is None:
            return None
        every.append(seconds_of_links)
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
