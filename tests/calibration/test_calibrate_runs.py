"""Calibration by whole runs: known constants are found again, stragglers do not move them."""

import csv
import importlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import with_memory

import phaze_fast as pf
from phaze_fast.calibration import calibrate_runs
from phaze_fast.calibration.calibrate_runs import (
    RunConstant,
    constants_of,
    explanations,
    fit_runs,
    habits_of,
    read_cluster_runs,
    reserved_share,
    scaled_fabric,
)
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets
from phaze_fast.software import chip_as_run, load_software

module = importlib.import_module("phaze_fast.calibration.calibrate_runs")
COLUMNS = [
    *("model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "chip", "devices"),
    *("tp", "pp", "dp", "zero", "micro_batch", "global_batch", "recompute", "precision"),
    *("software", "step_s", "memory_gib"),
]
SHAPE = "llama-1B,16,2048,32,32,8192,32000,2048,H100"
LAYOUTS = ("8,1,2", "1,1,16", "1,2,8", "2,1,8")  # tp, pp, dp
TRUE = {"product_speed": 0.8, "network_share": 0.6}


def table(path, seconds, software="handmade"):
    rows = [
        f"{SHAPE},16,{layout},1,1,16,none,bf16,{software},{s},20".split(",")
        for layout, s in zip(LAYOUTS, seconds, strict=False)
    ]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return path


def made_up(path):
    """Seconds that a cluster with known constants would take."""
    cluster, _ = read_cluster_runs(table(path, [1.0] * len(LAYOUTS)))
    middle = {c.name: c.middle for c in constants_of(cluster.software)}
    return np.exp(cluster.log_seconds({**middle, **TRUE})).tolist()


@pytest.mark.slow
def test_constants_of_a_made_up_cluster_are_found_again(tmp_path, capsys):
    path = tmp_path / "runs.csv"
    table(path, made_up(path))
    found = calibrate_runs(path, "mine")
    told = {c.name: c for c in found.constants}
    for name, value in TRUE.items():
        assert told[name].low < value < told[name].high
    assert told["product_speed"].note == ""
    assert told["reserved_share"].note == ""
    assert "not determined by these runs" in {c.note for c in found.constants}
    assert np.abs(found.errors).mean() < 0.5 * np.abs(found.errors_before).mean()
    assert found.next_run.spread_after < found.next_run.spread_before
    assert found.to_dict()["next_run"] == str(found.next_run)
    assert replace(found, next_run=None).to_dict()["next_run"] is None
    file = tmp_path / "mine.yaml"
    assert main(["study", "calibrate", str(path), "--name", "mine", "-o", str(file)]) == 0
    assert "a further run would tell most" in capsys.readouterr().err
    # What every command takes: chip, interconnect and software of one file.
    assert presets.chip(file) == presets.chip("h100")
    assert presets.fabric(file) == found.fabric
    assert load_software(file) == found.software
    options = f"predict llama2-7b --devices 16 --tp 8 --dp 2 --global-batch 16 --calibration {file}"
    assert main(options.split()) == 0
    assert "80% interval" in capsys.readouterr().out
    cluster = pf.Cluster(devices=16, fabric=found.fabric, chip="h100")
    plan = pf.predict("llama2-7b", cluster, {"tp": 8, "dp": 2, "global_batch": 16, "software": found.software})  # fmt: skip
    ratios = [bound / plan.time_s for bound in plan.interval_s]
    assert ratios == pytest.approx(found.software.step_ratios)
    assert main([*options.split()[:-2]]) == 2
    assert "--chip: missing" in capsys.readouterr().err


@settings(max_examples=30, deadline=None)
@given(st.floats(0.6, 1.4), st.floats(1.5, 8.0))
def test_a_straggler_does_not_move_a_constant(speed, slower):
    work = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    constant = RunConstant("speed", "", 1.0, 0.3, 0.2, 3.0)

    def fitted(measured):
        found = fit_runs(lambda v: np.log(work / v["speed"]), measured, [constant])
        return np.log(found.values()["speed"])

    clean = work / speed
    straggling = clean * [1, 1, slower, 1, 1]
    assert abs(fitted(straggling) - fitted(clean)) < 0.06


@pytest.mark.parametrize("measured", [(1.0, 1.3, 2.5), (3.0, 3.2, 2.9), (0.7, 0.9, 4.0)])
def test_the_fit_is_the_most_probable_value(measured):
    """Student distributions of errors and of the number, written out and searched on a grid."""
    usual, spread, noise = 1.0, 0.3, 0.08
    grid = np.linspace(np.log(0.1), np.log(2.0), 20_001)
    errors = (-grid[:, None] - np.log(measured)) / noise
    density = (1 + errors**2 / 2) ** -1.5
    density = density.prod(axis=1) * (1 + ((grid - np.log(usual)) / spread) ** 2 / 4) ** -2.0
    speed = RunConstant("speed", "", usual, spread, 0.1, 2.0)
    found = fit_runs(lambda v: np.full(3, -np.log(v["speed"])), measured, [speed])
    assert found.values()["speed"] == pytest.approx(np.exp(grid[density.argmax()]), rel=0.03)


def test_runs_that_are_all_far_off_are_not_three_stragglers():
    speed = RunConstant("speed", "", 1.0, 0.3, 0.1, 2.0)
    found = fit_runs(lambda v: np.full(3, -np.log(v["speed"])), [3.0, 3.2, 2.9], [speed])
    assert found.values()["speed"] == pytest.approx(0.33, rel=0.05)


def test_a_number_without_effect_near_its_usual_value_is_found():
    host = RunConstant("host_s", "s", 1.0, 0.7, 0.1, 10.0)
    found = fit_runs(lambda v: np.log(np.maximum(1.5, np.full(4, v["host_s"]))), [2.5] * 4, [host])
    assert found.values()["host_s"] == pytest.approx(2.5, rel=0.05)


def test_a_number_moves_as_far_as_runs_tell():
    """Where speeds above 1.05 have no effect, because the host is slower, 1.05 is told."""
    speed = RunConstant("speed", "", 1.0, 1.0, 0.1, 10.0)
    found = fit_runs(lambda v: np.log(np.maximum([0.95], 1.0 / v["speed"])), [0.95], [speed])
    assert found.values()["speed"] == pytest.approx(1.0 / 0.95, rel=0.01)


def test_no_runs_that_tell_leave_what_was_known():
    constant = RunConstant("idle", "", 2.0, 0.5, 0.1, 10.0)
    found = fit_runs(lambda _: np.zeros(3), [1.0, 1.1, 0.9], [constant])
    assert found.values()["idle"] == pytest.approx(2.0)
    errors = -np.log([1.0, 1.1, 0.9])
    told = (module._weights(errors) * errors**2).sum()  # beside as many usual runs as assumed
    runs, usual = module._NOISE_RUNS, module._LEFT
    assert found.noise**2 == pytest.approx((runs * usual**2 + told) / (runs + 3))
    assert np.sqrt(found.covariance[0, 0]) == pytest.approx(0.5)


@pytest.mark.slow
def test_what_runs_cannot_tell_is_as_probable_as_before(tmp_path):
    """Without a pipeline, nothing tells how stages are divided."""
    path = tmp_path / "runs.csv"
    cluster, _ = read_cluster_runs(table(path, made_up(path)[:2]))
    shares = {found.habit.words: share for found, share in explanations(cluster)}
    for words in ("fused attention", "explicit attention"):
        even, work = (
            shares[f"stages of equal depth, {words}"],
            shares[f"stages of equal work, {words}"],
        )
        assert work / even == pytest.approx(3.0)


def test_runs_of_two_clusters_are_refused(tmp_path):
    path = table(tmp_path / "runs.csv", [1.0, 1.0])
    path.write_text(path.read_text().replace("H100", "A100", 1))
    with pytest.raises(InvalidInputError, match=r"chips a100-80, h100 are not accepted together"):
        calibrate_runs(path)
    path.write_text(",".join(COLUMNS) + "\n")
    with pytest.raises(InvalidInputError, match="no row is accepted"):
        calibrate_runs(path)


def test_shares_of_tiers_and_reserved_memory():
    fabric = presets.fabric("dgx-h100")
    scaled = scaled_fabric(fabric, 0.5, 0.25)
    ratio = [a.bandwidth_bytes_per_s / b.bandwidth_bytes_per_s
             for a, b in zip(scaled.tiers, fabric.tiers, strict=True)]  # fmt: skip
    assert ratio == [0.5, 0.25]
    torus = presets.fabric("tpuv4-pod")
    assert scaled_fabric(torus, 0.5, 0.5) is torus
    one, few = reserved_share([1.3]), reserved_share([1.3] * 8)
    assert one[0] < few[0] <= 0.3
    assert few[1] < one[1] < reserved_share([])[1]


@pytest.mark.parametrize("runs", [1, 4])
def test_reserved_memory_is_weighed_by_how_sure_each_side_is(runs):
    (middle, spread), noise = module._RESERVED, 1.25 * module._MEMORY_NOISE / runs**0.5
    sure, told = 1.0 / spread**2, 1.0 / noise**2  # a median is 1.25 times less sure than a mean
    share, left = reserved_share([1.0 + middle + 0.1] * runs)
    assert share == pytest.approx((sure * middle + told * (middle + 0.1)) / (sure + told))
    assert left == pytest.approx((sure + told) ** -0.5)


def test_reserved_memory_without_runs_is_what_was_known():
    best = SimpleNamespace(cluster=SimpleNamespace(runs=()))
    constant, told = module._memory(best, {})
    middle, spread = module._RESERVED
    assert not told
    assert constant.high == pytest.approx(middle + 1.645 * spread, rel=1e-3)
    assert constant.low == pytest.approx(max(middle - 1.645 * spread, 0.0), rel=1e-3)


@given(seed=st.integers(0, 2**32))
def test_the_next_run_leaves_the_least_spread(seed):
    rng = np.random.default_rng(seed)
    slopes, root, noise = rng.normal(size=(5, 3)), rng.normal(size=(3, 3)), 0.3
    covariance = root @ root.T + np.eye(3)
    left = []
    for slope in slopes:
        known = np.linalg.inv(np.linalg.inv(covariance) + np.outer(slope, slope) / noise**2)
        left.append(np.mean([s @ known @ s for s in slopes]) ** 0.5)
    chosen, before, after = module.most_telling(slopes, covariance, noise)
    assert chosen == int(np.argmin(left))
    assert after == pytest.approx(min(left))
    assert before == pytest.approx(np.mean([s @ covariance @ s for s in slopes]) ** 0.5)


def test_constants_follow_the_profile():
    generic = load_software("generic")
    assert [c.name for c in constants_of(generic)][-1] == "exposed_gradients"
    waiting = generic.replace(overlap_gradients=False)
    assert "exposed_gradients" not in [c.name for c in constants_of(waiting)]
    fastest = constants_of(generic, presets.chip("h100"))[0].most
    assert 1.0 <= fastest < 1.3  # no product is faster than the chip's peak


@pytest.mark.parametrize("known", [0.8, 1.0, 1.12, 1.27])
def test_products_may_be_as_fast_as_the_chip_s_peak(known):
    """To a fiftieth of the speed of the profile, and never slower than that."""
    chip = presets.chip("h100")
    software = load_software("generic").replace(product_speed={chip.name: known})
    most = constants_of(software, chip)[0].most
    chip_as_run(chip, software.replace(product_speed={chip.name: most * known}))
    with pytest.raises(InvalidInputError, match="peak"):
        chip_as_run(chip, software.replace(product_speed={chip.name: (most + 0.02) * known}))


def test_slices_of_gathered_weights_are_a_number_of_unknown_software():
    """The host copies each replica's slice of each matrix: so much more for twice the replicas."""
    names = {
        name: [c.name for c in constants_of(load_software(name))] for name in ("generic", "nemo")
    }
    assert "slice_host_s" in names["generic"]
    assert "slice_host_s" not in names["nemo"]
    sliced = load_software("nanotron")
    seconds = []
    for dp in (8, 16):
        cluster = pf.Cluster(devices=dp, fabric="dgx-h100", chip="h100")
        plan = {"dp": dp, "zero": 1, "global_batch": dp, "software": sliced}
        whole = {**plan, "software": sliced.replace(slice_host_s=0.0)}
        seconds.append(
            pf.predict("llama3-8b", cluster, plan).time_s
            - pf.predict("llama3-8b", cluster, whole).time_s
        )
    assert seconds == pytest.approx([dp * (32 * 7 + 2) * 8e-6 for dp in (8, 16)])


def cut(cluster, division, values):
    """The same runs with the seconds of software that divides stages in a given way."""
    own = replace(cluster, software=cluster.software.replace(stage_division=division))
    seconds = np.exp(own.log_seconds(values))
    runs = [replace(r, time_s=float(s)) for r, s in zip(cluster.runs, seconds, strict=True)]
    return replace(cluster, runs=tuple(runs))


@pytest.mark.slow
@pytest.mark.parametrize("division", ["even", "work"])
def test_runs_tell_how_stages_are_divided(tmp_path, division):
    # A head of 131,072 tokens weighs as much as four blocks of a small model.
    path = tmp_path / "runs.csv"
    text = table(path, [1.0] * 4).read_text().replace(",32000,", ",131072,")
    path.write_text(text.replace(",16,8,1,2,", ",16,1,4,4,").replace(",16,2,1,8,", ",16,1,8,2,"))
    cluster, _ = read_cluster_runs(path)
    middle = {c.name: c.middle for c in constants_of(cluster.software)}
    found = explanations(cut(cluster, division, middle))[0][0]
    assert found.habit.fields.get("stage_division", "even") == division
    assert found.habit.fields.get("attention", "flash2") == "flash2"
    assert np.abs(found.posterior.errors).max() < 0.06


@pytest.mark.parametrize(("divided", "recompute", "explicit"), [
    (False, "none", 0.1), (True, "none", 0.1), (True, "full", 0.75)
])  # fmt: skip
def test_habits_share_what_runs_say(tmp_path, monkeypatch, divided, recompute, explicit):
    """Fits are shared where runs cannot tell habits apart; shares are priors times evidence."""
    path = table(tmp_path / "runs.csv", [1.0, 1.0])
    text = path.read_text().replace(",none,", f",{recompute},")
    path.write_text(text.replace(",16,8,1,2,", ",16,2,4,2,") if divided else text)
    cluster, _ = read_cluster_runs(path)
    large = cluster.runs[0].model.replace(layers=32, vocab=131072)  # a head of some blocks
    cluster = replace(cluster, runs=tuple(replace(run, model=large) for run in cluster.runs))
    seen = []

    def fitted(own):
        seen.append(own.software)
        return SimpleNamespace(evidence=1.5 * (own.software.attention == "eager") - 2000.0)

    monkeypatch.setattr(module.OneCluster, "fitted", fitted)
    found = explanations(cluster)
    assert len(seen) == (4 if divided else 2)
    weight = {}
    for depth, prior in (("work", 0.75), ("depth", 0.25)):
        weight[f"stages of equal {depth}, fused attention"] = prior * (1.0 - explicit)
        words = f"stages of equal {depth}, explicit attention"
        weight[words] = prior * explicit * np.exp(1.5)
    total = sum(weight.values())
    assert {one.habit.words: share for one, share in found} == pytest.approx(
        {words: own / total for words, own in weight.items()}
    )
    assert [share for _, share in found] == sorted((s for _, s in found), reverse=True)
    eager = cluster.software.replace(attention="eager")
    plan = cluster.runs[0].plan.replace(software=eager)
    explicit_runs = [cluster.runs[1], replace(cluster.runs[0], plan=plan)]
    assert [own.prior for own in habits_of(explicit_runs, cluster.software)] == [0.75, 0.25]


def test_named_software_keeps_its_habits(tmp_path):
    cluster, _ = read_cluster_runs(table(tmp_path / "runs.csv", [1.0] * 4, "Megatron-LM 1F1B"))
    assert [habit.fields for habit in habits_of(cluster.runs, cluster.software)] == [{}]


def test_what_is_known_of_a_number_before_any_run():
    """Middles, spreads and ends of the numbers' distributions, in the units of their definitions."""
    h100 = presets.chip("h100")
    known = {
        c.name: (c.middle, c.spread, c.least, c.most)
        for c in constants_of(load_software("generic"), h100)
    }
    speed = known.pop("product_speed")
    assert speed[:3] == (0.87, 0.3, 0.1)
    assert speed[3] == module._most_speed(h100, load_software("generic"))
    exposed = known.pop("exposed_gradients")
    assert exposed[1:] == (1.0, 0.01, 50.0)
    assert known == {
        "host_s": (60e-6, 0.7, 1e-6, 1e-3),  # as of most profiles of operators launched by Python
        "network_share": (1.0, 0.5, 0.02, 2.0),  # a rail may be better than its nominal rate
        "node_share": (1.0, 0.3, 0.05, 2.0),
        "slice_host_s": (4e-6, 1.2, 1e-8, 1e-4),
        "hidden_tensor": (0.1, 1.0, 0.01, 0.95),
    }
    names = {c.name for c in constants_of(load_software("megatron-core"), h100)}
    assert names.isdisjoint({"slice_host_s", "hidden_tensor"})  # known not to do so


def test_only_numbers_that_are_fitted_change_the_profile(tmp_path):
    cluster, _ = read_cluster_runs(table(tmp_path / "runs.csv", [1.0]))
    middle = {c.name: c.middle for c in constants_of(cluster.software)}
    sliced = module._applied(
        {**middle, "slice_host_s": 3e-6, "hidden_tensor": 0.4},
        cluster.runs[0].cluster,
        cluster.software,
    )[1]
    assert (sliced.slice_host_s, sliced.hidden_tensor) == (3e-6, 0.4)
    own = cluster.software.replace(slice_host_s=5e-6, hidden_tensor=0.2)
    for name in ("slice_host_s", "hidden_tensor", "exposed_gradients"):
        middle.pop(name)
    kept = module._applied(middle, cluster.runs[0].cluster, own)[1]
    assert (kept.slice_host_s, kept.hidden_tensor) == (5e-6, 0.2)
    assert kept.overlap_slowdown == own.overlap_slowdown
    known = cluster.software.replace(product_speed={"h100": 0.8})
    for told, speed in ((0.5, 0.4), (1.5, 1.2), (3.0, 2.0)):  # twice as fast at most
        changed = {**middle, "product_speed": told, "exposed_gradients": 0.3}
        found = module._applied(changed, cluster.runs[0].cluster, known)[1]
        assert found.product_speed == {"h100": pytest.approx(speed)}
        assert found.overlap_slowdown == 1.3


@pytest.mark.parametrize(("pp", "vocab", "fits"), [(1, 131072, 2), (4, 131072, 4), (4, 32000, 2)])
def test_habits_that_runs_cannot_tell_apart_share_a_fit(tmp_path, monkeypatch, pp, vocab, fits):
    """Stages of equal work and of equal depth are the same ones where the head is small."""
    cluster, _ = read_cluster_runs(table(tmp_path / "runs.csv", [1.0]))
    (run,) = cluster.runs
    plan = run.plan.replace(tp=1, pp=pp, dp=16 // pp)
    model = run.model.replace(layers=32, vocab=vocab)
    cluster = replace(cluster, runs=(replace(run, model=model, plan=plan),))
    fitted = []
    numbers = module.fit_runs(lambda _: np.zeros(1), [1.0], cluster.constants)
    monkeypatch.setattr(module.OneCluster, "fitted", lambda self: fitted.append(self) or numbers)
    found = explanations(cluster)
    assert (len(found), len(fitted)) == (4, fits)
    assert sum(share for _, share in found) == pytest.approx(1.0)
    assert found[0][0].habit.words == "stages of equal work, fused attention"


def test_weights_of_runs_fall_with_the_square_of_a_large_error():
    noise = module.NOISE
    weights = module._weights(np.array([0.0, noise, -noise, 10 * noise]))
    assert weights == pytest.approx([3 / 2, 1.0, 1.0, 3 / 102])


@pytest.mark.parametrize(("devices", "widths"), [(16, {1, 2, 4, 8}), (12, {1, 2, 4}), (6, {1, 2})])
def test_candidates_use_all_devices_of_a_node_at_most(tmp_path, devices, widths):
    cluster, _ = read_cluster_runs(table(tmp_path / "runs.csv", [1.0]))
    run = cluster.runs[0]
    plan = run.plan.replace(tp=1, pp=1, dp=devices, micro_batch=1, global_batch=8 * devices)
    run = replace(run, plan=plan, cluster=run.cluster.replace(devices=devices))
    found = module._candidates(run, most=1000)
    assert {plan.tp for plan in found} == widths
    assert {plan.tp * plan.pp * plan.dp for plan in found} == {devices}
    assert {plan.micro_batch for plan in found} == {1, 2, 4, 8}
    assert len(module._candidates(run, most=5)) == 5


@pytest.mark.parametrize(("cp", "ep", "batch"), [(1, 1, 16), (2, 1, 16), (1, 4, 16), (2, 4, 8)])
def test_candidates_are_all_layouts_of_devices_batch_and_experts(tmp_path, cp, ep, batch):
    cluster, _ = read_cluster_runs(table(tmp_path / "runs.csv", [1.0]))
    run = cluster.runs[0]
    plan = run.plan.replace(tp=1, pp=1, dp=16 // cp, cp=cp, ep=ep, global_batch=batch)
    run = replace(run, plan=plan)
    found = [(p.tp, p.pp, p.dp, p.micro_batch) for p in module._candidates(run, most=1000)]
    powers, sizes = [2**k for k in range(8)], (1, 2, 4, 8)
    assert found == [
        (tp, pp, dp, size)
        for tp, pp, size, dp in itertools.product(sizes, powers[:5], sizes, powers)
        if tp * pp * dp * cp == 16 and batch % (dp * size) == 0 and dp * cp % ep == 0
    ]


def test_the_next_run_is_a_layout_of_the_largest_run_that_fits(tmp_path, monkeypatch):
    cluster, _ = read_cluster_runs(table(tmp_path / "runs.csv", [1.0, 1.0]))
    first, second = cluster.runs
    small = replace(first, cluster=first.cluster.replace(devices=8))
    wide, narrow = (first.plan.replace(tp=tp, dp=16 // tp, micro_batch=1) for tp in (8, 1))
    monkeypatch.setattr(module, "_candidates", lambda run: [wide, narrow])
    constants = cluster.constants
    posterior = module.fit_runs(lambda _: np.zeros(1), [1.0], constants)
    for capacity, plan in ((2**33, wide), (2**29, None)):
        runs = [replace(run, cluster=with_memory(run.cluster, capacity)) for run in (small, second)]
        found = module.next_run(replace(cluster, runs=tuple(runs)), posterior)
        assert (found and (found.plan, found.devices)) == (plan and (plan, 16))


@pytest.mark.parametrize(
    ("runs", "usual"), [(1, 1.476), (3, 1.415), (5, 1.383), (6, 1.372), (20, 1.372)]
)
@pytest.mark.parametrize("slope", [0.0, 2.0])
def test_a_further_run_is_within_what_noise_and_constants_leave(runs, usual, slope):
    """80% of Student's distribution; degrees of freedom: the runs, and four that were assumed."""
    posterior = SimpleNamespace(
        constants=[RunConstant("speed", "", 1.0, 0.3, 0.1, 10.0)],
        point=np.zeros(1),
        covariance=np.array([[0.09]]),
        noise=0.05,
        values=lambda: {"speed": 1.0},
    )
    own = SimpleNamespace(log_seconds=lambda v: np.full(runs, -slope * np.log(v["speed"])))
    half = usual * (0.05**2 + 2.0 * slope**2 * 0.09) ** 0.5
    assert np.log(module._step_ratios(own, posterior)) == pytest.approx([-half, half])


def calibration(path, cells, **chip):
    cluster, _ = read_cluster_runs(path)
    runs = [
        replace(
            run,
            memory_bytes=held,
            cluster=run.cluster.replace(chip=run.cluster.chip.replace(**chip)),
        )
        for run, held in zip(cluster.runs, cells, strict=True)
    ]
    return module.calibrated_cluster(replace(cluster, runs=tuple(runs)), advise=False)


def test_a_chip_of_one_s_own_is_written_whole_and_memory_is_that_of_runs_that_say_it(tmp_path):
    path = table(tmp_path / "runs.csv", [1.0], "Megatron-LM 1F1B")
    preset = calibration(path, [0.0])
    assert preset.document["chip"] == "h100"
    assert preset.constants[-1].note == "not determined by these runs"
    assert "reserved_share" not in preset.software.fitted
    assert preset.software.reserved_share == load_software("megatron-core").reserved_share
    assert preset.to_dict()["next_run"] is None
    run = preset.runs[0]
    in_use = run.reported_bytes(pf.predict(run.model, run.cluster, run.plan))
    own = calibration(path, [1.4 * in_use], launch_latency_s=9e-6)
    assert own.document["chip"]["launch_latency_s"] == 9e-6
    memory, (share, spread) = own.constants[-1], reserved_share([1.4])
    assert (memory.value, memory.note) == (pytest.approx(share), "")
    ends = (share - 1.645 * spread, share + 1.645 * spread)
    assert (memory.low, memory.high) == pytest.approx(ends, rel=1e-3)
    assert own.software.reserved_share == memory.value
    assert "reserved_share" in own.software.fitted
    run = own.runs[0]
    before = pf.predict(run.model, run.cluster, run.plan).time_s / run.time_s - 1.0
    assert own.errors_before == pytest.approx([before])
