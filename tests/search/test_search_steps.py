"""Parts of the search's bounds, and the joules of a step, against plain loops and by hand."""

import itertools

import numpy as np
import pytest
from phaze_fast.explore.energy import step_energy_j
from phaze_fast.explore.steps import _COLUMNS, _columns_of, _Part, _with_ends
from phaze_fast.explore.timing import Totals

import phaze_fast as pf
from phaze_fast.hardware import energy_table
from phaze_fast.memory import optimizer
from phaze_fast.opgraph import layer_graph
from phaze_fast.placement.layouts import Layout
from phaze_fast.placement.sizes import Groups, LayerSizes


def shares(blocks, stages):
    """Every way to deal blocks to stages, none of them negative."""
    return (
        counts
        for counts in itertools.product(range(blocks + 1), repeat=stages)
        if sum(counts) == blocks
    )


def totals(first_s, last_s):
    zero = np.zeros(1)
    ones = np.ones(1)
    return Totals(zero, zero, ones, zero, ones * first_s, ones * last_s, zero)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_longest_stage_with_ends_is_at_most_that_of_every_deal(stages):
    rng = np.random.default_rng(stages)
    exact = 0
    for _ in range(60):
        blocks = int(rng.integers(stages, 8))
        first, last = rng.choice([0.0, 0.3, 0.7, 1.0, 1.6, 2.5], 2)
        true = min(max([n[0] + first, *n[1:-1], n[-1] + last]) for n in shares(blocks, stages))
        whole = np.array([np.ceil(blocks / stages)])
        bound = _with_ends(totals(first, last), whole, blocks - stages * whole, np.zeros(1))
        assert bound[0, 0] <= true + 1e-9
        exact += bool(bound[0, 0] >= true - 1e-6)
    assert exact >= 30  # and often no less: a bound of nothing would hold as well


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_longest_stage_within_memory_is_that_of_every_deal(stages):
    rng = np.random.default_rng(stages)
    for _ in range(40):
        blocks, r = int(rng.integers(stages, 8)), float(rng.choice([0.25, 0.5, 1.0]))
        plain = np.sort(rng.integers(0, 5, stages))[::-1].astype(float)  # the last has most room
        lean = plain + rng.integers(0, 6)
        if lean.sum() < blocks:
            continue

        def load(n, k, plain=plain, lean=lean, r=r):
            if n <= plain[k]:
                return float(n)
            return n * (1.0 + r) if n <= lean[k] else np.inf

        true = min(max(load(n, k) for k, n in enumerate(d)) for d in shares(blocks, stages))
        part = _Part((), np.array([stages]), plain, lean, blocks, even=False)
        assert part.longest(r)[0] == pytest.approx(true, rel=1e-6)


def test_joules_of_a_step_by_hand():
    """Two replicas of two stages of gpt2-small, ZeRO 1, eight micro-batches each."""
    cluster = pf.Cluster(devices=4, fabric="dgx-h100")
    graph = layer_graph(pf.models.load("gpt2-small"), pf.Strategy(microbatch=1))
    sizes = LayerSizes(graph, cluster, ("none", "full"), optimizer("adam"))
    layout = Layout(Groups(2, 2, "replicas-inside"), 1, 8, "1f1b", (2, 2))
    count, kinds = len(sizes.order), len(graph.layers)
    stage_of = tuple(int(k >= count // 2) for k in range(count))
    forward, backward = np.full(kinds, 3.0), np.array([[5.0] * kinds, [8.0] * kinds])
    found = step_energy_j(sizes, layout, (stage_of, (1, 0)), (forward, backward), 10.0, 2.0)
    first = stage_of.count(0)
    passes = 2 * 8 * (first * (3.0 + 8.0) + (count - first) * (3.0 + 5.0))
    prices, parameters = energy_table(), float(sizes.parameters.sum())
    held = parameters + sizes.copied_parameters
    step_bytes = held / 2 * (2 * 12 + 4 + 2)
    sent = 2 * 8 * 2 * (1024 * 768 * 2) + 2 * parameters * (4 + 2) / 2
    by_hand = passes + 2 * step_bytes * prices.hbm_byte_j + sent * prices.network_byte_j
    assert found == pytest.approx(by_hand + 10.0 * 2.0 * 4, rel=1e-12)


def test_places_that_stay_empty_are_counted_down():
    cluster = pf.Cluster(devices=8, fabric="dgx-h100")
    graph = layer_graph(pf.models.load("gpt2-small"), pf.Strategy(microbatch=1))
    sizes = LayerSizes(graph, cluster, ("none",), optimizer("adam"))
    layout = Layout(Groups(1, 8, "replicas-inside"), 0, 8, "1f1b", (2, 8))
    columns = _columns_of(sizes, 0, layout, np.arange(2, 9))
    whole, filled = columns[2 + _COLUMNS.index("whole")], columns[2 + _COLUMNS.index("filled")]
    assert whole.tolist() == [6, 4, 3, 3, 2, 2, 2]  # of 12 blocks on 2 to 8 stages
    assert filled.tolist() == [0, 0, 0, -3, 0, -2, -4]
