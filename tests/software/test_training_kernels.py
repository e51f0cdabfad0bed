"""Kernels that training libraries add to a model's own operators, against what was measured."""

import pytest
from golden_files import golden_rows

from phaze_fast.calibration.published import read_run
from phaze_fast.calibration.validation import PredictedRun
from phaze_fast.hardware import Cluster, presets
from phaze_fast.models import load
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.planning import predict
from phaze_fast.software import chip_as_run, load_software, model_as_run


def block(software, model="llama2-7b", **widths):
    strategy = Strategy(**widths)
    run = model_as_run(load(model), software, strategy.tp)
    return layer_graph(run, strategy).layers[1]


def sums(graph):
    return {
        name: op
        for name, op in zip(graph.names, graph.ops, strict=True)
        if name.endswith("-gradients")
    }


def test_a_block_adds_up_as_many_gradients_as_were_profiled():
    """Queries, keys and values: two sums; both projections up: one; each residual: one."""
    (measured,) = {int(r["adds"]) for r in golden_rows("h200_checkpoints.csv") if r["adds"] == "65"}
    of_gradients = (measured - 8 - 36 - 1) / 4
    found = sums(block(load_software("pytorch-eager")).backward)
    assert sum(int(op["n"]) for op in found.values()) == of_gradients == 5
    llama = load("llama2-7b")
    rows = 2.0 * llama.seq * llama.hidden
    for op in found.values():
        assert (op["read_bytes"], op["write_bytes"]) == (2 * rows * op["n"], rows * op["n"])


@pytest.mark.parametrize("model", ["llama2-7b", "gpt2-xl", "mixtral-8x7b", "t5-11b"])
def test_sums_take_time_and_no_memory(model):
    """They are made in place; fused ones read each gradient once more and write nothing."""
    eager = load_software("pytorch-eager")
    free, kernels, fused = (
        block(eager.replace(gradient_sums=how), model) for how in ("free", "kernels", "fused")
    )
    assert not sums(free.backward)
    assert kernels.work_bytes == fused.work_bytes == free.work_bytes
    ours, theirs = sums(kernels.backward), sums(fused.backward)
    assert ours.keys() == theirs.keys()
    assert len(ours) >= 2
    for name, op in theirs.items():
        assert op["write_bytes"] == 0
        assert 2 * op["read_bytes"] == ours[name]["read_bytes"]
    assert kernels.forward.names == free.forward.names


def test_gradients_of_what_one_product_makes_are_joined_not_added():
    for fused_qkv, adds in ((False, 5), (True, 3)):
        graph = block(load_software("pytorch-eager").replace(fused_qkv=fused_qkv)).backward
        assert sum(int(op["n"]) for op in sums(graph).values()) == adds


def test_with_tensor_parallelism_whole_rows_are_added_before_they_are_scattered():
    widths = {"tp": 4, "sequence_parallel": True}
    found = sums(block(load_software("fsdp-torchtitan"), **widths).backward)
    llama = load("llama2-7b")
    rows = 2.0 * llama.seq * llama.hidden
    assert found["attention-gather-gradients"]["read_bytes"] == 2 * rows
    assert found["input-gradients"]["read_bytes"] == rows / 4


def test_checkpoints_of_pytorch_leave_the_last_product_out():
    """All products of the forward pass but the last run again: 6 of 7, as were profiled."""
    rows = {(r["hidden"], r["checkpoints"]): r for r in golden_rows("h200_checkpoints.csv")}
    for hidden in ("4096", "2048"):
        plain, again = (rows[hidden, kind] for kind in ("none", "early-stop"))
        more = (int(again["products"]) - int(plain["products"])) / 4
        forward = block(load_software("pytorch-eager")).forward
        kinds = ("q", "k", "v", "proj", "up", "gate", "down")
        assert more == len(set(kinds) & forward.recomputed("needed")) == len(kinds) - 1
        assert "down" in forward.recomputed("full")
        assert float(again["ms"]) < float(rows[hidden, "reentrant"]["ms"])


def test_copies_of_fsdp_take_as_long_as_measured():
    rows = golden_rows("h200_fsdp_copies.csv")
    copy = {r["hidden"]: float(r["us_median"]) / int(r["parameters"]) for r in rows if r["kind"] == "copy"}  # fmt: skip
    used = load_software("fsdp-torchtitan")
    for kind, moved in (("gathered", used.gather_copy_bytes), ("scattered", used.scatter_copy_bytes)):  # fmt: skip
        found = [
            4.0 * float(r["us_median"]) / int(r["parameters"]) / copy[r["hidden"]]
            for r in rows
            if r["kind"] == kind
        ]
        assert moved == pytest.approx(sum(found) / len(found), rel=0.01)
    with_copies, without = (
        block(s) for s in (used, used.replace(gather_copy_bytes=0.0, scatter_copy_bytes=0.0))
    )
    for way, moved in (("forward", 4.9), ("backward", 17.8)):
        ours, theirs = (getattr(layer, way) for layer in (with_copies, without))
        assert ours.names == (*theirs.names, "shares-copy-w")
        total = ours.ops[-1]["read_bytes"] + ours.ops[-1]["write_bytes"]
        assert total == pytest.approx(moved * with_copies.device_parameters)
    assert with_copies.work_bytes == without.work_bytes
    assert "shares-copy-w" not in with_copies.forward.recomputed("needed")


