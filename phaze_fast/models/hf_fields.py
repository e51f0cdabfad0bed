"""The fields of a HuggingFace configuration, ticked off as they are used.

A field that is absent has the default of its architecture, as in transformers;
``data/hf_defaults.json`` lists those that operators depend on. ``data/hf_aliases.json`` lists the
fields that transformers also takes by a second name (``attribute_map`` of its configurations).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from phaze_fast.errors import InvalidInputError, nearest

__all__ = ["Fields", "NotModelledError"]

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
    "relu": "relu",
    "relu2": "relu",
    "silu": "silu",
    "swish": "silu",
}
_GELU_BY_STEPS = ("gelu_new", "gelu_fast")  # transformers writes them operator by operator
_FULL, _WINDOWED = "full_attention", "sliding_attention"


class NotModelledError(InvalidInputError):
    """A feature that records do not hold; PyTorch may be able to trace it."""


@cache
def _data(name: str) -> Any:
    text = (resources.files(__package__) / "data" / name).read_text("utf-8")
    if name.endswith(".json"):
        return json.loads(text)
    return frozenset(line for line in text.splitlines() if not line.startswith("#"))


class Fields:
    """A configuration whose fields are ticked off as they are used."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data = dict(data)
        self.source = source
        self.used = {"model_type"}
        self.gelu_by_steps = False
        self.defaults: Mapping[str, Any] = _data("hf_defaults.json").get(data["model_type"], {})
        spellings = _data("hf_aliases.json").get(data["model_type"], {})
        self._other = spellings | {native: alias for alias, native in spellings.items()}
        """The second name that transformers takes for a field, either way."""

    def take(self, name: str, default: Any = ...) -> Any:
        """Value of a field, or its default; a field without one must be given."""
        other = self._other.get(name, name)
        self.used.update((name, other))
        at = name if name in self.data or other not in self.data else other
        value = self.data[at] if at in self.data else self.defaults.get(name)
        if value is not None:
            return value
        if default is ...:
            raise InvalidInputError(f"{self.source}: {name}: is missing and has no default")
        return default

    def first(self, *names: str) -> str:
        """Name of the first of several spellings of a field that is given."""
        self.used.update(names)
        return next((name for name in names if self.data.get(name) is not None), names[0])

    def whole(self, name: str, default: Any = ...) -> int:
        """Whole number, 0 or more."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidInputError(
                f"{self.source}: {name}: {value!r} is not accepted; expected a whole number"
            )
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Whether something is so."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise InvalidInputError(
                f"{self.source}: {name}: {value!r} is not accepted; expected true or false"
            )
        return value

    def require(self, name: str, wanted: Any, why: str) -> None:
        """Accept a field only at the one value that is modelled."""
        value = self.take(name, wanted)
        if value != wanted:
            raise NotModelledError(
                f"{self.source}: {name}: {value!r} is not modelled; expected {wanted!r} ({why})"
            )

    def activation(self, name: str, default: Any = ...) -> str:
        """Name of a non-linearity."""
        return self.named_activation(name, self.take(name, default))

    def named_activation(self, name: str, value: Any, shown: Any = None) -> str:
        """Non-linearity that a field names by `value`, written there as `shown`."""
        if value not in _ACTIVATIONS:
            raise NotModelledError(
                f"{self.source}: {name}: activation {shown or value!r} is not modelled; "
                f"{nearest(str(value), _ACTIVATIONS)}"
            )
        self.gelu_by_steps = value in _GELU_BY_STEPS
        return _ACTIVATIONS[value]

    def drops(self, *names: str) -> bool:
        """Whether any of several dropouts is on."""
        taken = [bool(self.take(name, 0.0)) for name in names]  # every one is ticked off
        return any(taken)

    def windows(self, layers: int, every: int | None = None) -> dict[str, Any]:
        """Window of attention, and the layers without: listed, or each `every`-th one."""
        window, kinds = self.take("sliding_window", None), self.take("layer_types", None)
        pattern = self.take(self.first("sliding_window_pattern", "_sliding_window_pattern"), None)
        listed = kinds or []
        for kind in listed:
            if kind not in (_FULL, _WINDOWED):
                raise NotModelledError(
                    f"{self.source}: layer_types: {kind!r} is not modelled; expected {_FULL!r} or "
                    f"{_WINDOWED!r}"
                )
        used, first = self.take("use_sliding_window", True), self.take("max_window_layers", 0)
        if not window or not used:
            return {}
        window = self.whole("sliding_window")
        if kinds is not None:
            full = [at for at, kind in enumerate(listed[:layers]) if kind == _FULL]
        elif isinstance(pattern or every, int):
            step = int(pattern or every or 1)
            full = [at for at in range(layers) if (at + 1) % step == 0]
        else:
            full = list(range(min(first, layers)))
        return {"window": window, "full_attention_layers": tuple(full)}

    def no_windows(self) -> None:
        """Refuse a window that the architecture does not have."""
        window, longest = self.take("sliding_window", None), self.take("max_position_embeddings", 0)
        if window is not None and self.take("use_sliding_window", True) and window < longest:
            raise InvalidInputError(
                f"{self.source}: sliding_window: {window!r} is not modelled; attention over a "
                "window of a sequence (null or use_sliding_window: false is accepted)"
            )
        for kind in self.take("layer_types", ()):
            if kind != _FULL:
                raise InvalidInputError(
                    f"{self.source}: layer_types: {kind!r} is not modelled; expected {_FULL!r}"
                )

    def finish(self) -> None:
        """Refuse whatever was neither used nor known to change nothing."""
        idle = _data("hf_idle.txt")
        for name, value in self.data.items():
            if name not in self.used and name not in idle and value not in (None, False):
                raise InvalidInputError(
                    f"{self.source}: {name}: {value!r} is not modelled; remove it, or set it to "
                    "null if it does not matter"
                )
