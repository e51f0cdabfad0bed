"""Traced modules of which only some parameters are trained, and adapters written by hand."""

import pytest

from phaze_fast import models
from phaze_fast.hardware import Cluster
from phaze_fast.models import Lora, from_torch, model_flops, why_not_recognised
from phaze_fast.opgraph import layer_graph
from phaze_fast.planning import PlanSpec, predict

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
nn = torch.nn
HIDDEN, FFN, RANK, LAYERS, SEQ = 32, 96, 4, 4, 16
ALONE = Cluster(devices=1, fabric="dgx-h100", chip="h100")


class Adapted(nn.Module):
    """A frozen linear layer and an adapter, as PEFT writes it."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * 2.0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, FFN)
        self.down = nn.Linear(FFN, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.leave = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def traced(module):
    return from_torch(module, (torch.zeros(2, SEQ, HIDDEN),))


def adapted_stack():
    module = Stack().requires_grad_(False)
    for block in module.layers:
        block.up, block.down = Adapted(block.up, RANK), Adapted(block.down, RANK)
    return module


def names_of(layer):
    return {op.name for op in layer.backward if op.flops}


def test_trained_parameters_are_those_that_require_gradients():
    module = adapted_stack()
    graph = traced(module)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert graph.trained_parameters() == trained == LAYERS * 2 * RANK * (HIDDEN + FFN)
    assert graph.parameters() == sum(p.numel() for p in module.parameters())
    layers = layer_graph(graph).layers
    assert sum(x.count * (x.device_parameters - x.frozen_parameters) for x in layers) == trained


def test_gradients_are_those_that_autograd_computes():
    """The first block has no gradient of its input, no block one of a frozen weight."""
    graph = traced(adapted_stack())
    by_name = {layer.name: layer for layer in graph.layers}
    assert not by_name["embedding"].backward
    assert [by_name[f"layers.{k}"].count for k in (0, 1)] == [1, LAYERS - 1]
    every = {
        f"d-{part}.{half}.mm-{end}" for part in ("up", "down") for half in "ab" for end in "xw"
    }
    first, other = (names_of(by_name[f"layers.{k}"]) for k in (0, 1))
    assert other == every | {"d-up.base.addmm-x", "d-down.base.addmm-x"}
    assert other - first == {"d-up.a.mm-x", "d-up.base.addmm-x"}
    assert names_of(by_name["head"]) == {"d-leave.addmm-x"}


def test_gradients_belong_to_the_operators_that_have_them():
    """A frozen product after a trained one has no node of its own in autograd's graph."""

    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.trained = nn.Linear(HIDDEN, FFN, bias=False)
            self.frozen = nn.Linear(HIDDEN, FFN, bias=False).requires_grad_(False)

        def forward(self, x):
            first = self.trained(x)
            return first * self.frozen(x)

    (layer,) = traced(Crossed()).layers
    product = next(op for op in layer.backward if op.kind == "gemm-weight-gradient")
    assert layer.forward[product.forward].name == "trained.mm"
    assert [op.frozen for op in layer.forward if op.weights] == [0, HIDDEN * FFN]


def test_frozen_modules_are_planned_as_traced_by_every_profile():
    whole, frozen = traced(Stack()), traced(adapted_stack())
    assert "frozen" in why_not_recognised(frozen)
    for software in ("megatron-core", "pytorch-eager"):
        spec = PlanSpec(global_batch=4, micro_batch=4, software=software, optimizer="adam-bf16")
        terms = predict(frozen, ALONE, spec).memory
        assert terms["optimizer"] == 4.0 * frozen.trained_parameters()
        assert terms["weights"] == 2.0 * frozen.parameters()
        assert terms["gradients"] <= 2.0 * frozen.trained_parameters()
        assert predict(whole, ALONE, spec).memory["optimizer"] == 4.0 * whole.parameters()


def test_flops_count_the_gradients_that_are_computed():
    graph = traced(adapted_stack())
    computed = sum(
        layer.count * op.flops
        for layer in graph.layers
        for op in (*layer.forward, *layer.backward)
        if "gemm" in op.kind
    )
    assert model_flops(graph).weights == pytest.approx(computed)


def test_adapters_of_a_configuration_are_those_of_a_traced_module():
    """Llama: the same trained parameters, and the same products in every block but the first."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 100}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=64)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config).requires_grad_(False)
        for block in module.model.layers:
            attention, ffn = block.self_attn, block.mlp
            for part, names in ((attention, "q k v o"), (ffn, "up gate down")):
                for name in names.split():
                    setattr(part, f"{name}_proj", Adapted(getattr(part, f"{name}_proj"), RANK))
    ids = torch.zeros((2, SEQ), dtype=torch.long)
    graph = from_torch(module, (ids,), {"labels": ids, "use_cache": False})
    fields = {"model_type": "llama", "max_position_embeddings": 64, **sizes}
    model = models.from_hf(fields).replace(seq=SEQ).with_lora(Lora(rank=RANK))
    assert model.trained_parameters() == graph.trained_parameters()
    assert model.parameters() == graph.parameters()

    usual = next(layer for layer in graph.layers if layer.name == "model.layers.1")
    block = layer_graph(model).layers[1]
    for own, other in ((usual.forward, block.forward), (usual.backward, block.backward)):
        flops = sum(op.flops for op in own if op.kind.startswith("gemm"))
        mine = [
            op for op, name in zip(other.ops, other.names, strict=True) if "attention" not in name
        ]
        assert flops == pytest.approx(sum(float(op["flops"]) for op in mine))
