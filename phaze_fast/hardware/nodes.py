"""Process nodes: how dense logic and SRAM are, what a wafer costs, what an event takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from phaze_fast.errors import InvalidInputError

__all__ = ["REFERENCE_NM", "ProcessNode", "process_node"]

REFERENCE_NM = 7.0
"""The node of the area formula and of the usual energy table."""


@dataclass(frozen=True)
class ProcessNode:
    """One node as its maker names it."""

    nm: float
    transistors_per_mm2: float
    """Khan and Mann, AI Chips, CSET 2020, as LLMCompass (ISCA 2024) takes them."""
    sram_cell_um2: float
    """High-density six-transistor cell, TSMC: IEDM 2013 to 2019 (28, 16, 10, 7 and 5 nm)."""
    wafer_usd: float
    """Khan and Mann, AI Chips, CSET 2020, table 9: price of a processed 300 mm wafer."""
    defects_per_cm2: float
    """0.09 for a mature 7 nm process, as its maker published; others are assumed alike."""

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
    """Give a node.

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
        raise InvalidInputError(f"process_nm: {nm!r} is not accepted; expected one of {known}")
    return _NODES[nm]
