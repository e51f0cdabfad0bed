"""Transformers read from a HuggingFace ``config.json``; what is not modelled is refused.

Every field of a configuration is either used, known to change no operator, or refused: nothing is
passed over in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from phaze_fast.documents import read_document
from phaze_fast.errors import InvalidInputError, MissingExtraError, nearest
from phaze_fast.models.transformer import TransformerModel

__all__ = ["from_hf"]

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@cache
def _idle() -> frozenset[str]:
    """Fields that change neither an operator nor a byte of a training step."""
    text = (resources.files(__package__) / "data" / "hf_idle.txt").read_text("utf-8")
    return frozenset(line for line in text.splitlines() if not line.startswith("#"))


class _Fields:
    """A configuration whose fields are ticked off as they are used."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data = dict(data)
        self.source = source
        self.used = {"model_type"}

    def take(self, name: str, default: Any = ...) -> Any:
        self.used.add(name)
        if name in self.data and self.data[name] is not None:
            return self.data[name]
        if default is ...:
            raise InvalidInputError(f"{self.source}: {name}: is missing and has no default")
        return default

    def whole(self, name: str, default: Any = ...) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidInputError(
                f"{self.source}: {name}: {value!r} is not accepted; expected a whole number"
            )
        return value

    def require(self, name: str, wanted: Any, why: str) -> None:
        """Accept a field only at the one value that is modelled."""
        value = self.take(name, wanted)
        if value != wanted:
            raise InvalidInputError(
                f"{self.source}: {name}: {value!r} is not modelled; expected {wanted!r} ({why})"
            )

    def require_each(self, name: str, wanted: Any, why: str) -> None:
        """Accept a list, one entry per layer, only where each has the value that is modelled."""
        for value in self.take(name, ()):
            if value != wanted:
                raise InvalidInputError(
                    f"{self.source}: {name}: {value!r} is not modelled; expected {wanted!r} ({why})"
                )

    def activation(self, name: str, default: Any = ...) -> str:
        value = self.take(name, default)
        if value not in _ACTIVATIONS:
            raise InvalidInputError(
                f"{self.source}: {name}: activation {value!r} is not modelled; "
                f"{nearest(str(value), _ACTIVATIONS)}"
            )
        return _ACTIVATIONS[value]

    def drops(self, *names: str) -> bool:
        taken = [bool(self.take(name, 0.0)) for name in names]  # every one is ticked off
        return any(taken)

    def finish(self) -> None:
        """Refuse whatever was neither used nor idle."""
        for name, value in self.data.items():
            if name not in self.used and name not in _idle() and value not in (None, False):
                raise InvalidInputError(
                    f"{self.source}: {name}: {value!r} is not modelled; remove it, or set it to "
                    "null if it does not matter"
                )


def _bert(f: _Fields) -> dict[str, Any]:
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


_GELU_BY_STEPS = ("gelu_new", "gelu_fast")
"""Activations that transformers writes as a row of elementwise operators."""


def _gpt2(f: _Fields) -> dict[str, Any]:
    hidden = f.whole("n_embd")
    f.require("scale_attn_by_inverse_layer_idx", False, "scores scaled by depth")
    f.require("reorder_and_upcast_attn", False, "attention in fp32")
    f.require("scale_attn_weights", True, "unscaled scores")
    longest = f.whole("n_positions")
    return {
        "layers": f.whole("n_layer"),
        "hidden": hidden,
        "heads": f.whole("n_head"),
        "ffn": f.whole("n_inner", 4 * hidden),
        "vocab": f.whole("vocab_size"),
        "max_positions": longest,
        "seq": longest,
        "fused_qkv": True,
        "activation": f.activation("activation_function", "gelu_new"),
        "gelu_new": f.data.get("activation_function", "gelu_new") in _GELU_BY_STEPS,
        "dropout": f.drops("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "tied_embeddings": bool(f.take("tie_word_embeddings", True)),
    }


def _opt(f: _Fields) -> dict[str, Any]:
    hidden = f.whole("hidden_size")
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
        "tied_embeddings": bool(f.take("tie_word_embeddings", True)),
    }


