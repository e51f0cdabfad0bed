"""Which blocks of a model a mesh of dies can take, and how an encoder and a decoder share one."""

from __future__ import annotations

from dataclasses import replace

from phaze_fast.errors import InvalidInputError
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.block import block_builder
from phaze_fast.opgraph.builder import LayerBuilder
from phaze_fast.opgraph.strategy import Strategy
from phaze_fast.wafer.experts import routed

__all__ = ["ENCODER", "mesh_block", "plain_name", "refuse_unlike_blocks"]

ENCODER = "encoder-"
"""What names of an encoder's operators begin with, where a decoder stands beside it."""


def plain_name(name: str) -> str:
    """Name an operator of an encoder or of cross-attention as a decoder's own.

    Examples
    --------
    >>> [plain_name(name) for name in ("encoder-q", "cross-proj", "down", "cross-entropy")]
    ['q', 'proj', 'down', 'cross-entropy']
    """
    return name if name == "cross-entropy" else name.removeprefix(ENCODER).removeprefix("cross-")


def refuse_unlike_blocks(model: TransformerModel) -> None:
    """Raise where blocks are of several kinds, or of one that a mesh does not split yet.

    Raises
    ------
    InvalidInputError
        Naming what is accepted.
    """
    unusual = (
        model.window is not None
        or model.latent is not None
        or model.parallel != "no"
        or model.norm_position not in ("pre", "post")
        or model.qk_norm != "no"
    )
    mixed = model.moe is not None and (model.moe.dense_layers or model.encoder_layers)
    if mixed or unusual or model.patches is not None:
        raise InvalidInputError(
            f"model: {model.name} is not accepted; expected one kind of block without image "
            "patches, windows, latent attention, parallel blocks or further norms (a BERT, GPT, "
            "OPT, Llama, Mixtral or T5)"
        )
    if model.encoder_layers not in (0, model.layers):
        raise InvalidInputError(
            f"model: {model.name} with {model.encoder_layers} encoder blocks is not accepted; "
            f"expected as many as decoder blocks, {model.layers}"
        )


def mesh_block(model: TransformerModel, strategy: Strategy) -> LayerBuilder:
    """Write a block as a mesh sees it: with experts' ends, or an encoder's beside a decoder's."""
    if not model.encoder_layers:
        return routed(block_builder(model, strategy, "moe-block" if model.moe else "block"))
    kinds = ("encoder-block", "decoder-block")
    return _paired(*(block_builder(model, strategy, kind) for kind in kinds))


def _paired(encoder: LayerBuilder, decoder: LayerBuilder) -> LayerBuilder:
    """Write an encoder's block and a decoder's as one.

    All encoder blocks run before all decoder blocks; where one stage has both, the order makes no
    difference to its time or memory. The decoder's cross-attention takes what the encoder's block
    leaves, in place of what the last of them leaves: the same tensor's shape. That tensor is kept
    once, as the input of the encoder's next block, and not again for the decoder.
    """
    made = LayerBuilder(decoder.name)
    count = len(encoder.specs)
    last = ENCODER + encoder.specs[-1].name
    made.specs = [replace(spec, name=ENCODER + spec.name) for spec in encoder.specs]
    for spec in decoder.specs:
        outside = count - 1 if spec.name in ("cross-k", "cross-v") else -1
        inputs = tuple(i + count if i >= 0 else outside for i in spec.inputs)
        made.specs.append(replace(spec, inputs=inputs))
    for tensor in encoder.kept:
        entered = tensor.producer == "input"
        producer = last if entered else ENCODER + tensor.producer
        made.kept.append(replace(tensor, name=ENCODER + tensor.name, producer=producer))
    made.kept += [tensor for tensor in decoder.kept if tensor.name != "memory"]
    return made
