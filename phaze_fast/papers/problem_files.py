"""Files of placement problems in the forms of the public PHAZE and NEST programs, and their fields.

A .json file holds one problem, a .jsonl file one on each line. Fields are checked one by one; an
error message is one short line that names the field, even where the value is long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaze_fast.documents import parse_json, read_text
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.schedule import topological_order

Edges = list[tuple[int, int, float]]
"""Source, destination and bytes of each edge."""

_LARGEST = 1e100
"""No size, time or rate is larger, so that no sum or product of them overflows."""
_LONGEST = 60
_MOST_DEVICES = 2**29


@dataclass(frozen=True)
class ProblemRecord:
    """One problem of a file as plain data, or why its text cannot be read."""

    name: str
    """The name where the problem itself has none."""
    where: str
    """File and line, for messages."""
    data: Any
    error: str = ""
    """Why there is no data."""


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


# ---- single fields ----


def shown(value: Any) -> str:
    """Write a value as it was given, cut where it is long.

    Examples
    --------
    >>> shown("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa..."
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or a deep list
        return f"a value of type {type(value).__name__} that is too long to show"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST + 1] + "..."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(
    record: Mapping[str, Any], key: str, where: str, least: float = 0.0, most: float = _LARGEST
) -> float:
    """Read a field that is a number between two limits."""
    if key not in record:
        raise InvalidInputError(f"{where}{key}: missing; expected a number")
    value = record[key]
    if not _is_number(value) or not least <= value <= most:
        raise InvalidInputError(
            f"{where}{key}: {shown(value)} is not accepted; expected a number from {least:g} to "
            f"{most:g}"
        )
    return float(value)


def whole(
    record: Mapping[str, Any], key: str, where: str, least: int = 0, most: int = _MOST_DEVICES
) -> int:
    """Read a field that is a whole number between two limits."""
    if key not in record:
        raise InvalidInputError(f"{where}{key}: missing; expected a whole number")
    value = record[key]
    if not _is_number(value) or not least <= value <= most or value != int(value):
        raise InvalidInputError(
            f"{where}{key}: {shown(value)} is not accepted; expected a whole number from {least} "
            f"to {most}"
        )
    return int(value)


def flag(record: Mapping[str, Any], key: str, where: str) -> bool:
    """Read a field that is true or false."""
    value = record.get(key)
    if not isinstance(value, bool):
        raise InvalidInputError(
            f"{where}{key}: {shown(value)} is not accepted; expected true or false"
        )
    return value


# ---- problems ----


def _known(record: Any, accepted: Collection[str], where: str) -> dict[str, Any]:
    """Check that an object has no other fields than those accepted."""
    if not isinstance(record, dict):
        raise InvalidInputError(
            f"{where or 'problem'}: {shown(record)} is not accepted; expected an object, not a "
            f"{type(record).__name__}"
        )
    for key in record:
        if key not in accepted:
            name = key if isinstance(key, str) and key.isidentifier() else shown(key)
            raise InvalidInputError(
                f"{where}{'.' * bool(where)}{name[:_LONGEST]}: unknown; "
                f"{nearest(str(key)[:_LONGEST], accepted)}"
            )
    return record


def named(data: Any, name: str) -> tuple[str, Any]:
    """Return the name of a problem and the problem itself, which may be under the key ``input``."""
    if not isinstance(data, dict) or not isinstance(data.get("input"), dict):
        return name, data
    own = data.get("name", name)
    return own if isinstance(own, str) else shown(own), data["input"]


def required_fields(
    data: Any, required: Sequence[str], optional: Collection[str]
) -> dict[str, Any]:
    """Check that a problem has all required fields and no unknown ones."""
    record = _known(data, (*required, *optional), "")
    for key in required:
        if key not in record:
            raise InvalidInputError(f"{key}: missing; expected it beside {', '.join(required)}")
    return record


def optimizer_states(record: Mapping[str, Any], states: Mapping[str, float]) -> float:
    """Bytes of weights, gradients and moments per byte of weights, by ``optimizerAlgorithm``."""
    algorithm = record["optimizerAlgorithm"]
    if not isinstance(algorithm, str) or algorithm not in states:
        raise InvalidInputError(
            f"optimizerAlgorithm: {shown(algorithm)} is not accepted; "
            f"{nearest(str(algorithm)[:_LONGEST], states)}"
        )
    return states[algorithm]


