"""Every pipeline schedule against an event simulation written from docs/pipelines.md, and its laws."""

import math
import random

import numpy as np
import pytest
from golden_files import refused_calls
from reference.pipeline_events import SCHEDULES, longest_device, makespan, orders, peaks, simulate

from phaze_fast import _core, memory
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.planning import pipelines

TWO_CHUNKS = ("zb-v", "dualpipe", "dualpipe-v")


def chunks_of(schedule, v=2):
    return 2 if schedule in TWO_CHUNKS else v if schedule == "interleaved" else 1


def random_sizes(rng, schedule, stages=8, rounds=40):
    """Stages, chunks and micro-batches that the schedule accepts."""
    p = rng.randint(1, stages)
    if schedule == "dualpipe":
        p = 2 * rng.randint(1, stages // 2)
        return p, 2, 2 * p + 2 * rng.randint(0, rounds // 2)
    if schedule == "dualpipe-v":
        return p, 2, 2 * p + rng.randint(0, rounds)
    return p, chunks_of(schedule, rng.randint(1, 5)), rng.randint(1, rounds)


def random_loads(rng, p, v, spread=10.0):
    """Forward, backward and weight-gradient seconds; some of the passes take no time at all."""

    def one():
        return 0.0 if rng.random() < 0.03 else spread ** rng.random()

    forward = [[one() for _ in range(v)] for _ in range(p)]
    weight_grad = [[one() for _ in range(v)] for _ in range(p)]
    backward = [[w + one() for w in row] for row in weight_grad]
    return forward, backward, weight_grad


def played(schedule, loads, m, overlap=1.0):
    forward, backward, weight_grad = loads
    return pipelines.play(
        schedule, forward, backward, m, weight_grad_s=weight_grad, overlap=overlap
    )


def played_in_full(schedule, loads, m, overlap=1.0):
    p, v = np.shape(loads[0])
    arrays = [np.array(x, dtype=float).ravel() for x in loads]
    code = pipelines.schedule_code(schedule)
    return _core.pipeline_step(code, p, v, m, *arrays, overlap, True)[0]


# ---- the simulation ----


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_and_peaks_are_those_of_the_simulation(schedule):
    rng = random.Random(f"steps {schedule}")
    for _ in range(120):
        p, v, m = random_sizes(rng, schedule)
        loads = random_loads(rng, p, v)
        overlap = rng.choice((1.0, rng.uniform(0.5, 1.2)))
        timeline = simulate(schedule, *loads, m, overlap)
        step = played(schedule, loads, m, overlap)
        case = (schedule, p, v, m, loads, overlap)
        assert step.step_s == pytest.approx(makespan(timeline), rel=1e-12), case
        assert step.longest_device_s == pytest.approx(longest_device(timeline), rel=1e-12), case
        assert step.bound_s <= step.step_s * (1 + 1e-12), case
        for d in range(p):
            own = [(start, end) for device, _, start, end in timeline if device == d]
            assert step.start_s[d] == pytest.approx(min(own)[0], rel=1e-12)
            assert step.end_s[d] == pytest.approx(max(end for _, end in own), rel=1e-12)
            assert step.busy_s[d] == pytest.approx(sum(b - a for a, b in own), rel=1e-9)
        assert pipelines.in_flight(schedule, p, m, v).tolist() == peaks(timeline, [[1] * v] * p)
        sizes = [[rng.random() for _ in range(v)] for _ in range(p)]
        kept = rng.choice((0.0, 1.0, rng.random()))
        found = pipelines.peak_activations(schedule, sizes, m, kept_for_weight_grad=kept)
        assert found.tolist() == pytest.approx(peaks(timeline, sizes, kept), rel=1e-12), case


@pytest.mark.parametrize("v", [1, 2, 3, 4, 5])
def test_interleaved_runs_with_any_number_of_micro_batches(v):
    for p in range(1, 9):
        for m in range(1, 25):
            loads = [[[x] * v] * p for x in (1.0, 2.0, 1.0)]
            step = played("interleaved", loads, m)  # would not return if passes waited in a circle
            rounded_up = played("interleaved", loads, -(-m // p) * p)
            assert m * v * 3 <= step.step_s <= rounded_up.step_s
            for order in orders("interleaved", p, v, m):
                assert len(order) == len(set(order)) == 2 * m * v


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_pass_is_in_an_order_once(schedule):
    rng = random.Random(4)
    for _ in range(20):
        p, v, m = random_sizes(rng, schedule)
        each_way = m // 2 if schedule == "dualpipe" else m
        for order in orders(schedule, p, v, m):
            parts = [part for parts in order for part in parts]
            forwards = {(c, k) for kind, c, k in parts if kind == "F"}
            assert forwards == {(c, k) for c in range(v) for k in range(each_way)}
            assert forwards == {(c, k) for kind, c, k in parts if kind in "BI"}
            assert forwards == {(c, k) for kind, c, k in parts if kind in "BW"}
            assert len(parts) == len(set(parts))


# ---- what is skipped ----


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("spread", [1.0, 1.001, 1.25, 10.0])
def test_skipping_rounds_changes_nothing(schedule, spread):
    rng = random.Random(f"{schedule} {spread}")
    for _ in range(25):
        p, v, m = random_sizes(rng, schedule, rounds=1000)
        loads = random_loads(rng, p, v, spread)
        overlap = rng.uniform(0.5, 1.2)
        full = played_in_full(schedule, loads, m, overlap)
        assert played(schedule, loads, m, overlap).step_s == pytest.approx(full, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_million_micro_batches_go_on_at_the_pace_of_a_few(schedule):
    rng = random.Random(schedule)
    v = chunks_of(schedule, 3)
    loads = random_loads(rng, 4, v, 2.0)
    times = [played(schedule, loads, m).step_s for m in (600_000, 800_000, 1_000_000)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-9)
    assert times[2] == pytest.approx(
        times[0] + 2 * (played_in_full(schedule, loads, 2400) - played_in_full(schedule, loads, 2000)) * 500,
        rel=1e-6,
    )  # fmt: skip


def test_near_ties_that_never_settle_are_played_on():
    p, m = 6, 20_000
    forward = [[1.0 + 1e-7 * d] for d in range(p)]
    loads = (forward, forward, [[0.5]] * p)
    for schedule in ("1f1b", "zb-h1", "zb-h2"):
        full = played_in_full(schedule, loads, m)
        assert played(schedule, loads, m).step_s == pytest.approx(full, rel=1e-11)


# ---- equal stages: the published bubbles and activations ----


def equal(schedule, p, m, f, b, w, v=2, overlap=1.0):
    chunks = chunks_of(schedule, v)
    loads = [[[float(x)] * chunks] * p for x in (f, b, w)]
    step = played(schedule, loads, m, overlap)
    return step, float(step.busy_s.max())


PARTS = [(1, 2, 1), (3, 7, 3), (2, 6, 1), (5, 9, 4)]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("f", "b", "w"), PARTS)
def test_published_bubbles_of_one_way_schedules(p, f, b, w):
    for m in (2 * p, 2 * p + 1, 5 * p + 3):
        for schedule in ("gpipe", "1f1b"):
            step, work = equal(schedule, p, m, f, b, w)
            assert step.step_s == m * (f + b) + (p - 1) * (f + b)
            assert step.longest_device_s - work == (p - 1) * (f + b)
        step, work = equal("zb-h1", p, m, f, b, w)
        assert work == m * (f + b)
        assert step.step_s - work == (p - 1) * (f + b - 2 * w)
    for v in (2, 3, 5):
        for m in (p, 2 * p, 5 * p):
            step, work = equal("interleaved", p, m, f, b, w, v)
            assert step.step_s == m * v * (f + b) + (p - 1) * (f + b)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 13])
def test_zero_bubble_schedules_of_equal_parts_leave_no_device_idle(p):
    for m in (2 * p, 2 * p + 1, 7 * p):
        one, work = equal("1f1b", p, m, 1, 2, 1)
        h1, _ = equal("zb-h1", p, m, 1, 2, 1)
        assert 3 * (h1.step_s - work) == one.step_s - work
        for schedule in ("zb-h2", "zb-v"):
            step, work = equal(schedule, p, m, 1, 2, 1)
            assert step.longest_device_s == work
            assert step.step_s == work + (p - 1)


@pytest.mark.parametrize("p", [2, 4, 8, 12])
@pytest.mark.parametrize(("f", "b", "w"), [(1, 2, 1), (5, 9, 4), (4, 7, 3), (3, 7, 3), (2, 6, 1)])
@pytest.mark.parametrize("overlap", [1.0, 0.75])
def test_published_bubble_of_dualpipe(p, f, b, w, overlap):
    published = (p / 2 - 1) * (overlap * (f + b) + b - 3 * w)
    for m in (2 * p, 2 * p + 2, 6 * p):
        for schedule, stages in (("dualpipe", p), ("dualpipe-v", p // 2)):
            step, _ = equal(schedule, stages, m, f, b, w, overlap=overlap)
            idle_s = step.step_s - step.busy_s.min()  # of a device in the middle
            if f == b - w:
                assert idle_s == pytest.approx(published)
            else:
                assert idle_s <= published + 1e-9


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_published_activations(p):
    m = 6 * p + 1
    devices = np.arange(p)
    assert (pipelines.in_flight("gpipe", p, m) == m).all()
    assert (pipelines.in_flight("1f1b", p, m) == p - devices).all()
    assert (pipelines.in_flight("zb-h1", p, m) == p).all()
    assert (pipelines.in_flight("zb-h2", p, m) == 2 * p - 1).all()
    assert (pipelines.in_flight("zb-v", p, m) == 2 * p).all()
    assert (pipelines.in_flight("dualpipe-v", p, m) == 2 * p + 1).all()
    if p % 2 == 0:
        assert (pipelines.in_flight("dualpipe", p, 6 * p) == p + 1).all()
    for v in (2, 4):
        found = pipelines.in_flight("interleaved", p, m, v)
        assert (found == 2 * (p - devices - 1) + (v - 1) * p + 1).all()


# ---- laws ----


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_slower_pass_never_makes_a_step_faster(schedule):
    rng = random.Random(f"law {schedule}")
    for _ in range(60):
        p, v, m = random_sizes(rng, schedule)
        loads = random_loads(rng, p, v)
        before = played(schedule, loads, m, 0.9)
        d, c, more = rng.randrange(p), rng.randrange(v), rng.random()
        which = rng.choice(("forward", "input", "weight"))
        forward, backward, weight_grad = loads
        if which == "forward":
            forward[d][c] += more
        else:
            backward[d][c] += more
            weight_grad[d][c] += more if which == "weight" else 0
        after = played(schedule, loads, m, 0.9)
        assert after.step_s >= before.step_s * (1 - 1e-13)
        assert after.bound_s >= before.bound_s * (1 - 1e-13)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_seconds_scale(schedule):
    rng = random.Random(f"scale {schedule}")
    p, v, m = random_sizes(rng, schedule)
    loads = random_loads(rng, p, v)
    doubled = [[[2 * x for x in row] for row in table] for table in loads]
    assert played(schedule, doubled, m).step_s == 2 * played(schedule, loads, m).step_s


def test_more_micro_batches_take_longer():
    rng = random.Random(8)
    for schedule in SCHEDULES:
        loads = random_loads(rng, 4, chunks_of(schedule), 3.0)
        times = [played(schedule, loads, m).step_s for m in range(8, 60, 2)]
        assert times == sorted(times)


def test_the_bound_is_the_step_where_one_device_has_all_the_work():
    loads = [[[x], [1000 * x], [x]] for x in (1.0, 2.0, 1.0)]
    step = played("1f1b", loads, 20)
    assert step.bound_s == step.step_s


def test_both_ways_of_dualpipe_are_alike():
    rng = random.Random(9)
    p, m = 6, 20
    one_way = [[row[0] for row in table] for table in random_loads(rng, p, 1)]
    loads = [[[row[d], row[p - 1 - d]] for d in range(p)] for row in one_way]
    step = played("dualpipe", loads, m, 0.8)
    assert step.end_s.tolist() == pytest.approx(step.end_s[::-1].tolist(), rel=1e-13)


# ---- names and refusals ----


def test_names():
    assert memory.SCHEDULES == SCHEDULES
    assert pipelines.schedule_code("zero-bubble") == pipelines.schedule_code("zb-h1")
    with pytest.raises(InvalidInputError, match=r"schedule: 'zb-h3' is not accepted.*zb-h"):
        pipelines.schedule_code("zb-h3")
    with pytest.raises(InvalidTypeError, match="schedule"):
        pipelines.schedule_code(3)


@pytest.mark.parametrize(("schedule", "p", "m", "v", "says"), refused_calls("pipeline schedules"))
def test_impossible_combinations_say_why(schedule, p, m, v, says):
    assert says in pipelines.refusal(schedule, p, m, v)
    with pytest.raises(InvalidInputError, match=says):
        pipelines.in_flight(schedule, p, m, v)
    code = pipelines.schedule_code(schedule)
    with pytest.raises(InvalidInputError, match=says):
        _core.pipeline_peak(code, p, v, m, np.ones(max(1, p * v)), 1.0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sizes_that_are_accepted_are_not_refused(schedule):
    rng = random.Random(10)
    for _ in range(20):
        p, v, m = random_sizes(rng, schedule)
        assert pipelines.refusal(schedule, p, m, v) is None


def test_bad_loads_are_refused_by_name():
    ones = [1.0, 1.0]
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(
            InvalidInputError, match="^forward_s: expected finite numbers, zero or more$"
        ):
            pipelines.play("1f1b", [1.0, bad], ones, 4)
    with pytest.raises(InvalidInputError, match=r"backward_s: shape \(3,\) .* expected \(2, 1\)$"):
        pipelines.play("1f1b", ones, [1.0] * 3, 4)
    with pytest.raises(InvalidInputError, match=r"expected \(devices,\) or \(devices, chunks\)$"):
        pipelines.play("1f1b", [[ones]], ones, 4)
    with pytest.raises(InvalidInputError, match="weight_grad_s: None"):
        pipelines.play("zb-h1", ones, ones, 4)
    with pytest.raises(InvalidInputError, match="weight_grad_s"):
        pipelines.play("zb-h1", ones, ones, 4, weight_grad_s=[2.0, 1.0])
    with pytest.raises(InvalidInputError, match="overlap"):
        pipelines.play("1f1b", ones, ones, 4, overlap=-1)
    with pytest.raises(InvalidTypeError, match="micro_batches"):
        pipelines.play("1f1b", ones, ones, 2.5)
    with pytest.raises(InvalidTypeError, match="forward_s"):
        pipelines.play("1f1b", "fast", ones, 4)
    with pytest.raises(InvalidInputError, match="kept_for_weight_grad"):
        pipelines.peak_activations("zb-h1", ones, 4, kept_for_weight_grad=2)
    with pytest.raises(InvalidInputError, match="no weight gradient longer"):
        _core.pipeline_step(3, 1, 1, 1, np.ones(1), np.ones(1), np.full(1, 2.0), 1.0, False)


def test_every_rule_has_its_sentence():
    assert len(_core.PIPELINE_SENTENCES) == len(set(_core.PIPELINE_SENTENCES))
