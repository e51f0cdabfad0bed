"""Area of chips by term, and their peak power.

Area follows the PHAZE template, exact at its published sizes. Terms that the published formula
leaves out can be switched on, each with its source: the network between cores and buffer, HBM PHYs
with their controllers, registers and control of vector lanes, SerDes of the fabric, links between
dies, and multipliers that take FP8 as well. See `AreaTerms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, ClassVar

import numpy as np
from pydantic import field_validator

from phaze_fast import _core
from phaze_fast.documents import parse_text
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.hardware.chip import Accelerator, chip_records
from phaze_fast.hardware.nodes import REFERENCE_NM, process_node
from phaze_fast.records import Quantity, Record
from phaze_fast.threads import thread_count

__all__ = [
    "EVERY_AREA",
    "FULL_AREA",
    "PUBLISHED_AREA",
    "Area",
    "AreaTerms",
    "EnergyTable",
    "area",
    "area_batch",
    "energy_table",
    "energy_table_at",
    "energy_table_names",
    "power_batch",
]

# Zhang et al., LLMCompass, ISCA 2024 (and its public cost model): die-photo estimates at 7 nm of an
# HBM2e PHY, 10.45 mm2 per 1,024-bit stack, and controller, 552.743 M transistors; and 44.3 M
# transistors per core for its share of the crossbar, the mean of an A100 SM and an MI210 CU.
# 96.3 M transistors/mm2 at 7 nm: Khan and Mann, AI Chips, CSET 2020. An A100 SM reads 64 bytes per
# cycle from L2: NVIDIA A100 whitepaper, 2020.
_TRANSISTORS_PER_MM2 = 96.3e6
_HBM_STACK_MM2 = 10.45 + 552.743e6 / _TRANSISTORS_PER_MM2
_PORT_BYTE_MM2 = 44.3e6 / _TRANSISTORS_PER_MM2 / 64.0
# The same: 996,200 transistors of control per vector lane, the mean of an A100 SM and an MI210 CU;
# and the register file of 32 lanes, 16,384 words of 32 bits with 4 ports, by the regression of
# Raghavan et al. (EMPIRE), 23.553 mm2 at 90 nm and 1.6 M transistors/mm2.
_CONTROL_LANE_MM2 = 0.9962e6 / _TRANSISTORS_PER_MM2
_REGISTERS_LANE_MM2 = 23.553 * 1.6e6 / _TRANSISTORS_PER_MM2 / 32.0
# NVLink 3 of 25 GB/s a direction: PHY 1.888 mm2, controller 74.632 M transistors (LLMCompass).
_LINK_BYTE_MM2 = (1.888 + 74.632e6 / _TRANSISTORS_PER_MM2) / 25e9


class AreaTerms(Record):
    """Which terms an area has beyond the published formula.

    Examples
    --------
    >>> PUBLISHED_AREA.hbm, FULL_AREA.hbm
    (False, True)
    """

    what: ClassVar[str] = "area terms"
    network: bool = False
    """Count the network between cores and buffer."""
    hbm: bool = False
    """Count the HBM PHYs and controllers."""
    control: bool = False
    """Count registers and control of vector lanes."""
    links: bool = False
    """Count SerDes and controllers of the links that a chip has."""
    die_to_die: bool = False
    """Count links between dies where the logic is cut into several."""
    formats: bool = False
    """Count what FP8 adds to the multipliers of chips that have it."""
    network_mm2_per_port_byte: Quantity = _PORT_BYTE_MM2
    """Per core and byte/cycle of its port. LLMCompass (ISCA 2024): 44.3 M transistors per core of
    64 B/cycle at 96.3 M transistors/mm2."""
    hbm_mm2_per_stack: Quantity = _HBM_STACK_MM2
    """Per 1,024-bit stack. LLMCompass (ISCA 2024): HBM2e PHY 10.45 mm2 + controller 5.74 mm2; of
    other generations the same, an assumption."""
    control_mm2_per_lane: Quantity = _CONTROL_LANE_MM2 + _REGISTERS_LANE_MM2
    """Per vector lane. LLMCompass (ISCA 2024): control 0.0103 mm2, 2 KiB of registers with 4 ports
    0.0122 mm2."""
    link_mm2_per_byte_per_s: Quantity = _LINK_BYTE_MM2
    """Per byte/s of a link in one direction. LLMCompass (ISCA 2024): NVLink 3, 2.66 mm2 of 25
    GB/s."""
    die_to_die_share: Quantity = 0.1
    """Of the area of all dies. Naffziger et al., ISCA 2021: four dies of 213 mm2 in place of one of
    777 mm2, 10% more."""
    fp8_share: Quantity = 0.1
    """Of the multipliers' area. Assumption: two 4-bit mantissa products share an 8-bit one, with
    exponents and alignment of their own."""
    process_nm: Quantity = REFERENCE_NM
    """Process node; PHYs do not shrink (LLMCompass), controllers and all else do."""

    @field_validator("process_nm")
    @classmethod
    def _known_node(cls, value: float) -> float:
        try:
            return process_node(value).nm
        except InvalidInputError as error:
            raise ValueError(str(error).removeprefix("process_nm: ")) from None

    @property
    def rates(self) -> tuple[float, ...]:
        """What the kernels take, in the order of their record; zero where a term is off."""
        node = process_node(self.process_nm)
        logic = 1.0 + node.logic_growth

        def of(on: bool, value: float, phy_share: float = 0.0) -> float:
            return value * (phy_share + (1.0 - phy_share) * logic) if on else 0.0

        return (
            of(self.network, self.network_mm2_per_port_byte),
            of(self.hbm, self.hbm_mm2_per_stack, _HBM_PHY_SHARE),
            of(self.control, self.control_mm2_per_lane),
            of(self.links, self.link_mm2_per_byte_per_s, _LINK_PHY_SHARE),
            self.die_to_die_share if self.die_to_die else 0.0,
            self.fp8_share if self.formats else 0.0,
            node.logic_growth,
            node.sram_growth,
        )


_HBM_PHY_SHARE = 10.45 / _HBM_STACK_MM2
_LINK_PHY_SHARE = 1.888 / 25e9 / _LINK_BYTE_MM2


PUBLISHED_AREA = AreaTerms()
"""The formula of the PHAZE paper: cores, local buffers and global buffer only."""

FULL_AREA = AreaTerms(network=True, hbm=True)
"""With the core-to-buffer network and the HBM PHYs."""

EVERY_AREA = AreaTerms(
    network=True, hbm=True, control=True, links=True, die_to_die=True, formats=True
)
"""With every term."""


@dataclass(frozen=True)
class Area:
    """Area of one chip by term, mm2.

    `extrapolated` is true where an SRAM is smaller or larger than any of the published table.
    """

    tensor_mm2: float
    vector_mm2: float
    buffer_mm2: float
    network_mm2: float
    hbm_mm2: float
    control_mm2: float
    links_mm2: float
    die_to_die_mm2: float
    total_mm2: float
    extrapolated: bool


class EnergyTable(Record):
    """Energy of each kind of event, with its source. Joules; static power in W/mm2."""

    what: ClassVar[str] = "energy table"
    name: str
    """What to call it."""
    mac_j: Quantity
    """One bf16 multiply with fp32 accumulate."""
    vector_op_j: Quantity
    """One fp32 operation of a vector lane."""
    local_byte_j: Quantity
    """One byte to or from a core's local buffer."""
    buffer_byte_j: Quantity
    """One byte to or from the global buffer."""
    hbm_byte_j: Quantity
    """One byte to or from HBM."""
    network_byte_j: Quantity
    """One byte over an off-package link."""
    static_w_per_mm2: Quantity
    """Leakage and clock tree."""
    sources: tuple[str, ...]
    """Where the figures come from, term by term."""

    def to_record(self) -> np.ndarray[Any, Any]:
        """Lay the table out as the one-row record the kernels take."""
        row = np.zeros(1, dtype=_core.ENERGY_DTYPE)
        for field in _core.ENERGY_DTYPE.names or ():
            row[field] = getattr(self, field)
        return row