def test_one_hot_embeddings_are_products_both_ways():
    model = load("llama2-7b")
    used = load_software("maxtext")
    layer = layer_graph(model_as_run(model, used), Strategy()).layers[0]
    whole = 2.0 * model.seq * model.vocab * model.hidden
    assert layer.forward.flops == layer.backward.flops == whole
    without = used.replace(one_hot_embedding=False)
    assert layer_graph(model_as_run(model, without), Strategy()).layers[0].forward.flops == 0
    assert block(without).forward.names == block(used).forward.names


def visited_tiles(sizes, tile):
    """Tiles of rows by group, those that two groups share once for each: the plain count."""
    found, start = 0, 0
    for size in sizes:
        found += len({row // tile for row in range(start, start + size)})
        start += size
    return found


def test_grouped_products_visit_shared_tiles_once_for_each_expert():
    """The rule is the most that any sizes of groups make, and close to what uneven ones do."""
    tile, sizes = 8, [33, 40, 29, 31, 35, 27, 30, 31]
    rows = sum(sizes)
    most = rows // tile + len(sizes)  # what rows + tile rows of each group come to
    assert most - len(sizes) < visited_tiles(sizes, tile) <= most
    used = load_software("maxtext")
    ours, plain = (block(s, "mixtral-8x7b") for s in (used, used.replace(expert_tile_rows=0)))
    assert ours.forward.flops == plain.forward.flops
    for graph, other in ((ours.forward, plain.forward), (ours.backward, plain.backward)):
        for name, op, without in zip(graph.names, graph.ops, other.ops, strict=True):
            inner = "k" if name.endswith("-w") and "expert" in name else "m"
            extra = 512 if name.removeprefix("d-").startswith("expert-") and op["b"] > 1 else 0
            assert int(op[inner]) - int(without[inner]) == extra, name


def test_backward_attention_in_two_kernels_is_slower():
    chip = presets.chip("tpuv6e")
    used = load_software("maxtext")
    cluster = Cluster(devices=8, fabric="tpuv6e-pod", chip=chip)
    plan = {"dp": 8, "global_batch": 8, "zero": 3, "seq": 8192}
    one, two = (
        predict("llama2-7b", cluster, {**plan, "software": used.replace(attention=kernel)})
        for kernel in ("flash", "splash-split")
    )
    assert one.time_s < two.time_s
    split = chip_as_run(chip, used.replace(attention="splash-split")).tuning.attention
    assert split.backward_efficiency == pytest.approx(5 / 7, rel=1e-4)
    assert split.backward_ops_per_score == 2 * chip.tuning.attention.backward_ops_per_score


def test_seconds_of_a_row_contain_its_evaluations():
    """Whole batches of forward passes: 5,662 sequences after every 24,576."""
    cells = {
        "source": "MLPerf Training v4.0", "framework": "MaxText (JAX)", "model": "GPT-3-175B",
        "layers": "2", "hidden": "12288", "heads": "96", "ffn": "49152", "vocab": "50304",
        "seq": "2048", "precision": "int8", "gpu": "TPU v5p", "n_gpus": "64", "tp": "8",
        "pp": "1", "dp": "8", "fsdp": "8", "micro_batch": "8", "recompute": "full",
        "iter_time_s": "1.0", "zero_or_dist_opt": "FSDP",
    }  # fmt: skip
    said = "uncertain: block to block time, which contains the evaluation pass"
    for batch, evaluated in ((2048, 6144), (4096, 8192), (6144, 6144)):
        row = {**cells, "global_batch": str(batch)}
        assert read_run(2, row).evaluated == 0.0
        run = read_run(2, {**row, "verified": said})
        assert run.evaluated == pytest.approx(evaluated / 24576)
    found = PredictedRun(run, predict(run.model, run.cluster, run.plan))
    again = found.plan.parts_s["recompute"]
    forward = (found.plan.time_s - again) / 3.0
    assert found.time_s == pytest.approx(found.plan.time_s + 0.25 * forward)
    low, high = found.interval_s
    assert low < found.time_s < high
    assert found.error == pytest.approx(found.time_s / 1.0 - 1.0)
