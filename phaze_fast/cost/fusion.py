"""Least off-chip bytes of products that share a chip's buffer, and which of them to fuse.

The kernels are in ``cpp/include/phaze/fusion.hpp``, with their formulas. A chain of operators is
cut into groups, each of which keeps its intermediate arrays on chip; the cuts of least bytes are a
shortest path over cut points.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import not_accepted
from phaze_fast.tables import Array


@dataclass(frozen=True)
class BufferRules:
    """How a chip uses the buffer in front of its memory.

    The defaults are those of `phaze_fast.gemm`: sums in fp32, and strips of 64 elements, of which
    one arrives while the other is read.

    Attributes
    ----------
    element_bytes, sum_bytes
        Bytes of an operand or result, and of a partial sum.
    strip_depth, strip_copies
        Elements of a row that stream through the buffer at a time (a strip), and how many strips
        the buffer has at once: 2 with double buffering.
    sum_transfers
        How often a partial sum that leaves the chip is moved: written and read, or 1 where adders
        in the memory take it.
    """

    element_bytes: float = 2.0
    sum_bytes: float = 4.0
    strip_depth: float = 64.0
    strip_copies: float = 2.0
    sum_transfers: float = 2.0

    @property
    def arguments(self) -> tuple[float, float, float, float]:
        """The rules as the kernels take them."""
        strip = self.strip_depth * self.strip_copies
        return self.element_bytes, self.sum_bytes, strip, self.sum_transfers


@dataclass(frozen=True)
class FusedGroup:
    """Products fused through an array H of rows x hidden that stays on chip.

    X (rows x inner) times A gives H, H times B gives Y (rows x outer). If `inner` is 0, H is read;
    if `outer` is 0, H is the result; the bytes of H are then part of `moved_bytes`.
    """

    rows: int
    inner: int
    hidden: int
    outer: int
    count: int = 1
    """Independent groups of this shape, such as heads."""
    row_step: int = 1
    """Rows of a tile are a multiple of this, such as the length of a sequence."""
    hidden_step: int = 1
    """Columns of a tile are a multiple of this, such as the width of a head."""
    first: float = 1.0
    """Columns of A per column of H: 2 where gated."""
    second: float = 1.0
    """Rows of B per column of H."""
    held: float = 1.0
    """Number of arrays as large as a tile of H that are on chip at once."""
    inputs: float = 1.0
    """Times that X is fetched and held; 1 unless products do not share it."""
    moved_bytes: float = 0.0
    """Further bytes of one group that are read or written once, such as stashed tensors."""


class GroupTraffic(NamedTuple):
    """Off-chip bytes of a group by buffer size, and the tiling that reaches them."""

    hbm_bytes: Array
    """Infinite where no tile fits."""
    row_passes: Array
    column_passes: Array
    kept: tuple[tuple[str, ...], ...]
    """Names of the tiles that stay on chip over the inner loop: input, output, first, second."""


_FIELDS = {"moved_bytes": "moved"}
_KEPT = ("input", "output", "first", "second")


def _capacities(capacity_bytes: float | Sequence[float] | Array) -> Array:
    sizes = np.atleast_1d(np.asarray(capacity_bytes, dtype=np.float64))
    if not np.all(sizes >= 0.0):
        raise not_accepted("capacity_bytes", capacity_bytes, "sizes of at least 0")
    return np.ascontiguousarray(sizes)


def group_traffic(
    group: FusedGroup,
    capacity_bytes: float | Sequence[float] | Array,
    rules: BufferRules | None = None,
) -> GroupTraffic:
    """Return the least off-chip bytes of a fused group for each size of the buffer.

    The minimum is over all tile sizes, loop orders, and tiles that stay over the inner loop.

    Parameters
    ----------
    group
        The products of the group.
    capacity_bytes
        Sizes of the buffer.
    rules
        How the chip uses it.

    Raises
    ------
    InvalidInputError
        Where a size or factor is not positive.

    Examples
    --------
    >>> mlp = FusedGroup(rows=2048, inner=1024, hidden=4096, outer=1024)
    >>> rules = BufferRules(sum_bytes=2, strip_depth=1, strip_copies=1)
    >>> float(group_traffic(mlp, 16 * 2**20, rules).hbm_bytes[0]) / 2**20
    24.0
    """
    record: Array = np.zeros(1, dtype=_core.FUSED_GROUP_DTYPE)
    for field in fields(group):
        record[_FIELDS.get(field.name, field.name)] = getattr(group, field.name)
    sizes = _capacities(capacity_bytes)
    rows = _core.group_traffic(record, sizes, (rules or BufferRules()).arguments)
    kept = tuple(
        tuple(name for bit, name in enumerate(_KEPT) if int(mask) >> bit & 1)
        for mask in rows["kept"]
    )
    return GroupTraffic(rows["hbm_bytes"], rows["row_passes"], rows["column_passes"], kept)


def product_bytes(
    m: int,
    k: int,
    n: int,
    capacity_bytes: float | Sequence[float] | Array,
    rules: BufferRules | None = None,
) -> Array:
    """Return the least off-chip bytes of m x k by k x n, alone, for each size of the buffer.

    Parameters
    ----------
    m, k, n
        Rows, inner dimension and columns.
    capacity_bytes
        Sizes of the buffer.
    rules
        How the chip uses it.

    Examples
    --------
    >>> rules = BufferRules(sum_bytes=2, strip_depth=1, strip_copies=1)
    >>> float(product_bytes(2048, 1024, 4096, 2**20, rules)[0]) / 2**20
    60.0
    """
    sizes = _capacities(capacity_bytes)
    return _core.product_bytes(m, k, n, sizes, (rules or BufferRules()).arguments)


class Cuts(NamedTuple):
    """A chain of operators cut into groups of least bytes; the shortest path is exact."""

    hbm_bytes: float
    groups: tuple[tuple[int, int], ...]
    """First and one past the last operator of each group."""
    bound_bytes: float
    """Lower bound over all cuts; equal to `hbm_bytes`."""

    @property
    def gap(self) -> float:
        """Relative distance of the bytes from their bound."""
        return self.hbm_bytes / self.bound_bytes - 1.0 if self.bound_bytes else 0.0


def best_cuts(count: int, bytes_of: Callable[[int, int], float]) -> Cuts:
    """Cut a chain of operators into groups that together move the fewest bytes.

    Shortest path over cut points, O(count^2) groups. Ties go to the group that begins first.

    Parameters
    ----------
    count
        Operators in the chain.
    bytes_of
        Bytes of the group of operators i to j - 1; infinite where these cannot be fused.

    Examples
    --------
    >>> best_cuts(3, lambda i, j: [4.0, 7.0, float("inf")][j - i - 1]).groups
    ((0, 1), (1, 3))
    """
    least, begin = [0.0] + [np.inf] * count, [0] * (count + 1)
    for end in range(1, count + 1):
        for start in range(end):
            total = least[start] + bytes_of(start, end)
            if total < least[end]:
                least[end], begin[end] = total, start
    groups: list[tuple[int, int]] = []
    end = count if np.isfinite(least[count]) else 0
    while end:
        groups.append((begin[end], end))
        end = begin[end]
    return Cuts(least[count], tuple(reversed(groups)), least[count])
