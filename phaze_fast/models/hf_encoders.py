"""Encoders and encoder-decoders of HuggingFace transformers as records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.models.hf_fields import Fields

__all__ = ["ENCODERS"]


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


def _megatron_bert(f: Fields) -> dict[str, Any]:
    """BERT as Megatron-LM has it: norms before the sub-layers and after the last block."""
    before = {"norm_position": "pre", "embedding_norm": False, "final_norm": True}
    return {**_bert(f), **before}


def _roberta(f: Fields) -> dict[str, Any]:
    f.used.add("pad_token_id")
    fields = _bert(f)  # the table keeps rows up to the padding token's for padding
    return {**fields, "seq": max(1, fields["max_positions"] - 2)}


def _t5(f: Fields) -> dict[str, Any]:
    kind = f.take("feed_forward_proj", "relu")
    # Decoder outputs are scaled before tied logits, which the gain of the last norm can hold.
    f.used |= {"is_gated_act", "dense_act_fn", "scale_decoder_outputs"}
    gated = str(kind).startswith("gated-")
    # transformers reads the gated form as the GELU that it calls new.
    name = "gelu_new" if kind == "gated-gelu" else str(kind).removeprefix("gated-")
    f.take("relative_attention_max_distance", 128)
    f.used.add("tie_word_embeddings")  # transformers ties them whatever a configuration says
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
        raise InvalidInputError(
            f"{f.source}: patch_size: {patch} is not accepted; expected a divisor of {image}"
        )
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


ENCODERS: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "bert": _bert,
    "megatron-bert": _megatron_bert,
    "mt5": _t5,
    "roberta": _roberta,
    "t5": _t5,
    "vit": _vit,
    "xlm-roberta": _roberta,
}
"""How each architecture is read."""
