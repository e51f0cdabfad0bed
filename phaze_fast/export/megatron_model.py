"""A model as Megatron-LM's arguments say it."""

from __future__ import annotations

from typing import Any

from phaze_fast.export.request import Unexpressed
from phaze_fast.models import TransformerModel

__all__ = ["model_terms", "program"]

Terms = dict[str, Any]

_POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}


def program(model: TransformerModel) -> str:
    """Name the script of Megatron-LM that trains a model."""
    return "pretrain_bert.py" if model.head == "mlm" else "pretrain_gpt.py"


def model_terms(model: TransformerModel, seq: int) -> tuple[Terms, list[Unexpressed]]:
    """Say a model in Megatron-LM's terms, and what of it they cannot say."""
    missing = []
    if model.encoder_layers:
        missing.append(Unexpressed(model.name, "pipelines of an encoder and a decoder"))
    if model.patches is not None or model.head == "classifier":
        missing.append(Unexpressed(model.name, "images in place of tokens; use your own script"))
    if model.positions not in _POSITIONS:
        missing.append(Unexpressed(f"{model.name}: {model.positions} positions", "left to default"))
    if model.activation == "relu" and not model.gated:
        missing.append(Unexpressed(f"{model.name}: ReLU", "Megatron-LM has GELU; written so"))
    if model.gated and model.activation != "silu":
        missing.append(Unexpressed(f"{model.name}: gated {model.activation}", "written as SwiGLU"))
    terms: Terms = {
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        "head_dim": model.head_width,
        "max_positions": max(model.max_positions or seq, seq),
        "positions": _POSITIONS.get(model.positions, "learned_absolute"),
        "norm": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "gated": model.gated,
        "untied": not model.tied_embeddings,
        "no_bias": not (model.out_bias or model.ffn_bias),
        "qkv_bias": model.qkv_bias and not (model.out_bias or model.ffn_bias),
    }
    if model.kv_heads is not None and model.kv_heads != model.heads:
        terms |= {"grouped": True, "kv_heads": model.kv_heads}
    if not model.dropout:
        terms |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    terms |= _experts(model)
    terms |= {
        "tokenizer": "NullTokenizer",
        "vocab": max(model.vocab - 1, 1),  # the tokenizer adds one for the end of a document
        "vocab_multiple": 1,
        "mock_data": True,
        "steps": 10,
    }
    return terms, missing


def _experts(model: TransformerModel) -> Terms:
    moe = model.moe
    if moe is None:
        return {}
    terms: Terms = {
        "experts": moe.experts,
        "top_k": moe.top_k,
        "expert_ffn": moe.expert_ffn,
        "dispatcher": "alltoall",
        "grouped_gemm": True,
    }
    if moe.shared_experts:
        terms["shared_ffn"] = moe.shared_experts * moe.expert_ffn
    if moe.dense_layers:
        terms["moe_layers"] = f"([0]*{moe.dense_layers}+[1]*{model.layers - moe.dense_layers})"
    if moe.capacity_factor is not None:
        terms["capacity"] = moe.capacity_factor
    return terms
