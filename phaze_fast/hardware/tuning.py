"""Efficiency of a chip's software: the factors that the cost kernels read, and their provenance.

The defaults are those of an ideal systolic chip. For a GPU the constants are fitted to
measurements: `fitted` names the constants, `sources` the measurements. `Calibration` says whether
the times of a chip rest on measurements of this chip, of another, or on its data sheet alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from phaze_fast import _core
from phaze_fast.documents import package_data
from phaze_fast.errors import nearest
from phaze_fast.records import (
    Fraction,
    FrozenDict,
    Quantity,
    Record,
    Seconds,
    Share,
    Side,
)

AttentionKernel = Literal["flash1", "flash2", "flash3", "cudnn", "splash-split"]
"""Generations of fused attention kernels; attention that is not fused is a graph of products."""

Blocks = Annotated[tuple[tuple[Side, Side], ...], Field(max_length=_core.MAX_TILES)]
"""Shapes of output blocks, as (m, n)."""

Flops = Annotated[float, Field(strict=True, ge=1e6, le=1e24)]
"""FLOP/s."""

_VECTOR_FUNCTIONS = _core.FUNCTIONS[4:]


@cache
def _operations() -> dict[str, float]:
    """Return the usual lane operations per element of every vector function, from its data file."""
    listed = package_data(__package__, "operations.yaml")
    counts = {name: count for count, names in listed.items() for name in names.split()}
    return {name: counts.get(name, 0.0) for name in _VECTOR_FUNCTIONS}


class FunctionCost(Record):
    """Cost of one vector function on a chip; see docs/cost.md."""

    what: ClassVar[str] = "function"
    ops_per_element: Quantity | None = None
    """Lane operations per element; by default those of ``data/operations.yaml``."""
    ops_per_row: Quantity = 0.0
    """Lane operations per row, in addition to those of its elements."""
    launches: Quantity = 1.0
    """Number of kernels that the function consists of."""
    byte_factor: Quantity = 1.0
    """Number of times the inputs and outputs are moved."""
    row_limit: Annotated[int, Field(strict=True, ge=0, le=2**40)] = 0
    """Longest row, in elements, that stays on the core; 0 = no limit."""
    long_ops: Annotated[float, Field(strict=True, ge=1, le=1e6)] = 1.0
    """Factor on the operations where rows are longer than `row_limit`."""
    long_bytes: Annotated[float, Field(strict=True, ge=1, le=1e6)] = 1.0
    """Factor on the bytes where rows are longer than `row_limit`."""
    most_rows: Quantity = 0.0
    """Most rows for which `ops_per_row` is counted; 0 = no limit."""
    row_cycles: Quantity = 0.0
    """Cycles per element of a row on the one core that works through it. A function takes at least
    the time of one row, however few rows there are."""

    def with_operations(self, name: str) -> Self:
        """Return the cost, with the default operations of a function where it gives none."""
        usual = {} if self.ops_per_element is not None else {"ops_per_element": _operations()[name]}
        return self.model_copy(update=usual)


_NO_CONVERSION = FunctionCost(ops_per_element=0.0, launches=0.0, byte_factor=0.0)
_USUAL = {"layout": _NO_CONVERSION, "layout-weights": _NO_CONVERSION}
"""Default costs of functions that are not one kernel which moves its data once."""


def _cost_of(functions: Mapping[str, FunctionCost], name: str) -> FunctionCost:
    """Return the cost of a function, by default that of a chip which does not list it."""
    cost = functions.get(name) or _USUAL.get(name) or FunctionCost()
    return cost.with_operations(name)


class AttentionTuning(Record):
    """Fused attention on a chip."""

    what: ClassVar[str] = "attention"
    efficiency: Share = 1.0
    """Share of a core's peak that its products reach, forward."""
    ops_per_score: Quantity = 8.0
    """Lane operations per score, forward: on a GPU an exponential; an SM starts 16 per cycle."""
    backward_efficiency: Share = 1.0
    """Share of a core's peak that its products reach, backward."""
    backward_ops_per_score: Quantity = 16.0
    """Lane operations per score, backward."""
    unit_overhead_s: Seconds = 0.0
    """Seconds to start and end the work on one group of queries on a core."""
    least_queries: Annotated[int, Field(strict=True, ge=1, le=128)] = 128
    """Fewest queries of one head that a core takes at a time; `most_queries` is halved down to this
    where that is faster. Smaller groups use more cores, but load keys and values more often."""
    most_queries: Annotated[int, Field(strict=True, ge=16, le=65536)] = 128
    """Most queries of one head that a core takes at a time. Products with fewer rows than an array
    leave part of the array idle."""


