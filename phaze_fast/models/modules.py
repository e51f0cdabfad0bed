"""The forward code of transformers' modules, family by family, on a tape.

A class has the structure of the family's module in transformers (version 5.18), and its methods
the operators of that module's code, in order; a family that differs in one part overrides that.
The sizes are those of a `TransformerModel`.
"""

from __future__ import annotations

from functools import partial

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


class Llama:
    """A decoder with the parts of Llama."""

    root, blocks, final, table = "model", "layers", "norm", "embed_tokens"
    attention_name, mlp_name = "self_attn", "mlp"
    first_norm, second_norm = "input_layernorm", "post_attention_layernorm"
    out_name = "o_proj"
    head_name = "lm_head"
    partial = False  # whether code splits heads into a rotated part and the rest
    joins_last = False  # whether both are rotated before the parts are joined
    table_format = _HALF

    def __init__(self, tape: Tape, model: TransformerModel, samples: int) -> None:
        self.tape, self.model = tape, model
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
        return [self.heads(self.project(n, x, width, m.qkv_bias)) for n, width in widths.items()]

    def tables(self, layer: int, dim: int = 1) -> list[Tensor]:
        """Cosines and sines of the positions; the same for all layers."""
        if not self.rotary:
            width = self.style.rotary_width or self.model.head_width
            self.rotary = [self.tape.constant(1, self.seq, width, dtype=self.table_format) for _ in range(2)]
        return [unsqueeze(x, dim) for x in self.rotary]

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
            y = add(mul(x, cos), mul(rotate_half(x), sin))
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
        for layer in range(self.model.layers):
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



# ---- decoders like Llama ----


class Qwen3(Llama):
    """Norms of queries and keys, each head by itself."""

    def queries_keys_values(self, x: Tensor, layer: int) -> list[Tensor]:
        m, shape = self.model, (self.samples, self.seq, -1, self.model.head_width)
        q = self.norm("q_norm", view(self.project("q_proj", x, m.query_width, m.qkv_bias), *shape))
        q = transpose(q, 1, 2)
        k = self.norm("k_norm", view(self.project("k_proj", x, m.kv_width, m.qkv_bias), *shape))
        k = transpose(k, 1, 2)
        return [q, k, self.heads(self.project("v_proj", x, m.kv_width, m.qkv_bias))]


