"""Encoders and encoder-decoders of transformers."""

from __future__ import annotations

import math

from phaze_fast.models import operators as op
from phaze_fast.models.families.llama import Llama
from phaze_fast.models.tape import Tensor


class Bert(Llama):
    """An encoder with norms after the sub-layers, and logits of every token in bf16."""

    root, blocks, final = "bert", "encoder.layer", "encoder.ln"
    drops, attention_drops = "hidden_dropout_prob", "attention_probs_dropout_prob"
    projections, softmax_format = ("query", "key", "value"), ""

    def _attention(self, x: Tensor) -> Tensor:
        with self.tape.module("self"):
            q, k, v = self._queries_keys_values(x)
            return op.contiguous(op.reshape(self._attend(q, k, v), self.samples, self.seq, -1))

    def _added(self, rows: Tensor, x: Tensor) -> Tensor:
        """Project `rows`, apply dropout, add the residual `x` and normalise."""
        with self.tape.module("output"):
            rows = self._project("dense", rows, self.model.hidden, True)
            rows = self._dropped("dropout", rows, self.drops)
            return self._norm("LayerNorm", op.add(rows, x))

    def _inner(self, x: Tensor) -> Tensor:
        """First projection and activation of the feed-forward layer."""
        with self.tape.module("intermediate"):
            x = self._project("dense", x, self.model.ffn, True)
            return self._run("intermediate_act_fn", self.activation, x)

    def _block(self, x: Tensor) -> Tensor:
        with self.tape.module("attention"):
            x = self._added(self._attention(x), x)
        return self._added(self._inner(x), x)

    def _table_rows(self, name: str, rows: int, ids: Tensor) -> Tensor:
        """Look up the rows `ids` of the embedding `name`."""
        with self.tape.module(name):
            return op.embedding(self.tape.parameter(rows, self.model.hidden), ids)

    def _segments(self) -> Tensor:
        """Return the ids of segments: one row of a buffer, expanded to all samples."""
        row = self.tape.constant(1, self.seq, dtype="int64")
        return op.expand(row, self.samples, self.seq)

    def _places(self) -> Tensor:
        """Return the ids of positions, a slice of a buffer."""
        buffer = self.tape.constant(1, self.model.max_positions or self.seq, dtype="int64")
        return op.part(buffer, 1, 0, self.seq)

    def _embedded(self) -> Tensor:
        with self.tape.module("embeddings"):
            self.table = "word_embeddings"
            x, m = self._words(), self.model
            x = op.add(
                x, self._table_rows("token_type_embeddings", m.token_types, self._segments())
            )
            places = self._places()
            rows = self._table_rows("position_embeddings", m.max_positions or 0, places)
            x = op.add(x, rows, inplace=not m.embedding_norm)
            x = self._norm("LayerNorm", x) if m.embedding_norm else x
            return self._dropped("dropout", x, self.drops)

    def _logits(self, x: Tensor) -> Tensor:
        m = self.model
        with self.tape.module("cls"), self.tape.module("predictions"):
            with self.tape.module("transform"):
                x = self._project("dense", x, m.hidden, True)
                x = self._norm("LayerNorm", self._run("transform_act_fn", self.activation, x))
            return self._decoded(x)

    def _decoded(self, x: Tensor) -> Tensor:
        """Logits of the transformed rows."""
        m = self.model
        with self.tape.module("decoder"):
            weight = self.words if m.tied_embeddings else self.tape.parameter(m.vocab, m.hidden)
            if not m.tied_embeddings:
                self.tape.parameter(m.vocab)  # a second bias, which nothing reads
            return op.linear(x, weight, self.tape.parameter(m.vocab))

    def _loss(self, logits: Tensor) -> Tensor:
        rows = op.view(logits, -1, self.model.vocab)
        return op.cross_entropy(rows, self.tape.constant(rows.shape[0], dtype="int64"))


class Roberta(Bert):
    """BERT with positions that depend on padding, and with another head."""

    root = "roberta"

    def _places(self) -> Tensor:
        return self.tape.constant(self.samples, self.seq, dtype="int64")

    def _segments(self) -> Tensor:
        return self.tape.constant(self.samples, self.seq, dtype="int64")

    def _logits(self, x: Tensor) -> Tensor:
        with self.tape.module("lm_head"):
            x = self._run("", op.gelu, self._project("dense", x, self.model.hidden, True))
            return self._decoded(self._norm("layer_norm", x))


