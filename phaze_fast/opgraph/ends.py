"""The operators before and after a model's blocks on one device: embedding and head."""

from __future__ import annotations

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.sheet import ELEMENT_BYTES, Line, Sheet
from phaze_fast.opgraph.strategy import Strategy, shapes

__all__ = ["embedding_sheet", "head_sheet"]

_FLOAT_BYTES = 4


def embedding_sheet(model: TransformerModel, strategy: Strategy) -> Sheet:
    """Write the embedding: table look-ups or patches, their sum, norm and dropout.

    A vocabulary is split over tensor-parallel devices, whose parts are summed.
    """
    s = shapes(model, strategy)
    sheet = Sheet(f"{model.name}/embedding")
    hidden, t = model.hidden, strategy.tensor_parallel
    payload = float(ELEMENT_BYTES * s.rows * hidden)
    if model.patches is not None:
        pixels = model.patches.size**2 * model.patches.channels
        sheet.keep("pixels", ELEMENT_BYTES * s.rows * pixels, -1)
        x = sheet.linear("patch", -1, s.rows, pixels, hidden, bias=True)
    else:
        sheet.keep("token-ids", 8 * s.rows, -1, statistic=True)
        size = ELEMENT_BYTES * s.rows * hidden
        tables = 1 + (model.positions == "learned") + bool(model.token_types)
        x = sheet.custom(
            Line(
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
            x = sheet.network("embedding-sum", x, (op, payload, "tensor"), back)
    rows = s.split_rows
    if model.embedding_norm:
        sheet.keep("embedding-norm-input", ELEMENT_BYTES * rows * hidden, x)
        x = sheet.vector("embedding-norm", "norm", (x,), rows, hidden, function=model.norm)
    if model.dropout:
        x = sheet.vector("embedding-dropout", "dropout", (x,), rows, hidden)
        sheet.keep("embedding-dropout-mask", rows * hidden, x)
    return sheet


def head_sheet(model: TransformerModel, strategy: Strategy) -> Sheet:
    """Write what follows the blocks: final norm, logits, cross-entropy.

    Logits are split over the vocabulary; their fp32 values are kept for the backward pass
    (Korthikanti et al. 2022, section 4.3: 4sbh (1 + v/h) for the head, all of it divided by t with
    sequence parallelism).
    """
    s = shapes(model, strategy)
    sheet = Sheet(f"{model.name}/head")
    hidden, t, rows = model.hidden, strategy.tensor_parallel, s.split_rows
    size = ELEMENT_BYTES * rows * hidden
    x = -1
    if model.final_norm:
        sheet.keep("final-norm-input", size, x)
        x = sheet.vector("final-norm", "norm", (x,), rows, hidden, function=model.norm)
    if model.head == "mlm":
        sheet.keep("transform-input", size, x)
        x = sheet.linear("transform", x, rows, hidden, hidden, bias=True)
        sheet.keep("transform-output", size, x)
        x = sheet.vector(
            "transform-activation", "activation", (x,), rows, hidden, function=model.activation
        )
        sheet.keep("transform-norm-input", size, x)
        x = sheet.vector("transform-norm", "norm", (x,), rows, hidden, function=model.norm)
    if model.head == "none":
        return sheet
    sheet.keep("logits-input", size, x)
    if t > 1:
        payload = float(ELEMENT_BYTES * s.rows * hidden)
        if strategy.sequence_parallel:
            gather = ("all-gather", payload, "tensor")
            x = sheet.network(
                "logits-gather", x, gather, ("reduce-scatter", payload, "tensor"), regather=True
            )
        else:
            x = sheet.network("logits-enter", x, None, ("all-reduce", payload, "tensor"))
    if model.head == "classifier":
        width, tokens = model.classes, strategy.microbatch
    else:
        width, tokens = s.vocab, s.rows
    logits = sheet.linear("logits", x, tokens, hidden, width, bias=model.head != "lm")
    loss = sheet.vector("cross-entropy", "cross-entropy", (logits,), tokens, width)
    sheet.keep("logits", _FLOAT_BYTES * tokens * width, loss)
    if t > 1 and model.head != "classifier":
        sums = float(3 * _FLOAT_BYTES * tokens)  # maximum, target and sum of each row
        sheet.network("loss-reduce", loss, ("all-reduce", sums, "tensor"), None)
    return sheet
