"""The program that the commands of the other files make up."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from phaze_fast.cli import (
    collectives,
    costs,
    explain,
    exports,
    hardware,
    models,
    placements,
    plans,
    predict,
    schedules,
    search,
    show,
    wafer,
)

__all__ = ["app"]

app = typer.Typer(
    name="phaze-fast",
    help="Accelerator, operator schedule and device placement for training, searched together.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from phaze_fast import __version__

        sys.stdout.write(f"phaze-fast {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Accelerator, operator schedule and device placement for training, searched together."""


for _part in (
    search,
    wafer,
    models,
    show,
    hardware,
    costs,
    schedules,
    placements,
    plans,
    predict,
    exports,
    explain,
    collectives,
):
    _part.add_commands(app)
