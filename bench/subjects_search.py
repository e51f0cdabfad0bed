"""Subjects of the search: the published space and parts of it, searched and tried chip by chip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from registry import Subject, register

from phaze_fast import (
    ArchitectureSpace,
    Cluster,
    Training,
    evaluate_batch,
    models,
    plan,
)
from phaze_fast.explore import Evaluations, Outcome, find_chips
from phaze_fast.software import DEFAULT, load_software

Given = tuple[Any, ArchitectureSpace, Cluster, Training]


def _given(count: int, name: str = "bert-large") -> Given:
    whole = ArchitectureSpace.published()
    picked = np.random.default_rng(0).choice(len(whole), count, replace=False)
    free = load_software(DEFAULT).replace(overlap_slowdown=1.0)  # as recorded answers have it
    step = Training(global_batch=4096, tp=(1, 2, 4, 8), zero=(0, 1), software=free)
    pod = Cluster(devices=1024, fabric="tpuv4-pod")
    model = models.load(name)
    find_chips([model], whole[:10], pod, step)  # what no chip changes is worked out once
    return model, whole[np.sort(picked)], pod, step


def _search(given: Given) -> Outcome:
    model, space, cluster, step = given
    return find_chips([model], space, cluster, step, top=1)


def _try_all(given: Given) -> Any:
    return evaluate_batch(*given, threads=1)


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


# ---- every chip for itself ----

MANY = 1024


def _check_some(given: Given, found: Evaluations) -> None:
    """The same as `plan` says of the chip, on a few of them."""
    model, space, cluster, step = given
    for k in range(0, len(space), max(1, len(space) // 3)):
        best = plan(model, cluster.replace(chip=space[k]), step, top=1, threads=1).plans
        assert bool(best) == bool(found.feasible[k])
        if best:
            assert found.time_s[k] == best[0].time_s


for _name in ("bertlarge", "llama2", "megatrongpt3"):
    register(
        Subject(
            name=f"evaluate-{MANY}-chips-{_name}",
            stage="search",
            items=MANY,
            build=lambda name=_name: _given(MANY, name),
            run=_try_all,
            check=_check_some,
            smoke=lambda name=_name: _given(6, name),
            rounds=1,
        )
    )


# ---- the published space ----

ANSWERS = Path(__file__).parent.parent / "tests" / "golden" / "v0_1_0_answers.json"


def _published() -> Given:
    model, _, cluster, step = _given(1)
    return model, ArchitectureSpace.published(), cluster, step


def _check_published(_: Given, found: Outcome) -> None:
    was = json.loads(ANSWERS.read_text("utf-8"))["searches"]["published/bertlarge"]["top"][0]
    assert found.status == "optimal"
    assert found.winners[0].chip == was["index"]
    assert abs(found.winners[0].score / was["time_s"] - 1.0) <= 1e-9


register(
    Subject(
        name="search-published-bert-large",
        stage="search",
        items=29_360 * 3,
        build=_published,
        run=_search,
        check=_check_published,
        target="88,080 chips proven in seconds",
        rounds=3,
    )
)


# ---- fronts ----


def _space(given: Given, every: int = 1) -> Given:
    model, _, cluster, step = given
    return model, ArchitectureSpace.published()[::every], cluster, step


def _front(given: Given, objectives: tuple[str, str]) -> Outcome:
    model, space, cluster, step = given
    return find_chips([model], space, cluster, step, top=1, pareto=objectives)


def _check_front(given: Given, found: Outcome, name: str) -> None:
    """Points get slower and better in the other objective, and no chip evaluated beats one."""
    model, space, cluster, step = given
    assert found.status == "optimal"
    points = np.array([[p.time_s, getattr(p, name)] for p in found.front])
    assert found.winners[0].time_s == points[0, 0]
    assert (np.diff(points[:, 0]) > 0).all()
    assert (np.diff(points[:, 1]) < 0).all()
    exact = evaluate_batch(model, space[:: max(1, len(space) // 20)], cluster, step, threads=1)
    for time_s, value in zip(exact.time_s, getattr(exact, name), strict=True):
        beaten = (points[:, 0] >= time_s) & (points[:, 1] >= value)
        assert not (beaten & ((points[:, 0] > time_s) | (points[:, 1] > value))).any()


for _name, _model, _objective, _column, _target in (
    ("front-time-energy-bert-large", "bert-large", "energy", "energy_j", "<= 20 s"),
    ("front-time-area-bert-large", "bert-large", "area", "area_mm2", "<= 5 s"),
):
    register(
        Subject(
            name=_name,
            stage="search",
            items=29_360 * 3,
            build=lambda model=_model: _space(_given(1, model)),
            run=lambda given, objective=_objective: _front(given, ("time", objective)),
            check=lambda given, found, column=_column: _check_front(given, found, column),
            target=_target,
            smoke=lambda model=_model: _space(_given(1, model), 293),
            rounds=1,
        )
    )
