"""The operators of one feed-forward sub-layer on one device: dense, or a mixture of experts."""

from __future__ import annotations

from phaze_fast.models import MixtureOfExperts
from phaze_fast.opgraph.builder import ELEMENT_BYTES
from phaze_fast.opgraph.writer import BlockWriter

__all__ = ["experts", "feed_forward"]

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


def experts(w: BlockWriter, x: int) -> int:
    """Router, dispatch, experts, combine. Tokens are taken to spread evenly."""
    s, m, builder = w.shapes, w.model, w.builder
    moe = m.moe
    if moe is None:
        raise AssertionError("a moe-block needs a model with experts")
    ep, t = w.strategy.expert_parallel, w.strategy.tensor_parallel
    router = builder.linear("router", x, s.rows, m.hidden, moe.experts, bias=moe.router_bias)
    factor = 1.0 if moe.capacity_factor is None else moe.capacity_factor
    routed = max(1, int(s.rows * moe.top_k * factor))  # an expert has room for one token or more
    sent = -(-routed // moe.experts) * moe.experts
    payload = float(ELEMENT_BYTES * sent * m.hidden)
    exchange = ("all-to-all", payload, "expert") if ep > 1 else None
    dispatched = builder.network("dispatch", x, exchange, exchange, after=(router,))
    local, rows = moe.experts // ep, sent // moe.experts * ep
    width = moe.expert_ffn // t
    builder.keep("dispatched", ELEMENT_BYTES * local * rows * m.hidden, dispatched, operand="only")
    up = builder.grouped_linear("expert-up", dispatched, local, rows, m.hidden, width)
    gate = -1
    if m.gated:
        gate = builder.grouped_linear("expert-gate", dispatched, local, rows, m.hidden, width)
    inner = _activate(w, "expert-", up, gate, local * rows, width)
    down = builder.grouped_linear("expert-down", inner, local, rows, width, m.hidden)
    combined = builder.network("combine", down, exchange, exchange)
    out = builder.vector("weigh", "multiply", (combined, router), sent, m.hidden)
    builder.keep("expert-output", ELEMENT_BYTES * sent * m.hidden, combined)
    return _shared(w, moe, x, out) if moe.shared_width else out


def _shared(w: BlockWriter, moe: MixtureOfExperts, x: int, out: int) -> int:
    """Add what every token visits to what the routed experts give."""
    s, m, builder = w.shapes, w.model, w.builder
    shared = _dense(w, "shared-", x, moe.shared_width // w.strategy.tensor_parallel)
    if moe.shared_gate:
        weight = builder.linear("shared-router", x, s.rows, m.hidden, 1, bias=False)
        builder.keep("shared-output", ELEMENT_BYTES * s.rows * m.hidden, shared)
        shared = builder.vector("shared-weigh", "multiply", (shared, weight), s.rows, m.hidden)
    return builder.vector("shared-sum", "residual", (out, shared), s.rows, m.hidden, reads=2)
