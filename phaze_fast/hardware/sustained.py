"""Rates that chips reach in long training runs, as shares of their peaks."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from phaze_fast.documents import Presets
from phaze_fast.hardware.chip import Accelerator
from phaze_fast.hardware.tuning import Tuning
from phaze_fast.records import Record, Share


class SustainedRates(Record):
    """Shares of the peaks that measured chips of a kind sustain, for chips without measurements.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> tpu = sustained_rates("tpu")
    >>> tpu.applied(presets.chip("tpuv4")).tuning.efficiency
    0.78
    >>> tpu.applied(presets.chip("h200")) == presets.chip("h200")  # has rates of its own
    True
    """

    what: ClassVar[str] = "sustained rates"
    name: str
    """Name of the set."""
    compute: Share
    """Share of the peak of tensor cores, attention included."""
    hbm: Share = 1.0
    """Share of HBM bandwidth."""
    network: Share = 1.0
    """Share of the bandwidth of the interconnect's links."""
    sources: tuple[str, ...]
    """Measurements that the shares come from."""

    def applied(self, chip: Accelerator) -> Accelerator:
        """Return a chip with these rates; one that has rates of its own is returned as it is."""
        if chip.tuning != Tuning():
            return chip
        attention = chip.tuning.attention.replace(
            efficiency=self.compute, backward_efficiency=self.compute
        )
        tuning = chip.tuning.replace(
            efficiency=self.compute,
            hbm_share=self.hbm,
            attention=attention,
            sources=self.sources,
        )
        return chip.replace(tuning=tuning)


SUSTAINED = Presets(
    "sustained rates", "phaze_fast.hardware/data/sustained", SustainedRates.from_dict
)


def sustained_rates(name_or_path: str | Path) -> SustainedRates:
    """Load sustained rates by name, or from a YAML or JSON file.

    Examples
    --------
    >>> sustained_rates("tpu").compute
    0.78
    """
    return SUSTAINED.load(name_or_path)
