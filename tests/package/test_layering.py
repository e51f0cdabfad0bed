"""The order of imports and the shape of the code, held by reading it.

A package may use only what stands left of it, and no two files import each other, not for types
either. Functions stay short, and every module says in a sentence what it is for.
"""

import ast
import functools
import importlib
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "phaze_fast"

ORDER = [
    {"errors"},
    {"units", "documents", "threads", "caching", "_core"},
    {"tables"},
    {"records"},
    {"models", "hardware"},
    {"software"},
    {"opgraph"},
    {"cost", "memory"},
    {"schedule"},
    {"planning"},
    {"calibration"},
    {"runs"},
    {"wafer", "explore"},
    {"robust", "papers", "schemas"},
    {"report", "export"},
    {"pipeline"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
LINES_OF_A_FUNCTION = 60
HEAVY = {"highspy", "numba", "typer", "plotly", "rich", "torch"}


def room(file):
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py").removesuffix(".pyi")


@functools.cache
def sources():
    return [f for f in PACKAGE.rglob("*.py") if f != PACKAGE / "__init__.py"]


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text("utf-8"))


@functools.cache
def nodes_of(file):
    return list(ast.walk(tree_of(file)))


def imported_rooms(file):
    """Rooms of this package that a file imports, anywhere in it."""
    for node in nodes_of(file):
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


def test_imports_point_left():
    pairs = [(file, room(file), there) for file in sources() for there in imported_rooms(file)]
    assert [each for each in pairs if each[1] != each[2] and RANK[each[2]] >= RANK[each[1]]] == []


# ---- no circles ----


def module_name(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(file, known):
    """Modules of this package that a file imports, in functions and for types as well."""
    for node in nodes_of(file):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in full)


def circle_in(edges):
    """Modules that import one another, in order, or none."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        found = next(filter(None, map(visit, sorted(edges.get(module, ())))), None)
        path.pop()
        done.add(module)
        return found

    return next(filter(None, map(visit, sorted(edges))), None)


def test_circles_are_found():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": set()}) is None
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_two_files_import_each_other():
    files = {module_name(file): file for file in sources()}
    edges = {
        name: {other for other in imported_modules(file, files) if other != name}
        for name, file in files.items()
    }
    assert sum(map(len, edges.values())) > 200
    assert circle_in(edges) is None


# ---- what modules say of themselves ----


def docstring(file):
    return ast.get_docstring(tree_of(file)) or ""


def test_a_module_says_in_a_sentence_what_it_is_for():
    for file in sources():
        said = " ".join(docstring(file).split("\n\n")[0].split())
        assert re.match("[A-Z].*[.]$", said), (file, said)
        assert len(said.split()) >= 4, (file, said)
        assert not said.startswith("Takes "), (file, said)


def test_no_two_modules_say_the_same():
    said = Counter(docstring(file).split("\n\n")[0] for file in sources())
    assert {text for text, count in said.items() if count > 1} == set()


def commands():
    from phaze_fast.cli.app import program

    return set(program().commands)


def imported(path):
    """What a dotted path leads to: modules as far as there are any, then attributes."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            thing = getattr(thing, part, None)
        return thing
    return None


def resolves(name, module):
    """Whether a name is known where a module's docstring has it."""
    if name.startswith("phaze_fast."):
        late = {module_name(file) for file in LATE}  # may need an extra that is not installed
        return name in late or imported(name) is not None
    package = module.__name__ if hasattr(module, "__path__") else module.__package__
    places = (module.__name__, package, "phaze_fast", "builtins")
    if any(imported(f"{place}.{name}") is not None for place in places):
        return True
    own = [value for value in vars(module).values() if callable(value)]
    parameters = {parameter for value in own for parameter in _parameters(value)}
    attributes = set(re.findall(r"self\.(\w+)", inspect.getsource(module)))
    attributes.update(*(dir(value) for value in own if inspect.isclass(value)))
    return name in parameters | attributes


def _parameters(function):
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def test_a_docstring_names_nothing_that_is_gone():
    gone, known = [], commands()
    for file in (file for file in sources() if file.name != "__main__.py"):
        text = docstring(file)
        names = re.findall(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)", text)
        names += re.findall(r"\bphaze_fast(?:\.\w+)+", text)
        if room(file) == "cli":
            names = [name for name in names if name not in known]
        if names:
            module = importlib.import_module(module_name(file))
            gone += [(file, name) for name in names if not resolves(name, module)]
    assert gone == []


def test_a_name_that_is_gone_is_found():
    module = importlib.import_module("phaze_fast.explore.find")
    for name in ("find_chips", "BestFirstSearch", "pareto", "phaze_fast.explore.per_chip", "STORE"):
        assert resolves(name, module), name
    for name in ("phaze_fast.search.find", "Judge", "phaze_fast.explore.judge", "find_dies"):
        assert not resolves(name, module), name


# ---- what stays small or away ----


# Numba's kernel and what runs PyTorch are loaded late themselves.
LATE = {
    PACKAGE / "memory" / "kernel.py",
    PACKAGE / "models" / "torch_recorder.py",
    PACKAGE / "models" / "torch_recurrent.py",
}


def test_heavy_packages_are_not_imported_at_the_top_of_a_library_file():
    for file in sources():
        if room(file) == "cli" or file in LATE:
            continue
        for node in tree_of(file).body:
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


def body_lines(function):
    """Lines of a function's statements: its signature and its docstring are for the reader."""
    documented = ast.get_docstring(function) is not None
    statements = function.body[1:] if documented else function.body
    return statements[-1].end_lineno - statements[0].lineno + 1 if statements else 0


def test_functions_stay_small():
    long = {}
    for file in sources():
        for node in nodes_of(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = body_lines(node)
                if lines > LINES_OF_A_FUNCTION:
                    long[f"{file.relative_to(ROOT)}: {node.name}"] = lines
    assert long == {}


def test_nothing_names_a_path_of_a_machine():
    words = re.compile(r"/(?:home|root|work|Users)/")
    kept = [".py", ".pyi", ".cpp", ".hpp", ".md", ".yaml", ".yml", ".toml", ".txt", ".json"]
    tops = [top for top in ROOT.iterdir() if top.name not in {".git", ".venv", "build", "dist"}]
    for file in (file for top in tops for file in (top, *top.rglob("*"))):
        parts = file.relative_to(ROOT).parts
        if file != Path(__file__) and file.is_file() and (file.suffix in kept or parts[0] == ".ci"):
            if any(p.startswith(".") and p not in {".ci", ".github"} for p in parts[:-1]):
                continue
            assert not words.search(file.read_text("utf-8", "replace")), file
