"""A wafer: a mesh of dies, within the limits of manufacture.

A wafer is a grid of equal dies, each linked to its four neighbours. Links and memory stacks share
the edges of a die, its circuits share its area, and stacks stand between rows of dies: more memory
beside a die means fewer dies. Columns are counted from the left, rows from the top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from phaze_fast.documents import Presets
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware.chip import Accelerator, Dtype, Hbm
from phaze_fast.hardware.die import Die, FewOrNone, WaferRules
from phaze_fast.hardware.wafer_rules import (
    broken_rules,
    extent_mm,
    fitting,
    gaps_mm,
    local_bytes,
)
from phaze_fast.records import (
    Bandwidth,
    Bytes,
    Count,
    Quantity,
    Record,
    Seconds,
    Watts,
)
from phaze_fast.units import format_bandwidth, format_bytes, format_flops

__all__ = ["WAFERS", "MemoryTier", "OffWafer", "Wafer", "WaferIo"]


Position = tuple[FewOrNone, FewOrNone]
"""Column and row of a die."""

Link = tuple[Position, Position]
"""Two neighbouring dies."""

Edge = Literal["left", "right", "top", "bottom"]
EDGES: tuple[Edge, ...] = ("left", "right", "top", "bottom")


def _links_in_order(links: tuple[Link, ...]) -> tuple[Link, ...]:
    ends = [tuple(sorted(link, key=lambda at: (at[1], at[0]))) for link in links]
    return tuple(sorted(((a, b) for a, b in ends), key=lambda link: [at[::-1] for at in link]))


def _in_order(dead: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(dead, key=lambda at: (at[1], at[0])))


def _edges_in_order(edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
    if not edges:
        raise ValueError(f"no edge is not accepted; expected some of {', '.join(EDGES)}")
    return tuple(edge for edge in EDGES if edge in edges)


class OffWafer(Record):
    """Memory that the wafer streams from, such as Cerebras MemoryX."""

    what: ClassVar[str] = "off-wafer memory"
    capacity_bytes: Bytes
    """Size, for the whole wafer."""
    bandwidth_bytes_per_s: Bandwidth
    """Per direction, for the whole wafer."""
    duplex: Annotated[bool, Field(strict=True)] = True
    """Whether both directions have that bandwidth at once; false where they share it."""
    edges: Annotated[tuple[Edge, ...], AfterValidator(_edges_in_order)] = EDGES
    """Edges of the wafer whose dies carry it, each die as much: left, right, top, bottom."""


class WaferIo(Record):
    """Links from one wafer to others of its kind."""

    what: ClassVar[str] = "wafer I/O"
    bandwidth_bytes_per_s: Bandwidth
    """Per direction, for the whole wafer."""
    latency_s: Seconds = 1e-6
    """Of one message."""


class WaferSwitch(Record):
    """Switches that join all dies, as in FRED (Rashidi et al. 2024), in place of a mesh.

    Any dies can exchange at the full rate of their links: the switches block nothing.
    """

    what: ClassVar[str] = "wafer switch"
    bandwidth_bytes_per_s: Bandwidth
    """Of one die's links to the switches together, per direction."""
    sums: Annotated[bool, Field(strict=True)] = True
    """Whether switches add up what passes them, so that an all-reduce sends each byte once."""


@dataclass(frozen=True)
class MemoryTier:
    """One kind of memory as one die has it: its size and its bandwidth."""

    name: Literal["sram", "dram", "stream"]
    """On the die, beside the die, or off the wafer."""
    capacity_bytes: int
    """Bytes per live die, without what is reserved."""
    bandwidth_bytes_per_s: float
    """Bytes per second and live die."""


