"""Hybrid sharding, ways to attend, experts' widths and DualPipe: what they must do, and refusals."""

import pytest

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.cli.main import main
from phaze_fast.cost import estimate_costs, message_batch, roofline_work_s
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import FlatFabric, Tier, TieredFabric, chip_records
from phaze_fast.opgraph import CONTEXT_KINDS, GROUPS, Strategy, context_code, layer_graph, reasons
from phaze_fast.planning import predict_batch
from phaze_fast.planning.prediction import evaluated
from phaze_fast.planning.sizes import strategy_sizes
from phaze_fast.planning.times import least_work_s
from phaze_fast.software import DEFAULT, chip_as_run, load_software

WIDE = pf.Cluster(devices=64, fabric="dgx-h100", chip="h100")
NODE = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
FSDP = {"dp": 64, "zero": 3, "global_batch": 64, "recompute": "full"}
MIXTURE = models.load("mixtral-8x7b").replace(layers=8)
LLAMA = models.load("llama3-8b").replace(layers=8)
ENDS = {"embedding", "head"}


def ops_of(graph, group, backward=False):
    """Collectives of a block over a group: (name, bytes)."""
    block = next(layer for layer in graph.layers if layer.kind not in ENDS)
    own = block.backward if backward else block.forward
    wanted = own.ops["group"] == GROUPS.index(group)
    names = [name for name, keep in zip(own.names, wanted, strict=True) if keep]
    return dict(zip(names, own.ops["payload_bytes"][wanted].tolist(), strict=True))


# ---- hybrid sharding ----


def test_one_group_of_all_replicas_is_no_hybrid():
    plain = pf.predict("llama2-7b", WIDE, FSDP)
    assert pf.predict("llama2-7b", WIDE, {**FSDP, "shard": 64}) == plain
    assert plain.shard == 64
    assert not plain.hybrid


def test_gathers_inside_a_node_are_faster_and_plan_finds_them():
    short = {**FSDP, "seq": 512, "global_batch": 512}  # weights are gathered 16 times a step
    whole, inside = (
        pf.predict("llama2-7b", WIDE, {**short, "shard": s}).parts_s["data_comm"] for s in (64, 8)
    )
    assert inside < 0.95 * whole
    step = pf.Training(global_batch=512, seq=512, zero=3, tp=1, pp=1, micro_batch=1)
    found = pf.plan("llama2-7b", WIDE, step)
    assert found.best.hybrid
    assert found.best.shard == 8
    assert "3 (among all replicas or those of a node)" in found.space
    all_share = pf.plan("llama2-7b", WIDE, step.replace(shard="all")).best
    assert found.best.time_s < all_share.time_s
    asked = pf.why_not(found, {"shard": "all"})
    assert asked.slower_by == pytest.approx(all_share.time_s / found.best.time_s - 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shard": 3}, "shard: 3 does not divide dp = 64; nearest: 2 or 4"),
        ({"shard": 4, "zero": 0}, "shard: 4 is not accepted with zero = 0"),
        ({"shard": 4, "ep": 8}, "4 is no multiple of 8, the replicas that experts .* nearest: 8$"),
        ({"shard": 4, "ep": 3, "dp": 96, "global_batch": 96}, "multiple of 3, .* nearest: 3 or 6$"),
        ({"ep": 5}, "1 x 5 = 5 does not divide tp x cp x dp = 1 x 1 x 64 = 64; nearest: 4 or 8"),
        ({"ep": 128}, "1 x 128 = 128 does not divide tp x cp x dp = 1 x 1 x 64 = 64; nearest: 64"),
        ({"ep": 48, "tp": 2, "dp": 32}, "2 x 48 = 96 does not .* 2 x 1 x 32 = 64; nearest: 32"),
        ({"ep": 1, "etp": 3}, "3 x 1 = 3 does not divide tp x cp x dp = 1 x 1 x 64 = 64$"),
        (
            {"ep": 8, "pp": 2, "dp": 32, "rank_order": "stages-inside"},
            "ep: etp x ep = 1 x 8 = 8 does not divide tp x cp = 1; with rank_order stages-inside",
        ),
    ],
)
def test_refusals_of_sharing_have_rule_numbers_and_nearest(given, said):
    with pytest.raises(InvalidInputError, match=said):
        pf.PlanSpec.from_dict({**FSDP, **given})


