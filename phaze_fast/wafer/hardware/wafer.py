"""A wafer: a mesh of dies, the rules of manufacture it must meet, its faults and its totals.

A wafer is a grid of equal dies, each linked to its four neighbours. Links and memory stacks share
the edges of a die, its circuits share its area, and stacks lie between rows of dies: more memory
next to a die means fewer dies. Columns are counted from the left, rows from the top. Adjacent
columns are separated by a gap; stacks lie between rows and outside the first and the last row.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from phaze_fast.documents import Presets
from phaze_fast.errors import InvalidInputError, not_accepted
from phaze_fast.hardware.chip import CHIPS, Accelerator, Dtype, Hbm
from phaze_fast.hardware.package import Prices
from phaze_fast.hardware.silicon import FULL_AREA, EnergyTable, area, energy_table
from phaze_fast.records import (
    Bandwidth,
    Bytes,
    Count,
    NamedOr,
    Quantity,
    Record,
    Seconds,
    SquareMillimetres,
    Watts,
)
from phaze_fast.units import format_bandwidth, format_bytes, format_flops

Rule = Literal[
    "reticle",
    "shoreline",
    "reach",
    "window",
    "area",
    "memory",
    "wafer_count",
    "dead",
    "dead_links",
    "switch",
]
"""Names of the rules of manufacture."""

_SLACK = 1 + 1e-9  # lengths are sums of rounded numbers


# ---- one die ----

Millimetres = Annotated[float, Field(strict=True, gt=0, le=1000, allow_inf_nan=False)]
"""A length in mm, more than zero."""

DieSide = Annotated[float, Field(strict=True, ge=1, le=1000, allow_inf_nan=False)]
"""A side of a die in mm, 1 or more."""

FewOrNone = Annotated[int, Field(strict=True, ge=0, le=4096)]
"""A whole number, zero or more."""


class WaferRules(Record):
    """Rules of manufacture: sizes, and the bandwidth of an edge.

    Examples
    --------
    >>> WaferRules(window_mm=200.0).d2d_module_bytes_per_s
    512000000000.0
    """

    what: ClassVar[str] = "wafer rules"
    reticle_mm: tuple[Millimetres, Millimetres] = (26.0, 33.0)
    """Largest die in either orientation: the field of a lithography scanner."""
    window_mm: Millimetres = 215.0
    """Side of the usable square of the wafer; by default that of a Cerebras WSE, 46,225 mm2."""
    d2d_module_mm: Millimetres = 0.55
    """Length of die edge that one die-to-die module occupies."""
    d2d_module_bytes_per_s: Bandwidth = 512e9
    """Bandwidth of one module per direction: 64 lanes of 64 GT/s, as in UCIe 3.0."""
    d2d_reach_mm: Millimetres = 2.0
    """Distance of two dies up to which a module has its full rate: UCIe's advanced packages."""
    d2d_far_mm: Millimetres = 25.0
    """Longest distance that a link can span: UCIe's standard packages."""
    d2d_far_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.17
    """Fraction of a module's rate that is left beyond its reach: UCIe 1.0 gives 224 GB/s per mm of
    edge on standard packages and 1,317 on advanced ones, both at 32 GT/s."""
    d2d_byte_j: Quantity = 4e-12
    """Energy of a byte over one die-to-die link: 0.5 pJ per bit, UCIe 1.0's figure for standard
    packages; advanced ones need half of it."""
    d2d_module_mm2: SquareMillimetres = 0.76
    """Area of one module. Assumed: both its directions at the 1,350 GB/s per mm2 that UCIe 1.0
    gives for advanced packages at 45 um bump pitch."""
    hbm_stack_mm: Millimetres = 8.5
    """Length of die edge that one memory stack occupies: its 7.75 mm side and clearance."""
    hbm_stack_depth_mm: Millimetres = 11.87
    """Depth of a stack, measured from the edge. Assumed: the long side of the HBM2 package,
    7.75 mm x 11.87 mm, the short side along the die."""
    hbm_stack_bytes: Bytes = 16_000_000_000
    """Capacity of one stack."""
    hbm_stack_bytes_per_s: Bandwidth = 819e9
    """Bandwidth of one stack: 1,024 bits at 6.4 Gb/s, as in HBM3."""
    defect_clustering: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 2.0
    """Alpha of the negative binomial yield model; 2 in the ITRS, Poisson for large values."""


