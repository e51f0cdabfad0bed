"""Recorded spaces: the strategies and layouts of random problems, their sizes, and what is refused.

`PYTHONPATH=tests/cases:tests python tests/planning/test_recorded_spaces.py` writes the record anew; a
commit that changes it says why.
"""

from __future__ import annotations

import math
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_cases import some
from recorded import assert_as_recorded, plain, recorded_rows, write_record

import phaze_fast as pf
from phaze_fast.errors import PhazeError
from phaze_fast.memory import OPTIMIZERS, SCHEDULES
from phaze_fast.models import Lora
from phaze_fast.planning.evaluator import PlanEvaluator, checked_model
from phaze_fast.planning.frameworks import (
    FRAMEWORKS,
    expressible,
    framework_training,
    free_training,
)
from phaze_fast.planning.layouts import WidthChoices, space_text
from phaze_fast.software import software_names

FILE = Path(__file__).parents[1] / "golden" / "recorded_spaces.json"
COUNT = 50
MODELS = (
    *("gpt2-small", "llama2-7b", "mixtral-8x7b", "deepseek-v2-lite", "t5-small", "bert-large"),
    *("vit-b16", "llama3-8b"),
)
FABRICS = ("dgx-h100", "dgx-a100", "tpuv4-pod")
MODES = ("none", "norms", "full", "selective", "attention", "norms+attention", "up-projection")
PROFILES = [
    name for name in software_names() if "pytorch" not in name and "huggingface" not in name
]


def two(rng: random.Random, values: list[Any]) -> tuple[Any, ...]:
    """One or two of the values, in any order."""
    return tuple(rng.sample(values, rng.randint(1, 2)))


def asked(number: int) -> tuple[Any, pf.Cluster, pf.Training]:
    """A model of few layers, a cluster and a step with all kinds of lists, in any order."""
    rng = random.Random(5200 + number)
    model = pf.models.load(MODELS[number % len(MODELS)])
    model = model.replace(layers=rng.choice((2, 3, 5, 6)))
    if number % 5 == 2 and not getattr(model, "encoder_layers", 0):
        model = model.with_lora(Lora(rank=8))
    devices, batch = rng.choice((4, 6, 8, 16, 24, 32)), rng.choice((4, 6, 12, 16, 64))
    cluster = pf.Cluster(devices=devices, fabric=rng.choice(FABRICS[:2]), chip="h100")
    if number % 7 == 3:
        cluster = pf.Cluster(devices=8, fabric="tpuv4-pod", chip="tpuv4")
    free: dict[str, Any] = {
        "tp": two(rng, [1, 2, 4, 8]) if rng.random() < 0.8 else rng.choice((None, (3, 1))),
        "pp": rng.choice((None, None, some(rng, [1, 2, 3, 4, 8]))),
        "dp": rng.choice((None, None, some(rng, [1, 2, 4, 8, 16]))),
        "cp": (1,) if rng.random() < 0.6 else rng.choice((None, two(rng, [1, 2, 4, 8]))),
        "zero": some(rng, [0, 1, 2, 3]),
        "shard": rng.choice((("auto",), some(rng, ["all", "node", 2, 4]), (2,), ("node",))),
        "schedule": some(rng, list(SCHEDULES)),
        "vpp": some(rng, [2, 3, 4]),
        "recompute": rng.choice((("auto",), some(rng, list(MODES)))),
        "rank_order": rng.choice(("auto", "auto", "replicas-inside", "stages-inside")),
        "sequence_parallel": rng.random() < 0.7,
        "micro_batch": two(rng, [1, 2, 4]),
        "optimizer": rng.choice((None, None, *OPTIMIZERS)),
        "seq": rng.choice((None, None, 512, 32768)) if model.rotary is not None else None,
    }
    if free["cp"] != (1,) and rng.random() < 0.6:
        free["cp_kind"] = two(rng, ["all-gather", "ring", "ulysses", "ulysses:2/ring"])
    if getattr(model, "moe", None):
        free["ep"] = two(rng, [1, 2, 4, 8]) if rng.random() < 0.8 else None
        free["etp"] = rng.choice((None, None, two(rng, [1, 2, 4])))
        free["dispatcher"] = rng.choice((("auto",), ("all-gather",), ("all-to-all",)))
        free["overlap_experts"] = rng.choice((None, None, True, False))
        free["expert_overlap"] = rng.choice((0.0, 0.0, 0.5))
    if rng.random() < 0.6:
        free["software"] = rng.choice(PROFILES)
    if rng.random() < 0.3:
        free["offload"] = some(rng, ["optimizer", "activations"])
    try:
        training = pf.Training(global_batch=batch, **free)
    except PhazeError:
        free |= {"optimizer": "adam", "software": "megatron-core"}
        training = pf.Training(global_batch=batch, **free)
    model = checked_model(model, training.software, training.seq)
    if sum(1 for _ in WidthChoices.of(model, cluster, training).combinations(training)) > 40:
        training = training.replace(tp=(2, 4), cp=(1,), micro_batch=(1,))
    return model, cluster, training


