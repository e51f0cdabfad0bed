"""Plans exported and read back: the same seconds wherever the format says all of the plan."""

import random

import pytest
from export_cases import SUFFIX, random_plan

import phaze_fast as pf
from phaze_fast import export

SOME = (28, 38)  # seed and number of the plans of every run
MORE = (23, 140)  # of the full one
FIELDS = (
    "tp", "cp", "pp", "dp", "ep", "etp", "micro_batch", "seq", "optimizer", "precision", "software",
    "expert_imbalance", "sequence_parallel", "zero", "recompute", "vpp", "rank_order", "shard",
    "schedule", "cp_kind", "dispatcher", "offload_optimizer",
)  # fmt: skip
NO_EFFECT = {
    "megatron": {"zero", "recompute", "vpp", "rank_order"},
    "bridge": {"zero", "recompute", "vpp", "rank_order"},
    "torchtitan": {"zero", "recompute", "rank_order", "shard"},
    "maxtext": {"zero", "recompute", "rank_order", "shard", "dispatcher"},
    "deepspeed": {"etp", "recompute", "rank_order", "schedule", "vpp", "cp_kind", "dispatcher"},
}
"""Fields that are dropped where they change nothing, such as sharding among one replica."""
SAME_BY_CHANCE = {
    "megatron": {"schedule"}, "bridge": {"schedule"}, "torchtitan": {"sequence_parallel"},
    "maxtext": {"schedule", "stages", "zero"}
}  # fmt: skip
"""Fields that the format cannot say, but whose default may be the same."""


@pytest.fixture(scope="module", params=[SOME, pytest.param(MORE, marks=pytest.mark.slow)])
def plans(request):
    seed, count = request.param
    rng = random.Random(seed)
    return [random_plan(rng) for _ in range(count)]


@pytest.mark.parametrize("format_", export.FORMATS)
def test_what_a_file_says_predicts_the_same_seconds(format_, plans, tmp_path):
    path = tmp_path / f"run{SUFFIX.get(format_, '.sh')}"
    complete = differ = 0
    for model, cluster, plan in plans:
        written = export.export_plan(plan, model, format_)
        path.write_text(written.text)
        read = export.read_plan(path, model, cluster.devices)
        again = pf.predict(model, cluster, read.spec)
        changed = {name for name in FIELDS if getattr(again, name) != getattr(plan, name)}
        if plan.tp == 1:
            changed -= {"sequence_parallel"}
        if [stage.chunks for stage in again.stages] != [stage.chunks for stage in plan.stages]:
            changed.add("stages" if again.pp == plan.pp else "pp")
        if again.ep != plan.ep:  # other devices have other loads
            changed -= {"expert_imbalance"}
        words = (item.what.split()[0] for item in written.unexpressed if item.of == "plan")
        said = {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}
        assert changed - said <= NO_EFFECT[format_], written.text
        assert said - changed <= SAME_BY_CHANCE.get(format_, set()), written.text
        complete += written.plan_complete
        differ += again.time_s != pytest.approx(plan.time_s, rel=1e-9)
        named = plan.software != "megatron-core"
        assert any(item.what.startswith("--software") for item in written.unexpressed) == named
        if written.plan_complete:
            assert again.time_s == pytest.approx(plan.time_s, rel=1e-12), written.text
            assert again.memory_bytes == pytest.approx(plan.memory_bytes, rel=1e-12)
        for item in written.unexpressed:
            assert item.what
            assert item.why
            assert format_ == "deepspeed" or str(item) in written.text
    assert complete >= (min(15, len(plans) // 5) if format_ in ("megatron", "bridge") else 1)
    assert differ  # some plans cannot be said, and are not hidden
