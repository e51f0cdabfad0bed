"""The operators of one feed-forward sub-layer on one device: dense, or a mixture of experts."""

from __future__ import annotations

from phaze_fast.models import MixtureOfExperts
from phaze_fast.opgraph.builder import ELEMENT_BYTES, BlockWriter, OperatorSpec

__all__ = ["experts", "experts_of_rows", "feed_forward", "own_experts"]

_GELU_STEPS = {"cube": 1, "scale": 1, "sum": 2, "widen": 1, "tanh": 1, "shift": 1, "halve": 1}
"""Operators of the tanh form of GELU before its last product, and the arrays that each reads."""


def feed_forward(w: BlockWriter, x: int) -> int:
    """Write the dense feed-forward: the first projections by columns, the last by rows."""
    return _dense(w, "", x, w.shapes.ffn)


def _dense(w: BlockWriter, prefix: str, x: int, width: int) -> int:
    s, m, builder = w.shapes, w.model, w.builder
    if m.gated and m.fused_gate:
        up = gate = builder.linear(f"{prefix}gate-up", x, s.rows, m.hidden, 2 * width, m.ffn_bias)
    else:
        up = builder.linear(f"{prefix}up", x, s.rows, m.hidden, width, m.ffn_bias)
        gate = -1
        if m.gated:
            gate = builder.linear(f"{prefix}gate", x, s.rows, m.hidden, width, m.ffn_bias)
    inner = _activate(w, prefix, up, gate, s.rows, width)
    return builder.linear(f"{prefix}down", inner, s.rows, width, m.hidden, m.ffn_bias)


def _activate(w: BlockWriter, prefix: str, up: int, gate: int, rows: int, width: int) -> int:
    """Non-linearity and gate; ReLU's gradient needs its output only."""
    m, builder = w.model, w.builder
    size = ELEMENT_BYTES * rows * width
    bent = gate if m.gated else up
    if m.activation != "relu":
        builder.keep(f"{prefix}activation-input", size, bent)
    if m.gelu_by_steps and m.activation == "gelu":
        bent = _gelu_steps(w, prefix, bent, rows, width)
    active = builder.vector(
        f"{prefix}activation", "activation", (bent,), rows, width, function=m.activation
    )
    relu = m.activation == "relu"
    if not m.gated:
        builder.keep(f"{prefix}activation-output", size, active, operand="also" if relu else "only")
        return active
    if not m.fused_activation:
        builder.keep(f"{prefix}activation-output", size, active)
    builder.keep(f"{prefix}up-output", size, up)
    gated = builder.vector(f"{prefix}multiply", "multiply", (active, up), rows, width, reads=2)
    builder.keep(f"{prefix}gated", size, gated, operand="only")
    return gated


def _gelu_steps(w: BlockWriter, prefix: str, x: int, rows: int, width: int) -> int:
    """Cube, scale, add, scale, tanh, add, halve: all but the last product of GELU.

    What the gradients of cube, tanh and the two products need is kept.
    """
    size = ELEMENT_BYTES * rows * width
    for step, reads in _GELU_STEPS.items():
        x = w.builder.vector(f"{prefix}gelu-{step}", "multiply", (x,), rows, width, reads)
        if step in ("tanh", "halve"):
            w.builder.keep(f"{prefix}gelu-{step}", size, x)
    w.builder.keep(f"{prefix}gelu-sum", size, x)
    return x


def own_experts(w: BlockWriter) -> bool:
    """Whether experts are split over fewer devices than all else."""
    return w.strategy.expert_width < w.strategy.tp


def experts(w: BlockWriter, x: int) -> int:
    """Router, dispatch, experts, combine, of all rows, in a tensor-parallel region."""
    s, moe = w.shapes, _mixture(w)
    out = _routed(w, moe, x, s.rows)
    return _shared(w, moe, x, out) if moe.shared_width else out


def experts_of_rows(w: BlockWriter, x: int) -> int:
    """Write the same where each part of a tensor group sends its own share of the rows.

    What every token visits is in a tensor-parallel region of its own.
    """
    moe, rows = _mixture(w), w.shapes.rows // w.strategy.expert_parts
    out = _routed(w, moe, w.enter_experts("experts", x, rows), rows)
    out = w.leave_experts("experts", out, rows)
    if not moe.shared_width:
        return out
    shared = w.leave("ffn", _visited_by_all(w, moe, w.enter("ffn", x)))
    return w.builder.vector(
        "shared-sum", "residual", (out, shared), w.shapes.split_rows, w.model.hidden, reads=2
    )


