"""What mkdocs calls when it builds the site: pages that are made from the program itself."""

import re

import click
from mkdocs.structure.pages import Page

import phaze_fast
from phaze_fast.cli.app import COMMANDS, program


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|").strip()


def _command(name: str, command: click.Command) -> str:
    """Write a command's help as a section, with one table for each group of options."""
    lines = [f"## {name}", "", *(command.help or "").strip().splitlines(), ""]
    usage = [p for p in command.params if p.param_type_name == "argument"]
    words = " ".join((p.metavar or p.name).upper() for p in usage)
    lines += ["```text", f"phaze-fast {name} {words} [OPTIONS]".replace("  ", " "), "```", ""]
    groups: dict[str, list[str]] = {}
    for param in command.params:
        names = ", ".join(f"`{o}`" for o in [*param.opts, *param.secondary_opts])
        title = getattr(param, "rich_help_panel", None) or "Output"
        if param.param_type_name == "argument":
            names, title = f"`{param.name.upper()}`", "Arguments"
        default = "" if param.default in (None, False) or callable(param.default) else param.default
        row = f"| {names} | {_plain(getattr(param, 'help', ''))} | {_plain(str(default))} |"
        groups.setdefault(title, []).append(row)
    for title, rows in groups.items():
        lines += [f"| {title} | | default |", "|---|---|---|", *rows, ""]
    return "\n".join(lines) + "\n"


def _commands() -> str:
    parts = []
    for name in COMMANDS:
        command = program()
        for word in name.split():
            command = command.commands[word]
        parts.append(_command(name, command))
    return "\n".join(parts)


def _api() -> str:
    parts = []
    for name in phaze_fast.__all__:
        thing = getattr(phaze_fast, name)
        if name.startswith("__") or not hasattr(thing, "__module__") or not callable(thing):
            continue
        options = "    options:\n      show_root_heading: true\n      show_source: false\n"
        parts.append(f"::: {thing.__module__}.{thing.__qualname__}\n{options}")
    return "\n".join(parts)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Write what the program says of itself into the pages that have a mark for it."""
    if page.file.src_path == "cli.md":
        return re.sub(r"<!-- commands:.*?-->", lambda _: _commands(), markdown)
    if page.file.src_path == "api.md":
        return re.sub(r"<!-- api:.*?-->", lambda _: _api(), markdown)
    # Links out of the documentation lead into the repository, which the site does not hold.
    return re.sub(r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
