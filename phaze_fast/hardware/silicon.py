"""Area, energy and power of chips at a process node, and the highest clock under a power cap.

Area follows the PHAZE template, exact at its published sizes. Terms that the published formula
omits can be enabled, each with its source: the network between cores and buffer, HBM PHYs with
their controllers, registers and control of vector lanes, SerDes of the interconnect, links between
dies, and multipliers that also support FP8. See `AreaTerms`.

Logic draws dynamic power in proportion to clock x voltage squared, and leaks in proportion to
voltage; a lower clock needs less voltage, down to a least one. HBM has a supply of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pydantic import field_validator, model_validator

from phaze_fast import _core
from phaze_fast.documents import Presets
from phaze_fast.errors import InvalidInputError, not_accepted
from phaze_fast.hardware.chip import Accelerator, chip_records
from phaze_fast.records import Quantity, Record
from phaze_fast.tables import Array
from phaze_fast.threads import thread_count

# ---- process nodes ----


REFERENCE_NM = 7.0
"""The node of the area formula and of the energy table ``7nm``, in nm."""


@dataclass(frozen=True)
class ProcessNode:
    """One process node, by the name that its foundry uses."""

    nm: float
    transistors_per_mm2: float
    """Khan and Mann, AI Chips, CSET 2020, as LLMCompass (ISCA 2024) takes them."""
    sram_cell_um2: float
    """High-density six-transistor cell, TSMC: IEDM 2013 to 2019 (28, 16, 10, 7 and 5 nm)."""
    wafer_usd: float
    """Khan and Mann, AI Chips, CSET 2020, table 9: price of a processed 300 mm wafer."""
    defects_per_cm2: float
    """0.09 for a mature 7 nm process, as its maker published; assumed equal for other nodes."""

    @property
    def logic_growth(self) -> float:
        """How much larger logic is than at 7 nm, less 1."""
        return process_node(REFERENCE_NM).transistors_per_mm2 / self.transistors_per_mm2 - 1.0

    @property
    def sram_growth(self) -> float:
        """How much larger SRAM is than at 7 nm, less 1."""
        return self.sram_cell_um2 / process_node(REFERENCE_NM).sram_cell_um2 - 1.0


_NODES = {
    28.0: ProcessNode(28.0, 15.3e6, 0.127, 2891.0, 0.09),
    16.0: ProcessNode(16.0, 28.9e6, 0.070, 3984.0, 0.09),
    10.0: ProcessNode(10.0, 52.5e6, 0.042, 5992.0, 0.09),
    7.0: ProcessNode(7.0, 96.3e6, 0.027, 9346.0, 0.09),
    5.0: ProcessNode(5.0, 138.2e6, 0.021, 16988.0, 0.09),
}


@cache
def process_node(nm: float) -> ProcessNode:
    """Return a process node by its name in nanometres.

    Raises
    ------
    InvalidInputError
        Where its figures are not known.

    Examples
    --------
    >>> round(process_node(16.0).logic_growth, 2), round(process_node(5.0).sram_growth, 2)
    (2.33, -0.22)
    """
    if nm not in _NODES:
        known = ", ".join(f"{n:g}" for n in _NODES)
        raise not_accepted("process_nm", nm, f"one of {known}")
    return _NODES[nm]


# ---- area and energy ----


# Zhang et al., LLMCompass, ISCA 2024 (and its public cost model): die-photo estimates at 7 nm of an
# HBM2e PHY, 10.45 mm2 per 1,024-bit stack, and controller, 552.743 M transistors; and 44.3 M
# transistors per core for its share of the crossbar, the mean of an A100 SM and an MI210 CU.
# 96.3 M transistors/mm2 at 7 nm: Khan and Mann, AI Chips, CSET 2020. An A100 SM reads 64 bytes per
# cycle from L2: NVIDIA A100 whitepaper, 2020.
_TRANSISTORS_PER_MM2 = 96.3e6
_HBM_STACK_MM2 = 10.45 + 552.743e6 / _TRANSISTORS_PER_MM2
_PORT_BYTE_MM2 = 44.3e6 / _TRANSISTORS_PER_MM2 / 64.0
# LLMCompass: 996,200 transistors of control per vector lane, the mean of an A100 SM and an MI210
# CU; and the register file of 32 lanes, 16,384 words of 32 bits with 4 ports, by the regression of
# Raghavan et al. (EMPIRE), 23.553 mm2 at 90 nm and 1.6 M transistors/mm2.
_CONTROL_LANE_MM2 = 0.9962e6 / _TRANSISTORS_PER_MM2
_REGISTERS_LANE_MM2 = 23.553 * 1.6e6 / _TRANSISTORS_PER_MM2 / 32.0
# NVLink 3 of 25 GB/s a direction: PHY 1.888 mm2, controller 74.632 M transistors (LLMCompass).
_LINK_BYTE_MM2 = (1.888 + 74.632e6 / _TRANSISTORS_PER_MM2) / 25e9


class AreaTerms(Record):
    """Terms of a chip's area beyond the published formula.

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
    """Area per core and byte/cycle of its port. LLMCompass (ISCA 2024): 44.3 M transistors per core
    of 64 B/cycle at 96.3 M transistors/mm2."""
    hbm_mm2_per_stack: Quantity = _HBM_STACK_MM2
    """Area per 1,024-bit stack. LLMCompass (ISCA 2024): HBM2e PHY 10.45 mm2 + controller 5.74 mm2;
    assumed equal for other generations."""
    control_mm2_per_lane: Quantity = _CONTROL_LANE_MM2 + _REGISTERS_LANE_MM2
    """Area per vector lane. LLMCompass (ISCA 2024): control 0.0103 mm2, 2 KiB of registers with 4
    ports 0.0122 mm2."""
    link_mm2_per_byte_per_s: Quantity = _LINK_BYTE_MM2
    """Area per byte/s of a link in one direction. LLMCompass (ISCA 2024): NVLink 3, 2.66 mm2 for 25
    GB/s."""
    die_to_die_share: Quantity = 0.1
    """Area of links between dies over that of all other terms. Naffziger et al., ISCA 2021: four
    dies of 213 mm2 in place of one of 777 mm2, 10% more."""
    fp8_share: Quantity = 0.1
    """Area that FP8 adds over that of the multipliers. Assumption: two 4-bit mantissa products
    share an 8-bit one, with exponents and alignment of their own."""
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
        """Factors of the terms in the order that the kernels take; zero if a term is off."""
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
"""The published terms, the core-to-buffer network, and HBM PHYs with their controllers."""

