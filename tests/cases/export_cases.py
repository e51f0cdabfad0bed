"""Random plans that every format of training frameworks is asked to write."""

import random

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.memory import OPTIMIZERS
from phaze_fast.planning.training import RECOMPUTE
from phaze_fast.software import software_names

SUFFIX = {"torchtitan": ".toml", "deepspeed": ".json"}
MODELS = {
    "llama2-7b": models.load("llama2-7b"),
    "small-gpt": models.load("gpt2-xl").replace(
        name="small-gpt", layers=12, heads=24, hidden=1536, attention="eager"
    ),
    "mixtral": models.load("mixtral-8x7b").replace(name="mixtral", layers=12),
}
FABRIC = {"fabric": "dgx-h100", "chip": "h100"}
FIRST_OPTIMIZERS = (
    "adam", "adam-bf16-grad", "adam-bf16", "adam-fp32", "adam-fp32-bf16-grad", "sgd-momentum",
    "sgd", "sgd-bf16",
)  # fmt: skip


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
        vpp = {"interleaved": rng.choice([2, 3]), "zb-v": 2, "dualpipe-v": 2, "dualpipe": 2}.get(
            schedule, 1
        )
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
            "optimizer": rng.choice(["adam", "adam", *FIRST_OPTIMIZERS]),
        }
        own = random.Random(str(given))  # of what was added later
        given["cp_kind"] = own.choice(["all-gather", "all-gather", "ring", "ulysses"])
        if given["ep"] > 1 and own.random() < 0.3:
            given |= {"etp": 1, "expert_imbalance": own.choice([1.0, 1.5])}
        if given["ep"] > 1:
            given["dispatcher"] = own.choice(["all-to-all", "all-gather"])
        if cp == 2 and own.random() < 0.3:
            given |= {"cp": 4, "cp_kind": "ulysses:2/ring"}
        if given["zero"] and dp % 2 == 0:
            given["shard"] = own.choice([None, None, None, dp, dp // 2])
        given["precision"] = own.choice(["bf16", "bf16", "bf16", "fp8", "fp8-current", "fp16"])
        if own.random() < 0.2:
            given["software"] = own.choice(software_names())
        if own.random() < 0.08:
            given["offload_optimizer"] = True
        if own.random() < 0.06:
            given["recompute"] = own.choice(
                ["offload", "offload:3", "norms+activations+gated-product+offload"]
            )
        if given["optimizer"] == "sgd-bf16":  # which no file says; nor do they say newer ones
            given["optimizer"] = own.choice([n for n in OPTIMIZERS if n not in FIRST_OPTIMIZERS])
        try:
            spec = pf.PlanSpec.from_dict(given)
            spare = rng.choice([0, 0, 0, 8])
            cluster = pf.Cluster(devices=spec.devices + spare, **FABRIC)
            return model, cluster, pf.predict(model, cluster, spec.replace(idle=True))
        except InvalidInputError:
            continue