class FormatTuning(Record):
    """Constants of products in another number format than bf16; a missing one is as in bf16."""

    what: ClassVar[str] = "format"
    efficiency: Share | None = None
    """Share of its peak that a core reaches inside a unit of work (an output block)."""
    sustained_flops: Flops | None = None
    """FLOP/s in this format that a long run of products sustains under the power limit."""
    unit_overhead_s: Seconds | None = None
    """Seconds to start and end one unit of work on a core."""


class FittedRange(Record):
    """Range of product shapes that constants were fitted on; others are extrapolated."""

    what: ClassVar[str] = "range"
    m: tuple[Side, Side]
    """Least and largest number of rows."""
    k: tuple[Side, Side]
    """Least and largest inner dimension."""
    n: tuple[Side, Side]
    """Least and largest number of columns."""

    @field_validator("m", "k", "n")
    @classmethod
    def _ordered(cls, ends: tuple[int, int]) -> tuple[int, int]:
        if ends[0] > ends[1]:
            raise ValueError(f"{list(ends)} is not accepted; expected the smaller number first")
        return ends


class Tuning(Record):
    """Efficiency of a chip's software.

    Examples
    --------
    >>> Tuning().efficiency, Tuning().blocks
    (1.0, ())
    """

    what: ClassVar[str] = "tuning"
    clock_factor: Annotated[float, Field(strict=True, gt=0, le=4, allow_inf_nan=False)] = 1.0
    """Clock that operators run at, relative to the clock at which the chip's peak is rated."""
    blocks: Blocks = ()
    """Output blocks a core works on, as (m, n); by default multiples of its array."""
    overlapped_folds: bool = True
    """Whether a fold (the part of a product that fits an array) loads while the last one drains."""
    dataflows: tuple[Literal["os", "ws", "is"], ...] = ()
    """Dataflows to choose from; by default all (a chip with `blocks` has only os)."""
    vector_launch_share: Share = 1.0
    """Share of the launch latency that starting a vector operator takes."""
    efficiency: Share = 1.0
    """Share of its peak that a core reaches inside a unit of work (an output block)."""
    unit_overhead_s: Seconds = 0.0
    """Seconds to start and end one unit of work on a core."""
    reduction_s: Seconds = 0.0
    """Seconds to add the partial sums of a product whose inner dimension was split."""
    sustained_flops: Flops | None = None
    """bf16 FLOP/s that a long run of products sustains under the power limit; absent = no limit."""
    step_flops: FrozenDict[str, Flops] = FrozenDict()
    """FLOP/s that products reach in a job that runs for hours, by number format: the chip is warmer
    and draws more power than while one operator is measured. Whole steps are priced with this rate,
    single operators are not."""
    hbm_share: Share = 1.0
    """Share of HBM bandwidth that is reached."""
    hbm_write_share: Share = 1.0
    """Speed of writing to HBM relative to reading."""
    product_hbm_share: Share = 1.0
    """Further factor on the share of HBM bandwidth that is reached, for matrix products."""
    port_share: Share = 1.0
    """Share of the bandwidth of a core's port that is reached."""
    port_even_bytes_per_cycle: Quantity = 0.0
    """Bandwidth of a core's port where rows of operands start at 4-byte but not 16-byte bounds; 0 =
    no difference."""
    port_odd_bytes_per_cycle: Quantity = 0.0
    """Bandwidth of a core's port where rows of operands do not even start at 4-byte bounds; 0 = no
    difference."""
    even_blocks: Blocks = ()
    """Output blocks where rows of operands start at 4-byte but not 16-byte bounds: such rows cannot
    be copied in bulk, and kernels of an earlier generation run, which start as vector operators
    do; absent = as `blocks`."""
    odd_blocks: Blocks = ()
    """Output blocks where rows of operands do not even start at 4-byte bounds."""
    unaligned_unit_overhead_s: Seconds = 0.0
    """Seconds to start and end one unit of work of `even_blocks` and `odd_blocks`."""
    unaligned_reduction_s: Seconds = 0.0
    """Seconds to add the partial sums of a split product of `even_blocks` and `odd_blocks`."""
    resident_share: Fraction = 0.0
    """Operands that fit this share of the buffer are still in it when the next operator starts."""
    attention: AttentionTuning = AttentionTuning()
    """Fused attention by the chip's best kernel."""
    attention_kernels: FrozenDict[AttentionKernel, AttentionTuning] = FrozenDict()
    """Fused attention by other kernels, by name; `Accelerator.with_attention` chooses one."""
    formats: FrozenDict[str, FormatTuning] = FrozenDict()
    """Products in other number formats, such as fp8."""
    functions: FrozenDict[str, FunctionCost] = FrozenDict()
    """Vector functions that differ from the default, by name."""
    dispatch_s: Seconds = 0.0
    """Host overhead of an operator that is timed alone."""
    fitted: tuple[str, ...] = ()
    """Constants that were fitted to measurements."""
    fitted_range: FittedRange | None = None
    """Shapes of the products that the constants were fitted on."""
    carried_from: str = ""
    """Another chip, whose fitted constants this one has where its own were not measured; empty
    where there is none."""
    sources: tuple[str, ...] = ()
    """Measurements that the constants were fitted on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.blocks and set(self.dataflows) - {"os"}:
            raise ValueError(
                f"dataflows: {list(self.dataflows)} is not accepted with blocks; expected [os]"
            )
        if not self.blocks and (self.even_blocks or self.odd_blocks):
            name = "even_blocks" if self.even_blocks else "odd_blocks"
            raise ValueError(f"{name}: not accepted without blocks")
        if self.clock_factor * self.efficiency > 1.0:
            raise ValueError(
                f"clock_factor: {self.clock_factor!r} at efficiency {self.efficiency!r} is not "
                "accepted; expected a product of at most 1, the rated peak"
            )
        return self

    def with_vector_rate(self, factor: float) -> Tuning:
        """Return the same tuning with vector lanes that are `factor` times as fast.

        Examples
        --------
        >>> Tuning().with_vector_rate(2.0).functions["add"].ops_per_element
        0.5
        """
        functions = {}
        for name in _operations():
            cost = _cost_of(self.functions, name)
            functions[name] = cost.replace(
                ops_per_element=(cost.ops_per_element or 0.0) / factor,
                ops_per_row=cost.ops_per_row / factor,
            )
        attention = self.attention.replace(
            ops_per_score=self.attention.ops_per_score / factor,
            backward_ops_per_score=self.attention.backward_ops_per_score / factor,
        )
        return self.replace(functions=functions, attention=attention)

    @field_validator("functions")
    @classmethod
    def _known(cls, functions: dict[str, FunctionCost]) -> dict[str, FunctionCost]:
        for name in functions:
            if name not in _VECTOR_FUNCTIONS:
                raise ValueError(f"{name!r} is unknown; {nearest(name, _VECTOR_FUNCTIONS)}")
        return functions


def tuning_record(
    tuning: Tuning, launch_s: float = 0.0, dtype: str = "bf16", rate: float = 1.0
) -> np.ndarray[Any, Any]:
    """Return a tuning as the record the kernels take.

    Parameters
    ----------
    tuning
        Efficiency of the chip's software.
    launch_s
        The chip's ``launch_latency_s``, seconds.
    dtype, rate
        The number format of products, and the chip's speed in it relative to bf16.

    Returns
    -------
    numpy.ndarray
        Shape ``(1,)``, dtype ``_core.TUNING_DTYPE``.

    Examples
    --------
    >>> float(tuning_record(Tuning())["efficiency"][0])
    1.0
    """
    return _filled_record(tuning, launch_s, dtype, rate).copy()


@lru_cache(maxsize=256)
def _filled_record(
    tuning: Tuning, launch_s: float, dtype: str, rate: float
) -> np.ndarray[Any, Any]:
    flows = tuning.dataflows or (("os",) if tuning.blocks else _core.DATAFLOWS)
    record = np.zeros(1, dtype=_core.TUNING_DTYPE)
    row = record[0]
    for name in _core.TUNING_DTYPE.names or ():  # fields that `Tuning` has too
        value = getattr(tuning, name, None)
        if isinstance(value, float):
            row[name] = value
    row["launch_s"] = launch_s
    row["sustained_macs_per_s"] = (tuning.sustained_flops or 0.0) / 2.0
    own = tuning.formats.get(dtype, FormatTuning())
    for name in ("efficiency", "unit_overhead_s"):
        if getattr(own, name) is not None:
            row[name] = getattr(own, name)
    if own.sustained_flops is not None:  # the kernel multiplies it by the format's rate
        row["sustained_macs_per_s"] = own.sustained_flops / 2.0 / rate
    attention = tuning.attention
    row["attention_efficiency"] = attention.efficiency
    row["attention_unit_s"] = attention.unit_overhead_s
    row["attention_ops"] = attention.ops_per_score
    row["attention_backward_efficiency"] = attention.backward_efficiency
    row["attention_backward_ops"] = attention.backward_ops_per_score
    row["attention_least"] = attention.least_queries
    row["attention_most"] = attention.most_queries
    row["overlapped"] = tuning.overlapped_folds
    row["dataflows"] = sum(1 << code for code, name in enumerate(_core.DATAFLOWS) if name in flows)
    for kind, blocks in (
        ("tile", tuning.blocks),
        ("even", tuning.even_blocks),
        ("odd", tuning.odd_blocks),
    ):
        row["tiles" if kind == "tile" else f"{kind}_tiles"] = len(blocks)
        for i, (m, n) in enumerate(blocks):
            row[f"{kind}_m"][i], row[f"{kind}_n"][i] = m, n
    for code, name in enumerate(_core.FUNCTIONS):
        if name in _operations():
            cost = _cost_of(tuning.functions, name)
            row["functions"][code] = tuple(getattr(cost, n) for n in FunctionCost.model_fields)
    return record


# ---- calibration ----


CalibrationState = Literal["fitted", "partly fitted", "carried over", "not fitted"]
"""Extent to which the constants of a chip's `tuning` come from measurements of that chip."""