def test_batches_refuse_uneven_groups_and_plans_count_them():
    rows = predict_batch(
        "llama2-7b", WIDE, pf.Training(global_batch=64), dp=64, zero=[3, 3, 0, 1],
        shard=[8, 3, 8, 16],
    )  # fmt: skip
    assert [bool(s > 1) for s in rows.status] == [False, True, True, False]
    assert "sharing replicas" in rows.reasons[rows.status[1]]
    step = pf.Training(global_batch=64, dp=64, zero=3, shard=3, micro_batch=1)
    none = pf.plan("llama2-7b", WIDE, step.replace(tp=1, pp=1))
    assert not none.plans
    assert any(why.startswith("shard: 3 replicas") for why in none.rejected)


# ---- context parallelism ----


def test_volumes_of_the_three_ways():
    """By hand: rows of 4,096 / 4 tokens, 32 heads and 8 key/value heads of 128, 2 bytes each."""
    rows, cp = 2 * 4096 // 4, 4
    query, kv = 2 * rows * 32 * 128, 2 * 2 * rows * 8 * 128
    common = {"cp": cp, "micro_batch": 2, "seq": 4096}
    graphs = {k: layer_graph(LLAMA, Strategy(**common, cp_kind=k)) for k in CONTEXT_KINDS}
    assert ops_of(graphs["all-gather"], "context") == {"kv-gather": kv * cp}
    back = {"kv-gather-again": kv * cp, "d-kv-gather": kv * cp}
    assert ops_of(graphs["all-gather"], "context", backward=True) == back
    assert ops_of(graphs["ring"], "context") == {"kv-ring": kv * cp}
    assert ops_of(graphs["ring"], "context", backward=True) == {"d-kv-ring": 2 * kv * cp}
    sent = {"heads-exchange": query + kv, "rows-exchange": query}
    assert ops_of(graphs["ulysses"], "context") == sent
    sent_back = {f"d-{name}": size for name, size in sent.items()}
    assert ops_of(graphs["ulysses"], "context", backward=True) == sent_back
    mixed = layer_graph(LLAMA, Strategy(**common, cp_kind="ulysses:2/ring"))
    assert ops_of(mixed, "context-heads") == sent
    assert ops_of(mixed, "context-heads", backward=True) == sent_back
    assert ops_of(mixed, "context-ring") == {"kv-ring": kv * 2}
    assert ops_of(mixed, "context-ring", backward=True) == {"d-kv-ring": 2 * kv * 2}
    graphs["mixed"] = mixed
    works = {k: sum(part.flops for x in g.layers for part in (x.forward, x.backward))
             for k, g in graphs.items()}  # fmt: skip
    assert len({round(w) for w in works.values()}) == 1


def test_a_ring_hides_what_a_gather_does_not():
    """On a slow fabric with long sequences attention hides the ring."""
    slow = pf.Cluster(
        devices=4,
        fabric=pf.hardware.FlatFabric(name="slow", bandwidth_bytes_per_s=2e10, latency_s=1e-6),
        chip="h100",
    )
    given = {"cp": 4, "global_batch": 4, "seq": 65536, "recompute": "none"}
    seconds = {
        kind: pf.predict(LLAMA, slow, {**given, "cp_kind": kind}).parts_s["context_comm"]
        for kind in CONTEXT_KINDS
    }
    assert seconds["ring"] < 0.2 * seconds["all-gather"]
    step = pf.Training(global_batch=4, seq=65536, cp=4, micro_batch=1)
    best = pf.plan(LLAMA, slow, step).best
    each = [pf.plan(LLAMA, slow, step.replace(cp_kind=k)).best for k in CONTEXT_KINDS]
    assert best.time_s == min(plan.time_s for plan in each)
    assert best.cp_kind == "ring"


