"""Every term of a plan by a few lines of arithmetic, on one tiny model and round-number fabrics."""

import pytest

from phaze_fast import models
from phaze_fast.hardware import Cluster, FlatFabric, Tier, TieredFabric
from phaze_fast.models import MixtureOfExperts, TransformerModel
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.planning import PlanSpec, predict
from phaze_fast.planning.sizes import _stand_ins, strategy_sizes
from phaze_fast.software import DEFAULT, load_software

TINY = TransformerModel(
    name="tiny", layers=4, hidden=64, heads=4, ffn=128, vocab=1000, seq=32, norm="rmsnorm",
    positions="rotary", qkv_bias=False, out_bias=False, ffn_bias=False, tied_embeddings=False,
)  # fmt: skip
BLOCK = 2 * 64 + 4 * 64 * 64 + 2 * 64 * 128  # norms, attention, feed-forward: 32,896 parameters
EMBEDDING, HEAD = 1000 * 64, 64 + 1000 * 64  # the head has the last norm
ALL = EMBEDDING + 4 * BLOCK + HEAD  # 259,648
HALF_BLOCK = 128 + (4 * 64 * 64 + 2 * 64 * 128) // 2  # of one of two tensor-parallel devices
HALF = 500 * 64 + 4 * HALF_BLOCK + 64 + 500 * 64  # 130,112
MESSAGE = 2 * 32 * 64  # bf16, 32 tokens of 64: 4,096 bytes
GRADIENT, WEIGHT, STATE = 4, 2, 12  # bytes of a parameter, Adam


def nodes(size, inside=1e9, between=1e8):
    return TieredFabric(
        name="nodes",
        tiers=(
            Tier(name="node", size=size, bandwidth_bytes_per_s=inside),
            Tier(name="cluster", bandwidth_bytes_per_s=between),
        ),
    )


def flat(rate):
    return FlatFabric(name="flat", bandwidth_bytes_per_s=rate)


PLAIN = load_software(DEFAULT).replace(gradient_stand_ins=False)
"""Without the empty gradients that Transformer Engine keeps."""


def found(fabric, model=TINY, chip="h100", **fields):
    widths = {name: fields[name] for name in ("tp", "pp", "dp", "cp") if name in fields}
    devices = 1
    for width in widths.values():
        devices *= width
    micro_batches = fields.pop("micro_batches", 1)
    batch = micro_batches * fields.get("dp", 1) * fields.get("micro_batch", 1)
    spec = PlanSpec(**{"global_batch": batch, "recompute": "none", "software": PLAIN, **fields})
    return predict(model, Cluster(devices=devices, fabric=fabric, chip=chip), spec)


def exactly(seconds):
    return pytest.approx(seconds, rel=1e-9)


# ---- gradients ----


def test_a_context_group_lies_as_far_apart_as_the_tensor_group_is_wide():
    """tp 2, cp 2 in nodes of 2: gradients are averaged by ranks 0 and 2, one in each node."""
    plan = found(nodes(2), tp=2, cp=2)
    assert plan.parts_s["data_comm"] == exactly(2 * 1 / 2 * GRADIENT * HALF / 1e8)
    near = found(nodes(4), tp=2, cp=2)  # all four in a node
    assert near.parts_s["data_comm"] == exactly(2 * 1 / 2 * GRADIENT * HALF / 1e9)


def test_context_groups_and_replicas_average_together():
    """cp 2, dp 2 in nodes of 2: ranks 0 to 3, half of the bytes over each of two ports."""
    v = GRADIENT * ALL
    plan = found(nodes(2), cp=2, dp=2)
    assert plan.parts_s["data_comm"] == exactly(2 * 1 / 2 * v / 1e9 + 2 * 1 / 2 * v / 2 / 1e8)


def test_gradients_of_context_groups_with_stages_between_replicas():
    """cp 2, pp 2, dp 2, stages inside: ranks 0, 1 and 4, 5 average; in nodes of 4, two in each."""
    fields = {"cp": 2, "pp": 2, "dp": 2, "rank_order": "stages-inside"}
    slow, fast = (found(nodes(4, 1e9, rate), **fields).time_s for rate in (1e8, 2e8))
    first_stage = GRADIENT * (EMBEDDING + 2 * BLOCK)
    assert slow - fast == exactly(2 * 1 / 2 * first_stage / 2 * (1 / 1e8 - 1 / 2e8))


