"""Operator graphs: FLOPs and kept bytes against closed forms, measured blocks, and laws."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refusal

from phaze_fast import _core, models
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.memory import Pipeline, stage_row
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import GROUPS, KINDS, UNITS, Strategy, layer_graph, reasons


def gpt(hidden, heads, seq, layers=2, vocab=512):
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden}
    sizes |= {"vocab": vocab, "seq": seq, "max_positions": seq}
    return TransformerModel(name="gpt", **sizes, dropout=True, attention="eager", fused_qkv=True)


def block(model, **strategy):
    return next(x for x in layer_graph(model, Strategy(**strategy)).layers if "block" in x.kind)


# ---- closed forms ----

sizes = st.tuples(
    st.sampled_from([1, 2, 4, 8]),  # t
    st.integers(1, 4),  # heads per device
    st.integers(1, 24).map(lambda w: 8 * w),  # head width
    st.integers(1, 40).map(lambda s: 16 * s),  # s
    st.integers(1, 6),  # b
)


@given(sizes)
def test_kept_bytes_are_the_closed_forms_of_korthikanti(size):
    t, per_device, width, s, b = size
    a = t * per_device
    h = a * width
    model = gpt(h, a, s)
    sbh, scores = s * b * h, 5 * a * s * s * b

    def kept(recompute="none", **strategy):
        graph = block(model, micro_batch=b, **strategy).forward
        return graph.stashed_bytes(recompute, statistics=False)

    assert kept() == 34 * sbh + scores
    assert t * kept(tp=t) == 10 * t * sbh + 24 * sbh + scores
    if t > 1:
        split = {"tp": t, "sequence_parallel": True}
        assert t * kept(**split) == 34 * sbh + scores
        assert t * kept("selective", **split) == 34 * sbh
        assert t * kept("full", **split) == 2 * sbh
    assert kept("selective") == 34 * sbh
    assert kept("full") == 2 * sbh
    flash = block(model.replace(attention="flash"), micro_batch=b).forward
    assert flash.stashed_bytes(statistics=False) == 34 * sbh


@given(sizes, st.integers(1, 3))
def test_the_head_keeps_4sbh_and_4sbv(size, layers):
    """Korthikanti 2022, section 4.3: final norm and projection inputs, and fp32 logits."""
    t, per_device, width, s, b = size
    h, v = t * per_device * width, 512 * t
    model = gpt(h, t * per_device, s, layers, vocab=v)
    graph = layer_graph(model, Strategy(micro_batch=b, tp=t, sequence_parallel=t > 1))
    head = graph.layers[-1].forward
    assert t * head.stashed_bytes(statistics=False) == 4 * s * b * h + 4 * s * b * v
    first = graph.layers[0].forward
    assert t * first.stashed_bytes(statistics=False) == s * b * h  # the dropout mask


@given(sizes, st.integers(1, 5), st.integers(1, 40).map(lambda v: 64 * v))
def test_flops_are_equation_3_of_narayanan(size, layers, vocab):
    """72 B l s h^2 (1 + s/(6h) + V/(12 l h)), forward and backward; 96 with the forward again."""
    t, per_device, width, s, b = size
    a = t * per_device
    h = a * width
    model = gpt(h, a, s, layers, vocab * t)
    v = model.vocab
    exact = 72 * b * layers * s * h * h + 12 * b * layers * s * s * h + 6 * b * s * h * v
    graph = layer_graph(model, Strategy(micro_batch=b))
    assert graph.flops == pytest.approx(exact, rel=1e-12)
    again = sum(x.count * x.forward.flops for x in graph.layers if "block" in x.kind)
    recomputed = 96 * b * layers * s * h * h + 16 * b * layers * s * s * h + 6 * b * s * h * v
    assert graph.flops + again == pytest.approx(recomputed, rel=1e-12)
    shared = layer_graph(model, Strategy(micro_batch=b, tp=t))
    assert t * shared.flops == pytest.approx(exact, rel=1e-12)


# ---- graphs ----

WIDTHS = [
    Strategy(),
    Strategy(tp=2),
    Strategy(tp=4, sequence_parallel=True, micro_batch=2),
    Strategy(cp=2),
]


@pytest.mark.parametrize("fusion", ["none", "full"])
def test_every_preset_builds_sound_graphs(fusion):
    for name in models.names():
        model = models.load(name)
        widths = [strategy for strategy in WIDTHS if not reasons(model, strategy)]
        assert widths
        for graph in (layer_graph(model, strategy, fusion) for strategy in widths):
            assert sum(layer.count for layer in graph.layers) == len(graph.order)
            assert sum(x.count * x.parameters for x in graph.layers) == model.parameters()
            for layer in graph.layers:
                check(layer.forward)
                check(layer.backward)


def check(graph):
    assert len(graph.names) == len(set(graph.names)) == len(graph.ops)
    assert graph.ops.dtype == _core.OPERATOR_DTYPE
    assert graph.indptr[0] == 0
    assert graph.indptr[-1] == len(graph.indices)
    for a, b in graph.edges():
        assert a < b, "operators stand in topological order"
    for name, op in zip(graph.names, graph.ops, strict=True):
        network = UNITS[op["unit"]] == "NET"
        assert network == (op["collective"] >= 0) == (op["payload_bytes"] > 0), name
        assert network == (GROUPS[op["group"]] != "none"), name
        if not network:
            assert min(op[n] for n in ("m", "n", "read_bytes", "write_bytes")) > 0, name
        if "gemm" in KINDS[op["kind"]]:
            assert op["flops"] == 2.0 * op["b"] * op["m"] * op["n"] * op["k"], name
    producers = {tensor.producer for tensor in graph.tensors}
    assert producers <= {*graph.names, "input"}
    with pytest.raises(ValueError, match="read-only"):
        graph.ops["m"] = 1


def test_a_gpt_block_operator_by_operator():
    layer = block(gpt(64, 4, 16), micro_batch=2)
    assert layer.forward.names == (
        "attention-norm", "qkv", "scores", "softmax", "score-dropout", "mix", "proj",
        "attention-dropout", "attention-residual",
        "ffn-norm", "up", "activation", "down", "ffn-dropout", "ffn-residual",
    )  # fmt: skip
    assert layer.forward.gemms() == [
        (1, 32, 64, 192), (8, 16, 16, 16), (8, 16, 16, 16), (1, 32, 64, 64), (1, 32, 64, 256), (1, 32, 256, 64),
    ]  # fmt: skip
    edges = {(layer.forward.names[a], layer.forward.names[b]) for a, b in layer.forward.edges()}
    assert ("attention-residual", "ffn-residual") in edges
    assert ("qkv", "mix") in edges
    back = layer.backward
    arrows = {(back.names[a], back.names[b]) for a, b in back.edges()}
    assert ("d-down-x", "d-activation") in arrows
    assert ("d-activation", "d-up-w") in arrows
    assert ("d-ffn-norm", "d-attention-dropout") in arrows
    assert not any(a.endswith("-w") for a, _ in arrows), "weight gradients feed nothing"


def test_gradients_of_products_move_the_right_bytes():
    model = gpt(64, 4, 16)
    back = block(model).backward
    ops = dict(zip(back.names, back.ops, strict=True))
    square, slim = 2 * 4 * 16 * 16, 2 * 4 * 16 * 16  # 4 heads, 16 x 16 scores, 16 wide
    for name in ("d-scores-left", "d-scores-right", "d-mix-left", "d-mix-right"):
        assert ops[name]["read_bytes"] == square + slim
    x, w = ops["d-up-x"], ops["d-up-w"]
    assert (x["m"], x["k"], x["n"]) == (16, 256, 64)
    assert (w["m"], w["k"], w["n"]) == (64, 16, 256)
    assert x["read_bytes"] == 2 * (16 * 256 + 64 * 256)
    assert x["write_bytes"] == 2 * 16 * 64
    assert w["read_bytes"] == 2 * (16 * 64 + 16 * 256)
    assert w["write_bytes"] == 2 * 64 * 256


def test_megatron_collectives():
    """Two all-reduces forward and two backward; with sequence parallelism, gathers and scatters."""

    def collectives(graph):
        names = [_core.COLLECTIVE_OPS[c] for c in graph.ops["collective"] if c >= 0]
        return Counter(names)

    model = gpt(64, 4, 16)
    payload = 2 * 16 * 64
    plain = block(model, tp=4)
    assert collectives(plain.forward) == collectives(plain.backward) == {"all-reduce": 2}
    split = block(model, tp=4, sequence_parallel=True)
    assert collectives(split.forward) == {"all-gather": 2, "reduce-scatter": 2}
    # inputs of the column-split products are gathered once more for their weight gradients
    assert collectives(split.backward) == {"all-gather": 4, "reduce-scatter": 2}
    for layer in (plain, split):
        for graph in (layer.forward, layer.backward):
            sent = graph.ops["payload_bytes"]
            assert set(sent[sent > 0].tolist()) == {payload}
    assert not collectives(block(model).forward)
    assert not collectives(block(model).backward)


def test_experts():
    model = models.load("mixtral-8x7b")
    layer = block(model, ep=4, seq=1024)
    names = layer.forward.names
    up = layer.forward.ops[names.index("expert-up")]
    # 1,024 tokens x 2 experts over 8 experts, from 4 devices
    assert (up["b"], up["m"], up["k"], up["n"]) == (2, 1024, 4096, 14336)
    exchanged = layer.forward.ops[names.index("dispatch")]
    assert _core.COLLECTIVE_OPS[exchanged["collective"]] == "all-to-all"
    assert exchanged["payload_bytes"] == 2 * 1024 * 2 * 4096
    arrows = {(names[a], names[b]) for a, b in layer.forward.edges()}
    assert {("router", "dispatch"), ("router", "weigh"), ("combine", "weigh")} <= arrows
    assert "d-router-w" in layer.backward.names
    alone = block(model, seq=1024)
    assert alone.forward.flops == pytest.approx(layer.forward.flops)
    assert "dispatch" not in alone.forward.names
    one_expert = model.ffn_parameters(model.moe.expert_ffn)
    assert alone.device_parameters - layer.device_parameters == 6 * one_expert
    tight = model.replace(moe=model.moe.replace(capacity_factor=1.5))
    assert block(tight, seq=1024).forward.flops > 1.3 * alone.forward.flops


@pytest.mark.parametrize(
    ("moves", "width", "added"),
    [(0, 4, []), (1, 4, ["permute"]), (2, 4, ["permute", "sort", "unsort"]), (2, 1, ["permute"]),
     (2, 8, ["permute"])],
)  # fmt: skip
def test_rows_are_put_in_another_order_on_the_way_to_experts(moves, width, added):
    model = models.load("mixtral-8x7b")
    plain = block(model, ep=width, seq=1024)
    moved = block(model.replace(moe=model.moe.replace(moves=moves)), ep=width, seq=1024)
    assert sorted(set(moved.forward.names) - set(plain.forward.names)) == sorted(added)
    assert moved.forward.flops == plain.forward.flops
    assert moved.forward.stashed_bytes() == plain.forward.stashed_bytes()
    each = 2 * 1024 * 4096  # bytes of the rows of a device
    for name in added:
        read, written = (1 if name == "permute" else 2) * each, 2 * each  # each goes to 2 experts
        forward = op(moved.forward, name)
        backward = op(moved.backward, f"d-{name}")
        assert (forward["read_bytes"], forward["write_bytes"]) == (read, written)
        assert (backward["read_bytes"], backward["write_bytes"]) == (written, read)
    order = [n for n in moved.forward.names if n in (*added, "dispatch", "expert-up", "combine")]
    expected = ["permute", "dispatch", "sort", "expert-up", "unsort", "combine"]
    assert order == [n for n in expected if n in moved.forward.names]


def test_encoder_decoder_is_no_chain():
    graph = layer_graph(models.load("t5-small"))
    assert [(x.kind, x.count) for x in graph.layers] == [
        ("embedding", 1), ("encoder-block", 6), ("decoder-block", 6), ("head", 1),
    ]  # fmt: skip
    assert not graph.is_chain
    # position 6 is the last encoder block; 7..12 are the decoder's
    assert {b for a, b in graph.edges if a == 6} == {7, 8, 9, 10, 11, 12}
    assert "cross-proj" in graph.layers[2].forward.names
    assert layer_graph(models.load("gpt2")).is_chain


def test_context_parallel_shares_rows_and_gathers_keys_and_values():
    model = models.load("llama2-7b")
    one, four = block(model), block(model, cp=4)
    assert four.forward.flops == pytest.approx(one.forward.flops / 4)
    gather = op(four.forward, "kv-gather")
    assert gather["payload_bytes"] == 2 * 2 * 4096 * 4096
    assert GROUPS[gather["group"]] == "context"


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "t5-small", "mixtral-8x7b", "vit-b16"])
def test_fusion_keeps_work_and_memory(name):
    model = models.load(name)
    plain, fused = layer_graph(model), layer_graph(model, fusion="epilogues")
    assert fused.flops == plain.flops
    for a, b in zip(plain.layers, fused.layers, strict=True):
        for recompute in ("none", "selective"):
            assert a.forward.stashed_bytes(recompute) == b.forward.stashed_bytes(recompute)
        assert len(b.forward) <= len(a.forward)
        traffic = [
            g.ops["read_bytes"].sum() + g.ops["write_bytes"].sum() for g in (a.forward, b.forward)
        ]
        assert traffic[1] <= traffic[0]
    names = fused.layers[1].forward.names
    assert "activation" not in names
    up = fused.layers[1].forward
    assert (up.ops["epilogue"] > 0).any()


# ---- rules ----


@pytest.mark.parametrize(
    ("name", "strategy", "reason"),
    [
        ("gpt2", {"tp": 4}, "tp: 4 does not divide 25 heads"),
        ("llama3-8b", {"tp": 64}, "tp: 64 does not divide 32 heads"),
        ("qwen2-0.5b", {"tp": 7}, "neither divides 2 key/value heads nor is a multiple"),
        ("llama2-7b", {"cp": 3}, "cp: 3 does not divide the sequence of 4096"),
        ("llama2-7b", {"tp": 8, "sequence_parallel": True, "seq": 12}, "sequence_parallel: 8 devices do not divide 12 rows"),
        ("mixtral-8x7b", {"ep": 3}, "ep: 3 does not divide 8 experts"),
        ("llama2-7b", {"ep": 2}, "llama2-7b has no experts"),
        ("gpt2", {"seq": 2048}, "seq: 2048 is more than the 1024 positions of gpt2"),
    ],
)  # fmt: skip
def test_impossible_widths_say_why(name, strategy, reason):
    model, wanted = models.load(name), Strategy(**strategy)
    assert any(reason in text for text in reasons(model, wanted))
    assert refusal(layer_graph, model, wanted, error=InfeasibleError).startswith(f"{name}: ")


@pytest.mark.parametrize("tp", [8, 16])
def test_key_value_heads_are_replicated_beyond_their_number(tp):
    """8 key/value heads over 16 devices: each device holds one, two devices hold the same."""
    model = models.load("llama3-8b")
    graph = block(model, tp=tp).forward
    assert op(graph, "k")["n"] == model.head_width


# ---- laws ----


@settings(max_examples=60)
@given(
    st.sampled_from(
        ["gpt2", "llama3-8b", "bertlarge", "mixtral-8x7b", "t5-base", "megatrongpt2-72"]
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.sampled_from(["none", "selective", "full"]),
)
def test_kept_bytes_fall_with_width_and_recomputation(name, t, split, mode):
    model = models.load(name).replace(attention="eager")
    strategy = Strategy(tp=t, sequence_parallel=split)
    assume(not reasons(model, strategy))
    narrow, wide = layer_graph(model), layer_graph(model, strategy)
    for a, b in zip(narrow.layers, wide.layers, strict=True):
        assert b.forward.stashed_bytes(mode) <= a.forward.stashed_bytes(mode)
        kept = [b.forward.stashed_bytes(m) for m in ("none", "selective", "full")]
        assert kept == sorted(kept, reverse=True)


def replicated(model, kind):
    """Parameters of a layer that every tensor-parallel device holds: norms, row-wise biases, tables."""
    norm, h = model.norm_parameters, model.hidden
    biases = (model.out_bias + model.ffn_bias) * h
    if kind == "embedding":
        return model.parameters_by_part()["embedding"] - model.vocab * h
    if kind == "head":
        stacks = 2 if model.encoder_layers else 1
        transform = h * (h + 1) + norm if model.head == "mlm" else 0
        return stacks * norm * model.final_norm + transform
    if kind == "moe-block":
        return 2 * norm + model.out_bias * h + h * model.moe.experts
    cross = norm + model.out_bias * h if kind == "decoder-block" else 0
    return 2 * norm + biases + cross


@pytest.mark.parametrize("t", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "name", ["megatronbert", "gpt3-175b", "llama3-8b", "qwen2-72b", "mixtral-8x7b", "t5-11b"]
)
def test_shares_of_all_devices_add_up_to_the_model(name, t):
    model = models.load(name)
    for layer in layer_graph(model, Strategy(tp=t)).layers:
        copies = (t - 1) * replicated(model, layer.kind)
        assert t * layer.device_parameters == layer.parameters + copies, layer.kind


def test_any_subset_of_operators_can_be_recomputed():
    graph = block(gpt(64, 4, 16)).forward
    by_maker = Counter()
    for tensor in graph.tensors:
        by_maker[tensor.producer] += tensor.bytes
    whole = graph.stashed_bytes()
    for name in graph.names:
        assert graph.stashed_bytes([name]) == whole - by_maker[name]
    assert graph.stashed_bytes(graph.names) == graph.stashed_bytes("full") == by_maker["input"]
    said = refusal(graph.stashed_bytes, ["activaton"], error=InvalidInputError)
    assert "'activaton' is unknown; did you mean 'activation'" in said
    assert "did you mean 'selective'" in refusal(graph.stashed_bytes, "selectiv")


def test_recomputing_what_is_needed_leaves_the_last_product_out():
    """Measured on an H200 with torchtitan's block: 908 MB kept of 16,384 tokens by its policy."""
    graph = block(models.load("llama3-8b").replace(seq=8192), micro_batch=2).forward
    left_out = set(graph.names) - graph.recomputed("needed")
    assert left_out == {"down", "ffn-residual"}
    assert graph.stashed_bytes("needed") == graph.stashed_bytes("full")
    policy = "norms+activations+gated-product+alternate-products"
    assert graph.stashed_bytes(policy, statistics=False) == pytest.approx(908e6, rel=0.01)


