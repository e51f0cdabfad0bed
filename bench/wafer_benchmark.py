"""The open benchmark of mappings on wafers: writes its instances, and our answers with bounds.

    .venv/bin/python bench/wafer_benchmark.py instances   # from presets; files are checked in
    .venv/bin/python bench/wafer_benchmark.py answers     # searches and bounds every instance
    .venv/bin/python bench/wafer_benchmark.py answers dense-mesh    # one of them

An instance holds every number that its score depends on, so that it means the same when presets or
cost models change. `wafer_score.py` scores answers without any of this.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
sys.path.insert(0, str(HERE.parent / "tests" / "cases"))

from mapping_cases import arguments  # noqa: E402
from wafer_score import COLLECTIVES, OUTPUTS, ROLES, case_of, score  # noqa: E402

from phaze_fast import _core, models  # noqa: E402
from phaze_fast.wafer import Layout, Problem, WaferTraining, load_wafer  # noqa: E402
from phaze_fast.wafer.mapping.layout import slots_of  # noqa: E402
from phaze_fast.wafer.mapping.operators import WEIGHTS  # noqa: E402
from phaze_fast.wafer.mapping.placement import Placement  # noqa: E402
from phaze_fast.wafer.mapping.problem import combinations  # noqa: E402

SEEDS, STEPS = 3, 20_000
NAMES = tuple(ROLES)


def _digits(value: float) -> float:
    return float(f"{float(value):.7g}")


def _operators(problem: Problem, layout: Layout) -> list[dict[str, Any]]:
    records = problem._graph(layout.micro_batch)[0]
    tables = problem.price_table(layout.dies, layout.micro_batch)
    cuts = combinations(layout.dies)[2]
    found = []
    for i, op in enumerate(problem.work.operators):
        record = records[i]
        legal = [
            (column, cut)
            for column, cut in enumerate(np.asarray(cuts).tolist())
            if all(
                factor == 1 or (NAMES[r] in op.roles and factor <= record["limit"][r])
                for r, factor in enumerate(cut)
            )
        ]
        found.append(
            {
                "name": op.name,
                "part": int(record["part"]),
                "roles": list(op.roles),
                "outputs": [name for o, name in enumerate(OUTPUTS) if record["outputs"] >> o & 1],
                "product": bool(record["product"]),
                "kept": bool(record["output_stored"]),
                "expert": bool(record["expert"]),
                "beside": {"": "", "input": "takes", "output": "makes"}[op.overlaps],
                "limit": [int(value) for value in record["limit"]],
                "stat_bytes": float(record["stat_bytes"]),
                "gather_bytes": float(record["gather_bytes"]),
                "splits": [
                    [*cut, *(_digits(t[i, column]) for t in tables)] for column, cut in legal
                ],
            }
        )
    return found


def _layout(problem: Problem, layout: Layout) -> dict[str, Any]:
    placement = Placement(problem.wafer, layout)
    rules = problem.rules(placement)[0]
    edges = problem._graph(layout.micro_batch)[1]
    names = _core.MAP_RULES_DTYPE.names or ()
    return {
        **layout.to_dict(),
        "slots": [list(run) for run in slots_of(layout.width, layout.height)],
        "operators": _operators(problem, layout),
        "edges": [
            [int(e["from"]), int(e["to"]), int(e["kind"]), float(e["bytes"]), bool(e["again"])]
            for e in edges
        ],
        "rules": {name: rules[name].item() for name in names},
        "blocks": list(problem.blocks(layout)),
        "boundary_s": [_digits(value) for value in problem.boundary_s(placement)],
        "chain": list(problem.work.chain),
    }


def _instances() -> dict[str, tuple[str, Problem, list[Layout]]]:
    """Name, what it is about, the problem and the layouts to choose among."""
    tile = load_wafer("dojo-tile-like")
    small = tile.replace(columns=4, rows=2)
    hbm = load_wafer("dram-stream-wafer").replace(columns=4, rows=2)
    dram = load_wafer("dram-wafer").replace(columns=4, rows=2)
    switched = load_wafer("switch-wafer").replace(columns=4, rows=2)
    bert = models.load("bertlarge")
    llama = models.load("llama2-7b").replace(layers=8)
    moe = models.load("mixtral-8x7b").replace(layers=4)

    def made(model: Any, wafer: Any, batch: int) -> Problem:
        return Problem(model, wafer, WaferTraining(batch))

    return {
        "dense-mesh": (
            "BERT-large on 8 dies with HBM",
            made(bert, dram, 48),
            [Layout(4, 2, 1, 16), Layout(2, 2, 2, 8)],
        ),
        "dense-streaming": (
            "Llama-2 7B of 8 layers on 8 dies with HBM and memory off the wafer",
            made(llama, hbm, 48),
            [Layout(4, 2, 1, 8), Layout(4, 1, 2, 4, "zb-h1")],
        ),
        "dense-sram-streaming": (
            "BERT-large on 8 SRAM dies; most activations and weights have no room",
            made(bert, small, 60),
            [Layout(4, 2, 1, 12), Layout(4, 1, 2, 6)],
        ),
        "experts-mesh": (
            "Mixtral of 4 layers on 8 dies with HBM and memory off the wafer: all-to-all",
            made(moe, hbm, 32),
            [Layout(4, 2, 1, 8), Layout(2, 2, 2, 4)],
        ),
        "dense-faults": (
            "BERT-large on 10 SRAM dies of which one is dead; stages are lines that bend",
            made(bert, tile.replace(columns=5, rows=2, dead=((2, 1),)), 45),
            [Layout(9, 1, 1, 9), Layout(4, 1, 2, 4)],
        ),
        "dense-joined": (
            "BERT-large on two joined wafers of 4 dies: interleaved over both, or replicas",
            made(bert, tile.replace(columns=2, rows=2, wafer_count=2), 48),
            [Layout(2, 2, 2, 4, "interleaved", 2), Layout(2, 2, 1, 4, replicas=2)],
        ),
        "dense-switched": (
            "BERT-large on 8 dies with HBM behind switches that sum; conversions beside products",
            made(bert, switched, 48),
            [Layout(8, 1, 1, 4), Layout(4, 1, 2, 2, blocks=(13, 11))],
        ),
        "experts-switched": (
            "Mixtral of 4 layers on 8 dies behind switches that sum: all-to-all, beside products",
            made(moe, switched, 32),
            [Layout(8, 1, 1, 4), Layout(4, 1, 2, 2)],
        ),
    }


def write_instances(names: list[str]) -> None:
    """Write instances as files: those named, or all."""
    for name, (about, problem, layouts) in _instances().items():
        if names and name not in names:
            continue
        wanted = [
            each
            for each in layouts
            if problem.training.global_batch % each.micro_batch == 0
            or each.micro_batch % each.dies == 0
        ]
        data = {
            "name": name,
            "about": about,
            "layouts": [_layout(problem, layout) for layout in wanted],
        }
        text = json.dumps(data, separators=(",", ":")).replace('{"name"', '\n{"name"')
        (HERE / "wafer_instances" / f"{name}.json").write_text(text.strip() + "\n")
        print(name, len(text) // 1000, "kB")


def _best_on(case: Any) -> tuple[Any, Any, float]:
    """Search one layout: (mapping, its score, a bound)."""
    every = combinations(math.prod(case.sizes))[2].tolist()
    for table in case.tables.values():  # the kernel has columns for splits that are not legal too
        for i in range(len(case.ops)):
            for cut in every:
                table.setdefault((i, tuple(cut)), 0.0)
    mapping = _core.Mapping(**arguments(case))
    relaxation = mapping.relaxation()
    free, relaxed = relaxation.bound(1.0, 0.0)
    scale = free / case.rules["micro_batches"] / sum(case.blocks) / case.rules["capacity_bytes"]
    starts, bound = [relaxed], free
    weights = [0.0] + ([1 / 32, 1 / 8, 1 / 2, 1.0] if case.rules["stream_capacity_bytes"] else [])
    for phi in weights:
        for at in range(-8, 13, 2):
            value, chosen = relaxation.bound(1.0, scale * 2.0**at, phi)
            bound = max(bound, value)
            starts.append(chosen)
    best: tuple[float, float, Any] = (math.inf, math.inf, None)
    for seed in range(SEEDS):
        for start in starts[:: max(1, len(starts) // 6)]:
            mapping.assign(start)
            mapping.anneal(seed, STEPS, 0.1)
            found, values, _ = mapping.descend(3)
            over = float(values["over_bytes"][0] + values["stream_over_bytes"][0])
            best = min(best, (over, float(values["time_s"][0]), found), key=lambda b: b[:2])
    mapping.assign(best[2])
    return mapping, best, bound


def write_answers(names: list[str]) -> None:
    """Search instances, those named or all; score what was found and write it with its bound."""
    for file in sorted((HERE / "wafer_instances").glob("*.json")):
        if names and file.stem not in names:
            continue
        instance = json.loads(file.read_text())
        tried = [_best_on(case_of(layout)) for layout in instance["layouts"]]
        place = min(range(len(tried)), key=lambda k: tried[k][1][:2])
        mapping, (over, time_s, found), _ = tried[place]
        layout = instance["layouts"][place]
        outputs = mapping.stages()[1]
        operators = []
        for row in found:
            masks = [int(mask) for mask in row["slots"]]
            roles = [
                next(NAMES[r] for r, mask in enumerate(masks) if mask >> k & 1)
                for k in range(len(layout["slots"]))
            ]
            how = COLLECTIVES[int(row["algorithm"])]
            operators.append(
                {"roles": roles, "weights": WEIGHTS[int(row["mode"])], "collective": how}
            )
        answer = {
            "instance": instance["name"],
            "layout": place,
            "operators": operators,
            "outputs": [[OUTPUTS[int(code)] for code in stage] for stage in outputs],
            "time_s": time_s,
            "bound_s": min(bound for _, _, bound in tried),
        }
        scored = score(instance, answer)
        assert over <= 0, (instance["name"], over)
        assert scored["fits"], (instance["name"], scored)
        assert math.isclose(scored["time_s"], time_s, rel_tol=1e-9)
        text = json.dumps(answer).replace('{"roles"', '\n {"roles"')
        (HERE / "wafer_answers" / file.name).write_text(text + "\n")
        gap = 1 - answer["bound_s"] / time_s
        print(f"| {instance['name']} | {instance['about']} | {time_s:.6g} | {gap:.1%} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["instances"]:
        write_instances(sys.argv[2:])
    elif sys.argv[1:2] == ["answers"]:
        write_answers(sys.argv[2:])
    else:
        sys.exit("expected: instances, or answers; and names, where not all are meant")
