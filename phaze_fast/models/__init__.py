"""Models: presets, files, HuggingFace configurations and traced PyTorch modules."""

from phaze_fast.models.flops import (
    ModelFlops,
    model_flops,
    multiplied_parameters,
    narayanan_flops,
)
from phaze_fast.models.graph_model import GraphLayer, GraphModel, GraphOperator, SavedTensor
from phaze_fast.models.huggingface import from_hf
from phaze_fast.models.presets import Model, load, model_from_dict, names
from phaze_fast.models.recognise import recognised, why_not_recognised
from phaze_fast.models.torch_import import from_torch
from phaze_fast.models.transformer import (
    LatentAttention,
    MixtureOfExperts,
    Patches,
    TransformerModel,
)

__all__ = [
    "GraphLayer",
    "GraphModel",
    "GraphOperator",
    "LatentAttention",
    "MixtureOfExperts",
    "Model",
    "ModelFlops",
    "Patches",
    "SavedTensor",
    "TransformerModel",
    "from_hf",
    "from_torch",
    "load",
    "model_flops",
    "model_from_dict",
    "multiplied_parameters",
    "names",
    "narayanan_flops",
    "recognised",
    "why_not_recognised",
]
