"""Mutation testing of the kernels in C++ and of packages in Python: whether tests notice each change.

    python3 dev.py mutate --cpp 230 --python 10 --seed 1
    python3 dev.py mutate --cpp 0 --python 40 --packages planning,export    # Python alone
    python3 dev.py mutate --seed 1 --survivors      # the mutants that survived the last run
    python3 dev.py mutate --seed 1 --survivors --slow       # judged by the slow tests of CI too

A copy of the checkout contains all mutants at once and is built once; a number selects one. Only
tests that reach the mutated line run, in child processes, the quickest first, up to a budget.
Survivors that change no result are listed, with the reason, in `equivalent.jsonl`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from functools import cache
from pathlib import Path

from mutants import (
    EQUIVALENT,
    PACKAGES,
    ROOT,
    Mutant,
    all_sites,
    chosen,
    entries,
    instrumented,
)  # fmt: skip

HERE = Path(__file__).parent
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
TESTS = ("memory", "hardware", "cost", "planning", "explore", "wafer", "papers", "schedule")
"""Folders of tests for mutants in C++."""
WIDER_TESTS = tuple(
    sorted(path.name for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py")))
)
"""Folders of tests for mutants in any package of Python, after those of the package itself."""
NUMBA = "phaze_fast/memory/kernel.py"
NUMBA_TESTS = ("memory",)
"""Folders of tests for what Numba compiles, run without it."""
RUN = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
sys.path[:0] = [{package!r}, {here!r}]
import builtins, mutants
builtins.phaze_mutant = mutants.Switch()
import pytest, phaze_fast
assert phaze_fast.__file__.startswith({package!r}), phaze_fast.__file__
options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "mutate_judge", "-m", {marks!r}]
sys.exit(pytest.main([*options, *{tests!r}]))
"""


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout=None):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout,
        env={**os.environ, "PATH": path, **(env or {})},
    )  # fmt: skip


