"""A recorded training step: the ATen operators that run, and the tensors that autograd saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
    """Bytes of the storage, of which the array may be a part."""
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
        """Bytes moved by reading or writing the array; an expanded one is read once."""
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
        Makes an array from its shape and bytes per element; it lives as long as the operator.
    """
    shares, hidden = temporary(scores.shape, 4), temporary(scores.shape, 1)
    rows = temporary((*scores.shape[:-1], 1), 1)
    yield "_softmax", [scores], [shares]
    yield "isneginf", [scores], [hidden]
    yield "all", [hidden], [rows]
    yield "where", [rows, shares], [out]


MASK = "fused_mask_load"
"""Name of the operator with which attention loads a mask."""
CONVERTED = 2
"""Passes over a mask of numbers that is made from a boolean one, before its last write: a write of
zeros, and the reads of a masked fill."""


def mask_load(mask: Array, heads: tuple[int, ...], passes: int = 0) -> tuple[Array, dict[str, Any]]:
    """Return the array that all heads load of a mask, which products do not hide, and options.

    Measured on one H200 (PyTorch 2.11, cuDNN): 151 and 375 us of 153 and 379 forward and backward
    in a block of GPT-2, 1,024 tokens, where the same attention without a mask takes 29 and 78.

    Parameters
    ----------
    mask
        The mask that is added to the scores.
    heads
        Samples and heads; of a backward pass each head twice, for the gradients of queries and for
        those of keys.
    passes
        Further passes over the mask, where it is made.
    """
    shape = (*heads[:-1], heads[-1] + passes, *mask.shape[-2:])
    loaded = replace(mask, shape=shape, held_bytes=math.prod(shape) * mask.item_bytes, strides=())
    return loaded, {"kind": "multiply", "function": "copy", "shape": shape}


@dataclass(frozen=True)
class Call:
    """One recorded operator."""

    name: str
    """ATen name, without overload and in-place suffix."""
    reads: tuple[Array, ...]
    writes: tuple[Array, ...]
    sources: tuple[int, ...]
    """Operators that produced the inputs of this one; -1: the module's input."""
    backward: bool
    path: Modules
    sequence: int
    """Number of the autograd node that the operator belongs to; -1: none."""
    options: dict[str, Any] = field(default_factory=dict)
    line: str = ""
    """Source line from which the operator was called."""


@dataclass(frozen=True)
class Saved:
    """A tensor saved by autograd."""

    array: Array
    before: int
    """Number of operators that ran before it was saved."""
    path: Modules
    source: int
    """Operator that produced it; -1: an input; -2: a constant."""


class Recording:
    """A training step while it is recorded, on a tape or from a PyTorch module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.saved: list[Saved] = []
        self.parameters: dict[int, int] = {}
        """Elements of each parameter, by storage."""
        self.frozen: set[int] = set()
        """Storages of parameters that require no gradient."""
        self.copies: dict[int, int] = {}
        """Storages of casts of parameters, and the parameter of each cast."""
        self.backward = False
        self._path: list[tuple[int, str]] = []
        self._entered = 0
        self._writer: dict[int, int] = {}  # storage -> operator that last wrote to it, -1: an input

    def enter(self, path: str) -> None:
        """Enter a module."""
        self._entered += 1
        self._path.append((self._entered, path))

    def is_weight(self, storage: int) -> bool:
        """Whether a storage holds a parameter or a cast of one."""
        return storage in self.parameters or storage in self.copies

    def counts(self, array: Array) -> bool:
        """Whether operators on an array are recorded; on constants such as masks they are not."""
        return array.parameter or array.storage in self._writer

    def note(
        self,
        name: str,
        reads: Sequence[Array],
        writes: Sequence[Array],
        options: dict[str, Any],
        sequence: int,
        line: str = "",
    ) -> None:
        """Record an operator; a cast of weights is treated as the weights."""
        sources = dict.fromkeys(
            self._writer[array.storage] for array in reads if array.storage in self._writer
        )
        path, passes = tuple(self._path), (tuple(reads), tuple(writes), tuple(sources))
        self.calls.append(Call(name, *passes, self.backward, path, sequence, options, line))
        cast = name in ("_to_copy", "clone") and all(array.parameter for array in reads)
        for array in writes:
            if cast:
                first = reads[0].storage
                self.copies[array.storage] = self.copies.get(first, first)
            else:
                self._writer[array.storage] = len(self.calls) - 1

    def note_saved(self, array: Array) -> None:
        """Record a tensor that autograd saves; weights take no memory of their own."""
        if not array.parameter:
            source = self._writer.get(array.storage, -2)
            self.saved.append(Saved(array, len(self.calls), tuple(self._path), source))
