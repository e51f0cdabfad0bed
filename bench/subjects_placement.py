"""Subjects of the placement stage: the published instances, batches, long chains and graphs."""

from __future__ import annotations

import itertools
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from registry import Subject, register

from phaze_fast import Cluster, models
from phaze_fast.papers import (
    LayerTable,
    NestProblem,
    Placement,
    PublishedProblem,
    nest_from_dict,
    place,
    place_batch,
    problem_from_dict,
    solve_nest,
)
from phaze_fast.planning import Plan, Plans, Predictions, Training, plan, predict, predict_batch
from phaze_fast.runs.sweep import PlanGrid, Point, SweepTable, sweep

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


def _check_published(problems: list[PublishedProblem], found: list[Placement]) -> None:
    for problem, answer in zip(problems, found, strict=True):
        expected = _records_by_name[problem.name]["output"]["finalTimePerBatch"]
        if expected is None:
            assert answer.status == "infeasible"
        else:
            assert np.isclose(answer.time_s, expected, rtol=1e-9)


register(
    Subject(
        name="published-49",
        stage="placement",
        items=len(_records()),
        build=lambda: [problem_from_dict(record) for record in _records().values()],
        run=lambda problems: place_batch(problems, threads=1),
        check=_check_published,
        target="half of version 0.1.0's time",
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


# ---- plans of models ----

Asked = tuple[Any, Cluster, Training]


def _t5() -> Asked:
    cluster = Cluster(devices=32, fabric="dgx-h100", chip="h100")
    return models.load("t5-11b"), cluster, Training(global_batch=256, micro_batch=4)


def _gpt3() -> Asked:
    cluster = Cluster(devices=1024, fabric="dgx-a100", chip="a100-80")
    return models.load("gpt3-175b"), cluster, Training(global_batch=1536)


def _llama3() -> Asked:
    cluster = Cluster(devices=256, fabric="dgx-h100", chip="h100")
    return models.load("llama3-70b"), cluster, Training(global_batch=512)


def _warm(asked: Asked) -> Asked:
    plan(*asked, threads=1)  # layers are scheduled once in a process
    return asked


def _grid(asked: Asked, copies: int = 1) -> dict[str, np.ndarray]:
    """Columns of plans with even stages, each as often as asked for."""
    _, cluster, step = asked
    rows = [
        (tp, pp, cluster.devices // (tp * pp), micro_batch, zero, recompute)
        for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32))
        for micro_batch, zero in itertools.product(step.micro_batch, step.zero)
        for recompute in ("none", "full")
        if cluster.devices % (tp * pp) == 0
    ]
    names = ("tp", "pp", "dp", "micro_batch", "zero", "recompute")
    columns = zip(*rows, strict=True)
    return {n: np.tile(np.array(c), copies) for n, c in zip(names, columns, strict=True)}


def _check_plan(asked: Asked, found: Plans) -> None:
    """The plan fits, is what `predict` says of it, and beats every even plan that fits."""
    model, cluster, step = asked
    best = found.best
    assert best.memory_bytes <= best.limit_bytes
    assert predict(model, cluster, best).time_s == best.time_s
    even = predict_batch(model, cluster, step, **_grid(asked), threads=1)
    fits = even.status == 0
    assert fits.sum() > 10
    assert best.time_s <= even.time_s[fits].min()


for _name, _asked, _target in (
    ("plan-again-t5-11b-32-h100", _t5, "<= 10 ms"),
    ("plan-again-gpt3-175b-1024-a100", _gpt3, "<= 10 ms"),
    ("plan-again-llama3-70b-256-h100", _llama3, "<= 10 ms"),
):
    register(
        Subject(
            name=_name,
            stage="placement",
            items=1,
            build=lambda asked=_asked: _warm(asked()),
            run=lambda asked: plan(*asked, threads=1),
            check=_check_plan,
            target=_target,
        )
    )


def _found() -> tuple[Asked, Plan]:
    asked = _llama3()
    return asked, plan(*asked, threads=1).best


def _check_prediction(given: tuple[Asked, Plan], predicted: Plan) -> None:
    assert predicted == given[1]


register(
    Subject(
        name="predict-llama3-70b-256-h100",
        stage="placement",
        items=1,
        build=_found,
        run=lambda given: predict(*given[0][:2], given[1]),
        check=_check_prediction,
        target="<= 1 ms",
    )
)


def _many(asked: Asked) -> dict[str, np.ndarray]:
    """Columns of plans with even stages, no two alike."""
    _, cluster, step = asked
    rows = [
        (tp, pp, cp, cluster.devices // (tp * pp * cp), micro_batch, *rest)
        for tp, pp, cp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4))
        for micro_batch in step.micro_batch
        for rest in itertools.product(
            range(4), ("none", "selective", "full"), ("replicas-inside", "stages-inside")
        )
        if cluster.devices % (tp * pp * cp) == 0
    ]
    names = ("tp", "pp", "cp", "dp", "micro_batch")
    names = (*names, "zero", "recompute", "rank_order")
    return {n: np.array(c) for n, c in zip(names, zip(*rows, strict=True), strict=True)}


