"""Recorded plans: answers, reasons of refusals, and how many layouts each search examined.

`PYTHONPATH=tests/cases:tests python tests/planning/test_recorded_plans.py` writes the record anew; a
commit that changes it says why.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from case_counts import slow_ones
from plan_cases import random_problem
from recorded import assert_as_recorded, plain, recorded_rows, write_record

import phaze_fast as pf
from phaze_fast.planning import plan
from phaze_fast.software import software_names

FILE = Path(__file__).parents[1] / "golden" / "recorded_plans.json"
COUNT = 40
PRESETS = ("gpt2-small", "mixtral-8x7b", "deepseek-v2-lite", "t5-small", "vit-b16", "llama2-7b")
FRAMEWORKS = ("megatron", "bridge", "deepspeed", "torchtitan", "maxtext")
CHIPS = ("h100", "a100-80", "tpuv4", "h200", "mi300x", "b200")
LISTED = ("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "schedule", "time_s", "memory_bytes")


def asked(number: int) -> dict[str, Any]:
    """A small random problem, or one of a preset under some software or framework."""
    rng = random.Random(8100 + number)
    if number % 3 == 0:
        model, cluster, training = random_problem(rng)
        return {"model": model, "cluster": cluster, "training": training, "top": 4}
    model = pf.models.load(rng.choice(PRESETS))
    model = model.replace(layers=min(model.layers, 4))
    chip, devices = rng.choice(CHIPS), rng.choice((4, 8, 16))
    options: dict[str, Any] = {"headroom": rng.choice((0.0, 0.03, "1 GiB")), "top": 3}
    free: dict[str, Any] = {}
    if number % 3 == 1:
        free["software"] = rng.choice([name for name in software_names() if "pytorch" not in name])
        if rng.random() < 0.4:
            free["offload"] = rng.choice((("optimizer",), ("activations",)))
    else:
        options["framework"] = rng.choice(FRAMEWORKS)
    if number % 3 == 1 or number % 4 == 0:
        free["optimizer"] = rng.choice(("adam", "adam", "adam-bf16", "muon", "adafactor"))
    if number % 3 == 1 and rng.random() < 0.4:
        free["schedule"] = rng.sample(("1f1b", "interleaved", "zb-h1", "gpipe", "zb-v"), 2)
    if getattr(model, "moe", None):
        free |= {"ep": (1, 4), "cp": (1,)}
    training = pf.Training(
        global_batch=rng.choice((16, 32)), micro_batch=(1, 2), tp=(1, 2, 4), **free
    )
    fabric = pf.presets.chip(chip).usual_fabric
    cluster = pf.Cluster(devices=devices, fabric=fabric, chip=chip)
    return {"model": model, "cluster": cluster, "training": training, **options}


def found(number: int) -> Any:
    try:
        answer = plan(**asked(number), threads=1)
    except pf.InvalidInputError as error:
        return {"refused": str(error)}
    data = answer.to_dict()
    data.pop("calibration", None)
    for part in ("plans", "front"):
        data[part] = [[own[name] for name in LISTED] for own in data.get(part) or ()]
    best = answer.best.to_dict() if answer.plans else None
    if best is not None:
        best = {k: v for k, v in best.items() if k not in ("software", "interval_s")}
    return plain({**data, "best": best})


@pytest.mark.parametrize("number", slow_ones(range(COUNT), 1, 4, 5, 16, 23, 29, 35, 38))
def test_plans_are_what_was_recorded(number: int) -> None:
    assert_as_recorded(found(number), recorded_rows(FILE)[number])


if __name__ == "__main__":
    write_record(FILE, [found(number) for number in range(COUNT)])
