"""The command `show model`: the sizes of a model, or its operators and memory on one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.option_groups import RecordOptions
from phaze_fast.cli.options import Trained, load_model
from phaze_fast.cli.output import Output, fields, table
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.memory import Pipeline, footprint
from phaze_fast.models import (
    GraphModel,
    Model,
    TransformerModel,
    load,
    names,
    recognised,
    why_not_recognised,
)
from phaze_fast.opgraph import (
    GROUPS,
    KINDS,
    UNITS,
    Fusion,
    LayerGraph,
    OpGraph,
    Strategy,
    layer_graph,
)
from phaze_fast.units import format_bytes, format_count

# ---- sizes ----

_SIZES = ["model", "parameters>", "layers>", "hidden>", "heads>", "kv>", "ffn>", "vocab>", "seq>"]


def _row(model: TransformerModel) -> list[str]:
    layers = f"{model.encoder_layers}+{model.layers}" if model.encoder_layers else str(model.layers)
    heads = [format_count(model.hidden), str(model.heads), str(model.kv_heads or model.heads)]
    ffn = f"{model.ffn:,} x {model.moe.experts}" if model.moe else f"{model.ffn:,}"
    vocab = format_count(model.vocab) if model.vocab else "-"
    first = [model.name, format_count(model.parameters()), layers]
    return [*first, *heads, ffn, vocab, format_count(model.seq)]


def _data(model: Model) -> dict[str, Any]:
    return {
        **model.model_dump(mode="json"),
        "parameters": model.parameters(),
        "active_parameters": model.active_parameters(),
        "trained_parameters": model.trained_parameters(),
        "parameters_by_part": model.parameters_by_part(),
    }


def _size_tables(model: Model) -> list[RenderableType]:
    if isinstance(model, GraphModel):
        return graph_tables(model)
    total = model.parameters()
    rows = [
        [part, format_count(count), f"{count / total:.1%}"]
        for part, count in model.parameters_by_part().items()
    ]
    rows.append(["all", format_count(total), "100.0%"])
    trained = model.trained_parameters()
    if trained < total:
        rows.append(["trained", format_count(trained), f"{trained / total:.1%}"])
    plain = model.model_dump(mode="json", exclude={"sources", "notes", "name"})
    pairs = [(name, str(value)) for name, value in plain.items() if value not in (None, "", False)]
    pairs += [*(("source", source) for source in model.sources), ("note", model.notes)]
    return [fields(model.name, pairs), table("Parameters", ["part", "count>", "share>"], rows)]


def _planned_as(model: GraphModel) -> str:
    known = recognised(model)
    if known is None:
        why = why_not_recognised(model)
        return f"its operators one by one, because it is no known transformer: {why}"
    return f"a transformer of {known.blocks} blocks of {known.hidden}, {known.heads} heads"


def graph_tables(model: GraphModel) -> list[RenderableType]:
    """Tabulate the layers of a graph."""
    rows = []
    for layer in model.layers:
        stored = format_bytes(sum(t.bytes + t.fixed_bytes for t in layer.saved))
        first = [layer.name, str(layer.count), format_count(layer.parameters), f"{layer.flops:.3g}"]
        operators = f"{len(layer.forward)} + {len(layer.backward)}"
        rows.append([*first, operators, stored, layer.unsplit or "yes"])
    pairs = [
        ("parameters", format_count(model.parameters())),
        ("trained parameters", format_count(model.trained_parameters())),
        ("tokens of a sample", format_count(model.seq)),
        ("FLOPs of a sample, forward", f"{model.flops:.4g}"),
        ("planned as", _planned_as(model)),
        ("note", model.notes),
    ]
    names = "layer", "count>", "parameters>", "FLOPs>", "operators>", "stored>", "tensor parallel"
    return [fields(model.name, pairs), table("Layers, for one sample", list(names), rows)]


# ---- operators and memory ----

_MODES = ("none", "selective", "full")
_OPERATORS = ["operator", "unit", "b>", "m>", "n>", "k>", "GFLOP>", "read>", "written>", "payload>"]


def _op_rows(graph: OpGraph) -> list[list[str]]:
    rows = []
    for name, op in zip(graph.names, graph.ops, strict=True):
        network = UNITS[op["unit"]] == "NET"
        sizes = [format_bytes(float(op[f"{way}_bytes"])) for way in ("read", "write", "payload")]
        moved = ["", "", sizes[2]] if network else [*sizes[:2], ""]
        flops = f"{op['flops'] / 1e9:.4g}" if op["flops"] else ""
        shape = (str(op[d]) if op[d] else "" for d in "bmnk")
        rows.append([name, UNITS[op["unit"]], *shape, flops, *moved])
    return rows


def _op_data(graph: OpGraph) -> list[dict[str, Any]]:
    operators = []
    for i, (name, op) in enumerate(zip(graph.names, graph.ops, strict=True)):
        plain = {field: op[field].tolist() for field in graph.ops.dtype.names or ()}
        plain["kind"], plain["unit"] = KINDS[op["kind"]], UNITS[op["unit"]]
        plain["group"] = GROUPS[op["group"]]
        after = graph.indices[graph.indptr[i] : graph.indptr[i + 1]].tolist()
        operators.append({"name": name, **plain, "successors": after})
    return operators


def _graph_data(graph: LayerGraph, memory: list[dict[str, float]]) -> dict[str, Any]:
    return {
        "model": graph.model.name,
        "strategy": graph.strategy.model_dump(mode="json"),
        "parameters": graph.model.parameters(),
        "flops": graph.flops,
        "layers": [
            {
                "kind": layer.kind,
                "count": layer.count,
                "parameters": layer.parameters,
                "device_parameters": layer.device_parameters,
                "flops": {"forward": layer.forward.flops, "backward": layer.backward.flops},
                "forward": _op_data(layer.forward),
                "backward": _op_data(layer.backward),
                "stash": [vars(tensor) for tensor in layer.forward.tensors],
                "stashed_bytes": {mode: layer.forward.stashed_bytes(mode) for mode in _MODES},
            }
            for layer in graph.layers
        ],
        "memory": memory,
    }


def _operator_tables(graph: LayerGraph, memory: list[dict[str, float]]) -> list[RenderableType]:
    shown: list[RenderableType] = [str(graph.model)]
    for layer in graph.layers:
        title = f"{layer.kind} x {layer.count}: "
        shown.append(table(f"{title}forward", _OPERATORS, _op_rows(layer.forward)))
        shown.append(table(f"{title}backward", _OPERATORS, _op_rows(layer.backward)))
        stashed = [[t.name, t.producer, format_bytes(t.bytes)] for t in layer.forward.tensors]
        modes = ", ".join(f"{m} {format_bytes(layer.forward.stashed_bytes(m))}" for m in _MODES)
        caption = f"stored per micro-batch, by recomputation: {modes}"
        shown.append(table(f"{title}stored", ["tensor", "producer", "size>"], stashed, caption))
    terms = list(memory[0])
    rows = [
        [str(stage), *(format_bytes(bytes_[term]) for term in terms)]
        for stage, bytes_ in enumerate(memory)
    ]
    title = "Memory of one device, by pipeline stage"
    shown.append(table(title, ["stage", *(f"{term}>" for term in terms)], rows))
    return shown


# ---- the command ----


@dataclass(frozen=True)
class Operators:
    """What to show."""

    operators: bool = False
    """Show the model's operators on one device, their work and traffic, and the memory of each
    stage, instead of its sizes; all other options belong to it."""
    recompute: str | None = None
    """none (default), selective, needed, full, or sets joined by +: norms, activations,
    gated-product, up-projection, output-projection, alternate-products, attention."""
    optimizer: str | None = None
    """The optimiser, whose state takes memory (default adam)."""
    fusion: Annotated[Fusion | None, typer.Option(metavar="NAME")] = None
    """What is fused: none (default), epilogues (element-wise operators onto the product before
    them) or full (also products with one another)."""


def show_model(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A preset, a .yaml or .json file, a HuggingFace config.json or its folder; "
            "without it all presets are listed."
        ),
    ] = None,
    *,
    trained: Trained,
    shown: Operators,
    strategy: Annotated[dict[str, Any], RecordOptions(Strategy)],
    pipeline: Annotated[dict[str, Any], RecordOptions(Pipeline)],
    output: Output,
) -> None:
    """List models, or show the sizes or operators of one.

    Example: phaze-fast show model gpt3-175b --operators --tp 8 --sequence-parallel --pp 12
    --micro-batches 64 --recompute selective
    """
    typed = {**strategy, **pipeline, **vars(shown)}
    typed = {option: value for option, value in typed.items() if value not in (None, False)}
    if typed and not shown.operators:
        raise InvalidInputError(f"{next(iter(typed))}: is not accepted without --operators")
    if name is None:
        _list_models(output)
    elif shown.operators:
        model = load_model(name, strategy.get("seq"), trained.lora)
        _show_operators(model, Strategy(**strategy), Pipeline(**pipeline), shown, output)
    else:
        model = load_model(name, 1, trained.lora)
        output.emit(lambda: _data(model), lambda: _size_tables(model))


def _list_models(output: Output) -> None:
    presets = [load(preset) for preset in names()]
    rows = [_row(model) for model in presets if isinstance(model, TransformerModel)]
    output.emit(lambda: list(map(_data, presets)), lambda: [table("Models", _SIZES, rows)])


def _show_operators(
    model: Model, strategy: Strategy, pipeline: Pipeline, shown: Operators, output: Output
) -> None:
    try:
        graph = layer_graph(model, strategy, shown.fusion or "none")
    except InfeasibleError as error:
        output.infeasible(error)
        return
    memory = []
    for stage in range(pipeline.pp):
        recompute, optimizer = shown.recompute or "none", shown.optimizer or "adam"
        bytes_ = footprint(graph, pipeline, stage, recompute, optimizer)
        memory.append({**bytes_.terms, "total": bytes_.total})
    output.emit(lambda: _graph_data(graph, memory), lambda: _operator_tables(graph, memory))
