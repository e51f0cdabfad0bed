"""Architectures beyond transformers: state-space, delta-net and recurrent layers, images and text."""

import pytest
from refusals import refusal

from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster, presets
from phaze_fast.models import from_torch
from phaze_fast.planning import Training, plan

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
nn = torch.nn
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
SEQ = 64
DECODER = {
    "hidden_size": 64,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
MAMBA = {"n_groups": 1, "chunk_size": 16}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def mamba2(transformers):
    sizes = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16}
    config = transformers.Mamba2Config(**sizes, num_hidden_layers=3, vocab_size=128, **MAMBA)
    return transformers.Mamba2ForCausalLM, config


def nemotron_h(transformers):
    heads = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "head_dim": 16}
    pattern = {"num_hidden_layers": 4, "hybrid_override_pattern": "M-M*"}
    config = transformers.NemotronHConfig(**DECODER, **heads, **MAMBA, **pattern)
    return transformers.NemotronHForCausalLM, config


def qwen3_next(transformers):
    config = transformers.Qwen3NextConfig(**DECODER, **DELTA, head_dim=16, num_hidden_layers=4)
    return transformers.Qwen3NextForCausalLM, config


def llava(transformers):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    images = {"image_size": 32, "patch_size": 8, "projection_dim": 32, "num_hidden_layers": 3}
    vision = transformers.CLIPVisionConfig(**sizes, **images)
    text = transformers.LlamaConfig(**DECODER, num_hidden_layers=3)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=99, image_seq_length=16
    )
    return transformers.LlavaForConditionalGeneration, config


def flops(operators):
    return sum(op.flops for op in operators)


@pytest.mark.parametrize("build", [mamba2, nemotron_h, qwen3_next, llava])
def test_hybrids_and_images_are_traced(build):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind, config = build(transformers)
    with torch.device("meta"):
        module = kind(config)
    ids = torch.zeros(2, SEQ, dtype=torch.long)
    kwargs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if build is llava:
        kwargs["pixel_values"] = torch.zeros(2, 3, 32, 32)
    graph = from_torch(module, (), kwargs)
    assert graph.parameters() == sum(p.numel() for p in module.parameters())
    assert graph.flops > 2.0 * SEQ * 64 * 128  # those of the logits alone
    kernels = graph.compiled
    assert kernels.parameters() == graph.parameters()
    assert kernels.flops == pytest.approx(graph.flops)
    if build is llava:  # an encoder and a decoder as one pipeline of uneven layers
        eight = Cluster(devices=8, fabric="dgx-h100", chip=presets.chip("h200"))
        found = plan(graph, eight, Training(global_batch=16, micro_batch=(1,), pp=(4,)))
        assert found.plans[0].pp == 4
    operators = [layer.count * len(layer.backward) for layer in graph.layers]
    assert sum(layer.count * len(layer.backward) for layer in kernels.layers) < sum(operators)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cells = kind(32, 48, batch_first=True, **options)

    def forward(self, x):
        return self.cells(x)[0].float().square().mean()


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_recurrent_layers_run_a_product_for_every_step(kind, gates):
    steps, width = 5, 48
    graph = from_torch(Recurrent(kind), (torch.zeros(2, steps, 32),))
    (layer,) = graph.layers
    of_input = (1, steps, 32, gates * width)
    assert graph.gemms() == [of_input, *[(1, 1, width, gates * width)] * steps]
    assert graph.parameters() == sum(p.numel() for p in Recurrent(kind).parameters())
    backward = [op for op in layer.backward if op.flops]
    whole = 2.0 * steps * width * gates * width
    weights = [op for op in backward if {op.m, op.n} == {gates * width, width} and op.k == steps]
    assert [op.flops for op in weights] == [whole]  # of all steps together
    assert flops(backward) == pytest.approx(2.0 * whole + 2.0 * steps * 32 * gates * width)


def test_both_directions_and_layers_of_an_lstm():
    module = Recurrent(nn.LSTM, num_layers=2, bidirectional=True)
    graph = from_torch(module, (torch.zeros(2, 3, 32),))
    assert graph.parameters() == sum(p.numel() for p in module.parameters())
    assert len(graph.gemms()) == 4 * (1 + 3)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == at)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return out


def test_a_loop_over_experts_is_refused_with_its_line_and_what_to_write():
    message = refusal(from_torch, Experts(), (torch.zeros(8, 16),), error=InvalidInputError)
    assert "test_torch_architectures.py:" in message
    assert "grouped_mm of rows sorted by expert" in message


def test_sizes_may_depend_on_constants():
    class Grid(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x):
            sides = torch.tensor([[2, 3]], device=x.device)
            ((high, wide),) = sides.tolist()
            places = torch.repeat_interleave(torch.arange(high, device=x.device), sides[0, :1])
            return self.inner(x[:, : high * wide]) + places.shape[0]

    (layer,) = from_torch(Grid(), (torch.zeros(2, 9, 8),)).layers
    assert next(op.m for op in layer.forward if op.kind == "gemm") == 6
