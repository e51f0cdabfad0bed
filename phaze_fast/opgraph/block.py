"""The operators of a transformer's layers on one device: embedding, blocks and head.

A block is split as Megatron-LM does it: QKV and the first feed-forward projection by columns, the
output projections by rows, heads over devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.attention import attend
from phaze_fast.opgraph.builder import (
    ELEMENT_BYTES,
    FLOAT_BYTES,
    BlockBuilder,
    LayerBuilder,
    vector_spec,
)
from phaze_fast.opgraph.feed_forward import experts, experts_of_rows, feed_forward
from phaze_fast.opgraph.strategy import Strategy, shapes


@lru_cache(maxsize=256)
def block_kinds(model: TransformerModel, seq: int) -> tuple[str, ...]:
    """Kind of every block of a decoder or encoder, in order.

    Examples
    --------
    >>> from phaze_fast import models
    >>> set(block_kinds(models.load("mixtral-8x7b"), 4096))
    {'moe-block'}
    """
    return tuple(
        "window-" * model.is_windowed(layer, seq) + "moe-" * model.has_experts(layer) + "block"
        for layer in range(model.layers)
    )


def _sublayer(
    block: BlockBuilder, name: str, skip: int, write: Callable[[int], int], region: bool = True
) -> int:
    """Wrap attention or feed-forward in its norms and residual.

    With `region` a tensor-parallel region surrounds the sub-layer; else `write` creates its own.
    """
    position = block.model.norm_position
    x = block.norm(f"{name}-norm", skip) if position in ("pre", "sandwich") else skip
    block.keep_input(name, x, routed=name == "ffn" and block.kind.endswith("moe-block"))
    x = block.leave(name, write(block.enter(name, x))) if region else write(x)
    if position in ("output", "sandwich"):
        x = block.norm(f"{name}-output-norm", x)
    x = block.add_residual(name, x, skip)
    return block.norm(f"{name}-norm", x) if position == "post" else x


def _parallel(block: BlockBuilder, body: Callable[[int], int]) -> int:
    """Add attention and feed-forward in parallel; devices sum both in one collective."""
    x = block.norm("attention-norm", -1)
    block.keep_input("attention", x)
    attended = block.enter("attention", x)
    inner = attended
    if block.model.parallel == "two-norms":
        y = block.norm("ffn-norm", -1)
        block.keep_input("ffn", y)
        inner = block.enter("ffn", y)
    left, right = attend(block, "", attended, attended, block.causal), body(inner)
    rows, hidden = block.shapes.rows, block.model.hidden
    both = block.vector("parallel-sum", "residual", (left, right), rows, hidden, reads=2)
    return block.add_residual("ffn", block.leave("ffn", both), -1)


def block_builder(model: TransformerModel, strategy: Strategy, kind: str = "block") -> LayerBuilder:
    """Build one block of a model as one device runs it.

    Parameters
    ----------
    model, strategy
        The model to train, and how a layer is split.
    kind
        One of `block_kinds`, ``encoder-block`` or ``decoder-block``.

    Raises
    ------
    InfeasibleError
        Where the strategy breaks a rule of divisibility.
    """
    block = BlockBuilder(model, strategy, kind)

    def body(x: int) -> int:
        return experts(block, x) if kind.endswith("moe-block") else feed_forward(block, x)

    if model.parallel != "no":
        _parallel(block, body)
        return block
    x = _sublayer(
        block, "attention", -1, lambda inner: attend(block, "", inner, inner, block.causal)
    )
    if kind == "decoder-block":
        memory = -1  # the encoder's output enters the layer as the block's own input does
        size = ELEMENT_BYTES * block.shapes.rows * model.hidden
        block.keep("memory", size, -1, by=("k", "v", "qkv"))
        x = _sublayer(
            block, "cross", x, lambda inner: attend(block, "cross-", inner, memory, False)
        )
    if kind.endswith("moe-block") and strategy.own_rows:
        _sublayer(block, "ffn", x, lambda inner: experts_of_rows(block, inner), region=False)
    else:
        _sublayer(block, "ffn", x, body)
    return block


written_block = lru_cache(maxsize=16)(block_builder)
"""Cached `block_builder`, for callers that do not change the result."""


# ---- embedding and head ----


def embedding_builder(model: TransformerModel, strategy: Strategy) -> LayerBuilder:
    """Build the embedding: table look-ups or patches, their sum, norm and dropout.

    A vocabulary is split over tensor-parallel devices, whose parts are summed.
    """
    s = shapes(model, strategy)
    builder = LayerBuilder(f"{model.name}/embedding", lora=model.lora)
    hidden, t = model.hidden, strategy.tp
    payload = ELEMENT_BYTES * s.rows * hidden
    if model.patches is not None:
        pixels = model.patches.size**2 * model.patches.channels
        # The class token is not a patch; with split rows, only some devices have one.
        cut = s.rows
        if model.patches.class_token and strategy.cp == 1:
            cut = max(s.rows - strategy.micro_batch, 1)
        builder.keep("pixels", ELEMENT_BYTES * cut * pixels, -1)
        x = builder.linear("patch", -1, cut, pixels, hidden, bias=True, of_data=True)
    else:
        builder.keep("token-ids", 8 * s.rows, -1, statistic=True)
        size = ELEMENT_BYTES * s.rows * hidden
        if model.one_hot_embedding:  # one-hot vectors are generated while the product reads them
            x = builder.linear("look-up", -1, s.rows, s.vocab, hidden, bias=False, of_data=True)
        else:
            tables = 1 + (model.positions == "learned") + bool(model.token_types)
            read = 8 * s.rows + tables * size
            x = builder.vector("look-up", "embedding", (-1,), s.rows, hidden, read_bytes=read)
        if t > 1:
            op = "reduce-scatter" if strategy.sequence_parallel else "all-reduce"
            back = ("all-gather", payload, "tensor") if strategy.sequence_parallel else None
            x = builder.network("embedding-sum", x, (op, payload, "tensor"), back)
    rows = s.split_rows
    if model.embedding_norm:
        builder.keep("embedding-norm-input", ELEMENT_BYTES * rows * hidden, x)
        x = builder.vector("embedding-norm", "norm", (x,), rows, hidden, function=model.norm)
    if model.dropout:
        x = builder.vector("embedding-dropout", "dropout", (x,), rows, hidden)
        builder.keep("embedding-dropout-mask", rows * hidden, x)
    if model.lora is not None:
        builder.kept.clear()  # nothing before the blocks is trained
    return builder


def head_builder(model: TransformerModel, strategy: Strategy) -> LayerBuilder:
    """Build what follows the blocks: final norm, logits, cross-entropy.

    Logits are split over the vocabulary; their fp32 values are stored for the backward pass
    (Korthikanti et al. 2022, section 4.3: 4sbh (1 + v/h) for the head, all of it divided by t with
    sequence parallelism). Layers that predict further tokens (multi-token prediction) are part of
    the head: they share the logits' weights and run on the last stage.
    """
    builder = LayerBuilder(f"{model.name}/head", lora=model.lora)
    _predict(builder, -1, model, strategy)
    x = -1
    for depth in range(model.mtp_layers):
        prefix = f"mtp-{depth + 1}-"
        x = builder.follow(_further_token(model, strategy), x, prefix)
        _predict(builder, x, model, strategy, prefix)
    return builder


def _further_token(model: TransformerModel, strategy: Strategy) -> LayerBuilder:
    """Build the layers that predict one more token (DeepSeek-AI 2024, DeepSeek-V3, section 2.2).

    The hidden states and the embeddings of the next tokens are normalised, joined and projected;
    a block like the last one follows. Sequence parallelism splits the rows, not the projection.
    """
    s, hidden = shapes(model, strategy), model.hidden
    rows, size = s.split_rows, ELEMENT_BYTES * s.split_rows * hidden
    builder = LayerBuilder(f"{model.name}/mtp")
    read = 8 * rows + size
    token = builder.vector("look-up", "embedding", (-1,), rows, hidden, read_bytes=read)
    normed = []
    for name, x in (("hidden", -1), ("token", token)):
        builder.keep(f"{name}-norm-input", size, x)
        normed.append(
            builder.vector(f"{name}-norm", "norm", (x,), rows, hidden, function=model.norm)
        )
    both = builder.vector("join", "multiply", tuple(normed), rows, 2 * hidden, function="copy")
    builder.keep("projection-input", 2 * size, both, operand="only")
    x = builder.linear("projection", both, rows, 2 * hidden, hidden, bias=False)
    kind = block_kinds(model, strategy.seq or model.seq)[-1]
    builder.follow(written_block(model, strategy, kind), x, "")
    return builder


def _predict(
    builder: LayerBuilder, x: int, model: TransformerModel, strategy: Strategy, prefix: str = ""
) -> None:
    """Add final norm, logits and cross-entropy of the rows that operator `x` computes."""
    s = shapes(model, strategy)
    hidden, t, rows = model.hidden, strategy.tp, s.split_rows
    size = ELEMENT_BYTES * rows * hidden
    if model.final_norm:
        normed = builder.vector(
            f"{prefix}final-norm", "norm", (x,), rows, hidden, function=model.norm
        )
        builder.keep(f"{prefix}final-norm-input", size, x)
        x = normed
    if model.head == "mlm":
        builder.keep("transform-input", size, x, by=())
        x = builder.linear("transform", x, rows, hidden, hidden, bias=True)
        builder.keep("transform-output", size, x)
        x = builder.vector(
            "transform-activation", "activation", (x,), rows, hidden, function=model.activation
        )
        builder.keep("transform-norm-input", size, x)
        x = builder.vector("transform-norm", "norm", (x,), rows, hidden, function=model.norm)
    if model.head == "none":
        return
    builder.keep(f"{prefix}logits-input", size, x, by=())
    if t > 1:
        payload = ELEMENT_BYTES * s.rows * hidden
        if strategy.sequence_parallel:
            x = builder.gather(f"{prefix}logits", x, payload, "tensor")
        else:
            x = builder.network(f"{prefix}logits-enter", x, None, ("all-reduce", payload, "tensor"))
    if model.head == "classifier":
        width, tokens = model.classes, strategy.micro_batch
    else:
        width, tokens = s.vocab, s.rows
    biased = model.head_bias if model.head == "lm" else True
    logits = builder.linear(f"{prefix}logits", x, tokens, hidden, width, bias=biased)
    if model.logit_cap:
        logits = builder.vector(f"{prefix}logit-cap", "activation", (logits,), tokens, width)
        builder.keep(f"{prefix}capped-logits", ELEMENT_BYTES * tokens * width, logits)
    if model.loss_passes:  # forward passes over the logits; the gradient adds the backward ones
        moved = FLOAT_BYTES * tokens * width * model.loss_passes / 4.0
        half = moved / 2.0
        logits = builder.add(
            vector_spec(f"{prefix}logits-passes", "multiply", (logits,), tokens, width, half, half)
        )
    loss = builder.vector(f"{prefix}cross-entropy", "cross-entropy", (logits,), tokens, width)
    builder.keep(f"{prefix}logits", model.logit_bytes * tokens * width, loss)
    if t > 1 and model.head != "classifier":
        sums = 3 * FLOAT_BYTES * tokens  # maximum, target and sum of each row
        builder.network(f"{prefix}loss-reduce", loss, ("all-reduce", sums, "tensor"), None)
