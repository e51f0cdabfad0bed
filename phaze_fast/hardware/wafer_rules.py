"""Rules of manufacture: what fits on a wafer, and which rules it breaks.

Columns of dies stand a gap apart. Between rows stand memory stacks as well, and outside the first
and the last row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, Protocol

from phaze_fast.hardware.die import Die, WaferRules

__all__ = ["Rule", "broken_rules", "extent_mm", "fitting", "gaps_mm", "local_bytes"]

Rule = Literal[
    "reticle",
    "shoreline",
    "reach",
    "window",
    "area",
    "memory",
    "joined",
    "dead",
    "dead_links",
    "switch",
]
"""What a wafer can break."""

_SLACK = 1 + 1e-9  # lengths are sums of rounded numbers


class _Switch(Protocol):
    @property
    def bandwidth_bytes_per_s(self) -> float: ...


class _Wafer(Protocol):
    """What the rules look at of a wafer, which checks itself with them."""

    @property
    def die(self) -> Die: ...
    @property
    def rules(self) -> WaferRules: ...
    @property
    def gap_mm(self) -> float: ...
    @property
    def grid(self) -> tuple[int, int]: ...
    @property
    def joined(self) -> int: ...
    @property
    def io(self) -> object: ...
    @property
    def dead(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def dead_links(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]: ...
    @property
    def switch(self) -> _Switch | None: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...


def local_bytes(wafer: _Wafer) -> int:
    """Bytes of one die's own memory: its stacks where it has any, else its SRAM.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> local_bytes(presets.wafer("sram-wafer")) // 2**20
    320
    """
    stacks = wafer.die.hbm_stacks
    return stacks * wafer.rules.hbm_stack_bytes or wafer.die.chip.buffer.capacity_bytes


def _bands(wafer: _Wafer) -> tuple[float, float]:
    """Height that stacks take between two rows of dies, and outside the first and last row.

    The stacks of facing edges share a band where they fit side by side.
    """
    die, rules = wafer.die, wafer.rules
    top, bottom = die.stacks_on_edges
    sharing = rules.hbm_stack_mm * die.hbm_stacks <= die.width_mm * _SLACK
    edges = (top > 0) + (bottom > 0)
    between = min(edges, 1) if sharing else edges
    return between * rules.hbm_stack_depth_mm, edges * rules.hbm_stack_depth_mm


def gaps_mm(wafer: _Wafer) -> tuple[float, float]:
    """Millimetres between neighbouring dies of a row, and of a column with its stacks.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> gaps_mm(presets.wafer("dram-wafer"))
    (0.5, 12.37)
    """
    return wafer.gap_mm, wafer.gap_mm + _bands(wafer)[0]


def extent_mm(wafer: _Wafer, columns: int, rows: int) -> tuple[float, float]:
    """Width and height in mm that so many columns and rows of dies take, stacks included.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> extent_mm(presets.wafer("sram-wafer"), 8, 4)
    (203.5, 101.5)
    """
    between, outside = _bands(wafer)
    return (
        columns * wafer.die.width_mm + (columns - 1) * wafer.gap_mm,
        rows * wafer.die.height_mm + (rows - 1) * (wafer.gap_mm + between) + outside,
    )


def fitting(wafer: _Wafer) -> tuple[int, int]:
    """Columns and rows of dies that fit the window.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> fitting(presets.wafer("sram-wafer"))
    (8, 8)
    """
    between, outside = _bands(wafer)
    window = wafer.rules.window_mm * _SLACK

    def count(side: float, gap: float, taken: float) -> int:
        return max(math.floor((window - taken + gap) / (side + gap)), 0)

    return (
        count(wafer.die.width_mm, wafer.gap_mm, 0.0),
        count(wafer.die.height_mm, wafer.gap_mm + between, outside),
    )


def broken_rules(wafer: _Wafer) -> list[tuple[Rule, str]]:
    """List every rule that a wafer breaks, with what it has and what is accepted.

    A wafer that was validated breaks none; this is for those that were only constructed.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> broken_rules(presets.wafer("dram-wafer"))
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


def _wafer_faults(wafer: _Wafer) -> Iterator[tuple[Rule, str]]:
    columns, rows = wafer.grid
    window = wafer.rules.window_mm
    wide, high = extent_mm(wafer, max(columns, 1), max(rows, 1))
    for name, count, need in (("columns", columns, wide), ("rows", rows, high)):
        if need > window * _SLACK:
            yield (
                "window",
                f"{max(count, 1)} {name} of dies and what stands between them need {need:g} mm; "
                f"expected at most {window:g} mm",
            )
    ways = ((columns, wafer.die.d2d_modules_x), (rows, wafer.die.d2d_modules_y))
    for name, (count, modules), gap in zip(("row", "column"), ways, gaps_mm(wafer), strict=True):
        if wafer.switch is None and count > 1 and modules and gap > wafer.rules.d2d_far_mm * _SLACK:
            yield (
                "reach",
                f"D2D modules must bridge {gap:g} mm between the dies of a {name}; "
                f"expected at most {wafer.rules.d2d_far_mm:g} mm",
            )
    if wafer.memory_bytes <= 0:
        yield (
            "memory",
            f"{local_bytes(wafer)} bytes of memory a die leave nothing beside reserved_bytes, "
            f"{wafer.reserved_bytes}; expected more",
        )
    if wafer.joined > 1 and wafer.io is None:
        yield (
            "joined",
            f"{wafer.joined} wafers without io are not accepted; expected the bandwidth of their "
            "links to each other, or 1 wafer",
        )
    yield from _switch_faults(wafer)
    yield from _fault_map_faults(wafer)


def _switch_faults(wafer: _Wafer) -> Iterator[tuple[Rule, str]]:
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


def _fault_map_faults(wafer: _Wafer) -> Iterator[tuple[Rule, str]]:
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
