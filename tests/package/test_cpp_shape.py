"""The C++ sources keep their functions short enough to see, and each header says what it is for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from robustness import mutants

ROOT = Path(__file__).parents[2] / "cpp"
LONGEST_FUNCTION = 60
"""Lines from the opening brace of a function to its closing brace."""

_SKIPPED = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'|^[ \t]*#[^\n]*', re.S | re.M
)
_SCOPE = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b")


def functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield head, first line and number of lines of every function defined in C++ source text.

    A brace opens a function where it stands in a namespace or a class, follows a parameter list
    and does not open a class itself. Lambdas and local classes belong to the function around them.
    """

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = _SKIPPED.sub(blank, text)
    open_braces: list[tuple[str, int, int]] = []  # what it opens, start of its statement, place
    start = 0  # of the statement at hand
    for place, character in enumerate(text):
        if character == "{":
            head = re.sub(r"<[^<>]*>", "", text[start:place].strip())
            kind = "function"
            if not text[place - 1].isspace() or any(
                brace[0] == "function" for brace in open_braces
            ):
                kind = "braces"  # of an initialiser, or inside a function
            elif _SCOPE.search(head.split("(")[0]) or "(" not in head:
                kind = "scope"
            open_braces.append((kind, start, place))
        elif character == "}" and open_braces:
            kind, began, opened = open_braces.pop()
            if kind == "function":
                first = text.count("\n", 0, opened) + 1
                yield text[began:opened], first, text.count("\n", opened, place) + 1
            elif kind == "braces":
                start = began
                continue
        if character in "{};":
            start = place + 1


def sources() -> list[Path]:
    """List the sources and headers of the core, its bindings, its tests and its fuzzers."""
    return sorted(path for path in ROOT.rglob("*.?pp") if path.suffix in (".cpp", ".hpp"))


def test_functions_are_short() -> None:
    """No function of the core or of its bindings is longer than a screen."""
    long = [
        f"{path.relative_to(ROOT)}:{line}: {lines} lines: {' '.join(head.split())[-60:]}"
        for path in sources()
        for head, line, lines in functions(path.read_text(encoding="utf-8"))
        if lines > LONGEST_FUNCTION and "tests" not in path.parts and "fuzz" not in path.parts
    ]
    assert not long, "\n".join(long)


def test_headers_begin_with_what_they_are_for() -> None:
    """Every header begins with a comment, and guards itself by ``#pragma once``."""
    for path in ROOT.rglob("*.hpp"):
        text = path.read_text(encoding="utf-8")
        assert text.startswith("// "), f"{path}: expected a comment that says what it is for"
        assert "#pragma once" in text, f"{path}: expected #pragma once"


def test_reader_of_functions() -> None:
    """The reader finds functions in classes and namespaces, and not what is inside them."""
    text = """
    namespace a {
    struct B : C {
      int d(int e) const noexcept {  // {
        auto f = [&](int g) {
          return g;
        };
        return f(e);
      }
      int h[2] = {1, 2};
    };
    template <typename T>
    B::B(int i) : k_(i), l_{i} {
    }
    }
    """
    assert [(line, lines) for _, line, lines in functions(text)] == [(4, 6), (13, 2)]


def test_recorded_mutants_are_still_in_the_sources(capsys) -> None:
    """Every change that ``dev.py mutate`` knows by its text has that text once in the sources."""
    assert mutants.main() == 0, capsys.readouterr().out
