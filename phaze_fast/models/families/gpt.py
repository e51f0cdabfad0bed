"""Decoders with code of their own: joint projections, learned positions, older attention."""

from __future__ import annotations

from phaze_fast.models import operators as op
from phaze_fast.models.families.llama import Llama, rotate_pairs
from phaze_fast.models.tape import Tensor

_FLOAT = "float32"


class Phi3(Llama):
    """Llama with fused projections, and dropouts before the residual sums."""

    partial, mlp_names = True, ("", "activation_fn", "down_proj")
    block_drops, residual_drops = ("resid_attn_dropout", "resid_mlp_dropout"), "resid_pdrop"

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        m = self.model
        ends = (m.query_width, m.query_width + m.kv_width, m.query_width + 2 * m.kv_width)
        both = self._project("qkv_proj", x, ends[-1], m.qkv_bias)
        parts = [op.part(both, -1, a, b) for a, b in zip((0, *ends), ends, strict=False)]
        return [self._heads(one) for one in parts]


class StableLm(Llama):
    """Llama with layer norms, perhaps parallel sub-layers, and heads rotated in part."""

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


class GPTNeoX(Llama):
    """Parallel blocks, and one projection in which each head has its query, key and value."""

    root, final, table, out_name = "gpt_neox", "final_layer_norm", "embed_in", "dense"
    attention_name, partial, joins_last = "attention", True, True
    mlp_names, parallel_sum = ("dense_h_to_4h", "act", "dense_4h_to_h"), "fax"
    block_drops, residual_first = ("post_attention_dropout", "post_mlp_dropout"), (False, False)
    embedding_drop, embedding_drops, residual_drops = "emb_dropout", *("hidden_dropout",) * 2

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        m = self.model
        both = self._project("query_key_value", x, 3 * m.query_width, m.qkv_bias)
        both = op.transpose(op.view(both, self.samples, self.seq, -1, 3 * m.head_width), 1, 2)
        return op.split(both, [m.head_width] * 3)


class GPT2(Llama):
    """Learned positions, and weights stored with one row for each input."""

    root, blocks, final, table = "transformer", "h", "ln_f", "wte"
    attention_name, out_name, first_norm, second_norm = "attn", "c_proj", "ln_1", "ln_2"
    mlp_names, residual_first = ("c_fc", "act", "c_proj"), (False, True)
    attention_drops, drops, embedding_drops = "attn_pdrop", "resid_pdrop", "embd_pdrop"
    attention_drop, mlp_drop, softmax_format = "resid_dropout", "dropout", ""

    def _project(self, name: str, x: Tensor, outs: int, bias: bool = True) -> Tensor:
        """Run a ``Conv1D``: rows times a matrix plus a bias."""
        assert bias, "every such layer has one"
        with self.tape.module(name):
            weight, shift = self.tape.parameter(x.shape[-1], outs), self.tape.parameter(outs)
            out = op.addmm(shift, op.view(x, -1, x.shape[-1]), weight)
            return self._adapted(name, x, op.view(out, *x.shape[:-1], outs))

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        both = self._project("c_attn", x, 3 * self.model.hidden)
        q, k, v = op.split(both, [self.model.hidden] * 3, 2)
        k, v = self._heads(k), self._heads(v)
        return [self._heads(q), k, v]

    def _embedded(self) -> Tensor:
        words = self._words()
        with self.tape.module("wpe"):
            table = self.tape.parameter(self.model.max_positions or 0, self.model.hidden)
            places = op.embedding(table, self.tape.constant(1, self.seq, dtype="int64"))
        return self._dropped("drop", op.add(words, places), self.embedding_drops)

    def _trunk(self) -> Tensor:
        x = super()._trunk()
        return op.view(x, *x.shape)


