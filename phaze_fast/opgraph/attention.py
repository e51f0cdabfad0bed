"""The operators of one attention sub-layer on one device.

Projections are split by columns, the output projection by rows, heads over devices, as Megatron-LM
does it. In latent attention the projections down to the narrow vectors are whole on every device
and those up from them are split by heads. The devices of a context-parallel group exchange

- all-gather: keys and values of all tokens before attention, once more in the backward pass, whose
  gradients are reduced and scattered (Llama 3: Grattafiori et al. 2024, section 3.3.2)
- ring: keys and values go round while attention works on those that are there; the backward pass
  sends them round again with their gradients (Liu et al. 2023, arXiv:2310.01889). Of n steps, each
  an attention a and a transfer c, the first has its own keys: n a, or (n - 1) c + a if that is
  longer. Two operators say the same: (n - 1) a during (n - 1) c, then a. Only the part of a
  transfer that outlasts the attention it overlaps takes time.
- ulysses: rows of all heads for all rows of some heads, and back (Jacobs et al. 2023,
  arXiv:2309.14509)
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from phaze_fast.models import LatentAttention, TransformerModel
from phaze_fast.models.flops import visible_keys
from phaze_fast.opgraph.builder import ELEMENT_BYTES, FLOAT_BYTES, BlockBuilder, OperatorSpec

_RANDOM_STATE_BYTES = 1024  # seed and offset of a fused kernel, each in an allocation of its own
_SOFTMAX_STEPS = (
    ("scores-to-fp32", ELEMENT_BYTES, FLOAT_BYTES),
    ("score-scale", FLOAT_BYTES, FLOAT_BYTES),
    ("score-mask", FLOAT_BYTES, FLOAT_BYTES),
    ("softmax", FLOAT_BYTES, FLOAT_BYTES),
    ("weights-from-fp32", FLOAT_BYTES, ELEMENT_BYTES),
)
"""Kernels of a softmax that is not fused; bytes of an element that each reads and writes."""


def attend(block: BlockBuilder, prefix: str, x: int, memory: int, causal: bool) -> int:
    """Add attention of x to a memory, which is x itself except in cross-attention."""
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
    sent = exchange(block, prefix, (q, k, v), float(query_bytes), 2.0 * kv_bytes)
    if m.attention == "flash":
        read = ELEMENT_BYTES * s.rows * (s.query_width + 2 * s.kv_width)
        out = _flash(block, prefix, sent, causal, read, query_bytes)
    else:
        out = _explicit(block, prefix, *sent[:3], causal)
    block.keep(f"{prefix}context", query_bytes, out, operand="also")
    out = exchange_back(block, prefix, out, float(query_bytes))
    return block.linear(f"{prefix}proj", out, s.rows, s.query_width, m.hidden, m.out_bias)


def _projections(block: BlockBuilder, prefix: str, x: int, memory: int) -> tuple[int, int, int]:
    """Q of x, and K and V of the memory it attends to."""
    s, m = block.shapes, block.model
    bias = m.qkv_bias
    if m.fused_qkv and x == memory:
        width = s.query_width + 2 * s.kv_width
        qkv = block.linear(f"{prefix}qkv", x, s.rows, m.hidden, width, bias)
        return qkv, qkv, qkv
    return (
        block.linear(f"{prefix}q", x, s.rows, m.hidden, s.query_width, bias),
        block.linear(f"{prefix}k", memory, s.rows, m.hidden, s.kv_width, bias),
        block.linear(f"{prefix}v", memory, s.rows, m.hidden, s.kv_width, bias),
    )


def _normed(block: BlockBuilder, name: str, x: int, width: int, heads: int) -> int:
    """Norm of queries or keys: of each head, or over all heads, whose sums devices then add."""
    rows = block.shapes.rows
    if block.model.qk_norm == "head":
        return block.norm_of(name, x, rows * heads, width // heads)
    if block.strategy.tp > 1:
        sums = ("all-reduce", float(FLOAT_BYTES * rows), "tensor")
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
    """Fused attention. Within a window, each query meets the mean number of keys it sees.

    It reads what `sent` names, and the operators of `also`.
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
        n=-int(-computed // 1),
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
    """Keys that a query meets in the mean where a causal window's kernel works on whole blocks."""
    block = min(model.attention_block, seq)
    if block == 1 or model.window is None or not model.causal:
        return 0.0
    starts = range(0, seq, block)
    met = sum(start // block - max(0, start - model.window + 1) // block + 1 for start in starts)
    return float(min(met * block * block / seq, seq))


def _in_a_ring(block: BlockBuilder, whole: OperatorSpec, sent: Exchanged) -> int:
    """Add attention: at once, or in a ring while keys arrive and after the last have arrived."""
    if sent.arriving is None:
        return block.add(whole)
    last = 1.0 / block.strategy.cp

    def part(name: str, inputs: tuple[int, ...], share: float) -> int:
        keys = max(1, -int(-share * whole.n // 1))
        flops, read = share * whole.flops, share * whole.read_bytes
        return block.add(
            replace(whole, name=name, inputs=inputs, n=keys, flops=flops, read_bytes=read)
        )

    name = whole.name.removesuffix("attention") + BESIDE_RING
    early = part(name, whole.inputs, 1.0 - last)
    return part(whole.name, (sent.query, sent.arriving, early), last)


def _explicit(block: BlockBuilder, prefix: str, q: int, k: int, v: int, causal: bool) -> int:
    """Scores, softmax and mix one after another; a window masks scores and saves nothing."""
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
    """Cast to fp32, scale, mask, softmax, cast back: what runs where a fused kernel cannot.

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
            read_bytes=float(read * elements),
            write_bytes=float(written * elements),
        )
        if step == "softmax":
            block.keep(f"{prefix}fp32-weights", written * elements, x)
    return x


def _latent(block: BlockBuilder, latent: LatentAttention, prefix: str, x: int, causal: bool) -> int:
    """Latent attention (DeepSeek-AI 2024, section 2.1), keys and values made whole for training."""
    s, m = block.shapes, block.model
    rows, heads = s.rows, s.heads
    queries, values = heads * latent.query_width, heads * latent.value_width
    if latent.query_rank is None:
        q = block.linear(f"{prefix}q", x, rows, m.hidden, queries, bias=False)
    else:
        rank = latent.query_rank
        q = block.linear(f"{prefix}q-down", x, rows, m.hidden, rank, m.qkv_bias)
        q = block.norm_of(f"{prefix}q-norm", q, rows, rank)
        block.keep(f"{prefix}q-latent", ELEMENT_BYTES * rows * rank, q, operand="only")
        q = block.linear(f"{prefix}q-up", q, rows, rank, queries, bias=False)
    wide = latent.kv_rank + latent.rotary_width
    down = block.linear(f"{prefix}kv-down", x, rows, m.hidden, wide, m.qkv_bias)
    kv = block.norm_of(f"{prefix}kv-norm", down, rows, latent.kv_rank)
    block.keep(f"{prefix}kv-latent", ELEMENT_BYTES * rows * latent.kv_rank, kv, operand="only")
    columns = heads * (latent.plain_width + latent.value_width)
    kv = block.linear(f"{prefix}kv-up", kv, rows, latent.kv_rank, columns, bias=False)
    turned = heads * latent.rotary_width
    q = block.vector(f"{prefix}rotate-q", "rotary", (q,), rows, turned)
    shared = block.vector(f"{prefix}rotate-k", "rotary", (down,), rows, latent.rotary_width)
    for name, width, maker in (("query", queries, q), ("key", queries, kv), ("value", values, kv)):
        block.keep(f"{prefix}{name}", ELEMENT_BYTES * rows * width, maker)
    own = [float(ELEMENT_BYTES * rows * width) for width in (queries, queries + values, values)]
    sent = exchange(block, prefix, (q, kv, kv), own[0], own[1])
    read, written = (ELEMENT_BYTES * rows * width for width in (2 * queries + values, values))
    out = _flash(block, prefix, sent, causal, read, written, shared)
    block.keep(f"{prefix}context", written, out, operand="also")
    out = exchange_back(block, prefix, out, own[2])
    return block.linear(f"{prefix}proj", out, rows, values, m.hidden, m.out_bias)


# ---- context parallelism ----


RING, BESIDE_RING = "kv-ring", "attention-early"
"""Suffixes of the names of a ring's collective and of the attention that it overlaps."""


class Exchanged(NamedTuple):
    """Operators that attention reads, and the ring that runs while attention works."""

    query: int
    key: int
    value: int
    arriving: int | None = None
    """The ring that delivers the other keys and values; None if all are local."""


def _kind(block: BlockBuilder) -> str:
    return block.strategy.cp_kind if block.strategy.cp > 1 else "none"


def attention_shape(block: BlockBuilder) -> tuple[int, int]:
    """Heads and queries of each sequence that a device attends with."""
    s, cp = block.shapes, block.strategy.cp
    if _kind(block) == "ulysses":
        return s.heads // cp, s.seq
    return s.heads, s.seq // cp


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
        Bytes of its own queries; bytes of its own keys and values.
    """
    q, k, v = own
    width, kind = block.strategy.cp, _kind(block)
    if kind == "none":
        return Exchanged(q, k, v)
    if kind == "ulysses":
        swap = ("all-to-all", query_bytes + kv_bytes, "context")
        all_rows = block.network(f"{prefix}heads-exchange", (q, k, v), swap, swap)
        return Exchanged(all_rows, all_rows, all_rows)
    if kind == "ring":
        to = ("all-gather", kv_bytes * width, "context")
        back = ("reduce-scatter", 2.0 * kv_bytes * width, "context")
        return Exchanged(q, k, v, block.network(f"{prefix}{RING}", (k, v), to, back))
    whole = block.gather(f"{prefix}kv", (k, v), kv_bytes * width, "context")
    return Exchanged(q, whole, whole)


def exchange_back(block: BlockBuilder, prefix: str, context: int, query_bytes: float) -> int:
    """Add the collective that returns a device's own rows of all heads after attention."""
    if _kind(block) != "ulysses":
        return context
    swap = ("all-to-all", query_bytes, "context")
    rows = block.network(f"{prefix}rows-exchange", context, swap, swap)
    block.keep(f"{prefix}context-rows", query_bytes, rows)
    return rows
