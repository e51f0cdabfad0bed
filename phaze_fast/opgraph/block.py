"""The operators of one transformer block on one device.

The block is split as Megatron-LM does it: QKV and the first feed-forward projection by columns, the
output projections by rows, heads over devices. Around each pair of projections lies a
tensor-parallel region: an all-reduce leaves it (and one enters it backward); with sequence
parallelism it is entered by an all-gather and left by a reduce-scatter, and norms, residuals and
dropouts work on a share of the rows (Korthikanti et al. 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.builder import ELEMENT_BYTES, LayerBuilder, OperatorSpec
from phaze_fast.opgraph.strategy import Shapes, Strategy, shapes

__all__ = ["BlockKind", "block_builder"]

BlockKind = Literal["block", "moe-block", "encoder-block", "decoder-block"]

_GELU_STEPS = {"cube": 1, "scale": 1, "sum": 2, "widen": 1, "tanh": 1, "shift": 1, "halve": 1}
"""Operators of the tanh form of GELU before its last product, and the arrays that each reads."""
_FLOAT_BYTES = 4  # statistics are kept in fp32
_RANDOM_STATE_BYTES = 1024  # seed and offset of a fused kernel, each in an allocation of its own


class _Block:
    """The sub-layers of one block, written with one layer builder."""

    def __init__(self, model: TransformerModel, strategy: Strategy, kind: BlockKind) -> None:
        self.model, self.strategy, self.kind = model, strategy, kind
        self.shapes: Shapes = shapes(model, strategy)
        self.builder = LayerBuilder(f"{model.name}/{kind}")
        self.split = strategy.sequence_parallel and strategy.tensor_parallel > 1
        self.row_bytes = ELEMENT_BYTES * self.shapes.rows * model.hidden
        self.causal = model.causal and kind != "encoder-block"

    # ---- ends of the tensor-parallel region ----

    def enter(self, name: str, x: int) -> int:
        """Begin a region in which devices hold different columns."""
        if self.strategy.tensor_parallel == 1:
            return x
        if self.split:
            gather = ("all-gather", self.row_bytes, "tensor")
            scatter = ("reduce-scatter", self.row_bytes, "tensor")
            return self.builder.network(f"{name}-gather", x, gather, scatter, regather=True)
        reduce = ("all-reduce", self.row_bytes, "tensor")
        return self.builder.network(f"{name}-enter", x, None, reduce)

    def leave(self, name: str, x: int) -> int:
        """End it: sum the devices' parts."""
        if self.strategy.tensor_parallel == 1:
            return x
        if self.split:
            scatter = ("reduce-scatter", self.row_bytes, "tensor")
            gather = ("all-gather", self.row_bytes, "tensor")
            return self.builder.network(f"{name}-scatter", x, scatter, gather)
        return self.builder.network(
            f"{name}-reduce", x, ("all-reduce", self.row_bytes, "tensor"), None
        )

    # ---- pieces ----

    def norm(self, name: str, x: int) -> int:
        rows, hidden = self.shapes.split_rows, self.model.hidden
        made = self.builder.vector(name, "norm", (x,), rows, hidden, function=self.model.norm)
        self.builder.keep(f"{name}-input", ELEMENT_BYTES * rows * hidden, x)
        values = 2 if self.model.norm == "layernorm" else 1  # mean and spread, or spread alone
        self.builder.keep(f"{name}-statistics", values * _FLOAT_BYTES * rows, made, statistic=True)
        return made

    def add_residual(self, name: str, x: int, skip: int) -> int:
        rows, hidden = self.shapes.split_rows, self.model.hidden
        if self.model.dropout:
            x = self.builder.vector(f"{name}-dropout", "dropout", (x,), rows, hidden)
            self.builder.keep(f"{name}-dropout-mask", rows * hidden, x)
        return self.builder.vector(f"{name}-residual", "residual", (x, skip), rows, hidden, reads=2)

    def sublayer(self, name: str, skip: int, write: Callable[[int], int]) -> int:
        """Wrap attention or feed-forward in its norm and residual."""
        pre = self.model.norm_position == "pre"
        x = self.norm(f"{name}-norm", skip) if pre else skip
        self.builder.keep(
            f"{name}-input", ELEMENT_BYTES * self.shapes.split_rows * self.model.hidden, x
        )
        x = self.leave(name, write(self.enter(name, x)))
        x = self.add_residual(name, x, skip)
        return x if pre else self.norm(f"{name}-norm", x)

    # ---- attention ----

    def projections(self, prefix: str, x: int, memory: int) -> tuple[int, int, int]:
        """Q of x, and K and V of the memory it attends to."""
        s, m = self.shapes, self.model
        bias = m.qkv_bias
        if m.fused_qkv and x == memory:
            width = s.query_width + 2 * s.kv_width
            made = self.builder.linear(f"{prefix}qkv", x, s.rows, m.hidden, width, bias)
            return made, made, made
        return (
            self.builder.linear(f"{prefix}q", x, s.rows, m.hidden, s.query_width, bias),
            self.builder.linear(f"{prefix}k", memory, s.rows, m.hidden, s.kv_width, bias),
            self.builder.linear(f"{prefix}v", memory, s.rows, m.hidden, s.kv_width, bias),
        )

    def attend(self, prefix: str, x: int, memory: int, causal: bool) -> int:
        s, m = self.shapes, self.model
        q, k, v = self.projections(prefix, x, memory)
        query_bytes, kv_bytes = (ELEMENT_BYTES * s.rows * w for w in (s.query_width, s.kv_width))
        rotated = m.positions == "rotary"
        if rotated:
            q = self.builder.vector(f"{prefix}rotate-q", "rotary", (q,), s.rows, s.query_width)
            k = self.builder.vector(f"{prefix}rotate-k", "rotary", (k,), s.rows, s.kv_width)
        self.builder.keep(f"{prefix}query", query_bytes, q)
        if not m.kv_expanded or (m.fused_qkv and not rotated):
            self.builder.keep(f"{prefix}key", kv_bytes, k)
            self.builder.keep(f"{prefix}value", kv_bytes, v)
        if m.kv_expanded:  # copies for every query head; what they were made from may go
            self.builder.keep(f"{prefix}expanded-key", query_bytes, k)
            self.builder.keep(f"{prefix}expanded-value", query_bytes, v)
        if self.strategy.context_parallel > 1:
            whole = kv_bytes * self.strategy.context_parallel
            gather = ("all-gather", 2.0 * whole, "context")
            scatter = ("reduce-scatter", 2.0 * whole, "context")
            k = v = self.builder.network(f"{prefix}kv-gather", k, gather, scatter)
        core = self.flash if m.attention == "flash" else self.explicit
        out = core(prefix, q, k, v, causal)
        self.builder.keep(f"{prefix}context", query_bytes, out)
        return self.builder.linear(
            f"{prefix}proj", out, s.rows, s.query_width, m.hidden, m.out_bias
        )

    def flash(self, prefix: str, q: int, k: int, v: int, causal: bool) -> int:
        s = self.shapes
        seq_here = s.seq // self.strategy.context_parallel
        pairs = s.batch * s.heads
        traffic = ELEMENT_BYTES * s.rows * (s.query_width + 2 * s.kv_width)
        made = self.builder.custom(
            OperatorSpec(
                f"{prefix}attention",
                "attention",
                "TC+VC",
                tuple(dict.fromkeys((q, k, v))),
                b=pairs,
                m=seq_here,
                n=s.seq,
                k=s.head_width,
                flops=4.0 * pairs * seq_here * s.seq * s.head_width,
                read_bytes=traffic,
                write_bytes=ELEMENT_BYTES * s.rows * s.query_width,
                causal=causal,
            )
        )
        self.builder.keep(
            f"{prefix}log-sum-exp", _FLOAT_BYTES * s.heads * s.rows, made, statistic=True
        )
        self.builder.keep(f"{prefix}random-state", _RANDOM_STATE_BYTES, made, statistic=True)
        return made

    def explicit(self, prefix: str, q: int, k: int, v: int, causal: bool) -> int:
        s, builder = self.shapes, self.builder
        seq_here = s.seq // self.strategy.context_parallel
        pairs, width = s.batch * s.heads, s.head_width
        shared = s.heads // s.kv_heads
        scores = builder.product(f"{prefix}scores", q, k, pairs, seq_here, width, s.seq, shared)
        square = pairs * seq_here * s.seq
        if causal:
            builder.keep(f"{prefix}causal-mask", seq_here * s.seq, scores, statistic=True)
        weights = builder.vector(f"{prefix}softmax", "softmax", (scores,), pairs * seq_here, s.seq)
        builder.keep(f"{prefix}weights", ELEMENT_BYTES * square, weights)
        if self.model.dropout:
            weights = builder.vector(
                f"{prefix}score-dropout", "dropout", (weights,), pairs * seq_here, s.seq
            )
            builder.keep(f"{prefix}score-dropout-mask", square, weights)
            builder.keep(f"{prefix}dropped-weights", ELEMENT_BYTES * square, weights)
        return builder.product(f"{prefix}mix", weights, v, pairs, seq_here, s.seq, width, shared)

    # ---- feed-forward ----

    def feed_forward(self, x: int) -> int:
        s, m = self.shapes, self.model
        up = self.builder.linear("up", x, s.rows, m.hidden, s.ffn, m.ffn_bias)
        gate = (
            self.builder.linear("gate", x, s.rows, m.hidden, s.ffn, m.ffn_bias) if m.gated else -1
        )
        inner = self.activate("", up, gate, s.rows, s.ffn)
        return self.builder.linear("down", inner, s.rows, s.ffn, m.hidden, m.ffn_bias)

    def activate(self, prefix: str, up: int, gate: int, rows: int, width: int) -> int:
        """Non-linearity and gate; ReLU's gradient needs its output only."""
        size = ELEMENT_BYTES * rows * width
        bent = gate if self.model.gated else up
        if self.model.activation != "relu":
            self.builder.keep(f"{prefix}activation-input", size, bent)
        if self.model.gelu_by_steps and self.model.activation == "gelu":
            bent = self.gelu_steps(prefix, bent, rows, width)
        active = self.builder.vector(
            f"{prefix}activation",
            "activation",
            (bent,),
            rows,
            width,
            function=self.model.activation,
        )
        self.builder.keep(f"{prefix}activation-output", size, active)
        if not self.model.gated:
            return active
        self.builder.keep(f"{prefix}up-output", size, up)
        gated = self.builder.vector(
            f"{prefix}multiply", "multiply", (active, up), rows, width, reads=2
        )
        self.builder.keep(f"{prefix}gated", size, gated)
        return gated

    def gelu_steps(self, prefix: str, x: int, rows: int, width: int) -> int:
        """Cube, scale, add, scale, tanh, add, halve: all but the last product of GELU.

        What the gradients of cube, tanh and the two products need is kept.
        """
        size = ELEMENT_BYTES * rows * width
        for step, reads in _GELU_STEPS.items():
            x = self.builder.vector(f"{prefix}gelu-{step}", "multiply", (x,), rows, width, reads)
            if step in ("tanh", "halve"):
                self.builder.keep(f"{prefix}gelu-{step}", size, x)
        self.builder.keep(f"{prefix}gelu-sum", size, x)
        return x

    def experts(self, x: int) -> int:
        """Router, dispatch, experts, combine. Tokens are taken to spread evenly."""
        s, m, builder = self.shapes, self.model, self.builder
        moe = m.moe
        if moe is None:
            raise AssertionError("a moe-block needs a model with experts")
        ep, t = self.strategy.expert_parallel, self.strategy.tensor_parallel
        router = builder.linear("router", x, s.rows, m.hidden, moe.experts, bias=False)
        factor = 1.0 if moe.capacity_factor is None else moe.capacity_factor
        sent = -(-int(s.rows * moe.top_k * factor) // moe.experts) * moe.experts
        payload = float(ELEMENT_BYTES * sent * m.hidden)
        exchange = ("all-to-all", payload, "expert") if ep > 1 else None
        dispatched = builder.network("dispatch", x, exchange, exchange, after=(router,))
        local, rows = moe.experts // ep, sent // moe.experts * ep
        width = moe.expert_ffn // t
        builder.keep("dispatched", ELEMENT_BYTES * local * rows * m.hidden, dispatched)
        up = builder.grouped_linear("expert-up", dispatched, local, rows, m.hidden, width)
        gate = -1
        if m.gated:
            gate = builder.grouped_linear("expert-gate", dispatched, local, rows, m.hidden, width)
        inner = self.activate("expert-", up, gate, local * rows, width)
        down = builder.grouped_linear("expert-down", inner, local, rows, width, m.hidden)
        combined = builder.network("combine", down, exchange, exchange)
        out = builder.vector("weigh", "multiply", (combined, router), sent, m.hidden)
        builder.keep("expert-output", ELEMENT_BYTES * sent * m.hidden, combined)
        if moe.shared_experts:
            shared_width = moe.shared_experts * width
            up = builder.linear("shared-up", x, s.rows, m.hidden, shared_width, m.ffn_bias)
            gate = -1
            if m.gated:
                gate = builder.linear("shared-gate", x, s.rows, m.hidden, shared_width, m.ffn_bias)
            inner = self.activate("shared-", up, gate, s.rows, shared_width)
            down = builder.linear("shared-down", inner, s.rows, shared_width, m.hidden, m.ffn_bias)
            out = builder.vector("shared-sum", "residual", (out, down), s.rows, m.hidden, reads=2)
        return out

    def write(self) -> LayerBuilder:
        """All sub-layers in order."""
        x = self.sublayer("attention", -1, lambda inner: self.attend("", inner, inner, self.causal))
        if self.kind == "decoder-block":
            memory = -1  # the encoder's output enters the layer beside its input
            self.builder.keep("memory", ELEMENT_BYTES * self.shapes.rows * self.model.hidden, -1)
            x = self.sublayer("cross", x, lambda inner: self.attend("cross-", inner, memory, False))
        body = self.experts if self.kind == "moe-block" else self.feed_forward
        self.sublayer("ffn", x, body)
        return self.builder


def block_builder(
    model: TransformerModel, strategy: Strategy, kind: BlockKind = "block"
) -> LayerBuilder:
    """Write one block of a model as one device runs it.

    Raises
    ------
    InfeasibleError
        Where the strategy breaks a rule of divisibility.
    """
    return _Block(model, strategy, kind).write()