class Workshop:
    """A copy of the checkout with every mutant in it, and its build."""

    def __init__(self, folder: Path, mutants: dict[int, Mutant]) -> None:
        self.folder, self.mutants = folder, mutants
        self.source, self.build = folder / "source", folder / "build"
        listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT)
        for name in listed.stdout.splitlines():
            self._put(name, (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"")
        self._put("cpp/include/phaze/mutant.hpp", (HERE / "mutant.hpp").read_bytes())
        self._put("cpp/src/base/mutant.cpp", (HERE / "mutant.cpp").read_bytes())
        cmake = (ROOT / "CMakeLists.txt").read_text()
        first = "cpp/src/base/chip_grid.cpp"
        cmake = cmake.replace(first, f"{first} cpp/src/base/mutant.cpp", 1)
        self._put("CMakeLists.txt", cmake.encode())
        self._instrument()

    def _put(self, name: str, data: bytes) -> None:
        new = self.source / name
        if new.is_file() and new.read_bytes() == data:
            return
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(data)

    def _instrument(self) -> None:
        """Write instrumented sources; drop mutants that do not compile (constants, pointers)."""
        dropped = self._dropped()
        self.instrument_python(without={NUMBA})
        waiting = {m.path for m in self.mutants.values() if m.compiled}
        while waiting:
            path = waiting.pop()
            own = {n: m for n, m in self.mutants.items() if m.path == path and m.key not in dropped}
            text = instrumented((ROOT / path).read_text("utf-8"), own)
            self._put(path, text.encode())
            wrong = self._wrong_lines(path)
            if not wrong:
                continue
            bad = [m for m in own.values() if self._on(text, m, wrong)] or list(own.values())
            dropped |= {m.key for m in bad}
            waiting.add(path)
        (self.folder / "dropped.json").write_text(json.dumps(sorted(dropped)))
        self.mutants = {n: m for n, m in self.mutants.items() if m.key not in dropped}

    def instrument_python(self, without: set[str] = frozenset()) -> None:
        for path in {m.path for m in self.mutants.values() if not m.compiled} - without:
            own = {n: m for n, m in self.mutants.items() if m.path == path}
            self._put(path, instrumented((ROOT / path).read_text("utf-8"), own).encode())

    def _dropped(self) -> set[str]:
        file = self.folder / "dropped.json"
        return set(json.loads(file.read_text())) if file.exists() else set()

    @staticmethod
    def _on(text: str, mutant: Mutant, lines: set[int]) -> bool:
        return any(
            mutant.line <= line - 1 <= mutant.line + mutant.after.count("\n") + 1 for line in lines
        )

    def _wrong_lines(self, path: str) -> set[int]:
        known = self.folder / "compiled.json"
        good = json.loads(known.read_text()) if known.exists() else {}
        text = (self.source / path).read_text("utf-8")
        if good.get(path) == text:
            return set()
        done = run(
            "g++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-Icpp/include", "-Icpp/src", path,
            cwd=self.source,
        )  # fmt: skip
        if done.returncode == 0:
            good[path] = text
            known.write_text(json.dumps(good))
            return set()
        return {int(n) for n in re.findall(re.escape(path) + r":(\d+):", done.stderr)}

    def make(self) -> None:
        if not any(m.compiled for m in self.mutants.values()):
            import phaze_fast._core as core

            self._put(f"phaze_fast/_core{SUFFIX}", Path(core.__file__).read_bytes())
            return
        import pybind11

        done = run(
            "cmake", "-S", str(self.source), "-B", str(self.build), "-G", "Ninja",
            "-DCMAKE_BUILD_TYPE=None", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            "-DCMAKE_CXX_FLAGS=-O1 -w -D_GLIBCXX_ASSERTIONS -fsanitize=bounds "
            "-fsanitize-undefined-trap-on-error", "-DPHAZE_BUILD_TESTS=ON",
            "-DCMAKE_INTERPROCEDURAL_OPTIMIZATION=OFF", f"-DPython_EXECUTABLE={sys.executable}",
        )  # fmt: skip
        if done.returncode != 0:
            sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
        listed = run("ninja", "-C", str(self.build), "-t", "targets", "all").stdout
        skipped = ("test_fuzz", "test_out_of_memory", "test_threads")
        names = sorted(set(re.findall(r"^(test_\w+): CXX_EXECUTABLE", listed, re.M)))
        self._compile(*(name for name in names if name not in skipped))

    def _compile(self, *targets: str) -> None:
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "1")
        done = run("cmake", "--build", str(self.build), "-j", jobs, "--target", *targets)
        if done.returncode != 0:
            sys.exit(done.stdout[-3000:] + done.stderr[-3000:])

    def make_extension(self) -> None:
        """Compile the extension that the tests in Python load."""
        self._compile("_core")
        self._put(f"phaze_fast/_core{SUFFIX}", (self.build / f"_core{SUFFIX}").read_bytes())


class CppTests:
    """The C++ tests: the mutants that each reaches, its seconds, and which fail with a mutant."""

    def __init__(self, workshop: Workshop) -> None:
        self.tests: list[tuple[float, str, set[int]]] = []
        marks = workshop.folder / "reached"
        for file in sorted(workshop.build.glob("test_*")):
            if not os.access(file, os.X_OK):
                continue
            begin = time.monotonic()
            done = run(str(file), env={"PHAZE_REACHED": str(marks)}, timeout=900)
            if done.returncode != 0:
                sys.exit(f"{file.name} fails without any mutant: {done.stdout[-500:]}")
            reached = {n for n, mark in enumerate(marks.read_bytes()) if mark}
            self.tests.append((time.monotonic() - begin, str(file), reached))
        self.tests.sort(key=lambda test: test[0])

    def noticing(self, number: int) -> str:
        for seconds, file, reached in self.tests:
            if number in reached:
                try:
                    env = {"PHAZE_MUTANT": str(number)}
                    if run(file, env=env, timeout=20 + 10 * seconds).returncode == 0:
                        continue
                except subprocess.TimeoutExpired:
                    pass
                return Path(file).name
        return ""


