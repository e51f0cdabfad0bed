"""Recognition of a traced graph as a transformer, by its operators alone.

A training library with fused kernels does not run the operators of a trace one by one; it runs the
norms, rotations and losses that they form. If every operator of a graph can be attributed to a part
of a transformer, and parameters and FLOPs agree, the graph is planned as that transformer;
otherwise as its own operators. Names of modules are not used, only the ATen operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.models.flops import model_flops
from phaze_fast.models.graph_model import PRODUCTS, GraphLayer, GraphModel, GraphOperator
from phaze_fast.models.transformer import TransformerModel

# ---- products, attentions, norms and non-linearities of a layer ----


_PASSES = """
    _to_copy clone copy mul div add sub rsub neg cat stack index index_select where masked_fill pow
    mean native_dropout dropout view_as_complex complex square sqrt constant_pad_nd repeat slice
    repeat_interleave tril triu isneginf all
    """
_PASSED = frozenset(_PASSES.split())
_ROUTES = """
    topk sort scatter gather histc cumsum floor_divide sum index_put bitwise_not index_add clamp
    argsort zeros_like bincount eq ge lt one_hot div max masked_fill scatter_add clamp_min
    logical_not bitwise_and le gt fill zero
    """
_ROUTING = frozenset(_ROUTES.split())
_ROTATES = frozenset({"cat", "stack", "neg", "view_as_complex", "complex"})
_CHOICES = frozenset({"topk", "sort", "argsort", "histc", "bincount", "one_hot", "cumsum"})
ENTERS = -1
"""Stands for the input of a layer among the positions of operators."""


class NotATransformerError(Exception):
    """A layer that the fields of a transformer cannot describe; the message gives the reason."""


def _refuse_if(differs: object, why: str) -> None:
    """Raise where a layer has something that the fields of a transformer cannot describe."""
    if differs:
        raise NotATransformerError(why)


@dataclass(frozen=True)
class Norm:
    """A norm: one operator, or a sequence of operators that compute it."""

    last: int
    """Operator that produces the normalised rows."""
    above: frozenset[int]
    """Operators whose outputs the norm normalises."""
    width: int
    function: str


@dataclass(frozen=True)
class Attention:
    """Attention, fused or explicit: scores, softmax, and the product with values."""

    last: int
    """Operator that produces the result of attention."""
    queries: tuple[int, ...]
    """Products that produce the queries; likewise `keys` and `values`."""
    keys: tuple[int, ...]
    values: tuple[int, ...]
    heads: int
    width: int
    """Width of a head; the mean of the widths of keys and values if they differ."""
    length: int
    causal: bool
    window: int
    rotated: bool
    capped: bool = False
    explicit: bool = False


@dataclass(frozen=True)
class FeedForward:
    """Feed-forward: up-projections, a non-linearity, a down-projection."""

    ups: tuple[int, ...]
    down: int
    curve: str
    rows: int
    """Number of rows of the non-linearity."""


def aten(op: GraphOperator) -> str:
    """Name of the ATen operator, the last part of an operator's name."""
    return op.name.rsplit(".", 1)[-1].split("-")[0]


