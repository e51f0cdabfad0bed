"""Takes a plan and what its layers spend, gives the joules of one step, all devices together.

Operators on the chip and what flows whatever runs, the optimiser's traffic to HBM, and the bytes
that devices send one another, as a ring sends them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.hardware import energy_table
from phaze_fast.opgraph import GROUPS, OpGraph
from phaze_fast.placement.layouts import Layout
from phaze_fast.placement.sizes import LayerSizes

__all__ = ["step_energy_j"]

Array = np.ndarray[Any, Any]

_TWICE = _core.COLLECTIVE_OPS.index("all-reduce")
_WHOLE = _core.COLLECTIVE_OPS.index("point-to-point")


def _sent_bytes(graph: OpGraph, ranks: dict[int, int]) -> float:
    """Bytes that one device sends in the collectives of a layer."""
    total = 0.0
    for op in graph.ops[graph.ops["collective"] >= 0]:
        n = ranks.get(int(op["group"]), 1)
        share = 1.0 if op["collective"] == _WHOLE else (n - 1) / n
        total += (2.0 if op["collective"] == _TWICE else 1.0) * share * float(op["payload_bytes"])
    return total


@lru_cache(maxsize=4096)
def _layers_bytes(sizes: LayerSizes) -> float:
    """Bytes that one device sends for the layers' own collectives, for one micro-batch."""
    strategy = sizes.graph.strategy
    widths = {
        "tensor": strategy.tensor_parallel,
        "context": strategy.context_parallel,
        "expert": strategy.expert_parallel,
    }
    ranks = {GROUPS.index(name): width for name, width in widths.items()}
    kinds = [
        _sent_bytes(layer.forward, ranks) + _sent_bytes(layer.backward, ranks)
        for layer in sizes.graph.layers
    ]
    return float(sum(kinds[k] for k in sizes.order))


def _sync_bytes(sizes: LayerSizes, layout: Layout) -> float:
    """Bytes that the devices of one replica send for gradients and weights, in one step."""
    spec, d = sizes.optimizer, layout.groups.replicas * sizes.graph.strategy.context_parallel
    held = float(sizes.parameters.sum()) * sizes.inner
    share, m = (d - 1) / d, layout.microbatches
    gradients, weights = held * spec.gradient_bytes * share, held * spec.weight_bytes * share
    if layout.zero == 0:
        return 2.0 * gradients
    if layout.zero == 1:
        return gradients + weights
    return m * gradients + (2.0 * m * weights if layout.zero == 3 else weights)


def step_energy_j(
    sizes: LayerSizes,
    layout: Layout,
    cut: tuple[tuple[int, ...], tuple[int, ...]],
    spent_j: tuple[Array, Array],
    static_w: float,
    time_s: float,
) -> float:
    """Joules of one training step over all devices that a plan uses.

    Parameters
    ----------
    sizes
        The layers.
    layout
        Replicas, micro-batches, what replicas share.
    cut
        Stage of each layer, and variant of each stage.
    spent_j
        Of each kind of layer's forward pass, and of its backward pass by variant and kind.
    static_w
        Of one device, whatever runs.
    time_s
        Of the step.
    """
    stage_of, variant_of = cut
    prices, order = energy_table(), sizes.order
    stages = max(stage_of) + 1
    variants = np.array(variant_of)[list(stage_of)]
    passes_j = float(np.sum(spent_j[0][order] + spent_j[1][variants, order]))
    replicas, m = layout.groups.replicas, layout.microbatches
    inner = sizes.inner * replicas
    frame = sizes.frame(layout.groups, layout.zero, layout.stages[1] > 1)
    hops = (stages * layout.virtual - 1) if stages > 1 else 0
    sent = inner * m * (_layers_bytes(sizes) + 2.0 * hops * sizes.message_bytes)
    sent += replicas * _sync_bytes(sizes, layout)
    return (
        inner * m * passes_j
        + inner * float(frame.step_bytes.sum()) * prices.hbm_byte_j
        + sent * prices.network_byte_j
        + static_w * time_s * inner * stages
    )
