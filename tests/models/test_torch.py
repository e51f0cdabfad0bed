"""PyTorch modules recorded on the meta device, held against the builder from configurations."""

from collections import Counter
from functools import cache

import pytest
from golden_files import golden_yaml, hf_config, hf_entries

from phaze_fast import models
from phaze_fast.hardware import Cluster, presets
from phaze_fast.opgraph import KINDS, Strategy, layer_graph
from phaze_fast.planning import Training, plan

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
nn = torch.nn
# transformers compiles parts of a few models in a way that PyTorch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

SEQ, LAYERS = 16, 3
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 96}
SMALL = golden_yaml("hf_families.yaml")["traced"]
MIXTURES = ["deepseek-v3-small", "qwen3-moe-some-dense", "qwen2-moe-sparse-step"]


@cache
def pair(kind):
    """A traced module of an architecture, and the record of its configuration."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from phaze_fast.models.huggingface import trace_hf

    fields = {"model_type": kind, **SMALL[kind]}
    return trace_hf(fields, kind, seq=SEQ), models.from_hf(fields).replace(seq=SEQ)


@cache
def mixture(name):
    """The same of a small mixture of experts."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from phaze_fast.models.huggingface import trace_hf

    config = hf_config(name)
    return trace_hf(config, name, seq=96), models.from_hf(config).replace(seq=96)


def raw(traced):
    """The operators as PyTorch runs them."""
    return traced.replace(as_traced=True)


def products(graph):
    """How often each (kind, sizes) of a product stands in a pass; a weight may stand turned."""
    found = Counter()
    for op in graph.ops:
        kind = KINDS[op["kind"]]
        if op["flops"] > 0:
            sizes = [int(op[d]) for d in "bmkn"]
            if kind == "gemm-weight-gradient":
                sizes = [sizes[0], *sorted((sizes[1], sizes[3])), sizes[2]]
            found[(kind, *sizes)] += 1
    return found


def whole(graph, name):
    found = Counter()
    for layer in graph.layers:
        for key, times in products(getattr(layer, name)).items():
            found[key] += layer.count * times
    return found


