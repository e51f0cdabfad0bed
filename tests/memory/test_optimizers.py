"""Bytes of optimiser state: held against PyTorch's own optimisers, and by hand."""

import pytest

from phaze_fast import models
from phaze_fast.hardware import Cluster
from phaze_fast.memory import OPTIMIZERS, footprint
from phaze_fast.opgraph import layer_graph
from phaze_fast.planning import PlanSpec, predict

MODEL = models.TransformerModel(
    name="small", layers=3, hidden=64, heads=4, ffn=256, vocab=1000, seq=32, positions="rotary",
    norm="rmsnorm", qkv_bias=False, out_bias=False, ffn_bias=False, tied_embeddings=False,
)  # fmt: skip
MATRICES = 4 * [(64, 64)] + [(64, 256), (256, 64)]
TABLES = [(1000, 64), (1000, 64)]
VECTORS = 3 * [(64, 2)] + [(64, 1)]  # width, norms


def state_bytes(name):
    return footprint(layer_graph(MODEL), optimizer_name=name).terms["optimizer"]


def tensors(torch):
    """The model's parameters in bf16: matrices of blocks, tables, vectors."""

    def made(shape):
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        parameter.grad = torch.ones_like(parameter)
        return parameter

    vectors = [made((width,)) for width, count in VECTORS for _ in range(count)]
    return [made(s) for s in 3 * MATRICES], [made(s) for s in TABLES], vectors


def kept_bytes(optimizer):
    """Bytes of the state of an optimiser after a step; counts of steps are left out."""
    optimizer.step()
    return sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if hasattr(value, "numel") and name != "step"
    )


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("adam-bf16", "AdamW", {}),
        ("sgd-momentum-bf16", "SGD", {"momentum": 0.9}),
        ("sgd-bf16", "SGD", {}),
        ("adafactor-bf16", "Adafactor", {}),
    ],
)
def test_state_is_that_of_pytorch(name, kind, options):
    torch = pytest.importorskip("torch", reason="the extra torch is not installed")
    every = [tensor for group in tensors(torch) for tensor in group]
    kept = kept_bytes(getattr(torch.optim, kind)(every, lr=1e-3, **options))
    assert state_bytes(name) == kept


def test_state_of_muon_and_adamw_is_that_of_pytorch():
    torch = pytest.importorskip("torch", reason="the extra torch is not installed")
    matrices, tables, vectors = tensors(torch)
    kept = kept_bytes(torch.optim.Muon(matrices, lr=1e-3))
    kept += kept_bytes(torch.optim.AdamW([*tables, *vectors], lr=1e-3))
    assert state_bytes("muon-bf16") == kept


def test_state_by_hand():
    matrices = sum(3 * rows * cols for rows, cols in MATRICES)
    tables = sum(rows * cols for rows, cols in TABLES)
    vectors = sum(width * count for width, count in VECTORS)
    every = matrices + tables + vectors
    assert MODEL.parameters() == every
    sides = sum(3 * (rows + cols) for rows, cols in MATRICES) + sum(r + c for r, c in TABLES)
    assert state_bytes("adam") == 12 * every
    assert state_bytes("lion") == 8 * every
    assert state_bytes("muon") == 8 * matrices + 12 * (tables + vectors)
    assert state_bytes("adafactor") == 4 * every + 4 * sides + 4 * vectors
    assert state_bytes("adam-8bit") == 2 * (matrices + tables) * (1 + 4 / 2048) + 8 * vectors


def test_newton_schulz_flops():
    """Five steps of 4 n^2 m + 2 n^3 on matrices of n x m, n the smaller side."""
    for rows, cols in ((64, 256), (256, 64), (96, 96)):
        n, m = sorted((rows, cols))
        products = OPTIMIZERS["muon"].products([(3, rows, cols)])
        flops = sum(2 * b * m_ * k * n_ for b, m_, k, n_ in products)
        assert flops == 3 * 5 * (4 * n * n * m + 2 * n**3)


def test_muon_is_shared_by_replicas_and_takes_the_time_of_its_products():
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    model = models.load("llama2-7b").replace(layers=4)

    def optimizer_s(name, **fields):
        spec = PlanSpec(global_batch=8, dp=8, optimizer=name, seq=512, **fields)
        return predict(model, cluster, spec).parts_s["optimizer"]

    products = OPTIMIZERS["muon"].products([(4, 4096, 4096), (3, 4096, 11008)])
    least_s = 4 * sum(2.0 * b * m * k * n for b, m, k, n in products) / 1e15
    alone = optimizer_s("muon") - optimizer_s("sgd-momentum")
    assert least_s < alone < 4 * least_s
    shared = optimizer_s("muon", zero=1) - optimizer_s("sgd-momentum", zero=1)
    assert shared == pytest.approx(alone / 8, rel=0.15)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_state_of_stages_and_shares_adds_up(name):
    """Every parameter's state is held once: over stages, and over replicas that share it."""
    cluster = Cluster(devices=4, fabric="dgx-h100", chip="h100")

    def held(**fields):
        spec = PlanSpec(global_batch=8, optimizer=name, **fields)
        plan = predict(MODEL, cluster, spec)
        return sum(stage.memory["optimizer"] for stage in plan.stages)

    whole = held(dp=4)
    assert whole == pytest.approx(state_bytes(name))
    assert held(pp=2, dp=2) == pytest.approx(whole)
    assert 4 * held(dp=4, zero=1) == pytest.approx(whole)


def test_muon_gathers_what_zero_3_shards():
    """Momenta of matrices in bf16: as many bytes as ZeRO 1 gathers of weights, but for tables."""
    cluster = Cluster(devices=8, fabric="dgx-h100", chip="h100")
    model = models.load("llama2-7b").replace(layers=8, vocab=64)

    def exchanged_s(name, zero):
        spec = PlanSpec(global_batch=8, dp=8, optimizer=name, seq=4096, zero=zero)
        return predict(model, cluster, spec).parts_s["data_comm"]

    gathered = exchanged_s("muon", 3) - exchanged_s("sgd-momentum", 3)
    assert gathered > 0.0
    assert exchanged_s("muon", 1) == pytest.approx(exchanged_s("sgd-momentum", 1))
    elements = 2.0 * 8 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert gathered > elements * 7 / 8 / 450e9
    assert gathered < elements / 300e9
