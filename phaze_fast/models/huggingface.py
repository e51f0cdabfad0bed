"""Transformers read from a HuggingFace ``config.json``; features not modelled are refused.

Every field of a configuration is either used, known to change no operator, or refused: none is
ignored silently. A field that is absent has the default of its architecture, as in transformers;
``data/hf_defaults.json`` lists those that operators depend on. ``data/hf_aliases.json`` lists the
fields that transformers also takes by a second name (``attribute_map`` of its configurations). An
architecture without a reader of its own is built on the meta device and traced.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from phaze_fast.documents import read_document
from phaze_fast.errors import InvalidInputError, MissingExtraError, nearest, not_accepted
from phaze_fast.models.graph_model import GraphModel
from phaze_fast.models.torch_import import from_torch
from phaze_fast.models.transformer import TransformerModel
from phaze_fast.tables import needed

# ---- configurations ----

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "relu2": "relu",
    "silu": "silu",
    "swish": "silu",
}
_GELU_BY_STEPS = ("gelu_new", "gelu_fast")  # transformers computes them operator by operator
_FULL, _WINDOWED = "full_attention", "sliding_attention"


class NotModelledError(InvalidInputError):
    """A feature that records cannot describe; PyTorch may be able to trace it."""


@cache
def _data(name: str) -> Any:
    text = (resources.files(__package__) / "data" / name).read_text("utf-8")
    if name.endswith(".json"):
        return json.loads(text)
    return frozenset(line for line in text.splitlines() if not line.startswith("#"))


class Fields:
    """A configuration that records which of its fields were used."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data = dict(data)
        self.source = source
        self.used = {"model_type"}
        self.gelu_by_steps = False
        self.defaults: Mapping[str, Any] = _data("hf_defaults.json").get(data["model_type"], {})
        spellings = _data("hf_aliases.json").get(data["model_type"], {})
        self._other = spellings | {native: alias for alias, native in spellings.items()}
        """Alternative names of fields that transformers accepts, in both directions."""

    def take(self, name: str, default: Any = ...) -> Any:
        """Value of a field, or its default; a field without a default must be given."""
        other = self._other.get(name, name)
        self.used.update((name, other))
        at = name if name in self.data or other not in self.data else other
        value = self.data[at] if at in self.data else self.defaults.get(name)
        if value is not None:
            return value
        if default is ...:
            raise InvalidInputError(f"{self.source}: {name}: is missing and has no default")
        return default

    def first(self, *names: str) -> str:
        """Name of the first of several spellings of a field that is given."""
        self.used.update(names)
        return next((name for name in names if self.data.get(name) is not None), names[0])

    def whole(self, name: str, default: Any = ...) -> int:
        """Whole number, 0 or more."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise not_accepted(f"{self.source}: {name}", value, "a whole number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Value of a boolean field."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise not_accepted(f"{self.source}: {name}", value, "true or false")
        return value

    def require(self, name: str, wanted: Any, why: str) -> None:
        """Accept a field only at the one value that is modelled."""
        value = self.take(name, wanted)
        if value != wanted:
            raise NotModelledError(
                f"{self.source}: {name}: {value!r} is not modelled; expected {wanted!r} ({why})"
            )

    def activation(self, name: str, default: Any = ...) -> str:
        """Name of a non-linearity."""
        return self.named_activation(name, self.take(name, default))

    def named_activation(self, name: str, value: Any, shown: Any = None) -> str:
        """Non-linearity that a field names by `value`, written there as `shown`."""
        if value not in _ACTIVATIONS:
            raise NotModelledError(
                f"{self.source}: {name}: activation {shown or value!r} is not modelled; "
                f"{nearest(str(value), _ACTIVATIONS)}"
            )
        self.gelu_by_steps = value in _GELU_BY_STEPS
        return _ACTIVATIONS[value]

    def drops(self, *names: str) -> bool:
        """Whether any of several dropouts is on."""
        taken = [bool(self.take(name, 0.0)) for name in names]  # marks every field as used
        return any(taken)

    def windows(self, layers: int, every: int | None = None) -> dict[str, Any]:
        """Attention window, and the layers without it: listed, or every `every`-th layer."""
        window, kinds = self.take("sliding_window", None), self.take("layer_types", None)
        pattern = self.take(self.first("sliding_window_pattern", "_sliding_window_pattern"), None)
        listed = kinds or []
        for kind in listed:
            if kind not in (_FULL, _WINDOWED):
                raise NotModelledError(
                    f"{self.source}: layer_types: {kind!r} is not modelled; expected {_FULL!r} or "
                    f"{_WINDOWED!r}"
                )
        used, first = self.take("use_sliding_window", True), self.take("max_window_layers", 0)
        if not window or not used:
            return {}
        window = self.whole("sliding_window")
        if kinds is not None:
            full = [at for at, kind in enumerate(listed[:layers]) if kind == _FULL]
        elif isinstance(pattern or every, int):
            step = int(pattern or every or 1)
            full = [at for at in range(layers) if (at + 1) % step == 0]
        else:
            full = list(range(min(first, layers)))
        return {"window": window, "full_attention_layers": tuple(full)}

    def no_windows(self) -> None:
        """Refuse a window that the architecture does not have."""
        window, longest = self.take("sliding_window", None), self.take("max_position_embeddings", 0)
        if window is not None and self.take("use_sliding_window", True) and window < longest:
            raise InvalidInputError(
                f"{self.source}: sliding_window: {window!r} is not modelled; attention over a "
                "window of a sequence (null or use_sliding_window: false is accepted)"
            )
        for kind in self.take("layer_types", ()):
            if kind != _FULL:
                raise InvalidInputError(
                    f"{self.source}: layer_types: {kind!r} is not modelled; expected {_FULL!r}"
                )

    def finish(self) -> None:
        """Refuse fields that were not used and are not known to be irrelevant."""
        idle = _data("hf_idle.txt")
        for name, value in self.data.items():
            if name not in self.used and name not in idle and value not in (None, False):
                raise InvalidInputError(
                    f"{self.source}: {name}: {value!r} is not modelled; remove it, or set it to "
                    "null if it does not matter"
                )


# ---- dense decoders ----


Reader = Callable[[Fields], dict[str, Any]]


def _ends(f: Fields, tied: bool = True) -> dict[str, Any]:
    return {"tied_embeddings": bool(f.take("tie_word_embeddings", tied))}


def llama(f: Fields) -> dict[str, Any]:
    """Llama's fields, which most architectures share: RMS norms, rotary positions, a gated FFN."""
    heads = f.whole("num_attention_heads")
    biased = bool(f.take("attention_bias", False))
    return {
        "layers": f.whole("num_hidden_layers"),
        "hidden": f.whole("hidden_size"),
        "heads": heads,
        "kv_heads": f.whole("num_key_value_heads", heads),
        "head_dim": f.take("head_dim", None),
        "ffn": f.whole("intermediate_size"),
        "vocab": f.whole("vocab_size"),
        "seq": f.whole("max_position_embeddings"),
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": f.activation(f.first("hidden_act", "hidden_activation"), "silu"),
        "gated": True,
        "qkv_bias": biased,
        "out_bias": biased,
        "ffn_bias": bool(f.take("mlp_bias", False)),
        "dropout": f.drops("attention_dropout"),
        **_ends(f, tied=False),
    }


