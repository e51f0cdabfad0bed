"""A block of a transformer read off its operators: the fields that a record has for it."""

from __future__ import annotations

from typing import Any

from phaze_fast.models.graph_model import GraphLayer
from phaze_fast.models.skeleton import (
    ENTERS,
    Attention,
    FeedForward,
    Norm,
    NotATransformerError,
    Skeleton,
)

__all__ = ["read_block"]


def _refuse(why: str) -> NotATransformerError:
    return NotATransformerError(why)


def _biased(sk: Skeleton, products: tuple[int, ...]) -> bool:
    biases = {sk.biased(at) for at in products}
    if len(biases) != 1:
        raise _refuse("projections of which some have a bias")
    return biases.pop()


def _projections(sk: Skeleton, a: Attention, out: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Fields of the products that make queries, keys and values, and those products."""
    wide = sk.ops[a.queries[0]].n
    if a.queries == a.keys == a.values and len(a.queries) == 1:
        apart = wide - a.heads * a.width
        kv_heads, rest = divmod(apart, 2 * a.width)
        if rest or kv_heads < 1:
            raise _refuse("queries, keys and values of other widths than heads")
        return {
            "kv_heads": kv_heads,
            "head_dim": a.width,
            "fused_qkv": True,
            "qkv_bias": _biased(sk, a.queries),
        }, a.queries
    if len(a.keys) == 2 and len(a.values) == 1 and a.values[0] in a.keys:
        return _latent(sk, a, out)
    each = (*a.queries, *a.keys, *a.values)
    if len(set(each)) != 3:
        raise _refuse("attention whose queries, keys and values are not three products")
    widths = [sk.ops[at].n for at in each]
    if widths != [a.heads * a.width, widths[1], widths[1]] or widths[1] % a.width:
        raise _refuse("queries, keys and values of other widths than heads")
    fields = {"kv_heads": widths[1] // a.width, "head_dim": a.width}
    return {**fields, "qkv_bias": _biased(sk, each)}, each


def _latent(sk: Skeleton, a: Attention, out: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Read keys and values made from one narrow vector (DeepSeek-V2, section 2.1)."""
    (up,), (query,) = a.values, a.queries
    down = next(at for at in a.keys if at != up)
    rank, value = sk.ops[up].k, sk.ops[out].k // a.heads
    plain = sk.ops[up].n // a.heads - value
    latent: dict[str, Any] = {
        "kv_rank": rank,
        "plain_width": plain,
        "rotary_width": sk.ops[down].n - rank,
        "value_width": value,
    }
    if plain + latent["rotary_width"] != sk.ops[query].n // a.heads:
        raise _refuse("latent attention of other widths than heads")
    used = [query, up, down]
    before = sk.norm_at(sk.above(query))
    if before is not None and before.above != sk.above(down) and ENTERS not in before.above:
        (narrow,) = before.above
        if narrow in sk.gemms:
            latent["query_rank"] = sk.ops[query].k
            used.append(narrow)
    fields = {"latent": latent, "kv_heads": None, "head_dim": None}
    return {**fields, "qkv_bias": sk.biased(down)}, tuple(used)


def _out(sk: Skeleton, a: Attention) -> int:
    found = [at for at in sk.gemms if sk.above(at) == {a.last}]
    if len(found) != 1:
        raise _refuse("attention that no product follows")
    return found[0]


def _dense(sk: Skeleton, ff: FeedForward) -> dict[str, Any]:
    """Fields of a feed-forward layer."""
    inner = sk.ops[ff.down].k
    widths = [sk.ops[at].n for at in ff.ups]
    if widths not in ([inner], [2 * inner], [inner, inner]):
        raise _refuse("a feed-forward layer of other widths")
    if widths == [2 * inner] and sk.names[ff.ups[0]] != "_grouped_mm":
        shape = {"gated": True, "fused_gate": True}
    else:
        shape = {"gated": widths != [inner]}
    return {
        **shape,
        "activation": ff.curve,
        "gelu_new": ff.by_steps,
        "ffn_bias": _biased(sk, (*ff.ups, ff.down)),
    }


def _mixture(sk: Skeleton, rest: list[int], hidden: int, length: int) -> dict[str, Any]:
    """Fields of a mixture of experts: grouped products, a router, what every token visits."""
    grouped = [at for at in rest if sk.names[at] == "_grouped_mm"]
    down = next((at for at in grouped if sk.ops[at].n == hidden and at == grouped[-1]), None)
    if down is None:
        raise _refuse("experts without a product down")
    routed = sk.feed_forward(down)
    if set(routed.ups) | {down} != set(grouped):
        raise _refuse("experts of other products than up and down")
    experts = sk.ops[down].b
    fields = _dense(sk, routed)
    moe: dict[str, Any] = {
        "experts": experts,
        "top_k": routed.rows // length,
        "expert_ffn": sk.ops[down].k,
    }
    others = [at for at in rest if at not in grouped]
    router = [at for at in others if sk.ops[at].n == experts and sk.ops[at].k == hidden]
    downs = [at for at in others if sk.ops[at].n == hidden and sk.ops[at].k != hidden]
    if downs:
        shared = sk.feed_forward(downs[0])
        if {"ffn_bias": False, **_dense(sk, shared)}["activation"] != fields["activation"]:
            raise _refuse("shared experts of another non-linearity")
        moe["shared_ffn"] = sk.ops[downs[0]].k
        others = [at for at in others if at not in (*shared.ups, shared.down)]
    gates = [at for at in others if sk.ops[at].n == 1]
    if len(gates) == 1 and downs:
        moe["shared_gate"] = True
    if len(router) != 1 or set(others) != {*router, *(gates if downs else ())}:
        raise _refuse("experts with other products beside them")
    moe["router_bias"] = sk.biased(router[0])
    sk.explain(
        at
        for at, op in enumerate(sk.ops)
        if op.kind in ("activation", "softmax") and op.n in (experts, 1, moe["top_k"])
    )
    return {**fields, "moe": moe, "ffn": moe["expert_ffn"]}


def _position(sk: Skeleton, first: frozenset[int], out: int) -> tuple[str, Norm | None]:
    """Where norms stand around a sub-layer whose products read `first` and end in `out`."""
    before = sk.norm_at(first)
    after = any(norm.above == {out} for norm in sk.norms)
    if before is not None:
        return "sandwich" if after else "pre", before
    if ENTERS not in first:
        raise _refuse("a sub-layer whose input is neither a norm nor the residual stream")
    if after:
        return "output", None
    if any(norm.above == {ENTERS, out} for norm in sk.norms):
        return "post", None
    raise _refuse("attention without a norm")


def _check_trained(layer: GraphLayer) -> None:
    """Refuse a block that is not trained whole, computed again, or not in 16 bits."""
    products = [op for op in layer.forward if op.kind == "gemm"]
    gradients = ("gemm-input-gradient", "gemm-weight-gradient")
    back = sum(op.flops for op in layer.backward if op.kind in gradients)
    forward = sum(op.flops for op in products)
    if abs(back - 2.0 * forward) > 0.05 * forward:
        raise _refuse("a block with other gradients than those of all inputs and weights")
    widest = max((op for op in products if op.b == 1), key=lambda op: op.flops, default=None)
    if widest is None or widest.write_bytes != 2.0 * widest.m * widest.n:
        raise _refuse("products that are not in 16 bits")


def read_block(layer: GraphLayer, hidden: int) -> dict[str, Any]:
    """Read the fields of one block.

    Returns
    -------
    dict
        Fields of a `TransformerModel`, and ``cross``, ``window``, ``drops``, ``normed`` (whether
        queries and keys are) and ``buckets`` of a table of relative positions.

    Raises
    ------
    NotATransformerError
        Where some operator has no place in such a block.
    """
    sk = Skeleton(layer)
    _check_trained(layer)
    attentions = sk.attentions()
    if len(attentions) not in (1, 2):
        raise _refuse("a block without attention")
    own = attentions[0]
    out = _out(sk, own)
    fields, used = _projections(sk, own, out)
    first = sk.above(used[2] if "latent" in fields else used[0])  # keys' vector, or queries
    position, before = _position(sk, first, out)
    if sk.ops[out].n != hidden:
        raise _refuse("attention that leaves another width than it enters")
    fields |= {"heads": own.heads, "norm_position": position, "out_bias": sk.biased(out)}
    taken = {*used, out}
    if len(attentions) == 2:
        taken |= _cross(sk, attentions[1], fields)
    rest = [at for at in sk.gemms if at not in taken]
    routed = any(sk.names[at] == "_grouped_mm" for at in rest)
    if routed:
        fields |= _mixture(sk, rest, hidden, own.length)
    else:
        downs = [at for at in rest if sk.ops[at].n == hidden and at == rest[-1]]
        if not downs:
            raise _refuse("a block without a feed-forward layer")
        ff = sk.feed_forward(downs[0])
        if {*ff.ups, ff.down} != set(rest):
            raise _refuse("a block with other products beside attention and feed-forward")
        fields |= _dense(sk, ff)
        fields["ffn"] = sk.ops[ff.down].k
        if not sk.depends(ff.down, out):
            same = sk.above(ff.ups[0]) == first
            fields["parallel"] = "one-norm" if same else "two-norms"
    tables = [at for at, op in enumerate(sk.ops) if op.kind == "embedding"]
    sk.explain([*sk.gemms, *tables])
    sk.check(routed)
    normed = _count_norms(sk, fields, len(attentions) == 2, before)
    buckets = sum(sk.ops[at].weights for at in tables) // own.heads
    return {
        **fields,
        "causal": own.causal,
        "rotated": own.rotated,
        "score_cap": own.capped,
        "explicit": own.explicit,
        "cross": len(attentions) == 2,
        "window": own.window,
        "drops": sk.drops,
        "normed": normed,
        "buckets": buckets,
    }


def _cross(sk: Skeleton, a: Attention, fields: dict[str, Any]) -> set[int]:
    """Check a second attention, to what an encoder made; give its products."""
    out = _out(sk, a)
    again, used = _projections(sk, a, out)
    same = all(again[name] == fields[name] for name in ("kv_heads", "head_dim", "qkv_bias"))
    if not same or a.heads != fields["heads"] or sk.above(a.keys[0]) != {ENTERS}:
        raise _refuse("a second attention unlike the first")
    return {*used, out}


def _count_norms(sk: Skeleton, fields: dict[str, Any], cross: bool, before: Norm | None) -> bool:
    """Check that all norms are accounted for; say whether queries and keys have some."""
    functions = {norm.function for norm in sk.norms}
    if len(functions) != 1:
        raise _refuse("norms of several kinds in a block")
    fields["norm"] = functions.pop()
    parallel = fields.get("parallel", "no")
    wanted = 4 if fields["norm_position"] == "sandwich" else 2
    if parallel != "no":
        if before is None or fields["norm_position"] != "pre":
            raise _refuse("parallel sub-layers without a norm before them")
        wanted = 1 if parallel == "one-norm" else 2
    wanted += cross
    if "latent" in fields:
        wanted += 1 + ("query_rank" in fields["latent"])
        if len(sk.norms) != wanted:
            raise _refuse("latent attention with other norms")
        return False
    extra = len(sk.norms) - wanted
    if extra not in (0, 2) and extra != fields["heads"] + fields["kv_heads"]:
        raise _refuse(f"{len(sk.norms)} norms in a block; expected {wanted}")
    return extra > 0