def _llama(f: _Fields) -> dict[str, Any]:
    heads = f.whole("num_attention_heads")
    biased = bool(f.take("attention_bias", False))
    window = f.take("sliding_window", None)
    longest = f.whole("max_position_embeddings")
    if window is not None and f.take("use_sliding_window", True) and window < longest:
        raise InvalidInputError(
            f"{f.source}: sliding_window: {window!r} is not modelled; attention over a window of a "
            "sequence (null or use_sliding_window: false is accepted)"
        )
    f.require_each("layer_types", "full_attention", "attention over a window of a sequence")
    return {
        "layers": f.whole("num_hidden_layers"),
        "hidden": f.whole("hidden_size"),
        "heads": heads,
        "kv_heads": f.whole("num_key_value_heads", heads),
        "head_dim": f.take("head_dim", None),
        "ffn": f.whole("intermediate_size"),
        "vocab": f.whole("vocab_size"),
        "seq": longest,
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": f.activation("hidden_act", "silu"),
        "gated": True,
        "qkv_bias": biased,
        "out_bias": biased,
        "ffn_bias": bool(f.take("mlp_bias", False)),
        "dropout": f.drops("attention_dropout"),
        "tied_embeddings": bool(f.take("tie_word_embeddings", False)),
    }


def _qwen2(f: _Fields) -> dict[str, Any]:
    f.data.setdefault("use_sliding_window", False)
    return {**_llama(f), "qkv_bias": True}


def _mixtral(f: _Fields) -> dict[str, Any]:
    fields = _llama(f)
    moe = {
        "experts": f.whole("num_local_experts"),
        "top_k": f.whole("num_experts_per_tok"),
        "expert_ffn": fields["ffn"],
    }
    return {**fields, "moe": moe}


def _t5(f: _Fields) -> dict[str, Any]:
    kind = f.take("feed_forward_proj", "relu")
    # Decoder outputs are scaled before tied logits, which the gain of the last norm can hold.
    f.used |= {"is_gated_act", "dense_act_fn", "scale_decoder_outputs"}
    gated = str(kind).startswith("gated-")
    name = str(kind).removeprefix("gated-")
    if name not in _ACTIVATIONS:
        raise InvalidInputError(
            f"{f.source}: feed_forward_proj: activation {kind!r} is not modelled; "
            f"{nearest(name, _ACTIVATIONS)}"
        )
    f.take("relative_attention_max_distance", 128)
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
        "activation": _ACTIVATIONS[name],
        "gated": gated,
        "qkv_bias": False,
        "out_bias": False,
        "ffn_bias": False,
        "dropout": f.drops("dropout_rate"),
        "tied_embeddings": bool(f.take("tie_word_embeddings", True)),
    }


def _vit(f: _Fields) -> dict[str, Any]:
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


_BUILDERS: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "opt": _opt,
    "qwen2": _qwen2,
    "t5": _t5,
    "vit": _vit,
}
_LATENT = (
    "multi-head latent attention (q_lora_rank, kv_lora_rank) is not modelled, so its operators and "
    "stashed tensors would be guesses"
)
_REFUSED = {"deepseek_v2": _LATENT, "deepseek_v3": _LATENT}


def _build(data: object, source: str) -> TransformerModel:
    if not isinstance(data, Mapping):
        raise InvalidInputError(f"{source}: expected a mapping of keys to values")
    kind = data.get("model_type")
    if kind in _REFUSED:
        raise InvalidInputError(f"{source}: model_type: {kind!r} is refused: {_REFUSED[kind]}")
    if kind not in _BUILDERS:
        raise InvalidInputError(
            f"{source}: model_type: {kind!r} is not modelled; {nearest(str(kind), _BUILDERS)}"
        )
    fields = _Fields(data, source)
    built = _BUILDERS[kind](fields)
    fields.finish()
    named = data.get("_name_or_path") or kind
    return TransformerModel.from_dict({"name": str(named), **built}, source)


def _download(repository: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingExtraError(
            f"{repository!r} is no file, and reading it from the hub needs: "
            "pip install 'phaze-fast[hf]'"
        ) from None
    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInputError(f"{repository}: config.json cannot be fetched: {reason}") from None


def from_hf(config: str | Path | Mapping[str, Any]) -> TransformerModel:
    """Read a HuggingFace configuration.

    Parameters
    ----------
    config
        A ``config.json`` or the folder that holds it, its content as a mapping, or with the extra
        ``hf`` the id of a repository on the hub.

    Returns
    -------
    TransformerModel
        With fused attention; ``.replace(attention="eager")`` for explicit scores.

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
        path = _download(config)
    return _build(read_document(path), str(path))
