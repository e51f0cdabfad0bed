"""What a forward pass stores for the backward pass is written by it, with operators fused or not."""

import pytest

from phaze_fast import models
from phaze_fast.cost import operator_costs
from phaze_fast.hardware import presets, tuning_record
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.opgraph.graph import FUNCTIONS
from phaze_fast.software import load_software, model_as_run

NAMES = ("bertlarge", "gpt2", "llama2-7b", "llama3-8b", "mixtral-8x7b", "deepseek-v3", "t5-large")
KERNELS = {"cross-entropy": "logits", "score-dropout": "score-dropout-mask"}
"""Operators whose kernels write a stored tensor that their bytes leave out: the fp32 logits and the
mask are part of the constants that were fitted to these kernels."""


def stashed(graph):
    """Bytes that each operator stores, without row statistics and copies in another layout."""
    by_producer = {}
    for tensor in graph.tensors:
        if tensor.statistic or tensor.instead_of or tensor.name == "dispatched":
            continue
        if tensor.name.endswith("statistics") or tensor.name == KERNELS.get(tensor.producer):
            continue
        by_producer.setdefault(tensor.producer, []).append(tensor)
    return by_producer


def shortfall(graph):
    """Operators that store more bytes than they write, and how many more."""
    written = dict(zip(graph.names, graph.ops["write_bytes"].tolist(), strict=True))
    totals = {name: sum(t.bytes for t in kept) for name, kept in stashed(graph).items()}
    return {
        name: total - written[name]
        for name, total in totals.items()
        if name != "input" and total > written[name]
    }


def forward_graphs(name, fused):
    model = model_as_run(models.load(name), load_software("generic"), 1)
    return [
        layer.forward
        for layer in layer_graph(model, Strategy(), fusion="epilogues" if fused else "none").layers
    ]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_stored_tensors_are_written(name, fused):
    for graph in forward_graphs(name, fused):
        # The joined halves of a latent query or key, which no operator of the graph copies.
        joined = {"rotate-q", "kv-up"} if "deepseek" in name else set()
        assert set(shortfall(graph)) <= joined, graph.name


def test_a_fused_activation_writes_its_input_too():
    plain, fused = (
        next(g for g in forward_graphs("bertlarge", fused) if "block" in g.name)
        for fused in (False, True)
    )
    hidden = plain.ops["write_bytes"][plain.names.index("up")]
    assert fused.ops["write_bytes"][fused.names.index("up")] == 2 * hidden
    mask = next(t.bytes for t in fused.tensors if t.name == "ffn-dropout-mask")
    result = plain.ops["write_bytes"][plain.names.index("ffn-residual")]
    assert fused.ops["write_bytes"][fused.names.index("down")] == result + mask


def test_fusion_reads_no_more_and_writes_no_more_than_the_operators_alone():
    for name in NAMES:
        for plain, fused in zip(
            forward_graphs(name, False), forward_graphs(name, True), strict=True
        ):
            masks = sum(t.bytes for t in plain.tensors if t.name.endswith("dropout-mask"))
            for field, more in (("read_bytes", 0), ("write_bytes", masks)):
                assert fused.ops[field].sum() <= plain.ops[field].sum() + more


def test_a_fused_operator_costs_the_operations_of_its_function():
    graph = next(g for g in forward_graphs("bertlarge", True) if "block" in g.name)
    codes = {n: graph.ops["epilogue_functions"][i].tolist() for i, n in enumerate(graph.names)}
    gelu, dropout, add = (FUNCTIONS.index(name) for name in ("gelu", "dropout", "add"))
    assert codes["up"] == [gelu, 0, 0, 0]
    assert codes["down"] == [dropout, add, 0, 0]
    chip = presets.chip("phaze-tpuv4")
    at = graph.names.index("up")
    product, bias = graph.ops[at : at + 1].copy(), graph.ops[at : at + 1].copy()
    bias["epilogue"], bias["epilogue_functions"] = 1, 0
    both_s, bias_s = (operator_costs(chip, ops)[0].vector_s for ops in (product, bias))
    table = tuning_record(chip.tuning)["functions"]["ops_per_element"][0]
    assert both_s / bias_s == pytest.approx((table[gelu] + table[add]) / table[add])
