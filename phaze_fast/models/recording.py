"""A recorded training step: the ATen operators that run, and the tensors that autograd saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Modules = tuple[tuple[int, str], ...]
"""Running modules, outermost first: number of the call, and path of the module."""

NEED_CONTIGUOUS = frozenset(
    f"{name}{end}"
    for name in ("native_layer_norm", "native_group_norm", "_softmax", "_log_softmax")
    for end in ("", "_backward", "_backward_data")
)
"""Operators whose kernels first copy arrays that are not contiguous."""


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


def safe_softmax(
    scores: Any, out: Any, temporary: Callable[[tuple[int, ...], int], Any]
) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield the kernels of a softmax that is zero in rows where everything is masked.

    PyTorch, aten/src/ATen/native/transformers/attention.cpp, _safe_softmax.

    Parameters
    ----------
    scores, out
        Arrays, or tensors of a tape.
    temporary
        Makes one of a shape and bytes per element, for the time of the operator.
    """
    shares, hidden = temporary(scores.shape, 4), temporary(scores.shape, 1)
    rows = temporary((*scores.shape[:-1], 1), 1)
    yield "_softmax", [scores], [shares]
    yield "isneginf", [scores], [hidden]
    yield "all", [hidden], [rows]
    yield "where", [rows, shares], [out]


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
