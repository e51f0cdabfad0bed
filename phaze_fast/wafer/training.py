"""One training step on a wafer."""

from __future__ import annotations

from dataclasses import dataclass

from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.memory.optimizer import optimizer

__all__ = ["WaferTraining"]


@dataclass(frozen=True)
class WaferTraining:
    """One training step on a wafer.

    Examples
    --------
    >>> WaferTraining(global_batch=64).optimizer
    'adam-bf16-grad'
    """

    global_batch: int = 512
    """Sequences of one step."""
    seq: int | None = None
    """Tokens of a sequence; by default the model's."""
    optimizer: str = "adam-bf16-grad"
    """A name of `phaze_fast.memory.OPTIMIZERS`; by default ZeRO's 16 bytes per parameter."""

    def __post_init__(self) -> None:
        for name, value in (("global_batch", self.global_batch), ("seq", self.seq)):
            if value is not None and not (isinstance(value, int) and 1 <= value <= 2**24):
                raise InvalidInputError(
                    f"{name}: {value!r} is not accepted; expected a whole number from 1 to 2^24"
                )
        if not isinstance(self.optimizer, str):
            raise InvalidTypeError(
                f"optimizer: {type(self.optimizer).__name__} is not accepted; expected a name"
            )
        optimizer(self.optimizer)
