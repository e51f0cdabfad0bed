"""Time and energy of every operator of operator graphs on every chip of a batch.

Work is shared: operators of equal shape are priced once, and so are chips that do not differ in
what an operator sees. Answers are kept by the content of the query.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import numpy as np

from phaze_fast import _core
from phaze_fast.cost.cache import answers
from phaze_fast.cost.collectives import AnyFabric
from phaze_fast.cost.costs import Costs, CostTable
from phaze_fast.cost.machines import Machines, in_format, machines
from phaze_fast.cost.network import collectives_s, rank_groups
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Accelerator, Cluster, EnergyTable, Tuning, presets
from phaze_fast.hardware.chip import Dtype
from phaze_fast.opgraph import FORMATS, LayerGraph, OpGraph
from phaze_fast.threads import thread_count

__all__ = ["distinct_operators", "estimate_costs"]

Array = np.ndarray[Any, Any]

_SEEN = ("unit", "b", "m", "n", "k", "read_bytes", "write_bytes", "causal", "epilogue", "function")
_UNSEEN_OF_CHIP = ("hbm_bytes", "hbm_stacks", "vector_local_bytes")  # capacity is not speed
# A product with nothing fused onto it sees the tensor cores alone.
_UNSEEN_BY_PRODUCTS = ("vector_cores", "vector_lanes", "vector_alus_per_lane")
_PAIRS_AT_ONCE = 2**18  # full records held in memory at a time


def _flat(graphs: OpGraph | LayerGraph | Sequence[OpGraph | LayerGraph]) -> tuple[OpGraph, ...]:
    listed = [graphs] if isinstance(graphs, OpGraph | LayerGraph) else list(graphs)
    found: list[OpGraph] = []
    for graph in listed:
        if isinstance(graph, LayerGraph):
            for layer in graph.layers:
                found += [layer.forward, layer.backward]
        elif isinstance(graph, OpGraph):
            found.append(graph)
        else:
            raise InvalidTypeError(
                f"graphs: {type(graph).__name__} is not accepted; expected OpGraph or LayerGraph"
            )
    return tuple(found)


def distinct_operators(ops: Array) -> tuple[Array, Array]:
    """Operators that differ in what a chip sees, and which of them each one is."""
    if not len(ops):
        return ops, np.zeros(0, dtype=np.intp)
    key: Array = np.zeros(len(ops), dtype=[(name, ops.dtype[name]) for name in _SEEN])
    for name in _SEEN:
        key[name] = ops[name]
    _, first, inverse = np.unique(
        key.view(np.dtype((np.void, key.dtype.itemsize))), return_index=True, return_inverse=True
    )
    chosen: Array = np.zeros(len(first), dtype=ops.dtype)
    for name in _SEEN:
        chosen[name] = ops[name][first]
    chosen["collective"] = -1
    return chosen, inverse.reshape(-1)


def _distinct_chips(asked: Machines, unseen: tuple[str, ...]) -> tuple[Machines, Array]:
    """Chips that differ in what an operator sees, and which of them each one is."""
    records = asked.records.copy()
    for name in unseen:
        records[name] = 1
    key: Array = np.zeros(len(records), dtype=[("c", "V", records.dtype.itemsize), ("t", "i4")])
    key["c"] = records.view(np.dtype((np.void, records.dtype.itemsize)))
    key["t"] = asked.tuning_of
    _, first, inverse = np.unique(
        key.view(np.dtype((np.void, key.dtype.itemsize))), return_index=True, return_inverse=True
    )
    chosen = Machines(
        np.ascontiguousarray(records[first]),
        np.ascontiguousarray(asked.tuning_of[first]),
        asked.tunings,
        asked.precision,
        asked.energy,
        np.zeros(len(first)),  # static energy is added when an answer is laid out
    )
    return chosen, inverse.reshape(-1)


def _part(asked: Machines, begin: int, end: int) -> Machines:
    return Machines(
        asked.records[begin:end],
        asked.tuning_of[begin:end],
        asked.tunings,
        asked.precision,
        asked.energy,
        asked.static_w[begin:end],
    )


def _bounded(ops: Array, asked: Machines, threads: int) -> tuple[Array, ...]:
    """Lower bounds in place of times, and nothing for energy; too quick to be kept."""
    bounds: Array = _core.op_bounds(ops, *asked.arguments, False, threads)
    bounds = bounds.reshape(len(asked), len(ops))
    return bounds, bounds, bounds, np.zeros_like(bounds)


def _priced(ops: Array, asked: Machines, chip_of: Array, threads: int) -> tuple[Array, ...]:
    """Time on all cores and on one, bound and energy without static power; looked up first."""
    parts = (ops, *asked.arguments[:3], np.array(asked.precision), asked.prices)
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.tobytes())
        digest.update(len(part).to_bytes(8, "little"))
    found = answers.get(digest.digest())
    if found is None:
        tables = [np.empty((len(asked), len(ops))) for _ in range(4)]
        step = max(1, _PAIRS_AT_ONCE // max(len(ops), 1))
        for begin in range(0, len(asked), step):
            end = min(len(asked), begin + step)
            some = _part(asked, begin, end)
            costs = _core.op_costs(ops, *some.arguments, False, some.prices, some.static_w, threads)
            _refuse_bad(ops, costs["status"], chip_of, begin)
            one = _core.op_times(ops, *some.arguments, True, threads)
            for table, values in zip(
                tables, (costs["time_s"], one, costs["bound_s"], costs["energy_j"]), strict=True
            ):
                table[begin:end] = values.reshape(end - begin, len(ops))
        found = tuple(tables)
        for table in found:
            table.setflags(write=False)
        answers.put(digest.digest(), found)
    return found


def _refuse_bad(ops: Array, status: Array, chip_of: Array, begin: int) -> None:
    bad = np.flatnonzero(status)
    if not len(bad):
        return
    op = ops[int(bad[0]) % len(ops)]
    sizes = ", ".join(f"{name} {int(op[name])}" for name in "bmkn")
    said = _core.STATUS_SENTENCES[int(status[bad[0]])]
    chip = int(np.flatnonzero(chip_of == begin + int(bad[0]) // len(ops))[0])
    raise InvalidInputError(f"chips[{chip}], operator {sizes}: {said}")


def _tabled(
    ops: Array, which: Array, asked: Machines, unseen: tuple[str, ...], threads: int, rough: bool
) -> CostTable:
    """Price some operators, each distinct one once, on the chips that are distinct to them."""
    shapes, column = distinct_operators(ops[which])
    chips, chip_of = _distinct_chips(asked, unseen)
    sized = in_format(shapes, asked.precision)
    values = _bounded(sized, chips, threads) if rough else _priced(sized, chips, chip_of, threads)
    column_of = np.full(len(ops), -1, dtype=np.intp)
    column_of[which] = column
    time_s, one_core_s, bound_s, dynamic_j = values
    return CostTable(time_s, one_core_s, bound_s, dynamic_j, chip_of, column_of)


def _format(code: int) -> Dtype:
    """Name the number format of an operator that does not have the batch's."""
    return cast(Dtype, FORMATS[code])


