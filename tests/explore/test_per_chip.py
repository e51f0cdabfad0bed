"""The best plan of every chip: capacities, threads, other processes, rows of a batch, refusals."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from search_cases import few_groups

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.explore import per_chip, problems_of
from phaze_fast.explore.bounds import layer_graphs
from phaze_fast.explore.per_chip import _all_best_plans
from phaze_fast.planning.times import MAX_NODES, LayerCosts

MODEL = pf.models.load("gpt2-small").replace(layers=3)
CLUSTER = pf.Cluster(devices=4, fabric="tpuv4-pod")
STEP = pf.Training(global_batch=16, seq=256, micro_batch=(1, 4), tp=(1, 2), schedule="1f1b")


def best_of(groups, threads=1, step=STEP):
    """Seconds, joules and layouts by group and capacity."""
    (problem,) = problems_of([MODEL], groups, CLUSTER, step)
    ((variant, at, found),) = _all_best_plans(problem, groups, threads)
    assert (variant, at.tolist()) == (0, list(range(len(groups))))
    return [
        values.reshape(groups.chip.shape)
        for values in (found.placed["time_s"], found.joules, found.placed["layout"])
    ]


def test_each_capacity_has_the_plan_that_it_would_have_alone():
    """Candidates are pruned by the capacity for which the longest step is still of interest."""
    sizes = (2, 16)  # only slower plans fit, and the fastest
    together = best_of(few_groups(6, sizes))
    for c, size in enumerate(sizes):
        for both, alone in zip(together, best_of(few_groups(6, (size,)))[:2], strict=False):
            assert alone[:, 0].tolist() == both[:, c].tolist()
    assert (together[0][:, 0] > together[0][:, 1]).all()
    assert np.isfinite(together[0]).all()


def test_a_capacity_that_a_group_lacks_has_no_plan():
    groups = few_groups(4, (2, 16))
    groups.chip[1, 0] = -1
    time_s, joules, layout = best_of(groups)
    assert (time_s[1, 0], joules[1, 0], layout[1, 0]) == (np.inf, 0.0, -1)
    assert np.isfinite(np.delete(time_s.ravel(), 2)).all()


@pytest.mark.parametrize("schedule", ["1f1b", ("1f1b", "interleaved", "zb-h1")])
def test_threads_and_the_order_of_chips_change_no_bit(schedule):
    space = pf.ArchitectureSpace.published()[20_000:60_000:1111]
    step = STEP.replace(schedule=schedule, zero=(0, 1))
    one = pf.evaluate_batch(MODEL, space, CLUSTER, step, threads=1)
    assert one.feasible.all()
    assert len(np.unique(one.time_s)) > 20
    for threads in (2, 3, 16):
        many = pf.evaluate_batch(MODEL, space, CLUSTER, step, threads=threads)
        for name, values in one.to_dict().items():
            assert values.tolist() == getattr(many, name).tolist(), (threads, name)
    turned = pf.evaluate_batch(MODEL, space.chips[::-1].copy(), CLUSTER, step, threads=2)
    assert turned.time_s[::-1].tolist() == one.time_s.tolist()
    assert turned.recompute[::-1].tolist() == one.recompute.tolist()


@pytest.mark.parametrize(
    ("pooled", "optimizer"), [(False, "adam"), (True, "adam"), (False, "muon")]
)
def test_rows_of_a_batch_are_those_of_plan(monkeypatch, pooled, optimizer):
    chips = pf.ArchitectureSpace.published()[40_000:40_009:3]
    pieces, step = [], STEP.replace(optimizer=optimizer)
    best_plans = per_chip._best_plans

    def noted(problem, variant, groups, threads=1):
        pieces.append(len(groups))
        return best_plans(problem, variant, groups, threads)

    monkeypatch.setattr(per_chip, "_best_plans", noted)
    monkeypatch.setattr(per_chip, "_CHIPS_OF_A_TASK", 2)
    with ThreadPoolExecutor(1) as pool:
        rows = pf.evaluate_batch(
            MODEL, chips, CLUSTER, step, threads=1, executor=pool if pooled else None
        )
    assert pieces == ([2, 1] if pooled else [3])
    for row, chip in enumerate(chips):
        best = pf.plan(MODEL, CLUSTER.replace(chip=chip), step, top=1).best
        found = {name: values[row].item() for name, values in rows.to_dict().items()}
        area_mm2 = found.pop("area_mm2")
        assert area_mm2 == pytest.approx(float(chips.area_mm2[row]), rel=1e-12)
        assert found.pop("feasible")
        assert found.pop("energy_j") == pytest.approx(best.energy_j, rel=1e-9)
        assert found == {name: getattr(best, name) for name in found}


def test_equal_chips_have_equal_rows():
    chips = pf.ArchitectureSpace.published()[40_000:40_003].chips
    once = pf.evaluate_batch(MODEL, chips, CLUSTER, STEP)
    again = pf.evaluate_batch(MODEL, chips[[2, 0, 0, 1, 2]], CLUSTER, STEP)
    assert again.time_s.tolist() == once.time_s[[2, 0, 0, 1, 2]].tolist()


# ---- what the kernel refuses ----


def arrays_of(groups):
    """The arguments of ``_core.LayersOnChips`` for a strategy, and the search problem."""
    (problem,) = problems_of([MODEL], groups, CLUSTER, STEP)
    chips, sizes = problem.price(0, groups.records), problem.evaluators[0].sizes[0]
    zeros = np.zeros((2, len(groups), len(sizes.graph.layers)))
    return layer_graphs(sizes), LayerCosts.of(chips.costs, chips.hbm_bytes_per_s, *zeros), problem


@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("op_ptr", lambda x: x[:-1]),
        ("op_ptr", lambda x: x[::-1].copy()),
        ("most_at_once", lambda x: x[1:]),
        ("edge_to", lambda x: x + 1000),
        ("edge_from", lambda x: x[::-1].copy()),
        ("again", lambda x: x[:-1]),
        ("late", lambda x: x[:-1]),
        ("host_s", lambda x: x[:-1]),
        ("wait_s", lambda x: np.append(x, 0.0)),
        ("variants", lambda x: x + 1),
        ("kinds", lambda x: x - 1),
        ("table", lambda x: x + 9),
        ("column", lambda x: x - 1),
        ("network_s", lambda x: x[1:]),
        ("cores", lambda x: x[1:]),
        ("static_w", lambda x: x[1:]),
        ("step_s", lambda x: x[1:]),
    ],
)
def test_arrays_that_do_not_agree_are_refused(field, spoil):
    graphs, costs, _ = arrays_of(few_groups(2, (16,)))
    assert len(pf._core.LayersOnChips(graphs, costs)) == 2
    if field in graphs._fields:
        graphs = graphs._replace(**{field: spoil(getattr(graphs, field))})
    else:
        costs = costs._replace(**{field: spoil(getattr(costs, field))})
    with pytest.raises(InvalidInputError, match="layers: "):
        pf._core.LayersOnChips(graphs, costs)


def test_a_table_that_is_not_contiguous_is_refused():
    graphs, costs, _ = arrays_of(few_groups(3, (16,)))
    turned = np.asfortranarray(costs.tables[0].time_s)
    assert turned.shape[0] > 1 < turned.shape[1]
    tables = (costs.tables[0]._replace(time_s=turned), *costs.tables[1:])
    with pytest.raises(InvalidInputError, match="time_s: expected a contiguous matrix"):
        pf._core.LayersOnChips(graphs, costs._replace(tables=tables))


def test_a_batch_of_other_layers_or_limits_is_refused():
    graphs, costs, problem = arrays_of(few_groups(2, (16,)))
    layers, space = pf._core.LayersOnChips(graphs, costs), problem.evaluators[0].space
    limits, below_s, count = np.zeros(2, dtype=np.int64), np.full(2, np.inf), len(problem)
    space.best_on_chips([layers] * count, limits, below_s, True, MAX_NODES, 1)
    with pytest.raises(InvalidInputError, match="layers: "):
        space.best_on_chips([layers] * (count - 1), limits, below_s, True, MAX_NODES, 1)
    with pytest.raises(InvalidInputError, match="layers: "):
        space.best_on_chips([layers] * count, limits + 1, below_s, True, MAX_NODES, 1)
    with pytest.raises(InvalidInputError, match="below_s"):
        space.best_on_chips([layers] * count, limits, below_s[:1], True, MAX_NODES, 1)
    with pytest.raises(InvalidInputError, match="chips"):
        layers.map(np.array([2]), 1)