class Wafer(Record):
    """A grid of equal dies in a mesh, valid by the rules of its manufacture.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> wafer = presets.wafer("dram-wafer")
    >>> wafer.grid, wafer.dies, wafer.memory_bytes
    ((8, 5), 40, 32000000000)
    >>> more = wafer.replace(die=wafer.die.replace(hbm_stacks=4, d2d_modules_x=13))
    >>> more.grid, more.dies, more.memory_bytes
    ((8, 4), 32, 64000000000)
    """

    what: ClassVar[str] = "wafer"
    name: str = Field(min_length=1)
    """What to call it."""
    die: Die
    """Every die."""
    columns: Count | None = None
    """Dies along the width; none = as many as fit the window."""
    rows: Count | None = None
    """Dies along the height; none = as many as fit the window."""
    gap_mm: Quantity = 0.5
    """Between neighbouring dies, or between a die and its neighbour's stacks."""
    hop_latency_s: Seconds = 100e-9
    """Of one hop from die to die, crossing a die included."""
    dead: Annotated[tuple[Position, ...], AfterValidator(_in_order)] = ()
    """Column and row of each die that does not work."""
    dead_links: Annotated[tuple[Link, ...], AfterValidator(_links_in_order)] = ()
    """Pairs of neighbouring dies, each as column and row, whose link works in neither direction."""
    switch: WaferSwitch | None = None
    """Switches that join the dies; none where neighbours have links, a mesh."""
    defects_per_cm2: Quantity = 0.0
    """Of the process; 0 also where spare cores repair what is broken."""
    known_good_dies: Annotated[bool, Field(strict=True)] = True
    """Assembled from tested dies, so that none is expected dead; false where it is monolithic."""
    off_wafer: OffWafer | None = None
    """Memory that the wafer streams from."""
    io: WaferIo | None = None
    """Links to other wafers; none where it stands alone."""
    joined: Count = 1
    """Wafers of this kind that train one model together, over their `io`."""
    power_cap_w: Watts | None = None
    """What can be supplied to all dies together and cooled away; none = no limit."""
    reserved_bytes: Bytes = 0
    """Of each die's memory, not for the model."""
    rules: WaferRules = WaferRules()
    """What manufacture allows."""
    sources: tuple[str, ...] = ()
    """Where the figures come from."""
    notes: str = ""
    """What a reader should know about them."""

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
        """Columns and rows of dies."""
        columns, rows = fitting(self)
        return self.columns or columns, self.rows or rows

    @property
    def positions(self) -> int:
        """Places for dies, dead ones included."""
        return math.prod(self.grid)

    @cached_property
    def dies(self) -> int:
        """Dies that work."""
        return self.positions - len(self.dead)

    def alive(self, column: int, row: int) -> bool:
        """Say whether the die at a place works.

        Raises
        ------
        InvalidInputError
            Where the place is outside the grid.

        Examples
        --------
        >>> from phaze_fast.hardware import presets
        >>> presets.wafer("dram-wafer").replace(dead=((2, 1),)).alive(2, 1)
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
        >>> from phaze_fast.hardware import presets
        >>> tile = presets.wafer("dojo-tile-like").replace(columns=4, rows=2, dead=((3, 0),))
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

    # ---- what a die has ----

    @cached_property
    def chip(self) -> Accelerator:
        """One die as the cost models see it, its memory stacks filled in."""
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

        Beyond the reach of a module, as over a band of memory stacks, its edge carries less. Where
        switches join the dies, both are the rate of a die's links to them.
        """
        die, rules = self.die, self.rules
        if self.switch is not None:
            return self.switch.bandwidth_bytes_per_s, self.switch.bandwidth_bytes_per_s
        x, y = (
            rules.d2d_module_bytes_per_s
            * (rules.d2d_far_share if gap > rules.d2d_reach_mm else 1.0)
            for gap in gaps_mm(self)
        )
        return die.d2d_modules_x * x, die.d2d_modules_y * y

    @property
    def memory_bytes(self) -> int:
        """What a model can use of one die's memory: HBM where there is, else SRAM."""
        return local_bytes(self) - self.reserved_bytes

    def tiers(self) -> tuple[MemoryTier, ...]:
        """Memories of one live die, nearest first; the reserve is taken from the local one.

        Examples
        --------
        >>> from phaze_fast.hardware import presets
        >>> [tier.name for tier in presets.wafer("wse3-like").tiers()]
        ['sram', 'stream']
        """
        chip, reserved = self.chip, self.reserved_bytes
        sram = chip.buffer.capacity_bytes - (0 if chip.hbm else reserved)
        found = [MemoryTier("sram", sram, chip.buffer_bandwidth_bytes_per_s)]
        if chip.hbm:
            rate = chip.hbm.bandwidth_bytes_per_s
            found.append(MemoryTier("dram", chip.hbm.capacity_bytes - reserved, rate))
        if self.off_wafer:
            size, rate = self.off_wafer.capacity_bytes, self.off_wafer.bandwidth_bytes_per_s
            found.append(MemoryTier("stream", size // self.dies, rate / self.dies))
        return tuple(found)

    # ---- what the wafer has ----

    def peak_flops(self, dtype: Dtype = "bf16") -> float:
        """Dense matrix FLOP/s of all live dies.

        Examples
        --------
        >>> from phaze_fast.hardware import presets
        >>> round(presets.wafer("dojo-tile-like").peak_flops() / 1e15, 2)
        9.06
        """
        return self.dies * self.die.chip.peak_flops(dtype)

    @property
    def size_mm(self) -> tuple[float, float]:
        """Width and height of the part of the wafer that is used, stacks included."""
        return extent_mm(self, *self.grid)

    @property
    def area_mm2(self) -> float:
        """Area of the part of the wafer that is used, stacks and gaps included."""
        return math.prod(self.size_mm)

    def __str__(self) -> str:
        columns, rows = self.grid
        tier = self.tiers()[1 if self.die.hbm_stacks else 0]
        x, y = (format_bandwidth(rate) for rate in self.link_bytes_per_s)
        links = f"links {x} and {y}" if self.switch is None else f"switches {x}"
        dead = f" ({len(self.dead)} dead)" if self.dead else ""
        known = "bf16" in self.die.chip.tensor_core.rates
        peak = format_flops(self.peak_flops()) if known else "no bf16"
        return (
            f"{self.name}: {columns}x{rows} dies of {self.die.width_mm:g} x "
            f"{self.die.height_mm:g} mm{dead}, {tier.name.upper()} "
            f"{format_bytes(tier.capacity_bytes)} a die at "
            f"{format_bandwidth(tier.bandwidth_bytes_per_s)}, {links}, {peak}"
        )


WAFERS = Presets("wafer", "phaze_fast.hardware/data/wafers", Wafer.from_dict)
"""Wafers that come with the package."""