def test_attention_loses_what_a_profile_says_beside_a_ring():
    """The longer of the transfer, and of attention with its share of each second of it."""
    strategy = Strategy(cp=4, micro_batch=1, seq=8192, cp_kind="ring")
    graph = layer_graph(LLAMA, strategy)
    block = graph.layers[1].forward  # the third of six: forward and backward alternate
    ring, early = block.names.index("kv-ring"), block.names.index("attention-early")
    slower = 0
    for bandwidth in (1e9, 2e10, 1e12):
        fabric = pf.hardware.FlatFabric(name="f", bandwidth_bytes_per_s=bandwidth, latency_s=1e-6)
        costs = pf.estimate_costs(graph, "h100", pf.Cluster(devices=4, fabric=fabric))
        sent = float(block.ops["payload_bytes"][ring])
        sent_s = pf.collective(fabric, "all-gather", sent, 4).time_s
        attended_s = costs.time_s(2)[0, early]
        for contention in (0.0, 0.125, 0.9):
            found_s = costs.with_contention(contention).time_s(2)[0, [early, ring]].sum()
            assert found_s == pytest.approx(max(sent_s, attended_s + contention * sent_s), 1e-12)
            slower += found_s > max(sent_s, attended_s) * (1 + 1e-9)
    assert slower >= 2
    loaded = pf.Cluster(devices=4, fabric="dgx-h100", chip="h100")
    given = {"cp": 4, "global_batch": 4, "seq": 65536, "recompute": "none", "cp_kind": "ring"}
    beside = load_software("megatron-core")
    plain = beside.replace(overlap_slowdown=1.0)
    parts = [
        pf.predict(LLAMA, loaded, {**given, "software": used}).parts_s for used in (plain, beside)
    ]
    assert parts[1]["context_comm"] > parts[0]["context_comm"]


def test_plan_mixes_ways_to_attend_where_a_sequence_spans_nodes():
    """Heads are exchanged in a node, and a ring, hidden by attention, links the groups."""
    model = LLAMA.replace(kv_heads=32)
    wide = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    step = pf.Training(global_batch=2, seq=16384, cp=16, tp=1, micro_batch=1, recompute="none")
    found = pf.plan(model, wide, step)
    assert found.best.cp_kind == "ulysses:4/ring"
    assert "ulysses:N/ring" in found.space
    alone = [pf.plan(model, wide, step.replace(cp_kind=kind)).best for kind in CONTEXT_KINDS]
    assert found.best.time_s < 0.99 * min(plan.time_s for plan in alone)
    given = {
        "cp": 16,
        "cp_kind": "ulysses:4/ring",
        "global_batch": 2,
        "seq": 16384,
        "zero": found.best.zero,
    }
    assert pf.predict(model, wide, {**given, "recompute": "none"}).time_s == found.best.time_s
    rows = predict_batch(
        model, wide, step, cp=16, cp_kind=["ulysses:4/ring", "ulysses:2/ring"],
        zero=found.best.zero, recompute="none",
    )  # fmt: skip
    assert rows.time_s[0] == found.best.time_s < rows.time_s[1]


def test_ways_to_attend_that_are_not_possible():
    for kind, said in (
        ("ulysses:3/ring", "cp_kind: ulysses:3/ring with cp 8 is not accepted; expected groups"),
        ("ulysses:8/ring", "a divisor of 8 that is less than 8"),
    ):
        assert said in reasons(LLAMA, Strategy(cp=8, cp_kind=kind))[0]
    for kind in ("ulysses:1/ring", "ulysses:2", "rings"):
        with pytest.raises(InvalidInputError, match="all-gather, ring, ulysses or ulysses:N/ring"):
            pf.PlanSpec(cp=4, dp=1, global_batch=4, cp_kind=kind)
    eager = models.load("gpt2-small")
    eager = eager.replace(attention="eager")
    asked = Strategy(cp=2, cp_kind="ring")
    assert reasons(eager, asked)[0].endswith("all-gather or ulysses, or fused attention")
    asked = Strategy(cp=3, cp_kind="ulysses", seq=3072)
    said = reasons(LLAMA, asked)[0]
    assert said.startswith("cp_kind: ulysses over 3 devices does not share out the 32 heads")
    asked = Strategy(cp=4, tp=4, cp_kind="ulysses")
    assert "the 2 key/value heads of a device at tp 4" in reasons(LLAMA, asked)[0]
    assert "a divisor of 2" in reasons(LLAMA, asked)[0]
    wide = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    with pytest.raises(InvalidInputError, match="ulysses over 4 devices"):
        pf.predict(LLAMA, wide, {"tp": 4, "cp": 4, "cp_kind": "ulysses", "global_batch": 8})


# ---- experts ----

EXPERTS = {"dp": 8, "ep": 8, "global_batch": 16, "zero": 1, "recompute": "full"}


