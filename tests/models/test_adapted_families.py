"""Adapters of configurations as profiles that run a module's own code see them, against traces."""

import pytest

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster
from phaze_fast.models import Lora
from phaze_fast.planning import PlanSpec, predict

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
nn = torch.nn
SEQ, RANK = 16, 4
SIZES = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 56, "vocab_size": 90, "num_hidden_layers": 4, "pad_token_id": 0,
    "max_position_embeddings": 48,
}  # fmt: skip


class Adapted(nn.Module):
    """A frozen linear layer and its adapter, with the names of PEFT's children."""

    def __init__(self, base):
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.lora_dropout = nn.Identity()
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x):
        out = nn.functional.linear(x, self.weight, self.bias)
        return out + self.lora_B(self.lora_A(self.lora_dropout(x))) * 2.0


def pair(kind, targets):
    """The graph of a configuration with adapters, and that of its module with adapters."""
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config).requires_grad_(False)
        for part in list(module.modules()):
            for name, child in list(part.named_children()):
                if name in targets and isinstance(child, nn.Linear):
                    setattr(part, name, Adapted(child))
    ids = torch.zeros((2, SEQ), dtype=torch.long)
    traced = models.from_torch(module, (ids,), {"labels": ids, "use_cache": False}, name=kind)
    model = models.from_hf({"model_type": kind, **SIZES}).replace(name=kind, seq=SEQ)
    return model.with_lora(Lora(rank=RANK, targets=targets)), traced


ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", ALL),
        ("llama", ("q_proj", "v_proj")),
        ("qwen2", ALL),  # frozen biases
        ("qwen3", ALL),
        ("gemma3_text", ALL),
        ("olmo2", ("o_proj",)),
        ("phi3", ("qkv_proj", "gate_up_proj")),
    ],
)
def test_adapters_of_a_configuration_are_those_of_its_module(kind, targets):
    model, traced = pair(kind, targets)
    built = models.expanded(model)
    assert built.trained_parameters() == traced.trained_parameters()
    for ours, theirs in zip(built.layers, traced.layers, strict=True):
        for part in ("forward", "backward", "saved"):
            for one, two in zip(getattr(ours, part), getattr(theirs, part), strict=True):
                assert one == two
    assert built == traced.replace(as_traced=True, notes=built.notes, compiled=None)
    alone = Cluster(devices=1, fabric="dgx-h100", chip="h200")
    spec = PlanSpec(global_batch=8, micro_batch=4, software="huggingface-eager")
    one, two = (predict(each, alone, spec) for each in (model, traced))
    assert (one.time_s, one.memory_bytes) == (two.time_s, two.memory_bytes)


def test_adapters_that_are_not_known_are_refused():
    gpt2 = models.load("gpt2-small").with_lora(Lora(rank=4))
    assert models.expanded(gpt2, 128).trained_parameters() == gpt2.trained_parameters()
    falcon = models.from_hf({"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 4})
    with pytest.raises(InvalidInputError, match="not all adapters of falcon are known"):
        models.expanded(falcon.with_lora(Lora(rank=4)), 128)
    packed = models.load("llama2-7b").with_lora(Lora(rank=4, bits=4))
    with pytest.raises(InvalidInputError, match="operators of 4-bit weights are not known"):
        models.expanded(packed, 128)
