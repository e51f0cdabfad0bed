"""PyTorch modules read through torch.export, held against the builder from configurations."""

from collections import Counter
from functools import cache

import pytest

from phaze_fast import models, opgraph
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.models.traced import TRACED_KINDS
from phaze_fast.opgraph import UNITS, Strategy

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
nn = torch.nn

BATCH, SEQ = 2, 16
LAYERS = 3
SMALL = {
    "bert": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 96},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_positions": 64},
    "opt": {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 96},
    "llama": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    },
    "qwen2": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "t5": {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 96, "num_layers": LAYERS},
}
HEADS = {
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
CONTAINERS = {
    "bert": "bert.encoder.layer",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "llama": "model.layers",
    "qwen2": "model.layers",
}


def hugging(kind, attention):
    """A module of random weights, and its configuration as from_hf reads it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    fields = {"vocab_size": 100, **SMALL[kind]}
    if kind == "opt":
        fields["word_embed_proj_dim"] = fields["hidden_size"]
    if kind not in ("gpt2", "t5"):
        fields["max_position_embeddings"] = 64
    if kind != "t5":
        fields["n_layer" if kind == "gpt2" else "num_hidden_layers"] = LAYERS
    config = transformers.AutoConfig.for_model(
        kind, **fields, bos_token_id=None, eos_token_id=None, attn_implementation=attention
    )
    module = getattr(transformers, HEADS[kind])(config)
    assert module.config._attn_implementation == attention
    return module, config.to_dict()


@cache
def traced_hugging(kind, attention):
    module, config = hugging(kind, attention)
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    kwargs = {} if kind == "bert" else {"use_cache": False}
    if kind == "t5":
        kwargs["decoder_input_ids"] = ids
    traced = models.from_torch(module, (ids,), kwargs)
    model = models.from_hf(config)
    unique = sum(part.numel() for part in module.parameters())
    return traced, model.replace(attention="flash" if attention == "sdpa" else "eager"), unique


def products(graph):
    """(Kind, b, m, k, n) of the products and attentions of a forward graph."""
    names = [opgraph.KINDS[kind] for kind in graph.ops["kind"]]
    wanted = {"gemm", "batched-gemm", "attention"}
    return Counter(
        (name, *(int(op[d]) for d in "bmkn"))
        for name, op in zip(names, graph.ops, strict=True)
        if name in wanted
    )


def total(layers):
    found = Counter()
    for count, graph in layers:
        for product, times in products(graph).items():
            found[product] += count * times
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", SMALL)
def test_a_module_has_the_products_of_its_configuration(kind, attention):
    traced, model, unique = traced_hugging(kind, attention)
    built = opgraph.layer_graph(model, Strategy(microbatch=BATCH, seq=SEQ))
    expected = total((layer.count, layer.forward) for layer in built.layers)
    graphs = opgraph.from_traced(traced)
    counts = [layer.count for layer in traced.layers]
    assert total(zip(counts, graphs, strict=True)) == expected
    assert Counter(traced.gemms()) == Counter(
        {p[1:]: times for p, times in expected.items() if p[0] != "attention"}
    )
    assert any(p[0] == "attention" for p in expected) == (attention == "sdpa")
    flops = sum(layer.count * layer.forward.flops for layer in built.layers)
    assert traced.flops == flops
    assert sum(c * g.flops for c, g in zip(counts, graphs, strict=True)) == flops
    assert traced.parameters == unique == model.parameters()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_layers_are_found_by_repetition(kind, attention):
    traced, model, _ = traced_hugging(kind, attention)
    assert [(layer.name, layer.count) for layer in traced.layers] == [
        ("before", 1),
        (f"{CONTAINERS[kind]}.0", LAYERS),
        ("after", 1),
    ]
    assert traced.order == (0, *[1] * LAYERS, 2)
    assert traced.is_chain
    assert len(traced.order) == len(
        opgraph.layer_graph(model, Strategy(microbatch=BATCH, seq=SEQ)).order
    )
    for layer in traced.layers:
        assert len({op.name for op in layer.ops}) == len(layer.ops)
        assert {op.kind for op in layer.ops} <= set(TRACED_KINDS)
        assert all(i < at for at, op in enumerate(layer.ops) for i in op.inputs)


def test_weights_of_the_layers_are_the_parameters():
    """Of a model that ties nothing, every parameter is read by one operator."""
    traced, model, _ = traced_hugging("llama", "sdpa")
    read = sum(layer.count * op.weight_elements for layer in traced.layers for op in layer.ops)
    assert read == model.parameters()


def test_norms_and_activations_are_single_operators():
    kinds = {}
    for kind in ("llama", "gpt2"):
        traced, _, _ = traced_hugging(kind, "sdpa")
        kinds[kind] = Counter(op.kind for op in traced.layers[1].ops)
    assert (kinds["llama"]["norm"], kinds["llama"]["activation"]) == (2, 1)
    assert kinds["gpt2"] == Counter(norm=2, gemm=4, attention=1, activation=1, elementwise=2)


def test_an_encoder_and_a_decoder_are_no_chain():
    traced, _, _ = traced_hugging("t5", "sdpa")
    assert [(layer.name, layer.count) for layer in traced.layers] == [
        ("before", 1),
        ("encoder.block.0", 1),  # makes the relative bias of all
        ("encoder.block.1", LAYERS - 1),
        ("between", 1),
        ("decoder.block.0", 1),
        ("decoder.block.1", LAYERS - 1),
        ("after", 1),
    ]
    assert not traced.is_chain
    memory = 1 + LAYERS
    for decoder in range(memory + 1, memory + 1 + LAYERS):
        assert (memory, decoder) in traced.edges
    assert (1, LAYERS) in traced.edges  # the relative bias


def test_no_weight_is_read_and_the_module_is_left_as_it_was():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 4))
        x = torch.zeros(3, 5, 8)
    module[2].eval()
    traced = models.from_torch(module, [x])
    assert traced.gemms() == [(1, 15, 8, 8), (1, 15, 8, 4)]
    assert module.training
    assert not module[2].training
    assert traced.parameters == 8 * 8 + 8 + 8 * 4 + 4


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.left = nn.Linear(8, 16)
        self.right = nn.Linear(8, 16, bias=False)
        self.leave = nn.Linear(16, 4)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(torch.relu(self.left(x)) * self.right(x).view(-1, 16))


def test_branches_survive_in_one_layer():
    traced = models.from_torch(Branches(), (torch.zeros(6, 8),))
    (layer,) = traced.layers
    assert (layer.name, layer.count, traced.order, traced.edges) == ("Branches", 1, (0,), ())
    assert [(op.name, op.kind, op.inputs) for op in layer.ops] == [
        ("enter.linear", "gemm", (-1,)),
        ("left.linear", "gemm", (0,)),
        ("relu", "activation", (1,)),
        ("right.linear", "gemm", (0,)),
        ("mul", "elementwise", (2, 3)),
        ("leave.linear", "gemm", (4,)),
    ]
    (graph,) = opgraph.from_traced(traced)
    assert graph.edges() == [(0, 1), (0, 3), (1, 2), (2, 4), (3, 4), (4, 5)]
    units = ["TC+VC", "TC+VC", "VC", "TC", "VC", "TC+VC"]
    assert [UNITS[unit] for unit in graph.ops["unit"]] == units


class Towers(nn.Module):
    """Two stacks over one input that join."""

    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
        self.right = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.enter, self.leave = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = y = self.enter(x)
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y)
        return self.leave(x + y)


def test_branches_survive_between_layers():
    traced = models.from_torch(Towers(), (torch.zeros(6, 8),))
    assert traced.order == (0, 1, 1, 1, 1, 2)  # ReLU and tanh are both activations
    assert traced.layers[1].count == 4
    assert traced.edges == ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5))
    assert not traced.is_chain


class Odd(nn.Module):
    """What a careless walk would get wrong, one thing after the other."""

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)
        self.shared = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
        self.weight = nn.Parameter(torch.zeros(8, 8))
        self.register_buffer("frequencies", torch.ones(4))

    def forward(self, x, ids):
        x = self.act(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.shared[0](x)
        x = self.shared[0](x)
        y = torch.zeros_like(x) + x
        y.view(-1).add_(1.0)
        angles = torch.outer(ids.float(), self.frequencies)[:, :, None] @ torch.ones(1, 2)
        one_hot = nn.functional.one_hot(ids, 8).float() @ self.weight
        turned = self.weight @ y.t()
        doubled = y @ (2 * self.weight)
        return one_hot + y * angles.flatten(1).cos(), turned, doubled


def test_odd_things_are_seen_for_what_they_are():
    ids = torch.zeros(6, dtype=torch.long)
    traced = models.from_torch(Odd(), (torch.zeros(6, 8),), {"ids": ids})
    assert [(layer.name, layer.count) for layer in traced.layers] == [
        ("before", 1),
        ("shared.0", 2),
        ("after", 1),
    ]
    assert [(op.name, op.kind, op.inputs) for op in traced.layers[1].ops] == [
        ("0.linear", "gemm", (-1,)),
        ("1.tanh", "activation", (0,)),
    ]
    assert [(op.name, op.kind, op.inputs) for op in traced.layers[2].ops] == [
        ("add", "elementwise", (-1,)),
        ("add-2", "elementwise", (0,)),  # written in place, through a view
        ("matmul", "gemm", (-1,)),  # one-hot rows times weights
        ("matmul-2", "gemm", (1,)),  # weights on the left
        ("mul", "elementwise", (-1,)),
        ("matmul-3", "gemm", (1, 4)),
        ("mul-2", "elementwise", (1,)),  # the angles are constants
        ("add-3", "elementwise", (2, 6)),
    ]
    assert traced.gemms() == [(1, 6, 8, 8)] * 5


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        x = self.inner(x)
        y = x.clone()
        y[:, :2] = torch.tanh(x[:, 2:4])
        return y.mul_(2) + x


def test_what_is_written_in_place_is_read_afterwards_and_a_copy_stands_apart():
    (layer,) = models.from_torch(Writes(), (torch.zeros(6, 8),)).layers
    assert [(op.name, op.inputs) for op in layer.ops] == [
        ("inner.linear", (-1,)),
        ("tanh", (0,)),
        ("copy", (0, 1)),
        ("mul", (2,)),
        ("add", (3, 0)),
    ]


class Attends(nn.Module):
    def forward(self, q, k, v, mask):
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def test_attention_across_sequences_with_shared_heads():
    q, k, v = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 16)
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    traced = models.from_torch(Attends(), (q, k, v, mask))
    (op,) = traced.layers[0].ops
    assert (op.kind, op.b, op.m, op.k, op.n) == ("attention", 8, 5, 8, 7)
    assert op.flops == 2 * 8 * 5 * 7 * (8 + 16)
    assert op.elements == 8 * 5 * 16
    (graph,) = opgraph.from_traced(traced)
    assert UNITS[graph.ops["unit"][0]] == "TC+VC"


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self.inner(x))


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (
            lambda x: torch.fft.fft(x).real,
            "Calls: aten.fft_fft.default (node fft_fft) is not modelled; it is known neither",
        ),
        (
            lambda x: nn.functional.dropout(x, 0.5, training=True),
            "aten.dropout.default (node dropout) is not modelled; dropout is accepted outside",
        ),
        (lambda x: x.topk(2).values, "aten.topk.default (node topk)"),
        (lambda x: x[x > 0] * 2, "depends on data"),
        (lambda x: x if x.sum() > 0 else -x, "Calls: torch.export cannot follow it: "),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(function, line):
    with pytest.raises(InvalidInputError) as caught:
        models.from_torch(Calls(function), (torch.zeros(6, 8),))
    assert line in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_arguments_of_the_wrong_type():
    with pytest.raises(InvalidTypeError, match="module: int is not accepted"):
        models.from_torch(3, ())
    with pytest.raises(InvalidTypeError, match="example_inputs: Tensor is not accepted"):
        models.from_torch(nn.Linear(8, 8), torch.zeros(6, 8))