def test_a_busy_device_makes_the_step_longer_up_to_all_tokens():
    steps = [
        pf.predict(MIXTURE, NODE, {**EXPERTS, "expert_imbalance": x}) for x in (1.0, 1.3, 8.0, 9.0)
    ]
    seconds = [plan.time_s for plan in steps]
    assert seconds[0] < seconds[1] < seconds[2] == seconds[3]
    assert steps[0].memory["recompute"] < steps[1].memory["recompute"]
    assert steps[1].expert_imbalance == 1.3
    assert pf.predict(MIXTURE, NODE, steps[1]) == steps[1]
    capped = MIXTURE.replace(moe=MIXTURE.moe.replace(capacity_factor=1.25))
    same = {pf.predict(capped, NODE, {**EXPERTS, "expert_imbalance": x}).time_s for x in (1.0, 2.0)}
    assert len(same) == 1  # a capacity is the same for every expert


def test_overlap_hides_its_share_of_the_exchange():
    plain, half, all_ = (
        pf.predict(MIXTURE, NODE, {**EXPERTS, "expert_overlap": x}) for x in (0.0, 0.5, 1.0)
    )
    assert plain.time_s > half.time_s > all_.time_s
    assert all_.parts_s["expert_comm"] == pytest.approx(0.0, abs=1e-12)
    assert plain.parts_s["expert_comm"] == pytest.approx(plain.time_s - all_.time_s, rel=1e-9)


def test_passes_of_another_micro_batch_hide_exchanges_as_far_as_they_last():
    """By hand: of E seconds of exchange beside C of computation, min(E, C) are hidden in both
    passes, and delay that by the 20 of 132 cores that run them."""
    for link in ("40 GB/s", "1 GB/s"):  # hidden altogether, and not
        fabric = FlatFabric(name="slow", bandwidth_bytes_per_s=link, latency_s="1 us")
        cluster = pf.Cluster(devices=8, fabric=fabric, chip="h100")
        spec = pf.PlanSpec.of({**EXPERTS, "overlap_experts": True})
        sizes = strategy_sizes(MIXTURE, spec.strategy, spec.modes, spec.software, spec.precision)
        chip = chip_as_run(cluster.chip, spec.software)
        plain = estimate_costs([sizes.graph], chip, cluster)
        overlapped = plain.with_overlapped(("expert",))
        exchange = plain.without(("expert",))
        seen = 0
        for forward in range(0, len(plain.graphs), 2):
            passes = (forward, forward + 1)
            total, free, left = (
                sum(float(costs.time_s(g).sum()) for g in passes)
                for costs in (plain, exchange, overlapped)
            )
            exchange_s = total - free
            other = plain.without(GROUPS)
            compute_s = sum(float(other.time_s(g).sum()) for g in passes)
            hidden_s = min(exchange_s, compute_s) * (1 - 20 / 132)
            assert left - free == pytest.approx(exchange_s - hidden_s, abs=1e-12)
            seen += exchange_s > compute_s > 0
        assert bool(seen) == (link == "1 GB/s")


@pytest.mark.parametrize("link", ["9 TB/s", "4 GB/s"])  # hidden altogether, and not
def test_shared_experts_hide_exchanges_as_far_as_they_last(link):
    """By hand: the products up run beside rows on their way out, the one down beside their return,
    and each is slower by the cores that send; what they do not hide is waited for."""
    model = pf.models.load("deepseek-v3")
    moe = next(k for k, own in enumerate(layer_graph(model).layers) if own.expert_parameters)
    fabric = FlatFabric(name="slow", bandwidth_bytes_per_s=link, latency_s="1 us")
    cluster = pf.Cluster(devices=8, fabric=fabric, chip="h100")
    plain = estimate_costs(layer_graph(model, Strategy(ep=8)), "h100", cluster)
    plain = plain.with_contention(0.125)
    waits, first = 0, ("up", "gate", "activation", "multiply")
    pairs = (("dispatch", first), ("combine", ("down",)))
    for graph in (2 * moe, 2 * moe + 1):
        names, seconds = plain.graphs[graph].names, plain.time_s(graph)[0].tolist()
        took = dict(zip(names, plain.with_shared_experts().time_s(graph)[0].tolist(), strict=True))
        rest = 0.0
        before = dict(zip(names, seconds, strict=True))
        for name, products in pairs:
            own = name if name in before else f"d-{name}"
            beside = sum(
                s for other, s in before.items()
                if any(f"shared-{product}" in other for product in products)
            )  # fmt: skip
            assert took[own] + beside == pytest.approx(
                max(before[own], beside + 0.125 * before[own]), rel=1e-12
            )
            waits += took[own] > 0.126 * before[own]
            rest += before[own] - took[own]
        assert sum(seconds) - sum(took.values()) == pytest.approx(rest, rel=1e-9)
    assert bool(waits) == (link == "4 GB/s")


