"""PyTorch modules written by hand: what is recorded of them, recognised, planned and refused."""

from collections import Counter

import pytest
from refusals import refusal

from phaze_fast import models, opgraph
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Cluster, presets
from phaze_fast.opgraph import Strategy
from phaze_fast.planning import Training, plan

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
nn = torch.nn
Decoder = pytest.importorskip("decoder_modules").Decoder
# transformers compiles parts of a few models in a way that PyTorch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


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
    assert [(op.name, op.kind, op.inputs, op.split) for op in layer.forward] == [
        ("enter.addmm", "gemm", (-1,), "no"),
        ("left.addmm", "gemm", (0,), "columns"),
        ("relu", "activation", (1,), "inside"),
        ("right.mm", "gemm", (0,), "columns"),
        ("mul", "multiply", (2, 3), "inside"),
        ("leave.addmm", "gemm", (4,), "rows"),
    ]
    kinds = Counter(op.kind for op in layer.backward)
    # The input needs no gradient, so the first product has that of its weights alone.
    assert (kinds["gemm-weight-gradient"], kinds["gemm-input-gradient"]) == (4, 3)
    assert traced.parameters() == sum(p.numel() for p in Branches().parameters())


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
    assert traced.order == (0, 1, 2, 1, 2, 3)
    assert traced.edges == ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5))
    assert not traced.is_chain


def test_no_weight_is_read_and_the_module_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    before = [part.clone() for part in module.parameters()]
    traced = models.from_torch(module, [torch.zeros(3, 5, 8)])
    assert traced.gemms() == [(1, 5, 8, 8), (1, 5, 8, 4)]
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(part.grad is None and not part.is_meta for part in module.parameters())


