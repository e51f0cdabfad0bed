"""Floating-point operations of training a model, by published formulas.

A multiply-accumulate counts as two operations, the backward pass as two forward passes, and only
matrix products count: 6 operations for each token and each weight it is multiplied by, and 12 L H
Q T for each token's attention over T tokens in L layers of H heads of width Q (Chowdhery et al.,
PaLM, 2022, appendix B; Narayanan et al., Megatron-LM, 2021, appendix). docs/throughput.md derives
both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

from phaze_fast.errors import not_accepted
from phaze_fast.models.graph_model import GraphModel
from phaze_fast.models.transformer import TransformerModel

_PER_WEIGHT = 6.0  # two operations, forward once and backward twice
_PER_FROZEN_WEIGHT = 4.0  # without the gradient of the weight
_PASSES = 3.0  # forward, and backward twice as much


@dataclass(frozen=True)
class ModelFlops:
    """Operations of some sequences, forward and backward, without recomputation.

    Examples
    --------
    >>> from phaze_fast import models
    >>> flops = model_flops(models.load("llama3-405b"), seq=8192)
    >>> round(flops.per_token / 1e12, 3), round(flops.per_token_causal / 1e12, 3)
    (2.625, 2.524)
    """

    tokens: int
    """Tokens of these sequences; for an encoder-decoder, those of one side."""
    weights: float
    """Operations of products with weights: 6 per token and weight."""
    attention: float
    """Operations of products of queries with keys and scores with values, over all token pairs."""
    attention_causal: float
    """`attention` with a causal mask, by which fused kernels skip half of the pairs."""
    forward_blocks: float
    """Operations of one forward pass of the blocks, unmasked: what full recomputation adds."""
    forward_blocks_causal: float
    """`forward_blocks` with a causal mask."""

    @property
    def total(self) -> float:
        """`weights` and `attention` together: the operations that MFU counts."""
        return self.weights + self.attention

    @property
    def total_causal(self) -> float:
        """`weights` and `attention_causal` together."""
        return self.weights + self.attention_causal

    @property
    def per_token(self) -> float:
        """`total` of one token."""
        return self.total / self.tokens

    @property
    def per_token_causal(self) -> float:
        """`total_causal` of one token."""
        return self.total_causal / self.tokens

    def to_dict(self) -> dict[str, float]:
        """Return plain data, totals included."""
        return {**asdict(self), "total": self.total, "total_causal": self.total_causal}


def _block_weights(model: TransformerModel) -> int:
    """Weights of all blocks that one token is multiplied by."""
    blocks = model.layers + model.encoder_layers + model.mtp_layers
    cross = model.layers if model.encoder_layers else 0
    mixtures = model.moe_layers + model.mtp_layers * model.has_experts(model.layers - 1)
    total = (blocks + cross) * model.attention_weights + model.mtp_layers * 2 * model.hidden**2
    total += (blocks - mixtures) * model.ffn_weights(model.ffn)
    moe = model.moe
    if moe is not None:
        visited = moe.top_k * model.ffn_weights(moe.expert_ffn)
        visited += model.ffn_weights(moe.shared_width) + moe.shared_gate * model.hidden
        total += mixtures * (model.hidden * moe.experts + visited)
    return total


def _adapter_weights(model: TransformerModel) -> int:
    """Weights of adapters that one token is multiplied by."""
    if model.lora is None:
        return 0
    total = model.trained_parameters()
    moe = model.moe
    if moe is not None:
        idle = moe.experts - moe.top_k
        total -= model.moe_layers * idle * model.expert_adapters(moe.expert_ffn)
    return total


def visible_keys(model: TransformerModel, seq: int) -> float:
    """Return the mean number of keys that a query sees in a layer with a window.

    A causal window of w over s tokens has w s - w (w - 1) / 2 pairs of query and key; a
    bidirectional window has half of its keys on each side of the token.

    Examples
    --------
    >>> from phaze_fast import models
    >>> windowed = models.load("llama2-7b").replace(window=2)
    >>> visible_keys(windowed, 4)
    1.75
    """
    window = seq if model.window is None else min(model.window, seq)
    if not model.causal:
        window = min(window // 2 + 1, seq)
    pairs = window * seq - window * (window - 1) / 2
    return pairs / seq if model.causal else min(2.0 * pairs / seq - 1.0, float(seq))


def _patch_weights(model: TransformerModel) -> int:
    """Weights that every patch is multiplied by; a class token is not a patch."""
    if model.patches is None:
        return 0
    return model.patches.size**2 * model.patches.channels * model.hidden


def _end_weights(model: TransformerModel) -> int:
    """Weights of patches and logits that every token is multiplied by."""
    total = _patch_weights(model)
    if model.head in ("lm", "mlm"):  # the same product whether the weights are tied or not
        total += (1 + model.mtp_layers) * model.vocab * model.hidden
    if model.head == "mlm":
        total += model.hidden * model.hidden
    return total


def multiplied_parameters(model: TransformerModel) -> int:
    """Count the weights that one token is multiplied by: the N of 6N.

    In a mixture of experts these include the experts that the token visits and the router. The head
    counts whether or not its weights are tied to the embedding; embedding look-ups, biases and
    norms do not count. A classifier head reads one token per sequence and is not counted.

    Examples
    --------
    >>> from phaze_fast import models
    >>> model = models.load("mixtral-8x7b")
    >>> round(multiplied_parameters(model) / 1e9, 2), round(model.active_parameters() / 1e9, 2)
    (12.75, 12.88)
    """
    return _block_weights(model) + _end_weights(model)


def _attention(model: TransformerModel, seq: int) -> tuple[float, float]:
    """Operations of one sequence's attention in one forward pass: in full, and masked.

    Both count only the visible keys of a window; explicit attention computes every score.
    """
    width = 4.0 * model.query_width
    if model.latent is not None:
        width = 2.0 * model.heads * (model.latent.query_width + model.latent.value_width)
    one = width * float(seq) * float(seq)  # one layer, every pair of tokens
    if model.encoder_layers:
        own, cross = model.layers * one, (model.encoder_layers + model.layers) * one
        return own + cross, (0.5 if model.causal else 1.0) * own + cross
    run = [*range(model.layers), *[model.layers - 1] * model.mtp_layers]
    windowed = sum(model.is_windowed(layer, seq) for layer in run)
    if model.attention == "eager":
        windowed = 0
    narrow = windowed * width * seq * visible_keys(model, seq) if windowed else 0.0
    own = (len(run) - windowed) * one
    return own + narrow, (0.5 if model.causal else 1.0) * own + narrow


_GRADIENTS = ("gemm-input-gradient", "gemm-weight-gradient")


def _graph_flops(model: GraphModel, sequences: int) -> ModelFlops:
    """Operations of a graph's products; the backward pass counts as two forward passes.

    If some parameters are frozen, products with weights count only gradients that are computed.
    """
    weights = attention = masked = 0.0
    blocks = blocks_masked = 0.0
    frozen = any(layer.frozen_parameters for layer in model.layers)
    for layer in model.layers:
        if frozen:  # the gradients that are computed
            gradients = sum(op.flops for op in layer.backward if op.kind in _GRADIENTS)
            weights += layer.count * (gradients / _PASSES)
        for op in layer.forward:
            flops = layer.count * op.flops
            seen = flops * (0.5 if op.causal else 1.0)
            if op.kind == "gemm":
                weights += flops / _PASSES if frozen else flops
            else:
                attention, masked = attention + flops, masked + seen
            if layer.name not in ("embedding", "head"):
                blocks, blocks_masked = blocks + flops, blocks_masked + seen
    return ModelFlops(
        tokens=model.seq * sequences,
        weights=_PASSES * sequences * weights,
        attention=_PASSES * sequences * attention,
        attention_causal=_PASSES * sequences * masked,
        forward_blocks=sequences * blocks,
        forward_blocks_causal=sequences * blocks_masked,
    )


def model_flops(
    model: TransformerModel | GraphModel, seq: int | None = None, sequences: int = 1
) -> ModelFlops:
    """Count the operations of some sequences, forward and backward.

    Parameters
    ----------
    model
        The model to train.
    seq
        Sequence length in tokens, by default the model's; for an encoder-decoder, of either side.
    sequences
        Number of sequences, for example those of one step.

    Raises
    ------
    InvalidInputError
        If `seq` or `sequences` is not a whole number of at least 1.

    Examples
    --------
    >>> from phaze_fast import models
    >>> gpt = models.load("gpt3-175b")
    >>> step = model_flops(gpt, seq=2048, sequences=1536)
    >>> round(step.attention / step.weights, 4), step.attention_causal / step.attention
    (0.0277, 0.5)
    """
    length = model.seq if seq is None else seq
    for name, value in (("seq", length), ("sequences", sequences)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise not_accepted(name, value, "1 or more")
    if isinstance(model, GraphModel):
        return _graph_flops(model, sequences)
    return _transformer_flops(model, length, sequences)


@lru_cache(maxsize=64)  # all plans of a step ask for the same
def _transformer_flops(model: TransformerModel, length: int, sequences: int) -> ModelFlops:
    """Count the operations of a transformer on some sequences of `length` tokens."""
    blocks, count = float(_block_weights(model)), float(sequences)
    full, masked = _attention(model, length)
    per_weight = _PER_WEIGHT if model.lora is None else _PER_FROZEN_WEIGHT
    weights = per_weight * length * (blocks + _end_weights(model))
    if model.head == "classifier":  # one token of each sequence
        weights += per_weight * model.hidden * model.classes
    if model.patches is not None and model.patches.class_token and length > 1:
        weights -= per_weight * _patch_weights(model)
    if model.lora is not None:
        adapters = float(_adapter_weights(model))
        weights += _PER_WEIGHT * length * adapters
        blocks += adapters
    forward = 2.0 * length * blocks
    return ModelFlops(
        tokens=length * sequences,
        weights=count * weights,
        attention=count * _PASSES * full,
        attention_causal=count * _PASSES * masked,
        forward_blocks=count * (forward + full),
        forward_blocks_causal=count * (forward + masked),
    )


def narayanan_flops(
    layers: int, hidden: int, vocab: int, seq: int, sequences: int, recompute: bool = True
) -> float:
    """Operations of a GPT with 12 l h^2 weights (Narayanan et al. 2021, equation 3).

    96 B s l h^2 (1 + s / 6h + V / 16 l h) where every block is computed again in the backward pass,
    72 B s l h^2 (1 + s / 6h + V / 12 l h) where none is. Attention counts in full.

    Examples
    --------
    >>> f"{narayanan_flops(96, 12288, 51200, 2048, 1):.3e}"
    '2.937e+15'
    """
    b, s, h = float(sequences), float(seq), float(hidden)
    blocks = b * s * layers * h * h
    if recompute:
        return 96.0 * blocks * (1.0 + s / (6.0 * h) + vocab / (16.0 * layers * h))
    return 72.0 * blocks * (1.0 + s / (6.0 * h) + vocab / (12.0 * layers * h))
