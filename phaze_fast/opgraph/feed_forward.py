"""The operators of one feed-forward sub-layer on one device: dense, or a mixture of experts."""

from __future__ import annotations

import math

from phaze_fast.models import MixtureOfExperts
from phaze_fast.opgraph.builder import ELEMENT_BYTES, BlockBuilder

_ROUTED_BYTES = 3
"""Bytes gathered per row and expert: whether the router chose the expert (1), its weight (2)."""
_TILE_ROWS = 128
"""Rows of an output tile of grouped products, as CUTLASS and cuBLAS use on NVIDIA's chips."""
_BIAS_BYTES = 14
"""Bytes read, and as many written, per element of the experts' outputs where separate kernels add
the biases: router weight times bias, its sum with the output, the array of all experts' sums (fp32,
4 bytes each) and the cast of that array (2)."""


def feed_forward(block: BlockBuilder, x: int) -> int:
    """Add a dense feed-forward: its first projections are split by columns, its last by rows."""
    return _dense(block, "", x, block.shapes.ffn)


def _dense(block: BlockBuilder, prefix: str, x: int, width: int) -> int:
    s, m = block.shapes, block.model

    def projected(name: str, columns: int, parts: dict[str, int]) -> int:
        shape = (s.rows, m.hidden, columns)
        return block.linear(f"{prefix}{name}", x, *shape, m.ffn_bias, targets=parts)

    if m.gated and m.fused_gate:
        up = gate = projected(
            "gate-up", 2 * width, {"gate-up": 2 * width, "up": width, "gate": width}
        )
    else:
        up = projected("up", width, {"up": width})
        gate = projected("gate", width, {"gate": width}) if m.gated else -1
    inner = _activate(block, prefix, up, gate, s.rows, width)
    shape = (s.rows, width, m.hidden)
    return block.linear(f"{prefix}down", inner, *shape, m.ffn_bias, targets={"down": m.hidden})


def _activate(block: BlockBuilder, prefix: str, up: int, gate: int, rows: int, width: int) -> int:
    """Add activation function and gate; the gradient of ReLU needs only ReLU's output."""
    m = block.model
    size = ELEMENT_BYTES * rows * width
    bent = gate if m.gated else up
    if m.activation != "relu":
        block.keep(f"{prefix}activation-input", size, bent)
    active = block.vector(
        f"{prefix}activation", "activation", (bent,), rows, width, function=m.activation
    )
    only = ("experts",) if prefix == "expert-" else ("down",)
    if not m.gated and m.activation == "relu":
        block.keep(f"{prefix}activation-output", size, active, operand="also")
        return active
    if not m.gated:
        block.keep(f"{prefix}activation-output", size, active, operand="only", by=only)
        return active
    if not m.fused_activation:
        block.keep(f"{prefix}activation-output", size, active)
    block.keep(f"{prefix}up-output", size, up)
    gated = block.vector(f"{prefix}multiply", "multiply", (active, up), rows, width, reads=2)
    block.keep(f"{prefix}gated", size, gated, operand="only", by=only)
    return gated


def experts(block: BlockBuilder, x: int) -> int:
    """Add router, dispatch, experts and combine for all rows, inside a tensor-parallel region."""
    rows, moe = block.shapes.rows, _mixture(block)
    out = _routed(block, moe, x, rows)
    if not moe.shared_width:
        return out
    return _summed(block, out, _visited_by_all(block, moe, x), rows)


def experts_of_rows(block: BlockBuilder, x: int) -> int:
    """Add experts (see `experts`) where each device sends its own rows.

    Shared experts are in a separate tensor-parallel region.
    """
    moe = _mixture(block)
    out = _routed(block, moe, x, block.shapes.split_rows)
    if not moe.shared_width:
        return out
    shared = block.leave("ffn", _visited_by_all(block, moe, block.enter("ffn", x)))
    return _summed(block, out, shared, block.shapes.split_rows)


def _mixture(block: BlockBuilder) -> MixtureOfExperts:
    if block.model.moe is None:
        raise AssertionError("a moe-block needs a model with experts")
    return block.model.moe


