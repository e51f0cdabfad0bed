"""The command ``trace``: a PyTorch module as a graph on disk."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from phaze_fast.cli.models import show_graph
from phaze_fast.cli.output import AsJson, ToFile, emit
from phaze_fast.errors import InvalidInputError
from phaze_fast.models import GraphModel, from_torch

__all__ = ["add_commands"]


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
    """Call ``package.module:function``; give its module and example inputs."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise InvalidInputError(
            f"target: {target!r} is not accepted; expected package.module:function, "
            "file.py:function or a HuggingFace config.json"
        )
    try:
        found = getattr(_module(where), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInputError(f"target: {target!r}: {error}") from None
    given = found() if callable(found) else found
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise InvalidInputError(
            f"target: {name} gives {type(given).__name__}; expected (module, inputs) or "
            "(module, inputs, keyword arguments)"
        )
    module, inputs = given[0], given[1]
    named = dict(given[2]) if len(given) == 3 else {}
    if isinstance(inputs, dict):
        return module, (), {**inputs, **named}
    return module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), named


def _traced(target: str, name: str | None, dtype: str | None, seq: int | None) -> GraphModel:
    path = Path(target)
    if path.is_dir() or target.endswith(".json"):
        from phaze_fast.documents import read_document
        from phaze_fast.models.huggingface import trace_hf

        file = path / "config.json" if path.is_dir() else path
        title = file.resolve().parent.name if file.name == "config.json" else file.stem
        data = read_document(file)
        if not isinstance(data, dict):
            raise InvalidInputError(f"{file}: expected a mapping of keys to values")
        return trace_hf(data, name or title, str(file), seq)
    module, inputs, named = _called(target)
    title = name or target.rpartition(":")[2]
    return from_torch(module, inputs, named, name=title, dtype=dtype)


def trace(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:function or file.py:function, which gives (module, example "
            "inputs); or a HuggingFace config.json."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="What to call the model.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Number format of parameters and floating-point inputs.")
    ] = "bfloat16",
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence, with a config.json.")
    ] = None,
    as_traced: Annotated[
        bool,
        typer.Option(
            "--as-traced", help="Plan its operators one by one, also where they are a transformer."
        ),
    ] = False,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Record a training step of a PyTorch module as a graph that every command takes as MODEL.

    Example: phaze-fast trace examples/own_module.py:language -o model.json
    """
    found = _traced(target, name, dtype, seq).replace(as_traced=as_traced)
    emit(found.to_dict, lambda: show_graph(found), as_json, to_file)


def add_commands(app: typer.Typer) -> None:
    """Register this file's commands."""
    app.command("trace")(trace)