def test_software_says_whether_shared_experts_run_beside_exchanges():
    """Exchanges that overlap another micro-batch are hidden once."""
    model = pf.models.load("deepseek-v3").replace(layers=4)
    given = {"ep": 8, "dp": 8, "global_batch": 8, "recompute": "full"}
    alone = load_software("megatron-core")
    beside = alone.replace(name="own", expert_beside_shared=True)
    first, second = (
        [pf.predict(model, NODE, {**given, "software": used, **more}).time_s
         for used in (alone, beside)]
        for more in ({}, {"overlap_experts": True})
    )  # fmt: skip
    assert first[1] < first[0]
    assert second[1] == second[0]


def test_dualpipe_overlaps_exchanges_by_default():
    """DeepSeek-V3's schedule is there for that; 1F1B does so where it is asked to."""
    given = {"tp": 1, "pp": 2, "dp": 4, "ep": 4, "global_batch": 64}
    both = {**given, "schedule": "dualpipe", "vpp": 2}
    default, without = (
        pf.predict(MIXTURE, NODE, {**both, **more}) for more in ({}, {"overlap_experts": False})
    )
    assert default.overlap_experts
    assert not without.overlap_experts
    assert default.time_s < without.time_s
    assert default.parts_s["expert_comm"] < 0.5 * without.parts_s["expert_comm"]
    plain, asked = (
        pf.predict(MIXTURE, NODE, {**given, **more}) for more in ({}, {"overlap_experts": True})
    )
    assert not plain.overlap_experts
    assert asked.time_s < plain.time_s
    step = pf.Training(global_batch=64, micro_batch=1)
    fields = {"pp": 2, "dp": 4, "ep": 4, "schedule": ["dualpipe", "1f1b"], "vpp": [2, 1]}
    batch = pf.predict_batch(MIXTURE, NODE, step, **fields)
    assert batch.time_s.tolist() == [default.time_s, plain.time_s]
    free = step.replace(tp=1, pp=2, dp=4, ep=4, cp=1, zero=0, schedule=("1f1b", "dualpipe"))
    plans = pf.plan(MIXTURE, NODE, free, top=9).plans
    assert {(p.schedule, p.overlap_experts) for p in plans} == {("1f1b", False), ("dualpipe", True)}
    for plan in plans:
        assert pf.predict(MIXTURE, NODE, plan) == plan
        assert pf.Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("rate", [1e9, 1e10])
@pytest.mark.parametrize("overlapping", [False, True])
def test_work_is_bounded_however_slow_the_exchanges_of_experts_are(rate, overlapping):
    slow = FlatFabric(name="slow", bandwidth_bytes_per_s=rate)
    on = pf.Cluster(devices=8, fabric=slow, chip="h100")
    own = strategy_sizes(MIXTURE, Strategy(ep=4, overlap_experts=overlapping), ("none",))
    chip = chip_as_run(on.chip, own.software)
    bound_s = roofline_work_s(own.graph, chip_records([chip]), on, chip, 1, own.most_hidden)
    work_s = least_work_s((own,), on)
    assert bound_s <= work_s
    assert overlapping or bound_s > 0.75 * work_s  # of exchanges that are waited for


def test_a_record_has_the_context_kind_beside_dispatcher_and_host():
    for kind in CONTEXT_KINDS:
        common = Strategy(cp=2, cp_kind=kind, ep=2)
        codes = [
            strategy_sizes(
                MIXTURE, common.replace(dispatcher=way, offload_optimizer=host), ("none",)
            )
            .record["group_kind"]
            .item()
            for way in ("all-to-all", "all-gather")
            for host in (False, True)
        ]
        assert codes == [4 * context_code(kind) + n for n in range(4)]


