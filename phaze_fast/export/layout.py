"""Uneven pipelines as text: Megatron-Core's layout string, and counts of blocks by chunk.

The string has a letter for each layer, E the embedding, t a block, L the loss with the head; bars
end chunks, a star repeats a letter or a group in brackets, commas and blanks say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.request import Chunk

__all__ = ["layout_text", "read_layout", "sizes_of"]

_LONGEST = 100_000
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|([Etm L|])\*(\d+)")


def layout_text(chunks: Sequence[Chunk]) -> str:
    """Write chunks, in the order of the model, as a layout string.

    Examples
    --------
    >>> layout_text([Chunk(True, range(3), False, "none"), Chunk(False, range(3, 4), True, "none")])
    'Et*3|tL'
    """

    def one(chunk: Chunk) -> str:
        count = len(chunk.blocks)
        blocks = "t" * count if count < 2 else f"t*{count}"
        return "E" * chunk.embedding + blocks + "L" * chunk.head

    return "|".join(one(chunk) for chunk in chunks)


def read_layout(text: str, name: str) -> list[int]:
    """Read a layout string: layers of each chunk, embedding and head counted.

    Parameters
    ----------
    text
        The string.
    name
        The option that gave it, for messages.

    Raises
    ------
    InvalidInputError
        Where it is malformed, or holds what a plan has not.

    Examples
    --------
    >>> read_layout("Et*3|(tt|)*2tL", "--layout")
    [4, 2, 2, 2]
    """
    plain = re.sub(r"[,\s]", "", text)
    while (found := _REPEATED.search(plain)) is not None:
        group, times, letter, count = found.groups()
        part, number = (group, times) if group is not None else (letter, count)
        if len(number) > 6 or len(part) * int(number) > _LONGEST:
            raise InvalidInputError(f"{name}: {text[:60]!r} is not accepted; it is too long")
        plain = plain[: found.start()] + part * int(number) + plain[found.end() :]
    plain = plain.removesuffix("|")
    if not re.fullmatch(r"[EtL|]+", plain) or plain.count("E") != 1 or plain.count("L") != 1:
        raise InvalidInputError(
            f"{name}: {text[:60]!r} is not accepted; expected one E, one L and letters t, divided "
            "by bars, such as Et*3|t*4|t*3L (m, extra prediction layers, is not known)"
        )
    if not plain.replace("|", "").startswith("E") or not plain.endswith("L"):
        raise InvalidInputError(
            f"{name}: {text[:60]!r} is not accepted; expected E first and L last"
        )
    return [len(part) for part in plain.split("|")]


def sizes_of(blocks: Sequence[int]) -> tuple[int, ...]:
    """Layers of chunks that have so many blocks: the ends lie with the first and the last.

    Examples
    --------
    >>> sizes_of([4, 4])
    (5, 5)
    """
    sizes = list(blocks)
    sizes[0] += 1
    sizes[-1] += 1
    return tuple(sizes)