def run_tests_in_python(workshop: Workshop, mutants, name: str, asked, settings):
    """Run `mutate_judge.py` in pytest with a job; its output."""
    job = workshop.folder / f"job-{name}.json"
    job.write_text(json.dumps({
        "compiled": name == "compiled", "jit": name != "numba", "most_s": 60 if asked.slow else 20,
        "mutants": {n: m.to_json() for n, m in mutants.items()}, **settings,
    }))  # fmt: skip
    near = sorted({mutant.package for mutant in mutants.values()})
    tests = {
        "compiled": TESTS, "python": tuple(dict.fromkeys([*near, *asked.tests.split(",")])),
        "numba": NUMBA_TESTS
    }[name]  # fmt: skip
    program = RUN.format(
        package=str(workshop.source),
        here=str(HERE),
        tests=[f"tests/{test}" for test in tests],
        marks="not thorough" if asked.slow else "not slow",
    )
    env = {"PHAZE_MUTATION_JOB": str(job), "PYTHONDONTWRITEBYTECODE": "1"}
    if name == "numba":
        env["NUMBA_DISABLE_JIT"] = "1"
    return run(sys.executable, "-c", program, cwd=workshop.source, env=env)


def reach_of_tests(folder: Path, packages: list[str], asked) -> Path:
    """The lines of some packages in Python that each test reaches: a file that samples of all seeds
    share, until the packages change."""
    sites = dict(enumerate(all_sites(packages, [NUMBA]), 1))
    paths = sorted({mutant.path for mutant in sites.values()})
    content = hashlib.sha256(b"".join((ROOT / path).read_bytes() for path in paths)).hexdigest()
    plain = folder / f"reach-python-{content[:16]}.json"
    file = plain.with_stem(f"{plain.stem}-slow") if asked.slow else plain
    if plain.exists() and not file.exists():  # what is not slow reaches the same lines
        file.write_bytes(plain.read_bytes())
    workshop = Workshop(folder / "reach", sites)
    workshop.make()
    done = run_tests_in_python(workshop, sites, "python", asked, {"reach": str(file)})
    if not file.exists() or done.returncode != 0:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return file


def judge_in_python(workshop: Workshop, mutants: dict[int, Mutant], name: str, reach: Path, asked):
    """Outcomes by number, from tests written in Python."""
    if not mutants:
        return {}
    results = workshop.folder / f"results-{name}.jsonl"
    results.write_text("")
    settings = {
        "reach": str(reach),
        "budget_s": 90 if asked.slow else 40 if name == "compiled" else 15,
        "near": {n: "" if m.compiled else f"tests/{m.package}/" for n, m in mutants.items()},
        "results": str(results),
        "brief": [n for n, m in mutants.items() if reason(m)],
        "brief_s": 4,
    }
    done = run_tests_in_python(workshop, mutants, name, asked, settings)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    if len(rows) != len(mutants):
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return {row["number"]: row for row in rows}


