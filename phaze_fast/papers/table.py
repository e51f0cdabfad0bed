"""The table of layers that the placement kernels read, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError

__all__ = ["LayerTable"]

Array = np.ndarray[Any, Any]

_BY_VARIANT = ("forward_s", "backward_s", "stash_bytes", "live_bytes")
_BY_LAYER = (
    "resident_bytes",
    "once_bytes",
    "gather_bytes",
    "sync_s",
    "step_s",
    "weight_grad_s",
)


def _numbers(name: str, value: Any) -> Array:
    """Numbers as an array; nothing is zero."""
    try:
        return np.asarray(0.0 if value is None else value, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidTypeError(f"{name}: {value!r} is not accepted; expected numbers") from None


def _pairs(name: str, pairs: Any) -> tuple[tuple[int, int], ...]:
    """Pairs of whole numbers."""
    try:
        return tuple((int(a), int(b)) for a, b in pairs)
    except (TypeError, ValueError):
        raise InvalidTypeError(
            f"{name}: {pairs!r} is not accepted; expected pairs of positions"
        ) from None


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Layers of a model under one strategy, in an order in which edges go forward.

    Arrays of variants have shape (variants, layers): a variant is a way to run all layers of a
    stage, such as with or without recomputation. Missing columns are zeros.

    Examples
    --------
    >>> table = LayerTable(names=("a", "b"), forward_s=[1.0, 1.0], backward_s=[2.0, 2.0])
    >>> table.forward_s.shape
    (1, 2)
    """

    names: Sequence[str | int]
    """One per layer."""
    forward_s: Any
    """Seconds per micro-batch, shape (variants, layers) or (layers,)."""
    backward_s: Any
    """Seconds per micro-batch, what is recomputed included."""
    stash_bytes: Any = None
    """Kept for every micro-batch in flight."""
    live_bytes: Any = None
    """Of one layer at a time; the largest of a stage counts."""
    resident_bytes: Any = None
    """Weights, gradients, optimiser state."""
    once_bytes: Any = None
    """Kept once, however many micro-batches are in flight."""
    gather_bytes: Any = None
    """Of one layer at a time, beside `live_bytes`."""
    sync_s: Any = None
    """Seconds to synchronise its gradients."""
    step_s: Any = None
    """Seconds of the optimiser."""
    weight_grad_s: Any = None
    """Part of `backward_s` that can wait, for zero-bubble schedules."""
    wide: Any = None
    """Whether a stage with this layer takes as many devices as the width; by default yes."""
    edges: Sequence[tuple[int, int]] | None = None
    """Pairs of positions; by default a chain."""
    edge_s: Any = None
    """Seconds to send what an edge carries from stage to stage, one way."""
    edge_bytes: Any = None
    """Bytes that an edge carries."""
    tied: Sequence[tuple[int, int]] = ()
    """Pairs of positions that one stage must hold."""
    variants: Sequence[str] = ()
    """Names of the variants."""

    def __post_init__(self) -> None:
        count = len(self.names)
        put = object.__setattr__
        for name in _BY_VARIANT:
            value = getattr(self, name)
            put(self, name, np.atleast_2d(_numbers(name, value)))
        most = max(getattr(self, name).shape[0] for name in _BY_VARIANT)
        if not 1 <= count <= _core.MAX_PLACED_LAYERS:
            raise InvalidInputError(
                f"names: {count} layers are not accepted; expected 1 to {_core.MAX_PLACED_LAYERS}"
            )
        if most > _core.MAX_VARIANTS:
            raise InvalidInputError(
                f"variants: {most} are not accepted; expected at most {_core.MAX_VARIANTS}"
            )
        for name in _BY_VARIANT:
            put(self, name, self._stretched(name, (most, count)))
        for name in _BY_LAYER:
            value = getattr(self, name)
            put(self, name, _numbers(name, value))
            put(self, name, self._stretched(name, (count,)))
        put(self, "wide", _numbers("wide", 1.0 if self.wide is None else self.wide))
        put(self, "wide", (self._stretched("wide", (count,)) != 0).astype(np.uint8))
        edges = self.edges
        pairs = [(i, i + 1) for i in range(count - 1)] if edges is None else list(edges)
        put(self, "edges", _pairs("edges", pairs))
        for name in ("edge_s", "edge_bytes"):
            value = getattr(self, name)
            put(self, name, _numbers(name, value))
            put(self, name, self._stretched(name, (len(pairs),)))
        self._check_pairs("edges", self.edges or (), forward=True)
        put(self, "tied", _pairs("tied", self.tied))
        self._check_pairs("tied", self.tied, forward=False)
        if not self.variants:
            put(self, "variants", tuple(str(v) for v in range(most)))
        if len(self.variants) != most:
            raise InvalidInputError(
                f"variants: {len(self.variants)} names are not accepted; expected {most}"
            )

    def _stretched(self, name: str, shape: tuple[int, ...]) -> Array:
        value = getattr(self, name)
        try:
            array = np.ascontiguousarray(np.broadcast_to(value, shape), dtype=np.float64)
        except ValueError:
            raise InvalidInputError(
                f"{name}: shape {value.shape} is not accepted; expected {shape}"
            ) from None
        bad = ~np.isfinite(array) | (array < 0)
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise InvalidInputError(
                f"{name}[{', '.join(map(str, at))}]: {array[at]} is not accepted; "
                "expected a finite number, zero or more"
            )
        return array

    def _check_pairs(self, name: str, pairs: Sequence[tuple[int, int]], forward: bool) -> None:
        count = len(self.names)
        for a, b in pairs:
            if not (0 <= a < count and 0 <= b < count and (a < b or not forward)):
                way = " that go forward" if forward else ""
                raise InvalidInputError(
                    f"{name}: ({a}, {b}) is not accepted; expected positions 0 to {count - 1}{way}"
                )

    def __len__(self) -> int:
        return len(self.names)

    def only(self, variant: int) -> LayerTable:
        """Give the same layers with one variant alone."""
        chosen = {name: getattr(self, name)[variant][None, :] for name in _BY_VARIANT}
        return replace(self, variants=(self.variants[variant],), **chosen)

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Arrays by the names that the kernel reads."""
        ends = np.array(self.edges or (), dtype=np.int32).reshape(-1, 2)
        tied = np.array(self.tied or (), dtype=np.int32).reshape(-1, 2)
        return {
            **{name: getattr(self, name).reshape(-1) for name in _BY_VARIANT},
            **{name: getattr(self, name) for name in _BY_LAYER},
            "wide": self.wide,
            "edge_from": ends[:, 0].copy(),
            "edge_to": ends[:, 1].copy(),
            "edge_s": self.edge_s,
            "edge_bytes": self.edge_bytes,
            "tied_from": tied[:, 0].copy(),
            "tied_to": tied[:, 1].copy(),
        }
