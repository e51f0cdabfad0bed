"""64 threads, and processes made in both ways, get the bits that one thread gets."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from robustness.thread_cases import CALLS, answers

THREADS = 64


def test_64_threads_call_every_batch_function_at_once():
    expected = answers()
    together = threading.Barrier(THREADS, timeout=60)

    def one(number):
        together.wait()
        at = number % len(CALLS)
        return at, CALLS[at]()

    with ThreadPoolExecutor(THREADS) as pool:
        for at, found in pool.map(one, range(THREADS), timeout=120):
            assert found == expected[at], CALLS[at].__name__


def answer_to(queue):
    queue.put(answers())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_processes_made_in_either_way(way):
    """A child that is forked after its parent worked on threads, and one that starts afresh."""
    expected = answers()
    context = multiprocessing.get_context(way)
    queue = context.Queue()
    child = context.Process(target=answer_to, args=(queue,))
    child.start()
    found = queue.get(timeout=120)
    child.join(timeout=60)
    assert child.exitcode == 0
    assert found == expected