def test_experts_of_a_width_of_their_own():
    """Each of 4 tensor-parallel devices sends its own quarter of the rows; weights are as many.

    Where devices share experts, they gather the rows that each of them received.
    """
    common = {"tp": 4, "sequence_parallel": True}
    wide = layer_graph(MIXTURE, Strategy(**common, ep=2))
    own = layer_graph(MIXTURE, Strategy(**common, ep=8, etp=1))
    whole = layer_graph(MIXTURE, Strategy(tp=4, ep=2))
    sent = ops_of(whole, "expert")["dispatch"]
    for graph in (wide, own):
        assert ops_of(graph, "expert")["dispatch"] == pytest.approx(sent / 4, rel=0.01)
        assert "ffn-gather" not in ops_of(graph, "tensor")
    received = ops_of(wide, "expert-tensor")["experts-gather"]
    assert received == 4 * ops_of(wide, "expert")["dispatch"]
    assert not ops_of(own, "expert-tensor")
    blocks = [next(x for x in g.layers if x.kind not in ENDS) for g in (wide, own)]
    assert blocks[0].device_parameters == blocks[1].device_parameters
    plan = pf.predict(
        MIXTURE, NODE, {"tp": 4, "dp": 2, "ep": 8, "etp": 1, "global_batch": 8, "zero": 1}
    )
    assert plan.etp == 1
    assert pf.Plan.from_dict(plan.to_dict()) == plan
    step = pf.Training(global_batch=8, tp=4, ep=8, etp=(1, 4))
    assert {p.etp for p in pf.plan(MIXTURE, NODE, step, top=50).plans} == {1}  # 4 x 8 is too many
    assert "with experts over 1, 4 devices each" in pf.plan(MIXTURE, NODE, step).space


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"etp": 3}, "etp: 3 with tp 4 is not accepted: it does not divide the experts' width"),
        ({"etp": 1, "sequence_parallel": False}, "without sequence parallelism"),
    ],
)
def test_widths_of_experts_that_are_not_possible(fields, said):
    given = {"tp": 4, "sequence_parallel": True, "ep": 8, **fields}
    assert any(said in why for why in reasons(MIXTURE, Strategy(**given)))


def test_only_sensible_factors_are_accepted(capsys):
    for option, value in (("--expert-imbalance", "0.5"), ("--expert-overlap", "1.5")):
        words = ["predict", "mixtral-8x7b", "--chip", "h100", "--devices", "8", "--dp", "8"]
        assert main([*words, "--ep", "8", option, value]) == 2
        assert option in capsys.readouterr().err


def test_what_is_sent_and_waited_for_by_hand():
    """Four all-reduces a block among 4 devices send 3/4 of their payload twice."""
    given = {"tp": 4, "dp": 2, "global_batch": 8, "recompute": "none", "sequence_parallel": False}
    fewer, more = (
        evaluated(LLAMA.replace(layers=n), NODE, given)[0].sizes[0].record["sent_bytes"][0]
        for n in (8, 9)
    )
    assert more - fewer == 4 * 2 * 0.75 * (2 * LLAMA.seq * LLAMA.hidden)
    # Without recomputation a backward pass is the plain one, with the host's wait for experts.
    waiting = load_software(DEFAULT).replace(name="waiting", expert_launch_s=1e-3)
    given = {"dp": 8, "ep": 8, "global_batch": 8, "recompute": "none", "software": waiting}
    _, times, _ = evaluated(MIXTURE, NODE, given)
    assert times.backward_s[:, 0].tolist() == times.plain_s.tolist()


# ---- DualPipe ----

DUAL = {"pp": 4, "dp": 2, "global_batch": 32, "schedule": "dualpipe", "vpp": 2}


def test_dualpipe_holds_the_model_twice_and_has_a_shorter_bubble():
    plain = {**DUAL, "schedule": "1f1b", "vpp": 1, "recompute": "none"}
    one, two = (
        pf.predict(LLAMA, NODE, plain),
        pf.predict(LLAMA, NODE, {**DUAL, "recompute": "none"}),
    )
    held = [sum(stage.memory["weights"] for stage in plan.stages) for plan in (one, two)]
    assert held[1] == pytest.approx(2 * held[0], rel=1e-12)
    assert two.parts_s["bubble"] < one.parts_s["bubble"]
    assert [stage.chunks for stage in two.stages] == [tuple(reversed(s.chunks)) for s in
                                                      reversed(two.stages)]  # fmt: skip
    assert pf.predict(LLAMA, NODE, two) == two
    assert two.parts_s["compute"] == pytest.approx(one.parts_s["compute"], rel=1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pp": 3}, "even number of stages"),
        ({"global_batch": 18}, "even number of micro-batches"),
        ({"global_batch": 8}, "twice as many micro-batches"),
        ({"vpp": 1}, "dualpipe takes 2 chunks a stage"),
        ({"stages": (2, 2, 2, 2, 1, 1)}, "expected pp = 4"),
    ],
)
def test_dualpipe_refuses(change, said):
    with pytest.raises(InvalidInputError, match=said):
        pf.PlanSpec.from_dict({**DUAL, **change})


