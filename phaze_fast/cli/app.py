"""The command-line program. A call imports only the files of the commands that it needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from phaze_fast.errors import InvalidInputError

COMMANDS = {
    "search": "search:search_chips",
    "plan": "plan:plan_model",
    "predict": "predict:predict_plan",
    "explain": "explain:explain",
    "export": "exports:export",
    "sweep": "sweep:sweep_points",
    "wafer": "wafer:map_on_wafers",
    "show model": "show_models:show_model",
    "show chip": "show_hardware:show_chip",
    "show interconnect": "show_hardware:show_interconnect",
    "show wafer": "show_wafers:show_wafer",
    "show space": "show_hardware:show_space",
    "check": "check:check",
    "estimate": "estimate:estimate",
    "schedule": "schedules:show_schedules",
    "place": "placements:place_file",
    "trace": "trace:trace",
    "study validate": "validate:show_validation",
    "study calibrate": "studies:calibrate",
    "study backtest": "studies:back_test",
    "study reproduce": "studies:reproduce_paper",
}
"""The file and function of each command, in the order in which help lists them."""

_GROUPS = {
    "show": "Show models, chips, interconnects, wafers and spaces.",
    "study": "Compare with measurements, history and papers.",
}


class Command(TyperCommand):
    """A command whose help groups its options and whose messages name the option at fault."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and groups of options, each under its title; the group Output is last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Output"
                title = getattr(param, "rich_help_panel", None) or kind
                groups.setdefault(title, []).append(record)
        for title in sorted(groups, key=lambda title: title == "Output"):
            with formatter.section(title):
                formatter.write_dl(groups[title])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; where a field is refused, name its option in the message."""
        try:
            return super().invoke(ctx)
        except InvalidInputError as error:
            lines = [self._with_option(line) for line in str(error).splitlines()]
            raise type(error)("\n".join(lines)) from error

    def _with_option(self, line: str) -> str:
        field = re.match(r"([a-z_]+)(?:\.\d+)*(?=: )", line)
        for param in self.params if field is not None else ():
            if field is not None and param.name == field[1] and param.opts[0].startswith("-"):
                return max(param.opts, key=len) + line[field.end() :]
        return line


def _options() -> None:
    """Accelerator, operator schedule and device placement for training, searched together."""


def program(*words: str) -> TyperGroup:
    """Load the commands that the words of a call may refer to: one, those of one group, or all.

    Importing every file takes longer than most commands run; a list of commands therefore reads
    their descriptions from the source text.
    """
    if words and words[0] in ("-h", "--help"):
        return _program(tuple(COMMANDS), listing=True)
    begun = [name for name in COMMANDS if name.split()[0] == next(iter(words), "")]
    exact = [name for name in begun if name.split() == list(words[: len(name.split())])]
    return _program(tuple(exact or begun or COMMANDS), listing=False)


@cache
def _program(names: tuple[str, ...], listing: bool) -> TyperGroup:
    settings: dict[str, Any] = {
        "context_settings": {"help_option_names": ["-h", "--help"]},
        "no_args_is_help": True,
        "rich_markup_mode": None,
    }
    app = typer.Typer(name="phaze-fast", pretty_exceptions_enable=False, **settings)
    app.callback(epilog="phaze-fast --version prints the version.")(_options)
    groups = {
        group: typer.Typer(name=group, help=text, **settings) for group, text in _GROUPS.items()
    }
    for name in names:
        group, _, last = name.rpartition(" ")
        if group and groups[group] not in [
            registered.typer_instance for registered in app.registered_groups
        ]:
            app.add_typer(groups[group])
        add = (groups[group] if group else app).command(last, cls=Command, help=_help(name))
        add((lambda: None) if listing else _function(name))
    loaded = typer.main.get_command(app)
    assert isinstance(loaded, TyperGroup)
    return loaded


def _function(name: str) -> Callable[..., None]:
    from phaze_fast.cli.option_groups import with_groups

    file, _, function = COMMANDS[name].partition(":")
    return with_groups(getattr(import_module(f"phaze_fast.cli.{file}"), function))


def _help(name: str) -> str:
    """Read the description of a command from its docstring, without importing its file."""
    file, _, function = COMMANDS[name].partition(":")
    tree = ast.parse(Path(__file__).with_name(f"{file}.py").read_text("utf-8"))
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function]
    return ast.get_docstring(functions[0]) or ""