def area(chip: Accelerator, terms: AreaTerms = PUBLISHED_AREA) -> Area:
    """Area of one chip by term.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> round(area(presets.chip("phaze-tpuv4")).total_mm2, 2)
    278.83
    """
    row = area_batch([chip], terms)[0]
    return Area(
        **{name: float(row[name]) for name in Area.__annotations__ if name != "extrapolated"},
        extrapolated=bool(row["extrapolated"]),
    )


def area_batch(
    chips: Sequence[Accelerator] | np.ndarray[Any, Any],
    terms: AreaTerms = PUBLISHED_AREA,
    threads: int | None = None,
) -> np.ndarray[Any, Any]:
    """Area of many chips by term.

    Parameters
    ----------
    chips
        Accelerators, or an array of ``_core.CHIP_DTYPE`` such as `ArchitectureSpace.chips` gives.
    terms
        Which terms to count.
    threads
        At most this many threads, by default all cores; the result does not depend on it.

    Returns
    -------
    numpy.ndarray
        Read-only, one row per chip, fields in mm2 (``tensor_mm2`` ... ``total_mm2``). A malformed
        row has ``status`` other than 0 and NaN areas.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> area_batch([presets.chip("phaze-tpuv4")])["buffer_mm2"].round(3).tolist()
    [175.423]
    """
    return _core.chip_area(_records(chips), terms.rates, thread_count(threads))


