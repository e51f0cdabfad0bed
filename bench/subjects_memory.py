"""Subjects of the memory stage: footprints over grids of plans."""

from __future__ import annotations

import numpy as np
from reference.memory import stage_terms
from registry import Subject, register

from phaze_fast import models
from phaze_fast.memory import SCHEDULES, Pipeline, footprint_batch, stage_rows
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.software import FRAGMENTATION

N = 1_200_000


def _grid() -> np.ndarray:
    """Every stage of twelve-stage plans of GPT-3, over replicas and micro-batches."""
    graph = layer_graph(models.load("gpt3-175b"), Strategy(tp=8))
    rows = np.tile(stage_rows(graph, Pipeline(pp=12, micro_batches=64)), N // 12)
    rows["dp"] = np.arange(N) % 512 + 1
    rows["micro_batches"] = np.arange(N) % 96 + 1
    rows["zero"] = np.arange(N) % 4
    footprint_batch(rows[:1].copy())  # compiled, or read from the cache, before the clock starts
    return rows


def _check(rows: np.ndarray, found: np.ndarray) -> None:
    for i in range(0, len(rows), len(rows) // 60):
        expected = stage_terms(rows[i], SCHEDULES, FRAGMENTATION)
        assert abs(found["total"][i] - expected["total"]) <= 1e-12 * expected["total"]


register(
    Subject(
        name="plan-stages",
        stage="memory",
        items=N,
        build=_grid,
        run=footprint_batch,
        check=_check,
        target=">= 5 M/s",
    )
)
