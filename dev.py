#!/usr/bin/env python3
"""Every task of this repository, each in a virtual environment that it makes itself.

Usage: python3 dev.py TASK [ARGUMENT...]

It needs Python 3.11 or newer, a C++ compiler and git; everything else it installs into ``.venv``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
LOCK = ROOT / "tools" / "requirements.txt"
"""Versions and hashes that CI installs, where PHAZE_LOCKED=1 asks for them."""
NEWEST_FIRST = ("python3.14", "python3.13", "python3.12", "python3.11")
LEAST = (3, 11)
CORE_TESTS = ("-DPHAZE_BUILD_PYTHON=OFF", "-DPHAZE_BUILD_TESTS=ON")
ON_ALL_CORES = ("-n", "auto", "--dist", "worksteal")


def say(message: str) -> None:
    """Tell the person at the terminal what happens next, on standard error."""
    print(f"== {message}", file=sys.stderr, flush=True)


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    env: Mapping[str, str] = MappingProxyType({}),
    quiet: bool = False,
) -> None:
    """Run a command with the virtual environment's programs first, or leave with its exit code."""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, **env}
    # Compiled files are kept, whatever is usual here: the tests start the program many times.
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"):
        environment.pop(name, None)
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, check=False)
    if done.returncode != 0:
        if not quiet:
            say(f"failed ({done.returncode}): {' '.join(words)}")
        sys.exit(done.returncode)


def use_a_new_enough_python() -> None:
    """Start again under a newer interpreter where this one is too old."""
    if sys.version_info >= LEAST:
        return
    for name in NEWEST_FIRST:
        found = shutil.which(name)
        works = (
            found
            and not subprocess.run(
                [found, "-c", "import venv"], capture_output=True, check=False
            ).returncode
        )
        if found and works:
            os.execv(found, [found, *sys.argv])
    sys.exit(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}")


