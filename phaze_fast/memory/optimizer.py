"""Optimisers by name, and the bytes of state that they keep per parameter."""

from __future__ import annotations

from typing import ClassVar

from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.records import Quantity, Record


class Optimizer(Record):
    """Bytes per parameter of weights, gradients and optimiser state."""

    what: ClassVar[str] = "optimizer"
    name: str
    """Name of the optimiser."""
    weight_bytes: Quantity
    """Bytes of a weight as the forward pass reads it."""
    gradient_bytes: Quantity
    """Bytes of an accumulated gradient."""
    state_bytes: Quantity
    """Bytes of master weight and moments together."""

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a weight that replicas gather: fp32 weights are cast to bf16 first.

        Examples
        --------
        >>> OPTIMIZERS["adam-fp32"].gathered_bytes
        2.0
        """
        return min(self.weight_bytes, 2.0)


OPTIMIZERS = {
    spec.name: spec
    for spec in (
        # bf16 weights, fp32 master weights and two fp32 moments (ZeRO, SC 2020: 16 with 2-byte
        # gradients; Megatron-LM accumulates them in fp32: 18).
        Optimizer(name="adam", weight_bytes=2.0, gradient_bytes=4.0, state_bytes=12.0),
        Optimizer(name="adam-bf16-grad", weight_bytes=2.0, gradient_bytes=2.0, state_bytes=12.0),
        Optimizer(name="adam-bf16", weight_bytes=2.0, gradient_bytes=2.0, state_bytes=4.0),
        Optimizer(name="adam-fp32", weight_bytes=4.0, gradient_bytes=4.0, state_bytes=8.0),
        # fp32 weights that layers read in bf16, whose gradients are bf16 until the optimiser.
        Optimizer(
            name="adam-fp32-bf16-grad", weight_bytes=4.0, gradient_bytes=2.0, state_bytes=8.0
        ),
        Optimizer(name="sgd-momentum", weight_bytes=2.0, gradient_bytes=4.0, state_bytes=8.0),
        Optimizer(name="sgd", weight_bytes=2.0, gradient_bytes=4.0, state_bytes=4.0),
        Optimizer(name="sgd-bf16", weight_bytes=2.0, gradient_bytes=2.0, state_bytes=0.0),
    )
}
"""Optimisers by name, in mixed precision unless the name says otherwise."""


def optimizer(name: str | Optimizer) -> Optimizer:
    """Look up an optimiser.

    Examples
    --------
    >>> spec = optimizer("adam")
    >>> spec.weight_bytes + spec.gradient_bytes + spec.state_bytes
    18.0
    """
    if isinstance(name, Optimizer):
        return name
    if name not in OPTIMIZERS:
        raise InvalidInputError(f"optimizer: {name!r} is not accepted; {nearest(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]
