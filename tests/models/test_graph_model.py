"""Graphs as models: read from disk, planned and searched; no PyTorch is needed."""

import json

import jsonschema
import pytest
from golden_files import GOLDEN, hf_config
from refusals import refusal

from phaze_fast import models, schemas
from phaze_fast.errors import InfeasibleError
from phaze_fast.hardware import Cluster, presets
from phaze_fast.memory import Pipeline, footprint
from phaze_fast.models import GraphModel
from phaze_fast.opgraph import FORMATS, Strategy, layer_graph, reasons
from phaze_fast.planning import PlanSpec, Training, plan, predict
from phaze_fast.software import load_precision

FILE = GOLDEN / "traced_llama.json"


@pytest.fixture(scope="module")
def traced():
    return models.load(FILE)


@pytest.fixture(scope="module")
def record():
    """The configuration that the file was traced from."""
    return models.from_hf(
        {
            "model_type": "llama",
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 1000,
            "max_position_embeddings": 256,
        }
    )


def on(devices):
    return Cluster(devices=devices, chip=presets.chip("h100"), fabric=presets.fabric("dgx-h100"))


def test_a_graph_on_disk_is_what_its_schema_says(traced):
    data = json.loads(FILE.read_text())
    jsonschema.validate(data, schemas.schema("graph"))
    assert isinstance(traced, GraphModel)
    assert (data["format"], data["version"]) == ("phaze-fast graph", 1)
    assert models.model_from_dict(traced.to_dict()) == traced
    assert hash(models.load(FILE)) == hash(traced)


def test_a_graph_has_the_figures_of_the_record(traced, record):
    assert traced.parameters() == record.parameters()
    assert models.model_flops(traced).total == models.model_flops(record).total
    assert models.model_flops(traced).total_causal == models.model_flops(record).total_causal
    strategy = Strategy(tp=4, sequence_parallel=True, micro_batch=2)
    found, built = layer_graph(traced, strategy), layer_graph(record, strategy)
    eager = layer_graph(traced.replace(as_traced=True), strategy)
    assert found.flops == built.flops == eager.flops
    assert found.message_bytes == built.message_bytes == eager.message_bytes
    for own, other, one_by_one in zip(found.layers, built.layers, eager.layers, strict=True):
        figures = [(x.count, x.device_parameters) for x in (own, other, one_by_one)]
        assert figures[0] == figures[1] == figures[2]
        assert own.forward.stashed_bytes() == other.forward.stashed_bytes()
        # What PyTorch keeps, upcasts included, is more than fused kernels would keep.
        assert one_by_one.forward.stashed_bytes() >= own.forward.stashed_bytes()


def test_products_run_in_fewer_bits(traced):
    eager, fp8 = traced.replace(as_traced=True), load_precision("fp8")
    graphs = [layer_graph(model, precision=fp8) for model in (traced, eager)]
    for graph in graphs:
        block = graph.layers[1]
        assert {int(f) for f in block.forward.ops["format"]} == {0, FORMATS.index("fp8")}
        assert not graph.layers[-1].forward.ops["format"].any()  # logits stay as they are
    low, usual = (layer_graph(eager, precision=p).layers[1] for p in (fp8, None))
    assert (low.forward.ops["format"] > 0).sum() == 7  # products with weights
    assert low.forward.stashed_bytes() < usual.forward.stashed_bytes()


def test_samples_scale_everything_but_weights(traced):
    one, four = (layer_graph(traced, Strategy(micro_batch=b)) for b in (1, 4))
    assert four.flops == 4 * one.flops
    for small, large in zip(one.layers, four.layers, strict=True):
        assert large.forward.ops["read_bytes"].sum() <= 4 * small.forward.ops["read_bytes"].sum()
        assert large.device_parameters == small.device_parameters


def test_a_graph_is_planned_predicted_and_measured(traced):
    found = plan(traced, on(64), Training(global_batch=256, micro_batch=(1, 2)), top=3)
    best = found.plans[0]
    assert {p.tp for p in found.plans} <= {1, 2, 4}
    fixed = PlanSpec(global_batch=256, tp=1, pp=1, dp=64, micro_batch=2, zero=1)
    assert predict(traced, on(64), fixed).time_s >= best.time_s
    held = footprint(layer_graph(traced), Pipeline(pp=2, micro_batches=4))
    assert held.terms["weights"] > 0


