"""The operators of one feed-forward sub-layer on one device: dense, or a mixture of experts."""

from __future__ import annotations

from phaze_fast.models import MixtureOfExperts
from phaze_fast.opgraph.builder import ELEMENT_BYTES, BlockBuilder

_GELU_STEPS = {"cube": 1, "scale": 1, "sum": 2, "widen": 1, "tanh": 1, "shift": 1, "halve": 1}
"""Operators of the tanh form of GELU before its last product, and the arrays that each reads."""


def feed_forward(block: BlockBuilder, x: int) -> int:
    """Write the dense feed-forward: the first projections by columns, the last by rows."""
    return _dense(block, "", x, block.shapes.ffn)


def _dense(block: BlockBuilder, prefix: str, x: int, width: int) -> int:
    s, m = block.shapes, block.model
    if m.gated and m.fused_gate:
        up = gate = block.linear(f"{prefix}gate-up", x, s.rows, m.hidden, 2 * width, m.ffn_bias)
    else:
        up = block.linear(f"{prefix}up", x, s.rows, m.hidden, width, m.ffn_bias)
        gate = -1
        if m.gated:
            gate = block.linear(f"{prefix}gate", x, s.rows, m.hidden, width, m.ffn_bias)
    inner = _activate(block, prefix, up, gate, s.rows, width)
    return block.linear(f"{prefix}down", inner, s.rows, width, m.hidden, m.ffn_bias)


def _activate(block: BlockBuilder, prefix: str, up: int, gate: int, rows: int, width: int) -> int:
    """Non-linearity and gate; ReLU's gradient needs its output only."""
    m = block.model
    size = ELEMENT_BYTES * rows * width
    bent = gate if m.gated else up
    if m.activation != "relu":
        block.keep(f"{prefix}activation-input", size, bent)
    if m.gelu_by_steps and m.activation == "gelu":
        bent = _gelu_steps(block, prefix, bent, rows, width)
    active = block.vector(
        f"{prefix}activation", "activation", (bent,), rows, width, function=m.activation
    )
    relu = m.activation == "relu"
    if not m.gated:
        block.keep(f"{prefix}activation-output", size, active, operand="also" if relu else "only")
        return active
    if not m.fused_activation:
        block.keep(f"{prefix}activation-output", size, active)
    block.keep(f"{prefix}up-output", size, up)
    gated = block.vector(f"{prefix}multiply", "multiply", (active, up), rows, width, reads=2)
    block.keep(f"{prefix}gated", size, gated, operand="only")
    return gated


def _gelu_steps(block: BlockBuilder, prefix: str, x: int, rows: int, width: int) -> int:
    """Cube, scale, add, scale, tanh, add, halve: all but the last product of GELU.

    Tensors that the gradients of cube, tanh and the two products need are stored.
    """
    size = ELEMENT_BYTES * rows * width
    for step, reads in _GELU_STEPS.items():
        x = block.vector(f"{prefix}gelu-{step}", "multiply", (x,), rows, width, reads)
        if step in ("tanh", "halve"):
            block.keep(f"{prefix}gelu-{step}", size, x)
    block.keep(f"{prefix}gelu-sum", size, x)
    return x


def own_experts(block: BlockBuilder) -> bool:
    """Whether experts are split over fewer devices than other operators."""
    return block.strategy.expert_width < block.strategy.tp


def experts(block: BlockBuilder, x: int) -> int:
    """Router, dispatch, experts, combine, of all rows, in a tensor-parallel region."""
    rows, moe = block.shapes.rows, _mixture(block)
    out = _routed(block, moe, x, rows)
    if not moe.shared_width:
        return out
    return _summed(block, out, _visited_by_all(block, moe, x), rows)


def experts_of_rows(block: BlockBuilder, x: int) -> int:
    """Write the same where each part of a tensor group sends its own share of the rows.

    Shared experts are in a separate tensor-parallel region.
    """
    moe, rows = _mixture(block), block.shapes.rows // block.strategy.expert_parts
    if block.strategy.expert_width == 1:
        out = _routed(block, moe, x, rows)
    else:  # devices that share an expert hold different columns of it
        size = ELEMENT_BYTES * rows * block.model.hidden
        entered = block.gather("experts", x, size, "expert-tensor")
        out = _routed(block, moe, entered, rows)
        out = block.scatter("experts", out, size, "expert-tensor")
    if not moe.shared_width:
        return out
    shared = block.leave("ffn", _visited_by_all(block, moe, block.enter("ffn", x)))
    return _summed(block, out, shared, block.shapes.split_rows)


