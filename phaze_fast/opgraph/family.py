"""Families: strategies whose layers have the same operators, in sizes that may differ.

The members of a family are its strategies. One run of the layer builder builds the layers of all
members: a size in which they differ is an `Each`, an array with one number per member. `together`
joins the members' numbers into one value; `apart` and `members` split a result by member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from phaze_fast.records import changed
from phaze_fast.tables import Array

T = TypeVar("T")


class Unlike(Exception):  # noqa: N818 -- caught wherever families are built
    """A condition on which operators depend holds for some members of a family, not for all."""

    def __init__(self, holds: Array) -> None:
        super().__init__()
        self.holds = holds
        """Whether the condition holds, for each member."""


class Each(np.ndarray[Any, Any]):
    """One number per member of a family, for use in place of a Python number.

    `math.trunc`, `math.ceil` and `round` apply to every number. The truth value is the one that
    all members have in common; where members differ, `Unlike` says that the family must be split.
    """

    def __bool__(self) -> bool:
        holds = self.view(np.ndarray) != 0
        if holds.all():
            return True
        if holds.any():
            raise Unlike(holds)
        return False

    def __trunc__(self) -> Array:
        return self.astype(np.int64)

    def __ceil__(self) -> Array:
        return np.ceil(self).astype(np.int64)

    def __round__(self) -> Array:
        return np.rint(self).astype(np.int64)


def together(values: Sequence[Any]) -> Any:
    """Join one number per member: into that number if all are equal, else into an `Each`."""
    first = values[0]
    return first if all(v == first for v in values) else np.array(values).view(Each)


def members(value: Any, count: int) -> list[Any]:
    """Return the value of each of `count` members: an `Each`, also in tuples, differs by member."""
    if isinstance(value, Each):
        return list(value.tolist())
    if isinstance(value, tuple) and any(isinstance(one, Each | tuple) for one in value):
        return list(zip(*(members(one, count) for one in value), strict=True))
    return [value] * count


def apart(record: T, count: int, **given: Sequence[Any]) -> list[T]:
    """Split a dataclass whose fields may hold `Each` into `count` of them, one per member.

    A field in `given` takes its values, one per member, from there.
    """
    varied = {k: v for k, v in vars(record).items() if isinstance(v, Each | tuple)}
    columns = {k: members(v, count) for k, v in varied.items()} | given
    return [
        changed(record, **dict(zip(columns, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ] or [record] * count


def split_where_unlike(
    build: Callable[[Sequence[T]], list[Any]], parts: Sequence[T]
) -> Iterator[tuple[T, Any]]:
    """Yield each of `parts` with what `build` makes of it; parts are built together if possible.

    Where a condition holds for some parts only (`Unlike`), these are built apart from the others.
    """
    try:
        yield from zip(parts, build(parts), strict=True)
    except Unlike as unlike:
        for holds in (True, False):
            some = [p for p, own in zip(parts, unlike.holds.tolist(), strict=True) if own is holds]
            yield from split_where_unlike(build, some)