def _llama(f: Fields) -> dict[str, Any]:
    f.no_windows()
    return llama(f)


def _like_llama(every: int | None = None, **fixed: Any) -> Reader:
    """Return a reader for Llama with windows and fixed fields; every `every`-th layer sees all."""

    def read(f: Fields) -> dict[str, Any]:
        fields = llama(f)
        return {**fields, **f.windows(fields["layers"], every), **fixed}

    return read


def _gemma(f: Fields, every: int | None = None, **fixed: Any) -> dict[str, Any]:
    f.require("use_bidirectional_attention", False, "tokens that see those after them")
    if f.data.get("hidden_act") in (None, "gelu"):  # a hidden_activation is given too
        f.data["hidden_act"] = None
    fields = llama(f)
    caps = {
        "score_cap": bool(f.take("attn_logit_softcapping", None)),
        "logit_cap": bool(f.take("final_logit_softcapping", None)),
    }
    activation = f.activation(f.first("hidden_activation", "hidden_act"), "gelu_pytorch_tanh")
    return {
        **fields,
        **f.windows(fields["layers"], every),
        **caps,
        "activation": activation,
        **_ends(f),
        **fixed,
    }


def _phi3(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    drops = f.drops("resid_pdrop", "embd_pdrop") or fields["dropout"]
    wide = {"fused_qkv": True, "fused_gate": True, "qkv_bias": False, "out_bias": False}
    return {**fields, **f.windows(fields["layers"]), **wide, "dropout": drops}


def _phi(f: Fields) -> dict[str, Any]:
    f.require("qk_layernorm", False, "norms of queries and keys with a bias")
    fields = llama(f)
    drops = f.drops("resid_pdrop", "embd_pdrop") or fields["dropout"]
    plain = {"norm": "layernorm", "gated": False, "parallel": "one-norm", "dropout": drops}
    biases = dict.fromkeys(("qkv_bias", "out_bias", "ffn_bias", "head_bias"), True)
    return {**fields, **plain, **biases}


def _neox(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    apart = f.flag("use_parallel_residual", True)
    return {
        **fields,
        "kv_heads": fields["heads"],
        "norm": "layernorm",
        "gated": False,
        "fused_qkv": True,
        "parallel": "two-norms" if apart else "no",
        "qkv_bias": bool(f.take("attention_bias", True)),
        "out_bias": bool(f.take("attention_bias", True)),
        "ffn_bias": True,
        "dropout": f.drops("hidden_dropout", "attention_dropout"),
    }


def _falcon(f: Fields) -> dict[str, Any]:
    hidden = f.whole(f.first("hidden_size", "n_embed"))
    heads = f.whole(f.first("num_attention_heads", "n_head"))
    grouped = f.flag("new_decoder_architecture", False)
    multi, together = f.flag("multi_query", True), f.flag("parallel_attn", True)
    kv_heads = f.whole(f.first("num_kv_heads", "n_head_kv"), heads)
    norms = f.take("num_ln_in_parallel_attn", None) or (2 if grouped else 1)
    biased = f.flag("bias", False)
    f.require("ff_factor", 4, "another width of the feed-forward layer")
    parallel = "no"
    if grouped or together:
        parallel = "two-norms" if grouped and norms == 2 else "one-norm"
    return {
        "layers": f.whole(f.first("num_hidden_layers", "n_layer")),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads if grouped else 1 if multi else heads,
        "ffn": f.whole("ffn_hidden_size", 4 * hidden),
        "vocab": f.whole("vocab_size"),
        "seq": f.whole("max_position_embeddings", 2048),
        "positions": "alibi" if f.flag("alibi", False) else "rotary",
        "activation": f.activation("activation", "gelu"),
        "parallel": parallel,
        "fused_qkv": True,
        "qkv_bias": biased,
        "out_bias": biased,
        "ffn_bias": biased,
        "dropout": f.drops("hidden_dropout", "attention_dropout"),
        **_ends(f),
    }


def _cohere(f: Fields) -> dict[str, Any]:
    f.used.add("logit_scale")  # a factor on the logits, which can be folded into the product
    fields = llama(f)
    return {
        **fields,
        **f.windows(fields["layers"], 4),
        "norm": "layernorm",
        "norm_bias": False,
        "parallel": "one-norm",
        "qk_norm": "width" if f.take("use_qk_norm", False) else "no",
        **_ends(f),
    }


def _starcoder2(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    drops = f.drops("residual_dropout", "embedding_dropout") or fields["dropout"]
    f.require("norm_type", "layer_norm", "other norms")
    biases = dict.fromkeys(("qkv_bias", "out_bias", "ffn_bias"), f.flag("use_bias", True))
    plain = {"norm": "layernorm", "gated": False, "dropout": drops}
    return {**fields, **f.windows(fields["layers"]), **plain, **biases, **_ends(f)}


def _stablelm(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    return {
        **fields,
        "norm": "layernorm",
        "parallel": "one-norm" if f.flag("use_parallel_residual", False) else "no",
        "qk_norm": "width" if f.flag("qk_layernorm", False) else "no",
        "qkv_bias": f.flag("use_qkv_bias", False),
        "dropout": f.drops("hidden_dropout", "attention_dropout"),
    }


def _bloom(f: Fields) -> dict[str, Any]:
    f.require("apply_residual_connection_post_layernorm", False, "residuals after the norm")
    hidden = f.whole(f.first("hidden_size", "n_embed"))
    f.used |= {"seq_length", "skip_bias_add", "skip_bias_add_qkv", "offset_alibi"}
    f.used |= {"bias_dropout_fusion", "masked_softmax_fusion", "attention_softmax_in_fp32"}
    return {
        "layers": f.whole(f.first("n_layer", "num_hidden_layers")),
        "hidden": hidden,
        "heads": f.whole(f.first("n_head", "num_attention_heads")),
        "ffn": 4 * hidden,
        "vocab": f.whole("vocab_size"),
        "seq": f.whole("seq_length", 2048),
        "positions": "alibi",
        "embedding_norm": True,
        "fused_qkv": True,
        "dropout": f.drops("hidden_dropout", "attention_dropout"),
        **_ends(f),
    }


def _mpt(f: Fields) -> dict[str, Any]:
    f.require("no_bias", True, "projections with a bias")
    hidden, inner = f.whole("d_model"), f.take("attn_config", {})
    for name in ("qk_ln", "clip_qkv", "prefix_lm"):
        if inner.get(name):
            raise NotModelledError(f"{f.source}: attn_config.{name}: is not modelled")
    f.used |= {"init_device", "logit_scale", "embedding_fraction", "norm_type", "verbose"}
    f.used |= {"learned_pos_emb", "emb_pdrop", "initializer_range"}  # transformers has no table
    plain = dict.fromkeys(("qkv_bias", "out_bias", "ffn_bias", "norm_bias"), False)
    return {
        "layers": f.whole("n_layers"),
        "hidden": hidden,
        "heads": f.whole("n_heads"),
        "ffn": f.whole("expansion_ratio", 4) * hidden,
        "vocab": f.whole("vocab_size"),
        "seq": f.whole("max_seq_len", 2048),
        "positions": "alibi" if inner.get("alibi", True) else "none",
        "fused_qkv": True,
        "dropout": f.drops("resid_pdrop") or bool(inner.get("attn_pdrop")),
        **plain,
        **_ends(f),
    }


def _gpt(f: Fields, tied: bool = True) -> dict[str, Any]:
    """Fields of GPT-2, by its names or by those of later configurations."""
    hidden = f.whole(f.first("n_embd", "hidden_size"))
    return {
        "layers": f.whole(f.first("n_layer", "num_hidden_layers")),
        "hidden": hidden,
        "heads": f.whole(f.first("n_head", "num_attention_heads")),
        "ffn": f.whole("n_inner", 4 * hidden),
        "vocab": f.whole("vocab_size"),
        "seq": f.whole(f.first("n_positions", "max_position_embeddings")),
        "activation": f.activation("activation_function", "gelu_new"),
        "dropout": f.drops("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        **_ends(f, tied),
    }


def _gptj(f: Fields) -> dict[str, Any]:
    f.used.add("rotary_dim")
    biases = {"qkv_bias": False, "out_bias": False, "head_bias": True}
    return {**_gpt(f, tied=False), "positions": "rotary", "parallel": "one-norm", **biases}


def gpt2(f: Fields) -> dict[str, Any]:
    """GPT-2: learned positions, one projection for queries, keys and values."""
    f.require("scale_attn_by_inverse_layer_idx", False, "scores scaled by depth")
    f.require("reorder_and_upcast_attn", False, "attention in fp32")
    f.require("scale_attn_weights", True, "unscaled scores")
    fields = _gpt(f)
    return {**fields, "max_positions": fields["seq"], "fused_qkv": True}


def _bigcode(f: Fields) -> dict[str, Any]:
    f.used |= {"attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner"}
    f.used |= {"num_key_value_heads", "validate_runner_input", "pre_allocate_kv_cache"}
    f.used |= {"max_sequence_length", "max_batch_size"}
    fields = gpt2(f)
    return {**fields, "kv_heads": 1 if f.flag("multi_query", True) else fields["heads"]}


def _gpt_neo(f: Fields) -> dict[str, Any]:
    hidden, longest = f.whole("hidden_size"), f.whole("max_position_embeddings")
    layers = f.whole("num_layers")
    kinds = f.take("attention_layers", None)
    if kinds is None:
        pattern = f.take("attention_types", [[["global", "local"], layers // 2]])
        kinds = [kind for run, times in pattern for _ in range(times) for kind in run]
    f.used.add("attention_types")
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": f.whole("num_heads"),
        "ffn": f.whole("intermediate_size", 4 * hidden),
        "vocab": f.whole("vocab_size"),
        "max_positions": longest,
        "seq": longest,
        "qkv_bias": False,
        "window": f.whole("window_size", 256),
        "full_attention_layers": tuple(i for i, kind in enumerate(kinds) if kind == "global"),
        "activation": f.activation("activation_function", "gelu_new"),
        "dropout": f.drops("resid_dropout", "embed_dropout", "attention_dropout"),
        **_ends(f),
    }


def _opt(f: Fields) -> dict[str, Any]:
    hidden = f.whole("hidden_size")
    f.defaults = {k: v for k, v in f.defaults.items() if k != "word_embed_proj_dim"}
    f.require("word_embed_proj_dim", hidden, "embeddings narrower than the blocks")
    f.require("do_layer_norm_before", True, "norms after the blocks")
    f.require("enable_bias", True, "projections without bias")
    longest = f.whole("max_position_embeddings")
    return {
        "layers": f.whole("num_hidden_layers"),
        "hidden": hidden,
        "heads": f.whole("num_attention_heads"),
        "ffn": f.whole("ffn_dim"),
        "vocab": f.whole("vocab_size"),
        "max_positions": longest + 2,  # two rows of the table are for padding
        "seq": longest,
        "activation": f.activation("activation_function", "relu"),
        "dropout": f.drops("dropout", "attention_dropout", "activation_dropout"),
        **_ends(f),
    }


def _seed(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    out, drops = f.flag("attention_out_bias", False), f.drops("residual_dropout")
    return {**fields, "out_bias": out, "dropout": drops or fields["dropout"]}


def _ernie(f: Fields) -> dict[str, Any]:
    biases = dict.fromkeys(("qkv_bias", "out_bias", "ffn_bias"), f.flag("use_bias", False))
    return {**llama(f), **biases, **_ends(f)}


def _smollm3(f: Fields) -> dict[str, Any]:
    # Layers without rotation are counted as rotated, a slight overestimate.
    f.used |= {"no_rope_layers", "no_rope_layer_interval"}
    fields = llama(f)
    return {**fields, **f.windows(fields["layers"]), **_ends(f)}


def _glm(f: Fields) -> dict[str, Any]:
    return {**llama(f), "out_bias": False, "fused_gate": True}


_DECODERS: dict[str, Reader] = {
    "arcee": _like_llama(gated=False),
    "bloom": _bloom,
    "codegen": lambda f: {**_gptj(f), "fused_qkv": True},
    "cohere": _cohere,
    "cohere2": _cohere,
    "ernie4_5": _ernie,
    "exaone4": _like_llama(4, norm_position="output", qk_norm="head"),
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma2": lambda f: _gemma(f, 2, norm_position="sandwich"),
    "gemma3_text": lambda f: _gemma(f, 6, norm_position="sandwich", qk_norm="head"),
    "glm": _glm,
    "glm4": lambda f: {**_glm(f), "norm_position": "sandwich"},
    "gpt2": gpt2,
    "gpt_bigcode": _bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _neox,
    "gptj": _gptj,
    "granite": _like_llama(),
    "helium": _like_llama(),
    "llama": _llama,
    "mistral": _like_llama(),
    "mpt": _mpt,
    "nemotron": lambda f: {**llama(f), "norm": "layernorm", "gated": False},
    "olmo": _like_llama(norm="layernorm", norm_gain=False),
    "olmo2": _like_llama(norm_position="output", qk_norm="width"),
    "olmo3": _like_llama(4, norm_position="output", qk_norm="width"),
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "qwen2": _like_llama(qkv_bias=True),
    "qwen3": _like_llama(qk_norm="head"),
    "seed_oss": _seed,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}


# ---- mixtures of experts, with and without latent attention ----


_ROUTING = {
    "n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "seq_aux",
    "routed_scaling_factor", "rope_interleave", "qk_head_dim", "aux_loss_alpha", "ep_size",
    "moe_layer_freq", "num_nextn_predict_layers", "clip_qkv", "swiglu_alpha", "swiglu_limit",
}  # fmt: skip
# These fields scale values or select experts and add no operators. Weights for multi-token
# prediction (num_nextn_predict_layers) are not part of transformers' model.


def _experts(
    f: Fields, width: int, experts: str, top_k: str = "num_experts_per_tok"
) -> dict[str, Any]:
    """Return experts of a width, given the fields for their number and for experts per token."""
    return {"experts": f.whole(experts), "top_k": f.whole(top_k), "expert_ffn": width}


def _mixtral(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    moe = _experts(f, fields["ffn"], "num_local_experts")
    return {**fields, **f.windows(fields["layers"]), "moe": moe}


def _qwen_moe(f: Fields, **fixed: Any) -> dict[str, Any]:
    fields = llama(f)
    layers, step = fields["layers"], f.whole("decoder_sparse_step", 1)
    listed = frozenset(f.take("mlp_only_layers", ()))
    dense = [at for at in range(layers) if at in listed or step == 0 or (at + 1) % step]
    experts = f.whole(f.first("num_experts", "num_local_experts", "n_routed_experts"))
    dense = dense if experts else list(range(layers))
    moe = {
        "experts": experts,
        "top_k": f.whole("num_experts_per_tok"),
        "expert_ffn": f.whole("moe_intermediate_size"),
        "dense_at": tuple(dense),
    }
    shared = f.take("shared_expert_intermediate_size", None)
    if shared:
        moe |= {"shared_ffn": shared, "shared_gate": True}
    routed = {} if len(dense) == layers else {"moe": moe}
    return {**fields, **f.windows(layers), **routed, **fixed}


def _olmoe(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    return {**fields, "moe": _experts(f, fields["ffn"], "num_experts"), "qk_norm": "width"}


def _gpt_oss(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    experts = f.first("num_local_experts", "num_experts")
    top_k = f.first("num_experts_per_tok", "experts_per_token")
    moe = {**_experts(f, fields["ffn"], experts, top_k), "router_bias": True}
    biased = f.flag("attention_bias", True)
    return {
        **fields,
        **f.windows(fields["layers"], 2),
        "moe": moe,
        "sinks": True,
        "ffn_bias": True,
        "qkv_bias": biased,
        "out_bias": biased,
    }


def _fine_grained(f: Fields, layers: int) -> dict[str, Any]:
    """Many narrow experts and shared ones, after leading dense layers, which may be all layers."""
    moe = {
        "experts": f.whole("n_routed_experts"),
        "top_k": f.whole("num_experts_per_tok", 6),  # as DeepSeek-V2 is published
        "expert_ffn": f.whole("moe_intermediate_size"),
        "shared_experts": f.whole("n_shared_experts", 0),
        "dense_layers": min(f.whole("first_k_dense_replace", 0), layers),
    }
    return {} if moe["dense_layers"] == layers else {"moe": moe}


def _deepseek(f: Fields) -> dict[str, Any]:
    f.used |= {"head_dim", "num_key_value_heads"}
    fields = {**llama(f), "kv_heads": None, "head_dim": None}
    latent = {
        "query_rank": f.take("q_lora_rank", None),
        "kv_rank": f.whole("kv_lora_rank"),
        "plain_width": f.whole("qk_nope_head_dim"),
        "rotary_width": f.whole("qk_rope_head_dim"),
        "value_width": f.whole("v_head_dim"),
    }
    if not f.take("n_routed_experts", None):
        return {**fields, "latent": latent}
    return {**fields, "latent": latent, **_fine_grained(f, fields["layers"])}


def _glm4_moe(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    normed = "head" if f.flag("use_qk_norm", False) else "no"
    moe = _fine_grained(f, fields["layers"])
    width = fields["head_dim"] or fields["hidden"] // fields["heads"]
    return {**fields, **moe, "qk_norm": normed, "out_bias": False, "head_dim": width}


def _routed(read: Reader) -> Reader:
    """Mark fields that affect the choice of experts, but no operator, as used."""

    def reader(f: Fields) -> dict[str, Any]:
        f.used |= _ROUTING
        return read(f)

    return reader


_EXPERTS: dict[str, Reader] = {
    name: _routed(read)
    for name, read in {
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "glm4_moe": _glm4_moe,
        "gpt_oss": _gpt_oss,
        "granitemoe": _mixtral,
        "mixtral": _mixtral,
        "olmoe": _olmoe,
        "qwen2_moe": lambda f: _qwen_moe(f, qkv_bias=f.flag("qkv_bias", True), out_bias=False),
        "qwen3_moe": lambda f: _qwen_moe(f, qk_norm="head"),
    }.items()
}


# ---- encoders and encoder-decoders ----


def _bert(f: Fields) -> dict[str, Any]:
    f.require("position_embedding_type", "absolute", "relative positions in BERT")
    return {
        "layers": f.whole("num_hidden_layers"),
        "hidden": f.whole("hidden_size"),
        "heads": f.whole("num_attention_heads"),
        "ffn": f.whole("intermediate_size"),
        "vocab": f.whole("vocab_size"),
        "max_positions": (longest := f.whole("max_position_embeddings")),
        "seq": longest,
        "token_types": f.whole("type_vocab_size", 2),
        "embedding_norm": True,
        "norm_position": "post",
        "final_norm": False,
        "causal": False,
        "activation": f.activation("hidden_act", "gelu"),
        "dropout": f.drops("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "head": "mlm",
        "tied_embeddings": bool(f.take("tie_word_embeddings", True)),
    }


_NORMS_BEFORE = {"norm_position": "pre", "embedding_norm": False, "final_norm": True}
"""BERT as in Megatron-LM: norms before the sub-layers and after the last block."""


def _roberta(f: Fields) -> dict[str, Any]:
    f.used.add("pad_token_id")
    fields = _bert(f)  # rows up to the padding token's are for padding
    return {**fields, "seq": max(1, fields["max_positions"] - 2)}


def _t5(f: Fields) -> dict[str, Any]:
    kind = f.take("feed_forward_proj", "relu")
    # Decoder outputs are scaled before tied logits; the factor can be folded into the last norm.
    f.used |= {"is_gated_act", "dense_act_fn", "scale_decoder_outputs"}
    gated = str(kind).startswith("gated-")
    # transformers uses gelu_new for the gated form.
    name = "gelu_new" if kind == "gated-gelu" else str(kind).removeprefix("gated-")
    f.take("relative_attention_max_distance", 128)
    f.used.add("tie_word_embeddings")  # transformers always ties them
    layers = f.whole("num_layers")
    return {
        "layers": f.whole("num_decoder_layers", layers),
        "encoder_layers": layers,
        "hidden": f.whole("d_model"),
        "heads": f.whole("num_heads"),
        "head_dim": f.whole("d_kv"),
        "ffn": f.whole("d_ff"),
        "vocab": f.whole("vocab_size"),
        "seq": f.whole("n_positions", 512),
        "positions": "relative",
        "relative_buckets": f.whole("relative_attention_num_buckets", 32),
        "norm": "rmsnorm",
        "activation": f.named_activation("feed_forward_proj", name, kind),
        "gated": gated,
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": False,
        "dropout": f.drops("dropout_rate"),
        "tied_embeddings": True,
    }


def _vit(f: Fields) -> dict[str, Any]:
    image, patch = f.whole("image_size"), f.whole("patch_size")
    if patch == 0 or image % patch:
        raise not_accepted(f"{f.source}: patch_size", patch, f"a divisor of {image}")
    tokens = (image // patch) ** 2 + 1
    labels = f.take("id2label", {})
    biased = bool(f.take("qkv_bias", True))
    return {
        "layers": f.whole("num_hidden_layers"),
        "hidden": f.whole("hidden_size"),
        "heads": f.whole("num_attention_heads"),
        "ffn": f.whole("intermediate_size"),
        "vocab": 0,
        "patches": {"size": patch, "channels": f.whole("num_channels", 3)},
        "max_positions": tokens,
        "seq": tokens,
        "causal": False,
        "qkv_bias": biased,
        "activation": f.activation("hidden_act", "gelu"),
        "dropout": f.drops("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "head": "classifier",
        "classes": f.whole("num_labels", len(labels) or 1000),
        "tied_embeddings": False,
    }


_ENCODERS: dict[str, Reader] = {
    "bert": _bert,
    "megatron-bert": lambda f: {**_bert(f), **_NORMS_BEFORE},
    "mt5": _t5,
    "roberta": _roberta,
    "t5": _t5,
    "vit": _vit,
    "xlm-roberta": _roberta,
}


# ---- reading and tracing ----


_WINDOWS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def _transformers() -> Any:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore] # noqa: F401
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingExtraError(
            "other architectures are built and traced, which needs: "
            "pip install 'phaze-fast[torch]' transformers"
        ) from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    return transformers


def hf_module(data: Mapping[str, Any], source: str = "config") -> Any:
    """Build the module of a configuration on the meta device: a causal, masked or seq2seq LM.

    Raises
    ------
    InvalidInputError
        Where transformers does not know the architecture, or cannot build it.
    """
    transformers = _transformers()
    import torch

    fields = {key: value for key, value in data.items() if key != "torch_dtype"}
    try:
        config = transformers.AutoConfig.for_model(**fields)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidInputError(
            f"{source}: model_type: transformers cannot read it: {reason}"
        ) from None
    makers = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForSeq2SeqLM,
    )
    encoder = not getattr(config, "is_decoder", False) and type(config) in makers[1]._model_mapping
    for maker in (makers[1], *makers) if encoder else makers:
        if type(config) in maker._model_mapping:
            try:
                with torch.device("meta"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return maker.from_config(config)
            except Exception as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise InvalidInputError(
                    f"{source}: transformers cannot build it: {reason}"
                ) from None
    raise InvalidInputError(
        f"{source}: model_type: {data.get('model_type')!r} is no causal, masked or "
        "sequence-to-sequence language model of transformers"
    )


def trace_hf(
    data: Mapping[str, Any], name: str, source: str = "config", seq: int | None = None,
    longest: int = 4096,
) -> GraphModel:  # fmt: skip
    """Build the module of a configuration and trace one training step of it.

    Parameters
    ----------
    data
        The configuration.
    name
        Name of the model.
    source
        Origin of the configuration, for messages.
    seq
        Sequence length in tokens; by default the context window, at most `longest`.
    longest
        Upper limit of the default of `seq`.
    """
    module = hf_module(data, source)
    import torch

    config = module.config
    windows = (getattr(config, name, None) for name in _WINDOWS)
    window = next((size for size in windows if isinstance(size, int) and size > 0), longest)
    tokens = seq if seq is not None else min(int(window), longest)
    ids = torch.empty((2, tokens), dtype=torch.long, device="meta")
    module.train()
    if getattr(config, "is_encoder_decoder", False):  # any start token will do
        for field in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, field, None) is None:
                setattr(config, field, 0)
    kwargs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if "use_cache" in getattr(config, "to_dict", dict)():
        kwargs["use_cache"] = False
    graph = from_torch(module, (), kwargs, name=name)
    if window > tokens and seq is None:
        note = f"seq {tokens}: the smaller of the context window of {window} and {longest}"
        return graph.replace(notes="; ".join(filter(None, (note, graph.notes))))
    return graph


LONGEST = 4096
"""Default sequence length where a model's context window is longer."""

_READERS: dict[str, Reader] = {**_DECODERS, **_ENCODERS, **_EXPERTS}


def _record(data: Mapping[str, Any], source: str, name: str) -> TransformerModel:
    kind = data.get("model_type")
    if kind not in _READERS:
        raise NotModelledError(
            f"{source}: model_type: {kind!r} is not modelled; {nearest(str(kind), _READERS)}"
        )
    fields = Fields(data, source)
    built = _READERS[kind](fields)
    fields.finish()
    if fields.gelu_by_steps:
        built["gelu_new"] = True
    window = built["seq"]
    if window > LONGEST:
        built |= {
            "seq": LONGEST,
            "notes": f"seq {LONGEST}: the smaller of the context window of {window} and {LONGEST}",
        }
    return TransformerModel.from_dict({"name": name, **built}, source)


def _build(data: object, source: str, name: str = "") -> TransformerModel | GraphModel:
    if not isinstance(data, Mapping):
        raise InvalidInputError(f"{source}: expected a mapping of keys to values")
    named = name or str(data.get("_name_or_path") or data.get("model_type"))
    try:
        return _record(data, source, named)
    except NotModelledError as error:
        try:
            return trace_hf(data, named, source, longest=LONGEST)
        except MissingExtraError as missing:
            raise NotModelledError(f"{error}; {missing}") from None


def _download(repository: str) -> Path:
    purpose = f"{repository!r} is no file, and reading it from the hub"
    hub = needed("huggingface_hub", "hf", purpose)
    try:
        return Path(hub.hf_hub_download(repository, "config.json"))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInputError(f"{repository}: config.json cannot be fetched: {reason}") from None


def from_hf(config: str | Path | Mapping[str, Any]) -> TransformerModel | GraphModel:
    """Read a HuggingFace configuration.

    Parameters
    ----------
    config
        A ``config.json`` or the folder that holds it, its content as a mapping, or with the extra
        ``hf`` the id of a repository on the hub.

    Returns
    -------
    TransformerModel or GraphModel
        A record where the architecture has one: with fused attention,
        ``.replace(attention="eager")`` for explicit scores. Any other causal, masked or
        sequence-to-sequence language model of transformers is built on the meta device and traced,
        which needs the extra ``torch`` and transformers.

    Raises
    ------
    InvalidInputError
        Where the architecture, or the value of a field, is not modelled; the message names it.
    MissingExtraError
        Where a hub id is given and the extra is not installed.

    Examples
    --------
    >>> model = from_hf({
    ...     "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768,
    ...     "n_positions": 1024, "vocab_size": 50257,
    ... })
    >>> model.parameters()
    124439808
    """
    if isinstance(config, Mapping):
        return _build(config, "config")
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists() and isinstance(config, str) and config.count("/") == 1:
        return _build(read_document(_download(config)), config, config.split("/")[1])
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return _build(read_document(path), str(path), name)
