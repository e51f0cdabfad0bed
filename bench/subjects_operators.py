"""Subjects of the cost stage: mapped operators, their bounds, and the sweep over a whole space."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from registry import Subject, register

from phaze_fast import _core, models
from phaze_fast.cost import (
    array_cycles,
    attention_ops,
    cost_cache_clear,
    estimate_costs,
    product_ops,
    vector_ops,
)
from phaze_fast.cost.machines import machines
from phaze_fast.errors import InfeasibleError
from phaze_fast.hardware import ArchitectureSpace, presets
from phaze_fast.opgraph import LayerGraph, Strategy, layer_graph

Array = np.ndarray[Any, Any]

EIGHT = (
    "bertlarge",
    "megatronbert",
    "gpt2",
    "megatrongpt2-54",
    "megatrongpt2-72",
    "opt",
    "llama2",
    "megatrongpt3",
)
CONFIGURATION = ["tensor_cores", "tensor_width", "tensor_depth", "buffer_bytes"]


@cache
def graphs() -> tuple[LayerGraph, ...]:
    """The eight models at 4 widths and 4 micro-batches, where heads can be split that way."""
    found = []
    for name in EIGHT:
        for width in (1, 2, 4, 8):
            for micro_batch in (1, 2, 4, 8):
                strategy = Strategy(tp=width, micro_batch=micro_batch)
                try:
                    found.append(layer_graph(models.load(name), strategy))
                except InfeasibleError:
                    continue  # 25 heads cannot be split
    return tuple(found)


@cache
def products() -> Array:
    """All distinct matrix products of these, forward and backward."""
    shapes = set()
    for graph in graphs():
        for layer in graph.layers:
            for ops in (layer.forward.ops, layer.backward.ops):
                chosen = ops[ops["function"] == 0]
                shapes |= {tuple(int(op[d]) for d in "bmkn") for op in chosen}
    return product_ops(sorted(shapes))


@cache
def configurations() -> Array:
    """The 4,186 distinct tensor-core configurations of the published space."""
    chips = ArchitectureSpace.tpuv4_area().chips
    _, first = np.unique(chips[CONFIGURATION], return_index=True)
    return np.ascontiguousarray(chips[np.sort(first)])


def _check_times(question: tuple[Any, ...], found: Array) -> None:
    """Never below the bound, and the same as one by one."""
    ops, *chips, _ = question
    bounds = _core.op_bounds(ops, *chips, 1)
    assert np.isfinite(found).all()
    assert (bounds <= found).all()
    at = len(found) // 2
    op, chip = at % len(ops), at // len(ops)
    records, index, *rest = chips
    alone = _core.op_times(ops[op : op + 1], records[chip : chip + 1], index[:1], *rest, 1)
    assert alone[0] == found[at]


def _question(ops: Array, chips: Any, threads: int) -> tuple[Any, ...]:
    return (ops, *machines(chips).arguments, False, threads)


def _times(question: tuple[Any, ...]) -> Array:
    return _core.op_times(*question)


def _bounds(question: tuple[Any, ...]) -> Array:
    return _core.op_bounds(*question)


def _check_bounds(question: tuple[Any, ...], found: Array) -> None:
    assert (found <= _core.op_times(*question)).all()
    assert (found > 0).all()


def _some(count: int) -> Array:
    """Every n-th configuration, so that a call takes a moment."""
    chips = configurations()
    return np.ascontiguousarray(chips[:: len(chips) // count][:count])


register(
    Subject(
        name="gemm-mapped",
        stage="operators",
        items=200 * len(products()),
        build=lambda: _question(products(), _some(200), 1),
        run=_times,
        check=_check_times,
        target=">= 1 M/s on one core",
    )
)
register(
    Subject(
        name="gemm-mapped-h200",
        stage="operators",
        items=20 * len(products()),
        build=lambda: _question(np.tile(products(), 20), presets.chip("h200"), 1),
        run=_times,
        check=_check_times,
        target=">= 1 M/s on one core",
    )
)
register(
    Subject(
        name="gemm-bounds",
        stage="operators",
        items=1000 * len(products()),
        build=lambda: _question(products(), _some(1000), 1),
        run=_bounds,
        check=_check_bounds,
        target=">= 20 M/s on one core",
    )
)


def _others() -> Array:
    names = _core.FUNCTIONS[4 : _core.FIRST_CONVOLUTION]
    vectors = [vector_ops(name, [4096, 8192], [4096, 1024]) for name in names if name]
    fused = [attention_ops([64], [4096], [128], [True], backward) for backward in (False, True)]
    return np.concatenate([*vectors, *fused])


register(
    Subject(
        name="vector-and-attention",
        stage="operators",
        items=1000 * len(_others()),
        build=lambda: _question(_others(), _some(1000), 1),
        run=_times,
        check=_check_times,
    )
)


def _cycles_question() -> tuple[Any, ...]:
    rng = np.random.default_rng(5)
    sizes = [rng.integers(1, 10_000, 1_000_000) for _ in range(3)]
    sides = [rng.integers(1, 257, 1_000_000) for _ in range(2)]
    return (*sizes, *sides, rng.integers(0, 3, 1_000_000).astype(np.int32), False, 1)


def _check_cycles(question: tuple[Any, ...], found: tuple[Array, Array]) -> None:
    counts, states = found
    assert not states.any()
    for i in range(0, len(counts), 50_021):
        sizes = [int(column[i]) for column in question[:5]]
        assert array_cycles(*sizes, _core.DATAFLOWS[question[5][i]]) == counts[i]


register(
    Subject(
        name="array-cycles",
        stage="operators",
        items=1_000_000,
        build=_cycles_question,
        run=lambda question: _core.array_cycles(*question),
        check=_check_cycles,
    )
)
register(
    Subject(
        name="sweep-eight-models-4186-chips-2-threads",
        stage="operators",
        items=4186 * len(products()),
        build=lambda: _question(products(), configurations(), 2),
        run=_times,
        check=_check_times,
        target="<= 10 s on 2 cores",
    )
)


def _estimate(question: tuple[Any, ...]) -> Any:
    cost_cache_clear()
    return estimate_costs(*question)


def _check_estimate(question: tuple[Any, ...], costs: Any) -> None:
    _, chips = question
    assert costs.chips == len(chips)
    for i in (0, len(costs.graphs) - 1):
        assert (costs.bound_s(i) <= costs.time_s(i)).all()


register(
    Subject(
        name="estimate-costs-llama2-620-chips",
        stage="operators",
        items=620,
        build=lambda: (layer_graph(models.load("llama2")), _some(620)),
        run=_estimate,
        check=_check_estimate,
    )
)
