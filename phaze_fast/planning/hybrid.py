"""Hybrid sharding: replicas share state inside groups, and groups hold copies of it.

ZeRO and FSDP share state among all replicas unless told otherwise. A group of neighbours inside a
node keeps gathers off the slower network, at the price of more memory (PyTorch's HSDP, MiCS,
Megatron-LM's several instances of the distributed optimiser).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

__all__ = ["check_shard", "nearest_counts", "shard_choices", "shard_words", "shards_tried"]

Array = np.ndarray[Any, Any]


def nearest_counts(value: int, accepted: Iterable[int]) -> str:
    """Name the accepted counts next to a value, below and above.

    Examples
    --------
    >>> nearest_counts(3, [1, 2, 4, 8])
    '2 or 4'
    >>> nearest_counts(9, [1, 2, 4, 8])
    '8'
    """
    known = sorted(set(accepted))
    below = [n for n in known if n <= value][-1:]
    above = [n for n in known if n > value][:1]
    return " or ".join(map(str, [*below, *above]))


def _sharing_counts(replicas: int, ep: int) -> list[int]:
    """List how many replicas may share state, where experts are spread over so many."""
    step = max(1, ep)
    return [s for s in range(step, replicas + 1, step) if replicas % s == 0]


def check_shard(shard: int, replicas: int, ep: int, zero: int) -> None:
    """Check how many replicas of a plan share state.

    Raises
    ------
    ValueError
        Where nothing is shared, the groups are uneven, or a group does not hold every expert.
    """
    near = nearest_counts(shard, _sharing_counts(replicas, ep))
    if zero == 0:
        raise ValueError(
            f"shard: {shard} is not accepted with zero = 0, with which replicas share nothing; "
            "expected zero 1, 2 or 3"
        )
    if replicas % shard:
        raise ValueError(f"shard: {shard} does not divide dp = {replicas}; nearest: {near}")
    if shard % ep:
        raise ValueError(
            f"shard: {shard} is no multiple of ep = {ep}, so that a group would not "
            f"hold every expert; nearest: {near}"
        )


def _in_a_node(replicas: Array, room: Array, ep: int) -> Array:
    """Count the replicas of a node that can share state; 0 where that is none or all of them."""
    found = np.zeros(len(replicas), dtype=np.int64)
    for d, most in set(zip(replicas.tolist(), room.tolist(), strict=True)):
        some = [s for s in _sharing_counts(d, ep) if s <= most and s < d]
        found[(replicas == d) & (room == most)] = some[-1] if some else 0
    return found


def shard_choices(
    wanted: Iterable[int | str],
    replicas: Array,
    node_room: Array,
    ep: int,
    cp: int,
    rejected: Counter[str],
) -> Iterator[Array]:
    """Give how many replicas share state in each layout, one array per choice.

    Parameters
    ----------
    wanted
        Counts, ``all`` or ``node``.
    replicas
        Of each layout.
    node_room
        Replicas of each layout that a node holds.
    ep, cp
        Widths of the strategy.
    rejected
        Counts layouts for which a count is not possible, by reason.

    Yields
    ------
    numpy.ndarray
        0 where all replicas share, a count where fewer do, -1 where the choice is not possible or
        was given before.
    """
    listed = list(wanted)
    if "all" in listed:
        yield np.zeros(len(replicas), dtype=np.int64)
    if "node" in listed:
        found = _in_a_node(replicas, node_room, ep)
        yield np.where(found * cp > 1, found, -1)
    for count in sorted(s for s in listed if isinstance(s, int)):
        good = (replicas % count == 0) & (count % ep == 0)
        whole = replicas == count
        why = f"shard: {count} replicas do not share out the replicas evenly"
        if ep > 1:
            why += f", or are no multiple of ep {ep}"
        rejected[why] += int((~good).sum())
        yield np.where(good, np.where(whole, -1 if "all" in listed else 0, count), -1)


def shards_tried(wanted: Iterable[int | str], zero: int) -> tuple[int | str, ...]:
    """Spell out what ``auto`` stands for under a ZeRO stage.

    Examples
    --------
    >>> shards_tried(("auto",), 1), shards_tried(("auto",), 3)
    (('all',), ('all', 'node'))
    """
    auto = ("all", "node") if zero >= 2 else ("all",)
    found = (s for word in wanted for s in (auto if word == "auto" else (word,)))
    return tuple(dict.fromkeys(found))


def shard_words(wanted: Iterable[int | str], zero: int) -> str:
    """Name a ZeRO stage, and among which replicas state is shared where not among all alone.

    Examples
    --------
    >>> shard_words(("auto",), 1), shard_words(("auto", 4), 3)
    ('1', '3 (among all replicas, those of a node or 4)')
    """
    tried = shards_tried(wanted, zero)
    if zero == 0 or tried == ("all",):
        return str(zero)
    words = {"all": "all replicas", "node": "those of a node"}
    *first, last = (words.get(str(s), str(s)) for s in tried)
    return f"{zero} (among {', '.join(first)}{' or ' * bool(first)}{last})"
