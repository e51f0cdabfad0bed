"""Number formats of a step as data: which products run in which, what casts and copies cost.

A precision names the format of the products in a model's blocks (projections, feed-forward,
experts). Attention, routers, the embedding and the head stay in bf16 in every recipe that
frameworks offer; master weights, gradients and moments are the optimiser's
(`phaze_fast.memory.OPTIMIZERS`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from phaze_fast.documents import Presets
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator
from phaze_fast.hardware.chip import Dtype
from phaze_fast.records import FrozenDict, Quantity, Record
from phaze_fast.software.profile import by_name, reference_of

BF16 = "bf16"
"""The precision where none is named."""

Product = Literal["forward", "input-gradient", "weight-gradient"]


class Precision(Record):
    """The products of a step in a format of fewer bits than bf16, and the cost of casts and copies.

    Examples
    --------
    >>> load_precision("mxfp8").element_bytes
    1.03125
    """

    what: ClassVar[str] = "precision"
    name: str = Field(min_length=1)
    """Name of the precision."""
    format: Dtype
    """Number format that the products below multiply; the chip must have it."""
    products: tuple[Product, ...] = ()
    """Products of blocks that run in this format; empty where all run in bf16."""
    element_bytes: Quantity = 2.0
    """Bytes of an element in this format, its share of the scaling factors included."""
    copies: Quantity = 1.0
    """Layouts that a cast writes: 2 where products of the backward pass read the transpose."""
    amax_reads: Quantity = 0.0
    """How often a cast reads its input beforehand to find the largest value."""
    transpose_reads: Quantity = 0.0
    """How often the cast to the second layout reads its input, where a separate kernel writes that
    layout in the backward pass; 0 where one kernel writes both."""
    fused_casts: tuple[Literal["norm", "activation"], ...] = ()
    """Operators whose kernel writes the low format itself, so that no cast follows them."""
    gathers: bool = False
    """Whether tensor-parallel gathers of what products read carry the low format."""
    gathered_weight_bytes: Quantity = 2.0
    """Bytes of a weight as gathers among replicas carry it, at most."""
    weight_copies: Quantity = 0.0
    """Bytes of the copies of each weight of a block that persist from one step to the next."""
    weight_casts: Quantity = 0.0
    """Bytes moved for each weight of a block once a step to make those copies."""
    pass_weight_casts: Quantity = 0.0
    """Bytes moved for each weight of a block, unsharded as products read it, in every forward and
    again in every backward pass, where copies do not persist."""
    sources: tuple[str, ...] = ()
    """Sources of the facts."""
    notes: str = ""
    """Remarks on the facts."""

    @property
    def transposed_late(self) -> bool:
        """Whether the layout that only gradients of weights read is made in the backward pass."""
        return self.transpose_reads > 0.0

    @property
    def low(self) -> bool:
        """Whether any product runs in fewer bits than 16."""
        return bool(self.products)

    @property
    def reference(self) -> str | FrozenDict[str, Any]:
        """A preset's name, or plain data where no preset is the same: what a file says of it."""
        return reference_of(_PRECISIONS, self)


_PRECISIONS = Presets("precision", "phaze_fast.software/precisions", Precision.from_dict)


def precision_names() -> tuple[str, ...]:
    """Names of the precisions that come with the package.

    Examples
    --------
    >>> "mxfp8" in precision_names()
    True
    """
    return _PRECISIONS.names


def load_precision(name_or_path: str | Path) -> Precision:
    """Load a precision by name, or from a YAML or JSON file.

    Raises
    ------
    InvalidInputError
        Where there is none of that name, or the file is not accepted.

    Examples
    --------
    >>> load_precision("bf16").low
    False
    """
    return _PRECISIONS.load(name_or_path)


def check_precision(precision: Precision, chip: Accelerator) -> None:
    """Check that a chip multiplies a precision's format.

    Raises
    ------
    InvalidInputError
        Where it does not; the message names what it has.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> check_precision(load_precision("fp8"), presets.chip("h100"))
    """
    rates = chip.tensor_core.rates
    if precision.format in rates:
        return
    accepted = [n for n in precision_names() if load_precision(n).format in rates]
    raise InvalidInputError(
        f"precision: {precision.name} is not accepted on {chip.name}, which does not multiply "
        f"{precision.format}; it multiplies {', '.join(rates)}, for which there are "
        f"{', '.join(accepted)}"
    )


PrecisionOrName = Annotated[Precision, by_name("precision", load_precision)]
"""A precision, also by its name or as a file."""
