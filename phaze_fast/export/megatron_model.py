"""The architecture of a model as options of Megatron-Core, for Megatron-LM and Megatron Bridge.

Options are called terms: a dictionary by the keys of ``data/megatron.yaml``. A term that is None or
False is off; a tuple is a pattern with a number for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.request import FlagNames, Request, Unexpressed, flag_names
from phaze_fast.models import LatentAttention, MixtureOfExperts, TransformerModel

Terms = dict[str, Any]
"""Values by the keys of the formats' data files."""

_SIZES = (
    *("layers", "hidden", "ffn", "heads", "kv_heads", "experts", "top_k", "expert_ffn"),
    *("query_rank", "kv_rank", "plain_width", "rotary_width", "value_width"),
)
"""Terms in which a file and the model must agree."""
_BIASES = ((True, True, True), (False, False, False), (True, False, False))
"""Biases of query, key and value projections, output projection and feed-forward layer."""
_STRETCHED = "llama3"


def pattern_text(pattern: Sequence[int]) -> str:
    """Write a number for each layer as Megatron-LM reads it.

    Examples
    --------
    >>> pattern_text((0, 0, 0, 1, 1))
    '([0]*3+[1]*2)'
    """
    runs = ((number, len(list(run))) for number, run in groupby(pattern))
    return f"({'+'.join(f'[{number}]*{count}' for number, count in runs)})"


def model_terms(model: TransformerModel, seq: int) -> Terms:
    """Return a model's architecture as terms of Megatron-Core."""
    positions, biased = flag_names("megatron").tables["positions"], model.out_bias or model.ffn_bias
    grouped = model.kv_heads is not None and model.kv_heads != model.heads
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        **(_latent(model.latent) if model.latent else {"head_dim": model.head_width}),
        "grouped": grouped,
        "kv_heads": model.kv_heads if grouped else None,
        "max_positions": max(model.max_positions or seq, seq),
        "positions": positions.get(model.positions, "learned_absolute"),
        **_rotary(model),
        **_window(model),
        "qk_norm": model.qk_norm != "no" or model.latent is not None,  # norms of latent vectors
        **({"sinks": "learnable"} if model.sinks else {}),
        "norm": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "gated": model.gated,
        "untied": not model.tied_embeddings,
        "no_bias": not biased,
        "qkv_bias": model.qkv_bias and not biased,
        **({} if model.dropout else {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
        **(_experts(model, model.moe) if model.moe else {}),
        **({"mtp": model.mtp_layers} if model.mtp_layers else {}),
    }


def _latent(latent: LatentAttention) -> Terms:
    names = ("query_rank", "kv_rank", "plain_width", "rotary_width", "value_width")
    return {"latent": True, **{name: getattr(latent, name) for name in names}}


def _rotary(model: TransformerModel) -> Terms:
    rotary = model.rotary
    yarn = rotary is not None and rotary.scaling == "yarn"
    if rotary is None:
        return {}
    terms: Terms = {"rotary_base": rotary.base}
    if rotary.share < 1:
        terms["rotary_share"] = rotary.share
    if model.latent:
        terms |= {"latent_rotary": "yarn" if yarn else "rope", "latent_factor": rotary.factor}
    elif rotary.scaling == _STRETCHED:
        terms |= {"rotary_stretched": True, "rotary_factor": rotary.factor}
    return terms


def _window(model: TransformerModel) -> Terms:
    """Return the terms of windows: tokens before and after a query, and layers without a window."""
    if model.window is None:
        return {}
    full = set(model.full_attention_layers)
    terms: Terms = {"window": f"{model.window - 1},0"}
    if full:
        step = min(full) + 1
        regular = full == set(range(step - 1, model.layers, step))
        pattern = tuple(int(layer not in full) for layer in range(model.layers))
        terms["full_layers"] = step if regular and step > 1 else pattern
    return terms


def _experts(model: TransformerModel, moe: MixtureOfExperts) -> Terms:
    softmax, groups = moe.scores == "softmax", moe.groups
    dense = model.moe_layers < model.layers
    layers = tuple(int(model.has_experts(layer)) for layer in range(model.layers))
    return {
        "experts": moe.experts,
        "top_k": moe.top_k,
        "expert_ffn": moe.expert_ffn,
        "grouped_gemm": True,
        "shared_ffn": moe.shared_width or None,
        "shared_gate": moe.shared_gate,
        "moe_layers": layers if dense else 1,
        "capacity": moe.capacity_factor,
        "padded": moe.capacity_factor is not None,
        "scores": moe.scores,
        # The softmax of a single score is 1: Megatron-Core requires the softmax of all scores then.
        "unnormalised": softmax and (moe.top_k == 1 or not moe.scores_normalised),
        "scores_factor": moe.scores_factor if moe.scores_factor != 1.0 else None,
        "balancing_bias": moe.balancing_bias,
        "groups": groups,
        "top_groups": moe.top_groups if groups else None,
    }


def missing_model(request: Request, any_activation: bool = False) -> list[Unexpressed]:
    """List the parts of a model that Megatron-Core has no options for.

    Parameters
    ----------
    request
        The plan and its model.
    any_activation
        Whether the format can name any non-linearity, as Megatron Bridge can.
    """
    model, names = request.model, flag_names("megatron")
    rotary, scalings = model.rotary, ("none", "yarn") if model.latent else ("none", _STRETCHED)
    return request.unexpressed_model(
        names,
        encoder=model.encoder_layers > 0,
        images=model.patches is not None or model.head == "classifier",
        positions=model.positions not in names.tables["positions"],
        rotary=rotary is not None and rotary.scaling not in scalings,
        relu=model.activation == "relu" and not model.gated and not any_activation,
        gate=model.gated and model.activation != "silu" and not any_activation,
        norm_bias=model.norm == "layernorm" and not model.norm_bias,
        biases=(model.qkv_bias, model.out_bias, model.ffn_bias) not in _BIASES
        or (model.latent is not None and model.qkv_bias and not model.out_bias),
        router_bias=model.moe is not None and model.moe.router_bias != model.ffn_bias,
    )


def check_sizes(terms: Mapping[str, Any], model: TransformerModel, names: FlagNames) -> None:
    """Check that the sizes in a file, as far as it gives any, are those of this model.

    Raises
    ------
    InvalidInputError
        Where a size differs.
    """
    own = model_terms(model, model.seq)
    own["kv_heads"] = own["kv_heads"] or model.heads
    for key in _SIZES:
        text = str(terms.get(key))
        if (key == "ffn" and model.moe) or not text.isdecimal():
            continue
        if own.get(key) not in (None, int(text)):
            raise InvalidInputError(
                f"{names[key]}: {text} is not accepted; {model.name} has {own[key]}"
            )
