"""The program that the commands of the other files make up, loaded as far as a call needs them."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Annotated

import typer
import typer.main
from typer.core import TyperGroup

__all__ = ["COMMANDS", "program"]

_PARTS: dict[str, tuple[str, ...]] = {
    "search": ("search",),
    "backtest": ("backtest",),
    "wafer": ("wafer",),
    "models": ("models",),
    "trace": ("trace",),
    "show": ("show",),
    "hardware": ("chips", "fabrics", "wafers", "space", "check", "schema"),
    "costs": ("estimate",),
    "validation": ("validate",),
    "calibrate": ("calibrate",),
    "schedules": ("schedule",),
    "placements": ("place",),
    "plans": ("plan",),
    "predict": ("predict",),
    "sweep": ("sweep",),
    "exports": ("export",),
    "explain": ("explain", "diff", "trace-compare"),
    "reproduce": ("reproduce",),
    "collectives": ("collective",),
}
"""The commands that each file adds, in the order in which help lists them."""

COMMANDS: dict[str, str] = {name: part for part, names in _PARTS.items() for name in names}
"""The file that each command is in."""

_EXAMPLES = {
    "search": "search gpt3-175b --space published --report page.html",
    "wafer": "wafer bertlarge --wafer dojo-tile-like --global-batch 64 --compare",
    "models": "models llama2-7b",
    "show": "show gpt3-175b --tp 8 --sp --pp 12 --micro-batches 64 --recompute selective",
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


def _version(wanted: bool) -> None:
    if wanted:
        from phaze_fast import __version__

        sys.stdout.write(f"phaze-fast {__version__}\n")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Accelerator, operator schedule and device placement for training, searched together."""


def program(command: str = "") -> TyperGroup:
    """Load the program as far as a command needs it; whole for any other word.

    Loading every file and all options takes longer than many answers.
    """
    return _program(COMMANDS.get(command, ""))


@cache
def _program(part: str) -> TyperGroup:
    app = typer.Typer(
        name="phaze-fast",
        help="Accelerator, operator schedule and device placement for training, searched together.",
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name in (part,) if part else _PARTS:
        import_module(f"phaze_fast.cli.{name}").add_commands(app)
    for command in app.registered_commands:
        word = command.name or getattr(command.callback, "__name__", "")
        if word in _EXAMPLES and not command.epilog:
            command.epilog = f"Example: phaze-fast {_EXAMPLES[word]}"
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return group
