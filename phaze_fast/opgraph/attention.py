"""The operators of one attention sub-layer on one device.

Projections are split by columns, the output projection by rows, heads over devices, as Megatron-LM
does it. In latent attention the projections down to the narrow vectors are whole on every device
and those up from them are split by heads. What the devices of a context-parallel group exchange:

- all-gather: keys and values of all tokens before attention, and again in the backward pass, where
  their gradients are reduced and scattered (Llama 3: Grattafiori et al. 2024, section 3.3.2)
- ring: keys and values circulate while attention processes the local block; the backward pass
  circulates them again with their gradients (Liu et al. 2023, arXiv:2310.01889). Of n
  steps with attention time a and transfer time c, the first uses local keys: the total is
  max(n a, (n - 1) c + a). Two operators model this: (n - 1) a overlapping (n - 1) c, then a.
- ulysses: local rows of all heads for all rows of some heads, and back (Jacobs et al. 2023,
  arXiv:2309.14509); combined with ring, neighbours exchange rows for heads, and keys and values
  circulate between the groups of neighbours
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from phaze_fast.models import LatentAttention, TransformerModel
from phaze_fast.models.flops import visible_keys
from phaze_fast.opgraph.builder import ELEMENT_BYTES, FLOAT_BYTES, BlockBuilder, OperatorSpec
from phaze_fast.opgraph.strategy import context_widths

_RANDOM_STATE_BYTES = 1024  # seed and offset of a fused kernel, each in an allocation of its own
_SOFTMAX_STEPS = (
    ("scores-to-fp32", ELEMENT_BYTES, FLOAT_BYTES),
    ("score-scale", FLOAT_BYTES, FLOAT_BYTES),
    ("score-mask", FLOAT_BYTES, FLOAT_BYTES),
    ("softmax", FLOAT_BYTES, FLOAT_BYTES),
    ("weights-from-fp32", FLOAT_BYTES, ELEMENT_BYTES),
)
"""Kernels of a softmax that is not fused: name, bytes read and bytes written per element."""


def attend(block: BlockBuilder, prefix: str, x: int, memory: int, causal: bool) -> int:
    """Add attention of x over `memory`, source of keys and values: x or the encoder's output."""
    if block.model.latent is not None:
        return _latent(block, block.model.latent, prefix, x, causal)
    s, m = block.shapes, block.model
    q, k, v = _projections(block, prefix, x, memory)
    query_bytes, kv_bytes = (
        ELEMENT_BYTES * s.rows * width for width in (s.query_width, s.kv_width)
    )
    if m.qk_norm != "no":
        q = _normed(block, f"{prefix}q-norm", q, s.query_width, s.heads)
        k = _normed(block, f"{prefix}k-norm", k, s.kv_width, s.kv_heads)
    rotated = m.positions == "rotary"
    if rotated:
        q = block.vector(f"{prefix}rotate-q", "rotary", (q,), s.rows, s.query_width)
        k = block.vector(f"{prefix}rotate-k", "rotary", (k,), s.rows, s.kv_width)
    block.keep(f"{prefix}query", query_bytes, q)
    if not m.kv_expanded or (m.fused_qkv and not rotated):
        block.keep(f"{prefix}key", kv_bytes, k)
        block.keep(f"{prefix}value", kv_bytes, v)
    if m.kv_expanded:  # copied to every query head; the originals may be freed
        block.keep(f"{prefix}expanded-key", query_bytes, k)
        block.keep(f"{prefix}expanded-value", query_bytes, v)
    sent = exchange(block, prefix, (q, k, v), query_bytes, 2.0 * kv_bytes)
    if m.attention == "flash":
        read = ELEMENT_BYTES * s.rows * (s.query_width + 2 * s.kv_width)
        out = _flash(block, prefix, sent, causal, read, query_bytes)
    else:
        out = _explicit(block, prefix, *sent[:3], causal)
    only = ("o",) if m.attention == "eager" else None  # flash attention's own gradient reads it too
    block.keep(f"{prefix}context", query_bytes, out, operand="also", by=only)
    out = exchange_back(block, prefix, out, query_bytes)
    shape = (s.rows, s.query_width, m.hidden)
    return block.linear(f"{prefix}proj", out, *shape, m.out_bias, targets={"o": m.hidden})


