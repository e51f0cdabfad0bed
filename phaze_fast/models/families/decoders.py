"""Decoders of transformers that differ from Llama in some parts."""

from __future__ import annotations

from phaze_fast.models import operators as op
from phaze_fast.models.families.llama import Llama
from phaze_fast.models.tape import Tensor

_FLOAT = "float32"


class Qwen3(Llama):
    """Norms of queries and keys, each head by itself."""

    steps = ("project view norm turn",)


class Gemma(Llama):
    """A scaled embedding, and norms whose gain is one plus the weight, all in fp32."""

    gains = "one plus"

    def _embedded(self) -> Tensor:
        with self.tape.module(self.table):
            self.words = self.tape.parameter(self.model.vocab, self.model.hidden)
            return op.mul(op.embedding(self.words, self.ids), self.tape.constant())


class Gemma2(Gemma):
    """Norms around the sub-layers."""

    second_norm = "pre_feedforward_layernorm"
    output_norms = ("post_attention_layernorm", "post_feedforward_layernorm")


class Gemma3(Gemma2):
    """Norms of queries and keys, and tables of positions for each kind of layer."""

    steps = ("project view turn", "norm")


class Phi3(Llama):
    """Fused projections, and dropouts before the residuals."""

    partial, mlp_names = True, ("", "activation_fn", "down_proj")
    block_drops, residual_drops = ("resid_attn_dropout", "resid_mlp_dropout"), "resid_pdrop"

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        m = self.model
        ends = (m.query_width, m.query_width + m.kv_width, m.query_width + 2 * m.kv_width)
        both = self._project("qkv_proj", x, ends[-1], m.qkv_bias)
        parts = [op.part(both, -1, a, b) for a, b in zip((0, *ends), ends, strict=False)]
        return [self._heads(one) for one in parts]


class Olmo2(Llama):
    """Norms on the outputs of the sub-layers, and of all queries and keys together."""

    table_format, gains, first_norm, second_norm = _FLOAT, "wide", "", ""
    output_norms: tuple[str, ...] = ("post_attention_layernorm", "post_feedforward_layernorm")
    steps: tuple[str, ...] = ("project norm", "view turn")


class Starcoder2(Llama):
    """A plain feed-forward, and dropouts after the sub-layers."""

    mlp_names = ("c_fc", "act", "c_proj")
    drops, embedding_drops = "residual_dropout", "embedding_dropout"


class Granite(Llama):
    """Factors on the embedding, on residuals and on logits."""

    factor = True

    def _embedded(self) -> Tensor:
        return op.mul(super()._embedded(), 1.0)

    def _logits(self, x: Tensor) -> Tensor:
        return op.div(super()._logits(x), 1.0)


class Olmo(Llama):
    """Layer norms in fp32 without weights."""

    table_format, steps = _FLOAT, ("project", "view turn")

    def _layer_norm(self, x: Tensor) -> Tensor:
        return op.to(op.layer_norm(op.to(x, _FLOAT), None, None), x.dtype)


class Helium(Llama):
    """Gains in fp32, and rotation of neighbouring elements."""

    neighbours, table_per_layer, gains = True, True, "fp32"


class Glm(Llama):
    """One projection of gate and values; neighbouring elements of a part of heads are rotated."""

    partial, joins_last, neighbours, table_per_layer = True, True, True, True
    mlp_names = ("", "activation_fn", "down_proj")


class Glm4(Glm):
    """Norms around the sub-layers."""

    output_norms = ("post_self_attn_layernorm", "post_mlp_layernorm")


class SeedOss(Llama):
    """Dropouts after the sub-layers."""

    drops = "residual_dropout"


class Ernie(Llama):
    """Neighbouring elements are rotated in fp32."""

    neighbours, table_format, table_per_layer = True, _FLOAT, True

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = op.mul(op.to(x, _FLOAT), cos)
        return op.add(first, op.mul(op.to(self._half_turned(x), _FLOAT), sin))


