"""A pytest plugin that runs tests for mutants: which mutants each test reaches, then whether a test
fails with each mutant. Every test runs in a child process, forked after all imports.

The JSON file that PHAZE_MUTATION_JOB names describes the job; `mutate.py` writes it.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import json
import os
import sys
import time
import zlib
from pathlib import Path

import pytest
from children import in_a_child
from mutants import MOST_MUTANTS, Mutant

JOB = json.loads(Path(os.environ["PHAZE_MUTATION_JOB"]).read_text())


class Kernels:
    """The number of the selected mutant in the extension, and marks of those that were reached."""

    def __init__(self) -> None:
        library = ctypes.CDLL(importlib.import_module("phaze_fast._core").__file__)
        self._chosen = ctypes.c_int.in_dll(library, "phaze_mutant")
        self.reached = (ctypes.c_ubyte * MOST_MUTANTS).in_dll(library, "phaze_reached")

    def choose(self, number: int) -> None:
        self._chosen.value = number


def warm() -> None:
    """Have Numba compile its loop before any child is forked."""
    import numpy as np

    from phaze_fast.memory import STAGE_DTYPE, footprint_batch

    rows = np.zeros(1, dtype=STAGE_DTYPE)
    for name in ("dp", "stages", "micro_batches", "vpp"):
        rows[name] = 1
    footprint_batch(rows)


class Judge:
    def __init__(self) -> None:
        self.mutants = {int(n): Mutant(**m) for n, m in JOB["mutants"].items()}
        self.switch = Kernels() if JOB["compiled"] else builtins.phaze_mutant
        self.failed = False

    def pytest_runtest_logreport(self, report):
        self.failed = self.failed or report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        if JOB.get("jit", True):
            warm()
        known = self.reach_of_tests(items)
        if "results" not in JOB:
            return True
        tests = self.tests_by_mutant(items, known)
        with Path(JOB["results"]).open("a") as results:
            for number in self.mutants:
                row = self.judged(number, tests.get(number, []), items)
                results.write(json.dumps(row) + "\n")
                results.flush()
        return True

    def reach_of_tests(self, items):
        """Seconds of each test, the lines with mutants that it reaches, and a number for its file;
        by name, cached in a file."""
        kept = Path(JOB["reach"])
        known = json.loads(kept.read_text()) if kept.exists() else {}
        contents = {
            path: zlib.crc32(path.read_bytes()) for path in {i.path for i in items.values()}
        }
        for name, item in items.items():
            content = contents[item.path]
            if name not in known or known[name][2] != content:
                known[name] = [*self.reach_of(item), content]
                if len(known) % 100 == 0:
                    kept.write_text(json.dumps(known))
        kept.write_text(json.dumps(known))
        return known

    def tests_by_mutant(self, items, known):
        """(wider, seconds, name) of the tests that reach each mutant: of its own package, of others,
        and last those of recorded answers, which notice most and of which all run; the quickest
        first."""
        found: dict[int, list] = {}
        for name, (seconds, reached, _) in known.items():
            if name not in items:
                continue
            reached = set(reached)
            for number, mutant in self.mutants.items():
                if mutant.place in reached:
                    wider = 0 if name.startswith(JOB["near"][str(number)]) else 1
                    if "/test_recorded_" in name:
                        wider = 2
                    found.setdefault(number, []).append((wider, seconds, name))
        return {number: sorted(tests) for number, tests in found.items()}

    def reach_of(self, item):
        """Seconds of a test, and the lines of mutants that it reaches; none where it fails or takes
        long."""

        def reached():
            begin = time.process_time()
            self.switch.reached[:] = [0] * len(self.switch.reached)
            self.run(item)
            places = {m.place for n, m in self.mutants.items() if self.switch.reached[n]}
            seconds = round(time.process_time() - begin, 3)
            return json.dumps([seconds, [] if self.failed else sorted(places)])

        said, status = in_a_child(reached, cpu=JOB["most_s"])
        return json.loads(said) if status == 0 else [JOB["most_s"], []]

    def run(self, item) -> None:
        sys.stdout.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)

    def judged(self, number, tests, items):
        begin = time.monotonic()
        row = {"number": number, "outcome": "survived", "tests": len(tests)}
        budget_s = JOB["brief_s"] if number in JOB.get("brief", ()) else JOB["budget_s"]
        for wide in range(3):
            chosen, spent = [], 0.0
            for wider, seconds, name in tests:
                if wider == wide and (spent < budget_s or wide == 2):
                    chosen.append(items[name])
                    spent += seconds
            if chosen and self.notices(number, chosen, spent):
                row["outcome"] = "caught"
                break
        return {**row, "seconds": round(time.monotonic() - begin, 2)}

    def notices(self, number, items, seconds) -> bool:
        """Whether a test fails, crashes or does not end."""

        def outcome():
            self.switch.choose(number)
            for item in items:
                self.run(item)
                if self.failed:
                    return "failed"
            return ""

        limits = {"cpu": int(10 + 3 * seconds), "as": 8 << 30, "core": 0}
        said, status = in_a_child(outcome, 120 + 20 * seconds, **limits)
        if said.startswith("raised"):
            raise RuntimeError(f"mutant {number} could not be judged: {said}")
        return status != 0 or said == "failed"


def pytest_configure(config):
    config.pluginmanager.register(Judge(), "phaze-mutants")
