"""Transformers as validated records, and their parameters by part.

One record covers encoders, decoders and encoder-decoders, dense and mixture-of-experts. `from_hf`
refuses features that no field describes, by name.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from phaze_fast.documents import package_data
from phaze_fast.errors import not_accepted
from phaze_fast.models.lora import Lora
from phaze_fast.records import Count, FrozenDict, Quantity, Record, Side

MOST_BLOCKS = 4094
"""Most blocks of a model: plans have at most 4,096 layers, the embedding and the head included."""

Blocks = Annotated[int, Field(strict=True, ge=1, le=MOST_BLOCKS)]
"""Number of blocks of a model."""

_Any = Annotated[int, Field(strict=True, ge=0)]


class MixtureOfExperts(Record):
    """A mixture of experts: each token visits a few of several feed-forward networks."""

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
    """Width of the shared experts together; by default `shared_experts` times `expert_ffn`."""
    shared_gate: bool = False
    """Whether the output of the shared experts is scaled by a gate per token."""
    router_bias: bool = False
    """Whether the router has a bias."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How the router scores experts; like the next five fields it changes no operator's size."""
    scores_normalised: bool = True
    """Whether the scores of a token's experts are scaled to a sum of one."""
    scores_factor: Annotated[Quantity, Field(gt=0)] = 1.0
    """Factor on the scores of a token's experts."""
    balancing_bias: bool = False
    """Whether experts are chosen by score plus a bias that evens out their load (DeepSeek-V3)."""
    groups: Count | None = None
    """Groups of experts of which a token first chooses `top_groups`; none = no groups."""
    top_groups: Count | None = None
    """Groups that a token chooses its experts from."""
    capacity_factor: Annotated[Quantity, Field(gt=0)] | None = None
    """Capacity of an expert in tokens, relative to the even share; none = no limit."""
    dense_layers: _Any = 0
    """Number of leading layers with the dense feed-forward of width `ffn`."""
    dense_at: tuple[_Any, ...] = ()
    """Further layers with the dense feed-forward, by position from 0."""
    moves: Annotated[int, Field(strict=True, ge=0, le=2)] = 0
    """Number of separate kernels that reorder rows before the experts: by target device (1), and
    also by expert on arrival (2); each is undone after the experts."""
    tile_rows: Annotated[int, Field(strict=True, ge=0, le=1048576)] = 0
    """Rows of a tile of the grouped products: a tile with rows of two experts is computed for both,
    so that each expert computes about one tile more than it has rows for; 0: no more than these."""
    sent_once: bool = False
    """Whether a token is sent once per node, or once per device within its own node, for all of its
    experts there; else once per expert."""
    bias_unfused: bool = False
    """Whether kernels of their own add the biases of the experts' second products, one expert at a
    time, rather than these products."""

    balance: Literal["auxiliary-loss", "bias"] = "auxiliary-loss"
    """What keeps the load of experts even: a term of the loss, or a bias of each expert's score
    that follows its load (DeepSeek-V3)."""

    def busiest_load(self, devices: int) -> float:
        """Return the tokens of the busiest of some expert-parallel devices over their mean.

        The busiest expert exceeds the mean as published runs of routers with this `balance` say
        (data/routing.yaml). Loads of experts are taken as independent: the mean of n of them
        deviates 1 / sqrt(n) as much, and the largest of m such means grows as sqrt(log m). With a
        capacity all devices have equally many tokens.

        Examples
        --------
        >>> moe = MixtureOfExperts(experts=64, top_k=6, expert_ffn=1408)
        >>> [round(moe.busiest_load(n), 3) for n in (1, 8, 64)]
        [1.0, 1.13, 1.52]
        """
        if devices == 1 or self.capacity_factor is not None:
            return 1.0
        per_device = self.experts / devices
        largest = math.log(devices) / (per_device * math.log(self.experts))
        published = package_data(__package__, "routing.yaml")[self.balance]
        return 1.0 + float(published["max_violation"]) * math.sqrt(largest)

    @property
    def shared_width(self) -> int:
        """Width of the shared experts together; 0 if there are none."""
        return self.shared_ffn or self.shared_experts * self.expert_ffn

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k: {self.top_k} is not accepted; there are {self.experts} experts"
            )
        return self


