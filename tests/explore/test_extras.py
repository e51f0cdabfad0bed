"""The search with what the extras bring: workers in other processes, tables, pages."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest

import phaze_fast as pf
from phaze_fast.cli.main import main
from phaze_fast.explore import find_chips

SPACE = pf.ArchitectureSpace.published()
POD = pf.Cluster(devices=16, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=64, micro_batch=(1, 2), tp=(1, 2), schedule="1f1b")
MODEL = pf.models.load("bert-large")


def part(seed, count=80):
    picked = np.random.default_rng(seed).choice(len(SPACE), count, replace=False)
    return SPACE[np.sort(picked)]


def answer(outcome):
    return outcome.winners, outcome.front, outcome.counts


@pytest.mark.slow
def test_a_search_in_other_processes_finds_the_same():
    ask = {"top": 10, "pareto": ("time", "area")}
    here = find_chips([MODEL], part(1), POD, STEP, **ask)
    there = find_chips([MODEL], part(1), POD, STEP, executor="processes", threads=2, **ask)
    assert answer(there) == answer(here)


@pytest.mark.slow
def test_a_search_through_dask_finds_the_same_though_a_worker_dies():
    distributed = pytest.importorskip("distributed")
    settings = {"distributed.scheduler.allowed-failures": 3}
    import dask

    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as cluster,
    ):
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        for seed in range(3):
            ask = {"top": 10, "pareto": ("time", "area")}
            here = find_chips([MODEL], part(seed), POD, STEP, **ask)
            there = find_chips([MODEL], part(seed), POD, STEP, executor=address, **ask)
            assert answer(there) == answer(here)
        pids = list(distributed.Client(cluster).run(os.getpid).values())
        killer = threading.Thread(
            target=lambda: (time.sleep(0.5), os.kill(pids[0], signal.SIGKILL))
        )
        killer.start()
        space = part(9, 300)
        there = find_chips([MODEL], space, POD, STEP, top=10, executor=address)
        killer.join()
        assert answer(there) == answer(find_chips([MODEL], space, POD, STEP, top=10))


def test_the_command_writes_a_page_and_a_table(tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("PHAZE_FAST_CACHE", str(tmp_path / "cache"))
    axes = {"tensor_core.count": (4.0, 8.0), "buffer.capacity_bytes": (2.0**23, 2.0**27)}
    spec = SPACE.spec.replace(name="few", axes=axes, ties={}, area=None)
    (tmp_path / "few.yaml").write_text(spec.to_yaml())
    words = ["search", "bert-large", "--devices", "8", "--global-batch", "32", "--micro-batch", "1"]
    words += ["--tp", "1", "--hbm", "32,64", "--space", str(tmp_path / "few.yaml"), "--quiet"]
    words += ["--pareto", "time,area,hbm", "--report", str(tmp_path / "page.html")]
    words += [
        "--parquet",
        str(tmp_path / "front.parquet"),
        "--json",
        "-o",
        str(tmp_path / "a.json"),
    ]
    assert main(words) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Proven optimal" in page
    document = json.loads((tmp_path / "a.json").read_text())
    rows = parquet.read_table(tmp_path / "front.parquet").to_pylist()
    front = document["pareto"]["designs"]
    assert [row["time_s"] for row in rows] == [row["time_s"] for row in front]
    assert set(document["baselines"]) == {"hand_plan", "megatron_plan", "our_plan"}