def _mixture(w: BlockWriter) -> MixtureOfExperts:
    if w.model.moe is None:
        raise AssertionError("a moe-block needs a model with experts")
    return w.model.moe


def _routed(w: BlockWriter, moe: MixtureOfExperts, x: int, own_rows: int) -> int:
    """Router, dispatch, experts, combine. Tokens spread evenly but for `expert_imbalance`."""
    m, builder = w.model, w.builder
    ep = w.strategy.ep
    router = builder.linear("router", x, own_rows, m.hidden, moe.experts, bias=moe.router_bias)
    factor = 1.0 if moe.capacity_factor is None else moe.capacity_factor
    routed = max(1, int(own_rows * moe.top_k * factor))  # an expert has room for a token or more
    sent = -(-routed // moe.experts) * moe.experts
    # What the busiest device gets; no more than all there is. A capacity is the same for all.
    busy = min(w.strategy.expert_imbalance, ep) if moe.capacity_factor is None else 1.0
    payload = busy * ELEMENT_BYTES * sent * m.hidden
    exchange = ("all-to-all", payload, "expert") if ep > 1 else None
    local, rows = moe.experts // ep, -int(-busy * (sent // moe.experts * ep) // 1)
    sorts = moe.moves > 1 and local > 1 and ep > 1
    if moe.moves:
        x = _moved(w, "permute", (x, router), own_rows, sent)
    dispatched = builder.network("dispatch", x, exchange, exchange, after=(router,))
    if sorts:
        dispatched = _moved(w, "sort", (dispatched,), local * rows, local * rows)
    width = moe.expert_ffn // w.strategy.expert_width
    builder.keep("dispatched", ELEMENT_BYTES * local * rows * m.hidden, dispatched, operand="only")
    # Tiles with rows of two experts are computed for both; those that a capacity fills are whole.
    more = moe.tile_rows if moe.capacity_factor is None and local > 1 else 0
    up = builder.grouped_linear("expert-up", dispatched, local, rows, m.hidden, width, more)
    gate = -1
    if m.gated:
        gate = builder.grouped_linear("expert-gate", dispatched, local, rows, m.hidden, width, more)
    inner = _activate(w, "expert-", up, gate, local * rows, width)
    down = builder.grouped_linear("expert-down", inner, local, rows, width, m.hidden, more)
    if sorts:
        down = _moved(w, "unsort", (down,), local * rows, local * rows)
    combined = builder.network("combine", down, exchange, exchange)
    out = builder.vector("weigh", "multiply", (combined, router), sent, m.hidden)
    builder.keep("expert-output", ELEMENT_BYTES * sent * m.hidden, combined)
    return out


def _moved(w: BlockWriter, name: str, inputs: tuple[int, ...], read: int, written: int) -> int:
    """Copy rows in another order; each that is read may be written several times."""
    size = ELEMENT_BYTES * w.model.hidden
    return w.builder.custom(
        OperatorSpec(
            name,
            "multiply",
            "VC",
            inputs,
            m=written,
            n=w.model.hidden,
            read_bytes=float(size * read),
            write_bytes=float(size * written),
            function="copy",
        )
    )


def _shared(w: BlockWriter, moe: MixtureOfExperts, x: int, out: int) -> int:
    """Add what every token visits to what the routed experts give."""
    s, m, shared = w.shapes, w.model, _visited_by_all(w, moe, x)
    return w.builder.vector("shared-sum", "residual", (out, shared), s.rows, m.hidden, reads=2)


def _visited_by_all(w: BlockWriter, moe: MixtureOfExperts, x: int) -> int:
    s, m, builder = w.shapes, w.model, w.builder
    shared = _dense(w, "shared-", x, moe.shared_width // w.strategy.tp)
    if moe.shared_gate:
        weight = builder.linear("shared-router", x, s.rows, m.hidden, 1, bias=False)
        builder.keep("shared-output", ELEMENT_BYTES * s.rows * m.hidden, shared)
        shared = builder.vector("shared-weigh", "multiply", (shared, weight), s.rows, m.hidden)
    return shared
