"""Number formats of a step as data: formats of products, and the cost of casts and copies.

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
    """Number format of the products listed below; the chip must support it."""
    products: tuple[Product, ...] = ()
    """Products of blocks that run in this format; empty where all run in bf16."""
    scaled_in_hardware: bool = False
    """Whether the tensor core must apply a factor to each block of elements, as chips that multiply
    fp4 do (NVIDIA's from Blackwell, AMD's from CDNA 4 on); other chips cannot run the precision."""
    element_bytes: Quantity = 2.0
    """Bytes of an element in this format, including its share of the scaling factors."""
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
    """Whether tensor-parallel gathers of the inputs of products carry the low format."""
    dispatches: bool = False
    """Whether all-to-alls that bring rows to experts carry the low format; what experts return is
    in bf16."""
    gathered_weight_bytes: Quantity = 2.0
    """Most bytes of a weight in gathers among replicas."""
    weight_copies: Quantity = 0.0
    """Bytes of the copies of each weight of a block that persist from one step to the next."""
    weight_casts: Quantity = 0.0
    """Bytes moved for each weight of a block once a step to make the copies that persist."""
    pass_weight_casts: Quantity = 0.0
    """Bytes moved for each weight of a block, unsharded as products read it, in every forward and
    again in every backward pass, where copies do not persist."""
    sources: tuple[str, ...] = ()
    """Sources of these values."""
    notes: str = ""
    """Remarks on these values."""

    @property
    def transposed_late(self) -> bool:
        """Whether the transpose that weight gradients read is written in the backward pass."""
        return self.transpose_reads > 0.0

    @property
    def low(self) -> bool:
        """Whether any product runs in fewer bits than 16."""
        return bool(self.products)

    @property
    def reference(self) -> str | FrozenDict[str, Any]:
        """The name of the equal preset, else plain data: the form in which files refer to it."""
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
        Where no precision has that name, or the file is not accepted.

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
        Where the chip does not; the message lists the chip's formats.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> check_precision(load_precision("fp8"), presets.chip("h100"))
    """
    rates = chip.tensor_core.rates
    if _multiplies(chip, precision):
        return
    accepted = [name for name in precision_names() if _multiplies(chip, load_precision(name))]
    lacking = f"multiply {precision.format}"
    if precision.format in rates:
        lacking += " with a factor for each block of elements in hardware"
    raise InvalidInputError(
        f"precision: {precision.name} is not accepted on {chip.name}, which does not {lacking}; "
        f"it multiplies {', '.join(rates)}, for which there are {', '.join(accepted)}"
    )


def _multiplies(chip: Accelerator, precision: Precision) -> bool:
    rates = chip.tensor_core.rates
    return precision.format in rates and ("fp4" in rates or not precision.scaled_in_hardware)


PrecisionOrName = Annotated[Precision, by_name("precision", load_precision)]
"""A precision, also by its name or as a file."""
