"""Frozen parameters: no gradients, no state, no gradients of weights; LoRA and QLoRA by formula."""

import re

import pytest
from golden_files import refused_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster
from phaze_fast.memory import Pipeline, footprint
from phaze_fast.models import Lora, read_lora
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.planning import PlanSpec, Training, layer_schedules, plan, predict
from phaze_fast.planning.sizes import strategy_sizes

LLAMA = models.load("llama2-7b").replace(layers=4)
SMALL = models.TransformerModel(
    name="small", layers=3, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=200, seq=32,
    positions="rotary", norm="rmsnorm", gated=True, activation="silu", qkv_bias=False,
    out_bias=False, ffn_bias=False, tied_embeddings=False,
)  # fmt: skip
MIXTURE = SMALL.replace(
    moe={"experts": 4, "top_k": 2, "expert_ffn": 64, "shared_experts": 1, "dense_layers": 1}
)
LATENT = SMALL.replace(
    kv_heads=None,
    latent={
        "query_rank": 24, "kv_rank": 16, "plain_width": 16, "rotary_width": 8, "value_width": 16,
    },
)  # fmt: skip
CLUSTER = Cluster(devices=8, fabric="dgx-h100", chip="h100")


def test_adapters_have_the_parameters_that_peft_gives_them():
    """Llama 2 7B, rank 8 on q and v: 4,194,304; rank 16 on all linear layers: 39,976,960."""
    whole = models.load("llama2-7b")
    assert whole.with_lora(Lora(rank=8, targets=("q", "v"))).trained_parameters() == 4_194_304
    every = whole.with_lora(Lora(rank=16))
    assert every.trained_parameters() == 39_976_960
    assert every.parameters() == whole.parameters() + 39_976_960


@pytest.mark.parametrize("model", [SMALL, MIXTURE, LATENT, models.load("t5-small")])
@pytest.mark.parametrize("targets", ["all-linear", "o"])
def test_layers_have_the_parameters_of_the_model(model, targets):
    adapted = model.with_lora(Lora(rank=4, targets=(targets,)))
    graph = layer_graph(adapted)
    assert sum(x.count * x.parameters for x in graph.layers) == adapted.parameters()
    trained = sum(x.count * (x.device_parameters - x.frozen_parameters) for x in graph.layers)
    assert trained == adapted.trained_parameters()
    matrices = sum(x.count * b * rows * cols for x in graph.layers for b, rows, cols in x.matrices)
    assert matrices == trained


def test_experts_have_adapters_of_their_own():
    adapted = MIXTURE.with_lora(Lora(rank=4, targets=("experts",)))
    each = 4 * 3 * (64 + 64)  # rank, three matrices of 64 x 64
    assert adapted.trained_parameters() == 2 * 4 * each
    halves = layer_graph(adapted, Strategy(ep=2)).layers
    block = next(layer for layer in halves if layer.kind == "moe-block")
    assert block.expert_parameters - block.frozen_experts == 2 * each


def test_empty_gradients_stand_in_for_trained_weights_alone():
    """Megatron keeps one bf16 gradient of each shape: of experts of adapters, not of theirs."""
    adapted = MIXTURE.with_lora(Lora(rank=4))
    sizes = strategy_sizes(adapted, Strategy(), ("none",))
    for layer, record in zip(sizes.graph.layers, sizes.kinds, strict=True):
        trained = layer.device_parameters - layer.frozen_parameters
        experts = layer.expert_parameters - layer.frozen_experts
        one = trained - experts * 3 // 4  # all experts share one
        assert record["shape_bytes"] == (2 * one if layer.kind.endswith("block") else 0)


def test_a_frozen_embedding_has_a_forward_pass_alone():
    schedules = layer_schedules(
        SMALL.with_lora(Lora(rank=4)), CLUSTER, {"dp": 8, "global_batch": 8}
    )
    passes = [(layer.kind, layer.direction) for layer in schedules]
    assert passes == [
        ("embedding", "forward"), ("block", "forward"), ("block", "backward"),
        ("head", "forward"), ("head", "backward"),
    ]  # fmt: skip


