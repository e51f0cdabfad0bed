"""Models: presets, files, HuggingFace configurations and traced PyTorch modules."""

from phaze_fast.models.flops import (
    ModelFlops,
    model_flops,
    multiplied_parameters,
    narayanan_flops,
)
from phaze_fast.models.huggingface import from_hf
from phaze_fast.models.presets import load, names
from phaze_fast.models.torch_import import from_torch
from phaze_fast.models.traced import TracedModel
from phaze_fast.models.parts import LatentAttention, MixtureOfExperts, Patches
from phaze_fast.models.transformer import TransformerModel

__all__ = [
    "LatentAttention",
    "MixtureOfExperts",
    "ModelFlops",
    "Patches",
    "TracedModel",
    "TransformerModel",
    "from_hf",
    "from_torch",
    "load",
    "model_flops",
    "multiplied_parameters",
    "names",
    "narayanan_flops",
]
