"""A model by its configuration and by a trace of transformers' module: the same operators."""

from functools import cache

import pytest

from phaze_fast import models
from phaze_fast.hardware import Cluster, presets
from phaze_fast.models.families import FAMILIES
from phaze_fast.planning import predict

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
# transformers compiles parts of a few models in a way that PyTorch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

SEQ = 16
SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "intermediate_size": 56,
    "vocab_size": 90,
    "num_hidden_layers": 3,
    "max_position_embeddings": 48,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
PLAIN = {**SIZES, "num_key_value_heads": 3, "pad_token_id": 0}
GPT = {"n_embd": 24, "n_head": 3, "n_positions": 48, "n_layer": 3, "vocab_size": 90}
T5 = {"d_model": 24, "d_kv": 8, "num_heads": 3, "d_ff": 56, "num_layers": 2, "vocab_size": 90}
MIXED = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
FINE = {**MIXED, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {
    **{key: value for key, value in FINE.items() if key != "head_dim"},
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
FALCON = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 90}
BLOOM = {"hidden_size": 24, "n_head": 3, "n_layer": 3, "vocab_size": 90}
VIT = {"image_size": 24, "patch_size": 8, "num_labels": 10, "hidden_dropout_prob": 0.1}
WINDOW = {"sliding_window": 8}
CONFIGURATIONS = {
    "llama": GROUPED,
    "llama biases, dropout": {
        **GROUPED,
        "attention_bias": True,
        "mlp_bias": True,
        "attention_dropout": 0.1,
    },
    "arcee": GROUPED,
    "mistral": GROUPED,
    "mistral window": {**GROUPED, **WINDOW},
    "qwen2": {**PLAIN, "tie_word_embeddings": True},
    "qwen2 window": {**PLAIN, **WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": GROUPED,
    "gemma": GROUPED,
    "gemma2": {**GROUPED, **WINDOW},
    "gemma3_text": {**GROUPED, **WINDOW},
    "phi3": {**PLAIN, "resid_pdrop": 0.1},
    "phi3 part": {**PLAIN, "head_dim": 8, "partial_rotary_factor": 0.5},
    "olmo": PLAIN,
    "olmo2": PLAIN,
    "olmo3": {**PLAIN, **WINDOW},
    "granite": PLAIN,
    "helium": {**GROUPED, "head_dim": 4},  # as the width of its output projection
    "glm": GROUPED,
    "glm4": GROUPED,
    "seed_oss": {**GROUPED, "residual_dropout": 0.1},
    "ernie4_5": GROUPED,
    "exaone4": {**PLAIN, **WINDOW},
    "smollm3": {**PLAIN, "num_hidden_layers": 5},
    "starcoder2": {**PLAIN, "residual_dropout": 0.1, "embedding_dropout": 0.1},
    "phi": {**SIZES, "resid_pdrop": 0.1},
    "cohere": PLAIN,
    "cohere2": {**PLAIN, **WINDOW},
    "stablelm": {**PLAIN, "partial_rotary_factor": 0.5},
    "stablelm parallel": {
        **PLAIN,
        "partial_rotary_factor": 0.5,
        "use_parallel_residual": True,
        "qk_layernorm": True,
    },
    "nemotron": GROUPED,
    "gpt_neox": {**SIZES, "hidden_dropout": 0.1, "rotary_pct": 0.5},
    "gpt_neox in turn": {**SIZES, "use_parallel_residual": False, "rotary_pct": 0.5},
    "gpt2": GPT,
    "gpt2 without dropout": {**GPT, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
        "ffn_dim": 56,
        "word_embed_proj_dim": 24,
    },
    "gpt_bigcode": GPT,
    "gpt_bigcode all heads": {**GPT, "multi_query": False},
    "gptj": {**GPT, "rotary_dim": 4},
    "codegen": {**GPT, "n_head": 4, "rotary_dim": 4},
    "gpt_neo": {
        "hidden_size": 24,
        "num_heads": 3,
        "num_layers": 2,
        "vocab_size": 90,
        "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 48,
    },
    "falcon": FALCON,
    "falcon groups": {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon all heads": {
        **FALCON,
        "multi_query": False,
        "parallel_attn": False,
        "alibi": True,
        "bias": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "mpt": {"d_model": 24, "n_heads": 4, "n_layers": 3, "vocab_size": 90},
    "bloom": BLOOM,
    "bloom dropout": {**BLOOM, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "mixtral": {**GROUPED, "num_experts_per_tok": 2, "num_local_experts": 4},
    "qwen2_moe": {**MIXED, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**MIXED, "num_experts": 4, "mlp_only_layers": [1], "norm_topk_prob": True},
    "olmoe": {**PLAIN, "num_experts_per_tok": 2, "num_experts": 4, "clip_qkv": 8.0},
    "granitemoe": {**PLAIN, "num_experts_per_tok": 2, "num_local_experts": 4},
    "gpt_oss": {**GROUPED, **WINDOW, "num_experts_per_tok": 2, "num_local_experts": 4},
    "glm4_moe": {**FINE, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v2 groups": {
        **LATENT,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3": {**LATENT, "n_group": 4, "topk_group": 2},
    "deepseek_v3 halves": {**LATENT, "n_group": 4, "topk_group": 2, "rope_interleave": False},
    "bert": SIZES,
    "bert steps": {**SIZES, "hidden_act": "gelu_fast", "tie_word_embeddings": False},
    "bert without dropout": {
        **SIZES,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "roberta": {**SIZES, "pad_token_id": 1},
    "xlm-roberta": {**SIZES, "pad_token_id": 1},
    "megatron-bert": SIZES,
    "vit": {**{k: n for k, n in SIZES.items() if k[0] != "v" and "max" not in k}, **VIT},
    "t5": T5,
    "t5 gated": {
        **T5,
        "num_decoder_layers": 3,
        "tie_word_embeddings": False,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
    },
    "mt5": T5,
}
EXPLICIT = ("llama", "gemma2", "gpt2", "bert", "t5")  # attention operator by operator as well
CONFIGURATIONS |= {
    f"{name} explicit": {**CONFIGURATIONS[name], "_attn_implementation": "eager"}
    for name in EXPLICIT
}


@cache
def pair(name):
    """The graph of a configuration, and that of a trace of its module."""
    from phaze_fast.models.huggingface import trace_hf

    fields = {"model_type": name.split()[0], **CONFIGURATIONS[name]}
    kernel = "eager" if name.endswith("explicit") else "flash"
    model = models.from_hf(fields).replace(name=name, attention=kernel)
    model = model if model.patches else model.replace(seq=SEQ)
    return model, models.expanded(model), trace_hf(fields, name, seq=model.seq)


def test_every_family_is_compared():
    assert {name.split()[0] for name in CONFIGURATIONS} == FAMILIES.keys()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_has_the_operators_of_its_module(name):
    """Names, sizes, bytes, order, gradients and stored tensors of every operator."""
    _, built, traced = pair(name)
    assert built.parameters() == traced.parameters()
    for ours, theirs in zip(built.layers, traced.layers, strict=True):
        for part in ("forward", "backward", "saved"):
            for one, two in zip(getattr(ours, part), getattr(theirs, part), strict=True):
                assert one == two
    assert built == traced.replace(as_traced=True, notes=built.notes, compiled=None)


# Compiled, constants such as masks and tables of positions differ by some bytes, in T5 by a kernel.
OTHER_CONSTANTS = {"gptj", "codegen", "gpt_neo", "mpt", "bloom", "mixtral", "glm4_moe"}
OTHER_CONSTANTS |= {"deepseek_v2", "deepseek_v3", "t5", "mt5"}


@pytest.mark.parametrize(
    ("name", "software"),
    [
        *((name, "huggingface-eager") for name in FAMILIES),
        *((name, "pytorch-compiled") for name in sorted(FAMILIES.keys() - OTHER_CONSTANTS)),
    ],
)
def test_a_configuration_takes_the_seconds_and_bytes_of_its_trace(name, software):
    model, _, traced = pair(name)
    cluster = Cluster(devices=1, chip=presets.chip("h200"), fabric=presets.fabric("dgx-h100"))
    for recompute in ("none", "full"):
        plan = {"software": software, "global_batch": 8, "micro_batch": 4, "recompute": recompute}
        one, two = (predict(each, cluster, plan) for each in (model, traced))
        assert (one.time_s, one.memory_bytes) == (two.time_s, two.memory_bytes)
