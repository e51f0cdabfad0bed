"""The operators of a transformer's layers on one device: embedding, blocks and head.

A block is split as Megatron-LM does it: QKV and the first feed-forward projection by columns, the
output projections by rows, heads over devices.
"""

from __future__ import annotations

from collections.abc import Callable

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.attention import attend
from phaze_fast.opgraph.builder import (
    ELEMENT_BYTES,
    FLOAT_BYTES,
    BlockBuilder,
    LayerBuilder,
    keep_norm_input,
    vector_spec,
)
from phaze_fast.opgraph.feed_forward import experts, experts_of_rows, feed_forward, own_experts
from phaze_fast.opgraph.strategy import Strategy, shapes


def block_kinds(model: TransformerModel, seq: int) -> list[str]:
    """Kind of every block of a decoder or encoder, in order.

    Examples
    --------
    >>> from phaze_fast import models
    >>> set(block_kinds(models.load("mixtral-8x7b"), 4096))
    {'moe-block'}
    """
    return [
        "window-" * model.is_windowed(layer, seq) + "moe-" * model.has_experts(layer) + "block"
        for layer in range(model.layers)
    ]


def _sublayer(
    block: BlockBuilder, name: str, skip: int, write: Callable[[int], int], region: bool = True
) -> int:
    """Wrap attention or feed-forward in its norms and residual.

    It is written inside a tensor-parallel region unless it sees to that itself.
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
    """Write one block of a model as one device runs it.

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
        memory = -1  # the encoder's output enters the layer as its input does
        block.keep("memory", ELEMENT_BYTES * block.shapes.rows * model.hidden, -1)
        x = _sublayer(
            block, "cross", x, lambda inner: attend(block, "cross-", inner, memory, False)
        )
    if kind.endswith("moe-block") and own_experts(block):
        _sublayer(block, "ffn", x, lambda inner: experts_of_rows(block, inner), region=False)
    else:
        _sublayer(block, "ffn", x, body)
    return block


# ---- embedding and head ----


def embedding_builder(model: TransformerModel, strategy: Strategy) -> LayerBuilder:
    """Write the embedding: table look-ups or patches, their sum, norm and dropout.

    A vocabulary is split over tensor-parallel devices, whose parts are summed.
    """
    s = shapes(model, strategy)
    builder = LayerBuilder(f"{model.name}/embedding")
    hidden, t = model.hidden, strategy.tp
    payload = float(ELEMENT_BYTES * s.rows * hidden)
    if model.patches is not None:
        pixels = model.patches.size**2 * model.patches.channels
        # A class token is no patch; of several devices that share rows, some have none.
        cut = s.rows
        if model.patches.class_token and strategy.cp == 1:
            cut = max(s.rows - strategy.micro_batch, 1)
        builder.keep("pixels", ELEMENT_BYTES * cut * pixels, -1)
        x = builder.linear("patch", -1, cut, pixels, hidden, bias=True, of_data=True)
    else:
        builder.keep("token-ids", 8 * s.rows, -1, statistic=True)
        size = ELEMENT_BYTES * s.rows * hidden
        if model.one_hot_embedding:  # the vectors are made as the product reads them
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
    return builder


def head_builder(model: TransformerModel, strategy: Strategy) -> LayerBuilder:
    """Write what follows the blocks: final norm, logits, cross-entropy.

    Logits are split over the vocabulary; their fp32 values are stored for the backward pass
    (Korthikanti et al. 2022, section 4.3: 4sbh (1 + v/h) for the head, all of it divided by t with
    sequence parallelism).
    """
    s = shapes(model, strategy)
    builder = LayerBuilder(f"{model.name}/head")
    hidden, t, rows = model.hidden, strategy.tp, s.split_rows
    size = ELEMENT_BYTES * rows * hidden
    x = -1
    if model.final_norm:
        normed = builder.vector("final-norm", "norm", (x,), rows, hidden, function=model.norm)
        keep_norm_input(builder, "final-norm", model, rows * hidden, x, normed)
        x = normed
    if model.head == "mlm":
        builder.keep("transform-input", size, x)
        x = builder.linear("transform", x, rows, hidden, hidden, bias=True)
        builder.keep("transform-output", size, x)
        x = builder.vector(
            "transform-activation", "activation", (x,), rows, hidden, function=model.activation
        )
        builder.keep("transform-norm-input", size, x)
        x = builder.vector("transform-norm", "norm", (x,), rows, hidden, function=model.norm)
    if model.head == "none":
        return builder
    builder.keep("logits-input", size, x)
    if t > 1:
        payload = float(ELEMENT_BYTES * s.rows * hidden)
        if strategy.sequence_parallel:
            x = builder.gather("logits", x, payload, "tensor")
        else:
            x = builder.network("logits-enter", x, None, ("all-reduce", payload, "tensor"))
    if model.head == "classifier":
        width, tokens = model.classes, strategy.micro_batch
    else:
        width, tokens = s.vocab, s.rows
    biased = model.head_bias if model.head == "lm" else True
    logits = builder.linear("logits", x, tokens, hidden, width, bias=biased)
    if model.logit_cap:
        logits = builder.vector("logit-cap", "activation", (logits,), tokens, width)
        builder.keep("capped-logits", ELEMENT_BYTES * tokens * width, logits)
    if model.loss_passes:  # half forward, half backward, which moves three times as much
        moved = FLOAT_BYTES * tokens * width * model.loss_passes / 4.0
        half = moved / 2.0
        logits = builder.add(
            vector_spec("logits-passes", "multiply", (logits,), tokens, width, half, half)
        )
    loss = builder.vector("cross-entropy", "cross-entropy", (logits,), tokens, width)
    builder.keep("logits", model.logit_bytes * tokens * width, loss)
    if t > 1 and model.head != "classifier":
        sums = float(3 * FLOAT_BYTES * tokens)  # maximum, target and sum of each row
        builder.network("loss-reduce", loss, ("all-reduce", sums, "tensor"), None)
    return builder
