"""Random small planning problems, and a slow, obvious search over all their plans."""

import itertools
import random
from dataclasses import dataclass

import numpy as np
from oracle_cases import random_fabric, small_model
from reference.plan import all_cuts

from phaze_fast import _core
from phaze_fast.hardware import Cluster, Hbm, Tier, TieredFabric
from phaze_fast.memory import SCHEDULES as SCHEDULE_NAMES
from phaze_fast.planning import PlanEvaluator, PlanSpec, Training, predict
from phaze_fast.planning.sizes import BOUNDARY_KINDS
from phaze_fast.planning.training import TrainingStep
from phaze_fast.software import DEFAULT, load_software

PLAIN = load_software(DEFAULT).replace(
    fused_activation=False, gradient_stand_ins=False, overlap_slowdown=1.0
)
"""The default profile without the tensors of its own, of which `footprint` knows nothing, and without
the cores that its collectives take, as version 0.1.0 had it."""
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "gpipe", "zb-h2", "zb-v", "dualpipe-v")
RECOMPUTE = ("none", "selective", "full")


def with_memory(cluster, capacity_bytes):
    """The cluster with so much HBM a device."""
    hbm = cluster.chip.hbm
    smaller = Hbm(
        capacity_bytes=int(capacity_bytes),
        bandwidth_bytes_per_s=hbm.bandwidth_bytes_per_s,
        stacks=hbm.stacks,
    )
    chip = cluster.chip.model_copy(update={"hbm": smaller})
    return Cluster(devices=cluster.devices, fabric=cluster.fabric, chip=chip)


def h100(devices, memory_gib=None, fabric="dgx-h100", chip="h100"):
    """A cluster of H100s, or of other chips, perhaps with another capacity of memory."""
    cluster = Cluster(devices=devices, fabric=fabric, chip=chip)
    return cluster if memory_gib is None else with_memory(cluster, memory_gib * 2**30)


def nodes(rate, slow_rate, size=8):
    """Nodes of so many devices: bytes/s inside them and between them, no latency."""
    tiers = (
        Tier(name="node", size=size, bandwidth_bytes_per_s=rate, latency_s=0.0),
        Tier(name="rest", size=None, bandwidth_bytes_per_s=slow_rate, latency_s=0.0),
    )
    return TieredFabric(name="nodes", tiers=tiers)


def some(rng, values):
    """A few of the values, in any order."""
    return tuple(rng.sample(values, rng.randint(1, len(values))))


def random_training(rng, model, devices, most_batch=24):
    """A step with all kinds of things left free."""
    batch = rng.choice([b for b in (1, 2, 4, 6, 8, 12, 16, 24) if b <= most_batch])
    return Training(
        global_batch=batch,
        micro_batch=some(rng, [b for b in (1, 2, 4) if batch % b == 0]),
        tp=some(rng, [1, 2]),
        cp=rng.choice([(1,), (1,), (1, 2), (2,)]),
        ep=rng.choice([(1,), (2,), (1, 2, 4)]) if model.moe else (1,),
        zero=some(rng, [0, 1, 2, 3]),
        shard=random.Random(batch).choice([("auto",), ("all", "node"), (2, "all"), (1, 4)]),
        etp=random.Random(batch).choice([None, (1, 2)]) if model.moe else None,
        schedule=some(rng, list(SCHEDULES)) + ("dualpipe",) * (batch in (4, 8, 12)),
        vpp=some(rng, [2, 3]),
        recompute=rng.choice([("none", "norms", "full"), ("none", "full"), ("none",), ("full",)]),
        recompute_some=rng.random() < 0.6,
        optimizer=rng.choice(["adam", "adam", "sgd"]),
        rank_order=rng.choice(["auto", "auto", "auto", "replicas-inside", "stages-inside"]),
        sequence_parallel=rng.random() < 0.7,
        reserved_bytes=0,
    )


def random_problem(rng, most_blocks=6, most_devices=8, tight=0.7):
    """A model, a cluster and a step; memory is often too small for some plans."""
    devices = rng.randint(2, most_devices)
    model = small_model(rng, most_blocks)
    fabric = random_fabric(rng, devices)
    cluster = Cluster(devices=devices, fabric=fabric, chip="h100")
    training = random_training(rng, model, devices)
    if rng.random() < tight:
        whole = predict(
            model, Cluster(devices=1, fabric=fabric, chip="h100"),
            PlanSpec(global_batch=1, recompute="none", reserved_bytes=0),
        ).memory_bytes  # fmt: skip
        cluster = with_memory(cluster, whole * rng.uniform(0.1, 1.5))
    return model, cluster, training


# ---- every plan there is ----


@dataclass
class Exhaustive:
    """The fastest plan of every layout, each partition and each way to recompute tried."""

    evaluator: PlanEvaluator
    times: object
    time_s: np.ndarray
    """Infinite where nothing fits."""
    tried: int


def partitions(evaluator, layout):
    """All cuts that a layout may have, each once."""
    sizes = evaluator.sizes[int(layout["strategy"])]
    schedule = SCHEDULE_NAMES[int(layout["schedule"])]
    widths = (int(layout[name]) for name in ("pp", "vpp", "micro_batches"))
    order, work = sizes.graph.order, work_of_layers(sizes)
    yield from sorted(set(all_cuts(len(order), sizes.blocks, schedule, *widths, work)))


