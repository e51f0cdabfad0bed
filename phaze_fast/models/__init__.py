"""Models: presets, files, HuggingFace configurations and traced PyTorch modules."""

from phaze_fast.models.huggingface import from_hf
from phaze_fast.models.presets import load, names
from phaze_fast.models.torch_import import from_torch
from phaze_fast.models.traced import TracedModel
from phaze_fast.models.transformer import MixtureOfExperts, Patches, TransformerModel

__all__ = [
    "MixtureOfExperts",
    "Patches",
    "TracedModel",
    "TransformerModel",
    "from_hf",
    "from_torch",
    "load",
    "names",
]