EVERY_AREA = AreaTerms(
    network=True, hbm=True, control=True, links=True, die_to_die=True, formats=True
)
"""Every term."""


@dataclass(frozen=True)
class Area:
    """Area of one chip by term, mm2.

    `extrapolated` is true where the size of an SRAM is outside the published table.
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
    """Name of the table."""
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
    """Leakage of one mm2; includes the clock tree where `clock_j_per_mm2` is 0."""
    clock_j_per_mm2: Quantity = 0.0
    """Clock tree of one mm2 in one cycle."""
    core_cycle_j: Quantity = 0.0
    """Control of one tensor core in one cycle, shared among the cycle's multiply-accumulates."""
    die_byte_j: Quantity = 0.0
    """One byte from one die of a package to another."""
    stacked_byte_j: Quantity = 0.0
    """One byte to or from DRAM stacked on the logic."""
    hbm_stack_w: Quantity = 0.0
    """Refresh, PHY and controller of one idle stack of HBM, watts."""
    sources: tuple[str, ...]
    """Where the figures come from, term by term."""

    def at_clock(self, share: float) -> EnergyTable:
        """Return the table for a share of the rated clock, at the voltage that this clock needs.

        Switching energy is proportional to the square of the voltage, leakage power to the voltage
        (`PowerModel`); HBM and links have clocks and voltages of their own.

        Examples
        --------
        >>> table = energy_table("7nm")
        >>> table.at_clock(1.0) == table, table.at_clock(0.5).mac_j < 0.6 * table.mac_j
        (True, True)
        """
        if share == 1.0:
            return self
        swing = PowerModel().voltage_share(share)
        scaled = {name: getattr(self, name) * swing**2 for name in (*_SCALED, "core_cycle_j")}
        scaled["clock_j_per_mm2"] = self.clock_j_per_mm2 * share * swing**2
        scaled["static_w_per_mm2"] = self.static_w_per_mm2 * swing
        return self.replace(**scaled)

    def to_record(self) -> np.ndarray[Any, Any]:
        """Return the table as the one-row record the kernels take."""
        row = np.zeros(1, dtype=_core.ENERGY_DTYPE)
        for field in _core.ENERGY_DTYPE.names or ():
            row[field] = getattr(self, field)
        return row

    def of_chips(self, records: Array) -> Array:
        """Return the table of each chip.

        `mac_j` includes its share of the core's control, `buffer_byte_j` transfers between dies.
        """
        rows: Array = np.repeat(self.to_record(), len(records))
        products = records["tensor_width"] * records["tensor_depth"]  # 0 where a record is bad
        rows["mac_j"] += self.core_cycle_j / np.maximum(products, 1)
        rows["buffer_byte_j"] += self.die_byte_j * (1.0 - 1.0 / np.maximum(records["dies"], 1))
        return rows

    def idle_w(self, records: Array, area_mm2: Array) -> dict[str, Array]:
        """Watts of idle chips: leakage, clock tree, and the background power of HBM."""
        return {
            "leakage": area_mm2 * self.static_w_per_mm2,
            "clock": area_mm2 * self.clock_j_per_mm2 * records["clock_hz"],
            "hbm_background": records["hbm_stacks"] * self.hbm_stack_w,
        }


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
        Terms to count.
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


