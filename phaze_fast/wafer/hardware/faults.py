"""Fault maps: which dies and links of a wafer do not work, given or drawn at random."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from phaze_fast.errors import InvalidInputError
from phaze_fast.records import Record
from phaze_fast.wafer.hardware.wafer import FewOrNone, Wafer

RowColumn = Annotated[tuple[FewOrNone, FewOrNone], Field()]
"""Row and column of a die, counted from the top left."""


class FaultMap(Record):
    """Dies and links that do not work, by row and column.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> faults = FaultMap(dead_dies=((0, 3),), dead_links=(((1, 0), (1, 1)),))
    >>> wafer = faults.on(load_wafer("dojo-tile-like"))
    >>> wafer.dies, wafer.dead, wafer.dead_links
    (24, ((3, 0),), (((0, 1), (1, 1)),))
    """

    what: ClassVar[str] = "fault map"
    dead_dies: tuple[RowColumn, ...] = ()
    """Row and column of each die that does not work."""
    dead_links: tuple[tuple[RowColumn, RowColumn], ...] = ()
    """Links that do not work, each as a pair of neighbouring dies by row and column."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for at, (here, there) in enumerate(self.dead_links):
            if abs(here[0] - there[0]) + abs(here[1] - there[1]) != 1:
                raise ValueError(
                    f"dead_links.{at}: row {here[0]}, column {here[1]} to row {there[0]}, column "
                    f"{there[1]} is not accepted; expected two neighbouring dies"
                )
        links = [frozenset(link) for link in self.dead_links]
        for name, entries in (("dead_dies", self.dead_dies), ("dead_links", links)):
            if len(set(entries)) < len(entries):
                raise ValueError(f"{name}: an entry is given twice; expected each once")
        return self

    def on(self, wafer: Wafer, source: str = "faults") -> Wafer:
        """Return a wafer with these faults added to its own.

        Parameters
        ----------
        wafer
            Wafer that has the faults.
        source
            Name of this map in error messages.

        Raises
        ------
        InvalidInputError
            Where a die lies outside the grid, or none is left that works.
        """
        columns, rows = wafer.grid
        places = [(f"dead_dies.{k}", at) for k, at in enumerate(self.dead_dies)]
        for k, link in enumerate(self.dead_links):
            places += [(f"dead_links.{k}", at) for at in link]
        for field, (row, column) in places:
            if row >= rows or column >= columns:
                raise InvalidInputError(
                    f"{source}: {field}: row {row}, column {column} is not accepted by "
                    f"{wafer.name}; expected rows below {rows} and columns below {columns}"
                )
        dead = {(column, row) for row, column in self.dead_dies} | set(wafer.dead)
        if len(dead) >= wafer.positions:
            raise InvalidInputError(
                f"{source}: dead_dies: all {wafer.positions} dies of {wafer.name} are dead; "
                "expected at least one that works"
            )
        links = {frozenset(link): link for link in wafer.dead_links}
        for (a, b), (c, d) in self.dead_links:
            links.setdefault(frozenset(((b, a), (d, c))), ((b, a), (d, c)))
        return wafer.replace(dead=tuple(dead), dead_links=tuple(links.values()))

    def to_plain(self) -> dict[str, Any]:
        """Return plain data: lists of rows and columns, as a file has them."""
        return {
            "dead_dies": [list(at) for at in self.dead_dies],
            "dead_links": [[list(at) for at in link] for link in self.dead_links],
        }


def load_faults(path: str | Path) -> FaultMap:
    """Read a fault map from a YAML or JSON file."""
    return FaultMap.from_file(path)


def sample_faults(
    wafer: Wafer,
    count: int,
    seed: int = 0,
    die_fault: float | None = None,
    link_fault: float = 0.0,
) -> list[FaultMap]:
    """Draw fault maps: dies and links fail independently, each with its own probability.

    Parameters
    ----------
    wafer
        Wafer whose dies and links may fail.
    count
        Number of maps.
    seed
        Random seed; the same seed gives the same maps on every machine.
    die_fault
        Probability that a die does not work; by default 1 less the wafer's `die_yield`.
    link_fault
        Probability that a link between two neighbours does not work.

    Raises
    ------
    InvalidInputError
        Where a probability is not between 0 and 1, or the count not between 1 and 100,000.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> maps = sample_faults(load_wafer("dojo-tile-like"), 200, die_fault=0.04)
    >>> 0.8 < sum(len(fault_map.dead_dies) for fault_map in maps) / 200 < 1.2
    True
    """
    die_fault = 1.0 - wafer.die_yield if die_fault is None else die_fault
    for name, value in (("die_fault", die_fault), ("link_fault", link_fault)):
        if not 0.0 <= value < 1.0:
            raise InvalidInputError(
                f"{name}: {value!r} is not accepted; expected a probability from 0 to below 1"
            )
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 100_000:
        raise InvalidInputError(
            f"count: {count!r} is not accepted; expected a whole number from 1 to 100000"
        )
    columns, rows = wafer.grid
    dies = [(row, column) for row in range(rows) for column in range(columns)]
    links = [((r, c), (r, c + 1)) for r, c in dies if c + 1 < columns]
    links += [((r, c), (r + 1, c)) for r, c in dies if r + 1 < rows]
    rng = random.Random(seed)
    maps = []
    for _ in range(count):
        dead = [die for die in dies if rng.random() < die_fault]
        broken = [link for link in links if rng.random() < link_fault]
        maps.append(FaultMap(dead_dies=tuple(dead[: len(dies) - 1]), dead_links=tuple(broken)))
    return maps
