"""What stages recompute: modes by name, for all blocks of a stage or for the first few.

``full`` recomputes every block of a stage; ``full:3`` the first three blocks of each of its chunks,
the others nothing; ``full:3/norms`` the others their norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from phaze_fast import _core
from phaze_fast.opgraph import check_recompute

__all__ = [
    "RECOMPUTE",
    "block_mode",
    "check_stage_recompute",
    "modes_in",
    "recompute_code",
    "recompute_text",
    "split_recompute",
]

RECOMPUTE = (
    "none",
    "selective",
    "activations+gated-product",
    "norms+activations+gated-product",
    "norms+activations+gated-product+up-projection",
    "norms+activations+gated-product+attention",
    "norms+activations+gated-product+up-projection+attention",
    "full",
)
"""What ``auto`` chooses from, least first."""


def split_recompute(text: str) -> tuple[str, str, int]:
    """Read ``more:count/rest`` or a mode of all blocks, as (rest, more, count)."""
    first, _, rest = text.partition("/")
    more, colon, count = first.partition(":")
    if not colon:
        if rest:
            raise ValueError(f"recompute: {text!r} is not accepted; expected MODE or MODE:N/MODE")
        return more, more, 0
    if not count.isdecimal() or len(count) > 6 or int(count) < 1:
        raise ValueError(
            f"recompute: {count!r} in {text!r} is not accepted; expected how many blocks, 1 or more"
        )
    return rest or "none", more, int(count)


def check_stage_recompute(text: str) -> None:
    """Check what a stage is said to recompute.

    Raises
    ------
    ValueError
        Where it is malformed or names no mode.
    """
    rest, more, _ = split_recompute(text)
    for mode in (rest, more):
        check_recompute(mode)


def modes_in(texts: Sequence[str]) -> tuple[str, ...]:
    """Modes that some texts name, each once, in order.

    Examples
    --------
    >>> modes_in(["full:3/norms", "none"])
    ('norms', 'full', 'none')
    """
    named = [mode for text in texts for mode in split_recompute(text)[:2]]
    return tuple(dict.fromkeys(named))


def recompute_code(text: str, variant_of: Mapping[str, int]) -> int:
    """Write what a stage recomputes as the plan kernel reads it."""
    rest, more, count = split_recompute(text)
    if count == 0 or variant_of[more] == variant_of[rest]:
        return variant_of[rest]
    return variant_of[rest] + _core.MAX_VARIANTS * (variant_of[more] + _core.MAX_VARIANTS * count)


def block_mode(code: int, number: int, variants: Sequence[str]) -> str:
    """Mode of the block with a number, from 1, of a chunk of a stage."""
    code, rest = divmod(code, _core.MAX_VARIANTS)
    count, more = divmod(code, _core.MAX_VARIANTS)
    return variants[more] if number <= count else variants[rest]


def recompute_text(code: int, variants: Sequence[str]) -> str:
    """Say what a stage recomputes, of the kernel's number for it."""
    code, rest = divmod(code, _core.MAX_VARIANTS)
    count, more = divmod(code, _core.MAX_VARIANTS)
    if count == 0:
        return variants[rest]
    others = "" if variants[rest] == "none" else f"/{variants[rest]}"
    return f"{variants[more]}:{count}{others}"