def make_venv(folder: Path) -> None:
    """Make a virtual environment with pip in it, also where ensurepip was split off."""
    for arguments in (["-m", "venv"], ["-m", "virtualenv", "-q"]):
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, *arguments, str(folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            return
    shutil.rmtree(folder, ignore_errors=True)
    sys.exit(
        "this Python cannot make a virtual environment; install its venv module "
        "(Debian and Ubuntu: apt-get install python3-venv)"
    )


def require_a_compiler() -> None:
    """Stop early, and say so, where nothing can compile the core."""
    wanted = os.environ.get("CXX", "").split()
    if not any(shutil.which(name) for name in (wanted[:1] or ["c++", "g++", "clang++"])):
        sys.exit("a C++ compiler is needed (g++ or clang++, or the one that CXX names)")


def fingerprint() -> str:
    """Hash of everything the installed extension is built from."""
    files = [
        ROOT / "pyproject.toml",
        ROOT / "CMakeLists.txt",
        *sorted((ROOT / "cpp").rglob("*.?pp")),
    ]
    seen = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for file in files:
        seen.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return seen.hexdigest()


def has_pip() -> bool:
    """Whether the virtual environment is whole: an interrupted start may have left half of one."""
    if not PYTHON.exists():
        return False
    asked = subprocess.run(
        [str(PYTHON), "-m", "pip", "--version"], capture_output=True, check=False
    )
    return asked.returncode == 0


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait for another task that is installing into the same folder."""
    try:
        import fcntl
    except ImportError:  # not on this system; nothing to wait for
        yield
        return
    with (ROOT / ".dev.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(extra: str = "dev") -> None:
    """Bring ``.venv`` up to date: quick where nothing changed."""
    with one_at_a_time():
        _install(extra)


def _install(extra: str) -> None:
    stamp = VENV / "phaze-fast.stamp"
    done = stamp.read_text().split() if stamp.exists() else []
    held = done[1:]  # each set of packages holds those before it: run, test, dev
    enough = extra in held or "dev" in held or (extra == "run" and bool(held))
    current = done[:1] == [fingerprint()] and enough
    if current and ((BIN / "phaze-fast").exists() or os.name == "nt"):
        return
    require_a_compiler()
    if not has_pip():
        say("making a virtual environment in .venv")
        make_venv(VENV)
    import tomllib

    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    locked = os.environ.get("PHAZE_LOCKED") == "1" and ("--require-hashes", "-r", LOCK)
    say(f"installing what {'is locked' if locked else 'the build needs'}, from the package index")
    run(*pip, *(locked or (*build, "cmake>=3.20", "ninja>=1.11")))
    say("compiling the C++ core and installing phaze-fast (a minute or two)")
    run(
        *pip,
        "--no-build-isolation",
        "--editable",
        f".[{'plot,trace' if extra == 'run' else extra}]",
    )
    stamp.write_text(f"{fingerprint()} {extra}")


def search(arguments: list[str]) -> None:
    """Search the whole published space for GPT-3's best chip and plan: the main job."""
    install("run")
    words = arguments or ["gpt3-175b", "--schedule", "1f1b", "--zero", "0,1"]
    say(f"phaze-fast search {' '.join(words)}")
    run(BIN / "phaze-fast", "search", *words, cwd=Path.cwd(), quiet=True)


def test(arguments: list[str]) -> None:
    """Run the tests (the quick ones; CI runs the slow ones too)."""
    install("test")
    say("running the tests")
    run(PYTHON, "-m", "pytest", *ON_ALL_CORES, "-m", "not slow", *arguments)


def slow(arguments: list[str]) -> None:
    """Run the slow tests, which only CI does by default; ``--all`` adds the thorough ones."""
    install()
    say("running the slow tests")
    chosen = "slow" if "--all" in arguments else "slow and not thorough"
    words = [word for word in arguments if word != "--all"]
    run(PYTHON, "-m", "pytest", *ON_ALL_CORES, "-m", chosen, "--durations=15", *words)


def fuzz(arguments: list[str]) -> None:
    """Try random files and command lines, or with ``kernels`` random records, on the program."""
    install("test")
    if arguments[:1] == ["kernels"]:
        run(PYTHON, "tools/robustness/fuzz_kernels.py", *arguments[1:])
    else:
        run(PYTHON, "tools/robustness/attack.py", "--only", "commands", *arguments)


def attack(arguments: list[str]) -> None:
    """Check proofs of random problems by independent formulas; ``--minutes M --seed S``."""
    install("test")
    run(PYTHON, "tools/robustness/attack.py", *arguments)


def mutate(arguments: list[str]) -> None:
    """Change the kernels and rules in one place at a time, and see whether tests notice."""
    install("test")
    run(PYTHON, "tools/robustness/mutate.py", *arguments)


def lock(_: list[str]) -> None:
    """Write the versions and hashes that CI installs, from pyproject.toml."""
    install()
    with tempfile.TemporaryDirectory() as name:
        make_venv(Path(name))
        python = Path(name) / PYTHON.relative_to(VENV)
        run(python, "-m", "pip", "install", "-qq", "pip<26", "pip-tools>=7.4")
        run(python, "tools/lock.py")


def sbom(arguments: list[str]) -> None:
    """Write a bill of materials (CycloneDX) of what an installed phaze_fast runs on."""
    install()
    run(PYTHON, "tools/sbom.py", *arguments)


def release(arguments: list[str]) -> None:
    """Go through the check list of a release; ``--all`` with everything that CI runs."""
    install()
    run(PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "auditwheel>=6.0")
    run(PYTHON, "tools/release_check.py", *arguments)


def soak(arguments: list[str]) -> None:
    """Sweep millions of points, killed again and again; ``--points N --kills K --seed S``."""
    install("test")
    run(PYTHON, "tools/robustness/long_run.py", *arguments)


def torch(arguments: list[str]) -> None:
    """Test the PyTorch import, with torch and transformers, which are large and installed here."""
    install()
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    say("installing torch and transformers")
    run(*pip, "torch==2.13.0", "transformers==5.17.0")
    files = [str(file) for file in sorted(Path("tests/models").glob("test_torch*.py"))]
    files.append("tests/models/test_families.py")
    run(PYTHON, "-m", "pytest", "-q", *files, *arguments)


def extras(arguments: list[str]) -> None:
    """Test what needs other packages: Dask, Ray, Optuna, plotly, pyarrow; installed here."""
    install()
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    say("installing distributed, ray, optuna, plotly and pyarrow")
    run(*pip, "distributed", "ray", "optuna", "plotly", "pyarrow")
    run(PYTHON, "-m", "pytest", "-q", "-m", "extras", *arguments)


def lint(_: list[str]) -> None:
    """Check style, types, stubs and C++ format."""
    install()
    folders = (ROOT / "cpp", ROOT / "examples" / "cpp")
    sources = sorted(str(f) for folder in folders for f in folder.rglob("*.?pp"))
    for words in (
        ["-m", "ruff", "check", "."],
        ["-m", "ruff", "format", "--check", "."],
        ["-m", "mypy"],
        [
            "-m",
            "mypy.stubtest",
            "phaze_fast._core",
            "--allowlist",
            "cpp/bindings/stubtest-allow.txt",
        ],
    ):
        say(" ".join(words[1:]))
        run(PYTHON, *words)
    say("clang-format")
    run(BIN / "clang-format", "--dry-run", "--Werror", *sources)


def cpp(_: list[str]) -> None:
    """Test the C++ core without Python, under ASan and UBSan, and from an installed package."""
    install()
    folder = ROOT / "build" / "sanitized"
    build(ROOT, folder, *CORE_TESTS, "-DPHAZE_SANITIZE=ON")
    strict = {"UBSAN_OPTIONS": "print_stacktrace=1", "ASAN_OPTIONS": "detect_leaks=1"}
    run(BIN / "ctest", "--test-dir", folder, "--output-on-failure", env=strict)
    use_the_installed_core()


def threads(_: list[str]) -> None:
    """Test the C++ core under ThreadSanitizer: every batch function from 64 threads at once."""
    install()
    folder = ROOT / "build" / "threads"
    build(ROOT, folder, *CORE_TESTS, "-DPHAZE_SANITIZE_THREADS=ON")
    some = "threads|parallel|plan|layer|nest"
    strict = {"TSAN_OPTIONS": "halt_on_error=1"}
    run(BIN / "ctest", "--test-dir", folder, "--output-on-failure", "-R", some, env=strict)


def platforms(_: list[str]) -> None:
    """Test the C++ core by clang, and on the other architecture by qemu, where those are there."""
    install()
    tried = []
    if shutil.which("clang++"):
        folder = ROOT / "build" / "clang"
        build(ROOT, folder, *CORE_TESTS, "-DCMAKE_CXX_COMPILER=clang++")
        run(BIN / "ctest", "--test-dir", folder, "--output-on-failure")
        tried.append("clang")
    other = "x86_64" if os.uname().machine == "aarch64" else "aarch64"
    compiler, emulator = f"{other}-linux-gnu-g++", f"qemu-{other}"
    if shutil.which(compiler) and shutil.which(emulator):
        folder = ROOT / "build" / other
        cross = ("-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={other}")
        emulated = f"-DCMAKE_CROSSCOMPILING_EMULATOR={emulator};-L;/usr/{other}-linux-gnu"
        build(ROOT, folder, *CORE_TESTS, *cross, f"-DCMAKE_CXX_COMPILER={compiler}", emulated)
        # Running out of memory is not emulated: an emulator takes memory of its own.
        run(BIN / "ctest", "--test-dir", folder, "--output-on-failure", "-E", "out_of_memory")
        tried.append(f"{other}, emulated")
    say(f"tested: {', '.join(tried) or 'nothing; clang++ or a cross compiler and qemu are needed'}")


def build(source: Path, folder: Path, *options: str) -> None:
    """Configure and compile a CMake project."""
    run(BIN / "cmake", "-S", source, "-B", folder, "-G", "Ninja", *options)
    run(BIN / "cmake", "--build", folder)


def use_the_installed_core() -> None:
    """Install the core somewhere, build the example against that, and check what it prints."""
    core = ROOT / "build" / "core"
    build(ROOT, core, "-DPHAZE_BUILD_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=Debug")
    with tempfile.TemporaryDirectory() as name:
        prefix, example = Path(name) / "prefix", Path(name) / "example"
        run(BIN / "cmake", "--install", core, "--prefix", prefix)
        build(ROOT / "examples" / "cpp", example, f"-DCMAKE_PREFIX_PATH={prefix}")
        for program, file in (("all_reduce", "expected.txt"), ("find_plan", "expected_plan.txt")):
            done = subprocess.run([example / program], capture_output=True, text=True, check=False)
            expected = (ROOT / "examples" / "cpp" / file).read_text()
            if done.returncode != 0 or done.stdout != expected:
                sys.exit(f"{program}: expected\n{expected}\nfound\n{done.stdout}{done.stderr}")
    say("the installed core and examples/cpp agree with what is expected")


def bench(arguments: list[str]) -> None:
    """Run the benchmarks, print a table, write JSON; ``--smoke`` runs each once, untimed."""
    install()
    if "--smoke" in arguments:
        run(PYTHON, "-m", "pytest", "bench", "-q", "--benchmark-disable")
        return
    results = ROOT / "bench" / "results"
    results.mkdir(exist_ok=True)
    latest = results / "latest.json"
    quiet = ["-q", "--benchmark-quiet", f"--benchmark-json={latest}"]
    run(PYTHON, "-m", "pytest", "bench", *quiet, *arguments)
    run(PYTHON, "bench/report.py", latest)
    say(f"wrote {latest.relative_to(ROOT)}")


def examples(_: list[str]) -> None:
    """Run every example."""
    install()
    for file in sorted((ROOT / "examples").glob("*.py")):
        say(file.name)
        run(PYTHON, file)


def docs(_: list[str]) -> None:
    """Build the documentation as a site, in build/site; a warning fails."""
    install()
    say("installing what the site needs")
    pip = [PYTHON, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    run(*pip, "mkdocs-material>=9.5", "mkdocstrings-python>=1.10")
    say("building the site")
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    run(PYTHON, "-m", "mkdocs", "build", "--strict", "-q", env=quiet)


def package(_: list[str]) -> None:
    """Build the sdist, a wheel from it, and use the wheel in a clean environment."""
    install()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("building the sdist, and the wheel from the sdist")
        run(PYTHON, "-m", "build", "--outdir", folder / "dist", ".")
        wheel = next((folder / "dist").glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            strangers = [n for n in archive.namelist() if not n.startswith("phaze_fast")]
        if strangers:
            sys.exit(f"{wheel.name} holds what is no part of the package: {strangers}")
        say(f"installing {wheel.name} into a clean environment")
        make_venv(folder / "clean")
        python = folder / "clean" / PYTHON.relative_to(VENV)
        quiet = ["-qq", "--disable-pip-version-check"]
        run(python, "-m", "pip", "install", *quiet, f"{wheel}[test]")
        say("testing what is installed there, away from the checkout")
        shutil.copytree(ROOT / "tests", folder / "tests")
        shutil.copy(ROOT / "pyproject.toml", folder)
        # All of them ran against this code already; these see whether the wheel has all of it.
        parts = ("package/test_boundary", "package/test_import", "memory", "planning/test_plan")
        files = [f"tests/{name}{'.py' * ('/' in name)}" for name in parts]
        run(python, "-m", "pytest", "-q", "-m", "not slow and not checkout", *files, cwd=folder)
        quick = ["bert-large", "--devices", "8", "--global-batch", "64", "--top", "3"]
        run(python.with_name("phaze-fast"), "search", *quick, cwd=folder)


def clean(_: list[str]) -> None:
    """Remove everything that was made here."""
    for name in (".venv", "build", "dist", "bench/results"):
        shutil.rmtree(ROOT / name, ignore_errors=True)


_ORDER = (search, test, slow, fuzz, attack, mutate, soak, extras, torch, lint, cpp, threads)
_REST = (platforms, bench, examples, docs, package, lock, sbom, release, clean)
TASKS = {f.__name__: f for f in (*_ORDER, *_REST)}


def main() -> None:
    """Run the task that the first word names."""
    use_a_new_enough_python()
    words = sys.argv[1:]
    if words and words[0] not in TASKS and not words[0].startswith("-"):
        say(f"no task {words[0]!r}; there are: {', '.join(TASKS)}")
        sys.exit(2)
    if not words or words[0] not in TASKS:
        print((__doc__ or "").strip(), "\n\nTasks:")
        for name, task in TASKS.items():
            print(f"  {name:9} {(task.__doc__ or '').splitlines()[0]}")
        sys.exit(0 if words in ([], ["-h"], ["--help"]) else 2)
    TASKS[words[0]](words[1:])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