def test_layers_repeat():
    """One layer times L is the model of L layers, ends apart."""
    one, many = layer_graph(gpt(64, 4, 16, 1)), layer_graph(gpt(64, 4, 16, 9))
    a, b = one.layers[1], many.layers[1]
    assert (a.count, b.count) == (1, 9)
    assert a.forward.ops.tobytes() == b.forward.ops.tobytes()
    assert a.backward.ops.tobytes() == b.backward.ops.tobytes()
    ends = sum(x.forward.flops + x.backward.flops for x in one.layers if "block" not in x.kind)
    assert many.flops - ends == pytest.approx(9 * (one.flops - ends), rel=1e-14)
    assert np.array_equal(a.forward.indptr, b.forward.indptr)


# ---- single values by hand ----


def op(graph, name):
    return graph.ops[graph.names.index(name)]


def test_fused_attention_computes_its_scores_again_backward():
    layer = block(models.load("llama2-7b"))
    forward, backward = op(layer.forward, "attention"), op(layer.backward, "d-attention")
    assert forward["flops"] == 4.0 * 32 * 4096 * 4096 * 128
    assert backward["flops"] == 2.5 * forward["flops"]


def test_nothing_is_fused_onto_a_product_that_others_read():
    """One QKV projection feeds the rotation of Q, that of K, and attention: none can join it."""
    model = models.load("llama2-7b").replace(fused_qkv=True)
    joined = layer_graph(model, fusion="epilogues").layers[1].forward
    assert {"qkv", "rotate-q", "rotate-k"} <= set(joined.names)
    assert op(joined, "qkv")["epilogue"] == 0
    apart = layer_graph(models.load("llama2-7b"), fusion="epilogues").layers[1].forward
    assert "rotate-q" not in apart.names
    assert op(apart, "q")["epilogue"] == 1


