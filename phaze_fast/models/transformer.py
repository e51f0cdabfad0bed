"""A transformer as a validated record, and its parameters by part.

One record covers encoders, decoders and encoder-decoders, dense and mixture-of-experts. What a
field cannot say is not guessed: `from_hf` refuses it by name.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phaze_fast.records import Count, Quantity, Record, Side

__all__ = ["Activation", "MixtureOfExperts", "Patches", "TransformerModel"]

Activation = Literal["gelu", "relu", "silu"]
"""Non-linearities of the feed-forward layer; variants that cost the same share a name."""


class MixtureOfExperts(Record):
    """Feed-forward layers of which each token visits a few."""

    what: ClassVar[str] = "moe"
    experts: Count
    """Routed experts in a layer."""
    top_k: Count
    """Experts a token visits."""
    expert_ffn: Side
    """Width of one expert."""
    shared_experts: Annotated[int, Field(strict=True, ge=0)] = 0
    """Experts of the same width that every token visits."""
    capacity_factor: Annotated[Quantity, Field(gt=0)] | None = None
    """Tokens an expert accepts over the even share; none = as many as come."""
    dense_layers: Annotated[int, Field(strict=True, ge=0)] = 0
    """Leading layers that keep the dense feed-forward of `ffn`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k: {self.top_k} is not accepted; there are {self.experts} experts"
            )
        return self


class Patches(Record):
    """An image cut into square patches, in place of a vocabulary."""

    what: ClassVar[str] = "patches"
    size: Side
    """Pixels along a side of a patch."""
    channels: Side = 3
    """Colours of a pixel."""
    class_token: bool = True
    """Whether a learned token stands before the patches."""


