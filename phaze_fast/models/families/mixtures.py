"""Mixtures of experts of transformers, with experts as grouped products, and latent attention."""

from __future__ import annotations

from phaze_fast.models import operators as op
from phaze_fast.models.families.llama import Llama
from phaze_fast.models.tape import Tensor
from phaze_fast.models.transformer import MixtureOfExperts

_FLOAT = "float32"
Routed = tuple[Tensor, Tensor]
"""Weights of the chosen experts of each token, and the numbers of these experts."""


class Mixture(Llama):
    """A decoder whose feed-forward layers are mixtures of experts."""

    gate_name = "gate"
    stored_by_input = False  # whether expert weights have one row for each input

    @property
    def moe(self) -> MixtureOfExperts:
        """Sizes of the mixture of experts."""
        assert self.model.moe is not None
        return self.model.moe

    # ---- routers ----

    def _gate_weight(self) -> Tensor:
        """Weights of the router."""
        return self.tape.parameter(self.moe.experts, self.model.hidden)

    def _route(self, rows: Tensor) -> Routed:
        """Choose experts by the largest shares of a softmax."""
        logits = op.linear(op.view(rows, -1, self.model.hidden), self._gate_weight())
        scores = op.softmax(logits, _FLOAT)
        weights, chosen = op.topk(scores, self.moe.top_k)
        if self._setting("norm_topk_prob"):
            weights = op.divided(weights, op.total(weights))
        return op.to(weights, rows.dtype), chosen

    # ---- experts ----

    def _gated(self, rows: Tensor) -> Tensor:
        """Activation of one half of the rows times the other half."""
        width = rows.shape[-1] // 2
        gate, up = op.split(rows, [width, width])
        return op.mul(self._run("act_fn", self.activation, gate), up)

    def _grouped(
        self, rows: Tensor, outs: int, ends: Tensor, order: Tensor, beyond: Tensor | None = None
    ) -> Tensor:
        """Product of each expert's rows with its weights; rows `beyond` all experts are masked."""
        count, width = self.moe.experts, rows.shape[-1]
        if self.stored_by_input:
            weight = self.tape.parameter(count, width, outs)
        else:
            weight = self.tape.parameter(count, outs, width)
        bias = None
        if self.model.ffn_bias:
            bias = op.index(self.tape.parameter(count, outs), order)
        if beyond is not None:
            rows = op.masked_fill(rows, beyond, inplace=True)
        columns = weight if self.stored_by_input else op.transpose(weight, 1, 2)
        out = op.grouped_mm(rows, columns, ends)
        return out if bias is None else op.add(out, bias, inplace=True)

    def _experts(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sort rows by expert, run the experts, and sum the results of each token."""
        moe = self.moe
        pairs = chosen.shape[0] * moe.top_k
        weights, numbers = op.reshape(weights, -1), op.reshape(chosen, -1)
        ordered, places = op.plain("sort", [numbers], [numbers.shape] * 2, "int64")
        (tokens,) = op.plain("floor_divide", [places], [(pairs,)], "int64")
        own = op.index(rows, tokens)
        shares = op.index(weights, places)
        (small,) = op.plain("_to_copy", [ordered], [(pairs,)], "int32")
        (counts,) = op.plain("histc", [small], [(moe.experts,)], "int32")
        (ends,) = op.plain("cumsum", [counts], [(moe.experts,)], "int32")
        return self._combined(own, shares, places, ends, ordered)

    def _combined(
        self, own: Tensor, shares: Tensor, places: Tensor, ends: Tensor, ordered: Tensor
    ) -> Tensor:
        """Run the experts on sorted rows, weight the results and sum those of each token."""
        pairs, hidden, dtype = own.shape[0], self.model.hidden, own.dtype
        (beyond,) = op.plain("ge", [ordered], [(pairs,)], "bool")
        beyond = op.unsqueeze(beyond, -1)  # rows of other ranks' experts; masked even if none
        self.tape.add("clamp", [ordered], [ordered])
        inner = self._grouped(own, 2 * self.moe.expert_ffn, ends, ordered, beyond)
        inner = op.masked_fill(inner, beyond)
        out = self._grouped(self._gated(inner), hidden, ends, ordered)
        out = op.mul(op.masked_fill(out, beyond), op.unsqueeze(shares, -1))
        back, numbers = (self.tape.constant(pairs, dtype="int64") for _ in range(2))
        self.tape.add("index_put", [back, places, numbers], [back])
        out = op.view(op.index(out, back), -1, self.moe.top_k, hidden)
        return op.to(op.total(out, 1, keepdim=False), dtype)

    def _mixture(self, x: Tensor) -> Tensor:
        """Router and experts of a layer."""
        rows = op.view(x, -1, self.model.hidden)
        with self.tape.module(self.gate_name):
            weights, chosen = self._route(rows)
        with self.tape.module("experts"):
            out = self._experts(rows, weights, chosen)
        return op.reshape(out, *x.shape)

    def _feed_forward(self, x: Tensor) -> Tensor:
        with self.tape.module(self.mlp_name):
            if self.model.has_experts(self.layer):
                return self._mixture(x)
            return self._mlp(x, self.model.ffn)


class Qwen2Moe(Mixture):
    """Mixtures with a shared expert whose output a gate scales."""

    def _mixture(self, x: Tensor) -> Tensor:
        rows = op.view(x, -1, self.model.hidden)
        with self.tape.module("shared_expert"):
            shared = self._mlp(rows, self.moe.shared_width)
        with self.tape.module("gate"):
            weights, chosen = self._route(rows)
        with self.tape.module("experts"):
            out = self._experts(rows, weights, chosen)
        shared = op.mul(op.sigmoid(self._project("shared_expert_gate", rows, 1)), shared)
        return op.reshape(op.add(out, shared), *x.shape)


class Mixtral(Mixture):
    """Mixtures whose routing weights stay in fp32 and are divided by their sum."""

    def _route(self, rows: Tensor) -> Routed:
        logits = op.linear(op.view(rows, -1, self.model.hidden), self._gate_weight())
        scores = op.softmax(op.to(logits, _FLOAT))
        weights, chosen = op.topk(scores, self.moe.top_k)
        return op.divided(weights, op.total(weights)), chosen


class GraniteMoe(Mixture):
    """Mixtures whose router takes its softmax over the chosen experts alone."""

    mlp_name, gate_name = "block_sparse_moe", "router"

    def _route(self, rows: Tensor) -> Routed:
        logits = op.to(op.linear(rows, self._gate_weight()), _FLOAT)
        weights, chosen = op.topk(logits, self.moe.top_k)
        return op.to(op.softmax(weights), rows.dtype), chosen


class GptOss(Mixture):
    """Explicit attention with sinks, and clamped experts with biases."""

    gate_name, stored_by_input, gains = "router", True, "wide"

    def _table_width(self) -> int:
        return self.model.head_width // 2

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = x.shape[-1] // 2
        first, second = op.split(x, [width, width])
        left = op.sub(op.mul(first, cos), op.mul(second, sin))
        return op.cat([left, op.add(op.mul(second, cos), op.mul(first, sin))], -1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self._repeated(k), self._repeated(v)
        scores = op.mul(op.matmul(q, op.transpose(k, 2, 3)), 1.0)
        scores = op.masked(scores, self._mask())
        sinks = op.reshape(self.tape.parameter(self.model.heads), 1, -1, 1, 1)
        sinks = op.expand(sinks, self.samples, self.model.heads, self.seq, 1)
        both = op.cat([scores, sinks], -1)
        both = op.sub(both, op.largest(both)[0])
        shares = op.softmax(both)
        shares = op.to(self._drop(op.part(shares, -1, 0, self.seq), self.attention_drops), v.dtype)
        return op.contiguous(op.transpose(op.matmul(shares, v), 1, 2))

    def _route(self, rows: Tensor) -> Routed:
        bias = self.tape.parameter(self.moe.experts)
        weights, chosen = op.topk(op.linear(rows, self._gate_weight(), bias), self.moe.top_k)
        return op.softmax(weights), chosen

    def _gated(self, rows: Tensor) -> Tensor:
        gate, up = op.every_other(rows), op.every_other(rows)
        gate, up = op.clamp(gate), op.clamp(up, both=True)
        inner = op.mul(gate, op.sigmoid(op.mul(gate, 1.0)))
        return op.mul(op.add(up, 1.0), inner)


class DeepSeek(Mixture):
    """Mixtures with routers in fp32 and with shared experts."""

    def _router_logits(self, x: Tensor) -> Tensor:
        """Logits of the router in fp32."""
        rows = op.view(x, -1, self.model.hidden)
        return op.linear(op.to(rows, _FLOAT), op.to(self._gate_weight(), _FLOAT))

    def _mixture(self, x: Tensor) -> Tensor:
        with self.tape.module("gate"):
            weights, chosen = self._route(x)
        rows = op.view(x, -1, self.model.hidden)
        with self.tape.module("experts"):
            out = op.view(self._experts(rows, weights, chosen), *x.shape)
        with self.tape.module("shared_experts"):
            shared = self._mlp(x, self.moe.shared_width)
        return op.add(out, shared)

    def _limited(self, groups: Tensor) -> Tensor:
        """Mask of the experts outside the best groups, from a score of each group."""
        count, experts = groups.shape[0], self.moe.experts
        number = self._setting("n_group")
        _, best = op.topk(groups, self._setting("topk_group"))
        zeros = self.tape.constant(*groups.shape, dtype=_FLOAT)
        (mask,) = op.plain("scatter", [zeros, best], [groups.shape], _FLOAT)
        wide = op.expand(op.unsqueeze(mask, -1), count, number, experts // number)
        flat = op.reshape(wide, -1, experts)
        (flags,) = op.plain("_to_copy", [flat], [flat.shape], "bool")
        (outside,) = op.plain("bitwise_not", [flags], [flat.shape], "bool")
        return outside

    def _route(self, rows: Tensor) -> Routed:
        scores = op.sigmoid(self._router_logits(rows))
        biased = op.add(scores, self.tape.constant(self.moe.experts))
        number = self._setting("n_group")
        parts = op.view(biased, -1, number, self.moe.experts // number)
        best, _ = op.topk(parts, 2)
        outside = self._limited(op.total(best, keepdim=False))
        _, chosen = op.topk(op.masked_fill(biased, outside), self.moe.top_k)
        weights = op.gather(scores, chosen)
        if self._setting("norm_topk_prob"):
            weights = op.divided(weights, op.add(op.total(weights), 1e-20))
        return op.mul(weights, 1.0), chosen


class DeepSeekV3(DeepSeek):
    """DeepSeek's mixtures with latent attention."""

    def _table_width(self) -> int:
        assert self.model.latent is not None
        return self.model.latent.rotary_width

    def _tables(self) -> list[Tensor]:
        tables = super()._tables()
        if self._setting("rope_interleave"):
            tables = [op.part(x, -1, 0, x.shape[-1] // 2) for x in tables]
        return tables

    def _rotated_pair(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Rotate the rotary parts of queries and of the shared key."""
        cos, sin = self._tables()
        if not self._setting("rope_interleave"):
            return [self._turned(q, cos, sin), self._turned(k, cos, sin)]
        halves = [[op.every_other(x), op.every_other(x)] for x in (q, k)]
        return [
            op.cat(
                [op.sub(op.mul(a, cos), op.mul(b, sin)), op.add(op.mul(b, cos), op.mul(a, sin))], -1
            )
            for a, b in halves
        ]

    def _attention(self, x: Tensor) -> Tensor:
        m, latent = self.model, self.model.latent
        assert latent is not None
        shape = (self.samples, self.seq)
        if latent.query_rank is None:
            q = self._project("q_proj", x, m.heads * latent.query_width)
        else:
            q = self._project("q_a_proj", x, latent.query_rank, m.qkv_bias)
            q = self._project(
                "q_b_proj", self._norm("q_a_layernorm", q), m.heads * latent.query_width
            )
        q = op.transpose(op.view(q, *shape, -1, latent.query_width), 1, 2)
        plain, turned = op.split(q, [latent.plain_width, latent.rotary_width])
        both = self._project(
            "kv_a_proj_with_mqa", x, latent.kv_rank + latent.rotary_width, m.qkv_bias
        )
        kv, key = op.split(both, [latent.kv_rank, latent.rotary_width])
        kv = op.view(self._norm("kv_a_layernorm", kv), self.samples, 1, self.seq, latent.kv_rank)
        key = op.view(key, self.samples, 1, self.seq, latent.rotary_width)
        turned, key = self._rotated_pair(turned, key)
        q = op.cat([plain, turned], -1)
        k, v = self._spread_keys(kv, key)
        out = op.contiguous(op.reshape(self._attend(q, k, v), *shape, -1))
        return self._project("o_proj", out, m.hidden, m.out_bias)

    def _spread_keys(self, kv: Tensor, key: Tensor) -> list[Tensor]:
        """Keys and values of every head, from the latent vector and the shared key."""
        m, latent = self.model, self.model.latent
        assert latent is not None
        widths = [latent.plain_width, latent.value_width]
        kv = self._project("kv_b_proj", kv, m.heads * sum(widths))
        kv = op.transpose(op.view(kv, self.samples, self.seq, -1, sum(widths)), 1, 2)
        plain, v = op.split(kv, widths)
        key = op.expand(key, -1, m.heads, -1, -1)
        return [op.filled(plain, key), v]


class DeepSeekV2(DeepSeekV3):
    """Latent attention rotated by complex numbers in fp32; routing by a softmax."""

    def _rotated_pair(self, q: Tensor, k: Tensor) -> list[Tensor]:
        if not self.rotary:
            assert self.model.latent is not None
            width = self.model.latent.rotary_width // 2
            self.rotary = [self.tape.constant(1, self.seq, width, dtype="complex64")]
        pairs = [
            op.complex_view(op.reshape(op.to(x, _FLOAT), *x.shape[:-1], -1, 2)) for x in (q, k)
        ]
        turns = op.unsqueeze(self.rotary[0], 1)
        return [
            op.to(op.view(op.real_view(op.turned(x, turns)), *rows.shape), rows.dtype)
            for x, rows in zip(pairs, (q, k), strict=True)
        ]

    def _route(self, rows: Tensor) -> Routed:
        scores = op.softmax(self._router_logits(rows))
        if self.style.settings.get("topk_method") == "group_limited_greedy":
            number = self._setting("n_group")
            parts = op.view(scores, -1, number, self.moe.experts // number)
            scores = op.masked_fill(scores, self._limited(op.largest(parts, False)[0]))
        weights, chosen = op.topk(scores, self.moe.top_k)
        return op.mul(weights, 1.0), chosen
