"""Columns of plan fields as users give them, checked and coded for the plan kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest
from phaze_fast.planning.recompute import RECOMPUTE, check_stage_recompute, modes_in

__all__ = ["coded", "distinct", "recompute_words", "whole"]

Array = np.ndarray[Any, Any]


def coded(name: str, values: Any, accepted: Mapping[str, int]) -> Array:
    """Give words as codes; an array of words of few kinds is looked at once for each kind."""
    words = np.asarray(values)
    if words.dtype.kind not in "UO":
        raise InvalidTypeError(f"{name}: dtype {words.dtype} is not accepted; expected words")
    kinds, which = np.unique(words.astype(str), return_inverse=True)
    for word in kinds.tolist():
        if word not in accepted:
            raise InvalidInputError(f"{name}: {word!r} is not accepted; {nearest(word, accepted)}")
    codes = np.array([accepted[word] for word in kinds.tolist()], dtype=np.int64)
    found: Array = codes[which].reshape(words.shape)
    return found


def recompute_words(recompute: Any) -> tuple[list[str], Array]:
    """Read what plans recompute: each word once, and which one each plan has; -1 for auto.

    The first word is ``auto`` where some plan has that, else empty.
    """
    given = np.asarray(recompute)
    if given.dtype.kind not in "UO":
        raise InvalidTypeError(f"recompute: dtype {given.dtype} is not accepted; expected words")
    named = [w for w in np.unique(given.astype(str)).tolist() if w != "auto"]
    for word in named:
        check_stage_recompute(word)
    codes = coded("recompute", given, {"auto": -1, **{w: k for k, w in enumerate(named)}})
    found = ["auto" if (codes == -1).any() else "", *named]
    if len({*modes_in(named), *(RECOMPUTE if found[0] else ())}) > _core.MAX_VARIANTS:
        raise InvalidInputError(
            f"recompute: {', '.join(found)} are too many modes for one call; expected "
            f"{_core.MAX_VARIANTS} or fewer, of which auto takes {len(RECOMPUTE)}"
        )
    return found, codes


def whole(name: str, values: Any, least: int) -> Array:
    """Check whole numbers that are at least so large."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise InvalidTypeError(f"{name}: dtype {array.dtype} is not accepted; expected integers")
    if array.size and int(array.min()) < least:
        raise InvalidInputError(f"{name}: {array.min()} is not accepted; expected {least} or more")
    return array.astype(np.int64)


def distinct(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Give the distinct rows of columns of whole numbers, in order, and which each row is."""
    which: Array = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, own = np.unique(column, return_inverse=True)
        _, which = np.unique(which * len(values) + own, return_inverse=True)
    first = np.zeros(int(which.max(initial=-1)) + 1, dtype=np.int64)
    first[which[::-1]] = np.arange(len(which))[::-1]
    return np.stack(columns, axis=1)[first], which
