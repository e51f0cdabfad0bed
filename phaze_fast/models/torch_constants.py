"""Values of arrays that depend on no input, followed while a step is recorded: positions, masks."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]

__all__ = ["Constants"]

_MOST = {torch.bool: 2**28}  # elements of a constant whose values are followed, by type
_MOST_OF_OTHERS = 2**24
_MOST_BYTES = 2**30  # of all of them
_HIDDEN = -1e4  # scores that are lowered by more are those of hidden keys
_CHANCE = frozenset({"rand", "rand_like", "randn", "randn_like", "randint", "bernoulli", "uniform"})


class Constants:
    """Values of arrays that depend on no input.

    Control flow may depend on them, as on anything that is the same in every step. Random numbers
    are the lowest of their range, or the highest: two recordings show whether control flow depends
    on them.

    Parameters
    ----------
    highest
        Whether random numbers are the highest of their range.
    """

    def __init__(self, highest: bool = False) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by identity, as long as it lives
        self._chance = 1.0 - 2.0**-24 if highest else 0.0
        self._drawn: dict[int, str] = {}
        self.random_lines: list[str] = []
        """Source lines at which a number was read that depends on chance."""

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) in self._known:
                return self._known[id(value)][1]
            if not value.is_meta:
                return value
            raise KeyError(id(value))
        if isinstance(value, tuple | list):
            return type(value)(self._of(one) for one in value)
        return value

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute what an operator on constants gives, where that is small and known."""
        outputs = out if isinstance(out, tuple | list) else (out,)
        if self._held_bytes() > _MOST_BYTES or any(
            not isinstance(x, torch.Tensor) or x.numel() > _MOST.get(x.dtype, _MOST_OF_OTHERS)
            for x in outputs
        ):
            return
        name = func.overloadpacket.__name__.removesuffix("_")
        drawn = name in _CHANCE or any(id(x) in self._drawn for x in (*args, *kwargs.values()))
        try:
            given = {key: self._of(value) for key, value in kwargs.items()}
            if "device" in given:
                given["device"] = "cpu"
            if name in _CHANCE:
                made: Any = torch.full(tuple(out.shape), self._chance, dtype=torch.float32)
                made = made.to(out.dtype)
            else:
                made = func(*self._of(tuple(args)), **given)
        except (KeyError, RuntimeError, NotImplementedError):
            return  # it depends on an input, or has no values
        values = made if isinstance(made, tuple | list) else (made,)
        for tensor, value in zip(outputs, values, strict=True):
            key = id(tensor)
            self._known[key] = (weakref.ref(tensor, partial(self._forget, key)), value)
            if drawn:
                self._drawn[key] = name

    def _forget(self, key: int, _: Any) -> None:
        self._known.pop(key, None)
        self._drawn.pop(key, None)

    def _held_bytes(self) -> int:
        storages = [value.untyped_storage() for _, value in self._known.values()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def value(self, tensor: Any, constant: bool, line: str) -> Any:
        """Give the number in an array of one."""
        if not constant or (tensor.is_meta and id(tensor) not in self._known):
            raise RuntimeError("control flow, or a number, that depends on data")
        if id(tensor) in self._drawn:
            self.random_lines.append(line)
        return self._of(tensor).item()

    def mask(self, tensor: Any, either: bool = False) -> dict[str, Any]:
        """Say what a mask of scores hides: all that follows a token, or what is far before it.

        With `either`, a mask may also be true where scores are hidden.
        """
        try:
            values = self._of(tensor)
        except KeyError:
            return {}
        if values.dim() < 2 or not values.numel():
            return {}
        shown = values if values.dtype == torch.bool else values > _HIDDEN
        plane = shown[(0,) * (shown.dim() - 2)]
        if plane.shape[0] != plane.shape[1] or not plane.shape[0]:
            return {}
        spread = all(
            step == 0 or size == 1
            for step, size in zip(shown.stride()[:-2], shown.shape[:-2], strict=True)
        )
        if not spread and not torch.equal(shown, plane.expand_as(shown)):
            return {}
        return _pattern(plane) or (_pattern(~plane) if either else {})


def _pattern(plane: Any) -> dict[str, Any]:
    """Say whether a square mask is causal, and how many keys the last query sees of a window."""
    keys, shown = plane.shape[0], plane.to(torch.uint8)
    counts, order = shown.sum(1), torch.arange(plane.shape[0])
    seen = int(counts[-1])
    first, last = shown.argmax(1), keys - 1 - shown.flip(1).argmax(1)
    if not (
        seen > 0
        and torch.equal(last, order)
        and torch.equal(first, (order + 1 - seen).clamp(min=0))
        and torch.equal(counts, last - first + 1)
    ):
        return {}
    return {"causal": True, "window": seen if seen < keys else 0}
