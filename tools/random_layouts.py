"""Check that no random layout is faster than the plan that `plan` finds.

``python tools/random_layouts.py MODEL --chip h100 --devices 512 --seq 131072 --global-batch 64``
draws layouts at random, predicts those that are legal by ``predict_batch`` until 1,000 of them fit,
and compares them with the fastest plan. Exits with 1 where one is faster.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

import numpy as np

from phaze_fast.hardware import Cluster, presets
from phaze_fast.models import TransformerModel, load
from phaze_fast.opgraph import CONTEXT_KINDS, DISPATCHERS
from phaze_fast.planning import Training, plan, predict_batch
from phaze_fast.planning.layouts import divisors, node_devices
from phaze_fast.planning.training import RANK_ORDERS

SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4))
"""The schedules that `plan` tries by default, with the chunks of a stage."""


LAYOUTS = 16
"""Layouts drawn for each random strategy, whose operators take longer to size than to price."""


def draw_strategy(
    rng: random.Random, model: TransformerModel, cluster: Cluster, step: Training
) -> dict[str, Any]:
    """Draw widths, micro-batch, and how rows of sequences and experts are exchanged."""
    experts = 1 if model.moe is None else model.moe.experts
    tp = 2 ** rng.randrange(node_devices(cluster).bit_length())
    cp = rng.choice([n for n in divisors(cluster.devices) if n <= 64])
    mixed = [f"ulysses:{n}/ring" for n in divisors(cp)[1:-1]]
    return {
        "tp": tp,
        "cp": cp,
        "ep": rng.choice(divisors(experts)),
        "etp": 2 ** rng.randrange(tp.bit_length()),
        "micro_batch": rng.choice(step.micro_batch),
        "cp_kind": rng.choice([*CONTEXT_KINDS, *mixed]) if cp > 1 else CONTEXT_KINDS[0],
        "dispatcher": rng.choice(DISPATCHERS),
    }


def draw(
    rng: random.Random,
    model: TransformerModel,
    cluster: Cluster,
    step: Training,
    strategy: dict[str, Any],
) -> dict[str, Any] | None:
    """Draw a layout on all devices; None where they, or the batch, cannot be divided so."""
    width = strategy["tp"] * strategy["cp"]
    pp = rng.choice([n for n in divisors(cluster.devices) if n <= model.blocks])
    if cluster.devices % (width * pp):
        return None
    dp = cluster.devices // (width * pp)
    schedule, vpp = rng.choice(SCHEDULES) if pp > 1 else ("1f1b", 1)
    in_node = max(1, node_devices(cluster) // width)  # replicas
    fields = strategy | {
        "pp": pp,
        "dp": dp,
        "zero": rng.randrange(4),
        "shard": rng.choice([0, in_node] if dp % in_node == 0 else [0]),
        "schedule": schedule,
        "vpp": vpp,
        "rank_order": rng.choice(RANK_ORDERS),
    }
    return None if step.global_batch % (dp * strategy["micro_batch"]) else fields


def predicted(
    name: str, cluster: Cluster, step: Training, count: int, most: int, seed: int
) -> tuple[list[dict[str, Any]], np.ndarray, int]:
    """Predict different random layouts until `count` fit or `most` were drawn: those that fit,
    their seconds, and how many were predicted."""
    rng, model = random.Random(seed), load(name)
    assert isinstance(model, TransformerModel)
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    fitting, seconds, drawn, done = [], [], 0, 0
    while len(fitting) < count and drawn < most:
        batch = []
        while len(batch) < 250 and drawn < most:
            if drawn % LAYOUTS == 0:
                strategy = draw_strategy(rng, model, cluster, step)
            drawn += 1
            fields = draw(rng, model, cluster, step, strategy)
            if fields is not None and tuple(fields.values()) not in seen:
                seen[tuple(fields.values())] = fields
                batch.append(fields)
        if not batch:
            break
        columns = {key: [fields[key] for fields in batch] for key in batch[0]}
        found = predict_batch(name, cluster, step, **columns)
        done += len(batch)
        for at in np.flatnonzero(found.status == 0):
            fitting.append(batch[at])
            seconds.append(found.time_s[at])
    return fitting, np.array(seconds), done


def main() -> int:
    """Plan, draw and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--chip", default="h100")
    parser.add_argument("--fabric", default=None)
    parser.add_argument("--devices", type=int, default=512)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--most", type=int, default=400_000)
    parser.add_argument("--seed", type=int, default=38)
    given = parser.parse_args()
    chip = presets.chip(given.chip)
    cluster = Cluster(devices=given.devices, fabric=given.fabric or chip.usual_fabric, chip=chip)
    step = Training(global_batch=given.global_batch, seq=given.seq)
    begin = time.perf_counter()
    answer = plan(given.model, cluster, step)
    best = answer.best
    planned_s = time.perf_counter() - begin
    fitting, seconds, done = predicted(
        given.model, cluster, step, given.count, given.most, given.seed
    )
    faster = np.flatnonzero(seconds < best.time_s * (1 - 1e-9))
    lines = [
        f"{given.model} on {given.devices} x {given.chip}, {given.seq} tokens: {best}",
        f"{best.time_s:.4g} s, {answer.status}, searched in {planned_s:.0f} s; of {done:,} random "
        f"layouts {len(fitting):,} fit, the fastest takes {seconds.min(initial=np.inf):.4g} s; "
        f"{len(faster)} are faster",
        *(
            f"  {seconds[at]:.4g} s: {fitting[at]}"
            for at in faster[np.argsort(seconds[faster])][:5]
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(len(faster) > 0)


if __name__ == "__main__":
    sys.exit(main())
