"""Mutants: single changes of kernels and rules, and sources that contain all of them at once.

Sources are instrumented: they contain every mutant, and a number selects one, in C++ by `mutant.hpp`
and in Python by a `Switch`, which is a builtin function there.

    python3 tests/robustness/mutants.py    # entries of mutants.jsonl and equivalent.jsonl that are gone
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import re
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).parent / "mutants.jsonl"
EQUIVALENT = Path(__file__).parent / "equivalent.jsonl"
PYTHON = (
    "kernel", "footprint", "rates", "sizes", "times", "throughput", "collectives", "bounds",
    "candidates", "prices", "silicon", "package",
)  # fmt: skip
"""Names of modules that price or bound, in these packages."""
PACKAGES = ("memory", "cost", "planning", "explore", "wafer", "hardware")
INFIX = {
    "+": "Plus", "-": "Minus", "*": "Times", "/": "Over", "<": "Less", "<=": "AtMost",
    ">": "More", ">=": "AtLeast", "==": "Equal", "!=": "Unequal",
}  # fmt: skip
OTHER = {
    "+": "-", "-": "+", "*": "/", "/": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "1.0": "0.0", "2.0": "1.0", "0.5": "1.0",
}  # fmt: skip
NAME = "phaze_mutants::"
MOST_MUTANTS = 4096


@dataclass(frozen=True)
class Mutant:
    """One mutant: where it is, the original text and the mutated text."""

    path: str
    line: int
    before: str
    after: str
    edits: tuple[tuple[int, int, str], ...] = ()
    """(start, end, text) with ``#`` for the number."""

    @property
    def compiled(self) -> bool:
        return self.path.startswith("cpp/")

    @property
    def key(self) -> str:
        """A name that does not depend on the number of the line."""
        return f"{self.path}: {self.before} -> {self.after}"

    @property
    def text(self) -> str:
        """The line as it stands."""
        return (ROOT / self.path).read_text("utf-8").splitlines()[self.line - 1].strip()

    def __str__(self) -> str:
        short = [" ".join(text.split())[:90] for text in (self.before, self.after)]
        return f"{self.path}:{self.line}: {short[0]} -> {short[1]}"

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def cpp_sites(path: str) -> list[Mutant]:
    """Every mutant of a C++ file."""
    found, at = [], 0
    text = (ROOT / path).read_text("utf-8")
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        code = line.partition("//")[0]
        skipped = ("#", "*", "static_assert", "template", "using", "inline constexpr", "constexpr")
        if not code.lstrip().startswith(skipped):
            for before, after, edits in _line_sites(code):
                moved = tuple((at + start, at + end, put) for start, end, put in edits)
                found.append(Mutant(path, number, before, after, moved))
        at += len(line)
    return found


def _line_sites(code: str):
    for hit in re.finditer(r" (\+|-|\*|/|<=?|>=?|==|!=) ", code):
        op = hit[1]
        put = f" {op}{NAME}{INFIX[op]}<#>{{}}{op} "
        shown = code.strip()
        where = hit.start() - (len(code) - len(code.lstrip()))
        changed = f"{shown[:where]} {OTHER[op]} {shown[where + len(hit[0]) :]}"
        yield shown, changed, [(hit.start(), hit.end(), put)]
    for hit in re.finditer(r"std::(max|min)\((?!\{)", code):
        name = "most" if hit[1] == "max" else "least"
        other = "min" if hit[1] == "max" else "max"
        yield (
            code.strip(),
            code.strip().replace(hit[0], f"std::{other}(", 1),
            [(hit.start(), hit.end(), f"{NAME}{name}<#>(")],
        )
    for hit in re.finditer(r"(?<![\w.])(1\.0|2\.0|0\.5)(?![\w.])", code):
        put = f"{NAME}number<#>({hit[0]}, {OTHER[hit[0]]})"
        yield hit[0], OTHER[hit[0]], [(hit.start(), hit.end(), put)]
    for start, end in _conditions(code):
        shown = code[start:end]
        yield (
            shown,
            f"!({shown})",
            [(start, start, f"{NAME}flipped<#>("), (end, end, ")")],
        )
    hit = re.match(r"^\s*[\w.\->\[\]()*]+ \+= ([^;]+);\s*$", code)
    if hit and hit[1].count("(") == hit[1].count(")"):
        edits = [(hit.start(1), hit.start(1), f"{NAME}negated<#>("), (hit.end(1), hit.end(1), ")")]
        yield code.strip(), code.strip().replace("+=", "-="), edits


def _conditions(code: str):
    """Where conditions of ``if`` and of ``? :`` begin and end, where one line holds them."""
    for hit in re.finditer(r"\bif \(", code):
        depth, at = 1, hit.end()
        while at < len(code) and depth:
            depth += {"(": 1, ")": -1}.get(code[at], 0)
            at += 1
        inside = code[hit.end() : at - 1]
        if not depth and ";" not in inside and not re.search(r"[^=!<>]=[^=]", inside):
            yield hit.end(), at - 1
    hit = re.match(r"^(\s*return |.*? = )([^?;=]+) \? .+ : .+;", code)
    if hit and hit[2].count("(") == hit[2].count(")"):
        yield hit.start(2), hit.end(2)


def located(path: str, text: str) -> tuple[str, re.Match[str]]:
    """The file that contains a text, whatever its line breaks, and where; `path` comes first."""
    pattern = re.compile(r"\s+".join(map(re.escape, text.split())))
    for name in (path, *_sources()):
        matches = list(pattern.finditer(_sources().get(name, "")))
        if len(matches) == 1:
            return name, matches[0]
    raise LookupError(f"{path}: {text!r} is in no file, or several times")


