"""The forward code of transformers' modules, family by family, on a tape.

A class has the structure of the family's module in transformers (version 5.18), and its methods
the operators of that module's code, in order; a family that differs overrides single methods.
The sizes are those of a `TransformerModel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phaze_fast.models import operators as op
from phaze_fast.models.huggingface import architecture
from phaze_fast.models.tape import Tape, Tensor
from phaze_fast.models.transformer import TransformerModel

_FLOAT, _HALF = "float32", "bfloat16"


def gelu_new(x: Tensor) -> Tensor:
    """GELU's tanh form as transformers writes it, operator by operator."""
    half = op.mul(x, 0.5)
    inner = op.mul(op.add(x, op.mul(op.power(x), 0.044715)), 0.8)
    return op.mul(half, op.add(op.tanh(inner), 1.0))


def gelu_fast(x: Tensor) -> Tensor:
    """GELU's tanh form with its polynomial factored, operator by operator."""
    half = op.mul(x, 0.5)
    scaled, cube = op.mul(x, 0.8), op.mul(op.mul(x, 0.044715), x)
    return op.mul(half, op.add(op.tanh(op.mul(scaled, op.add(cube, 1.0))), 1.0))


def quick_gelu(x: Tensor) -> Tensor:
    """GELU approximated by x times a logistic function."""
    return op.mul(x, op.sigmoid(op.mul(x, 1.702)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": op.gelu,
    "gelu_pytorch_tanh": op.gelu,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "quick_gelu": quick_gelu,
    "relu": op.relu,
    "relu2": lambda x: op.power(op.relu(x)),
    "silu": op.silu,
    "swish": op.silu,
}


def rotate_half(x: Tensor) -> Tensor:
    """Swap the halves of heads and negate one."""
    width = x.shape[-1]
    first, second = op.part(x, -1, 0, width // 2), op.part(x, -1, width // 2, width)
    return op.cat([op.neg(second), first], -1)


def rotate_pairs(x: Tensor) -> Tensor:
    """Swap neighbouring elements and negate one."""
    first, second = op.every_other(x), op.every_other(x)
    pairs = op.stack([op.neg(second), first])
    return op.view(pairs, *x.shape)


class Llama:
    """A decoder with the parts of Llama.

    A family that differs by names and choices alone has a ``module`` section in its entry in
    ``data/hf_architectures.yaml``, whose values replace the attributes below.
    """

    root, blocks, final, table = "model", "layers", "norm", "embed_tokens"
    attention_name, mlp_name, out_name, head_name = "self_attn", "mlp", "o_proj", "lm_head"
    projections = ("q_proj", "k_proj", "v_proj")
    steps: tuple[str, ...] = ("project view turn",)
    """Steps from rows to heads; those of one string run for queries, for keys, then for values."""
    mlp_names = ("up_proj", "act_fn", "down_proj")
    first_norm, second_norm = "input_layernorm", "post_attention_layernorm"
    output_norms: tuple[str, ...] = ()
    """Norms on the outputs of the sub-layers."""
    gains = "half"
    """How RMS norms apply gains: to rows in bf16 (``half``) or fp32 (``wide``), also cast to fp32
    (``fp32``), or also with 1 added (``one plus``). Layer norms are one kernel, with 1 added
    (``one plus``) or ``no`` gain, or run operator by operator in ``fp32``."""
    residual_first = (True, True)  # whether x is the first operand, in both residual sums
    parallel_sum = "xaf"
    """Order of the operands x, attention and feed-forward in the sum of a parallel block."""
    block_drops = ("", "")  # dropout modules before the residual sums
    attention_drop, mlp_drop, embedding_drop = "", "", ""
    """Dropout modules at the end of attention, of the feed-forward layer and of the embedding."""
    attention_drops, residual_drops, drops, embedding_drops = "attention_dropout", "", "", ""
    """Fields of the configuration that turn on dropouts: of attention, before residual sums, at the
    end of sub-layers, of the embedding."""
    factor = False  # whether sub-layers are scaled before the residual sums
    embedding_factor, logit_factor = "", ""
    """How embeddings (by ``tensor`` or ``number``) and logits (``mul`` or ``div``) are scaled."""
    partial = False  # whether code splits heads into a rotated part and the rest
    joins_last = False  # whether queries and keys are both rotated before parts are joined
    neighbours = False  # whether neighbouring elements are rotated, instead of halves of heads
    turned_format, products_format = "", ""
    """Formats to which queries and keys are cast before rotation, and before its products."""
    turns = "all"
    """Rotated layers: ``all``; windowed ones (``window``); these, or all if none (``or all``)."""
    table_format = _HALF
    table_per_layer = False
    softmax_format = _FLOAT  # number format of explicit attention's softmax

    def __init__(
        self, tape: Tape, model: TransformerModel, samples: int, layers: Sequence[int]
    ) -> None:
        self.tape, self.model, self.layers = tape, model, layers
        self.samples, self.seq = samples, model.seq
        assert model.module is not None
        self.style = model.module
        vars(self).update(architecture(self.style.family)["module"])
        self.activation = _ACTIVATIONS[self.style.activation]
        self.ids = tape.constant(samples, model.seq, dtype="int64")
        self.rotary: list[Tensor] = []
        self.layer = 0
        """Position of the running block."""

    def _setting(self, name: str) -> int:
        """Value of a field that has no attribute of its own; 0 if it is absent."""
        return int(self.style.settings.get(name, 0))

    # ---- parts ----

    def _run(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run `function` as the child module `name`."""
        with self.tape.module(name):
            return function(x)

    def _project(self, name: str, x: Tensor, outs: int, bias: bool = False) -> Tensor:
        """Run the linear layer `name`, with its adapter if it has one."""
        with self.tape.module(name):
            weight = self.tape.parameter(outs, x.shape[-1])
            out = op.linear(x, weight, self.tape.parameter(outs) if bias else None)
            return self._adapted(name, x, out)

    def _adapted(self, name: str, x: Tensor, out: Tensor) -> Tensor:
        """Add the output of the adapter of a linear layer, if it has one, as PEFT does."""
        lora = self.tape.lora
        if lora is None or not lora.adapts(name):
            return out
        with self.tape.module("lora_dropout"):
            x = op.dropout(x, lora.dropout > 0.0)
        for child, shape in (
            ("lora_A", (lora.rank, x.shape[-1])),
            ("lora_B", (out.shape[-1], lora.rank)),
        ):
            with self.tape.module(child):
                x = op.linear(x, self.tape.parameter(*shape, adapter=True))
        return op.add(out, op.mul(x, 2.0))

    def _rms_norm(self, x: Tensor) -> Tensor:
        """RMS norm in fp32, with `gains`."""
        gain = self.tape.parameter(x.shape[-1])
        wide = op.to(x, _FLOAT)
        wide = op.mul(wide, op.rsqrt(op.add(op.mean(op.power(wide)), 1e-6)))
        if self.gains == "half":
            return op.mul(gain, op.to(wide, x.dtype))
        if self.gains == "one plus":
            return op.to(op.mul(wide, op.add(op.to(gain, _FLOAT), 1.0)), x.dtype)
        return op.to(op.mul(op.to(gain, _FLOAT) if self.gains == "fp32" else gain, wide), x.dtype)

    def _layer_norm(self, x: Tensor) -> Tensor:
        """Layer norm, as `gains` says."""
        if self.gains == "no":
            return op.to(op.layer_norm(op.to(x, _FLOAT), None, None), x.dtype)
        if self.gains == "fp32":
            gain = self.tape.parameter(*x.shape[2:])  # for a row, or for each head by itself
            wide = op.to(x, _FLOAT)
            middle = op.mean(wide)
            spread = op.mean(op.power(op.sub(wide, middle)))
            wide = op.mul(op.sub(wide, middle), op.rsqrt(op.add(spread, 1e-6)))
            return op.to(op.mul(op.to(gain, _FLOAT), wide), x.dtype)
        gain = self.tape.parameter(x.shape[-1])
        shift = self.tape.parameter(x.shape[-1]) if self.model.norm_bias else None
        return op.layer_norm(x, op.add(gain, 1.0) if self.gains == "one plus" else gain, shift)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Run a norm, if it has a name."""
        if not name:
            return x
        with self.tape.module(name):
            return self._rms_norm(x) if self.model.norm == "rmsnorm" else self._layer_norm(x)

    def _drop(self, x: Tensor, name: str) -> Tensor:
        """Apply dropout if the configuration's field `name` is not zero."""
        return op.dropout(x, name in self.style.dropouts)

    def _dropped(self, module: str, x: Tensor, name: str) -> Tensor:
        """Run a dropout module; with an empty `module` call the dropout function."""
        if not module:
            return self._drop(x, name)
        with self.tape.module(module):
            return self._drop(x, name)

    # ---- attention ----

    def _heads(self, x: Tensor) -> Tensor:
        """Reshape rows of all heads to one matrix per head."""
        return op.transpose(op.view(x, self.samples, self.seq, -1, self.model.head_width), 1, 2)

    def _queries_keys_values(self, x: Tensor) -> list[Tensor]:
        """Project queries, keys and values."""
        parts = [x, x, x]
        for steps in self.steps:
            for at in range(3):
                for step in steps.split():
                    parts[at] = self._step(step, at, parts[at])
        return parts

    def _step(self, step: str, at: int, x: Tensor) -> Tensor:
        """Run one of `steps` for queries (0), keys (1) or values (2)."""
        m = self.model
        if step == "project":
            width = m.kv_width if at else m.query_width
            return self._project(self.projections[at], x, width, m.qkv_bias)
        if step == "norm":
            return x if at == 2 or m.qk_norm == "no" else self._norm(("q_norm", "k_norm")[at], x)
        if step == "clip":
            return op.clamped(x) if self._setting("clip_qkv") else x
        if step == "view":
            return op.view(x, self.samples, self.seq, -1, m.head_width)
        return op.transpose(x, 1, 2)

    def _tables(self) -> list[Tensor]:
        """Cosines and sines of the positions, made once or, with `table_per_layer`, per layer."""
        if not self.rotary or self.table_per_layer:
            shape, form = (1, self.seq, self._table_width()), self.table_format
            self.rotary = [self.tape.constant(*shape, dtype=form) for _ in range(2)]
        return [op.unsqueeze(x, 1) for x in self.rotary]

    def _table_width(self) -> int:
        """Width of the tables of cosines and sines."""
        return self.style.rotary_width or self.model.head_width

    def _rotates(self) -> bool:
        """Whether positions rotate the queries and keys of the running block."""
        m = self.model
        if m.positions != "rotary" or self.layer in self.style.unrotated:
            return False
        windowed = m.window is not None and self.layer not in m.full_attention_layers
        return windowed or self.turns == "all" or (self.turns == "or all" and m.window is None)

    def _half_turned(self, x: Tensor) -> Tensor:
        """Rotate pairs of elements by 90 degrees: across the halves of heads, or neighbours."""
        return rotate_pairs(x) if self.neighbours else rotate_half(x)

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate by the angles of the positions."""
        form = self.products_format or x.dtype
        first = op.mul(op.to(x, form), cos)
        return op.add(first, op.mul(op.to(self._half_turned(x), form), sin))

    def _positioned(self, q: Tensor, k: Tensor) -> list[Tensor]:
        """Apply positions to queries and keys."""
        if not self._rotates():
            return [q, k]
        q, k = (op.to(x, self.turned_format or x.dtype) for x in (q, k))
        cos, sin = self._tables()
        width, full = cos.shape[-1], q.shape[-1]
        rests: list[list[Tensor]] = [[], []]
        if self.partial:  # both are sliced before either is rotated
            cuts = [[op.part(x, -1, 0, width), op.part(x, -1, width, full)] for x in (q, k)]
            (q, *rests[0]), (k, *rests[1]) = cuts
        turned = []
        for x, rest in ((q, rests[0]), (k, rests[1])):
            y = self._turned(x, cos, sin)
            turned.append(op.cat([y, *rest], -1) if rest and not self.joins_last else y)
        if self.joins_last:
            turned = [op.cat([y, *rest], -1) for y, rest in zip(turned, rests, strict=True)]
        return [op.to(y, _HALF) for y in turned]

    def _repeated(self, x: Tensor) -> Tensor:
        """Copy keys or values to every query head."""
        groups = self.model.heads // x.shape[1]
        if groups == 1:
            return x
        count, heads, seq, width = x.shape
        spread = op.expand(op.unsqueeze(x, 2), count, heads, groups, seq, width)
        return op.reshape(spread, count, heads * groups, seq, width)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with the configured kernel; the result has rows of all heads."""
        m, drops = self.model, self.attention_drops
        windowed = m.causal and m.is_windowed(self.layer, self.seq)
        if m.attention == "eager":
            return self._explicit(q, k, v)
        if windowed:
            seen = {"causal": True, "dropout": drops in self.style.dropouts, "window": m.window}
        else:
            seen = {"causal": m.causal, "dropout": drops in self.style.dropouts}
            seen["expands_mask"] = not m.causal
        fits = k.shape[-1] == v.shape[-1] <= 256
        if windowed or not fits:
            k, v = self._repeated(k), self._repeated(v)
        out = op.attention(q, k, v, **seen)
        return op.contiguous(op.transpose(out, 1, 2))

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(QK^T)V operator by operator."""
        k, v = self._repeated(k), self._repeated(v)
        scores = op.mul(op.matmul(q, op.transpose(k, 2, 3)), 1.0)
        if self.model.score_cap:
            scores = op.mul(op.tanh(op.div(scores, 1.0)), 1.0)
        if self.model.causal:
            scores = op.masked(scores, self._mask())
        shares = op.to(op.softmax(scores, self.softmax_format), q.dtype)
        shares = self._drop(shares, self.attention_drops)
        return op.contiguous(op.transpose(op.matmul(shares, v), 1, 2))

    def _mask(self) -> Tensor:
        """Return the mask that is added to attention scores."""
        return self.tape.constant(self.samples, 1, self.seq, self.seq)

    def _attention(self, x: Tensor) -> Tensor:
        """Self-attention with its projections and dropout."""
        q, k, v = self._queries_keys_values(x)
        q, k = self._positioned(q, k)
        out = op.contiguous(op.reshape(self._attend(q, k, v), self.samples, self.seq, -1))
        out = self._project(self.out_name, out, self.model.hidden, self.model.out_bias)
        return self._dropped(self.attention_drop, out, self.drops)

    # ---- feed-forward ----

    def _mlp(self, x: Tensor, width: int) -> Tensor:
        """Feed-forward layer: plain, gated, or gated by a half of one projection."""
        m, bias, (up, act, down) = self.model, self.model.ffn_bias, self.mlp_names
        if m.fused_gate:
            gate, rows = op.split(self._project("gate_up_proj", x, 2 * width), [width, width])
            rows = op.mul(rows, self._run(act, self.activation, gate))
        elif m.gated:
            gate = self._run(act, self.activation, self._project("gate_proj", x, width, bias))
            rows = op.mul(gate, self._project(up, x, width, bias))
        else:
            rows = self._run(act, self.activation, self._project(up, x, width, bias))
        out = self._project(down, rows, m.hidden, bias)
        return self._dropped(self.mlp_drop, out, self.drops)

    def _feed_forward(self, x: Tensor) -> Tensor:
        """Feed-forward layer of a block."""
        with self.tape.module(self.mlp_name):
            return self._mlp(x, self.model.ffn)

    def _self_attention(self, x: Tensor) -> Tensor:
        """Attention layer of a block."""
        with self.tape.module(self.attention_name):
            return self._attention(x)

    # ---- the model ----

    def _sub_layer(self, at: int, rows: Tensor) -> Tensor:
        """Output of attention (0) or of the feed-forward layer (1), before the residual sum."""
        out = (self._self_attention, self._feed_forward)[at](rows)
        if self.output_norms:
            out = self._norm(self.output_norms[at], out)
        if self.block_drops[at]:
            out = self._dropped(self.block_drops[at], out, self.residual_drops)
        return op.mul(out, 1.0) if self.factor else out

    def _block(self, x: Tensor) -> Tensor:
        """One block: each sub-layer adds to its input; in a parallel block both add to one."""
        norms = self.first_norm, self.second_norm
        if self.model.parallel == "no":
            for at, norm in enumerate(norms):
                out = self._sub_layer(at, self._norm(norm, x))
                x = op.add(x, out) if self.residual_first[at] else op.add(out, x)
            return x
        rows = self._norm(norms[0], x)
        terms = {"x": x, "a": self._sub_layer(0, rows)}
        if self.model.parallel == "two-norms":
            rows = self._norm(norms[1], x)
        terms["f"] = self._sub_layer(1, rows)
        one, two, three = (terms[name] for name in self.parallel_sum)
        return op.add(op.add(one, two), three)

    def _words(self) -> Tensor:
        """Embeddings of the tokens."""
        with self.tape.module(self.table):
            self.words = self.tape.parameter(self.model.vocab, self.model.hidden)
            rows = op.embedding(self.words, self.ids)
            return op.mul(rows, self.tape.constant()) if self.embedding_factor == "tensor" else rows

    def _embedded(self) -> Tensor:
        """Input of the first block."""
        x = self._dropped(self.embedding_drop, self._words(), self.embedding_drops)
        return op.mul(x, 1.0) if self.embedding_factor == "number" else x

    def _trunk(self) -> Tensor:
        """Run everything before the head."""
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
            out = op.linear(x, weight, self.tape.parameter(m.vocab) if m.head_bias else None)
        if m.logit_cap:
            out = op.mul(op.tanh(op.div(out, 1.0)), 1.0)
        if self.logit_factor == "div":
            return op.div(out, 1.0)
        return op.mul(out, 1.0) if self.logit_factor else out

    def _loss(self, logits: Tensor) -> Tensor:
        """Mean cross-entropy of logits in fp32."""
        rows = op.view(op.to(logits, _FLOAT), -1, self.model.vocab)
        return op.cross_entropy(rows, self.tape.constant(rows.shape[0], dtype="int64"))

    def forward(self) -> Tensor:
        """Loss of one step."""
        with self.tape.module(self.root):
            x = self._trunk()
        return self._loss(self._logits(x))
