"""The layouts that a step and a cluster allow, by trying every combination of all choices."""

from itertools import product

from phaze_fast import _core
from phaze_fast.memory import SCHEDULES

NODE = -1


def node_shard(rules, dp, pp, order):
    """Most replicas of a node, fewer than all, that hold whole experts and divide the replicas."""
    width = rules["widths"][0] * (pp if order else 1)
    found = [
        n
        for n in range(1, dp)
        if dp % n == 0 and n % rules["widths"][3] == 0 and n * width <= rules["node_devices"]
    ]
    return max(found, default=0)


def shard_of(rules, zero, wanted, dp, pp, order):
    """The `shard` of a layout; None where it is impossible or the same as an earlier choice."""
    cp, ep = rules["widths"][1], rules["widths"][3]
    if zero != min(rules["zero"]) and dp * cp == 1:
        return None  # a single shard is the same under every ZeRO stage
    if wanted == 0:
        return 0
    if wanted == NODE:
        shard = node_shard(rules, dp, pp, order)
        return shard if shard * cp > 1 else None
    if dp % wanted or wanted % ep:
        return None
    if wanted == dp:
        both = zip(rules["zero"], rules["shards"], strict=True)
        return None if (zero, 0) in both else 0
    return wanted


def pipelines(rules):
    """Schedule, chunks and rank order of every pipeline; the first is that of one stage."""
    order = rules["rank_order"]
    yield rules["single_schedule"], 1, max(order, 0)
    for schedule, vpp in zip(rules["schedules"], rules["chunks"], strict=True):
        yield from ((schedule, vpp, o) for o in ((0, 1) if order < 0 else (order,)))


def allows(rules, pipeline, number, dp, pp, micro_batches):
    """Whether the pipeline with that number, the first being of one stage, takes these widths."""
    (schedule, vpp, order), inner = pipeline, rules["widths"][0]
    if number == 0:
        return pp == 1 and schedule >= 0
    places = pp if SCHEDULES[schedule] == "dualpipe" else pp * vpp
    if pp == 1 or places > rules["layers"]:
        return False
    if order and inner % rules["widths"][2]:
        return False
    if order and rules["rank_order"] < 0 and (dp == 1 or pp * inner > rules["node_devices"]):
        return False
    return not _core.check_pipeline(schedule, pp, vpp, micro_batches)


def layouts(rules):
    """Every layout, in the order of the list: ZeRO stage, pipeline, shard, replicas, stages."""
    inner, _, _, ep, micro_batch = rules["widths"]
    devices, most = rules["devices"], min(rules["blocks"], rules["most_stages"])
    rounds = rules["global_batch"] // micro_batch
    widths = [
        (dp, pp, rounds // dp)
        for dp in rules["dp"] or range(1, devices + 1)
        for pp in rules["pp"] or range(1, most + 1)
        if rounds % dp == 0 and dp % ep == 0 and inner * dp * pp <= devices and pp <= most
    ]
    choices = list(zip(rules["zero"], rules["shards"], strict=True))
    found = []
    for zero in sorted(set(rules["zero"])):
        own = [wanted for stage, wanted in choices if stage == zero]
        for (number, pipeline), wanted in product(enumerate(pipelines(rules)), own):
            schedule, vpp, order = pipeline
            for dp, pp, micro_batches in widths:
                shard = shard_of(rules, zero, wanted, dp, pp, order)
                if shard is not None and allows(rules, pipeline, number, dp, pp, micro_batches):
                    found.append((0, schedule, pp, vpp, zero, order, dp, micro_batches, shard))
    return found