def test_plans_by_dualpipe_are_searched():
    step = pf.Training(global_batch=32, schedule=("dualpipe",), pp=(2, 3, 4), micro_batch=1)
    found = pf.plan(LLAMA, NODE, step)
    assert {p.schedule for p in found.plans} == {"dualpipe"}
    assert {p.pp for p in found.plans} <= {2, 4}
    assert any("even number of stages" in why for why in found.rejected)


# ---- fabrics and software ----


def test_messages_in_a_full_mesh_may_be_slower_than_beyond_it():
    """Of ranks 0-3, 1-4 and 2-5 the first pair is in one node, whose links are slower."""
    tiers = (
        Tier(name="node", size=4, bandwidth_bytes_per_s=12e9, links="full-mesh"),
        Tier(name="rest", bandwidth_bytes_per_s=10e9),
    )
    mesh = TieredFabric(name="mesh", tiers=tiers)
    fast = pf.hardware.FlatFabric(name="fast", bandwidth_bytes_per_s=1e24, latency_s=0.0)
    given = {"pp": 2, "dp": 3, "global_batch": 6, "recompute": "none"}
    slow, free = (
        pf.predict(LLAMA, pf.Cluster(devices=6, fabric=f, chip="h100"), given) for f in (mesh, fast)
    )
    rows = 2 * LLAMA.seq * LLAMA.hidden
    wanted = max(message_batch(mesh, [rows] * 3, [0, 1, 2], [3, 4, 5]).time_s)
    assert wanted == pytest.approx(rows / 4e9, rel=1e-12)
    found = slow.stages[1].load_s - free.stages[1].load_s
    assert found == pytest.approx(wanted, rel=1e-9)


def test_work_beside_an_exchange_takes_longer():
    slowed = load_software(DEFAULT).replace(name="slowed", overlap_slowdown=1.25)
    for zero in (0, 1, 3):
        given = {**FSDP, "zero": zero, "global_batch": 128}
        plain = pf.predict("llama2-7b", WIDE, given)
        contended = pf.predict("llama2-7b", WIDE, {**given, "software": slowed})
        assert contended.time_s > plain.time_s
        assert contended.parts_s["data_comm"] > plain.parts_s["data_comm"]
        assert contended.parts_s["compute"] == pytest.approx(plain.parts_s["compute"], rel=1e-12)


def test_rows_are_gathered_where_few_devices_share_the_experts():
    """Of 8 experts a row, all-to-all sends copies to 4 devices; a gather sends the row itself."""
    model = MIXTURE.replace(moe=MIXTURE.moe.replace(top_k=8, experts=16))
    given = {"dp": 8, "ep": 4, "global_batch": 16, "zero": 1, "expert_imbalance": 1.0}
    sent, gathered = (
        pf.predict(model, NODE, {**given, "dispatcher": d}) for d in ("all-to-all", "all-gather")
    )
    assert gathered.parts_s["expert_comm"] < 0.7 * sent.parts_s["expert_comm"]
    assert gathered.memory_bytes != sent.memory_bytes
    step = pf.Training(global_batch=16, dp=8, tp=1, ep=4, micro_batch=1, expert_imbalance=1.0)
    found = pf.plan(model, NODE, step)
    assert found.best.dispatcher == "all-gather"
    assert "rows to experts by all-to-all, all-gather" in found.space
    assert pf.why_not(found, {"dispatcher": "all-to-all"}).slower_by > 0
    rows = predict_batch(
        model, NODE, step, dp=8, ep=4, zero=1, dispatcher=["all-to-all", "all-gather"]
    )
    assert rows.time_s.tolist() == [sent.time_s, gathered.time_s]
    alone = pf.plan(model, NODE, step.replace(tp=2, dp=4, etp=2, sequence_parallel=False))
    assert alone.best.dispatcher == "all-to-all"
    assert not any(why.startswith("dispatcher") for why in alone.rejected)
    refused = {**given, "dp": 4, "tp": 2, "sequence_parallel": False, "dispatcher": "all-gather"}
    with pytest.raises(InvalidInputError, match="dispatcher: all-gather is not accepted without"):
        pf.predict(model, NODE, refused)
