"""Fields of a placement problem as JSON has them, checked one by one.

What is wrong is named: a message is one short line, whatever the value.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Any

from phaze_fast.errors import InvalidInputError, nearest

__all__ = [
    "LARGEST",
    "flag",
    "key_of",
    "known",
    "named",
    "number",
    "ordered",
    "shown",
    "whole",
    "widths",
]

LARGEST = 1e100
"""No size, time or rate is larger, so that no sum or product of them overflows."""

_LONGEST = 60
MOST_DEVICES = 2**29


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
    record: dict[str, Any], key: str, where: str, least: float = 0.0, most: float = LARGEST
) -> float:
    """Give a field that is a number between two limits."""
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
    record: dict[str, Any], key: str, where: str, least: int = 0, most: int = MOST_DEVICES
) -> int:
    """Give a field that is a whole number between two limits."""
    if key not in record:
        raise InvalidInputError(f"{where}{key}: missing; expected a whole number")
    value = record[key]
    if not _is_number(value) or not least <= value <= most or value != int(value):
        raise InvalidInputError(
            f"{where}{key}: {shown(value)} is not accepted; expected a whole number from {least} "
            f"to {most}"
        )
    return int(value)


def flag(record: dict[str, Any], key: str, where: str) -> bool:
    """Give a field that is true or false."""
    value = record.get(key)
    if not isinstance(value, bool):
        raise InvalidInputError(
            f"{where}{key}: {shown(value)} is not accepted; expected true or false"
        )
    return value


def known(record: Any, accepted: Collection[str], where: str) -> dict[str, Any]:
    """Give an object that has no other fields than those accepted."""
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


def key_of(record: dict[str, Any], key: str, where: str, among: Collection[int] | None) -> int:
    """Give the id of a node: a whole number, one of those known where that is asked for."""
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
    if among is None and not -MOST_DEVICES <= value <= MOST_DEVICES:
        raise InvalidInputError(
            f"{where}{key}: {shown(value)} is not accepted; expected an id from -2^29 to 2^29"
        )
    return value


def named(data: Any, name: str) -> tuple[str, Any]:
    """Give a problem's name and the problem itself, which may lie under ``input``."""
    if not isinstance(data, dict) or not isinstance(data.get("input"), dict):
        return name, data
    given = data.get("name", name)
    return given if isinstance(given, str) else shown(given), data["input"]


def widths(record: dict[str, Any]) -> list[int]:
    """Give the tensor-parallel widths that nodes and edges are there for."""
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


def ordered(ids: Iterable[int], edges: Iterable[tuple[int, int, float]], where: str) -> list[int]:
    """Order ids so that edges go forward; smaller ids first where there is a choice."""
    waiting = dict.fromkeys(ids, 0)
    after: dict[int, list[int]] = {i: [] for i in waiting}
    for a, b, _ in edges:
        waiting[b] += 1
        after[a].append(b)
    ready = [i for i, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for b in after[i]:
            waiting[b] -= 1
            if waiting[b] == 0:
                heapq.heappush(ready, b)
    if len(order) != len(waiting):
        left = sorted(set(waiting) - set(order))
        raise InvalidInputError(f"{where}: a cycle through {left[:5]} is not accepted")
    return order