def test_replicas_inside_average_in_a_node_and_send_over_the_border():
    """cp 2, pp 2, dp 2, replicas inside: ranks 0 to 3 average; stage 1 begins at rank 4."""
    fields = {"cp": 2, "pp": 2, "dp": 2, "rank_order": "replicas-inside"}
    slow, fast = (found(nodes(4, 1e9, rate), **fields).time_s for rate in (1e8, 2e8))
    there_and_back = 2 * MESSAGE / 2  # a context group has half of the tokens each
    assert slow - fast == pytest.approx(there_and_back * (1 / 1e8 - 1 / 2e8), rel=1e-7)


def experts(**fields):
    moe = MixtureOfExperts(experts=4, top_k=1, expert_ffn=32)
    return TINY.replace(layers=2, moe=moe, **fields)


EXPERTS = 2 * 2 * (2 * 64 * 32)  # two layers, two of four experts each: 16,384 parameters
DENSE = 2 * (128 + 4 * 64 * 64 + 64 * 4) + EMBEDDING + HEAD  # router included


def test_experts_are_averaged_by_the_replicas_that_hold_them():
    """ep 2, dp 4 in nodes of 2: experts by ranks 0 and 2, all else by 0 to 3."""
    plan = found(nodes(2), experts(), dp=4, ep=2)
    v = GRADIENT * DENSE
    dense = 2 * 1 / 2 * v / 1e9 + 2 * 1 / 2 * v / 2 / 1e8
    assert plan.parts_s["data_comm"] == exactly(dense + 2 * 1 / 2 * GRADIENT * EXPERTS / 1e8)


def test_experts_with_stages_between_replicas():
    """ep 2 of cp 2, dp 2, pp 2, nodes of 4: experts by ranks 0 and 4, the rest by 0, 1, 4, 5."""
    fields = {"cp": 2, "dp": 2, "ep": 2, "pp": 2, "rank_order": "stages-inside"}
    slow, fast = (found(nodes(4, 1e9, rate), experts(), **fields).time_s for rate in (1e8, 2e8))
    dense = GRADIENT * (EMBEDDING + 128 + 4 * 64 * 64 + 64 * 4)
    sync = 2 * 1 / 2 * (dense / 2 + GRADIENT * EXPERTS / 2) * (1 / 1e8 - 1 / 2e8)
    assert slow - fast == exactly(sync)


def test_all_but_a_last_bucket_is_hidden():
    """205 MB of gradients: what the backward pass cannot hide, and at least 100 MB."""
    wide = TINY.replace(hidden=512, ffn=512, vocab=50000, seq=1024, layers=1)
    fields = {"dp": 2, "micro_batch": 8}
    quick = found(flat(1e11), wide, **fields)
    parameters = 2 * 512 + 4 * 512**2 + 2 * 512**2 + 2 * 50000 * 512 + 512
    hidden = GRADIENT * parameters - 100e6  # bytes; 16 of 132 cores move them
    exposed = 100e6 + hidden * (1 - 1 / 1.14)
    assert quick.parts_s["data_comm"] == exactly(2 * 1 / 2 * exposed / 1e11)
    slow, slower = (found(flat(rate), wide, **fields) for rate in (1e9, 0.5e9))
    more = GRADIENT * parameters * (1 / 0.5e9 - 1 / 1e9)
    assert slower.parts_s["data_comm"] - slow.parts_s["data_comm"] == exactly(more)


# ---- ZeRO and the optimiser ----


def test_the_optimiser_reads_and_writes_its_state():
    plan = found(flat(1e9), chip="tpuv4")
    rate = 1.2e12  # bytes/s of HBM
    each = 2 * STATE + GRADIENT + WEIGHT
    assert plan.parts_s["optimizer"] == exactly(ALL * each / rate)
    shared = found(flat(1e9), chip="tpuv4", dp=2, zero=1)
    assert shared.parts_s["optimizer"] == exactly(ALL / 2 * each / rate)


