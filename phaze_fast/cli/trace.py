"""The command ``trace``: a PyTorch module as a graph on disk."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from phaze_fast.cli.output import Output
from phaze_fast.cli.show_models import graph_tables
from phaze_fast.errors import InvalidInputError
from phaze_fast.models import GraphModel, from_torch


def _module(where: str) -> ModuleType:
    """Import a package's module, or a file that ends in .py."""
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(where).stem, where)
        if spec is None or spec.loader is None or not Path(where).is_file():
            raise InvalidInputError(f"{where}: there is no such file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(where)


def _called(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call ``package.module:function``; return its module and example inputs."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise InvalidInputError(
            f"target: {target!r} is not accepted; expected package.module:function, "
            "file.py:function or a HuggingFace config.json"
        )
    try:
        factory = getattr(_module(where), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"target: {target!r}: {error}") from None
    example = factory() if callable(factory) else factory
    if not isinstance(example, tuple | list) or len(example) not in (2, 3):
        raise InvalidInputError(
            f"target: {name} gives {type(example).__name__}; expected (module, inputs) or "
            "(module, inputs, keyword arguments)"
        )
    module, inputs = example[0], example[1]
    named = dict(example[2]) if len(example) == 3 else {}
    if isinstance(inputs, dict):
        return module, (), {**inputs, **named}
    return module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), named


@dataclass(frozen=True)
class Tracing:
    """How to record the module."""

    name: str | None = None
    """What to call the model."""
    dtype: str | None = "bfloat16"
    """Number format of parameters and floating-point inputs."""
    seq: int | None = None
    """Tokens of a sequence, with a config.json."""
    as_traced: bool = False
    """Plan the operators one by one, even if they form a transformer."""


def _traced(target: str, how: Tracing) -> GraphModel:
    path = Path(target)
    if path.is_dir() or target.endswith(".json"):
        from phaze_fast.documents import read_document
        from phaze_fast.models.huggingface import trace_hf

        file = path / "config.json" if path.is_dir() else path
        title = file.resolve().parent.name if file.name == "config.json" else file.stem
        data = read_document(file)
        if not isinstance(data, dict):
            raise InvalidInputError(f"{file}: expected a mapping of keys to values")
        return trace_hf(data, how.name or title, str(file), how.seq)
    module, inputs, named = _called(target)
    title = how.name or target.rpartition(":")[2]
    return from_torch(module, inputs, named, name=title, dtype=how.dtype)


def trace(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:function or file.py:function, which gives (module, example "
            "inputs); or a HuggingFace config.json."
        ),
    ],
    how: Tracing,
    output: Output,
) -> None:
    """Record a PyTorch module as a model for other commands.

    Example: phaze-fast trace examples/own_module.py:language -o model.json
    """
    graph = _traced(target, how).replace(as_traced=how.as_traced)
    output.emit(graph.to_dict, lambda: graph_tables(graph))