class LatentAttention(Record):
    """Multi-head latent attention: keys and values are projected from one latent vector per token.

    DeepSeek-AI 2024 (DeepSeek-V2), section 2.1. Rotary embedding applies to a part of each
    query and to one key that all heads share.
    """

    what: ClassVar[str] = "latent"
    query_rank: Side | None = None
    """Width of the vector that queries are made from; none = from the residual stream."""
    kv_rank: Side
    """Width of the vector that keys and values are made from."""
    plain_width: Side
    """Width of the part of a head's queries and keys that is not rotated."""
    rotary_width: Side
    """Width of the rotated part; its key is shared by all heads."""
    value_width: Side
    """Width of a head's values."""

    @property
    def query_width(self) -> int:
        """Width of one head's queries and keys."""
        return self.plain_width + self.rotary_width


class RotaryEmbedding(Record):
    """The angles of a rotary embedding, which change no operator's size."""

    what: ClassVar[str] = "rotary"
    base: Annotated[Quantity, Field(gt=0)] = 10000.0
    """Base of the angles (theta)."""
    share: Annotated[Quantity, Field(gt=0, le=1)] = 1.0
    """Share of a head's width that is rotated."""
    scaling: str = "none"
    """How angles are stretched for long sequences: none, linear, llama3, yarn and others."""
    factor: Annotated[Quantity, Field(gt=0)] = 1.0
    """Factor by which the angles are stretched."""
    original_positions: Count | None = None
    """Number of positions before the angles are stretched."""


class Patches(Record):
    """An image cut into square patches, in place of a vocabulary."""

    what: ClassVar[str] = "patches"
    size: Side
    """Pixels along a side of a patch."""
    channels: Side = 3
    """Colour channels of a pixel."""
    class_token: bool = True
    """Whether a learned class token precedes the patches."""


class Module(Record):
    """The module of transformers that runs a model, where its operators depend on more than sizes.

    Software profiles with fused kernels ignore it.
    """

    what: ClassVar[str] = "module"
    family: str = Field(min_length=1)
    """``model_type`` of the module's configuration."""
    activation: str = "gelu"
    """Name of the activation in the configuration, such as ``gelu_new``."""
    dropouts: tuple[str, ...] = ()
    """Fields of the configuration that turn a dropout on."""
    rotary_width: _Any = 0
    """Width of the rotated part of a head; 0 = all of it."""
    unrotated: tuple[_Any, ...] = ()
    """Layers, by position from 0, whose queries and keys are not rotated."""
    settings: FrozenDict[str, bool | int | str] = FrozenDict()
    """Other fields of the configuration on which the module's operators depend."""


Activation = Literal["gelu", "relu", "silu"]
"""Non-linearities of the feed-forward layer; variants that cost the same share a name."""