class MegatronBert(Bert):
    """BERT with norms before the sub-layers, and explicit attention without a cast to fp32."""

    def _attention(self, x: Tensor) -> Tensor:
        with self.tape.module("self"):
            q, k, v = self._queries_keys_values(x)
            scores = op.div(op.matmul(q, op.transpose(k, 2, 3)), 1.0)
            shares = op.softmax(scores)
            shares = self._dropped("dropout", shares, self.attention_drops)
            out = op.contiguous(op.permute(op.matmul(shares, v), 0, 2, 1, 3))
            return op.view(out, self.samples, self.seq, -1)

    def _segments(self) -> Tensor:
        return self.tape.constant(self.samples, self.seq, dtype="int64")

    def _added(self, rows: Tensor, x: Tensor) -> Tensor:
        with self.tape.module("output"):
            rows = self._project("dense", rows, self.model.hidden, True)
            return op.add(x, self._dropped("dropout", rows, self.drops))

    def _block(self, x: Tensor) -> Tensor:
        with self.tape.module("attention"):
            x = self._added(self._attention(self._norm("ln", x)), x)
        return self._added(self._inner(self._norm("ln", x)), x)


class ViT(Llama):
    """An encoder of image patches and a class token, with norms first, and a classifier."""

    root, final, attention_name = "vit", "layernorm", "attention"
    first_norm, second_norm = "layernorm_before", "layernorm_after"
    mlp_names, residual_first = ("fc1", "activation_fn", "fc2"), (False, False)
    block_drops, residual_drops = ("dropout", "dropout"), "hidden_dropout_prob"
    attention_drops, softmax_format = "attention_probs_dropout_prob", ""

    def _embedded(self) -> Tensor:
        m, tape = self.model, self.tape
        assert m.patches is not None
        side, channels = m.patches.size, m.patches.channels
        across = math.isqrt(self.seq - 1) * side
        with tape.module("embeddings"):
            token, places = tape.parameter(1, 1, m.hidden), tape.parameter(1, self.seq, m.hidden)
            with tape.module("patch_embeddings"):
                images = tape.input((self.samples, channels, across, across), data=True)
                with tape.module("projection"):
                    weight = tape.parameter(m.hidden, channels, side, side)
                    x = op.patches(images, weight, tape.parameter(m.hidden))
                x = op.transpose(op.view(x, self.samples, m.hidden, -1), 1, 2)
            x = op.cat([op.expand(token, self.samples, 1, m.hidden), x], 1)
            return self._dropped("dropout", op.add(x, places), self.residual_drops)

    def _logits(self, x: Tensor) -> Tensor:
        with self.tape.module("classifier"):
            m, first = self.model, op.select(op.alias(x), 1)
            weight = self.tape.parameter(m.classes, m.hidden)
            return op.linear(op.alias(first), weight, self.tape.parameter(m.classes))

    def _loss(self, logits: Tensor) -> Tensor:
        return op.cross_entropy(logits, self.tape.constant(self.samples, dtype="int64"))


