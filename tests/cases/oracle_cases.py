"""Random models, clusters and plans for tests of the plan evaluator, drawn from a seeded generator."""

import random

from phaze_fast.hardware import (
    Cluster,
    FlatFabric,
    Host,
    MeshFabric,
    Tier,
    TieredFabric,
    TorusFabric,
    presets,
)
from phaze_fast.models import MixtureOfExperts, TransformerModel
from phaze_fast.opgraph import CONTEXT_KINDS, RECOMPUTE_SETS, Strategy, canonical_recompute, reasons
from phaze_fast.planning import PlanSpec, Training
from phaze_fast.software import DEFAULT, load_software

CHIPS = ("h100", "a100-80", "tpuv4")
MODES = ("none", "selective", "full")
CONTENDED = load_software(DEFAULT).replace(
    name="contended", overlap_slowdown=1.3, slice_host_s=2e-4
)
OPTIMIZERS = ("adam", "adam-bf16", "sgd-bf16", "adam-fp32")
KINDS = ("dense", "dense", "grouped", "experts", "experts", "encoder-decoder")


def random_model(rng, kind=None):
    kind = kind or rng.choice(KINDS)
    heads, width = rng.choice([4, 6, 12, 12, 24]), rng.choice([16, 64, 128])
    fields = {
        "layers": rng.randint(2, 12),
        "hidden": heads * width,
        "heads": heads,
        "ffn": 12 * rng.choice([16, 60, 256]),
        "vocab": rng.choice([997, 5000, 32000]),
        "seq": rng.choice([48, 240, 960]),
        "tied_embeddings": rng.random() < 0.5,
        "head": rng.choice(["lm", "lm", "lm", "mlm", "none"]),
        "attention": rng.choice(["flash", "eager"]),
        "dropout": rng.random() < 0.3,
        "positions": "rotary",
        "norm": rng.choice(["rmsnorm", "layernorm"]),
        "gated": rng.random() < 0.5,
    }
    if kind == "grouped":
        fields["kv_heads"] = rng.choice([k for k in (1, 2, 3, 4) if heads % k == 0])
    if kind == "experts":
        fields["moe"] = MixtureOfExperts(
            experts=rng.choice([4, 6, 12]),
            top_k=rng.choice([1, 2]),
            expert_ffn=12 * rng.choice([8, 32, 128]),
            shared_experts=rng.choice([0, 0, 1]),
            dense_layers=rng.choice([0, 0, 1]),
        )
    if kind == "encoder-decoder":
        fields["encoder_layers"] = rng.randint(1, 6)
        fields["layers"] = rng.randint(1, 6)
    return TransformerModel(name=kind, **fields)


