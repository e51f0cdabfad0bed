"""Chips as arrays for the cost kernels, for one number format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError, check_type, not_accepted
from phaze_fast.hardware import (
    Accelerator,
    EnergyTable,
    Tuning,
    area_batch,
    chip_records,
    energy_table_of,
    presets,
    tuning_record,
)
from phaze_fast.hardware.chip import Dtype, StackedDram, port_bytes_per_cycle, with_other_cores
from phaze_fast.hardware.silicon import die_areas_mm2
from phaze_fast.tables import Array

T = TypeVar("T")

PRECISIONS: dict[str, tuple[float, float]] = {
    "bf16": (2.0, 2.0),
    "fp16": (2.0, 2.0),
    "fp8": (1.0, 2.0),
    "fp4": (0.5, 2.0),
    "int8": (1.0, 2.0),
    "fp32": (4.0, 4.0),
    "tf32": (4.0, 4.0),
}
"""Bytes of an input and an output in each number format."""


class Streams(NamedTuple):
    """Numbers of a format on chips, and how they stream through the buffer, for the kernels."""

    in_bytes: float
    out_bytes: float
    sum_bytes: float
    rate: float
    """Speed relative to bf16."""
    strip_depth: float = 64.0
    """Elements of a row that stream at a time."""
    copies: float = 2.0
    """Strips and tiles of each kind in the buffer at once."""
    spills: float = 2.0
    """Transfers of a partial sum that leaves the chip: 2, or 1 where it is added in memory."""


@dataclass(frozen=True)
class Machines:
    """Chips as the kernels take them; operands have one size and relative speed on all chips."""

    records: Array
    tuning_of: Array
    tunings: Array
    precision: Streams
    energy: Array
    """What each chip spends on events, one energy table per chip."""
    other_energy: Array
    """Energy tables of each chip's tensor cores of another shape, where it has some."""
    idle_w: dict[str, Array]
    """Watts of each chip that computes nothing: leakage, clock, HBM background."""
    limit_w: Array
    """Rated power of each chip, which its firmware keeps to; infinite where none is given."""
    stacked: StackedDram | None = None
    """DRAM between buffer and HBM, the same on all chips."""
    stacked_byte_j: float = 0.0
    """Joules of a byte read from or written to stacked DRAM."""
    products_done: float = 1.0
    """Share of the multiplications of forward products with weights that is done: less than 1 where
    the cores skip zeros."""

    def __len__(self) -> int:
        return len(self.records)

    def take(self, chips: Array | slice) -> Machines:
        """Select chips by position."""
        return replace(
            self,
            records=np.ascontiguousarray(self.records[chips]),
            tuning_of=np.ascontiguousarray(self.tuning_of[chips]),
            energy=np.ascontiguousarray(self.energy[chips]),
            other_energy=np.ascontiguousarray(self.other_energy[chips]),
            idle_w={name: watts[chips] for name, watts in self.idle_w.items()},
            limit_w=self.limit_w[chips],
        )

    @property
    def static_w(self) -> Array:
        """Power of each chip that computes nothing, watts."""
        watts: Array = np.sum(list(self.idle_w.values()), axis=0)
        return watts

    @property
    def prices(self) -> Array:
        """Energy tables for the kernels; multiplications scale with their operands' bytes."""
        record = self.energy.copy()
        record["mac_j"] *= self.precision.in_bytes / PRECISIONS["bf16"][0]
        return record

    @property
    def sparse(self) -> Machines:
        """The chips for forward products with weights, whose zeros the cores may skip."""
        if self.products_done == 1.0:
            return self
        spent, other = self.energy.copy(), self.other_energy.copy()
        for table in (spent, other):
            table["mac_j"] *= self.products_done
        faster = self.precision._replace(rate=self.precision.rate / self.products_done)
        return replace(self, precision=faster, energy=spent, other_energy=other, products_done=1.0)

    @property
    def other(self) -> Machines | None:
        """The chips with their tensor cores of another shape; none where no chip has any."""
        if not (self.records["other_cores"] > 0).any():
            return None
        return replace(self, records=with_other_cores(self.records), energy=self.other_energy)

    @property
    def ideal(self) -> Machines:
        """Chips that bound the operators of these from below, on either kind of tensor cores.

        Each has the kind with more multipliers. Its ports are at least as wide in total as those of
        either kind, and each at least as wide as those of the first kind.
        """
        if self.other is None:
            return self
        first, second = self.records, self.other.records
        macs, ports = (
            [one["tensor_cores"] * share(one).astype(np.float64) for one in (first, second)]
            for share in (lambda r: r["tensor_width"] * r["tensor_depth"], port_bytes_per_cycle)
        )
        better = np.where(macs[1] > macs[0], second, first)
        wide = np.maximum(*ports) / better["tensor_cores"]
        better["buffer_port_bytes_per_cycle"] = np.where(
            first["other_cores"] > 0,
            np.maximum(port_bytes_per_cycle(first), wide),
            first["buffer_port_bytes_per_cycle"],
        )
        return replace(self, records=better)

    @property
    def arguments(self) -> tuple[Array, Array, Array, Streams]:
        """Arguments that every kernel takes about the chips."""
        return self.records, self.tuning_of, self.tunings, self.precision


