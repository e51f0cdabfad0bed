"""Subjects of the placement stage: the published instances, batches, long chains and graphs."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
from registry import Subject, register

from phaze_fast import Cluster, models
from phaze_fast.placement import (
    LayerTable,
    PipelineProblem,
    Placement,
    PublishedProblem,
    Training,
    place,
    place_batch,
    plan,
    problem_from_dict,
)

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "dp_golden.jsonl"
LARGE = ("megatron-8.3b_D1024", "gpt3-175b_D1024")


def _records() -> dict[str, dict[str, Any]]:
    with GOLDEN.open() as lines:
        return {record["name"]: record for record in map(json.loads, lines)}


def _same(name: str, found: Placement) -> None:
    record = _records()[name]
    expected = record["output"]["finalTimePerBatch"]
    if expected is None:
        assert found.status == "infeasible"
    else:
        assert np.isclose(found.time_s, expected, rtol=1e-9)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    public = record["reference_wall_s_O3"]
    sys.stderr.write(f"\n{name}: the public program took {public} s; process at {most} KiB\n")


for _name in _records():
    if not _name.startswith(LARGE):
        continue
    register(
        Subject(
            name=_name,
            stage="placement",
            items=1,
            build=lambda name=_name: problem_from_dict(_records()[name]),
            run=place,
            check=lambda _, found, name=_name: _same(name, found),
            target="<= 1 ms",
        )
    )

BATCH = 500


def _batch() -> list[PublishedProblem]:
    small = [name for name in _records() if name.startswith(("bertlarge", "opt-1.3b"))]
    problems = [problem_from_dict(_records()[name]) for name in small]
    return [problems[k % len(problems)] for k in range(BATCH)]


def _check_batch(problems: list[PublishedProblem], found: list[Placement]) -> None:
    for problem, answer in zip(problems, found, strict=True):
        expected = _records_by_name[problem.name]["output"]["finalTimePerBatch"]
        assert np.isclose(answer.time_s, expected, rtol=1e-9)


_records_by_name = _records()
register(
    Subject(
        name="batch-of-24-layer-models",
        stage="placement",
        items=BATCH,
        build=_batch,
        run=place_batch,
        check=_check_batch,
        target=">= 10,000/s",
    )
)


def _chain() -> LayerTable:
    rng, count = np.random.default_rng(0), 1000
    weights = rng.uniform(0.9, 1.1, count) * 1e9
    return LayerTable(
        names=range(count),
        forward_s=rng.uniform(0.9, 1.1, count) * 1e-3,
        backward_s=rng.uniform(1.8, 2.2, count) * 1e-3,
        stash_bytes=2e7,
        once_bytes=2e8,
        resident_bytes=2 * weights,
        sync_s=4 * weights / 50e9,
        edge_s=1e-4,
        edge_bytes=1e7,
    )


def _check_chain(_: PublishedProblem, found: Placement) -> None:
    assert found.status == "optimal"
    assert found.replicas * found.devices <= 16384
    assert sum(map(len, found.stages)) == 1000


register(
    Subject(
        name="1000-layers-16384-devices",
        stage="placement",
        items=1,
        build=lambda: PublishedProblem({1: _chain()}, 16384, 80e9, 4096),
        run=place,
        check=_check_chain,
        target="<= 1 s",
    )
)


def _two_branches() -> LayerTable:
    """Two towers of 50 layers each that meet in one."""
    half, rng = 50, np.random.default_rng(1)
    forward = rng.uniform(0.8, 1.2, 2 * half + 1) * 1e-3
    towers = [(k * half + i, k * half + i + 1) for k in range(2) for i in range(half - 1)]
    return LayerTable(
        names=range(2 * half + 1),
        forward_s=forward,
        backward_s=2 * forward,
        stash_bytes=3e8,
        once_bytes=1e8,
        resident_bytes=2e9,
        sync_s=1e-3,
        edges=[*towers, (half - 1, 2 * half), (2 * half - 1, 2 * half)],
        edge_s=1e-4,
        edge_bytes=1e7,
    )


def _check_graph(_: Any, found: Placement) -> None:
    assert found.status == "optimal"
    assert sum(map(len, found.stages)) == 101


register(
    Subject(
        name="two-branches-published",
        stage="placement",
        items=1,
        build=lambda: PublishedProblem({1: _two_branches()}, 64, 60e9, 512),
        run=place,
        check=_check_graph,
        target="<= 1 s",
    )
)
register(
    Subject(
        name="two-branches-pipeline",
        stage="placement",
        items=1,
        build=lambda: PipelineProblem(_two_branches(), 60e9, 64, (1, 16)),
        run=place,
        check=_check_graph,
        target="<= 1 s",
    )
)


def _t5() -> tuple[Any, Cluster, Training]:
    cluster = Cluster(devices=32, fabric="dgx-h100", chip="h100")
    return models.load("t5-11b"), cluster, Training(global_batch=256, microbatch=4)


register(
    Subject(
        name="plan-t5-11b-32-h100",
        stage="placement",
        items=1,
        build=_t5,
        run=lambda asked: plan(*asked),
        check=lambda _, found: _check_plan(found),
        target="all layouts in seconds",
    )
)


def _check_plan(found: Any) -> None:
    assert len(found) > 0
    assert found.best.memory_bytes <= 80 * 2**30
