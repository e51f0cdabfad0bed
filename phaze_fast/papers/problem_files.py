"""Placement problems in the files of the public PHAZE and NEST programs.

A .json file holds one problem, a .jsonl file one on each line. Records name fields as files do.
"""
# ruff: noqa: N815

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from phaze_fast.documents import parse_json, read_text
from phaze_fast.errors import InvalidInputError, brief
from phaze_fast.records import Record
from phaze_fast.schedule import topological_order

_LARGEST = 1e100
"""No size, time or rate is larger, so that no sum or product of them overflows."""
MOST_DEVICES = 2**29


@dataclass(frozen=True)
class ProblemRecord:
    """One problem of a file as plain data, or the reason why its text cannot be read."""

    name: str
    """Name of the problem if `data` has none."""
    where: str
    """File and line, for messages."""
    data: Any
    error: str = ""
    """Why the text could not be read; empty if it could."""


def read_records(path: Path | str) -> Iterator[ProblemRecord]:
    """Read the problems of a file; empty lines are skipped.

    Raises
    ------
    InvalidInputError
        Where the file cannot be read or is empty. Lines that are not JSON are returned with their
        error, so that the others can be solved.
    """
    file = Path(path)
    text = read_text(file)
    many = file.suffix == ".jsonl"
    lines = text.split("\n") if many else [text]
    if not text.strip():
        raise InvalidInputError(f"{file}: it is empty; expected at least one problem")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}" if many else str(file)
        name = f"{file.stem}:{number}" if len(lines) > 1 else file.stem
        try:
            yield ProblemRecord(name, where, parse_json(line))
        except InvalidInputError as error:
            yield ProblemRecord(name, where, None, str(error))


# ---- problems ----


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Size = Annotated[float, Field(strict=True, ge=0, le=_LARGEST, allow_inf_nan=False)]
Rate = Annotated[float, Field(strict=True, ge=1 / _LARGEST, le=_LARGEST, allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_integral), Field(strict=True, ge=1, le=MOST_DEVICES)]
Flag = Annotated[bool, Field(strict=True)]
_Id = Annotated[int, Field(strict=True, ge=-MOST_DEVICES, le=MOST_DEVICES)]


class Node(Record):
    """A layer at one tensor-parallel width."""

    what: ClassVar[str] = "node"
    id: _Id
    parameterSize: Size
    activationSize: Size
    optimalLatencyFw: Size
    optimalLatencyBw: Size
    isTensorParallelized: Flag = False


class Edge(Record):
    """Data that one layer sends to another."""

    what: ClassVar[str] = "edge"
    sourceId: _Id
    destId: _Id
    communicationCost: Size
    """Bytes that the edge carries."""


class ProblemFile(Record):
    """Fields that the problems of both programs have."""

    what: ClassVar[str] = "problem"
    maxDevices: Whole
    maxMemoryPerDevice: Size
    nodes: Mapping[str, Annotated[tuple[Node, ...], Field(min_length=1)]]
    """Layers by tensor-parallel width."""
    edges: Mapping[str, tuple[Edge, ...]]
    activationRecomputation: Flag
    optimizerAlgorithm: Literal["SGD", "Adam"]

    @model_validator(mode="before")
    @classmethod
    def _check_widths(cls, data: object) -> object:
        nodes, edges = (data.get(k) if isinstance(data, dict) else 0 for k in ("nodes", "edges"))
        if not isinstance(nodes, dict) or not isinstance(edges, dict):
            return data  # validation of the fields refuses it
        if not nodes:
            raise ValueError("nodes: {} is not accepted; expected nodes for at least one width")
        for width in nodes:
            digits = isinstance(width, str) and width.isascii() and width.isdigit()
            if not digits or len(width) > 9 or str(int(width)) != width or not int(width) >= 1:
                raise ValueError(
                    f"nodes: width {brief(width)} is not accepted; expected a whole number from 1 "
                    "to 999999999 without leading zeros"
                )
        if set(edges) != set(nodes):
            raise ValueError(
                f"edges: {brief(list(edges))} is not accepted; expected lists for the widths of "
                f"nodes, {brief(list(nodes))}"
            )
        return data

    @classmethod
    def read(cls, data: object, name: str) -> tuple[str, Self]:
        """Return the name of a problem, which may be under the key ``input``, and its record.

        Raises
        ------
        InvalidInputError
            One line with the first field that is missing, unknown or out of range.
        """
        if isinstance(data, dict) and isinstance(data.get("input"), dict):
            own = data.get("name", name)
            name, data = own if isinstance(own, str) else brief(own), data["input"]
        try:
            return name, cls.from_dict(data)
        except InvalidInputError as error:
            raise InvalidInputError(str(error).partition("\n")[0]) from None

    def layers(self, width: int) -> tuple[list[Node], list[tuple[int, int, float]]]:
        """Return the layers of a width in an order in which edges go forward, and the edges.

        Of several such orders, it is the one with smaller ids first. An edge has the positions of
        both layers and its bytes.

        Raises
        ------
        InvalidInputError
            Where ids repeat, or an edge connects no two layers or is part of a cycle.
        """
        key = str(width)
        nodes: dict[int, Node] = {}
        for k, node in enumerate(self.nodes[key]):
            if node.id in nodes:
                raise InvalidInputError(f"nodes.{width}.{k}.id: {node.id} is there twice")
            nodes[node.id] = node
        for k, edge in enumerate(self.edges[key]):
            for end in ("sourceId", "destId"):
                if (own := getattr(edge, end)) not in nodes:
                    raise InvalidInputError(
                        f"edges.{width}.{k}.{end}: {own} is not accepted; it is no id of a node"
                    )
            if edge.sourceId == edge.destId:
                raise InvalidInputError(
                    f"edges.{width}.{k}: an edge from {edge.sourceId} to itself"
                )
        ends = [(edge.sourceId, edge.destId) for edge in self.edges[key]]
        order = topological_order(sorted(nodes), ends)
        if len(order) != len(nodes):
            left = sorted(set(nodes) - set(order))
            raise InvalidInputError(f"edges.{width}: a cycle through {left[:5]} is not accepted")
        at = {own: position for position, own in enumerate(order)}
        edges = [(at[e.sourceId], at[e.destId], e.communicationCost) for e in self.edges[key]]
        return [nodes[own] for own in order], edges
