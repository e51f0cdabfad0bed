"""Parts of a transformer that only some have: experts, latent attention, image patches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from phaze_fast.records import Count, Quantity, Record, Side

__all__ = ["MOST_BLOCKS", "Blocks", "LatentAttention", "MixtureOfExperts", "Patches"]

MOST_BLOCKS = 4094
"""Of a model: plans are made of at most 4,096 layers, the embedding and the head among them."""

Blocks = Annotated[int, Field(strict=True, ge=1, le=MOST_BLOCKS)]
"""How many blocks a model has."""

_Any = Annotated[int, Field(strict=True, ge=0)]


class MixtureOfExperts(Record):
    """Feed-forward layers of which each token visits a few."""

    what: ClassVar[str] = "moe"
    experts: Count
    """Routed experts in a layer."""
    top_k: Count
    """Experts a token visits."""
    expert_ffn: Side
    """Width of one expert."""
    shared_experts: _Any = 0
    """Experts of the same width that every token visits; they run as one."""
    shared_ffn: Side | None = None
    """Width of what every token visits, where it is no multiple of an expert's."""
    shared_gate: bool = False
    """Whether a weight per token scales what the shared experts give."""
    router_bias: bool = False
    """Bias of the router."""
    capacity_factor: Annotated[Quantity, Field(gt=0)] | None = None
    """Tokens an expert accepts over the even share; none = as many as come."""
    dense_layers: _Any = 0
    """Leading layers that keep the dense feed-forward of `ffn`."""
    dense_at: tuple[_Any, ...] = ()
    """Other layers that keep it, by position from 0."""
    moves: Annotated[int, Field(strict=True, ge=0, le=2)] = 0
    """How often kernels of their own put rows in another order on the way to the experts: by the
    device they go to (1), and by expert on arrival (2), which the way back undoes."""
    tile_rows: Annotated[int, Field(strict=True, ge=0, le=1048576)] = 0
    """Rows of a tile of the grouped products: a tile with rows of two experts is computed for both,
    so that each expert takes about one tile more than it has rows for; 0 where they are equal."""
    sent_once: bool = False
    """Whether a token goes once to a node, or to a device of its own node, however many of its
    experts are there; else once for each expert."""

    @property
    def shared_width(self) -> int:
        """Width of the shared experts together; 0 where there are none."""
        return self.shared_ffn or self.shared_experts * self.expert_ffn

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k: {self.top_k} is not accepted; there are {self.experts} experts"
            )
        return self


class LatentAttention(Record):
    """Multi-head latent attention: keys and values are made from one narrow vector per token.

    DeepSeek-AI 2024 (DeepSeek-V2), section 2.1. A part of each query and one key that all heads
    share are rotated; the rest is not.
    """

    what: ClassVar[str] = "latent"
    query_rank: Side | None = None
    """Width of the vector that queries are made from; none = from the residual stream."""
    kv_rank: Side
    """Width of the vector that keys and values are made from."""
    plain_width: Side
    """Width of the part of a head's queries and keys that is not rotated."""
    rotary_width: Side
    """Width of the part that is; its key is shared by all heads."""
    value_width: Side
    """Width of a head's values."""

    @property
    def query_width(self) -> int:
        """Width of one head's queries and keys."""
        return self.plain_width + self.rotary_width


class Patches(Record):
    """An image cut into square patches, in place of a vocabulary."""

    what: ClassVar[str] = "patches"
    size: Side
    """Pixels along a side of a patch."""
    channels: Side = 3
    """Colours of a pixel."""
    class_token: bool = True
    """Whether a learned token stands before the patches."""