class Skeleton:
    """A layer's products, attentions, norms and non-linearities, and the inputs of each."""

    def __init__(self, layer: GraphLayer) -> None:
        self.layer, self.ops = layer, layer.forward
        self.names = [aten(op) for op in self.ops]
        self.gemms = [at for at, op in enumerate(self.ops) if op.kind == "gemm"]
        self.norms = self._norms()
        self._stops = {at for at, op in enumerate(self.ops) if op.kind in PRODUCTS}
        self._stops |= {norm.last for norm in self.norms}
        self.norms = [self._with_source(norm) for norm in self.norms]
        self._explained: set[int] = set()

    # ---- walking up ----

    def _walk(self, start: Iterable[int], stops: Iterable[int]) -> tuple[frozenset[int], list[int]]:
        """Walk upstream; return the operators at which the walk stops, and those passed."""
        ends, passed, reached = frozenset(stops), [], set()
        waiting = list(start)
        while waiting:
            at = waiting.pop()
            if at < 0 or at in ends:
                reached.add(at)
            elif (
                at not in passed
                and not self._is_constant(at)
                and self.names[at] not in _CHOICES  # whose output is indices, not rows
            ):
                passed.append(at)
                waiting += self.ops[at].inputs
        return frozenset(reached), passed

    def _is_constant(self, at: int) -> bool:
        """Whether an operator reads only parameters and constants."""
        op = self.ops[at]
        return op.scales == "none" and op.kind != "embedding" and not op.flops

    def above(self, at: int) -> frozenset[int]:
        """Products, attentions and norms that feed an operator; `ENTERS` for the layer's input."""
        return self._walk(self.ops[at].inputs, self._stops)[0]

    def products_above(self, at: int) -> tuple[int, ...]:
        """Products with weights that feed an operator, directly or through norms."""
        return tuple(sorted(self._walk([at], self.gemms)[0]))

    def depends(self, at: int, on: int) -> bool:
        """Whether an operator's result depends on that of another operator."""
        return on in self._walk([at], [on])[0]

    # ---- norms ----

    def _norms(self) -> list[Norm]:
        norms = []
        for at, op in enumerate(self.ops):
            if op.kind == "norm":
                norms.append(Norm(at, frozenset(), op.n, op.function))
            elif self.names[at] == "rsqrt":
                norms.append(self._written_out(at))
        return norms

    def _written_out(self, root: int) -> Norm:
        """Recognise a norm written as separate operators around a reciprocal square root."""
        mean = root
        while self.names[mean] != "mean":
            mean = max(self.ops[mean].inputs)
            if mean < 0 or self.names[mean] not in ("mean", "add", "_to_copy"):
                raise NotATransformerError("a reciprocal root that is no norm's")
        squares = max(self.ops[mean].inputs)
        if squares < 0 or self.names[squares] not in ("pow", "square", "mul"):
            raise NotATransformerError("a mean that is no norm's")
        centred = any(
            at >= 0 and self.names[at] == "sub" and self.ops[at].n == self.ops[squares].n
            for at in self.ops[squares].inputs
        )
        last = next((at for at, op in enumerate(self.ops) if root in op.inputs), None)
        if last is None:
            raise NotATransformerError("a norm that nothing reads")
        function = "layernorm" if centred else "rmsnorm"
        return Norm(last, frozenset({squares}), self.ops[squares].n, function)

    def _with_source(self, norm: Norm) -> Norm:
        start = next(iter(norm.above), norm.last)  # the operator that squares, or the norm itself
        return replace(norm, above=self.above(start))

    def norm_at(self, labels: frozenset[int]) -> Norm | None:
        """Return the norm if `labels` (a result of `above`) holds that norm alone, else None."""
        return next((n for n in self.norms if labels == {n.last}), None)

    # ---- attention ----

    def attentions(self) -> list[Attention]:
        """Attentions in order of execution."""
        attentions = []
        for at, op in enumerate(self.ops):
            if op.kind == "attention":
                attentions.append(self._fused(at))
            elif op.kind == "softmax" and self._scores_above(at) is not None:
                attentions.append(self._explicit(at))
        return attentions

    def _scores_above(self, at: int) -> int | None:
        labels = {x for x in self.above(at) if x >= 0}
        scores = {x for x in labels if self.ops[x].kind == "batched-gemm"}
        return scores.pop() if len(scores) == 1 and len(labels) == 1 else None

    def _fused(self, at: int) -> Attention:
        op = self.ops[at]
        sides = [self.products_above(source) for source in op.inputs]
        if len(set(sides)) == 1:
            sides = [sides[0]] * 3
        return self._attention(at, sides, op, op.inputs[:1], op)

    def _explicit(self, softmax: int) -> Attention:
        scores = self._scores_above(softmax)
        mixes = [
            at
            for at, op in enumerate(self.ops)
            if op.kind == "batched-gemm"
            and softmax in self._walk(op.inputs, [softmax, *self.gemms])[0]
        ]
        if scores is None or len(mixes) != 1:
            raise NotATransformerError("scores without a mix of values")
        mix, op = self.ops[mixes[0]], self.ops[scores]
        between = self._walk(self.ops[softmax].inputs, [scores])[1]
        caps = [at for at in between if self.names[at] == "tanh"]
        self._explained |= {softmax, *caps}
        mask = next((self.ops[at] for at in between if self.ops[at].causal), op)
        # A safe softmax also reads the scores and what is added to them: these are no values.
        masked = self._walk(self.ops[softmax].inputs, [scores, *self.gemms])[0]
        values = self._walk(mix.inputs, [softmax, scores, *self.gemms])[0] - masked - {softmax}
        sides = [self.products_above(source) for source in op.inputs[:2]]
        if len(sides) == 1:
            sides *= 2
        sides.append(tuple(sorted(values)))
        attention = self._attention(mixes[0], sides, op, op.inputs[:2], mask)
        return replace(attention, capped=bool(caps), explicit=True)

    def _attention(
        self,
        last: int,
        sides: list[tuple[int, ...]],
        op: GraphOperator,
        starts: tuple[int, ...],
        mask: GraphOperator,
    ) -> Attention:
        if len(sides) != 3 or not all(sides) or any(ENTERS in side for side in sides):
            raise NotATransformerError("attention whose queries, keys and values are not products")
        passed = self._walk(starts, self.gemms)[1]
        queries, keys, values = sides
        return Attention(
            last=last,
            queries=queries,
            keys=keys,
            values=values,
            heads=op.b,
            width=op.k,
            length=op.m,
            causal=mask.causal or mask.window > 0,
            window=mask.window,
            rotated=any(self.names[at] in _ROTATES for at in passed),
        )

    def biased(self, at: int) -> bool:
        """Whether a bias is added to a product, by the product itself or directly after it."""
        width = self.ops[at].n
        return self.ops[at].bias or any(
            self.names[i] == "add" and op.inputs == (at,) and op.weights == width
            for i, op in enumerate(self.ops)
        )

    # ---- feed-forward ----

    def feed_forward(self, down: int) -> FeedForward:
        """Recognise the feed-forward layer that ends in a down-projection."""
        ends, passed = self._walk(self.ops[down].inputs, self.gemms)
        curves = [at for at in passed if self.ops[at].kind == "activation"]
        _refuse_if(not curves or ENTERS in ends, "a product that follows no non-linearity")
        _refuse_if(len(curves) != 1, "several non-linearities before a product")
        name = self.names[curves[0]]
        (before,) = self.ops[curves[0]].inputs[:1]
        scaled = before >= 0 and self.names[before] == "mul"
        plain = scaled and sum(self.ops[at].n for at in ends) == self.ops[down].k
        curve = {"tanh": "gelu", "sigmoid": "gelu" if plain else "silu"}.get(name, name)
        _refuse_if(curve not in ("gelu", "relu", "silu"), f"the non-linearity {name}")
        self._explained |= set(curves)
        return FeedForward(tuple(sorted(ends)), down, curve, self.ops[curves[0]].m)

    # ---- unexplained operators ----

    def explain(self, operators: Iterable[int]) -> None:
        """Mark operators as accounted for."""
        self._explained |= set(operators)

    @property
    def drops(self) -> bool:
        """Whether the layer has dropout."""
        return any(op.kind == "dropout" for op in self.ops)

    def check(self, routed: bool = False) -> None:
        """Refuse a layer with an operator that is not part of a transformer block."""
        known = _PASSED | (_ROUTING if routed else frozenset())
        norms = {"rsqrt"}
        for at, op in enumerate(self.ops):
            if at in self._explained or op.kind in ("norm", "attention", "batched-gemm"):
                continue
            if op.kind == "gemm" or (self.names[at] not in known | norms):
                raise NotATransformerError(f"{op.name} is no part of a transformer's block")
        used = {at for at, op in enumerate(self.ops) if op.kind == "batched-gemm"}
        explicit = 2 * sum(a.explicit for a in self.attentions())
        _refuse_if(len(used) != explicit, "products of activations outside of attention")


