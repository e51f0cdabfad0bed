"""One die of a wafer, and the rules of manufacture that it keeps to."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from phaze_fast.hardware.chip import CHIPS, Accelerator
from phaze_fast.hardware.silicon import FULL_AREA, area
from phaze_fast.records import (
    Bandwidth,
    Bytes,
    NamedOr,
    Quantity,
    Record,
    SquareMillimetres,
)

__all__ = ["Die", "FewOrNone", "WaferRules"]

Millimetres = Annotated[float, Field(strict=True, gt=0, le=1000, allow_inf_nan=False)]
"""A length in mm, more than zero."""

DieSide = Annotated[float, Field(strict=True, ge=1, le=1000, allow_inf_nan=False)]
"""A side of a die in mm, 1 or more."""

FewOrNone = Annotated[int, Field(strict=True, ge=0, le=4096)]
"""A whole number, zero or more."""


def _named_chip(value: object) -> object:
    return CHIPS.load(value) if isinstance(value, str) else value


class WaferRules(Record):
    """What manufacture allows: sizes, and what a millimetre of edge carries.

    Examples
    --------
    >>> WaferRules(window_mm=200.0).d2d_module_bytes_per_s
    512000000000.0
    """

    what: ClassVar[str] = "wafer rules"
    reticle_mm: tuple[Millimetres, Millimetres] = (26.0, 33.0)
    """Largest die, either way round: the field of a lithography scanner."""
    window_mm: Millimetres = 215.0
    """Side of the square window in the wafer; that of a Cerebras WSE, 46,225 mm2."""
    d2d_module_mm: Millimetres = 0.55
    """Edge that one die-to-die module takes."""
    d2d_module_bytes_per_s: Bandwidth = 512e9
    """What one module carries per direction: 64 lanes of 64 GT/s, as in UCIe 3.0."""
    d2d_reach_mm: Millimetres = 2.0
    """Distance between two dies up to which a module has that rate: UCIe's advanced packages."""
    d2d_far_mm: Millimetres = 25.0
    """Distance that links bridge at most: UCIe's standard packages."""
    d2d_far_share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.17
    """Of a module's rate that the same edge carries beyond its reach: UCIe 1.0 gives 224 GB/s per
    mm of edge on standard packages and 1,317 on advanced ones, both at 32 GT/s."""
    d2d_byte_j: Quantity = 4e-12
    """Energy of a byte over one die-to-die link: 0.5 pJ per bit, UCIe 1.0's figure for standard
    packages; advanced ones need half of it."""
    d2d_module_mm2: SquareMillimetres = 0.76
    """Area of one module. Assumed: both its directions at the 1,350 GB/s per mm2 that UCIe 1.0
    gives for advanced packages at 45 um bump pitch."""
    hbm_stack_mm: Millimetres = 8.5
    """Edge that one memory stack takes: its 7.75 mm side and clearance."""
    hbm_stack_depth_mm: Millimetres = 11.87
    """How far a stack reaches out from the edge. Assumed: the long side of the HBM2 package,
    7.75 mm x 11.87 mm, the short side along the die."""
    hbm_stack_bytes: Bytes = 16_000_000_000
    """Size of one stack."""
    hbm_stack_bytes_per_s: Bandwidth = 819e9
    """Bandwidth of one stack: 1,024 bits at 6.4 Gb/s, as in HBM3."""
    defect_clustering: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 2.0
    """Alpha of the negative binomial yield; the ITRS uses 2, and a large one is Poisson's."""


class Die(Record):
    """One die of a wafer: a chip, its outline and what stands on its edges.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> die = presets.wafer("dram-wafer").die
    >>> die.hbm_stacks, die.stacks_on_edges
    (2, (1, 1))
    """

    what: ClassVar[str] = "die"
    width_mm: DieSide
    """Length of the top and bottom edges."""
    height_mm: DieSide
    """Length of the left and right edges."""
    chip: Annotated[Accelerator, NamedOr(), BeforeValidator(_named_chip)]
    """What it computes with, without HBM; the buffer is the die's SRAM. In a file also a preset's
    name."""
    d2d_modules_x: FewOrNone
    """Die-to-die modules on each of the left and right edges."""
    d2d_modules_y: FewOrNone
    """Die-to-die modules on each of the top and bottom edges."""
    hbm_stacks: FewOrNone = 0
    """Memory stacks: half on the top edge, rounded up, the others on the bottom edge."""
    network_bytes_per_s: Bandwidth | None = None
    """What all cores together can send into the die's network, a word that many cores need sent
    once. Products share their operands over it; all else stays in the cores' own SRAM. None = as
    fast as the buffer, which then is one memory that all cores share."""
    published: Annotated[bool, Field(strict=True)] = False
    """A product's die, whose silicon is known to fit; the area rule is not applied."""

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
        """Area that its edges enclose."""
        return self.width_mm * self.height_mm

    @cached_property
    def chip_area_mm2(self) -> float:
        """Area of its circuits by the template, with core network and HBM PHYs, without D2D."""
        return _circuits_mm2(self.chip) + self.hbm_stacks * FULL_AREA.hbm_mm2_per_stack


@lru_cache(maxsize=4096)  # a space has many dies with one chip
def _circuits_mm2(chip: Accelerator) -> float:
    return area(chip, FULL_AREA).total_mm2
