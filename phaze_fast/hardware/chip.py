"""One accelerator: its cores, buffer and HBM, and the peak rates that follow.

A systolic chip and a GPU are one template: cores that multiply matrices, cores that do everything
else, a buffer they share, and HBM. On a GPU a "tensor core" is one SM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from phaze_fast import _core
from phaze_fast.documents import Presets
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware.tuning import AttentionTuning, Calibration, Tuning, calibration_of
from phaze_fast.records import (
    Bandwidth,
    Bytes,
    Count,
    Fraction,
    FrozenDict,
    Hertz,
    Quantity,
    Record,
    Seconds,
    Side,
    SquareMillimetres,
    Watts,
)
from phaze_fast.units import KIB, format_bandwidth, format_bytes, format_flops

Dtype = Literal["bf16", "fp16", "fp8", "fp4", "int8", "fp32", "tf32"]
"""Number formats a tensor core can multiply."""

Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
"""A rate relative to that of another number format, more than zero."""


class StructuredSparsity(Record):
    """Structured sparsity: of each `of` weights, at most `kept` are not zero; cores skip the rest.

    Only forward products are sped up: zeros are placed along their inner dimension, while the
    backward pass reads the weights transposed (Mishra et al., Accelerating Sparse Deep Neural
    Networks, 2021, arXiv:2104.08378). Bytes are those of dense weights, which training keeps.

    Examples
    --------
    >>> StructuredSparsity(kept=2, of=4, weight_share=0.5).products_done
    0.75
    """

    what: ClassVar[str] = "sparsity"
    kept: Count = 2
    """Weights of a group that may differ from zero."""
    of: Count = 4
    """Weights of one group."""
    weight_share: Fraction
    """Share of the weights in forward products that are sparse in this way; 0 to 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kept >= self.of:
            raise ValueError(f"kept: {self.kept} of {self.of} is not accepted; expected fewer")
        return self

    @property
    def products_done(self) -> float:
        """Share of the multiplications of forward products that the cores do not skip."""
        return 1.0 - self.weight_share * (1.0 - self.kept / self.of)


class TensorCore(Record):
    """Identical matrix units of a chip, each one array of multipliers; see `OtherTensorCore`."""

    what: ClassVar[str] = "tensor_core"
    count: Count
    """Number of units (SMs on a GPU)."""
    width: Side
    """Columns of a unit's array."""
    depth: Side
    """Rows of a unit's array; width x depth multiply-accumulates per cycle in bf16."""
    local_buffer_bytes: Bytes | None = None
    """Local buffer of one unit; by default max(1 KiB, width x depth x 16 B), as in PHAZE."""
    rates: FrozenDict[Dtype, Rate] = FrozenDict({"bf16": 1.0, "fp16": 1.0})
    """Multiply-accumulates per cycle in each format, relative to bf16."""
    sum_bytes: Literal[2, 4] = 4
    """Bytes of a partial sum: 4 in fp32, which training needs (sums of thousands of products in
    bf16 lose the small ones: Wang et al., NeurIPS 2018, arXiv:1812.08011)."""
    sparsity: StructuredSparsity | None = None
    """Zeros among the weights that the cores skip; absent: the cores multiply all weights."""

    @property
    def macs_per_cycle(self) -> int:
        """bf16 multiply-accumulates per cycle of all cores together."""
        return self.count * self.width * self.depth


class OtherTensorCore(Record):
    """Matrix units of another shape, with `TensorCore`'s formats and local buffers as in PHAZE.

    A product or an attention kernel runs on all cores of one kind, the kind that is quicker.
    """

    what: ClassVar[str] = "other_tensor_core"
    count: Count
    """Number of units."""
    width: Side
    """Columns of a unit's array."""
    depth: Side
    """Rows of a unit's array."""


class VectorCore(Record):
    """Units for all operators other than matrix products, all identical."""

    what: ClassVar[str] = "vector_core"
    count: Count
    """Number of units."""
    lanes: Side
    """Lanes of one unit."""
    alus_per_lane: Side = 1
    """Operations one lane starts per cycle."""
    local_buffer_bytes: Bytes | None = None
    """Local buffer of one unit; by default max(1 KiB, lanes x 16 B), as in PHAZE."""

    @property
    def ops_per_cycle(self) -> int:
        """fp32 operations per cycle of all units together."""
        return self.count * self.lanes * self.alus_per_lane


