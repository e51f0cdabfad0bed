"""The forward code of transformers' modules, family by family, on a tape.

A class has the structure of the family's module in transformers (version 5.18), and its methods
the operators of that module's code, in order; a family that differs in one part overrides that.
The sizes are those of a `TransformerModel`.
"""

from __future__ import annotations

from collections.abc import Sequence

from phaze_fast.models import operators as op
from phaze_fast.models.operators import (
    add, attention, cat, contiguous, div, dropout, embedding, linear, matmul, mean, mul, neg, part,
    power, reshape, rsqrt, silu, split, tanh, to, transpose, unsqueeze, view,
)  # fmt: skip
from phaze_fast.models.tape import Tape, Tensor
from phaze_fast.models.transformer import TransformerModel

_FLOAT, _HALF = "float32", "bfloat16"


def gelu_new(x: Tensor) -> Tensor:
    """GELU's tanh form as transformers writes it, operator by operator."""
    half = mul(x, 0.5)
    inner = mul(add(x, mul(power(x, 3.0), 0.044715)), 0.8)
    return mul(half, add(tanh(inner), 1.0))


_ACTIVATIONS = {
    "gelu": op.gelu,
    "gelu_pytorch_tanh": op.gelu,
    "gelu_new": gelu_new,
    "relu": op.relu,
    "relu2": lambda x: power(op.relu(x)),
    "silu": silu,
    "swish": silu,
}