@pytest.mark.parametrize("zero", [1, 2])
def test_gradients_are_scattered_and_weights_gathered(zero):
    plan = found(flat(1e9), dp=2, zero=zero)
    each = 1 / 2 * (GRADIENT + WEIGHT) * ALL / 1e9
    tail = plan.parts_s["data_comm"] + plan.parts_s["optimizer"]
    optimizer = ALL / 2 * (2 * STATE + GRADIENT + WEIGHT)
    h100 = 3.35e12 * Cluster(devices=1, fabric="dgx-h100", chip="h100").chip.tuning.hbm_share
    if zero == 1:
        assert tail == exactly(each + optimizer / h100)
    waits = plan.time_s - plan.stages[0].load_s
    assert waits == pytest.approx(each + optimizer / h100, rel=1e-9)


def test_zero_2_scatters_gradients_of_every_micro_batch():
    """At 1 MB/s the backward pass of every layer is its reduce-scatter."""
    slow, slower = (found(flat(rate), dp=2, zero=2).stages[0].load_s for rate in (1e6, 0.5e6))
    assert slower - slow == exactly(1 / 2 * GRADIENT * ALL / 1e6)


def test_zero_3_gathers_weights_in_both_passes():
    """At 1 MB/s a micro-batch is two all-gathers and a reduce-scatter, and nothing else."""
    plan = found(flat(1e6), dp=2, zero=3, micro_batches=3)
    each = 1 / 2 * (WEIGHT + WEIGHT + GRADIENT) * ALL / 1e6
    assert plan.stages[0].load_s == exactly(each)
    pipeline = plan.time_s - plan.parts_s["optimizer"] - 1 / 2 * GRADIENT * ALL / 1e6
    assert pipeline == pytest.approx(3 * each, rel=1e-9)


# ---- messages ----


def test_a_message_crosses_the_border_between_ranks_7_and_8():
    """Nine stages in nodes of 8: seven messages each way inside, one each way between."""
    model = TINY.replace(layers=9)
    times = {
        rates: found(nodes(8, *rates), model, pp=9).time_s
        for rates in ((1e6, 1e5), (1e6, 2e5), (2e6, 1e5))
    }
    assert times[1e6, 1e5] - times[1e6, 2e5] == exactly(2 * MESSAGE * (1 / 1e5 - 1 / 2e5))
    assert times[1e6, 1e5] - times[2e6, 1e5] == exactly(7 * 2 * MESSAGE * (1 / 1e6 - 1 / 2e6))


def test_a_micro_batch_waits_for_messages_that_it_receives():
    """Two stages: each receives one message a micro-batch, of half the rows for each of tp 2."""
    slow, fast = (found(nodes(2, 1e9, rate), tp=2, pp=2) for rate in (1e6, 2e6))
    for stage, quicker in zip(slow.stages, fast.stages, strict=True):
        saved = MESSAGE / 2 * (1 / 1e6 - 1 / 2e6)
        assert stage.load_s - quicker.load_s == exactly(saved)


def test_an_encoder_is_sent_to_every_stage_that_reads_it_once():
    """One encoder block, four decoder blocks by three: the last stage reads both sources."""
    model = TINY.replace(encoder_layers=1)
    times = [
        found(flat(rate), model, pp=3, stages=(2, 2, 3)).stages for rate in (1e6, 2e6)
    ]  # embedding and encoder | decoders 1, 2 | decoders 3, 4 and head
    received = [0 + 1, 1 + 1, 2 + 0]  # forward and backward: what is read after it comes back once
    for count, slow, fast in zip(received, *times, strict=True):
        assert slow.load_s - fast.load_s == exactly(count * MESSAGE * (1 / 1e6 - 1 / 2e6))


def test_chunks_send_round_the_pipeline():
    """Two stages of two chunks: each stage receives two messages forward or back, round or not."""
    fields = {"pp": 2, "schedule": "interleaved", "vpp": 2, "micro_batches": 2}
    slow, fast = (found(flat(rate), **fields) for rate in (1e6, 2e6))
    for stage, quicker, messages in zip(slow.stages, fast.stages, (1 + 2, 2 + 1), strict=True):
        assert stage.load_s - quicker.load_s == exactly(messages * MESSAGE * (1 / 1e6 - 1 / 2e6))


