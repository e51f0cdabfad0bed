"""Takes a preset name, a file or a HuggingFace configuration, gives a model description."""

from phaze_fast.models.huggingface import from_hf
from phaze_fast.models.presets import load, names
from phaze_fast.models.transformer import MixtureOfExperts, Patches, TransformerModel

__all__ = ["MixtureOfExperts", "Patches", "TransformerModel", "from_hf", "load", "names"]
