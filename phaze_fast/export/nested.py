"""Values of nested mappings by dotted path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["flat", "get", "put"]


def put(data: dict[str, Any], path: str, value: object) -> None:
    """Set the value at a path, making the mappings on the way.

    Examples
    --------
    >>> data: dict[str, Any] = {}
    >>> put(data, "a.b", 1)
    >>> data
    {'a': {'b': 1}}
    """
    *folders, last = path.split(".")
    for folder in folders:
        data = data.setdefault(folder, {})
    data[last] = value


def get(data: Mapping[str, Any], path: str) -> Any:
    """Give the value at a path, or None."""
    found: Any = data
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def flat(data: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Give all values by path.

    Examples
    --------
    >>> flat({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found
