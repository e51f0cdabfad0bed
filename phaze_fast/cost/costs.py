"""Time and energy of operators on chips, kept once per distinct shape and chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.opgraph import BESIDE_RING, GROUPS, RING, OpGraph

__all__ = ["CostTable", "Costs"]

Array = np.ndarray[Any, Any]


@lru_cache(maxsize=256)
def _rings(names: tuple[str, ...]) -> tuple[int, ...]:
    """Positions of the collectives of attention in a ring."""
    return tuple(k for k, name in enumerate(names) if name.endswith(RING))


class CostTable(NamedTuple):
    """Distinct operators on the chips that are distinct to them."""

    time_s: Array
    one_core_s: Array
    bound_s: Array
    dynamic_j: Array
    chip_of: Array
    """Which of its rows each chip is."""
    column_of: Array
    """Which of its columns each operator is; -1 where it is in the other table."""


@dataclass(frozen=True, eq=False)
class Costs:
    """Time and energy of the operators of several graphs on several chips.

    Answers are kept once per distinct shape and chip; `time_s` and the others lay out what is asked
    for, one row per chip and one column per operator of a graph.
    """

    graphs: tuple[OpGraph, ...]
    chips: int
    cores: Array
    """Tensor cores, vector cores and networks (1) of each chip, shape (chips, 3)."""
    evaluations: int
    """Pairs of distinct operator and distinct chip that were priced."""
    _tables: tuple[CostTable, ...]
    _static_w: Array
    _ends: tuple[int, ...]
    _network_s: tuple[Array, ...]
    _places: dict[int, list[tuple[int, Array, Array]]] = field(default_factory=dict)
    """Of each graph that was asked for: tables, which operators are theirs, and their columns."""

    _contention: float = 0.0

    def _places_of(self, graph: int) -> list[tuple[int, Array, Array]]:
        known = self._places.get(graph)
        if known is None:
            ops = slice(self._ends[graph], self._ends[graph + 1])
            known = []
            for at, table in enumerate(self._tables):
                columns = table.column_of[ops]
                mine = np.flatnonzero(columns >= 0)
                if len(mine):
                    known.append((at, mine, columns[mine]))
            self._places[graph] = known
        return known

    def _look_up(self, name: str, graph: int, chip: int | None) -> Array:
        if not 0 <= graph < len(self.graphs):
            last = len(self.graphs) - 1
            raise InvalidInputError(f"graph: {graph!r} is not accepted; expected 0 to {last}")
        if chip is not None and not 0 <= chip < self.chips:
            raise InvalidInputError(
                f"chip: {chip!r} is not accepted; expected 0 to {self.chips - 1}"
            )
        rows = slice(None) if chip is None else slice(chip, chip + 1)
        found = np.empty((self.chips if chip is None else 1, len(self.graphs[graph])))
        for at, mine, columns in self._places_of(graph):
            table = self._tables[at]
            values: Array = getattr(table, name)
            found[:, mine] = values.take(columns, axis=1).take(table.chip_of[rows], axis=0)
        return found

    def at(self, chips: Array) -> Costs:
        """Those of some chips, by position."""
        tables = [table._replace(chip_of=table.chip_of[chips]) for table in self._tables]
        return replace(
            self,
            chips=len(chips),
            cores=self.cores[chips],
            _tables=tuple(tables),
            _static_w=self._static_w[chips],
        )

    def without(self, groups: Sequence[str], share: float = 1.0) -> Costs:
        """Those with collectives of some groups of devices (`phaze_fast.opgraph.GROUPS`) free.

        A `share` below 1 takes away only so much of their seconds.
        """
        codes = [GROUPS.index(name) for name in groups]
        network = tuple(
            np.where(np.isin(graph.ops["group"], codes), (1.0 - share) * seconds, seconds)
            for graph, seconds in zip(self.graphs, self._network_s, strict=True)
        )
        return replace(self, _network_s=network)

    def with_contention(self, contention: float) -> Costs:
        """Those in which work loses so much of each second of a collective beside it."""
        return replace(self, _contention=contention)

    def _exposed_s(self, graph: int, chip: int | None) -> Array:
        """Seconds of collectives; of a ring those that outlast or slow the attention beside it."""
        network, names = self._network_s[graph], self.graphs[graph].names
        rings = _rings(names)
        if not rings:
            return network
        hides = [names.index(names[k].removesuffix(RING) + BESIDE_RING) for k in rings]
        beside = self._look_up("time_s", graph, chip)[:, hides]
        found = np.repeat(network[None, :], len(beside), axis=0)
        ring_s = network[list(rings)]
        found[:, list(rings)] = np.maximum(self._contention * ring_s, ring_s - beside)
        return found

    def time_s(self, graph: int = 0, chip: int | None = None) -> Array:
        """Seconds on all cores, shape (chips, operators); collectives over the fabric."""
        found: Array = self._look_up("time_s", graph, chip) + self._exposed_s(graph, chip)
        return found

    def one_core_s(self, graph: int = 0, chip: int | None = None) -> Array:
        """Seconds on one core of each type, shape (chips, operators)."""
        found: Array = self._look_up("one_core_s", graph, chip) + self._exposed_s(graph, chip)
        return found

    def bound_s(self, graph: int = 0, chip: int | None = None) -> Array:
        """Lower bounds of `time_s`, shape (chips, operators)."""
        found: Array = self._look_up("bound_s", graph, chip) + self._exposed_s(graph, chip)
        return found

    @property
    def static_w(self) -> Array:
        """Watts of each chip that flow whatever runs, shape (chips,)."""
        return self._static_w

    def dynamic_j(self, graph: int = 0, chip: int | None = None) -> Array:
        """Joules on the chip but for those of `static_w`, shape (chips, operators)."""
        return self._look_up("dynamic_j", graph, chip)

    def energy_j(self, graph: int = 0, chip: int | None = None) -> Array:
        """Joules on the chip, shape (chips, operators); none while the network is at work."""
        watts = self._static_w if chip is None else self._static_w[chip : chip + 1]
        found = self.dynamic_j(graph, chip)
        found += watts[:, None] * self._look_up("time_s", graph, chip)
        return found

    def total_s(self) -> Array:
        """Seconds of each graph if its operators follow one another, shape (graphs, chips)."""
        return np.array([self.time_s(i).sum(axis=1) for i in range(len(self.graphs))])