def small_model(rng, most_blocks=6):
    """A model of at most so many blocks; of an encoder and a decoder half as many each."""
    model, half = random_model(rng), max(1, most_blocks // 2)
    if model.encoder_layers:
        encoder_layers = min(model.encoder_layers, half)
        return model.replace(layers=min(model.layers, half), encoder_layers=encoder_layers)
    return model.replace(layers=min(model.layers, most_blocks))


def _rate(rng):
    return float(10 ** rng.uniform(8.5, 12))


def _latency(rng):
    return rng.choice([0.0, 1e-7, 1e-6, 5e-6, 1e-4])


def _factors(rng, number):
    """A random factorisation into up to three sizes."""
    sizes = [1, 1, 1]
    left = number
    while left > 1:
        prime = next(k for k in range(2, left + 1) if left % k == 0)
        sizes[rng.randrange(3)] *= prime
        left //= prime
    return tuple(size for size in sizes if size > 1) or (1,)


def random_fabric(rng, devices):
    kind = rng.choice(["flat", "tiered", "tiered", "preset", "torus", "mesh"])
    if kind == "flat":
        return FlatFabric(name=kind, bandwidth_bytes_per_s=_rate(rng), latency_s=_latency(rng))
    if kind == "tiered":
        sizes = [rng.choice([2, 3, 4, 5, 6, 8]) for _ in range(rng.choice([1, 1, 2]))]
        rates = sorted((_rate(rng) for _ in range(len(sizes) + 1)), reverse=rng.random() < 0.9)
        tiers = [
            Tier(name=f"t{n}", size=size, bandwidth_bytes_per_s=rate, latency_s=_latency(rng))
            for n, (size, rate) in enumerate(zip([*sizes, None], rates, strict=True))
        ]
        return TieredFabric(name=kind, tiers=tuple(tiers))
    if kind == "preset":
        name = rng.choice(["dgx-a100", "dgx-h100", "tpuv4-pod", "phaze-flat"])
        return presets.fabric(name).at_peak()  # libraries' protocols have tests of their own
    return (TorusFabric if kind == "torus" else MeshFabric)(
        name=kind,
        dims=_factors(rng, devices),
        link_bandwidth_bytes_per_s=_rate(rng),
        hop_latency_s=_latency(rng),
    )


def random_widths(rng, model):
    """Strategy fields with replicas and stages, all within the rules of the model."""
    blocks = model.layers + model.encoder_layers
    while True:
        t, cp = rng.choice([1, 1, 2, 3, 4]), rng.choice([1, 1, 1, 2, 3, 4])
        ep = rng.choice([1, 2, 3, 4, 6]) if model.moe else 1
        d = ep * rng.choice([1, 1, 2, 3])
        d = d if model.moe else rng.choice([1, 2, 3, 4, 5, 8])
        if (
            model.moe and t * cp > 1 and rng.random() < 0.5
        ):  # experts on devices that share a sequence or tensors
            d = rng.choice([1, 2, 3])
        p = rng.choice([p for p in (1, 2, 2, 3, 4, 5, 6, 8) if p <= blocks])
        sp = rng.random() < 0.7
        b = rng.choice([1, 1, 2, 3])
        own = random.Random(f"{t} {cp} {d} {p} {b}")  # of what was added later
        kind, etp = own.choice(CONTEXT_KINDS), own.choice([None, None, *range(1, t + 1), 2 * t])
        etp = etp if model.moe else None
        if t * cp * d % (ep * (etp or t)):
            continue
        kind = "ulysses:2/ring" if cp == 4 and own.random() < 0.5 else kind
        gathered = ep > 1 and own.random() < 0.4 and (t == 1 or sp)
        dispatcher = "all-gather" if gathered else "all-to-all"
        strategy = Strategy(
            tp=t, sequence_parallel=sp and t > 1, cp=cp,
            cp_kind=kind, ep=ep, etp=etp, micro_batch=b, dispatcher=dispatcher,
        )  # fmt: skip
        if t * cp * d * p <= 192 and not reasons(model, strategy):
            facts = {"expert_imbalance": 1.0 + own.random(), "expert_overlap": own.random(),
                     "dispatcher": dispatcher}  # fmt: skip
            return {"tp": t, "cp": cp, "cp_kind": kind, "ep": ep, "dp": d, "pp": p, "micro_batch": b,
                    "etp": etp, "sequence_parallel": sp, **(facts if ep > 1 else {})}  # fmt: skip


def _chunks_at_random(rng, layers, chunks):
    """Sizes of contiguous chunks, none empty."""
    cuts = sorted(rng.sample(range(1, layers), chunks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


def _copy(widths):
    """Devices with one copy of all experts."""
    return widths["ep"] * (widths.get("etp") or widths["tp"])


def random_recompute(rng, stages):
    """Texts of what stages recompute: any sets of operators, of some blocks or of all."""
    sets = list(RECOMPUTE_SETS)

    def mode():
        joined = "+".join(rng.sample(sets, rng.randint(1, 3)))
        return canonical_recompute(rng.choice([*MODES, "needed", joined, joined, joined]))

    modes = [mode() for _ in range(3)]

    def text():
        counted = f"{rng.choice(modes)}:{rng.randint(1, 3)}/{rng.choice(modes)}"
        return rng.choice([*modes, counted, counted])

    return tuple(text() for _ in range(stages)) if rng.random() < 0.5 else text()


def random_spec(rng, model, widths, even=False):
    """A plan of these widths; with blocks dealt out evenly and one mode where `even`."""
    blocks, p = model.layers + model.encoder_layers, widths["pp"]
    vpp = [v for v in (2, 3) if p * v <= blocks + 2]
    schedule = rng.choice(["1f1b", "1f1b", "gpipe", "zb-h1", "zb-h2"])
    rounds = rng.choice([1, 2, 3, 4, 7, 12])
    found = dict(widths)
    if p > 1 and vpp and rng.random() < 0.5:
        schedule = rng.choice(["interleaved", "interleaved", "zb-v", "dualpipe-v"])
        found["vpp"] = rng.choice(vpp) if schedule == "interleaved" else 2
        if schedule == "dualpipe-v":
            rounds = max(rounds, 2 * p)
    if p > 1 and p % 2 == 0 and random.Random(str(found)).random() < 0.2:
        schedule, found["vpp"], rounds = "dualpipe", 2, max(rounds + rounds % 2, 2 * p)
    recompute = rng.choice([*MODES, "auto", "norms:2/gated-product", "offload:1/norms+offload"])
    if not even:
        if rng.random() < 0.7:
            chunks = p if schedule == "dualpipe" else p * found.get("vpp", 1)
            found["stages"] = _chunks_at_random(rng, blocks + 2, chunks)
        if rng.random() < 0.5:
            recompute = tuple(
                rng.choice([*MODES, "full:1", "full:2/norms", "offload", "offload:2"])
                for _ in range(p)
            )
    zero = rng.choice([0, 1, 2, 3])
    if zero and rng.random() < 0.5:
        inner, d = found["tp"] * found["cp"], found["dp"]
        counts = [s for s in range(1, d + 1) if d % s == 0 and inner * s % _copy(found) == 0]
        found["shard"] = rng.choice(counts)
    orders = ["replicas-inside", "stages-inside"]
    if p > 1 and found["tp"] * found["cp"] % _copy(found):
        orders = orders[:1]
    return PlanSpec(
        **found,
        schedule=schedule,
        global_batch=rounds * found["dp"] * found["micro_batch"],
        zero=zero,
        recompute=recompute,
        rank_order=rng.choice(orders),
        optimizer=rng.choice(OPTIMIZERS),
        reserved_bytes=rng.choice([0, 3 * 2**29]),
        software=CONTENDED if found["dp"] % 2 else DEFAULT,
        overlap_experts=(None, False, True)[(found["dp"] + found["pp"]) % 3],
        offload_optimizer=(zero + found["pp"]) % 3 == 0,
    )


def random_cluster(rng, devices):
    fabric, chip = random_fabric(rng, devices), presets.chip(rng.choice(CHIPS))
    own = random.Random(f"{fabric} {chip.name}")
    host = Host(link_bytes_per_s=_rate(own), memory_bytes_per_s=_rate(own))
    return Cluster(devices=devices, fabric=fabric, chip=chip.replace(host=host))


def random_cases(rng, count):
    """A model, a cluster, and plans for them whose widths multiply to its devices.

    Plans share tensor, context and expert widths, so that layers are scheduled once for all.
    """
    model = random_model(rng)
    widths = random_widths(rng, model)
    specs = [random_spec(rng, model, widths, even=rng.random() < 0.4) for _ in range(count)]
    return model, random_cluster(rng, specs[0].devices), specs


# ---- all layouts of a small model ----


def small_problem(seed, recompute="auto"):
    rng = random.Random(seed)
    model = small_model(rng)
    training = Training(
        global_batch=rng.choice([4, 6, 12]),
        micro_batch=rng.choice([1, 2]),
        zero=(0, 1, 2, 3),
        tp=(1, 2),
        cp=rng.choice([(1,), (1, 2)]),
        ep=(1, 2) if model.moe else (1,),
        schedule=("1f1b", "interleaved", "zero-bubble"),
        vpp=(2, 3),
        recompute=recompute,
        reserved_bytes=0,
    )
    return model, random_cluster(rng, rng.choice([4, 6, 8])), training


# Five equal blocks whose activations are nearly all there is.
ACTIVATIONS = TransformerModel(
    name="activations", layers=5, hidden=48, heads=12, ffn=48, vocab=100, seq=960, head="none",
    positions="rotary", attention="eager", tied_embeddings=False,
)  # fmt: skip
FIVE = Cluster(devices=5, fabric="dgx-h100", chip="h100")
PIPED = Training(
    global_batch=5, micro_batch=1, zero=0, tp=1, pp=5, dp=1,
    schedule="1f1b", recompute="none", reserved_bytes=0,
)  # fmt: skip
