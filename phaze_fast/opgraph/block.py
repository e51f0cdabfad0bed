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
    BlockWriter,
    LayerBuilder,
    OperatorSpec,
    keep_norm_input,
)
from phaze_fast.opgraph.feed_forward import experts, experts_of_rows, feed_forward, own_experts
from phaze_fast.opgraph.strategy import Strategy, shapes

__all__ = [
    "block_builder",
    "block_kinds",
    "embedding_builder",
    "head_builder",
]


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
    w: BlockWriter, name: str, skip: int, write: Callable[[int], int], region: bool = True
) -> int:
    """Wrap attention or feed-forward in its norms and residual.

    It is written inside a tensor-parallel region unless it sees to that itself.
    """
    position = w.model.norm_position
    x = w.norm(f"{name}-norm", skip) if position in ("pre", "sandwich") else skip
    w.keep_input(name, x, routed=name == "ffn" and w.kind.endswith("moe-block"))
    x = w.leave(name, write(w.enter(name, x))) if region else write(x)
    if position in ("output", "sandwich"):
        x = w.norm(f"{name}-output-norm", x)
    x = w.add_residual(name, x, skip)
    return w.norm(f"{name}-norm", x) if position == "post" else x


def _parallel(w: BlockWriter, body: Callable[[int], int]) -> int:
    """Attention and feed-forward side by side: devices sum both parts at once."""
    x = w.norm("attention-norm", -1)
    w.keep_input("attention", x)
    attended = w.enter("attention", x)
    inner = attended
    if w.model.parallel == "two-norms":
        y = w.norm("ffn-norm", -1)
        w.keep_input("ffn", y)
        inner = w.enter("ffn", y)
    left, right = attend(w, "", attended, attended, w.causal), body(inner)
    rows, hidden = w.shapes.rows, w.model.hidden
    both = w.builder.vector("parallel-sum", "residual", (left, right), rows, hidden, reads=2)
    return w.add_residual("ffn", w.leave("ffn", both), -1)


def block_builder(model: TransformerModel, strategy: Strategy, kind: str = "block") -> LayerBuilder:
    """Write one block of a model as one device runs it.

    Parameters
    ----------
    model, strategy
        What is trained, and how a layer is split.
    kind
        One of `block_kinds`, ``encoder-block`` or ``decoder-block``.

    Raises
    ------
    InfeasibleError
        Where the strategy breaks a rule of divisibility.
    """
    w = BlockWriter(model, strategy, kind)

    def body(x: int) -> int:
        return experts(w, x) if kind.endswith("moe-block") else feed_forward(w, x)

    if model.parallel != "no":
        _parallel(w, body)
        return w.builder
    x = _sublayer(w, "attention", -1, lambda inner: attend(w, "", inner, inner, w.causal))
    if kind == "decoder-block":
        memory = -1  # the encoder's output enters the layer beside its input
        w.builder.keep("memory", ELEMENT_BYTES * w.shapes.rows * model.hidden, -1)
        x = _sublayer(w, "cross", x, lambda inner: attend(w, "cross-", inner, memory, False))
    if kind.endswith("moe-block") and own_experts(w):
        _sublayer(w, "ffn", x, lambda inner: experts_of_rows(w, inner), region=False)
    else:
        _sublayer(w, "ffn", x, body)
    return w.builder


# ---- embedding and head ----


_FLOAT_BYTES = 4


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
        cut = (
            s.rows
        )  # a class token is no patch; of several devices that share rows, some have none
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
            x = builder.custom(
                OperatorSpec(
                    "look-up",
                    "embedding",
                    "VC",
                    (-1,),
                    m=s.rows,
                    n=hidden,
                    read_bytes=8 * s.rows + tables * size,
                    write_bytes=size,
                )
            )
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

    Logits are split over the vocabulary; their fp32 values are kept for the backward pass
    (Korthikanti et al. 2022, section 4.3: 4sbh (1 + v/h) for the head, all of it divided by t with
    sequence parallelism).
    """
    s = shapes(model, strategy)
    builder = LayerBuilder(f"{model.name}/head")
    hidden, t, rows = model.hidden, strategy.tp, s.split_rows
    size = ELEMENT_BYTES * rows * hidden
    x = -1
    if model.final_norm:
        made = builder.vector("final-norm", "norm", (x,), rows, hidden, function=model.norm)
        keep_norm_input(builder, "final-norm", model, rows * hidden, x, made)
        x = made
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
            gather = ("all-gather", payload, "tensor")
            x = builder.network(
                "logits-gather", x, gather, ("reduce-scatter", payload, "tensor"), regather=True
            )
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
    if model.loss_passes:  # each way half of them; a gradient moves three times as much as this
        moved = _FLOAT_BYTES * tokens * width * model.loss_passes / 4.0
        logits = builder.custom(
            OperatorSpec(
                "logits-passes",
                "multiply",
                "VC",
                (logits,),
                m=tokens,
                n=width,
                read_bytes=moved / 2.0,
                write_bytes=moved / 2.0,
            )
        )
    loss = builder.vector("cross-entropy", "cross-entropy", (logits,), tokens, width)
    builder.keep("logits", model.logit_bytes * tokens * width, loss)
    if t > 1 and model.head != "classifier":
        sums = float(3 * _FLOAT_BYTES * tokens)  # maximum, target and sum of each row
        builder.network("loss-reduce", loss, ("all-reduce", sums, "tensor"), None)
    return builder