class Buffer(Record):
    """On-chip memory shared by all cores (a GPU's L2, a TPU's CMEM)."""

    what: ClassVar[str] = "buffer"
    capacity_bytes: Bytes
    """Capacity; 0 if a chip has only local buffers."""
    bytes_per_cycle: Quantity
    """Bandwidth of all ports together, bytes per clock cycle."""
    strip_depth: Count = 64
    """Elements of a row that stream from HBM through the buffer at a time: 128 bytes in bf16, two
    bursts of an HBM channel (JESD235D: 64 bytes)."""
    copies: Annotated[int, Field(ge=2, le=8)] = 2
    """Strips and tiles of each kind in the buffer at once; with 2, one arrives while the other is
    read. Fewer is not accepted: times assume that HBM and cores work at the same time."""
    port_bytes_per_cycle: Quantity = 0.0
    """Width of one core's port; 0, the default, is as wide as the edges of its array: one bf16
    value per row and column."""


class Hbm(Record):
    """Off-chip memory in the package."""

    what: ClassVar[str] = "hbm"
    capacity_bytes: Bytes
    """Capacity of all stacks together."""
    bandwidth_bytes_per_s: Bandwidth
    """Peak bandwidth of all stacks together."""
    stacks: Count = 1
    """Number of 1,024-bit stacks, each with its PHY and controller."""
    adder_bytes: Literal[2, 4] | None = None
    """Bytes of a number that adders at the memory banks add. With them, partial sums of products
    that do not fit the buffer are written but not read back. HBM-PIM has adders of FP16 (Lee et
    al., ISCA 2021, doi:10.1109/ISCA52012.2021.00013). Absent: no adders."""


class StackedDram(Record):
    """DRAM stacked on the logic, between the shared buffer and the HBM.

    Tiles of products and of fused groups are copied from HBM to this DRAM, and from there to the
    buffer.
    """

    what: ClassVar[str] = "stacked"
    capacity_bytes: Bytes
    """Capacity; more than the buffer's."""
    bandwidth_bytes_per_s: Bandwidth
    """Bandwidth to the logic; more than the HBM's."""
    byte_j: Quantity = 30e-12
    """Joules per byte: 3.7 pJ per bit, the DRAM layers of a Hybrid Memory Cube (Jeddeloh and
    Keeth, VLSI Technology 2012)."""


class Links(Record):
    """Links that leave the package, all identical."""

    what: ClassVar[str] = "links"
    count: Count
    """Number of links."""
    bandwidth_bytes_per_s: Bandwidth
    """Bandwidth of one link in one direction."""


class DieToDie(Record):
    """Links between the dies of a package, over which a core reads the buffer of another die."""

    what: ClassVar[str] = "die_to_die"
    bandwidth_bytes_per_s: Bandwidth
    """Bandwidth of all links of one die, in one direction."""
    byte_j: Quantity = 4e-12
    """Joules per byte: 0.5 pJ per bit, UCIe 1.0's figure for standard packages (Das Sharma et al.,
    IEEE TCPMT 2022)."""


class Host(Record):
    """The part of a host computer that serves one chip."""

    what: ClassVar[str] = "host"
    link_bytes_per_s: Bandwidth
    """Bandwidth of the chip's link to the host in one direction; both may be used at once."""
    memory_bytes_per_s: Bandwidth
    """The chip's share of the bandwidth of the host's memory."""


FIELD_COLUMNS = {
    "tensor_core.count": "tensor_cores",
    "tensor_core.width": "tensor_width",
    "tensor_core.depth": "tensor_depth",
    "tensor_core.local_buffer_bytes": "tensor_local_bytes",
    "vector_core.count": "vector_cores",
    "vector_core.lanes": "vector_lanes",
    "vector_core.alus_per_lane": "vector_alus_per_lane",
    "vector_core.local_buffer_bytes": "vector_local_bytes",
    "buffer.capacity_bytes": "buffer_bytes",
    "buffer.bytes_per_cycle": "buffer_bytes_per_cycle",
    "buffer.port_bytes_per_cycle": "buffer_port_bytes_per_cycle",
    "hbm.capacity_bytes": "hbm_bytes",
    "hbm.bandwidth_bytes_per_s": "hbm_bytes_per_s",
    "hbm.stacks": "hbm_stacks",
    "clock_hz": "clock_hz",
    "links.count": "links",
    "links.bandwidth_bytes_per_s": "link_bytes_per_s",
    "dies": "dies",
    "other_tensor_core.count": "other_cores",
    "other_tensor_core.width": "other_width",
    "other_tensor_core.depth": "other_depth",
}
"""Fields of a chip, and the columns of ``_core.CHIP_DTYPE`` that hold them."""