_ENERGY_TABLES = Presets("energy table", "phaze_fast.hardware/data/energy", EnergyTable.from_dict)


def energy_table(name_or_path: str | Path = "7nm") -> EnergyTable:
    """Load an energy table by name, or from a YAML or JSON file.

    Examples
    --------
    >>> energy_table("7nm").mac_j
    5.9e-13
    """
    return _ENERGY_TABLES.load(name_or_path)


_SCALED = ("mac_j", "vector_op_j", "local_byte_j", "buffer_byte_j")
"""Energies that fall with the node; those of HBM and links do not, an assumption."""


@lru_cache(maxsize=16)
def energy_table_at(nm: float) -> EnergyTable:
    """Return the energy table of a node, interpolated from 45 and 7 nm as a power of nm.

    Examples
    --------
    >>> energy_table_at(7.0) == energy_table("7nm")
    True
    >>> energy_table("7nm").mac_j < energy_table_at(16.0).mac_j < energy_table("45nm").mac_j
    True
    """
    return _at_node(process_node(nm).nm)


def _at_node(nm: float) -> EnergyTable:
    """Return the energy table of circuits at any node, also one that `process_node` refuses."""
    usual = energy_table("7nm")
    if nm == REFERENCE_NM:
        return usual
    old = energy_table("45nm")
    exponent = math.log(nm / REFERENCE_NM) / math.log(45.0 / REFERENCE_NM)
    scaled = {
        name: getattr(usual, name) * (getattr(old, name) / getattr(usual, name)) ** exponent
        for name in _SCALED
    }
    return usual.replace(name=f"{nm:g}nm", **scaled)


_LOGIC = ("core_cycle_j", "clock_j_per_mm2")
"""Energies that fall with the node as a vector operation's does."""


@lru_cache(maxsize=16)
def energy_table_of(nm: float | None = None, die_byte_j: float = 0.0) -> EnergyTable:
    """Return what whole chips of a node spend on each event: the table of a plan's energy.

    Circuits scale as in `energy_table_at`. Below 7 nm they are taken as at 7 nm: chips of 5 and 4
    nm run at higher clocks, which takes back what the node saves (H100, docs/hardware.md).

    Parameters
    ----------
    nm
        Process node; 7 nm where it is not known.
    die_byte_j
        Joules of one byte between dies.

    Examples
    --------
    >>> energy_table_of(4.0) == energy_table_of(7.0)
    True
    >>> energy_table_of(16.0).mac_j > energy_table_of(7.0).mac_j
    True
    """
    table = energy_table("chip-7nm").replace(die_byte_j=die_byte_j)
    if nm is None or nm <= REFERENCE_NM:
        return table
    old, usual = _at_node(nm), energy_table("7nm")
    growth = {name: getattr(old, name) / getattr(usual, name) for name in _SCALED}
    growth |= dict.fromkeys(_LOGIC, growth["vector_op_j"])
    scaled = {name: getattr(table, name) * factor for name, factor in growth.items()}
    return table.replace(name=f"chip-{nm:g}nm", **scaled)