def test_a_traced_vision_transformer_is_the_recorded_one():
    """The class token is no patch, and pixels have no gradient."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {**SIZES, "image_size": 32, "patch_size": 8, "num_hidden_layers": LAYERS}
    config = transformers.ViTConfig(**sizes, num_labels=10)
    with torch.device("meta"):
        module = transformers.ViTForImageClassification(config)
        inputs = {"pixel_values": torch.empty(2, 3, 32, 32), "labels": torch.empty(2).long()}
    traced, record = models.from_torch(module, (), inputs), models.from_hf(config.to_dict())
    assert traced.parameters() == record.parameters()
    found, built = (layer_graph(m, Strategy(micro_batch=2)) for m in (raw(traced), record))
    for way in ("forward", "backward"):
        assert whole(found, way) == whole(built, way)
    assert models.model_flops(traced).total == models.model_flops(record).total


@pytest.mark.parametrize("kind", SMALL)
def test_traced_and_recorded_architectures_are_the_same(kind):
    """Parameters, every product forward and backward, FLOPs."""
    traced, record = pair(kind)
    assert traced.parameters() == record.parameters()
    if kind == "t5":  # PyTorch attends in parts with its bias; test_families has its operators
        return
    models_of = (raw(traced), record)
    found, built = (layer_graph(model, Strategy(micro_batch=2)) for model in models_of)
    assert whole(found, "forward") == whole(built, "forward")
    assert whole(found, "backward") == whole(built, "backward")
    assert found.flops == pytest.approx(built.flops, rel=1e-12)
    assert models.model_flops(traced).total == pytest.approx(models.model_flops(record).total)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "gpt2", "olmo2", "starcoder2"])
@pytest.mark.parametrize("shared_rows", [False, True])
def test_tensor_parallel_rules_are_those_of_the_record(kind, shared_rows):
    traced, record = pair(kind)
    strategy = Strategy(tp=2, sequence_parallel=shared_rows, micro_batch=2)
    traced = raw(traced)
    if kind == "olmo2":  # a norm over all heads reduces over split columns
        assert all(op.split != "columns" for op in traced.layers[1].forward[:12])
        return
    found, built = layer_graph(traced, strategy), layer_graph(record, strategy)
    assert found.flops == pytest.approx(built.flops, rel=1e-12)
    assert found.message_bytes == built.message_bytes
    for own, other in zip(found.layers, built.layers, strict=True):
        assert (own.count, own.device_parameters) == (other.count, other.device_parameters)
        for one, two in ((own.forward, other.forward), (own.backward, other.backward)):
            assert sent(one) == sent(two)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_and_latent_attention_are_the_same_traced_and_recorded(name):
    """Grouped products, shared experts, dense layers among others: parameters and FLOPs."""
    traced, record = mixture(name)
    assert traced.parameters() == record.parameters()
    found, built = layer_graph(raw(traced)), layer_graph(record)
    assert [layer.count for layer in found.layers] == [layer.count for layer in built.layers]
    assert found.flops == pytest.approx(built.flops, rel=1e-12)


@pytest.mark.parametrize("kind", [*SMALL, *MIXTURES])
def test_a_trace_is_recognised_as_the_transformer_it_is(kind):
    """Every operator, every kept byte, every second of plans: those of the record."""
    traced, record = mixture(kind) if kind in MIXTURES else pair(kind)
    known = models.recognised(traced)
    assert known is not None
    assert models.recognised(raw(traced)) is None
    widths = {"tp": 2, "sequence_parallel": True, "micro_batch": 2}
    for strategy in (Strategy(), Strategy(**widths), Strategy(cp=2)):
        found, built = layer_graph(traced, strategy), layer_graph(record, strategy)
        assert found.order == built.order
        for own, other in zip(found.layers, built.layers, strict=True):
            assert (own.forward.ops == other.forward.ops).all()
            assert (own.backward.ops == other.backward.ops).all()
            assert own.forward.stashed_bytes() == other.forward.stashed_bytes()
            assert own.device_parameters == other.device_parameters
    if kind not in ("llama", "gemma2", "deepseek-v3-small"):
        return  # the same operators take the same seconds
    step = Training(global_batch=32, micro_batch=1, tp=(1, 2), ep=1)
    cluster = Cluster(devices=8, chip=presets.chip("h100"), fabric=presets.fabric("dgx-h100"))
    times = [plan(model, cluster, step, top=1).plans[0].time_s for model in (traced, record)]
    assert times[0] == pytest.approx(times[1], rel=1e-12)


def sent(graph):
    ops = graph.ops[graph.ops["collective"] >= 0]
    return sorted((int(op["collective"]), float(op["payload_bytes"])) for op in ops)


def test_layers_are_found_by_repetition():
    for kind, path in (("llama", "model.layers.0"), ("gpt2", "transformer.h.0")):
        traced, _ = pair(kind)
        names = [(layer.name, layer.count) for layer in traced.layers]
        assert names == [("embedding", 1), (path, LAYERS), ("head", 1)]
        assert traced.order == (0, *[1] * LAYERS, 2)
        assert traced.is_chain
    traced, _ = pair("t5")
    assert not traced.is_chain
    memory = traced.order.index(next(i for i, a in enumerate(traced.layers) if "betw" in a.name))
    readers = [b for a, b in traced.edges if a == memory]
    assert len(readers) >= LAYERS  # every decoder block reads the encoder's output


def test_upcasts_are_seen_as_pytorch_runs_them():
    """Llama's norm works in fp32: it writes twice the bytes of the bf16 residual stream."""
    traced, _ = pair("llama")
    ops = {op.name: op for op in traced.layers[1].forward}
    assert ops["input_layernorm.pow"].write_bytes == 4 * SEQ * 32
    assert ops["self_attn.q_proj.mm"].write_bytes == 2 * SEQ * 32
    assert ops["self_attn.attention"].causal


@pytest.mark.parametrize("entry", hf_entries(), ids=lambda entry: entry["name"])
def test_golden_counts_are_those_of_transformers(entry):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(**entry["config"])
    with torch.device("meta"):
        module = getattr(transformers, entry["class"])(config)
    assert sum(part.numel() for part in module.parameters()) == entry["parameters"]


@pytest.mark.parametrize("kind", ["persimmon", "electra", "mamba2"])
def test_other_architectures_are_built_and_traced(kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    fields = {"model_type": kind, "num_hidden_layers": 2, "vocab_size": 64}
    if kind == "mamba2":
        fields |= {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1}
        fields |= {"state_size": 8, "chunk_size": 16}
    else:
        fields |= {**SIZES, "max_position_embeddings": 64}
    found = models.from_hf(fields)
    module = models.huggingface.hf_module(fields)
    assert isinstance(found, models.GraphModel)
    assert found.parameters() == sum(part.numel() for part in module.parameters())
    assert transformers.__version__
