"""Times of the pipeline objective against a simulation of the schedules, event by event."""

import random
from statistics import mean

import pytest
from reference.pipeline_simulation import (
    built_up_1f1b,
    built_up_zero_bubble,
    simulate_1f1b,
    simulate_interleaved,
    simulate_zero_bubble,
)

from phaze_fast.placement import LayerTable, PipelineProblem, place


def placed(forward, backward, microbatches, weight_grad=None, edge_s=None):
    """Time the objective gives to a pipeline whose stages are one layer each."""
    p = len(forward)
    table = LayerTable(
        names=range(p),
        forward_s=forward,
        backward_s=backward,
        weight_grad_s=weight_grad,
        edge_s=edge_s,
    )
    schedule = "1f1b" if weight_grad is None else "zero-bubble"
    found = place(PipelineProblem(table, 1.0, microbatches, stages=(p, p), schedule=schedule))
    assert len(found.stages) == p
    return found.time_s


def interleaved_time(forward, backward, microbatches):
    """Time of the interleaved schedule as docs/placement.md has it."""
    v = len(forward[0])
    loads = [sum(f) + sum(b) for f, b in zip(forward, backward, strict=True)]
    return (microbatches - 1 / v) * max(loads) + sum(loads) / v


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("forward", "backward"), [(10, 20), (10, 10), (7, 31), (0, 5)])
def test_1f1b_of_equal_stages_is_exact(p, forward, backward):
    for m in (1, 2, p - 1, p, p + 1, 3 * p, 8 * p):
        if m > 0:
            simulated = simulate_1f1b([forward] * p, [backward] * p, m)
            assert placed([forward] * p, [backward] * p, m) == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_interleaved_of_equal_stages_is_exact(p, v):
    for groups in (1, 2, 5):
        forward, backward = [[10] * v] * p, [[23] * v] * p
        simulated = simulate_interleaved(forward, backward, groups * p)
        formula = interleaved_time(forward, backward, groups * p)
        assert formula == pytest.approx(simulated, rel=1e-9)


def zero_bubble_is_exact(p, parts, counts, patient):
    forward, input_grad, weight_grad = ([part] * p for part in parts)
    backward = [parts[1] + parts[2]] * p
    for m in counts:
        simulated = simulate_zero_bubble(forward, input_grad, weight_grad, m, patient)
        formula = placed(forward, backward, m, weight_grad)
        assert formula == pytest.approx(simulated, rel=1e-9), (m, formula, simulated)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("parts", [(10, 10, 10), (10, 11, 9), (10, 15, 5), (12, 10, 8)])
def test_zero_bubble_of_equal_stages_is_exact_when_weight_gradients_do_not_delay(p, parts):
    zero_bubble_is_exact(p, parts, (p, p + 1, 3 * p, 8 * p), patient=True)


@pytest.mark.parametrize("p", [2, 3, 5, 8])
def test_zero_bubble_of_equal_parts_is_exact_when_greedy(p):
    zero_bubble_is_exact(p, (10, 10, 10), (p, p + 1, 3 * p, 8 * p), patient=False)


@pytest.mark.xfail(
    strict=False,
    reason="greedy weight gradients of 0.9 delay what comes a little later: the formula is 6.6% "
    "low with 3 stages and micro-batches, 6.9% with 8; exact when stages are patient",
)
@pytest.mark.parametrize("p", [3, 5, 8])
def test_zero_bubble_of_unequal_parts_is_exact_when_greedy(p):
    zero_bubble_is_exact(p, (10, 11, 9), (p, 2 * p), patient=False)


@pytest.mark.xfail(
    strict=False,
    reason="low by (p - 1) x (W - min(F, B)) where W is above F or B, 22.6% for 10, 5, 15 with "
    "8 stages and micro-batches; exact is m L + (p - 1) max(F, B, F + B - W)",
)
@pytest.mark.parametrize("parts", [(10, 9, 11), (10, 5, 15), (8, 12, 10), (6, 12, 12)])
@pytest.mark.parametrize("patient", [False, True])
def test_zero_bubble_of_equal_stages_with_long_weight_gradients_is_exact(parts, patient):
    zero_bubble_is_exact(8, parts, (8, 16, 64), patient)


@pytest.mark.xfail(
    strict=False,
    reason="low by (p - m) W with fewer micro-batches than stages, 41% with one through 8 stages",
)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_zero_bubble_of_equal_stages_with_few_microbatches_is_exact(p):
    zero_bubble_is_exact(p, (10, 10, 10), range(1, p), patient=True)


# ---- stages that differ ----


def uneven(rng, count, base):
    return [round(base * rng.uniform(0.75, 1.25)) for _ in range(count)]


def random_step(rng):
    """Forward seconds of stages within 25% of one size, edges, and micro-batches."""
    p = rng.randint(2, 8)
    forward = uneven(rng, p, 1000)
    edge_s = [0] * (p - 1) if rng.random() < 0.5 else [rng.randint(0, 40) for _ in range(p - 1)]
    return forward, edge_s, rng.randint(p, 8 * p)