def sums(rows: Any) -> dict[str, list[float]]:
    """Of every column the sum, and a sum that depends on the order of rows."""
    found = {}
    for name in rows.dtype.names or ():
        flat = rows[name].astype(float).reshape(len(rows), int(np.prod(rows[name].shape[1:])))
        column = flat.sum(axis=1)
        found[name] = [column.sum(), (column * np.arange(1, len(rows) + 1)).sum()]
    return {name: values for name, values in found.items() if values[1]}


def folded(rows: Any) -> float:
    """One number of all columns, which a small change of any of them changes."""
    parts = [math.log1p(abs(part)) for own in sums(rows).values() for part in own]
    return sum(k * part for k, part in enumerate(parts, 1))


def found(number: int) -> dict[str, Any]:
    model, cluster, training = asked(number)
    row: dict[str, Any] = {"space": space_text(model, cluster, training)}
    evaluator = PlanEvaluator(model, cluster, training, [10e9, 60e9])
    layouts = evaluator.layouts
    strategies = [own.strategy for own in evaluator.sizes]
    row |= {"strategies": len(strategies), "layouts": sums(layouts), "why": evaluator.rejected}
    row["names"] = zlib.crc32("\n".join(map(repr, strategies)).encode())
    if strategies:
        numbers, kinds, order = evaluator._arrays
        row |= {
            "sizes": folded(numbers),
            "kinds": folded(kinds.reshape(-1)),
            "order": order.tolist(),
        }
        row["training"] = folded(evaluator._record)
        row["variants"] = zlib.crc32(repr([own.variants for own in evaluator.sizes]).encode())
        row["fits"] = evaluator.fits.sum(axis=0).tolist()
        bytes_ = [own.offloaded_bytes.sum() for own in evaluator.sizes]
        row["offloaded"] = float(sum(bytes_))
    for name in FRAMEWORKS[1:]:  # the rules of Megatron-LM are those of its Bridge
        why: Counter[str] = Counter()
        allowed = expressible(name, strategies, layouts, why)
        row[name] = {"allowed": int(allowed.sum())}
        row[name]["why"] = {text.partition(": ")[2][:24]: count for text, count in why.items()}
        try:
            limited = framework_training(name, model, training)
            free = free_training(training, limited)
            fields = ("zero", "schedule", "recompute", "recompute_some", "sequence_parallel")
            row[name]["training"] = [getattr(limited, field) for field in fields]
            row[name]["free"] = [len(free.recompute), free.zero, free.sequence_parallel]
        except PhazeError as error:
            row[name]["refused"] = str(error)[:60]
    return plain(row)


@pytest.mark.parametrize("first", range(10))
def test_spaces_are_what_was_recorded(first: int) -> None:
    recorded = recorded_rows(FILE)
    for number in range(first, COUNT, 10):
        assert_as_recorded(found(number), recorded[number], str(number))


if __name__ == "__main__":
    write_record(FILE, [found(number) for number in range(COUNT)])