class OPT(Llama):
    """Learned positions; queries are scaled before attention."""

    root, final, out_name = "model.decoder", "final_layer_norm", "out_proj"
    first_norm, second_norm = "self_attn_layer_norm", "final_layer_norm"

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        m = self.model
        q = self._heads(op.mul(self._project("q_proj", x, m.hidden, m.qkv_bias), 1.0))
        k, v = (self._project(name, x, m.hidden, m.qkv_bias) for name in ("k_proj", "v_proj"))
        return [q, self._heads(k), self._heads(v)]

    def _block(self, x: Tensor) -> Tensor:
        m, shape = self.model, x.shape
        out = self._self_attention(self._norm(self.first_norm, x))
        x = op.reshape(op.add(x, self._drop(out, "dropout")), -1, m.hidden)
        out = self._project("fc1", self._norm(self.second_norm, x), m.ffn, m.ffn_bias)
        out = self._project(
            "fc2", self._run("activation_fn", self.activation, out), m.hidden, m.ffn_bias
        )
        return op.view(op.add(x, self._drop(out, "dropout")), *shape)

    def _embedded(self) -> Tensor:
        words = super()._embedded()
        with self.tape.module("embed_positions"):
            table = self.tape.parameter(self.model.max_positions or 0, self.model.hidden)
            places = op.embedding(table, self.tape.constant(self.samples, self.seq, dtype="int64"))
        return op.add(words, places)


class GPTBigCode(GPT2):
    """One key and value for all heads, and weights stored with one row for each output."""

    softmax_format, _project = _FLOAT, Llama._project

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        m = self.model
        both = self._project("c_attn", x, m.hidden + 2 * m.kv_width, bias=True)
        if m.kv_heads == 1:
            q, k, v = op.split(op.unsqueeze(both, 1), [m.hidden, m.kv_width, m.kv_width], 3)
            return [self._heads(q), k, v]
        rows = op.view(both, self.samples, self.seq, m.heads, 3 * m.head_width)
        return op.split(op.transpose(rows, 1, 2), [m.head_width] * 3, 3)


class GPTJ(GPT2):
    """Parallel blocks, and explicit attention in fp32 with neighbouring elements rotated."""

    mlp_names, embedding_drop, parallel_sum = ("fc_in", "act", "fc_out"), "drop", "afx"
    _project, _embedded = Llama._project, Llama._embedded

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        names, shape = ("q_proj", "k_proj", "v_proj"), (*x.shape[:-1], -1, self.model.head_width)
        rows = [self._project(name, x, self.model.hidden) for name in names]
        q, k, v = (op.view(one, *shape) for one in rows)
        v = op.permute(v, 0, 2, 1, 3)
        return [*self._positioned(q, k), v]

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        width, full = self._setting("rotary_dim"), q.shape[-1]
        both = [k, q]
        rests: list[Tensor] = []
        if width:
            cuts = [[op.part(x, 3, 0, width), op.part(x, 3, width, full)] for x in both]
            both, rests = [cut[0] for cut in cuts], [cut[1] for cut in cuts]
        turned = []
        for x in both:
            cos, sin = (self.tape.constant(1, self.seq, 1, x.shape[-1]) for _ in range(2))
            turned.append(op.add(op.mul(x, cos), op.mul(rotate_pairs(x), sin)))
        if rests:
            turned = [op.cat([x, rest], -1) for x, rest in zip(turned, rests, strict=True)]
        k, q = (op.permute(x, 0, 2, 1, 3) for x in turned)
        return [q, k]

    def _shares(self, scores: Tensor) -> Tensor:
        """Scale and mask scores, and take the softmax."""
        return op.softmax(op.masked(op.div(scores, 1.0), self._mask()))

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = self._queries_keys_values(x)
        q, k = op.to(q, _FLOAT), op.to(k, _FLOAT)
        shares = op.to(self._shares(op.matmul(q, op.transpose(k, 2, 3))), v.dtype)
        shares = self._dropped("attn_dropout", shares, self.attention_drops)
        rows = op.contiguous(op.permute(op.matmul(shares, v), 0, 2, 1, 3))
        out = op.view(rows, self.samples, self.seq, self.model.hidden)
        out = self._project("out_proj", out, self.model.hidden, self.model.out_bias)
        return self._dropped(self.attention_drop, out, self.drops)