class Exaone4(Llama):
    """Norms on outputs and of queries and keys; layers without a window have no positions."""

    first_norm, second_norm, steps = "", "", ("project view turn", "norm")
    output_norms = ("post_attention_layernorm", "post_feedforward_layernorm")

    def _rotates(self) -> bool:
        return self.model.window is None or self.layer not in self.model.full_attention_layers


class Phi(Llama):
    """Parallel blocks on one norm."""

    final, out_name, partial, joins_last = "final_layernorm", "dense", True, True
    mlp_names = ("fc1", "activation_fn", "fc2")
    embedding_drop, embedding_drops = "embed_dropout", "embd_pdrop"

    def _block(self, x: Tensor) -> Tensor:
        rows = self._norm(self.first_norm, x)
        out = self._dropped("resid_dropout", self._self_attention(rows), "resid_pdrop")
        both = self._dropped("resid_dropout", self._feed_forward(rows), "resid_pdrop")
        return op.add(op.add(out, both), x)


class Cohere(Llama):
    """Parallel blocks; layer norms without bias, and rotation of neighbours, in fp32."""

    neighbours, steps = True, ("project view", "norm", "turn")

    def _layer_norm(self, x: Tensor) -> Tensor:
        gain = self.tape.parameter(*x.shape[2:])  # of rows, or of each head by itself
        wide = op.to(x, _FLOAT)
        middle = op.mean(wide)
        spread = op.mean(op.power(op.sub(wide, middle)))
        wide = op.mul(op.sub(wide, middle), op.rsqrt(op.add(spread, 1e-6)))
        return op.to(op.mul(op.to(gain, _FLOAT), wide), x.dtype)

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        return (
            super()._positioned(op.to(q, _FLOAT), op.to(k, _FLOAT)) if self._rotates() else [q, k]
        )

    def _block(self, x: Tensor) -> Tensor:
        rows = self._norm(self.first_norm, x)
        out, both = self._self_attention(rows), self._feed_forward(rows)
        return op.add(op.add(x, out), both)

    def _logits(self, x: Tensor) -> Tensor:
        return op.mul(super()._logits(x), 1.0)


class Cohere2(Cohere):
    """Layers without a window have no positions."""

    def _rotates(self) -> bool:
        m = self.model
        return m.window is not None and self.layer not in m.full_attention_layers


class StableLm(Llama):
    """Layer norms, blocks in parallel or not, and a part of heads that is rotated."""

    partial, joins_last, steps = True, True, ("project", "view turn")
    block_drops, residual_drops = ("", "dropout"), "hidden_dropout"

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        q, k, v = super()._queries_keys_values(x)
        if self.model.qk_norm == "no":
            return [q, k, v]
        return [self._normed_heads("q_layernorm", q), self._normed_heads("k_layernorm", k), v]

    def _normed_heads(self, name: str, x: Tensor) -> Tensor:
        """Normalise each head with a gain of its own."""
        with self.tape.module(name):
            normed = []
            for at, head in enumerate(op.split(x, [1] * x.shape[1], 1)):
                with self.tape.module(f"norms.{at}"):
                    normed.append(op.layer_norm(head, self.tape.parameter(x.shape[-1]), None))
            return op.cat(normed, 1)

    def _block(self, x: Tensor) -> Tensor:
        if self.model.parallel == "no":
            return super()._block(x)
        rows = self._norm(self.first_norm, x)
        out = self._self_attention(rows)
        both = self._dropped("dropout", self._feed_forward(rows), "hidden_dropout")
        return op.add(op.add(x, out), both)


class Nemotron(Llama):
    """Layer norms whose gain is one plus the weight."""

    partial, joins_last = True, True

    def _layer_norm(self, x: Tensor) -> Tensor:
        gain, shift = self.tape.parameter(x.shape[-1]), self.tape.parameter(x.shape[-1])
        return op.layer_norm(x, op.add(gain, 1.0), shift)
