"""How the blocks of a model are shared out over the stages of a pipeline."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["balanced_split", "even_split", "weighed_split"]


@lru_cache(maxsize=4096)
def even_split(blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, alike but for one; the ends, which have more to do, get fewer."""
    base, more = divmod(blocks, stages)
    order = [*range(1, stages - 1), *([0] if stages > 1 else []), stages - 1]
    extra = set(order[:more])
    return tuple(base + (k in extra) for k in range(stages))


@lru_cache(maxsize=4096)
def weighed_split(blocks: int, stages: int, ends: tuple[float, float]) -> tuple[int, ...]:
    """Blocks of each stage so that the most that one has to do is least.

    `ends` is what the first and the last one have to do besides, in blocks; each has one block.

    Examples
    --------
    >>> weighed_split(24, 4, (0.1, 2.6))
    (6, 7, 7, 4)
    """
    if stages == 1 or blocks < stages:
        return even_split(blocks, stages)
    return balanced_split(blocks, (1.0,) * stages, ends)


@lru_cache(maxsize=65536)
def balanced_split(
    blocks: int, units: tuple[float, ...], ends: tuple[float, float]
) -> tuple[int, ...]:
    """Blocks of each stage so that the most that one has to do is least; each has one at least.

    Examples
    --------
    A stage that takes half as long for a block has twice as many:

    >>> balanced_split(12, (1.0, 1.0, 0.5), (0.0, 0.0))
    (3, 3, 6)
    """
    counts, loads = [1] * len(units), list(units)
    loads[0] += ends[0]
    loads[-1] += ends[1]
    for _ in range(blocks - len(units)):
        least = min(range(len(units)), key=lambda k: (loads[k] + units[k], k))
        counts[least] += 1
        loads[least] += units[least]
    return tuple(counts)
