"""ResNet, ConvNeXt, Swin, a diffusion U-Net, DiT and ViT: traced, predicted, planned, searched."""

from pathlib import Path

import pytest
from refusals import refusal

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster, presets
from phaze_fast.planning import Training, plan, predict

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
nn = torch.nn
vision_modules = pytest.importorskip("vision_modules")

MODELS = ("resnet", "convnext", "swin", "vit", "dit", "unet")
SPACE = Path(__file__).parents[2] / "examples" / "small_space.yaml"


def traced(name, last=False):
    module, inputs = vision_modules.module_and_inputs(name)
    if last:
        module = module.to(memory_format=torch.channels_last)
        inputs = (inputs[0].to(memory_format=torch.channels_last), *inputs[1:])
    return module, models.from_torch(module, inputs, name=name)


@pytest.mark.parametrize("name", MODELS)
def test_vision_models_are_traced_predicted_planned_and_searched(name):
    module, graph = traced(name)
    assert graph.parameters() == sum(part.numel() for part in module.parameters())
    assert max(layer.count for layer in graph.layers) > 1 or len(graph.layers) > 4  # not one layer
    one = predict(
        graph,
        Cluster(devices=1, fabric="dgx-h100", chip=presets.chip("h200")),
        {"global_batch": 4, "micro_batch": 4, "software": "pytorch-eager"},
    )
    assert one.time_s > 0.0
    eight = Cluster(devices=8, fabric="dgx-h100", chip=presets.chip("h200"))
    best = plan(graph, eight, Training(global_batch=16, micro_batch=(1, 2)))
    assert best.plans[0].time_s > 0.0
    step = Training(global_batch=8, micro_batch=(1,), tp=(1,), pp=(1,))
    found = pf.search(graph, str(SPACE), Cluster(devices=4, fabric="dgx-h100"), step)
    assert found.best.time_s > 0.0


@pytest.mark.parametrize("last", [False, True])
def test_the_layout_of_images_reaches_every_convolution(last):
    _, graph = traced("resnet", last)
    functions = {op.function for layer in graph.layers for op in layer.forward}
    assert ("batchnorm" in functions) == last
    assert any(name.endswith("-nchw") for name in functions) != last
    backward = {op.function for layer in graph.layers for op in layer.backward}
    assert any(name.endswith("-nchw") for name in backward) != last


def test_pytorchs_multi_head_attention_is_one_operator():
    _, graph = traced("vit")
    block = next(layer for layer in graph.layers if layer.count == 3)
    kinds = [op.kind for op in block.forward]
    assert kinds.count("attention") == 1
    assert "softmax" not in kinds
    assert [op.kind for op in block.backward].count("attention-backward") == 1


def test_a_stage_of_layers_is_no_layer():
    _, graph = traced("swin")
    assert [layer.name for layer in graph.layers][1:3] == ["stages.0.0", "stages.0.1"]


class Broadcasts(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(6, 1))

    def forward(self, x):
        same = x * x
        spread = x * self.scale
        turned = x.transpose(1, 2).contiguous()
        part = x[:, :, :2] + x[:, :, 2:4]
        return same.sum() + spread.sum() + turned.sum() + part.sum()


def test_element_wise_kernels_know_the_layout_of_their_arrays():
    graph = models.from_torch(Broadcasts(), (torch.zeros(2, 6, 8),))
    functions = [op.function for op in graph.layers[0].forward]
    assert functions[:4] == ["multiply", "strided", "transpose", "strided"]


def test_a_bias_of_a_convolution_is_added_and_its_gradient_summed():
    graph = models.from_torch(nn.Conv2d(8, 8, 3), (torch.zeros(2, 8, 6, 6),))
    (layer,) = graph.layers
    assert [op.name for op in layer.forward] == ["convolution", "add"]
    backward = [(op.name, op.forward) for op in layer.backward]
    assert backward == [("d-convolution-w", 0), ("d-convolution.sum", 0)]


def test_kernels_that_need_contiguous_arrays_copy_others_first():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def forward(self, x):
            return self.norm(x.transpose(1, 2))

    (layer,) = models.from_torch(Turned(), (torch.zeros(2, 6, 8),)).layers
    assert [op.name for op in layer.forward] == ["norm.clone", "norm.native_layer_norm"]


def test_a_number_changed_in_place_may_change_its_shape_alone():
    class Restrided(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x):
            return self.up(x).mul(2.0).squeeze_().unsqueeze_(0).sum()

    (layer,) = models.from_torch(Restrided(), (torch.zeros(2, 8),)).layers
    assert not {"squeeze", "unsqueeze"} & {op.name for op in layer.forward}


def test_unknown_operators_are_named_with_their_line_and_what_to_do():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x):
            return torch.fft.fft(self.up(x).float()).real.sum()

    message = refusal(models.from_torch, Spectrum(), (torch.zeros(2, 8),), error=InvalidInputError)
    assert "_fft" in message
    assert "test_vision.py:" in message
    assert "docs/graphs.md" in message
