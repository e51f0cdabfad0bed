"""The command `collective`: one collective by every algorithm that can run it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType

from phaze_fast.cli.output import AsJson, ToFile, emit, table
from phaze_fast.cost import collective
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster, presets
from phaze_fast.units import format_time, parse_quantity

__all__ = ["add_commands"]

FabricOption = Annotated[
    str,
    typer.Option(
        help="How the devices are wired: a preset (`phaze-fast fabrics` lists them) or a file."
    ),
]


def show_collective(
    op: Annotated[
        str,
        typer.Argument(
            help="all-reduce, reduce-scatter, all-gather, all-to-all, broadcast or point-to-point."
        ),
    ],
    size: Annotated[
        str,
        typer.Option(
            "--bytes",
            help="Size of the vector that each device has, or of the message, such as '1 GiB'.",
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Devices in the group.")],
    fabric: FabricOption,
    stride: Annotated[
        int, typer.Option(help="How many ranks lie between neighbours of the group.")
    ] = 1,
    devices: Annotated[
        int | None,
        typer.Option(help="Devices of the whole cluster; a torus or mesh is cut to size."),
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


def add_commands(app: typer.Typer) -> None:
    """Register this file's commands."""
    app.command("collective")(show_collective)
