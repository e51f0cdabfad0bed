"""The operators of one transformer block on one device.

The block is split as Megatron-LM does it: QKV and the first feed-forward projection by columns, the
output projections by rows, heads over devices.
"""

from __future__ import annotations

from collections.abc import Callable

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.attention import attend
from phaze_fast.opgraph.builder import ELEMENT_BYTES, LayerBuilder
from phaze_fast.opgraph.feed_forward import experts, experts_of_rows, feed_forward, own_experts
from phaze_fast.opgraph.strategy import Strategy
from phaze_fast.opgraph.writer import BlockWriter

__all__ = ["block_builder", "block_kinds"]


def block_kinds(model: TransformerModel, seq: int) -> list[str]:
    """Kind of every block of a decoder or encoder, in order.

    Examples
    --------
    >>> from phaze_fast import models
    >>> set(block_kinds(models.load("mixtral-8x7b"), 4096))
    {'moe-block'}
    """
    return [
        "window-" * model.is_windowed(layer, seq) + "moe-" * model.has_experts(layer) + "block"
        for layer in range(model.layers)
    ]


def _sublayer(
    w: BlockWriter, name: str, skip: int, write: Callable[[int], int], region: bool = True
) -> int:
    """Wrap attention or feed-forward in its norms and residual.

    It is written inside a tensor-parallel region unless it sees to that itself.
    """
    position = w.model.norm_position
    x = w.norm(f"{name}-norm", skip) if position in ("pre", "sandwich") else skip
    w.keep_input(name, x, routed=name == "ffn" and w.kind.endswith("moe-block"))
    x = w.leave(name, write(w.enter(name, x))) if region else write(x)
    if position in ("output", "sandwich"):
        x = w.norm(f"{name}-output-norm", x)
    x = w.add_residual(name, x, skip)
    return w.norm(f"{name}-norm", x) if position == "post" else x


def _parallel(w: BlockWriter, body: Callable[[int], int]) -> int:
    """Attention and feed-forward side by side: devices sum both parts at once."""
    x = w.norm("attention-norm", -1)
    w.keep_input("attention", x)
    attended = w.enter("attention", x)
    inner = attended
    if w.model.parallel == "two-norms":
        y = w.norm("ffn-norm", -1)
        w.keep_input("ffn", y)
        inner = w.enter("ffn", y)
    left, right = attend(w, "", attended, attended, w.causal), body(inner)
    rows, hidden = w.shapes.rows, w.model.hidden
    both = w.builder.vector("parallel-sum", "residual", (left, right), rows, hidden, reads=2)
    return w.add_residual("ffn", w.leave("ffn", both), -1)


def block_builder(model: TransformerModel, strategy: Strategy, kind: str = "block") -> LayerBuilder:
    """Write one block of a model as one device runs it.

    Parameters
    ----------
    model, strategy
        What is trained, and how a layer is split.
    kind
        One of `block_kinds`, ``encoder-block`` or ``decoder-block``.

    Raises
    ------
    InfeasibleError
        Where the strategy breaks a rule of divisibility.
    """
    w = BlockWriter(model, strategy, kind)

    def body(x: int) -> int:
        return experts(w, x) if kind.endswith("moe-block") else feed_forward(w, x)

    if model.parallel != "no":
        _parallel(w, body)
        return w.builder
    x = _sublayer(w, "attention", -1, lambda inner: attend(w, "", inner, inner, w.causal))
    if kind == "decoder-block":
        memory = -1  # the encoder's output enters the layer beside its input
        w.builder.keep("memory", ELEMENT_BYTES * w.shapes.rows * model.hidden, -1)
        x = _sublayer(w, "cross", x, lambda inner: attend(w, "cross-", inner, memory, False))
    if kind.endswith("moe-block") and own_experts(w):
        _sublayer(w, "ffn", x, lambda inner: experts_of_rows(w, inner), region=False)
    else:
        _sublayer(w, "ffn", x, body)
    return w.builder