def test_products_of_a_frozen_layer():
    """No gradient of a frozen weight; both products of an adapter with all their gradients."""
    adapted = SMALL.with_lora(Lora(rank=4, targets=("q", "down")))
    embedding, block, head = layer_graph(adapted).layers
    assert len(embedding.backward) == 0
    names = set(block.backward.names)
    assert {name for name in names if name.endswith("-w")} == {
        f"d-{name}+lora-{half}-w" for name in ("q", "down") for half in "ab"
    }
    products = {"q", "k", "v", "proj", "up", "gate", "down"}
    assert {f"d-{name}-x" for name in products} <= names
    assert not [name for name in head.backward.names if name.endswith("-w")]
    full = layer_graph(SMALL).layers[1]
    adapters = 2 * 32 * 4 * ((64 + 64) + (128 + 64))
    assert block.forward.flops == full.forward.flops + adapters
    weights = 2 * 32 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert block.backward.flops == full.backward.flops - weights + 2 * adapters


def test_tensors_that_only_frozen_weights_would_need_are_not_stored():
    def stored(model):
        return {t.name: t.bytes for t in layer_graph(model).layers[1].forward.tensors}

    full, rows = stored(SMALL), 32
    down = stored(SMALL.with_lora(Lora(rank=4, targets=("down",))))
    assert full.keys() - down.keys() == {"attention-input", "ffn-input"}
    assert down.keys() - full.keys() == {"down+lora-rank"}
    assert down["down+lora-rank"] == 2 * rows * 4
    query = stored(SMALL.with_lora(Lora(rank=4, targets=("q",))))
    assert full.keys() - query.keys() == {"gated", "ffn-input"}
    dropped = stored(SMALL.with_lora(Lora(rank=4, targets=("q",), dropout=0.1)))
    assert "attention-input" not in dropped
    assert dropped["q+lora-dropout-mask"] == rows * 64


def test_4_bit_weights():
    """0.5 byte and 0.127 bits each (QLoRA, section 3), restored for every use."""
    lora = Lora(rank=16, targets=("q", "v"))
    plain, packed = (LLAMA.with_lora(lora.replace(bits=bits)) for bits in (16, 4))
    blocks = 4 * (4 * 4096**2 + 3 * 4096 * 11008)
    saved = footprint(layer_graph(plain)).terms["weights"]
    saved -= footprint(layer_graph(packed)).terms["weights"]
    assert saved == pytest.approx(blocks * (2.0 - 0.5 - 0.127 / 8), rel=1e-4)
    block = layer_graph(packed).layers[1]
    for graph in (block.forward, block.backward):
        restored = [name for name in graph.names if name.endswith("+dequantise")]
        assert len(restored) == 7
    assert packed.parameters() == plain.parameters()


def test_lora_needs_a_fraction_of_the_memory():
    """Llama 2 7B on one H100: state of adapters alone, where full training needs 113 GiB of it."""
    whole = models.load("llama2-7b")
    alone = Cluster(devices=1, fabric="dgx-h100", chip="h100")
    spec = PlanSpec(global_batch=1, seq=2048)
    terms = predict(whole.with_lora(Lora(rank=16)), alone, spec).memory
    trained = 39_976_960
    assert terms["gradients"] == 4.0 * trained
    assert terms["optimizer"] == 12.0 * trained
    assert terms["weights"] == 2.0 * (whole.parameters() + trained)
    full = predict(whole, alone, spec).memory
    assert full["optimizer"] == 12.0 * whole.parameters()


def test_replicas_exchange_gradients_of_trained_parameters_only():
    lora = LLAMA.with_lora(Lora(rank=4, targets=("q",)))

    def exchanged_s(model, zero):
        spec = PlanSpec(global_batch=8, dp=8, zero=zero, seq=512)
        return predict(model, CLUSTER, spec).parts_s["data_comm"]

    assert exchanged_s(lora, 0) < 0.05 * exchanged_s(LLAMA, 0)
    assert exchanged_s(lora, 1) < 0.05 * exchanged_s(LLAMA, 1)
    spec = PlanSpec(global_batch=8, dp=8, zero=3, seq=512)
    shares = predict(lora, CLUSTER, spec).memory["weights"]
    assert shares == pytest.approx(2.0 * lora.parameters() / 8)


