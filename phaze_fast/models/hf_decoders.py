"""Dense decoders of HuggingFace transformers as records: one table by ``model_type``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phaze_fast.models.hf_fields import Fields, NotModelledError

__all__ = ["DECODERS", "llama"]

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
    """Llama with windows and other fixed fields; each `every`-th layer sees all tokens."""

    def read(f: Fields) -> dict[str, Any]:
        fields = llama(f)
        return {**fields, **f.windows(fields["layers"], every), **fixed}

    return read


def _gemma(f: Fields, every: int | None = None, **fixed: Any) -> dict[str, Any]:
    f.require("use_bidirectional_attention", False, "tokens that see those after them")
    if f.data.get("hidden_act") in (None, "gelu"):  # a hidden_activation stands beside it
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


def _gemma1(f: Fields) -> dict[str, Any]:
    return _gemma(f)


def _gemma2(f: Fields) -> dict[str, Any]:
    return _gemma(f, 2, norm_position="sandwich")


def _gemma3(f: Fields) -> dict[str, Any]:
    return _gemma(f, 6, norm_position="sandwich", qk_norm="head")


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
    f.used.add("logit_scale")  # one multiplication of the logits, which the product can hold
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


def _nemotron(f: Fields) -> dict[str, Any]:
    return {**llama(f), "norm": "layernorm", "gated": False}


def _gptj(f: Fields) -> dict[str, Any]:
    hidden = f.whole(f.first("n_embd", "hidden_size"))
    f.used.add("rotary_dim")
    return {
        "layers": f.whole(f.first("n_layer", "num_hidden_layers")),
        "hidden": hidden,
        "heads": f.whole(f.first("n_head", "num_attention_heads")),
        "ffn": f.whole("n_inner", 4 * hidden),
        "vocab": f.whole("vocab_size"),
        "seq": f.whole(f.first("n_positions", "max_position_embeddings")),
        "positions": "rotary",
        "parallel": "one-norm",
        "qkv_bias": False,
        "out_bias": False,
        "head_bias": True,
        "activation": f.activation("activation_function", "gelu_new"),
        "dropout": f.drops("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        **_ends(f, tied=False),
    }


def _codegen(f: Fields) -> dict[str, Any]:
    return {**_gptj(f), "fused_qkv": True}


def gpt2(f: Fields) -> dict[str, Any]:
    """GPT-2: learned positions, one projection for queries, keys and values."""
    hidden = f.whole(f.first("n_embd", "hidden_size"))
    f.require("scale_attn_by_inverse_layer_idx", False, "scores scaled by depth")
    f.require("reorder_and_upcast_attn", False, "attention in fp32")
    f.require("scale_attn_weights", True, "unscaled scores")
    longest = f.whole(f.first("n_positions", "max_position_embeddings"))
    return {
        "layers": f.whole(f.first("n_layer", "num_hidden_layers")),
        "hidden": hidden,
        "heads": f.whole(f.first("n_head", "num_attention_heads")),
        "ffn": f.whole("n_inner", 4 * hidden),
        "vocab": f.whole("vocab_size"),
        "max_positions": longest,
        "seq": longest,
        "fused_qkv": True,
        "activation": f.activation("activation_function", "gelu_new"),
        "dropout": f.drops("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        **_ends(f),
    }


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
        "max_positions": longest + 2,  # the table keeps two rows for padding
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
    f.used |= {"no_rope_layers", "no_rope_layer_interval"}  # rotated as the others: a little more
    fields = llama(f)
    return {**fields, **f.windows(fields["layers"]), **_ends(f)}


def _glm(f: Fields) -> dict[str, Any]:
    return {**llama(f), "out_bias": False, "fused_gate": True}


DECODERS: dict[str, Reader] = {
    "arcee": _like_llama(gated=False),
    "bloom": _bloom,
    "codegen": _codegen,
    "cohere": _cohere,
    "cohere2": _cohere,
    "ernie4_5": _ernie,
    "exaone4": _like_llama(4, norm_position="output", qk_norm="head"),
    "falcon": _falcon,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
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
    "nemotron": _nemotron,
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
"""How each architecture is read."""