def test_both_ends_exchange_the_gradients_of_a_tied_embedding():
    """No replicas, one micro-batch: a message there and back, and the table's gradients."""
    model = TINY.replace(tied_embeddings=True)
    slow, fast = (found(flat(rate), model, pp=2).time_s for rate in (1e6, 2e6))
    table = 2 * 1 / 2 * GRADIENT * 1000 * 64
    assert slow - fast == exactly((table + 2 * MESSAGE) * (1 / 1e6 - 1 / 2e6))
    alone = found(flat(1e6), model, pp=1)
    assert alone.parts_s["data_comm"] == 0
    held = found(flat(1e6), model, pp=2).stages[1].memory["weights"]
    assert held == WEIGHT * (2 * BLOCK + 64 + 1000 * 64)


# ---- bytes ----


def test_state_of_a_device_by_hand():
    for zero, weights, gradients, state in (
        (0, WEIGHT, GRADIENT, STATE),
        (1, WEIGHT, GRADIENT, STATE / 2),
        (2, WEIGHT, GRADIENT / 2, STATE / 2),
        (3, WEIGHT / 2, GRADIENT / 2, STATE / 2),
    ):
        memory = found(flat(1e9), dp=2, zero=zero).memory
        held = memory["weights"], memory["gradients"], memory["optimizer"]
        assert held == exactly((weights * ALL, gradients * ALL, state * ALL))


def test_shared_experts_by_hand():
    """dp 4, ep 2, cp 2: eight shards of all but experts, of which four devices hold each."""
    memory = found(flat(1e9), experts(), dp=4, ep=2, cp=2, zero=1).memory
    assert memory["optimizer"] == exactly(STATE * (DENSE / 8 + EXPERTS / 4))


def test_buffers_by_hand():
    plain = found(flat(1e9)).memory["communication"]
    assert plain == 0
    gathered = found(flat(1e9), tp=2).memory["communication"]
    assert gathered == MESSAGE  # all rows, where devices hold half of them each
    assert found(flat(1e9), tp=2, sequence_parallel=False).memory["communication"] == 0
    piped = found(flat(1e9), pp=2).memory["communication"]
    assert piped == 2 * MESSAGE
    both = found(flat(1e9), pp=2, tp=2).memory["communication"]
    assert both == MESSAGE + 2 * MESSAGE / 2
    one, other = (
        strategy_sizes(TINY, Strategy(sequence_parallel=rows), ("none",)) for rows in (True, False)
    )
    assert one.record == other.record  # one device has all rows


@pytest.mark.parametrize(("zero", "each"), [(1, 0), (2, GRADIENT), (3, WEIGHT + GRADIENT)])
def test_two_layers_are_whole_where_replicas_shard_them(zero, each):
    """Weights of the running block and the next one, gradients of it and the previous one."""
    plan = found(flat(1e9), dp=2, zero=zero)
    assert plan.memory["communication"] == 2 * each * BLOCK * (1 - 1 / 2)
    late = PLAIN.replace(resident_gradients=False)
    kept = found(flat(1e9), dp=2, zero=zero, software=late).memory["communication"]
    assert kept == 2 * (WEIGHT if zero == 3 else 0) * BLOCK * (1 - 1 / 2)


def test_layers_lose_the_cores_that_move_weights_and_gradients():
    """16 of an H100's 132 cores gather weights (ZeRO 3) and reduce gradients (ZeRO 2 and 3).

    Of every layer that computes longer than its state moves, the cores are missed while it moves.
    """
    wide = TINY.replace(hidden=1024, ffn=4096, vocab=50000, seq=1024, heads=16, layers=2)
    block = 2 * 1024 + 4 * 1024**2 + 2 * 1024 * 4096
    parameters = 2 * block + 2 * 50000 * 1024 + 1024
    alone, beside = (
        [found(flat(rate), wide, dp=2, zero=z, micro_batch=16).stages[0].load_s for z in range(4)]
        for rate in (1e18, 1e14)
    )
    lost = [after - before for after, before in zip(beside, alone, strict=True)]
    reduced, gathered = (1 / 2 * each * parameters * (1e-14 - 1e-18) for each in (GRADIENT, WEIGHT))
    expected = [0.0, 0.0, reduced, reduced + 2 * gathered]
    assert lost == pytest.approx([(1 - 1 / 1.14) * s for s in expected], rel=1e-6)


