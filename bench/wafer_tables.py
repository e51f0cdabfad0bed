"""Tables of docs/wafer.md: models on wafers at several batches, beside other systems' plans.

    .venv/bin/python bench/wafer_tables.py [--processes 2] [--batches 512,480,500]

Cases run in processes of one thread each. Times of others are relative to ours. Where one wafer
has no room for a model's state, several are joined. It asserts that ours is never slower than a
baseline and that no bound is above it.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from phaze_fast.wafer import Effort, Problem, WaferTraining, compare_mappings, load_wafer, step_mfu
from phaze_fast.wafer.search.baselines import BASELINES

EFFORT = Effort(seeds=2, steps=5_000, promising=4)
PLACES = (
    ("dram-stream-wafer", "llama2-7b", 1),
    ("dram-stream-wafer", "gpt3-13b", 1),
    ("dram-stream-wafer", "gpt3-175b", 4),
    ("dram-stream-wafer", "mixtral-8x7b", 1),
    ("dram-stream-wafer", "bertlarge", 1),
    ("dojo-tile-like", "llama2-7b", 1),
    ("dojo-tile-like", "gpt3-13b", 2),
    ("dojo-tile-like", "mixtral-8x7b", 8),
    ("dojo-tile-like", "bertlarge", 1),
)
"""Wafer, model, and how many wafers are joined."""


class Row(NamedTuple):
    """One case, answered."""

    model: str
    wafer: str
    batch: int
    time_s: float
    gap: float
    mfu: float
    stages: str
    others: dict[str, float | None]
    seconds: float
    core_s: float


def answer(case: tuple[str, str, int, int]) -> Row:
    """Search one case and tune every baseline of it."""
    began, spent = time.perf_counter(), time.process_time()
    wafer, model, joined, batch = case
    where = load_wafer(wafer).replace(wafer_count=joined)
    problem = Problem(model, where, WaferTraining(batch))
    found = compare_mappings(problem, EFFORT, threads=1, ablations=False, equal_speed_memory=False)
    ours, best = found.ours, found.ours.best
    others = {
        name: each.best.time_s / best.time_s if each.best.fits and best.fits else None
        for name, each in found.baselines.items()
    }
    if best.fits:
        assert ours.bound_s <= best.time_s
        assert all(ratio is None or ratio >= 1.0 - 1e-12 for ratio in others.values()), others
    layout = best.encoding.layout
    stages = f"{layout.stages} of {layout.width} x {layout.height}, {layout.micro_batch}"
    stages += f", {layout.schedule}" if layout.stages > 1 else ""
    stages += f", {layout.replicas} replicas" if layout.replicas > 1 else ""
    mfu = step_mfu(problem, best) if best.fits else 0.0
    time_s = best.time_s if best.fits else float("inf")
    name = f"{joined} x {wafer}" if joined > 1 else wafer
    return Row(
        model,
        name,
        batch,
        time_s,
        ours.gap,
        mfu,
        stages,
        others,
        time.perf_counter() - began,
        time.process_time() - spent,
    )


def line(row: Row) -> str:
    """Write one row of the table."""
    cells = [f"{row.model}, {row.wafer}", str(row.batch)]
    if row.time_s == float("inf"):
        cells += ["OOM", "", "", ""]
    else:
        cells += [f"{row.time_s:.4g} s", f"{row.gap:.1%}", f"{row.mfu:.0%}", row.stages]
    for name in BASELINES:
        ratio = row.others.get(name)
        cells.append("OOM" if ratio is None else f"{ratio:.3f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table as Markdown, and what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--batches", default="512,480,500")
    parser.add_argument("--only", default="", help="part of a wafer's or model's name")
    given = parser.parse_args()
    batches = [int(batch) for batch in given.batches.split(",")]
    places = [place for place in PLACES if given.only in f"{place[0]} {place[1]}"]
    cases = [(*place, batch) for place in places for batch in batches]
    began = time.perf_counter()
    head = ["model, wafer", "batch", "ours", "gap", "MFU", "stages, micro-batch", *BASELINES]
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    core_s = 0.0
    with ProcessPoolExecutor(given.processes) as pool:
        for row in pool.map(answer, cases):
            print(line(row), flush=True)
            core_s += row.core_s
    took = f"{time.perf_counter() - began:.0f} s, {core_s:.0f} s of a core"
    print(f"\n{len(cases)} cases in {took}")


if __name__ == "__main__":
    main()
