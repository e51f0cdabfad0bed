"""Subjects of wafer mappings: evaluations by one changed operator, and from the beginning."""

from __future__ import annotations

from typing import Any

import numpy as np
from registry import Subject, register

from phaze_fast import models
from phaze_fast.wafer import Layout, Problem, WaferTraining, load_wafer, mesh_collective
from phaze_fast.wafer.mapping.mesh import Run
from phaze_fast.wafer.mapping.placement import Placement

STEPS = 100_000
FULL = 2_000


def _mapping() -> Any:
    problem = Problem(models.load("gpt3-13b"), load_wafer("dram-wafer"), WaferTraining(512))
    mapping = problem.mapping(Layout(8, 5, 1, 64))
    mapping.anneal(1, 2_000, 0.03)  # memory is short: outputs are chosen in every evaluation
    return mapping, mapping.op_mappings()


def _streaming() -> Any:
    problem = Problem("llama2-7b", load_wafer("dojo-tile-like"), WaferTraining(512))
    mapping = problem.mapping(Layout(5, 5, 1, 2))
    mapping.anneal(1, 2_000, 0.03)  # outputs are kept, computed again or moved off the wafer
    return mapping, mapping.op_mappings()


def _experts_on_dram() -> Any:
    wafer = load_wafer("dram-stream-wafer")
    mapping = Problem("mixtral-8x7b", wafer, WaferTraining(512)).mapping(Layout(8, 5, 1, 40))
    mapping.anneal(1, 2_000, 0.03)
    return mapping, mapping.op_mappings()


def _experts_on_tiles() -> Any:
    tiles = load_wafer("dojo-tile-like").replace(wafer_count=8)
    mapping = Problem("mixtral-8x7b", tiles, WaferTraining(512)).mapping(Layout(24, 1, 8, 2))
    mapping.anneal(1, 2_000, 0.03)  # each of eight stages has outputs to choose
    return mapping, mapping.op_mappings()


def _streams_fit(given: Any, found: Any) -> None:
    op_mappings, score, evaluations = found
    assert evaluations == STEPS + 1
    given[0].assign(op_mappings)
    assert given[0].score().tobytes() == score.tobytes()
    assert score["over_bytes"][0] == 0.0


def _anneal(given: Any) -> Any:
    mapping, op_mappings = given
    mapping.assign(op_mappings)
    return mapping.anneal(7, STEPS, 0.03)


def _fresh_agrees(given: Any, found: Any) -> None:
    op_mappings, score, evaluations = found
    assert given[0].op_mappings().tobytes() == op_mappings.tobytes()
    assert evaluations == STEPS + 1
    fresh = _mapping()[0]
    fresh.assign(op_mappings)
    assert fresh.score().tobytes() == score.tobytes()
    assert score["over_bytes"][0] == 0.0


def _assign(given: Any) -> Any:
    mapping, op_mappings = given
    for _ in range(FULL):
        mapping.assign(op_mappings)
        score = mapping.score()
    return score


def _same_score(given: Any, found: Any) -> None:
    mapping, op_mappings = given
    mapping.assign(op_mappings)
    assert mapping.score().tobytes() == found.tobytes()


register(
    Subject(
        name="incremental",
        stage="wafer",
        items=STEPS,
        build=_mapping,
        run=_anneal,
        check=_fresh_agrees,
        target="300,000 evaluations a second and core",
    )
)
register(
    Subject(
        name="incremental-streaming",
        stage="wafer",
        items=STEPS,
        build=_streaming,
        run=_anneal,
        check=_streams_fit,
        target="300,000 evaluations a second and core",
    )
)
for name, build in (("dram", _experts_on_dram), ("tiles", _experts_on_tiles)):
    register(
        Subject(
            name=f"incremental-mixtral-{name}",
            stage="wafer",
            items=STEPS,
            build=build,
            run=_anneal,
            check=_streams_fit,
            target="300,000 evaluations a second and core",
        )
    )
register(
    Subject(
        name="full",
        stage="wafer",
        items=FULL,
        build=_mapping,
        run=_assign,
        check=_same_score,
        target="fewer a second than incremental, the same bits",
    )
)


def _bounded(given: Any) -> float:
    return float(given[0].relaxation().bound(1.0, 0.0)[0])


def _below(given: Any, found: float) -> None:
    assert 0.0 < found <= given[0].score()["time_s"][0]


register(
    Subject(
        name="bound-256-choices",
        stage="wafer",
        items=1,
        build=_mapping,
        run=_bounded,
        check=_below,
    )
)


def _collectives(links: Any) -> float:
    return mesh_collective("all-reduce", 1e9, [Run(0, 8), Run(1, 5)], links).time_s


def _alike() -> Any:
    """Links of a wafer, all at the rate of the horizontal ones and without latency."""
    links = Placement(load_wafer("dram-wafer"), Layout(8, 5, 1, 1)).links()
    return links._replace(hop_s=0.0, y_bytes_per_s=links.x_bytes_per_s)


def _by_hand(links: Any, found: float) -> None:
    assert np.isclose(found, 2 * (39 / 40) * 1e9 / 2 / links.x_bytes_per_s, rtol=1e-12)


register(
    Subject(
        name="mesh-collective",
        stage="wafer",
        items=1,
        build=_alike,
        run=_collectives,
        check=_by_hand,
    )
)
