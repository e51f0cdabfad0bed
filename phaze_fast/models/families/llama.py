"""The forward code of transformers' modules, family by family, on a tape.

A class has the structure of the family's module in transformers (version 5.18), and its methods
the operators of that module's code, in order; a family that differs in one part overrides that.
The sizes are those of a `TransformerModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phaze_fast.models import operators as op
from phaze_fast.models.operators import (
    add,
    attention,
    cat,
    contiguous,
    div,
    dropout,
    embedding,
    linear,
    matmul,
    mean,
    mul,
    neg,
    part,
    power,
    reshape,
    rsqrt,
    silu,
    tanh,
    to,
    transpose,
    unsqueeze,
    view,
)  # fmt: skip
from phaze_fast.models.tape import Tape, Tensor
from phaze_fast.models.transformer import TransformerModel

_FLOAT, _HALF = "float32", "bfloat16"


def gelu_new(x: Tensor) -> Tensor:
    """GELU's tanh form as transformers writes it, operator by operator."""
    half = mul(x, 0.5)
    inner = mul(add(x, mul(power(x), 0.044715)), 0.8)
    return mul(half, add(tanh(inner), 1.0))


def gelu_fast(x: Tensor) -> Tensor:
    """GELU's tanh form with a polynomial, operator by operator."""
    half = mul(x, 0.5)
    scaled, cube = mul(x, 0.8), mul(mul(x, 0.044715), x)
    return mul(half, add(tanh(mul(scaled, add(cube, 1.0))), 1.0))


