"""The program that the commands of the other files make up."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from phaze_fast.cli import (
    backtest,
    calibrate,
    collectives,
    costs,
    explain,
    exports,
    hardware,
    models,
    placements,
    plans,
    predict,
    reproduce,
    schedules,
    search,
    show,
    sweep,
    trace,
    validation,
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
    backtest,
    wafer,
    models,
    trace,
    show,
    hardware,
    costs,
    validation,
    calibrate,
    schedules,
    placements,
    plans,
    predict,
    sweep,
    exports,
    explain,
    reproduce,
    collectives,
):
    _part.add_commands(app)

_EXAMPLES = {
    "search": "search gpt3-175b --space published --report page.html",
    "wafer": "wafer bertlarge --wafer dojo-tile-like --global-batch 64 --compare",
    "models": "models llama2-7b",
    "show": "show gpt3-175b --tp 8 --sp --pp 12 --microbatches 64 --recompute selective",
    "chips": "chips h100",
    "fabrics": "fabrics dgx-h100",
    "wafers": "wafers dojo-tile-like",
    "space": "space tpuv4-area --limit 5",
    "check": "check chip.yaml",
    "schema": "schema chip",
    "estimate": "estimate --chip h200 --gemm 2048x12288x49152",
    "validate": "validate measurements.csv --chip h200",
    "schedule": "schedule layers.jsonl",
    "place": "place problems.jsonl",
    "collective": "collective all-reduce --bytes '1 GiB' --ranks 64 --fabric dgx-a100",
}
"""An example of each command whose own text has none."""

for _command in app.registered_commands:
    _name = _command.name or getattr(_command.callback, "__name__", "")
    if _name in _EXAMPLES and not _command.epilog:
        _command.epilog = f"Example: phaze-fast {_EXAMPLES[_name]}"