def test_the_loss_exchanges_three_numbers_a_token_and_a_vocabulary_is_padded():
    graph = layer_graph(models.load("gpt2-small"), Strategy(tp=2, seq=128))
    assert op(graph.layers[-1].forward, "loss-reduce")["payload_bytes"] == 3 * 4 * 128
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


@pytest.mark.parametrize("name", ["deepseek-v3", "llama3-8b", "gemma3-1b"])
def test_predicting_a_further_token_adds_a_block_a_projection_and_logits(name):
    model = models.load(name)
    further = model.replace(mtp_layers=2)
    graph, more = layer_graph(model), layer_graph(further)
    for own, record in ((graph, model), (more, further)):
        assert sum(layer.count * layer.parameters for layer in own.layers) == record.parameters()
        assert [layer.count for layer in own.layers][1:-1] == [
            layer.count for layer in graph.layers
        ][1:-1]
    heads = [own.layers[-1] for own in (graph, more)]
    block, rows, hidden = graph.layers[graph.order[-2]], model.seq, model.hidden
    added = block.forward.flops + 2.0 * rows * hidden * (2 * hidden + model.vocab)
    assert heads[1].forward.flops - heads[0].forward.flops == pytest.approx(2 * added, rel=1e-12)
    ratio = heads[0].forward.flops / (heads[0].forward.flops + heads[0].backward.flops)
    assert 0.25 < ratio < 0.4
    stored = heads[1].forward.stashed_bytes() - heads[0].forward.stashed_bytes()
    assert stored > 2 * (block.forward.stashed_bytes() + 4 * rows * model.vocab)
