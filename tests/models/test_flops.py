"""Operations of a model against its operator graph, published formulas and figures by hand."""

import itertools

import numpy as np
import pytest
from refusals import refusal

from phaze_fast import _core, models
from phaze_fast.errors import InvalidInputError
from phaze_fast.models import MixtureOfExperts, model_flops, multiplied_parameters, narayanan_flops
from phaze_fast.opgraph import Strategy, layer_graph

_FUSED_BACKWARD = _core.FUNCTIONS.index("attention-backward")


def graph_flops(model, seq, masked):
    """Matrix operations of the operator graph; a fused backward pass computes scores once more."""
    total = 0.0
    for layer in layer_graph(model, Strategy(seq=seq)).layers:
        for graph in (layer.forward, layer.backward):
            ops = graph.ops[np.isin(graph.ops["unit"], (0, 2))]
            flops = np.where(ops["function"] == _FUSED_BACKWARD, 0.8, 1.0) * ops["flops"]
            if masked:
                flops = flops * np.where(ops["causal"] != 0, 0.5, 1.0)
            total += layer.count * float(flops.sum())
    return total


def test_the_formula_is_what_the_operator_graph_multiplies():
    for name in models.names():
        model = models.load(name)
        moe = model.moe
        if moe is not None and model.seq * moe.top_k % moe.experts:  # each expert has whole rows
            model = model.replace(seq=moe.experts * 8)
        found = model_flops(model)
        pixels = 0.0  # their gradient, which 6 operations per weight count and nobody computes
        if model.patches is not None:
            pixels = 2.0 * model.patches.size**2 * model.patches.channels * model.hidden
            pixels *= model.seq - 1
        for causal, total in ((True, found.total_causal), (False, found.total)):
            assert total == pytest.approx(graph_flops(model, model.seq, causal) + pixels, rel=1e-12)
        if name == "llama2-7b":  # and so it is for other sequences and kernels
            for seq, attention in itertools.product((128, 4096), ("flash", "eager")):
                other = model.replace(attention=attention)
                total = model_flops(other, seq).total
                assert total == pytest.approx(graph_flops(other, seq, False), rel=1e-12)


def test_palm_by_hand():
    """6 N + 12 L H Q T per token: PaLM 540B, appendix B and table 1."""
    layers, hidden, heads, width, vocab = 118, 18432, 48, 256, 256_000
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 1, "head_dim": width}
    sizes |= {"ffn": 4 * hidden, "vocab": vocab, "seq": 2048}
    palm = models.load("llama2-7b").replace(**sizes, tied_embeddings=True)
    assert palm.parameters() / 1e9 == pytest.approx(540.35, rel=1e-3)
    n = multiplied_parameters(palm)
    assert n == pytest.approx(palm.parameters(), rel=1e-4)  # all but the gains of its norms
    assert model_flops(palm).per_token == 6.0 * n + 12.0 * layers * heads * width * 2048


@pytest.mark.parametrize(
    "name", ["gpt-1.7b", "gpt-18.4b", "gpt-145.6b", "gpt-1t", "gpt3-175b", "gpt-22b"]
)
def test_narayanan_equation_3(name):
    """Equal to equation 3, with all blocks computed again and without."""
    gpt = models.load(name)
    found = model_flops(gpt, sequences=7)
    args = (gpt.layers, gpt.hidden, gpt.vocab, gpt.seq, 7)
    assert gpt.ffn == 4 * gpt.hidden
    assert found.total == pytest.approx(narayanan_flops(*args, recompute=False), rel=1e-12)
    again = found.total + found.forward_blocks
    assert again == pytest.approx(narayanan_flops(*args), rel=1e-12)


def test_the_published_table_of_megatron():
    """Narayanan et al. 2021, table 1: 1008 B parameters, batch 3072, 163 TFLOP/s on 3072 GPUs."""
    gpt = models.load("gpt-1t")
    again = model_flops(gpt, sequences=3072)
    step_s = (again.total + again.forward_blocks) / (163e12 * 3072)
    assert 50 < step_s < 120
    tokens_per_s = 3072 * gpt.seq / step_s
    # Their section 5.1 estimates 84 days for 450 B tokens, by 8 T P / n X.
    assert 450e9 / tokens_per_s / 86400 == pytest.approx(84, rel=0.05)


def test_tied_and_untied_heads_multiply_alike():
    tied = models.load("llama2-7b").replace(tied_embeddings=True)
    untied = tied.replace(tied_embeddings=False)
    assert untied.parameters() > tied.parameters()
    assert model_flops(untied) == model_flops(tied)


def test_experts_count_where_a_token_goes():
    mixtral = models.load("mixtral-8x7b")
    more = mixtral.replace(
        published_parameters=None,
        moe=MixtureOfExperts(experts=64, top_k=2, expert_ffn=mixtral.moe.expert_ffn),
    )
    router = 6.0 * mixtral.layers * mixtral.hidden * (64 - 8)
    assert model_flops(more).weights - model_flops(mixtral).weights == router * mixtral.seq
    ratio = multiplied_parameters(mixtral) / mixtral.active_parameters()
    assert ratio == pytest.approx(1 - 32000 * 4096 / mixtral.active_parameters(), rel=1e-4)
    shared = mixtral.replace(moe=mixtral.moe.replace(shared_experts=1, top_k=1))
    assert model_flops(shared) == model_flops(mixtral)


def test_masks():
    gpt, bert, t5 = (models.load(name) for name in ("gpt3-175b", "bert-large", "t5-base"))
    found = model_flops(gpt)
    assert found.attention_causal == found.attention / 2
    assert model_flops(bert).attention_causal == model_flops(bert).attention
    # A third of T5's attention is the decoder's own, which is masked; there are as many layers.
    assert t5.layers == t5.encoder_layers
    both = model_flops(t5)
    assert both.attention_causal == pytest.approx(both.attention * 5 / 6, rel=1e-12)


def test_laws():
    gpt = models.load("gpt3-13b")
    one, many = model_flops(gpt, 1024), model_flops(gpt, 1024, 12)
    for name, value in one.to_dict().items():
        assert many.to_dict()[name] == pytest.approx(12 * value, rel=1e-12)
    longer = model_flops(gpt, 2048)
    assert longer.weights == 2 * one.weights
    assert longer.attention == 4 * one.attention
    deeper = model_flops(gpt.replace(layers=2 * gpt.layers, published_parameters=None), 1024)
    assert deeper.forward_blocks == pytest.approx(2 * one.forward_blocks)
    assert 0 < 3 * one.forward_blocks < one.total


@pytest.mark.parametrize("name", ["seq", "sequences"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8"])
def test_bad_sizes(name, bad):
    message = refusal(model_flops, models.load("gpt2"), **{name: bad}, error=InvalidInputError)
    assert message.startswith(f"{name}: {bad!r} is not accepted")