class CodeGen(GPTJ):
    """GPT-J with one projection in four parts, each with queries, values and keys of its heads."""

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        m, lead = self.model, (self.samples, self.seq)
        both = op.reshape(self._project("qkv_proj", x, 3 * m.hidden), *lead, 4, -1)
        q, v, k = op.split(both, [m.hidden // 4] * 3)
        q, k, v = (
            op.reshape(
                op.reshape(one, *lead, 4, m.heads // 4, m.head_width), *lead, -1, m.head_width
            )
            for one in (q, k, v)
        )
        v = op.permute(v, 0, 2, 1, 3)
        return [*self._positioned(q, k), v]

    def _shares(self, scores: Tensor) -> Tensor:
        scores = op.div(op.masked(scores, self._mask()), 1.0)
        return self._run("", op.softmax, scores)


class GPTNeo(GPTJ):
    """Learned positions; explicit attention in fp32, with a mask of its own in each layer."""

    attention_drops, drops = "attention_dropout", "resid_dropout"
    embedding_drops, attention_name = "embed_dropout", "attn.attention"
    mlp_names, steps = ("c_fc", "act", "c_proj"), ("project", "view turn")
    _queries_keys_values = Llama._queries_keys_values
    _embedded = GPT2._embedded

    def _shares(self, scores: Tensor) -> Tensor:
        longest = self.model.max_positions or self.seq
        mask = self.tape.constant(1, 1, longest, longest, dtype="bool")
        mask = op.part(op.part(mask, 2, 0, self.seq), 3, 0, self.seq)
        return op.softmax(op.masked(op.where(mask, scores), self._mask()))

    def _self_attention(self, x: Tensor) -> Tensor:
        with self.tape.module("attn"), self.tape.module("attention"):
            return self._attention(x)


class Falcon(Llama):
    """Heads cut out of one projection; perhaps parallel sub-layers, behind one norm or two."""

    root, blocks, final, table = "transformer", "h", "ln_f", "word_embeddings"
    attention_name, mlp_names = "self_attention", ("dense_h_to_4h", "act", "dense_4h_to_h")

    def _project(self, name: str, x: Tensor, outs: int, bias: bool = False) -> Tensor:
        """Run a linear layer whose bias is added by an operator of its own."""
        with self.tape.module(name):
            out = op.linear(x, self.tape.parameter(outs, x.shape[-1]))
            return op.add(out, self.tape.parameter(outs)) if bias else out

    def _cut(self, rows: Tensor) -> list[Tensor]:
        """Cut rows into queries, keys and values of shape (samples, tokens, heads, width)."""
        m, lead = self.model, (self.samples, self.seq)
        if self.style.settings["new_decoder_architecture"]:
            groups = m.kv_heads or 1
            rows = op.view(rows, *lead, -1, m.heads // groups + 2, m.head_width)
            q = op.part(rows, 3, 0, m.heads // groups)
            k, v = (op.pick(rows, 3) for _ in range(2))
            k, v = op.expand(k, *q.shape), op.expand(v, *q.shape)
            return [op.reshape(x, *lead, m.heads, m.head_width) for x in (q, k, v)]
        if m.kv_heads == 1:
            rows = op.view(rows, *lead, m.heads + 2, m.head_width)
            q = op.part(rows, 2, 0, m.heads)
            return [q, op.pick(rows, 2), op.pick(rows, 2)]
        rows = op.view(rows, *lead, m.heads, 3, m.head_width)
        return [op.select(rows, 3) for _ in range(3)]

    def _attention(self, x: Tensor) -> Tensor:
        m = self.model
        width = m.query_width + 2 * m.kv_width
        both = self._cut(self._project("query_key_value", x, width, m.qkv_bias))
        heads = [op.transpose(one, 1, 2) for one in both]
        q, k, v = (view_or_copy(one) for one in heads)
        rotates = m.positions == "rotary"
        if rotates:
            q, k = self._positioned(q, k)
            out = op.attention(q, k, v, causal=True, dropout=False, window=0)
            out = op.permute(op.view(out, *out.shape), 0, 2, 1, 3)
        else:
            drops = "attention_dropout" in self.style.dropouts
            out = op.transpose(op.attention(q, k, v, causal=True, dropout=drops, window=0), 1, 2)
        out = op.reshape(out, self.samples, self.seq, m.query_width)
        return self._project("dense", out, m.hidden, m.out_bias)

    def _block(self, x: Tensor) -> Tensor:
        parallel = self.model.parallel
        two = parallel == "two-norms"
        first = self._norm("ln_attn" if two else "input_layernorm", x)
        second = self._norm("ln_mlp", x) if two else first
        out = self._self_attention(first)
        if parallel == "no":
            x = op.add(x, self._drop(out, "attention_dropout"))
            both = self._feed_forward(self._norm("post_attention_layernorm", x))
        else:
            both = op.add(self._feed_forward(second), out, inplace=True)
        return op.add(x, self._drop(both, "hidden_dropout"))


class Bloom(Falcon):
    """Explicit attention with ALiBi, which is added in the product of queries and keys."""

    drops, _project = "hidden_dropout", Llama._project

    def _embedded(self) -> Tensor:
        return self._norm("word_embeddings_layernorm", super()._embedded())

    def _attention(self, x: Tensor) -> Tensor:
        m, lead = self.model, (self.samples, self.seq)
        both = self._project("query_key_value", x, 3 * m.hidden, bias=True)
        both = op.view(both, *lead, m.heads, 3, m.head_width)
        parts = [op.transpose(op.select(both, 3), 1, 2) for _ in range(3)]
        q, k, v = (op.reshape(one, self.samples * m.heads, self.seq, m.head_width) for one in parts)
        bias = self.tape.constant(self.samples * m.heads, 1, self.seq)
        scores = op.baddbmm(bias, q, op.transpose(k, 1, 2))
        scores = op.view(scores, self.samples, m.heads, self.seq, -1)
        scores = op.masked(scores, self._mask())
        shares = op.to(op.softmax(scores, _FLOAT), q.dtype)
        shares = self._dropped("attention_dropout", shares, self.attention_drops)
        rows = op.bmm(op.view(shares, -1, self.seq, self.seq), v)
        rows = op.permute(op.view(rows, self.samples, m.heads, self.seq, -1), 0, 2, 1, 3)
        out = self._project("dense", op.reshape(rows, *lead, m.hidden), m.hidden, bias=True)
        return self._drop(out, self.drops)

    def _mlp(self, x: Tensor, width: int) -> Tensor:
        x = self._run("gelu_impl", op.bloom_gelu, self._project("dense_h_to_4h", x, width, True))
        return self._drop(self._project("dense_4h_to_h", x, self.model.hidden, True), self.drops)

    def _block(self, x: Tensor) -> Tensor:
        rows = self._norm(self.first_norm, x)
        with self.tape.module(self.attention_name):
            x = op.add(x, self._attention(rows))
        rows = self._norm(self.second_norm, x)
        with self.tape.module(self.mlp_name):
            return op.add(x, self._mlp(rows, self.model.ffn))


def view_or_copy(x: Tensor) -> Tensor:
    """Reshape to the shape that `x` has, which gives a view."""
    return op.reshape(x, *x.shape)


class Mpt(Llama):
    """Explicit attention with ALiBi, a bias that falls with the distance."""

    root, blocks, final, table = "transformer", "blocks", "norm_f", "wte"
    attention_name, first_norm, second_norm, mlp_name = "attn", "norm_1", "norm_2", "ffn"

    def _attention(self, x: Tensor) -> Tensor:
        m, lead = self.model, (self.samples, self.seq)
        parts = op.split(self._project("Wqkv", x, 3 * m.hidden), [m.hidden] * 3, 2)
        q, k, v = (op.transpose(op.reshape(y, *lead, m.heads, -1), 1, 2) for y in parts)
        scores = op.mul(op.matmul(q, op.transpose(k, 2, 3)), 1.0)
        scores = op.masked(scores, self.tape.constant(m.heads, 1, self.seq, dtype=_FLOAT))
        if not self.rotary:  # one mask for all layers
            mask = self.tape.constant(self.samples, 1, self.seq, self.seq, dtype="bool")
            self.rotary = [mask]
        shares = op.softmax(op.masked_fill(scores, self.rotary[0]), _FLOAT)
        shares = self._drop(op.to(shares, v.dtype), "attn_pdrop")
        rows = op.contiguous(op.permute(op.matmul(shares, v), 0, 2, 1, 3))
        return self._project("out_proj", op.view(rows, *lead, -1), m.hidden)

    def _block(self, x: Tensor) -> Tensor:
        m = self.model
        out = self._self_attention(self._norm(self.first_norm, x))
        x = op.add(self._dropped("resid_attn_dropout", out, "attn_pdrop"), x)
        rows = self._norm(self.second_norm, x)
        with self.tape.module(self.mlp_name):
            rows = self._run("act", self.activation, self._project("up_proj", rows, m.ffn))
            return op.add(self._drop(self._project("down_proj", rows, m.hidden), "attn_pdrop"), x)
