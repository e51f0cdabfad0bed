"""The command `models`: the models that come with the package, and their sizes."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import AsJson, ToFile, emit, fields, table
from phaze_fast.models import (
    GraphModel,
    Model,
    TransformerModel,
    load,
    names,
    recognised,
    why_not_recognised,
)
from phaze_fast.units import format_bytes, format_count

__all__ = ["add_commands"]

_COLUMNS = ["model", "layers>", "hidden>", "heads>", "kv>", "ffn>", "vocab>", "seq>", "parameters>"]


def _row(model: TransformerModel) -> list[str]:
    encoder = f"{model.encoder_layers}+" if model.encoder_layers else ""
    experts = f" x {model.moe.experts}" if model.moe else ""
    return [
        model.name,
        f"{encoder}{model.layers}",
        format_count(model.hidden),
        str(model.heads),
        str(model.kv_heads or model.heads),
        f"{model.ffn:,}{experts}",
        format_count(model.vocab) if model.vocab else "-",
        format_count(model.seq),
        format_count(model.parameters()),
    ]


def _data(model: Model) -> dict[str, Any]:
    return {
        **model.model_dump(mode="json"),
        "parameters": model.parameters(),
        "active_parameters": model.active_parameters(),
        "parameters_by_part": model.parameters_by_part(),
    }


def _show(model: Model) -> list[RenderableType]:
    if isinstance(model, GraphModel):
        return show_graph(model)
    total = model.parameters()
    rows = [
        [part, format_count(count), f"{count / total:.1%}"]
        for part, count in model.parameters_by_part().items()
    ]
    rows.append(["all", format_count(total), "100.0%"])
    plain = model.model_dump(mode="json", exclude={"sources", "notes", "name"})
    pairs = [(name, str(value)) for name, value in plain.items() if value not in (None, "", False)]
    pairs += [("source", source) for source in model.sources]
    if model.notes:
        pairs.append(("note", model.notes))
    return [fields(model.name, pairs), table("Parameters", ["part", "count>", "share>"], rows)]


def _planned_as(model: GraphModel) -> str:
    known = recognised(model)
    if known is None:
        why = why_not_recognised(model)
        return f"its operators one by one, because it is no known transformer: {why}"
    return f"a transformer of {known.blocks} blocks of {known.hidden}, {known.heads} heads"


def show_graph(model: GraphModel) -> list[RenderableType]:
    """Tabulate the layers of a graph."""
    rows = [
        [
            layer.name,
            str(layer.count),
            format_count(layer.parameters),
            f"{layer.flops:.3g}",
            f"{len(layer.forward)} + {len(layer.backward)}",
            format_bytes(sum(t.bytes + t.fixed_bytes for t in layer.saved)),
            layer.unsplit or "yes",
        ]
        for layer in model.layers
    ]
    pairs = [
        ("parameters", format_count(model.parameters())),
        ("tokens of a sample", format_count(model.seq)),
        ("FLOPs of a sample, forward", f"{model.flops:.4g}"),
        ("planned as", _planned_as(model)),
    ]
    pairs += [("note", model.notes)] if model.notes else []
    columns = ["layer", "count>", "parameters>", "FLOPs>", "operators>", "kept>", "tensor parallel"]
    return [fields(model.name, pairs), table("Layers, for one sample", columns, rows)]


def show_models(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, a .yaml file, a HuggingFace config.json or its folder; without "
            "it all presets are listed."
        ),
    ] = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """List the models that come with the package, or show one in full with its sources."""
    if name is not None:
        model = load(name)
        emit(lambda: _data(model), lambda: _show(model), as_json, to_file)
        return
    found = [load(n) for n in names()]
    rows = [_row(model) for model in found if isinstance(model, TransformerModel)]
    human = [table("Models", _COLUMNS, rows)]
    emit(lambda: [_data(m) for m in found], lambda: list(human), as_json, to_file)


def add_commands(app: typer.Typer) -> None:
    """Register this file's commands."""
    app.command("models")(show_models)
