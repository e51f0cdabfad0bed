"""The import order, held by reading the imports: a package may use only what stands left of it."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "phaze_fast"

ORDER = [
    {"errors"},
    {"units", "documents", "_core", "threads"},
    {"records"},
    {"models", "hardware"},
    {"schemas"},
    {"opgraph"},
    {"cost", "memory"},
    {"schedule"},
    {"placement"},
    {"runs"},
    {"wafer"},
    {"search"},
    {"baselines"},
    {"report"},
    {"pipeline"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
HEAVY = {"highspy", "numba", "typer", "plotly", "rich", "torch"}


def room(file):
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py").removesuffix(".pyi")


def sources():
    return [f for f in PACKAGE.rglob("*.py") if f != PACKAGE / "__init__.py"]


def imported_rooms(file):
    """Rooms of this package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            parts = (node.module or "").split(".")
            if parts[0] != "phaze_fast":
                continue
            if len(parts) > 1:
                yield parts[1]
            else:
                yield from (alias.name for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "phaze_fast" and len(parts) > 1:
                    yield parts[1]


def test_every_room_has_its_place():
    found = {room(file) for file in sources()} | {"_core"}
    assert found == set(RANK)


@pytest.mark.parametrize("file", sources(), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_point_left(file):
    here = room(file)
    for there in imported_rooms(file):
        assert there == here or RANK[there] < RANK[here], f"{here} must not import {there}"


@pytest.mark.parametrize("file", sources(), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_a_docstring_says_what_it_takes_and_gives(file):
    doc = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    paragraph = doc.split("\n\n")[0]
    assert paragraph.startswith("Takes ")
    assert "gives " in paragraph


def test_heavy_packages_are_not_imported_at_the_top_of_a_library_file():
    for file in sources():
        if room(file) == "cli" or file == PACKAGE / "memory" / "kernel.py":
            continue  # the kernel is Numba's, and loaded late itself
        for node in ast.parse(file.read_text("utf-8")).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {n.split(".")[0] for n in names} & HEAVY, f"{file} imports {names}"


def test_the_core_knows_no_python():
    headers = list((ROOT / "cpp" / "include").rglob("*.hpp"))
    core = headers + list((ROOT / "cpp" / "src").rglob("*.?pp"))
    assert len(headers) >= 5
    for file in core:
        text = file.read_text("utf-8")
        assert not re.search(r"#include\s*[<\"](Python\.h|pybind11)", text), file
        assert not re.search(r"\b(std::cout|std::cerr|printf|exit|abort)\b\s*[(<]", text), file


def test_files_stay_small():
    files = [*sources(), *(ROOT / "cpp").rglob("*.[ch]pp")]
    long = {
        str(f.relative_to(ROOT)): n for f in files if (n := len(f.read_text().splitlines())) > 450
    }
    assert long == {}


def test_nothing_names_a_path_of_a_machine():
    words = re.compile(r"/(?:home|root|work|Users)/")
    kept = [".py", ".pyi", ".cpp", ".hpp", ".md", ".yaml", ".yml", ".toml", ".txt", ".json"]
    for file in ROOT.rglob("*"):
        parts = file.relative_to(ROOT).parts
        if parts[0] in {".git", ".venv", "build", "dist"} or file == Path(__file__):
            continue
        if file.is_file() and (file.suffix in kept or parts[0] == ".ci"):
            if any(p.startswith(".") and p not in {".ci", ".github"} for p in parts[:-1]):
                continue
            assert not words.search(file.read_text("utf-8", "replace")), file