def _given_many(every: int = 1) -> tuple[Asked, dict[str, np.ndarray]]:
    asked = _llama3()
    return asked, {name: column[::every] for name, column in _many(asked).items()}


def _mixtral() -> Asked:
    cluster = Cluster(devices=256, fabric="dgx-h100", chip="h100")
    return models.load("mixtral-8x7b"), cluster, Training(global_batch=1024)


def _interleaved(every: int = 1) -> tuple[Asked, dict[str, np.ndarray]]:
    """Plans of a mixture of experts with ZeRO and interleaved chunks, no two alike."""
    asked = _mixtral()
    columns = _many(asked)
    rows = len(columns["tp"])
    choices = [(ep, vpp) for ep in (1, 2, 4, 8) for vpp in (1, 2, 3, 4)]
    columns = {name: np.tile(column, len(choices)) for name, column in columns.items()}
    columns["ep"], columns["vpp"] = (np.repeat(c, rows) for c in np.array(choices).T)
    columns["schedule"] = np.where(columns["vpp"] > 1, "interleaved", "1f1b")
    return asked, {name: column[::every] for name, column in columns.items()}


def _predict_all(given: tuple[Asked, dict[str, np.ndarray]]) -> Predictions:
    return predict_batch(*given[0], **given[1], threads=1)


