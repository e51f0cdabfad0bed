"""Parameters of a model's layers, and those that one device holds of them under a strategy."""

from __future__ import annotations

from dataclasses import dataclass

from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.strategy import Strategy, shapes

__all__ = ["Share", "block_share", "embedding_share", "head_share"]


@dataclass(frozen=True)
class Share:
    """Parameters of one layer."""

    whole: int
    """Over all devices."""
    device: int
    """That one device holds; norms and row-wise biases are on every one."""
    experts: int = 0
    """Of those, the routed experts', which expert-parallel devices share out."""


def _attention(model: TransformerModel, strategy: Strategy) -> int:
    """Attention parameters of one device, its norm not counted."""
    s, t = shapes(model, strategy), strategy.tp
    latent = model.latent
    if latent is not None:  # what is split by heads; the rest is whole on every device
        rank = latent.query_rank or model.hidden
        split = model.heads * (
            rank * latent.query_width
            + latent.kv_rank * (latent.plain_width + latent.value_width)
            + latent.value_width * model.hidden
            + model.sinks
        )
        return model.attention_parameters - split + split // t
    extra = model.out_bias * model.hidden + model.sinks * s.heads
    columns = s.query_width + 2 * s.kv_width
    norms = model.qk_norm_parameters
    if model.qk_norm == "width":
        norms = s.query_width + s.kv_width
    out = s.query_width * model.hidden
    return columns * model.hidden + model.qkv_bias * columns + out + norms + extra


def _ffn(model: TransformerModel, width: int) -> int:
    """Feed-forward parameters of one device that holds `width` columns."""
    inward = 2 if model.gated else 1
    biases = model.ffn_bias * (inward * width + model.hidden)
    return (inward + 1) * model.hidden * width + biases


def block_share(model: TransformerModel, strategy: Strategy, kind: str) -> Share:
    """Parameters of one block of a kind."""
    s, t = shapes(model, strategy), strategy.tp
    whole = model.block_norms * model.norm_parameters + model.attention_parameters
    device = model.block_norms * model.norm_parameters + _attention(model, strategy)
    if kind == "decoder-block":  # cross-attention and its norm
        whole += model.attention_parameters + model.norm_parameters
        device += _attention(model, strategy) + model.norm_parameters
    moe = model.moe
    if moe is None or not kind.endswith("moe-block"):
        return Share(whole + model.ffn_parameters(model.ffn), device + _ffn(model, s.ffn))
    local = moe.experts // strategy.ep
    experts = local * _ffn(model, moe.expert_ffn // strategy.expert_width)
    device += (model.hidden + moe.router_bias) * moe.experts + experts
    if moe.shared_width:
        device += _ffn(model, moe.shared_width // t) + moe.shared_gate * model.hidden
    return Share(whole + model.moe_parameters, device, experts)


def embedding_share(model: TransformerModel, strategy: Strategy) -> Share:
    """Parameters of the embedding, whose vocabulary devices share."""
    whole = model.parameters_by_part()["embedding"]
    vocab = shapes(model, strategy).vocab
    return Share(whole, whole + (vocab - model.vocab) * model.hidden)


def head_share(model: TransformerModel, strategy: Strategy) -> Share:
    """Parameters of the head, and with it of what belongs to a stack rather than to a block."""
    s, t = shapes(model, strategy), strategy.tp
    stacks = 2 if model.encoder_layers else 1
    norms = stacks * model.final_norm * model.norm_parameters
    relative = (model.relative_buckets or 0) * model.heads
    head = model.parameters_by_part().get("head", 0)
    device = head
    columns = s.vocab - model.vocab  # fewer than all of them
    if model.head == "mlm" or (model.head == "lm" and model.head_bias):
        device += columns  # the bias of the logits is split with them
    if not model.tied_embeddings and model.head in ("lm", "mlm"):
        device += columns * model.hidden
    return Share(norms + stacks * relative + head, norms + stacks * (relative // t) + device)