class TransformerModel(Record):
    """A transformer, as the operator graphs see it.

    Examples
    --------
    >>> from phaze_fast import models
    >>> model = models.load("llama2-7b")
    >>> model.parameters()
    6738415616
    """

    what: ClassVar[str] = "model"
    name: str = Field(min_length=1)
    """What to call it."""
    layers: Count
    """Blocks; of an encoder-decoder, those of the decoder."""
    hidden: Side
    """Width of the residual stream."""
    heads: Side
    """Query heads."""
    kv_heads: Side | None = None
    """Key and value heads; fewer than `heads` is grouped-query, one is multi-query attention."""
    head_dim: Side | None = None
    """Width of a head; by default hidden / heads."""
    ffn: Side
    """Width of the feed-forward layer."""
    vocab: Annotated[int, Field(strict=True, ge=0)]
    """Rows of the token embedding as allocated, padding included; 0 where there is none."""
    seq: Count
    """Sequence length a step is reckoned with unless told otherwise."""
    causal: bool = True
    """Whether a token sees only those before it (the decoder, of an encoder-decoder)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation; a layernorm has a bias beside its gain."""
    norm_position: Literal["pre", "post"] = "pre"
    """Before each sub-layer, or after its residual sum as in BERT."""
    final_norm: bool = True
    """Whether a norm follows the last block (of each stack)."""
    activation: Activation = "gelu"
    """Non-linearity of the feed-forward layer."""
    gated: bool = False
    """Whether a second projection gates the first, as in SwiGLU."""
    positions: Literal["learned", "rotary", "relative", "none"] = "learned"
    """How a token knows where it stands."""
    max_positions: Count | None = None
    """Rows of the learned position table as allocated."""
    relative_buckets: Count | None = None
    """Rows of the relative bias table, one per stack, a column per head."""
    token_types: Annotated[int, Field(strict=True, ge=0)] = 0
    """Rows of the segment embedding."""
    embedding_norm: bool = False
    """Whether a norm follows the embeddings."""
    patches: Patches | None = None
    """How an image becomes tokens; absent in language models."""
    qkv_bias: bool = True
    """Bias of the query, key and value projections."""
    out_bias: bool = True
    """Bias of the attention's output projection."""
    ffn_bias: bool = True
    """Bias of the feed-forward projections."""
    dropout: bool = False
    """Whether training drops activations, so that masks are kept for the backward pass."""
    attention: Literal["flash", "eager"] = "flash"
    """Fused attention, or explicit softmax(QK^T)V that keeps its scores."""
    fused_qkv: bool = False
    """Whether one projection makes queries, keys and values together."""
    kv_expanded: bool = False
    """Whether keys and values are copied to every query head first, as PyTorch's attention does
    unless told that heads are grouped; matters for what is kept."""
    gelu_new: bool = False
    """Whether GELU is the tanh form that HuggingFace calls ``gelu_new``, whose own code is a row of
    elementwise operators."""
    gelu_by_steps: bool = False
    """Whether GELU is computed operator by operator, which keeps what each of them made."""
    loss_passes: Annotated[int, Field(strict=True, ge=0, le=1000)] = 0
    """How often a loss that is not one fused kernel moves its fp32 logits through memory, forward
    and backward together; 0 = fused, on bf16 logits."""
    logit_bytes: Annotated[int, Field(strict=True, ge=1, le=64)] = 4
    """Bytes that each logit takes while the loss is computed, copies and gradients included."""
    moe: MixtureOfExperts | None = None
    """Mixture of experts; absent in dense models."""
    encoder_layers: Annotated[int, Field(strict=True, ge=0)] = 0
    """Blocks of the encoder; the decoder then attends to its output as well."""
    head: Literal["lm", "mlm", "classifier", "none"] = "lm"
    """What follows the blocks: next-token logits, BERT's transform and logits, or classes."""
    classes: Annotated[int, Field(strict=True, ge=0)] = 0
    """Outputs of a classifier."""
    tied_embeddings: bool = True
    """Whether the logits use the token embedding's weights."""
    published_parameters: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Parameter count as published, where one is; digits not published are zero."""
    published_digits: Annotated[int, Field(strict=True, ge=1)] | None = None
    """How many of its leading digits are published; none = all of them."""
    sources: tuple[str, ...] = ()
    """Where the figures come from."""
    notes: str = ""
    """What a reader should know about them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"heads: {self.heads} is not accepted; expected a divisor of hidden "
                f"{self.hidden}, or head_dim beside it"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: {self.kv_heads} is not accepted; expected a divisor of heads "
                f"{self.heads}"
            )
        needs = {
            "max_positions": self.positions == "learned",
            "relative_buckets": self.positions == "relative",
            "classes": self.head == "classifier",
        }
        for field, needed in needs.items():
            if needed != bool(getattr(self, field)):
                reason = "is missing" if needed else "is not accepted"
                raise ValueError(f"{field}: {reason} with {self.positions} positions, {self.head}")
        if (self.vocab == 0) == (self.patches is None):
            raise ValueError("vocab: a model has either a vocabulary or patches")
        if self.moe is not None and self.moe.dense_layers >= self.layers:
            raise ValueError(
                f"moe.dense_layers: {self.moe.dense_layers} is not accepted; "
                f"there are {self.layers} layers"
            )
        return self

    # ---- widths ----

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of all key (or value) heads together."""
        return (self.heads if self.kv_heads is None else self.kv_heads) * self.head_width

    @property
    def moe_layers(self) -> int:
        """Blocks whose feed-forward layer is a mixture of experts."""
        return 0 if self.moe is None else self.layers - self.moe.dense_layers

    # ---- parameters ----

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return (2 if self.norm == "layernorm" else 1) * self.hidden

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention layer, its norm not counted."""
        projections = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        biases = self.qkv_bias * (self.query_width + 2 * self.kv_width)
        return projections + biases + self.out_bias * self.hidden

    def ffn_parameters(self, width: int) -> int:
        """Parameters of one feed-forward layer of a width, its norm not counted."""
        inward = 2 if self.gated else 1
        biases = self.ffn_bias * (inward * width + self.hidden)
        return (inward + 1) * self.hidden * width + biases

    @property
    def moe_parameters(self) -> int:
        """Parameters of one mixture of experts with its router; 0 in a dense model."""
        if self.moe is None:
            return 0
        experts = self.moe.experts + self.moe.shared_experts
        router = self.hidden * self.moe.experts
        return router + experts * self.ffn_parameters(self.moe.expert_ffn)

    def parameters_by_part(self) -> dict[str, int]:
        """Parameters of each part of the model, all layers of a kind together.

        Examples
        --------
        >>> from phaze_fast import models
        >>> parts = models.load("gpt2").parameters_by_part()
        >>> parts["embedding"], parts["feed-forward"]
        (82049600, 983424000)
        """
        blocks = self.layers + self.encoder_layers
        cross = self.layers if self.encoder_layers else 0
        stacks = 2 if self.encoder_layers else 1
        block_norms = 2 * blocks + cross
        parts = {
            "embedding": self._embedding_parameters(),
            "attention": (blocks + cross) * self.attention_parameters,
            "feed-forward": (blocks - self.moe_layers) * self.ffn_parameters(self.ffn),
            "experts": self.moe_layers * self.moe_parameters,
            "norms": (block_norms + stacks * self.final_norm) * self.norm_parameters,
            "relative positions": stacks * (self.relative_buckets or 0) * self.heads,
            "head": self._head_parameters(),
        }
        return {part: count for part, count in parts.items() if count}

    def _embedding_parameters(self) -> int:
        rows = self.vocab + (self.max_positions or 0) + self.token_types
        total = rows * self.hidden + self.embedding_norm * self.norm_parameters
        if self.patches is not None:
            pixels = self.patches.size**2 * self.patches.channels
            total += (pixels + 1 + self.patches.class_token) * self.hidden
        return total

    def _head_parameters(self) -> int:
        if self.head == "classifier":
            return (self.hidden + 1) * self.classes
        logits = 0 if self.tied_embeddings or self.head == "none" else self.vocab * self.hidden
        if self.head == "mlm":  # dense, norm, and a bias per token
            logits += self.hidden * (self.hidden + 1) + self.norm_parameters + self.vocab
        return logits

    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(self.parameters_by_part().values())

    def active_parameters(self) -> int:
        """Parameters that one token visits: all of them but for experts it is not sent to.

        Examples
        --------
        >>> from phaze_fast import models
        >>> round(models.load("mixtral-8x7b").active_parameters() / 1e9, 1)
        12.9
        """
        if self.moe is None:
            return self.parameters()
        idle = self.moe.experts - self.moe.top_k
        return self.parameters() - self.moe_layers * idle * self.ffn_parameters(self.moe.expert_ffn)

    def __str__(self) -> str:
        count = self.parameters() / 1e9
        stacks = f"{self.encoder_layers} + {self.layers}" if self.encoder_layers else self.layers
        return (
            f"{self.name}: {count:.4g} B parameters, {stacks} layers of {self.hidden}, "
            f"{self.heads} heads, sequence {self.seq}"
        )
