"""Power, yield and cost of a whole wafer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from phaze_fast.hardware.package import Prices
from phaze_fast.hardware.silicon import EnergyTable, energy_table
from phaze_fast.wafer.hardware.wafer import Wafer

_CARRIER_USD = 1937.0
_BOND_YIELD = 0.99


@dataclass(frozen=True)
class WaferTotals:
    """Peak power, yield and cost of a wafer."""

    die_peak_w: float
    """Power of one die with every unit busy and every memory at its full rate."""
    peak_w: float
    """Power of all working dies."""
    assembly_yield: float
    """Share of wafers with at most as many dead dies as spares: after bonding of tested dies, or
    after fabrication of a monolithic wafer."""
    cost_usd: float
    """Cost of one good wafer: silicon, memory stacks and carrier."""

    def to_dict(self) -> dict[str, float]:
        """Return plain data."""
        return asdict(self)


def _die_peak_w(wafer: Wafer, table: EnergyTable) -> float:
    """Power of one die; SRAM that is both core-local memory and the buffer is counted once."""
    chip, die = wafer.chip, wafer.die
    cycles = (
        chip.tensor_core.macs_per_cycle * table.mac_j
        + chip.vector_core.ops_per_cycle * table.vector_op_j
    )
    sram = chip.buffer_bandwidth_bytes_per_s
    if die.network_bytes_per_s is None:  # one buffer: its own accesses, and those at the ports
        memory_w = sram * (table.buffer_byte_j + table.local_byte_j)
    else:
        memory_w = sram * table.local_byte_j + die.network_bytes_per_s * table.buffer_byte_j
    hbm_w = chip.hbm.bandwidth_bytes_per_s * table.hbm_byte_j if chip.hbm else 0.0
    x, y = wafer.link_bytes_per_s
    sent = 2.0 * (x + y) if wafer.switch is None else 2.0 * x  # over four edges, or up and down
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
    costs what processing one costs.

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