def test_stand_ins_by_hand():
    """Transformer Engine keeps an empty bf16 gradient of each shape of a block's weights."""
    assert found(flat(1e9), software=DEFAULT).memory["communication"] == 2 * BLOCK


def test_all_experts_of_a_device_share_a_stand_in():
    """8 experts on 2 devices: those of a device share one gradient of each shape."""
    graph = layer_graph(models.load("mixtral-8x7b"), Strategy(ep=2))
    layer = next(layer for layer in graph.layers if layer.expert_parameters)
    others = layer.device_parameters - layer.expert_parameters
    assert _stand_ins(layer, graph) == 2 * (others + layer.expert_parameters / 4)


def test_micro_batches_in_flight_by_hand():
    """Where all is recomputed a block keeps its input; 1F1B, zero-bubble, two chunks a stage."""
    fields = {"pp": 2, "recompute": "full", "micro_batches": 4}
    last = [
        found(flat(1e9), **fields, **schedule).stages[1].memory["activations"]
        for schedule in ({}, {"schedule": "zero-bubble"}, {"schedule": "interleaved", "vpp": 2})
    ]
    assert last == [2 * MESSAGE, 2 * 2 * MESSAGE, 3 / 2 * 2 * MESSAGE]


def test_fragmentation_by_hand():
    memory = found(flat(1e9), pp=2, recompute="full").stages[1].memory
    moving = memory["activations"] + memory["recompute"] + memory["logits"] + 2 * MESSAGE
    assert memory["fragmentation"] == exactly(0.03 * moving)


@pytest.mark.parametrize(("optimizer", "gathered"), [("adam", 2), ("adam-fp32", 2)])
@pytest.mark.parametrize("layers", [1, 2])
def test_whole_weights_are_in_the_format_in_which_they_are_gathered(optimizer, gathered, layers):
    """fp32 weights are cast before they are gathered; two blocks are whole unless none is early."""
    software = PLAIN.replace(resident_gradients=False, whole_layers=layers)
    memory = found(flat(1e9), dp=4, zero=3, optimizer=optimizer, software=software).memory
    assert memory["communication"] == exactly(layers * gathered * BLOCK * 3 / 4)


def test_rows_that_are_stored_in_shares_are_whole_in_products():
    """As with sequence parallelism in bytes, as without it in seconds."""
    plain = {"tp": 2, "recompute": "full", "micro_batches": 2, "pp": 2}
    whole, stored, split = (
        found(flat(1e9), **plain, sequence_parallel=rows, software=software)
        for rows, software in (
            (False, PLAIN),
            (False, PLAIN.replace(split_storage=True)),
            (True, PLAIN),
        )
    )
    assert stored.time_s == whole.time_s != split.time_s
    first = [plan.stages[0].memory for plan in (whole, stored, split)]
    assert first[0]["activations"] - first[1]["activations"] == 2 * 2 * MESSAGE / 2  # of 2 blocks
    assert first[1]["activations"] == first[2]["activations"]
    assert first[1]["recompute"] == first[2]["recompute"] < first[0]["recompute"]
    gathered = first[1]["communication"] - first[0]["communication"]
    assert gathered == MESSAGE
    odd = {**plain, "seq": 31, "sequence_parallel": False}
    kept = found(flat(1e9), **odd, software=PLAIN.replace(split_storage=True))
    assert kept.memory == found(flat(1e9), **odd).memory


# ---- what is recomputed ----


def test_as_little_is_recomputed_as_fits():
    """Everything fits; at 1 GB/s the experts' gradients take longer than any backward pass."""
    moe = MixtureOfExperts(experts=8, top_k=1, expert_ffn=1024, dense_layers=1)
    plan = found(flat(1e9), TINY.replace(moe=moe), dp=2, pp=2, zero=2, recompute="auto")
    assert plan.over_bytes == 0
    assert [stage.recompute for stage in plan.stages] == ["none", "none"]
    assert plan.parts_s["recompute"] == 0