def power_batch(
    chips: Sequence[Accelerator] | np.ndarray[Any, Any],
    table: EnergyTable | None = None,
    terms: AreaTerms = PUBLISHED_AREA,
    threads: int | None = None,
) -> np.ndarray[Any, Any]:
    """Peak power of many chips: every unit busy, every memory at full bandwidth. Watts.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> power_batch([presets.chip("phaze-tpuv4")]).round(0).tolist()
    [188.0]
    """
    records = _records(chips)
    total_mm2 = _core.chip_area_total(records, terms.rates, thread_count(threads))
    table = energy_table_at(terms.process_nm) if table is None else table
    return _core.peak_power(records, table.to_record(), total_mm2, thread_count(threads))


def _records(chips: Sequence[Accelerator] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return chips if isinstance(chips, np.ndarray) else chip_records(list(chips))


def energy_table_names() -> list[str]:
    """Names of the tables that come with the package."""
    folder = resources.files(__package__) / "data" / "energy"
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name[-5:] == ".yaml")


def energy_table(name: str = "7nm") -> EnergyTable:
    """Load an energy table by name.

    Examples
    --------
    >>> energy_table("7nm").mac_j
    5.9e-13
    """
    if name not in energy_table_names():
        raise InvalidInputError(
            f"energy table: {name!r} is not accepted; {nearest(name, energy_table_names())}"
        )
    return _energy_table(name)


_SCALED = ("mac_j", "vector_op_j", "local_byte_j", "buffer_byte_j")
"""Energies that fall with the node; those of HBM and links do not, an assumption."""


@lru_cache(maxsize=16)
def energy_table_at(nm: float) -> EnergyTable:
    """Give the table of a node: between 45 and 7 nm, and on to 5 nm, a power of the node's name.

    Examples
    --------
    >>> energy_table_at(7.0) == energy_table("7nm")
    True
    >>> energy_table("7nm").mac_j < energy_table_at(16.0).mac_j < energy_table("45nm").mac_j
    True
    """
    usual = energy_table("7nm")
    if nm == REFERENCE_NM:
        return usual
    old = energy_table("45nm")
    way = math.log(process_node(nm).nm / REFERENCE_NM) / math.log(45.0 / REFERENCE_NM)
    scaled = {
        name: getattr(usual, name) * (getattr(old, name) / getattr(usual, name)) ** way
        for name in _SCALED
    }
    return usual.replace(name=f"{nm:g}nm", **scaled)


@lru_cache(maxsize=16)  # every call of the cost model asks for one
def _energy_table(name: str) -> EnergyTable:
    file = resources.files(__package__) / "data" / "energy" / f"{name}.yaml"
    return EnergyTable.from_dict(parse_text(file.read_text("utf-8"), f"{name}.yaml"), name)