def die_areas_mm2(records: Array, nm: float | None = None) -> Array:
    """Total areas of chips by the PHAZE template, every term counted, mm2.

    Nodes whose density is not known count as 7 nm.
    """
    terms = EVERY_AREA.replace(process_nm=nm if nm in _NODES else REFERENCE_NM)
    areas: Array = area_batch(records, terms)["total_mm2"].copy()
    return areas


# ---- power at a clock ----


_HALVINGS = 60


class PowerModel(Record):
    """Power as a function of clock and voltage.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> model, chips = PowerModel(), chip_records([presets.chip("tpuv4")])
    >>> shares = model.clock_shares(chips, max_w=150.0)
    >>> model.watts(chips, 1.0).round().tolist(), model.watts(chips, shares).round().tolist()
    ([214.0], [150.0])
    """

    what: ClassVar[str] = "power model"
    volts: Quantity = 0.75
    """Supply voltage at the rated clock. Assumption: a nominal supply of 7 nm logic."""
    least_volts: Quantity = 0.55
    """Lowest voltage at which the logic works. Assumption."""
    least_volts_at: Quantity = 0.5
    """Share of the rated clock that the lowest voltage supports. Assumption: voltage rises linearly
    from there."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0.0 < self.least_volts <= self.volts:
            raise not_accepted(
                "least_volts", self.least_volts, f"more than 0 and at most volts, {self.volts!r}"
            )
        if not 0.0 < self.least_volts_at < 1.0:
            raise not_accepted("least_volts_at", self.least_volts_at, "a share between 0 and 1")
        return self

    def voltage_share(self, share: Any) -> Any:
        """Return the voltage that a share of the rated clock needs, over the rated; also arrays."""
        fraction = np.maximum(0.0, (share - self.least_volts_at) / (1.0 - self.least_volts_at))
        volts = self.least_volts + fraction * (self.volts - self.least_volts)
        return volts / self.volts

    def watts(
        self,
        records: Array,
        clock_shares: Array | float,
        table: EnergyTable | None = None,
        terms: AreaTerms = FULL_AREA,
    ) -> Array:
        """Peak power of chips at shares of their rated clocks, 0 to 1.

        The sum of dynamic power of logic and SRAM, leakage, and HBM and links at full bandwidth;
        these have clocks of their own.
        """
        return self._watts(_parts_w(records, table, terms), clock_shares)

    def _watts(self, parts: tuple[Array, Array, Array], shares: Array | float) -> Array:
        dynamic, leakage, fixed = parts
        swing = self.voltage_share(shares)
        watts: Array = dynamic * shares * swing**2 + leakage * swing + fixed
        return watts

    def clock_shares(
        self,
        records: Array,
        max_w: float,
        table: EnergyTable | None = None,
        terms: AreaTerms = FULL_AREA,
    ) -> Array:
        """Highest shares of the rated clock, at most 1, that a power cap leaves many chips.

        Parameters
        ----------
        records
            Chips, such as `ArchitectureSpace.chips`.
        max_w
            The cap, watts.

        Returns
        -------
        numpy.ndarray
            One share per chip; NaN where leakage, links and HBM alone are above the cap.
        """
        parts = _parts_w(records, table, terms)
        low, high = np.zeros(len(records)), np.ones(len(records))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            within = self._watts(parts, middle) <= max_w
            low, high = np.where(within, middle, low), np.where(within, high, middle)
        shares = np.where(self._watts(parts, 1.0) <= max_w, 1.0, low)
        clock_shares: Array = np.where(self._watts(parts, 0.0) < max_w, shares, np.nan)
        return clock_shares


def _parts_w(
    records: Array, table: EnergyTable | None, terms: AreaTerms
) -> tuple[Array, Array, Array]:
    """Power at the rated clock and voltage, watts: dynamic, leakage, and HBM and links."""
    table = energy_table_at(terms.process_nm) if table is None else table
    hbm = records["hbm_bytes_per_s"] * table.hbm_byte_j
    fixed = hbm + records["links"] * records["link_bytes_per_s"] * table.network_byte_j
    leakage = table.static_w_per_mm2 * area_batch(records, terms)["total_mm2"]
    return power_batch(records, table, terms) - fixed - leakage, leakage, fixed