def _projections(block: BlockBuilder, prefix: str, x: int, memory: int) -> tuple[int, int, int]:
    """Add the projections: Q of x, K and V of `memory`; return the operators that compute them."""
    s, m = block.shapes, block.model
    bias = m.qkv_bias
    if m.fused_qkv and x == memory:
        width = s.query_width + 2 * s.kv_width
        parts = {"qkv": width, "q": s.query_width, "k": s.kv_width, "v": s.kv_width}
        qkv = block.linear(f"{prefix}qkv", x, s.rows, m.hidden, width, bias, targets=parts)
        return qkv, qkv, qkv

    def projected(name: str, source: int, width: int) -> int:
        shape, parts = (s.rows, m.hidden, width), {name: width}
        return block.linear(f"{prefix}{name}", source, *shape, bias, targets=parts)

    return (
        projected("q", x, s.query_width),
        projected("k", memory, s.kv_width),
        projected("v", memory, s.kv_width),
    )


def _normed(block: BlockBuilder, name: str, x: int, width: int, heads: int) -> int:
    """Add a norm of queries or keys, per head or over all heads (with an all-reduce of sums)."""
    rows = block.shapes.rows
    if block.model.qk_norm == "head":
        return block.norm_of(name, x, rows * heads, width // heads)
    if block.strategy.tp > 1:
        sums = ("all-reduce", FLOAT_BYTES * rows, "tensor")
        x = block.network(f"{name}-sum", x, sums, sums)
    return block.norm_of(name, x, rows, width)


def _flash(
    block: BlockBuilder,
    prefix: str,
    sent: Exchanged,
    causal: bool,
    read_bytes: float,
    write_bytes: float,
    *also: int,
) -> int:
    """Add fused attention; with a window, each query is charged the mean number of visible keys.

    Attention reads the outputs of the operators in `sent` and `also`.
    """
    s = block.shapes
    heads, seq_here = attention_shape(block)
    pairs = s.batch * heads
    width, keys = 4.0 * s.head_width, float(s.seq)
    if block.model.latent is not None:
        width = 2.0 * (block.model.latent.query_width + block.model.latent.value_width)
    computed = keys
    if block.windowed:
        keys, causal = visible_keys(block.model, s.seq), False
        computed = max(keys, _keys_of_blocks(block.model, s.seq))
    inputs = tuple(dict.fromkeys((*sent[:3], *also)))
    whole = OperatorSpec(
        f"{prefix}attention",
        "attention",
        "TC+VC",
        inputs,
        b=pairs,
        m=seq_here,
        n=math.ceil(computed),
        k=s.head_width,
        flops=width * pairs * seq_here * keys,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        causal=causal,
    )
    attention = _in_a_ring(block, whole, sent)
    block.keep(f"{prefix}log-sum-exp", FLOAT_BYTES * s.heads * s.rows, attention, statistic=True)
    block.keep(f"{prefix}random-state", _RANDOM_STATE_BYTES, attention, statistic=True)
    return attention


def _keys_of_blocks(model: TransformerModel, seq: int) -> float:
    """Mean number of keys per query if the kernel of a causal window computes whole blocks."""
    block = min(model.attention_block, seq)
    if block == 1 or model.window is None or not model.causal:
        return 0.0
    starts = range(0, seq, block)
    met = sum(start // block - max(0, start - model.window + 1) // block + 1 for start in starts)
    return float(min(met * block * block / seq, seq))


def _in_a_ring(block: BlockBuilder, whole: OperatorSpec, sent: Exchanged) -> int:
    """Add attention: one operator, or for a ring two, during and after the transfer."""
    if sent.arriving is None:
        return block.add(whole)
    last = 1.0 / _widths(block)[1]

    def part(name: str, inputs: tuple[int, ...], share: float) -> int:
        keys = max(1, math.ceil(share * whole.n))
        flops, read = share * whole.flops, share * whole.read_bytes
        return block.add(
            replace(whole, name=name, inputs=inputs, n=keys, flops=flops, read_bytes=read)
        )

    name = whole.name.removesuffix("attention") + BESIDE_RING
    early = part(name, whole.inputs, 1.0 - last)
    return part(whole.name, (sent.query, sent.arriving, early), last)


def _explicit(block: BlockBuilder, prefix: str, q: int, k: int, v: int, causal: bool) -> int:
    """Add explicit attention: scores of all keys, also outside a window; softmax; mix of values."""
    s = block.shapes
    heads, seq_here = attention_shape(block)
    pairs, width = s.batch * heads, s.head_width
    shared = s.heads // s.kv_heads
    scores = block.product(f"{prefix}scores", q, k, pairs, seq_here, width, s.seq, shared)
    square = pairs * seq_here * s.seq
    if block.model.score_cap:
        scores = block.vector(
            f"{prefix}score-cap", "activation", (scores,), pairs * seq_here, s.seq
        )
        block.keep(f"{prefix}capped-scores", ELEMENT_BYTES * square, scores)
    if causal:
        block.keep(f"{prefix}causal-mask", seq_here * s.seq, scores, statistic=True)
    if pairs % block.model.softmax_multiple:
        weights = _softmax_steps(block, prefix, scores, pairs * seq_here)
    else:
        weights = block.vector(f"{prefix}softmax", "softmax", (scores,), pairs * seq_here, s.seq)
    block.keep(f"{prefix}weights", ELEMENT_BYTES * square, weights)
    if block.model.dropout:
        weights = block.vector(
            f"{prefix}score-dropout", "dropout", (weights,), pairs * seq_here, s.seq
        )
        block.keep(f"{prefix}score-dropout-mask", square, weights)
        block.keep(f"{prefix}dropped-weights", ELEMENT_BYTES * square, weights)
    return block.product(f"{prefix}mix", weights, v, pairs, seq_here, s.seq, width, shared)


def _softmax_steps(block: BlockBuilder, prefix: str, x: int, rows: int) -> int:
    """Add softmax as separate kernels (cast, scale, mask, softmax, cast), without a fused kernel.

    The softmax of fp32 scores is stored for its gradient.
    """
    elements = rows * block.shapes.seq
    for step, read, written in _SOFTMAX_STEPS:
        x = block.vector(
            f"{prefix}{step}",
            "softmax" if step == "softmax" else "multiply",
            (x,),
            rows,
            block.shapes.seq,
            function="softmax" if step == "softmax" else "copy",
            read_bytes=read * elements,
            write_bytes=written * elements,
        )
        if step == "softmax":
            block.keep(f"{prefix}fp32-weights", written * elements, x)
    return x


def _latent(block: BlockBuilder, latent: LatentAttention, prefix: str, x: int, causal: bool) -> int:
    """Add latent attention (DeepSeek-AI 2024, sec. 2.1); training computes full keys and values."""
    s, m = block.shapes, block.model
    rows, heads = s.rows, s.heads
    queries, values = heads * latent.query_width, heads * latent.value_width

    def projected(name: str, source: int, inner: int, width: int, bias: bool) -> int:
        parts = {name: width}
        return block.linear(f"{prefix}{name}", source, rows, inner, width, bias, targets=parts)

    if latent.query_rank is None:
        q = projected("q", x, m.hidden, queries, False)
    else:
        rank = latent.query_rank
        q = projected("q-down", x, m.hidden, rank, m.qkv_bias)
        q = block.norm_of(f"{prefix}q-norm", q, rows, rank)
        size = ELEMENT_BYTES * rows * rank
        block.keep(f"{prefix}q-latent", size, q, operand="only", by=("q-up",))
        q = projected("q-up", q, rank, queries, False)
    wide = latent.kv_rank + latent.rotary_width
    down = projected("kv-down", x, m.hidden, wide, m.qkv_bias)
    kv = block.norm_of(f"{prefix}kv-norm", down, rows, latent.kv_rank)
    size = ELEMENT_BYTES * rows * latent.kv_rank
    block.keep(f"{prefix}kv-latent", size, kv, operand="only", by=("kv-up",))
    columns = heads * (latent.plain_width + latent.value_width)
    kv = projected("kv-up", kv, latent.kv_rank, columns, False)
    turned = heads * latent.rotary_width
    q = block.vector(f"{prefix}rotate-q", "rotary", (q,), rows, turned)
    shared = block.vector(f"{prefix}rotate-k", "rotary", (down,), rows, latent.rotary_width)
    for name, width, maker in (("query", queries, q), ("key", queries, kv), ("value", values, kv)):
        block.keep(f"{prefix}{name}", ELEMENT_BYTES * rows * width, maker)
    own = [ELEMENT_BYTES * rows * width for width in (queries, queries + values, values)]
    sent = exchange(block, prefix, (q, kv, kv), own[0], own[1])
    read, written = (ELEMENT_BYTES * rows * width for width in (2 * queries + values, values))
    out = _flash(block, prefix, sent, causal, read, written, shared)
    block.keep(f"{prefix}context", written, out, operand="also")
    out = exchange_back(block, prefix, out, own[2])
    shape = (rows, values, m.hidden)
    return block.linear(f"{prefix}proj", out, *shape, m.out_bias, targets={"o": m.hidden})


# ---- context parallelism ----


RING, BESIDE_RING = "kv-ring", "attention-early"
"""Suffixes of the names of a ring's collective and of the attention that it overlaps."""


class Exchanged(NamedTuple):
    """Operators that attention reads, and the ring transfer that overlaps attention."""

    query: int
    key: int
    value: int
    arriving: int | None = None
    """The ring that delivers the other keys and values; None if all are local."""


def _widths(block: BlockBuilder) -> tuple[int, int]:
    """Devices per group that exchanges rows for heads, and groups; see `context_widths`."""
    return context_widths(block.strategy.cp_kind, block.strategy.cp)


def attention_shape(block: BlockBuilder) -> tuple[int, int]:
    """How many heads, and queries of each sequence, a device computes attention for."""
    s, (inside, groups) = block.shapes, _widths(block)
    return s.heads // inside, s.seq // groups


def exchange(
    block: BlockBuilder,
    prefix: str,
    own: tuple[int, int, int],
    query_bytes: float,
    kv_bytes: float,
) -> Exchanged:
    """Add the collectives that bring queries, keys and values together.

    Parameters
    ----------
    block
        Builder of the block.
    prefix
        Prefix of the operators' names.
    own
        Operators that produce queries, keys and values of a device's own rows.
    query_bytes, kv_bytes
        Bytes of the queries, and of the keys and values, of a device's own rows.
    """
    q, k, v = own
    inside, groups = _widths(block)
    if inside > 1:
        swap = ("all-to-all", query_bytes + kv_bytes, _group(block, "context-heads"))
        q = k = v = block.network(f"{prefix}heads-exchange", (q, k, v), swap, swap)
    if groups == 1:
        return Exchanged(q, k, v)
    if block.strategy.cp_kind == "all-gather":
        whole = block.gather(f"{prefix}kv", (k, v), kv_bytes * groups, "context")
        return Exchanged(q, whole, whole)
    ring = _group(block, "context-ring")
    to = ("all-gather", kv_bytes * groups, ring)
    back = ("reduce-scatter", 2.0 * kv_bytes * groups, ring)
    return Exchanged(q, k, v, block.network(f"{prefix}{RING}", (k, v), to, back))


def _group(block: BlockBuilder, part: str) -> str:
    """Return the context subgroup `part`, or ``context`` if one subgroup is the whole group."""
    return part if 1 not in _widths(block) else "context"


def exchange_back(block: BlockBuilder, prefix: str, context: int, query_bytes: float) -> int:
    """Add the collective that returns a device's own rows of all heads after attention."""
    if _widths(block)[0] == 1:
        return context
    swap = ("all-to-all", query_bytes, _group(block, "context-heads"))
    rows = block.network(f"{prefix}rows-exchange", context, swap, swap)
    block.keep(f"{prefix}context-rows", query_bytes, rows, by=("o",))
    return rows
