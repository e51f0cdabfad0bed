"""How one operator is mapped: its parts along each axis, its output, weights and collectives."""

from __future__ import annotations

from dataclasses import dataclass

from phaze_fast.wafer.operators import ROLES

__all__ = ["OperatorMapping", "Runs"]

Runs = tuple[tuple[str, int], ...]
"""Roles and factors along an axis of a rectangle of dies, from the inside out."""


@dataclass(frozen=True)
class OperatorMapping:
    """How one operator is mapped."""

    operator: str
    x: Runs
    """(role, factor) along a row of its rectangle, from the inside out."""
    y: Runs
    """(role, factor) along a column."""
    output: tuple[str, ...] = ("stash",)
    """stash, recompute or offload in each stage it stands in."""
    weights: str = "replicated"
    """One of `WEIGHTS`."""
    collective: str = "auto"
    """One of `MESH_ALGORITHMS`."""

    @property
    def partition(self) -> dict[str, int]:
        """Parts of each dimension, and copies."""
        parts = dict.fromkeys(ROLES, 1)
        for role, factor in (*self.x, *self.y):
            parts[role] *= factor
        return parts
