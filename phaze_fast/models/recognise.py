"""A traced graph recognised as a transformer, by its operators alone.

A training library with fused kernels does not run the operators that a trace shows one by one; it
runs the norms, rotations and losses that they make up. Where every operator of a graph has its
place in a transformer, and parameters and FLOPs come out the same, the graph is planned as that
transformer; else as the operators it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.models.flops import model_flops
from phaze_fast.models.graph_model import GraphLayer, GraphModel
from phaze_fast.models.recognise_block import read_block
from phaze_fast.models.skeleton import ENTERS, NotATransformerError, Skeleton
from phaze_fast.models.transformer import TransformerModel

__all__ = ["recognised", "why_not_recognised"]

_LOSS = ("_log_softmax", "nll_loss_forward")
_OF_A_LAYER = ("cross", "window", "drops", "normed", "buckets", "explicit", "rotated", "causal")


def _embedding(layer: GraphLayer, vocab: int, seq: int) -> dict[str, Any]:
    """Fields of what stands before the blocks."""
    sk = Skeleton(layer)
    tables = [at for at, op in enumerate(sk.ops) if op.kind == "embedding" and op.weights]
    if not tables or sk.gemms:
        raise NotATransformerError("an embedding that is no table of tokens")
    hidden = sk.ops[tables[0]].n
    rows = [sk.ops[at].weights // sk.ops[at].n for at in tables]
    if vocab not in rows or any(sk.ops[at].n != hidden for at in tables):
        raise NotATransformerError("an embedding narrower than the blocks")
    rows.remove(vocab)
    positions = [count for count in rows if count >= seq]
    types = [count for count in rows if count < seq]
    if len(positions) > 1 or len(types) > 1 or len(sk.norms) > 1:
        raise NotATransformerError("an embedding of several tables of positions")
    sk.explain(tables)
    sk.check()
    found: dict[str, Any] = {"hidden": hidden, "embedding_norm": bool(sk.norms), "drops": sk.drops}
    if positions:
        found |= {"positions": "learned", "max_positions": positions[0]}
    if types:
        found["token_types"] = types[0]
    return found


def _head(layer: GraphLayer) -> dict[str, Any]:
    """Fields of what follows the blocks."""
    sk = Skeleton(layer)
    if not set(_LOSS) <= set(sk.names):
        raise NotATransformerError("a head without a loss over a vocabulary")
    if len(sk.gemms) not in (1, 2) or len(sk.norms) > len(sk.gemms):
        raise NotATransformerError("a head of other products than logits")
    logits = sk.gemms[-1]
    op = sk.ops[logits]
    curves = [at for at, x in enumerate(sk.ops) if x.kind == "activation"]
    caps = [at for at in curves if at > logits and sk.names[at] == "tanh"]
    found: dict[str, Any] = {
        "vocab": op.n,
        "tied_embeddings": op.weights < op.n * op.k,
        "logit_cap": bool(caps),
        "drops": sk.drops,
    }
    if len(sk.gemms) == 2:  # BERT's transform
        before = sk.norm_at(sk.above(sk.gemms[0]))
        entered = sk.above(sk.gemms[0]) if before is None else before.above
        normed = sk.norm_at(sk.above(logits)) is not None
        single = len(curves) - len(caps) == 1 and len(sk.norms) == 1 + (before is not None)
        if not (sk.biased(logits) and single and normed and entered == {ENTERS}):
            raise NotATransformerError("a head of other products than logits")
        found |= {"head": "mlm", "final_norm": before is not None}
    else:
        found |= {"head": "lm", "final_norm": bool(sk.norms), "head_bias": sk.biased(logits)}
    losses = [at for at, name in enumerate(sk.names) if name in _LOSS]
    sk.explain([*sk.gemms, *losses, *(curves if len(sk.gemms) == 2 else caps)])
    sk.check()
    return found


def _between(layer: GraphLayer) -> bool:
    """Whether a layer is the end of an encoder and the start of a decoder: a norm, a table."""
    sk = Skeleton(layer)
    tables = [at for at, op in enumerate(sk.ops) if op.kind == "embedding"]
    if sk.gemms or len(sk.norms) > 1 or any(sk.ops[at].weights for at in tables):
        return False
    sk.explain(tables)
    sk.check()
    return True


def _common(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields that all blocks share; the width of the dense ones is theirs."""
    dense = [block for block in blocks if "moe" not in block]
    found: dict[str, Any] = {}
    for block in blocks:
        for name, value in block.items():
            if name in _OF_A_LAYER or (name == "ffn" and dense and "moe" in block):
                continue
            if found.setdefault(name, value) != value:
                raise NotATransformerError(f"blocks that differ in {name}")
    return found


