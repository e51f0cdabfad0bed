"""Mixtures of experts of HuggingFace transformers as records, with and without latent attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phaze_fast.models.hf_decoders import llama
from phaze_fast.models.hf_fields import Fields

__all__ = ["EXPERTS"]

_ROUTING = {
    "n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob", "seq_aux",
    "routed_scaling_factor", "rope_interleave", "qk_head_dim", "aux_loss_alpha", "ep_size",
    "moe_layer_freq", "num_nextn_predict_layers", "clip_qkv", "swiglu_alpha", "swiglu_limit",
}  # fmt: skip
# They scale or choose among figures that are there anyway. Weights for predicting further tokens
# (num_nextn_predict_layers) are not part of transformers' model.


def _mixtral(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    moe = {
        "experts": f.whole("num_local_experts"),
        "top_k": f.whole("num_experts_per_tok"),
        "expert_ffn": fields["ffn"],
    }
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


def _qwen2_moe(f: Fields) -> dict[str, Any]:
    biased = f.flag("qkv_bias", True)
    return _qwen_moe(f, qkv_bias=biased, out_bias=False)


def _qwen3_moe(f: Fields) -> dict[str, Any]:
    return _qwen_moe(f, qk_norm="head")


def _olmoe(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    moe = {
        "experts": f.whole("num_experts"),
        "top_k": f.whole("num_experts_per_tok"),
        "expert_ffn": fields["ffn"],
    }
    return {**fields, "moe": moe, "qk_norm": "width"}


def _gpt_oss(f: Fields) -> dict[str, Any]:
    fields = llama(f)
    moe = {
        "experts": f.whole(f.first("num_local_experts", "num_experts")),
        "top_k": f.whole(f.first("num_experts_per_tok", "experts_per_token")),
        "expert_ffn": fields["ffn"],
        "router_bias": True,
    }
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
    """Many narrow experts beside shared ones, behind leading dense layers, which may be all."""
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


def _routed(read: Callable[[Fields], dict[str, Any]]) -> Callable[[Fields], dict[str, Any]]:
    """Tick off what changes the choice of experts and no operator."""

    def reader(f: Fields) -> dict[str, Any]:
        f.used |= _ROUTING
        return read(f)

    return reader


EXPERTS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    name: _routed(read)
    for name, read in {
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "glm4_moe": _glm4_moe,
        "gpt_oss": _gpt_oss,
        "granitemoe": _mixtral,
        "mixtral": _mixtral,
        "olmoe": _olmoe,
        "qwen2_moe": _qwen2_moe,
        "qwen3_moe": _qwen3_moe,
    }.items()
}
"""How each architecture is read."""
