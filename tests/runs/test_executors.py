"""Executors: rows are the same wherever they are made, though workers die on the way."""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import pytest

from phaze_fast.errors import InvalidInputError, MissingExtraError, PhazeError
from phaze_fast.runs.executors import Lost, Workers, run_chunks
from phaze_fast.runs.sweep import evaluate_point, sweep

needs_kill = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")


def many(count):
    from sweep_points import many as points  # a worker of a cluster imports this file without it

    return points(count)


def dies(marker, batch, point):
    """Kill the worker in the midst of a point: the first time only, where there is a marker."""
    if point.training.global_batch == batch:
        first = True
        if marker is not None:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                first = False
        if first:
            os.kill(os.getpid(), signal.SIGKILL)
    return evaluate_point(point)


# ---- no processes ---------------------------------------------------------------------------------


class Fragile(Executor):
    """Threads that pretend to be processes: `fate` says with what a call fails, if it does."""

    def __init__(self, fate):
        self.fate, self.calls, self.pool = fate, [], ThreadPoolExecutor(2)

    def submit(self, fn, /, *args, **kwargs):
        self.calls.append(args[0])
        error = self.fate(args[0])
        if error is None:
            return self.pool.submit(fn, *args, **kwargs)
        future = Future()
        future.set_exception(error)
        return future


class LostError(Exception):
    pass


def double(items):
    return [2 * item for item in items]


def outcomes(executor, items, chunk):
    with Workers(executor, 1) as workers:
        done = list(run_chunks(double, items, chunk, workers))
    found = {}
    for part, results in done:
        values = [results] * len(part) if isinstance(results, Lost) else results
        found.update(zip(part, values, strict=True))
    assert len(found) == len(items)
    return found


def test_a_lost_task_is_submitted_again():
    lost = set()

    def fate(items):
        if 5 in items and not lost:
            lost.add(5)
            return LostError("gone")
        return None

    executor = Fragile(fate)
    assert outcomes(executor, range(12), 4) == {n: 2 * n for n in range(12)}
    assert executor.calls.count([4, 5, 6, 7]) == 2


def test_an_item_that_kills_its_worker_is_given_up_alone():
    executor = Fragile(lambda items: LostError("gone") if 5 in items else None)
    found = outcomes(executor, range(12), 4)
    assert {n for n, value in found.items() if isinstance(value, Lost)} == {5}
    assert found[5].reason == "its worker was lost again and again (LostError: gone)"
    assert executor.calls.count([5]) == 2
    assert executor.calls.count([4]) == 1


def test_workers_that_never_end_a_task_end_the_sweep():
    executor = Fragile(lambda items: LostError("gone"))
    with pytest.raises(
        PhazeError, match=r"the workers no longer finish any task \(LostError: gone"
    ):
        outcomes(executor, range(1000), 1)


def test_a_broken_executor_of_someone_else_is_theirs_to_mend():
    executor = Fragile(lambda items: BrokenProcessPool("broken"))
    with pytest.raises(PhazeError, match="the executor that was given is broken"):
        outcomes(executor, range(8), 1)


def test_a_cancelled_task_is_submitted_again():
    class Cancels(Fragile):
        def submit(self, fn, /, *args, **kwargs):
            if self.calls:
                return super().submit(fn, *args, **kwargs)
            self.calls.append(args[0])
            future = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    executor = Cancels(lambda items: None)
    assert outcomes(executor, range(3), 1) == {0: 0, 1: 2, 2: 4}


def test_an_executor_of_ones_own_is_used_and_left_open():
    with ThreadPoolExecutor(2) as pool:
        assert sweep(many(4), executor=pool, chunk=1) == sweep(many(4))
        assert pool.submit(max, 1, 2).result() == 2


def test_rows_come_in_the_order_of_points_whatever_ends_first():
    first = threading.Event()

    def late(point):
        if point.training.global_batch == 4:
            assert first.wait(30)
        elif point.training.global_batch == 16:
            first.set()
        return evaluate_point(point)

    table = sweep(many(4), executor="threads", threads=2, chunk=1, evaluate=late)
    assert table.rows == sweep(many(4)).rows


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("dask://127.0.0.1:1", "distributed", "dask"),
        ("ray", "ray", "ray"),
        ("mpi", "mpi4py.futures", "mpi"),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch, name, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'phaze-fast\[{extra}\]'") as caught:
        sweep(many(1), executor=name)
    assert f"executor: {name!r}" in str(caught.value)