def quick_gelu(x: Tensor) -> Tensor:
    """GELU by a logistic function."""
    return mul(x, op.sigmoid(mul(x, 1.702)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": op.gelu,
    "gelu_pytorch_tanh": op.gelu,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "quick_gelu": quick_gelu,
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
    softmax_format = _FLOAT  # of explicit attention
    heads_last = False  # whether all projections run before heads are formed

    def __init__(
        self, tape: Tape, model: TransformerModel, samples: int, layers: Sequence[int]
    ) -> None:
        self.tape, self.model, self.layers = tape, model, layers
        self.samples, self.seq = samples, model.seq
        assert model.module is not None
        self.style = model.module
        self.activation = _ACTIVATIONS[self.style.activation]
        self.ids = tape.constant(samples, model.seq, dtype="int64")
        self.rotary: list[Tensor] = []
        self.layer = 0
        """Position of the running block."""

    # ---- parts ----

    def _run(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run a child module."""
        with self.tape.module(name):
            return function(x)

    def _project(self, name: str, x: Tensor, outs: int, bias: bool = False) -> Tensor:
        """Run a linear layer."""
        with self.tape.module(name):
            weight = self.tape.parameter(outs, x.shape[-1])
            out = linear(x, weight, self.tape.parameter(outs) if bias else None)
            return self._adapted(name, x, out)

    def _adapted(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """Add the output of the adapter of a linear layer, if it has one, as PEFT does."""
        lora = self.tape.lora
        if lora is None or not lora.adapts(name):
            return out
        with self.tape.module("lora_dropout"):
            x = dropout(x, lora.dropout > 0.0)
        for child, shape in (
            ("lora_A", (lora.rank, x.shape[-1])),
            ("lora_B", (out.shape[-1], lora.rank)),
        ):
            with self.tape.module(child):
                x = linear(x, self.tape.parameter(*shape, adapter=True))
        return add(out, mul(x, 2.0))

    def _rms_norm(self, x: Tensor) -> Tensor:
        """RMS norm in fp32, whose result is cast before the gain."""
        gain = self.tape.parameter(x.shape[-1])
        wide = to(x, _FLOAT)
        wide = mul(wide, rsqrt(add(mean(power(wide)), 1e-6)))
        return mul(gain, to(wide, x.dtype))

    def _layer_norm(self, x: Tensor) -> Tensor:
        """Layer norm as one kernel."""
        gain = self.tape.parameter(x.shape[-1])
        shift = self.tape.parameter(x.shape[-1]) if self.model.norm_bias else None
        return op.layer_norm(x, gain, shift)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Run a norm."""
        with self.tape.module(name):
            return self._rms_norm(x) if self.model.norm == "rmsnorm" else self._layer_norm(x)

    def _drop(self, x: Tensor, name: str) -> Tensor:
        """Dropout, if the configuration's field of that name is not zero."""
        return dropout(x, name in self.style.dropouts)

    def _dropped(self, module: str, x: Tensor, name: str) -> Tensor:
        """Run a dropout module."""
        with self.tape.module(module):
            return self._drop(x, name)

    # ---- attention ----

    def _heads(self, x: Tensor) -> Tensor:
        """Rows of all heads as a matrix per head."""
        return transpose(view(x, self.samples, self.seq, -1, self.model.head_width), 1, 2)

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        """Project queries, keys and values."""
        m = self.model
        widths = {"q_proj": m.query_width, "k_proj": m.kv_width, "v_proj": m.kv_width}
        if self.heads_last:
            rows = [self._project(name, x, width, m.qkv_bias) for name, width in widths.items()]
            return [self._heads(one) for one in rows]
        return [self._heads(self._project(n, x, width, m.qkv_bias)) for n, width in widths.items()]

    def _tables(self) -> list[Tensor]:
        """Cosines and sines of the positions; the same for all layers."""
        if not self.rotary or self.table_per_layer:
            width = self.style.rotary_width or self.model.head_width
            self.rotary = [
                self.tape.constant(1, self.seq, width, dtype=self.table_format) for _ in range(2)
            ]
        return [unsqueeze(x, 1) for x in self.rotary]

    def _half_turned(self, x: Tensor) -> Tensor:
        """Rotate by a quarter turn: halves of heads, or neighbouring elements."""
        return rotate_pairs(x) if self.neighbours else rotate_half(x)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate by the angles of the positions."""
        return add(mul(x, cos), mul(self._half_turned(x), sin))

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Apply positions to queries and keys."""
        if self.model.positions != "rotary":
            return [q, k]
        cos, sin = self._tables()
        width, full = cos.shape[-1], q.shape[-1]
        rests: list[list[Tensor]] = [[], []]
        if self.partial:  # slices of both come first
            cuts = [[part(x, -1, 0, width), part(x, -1, width, full)] for x in (q, k)]
            (q, *rests[0]), (k, *rests[1]) = cuts
        turned = []
        for x, rest in ((q, rests[0]), (k, rests[1])):
            y = self._turned(x, cos, sin)
            turned.append(cat([y, *rest], -1) if rest and not self.joins_last else y)
        if self.joins_last:
            turned = [cat([y, *rest], -1) for y, rest in zip(turned, rests, strict=True)]
        return turned

    def _repeated(self, x: Tensor) -> Tensor:
        """Copy keys or values to every query head."""
        groups = self.model.heads // x.shape[1]
        if groups == 1:
            return x
        count, heads, seq, width = x.shape
        spread = op.expand(unsqueeze(x, 2), count, heads, groups, seq, width)
        return reshape(spread, count, heads * groups, seq, width)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, drops: str = "attention_dropout") -> Tensor:
        """Attention with the kernel of the configuration; rows of all heads."""
        m = self.model
        windowed = m.causal and m.is_windowed(self.layer, self.seq)
        if m.attention == "eager":
            return self._explicit(q, k, v, drops)
        if windowed:
            seen = {"causal": True, "dropout": drops in self.style.dropouts, "window": m.window}
        else:
            seen = {"causal": m.causal, "dropout": drops in self.style.dropouts}
            seen["expands_mask"] = not m.causal
        fits = k.shape[-1] == v.shape[-1] <= 256
        if windowed or not fits:
            k, v = self._repeated(k), self._repeated(v)
        out = attention(q, k, v, **seen)
        return contiguous(transpose(out, 1, 2))

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, drops: str) -> Tensor:
        """softmax(QK^T)V operator by operator."""
        k, v = self._repeated(k), self._repeated(v)
        scores = mul(matmul(q, transpose(k, 2, 3)), 1.0)
        if self.model.score_cap:
            scores = mul(tanh(div(scores, 1.0)), 1.0)
        if self.model.causal:
            scores = op.masked(scores, self._mask())
        shares = to(op.softmax(scores, self.softmax_format), q.dtype)
        return contiguous(transpose(matmul(self._drop(shares, drops), v), 1, 2))

    def _mask(self) -> Tensor:
        """Mask that is added to scores."""
        return self.tape.constant(self.samples, 1, self.seq, self.seq)

    def _attention(self, x: Tensor) -> Tensor:
        """Self-attention."""
        q, k, v = self._queries_keys_values(x)
        q, k = self._positioned(q, k)
        out = contiguous(reshape(self._attend(q, k, v), self.samples, self.seq, -1))
        return self._project(self.out_name, out, self.model.hidden, self.model.out_bias)

    # ---- feed-forward ----

    def _act(self, x: Tensor) -> Tensor:
        """Run the activation."""
        return self._run("act_fn", self.activation, x)

    def _mlp(self, x: Tensor, width: int) -> Tensor:
        """Feed-forward layer, gated or not."""
        m, bias = self.model, self.model.ffn_bias
        if not m.gated:
            return self._project(
                "down_proj", self._act(self._project("up_proj", x, width, bias)), m.hidden, bias
            )
        gate = self._act(self._project("gate_proj", x, width, bias))
        return self._project(
            "down_proj", mul(gate, self._project("up_proj", x, width, bias)), m.hidden, bias
        )

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Feed-forward layer of a block."""
        with self.tape.module(self.mlp_name):
            return self._mlp(x, self.model.ffn)

    def _self_attention(self, x: Tensor) -> Tensor:
        """Attention layer of a block."""
        with self.tape.module(self.attention_name):
            return self._attention(x)

    # ---- the model ----

    def _block(self, x: Tensor) -> Tensor:
        """One block, with norms before its sub-layers."""
        x = add(x, self._self_attention(self._norm(self.first_norm, x)))
        return add(x, self._feed_forward(self._norm(self.second_norm, x)))

    def _embedded(self) -> Tensor:
        """Rows of the token embedding."""
        with self.tape.module(self.table):
            self.words = self.tape.parameter(self.model.vocab, self.model.hidden)
            return embedding(self.words, self.ids)

    def _trunk(self) -> Tensor:
        """Everything before the head."""
        x = self._embedded()
        for layer in self.layers:
            self.layer = layer
            with self.tape.module(f"{self.blocks}.{layer}"):
                x = self._block(x)
        return self._norm(self.final, x) if self.model.final_norm else x

    def _logits(self, x: Tensor) -> Tensor:
        """Logits of every token."""
        m = self.model
        x = op.alias(x)  # an index that selects all positions
        with self.tape.module(self.head_name):
            weight = self.words if m.tied_embeddings else self.tape.parameter(m.vocab, m.hidden)
            out = linear(x, weight, self.tape.parameter(m.vocab) if m.head_bias else None)
        return mul(tanh(div(out, 1.0)), 1.0) if m.logit_cap else out

    def _loss(self, logits: Tensor) -> Tensor:
        """Mean cross-entropy of logits in fp32."""
        rows = view(to(logits, _FLOAT), -1, self.model.vocab)
        return op.cross_entropy(rows, self.tape.constant(rows.shape[0], dtype="int64"))

    def forward(self) -> Tensor:
        """Loss of one step."""
        with self.tape.module(self.root):
            x = self._trunk()
        return self._loss(self._logits(x))
