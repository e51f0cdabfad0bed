"""Forward code of the families of transformers' models, by ``model_type``."""

from phaze_fast.models.families import decoders, encoders
from phaze_fast.models.families.llama import Llama

FAMILIES: dict[str, type[Llama]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "arcee"), Llama),
    "qwen3": decoders.Qwen3,
    "gemma": decoders.Gemma,
    "gemma2": decoders.Gemma2,
    "gemma3_text": decoders.Gemma3,
    "phi3": decoders.Phi3,
    **dict.fromkeys(("olmo2", "olmo3"), decoders.Olmo2),
    "smollm3": decoders.SmolLM3,
    "starcoder2": decoders.Starcoder2,
    "granite": decoders.Granite,
    "olmo": decoders.Olmo,
    "helium": decoders.Helium,
    "glm": decoders.Glm,
    "glm4": decoders.Glm4,
    "seed_oss": decoders.SeedOss,
    "ernie4_5": decoders.Ernie,
    "exaone4": decoders.Exaone4,
    "phi": decoders.Phi,
    "cohere": decoders.Cohere,
    "cohere2": decoders.Cohere2,
    "stablelm": decoders.StableLm,
    "nemotron": decoders.Nemotron,
    "gpt_neox": decoders.GPTNeoX,
    "gpt2": decoders.GPT2,
    "opt": decoders.OPT,
    "bert": encoders.Bert,
    **dict.fromkeys(("roberta", "xlm-roberta"), encoders.Roberta),
    "megatron-bert": encoders.MegatronBert,
    **dict.fromkeys(("t5", "mt5"), encoders.T5),
}
