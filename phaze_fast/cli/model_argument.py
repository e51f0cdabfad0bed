"""The model that a command is given, and what its reader should be told of it."""

from __future__ import annotations

from phaze_fast import models
from phaze_fast.cli.output import note

__all__ = ["MODEL_HELP", "load_model"]

MODEL_HELP = (
    "The model: a preset (`phaze-fast models` lists them), a .yaml or .json file, or a folder with "
    "a HuggingFace config.json."
)


def load_model(name: str, seq: int | None = None) -> models.Model:
    """Load a model; say which sequence length it is reckoned with where nobody chose one."""
    found = models.load(name)
    if seq is None and found.notes.startswith("seq "):
        note(f"{found.name}: {found.notes}; --seq sets another")
    return found
