"""Traces: Chrome trace events end with the step, Chakra traces fit together rank by rank."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.export.chakra import _framed
from phaze_fast.export.kineto import Profile, compare_profile, read_profile
from phaze_fast.export.perfetto import layer_trace, step_trace
from phaze_fast.export.ranks import Ranks, stage_layers
from phaze_fast.planning import layer_schedules, pipelines, timeline
from phaze_fast.planning.prediction import evaluated
from phaze_fast.schedule import LayerInstance, schedule_instances

SMALL = models.load("gpt2-xl").replace(name="small", layers=14, heads=24, hidden=1536)
CLUSTER = pf.Cluster(devices=32, fabric="dgx-h100", chip="h100")
SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2}


def plan_with(schedule, **changes):
    given = {"tp": 2, "pp": 4, "dp": 4, "global_batch": 64, "schedule": schedule, "zero": 1}
    given |= {"vpp": SCHEDULES.get(schedule, 2), "recompute": "full:1", "micro_batch": 2}
    return {**given, **changes}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_last_slice_ends_with_the_step(schedule):
    found = timeline(SMALL, CLUSTER, plan_with(schedule))
    events = step_trace(found)["traceEvents"]
    assert json.loads(json.dumps(events)) == events
    slices = [e for e in events if e["ph"] == "X"]
    rows = [row for row in found.passes.tolist() if row[5] >= 0]
    named = {e["name"] for e in slices if "&" in e["name"]}
    assert named == {f"F {row[4]} & B {row[5]}" for row in rows}
    assert ("dualpipe-v" in schedule) == any(name.endswith("B 0") for name in named)
    end = max(e["ts"] + e["dur"] for e in slices)
    assert end / 1e6 == pytest.approx(found.plan.time_s, rel=1e-9)
    assert min(e["ts"] for e in slices) == 0.0
    after, parts = [e["args"] for e in slices if e["tid"] == 2], found.plan.parts_s
    assert after == [{name: parts[name] for name in ("data_comm", "optimizer")}] * found.plan.pp
    tracks = {(e["pid"], e["tid"]) for e in slices}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert tracks <= named
    for track in tracks:  # slices of a track do not overlap
        own = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == track)
        for (ts, dur), (after, _) in pairwise(own):
            assert ts + dur <= after * (1 + 1e-12) + 1e-9
    counters = [e for e in events if e["ph"] == "C"]
    for k, stage in enumerate(found.plan.stages):
        most = max(e["args"]["held"] for e in counters if e["pid"] == k + 1)
        assert most * 2**30 == pytest.approx(stage.memory_bytes, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_of_every_micro_batch_is_there_once(schedule):
    found = timeline(SMALL, CLUSTER, plan_with(schedule))
    rounds, chunks = found.plan.micro_batches, found.plan.vpp
    letters = Counter()
    for row in found.passes.tolist():
        device, code, chunk, _, micro_batch, other, _, _ = row
        letter = found.kinds[code]
        for kind in "FB" if letter == "F&B" else letter:
            own = chunk if kind != "B" or letter == "B" else 1 - chunk
            number = other if letter == "F&B" and kind == "B" else micro_batch
            letters[device, own, "B" if kind == "I" else kind, number] += 1
    for device in range(found.plan.pp):
        for chunk in range(chunks):
            for kind in "FB":
                seen = [letters[device, chunk, kind, m] for m in range(rounds)]
                assert seen == [1] * rounds


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_passes_end_when_the_slow_player_ends_them(schedule):
    chunks = SCHEDULES[schedule]
    forward = [[1.0 + 0.1 * d + 0.2 * c for c in range(chunks)] for d in range(3)]
    backward = [[2.0 + 0.3 * d for _ in range(chunks)] for d in range(3)]
    weight = [[0.7 for _ in range(chunks)] for _ in range(3)]
    step = pipelines.play(schedule, forward, backward, 8, weight_grad_s=weight)
    found = step.passes
    assert found["end_s"].max() == pytest.approx(step.step_s, rel=1e-12)
    assert step.bubble_s == step.step_s - max(step.busy_s) > 0.0
    for d in range(3):
        own = found[found["device"] == d]
        assert own["end_s"].max() == pytest.approx(step.end_s[d], rel=1e-12)
        assert own["start_s"].min() == pytest.approx(step.start_s[d], abs=1e-12)
        assert (own["end_s"] - own["start_s"]).sum() == pytest.approx(step.busy_s[d], rel=1e-12)


def test_stages_are_busy_while_they_have_passes():
    found = timeline(SMALL, CLUSTER, plan_with("1f1b"))
    for k, stage in enumerate(found.plan.stages):
        busy_s = stage.load_s * found.plan.micro_batches
        assert found.busy_s(k) == pytest.approx(busy_s, rel=1e-9)


def test_operators_of_a_layer_name_the_cores_that_they_use():
    block = layer_schedules(SMALL, CLUSTER, plan_with("1f1b"))[2].to_dict()
    assert (block["kind"], block["direction"]) == ("block", "forward")
    for op in block["operators"]:
        assert op["cores"]
        assert all(0 < n <= block["cores"][core] for core, n in op["cores"].items())


def test_a_layer_as_a_trace():
    ways = (((1, 4.0), (0, 2.0)), ((1, 3.0), (0, 1.5)), ((1, 2.0), (0, 1.0)))
    layer = LayerInstance("l", ("a", "b", "c"), (1, 2, 3), ways, ((0, 2),), (2, 2, 0), (0, 1, 2))
    found = schedule_instances([layer])
    events = layer_trace(found, 1e-6)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == {(e["pid"], e["tid"]) for e in slices}
    assert max(e["ts"] + e["dur"] for e in slices) == pytest.approx(found[0].makespan, rel=1e-9)
    assert {e["name"] for e in slices} == {"a", "b", "c"}
    twice = [e for e in layer_trace([*found, *found], 1e-6)["traceEvents"] if e["ph"] == "X"]
    again = sorted(e["ts"] for e in twice)[len(slices) :]
    assert min(again) == pytest.approx(found[0].makespan, rel=1e-9)
    for lane in {(e["pid"], e["tid"]) for e in slices}:
        own = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == lane)
        assert all(ts + dur <= after * (1 + 1e-9) for (ts, dur), (after, _) in pairwise(own))
    used = {(e["pid"], e["tid"]) for e in slices}
    assert len(used) == len({pid for pid, _ in used})  # operators one after another share a lane


def test_operators_of_a_layer_are_on_lanes_of_their_cores():
    """Two of one core run side by side; one on both cores, and one of no length, follow."""
    ways = [((1, 4e4),), ((1, 4e4),), ((0, 1.5e4),), ((0, 1e4),), ((1, 0.0),)]
    edges, kinds = ((0, 2), (1, 2), (2, 3), (3, 4)), (1, 1, 2, 3, 1)
    layer = LayerInstance(
        "l", tuple("abcde"), kinds, tuple(ways), edges, (2, 2, 0), (0, 1, 2, 3, 4)
    )
    (found,) = schedule_instances([layer])
    rounded = replace(found, starts=(*found.starts[:3], 5.5e4 * (1 - 1e-15), found.starts[4]))
    for one in (found, rounded):
        events = [e for e in layer_trace([one])["traceEvents"] if e["ph"] == "X"]
        slices = sorted((e["name"], e["pid"], e["tid"], e["args"]["cores"]) for e in events)
        both = [("d", 1, 1, 2), ("d", 2, 1, 2)]
        assert slices == [("a", 1, 1, 1), ("b", 1, 2, 1), ("c", 2, 1, 2), *both]


# ---- Chakra ----


def read_trace(data):
    """Metadata and nodes of a file: messages, each preceded by its length as a varint."""
    from google.protobuf.internal.decoder import _DecodeVarint

    from phaze_fast.export.chakra import messages

    metadata, node = messages()
    parts, at = [], 0
    while at < len(data):
        length, at = _DecodeVarint(data, at)
        parts.append(data[at : at + length])
        assert len(parts[-1]) == length
        at += length
    return metadata.FromString(parts[0]), [node.FromString(part) for part in parts[1:]]


def attributes(node):
    return {a.name: getattr(a, a.WhichOneof("value")) for a in node.attr}


def test_layers_of_a_stage_and_groups_of_one_by_hand():
    evaluator, times, placed = evaluated(SMALL, CLUSTER, plan_with("1f1b", tp=1, dp=8))
    plan, (sizes,) = evaluator.plan(placed, times), evaluator.sizes
    for stage, first, last in ((0, 1, 0), (3, 0, 1)):  # the embedding, the head
        (layers,) = stage_layers(plan, sizes, stage)
        blocks = len(layers) - first - last
        modes = ["none"] * first + ["full"] + ["none"] * (blocks - 1 + last)
        assert [mode for _, mode in layers] == modes
    ranks = Ranks(plan)
    for order, beside in (("replicas-inside", 8), ("stages-inside", 1)):
        own = Ranks(replace(plan, rank_order=order))
        assert own.rank(0, 0, 0, 1) == beside
        assert own.rank(0, 0, 2, 1) == (1 + 4 * 2 if beside == 1 else 2 + 8)
        places = [own.place(rank) for rank in range(32)]
        back = [own.rank(at.tensor, at.context, at.replica, at.stage) for at in places]
        assert back == [*range(32)]
    assert ranks.group_name(ranks.place(0), "tensor") == ""
    assert ranks.group_name(ranks.place(0), "data") == "data.0"


@pytest.mark.parametrize("order", ["replicas-inside", "stages-inside"])
@pytest.mark.parametrize(
    "widths",
    [
        {"tp": 4, "ep": 2, "etp": 2, "dp": 4, "shard": 2},
        {"tp": 2, "ep": 8, "etp": 1, "dp": 8, "shard": 4},
        {"tp": 2, "cp": 4, "cp_kind": "ulysses:2/ring", "ep": 4, "etp": 4, "dp": 2, "shard": 2},
        {"cp": 6, "cp_kind": "ulysses:3/ring", "ep": 3, "dp": 2, "shard": 1},
    ],
)
def test_groups_of_a_kind_divide_the_ranks_of_a_stage(widths, order):
    plan = timeline(SMALL, CLUSTER, plan_with("1f1b")).plan
    given = {"tp": 1, "cp": 1, "cp_kind": "all-gather", "ep": 1, "etp": None, "pp": 2, **widths}
    ranks = Ranks(replace(plan, rank_order=order, **given))
    tp, cp, etp = given["tp"], given["cp"], given["etp"] or given["tp"]
    shared, copy = tp * cp * given["shard"], etp * given["ep"]
    heads = {4: 2, 6: 3}.get(cp, 1)
    sizes = {
        "tensor": tp, "context": cp, "context-heads": heads, "context-ring": cp // heads,
        "data": cp * given["shard"], "copies": given["dp"] // given["shard"],
        "expert": given["ep"], "expert-tensor": etp, "expert-mesh": copy,
        "expert-data": shared // copy,
    }  # fmt: skip
    assert set(sizes) == set(Ranks.KINDS)
    for kind, size in sizes.items():
        groups = {rank: ranks.group(ranks.place(rank), kind) for rank in range(len(ranks))}
        for rank, members in groups.items():
            assert rank in members
            assert len(set(members)) == size
            assert {ranks.place(other).stage for other in members} == {ranks.place(rank).stage}
            assert all(groups[other] == members for other in members)


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [("1f1b", 1), ("interleaved", 0), ("zb-v", 3), ("dualpipe", 1), ("dualpipe-v", 0)],
)
def test_chakra_traces_of_all_ranks_fit_together(schedule, zero, tmp_path):
    pytest.importorskip("google.protobuf")
    from phaze_fast.export.chakra import NODES, chakra_trace

    trace = chakra_trace(SMALL, CLUSTER, plan_with(schedule, zero=zero, global_batch=64))
    paths = trace.write(tmp_path)
    assert len(paths) == 33
    groups = json.loads(paths[0].read_text())
    for name, members in groups.items():
        assert len(members) > 1
        assert name.endswith(f".{min(members)}")
    sent, taken, seen, operations = Counter(), Counter(), {}, 0
    for rank in range(32):
        metadata, nodes = read_trace((tmp_path / f"plan.{rank}.et").read_bytes())
        assert metadata.version
        assert [node.id for node in nodes] == list(range(len(nodes)))
        for node in nodes:
            assert list(node.data_deps) == [node.id - 1] * (node.id > 0)
            has = attributes(node)
            assert has["is_cpu_op"] is False
            if node.type in (NODES["send"], NODES["receive"]):
                mine = has["comm_src"] if node.type == NODES["send"] else has["comm_dst"]
                assert mine == rank
                key = has["comm_src"], has["comm_dst"], has["comm_tag"], has["comm_size"]
                (sent if node.type == NODES["send"] else taken)[key] += 1
            elif node.type == NODES["collective"]:
                assert rank in groups[has["pg_name"]]
                own = seen.setdefault(has["pg_name"], {}).setdefault(rank, [])
                own.append((has["comm_type"], has["comm_size"]))
            else:
                assert node.type == NODES["compute"]
                operations += has.get("num_ops", 0)
    model = pf.models.model_flops(SMALL, sequences=64)
    assert operations == pytest.approx(model.total, rel=0.3)  # vector operators, recomputation
    assert sent
    assert sent == taken
    assert {name.partition(".")[0] for name in seen} >= {"tensor", "data"}
    for name, ranks in seen.items():  # every member asks for the same collectives in one order
        assert sorted(ranks) == groups[name]
        first = ranks[groups[name][0]]
        assert all(own == first for own in ranks.values())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bertlarge", {"schedule": "interleaved", "vpp": 2, "zero": 3, "shard": 2}),
        ("mixtral-8x7b", {"tp": 2, "pp": 2, "dp": 4, "cp": 2, "ep": 4, "etp": 1}),
        ("llama2-7b", {"pp": 2, "dp": 4, "cp": 2, "cp_kind": "ring"}),
    ],
)
def test_chakra_files_of_a_stage_are_those_of_each_rank_alone(name, changes, tmp_path):
    """Files are made from one rank of each stage; every node of every rank is as made for it."""
    pytest.importorskip("google.protobuf", reason="the extra trace is not installed")
    from phaze_fast.export.chakra import chakra_trace

    model = models.load(name).replace(layers=4)
    given = {"tp": 2, "pp": 2, "dp": 8, "global_batch": 16, "zero": 1, **changes}
    trace = chakra_trace(model, CLUSTER, given)
    for rank, path in enumerate(trace.write(tmp_path)[1:]):
        _, nodes = read_trace(path.read_bytes())
        assert nodes == list(trace.nodes(rank))


def test_chakra_traces_of_a_thousand_ranks(tmp_path):
    pytest.importorskip("google.protobuf")
    from phaze_fast.export.chakra import chakra_trace

    cluster = pf.Cluster(devices=1024, fabric="dgx-h100", chip="h100")
    given = {"tp": 8, "pp": 2, "dp": 64, "global_batch": 64, "recompute": "none"}
    trace = chakra_trace(SMALL.replace(layers=2), cluster, given)
    assert len(trace.write(tmp_path)) == 1025
    with pytest.raises(InvalidInputError, match="rank: 1024 is not accepted"):
        list(trace.nodes(1024))


@pytest.mark.parametrize(
    ("length", "head"), [(0, b"\0"), (1, b"\1"), (127, b"\x7f"), (128, b"\x80\1"), (300, b"\xac\2")]
)
def test_a_message_is_preceded_by_its_length_in_as_few_bytes_as_it_takes(length, head):
    assert _framed(b"x" * length) == head + b"x" * length


@pytest.mark.parametrize("ranks", [(-1, 3), (3, 32)])
def test_no_file_is_written_where_a_rank_is_not_there(ranks, tmp_path):
    pytest.importorskip("google.protobuf")
    from phaze_fast.export.chakra import chakra_trace

    trace = chakra_trace(SMALL, CLUSTER, plan_with("1f1b"))
    with pytest.raises(InvalidInputError, match="is not accepted; expected 0 to 31"):
        trace.write(tmp_path / "chakra", ranks)
    assert not (tmp_path / "chakra").exists()
    paths = trace.write(tmp_path / "chakra", (5, 31))
    assert [path.name for path in paths] == ["comm_group.json", "plan.5.et", "plan.31.et"]


# ---- profiles ----


def kernel(name, ts, dur, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def test_without_marks_a_step_lasts_from_the_first_kernel_to_the_last(tmp_path):
    events = [kernel("gemm", 500.0, 4e3), kernel("ncclDevKernel_AllReduce", 1e3, 1e3)]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_profile(path).step_s == pytest.approx(4e-3)
    assert read_profile(path, steps=2).step_s == pytest.approx(2e-3)


def test_kernels_of_a_device_are_told_from_the_rest_and_counted_once(tmp_path):
    events = [
        kernel("gemm", 10.0, 40.0),
        kernel("rms_norm", 20.0, 5.0, "Kernel"),  # inside the product
        kernel("Memcpy DtoH", 30.0, 30.0, "gpu_memcpy"),  # 10 us longer than the product
        kernel("unknown", 80.0, 10.0),
        kernel("aten::mm", 0.0, 1e3, "cpu_op"),
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0.0},  # without a length
        {"ph": "i", "cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 1e3},
        *[kernel("ProfilerStep#1", 0.0, 100.0, cat) for cat in ("user_annotation", "gpu_user")],
    ]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(events))
    profile = read_profile(path)
    assert (profile.steps, profile.rank) == (1, None)
    assert (profile.step_s, profile.busy_s) == pytest.approx((100e-6, 60e-6))
    assert profile.kernels == {"matrix products": 1, "norms": 1, "copies": 1, "other": 1}
    seconds = {"matrix products": 40e-6, "norms": 5e-6, "copies": 30e-6, "other": 10e-6}
    assert profile.seconds == pytest.approx(seconds)
    two = read_profile(path, steps=2)  # from the first kernel to the last, whatever is marked
    assert (two.steps, two.step_s, two.busy_s) == pytest.approx((2, 40e-6, 30e-6))


def test_a_profile_of_an_unknown_rank_is_of_the_first_stage():
    plan = plan_with("1f1b")  # 32 devices, 8 of each stage
    for rank, stage in ((None, 0), (31, 3), (32, 0)):
        profile = Profile(1, 2.0, 1.5, {"norms": 1.0}, {"norms": 3}, rank)
        found = compare_profile(SMALL, CLUSTER, plan, profile)
        assert (found.stage, found.measured_idle_s) == (stage, 0.5)
        assert found.families[0].family == "norms"  # the largest difference
        assert found.families[0].kernels == 3
        assert all(family.measured_s or family.predicted_s for family in found.families)
    busy = Profile(1, 1.0, 1.0 + 1e-12, {}, {}, None)
    assert compare_profile(SMALL, CLUSTER, plan, busy, stage=3).measured_idle_s == 0.0
    with pytest.raises(InvalidInputError, match="stage: -1 is not accepted; expected 0 to 3"):
        compare_profile(SMALL, CLUSTER, plan, busy, stage=-1)


def test_a_profile_is_compared_with_a_plan(tmp_path):
    events = [kernel(f"ProfilerStep#{k}", 1e5 * k, 1e5, "user_annotation") for k in range(2)]
    for k in range(2):
        at = 1e5 * k
        events += [
            kernel("sm90_xmma_gemm_bf16bf16_bf16f32", at, 60e3),
            kernel("flash_fwd_kernel", at + 60e3, 10e3),
            kernel("ncclDevKernel_AllReduce_Sum_f32", at + 65e3, 10e3),
            kernel("void at::native::vectorized_elementwise_kernel", at + 80e3, 5e3),
        ]
    path = tmp_path / "profile.json"
    marks = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, {"dur": 1}, 7]
    path.write_text(json.dumps({"traceEvents": marks + events, "distributedInfo": {"rank": 20}}))
    profile = read_profile(path)
    assert profile.steps == 2
    assert profile.step_s == pytest.approx(0.1)
    assert profile.busy_s == pytest.approx(0.08)
    assert profile.seconds["matrix products"] == pytest.approx(0.06)
    assert profile.kernels["collectives"] == 1
    found = compare_profile(SMALL, CLUSTER, plan_with("1f1b"), profile)
    assert found.stage == 2  # rank 20 of tp 2, dp 4: the third stage
    by_family = {family.family: family for family in found.families}
    attention = by_family["attention"]
    assert attention.measured_s == pytest.approx(0.01)
    assert attention.difference_s == attention.measured_s - attention.predicted_s
    assert min(by_family[name].predicted_s for name in ("attention", "norms", "element-wise")) > 0
    assert any(not family.measured_s or not family.predicted_s for family in found.families)
    predicted = sum(family.predicted_s for family in found.families)
    load = pf.predict(SMALL, CLUSTER, plan_with("1f1b"))
    assert (found.measured_step_s, found.measured_idle_s) == pytest.approx((0.1, 0.02))
    assert found.predicted_step_s == load.time_s
    assert load.parts_s["imbalance"] > 0.0
    assert by_family["optimizer"].predicted_s == load.parts_s["optimizer"] > 0.0
    assert found.predicted_idle_s == load.parts_s["bubble"] + load.parts_s["imbalance"]
    spec = plan_with("1f1b", tp=1, dp=8)
    alone, parts = (
        compare_profile(SMALL, CLUSTER, spec, profile),
        pf.predict(SMALL, CLUSTER, spec).parts_s,
    )
    sent = next(f.predicted_s for f in alone.families if f.family == "collectives")
    assert sent == parts["data_comm"] + parts["pipeline_comm"] > parts["data_comm"]
    differences = [abs(family.difference_s) for family in found.families]
    assert differences == sorted(differences, reverse=True)
    assert 0.5 < predicted / (load.stages[2].load_s * load.micro_batches) < 1.5
    with pytest.raises(InvalidInputError, match="stage: 4 is not accepted"):
        compare_profile(SMALL, CLUSTER, plan_with("1f1b"), profile, stage=4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("{}", "traceEvents: missing"),
        ('{"traceEvents": []}', "no kernel"),
        ('{"traceEvents": [{"ph": "X", "ts": true, "dur": 1}]}', "ts: True is not accepted"),
        ('{"traceEvents": [{"ph": "X", "ts": 1, "dur": "1"}]}', "dur: '1' is not accepted"),
        ('{"traceEvents": [1, {"ph": "X", "ts": 1, "dur": 2e18}]}', "traceEvents.1.dur: 2e"),
        ('{"traceEvents": {}}', "traceEvents: missing"),
    ],
)
def test_a_file_that_is_no_profile(text, said, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=said):
        read_profile(path)