class Die(Record):
    """One die of a wafer: a chip, its outline, and the links and stacks on its edges.

    Examples
    --------
    >>> die = load_wafer("dram-wafer").die
    >>> die.hbm_stacks, die.stacks_on_edges
    (2, (1, 1))
    """

    what: ClassVar[str] = "die"
    width_mm: DieSide
    """Length of the top and bottom edges."""
    height_mm: DieSide
    """Length of the left and right edges."""
    chip: Annotated[Accelerator, NamedOr(CHIPS.load)]
    """Compute units of the die, without HBM; the buffer is the die's SRAM. In a file also a
    preset's name."""
    d2d_modules_x: FewOrNone
    """Die-to-die modules on each of the left and right edges."""
    d2d_modules_y: FewOrNone
    """Die-to-die modules on each of the top and bottom edges."""
    hbm_stacks: FewOrNone = 0
    """Memory stacks: half on the top edge, rounded up, the others on the bottom edge."""
    network_bytes_per_s: Bandwidth | None = None
    """Bandwidth of the die's network from all cores together, with multicast. Products share their
    operands over it; all other operands stay in the cores' own SRAM. None = as fast as the buffer,
    which then is one memory that all cores share."""
    published: Annotated[bool, Field(strict=True)] = False
    """Whether the die is a published product, to which the area rule does not apply."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.chip.hbm is not None:
            raise ValueError(
                f"chip.hbm: {self.chip.hbm.stacks} stacks are not accepted; expected none, "
                "since hbm_stacks says how many the die has"
            )
        return self

    @property
    def stacks_on_edges(self) -> tuple[int, int]:
        """Memory stacks on the top and on the bottom edge."""
        return (self.hbm_stacks + 1) // 2, self.hbm_stacks // 2

    @property
    def outline_mm2(self) -> float:
        """Area of the die's outline."""
        return self.width_mm * self.height_mm

    @cached_property
    def chip_area_mm2(self) -> float:
        """Modelled area of the circuits with core network and HBM PHYs, without D2D modules."""
        return _circuits_mm2(self.chip) + self.hbm_stacks * FULL_AREA.hbm_mm2_per_stack


@lru_cache(maxsize=4096)  # many dies of a space share one chip
def _circuits_mm2(chip: Accelerator) -> float:
    return area(chip, FULL_AREA).total_mm2


# ---- the wafer ----

Position = tuple[FewOrNone, FewOrNone]
"""Column and row of a die."""

Link = tuple[Position, Position]
"""A link, as the two neighbouring dies that it joins."""

Edge = Literal["left", "right", "top", "bottom"]
EDGES: tuple[Edge, ...] = ("left", "right", "top", "bottom")


def _in_order(dead: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(dead, key=lambda at: (at[1], at[0])))


def _links_in_order(links: tuple[Link, ...]) -> tuple[Link, ...]:
    ends = ((a, b) for a, b in map(_in_order, links))
    return tuple(sorted(ends, key=lambda link: [at[::-1] for at in link]))