@cache
def _sources() -> dict[str, str]:
    files = [*(ROOT / "cpp/src").rglob("*.?pp"), *(ROOT / "phaze_fast").rglob("*.py")]
    return {f.relative_to(ROOT).as_posix(): f.read_text("utf-8") for f in sorted(files)}


def entries(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def listed_mutants() -> list[Mutant]:
    """Mutants of ``mutants.jsonl``, which earlier tests did not notice."""
    found = []
    for entry in entries(LISTED):
        path, match = located(entry["path"], entry["before"])
        before, after = match[0], entry["after"]
        number = match.string.count("\n", 0, match.start()) + 1
        if path.endswith(".py"):
            edits = python_edits(*match.span(), after)
            found.append(Mutant(path, number, before, after, edits))
            continue
        if before.rstrip().endswith(";"):
            put = f"if ({NAME}on<#>()) {{ {after} }} else {{ {before} }}"
        else:
            put = f"({NAME}on<#>() ? ({after}) : ({before}))"
        edits = ((match.start(), match.end(), put),)
        found.append(Mutant(path, number, before, after, edits))
    return found


def main() -> int:
    """Print entries of both files whose text is gone."""
    lines = {line.strip() for text in _sources().values() for line in text.splitlines()}
    gone = [entry["line"] for entry in entries(EQUIVALENT) if entry["line"] not in lines]
    for entry in entries(LISTED):
        try:
            located(entry["path"], entry["before"])
        except LookupError as error:
            gone.append(str(error))
    sys.stdout.write("".join(f"{text}\n" for text in gone))
    return 1 if gone else 0


# ---- Python ----

_SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def changed_node(node: ast.AST) -> bool:
    """Mutate an operator, a call of max or min, or a condition in place; whether it is one."""
    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in _SWAPS:
            node.op = _SWAPS[type(op)]()
        case ast.Compare(ops=[op]) if type(op) in _SWAPS:
            node.ops = [_SWAPS[type(op)]()]
        case ast.Name(id="max" | "min" as name):
            node.id = "min" if name == "max" else "max"
        case ast.Attribute(attr="maximum" | "minimum" as name):
            node.attr = "minimum" if name == "maximum" else "maximum"
        case ast.IfExp(body=body, orelse=orelse):
            node.body, node.orelse = orelse, body
        case _:
            return False
    return True


def function_nodes(tree: ast.Module) -> list[ast.AST]:
    """Nodes inside functions, without annotations, defaults and messages of errors."""
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                found += _unraised(statement)
    return found


def _unraised(node: ast.AST):
    if isinstance(node, ast.Raise | ast.FunctionDef | ast.ClassDef):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _unraised(child)


class Switch:
    """The number of the selected mutant in Python, and marks of those that were reached."""

    def __init__(self) -> None:
        self.reached = bytearray(MOST_MUTANTS)
        self._chosen = 0

    def choose(self, number: int) -> None:
        self._chosen = number

    def __call__(self, number: int) -> bool:
        self.reached[number] = 1
        return number == self._chosen


def python_edits(start: int, end: int, after: str) -> tuple[tuple[int, int, str], ...]:
    """Insert an expression as the alternative of the one from `start` to `end`."""
    return (start, start, f"(({after}) if phaze_mutant(#) else ("), (end, end, "))")


def python_sites(path: str) -> list[Mutant]:
    """Every mutant of a Python file."""
    text = (ROOT / path).read_text("utf-8")
    lines = text.splitlines(keepends=True)
    begins = [0, *itertools.accumulate(map(len, lines))]

    def offset(line: int, column: int) -> int:  # columns of nodes count bytes
        return begins[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found = []
    for node in function_nodes(ast.parse(text)):
        if not isinstance(node, ast.expr):
            continue
        before = ast.unparse(node)
        if "'" in before or '"' in before or not changed_node(node):
            continue
        span = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
        after = ast.unparse(node)
        found.append(Mutant(path, node.lineno, before, after, python_edits(*span, after)))
        changed_node(node)  # and back
    return found


def chosen(count: int, python_count: int, seed: int, only: str = "") -> list[Mutant]:
    """Listed mutants, and so many more at random, at most one on each line."""

    def order(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    cpp = [m for path in _sources() if path.startswith("cpp") for m in cpp_sites(path)]
    modules = [
        path
        for path in _sources()
        if path.startswith(tuple(f"phaze_fast/{name}/" for name in PACKAGES))
        and Path(path).stem in PYTHON
    ]
    python = [m for path in modules for m in python_sites(path)]
    found = listed_mutants()
    taken = {(m.path, m.line) for m in found} | {m.key for m in found}
    for sites, wanted in ((cpp, count), (python, python_count)):
        for mutant in sorted(sites, key=order):
            if wanted and not taken & {(mutant.path, mutant.line), mutant.key}:
                taken |= {(mutant.path, mutant.line), mutant.key}
                found.append(mutant)
                wanted -= 1
    return [m for m in found if only in m.path]


def instrumented(text: str, mutants: dict[int, Mutant]) -> str:
    """The text of a file with all its mutants in it, each under its number."""
    edits = [
        (start, end, put.replace("#", str(number)))
        for number, mutant in mutants.items()
        for start, end, put in mutant.edits
    ]
    for start, end, put in sorted(edits, reverse=True):
        text = text[:start] + put + text[end:]
    compiled = any(mutant.compiled for mutant in mutants.values())
    return '#include "phaze/mutant.hpp"\n' + text if compiled else text


if __name__ == "__main__":
    sys.exit(main())