def work_of_layers(sizes):
    """FLOP of each layer forward where the software divides layers by them, else nothing."""
    division, graph = sizes.software.stage_division, sizes.graph
    if division == "even":
        return None
    layers = [graph.layers[k] for k in graph.order]
    ends = BOUNDARY_KINDS if division == "blocks" else ()
    return [0.0 if layer.kind in ends else layer.forward.flops for layer in layers]


def stage_ways(evaluator, layout, blocks):
    """Everything that a stage whose longest chunk has so many blocks may recompute."""
    variants = range(len(evaluator.sizes[int(layout["strategy"])].variants))
    yield from variants
    if evaluator.training.recompute_some:
        most = _core.MAX_VARIANTS
        for rest, more in itertools.permutations(variants, 2):
            yield from (rest + most * (more + most * count) for count in range(1, blocks))


def allowed(training, cuts):
    """Whether no cut parts what belongs together."""
    inner = cuts[1:-1]
    if any(at in training.uncut for at in inner):
        return False
    return not any((a < at) != (b < at) for a, b in training.tied for at in inner)


def spec_of(evaluator, layout, cuts=None, recompute="auto"):
    """A layout as a user would give it, with its stages where their cuts are known."""
    training = evaluator.training
    s = evaluator.sizes[int(layout["strategy"])].strategy
    return PlanSpec(
        **{name: getattr(training, name) for name in TrainingStep.model_fields},
        tp=s.tp,
        pp=int(layout["pp"]),
        dp=int(layout["dp"]),
        cp=s.cp,
        cp_kind=s.cp_kind,
        ep=s.ep,
        etp=s.etp,
        dispatcher=s.dispatcher,
        zero=int(layout["zero"]),
        shard=int(layout["shard"]) or None,
        micro_batch=s.micro_batch,
        schedule=SCHEDULE_NAMES[int(layout["schedule"])],
        vpp=int(layout["vpp"]),
        recompute=recompute,
        stages=None if cuts is None else tuple(b - a for a, b in itertools.pairwise(cuts)),
        rank_order=("replicas-inside", "stages-inside")[int(layout["rank_order"])],
        idle=True,
    )


def evaluator_of(model, cluster, training):
    """The evaluator that `plan` makes, and the times of its strategies."""
    evaluator = PlanEvaluator(model, cluster, training, [cluster.chip.hbm.capacity_bytes])
    return evaluator, evaluator.times(cluster) if len(evaluator) else None


def plans_of_layout(evaluator, at):
    """Every plan of a layout as the estimator takes it: cuts and variants."""
    layout = evaluator.layouts[at]
    variants = range(len(evaluator.sizes[int(layout["strategy"])].variants))
    for cuts in partitions(evaluator, layout):
        if allowed(evaluator.training, cuts):
            for chosen in itertools.product(variants, repeat=int(layout["pp"])):
                yield cuts, chosen


def exhaustive(model, cluster, training):
    """Estimate every plan of every layout, one by one."""
    evaluator, times = evaluator_of(model, cluster, training)
    room = float(evaluator.limits_bytes[0])
    best = np.full(len(evaluator.layouts), np.inf)
    tried = 0
    for at in range(len(evaluator.layouts)):
        layout = evaluator.layouts[at]
        for cuts in filter(lambda cuts: allowed(training, cuts), partitions(evaluator, layout)):
            borders = np.array(cuts, np.int32)
            longest = max(b - a for a, b in itertools.pairwise(cuts))
            # What one stage recomputes changes nothing of another: for each the fastest that fits.
            loads, ways = [], list(stage_ways(evaluator, layout, longest))
            for way in ways:
                alike = np.full(int(layout["pp"]), way, np.int32)
                _, stages = evaluator.space.estimate(times, at, borders, alike, room)
                held = np.array([sum(terms) for terms in stages["memory"].tolist()])
                loads.append(np.where(held <= room * (1 + 1e-12), stages["load_s"], np.inf))
                tried += 1
            table = np.array(loads)
            if np.isinf(table.min(axis=0)).any():
                continue
            chosen = np.array(ways, np.int32)[table.argmin(axis=0)]
            found, _ = evaluator.space.estimate(times, at, borders, chosen, room)
            assert found["status"][0] == 0
            best[at] = min(best[at], found["time_s"][0])
    return Exhaustive(evaluator, times, best, tried)


def kind_of_layout(evaluator, at):
    """What tells listed plans apart: all but rank order, stages and what they recompute."""
    layout = evaluator.layouts[at]
    s = evaluator.sizes[int(layout["strategy"])].strategy
    widths = s.tp, s.cp, s.ep, s.micro_batch
    rest = (int(layout[name]) for name in ("pp", "dp", "zero"))
    ways = s.cp_kind, s.dispatcher, s.expert_width, int(layout["shard"]) or int(layout["dp"])
    name = SCHEDULE_NAMES[int(layout["schedule"])]
    return (*widths, *rest, name, int(layout["vpp"]), *ways)