# ---- blocks ----


def _biased(sk: Skeleton, products: tuple[int, ...]) -> bool:
    biases = {sk.biased(at) for at in products}
    _refuse_if(len(biases) != 1, "projections of which some have a bias")
    return biases.pop()


def _projections(sk: Skeleton, a: Attention, out: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the fields of the query, key and value projections, and their operators."""
    wide = sk.ops[a.queries[0]].n
    if a.queries == a.keys == a.values and len(a.queries) == 1:
        apart = wide - a.heads * a.width
        kv_heads, rest = divmod(apart, 2 * a.width)
        _refuse_if(rest or kv_heads < 1, "queries, keys and values of other widths than heads")
        return {
            "kv_heads": kv_heads,
            "head_dim": a.width,
            "fused_qkv": True,
            "qkv_bias": _biased(sk, a.queries),
        }, a.queries
    if len(a.keys) == 2 and len(a.values) == 1 and a.values[0] in a.keys:
        return _latent(sk, a, out)
    products = (*a.queries, *a.keys, *a.values)
    if len(set(products)) != 3:
        raise NotATransformerError(
            "attention whose queries, keys and values are not three products"
        )
    widths = [sk.ops[at].n for at in products]
    if widths != [a.heads * a.width, widths[1], widths[1]] or widths[1] % a.width:
        raise NotATransformerError("queries, keys and values of other widths than heads")
    fields = {"kv_heads": widths[1] // a.width, "head_dim": a.width}
    return {**fields, "qkv_bias": _biased(sk, products)}, products


def _latent(sk: Skeleton, a: Attention, out: int) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Recognise latent attention: keys and values from one vector (DeepSeek-V2, sec. 2.1)."""
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
        raise NotATransformerError("latent attention of other widths than heads")
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
    following = [at for at in sk.gemms if sk.above(at) == {a.last}]
    _refuse_if(len(following) != 1, "attention that no product follows")
    return following[0]


def _dense(sk: Skeleton, ff: FeedForward) -> dict[str, Any]:
    """Fields of a feed-forward layer."""
    inner = sk.ops[ff.down].k
    widths = [sk.ops[at].n for at in ff.ups]
    if widths not in ([inner], [2 * inner], [inner, inner]):
        raise NotATransformerError("a feed-forward layer of other widths")
    if widths == [2 * inner] and sk.names[ff.ups[0]] != "_grouped_mm":
        shape = {"gated": True, "fused_gate": True}
    else:
        shape = {"gated": widths != [inner]}
    return {
        **shape,
        "activation": ff.curve,
        "ffn_bias": _biased(sk, (*ff.ups, ff.down)),
    }


def _mixture(sk: Skeleton, rest: list[int], hidden: int, length: int) -> dict[str, Any]:
    """Fields of a mixture of experts: grouped products, a router, shared experts."""
    grouped = [at for at in rest if sk.names[at] == "_grouped_mm"]
    down = next((at for at in grouped if sk.ops[at].n == hidden and at == grouped[-1]), None)
    if down is None:
        raise NotATransformerError("experts without a product down")
    routed = sk.feed_forward(down)
    if set(routed.ups) | {down} != set(grouped):
        raise NotATransformerError("experts of other products than up and down")
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
            raise NotATransformerError("shared experts of another non-linearity")
        moe["shared_ffn"] = sk.ops[downs[0]].k
        others = [at for at in others if at not in (*shared.ups, shared.down)]
    gates = [at for at in others if sk.ops[at].n == 1]
    if len(gates) == 1 and downs:
        moe["shared_gate"] = True
    if len(router) != 1 or set(others) != {*router, *(gates if downs else ())}:
        raise NotATransformerError("experts with other products")
    moe["router_bias"] = sk.biased(router[0])
    sk.explain(
        at
        for at, op in enumerate(sk.ops)
        if op.kind in ("activation", "softmax") and op.n in (experts, 1, moe["top_k"])
    )
    return {**fields, "moe": moe, "ffn": moe["expert_ffn"]}


def _position(sk: Skeleton, first: frozenset[int], out: int) -> tuple[str, Norm | None]:
    """Return where a sub-layer from `first` to `out` has its norms (pre, post)."""
    before = sk.norm_at(first)
    after = any(norm.above == {out} for norm in sk.norms)
    if before is not None:
        return "sandwich" if after else "pre", before
    if ENTERS not in first:
        raise NotATransformerError(
            "a sub-layer whose input is neither a norm nor the residual stream"
        )
    if after:
        return "output", None
    if any(norm.above == {ENTERS, out} for norm in sk.norms):
        return "post", None
    raise NotATransformerError("attention without a norm")


def _check_trained(layer: GraphLayer) -> None:
    """Refuse a block that is not fully trained, uses recomputation, or is not in 16 bits."""
    products = [op for op in layer.forward if op.kind == "gemm"]
    gradients = ("gemm-input-gradient", "gemm-weight-gradient")
    back = sum(op.flops for op in layer.backward if op.kind in gradients)
    forward = sum(op.flops for op in products)
    if abs(back - 2.0 * forward) > 0.05 * forward:
        raise NotATransformerError(
            "a block with other gradients than those of all inputs and weights"
        )
    widest = max((op for op in products if op.b == 1), key=lambda op: op.flops, default=None)
    if widest is None or widest.write_bytes != 2.0 * widest.m * widest.n:
        raise NotATransformerError("products that are not in 16 bits")


def read_block(layer: GraphLayer, hidden: int) -> dict[str, Any]:
    """Read the fields of one block.

    Returns
    -------
    dict
        Fields of a `TransformerModel`, ``cross``, ``rotated``, ``explicit``, ``drops``, ``normed``
        (whether queries and keys have norms) and ``buckets`` of a table of relative positions.

    Raises
    ------
    NotATransformerError
        If some operator cannot be part of such a block.
    """
    sk = Skeleton(layer)
    _check_trained(layer)
    attentions = sk.attentions()
    _refuse_if(len(attentions) not in (1, 2), "a block without attention")
    own = attentions[0]
    out = _out(sk, own)
    fields, used = _projections(sk, own, out)
    first = sk.above(used[2] if "latent" in fields else used[0])  # keys' latent vector, or queries
    position, before = _position(sk, first, out)
    _refuse_if(sk.ops[out].n != hidden, "attention that leaves another width than it enters")
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
        _refuse_if(not downs, "a block without a feed-forward layer")
        ff = sk.feed_forward(downs[0])
        if {*ff.ups, ff.down} != set(rest):
            raise NotATransformerError(
                "a block with other products than attention and feed-forward"
            )
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
    """Check that cross-attention reads the encoder's output; return its projections."""
    out = _out(sk, a)
    again, used = _projections(sk, a, out)
    same = all(again[name] == fields[name] for name in ("kv_heads", "head_dim", "qkv_bias"))
    if not same or a.heads != fields["heads"] or sk.above(a.keys[0]) != {ENTERS}:
        raise NotATransformerError("a second attention unlike the first")
    return {*used, out}


def _count_norms(sk: Skeleton, fields: dict[str, Any], cross: bool, before: Norm | None) -> bool:
    """Check that all norms are accounted for; return whether queries and keys have norms."""
    functions = {norm.function for norm in sk.norms}
    _refuse_if(len(functions) != 1, "norms of several kinds in a block")
    fields["norm"] = functions.pop()
    parallel = fields.get("parallel", "no")
    wanted = 4 if fields["norm_position"] == "sandwich" else 2
    if parallel != "no":
        if before is None or fields["norm_position"] != "pre":
            raise NotATransformerError("parallel sub-layers without a norm before them")
        wanted = 1 if parallel == "one-norm" else 2
    wanted += cross
    if "latent" in fields:
        wanted += 1 + ("query_rank" in fields["latent"])
        _refuse_if(len(sk.norms) != wanted, "latent attention with other norms")
        return False
    extra = len(sk.norms) - wanted
    if extra not in (0, 2) and extra != fields["heads"] + fields["kv_heads"]:
        raise NotATransformerError(f"{len(sk.norms)} norms in a block; expected {wanted}")
    return extra > 0


# ---- models ----


_LOSS = ("_log_softmax", "nll_loss_forward")
_OF_A_LAYER = ("cross", "window", "drops", "normed", "buckets", "explicit", "rotated", "causal")


def _embedding(layer: GraphLayer, vocab: int, seq: int) -> dict[str, Any]:
    """Fields of the layer before the blocks."""
    sk = Skeleton(layer)
    tables = [at for at, op in enumerate(sk.ops) if op.kind == "embedding" and op.weights]
    _refuse_if(not tables or sk.gemms, "an embedding that is no table of tokens")
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
    fields: dict[str, Any] = {"hidden": hidden, "embedding_norm": bool(sk.norms), "drops": sk.drops}
    if positions:
        fields |= {"positions": "learned", "max_positions": positions[0]}
    if types:
        fields["token_types"] = types[0]
    return fields


def _head(layer: GraphLayer) -> dict[str, Any]:
    """Fields of the layer after the blocks."""
    sk = Skeleton(layer)
    _refuse_if(not set(_LOSS) <= set(sk.names), "a head without a loss over a vocabulary")
    if len(sk.gemms) not in (1, 2) or len(sk.norms) > len(sk.gemms):
        raise NotATransformerError("a head of other products than logits")
    logits = sk.gemms[-1]
    op = sk.ops[logits]
    curves = [at for at, x in enumerate(sk.ops) if x.kind == "activation"]
    caps = [at for at in curves if at > logits and sk.names[at] == "tanh"]
    fields: dict[str, Any] = {
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
        fields |= {"head": "mlm", "final_norm": before is not None}
    else:
        fields |= {"head": "lm", "final_norm": bool(sk.norms), "head_bias": sk.biased(logits)}
    losses = [at for at, name in enumerate(sk.names) if name in _LOSS]
    sk.explain([*sk.gemms, *losses, *(curves if len(sk.gemms) == 2 else caps)])
    sk.check()
    return fields


def _between(layer: GraphLayer) -> bool:
    """Whether a layer is the end of an encoder and the start of a decoder: a norm and a table."""
    sk = Skeleton(layer)
    tables = [at for at, op in enumerate(sk.ops) if op.kind == "embedding"]
    if sk.gemms or len(sk.norms) > 1 or any(sk.ops[at].weights for at in tables):
        return False
    sk.explain(tables)
    sk.check()
    return True


def _common(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields that all blocks share; the feed-forward width is that of the dense blocks."""
    dense = [block for block in blocks if "moe" not in block]
    common: dict[str, Any] = {}
    for block in blocks:
        for name, value in block.items():
            if name in _OF_A_LAYER or (name == "ffn" and dense and "moe" in block):
                continue
            _refuse_if(common.setdefault(name, value) != value, f"blocks that differ in {name}")
    return common


def _stacks(graph: GraphModel, hidden: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Fields of every block of the encoder (none without one), and of every other block."""
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
    _refuse_if(not decoder, "no block")
    return encoder, decoder


def _attended(decoder: list[dict[str, Any]], encoder: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields of positions, masks and windows."""
    blocks = encoder + decoder
    windows = {block["window"] for block in decoder} - {0}
    _refuse_if(len(windows) > 1 or (encoder and windows), "windows of several widths")
    # A mask inside a relative-position bias is not visible; a decoder's attention is causal.
    causal = {block["causal"] or bool(encoder) for block in decoder}
    _refuse_if(len(causal) > 1, "blocks of which some are causal")
    fields: dict[str, Any] = {"causal": causal.pop()}
    buckets = {block["buckets"] for block in blocks} - {0}
    if buckets:
        fields |= {"positions": "relative", "relative_buckets": buckets.pop()}
    elif any(block["rotated"] for block in blocks):
        fields["positions"] = "rotary"
    else:
        fields["positions"] = "none"
    if windows:
        full = tuple(at for at, block in enumerate(decoder) if not block["window"])
        fields |= {"window": windows.pop(), "full_attention_layers": full}
    return fields


def _fields(graph: GraphModel) -> tuple[dict[str, Any], dict[str, list[Any]], bool]:
    """Return the known fields, values to try for others, and whether attention is explicit."""
    if graph.trained_parameters() < graph.parameters():
        raise NotATransformerError("frozen parameters, which have no gradients")
    _refuse_if(len(graph.order) < 3, "no repeated layers")
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
        chosen = {**fields, **dict(zip(choices, values, strict=True))}
        candidate = TransformerModel.from_dict({"name": graph.name, **chosen}, graph.name)
        if candidate.parameters() == graph.parameters() and _same_flops(graph, candidate, explicit):
            yield candidate


def _same_flops(graph: GraphModel, model: TransformerModel, explicit: bool) -> bool:
    if explicit:  # every score is computed, even if a window hides it
        model = model.replace(attention="eager")
    own, other = model_flops(graph), model_flops(model)
    slack = 1e-9 if model.moe is None else 0.05  # rows of each expert were rounded up
    return all(
        abs(a - b) <= slack * b
        for a, b in ((own.weights, other.weights), (own.attention, other.attention))
    )


@lru_cache(maxsize=256)
def _outcome(graph: GraphModel) -> tuple[TransformerModel | None, str]:
    try:
        model = next(_candidates(graph), None)
    except (NotATransformerError, InvalidInputError, ValueError) as error:
        return None, str(error)
    return model, "" if model else "parameters or FLOPs that are no transformer's"


def recognised(graph: GraphModel) -> TransformerModel | None:
    """Return the transformer that a graph describes, or None."""
    return None if graph.as_traced else _outcome(graph)[0]


def why_not_recognised(graph: GraphModel) -> str:
    """Return why a graph is not recognised as a transformer; empty if it is."""
    return "it is to be planned as it was traced" if graph.as_traced else _outcome(graph)[1]
