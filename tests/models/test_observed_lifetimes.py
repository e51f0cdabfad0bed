"""Lifetimes of tensors by rule, held against those that PyTorch was seen to have."""

import pytest

from phaze_fast.models.lifetimes import lifetimes

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
nn = torch.nn
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
KINDS = [
    "bert",
    "gpt2",
    "opt",
    "llama",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "gpt_neox",
    "starcoder2",
    "granite",
    "t5",
]


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.two(torch.relu(self.norm(self.one(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 4, stride=4)
        self.layers = nn.ModuleList(Residual(8) for _ in range(3))
        self.leave = nn.Linear(8, 10)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x.mean((2, 3)))


def hugging_face(kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    known = transformers.AutoConfig.for_model(kind).to_dict()
    fields = {name: 0.0 for name in known if "drop" in name and isinstance(known[name], float)}
    fields |= {name: value for name, value in SIZES.items() if name in known or kind != "t5"}
    fields |= {"pad_token_id": 0, "num_hidden_layers": 3, "decoder_start_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **fields)
    auto = {"bert": "MaskedLM", "t5": "Seq2SeqLM"}.get(kind, "CausalLM")
    with torch.device("meta"):
        module = getattr(transformers, f"AutoModelFor{auto}").from_config(config)
        ids = torch.zeros(2, 16, dtype=torch.long)
    use = {} if kind == "bert" else {"use_cache": False}
    return module, (), {"input_ids": ids, "labels": ids, **use}


def recorded(module, inputs, kwargs):
    from phaze_fast.models.torch_import import _replaced, _without_checks
    from phaze_fast.models.torch_recorder import record_step

    with _replaced(_without_checks(module)):
        return record_step("drawn", module.train(), inputs, kwargs)


def differences(recording):
    """Bytes of the lifetimes that end elsewhere than seen, in each pass, and all bytes of it."""
    first = next(at for at, call in enumerate(recording.calls) if call.backward)
    sums = {
        array.storage
        for call in recording.calls
        if call.backward and call.name == "add"
        for array in (*call.reads, *call.writes)
    }  # in place without a recorder
    wrong, seen, last = [0, 0], [0, 0], len(recording.calls) - 1
    for one in lifetimes(recording, recording):
        freed = min(recording.freed.get(one.storage, last + 1) - 1, last)
        late = freed >= first
        if one.storage in sums or one.born < 0 or one.sizes[0] <= 8:  # the caller holds the loss
            continue
        if one.storage < 0:  # inside of an operator: not seen
            continue
        seen[late] += one.sizes[0]
        wrong[late] += one.sizes[0] * (min(one.dies, last) != freed)
        assert late or one.dies <= freed  # the rule holds no tensor longer than PyTorch does
    return wrong, seen


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_transformers_are_freed_when_the_rule_says(kind):
    """In the backward pass all; in the forward pass, local variables hold some of them longer."""
    wrong, seen = differences(recorded(*hugging_face(kind)))
    assert seen[True] > seen[False] > 0
    assert wrong[True] == 0


def test_tensors_of_convolutional_networks_are_freed_when_the_rule_says():
    with torch.device("meta"):
        module, images = Net(), torch.zeros(2, 3, 32, 32)
    wrong, seen = differences(recorded(module, (images,), {}))
    assert wrong == [0, 0]
    assert seen[True] > 0
