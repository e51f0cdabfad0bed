"""Subjects of the search: a part of the published space, searched and tried chip by chip."""

from __future__ import annotations

from typing import Any

import numpy as np
from phaze_fast.explore.outcome import Outcome
from phaze_fast.explore.search import find_chips
from registry import Subject, register

from phaze_fast import ArchitectureSpace, Cluster, Training, evaluate_batch, models

Given = tuple[Any, ArchitectureSpace, Cluster, Training]


def _given(count: int) -> Given:
    whole = ArchitectureSpace.published()
    picked = np.random.default_rng(0).choice(len(whole), count, replace=False)
    step = Training(global_batch=4096, tensor_parallel=(1, 2, 4, 8))
    pod = Cluster(devices=1024, fabric="tpuv4-pod")
    model = models.load("bert-large")
    find_chips([model], whole[:10], pod, step)  # what no chip changes is worked out once
    return model, whole[np.sort(picked)], pod, step


def _search(given: Given) -> Outcome:
    model, space, cluster, step = given
    return find_chips([model], space, cluster, step, top=1)


def _try_all(given: Given) -> Any:
    return evaluate_batch(*given)


def _same(given: Given, found: Outcome) -> None:
    assert found.status == "optimal"
    assert found.winners[0].score == evaluate_batch(*given).time_s.min()


def _same_of_all(given: Given, found: Any) -> None:
    assert _search(given).winners[0].score == found.time_s.min()


CHIPS = 60
register(
    Subject(
        name="search-60-chips",
        stage="search",
        items=CHIPS,
        build=lambda: _given(CHIPS),
        run=_search,
        check=_same,
        target="fewer seconds than all-60-chips, the same answer",
    )
)
register(
    Subject(
        name="all-60-chips",
        stage="search",
        items=CHIPS,
        build=lambda: _given(CHIPS),
        run=_try_all,
        check=_same_of_all,
        target="",
    )
)