def judged(workshop: Workshop, mutants: dict[int, Mutant], key: str, asked):
    """Outcomes by number, in parts: from C++ tests, then from those in Python."""
    compiled = {n: m for n, m in mutants.items() if m.compiled}
    found: dict[int, dict] = {}
    if compiled:
        cpp = CppTests(workshop)
        names = {number: cpp.noticing(number) for number in compiled}
        found = {n: {"outcome": "caught", "by": name} for n, name in names.items() if name}
        say(f"{len(found)} of {len(compiled)} caught by the C++ tests")
        yield found
    left = {n: m for n, m in compiled.items() if n not in found}
    for mutant in left.values():
        say(f"not by C++ tests: {mutant}  [{mutant.text}]")
    if left:
        workshop.make_extension()

    def reach(part: str) -> Path:
        return workshop.folder / f"reach-{part}-{key}.json"

    yield judge_in_python(workshop, left, "compiled", reach("compiled"), asked)
    numba = {n: m for n, m in mutants.items() if m.path == NUMBA}
    python = {n: m for n, m in mutants.items() if not m.compiled and m.path != NUMBA}
    if python:
        packages = sorted({m.package for m in python.values()})
        lines = reach_of_tests(workshop.folder, packages, asked)
        yield judge_in_python(workshop, python, "python", lines, asked)
    workshop.instrument_python()  # what Numba compiles too: now it is switched off
    yield judge_in_python(workshop, numba, "numba", reach("numba"), asked)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cpp", type=int, default=230, help="Number of random mutants in C++.")
    parser.add_argument(
        "--python", type=int, default=10, help="Number of random mutants in each Python package."
    )
    parser.add_argument(
        "--packages", default=",".join(PACKAGES), help="Packages of Python, between commas."
    )
    parser.add_argument(
        "--tests", default=",".join(WIDER_TESTS),
        help="Folders of tests for mutants in Python, besides those of their packages.",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="In files whose path contains this.")
    parser.add_argument("--survivors", action="store_true", help="The survivors of the last run.")
    parser.add_argument("--slow", action="store_true", help="Run the slow tests too.")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutants")
    asked = parser.parse_args()
    packages = asked.packages.split(",")
    sample = chosen(asked.cpp, asked.python, asked.seed, packages, asked.only)
    mutants = dict(enumerate(sample, 1))
    folder = asked.work.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(folder, mutants)
    mutants = workshop.mutants
    say(f"{len(mutants)} mutants compile; building")
    workshop.make()
    kept = folder / "outcomes.json"
    before = json.loads(kept.read_text()) if kept.exists() else {}
    outcomes = {m.key: before[m.key] for m in mutants.values() if m.key in before}
    wanted = mutants
    if asked.survivors:
        wanted = {n: m for n, m in mutants.items() if before.get(m.key) != "caught"}
    key = f"{asked.seed}-{asked.cpp}-{asked.python}-{'-'.join(packages)}{'-slow' * asked.slow}"
    for rows in judged(workshop, wanted, key, asked):
        outcomes |= {mutants[n].key: row["outcome"] for n, row in rows.items()}
        kept.write_text(json.dumps(outcomes, indent=1))
    return report(list(mutants.values()), outcomes)


def reason(mutant: Mutant) -> str:
    """Why a mutant changes no result, where that is known."""
    return _reasons().get((mutant.text, mutant.before, mutant.after), "")


@cache
def _reasons() -> dict[tuple[str, ...], str]:
    return {(e["line"], e["before"], e["after"]): e["why"] for e in entries(EQUIVALENT)}


def report(mutants: list[Mutant], outcomes: dict[str, str]) -> int:
    """Print survivors, those without a known reason last, and the figures."""
    survivors = [m for m in mutants if outcomes[m.key] != "caught"]
    why = {m: reason(m) for m in mutants}
    for mutant in sorted(survivors, key=lambda m: not why[m]):
        say(
            f"{'equivalent' if why[mutant] else 'survived'} {mutant}  [{mutant.text}] {why[mutant]}"
        )
    for mutant in mutants:
        if why[mutant] and outcomes[mutant.key] == "caught":
            say(f"caught, though {EQUIVALENT.name} calls it equivalent: {mutant}")
    for name in (*sorted({m.package for m in mutants}), "all"):
        group = [m for m in mutants if name in (m.package, "all")]
        caught = sum(outcomes[m.key] == "caught" for m in group)
        equal = sum(bool(why[m]) and outcomes[m.key] != "caught" for m in group)
        say(
            f"{name}: {len(group)} mutants, {caught} caught, {equal} equivalent, "
            f"{len(group) - caught - equal} survived; {caught / max(1, len(group) - equal):.1%} of "
            "those not equivalent are caught"
        )
    return 1 if any(not why[m] for m in survivors) else 0


if __name__ == "__main__":
    sys.exit(main())
