"""64 threads, and processes made in both ways, get the bits that one thread gets."""

import multiprocessing
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from nest_cases import nest_problem
from placement_cases import chain, random_published
from reference.layers_at_random import random_layer

import phaze_fast as pf
from phaze_fast.cost import collective_batch, estimate_costs, message_batch
from phaze_fast.hardware import presets
from phaze_fast.papers import nest_from_dict, place_batch, solve_nest
from phaze_fast.planning import predict_batch
from phaze_fast.schedule import instance_from_dict, schedule_instances

THREADS = 64
ON = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
CHIPS = [presets.chip(name) for name in ("h100", "h200")]
STEP = pf.Training(global_batch=16, micro_batch=(1, 2), tp=(1, 2), schedule="1f1b")
MODEL = pf.TransformerModel(
    name="m", layers=3, hidden=64, heads=4, ffn=128, vocab=100, seq=64, positions="rotary"
)


def collectives():
    ranks = np.arange(1, 60)
    found = collective_batch(ON, "all-reduce", 1e6 * ranks, np.minimum(ranks, 8), threads=3)
    sent = message_batch(ON, 1e6, [0, 1, 2], [3, 4, 7])
    return found.time_s.tobytes() + sent.time_s.tobytes()


def costs():
    graph = pf.layer_graph(MODEL, pf.Strategy())
    return estimate_costs(graph, ["h100", "h200", "tpuv4"], ON, threads=3).time_s(0).tobytes()


def layers():
    rng = random.Random(3)
    drawn = [instance_from_dict(random_layer(rng, 6)) for _ in range(12)]
    found = schedule_instances(drawn, highs=False)
    return np.array([x for made in found for x in (made.makespan, *made.starts)]).tobytes()


def placements():
    rng = random.Random(4)
    problems = [random_published(rng, chain) for _ in range(6)]
    return repr([(each.time_s, each.stages) for each in place_batch(problems)]).encode()


def nest():
    problems = [nest_from_dict(nest_problem(seed)) for seed in range(8)]
    found = solve_nest(problems, threads=3)
    return repr([{**plan, "solve_s": 0} for plan in found]).encode()


def predictions():
    rows = predict_batch(
        MODEL, ON, pf.Training(global_batch=16), tp=[1, 2, 4], dp=[8, 4, 2],
        zero=[0, 1, 2], threads=3,
    )  # fmt: skip
    return rows.time_s.tobytes() + rows.memory_bytes.tobytes()


def plans():
    return repr([p.time_s for p in pf.plan(MODEL, ON, STEP, top=5, threads=3).plans]).encode()


def chips():
    found = pf.evaluate_batch(MODEL, CHIPS, ON, STEP, threads=3)
    return found.time_s.tobytes()


CALLS = (collectives, costs, layers, placements, nest, predictions, plans, chips)


def answers():
    """Bytes of every call's answer, one after another."""
    return [call() for call in CALLS]


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