def rotate_half(x: Tensor) -> Tensor:
    """Swap the halves of heads and negate one."""
    width = x.shape[-1]
    first, second = part(x, -1, 0, width // 2), part(x, -1, width // 2, width)
    return cat([neg(second), first], -1)


def rotate_pairs(x: Tensor) -> Tensor:
    """Swap neighbouring elements and negate one."""
    first, second = op.every_other(x), op.every_other(x)
    pairs = op.stack([neg(second), first])
    return view(pairs, *x.shape)


class Llama:
    """A decoder with the parts of Llama."""

    root, blocks, final, table = "model", "layers", "norm", "embed_tokens"
    attention_name, mlp_name = "self_attn", "mlp"
    first_norm, second_norm = "input_layernorm", "post_attention_layernorm"
    out_name = "o_proj"
    head_name = "lm_head"
    partial = False  # whether code splits heads into a rotated part and the rest
    joins_last = False  # whether both are rotated before the parts are joined
    neighbours = False  # whether neighbouring elements are rotated, instead of halves of heads
    table_format = _HALF
    table_per_layer = False
    heads_last = False  # whether all projections run before heads are formed

    def __init__(
        self, tape: Tape, model: TransformerModel, samples: int, layers: Sequence[int]
    ) -> None:
        self.tape, self.model, self.layers = tape, model, layers
        self.samples, self.seq = samples, model.seq
        self.style = model.module
        self.activation = _ACTIVATIONS[self.style.activation]
        self.ids = tape.constant(samples, model.seq, dtype="int64")
        self.rotary: list[Tensor] = []

    # ---- parts ----

    def run(self, name: str, function, *inputs: Tensor):
        """Run a child module."""
        with self.tape.module(name):
            return function(*inputs)

    def project(self, name: str, x: Tensor, outs: int, bias: bool = False) -> Tensor:
        """Run a linear layer."""
        with self.tape.module(name):
            weight = self.tape.parameter(outs, x.shape[-1])
            return linear(x, weight, self.tape.parameter(outs) if bias else None)

    def rms_norm(self, x: Tensor) -> Tensor:
        """RMS norm in fp32, whose result is cast before the gain."""
        gain = self.tape.parameter(x.shape[-1])
        wide = to(x, _FLOAT)
        wide = mul(wide, rsqrt(add(mean(power(wide)), 1e-6)))
        return mul(gain, to(wide, x.dtype))

    def layer_norm(self, x: Tensor) -> Tensor:
        """Layer norm as one kernel."""
        gain = self.tape.parameter(x.shape[-1])
        shift = self.tape.parameter(x.shape[-1]) if self.model.norm_bias else None
        return op.layer_norm(x, gain, shift)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Run a norm."""
        with self.tape.module(name):
            return self.rms_norm(x) if self.model.norm == "rmsnorm" else self.layer_norm(x)

    def drop(self, x: Tensor, name: str) -> Tensor:
        """Dropout, if the configuration's field of that name is not zero."""
        return dropout(x, name in self.style.dropouts)

    def dropped(self, module: str, x: Tensor, name: str) -> Tensor:
        """Run a dropout module."""
        with self.tape.module(module):
            return self.drop(x, name)

    # ---- attention ----

    def heads(self, x: Tensor) -> Tensor:
        """Rows of all heads as a matrix per head."""
        return transpose(view(x, self.samples, self.seq, -1, self.model.head_width), 1, 2)

    def queries_keys_values(self, x: Tensor, layer: int) -> list[Tensor]:
        """Project queries, keys and values."""
        m = self.model
        widths = {"q_proj": m.query_width, "k_proj": m.kv_width, "v_proj": m.kv_width}
        if self.heads_last:
            rows = [self.project(name, x, width, m.qkv_bias) for name, width in widths.items()]
            return [self.heads(one) for one in rows]
        return [self.heads(self.project(n, x, width, m.qkv_bias)) for n, width in widths.items()]

    def tables(self, layer: int, dim: int = 1) -> list[Tensor]:
        """Cosines and sines of the positions; the same for all layers."""
        if not self.rotary or self.table_per_layer:
            width = self.style.rotary_width or self.model.head_width
            self.rotary = [self.tape.constant(1, self.seq, width, dtype=self.table_format) for _ in range(2)]
        return [unsqueeze(x, dim) for x in self.rotary]

    def half_turned(self, x: Tensor) -> Tensor:
        """Rotate by a quarter turn: halves of heads, or neighbouring elements."""
        return rotate_pairs(x) if self.neighbours else rotate_half(x)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate by the angles of the positions."""
        return add(mul(x, cos), mul(self.half_turned(x), sin))

    def positioned(self, q: Tensor, k: Tensor, layer: int) -> list[Tensor]:
        """Apply positions to queries and keys."""
        if self.model.positions != "rotary":
            return [q, k]
        cos, sin = self.tables(layer)
        width, full = cos.shape[-1], q.shape[-1]
        rests: list[list[Tensor]] = [[], []]
        if self.partial:  # slices of both come first
            cuts = [[part(x, -1, 0, width), part(x, -1, width, full)] for x in (q, k)]
            (q, *rests[0]), (k, *rests[1]) = cuts
        turned = []
        for x, rest in ((q, rests[0]), (k, rests[1])):
            y = self.turned(x, cos, sin)
            turned.append(cat([y, *rest], -1) if rest and not self.joins_last else y)
        if self.joins_last:
            turned = [cat([y, *rest], -1) for y, rest in zip(turned, rests, strict=True)]
        return turned

    def repeated(self, x: Tensor) -> Tensor:
        """Copy keys or values to every query head."""
        groups = self.model.heads // x.shape[1]
        if groups == 1:
            return x
        count, heads, seq, width = x.shape
        spread = op.expand(unsqueeze(x, 2), count, heads, groups, seq, width)
        return reshape(spread, count, heads * groups, seq, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, drops: str = "attention_dropout") -> Tensor:
        """Attention with the kernel of the configuration; rows of all heads."""
        m = self.model
        windowed = m.causal and m.is_windowed(layer, self.seq)
        if m.attention == "eager":
            return self.explicit(q, k, v, drops)
        if windowed:
            seen = {"causal": True, "dropout": drops in self.style.dropouts, "window": m.window}
        else:
            seen = {"causal": m.causal, "dropout": drops in self.style.dropouts}
        fits = k.shape[-1] == v.shape[-1] <= 256
        if windowed or not fits:
            k, v = self.repeated(k), self.repeated(v)
        out = attention(q, k, v, **seen)
        return contiguous(transpose(out, 1, 2))

    def explicit(self, q: Tensor, k: Tensor, v: Tensor, drops: str) -> Tensor:
        """softmax(QK^T)V operator by operator."""
        k, v = self.repeated(k), self.repeated(v)
        scores = mul(matmul(q, transpose(k, 2, 3)), 1.0)
        if self.model.score_cap:
            scores = mul(tanh(div(scores, 1.0)), 1.0)
        if self.model.causal:
            scores = op.masked(scores, self.mask())
        shares = to(op.softmax(scores, _FLOAT), q.dtype)
        return contiguous(transpose(matmul(self.drop(shares, drops), v), 1, 2))

    def mask(self) -> Tensor:
        """Mask that is added to scores."""
        return self.tape.constant(self.samples, 1, self.seq, self.seq)

    def attention(self, x: Tensor, layer: int) -> Tensor:
        """Self-attention."""
        q, k, v = self.queries_keys_values(x, layer)
        q, k = self.positioned(q, k, layer)
        out = contiguous(reshape(self.attend(q, k, v, layer), self.samples, self.seq, -1))
        return self.project(self.out_name, out, self.model.hidden, self.model.out_bias)

    # ---- feed-forward ----

    def act(self, x: Tensor) -> Tensor:
        """Run the activation."""
        return self.run("act_fn", self.activation, x)

    def mlp(self, x: Tensor, width: int) -> Tensor:
        """Feed-forward layer, gated or not."""
        m, bias = self.model, self.model.ffn_bias
        if not m.gated:
            return self.project("down_proj", self.act(self.project("up_proj", x, width, bias)), m.hidden, bias)
        gate = self.act(self.project("gate_proj", x, width, bias))
        return self.project("down_proj", mul(gate, self.project("up_proj", x, width, bias)), m.hidden, bias)

    def feed_forward(self, x: Tensor, layer: int) -> Tensor:
        """Feed-forward layer of a block."""
        with self.tape.module(self.mlp_name):
            return self.mlp(x, self.model.ffn)

    def self_attention(self, x: Tensor, layer: int) -> Tensor:
        """Attention layer of a block."""
        with self.tape.module(self.attention_name):
            return self.attention(x, layer)

    # ---- the model ----

    def block(self, x: Tensor, layer: int) -> Tensor:
        """One block, with norms before its sub-layers."""
        x = add(x, self.self_attention(self.norm(self.first_norm, x), layer))
        return add(x, self.feed_forward(self.norm(self.second_norm, x), layer))

    def embedded(self) -> Tensor:
        """Rows of the token embedding."""
        with self.tape.module(self.table):
            self.words = self.tape.parameter(self.model.vocab, self.model.hidden)
            return embedding(self.words, self.ids)

    def trunk(self) -> Tensor:
        """Everything before the head."""
        x = self.embedded()
        for layer in self.layers:
            with self.tape.module(f"{self.blocks}.{layer}"):
                x = self.block(x, layer)
        return self.norm(self.final, x) if self.model.final_norm else x

    def logits(self, x: Tensor) -> Tensor:
        """Logits of every token."""
        m = self.model
        x = op.alias(x)  # an index that selects all positions
        with self.tape.module(self.head_name):
            weight = self.words if m.tied_embeddings else self.tape.parameter(m.vocab, m.hidden)
            out = linear(x, weight, self.tape.parameter(m.vocab) if m.head_bias else None)
        return mul(tanh(div(out, 1.0)), 1.0) if m.logit_cap else out

    def loss(self, logits: Tensor) -> Tensor:
        """Mean cross-entropy of logits in fp32."""
        rows = view(to(logits, _FLOAT), -1, self.model.vocab)
        return op.cross_entropy(rows, self.tape.constant(rows.shape[0], dtype="int64"))

    def forward(self) -> Tensor:
        """Loss of one step."""
        with self.tape.module(self.root):
            x = self.trunk()
        return self.loss(self.logits(x))