def on_tensor_cores(ops: Array) -> Array:
    """Return which operators are products (of convolutions too) or attention."""
    function = ops["function"]
    products: Array = (function <= _core.FUNCTIONS.index("attention-backward")) | (
        function >= _core.FIRST_CONVOLUTION
    )
    return products


def in_format(ops: Array, precision: Streams) -> Array:
    """Return operators with their bytes, counted in bf16, converted to another number format.

    Operands of products have that format; all other tensors have the format of outputs.
    """
    in_share, out_share = precision.in_bytes / 2.0, precision.out_bytes / 2.0
    if in_share == out_share == 1.0:
        return ops
    scaled = ops.copy()
    products = (ops["function"] == 0) | (ops["function"] >= _core.FIRST_CONVOLUTION)
    scaled["read_bytes"] *= np.where(products, in_share, out_share)
    scaled["write_bytes"] *= out_share
    return scaled


def _listed(chips: Accelerator | str | Sequence[Accelerator | str]) -> list[Accelerator]:
    """Return accelerators, each given as a record or by the name of a preset or file."""
    several = isinstance(chips, Sequence) and not isinstance(chips, str)
    listed: list[Any] = list(chips) if isinstance(chips, Sequence) and several else [chips]
    named = [presets.chip(chip) if isinstance(chip, str) else chip for chip in listed]
    for chip in named:
        expected = "an Accelerator, or the name of one such as 'h200'"
        check_type("chip", chip, Accelerator, expected)
    return named


def _rate(chip: Accelerator, dtype: Dtype) -> float:
    chip.peak_flops(dtype)  # refuses a format the chip does not multiply
    return chip.tensor_core.rates[dtype]


def machines(
    chips: Accelerator | str | Sequence[Accelerator | str] | Array,
    dtype: Dtype = "bf16",
    tuning: Tuning | None = None,
    energy: EnergyTable | None = None,
    like: Accelerator | None = None,
) -> Machines:
    """Return chips as arrays for the cost kernels.

    Parameters
    ----------
    chips
        Accelerators, each with its own tuning, or an array of ``_core.CHIP_DTYPE`` such as
        `ArchitectureSpace.chips`.
    dtype
        Number format of the operands.
    tuning
        Overrides the chips' own; for an array of records it is the only one.
    energy
        What events cost on all chips; by default the table of each chip's node.
    like
        For an array of records: the chip whose tuning, launch latency and formats they share.

    Raises
    ------
    InvalidInputError
        Where a chip does not multiply that format, or two chips do so at different relative speeds.
    """
    if dtype not in PRECISIONS:
        raise not_accepted("dtype", dtype, f"one of {', '.join(PRECISIONS)}")
    if tuning is not None and not isinstance(tuning, Tuning):
        raise InvalidTypeError(f"tuning: {type(tuning).__name__} is not accepted; expected Tuning")
    if isinstance(chips, np.ndarray):
        if like is None and dtype not in ("bf16", "fp16"):
            raise InvalidInputError(
                f"dtype: {dtype!r} is not accepted for records of chips, which do not say how fast "
                "it is; expected bf16 or fp16, or Accelerators"
            )
        if chips.dtype != _core.CHIP_DTYPE:
            raise InvalidTypeError(
                f"chips: dtype {chips.dtype} is not accepted; expected records of _core.CHIP_DTYPE"
            )
        records = np.ascontiguousarray(chips)
        rate = 1.0 if like is None else _rate(like, dtype)
        own, launch_s = (Tuning(), 0.0) if like is None else (like.tuning, like.launch_latency_s)
        tunings = tuning_record(own if tuning is None else tuning, launch_s, dtype, rate)
        tuning_of = np.zeros(len(records), dtype=np.int32)
    else:
        listed = _listed(chips)
        records = chip_records(listed)
        rates = {_rate(chip, dtype) for chip in listed} or {1.0}
        if len(rates) > 1:
            raise InvalidInputError(
                f"chips: {dtype} runs at different speeds relative to bf16 on them; "
                "ask for them one by one"
            )
        rate = rates.pop()
        distinct: dict[bytes, int] = {}
        rows: list[Array] = []
        tuning_of = np.zeros(len(listed), dtype=np.int32)
        for i, chip in enumerate(listed):
            row = tuning_record(tuning or chip.tuning, chip.launch_latency_s, dtype, rate)
            at = distinct.setdefault(row.tobytes(), len(rows))
            if at == len(rows):
                rows.append(row)
            tuning_of[i] = at
        tunings = np.concatenate(rows) if rows else tuning_record(Tuning())
    areas = area_batch(records)
    bad = np.flatnonzero(areas["status"])
    if len(bad):
        reason = _core.STATUS_SENTENCES[int(areas["status"][bad[0]])]
        raise InvalidInputError(f"chips[{int(bad[0])}]: {reason}")
    several = [like] if isinstance(chips, np.ndarray) else list(listed)
    if isinstance(chips, np.ndarray):
        spent = _spending(records, like, energy)
    else:
        spent = _spending_of(listed, records, energy)
    numbers = _streams(several, dtype, rate)
    tier = _one_of("stacked", [None if chip is None else chip.stacked for chip in several])
    table = energy_table_for(several[0] if several else None) if energy is None else energy
    tiered = (tier, table.stacked_byte_j, _products_done(several))
    return Machines(records, tuning_of, tunings, numbers, *spent, *tiered)


