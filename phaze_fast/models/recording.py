"""A recorded training step: the ATen operators that run, and the tensors that autograd saves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Modules = tuple[tuple[int, str], ...]
"""Running modules, outermost first: number of the call, and path of the module."""


@dataclass(frozen=True)
class Array:
    """A tensor that an operator reads or writes."""

    storage: int
    shape: tuple[int, ...]
    item_bytes: int
    held_bytes: int
    """Bytes of its storage."""
    parameter: bool = False
    strides: tuple[int, ...] = ()
    """Strides in elements; empty: those of a contiguous array."""

    @property
    def channels_last(self) -> bool:
        """Whether neighbours in memory are channels of one pixel, as in PyTorch's channels_last."""
        return len(self.shape) > 2 and len(self.strides) > 2 and self.strides[1] == 1

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes moved by reading it; an expanded array is read once."""
        return min(self.elements * self.item_bytes, self.held_bytes)


@dataclass(frozen=True)
class Call:
    """One recorded operator."""

    name: str
    """ATen name, without overload and in-place suffix."""
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    sources: tuple[int, ...]
    """Operators that produced its inputs; -1: the module's input."""
    backward: bool
    path: Modules
    sequence: int
    """Number of the autograd node that it belongs to."""
    options: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    """Source line it was called from."""


@dataclass(frozen=True)
class Saved:
    """A tensor saved by autograd."""

    array: Array
    before: int
    """Number of operators that ran before it was saved."""
    path: Modules
    source: int
    """Operator that produced it; -1: an input; -2: a constant."""
