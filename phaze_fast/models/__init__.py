"""Models: presets, files, HuggingFace configurations and traced PyTorch modules."""

from phaze_fast.models.flops import ModelFlops as ModelFlops
from phaze_fast.models.flops import model_flops as model_flops
from phaze_fast.models.flops import multiplied_parameters as multiplied_parameters
from phaze_fast.models.flops import narayanan_flops as narayanan_flops
from phaze_fast.models.graph_model import GraphLayer as GraphLayer
from phaze_fast.models.graph_model import GraphModel as GraphModel
from phaze_fast.models.graph_model import GraphOperator as GraphOperator
from phaze_fast.models.graph_model import SavedTensor as SavedTensor
from phaze_fast.models.huggingface import from_hf as from_hf
from phaze_fast.models.presets import Model as Model
from phaze_fast.models.presets import load as load
from phaze_fast.models.presets import model_from_dict as model_from_dict
from phaze_fast.models.presets import names as names
from phaze_fast.models.recognise import recognised as recognised
from phaze_fast.models.recognise import why_not_recognised as why_not_recognised
from phaze_fast.models.torch_import import from_torch as from_torch
from phaze_fast.models.transformer import LatentAttention as LatentAttention
from phaze_fast.models.transformer import MixtureOfExperts as MixtureOfExperts
from phaze_fast.models.transformer import Patches as Patches
from phaze_fast.models.transformer import TransformerModel as TransformerModel
