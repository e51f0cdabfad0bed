"""Activations and the optimiser's state in the host's memory: what it must do, and refusals."""

import numpy as np
import pytest
from golden_files import golden_rows

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.planning import predict_batch
from phaze_fast.planning.times import backward_with_copies_s
from phaze_fast.software import DEFAULT, load_software, model_as_run

MODEL = models.load("llama2-7b").replace(layers=8)
CHIP = presets.chip("h100")


def node(devices=8, link=1.0, memory_gib=80, chip=CHIP):
    """A node of H100s whose links to the host are so many times as fast."""
    host = chip.host.replace(link_bytes_per_s=link * chip.host.link_bytes_per_s)
    hbm = chip.hbm.replace(capacity_bytes=memory_gib * 2**30)
    return pf.Cluster(devices=devices, fabric="dgx-h100", chip=chip.replace(host=host, hbm=hbm))


def test_offloaded_blocks_store_nothing_and_return_two_at_a_time():
    block = layer_graph(MODEL, Strategy(micro_batch=1)).layers[1]
    forward = block.forward
    for rest in ("none", "norms+activations"):
        mode = "offload" if rest == "none" else f"{rest}+offload"
        assert forward.stashed_bytes(mode) == 0
        assert forward.offloaded_bytes(mode) == forward.stashed_bytes(rest) > 0
        assert forward.recomputed(mode) == forward.recomputed(rest)
        both = forward.stashed_bytes() + forward.stashed_bytes(rest) + block.work_bytes
        assert block.live_bytes(mode, True) == both
    assert forward.offloaded_bytes("full") == 0


def test_copies_take_time_where_passes_are_shorter():
    """By hand, without pipeline: both passes of a block wait until its copy ends."""
    given = {"dp": 8, "global_batch": 8, "zero": 1}
    none = pf.predict(MODEL, node(), {**given, "recompute": "none"})
    run = model_as_run(MODEL, load_software(DEFAULT), 1)
    block = layer_graph(run, Strategy(micro_batch=1)).layers[1]
    for link in (1e-3, 1e-2):  # so slow that all passes wait
        slow = pf.predict(MODEL, node(link=link), {**given, "recompute": "offload"})
        copy_s = block.forward.stashed_bytes() / (55e9 * link)
        # Embedding and head take a part of the computation, and copy nothing.
        left_s = 8 * 2 * copy_s - slow.parts_s["recompute"]
        assert 0.5 * none.parts_s["compute"] < left_s < none.parts_s["compute"]
    fast = pf.predict(MODEL, node(link=1e6), {**given, "recompute": "offload"})
    assert fast.time_s == pytest.approx(none.time_s, rel=1e-12)
    assert fast.memory_bytes < none.memory_bytes
    seconds = [
        pf.predict(MODEL, node(link=x), {**given, "recompute": "offload"}).time_s
        for x in (0.1, 0.3, 1.0, 3.0, 10.0)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_copies_of_blocks_take_what_an_h200_took():
    """Six blocks or more, whose first and last copies count for little."""
    rows, errors = golden_rows("h200_offload.csv"), []
    rate = presets.chip("h200").host.link_bytes_per_s
    kept = {}
    for row in rows:
        what = tuple(row[name] for name in ("hidden", "seq", "micro_batch", "blocks"))
        if row["mode"] == "keep":
            kept[what] = float(row["seconds"])
        elif row["mode"] == "offload" and int(row["blocks"]) >= 6:
            passes_s = np.array([1.0, 2.0]) / 3.0 * kept[what]  # two products backward for one
            copy_s = float(row["offloaded_bytes"]) / rate
            found_s = passes_s[0] + backward_with_copies_s(*passes_s, copy_s)
            errors.append(found_s / float(row["seconds"]) - 1.0)
    assert len(errors) == 4
    assert max(map(abs, errors)) < 0.05, errors


def test_the_host_updates_the_state_that_it_has():
    given = {"dp": 8, "global_batch": 8, "zero": 1, "recompute": "none"}
    here, there = (
        pf.predict(MODEL, node(), {**given, "offload_optimizer": x}) for x in (False, True)
    )
    parameters = sum(
        layer.count * layer.device_parameters for layer in layer_graph(MODEL, Strategy()).layers
    )
    moved_s = parameters / 8 * (2 * 12 + 4 + 2) / 76.8e9  # the host's memory binds
    assert there.parts_s["optimizer"] == pytest.approx(moved_s, rel=1e-3)
    slow = pf.predict(MODEL, node(link=0.1), {**given, "offload_optimizer": True})
    link_s = parameters / 8 * 4 / 5.5e9  # gradients arrive while weights, half as long, return
    assert slow.parts_s["optimizer"] == pytest.approx(link_s, rel=1e-3)
    assert there.stages[0].memory["optimizer"] == 0.0
    saved = here.memory_bytes - there.memory_bytes
    assert saved == pytest.approx(12 * parameters / 8, rel=1e-9)
    rows = predict_batch(
        MODEL, node(), pf.Training(global_batch=8), dp=8, zero=1, recompute="none",
        offload_optimizer=[False, True],
    )  # fmt: skip
    assert rows.time_s.tolist() == [here.time_s, there.time_s]


@pytest.mark.parametrize("memory_gib", [8, 9, 10, 80])
def test_a_plan_that_may_offload_is_never_slower_and_is_what_predict_says(memory_gib):
    cluster = node(memory_gib=memory_gib)
    step = pf.Training(global_batch=64, micro_batch=1, zero=(1, 3), tp=(1, 2))
    plain = pf.plan(MODEL, cluster, step)
    found = pf.plan(MODEL, cluster, step.replace(offload=("activations", "optimizer")))
    best = found.best
    assert found.status == "optimal"
    assert "host" in found.space
    if plain.plans:
        assert best.time_s <= plain.best.time_s * (1 + 1e-12)
    if memory_gib < 80:
        offloads = best.offload_optimizer or any("offload" in s.recompute for s in best.stages)
        assert offloads
        assert not plain.plans or best.time_s < plain.best.time_s
    assert pf.predict(MODEL, cluster, best).time_s == pytest.approx(best.time_s, rel=1e-12)
    for what in ("activations", "optimizer"):  # each alone is no faster than both
        one = pf.plan(MODEL, cluster, step.replace(offload=what))
        assert not one.plans or best.time_s <= one.best.time_s * (1 + 1e-12)


def test_what_cannot_be_offloaded_is_refused():
    given = {"dp": 8, "global_batch": 8, "zero": 1}
    tpu = pf.Cluster(devices=8, fabric="tpuv4-pod", chip="tpuv4")
    for more in ({"recompute": "offload"}, {"offload_optimizer": True}):
        with pytest.raises(InvalidInputError, match="tpuv4 has no link to a host"):
            pf.predict(MODEL, tpu, {**given, **more})
    with pytest.raises(InvalidInputError, match="state of muon is not kept by the host"):
        pf.PlanSpec(**given, offload_optimizer=True, optimizer="muon")
    with pytest.raises(InvalidInputError, match="offload: is not accepted where chips are"):
        pf.search(
            MODEL, pf.ArchitectureSpace.tpuv4_area(), node().replace(chip=None),
            pf.Training(global_batch=8, recompute="offload"),
        )  # fmt: skip
