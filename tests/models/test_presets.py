"""Presets of current models: parameters as transformers counts them, names that are misspelt."""

import json
from importlib.resources import files

import pytest
from case_counts import slow_ones
from golden_files import refused_calls

from phaze_fast import models
from phaze_fast.errors import InvalidInputError

CONFIGURATIONS = files("phaze_fast.models") / "data/hf"
QUICK = ("qwen3-0.6b", "gemma3-1b", "olmo2-1b", "gpt-oss-20b")
NEW = (
    *QUICK, "deepseek-v2-lite", "deepseek-v3", "kimi-k2", "qwen3-1.7b", "qwen3-4b", "qwen3-8b",
    "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "gemma3-4b",
    "gemma3-12b", "gemma3-27b", "glm-4.5-air", "glm-4.5", "olmo2-7b", "olmo2-13b", "olmo2-32b",
)  # fmt: skip
LLAMA_4 = {
    "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "num_experts_per_tok": 1, "vocab_size": 202048,
}  # fmt: skip


def counted(name, config):
    torch = pytest.importorskip("torch", reason="the extra torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    known = {key: value for key, value in config.items() if key != "architectures"}
    read = transformers.AutoConfig.for_model(**known)
    with torch.device("meta"):
        module = getattr(transformers, name)(read)
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", slow_ones(NEW, *(name for name in NEW if name not in QUICK)))
def test_parameters_are_those_that_transformers_counts(name):
    config = json.loads((CONFIGURATIONS / f"{name}.json").read_text("utf-8"))
    assert models.load(name).parameters() == counted(config["architectures"][0], config)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "experts", "step"), [("scout", 16, 1), ("maverick", 128, 2)])
def test_parameters_of_llama_4(name, experts, step):
    config = {"model_type": "llama4_text", "num_local_experts": experts, **LLAMA_4}
    found = counted("Llama4ForCausalLM", {**config, "interleave_moe_layer_step": step})
    assert models.load(f"llama4-{name}").parameters() == found


@pytest.mark.parametrize(("typed", "meant"), refused_calls("misspelt models"))
def test_misspelt_names_are_found(typed, meant):
    with pytest.raises(InvalidInputError, match=f"did you mean '{meant}'"):
        models.load(typed)