def _cores(records: Array) -> Array:
    columns = (records["tensor_cores"], records["vector_cores"], np.ones(len(records)))
    cores: Array = np.minimum(np.stack(columns, axis=1), 2**30).astype(np.int32)
    return cores


def estimate_costs(
    graphs: OpGraph | LayerGraph | Sequence[OpGraph | LayerGraph],
    chips: Accelerator | str | Sequence[Accelerator | str] | Array,
    fabric: AnyFabric | Cluster | str | None = None,
    dtype: Dtype = "bf16",
    tuning: Tuning | None = None,
    energy: EnergyTable | None = None,
    threads: int | None = None,
    like: Accelerator | None = None,
    bounds_only: bool = False,
    expert_stride: int | None = None,
) -> Costs:
    """Price every operator of every graph on every chip, in one call; the GIL is released.

    Parameters
    ----------
    graphs
        Operator graphs, or layer graphs, whose layers give two each: forward and backward.
    chips
        Accelerators or names of them, or an array of records such as `ArchitectureSpace.chips`.
    fabric
        What collectives run over; needed where a graph has any. A tensor group is neighbours, a
        context group lies `tp` ranks apart, an expert group `expert_stride`.
    dtype
        Number format of the operands, but for operators that name one of their own.
    tuning
        Overrides the chips' own; for an array of records it is the only one.
    energy
        Prices of events; by default the 7 nm table.
    threads
        At most this many threads, by default all cores; the result does not depend on it.
    like
        For an array of records: the chip whose tuning, launch latency and formats they share.
    bounds_only
        Give lower bounds in place of all times, and no energy: twenty times as fast.
    expert_stride
        Ranks between neighbours of an expert group, which are replicas: by default
        ``tp * cp``, and more where the stages of a replica lie between.

    Returns
    -------
    Costs
        Arrays over (chips, operators) for each graph.

    Raises
    ------
    InvalidInputError
        Where a chip or operator is malformed, or collectives have no fabric or do not fit it.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.hardware import presets
    >>> from phaze_fast.opgraph import layer_graph
    >>> chips = [presets.chip("tpuv4"), presets.chip("h200")]
    >>> costs = estimate_costs(layer_graph(models.load("llama2-7b")), chips)
    >>> costs.time_s(2).shape == (2, len(costs.graphs[2]))
    True
    """
    workers = thread_count(threads)
    wired = presets.fabric(fabric) if isinstance(fabric, str) else fabric
    listed = [graphs] if isinstance(graphs, OpGraph | LayerGraph) else list(graphs)
    flat = _flat(listed)
    asked = machines(chips, dtype, tuning, energy, like)
    if not len(asked):
        raise InvalidInputError("chips: an empty list is not accepted; expected at least one")
    network = [
        collectives_s(graph, wired, rank_groups(given, expert_stride))
        for given in listed
        for graph in _flat([given])
    ]
    ops = (
        np.concatenate([graph.ops for graph in flat])
        if flat
        else np.zeros(0, dtype=_core.OPERATOR_DTYPE)
    )
    alone = (ops["function"] == 0) & (ops["epilogue"] == 0)
    tables = []
    for code in np.unique(ops["format"]).tolist() or [0]:
        own = asked if code == 0 else machines(chips, _format(code), tuning, energy, like)
        mine = ops["format"] == code
        for which, unseen in (
            (alone & mine, _UNSEEN_OF_CHIP + _UNSEEN_BY_PRODUCTS),
            (~alone & mine, _UNSEEN_OF_CHIP),
        ):
            positions = np.flatnonzero(which)
            if code == 0 or len(positions):
                tables.append(_tabled(ops, positions, own, unseen, workers, bounds_only))
    return Costs(
        graphs=flat,
        chips=len(asked),
        cores=_cores(asked.records),
        evaluations=sum(table.time_s.size for table in tables),
        _tables=tuple(tables),
        _static_w=asked.static_w,
        _ends=(0, *accumulate(len(graph) for graph in flat)),
        _network_s=tuple(network),
    )