def _mixture(block: BlockBuilder) -> MixtureOfExperts:
    if block.model.moe is None:
        raise AssertionError("a moe-block needs a model with experts")
    return block.model.moe


def _routed(block: BlockBuilder, moe: MixtureOfExperts, x: int, own_rows: int) -> int:
    """Add router, dispatch, experts and combine. Tokens spread evenly up to `expert_imbalance`."""
    m = block.model
    ep = block.strategy.ep
    router = block.linear("router", x, own_rows, m.hidden, moe.experts, bias=moe.router_bias)
    factor = 1.0 if moe.capacity_factor is None else moe.capacity_factor
    routed = max(1, int(own_rows * moe.top_k * factor))  # an expert takes at least one token
    sent = -(-routed // moe.experts) * moe.experts
    # Rows of the busiest device, at most all rows. A capacity is the same for all devices.
    busy = min(block.strategy.expert_imbalance, ep) if moe.capacity_factor is None else 1.0
    payload = busy * ELEMENT_BYTES * sent * m.hidden
    exchange = ("all-to-all", payload, "expert") if ep > 1 else None
    local, rows = moe.experts // ep, -int(-busy * (sent // moe.experts * ep) // 1)
    sorts = moe.moves > 1 and local > 1 and ep > 1
    if moe.moves:
        x = _moved(block, "permute", (x, router), own_rows, sent)
    dispatched = block.network("dispatch", x, exchange, exchange, after=(router,))
    if sorts:
        dispatched = _moved(block, "sort", (dispatched,), local * rows, local * rows)
    width = moe.expert_ffn // block.strategy.expert_width
    block.keep("dispatched", ELEMENT_BYTES * local * rows * m.hidden, dispatched, operand="only")
    # Tiles with rows of two experts are computed for both; those that a capacity fills are whole.
    more = moe.tile_rows if moe.capacity_factor is None and local > 1 else 0
    up = block.grouped_linear("expert-up", dispatched, local, rows, m.hidden, width, more)
    gate = -1
    if m.gated:
        gate = block.grouped_linear("expert-gate", dispatched, local, rows, m.hidden, width, more)
    inner = _activate(block, "expert-", up, gate, local * rows, width)
    down = block.grouped_linear("expert-down", inner, local, rows, width, m.hidden, more)
    if sorts:
        down = _moved(block, "unsort", (down,), local * rows, local * rows)
    combined = block.network("combine", down, exchange, exchange)
    out = block.vector("weigh", "multiply", (combined, router), sent, m.hidden)
    block.keep("expert-output", ELEMENT_BYTES * sent * m.hidden, combined)
    return out


def _moved(block: BlockBuilder, name: str, inputs: tuple[int, ...], read: int, written: int) -> int:
    """Copy rows in another order; each row may be written several times."""
    hidden = block.model.hidden
    read_bytes = float(ELEMENT_BYTES * hidden * read)
    return block.vector(
        name, "multiply", inputs, written, hidden, function="copy", read_bytes=read_bytes
    )


def _summed(block: BlockBuilder, routed: int, shared: int, rows: int) -> int:
    """Add the output of the shared experts to that of the routed experts."""
    both, hidden = (routed, shared), block.model.hidden
    return block.vector("shared-sum", "residual", both, rows, hidden, reads=2)


def _visited_by_all(block: BlockBuilder, moe: MixtureOfExperts, x: int) -> int:
    s, m = block.shapes, block.model
    shared = _dense(block, "shared-", x, moe.shared_width // block.strategy.tp)
    if moe.shared_gate:
        weight = block.linear("shared-router", x, s.rows, m.hidden, 1, bias=False)
        block.keep("shared-output", ELEMENT_BYTES * s.rows * m.hidden, shared)
        shared = block.vector("shared-weigh", "multiply", (shared, weight), s.rows, m.hidden)
    return shared
