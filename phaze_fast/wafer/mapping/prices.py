"""Costs of operators on one die, and the splits that are the columns of price tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.cost import estimate_costs
from phaze_fast.hardware import Accelerator
from phaze_fast.opgraph.builder import OperatorSpec
from phaze_fast.opgraph.graph import loose
from phaze_fast.wafer.hardware import Wafer
from phaze_fast.wafer.mapping.operators import MeshOperator

Array = np.ndarray[Any, Any]

Times = dict[int, dict[tuple[int, ...], list[float]]]
"""Per operator and local shape: seconds of the forward pass, of the backward pass and of the weight
gradient; live bytes."""


@lru_cache(maxsize=16)
def priced_times(chip: str, model: str, seq: int) -> Times:
    """Return the cache of prices on one die; callers add to it."""
    del chip, model, seq  # the cache key
    return {}


class PriceTable(NamedTuple):
    """Prices of operators on one die: a row per operator, a column per split of `combinations`."""

    forward_s: Array
    backward_s: Array
    stash_bytes: Array
    """Bytes of the output that are stored for the backward pass."""
    live_bytes: Array
    """Bytes of inputs and outputs while the operator runs, without weights."""
    parameters: Array
    """Number of parameters that a die works with."""
    weight_grad_s: Array
    """The part of `backward_s` spent on weight gradients."""

    @classmethod
    def zeros(cls, operators: int, splits: int) -> PriceTable:
        """Return a table of zeros."""
        return cls(*(np.zeros((operators, splits)) for _ in cls._fields))

    def columns(self) -> dict[str, Array]:
        """Return each table by name as a flat array for the compiled kernel."""
        return {name: table.reshape(-1) for name, table in self._asdict().items()}


class LeastWork(NamedTuple):
    """Seconds of a micro-batch with each operator at its fastest split."""

    before_s: float
    block_s: float
    behind_s: float
    weight_share: float
    """Largest share of the weight gradient in any operator's time, over all splits."""
    operators_s: tuple[float, ...] = ()
    """Seconds of each operator, in model order."""


def alike(operators: Sequence[MeshOperator]) -> list[int]:
    """Return for each operator the first one of the same kind and size, which costs the same."""
    first: dict[object, int] = {}
    representatives = []
    for i, op in enumerate(operators):
        bare = replace(op.spec, name="", inputs=())
        key = (bare, op.seq_rows, op.units, op.inner_units)
        representatives.append(first.setdefault(key, i))
    return representatives


@lru_cache(maxsize=512)
def combinations(dies: int) -> tuple[Array, Array, Array]:
    """Return the divisors of `dies`, the column of each (B, M, N, K), and the splits in order."""
    divisors = [d for d in range(1, dies + 1) if dies % d == 0]
    column = np.full(len(divisors) ** 4, -1, dtype=np.int32)
    splits: list[tuple[int, ...]] = []
    for at, factors in enumerate(product(divisors, repeat=4)):
        if dies % math.prod(factors) == 0:
            column[at] = len(splits)
            splits.append(factors)
    return np.array(divisors, dtype=np.int32), column, np.array(splits)


def combination(dies: int, factors: tuple[int, ...]) -> int:
    """Return the table column of a split into (B, M, N, K) parts."""
    divisors, column, _ = combinations(dies)
    at = 0
    for factor in factors:
        at = at * len(divisors) + int(np.searchsorted(divisors, factor))
    return int(column[at])


def network_chip(wafer: Wafer) -> Accelerator:
    """Return the die for pricing products: its shared buffer has the rate of the die's network.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> chip = network_chip(load_wafer("dojo-tile-like"))
    >>> chip.buffer_bandwidth_bytes_per_s / 1e12
    10.0
    """
    rate, chip = wafer.die.network_bytes_per_s, wafer.chip
    if rate is None:
        return chip
    cycles = min(rate / chip.clock_hz, chip.buffer.bytes_per_cycle)
    return chip.replace(buffer=chip.buffer.replace(bytes_per_cycle=cycles))


def _shares(spec: OperatorSpec) -> bool:
    """Whether the cores share the operands of an operator."""
    return "gemm" in spec.kind or spec.kind.startswith("attention")


def operator_costs(
    chip: Accelerator, network: Accelerator, specs: list[tuple[OperatorSpec, int]]
) -> tuple[Array, Array]:
    """Seconds, and joules without static power, of operators on one die.

    Products share their operands over the die's network; other operands stay in the cores' SRAM.

    Parameters
    ----------
    chip, network
        The die, and the die for pricing products; see `network_chip`.
    specs
        Operators, each with the number of shapes in its size arrays.
    """
    graph = loose("wafer", specs)
    costs = estimate_costs(graph, chip)
    seconds, joules = costs.time_s(0)[0], costs.dynamic_j(0)[0]
    if network != chip:
        shared = estimate_costs(graph, network)
        over = np.repeat([_shares(spec) for spec, _ in specs], [count for _, count in specs])
        seconds = np.where(over, shared.time_s(0)[0], seconds)
        joules = np.where(over, shared.dynamic_j(0)[0], joules)
    return seconds, joules