@dataclass(frozen=True)
class Calibration:
    """Extent to which a chip's times are based on measurements.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> presets.chip("h200").calibration.state, presets.chip("tpuv6e").calibration.state
    ('fitted', 'not fitted')
    """

    chip: str
    """Name of the chip."""
    state: CalibrationState
    """``fitted``: all fitted constants come from this chip; ``partly fitted``: some do, the rest
    from another; ``carried over``: all from another; ``not fitted``: from none."""
    carried_from: str
    """The chip whose constants are used; empty where there is none."""
    note: str
    """One sentence for the reader of the times; empty where they are fitted."""

    @property
    def fitted(self) -> bool:
        """Whether all constants were fitted to measurements of this chip."""
        return self.state == "fitted"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, `fitted` included."""
        return {**asdict(self), "fitted": self.fitted}


def calibration_of(name: str, tuning: Tuning) -> Calibration:
    """Return the calibration of a chip with this name and tuning.

    Examples
    --------
    >>> calibration_of("mine", Tuning(carried_from="h200")).note.partition("; ")[2]
    'constants are carried over from h200, an extrapolation'
    """
    source = tuning.carried_from
    state: CalibrationState
    if tuning.fitted and not source:
        return Calibration(name, "fitted", "", "")
    if tuning.fitted:
        state = "partly fitted"
        note = (
            f"fitted to measurements of this chip: {', '.join(tuning.fitted)}; the other "
            f"constants are carried over from {source}"
        )
    elif source:
        state = "carried over"
        note = (
            "not fitted to measurements of this chip; constants are carried over from "
            f"{source}, an extrapolation"
        )
    else:
        state = "not fitted"
        note = (
            "not fitted to measurements; times assume data-sheet rates and ideal kernels, and are "
            "likely too short"
        )
    return Calibration(name, state, source, f"{name}: {note}")