def _edges_in_order(edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
    if not edges:
        raise ValueError(f"no edge is not accepted; expected some of {', '.join(EDGES)}")
    return tuple(edge for edge in EDGES if edge in edges)


class OffWafer(Record):
    """Off-wafer memory that dies stream from, such as Cerebras MemoryX."""

    what: ClassVar[str] = "off-wafer memory"
    capacity_bytes: Bytes
    """Capacity, for the whole wafer."""
    bandwidth_bytes_per_s: Bandwidth
    """Bandwidth per direction, for the whole wafer."""
    duplex: Annotated[bool, Field(strict=True)] = True
    """Whether both directions reach that bandwidth at once; if false, they share it."""
    edges: Annotated[tuple[Edge, ...], AfterValidator(_edges_in_order)] = EDGES
    """Edges of the wafer (left, right, top, bottom) whose dies share the traffic equally."""


class WaferIo(Record):
    """Links from one wafer to others of its kind."""

    what: ClassVar[str] = "wafer I/O"
    bandwidth_bytes_per_s: Bandwidth
    """Bandwidth per direction, for the whole wafer."""
    latency_s: Seconds = 1e-6
    """Latency of one message."""


class WaferSwitch(Record):
    """Switches between all dies, as in FRED (Rashidi et al. 2024), in place of a mesh.

    The switches are non-blocking: any dies can exchange at the full rate of their links.
    """

    what: ClassVar[str] = "wafer switch"
    bandwidth_bytes_per_s: Bandwidth
    """Bandwidth of all links from one die to the switches, per direction."""
    sums: Annotated[bool, Field(strict=True)] = True
    """Whether switches reduce in the network, so that an all-reduce sends each byte once."""


@dataclass(frozen=True)
class MemoryTier:
    """One memory tier of one die."""

    name: Literal["sram", "dram", "stream"]
    """Location: on the die, next to the die, or off the wafer."""
    capacity_bytes: int
    """Bytes per working die, reserved bytes excluded."""
    bandwidth_bytes_per_s: float
    """Bytes per second and working die."""


class Wafer(Record):
    """A grid of equal dies in a mesh, valid by the rules of its manufacture.

    Examples
    --------
    >>> wafer = load_wafer("dram-wafer")
    >>> wafer.grid, wafer.dies, wafer.memory_bytes
    ((8, 5), 40, 32000000000)
    >>> more = wafer.replace(die=wafer.die.replace(hbm_stacks=4, d2d_modules_x=13))
    >>> more.grid, more.dies, more.memory_bytes
    ((8, 4), 32, 64000000000)
    """

    what: ClassVar[str] = "wafer"
    name: str = Field(min_length=1)
    """Name of the wafer."""
    die: Die
    """The die, the same at every position."""
    columns: Count | None = None
    """Dies along the width; none = as many as fit the window."""
    rows: Count | None = None
    """Dies along the height; none = as many as fit the window."""
    gap_mm: Quantity = 0.5
    """Distance between neighbouring dies, or between a die and its neighbour's stacks."""
    hop_latency_s: Seconds = 100e-9
    """Latency of one hop from die to die, crossing a die included."""
    dead: Annotated[tuple[Position, ...], AfterValidator(_in_order)] = ()
    """Column and row of each die that does not work."""
    dead_links: Annotated[tuple[Link, ...], AfterValidator(_links_in_order)] = ()
    """Pairs of neighbouring dies, each as column and row, whose link works in neither direction."""
    switch: WaferSwitch | None = None
    """Switches between the dies; none for a mesh of links between neighbours."""
    defects_per_cm2: Quantity = 0.0
    """Defect density of the process; 0 also if spare cores repair all defects."""
    known_good_dies: Annotated[bool, Field(strict=True)] = True
    """Whether the wafer is assembled from tested dies, so that no die is expected to be dead; false
    for a monolithic wafer."""
    off_wafer: OffWafer | None = None
    """Memory that the wafer streams from."""
    io: WaferIo | None = None
    """Links to other wafers, if any."""
    wafer_count: Count = 1
    """Number of such wafers that train one model together, linked by their `io`."""
    power_cap_w: Watts | None = None
    """Limit of power delivery and cooling of one wafer, all its dies together; none = no limit."""
    reserved_bytes: Bytes = 0
    """Bytes of each die's memory that the model cannot use."""
    rules: WaferRules = WaferRules()
    """Rules of manufacture."""
    sources: tuple[str, ...] = ()
    """Where the figures come from."""
    notes: str = ""
    """Remarks on the figures."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        broken = broken_rules(self)
        if broken:
            faults = (ValueError(f"{rule}: {text}") for rule, text in broken)
            raise ValidationError.from_exception_data(
                self.what,
                [
                    InitErrorDetails(type="value_error", loc=(), input=None, ctx={"error": fault})
                    for fault in faults
                ],
            )
        return self

    # ---- dies ----

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Columns and rows of dies: by default as many as fit the wafer's window."""
        between, outside = self._bands
        window = self.rules.window_mm * _SLACK

        def count(side: float, gap: float, taken: float) -> int:
            return max(math.floor((window - taken + gap) / (side + gap)), 0)

        return (
            self.columns or count(self.die.width_mm, self.gap_mm, 0.0),
            self.rows or count(self.die.height_mm, self.gap_mm + between, outside),
        )

    @property
    def positions(self) -> int:
        """Number of die positions, dead dies included."""
        return math.prod(self.grid)

    @cached_property
    def dies(self) -> int:
        """Number of working dies."""
        return self.positions - len(self.dead)

    @property
    def all_dies(self) -> int:
        """Number of working dies of all `wafer_count` wafers.

        Examples
        --------
        >>> load_wafer("dojo-tile-like").replace(wafer_count=6).all_dies
        150
        """
        return self.wafer_count * self.dies

    @property
    def all_power_cap_w(self) -> float:
        """Power limit of all `wafer_count` wafers together in watts; infinite without a limit."""
        return float("inf") if self.power_cap_w is None else self.wafer_count * self.power_cap_w

    def alive(self, column: int, row: int) -> bool:
        """Return whether the die at a position works.

        Raises
        ------
        InvalidInputError
            If the position is outside the grid.

        Examples
        --------
        >>> load_wafer("dram-wafer").replace(dead=((2, 1),)).alive(2, 1)
        False
        """
        columns, rows = self.grid
        if not (0 <= column < columns and 0 <= row < rows):
            raise InvalidInputError(
                f"column, row: {column}, {row} is not accepted by {self.name}; "
                f"expected 0 to {columns - 1} and 0 to {rows - 1}"
            )
        return (column, row) not in self._dead

    @cached_property
    def _dead(self) -> frozenset[tuple[int, int]]:
        return frozenset(self.dead)

    def die_map(self) -> str:
        """Draw the grid, one line per row: ``#`` works, ``.`` is dead.

        Examples
        --------
        >>> tile = load_wafer("dojo-tile-like").replace(columns=4, rows=2, dead=((3, 0),))
        >>> print(tile.die_map())
        ###.
        ####
        """
        columns, rows = self.grid
        return "\n".join(
            "".join(".#"[(column, row) not in self._dead] for column in range(columns))
            for row in range(rows)
        )

    @property
    def die_yield(self) -> float:
        """Share of dies without a defect: negative binomial, Stapper, IBM J. R&D 27(6), 1983."""
        alpha = self.rules.defect_clustering
        defects = self.die.outline_mm2 / 100.0 * self.defects_per_cm2
        return math.exp(-alpha * math.log1p(defects / alpha))

    @property
    def expected_dead(self) -> float:
        """Dies expected not to work; 0 where only tested dies are assembled."""
        return 0.0 if self.known_good_dies else self.positions * (1.0 - self.die_yield)

    # ---- one die ----

    @cached_property
    def chip(self) -> Accelerator:
        """One die as a chip for the cost models, its memory stacks included as HBM."""
        stacks, rules = self.die.hbm_stacks, self.rules
        if not stacks:
            return self.die.chip
        hbm = Hbm(
            capacity_bytes=stacks * rules.hbm_stack_bytes,
            bandwidth_bytes_per_s=stacks * rules.hbm_stack_bytes_per_s,
            stacks=stacks,
        )
        return self.die.chip.replace(hbm=hbm)

    @property
    def link_bytes_per_s(self) -> tuple[float, float]:
        """Bandwidth between neighbours of a row (x) and of a column (y), per direction.

        Beyond the reach of a module, for example across memory stacks, the rate is lower. With
        switches, both are the bandwidth of a die's links to them.
        """
        die, rules = self.die, self.rules
        if self.switch is not None:
            return self.switch.bandwidth_bytes_per_s, self.switch.bandwidth_bytes_per_s
        x, y = (
            rules.d2d_module_bytes_per_s
            * (rules.d2d_far_share if gap > rules.d2d_reach_mm else 1.0)
            for gap in self.gaps_mm
        )
        return die.d2d_modules_x * x, die.d2d_modules_y * y

    @property
    def memory_bytes(self) -> int:
        """Usable memory of one die in bytes: HBM if it has any, else SRAM."""
        return self.local_bytes - self.reserved_bytes

    @property
    def local_bytes(self) -> int:
        """Bytes of one die's memory, reserved ones included: its stacks if any, else its SRAM."""
        stacks = self.die.hbm_stacks
        return stacks * self.rules.hbm_stack_bytes or self.die.chip.buffer.capacity_bytes

    def tiers(self) -> tuple[MemoryTier, ...]:
        """Memory tiers of one working die, nearest first, reserved bytes excluded.

        Examples
        --------
        >>> [tier.name for tier in load_wafer("wse3-like").tiers()]
        ['sram', 'stream']
        """
        chip, reserved = self.chip, self.reserved_bytes
        sram = chip.buffer.capacity_bytes - (0 if chip.hbm else reserved)
        tiers = [MemoryTier("sram", sram, chip.buffer_bandwidth_bytes_per_s)]
        if chip.hbm:
            rate = chip.hbm.bandwidth_bytes_per_s
            tiers.append(MemoryTier("dram", chip.hbm.capacity_bytes - reserved, rate))
        if self.off_wafer:
            size, rate = self.off_wafer.capacity_bytes, self.off_wafer.bandwidth_bytes_per_s
            tiers.append(MemoryTier("stream", size // self.dies, rate / self.dies))
        return tuple(tiers)

    # ---- the whole wafer ----

    def peak_flops(self, dtype: Dtype = "bf16") -> float:
        """Dense matrix FLOP/s of all working dies of one wafer.

        Examples
        --------
        >>> round(load_wafer("dojo-tile-like").peak_flops() / 1e15, 2)
        9.06
        """
        return self.dies * self.die.chip.peak_flops(dtype)

    @property
    def size_mm(self) -> tuple[float, float]:
        """Width and height of the part of the wafer in use, stacks included."""
        return self.extent_mm(*self.grid)

    @property
    def _bands(self) -> tuple[float, float]:
        """Height of the stacks between two rows of dies, and outside the first and last row.

        The stacks of facing edges share a band where they fit side by side.
        """
        die, rules = self.die, self.rules
        top, bottom = die.stacks_on_edges
        sharing = rules.hbm_stack_mm * die.hbm_stacks <= die.width_mm * _SLACK
        edges = (top > 0) + (bottom > 0)
        between = min(edges, 1) if sharing else edges
        return between * rules.hbm_stack_depth_mm, edges * rules.hbm_stack_depth_mm

    @property
    def gaps_mm(self) -> tuple[float, float]:
        """Millimetres between neighbouring dies of a row, and of a column with its stacks.

        Examples
        --------
        >>> load_wafer("dram-wafer").gaps_mm
        (0.5, 12.37)
        """
        return self.gap_mm, self.gap_mm + self._bands[0]

    def extent_mm(self, columns: int, rows: int) -> tuple[float, float]:
        """Width and height in mm of a grid of dies, stacks included.

        Examples
        --------
        >>> load_wafer("sram-wafer").extent_mm(8, 4)
        (203.5, 101.5)
        """
        between, outside = self._bands
        return (
            columns * self.die.width_mm + (columns - 1) * self.gap_mm,
            rows * self.die.height_mm + (rows - 1) * (self.gap_mm + between) + outside,
        )

    @property
    def area_mm2(self) -> float:
        """Area of the part of one wafer in use, stacks and gaps included."""
        return math.prod(self.size_mm)

    def __str__(self) -> str:
        columns, rows = self.grid
        tier = self.tiers()[1 if self.die.hbm_stacks else 0]
        x, y = (format_bandwidth(rate) for rate in self.link_bytes_per_s)
        links = f"links {x} and {y}" if self.switch is None else f"switches {x}"
        dead = f" ({len(self.dead)} dead)" if self.dead else ""
        several = f"{self.wafer_count} wafers, each " if self.wafer_count > 1 else ""
        known = "bf16" in self.die.chip.tensor_core.rates
        peak = format_flops(self.peak_flops()) if known else "no bf16"
        return (
            f"{self.name}: {several}{columns}x{rows} dies of {self.die.width_mm:g} x "
            f"{self.die.height_mm:g} mm{dead}, {tier.name.upper()} "
            f"{format_bytes(tier.capacity_bytes)} a die at "
            f"{format_bandwidth(tier.bandwidth_bytes_per_s)}, {links}, {peak}"
        )


# ---- rules of manufacture ----


def broken_rules(wafer: Wafer) -> list[tuple[Rule, str]]:
    """List every rule that a wafer breaks, with the actual and the accepted values.

    A validated wafer breaks none; this checks wafers that were constructed without validation.

    Examples
    --------
    >>> broken_rules(load_wafer("dram-wafer"))
    []
    """
    return [*_die_faults(wafer.die, wafer.rules), *_wafer_faults(wafer)]


def _die_faults(die: Die, rules: WaferRules) -> Iterator[tuple[Rule, str]]:
    short, long = sorted(rules.reticle_mm)
    sides = sorted((die.width_mm, die.height_mm))
    if sides[0] > short * _SLACK or sides[1] > long * _SLACK:
        yield (
            "reticle",
            f"a die of {die.width_mm:g} x {die.height_mm:g} mm is not accepted; "
            f"expected at most {short:g} x {long:g} mm, either way round",
        )
    need = die.d2d_modules_x * rules.d2d_module_mm
    if need > die.height_mm * _SLACK:
        yield (
            "shoreline",
            f"{die.d2d_modules_x} D2D modules need {need:g} mm of the left and right edges; "
            f"expected at most height_mm, {die.height_mm:g} mm",
        )
    need = die.d2d_modules_y * rules.d2d_module_mm + die.stacks_on_edges[0] * rules.hbm_stack_mm
    if need > die.width_mm * _SLACK:
        yield (
            "shoreline",
            f"{die.d2d_modules_y} D2D modules and {die.stacks_on_edges[0]} HBM stacks need "
            f"{need:g} mm of the top edge; expected at most width_mm, {die.width_mm:g} mm",
        )
    d2d = 2 * (die.d2d_modules_x + die.d2d_modules_y) * rules.d2d_module_mm2
    if not die.published and die.chip_area_mm2 + d2d > die.outline_mm2 * _SLACK:
        yield (
            "area",
            f"circuits of {die.chip_area_mm2:.1f} mm2 and D2D modules of {d2d:.1f} mm2 need "
            f"{die.chip_area_mm2 + d2d:.1f} mm2; expected at most {die.outline_mm2:.1f} mm2",
        )


def _wafer_faults(wafer: Wafer) -> Iterator[tuple[Rule, str]]:
    columns, rows = wafer.grid
    window = wafer.rules.window_mm
    wide, high = wafer.extent_mm(max(columns, 1), max(rows, 1))
    for name, count, need in (("columns", columns, wide), ("rows", rows, high)):
        if need > window * _SLACK:
            yield (
                "window",
                f"{max(count, 1)} {name} of dies and what stands between them need {need:g} mm; "
                f"expected at most {window:g} mm",
            )
    sides = ((columns, wafer.die.d2d_modules_x), (rows, wafer.die.d2d_modules_y))
    for name, (count, modules), gap in zip(("row", "column"), sides, wafer.gaps_mm, strict=True):
        if wafer.switch is None and count > 1 and modules and gap > wafer.rules.d2d_far_mm * _SLACK:
            yield (
                "reach",
                f"D2D modules must bridge {gap:g} mm between the dies of a {name}; "
                f"expected at most {wafer.rules.d2d_far_mm:g} mm",
            )
    if wafer.memory_bytes <= 0:
        yield (
            "memory",
            f"{wafer.local_bytes} bytes of memory a die leave nothing beside reserved_bytes, "
            f"{wafer.reserved_bytes}; expected more",
        )
    if wafer.wafer_count > 1 and wafer.io is None:
        yield (
            "wafer_count",
            f"{wafer.wafer_count} wafers without io are not accepted; expected the bandwidth of "
            "their links to each other, or 1 wafer",
        )
    yield from _switch_faults(wafer)
    yield from _fault_map_faults(wafer)


def _switch_faults(wafer: Wafer) -> Iterator[tuple[Rule, str]]:
    if wafer.switch is None:
        return
    die = wafer.die
    modules = 2 * (die.d2d_modules_x + die.d2d_modules_y)
    most = modules * wafer.rules.d2d_module_bytes_per_s
    if wafer.switch.bandwidth_bytes_per_s > most * _SLACK:
        yield (
            "switch",
            f"{wafer.switch.bandwidth_bytes_per_s / 1e12:g} TB/s from a die are not accepted; "
            f"expected at most {most / 1e12:g} TB/s, what the {modules} D2D modules of its edges "
            "carry",
        )
    if wafer.dead_links:
        yield "switch", "dead_links are not accepted beside switches; expected dead dies only"


def _fault_map_faults(wafer: Wafer) -> Iterator[tuple[Rule, str]]:
    columns, rows = wafer.grid
    outside = [at for at in wafer.dead if at[0] >= columns or at[1] >= rows]
    if outside:
        yield (
            "dead",
            f"column {outside[0][0]}, row {outside[0][1]} is outside the grid; "
            f"expected columns below {columns} and rows below {rows}",
        )
    if len(set(wafer.dead)) < len(wafer.dead):
        yield "dead", "a die is given twice; expected each once"
    elif not outside and wafer.dead and len(wafer.dead) >= columns * rows:
        yield "dead", f"all {columns * rows} dies are dead; expected at least one that works"
    for (a, b), (c, d) in wafer.dead_links:
        said = f"column {a}, row {b} to column {c}, row {d}"
        if max(a, c) >= columns or max(b, d) >= rows:
            yield (
                "dead_links",
                f"{said} is outside the grid; expected columns below {columns} and rows below "
                f"{rows}",
            )
            break
        if abs(a - c) + abs(b - d) != 1:
            yield "dead_links", f"{said} is no link; expected neighbours"
            break
    if len(set(wafer.dead_links)) < len(wafer.dead_links):
        yield "dead_links", "a link is given twice; expected each once"


WAFERS = Presets("wafer", "phaze_fast.wafer.hardware/data/wafers", Wafer.from_dict)
"""Wafers that come with the package."""

load_wafer = WAFERS.load


# ---- fault maps ----

RowColumn = Annotated[tuple[FewOrNone, FewOrNone], Field()]
"""Row and column of a die, counted from the top left."""


class FaultMap(Record):
    """Dies and links that do not work, by row and column.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> faults = FaultMap(dead_dies=((0, 3),), dead_links=(((1, 0), (1, 1)),))
    >>> wafer = faults.on(load_wafer("dojo-tile-like"))
    >>> wafer.dies, wafer.dead, wafer.dead_links
    (24, ((3, 0),), (((0, 1), (1, 1)),))
    """

    what: ClassVar[str] = "fault map"
    dead_dies: tuple[RowColumn, ...] = ()
    """Row and column of each die that does not work."""
    dead_links: tuple[tuple[RowColumn, RowColumn], ...] = ()
    """Links that do not work, each as a pair of neighbouring dies by row and column."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for at, (here, there) in enumerate(self.dead_links):
            if abs(here[0] - there[0]) + abs(here[1] - there[1]) != 1:
                raise ValueError(
                    f"dead_links.{at}: row {here[0]}, column {here[1]} to row {there[0]}, column "
                    f"{there[1]} is not accepted; expected two neighbouring dies"
                )
        links = [frozenset(link) for link in self.dead_links]
        for name, entries in (("dead_dies", self.dead_dies), ("dead_links", links)):
            if len(set(entries)) < len(entries):
                raise ValueError(f"{name}: an entry is given twice; expected each once")
        return self

    def on(self, wafer: Wafer, source: str = "faults") -> Wafer:
        """Return a wafer with these faults added to its own.

        Parameters
        ----------
        wafer
            Wafer that has the faults.
        source
            Name of this map in error messages.

        Raises
        ------
        InvalidInputError
            Where a die lies outside the grid, or none is left that works.
        """
        columns, rows = wafer.grid
        places = [(f"dead_dies.{k}", at) for k, at in enumerate(self.dead_dies)]
        for k, link in enumerate(self.dead_links):
            places += [(f"dead_links.{k}", at) for at in link]
        for field, (row, column) in places:
            if row >= rows or column >= columns:
                raise InvalidInputError(
                    f"{source}: {field}: row {row}, column {column} is not accepted by "
                    f"{wafer.name}; expected rows below {rows} and columns below {columns}"
                )
        dead = {(column, row) for row, column in self.dead_dies} | set(wafer.dead)
        if len(dead) >= wafer.positions:
            raise InvalidInputError(
                f"{source}: dead_dies: all {wafer.positions} dies of {wafer.name} are dead; "
                "expected at least one that works"
            )
        links = {frozenset(link): link for link in wafer.dead_links}
        for (a, b), (c, d) in self.dead_links:
            links.setdefault(frozenset(((b, a), (d, c))), ((b, a), (d, c)))
        return wafer.replace(dead=tuple(dead), dead_links=tuple(links.values()))

    def to_plain(self) -> dict[str, Any]:
        """Return plain data: lists of rows and columns, as a file has them."""
        return self.model_dump(mode="json")


load_faults = FaultMap.from_file
"""Read a fault map from a YAML or JSON file."""


def sample_faults(
    wafer: Wafer,
    count: int,
    seed: int = 0,
    die_fault: float | None = None,
    link_fault: float = 0.0,
) -> list[FaultMap]:
    """Draw fault maps: dies and links fail independently, each with its own probability.

    Parameters
    ----------
    wafer
        Wafer whose dies and links may fail.
    count
        Number of maps.
    seed
        Random seed; the same seed gives the same maps on every machine.
    die_fault
        Probability that a die does not work; by default 1 less the wafer's `die_yield`.
    link_fault
        Probability that a link between two neighbours does not work.

    Raises
    ------
    InvalidInputError
        Where a probability is not between 0 and 1, or the count not between 1 and 100,000.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> maps = sample_faults(load_wafer("dojo-tile-like"), 200, die_fault=0.04)
    >>> 0.8 < sum(len(fault_map.dead_dies) for fault_map in maps) / 200 < 1.2
    True
    """
    die_fault = 1.0 - wafer.die_yield if die_fault is None else die_fault
    for name, value in (("die_fault", die_fault), ("link_fault", link_fault)):
        if not 0.0 <= value < 1.0:
            raise not_accepted(name, value, "a probability from 0 to below 1")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 100_000:
        raise not_accepted("count", count, "a whole number from 1 to 100000")
    columns, rows = wafer.grid
    dies = [(row, column) for row in range(rows) for column in range(columns)]
    links = [((r, c), (r, c + 1)) for r, c in dies if c + 1 < columns]
    links += [((r, c), (r + 1, c)) for r, c in dies if r + 1 < rows]
    rng = random.Random(seed)
    maps = []
    for _ in range(count):
        dead = [die for die in dies if rng.random() < die_fault]
        broken = [link for link in links if rng.random() < link_fault]
        maps.append(FaultMap(dead_dies=tuple(dead[: len(dies) - 1]), dead_links=tuple(broken)))
    return maps


# ---- power, yield and cost ----

_CARRIER_USD = 1937.0
_BOND_YIELD = 0.99


@dataclass(frozen=True)
class WaferTotals:
    """Peak power, yield and cost of one wafer; `wafer_count` does not change them."""

    die_peak_w: float
    """Power of one die with every unit busy and every memory at its full rate."""
    peak_w: float
    """Power of all working dies of one wafer."""
    assembly_yield: float
    """Share of wafers with at most as many dead dies as spares: after bonding of tested dies, or
    after fabrication of a monolithic wafer."""
    cost_usd: float
    """Cost of one good wafer: silicon, memory stacks and carrier."""


def _die_peak_w(wafer: Wafer, table: EnergyTable) -> float:
    """Power of one die; SRAM that is both core-local memory and the buffer is counted once."""
    chip, die = wafer.chip, wafer.die
    cycles = chip.macs_per_cycle * table.mac_j + chip.vector_core.ops_per_cycle * table.vector_op_j
    sram = chip.buffer_bandwidth_bytes_per_s
    if die.network_bytes_per_s is None:  # one buffer: its own accesses, and those at the ports
        memory_w = sram * (table.buffer_byte_j + table.local_byte_j)
    else:
        memory_w = sram * table.local_byte_j + die.network_bytes_per_s * table.buffer_byte_j
    hbm_w = chip.hbm.bandwidth_bytes_per_s * table.hbm_byte_j if chip.hbm else 0.0
    x, y = wafer.link_bytes_per_s
    sent = 2.0 * (x + y) if wafer.switch is None else 2.0 * x  # over four edges, or both ways
    links_w = sent * wafer.rules.d2d_byte_j
    static_w = table.static_w_per_mm2 * die.outline_mm2
    return cycles * chip.clock_hz + memory_w + hbm_w + links_w + static_w


def _at_most(count: int, of: int, fault: float) -> float:
    """Probability that at most `count` of `of` units fail."""
    chances = (math.comb(of, k) * fault**k * (1.0 - fault) ** (of - k) for k in range(count + 1))
    return min(1.0, sum(chances))


def wafer_totals(
    wafer: Wafer,
    spares: int = 0,
    prices: Prices | None = None,
    table: EnergyTable | None = None,
) -> WaferTotals:
    """Add up a wafer's power, yield and cost.

    Tested dies are bonded to a carrier, each with a yield of 99% (Feng and Ma, Chiplet Actuary, DAC
    2022); the carrier costs a 65 nm wafer (Khan and Mann, AI Chips, CSET 2020). A monolithic wafer
    costs the price of a processed wafer.

    Parameters
    ----------
    wafer
        The wafer; its dead dies draw no power but are part of the cost.
    spares
        Number of dead dies up to which a wafer counts as good.
    prices, table
        Prices of wafers and memory, and the energy of each event.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> totals = wafer_totals(load_wafer("dojo-tile-like"))
    >>> round(totals.die_peak_w), totals.peak_w == 25 * totals.die_peak_w
    (413, True)
    >>> wafer_totals(load_wafer("dojo-tile-like"), spares=2).cost_usd < totals.cost_usd
    True
    """
    prices = prices or Prices()
    die_w = _die_peak_w(wafer, table or energy_table())
    stacks = wafer.positions * wafer.die.hbm_stacks * wafer.rules.hbm_stack_bytes
    if wafer.known_good_dies:
        fault, silicon = 1.0 - _BOND_YIELD, _CARRIER_USD
        silicon += wafer.positions * float(prices.die_usd(np.array([wafer.die.outline_mm2]))[0])
    else:
        fault, silicon = 1.0 - wafer.die_yield, prices.wafer_usd
    good = _at_most(spares, wafer.positions, fault)
    memory = prices.hbm_usd_per_gib * stacks / 2**30
    cost = (silicon + memory) / good if good > 0 else float("inf")
    return WaferTotals(die_w, die_w * wafer.dies, good, cost)