def _routed(block: BlockBuilder, moe: MixtureOfExperts, x: int, own_rows: int) -> int:
    """Add router, dispatch, experts and combine; `expert_imbalance` sets the busiest device's load.

    Rows move as in Megatron-Core. MoEAlltoAllTokenDispatcher: an all-to-all among the devices with
    different experts, then an all-gather among those that share each expert if they sent different
    rows; back by a reduce-scatter and an all-to-all. MoEAllGatherTokenDispatcher: all these devices
    gather all their rows, and a reduce-scatter adds up the weighted outputs.
    """
    m, ep = block.model, block.strategy.ep
    sharing = block.strategy.expert_width if block.strategy.own_rows else 1
    router = block.linear("router", x, own_rows, m.hidden, moe.experts, bias=moe.router_bias)
    factor = 1.0 if moe.capacity_factor is None else moe.capacity_factor
    routed = max(1, math.trunc(own_rows * moe.top_k * factor))  # at least one token is routed
    sent = -(-routed // moe.experts) * moe.experts
    # Rows of the busiest device, at most all rows; with a capacity, all devices have equally many.
    load = block.strategy.with_load(m).expert_imbalance or 1.0
    busy = min(load, ep) if moe.capacity_factor is None else 1.0
    payload = busy * ELEMENT_BYTES * sent * m.hidden
    exchange = ("all-to-all", payload, "expert") if ep > 1 else None
    gathers = ep > 1 and block.strategy.dispatcher == "all-gather"
    local, even = moe.experts // ep, sent // moe.experts * ep * sharing
    held = local * math.ceil(busy * even)  # rows of the busiest device
    # Rows of products per expert on the busiest device: the excess over an even load is rounded to
    # the nearest whole tile. Rounded up, a single row beyond a full tile would cost each expert a
    # tile, which is too much as the loads of a device's experts differ.
    rows = even + _TILE_ROWS * round((busy - 1.0) * even / _TILE_ROWS)
    shared = ELEMENT_BYTES * held * m.hidden
    sorts = moe.moves > 1 and local > 1 and ep > 1
    if moe.moves:
        x = _moved(block, "permute", (x, router), own_rows, sent)
    if gathers:
        dispatched = _gathered(block, moe, x, router, own_rows)
    else:
        dispatched = block.network("dispatch", x, exchange, exchange, after=(router,))
    if sharing > 1 and not gathers:
        dispatched = block.gather("experts", dispatched, shared, "expert-tensor", regather=False)
    if sorts:
        dispatched = _moved(block, "sort", (dispatched,), held, held)
    width = moe.expert_ffn // block.strategy.expert_width
    size = ELEMENT_BYTES * held * m.hidden
    block.keep("dispatched", size, dispatched, operand="only", by=("experts",))
    # A tile with rows of two experts is computed twice; with a capacity there are no such tiles.
    more = moe.tile_rows if moe.capacity_factor is None and local > 1 else 0

    def grouped(name: str, x: int, inner: int, cols: int) -> int:
        parts = {"experts": cols}
        return block.linear(name, x, rows, inner, cols, targets=parts, count=local, more=more)

    up = grouped("expert-up", dispatched, m.hidden, width)
    gate = grouped("expert-gate", dispatched, m.hidden, width) if m.gated else -1
    inner = _activate(block, "expert-", up, gate, held, width)
    down = grouped("expert-down", inner, width, m.hidden)
    if moe.bias_unfused:
        sizes = (held, m.hidden, 1, "copy", *(_BIAS_BYTES * held * m.hidden,) * 2)
        down = block.vector("expert-bias", "multiply", (down,), *sizes)
    if sorts:
        down = _moved(block, "unsort", (down,), held, held)
    if gathers:
        return _scattered(block, down, router, own_rows, held)
    if sharing > 1:
        down = block.scatter("experts", down, shared, "expert-tensor")
    combined = block.network("combine", down, exchange, exchange)
    out = block.vector("weigh", "multiply", (combined, router), sent, m.hidden)
    block.keep("expert-output", ELEMENT_BYTES * sent * m.hidden, combined)
    return out


def _gathered(
    block: BlockBuilder, moe: MixtureOfExperts, x: int, router: int, own_rows: int
) -> int:
    """Gather rows, and the router's choices, of all devices that have one copy of the experts."""
    rows = own_rows * block.strategy.expert_devices
    size = ELEMENT_BYTES * rows * block.model.hidden
    routed, weights = (rows * moe.experts * each for each in (_ROUTED_BYTES, ELEMENT_BYTES))
    to = ("all-gather", size + routed, "expert-mesh")
    back = ("reduce-scatter", size + weights, "expert-mesh")
    return block.network("dispatch", x, to, back, after=(router,))


def _scattered(block: BlockBuilder, down: int, router: int, own_rows: int, held: int) -> int:
    """Weigh the outputs of a device's experts, then reduce and scatter the rows of all devices."""
    hidden, whole = block.model.hidden, own_rows * block.strategy.expert_devices
    block.keep("expert-output", ELEMENT_BYTES * held * hidden, down)
    weighed = block.vector("weigh", "multiply", (down, router), held, hidden)
    size = ELEMENT_BYTES * whole * hidden
    to, back = (("reduce-scatter", size, "expert-mesh"), ("all-gather", size, "expert-mesh"))
    return block.network("combine", weighed, to, back)


def _moved(block: BlockBuilder, name: str, inputs: tuple[int, ...], read: int, written: int) -> int:
    """Add the copy of `read` rows into another order, as `written` rows: some may be repeated."""
    hidden = block.model.hidden
    read_bytes = ELEMENT_BYTES * hidden * read
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
