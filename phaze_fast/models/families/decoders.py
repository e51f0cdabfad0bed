"""Decoders of transformers that differ from Llama in some parts."""

from __future__ import annotations

from functools import partial

from phaze_fast.models import operators as op
from phaze_fast.models.families.llama import Llama
from phaze_fast.models.operators import (
    add,
    embedding,
    mean,
    mul,
    part,
    power,
    rsqrt,
    split,
    to,
    transpose,
    view,
)  # fmt: skip
from phaze_fast.models.tape import Tensor

_FLOAT, _HALF = "float32", "bfloat16"


# ---- decoders like Llama ----


class Qwen3(Llama):
    """Norms of queries and keys, each head by itself."""

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        m, shape = self.model, (self.samples, self.seq, -1, self.model.head_width)
        q = self._norm(
            "q_norm", view(self._project("q_proj", x, m.query_width, m.qkv_bias), *shape)
        )
        q = transpose(q, 1, 2)
        k = self._norm("k_norm", view(self._project("k_proj", x, m.kv_width, m.qkv_bias), *shape))
        k = transpose(k, 1, 2)
        return [q, k, self._heads(self._project("v_proj", x, m.kv_width, m.qkv_bias))]


class Sandwich(Llama):
    """Norms before the sub-layers and on their outputs."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def _block(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.norms
        out = self._self_attention(self._norm(first, x))
        x = add(x, self._norm(second, out))
        return add(x, self._norm(fourth, self._feed_forward(self._norm(third, x))))


class Gemma(Llama):
    """A scaled embedding, and norms whose gain is one plus the weight, all in fp32."""

    def _rms_norm(self, x: Tensor) -> Tensor:
        weight = self.tape.parameter(x.shape[-1])
        wide = to(x, _FLOAT)
        wide = mul(wide, rsqrt(add(mean(power(wide)), 1e-6)))
        return to(mul(wide, add(to(weight, _FLOAT), 1.0)), x.dtype)

    def _embedded(self) -> Tensor:
        with self.tape.module(self.table):
            self.words = self.tape.parameter(self.model.vocab, self.model.hidden)
            return mul(embedding(self.words, self.ids), self.tape.constant())


class Gemma2(Gemma, Sandwich):
    """Norms around the sub-layers."""


class Gemma3(Gemma2):
    """Norms of queries and keys, and tables of positions for each kind of layer."""

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        q, k, v = super()._queries_keys_values(x)
        q = self._norm("q_norm", q)
        return [q, self._norm("k_norm", k), v]


class Phi3(Llama):
    """Fused projections, and dropouts before the residuals."""

    partial = True

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        m = self.model
        ends = (m.query_width, m.query_width + m.kv_width, m.query_width + 2 * m.kv_width)
        both = self._project("qkv_proj", x, ends[-1], m.qkv_bias)
        parts = [part(both, -1, a, b) for a, b in zip((0, *ends), ends, strict=False)]
        return [self._heads(one) for one in parts]

    def _mlp(self, x: Tensor, width: int) -> Tensor:
        gate, up = split(self._project("gate_up_proj", x, 2 * width), [width, width])
        with self.tape.module("activation_fn"):
            gate = self.activation(gate)
        return self._project("down_proj", mul(up, gate), self.model.hidden)

    def _block(self, x: Tensor) -> Tensor:
        out = self._self_attention(self._norm(self.first_norm, x))
        x = add(x, self._dropped("resid_attn_dropout", out, "resid_pdrop"))
        out = self._feed_forward(self._norm(self.second_norm, x))
        return add(x, self._dropped("resid_mlp_dropout", out, "resid_pdrop"))


class Olmo2(Llama):
    """Norms on the outputs of the sub-layers, and of all queries and keys together."""

    table_format = _FLOAT

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        return [to(x, _HALF) for x in super()._positioned(q, k)]

    def _rms_norm(self, x: Tensor) -> Tensor:
        gain = self.tape.parameter(x.shape[-1])
        wide = to(x, _FLOAT)
        wide = mul(wide, rsqrt(add(mean(power(wide)), 1e-6)))
        return to(mul(gain, wide), x.dtype)

    def _rows(self, x: Tensor) -> list[Tensor]:
        """Rows of queries, keys and values of all heads."""
        m = self.model
        q = self._norm("q_norm", self._project("q_proj", x, m.query_width, m.qkv_bias))
        k = self._norm("k_norm", self._project("k_proj", x, m.kv_width, m.qkv_bias))
        return [q, k, self._project("v_proj", x, m.kv_width, m.qkv_bias)]

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        return [self._heads(one) for one in self._rows(x)]

    def _block(self, x: Tensor) -> Tensor:
        x = add(x, self._norm("post_attention_layernorm", self._self_attention(x)))
        return add(x, self._norm("post_feedforward_layernorm", self._feed_forward(x)))


class SmolLM3(Llama):
    """Some layers without positions."""

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        return [q, k] if self.layer in self.style.unrotated else super()._positioned(q, k)


class Starcoder2(Llama):
    """A plain feed-forward, and dropouts after the sub-layers."""

    def _attention(self, x: Tensor) -> Tensor:
        return self._drop(super()._attention(x), "residual_dropout")

    def _embedded(self) -> Tensor:
        return self._drop(super()._embedded(), "embedding_dropout")

    def _mlp(self, x: Tensor, width: int) -> Tensor:
        m = self.model
        with_bias = partial(self._project, bias=m.ffn_bias)
        x = self._run("act", self.activation, with_bias("c_fc", x, width))
        return self._drop(with_bias("c_proj", x, m.hidden), "residual_dropout")


# ---- more decoders like Llama ----


class Granite(Llama):
    """Factors on the embedding, on residuals and on logits."""

    def _embedded(self) -> Tensor:
        return mul(super()._embedded(), 1.0)

    def _block(self, x: Tensor) -> Tensor:
        x = add(x, mul(self._self_attention(self._norm(self.first_norm, x)), 1.0))
        return add(x, mul(self._feed_forward(self._norm(self.second_norm, x)), 1.0))

    def _logits(self, x: Tensor) -> Tensor:
        return op.div(super()._logits(x), 1.0)


class Olmo(Llama):
    """Layer norms in fp32 without weights."""

    table_format, heads_last = _FLOAT, True

    def _layer_norm(self, x: Tensor) -> Tensor:
        return to(op.layer_norm(to(x, _FLOAT), None, None), x.dtype)

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        return [to(x, _HALF) for x in super()._positioned(q, k)]


class Helium(Llama):
    """Gains in fp32, and rotation of neighbouring elements."""

    neighbours, table_per_layer = True, True

    def _rms_norm(self, x: Tensor) -> Tensor:
        gain = self.tape.parameter(x.shape[-1])
        wide = to(x, _FLOAT)
        wide = mul(wide, rsqrt(add(mean(power(wide)), 1e-6)))
        return to(mul(to(gain, _FLOAT), wide), x.dtype)


class Glm(Llama):
    """One projection of gate and values; neighbouring elements of a part of heads are rotated."""

    partial, joins_last, neighbours, table_per_layer = True, True, True, True

    def _mlp(self, x: Tensor, width: int) -> Tensor:
        gate, up = split(self._project("gate_up_proj", x, 2 * width), [width, width])
        gate = self._run("activation_fn", self.activation, gate)
        return self._project("down_proj", mul(up, gate), self.model.hidden)


class Glm4(Glm, Sandwich):
    """Norms around the sub-layers."""

    norms = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )


class SeedOss(Llama):
    """Dropouts after the sub-layers."""

    def _attention(self, x: Tensor) -> Tensor:
        return self._drop(super()._attention(x), "residual_dropout")

    def _mlp(self, x: Tensor, width: int) -> Tensor:
        return self._drop(super()._mlp(x, width), "residual_dropout")


class Ernie(Llama):
    """Neighbouring elements are rotated in fp32."""

    neighbours, table_format, table_per_layer = True, _FLOAT, True

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = mul(to(x, _FLOAT), cos)
        return add(first, mul(to(self._half_turned(x), _FLOAT), sin))

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        return [to(x, _HALF) for x in super()._positioned(q, k)]


class Exaone4(Llama):
    """Norms on outputs and of queries and keys; layers without a window have no positions."""

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        q, k, v = super()._queries_keys_values(x)
        q = self._norm("q_norm", q)
        return [q, self._norm("k_norm", k), v]

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        m = self.model
        rotates = m.window is None or self.layer not in m.full_attention_layers
        return super()._positioned(q, k) if rotates else [q, k]

    def _block(self, x: Tensor) -> Tensor:
        x = add(x, self._norm("post_attention_layernorm", self._self_attention(x)))
        return add(x, self._norm("post_feedforward_layernorm", self._feed_forward(x)))


class Phi(Llama):
    """Parallel blocks on one norm."""

    final, out_name, partial, joins_last = "final_layernorm", "dense", True, True

    def _mlp(self, x: Tensor, width: int) -> Tensor:
        bias = self.model.ffn_bias
        x = self._run("activation_fn", self.activation, self._project("fc1", x, width, bias))
        return self._project("fc2", x, self.model.hidden, bias)

    def _block(self, x: Tensor) -> Tensor:
        rows = self._norm(self.first_norm, x)
        out = self._dropped("resid_dropout", self._self_attention(rows), "resid_pdrop")
        both = self._dropped("resid_dropout", self._feed_forward(rows), "resid_pdrop")
        return add(add(out, both), x)

    def _embedded(self) -> Tensor:
        return self._dropped("embed_dropout", super()._embedded(), "embd_pdrop")


class Cohere(Llama):
    """Parallel blocks; layer norms without bias, and rotation of neighbours, in fp32."""

    neighbours, table_format = True, _HALF

    def _layer_norm(self, x: Tensor) -> Tensor:
        gain = self.tape.parameter(*self._gain_shape(x))
        wide = to(x, _FLOAT)
        middle = mean(wide)
        spread = mean(power(op.sub(wide, middle)))
        wide = mul(op.sub(wide, middle), rsqrt(add(spread, 1e-6)))
        return to(mul(to(gain, _FLOAT), wide), x.dtype)

    def _gain_shape(self, x: Tensor) -> tuple[int, ...]:
        """Gains of a norm of rows, or of each head by itself."""
        return x.shape[2:]

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        m, shape = self.model, (self.samples, self.seq, -1, self.model.head_width)
        widths = {"q_proj": m.query_width, "k_proj": m.kv_width, "v_proj": m.kv_width}
        q, k, v = (
            view(self._project(name, x, width, m.qkv_bias), *shape)
            for name, width in widths.items()
        )
        if m.qk_norm != "no":
            q, k = self._norm("q_norm", q), self._norm("k_norm", k)
        return [transpose(one, 1, 2) for one in (q, k, v)]

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        both = super()._positioned(to(q, _FLOAT), to(k, _FLOAT))
        return [to(x, _HALF) for x in both]

    def _block(self, x: Tensor) -> Tensor:
        rows = self._norm(self.first_norm, x)
        out = self._self_attention(rows)
        both = self._feed_forward(rows)
        return add(add(x, out), both)

    def _logits(self, x: Tensor) -> Tensor:
        return mul(super()._logits(x), 1.0)


class Cohere2(Cohere):
    """Layers without a window have no positions."""

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        m = self.model
        rotates = m.window is not None and self.layer not in m.full_attention_layers
        return super()._positioned(q, k) if rotates else [q, k]


class StableLm(Llama):
    """Layer norms, blocks in parallel or not, and a part of heads that is rotated."""

    partial, joins_last, heads_last = True, True, True

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        q, k, v = super()._queries_keys_values(x)
        if self.model.qk_norm == "no":
            return [q, k, v]
        return [self._normed_heads("q_layernorm", q), self._normed_heads("k_layernorm", k), v]

    def _normed_heads(self, name: str, x: Tensor) -> Tensor:
        """Normalise each head with a gain of its own."""
        with self.tape.module(name):
            normed = []
            for at, head in enumerate(split(x, [1] * x.shape[1], 1)):
                with self.tape.module(f"norms.{at}"):
                    normed.append(op.layer_norm(head, self.tape.parameter(x.shape[-1]), None))
            return op.cat(normed, 1)

    def _block(self, x: Tensor) -> Tensor:
        rows = self._norm(self.first_norm, x)
        out = self._self_attention(rows)
        if self.model.parallel != "no":
            both = self._dropped("dropout", self._feed_forward(rows), "hidden_dropout")
            return add(add(x, out), both)
        x = add(x, out)
        both = self._feed_forward(self._norm(self.second_norm, x))
        return add(x, self._dropped("dropout", both, "hidden_dropout"))


class Nemotron(Llama):
    """Layer norms whose gain is one plus the weight."""

    partial, joins_last = True, True

    def _layer_norm(self, x: Tensor) -> Tensor:
        gain, shift = self.tape.parameter(x.shape[-1]), self.tape.parameter(x.shape[-1])
        return op.layer_norm(x, add(gain, 1.0), shift)