class T5(Llama):
    """Encoder and decoder with a learned bias of relative positions, added to the scores."""

    drops, softmax_format = "dropout_rate", ""

    def _rms_norm(self, x: Tensor) -> Tensor:
        gain = self.tape.parameter(x.shape[-1])
        spread = op.mean(op.power(op.to(x, "float32")))
        wide = op.mul(x, op.rsqrt(op.add(spread, 1e-6)))
        return op.mul(gain, op.to(wide, x.dtype))

    def _attended(
        self, x: Tensor, keys: Tensor, bias: list[Tensor], causal: bool, learned: bool
    ) -> Tensor:
        """Attention to `keys`; the first layer of a stack appends the stack's bias to `bias`."""
        m = self.model
        q, k, v = (
            self._heads(self._project(name, rows, m.query_width))
            for name, rows in (("q", x), ("k", keys), ("v", keys))
        )
        if learned and not bias:
            with self.tape.module("relative_attention_bias"):
                table = self.tape.parameter(m.relative_buckets or 0, m.heads)
                rows = op.embedding(table, self.tape.constant(self.seq, self.seq, dtype="int64"))
            bias.append(op.unsqueeze(op.permute(rows, 2, 0, 1), 0))
        if m.attention == "eager":
            out = self._explicit_with(q, k, v, bias[0] if learned else None, causal)
        else:
            drops = self.drops in self.style.dropouts
            if learned:  # fused kernels need a bias with a contiguous last dimension
                hidden = self.tape.constant(1, 1, self.seq, self.seq, dtype="bool")
                seen = op.where(hidden, bias[0], causal=True, window=0) if causal else bias[0]
                out = op.attention_in_parts(q, k, v, seen, drops)
            else:
                out = op.attention(q, k, v, causal=False, dropout=drops, masked=True)
            out = op.contiguous(op.transpose(out, 1, 2))
        return self._project(
            "o", op.contiguous(op.reshape(out, self.samples, self.seq, -1)), m.hidden
        )

    def _explicit_with(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> Tensor:
        """softmax(QK^T + bias)V operator by operator."""
        scores = op.mul(op.matmul(q, op.transpose(k, 2, 3)), 1.0)
        if bias is None:  # transformers adds zeros
            scores = op.masked(scores, self.tape.constant(1, self.model.heads, self.seq, self.seq))
        else:
            scores = op.add(scores, bias)
        if causal:
            scores = op.masked(scores, self._mask())
        shares = self._drop(op.to(op.softmax(scores), q.dtype), self.drops)
        return op.contiguous(op.transpose(op.matmul(shares, v), 1, 2))

    def _mlp(self, x: Tensor, width: int) -> Tensor:
        if self.model.gated:
            gate = self._run("act", self.activation, self._project("wi_0", x, width))
            x = op.mul(gate, self._project("wi_1", x, width))
        else:
            x = self._run("act", self.activation, self._project("wi", x, width))
        return self._project("wo", self._dropped("dropout", x, self.drops), self.model.hidden)

    def _stack(self, name: str, layers: int, encoded: Tensor | None) -> Tensor:
        """Run the encoder, or given its output `encoded`, the decoder."""
        causal = encoded is not None
        bias: list[Tensor] = []
        with self.tape.module(name):
            with self.tape.module("embed_tokens"):
                x = op.embedding(self.words, self.ids if encoded is None else self.later)
            x = self._dropped("dropout", x, self.drops)
            for layer in range(layers):
                with self.tape.module(f"block.{layer}"):
                    x = self._t5_block(x, encoded, bias, causal)
            return self._dropped("dropout", self._norm("final_layer_norm", x), self.drops)

    def _t5_block(
        self, x: Tensor, encoded: Tensor | None, bias: list[Tensor], causal: bool
    ) -> Tensor:
        """One block: self-attention, attention to the encoder's output, feed-forward."""
        with self.tape.module("layer.0"):
            rows = self._norm("layer_norm", x)
            with self.tape.module("SelfAttention"):
                rows = self._attended(rows, rows, bias, causal, True)
            x = op.add(x, self._dropped("dropout", rows, self.drops))
        if encoded is not None:
            with self.tape.module("layer.1"):
                rows = self._norm("layer_norm", x)
                with self.tape.module("EncDecAttention"):
                    rows = self._attended(rows, encoded, [], False, False)
                x = op.add(x, self._dropped("dropout", rows, self.drops))
        with self.tape.module("layer.1" if encoded is None else "layer.2"):
            rows = self._norm("layer_norm", x)
            with self.tape.module("DenseReluDense"):
                rows = self._mlp(rows, self.model.ffn)
            return op.add(x, self._dropped("dropout", rows, self.drops))

    def forward(self) -> Tensor:
        """Loss of one step."""
        m = self.model
        self.words = self.tape.parameter(m.vocab, m.hidden)
        self.later = self.tape.constant(self.samples, self.seq, dtype="int64")
        encoded = self._stack("encoder", m.encoder_layers, None)
        x = self._stack("decoder", m.layers, encoded)
        if self.style.settings.get("tie_word_embeddings", False):
            x = op.mul(x, 1.0)
        with self.tape.module("lm_head"):
            logits = op.linear(x, self.words)
        rows = op.view(logits, -1, m.vocab)
        return op.cross_entropy(rows, self.tape.constant(rows.shape[0], dtype="int64"))
