"""Plans against the oracle: explicit ranks, explicit passes, and nothing shared but layer times."""

import random

import pytest
from case_counts import first_slow, slow_ones, some_or_many
from oracle_cases import random_cases, random_recompute
from reference.plan import evaluate

from phaze_fast.planning import PlanSpec, Training, predict, predict_batch

CLOSE = 1e-9
PLANS_A_MODEL = 4  # on one cluster, with one set of widths: layers are scheduled once


def assert_agree(model, cluster, spec):
    found, expected = predict(model, cluster, spec), evaluate(model, cluster, spec)
    what = f"{model!r}\n{cluster!r}\n{spec!r}"
    assert found.time_s == pytest.approx(expected["time_s"], rel=CLOSE), what
    assert found.memory_bytes == pytest.approx(expected["memory_bytes"], rel=CLOSE), what
    assert sum(found.parts_s.values()) == pytest.approx(found.time_s, rel=CLOSE), what
    assert min(found.parts_s.values()) >= -CLOSE * found.time_s, what
    for stage, wanted in zip(found.stages, expected["stages"], strict=True):
        assert list(stage.layers) == wanted["layers"], what
        assert stage.load_s == pytest.approx(wanted["load_s"], rel=CLOSE), what
        chunks = [len(chunk) for chunk in wanted["chunks"]]
        assert list(stage.chunks) == chunks, what
        assert stage.memory == pytest.approx(wanted["memory"], rel=CLOSE), what


def assert_batch_agrees(model, cluster, specs):
    """Even plans of one batch size and one optimiser, in one call each."""
    for spec in specs:
        common = set(Training.model_fields) & set(PlanSpec.model_fields)
        widths = {
            name: getattr(spec, name)
            for name in ("tp", "pp", "dp", "cp", "cp_kind", "ep", "micro_batch", "schedule", "vpp")
        }
        chosen = {*widths, "etp", "zero", "shard", "recompute", "rank_order"}
        training = Training(**{name: getattr(spec, name) for name in common - chosen})
        modes = ["none", "selective", "full", "norms:1/activations", "offload:2", "auto"]
        zeros, orders = [0, 1, 2, 3, 1, 0], ["replicas-inside", "stages-inside"] * 3
        copy = spec.ep * (spec.etp or spec.tp)  # devices with one copy of all experts
        if spec.pp > 1 and spec.tp * spec.cp % copy:
            orders = orders[:1] * 6
        shards = [spec.shard if zero else None for zero in zeros]
        rows = predict_batch(
            model, cluster, training, **widths, etp=spec.etp or 0,
                dispatcher=spec.dispatcher, offload_optimizer=spec.offload_optimizer, zero=zeros, recompute=modes, rank_order=orders,
            shard=[shard or 0 for shard in shards],
        )  # fmt: skip
        for i, (zero, mode, order) in enumerate(zip(zeros, modes, orders, strict=True)):
            same = spec.replace(
                zero=zero, recompute=mode, rank_order=order, stages=None, shard=shards[i]
            )
            expected = evaluate(model, cluster, same)
            assert rows.time_s[i] == pytest.approx(expected["time_s"], rel=CLOSE), same
            assert rows.memory_bytes[i] == pytest.approx(expected["memory_bytes"], rel=CLOSE), same
            parts = {name: float(column[i]) for name, column in rows.parts_s.items()}
            assert sum(parts.values()) == pytest.approx(rows.time_s[i], rel=CLOSE), same
            single = predict(model, cluster, same).parts_s
            assert parts == pytest.approx(single, rel=CLOSE, abs=CLOSE * rows.time_s[i]), same


def agree_on(seeds):
    for seed in seeds:
        model, cluster, specs = random_cases(random.Random(seed), PLANS_A_MODEL)
        for spec in specs:
            assert_agree(model, cluster, spec)


@some_or_many(5, 10)
def test_plans_take_what_the_oracle_says(cases):
    agree_on(range(cases))


@pytest.mark.slow
def test_stages_that_recompute_any_operators_take_what_the_oracle_says():
    """Regression: what saves no memory was priced by which other modes were named."""
    for seed in range(12):
        rng = random.Random(seed)
        model, cluster, (spec,) = random_cases(rng, 1)
        for _ in range(4):
            assert_agree(model, cluster, spec.replace(recompute=random_recompute(rng, spec.pp)))


@first_slow("block", range(8))
def test_thousands_of_plans_take_what_the_oracle_says(block):
    agree_on(range(1000 + 63 * block, 1063 + 63 * block))


@pytest.mark.parametrize("seed", slow_ones(range(300, 305), 302, 303, 304))
def test_batches_take_what_the_oracle_says(seed):
    model, cluster, specs = random_cases(random.Random(seed), 1)
    assert_batch_agrees(model, cluster, specs)
