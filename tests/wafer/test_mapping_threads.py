"""Mappings and relaxations serve one thread at a time, and say so to a second one."""

import random
import threading
import time

import pytest
from mapping_cases import compiled, packed, random_case, random_op_mappings, small

from phaze_fast.errors import InUseError, PhazeError
from phaze_fast.wafer.mapping.layout import slots_of

IN_USE = "is in use by another thread; give each thread its own"
STEPS = 3_000_000  # of an annealing: a second or more
PATIENCE_S = 60.0


def until(happened):
    """Wait for what another thread brings about."""
    begun = time.monotonic()
    while not happened():
        assert time.monotonic() - begun < PATIENCE_S
        time.sleep(0.0005)


def refused(call):
    try:
        call()
    except InUseError:
        return True
    return False


def test_a_mapping_that_anneals_refuses_a_second_thread():
    rng = random.Random(8)
    case = random_case(rng, most=(1, 6, 1))
    op_mappings = random_op_mappings(rng, case)
    mapping, twin = compiled(case, op_mappings), compiled(case, op_mappings)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(mapping.anneal(3, STEPS, 0.1)))
    thread.start()
    until(lambda: refused(mapping.score) or answers)
    calls = {
        "assign": lambda: mapping.assign(packed(op_mappings)),
        "change": lambda: mapping.change(0, packed(op_mappings[:1])),
        "op_mappings": mapping.op_mappings,
        "score": mapping.score,
        "stages": mapping.stages,
        "anneal": lambda: mapping.anneal(4, 1, 0.1),
        "descend": lambda: mapping.descend(1),
    }
    for name, call in calls.items():
        with pytest.raises(InUseError, match=f"Mapping {IN_USE}") as caught:
            call()
        assert isinstance(caught.value, RuntimeError), name
        assert isinstance(caught.value, PhazeError), name
    # What never changes can be read all the while.
    assert mapping.choices(0).tobytes() == twin.choices(0).tobytes()
    assert mapping.legal(0, packed(op_mappings[:1]))
    assert mapping.mapping_count() == twin.mapping_count()
    bound = mapping.relaxation().bound(0.5, 0.0)
    assert thread.is_alive()
    thread.join()
    found, expected = answers[0], twin.anneal(3, STEPS, 0.1)
    assert [a.tobytes() for a in found[:2]] == [a.tobytes() for a in expected[:2]]
    assert mapping.score().tobytes() == twin.score().tobytes()  # free again
    assert bound[0] == twin.relaxation().bound(0.5, 0.0)[0]


def test_a_relaxation_refuses_a_second_thread():
    case = small(slots=tuple(tuple(run) for run in slots_of(16, 16)))
    for op in case.ops:
        op.limit = (2**20,) * 4
    mapping = compiled(case)
    alone = mapping.relaxation()
    shared = mapping.relaxation()
    thetas = [k / 64 for k in range(1, 64)]
    expected = {theta: alone.bound(theta, 1e-3, 0.25)[0] for theta in thetas}
    messages, wrong = [], []

    def ask():
        begun = time.monotonic()
        while not messages and time.monotonic() - begun < PATIENCE_S:
            for theta in thetas:
                try:
                    found = shared.bound(theta, 1e-3, 0.25)[0]
                except InUseError as error:
                    messages.append(str(error))
                    break
                if found != pytest.approx(expected[theta], rel=1e-9):
                    wrong.append((theta, found))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert messages
    assert messages[0] == f"Relaxation {IN_USE}"
    assert wrong == []
    assert shared.bound(0.5, 1e-3, 0.25)[0] == pytest.approx(expected[0.5], rel=1e-9)
