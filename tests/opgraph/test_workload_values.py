"""Single values of operator graphs and memory rows, each computed by hand."""

import pytest

from phaze_fast import models
from phaze_fast.memory import Pipeline, stage_row
from phaze_fast.opgraph import Strategy, layer_graph


def op(graph, name):
    return graph.ops[graph.names.index(name)]


def test_fused_attention_computes_its_scores_again_backward():
    block = layer_graph(models.load("llama2-7b")).layers[1]
    forward, backward = op(block.forward, "attention"), op(block.backward, "d-attention")
    assert forward["flops"] == 4.0 * 32 * 4096 * 4096 * 128
    assert backward["flops"] == 2.5 * forward["flops"]


def test_nothing_is_fused_onto_a_product_that_others_read():
    """One QKV projection feeds the rotation of Q, that of K, and attention: none can join it."""
    model = models.load("llama2-7b").replace(fused_qkv=True)
    block = layer_graph(model, fused=True).layers[1].forward
    assert {"qkv", "rotate-q", "rotate-k"} <= set(block.names)
    assert op(block, "qkv")["epilogue"] == 0
    apart = layer_graph(models.load("llama2-7b"), fused=True).layers[1].forward
    assert "rotate-q" not in apart.names
    assert op(apart, "q")["epilogue"] == 1


def test_the_loss_exchanges_three_numbers_a_token():
    graph = layer_graph(models.load("gpt2-small"), Strategy(tp=2, seq=128))
    assert op(graph.layers[-1].forward, "loss-reduce")["payload_bytes"] == 3 * 4 * 128


def test_a_vocabulary_is_padded_to_the_next_multiple():
    graph = layer_graph(models.load("gpt2-small"), Strategy(tp=2))
    assert op(graph.layers[-1].forward, "logits")["n"] == 25_129  # 50,257 over 2
    assert graph.layers[0].device_parameters == (25_129 + 1024) * 768


@pytest.mark.parametrize(
    ("strategy", "stages", "expected"),
    [
        ({}, 1, 0),
        ({}, 2, 2 * 2 * 1024 * 768),  # a message in and one out
        ({"tp": 4}, 2, 2 * 2 * 1024 * 768),
        ({"tp": 4, "sequence_parallel": True}, 1, 2 * 1024 * 768),  # gathered rows
        ({"tp": 4, "sequence_parallel": True}, 2, 2 * 1024 * 768 * (1 + 2 / 4)),
        ({"cp": 2, "micro_batch": 3}, 2, (2 + 2 * 2 * 2) * 2 * 3 * 512 * 768),
    ],
)
def test_buffers(strategy, stages, expected):
    graph = layer_graph(models.load("gpt2-small"), Strategy(**strategy))
    assert stage_row(graph, Pipeline(pp=stages))["buffer_bytes"][0] == expected


def test_the_largest_layer_is_live_while_it_is_recomputed():
    graph = layer_graph(models.load("t5-small"))
    kinds = {layer.kind: layer for layer in graph.layers}
    live = {
        kind: kinds[kind].forward.stashed_bytes()
        - kinds[kind].forward.stashed_bytes("full")
        + kinds[kind].work_bytes
        for kind in ("encoder-block", "decoder-block")
    }
    assert live["decoder-block"] > live["encoder-block"] > 0
    row = stage_row(graph, Pipeline(), recompute="full")
    assert row["live_bytes"][0] == live["decoder-block"]
    first = stage_row(graph, Pipeline(pp=2), 0, "full")
    assert first["live_bytes"][0] == live["encoder-block"]
    work = max(kinds[kind].work_bytes for kind in live)  # of a backward pass alone
    assert stage_row(graph, Pipeline())["live_bytes"][0] == work > 0
