"""A long sweep that is killed repeatedly: no row is lost, and memory does not grow.

    python3 dev.py soak --points 10000000 --kills 10 --seed 1

A child process sweeps points of trivial cost into a directory, block by block; it is killed with
SIGKILL at random times and started again. At the end every point must have one right row, and the
peak resident memory must be about that of the first minute.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_S = 60.0
BLOCK = 20_000


def points(count):
    """Distinct points made of few distinct parts."""
    import phaze_fast as pf
    from phaze_fast.runs.sweep import Point

    model = pf.models.load("gpt2-small")
    side = max(1, round(count ** (1 / 3)) + 1)
    models = [model.replace(name=f"m{i}", layers=1 + i) for i in range(side)]
    steps = [pf.Training(global_batch=1 + i) for i in range(side)]
    clusters = [pf.Cluster(devices=1 + i, fabric="dgx-h100", chip="h100") for i in range(side)]
    return (
        Point(model, cluster, step)
        for model, cluster, step in itertools.islice(
            itertools.product(models, clusters, steps), count
        )
    )


def row_of(point):
    """A row at no cost that depends on the point."""
    size = point.training.global_batch * point.cluster.devices
    return {"status": "optimal", "time_s": float(size), "layers": point.model.layers}


def run(out, count):
    from phaze_fast.runs.sweep import sweep

    options = {"threads": 1, "chunk": 2000, "evaluate": row_of}
    left, rows, resumed = points(count), 0, 0
    for number in itertools.count():
        block = list(itertools.islice(left, BLOCK))
        if not block:
            break
        table = sweep(block, out / f"{number:06}", **options)
        rows, resumed = rows + len(table.rows), resumed + table.resumed
    sys.stdout.write(f"{rows} rows, {resumed} of them from before\n")


def resident_mib(pid):
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def started(out, count):
    command = [sys.executable, __file__, "--child", str(out), "--points", str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def checked(out, count):
    """The number of rows, after checking that each is right and there once."""
    from phaze_fast.runs.journal import RESULTS, read_rows

    seen = 0
    wanted = ((p.key, row_of(p)) for p in points(count))
    files = sorted(out.glob(f"*/{RESULTS}"))
    by_block = (row for file in files for row in read_rows(file).values())
    while True:
        own = dict(itertools.islice(wanted, BLOCK))
        if not own:
            break
        for row in itertools.islice(by_block, len(own)):
            expected = own.pop(row["key"])
            assert {k: row[k] for k in expected} == expected
            seen += 1
        assert not own, f"{len(own)} points have no row"
    assert next(by_block, None) is None, "a row too many"
    return seen


def watched(child, seconds=float("inf")):
    """Peak memory of a child in its first minute and in all, until it ends or `seconds` passed."""
    begin, warm, most = time.monotonic(), 0.0, 0.0
    while child.poll() is None and time.monotonic() - begin < seconds:
        now = resident_mib(child.pid)
        if time.monotonic() - begin < WARM_S:
            warm = max(warm, now)
        most = max(most, now)
        time.sleep(0.2)
    return warm, most


def killed_often(out, count, kills, rng, seconds):
    """Kill and start again, then let it end: the last child's output, and peaks over all children.

    A child that starts late only reads in its first minute, so the peaks of all count.
    """
    peaks = []
    for number in range(kills):
        child = started(out, count)
        peaks.append(watched(child, rng.uniform(0.3, 1.0) * seconds))
        if child.poll() is not None:
            sys.stdout.write(f"it was done before kill {number + 1}\n")
            break
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        sys.stdout.write(f"kill {number + 1}\n")
        sys.stdout.flush()
    child = started(out, count)
    peaks.append(watched(child))
    warm, most = (max(values) for values in zip(*peaks, strict=True))
    return child.stdout.read().strip(), warm, most


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="Between kills, at most.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="By default a directory that is removed.")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        run(asked.child, asked.points)
        return 0
    with tempfile.TemporaryDirectory() as name:
        out, begin = asked.out or Path(name), time.monotonic()
        rng = random.Random(asked.seed)
        said, warm, most = killed_often(out, asked.points, asked.kills, rng, asked.seconds)
        rows = checked(out, asked.points)
    flat = most <= 1.2 * warm
    sys.stdout.write(
        f"{said}\n{rows} of {asked.points} rows, each once and right, after {asked.kills} kills in "
        f"{time.monotonic() - begin:.0f} s; memory {warm:.0f} MiB in the first minute, "
        f"{most:.0f} MiB at most: {'flat' if flat else 'NOT FLAT'}\n"
    )
    return 0 if flat and rows == asked.points else 1


if __name__ == "__main__":
    sys.exit(main())
