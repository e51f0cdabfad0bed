"""The operators before and after a model's blocks on one device: embedding and head."""

from __future__ import annotations

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.builder import ELEMENT_BYTES, LayerBuilder, OperatorSpec
from phaze_fast.opgraph.strategy import Strategy, shapes
from phaze_fast.opgraph.writer import keep_norm_input

__all__ = ["embedding_builder", "head_builder"]

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