class TransformerModel(Record):
    """A transformer, with the fields that operator graphs need.

    Examples
    --------
    >>> from phaze_fast import models
    >>> model = models.load("llama2-7b")
    >>> model.parameters()
    6738415616
    """

    what: ClassVar[str] = "model"
    name: str = Field(min_length=1)
    """Name of the model."""
    layers: Blocks
    """Number of blocks; for an encoder-decoder, those of the decoder."""
    hidden: Side
    """Width of the residual stream."""
    heads: Side
    """Number of query heads."""
    kv_heads: Side | None = None
    """Key and value heads; fewer than `heads` is grouped-query, one is multi-query attention."""
    head_dim: Side | None = None
    """Width of a head; by default hidden / heads."""
    ffn: Side
    """Width of the feed-forward layer."""
    vocab: Annotated[int, Field(strict=True, ge=0)]
    """Rows of the token embedding as allocated, padding included; 0 if there is none."""
    seq: Count
    """Default sequence length of a step."""
    causal: bool = True
    """Whether a token attends only to earlier tokens (in the decoder of an encoder-decoder)."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of the norms."""
    norm_bias: bool = True
    """Whether a layernorm has a bias; an RMS norm has none."""
    norm_gain: bool = True
    """Whether norms have parameters at all."""
    norm_position: Literal["pre", "post", "output", "sandwich"] = "pre"
    """Position of the norms: before each sub-layer; after its residual sum as in BERT; on its
    output before the sum as in OLMo 2; or before it and on its output as in Gemma 2."""
    parallel: Literal["no", "one-norm", "two-norms"] = "no"
    """Whether attention and feed-forward read the same input in parallel, as in GPT-NeoX, and
    whether each has a norm of its own."""
    final_norm: bool = True
    """Whether a norm follows the last block (of each stack)."""
    activation: Activation = "gelu"
    """Non-linearity of the feed-forward layer."""
    gated: bool = False
    """Whether a second projection gates the first, as in SwiGLU."""
    fused_gate: bool = False
    """Whether one projection computes both the gate and the gated values, as in Phi-3."""
    positions: Literal["learned", "rotary", "relative", "alibi", "none"] = "learned"
    """Position encoding."""
    rotary: RotaryEmbedding | None = None
    """Angles of the rotary embedding; none = the defaults of `RotaryEmbedding`."""
    max_positions: Count | None = None
    """Rows of the learned position table as allocated."""
    relative_buckets: Count | None = None
    """Rows of the table of relative biases, of which each stack has one, with a column per head."""
    token_types: Annotated[int, Field(strict=True, ge=0)] = 0
    """Rows of the segment embedding."""
    embedding_norm: bool = False
    """Whether a norm follows the embeddings."""
    patches: Patches | None = None
    """How an image becomes tokens; absent in language models."""
    qkv_bias: bool = True
    """Whether the query, key and value projections have a bias."""
    out_bias: bool = True
    """Whether the attention's output projection has a bias."""
    ffn_bias: bool = True
    """Whether the feed-forward projections have a bias."""
    qk_norm: Literal["no", "head", "width"] = "no"
    """Norms of queries and keys: one gain for all heads, or one as wide as all heads together."""
    sinks: bool = False
    """Whether each head has a learned attention sink (a score without a key), as in gpt-oss."""
    window: Count | None = None
    """Number of tokens a token attends to, itself included; none = all before it."""
    full_attention_layers: tuple[Annotated[int, Field(strict=True, ge=0)], ...] = ()
    """Layers, by position from 0, that attend to all tokens in spite of the window."""
    latent: LatentAttention | None = None
    """Latent attention in place of `kv_heads` and `head_dim`; absent in most models."""
    score_cap: bool = False
    """Whether scores are soft-capped by a tanh, as in Gemma 2."""
    logit_cap: bool = False
    """Whether logits are soft-capped by a tanh."""
    dropout: bool = False
    """Whether training uses dropout, so that masks are stored for the backward pass."""
    attention: Literal["flash", "eager"] = "flash"
    """Fused attention, or explicit softmax(QK^T)V that stores its scores."""
    attention_block: Count = 1
    """Block size of fused attention in queries and keys; a block that a window masks in part is
    computed in full."""
    added_gradient_bytes: Annotated[int, Field(strict=True, ge=0, le=64)] = 0
    """Bytes moved per parameter in every backward pass to add its gradient to those of earlier
    micro-batches, by separate kernels."""
    gradient_sums: Literal["free", "fused", "kernels"] = "free"
    """How gradients of one tensor from several operators are added up: by separate kernels, in the
    kernel that reads the sum, or at no cost."""
    copied_bytes: tuple[Quantity, Quantity] = (0.0, 0.0)
    """Bytes moved per parameter in a forward and in a backward pass to copy gathered weights into
    place, and gradients before they are reduced over replicas."""
    one_hot_embedding: bool = False
    """Whether rows of the embedding are looked up by a product with one-hot vectors."""
    gathers_copied: bool = False
    """Whether tensors that tensor-parallel devices gather, or reduce and scatter, along sequences
    are copied once for the collective."""
    softmax_multiple: Count = 1
    """Number of (sequence, head) pairs per block of explicit attention's fused softmax; if a
    device's pairs are not a multiple of it, softmax is computed operator by operator in fp32."""
    fused_qkv: bool = False
    """Whether one projection computes queries, keys and values together."""
    kv_expanded: bool = False
    """Whether keys and values are first copied to every query head, as PyTorch's attention does
    unless it knows that heads are grouped; it affects the stored tensors."""
    fused_activation: bool = False
    """Whether a gated activation is one kernel, which stores its inputs and no intermediate
    results."""
    loss_passes: Annotated[int, Field(strict=True, ge=0, le=1000)] = 0
    """Number of passes over the fp32 logits in memory by a loss that is not one fused kernel,
    forward and backward together; 0 = fused, on bf16 logits."""
    logit_bytes: Annotated[int, Field(strict=True, ge=1, le=64)] = 4
    """Peak bytes per logit while the loss is computed, copies and gradients included."""
    moe: MixtureOfExperts | None = None
    """Mixture of experts; absent in dense models."""
    lora: Lora | None = None
    """Adapters on frozen weights; absent if all parameters are trained."""
    encoder_layers: Annotated[int, Field(strict=True, ge=0, le=MOST_BLOCKS)] = 0
    """Blocks of the encoder; the decoder then attends to its output as well."""
    mtp_layers: Annotated[int, Field(strict=True, ge=0, le=64)] = 0
    """Further tokens that each token predicts (multi-token prediction, DeepSeek-V3): each by a
    projection of hidden states and embeddings, a block like the last one, and the shared head."""
    head: Literal["lm", "mlm", "classifier", "none"] = "lm"
    """Layers after the blocks: next-token logits, BERT's transform and logits, or a classifier."""
    classes: Annotated[int, Field(strict=True, ge=0)] = 0
    """Outputs of a classifier."""
    head_bias: bool = False
    """Whether next-token logits have a bias."""
    tied_embeddings: bool = True
    """Whether the logits use the token embedding's weights."""
    module: Module | None = None
    """The module of transformers that the model was read from, if any."""
    published_parameters: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Published parameter count, if any; unpublished digits are zero."""
    published_digits: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Number of published leading digits of `published_parameters`; none = all."""
    sources: tuple[str, ...] = ()
    """Where the figures come from."""
    notes: str = ""
    """Remarks on the figures."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers + self.encoder_layers > MOST_BLOCKS:
            raise ValueError(
                f"encoder_layers: {self.encoder_layers} and {self.layers} layers are not accepted; "
                f"expected {MOST_BLOCKS} or fewer together"
            )
        if self.head_dim is None and self.hidden % self.heads:
            raise not_accepted(
                "heads", self.heads, f"a divisor of hidden {self.hidden}, or head_dim"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise not_accepted("kv_heads", self.kv_heads, f"a divisor of heads {self.heads}")
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
        if self.moe is not None and self.moe_layers == 0:
            raise ValueError(
                f"moe.dense_layers: {self.moe.dense_layers} is not accepted; "
                f"there are {self.layers} layers"
            )
        if self.encoder_layers and (self.window or self.latent or self.parallel != "no"):
            raise ValueError(
                "encoder_layers: is not accepted with a window, latent attention or parallel blocks"
            )
        if self.mtp_layers and (self.encoder_layers or self.lora or self.head != "lm"):
            raise ValueError(
                "mtp_layers: is not accepted with an encoder, adapters or another head"
            )
        known = {**self.attention_shapes, **self.ffn_shapes(1), "experts": ()}
        for target in () if self.lora is None else self.lora.targets:
            if target not in known or (target == "experts" and self.moe is None):
                raise not_accepted("lora: targets", target, f"some of {', '.join(known)}")
        return self

    def with_lora(self, lora: Lora) -> Self:
        """Return the model with adapters on its frozen weights.

        Raises
        ------
        InvalidInputError
            Where the model has no such projection, or only as a part of a fused one.

        Examples
        --------
        >>> from phaze_fast import models
        >>> model = models.load("llama2-7b").with_lora(Lora(rank=16))
        >>> model.trained_parameters(), model.parameters()
        (39976960, 6778392576)
        """
        fused = {"qkv": self.fused_qkv and not self.latent, "gate-up": self.fused_gate}
        parts = {"qkv": ("q", "k", "v"), "gate-up": ("up", "gate")}
        absent = {name for whole, is_fused in fused.items() for name in parts[whole] if is_fused}
        absent |= {whole for whole, is_fused in fused.items() if not is_fused}
        dense = self.moe is None or self.moe_layers < self.layers or self.moe.shared_width > 0
        names = [*self.attention_shapes, *(self.ffn_shapes(1) if dense else ())]
        names += ["experts"] if self.moe is not None else []
        known = [name for name in names if name not in absent]
        whole_names = [whole for whole, is_fused in fused.items() if is_fused]
        return self.replace(lora=lora.resolved(known, whole_names))

    # ---- widths ----

    @property
    def head_width(self) -> int:
        """Width of one head; for latent attention, the mean of the widths of keys and values."""
        if self.latent is not None:
            return (self.latent.query_width + self.latent.value_width) // 2
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
    def widest_split(self) -> int:
        """Largest tensor-parallel width: the number of heads."""
        return self.heads

    # ---- layers ----

    @property
    def sample(self) -> str:
        """What one sample is: an image if the model cuts it into patches, else a sequence."""
        return "sequence" if self.patches is None else "image"

    @property
    def blocks(self) -> int:
        """Number of layers that are neither the embedding nor the head."""
        return self.layers + self.encoder_layers

    def is_windowed(self, layer: int, seq: int) -> bool:
        """Whether a layer, from 0, has a window shorter than a sequence of `seq` tokens."""
        reaches = self.window is None or self.window >= seq
        return not reaches and layer not in self.full_attention_layers

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of a layer, from 0, is a mixture of experts."""
        if self.moe is None:
            return False
        return layer >= self.moe.dense_layers and layer not in self.moe.dense_at

    @property
    def moe_layers(self) -> int:
        """Blocks whose feed-forward layer is a mixture of experts."""
        if self.moe is None:
            return 0
        first = min(self.moe.dense_layers, self.layers)
        return self.layers - first - len({n for n in self.moe.dense_at if first <= n < self.layers})

    # ---- parameters ----

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        if not self.norm_gain:
            return 0
        return (2 if self.norm == "layernorm" and self.norm_bias else 1) * self.hidden

    @property
    def block_norms(self) -> int:
        """Number of norms of one block, without those of a decoder's cross-attention."""
        if self.parallel != "no":
            return 1 if self.parallel == "one-norm" else 2
        return 4 if self.norm_position == "sandwich" else 2

    @property
    def attention_shapes(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the projections of one attention layer, by name."""
        hidden, latent = self.hidden, self.latent
        if latent is None:
            query, kv = self.query_width, self.kv_width
            whole = query + 2 * kv
            kinds = {"q": query, "k": kv, "v": kv, "qkv": whole}
            return {
                **{name: (hidden, width) for name, width in kinds.items()},
                "o": (query, hidden),
            }
        queries, values = self.heads * latent.query_width, self.heads * latent.value_width
        shapes = {"q": (hidden, queries)}
        if latent.query_rank is not None:
            shapes = {"q-down": (hidden, latent.query_rank), "q-up": (latent.query_rank, queries)}
        return {
            **shapes,
            "kv-down": (hidden, latent.kv_rank + latent.rotary_width),
            "kv-up": (latent.kv_rank, self.heads * latent.plain_width + values),
            "o": (values, hidden),
        }

    def ffn_shapes(self, width: int) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of the projections of a feed-forward layer, by name."""
        shapes = {"up": (self.hidden, width), "down": (width, self.hidden)}
        if self.gated:
            shapes |= {"gate": (self.hidden, width), "gate-up": (self.hidden, 2 * width)}
        return shapes

    def adapter_parameters(self, shapes: dict[str, tuple[int, int]]) -> int:
        """Parameters of the adapters of projections given by name; 0 without LoRA."""
        if self.lora is None:
            return 0
        targets = self.lora.targets
        return self.lora.parameters(shapes[name] for name in targets if name in shapes)

    def expert_adapters(self, width: int) -> int:
        """Parameters of the adapters of one routed expert of a width."""
        if self.lora is None or "experts" not in self.lora.targets:
            return 0
        shapes = self.ffn_shapes(width)
        shapes.pop("gate-up", None)
        return self.lora.parameters(shapes.values())

    def _adapters(self) -> int:
        blocks, cross = self.layers + self.encoder_layers, self.layers * bool(self.encoder_layers)
        total = (blocks + cross) * self.adapter_parameters(self.attention_shapes)
        total += (blocks - self.moe_layers) * self.adapter_parameters(self.ffn_shapes(self.ffn))
        moe = self.moe
        if moe is not None:
            own = moe.experts * self.expert_adapters(moe.expert_ffn)
            if moe.shared_width:
                own += self.adapter_parameters(self.ffn_shapes(moe.shared_width))
            total += self.moe_layers * own
        return total

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of one attention layer."""
        shapes = self.attention_shapes
        return sum(ins * outs for name, (ins, outs) in shapes.items() if name != "qkv")

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention layer, its norm not counted."""
        total = self.attention_weights + self.out_bias * self.hidden + self.sinks * self.heads
        latent = self.latent
        if latent is None:
            biases = self.qkv_bias * (self.query_width + 2 * self.kv_width)
            return total + biases + self.qk_norm_parameters
        rank = latent.query_rank or 0  # latent vectors have a norm, their projections a bias
        total += latent.kv_rank + rank
        return total + self.qkv_bias * (latent.kv_rank + latent.rotary_width + rank)

    @property
    def qk_norm_parameters(self) -> int:
        """Parameters of the norms of queries and keys."""
        gains = {"no": 0, "head": 2 * self.head_width, "width": self.query_width + self.kv_width}
        return gains[self.qk_norm]

    def ffn_weights(self, width: int) -> int:
        """Elements of the matrices of one feed-forward layer of a width."""
        return (3 if self.gated else 2) * self.hidden * width

    def ffn_parameters(self, width: int) -> int:
        """Parameters of one feed-forward layer of a width, its norm not counted."""
        inward = 2 if self.gated else 1
        return self.ffn_weights(width) + self.ffn_bias * (inward * width + self.hidden)

    @property
    def moe_parameters(self) -> int:
        """Parameters of one mixture of experts with its router; 0 in a dense model."""
        if self.moe is None:
            return 0
        router = (self.hidden + self.moe.router_bias) * self.moe.experts
        routed = self.moe.experts * self.ffn_parameters(self.moe.expert_ffn)
        return router + routed + self.shared_parameters

    @property
    def shared_parameters(self) -> int:
        """Parameters of the shared experts of a mixture, their gate included."""
        if self.moe is None or not self.moe.shared_width:
            return 0
        return self.ffn_parameters(self.moe.shared_width) + self.moe.shared_gate * self.hidden

    def mtp_parameters(self, blocks: int = 1) -> int:
        """Parameters of one prediction of a further token: projection, three norms and a block."""
        own = 2 * self.hidden**2 + (2 + self.final_norm) * self.norm_parameters
        inner = self.moe_parameters if self.has_experts(self.layers - 1) else 0
        inner = inner or self.ffn_parameters(self.ffn)
        norms = self.block_norms * self.norm_parameters
        return own + blocks * (self.attention_parameters + inner + norms)

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
        block_norms = self.block_norms * blocks + cross
        parts = {
            "embedding": self._embedding_parameters(),
            "attention": (blocks + cross) * self.attention_parameters,
            "feed-forward": (blocks - self.moe_layers) * self.ffn_parameters(self.ffn),
            "experts": self.moe_layers * self.moe_parameters,
            "norms": (block_norms + stacks * self.final_norm) * self.norm_parameters,
            "relative positions": stacks * (self.relative_buckets or 0) * self.heads,
            "further tokens": self.mtp_layers * self.mtp_parameters(),
            "head": self._head_parameters(),
            "adapters": self._adapters(),
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
        if self.head == "lm":
            logits += self.head_bias * self.vocab
        if self.head == "mlm":  # dense, norm, and a bias per token
            logits += self.hidden * (self.hidden + 1) + self.norm_parameters + self.vocab
        return logits

    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(self.parameters_by_part().values())

    def trained_parameters(self) -> int:
        """Parameters that have gradients and optimiser state: all, or the adapters."""
        return self.parameters() if self.lora is None else self._adapters()

    def active_parameters(self) -> int:
        """Return the parameters used by one token: all except the experts it is not routed to.

        Examples
        --------
        >>> from phaze_fast import models
        >>> round(models.load("mixtral-8x7b").active_parameters() / 1e9, 1)
        12.9
        """
        if self.moe is None:
            return self.parameters()
        idle = self.moe.experts - self.moe.top_k
        width = self.moe.expert_ffn
        each = self.ffn_parameters(width) + self.expert_adapters(width)
        layers = self.moe_layers + self.mtp_layers * self.has_experts(self.layers - 1)
        return self.parameters() - layers * idle * each

    def __str__(self) -> str:
        count = self.parameters() / 1e9
        stacks = f"{self.encoder_layers} + {self.layers}" if self.encoder_layers else self.layers
        return (
            f"{self.name}: {count:.4g} B parameters, {stacks} layers of {self.hidden}, "
            f"{self.heads} heads, sequence {self.seq}"
        )