def _check_all(given: tuple[Asked, dict[str, np.ndarray]], found: Predictions) -> None:
    (model, cluster, step), columns = given
    possible = np.flatnonzero(np.isfinite(found.time_s))
    for k in possible[:: max(1, len(possible) // 20)].tolist():
        given_plan = {name: column[k].item() for name, column in columns.items()}
        one = predict(model, cluster, {**given_plan, "global_batch": step.global_batch})
        assert one.time_s == found.time_s[k]


for _name, _build, _target in (
    ("predict-batch-llama3-70b-256-h100", _given_many, ">= 1,000,000/s"),
    ("predict-batch-mixtral-8x7b-interleaved", _interleaved, ">= 500,000/s"),
):
    register(
        Subject(
            name=_name,
            stage="placement",
            items=len(_build()[1]["zero"]),
            build=_build,
            run=_predict_all,
            check=_check_all,
            target=_target,
            smoke=lambda build=_build: build(331),
        )
    )


SWEPT = PlanGrid(
    tp=(1, 2, 4, 8),
    pp=(1, 2, 4, 8, 16, 32),
    cp=(1, 2, 4),
    micro_batch=(1, 2, 4, 8),
    zero=(0, 1, 2, 3),
    recompute=("none", "selective", "full"),
    rank_order=("replicas-inside", "stages-inside"),
)


def _sweep_points() -> list[Point]:
    """One model on one cluster for rising batches, so that its layers are priced once."""
    model, cluster, step = _llama3()
    return [Point(model, cluster, step.replace(global_batch=256 * k)) for k in range(1, 9)]


def _check_sweep(points: list[Point], table: SweepTable) -> None:
    assert table["plans"].sum() > 40_000
    for point, row in zip(points, table.rows, strict=True):
        widths = ("tp", "pp", "dp", "cp", "micro_batch", "zero", "recompute", "rank_order")
        given = {name: row[name] for name in (*widths, "global_batch")}
        assert predict(point.model, point.cluster, given).time_s == row["time_s"]


register(
    Subject(
        name="sweep-of-grids-llama3-70b",
        stage="placement",
        items=8 * len(SWEPT.columns(256)["tp"]),
        build=_sweep_points,
        run=lambda points: sweep(points, evaluate=SWEPT, threads=1),
        check=_check_sweep,
        target=">= 300,000/s",
        rounds=1,
    )
)


def _deepseek() -> Asked:
    cluster = Cluster(devices=512, fabric="dgx-h100", chip="h100")
    return models.load("deepseek-v3"), cluster, Training(global_batch=4096)


def _fewer(asked: Asked) -> Asked:
    model, cluster, step = asked
    return model, cluster, step.replace(micro_batch=(1,), tp=(1, 2), ep=(8, 16), cp=(1,))


def _new_problems(asked: Asked) -> Iterator[Asked]:
    """Problems that differ in their sequence length, so that nothing is known of the next one."""
    model, cluster, step = asked
    for less in itertools.count(1):
        yield model.replace(seq=model.seq - 128 * less), cluster, step


def _check_new(_: Any, answer: tuple[Asked, Plans]) -> None:
    """The plan is proven, what `predict` says of it, and no slower with its widths given."""
    (model, cluster, step), found = answer
    best = found.best
    assert found.status == "optimal"
    assert best.memory_bytes <= best.limit_bytes
    assert predict(model, cluster, best).time_s == best.time_s
    given = {name: (getattr(best, name),) for name in ("tp", "cp", "ep", "micro_batch", "zero")}
    limited = plan(model, cluster, step.replace(**given), top=1, threads=1).best
    assert limited.time_s == best.time_s


for _name, _asked, _target, _rounds in (
    ("plan-new-gpt3-175b-1024-a100", _gpt3, "<= 60 ms", 5),
    ("plan-new-llama3-70b-256-h100", _llama3, "<= 30 ms", 5),
    ("plan-new-deepseek-v3-512-h100", _deepseek, "<= 2 s", 1),
):
    register(
        Subject(
            name=_name,
            stage="placement",
            items=1,
            build=lambda asked=_asked: (_warm(_t5()), _new_problems(asked()))[1],
            run=lambda problems: (asked := next(problems), plan(*asked, threads=1)),
            check=_check_new,
            target=_target,
            rounds=_rounds,
            smoke=lambda asked=_asked: _new_problems(
                _fewer(asked()) if asked is _deepseek else asked()
            ),
        )
    )

NEST_GOLDEN = GOLDEN.with_name("nest_instances.jsonl")


def _nest_records() -> list[dict[str, Any]]:
    with NEST_GOLDEN.open() as lines:
        return [json.loads(line) for line in lines]


def _nest_problems() -> list[NestProblem]:
    return [nest_from_dict(record) for record in _nest_records()]


def _check_nest(problems: list[NestProblem], answers: list[dict[str, Any]]) -> None:
    optimum = {record["name"]: record["optimum"] for record in _nest_records()}
    assert len(answers) == len(problems) == len(optimum)
    for answer in answers:
        expected = optimum[answer["name"]]
        assert np.isclose(answer["finalTimePerBatch"], expected["finalTimePerBatch"], rtol=1e-9)
        assert all(answer[key] == expected[key] for key in "ptd")
    # The machine may be busy, so that each problem's best of twenty counts.
    runs = [[again["solve_s"] for again in solve_nest(problems, threads=1)] for _ in range(20)]
    solve_s, name = max(zip(map(min, zip(*runs, strict=True)), optimum, strict=True))
    sys.stderr.write(f"\nslowest: {name}, {1e3 * solve_s:.3f} ms\n")
    assert solve_s <= 0.01


register(
    Subject(
        name="nest-published-25",
        stage="placement",
        items=25,
        build=_nest_problems,
        run=lambda problems: solve_nest(problems, threads=1),
        check=_check_nest,
        target="<= 10 ms each",
    )
)
