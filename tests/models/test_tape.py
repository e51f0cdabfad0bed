"""Steps written down without PyTorch: their views and strides, their layers, their totals."""

import math

import numpy as np
import pytest
from golden_files import hf_entries
from hypothesis import given
from hypothesis import strategies as st

from phaze_fast import models
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.hardware import Cluster, presets
from phaze_fast.models import eager
from phaze_fast.models import operators as op
from phaze_fast.models.huggingface import architectures
from phaze_fast.models.tape import Tape
from phaze_fast.planning import Training, plan, predict
from phaze_fast.software import load_software, planned_model


@st.composite
def arrays(draw):
    """A tensor with dimensions in any order, as the tape and as NumPy have it."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    tensor = op.permute(Tape().constant(*shape, dtype="float32"), *order)
    return tensor, np.zeros(shape, np.float32).transpose(order)


def strides(tensor):
    """Strides in elements of the dimensions that have more than one."""
    steps = tensor.strides
    if isinstance(tensor, np.ndarray):
        steps = [step // tensor.itemsize for step in steps]
    return [step for step, size in zip(steps, tensor.shape, strict=True) if size > 1]


@given(arrays(), st.data())
def test_a_reshape_copies_where_numpy_copies(pair, data):
    tensor, array = pair
    total = math.prod(tensor.shape)
    first = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    second = data.draw(st.sampled_from([n for n in range(1, first + 1) if first % n == 0]))
    shape = (total // first, second, first // second)
    ours, theirs = op.reshape(tensor, *shape), array.reshape(shape)
    assert (ours.storage is tensor.storage) == np.shares_memory(theirs, array)
    assert ours.shape == theirs.shape
    assert strides(ours) == strides(theirs)


@given(arrays())
def test_an_elementwise_result_has_the_order_of_its_operand(pair):
    tensor, array = pair
    assert strides(op.neg(tensor)) == strides(np.negative(array))


@given(arrays())
def test_gradients_have_the_shape_of_their_tensor(pair):
    tensor, _ = pair
    tape = tensor.tape
    weight = tape.parameter(*tensor.shape[-1:])
    bent = op.silu(op.mul(tensor, weight))
    loss = op.total(op.reshape(op.add(bent, op.mul(bent, 2.0)), -1), 0, keepdim=False)
    tape.run_backward(loss)
    last = tape.calls[-1]
    assert math.prod(last.writes[0].shape) == weight.shape[0]
    names = [call.name for call in tape.calls if call.backward]
    assert names.count("add") == 1  # two gradients of what is used twice


@pytest.mark.slow
@pytest.mark.parametrize("name", models.names())
def test_presets_have_the_parameters_and_flops_of_their_record(name):
    """Two descriptions of one model, written apart: fields with formulas, and operators."""
    model = models.load(name)
    model = model.replace(layers=min(model.layers, 6), encoder_layers=min(model.encoder_layers, 6))
    if model.module is None or model.module.family not in architectures():
        with pytest.raises(InvalidInputError, match="trace the module"):
            models.expanded(model)
        return
    graph = models.expanded(model)
    assert graph.parameters() == model.parameters()
    assert graph.blocks in (model.blocks, model.blocks + bool(model.encoder_layers))
    model = model.replace(window=None, full_attention_layers=())  # a mask: all scores are computed
    ours, theirs = models.model_flops(graph), models.model_flops(model)
    assert ours.total == pytest.approx(theirs.total, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("entry", hf_entries(), ids=lambda entry: entry["name"])
def test_configurations_have_as_many_parameters_as_transformers_counts(entry):
    model = models.from_hf(entry["config"])
    seq = 64 if model.patches is None else None
    assert models.expanded(model, seq).parameters() == entry["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "gemma3_text", "sliding_window": 8, "head_dim": 8},
        {"model_type": "smollm3"},
        {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "decoder_sparse_step": 3},
    ],
)
def test_blocks_that_are_alike_are_recorded_once_and_counted(fields):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 48, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
    config = {**sizes, "num_hidden_layers": 14, "vocab_size": 100, **fields}
    if fields["model_type"] != "qwen3_moe":
        del config["moe_intermediate_size"], config["num_experts_per_tok"]
    model = models.from_hf(config).replace(seq=16)
    graph = models.expanded(model)
    whole = eager.layers_graph(model, range(model.layers))
    assert graph.replace(as_traced=False, notes="") == whole
    assert len(graph.layers) > 3


def test_a_family_without_code_is_named_with_what_to_do():
    model = models.load("llama2-7b")
    other = model.replace(module=model.module.replace(family="unknown"))
    with pytest.raises(InvalidInputError, match="unknown are not known; trace the module"):
        planned_model(other, load_software("huggingface-eager"))


def test_a_model_without_a_module_keeps_its_block():
    plain = models.load("llama2-7b").replace(module=None)
    assert planned_model(plain, load_software("huggingface-eager")) is plain


def test_the_graph_has_the_sequence_of_the_step():
    cluster = Cluster(devices=1, chip=presets.chip("h200"), fabric=presets.fabric("dgx-h100"))
    spec = {"software": "huggingface-eager", "global_batch": 1, "seq": 512}
    assert predict("gpt2", cluster, spec).seq == 512
    with pytest.raises(InfeasibleError, match="2048 is more than the 1024 positions"):
        predict("gpt2", cluster, {**spec, "seq": 2048})


def test_plans_with_tensor_and_pipeline_parallelism_and_a_reason_against_context():
    cluster = Cluster(devices=8, chip=presets.chip("h100"), fabric=presets.fabric("dgx-h100"))
    step = Training(global_batch=16, software="huggingface-eager", tp=[2], pp=[2])
    best = plan("llama2-7b", cluster, step).plans[0]
    assert (best.tp, best.pp, best.dp) == (2, 2, 2)
    spec = {"software": "huggingface-eager", "global_batch": 16, "cp": 2, "dp": 4}
    with pytest.raises(InvalidInputError, match="cp: 2: a graph of operators has no rule for it"):
        predict("llama2-7b", cluster, spec)


def test_a_loss_does_not_read_all_scores_and_a_part_is_written_into_zeros():
    graph = models.expanded(models.load("llama2-7b"), 64)
    head, block = graph.layers[-1], graph.layers[1]
    ops = {one.name: one for one in (*head.forward, *head.backward)}
    loss, gradient = ops["nll_loss_forward"], ops["d-nll_loss_forward"]
    assert (loss.read_bytes, gradient.read_bytes) == (16 * 64, 8 * 64)  # labels, and scores at them
    assert gradient.write_bytes == 4 * 64 * 32000
    copies = [one for one in block.backward if one.function == "copy"]
    halves = [one for one in copies if one.write_bytes == 3 * one.read_bytes]
    assert len(halves) == 4  # both halves of queries and keys: zeros of the whole, and half again


def test_a_weight_gradient_of_odd_width_is_priced_as_its_product():
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    for vocabulary in (1001, 1002):
        model = models.from_hf({**config, "num_hidden_layers": 1, "vocab_size": vocabulary})
        head = models.expanded(model, 64).layers[-1]
        assert [op.n for op in head.backward if op.kind == "gemm-weight-gradient"] == [vocabulary]
