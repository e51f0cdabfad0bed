"""Low-rank adapters (LoRA): trained pairs of narrow matrices added to frozen weights.

A frozen product y = x W becomes y = x W + (x A) B with A of shape (inputs, rank) and B of shape
(rank, outputs) (Hu et al. 2021, arXiv:2106.09685, equation 3). All other parameters are frozen.
With 4 bits, frozen matrices of the blocks are stored in blocks of 64 numbers with one constant
each, and these in 8 bits with one fp32 constant for 256 of them (QLoRA: Dettmers et al. 2023,
arXiv:2305.14314, section 3: 0.127 bits per parameter); each use first restores them in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from phaze_fast.documents import package_data
from phaze_fast.errors import InvalidInputError, check_one_of, nearest, not_accepted
from phaze_fast.records import Quantity, Record, Side

PACKED_BYTES = 0.5 + (8.0 / 64.0 + 32.0 / (64.0 * 256.0)) / 8.0
"""Bytes of a frozen 4-bit weight: half a byte and its share of the constants."""

ALL_LINEAR = "all-linear"
"""Every projection of the blocks, routers and routed experts excepted, as PEFT adapts them."""

_BOTH = {"c_proj": ("o", "down")}  # GPT-2 has two projections of this name in a block


def _projections() -> list[str]:
    """Return the names of projections, in the order in which targets are listed."""
    return list(package_data(__package__, "lora.yaml"))


@cache
def _named() -> dict[str, tuple[str, ...]]:
    """Return the projections that each name stands for, given by a module or a user."""
    aliases: dict[str, str] = package_data(__package__, "lora.yaml")
    names = {word: (name,) for name, text in aliases.items() for word in (name, *text.split())}
    return {**names, **_BOTH}


class Lora(Record):
    """Adapters on some projections of every block; everything else is frozen.

    Examples
    --------
    >>> Lora(rank=16, targets=("q_proj", "v_proj")).targets
    ('q', 'v')
    """

    what: ClassVar[str] = "lora"
    rank: Side
    """Columns of A and rows of B."""
    targets: tuple[str, ...] = Field(default=(ALL_LINEAR,), min_length=1)
    """Adapted projections: q, k, v or qkv, o, up, gate or gate-up, down; q-down, q-up, kv-down and
    kv-up of latent attention; experts for those of routed experts. Names of HuggingFace modules
    are accepted. Feed-forward names mean dense layers and shared experts."""
    alpha: Quantity | None = None
    """An adapter's output is scaled by alpha / rank, which affects no time and no memory."""
    dropout: Annotated[Quantity, Field(lt=1)] = 0.0
    """Probability of dropout on the input of each adapter; if not 0, each stores its input and a
    mask."""
    bits: Literal[4, 16] = 16
    """Bits of a frozen weight of the blocks' projections."""

    @field_validator("targets")
    @classmethod
    def _names(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if word not in _named():
                hint = nearest(word, _projections())
                raise InvalidInputError(f"targets: {word!r} is not accepted; {hint}")
        names = {name for word in words for name in _named()[word]}
        return tuple(name for name in _projections() if name in names)

    def adapts(self, module: str) -> bool:
        """Whether a linear layer has an adapter, by the name of its module."""
        return bool(set(_named().get(module, ())) & set(self.targets))

    def parameters(self, shapes: Iterable[tuple[int, int]]) -> int:
        """Parameters of the adapters of matrices of some shapes.

        Examples
        --------
        >>> Lora(rank=8).parameters([(4096, 4096), (4096, 1024)])
        106496
        """
        return sum(self.rank * (inputs + outputs) for inputs, outputs in shapes)

    def resolved(self, known: Iterable[str], fused: Iterable[str]) -> Lora:
        """Return the adapters of a model with the projections `known`, of which some are `fused`.

        Parameters
        ----------
        known
            Names of the projections that a model has.
        fused
            Those of `known` that hold several projections in one matrix: ``qkv``, ``gate-up``.

        Raises
        ------
        InvalidInputError
            Where a target is not one of the model's, or is a part of a fused projection.
        """
        names = list(known)
        wanted = set(self.targets)
        if ALL_LINEAR in wanted:
            wanted = (wanted - {ALL_LINEAR}) | (set(names) - {"experts"})
        for whole in fused:
            parts = _PARTS[whole]
            if wanted & parts and not parts <= wanted:
                raise not_accepted(
                    "lora: targets", "+".join(sorted(wanted & parts)), f"{whole}, one projection"
                )
            if parts <= wanted:
                wanted = (wanted - parts) | {whole}
        for name in self.targets:
            if name in wanted and name not in names:
                raise not_accepted("lora: targets", name, f"some of {', '.join(names)}")
        return self.replace(targets=tuple(sorted(wanted, key=_projections().index)))


_PARTS = {"qkv": {"q", "k", "v"}, "gate-up": {"gate", "up"}}


def read_lora(text: str) -> Lora:
    """Read adapters written as text: keys and values, targets separated by commas.

    Raises
    ------
    InvalidInputError
        Where a key or a value is not accepted.

    Examples
    --------
    >>> read_lora("rank=16,targets=q,k,v,o,bits=4").targets
    ('q', 'k', 'v', 'o')
    """
    values: dict[str, list[str]] = {}
    key = ""
    for item in text.split(","):
        before, equals, after = item.partition("=")
        if equals:
            key = before.strip()
            check_one_of("lora", key, Lora.model_fields)
        elif key != "targets":
            raise not_accepted("lora", text, "such as rank=16,targets=q,k,v,o")
        values.setdefault(key, []).append((after if equals else item).strip())
    fields: dict[str, Any] = {"targets": tuple(values.pop("targets", (ALL_LINEAR,)))}
    for name, words in values.items():
        if len(words) > 1:
            raise not_accepted(f"lora: {name}", ",".join(words), "one value")
        try:
            fields[name] = float(words[0]) if name in ("alpha", "dropout") else int(words[0])
        except ValueError:
            raise not_accepted(f"lora: {name}", words[0], "a number") from None
    return Lora.from_dict(fields, "lora")