def _stacks(graph: GraphModel, hidden: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Fields of every block of the encoder, if there is one, and of the others."""
    read: dict[int, dict[str, Any] | None] = {}
    order = graph.order[1:-1]
    for at in dict.fromkeys(order):
        layer = graph.layers[at]
        single = layer.name.startswith("between-")
        read[at] = None if single and _between(layer) else read_block(layer, hidden)
    rows = [block for at in order if (block := read[at]) is not None]
    crossed = [block["cross"] for block in rows]
    first = crossed.index(True) if True in crossed else 0
    encoder, decoder = rows[:first], rows[first:]
    if len(rows) != len(order) - bool(encoder) or not all(
        x["cross"] == bool(encoder) for x in decoder
    ):
        raise NotATransformerError("layers between the blocks")
    if not decoder:
        raise NotATransformerError("no block")
    return encoder, decoder


def _attended(decoder: list[dict[str, Any]], encoder: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields of positions, masks and windows."""
    blocks = encoder + decoder
    windows = {block["window"] for block in decoder} - {0}
    if len(windows) > 1 or (encoder and windows):
        raise NotATransformerError("windows of several widths")
    # What a bias of relative positions hides is not seen; a decoder's is causal by its nature.
    causal = {block["causal"] or bool(encoder) for block in decoder}
    if len(causal) > 1:
        raise NotATransformerError("blocks of which some are causal")
    found: dict[str, Any] = {"causal": causal.pop()}
    buckets = {block["buckets"] for block in blocks} - {0}
    if buckets:
        found |= {"positions": "relative", "relative_buckets": buckets.pop()}
    elif any(block["rotated"] for block in blocks):
        found["positions"] = "rotary"
    else:
        found["positions"] = "none"
    if windows:
        full = tuple(at for at, block in enumerate(decoder) if not block["window"])
        found |= {"window": windows.pop(), "full_attention_layers": full}
    return found


def _fields(graph: GraphModel) -> tuple[dict[str, Any], dict[str, list[Any]], bool]:
    """Fields of the transformer, those that parameters alone tell apart, and if it is explicit."""
    if len(graph.order) < 3:
        raise NotATransformerError("no repeated layers")
    head = _head(graph.layers[graph.order[-1]])
    start = _embedding(graph.layers[graph.order[0]], head["vocab"], graph.seq)
    encoder, decoder = _stacks(graph, start["hidden"])
    blocks = encoder + decoder
    drops = any(part["drops"] for part in (head, start, *blocks))
    fields = {**_common(blocks), **_attended(decoder, encoder), **start, **head, "dropout": drops}
    fields |= {"layers": len(decoder), "encoder_layers": len(encoder), "seq": graph.seq}
    fields.pop("drops")
    if fields["head_dim"] == fields["hidden"] / fields["heads"]:
        fields["head_dim"] = None
    choices: dict[str, list[Any]] = {"norm_gain": [True, False], "norm_bias": [True, False]}
    if fields["norm"] == "rmsnorm":
        del choices["norm_bias"]
    if any(block["normed"] for block in blocks):
        choices["qk_norm"] = ["head", "width"]
    if "moe" in fields:
        dense = tuple(at for at, block in enumerate(decoder) if "moe" not in block)
        fields["moe"] = {**fields["moe"], "dense_at": dense}
        choices |= {"ffn_bias": [False, True], "sinks": [False, True]}
    return fields, choices, any(block["explicit"] for block in blocks)


def _candidates(graph: GraphModel) -> Iterator[TransformerModel]:
    fields, choices, explicit = _fields(graph)
    for values in itertools.product(*choices.values()):
        given = {**fields, **dict(zip(choices, values, strict=True))}
        made = TransformerModel.from_dict({"name": graph.name, **given}, graph.name)
        if made.parameters() == graph.parameters() and _same_flops(graph, made, explicit):
            yield made


def _same_flops(graph: GraphModel, model: TransformerModel, explicit: bool) -> bool:
    if explicit:  # every score is computed, whatever a window hides
        model = model.replace(attention="eager")
    own, other = model_flops(graph), model_flops(model)
    slack = 1e-9 if model.moe is None else 0.05  # tokens fill up the last row of each expert
    return all(
        abs(a - b) <= slack * b
        for a, b in ((own.weights, other.weights), (own.attention, other.attention))
    )


@lru_cache(maxsize=256)
def _outcome(graph: GraphModel) -> tuple[TransformerModel | None, str]:
    try:
        found = next(_candidates(graph), None)
    except (NotATransformerError, InvalidInputError, ValueError) as error:
        return None, str(error)
    return found, "" if found else "parameters or FLOPs that are no transformer's"


def recognised(graph: GraphModel) -> TransformerModel | None:
    """Give the transformer that a graph is, or None."""
    return None if graph.as_traced else _outcome(graph)[0]


def why_not_recognised(graph: GraphModel) -> str:
    """Say why a graph is planned as the operators it has; empty where it is a transformer."""
    return "it is to be planned as it was traced" if graph.as_traced else _outcome(graph)[1]
