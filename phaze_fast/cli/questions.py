"""Takes one question (a collective, a survey), gives its answer for people and programs."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer
from rich.console import RenderableType

from phaze_fast.cli.output import AsJson, ToFile, emit, emit_infeasible, note, table
from phaze_fast.cost import collective
from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.explore import compute_bound_s
from phaze_fast.hardware import Accelerator, ArchitectureSpace, Cluster, area, chip_records, presets
from phaze_fast.pipeline import Survey, survey
from phaze_fast.units import (
    format_bytes,
    format_count,
    format_flops,
    format_time,
    parse_quantity,
)

__all__ = ["add_commands"]

FabricOption = Annotated[str, typer.Option(help="Preset or .yaml/.json file.")]


def show_collective(
    op: Annotated[
        str,
        typer.Argument(
            help="all-reduce, reduce-scatter, all-gather, all-to-all, broadcast or point-to-point."
        ),
    ],
    size: Annotated[str, typer.Option("--bytes", help="Vector or message, for example '1 GiB'.")],
    ranks: Annotated[int, typer.Option(help="Devices in the group.")],
    fabric: FabricOption,
    stride: Annotated[int, typer.Option(help="Ranks between neighbours.")] = 1,
    devices: Annotated[
        int | None, typer.Option(help="Devices there are; a torus or mesh is cut to size.")
    ] = None,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Time one collective by every algorithm that can run it."""
    try:
        payload = parse_quantity(size, "bytes")
    except InvalidInputError as error:
        raise InvalidInputError(f"--bytes: {error}") from None
    wired = presets.fabric(fabric)
    if devices is None:
        cost = collective(wired, op, payload, ranks, stride)
    else:
        cluster = Cluster(devices=devices, fabric=wired)
        wired, cost = cluster.fabric, collective(cluster, op, payload, ranks, stride)
    data = {"fabric": wired.name, **vars(cost)}

    def human() -> list[RenderableType]:
        rows = [
            [name, format_time(time_s), f"{time_s / cost.bound_s:.2f}x" if cost.bound_s else "-"]
            for name, time_s in cost.alternatives.items()
        ]
        caption = (
            f"bound: {format_time(cost.bound_s)}, the bytes a rank must send over all its ports"
        )
        columns = ["algorithm", "time>", "over bound>"]
        return [str(wired), str(cost), table("", columns, rows, caption)] if rows else [str(cost)]

    emit(lambda: data, human, as_json, to_file)


_BASELINE = "phaze-tpuv4"


def _survey_data(found: Survey, limit: int) -> dict[str, object]:
    return {
        "status": "bound",
        "space": found.space.spec.name,
        "grid_points": found.space.grid_size,
        "points": len(found.space),
        "devices": found.cluster.devices,
        "fabric": found.cluster.fabric.name,
        "flops": found.flops,
        "bound_s": float(found.bound_s[found.order[0]]),
        "ties": found.ties,
        "chips": [
            {
                "index": int(found.space.index[i]),
                "bound_s": float(found.bound_s[i]),
                "area_mm2": float(found.space.area_mm2[i]),
                "chip": found.space[int(i)].to_dict(),
            }
            for i in found.order[:limit]
            if np.isfinite(found.bound_s[i])
        ],
        "gradient_sync": vars(found.gradient_sync),
    }


def _chip_row(chip: Accelerator, area_mm2: float, bound_s: float) -> list[str]:
    tensor, vector = chip.tensor_core, chip.vector_core
    return [
        f"{tensor.count} x {tensor.width}x{tensor.depth}",
        f"{vector.count} x {vector.lanes}",
        format_bytes(chip.buffer.capacity_bytes),
        format_flops(chip.peak_flops()),
        f"{area_mm2:.2f}",
        format_time(bound_s),
    ]


def _survey_tables(found: Survey, limit: int) -> list[RenderableType]:
    space = found.space
    rows = [
        _chip_row(space[int(i)], float(space.area_mm2[i]), float(found.bound_s[i]))
        for i in found.order[:limit]
        if np.isfinite(found.bound_s[i])
    ]
    reference = presets.chip(_BASELINE)
    bound = compute_bound_s(chip_records([reference]), found.flops, found.cluster.devices)[0]
    rows = [[str(place + 1), *row] for place, row in enumerate(rows)]
    rows.append([_BASELINE, *_chip_row(reference, area(reference).total_mm2, float(bound))])
    summary = (
        f"{space.spec.name}: {format_count(len(space))} chips of a grid of "
        f"{format_count(space.grid_size)}, {space.area_mm2.min():.2f} to "
        f"{space.area_mm2.max():.2f} mm2\n"
        f"{format_count(found.cluster.devices)} devices on {found.cluster.fabric}"
    )
    caption = (
        f"{format_count(found.ties)} chips tie for first; ties go to the smaller area. These are "
        "lower bounds:\narithmetic alone, perfectly spread, no buffer, HBM or network time."
    )
    columns = ["", "tensor cores>", "vector>", "buffer>", "bf16>", "mm2>", "a step takes at least>"]
    sync = found.gradient_sync
    listed = [[name, format_time(time_s)] for name, time_s in sync.alternatives.items()]
    title = (
        f"Were all {format_count(sync.ranks)} devices replicas: all-reduce of "
        f"{format_bytes(sync.payload_bytes)} of bf16 gradients"
    )
    return [
        summary,
        table("Chips by their bound", columns, rows, caption),
        table(title, ["algorithm", "time>"], listed),
    ]


def show_survey(
    space: Annotated[str, typer.Argument(help="tpuv4-area, or a .yaml/.json file.")] = "tpuv4-area",
    parameters: Annotated[float, typer.Option(help="Parameters of the model.")] = 175e9,
    tokens: Annotated[float, typer.Option(help="Tokens of one step.")] = 4096 * 2048,
    devices: Annotated[int, typer.Option(help="Devices in the cluster.")] = 1024,
    fabric: FabricOption = "tpuv4-pod",
    limit: Annotated[int, typer.Option(min=1, help="How many chips to list.")] = 8,
    as_json: AsJson = False,
    to_file: ToFile = None,
) -> None:
    """Bound the training step of every chip in a space from below, and price its gradient sync."""
    cluster = Cluster(devices=devices, fabric=presets.fabric(fabric))
    try:
        found = survey(ArchitectureSpace.load(space), cluster, parameters, tokens)
    except InfeasibleError as error:
        emit_infeasible(error, as_json, to_file)
        return
    note(f"bounded {format_count(len(found.space))} chips")
    emit(
        lambda: _survey_data(found, limit),
        lambda: _survey_tables(found, limit),
        as_json,
        to_file,
    )


def add_commands(app: typer.Typer) -> None:
    """Register this file's commands."""
    app.command("collective")(show_collective)
    app.command("survey")(show_survey)