class Convolves(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.channels = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.line = nn.Conv1d(8, 6, 5, padding=2)

    def forward(self, x):
        x = self.channels(torch.relu(self.norm(self.plain(x))))
        return self.line(x.flatten(2))


def test_convolutions_are_the_products_they_compute():
    (layer,) = models.from_torch(Convolves(), (torch.zeros(2, 4, 16, 16),)).layers
    ops = {op.name: op for op in layer.forward}
    plain, line = ops["plain.convolution"], ops["line.convolution"]
    assert (plain.kind, plain.b, plain.m, plain.k, plain.n) == ("gemm", 1, 64, 36, 8)
    assert (line.b, line.m, line.k, line.n) == (1, 64, 40, 6)
    assert ops["channels.convolution"].kind == "multiply"
    assert ops["channels.convolution"].flops == 2 * 8 * 64 * 9
    backward = [op for op in layer.backward if op.forward == layer.forward.index(line)]
    products = {op.kind: op.flops for op in backward if op.flops}
    assert products == {"gemm-input-gradient": line.flops, "gemm-weight-gradient": line.flops}


def test_recomputed_regions_run_again_in_the_backward_pass():
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    class Once(Twice):
        def forward(self, x):
            return self.inner(x)

    x = torch.zeros(2, 8, requires_grad=True)
    (again,), (kept,) = (models.from_torch(m(), (x,)).layers for m in (Twice, Once))
    assert len(again.backward) > len(kept.backward)
    assert sum(t.bytes for t in again.saved) < sum(t.bytes for t in kept.saved)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x  # kept, and no hook sees it
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def overwritten(x):
    y = torch.sigmoid(x)
    y.data.mul_(2)
    return y


def dropped(x):
    return x if torch.rand([]) < 0.1 else 2 * torch.relu(x)


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
        (lambda x: torch.fft.fft(x.float()).real, "Calls: aten._fft_r2c (test_torch_modules.py:"),
        (lambda x: x[x > 0] * 2, "shapes alone: sizes or values that depend on data, such as"),
        (lambda x: x if x.sum() > 0 else -x, "control flow, or a number, that depends on data"),
        (lambda x: Doubled.apply(x), "Doubled (test_torch_modules.py:"),
        (overwritten, "aten.mul_ (test_torch_modules.py:"),
        (dropped, "control flow that depends on chance (test_torch_modules.py:"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(function, line):
    inputs = (torch.zeros(6, 8),)
    message = refusal(models.from_torch, Calls(function), inputs, error=InvalidInputError)
    assert line in message
    assert "test_torch_modules.py:" in message


def test_loops_without_end_are_refused(monkeypatch):
    from phaze_fast.models import torch_recorder

    def over_tokens(x):
        for _ in range(50):
            x = torch.relu(x) * 2
        return x

    monkeypatch.setattr(torch_recorder, "_MOST_CALLS", 60)
    message = refusal(models.from_torch, Calls(over_tokens), (torch.zeros(6, 8),))
    assert "runs more than 60 operators (test_torch_modules.py:" in message


def test_a_transformer_by_hand_is_recognised_and_others_are_not():
    def traced(module, **options):
        return models.from_torch(module, (torch.zeros(2, 16, dtype=torch.long),), **options)

    plain = Decoder()
    known = models.recognised(traced(plain))
    assert known is not None
    assert (known.layers, known.hidden, known.heads, known.ffn) == (3, 64, 4, 256)
    assert (known.causal, known.fused_qkv, known.final_norm) == (True, False, True)
    gated = models.recognised(traced(Decoder(gated=True)))
    assert (gated.norm, gated.gated, gated.activation) == ("rmsnorm", True, "silu")
    assert models.recognised(traced(plain, dtype="float32")) is None
    for extra in (lambda x: x.cumsum(1), lambda x: x + torch.softmax(x, -1), nn.Linear(64, 64)):
        other = traced(Decoder(extra=extra))
        assert models.recognised(other) is None
        assert models.why_not_recognised(other)
    plain.layers[0].up.weight.requires_grad = False
    assert "gradients" in models.why_not_recognised(traced(plain))


def test_windows_are_read_off_masks():
    seen = torch.ones(16, 16, dtype=torch.bool).tril().triu(-3)

    class Windowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            mask = torch.ones(16, 16, dtype=torch.bool, device=x.device).tril().triu(-3)
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    (layer,) = models.from_torch(Windowed(), (torch.zeros(2, 16, 8),)).layers
    attention = next(op for op in layer.forward if op.kind == "attention")
    assert attention.window == 4
    assert attention.flops == 2 * 16 * seen.numel()  # masked scores are computed too
    assert [tensor.bytes for tensor in layer.saved].count(2 * seen.numel()) == 0
    assert 2 * seen.numel() in [tensor.fixed_bytes for tensor in layer.saved]


def test_arguments_of_the_wrong_type():
    said = refusal(models.from_torch, 3, (), error=InvalidTypeError)
    assert said.startswith("module: int is not accepted")
    said = refusal(models.from_torch, nn.Linear(8, 8), torch.zeros(6, 8), error=InvalidTypeError)
    assert said.startswith("example_inputs: Tensor is not accepted")


@pytest.mark.parametrize("module", [Towers, Branches, Convolves])
def test_modules_by_hand_are_planned(module):
    shape = (2, 4, 16, 16) if module is Convolves else (2, 8)
    traced = models.from_torch(module(), (torch.zeros(shape),))
    cluster = Cluster(devices=64, chip=presets.chip("h100"), fabric=presets.fabric("dgx-h100"))
    found = plan(traced, cluster, Training(global_batch=256, micro_batch=4), top=1)
    assert found.plans[0].time_s > 0
    assert opgraph.reasons(traced, Strategy(cp=2))


class Biased(nn.Module):
    """Attention with a trained bias, whose keys lie together or not."""

    def __init__(self, together):
        super().__init__()
        self.table = nn.Parameter(torch.zeros((2, 8, 8) if together else (8, 8, 2)))
        self.together = together

    def forward(self, q, k, v):
        bias = self.table if self.together else self.table.permute(2, 0, 1)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _heads():
    return tuple(torch.zeros(2, 2, 8, 4) for _ in range(3))


def test_a_bias_whose_keys_do_not_lie_together_is_not_fused():
    """The operators are those that PyTorch itself runs in place of a fused kernel."""
    from torch.utils._python_dispatch import TorchDispatchMode

    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if not func.is_view and not func.__name__.startswith("detach"):
                names.append(func.overloadpacket.__name__.strip("_"))
            return out

    heads = [x.to("meta").bfloat16().requires_grad_() for x in _heads()]
    bias = torch.zeros(8, 8, 2, device="meta").bfloat16().requires_grad_().permute(2, 0, 1)
    with Names():
        torch.ops.aten._scaled_dot_product_attention_math(*heads, bias)
    traced = models.from_torch(Biased(False), _heads(), dtype="bfloat16")
    (layer,) = traced.layers
    ours = [op.name.rpartition("-")[0] or op.name for op in layer.forward]
    wanted = [name for name in names if name not in ("unsafe_view", "safe_softmax")]
    parts = ("softmax", "isneginf", "all", "where")
    assert [name.strip("_") for name in ours if name.strip("_") not in parts] == wanted
    assert {op.function for op in layer.forward if op.kind == "batched-gemm"} == {models.WIDE}
    assert layer.parameters == 2 * 8 * 8


def test_the_gradient_of_a_fused_bias_is_summed_over_samples():
    traced = models.from_torch(Biased(True), _heads(), dtype="bfloat16")
    (layer,) = traced.layers
    assert [op.kind for op in layer.forward] == ["attention"]
    attention, total = layer.backward
    assert attention.write_bytes >= 2.0 * 2 * 8 * 8  # of one sample
    assert (total.name, total.fixed_write_bytes) == ("d-attention.sum", 2.0 * 2 * 8 * 8)