widths = st.sampled_from([{"dp": 8}, {"tp": 2, "dp": 4}, {"tp": 2, "pp": 2, "dp": 2}])
adapters = st.builds(
    Lora,
    rank=st.sampled_from([1, 4, 16]),
    targets=st.sets(st.sampled_from(["q", "k", "v", "o", "up", "gate", "down"]), min_size=1).map(
        tuple
    ),
    bits=st.sampled_from([4, 16]),
)


@settings(max_examples=25, deadline=None)
@given(widths, adapters, st.integers(0, 3), st.sampled_from(["none", "full"]))
def test_freezing_never_needs_more_memory_nor_time(fields, lora, zero, recompute):
    """A large model, whose adapters and restored weights cost less than gradients of weights."""
    spec = PlanSpec(global_batch=32, zero=zero, recompute=recompute, micro_batch=4, **fields)
    full = predict(LLAMA, CLUSTER, spec)
    frozen = predict(LLAMA.with_lora(lora), CLUSTER, spec)
    assert frozen.memory_bytes < full.memory_bytes
    assert frozen.time_s < full.time_s


def test_plans_and_predictions_of_adapters_agree():
    training = Training(global_batch=16, micro_batch=(1, 2), zero=(0, 1, 3))
    found = plan(LLAMA.with_lora(Lora(rank=16, bits=4)), CLUSTER, training).best
    again = predict(LLAMA.with_lora(Lora(rank=16, bits=4)), CLUSTER, PlanSpec.of(found.to_dict()))
    assert (again.time_s, again.memory_bytes) == (found.time_s, found.memory_bytes)


def test_adapters_as_text():
    read = read_lora("rank=16,targets=q_proj,c_proj,alpha=32,dropout=0.05,bits=4")
    assert read == Lora(rank=16, targets=("q", "o", "down"), alpha=32.0, dropout=0.05, bits=4)
    fused = models.load("gpt2-small")
    assert fused.with_lora(Lora(rank=4, targets=("q", "k", "v"))).lora.targets == ("qkv",)
    stored = fused.with_lora(Lora(rank=4))
    assert models.model_from_dict(stored.to_dict()) == stored


@pytest.mark.parametrize(("text", "reason"), refused_calls("adapters"))
def test_bad_adapters_are_refused(text, reason):
    with pytest.raises(InvalidInputError, match=re.escape(reason)):
        LLAMA.with_lora(read_lora(text))


def test_a_part_of_a_fused_projection_is_refused():
    with pytest.raises(InvalidInputError, match="expected qkv, one projection"):
        models.load("gpt2-small").with_lora(Lora(rank=4, targets=("q",)))


def test_what_cannot_be_priced_is_refused():
    adapted = SMALL.with_lora(Lora(rank=4, bits=4))
    with pytest.raises(InvalidInputError, match="precision: fp8 is not accepted"):
        predict(adapted, CLUSTER, PlanSpec(global_batch=8, dp=8, precision="fp8"))
    from phaze_fast.wafer import Problem, WaferTraining

    with pytest.raises(InvalidInputError, match="model.lora"):
        Problem(adapted, "dram-wafer")
    with pytest.raises(InvalidInputError, match="optimizer: 'muon' is not accepted"):
        WaferTraining(optimizer="muon")


def test_footprints_and_predictions_agree_on_state():
    adapted = LLAMA.with_lora(Lora(rank=16, bits=4))
    terms = footprint(layer_graph(adapted), Pipeline()).terms
    predicted = predict(adapted, CLUSTER, PlanSpec(global_batch=8, dp=8)).memory
    for name in ("weights", "gradients", "optimizer"):
        assert terms[name] == pytest.approx(predicted[name])