def widths(record: Mapping[str, Any]) -> list[int]:
    """Return the tensor-parallel widths of the nodes and edges."""
    nodes, edges = record["nodes"], record["edges"]
    if not isinstance(nodes, dict) or not nodes:
        raise InvalidInputError(
            f"nodes: {shown(nodes)} is not accepted; expected an object with a list of nodes for "
            "each width"
        )
    for width in nodes:
        digits = isinstance(width, str) and width.isascii() and width.isdigit()
        if not digits or len(width) > 9 or str(int(width)) != width or not int(width) >= 1:
            raise InvalidInputError(
                f"nodes: width {shown(width)} is not accepted; expected a whole number from 1 to "
                "999999999 without leading zeros"
            )
    if not isinstance(edges, dict) or set(edges) != set(nodes):
        raise InvalidInputError(
            f"edges: {shown(list(edges) if isinstance(edges, dict) else edges)} is not accepted; "
            f"expected lists for the widths of nodes, {shown(list(nodes))}"
        )
    return [int(width) for width in nodes]


# ---- nodes and edges ----


def _node_id(
    record: Mapping[str, Any], key: str, where: str, among: Collection[int] | None = None
) -> int:
    """Read the id of a node: a whole number, and one of those known where they are given."""
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(
            f"{where}{key}: {shown(value)} is not accepted; expected the id of a node, a whole "
            "number"
        )
    if among is not None and value not in among:
        raise InvalidInputError(
            f"{where}{key}: {shown(value)} is not accepted; it is no id of a node"
        )
    if among is None and not -_MOST_DEVICES <= value <= _MOST_DEVICES:
        raise InvalidInputError(
            f"{where}{key}: {shown(value)} is not accepted; expected an id from -2^29 to 2^29"
        )
    return value


_WIDE = "isTensorParallelized"


def read_nodes(
    records: Any,
    where: str,
    numbers: Sequence[str],
    unused: Sequence[str] = (),
    most: int | None = None,
) -> dict[int, dict[str, Any]]:
    """Read the nodes of one width.

    Parameters
    ----------
    records
        The list of nodes.
    where
        The field, for messages.
    numbers
        Fields that every node has.
    unused
        Numbers that a node may have; they are only checked.
    most
        At most so many nodes.

    Returns
    -------
    dict
        The numbers of each node by its id, and ``wide``: whether it is tensor-parallel.
    """
    if not isinstance(records, list) or not 1 <= len(records) <= (most or len(records)):
        expected = "at least one node" if most is None else f"1 to {most} nodes"
        raise InvalidInputError(
            f"{where}: {shown(records)} is not accepted; expected a list of {expected}"
        )
    nodes: dict[int, dict[str, Any]] = {}
    for k, record in enumerate(records):
        at = f"{where}[{k}]"
        node = _known(record, ("id", *numbers, *unused, _WIDE), at)
        key = _node_id(node, "id", f"{at}.")
        if key in nodes:
            raise InvalidInputError(f"{at}.id: {key} is there twice; expected every id once")
        nodes[key] = {name: number(node, name, f"{at}.") for name in numbers}
        for name in unused:
            number({name: 0, **node}, name, f"{at}.")
        nodes[key]["wide"] = flag({_WIDE: False, **node}, _WIDE, f"{at}.")
    return nodes


def read_edges(records: Any, ids: Collection[int], where: str) -> Edges:
    """Read the edges of one width."""
    if not isinstance(records, list):
        raise InvalidInputError(f"{where}: {shown(records)} is not accepted; expected a list")
    edges = []
    for k, record in enumerate(records):
        at = f"{where}[{k}]"
        edge = _known(record, ("sourceId", "destId", "communicationCost"), at)
        source, target = (_node_id(edge, end, f"{at}.", ids) for end in ("sourceId", "destId"))
        if source == target:
            raise InvalidInputError(f"{at}: an edge from {source} to itself")
        edges.append((source, target, number(edge, "communicationCost", f"{at}.")))
    return edges


def ordered(ids: Iterable[int], edges: Edges, where: str) -> list[int]:
    """Order ids so that edges go forward; smaller ids first where there is a choice."""
    listed = sorted(ids)
    order = topological_order(listed, [(a, b) for a, b, _ in edges])
    if len(order) != len(listed):
        left = sorted(set(listed) - set(order))
        raise InvalidInputError(f"{where}: a cycle through {left[:5]} is not accepted")
    return order