def _one_of(name: str, values: Sequence[T]) -> T | None:
    """Return the value that all chips share, or None for no chips."""
    if len(set(values)) > 1:
        raise InvalidInputError(f"chips: {name} differs among them; ask for them one by one")
    return values[0] if values else None


def _streams(chips: Sequence[Accelerator | None], dtype: Dtype, rate: float) -> Streams:
    """Return the numbers of a format on chips that store and stream them in the same way."""
    read, written = PRECISIONS[dtype]
    known = [chip for chip in chips if chip is not None]
    options = {
        Streams(
            read,
            written,
            max(written, float(chip.tensor_core.sum_bytes)),
            rate,
            float(chip.buffer.strip_depth),
            float(chip.buffer.copies),
            1.0 if chip.hbm is not None and chip.hbm.adder_bytes else 2.0,
        )
        for chip in known
    }
    if len(options) > 1:
        raise InvalidInputError(
            "chips: sum_bytes, strip_depth, copies or adder_bytes differ among them; ask for them "
            "one by one"
        )
    return options.pop() if options else Streams(read, written, 4.0, rate)


def _products_done(chips: Sequence[Accelerator | None]) -> float:
    """Return the share of forward products that chips multiply, the same for all of them."""
    cores = [chip.tensor_core.sparsity for chip in chips if chip is not None]
    shares = {1.0 if one is None else one.products_done for one in cores} or {1.0}
    if len(shares) > 1:
        raise InvalidInputError(
            "chips: their tensor cores skip different shares of products; ask for them one by one"
        )
    return shares.pop()


def energy_table_for(chip: Accelerator | None) -> EnergyTable:
    """Return the energy table of a chip's node at its clock under load, with links between dies."""
    if chip is None:
        return energy_table_of()
    table = energy_table_of(chip.process_nm, chip.die_to_die.byte_j if chip.die_to_die else 0.0)
    if chip.stacked is not None:
        table = table.replace(stacked_byte_j=chip.stacked.byte_j)
    return table.at_clock(chip.load_clock_share)


def _spending(
    records: Array, like: Accelerator | None, energy: EnergyTable | None, built: bool = False
) -> tuple[Array, Array, dict[str, Array], Array]:
    """Energy tables, idle power and power limit of chips that share the formats of `like`.

    There is a table for each kind of tensor cores, and idle power by cause. If the chips are
    `built`, `like` is the chip itself, and its published die area and rated power are used.
    """
    table = energy_table_for(like) if energy is None else energy
    area_mm2 = die_areas_mm2(records, None if like is None else like.process_nm)
    limit_w = np.full(len(records), np.inf)
    if built and like is not None:
        area_mm2[:] = like.die_area_mm2 or area_mm2
        limit_w[:] = like.power_w or np.inf
    own = other = table.of_chips(records)
    if (records["other_cores"] > 0).any():
        other = table.of_chips(with_other_cores(records))
    return own, other, table.idle_w(records, area_mm2), limit_w


def _spending_of(
    chips: Sequence[Accelerator], records: Array, energy: EnergyTable | None
) -> tuple[Array, Array, dict[str, Array], Array]:
    """Return what `_spending` does for built chips, each with its own node, area and power."""
    parts = [_spending(records[:0], None, energy)]
    parts += [_spending(records[i : i + 1], chip, energy, True) for i, chip in enumerate(chips)]
    tables, others, idle, limits = zip(*parts, strict=True)
    idle_w = {name: np.concatenate([part[name] for part in idle]) for name in idle[0]}
    return np.concatenate(tables), np.concatenate(others), idle_w, np.concatenate(limits)
