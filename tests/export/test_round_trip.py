"""Plans exported and read back: the same seconds wherever the format says all of the plan."""

import random

import pytest

import phaze_fast as pf
from phaze_fast import export, models
from phaze_fast.errors import InvalidInputError
from phaze_fast.memory import OPTIMIZERS
from phaze_fast.planning.training import RECOMPUTE
from phaze_fast.software import software_names

SOME = (25, 60)  # seed and number of the plans of every run
MORE = (23, 140)  # of the full one
SUFFIX = {"torchtitan": ".toml", "deepspeed": ".json"}
MODELS = {
    "llama2-7b": models.load("llama2-7b"),
    "small-gpt": models.load("gpt2-xl").replace(
        name="small-gpt", layers=12, heads=24, hidden=1536, attention="eager"
    ),
    "mixtral": models.load("mixtral-8x7b").replace(name="mixtral", layers=12),
}
FIELDS = (
    "tp", "cp", "pp", "dp", "ep", "etp", "micro_batch", "seq", "optimizer", "precision", "software",
    "expert_imbalance", "sequence_parallel", "zero", "recompute", "vpp", "rank_order", "shard",
    "schedule", "cp_kind",
)  # fmt: skip
NO_EFFECT = {
    "megatron": {"zero", "recompute", "vpp"},
    "bridge": {"zero", "recompute", "vpp"},
    "torchtitan": {"zero", "recompute", "rank_order", "shard"},
    "maxtext": {"zero", "rank_order", "shard"},
    "deepspeed": {"recompute", "rank_order", "schedule", "vpp", "cp_kind"},
}
"""Fields that are dropped where they change nothing, such as sharding among one replica."""
SAME_BY_CHANCE = {
    "megatron": {"schedule"}, "bridge": {"schedule"}, "torchtitan": {"sequence_parallel"},
    "maxtext": {"schedule", "stages", "zero"}, "deepspeed": set(),
}  # fmt: skip
"""Fields that the format cannot say, but whose default may be the same."""
FABRIC = {"fabric": "dgx-h100", "chip": "h100"}


def partition(rng, layers, chunks):
    """Layers of each chunk, even half of the time."""
    blocks = layers - 2
    if blocks % chunks == 0 and rng.random() < 0.5:
        sizes = [blocks // chunks] * chunks
        sizes[0] += 1
        sizes[-1] += 1
        return tuple(sizes)
    cuts = sorted(rng.sample(range(1, layers), chunks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


def recompute(rng, pp):
    def one():
        word = rng.choice(["none", "full", "full", "selective", "attention", "norms", *RECOMPUTE])
        more = rng.random() < 0.3 and word != "none"
        return f"{word}:{rng.randint(1, 4)}" if more else word

    same = one()
    return same if rng.random() < 0.7 else tuple(one() for _ in range(pp))


def random_plan(rng):
    """A model with a plan that the evaluator accepts."""
    while True:
        model = rng.choice(list(MODELS.values()))
        simple = rng.random() < 0.4
        moe = model.moe is not None
        tp, cp = (1, 1) if simple else (rng.choice([1, 2]), rng.choice([1, 1, 2]))
        pp = 1 if simple else rng.choice([1, 2, 3, 4])
        dp = rng.choice([1, 2, 3, 8])
        schedule = rng.choice(["1f1b", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"])
        if random.Random(f"{schedule}{dp}{pp}").random() < 0.1:
            schedule = rng.choice(["dualpipe", "dualpipe-v", "zb-h2"])
        vpp = {
            "interleaved": rng.choice([2, 3]),
            "zb-v": 2,
            "dualpipe-v": 2,
            "dualpipe": 2,
        }.get(schedule, 1)
        if pp == 1:
            schedule, vpp = "1f1b", 1
        micro_batch = rng.choice([1, 2])
        given = {
            "tp": tp,
            "cp": cp,
            "pp": pp,
            "dp": dp,
            "ep": rng.choice([1, 2]) if moe and dp % 2 == 0 else 1,
            "zero": rng.choice([0, 1, 2, 3]),
            "micro_batch": micro_batch,
            "global_batch": dp * micro_batch * rng.choice([1, 4, 6, 12]),
            "schedule": schedule,
            "vpp": vpp,
            "recompute": recompute(rng, pp) if rng.random() < 0.8 else "none",
            "stages": partition(rng, model.layers + 2, pp * vpp),
            "rank_order": rng.choice(["replicas-inside", "stages-inside"]),
            "sequence_parallel": rng.random() < 0.7,
            "seq": rng.choice([None, 1024]),
            "optimizer": rng.choice(["adam", "adam", *OPTIMIZERS]),
        }
        own = random.Random(str(given))  # of what was added later
        given["cp_kind"] = own.choice(["all-gather", "all-gather", "ring", "ulysses"])
        if given["ep"] > 1 and own.random() < 0.3:
            given |= {"etp": 1, "expert_imbalance": own.choice([1.0, 1.5])}
        if given["zero"] and dp % 2 == 0:
            given["shard"] = own.choice([None, None, None, dp, dp // 2])
        given["precision"] = own.choice(["bf16", "bf16", "bf16", "fp8", "fp8-current", "fp16"])
        if own.random() < 0.2:
            given["software"] = own.choice(software_names())
        try:
            spec = pf.PlanSpec.from_dict(given)
            spare = rng.choice([0, 0, 0, 8])
            cluster = pf.Cluster(devices=spec.devices + spare, **FABRIC)
            return model, cluster, pf.predict(model, cluster, spec.replace(idle=True))
        except InvalidInputError:
            continue


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
        words = (item.what.split()[0] for item in written.unexpressed)
        said = {word.removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}
        assert changed - said <= NO_EFFECT[format_], written.text
        assert said - changed <= SAME_BY_CHANCE[format_], written.text
        complete += written.complete
        differ += again.time_s != pytest.approx(plan.time_s, rel=1e-9)
        named = plan.software != "megatron-core"
        assert any(item.what.startswith("--software") for item in written.unexpressed) == named
        if written.complete:
            assert again.time_s == pytest.approx(plan.time_s, rel=1e-12), written.text
            assert again.memory_bytes == pytest.approx(plan.memory_bytes, rel=1e-12)
        for item in written.unexpressed:
            assert item.what
            assert item.why
            assert format_ == "deepspeed" or str(item) in written.text
    assert complete >= {"megatron": 15, "bridge": 15}.get(format_, 1)
    assert differ  # some plans cannot be said, and are not hidden
