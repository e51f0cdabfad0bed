"""Families of strategies whose layers have the same operators, which are sized all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from phaze_fast.records import changed
from phaze_fast.tables import Array

T = TypeVar("T")


class Unlike(Exception):  # noqa: N818 -- caught wherever families are built
    """A condition that decides about operators holds for some members of a family only."""

    def __init__(self, holds: Array) -> None:
        super().__init__()
        self.holds = holds
        """For which members it does."""


class Each(np.ndarray[Any, Any]):
    """A number of each member of a family: rounded as Python's numbers, and never truncated alone.

    As a condition it is that of all members; where these differ, the family is to be split.
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
    """Return the numbers of members as one value: that of all of them where it is the same."""
    first = values[0]
    return first if all(v == first for v in values) else np.array(values).view(Each)


def members(value: Any, count: int) -> list[Any]:
    """Return the values of `count` members, of a value that may hold numbers of each."""
    if isinstance(value, Each):
        return list(value.tolist())
    if isinstance(value, tuple) and any(isinstance(one, Each | tuple) for one in value):
        return list(zip(*(members(one, count) for one in value), strict=True))
    return [value] * count


def apart(record: T, count: int, **given: Sequence[Any]) -> list[T]:
    """Return a dataclass whose fields hold numbers of each member as one for each of them.

    Fields that are `given` have these values.
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
    """Build members at once, or those for which a condition holds apart from the others."""
    try:
        yield from zip(parts, build(parts), strict=True)
    except Unlike as unlike:
        for holds in (True, False):
            some = [p for p, own in zip(parts, unlike.holds.tolist(), strict=True) if own is holds]
            yield from split_where_unlike(build, some)
