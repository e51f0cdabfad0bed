"""Plans that are given: one or many, the same figures; what is wrong is named with its arithmetic."""

import json
import pickle
import random
from itertools import product

import numpy as np
import pytest
from case_counts import some_or_many
from golden_files import refused_calls
from oracle_cases import random_fabric, small_model
from plan_cases import RECOMPUTE, SCHEDULES, h100, with_memory

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Cluster
from phaze_fast.memory import TERMS
from phaze_fast.planning import (
    PARTS,
    Plan,
    PlanSpec,
    Predictions,
    Training,
    plan,
    predict,
    predict_batch,
    step_s,
)
from phaze_fast.planning.plans import plan_groups
from phaze_fast.software import DEFAULT, load_software

ON = Cluster(devices=16, fabric="dgx-h100", chip="h100")


def batch_of(model, cluster, training, specs, **more):
    """The plans of `specs` (as fields) in one call."""
    columns = {name: [spec[name] for spec in specs] for name in specs[0]}
    return predict_batch(model, cluster, training, **columns, **more)


def random_spec(rng):
    schedule = rng.choice([*SCHEDULES, "gpipe", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
    vpp = {"interleaved": rng.choice([2, 3]), "zb-v": 2, "dualpipe-v": rng.choice([1, 2, 2])}
    return {
        "tp": rng.choice([1, 1, 2, 3]),
        "pp": rng.choice([1, 2, 3, 4]),
        "dp": rng.choice([1, 2, 4]),
        "cp": rng.choice([1, 1, 2]),
        "ep": rng.choice([1, 1, 2]),
        "zero": rng.randint(0, 3),
        "micro_batch": rng.choice([1, 2, 3]),
        "schedule": schedule,
        "vpp": vpp.get(schedule, 1),
        "recompute": rng.choice(
            ["auto", "norms+activations", "full:1", "full:2/norms", *RECOMPUTE]
        ),
        "rank_order": rng.choice(["replicas-inside", "stages-inside"]),
    }


def same_row(many, k, one):
    """Whether a row and a plan are the same, bit for bit."""
    assert many.status[k] == (one.over_bytes > 0)
    assert many.time_s[k] == one.time_s
    assert many.memory_bytes[k] == one.memory_bytes
    assert many.over_bytes[k] == one.over_bytes
    assert many.energy_j[k] == one.energy_j
    assert {name: many.parts_s[name][k] for name in PARTS} == dict(one.parts_s)
    assert {name: many.memory[name][k] for name in TERMS} == dict(one.memory)


@some_or_many(2, 5)
def test_a_batch_is_a_loop_of_singles(cases):
    rng = random.Random(11)
    timed = refused = 0
    for _ in range(cases):
        devices = rng.choice([2, 4, 8])
        model, fabric = small_model(rng), random_fabric(rng, devices)
        cluster = Cluster(devices=devices, fabric=fabric, chip="h100")
        if rng.random() < 0.5:
            cluster = with_memory(cluster, 10 ** rng.uniform(5.5, 7.5))
        training = Training(
            global_batch=rng.choice([8, 12, 24]), reserved_bytes=0, optimizer="sgd",
            sequence_parallel=rng.random() < 0.5,
        )  # fmt: skip
        specs = [random_spec(rng) for _ in range(60)]
        for spec in specs[:40]:  # make most of them use all devices
            rest = spec["tp"] * spec["pp"] * spec["cp"]
            spec["dp"] = max(1, devices // rest)
        many = batch_of(model, cluster, training, specs, threads=1)
        common = {"global_batch": training.global_batch, "reserved_bytes": 0, "optimizer": "sgd"}
        common["sequence_parallel"] = training.sequence_parallel
        for k, spec in enumerate(specs):
            try:
                one = predict(model, cluster, {**spec, **common})
            except InvalidInputError:
                assert many.status[k] > 2
                assert np.isnan(many.time_s[k])
                refused += 1
                continue
            same_row(many, k, one)
            timed += 1
    assert timed > 5 * cases
    assert refused > 12 * cases


def test_what_other_plans_of_a_batch_recompute_changes_nothing():
    """Neither what auto chooses from, nor modes that keep the same bytes and compute others again."""
    step = Training(global_batch=64, reserved_bytes=0)
    given = {"dp": 2, "pp": 4, "micro_batch": 4, "zero": 1}
    words = ["auto", "norms", "norms+activations", "full:3/norms", "none"]
    on = with_memory(Cluster(devices=8, fabric="dgx-h100", chip="h100"), 48 * 2**30)
    for model in ("llama2-7b", "gpt2-xl"):
        many = predict_batch(model, on, step, **given, recompute=words)
        for k, word in enumerate(words):
            given_one = {**given, "global_batch": 64, "reserved_bytes": 0, "recompute": word}
            same_row(many, k, predict(model, on, given_one))


def test_rows_that_share_steps_and_prices_are_what_they_are_alone():
    words = ["none", "full", *(f"full:{count}" for count in range(1, 17))]
    rows = [
        {"tp": 2, "pp": 4, "dp": 2, "zero": zero, "vpp": vpp, "rank_order": order}
        | {"schedule": "interleaved" if vpp > 1 else "1f1b", "recompute": word}
        for k, word in enumerate(words)
        for zero, vpp, order in (
            (k % 4, 1 + k % 2, "replicas-inside"),
            ((k + 2) % 4, 1 + k % 2, "stages-inside"),
        )
    ]
    step = Training(global_batch=64)
    together = batch_of("llama2-7b", ON, step, rows)
    assert (together.status < 2).all()
    for k in range(0, len(rows), 3):
        alone = batch_of("llama2-7b", ON, step, rows[k : k + 1])
        for name, column in alone.to_dict().items():
            assert column[0] == together.to_dict()[name][k], name


def test_rows_with_experts_are_what_they_are_alone():
    """How experts are spread is read with the tensor width: 0 is that width, as it is by name."""
    model, step = models.load("mixtral-8x7b").replace(layers=2), Training(global_batch=32)
    rows = [
        {"tp": tp, "dp": 16 // tp, "ep": ep, "etp": etp, "dispatcher": dispatcher, "zero": 1}
        for tp, etp in ((2, 0), (2, 1), (2, 2), (1, 0), (1, 1))
        for ep, dispatcher in ((1, "all-to-all"), (4, "all-to-all"), (4, "all-gather"))
    ]
    many = batch_of(model, ON, step, rows)
    for k, row in enumerate(rows):
        alone = {**row, "etp": row["etp"] or None, "global_batch": 32}
        same_row(many, k, predict(model, ON, alone))
    assert len(set(many.time_s.tolist())) == 9


def test_rows_in_any_order_are_the_same():
    """What rows share is found whichever of them comes first."""
    choices = product((2, 4), (1, 2), range(4), (0, 2), ("replicas-inside", "stages-inside"))
    rows = [
        {"tp": 8 // pp, "pp": pp, "dp": 2, "zero": zero, "shard": shard, "vpp": vpp}
        | {"schedule": "interleaved" if vpp > 1 else "1f1b", "rank_order": order}
        | {"recompute": word}
        for pp, vpp, zero, shard, order in choices
        for word in ("none", "full", "auto")
    ]
    step = Training(global_batch=64)
    columns = batch_of("llama2-7b", ON, step, rows, threads=1).to_dict()
    assert (columns["status"] < 2).sum() > 100
    shuffled = np.random.default_rng(5).permutation(len(rows))
    again = batch_of("llama2-7b", ON, step, [rows[k] for k in shuffled], threads=1).to_dict()
    for name, column in columns.items():
        assert column[shuffled].tobytes() == again[name].tobytes(), name


def test_threads_change_nothing():
    widths = np.array([1, 2, 4])
    t, d = (grid.reshape(-1) for grid in np.meshgrid(widths, [16, 8, 4, 2, 1]))
    rows = {"tp": np.tile(t, 40), "dp": np.tile(d, 40)}
    rows["pp"] = 16 // (rows["tp"] * rows["dp"]).clip(1, 16)
    one, two = (
        predict_batch("gpt2-small", ON, Training(global_batch=64), **rows, threads=threads)
        for threads in (1, 2)
    )
    for name, column in one.to_dict().items():
        assert np.array_equal(column, two.to_dict()[name], equal_nan=True), name


# ---- statuses ----


STATUSES = [
    (0, {"dp": 16}),
    (3, {"dp": 8}),
    (4, {"dp": 16, "micro_batch": 8}),
    (5, {"pp": 16}),
    (5, {"pp": 8, "dp": 2, "schedule": "interleaved", "vpp": 2}),
    (5, {"pp": 8, "dp": 2, "schedule": "zb-v", "vpp": 2}),
    # Chunks need not divide the blocks, nor stages the micro-batches; these may be fewer.
    (0, {"pp": 4, "dp": 4, "schedule": "interleaved", "vpp": 2}),
    (0, {"pp": 4, "dp": 4, "schedule": "interleaved", "vpp": 3, "micro_batch": 8}),
    (0, {"pp": 8, "dp": 2, "schedule": "zero-bubble", "micro_batch": 8}),
    (6, {"dp": 8, "pp": 2, "vpp": 2}),
    (6, {"dp": 8, "pp": 2, "schedule": "interleaved"}),
    (6, {"dp": 8, "pp": 2, "schedule": "zb-v"}),
    (6, {"dp": 8, "pp": 2, "schedule": "dualpipe-v", "vpp": 3}),
    (7, {"pp": 4, "dp": 4, "schedule": "dualpipe-v", "vpp": 2, "micro_batch": 4}),
    (0, {"pp": 4, "dp": 4, "schedule": "dualpipe-v", "vpp": 2, "micro_batch": 2}),
    (8, {"dp": 16, "ep": 3}),
    (9, {"tp": 16}),
    (9, {"dp": 16, "zero": 4}),
    (9, {"dp": 16, "ep": 2}),
]


def test_each_row_of_a_batch_has_its_own_status():
    plain = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "zero": 0, "micro_batch": 1, "schedule": "1f1b"}
    plain["vpp"] = 1
    specs = [plain | spec for _, spec in STATUSES]
    many = batch_of("gpt2-small", ON, Training(global_batch=64), specs)
    assert many.status.tolist() == [code for code, _ in STATUSES]
    assert np.isnan(many.time_s).tolist() == [code > 1 for code, _ in STATUSES]
    assert len(many) == len(STATUSES)
    for code, spec in STATUSES:
        assert Predictions.reasons[code]
        if code:
            with pytest.raises(InvalidInputError):
                predict("gpt2-small", ON, {"global_batch": 64, **spec})


def test_rows_that_are_over_memory_or_cut_a_tie_say_so():
    small = with_memory(ON, 2**31)
    many = predict_batch("gpt2-xl", small, Training(global_batch=64), dp=16)
    assert many.status.tolist() == [1]
    assert many.over_bytes[0] == many.memory_bytes[0] - (2**31 - 3 * 2**29) > 0
    assert many.time_s[0] > 0
    step = Training(global_batch=64, uncut=(7,))
    many = predict_batch("gpt2-small", ON, step, pp=[2, 4], dp=[8, 4])
    assert many.status.tolist() == [10, 10]  # both cut after six blocks
    assert predict_batch("gpt2-small", ON, step, pp=1, dp=16).status[0] == 0


def test_widths_beyond_all_measure_are_refused_row_by_row():
    step, huge = Training(global_batch=64), [2**32, 2**62, 2**63 - 1]
    many = predict_batch("gpt2-small", ON, step, dp=huge, micro_batch=huge)
    assert many.status.tolist() == [3, 3, 3]
    many = predict_batch("gpt2-small", ON, step, dp=16, micro_batch=huge)
    assert many.status.tolist() == [4, 4, 4]


def test_arguments_that_are_wrong_as_a_whole_raise():
    step = Training(global_batch=64)
    for wrong, said in (
        ({"tp": 0}, "tp: 0"),
        ({"pp": [1, 2], "dp": [1, 2, 3]}, "one length"),
        ({"tp": [[1, 2]]}, "one-dimensional"),
        ({"schedule": "zero_bubble"}, "did you mean 'zero-bubble'"),
        ({"rank_order": "x"}, "rank_order: 'x'"),
        ({"threads": 0}, "threads: 0"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            predict_batch("gpt2-small", ON, step, **wrong)
    for wrong, said in (({"zero": 1.5}, "zero: dtype float64"), ({"recompute": 3}, "words")):
        with pytest.raises(InvalidTypeError, match=said):
            predict_batch("gpt2-small", ON, step, **wrong)


# ---- errors of one plan ----


@pytest.mark.parametrize(("spec", "said"), refused_calls("predict"))
def test_errors_name_the_field_and_the_arithmetic(spec, said):
    with pytest.raises(InvalidInputError, match=said):
        predict("gpt2-small", ON, {"global_batch": 64, **spec})


def test_what_is_no_plan_is_refused():
    with pytest.raises(InvalidTypeError, match="plan: list"):
        predict("gpt2-small", ON, [16])
    with pytest.raises(InvalidTypeError, match="model: int"):
        predict(3, ON, {"global_batch": 64, "dp": 16})
    with pytest.raises(InvalidInputError, match=r"cluster\.chip: missing"):
        predict(
            "gpt2-small", Cluster(devices=16, fabric="dgx-h100"), {"global_batch": 64, "dp": 16}
        )
    with pytest.raises(InvalidInputError, match="plan: not what"):
        Plan.from_dict({"tp": 1})
    with pytest.raises(InvalidInputError, match="micro_batches"):  # no plan in full, nor a field
        PlanSpec.of({"global_batch": 64, "micro_batches": 4})


# ---- forms of a plan ----

SPECS = [
    PlanSpec(global_batch=64, dp=8, pp=2, stages=(7, 7), recompute=("none", "full")),
    PlanSpec(global_batch=64, tp=2, dp=4, pp=2, schedule="interleaved", vpp=3, zero=1),
    PlanSpec(global_batch=64, dp=4, cp=2, pp=2, seq=512, optimizer="sgd", reserved_bytes="1 GiB"),
    PlanSpec(global_batch=32, dp=2, tp=4, idle=True, sequence_parallel=False, micro_batch=4),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_plans_round_trip_through_text_and_pickle(spec):
    assert PlanSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert PlanSpec(**json.loads(spec.to_json())) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    timed = predict("gpt2-small", ON, spec)
    text = json.dumps(timed.to_dict())
    assert Plan.from_dict(json.loads(text)) == timed
    assert pickle.loads(pickle.dumps(timed)) == timed
    assert hash(timed) == hash(pickle.loads(pickle.dumps(timed)))
    for form in (timed, json.loads(text), {"plan": json.loads(text)}, spec.to_dict()):
        assert predict("gpt2-small", ON, form) == timed


def test_a_found_plan_carries_the_step_that_it_was_found_for():
    model = pf.models.load("gpt2-small")
    step = Training(
        global_batch=16, seq=512, optimizer="sgd", reserved_bytes=0, sequence_parallel=False,
        tp=(1, 2),
    )  # fmt: skip
    plans = plan(model, ON, step)
    for each in (*plans.plans, *plans.front):
        assert predict(model, ON, each) == each


# ---- what a prediction says ----


def test_a_plan_is_not_refused_for_memory():
    small = with_memory(ON, 2**31)
    timed = predict("gpt2-xl", small, {"global_batch": 64, "dp": 16, "recompute": "none"})
    roomy = predict("gpt2-xl", ON, {"global_batch": 64, "dp": 16, "recompute": "none"})
    assert timed.time_s == roomy.time_s
    assert timed.memory_bytes == roomy.memory_bytes
    assert timed.over_bytes == timed.memory_bytes - timed.limit_bytes > 0
    assert roomy.over_bytes == 0
    none = predict("gpt2-xl", small, {"global_batch": 64, "dp": 16, "reserved_bytes": 2**32})
    assert none.over_bytes > none.memory_bytes  # nothing is left for the model


def test_stages_as_given_are_the_stages_that_are_timed():
    spec = PlanSpec(global_batch=64, dp=8, pp=2, stages=(3, 11), recompute=("full", "none"), zero=1)
    timed = predict("gpt2-small", ON, spec)
    assert [len(stage.layers) for stage in timed.stages] == [3, 11]
    assert [stage.recompute for stage in timed.stages] == ["full", "none"]
    assert timed.stages[1].load_s > 3 * timed.stages[0].load_s
    even = predict("gpt2-small", ON, spec.replace(stages=None))
    assert [len(stage.layers) for stage in even.stages] == [7, 7]
    assert even.time_s < timed.time_s
    partly = spec.replace(stages=None, recompute="full:2/norms")
    assert predict("gpt2-small", ON, partly.replace(stages=(7, 7))) == predict(
        "gpt2-small", ON, partly
    )
    assert tuple(timed.parts_s) == PARTS
    assert sum(timed.parts_s.values()) == pytest.approx(timed.time_s, rel=1e-12)


def test_software_that_divides_stages_by_work():
    model = pf.models.load("llama2-7b").replace(vocab=262144)  # a head as heavy as five blocks
    even = {"tp": 1, "pp": 8, "dp": 2, "global_batch": 64}
    software = pf.software.load_software("generic")
    by_work = {**even, "software": software.replace(stage_division="work")}
    found = predict(model, ON, by_work)
    stages = tuple(len(stage.layers) for stage in found.stages)
    assert stages[-1] < stages[0]
    assert sum(stages) == model.layers + 2
    given_stages = predict(model, ON, {**even, "software": software, "stages": stages})
    assert found.time_s == given_stages.time_s
    assert found.time_s < 0.9 * predict(model, ON, {**even, "software": software}).time_s
    assert step_s(model, ON, by_work) == found.time_s
    training = pf.Training(global_batch=64, software=by_work["software"])
    many = predict_batch(model, ON, training, pp=[8, 1], dp=[2, 16])
    assert many.time_s[0] == found.time_s
    assert many.memory_bytes[0] == found.memory_bytes


@pytest.mark.parametrize(
    ("blocks", "by_stage"), [(14, [5, 4, 4, 3]), (13, [5, 4, 4, 2]), (12, [4, 3, 3, 4])]
)
def test_software_that_fills_the_first_stages(blocks, by_stage):
    """As DeepSpeed's partition_balanced: no stage has more blocks than the least possible most."""
    software = pf.software.load_software("generic").replace(stage_division="blocks")
    model = pf.models.load("llama2-7b").replace(layers=blocks)
    plan = {"tp": 1, "pp": 4, "dp": 4, "global_batch": 64, "software": software}
    assert [len(stage.layers) for stage in predict(model, ON, plan).stages] == by_stage


@pytest.mark.parametrize(
    ("blocks", "step", "by_stage"),
    [
        (28, {"pp": 4, "vpp": 4, "schedule": "interleaved"}, [7, 7, 7, 7]),
        (30, {"pp": 4, "vpp": 4, "schedule": "interleaved"}, [7, 8, 7, 8]),
        (13, {"pp": 4, "vpp": 2, "schedule": "zb-v"}, [3, 3, 3, 4]),
        (13, {"pp": 4}, [3, 3, 3, 4]),
    ],
)
def test_without_stages_each_stage_has_an_even_share_of_the_blocks(blocks, step, by_stage):
    model = models.load("llama2-7b").replace(layers=blocks)
    plan = pf.predict(model, h100(4), {**step, "global_batch": 16})
    assert [stage.kinds["block"] for stage in plan.stages] == by_stage
    assert all(max(stage.chunks) - min(stage.chunks) <= 2 for stage in plan.stages)


def test_fields_without_effect_leave_a_strategy_as_it_is():
    """Of experts and of context groups on one device each, and of rows that nobody shares."""
    experts = {"dispatcher": "all-gather", "expert_imbalance": 2.0, "expert_overlap": 0.5}
    more = {"overlap_experts": True, "cp_kind": "ring", "sequence_parallel": False, "etp": 1}
    plain = PlanSpec(global_batch=8)
    assert PlanSpec(global_batch=8, **experts, **more).strategy == plain.strategy


def test_devices_intervals_and_overlap_of_a_plan():
    spec = PlanSpec(global_batch=32, tp=2, cp=2, pp=2, dp=2, micro_batch=1)
    found = predict("llama2-7b", ON, spec.replace(seq=8192))
    assert found.devices == spec.devices == 16
    mine = load_software(DEFAULT).replace(name="mine", step_ratios=(0.8, 1.5))
    own = predict("llama2-7b", ON, spec.replace(seq=8192, software=mine))
    assert own.interval_s == pytest.approx((0.8 * own.time_s, 1.5 * own.time_s), rel=1e-12)
    for dp, reach in ((4, "node"), (8, "cluster")):  # eight devices are a whole node
        own = predict("gpt2-small", ON, PlanSpec(global_batch=32, tp=2, dp=dp, idle=True))
        assert next(plan_groups(own, ON)) == f"h100, {DEFAULT}, {reach}, tensor"
    # One stage has no other micro-batch whose passes could hide an exchange.
    alone = PlanSpec(global_batch=32, pp=1, dp=4, ep=4, schedule="dualpipe", vpp=2)
    assert not alone.strategy.overlap_experts
    assert alone.replace(pp=2).strategy.overlap_experts