class Sandwich(Llama):
    """Norms before the sub-layers and on their outputs."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def block(self, x: Tensor, layer: int) -> Tensor:
        first, second, third, fourth = self.norms
        out = self.self_attention(self.norm(first, x), layer)
        x = add(x, self.norm(second, out))
        return add(x, self.norm(fourth, self.feed_forward(self.norm(third, x), layer)))


class Gemma(Llama):
    """A scaled embedding, and norms whose gain is one plus the weight, all in fp32."""

    def rms_norm(self, x: Tensor) -> Tensor:
        weight = self.tape.parameter(x.shape[-1])
        wide = to(x, _FLOAT)
        wide = mul(wide, rsqrt(add(mean(power(wide)), 1e-6)))
        return to(mul(wide, add(to(weight, _FLOAT), 1.0)), x.dtype)

    def embedded(self) -> Tensor:
        with self.tape.module(self.table):
            self.words = self.tape.parameter(self.model.vocab, self.model.hidden)
            return mul(embedding(self.words, self.ids), self.tape.constant())


class Gemma2(Gemma, Sandwich):
    """Norms around the sub-layers."""


class Gemma3(Gemma2):
    """Norms of queries and keys, and tables of positions for each kind of layer."""

    def queries_keys_values(self, x: Tensor, layer: int) -> list[Tensor]:
        q, k, v = super().queries_keys_values(x, layer)
        q = self.norm("q_norm", q)
        return [q, self.norm("k_norm", k), v]


class Phi3(Llama):
    """Fused projections, and dropouts before the residuals."""

    partial = True

    def queries_keys_values(self, x: Tensor, layer: int) -> list[Tensor]:
        m = self.model
        ends = (m.query_width, m.query_width + m.kv_width, m.query_width + 2 * m.kv_width)
        both = self.project("qkv_proj", x, ends[-1], m.qkv_bias)
        parts = [part(both, -1, a, b) for a, b in zip((0, *ends), ends, strict=False)]
        return [self.heads(one) for one in parts]

    def mlp(self, x: Tensor, width: int) -> Tensor:
        gate, up = split(self.project("gate_up_proj", x, 2 * width), [width, width])
        with self.tape.module("activation_fn"):
            gate = self.activation(gate)
        return self.project("down_proj", mul(up, gate), self.model.hidden)

    def block(self, x: Tensor, layer: int) -> Tensor:
        out = self.self_attention(self.norm(self.first_norm, x), layer)
        x = add(x, self.dropped("resid_attn_dropout", out, "resid_pdrop"))
        out = self.feed_forward(self.norm(self.second_norm, x), layer)
        return add(x, self.dropped("resid_mlp_dropout", out, "resid_pdrop"))


class Olmo2(Llama):
    """Norms on the outputs of the sub-layers, and of all queries and keys together."""

    table_format = _FLOAT

    def positioned(self, q: Tensor, k: Tensor, layer: int) -> list[Tensor]:
        return [to(x, _HALF) for x in super().positioned(q, k, layer)]

    def rms_norm(self, x: Tensor) -> Tensor:
        gain = self.tape.parameter(x.shape[-1])
        wide = to(x, _FLOAT)
        wide = mul(wide, rsqrt(add(mean(power(wide)), 1e-6)))
        return to(mul(gain, wide), x.dtype)

    def queries_keys_values(self, x: Tensor, layer: int) -> list[Tensor]:
        m = self.model
        q = self.norm("q_norm", self.project("q_proj", x, m.query_width, m.qkv_bias))
        k = self.norm("k_norm", self.project("k_proj", x, m.kv_width, m.qkv_bias))
        v = self.project("v_proj", x, m.kv_width, m.qkv_bias)
        return [self.heads(one) for one in (q, k, v)]

    def block(self, x: Tensor, layer: int) -> Tensor:
        x = add(x, self.norm("post_attention_layernorm", self.self_attention(x, layer)))
        return add(x, self.norm("post_feedforward_layernorm", self.feed_forward(x, layer)))


class SmolLM3(Llama):
    """Some layers without positions."""

    def positioned(self, q: Tensor, k: Tensor, layer: int) -> list[Tensor]:
        return [q, k] if layer in self.style.unrotated else super().positioned(q, k, layer)


class Starcoder2(Llama):
    """A plain feed-forward, and dropouts after the sub-layers."""

    def attention(self, x: Tensor, layer: int) -> Tensor:
        return self.drop(super().attention(x, layer), "residual_dropout")

    def embedded(self) -> Tensor:
        return self.drop(super().embedded(), "embedding_dropout")

    def mlp(self, x: Tensor, width: int) -> Tensor:
        m = self.model
        with_bias = partial(self.project, bias=m.ffn_bias)
        x = self.run("act", self.activation, with_bias("c_fc", x, width))
        return self.drop(with_bias("c_proj", x, m.hidden), "residual_dropout")


# ---- decoders with layer norms ----


class GPTNeoX(Llama):
    """Parallel blocks, and one projection in which each head has its query, key and value."""

    root, final, table, out_name = "gpt_neox", "final_layer_norm", "embed_in", "dense"
    attention_name, head_name, partial, joins_last = "attention", "lm_head", True, True

    def queries_keys_values(self, x: Tensor, layer: int) -> list[Tensor]:
        m = self.model
        both = self.project("query_key_value", x, 3 * m.query_width, m.qkv_bias)
        both = transpose(view(both, self.samples, self.seq, -1, 3 * m.head_width), 1, 2)
        return split(both, [m.head_width] * 3)

    def mlp(self, x: Tensor, width: int) -> Tensor:
        x = self.run("act", self.activation, self.project("dense_h_to_4h", x, width, True))
        return self.project("dense_4h_to_h", x, self.model.hidden, True)

    def block(self, x: Tensor, layer: int) -> Tensor:
        out = self.self_attention(self.norm(self.first_norm, x), layer)
        out = self.dropped("post_attention_dropout", out, "hidden_dropout")
        if self.model.parallel == "no":
            x = add(out, x)
        both = self.feed_forward(self.norm(self.second_norm, x), layer)
        both = self.dropped("post_mlp_dropout", both, "hidden_dropout")
        return add(both, x) if self.model.parallel == "no" else add(add(both, out), x)

    def embedded(self) -> Tensor:
        return self.dropped("emb_dropout", super().embedded(), "hidden_dropout")


class GPT2(Llama):
    """Learned positions, and weights stored with one row for each input."""

    root, blocks, final, table = "transformer", "h", "ln_f", "wte"
    attention_name, first_norm, second_norm = "attn", "ln_1", "ln_2"
    drops = "resid_pdrop"

    def convolved(self, name: str, x: Tensor, outs: int) -> Tensor:
        """Run a ``Conv1D``: rows times a matrix plus a bias."""
        with self.tape.module(name):
            weight, bias = self.tape.parameter(x.shape[-1], outs), self.tape.parameter(outs)
            out = op.addmm(bias, view(x, -1, x.shape[-1]), weight)
            return view(out, *x.shape[:-1], outs)

    def queries_keys_values(self, x: Tensor, layer: int) -> list[Tensor]:
        both = self.convolved("c_attn", x, 3 * self.model.hidden)
        q, k, v = split(both, [self.model.hidden] * 3, 2)
        k, v = self.heads(k), self.heads(v)
        return [self.heads(q), k, v]

    def attention(self, x: Tensor, layer: int) -> Tensor:
        q, k, v = self.queries_keys_values(x, layer)
        out = self.attend(q, k, v, layer, "attn_pdrop")
        out = contiguous(reshape(out, self.samples, self.seq, -1))
        return self.dropped("resid_dropout", self.convolved("c_proj", out, self.model.hidden), "resid_pdrop")

    def mlp(self, x: Tensor, width: int) -> Tensor:
        x = self.run("act", self.activation, self.convolved("c_fc", x, width))
        return self.dropped("dropout", self.convolved("c_proj", x, self.model.hidden), "resid_pdrop")

    def block(self, x: Tensor, layer: int) -> Tensor:
        x = add(self.self_attention(self.norm(self.first_norm, x), layer), x)
        return add(x, self.feed_forward(self.norm(self.second_norm, x), layer))

    def embedded(self) -> Tensor:
        words = super().embedded()
        with self.tape.module("wpe"):
            table = self.tape.parameter(self.model.max_positions, self.model.hidden)
            places = embedding(table, self.tape.constant(1, self.seq, dtype="int64"))
        return self.dropped("drop", add(words, places), "embd_pdrop")

    def trunk(self) -> Tensor:
        x = super().trunk()
        return view(x, *x.shape)


class OPT(Llama):
    """Learned positions; queries are scaled before attention."""

    root, final, out_name = "model.decoder", "final_layer_norm", "out_proj"
    first_norm, second_norm = "self_attn_layer_norm", "final_layer_norm"

    def queries_keys_values(self, x: Tensor, layer: int) -> list[Tensor]:
        m = self.model
        q = self.heads(mul(self.project("q_proj", x, m.hidden, m.qkv_bias), 1.0))
        k, v = (self.project(name, x, m.hidden, m.qkv_bias) for name in ("k_proj", "v_proj"))
        return [q, self.heads(k), self.heads(v)]

    def block(self, x: Tensor, layer: int) -> Tensor:
        m, shape = self.model, x.shape
        out = self.self_attention(self.norm(self.first_norm, x), layer)
        x = reshape(add(x, self.drop(out, "dropout")), -1, m.hidden)
        out = self.project("fc1", self.norm(self.second_norm, x), m.ffn, m.ffn_bias)
        out = self.project("fc2", self.run("activation_fn", self.activation, out), m.hidden, m.ffn_bias)
        return view(add(x, self.drop(out, "dropout")), *shape)

    def embedded(self) -> Tensor:
        words = super().embedded()
        with self.tape.module("embed_positions"):
            table = self.tape.parameter(self.model.max_positions, self.model.hidden)
            places = embedding(table, self.tape.constant(self.samples, self.seq, dtype="int64"))
        return add(words, places)


FAMILIES: dict[str, type[Llama]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), Llama),
    "qwen3": Qwen3,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "phi3": Phi3,
    **dict.fromkeys(("olmo2", "olmo3"), Olmo2),
    "smollm3": SmolLM3,
    "starcoder2": Starcoder2,
    "gpt_neox": GPTNeoX,
    "gpt2": GPT2,
    "opt": OPT,
}
