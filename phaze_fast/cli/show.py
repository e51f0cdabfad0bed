"""The command `show`: a model's operators on one device, their FLOPs, bytes and memory."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import RenderableType

from phaze_fast.cli.model_argument import load_model
from phaze_fast.cli.output import AsJson, ToFile, emit, emit_infeasible, table
from phaze_fast.errors import InfeasibleError
from phaze_fast.memory import Pipeline, footprint
from phaze_fast.opgraph import GROUPS, KINDS, UNITS, LayerGraph, OpGraph, Strategy, layer_graph
from phaze_fast.units import format_bytes

__all__ = ["add_commands"]

_COLUMNS = ["operator", "unit", "b>", "m>", "n>", "k>", "GFLOP>", "read>", "written>", "payload>"]


def _op_rows(graph: OpGraph) -> list[list[str]]:
    rows = []
    for name, op in zip(graph.names, graph.ops, strict=True):
        network = UNITS[op["unit"]] == "NET"
        rows.append(
            [
                name,
                UNITS[op["unit"]],
                *(str(op[d]) if op[d] else "" for d in "bmnk"),
                f"{op['flops'] / 1e9:.4g}" if op["flops"] else "",
                "" if network else format_bytes(float(op["read_bytes"])),
                "" if network else format_bytes(float(op["write_bytes"])),
                format_bytes(float(op["payload_bytes"])) if network else "",
            ]
        )
    return rows


def _op_data(graph: OpGraph) -> list[dict[str, Any]]:
    found = []
    for i, (name, op) in enumerate(zip(graph.names, graph.ops, strict=True)):
        plain = {field: op[field].item() for field in graph.ops.dtype.names or ()}
        plain["kind"], plain["unit"] = KINDS[op["kind"]], UNITS[op["unit"]]
        plain["group"] = GROUPS[op["group"]]
        after = graph.indices[graph.indptr[i] : graph.indptr[i + 1]].tolist()
        found.append({"name": name, **plain, "successors": after})
    return found


def _data(graph: LayerGraph, plans: list[dict[str, float]]) -> dict[str, Any]:
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
                "stashed_bytes": {
                    mode: layer.forward.stashed_bytes(mode)
                    for mode in ("none", "selective", "full")
                },
            }
            for layer in graph.layers
        ],
        "memory": plans,
    }


def _human(graph: LayerGraph, plans: list[dict[str, float]]) -> list[RenderableType]:
    shown: list[RenderableType] = [str(graph.model)]
    for layer in graph.layers:
        title = f"{layer.kind} x {layer.count}: "
        shown.append(table(f"{title}forward", _COLUMNS, _op_rows(layer.forward)))
        shown.append(table(f"{title}backward", _COLUMNS, _op_rows(layer.backward)))
        kept = [[t.name, t.producer, format_bytes(t.bytes)] for t in layer.forward.tensors]
        modes = ", ".join(
            f"{mode} {format_bytes(layer.forward.stashed_bytes(mode))}"
            for mode in ("none", "selective", "full")
        )
        caption = f"kept per micro-batch, by recomputation: {modes}"
        shown.append(table(f"{title}kept", ["tensor", "made by", "size>"], kept, caption))
    terms = list(plans[0])
    rows = [[str(i), *(format_bytes(plan[term]) for term in terms)] for i, plan in enumerate(plans)]
    title = "Memory of one device, by pipeline stage"
    shown.append(table(title, ["stage", *(f"{term}>" for term in terms)], rows))
    return shown


def show(
    model: Annotated[
        str,
        typer.Argument(
            help="The model: a preset (`phaze-fast models` lists them), a .yaml or .json "
            "file, or a folder with a HuggingFace config.json."
        ),
    ],
    tp: Annotated[
        int, typer.Option(help="Devices that share each layer (tensor parallelism).")
    ] = 1,
    sp: Annotated[
        bool, typer.Option("--sp", help="Share the rows of norms among tensor-parallel devices.")
    ] = False,
    cp: Annotated[
        int, typer.Option(help="Devices that share each sequence (context parallelism).")
    ] = 1,
    ep: Annotated[
        int, typer.Option(help="Devices that share the experts of a layer (expert parallelism).")
    ] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Replicas of the model (data parallelism).")] = 1,
    zero: Annotated[
        int,
        typer.Option(
            help="What replicas share: 0 nothing, 1 optimiser state, 2 gradients too, 3 "
            "weights too."
        ),
    ] = 0,
    micro_batch: Annotated[int, typer.Option(help="Sequences a device works on at once.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of one step.")] = 1,
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence (default: as the model is published).")
    ] = None,
    recompute: Annotated[
        str,
        typer.Option(
            help="none, selective, needed, full, or sets joined by +: norms, activations, "
            "gated-product, up-projection, output-projection, alternate-products, attention."
        ),
    ] = "none",
    schedule: Annotated[
        str,
        typer.Option(help="1f1b, gpipe, interleaved, zb-h1, zb-h2, zb-v, dualpipe or dualpipe-v."),
    ] = "1f1b",
    vpp: Annotated[
        int, typer.Option(help="Chunks of the model on a device where the schedule is interleaved.")
    ] = 1,
    optimizer: Annotated[
        str, typer.Option(help="The optimiser, whose state takes memory: adam, sgd and others.")
    ] = "adam",
    fused: Annotated[
        bool,
        typer.Option(
            "--fused", help="Count element-wise operators as part of the product before them."
        ),
    ] = False,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Show the operators of a model on one device, their work and traffic, and its memory."""
    strategy = Strategy(
        tp=tp,
        sequence_parallel=sp,
        cp=cp,
        ep=ep,
        micro_batch=micro_batch,
        seq=seq,
    )
    plan = Pipeline.from_dict(
        {
            "stages": pp,
            "micro_batches": micro_batches,
            "schedule": schedule,
            "vpp": vpp,
            "dp": dp,
            "zero": zero,
        }
    )
    try:
        graph = layer_graph(load_model(model, seq), strategy, fused)
    except InfeasibleError as error:
        emit_infeasible(error, as_json, to_file)
        return
    plans = []
    for stage in range(pp):
        held = footprint(graph, plan, stage, recompute, optimizer)
        plans.append({**held.terms, "total": held.total})
    emit(lambda: _data(graph, plans), lambda: _human(graph, plans), as_json, to_file)


def add_commands(app: typer.Typer) -> None:
    """Register this file's commands."""
    app.command()(show)
