"""Forward code of the families of transformers' models, by ``model_type``."""

from phaze_fast.models.families import encoders, gpt, mixtures
from phaze_fast.models.families.llama import Llama
from phaze_fast.models.huggingface import architecture


def code_of(family: str) -> type[Llama]:
    """Return the class whose forward code a family runs: ``code`` of its entry, or Llama's."""
    name = architecture(family)["module"].get("code", "Llama")
    classes = {**vars(gpt), **vars(mixtures), **vars(encoders)}
    return classes[name]  # type: ignore[no-any-return]
