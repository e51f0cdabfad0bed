"""A pytest plugin that runs tests for mutants: which mutants each test reaches, then whether a test
fails with each mutant. Every test runs in a child process, forked after all imports.

The JSON file that PHAZE_MUTATION_JOB names describes the job; `mutate.py` writes it.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from types import CodeType

import pytest
from mutants import Mutant, changed_node, function_nodes

SIZE = 4096
JOB = json.loads(Path(os.environ["PHAZE_MUTATION_JOB"]).read_text())
SOURCE = Path(JOB["source"])


class Kernels:
    """The selected mutant, and the mutants that were reached, inside the extension."""

    def __init__(self) -> None:
        import phaze_fast._core as core

        library = ctypes.CDLL(core.__file__)
        self.chosen = ctypes.c_int.in_dll(library, "phaze_mutant")
        self.reached = (ctypes.c_ubyte * SIZE).in_dll(library, "phaze_reached")


def warm() -> None:
    """Have Numba compile its kernels before any child is forked, by a plan of a model that no test
    uses, so that no test finds a cached result of it."""
    import phaze_fast as pf

    odd = {"layers": 3, "hidden": 80, "heads": 5, "ffn": 112, "vocab": 77, "seq": 48}
    model = pf.TransformerModel(name="odd", positions="rotary", **odd)
    pf.plan(
        model, pf.Cluster(devices=2, fabric="dgx-h100", chip="h100"), pf.Training(global_batch=6)
    )


class Lines:
    """Mutated lines that Python runs. A function is traced until all of its lines were seen."""

    def __init__(self, places: set[tuple[str, int]]) -> None:
        self.places, self.seen = places, set()
        self.files = {file for file, _ in places}
        self.waiting: dict[CodeType, set[tuple[str, int]]] = {}

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if code.co_filename not in self.files:
            return None
        if code not in self.waiting:
            own = {(code.co_filename, line) for _, _, line in code.co_lines()}
            self.waiting[code] = own & self.places
        return self._line if self.waiting[code] else None

    def _line(self, frame, event, arg):
        place, waiting = (frame.f_code.co_filename, frame.f_lineno), self.waiting[frame.f_code]
        if place in waiting:
            waiting.remove(place)
            self.seen.add(place)
        return self._line if waiting else None


def changed_tree(mutant: Mutant) -> ast.Module:
    text = (SOURCE / mutant.path).read_text("utf-8")
    if mutant.listed:
        return ast.parse(text.replace(mutant.before, mutant.after))
    tree = ast.parse(text)
    assert changed_node(function_nodes(tree)[mutant.edits[0][0]])
    return tree


def codes_of(code: CodeType):
    """Code objects of the functions and classes of a module, by qualified name."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part.co_qualname, part
            yield from codes_of(part)


def change_python(mutant: Mutant) -> None:
    """Replace the code of every function of the module by that of the mutated source."""
    name = mutant.path.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    codes = dict(codes_of(compile(changed_tree(mutant), module.__file__, "exec")))
    owners = [module, *(c for c in vars(module).values() if isinstance(c, type))]
    for owner in owners:
        if getattr(owner, "__module__", name) != name:
            continue
        for value in list(vars(owner).values()):
            function = getattr(value, "fget", None) or getattr(value, "func", value)
            function = getattr(function, "__func__", function)
            function = getattr(function, "__wrapped__", function)
            known = codes.get(getattr(function, "__qualname__", ""))
            if known is not None and hasattr(function, "__code__"):
                function.__code__ = known


def lines_of(mutant: Mutant) -> set[tuple[str, int]]:
    return {(mutant.path, mutant.line + n) for n in range(mutant.before.count("\n") + 1)}


class Judge:
    def __init__(self) -> None:
        self.mutants = {int(n): Mutant(**m) for n, m in JOB["mutants"].items()}
        self.compiled = JOB["compiled"]
        self.failed = False

    def pytest_runtest_logreport(self, report):
        self.failed = self.failed or report.failed

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        if JOB.get("jit", True):
            warm()
        tests = self.tests_by_mutant(items)
        with Path(JOB["results"]).open("a") as results:
            for number in self.mutants:
                row = self.judged(number, tests.get(number, []), items)
                results.write(json.dumps(row) + "\n")
                results.flush()
        return True

    def tests_by_mutant(self, items):
        """Tests that reach each mutant, the quickest first; cached in a file."""
        kept = Path(JOB["reach"])
        known = json.loads(kept.read_text()) if kept.exists() else {}
        for name, item in items.items():
            if name not in known:
                known[name] = self.reach_of(item)
                if len(known) % 20 == 0:
                    kept.write_text(json.dumps(known))
        kept.write_text(json.dumps(known))
        found: dict[int, list] = {}
        for name, (seconds, reached) in known.items():
            if name not in items:
                continue
            places = set(reached if self.compiled else map(tuple, reached))
            for number, mutant in self.mutants.items():
                if mutant.key in places if self.compiled else places & lines_of(mutant):
                    found.setdefault(number, []).append((seconds, name))
        return {number: sorted(tests) for number, tests in found.items()}

    def places(self) -> set[tuple[str, int]]:
        return {place for mutant in self.mutants.values() for place in lines_of(mutant)}

    def reach_of(self, item):
        """Seconds of a test, and mutants (or lines) that it reaches; none where it takes long."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (JOB["most_s"], JOB["most_s"]))
            begin = time.process_time()
            if self.compiled:
                kernels = Kernels()
                ctypes.memset(kernels.reached, 0, SIZE)
            else:
                lines = Lines({(str(SOURCE / f), n) for f, n in self.places()})
                sys.settrace(lines)
            self.run(item)
            sys.settrace(None)
            if self.compiled:
                reached = [m.key for n, m in self.mutants.items() if kernels.reached[n]]
            else:
                reached = [(str(Path(f).relative_to(SOURCE)), n) for f, n in lines.seen]
            row = [time.process_time() - begin, [] if self.failed else reached]
            with os.fdopen(writing, "w") as pipe:
                json.dump(row, pipe)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            said = pipe.read()
        os.waitpid(child, 0)
        return json.loads(said) if said else [JOB["most_s"], []]

    def run(self, item) -> None:
        sys.stdout.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)

    def judged(self, number, tests, items):
        begin, spent = time.monotonic(), 0.0
        row = {"number": number, "outcome": "survived", "tests": len(tests)}
        chosen = []
        budget_s = JOB["brief_s"] if number in JOB.get("brief", ()) else JOB["budget_s"]
        for seconds, name in tests:
            if spent < budget_s:
                chosen.append(name)
                spent += seconds
        if chosen and self.notices(number, [items[name] for name in chosen], spent):
            row["outcome"] = "caught"
        return {**row, "seconds": round(time.monotonic() - begin, 2)}

    def notices(self, number, items, seconds) -> bool:
        """Whether a test fails, crashes or does not end."""
        child = os.fork()
        if child == 0:
            limit = int(20 + 6 * seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = 3
            try:
                if self.compiled:
                    Kernels().chosen.value = number
                else:
                    change_python(self.mutants[number])
                for item in items:
                    self.run(item)
                    if self.failed:
                        break
                code = 1 if self.failed else 0
            except BaseException:
                code = 4
            os._exit(code)
        deadline = time.monotonic() + 120 + 20 * seconds
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > deadline:
                os.kill(child, 9)
            time.sleep(0.005)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) in (3, 4):
            raise RuntimeError(f"mutant {number} could not be judged")
        return status != 0


def pytest_configure(config):
    config.pluginmanager.register(Judge(), "phaze-mutants")