def received(forward, backward, edge_s):
    """Durations with what is received: c_in with the forward pass, c_out with the backward."""
    with_in = [f + c for f, c in zip(forward, [0, *edge_s], strict=True)]
    return with_in, [b + c for b, c in zip(backward, [*edge_s, 0], strict=True)]


def compare_1f1b(rng):
    forward, edge_s, m = random_step(rng)
    backward = [2 * f for f in forward] if rng.random() < 0.5 else uneven(rng, len(forward), 2000)
    simulated = simulate_1f1b(*received(forward, backward, edge_s), m)
    return placed(forward, backward, m, edge_s=edge_s), simulated


def compare_zero_bubble(rng, patient=False):
    forward, edge_s, m = random_step(rng)
    p = len(forward)
    alike = rng.random() < 0.5
    input_grad, weight_grad = (forward if alike else uneven(rng, p, 1000) for _ in range(2))
    backward = [b + w for b, w in zip(input_grad, weight_grad, strict=True)]
    simulated = simulate_zero_bubble(
        *received(forward, input_grad, edge_s), weight_grad, m, patient
    )
    return placed(forward, backward, m, weight_grad, edge_s), simulated


def compare_patient_zero_bubble(rng):
    return compare_zero_bubble(rng, patient=True)


def compare_interleaved(rng):
    p, v, groups = rng.randint(2, 8), rng.randint(2, 4), rng.randint(1, 8)
    if rng.random() < 0.5:
        forward = [[f] * v for f in uneven(rng, p, 1000)]
        backward = [[2 * f for f in row] for row in forward]
    else:
        forward = [uneven(rng, v, 1000) for _ in range(p)]
        backward = [uneven(rng, v, 2000) for _ in range(p)]
    simulated = simulate_interleaved(forward, backward, groups * p)
    return interleaved_time(forward, backward, groups * p), simulated


def deviations(compare, count=150):
    rng = random.Random(31)
    pairs = [compare(rng) for _ in range(count)]
    return [(formula - simulated) / simulated for formula, simulated in pairs]


def misses(numbers):
    return pytest.mark.xfail(strict=False, reason=f"of 150 plans: {numbers}")


@pytest.mark.parametrize(
    "compare",
    [
        pytest.param(compare_1f1b, marks=misses("mean 1.33%, worst 8.2%, always high")),
        pytest.param(compare_zero_bubble, marks=misses("mean 0.90%, worst 10.1%, mostly low")),
        pytest.param(
            compare_patient_zero_bubble, marks=misses("mean 1.81%, worst 10.5%, mostly low")
        ),
        pytest.param(compare_interleaved, marks=misses("mean 1.73%, worst 10.7%, high or low")),
    ],
)
def test_times_of_uneven_stages_are_those_of_the_simulation(compare):
    off = [abs(deviation) for deviation in deviations(compare)]
    assert mean(off) <= 0.01, (mean(off), max(off))
    assert max(off) <= 0.05, (mean(off), max(off))


def test_1f1b_is_never_below_the_simulation():
    assert min(deviations(compare_1f1b)) >= -1e-9


def test_waiting_on_both_sides_of_the_slowest_stage_gives_the_time_of_1f1b():
    rng = random.Random(32)
    off = []
    for _ in range(150):
        forward, edge_s, m = random_step(rng)
        m = rng.choice((m, rng.randint(1, len(forward))))
        passes = received(forward, uneven(rng, len(forward), 2000), edge_s)
        simulated = simulate_1f1b(*passes, m)
        off.append((simulated - built_up_1f1b(*passes, m)) / simulated)
    assert min(off) >= 0
    assert mean(off) <= 0.001
    assert max(off) <= 0.01


def test_zero_bubble_built_up_from_the_last_stage_is_seldom_above_the_simulation():
    rng = random.Random(33)
    off = []
    for _ in range(150):
        p = rng.randint(2, 8)
        m = rng.randint(p, 8 * p)
        parts = [uneven(rng, p, 1000) for _ in range(3)]
        simulated = min(simulate_zero_bubble(*parts, m, patient) for patient in (False, True))
        off.append((simulated - built_up_zero_bubble(*parts, m)) / simulated)
    assert min(off) >= -0.002
    assert mean(off) <= 0.01


LONG = [(10, 5, 15), (6, 12, 12), (5, 10, 12)]


@pytest.mark.parametrize("parts", [(10, 10, 10), (10, 11, 9), *LONG])
def test_zero_bubble_of_equal_stages_built_up_is_exact(parts):
    f, b, w = parts
    for p in (1, 2, 3, 5, 8):
        for m in (p, p + 1, 4 * p):
            stages = [[part] * p for part in parts]
            time = m * (f + b + w) + (p - 1) * max(f, b, f + b - w)
            assert built_up_zero_bubble(*stages, m) == time
            assert min(simulate_zero_bubble(*stages, m, way) for way in (False, True)) == time
