"""Mutants: single changes of kernels and rules, and sources that contain all of them at once.

Sources are instrumented: they contain every mutant, and a number selects one, in C++ by `mutant.hpp`
and in Python by a `Switch`, which is a builtin function there.

    python3 tools/robustness/mutants.py    # entries of mutants.jsonl and equivalent.jsonl that are gone
"""

from __future__ import annotations

import ast
import copy
import hashlib
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).parent / "mutants.jsonl"
EQUIVALENT = Path(__file__).parent / "equivalent.jsonl"
PACKAGES = (
    "memory", "cost", "planning", "explore", "wafer", "hardware", "calibration", "export",
)  # fmt: skip
INFIX = {
    "+": "Plus", "-": "Minus", "*": "Times", "/": "Over", "<": "Less", "<=": "AtMost",
    ">": "More", ">=": "AtLeast", "==": "Equal", "!=": "Unequal",
}  # fmt: skip
OTHER = {
    "+": "-", "-": "+", "*": "/", "/": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "1.0": "0.0", "2.0": "1.0", "0.5": "1.0",
}  # fmt: skip
NAME = "phaze_mutants::"
MOST_MUTANTS = 4096  # of C++, as in mutant.hpp
MOST_SITES = 1 << 16


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
    def package(self) -> str:
        """The package of Python that contains the mutant, or C++."""
        return "C++" if self.compiled else self.path.split("/")[1]

    @property
    def key(self) -> str:
        """A name that does not depend on the number of the line."""
        return f"{self.path}: {self.before} -> {self.after}"

    @property
    def place(self) -> int:
        """A number for the line."""
        return zlib.crc32(f"{self.path}:{self.line}".encode())

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
    pattern = re.compile(r"(?<![\w.*])" + r"\s+".join(map(re.escape, text.split())))
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
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_PAIRS = {"max": "min", "min": "max", "maximum": "minimum", "minimum": "maximum"}
_NUMBERS = {1.0: 0.0, 2.0: 1.0, 0.5: 1.0}


def changed(node: ast.expr) -> ast.expr | None:
    """An expression with another operator, function, constant or order, if it can have one."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in _SWAPS:
            new.op = _SWAPS[type(op)]()
        case ast.Compare(ops=[op]) if type(op) in _SWAPS:
            new.ops = [_SWAPS[type(op)]()]
        case ast.Name(id=name) if name in _PAIRS:
            new.id = _PAIRS[name]
        case ast.Attribute(attr=name) if name in _PAIRS:
            new.attr = _PAIRS[name]
        case ast.IfExp(body=body, orelse=orelse):
            new.body, new.orelse = orelse, body
        case ast.Constant(value=float(number)) if number in _NUMBERS:
            new.value = _NUMBERS[number]
        case _:
            return None
    return new


def changes(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pairs of an expression of a node and what a mutant puts there."""
    if isinstance(node, ast.If | ast.While):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.comprehension):
        yield from ((test, ast.UnaryOp(ast.Not(), test)) for test in node.ifs)
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        yield node.value, ast.UnaryOp(ast.USub(), node.value)
    if isinstance(node, ast.expr) and (new := changed(node)) is not None:
        yield node, new


def function_nodes(tree: ast.Module) -> list[ast.AST]:
    """Nodes inside functions, without annotations, defaults, messages and formatted text."""
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                found += _computing(statement)
    return found


def _computing(node: ast.AST):
    if isinstance(node, ast.Raise | ast.FunctionDef | ast.ClassDef | ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _computing(child)


class Switch:
    """The number of the selected mutant in Python, and marks of those that were reached."""

    def __init__(self) -> None:
        self.reached = bytearray(MOST_SITES)
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
        for old, new in changes(node):
            start = offset(old.lineno, old.col_offset)
            end = offset(old.end_lineno, old.end_col_offset)
            before, after = ast.unparse(old), ast.unparse(new)
            found.append(Mutant(path, old.lineno, before, after, python_edits(start, end, after)))
    return found


def all_sites(packages: Sequence[str], without: Sequence[str] = ()) -> list[Mutant]:
    """Every mutant of packages in Python."""
    prefixes = tuple(f"phaze_fast/{name}/" for name in packages)
    paths = [path for path in _sources() if path.startswith(prefixes) and path not in without]
    return [mutant for path in paths for mutant in python_sites(path)]


def chosen(
    count: int, python_count: int, seed: int, packages: Sequence[str] = PACKAGES, only: str = ""
) -> list[Mutant]:
    """Listed mutants and random ones, at most one on each line: `count` in C++, `python_count` in
    each package of Python; no C++ at all where `count` is 0."""

    def order(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()

    samples = [(count, "cpp/", cpp_sites)] if count else []
    samples += [(python_count, f"phaze_fast/{name}/", python_sites) for name in packages]
    prefixes = tuple(prefix for _, prefix, _ in samples)
    found = [m for m in listed_mutants() if m.path.startswith(prefixes)]
    taken = {(m.path, m.line) for m in found} | {m.key for m in found}
    for wanted, prefix, sites in samples:
        mutants = [m for path in _sources() if path.startswith(prefix) for m in sites(path)]
        for mutant in sorted(mutants, key=order):
            if wanted and not taken & {(mutant.path, mutant.line), mutant.key}:
                taken |= {(mutant.path, mutant.line), mutant.key}
                found.append(mutant)
                wanted -= 1
    return [m for m in found if only in m.path]


def instrumented(text: str, mutants: dict[int, Mutant]) -> str:
    """The text of a file with all its mutants in it, each under its number."""
    edits = [  # of those that begin at one place, the longest mutant comes last, and is outside
        (start, end, m.edits[0][0] - m.edits[-1][1], re.sub(r"(?<=[<(])#(?=[>)])", str(n), put))
        for n, m in mutants.items()
        for start, end, put in m.edits
    ]
    for start, end, _, put in sorted(edits, reverse=True):
        text = text[:start] + put + text[end:]
    compiled = any(mutant.compiled for mutant in mutants.values())
    return '#include "phaze/mutant.hpp"\n' + text if compiled else text


if __name__ == "__main__":
    sys.exit(main())