class Accelerator(Record):
    """One chip (or one wafer), with the fields that the cost models need.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> chip = presets.chip("tpuv4")
    >>> chip.tensor_core.count, chip.peak_flops() / 1e12
    (8, 275.2512)
    """

    what: ClassVar[str] = "chip"
    name: str = Field(min_length=1)
    """Name of the chip."""
    clock_hz: Hertz
    """Clock of cores and buffer (boost clock where the vendor rates peaks at it)."""
    tensor_core: TensorCore
    """Matrix units."""
    other_tensor_core: OtherTensorCore | None = None
    """Matrix units of another shape; absent: none."""
    vector_core: VectorCore
    """Vector units."""
    buffer: Buffer
    """Shared on-chip memory."""
    hbm: Hbm | None = None
    """Off-chip memory in the package; absent on chips that have only SRAM."""
    stacked: StackedDram | None = None
    """DRAM between buffer and HBM; absent: none."""
    links: Links | None = None
    """SerDes links of the interconnect, whose area and power are counted where they are given."""
    dies: Count = 1
    """Number of dies into which the logic is divided."""
    die_to_die: DieToDie | None = None
    """Links between the dies; absent: they do not limit the shared buffer, and cost no energy."""
    host: Host | None = None
    """The chip's share of its host; absent: a plan keeps nothing in the host's memory."""
    launch_latency_s: Seconds = 0.0
    """Fixed time to start one operator."""
    tuning: Tuning = Tuning()
    """Efficiency of the chip's software; ideal by default."""
    process_nm: Quantity | None = None
    """Process node as its maker names it."""
    die_area_mm2: SquareMillimetres | None = None
    """Published die area, if known; `hardware.area` estimates it from the template."""
    power_w: Watts | None = None
    """Published board or chip power, if known."""
    usual_fabric: str = ""
    """Preset of the usual interconnect of these chips, if there is one."""
    sources: tuple[str, ...] = ()
    """Where the figures come from."""
    notes: str = ""
    """Remarks on the figures."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.buffer.capacity_bytes > 0 and self.buffer.bytes_per_cycle <= 0:
            raise ValueError("buffer.bytes_per_cycle: 0 is not accepted; expected a number > 0")
        if self.hbm is not None and self.hbm.adder_bytes not in (None, self.tensor_core.sum_bytes):
            raise ValueError(
                f"hbm.adder_bytes: {self.hbm.adder_bytes} is not accepted; expected the "
                f"{self.tensor_core.sum_bytes} bytes of tensor_core.sum_bytes"
            )
        if self.stacked is not None:
            self._check_stacked(self.stacked)
        if self.other_tensor_core is not None:
            self._check_other_cores(self.other_tensor_core)
        if self.die_to_die is not None and self.dies == 1:
            raise ValueError("die_to_die: not accepted for one die; expected dies of 2 or more")
        if self.die_to_die is not None and self.buffer.capacity_bytes == 0:
            raise ValueError("die_to_die: not accepted without a buffer that the dies share")
        return self

    def _check_other_cores(self, other: OtherTensorCore) -> None:
        if self.repeats_shape:
            raise ValueError(
                f"other_tensor_core: {other.width}x{other.depth} is the shape of tensor_core too; "
                "expected another, or a higher tensor_core.count"
            )
        if self.buffer.capacity_bytes == 0:
            raise ValueError("other_tensor_core: not accepted without a buffer that all cores read")
        if self.tuning.blocks or self.tuning.sustained_flops is not None:
            raise ValueError(
                "other_tensor_core: not accepted with fitted blocks or a fitted sustained rate, "
                "which are of one kind of cores"
            )

    def _check_stacked(self, stacked: StackedDram) -> None:
        if self.hbm is None:
            raise ValueError("stacked: not accepted without hbm; expected it as the hbm itself")
        for name, own, least in (
            ("capacity_bytes", stacked.capacity_bytes, self.buffer.capacity_bytes),
            (
                "bandwidth_bytes_per_s",
                stacked.bandwidth_bytes_per_s,
                self.hbm.bandwidth_bytes_per_s,
            ),
        ):
            if own <= least:
                raise ValueError(
                    f"stacked.{name}: {own:g} is not accepted; expected more than {least:g} of the "
                    f"{'buffer' if name == 'capacity_bytes' else 'hbm'}"
                )

    def peak_flops(self, dtype: Dtype = "bf16") -> float:
        """Dense matrix FLOP/s with every core busy, one multiply-accumulate counting as two.

        Raises
        ------
        InvalidInputError
            If the chip does not support that format.
        """
        if dtype not in self.tensor_core.rates:
            raise InvalidInputError(
                f"dtype: {dtype!r} is not accepted by {self.name}; "
                f"accepted: {', '.join(self.tensor_core.rates)}"
            )
        rate = self.tensor_core.rates[dtype]
        return 2.0 * self.macs_per_cycle * self.clock_hz * rate

    @property
    def repeats_shape(self) -> bool:
        """Whether `other_tensor_core` has the shape of `tensor_core`, which is not accepted."""
        first, other = self.tensor_core, self.other_tensor_core
        return other is not None and (other.width, other.depth) == (first.width, first.depth)

    @property
    def macs_per_cycle(self) -> int:
        """bf16 multiply-accumulates per cycle of all tensor cores, those of another shape too."""
        other = self.other_tensor_core
        more = 0 if other is None else other.count * other.width * other.depth
        return self.tensor_core.macs_per_cycle + more

    @property
    def buffer_bandwidth_bytes_per_s(self) -> float:
        """Bandwidth of the shared buffer in bytes per second."""
        return self.buffer.bytes_per_cycle * self.clock_hz

    @property
    def memory(self) -> Hbm:
        """Where layers are placed: the HBM, or the SRAM of a chip that has none.

        Examples
        --------
        >>> from phaze_fast.hardware import presets
        >>> presets.chip("dojo-d1").memory.capacity_bytes // 2**20  # 354 x 1.25 MiB
        442
        """
        if self.hbm is not None and self.hbm.capacity_bytes > 0:
            return self.hbm
        size, rate = memory_of_records(chip_records([self]))
        return Hbm(capacity_bytes=int(size[0]), bandwidth_bytes_per_s=float(rate[0]))

    @property
    def load_clock_share(self) -> float:
        """Share of the full clock at which long products stay below the chip's power limit.

        The quotient of the measured rate of long products (`tuning.sustained_flops`) and the rate
        of the cores at the full clock: a power limit lowers the clock, and with it the voltage.

        Examples
        --------
        >>> from phaze_fast.hardware import presets
        >>> round(presets.chip("h100").load_clock_share, 2), presets.chip("tpuv4").load_clock_share
        (0.86, 1.0)
        """
        tuning = self.tuning
        if tuning.sustained_flops is None or "bf16" not in self.tensor_core.rates:
            return 1.0
        full = self.peak_flops() * tuning.clock_factor * tuning.efficiency
        return min(1.0, tuning.sustained_flops / full)

    @property
    def calibration(self) -> Calibration:
        """Basis of the chip's times: measurements of it, of another chip, or its data sheet."""
        return calibration_of(self.name, self.tuning)

    def with_attention(self, kernel: str) -> Self:
        """Return the chip with another of its kernels for fused attention.

        Raises
        ------
        InvalidInputError
            Where the chip's tuning does not have the kernel.

        Examples
        --------
        >>> from phaze_fast.hardware import presets
        >>> chip = presets.chip("h200").with_attention("flash2")
        >>> chip.tuning.attention.efficiency < presets.chip("h200").tuning.attention.efficiency
        True
        """
        kernels: Mapping[Any, AttentionTuning] = self.tuning.attention_kernels
        if kernel not in kernels:
            raise InvalidInputError(
                f"attention: {kernel!r} is not accepted for {self.name}; accepted: "
                f"{', '.join(kernels) or 'none, its tuning names no kernels'}"
            )
        return self.replace(tuning=self.tuning.replace(attention=kernels[kernel]))

    def to_row(self) -> dict[str, float]:
        """Return the fields the kernels use, by the names of ``_core.CHIP_DTYPE``."""
        row: dict[str, float] = {"fp8": int("fp8" in self.tensor_core.rates)}
        for field, column in FIELD_COLUMNS.items():
            part, _, leaf = field.rpartition(".")
            owner = getattr(self, part) if part else self
            row[column] = 0 if owner is None else getattr(owner, leaf)
        # PHAZE's template: 1 KiB of local buffer per 64 processing elements or lanes, at least 1.
        tensor, vector = self.tensor_core, self.vector_core
        if tensor.local_buffer_bytes is None:
            row["tensor_local_bytes"] = max(KIB, tensor.width * tensor.depth * KIB // 64)
        if vector.local_buffer_bytes is None:
            row["vector_local_bytes"] = max(KIB, vector.lanes * KIB // 64)
        return row

    def _peak_text(self) -> str:
        known = "bf16" in self.tensor_core.rates
        return format_flops(self.peak_flops()) if known else "no bf16"

    @property
    def arrays(self) -> str:
        """Number and shape of the tensor cores, those of another shape too, as text."""
        kinds = (self.tensor_core, self.other_tensor_core)
        return " and ".join(f"{c.count} x {c.width}x{c.depth}" for c in kinds if c is not None)

    def __str__(self) -> str:
        vector, hbm = self.vector_core, "none"
        if self.hbm is not None:
            rate = format_bandwidth(self.hbm.bandwidth_bytes_per_s)
            hbm = f"{format_bytes(self.hbm.capacity_bytes)} at {rate}"
        return (
            f"{self.name}: {self.arrays} tensor, "
            f"{vector.count} x {vector.lanes} lanes, buffer "
            f"{format_bytes(self.buffer.capacity_bytes)}, HBM {hbm}, "
            f"{self._peak_text()} at {self.clock_hz / 1e9:g} GHz"
        )


def chip_records(chips: list[Accelerator] | tuple[Accelerator, ...]) -> np.ndarray[Any, Any]:
    """Return chips as the array of records the kernels take.

    Returns
    -------
    numpy.ndarray
        Shape ``(len(chips),)``, dtype ``_core.CHIP_DTYPE``.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> int(chip_records([presets.chip("h100")])["tensor_cores"][0])
    132
    """
    table = np.zeros(len(chips), dtype=_core.CHIP_DTYPE)
    for i, chip in enumerate(chips):
        row = chip.to_row()
        table[i] = tuple(row[name] for name in _core.CHIP_DTYPE.names or ())
        if chip.die_to_die is not None:
            limit_by_dies(table[i : i + 1], chip.die_to_die)
    return table


def port_bytes_per_cycle(chips: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes per cycle of a tensor core's port: as given, or as wide as its edges."""
    given, edges = (
        chips["buffer_port_bytes_per_cycle"],
        chips["tensor_width"] + chips["tensor_depth"],
    )
    return np.where(given > 0, given, 2.0 * edges)


def with_other_cores(chips: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return chips with `other_tensor_core` in place of `tensor_core`, where a chip has both."""
    swapped, has = chips.copy(), chips["other_cores"] > 0
    for part in ("cores", "width", "depth"):
        swapped[f"tensor_{part}"][has] = chips[f"other_{part}"][has]
        swapped[f"other_{part}"] = 0
    elements = chips["other_width"] * chips["other_depth"]
    swapped["tensor_local_bytes"][has] = np.maximum(KIB, elements * KIB // 64)[has]
    return swapped


def limit_by_dies(chips: np.ndarray[Any, Any], links: DieToDie) -> None:
    """Lower the bandwidth of the shared buffer, in place, to what links between dies carry.

    Addresses are interleaved over d dies, so that (d - 1) / d of all bytes cross to another die.
    """
    several = chips["dies"] > 1
    away = np.where(several, 1.0 - 1.0 / np.maximum(chips["dies"], 1), 1.0)
    most = chips["dies"] * links.bandwidth_bytes_per_s / away / chips["clock_hz"]
    own = chips["buffer_bytes_per_cycle"]
    chips["buffer_bytes_per_cycle"] = np.where(several, np.minimum(own, most), own)


def memory_of_records(chips: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Bytes and bytes per second of the memory that layers are placed in.

    That memory is the HBM. Chips without HBM place layers in their SRAM: the shared buffer and the
    local buffers of the tensor cores, read at the rate of the shared buffer, or through the ports
    of the cores where there is no shared buffer.
    """
    off_chip = chips["hbm_bytes_per_s"] > 0
    size = chips["buffer_bytes"] + chips["tensor_cores"] * chips["tensor_local_bytes"]
    ports = chips["tensor_cores"] * chips["buffer_port_bytes_per_cycle"]
    rate = np.where(chips["buffer_bytes"] > 0, chips["buffer_bytes_per_cycle"], ports)
    return (
        np.where(off_chip, chips["hbm_bytes"], size),
        np.where(off_chip, chips["hbm_bytes_per_s"], rate * chips["clock_hz"]),
    )


class _Chips(Presets[Accelerator]):
    """Chips of the package; vector functions are listed only with the chip they were fitted on."""

    def preset(self, name: str) -> Accelerator:
        """Read a chip; one without vector functions has those of the chip in its `carried_from`."""
        self.check(name)
        chip = self._document(name)
        tuning = chip.get("tuning", {})
        while "functions" not in tuning and tuning.get("carried_from"):
            tuning = self._document(tuning["carried_from"])["tuning"]
            if "functions" in tuning:
                chip["tuning"]["functions"] = tuning["functions"]
        return Accelerator.from_dict(chip, name)


CHIPS = _Chips("chip", "phaze_fast.hardware/data/chips", Accelerator.from_dict)
"""Chips that come with the package; see `presets.chip`."""