def test_what_a_graph_has_no_rule_for_is_said(traced):
    assert reasons(traced, Strategy(cp=2, seq=512)) == []  # it is a transformer
    traced = traced.replace(as_traced=True)
    assert reasons(traced, Strategy(tp=4)) == []
    for strategy, line in [
        (Strategy(tp=8), "tp: 8 does not divide 4 heads of"),
        (Strategy(cp=2), "cp: 2: a graph of operators has no rule for it"),
        (Strategy(ep=2), "ep: 2: a graph of operators has no rule for it"),
        (Strategy(seq=512), "seq: 512 is not accepted; llama was traced with 256"),
    ]:
        assert reasons(traced, strategy)[0].startswith(line)
        assert line in refusal(layer_graph, traced, strategy, error=InfeasibleError)


# ---- operators beyond the dense transformer ----


def hf(name):
    return models.from_hf(hf_config(name))


MIXED = ["deepseek-v3-small", "gemma3-1b", "gpt-oss-20b", "qwen2-moe-sparse-step", "falcon-40b"]


@pytest.mark.parametrize("name", [*MIXED, "olmo2-7b", "command-r-plus", "glm-4-32b-0414", "phi-4"])
def test_layers_add_up_to_the_model(name):
    """Parameters of all layers, and FLOPs by the formula, whatever a block is made of."""
    model = hf(name)
    graph = layer_graph(model)
    assert sum(layer.count * layer.parameters for layer in graph.layers) == model.parameters()
    assert all(layer.parameters == layer.device_parameters for layer in graph.layers)
    forward = sum(layer.count * layer.forward.flops for layer in graph.layers)
    assert 3.0 * forward == pytest.approx(models.model_flops(model).total, rel=2e-3)


def test_blocks_of_several_kinds_stand_where_they_should():
    graph = layer_graph(hf("gemma3-1b"))
    kinds = [graph.layers[i].kind for i in graph.order]
    assert [i for i, kind in enumerate(kinds) if kind == "block"] == [6, 12, 18, 24]
    assert kinds.count("window-block") == 22
    dense_first = layer_graph(hf("deepseek-v3-small"))
    kinds = [dense_first.layers[i].kind for i in dense_first.order]
    assert kinds == ["embedding", *["block"] * 2, *["moe-block"] * 3, "head"]


def test_a_window_counts_the_keys_that_are_seen():
    model = hf("gemma3-1b").replace(window=3, seq=8, full_attention_layers=())
    seen = sum(min(i + 1, 3) for i in range(8))
    block = layer_graph(model).layers[1].forward
    attention = block.ops[block.names.index("attention")]
    assert attention["flops"] == 4 * 4 * 256 * seen
    assert layer_graph(model.replace(window=8)).layers[1].kind == "block"


def test_latent_attention_by_hand():
    """DeepSeek-V2, section 2.1: two products down, two up, one out."""
    model = hf("deepseek-v2-lite").replace(seq=16)
    block = layer_graph(model).layers[1].forward
    sizes = {n: tuple(int(block.ops[i][d]) for d in "mkn") for i, n in enumerate(block.names)}
    assert sizes["q"] == (16, 2048, 16 * 192)
    assert sizes["kv-down"] == (16, 2048, 512 + 64)
    assert sizes["kv-up"] == (16, 512, 16 * (128 + 128))
    assert sizes["proj"] == (16, 16 * 128, 2048)
    attention = block.ops[block.names.index("attention")]
    assert attention["flops"] == 2 * 16 * 16 * 16 * (192 + 128)
    two = layer_graph(model, Strategy(tp=2)).layers[1]
    whole = 2048 * (512 + 64) + 512 + 2 * 2048  # down to the latent vector, norms
    assert 2 * (two.device_parameters - whole) == two.parameters - whole


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_several_kinds_of_blocks_are_planned(name):
    experts = (1, 2) if "falcon" not in name and "gemma" not in name else (1,)
    step = Training(global_batch=64, micro_batch=1, ep=experts)
    found = plan(hf(name), on(64), step, top=1)
    assert found.plans[0].time_s > 0
