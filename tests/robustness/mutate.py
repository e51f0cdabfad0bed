"""Single changes of the kernels and rules, each built and judged by the tests that should notice.

    python3 dev.py mutate --listed            # the changes in mutants.jsonl
    python3 dev.py mutate --random 20 --seed 3

A copy of the checkout is changed, built and tested; nothing here is touched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).parent / "mutants.jsonl"
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
JUDGES = {
    "cpp/src/cost/": "tests/cost/test_gemm.py tests/cost/test_collectives.py tests/cost/test_rank_groups.py tests/cost/test_cost_values.py tests/cost/test_protocols.py tests/cost/test_full_mesh.py tests/cost/test_costs.py",
    "cpp/src/schedule/": "tests/schedule/test_schedule.py tests/schedule/test_schedule_layers.py",
    "cpp/src/placement/plan": "tests/placement/test_plan_reference.py tests/placement/test_plan_by_hand.py tests/placement/test_plan_memory.py tests/placement/test_plan_best.py tests/placement/test_plan_optimal.py tests/placement/test_plan_bounds.py tests/placement/test_plan_laws.py tests/placement/test_predict.py tests/placement/test_deals.py tests/placement/test_recompute.py tests/search/test_search_steps.py",
    "cpp/src/placement/pipeline": "tests/placement/test_pipeline_schedules.py tests/placement/test_pipeline_simulation.py tests/placement/test_plan_reference.py tests/placement/test_plan_memory.py",
    "cpp/src/placement/memory_rule": "tests/placement/test_plan_memory.py tests/placement/test_plan_reference.py",
    "cpp/src/placement/placement": "tests/placement/test_placement.py tests/placement/test_placement_cases.py tests/placement/test_place_published.py",
    "cpp/src/placement/nest": "tests/placement/test_nest.py",
    "cpp/src/wafer/mesh": "tests/wafer/test_mesh.py tests/wafer/test_mapping.py",
    "cpp/src/wafer/": "tests/wafer/test_mapping.py tests/wafer/test_mapping_bound.py tests/wafer/test_mapping_search.py tests/wafer/test_mapping_input.py tests/wafer/test_wafer_search.py tests/wafer/test_wafer_tiny.py",
    "phaze_fast/memory/": "tests/memory tests/placement/test_plan_memory.py",
    "phaze_fast/search/bounds.py": "tests/search/test_search_steps.py tests/search/test_search_bounds.py",
}  # fmt: skip
"""Tests that judge a change, by the start of the file's path; the first that fits counts."""
CHANGES = [
    (r" <= ", " < "), (r" < ", " <= "), (r" >= ", " > "), (r" > ", " >= "), (r" == ", " != "),
    (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " / "), (r" / ", " * "), (r" \+= ", " -= "),
    (r"std::max\(", "std::min("), (r"std::min\(", "std::max("), (r" && ", " || "),
    (r" \|\| ", " && "), (r"\b1\.0\b", "0.0"), (r"\b2\.0\b", "1.0"), (r" \? (.+) : (.+);", r" ? \2 : \1;"),
]  # fmt: skip
RUN = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]
sys.path.insert(0, {package!r})
import pytest, phaze_fast
assert phaze_fast.__file__.startswith({package!r}), phaze_fast.__file__
sys.exit(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *{tests!r}]))
"""


@dataclass(frozen=True)
class Mutant:
    """One change: what stands in a file, and what is put in its place."""

    path: str
    before: str
    after: str
    tests: str = ""
    at: int | None = None
    """Where in the file; by default the first place."""

    def apply(self, text: str) -> str:
        at = text.index(self.before) if self.at is None else self.at
        return text[:at] + self.after + text[at + len(self.before) :]

    def judges(self) -> list[str]:
        fitting = (tests for start, tests in JUDGES.items() if self.path.startswith(start))
        return (self.tests or next(fitting)).split()

    def __str__(self) -> str:
        return f"{self.path}: {' '.join(self.before.split())[:70]!r} -> {' '.join(self.after.split())[:70]!r}"


class Workshop:
    """A copy of the checkout that is changed, built and tested."""

    def __init__(self, folder: Path) -> None:
        self.source, self.build = folder / "source", folder / "build"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in listed.stdout.splitlines():
            old, new = ROOT / name, self.source / name
            if old.is_file() and not (new.is_file() and new.read_bytes() == old.read_bytes()):
                new.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(old, new)
        if not (self.build / "build.ninja").exists():
            import pybind11

            self._run(
                "cmake", "-S", str(self.source), "-B", str(self.build), "-G", "Ninja",
                "-DCMAKE_BUILD_TYPE=Release", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DPython_EXECUTABLE={sys.executable}",
            )  # fmt: skip
        if not self.built():
            sys.exit("the unchanged core does not build")

    def built(self) -> bool:
        done = self._run("cmake", "--build", str(self.build), "--target", "_core")
        if done.returncode == 0:
            shutil.copyfile(
                self.build / f"_core{SUFFIX}", self.source / "phaze_fast" / f"_core{SUFFIX}"
            )
        return done.returncode == 0

    def passes(self, tests: list[str]) -> bool:
        program = RUN.format(package=str(self.source), tests=tests)
        done = self._run(sys.executable, "-c", program, cwd=self.source)
        if done.returncode > 1 and "assert phaze_fast" in done.stderr:
            sys.exit(done.stderr)
        return done.returncode == 0

    def judge(self, mutant: Mutant) -> str:
        """``caught``, ``survived`` or ``no build``."""
        file = self.source / mutant.path
        text = file.read_text("utf-8")
        compiled = mutant.path.startswith("cpp/")
        file.write_text(mutant.apply(text), "utf-8")
        try:
            if compiled and not self.built():
                return "no build"
            return "survived" if self.passes(mutant.judges()) else "caught"
        except subprocess.TimeoutExpired:
            return "caught"  # by not ending
        finally:
            file.write_text(text, "utf-8")

    @staticmethod
    def _run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, check=False, timeout=900,
            env={**os.environ, "PATH": path},
        )  # fmt: skip


def random_mutants(rng: random.Random, count: int, only: str) -> list[Mutant]:
    """Changes of operators at random places, comments and includes left alone."""
    found = []
    files = [f for start in ("cpp/src", "phaze_fast/memory") for f in (ROOT / start).rglob("*.?p*")]
    for file in sorted(f for f in files if f.suffix in (".cpp", ".hpp")):
        name, at = file.relative_to(ROOT).as_posix(), 0
        for line in file.read_text("utf-8").splitlines(keepends=True):
            code = line.partition("//")[0]
            if not code.lstrip().startswith(("#", "*", "static_assert", "template")):
                for pattern, put in CHANGES:
                    for hit in re.finditer(pattern, code):
                        after = hit.expand(put)
                        found.append(Mutant(name, hit[0], after, at=at + hit.start()))
            at += len(line)
    judged = [m for m in found if only in m.path and any(map(m.path.startswith, JUDGES))]
    return rng.sample(judged, min(count, len(judged)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--listed", action="store_true", help="Those of mutants.jsonl.")
    parser.add_argument("--random", type=int, default=0, help="So many more at random.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="In files whose path has this in it.")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutants")
    asked = parser.parse_args()
    mutants = random_mutants(random.Random(asked.seed), asked.random, asked.only)
    if asked.listed:
        lines = LISTED.read_text("utf-8").splitlines()
        mutants = [Mutant(**json.loads(line)) for line in lines] + mutants
    workshop = Workshop(asked.work.absolute())
    counts = dict.fromkeys(("caught", "survived", "no build"), 0)
    for mutant in mutants:
        outcome = workshop.judge(mutant)
        counts[outcome] += 1
        sys.stdout.write(f"{outcome:9} {mutant}\n")
        sys.stdout.flush()
    workshop.built()
    sys.stdout.write(", ".join(f"{number} {name}" for name, number in counts.items()) + "\n")
    return 1 if counts["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