def test_a_function_that_cannot_travel_is_refused():
    with pytest.raises(InvalidInputError, match="expected a function at the top of a module"):
        sweep(many(1), executor="processes", evaluate=lambda point: evaluate_point(point))


# ---- processes ------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_kill
def test_a_pool_of_ones_own_that_breaks_keeps_what_is_on_disk(tmp_path):
    once = functools.partial(dies, str(tmp_path / "died"), 32)
    out = tmp_path / "out"
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with pool, pytest.raises(PhazeError, match="the executor that was given is broken"):
        sweep(many(8), out, executor=pool, chunk=1, evaluate=once)
    table = sweep(many(8), out, evaluate=once)
    assert table.resumed > 0
    assert table.rows == sweep(many(8)).rows


# ---- clusters -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dask_cluster():
    distributed = pytest.importorskip("distributed")
    dask = pytest.importorskip("dask")
    # Dask would run a task of a dead worker again itself; here that is for the sweep to do.
    with dask.config.set({"distributed.scheduler.allowed-failures": 0}), distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0",
        host="127.0.0.1", silence_logs=50,
    ) as cluster:  # fmt: skip
        yield cluster.scheduler_address.replace("tcp://", "dask://")
    with warnings.catch_warnings():  # on a busy machine Dask kills its workers without waiting
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def ray_cluster():
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield "ray"
    assert ray.is_initialized()  # a sweep leaves a cluster that it found
    ray.shutdown()


@pytest.mark.extras
@pytest.mark.slow
@needs_kill
@pytest.mark.parametrize("name", ["processes", "dask_cluster", "ray_cluster"])
def test_a_worker_killed_in_mid_sweep_changes_no_row(name, tmp_path, request):
    executor = name if name == "processes" else request.getfixturevalue(name)
    once = functools.partial(dies, str(tmp_path / "died"), 20)
    options = {"executor": executor, "threads": 2, "chunk": 2, "evaluate": once}
    table = sweep(many(16), tmp_path / "out", **options)
    assert (tmp_path / "died").exists()
    assert table.rows == sweep(many(16)).rows
    assert sweep(many(16), tmp_path / "out", evaluate=once).resumed == 16


@pytest.mark.extras
@pytest.mark.slow
@needs_kill
@pytest.mark.parametrize(
    ("name", "error"),
    # Dask also blames tasks that only waited on the worker that died, so it has no such promise.
    [("processes", "BrokenProcessPool"), ("ray_cluster", "WorkerCrashedError")],
)
def test_a_point_that_always_kills_costs_no_other_its_row(name, error, request):
    executor = name if name == "processes" else request.getfixturevalue(name)
    always = functools.partial(dies, None, 20)
    rows = sweep(many(8), executor=executor, threads=2, chunk=2, evaluate=always).rows
    expected = sweep(many(8)).rows
    assert rows[4]["status"] == "error"
    assert f"its worker was lost again and again ({error}" in rows[4]["reason"]
    assert rows[:4] + rows[5:] == expected[:4] + expected[5:]


@pytest.mark.extras
@pytest.mark.slow
def test_a_dask_scheduler_that_is_not_there_is_said():
    pytest.importorskip("distributed")
    with pytest.raises(InvalidInputError, match="expected the address of a Dask scheduler"):
        sweep(many(1), executor="dask://127.0.0.1:1")


LEFT_ALONE = """
import os, signal, sys, threading, time
from phaze_fast.runs.executors import executor_for
if __name__ == "__main__":
    with executor_for("processes", 1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@needs_kill
def test_workers_end_with_the_process_that_made_them(tmp_path):
    file = tmp_path / "left_alone.py"
    file.write_text(LEFT_ALONE)
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=60
    )  # ends only when the worker has let go of the streams
    assert done.returncode == -signal.SIGKILL
    worker = int(done.stdout)
    for _ in range(50):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("the worker is still there")
