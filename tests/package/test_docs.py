"""Every example in a docstring, every Python block and every command in the documentation runs."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
from case_counts import slow_ones

import phaze_fast
from phaze_fast.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_TORCH = ("torch_recorder", "torch_recurrent")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(phaze_fast.__path__, "phaze_fast.")
    if not module.name.endswith(("__main__", "_core", *WITH_TORCH))
    and ">>>" in Path(importlib.util.find_spec(module.name).origin).read_text("utf-8")
]  # the last ones import torch, whose own tests run them


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def commands(page):
    return [line[2:] for block in blocks(page, "console") for line in block.splitlines()]


LONG_EXAMPLES = [
    f"phaze_fast.{name}"
    for name in ("wafer.studies.comparison", "wafer.search.search", "papers.backtest")
]
LONG_PAGES = [ROOT / "docs" / name for name in ("start.md", "sharing.md")]


@pytest.mark.parametrize("name", slow_ones(MODULES, *LONG_EXAMPLES))
def test_docstring_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


@pytest.mark.checkout
@pytest.mark.parametrize("page", slow_ones(PAGES, ROOT / "docs" / "wafer.md"), ids=lambda p: p.name)
def test_python_blocks_run(page, capsys):
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), {"__name__": "example"})


@pytest.mark.checkout
@pytest.mark.parametrize(
    "page", slow_ones([page for page in PAGES if commands(page)], *LONG_PAGES), ids=lambda p: p.name
)
def test_console_commands_run(page, capsys, tmp_path, monkeypatch):
    for folder in ("tests", "examples", "docs"):  # what commands write stays out of the checkout
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    for command in dict.fromkeys(commands(page)):
        words = shlex.split(command)
        assert words[0] == "phaze-fast"
        assert main(words[1:]) == 0, command


@pytest.mark.checkout
def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.checkout
def test_the_readme_shows_exactly_two_commands_to_start_with():
    start = re.search(r"^## Start\n(.*?)^## ", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    commands = [b.splitlines() for b in re.findall(r"^```sh\n(.*?)^```", start[1], re.M | re.S)]
    assert [[line.split("#")[0].strip() for line in block] for block in commands] == [
        ["python3 dev.py search", "python3 dev.py test"]
    ]
    assert "python3 dev.py" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.checkout
def test_public_functions_have_examples():
    """Whatever the package offers by name documents itself, and pages show commands."""
    assert sum(len(commands(page)) for page in PAGES) >= 5
    for name in phaze_fast.__all__:
        thing = getattr(phaze_fast, name)
        if name.startswith("__") or isinstance(thing, type(doctest)):
            continue
        doc = thing.__doc__ or ""
        assert doc, name
        if callable(thing) and not isinstance(thing, type):
            assert ">>>" in doc, name
